//! The set of instances as subscribers and operators see it: events, states, and how metadata is used.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;

use crate::instance::Instance;

/// One moment on both clocks: durations use the monotonic clock, reports the wall clock.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    /// Monotonic.
    pub instant: Instant,
    /// Wall clock, for reports.
    pub wall: SystemTime,
}

/// A change of the published set. An [`InstanceEvent::Added`] is an upsert: it carries the whole
/// new value of an instance, known or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceEvent {
    /// This instance may get traffic.
    Added(Arc<Instance>),
    /// The instance with this id may not get traffic any more.
    Removed(Arc<str>),
}

/// How metadata that an instance serves itself is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetadataPolicy {
    /// It is not fetched.
    Ignored,
    /// It is fetched; an instance that has none (404) is published without.
    #[default]
    Preferred,
    /// It is fetched; an instance that has none is not published.
    Required,
}

/// An instance that was seen lately, for display.
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
    /// Since when it has that state.
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
    /// Its backend reports it as not ready.
    NotReady(String),
    /// It is ready, but its metadata is not known.
    Pending(String),
    /// It breaks a rule, or another instance has its address.
    Refused(String),
    /// The backend does not have it any more.
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
