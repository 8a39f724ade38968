//! The snapshot store of one pool: shared data from which all VMs read the daemon's messages, in
//! the form in which the leader received them.
//!
//! A small value, the head, has the current version, and names one of two buffers (sides). The
//! named side has the current message. A writer fills the other side and then switches the head. So
//! a reader finds a complete message or, if a leader writes at the same time, a message that the
//! head does not name. In the second case, the reader reads again at the next wake-up. All writes
//! are compare-and-swap, and fail if a later leader's epoch or a newer version was written. So a
//! stalled leader can neither undo newer writes nor damage the current side.

use exchange::Timestamp;
use proto::shared_data::{MessageStamp, SnapshotHead};
use scheduler::Version;

use crate::host::{Host, HostError, Result, SharedValue, WriteCondition};

/// The maximum number of attempts at a compare-and-swap. Few are enough, because only two leaders
/// at the same time can conflict, and one of them soon stops leading.
const TRIES_MAX: usize = 4;

/// The keys of one pool's values in shared data.
#[derive(Clone, Debug)]
pub struct SharedSnapshotStore {
    head: String,
    pool_update: [String; 2],
    metrics: [String; 2],
}

/// The head, and a token that later shows whether the head changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadReading {
    pub head: SnapshotHead,
    pub token: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredMessage {
    /// The time when the leader received the message.
    pub received: Timestamp,
    bytes: Vec<u8>,
}

/// The reason why a message was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishError {
    /// A later leader has written, so this VM no longer leads.
    Superseded,
    /// The stored message is as new as this message, or newer.
    NotNewer,
    /// The metrics do not belong to the stored pool update.
    OtherPoolUpdate,
    /// The host refused the call, or other writers were faster at each attempt.
    Host(HostError),
}

// === impl SharedSnapshotStore ===

impl SharedSnapshotStore {
    /// Creates the store of `pool`, a name from the filter's configuration, so that the set of keys
    /// in shared data is fixed.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        Self::with_prefix(&format!("switchpoint/1/pool/{pool}"))
    }

    fn with_prefix(at: &str) -> Self {
        let key = |name: &str| format!("{at}/{name}");
        Self {
            head: key("head"),
            pool_update: [key("pool_update/a"), key("pool_update/b")],
            metrics: [key("metrics/a"), key("metrics/b")],
        }
    }

    /// Creates the store of the learned models of `pool`. The models have a version of their own,
    /// and are stored in the place of pool updates.
    #[must_use]
    pub fn for_models(pool: &str) -> Self {
        Self::with_prefix(&format!("switchpoint/1/learned/{pool}"))
    }

    /// Returns the current head; `None` if no head was ever written.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn read_head<H: Host>(&self, host: &H) -> Result<Option<HeadReading>> {
        Ok(host.shared(&self.head)?.and_then(|shared| {
            SnapshotHead::from_bytes(&shared.bytes).map(|head| HeadReading {
                head,
                token: shared.token,
            })
        }))
    }

    /// Returns the pool update that `head` names; `None` while a leader is replacing the pool
    /// update.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn pool_update<H: Host>(
        &self,
        host: &H,
        head: SnapshotHead,
    ) -> Result<Option<StoredMessage>> {
        read_message(
            host,
            side(&self.pool_update, head.pool_update_side()),
            |s| s.version == head.version && s.metrics_sequence == 0,
        )
    }

    /// Returns the metrics that `head` names; `None` if `head` names no metrics, or while a leader
    /// is replacing the metrics.
    ///
    /// # Errors
    /// Returns the error of the host.
    pub fn metrics<H: Host>(&self, host: &H, head: SnapshotHead) -> Result<Option<StoredMessage>> {
        if head.metrics_sequence == 0 {
            return Ok(None);
        }
        let named = |s: MessageStamp| {
            s.version == head.version && s.metrics_sequence == head.metrics_sequence
        };
        read_message(host, side(&self.metrics, head.metrics_side()), named)
    }

    /// Publishes a pool update.
    ///
    /// # Errors
    /// Returns [`PublishError`] if the pool update was not published. In this case the current pool
    /// update stays.
    pub fn publish_pool_update<H: Host>(
        &self,
        host: &H,
        epoch: u64,
        version: Version,
        message: &[u8],
        now: Timestamp,
    ) -> Result<(), PublishError> {
        self.publish(host, epoch, |old| {
            if old.is_some_and(|old| old.version >= version) {
                return Err(PublishError::NotNewer);
            }
            let head = old.unwrap_or_default().with_pool_update(epoch, version);
            let stamp = MessageStamp {
                epoch,
                version,
                metrics_sequence: 0,
                received: now,
            };
            write_side(
                host,
                side(&self.pool_update, head.pool_update_side()),
                stamp,
                message,
            )?;
            Ok(head)
        })
    }

    /// Publishes metrics of the current pool update.
    ///
    /// # Errors
    /// Returns [`PublishError`] if the metrics were not published. In this case the current metrics
    /// stay.
    pub fn publish_metrics<H: Host>(
        &self,
        host: &H,
        epoch: u64,
        named: (Version, u64),
        message: &[u8],
        now: Timestamp,
    ) -> Result<(), PublishError> {
        let (version, sequence) = named;
        self.publish(host, epoch, |old| {
            let Some(old) = old.filter(|old| old.version == version) else {
                return Err(PublishError::OtherPoolUpdate);
            };
            if old.metrics_sequence >= sequence {
                return Err(PublishError::NotNewer);
            }
            let head = old.with_metrics(epoch, sequence);
            let stamp = MessageStamp {
                epoch,
                version,
                metrics_sequence: sequence,
                received: now,
            };
            write_side(
                host,
                side(&self.metrics, head.metrics_side()),
                stamp,
                message,
            )?;
            Ok(head)
        })
    }

    fn publish<H: Host>(
        &self,
        host: &H,
        epoch: u64,
        next: impl Fn(Option<SnapshotHead>) -> Result<SnapshotHead, PublishError>,
    ) -> Result<(), PublishError> {
        for _ in 0..TRIES_MAX {
            let shared = host.shared(&self.head)?;
            let old = shared
                .as_ref()
                .and_then(|shared| SnapshotHead::from_bytes(&shared.bytes));
            if old.is_some_and(|old| old.epoch > epoch) {
                return Err(PublishError::Superseded);
            }
            let head = next(old)?;
            match host.share(&self.head, &head.to_bytes(), expect(shared.as_ref())) {
                Err(HostError::CONFLICT) => {}
                done => return Ok(done?),
            }
        }
        Err(PublishError::Host(HostError::CONFLICT))
    }
}

/// Fills a side of the store, unless a later leader has filled this side.
fn write_side<H: Host>(
    host: &H,
    key: &str,
    stamp: MessageStamp,
    message: &[u8],
) -> Result<(), PublishError> {
    let shared = host.shared(key)?;
    if shared
        .as_ref()
        .and_then(|s| MessageStamp::split(&s.bytes))
        .is_some_and(|(old, _)| old.epoch > stamp.epoch)
    {
        return Err(PublishError::Superseded);
    }
    Ok(host.share(key, &stamp.before(message), expect(shared.as_ref()))?)
}

fn read_message<H: Host>(
    host: &H,
    key: &str,
    named: impl Fn(MessageStamp) -> bool,
) -> Result<Option<StoredMessage>> {
    Ok(host.shared(key)?.and_then(|SharedValue { bytes, .. }| {
        let (stamp, _) = MessageStamp::split(&bytes)?;
        named(stamp).then_some(StoredMessage {
            received: stamp.received,
            bytes,
        })
    }))
}

fn side(sides: &[String; 2], second: bool) -> &str {
    let [a, b] = sides;
    if second { b } else { a }
}

fn expect(shared: Option<&SharedValue>) -> WriteCondition {
    shared.map_or(WriteCondition::Absent, |shared| {
        WriteCondition::Token(shared.token)
    })
}

// === impl StoredMessage ===

impl StoredMessage {
    #[must_use]
    pub fn message(&self) -> &[u8] {
        MessageStamp::split(&self.bytes).map_or(&[], |(_, message)| message)
    }
}

// === impl PublishError ===

impl From<HostError> for PublishError {
    fn from(error: HostError) -> Self {
        Self::Host(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeHost;

    const NOW: Timestamp = Timestamp(77);

    fn v(term: u64, sequence: u64) -> Version {
        Version { term, sequence }
    }

    fn in_force(
        store: &SharedSnapshotStore,
        host: &FakeHost,
    ) -> (Version, Vec<u8>, Option<Vec<u8>>) {
        let head = store.read_head(host).unwrap().unwrap().head;
        let pool_update = store.pool_update(host, head).unwrap().unwrap();
        let metrics = store.metrics(host, head).unwrap();
        (
            head.version,
            pool_update.message().to_vec(),
            metrics.map(|m| m.message().to_vec()),
        )
    }

    #[test]
    fn what_is_put_up_is_read_whole() {
        let host = FakeHost::new();
        let store = SharedSnapshotStore::new("default");
        assert_eq!(store.read_head(&host).unwrap(), None);
        store
            .publish_pool_update(&host, 1, v(5, 1), b"one", NOW)
            .unwrap();
        assert_eq!(in_force(&store, &host), (v(5, 1), b"one".to_vec(), None));
        store
            .publish_metrics(&host, 1, (v(5, 1), 2), b"m2", NOW)
            .unwrap();
        store
            .publish_metrics(&host, 1, (v(5, 1), 3), b"m3", NOW)
            .unwrap();
        assert_eq!(
            in_force(&store, &host),
            (v(5, 1), b"one".to_vec(), Some(b"m3".to_vec()))
        );
        store
            .publish_pool_update(&host, 1, v(5, 4), b"two", NOW)
            .unwrap();
        assert_eq!(
            in_force(&store, &host),
            (v(5, 4), b"two".to_vec(), None),
            "metrics are of their pool update"
        );
    }

    #[test]
    fn nothing_older_comes_back() {
        let host = FakeHost::new();
        let store = SharedSnapshotStore::new("default");
        store
            .publish_pool_update(&host, 1, v(5, 9), b"new", NOW)
            .unwrap();
        for old in [v(5, 9), v(5, 8), v(4, 99)] {
            assert_eq!(
                store.publish_pool_update(&host, 1, old, b"old", NOW),
                Err(PublishError::NotNewer)
            );
        }
        store
            .publish_metrics(&host, 1, (v(5, 9), 10), b"m", NOW)
            .unwrap();
        assert_eq!(
            store.publish_metrics(&host, 1, (v(5, 9), 10), b"m", NOW),
            Err(PublishError::NotNewer)
        );
        assert_eq!(
            store.publish_metrics(&host, 1, (v(5, 8), 11), b"m", NOW),
            Err(PublishError::OtherPoolUpdate)
        );
        store
            .publish_pool_update(&host, 1, v(6, 1), b"next life", NOW)
            .unwrap();
        assert_eq!(
            in_force(&store, &host),
            (v(6, 1), b"next life".to_vec(), None)
        );
    }

    #[test]
    fn a_stalled_leader_rolls_nothing_back() {
        let host = FakeHost::new();
        let store = SharedSnapshotStore::new("default");
        store
            .publish_pool_update(&host, 1, v(5, 1), b"one", NOW)
            .unwrap();
        store
            .publish_pool_update(&host, 2, v(5, 2), b"two", NOW)
            .unwrap();
        assert_eq!(
            store.publish_pool_update(&host, 1, v(5, 3), b"late", NOW),
            Err(PublishError::Superseded)
        );
        assert_eq!(
            store.publish_metrics(&host, 1, (v(5, 2), 3), b"late", NOW),
            Err(PublishError::Superseded)
        );
        assert_eq!(in_force(&store, &host), (v(5, 2), b"two".to_vec(), None));
    }

    /// Checks that the store has the new leader's pool update at the end, wherever the old leader
    /// stops between two of its calls and resumes after the new leader has written.
    #[test]
    fn leaders_that_overlap_at_any_point_leave_a_whole_store() {
        for steps in 1..3 {
            let host = FakeHost::new();
            let store = SharedSnapshotStore::new("default");
            store
                .publish_pool_update(&host, 1, v(5, 1), b"base", NOW)
                .unwrap();
            let rival_host = host.clone();
            let rival_store = store.clone();
            let rival = move || {
                rival_store
                    .publish_pool_update(&rival_host, 2, v(5, 3), b"rival", NOW)
                    .unwrap();
            };
            let outer = host.clone();
            if steps == 1 {
                host.before_next_share(rival);
            } else {
                host.before_next_share(move || outer.before_next_share(rival));
            }
            let late = store.publish_pool_update(&host, 1, v(5, 2), b"late", NOW);
            assert!(late.is_err(), "{steps}: {late:?}");
            assert_eq!(
                in_force(&store, &host),
                (v(5, 3), b"rival".to_vec(), None),
                "{steps}"
            );
        }
    }

    #[test]
    fn garbage_on_the_store_reads_as_nothing_and_is_replaced() {
        let host = FakeHost::new();
        let store = SharedSnapshotStore::new("p");
        for key in ["head", "pool_update/a", "pool_update/b"] {
            host.share(
                &format!("switchpoint/1/pool/p/{key}"),
                b"?",
                WriteCondition::Any,
            )
            .unwrap();
        }
        assert_eq!(store.read_head(&host).unwrap(), None);
        store
            .publish_pool_update(&host, 1, v(1, 1), b"one", NOW)
            .unwrap();
        assert_eq!(in_force(&store, &host).1, b"one");
    }
}
