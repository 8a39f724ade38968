//! Least squares with non-negative weights for a handful of inputs, by coordinate descent on the
//! normal equations.

/// Improves one weight after another until they are near the non-negative weights with the lowest
/// squared error. `normal` holds the sums of products of inputs, `seen` the sums of inputs times
/// target. `ridge` receives an input's sum of squares, and returns how strongly its weight is
/// pulled and towards which value.
pub(crate) fn solve<const N: usize>(
    normal: &[[f64; N]; N],
    seen: &[f64; N],
    weights: &mut [f64; N],
    ridge: impl Fn(f64) -> (f64, f64),
    sweeps: usize,
) {
    for _ in 0..sweeps {
        for (j, (row, seen)) in normal.iter().zip(seen).enumerate() {
            let own = row.get(j).copied().unwrap_or(0.0);
            let weight = weights.get(j).copied().unwrap_or(0.0);
            let others = row
                .iter()
                .zip(weights.iter())
                .map(|(a, b)| a * b)
                .sum::<f64>()
                - own * weight;
            let (pull, to) = ridge(own);
            let better = ((seen - others + pull * to) / (own + pull)).max(0.0);
            if let Some(weight) = weights.get_mut(j).filter(|_| better.is_finite()) {
                *weight = better;
            }
        }
    }
}
