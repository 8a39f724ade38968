//! One pool in one VM: the daemon's state as this VM has applied it, beside the VM's own state.
//!
//! A replica changes only in [`PoolReplica::install`] and [`PoolReplica::install_metrics`], as a
//! whole or not at all, and never while a request is being decided (a VM that replaced a lost one
//! does it before its first). Both take the result of [`decode`]: the leader decodes messages from
//! the daemon, every other VM those in the snapshot store.

use std::ops::Deref;

use exchange::{ManagedPool, Timestamp};
use pool_state::{CountHistogram, DURATION_BOUNDS_MS, EncodedObservation};
use prost::Message;
use proto::state::{self, daemon_message};
use scheduler::{Snapshot, Version};

use super::load_sharing::LoadSharing;
use super::observation_ring;
use super::peer_publisher::PeerPublisher;
use super::snapshot_store::{HeadReading, SharedSnapshotStore};
use super::vm_table::{VmEntry, VmTable};
use crate::host::{Host, Result};

/// One pool.
#[derive(Debug)]
pub struct PoolReplica {
    /// Its name with the daemon.
    pub name: Box<str>,
    /// Where the leader publishes the daemon's messages.
    pub store: SharedSnapshotStore,
    /// The state for decisions.
    pub pool: ManagedPool,
    /// Time a pick took, µs.
    pub pick_us: CountHistogram,
    /// Sharing between this VM and the others.
    pub sharing: LoadSharing,
    /// What this VM publishes to other proxies while it leads.
    pub peer_publisher: PeerPublisher,
    /// Where the leader publishes learned models.
    pub model_store: SharedSnapshotStore,
    /// Writes the observations of this VM for the leader.
    observed: observation_ring::ObservationRingWriter,
    /// By VM slot, how far the leader has read the observations of the other VMs.
    observed_by: Vec<observation_ring::ObservationRingReader>,
    learned: Version,
    model_head: Option<HeadReading>,
    version: Version,
    metrics_sequence: u64,
    metrics_at: Option<Timestamp>,
    head: Option<HeadReading>,
}

/// A decoded message of the daemon.
#[derive(Debug)]
pub enum DaemonUpdate {
    /// The daemon's greeting.
    Welcome(state::Welcome),
    /// A whole pool but for its metrics.
    PoolUpdate(Box<proto::PoolUpdate>),
    /// A pool in force with other metrics.
    Metrics {
        /// Its name.
        pool: String,
        /// The snapshot in force, with these metrics.
        snapshot: Box<Snapshot>,
        /// Grows with every message of a term.
        sequence: u64,
    },
    /// The load and placements of the other proxies of a pool.
    Peers(state::PeerLoad),
    /// The learned models of a pool.
    Learned(Box<proto::LearnedModels>),
    /// Nothing to us: of a pool we have no pool update of, or of a newer daemon.
    Nothing,
}

/// A message that was refused whole. The daemon is at fault; the same message will be refused again.
#[derive(Clone, Debug, PartialEq)]
pub struct RejectedMessage {
    /// The pool it is of; empty when not even that could be read.
    pub pool: String,
    /// The version of the pool update it is, if it is one.
    pub version: Option<state::Version>,
    /// What is wrong with it.
    pub why: String,
}

/// The result of reading the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefreshOutcome {
    /// A pool update was taken over.
    pub pool_update: bool,
    /// Metrics were taken over.
    pub metrics: bool,
    /// Whether learned models were applied.
    pub learned: bool,
    /// Whether the store has a message that could not be decoded.
    pub refused: bool,
}

// === impl PoolReplica ===

impl PoolReplica {
    /// A pool without state and without a prefix index: a tick, or the first request, creates the
    /// index.
    #[must_use]
    pub fn new(name: &str, seed: u64) -> Self {
        Self {
            name: name.into(),
            store: SharedSnapshotStore::new(name),
            pool: ManagedPool::new(seed, 0),
            pick_us: CountHistogram::default(),
            sharing: LoadSharing::new(name),
            peer_publisher: PeerPublisher::default(),
            model_store: SharedSnapshotStore::for_models(name),
            observed: observation_ring::ObservationRingWriter::default(),
            observed_by: Vec::new(),
            learned: Version::default(),
            model_head: None,
            version: Version::default(),
            metrics_sequence: 0,
            metrics_at: None,
            head: None,
        }
    }

    /// Is anything known of the pool?
    #[must_use]
    pub fn has_state(&self) -> bool {
        self.pool.snapshot().is_some()
    }

    /// The version in force here.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The newest metrics in force here.
    #[must_use]
    pub fn metrics_sequence(&self) -> u64 {
        self.metrics_sequence
    }

    /// When the metrics in force were received; `None` before any.
    #[must_use]
    pub fn metrics_at(&self) -> Option<Timestamp> {
        self.metrics_at
    }

    /// Notes that a pick took `us` microseconds.
    #[expect(clippy::cast_precision_loss, reason = "a pick is far below 2^52 µs")]
    pub fn record_pick_time(&mut self, us: u64) {
        self.pick_us.record(us as f64, &DURATION_BOUNDS_MS);
    }

    /// Applies what is new in the store. A message that cannot be decoded stays there, and the
    /// current state stays in force.
    ///
    /// # Errors
    /// The error of the host.
    pub fn refresh<H: Host>(&mut self, host: &H) -> Result<RefreshOutcome> {
        let mut refreshed = self.refresh_models(host)?;
        let Some(seen) = self.store.read_head(host)?.filter(|seen| self.head != Some(*seen)) else { return Ok(refreshed) };
        // A side that is being replaced is read again later; one that cannot be decoded is not.
        let mut settled = true;
        if seen.head.version > self.version {
            match self.store.pool_update(host, seen.head)? {
                None => settled = false,
                Some(notice) => match decode(notice.message(), |_| None::<&Self>) {
                    Ok(DaemonUpdate::PoolUpdate(pool_update)) => {
                        self.install(*pool_update);
                        refreshed.pool_update = true;
                    }
                    _ => refreshed.refused = true,
                },
            }
        }
        if seen.head.version == self.version && seen.head.metrics_sequence > self.metrics_sequence {
            match self.store.metrics(host, seen.head)? {
                None => settled = false,
                Some(notice) => match decode(notice.message(), |_| Some(&*self)) {
                    Ok(DaemonUpdate::Metrics { snapshot, sequence, .. }) => {
                        self.install_metrics(*snapshot, sequence, notice.received);
                        refreshed.metrics = true;
                    }
                    _ => refreshed.refused = true,
                },
            }
        }
        self.head = settled.then_some(seen);
        Ok(refreshed)
    }

    fn refresh_models<H: Host>(&mut self, host: &H) -> Result<RefreshOutcome> {
        let mut refreshed = RefreshOutcome::default();
        let Some(seen) = self.model_store.read_head(host)?.filter(|seen| self.model_head != Some(*seen)) else { return Ok(refreshed) };
        let notice = if seen.head.version > self.learned { self.model_store.pool_update(host, seen.head)? } else { None };
        // As with the pool update: a message that is being replaced is read again later, one that
        // cannot be decoded is not.
        self.model_head = (notice.is_some() || seen.head.version <= self.learned).then_some(seen);
        if let Some(notice) = notice {
            match decode(notice.message(), |_| None::<&Self>) {
                Ok(DaemonUpdate::Learned(learned)) => {
                    self.install_models(*learned);
                    refreshed.learned = true;
                }
                _ => refreshed.refused = true,
            }
        }
        Ok(refreshed)
    }

    /// The observations of the process's VMs since the last time: one message for each VM that has
    /// any.
    pub fn read_observations<H: Host>(&mut self, host: &H, vm_table: &VmTable, now: Timestamp) -> Vec<state::Observations> {
        let Self { name, observed_by, .. } = self;
        let read = |(vm_slot, row): (u16, VmEntry)| {
            while observed_by.len() <= usize::from(vm_slot) {
                observed_by.push(observation_ring::ObservationRingReader::default());
            }
            observed_by.get_mut(usize::from(vm_slot))?.read(host, (name, vm_slot, row.vm))
        };
        vm_table.alive(now).filter_map(read).collect()
    }

    /// Writes the observations of this VM for the leader.
    pub fn publish_observations<H: Host>(&mut self, host: &H, vm_slot: u16, vm: u64) {
        let (_, rows) = self.pool.take_observations();
        self.observed.append(host, (&self.name, vm_slot, vm), rows.iter().map(EncodedObservation::to_bytes));
    }

    /// Takes over what was learned.
    pub fn install_models(&mut self, learned: proto::LearnedModels) {
        self.learned = learned.version;
        self.pool.install_models(learned.step, learned.latency);
    }

    /// Takes over a pool update. Endpoints that stay keep their metrics until the next come.
    pub fn install(&mut self, pool_update: proto::PoolUpdate) {
        let proto::PoolUpdate { snapshot, hash_secret, staleness_max_ms, .. } = pool_update;
        self.version = snapshot.version();
        self.metrics_sequence = 0;
        self.pool.install(snapshot, hash_secret, staleness_max_ms);
        self.sharing.pool_update_changed();
    }

    /// Takes over metrics that were received at `at`.
    pub fn install_metrics(&mut self, snapshot: Snapshot, sequence: u64, at: Timestamp) {
        self.metrics_sequence = sequence;
        self.metrics_at = Some(at);
        self.pool.refresh(snapshot, at);
    }
}

/// Decodes a message of the daemon; `find` gives the replica of a pool.
///
/// # Errors
/// [`RejectedMessage`] says why no part of it may be used.
pub fn decode<R: Deref<Target = PoolReplica>>(
    message: &[u8],
    find: impl FnOnce(&str) -> Option<R>,
) -> Result<DaemonUpdate, RejectedMessage> {
    use daemon_message::Message::{LearnedModels, Metrics, PeerLoad, PoolUpdate, Welcome};
    #[cfg(feature = "drill")]
    crate::drill::obey(message);
    let unreadable = |e: prost::DecodeError| RejectedMessage { pool: String::new(), version: None, why: e.to_string() };
    match state::DaemonMessage::decode(message).map_err(unreadable)?.message {
        Some(Welcome(welcome)) => Ok(DaemonUpdate::Welcome(welcome)),
        Some(PeerLoad(peers)) => Ok(DaemonUpdate::Peers(peers)),
        Some(LearnedModels(learned)) => {
            let pool = learned.pool.clone();
            let refused = |why: proto::InvalidState| RejectedMessage { pool, version: None, why: why.to_string() };
            proto::learned(learned).map(|learned| DaemonUpdate::Learned(Box::new(learned))).map_err(refused)
        }
        Some(PoolUpdate(pool_update)) => {
            let (pool, version) = (pool_update.pool.clone(), pool_update.version);
            let refused = |why: proto::InvalidState| RejectedMessage { pool, version, why: why.to_string() };
            proto::pool_update(pool_update).map(|pool_update| DaemonUpdate::PoolUpdate(Box::new(pool_update))).map_err(refused)
        }
        Some(Metrics(metrics)) => {
            let Some(replica) = find(&metrics.pool) else { return Ok(DaemonUpdate::Nothing) };
            let Some(snapshot) = replica.pool.snapshot() else { return Ok(DaemonUpdate::Nothing) };
            match proto::metrics(&metrics, snapshot) {
                Ok(snapshot) => Ok(DaemonUpdate::Metrics { pool: metrics.pool, snapshot: Box::new(snapshot), sequence: metrics.sequence }),
                // For a pool update that was refused, or has not arrived.
                Err(proto::InvalidState::OtherPoolUpdate) => Ok(DaemonUpdate::Nothing),
                Err(why) => Err(RejectedMessage { pool: metrics.pool, version: None, why: why.to_string() }),
            }
        }
        None => Ok(DaemonUpdate::Nothing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeHost, metrics_message, pool_update_message};

    fn queues(replica: &PoolReplica) -> Vec<Option<f32>> {
        replica.pool.snapshot().unwrap().metrics().iter().map(|m| m.queue_depth).collect()
    }

    #[test]
    fn a_replica_follows_the_store_whole() {
        let host = FakeHost::new();
        let mut replica = PoolReplica::new("default", 1);
        assert_eq!(replica.refresh(&host).unwrap(), RefreshOutcome::default());
        assert!(!replica.has_state());

        let v1 = Version { term: 3, sequence: 1 };
        replica
            .store
            .publish_pool_update(&host, 1, v1, &pool_update_message("default", v1, &["10.0.0.1:1", "10.0.0.2:1"]), host.now())
            .unwrap();
        replica.store.publish_metrics(&host, 1, (v1, 2), &metrics_message("default", v1, 2, &[1.0, 2.0]), host.now()).unwrap();
        assert_eq!(replica.refresh(&host).unwrap(), RefreshOutcome { pool_update: true, metrics: true, ..RefreshOutcome::default() });
        assert_eq!((replica.version(), queues(&replica)), (v1, vec![Some(1.0), Some(2.0)]));
        assert_eq!(replica.refresh(&host).unwrap(), RefreshOutcome::default(), "nothing new");

        let v2 = Version { term: 3, sequence: 3 };
        replica
            .store
            .publish_pool_update(&host, 1, v2, &pool_update_message("default", v2, &["10.0.0.9:1", "10.0.0.2:1"]), host.now())
            .unwrap();
        assert_eq!(replica.refresh(&host).unwrap(), RefreshOutcome { pool_update: true, ..RefreshOutcome::default() });
        assert_eq!(queues(&replica), [None, Some(2.0)], "an endpoint that stays keeps its metrics, a new one has none");
    }

    #[test]
    fn what_cannot_be_read_leaves_all_as_it_was_and_is_read_once() {
        let host = FakeHost::new();
        let mut replica = PoolReplica::new("default", 1);
        let v1 = Version { term: 3, sequence: 1 };
        replica.store.publish_pool_update(&host, 1, v1, &pool_update_message("default", v1, &["10.0.0.1:1"]), host.now()).unwrap();
        replica.refresh(&host).unwrap();
        replica.store.publish_pool_update(&host, 1, Version { term: 3, sequence: 2 }, b"\xff\xff", host.now()).unwrap();
        assert!(replica.refresh(&host).unwrap().refused);
        assert_eq!(replica.version(), v1);
        assert_eq!(replica.refresh(&host).unwrap(), RefreshOutcome::default());
    }

    #[test]
    fn refusals_name_the_pool_update_and_what_is_wrong() {
        let v = Version { term: 1, sequence: 2 };
        let refused = decode(&pool_update_message("p", v, &["localhost:1"]), |_| None::<&PoolReplica>).unwrap_err();
        assert_eq!((refused.pool.as_str(), refused.version.map(|v| v.sequence)), ("p", Some(2)));
        assert!(refused.why.contains("localhost:1"), "{}", refused.why);
        assert_eq!(decode(b"\xff", |_| None::<&PoolReplica>).unwrap_err().pool, "");
        assert!(matches!(decode(b"", |_| None::<&PoolReplica>), Ok(DaemonUpdate::Nothing)), "a message of a newer daemon");
    }
}
