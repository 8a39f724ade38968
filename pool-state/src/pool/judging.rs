//! What follows from an answer, or from none, for the endpoint that was asked.

use scheduler::EndpointRef;

use super::health::{self, Failure};
use super::{Held, Pool, crashing};
use crate::time::Time;
use crate::verdict::Verdict;

/// What was sent, as far as its answer is judged by it.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// API and model of the request, as a hash: requests of one kind are served by all endpoints that have the model.
    pub kind: u64,
    /// The client's credentials, as a hash.
    pub credentials: u64,
    /// The status of the answer.
    pub status: u16,
    /// Hash of the whole prompt; 0 without one.
    pub prompt: u64,
    /// When it was sent.
    pub at: Time,
}

// === impl Sent ===

impl Sent {
    /// The kind, of this client alone.
    fn client(&self) -> u64 {
        self.kind ^ self.credentials.rotate_left(1)
    }

    /// What was refused: the client, or the model to any client.
    fn refused(&self) -> u64 {
        if matches!(self.status, 401 | 403) { self.client() } else { self.kind }
    }
}

// === impl Pool ===

impl Pool {
    /// An attempt got no answer.
    pub fn unanswered(&mut self, endpoint: EndpointRef, held: &mut Held, failure: Failure, now: Time) {
        // Requests under way outlive their endpoint; nothing would ever clear a row of one that is gone.
        if self.knows(endpoint) {
            self.counters.failed(endpoint);
            self.hold_against(endpoint, held, failure, now);
        }
    }

    /// The connection was lost over the prompt of this hash after it was sent.
    pub fn lost(&mut self, endpoint: EndpointRef, prompt: u64, now: Time) {
        if prompt != 0 && self.knows(endpoint) {
            let mark = crashing::mark(prompt);
            self.crashing.note(mark, endpoint, now);
            self.untold.keep(endpoint, &[mark], 0);
        }
    }

    /// Did the endpoint answer anything within the last second?
    pub fn is_alive(&self, endpoint: EndpointRef, now: Time) -> bool {
        self.health.answered_at(endpoint).is_some_and(|at| now.ms_since(at) <= health::FRESH_MS)
    }

    /// An endpoint answered a request that was sent to it at `sent`: what it said is judged later.
    pub fn answered(&mut self, endpoint: EndpointRef, sent: Time, now: Time) {
        if self.knows(endpoint) {
            self.health.answered(endpoint, now);
        }
        self.changes += u64::from(self.ejections.cleared(endpoint, false, sent, now));
        self.counters.served(endpoint);
    }

    /// The answer of an endpoint means this, by the table of [`crate::verdict`].
    pub fn judged(&mut self, endpoint: EndpointRef, verdict: Verdict, sent: &Sent, held: &mut Held, now: Time) {
        if !self.knows(endpoint) {
            return;
        }
        match verdict {
            Verdict::Success => {
                self.accepted.note(sent.kind, endpoint, now);
                self.accepted.note(sent.client(), endpoint, now);
                self.crashing.forget(sent.prompt);
                self.did_well(endpoint, sent.at, held, now);
                self.health.succeeded(endpoint, sent.prompt, now);
            }
            Verdict::Ill | Verdict::Overloaded => self.hold_against(endpoint, held, Failure::Answer, now),
            Verdict::Misdirected | Verdict::Strange if self.accepted.elsewhere(sent.refused(), endpoint, now) => {
                self.hold_against(endpoint, held, Failure::Answer, now);
            }
            Verdict::Misdirected | Verdict::Strange | Verdict::ClientFault | Verdict::Unknown => {}
        }
    }

    /// The endpoint serves a request that was sent at `sent` well.
    pub fn did_well(&mut self, endpoint: EndpointRef, sent: Time, held: &mut Held, now: Time) {
        if self.ejections.cleared(endpoint, true, sent, now) {
            self.health.mended(endpoint);
            self.changes += 1;
        }
        held.probe = held.probe.filter(|(probe, _)| *probe != endpoint);
    }

    /// Is the request a probe of an endpoint that was ejected?
    pub fn is_probe(held: &Held) -> bool {
        held.probe.is_some()
    }

    fn hold_against(&mut self, endpoint: EndpointRef, held: &mut Held, failure: Failure, now: Time) {
        let (is_reason, by_answers) = (self.health.failed(endpoint, failure, now), failure == Failure::Answer);
        if held.probe.is_some_and(|(probe, _)| probe == endpoint) {
            held.probe = None;
            self.ejections.probe_failed(endpoint, by_answers, self.rng.open01(), now);
            self.changes += 1;
        } else if is_reason {
            let chance = self.rng.open01();
            self.changes += u64::from(self.ejections.eject(endpoint, by_answers, chance, now));
        }
    }
}
