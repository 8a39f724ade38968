//! Compares the answers of one endpoint with those of the other endpoints.
//!
//! In a pool with little traffic, one client whose requests fail everywhere makes most failures of
//! the other endpoints. Then an endpoint that fails for all clients seems as good as the others.
//! So the answers are compared twice: with all failures, and without those of the client that
//! failed last at another endpoint, neither there nor here.

use scheduler::{EndpointRef, Timestamp};

use super::{EndpointHealth, EndpointHealthTable, STREAK};
use crate::pool::answer_window::{AnswerCounts, TIMES_OTHERS, WINDOW_MS};
use crate::pool::witnesses::WitnessMark;

/// A worker that lately got fewer answers of other endpoints than this has little traffic: one
/// probe in five seconds would be more than a tenth of its requests.
const QUIET_ANSWERS: f32 = 16.0;

/// All failures count.
const NO_CLIENT: WitnessMark = WitnessMark(0);

// === impl EndpointHealthTable ===

impl EndpointHealthTable {
    /// Whether the endpoint fails more than the other endpoints, and too much to be used.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn fails_more(&self, endpoint: EndpointRef, streak: f32, now: Timestamp) -> bool {
        let Some(row) = self.known(endpoint) else {
            return false;
        };
        let fails_without = |without: WitnessMark| {
            let own = row.answers_without(without, now);
            let rest = self.others_answers(endpoint, without, now);
            (streak >= STREAK || own.failure_rate() >= 0.5)
                && rest.good > 0.0
                && own.excess_over(rest) >= STREAK
        };
        if fails_without(NO_CLIENT) {
            return true;
        }
        let client = self.failing_elsewhere(endpoint, now);
        client != NO_CLIENT && fails_without(client)
    }

    /// Whether a probe of this client that failed shows nothing, because the other endpoints fail
    /// at least half of the time.
    pub(super) fn others_fail_too(
        &self,
        endpoint: EndpointRef,
        client: u64,
        now: Timestamp,
    ) -> bool {
        let elsewhere = self.failing_elsewhere(endpoint, now);
        let without = if elsewhere == WitnessMark::of_client(client) {
            NO_CLIENT
        } else {
            elsewhere
        };
        self.others_answers(endpoint, without, now).failure_rate() * TIMES_OTHERS > 1.0
    }

    /// Whether most of the other endpoints that answered lately fail as well, for more than one
    /// client.
    pub(super) fn most_others_fail(&self, endpoint: EndpointRef, now: Timestamp) -> bool {
        let mut seen = 0;
        let mut failing = 0;
        let has_answered = |row: &&EndpointHealth| row.window.answers(now).count() > 0.0;
        for row in self.others(endpoint).filter(has_answered) {
            seen += 1;
            failing += usize::from(row.streak.is_of_several() || row.streak.length() >= STREAK);
        }
        failing * 2 > seen
    }

    /// Whether this worker lately got few answers of other endpoints.
    pub(in crate::pool) fn is_quiet(&self, endpoint: EndpointRef, now: Timestamp) -> bool {
        self.others_answers(endpoint, NO_CLIENT, now).count() < QUIET_ANSWERS
    }

    /// The client of the last failure at another endpoint, or [`NO_CLIENT`].
    fn failing_elsewhere(&self, endpoint: EndpointRef, now: Timestamp) -> WitnessMark {
        let last = self.others(endpoint).map(|row| row.streak.last_witness());
        let recent = last.filter(|(_, at)| now.ms_since(*at) < WINDOW_MS);
        let (mark, _) = recent.max_by_key(|(_, at)| *at).unwrap_or_default();
        mark.client()
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn others_answers(
        &self,
        endpoint: EndpointRef,
        without: WitnessMark,
        now: Timestamp,
    ) -> AnswerCounts {
        self.others(endpoint)
            .map(|row| row.answers_without(without, now))
            .fold(AnswerCounts::default(), |sum, one| AnswerCounts {
                good: sum.good + one.good,
                bad: sum.bad + one.bad,
                outsiders: 0.0,
            })
    }
}

// === impl EndpointHealth ===

impl EndpointHealth {
    /// The answers that this VM saw, without this client's share of the failures. The failures are
    /// at least as many as the streak, because other workers saw some of them.
    fn answers_without(&self, client: WitnessMark, now: Timestamp) -> AnswerCounts {
        let mut answers = self.window.answers(now);
        let bad = answers.bad.max(self.streak.recent(now));
        answers.bad = bad * (1.0 - self.streak.share(client, now));
        answers
    }
}

#[cfg(test)]
mod tests {
    use scheduler::{Generation, Slot};

    use super::super::FailureWeight;
    use super::*;
    use crate::pool::witnesses::{RequestFailure, Witness};

    /// Which endpoint each of two clients uses, by the number of its request.
    type SlotOf = fn(u64) -> u16;

    /// Drills four endpoints with a broken first endpoint. Client 1 sends one good prompt a second.
    /// Client 2 sends one prompt a second that fails at all endpoints. Returns the first ejected
    /// endpoint.
    fn ejected(slots: [SlotOf; 2]) -> Option<u16> {
        let mut health = EndpointHealthTable::default();
        (0..120_u64).find_map(|n| {
            let now = Timestamp(0).plus_ms(20_000 + n * 500);
            let client = 1 + n % 2;
            let slot = slots[usize::from(client == 2)](n / 2);
            let endpoint = EndpointRef {
                slot: Slot(slot),
                generation: Generation(1),
            };
            health.note_client(WitnessMark::of_client(client), now);
            if client == 1 && slot > 0 {
                health.record_success(endpoint, n, now);
                return None;
            }
            let failure = RequestFailure::Answer(Witness::Prompt(n), client);
            let weight = health.record_failure(endpoint, failure, now);
            (weight == FailureWeight::Ejects).then_some(slot)
        })
    }

    #[test]
    fn a_client_whose_requests_fail_everywhere_hides_no_broken_endpoint() {
        assert_eq!(ejected([|n| (n % 4) as u16, |n| (n % 4) as u16]), Some(0));
    }

    #[test]
    fn a_client_whose_requests_fail_everywhere_ejects_no_endpoint_that_others_do_not_use() {
        assert_eq!(ejected([|n| 1 + (n % 3) as u16, |n| (n % 4) as u16]), None);
    }

    #[test]
    fn a_failed_probe_of_a_client_that_succeeds_elsewhere_shows_that_the_endpoint_is_broken() {
        let mut health = EndpointHealthTable::default();
        let at = |ms| Timestamp(0).plus_ms(ms);
        let [broken, other] = [0, 1].map(|slot| EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        });
        for client in 1..=3 {
            health.note_client(WitnessMark::of_client(client), at(20_000));
        }
        health.record_success(other, 7, at(20_000));
        for n in 10..12 {
            let failure = RequestFailure::Answer(Witness::Prompt(n), 2);
            health.record_failure(other, failure, at(20_001));
        }
        let mut ejects = |client| {
            let failure = RequestFailure::Answer(Witness::Prompt(20 + client), client);
            health.record_failed_probe(broken, failure, at(20_002)) == FailureWeight::Ejects
        };
        assert_eq!([2, 1].map(&mut ejects), [false, true]);
    }
}
