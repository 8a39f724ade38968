//! The state of the proxy itself at the moment of a pick, in addition to the snapshot of the pool.

use crate::endpoint::{EndpointIndex, Slot};
use crate::in_flight::InFlight;
use crate::prefix::REQUESTED_ONCE;

/// The proxy's own state for one pick. The scheduler only reads it, and the caller records the
/// outcome.
#[derive(Clone, Copy, Debug)]
pub struct LocalState<'a> {
    /// The requests in flight, by endpoint slot.
    pub in_flight: &'a InFlight,
    /// The estimated number of this request's prefix blocks that each endpoint has cached, in the
    /// snapshot's order. Empty if there are none.
    pub matched_blocks: &'a [u32],
    /// The reuse interval of a new copy of the longest cached prefix: the mean number of prompts of
    /// this length that an endpoint gets between two requests that the copy will serve. At most
    /// [`REQUESTED_ONCE`].
    pub reuse_interval: f32,
    /// The share of recently computed prompt tokens that an endpoint had cached before and had
    /// evicted, 0 to 1. The greater the share, the scarcer is cache memory.
    pub evicted_share: f32,
    /// When each endpoint last answered a request of this proxy, by slot. The numbers grow with
    /// time, and 0 or a missing number means never.
    pub last_answers: &'a [u64],
    /// Whether each endpoint is ejected now, or only this request's client avoids it, in the
    /// snapshot's order; empty when none is.
    pub ejected: &'a [bool],
    /// The failure rate of each endpoint minus that of the other endpoints, 0 to 1, in the
    /// snapshot's order. Empty when no endpoint fails more often than the others.
    pub failing: &'a [f32],
    /// The number of the last pick that sent each endpoint a request whose prefix was cached
    /// nowhere. The numbers grow with every such pick, and are in the snapshot's order. 0 or a
    /// missing number means never.
    pub last_cold_picks: &'a [u64],
    /// The estimated room of each endpoint for the request's LoRA adapter, in the snapshot's order;
    /// empty when nothing is known.
    pub adapter_rooms: &'a [AdapterRoom],
    /// Whether other proxies pick too, but reports of their picks do not arrive. Then a prompt that
    /// is cached nowhere is sent to its rendezvous endpoint
    /// ([`crate::prefix::rendezvous_endpoint`]).
    pub peers_unreachable: bool,
    /// Whether scraped metrics are too old, so that they count as unknown.
    pub metrics_stale: bool,
}

/// An endpoint's room for an adapter, estimated from the adapters of its past requests. An engine
/// keeps an unused adapter until another one needs its memory, but reports only adapters in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterRoom {
    /// The room is unknown, or the request is for the base model and needs no room.
    #[default]
    Unknown,
    /// The adapter is loaded: a request used it, and since then fewer other adapters were used than
    /// fit into memory.
    Loaded,
    /// The adapter is not loaded, and there is room for it.
    Free,
    /// The adapter is not loaded, and loading it evicts another.
    Full {
        /// When the evicted adapter was last used, as a number that grows with every pick.
        displaced_used: u64,
    },
}

impl<'a> LocalState<'a> {
    /// Returns a state with these requests in flight and no other data. Callers add the rest by
    /// struct update, so that only this function has the defaults.
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

    pub fn matched_blocks(&self, index: EndpointIndex) -> u32 {
        self.matched_blocks.get(index.get()).copied().unwrap_or(0)
    }

    pub fn last_cold_pick(&self, index: EndpointIndex) -> u64 {
        self.last_cold_picks.get(index.get()).copied().unwrap_or(0)
    }

    pub fn adapter_room(&self, index: EndpointIndex) -> AdapterRoom {
        self.adapter_rooms
            .get(index.get())
            .copied()
            .unwrap_or_default()
    }

    pub fn last_answer(&self, slot: Slot) -> u64 {
        self.last_answers
            .get(usize::from(slot.0))
            .copied()
            .unwrap_or(0)
    }

    pub fn failing(&self, index: EndpointIndex) -> f32 {
        self.failing
            .get(index.get())
            .filter(|share| share.is_finite())
            .map_or(0.0, |share| share.clamp(0.0, 1.0))
    }

    pub fn ejected(&self, index: EndpointIndex) -> bool {
        self.ejected.get(index.get()).copied().unwrap_or(false)
    }
}
