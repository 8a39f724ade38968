//! The set of instances as subscribers and operators see it: events, states, and the use of
//! metadata.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;

use crate::instance::Instance;

/// One moment on both clocks: durations use the monotonic clock, reports the wall clock.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    /// The monotonic clock.
    pub instant: Instant,
    /// The wall clock, for reports.
    pub wall: SystemTime,
}

/// A change of the published set. An [`InstanceEvent::Added`] is an upsert: it carries the whole
/// new value of an instance, known or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceEvent {
    /// This instance may get traffic.
    Added(Arc<Instance>),
    /// The instance with this id may no longer get traffic.
    Removed(Arc<str>),
}

/// How metadata that an instance serves itself is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetadataPolicy {
    /// Metadata is not fetched.
    Ignored,
    /// Metadata is fetched; an instance without metadata (404) is published too.
    #[default]
    Preferred,
    /// Metadata is fetched; an instance without metadata is not published.
    Required,
}

/// A recently seen instance, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceSummary {
    /// Its id.
    pub id: Arc<str>,
    /// Its generation.
    pub generation: String,
    /// Its current or last address.
    pub address: SocketAddr,
    /// Its state.
    pub state: InstanceState,
    /// When the variant of `state` last changed.
    pub since: SystemTime,
}

/// The state of an instance, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceState {
    /// It is published.
    Ready,
    /// It is published, although its metadata could not be fetched last time: the last good
    /// metadata is used.
    Stale(String),
    /// It is published, although the backend's first list after an outage does not have it.
    RemovalHeld,
    /// Its backend reports that it is not ready.
    NotReady(String),
    /// It is ready, but its metadata is not known.
    Pending(String),
    /// It is invalid, or another instance has its address.
    Refused(String),
    /// Its backend does not have it any more.
    Removed,
}

// === impl ClockReading ===

impl ClockReading {
    /// The current moment.
    #[must_use]
    pub fn read() -> Self {
        Self { instant: Instant::now(), wall: SystemTime::now() }
    }
}
