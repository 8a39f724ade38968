//! Metric names by engine: a built-in table, and the configuration that adds to it.
//!
//! The engine of an endpoint comes from its label [`ENGINE_LABEL`] (or the older
//! [`ENGINE_LABEL_OLDER`]), else it is the default engine. A meaning has its names in order of
//! preference, newest first; the first one on a page is used. The scale of KV-cache utilization is
//! a column of the table, because it cannot be guessed from a value: 0.5 may be half full or half a
//! per cent. A configured engine replaces the built-in one of the same name. The format is that of
//! `engineConfigs` of llm-d's `core-metrics-extractor`.

use std::collections::HashMap;
use std::sync::Arc;

use scheduler::metrics::{
    KV_BLOCK_TOKENS, KV_BLOCKS, KV_CACHE_UTILIZATION, MetricDefinition, QUEUE_DEPTH,
    RUNNING_REQUESTS,
};
use serde::Deserialize;

use super::metric_spec::{InvalidMetricSpec, MetricSpec};

/// Endpoint label that names the engine.
pub const ENGINE_LABEL: &str = "llm-d.ai/engine-type";

/// The former name of the label.
pub const ENGINE_LABEL_OLDER: &str = "inference.networking.k8s.io/engine-type";

/// Engine of an endpoint without a label.
pub const DEFAULT_ENGINE: &str = "vllm";

/// The longest key of a custom metric, in bytes. The key is sent with the value of every endpoint.
pub const KEY_BYTES_MAX: usize = 128;

/// The most metrics of one engine: each is one bit of a [`FamilySet`].
pub const METRICS_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricMeaning {
    /// A number of the scheduler's table. Its definition says how several series become one number.
    Number(&'static MetricDefinition),
    /// LoRA adapters, in labels. The value is a time stamp; the newest series counts.
    Lora,
    /// Start of the process, in Unix seconds. Of several series the newest counts.
    ProcessStart,
    /// A counter, which only grows while the engine runs. Several series are added.
    Counter,
    /// A configured metric, by its position. Of several series the last counts.
    Custom(usize),
}

/// A set of positions in [`EngineSpec::metrics`], one bit each.
pub(super) type FamilySet = u64;

#[derive(Clone, Debug)]
pub(super) struct EngineMetric {
    pub(super) meaning: MetricMeaning,
    pub(super) spec: MetricSpec,
    /// The label to read the value from; `None`: the value of the sample.
    pub(super) label: Option<Box<str>>,
}

/// The metrics that are read from the page of one engine.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// Name of the engine, as in the endpoint label.
    pub name: Box<str>,
    /// Path of the engine's metrics, unless the endpoint sets another.
    pub metrics_path: &'static str,
    /// Port of the metrics, if it is not the port for requests.
    pub metrics_port: Option<u16>,
    pub(super) kv_scale: f64,
    pub(super) shard_labels: &'static [&'static str],
    pub(super) part_label: Option<&'static str>,
    /// Metrics of one meaning are in order of preference.
    pub(super) metrics: Vec<EngineMetric>,
    /// Sorted keys; [`MetricMeaning::Custom`] is an index into them.
    pub(super) custom_keys: Vec<Box<str>>,
}

/// All known engines, built in and configured.
#[derive(Clone, Debug)]
pub struct EngineTable {
    by_name: HashMap<Box<str>, Arc<EngineSpec>>,
    default: Arc<EngineSpec>,
    label: Box<str>,
}

/// Metric names of one engine as users configure them: `engineConfigs[]` of llm-d's
/// `core-metrics-extractor`, plus a scale. A spec has the form `metric` or `metric{label=value}`;
/// an empty spec means that the engine does not report the metric.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineConfig {
    /// The engine, as in the endpoint label.
    pub name: String,
    /// Requests waiting.
    #[serde(default)]
    pub queued_requests_spec: String,
    #[serde(default)]
    pub running_requests_spec: String,
    /// KV-cache utilisation.
    #[serde(default)]
    pub kv_usage_spec: String,
    /// The factor that scales the KV-cache utilization to 0..1: 1 by default, 0.01 for a metric in
    /// per cent. llm-d has no such setting.
    #[serde(default)]
    pub kv_usage_scale: Option<f64>,
    /// LoRA adapters: labels `running_lora_adapters`, `waiting_lora_adapters`, `max_lora`.
    #[serde(default, rename = "loraSpec")]
    pub lora_spec: String,
    /// The cache configuration as labels of a series.
    #[serde(default)]
    pub cache_info_spec: String,
    /// Label of `cacheInfoSpec` with the tokens of a block; `block_size` by default.
    #[serde(default)]
    pub cache_block_size_label_name: String,
    /// Label of `cacheInfoSpec` with the number of blocks; `num_gpu_blocks` by default.
    #[serde(default)]
    pub cache_num_blocks_label_name: String,
    /// Tokens of a block as the value of a series.
    #[serde(default)]
    pub cache_block_size_spec: String,
    /// Number of blocks as the value of a series.
    #[serde(default)]
    pub cache_num_blocks_spec: String,
    /// More scalars, sent to proxies under their keys.
    #[serde(default)]
    pub custom_metrics: Vec<CustomMetric>,
}

/// A scalar that is sent to proxies under a key.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CustomMetric {
    pub attribute_key: String,
    pub metric_spec: String,
}

impl EngineConfig {
    /// The names of the fields in the configuration.
    pub const FIELDS: [&str; 12] = [
        "name",
        "queuedRequestsSpec",
        "runningRequestsSpec",
        "kvUsageSpec",
        "kvUsageScale",
        "loraSpec",
        "cacheInfoSpec",
        "cacheBlockSizeLabelName",
        "cacheNumBlocksLabelName",
        "cacheBlockSizeSpec",
        "cacheNumBlocksSpec",
        "customMetrics",
    ];
}

impl CustomMetric {
    /// The names of the fields in the configuration.
    pub const FIELDS: [&str; 2] = ["attributeKey", "metricSpec"];
}

/// Why a configured engine was refused. The configuration has to change.
#[derive(Debug, thiserror::Error)]
pub enum InvalidEngine {
    /// `name` is missing or reserved.
    #[error("engineConfigs: the name {0:?} is empty or reserved")]
    Name(String),
    /// Two engines have one name.
    #[error("engineConfigs: engine {0:?} is defined twice")]
    Duplicate(String),
    #[error("engineConfigs: engine {engine:?}: {field}: {source}")]
    Spec {
        engine: String,
        /// The field as written in the configuration.
        field: &'static str,
        /// The error in the spec.
        source: InvalidMetricSpec,
    },
    /// The scale is not a positive number.
    #[error("engineConfigs: engine {0:?}: kvUsageScale must be a positive number")]
    Scale(String),
    /// More than [`METRICS_MAX`] metrics.
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

/// Where a built-in number comes from.
enum BuiltInSource {
    /// The value of a series.
    Value(&'static str),
    /// A label of a series: series, label.
    Label(&'static str, &'static str),
}
use BuiltInSource::{Label, Value};

struct BuiltInEngine {
    name: &'static str,
    metrics_path: &'static str,
    metrics_port: Option<u16>,
    /// Series with equal values of these labels belong to the same scheduler (each tensor-parallel
    /// rank reports it) and count once, by their largest value. Empty: each series counts by
    /// itself.
    shard_labels: &'static [&'static str],
    /// A series where this label is not empty is a part of the series where it is empty, and is not
    /// counted again.
    part_label: Option<&'static str>,
    kv_scale: f64,
    /// The sources of each number, in order of preference. Numbers that are not listed are unknown.
    numbers: &'static [(&'static MetricDefinition, &'static [BuiltInSource])],
    lora: &'static [&'static str],
    counters: &'static [&'static str],
}

/// The names were verified in the engines' sources: vLLM v1 `vllm/v1/metrics/loggers.py`
/// (data-parallel ranks as label `engine`) and v0 `engine/metrics.py`; SGLang
/// `observability/metrics_collector.py` (`priority=""` is the total, ranks in labels); TensorRT-LLM
/// `metrics/collector.py`, mounted by `serve/openai_server.py` at `/prometheus/metrics` (`/metrics`
/// is JSON there); Triton's documentation. All of them report KV-cache utilization from 0 to 1,
/// also vLLM's `_perc`.
const TABLE: &[BuiltInEngine] = &[
    BuiltInEngine {
        name: "vllm",
        metrics_path: "/metrics",
        metrics_port: None,
        shard_labels: &[],
        part_label: None,
        kv_scale: 1.0,
        numbers: &[
            (&QUEUE_DEPTH, &[Value("vllm:num_requests_waiting")]),
            (&RUNNING_REQUESTS, &[Value("vllm:num_requests_running")]),
            (
                &KV_CACHE_UTILIZATION,
                &[
                    Value("vllm:kv_cache_usage_perc"),
                    Value("vllm:gpu_cache_usage_perc"),
                ],
            ), // renamed in 0.9
            (
                &KV_BLOCK_TOKENS,
                &[Label("vllm:cache_config_info", "block_size")],
            ),
            (
                &KV_BLOCKS,
                &[Label("vllm:cache_config_info", "num_gpu_blocks")],
            ),
        ],
        lora: &["vllm:lora_requests_info"],
        counters: &["vllm:generation_tokens_total", "vllm:prompt_tokens_total"],
    },
    BuiltInEngine {
        name: "sglang",
        metrics_path: "/metrics",
        metrics_port: None,
        shard_labels: &["dp_rank", "dp"],
        part_label: Some("priority"),
        kv_scale: 1.0,
        numbers: &[
            (&QUEUE_DEPTH, &[Value("sglang:num_queue_reqs")]),
            (&RUNNING_REQUESTS, &[Value("sglang:num_running_reqs")]),
            (&KV_CACHE_UTILIZATION, &[Value("sglang:token_usage")]),
            (
                &KV_BLOCK_TOKENS,
                &[
                    Value("sglang:page_size"),
                    Label("sglang:cache_config_info", "page_size"),
                ],
            ), // a gauge since 0.5.11
            (
                &KV_BLOCKS,
                &[
                    Value("sglang:num_pages"),
                    Label("sglang:cache_config_info", "num_pages"),
                ],
            ),
        ],
        lora: &[],
        counters: &[
            "sglang:generation_tokens_total",
            "sglang:prompt_tokens_total",
        ],
    },
    BuiltInEngine {
        name: "trtllm-serve",
        metrics_path: "/prometheus/metrics",
        metrics_port: None,
        shard_labels: &[],
        part_label: None,
        kv_scale: 1.0,
        numbers: &[
            (&QUEUE_DEPTH, &[Value("trtllm_num_requests_waiting")]),
            (&RUNNING_REQUESTS, &[Value("trtllm_num_requests_running")]),
            (
                &KV_CACHE_UTILIZATION,
                &[Value("trtllm_kv_cache_utilization")],
            ),
            (
                &KV_BLOCK_TOKENS,
                &[Value("trtllm_kv_cache_tokens_per_block")],
            ),
            (&KV_BLOCKS, &[Value("trtllm_kv_cache_max_blocks")]),
        ],
        lora: &[],
        counters: &[
            "trtllm_generation_tokens_total",
            "trtllm_num_requests_completed_total",
        ],
    },
    BuiltInEngine {
        name: "triton-tensorrt-llm",
        metrics_path: "/metrics",
        metrics_port: Some(8002),
        shard_labels: &[],
        part_label: None,
        kv_scale: 1.0,
        numbers: &[
            (
                &QUEUE_DEPTH,
                &[Value("nv_trt_llm_request_metrics{request_type=waiting}")],
            ),
            (
                &RUNNING_REQUESTS,
                &[Value("nv_trt_llm_request_metrics{request_type=scheduled}")],
            ),
            (
                &KV_CACHE_UTILIZATION,
                &[Value(
                    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
                )],
            ),
            (
                &KV_BLOCK_TOKENS,
                &[Value(
                    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
                )],
            ),
            (
                &KV_BLOCKS,
                &[Value(
                    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
                )],
            ),
        ],
        lora: &[],
        counters: &["nv_inference_request_success"],
    },
    BuiltInEngine {
        name: "triton",
        metrics_path: "/metrics",
        metrics_port: Some(8002),
        shard_labels: &[],
        part_label: None,
        kv_scale: 1.0,
        numbers: &[
            (&QUEUE_DEPTH, &[Value("nv_inference_pending_request_count")]),
            // No running requests: llm-d reads nv_inference_exec_count, which counts all executions
            // since the start and only grows.
        ],
        lora: &[],
        counters: &["nv_inference_exec_count", "nv_inference_request_success"],
    },
];

/// Reported by every process that uses a Prometheus client library, except Python's in
/// multi-process mode (SGLang, vLLM with several API servers).
const PROCESS_START: &str = "process_start_time_seconds";

impl EngineTable {
    /// Creates the table of the built-in engines and those of the configuration. Empty
    /// `default_engine` and `label` mean [`DEFAULT_ENGINE`] and [`ENGINE_LABEL`].
    ///
    /// # Errors
    /// [`InvalidEngine`] names the engine and the field.
    pub fn try_new(
        configs: &[EngineConfig],
        default_engine: &str,
        label: &str,
    ) -> Result<Self, InvalidEngine> {
        let mut configured: HashMap<Box<str>, Arc<EngineSpec>> = HashMap::new();
        for config in configs {
            let spec = EngineSpec::configured(config)?;
            if configured
                .insert(spec.name.clone(), Arc::new(spec))
                .is_some()
            {
                return Err(InvalidEngine::Duplicate(config.name.clone()));
            }
        }
        let mut by_name = HashMap::new();
        for row in TABLE {
            by_name.insert(row.name.into(), Arc::new(EngineSpec::built_in(row)?));
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

    /// All engines, sorted by name.
    #[must_use]
    pub fn all(&self) -> Vec<&Arc<EngineSpec>> {
        let mut all: Vec<_> = self.by_name.values().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The engine of an endpoint with these labels. A label with an unknown engine counts as
    /// absent.
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
    /// The series names to request, each once.
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

    /// Each meaning with its series names; those of one meaning in order of preference.
    pub fn looked_for(&self) -> impl Iterator<Item = (MetricMeaning, &str)> {
        self.metrics
            .iter()
            .map(|metric| (metric.meaning, metric.spec.name()))
    }

    fn built_in(row: &BuiltInEngine) -> Result<Self, InvalidEngine> {
        let mut builder = EngineSpecBuilder::new(row.name);
        for &(metric, sources) in row.numbers {
            for source in sources {
                match source {
                    Value(spec) => {
                        builder.value("built-in", MetricMeaning::Number(metric), spec)?;
                    }
                    Label(spec, label) => {
                        builder.label("built-in", MetricMeaning::Number(metric), spec, label)?;
                    }
                }
            }
        }
        let columns = [
            (MetricMeaning::Lora, row.lora),
            (MetricMeaning::Counter, row.counters),
            (MetricMeaning::ProcessStart, &[PROCESS_START]),
        ];
        for (meaning, specs) in columns {
            for spec in specs {
                builder.value("built-in", meaning, spec)?;
            }
        }
        builder.build(Some(row), row.kv_scale, Vec::new())
    }

    fn configured(config: &EngineConfig) -> Result<Self, InvalidEngine> {
        let EngineConfig {
            name,
            queued_requests_spec,
            running_requests_spec,
            kv_usage_spec,
            kv_usage_scale,
            lora_spec,
            cache_info_spec,
            cache_block_size_label_name,
            cache_num_blocks_label_name,
            cache_block_size_spec,
            cache_num_blocks_spec,
            custom_metrics,
        } = config;
        if name.is_empty() || name == "default" {
            return Err(InvalidEngine::Name(name.clone())); // llm-d reserves "default"
        }
        let scale = kv_usage_scale.unwrap_or(1.0);
        if !(scale.is_finite() && scale > 0.0) {
            return Err(InvalidEngine::Scale(name.clone()));
        }
        let mut builder = EngineSpecBuilder::new(name);
        builder.value(
            "queuedRequestsSpec",
            MetricMeaning::Number(&QUEUE_DEPTH),
            queued_requests_spec,
        )?;
        builder.value(
            "runningRequestsSpec",
            MetricMeaning::Number(&RUNNING_REQUESTS),
            running_requests_spec,
        )?;
        builder.value(
            "kvUsageSpec",
            MetricMeaning::Number(&KV_CACHE_UTILIZATION),
            kv_usage_spec,
        )?;
        builder.value("loraSpec", MetricMeaning::Lora, lora_spec)?;
        builder.value(
            "cacheBlockSizeSpec",
            MetricMeaning::Number(&KV_BLOCK_TOKENS),
            cache_block_size_spec,
        )?;
        builder.value(
            "cacheNumBlocksSpec",
            MetricMeaning::Number(&KV_BLOCKS),
            cache_num_blocks_spec,
        )?;
        let or = |label: &'_ str, default: &'static str| -> Box<str> {
            if label.is_empty() { default } else { label }.into()
        };
        builder.label(
            "cacheInfoSpec",
            MetricMeaning::Number(&KV_BLOCK_TOKENS),
            cache_info_spec,
            &or(cache_block_size_label_name, "block_size"),
        )?;
        builder.label(
            "cacheInfoSpec",
            MetricMeaning::Number(&KV_BLOCKS),
            cache_info_spec,
            &or(cache_num_blocks_label_name, "num_gpu_blocks"),
        )?;
        let mut custom: Vec<&CustomMetric> = custom_metrics.iter().collect();
        custom.sort_by(|a, b| a.attribute_key.cmp(&b.attribute_key));
        for (index, metric) in custom.iter().enumerate() {
            let key = &metric.attribute_key;
            let again = custom
                .get(index + 1)
                .is_some_and(|next| next.attribute_key == *key);
            if key.is_empty() || key.len() > KEY_BYTES_MAX || again {
                return Err(InvalidEngine::Key {
                    engine: name.clone(),
                    key: key.clone(),
                });
            }
            builder.value(
                "customMetrics",
                MetricMeaning::Custom(index),
                &metric.metric_spec,
            )?;
        }
        let row = TABLE.iter().find(|row| row.name == name);
        for counter in row.map_or(&[][..], |row| row.counters) {
            builder.value("built-in", MetricMeaning::Counter, counter)?;
        }
        builder.value("built-in", MetricMeaning::ProcessStart, PROCESS_START)?;
        builder.build(
            row,
            scale,
            custom
                .iter()
                .map(|metric| metric.attribute_key.as_str().into())
                .collect(),
        )
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

    fn value(
        &mut self,
        field: &'static str,
        meaning: MetricMeaning,
        spec: &str,
    ) -> Result<(), InvalidEngine> {
        self.push(field, meaning, spec, None)
    }

    fn label(
        &mut self,
        field: &'static str,
        meaning: MetricMeaning,
        spec: &str,
        label: &str,
    ) -> Result<(), InvalidEngine> {
        self.push(field, meaning, spec, Some(label.into()))
    }

    fn push(
        &mut self,
        field: &'static str,
        meaning: MetricMeaning,
        spec: &str,
        label: Option<Box<str>>,
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
            label,
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
