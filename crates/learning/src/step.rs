//! Learns a step model from observed steps, one sample at a time and at constant cost.
//!
//! Each of the two times, of a prefill and of a decode step, is linear in three inputs with
//! non-negative weights. Weights are learned as multiples of their priors, by least squares of the
//! *relative* error, so a short prefill counts as much as a long one. Old samples are forgotten. A
//! ridge pulls all weights towards one common scale, with which the prior would be right on
//! average. So the scale is right after a handful of samples, and the single weights follow when
//! inputs vary. Samples are clipped, so that one stall has little effect. A new fit weighs and
//! clips the newest samples again, so that the very first sample decides nothing.
//!
//! An endpoint's speed is the ratio of its observed times to those of other endpoints for similar
//! inputs, divided by the same ratio over all endpoints. So a change of the whole pool changes the
//! pool's model and no speed. Comparing similar inputs matters for engines that the formula does
//! not fit. Such engines take longer than expected for some inputs on every endpoint, and an
//! endpoint that gets more of these inputs is not slower. The evidence for a speed counts less with
//! time: see the module `speed`.
//!
//! Source: the simulations in which the default policy was tuned. In them, picks with this learner
//! are as good as with the true formulas.

mod least_squares_fit;
mod speed;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use least_squares_fit::LeastSquaresFit;
use speed::{IDLE_MS, SpeedEvidence};

use scheduler::latency::step::{OUTPUT_TOKENS, StepModel};
use scheduler::latency::{FirstToken, TokenGap};
use scheduler::sort::lower_median;
use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};

use crate::origins::{SILENT_MS, VOTERS_MAX};

#[derive(Clone, Debug)]
pub struct StepLearner {
    prefill: LeastSquaresFit,
    decode: LeastSquaresFit,
    /// The mean number of output tokens of a request in the prior.
    output_tokens: f64,
    /// The evidence on the speeds, by slot.
    endpoints: Vec<EndpointEvidence>,
    /// The latest time that [`Self::advance`] received, in ms.
    now_ms: u64,
}

/// Lower bounds of the weights in a fit.
#[derive(Clone, Copy, Debug)]
struct WeightFloors {
    least_ms: [f32; 3],
    of_first: [f32; 3],
}

/// The evidence on the speeds of one endpoint.
#[derive(Clone, Debug)]
struct EndpointEvidence {
    generation: Generation,
    prefill: SpeedEvidence,
    decode: SpeedEvidence,
    /// The output lengths that each origin observed; at most [`VOTERS_MAX`] origins.
    outputs: Vec<OutputMean>,
    /// The time that [`StepLearner::advance`] had last received when the endpoint's last sample
    /// arrived, in ms.
    used_ms: u64,
}

/// The effect of a sample on the learned speed of its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// The sample is compared with earlier samples of similar inputs.
    Similar,
    /// The sample is not compared, because something other than speed explains its time. The sample
    /// shows that the endpoint is in use.
    Incomparable,
    /// The sample is not compared, because its sender may have invented it. The evidence for the
    /// endpoint's speed loses weight as if the sample had not arrived.
    Doubtful,
}

/// The mean number of output tokens of the requests that one origin observed at one endpoint.
#[derive(Clone, Copy, Debug)]
struct OutputMean {
    origin: u64,
    tokens: f64,
    requests: f64,
    /// The time of the last of these requests, in ms.
    at_ms: u64,
}

/// The factor by which each new sample reduces the sums of a fit. The fits remember about 1,000
/// first tokens and 500 gaps.
const PREFILL_KEEP: f64 = 0.999;
const DECODE_KEEP: f64 = 0.998;

/// The minimum cost of each term of a step: in ms, and relative to the first term. The minimum is a
/// tenth of the time of the fastest accelerators. Without the minimum, the model of an engine whose
/// time does not grow with the prompt or the batch would say that load and lost prefixes cost
/// nothing.
const PREFILL_FLOORS: WeightFloors = WeightFloors {
    least_ms: [0.0, 0.001, 0.0],
    of_first: [0.0, 1e-4, 0.0],
};
const DECODE_FLOORS: WeightFloors = WeightFloors {
    least_ms: [0.0, 5e-4, 1e-6],
    of_first: [0.0, 2e-4, 1e-6],
};

/// The valid range of a sample in ms, and the largest valid number of tokens or requests.
const SAMPLE_MS: std::ops::RangeInclusive<f32> = 0.01..=600_000.0;
const SAMPLE_COUNT_MAX: f32 = 16_777_216.0;

/// The minimum weight of each new output length in the mean of its endpoint. The weight corresponds
/// to a memory of about 200 requests.
const OUTPUT_WEIGHT: f64 = 0.005;

/// The weight of the prior, in requests of each endpoint. A mean of eight requests is right within
/// a third if outputs differ as much as their mean.
const OUTPUT_PRIOR: f64 = 8.0;

// === impl StepLearner ===

impl Default for StepLearner {
    fn default() -> Self {
        Self::starting_from(&StepModel::default())
    }
}

impl StepLearner {
    /// Creates a learner with this model as its prior, for example from an earlier run or another
    /// pool. The learner does not take over the endpoints' speeds, but learns the speeds again
    /// within some tens of requests.
    #[must_use]
    pub fn starting_from(model: &StepModel) -> Self {
        Self {
            prefill: LeastSquaresFit::new(model.prefill(), PREFILL_KEEP),
            decode: LeastSquaresFit::new(model.decode(), DECODE_KEEP),
            output_tokens: f64::from(model.output_tokens()),
            endpoints: Vec::new(),
            now_ms: 0,
        }
    }

    /// Sets the time to `now_ms`, in ms since any fixed time. The evidence for the speed of an
    /// endpoint without samples loses its weight within about 30 s. The caller calls this function
    /// about once a second. The idle time of an endpoint begins 10 s after the call before its last
    /// sample. A time earlier than that of the last call changes nothing.
    pub fn advance(&mut self, now_ms: u64) {
        for row in &mut self.endpoints {
            let idle_from = self.now_ms.max(row.used_ms.saturating_add(IDLE_MS));
            let idle_ms = now_ms.saturating_sub(idle_from) as f64;
            row.prefill.fade(idle_ms);
            row.decode.fade(idle_ms);
        }
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// Returns the latest time that [`Self::advance`] received, in ms.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Returns the logarithms of the time of this prefill, and of the time by `prior`, each divided
    /// by the time on an average endpoint. Returns `None` if the sample is impossible.
    pub(crate) fn prefill_logs(&self, sample: &FirstToken, prior: &StepModel) -> Option<[f64; 2]> {
        let inputs = prefill_inputs(sample).filter(|_| SAMPLE_MS.contains(&sample.service_ms))?;
        let prior_ms = prior.prefill_ms(sample.uncached_tokens, sample.prompt_tokens);
        Some([sample.service_ms, prior_ms].map(|ms| self.prefill.log_of(&inputs, ms)))
    }

    /// Does for a decode step what [`Self::prefill_logs`] does for a prefill step.
    pub(crate) fn decode_logs(&self, sample: &TokenGap, prior: &StepModel) -> Option<[f64; 2]> {
        let inputs = decode_inputs(sample).filter(|_| SAMPLE_MS.contains(&sample.gap_ms))?;
        let prior_ms = prior.decode_ms(sample.batch, sample.context_tokens);
        Some([sample.gap_ms, prior_ms].map(|ms| self.decode.log_of(&inputs, ms)))
    }

    /// Learns from a first token. `queued` says whether the endpoint sent first tokens of other
    /// requests between the pick of this request and its first token. Returns `false` for an
    /// impossible sample, which is ignored.
    pub fn first_token(
        &mut self,
        endpoint: EndpointRef,
        sample: &FirstToken,
        queued: bool,
    ) -> bool {
        // First tokens that follow each other closely show a fast endpoint, or one that works on
        // many prompts at the same time. If these first tokens were compared, an endpoint would
        // seem faster the more requests it gets.
        let comparison = if queued {
            Comparison::Incomparable
        } else {
            Comparison::Similar
        };
        self.prefill_step(endpoint, sample, comparison)
    }

    /// Learns from a first token as [`Self::first_token`] does; `comparison` says how the sample
    /// changes the learned speed of the endpoint.
    pub(crate) fn prefill_step(
        &mut self,
        endpoint: EndpointRef,
        sample: &FirstToken,
        comparison: Comparison,
    ) -> bool {
        let service_ms = sample.service_ms;
        let Some(inputs) = prefill_inputs(sample) else {
            return false;
        };
        let pool = self.pool(|row| row.prefill);
        let Some(row) =
            row(&mut self.endpoints, endpoint).filter(|_| SAMPLE_MS.contains(&service_ms))
        else {
            return false;
        };
        let speed = self.prefill.speed(row.prefill, pool);
        let seen_ms = self.prefill.learn(speed, &inputs, service_ms);
        match comparison {
            Comparison::Similar => {
                self.prefill
                    .compare(&mut row.prefill, pool, speed, &inputs, seen_ms);
            }
            Comparison::Incomparable => row.prefill.pass_over(),
            Comparison::Doubtful => return true,
        }
        row.used_ms = self.now_ms;
        true
    }

    /// Learns from a gap between two tokens. Returns `false` for an impossible sample, which is
    /// ignored.
    pub fn gap(&mut self, endpoint: EndpointRef, sample: &TokenGap) -> bool {
        self.decode_step(endpoint, sample, Comparison::Similar)
    }

    /// Learns from a gap between tokens as [`Self::gap`] does; `comparison` says how the sample
    /// changes the learned speed of the endpoint.
    pub(crate) fn decode_step(
        &mut self,
        endpoint: EndpointRef,
        sample: &TokenGap,
        comparison: Comparison,
    ) -> bool {
        let gap_ms = sample.gap_ms;
        let Some(inputs) = decode_inputs(sample) else {
            return false;
        };
        let pool = self.pool(|row| row.decode);
        let Some(row) = row(&mut self.endpoints, endpoint).filter(|_| SAMPLE_MS.contains(&gap_ms))
        else {
            return false;
        };
        let speed = self.decode.speed(row.decode, pool);
        let seen_ms = self.decode.learn(speed, &inputs, gap_ms);
        match comparison {
            Comparison::Similar => {
                self.decode
                    .compare(&mut row.decode, pool, speed, &inputs, seen_ms);
            }
            Comparison::Incomparable => row.decode.pass_over(),
            Comparison::Doubtful => return true,
        }
        row.used_ms = self.now_ms;
        true
    }

    /// Learns that a request at `endpoint` ended after `output_tokens`, as its engine reports.
    pub fn ended(&mut self, endpoint: EndpointRef, output_tokens: u32) {
        self.ended_of(0, endpoint, output_tokens);
    }

    /// Learns as [`Self::ended`] does, if several proxies (origins) observe.
    pub(crate) fn ended_of(&mut self, origin: u64, endpoint: EndpointRef, output_tokens: u32) {
        let tokens = f64::from(output_tokens).min(f64::from(*OUTPUT_TOKENS.end()));
        if let Some(row) = row(&mut self.endpoints, endpoint) {
            row.ended(origin, tokens, self.output_tokens, self.now_ms);
        }
    }

    /// Returns the output tokens of a usual request. For each origin, this is the median of the
    /// endpoints' means, so that wrong reports from one engine have no effect. Of the origins that
    /// still observe, the median counts, so that wrong reports from one origin have no effect. If
    /// they are two, the prior is the third value.
    fn output_tokens(&self) -> f64 {
        let mut origins: BTreeMap<u64, (u64, Vec<f64>)> = BTreeMap::new();
        for output in self.endpoints.iter().flat_map(|row| &row.outputs) {
            let (at_ms, means) = origins.entry(output.origin).or_default();
            *at_ms = output.at_ms.max(*at_ms);
            means.push(output.tokens);
        }
        let is_active = |at_ms: u64| self.now_ms.saturating_sub(at_ms) < SILENT_MS;
        if origins.values().any(|(at_ms, _)| is_active(*at_ms)) {
            origins.retain(|_, (at_ms, _)| is_active(*at_ms));
        }
        let medians = origins.into_values().map(|(_, means)| lower_median(means));
        let mut medians: Vec<f64> = medians.flatten().collect();
        if medians.len() == 2 {
            medians.push(self.output_tokens);
        }
        lower_median(medians).unwrap_or(self.output_tokens)
    }

    /// Returns whether both times of `endpoint` were compared with those of other endpoints. The
    /// model does not tell this, because it leaves out an endpoint of average speed.
    pub fn has_compared(&self, endpoint: EndpointRef) -> bool {
        let row = self
            .endpoints
            .get(usize::from(endpoint.slot.0))
            .filter(|row| row.generation == endpoint.generation);
        row.is_some_and(|row| row.prefill.is_some() && row.decode.is_some())
    }

    /// Returns the model as learned so far.
    pub fn model(&self) -> StepModel {
        let prefill = self.pool(|row| row.prefill);
        let decode = self.pool(|row| row.decode);
        let speeds = self.endpoints.iter().enumerate().map(|(slot, row)| {
            let endpoint = EndpointRef {
                slot: Slot(u16::try_from(slot).unwrap_or(u16::MAX)),
                generation: row.generation,
            };
            let prefill = to_f32(self.prefill.speed(row.prefill, prefill));
            let decode = to_f32(self.decode.speed(row.decode, decode));
            (endpoint, prefill, decode)
        });
        let costs = StepModel::from_parts(
            PREFILL_FLOORS.under(self.prefill.weights()),
            DECODE_FLOORS.under(self.decode.weights()),
            to_f32(self.output_tokens()),
        );
        // The last slot comes first, so that the model's table grows only once.
        speeds
            .rev()
            .skip_while(|(_, prefill, decode)| (*prefill, *decode) == (1.0, 1.0))
            .fold(costs, |model, (endpoint, prefill, decode)| {
                model.with_speed(endpoint, prefill, decode)
            })
    }

    /// Returns the evidence of all endpoints together, for one of the two times.
    fn pool(&self, of: fn(&EndpointEvidence) -> SpeedEvidence) -> SpeedEvidence {
        SpeedEvidence::from_endpoints(self.endpoints.iter().map(of))
    }
}

/// Returns the inputs of a prefill's time; `None` for an impossible sample.
fn prefill_inputs(sample: &FirstToken) -> Option<[f64; 3]> {
    let FirstToken {
        uncached_tokens,
        prompt_tokens,
        ..
    } = *sample;
    let is_possible = (0.0..=SAMPLE_COUNT_MAX).contains(&prompt_tokens)
        && (0.0..=prompt_tokens).contains(&uncached_tokens);
    let u = f64::from(uncached_tokens);
    let n = f64::from(prompt_tokens);
    is_possible.then_some([1.0, u, u * (2.0 * n - u)])
}

/// Returns the inputs of a decode step's time; `None` for an impossible sample.
fn decode_inputs(sample: &TokenGap) -> Option<[f64; 3]> {
    let counts = [sample.batch, sample.context_tokens];
    let is_possible = counts
        .iter()
        .all(|count| (0.0..=SAMPLE_COUNT_MAX).contains(count));
    is_possible.then_some([
        1.0,
        f64::from(sample.batch),
        f64::from(sample.context_tokens),
    ])
}

/// Returns the row of an endpoint. Empties a row of another generation first.
fn row(
    endpoints: &mut Vec<EndpointEvidence>,
    endpoint: EndpointRef,
) -> Option<&mut EndpointEvidence> {
    let slot = usize::from(endpoint.slot.0);
    if slot >= ENDPOINTS_MAX {
        return None;
    }
    if endpoints.len() <= slot {
        endpoints.resize(slot + 1, EndpointEvidence::nothing(Generation(0)));
    }
    let row = endpoints.get_mut(slot)?;
    if row.generation != endpoint.generation {
        *row = EndpointEvidence::nothing(endpoint.generation);
    }
    Some(row)
}

// === impl EndpointEvidence ===

impl EndpointEvidence {
    fn nothing(generation: Generation) -> Self {
        Self {
            generation,
            prefill: SpeedEvidence::default(),
            decode: SpeedEvidence::default(),
            outputs: Vec::new(),
            used_ms: 0,
        }
    }

    /// Records the output tokens of a request that `origin` observed. The mean of a new origin
    /// starts from `prior`, and takes the place of the oldest mean if there are too many.
    fn ended(&mut self, origin: u64, tokens: f64, prior: f64, now_ms: u64) {
        let mut known = self.outputs.iter_mut();
        if let Some(mean) = known.find(|mean| mean.origin == origin) {
            mean.record(tokens, now_ms);
            return;
        }
        if self.outputs.len() >= VOTERS_MAX {
            self.outputs.sort_by_key(|mean| Reverse(mean.at_ms));
            self.outputs.pop();
        }
        let mut mean = OutputMean {
            origin,
            tokens: prior,
            requests: 0.0,
            at_ms: now_ms,
        };
        mean.record(tokens, now_ms);
        self.outputs.push(mean);
    }
}

// === impl OutputMean ===

impl OutputMean {
    fn record(&mut self, tokens: f64, now_ms: u64) {
        self.at_ms = now_ms;
        self.requests += 1.0;
        let weight = OUTPUT_WEIGHT.max(1.0 / (self.requests + OUTPUT_PRIOR));
        self.tokens += weight * (tokens - self.tokens);
    }
}

// === impl WeightFloors ===

impl WeightFloors {
    fn under(self, weights: [f32; 3]) -> [f32; 3] {
        let [first, ..] = weights;
        let mut weights = weights;
        for ((weight, least_ms), share) in weights.iter_mut().zip(self.least_ms).zip(self.of_first)
        {
            *weight = weight.max(least_ms).max(share * first);
        }
        weights
    }
}

// The cast rounds, which is intended.
fn to_f32(number: f64) -> f32 {
    number as f32
}

#[cfg(test)]
mod tests;
