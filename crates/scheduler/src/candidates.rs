//! The candidates for a pick: the endpoints that filters kept, and their scores.

use crate::endpoint::EndpointIndex;

/// The endpoints that can still be picked, each with the sum of its scores so far. The order of the
/// endpoints has no meaning.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    indices: Vec<EndpointIndex>,
    scores: Vec<f32>,
}

impl Candidates {
    /// Returns these endpoints as candidates with a score of 0 each.
    pub fn new(indices: impl IntoIterator<Item = EndpointIndex>) -> Self {
        let indices: Vec<_> = indices.into_iter().collect();
        let scores = vec![0.0; indices.len()];
        Self { indices, scores }
    }

    pub fn indices(&self) -> &[EndpointIndex] {
        &self.indices
    }

    /// Returns the scores, in the order of [`Self::indices`]. The scores are always finite.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    pub fn len(&self) -> usize {
        self.indices.len()
    }

    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    pub fn retain(&mut self, mut keep: impl FnMut(EndpointIndex) -> bool) {
        let mut read = 0;
        let mut write = 0;
        let scores = &mut self.scores;
        self.indices.retain(|&index| {
            let kept = keep(index);
            if kept {
                scores.swap(write, read);
                write += 1;
            }
            read += 1;
            kept
        });
        scores.truncate(write);
    }

    /// Ranks the endpoints for which `is_last` returns true behind all others, and keeps the order
    /// within both groups. A weighted draw treats scores below 0 as 0.
    pub fn sink(&mut self, is_last: &dyn Fn(EndpointIndex) -> bool) {
        for (score, &index) in self.scores.iter_mut().zip(&self.indices) {
            if is_last(index) {
                *score = -1.0 / (*score + f32::EPSILON);
            }
        }
    }

    /// Adds `weight * clamp(score, 0, 1)` to the score of every candidate. `scores` has the order
    /// of [`Self::indices`]. NaN adds nothing.
    pub fn add(&mut self, weight: f32, scores: &[f32]) {
        for (total, &score) in self.scores.iter_mut().zip(scores) {
            *total += weight * unit(score);
        }
    }
}

/// Returns `score` limited to 0..=1, or 0 for NaN.
pub(crate) fn unit(score: f32) -> f32 {
    if score.is_nan() {
        0.0
    } else {
        score.clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retain_keeps_scores_beside_their_endpoints() {
        let mut candidates = Candidates::new((0..5).map(EndpointIndex));
        candidates.add(2.0, &[0.1, 0.2, 0.3, 0.4, 0.5]);
        candidates.retain(|index| index.get() % 2 == 1);
        assert_eq!(candidates.indices(), [EndpointIndex(1), EndpointIndex(3)]);
        assert_eq!(candidates.scores(), [0.4, 0.8]);
        candidates.retain(|_| false);
        assert!(candidates.is_empty());
        assert_eq!(candidates.len(), 0);
    }

    #[test]
    fn no_score_leaves_the_unit_range() {
        let wild = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.5, 1.5, 0.25];
        let mut candidates = Candidates::new((0..6).map(EndpointIndex));
        candidates.add(2.0, &wild);
        assert_eq!(candidates.scores(), [0.0, 2.0, 0.0, 0.0, 2.0, 0.5]);
    }
}
