//! Scorers rate how good each candidate is, from 0 to 1. A higher score is better.
//!
//! **Unknown is neither full nor idle.** An endpoint whose metric is missing, stale or not a valid
//! number gets the mean score of the other candidates, so that the scorer is neutral about that
//! endpoint. A fixed score would attract all traffic in a busy pool and no traffic in an idle pool.
//! If no candidate's metric is known, all candidates get [`UNKNOWN`].

pub(crate) mod active_request;
pub(crate) mod context_length_aware;
pub(crate) mod endpoint_attribute;
pub(crate) mod header_label_affinity;
pub(crate) mod kv_cache_utilization;
pub(crate) mod latency;
pub(crate) mod load_aware;
pub(crate) mod lora_affinity;
pub(crate) mod marginal_cost;
pub(crate) mod no_hit_lru;
pub(crate) mod prefix_cache;
pub(crate) mod queue;
pub(crate) mod running_requests_size;
pub(crate) mod session_affinity;
pub(crate) mod token_load;

use crate::endpoint::EndpointIndex;
use crate::plugin::{Parameter, producer_name};

/// The score of all candidates if no metric is known. The score is the middle of the range, so that
/// a random picker weighs the other scorers as in an average pool.
pub(crate) const UNKNOWN: f32 = 0.5;

/// The parameter that names the prefix index that a plugin reads.
pub(crate) const PREFIX_PRODUCER: Parameter = producer_name("prefixMatchInfoProducerName");

/// Writes the `rating` of each endpoint as its score. Where the rating is `None`, writes the mean
/// of the known ratings.
pub(crate) fn rate(
    endpoints: &[EndpointIndex],
    scores: &mut [f32],
    rating: impl Fn(EndpointIndex) -> Option<f32>,
) {
    write(endpoints, scores, rating);
    give_unknown_the_mean(scores);
}

/// Writes scores by min-max normalisation of a load over the candidates: `(max - load) / (max -
/// min)`. If all loads are equal, every score is 1.
pub(crate) fn rate_by_load(
    endpoints: &[EndpointIndex],
    scores: &mut [f32],
    load: impl Fn(EndpointIndex) -> Option<f32>,
) {
    write(endpoints, scores, load);
    let mut min = f32::INFINITY;
    let mut max = f32::NEG_INFINITY;
    for &load in &*scores {
        // The comparisons skip NaN, because comparisons with NaN are false. `f32::min` and
        // `f32::max` would skip NaN too, but take more time in wasm.
        if load < min {
            min = load;
        }
        if load > max {
            max = load;
        }
    }
    let span = max - min;
    for score in scores.iter_mut().filter(|score| !score.is_nan()) {
        *score = if span > 0.0 {
            (max - *score) / span
        } else {
            1.0
        };
    }
    give_unknown_the_mean(scores);
}

/// Returns the share of the other values that are below `moment`, or 0 if `sorted` has no other
/// value. `sorted` contains all values, `moment` included.
pub(crate) fn share_before(sorted: &[u64], moment: u64) -> f32 {
    let before = sorted.partition_point(|&other| other < moment);
    // The casts are exact, because a pool has far fewer than 2^24 endpoints.
    before as f32 / sorted.len().saturating_sub(1).max(1) as f32
}

/// Writes one finite number for each endpoint into `scores`, and NaN for an endpoint whose number
/// is unknown.
fn write(
    endpoints: &[EndpointIndex],
    scores: &mut [f32],
    value: impl Fn(EndpointIndex) -> Option<f32>,
) {
    for (score, &endpoint) in scores.iter_mut().zip(endpoints) {
        *score = value(endpoint).unwrap_or(f32::NAN);
    }
}

/// Replaces each NaN by the mean of the other scores, or by [`UNKNOWN`] if all scores are NaN.
fn give_unknown_the_mean(scores: &mut [f32]) {
    if !scores.iter().any(|score| score.is_nan()) {
        return;
    }
    let known = scores.iter().copied().filter(|score| !score.is_nan());
    let (sum, count) = known.fold((0.0_f64, 0_u32), |(sum, count), score| {
        (sum + f64::from(score), count + 1)
    });
    // An f32 is precise enough, because the mean is from 0 to 1.
    let mean = if count == 0 {
        UNKNOWN
    } else {
        (sum / f64::from(count)) as f32
    };
    for score in scores.iter_mut().filter(|score| score.is_nan()) {
        *score = mean;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(values: &[Option<f32>]) -> Vec<EndpointIndex> {
        (0..u16::try_from(values.len()).unwrap())
            .map(EndpointIndex)
            .collect()
    }

    fn ratings(values: &[Option<f32>]) -> Vec<f32> {
        let mut scores = vec![0.0; values.len()];
        rate(&endpoints(values), &mut scores, |endpoint| {
            values[endpoint.get()]
        });
        scores
    }

    fn loads(values: &[Option<f32>]) -> Vec<f32> {
        let mut scores = vec![0.0; values.len()];
        rate_by_load(&endpoints(values), &mut scores, |endpoint| {
            values[endpoint.get()]
        });
        scores
    }

    #[test]
    fn unknown_gets_the_mean_of_the_known() {
        assert_eq!(
            ratings(&[Some(0.25), None, Some(0.75), None]),
            [0.25, 0.5, 0.75, 0.5]
        );
        assert_eq!(
            ratings(&[Some(0.1), None]),
            [0.1, 0.1],
            "in a busy pool the unknown one is no refuge"
        );
        assert_eq!(ratings(&[None, None]), [UNKNOWN, UNKNOWN]);
        assert_eq!(ratings(&[]), [0.0; 0]);
    }

    #[test]
    fn min_max_spans_the_known() {
        assert_eq!(loads(&[Some(10.0), Some(0.0), Some(5.0)]), [0.0, 1.0, 0.5]);
        assert_eq!(loads(&[Some(7.0), Some(7.0)]), [1.0, 1.0]);
        assert_eq!(loads(&[Some(7.0)]), [1.0]);
        assert_eq!(loads(&[Some(10.0), None, Some(0.0)]), [0.0, 0.5, 1.0]);
        assert_eq!(
            loads(&[None, Some(3.0)]),
            [1.0, 1.0],
            "one known value has nothing to be compared with"
        );
        assert_eq!(loads(&[Some(f32::MAX), Some(0.0)]), [0.0, 1.0]);
    }
}
