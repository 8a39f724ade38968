//! The head of the snapshot store, and the stamp that precedes each stored message.

use scheduler::{Timestamp, Version};

use crate::words;

const STAMP_WORDS: usize = 5;
/// The bit of [`SnapshotHead::sides`] that names the side (buffer) with the current pool update.
const POOL_UPDATE_SIDE: u64 = 1;
/// The bit of [`SnapshotHead::sides`] that names the side with the current metrics.
const METRICS_SIDE: u64 = 2;

/// The head, which names the store's current messages. The bytes have the epoch, the term and the
/// sequence of the version, the sequence of the metrics, and the sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotHead {
    /// The epoch of the leader that wrote the head.
    pub epoch: u64,
    pub version: Version,
    /// The sequence of the metrics; 0 means no metrics for this pool update.
    pub metrics_sequence: u64,
    /// The current side of the pool update (bit 0) and of the metrics (bit 1).
    sides: u64,
}

/// The stamp before a message on a side. The bytes have the epoch, the term and the sequence of the
/// version, the sequence of the metrics, and the time of receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageStamp {
    /// The epoch of the leader that wrote the message.
    pub epoch: u64,
    /// The version of the pool update. For metrics, it is the version of the pool update to which
    /// the metrics belong.
    pub version: Version,
    /// The sequence of the metrics; 0 for a pool update.
    pub metrics_sequence: u64,
    /// The time when the leader received the message.
    pub received: Timestamp,
}

// === impl SnapshotHead ===

impl SnapshotHead {
    /// Returns the head after a new pool update was written to the other side. This head has no
    /// metrics yet.
    #[must_use]
    pub fn with_pool_update(self, epoch: u64, version: Version) -> Self {
        Self {
            epoch,
            version,
            metrics_sequence: 0,
            sides: self.sides ^ POOL_UPDATE_SIDE,
        }
    }

    /// Returns the head after new metrics were written to the other side.
    #[must_use]
    pub fn with_metrics(self, epoch: u64, metrics_sequence: u64) -> Self {
        Self {
            epoch,
            metrics_sequence,
            sides: self.sides ^ METRICS_SIDE,
            ..self
        }
    }

    /// Whether the pool update is on the second side.
    #[must_use]
    pub fn pool_update_side(self) -> bool {
        self.sides & POOL_UPDATE_SIDE != 0
    }

    /// Whether the metrics are on the second side.
    #[must_use]
    pub fn metrics_side(self) -> bool {
        self.sides & METRICS_SIDE != 0
    }

    /// Decodes a head; `None` when the bytes are invalid.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let [epoch, term, sequence, metrics_sequence, sides] = words::read(bytes)?;
        Some(Self {
            epoch,
            version: Version { term, sequence },
            metrics_sequence,
            sides,
        })
    }

    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        words::write(
            &[
                self.epoch,
                self.version.term,
                self.version.sequence,
                self.metrics_sequence,
                self.sides,
            ],
            &[],
        )
    }
}

// === impl MessageStamp ===

impl MessageStamp {
    /// Splits a side into the stamp and the message after it.
    #[must_use]
    pub fn split(side: &[u8]) -> Option<(Self, &[u8])> {
        let ([epoch, term, sequence, metrics_sequence, received], message) =
            words::split::<STAMP_WORDS>(side)?;
        Some((
            Self {
                epoch,
                version: Version { term, sequence },
                metrics_sequence,
                received: Timestamp(received),
            },
            message,
        ))
    }

    /// Returns the bytes of a side with this message.
    #[must_use]
    pub fn before(self, message: &[u8]) -> Vec<u8> {
        words::write(
            &[
                self.epoch,
                self.version.term,
                self.version.sequence,
                self.metrics_sequence,
                self.received.0,
            ],
            message,
        )
    }
}
