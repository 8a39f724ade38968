//! Ejection: endpoints that fail get no requests for a while, so that the next request does not pay
//! for the same failure.
//!
//! [`super::health`] decides when an endpoint is ejected. The first ejection lasts [`BASE_MS`].
//! Each further one without a success in between lasts twice as long, up to [`MAX_MS`], or up to
//! [`QUIET_MAX_MS`] for bad answers to a worker with little traffic. Such an ejection lasts up to
//! [`MAX_MS`] for another worker with more traffic, and for the same one once it has more. Each
//! ejection is shortened at random by up to [`JITTER`], so that proxies do not all come back at
//! once. After that, one request at a time is a probe: while it runs, at most [`PROBE_MS`], other
//! requests avoid the endpoint. The worker that made the record sends the probe. The other workers
//! send one later, in case that worker has no request. A success clears the record. At most half of
//! the ready endpoints are ejected, the worst first. If more than half fail, the other endpoints
//! are no better choice.
//!
//! A record has a timestamp, and the later of two records wins. So the workers of a process can
//! exchange records in any order and any number of times, and still agree. A success is sent as a
//! record without failures.
//!
//! Records of other proxies use another clock and cross a network. So such a record counts as later
//! than a local one only if it is later by at least [`OUTSIDE_SLACK_MS`]. Such a record is marked,
//! and the VM that reports for a process leaves marked records out, so no record circulates.
//!
//! Other proxies may be hostile, so local evidence has more weight. A record of another proxy
//! ejects for at most [`MAX_MS`]. It changes nothing while a local ejection or a probe runs, or if
//! the endpoint's last answer here was a success within [`OUTSIDE_REST_MS`]. Nor does it within the
//! same time after an ejection that another proxy requested. Any local success ends an ejection by
//! another proxy. The success of another proxy ends no local ejection. A probe does not turn the
//! record of another proxy into a local one. If more than half of the endpoints would be ejected,
//! local ejections come first.

use scheduler::sort::sort_by;
use scheduler::{EndpointRef, Readiness, Snapshot};

use scheduler::Timestamp;

/// The first ejection, in ms. It is longer than a process takes to restart its listener, and short
/// enough that the rest of the pool carries the load if a third of it is ejected.
const BASE_MS: u64 = 1_000;

/// The longest ejection, in ms, for a worker that sends many requests. It is the longest time until
/// such a worker tries a recovered endpoint again.
const MAX_MS: u64 = 5_000;

/// The longest ejection for bad answers, which reach clients, in ms, if the worker sends few
/// requests. At one request a second, a probe is then at most one request in 16.
const QUIET_MAX_MS: u64 = 20_000;

/// The largest random reduction of an ejection, as a fraction of its length.
const JITTER: f32 = 0.2;

/// The other workers send a probe later than the worker that made the record, in ms: by at least
/// this, and less than twice this. Long before that, they have read about that worker's probe.
const STAGGER_MS: u64 = 200;

/// How long a probe keeps other requests away, in ms. A reply that takes longer does not delay the
/// next probe further.
const PROBE_MS: u64 = 5_000;

/// How long a success after a failure is remembered, in ms. After this time no other process
/// reports the failure as new.
const CLEARED_MS: u64 = 60_000;

/// The largest error of a timestamp from another proxy, in ms. It is several times what a message
/// to another proxy takes.
const OUTSIDE_SLACK_MS: u64 = 100;

/// How long no other proxy can eject an endpoint after it succeeded here, unless it failed here
/// since, or after the end of an ejection that another proxy requested, in ms. In this time
/// requests reach the endpoint, and their answers or failures show its state. If the other proxy is
/// right, this costs one failed attempt.
pub(super) const OUTSIDE_REST_MS: u64 = 10_000;

/// The endpoints that failed lately.
#[derive(Debug, Default)]
pub struct Ejections {
    /// The endpoints that failed, and those that answered again recently. There is at most one row
    /// for each endpoint of the pool.
    rows: Vec<Ejection>,
    /// How much later than the worker that made a record this worker sends a probe, in ms. By then,
    /// this worker knows whether a probe is in flight.
    stagger_ms: u64,
}

/// Why an endpoint is ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EjectionCause {
    /// Connections were lost or refused, so Envoy retries most of the requests.
    Connections,
    /// Answers failed.
    Answers,
    /// Answers failed while this worker sends few requests.
    RareAnswers,
}

/// The failures of one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ejection {
    /// The time when the record was made.
    pub at: Timestamp,
    /// The number of ejections without a success in between; 0 after a success.
    pub failures: u32,
    /// The time when the ejection ends.
    pub until: Timestamp,
    pub endpoint: EndpointRef,
    /// Whether another proxy reported the failures.
    pub outside: bool,
    /// Whether the endpoint's answers were the reason, so that only a good answer clears the
    /// record. Otherwise lost or refused connections were the reason, and any answer clears the
    /// record.
    pub by_answers: bool,
    /// Whether this worker made the record. This field is not sent.
    pub is_own: bool,
}

// === impl EjectionCause ===

impl EjectionCause {
    /// The endpoint's answers to a worker that sends few requests, or many.
    pub(super) fn by_answers(is_quiet: bool) -> Self {
        if is_quiet {
            Self::RareAnswers
        } else {
            Self::Answers
        }
    }
}

// === impl Ejections ===

impl Ejections {
    /// Delays probes after ejections by other workers for a time that depends on `seed`, so that
    /// workers send them at different times.
    #[must_use]
    pub fn with_stagger(seed: u64) -> Self {
        Self {
            stagger_ms: STAGGER_MS + seed % STAGGER_MS,
            ..Self::default()
        }
    }

    /// The time when the ejection is over for this worker.
    fn end(&self, row: &Ejection) -> Timestamp {
        if row.is_own {
            row.until
        } else {
            row.until.plus_ms(self.stagger_ms)
        }
    }

    /// Ejects an endpoint. `chance`, from 0 to 1, shortens the ejection at random. Returns whether
    /// the ejection is new.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn eject(
        &mut self,
        endpoint: EndpointRef,
        cause: EjectionCause,
        chance: f32,
        now: Timestamp,
    ) -> bool {
        // While the endpoint is ejected, failures of requests that were already in flight are not
        // new.
        if self.row(endpoint).is_some_and(|row| row.until > now) {
            return false;
        }
        self.eject_again(endpoint, cause, chance, now);
        true
    }

    /// Whether the endpoint is ejected, without a limit for the number of ejected endpoints.
    pub fn is_ejected(&self, endpoint: EndpointRef, now: Timestamp) -> bool {
        self.row(endpoint)
            .is_some_and(|row| row.failures > 0 && self.end(&row) > now)
    }

    /// Whether the endpoint was ejected and has not succeeded since.
    pub fn has_failures(&self, endpoint: EndpointRef) -> bool {
        self.row(endpoint).is_some_and(|row| row.failures > 0)
    }

    /// Records a failed probe.
    pub fn probe_failed(
        &mut self,
        endpoint: EndpointRef,
        cause: EjectionCause,
        chance: f32,
        now: Timestamp,
    ) {
        self.eject_again(endpoint, cause, chance, now);
    }

    fn eject_again(
        &mut self,
        endpoint: EndpointRef,
        cause: EjectionCause,
        chance: f32,
        now: Timestamp,
    ) {
        // Failures that another proxy reported do not make a local ejection longer.
        let failures = self
            .row(endpoint)
            .filter(|row| !row.outside)
            .map_or(0, |row| row.failures)
            .saturating_add(1);
        let until = now.plus_ms(ejection_ms(failures, cause, chance));
        self.put(Ejection {
            at: now,
            failures,
            until,
            endpoint,
            outside: false,
            by_answers: cause != EjectionCause::Connections,
            is_own: true,
        });
    }

    /// Records that a request goes to the endpoint. Returns whether it is a probe: the endpoint was
    /// ejected and the ejection has ended. Other requests avoid the endpoint until the probe ends.
    pub fn is_probe(&mut self, endpoint: EndpointRef, now: Timestamp) -> bool {
        let Some(row) = self
            .row(endpoint)
            .filter(|row| row.failures > 0 && self.end(row) <= now)
        else {
            return false;
        };
        self.put(Ejection {
            at: now,
            until: now.plus_ms(PROBE_MS),
            is_own: true,
            ..row
        });
        true
    }

    /// Records that a probe, sent at `sent`, ended without a verdict, so the next request may be a
    /// probe. Does nothing if the record has changed since `sent`.
    pub fn probe_again(&mut self, endpoint: EndpointRef, sent: Timestamp, now: Timestamp) {
        if let Some(row) = self
            .row(endpoint)
            .filter(|row| row.failures > 0 && row.at == sent)
        {
            self.put(Ejection {
                at: now,
                until: now,
                is_own: true,
                ..row
            });
        }
    }

    /// Records that a request sent at `sent` got an answer; `well` says that it succeeded. Returns
    /// whether the record changed. A request from before a local ejection proves nothing. An
    /// ejection that another proxy requested ends in any case, because the other proxy's time
    /// proves nothing.
    pub fn record_answer(
        &mut self,
        endpoint: EndpointRef,
        well: bool,
        sent: Timestamp,
        now: Timestamp,
    ) -> bool {
        let clears = |row: &Ejection| {
            row.failures > 0 && (well || !row.by_answers) && (row.outside || sent >= row.at)
        };
        if !self.row(endpoint).as_ref().is_some_and(clears) {
            return false;
        }
        self.put(Ejection {
            at: now,
            failures: 0,
            until: Timestamp(0),
            endpoint,
            outside: false,
            by_answers: false,
            is_own: true,
        });
        true
    }

    /// Sets the failure rates of endpoints whose ejection is over to 0. `failing` has the rates,
    /// parallel to `endpoints`. With their old failure rates, these endpoints would never get a
    /// probe.
    pub fn waive_expired(&self, endpoints: &[EndpointRef], now: Timestamp, failing: &mut [f32]) {
        if failing.is_empty() {
            return;
        }
        for row in self
            .rows
            .iter()
            .filter(|row| row.failures > 0 && self.end(row) <= now)
        {
            let position = endpoints
                .iter()
                .position(|endpoint| *endpoint == row.endpoint);
            if let Some(share) = position.and_then(|at| failing.get_mut(at)) {
                *share = 0.0;
            }
        }
    }

    fn row(&self, endpoint: EndpointRef) -> Option<Ejection> {
        self.rows
            .iter()
            .find(|row| row.endpoint == endpoint)
            .copied()
    }

    /// Stores a record that this worker made.
    fn put(&mut self, row: Ejection) {
        match self
            .rows
            .iter_mut()
            .find(|known| known.endpoint == row.endpoint)
        {
            Some(known) => *known = row,
            None => self.rows.push(row),
        }
    }

    /// Merges an ejection record of another VM or proxy into the rows. Returns whether the record
    /// reports something newer than the rows.
    pub fn learn(&mut self, received: Ejection, now: Timestamp) -> bool {
        let mut received = if received.outside {
            received.bounded(now)
        } else {
            received
        };
        received.is_own = false;
        let known = self
            .rows
            .iter_mut()
            .find(|r| r.endpoint == received.endpoint);
        match known {
            Some(known) if received.outside && known.outweighs(received, now) => return false,
            // The next request will show whether the reported success is true.
            Some(known) if received.outside && received.failures == 0 => {
                let is_news = known.until > now && received.at > known.at;
                known.until = known.until.min(now);
                return is_news;
            }
            Some(known)
                if *known >= received
                    || (received.outside && received.at <= known.at.plus_ms(OUTSIDE_SLACK_MS)) =>
            {
                return false;
            }
            Some(known) => *known = received,
            // Without a known failure, an old success, or one that another proxy saw, is not news.
            None if received.is_over(now) || (received.outside && received.failures == 0) => {
                return false;
            }
            None => self.rows.push(received),
        }
        true
    }

    /// The records to publish.
    #[must_use]
    pub fn rows(&self) -> &[Ejection] {
        &self.rows
    }

    /// Removes the record of an endpoint that left the pool.
    pub fn forget(&mut self, endpoint: EndpointRef) {
        self.rows.retain(|r| r.endpoint != endpoint);
    }

    /// Forgets records that are no longer needed, and shortens ejections that are too long for a
    /// worker that sends many requests. `is_quiet` says whether this worker sends few.
    pub fn tidy(&mut self, is_quiet: impl Fn(EndpointRef) -> bool, now: Timestamp) {
        self.rows.retain_mut(|row| {
            *row = row.shortened(&is_quiet);
            !row.is_over(now)
        });
    }

    /// Writes which endpoints are ejected now, parallel to the snapshot's endpoints. Leaves `out`
    /// empty if none is ejected.
    pub fn mark_ejected(&self, snapshot: &Snapshot, now: Timestamp, out: &mut Vec<bool>) {
        out.clear();
        let mut ejected: Vec<&Ejection> = self
            .rows
            .iter()
            .filter(|r| r.failures > 0 && self.end(r) > now)
            .collect();
        if ejected.is_empty() {
            return;
        }
        let ready = snapshot
            .endpoints()
            .iter()
            .filter(|e| e.readiness == Readiness::Ready)
            .count();
        sort_by(&mut ejected, |a, b| {
            (a.outside, b.failures, b.until, a.endpoint)
                < (b.outside, a.failures, a.until, b.endpoint)
        });
        ejected.truncate(ready / 2);
        out.extend(
            snapshot
                .endpoints()
                .iter()
                .map(|e| ejected.iter().any(|r| r.endpoint == e.id)),
        );
    }
}

// === impl Ejection ===

impl Ejection {
    /// Limits the record of another proxy to possible values.
    fn bounded(self, now: Timestamp) -> Self {
        Self {
            at: self.at.min(now),
            until: self.until.min(now.plus_ms(MAX_MS)),
            ..self
        }
    }

    /// The record as it counts for a worker. It is shortened to [`MAX_MS`], unless the worker sends
    /// few requests.
    #[must_use]
    pub(super) fn shortened(self, is_quiet: impl Fn(EndpointRef) -> bool) -> Self {
        let soon = self.at.plus_ms(MAX_MS);
        if self.until <= soon || is_quiet(self.endpoint) {
            return self;
        }
        Self {
            until: soon,
            ..self
        }
    }

    /// Whether this record has precedence over the record `received` from another proxy.
    fn outweighs(&self, received: Self, now: Timestamp) -> bool {
        match (self.failures > 0, received.failures > 0) {
            // Only a local answer ends an ejection for a local failure.
            (true, false) => !self.outside,
            (true, true) if self.outside => now < self.until.plus_ms(OUTSIDE_REST_MS),
            (true, true) => now < self.until,
            (false, true) => now.ms_since(self.at) < OUTSIDE_REST_MS,
            (false, false) => true,
        }
    }

    fn is_over(&self, now: Timestamp) -> bool {
        self.failures == 0 && now.ms_since(self.at) >= CLEARED_MS
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "seconds in ms, and a share of them"
)]
fn ejection_ms(failures: u32, cause: EjectionCause, chance: f32) -> u64 {
    let max = match cause {
        EjectionCause::RareAnswers => QUIET_MAX_MS,
        EjectionCause::Connections | EjectionCause::Answers => MAX_MS,
    };
    let longest = BASE_MS
        .saturating_mul(1 << failures.saturating_sub(1).min(16))
        .min(max);
    longest - (longest as f32 * JITTER * chance.clamp(0.0, 1.0)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use scheduler::{Endpoint, EndpointMetrics, Generation, Pipeline, PipelineSpec, Slot, Version};

    /// No jitter.
    const LONGEST: f32 = 0.0;

    fn id(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        }
    }

    fn pool(endpoints: u16) -> Snapshot {
        let endpoint = |slot| Endpoint {
            id: id(slot),
            name: format!("pod-{slot}").into(),
            address: format!("10.0.0.{slot}:8000").into(),
            readiness: Readiness::Ready,
            labels: Box::new([]),
            models: std::sync::Arc::default(),
            age_ms: 60_000,
        };
        let endpoints: Vec<Endpoint> = (0..endpoints).map(endpoint).collect();
        let metrics = vec![EndpointMetrics::default(); endpoints.len()];
        Snapshot::try_new(
            Version::default(),
            endpoints,
            metrics,
            Pipeline::build(&PipelineSpec::default()).unwrap(),
        )
        .unwrap()
    }

    fn ejected(ejections: &Ejections, pool: &Snapshot, now: Timestamp) -> Vec<u16> {
        let mut out = Vec::new();
        ejections.mark_ejected(pool, now, &mut out);
        (0..)
            .zip(out)
            .filter_map(|(slot, ejected)| ejected.then_some(slot))
            .collect()
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(0).plus_ms(ms)
    }

    fn eject(ejections: &mut Ejections, slot: u16, ms: u64) -> bool {
        ejections.eject(id(slot), EjectionCause::Answers, LONGEST, at(ms))
    }

    fn succeed(ejections: &mut Ejections, slot: u16, ms: u64) -> bool {
        ejections.record_answer(id(slot), true, at(ms), at(ms))
    }

    #[test]
    fn each_failed_probe_ejects_for_twice_as_long_up_to_a_limit() {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        eject(&mut ejections, 1, 0);
        let mut now = 0;
        for expected in [1_000, 2_000, 4_000, 5_000, 5_000] {
            assert_eq!(
                ejected(&ejections, &pool, at(now + expected - 1)),
                [1],
                "{expected}"
            );
            assert!(
                ejected(&ejections, &pool, at(now + expected)).is_empty(),
                "{expected}: it is tried again"
            );
            now += expected;
            assert!(ejections.is_probe(id(1), at(now)));
            ejections.probe_failed(id(1), EjectionCause::Answers, LONGEST, at(now));
        }
    }

    #[test]
    fn chance_makes_an_ejection_shorter_and_never_longer() {
        assert_eq!(
            [0.0, 0.5, 1.0, 7.0, -1.0].map(|chance| ejection_ms(3, EjectionCause::Answers, chance)),
            [4_000, 3_600, 3_200, 3_200, 4_000]
        );
        assert_eq!(
            ejection_ms(u32::MAX, EjectionCause::Answers, LONGEST),
            MAX_MS
        );
    }

    #[test]
    fn with_few_requests_bad_answers_eject_for_longer_and_lost_connections_do_not() {
        let ms = |failures, cause| ejection_ms(failures, cause, LONGEST);
        for failures in 1..=3 {
            let shortest = ms(failures, EjectionCause::Answers);
            assert_eq!(ms(failures, EjectionCause::RareAnswers), shortest);
        }
        assert_eq!(ms(9, EjectionCause::RareAnswers), QUIET_MAX_MS);
        assert_eq!(ms(9, EjectionCause::Connections), MAX_MS);
    }

    #[test]
    fn the_worker_that_ejected_sends_the_next_probe() {
        // With these seeds, the workers delay their probes by times that differ by 1 ms.
        let mut workers = [7, 8].map(Ejections::with_stagger);
        let pool = pool(4);
        eject(&mut workers[0], 1, 0);
        let [first, second] = &mut workers;
        assert_eq!(tell(first, second, at(1)), 1);
        assert_eq!(ejected(first, &pool, at(1_000)), [0; 0]);
        assert_eq!(ejected(second, &pool, at(1_199)), [1]);
        // The first worker has no request, so the second worker sends the probe. It fails, so the
        // second worker also sends the next one.
        assert_eq!(ejected(second, &pool, at(1_400)), [0; 0]);
        assert!(second.is_probe(id(1), at(1_400)));
        second.probe_failed(id(1), EjectionCause::Answers, LONGEST, at(1_400));
        assert_eq!(tell(second, first, at(1_410)), 1);
        assert_eq!(ejected(second, &pool, at(3_400)), [0; 0]);
        assert_eq!(ejected(first, &pool, at(3_599)), [1]);
    }

    #[test]
    fn one_probe_at_a_time_keeps_all_others_away() {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        assert!(
            !ejections.is_probe(id(1), at(0)),
            "nothing is known against it"
        );
        eject(&mut ejections, 1, 0);
        assert!(ejections.is_probe(id(1), at(1_000)));
        assert!(!ejections.is_probe(id(1), at(1_001)));
        assert_eq!(ejected(&ejections, &pool, at(1_001)), [1]);
        assert!(
            ejections.is_probe(id(1), at(1_000 + PROBE_MS)),
            "a probe that hangs holds up the next no longer"
        );
        ejections.probe_again(id(1), at(1_000 + PROBE_MS), at(6_500));
        assert!(
            ejections.is_probe(id(1), at(6_500)),
            "one that said nothing makes room at once"
        );
        assert!(succeed(&mut ejections, 1, 6_500));
        assert!(ejected(&ejections, &pool, at(6_501)).is_empty());
        assert!(!ejections.is_probe(id(1), at(6_501)), "it is as any other");
    }

    #[test]
    fn requests_already_under_way_say_nothing_new() {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        for ms in 0..100 {
            eject(&mut ejections, 1, ms);
        }
        assert!(
            ejected(&ejections, &pool, at(1_000)).is_empty(),
            "one ejection, with reason a hundred times"
        );
        eject(&mut ejections, 2, 5_000);
        assert!(
            !ejections.record_answer(id(2), true, at(4_999), at(5_001)),
            "what was sent before proves nothing"
        );
        assert_eq!(ejected(&ejections, &pool, at(5_002)), [2]);
    }

    #[test]
    fn bad_answers_are_cleared_by_good_ones_only() {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        eject(&mut ejections, 1, 0);
        ejections.eject(id(2), EjectionCause::Connections, LONGEST, at(0));
        assert!(
            !ejections.record_answer(id(1), false, at(1), at(1)),
            "an answer of any kind"
        );
        assert!(
            ejections.record_answer(id(2), false, at(1), at(1)),
            "shows that its connections work"
        );
        assert_eq!(ejected(&ejections, &pool, at(2)), [1]);
        assert!(succeed(&mut ejections, 1, 3));
        assert!(ejected(&ejections, &pool, at(4)).is_empty());
        eject(&mut ejections, 1, 5_000);
        assert!(
            ejected(&ejections, &pool, at(6_000)).is_empty(),
            "it begins again with the shortest"
        );
    }

    #[test]
    fn at_most_half_of_the_pool_and_the_worst_of_them() {
        let mut ejections = Ejections::default();
        for slot in 0..4 {
            eject(&mut ejections, slot, 0);
        }
        eject(&mut ejections, 3, 1_000);
        for slot in 0..3 {
            eject(&mut ejections, slot, 1_000);
        }
        eject(&mut ejections, 3, 3_000);
        assert_eq!(ejected(&ejections, &pool(4), at(3_001)), [3]);
        for slot in 0..4 {
            eject(&mut ejections, slot, 10_000);
        }
        assert_eq!(
            ejected(&ejections, &pool(4), at(10_001)),
            [0, 3],
            "three times in a row, then the lowest slot of equals"
        );
        assert!(
            ejected(&ejections, &pool(1), at(10_001)).is_empty(),
            "never the last one"
        );
    }

    /// Exchanges records as two workers of one process do.
    fn tell(from: &Ejections, to: &mut Ejections, now: Timestamp) -> usize {
        from.rows()
            .iter()
            .filter(|row| to.learn(**row, now))
            .count()
    }

    #[test]
    fn what_one_worker_saw_another_knows_and_a_success_anywhere_clears_it() {
        let mut one = Ejections::default();
        let mut two = Ejections::default();
        let pool = pool(4);
        assert!(eject(&mut one, 1, 0));
        assert_eq!(
            (tell(&one, &mut two, at(1)), tell(&one, &mut two, at(1))),
            (1, 0),
            "the second report changes nothing"
        );
        assert_eq!(ejected(&two, &pool, at(2)), [1]);
        assert!(
            !eject(&mut two, 1, 2),
            "a failure of its own one millisecond later changes nothing"
        );
        assert!(
            succeed(&mut two, 1, 3) && !succeed(&mut two, 1, 4),
            "only the first success changes the record"
        );
        assert_eq!(
            tell(&one, &mut two, at(5)),
            0,
            "what is older does not come back"
        );
        assert_eq!(tell(&two, &mut one, at(5)), 1);
        assert!(ejected(&one, &pool, at(6)).is_empty());
        assert!(eject(&mut one, 1, 7));
        assert_eq!(tell(&one, &mut two, at(8)), 1, "it failed again");
        assert_eq!(ejected(&two, &pool, at(9)), [1]);
        assert!(
            ejected(&two, &pool, at(7 + 1_000)).is_empty(),
            "for the shortest time: it had done well"
        );
        assert!(two.is_probe(id(1), at(7 + 1_000)));
        assert_eq!(tell(&two, &mut one, at(7 + 1_000)), 1);
        assert!(
            !one.is_probe(id(1), at(7 + 1_001)),
            "another worker's probe is in flight"
        );
    }

    #[test]
    fn what_comes_from_outside_is_news_once_however_its_moment_wavers() {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        let received = |ms: u64, failures: u32| Ejection {
            at: at(ms),
            failures,
            until: if failures > 0 {
                at(ms + BASE_MS)
            } else {
                Timestamp(0)
            },
            endpoint: id(1),
            outside: true,
            by_answers: true,
            is_own: false,
        };
        assert!(ejections.learn(received(1_000, 1), at(1_000)));
        for waver in [0, 3, 50, OUTSIDE_SLACK_MS] {
            assert!(
                !ejections.learn(received(1_000 + waver, 1), at(1_110)),
                "{waver} ms later it is the same failure"
            );
        }
        assert!(succeed(&mut ejections, 1, 1_150));
        assert!(
            !ejections.learn(received(1_005, 1), at(1_160)),
            "told again, and known to be over"
        );
        assert!(ejected(&ejections, &pool, at(1_160)).is_empty());
        let later = 1_150 + OUTSIDE_REST_MS;
        assert!(
            ejections.learn(received(later, 1), at(later)),
            "it failed again elsewhere"
        );
        assert_eq!(ejected(&ejections, &pool, at(later + 1)), [1]);
        assert!(
            ejections.learn(received(later + 200, 0), at(later + 200)),
            "and did well there"
        );
        assert!(ejected(&ejections, &pool, at(later + 201)).is_empty());
        eject(&mut ejections, 1, later + 600);
        assert!(
            ejections.rows().iter().all(|row| !row.outside),
            "seen here, it is ours to tell"
        );
    }

    /// A hostile peer repeats its record, for half of the pool and for the longest possible time.
    #[test]
    fn another_proxys_record_ejects_for_seconds_and_not_again_at_once() {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        let lie = |slot, ms: u64| Ejection {
            at: at(ms),
            failures: u32::MAX,
            until: Timestamp(u64::MAX),
            endpoint: id(slot),
            outside: true,
            by_answers: true,
            is_own: false,
        };
        let mut out = [0_u64; 4];
        let mut longest = 0;
        let mut free = 0;
        for ms in (0..200_000).step_by(100) {
            for slot in 0..2 {
                ejections.learn(lie(slot, ms), at(ms));
            }
            let ejected = ejected(&ejections, &pool, at(ms));
            for slot in 0..4_u16 {
                let spell = &mut out[usize::from(slot)];
                *spell = if ejected.contains(&slot) {
                    *spell + 100
                } else {
                    0
                };
                longest = longest.max(*spell);
                // Without an ejection the endpoint gets requests and serves them.
                if *spell == 0 {
                    succeed(&mut ejections, slot, ms);
                }
            }
            free += u64::from(ejected.is_empty()) * 100;
        }
        assert!(
            (100..=MAX_MS).contains(&longest),
            "{longest} ms without a request"
        );
        assert!(
            free >= 200_000 * OUTSIDE_REST_MS / (OUTSIDE_REST_MS + MAX_MS) * 9 / 10,
            "all served for {free} of 200,000 ms"
        );
    }

    fn from_outside(slot: u16, ms: u64, failures: u32, by_answers: bool) -> Ejection {
        Ejection {
            at: at(ms),
            failures,
            until: if failures > 0 {
                Timestamp(u64::MAX)
            } else {
                Timestamp(0)
            },
            endpoint: id(slot),
            outside: true,
            by_answers,
            is_own: false,
        }
    }

    /// A pool where another proxy says, every 50 ms, that the first two endpoints have failed. All
    /// endpoints serve each request within `service_ms`. Returns the requests of each endpoint in
    /// two minutes.
    fn served_beside_a_liar(service_ms: u64, says: impl Fn(u16, u64) -> Ejection) -> [u64; 4] {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        let mut running: Vec<(u64, u16, u64)> = Vec::new();
        let mut served = [0; 4];
        for ms in (0..120_000).step_by(50) {
            for slot in 0..2 {
                ejections.learn(says(slot, ms), at(ms));
            }
            running.retain(|(end, slot, sent)| {
                if *end <= ms {
                    ejections.record_answer(id(*slot), true, at(*sent), at(ms));
                }
                *end > ms
            });
            // Ten requests a second, each to the endpoint with the fewest requests.
            if ms % 100 == 0 {
                let out = ejected(&ejections, &pool, at(ms));
                let load = |slot: u16| running.iter().filter(|(_, at, _)| *at == slot).count();
                let slot = (0..4)
                    .filter(|slot| !out.contains(slot))
                    .min_by_key(|slot| (load(*slot), served[usize::from(*slot)]))
                    .unwrap();
                ejections.is_probe(id(slot), at(ms));
                served[usize::from(slot)] += 1;
                running.push((ms + service_ms, slot, ms));
            }
        }
        served
    }

    #[test]
    fn a_peer_that_repeats_failures_takes_no_endpoint_out_of_use() {
        for service_ms in [50, 800, 4_000, 7_000] {
            for by_answers in [false, true] {
                for wrong_clock_ms in [0, 2_000] {
                    let served = served_beside_a_liar(service_ms, |slot, ms| {
                        from_outside(slot, ms + wrong_clock_ms, 1, by_answers)
                    });
                    let mean = served.iter().sum::<u64>() / 4;
                    assert!(
                        served
                            .iter()
                            .all(|count| 3 * count >= 2 * mean - 10 && 2 * count <= 3 * mean + 10),
                        "{service_ms} ms, {by_answers}, {wrong_clock_ms}: {served:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn while_a_probe_runs_and_after_an_ejection_of_another_proxy_only_what_is_seen_here_counts() {
        let pool = pool(4);
        for is_local in [false, true] {
            let mut ejections = Ejections::default();
            let end = if is_local {
                eject(&mut ejections, 1, 0);
                BASE_MS
            } else {
                ejections.learn(from_outside(1, 0, 1, true), at(0));
                MAX_MS
            };
            assert_eq!(ejected(&ejections, &pool, at(end - 1)), [1]);
            assert!(ejections.is_probe(id(1), at(end)));
            for ms in (end..end + PROBE_MS).step_by(50) {
                assert!(
                    !ejections.learn(from_outside(1, ms + 200, 9, true), at(ms)),
                    "a probe runs, {is_local}"
                );
                assert!(
                    !is_local || !ejections.learn(from_outside(1, ms + 200, 0, true), at(ms)),
                    "their success ends no ejection for a failure here"
                );
            }
        }
        let mut ejections = Ejections::default();
        ejections.learn(from_outside(1, 0, 1, true), at(0));
        for ms in (MAX_MS..MAX_MS + OUTSIDE_REST_MS).step_by(50) {
            assert!(
                !ejections.learn(from_outside(1, ms, 1, true), at(ms)),
                "{ms}"
            );
        }
    }

    #[test]
    fn any_success_here_ends_an_ejection_of_another_proxy() {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        ejections.learn(from_outside(1, 1_000, 1, true), at(1_000));
        assert!(
            !ejections.record_answer(id(1), false, at(900), at(1_100)),
            "an answer of any kind does not speak against bad answers"
        );
        assert!(
            ejections.record_answer(id(1), true, at(100), at(1_100)),
            "sent before, and served after"
        );
        assert!(ejected(&ejections, &pool, at(1_101)).is_empty());
    }

    #[test]
    fn nobody_passes_on_failures_that_it_did_not_see() {
        let mut ejections = Ejections::default();
        ejections.learn(from_outside(1, 0, u32::MAX, true), at(0));
        assert!(ejections.is_probe(id(1), at(MAX_MS)));
        ejections.probe_again(id(1), at(MAX_MS), at(MAX_MS + 10));
        assert!(ejections.rows().iter().all(|row| row.outside));
        assert!(ejections.is_probe(id(1), at(MAX_MS + 20)));
        ejections.probe_failed(id(1), EjectionCause::Answers, LONGEST, at(MAX_MS + 30));
        let [row] = ejections.rows() else {
            panic!("one endpoint failed")
        };
        assert!(!row.outside, "seen here");
        assert_eq!(
            (row.failures, row.until),
            (1, at(MAX_MS + 30 + BASE_MS)),
            "and it counts from now on"
        );
    }

    #[test]
    fn what_was_seen_here_is_left_out_before_what_another_proxy_says() {
        let mut ejections = Ejections::default();
        let pool = pool(4);
        for slot in 0..2 {
            let received = Ejection {
                at: at(0),
                failures: 9,
                until: at(9_000),
                endpoint: id(slot),
                outside: true,
                by_answers: true,
                is_own: false,
            };
            ejections.learn(received, at(0));
        }
        eject(&mut ejections, 2, 1);
        eject(&mut ejections, 3, 1);
        assert_eq!(ejected(&ejections, &pool, at(2)), [2, 3]);
    }

    #[test]
    fn that_it_did_well_is_forgotten_in_the_end() {
        let mut one = Ejections::default();
        let mut two = Ejections::default();
        eject(&mut one, 1, 0);
        succeed(&mut one, 1, 10);
        one.tidy(|_| true, at(10 + CLEARED_MS - 1));
        assert_eq!(one.rows().len(), 1);
        assert_eq!(
            tell(&one, &mut two, at(10 + CLEARED_MS)),
            0,
            "it is no news any more"
        );
        one.tidy(|_| true, at(10 + CLEARED_MS));
        assert!(one.rows().is_empty());
    }

    proptest! {
        /// Whatever another proxy reports, an endpoint that serves all requests of this proxy is
        /// ejected for at most [`MAX_MS`] at once, and for at most a third of the time.
        #[test]
        fn no_words_of_another_proxy_keep_a_good_endpoint_out_of_use(
            said in prop::collection::vec((0..2_000_u64, 0..3_u32, any::<bool>(), 0..40_u64), 200..400),
        ) {
            let mut ejections = Ejections::default();
            let pool = pool(4);
            let mut ms = 0_u64;
            let mut spell = 0;
            let mut out = 0;
            for (early, failures, by_answers, pause) in said {
                ejections.learn(from_outside(1, (ms + 1_000).saturating_sub(early), failures, by_answers), at(ms));
                for _ in 0..=pause {
                    ms += 50;
                    if ejected(&ejections, &pool, at(ms)).is_empty() {
                        ejections.is_probe(id(1), at(ms));
                        succeed(&mut ejections, 1, ms);
                        spell = 0;
                    } else {
                        spell += 50;
                        out += 50;
                    }
                    prop_assert!(spell <= MAX_MS, "{spell} ms without a request");
                }
            }
            prop_assert!(out <= ms / 3 + MAX_MS, "{out} of {ms} ms");
        }

        /// Three workers record any failures and exchange records in any order. After a complete
        /// exchange they agree.
        #[test]
        fn workers_that_exchanged_records_agree(events in prop::collection::vec((0..3_usize, 0..4_u16, 0..4_u8, 0..3_usize), 0..60)) {
            let mut workers = [Ejections::default(), Ejections::default(), Ejections::default()];
            let mut ms = 0;
            for (worker, slot, what, listener) in events {
                ms += 173;
                match what {
                    0 => eject(&mut workers[worker], slot, ms),
                    1 => workers[worker].is_probe(id(slot), at(ms)),
                    2 => { workers[worker].probe_again(id(slot), at(ms - 173), at(ms)); true }
                    _ => succeed(&mut workers[worker], slot, ms),
                };
                let rows = workers[worker].rows().to_vec();
                for row in rows {
                    workers[listener].learn(row, at(ms));
                }
            }
            for _ in 0..2 {
                for (from, to) in [(0, 1), (1, 2), (2, 0)] {
                    let rows = workers[from].rows().to_vec();
                    for row in rows {
                        workers[to].learn(row, at(ms));
                    }
                }
            }
            let known = workers.map(|worker| {
                let mut rows = worker.rows;
                rows.iter_mut().for_each(|row| row.is_own = false);
                rows.sort_unstable();
                rows
            });
            prop_assert_eq!(&known[0], &known[1]);
            prop_assert_eq!(&known[1], &known[2]);
        }
    }
}
