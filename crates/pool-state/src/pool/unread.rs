//! Handles picks that wait for their client: it does not read the reply, or the body has not
//! arrived.

use scheduler::in_flight::InFlightTicket;
use scheduler::{EndpointRef, Timestamp};

use super::endpoints::PublishedState;
use super::{LedgerHold, ManagedPool};

/// The requests in flight at an endpoint, compared with the engine's own numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EngineCount {
    /// The engine has all of these requests, or its numbers are missing or old.
    All,
    /// The engine has fewer requests.
    Fewer,
    /// The engine has no request at all.
    Nothing,
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Compares the number of running and queued requests that an engine reports with the requests
    /// in flight there, for the engines that have the request. If several engines have the request,
    /// the engine with the most requests decides. Numbers from before the last `silent_ms`, in
    /// which nothing changed for the request, are not used.
    #[must_use]
    #[cold]
    pub fn engine_count(&self, held: &LedgerHold, silent_ms: u64, now: Timestamp) -> EngineCount {
        let state = self
            .endpoints
            .state
            .as_ref()
            .filter(|state| !state.metrics_stale(now) && silent_ms >= state.staleness_max_ms);
        let Some(state) = state else {
            return EngineCount::All;
        };
        let mut count = EngineCount::Nothing;
        for endpoint in held.endpoints() {
            count = count.min(self.engine_count_at(state, endpoint));
        }
        count
    }

    fn engine_count_at(&self, state: &PublishedState, endpoint: EndpointRef) -> EngineCount {
        let at = state.refs.iter().position(|known| *known == endpoint);
        let metrics = at.and_then(|at| state.snapshot.metrics().get(at));
        let in_flight = &self.ledger.in_flight;
        let Some(metrics) = metrics.filter(|_| in_flight.has_counted(endpoint)) else {
            return EngineCount::All;
        };
        if metrics.running_requests == Some(0.0) && metrics.queue_depth == Some(0.0) {
            return EngineCount::Nothing;
        }
        match in_flight.absent(endpoint, metrics) {
            0 => EngineCount::All,
            _ => EngineCount::Fewer,
        }
    }

    /// Frees the room of a request whose reply waits for its client. The request stays counted
    /// until its end as [`scheduler::in_flight::InFlight::suspended`]. Its flow pays at once for
    /// the time that [`LedgerHold::charge_silence`] set.
    #[cold]
    pub fn suspend(&mut self, held: &mut LedgerHold) {
        for ticket in held.tickets_mut() {
            if self.ledger.in_flight.suspend(ticket) {
                self.place_changed(ticket.endpoint());
            }
        }
        if let Some(charge) = &mut held.charge {
            let due = *charge;
            charge.silent_ms = 0;
            self.settle_charge(due, 0);
        }
    }

    /// Records that the engine continues with a request that was suspended, so the request takes
    /// its room again.
    #[cold]
    pub fn resume(&mut self, held: &mut LedgerHold) {
        for ticket in held.tickets_mut() {
            self.ledger.in_flight.resume(ticket);
            self.place_changed(ticket.endpoint());
        }
    }

    /// Sets the prompt of a request whose body is not read: 0 tokens until its body has arrived.
    #[cold]
    pub fn set_prompt(&mut self, held: &mut LedgerHold, tokens: u32) {
        let work = |ticket: &InFlightTicket| {
            let metrics = self.endpoints.metrics_of(ticket.endpoint());
            metrics.map_or(tokens, |metrics| metrics.work_tokens(tokens))
        };
        let prompt = work(held.stages.last().unwrap_or(&held.serving));
        let output_tokens = self.snapshot().map_or(0, |snapshot| {
            let load = &snapshot.pipeline().production().load;
            load.output_tokens(work(&held.serving), None)
        });
        for ticket in held.tickets_mut() {
            self.ledger.in_flight.set_prompt(ticket, 0, 0);
            self.place_changed(ticket.endpoint());
        }
        let in_flight = &mut self.ledger.in_flight;
        match held.stages.last_mut() {
            Some(prefill) => {
                in_flight.set_prompt(prefill, prompt, 0);
                in_flight.set_prompt(&mut held.serving, 0, output_tokens);
            }
            None => in_flight.set_prompt(&mut held.serving, prompt, output_tokens),
        }
    }

    fn place_changed(&mut self, endpoint: EndpointRef) {
        self.ledger.changes += 1;
        self.queues.room_freed(endpoint);
    }
}
