//! What the proxy itself knows, beside the snapshot, at the moment of a pick.

use crate::in_flight::InFlight;
use crate::snapshot::EndpointIndex;

/// The proxy's own state as one pick sees it. Read only: the caller records the outcome.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a> {
    /// Requests outstanding, by endpoint slot.
    pub in_flight: &'a InFlight,
    /// Prefix blocks of this request each endpoint is believed to hold, parallel to the snapshot's endpoints; empty when the request has none.
    pub matched_blocks: &'a [u32],
    /// Endpoints ejected here for the moment, parallel to the snapshot's endpoints; empty when none is.
    pub ejected: &'a [bool],
    /// When each endpoint was last given a request that nobody held a prefix of, in numbers that grow with every such pick, parallel to the
    /// snapshot's endpoints; 0 is never, and empty says so of all.
    pub last_cold_picks: &'a [u64],
    /// Scraped metrics are too old to be used: they count as unknown.
    pub metrics_stale: bool,
}

impl Local<'_> {
    /// Blocks of the request's prefix that this endpoint is believed to hold.
    #[must_use]
    pub fn matched_blocks(&self, index: EndpointIndex) -> u32 {
        self.matched_blocks.get(index.get()).copied().unwrap_or(0)
    }

    /// When this endpoint was last given a request that nobody held a prefix of; 0: never.
    #[must_use]
    pub fn last_cold_pick(&self, index: EndpointIndex) -> u64 {
        self.last_cold_picks.get(index.get()).copied().unwrap_or(0)
    }

    /// Is this endpoint ejected for the moment?
    #[must_use]
    pub fn ejected(&self, index: EndpointIndex) -> bool {
        self.ejected.get(index.get()).copied().unwrap_or(false)
    }
}
