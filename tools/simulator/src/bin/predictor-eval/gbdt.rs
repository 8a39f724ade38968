//! Gradient-boosted trees for a mean or a quantile: by histograms, level by level.

use crate::baselines::quantile;

/// The statistic that the trees predict.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TreeObjective {
    Mean,
    Quantile(f64),
}

/// The ensemble.
pub(crate) struct BoostedTrees {
    start: f64,
    trees: Vec<Vec<TreeNode>>,
}

/// A node of a complete binary tree in an array: the children of `i` are `2i + 1` and `2i + 2`.
#[derive(Clone, Copy, Debug, Default)]
struct TreeNode {
    feature: usize,
    threshold: f64,
    is_leaf: bool,
    value: f64,
}

const TREES: usize = 200;
const DEPTH: usize = 6;
const RATE: f64 = 0.05;
const LEAF_MIN: f64 = 5.0;
const CUTS: usize = 63;

// === impl BoostedTrees ===

impl BoostedTrees {
    pub(crate) fn fit(rows: &[Vec<f64>], logs: &[f64], objective: TreeObjective) -> Self {
        let start = match objective {
            TreeObjective::Mean => logs.iter().sum::<f64>() / logs.len().max(1) as f64,
            TreeObjective::Quantile(share) => quantile(logs, share),
        };
        let cuts = cuts(rows);
        let bins: Vec<Vec<usize>> = rows
            .iter()
            .map(|row| {
                row.iter()
                    .zip(&cuts)
                    .map(|(x, cuts)| cuts.iter().filter(|cut| x > cut).count())
                    .collect()
            })
            .collect();
        let mut left: Vec<f64> = logs.iter().map(|log| log - start).collect();
        let mut trees = Vec::with_capacity(TREES);
        for _ in 0..TREES {
            let pull: Vec<f64> = left
                .iter()
                .map(|left| match objective {
                    TreeObjective::Mean => *left,
                    TreeObjective::Quantile(share) => {
                        if *left > 0.0 {
                            share
                        } else {
                            share - 1.0
                        }
                    }
                })
                .collect();
            let (mut tree, leaves) = grow(&bins, &pull, &cuts);
            for (at, node) in tree.iter_mut().enumerate().filter(|(_, node)| node.is_leaf) {
                let of_leaf: Vec<f64> = left
                    .iter()
                    .zip(&leaves)
                    .filter(|(_, leaf)| **leaf == at)
                    .map(|(left, _)| *left)
                    .collect();
                node.value = RATE
                    * match objective {
                        TreeObjective::Mean => {
                            of_leaf.iter().sum::<f64>() / (of_leaf.len() as f64 + 1.0)
                        }
                        TreeObjective::Quantile(share) => quantile(&of_leaf, share),
                    };
            }
            for (left, leaf) in left.iter_mut().zip(&leaves) {
                *left -= tree.get(*leaf).map_or(0.0, |node| node.value);
            }
            trees.push(tree);
        }
        Self { start, trees }
    }

    pub(crate) fn log(&self, row: &[f64]) -> f64 {
        self.start + self.trees.iter().map(|tree| leaf(tree, row)).sum::<f64>()
    }
}

fn leaf(tree: &[TreeNode], row: &[f64]) -> f64 {
    let mut at = 0;
    while let Some(node) = tree.get(at) {
        if node.is_leaf {
            return node.value;
        }
        let above = row.get(node.feature).is_some_and(|x| *x > node.threshold);
        at = 2 * at + 1 + usize::from(above);
    }
    0.0
}

fn cuts(rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let width = rows.first().map_or(0, Vec::len);
    let of = |feature: usize| {
        let mut values: Vec<f64> = rows
            .iter()
            .filter_map(|row| row.get(feature).copied())
            .collect();
        values.sort_by(f64::total_cmp);
        let mut cuts: Vec<f64> = (1..=CUTS)
            .filter_map(|cut| values.get(cut * values.len() / (CUTS + 1)).copied())
            .collect();
        cuts.dedup();
        cuts
    };
    (0..width).map(of).collect()
}

/// Fits a tree. Returns it, and the leaf of each row.
fn grow(bins: &[Vec<usize>], pull: &[f64], cuts: &[Vec<f64>]) -> (Vec<TreeNode>, Vec<usize>) {
    let mut tree = vec![
        TreeNode {
            is_leaf: true,
            ..TreeNode::default()
        };
        (1 << (DEPTH + 1)) - 1
    ];
    let mut leaves = vec![0_usize; bins.len()];
    for depth in 0..DEPTH {
        let first = (1 << depth) - 1;
        let best = splits(bins, pull, cuts, (&leaves, first, 1 << depth));
        for (at, split) in (first..).zip(&best) {
            let (Some((feature, cut)), Some(node)) = (split, tree.get_mut(at)) else {
                continue;
            };
            let threshold = cuts
                .get(*feature)
                .and_then(|cuts| cuts.get(*cut))
                .copied()
                .unwrap_or(0.0);
            *node = TreeNode {
                feature: *feature,
                threshold,
                is_leaf: false,
                value: 0.0,
            };
        }
        for (leaf, bins) in leaves.iter_mut().zip(bins) {
            if let Some(Some((feature, cut))) = leaf.checked_sub(first).and_then(|at| best.get(at))
            {
                *leaf =
                    2 * *leaf + 1 + usize::from(bins.get(*feature).is_some_and(|bin| bin > cut));
            }
        }
    }
    (tree, leaves)
}

/// The best split of each node of a level; `None` where no split is worth it.
fn splits(
    bins: &[Vec<usize>],
    pull: &[f64],
    cuts: &[Vec<f64>],
    (leaves, first, nodes): (&[usize], usize, usize),
) -> Vec<Option<(usize, usize)>> {
    let mut best: Vec<(f64, Option<(usize, usize)>)> = vec![(1e-9, None); nodes];
    for (feature, cuts) in cuts.iter().enumerate() {
        let mut sums = vec![[(0.0, 0.0); CUTS + 1]; nodes];
        for ((bins, pull), leaf) in bins.iter().zip(pull).zip(leaves) {
            let node = leaf.checked_sub(first).and_then(|at| sums.get_mut(at));
            if let Some(sum) = node
                .zip(bins.get(feature))
                .and_then(|(node, bin)| node.get_mut(*bin))
            {
                *sum = (sum.0 + 1.0, sum.1 + pull);
            }
        }
        for (sums, best) in sums.iter().zip(&mut best) {
            let all = sums.iter().fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
            let mut below = (0.0, 0.0);
            for (cut, sum) in sums.iter().enumerate().take(cuts.len()) {
                below = (below.0 + sum.0, below.1 + sum.1);
                let above = (all.0 - below.0, all.1 - below.1);
                let worth = |(count, sum): (f64, f64)| sum * sum / (count + 1.0);
                let gain = worth(below) + worth(above) - worth(all);
                if below.0 >= LEAF_MIN && above.0 >= LEAF_MIN && gain > best.0 {
                    *best = (gain, Some((feature, cut)));
                }
            }
        }
    }
    best.into_iter().map(|(_, split)| split).collect()
}
