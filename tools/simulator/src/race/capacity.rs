//! Finds the capacity of a policy, mostly of round robin: the highest rate of arrivals at which
//! sessions end as fast as they begin.
//!
//! Sessions arrive for ten minutes. A rate is sustained if the number of live sessions hardly
//! grows: the mean of the last 100 s exceeds the mean of the 100 s around the middle by at most a
//! tenth plus two standard deviations. The standard deviation is that of the difference of two
//! Poisson numbers, averaged over the seeds. A session is live from its first request to the end of
//! its last reply.

use std::collections::BTreeSet;
use std::io::Write;

use race_cells::{CellEngines, RaceWorkload};

use super::setting;
use crate::parallel::parallel;
use crate::policy::RoutingPolicy;
use crate::workload::{SESSION_BLOCK_TOKENS, Workload};
use crate::world::{self, RequestOutcome};

const ARRIVALS_S: f64 = 600.0;
/// The windows in which live sessions are counted: begin and end, in s.
const MIDDLE_S: [f64; 2] = [250.0, 350.0];
const END_S: [f64; 2] = [500.0, 600.0];
const GROWTH_MAX: f64 = 0.1;
const DEVIATIONS: f64 = 2.0;
/// The first rate to try, in sessions a second. The rate is doubled until the policy does not
/// sustain it.
const FIRST_PER_S: f64 = 0.5;
/// The number of times that the interval around the capacity is halved. The capacity is then known
/// to within 2 %.
const HALVINGS: usize = 6;

/// The pool of the race: eight engines with the speed of the profile.
const ENGINES: CellEngines = CellEngines::EIGHT;

/// The result of a policy at one rate of arrivals.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RateOutcome {
    /// The mean numbers of live sessions: in the middle, and at the end of the arrivals.
    live: [f64; 2],
    /// The number of KV blocks (16 tokens each) that the live sessions need at the end of the
    /// arrivals. A block that several sessions share counts once.
    blocks: f64,
    /// The number of KV blocks that the largest request needs.
    largest: f64,
}

/// The time from the first request of a session to the end of its last reply, ms.
struct SessionSpan {
    from_ms: f64,
    to_ms: f64,
    /// The number of the last request that the session sent before the end of the arrivals.
    latest: u32,
}

// === impl SessionSpan ===

impl SessionSpan {
    fn all(workload: &Workload, outcomes: &[RequestOutcome]) -> Vec<Self> {
        let mut spans: Vec<Self> = Vec::new();
        for ((request, outcome), number) in workload.requests().iter().zip(outcomes).zip(0..) {
            let to_ms = outcome.at + outcome.e2e;
            match spans.last_mut().filter(|_| request.pause_ms.is_some()) {
                Some(span) => {
                    span.to_ms = to_ms;
                    if outcome.at <= ARRIVALS_S * 1e3 {
                        span.latest = number;
                    }
                }
                None => spans.push(Self {
                    from_ms: outcome.at,
                    to_ms,
                    latest: number,
                }),
            }
        }
        spans
    }

    /// Returns for how many seconds the session was live between these times, which are in s.
    fn live_s(&self, [from_s, to_s]: [f64; 2]) -> f64 {
        ((self.to_ms / 1e3).min(to_s) - (self.from_ms / 1e3).max(from_s)).max(0.0)
    }
}

// === impl RateOutcome ===

impl RateOutcome {
    fn play(
        policy: &RoutingPolicy,
        workload: RaceWorkload,
        per_s: f64,
        seed: u64,
    ) -> Result<Self, String> {
        let played = Workload::of_sessions(&workload.sessions(seed, per_s, ARRIVALS_S));
        let outcomes = world::run(&played, policy, &setting(ENGINES), seed)?;
        let spans = SessionSpan::all(&played, &outcomes);
        let mean = |window: [f64; 2]| {
            spans.iter().map(|span| span.live_s(window)).sum::<f64>() / (window[1] - window[0])
        };
        let at_end = spans.iter().filter(|span| span.to_ms > ARRIVALS_S * 1e3);
        let blocks: BTreeSet<u64> = at_end
            .filter_map(|span| played.job(span.latest))
            .flat_map(|job| job.blocks)
            .copied()
            .collect();
        let largest = played
            .requests()
            .iter()
            .map(|request| request.prompt + request.output)
            .max()
            .unwrap_or(0);
        Ok(Self {
            live: [mean(MIDDLE_S), mean(END_S)],
            blocks: blocks.len() as f64,
            largest: f64::from(largest) / SESSION_BLOCK_TOKENS as f64,
        })
    }

    fn of_seeds(
        policy: &RoutingPolicy,
        workload: RaceWorkload,
        per_s: f64,
        seeds: &[u64],
        threads: usize,
    ) -> Result<Self, String> {
        let all = parallel(threads, seeds, |&seed| {
            Self::play(policy, workload, per_s, seed)
        })?;
        let mean =
            |of: &dyn Fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len().max(1) as f64;
        Ok(Self {
            live: [mean(&|one| one.live[0]), mean(&|one| one.live[1])],
            blocks: mean(&|one| one.blocks),
            largest: all.iter().map(|one| one.largest).fold(0.0, f64::max),
        })
    }

    /// Whether the policy sustains the rate, if this outcome is the mean over `seeds` seeds.
    fn is_sustained(&self, seeds: usize) -> bool {
        let [middle, end] = self.live;
        end - middle
            <= GROWTH_MAX * middle + DEVIATIONS * (2.0 * middle / seeds.max(1) as f64).sqrt()
    }
}

/// Returns how many sessions a second the policy sustains.
fn capacity(
    policy: &RoutingPolicy,
    workload: RaceWorkload,
    seeds: &[u64],
    threads: usize,
) -> Result<f64, String> {
    let sustained = |per_s| {
        RateOutcome::of_seeds(policy, workload, per_s, seeds, threads)
            .map(|outcome| outcome.is_sustained(seeds.len()))
    };
    let mut high = FIRST_PER_S;
    while sustained(high)? {
        high *= 2.0;
    }
    let mut low = high / 2.0;
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        *if sustained(middle)? {
            &mut low
        } else {
            &mut high
        } = middle;
    }
    Ok(low)
}

/// Prints a line of figures for each workload.
pub(super) fn print(policy: &str, seeds: &[u64], threads: usize) -> Result<(), String> {
    let policy = RoutingPolicy::named(policy)?;
    let mut out = std::io::stdout().lock();
    let _ = writeln!(
        out,
        "{:<20}{:>12}{:>16}{:>18}{:>18}",
        "workload", "sessions/s", "live at half", "their KV blocks", "largest request"
    );
    for workload in RaceWorkload::ALL {
        let per_s = capacity(&policy, workload, seeds, threads)?;
        let half = RateOutcome::of_seeds(&policy, workload, per_s / 2.0, seeds, threads)?;
        let RateOutcome {
            live,
            blocks,
            largest,
        } = half;
        let _ = writeln!(
            out,
            "{:<20}{per_s:>12.2}{:>16.0}{blocks:>18.0}{largest:>18.0}",
            workload.name(),
            live[1]
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_sustained_unless_live_sessions_grow_by_more_than_chance() {
        let is_sustained = |middle, end, seeds| {
            RateOutcome {
                live: [middle, end],
                ..RateOutcome::default()
            }
            .is_sustained(seeds)
        };
        assert!(is_sustained(100.0, 120.0, 5) && is_sustained(100.0, 50.0, 5));
        assert!(
            is_sustained(100.0, 135.0, 1) && !is_sustained(100.0, 135.0, 5),
            "more seeds leave less to chance"
        );
    }

    #[test]
    fn round_robin_sustains_a_low_rate_and_not_a_high_one() {
        let policy = RoutingPolicy::named("round-robin").unwrap();
        let outcome = |per_s| RateOutcome::play(&policy, RaceWorkload::Agents, per_s, 1).unwrap();
        assert!(outcome(0.2).is_sustained(1));
        assert!(!outcome(2.0).is_sustained(1));
    }
}
