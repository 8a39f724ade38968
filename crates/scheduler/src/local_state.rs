//! The state of the proxy itself at the moment of a pick, beside the snapshot.

use crate::endpoint::{EndpointIndex, Slot};
use crate::in_flight::InFlight;
use crate::prefix::REQUESTED_ONCE;

/// The proxy's own state for one pick. Read only: the caller records the outcome.
#[derive(Clone, Copy, Debug)]
pub struct LocalState<'a> {
    /// Requests outstanding, by endpoint slot.
    pub in_flight: &'a InFlight,
    /// Cached prefix blocks of this request at each endpoint, as estimated, parallel to the
    /// snapshot's endpoints; empty when the request has none.
    pub matched_blocks: &'a [u32],
    /// The reuse interval of a new copy of the longest cached prefix. The interval is the mean
    /// number of prompts of this length that an endpoint gets between two requests that the copy
    /// will serve. At most [`REQUESTED_ONCE`].
    pub reuse_interval: f32,
    /// The share of the recently computed prompt tokens that an endpoint had cached before and had
    /// evicted, 0 to 1. The greater the share, the scarcer is the memory of caches.
    pub evicted_share: f32,
    /// When each endpoint last answered a request of this proxy, by slot. The numbers grow with
    /// time, 0 means never, and an empty list means never for all.
    pub last_answers: &'a [u64],
    /// Endpoints ejected now, parallel to the snapshot's endpoints; empty when none is.
    pub ejected: &'a [bool],
    /// The failure rate of each endpoint minus the failure rate of the other endpoints, 0 to 1,
    /// parallel to the snapshot's endpoints. The list is empty when no endpoint fails more often
    /// than the others.
    pub failing: &'a [f32],
    /// The number of the last pick that sent each endpoint a request whose prefix was cached
    /// nowhere. The numbers grow with every such pick, and are parallel to the snapshot's
    /// endpoints. 0 means never, and an empty list means never for all endpoints.
    pub last_cold_picks: &'a [u64],
    /// The estimated room of each endpoint for the request's adapter, parallel to the snapshot's
    /// endpoints; empty when nothing is known.
    pub adapter_rooms: &'a [AdapterRoom],
    /// Whether other proxies pick too, and their placements do not arrive here. In this case a
    /// prompt that is cached nowhere goes to its rendezvous endpoint
    /// ([`crate::prefix::rendezvous_endpoint`]).
    pub peers_unreachable: bool,
    /// Whether scraped metrics are too old and count as unknown.
    pub metrics_stale: bool,
}

/// An endpoint's room for an adapter, estimated from the adapters of its past requests. An engine
/// keeps an unused adapter until another adapter needs its place, but reports only adapters in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterRoom {
    /// The room is unknown, or the request is for the base model and needs no room.
    #[default]
    Unknown,
    /// The adapter is loaded: a request used it, and since then fewer other adapters were used than
    /// fit.
    Loaded,
    /// The adapter is not loaded, and there is room for it.
    Free,
    /// The adapter is not loaded, and loading it evicts another.
    Full {
        /// When the evicted adapter was last used, in numbers that grow with every pick.
        displaced_used: u64,
    },
}

impl<'a> LocalState<'a> {
    /// A state with these requests in flight and no other data. Callers add other state by struct
    /// update, so that each column has one default, here.
    #[must_use]
    pub fn new(in_flight: &'a InFlight) -> Self {
        Self {
            in_flight,
            matched_blocks: &[],
            reuse_interval: REQUESTED_ONCE,
            evicted_share: 0.0,
            last_answers: &[],
            ejected: &[],
            failing: &[],
            last_cold_picks: &[],
            adapter_rooms: &[],
            peers_unreachable: false,
            metrics_stale: false,
        }
    }

    /// Cached prefix blocks of the request at this endpoint, as estimated.
    pub fn matched_blocks(&self, index: EndpointIndex) -> u32 {
        self.matched_blocks.get(index.get()).copied().unwrap_or(0)
    }

    /// The number of the last pick that sent this endpoint a request whose prefix was cached
    /// nowhere; 0 means never.
    pub fn last_cold_pick(&self, index: EndpointIndex) -> u64 {
        self.last_cold_picks.get(index.get()).copied().unwrap_or(0)
    }

    /// Returns the estimated room of an endpoint for the request's adapter.
    pub fn adapter_room(&self, index: EndpointIndex) -> AdapterRoom {
        self.adapter_rooms
            .get(index.get())
            .copied()
            .unwrap_or_default()
    }

    /// The time when the endpoint in this slot last answered a request of this proxy; 0 means
    /// never.
    pub fn last_answer(&self, slot: Slot) -> u64 {
        self.last_answers
            .get(usize::from(slot.0))
            .copied()
            .unwrap_or(0)
    }

    /// The failure rate of this endpoint minus that of the other endpoints, 0 to 1.
    pub fn failing(&self, index: EndpointIndex) -> f32 {
        self.failing
            .get(index.get())
            .filter(|share| share.is_finite())
            .map_or(0.0, |share| share.clamp(0.0, 1.0))
    }

    /// Whether this endpoint is ejected now.
    pub fn ejected(&self, index: EndpointIndex) -> bool {
        self.ejected.get(index.get()).copied().unwrap_or(false)
    }
}
