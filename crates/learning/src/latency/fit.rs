//! Fits a shape to samples of one time: a linear part by robust relative least squares, then small
//! trees for the residual.

use scheduler::latency::shape::{DEPTH, DecisionTree, LatencyShape, MS_MIN};
use scheduler::latency::{FEATURES_COUNT, Features, TERMS};
use scheduler::sort::sort_by;

use crate::least_squares::solve;

/// A sample of TTFT or of TPOT.
#[derive(Clone, Copy, Debug)]
pub(super) struct FitRow {
    pub(super) x: Features,
    pub(super) terms: [f32; TERMS],
    /// The time that an average endpoint would have taken, as a logarithm of ms.
    pub(super) log: f32,
    pub(super) weight: f32,
}

/// The number of rounds of reweighting. Each round brings the fit closer to the fit with the least
/// *absolute* relative error, which a few outliers do not move.
const REWEIGHTINGS: usize = 8;
const REWEIGHTINGS_NEAR: usize = 2;

/// The relative error below which all samples get the same weight.
const ERROR_MIN: f64 = 0.02;

/// The ridge towards zero, as a share of each weight's curvature. The ridge makes the solution
/// unique if inputs are collinear.
const RIDGE: f64 = 1e-4;

const SWEEPS: usize = 60;

/// The number of thresholds that trees may use for each feature.
const CUTS: usize = 15;

/// The number of samples without a residual that are added to each leaf, so that a few samples do
/// not decide the value of the leaf.
const LEAF_SHRINK: f32 = 10.0;

/// The share of the residual that each tree corrects. Later trees correct the rest of the residual,
/// or find that this rest was noise.
const LEARNING_RATE: f32 = 0.3;

/// The bound of a sample's residual in a leaf, as a logarithm.
const PULL_MAX: f32 = 0.7;

/// Fits the linear part of a shape, starting from `near`. If `near` is nearly right, a few rounds
/// are enough.
pub(super) fn base(rows: &[FitRow], near: Option<&LatencyShape>) -> LatencyShape {
    let mut shape = LatencyShape {
        weights: near.map_or([0.0; TERMS], |near| near.weights),
        trees: Box::default(),
    };
    let mut weights = shape.weights.map(f64::from);
    for round in if near.is_some() {
        REWEIGHTINGS - REWEIGHTINGS_NEAR
    } else {
        0
    }..REWEIGHTINGS
    {
        let mut normal = [[0.0; TERMS]; TERMS];
        let mut seen = [0.0; TERMS];
        for row in rows {
            let ms = f64::from(libm::expf(row.log));
            let expected = if round == 0 {
                ms
            } else {
                f64::from(shape.base_ms(&row.terms))
            };
            let error = if round == 0 {
                1.0
            } else {
                libm::log(ms / expected).abs().max(ERROR_MIN)
            };
            // The error is relative to the larger of prediction and time. So a factor of two is
            // equally wrong in both directions, and a prediction that is far too low has no
            // unbounded weight.
            let scale = expected.max(ms);
            add(
                &mut normal,
                &mut seen,
                &row.terms.map(|term| f64::from(term) / scale),
                ms / scale,
                f64::from(row.weight) / error,
            );
        }
        solve(
            &normal,
            &seen,
            &mut weights,
            |own| (RIDGE * own + 1e-12, 0.0),
            SWEEPS,
        );
        shape.weights = weights.map(to_f32);
    }
    shape
}

/// Returns a shape with the same time for all requests: the weighted median.
pub(super) fn constant(rows: &[FitRow]) -> LatencyShape {
    let mut sorted: Vec<(f32, f32)> = rows.iter().map(|row| (row.log, row.weight)).collect();
    sort_by(&mut sorted, |a, b| a.0 < b.0);
    let half = sorted.iter().map(|(_, weight)| weight).sum::<f32>() / 2.0;
    let mut below = 0.0;
    let middle = sorted.iter().find(|(_, weight)| {
        below += weight;
        below >= half
    });
    let ms = middle.map_or(1.0, |(log, _)| libm::expf(*log));
    LatencyShape {
        weights: [ms, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        trees: Box::default(),
    }
}

fn add(
    normal: &mut [[f64; TERMS]; TERMS],
    seen: &mut [f64; TERMS],
    inputs: &[f64; TERMS],
    target: f64,
    weight: f64,
) {
    for ((sums, sum), a) in normal.iter_mut().zip(seen.iter_mut()).zip(inputs) {
        for (product, b) in sums.iter_mut().zip(inputs) {
            *product += weight * a * b;
        }
        *sum += weight * a * target;
    }
}

/// Adds `count` trees to a linear part.
pub(super) fn with_trees(shape: &LatencyShape, rows: &[FitRow], count: usize) -> LatencyShape {
    let cuts = cuts(rows);
    let binned: Vec<[u8; FEATURES_COUNT]> = rows.iter().map(|row| bins(&row.x, &cuts)).collect();
    let mut left: Vec<f32> = rows
        .iter()
        .map(|row| row.log - libm::logf(shape.base_ms(&row.terms)))
        .collect();
    let mut trees = Vec::with_capacity(count);
    for _ in 0..count {
        let tree = tree(rows, &binned, &left, &cuts);
        for (left, row) in left.iter_mut().zip(rows) {
            *left -= tree.leaf(&row.x);
        }
        trees.push(tree);
    }
    LatencyShape {
        weights: shape.weights,
        trees: trees.into(),
    }
}

/// Returns the thresholds that trees may use: quantiles of each feature, without duplicates.
fn cuts(rows: &[FitRow]) -> [Vec<f32>; FEATURES_COUNT] {
    std::array::from_fn(|feature| {
        let mut values: Vec<f32> = rows
            .iter()
            .filter_map(|row| row.x.get(feature).copied())
            .collect();
        sort_by(&mut values, |a, b| a < b);
        let mut cuts: Vec<f32> = (1..=CUTS)
            .filter_map(|cut| values.get(cut * values.len() / (CUTS + 1)).copied())
            .collect();
        cuts.dedup();
        cuts
    })
}

fn bins(x: &Features, cuts: &[Vec<f32>; FEATURES_COUNT]) -> [u8; FEATURES_COUNT] {
    let mut bins = [0; FEATURES_COUNT];
    for ((bin, value), cuts) in bins.iter_mut().zip(x).zip(cuts) {
        *bin = u8::try_from(cuts.iter().filter(|cut| value > cut).count()).unwrap_or(u8::MAX);
    }
    bins
}

/// Sums of weights and of weighted residuals, by leaf and by bin of a feature.
type FitHistogram = [[(f32, f32); CUTS + 1]; 1 << DEPTH];

/// Builds, level by level, the tree that reduces the residual most.
fn tree(
    rows: &[FitRow],
    binned: &[[u8; FEATURES_COUNT]],
    left: &[f32],
    cuts: &[Vec<f32>; FEATURES_COUNT],
) -> DecisionTree {
    let mut leaves = vec![0_u8; rows.len()];
    let mut tree = DecisionTree {
        features: [0; DEPTH],
        thresholds: [f32::MAX; DEPTH],
        leaves: [0.0; 1 << DEPTH],
    };
    for level in 0..DEPTH {
        let mut best = (0.0, None);
        for (feature, cuts) in cuts.iter().enumerate() {
            let histogram = histogram(rows, binned, left, &leaves, feature);
            for cut in 0..cuts.len() {
                let gain = gain(&histogram, cut);
                if gain > best.0 {
                    best = (gain, Some((feature, cut)));
                }
            }
        }
        let Some((feature, cut)) = best.1 else { break };
        for (leaf, bins) in leaves.iter_mut().zip(binned) {
            let above = bins.get(feature).is_some_and(|bin| usize::from(*bin) > cut);
            *leaf |= u8::from(above) << level;
        }
        let threshold = cuts
            .get(feature)
            .and_then(|cuts| cuts.get(cut))
            .copied()
            .unwrap_or(f32::MAX);
        if let (Some(at), Some(value)) =
            (tree.features.get_mut(level), tree.thresholds.get_mut(level))
        {
            *at = u8::try_from(feature).unwrap_or(0);
            *value = threshold;
        }
    }
    let mut sums = [(0.0_f32, 0.0_f32); 1 << DEPTH];
    for ((row, left), leaf) in rows.iter().zip(left).zip(&leaves) {
        if let Some(sum) = sums.get_mut(usize::from(*leaf)) {
            *sum = (
                sum.0 + row.weight,
                sum.1 + row.weight * left.clamp(-PULL_MAX, PULL_MAX),
            );
        }
    }
    tree.leaves = sums.map(|(weight, sum)| LEARNING_RATE * sum / (weight + LEAF_SHRINK));
    tree
}

fn histogram(
    rows: &[FitRow],
    binned: &[[u8; FEATURES_COUNT]],
    left: &[f32],
    leaves: &[u8],
    feature: usize,
) -> FitHistogram {
    let mut histogram = [[(0.0, 0.0); CUTS + 1]; 1 << DEPTH];
    for (((row, bins), left), leaf) in rows.iter().zip(binned).zip(left).zip(leaves) {
        let bin = bins.get(feature).copied().unwrap_or(0);
        if let Some(sum) = histogram
            .get_mut(usize::from(*leaf))
            .and_then(|leaf| leaf.get_mut(usize::from(bin)))
        {
            *sum = (
                sum.0 + row.weight,
                sum.1 + row.weight * left.clamp(-PULL_MAX, PULL_MAX),
            );
        }
    }
    histogram
}

/// Returns how much the residual falls if every leaf is split into the bins up to `cut` and the
/// bins above `cut`.
fn gain(histogram: &FitHistogram, cut: usize) -> f32 {
    let worth = |(weight, sum): (f32, f32)| sum * sum / (weight + LEAF_SHRINK);
    let add = |a: (f32, f32), b: &(f32, f32)| (a.0 + b.0, a.1 + b.1);
    let of_leaf = |leaf: &[(f32, f32); CUTS + 1]| {
        let below = leaf.iter().take(cut + 1).fold((0.0, 0.0), add);
        let above = leaf.iter().skip(cut + 1).fold((0.0, 0.0), add);
        worth(below) + worth(above) - worth(add(below, &above))
    };
    histogram.iter().map(of_leaf).sum()
}

/// Returns the prediction of a shape for a row, as a logarithm.
pub(super) fn log(shape: &LatencyShape, row: &FitRow) -> f32 {
    libm::logf(shape.base_ms(&row.terms).max(MS_MIN)) + shape.correction(&row.x)
}

/// Returns the loss of a shape: the mean absolute error of logarithms, which is a relative error.
/// The loss is infinite without rows.
pub(super) fn loss(shape: &LatencyShape, rows: &[FitRow], shift: f32) -> f32 {
    let (error, weight) = rows.iter().fold((0.0, 0.0), |(error, weight), row| {
        (
            error + row.weight * (row.log - log(shape, row) - shift).abs(),
            weight + row.weight,
        )
    });
    if weight > 0.0 {
        error / weight
    } else {
        f32::INFINITY
    }
}

// The cast rounds, which is intended.
fn to_f32(number: f64) -> f32 {
    number as f32
}
