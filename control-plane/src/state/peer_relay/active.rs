//! Counts the processes of a pool: those that pick, and those that divide the pool's capacity.

use std::time::Duration;

use tokio::time::Instant;

use super::{ACTIVE_PER_ORIGIN_MAX, PoolRelay};
use crate::state::peer::Origin;

/// How long a process is counted among those that divide the pool after its load report was last
/// used. An open stream is not enough: without the daemon each proxy fills only its part of the
/// pool, so the part of a proxy without traffic would be lost.
const RECENT: Duration = Duration::from_secs(60);

// === impl PoolRelay ===

impl PoolRelay {
    /// Updates the number of active processes of `origin` when a process becomes active, or no
    /// longer is.
    pub(super) fn set_active(&mut self, origin: &Origin, was: bool, is: bool) {
        if let Some(of) = self.origins.get_mut(origin) {
            let before = of.active.min(ACTIVE_PER_ORIGIN_MAX);
            of.active = of.active + u32::from(is) - u32::from(was);
            self.active = self.active + of.active.min(ACTIVE_PER_ORIGIN_MAX) - before;
        }
    }

    /// Returns the number of other processes that pick, with at most [`ACTIVE_PER_ORIGIN_MAX`] of
    /// each origin.
    pub(super) fn active_others(&self, process_id: u64) -> u32 {
        let own = self
            .processes
            .get(&process_id)
            .filter(|own| own.row.counts());
        let of = own.and_then(|own| self.origins.get(&own.origin));
        // An origin with more processes than its share has the same count without this process.
        let is_counted = of.is_some_and(|of| of.active <= ACTIVE_PER_ORIGIN_MAX);
        self.active - u32::from(is_counted)
    }

    /// Returns the number of processes that divide the pool, including this one. If the pool has
    /// another process, the number is at least 2, because a proxy that knows of no other process
    /// reports nothing.
    pub(super) fn proxies(&self, process_id: u64) -> u32 {
        let own = self.processes.get(&process_id);
        let of = own
            .filter(|own| own.counted_at.is_some())
            .and_then(|own| self.origins.get(&own.origin));
        let is_counted = of.is_some_and(|of| (1..=ACTIVE_PER_ORIGIN_MAX).contains(&of.recent));
        let others = self.recent.saturating_sub(u32::from(is_counted));
        1 + others.max(u32::from(self.processes.len() > 1))
    }

    /// Counts the processes whose load report is used, or was used lately.
    pub(super) fn count_recent(&mut self, now: Instant) {
        self.origins.all_mut().for_each(|of| of.recent = 0);
        let mut recent = 0;
        for process in self.processes.values_mut() {
            let is_recent = |at: &Instant| now.saturating_duration_since(*at) < RECENT;
            process.counted_at = if process.row.counts() {
                Some(now)
            } else {
                process.counted_at.filter(is_recent)
            };
            if process.counted_at.is_some()
                && let Some(of) = self.origins.get_mut(&process.origin)
            {
                of.recent += 1;
                recent += u32::from(of.recent <= ACTIVE_PER_ORIGIN_MAX);
            }
        }
        self.version += u64::from(recent != self.recent);
        self.recent = recent;
    }
}
