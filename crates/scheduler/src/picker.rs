//! Pickers, which turn scored candidates into the ranked list.
//!
//! All three pickers select the few candidates with the highest key. The key is the score, a random
//! number weighted by the score, or equal for all. Candidates with equal keys are ordered randomly,
//! so that a tie never favours a position in the pool.

pub(crate) mod max_score;
pub(crate) mod random;
pub(crate) mod weighted_random;

use std::cmp::Ordering;

use crate::candidates::Candidates;
use crate::decision::{RANKED_MAX, RankedList};
use crate::endpoint::EndpointIndex;
use crate::plugin::{InvalidParameter, Parameter, Parameters};
use crate::rng::Rng;

/// The parameter of every picker. [`crate::Pipeline::build`] reads this parameter, since the length
/// of the list applies to the whole profile.
pub(crate) const LIST_LENGTH: Parameter = Parameter::number(
    "maxNumOfEndpoints",
    0.0,
    "length of the ranked list, integer from 1 to 8; 0 uses the profile's length",
);

/// Reads the length of the ranked list from a picker's parameters; `None` means the length that the
/// profile sets.
pub(crate) fn list_length(parameters: &Parameters<'_>) -> Result<Option<usize>, InvalidParameter> {
    // The cast changes nothing, because the number has a single digit.
    let length = parameters.integer(LIST_LENGTH.name, 0..=RANKED_MAX as u32)?;
    Ok(usize::try_from(length).ok().filter(|&length| length > 0))
}

/// A candidate's position in the order, by key and then by a random number.
#[derive(Clone, Copy)]
struct CandidateRank {
    key: f32,
    tie: u64,
    index: EndpointIndex,
}

impl CandidateRank {
    fn beats(&self, other: &Self) -> bool {
        self.key
            .total_cmp(&other.key)
            .then(self.tie.cmp(&other.tie))
            == Ordering::Greater
    }
}

/// Returns the `max` candidates with the greatest `key` of their score, greatest key first.
pub(crate) fn rank(
    candidates: &Candidates,
    max: usize,
    rng: &mut Rng,
    key: impl Fn(f32, &mut Rng) -> f32,
) -> Option<RankedList> {
    let max = max.clamp(1, RANKED_MAX);
    let mut best: Vec<CandidateRank> = Vec::with_capacity(max + 1);
    for (&index, &score) in candidates.indices().iter().zip(candidates.scores()) {
        let rank = CandidateRank {
            key: key(score, rng),
            tie: rng.next_u64(),
            index,
        };
        if best.len() == max && best.last().is_some_and(|worst| worst.beats(&rank)) {
            continue;
        }
        best.insert(best.partition_point(|other| other.beats(&rank)), rank);
        best.truncate(max);
    }
    RankedList::new(best.into_iter().map(|rank| rank.index))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns candidates with these scores.
    pub(crate) fn scored(scores: &[f32]) -> Candidates {
        let mut candidates =
            Candidates::new((0..u16::try_from(scores.len()).unwrap()).map(EndpointIndex));
        candidates.add(1.0, scores);
        candidates
    }

    fn by_score(scores: &[f32], max: usize, seed: u64) -> Vec<usize> {
        let ranked = rank(&scored(scores), max, &mut Rng::seeded(seed), |score, _| {
            score
        });
        ranked
            .map(|r| r.iter().map(EndpointIndex::get).collect())
            .unwrap_or_default()
    }

    #[test]
    fn top_of_the_list_best_first() {
        let scores = [0.3, 0.9, 0.1, 0.7, 0.5];
        assert_eq!(by_score(&scores, 3, 1), [1, 3, 4]);
        assert_eq!(by_score(&scores, 1, 1), [1]);
        assert_eq!(
            by_score(&scores, 99, 1),
            [1, 3, 4, 0, 2],
            "no longer than there are candidates"
        );
        assert_eq!(by_score(&[0.5; 20], 99, 1).len(), RANKED_MAX);
        assert_eq!(by_score(&scores, 0, 1), [1], "a list has at least one");
        assert!(by_score(&[], 3, 1).is_empty());
    }
}
