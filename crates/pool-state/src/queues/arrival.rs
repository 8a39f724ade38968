//! A request that arrives, as the queues see it.

use scheduler::{Timestamp, name_hash};

/// The most bytes kept of a request's id. Operators find the request in logs by it; most proxies
/// make UUIDs of 36 bytes.
const REQUEST_ID_BYTES_MAX: usize = 64;

/// The fairness id of requests without one, as in llm-d.
pub const DEFAULT_FLOW: &str = "default-flow";

/// A request that arrives.
#[derive(Clone, Copy, Debug)]
pub struct FlowArrival<'a> {
    /// The fairness id; empty for [`DEFAULT_FLOW`].
    pub flow: &'a str,
    /// The id by which operators find it while it waits.
    pub request_id: &'a str,
    /// The bytes of its body, and the memory that the proxy keeps for it.
    pub bytes: u64,
    /// When its headers arrived.
    pub arrived: Timestamp,
    /// How long it may wait, in ms, if that is less than its band allows.
    pub ttl_ms: Option<u64>,
}

/// As much of a request's id as is kept.
pub(crate) fn short_id(id: &str) -> &str {
    if id.len() > REQUEST_ID_BYTES_MAX {
        id.get(..REQUEST_ID_BYTES_MAX).unwrap_or_default()
    } else {
        id
    }
}

// === impl FlowArrival ===

impl FlowArrival<'_> {
    /// The hash of the fairness id.
    pub(crate) fn flow_id(&self) -> u64 {
        name_hash(if self.flow.is_empty() {
            DEFAULT_FLOW
        } else {
            self.flow
        })
    }
}
