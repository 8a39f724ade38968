//! The data that a pick looks up for every endpoint, and the endpoints that got prompts that were
//! cached nowhere.

use scheduler::prefix::MatchLength;
use scheduler::{AdapterRoom, EndpointIndex};

/// The results of a plan's lookups, parallel to the snapshot's endpoints. The columns keep their
/// memory from plan to plan.
#[derive(Debug, Default)]
pub(super) struct EndpointLookups {
    /// How many hashes of the prompt the endpoint has cached, and how many blocks they cover.
    pub(super) known: Vec<MatchLength>,
    pub(super) matched: Vec<u32>,
    /// How rarely the longest cached prefix is requested.
    pub(super) reuse_interval: f32,
    pub(super) ejected: Vec<bool>,
    /// The failure rate of the endpoint minus that of the other endpoints; empty when no endpoint
    /// fails more often.
    pub(super) failing: Vec<f32>,
    /// Whether the endpoint has room for the request's adapter; empty without adapters.
    pub(super) adapter_rooms: Vec<AdapterRoom>,
}

/// For each endpoint of the snapshot, the number of the last pick that sent it a prompt that was
/// cached nowhere; 0 means never. Each worker numbers its own picks of such prompts. If each worker
/// spreads its own such prompts over the endpoints, all of them are spread.
#[derive(Debug, Default)]
pub(super) struct ColdPicks {
    last: Vec<u64>,
    made: u64,
}

// === impl EndpointLookups ===

impl EndpointLookups {
    /// The part of the prompt that this endpoint has cached.
    pub(super) fn known(&self, endpoint: EndpointIndex) -> MatchLength {
        self.known.get(endpoint.get()).copied().unwrap_or_default()
    }

    /// The blocks of the prompt that this endpoint has cached.
    pub(super) fn matched(&self, endpoint: EndpointIndex) -> u32 {
        self.matched.get(endpoint.get()).copied().unwrap_or(0)
    }

    /// Whether no endpoint has a block of the prompt cached.
    pub(super) fn is_cold(&self) -> bool {
        self.matched.iter().all(|&blocks| blocks == 0)
    }
}

// === impl ColdPicks ===

impl ColdPicks {
    /// The last pick of each endpoint for a prompt that was cached nowhere.
    pub(super) fn last(&self) -> &[u64] {
        &self.last
    }

    /// Records that the endpoint gets a prompt that is cached nowhere.
    pub(super) fn record(&mut self, endpoint: EndpointIndex) {
        if let Some(last) = self.last.get_mut(endpoint.get()) {
            self.made += 1;
            *last = self.made;
        }
    }

    /// Moves the numbers to the positions of the endpoints in a new snapshot. `from` has the
    /// position of each endpoint in the previous snapshot.
    pub(super) fn remap(&mut self, from: &[Option<usize>]) {
        self.last = from
            .iter()
            .map(|from| from.and_then(|at| self.last.get(at)).copied().unwrap_or(0))
            .collect();
    }
}
