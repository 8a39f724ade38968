//! Requests that have not ended but do not count as load, because apparently their endpoint no
//! longer works on these requests.

use super::{InFlight, InFlightTicket, NOWHERE};
use crate::endpoint::EndpointRef;
use crate::metrics::EndpointMetrics;

/// The number of suspended requests at each endpoint that has suspended requests.
#[derive(Debug, Default)]
pub(super) struct SuspendedCounts(Vec<(EndpointRef, u32)>);

// === impl SuspendedCounts ===

impl SuspendedCounts {
    fn add(&mut self, endpoint: EndpointRef) {
        match self.0.iter_mut().find(|(at, _)| *at == endpoint) {
            Some((_, count)) => *count += 1,
            None => self.0.push((endpoint, 1)),
        }
    }

    fn remove(&mut self, endpoint: EndpointRef) {
        for (_, count) in self.0.iter_mut().filter(|(at, _)| *at == endpoint) {
            *count = count.saturating_sub(1);
        }
        self.0.retain(|(_, count)| *count > 0);
    }
}

// === impl InFlight ===

impl InFlight {
    /// Takes the request out of the load of its endpoint, until [`Self::resume`]. Returns false if
    /// the request is already suspended.
    #[cold]
    pub fn suspend(&mut self, ticket: &mut InFlightTicket) -> bool {
        if ticket.is_suspended() {
            return false;
        }
        self.subtract(ticket);
        let mut request_id = Box::default();
        self.queued(ticket, |queues, slot, entry| {
            request_id = queues.remove(slot, entry.id);
        });
        ticket.row_epoch = NOWHERE;
        ticket.suspended = Some(request_id);
        self.suspended.add(ticket.endpoint);
        true
    }

    /// Counts a suspended request again, because its endpoint works on it after all. If the
    /// endpoint has another generation now, no row counts the request.
    #[cold]
    pub fn resume(&mut self, ticket: &mut InFlightTicket) {
        let Some(request_id) = ticket.suspended.take() else {
            return;
        };
        self.suspended.remove(ticket.endpoint);
        ticket.row_epoch = self.current_epoch(ticket.endpoint);
        self.add(ticket);
        self.enqueue(ticket, request_id);
    }

    /// Returns the number of this proxy's suspended requests at `endpoint`.
    pub fn suspended(&self, endpoint: EndpointRef) -> u32 {
        self.suspended
            .0
            .iter()
            .find(|(at, _)| *at == endpoint)
            .map_or(0, |(_, count)| *count)
    }

    /// Whether the engine has ever reported a request.
    pub fn has_counted(&self, endpoint: EndpointRef) -> bool {
        self.scraped.counts(endpoint)
    }

    /// Returns how many of the requests in [`Self::load`] the engine's last report does not
    /// include. Returns 0 unless the engine reports both its running and its queued requests.
    #[cold]
    pub fn absent(&self, endpoint: EndpointRef, metrics: &EndpointMetrics) -> u32 {
        let here = self.requests(endpoint).min(self.scraped.requests(endpoint));
        metrics
            .running_requests
            .zip(metrics.queue_depth)
            .map(|(running, queued)| running + queued)
            .filter(|there| *there >= 0.0) // NaN is unknown
            .map_or(0, |there| here.saturating_sub(there as u32))
    }

    pub(super) fn end_suspension(&mut self, ticket: &InFlightTicket) {
        if ticket.is_suspended() {
            self.suspended.remove(ticket.endpoint);
        }
    }
}

// === impl InFlightTicket ===

impl InFlightTicket {
    /// Whether the request does not count as load until [`InFlight::resume`].
    pub fn is_suspended(&self) -> bool {
        self.suspended.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Generation, Slot};
    use crate::in_flight::EndpointLoad;

    const AT: EndpointRef = EndpointRef {
        slot: Slot(3),
        generation: Generation(1),
    };

    #[test]
    fn a_suspended_request_is_no_load_and_is_counted_again_when_it_goes_on() {
        let mut ledger = InFlight::default();
        let mut ticket = ledger.admit(AT, 100);
        ledger.first_token(&mut ticket, 100);
        let load = ledger.load(AT);
        assert!(ledger.suspend(&mut ticket) && !ledger.suspend(&mut ticket));
        assert_eq!(
            (ledger.load(AT), ledger.suspended(AT)),
            (EndpointLoad::default(), 1)
        );
        ledger.decoded(&mut ticket, 5);
        ledger.resume(&mut ticket);
        ledger.resume(&mut ticket);
        assert_eq!(
            (ledger.load(AT).decode_tokens, ledger.suspended(AT)),
            (load.decode_tokens + 5, 0)
        );
        ledger.suspend(&mut ticket);
        ledger.release(ticket);
        assert_eq!((ledger.rows().count(), ledger.suspended(AT)), (0, 0));
    }

    #[test]
    fn a_request_goes_on_at_no_endpoint_that_was_replaced() {
        let mut ledger = InFlight::default();
        let mut ticket = ledger.admit(AT, 100);
        ledger.suspend(&mut ticket);
        let replaced = EndpointRef {
            generation: Generation(2),
            ..AT
        };
        let other = ledger.admit(replaced, 7);
        ledger.resume(&mut ticket);
        assert_eq!(ledger.requests(replaced), 1);
        ledger.release(ticket);
        ledger.release(other);
        assert_eq!(ledger.rows().count(), 0);
    }

    #[test]
    fn an_engine_lacks_requests_only_by_both_of_its_numbers() {
        let report = |running, queued| EndpointMetrics {
            running_requests: running,
            queue_depth: queued,
            ..EndpointMetrics::default()
        };
        let mut ledger = InFlight::default();
        let mut tickets: Vec<_> = (0..5).map(|_| ledger.admit(AT, 1)).collect();
        assert_eq!(
            ledger.absent(AT, &report(Some(0.0), Some(0.0))),
            0,
            "no scrape since"
        );
        ledger.scraped(&[AT], &[report(Some(0.0), Some(0.0))]);
        assert!(!ledger.has_counted(AT), "it has never reported one");
        ledger.scraped(&[AT], &[report(Some(1.0), Some(0.0))]);
        ledger.scraped(&[AT], &[report(Some(0.0), Some(0.0))]);
        assert!(ledger.has_counted(AT));
        for (running, queued, absent) in [
            (Some(2.0), Some(1.0), 2),
            (Some(5.0), Some(9.0), 0),
            (Some(f32::NAN), Some(0.0), 0),
            (Some(2.0), None, 0),
            (None, Some(0.0), 0),
        ] {
            assert_eq!(ledger.absent(AT, &report(running, queued)), absent);
        }
        if let Some(first) = tickets.first_mut() {
            ledger.suspend(first);
        }
        assert_eq!(
            ledger.absent(AT, &report(Some(2.0), Some(1.0))),
            1,
            "one is known"
        );
        tickets
            .into_iter()
            .for_each(|ticket| ledger.release(ticket));
    }
}
