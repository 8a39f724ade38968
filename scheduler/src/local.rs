//! What the proxy itself knows, beside the snapshot, at the moment of a pick.

use crate::endpoint::{EndpointIndex, Slot};
use crate::in_flight::InFlight;

/// The proxy's own state as one pick sees it. Read only: the caller records the outcome.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a> {
    /// Requests outstanding, by endpoint slot.
    pub in_flight: &'a InFlight,
    /// Prefix blocks of this request each endpoint is believed to hold, parallel to the snapshot's endpoints; empty when the request has none.
    pub matched_blocks: &'a [u32],
    /// How little is asked for the longest of those prefixes: how many prompts like this one each endpoint was given, on average, since it was last
    /// ([`crate::prefix::PrefixIndex::idle`]).
    pub prefix_idle: f32,
    /// Where several endpoints hold the longest of those prefixes alike: how near each is to losing it, 0 to 1, parallel to the snapshot's endpoints
    /// ([`crate::prefix::PrefixIndex::ages`]); empty where at most one holds it.
    pub prefix_ages: &'a [f32],
    /// When each endpoint last answered a request of this proxy, in numbers that grow, by slot; 0 is never, and empty says so of all.
    pub last_answers: &'a [u64],
    /// Endpoints ejected here for the moment, parallel to the snapshot's endpoints; empty when none is.
    pub ejected: &'a [bool],
    /// By how much the share of requests that fail at each endpoint is above that of the other endpoints, 0 to 1, parallel to the snapshot's
    /// endpoints; empty when no endpoint fails more often than the others.
    pub failing: &'a [f32],
    /// When each endpoint was last given a request that nobody held a prefix of, in numbers that grow with every such pick, parallel to the
    /// snapshot's endpoints; 0 is never, and empty says so of all.
    pub last_cold_picks: &'a [u64],
    /// Whether each endpoint is believed to have the adapter that the request is for in GPU memory, parallel to the snapshot's endpoints;
    /// empty when nothing is known of that.
    pub adapter_rooms: &'a [AdapterRoom],
    /// Others pick too, and where they place prompts is not known here: one that nobody is believed to hold anything of belongs to its home
    /// ([`crate::prefix::rendezvous_endpoint`]).
    pub out_of_touch: bool,
    /// Scraped metrics are too old to be used: they count as unknown.
    pub metrics_stale: bool,
}

/// What is believed of an endpoint's room for an adapter, from the adapters it was given requests for. An engine keeps an adapter that is not
/// in use until another needs its place; what it reports is only those in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterRoom {
    /// Nothing is believed.
    #[default]
    Unknown,
    /// It is there: it was given a request for it, and not for as many others since as fit.
    Loaded,
    /// It is not, and there is room for it.
    Free,
    /// It is not, and loading it displaces another.
    Full {
        /// When the one it displaces was last given a request, in numbers that grow with every pick.
        displaced_used: u64,
    },
}

impl<'a> Local<'a> {
    /// Requests outstanding, and nothing else known. State that only some callers have is added by
    /// struct update, so that a new column has one default, here.
    #[must_use]
    pub fn new(in_flight: &'a InFlight) -> Self {
        Self {
            in_flight,
            matched_blocks: &[],
            prefix_idle: 0.0,
            prefix_ages: &[],
            last_answers: &[],
            ejected: &[],
            failing: &[],
            last_cold_picks: &[],
            adapter_rooms: &[],
            out_of_touch: false,
            metrics_stale: false,
        }
    }

    /// Blocks of the request's prefix that this endpoint is believed to hold.
    #[must_use]
    pub fn matched_blocks(&self, index: EndpointIndex) -> u32 {
        self.matched_blocks.get(index.get()).copied().unwrap_or(0)
    }

    /// How near this endpoint is to losing a prefix that others hold as well, 0 to 1; 0 where it holds none.
    #[must_use]
    pub fn prefix_age(&self, index: EndpointIndex) -> f32 {
        self.prefix_ages.get(index.get()).filter(|age| age.is_finite()).map_or(0.0, |age| age.clamp(0.0, 1.0))
    }

    /// When this endpoint was last given a request that nobody held a prefix of; 0: never.
    #[must_use]
    pub fn last_cold_pick(&self, index: EndpointIndex) -> u64 {
        self.last_cold_picks.get(index.get()).copied().unwrap_or(0)
    }

    /// What is believed of this endpoint's room for the request's adapter.
    #[must_use]
    pub fn adapter_room(&self, index: EndpointIndex) -> AdapterRoom {
        self.adapter_rooms.get(index.get()).copied().unwrap_or_default()
    }

    /// When the endpoint at this slot last answered a request of this proxy; 0: never.
    #[must_use]
    pub fn last_answer(&self, slot: Slot) -> u64 {
        self.last_answers.get(usize::from(slot.0)).copied().unwrap_or(0)
    }

    /// By how much the share of requests that fail at this endpoint is above that of the others, 0 to 1.
    #[must_use]
    pub fn failing(&self, index: EndpointIndex) -> f32 {
        self.failing.get(index.get()).filter(|share| share.is_finite()).map_or(0.0, |share| share.clamp(0.0, 1.0))
    }

    /// Is this endpoint ejected for the moment?
    #[must_use]
    pub fn ejected(&self, index: EndpointIndex) -> bool {
        self.ejected.get(index.get()).copied().unwrap_or(false)
    }
}
