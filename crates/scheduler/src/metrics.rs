//! The last report of a model server about itself.

/// The maximum number of attributes of an endpoint. An attribute is a metric that the operator
/// named in a configuration file. The number is limited, because the daemon sends all attributes of
/// an endpoint with every refresh.
pub const ATTRIBUTES_MAX: usize = 32;

/// The key of the attribute that has the maximum number of requests that an engine runs at the same
/// time, if known. Further requests queue in the engine.
pub const SEQUENCES_MAX_ATTRIBUTE: &str = "max_num_seqs";

/// A prompt whose estimated tokens are more than this many times the KV cache certainly does not
/// fit, because the estimate is rarely more than this many times the true number: one token of text
/// has 4 bytes, and one of indented code up to 16.
const TIMES_TRUE: u64 = 4;

/// The last report of a model server. `None` means unknown, which is neither idle nor full.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EndpointMetrics {
    /// The number of requests that wait until the engine schedules them.
    pub queue_depth: Option<f32>,
    /// The number of requests that the engine runs.
    pub running_requests: Option<f32>,
    /// The share of KV-cache blocks in use, 0 to 1.
    pub kv_cache_utilization: Option<f32>,
    /// The number of tokens in one KV-cache block.
    pub kv_block_tokens: Option<u32>,
    /// The number of KV-cache blocks of the engine.
    pub kv_blocks: Option<u32>,
    /// The state of the LoRA adapters, if the engine serves adapters.
    pub lora: Option<LoraMetrics>,
    /// The further numbers that `customMetrics` configures, sorted by key.
    pub attributes: Box<[(Box<str>, f32)]>,
}

/// A number that engines report about themselves: a row of [`METRICS`].
///
/// Code that sends, prints or reads all numbers iterates over [`METRICS`].
#[derive(Debug)]
pub struct MetricDefinition {
    /// The name in messages, records and pages.
    pub name: &'static str,
    /// A short description.
    pub help: &'static str,
    /// The unit, which defines the valid values.
    pub unit: MetricUnit,
    /// The way in which the series of several engines behind one address are combined into one
    /// number.
    pub fold: MetricFold,
    /// Returns this number of `EndpointMetrics`. Whole numbers up to 2^24 are exact; greater
    /// numbers are rounded.
    pub get: fn(&EndpointMetrics) -> Option<f32>,
    /// Sets this number in `EndpointMetrics`.
    pub set: fn(&mut EndpointMetrics, Option<f32>),
}

/// The valid values of a number. Other values count as unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricUnit {
    /// A number of requests, from 0.
    Requests,
    /// A share, 0 to 1.
    Share,
    /// A whole number of blocks or tokens, from 1.
    Count,
}

/// The way in which the values of several series of a metric are combined into one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricFold {
    /// The sum of the series.
    Sum,
    /// The mean of the series. For caches of equal size, the mean is the share of the total size.
    Mean,
    /// The smallest value of the series.
    Min,
}

pub static QUEUE_DEPTH: MetricDefinition = MetricDefinition {
    name: "queue_depth",
    help: "requests waiting",
    unit: MetricUnit::Requests,
    fold: MetricFold::Sum,
    get: |m| m.queue_depth,
    set: |m, value| m.queue_depth = value,
};

pub static RUNNING_REQUESTS: MetricDefinition = MetricDefinition {
    name: "running_requests",
    help: "requests running",
    unit: MetricUnit::Requests,
    fold: MetricFold::Sum,
    get: |m| m.running_requests,
    set: |m, value| m.running_requests = value,
};

pub static KV_CACHE_UTILIZATION: MetricDefinition = MetricDefinition {
    name: "kv_cache_utilization",
    help: "KV-cache utilisation",
    unit: MetricUnit::Share,
    fold: MetricFold::Mean,
    get: |m| m.kv_cache_utilization,
    set: |m, value| m.kv_cache_utilization = value,
};

pub static KV_BLOCK_TOKENS: MetricDefinition = MetricDefinition {
    name: "kv_block_tokens",
    help: "tokens of a KV block",
    unit: MetricUnit::Count,
    fold: MetricFold::Min,
    get: |m| m.kv_block_tokens.map(|tokens| tokens as f32),
    set: |m, value| m.kv_block_tokens = value.map(|tokens| tokens as u32),
};

pub static KV_BLOCKS: MetricDefinition = MetricDefinition {
    name: "kv_blocks",
    help: "KV blocks",
    unit: MetricUnit::Count,
    fold: MetricFold::Sum,
    get: |m| m.kv_blocks.map(|blocks| blocks as f32),
    set: |m, value| m.kv_blocks = value.map(|blocks| blocks as u32),
};

/// Every number of [`EndpointMetrics`] that has a separate field, in the order of display.
pub static METRICS: [&MetricDefinition; 5] = [
    &QUEUE_DEPTH,
    &RUNNING_REQUESTS,
    &KV_CACHE_UTILIZATION,
    &KV_BLOCK_TOKENS,
    &KV_BLOCKS,
];

/// The newest `lora_requests_info` series of an engine, and the name of its base model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoraMetrics {
    /// The adapters that are loaded and in use.
    pub running: Box<[Box<str>]>,
    /// The adapters whose requests wait for room in memory.
    pub waiting: Box<[Box<str>]>,
    /// The number of adapters that fit into the engine's memory at the same time.
    pub max: u32,
    /// The names of the base model, from the label `model_name` of the engine's metrics and from
    /// its `/v1/models`; the list is empty if they are unknown. A request for one of these names
    /// needs no adapter.
    pub base_models: Box<[Box<str>]>,
}

// === impl EndpointMetrics ===

impl EndpointMetrics {
    pub fn attribute(&self, key: &str) -> Option<f32> {
        let at = self
            .attributes
            .binary_search_by(|(attribute, _)| (**attribute).cmp(key))
            .ok()?;
        self.attributes.get(at).map(|(_, value)| *value)
    }

    /// Returns how many tokens the KV cache holds; the greatest number if that is unknown.
    pub fn kv_tokens(&self) -> u64 {
        let tokens = |(blocks, tokens): (u32, u32)| u64::from(blocks) * u64::from(tokens);
        let known = self.kv_blocks.zip(self.kv_block_tokens).map(tokens);
        known.filter(|tokens| *tokens > 0).unwrap_or(u64::MAX)
    }

    /// Returns how many tokens of a prompt are work for the engine, at most as many as the KV cache
    /// holds. A prompt that is certainly longer is no work, because the engine refuses it.
    pub fn work_tokens(&self, prompt_tokens: u32) -> u32 {
        let cache_tokens = u32::try_from(self.kv_tokens()).unwrap_or(u32::MAX);
        if u64::from(prompt_tokens).div_ceil(TIMES_TRUE) <= cache_tokens.into() {
            prompt_tokens.min(cache_tokens)
        } else {
            0
        }
    }
}

// === impl MetricDefinition ===

impl MetricDefinition {
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        METRICS.into_iter().find(|metric| metric.name == name)
    }
}

impl PartialEq for MetricDefinition {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for MetricDefinition {}

// === impl MetricUnit ===

impl MetricUnit {
    /// Converts the value to this unit; `None` if the value is not valid.
    #[must_use]
    pub fn valid(self, value: f32) -> Option<f32> {
        let value = Some(value).filter(|value| value.is_finite() && *value >= 0.0)?;
        match self {
            Self::Requests => Some(value),
            Self::Share => Some(value.min(1.0)),
            Self::Count => (value >= 1.0).then(|| value.trunc()),
        }
    }
}

// === impl LoraMetrics ===

impl LoraMetrics {
    pub(crate) fn reports(&self, adapter: &str) -> bool {
        self.running
            .iter()
            .chain(&self.waiting)
            .any(|reported| **reported == *adapter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_definition_sets_the_number_it_gets_and_no_other() {
        for metric in METRICS {
            assert_eq!(
                MetricDefinition::named(metric.name),
                Some(metric),
                "two definitions have this name"
            );
            let mut metrics = EndpointMetrics::default();
            (metric.set)(&mut metrics, Some(1.0));
            let known: Vec<_> = METRICS
                .iter()
                .filter(|other| (other.get)(&metrics).is_some())
                .map(|other| other.name)
                .collect();
            assert_eq!(
                (known, (metric.get)(&metrics)),
                (vec![metric.name], Some(1.0))
            );
            (metric.set)(&mut metrics, None);
            assert_eq!(metrics, EndpointMetrics::default());
        }
    }

    #[test]
    fn a_prompt_that_no_engine_can_hold_is_no_work() {
        let work = |blocks, tokens| {
            let metrics = EndpointMetrics {
                kv_blocks: Some(blocks),
                kv_block_tokens: Some(16),
                ..EndpointMetrics::default()
            };
            metrics.work_tokens(tokens)
        };
        assert_eq!(
            [1_600, 1_601, 6_400, 6_401].map(|tokens| work(100, tokens)),
            [1_600, 1_600, 1_600, 0]
        );
        assert_eq!(work(0, 6_401), 6_401, "the size of the cache is unknown");
        let unknown = EndpointMetrics::default();
        assert_eq!(unknown.work_tokens(u32::MAX), u32::MAX);
    }

    #[test]
    fn counts_are_exact_up_to_two_to_the_24th() {
        for (blocks, read) in [
            (1, 1),
            ((1 << 24) - 1, (1 << 24) - 1),
            (1 << 24, 1 << 24),
            ((1 << 24) + 1, 1 << 24),
        ] {
            let mut metrics = EndpointMetrics {
                kv_blocks: Some(blocks),
                ..EndpointMetrics::default()
            };
            let carried = (KV_BLOCKS.get)(&metrics);
            (KV_BLOCKS.set)(&mut metrics, carried);
            assert_eq!(metrics.kv_blocks, Some(read));
        }
    }

    #[test]
    fn values_that_cannot_be_are_unknown() {
        let valid = |unit: MetricUnit| {
            [f32::NAN, f32::INFINITY, -1.0, 0.0, 0.5, 1.5].map(|value| unit.valid(value))
        };
        assert_eq!(
            valid(MetricUnit::Requests),
            [None, None, None, Some(0.0), Some(0.5), Some(1.5)]
        );
        assert_eq!(
            valid(MetricUnit::Share),
            [None, None, None, Some(0.0), Some(0.5), Some(1.0)]
        );
        assert_eq!(
            valid(MetricUnit::Count),
            [None, None, None, None, None, Some(1.0)]
        );
    }
}
