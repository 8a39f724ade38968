//! The workers of a process share the streak of failures at an endpoint: four workers eject a
//! broken endpoint after as many failures as one worker.

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use pool_state::peers::EncodedPlacements;
use pool_state::{Placement, PlacementKind};

use crate::workers::{ADDRESS, at, ms, pool_by, send, served, with_status};

/// The endpoint that fails.
const BROKEN: u16 = 0;

/// Makes this many workers. Each worker has seen another endpoint answer.
fn workers(number: u64) -> Vec<ManagedPool> {
    let start = |seed| {
        let mut pool = pool_by("active-request-scorer", 4, seed);
        pool.set_placement_publishing(true);
        let exchange = send_to(&mut pool, "fine", 1, ms(1));
        served(&mut pool, exchange, ADDRESS[1], ms(1));
        pool.take_placements();
        pool
    };
    (0..number).map(start).collect()
}

/// Sends the prompt until the endpoint of this slot gets it. If another endpoint gets the prompt,
/// the client leaves and sends the prompt again.
fn send_to(pool: &mut ManagedPool, prompt: &str, slot: u16, now: Timestamp) -> Exchange {
    for _ in 0..1_000 {
        let (mut exchange, to) = send(pool, prompt, now);
        if to == ADDRESS[usize::from(slot)] {
            return exchange;
        }
        exchange.end(pool, now);
    }
    panic!("no request goes to endpoint {slot}")
}

/// Lets the broken endpoint answer this prompt through one worker. All other workers receive what
/// this worker learned.
fn answer(workers: &mut [ManagedPool], worker: usize, prompt: &str, status: u16, now: Timestamp) {
    let pool = &mut workers[worker];
    let exchange = send_to(pool, prompt, BROKEN, now);
    if status == 200 {
        served(pool, exchange, ADDRESS[usize::from(BROKEN)], now);
    } else {
        with_status(pool, exchange, ADDRESS[usize::from(BROKEN)], status, now);
    }
    for placement in pool.take_placements() {
        for (_, other) in workers
            .iter_mut()
            .enumerate()
            .filter(|(other, _)| *other != worker)
        {
            other.record_peer_placement(placement.kind, placement.endpoint, &placement.blocks, now);
        }
    }
}

fn is_mark(block: u64) -> bool {
    block.to_be_bytes().starts_with(b"Fail")
}

/// Whether this says that an endpoint answers a client while it fails for others.
fn is_answer(placement: &&Placement) -> bool {
    placement.kind == PlacementKind::Unconfirmed
        && placement.blocks.iter().any(|block| is_mark(*block))
}

fn is_ejected_by_any(workers: &[ManagedPool]) -> bool {
    workers.iter().any(|pool| !pool.ejections().is_empty())
}

#[test]
fn a_broken_endpoint_is_ejected_after_five_failures_behind_any_number_of_workers() {
    for number in [1, 2, 4, 16] {
        let mut workers = workers(number);
        let failures = (1..=100).find(|n| {
            let worker = *n as usize % workers.len();
            answer(
                &mut workers,
                worker,
                &format!("prompt {n}"),
                500,
                ms(10 + n),
            );
            is_ejected_by_any(&workers)
        });
        assert_eq!(failures, Some(5), "{number} workers");
    }
}

#[test]
fn one_prompt_that_fails_through_every_worker_counts_once() {
    let mut workers = workers(8);
    for n in 0..400 {
        let worker = n as usize % workers.len();
        answer(&mut workers, worker, "the same prompt", 500, ms(10 + n));
    }
    assert!(!is_ejected_by_any(&workers));
}

#[test]
fn a_success_through_one_worker_ends_the_streak_of_all() {
    let mut workers = workers(4);
    for n in 0..40 {
        let worker = n as usize % workers.len();
        let prompt = format!("prompt {n}");
        let status = if n % 5 == 4 { 200 } else { 500 };
        answer(&mut workers, worker, &prompt, status, ms(10 + 600 * n));
    }
    assert!(
        !is_ejected_by_any(&workers),
        "four of five fail, and never five in a row"
    );
}

#[test]
fn a_wave_of_bad_prompts_through_four_workers_ejects_no_endpoint() {
    let mut workers = workers(4);
    for n in 0..400_u64 {
        let worker = n as usize % workers.len();
        let pool = &mut workers[worker];
        let slot = (n / 4 % 4) as u16;
        let exchange = send_to(pool, &format!("prompt {n}"), slot, ms(10 + n));
        with_status(pool, exchange, ADDRESS[usize::from(slot)], 500, ms(10 + n));
        let placements = pool.take_placements();
        for placement in placements {
            for (other, pool) in workers.iter_mut().enumerate() {
                if other != worker {
                    pool.record_peer_placement(
                        placement.kind,
                        placement.endpoint,
                        &placement.blocks,
                        ms(10 + n),
                    );
                }
            }
        }
        assert!(!is_ejected_by_any(&workers), "{n}");
    }
}

#[test]
fn the_first_good_answer_to_a_client_in_a_streak_is_published() {
    let mut pool = workers(1).remove(0);
    let mut now = ms(10);
    let mut answers = |prompt| {
        now = now.plus_ms(10);
        let mut exchange = send_to(&mut pool, prompt, BROKEN, now);
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: if prompt == "bad" { 500 } else { 200 },
            upstream_address: Some(ADDRESS[usize::from(BROKEN)].as_bytes()),
            attempts: 1,
            ..ResponseHead::default()
        };
        exchange.response_headers(&mut pool, &head, now);
        exchange.end(&mut pool, now);
        pool.take_placements().iter().filter(is_answer).count()
    };
    assert_eq!(
        ["fine", "bad", "good", "better"].map(&mut answers),
        [0, 0, 1, 0]
    );
}

#[test]
fn a_good_answer_to_another_request_than_inference_does_not_speak_for_a_failing_endpoint() {
    let mut pool = workers(1).remove(0);
    let exchange = send_to(&mut pool, "bad", BROKEN, ms(10));
    with_status(&mut pool, exchange, ADDRESS[0], 500, ms(10));
    pool.take_placements();
    let settings = ExchangeSettings::default();
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"GET"), (b":path", b"/v1/models")];
    let is_answered = (0..1_000).any(|_| {
        let mut exchange = Exchange::new(ms(20));
        exchange.request_headers(&settings, pairs, true);
        exchange.capture_headers(&pool, pairs);
        let step = exchange.decide(&settings, &mut pool, None, b"", ms(20));
        let ExchangeStep::Forward(forward) = step else {
            panic!("not routed: {step:?}")
        };
        let mut headers = forward.set.iter();
        let to = headers.find(|(name, _)| name == "x-gateway-destination-endpoint");
        let is_there = to.is_some_and(|(_, to)| to.starts_with(ADDRESS[0]));
        if is_there {
            let head = ResponseHead {
                origin: ResponseOrigin::Upstream,
                status: 200,
                upstream_address: Some(ADDRESS[0].as_bytes()),
                attempts: 1,
                ..ResponseHead::default()
            };
            exchange.response_headers(&mut pool, &head, ms(20));
        }
        exchange.end(&mut pool, ms(20));
        is_there
    });
    assert!(is_answered);
    assert_eq!(pool.take_placements().iter().filter(is_answer).count(), 0);
}

#[test]
fn another_proxy_neither_hears_of_a_streak_nor_makes_one() {
    let mut workers = workers(2);
    let exchange = send_to(&mut workers[0], "prompt", BROKEN, ms(10));
    with_status(&mut workers[0], exchange, ADDRESS[0], 500, ms(10));
    let published = workers[0].take_placements();
    let mark = published
        .iter()
        .find(|placement| placement.blocks.iter().any(|block| is_mark(*block)))
        .expect("the failure is published");
    assert_eq!(mark.known, 1, "nothing of it is sent on");

    let mut hostile = EncodedPlacements::default();
    hostile.append(PlacementKind::Confirmed, at(BROKEN), &mark.blocks);
    hostile.append(PlacementKind::Withdrawn, at(BROKEN), &mark.blocks);
    hostile.append(PlacementKind::Confirmed, at(BROKEN), &[7]);
    let received: Vec<_> = hostile.each().collect();
    assert_eq!(
        received,
        [(PlacementKind::Confirmed, at(BROKEN), vec![7])],
        "another proxy's marks are dropped"
    );
}
