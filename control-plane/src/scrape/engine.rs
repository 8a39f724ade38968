//! Metric names by engine: a built-in table, and the configuration that adds to it.
//!
//! An endpoint names its engine by the label [`ENGINE_LABEL`] (or the older
//! [`ENGINE_LABEL_OLDER`]). Without a label, the endpoint has the default engine. A meaning, such
//! as the queue depth, has several metric names in order of preference, newest first. The first
//! name found on a page is used. The scale of KV-cache utilization is configured, because it cannot
//! be guessed from a value: 0.5 may be half full or half a per cent. A configured engine replaces
//! the built-in engine with the same name. The format of a configured engine is that of
//! `engineConfigs` of llm-d's `core-metrics-extractor`.

mod built_in;
mod config;

use std::collections::HashMap;
use std::sync::Arc;

use scheduler::metrics::MetricDefinition;

use self::built_in::{BuiltInEngine, TABLE};
pub use self::config::{CustomMetric, EngineConfig};
use super::metric_spec::{InvalidMetricSpec, MetricSpec};

/// The endpoint label that names the engine.
pub const ENGINE_LABEL: &str = "llm-d.ai/engine-type";

/// The former name of [`ENGINE_LABEL`].
pub const ENGINE_LABEL_OLDER: &str = "inference.networking.k8s.io/engine-type";

/// The engine of an endpoint without a label.
pub const DEFAULT_ENGINE: &str = "vllm";

/// The longest key of a custom metric, in bytes. The key is sent with the value of every endpoint.
pub const KEY_BYTES_MAX: usize = 128;

/// The maximum number of metrics of one engine. Each metric is one bit of a [`FamilySet`].
pub const METRICS_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricMeaning {
    /// A number that the scheduler uses. The definition of the number says how several series
    /// become one number.
    Number(&'static MetricDefinition),
    /// The LoRA adapters, in labels of a series. The value of the series is a timestamp, and the
    /// newest series is used.
    Lora,
    /// The start of the process, in Unix seconds. If there are several series, the latest start is
    /// used.
    ProcessStart,
    /// A counter, which only grows while the engine runs. The values of several series are added.
    Counter,
    /// The prompt tokens of all requests, a counter. The values of several series are added.
    PromptTokens,
    /// The prompt tokens that the engine had in its prefix cache, a counter like
    /// [`Self::PromptTokens`].
    CachedTokens,
    /// A configured metric, by its position in the sorted keys. If there are several series, the
    /// last series is used.
    Custom(usize),
}

/// A set of positions in [`EngineSpec::metrics`], one bit each.
pub(super) type FamilySet = u64;

#[derive(Clone, Debug)]
pub(super) struct EngineMetric {
    pub(super) meaning: MetricMeaning,
    pub(super) spec: MetricSpec,
    /// The label from which the value is read. `None` means the value of the sample.
    pub(super) label: Option<Box<str>>,
}

/// The metrics that are read from the page of one engine.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// The name of the engine, as in the endpoint label.
    pub name: Box<str>,
    /// The path of the engine's metrics, unless the endpoint sets another path.
    pub metrics_path: &'static str,
    /// The port of the metrics, if it is not the port for requests.
    pub metrics_port: Option<u16>,
    pub(super) kv_scale: f64,
    pub(super) shard_labels: &'static [&'static str],
    pub(super) part_label: Option<&'static str>,
    /// The metrics of the engine. Metrics with the same meaning are in order of preference.
    pub(super) metrics: Vec<EngineMetric>,
    /// The sorted keys of custom metrics; [`MetricMeaning::Custom`] is an index into them.
    pub(super) custom_keys: Vec<Box<str>>,
}

/// All known engines, built in and configured.
#[derive(Clone, Debug)]
pub struct EngineTable {
    by_name: HashMap<Box<str>, Arc<EngineSpec>>,
    default: Arc<EngineSpec>,
    label: Box<str>,
}

/// The reason why a configured engine was refused. The configuration has to change.
#[derive(Debug, thiserror::Error)]
pub enum InvalidEngine {
    /// `name` is missing or reserved.
    #[error("engineConfigs: the name {0:?} is empty or reserved")]
    Name(String),
    /// Two engines have the same name.
    #[error("engineConfigs: engine {0:?} is defined twice")]
    Duplicate(String),
    #[error("engineConfigs: engine {engine:?}: {field}: {source}")]
    Spec {
        engine: String,
        /// The field as written in the configuration.
        field: &'static str,
        /// The error in the metric spec.
        source: InvalidMetricSpec,
    },
    /// The scale is not a positive number.
    #[error("engineConfigs: engine {0:?}: kvUsageScale must be a positive number")]
    Scale(String),
    /// There are more than [`METRICS_MAX`] metrics.
    #[error("engineConfigs: engine {0:?}: more than {METRICS_MAX} metrics")]
    TooManyMetrics(String),
    /// The key of a custom metric is empty, too long or given twice.
    #[error(
        "engineConfigs: engine {engine:?}: customMetrics: the key {key:?} is empty, longer than {KEY_BYTES_MAX} bytes, or given twice"
    )]
    Key { engine: String, key: String },
    /// `defaultEngine` names no engine.
    #[error("defaultEngine {0:?} is neither built in nor in engineConfigs")]
    UnknownDefault(String),
}

/// The metric with the start time of the process. Every process with a Prometheus client library
/// reports this metric, except Python in multi-process mode (SGLang, vLLM with several API
/// servers).
const PROCESS_START: &str = "process_start_time_seconds";

impl EngineTable {
    /// Creates the table of the built-in engines and those of the configuration. Empty
    /// `default_engine` and `label` mean [`DEFAULT_ENGINE`] and [`ENGINE_LABEL`].
    ///
    /// # Errors
    /// Returns [`InvalidEngine`], which names the engine and the field.
    pub fn try_new(
        configs: &[EngineConfig],
        default_engine: &str,
        label: &str,
    ) -> Result<Self, InvalidEngine> {
        let mut configured: HashMap<Box<str>, Arc<EngineSpec>> = HashMap::new();
        for config in configs {
            let spec = config.spec()?;
            if configured
                .insert(spec.name.clone(), Arc::new(spec))
                .is_some()
            {
                return Err(InvalidEngine::Duplicate(config.name.clone()));
            }
        }
        let mut by_name = HashMap::new();
        for row in TABLE {
            by_name.insert(row.name.into(), Arc::new(row.spec()?));
        }
        by_name.extend(configured);
        let wanted = if default_engine.is_empty() {
            DEFAULT_ENGINE
        } else {
            default_engine
        };
        let default = by_name
            .get(wanted)
            .cloned()
            .ok_or_else(|| InvalidEngine::UnknownDefault(wanted.into()))?;
        Ok(Self {
            by_name,
            default,
            label: if label.is_empty() {
                ENGINE_LABEL
            } else {
                label
            }
            .into(),
        })
    }

    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<EngineSpec>> {
        self.by_name.get(name)
    }

    /// Returns all engines, sorted by name.
    #[must_use]
    pub fn all(&self) -> Vec<&Arc<EngineSpec>> {
        let mut all: Vec<_> = self.by_name.values().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Returns the engine of an endpoint with these labels. A label with an unknown engine is
    /// ignored.
    #[must_use]
    pub fn of_labels(&self, labels: &[(Box<str>, Box<str>)]) -> Arc<EngineSpec> {
        let value = |key: &str| labels.iter().find(|(k, _)| &**k == key).map(|(_, v)| &**v);
        let named = value(&self.label)
            .or_else(|| value(ENGINE_LABEL_OLDER))
            .and_then(|name| self.get(name));
        Arc::clone(named.unwrap_or(&self.default))
    }
}

impl EngineSpec {
    /// Returns the series names to request, each once.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self
            .metrics
            .iter()
            .map(|metric| metric.spec.name())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Returns each meaning with its series names. Names with the same meaning are in order of
    /// preference.
    pub fn looked_for(&self) -> impl Iterator<Item = (MetricMeaning, &str)> {
        self.metrics
            .iter()
            .map(|metric| (metric.meaning, metric.spec.name()))
    }
}

/// Collects the metrics of one engine; its errors name the field.
struct EngineSpecBuilder<'a> {
    engine: &'a str,
    metrics: Vec<EngineMetric>,
}

impl<'a> EngineSpecBuilder<'a> {
    fn new(engine: &'a str) -> Self {
        Self {
            engine,
            metrics: Vec::new(),
        }
    }

    fn push(
        &mut self,
        field: &'static str,
        meaning: MetricMeaning,
        spec: &str,
        label: Option<&str>,
    ) -> Result<(), InvalidEngine> {
        if spec.trim().is_empty() {
            return Ok(());
        }
        let spec = MetricSpec::parse(spec).map_err(|source| InvalidEngine::Spec {
            engine: self.engine.into(),
            field,
            source,
        })?;
        self.metrics.push(EngineMetric {
            meaning,
            spec,
            label: label.map(Into::into),
        });
        Ok(())
    }

    fn build(
        self,
        row: Option<&BuiltInEngine>,
        kv_scale: f64,
        custom_keys: Vec<Box<str>>,
    ) -> Result<EngineSpec, InvalidEngine> {
        if self.metrics.len() > METRICS_MAX {
            return Err(InvalidEngine::TooManyMetrics(self.engine.into()));
        }
        Ok(EngineSpec {
            name: self.engine.into(),
            metrics_path: row.map_or("/metrics", |row| row.metrics_path),
            metrics_port: row.and_then(|row| row.metrics_port),
            kv_scale,
            shard_labels: row.map_or(&[], |row| row.shard_labels),
            part_label: row.and_then(|row| row.part_label),
            metrics: self.metrics,
            custom_keys,
        })
    }
}

#[cfg(test)]
mod tests;
