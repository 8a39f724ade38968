//! The scraper's counters for the metrics page. They are cumulative; the scrape tasks write them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::fetch::FailReason;

/// Upper bounds of the duration histogram, in ms, from a filtered page on the same node to the
/// deadline. One more bucket counts longer scrapes.
pub const DURATION_BUCKETS_MS: [u64; 8] = [1, 2, 5, 10, 25, 100, 250, 1000];

/// Counters of one scraper.
#[derive(Debug, Default)]
pub struct ScrapeStats {
    polls: AtomicU64,
    failures: [AtomicU64; FailReason::KINDS.len()],
    pages_filtered: AtomicU64,
    full_pages: AtomicU64,
    bytes: AtomicU64,
    lines: AtomicU64,
    lines_skipped: AtomicU64,
    restarts: AtomicU64,
    duration_us: AtomicU64,
    duration_buckets: [AtomicU64; DURATION_BUCKETS_MS.len() + 1],
}

/// The counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrapeCounts {
    /// Scrapes finished, successful or not.
    pub polls: u64,
    /// Failed scrapes by kind, kinds as in [`FailReason::kind`].
    pub failures: Vec<(&'static str, u64)>,
    /// Pages requested with `name[]`.
    pub pages_filtered: u64,
    /// Whole pages requested.
    pub full_pages: u64,
    /// Bytes of pages received.
    pub bytes: u64,
    pub lines: u64,
    /// Lines skipped as malformed or too long.
    pub lines_skipped: u64,
    /// Restarts noticed.
    pub restarts: u64,
    /// Time spent in scrapes, in µs.
    pub duration_us: u64,
    /// Scrapes by duration: one count for each bound of [`DURATION_BUCKETS_MS`], then one for
    /// longer scrapes. Not cumulative over the buckets.
    pub duration_buckets: Vec<u64>,
}

impl ScrapeStats {
    #[must_use]
    pub fn counts(&self) -> ScrapeCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ScrapeCounts {
            polls: get(&self.polls),
            failures: FailReason::KINDS
                .into_iter()
                .zip(self.failures.iter().map(get))
                .collect(),
            pages_filtered: get(&self.pages_filtered),
            full_pages: get(&self.full_pages),
            bytes: get(&self.bytes),
            lines: get(&self.lines),
            lines_skipped: get(&self.lines_skipped),
            restarts: get(&self.restarts),
            duration_us: get(&self.duration_us),
            duration_buckets: self.duration_buckets.iter().map(get).collect(),
        }
    }

    pub(super) fn poll(&self, took: Duration, failure: Option<&FailReason>) {
        add(&self.polls, 1);
        add(
            &self.duration_us,
            u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        );
        let at = DURATION_BUCKETS_MS
            .iter()
            .position(|&bound| took <= Duration::from_millis(bound));
        add_at(
            &self.duration_buckets,
            at.unwrap_or(DURATION_BUCKETS_MS.len()),
        );
        if let Some(at) = failure.and_then(|reason| {
            FailReason::KINDS
                .iter()
                .position(|kind| *kind == reason.kind())
        }) {
            add_at(&self.failures, at);
        }
    }

    pub(super) fn asked(&self, filtered: bool) {
        add(
            if filtered {
                &self.pages_filtered
            } else {
                &self.full_pages
            },
            1,
        );
    }

    pub(super) fn page(&self, bytes: usize, lines: super::exposition::LineCounts) {
        add(&self.bytes, bytes as u64);
        add(&self.lines, lines.read);
        add(&self.lines_skipped, lines.skipped);
    }

    pub(super) fn restart(&self) {
        add(&self.restarts, 1);
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

fn add_at(counters: &[AtomicU64], at: usize) {
    if let Some(counter) = counters.get(at) {
        add(counter, 1);
    }
}
