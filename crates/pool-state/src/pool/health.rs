//! Failure accrual: records how each endpoint answered lately, and decides when to eject it.
//!
//! A failed answer is as much evidence against its request as against its endpoint. So failures are
//! counted by [`Witness`]. A prompt counts once at an endpoint, however often it fails there, until
//! some other prompts have failed. A client that succeeds nowhere also counts once. The failure of
//! a prompt that succeeds at another endpoint always counts. While there are several clients, only
//! a few failures of one client count ([`super::failure_streak`]). The counted failures eject an
//! endpoint if
//!
//! - they are [`STREAK`] in a row, or half of all answers within [`WINDOW_MS`];
//! - and they are at least [`STREAK`] more than twice the number that the other endpoints' failure
//!   rate predicts.
//!
//! So requests that fail at all endpoints alike, as in a wave of bad prompts, eject no endpoint. A
//! failed probe ejects again if the other endpoints fail at most half of the time. One client whose
//! requests fail everywhere hides no broken endpoint ([`comparison`]).
//!
//! Connections have rules of their own. A refused connection ejects at once, because no prompt
//! causes one. A lost connection ejects if two were lost in a row, or if the endpoint did not
//! answer within the last [`FRESH_MS`]. While there are several clients, the losses of one client
//! do not eject, unless another endpoint then served the same request. Instead, requests of this
//! client avoid the endpoint for a while (`connection_losses.rs`). Neither kind ejects while
//! most other endpoints fail as well.
//!
//! Failures that do not eject still cost: [`EndpointHealthTable::excess_failures`] is what the
//! scheduler charges.
//!
//! Each VM counts the answers that it gets itself. The workers of a process share their streaks
//! ([`super::shared_streak`]), and all proxies their ejections ([`super::ejection`]).

mod comparison;

use scheduler::{ENDPOINTS_MAX, EndpointRef};

use scheduler::Timestamp;

use super::answer_window::{AnswerCounts, AnswerWindow, WINDOW_MS};
use super::connection_losses::ConnectionLosses;
use super::failure_streak::FailureStreak;
use super::witnesses::{RequestFailure, SeenClients, Witness, WitnessMark};

/// This many failures in a row eject, like Envoy's `consecutive_5xx`. An endpoint must also have
/// this many failures more than twice the number that the other endpoints' failure rate predicts.
pub(super) const STREAK: f32 = 5.0;

/// An answer within this many ms shows that the endpoint is alive.
pub(super) const FRESH_MS: u64 = 1_000;

/// The maximum number of prompts that succeeded last and are remembered with their endpoint.
/// Clients rarely repeat more prompts at a time.
const SERVED_MAX: usize = 64;

/// Successes added to the answers of an endpoint, so that one or two failures make no high failure
/// rate.
const PRIOR_ANSWERS: f32 = 10.0;

/// The answers of every endpoint to one VM.
#[derive(Debug, Default)]
pub(super) struct EndpointHealthTable {
    /// The health of each endpoint, by slot.
    rows: Vec<EndpointHealth>,
    /// The time of the last failure.
    failed_at: Option<Timestamp>,
    /// The prompts that succeeded last, and where the next is written.
    served: Vec<(u64, EndpointRef)>,
    next_served: usize,
    /// When each endpoint last answered anything at all, by slot, in ns; 0 means never.
    answered: Vec<u64>,
    clients: SeenClients,
}

/// The effect of a failure on its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureWeight {
    /// No effect, as when the same prompt or client has failed there before.
    Nothing,
    /// The endpoint's streak of failures grows by one.
    Counts,
    /// The endpoint must be ejected.
    Ejects,
}

#[derive(Clone, Copy, Debug, Default)]
struct EndpointHealth {
    endpoint: Option<EndpointRef>,
    streak: FailureStreak,
    losses: ConnectionLosses,
    /// The last two successes of prompts with different hashes, with their times.
    succeeded: [Option<(u64, Timestamp)>; 2],
    window: AnswerWindow,
}

// === impl EndpointHealthTable ===

impl EndpointHealthTable {
    /// Records an answer, good or bad, which shows that the endpoint accepts connections. `client`
    /// is that of a good answer to inference. Returns whether the other workers must know this.
    pub(super) fn record_answer(
        &mut self,
        endpoint: EndpointRef,
        client: Option<WitnessMark>,
        now: Timestamp,
    ) -> bool {
        if let Some(row) = self.row(endpoint) {
            row.losses.end();
        }
        if let Some(answered) = self.answered.get_mut(usize::from(endpoint.slot.0)) {
            *answered = now.0.max(1);
        }
        client.is_some_and(|client| self.note_answer(endpoint, client, now))
    }

    /// Records that a good reply to this client began here, or in another worker of this process.
    /// Returns whether the other workers must know this.
    pub(super) fn note_answer(
        &mut self,
        endpoint: EndpointRef,
        client: WitnessMark,
        now: Timestamp,
    ) -> bool {
        self.note_client(client, now);
        self.row(endpoint)
            .is_some_and(|row| row.streak.note_answer(client, now))
    }

    /// Records a success. `prompt` is the hash of the whole prompt, 0 without one. Returns whether
    /// it ended a streak.
    pub(super) fn record_success(
        &mut self,
        endpoint: EndpointRef,
        prompt: u64,
        now: Timestamp,
    ) -> bool {
        let Some(row) = self.row(endpoint) else {
            return false;
        };
        let ended = row.streak.end();
        row.window.counts_at(now).good += 1.0;
        if row.succeeded[0].is_some_and(|(other, _)| other != prompt) {
            row.succeeded[1] = row.succeeded[0];
        }
        row.succeeded[0] = Some((prompt, now));
        match self.served.get_mut(self.next_served) {
            Some(oldest) => *oldest = (prompt, endpoint),
            None => self.served.push((prompt, endpoint)),
        }
        self.next_served = (self.next_served + 1) % SERVED_MAX;
        ended
    }

    /// Records a failure that another worker of this process saw.
    pub(super) fn record_peer_failure(
        &mut self,
        endpoint: EndpointRef,
        mark: WitnessMark,
        now: Timestamp,
    ) {
        self.note_client(mark.client(), now);
        let of_one_client_max = self.clients.of_one_client_max(now);
        if let Some(row) = self.row(endpoint)
            && row.streak.counts(mark, false, of_one_client_max, now)
        {
            row.streak.lengthen(mark.client_of(of_one_client_max), now);
        }
    }

    /// Records that a client got an answer, from this worker or another one of this process.
    pub(super) fn note_client(&mut self, client: WitnessMark, now: Timestamp) {
        self.clients.note(client, now);
    }

    /// Records that another worker of this process saw the endpoint succeed after failures.
    pub(super) fn end_streak(&mut self, endpoint: EndpointRef) {
        if let Some(row) = self.row(endpoint) {
            row.streak.end();
        }
    }

    /// Records a failure. Returns its effect.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn record_failure(
        &mut self,
        endpoint: EndpointRef,
        failure: RequestFailure,
        now: Timestamp,
    ) -> FailureWeight {
        let is_alive = self
            .answered_at(endpoint)
            .is_some_and(|at| now.ms_since(at) <= FRESH_MS);
        let is_paired = matches!(failure, RequestFailure::Answer(Witness::Prompt(prompt), _) if self.succeeds_elsewhere(endpoint, prompt));
        let by_connection = !matches!(failure, RequestFailure::Answer(..));
        if let RequestFailure::Lost(_, Some(client)) = failure {
            self.note_client(WitnessMark::of_client(client), now);
            self.failed_at = Some(now);
        }
        let of_one_client_max = self.clients.of_one_client_max(now);
        let Some(row) = self.row(endpoint) else {
            return FailureWeight::Nothing;
        };
        let due = match failure {
            RequestFailure::Answer(..) => false,
            RequestFailure::Refused => true,
            RequestFailure::Lost(prompt, client) => {
                let client = client.filter(|_| of_one_client_max < usize::MAX);
                row.losses.record(prompt, client, is_alive, now)
            }
        };
        let counts = match failure.mark() {
            Some(mark) if !by_connection || of_one_client_max < usize::MAX => {
                let is_repeated = is_paired || by_connection;
                row.streak.counts(mark, is_repeated, of_one_client_max, now)
            }
            _ => true,
        };
        if !counts && !due {
            return FailureWeight::Nothing;
        }
        let mark = failure.mark().unwrap_or_default();
        row.streak.lengthen(mark.client_of(of_one_client_max), now);
        let counts = row.window.counts_at(now);
        counts.bad += 1.0;
        counts.outsiders += f32::from(u8::from(matches!(
            failure,
            RequestFailure::Answer(Witness::Client(_), _)
        )));
        let streak = row.streak.length();
        self.failed_at = Some(now);
        let ejects = if due {
            !self.most_others_fail(endpoint, now)
        } else {
            self.fails_more(endpoint, streak, now)
        };
        if ejects {
            FailureWeight::Ejects
        } else {
            FailureWeight::Counts
        }
    }

    /// Records that a probe failed. Returns the effect.
    pub(super) fn record_failed_probe(
        &mut self,
        endpoint: EndpointRef,
        failure: RequestFailure,
        now: Timestamp,
    ) -> FailureWeight {
        let weight = self.record_failure(endpoint, failure, now);
        let ejects = match failure {
            // Otherwise one prompt that fails everywhere would keep the endpoint ejected, or one
            // client would although the endpoint answers others.
            _ if weight == FailureWeight::Nothing => false,
            RequestFailure::Answer(_, client) => !self.others_fail_too(endpoint, client, now),
            RequestFailure::Refused | RequestFailure::Lost(..) => true,
        };
        match weight {
            _ if ejects => FailureWeight::Ejects,
            FailureWeight::Ejects => FailureWeight::Counts,
            _ => weight,
        }
    }

    /// Forgets the answers of an endpoint that was ejected and works again. Returns whether that
    /// ended a streak.
    pub(super) fn reset(&mut self, endpoint: EndpointRef) -> bool {
        let Some(row) = self.row(endpoint) else {
            return false;
        };
        row.losses.end();
        row.window = AnswerWindow::default();
        row.streak.end()
    }

    /// When the endpoint last answered this VM; `None` for never.
    pub(super) fn answered_at(&self, endpoint: EndpointRef) -> Option<Timestamp> {
        self.known(endpoint)?;
        self.answered
            .get(usize::from(endpoint.slot.0))
            .filter(|at| **at > 0)
            .map(|at| Timestamp(*at))
    }

    /// Whether the endpoint succeeded here within the last `ms`, and no failure has counted since.
    pub(super) fn succeeds(&self, endpoint: EndpointRef, ms: u64, now: Timestamp) -> bool {
        let row = self
            .known(endpoint)
            .filter(|row| row.streak.length() <= 0.0);
        let last = row.and_then(|row| row.succeeded[0]);
        last.is_some_and(|(_, at)| now.ms_since(at) <= ms)
    }

    /// When each endpoint last answered, in ns, by slot; 0 means never.
    pub(super) fn last_answers(&self) -> &[u64] {
        &self.answered
    }

    /// Whether the endpoint succeeded with another prompt after `since`.
    pub(super) fn succeeded_with_another(
        &self,
        endpoint: EndpointRef,
        prompt: u64,
        since: Timestamp,
    ) -> bool {
        let succeeded = self.known(endpoint).map_or([None; 2], |row| row.succeeded);
        succeeded
            .iter()
            .flatten()
            .any(|&(other, at)| other != prompt && at >= since)
    }

    /// Writes the failure rate of each of `endpoints` minus twice the rate of the other endpoints;
    /// leaves `out` empty when none failed lately.
    pub(super) fn excess_failures(
        &self,
        endpoints: &[EndpointRef],
        now: Timestamp,
        out: &mut Vec<f32>,
    ) {
        out.clear();
        if !self.has_failed_lately(now) {
            return;
        }
        let answers = move |endpoint: &EndpointRef| self.answers(*endpoint, now);
        let all = || endpoints.iter().map(answers);
        let sum = all().fold(AnswerCounts::default(), |sum, one| AnswerCounts {
            good: sum.good + one.good,
            bad: sum.bad + one.bad,
            outsiders: 0.0,
        });
        let excess = |one: AnswerCounts| {
            let rest = AnswerCounts {
                good: sum.good - one.good,
                bad: sum.bad - one.bad,
                outsiders: 0.0,
            };
            (one.excess_over(rest) - one.outsiders.min(1.0)).max(0.0)
                / (one.count() + PRIOR_ANSWERS)
        };
        out.extend(all().map(excess));
    }

    /// Without a failure in the window, rates and losses need not be looked at.
    fn has_failed_lately(&self, now: Timestamp) -> bool {
        self.failed_at
            .is_some_and(|at| now.ms_since(at) < WINDOW_MS)
    }

    /// Marks the endpoints that requests of this client avoid, unless more than half of all
    /// endpoints would be marked: a few endpoints should not get all requests of a client. `out` is
    /// parallel to `endpoints`, or empty if no endpoint is marked.
    pub(super) fn mark_avoided(
        &self,
        endpoints: &[EndpointRef],
        client: u64,
        now: Timestamp,
        out: &mut Vec<bool>,
    ) {
        if !self.has_failed_lately(now) {
            return;
        }
        let client = WitnessMark::of_client(client);
        let avoided = |row: &&EndpointHealth| row.losses.is_avoided_by(client, now);
        let marked = out.iter().filter(|marked| **marked).count();
        if (marked + self.rows.iter().filter(avoided).count()) * 2 > endpoints.len() {
            return;
        }
        for row in self.rows.iter().filter(avoided) {
            let at = endpoints.iter().position(|id| row.endpoint == Some(*id));
            out.resize(endpoints.len(), false);
            if let Some(mark) = at.and_then(|at| out.get_mut(at)) {
                *mark = true;
            }
        }
    }

    /// An endpoint whose streak did not eject it when it failed, because no other endpoint had
    /// answered yet. `is_ejected` says whether an endpoint was ejected since.
    pub(super) fn overdue(
        &self,
        is_ejected: impl Fn(EndpointRef) -> bool,
        now: Timestamp,
    ) -> Option<EndpointRef> {
        let failing = self.rows.iter().filter(|row| row.streak.length() >= STREAK);
        failing
            .filter_map(|row| row.endpoint)
            .find(|&endpoint| !is_ejected(endpoint) && self.fails_more(endpoint, STREAK, now))
    }

    /// Whether this prompt was among the last that succeeded at another endpoint.
    fn succeeds_elsewhere(&self, endpoint: EndpointRef, prompt: u64) -> bool {
        prompt != 0
            && self
                .served
                .iter()
                .any(|(served, other)| *served == prompt && *other != endpoint)
    }

    fn others(&self, endpoint: EndpointRef) -> impl Iterator<Item = &EndpointHealth> {
        let rows = self.rows.iter();
        rows.filter(move |row| row.endpoint.is_some_and(|other| other != endpoint))
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn answers(&self, endpoint: EndpointRef, now: Timestamp) -> AnswerCounts {
        self.known(endpoint)
            .map_or(AnswerCounts::default(), |row| row.window.answers(now))
    }

    fn known(&self, endpoint: EndpointRef) -> Option<&EndpointHealth> {
        self.rows
            .get(usize::from(endpoint.slot.0))
            .filter(|row| row.endpoint == Some(endpoint))
    }

    /// The row of an endpoint. If another generation had the slot, the row starts empty.
    fn row(&mut self, endpoint: EndpointRef) -> Option<&mut EndpointHealth> {
        let slot = usize::from(endpoint.slot.0);
        if slot >= ENDPOINTS_MAX {
            return None;
        }
        if self.rows.len() <= slot {
            self.rows.resize(slot + 1, EndpointHealth::default());
            self.answered.resize(slot + 1, 0);
        }
        let row = self.rows.get_mut(slot)?;
        if row.endpoint != Some(endpoint) {
            *row = EndpointHealth {
                endpoint: Some(endpoint),
                ..EndpointHealth::default()
            };
            if let Some(answered) = self.answered.get_mut(slot) {
                *answered = 0;
            }
        }
        Some(row)
    }

    /// Removes the row of an endpoint that left the pool.
    pub(super) fn forget(&mut self, endpoint: EndpointRef) {
        let slot = usize::from(endpoint.slot.0);
        if let Some(row) = self
            .rows
            .get_mut(slot)
            .filter(|row| row.endpoint == Some(endpoint))
        {
            *row = EndpointHealth::default();
            if let Some(answered) = self.answered.get_mut(slot) {
                *answered = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::{Generation, Slot};

    const UNLIKE_ANY: RequestFailure = RequestFailure::Answer(Witness::Prompt(0), 1);

    fn id(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(0).plus_ms(ms)
    }

    fn ejects(
        health: &mut EndpointHealthTable,
        endpoint: EndpointRef,
        failure: RequestFailure,
        now: Timestamp,
    ) -> bool {
        health.record_failure(endpoint, failure, now) == FailureWeight::Ejects
    }

    fn probe_ejects(
        health: &mut EndpointHealthTable,
        endpoint: EndpointRef,
        failure: RequestFailure,
        now: Timestamp,
    ) -> bool {
        health.record_failed_probe(endpoint, failure, now) == FailureWeight::Ejects
    }

    /// A table where each of the first `endpoints` succeeded once.
    fn fine(endpoints: u16) -> EndpointHealthTable {
        let mut health = EndpointHealthTable::default();
        for slot in 0..endpoints {
            health.record_answer(id(slot), None, at(20_000));
            health.record_success(id(slot), 7, at(20_000));
        }
        health
    }

    fn fail(health: &mut EndpointHealthTable, endpoint: EndpointRef, from_ms: u64, times: u64) {
        for n in 0..times {
            health.record_failure(endpoint, UNLIKE_ANY, at(from_ms + n));
        }
    }

    #[test]
    fn five_bad_answers_in_a_row_eject_where_others_succeed() {
        let mut health = fine(4);
        let verdicts: Vec<bool> = (0..5)
            .map(|n| ejects(&mut health, id(0), UNLIKE_ANY, at(20_001 + n)))
            .collect();
        assert_eq!(verdicts, [false, false, false, false, true]);
        let mut alone = EndpointHealthTable::default();
        assert!(
            (0..20).all(|n| !ejects(&mut alone, id(0), UNLIKE_ANY, at(n))),
            "no other endpoint does better"
        );
    }

    #[test]
    fn a_success_in_between_ends_a_streak_and_half_of_all_failing_is_a_rate() {
        let mut health = fine(4);
        let mut alternate = |n: u64| {
            health.record_success(id(0), 7, at(20_000 + n));
            ejects(&mut health, id(0), UNLIKE_ANY, at(20_000 + n))
        };
        assert!((0..4).all(|n| !alternate(n)));
        assert!(!alternate(4), "five of eleven");
        ejects(&mut health, id(0), UNLIKE_ANY, at(20_010));
        assert!(
            ejects(&mut health, id(0), UNLIKE_ANY, at(20_010)),
            "seven of twelve"
        );
    }

    #[test]
    fn a_wave_of_bad_prompts_ejects_no_endpoint() {
        let mut health = fine(4);
        for n in 0..400 {
            assert!(
                !ejects(
                    &mut health,
                    id(n % 4),
                    UNLIKE_ANY,
                    at(20_000 + u64::from(n))
                ),
                "{n}"
            );
        }
    }

    #[test]
    fn the_same_witness_counts_once_unless_the_prompt_succeeds_elsewhere() {
        let failed = |witness| RequestFailure::Answer(witness, 1);
        for witness in [Witness::Prompt(3), Witness::Client(3)] {
            let mut health = fine(4);
            assert!(!(0..4_000).any(|n| ejects(
                &mut health,
                id(0),
                failed(witness),
                at(20_001 + n)
            )));
            assert!(!(10..13).any(|n| ejects(
                &mut health,
                id(0),
                failed(Witness::Prompt(n)),
                at(24_500)
            )));
            assert!(
                !ejects(&mut health, id(0), failed(witness), at(24_500)),
                "four witnesses"
            );
            assert!(
                ejects(&mut health, id(0), failed(Witness::Prompt(13)), at(24_600)),
                "five"
            );
        }
        let mut health = fine(4);
        let due = (1..).find(|n| {
            ejects(
                &mut health,
                id(0),
                failed(Witness::Prompt(7)),
                at(20_001 + n),
            )
        });
        assert_eq!(due, Some(5), "others have served this prompt");
    }

    #[test]
    fn where_others_fail_too_it_takes_more_failures() {
        let mut health = fine(4);
        (0..30).for_each(|n| {
            health.record_success(id(1), n, at(20_000));
        });
        fail(&mut health, id(1), 20_000, 11);
        let due = (1..).find(|n| ejects(&mut health, id(0), UNLIKE_ANY, at(20_001 + n)));
        assert_eq!(
            due,
            Some(11),
            "of 12, where a quarter fails elsewhere: 11 - 2 * 12 / 4 = 5"
        );
    }

    #[test]
    fn a_failed_probe_ejects_again_unless_others_fail_or_its_witness_is_known_to() {
        let failed = |witness| RequestFailure::Answer(witness, 1);
        let mut health = fine(4);
        assert!(probe_ejects(
            &mut health,
            id(0),
            failed(Witness::Prompt(3)),
            at(20_001)
        ));
        assert!(
            !probe_ejects(&mut health, id(0), failed(Witness::Prompt(3)), at(20_002)),
            "the same prompt again, which may fail everywhere"
        );
        assert!(
            (0..2).all(|_| probe_ejects(
                &mut health,
                id(0),
                failed(Witness::Prompt(7)),
                at(20_002)
            )),
            "the same prompt again, which succeeds elsewhere"
        );
        assert!(probe_ejects(
            &mut health,
            id(0),
            failed(Witness::Client(9)),
            at(20_003)
        ));
        assert!(
            !probe_ejects(&mut health, id(0), failed(Witness::Client(9)), at(20_004)),
            "the same client again"
        );
        fail(&mut health, id(1), 20_000, 4);
        assert!(
            !probe_ejects(&mut health, id(0), failed(Witness::Prompt(4)), at(20_005)),
            "four of seven fail elsewhere"
        );
        assert!(probe_ejects(
            &mut health,
            id(0),
            RequestFailure::Refused,
            at(20_005)
        ));
    }

    #[test]
    fn a_lost_connection_ejects_at_once_unless_the_endpoint_is_known_to_be_alive() {
        let mut health = fine(4);
        assert!(
            ejects(
                &mut health,
                id(0),
                RequestFailure::Lost(3, Some(1)),
                at(21_001)
            ),
            "it has said nothing for more than a second"
        );
        assert!(
            !ejects(
                &mut health,
                id(1),
                RequestFailure::Lost(3, Some(1)),
                at(20_500)
            ),
            "it answered half a second ago"
        );
        assert!(
            !ejects(
                &mut health,
                id(1),
                RequestFailure::Lost(3, Some(1)),
                at(20_501)
            ),
            "the same prompt again"
        );
        health.record_answer(id(1), None, at(20_502));
        assert!(
            !ejects(
                &mut health,
                id(1),
                RequestFailure::Lost(4, Some(1)),
                at(20_503)
            ),
            "it answered in between"
        );
        assert!(
            ejects(
                &mut health,
                id(1),
                RequestFailure::Lost(5, Some(1)),
                at(20_504)
            ),
            "two prompts in a row"
        );
    }

    #[test]
    fn the_excess_is_over_twice_the_share_of_the_rest() {
        let mut health = fine(4);
        let mut out = Vec::new();
        let endpoints: Vec<EndpointRef> = (0..4).map(id).collect();
        health.excess_failures(&endpoints, at(20_000), &mut out);
        assert!(out.is_empty(), "nothing failed");
        fail(&mut health, id(2), 20_001, 3);
        health.excess_failures(&endpoints, at(20_010), &mut out);
        assert_eq!(out, [0.0, 0.0, 3.0 / 14.0, 0.0]);
        ejects(
            &mut health,
            id(3),
            RequestFailure::Answer(Witness::Client(9), 1),
            at(20_010),
        );
        health.excess_failures(&endpoints, at(20_010), &mut out);
        assert_eq!(out[3], 0.0, "one client that succeeds nowhere");
        health.excess_failures(&endpoints, at(40_000), &mut out);
        assert!(out.is_empty(), "long ago");
        (0..4).for_each(|slot| fail(&mut health, id(slot), 41_000, 50));
        health.excess_failures(&endpoints, at(41_100), &mut out);
        assert_eq!(out, [0.0; 4], "all alike");
    }

    #[test]
    fn another_life_at_the_slot_starts_clean() {
        let mut health = fine(2);
        fail(&mut health, id(0), 20_001, 4);
        let next = EndpointRef {
            generation: Generation(2),
            ..id(0)
        };
        assert!(!ejects(&mut health, next, UNLIKE_ANY, at(20_010)));
        assert_eq!(health.answered_at(next), None);
    }

    /// The endpoints work, and clients 1 to `clients` were seen a moment ago.
    fn fine_for(clients: u64) -> EndpointHealthTable {
        let mut health = fine(4);
        (1..=clients)
            .for_each(|client| health.note_client(WitnessMark::of_client(client), at(20_000)));
        health
    }

    #[test]
    fn one_client_of_several_ejects_no_endpoint_however_its_requests_fail() {
        for clients in [2, 3, 30] {
            let mut health = fine_for(clients);
            for n in 0..4_000 {
                if n % 20 == 0 {
                    health.record_success(id(0), 7, at(20_000 + n));
                }
                let prompts = [Witness::Prompt(n), Witness::Prompt(7), Witness::Client(n)];
                for witness in prompts {
                    let failure = RequestFailure::Answer(witness, 1);
                    assert!(!ejects(&mut health, id(0), failure, at(20_000 + n)), "{n}");
                }
            }
        }
    }

    #[test]
    fn a_broken_endpoint_is_found_by_several_clients_at_once_and_by_one_of_them_later() {
        let due = |clients, failing: u64| {
            let mut health = fine_for(clients);
            let failed = |n: u64| RequestFailure::Answer(Witness::Prompt(n), 1 + n % failing);
            (1..).find(|n| {
                health.record_success(id(1), 7, at(20_000 + n * 100));
                ejects(&mut health, id(0), failed(*n), at(20_000 + n * 100))
            })
        };
        assert_eq!(due(1, 1), Some(5), "one client is all there is");
        assert_eq!(
            (due(2, 2), due(3, 3), due(30, 5)),
            (Some(5), Some(5), Some(5))
        );
        assert_eq!(
            (due(2, 1), due(30, 2), due(30, 1)),
            (Some(102), Some(101), Some(201))
        );
    }

    #[test]
    fn one_client_of_several_prolongs_an_ejection_twice() {
        let mut health = fine_for(3);
        let mut lost = (0..100)
            .map(|n| RequestFailure::Answer(Witness::Prompt(n), 1))
            .map(|failure| probe_ejects(&mut health, id(0), failure, at(20_001)));
        assert_eq!(lost.by_ref().filter(|again| *again).count(), 2);
    }

    /// Loses connections over different prompts of these clients in turn, 100 ms apart, beside
    /// `seen` clients. Returns how many ejected endpoint 0.
    fn ejected_by_losses(seen: u64, clients: &[u64], answers: bool) -> Option<usize> {
        let mut health = fine_for(seen);
        (0..400)
            .zip(clients.iter().cycle())
            .find_map(|(n, client)| {
                let now = at(20_001 + n * 100);
                health.record_success(id(1), 7, now);
                if answers {
                    health.record_answer(id(0), None, now);
                }
                let failure = RequestFailure::Lost(n, Some(*client));
                ejects(&mut health, id(0), failure, now).then_some(n as usize + 1)
            })
    }

    #[test]
    fn the_lost_connections_of_one_client_of_several_eject_no_endpoint_that_answers() {
        for seen in [2, 3, 30] {
            let mut health = fine_for(seen);
            for n in 0..4_000 {
                let now = at(20_000 + n);
                let slot = (n % 4) as u16;
                assert!(
                    !ejects(&mut health, id(slot), RequestFailure::Lost(n, Some(1)), now),
                    "{n}"
                );
                if n % 20 == 0 {
                    (0..4).for_each(|slot| {
                        health.record_answer(id(slot), None, now);
                        health.record_success(id(slot), 7, now);
                    });
                }
            }
        }
    }

    #[test]
    fn lost_connections_of_two_clients_eject_as_fast_as_those_of_one_that_is_alone() {
        assert_eq!(ejected_by_losses(1, &[1], false), Some(2));
        assert_eq!(ejected_by_losses(2, &[1, 2], false), Some(2));
        assert_eq!(ejected_by_losses(30, &[1, 2, 3], false), Some(2));
        assert_eq!(
            ejected_by_losses(2, &[1, 2], true),
            Some(5),
            "it answers others in between"
        );
        let mut health = fine_for(30);
        let lost = RequestFailure::Lost(1, None);
        assert!(
            ejects(&mut health, id(0), lost, at(21_100)),
            "another endpoint served the request"
        );
    }

    #[test]
    fn only_the_client_whose_connection_was_lost_avoids_the_endpoint() {
        let avoided = |health: &EndpointHealthTable, client, ms| {
            let endpoints: Vec<EndpointRef> = (0..4).map(id).collect();
            let mut out = Vec::new();
            health.mark_avoided(&endpoints, client, at(ms), &mut out);
            out
        };
        let mut health = fine_for(3);
        health.record_failure(id(2), RequestFailure::Lost(3, Some(1)), at(20_001));
        health.record_answer(id(2), None, at(20_002));
        assert_eq!(avoided(&health, 1, 25_000), [false, false, true, false]);
        assert!(avoided(&health, 2, 25_000).is_empty(), "another client");
        assert!(avoided(&health, 1, 25_001).is_empty(), "five seconds later");
        health.record_failure(id(1), RequestFailure::Lost(4, Some(1)), at(20_001));
        assert_eq!(avoided(&health, 1, 20_010), [false, true, true, false]);
        health.record_failure(id(0), RequestFailure::Lost(5, Some(1)), at(20_001));
        assert!(avoided(&health, 1, 20_010).is_empty(), "more than half");
        let mut alone = fine_for(1);
        alone.record_failure(id(2), RequestFailure::Lost(3, Some(1)), at(20_001));
        assert!(avoided(&alone, 1, 20_002).is_empty(), "it has no share");
    }

    #[test]
    fn one_client_ejects_no_endpoint_that_answers_others_with_long_streams() {
        let fails = |is_lost, seen: u64| {
            let mut health = fine(4);
            (0..240).find(|n| {
                let now = at(20_000 + n * 500);
                for client in 1..=seen {
                    let slot = u16::from(client == 1);
                    let client = Some(WitnessMark::of_client(client));
                    health.record_answer(id(slot), client, now);
                }
                health.record_success(id(1), 7, now);
                let failure = if is_lost {
                    RequestFailure::Lost(*n, Some(1))
                } else {
                    RequestFailure::Answer(Witness::Prompt(*n), 1)
                };
                ejects(&mut health, id(0), failure, now)
            })
        };
        for seen in [2, 3, 30] {
            assert_eq!(
                (fails(true, seen), fails(false, seen)),
                (None, None),
                "{seen}"
            );
        }
        assert!(fails(false, 1).is_some(), "the only client");
    }

    #[test]
    fn one_good_answer_does_not_keep_a_broken_endpoint_in_service() {
        for clients in [2, 3, 30] {
            let mut health = fine_for(clients);
            let is_ejected = (0..50).any(|n| {
                let now = at(20_000 + n * 500);
                if n == 1 {
                    let client = Some(WitnessMark::of_client(2));
                    health.record_answer(id(0), client, now);
                }
                health.record_success(id(1), 7, now);
                let failure = RequestFailure::Answer(Witness::Prompt(n), 1);
                ejects(&mut health, id(0), failure, now)
            });
            assert!(is_ejected, "{clients} clients");
        }
    }

    #[test]
    fn a_broken_endpoint_stays_ejected_until_it_answers_another_client() {
        for clients in [2, 3, 30] {
            let mut health = fine_for(clients);
            let mut failures = (0..200).map(|n| {
                let failure = RequestFailure::Answer(Witness::Prompt(n), 1);
                (failure, at(20_000 + n * 500))
            });
            assert!(failures.by_ref().any(|(failure, now)| {
                health.record_success(id(1), 7, now);
                ejects(&mut health, id(0), failure, now)
            }));
            for (failure, now) in failures.by_ref().take(20) {
                health.record_success(id(1), 7, now);
                let is_ejected = probe_ejects(&mut health, id(0), failure, now);
                assert!(is_ejected, "{clients} clients");
            }
            let (_, now) = failures.next().unwrap();
            let other = Some(WitnessMark::of_client(2));
            health.record_answer(id(0), other, now);
            for (failure, now) in failures.take(19) {
                health.record_success(id(1), 7, now);
                let is_ejected = probe_ejects(&mut health, id(0), failure, now);
                assert!(!is_ejected, "{clients} clients");
            }
        }
    }

    #[test]
    fn failures_of_one_client_elsewhere_keep_no_endpoint_that_refuses_connections() {
        let is_ejected = |clients: [u64; 2]| {
            let mut health = fine_for(3);
            for (slot, client) in (1..4).flat_map(|slot| clients.map(|client| (slot, client))) {
                let witness = Witness::Prompt(u64::from(slot) * 100 + client);
                let failure = RequestFailure::Answer(witness, client);
                health.record_failure(id(slot), failure, at(20_001));
            }
            ejects(&mut health, id(0), RequestFailure::Refused, at(20_002))
        };
        assert!(is_ejected([1, 1]));
        assert!(!is_ejected([1, 2]), "the whole pool fails");
    }

    #[test]
    fn a_lost_probe_of_one_client_prolongs_an_ejection_twice() {
        let mut health = fine_for(3);
        let lost = (0..100).filter(|n| {
            let failure = RequestFailure::Lost(*n, Some(1));
            probe_ejects(&mut health, id(0), failure, at(20_001))
        });
        assert_eq!(lost.count(), 2);
    }
}
