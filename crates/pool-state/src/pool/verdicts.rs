//! Applies the verdict on an answer, or on a missing answer, to the endpoint that got the request.

use proto::placements::PlacementKind;
use scheduler::EndpointRef;

use super::crash_correlation::{self, PromptSuspicion};
use super::ejection::EjectionCause;
use super::health::{self, FailureWeight};
use super::shared_streak;
use super::witnesses::{RequestFailure, Witness, WitnessMark};
use super::{LedgerHold, ManagedPool};
use crate::verdict::Verdict;
use scheduler::Timestamp;

/// The properties of a request that the verdict on its answer depends on.
#[derive(Clone, Copy, Debug)]
pub struct SentRequest {
    /// API and model of the request, and whether it is streamed, as a hash. Every endpoint that has
    /// the model serves requests of the same kind.
    pub kind: u64,
    /// The client's credentials, as a hash.
    pub credentials: u64,
    /// The client, as a hash.
    pub client: u64,
    /// Whether the body names an object that an engine may have stored, as `previous_response_id`
    /// does. If the object is not there, that is no fault of an engine.
    pub names_id: bool,
    /// The status of the answer.
    pub status: u16,
    /// Hash of the prompt; 0 without one.
    pub prompt: u64,
    /// The time when the request was sent.
    pub at: Timestamp,
}

// === impl SentRequest ===

impl SentRequest {
    /// The kind of requests with these credentials.
    fn kind_of_client(&self) -> u64 {
        self.kind ^ self.credentials.rotate_left(1)
    }
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Records an attempt without an answer.
    pub fn record_unanswered(
        &mut self,
        endpoint: EndpointRef,
        held: &mut LedgerHold,
        failure: RequestFailure,
        now: Timestamp,
    ) {
        // A request may outlive its endpoint, and a row for an endpoint that left the pool would
        // never be removed.
        if self.endpoints.knows(endpoint) {
            self.ledger.counters.count_failed(endpoint);
            self.record_failure(endpoint, held, failure, now);
        }
    }

    /// Whether a request from this client may be sent, if its prompt has this hash. 0 means no
    /// prompt.
    pub fn suspect_prompt(&mut self, prompt: u64, client: u64, now: Timestamp) -> PromptSuspicion {
        let failures = &mut self.endpoints.failures;
        if prompt == 0 {
            return PromptSuspicion::None;
        }
        failures
            .crashing
            .judge(prompt, client, &failures.health, now)
    }

    /// Records that the connection was lost after a request with this prompt hash from this client
    /// was sent.
    pub fn record_lost_connection(
        &mut self,
        endpoint: EndpointRef,
        prompt: u64,
        client: u64,
        now: Timestamp,
    ) {
        if prompt != 0 && self.endpoints.knows(endpoint) {
            let mark = crash_correlation::mark(prompt, client);
            let crashing = &mut self.endpoints.failures.crashing;
            crashing.record(mark, endpoint, false, now);
            self.cache
                .placements
                .push(PlacementKind::Confirmed, endpoint, &[mark], 0);
        }
    }

    /// Whether the endpoint answered anything within the last second.
    pub fn is_alive(&self, endpoint: EndpointRef, now: Timestamp) -> bool {
        self.endpoints
            .failures
            .health
            .answered_at(endpoint)
            .is_some_and(|at| now.ms_since(at) <= health::FRESH_MS)
    }

    /// Records that an endpoint answered a request that was sent to it at `sent`. `client` is the
    /// client of a good answer to inference: other answers, as to `GET /v1/models`, also come from
    /// broken engines. The verdict follows later.
    pub fn record_answer(
        &mut self,
        endpoint: EndpointRef,
        client: Option<u64>,
        sent: Timestamp,
        now: Timestamp,
    ) {
        let client = client.map(WitnessMark::of_client);
        if self.endpoints.knows(endpoint) {
            let health = &mut self.endpoints.failures.health;
            if health.record_answer(endpoint, client, now) {
                let kind = shared_streak::ANSWERED;
                let mark = client.unwrap_or_default();
                shared_streak::publish(&mut self.cache.placements, kind, endpoint, mark);
            }
        }
        self.ledger.changes += u64::from(
            self.endpoints
                .failures
                .ejections
                .record_answer(endpoint, false, sent, now),
        );
        self.ledger.counters.count_served(endpoint);
    }

    /// Applies the verdict on an endpoint's answer, by the table of [`crate::verdict`].
    pub fn apply_verdict(
        &mut self,
        endpoint: EndpointRef,
        verdict: Verdict,
        sent: &SentRequest,
        held: &mut LedgerHold,
        now: Timestamp,
    ) {
        if !self.endpoints.knows(endpoint) {
            return;
        }
        let seen = WitnessMark::of_client(sent.client);
        self.endpoints.failures.health.note_client(seen, now);
        match verdict {
            Verdict::Success => {
                self.endpoints
                    .failures
                    .accepted
                    .record(sent.kind, sent.client, endpoint, now);
                self.endpoints.failures.accepted.record(
                    sent.kind_of_client(),
                    sent.client,
                    endpoint,
                    now,
                );
                self.endpoints.failures.crashing.forget(sent.prompt);
                self.record_success(endpoint, sent.at, held, now);
                let health = &mut self.endpoints.failures.health;
                if health.record_success(endpoint, sent.prompt, now) {
                    let kind = shared_streak::ENDED;
                    shared_streak::publish(&mut self.cache.placements, kind, endpoint, seen);
                }
                self.eject_overdue(now);
            }
            _ => {
                if let Some(witness) = self.witness(endpoint, verdict, sent, now) {
                    let failure = RequestFailure::Answer(witness, sent.client);
                    self.record_failure(endpoint, held, failure, now);
                }
            }
        }
    }

    /// Ejects an endpoint that failed before any other endpoint had answered.
    fn eject_overdue(&mut self, now: Timestamp) {
        let failures = &mut self.endpoints.failures;
        let ejections = &mut failures.ejections;
        let is_ejected = |endpoint| ejections.has_failures(endpoint);
        if let Some(endpoint) = failures.health.overdue(is_ejected, now) {
            let is_quiet = failures.health.is_quiet(endpoint, now);
            let cause = EjectionCause::by_answers(is_quiet);
            ejections.eject(endpoint, cause, self.planner.rng.open01(), now);
            self.ledger.changes += 1;
        }
    }

    /// Returns what the verdict's failure counts for, a prompt or a client, if the endpoint may be
    /// the reason. A failure may be the engine's fault. A refusal is the engine's fault only if
    /// another endpoint recently accepted the same kind of request. While other clients succeed,
    /// all failures of a client without a success count as one, and refused credentials count as
    /// none.
    fn witness(
        &self,
        endpoint: EndpointRef,
        verdict: Verdict,
        sent: &SentRequest,
        now: Timestamp,
    ) -> Option<Witness> {
        let accepted = &self.endpoints.failures.accepted;
        let client = sent.kind_of_client();
        let is_credentials = matches!(sent.status, 401 | 403);
        let is_possible = match verdict {
            Verdict::Success | Verdict::Unknown => false,
            Verdict::Ill | Verdict::Overloaded => true,
            _ if sent.names_id && matches!(sent.status, 400 | 404) => false,
            _ if is_credentials => accepted.accepted_elsewhere(client, endpoint, now),
            Verdict::ClientFault | Verdict::Misdirected | Verdict::Strange => {
                accepted.accepted_elsewhere(sent.kind, endpoint, now)
            }
        };
        let is_outsider =
            is_possible && !accepted.accepted(client, now) && accepted.accepted(sent.kind, now);
        is_possible.then_some(if is_outsider {
            Witness::Client(client)
        } else {
            Witness::Prompt(sent.prompt)
        })
    }

    /// Records that the endpoint serves a request sent at `sent` successfully.
    pub fn record_success(
        &mut self,
        endpoint: EndpointRef,
        sent: Timestamp,
        held: &mut LedgerHold,
        now: Timestamp,
    ) {
        if self
            .endpoints
            .failures
            .ejections
            .record_answer(endpoint, true, sent, now)
        {
            if self.endpoints.failures.health.reset(endpoint) {
                let kind = shared_streak::ENDED;
                let nobody = WitnessMark::default();
                shared_streak::publish(&mut self.cache.placements, kind, endpoint, nobody);
            }
            self.ledger.changes += 1;
        }
        held.probe = held.probe.filter(|(probe, _)| *probe != endpoint);
    }

    /// Whether the request is a probe of an endpoint that was ejected.
    pub fn is_probe(held: &LedgerHold) -> bool {
        held.probe.is_some()
    }

    fn record_failure(
        &mut self,
        endpoint: EndpointRef,
        held: &mut LedgerHold,
        failure: RequestFailure,
        now: Timestamp,
    ) {
        let health = &mut self.endpoints.failures.health;
        let ejections = &mut self.endpoints.failures.ejections;
        let is_probe = held.probe.is_some_and(|(probe, _)| probe == endpoint);
        let weight = if is_probe {
            health.record_failed_probe(endpoint, failure, now)
        } else {
            health.record_failure(endpoint, failure, now)
        };
        if let Some(mark) = failure.mark()
            && weight != FailureWeight::Nothing
        {
            let kind = shared_streak::FAILED;
            shared_streak::publish(&mut self.cache.placements, kind, endpoint, mark);
            self.ledger.changes += 1;
        }
        if weight != FailureWeight::Ejects {
            // A failed probe that does not eject stays recorded. Its end makes room for the next
            // probe.
            return;
        }
        let cause = match failure {
            RequestFailure::Answer(..) => EjectionCause::by_answers(health.is_quiet(endpoint, now)),
            RequestFailure::Refused | RequestFailure::Lost(..) => EjectionCause::Connections,
        };
        let chance = self.planner.rng.open01();
        if is_probe {
            held.probe = None;
            ejections.probe_failed(endpoint, cause, chance, now);
            self.ledger.changes += 1;
        } else {
            self.ledger.changes += u64::from(ejections.eject(endpoint, cause, chance, now));
        }
    }
}
