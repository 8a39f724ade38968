//! The batch that plugins work on: surviving endpoints and their score column.

use crate::snapshot::EndpointIndex;

/// Endpoints still in the race, each with the score it has gathered so far. Order carries no meaning.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    indices: Vec<EndpointIndex>,
    scores: Vec<f32>,
}

impl Candidates {
    /// Candidates with a score of 0 each.
    pub fn new(indices: impl IntoIterator<Item = EndpointIndex>) -> Self {
        let indices: Vec<_> = indices.into_iter().collect();
        let scores = vec![0.0; indices.len()];
        Self { indices, scores }
    }

    /// Who is left.
    #[must_use]
    pub fn indices(&self) -> &[EndpointIndex] {
        &self.indices
    }

    /// What each has gathered, parallel to [`Self::indices`]. Always finite.
    #[must_use]
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// How many are left.
    #[must_use]
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Is nobody left?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Keeps whom `keep` accepts.
    pub fn retain(&mut self, mut keep: impl FnMut(EndpointIndex) -> bool) {
        let mut kept = self.indices.iter().map(|&i| keep(i)).collect::<Vec<_>>().into_iter();
        let mut kept_scores = kept.clone();
        self.indices.retain(|_| kept.next().unwrap_or(false));
        self.scores.retain(|_| kept_scores.next().unwrap_or(false));
    }

    /// Adds `weight * clamp(score, 0, 1)` to every candidate; `scores` runs parallel to [`Self::indices`]. A score that is not a number adds nothing.
    pub fn add(&mut self, weight: f32, scores: &[f32]) {
        for (total, &score) in self.scores.iter_mut().zip(scores) {
            // `max` and `min` return the number when the other side is NaN, so neither NaN nor an infinity gets past them.
            *total += weight * score.max(0.0).min(1.0);
        }
    }
}
