//! Records which endpoints lately accepted a kind of request. A kind is an API and a model, or an
//! API, a model and a client's credentials.
//!
//! A refusal shows that request and engine do not fit, but not which of them is wrong. So a refusal
//! counts against an endpoint only if another endpoint recently accepted the same kind. A client
//! without a recent success counts as one failure, however many of its requests fail
//! ([`super::verdicts`]).

use scheduler::EndpointRef;

use scheduler::Timestamp;

/// The maximum number of kinds of requests. Beyond it, the kind that was accepted least recently is
/// dropped. If the client already has half of the kinds, one of its own is dropped. A pool usually
/// serves a few models, to some clients at a time.
const KINDS_MAX: usize = 256;

/// How long an acceptance proves that a kind of request is valid, in ms.
const LATELY_MS: u64 = 60_000;

/// Kinds of requests, each with the last two endpoints that accepted it.
#[derive(Debug, Default)]
pub(super) struct AcceptedKinds {
    rows: Vec<AcceptedKind>,
}

#[derive(Clone, Copy, Debug)]
struct AcceptedKind {
    kind: u64,
    /// The client whose request came first, as a hash.
    client: u64,
    last: (EndpointRef, Timestamp),
    before: Option<(EndpointRef, Timestamp)>,
}

// === impl AcceptedKinds ===

impl AcceptedKinds {
    /// Records that the endpoint accepted a request of this kind from this client.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn record(&mut self, kind: u64, client: u64, endpoint: EndpointRef, now: Timestamp) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.kind == kind) {
            if row.last.0 != endpoint {
                row.before = Some(row.last);
            }
            row.last = (endpoint, now);
            return;
        }
        let row = AcceptedKind {
            kind,
            client,
            last: (endpoint, now),
            before: None,
        };
        if self.rows.len() < KINDS_MAX {
            self.rows.push(row);
            return;
        }
        let own = self.rows.iter().filter(|row| row.client == client).count();
        let may_go = |row: &&mut AcceptedKind| own < KINDS_MAX / 2 || row.client == client;
        let oldest = self.rows.iter_mut().filter(may_go);
        if let Some(oldest) = oldest.min_by_key(|row| row.last.1) {
            *oldest = row;
        }
    }

    /// Whether any endpoint accepted the kind recently.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn accepted(&self, kind: u64, now: Timestamp) -> bool {
        self.rows
            .iter()
            .any(|row| row.kind == kind && now.ms_since(row.last.1) < LATELY_MS)
    }

    /// Whether another endpoint accepted the kind recently.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn accepted_elsewhere(
        &self,
        kind: u64,
        endpoint: EndpointRef,
        now: Timestamp,
    ) -> bool {
        let row = self.rows.iter().find(|row| row.kind == kind);
        let accepted = row
            .map(|row| [Some(row.last), row.before])
            .unwrap_or_default();
        accepted
            .iter()
            .flatten()
            .any(|&(other, at)| other != endpoint && now.ms_since(at) < LATELY_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::{Generation, Slot};

    fn id(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(0).plus_ms(ms)
    }

    #[test]
    fn another_endpoint_must_have_accepted_the_same_lately() {
        let mut accepted = AcceptedKinds::default();
        assert!(!accepted.accepted_elsewhere(1, id(0), at(0)));
        accepted.record(1, 9, id(0), at(0));
        assert!(!accepted.accepted_elsewhere(1, id(0), at(1)), "itself");
        assert!(
            accepted.accepted_elsewhere(1, id(1), at(1))
                && !accepted.accepted_elsewhere(2, id(1), at(1))
        );
        assert!(
            accepted.accepted(1, at(1))
                && !accepted.accepted(2, at(1))
                && !accepted.accepted(1, at(LATELY_MS))
        );
        accepted.record(1, 9, id(1), at(10));
        accepted.record(1, 9, id(1), at(20));
        assert!(
            accepted.accepted_elsewhere(1, id(1), at(21)),
            "the first is remembered beside the last"
        );
        assert!(
            !accepted.accepted_elsewhere(1, id(1), at(LATELY_MS)),
            "and forgotten in the end"
        );
    }

    #[test]
    fn the_least_recently_accepted_make_room() {
        let mut accepted = AcceptedKinds::default();
        (0..=KINDS_MAX as u64).for_each(|kind| accepted.record(kind, 9, id(0), at(kind)));
        assert!(
            !accepted.accepted_elsewhere(0, id(1), at(100))
                && accepted.accepted_elsewhere(1, id(1), at(100))
        );
        assert_eq!(accepted.rows.len(), KINDS_MAX);
    }

    #[test]
    fn the_kinds_of_one_client_displace_at_most_half() {
        let mut accepted = AcceptedKinds::default();
        (0..100).for_each(|kind| accepted.record(kind, 1, id(0), at(kind)));
        (1_000..5_000).for_each(|kind| accepted.record(kind, 2, id(0), at(kind)));
        assert!((0..100).all(|kind| accepted.accepted(kind, at(5_000))));
    }
}
