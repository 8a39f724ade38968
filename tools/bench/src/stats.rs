//! Computes medians and quantiles, and how reliable they are.

use serde::Serialize;

/// The difference between two variants. In each of several rounds, both variants are measured one
/// right after the other.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct PairedDifference {
    pub(crate) median: f64,
    /// The distance between the first and the third quartile of the rounds' differences.
    pub(crate) iqr: f64,
}

// === impl PairedDifference ===

impl PairedDifference {
    /// Computes the differences `ours` - `theirs`, round by round.
    pub(crate) fn between(ours: &[f64], theirs: &[f64]) -> Self {
        let differences: Vec<f64> = ours
            .iter()
            .zip(theirs)
            .map(|(ours, theirs)| ours - theirs)
            .collect();
        Self {
            median: quantile(&differences, 0.5),
            iqr: iqr(&differences),
        }
    }
}

/// Returns the quantile `share` (0 to 1) of the values, or `NaN` without values.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index into the values"
    )]
    let index = (values.len().saturating_sub(1) as f64 * share).round() as usize;
    values.get(index).copied().unwrap_or(f64::NAN)
}

/// Returns the distance between the first and the third quartile of the values.
pub(crate) fn iqr(values: &[f64]) -> f64 {
    quantile(values, 0.75) - quantile(values, 0.25)
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_taken_round_by_round() {
        // If a machine becomes slower over the rounds, both variants become slower, so the
        // difference stays.
        let paired = PairedDifference::between(
            &[11.0, 22.0, 33.0, 44.0, 55.0],
            &[10.0, 20.0, 30.0, 40.0, 50.0],
        );
        assert!(
            (paired.median - 3.0).abs() < 1e-9 && (paired.iqr - 2.0).abs() < 1e-9,
            "{paired:?}"
        );
        assert!(median(&[]).is_nan());
    }
}
