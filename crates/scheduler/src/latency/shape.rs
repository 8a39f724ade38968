//! Computes TTFT or TPOT from the features, as a sum of terms that small trees correct.
//!
//! The terms follow the way in which an engine works. The weights of the terms are not negative, so
//! more work never takes less time. The terms also extrapolate: the predicted time of a queue is
//! proportional to its length, even if the queue is longer than every observed queue. The trees are
//! oblivious: all nodes of a level have the same condition. So a tree takes three comparisons and
//! one look-up, without a branch. The trees correct the logarithm of the time, within bounds, and
//! the correction outside the observed range is constant.

use std::ops::RangeInclusive;

use super::features::{FEATURES_COUNT, Features, TERMS};
use super::words::{InvalidModel, WordReader, put};

/// The number of endpoints that are predicted together: one or two vector registers.
pub(super) const LANES: usize = 8;

/// The features of [`LANES`] endpoints, feature by feature.
pub(super) type FeatureColumns = [[f32; LANES]; FEATURES_COUNT];

/// The depth of a tree, which is its number of conditions.
pub const DEPTH: usize = 3;

/// The maximum number of trees for each of TTFT and TPOT, which limits the work at a pick.
pub const TREES_MAX: usize = 8;

/// The number of bins of predicted medians. Each bin has a separate p90 factor.
pub const BINS: usize = 8;

/// The smallest prediction, in ms.
pub const MS_MIN: f32 = 0.01;

/// The function from features to TTFT or TPOT.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyShape {
    pub weights: [f32; TERMS],
    pub trees: Box<[DecisionTree]>,
}

/// Three conditions, and a correction of the logarithm of the time for each of the eight
/// combinations of their results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecisionTree {
    /// The feature of each condition.
    pub features: [u8; DEPTH],
    /// The threshold of each condition: the condition holds if its feature is above the threshold.
    pub thresholds: [f32; DEPTH],
    pub leaves: [f32; 1 << DEPTH],
}

/// The p90 as a function of the predicted median: the median times the factor of its bin, plus a
/// level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct P90Spread {
    /// The upper end of each bin except the last, in ms.
    pub ends: [f32; BINS - 1],
    /// The factor by which the median is multiplied, by bin.
    pub factors: [f32; BINS],
    /// The level that is added to the product, in ms.
    pub level: f32,
}

const WEIGHTS: RangeInclusive<f32> = 0.0..=1e9;
const THRESHOLDS: RangeInclusive<f32> = f32::MIN..=f32::MAX;
pub const LEAVES: RangeInclusive<f32> = -5.0..=5.0;
pub const FACTORS: RangeInclusive<f32> = 0.0..=1_000.0;
pub const LEVELS: RangeInclusive<f32> = 0.0..=1e9;

// === impl LatencyShape ===

impl LatencyShape {
    /// Returns the weighted sum of the terms, without the correction by the trees, in ms.
    pub fn base_ms(&self, terms: &[f32; TERMS]) -> f32 {
        terms
            .iter()
            .zip(&self.weights)
            .map(|(term, weight)| term * weight)
            .sum::<f32>()
            .max(MS_MIN)
    }

    /// Does [`Self::correction`] for each of these endpoints.
    pub(super) fn corrections(&self, columns: &FeatureColumns) -> [f32; LANES] {
        let mut sums = [0.0; LANES];
        for tree in &self.trees {
            tree.add_leaves(columns, &mut sums);
        }
        sums
    }

    /// Returns the correction by the trees, as a logarithm.
    pub fn correction(&self, x: &Features) -> f32 {
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
        let trees = (0..count)
            .map(|_| DecisionTree::read(words))
            .collect::<Result<_, _>>()?;
        Ok(Self { weights, trees })
    }
}

// === impl DecisionTree ===

impl DecisionTree {
    pub fn leaf(&self, x: &Features) -> f32 {
        let mut at = 0;
        for (level, (feature, threshold)) in self.features.iter().zip(&self.thresholds).enumerate()
        {
            let value = x.get(usize::from(*feature)).copied().unwrap_or(0.0);
            at |= usize::from(value > *threshold) << level;
        }
        self.leaves.get(at).copied().unwrap_or(0.0)
    }

    /// Adds [`Self::leaf`] for each of these endpoints to `sums`, without a branch.
    fn add_leaves(&self, columns: &FeatureColumns, sums: &mut [f32; LANES]) {
        let mut at = [0_u32; LANES];
        for (level, (feature, threshold)) in self.features.iter().zip(&self.thresholds).enumerate()
        {
            let Some(column) = columns.get(usize::from(*feature)) else {
                continue;
            };
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
        Ok(Self {
            features,
            thresholds: words.numbers(&THRESHOLDS)?,
            leaves: words.numbers(&LEAVES)?,
        })
    }
}

// === impl P90Spread ===

impl P90Spread {
    /// Returns a spread with the same factor for all bins.
    pub fn from_factor(factor: f32) -> Self {
        Self {
            ends: [f32::MAX; BINS - 1],
            factors: [factor; BINS],
            level: 0.0,
        }
    }

    /// Returns the p90 for a median of `ms`.
    pub fn p90_ms(&self, ms: f32) -> f32 {
        ms * self.factor(ms) + self.level
    }

    /// Returns the factor by which a median of `ms` is multiplied.
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
        Ok(Self {
            ends: words.numbers(&(0.0..=f32::MAX))?,
            factors: words.numbers(&FACTORS)?,
            level: words.number(&LEVELS)?,
        })
    }
}
