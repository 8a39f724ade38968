//! Decides when the metadata of a table's instances is fetched, and what an answer changes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::InstanceTable;
use crate::backend::MetadataSource;
use crate::event::{ClockReading, InstanceState};
use crate::metadata::Metadata;

/// The interval at which metadata is fetched again without an event. Metadata may change without an
/// event, for example when a LoRA adapter is loaded.
pub const METADATA_POLL_INTERVAL: Duration = Duration::from_secs(30);

/// The first wait after metadata could not be fetched. The wait doubles up to
/// [`METADATA_POLL_INTERVAL`].
pub const METADATA_RETRY_FIRST: Duration = Duration::from_millis(250);

/// A request for the metadata of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MetadataRequest {
    pub(crate) id: Arc<str>,
    pub(crate) generation: String,
    pub(crate) address: SocketAddr,
    /// The entity tag of the known metadata.
    pub(crate) etag: Option<String>,
}

/// The result of a [`MetadataRequest`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MetadataResponse {
    /// The metadata with its entity tag.
    Is(Arc<Metadata>, Option<String>),
    /// The metadata has not changed since the known entity tag.
    Unchanged,
    /// The instance has no metadata.
    Absent,
    /// The metadata could not be fetched, for this reason.
    Failed(String),
}

/// The metadata that an instance serves.
#[derive(Debug, Default)]
pub(super) struct KnownMetadata {
    /// The last good answer; `Some(None)` means that the instance has none.
    pub(super) answer: Option<Option<Arc<Metadata>>>,
    etag: Option<String>,
    pub(super) failure: Option<String>,
    failures: u32,
    pub(super) due: Option<Instant>,
    fetching: bool,
    /// Whether the metadata must be fetched again when the current fetch ends.
    again: bool,
}

// === impl InstanceTable ===

impl InstanceTable {
    /// Returns the next metadata fetch that is due, if any. An instance has at most one fetch at a
    /// time.
    pub(crate) fn next_fetch(&mut self, now: Instant) -> Option<MetadataRequest> {
        loop {
            let due = self.due.first().filter(|(at, _)| *at <= now)?.clone();
            self.due.remove(&due);
            let (_, id) = due;
            let Some(row) = self.rows.get_mut(&id) else {
                continue;
            };
            row.metadata.due = None;
            let MetadataSource::At(address) = row.record.metadata else {
                continue;
            };
            if !row.record.readiness.may_serve() {
                continue; // fetched when it becomes ready
            }
            if self.local.check(address).is_err() {
                continue; // the instance is refused
            }
            if std::mem::replace(&mut row.metadata.fetching, true) {
                row.metadata.again = true;
                continue;
            }
            let generation = row.record.instance.generation.clone();
            let etag = row.metadata.etag.clone();
            return Some(MetadataRequest {
                id,
                generation,
                address,
                etag,
            });
        }
    }

    /// Applies the result of a fetch. Ignores the result of an older generation.
    pub(crate) fn fetched(
        &mut self,
        fetch: &MetadataRequest,
        fetched: MetadataResponse,
        now: ClockReading,
    ) {
        let Some(row) = self.rows.get_mut(&fetch.id) else {
            return;
        };
        let same_life = row.record.instance.generation == fetch.generation
            && row.record.metadata == MetadataSource::At(fetch.address);
        if !same_life || !row.metadata.fetching {
            return;
        }
        let known = &mut row.metadata;
        known.fetching = false;
        known.failure = None;
        let again = std::mem::take(&mut known.again);
        let failures = std::mem::take(&mut known.failures);
        let mut wait = METADATA_POLL_INTERVAL;
        match fetched {
            MetadataResponse::Is(metadata, etag) => {
                known.answer = Some(Some(metadata));
                known.etag = etag;
            }
            MetadataResponse::Absent => {
                known.answer = Some(None);
                known.etag = None;
            }
            MetadataResponse::Unchanged => {}
            MetadataResponse::Failed(why) => {
                known.failure = Some(why);
                known.failures = failures + 1;
                wait = METADATA_RETRY_FIRST
                    .saturating_mul(1 << failures.min(16))
                    .min(wait);
            }
        }
        let wait = if again {
            Duration::ZERO
        } else {
            jittered(wait, &fetch.id)
        };
        self.schedule(&fetch.id, now.instant + wait);
        self.refresh(&fetch.id, now);
        self.fill(now);
    }

    /// Returns whether a ready instance waits for the first result of a metadata fetch, good or
    /// bad.
    pub(crate) fn is_asking(&self) -> bool {
        self.rows.values().any(|row| {
            matches!(row.state, InstanceState::Pending(_))
                && row.metadata.answer.is_none()
                && row.metadata.failure.is_none()
        })
    }

    /// Schedules the fetch of an instance's metadata at this time, and not before.
    pub(super) fn schedule(&mut self, id: &Arc<str>, at: Instant) {
        let Some(row) = self.rows.get_mut(id) else {
            return;
        };
        if let Some(before) = row.metadata.due.replace(at) {
            self.due.remove(&(before, Arc::clone(id)));
        }
        self.due.insert((at, Arc::clone(id)));
    }
}

/// Lengthens a wait by up to a quarter. The extra time depends on the id, so that the instances of
/// a pool are not fetched at the same time, and tests know the time.
fn jittered(wait: Duration, id: &str) -> Duration {
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    }); // FNV-1a
    wait + wait
        .mul_f64(f64::from(u16::try_from(hash >> 48).unwrap_or(0)) / f64::from(u16::MAX) / 4.0)
}
