//! Keeps the published instances within their maximum number.

use std::sync::Arc;

use super::InstanceTable;
use crate::event::ClockReading;
use crate::instance::INSTANCES_MAX;

// === impl InstanceTable ===

impl InstanceTable {
    /// Publishes waiting instances while there is room, the oldest first.
    pub(super) fn fill(&mut self, now: ClockReading) {
        while self.published_count < INSTANCES_MAX
            && let Some(id) = self.longest_waiting()
        {
            self.waiting.remove(&id);
            self.settle(&id, now);
        }
    }

    fn longest_waiting(&self) -> Option<Arc<str>> {
        let freshness = |id: &&Arc<str>| self.rows.get(*id).map(|row| row.record.freshness);
        self.waiting.iter().min_by_key(freshness).cloned()
    }
}
