//! Plays many engines behind several gateways, as in smg's pull request 2438. Each request of a
//! session arrives at a random gateway. A gateway that has not received a request of the session
//! before may choose an engine that has cached nothing of the session.

use std::collections::HashSet;
use std::io::Write;

use race_cells::{CellEngines, RaceWorkload};

use super::row::by_engine;
use super::{SHARING_MS, policy_of, setting};
use crate::parallel::parallel;
use crate::workload::{SESSION_BLOCK_TOKENS, Workload};
use crate::world::{self, PoolSetting, RequestOutcome, SharingMode};

#[derive(Clone, Copy, Debug)]
pub(super) struct RaceFleet {
    pub(super) engines: usize,
    pub(super) gateways: usize,
    /// The length of the arrivals, in s.
    pub(super) seconds: f64,
    /// The load, in percent of what round robin can serve.
    pub(super) load_percent: u32,
}

/// The figures of a fleet, as means over the seeds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct FleetFigures {
    requests: f64,
    e2e_ms: f64,
    ttft_ms: f64,
    /// The cached tokens, divided by the tokens that one endless cache for all engines would have
    /// had.
    of_endless: f64,
    /// The share of the sessions' later requests that had the same engine as the session's previous
    /// request.
    same_engine: f64,
    /// The standard deviation of the engines' numbers of requests, divided by the mean.
    variation: f64,
}

const WORKLOADS: [RaceWorkload; 2] = [RaceWorkload::Agents, RaceWorkload::Tenants];

/// The routers to compare, each with gateways that share their state or do not.
const ROUTERS: [(&str, SharingMode); 4] = [
    ("ours", SharingMode::After(SHARING_MS)),
    ("ours", SharingMode::Private),
    ("smg", SharingMode::Private),
    ("envoy-round-robin", SharingMode::Private),
];

// === impl RaceFleet ===

impl RaceFleet {
    fn workload(&self, workload: RaceWorkload, seed: u64) -> Workload {
        let per_s = workload.capacity_per_s() * f64::from(self.load_percent) / 100.0
            * self.engines as f64
            / 8.0;
        let mut workload = Workload::of_sessions(&workload.sessions(seed, per_s, self.seconds));
        workload.roams = true;
        workload
    }

    fn play(
        &self,
        router: &str,
        sharing: SharingMode,
        workload: &Workload,
        seed: u64,
    ) -> Result<FleetFigures, String> {
        let engines = CellEngines {
            count: self.engines,
            ..CellEngines::EIGHT
        };
        let setting = PoolSetting {
            proxies: self.gateways,
            sharing,
            ..setting(engines)
        };
        let outcomes = world::run(workload, &policy_of(router)?, &setting, seed)?;
        Ok(FleetFigures::from_outcomes(
            workload,
            &outcomes,
            self.engines,
        ))
    }
}

// === impl FleetFigures ===

impl FleetFigures {
    fn from_outcomes(workload: &Workload, outcomes: &[RequestOutcome], engines: usize) -> Self {
        let count = outcomes.len().max(1) as f64;
        let mean = |of: fn(&RequestOutcome) -> f64| outcomes.iter().map(of).sum::<f64>() / count;
        let pairs = workload
            .requests()
            .iter()
            .zip(outcomes.windows(2).zip(workload.requests().iter().skip(1)));
        let later: Vec<bool> = pairs
            .filter(|(before, (_, after))| before.session == after.session)
            .filter_map(|(_, (pair, _))| Some(pair.first()?.engine == pair.last()?.engine))
            .collect();
        Self {
            requests: count,
            e2e_ms: mean(|outcome| outcome.e2e),
            ttft_ms: mean(|outcome| outcome.ttft),
            of_endless: mean(|outcome| f64::from(outcome.cached)) * count
                / endless(workload, outcomes).max(1.0),
            same_engine: later.iter().filter(|same| **same).count() as f64
                / later.len().max(1) as f64,
            variation: variation(&by_engine(outcomes, engines)),
        }
    }

    fn mean(all: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len().max(1) as f64;
        Self {
            requests: mean(|one| one.requests),
            e2e_ms: mean(|one| one.e2e_ms),
            ttft_ms: mean(|one| one.ttft_ms),
            of_endless: mean(|one| one.of_endless),
            same_engine: mean(|one| one.same_engine),
            variation: mean(|one| one.variation),
        }
    }
}

/// Returns how many prompt tokens one endless cache for all engines would have had: the blocks at
/// the begin of each prompt that earlier requests and their replies contain.
fn endless(workload: &Workload, outcomes: &[RequestOutcome]) -> f64 {
    let mut order: Vec<(f64, u32)> = outcomes
        .iter()
        .map(|outcome| outcome.sent)
        .zip(0..)
        .collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut cache = HashSet::<u64>::new();
    let mut tokens = 0;
    for job in order
        .into_iter()
        .filter_map(|(_, request)| workload.job(request))
    {
        let most = job.prompt.saturating_sub(1) as usize / SESSION_BLOCK_TOKENS;
        tokens += SESSION_BLOCK_TOKENS
            * job
                .blocks
                .iter()
                .take(most)
                .take_while(|block| cache.contains(*block))
                .count();
        cache.extend(job.blocks);
    }
    tokens as f64
}

fn variation(counts: &[usize]) -> f64 {
    let mean = counts.iter().sum::<usize>() as f64 / counts.len().max(1) as f64;
    let variance = counts
        .iter()
        .map(|count| (*count as f64 - mean).powi(2))
        .sum::<f64>()
        / counts.len().max(1) as f64;
    if mean > 0.0 {
        variance.sqrt() / mean
    } else {
        0.0
    }
}

/// Prints the head of the table in Markdown.
pub(super) fn print_head() {
    let head = "| workload | load % | gateways | requests | E2E | TTFT | share of an endless cache | same engine | variation by engine |";
    let _ = writeln!(
        std::io::stdout().lock(),
        "{head}\n|{}",
        "---|".repeat(head.matches('|').count() - 1)
    );
}

/// Prints the lines of a fleet in the table, one for each workload and router.
///
/// # Errors
/// Fails when a run fails.
pub(super) fn print(fleet: &RaceFleet, seeds: &[u64], threads: usize) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    for kind in WORKLOADS {
        let workloads = parallel(threads, seeds, |seed| Ok(fleet.workload(kind, *seed)))?;
        for (router, sharing) in ROUTERS {
            let runs: Vec<(&u64, &Workload)> = seeds.iter().zip(&workloads).collect();
            let all = parallel(threads, &runs, |(seed, workload)| {
                fleet.play(router, sharing, workload, **seed)
            })?;
            let FleetFigures {
                requests,
                e2e_ms,
                ttft_ms,
                of_endless,
                same_engine,
                variation,
            } = FleetFigures::mean(&all);
            let state = if sharing == SharingMode::Private {
                "each its own"
            } else {
                "shared"
            };
            let figures = format!(
                "{requests:.0} | {e2e_ms:.0} | {ttft_ms:.0} | {of_endless:.3} | {same_engine:.3} | {variation:.3}"
            );
            let _ = writeln!(
                out,
                "| {} | {} | {router}, {state} | {figures} |",
                kind.name(),
                fleet.load_percent
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_even_load_has_no_variation() {
        assert_eq!((variation(&[5, 5, 5]), variation(&[0, 10])), (0.0, 1.0));
    }

    #[test]
    fn gateways_that_share_find_more_than_those_that_do_not() {
        let fleet = RaceFleet {
            engines: 8,
            gateways: 4,
            seconds: 40.0,
            load_percent: 50,
        };
        let workload = fleet.workload(RaceWorkload::Agents, 1);
        let [shared, alone] = [ROUTERS[0], ROUTERS[1]]
            .map(|(router, sharing)| fleet.play(router, sharing, &workload, 1).unwrap());
        assert!(
            shared.of_endless > alone.of_endless && shared.of_endless < 1.0,
            "{shared:?} {alone:?}"
        );
        assert!(shared.same_engine > alone.same_engine);
    }
}
