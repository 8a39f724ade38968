//! The measures of a run, over all requests but the first tenth that arrived.

use crate::engine::SimulatedEngineSpec;
use crate::world::RequestOutcome;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RunMeasures {
    pub(crate) ttft_mean: f64,
    pub(crate) ttft_p50: f64,
    pub(crate) ttft_p90: f64,
    pub(crate) ttft_p99: f64,
    pub(crate) e2e_mean: f64,
    pub(crate) tpot_p99: f64,
    /// Share of requests within their SLO.
    pub(crate) slo: f64,
    /// Share of prompt tokens that were cached.
    pub(crate) hits: f64,
    /// Median TTFT of the last 30 % of arrivals. It shows whether the pool sustained the rate.
    pub(crate) late_ttft: f64,
}

/// A measure and its name in tables and goals.
pub(crate) type Measure = (&'static str, fn(&RunMeasures) -> f64);

/// The measures for which less is better.
pub(crate) const LESS_IS_BETTER: [Measure; 6] = [
    ("TTFT mean", |m| m.ttft_mean),
    ("TTFT p50", |m| m.ttft_p50),
    ("TTFT p90", |m| m.ttft_p90),
    ("TTFT p99", |m| m.ttft_p99),
    ("E2E mean", |m| m.e2e_mean),
    ("TPOT p99", |m| m.tpot_p99),
];

/// The TTFT SLO of a short prompt, ms. The TTFT SLO of a longer one is three times its cold prefill
/// on an idle engine.
const TTFT_SLO_MS: f64 = 2_000.0;
const TTFT_SLO_TIMES: f64 = 3.0;

impl RunMeasures {
    pub(crate) fn of(records: &[RequestOutcome], engine: &SimulatedEngineSpec) -> Self {
        let counted = records.get(records.len() / 10..).unwrap_or(records);
        let late = records.get(records.len() * 7 / 10..).unwrap_or(records);
        let tpot = |record: &RequestOutcome| {
            (record.e2e - record.ttft) / f64::from(record.output.saturating_sub(1).max(1))
        };
        // A fast reader wants a token of an 8B model every 50 ms; a step of the 32B model takes
        // 19 ms with a single request.
        let tpot_slo = if engine.times.decode[0] > 15.0 {
            100.0
        } else {
            50.0
        };
        let in_slo = |record: &&RequestOutcome| {
            let cold = engine.api_ms + engine.times.cold_ms(record.prompt, engine.budget);
            record.ttft <= TTFT_SLO_MS.max(TTFT_SLO_TIMES * cold)
                && (record.output < 2 || tpot(record) <= tpot_slo)
        };
        let ttft: Vec<f64> = sorted(counted.iter().map(|record| record.ttft));
        let count = counted.len().max(1) as f64;
        let tokens = |of: fn(&RequestOutcome) -> u32| {
            counted
                .iter()
                .map(|record| f64::from(of(record)))
                .sum::<f64>()
        };
        Self {
            ttft_mean: ttft.iter().sum::<f64>() / count,
            ttft_p50: quantile(&ttft, 0.5),
            ttft_p90: quantile(&ttft, 0.9),
            ttft_p99: quantile(&ttft, 0.99),
            e2e_mean: counted.iter().map(|record| record.e2e).sum::<f64>() / count,
            tpot_p99: quantile(
                &sorted(counted.iter().filter(|record| record.output > 1).map(tpot)),
                0.99,
            ),
            slo: counted.iter().filter(in_slo).count() as f64 / count,
            hits: tokens(|record| record.cached) / tokens(|record| record.prompt).max(1.0),
            late_ttft: quantile(&sorted(late.iter().map(|record| record.ttft)), 0.5),
        }
    }
}

pub(crate) fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The sorted value that is nearest to the quantile; 0 without values.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

/// The mean, and half the width of its 95 % confidence interval by Student's t.
pub(crate) fn mean_ci(values: &[f64]) -> (f64, f64) {
    /// Two-sided 95 % quantiles for 1 to 9 degrees of freedom; beyond, the normal one is close
    /// enough.
    const STUDENT: [f64; 9] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262,
    ];
    let count = values.len();
    let mean = values.iter().sum::<f64>() / count.max(1) as f64;
    let Some(freedom) = count.checked_sub(1).filter(|&freedom| freedom > 0) else {
        return (mean, f64::NAN);
    };
    let variance = values
        .iter()
        .map(|value| (value - mean).powi(2))
        .sum::<f64>()
        / freedom as f64;
    (
        mean,
        STUDENT.get(freedom - 1).copied().unwrap_or(1.96) * (variance / count as f64).sqrt(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_intervals() {
        let values = sorted((0..=100).rev().map(f64::from));
        assert_eq!(
            [0.0, 0.5, 0.99, 1.0].map(|share| quantile(&values, share)),
            [0.0, 50.0, 99.0, 100.0]
        );
        assert_eq!(quantile(&[], 0.5), 0.0);
        let (mean, half) = mean_ci(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!(
            (mean - 3.0).abs() < 1e-12 && (half - 1.9629).abs() < 1e-3,
            "{half}"
        );
        assert!(
            mean_ci(&[1.0]).1.is_nan(),
            "one run says nothing of its spread"
        );
    }

    #[test]
    fn an_slo_grows_with_the_prompt() {
        let engine = crate::hardware::LLAMA_8B_H100;
        let record = |prompt, ttft| RequestOutcome {
            prompt,
            output: 1,
            ttft,
            e2e: ttft,
            ..RequestOutcome::default()
        };
        let slo = |records: &[RequestOutcome]| RunMeasures::of(records, &engine).slo;
        assert_eq!(slo(&[record(100, 1_999.0)]), 1.0);
        assert_eq!(slo(&[record(100, 2_001.0)]), 0.0);
        assert_eq!(
            slo(&[record(100_000, 10_000.0)]),
            1.0,
            "a cold prefill of it takes seven seconds"
        );
    }
}
