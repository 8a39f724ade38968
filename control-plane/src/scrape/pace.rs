//! When an endpoint is scraped next. Pure: time and chance are arguments.
//!
//! Idle endpoints are asked every `idle`; those with work, or picked in the last moments, every `busy`; failing ones ever more seldom, unless nobody
//! listens there: to find that out costs nothing, and who begins to listen is another process, whose cache is empty. However
//! many there are, the intervals stretch so that no more than [`SCRAPES_PER_SECOND_MAX`] are begun; and an endpoint that takes long to
//! answer, which is mostly its own CPU writing the page, is asked less often. Picks do not wait for metrics: the in-flight ledger is fresher
//! than any scrape, and KV memory fills and empties in seconds. So nothing is worth more than that.

use std::time::Duration;

use tokio::time::Instant;

/// The most scrapes begun in a second, over all endpoints of a pool: 0.11 ms of CPU each (0.14 ms for a whole page of 38 KB), so 0.07 core.
pub const SCRAPES_PER_SECOND_MAX: f64 = 500.0;

/// Endpoints count as busy this long after they were last seen with work or picked.
const BUSY_HOLD: Duration = Duration::from_secs(2);

/// The longest pause after failures: how late a recovery may be noticed.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

/// The share of time an endpoint may spend on answering when it is asked more often than `idle`: `prometheus_client` takes 3.4 ms of the API
/// server's one Python thread for a page of 38 KB (0.06 ms for the needed families alone), and several times that in multi-process mode.
const ANSWERING_SHARE_MAX: f64 = 0.05;

/// Intervals vary by this share either way, so that endpoints found together drift apart.
const JITTER: f64 = 0.1;

/// New endpoints are first asked within this much time each, so that a large pool does not begin all at once.
const FIRST_SPREAD: Duration = Duration::from_millis(5);

/// How often to scrape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrapeIntervals {
    /// An endpoint without work.
    pub idle: Duration,
    /// An endpoint with work.
    pub busy: Duration,
}

/// How a scrape went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScrapeOutcome {
    Idle,
    Busy,
    Failed,
    /// Nothing listens.
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
    /// 1 s idle; 100 ms busy, some tens of engine steps: the ledger covers what happens between.
    fn default() -> Self {
        Self { idle: Duration::from_secs(1), busy: Duration::from_millis(100) }
    }
}

impl ScrapePace {
    /// Failures since the last success.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// The endpoint was just picked, or has work.
    pub(super) fn busy(&mut self, now: Instant) {
        self.busy_until = Some(now + BUSY_HOLD);
    }

    /// Takes in how a scrape went and how long it took.
    pub(super) fn record(&mut self, outcome: ScrapeOutcome, took: Duration, now: Instant) {
        self.took = took;
        self.away = outcome == ScrapeOutcome::Away;
        self.failures = if matches!(outcome, ScrapeOutcome::Failed | ScrapeOutcome::Away) { self.failures.saturating_add(1) } else { 0 };
        if outcome == ScrapeOutcome::Busy {
            self.busy(now);
        }
    }

    /// The pause before the next scrape of one among `endpoints`; `chance` in [0, 1).
    pub(super) fn pause(&self, intervals: ScrapeIntervals, endpoints: usize, now: Instant, chance: f64) -> Duration {
        let busy = self.busy_until.is_some_and(|until| now < until);
        let wanted = match self.failures {
            0 if busy => intervals.busy,
            0 => intervals.idle,
            _ if self.away => intervals.idle,
            failures => back_off(intervals.idle, failures),
        };
        let affordable = Duration::from_secs_f64(endpoints as f64 / SCRAPES_PER_SECOND_MAX);
        let considerate = self.took.div_f64(ANSWERING_SHARE_MAX).min(intervals.idle);
        wanted.max(affordable).max(considerate).mul_f64(1.0 + JITTER * (2.0 * chance - 1.0))
    }
}

/// The pause before the first scrape of one of `new` endpoints that arrived together; `chance` in
/// [0, 1).
pub(super) fn first_pause(intervals: ScrapeIntervals, new: usize, chance: f64) -> Duration {
    FIRST_SPREAD.mul_f64(new.saturating_sub(1) as f64).min(intervals.idle).mul_f64(chance)
}

fn back_off(first: Duration, failures: u32) -> Duration {
    let doublings = (failures - 1).min(16); // far beyond the cap already
    first.saturating_mul(1 << doublings).min(BACK_OFF_MAX.max(first))
}

#[cfg(test)]
mod tests;
