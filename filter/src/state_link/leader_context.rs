//! The parts of the VM that a leader uses during one callback, and the leader's handling of
//! updates.

use exchange::Timestamp;
use pool_state::{Applied, DaemonUpdate, RejectedMessage, wire_version};
use proto::state;

use crate::host::Host;
use crate::metrics::{FilterMetrics, Stat};
use crate::shared_data::load_sharing::{SharingOccasion, VmContext};
use crate::shared_data::snapshot_store::PublishError;
use crate::shared_data::vm_table::VmTable;
use crate::vm::replica::PoolReplica;
use front::config::FilterConfig;

/// The parts of the VM that a leader uses during one callback.
#[derive(Debug)]
pub struct LeaderContext<'a, H> {
    pub host: &'a H,
    pub vm: u64,
    pub root: u32,
    pub epoch: u64,
    pub now: Timestamp,
    pub config: &'a FilterConfig,
    /// The replicas of the pools, borrowed for this callback. Functions that get this context use
    /// these references, and borrow no cell.
    pub replicas: Vec<&'a mut PoolReplica>,
    /// The identity of this VM, if the VMs share state.
    pub me: Option<VmContext<'a>>,
    pub vm_table: &'a VmTable,
    pub metrics: &'a FilterMetrics<H>,
}

// === impl LeaderContext ===

impl<'a, H: Host> LeaderContext<'a, H> {
    pub(super) fn replica(&self, pool: &str) -> Option<&PoolReplica> {
        self.replicas
            .iter()
            .map(|replica| &**replica)
            .find(|replica| *replica.name == *pool)
    }

    /// Publishes an update to the other VMs, and applies it. Returns the acknowledgement of the
    /// update, or the refusal of a pool update that could not be published. Fails if a later leader
    /// has written.
    pub(super) fn apply(
        &mut self,
        update: DaemonUpdate,
        bytes: &[u8],
    ) -> Result<Option<state::Ack>, PublishError> {
        let Some(replica) = self
            .replicas
            .iter_mut()
            .find(|replica| update.pool() == Some(&replica.name))
        else {
            return Ok(None);
        };
        let ack = update.ack();
        match replica.publish(self.host, self.epoch, &update, bytes, self.now) {
            Ok(()) => {
                let stat = match replica.apply(update, self.now) {
                    Applied::PoolUpdate => {
                        let version = replica.version();
                        let endpoints = replica.pool.snapshot().map_or(0, |s| s.endpoints().len());
                        log::info!(
                            "pool {}: {endpoints} endpoints, version {}.{}",
                            replica.name,
                            version.term,
                            version.sequence
                        );
                        Stat::PoolUpdatesApplied
                    }
                    Applied::Metrics => Stat::MetricsApplied,
                    Applied::Models => Stat::LearnedApplied,
                    Applied::Nothing => return Ok(None),
                };
                self.metrics.count(stat);
                self.wake_vms();
            }
            Err(PublishError::Superseded) => return Err(PublishError::Superseded),
            Err(why) => {
                if let Some(refusal) = self.not_published(&update, why) {
                    return Ok(Some(refusal));
                }
            }
        }
        if ack.is_some() {
            let total = self
                .replicas
                .iter()
                .filter_map(|r| r.pool.snapshot().map(|s| s.endpoints().len() as u64))
                .sum();
            self.metrics.record(Stat::Endpoints, total);
        }
        Ok(ack)
    }

    /// Handles an update that could not be published. Returns a refusal if the update is a pool
    /// update that this VM does not use.
    fn not_published(&mut self, update: &DaemonUpdate, why: PublishError) -> Option<state::Ack> {
        let replica = self
            .replicas
            .iter_mut()
            .find(|replica| update.pool() == Some(&replica.name))?;
        if why == PublishError::NotNewer && !matches!(update, DaemonUpdate::Metrics { .. }) {
            // The update was sent again, or is older than an update that a former leader received.
            // The store has the right content.
            let _ = replica.refresh(self.host);
        }
        let DaemonUpdate::PoolUpdate(pool_update) = update else {
            // The daemon gets no refusal, because it will send newer metrics or models soon.
            return None;
        };
        let refusal = if let PublishError::Host(error) = why {
            (format!("the proxy could not store it: {error}"), None)
        } else if replica.version() == pool_update.snapshot.version() {
            return None;
        } else {
            // The version in the store's head is in force, even if this VM cannot read the message
            // of this version.
            let held = replica
                .stored_version(self.host)
                .unwrap_or_default()
                .max(replica.version());
            (
                format!(
                    "older than {}.{}, which is in force",
                    held.term, held.sequence
                ),
                Some(wire_version(held)),
            )
        };
        let (why, held) = refusal;
        let ack = self.nack(update.refuse(&why)?)?;
        Some(state::Ack { held, ..ack })
    }

    pub(super) fn apply_peers(&mut self, peers: state::PeerLoad) {
        let Some(replica) = self.replicas.iter_mut().find(|r| *r.name == *peers.pool) else {
            return;
        };
        let PoolReplica {
            peer_publisher,
            sharing,
            pool,
            ..
        } = &mut **replica;
        if let Some(delay_us) = peer_publisher.receive_peers(&peers, self.now) {
            self.metrics.record(Stat::ShareDelayUs, u64::from(delay_us));
        }
        if let Some(me) = self.me {
            sharing.forward_peers(self.host, me, peers, peer_publisher.delay_us(), self.now);
            sharing.publish(self.host, me, pool, self.now, SharingOccasion::Tick);
        }
    }

    pub(super) fn nack(&self, rejected: RejectedMessage) -> Option<state::Ack> {
        self.metrics.count(Stat::Refused);
        let level = if rejected.needs_operator() {
            log::Level::Error
        } else {
            log::Level::Debug
        };
        let RejectedMessage { pool, why, .. } = &rejected;
        log::log!(
            level,
            "pool {pool}: the daemon's message is refused as a whole, the current state stays in force: {why}"
        );
        rejected.ack()
    }

    /// Wakes every other VM to read the store. If a wake-up is lost, the other VM reads the store
    /// at its next tick.
    fn wake_vms(&self) {
        for (_, row) in self.vm_table.alive(self.now) {
            if row.vm != self.vm && row.queue != 0 {
                let _ = self.host.queue_push(row.queue, b"store");
            }
        }
    }
}
