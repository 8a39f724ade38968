//! Chooses the linear part and the trees of a shape, and measures its errors by cross-validation.

use scheduler::latency::shape::{LatencyShape, TREES_MAX};

use super::fit::{self, FitRow};

/// The minimum number of samples for trees. With fewer samples, trees would fit noise.
pub(super) const TREES_SAMPLES_MIN: usize = 200;

/// The numbers of trees that a fit tries.
const TREES: [usize; 3] = [0, TREES_MAX / 2, TREES_MAX];

/// The number of folds in time for cross-validation. A fit to the other folds predicts each fold.
const PARTS: usize = 3;

/// The linear part of a shape: all terms, or one constant.
#[derive(Clone, Copy, Debug)]
pub(super) enum LinearBase {
    Terms,
    Constant,
}

impl LinearBase {
    pub(super) fn fit(self, rows: &[FitRow], near: Option<&LatencyShape>) -> LatencyShape {
        match self {
            Self::Terms => fit::base(rows, near),
            Self::Constant => fit::constant(rows),
        }
    }
}

/// A shape fitted to the `old` rows, with the base and the number of trees that have the lowest
/// loss on the `newest` rows.
pub(super) struct FittedShape {
    pub(super) base: LinearBase,
    pub(super) trees: usize,
    pub(super) shape: LatencyShape,
    /// The loss on the last `fresh` rows alone: see [`chosen`].
    pub(super) loss: f32,
}

/// Chooses the linear part and the number of trees by the loss on the newest rows. The reported
/// loss is the loss on the last `fresh` rows.
pub(super) fn chosen(old: &[FitRow], newest: &[FitRow], fresh: usize) -> FittedShape {
    let loss_of = |shape: &LatencyShape| fit::loss(shape, newest, 0.0);
    let terms = fit::base(old, None);
    let constant = fit::constant(old);
    let (base, shape) = if loss_of(&terms) <= loss_of(&constant) {
        (LinearBase::Terms, terms)
    } else {
        (LinearBase::Constant, constant)
    };
    let most = if old.len() >= TREES_SAMPLES_MIN {
        TREES_MAX
    } else {
        0
    };
    let all = fit::with_trees(&shape, old, most);
    let first = |count: usize| LatencyShape {
        weights: all.weights,
        trees: all.trees.iter().take(count).copied().collect(),
    };
    let tried = TREES
        .into_iter()
        .filter(|count| *count <= most)
        .map(|count| (count, loss_of(&first(count))));
    let (trees, _) = tried.fold((0, f32::INFINITY), |best, tried| {
        if tried.1 < best.1 { tried } else { best }
    });
    let judges = newest
        .get(newest.len().saturating_sub(fresh)..)
        .unwrap_or_default();
    FittedShape {
        base,
        trees,
        shape,
        loss: fit::loss(&first(trees), judges, 0.0),
    }
}

/// Returns for each row the prediction of a shape that was fitted to the other folds, and the error
/// of this prediction.
pub(super) fn errors(rows: &[FitRow], chosen: &FittedShape) -> Vec<(f32, f32)> {
    let part = rows.len().div_ceil(PARTS).max(1);
    let of_part = |(at, part): (usize, &[FitRow])| {
        let start = at * part.len();
        let others: Vec<FitRow> = rows
            .iter()
            .take(start)
            .chain(rows.iter().skip(start + part.len()))
            .copied()
            .collect();
        let shape = fit::with_trees(
            &chosen.base.fit(&others, Some(&chosen.shape)),
            &others,
            chosen.trees,
        );
        part.iter()
            .map(|row| fit::log(&shape, row))
            .zip(part)
            .map(|(said, row)| (said, row.log - said))
            .collect::<Vec<_>>()
    };
    rows.chunks(part).enumerate().flat_map(of_part).collect()
}
