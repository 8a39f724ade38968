//! Each queued request leaves exactly once, for any events, and the counters end at zero.

use proptest::prelude::*;
use scheduler::plugin::ParameterValue;
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, Pipeline, PipelineSpec, PluginSpec,
    Readiness, Request, Slot, Snapshot, Timestamp, Version,
};

use super::band::FLOWS_MAX;
use super::{FLOW_OUTCOMES, FlowArrival, FlowOutcome, QueuedTicket};
use crate::pool::{FlowAdmission, LedgerHold, ManagedPool, RecordedPick};
use crate::refusal::PickRefusal;

pub(super) fn number(name: &str, number: f64) -> (String, ParameterValue) {
    (name.to_owned(), ParameterValue::Number(number))
}

/// A pipeline whose endpoints take `seats` requests each; `section` is that of flow control.
pub(super) fn pipeline(seats: f64, section: Vec<(String, ParameterValue)>) -> PipelineSpec {
    let detector = PluginSpec {
        parameters: vec![number("maxConcurrency", seats)],
        ..PluginSpec::of_type("concurrency-detector")
    };
    let control = PluginSpec {
        parameters: section,
        ..PluginSpec::of_type(scheduler::flow::FLOW_CONTROL)
    };
    let mut spec = PipelineSpec {
        saturation_detector: detector.name().to_owned(),
        ..PipelineSpec::default()
    };
    spec.plugins.extend([detector, control]);
    spec
}

pub(super) fn snapshot(endpoints: u16, spec: &PipelineSpec) -> Snapshot {
    let endpoint = |slot: u16| Endpoint {
        id: EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        },
        name: format!("pod-{slot}").into(),
        address: format!("10.0.0.{}:8000", slot + 1).into(),
        readiness: Readiness::Ready,
        labels: Box::new([]),
        models: std::sync::Arc::default(),
        age_ms: 60_000,
    };
    let metrics = vec![EndpointMetrics::default(); usize::from(endpoints)];
    Snapshot::try_new(
        Version::default(),
        (0..endpoints).map(endpoint).collect(),
        metrics,
        Pipeline::build(spec).unwrap(),
    )
    .unwrap()
}

/// A client of the pool: the request it sent, and the result.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a test has few clients")]
pub(super) enum QueueClient {
    Queued(QueuedTicket),
    Running(LedgerHold),
    Gone,
}

/// A request that was planned and admitted.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a test has few requests")]
pub(super) enum Admitted {
    Sent(RecordedPick),
    Queued(QueuedTicket),
}

/// Plans a request that arrives, and sends or queues it.
pub(super) fn admit(
    pool: &mut ManagedPool,
    request: &Request<'_>,
    arrival: &FlowArrival<'_>,
    now: Timestamp,
) -> Result<Admitted, PickRefusal> {
    let planned = pool.plan(request, now, &mut ());
    let admission = pool.admit(planned, request, arrival, now)?;
    Ok(commit(pool, admission, request, now))
}

/// Plans a queued request, and sends it if it has room.
pub(super) fn admit_queued(
    pool: &mut ManagedPool,
    ticket: QueuedTicket,
    request: &Request<'_>,
    now: Timestamp,
) -> Result<Admitted, PickRefusal> {
    let planned = pool.plan(request, now, &mut ());
    let admission = pool.admit_queued(ticket, planned, request, now)?;
    Ok(commit(pool, admission, request, now))
}

fn commit(
    pool: &mut ManagedPool,
    admission: FlowAdmission,
    request: &Request<'_>,
    now: Timestamp,
) -> Admitted {
    match admission {
        FlowAdmission::Wait(ticket) => Admitted::Queued(ticket),
        FlowAdmission::Go(plan) => {
            let endpoint = plan.endpoint();
            let picked = pool.commit(plan, request, endpoint, now);
            Admitted::Sent(picked.expect("nothing has changed since the plan"))
        }
        FlowAdmission::Claim(claim) => Admitted::Sent(pool.redeem(claim, request, now)),
    }
}

/// A pool and its clients.
pub(super) struct Drill {
    pub(super) pool: ManagedPool,
    pub(super) clients: Vec<(i32, u32, QueueClient)>,
    pub(super) now: Timestamp,
    pub(super) sent: u64,
    refused: u64,
    left: u64,
    /// The clients in the order in which they were sent.
    pub(super) order: Vec<usize>,
    /// The clients whose requests were given up.
    pub(super) given_up: Vec<usize>,
}

impl Drill {
    pub(super) fn new(endpoints: u16, spec: &PipelineSpec) -> Self {
        let mut pool = ManagedPool::new(7, 0);
        pool.install(snapshot(endpoints, spec), 0, u32::MAX);
        Self {
            pool,
            clients: Vec::new(),
            now: Timestamp(0).plus_ms(1_000),
            sent: 0,
            refused: 0,
            left: 0,
            order: Vec::new(),
            given_up: Vec::new(),
        }
    }

    pub(super) fn request(priority: i32, tokens: u32) -> Request<'static> {
        Request {
            priority,
            prompt_tokens: tokens,
            ..Request::default()
        }
    }

    pub(super) fn arrives(&mut self, priority: i32, flow: &str, tokens: u32) {
        let arrival = FlowArrival {
            flow,
            client: 0,
            request_id: "",
            bytes: u64::from(tokens),
            arrived: self.now,
            ttl_ms: None,
        };
        self.arrives_as(&arrival, priority, tokens);
    }

    /// A request of this client, without a fairness id, arrives.
    fn arrives_from(&mut self, client: u64, tokens: u32) {
        let arrival = FlowArrival {
            flow: "",
            client,
            request_id: "",
            bytes: u64::from(tokens),
            arrived: self.now,
            ttl_ms: None,
        };
        self.arrives_as(&arrival, 0, tokens);
    }

    fn arrives_as(&mut self, arrival: &FlowArrival<'_>, priority: i32, tokens: u32) {
        let request = Self::request(priority, tokens);
        let client = match admit(&mut self.pool, &request, arrival, self.now) {
            Ok(Admitted::Sent(picked)) => self.send(self.clients.len(), picked.hold),
            Ok(Admitted::Queued(ticket)) => QueueClient::Queued(ticket),
            Err(_) => {
                self.refused += 1;
                QueueClient::Gone
            }
        };
        self.clients.push((priority, tokens, client));
        self.release();
    }

    fn send(&mut self, client: usize, hold: LedgerHold) -> QueueClient {
        self.sent += 1;
        self.order.push(client);
        QueueClient::Running(hold)
    }

    /// Resumes the due requests, as a host does.
    pub(super) fn release(&mut self) {
        while let Some(number) = self.pool.next_due(self.now) {
            let is = |(_, _, client): &(i32, u32, QueueClient)| match client {
                QueueClient::Queued(ticket) => ticket.number == number,
                QueueClient::Running(hold) => hold.revocable() == Some(number),
                QueueClient::Gone => false,
            };
            let Some(at) = self.clients.iter().position(is) else {
                panic!("number {number} is nobody's")
            };
            if matches!(self.clients[at].2, QueueClient::Running(_)) {
                self.is_given_up(at);
                continue;
            }
            let (priority, tokens, client) = &mut self.clients[at];
            let request = Self::request(*priority, *tokens);
            let QueueClient::Queued(ticket) = std::mem::replace(client, QueueClient::Gone) else {
                unreachable!()
            };
            let after = match admit_queued(&mut self.pool, ticket, &request, self.now) {
                Ok(Admitted::Sent(picked)) => self.send(at, picked.hold),
                Ok(Admitted::Queued(ticket)) => QueueClient::Queued(ticket),
                Err(_) => {
                    self.refused += 1;
                    QueueClient::Gone
                }
            };
            self.clients[at].2 = after;
        }
    }

    fn is_given_up(&mut self, at: usize) {
        let QueueClient::Running(hold) =
            std::mem::replace(&mut self.clients[at].2, QueueClient::Gone)
        else {
            unreachable!()
        };
        assert!(self.pool.take_revoked(&hold).is_some(), "the pool named it");
        self.pool.release(hold, self.now);
        self.given_up.push(at);
    }

    /// The client leaves, or its reply ends.
    pub(super) fn ends(&mut self, at: usize) {
        let Some((.., client)) = self.clients.get_mut(at) else {
            return;
        };
        match std::mem::replace(client, QueueClient::Gone) {
            QueueClient::Queued(ticket) => {
                self.left += 1;
                self.pool.drop_queued(ticket, self.now);
            }
            QueueClient::Running(hold) => self.pool.release(hold, self.now),
            QueueClient::Gone => {}
        }
        self.release();
    }

    pub(super) fn passes(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        self.pool.tick(self.now);
        self.release();
    }

    pub(super) fn queued(&self) -> usize {
        self.clients
            .iter()
            .filter(|(.., client)| matches!(client, QueueClient::Queued(_)))
            .count()
    }

    /// Whether this client's request is queued.
    fn waits(&self, client: usize) -> bool {
        matches!(self.clients[client].2, QueueClient::Queued(_))
    }

    fn outcomes(&self) -> [u64; 8] {
        let mut sum = [0; 8];
        for counters in self.pool.queues().counters() {
            counters
                .outcomes
                .iter()
                .zip(&mut sum)
                .for_each(|(count, sum)| *sum += count);
        }
        sum
    }
}

#[test]
fn the_higher_band_goes_first_and_within_a_band_the_first_come() {
    let mut drill = Drill::new(1, &pipeline(1.0, Vec::new()));
    for (priority, tokens) in [(0, 10), (-1, 10), (0, 10), (5, 10), (0, 10)] {
        drill.arrives(priority, "", tokens);
    }
    assert_eq!((drill.order.as_slice(), drill.queued()), (&[0][..], 4));
    for client in [0, 3, 2, 4] {
        drill.ends(client);
    }
    assert_eq!(drill.order, [0, 3, 2, 4, 1]);
}

#[test]
fn a_flow_with_long_requests_gets_as_many_tokens_as_others() {
    let mut drill = Drill::new(1, &pipeline(1.0, Vec::new()));
    for _ in 0..40 {
        drill.arrives(0, "long", 4_000);
        drill.arrives(0, "short", 200);
    }
    for turn in 0..30 {
        drill.ends(drill.order[turn]);
    }
    let short = drill
        .order
        .iter()
        .filter(|client| drill.clients[**client].1 == 200)
        .count();
    assert!(
        (24..=29).contains(&short),
        "{short} of 31 requests are short ones"
    );
}

#[test]
fn the_newest_of_the_lowest_band_is_left_out_first() {
    let mut drill = Drill::new(1, &pipeline(1.0, vec![number("maxRequests", 2.0)]));
    for priority in [0, -1, -1] {
        drill.arrives(priority, "", 1);
    }
    assert_eq!((drill.queued(), drill.refused), (2, 0));
    drill.arrives(3, "", 1);
    assert!(
        matches!(drill.clients[2].2, QueueClient::Gone),
        "the newest of band -1"
    );
    drill.arrives(-1, "", 1);
    assert!(
        matches!(drill.clients[4].2, QueueClient::Gone),
        "it is the newest of the lowest band itself"
    );
    assert_eq!((drill.queued(), drill.refused), (2, 2));
    assert_eq!(drill.outcomes()[FlowOutcome::RejectedCapacity as usize], 2);
}

#[test]
fn time_ends_a_wait_and_says_whether_endpoints_were_there() {
    for (endpoints, outcome) in [
        (1, FlowOutcome::EvictedTtl),
        (0, FlowOutcome::EvictedNoEndpoints),
    ] {
        let mut drill = Drill::new(
            endpoints,
            &pipeline(
                1.0,
                vec![number("ttlMs", 5_000.0), number("noEndpointTtlMs", 2_000.0)],
            ),
        );
        drill.arrives(0, "", 1);
        drill.arrives(0, "", 1);
        drill.passes(1_900);
        assert!(drill.queued() > 0);
        drill.passes(200);
        assert_eq!(drill.queued() > 0, endpoints > 0);
        drill.passes(4_000);
        assert_eq!(
            (drill.queued(), drill.outcomes()[outcome as usize]),
            (0, drill.refused),
            "{}",
            FLOW_OUTCOMES[outcome as usize]
        );
    }
}

#[test]
fn without_endpoints_a_request_waits_only_where_the_pool_scales_from_zero() {
    for (section, waits) in [
        (Vec::new(), false),
        (vec![number("noEndpointTtlMs", 0.0)], false),
        (vec![number("noEndpointTtlMs", 500.0)], true),
    ] {
        let spec = pipeline(1.0, section);
        let mut drill = Drill::new(1, &spec);
        (0..3).for_each(|_| drill.arrives(0, "", 1));
        assert_eq!((drill.queued(), drill.refused), (2, 0));
        drill.pool.install(snapshot(0, &spec), 0, u32::MAX);
        drill.release();
        let all = if waits { (2, 0) } else { (0, 2) };
        assert_eq!(
            (drill.queued(), drill.refused),
            all,
            "those that waited already"
        );
        assert_eq!(
            drill.outcomes()[FlowOutcome::EvictedNoEndpoints as usize],
            all.1
        );
        // One request of a band that waits, and one of another band.
        drill.arrives(0, "", 1);
        drill.arrives(5, "", 1);
        assert_eq!(
            (drill.queued(), drill.refused),
            if waits { (4, 0) } else { (0, 4) }
        );
        drill.pool.install(snapshot(5, &spec), 0, u32::MAX);
        drill.passes(100);
        assert_eq!((drill.queued(), drill.sent), (0, if waits { 5 } else { 1 }));
    }
}

#[test]
fn a_band_behind_others_keeps_its_share() {
    let mut drill = Drill::new(1, &pipeline(1.0, Vec::new()));
    for _ in 0..200 {
        drill.arrives(1, "", 100);
    }
    for _ in 0..20 {
        drill.arrives(0, "", 100);
    }
    for turn in 0..150 {
        drill.ends(drill.order[turn]);
    }
    let low = drill
        .order
        .iter()
        .filter(|client| drill.clients[**client].0 == 0)
        .count();
    assert!(
        (5..=10).contains(&low),
        "{low} of 151 requests are of the lower band"
    );
}

#[test]
fn without_flow_control_nothing_is_held_and_requests_held_before_are_refused() {
    let mut drill = Drill::new(1, &pipeline(1.0, Vec::new()));
    (0..3).for_each(|_| drill.arrives(0, "", 1));
    assert_eq!(drill.queued(), 2);
    drill
        .pool
        .install(snapshot(1, &PipelineSpec::default()), 0, u32::MAX);
    drill.release();
    assert_eq!((drill.queued(), drill.refused), (0, 2));
    (0..3).for_each(|_| drill.arrives(0, "", 1));
    assert_eq!((drill.queued(), drill.sent), (0, 4));
}

#[test]
fn without_flow_control_picks_and_rows_are_those_of_a_pool_that_never_holds() {
    let pools = [(); 2].map(|()| {
        let mut pool = ManagedPool::new(7, 1_000);
        pool.install(snapshot(5, &PipelineSpec::default()), 0, u32::MAX);
        pool
    });
    let [mut plain, mut with_queues] = pools;
    let mut now = Timestamp(0).plus_ms(1_000);
    let mut running = std::collections::VecDeque::new();
    for number in 0..300_u32 {
        now = now.plus_ms(u64::from(number % 7));
        let request = Drill::request(i32::try_from(number % 3).unwrap() - 1, number * 37 % 4_000);
        let arrival = FlowArrival {
            flow: "a",
            client: 0,
            request_id: "",
            bytes: 100,
            arrived: now,
            ttl_ms: None,
        };
        let picked = admit(&mut plain, &request, &arrival, now);
        let admitted = admit(&mut with_queues, &request, &arrival, now);
        let (picked, other) = match (picked, admitted) {
            (Ok(Admitted::Sent(picked)), Ok(Admitted::Sent(other))) => (picked, other),
            (picked, admitted) => panic!("{picked:?} but {admitted:?}"),
        };
        assert_eq!(
            (&picked.ranked, picked.expected_ms),
            (&other.ranked, other.expected_ms)
        );
        running.push_back((picked.hold, other.hold));
        if running.len() > 20 {
            let (hold, other) = running.pop_front().unwrap();
            plain.release(hold, now);
            with_queues.release(other, now);
        }
        assert!(!with_queues.has_due());
        for pool in [&mut plain, &mut with_queues] {
            pool.tick(now);
        }
    }
    let rows = |pool: &ManagedPool| {
        format!(
            "{:?} {:?}",
            pool.in_flight().rows().collect::<Vec<_>>(),
            pool.counters()
        )
    };
    assert_eq!(rows(&plain), rows(&with_queues));
    assert_eq!(
        with_queues.queues().counters().count(),
        0,
        "no row of a report has a band"
    );
}

#[test]
fn retry_after_follows_the_rate_of_releases() {
    let mut drill = Drill::new(1, &pipeline(1.0, vec![number("maxRequests", 40.0)]));
    (0..41).for_each(|_| drill.arrives(0, "", 1));
    for turn in 0..20 {
        drill.passes(250);
        drill.ends(drill.order[turn]);
        drill.arrives(0, "", 1);
    }
    let arrival = FlowArrival {
        flow: "",
        client: 0,
        request_id: "id-7",
        bytes: 1,
        arrived: drill.now,
        ttl_ms: None,
    };
    let request = Drill::request(0, 1);
    let refused = admit(&mut drill.pool, &request, &arrival, drill.now).unwrap_err();
    let PickRefusal::Queue(refusal) = refused else {
        panic!("{refused:?}")
    };
    assert!(
        (8..=40).contains(&refusal.retry_after_s),
        "40 wait, 4 are sent each second: {refusal:?}"
    );
}

/// A drill with one seat and this limit of the queues.
fn limited(limit: (&str, f64)) -> Drill {
    Drill::new(1, &pipeline(1.0, vec![number(limit.0, limit.1)]))
}

#[test]
fn one_flow_alone_fills_the_queue_and_then_makes_room_for_others() {
    let mut drill = limited(("maxRequests", 8.0));
    (0..12).for_each(|_| drill.arrives(0, "many", 1));
    assert_eq!((drill.queued(), drill.refused), (8, 3), "one runs");
    (0..6).for_each(|_| drill.arrives(0, "few", 1));
    let of_few = (12..18).filter(|client| drill.waits(*client)).count();
    assert_eq!((drill.queued(), of_few), (8, 4), "half for each");
    assert!(drill.waits(1) && !drill.waits(8), "the newest ones went");
    assert_eq!(
        drill.outcomes()[FlowOutcome::RejectedCapacity as usize],
        3 + 4 + 2
    );
}

#[test]
fn few_large_requests_make_room_for_many_small_ones() {
    let mut drill = limited(("maxBytes", 8_000.0));
    (0..9).for_each(|_| drill.arrives(0, "large", 1_000));
    (0..30).for_each(|_| drill.arrives(0, "small", 100));
    let of_small = (9..39).filter(|client| drill.waits(*client)).count();
    assert_eq!(of_small, 30, "3 KB of 8");
    assert_eq!(drill.queued(), 35);
}

#[test]
fn a_request_that_cannot_fit_displaces_nothing() {
    let mut drill = limited(("maxBytes", 8_000.0));
    (0..9).for_each(|_| drill.arrives(0, "a", 1_000));
    drill.arrives(1, "b", 9_000);
    assert_eq!((drill.queued(), drill.refused), (8, 1), "too large");
    drill.arrives(0, "b", 7_000);
    assert_eq!(
        (drill.queued(), drill.refused),
        (8, 2),
        "more than its part"
    );
}

#[test]
fn the_flow_with_most_of_the_lowest_band_makes_room_for_a_higher_one() {
    let mut drill = limited(("maxRequests", 8.0));
    (0..8).for_each(|_| drill.arrives(-1, "many", 1));
    drill.arrives(-1, "few", 1);
    drill.arrives(3, "", 1);
    assert!(
        drill.waits(8) && !drill.waits(7),
        "few has one, many the newest but one"
    );
}

#[test]
fn requests_without_a_fairness_id_are_shared_by_client() {
    let mut drill = limited(("maxRequests", 4.0));
    (0..6).for_each(|_| drill.arrives_from(7, 1));
    drill.arrives_from(8, 1);
    assert!(drill.waits(6), "another client");
    drill.arrives_from(7, 1);
    assert!(!drill.waits(7), "the one that fills the queue");
}

#[test]
fn many_requests_of_one_client_do_not_delay_another() {
    let mut drill = Drill::new(1, &pipeline(1.0, Vec::new()));
    (0..300).for_each(|_| drill.arrives_from(7, 100));
    (0..3).for_each(|_| drill.arrives_from(8, 100));
    (0..6).for_each(|turn| drill.ends(drill.order[turn]));
    assert_eq!(drill.order, [0, 300, 1, 301, 2, 302, 3]);
}

#[test]
fn more_clients_than_flows_share_accounts_and_none_is_lost() {
    let mut drill = Drill::new(1, &pipeline(1.0, Vec::new()));
    (1..=2_000).for_each(|client| drill.arrives_from(client, 100));
    let flows = drill
        .pool
        .queues()
        .bands
        .iter()
        .map(|band| band.flows().len());
    assert_eq!(flows.sum::<usize>(), FLOWS_MAX);
    for turn in 0..2_000 {
        drill.ends(drill.order[turn]);
    }
    assert_eq!((drill.sent, drill.queued(), drill.refused), (2_000, 0, 0));
}

#[derive(Clone, Debug)]
enum QueueEvent {
    Arrives {
        priority: i32,
        flow: u8,
        tokens: u32,
    },
    Ends(usize),
    Passes(u64),
    Endpoints(u16),
    Toggles,
}

fn event() -> impl Strategy<Value = QueueEvent> {
    prop_oneof![
        6 => (-2..3_i32, 0..4_u8, 1..3_000_u32).prop_map(|(priority, flow, tokens)| QueueEvent::Arrives { priority, flow, tokens }),
        4 => (0..80_usize).prop_map(QueueEvent::Ends),
        2 => (0..900_u64).prop_map(QueueEvent::Passes),
        1 => (0..3_u16).prop_map(QueueEvent::Endpoints),
        1 => Just(QueueEvent::Toggles),
    ]
}

proptest! {
    #[test]
    fn every_request_leaves_once_and_the_counters_end_at_zero(events in prop::collection::vec(event(), 1..150)) {
        let section = vec![number("maxRequests", 12.0), number("maxBytes", 20_000.0), number("ttlMs", 4_000.0)];
        let on = pipeline(2.0, section);
        let mut is_on = true;
        let mut endpoints = 2;
        let mut drill = Drill::new(endpoints, &on);
        for event in &events {
            match *event {
                QueueEvent::Arrives { priority, flow, tokens } => drill.arrives(priority, ["", "a", "b", "c"][usize::from(flow)], tokens),
                QueueEvent::Ends(at) => drill.ends(at),
                QueueEvent::Passes(ms) => drill.passes(ms),
                QueueEvent::Endpoints(count) => endpoints = count,
                QueueEvent::Toggles => is_on = !is_on,
            }
            if matches!(event, QueueEvent::Endpoints(_) | QueueEvent::Toggles) {
                let spec = if is_on { on.clone() } else { PipelineSpec::default() };
                drill.pool.install(snapshot(endpoints, &spec), 0, u32::MAX);
                drill.release();
            }
            let queued: u64 = drill.pool.queues().counters().map(|counters| counters.queued).sum();
            prop_assert_eq!((drill.pool.queues().queued(), queued), (drill.queued(), drill.queued() as u64));
            prop_assert!(drill.queued() <= 12);
        }
        (0..drill.clients.len()).for_each(|at| drill.ends(at));
        (0..drill.clients.len()).for_each(|at| drill.ends(at));
        prop_assert_eq!((drill.pool.queues().queued(), drill.pool.queues().bytes(), drill.queued()), (0, 0, 0));
        prop_assert!(drill.pool.queues().is_empty());
        prop_assert!(drill.pool.queues().counters().all(|counters| (counters.queued, counters.bytes) == (0, 0)));
        prop_assert_eq!(drill.sent + drill.refused + drill.left, drill.clients.len() as u64, "each request has one outcome");
        prop_assert_eq!(drill.pool.in_flight().rows().count(), 0, "nothing stays in the ledger");
    }
}
