//! The figures of a router in a cell: for cold requests, for warm requests, and for all requests.

use serde_json::{Value, json};

use crate::quantile::{quantile, sorted};
use crate::workload::Workload;
use crate::world::RequestOutcome;

/// The figures of one part of the requests (cold, warm or all), over all runs. Times are in ms.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RaceRow {
    pub(super) requests: usize,
    pub(super) failures: usize,
    pub(super) e2e_mean: f64,
    pub(super) ttft_mean: f64,
    pub(super) ttft_p99: f64,
    /// The mean time per output token after the first token.
    pub(super) tpot_mean: f64,
    pub(super) tpot_p99: f64,
    /// The share of the prompt tokens that were cached.
    pub(super) hits: f64,
    /// The requests of the busiest engine, divided by the mean over all engines. The value is a
    /// mean over the runs.
    pub(super) busiest: f64,
    /// The number of requests of each engine in the first run.
    pub(super) by_engine: Vec<usize>,
    /// The mean E2E and the mean TTFT of each run.
    pub(super) by_run: Vec<[f64; 2]>,
}

/// The name of the field with the means of each run, in a file of results.
pub(super) const MEANS_BY_RUN: &str = "e2e_ttft_mean_ms_by_run";

/// The first part of the arrivals, when caches are empty. A request is cold if its session starts
/// in this part.
pub(super) const COLD_SHARE: f64 = 0.25;

/// Splits the outcomes of a run into those of cold sessions and those of warm sessions.
pub(super) fn split(
    workload: &Workload,
    outcomes: &[RequestOutcome],
    arrivals_ms: f64,
) -> [Vec<RequestOutcome>; 2] {
    let requests = workload.requests();
    let is_cold = |session: u32| {
        requests
            .get(session as usize)
            .is_some_and(|first| first.at < COLD_SHARE * arrivals_ms)
    };
    let (cold, warm): (Vec<_>, Vec<_>) = requests
        .iter()
        .zip(outcomes)
        .partition(|(request, _)| is_cold(request.session));
    [cold, warm].map(|part| part.into_iter().map(|(_, outcome)| *outcome).collect())
}

/// Returns the number of requests that each engine served.
pub(super) fn by_engine(outcomes: &[RequestOutcome], engines: usize) -> Vec<usize> {
    let mut counts = vec![0; engines];
    for outcome in outcomes.iter().filter(|outcome| !outcome.has_failed) {
        counts
            .iter_mut()
            .skip(outcome.engine)
            .take(1)
            .for_each(|count| *count += 1);
    }
    counts
}

fn mean_of(outcomes: &[RequestOutcome], figure: fn(&RequestOutcome) -> f64) -> f64 {
    outcomes.iter().map(figure).sum::<f64>() / outcomes.len().max(1) as f64
}

// === impl RaceRow ===

impl RaceRow {
    pub(super) fn from_runs(runs: &[Vec<RequestOutcome>], engines: usize) -> Self {
        let outcomes = &runs.concat();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let ttft = sorted(outcomes.iter().map(|outcome| outcome.ttft));
        let several = outcomes
            .iter()
            .filter(|outcome| outcome.output > 1 && !outcome.has_failed);
        let tpot = sorted(
            several.map(|outcome| (outcome.e2e - outcome.ttft) / f64::from(outcome.output - 1)),
        );
        let tokens = |of: fn(&RequestOutcome) -> u32| {
            outcomes
                .iter()
                .map(|outcome| f64::from(of(outcome)))
                .sum::<f64>()
        };
        let by_engine: Vec<Vec<usize>> = runs.iter().map(|run| by_engine(run, engines)).collect();
        let busiest = |counts: &Vec<usize>| {
            let all = counts.iter().sum::<usize>().max(1) as f64;
            counts
                .iter()
                .max()
                .map_or(0.0, |most| *most as f64 / all * engines as f64)
        };
        Self {
            requests: outcomes.len(),
            failures: outcomes.iter().filter(|outcome| outcome.has_failed).count(),
            e2e_mean: mean_of(outcomes, |outcome| outcome.e2e),
            ttft_mean: mean(&ttft),
            ttft_p99: quantile(&ttft, 0.99),
            tpot_mean: mean(&tpot),
            tpot_p99: quantile(&tpot, 0.99),
            hits: tokens(|outcome| outcome.cached) / tokens(|outcome| outcome.prompt).max(1.0),
            busiest: mean(&by_engine.iter().map(busiest).collect::<Vec<_>>()),
            by_engine: by_engine.into_iter().next().unwrap_or_default(),
            by_run: runs
                .iter()
                .map(|run| {
                    [
                        mean_of(run, |outcome| outcome.e2e),
                        mean_of(run, |outcome| outcome.ttft),
                    ]
                })
                .collect(),
        }
    }

    /// Returns a line of figures under the columns of [`Self::head`].
    pub(super) fn line(&self) -> String {
        let times = [self.e2e_mean, self.ttft_mean, self.ttft_p99]
            .map(|ms| format!("{ms:>9.0}"))
            .concat();
        let tpot = [self.tpot_mean, self.tpot_p99]
            .map(|ms| format!("{ms:>8.1}"))
            .concat();
        let engines: Vec<String> = self.by_engine.iter().map(usize::to_string).collect();
        format!(
            "{:>6}{:>5}{:>7.1}{times}{tpot}  {}",
            self.requests,
            self.failures,
            100.0 * self.hits,
            engines.join(" ")
        )
    }

    pub(super) fn head() -> String {
        let times = ["E2E", "TTFT", "p99"]
            .map(|name| format!("{name:>9}"))
            .concat();
        format!(
            "{:>6}{:>5}{:>7}{times}{:>8}{:>8}  requests by engine",
            "count", "fail", "hits %", "TPOT", "p99"
        )
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "requests": self.requests,
            "failures": self.failures,
            "e2e_mean_ms": self.e2e_mean,
            "ttft_mean_ms": self.ttft_mean,
            "ttft_p99_ms": self.ttft_p99,
            "tpot_mean_ms": self.tpot_mean,
            "tpot_p99_ms": self.tpot_p99,
            "hit_rate": self.hits,
            "busiest": self.busiest,
            "requests_by_engine": self.by_engine,
            MEANS_BY_RUN: self.by_run,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_means_and_counts_of_its_requests() {
        let outcome = |engine, cached| RequestOutcome {
            ttft: 100.0,
            e2e: 400.0,
            prompt: 100,
            output: 31,
            cached,
            engine,
            ..RequestOutcome::default()
        };
        let row = RaceRow::from_runs(&[vec![outcome(0, 0), outcome(2, 90), outcome(2, 90)]], 3);
        assert_eq!(
            (row.e2e_mean, row.ttft_p99, row.tpot_mean, row.hits),
            (400.0, 100.0, 10.0, 0.6)
        );
        assert_eq!((row.by_engine, row.busiest), (vec![1, 0, 2], 2.0));
        let runs = [
            vec![outcome(0, 0)],
            vec![
                outcome(0, 0),
                RequestOutcome {
                    ttft: 200.0,
                    e2e: 800.0,
                    ..outcome(1, 0)
                },
            ],
        ];
        assert_eq!(
            RaceRow::from_runs(&runs, 2).by_run,
            [[400.0, 100.0], [600.0, 150.0]],
            "each run by itself"
        );
    }
}
