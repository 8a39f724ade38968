//! Ratios between policies, with their spread over seeds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::grid::GridCell;
use crate::measure::{Measure, RunMeasures, mean_ci};
use crate::store::ResultStore;
use crate::workload::WorkloadKind;

/// A geometric mean of ratios, with its 95 % confidence interval over seeds.
#[derive(Clone, Copy, Debug)]
pub(super) struct RatioInterval {
    pub(super) mean: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

#[derive(Debug)]
pub(super) struct SettingRuns<'s> {
    cells: Vec<&'s GridCell>,
}

impl fmt::Display for RatioInterval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} [{:.2}, {:.2}]", self.mean, self.low, self.high)
    }
}

impl<'s> SettingRuns<'s> {
    pub(super) fn of(store: &'s ResultStore, setting: &str) -> Self {
        Self {
            cells: store
                .cells
                .iter()
                .filter(|cell| cell.setting == setting)
                .collect(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// The loads that have runs of this policy.
    pub(super) fn loads(&self, policy: &str) -> Vec<f64> {
        let mut loads: Vec<f64> = self
            .cells
            .iter()
            .filter(|cell| cell.policy == policy)
            .map(|cell| cell.load)
            .collect();
        loads.sort_by(f64::total_cmp);
        loads.dedup();
        loads
    }

    pub(super) fn seeds(&self) -> Vec<u64> {
        self.cells
            .iter()
            .map(|cell| cell.seed)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// A measure of a policy on a workload at a load, for each seed.
    pub(super) fn values(
        &self,
        kind: &str,
        load: f64,
        of: fn(&RunMeasures) -> f64,
        policy: &str,
    ) -> Vec<f64> {
        let there = |cell: &&&GridCell| {
            cell.workload == kind && cell.policy == policy && (cell.load - load).abs() < 1e-9
        };
        self.cells
            .iter()
            .filter(there)
            .map(|cell| of(&cell.measures))
            .collect()
    }

    /// The mean of a measure over seeds at one load.
    pub(super) fn at_load(
        &self,
        kind: &str,
        load: f64,
        of: fn(&RunMeasures) -> f64,
        policy: &str,
    ) -> Option<f64> {
        let values = self.values(kind, load, of, policy);
        (!values.is_empty()).then(|| mean_ci(&values).0)
    }

    /// Mean over loads and seeds.
    pub(super) fn mean(&self, kind: &str, measure: Measure, policy: &str) -> Option<f64> {
        self.mean_ci(kind, measure, policy).map(|(mean, _)| mean)
    }

    /// The mean over loads and seeds, and half the width of its confidence interval over seeds.
    pub(super) fn mean_ci(&self, kind: &str, measure: Measure, policy: &str) -> Option<(f64, f64)> {
        let means: Vec<f64> = self.by_seed(kind, measure, policy).into_values().collect();
        (!means.is_empty()).then(|| mean_ci(&means))
    }

    /// A policy in this setting over another policy in another setting, by the seeds of both.
    pub(super) fn against_elsewhere(
        &self,
        (kind, measure): (&str, Measure),
        policy: &str,
        (other, rival): (&Self, &str),
    ) -> Option<RatioInterval> {
        let theirs = other.by_seed(kind, measure, rival);
        let both = self
            .by_seed(kind, measure, policy)
            .into_iter()
            .filter_map(|(seed, ours)| Some((ours / theirs.get(&seed)?).ln()));
        let logs: Vec<f64> = both.collect();
        (!logs.is_empty()).then(|| ratio(&logs))
    }

    /// Mean over loads, for each seed.
    fn by_seed(&self, kind: &str, (_, of): Measure, policy: &str) -> BTreeMap<u64, f64> {
        let mut by_seed: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        for cell in self
            .cells
            .iter()
            .filter(|cell| cell.workload == kind && cell.policy == policy)
        {
            by_seed
                .entry(cell.seed)
                .or_default()
                .push(of(&cell.measures));
        }
        by_seed
            .into_iter()
            .map(|(seed, values)| (seed, mean_ci(&values).0))
            .collect()
    }

    /// `ours` over the best of `rivals` on a workload, and the name of that rival: the one with the
    /// lowest geometric mean over loads and seeds.
    pub(super) fn against_best<'r>(
        &self,
        kind: &str,
        measure: Measure,
        ours: &str,
        rivals: &[&'r str],
    ) -> Option<(RatioInterval, &'r str)> {
        let of = rivals
            .iter()
            .filter_map(|&rival| Some((self.log_ratios(kind, measure, ours, rival)?, rival)));
        // The greatest ratio is the one to the best rival.
        let mean = |logs: &[f64]| logs.iter().sum::<f64>() / logs.len().max(1) as f64;
        of.max_by(|a, b| mean(&a.0).total_cmp(&mean(&b.0)))
            .map(|(logs, rival)| (ratio(&logs), rival))
    }

    /// `ours` over the best rival of each workload, over all workloads together.
    pub(super) fn all_workloads(
        &self,
        measure: Measure,
        ours: &str,
        rivals: &[&str],
    ) -> Option<RatioInterval> {
        let kinds: Vec<Vec<f64>> = WorkloadKind::MAIN
            .iter()
            .map(|kind| {
                let (_, best) = self.against_best(kind.name(), measure, ours, rivals)?;
                self.log_ratios(kind.name(), measure, ours, best)
            })
            .collect::<Option<_>>()?;
        let seeds = kinds.iter().map(Vec::len).min()?;
        let of_seed = |seed: usize| {
            kinds.iter().filter_map(|logs| logs.get(seed)).sum::<f64>() / kinds.len() as f64
        };
        Some(ratio(&(0..seeds).map(of_seed).collect::<Vec<_>>()))
    }

    /// Requests in SLO of `ours` minus those of the best of `rivals`, percentage points, as the
    /// mean over loads and seeds.
    pub(super) fn slo_points(&self, kind: &str, ours: &str, rivals: &[&str]) -> Option<f64> {
        let slo = |policy: &str| self.mean(kind, ("SLO", |m| m.slo), policy);
        Some(
            (slo(ours)?
                - rivals
                    .iter()
                    .filter_map(|rival| slo(rival))
                    .reduce(f64::max)?)
                * 100.0,
        )
    }

    /// The logarithm of `ours` over `rival` for each seed, as the mean over loads.
    fn log_ratios(
        &self,
        kind: &str,
        (_, of): Measure,
        ours: &str,
        rival: &str,
    ) -> Option<Vec<f64>> {
        let find = |policy: &str, load: f64, seed: u64| {
            let there = |cell: &&&GridCell| {
                cell.workload == kind
                    && cell.policy == policy
                    && cell.seed == seed
                    && (cell.load - load).abs() < 1e-9
            };
            self.cells.iter().find(there).map(|cell| of(&cell.measures))
        };
        let mut by_seed: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        for cell in self
            .cells
            .iter()
            .filter(|cell| cell.workload == kind && cell.policy == ours)
        {
            let theirs = find(rival, cell.load, cell.seed)?;
            by_seed
                .entry(cell.seed)
                .or_default()
                .push((of(&cell.measures).max(1e-9) / theirs.max(1e-9)).ln());
        }
        (!by_seed.is_empty()).then(|| {
            by_seed
                .values()
                .map(|logs| logs.iter().sum::<f64>() / logs.len() as f64)
                .collect()
        })
    }
}

fn ratio(logs: &[f64]) -> RatioInterval {
    let (mean, half) = mean_ci(logs);
    RatioInterval {
        mean: mean.exp(),
        low: (mean - half).exp(),
        high: (mean + half).exp(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_rival_is_taken_for_each_measure() {
        let cell = |policy: &str, seed, ttft_mean, e2e_mean| GridCell {
            setting: "main".into(),
            workload: "code".into(),
            load: 0.5,
            policy: policy.into(),
            seed,
            measures: RunMeasures {
                ttft_mean,
                e2e_mean,
                ..RunMeasures::default()
            },
        };
        let mut store = ResultStore::default();
        let cells = (1..4).flat_map(|seed| {
            [
                cell("ours", seed, 8.0, 9.0),
                cell("a", seed, 10.0, 30.0),
                cell("b", seed, 20.0, 10.0),
            ]
        });
        store.put(ResultStore {
            cells: cells.collect(),
            ..ResultStore::default()
        });
        let runs = SettingRuns::of(&store, "main");
        let best = |measure: Measure| {
            runs.against_best("code", measure, "ours", &["a", "b"])
                .map(|(ratio, who)| (ratio.to_string(), who))
        };
        assert_eq!(
            best(("TTFT", |m| m.ttft_mean)),
            Some(("0.80 [0.80, 0.80]".to_owned(), "a"))
        );
        assert_eq!(
            best(("E2E", |m| m.e2e_mean)),
            Some(("0.90 [0.90, 0.90]".to_owned(), "b"))
        );
        let elsewhere =
            runs.against_elsewhere(("code", ("TTFT", |m| m.ttft_mean)), "ours", (&runs, "b"));
        assert_eq!(
            elsewhere.map(|ratio| ratio.to_string()),
            Some("0.40 [0.40, 0.40]".to_owned())
        );
        assert!(
            runs.against_best("chat", ("TTFT", |m| m.ttft_mean), "ours", &["a"])
                .is_none()
        );
    }
}
