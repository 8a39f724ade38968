//! `latency-scorer` and `slo-scorer`, which prefer endpoints that meet all SLOs, and rank these
//! endpoints by headroom (SLO minus predicted latency).
//!
//! Each endpoint is in a tier, and only the endpoints of the best tier in use are scored:
//!
//! ```text
//!  Meets      all SLOs are met: the request's own, and the lowest of the requests at the endpoint
//!  Idle       not met, but nothing is in flight at the endpoint, so no other request is late
//!  TpotLate   only TPOT is too long
//!  TtftLate   only TTFT is too long
//!  BothLate   both are too long
//! ```
//! Within a tier, both headrooms are scaled to 0..1 (min-max) and blended. A headroom that is equal
//! everywhere has no effect. If SLOs are met, the strategy decides whether little headroom is
//! better (pack, which keeps room for large requests) or much headroom (spread). If SLOs are not
//! met, the endpoint that exceeds them least is best.
//!
//! An endpoint without a prediction gets the mean score of the scored endpoints. If no endpoint has
//! a prediction, the score is a mix of KV cache, queue and prefix (llm-d's composite).

use super::{PREFIX_PRODUCER, rate};
use crate::endpoint::EndpointIndex;
use crate::metrics::{KV_CACHE_UTILIZATION, QUEUE_DEPTH};
use crate::plugin::{
    Context, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, Shedder,
    producer_name, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::predictions::{EndpointPrediction, Headroom};

/// The parameter that says whether endpoints with little or with much headroom get the higher
/// score. If the configuration does not set this parameter, the daemon takes the value from its
/// environment.
const STRATEGY: Parameter = Parameter::text(
    "headroomSelectionStrategy",
    "least",
    "where SLOs are met: least (lowest) headroom first, or most (highest); default from the \
        daemon's HEADROOM_SELECTION_STRATEGY",
);
const TTFT_WEIGHT: Parameter =
    Parameter::number("ttftWeight", 0.8, "weight of TTFT headroom, 0 to 1e6");
const TPOT_WEIGHT: Parameter =
    Parameter::number("tpotWeight", 0.2, "weight of TPOT headroom, 0 to 1e6");
const COMPOSITE_KV: Parameter = Parameter::number(
    "compositeKVWeight",
    1.0,
    "without predictions: weight of free KV cache, 0 to 1e6",
);
const COMPOSITE_QUEUE: Parameter = Parameter::number(
    "compositeQueueWeight",
    1.0,
    "without predictions: weight of a short queue, 0 to 1e6",
);
const COMPOSITE_PREFIX: Parameter = Parameter::number(
    "compositePrefixWeight",
    1.0,
    "without predictions: weight of the cached share of the prompt, 0 to 1e6",
);

pub(crate) const LATENCY: PluginType = PluginType {
    name: "latency-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "Tiers, best first: SLOs met; idle; only TPOT late; only TTFT late; both late. The best \
        tier with an endpoint gets (floor(100 (1 - h)) + 1) / 100, the others 0. h = ttftWeight * \
        TTFT headroom + tpotWeight * TPOT headroom, each scaled to 0..1 over the tier. Strategy \
        most uses h instead of 1 - h where SLOs are met. Without predictions: a mix of free KV \
        cache, queue and prefix.",
    ),
    source: readable("llm-d-router, scorer/latency"),
    parameters: &[
        TTFT_WEIGHT,
        TPOT_WEIGHT,
        STRATEGY,
        COMPOSITE_KV,
        COMPOSITE_QUEUE,
        COMPOSITE_PREFIX,
        producer_name("latencyPredictionInfoProducerName"),
        PREFIX_PRODUCER,
    ],
    needs: NEEDS,
    build: |parameters| Ok(Plugin::Scorer(Box::new(LatencyScorer::read(parameters)?))),
};

pub(crate) const SLO: PluginType = PluginType {
    name: "slo-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "As latency-scorer, but a weighted random pick takes an endpoint outside the best tier \
        with probability explorationShare. Endpoints that would be late come last in the ranked \
        list. If no endpoint meets the SLOs or is idle, a request with an SLO and a priority below \
        shedBelowPriority is shed (429).",
    ),
    source: readable("Gateway API Inference Extension, issue 1323"),
    parameters: &[
        STRATEGY,
        TTFT_WEIGHT,
        TPOT_WEIGHT,
        Parameter::number("explorationShare", 0.01, "the probability, 0 to 0.5"),
        Parameter::number(
            "shedBelowPriority",
            1.0,
            "the lowest priority that is not shed, integer from 0; Critical is 1",
        ),
        COMPOSITE_KV,
        COMPOSITE_QUEUE,
        COMPOSITE_PREFIX,
    ],
    needs: NEEDS,
    build: |parameters| {
        let latency = LatencyScorer::read(parameters)?;
        let shed_below = parameters.integer("shedBelowPriority", 0..=i32::MAX as u32)?;
        let scorer = SloScorer {
            latency,
            exploration_share: parameters.number("explorationShare", 0.0..=0.5)?,
        };
        let shedder = SloShedder {
            below_priority: i32::try_from(shed_below).unwrap_or(i32::MAX),
        };
        Ok(Plugin::SheddingScorer(Box::new(scorer), Box::new(shedder)))
    },
};

const NEEDS: &[RequiredState] = &[
    RequiredState::Latency,
    RequiredState::InFlight,
    RequiredState::PrefixIndex,
    RequiredState::Prompt,
    RequiredState::Metric(&QUEUE_DEPTH),
    RequiredState::Metric(&KV_CACHE_UTILIZATION),
];

/// Whether little or much headroom gets the higher score at endpoints that meet the SLOs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeadroomStrategy {
    Least,
    Most,
}

/// The tier of an endpoint; the best tier is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum HeadroomTier {
    Meets,
    Idle,
    TpotLate,
    TtftLate,
    BothLate,
}

#[derive(Debug)]
struct LatencyScorer {
    ttft_weight: f64,
    tpot_weight: f64,
    strategy: HeadroomStrategy,
    /// The weights of free KV cache, queue and prefix. The sum of the weights is 1.
    composite: [f32; 3],
}

#[derive(Debug)]
struct SloScorer {
    latency: LatencyScorer,
    exploration_share: f64,
}

/// Sheds requests below a priority if no endpoint would serve these requests in time.
#[derive(Debug)]
struct SloShedder {
    below_priority: i32,
}

/// The minimum and maximum of the TTFT headroom, or of the TPOT headroom, over a tier.
#[derive(Clone, Copy)]
struct HeadroomRange {
    least: f64,
    greatest: f64,
}

// === impl LatencyScorer ===

impl LatencyScorer {
    fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        let number = |parameter: &Parameter| parameters.number(parameter.name, 0.0..=1e6);
        let strategies = [
            ("least", HeadroomStrategy::Least),
            ("lowest", HeadroomStrategy::Least),
            ("most", HeadroomStrategy::Most),
            ("highest", HeadroomStrategy::Most),
        ];
        let weights = [
            number(&COMPOSITE_KV)?,
            number(&COMPOSITE_QUEUE)?,
            number(&COMPOSITE_PREFIX)?,
        ];
        let sum: f64 = weights.iter().sum();
        let composite = if sum > 0.0 {
            weights.map(|weight| (weight / sum) as f32)
        } else {
            [1.0, 0.0, 0.0]
        };
        Ok(Self {
            ttft_weight: number(&TTFT_WEIGHT)?,
            tpot_weight: number(&TPOT_WEIGHT)?,
            strategy: parameters.choice(STRATEGY.name, &strategies)?,
            composite,
        })
    }

    /// Scores the endpoints of the best tier. The endpoints of other tiers get 0, and endpoints
    /// without a prediction get the mean score of the best tier. Returns false if no endpoint has a
    /// prediction.
    fn score_best_tier(
        &self,
        context: &Context<'_>,
        endpoints: &[EndpointIndex],
        scores: &mut [f32],
    ) -> bool {
        let known = || {
            endpoints
                .iter()
                .map(|&endpoint| context.prediction(endpoint))
        };
        let Some(best) = known().flatten().map(tier).min() else {
            return false;
        };
        let in_tier = || {
            known()
                .flatten()
                .filter(|predicted| tier(predicted) == best)
        };
        let ttft = HeadroomRange::from_headrooms(in_tier().map(|p| p.ttft));
        let tpot = HeadroomRange::from_headrooms(in_tier().map(|p| p.tpot));
        let (alpha, beta) = self.weights(ttft, tpot);
        let most = best == HeadroomTier::Meets && self.strategy == HeadroomStrategy::Most;
        for (score, predicted) in scores.iter_mut().zip(known()) {
            *score = match predicted {
                None => f32::NAN,
                Some(predicted) if tier(predicted) == best => {
                    let combined =
                        alpha * ttft.place(predicted.ttft) + beta * tpot.place(predicted.tpot);
                    graded(if most { combined } else { 1.0 - combined })
                }
                Some(_) => 0.0,
            };
        }
        let (sum, count) = scores
            .iter()
            .filter(|score| **score > 0.0)
            .fold((0.0, 0.0), |(sum, count), score| (sum + score, count + 1.0));
        for score in scores.iter_mut().filter(|score| score.is_nan()) {
            *score = sum / count; // the best tier is not empty, and all its scores are above 0
        }
        true
    }

    /// Returns the weights of the TTFT headroom and the TPOT headroom. If only one headroom differs
    /// between endpoints, the other headroom gets weight 0.
    fn weights(&self, ttft: HeadroomRange, tpot: HeadroomRange) -> (f64, f64) {
        let sum = self.ttft_weight + self.tpot_weight;
        match (ttft.separates(), tpot.separates()) {
            (false, true) => (0.0, 1.0),
            (true, false) => (1.0, 0.0),
            _ if sum > 0.0 => (self.ttft_weight / sum, self.tpot_weight / sum),
            _ => (1.0, 0.0),
        }
    }

    /// Computes the scores if no endpoint has a prediction.
    fn score_composite(
        &self,
        context: &Context<'_>,
        endpoints: &[EndpointIndex],
        scores: &mut [f32],
    ) {
        let queue = |endpoint| context.metric(endpoint, |m| m.queue_depth);
        let longest = endpoints
            .iter()
            .filter_map(|&endpoint| queue(endpoint))
            .fold(0.0, f32::max);
        let blocks = context.request.blocks();
        let free = |endpoint| {
            context
                .metric(endpoint, |m| m.kv_cache_utilization)
                .map(|used| 1.0 - used.min(1.0))
        };
        let short = |endpoint| {
            queue(endpoint).map(|queue| {
                if longest > 0.0 {
                    (longest - queue) / longest
                } else {
                    1.0
                }
            })
        };
        // The casts are exact, because prompts have far fewer than 2^24 blocks.
        let held = |endpoint| {
            Some(if blocks == 0 {
                0.0
            } else {
                (context.affinity_blocks(endpoint) as f32 / blocks as f32).min(1.0)
            })
        };
        let ratings: [&dyn Fn(EndpointIndex) -> Option<f32>; 3] = [&free, &short, &held];
        let mut column = vec![0.0; scores.len()];
        for (weight, rating) in self.composite.into_iter().zip(ratings) {
            rate(endpoints, &mut column, rating);
            scores
                .iter_mut()
                .zip(&column)
                .for_each(|(score, rating)| *score += weight * rating);
        }
    }
}

impl Scorer for LatencyScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        if !self.score_best_tier(context, endpoints, scores) {
            self.score_composite(context, endpoints, scores);
        }
    }
}

// === impl SloScorer ===

impl Scorer for SloScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        if !self.latency.score_best_tier(context, endpoints, scores) {
            return self.latency.score_composite(context, endpoints, scores);
        }
        let total: f32 = scores.iter().sum();
        let others = scores.iter().filter(|score| **score <= 0.0).count();
        if others > 0 {
            // The endpoints outside the best tier together get `exploration_share` of all weights,
            // in equal parts. The result is at most the total of the scores, so an f32 is precise
            // enough.
            let each = (self.exploration_share / (1.0 - self.exploration_share) * f64::from(total)
                / others as f64) as f32;
            scores
                .iter_mut()
                .filter(|score| **score <= 0.0)
                .for_each(|score| *score = each);
        }
    }
}

// === impl SloShedder ===

impl Shedder for SloShedder {
    fn sheds(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> bool {
        let yields = context.request.slo.any() && context.request.priority < self.below_priority;
        yields
            && endpoints.iter().all(|&endpoint| {
                context
                    .prediction(endpoint)
                    .is_some_and(|predicted| !predicted.is_valid())
            })
    }
}

// === impl HeadroomRange ===

impl HeadroomRange {
    const NOTHING: f64 = 1e-9;

    fn from_headrooms(headrooms: impl Iterator<Item = Headroom>) -> Self {
        let mut span = Self {
            least: f64::INFINITY,
            greatest: f64::NEG_INFINITY,
        };
        for size in headrooms.map(size).filter(|size| size.is_finite()) {
            span = Self {
                least: span.least.min(size),
                greatest: span.greatest.max(size),
            };
        }
        span
    }

    fn separates(self) -> bool {
        self.greatest - self.least > Self::NOTHING
    }

    /// Returns the position of `headroom` between minimum and maximum, from 0 to 1. Returns 0.5 if
    /// minimum and maximum are nearly equal, and 1 if the headroom is unlimited.
    fn place(self, headroom: Headroom) -> f64 {
        let size = size(headroom);
        if !self.separates() {
            0.5
        } else if size.is_finite() {
            (size - self.least) / (self.greatest - self.least)
        } else {
            1.0
        }
    }
}

fn size(headroom: Headroom) -> f64 {
    f64::from(headroom.left_ms()).abs()
}

/// Rounds a preference down to hundredths, and adds one hundredth.
// The number of hundredths is from 1 to 101, so an f32 is precise enough.
fn graded(preference: f64) -> f32 {
    ((libm::floor(preference * 100.0) + 1.0) / 100.0) as f32
}

fn tier(predicted: &EndpointPrediction) -> HeadroomTier {
    match (predicted.ttft.is_exceeded(), predicted.tpot.is_exceeded()) {
        (false, false) => HeadroomTier::Meets,
        _ if predicted.idle => HeadroomTier::Idle,
        (false, true) => HeadroomTier::TpotLate,
        (true, false) => HeadroomTier::TtftLate,
        (true, true) => HeadroomTier::BothLate,
    }
}
