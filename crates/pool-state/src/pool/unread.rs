//! Picks whose reply is not read by the client.

use scheduler::{EndpointRef, Timestamp};

use super::{LedgerHold, ManagedPool};

/// The requests in flight at an endpoint, compared with the engine's own numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineCount {
    /// The engine has all of them, or its numbers are missing or old.
    All,
    /// The engine has fewer.
    Fewer,
    /// The engine has no request at all.
    Nothing,
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Compares the engine's running and queued requests with the requests in flight there.
    #[must_use]
    pub fn engine_count(&self, held: &LedgerHold, now: Timestamp) -> EngineCount {
        let Some(state) = &self.endpoints.state else {
            return EngineCount::All;
        };
        let endpoint = held.endpoint();
        let metrics = state
            .refs
            .iter()
            .zip(state.snapshot.metrics())
            .find(|(known, _)| **known == endpoint)
            .map(|(_, metrics)| metrics)
            .filter(|_| !state.metrics_stale(now));
        let Some(metrics) = metrics else {
            return EngineCount::All;
        };
        if metrics.running_requests == Some(0.0) && metrics.queue_depth == Some(0.0) {
            return EngineCount::Nothing;
        }
        match self.ledger.in_flight.absent(endpoint, metrics) {
            0 => EngineCount::All,
            _ => EngineCount::Fewer,
        }
    }

    /// Frees the place of a request whose reply waits for its client. It stays counted until its
    /// end as [`scheduler::in_flight::InFlight::suspended`]. Returns false if the place was already
    /// free.
    pub fn suspend(&mut self, held: &mut LedgerHold) -> bool {
        let is_new = self.ledger.in_flight.suspend(&mut held.serving);
        if is_new {
            self.place_changed(held.endpoint());
        }
        is_new
    }

    /// Records that the engine continues with a request that was suspended, so the request has its
    /// place again.
    pub fn resume(&mut self, held: &mut LedgerHold) {
        self.ledger.in_flight.resume(&mut held.serving);
        self.place_changed(held.endpoint());
    }

    fn place_changed(&mut self, endpoint: EndpointRef) {
        self.ledger.changes += 1;
        self.queues.room_freed(endpoint);
    }
}
