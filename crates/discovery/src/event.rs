//! The set of instances as subscribers and operators see it: events, states, and the use of
//! metadata.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;

use crate::instance::Instance;

/// One point in time on both clocks. Durations use the monotonic clock, and reports use the wall
/// clock.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    /// The monotonic clock.
    pub instant: Instant,
    /// The wall clock, for reports.
    pub wall: SystemTime,
}

/// A change of the published set. An [`InstanceEvent::Added`] is an upsert: it carries the whole
/// new value of a known or unknown instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceEvent {
    /// The instance may get traffic. An unconfirmed instance may get traffic only while it answers
    /// ([`Instance::unconfirmed`]).
    Added(Arc<Instance>),
    /// The instance with this id may no longer get traffic.
    Removed(Arc<str>),
}

/// The use of metadata that an instance serves itself.
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
    /// The id of the instance.
    pub id: Arc<str>,
    /// The generation of the instance.
    pub generation: String,
    /// The current or last address of the instance.
    pub address: SocketAddr,
    /// The state of the instance.
    pub state: InstanceState,
    /// The time when the variant of `state` last changed.
    pub since: SystemTime,
}

/// The state of an instance, and the reason for the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceState {
    /// The instance is published.
    Ready,
    /// The instance is published with its last good metadata, because the last fetch failed.
    Stale(String),
    /// The instance is published, although the backend's first list after an outage does not have
    /// it.
    RemovalHeld,
    /// The instance is published as unconfirmed. The backend reports that the instance is not
    /// ready, but not because of the instance's own report.
    Unconfirmed(String),
    /// The backend reports that the instance is not ready.
    NotReady(String),
    /// The instance is ready, but its metadata is not known.
    Pending(String),
    /// The instance is invalid, or another instance has its address.
    Refused(String),
    /// The backend does not have the instance any more.
    Removed,
}

// === impl ClockReading ===

impl ClockReading {
    /// Returns the current time on both clocks.
    #[must_use]
    pub fn read() -> Self {
        Self {
            instant: Instant::now(),
            wall: SystemTime::now(),
        }
    }
}
