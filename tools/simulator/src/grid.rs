//! Many runs: every combination of workloads, loads, policies and seeds, on several threads.

use std::sync::Mutex;

use crate::measure::RunMeasures;
use crate::policy::RoutingPolicy;
use crate::recovery::RecoverySeries;
use crate::workload::{Workload, WorkloadKind};
use crate::world::{self, PoolSetting};

/// One run: its names and its measures.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GridCell {
    pub(crate) setting: String,
    pub(crate) workload: String,
    /// A share of the workload's capacity.
    pub(crate) load: f64,
    pub(crate) policy: String,
    pub(crate) seed: u64,
    pub(crate) measures: RunMeasures,
}

/// The runs of a campaign.
#[derive(Clone, Debug)]
pub(crate) struct ExperimentGrid {
    pub(crate) name: String,
    pub(crate) setting: PoolSetting,
    /// The capacity of the setting, as a share of the main setting's.
    pub(crate) capacity: f64,
    pub(crate) kinds: Vec<WorkloadKind>,
    pub(crate) loads: Vec<f64>,
    pub(crate) policies: Vec<String>,
    pub(crate) seeds: Vec<u64>,
}

impl ExperimentGrid {
    /// Runs everything that is not `known`. Each workload is loaded once for each seed; then `each`
    /// gets the results of its runs.
    pub(crate) fn run(
        &self,
        threads: usize,
        known: &[GridCell],
        mut each: impl FnMut(Vec<GridCell>) -> Result<(), String>,
    ) -> Result<(), String> {
        for (&kind, &seed) in self
            .kinds
            .iter()
            .flat_map(|kind| self.seeds.iter().map(move |seed| (kind, seed)))
        {
            let is_known = |(load, policy): &(f64, &String)| {
                let named = |cell: &GridCell| {
                    (&*cell.setting, &*cell.workload, &*cell.policy)
                        == (&*self.name, kind.name(), policy.as_str())
                };
                known
                    .iter()
                    .any(|cell| named(cell) && cell.seed == seed && (cell.load - load).abs() < 1e-9)
            };
            let jobs = self
                .loads
                .iter()
                .flat_map(|&load| self.policies.iter().map(move |policy| (load, policy)));
            let jobs: Vec<(f64, &String)> = jobs.filter(|job| !is_known(job)).collect();
            if !jobs.is_empty() {
                let workload = kind.load(seed)?;
                each(parallel(threads, &jobs, |&(load, policy)| {
                    self.cell(kind, &workload, (load, policy), seed)
                })?)?;
            }
        }
        Ok(())
    }

    fn cell(
        &self,
        kind: WorkloadKind,
        workload: &Workload,
        (load, policy): (f64, &str),
        seed: u64,
    ) -> Result<GridCell, String> {
        let rate = load * kind.capacity() * self.capacity;
        let records = world::run(
            workload,
            rate,
            &RoutingPolicy::named(policy)?,
            &self.setting,
            seed,
        )?;
        let measures = RunMeasures::of(&records, &self.setting.engine);
        Ok(GridCell {
            setting: self.name.clone(),
            workload: kind.name().to_owned(),
            load,
            policy: policy.to_owned(),
            seed,
            measures,
        })
    }

    /// The mean TTFT under a policy from the setting's change on, at the first load.
    pub(crate) fn after_change(
        &self,
        (kind, workload): (WorkloadKind, &Workload),
        policy: &str,
        seed: u64,
    ) -> Result<RecoverySeries, String> {
        let rate =
            self.loads.first().copied().unwrap_or_default() * kind.capacity() * self.capacity;
        let policy = RoutingPolicy::named(policy)?;
        let run = |setting: &PoolSetting| world::run(workload, rate, &policy, setting, seed);
        let records = run(&self.setting)?;
        let reference = run(&self.setting.changed())?;
        Ok(RecoverySeries::of(
            &records,
            &reference,
            self.setting
                .change_at(records.len())
                .unwrap_or(records.len()),
        ))
    }

    /// The highest rate at which `good` still holds, requests a second, by bisection between 5 %
    /// and 130 % of capacity.
    pub(crate) fn highest_rate(
        &self,
        (kind, workload): (WorkloadKind, &Workload),
        policy: &str,
        seed: u64,
        good: impl Fn(&RunMeasures) -> bool,
    ) -> Result<f64, String> {
        let mut low = 0.05;
        let mut high = 1.3;
        for _ in 0..7 {
            let middle = f64::midpoint(low, high);
            let cell = self.cell(kind, workload, (middle, policy), seed)?;
            *if good(&cell.measures) {
                &mut low
            } else {
                &mut high
            } = middle;
        }
        Ok(low * kind.capacity() * self.capacity)
    }
}

/// Does every job on this many threads. The results are in the order of the jobs.
pub(crate) fn parallel<J: Sync, T: Send>(
    threads: usize,
    jobs: &[J],
    work: impl Fn(&J) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let next = Mutex::new(0..jobs.len());
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let Some(at) = next.lock().ok().and_then(|mut next| next.next()) else {
                        return;
                    };
                    let Some(job) = jobs.get(at) else { return };
                    let result = work(job);
                    if let Ok(mut done) = done.lock() {
                        done.push((at, result));
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().map_err(|_| "a run panicked".to_owned())?;
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}
