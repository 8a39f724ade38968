//! Computes quantiles of sorted values.

pub(crate) fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Returns the value that is nearest to the quantile `share` (0 to 1), or 0 without values.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_nearest_value() {
        let values = sorted((0..=100).rev().map(f64::from));
        assert_eq!(
            [0.0, 0.5, 0.99, 1.0].map(|share| quantile(&values, share)),
            [0.0, 50.0, 99.0, 100.0]
        );
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
