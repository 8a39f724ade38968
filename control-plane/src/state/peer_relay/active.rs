//! Counts the processes of a pool: those that pick, and those that divide the pool's capacity.

use std::time::Duration;

use tokio::time::Instant;

use super::PoolRelay;

/// The time for which a process counts among those that divide the pool, after its load report was
/// last used. An open stream is not enough: without the daemon each proxy fills only its part of
/// the pool, so the part of a proxy without traffic would be lost.
const RECENT: Duration = Duration::from_secs(60);

// === impl PoolRelay ===

impl PoolRelay {
    /// Returns the number of other processes that pick, with the limits of each origin and owner.
    pub(super) fn active_others(&self, process_id: u64) -> u32 {
        let own = self
            .processes
            .get(&process_id)
            .filter(|own| own.row.counts());
        let is_counted = own.is_some_and(|own| self.origins.counts_active(&own.origin));
        self.origins.active() - u32::from(is_counted)
    }

    /// Returns the number of processes that divide the pool, including this one. If the pool has
    /// another process, the number is at least 2, because a proxy that knows of no other process
    /// reports nothing.
    pub(super) fn proxies(&self, process_id: u64) -> u32 {
        let own = self.processes.get(&process_id);
        let own = own.filter(|own| own.counted_at.is_some());
        let is_counted = own.is_some_and(|own| self.origins.counts_recent(&own.origin));
        let others = self.recent.saturating_sub(u32::from(is_counted));
        1 + others.max(u32::from(self.processes.len() > 1))
    }

    /// Counts the processes whose load report is used, or was used within [`RECENT`].
    pub(super) fn count_recent(&mut self, now: Instant) {
        self.origins.reset_recent();
        let mut recent = 0;
        for process in self.processes.values_mut() {
            let is_recent = |at: &Instant| now.saturating_duration_since(*at) < RECENT;
            process.counted_at = if process.row.counts() {
                Some(now)
            } else {
                process.counted_at.filter(is_recent)
            };
            if process.counted_at.is_some() {
                recent += u32::from(self.origins.add_recent(&process.origin));
            }
        }
        self.version += u64::from(recent != self.recent);
        self.recent = recent;
    }
}
