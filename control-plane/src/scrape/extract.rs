//! Applies the engine table to the samples of a page. Pure.
//!
//! A value that is missing, or invalid (NaN, infinite, negative, a share above one), is unknown:
//! `None`, never zero and never the previous value. One engine process may have several series of a
//! metric (data-parallel ranks, models, tensor-parallel ranks that all report the one scheduler):
//! [`MetricMeaning`] says how they fold into one number.

use std::hash::{DefaultHasher, Hash, Hasher};

use scheduler::metrics::{KV_CACHE_UTILIZATION, METRICS, MetricDefinition, MetricFold, MetricUnit, QUEUE_DEPTH, RUNNING_REQUESTS};
use scheduler::{EndpointMetrics, LoraMetrics};

use super::engine::{EngineMetric, EngineSpec, FamilySet, MetricMeaning};
use super::exposition::{LineInterest, MetricSample, SampleVisitor};

/// The most schedulers behind one endpoint. Data-parallel deployments have tens; it bounds the search for a rank already seen.
const SHARDS_MAX: usize = 1024;

/// The numbers that say how loaded an engine is.
static LOAD_METRICS: [&MetricDefinition; 3] = [&QUEUE_DEPTH, &RUNNING_REQUESTS, &KV_CACHE_UTILIZATION];

/// The most requests an engine can mean to report; beyond it, a number is noise (and would lose precision as `f32`).
const REQUESTS_MAX: f64 = 1e7;

/// How far above 1 a utilisation may be by rounding and still count as full.
const UTILIZATION_ROUNDING: f64 = 0.01;

/// A process that started this much earlier or later, in seconds, is another one. Below it, client libraries round.
const PROCESS_START_TOLERANCE_S: f64 = 0.5;

/// What one page said.
#[derive(Debug)]
pub struct PageReading {
    /// For the scheduler.
    pub metrics: EndpointMetrics,
    /// Start of the process in Unix seconds.
    pub process_start: Option<f64>,
    /// In the order of the table.
    pub(super) counters: Vec<Option<CounterSum>>,
    /// Which metrics of the table the page has, by name.
    pub(super) present: FamilySet,
}

/// The sum of a counter's series and how many there were.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CounterSum {
    sum: f64,
    series: usize,
}

/// Reads one page of an engine.
#[derive(Debug)]
pub struct Extraction<'e> {
    engine: &'e EngineSpec,
    /// Parallel to the engine's metrics.
    cells: Vec<SeriesValues>,
    /// Metrics whose name has come by.
    present: FamilySet,
    /// Read on until these are complete; to the end of the page if `None`.
    until: Option<FamilySet>,
    last_name: Vec<u8>,
    last: FamilySet,
}

/// Notices that the process behind an address is not the one it was.
#[derive(Debug, Default)]
pub struct RestartWatch {
    process_start: Option<f64>,
    counters: Vec<Option<CounterSum>>,
}

/// The series of one metric.
#[derive(Debug, Default)]
struct SeriesValues {
    /// By scheduler, in order of appearance.
    shards: Vec<(u64, f64)>,
    /// Some series has a value that cannot be: a sum without it would be invented.
    invalid: bool,
    lora: Option<(f64, LoraMetrics)>,
}

impl PageReading {
    /// Does it say anything about load?
    #[must_use]
    pub fn says_load(&self) -> bool {
        LOAD_METRICS.iter().any(|metric| (metric.get)(&self.metrics).is_some())
    }

    /// Does it lack something of that kind the engine has a name for?
    #[must_use]
    pub(super) fn lacks_load(&self, engine: &EngineSpec) -> bool {
        let present = |meaning| {
            let mut named = engine.metrics.iter().enumerate().filter(|(_, metric)| metric.meaning == meaning).peekable();
            named.peek().is_none() || named.any(|(at, _)| self.present & (1 << at) != 0)
        };
        !LOAD_METRICS.into_iter().map(MetricMeaning::Number).all(present)
    }

    /// Has the engine work?
    #[must_use]
    pub fn is_busy(&self) -> bool {
        [self.metrics.queue_depth, self.metrics.running_requests].iter().flatten().any(|&requests| requests > 0.0)
    }
}

impl<'e> Extraction<'e> {
    /// Reads on until the families of `until` are complete; `None` or none: to the end of the page.
    #[must_use]
    pub(super) fn new(engine: &'e EngineSpec, until: Option<FamilySet>) -> Self {
        let cells = engine.metrics.iter().map(|_| SeriesValues::default()).collect();
        Self { engine, cells, present: 0, until: until.filter(|&set| set != 0), last_name: Vec::new(), last: 0 }
    }

    /// Reads to the end of the page.
    #[must_use]
    pub fn full_page(engine: &'e EngineSpec) -> Self {
        Self::new(engine, None)
    }

    /// Folds the series into what they mean.
    #[must_use]
    pub fn finish(self) -> PageReading {
        let Self { engine, cells, present, .. } = self;
        let rows = || engine.metrics.iter().zip(&cells);
        let first =
            |meaning: MetricMeaning| rows().find(|(metric, cell)| metric.meaning == meaning && cell.has_series()).map(|(_, cell)| cell);
        let number = |metric: &'static MetricDefinition| {
            let scale = if *metric == KV_CACHE_UTILIZATION { engine.kv_scale } else { 1.0 };
            first(MetricMeaning::Number(metric))?.fold(metric.fold).and_then(|value| valid(metric.unit, value * scale))
        };
        let custom = engine.custom_keys.iter().enumerate();
        let mut metrics = EndpointMetrics {
            lora: first(MetricMeaning::Lora).and_then(|cell| cell.lora.as_ref()).map(|(_, lora)| lora.clone()),
            // Sorted as the keys are; what the page does not say is left out.
            attributes: custom.filter_map(|(at, key)| Some((key.clone(), finite(first(MetricMeaning::Custom(at))?.last()?)?))).collect(),
            ..EndpointMetrics::default()
        };
        METRICS.into_iter().for_each(|metric| (metric.set)(&mut metrics, number(metric)));
        PageReading {
            metrics,
            process_start: first(MetricMeaning::ProcessStart).and_then(SeriesValues::max),
            counters: rows().filter(|(metric, _)| metric.meaning == MetricMeaning::Counter).map(|(_, cell)| cell.counter()).collect(),
            present,
        }
    }

    fn read(&mut self, at: usize, metric: &'e EngineMetric, sample: &MetricSample<'_>) {
        let Some(cell) = self.cells.get_mut(at) else { return };
        if metric.meaning == MetricMeaning::Lora {
            return cell.add_lora(sample);
        }
        let value = match &metric.label {
            None => Some(sample.value),
            Some(label) => sample.label(label.as_bytes()).and_then(|text| std::str::from_utf8(&text).ok()?.trim().parse().ok()),
        };
        let sign_free = matches!(metric.meaning, MetricMeaning::Custom(_));
        let valid = value.filter(|value: &f64| value.is_finite() && (sign_free || *value >= 0.0));
        cell.add(shard(self.engine.shard_labels, sample), valid);
    }
}

impl SampleVisitor for Extraction<'_> {
    fn interest(&mut self, name: &[u8]) -> LineInterest {
        if name != self.last_name {
            // A family's lines stand together, so another name ends all families before it.
            if self.until.is_some_and(|until| until & !self.present == 0) {
                return LineInterest::Stop;
            }
            self.last_name.clear();
            self.last_name.extend_from_slice(name);
            let named = |metric: &EngineMetric| metric.spec.name().as_bytes() == name;
            self.last = self.engine.metrics.iter().enumerate().fold(0, |set, (at, metric)| set | (u64::from(named(metric)) << at));
            self.present |= self.last;
        }
        if self.last == 0 { LineInterest::Ignore } else { LineInterest::Take }
    }

    fn sample(&mut self, sample: &MetricSample<'_>) {
        let engine = self.engine;
        let part = |label: &str| sample.label(label.as_bytes()).is_some_and(|value| !value.is_empty());
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
    /// Takes in a page; true if another process wrote it than the page before. What a page does not say is compared when it next does.
    /// A counter that lost series may fall without a restart and only sets a new mark.
    pub fn observe(&mut self, reading: &PageReading) -> bool {
        let moved = |(old, new): (f64, f64)| (new - old).abs() > PROCESS_START_TOLERANCE_S;
        let mut restarted = self.process_start.zip(reading.process_start).is_some_and(moved);
        self.process_start = reading.process_start.or(self.process_start);
        self.counters.resize(reading.counters.len(), None);
        for (old, new) in self.counters.iter_mut().zip(&reading.counters) {
            let fell = |(old, new): (CounterSum, CounterSum)| new.sum < old.sum && new.series >= old.series;
            restarted |= old.zip(*new).is_some_and(fell);
            *old = new.or(*old);
        }
        restarted
    }
}

impl SeriesValues {
    fn add(&mut self, shard: Option<u64>, value: Option<f64>) {
        let Some(value) = value else { return self.invalid = true };
        let full = self.shards.len() == SHARDS_MAX;
        match self.shards.iter_mut().find(|(key, _)| shard == Some(*key)) {
            Some((_, largest)) => *largest = largest.max(value),
            None if full => self.invalid = true,
            None => self.shards.push((shard.unwrap_or_default(), value)),
        }
    }

    fn add_lora(&mut self, sample: &MetricSample<'_>) {
        let newest = self.lora.as_ref().is_none_or(|(time, _)| sample.value >= *time);
        if sample.value.is_finite() && newest {
            let text = |label: &[u8]| sample.label(label).map(|value| String::from_utf8_lossy(&value).into_owned()).unwrap_or_default();
            let Ok(max) = text(b"max_lora").trim().parse() else { return };
            let lora =
                LoraMetrics { running: names(&text(b"running_lora_adapters")), waiting: names(&text(b"waiting_lora_adapters")), max };
            self.lora = Some((sample.value, lora));
        }
    }

    fn has_series(&self) -> bool {
        self.invalid || self.lora.is_some() || !self.shards.is_empty()
    }

    fn values(&self) -> Option<impl Iterator<Item = f64>> {
        (!self.invalid && !self.shards.is_empty()).then(|| self.shards.iter().map(|(_, value)| *value))
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
        self.sum().map(|sum| CounterSum { sum, series: self.shards.len() })
    }
}

/// Which scheduler a series shows; `None`: one of its own.
fn shard(labels: &[&str], sample: &MetricSample<'_>) -> Option<u64> {
    if labels.is_empty() {
        return None;
    }
    let mut hasher = DefaultHasher::new();
    for label in labels {
        sample.label(label.as_bytes()).unwrap_or_default().hash(&mut hasher);
    }
    Some(hasher.finish())
}

/// The value as the unit has it; none if an engine cannot mean it.
fn valid(unit: MetricUnit, value: f64) -> Option<f32> {
    let max = match unit {
        MetricUnit::Requests => REQUESTS_MAX,
        MetricUnit::Share => 1.0 + UTILIZATION_ROUNDING,
        MetricUnit::Count => f64::from(u32::MAX),
    };
    if value <= max { unit.valid(value as f32) } else { None }
}

/// As the scheduler counts; what an f32 cannot hold is not known.
fn finite(value: f64) -> Option<f32> {
    let value = value as f32;
    value.is_finite().then_some(value)
}

fn names(list: &str) -> Box<[Box<str>]> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(Box::from).collect()
}

#[cfg(test)]
pub(super) mod tests;
