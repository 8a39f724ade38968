//! This process as one of the proxies of a pool: what it tells the other proxies, and what it knows
//! of them.

use exchange::{ManagedPool, Timestamp};
use front::daemon_rules::ReportDelay;
use pool_state::LocalPeer;
use proto::shared_data::RemotePeers;
use proto::{SHARE_EXPIRY_MS, backlog, state};
use scheduler::flow::QueuedInBand;

#[derive(Default)]
pub(super) struct ProcessPeers {
    local: LocalPeer,
    delay: ReportDelay,
    /// The counts of the other proxies in the last message.
    remote: RemotePeers,
    /// The requests that the other proxies hold.
    bands: Vec<QueuedInBand>,
    /// When the last message arrived.
    heard_at: Option<Timestamp>,
    /// When the load was last looked at, and the pool's number of changes at the last report.
    read_at: Timestamp,
    reported: u64,
}

fn is_long_since(at: Option<Timestamp>, now: Timestamp) -> bool {
    at.is_none_or(|at| now.ms_since(at) >= SHARE_EXPIRY_MS)
}

// === impl ProcessPeers ===

impl ProcessPeers {
    /// Makes the process one of the proxies that share the pool.
    pub(super) fn join(&mut self) {
        self.local.join();
    }

    pub(super) fn has_peers(&self) -> bool {
        self.local.has_peers()
    }

    /// Counts the load of the other proxies again, after a pool update.
    pub(super) fn recount(&self, pool: &mut ManagedPool) {
        self.local.recount(pool);
    }

    /// Receives a message about the other proxies. Returns the delay of this proxy's reports in µs,
    /// if the message shows the delay.
    pub(super) fn receive(
        &mut self,
        pool: &mut ManagedPool,
        message: state::PeerLoad,
        now: Timestamp,
    ) -> Option<u32> {
        let delay_us = self.delay.receive(message.stamp, now);
        self.remote = RemotePeers::of_message(&message, self.delay.mean_us());
        self.bands = backlog::read(&message.backlog);
        self.heard_at = Some(now);
        self.local.receive(pool, message, now);
        self.apply_outside(pool, now);
        delay_us
    }

    /// Does the work of a tick. `metrics_at` is the time of the daemon's last metrics.
    pub(super) fn tick(
        &mut self,
        pool: &mut ManagedPool,
        metrics_at: Option<Timestamp>,
        is_complete: bool,
        now: Timestamp,
    ) {
        self.local.expire(pool, now);
        let is_silent = is_long_since(self.heard_at, now);
        if is_silent {
            self.bands.clear();
        }
        self.apply_outside(pool, now);
        let is_alone = is_silent && self.remote.proxies > 1 && is_long_since(metrics_at, now);
        let proxies = if is_alone { self.remote.proxies } else { 0 };
        pool.queues_mut().set_alone(proxies);
        pool.set_peers_unreachable(is_alone);
        if is_complete && !is_silent {
            pool.record_part();
        }
        pool.queues_mut().retry_left_room();
    }

    /// Returns the report that is due now, if any.
    pub(super) fn next_report(
        &mut self,
        name: &str,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> Option<state::LoadReport> {
        let read_at = std::mem::replace(&mut self.read_at, now);
        let changes = pool.changes();
        let mut report = self.local.next_report(name, pool, now)?;
        // The oldest change may have happened directly after the last look. A repeated report has
        // no change, so it has no stamp.
        if std::mem::replace(&mut self.reported, changes) != changes {
            report.stamp = read_at.0;
        }
        Some(report)
    }

    fn apply_outside(&self, pool: &mut ManagedPool, now: Timestamp) {
        let running = pool.in_flight().outside_requests();
        let delay_us = u64::from(self.remote.delay_us);
        pool.queues_mut()
            .set_outside(&self.bands, running, delay_us);
        let is_silent = is_long_since(self.heard_at, now);
        let active = if is_silent { 0 } else { self.remote.active };
        pool.estimate_peer_picks(active, delay_us, now);
    }
}
