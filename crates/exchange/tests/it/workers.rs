//! Several workers of a proxy: a worker picks by the load and the prefixes of the others, which it
//! receives as load reports and placements.

use std::collections::{BTreeMap, VecDeque};

use exchange::record::ParsedRecord;
use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use pool_state::{LoadReportHead, OwnLoadReport, PeerLoadReport, Placement, PlacementKind};
use scheduler::in_flight::EndpointLoad;
use scheduler::{
    Decision, EndpointMetrics, EndpointRef, Generation, Pipeline, PipelineSpec, PluginSpec, Slot,
    Snapshot, Version,
};

use crate::record::recording;
use crate::release::{pool_update, split_pool_update};

/// Returns a pool of this many endpoints with this scorer alone, which picks the best endpoint.
pub(crate) fn pool_by(scorer: &str, endpoints: u8, seed: u64) -> ManagedPool {
    let mut pool = ManagedPool::new(seed, 1 << 14);
    pool.install(by(scorer, endpoints, &[]), 7, 1_000);
    pool.recount_load_reports([]);
    pool
}

/// Returns a snapshot with this scorer alone. `queues` has the queue lengths of the first
/// endpoints; the queues of the others are unknown.
fn by(scorer: &str, endpoints: u8, queues: &[f32]) -> Snapshot {
    let spec = PipelineSpec::of_one_profile("test", vec![(PluginSpec::of_type(scorer), 1.0)], 1);
    let endpoints = pool_update(endpoints, 1).endpoints().to_vec();
    let mut metrics = vec![EndpointMetrics::default(); endpoints.len()];
    for (metrics, queue) in metrics.iter_mut().zip(queues) {
        metrics.queue_depth = Some(*queue);
    }
    Snapshot::try_new(
        Version {
            term: 1,
            sequence: 1,
        },
        endpoints,
        metrics,
        Pipeline::build(&spec).unwrap(),
    )
    .unwrap()
}

pub(crate) fn at(slot: u16) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(1),
    }
}

pub(crate) fn ms(ms: u64) -> Timestamp {
    Timestamp(0).plus_ms(ms)
}

/// Sends a request, and returns it with its endpoint. The request runs until the test ends it.
pub(crate) fn send(pool: &mut ManagedPool, prompt: &str, now: Timestamp) -> (Exchange, String) {
    let settings = ExchangeSettings::default();
    let mut exchange = Exchange::new(now);
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/completions")];
    exchange.request_headers(&settings, pairs, false);
    exchange.capture_headers(pool, pairs);
    let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
    let ExchangeStep::Forward(forward) =
        exchange.decide(&settings, pool, None, body.as_bytes(), now)
    else {
        panic!("not routed")
    };
    (
        exchange,
        forward.set[0].1.split(',').next().unwrap().to_owned(),
    )
}

/// Sends this many requests one after another, and counts them by endpoint.
fn tally(pool: &mut ManagedPool, requests: usize, now: Timestamp) -> BTreeMap<String, usize> {
    let mut tally = BTreeMap::new();
    for _ in 0..requests {
        let (mut exchange, to) = send(pool, "hi", now);
        exchange.end(pool, now);
        *tally.entry(to).or_default() += 1;
    }
    tally
}

fn requests(pool: &ManagedPool) -> u64 {
    (0..4)
        .map(|slot| u64::from(pool.in_flight().load(at(slot)).requests))
        .sum()
}

pub(crate) const ADDRESS: [&str; 4] = [
    "10.0.0.0:8000",
    "10.0.0.1:8000",
    "10.0.0.2:8000",
    "10.0.0.3:8000",
];

#[test]
fn a_row_brings_the_load_of_one_worker_to_another_and_takes_it_back() {
    let mut one = pool_by("active-request-scorer", 4, 1);
    let mut two = pool_by("active-request-scorer", 4, 2);
    let mut row = OwnLoadReport::default();
    let mut peer = PeerLoadReport::default();
    let head = LoadReportHead {
        vm: 9,
        written: ms(3),
        ring: 5,
    };
    let mut under_way: Vec<Exchange> = (0..3).map(|_| send(&mut one, "hi", ms(1)).0).collect();
    assert_eq!((requests(&one), requests(&two)), (3, 0));

    let bytes = one.write_load_report(&mut row, head).to_vec();
    assert!(
        !two.read_load_report(&mut peer, bytes, true),
        "no SLO in it"
    );
    assert_eq!((requests(&two), peer.head()), (3, head));
    let idle: Vec<&str> = (0..4)
        .filter(|slot| two.in_flight().load(at(*slot)).requests == 0)
        .map(|slot| ADDRESS[usize::from(slot)])
        .collect();
    assert_eq!(
        tally(&mut two, 10, ms(4)),
        BTreeMap::from([(idle[0].to_owned(), 10)]),
        "it picks the endpoint that the other worker left idle"
    );

    assert!(!two.count_load_report(&mut peer, false));
    assert_eq!(requests(&two), 0, "the other worker counts as lost");
    assert!(!two.count_load_report(&mut peer, true));
    assert_eq!(requests(&two), 3, "the other worker counts again");
    two.install(by("active-request-scorer", 4, &[]), 7, 1_000);
    two.recount_load_reports([&peer]);
    two.recount_load_reports([&peer]);
    assert_eq!(requests(&two), 3, "however often it is recounted");
    two.set_peer_loads([
        (
            at(1),
            EndpointLoad {
                requests: 5,
                ..EndpointLoad::default()
            },
        ),
        (
            at(1),
            EndpointLoad {
                requests: 1,
                ..EndpointLoad::default()
            },
        ),
    ]);
    assert_eq!(
        (requests(&two), two.in_flight().load(at(1)).requests),
        (6, 6),
        "loads that a host sums itself replace the reports"
    );

    for exchange in &mut under_way {
        exchange.end(&mut one, ms(5));
    }
    two.recount_load_reports([&peer]);
    let bytes = one.write_load_report(&mut row, head).to_vec();
    assert!(!two.read_load_report(&mut peer, bytes, true));
    assert_eq!(
        (requests(&one), requests(&two), row.is_idle()),
        (0, 0, true)
    );
}

#[test]
fn the_lowest_slo_of_others_is_found_anew_when_one_leaves() {
    let mut pool = pool_by("active-request-scorer", 4, 1);
    let row = |ttft: u32, tpot: u32| {
        let words = [
            1_u64,
            1,
            0,
            1 << 16,
            1,
            u64::from(ttft) | u64::from(tpot) << 32,
        ];
        let slot_1 = 1_u64 | 1 << 32;
        let mut bytes: Vec<u8> = words[..4]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        bytes.extend(
            [slot_1, words[5]]
                .iter()
                .flat_map(|word| word.to_le_bytes()),
        );
        bytes
    };
    let mut strict = PeerLoadReport::default();
    let mut lax = PeerLoadReport::default();
    assert!(
        pool.read_load_report(&mut strict, row(200_000, 20_000), true),
        "SLOs are to be put together"
    );
    assert!(pool.read_load_report(&mut lax, row(900_000, 50_000), true));
    let slos = |pool: &ManagedPool| {
        (
            pool.in_flight().load(at(1)).ttft_slo_us,
            pool.in_flight().load(at(1)).tpot_slo_us,
        )
    };
    pool.recompute_peer_slos([&strict, &lax]);
    assert_eq!(slos(&pool), (Some(200_000), Some(20_000)));
    assert!(pool.count_load_report(&mut strict, false));
    pool.recompute_peer_slos([&strict, &lax]);
    assert_eq!(slos(&pool), (Some(900_000), Some(50_000)));
}

/// Lets the endpoint `by` reply after this many attempts, and ends the request.
fn answered(
    pool: &mut ManagedPool,
    mut exchange: Exchange,
    by: &str,
    attempts: u32,
    now: Timestamp,
) {
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(by.as_bytes()),
        attempts,
        ..ResponseHead::default()
    };
    exchange.response_headers(pool, &head, now);
    exchange.end(pool, now);
}

/// Lets the endpoint `by` give a complete reply.
pub(crate) fn served(pool: &mut ManagedPool, mut exchange: Exchange, by: &str, now: Timestamp) {
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(by.as_bytes()),
        attempts: 1,
        ..ResponseHead::default()
    };
    exchange.response_headers(pool, &head, now);
    let reply = br#"{"choices":[{"text":"ok","finish_reason":"stop"}]}"#;
    exchange.response_chunk(pool, reply, true, now);
    exchange.end(pool, now);
}

/// Lets the endpoint `by` refuse the prompt.
fn refused(pool: &mut ManagedPool, exchange: Exchange, by: &str, now: Timestamp) {
    with_status(pool, exchange, by, 400, now);
}

/// Lets the endpoint `by` answer with an error of this status.
pub(crate) fn with_status(
    pool: &mut ManagedPool,
    mut exchange: Exchange,
    by: &str,
    status: u16,
    now: Timestamp,
) {
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status,
        upstream_address: Some(by.as_bytes()),
        attempts: 1,
        ..ResponseHead::default()
    };
    exchange.response_headers(pool, &head, now);
    let reply = br#"{"error":{"message":"maximum context length"}}"#;
    exchange.response_chunk(pool, reply, true, now);
    exchange.end(pool, now);
}

/// Passes to `other` the placements that `pool` has published since the last call. Returns the kind
/// of each placement and the number of its new blocks.
fn received(pool: &mut ManagedPool, other: &mut ManagedPool) -> Vec<(PlacementKind, usize)> {
    let placements = pool.take_placements();
    for placement in &placements {
        other.record_peer_placement(placement.kind, placement.endpoint, &placement.blocks, ms(1));
    }
    let new = |placement: &Placement| {
        let new = placement.blocks.len() - placement.known as usize;
        (placement.kind, new)
    };
    placements.iter().map(new).collect()
}

/// Checks that the cached location of a prompt is used from the pick on, in this worker and in
/// others, until the endpoint refuses the prompt.
#[test]
fn a_placement_is_confirmed_by_a_reply_and_withdrawn_by_a_refusal_everywhere() {
    let prompt = "once upon a time ".repeat(200);
    let mut one = pool_by("prefix-cache-scorer", 4, 1);
    let mut two = pool_by("prefix-cache-scorer", 4, 2);
    one.set_placement_publishing(true);
    let next = |pool: &mut ManagedPool| {
        let (mut exchange, to) = send(pool, &format!("{prompt} and so on"), ms(1));
        exchange.end(pool, ms(1));
        to
    };
    let blocks_of_two = |pool: &ManagedPool| pool.prefixes().stats().entries;

    let (exchange, to) = send(&mut one, &prompt, ms(1));
    let published = received(&mut one, &mut two);
    let [(PlacementKind::Unconfirmed, blocks)] = published[..] else {
        panic!("{published:?}")
    };
    assert!(blocks > 4 && blocks_of_two(&two) == blocks);
    refused(&mut one, exchange, &to, ms(1));
    assert_eq!(
        received(&mut one, &mut two),
        [(PlacementKind::Withdrawn, blocks)]
    );
    assert_eq!((blocks_of_two(&one), blocks_of_two(&two)), (0, 0));

    let (exchange, to) = send(&mut one, &prompt, ms(1));
    served(&mut one, exchange, &to, ms(1));
    assert_eq!(
        received(&mut one, &mut two),
        [
            (PlacementKind::Unconfirmed, blocks),
            (PlacementKind::Confirmed, blocks)
        ]
    );
    assert_eq!((next(&mut one), next(&mut two)), (to.clone(), to.clone()));

    let (exchange, again) = send(&mut one, &prompt, ms(1));
    refused(&mut one, exchange, &again, ms(1));
    received(&mut one, &mut two);
    assert_eq!(again, to);
    assert_eq!(
        (next(&mut one), next(&mut two)),
        (to.clone(), to),
        "a refusal takes nothing that was confirmed"
    );
}

#[test]
fn what_is_news_to_others_is_counted() {
    let mut pool = ManagedPool::new(3, 1024);
    pool.install(pool_update(4, 1), 7, 1_000);
    let mut seen = pool.changes();
    let mut grew =
        |pool: &ManagedPool| pool.changes() - std::mem::replace(&mut seen, pool.changes());
    let (mut exchange, _) = send(&mut pool, "hi", ms(1));
    assert_eq!(grew(&pool), 1, "a pick");
    exchange.end(&mut pool, ms(2));
    assert_eq!(grew(&pool), 1, "an end");

    let (exchange, first) = send(&mut pool, "hi", ms(3));
    assert_eq!(grew(&pool), 1);
    let other = ADDRESS.iter().find(|address| **address != first).unwrap();
    let failed = at(ADDRESS
        .iter()
        .position(|address| *address == first)
        .unwrap()
        .try_into()
        .unwrap());
    answered(&mut pool, exchange, other, 2, ms(4));
    assert_eq!(
        pool.counters()
            .endpoints()
            .iter()
            .map(|row| row.failed)
            .sum::<u64>(),
        1
    );
    assert_eq!(
        grew(&pool),
        3,
        "a failure, the move to the served endpoint, and an end"
    );
    assert_eq!(
        pool.ejections()
            .iter()
            .map(|row| (row.endpoint, row.failures))
            .collect::<Vec<_>>(),
        [(failed, 1)]
    );

    let (mut exchange, first_of_stream) = send(&mut pool, "hi", ms(4));
    assert_eq!(grew(&pool), 1);
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(first_of_stream.as_bytes()),
        attempts: 1,
        content_type: Some(b"text/event-stream"),
        ..ResponseHead::default()
    };
    exchange.response_headers(&mut pool, &head, ms(4));
    exchange.response_chunk(
        &mut pool,
        b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n",
        false,
        ms(4),
    );
    assert_eq!(grew(&pool), 1, "a first token");
    exchange.response_chunk(
        &mut pool,
        b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n",
        true,
        ms(4),
    );
    assert_eq!(grew(&pool), 0, "a further token is no change");
    exchange.end(&mut pool, ms(4));

    let mut row = OwnLoadReport::default();
    let mut peer = PeerLoadReport::default();
    let mut two = ManagedPool::new(4, 1024);
    two.install(pool_update(4, 1), 7, 1_000);
    let bytes = pool
        .write_load_report(&mut row, LoadReportHead::default())
        .to_vec();
    two.read_load_report(&mut peer, bytes, true);
    let ejections: Vec<_> = peer.ejections().collect();
    assert_eq!(
        ejections
            .iter()
            .map(|row| (row.endpoint, row.failures))
            .collect::<Vec<_>>(),
        [(failed, 1)]
    );
    let before = two.changes();
    two.learn_ejection(ejections[0], ms(5));
    assert_eq!(two.changes() - before, 1, "news");
    two.learn_ejection(ejections[0], ms(6));
    two.learn_ejection(
        pool_state::Ejection {
            endpoint: at(9),
            ..ejections[0]
        },
        ms(6),
    );
    assert_eq!(
        two.changes() - before,
        1,
        "known by now; an endpoint outside the pool cannot fail"
    );
    assert!(
        !tally(&mut two, 40, ms(7)).contains_key(&first),
        "no request goes to the endpoint that failed for another worker"
    );

    // The endpoint answers again. Only the first answer is a change.
    let forget = |pool: &mut ManagedPool, now| {
        let body = br#"{"model":"m","prompt":"hi"}"#;
        let mut exchange = Exchange::new(now);
        let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/completions")];
        exchange.request_headers(&ExchangeSettings::default(), pairs, false);
        exchange.decide(
            &ExchangeSettings::default(),
            pool,
            Some(first.as_bytes()),
            body,
            now,
        );
        let before = pool.changes();
        answered(pool, exchange, &first, 1, now);
        pool.changes() - before
    };
    let cleared = forget(&mut two, ms(2_000));
    let again = forget(&mut two, ms(2_001));
    assert_eq!(cleared, again + 1);
    two.tick(ms(2_100));
    assert_eq!(
        published_failures(&mut two),
        1,
        "the answer is published for a while"
    );
    two.tick(ms(120_000));
    assert_eq!(published_failures(&mut two), 0, "then it is forgotten");
}

#[test]
fn that_earlier_stages_are_done_is_news_of_each() {
    let mut pool = ManagedPool::new(3, 1024);
    pool.install(split_pool_update(6, 1), 7, 1_000);
    let (exchange, to) = send(&mut pool, "hi", ms(1));
    let before = pool.changes();
    answered(&mut pool, exchange, &to, 1, ms(2));
    assert_eq!(pool.changes() - before, 3, "prefill, encode, and the end");
}

#[test]
fn what_is_known_of_failures_goes_with_the_endpoint() {
    let mut pool = pool_by("queue-scorer", 4, 1);
    for slot in [3, 0] {
        pool.learn_ejection(
            pool_state::Ejection {
                at: ms(1),
                failures: 1,
                until: ms(1_000),
                endpoint: at(slot),
                outside: false,
                by_answers: false,
                is_own: false,
            },
            ms(1),
        );
    }
    pool.install(by("queue-scorer", 2, &[]), 7, 1_000);
    assert_eq!(
        pool.ejections()
            .iter()
            .map(|row| row.endpoint)
            .collect::<Vec<_>>(),
        [at(0)]
    );
}

#[test]
fn a_pick_stands_for_those_of_other_proxies_until_theirs_can_be_heard() {
    let mut pool = pool_by("active-request-scorer", 4, 1);
    pool.estimate_peer_picks(3, 10_000, ms(1));
    let (mut exchange, _) = send(&mut pool, "hi", ms(1));
    assert_eq!(
        requests(&pool),
        4,
        "one here, and one for each of the three other proxies"
    );
    pool.estimate_peer_picks(3, 10_000, ms(11));
    assert_eq!(requests(&pool), 1);
    exchange.end(&mut pool, ms(12));
}

#[test]
fn who_is_asked_first_is_known_from_the_pick_on() {
    let mut pool = pool_by("queue-scorer", 4, 1);
    assert!(
        !Exchange::new(ms(1)).is_first_endpoint(ADDRESS[0].as_bytes()),
        "no endpoint was picked"
    );
    let (exchange, to) = send(&mut pool, "hi", ms(1));
    assert!(
        ADDRESS
            .iter()
            .all(|address| exchange.is_first_endpoint(address.as_bytes()) == (*address == to))
    );
}

fn published_failures(pool: &mut ManagedPool) -> usize {
    let mut row = OwnLoadReport::default();
    let mut peer = PeerLoadReport::default();
    let bytes = pool
        .write_load_report(&mut row, LoadReportHead::default())
        .to_vec();
    ManagedPool::new(1, 0).read_load_report(&mut peer, bytes, false);
    peer.ejections().count()
}

#[test]
fn placements_are_kept_for_telling_up_to_a_bound_and_only_where_wanted() {
    let prompt = |n: usize| format!("{n} once upon a time ").repeat(200);
    let mut pool = pool_by("prefix-cache-scorer", 4, 1);
    let (exchange, to) = send(&mut pool, &prompt(0), ms(1));
    served(&mut pool, exchange, &to, ms(1));
    assert!(pool.take_placements().is_empty(), "publishing is off");

    pool.set_placement_publishing(true);
    let mut exchange = Exchange::new(ms(1));
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"GET"), (b":path", b"/v1/models")];
    exchange.request_headers(&ExchangeSettings::default(), pairs, true);
    assert!(matches!(
        exchange.decide(&ExchangeSettings::default(), &mut pool, None, b"", ms(1)),
        ExchangeStep::Forward(_)
    ));
    exchange.end(&mut pool, ms(1));
    let reported: Vec<usize> = pool
        .take_placements()
        .iter()
        .map(|placement| placement.blocks.len())
        .collect();
    assert_eq!(
        reported,
        [0],
        "a request without a prompt is published as a pick without blocks"
    );
    let (exchange, to) = send(&mut pool, &prompt(0), ms(1));
    served(&mut pool, exchange, &to, ms(1));
    let placement = pool.take_placements().pop_back().unwrap();
    assert_eq!(
        (placement.endpoint, placement.known as usize),
        (at_address(&to), placement.blocks.len()),
        "all blocks were known to be cached there"
    );
    assert!(pool.take_placements().is_empty(), "taken");

    // If more placements arrive than fit, the oldest are dropped and counted. The kept placements
    // stay complete, and taking them makes room.
    let sent = |pool: &mut ManagedPool| {
        for n in 0..SENT {
            let (exchange, to) = send(
                pool,
                &format!("{} once upon a time ", n % 3).repeat(8_000),
                ms(1),
            );
            served(pool, exchange, &to, ms(1));
        }
        pool.take_placements()
    };
    let blocks = |placements: &VecDeque<Placement>| {
        placements
            .iter()
            .map(|placement| placement.blocks.len())
            .sum::<usize>()
    };
    let bound = 4 * scheduler::prefix::BLOCKS_MAX;
    let dropped = pool.placements_dropped();
    let first = sent(&mut pool);
    assert!(
        blocks(&first) <= bound && blocks(&first) > bound - bound / 20,
        "{} of {bound}",
        blocks(&first)
    );
    assert_eq!(
        pool.placements_dropped() - dropped,
        (2 * SENT - first.len()) as u64
    );
    assert!(
        first
            .iter()
            .all(|placement| placement.known as usize == placement.blocks.len()),
        "the first three, with new blocks, were dropped first"
    );
    assert_eq!(blocks(&sent(&mut pool)), blocks(&first));
    pool.set_placement_publishing(false);
    assert!(sent(&mut pool).is_empty());
}

/// The number of prompts, with about 250 hashes each. The pool keeps far fewer hashes.
const SENT: usize = 300;

fn at_address(address: &str) -> EndpointRef {
    at(ADDRESS
        .iter()
        .position(|known| *known == address)
        .unwrap()
        .try_into()
        .unwrap())
}

#[test]
fn hashes_are_keyed_by_the_secret_of_the_deployment() {
    let blocks = |secret: u128| {
        let mut pool = ManagedPool::new(1, 1024);
        pool.install(pool_update(1, 1), secret, 1_000);
        pool.set_placement_publishing(true);
        let (mut exchange, _) = send(&mut pool, &"once upon a time ".repeat(200), ms(1));
        exchange.end(&mut pool, ms(1));
        pool.take_placements().pop_front().unwrap().blocks
    };
    let one = blocks(1);
    let two = blocks(0);
    let three = blocks(1 << 64 | 1);
    assert_eq!(blocks(1), one);
    assert!(
        one.len() > 1
            && one
                .iter()
                .all(|block| !two.contains(block) && !three.contains(block))
    );
}

#[test]
fn metrics_count_until_they_are_older_than_is_allowed() {
    let mut pool = pool_by("queue-scorer", 2, 1);
    assert_eq!(
        tally(&mut pool, 60, ms(10)).len(),
        2,
        "nothing is known yet"
    );
    pool.refresh(by("queue-scorer", 2, &[50.0, 0.0]), ms(10));
    assert_eq!(
        tally(&mut pool, 60, ms(1_010)),
        BTreeMap::from([(ADDRESS[1].to_owned(), 60)]),
        "a second old, as is allowed"
    );
    assert_eq!(
        tally(&mut pool, 60, ms(1_011)).len(),
        2,
        "a millisecond older: no reason to prefer an endpoint"
    );
}

#[test]
fn metrics_of_those_who_stay_outlive_a_new_pool_update() {
    let mut pool = pool_by("queue-scorer", 2, 1);
    pool.refresh(by("queue-scorer", 2, &[50.0, 3.0]), ms(10));
    pool.install(by("queue-scorer", 3, &[]), 7, 1_000);
    let queues: Vec<Option<f32>> = pool
        .snapshot()
        .unwrap()
        .metrics()
        .iter()
        .map(|metrics| metrics.queue_depth)
        .collect();
    assert_eq!(queues, [Some(50.0), Some(3.0), None]);
    pool.install(pool_update(3, 2), 7, 1_000);
    let queues: Vec<Option<f32>> = pool
        .snapshot()
        .unwrap()
        .metrics()
        .iter()
        .map(|metrics| metrics.queue_depth)
        .collect();
    assert_eq!(
        queues,
        [None, None, None],
        "another generation at the same slot is another endpoint"
    );
}

#[test]
fn out_of_touch_prompts_go_to_the_home_that_all_compute_alike() {
    let homes = |out_of_touch: bool, seed: u64| -> Vec<String> {
        let mut pool = pool_by("prefix-cache-scorer", 4, seed);
        pool.set_peers_unreachable(out_of_touch);
        (0..12)
            .map(|n| {
                send(
                    &mut pool,
                    &format!("{n} once upon a time ").repeat(200),
                    ms(1),
                )
                .1
            })
            .collect()
    };
    assert_eq!(homes(true, 1), homes(true, 2));
    assert_ne!(
        homes(false, 1),
        homes(false, 2),
        "otherwise chance decides between equals"
    );
}

#[test]
fn out_of_touch_a_prompt_is_drawn_to_one_home_and_believed_to_be_nowhere() {
    let settings = recording();
    let mut pool = pool_by("prefix-cache-scorer", 4, 1);
    pool.set_peers_unreachable(true);
    let mut homes = BTreeMap::new();
    for n in 0..12 {
        let mut exchange = Exchange::new(ms(1));
        exchange.request_headers(
            &settings,
            [
                (&b":method"[..], &b"POST"[..]),
                (b":path", b"/v1/completions"),
            ],
            false,
        );
        let body = format!(
            r#"{{"model":"m","prompt":"{}"}}"#,
            format!("{n} once upon a time ").repeat(200)
        );
        assert!(matches!(
            exchange.decide(&settings, &mut pool, None, body.as_bytes(), ms(1)),
            ExchangeStep::Forward(_)
        ));
        let record: serde_json::Value =
            serde_json::from_str(&exchange.take_record().unwrap()).unwrap();
        let endpoints = record["endpoints"].as_array().unwrap();
        assert!(
            endpoints
                .iter()
                .all(|endpoint| endpoint["matched_blocks"] == 0),
            "it is estimated to be cached nowhere"
        );
        let replayed = ParsedRecord::from_json(&record.to_string())
            .unwrap()
            .replay(pool.snapshot().unwrap(), &[])
            .unwrap();
        assert!(
            matches!(replayed.decision, Decision::Route(_)),
            "the replay has no rendezvous endpoint, because the record has no hash: {replayed:?}"
        );
        let home = record["picked"][0].as_str().unwrap().to_owned();
        *homes.entry(home).or_insert(0) += 1;
    }
    assert_eq!(homes.len(), 4, "{homes:?}");
    assert_eq!(
        pool.counters().matched_tokens,
        0,
        "favoured, but not estimated as cached"
    );
}

#[test]
fn what_is_believed_to_be_held_of_a_prompt_is_counted_and_not_charged() {
    let mut pool = pool_by("prefix-cache-scorer", 1, 1);
    let prompt = "once upon a time ".repeat(200);
    let ask = |pool: &mut ManagedPool| {
        let (mut exchange, _) = send(pool, &prompt, ms(1));
        let uncached = pool.in_flight().load(at(0)).prefills.uncached_tokens;
        exchange.end(pool, ms(1));
        (
            uncached,
            pool.counters().prompt_tokens,
            pool.counters().matched_tokens,
        )
    };
    let tokens = 3_400 / 4;
    assert_eq!(ask(&mut pool), (tokens, tokens, 0));
    assert_eq!(ask(&mut pool), (0, 2 * tokens, tokens));
    assert_eq!(ask(&mut pool), (0, 3 * tokens, 2 * tokens));
}

#[test]
fn what_engines_report_adds_up() {
    let mut pool = pool_by("queue-scorer", 1, 1);
    let body = br#"{"usage":{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":25}}}"#;
    for _ in 0..2 {
        let (mut exchange, to) = send(&mut pool, "hi", ms(1));
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: 200,
            upstream_address: Some(to.as_bytes()),
            attempts: 1,
            ..ResponseHead::default()
        };
        exchange.response_headers(&mut pool, &head, ms(2));
        exchange.response_chunk(&mut pool, body, true, ms(3));
        exchange.end(&mut pool, ms(3));
    }
    let [row] = pool.counters().models() else {
        panic!("one model")
    };
    assert_eq!(
        (
            row.requests,
            row.running,
            row.tokens.prompt,
            row.tokens.completion,
            row.tokens.cached
        ),
        (2, 0, 200, 10, 50)
    );
    assert_eq!(row.response_bytes, 2 * body.len() as u64);
}

#[test]
fn an_endpoint_that_holds_all_it_may_forgets_in_slices() {
    let mut pool = pool_by("prefix-cache-scorer", 4, 1);
    for n in 0..40 {
        let (mut exchange, _) = send(
            &mut pool,
            &format!("{n} once upon a time ").repeat(200),
            ms(1),
        );
        exchange.end(&mut pool, ms(1));
    }
    let before = pool.prefixes().stats().entries;
    pool.install(pool_update(2, 1), 7, 1_000);
    let after = pool.prefixes().stats().entries;
    assert!(
        after > 0 && after < before,
        "entries of the two removed endpoints do not count: {after} of {before}"
    );
    for _ in 0..100 {
        pool.tick(ms(2));
    }
    assert_eq!(
        pool.prefixes().stats().entries,
        after,
        "what stays is not swept away"
    );
}
