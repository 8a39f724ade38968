//! The counters of one pool in one VM. The counters are cumulative since the VM started, so a lost
//! report loses nothing.

mod labels;
mod sums;
use labels::NameCandidates;
pub use labels::{LabelSource, UNLISTED_NAME_BYTES_MAX};

use scheduler::EndpointRef;

use super::miss_cause::{MISS_CAUSES, MissedTokens};
use crate::usage::TokenUsage;

/// The maximum number of labels. Further models count as `other`. Model names come from clients,
/// and every row is reported each second. A model gets its own label at its first success (2xx).
/// Engines that ignore the name answer for any name, so a new name may replace a name that nothing
/// lists ([`labels`]).
pub const MODELS_MAX: usize = 100;

/// The longest listed model name that is counted separately, in bytes: enough for a file path.
const MODEL_NAME_BYTES_MAX: usize = 256;

/// The label of models without a label of their own.
const OTHER: &str = "other";

/// Upper bounds of duration buckets, in ms. One more bucket has no bound.
pub const DURATION_BOUNDS_MS: [u32; 20] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 20_000, 30_000,
    60_000, 120_000, 300_000, 600_000,
];

/// Counts by bucket.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CountHistogram {
    /// One count for each bound, and one for values beyond the last bound.
    pub counts: [u64; 21],
    pub sum: f64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointCounters {
    pub endpoint: EndpointRef,
    /// Decisions with this endpoint first in the ranked list.
    pub picked: u64,
    /// Requests that the endpoint answered.
    pub served: u64,
    /// Attempts that were refused or reset before a response.
    pub failed: u64,
    /// Whether the endpoint ever reported cached tokens.
    reports_cached: bool,
}

/// The label of request counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelLabel {
    /// The model name in the client's request. The name is `other` beyond [`MODELS_MAX`] names, and
    /// empty for opaque requests.
    pub model: Box<str>,
    /// The model name that the engine got.
    pub target_model: Box<str>,
    /// The priority. 0 if the model is `other`.
    pub priority: i32,
}

/// Tokens of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounters {
    /// Prompt tokens, as reported by engines.
    pub prompt: u64,
    /// Output tokens as reported by engines, or estimated if engines report none.
    pub completion: u64,
    /// Prompt tokens that engines had cached, as reported by them.
    pub cached: u64,
    /// The prompt tokens that were not cached, by cause, in the order of [`MISS_CAUSES`]. With
    /// `cached` they add up to `prompt`.
    pub missed: [u64; MISS_CAUSES.len()],
}

/// The counters of the requests of one label.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelCounters {
    pub label: ModelLabel,
    /// The source of the name.
    pub source: LabelSource,
    /// Requests that got an endpoint. A request whose model has no label yet is counted at its
    /// success, or otherwise at its end.
    pub requests: u64,
    /// Replies with an error status, by status.
    pub errors: Vec<(u16, u64)>,
    /// Time from pick to end, ms.
    pub duration_ms: CountHistogram,
    /// Time from pick to first token, ms. Only streamed requests are measured.
    pub ttft_ms: CountHistogram,
    /// Time per output token after the first, ms. Only streamed requests with known token counts
    /// are measured.
    pub tpot_ms: CountHistogram,
    /// Tokens of the requests' prompts and outputs.
    pub tokens: TokenCounters,
    /// Bytes of request bodies.
    pub request_bytes: u64,
    /// Bytes of response bodies.
    pub response_bytes: u64,
    /// How many of the requests have not ended.
    pub running: u64,
    /// Requests with an SLO, by outcome: met, missed, shed.
    pub slo: [u64; 3],
}

/// A forwarded request, and the row that counts it.
#[derive(Debug)]
pub struct CountedRequest {
    label: ModelLabel,
    bytes: u64,
    /// Whether the label has a row. If not, the request is counted at its success, or at its end as
    /// `other`.
    named: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolCounters {
    endpoints: Vec<EndpointCounters>,
    models: Vec<ModelCounters>,
    candidates: NameCandidates,
    dropped: Vec<(&'static str, u64)>,
    /// Estimated prompt tokens of all picks.
    pub prompt_tokens: u64,
    /// How many of `prompt_tokens` the picked endpoint had cached, as estimated.
    pub matched_tokens: u64,
}

// === impl CountHistogram ===

impl CountHistogram {
    /// Counts `value` in the bucket of the first bound that is not below it.
    pub fn record(&mut self, value: f64, bounds: &[u32; 20]) {
        let bucket = bounds.partition_point(|&bound| f64::from(bound) < value);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum += value;
    }
}

// === impl TokenCounters ===

impl TokenCounters {
    /// Adds the tokens of a request. Cached tokens beyond the length of the prompt do not count.
    pub fn add(&mut self, usage: &TokenUsage, missed: &MissedTokens) {
        let prompt = usage.prompt_tokens.unwrap_or(0);
        self.prompt += u64::from(prompt);
        self.completion += u64::from(usage.completion_tokens.unwrap_or(0));
        self.cached += u64::from(usage.cached_tokens.unwrap_or(0).min(prompt));
        self.missed
            .iter_mut()
            .zip(missed.0)
            .for_each(|(total, tokens)| *total += u64::from(tokens));
    }
}

// === impl CountedRequest ===

impl CountedRequest {
    /// The requested model, if its name has no label.
    pub(super) fn unnamed_model(&self) -> Option<&str> {
        (!self.named).then_some(&*self.label.model)
    }

    fn label(&self) -> Option<&ModelLabel> {
        self.named.then_some(&self.label)
    }
}

// === impl PoolCounters ===

impl PoolCounters {
    /// The counters of each endpoint of the current snapshot.
    #[must_use]
    pub fn endpoints(&self) -> &[EndpointCounters] {
        &self.endpoints
    }

    /// The counters of each label.
    #[must_use]
    pub fn models(&self) -> &[ModelCounters] {
        &self.models
    }

    /// Requests that this proxy refused, by drop reason.
    #[must_use]
    pub fn dropped(&self) -> &[(&'static str, u64)] {
        &self.dropped
    }

    /// Counts a request that was refused for this reason.
    pub fn count_dropped(&mut self, reason: &'static str) {
        match self.dropped.iter_mut().find(|(r, _)| *r == reason) {
            Some((_, count)) => *count += 1,
            None => self.dropped.push((reason, 1)),
        }
    }

    /// Counts a request for `model` that was forwarded with the name `target_model`.
    pub fn count_sent(
        &mut self,
        model: &str,
        target_model: &str,
        priority: i32,
        bytes: usize,
    ) -> CountedRequest {
        let label = ModelLabel {
            model: shortened(model),
            target_model: shortened(target_model),
            priority,
        };
        let cut = label.cut();
        let known = |label: &ModelLabel| self.models.iter().any(|m| m.label == *label);
        // A request without a model name needs no label of its own.
        let (label, named) = if model.is_empty() || known(&label) {
            (label, true)
        } else {
            let named = cut.as_ref().is_some_and(known);
            (cut.filter(|_| named).unwrap_or(label), named)
        };
        let counted = CountedRequest {
            label,
            bytes: bytes as u64,
            named,
        };
        if named {
            self.begin(&counted);
        }
        counted
    }

    /// Counts the end of a request. Returns the row for further counts.
    pub fn count_ended(&mut self, counted: &CountedRequest) -> &mut ModelCounters {
        if !counted.named {
            self.begin(counted);
        }
        // The counts of a replaced row are added to `other`.
        let label = counted
            .label()
            .filter(|label| self.position(label).is_some());
        let row = self.row(label);
        row.running = row.running.saturating_sub(1);
        row
    }

    #[inline(never)]
    fn begin(&mut self, counted: &CountedRequest) {
        let row = self.row(counted.label());
        row.requests += 1;
        row.running += 1;
        row.request_bytes += counted.bytes;
    }

    /// Counts a request with an SLO that was shed. The model of the request gets no label, because
    /// no endpoint confirmed that the model exists.
    #[cold]
    pub fn count_shed(&mut self, model: &str, target_model: &str, priority: i32) {
        let known = self
            .models
            .iter()
            .any(|row| *row.label.model == *model && *row.label.target_model == *target_model);
        let label = known.then(|| ModelLabel {
            model: model.into(),
            target_model: target_model.into(),
            priority,
        });
        let [.., shed] = &mut self.row(label.as_ref()).slo;
        *shed += 1;
    }

    pub(super) fn keep_endpoints(&mut self, refs: &[EndpointRef]) {
        for &endpoint in refs {
            if !self.endpoints.iter().any(|e| e.endpoint == endpoint) {
                self.endpoints.push(EndpointCounters {
                    endpoint,
                    picked: 0,
                    served: 0,
                    failed: 0,
                    reports_cached: false,
                });
            }
        }
    }

    pub(super) fn forget(&mut self, endpoint: EndpointRef) {
        self.endpoints.retain(|e| e.endpoint != endpoint);
    }

    pub(super) fn count_pick(
        &mut self,
        endpoint: EndpointRef,
        prompt_tokens: u32,
        matched_tokens: u32,
    ) {
        self.prompt_tokens += u64::from(prompt_tokens);
        self.matched_tokens += u64::from(matched_tokens);
        self.with(endpoint, |e| e.picked += 1);
    }

    pub(super) fn count_served(&mut self, endpoint: EndpointRef) {
        self.with(endpoint, |e| e.served += 1);
    }

    pub(super) fn count_failed(&mut self, endpoint: EndpointRef) {
        self.with(endpoint, |e| e.failed += 1);
    }

    /// Completes the usage that `endpoint` reported. If an engine has reported cached tokens
    /// before, and now reports none, it had none cached (vLLM leaves out a zero).
    pub fn complete_usage(&mut self, endpoint: EndpointRef, usage: TokenUsage) -> TokenUsage {
        let Some(row) = self
            .endpoints
            .iter_mut()
            .find(|row| row.endpoint == endpoint)
        else {
            return usage;
        };
        row.reports_cached |= usage.cached_tokens.is_some();
        let zero = Some(0).filter(|_| row.reports_cached && usage.prompt_tokens.is_some());
        TokenUsage {
            cached_tokens: usage.cached_tokens.or(zero),
            ..usage
        }
    }

    fn with(&mut self, endpoint: EndpointRef, update: impl FnOnce(&mut EndpointCounters)) {
        if let Some(row) = self.endpoints.iter_mut().find(|e| e.endpoint == endpoint) {
            update(row);
        }
    }

    /// The row of the label, if it exists or there is room for it. Otherwise the row of `other`.
    #[inline(never)] // called from many places; inlining would enlarge the wasm module
    fn row(&mut self, label: Option<&ModelLabel>) -> &mut ModelCounters {
        let known = label.and_then(|label| self.position(label));
        let position = known.unwrap_or_else(|| {
            let label = label
                .filter(|_| !self.is_full())
                .cloned()
                .unwrap_or_else(other);
            self.position(&label).unwrap_or_else(|| {
                self.models.push(ModelCounters {
                    label,
                    ..ModelCounters::default()
                });
                self.models.len() - 1
            })
        });
        #[expect(clippy::indexing_slicing, reason = "found or pushed just above")]
        &mut self.models[position]
    }
}

/// The label of requests without a label of their own.
fn other() -> ModelLabel {
    ModelLabel {
        model: OTHER.into(),
        target_model: OTHER.into(),
        priority: 0,
    }
}

/// The name under which a model is counted: `other` if the name is too long, because a running
/// request keeps its name in memory.
fn shortened(model: &str) -> Box<str> {
    if model.len() <= MODEL_NAME_BYTES_MAX {
        model
    } else {
        OTHER
    }
    .into()
}

impl ModelCounters {
    fn errors_of(&mut self, status: u16, more: u64) {
        match self.errors.iter_mut().find(|(s, _)| *s == status) {
            Some((_, count)) => *count += more,
            None => self.errors.push((status, more)),
        }
    }

    /// Counts an error reply with this status.
    pub fn error(&mut self, status: u16) {
        self.errors_of(status, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_counted_by_status() {
        let mut counters = ModelCounters::default();
        [503, 400, 503]
            .into_iter()
            .for_each(|status| counters.error(status));
        assert_eq!(counters.errors, [(503, 2), (400, 1)]);
    }

    #[test]
    fn targets_and_priorities_are_counted_separately() {
        let mut counters = PoolCounters::default();
        for (target, priority) in [("a", 0), ("b", 0), ("a", -1), ("a", 0)] {
            let mut counted = counters.count_sent("m", target, priority, 1);
            counters.count_success(&mut counted, LabelSource::Listed);
        }
        let rows: Vec<_> = counters
            .models()
            .iter()
            .map(|m| (&*m.label.target_model, m.label.priority, m.requests))
            .collect();
        assert_eq!(rows, [("a", 0, 2), ("b", 0, 1), ("a", -1, 1)]);
    }

    #[test]
    fn a_value_on_a_bound_belongs_to_it() {
        let mut h = CountHistogram::default();
        for v in [0.5, 1.0, 1.5, 600_000.0, 600_001.0] {
            h.record(v, &DURATION_BOUNDS_MS);
        }
        assert_eq!(
            (h.counts[0], h.counts[1], h.counts[19], h.counts[20]),
            (2, 1, 1, 1)
        );
        assert_eq!(h.sum, 1_200_004.0);
    }
}
