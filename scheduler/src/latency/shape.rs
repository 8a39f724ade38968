//! How one time follows from features: a sum of terms, corrected by small trees.
//!
//! The terms are physics (their weights are not negative, so more work never takes less time) and go on where nothing was seen yet: queues twice as long as
//! ever take twice as long. The trees are oblivious ones: all nodes of a level ask the same question, so a tree is three comparisons and one
//! look-up, without a branch. What they say, as a logarithm, is bounded, and constant beyond what was seen.

use std::ops::RangeInclusive;

use super::features::{FEATURES_COUNT, Features, TERMS};
use super::words::{InvalidModel, WordReader, put};

/// Endpoints that are predicted for together: what a vector register or two hold.
pub(super) const LANES: usize = 8;

/// Features of that many endpoints, feature by feature.
pub(super) type FeatureColumns = [[f32; LANES]; FEATURES_COUNT];

/// Questions of a tree.
pub(super) const DEPTH: usize = 3;

/// The most trees of one time: what evaluation at a pick may cost.
pub(super) const TREES_MAX: usize = 8;

/// How many kinds of predictions, by how long they are, have a ninth decile of their own.
pub(super) const BINS: usize = 8;

/// The least that is predicted, ms: nothing takes no time.
pub(super) const MS_MIN: f32 = 0.01;

/// How one time follows from features.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LatencyShape {
    pub(super) weights: [f32; TERMS],
    pub(super) trees: Box<[DecisionTree]>,
}

/// Three questions, and what to add to the logarithm for each of their eight answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DecisionTree {
    /// Which feature each asks for.
    pub(super) features: [u8; DEPTH],
    /// Is it above this?
    pub(super) thresholds: [f32; DEPTH],
    pub(super) leaves: [f32; 1 << DEPTH],
}

/// What the ninth decile is: a multiple of the middle, by how long that is, and a level besides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct P90Spread {
    /// Where each bin but the last ends, ms.
    pub(super) ends: [f32; BINS - 1],
    /// How many times the middle counts, in each bin.
    pub(super) factors: [f32; BINS],
    /// What is added, ms.
    pub(super) level: f32,
}

const WEIGHTS: RangeInclusive<f32> = 0.0..=1e9;
const THRESHOLDS: RangeInclusive<f32> = f32::MIN..=f32::MAX;
pub(super) const LEAVES: RangeInclusive<f32> = -5.0..=5.0;
pub(super) const FACTORS: RangeInclusive<f32> = 0.0..=1_000.0;
pub(super) const LEVELS: RangeInclusive<f32> = 0.0..=1e9;

// === impl LatencyShape ===

impl LatencyShape {
    /// Milliseconds by the terms alone.
    pub(super) fn base_ms(&self, terms: &[f32; TERMS]) -> f32 {
        terms.iter().zip(&self.weights).map(|(term, weight)| term * weight).sum::<f32>().max(MS_MIN)
    }

    /// [`Self::correction`] of each of them.
    pub(super) fn corrections(&self, columns: &FeatureColumns) -> [f32; LANES] {
        let mut sums = [0.0; LANES];
        for tree in &self.trees {
            tree.add_leaves(columns, &mut sums);
        }
        sums
    }

    /// What the trees add, as a logarithm.
    pub(super) fn correction(&self, x: &Features) -> f32 {
        self.trees.iter().map(|tree| tree.leaf(x)).sum()
    }

    pub(super) fn put(&self, words: &mut Vec<u32>) {
        put(words, &self.weights);
        words.push(u32::try_from(self.trees.len()).unwrap_or(0));
        for tree in &self.trees {
            words.extend(tree.features.map(u32::from));
            put(words, &tree.thresholds);
            put(words, &tree.leaves);
        }
    }

    pub(super) fn read(words: &mut WordReader<'_>) -> Result<Self, InvalidModel> {
        let weights = words.numbers(&WEIGHTS)?;
        let count = words.count(TREES_MAX)?;
        let trees = (0..count).map(|_| DecisionTree::read(words)).collect::<Result<_, _>>()?;
        Ok(Self { weights, trees })
    }
}

// === impl DecisionTree ===

impl DecisionTree {
    pub(super) fn leaf(&self, x: &Features) -> f32 {
        let mut at = 0;
        for (level, (feature, threshold)) in self.features.iter().zip(&self.thresholds).enumerate() {
            let value = x.get(usize::from(*feature)).copied().unwrap_or(0.0);
            at |= usize::from(value > *threshold) << level;
        }
        self.leaves.get(at).copied().unwrap_or(0.0)
    }

    /// [`Self::leaf`] of each of them, without a branch.
    fn add_leaves(&self, columns: &FeatureColumns, sums: &mut [f32; LANES]) {
        let mut at = [0_u32; LANES];
        for (level, (feature, threshold)) in self.features.iter().zip(&self.thresholds).enumerate() {
            let Some(column) = columns.get(usize::from(*feature)) else { continue };
            for (at, value) in at.iter_mut().zip(column) {
                *at |= u32::from(value > threshold) << level;
            }
        }
        for (sum, at) in sums.iter_mut().zip(at) {
            *sum += self.leaves.get((at & 7) as usize).copied().unwrap_or(0.0);
        }
    }

    fn read(words: &mut WordReader<'_>) -> Result<Self, InvalidModel> {
        let mut features = [0; DEPTH];
        for feature in &mut features {
            *feature = u8::try_from(words.count(FEATURES_COUNT - 1)?).unwrap_or(0);
        }
        Ok(Self { features, thresholds: words.numbers(&THRESHOLDS)?, leaves: words.numbers(&LEAVES)? })
    }
}

// === impl P90Spread ===

impl P90Spread {
    /// One factor for all.
    pub(super) fn of(factor: f32) -> Self {
        Self { ends: [f32::MAX; BINS - 1], factors: [factor; BINS], level: 0.0 }
    }

    /// The ninth decile where the middle is `ms`.
    pub(super) fn p90_ms(&self, ms: f32) -> f32 {
        ms * self.factor(ms) + self.level
    }

    /// How many times `ms` counts.
    fn factor(&self, ms: f32) -> f32 {
        let bin: usize = self.ends.iter().map(|end| usize::from(ms > *end)).sum();
        self.factors.get(bin).copied().unwrap_or(1.0)
    }

    pub(super) fn put(&self, words: &mut Vec<u32>) {
        put(words, &self.ends);
        put(words, &self.factors);
        put(words, &[self.level]);
    }

    pub(super) fn read(words: &mut WordReader<'_>) -> Result<Self, InvalidModel> {
        Ok(Self { ends: words.numbers(&(0.0..=f32::MAX))?, factors: words.numbers(&FACTORS)?, level: words.number(&LEVELS)? })
    }
}
