//! The state of one pool in one VM: the daemon's messages that the VM has applied, and what the VM
//! itself knows.
//!
//! A replica changes only in [`PoolReplica::apply`], as a whole or not at all, and never while a
//! request is being decided. [`PoolReplica::apply`] takes a result of [`decode`]. The leader
//! decodes messages from the daemon, and every other VM decodes the messages in the snapshot store.

use std::cell::RefCell;
use std::ops::Deref;
use std::rc::{Rc, Weak};

use exchange::{ManagedPool, Timestamp};
use pool_state::{
    Applied, AppliedVersions, CountHistogram, DURATION_BOUNDS_MS, DaemonUpdate, EncodedObservation,
    RejectedMessage,
};
use proto::shared_data::VmEntry;
use proto::state::{self, daemon_message};
use scheduler::Version;

use super::parked_request::ParkedRequest;
use crate::host::{Host, Result};
use crate::shared_data::RingOwner;
use crate::shared_data::flow_order::FlowOrder;
use crate::shared_data::load_sharing::LoadSharing;
use crate::shared_data::observation_ring::{ObservationRingReader, ObservationRingWriter};
use crate::shared_data::snapshot_store::{
    HeadReading, PublishError, SharedSnapshotStore, StoredMessage,
};
use crate::shared_data::vm_table::VmTable;
use crate::state_link::peer_publisher::PeerPublisher;

/// A replica. The VM and the streams of the pool share it, and borrow it in turn.
pub type SharedReplica = Rc<RefCell<PoolReplica>>;

#[derive(Debug)]
pub struct PoolReplica {
    /// The daemon's name of the pool.
    pub name: Box<str>,
    /// The state from which endpoints are picked.
    pub pool: ManagedPool,
    pub pick_us: CountHistogram,
    /// The state of load sharing with the other VMs.
    pub sharing: LoadSharing,
    /// The order of the requests that all VMs hold.
    pub flow_order: FlowOrder,
    /// The state of publishing load to other proxies, which this VM uses while it leads.
    pub peer_publisher: PeerPublisher,
    /// The versions of the daemon's messages that are in force in this VM.
    applied: AppliedVersions,
    /// The store in which the leader publishes pool updates and metrics.
    snapshots: FollowedStore,
    /// The store in which the leader publishes learned models.
    models: FollowedStore,
    observations: ObservationRings,
    held: QueuedStreams,
}

/// The streams of requests that the pool holds or may abort, by the request's number.
#[derive(Debug, Default)]
struct QueuedStreams {
    streams: Vec<(u64, Weak<dyn ParkedRequest>)>,
    /// The number of streams that were left when ended streams were last removed.
    alive: usize,
}

/// The number of streams in the list that triggers the removal of ended streams, before twice the
/// length after the last removal is added.
const ENDED_STREAMS_MAX: usize = 64;

/// A snapshot store, and what this VM has read last from the store.
#[derive(Debug)]
struct FollowedStore {
    store: SharedSnapshotStore,
    /// The last head whose messages this VM has applied or refused.
    head: Option<HeadReading>,
}

/// The observation rings: the ring of this VM and, while this VM leads, readers of the rings of the
/// other VMs.
#[derive(Debug, Default)]
struct ObservationRings {
    own: ObservationRingWriter,
    /// The readers of the other VMs' rings, by VM slot.
    readers: Vec<ObservationRingReader>,
}

// === impl FollowedStore ===

impl FollowedStore {
    fn new(store: SharedSnapshotStore) -> Self {
        Self { store, head: None }
    }

    /// Returns the head of the store, if the head has changed since this VM last read its messages.
    fn changed_head<H: Host>(&self, host: &H) -> Result<Option<HeadReading>> {
        Ok(self
            .store
            .read_head(host)?
            .filter(|seen| self.head != Some(*seen)))
    }
}

// === impl QueuedStreams ===

impl QueuedStreams {
    fn push(&mut self, number: u64, stream: Weak<dyn ParkedRequest>) {
        if self.streams.len()
            >= self
                .alive
                .saturating_mul(2)
                .saturating_add(ENDED_STREAMS_MAX)
        {
            self.streams.retain(|(_, stream)| stream.strong_count() > 0);
            self.alive = self.streams.len();
        }
        self.streams.push((number, stream));
    }

    fn get(&self, number: u64) -> Option<Rc<dyn ParkedRequest>> {
        let at = self
            .streams
            .binary_search_by_key(&number, |(held, _)| *held)
            .ok()?;
        self.streams.get(at)?.1.upgrade()
    }
}

// === impl PoolReplica ===

impl AsRef<ManagedPool> for PoolReplica {
    fn as_ref(&self) -> &ManagedPool {
        &self.pool
    }
}

impl PoolReplica {
    /// Records the stream of a request that the pool holds or may abort. New requests have higher
    /// numbers, and a request keeps its number.
    pub fn hold(&mut self, number: u64, stream: Weak<dyn ParkedRequest>) {
        if self.held.get(number).is_none() {
            self.held.push(number, stream);
        }
    }

    pub fn queued_stream(&self, number: u64) -> Option<Rc<dyn ParkedRequest>> {
        self.held.get(number)
    }

    /// Returns the held request to resume next.
    pub fn next_queued(&mut self, now: Timestamp) -> Option<Rc<dyn ParkedRequest>> {
        while let Some(number) = self.pool.next_due(now) {
            if let Some(stream) = self.queued_stream(number) {
                return Some(stream);
            }
        }
        None
    }

    /// Creates a replica without state and without a prefix index. A tick or the first request
    /// creates the index.
    #[must_use]
    pub fn new(name: &str, seed: u64) -> Self {
        Self {
            name: name.into(),
            pool: ManagedPool::new(seed, 0),
            pick_us: CountHistogram::default(),
            sharing: LoadSharing::new(name),
            flow_order: FlowOrder::new(name),
            peer_publisher: PeerPublisher::default(),
            applied: AppliedVersions::default(),
            snapshots: FollowedStore::new(SharedSnapshotStore::new(name)),
            models: FollowedStore::new(SharedSnapshotStore::for_models(name)),
            observations: ObservationRings::default(),
            held: QueuedStreams::default(),
        }
    }

    #[must_use]
    pub fn has_state(&self) -> bool {
        self.pool.snapshot().is_some()
    }

    /// Returns the versions of the daemon's messages that are in force in this VM.
    #[must_use]
    pub fn applied(&self) -> &AppliedVersions {
        &self.applied
    }

    /// Returns the version of the pool update that is in force in this VM.
    #[must_use]
    pub fn version(&self) -> Version {
        self.applied.pool_update()
    }

    /// Returns the time when the present metrics were received; `None` if the metrics are unknown.
    #[must_use]
    pub fn metrics_at(&self) -> Option<Timestamp> {
        self.applied.metrics_at()
    }

    /// Returns the version of the pool update in the store; `None` if the store has no pool update.
    #[must_use]
    pub fn stored_version<H: Host>(&self, host: &H) -> Option<Version> {
        self.snapshots
            .store
            .read_head(host)
            .ok()
            .flatten()
            .map(|seen| seen.head.version)
    }

    /// Returns the learned models in the store, in the form in which the leader received them.
    #[must_use]
    pub fn stored_models<H: Host>(&self, host: &H) -> Option<state::LearnedModels> {
        let head = self.models.store.read_head(host).ok()??.head;
        let stored = self.models.store.pool_update(host, head).ok()??;
        match proto::daemon_message(stored.message()).ok()?.message? {
            daemon_message::Message::LearnedModels(models) => Some(models),
            _ => None,
        }
    }

    /// Records that a pick took `us` microseconds.
    #[expect(clippy::cast_precision_loss, reason = "a pick is far below 2^52 µs")]
    pub fn record_pick_time(&mut self, us: u64) {
        self.pick_us.record(us as f64, &DURATION_BOUNDS_MS);
    }

    /// Publishes an update to the other VMs, in the form in which the leader received the update.
    ///
    /// # Errors
    /// Returns [`PublishError`] if the update was not published.
    pub fn publish<H: Host>(
        &self,
        host: &H,
        epoch: u64,
        update: &DaemonUpdate,
        message: &[u8],
        now: Timestamp,
    ) -> Result<(), PublishError> {
        match update {
            DaemonUpdate::PoolUpdate(pool_update) => self.snapshots.store.publish_pool_update(
                host,
                epoch,
                pool_update.snapshot.version(),
                message,
                now,
            ),
            DaemonUpdate::Metrics {
                snapshot, sequence, ..
            } => self.snapshots.store.publish_metrics(
                host,
                epoch,
                (snapshot.version(), *sequence),
                message,
                now,
            ),
            DaemonUpdate::Learned(learned) => {
                self.models
                    .store
                    .publish_pool_update(host, epoch, learned.version, message, now)
            }
            DaemonUpdate::Welcome(_)
            | DaemonUpdate::Peers(_)
            | DaemonUpdate::Outweighed(_)
            | DaemonUpdate::Nothing => Ok(()),
        }
    }

    /// Applies an update that the leader received at `received`.
    pub fn apply(&mut self, update: DaemonUpdate, received: Timestamp) -> Applied {
        let applied = self.applied.apply(&mut self.pool, update, received);
        if applied == Applied::PoolUpdate {
            self.sharing.pool_update_changed();
        }
        applied
    }

    /// Applies the new messages of the stores, and returns the results in the order in which the
    /// messages were applied. A message that cannot be decoded counts as [`Applied::Nothing`]: the
    /// message stays in the store, and the current state stays in use.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn refresh<H: Host>(&mut self, host: &H) -> Result<Vec<Applied>> {
        let mut applied = Vec::from_iter(self.refresh_models(host)?);
        let Some(seen) = self.snapshots.changed_head(host)? else {
            return Ok(applied);
        };
        // A side that a leader is replacing is read again later. A side that cannot be decoded is
        // not read again.
        let mut settled = true;
        if seen.head.version > self.version() {
            match self.snapshots.store.pool_update(host, seen.head)? {
                None => settled = false,
                Some(stored) => applied.extend(self.apply_stored(&stored)),
            }
        }
        if seen.head.version == self.version()
            && seen.head.metrics_sequence > self.applied.metrics_sequence()
        {
            match self.snapshots.store.metrics(host, seen.head)? {
                None => settled = false,
                Some(stored) => applied.extend(self.apply_stored(&stored)),
            }
        }
        self.snapshots.head = settled.then_some(seen);
        Ok(applied)
    }

    fn refresh_models<H: Host>(&mut self, host: &H) -> Result<Option<Applied>> {
        let Some(seen) = self.models.changed_head(host)? else {
            return Ok(None);
        };
        let is_newer = seen.head.version > self.applied.models();
        let stored = if is_newer {
            self.models.store.pool_update(host, seen.head)?
        } else {
            None
        };
        self.models.head = (stored.is_some() || !is_newer).then_some(seen);
        Ok(stored.and_then(|stored| self.apply_stored(&stored)))
    }

    fn apply_stored(&mut self, stored: &StoredMessage) -> Option<Applied> {
        match decode(stored.message(), |_| Some(&*self)) {
            // A leader stored these models before it had better models.
            Ok(DaemonUpdate::Outweighed(_)) => None,
            Ok(update) => Some(self.apply(update, stored.received)),
            Err(_) => Some(Applied::Nothing),
        }
    }

    /// Reads the observations that the VMs of this process wrote since the last reading. Returns
    /// one message for each VM that wrote observations.
    pub fn read_observations<H: Host>(
        &mut self,
        host: &H,
        vm_table: &VmTable,
        now: Timestamp,
    ) -> Vec<state::Observations> {
        let Self {
            name,
            observations: ObservationRings { readers, .. },
            ..
        } = self;
        let read = |(vm_slot, row): (u16, VmEntry)| {
            while readers.len() <= usize::from(vm_slot) {
                readers.push(ObservationRingReader::default());
            }
            readers.get_mut(usize::from(vm_slot))?.read(
                host,
                RingOwner {
                    pool: name,
                    vm_slot,
                    vm: row.vm,
                },
            )
        };
        vm_table.alive(now).filter_map(read).collect()
    }

    /// Writes the observations of this VM into its ring, which the leader reads.
    pub fn publish_observations<H: Host>(&mut self, host: &H, vm_slot: u16, vm: u64) {
        let (_, rows) = self.pool.take_observations();
        self.observations.own.append(
            host,
            RingOwner {
                pool: &self.name,
                vm_slot,
                vm,
            },
            rows.iter().map(EncodedObservation::to_bytes),
        );
    }
}

/// Decodes a message from the daemon; `find` returns the replica of a pool.
///
/// # Errors
/// Returns [`RejectedMessage`] if no part of the message may be used.
pub fn decode<R: Deref<Target = PoolReplica>>(
    message: &[u8],
    find: impl FnOnce(&str) -> Option<R>,
) -> Result<DaemonUpdate, RejectedMessage> {
    #[cfg(feature = "drill")]
    crate::drill::obey(message);
    DaemonUpdate::decode_bytes(message, find)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeHost, metrics_message, pool_update_message};

    fn queues(replica: &PoolReplica) -> Vec<Option<f32>> {
        replica
            .pool
            .snapshot()
            .unwrap()
            .metrics()
            .iter()
            .map(|m| m.queue_depth)
            .collect()
    }

    #[test]
    fn a_replica_follows_the_store_whole() {
        let host = FakeHost::new();
        let mut replica = PoolReplica::new("default", 1);
        assert_eq!(replica.refresh(&host).unwrap(), []);
        assert!(!replica.has_state());

        let v1 = Version {
            term: 3,
            sequence: 1,
        };
        replica
            .snapshots
            .store
            .publish_pool_update(
                &host,
                1,
                v1,
                &pool_update_message("default", v1, &["10.0.0.1:1", "10.0.0.2:1"]),
                host.now(),
            )
            .unwrap();
        replica
            .snapshots
            .store
            .publish_metrics(
                &host,
                1,
                (v1, 2),
                &metrics_message("default", v1, 2, &[1.0, 2.0]),
                host.now(),
            )
            .unwrap();
        assert_eq!(
            replica.refresh(&host).unwrap(),
            [Applied::PoolUpdate, Applied::Metrics]
        );
        assert_eq!(
            (replica.version(), queues(&replica)),
            (v1, vec![Some(1.0), Some(2.0)])
        );
        assert_eq!(replica.refresh(&host).unwrap(), [], "nothing new");

        let v2 = Version {
            term: 3,
            sequence: 3,
        };
        replica
            .snapshots
            .store
            .publish_pool_update(
                &host,
                1,
                v2,
                &pool_update_message("default", v2, &["10.0.0.9:1", "10.0.0.2:1"]),
                host.now(),
            )
            .unwrap();
        assert_eq!(replica.refresh(&host).unwrap(), [Applied::PoolUpdate]);
        assert_eq!(
            queues(&replica),
            [None, Some(2.0)],
            "an endpoint that stays keeps its metrics, a new one has none"
        );
    }

    #[test]
    fn an_unreadable_message_changes_nothing_and_is_read_once() {
        let host = FakeHost::new();
        let mut replica = PoolReplica::new("default", 1);
        let v1 = Version {
            term: 3,
            sequence: 1,
        };
        replica
            .snapshots
            .store
            .publish_pool_update(
                &host,
                1,
                v1,
                &pool_update_message("default", v1, &["10.0.0.1:1"]),
                host.now(),
            )
            .unwrap();
        replica.refresh(&host).unwrap();
        replica
            .snapshots
            .store
            .publish_pool_update(
                &host,
                1,
                Version {
                    term: 3,
                    sequence: 2,
                },
                b"\xff\xff",
                host.now(),
            )
            .unwrap();
        assert_eq!(replica.refresh(&host).unwrap(), [Applied::Nothing]);
        assert_eq!(replica.version(), v1);
        assert_eq!(replica.refresh(&host).unwrap(), []);
    }
}
