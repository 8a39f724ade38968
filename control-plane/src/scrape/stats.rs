//! The scraper's counters for the metrics page. The counters are cumulative, and the scrape tasks
//! write them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::fetch::FailReason;

/// The upper bounds of the duration histogram, in ms. A filtered page from the same node falls into
/// the first bucket, and the last bound is the deadline. One more bucket counts longer scrapes.
pub const DURATION_BUCKETS_MS: [u64; 8] = [1, 2, 5, 10, 25, 100, 250, 1000];

/// Counters of one scraper.
#[derive(Debug)]
pub struct ScrapeStats(Mutex<ScrapeCounts>);

/// The counters at a point in time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrapeCounts {
    /// The number of finished scrapes, successful or not.
    pub polls: u64,
    /// The number of failed scrapes, by [`FailReason::kind`].
    pub failures: Vec<(&'static str, u64)>,
    /// The number of pages that were requested with `name[]`.
    pub pages_filtered: u64,
    /// The number of whole pages that were requested.
    pub full_pages: u64,
    /// The number of received bytes of pages.
    pub bytes: u64,
    pub lines: u64,
    /// The number of lines that were skipped as malformed or too long.
    pub lines_skipped: u64,
    /// The number of restarts that were noticed.
    pub restarts: u64,
    /// The time spent in scrapes, in µs.
    pub duration_us: u64,
    /// The number of scrapes by duration: one count for each bound of [`DURATION_BUCKETS_MS`], and
    /// one for longer scrapes. The counts are not cumulative over the buckets.
    pub duration_buckets: Vec<u64>,
}

impl Default for ScrapeStats {
    fn default() -> Self {
        Self(Mutex::new(ScrapeCounts {
            failures: FailReason::KINDS.map(|kind| (kind, 0)).into(),
            duration_buckets: vec![0; DURATION_BUCKETS_MS.len() + 1],
            ..ScrapeCounts::default()
        }))
    }
}

impl ScrapeStats {
    #[must_use]
    pub fn counts(&self) -> ScrapeCounts {
        self.lock().clone()
    }

    pub(super) fn poll(&self, took: Duration, failure: Option<&FailReason>) {
        let mut counts = self.lock();
        counts.polls += 1;
        counts.duration_us += u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = DURATION_BUCKETS_MS
            .iter()
            .position(|&bound| took <= Duration::from_millis(bound))
            .unwrap_or(DURATION_BUCKETS_MS.len());
        if let Some(count) = counts.duration_buckets.get_mut(bucket) {
            *count += 1;
        }
        for (kind, count) in &mut counts.failures {
            *count += u64::from(failure.is_some_and(|reason| reason.kind() == *kind));
        }
    }

    pub(super) fn count_request(&self, filtered: bool) {
        let mut counts = self.lock();
        if filtered {
            counts.pages_filtered += 1;
        } else {
            counts.full_pages += 1;
        }
    }

    pub(super) fn page(&self, bytes: usize, lines: super::exposition::LineCounts) {
        let mut counts = self.lock();
        counts.bytes += bytes as u64;
        counts.lines += lines.read;
        counts.lines_skipped += lines.skipped;
    }

    pub(super) fn restart(&self) {
        self.lock().restarts += 1;
    }

    fn lock(&self) -> MutexGuard<'_, ScrapeCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
