//! Decides when an endpoint is scraped next. This module reads no clock and no entropy: the caller
//! passes time and random numbers.
//!
//! Idle endpoints are scraped once every [`ScrapeIntervals::idle`]; endpoints with work, or picked
//! within the last 2 s, once every [`ScrapeIntervals::busy`]. Failing endpoints are scraped less
//! and less often. The exception is an address where no process listens. A refused connection costs
//! nothing, and the process that next listens at this address has an empty cache and should be
//! noticed soon. The intervals are stretched so that at most [`SCRAPES_PER_SECOND_MAX`] scrapes
//! begin in a second. An endpoint that takes long to answer is scraped less often, because the time
//! is mostly the endpoint's own CPU time for writing the page. Picks do not wait for metrics: the
//! in-flight ledger is newer than any scrape, and KV memory takes seconds to fill or empty. So more
//! frequent scrapes would bring nothing.

use std::time::Duration;

use tokio::time::Instant;

/// The maximum number of scrapes begun in a second, over all endpoints of a pool. A scrape costs
/// 0.11 ms of CPU (0.14 ms for a whole page of 38 KB), so the maximum costs 0.07 core.
pub const SCRAPES_PER_SECOND_MAX: f64 = 500.0;

/// The time for which an endpoint counts as busy after it last had work or was picked.
const BUSY_HOLD: Duration = Duration::from_secs(2);

/// The longest pause after failures. A recovery is noticed after at most this pause.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

/// The largest share of time that an endpoint may spend on answering when it is scraped more often
/// than `idle`. For a page of 38 KB, `prometheus_client` occupies the API server's only Python
/// thread for 3.4 ms (0.06 ms for the needed families alone). In multi-process mode,
/// `prometheus_client` takes several times as long.
const ANSWERING_SHARE_MAX: f64 = 0.05;

/// The share by which pauses vary randomly in both directions, so that scrapes of endpoints that
/// joined together spread out.
const JITTER: f64 = 0.1;

/// The time per new endpoint. All new endpoints are first scraped within this time multiplied by
/// their number, so that the scrapes of a large pool do not all begin at the same time.
const FIRST_SPREAD: Duration = Duration::from_millis(5);

/// The intervals between two scrapes of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrapeIntervals {
    /// The interval for an endpoint without work.
    pub idle: Duration,
    /// The interval for an endpoint with work.
    pub busy: Duration,
}

/// The result of a scrape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScrapeOutcome {
    Idle,
    Busy,
    Failed,
    /// No process listens at the address.
    Away,
}

/// The scrape pace of one endpoint.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScrapePace {
    failures: u32,
    away: bool,
    busy_until: Option<Instant>,
    /// The duration of the last scrape.
    took: Duration,
}

impl Default for ScrapeIntervals {
    /// Returns the default intervals. The interval of a busy endpoint is some tens of engine steps,
    /// because the in-flight ledger covers the time between two scrapes.
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(1),
            busy: Duration::from_millis(100),
        }
    }
}

impl ScrapePace {
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// Records that the endpoint was just picked, or has work.
    pub(super) fn busy(&mut self, now: Instant) {
        self.busy_until = Some(now + BUSY_HOLD);
    }

    /// Records the result and the duration of a scrape.
    pub(super) fn record(&mut self, outcome: ScrapeOutcome, took: Duration, now: Instant) {
        self.took = took;
        self.away = outcome == ScrapeOutcome::Away;
        self.failures = if matches!(outcome, ScrapeOutcome::Failed | ScrapeOutcome::Away) {
            self.failures.saturating_add(1)
        } else {
            0
        };
        if outcome == ScrapeOutcome::Busy {
            self.busy(now);
        }
    }

    /// Returns the pause before the next scrape of one of `endpoints` endpoints. `chance` is a
    /// random number in [0, 1).
    pub(super) fn pause(
        &self,
        intervals: ScrapeIntervals,
        endpoints: usize,
        now: Instant,
        chance: f64,
    ) -> Duration {
        let busy = self.busy_until.is_some_and(|until| now < until);
        let wanted = match self.failures {
            0 if busy => intervals.busy,
            0 => intervals.idle,
            _ if self.away => intervals.idle,
            failures => back_off(intervals.idle, failures),
        };
        let affordable = Duration::from_secs_f64(endpoints as f64 / SCRAPES_PER_SECOND_MAX);
        let considerate = self.took.div_f64(ANSWERING_SHARE_MAX).min(intervals.idle);
        wanted
            .max(affordable)
            .max(considerate)
            .mul_f64(1.0 + JITTER * (2.0 * chance - 1.0))
    }
}

/// Returns the pause before the first scrape of one of `new` endpoints that joined together.
/// `chance` is a random number in [0, 1).
pub(super) fn first_pause(intervals: ScrapeIntervals, new: usize, chance: f64) -> Duration {
    FIRST_SPREAD
        .mul_f64(new.saturating_sub(1) as f64)
        .min(intervals.idle)
        .mul_f64(chance)
}

fn back_off(first: Duration, failures: u32) -> Duration {
    let doublings = (failures - 1).min(16); // far above the cap
    first
        .saturating_mul(1 << doublings)
        .min(BACK_OFF_MAX.max(first))
}

#[cfg(test)]
mod tests;
