//! Computes an engine's metrics from the samples of one scraped page. This module does no I/O.
//!
//! A value that is missing or invalid (NaN, infinite, negative, a share above one) is unknown:
//! `None`, never zero and never the previous value. One engine process may have several series of a
//! metric: for data-parallel ranks, for models, or for tensor-parallel ranks that all report one
//! scheduler. [`MetricMeaning`] defines how these series become one number.

use std::hash::{DefaultHasher, Hash, Hasher};

use scheduler::metrics::{
    KV_CACHE_UTILIZATION, METRICS, MetricDefinition, MetricFold, MetricUnit, QUEUE_DEPTH,
    RUNNING_REQUESTS,
};
use scheduler::{EndpointMetrics, LoraMetrics};

use super::engine::{EngineMetric, EngineSpec, FamilySet, MetricMeaning};
use super::exposition::{LineInterest, MetricSample, SampleVisitor};

/// The maximum number of schedulers behind one endpoint. Data-parallel deployments have tens; the
/// maximum bounds the search for a known rank.
const SHARDS_MAX: usize = 1024;

/// The numbers that describe the load of an engine.
static LOAD_METRICS: [&MetricDefinition; 3] =
    [&QUEUE_DEPTH, &RUNNING_REQUESTS, &KV_CACHE_UTILIZATION];

/// The maximum number of requests that an engine can plausibly report. A larger number is invalid
/// (and would lose precision as `f32`).
const REQUESTS_MAX: f64 = 1e7;

/// The amount by which a utilization may exceed 1 because of rounding. Such a utilization means
/// full.
const UTILIZATION_ROUNDING: f64 = 0.01;

/// The change of a process's start time, in seconds, above which another process answers. Client
/// libraries round the start time within this range.
const PROCESS_START_TOLERANCE_S: f64 = 0.5;

/// The content of one page.
#[derive(Debug)]
pub struct PageReading {
    /// The metrics for the scheduler.
    pub metrics: EndpointMetrics,
    /// The start of the process in Unix seconds.
    pub process_start: Option<f64>,
    /// The prompt tokens that the engine has computed since it started: those that its prefix cache
    /// did not have.
    pub computed_tokens: Option<u64>,
    /// The counters, in the order of the engine's table.
    pub(super) counters: Vec<Option<CounterSum>>,
    /// The metrics of the table whose names are on the page.
    pub(super) present: FamilySet,
}

/// The sum of a counter's series, and their number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CounterSum {
    sum: f64,
    series: usize,
}

/// Reads one page of an engine.
#[derive(Debug)]
pub struct Extraction<'e> {
    engine: &'e EngineSpec,
    /// The values of the engine's metrics, one entry for each metric.
    cells: Vec<SeriesValues>,
    /// The metrics whose names have been read.
    present: FamilySet,
    base_model: BaseModel,
    /// The families after which reading stops. `None` means that the whole page is read.
    until: Option<FamilySet>,
    last_name: Vec<u8>,
    last: FamilySet,
}

/// The label `model_name` of the load metrics. vLLM puts the base model into this label, also for
/// requests of adapters.
#[derive(Debug, Default)]
enum BaseModel {
    #[default]
    Unnamed,
    Named(Box<str>),
    /// Several models answer at this endpoint.
    Several,
}

/// Detects that another process answers at an address.
#[derive(Debug, Default)]
pub struct RestartWatch {
    process_start: Option<f64>,
    counters: Vec<Option<CounterSum>>,
}

/// The series of one metric.
#[derive(Debug, Default)]
struct SeriesValues {
    /// The scheduler and the value of each series, in order of appearance.
    shards: Vec<(u64, f64)>,
    /// Whether a series has an impossible value. A sum without this series would be wrong.
    invalid: bool,
    lora: Option<(f64, LoraMetrics)>,
}

impl PageReading {
    /// Returns whether the page has a load metric.
    #[must_use]
    pub fn says_load(&self) -> bool {
        LOAD_METRICS
            .iter()
            .any(|metric| (metric.get)(&self.metrics).is_some())
    }

    /// Returns whether the page lacks a load metric that the engine's table names.
    #[must_use]
    pub(super) fn lacks_load(&self, engine: &EngineSpec) -> bool {
        let present = |meaning| {
            let mut named = engine
                .metrics
                .iter()
                .enumerate()
                .filter(|(_, metric)| metric.meaning == meaning)
                .peekable();
            named.peek().is_none() || named.any(|(at, _)| self.present & (1 << at) != 0)
        };
        !LOAD_METRICS
            .into_iter()
            .map(MetricMeaning::Number)
            .all(present)
    }

    /// Returns whether the engine has waiting or running requests.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        [self.metrics.queue_depth, self.metrics.running_requests]
            .iter()
            .flatten()
            .any(|&requests| requests > 0.0)
    }
}

impl<'e> Extraction<'e> {
    /// Creates a reader that stops when the families in `until` are complete. With `None` or an
    /// empty set, the reader goes on to the end of the page.
    #[must_use]
    pub(super) fn new(engine: &'e EngineSpec, until: Option<FamilySet>) -> Self {
        let cells = engine
            .metrics
            .iter()
            .map(|_| SeriesValues::default())
            .collect();
        Self {
            engine,
            cells,
            present: 0,
            base_model: BaseModel::default(),
            until: until.filter(|&set| set != 0),
            last_name: Vec::new(),
            last: 0,
        }
    }

    /// Reads to the end of the page.
    #[must_use]
    pub fn full_page(engine: &'e EngineSpec) -> Self {
        Self::new(engine, None)
    }

    /// Combines the series of each metric into one number.
    #[must_use]
    pub fn finish(self) -> PageReading {
        let Self {
            engine,
            cells,
            present,
            base_model,
            ..
        } = self;
        let rows = || engine.metrics.iter().zip(&cells);
        let first = |meaning: MetricMeaning| {
            rows()
                .find(|(metric, cell)| metric.meaning == meaning && cell.has_series())
                .map(|(_, cell)| cell)
        };
        let number = |metric: &'static MetricDefinition| {
            let scale = if *metric == KV_CACHE_UTILIZATION {
                engine.kv_scale
            } else {
                1.0
            };
            first(MetricMeaning::Number(metric))?
                .fold(metric.fold)
                .and_then(|value| valid(metric.unit, value * scale))
        };
        let custom = engine.custom_keys.iter().enumerate();
        let mut metrics = EndpointMetrics {
            lora: first(MetricMeaning::Lora)
                .and_then(|cell| cell.lora.as_ref())
                .map(|(_, lora)| LoraMetrics {
                    base_models: base_model.name().into_iter().collect(),
                    ..lora.clone()
                }),
            // The keys are sorted, so the attributes are sorted too. Keys without a value on the
            // page are left out.
            attributes: custom
                .filter_map(|(at, key)| {
                    Some((
                        key.clone(),
                        finite(first(MetricMeaning::Custom(at))?.last()?)?,
                    ))
                })
                .collect(),
            ..EndpointMetrics::default()
        };
        METRICS
            .into_iter()
            .for_each(|metric| (metric.set)(&mut metrics, number(metric)));
        PageReading {
            metrics,
            process_start: first(MetricMeaning::ProcessStart).and_then(SeriesValues::max),
            computed_tokens: first(MetricMeaning::PromptTokens)
                .and_then(SeriesValues::sum)
                .zip(first(MetricMeaning::CachedTokens).and_then(SeriesValues::sum))
                .map(|(all, cached)| (all - cached).max(0.0) as u64),
            counters: rows()
                .filter(|(metric, _)| metric.meaning == MetricMeaning::Counter)
                .map(|(_, cell)| cell.counter())
                .collect(),
            present,
        }
    }

    fn read(&mut self, at: usize, metric: &'e EngineMetric, sample: &MetricSample<'_>) {
        let Some(cell) = self.cells.get_mut(at) else {
            return;
        };
        if metric.meaning == MetricMeaning::Lora {
            return cell.add_lora(sample);
        }
        if matches!(metric.meaning, MetricMeaning::Number(_)) {
            self.base_model.read(sample);
        }
        let value = match &metric.label {
            None => Some(sample.value),
            Some(label) => sample
                .label(label.as_bytes())
                .and_then(|text| std::str::from_utf8(&text).ok()?.trim().parse().ok()),
        };
        let sign_free = matches!(metric.meaning, MetricMeaning::Custom(_));
        let valid = value.filter(|value: &f64| value.is_finite() && (sign_free || *value >= 0.0));
        cell.add(shard(self.engine.shard_labels, sample), valid);
    }
}

impl SampleVisitor for Extraction<'_> {
    fn interest(&mut self, name: &[u8]) -> LineInterest {
        if name != self.last_name {
            // The lines of a family are adjacent, so another name ends all families before it.
            if self.until.is_some_and(|until| until & !self.present == 0) {
                return LineInterest::Stop;
            }
            self.last_name.clear();
            self.last_name.extend_from_slice(name);
            let named = |metric: &EngineMetric| metric.spec.name().as_bytes() == name;
            self.last = self
                .engine
                .metrics
                .iter()
                .enumerate()
                .fold(0, |set, (at, metric)| {
                    set | (u64::from(named(metric)) << at)
                });
            self.present |= self.last;
        }
        if self.last == 0 {
            LineInterest::Ignore
        } else {
            LineInterest::Take
        }
    }

    fn sample(&mut self, sample: &MetricSample<'_>) {
        let engine = self.engine;
        let part = |label: &str| {
            sample
                .label(label.as_bytes())
                .is_some_and(|value| !value.is_empty())
        };
        if engine.part_label.is_some_and(part) {
            return;
        }
        for (at, metric) in engine.metrics.iter().enumerate() {
            if self.last & (1 << at) != 0 && metric.spec.selects(sample) {
                self.read(at, metric, sample);
            }
        }
    }
}

impl RestartWatch {
    /// Compares a page with the previous page, and returns whether another process wrote it. If
    /// this page lacks a value, the next page that has it is compared instead. A counter with fewer
    /// series than before may fall without a restart. The lower value of such a counter only
    /// becomes the new reference.
    pub fn observe(&mut self, reading: &PageReading) -> bool {
        let moved = |(old, new): (f64, f64)| (new - old).abs() > PROCESS_START_TOLERANCE_S;
        let mut restarted = self
            .process_start
            .zip(reading.process_start)
            .is_some_and(moved);
        self.process_start = reading.process_start.or(self.process_start);
        self.counters.resize(reading.counters.len(), None);
        for (old, new) in self.counters.iter_mut().zip(&reading.counters) {
            let fell = |(old, new): (CounterSum, CounterSum)| {
                new.sum < old.sum && new.series >= old.series
            };
            restarted |= old.zip(*new).is_some_and(fell);
            *old = new.or(*old);
        }
        restarted
    }
}

impl BaseModel {
    fn read(&mut self, sample: &MetricSample<'_>) {
        let Some(label) = sample
            .label(b"model_name")
            .filter(|label| !label.is_empty())
        else {
            return;
        };
        match self {
            Self::Unnamed => *self = Self::Named(String::from_utf8_lossy(&label).into()),
            Self::Named(name) if name.as_bytes() == &*label => {}
            Self::Named(_) | Self::Several => *self = Self::Several,
        }
    }

    fn name(self) -> Option<Box<str>> {
        match self {
            Self::Named(name) => Some(name),
            Self::Unnamed | Self::Several => None,
        }
    }
}

impl SeriesValues {
    fn add(&mut self, shard: Option<u64>, value: Option<f64>) {
        let Some(value) = value else {
            return self.invalid = true;
        };
        let full = self.shards.len() == SHARDS_MAX;
        match self.shards.iter_mut().find(|(key, _)| shard == Some(*key)) {
            Some((_, largest)) => *largest = largest.max(value),
            None if full => self.invalid = true,
            None => self.shards.push((shard.unwrap_or_default(), value)),
        }
    }

    fn add_lora(&mut self, sample: &MetricSample<'_>) {
        let newest = self
            .lora
            .as_ref()
            .is_none_or(|(time, _)| sample.value >= *time);
        if sample.value.is_finite() && newest {
            let text = |label: &[u8]| {
                sample
                    .label(label)
                    .map(|value| String::from_utf8_lossy(&value).into_owned())
                    .unwrap_or_default()
            };
            let Ok(max) = text(b"max_lora").trim().parse() else {
                return;
            };
            let [running, waiting] = [
                b"running_lora_adapters".as_slice(),
                b"waiting_lora_adapters",
            ]
            .map(|label| names(&text(label)));
            let lora = LoraMetrics {
                running,
                waiting,
                max,
                base_models: [].into(),
            };
            self.lora = Some((sample.value, lora));
        }
    }

    fn has_series(&self) -> bool {
        self.invalid || self.lora.is_some() || !self.shards.is_empty()
    }

    fn values(&self) -> Option<impl Iterator<Item = f64>> {
        (!self.invalid && !self.shards.is_empty())
            .then(|| self.shards.iter().map(|(_, value)| *value))
    }

    fn fold(&self, fold: MetricFold) -> Option<f64> {
        match fold {
            MetricFold::Sum => self.sum(),
            MetricFold::Mean => self.mean(),
            MetricFold::Min => self.min(),
        }
    }

    fn sum(&self) -> Option<f64> {
        self.values().map(Iterator::sum)
    }

    fn mean(&self) -> Option<f64> {
        self.sum().map(|sum| sum / self.shards.len() as f64)
    }

    fn min(&self) -> Option<f64> {
        self.values()?.reduce(f64::min)
    }

    fn max(&self) -> Option<f64> {
        self.values()?.reduce(f64::max)
    }

    fn last(&self) -> Option<f64> {
        self.values()?.last()
    }

    fn counter(&self) -> Option<CounterSum> {
        self.sum().map(|sum| CounterSum {
            sum,
            series: self.shards.len(),
        })
    }
}

/// Returns the scheduler that a series belongs to. `None` means that each series belongs to a
/// scheduler of its own.
fn shard(labels: &[&str], sample: &MetricSample<'_>) -> Option<u64> {
    if labels.is_empty() {
        return None;
    }
    let mut hasher = DefaultHasher::new();
    for label in labels {
        sample
            .label(label.as_bytes())
            .unwrap_or_default()
            .hash(&mut hasher);
    }
    Some(hasher.finish())
}

/// Returns the value in the scheduler's type, or `None` if no engine can mean this value.
fn valid(unit: MetricUnit, value: f64) -> Option<f32> {
    let max = match unit {
        MetricUnit::Requests => REQUESTS_MAX,
        MetricUnit::Share => 1.0 + UTILIZATION_ROUNDING,
        MetricUnit::Count => f64::from(u32::MAX),
    };
    if value <= max {
        unit.valid(value as f32)
    } else {
        None
    }
}

/// Returns the value as f32; `None` if an f32 cannot hold it.
fn finite(value: f64) -> Option<f32> {
    let value = value as f32;
    value.is_finite().then_some(value)
}

fn names(list: &str) -> Box<[Box<str>]> {
    list.split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .map(Box::from)
        .collect()
}

#[cfg(test)]
pub(super) mod tests;
