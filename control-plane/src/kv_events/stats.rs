//! What is known of the publishers of a pool's engines, for metrics and `/debug/endpoints`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::batch::CacheMedium;
use super::follower::CacheKnowledge;

/// Whether an engine's publisher can be reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PublisherLink {
    #[default]
    Connecting,
    Connected,
    /// The connection ended for this reason, and the next attempt waits.
    Lost(String),
}

/// Counts of one engine since its subscription began. They are cumulative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvEventCounts {
    /// Bytes of messages, also of those that cannot be read.
    pub bytes: u64,
    /// Messages of the live stream that were counted.
    pub messages: u64,
    /// Messages that a replay brought.
    pub replayed: u64,
    /// Messages that are lost, because no replay brought them.
    pub lost: u64,
    /// Messages that could not be read.
    pub invalid: u64,
    /// Gaps in the sequence, filled by a replay or not.
    pub gaps: u64,
    pub restarts: u64,
    pub clears: u64,
    /// Removed blocks that no known event has stored.
    pub unmatched_blocks: u64,
    /// Events of another type.
    pub unknown_events: u64,
}

/// What is known of one engine's publisher.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvEventRow {
    /// The name of the endpoint.
    pub name: Arc<str>,
    pub link: PublisherLink,
    pub knowledge: CacheKnowledge,
    /// The cached blocks, by medium.
    pub blocks: [u64; CacheMedium::COUNT],
    pub block_tokens: Option<u64>,
    pub rank: Option<u64>,
    /// The seconds from the making of the last message to its arrival.
    pub lag_seconds: Option<f64>,
    pub counts: KvEventCounts,
}

/// The publishers of a pool, by the address for requests of their endpoint.
#[derive(Debug, Default)]
pub struct KvEventStats(Mutex<BTreeMap<SocketAddr, KvEventRow>>);

// === impl KvEventStats ===

impl KvEventStats {
    /// Returns all rows.
    #[must_use]
    pub fn rows(&self) -> BTreeMap<SocketAddr, KvEventRow> {
        self.lock().clone()
    }

    /// Begins the row of an endpoint.
    pub(super) fn begin(&self, endpoint: SocketAddr, name: &Arc<str>) {
        let row = KvEventRow {
            name: Arc::clone(name),
            ..KvEventRow::default()
        };
        self.lock().insert(endpoint, row);
    }

    pub(super) fn end(&self, endpoint: SocketAddr) {
        self.lock().remove(&endpoint);
    }

    pub(super) fn update(&self, endpoint: SocketAddr, change: impl FnOnce(&mut KvEventRow)) {
        if let Some(row) = self.lock().get_mut(&endpoint) {
            change(row);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, KvEventRow>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl KvEventRow ===

impl KvEventRow {
    /// Counts a message that cannot be read. Returns how many there are.
    pub(super) fn add_invalid(&mut self, bytes: u64) -> u64 {
        self.counts.bytes += bytes;
        self.counts.invalid += 1;
        self.counts.invalid
    }

    /// Returns the row as `/debug/endpoints` shows it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let (state, reason) = match &self.link {
            PublisherLink::Connecting => ("connecting", ""),
            PublisherLink::Connected => ("connected", ""),
            PublisherLink::Lost(why) => ("lost", why.as_str()),
        };
        let blocks: serde_json::Map<String, Value> = CacheMedium::NAMES
            .iter()
            .zip(self.blocks)
            .map(|(name, blocks)| ((*name).to_owned(), blocks.into()))
            .collect();
        let counts = &self.counts;
        json!({
            "state": state,
            "reason": reason,
            "knowledge": self.knowledge.name(),
            "blocks": blocks,
            "block_tokens": self.block_tokens,
            "rank": self.rank,
            "lag_seconds": self.lag_seconds,
            "bytes": counts.bytes,
            "messages": counts.messages,
            "replayed": counts.replayed,
            "lost": counts.lost,
            "invalid": counts.invalid,
            "gaps": counts.gaps,
            "restarts": counts.restarts,
            "clears": counts.clears,
            "unmatched_blocks": counts.unmatched_blocks,
            "unknown_events": counts.unknown_events,
        })
    }
}
