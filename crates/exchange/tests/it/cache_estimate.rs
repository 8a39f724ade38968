//! The cached tokens that an engine reports correct the estimate of its cache.

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use scheduler::{EndpointMetrics, EndpointRef, Snapshot, Version};

use crate::release::{pool_update, split_pool_update};

const BLOCKS: u32 = 1_000;

/// Returns a pool with one endpoint that reports a cache of a thousand blocks, and the endpoint.
fn pool() -> (ManagedPool, EndpointRef) {
    pool_of(pool_update(1, 1))
}

/// Returns a pool whose endpoints all report a cache of a thousand blocks, and the first endpoint.
fn pool_of(pool_update: Snapshot) -> (ManagedPool, EndpointRef) {
    let mut pool = ManagedPool::new(7, 16_384);
    let endpoint = pool_update.endpoints()[0].id;
    let room = EndpointMetrics {
        kv_blocks: Some(BLOCKS),
        kv_block_tokens: Some(64),
        ..EndpointMetrics::default()
    };
    let metrics = vec![room; pool_update.endpoints().len()];
    let measured: Snapshot = pool_update
        .with_metrics(
            Version {
                term: 1,
                sequence: 2,
            },
            metrics,
        )
        .unwrap();
    pool.install(pool_update, 7, 1_000);
    pool.refresh(measured, Timestamp(0));
    (pool, endpoint)
}

/// Sends a request with a prompt of about fifty blocks. The engine answers immediately and reports
/// the part of the prompt that was cached.
fn ask(pool: &mut ManagedPool, number: usize, cached_percent: u32) {
    ask_served_by(pool, number, cached_percent, b"10.0.0.0:8000");
}

fn ask_served_by(pool: &mut ManagedPool, number: usize, cached_percent: u32, server: &[u8]) {
    ask_prompt(
        pool,
        &format!("{number:07} is so ").repeat(850),
        5_000 * cached_percent / 100,
        5_000,
        server,
    );
}

/// Sends a prompt. The engine reports `cached` tokens of `tokens`, by its own count.
fn ask_prompt(pool: &mut ManagedPool, prompt: &str, cached: u32, tokens: u32, server: &[u8]) {
    ask_body(
        pool,
        b"/v1/completions",
        &format!(r#"{{"model":"m","prompt":"{prompt}"}}"#),
        cached,
        tokens,
        server,
    );
}

fn ask_body(
    pool: &mut ManagedPool,
    path: &[u8],
    body: &str,
    cached: u32,
    tokens: u32,
    server: &[u8],
) {
    ask_body_from(pool, "", path, body, [cached, tokens], server);
}

/// Sends a body from this client address. The engine reports cached tokens and all tokens.
fn ask_body_from(
    pool: &mut ManagedPool,
    address: &str,
    path: &[u8],
    body: &str,
    [cached, tokens]: [u32; 2],
    server: &[u8],
) {
    let mut exchange = Exchange::new(Timestamp(0));
    let pairs: [(&[u8], &[u8]); 3] = [
        (b":method", b"POST"),
        (b":path", path),
        (b"x-forwarded-for", address.as_bytes()),
    ];
    exchange.request_headers(&ExchangeSettings::default(), pairs, false);
    let ExchangeStep::Forward(_) = exchange.decide(
        &ExchangeSettings::default(),
        pool,
        None,
        body.as_bytes(),
        Timestamp(0),
    ) else {
        panic!("not routed")
    };
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(server),
        attempts: 1,
        content_type: Some(b"application/json"),
        ..ResponseHead::default()
    };
    exchange.response_headers(pool, &head, Timestamp(1));
    let usage = format!(
        r#"{{"usage":{{"prompt_tokens":{tokens},"completion_tokens":1,"prompt_tokens_details":{{"cached_tokens":{cached}}}}}}}"#
    );
    exchange.response_chunk(pool, usage.as_bytes(), true, Timestamp(1));
    exchange.end(pool, Timestamp(1));
}

fn capacity(pool: &ManagedPool, endpoint: EndpointRef) -> u32 {
    pool.prefixes().capacity(endpoint).unwrap()
}

#[test]
fn an_engine_that_had_less_than_believed_is_believed_to_hold_less() {
    let (mut pool, endpoint) = pool();
    (0..20).for_each(|number| ask(&mut pool, number, 0));
    assert_eq!(
        capacity(&pool, endpoint),
        BLOCKS,
        "nothing was believed of any of them"
    );
    ask(&mut pool, 8, 0);
    assert!(
        capacity(&pool, endpoint) < BLOCKS * 9 / 10,
        "{}",
        capacity(&pool, endpoint)
    );
}

/// Sends three old prompts, which miss, from these client addresses. Before, a client fills the
/// cache and gets a hit. Returns the estimated capacity.
fn capacity_after_misses(filled_by: &str, misses_of: [&str; 3]) -> u32 {
    let (mut pool, endpoint) = pool();
    let mut ask_from = |address: &str, number: usize, cached: u32| {
        let prompt = format!("{number:07} is so ").repeat(850);
        let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
        let tokens = [cached, 5_000];
        let path = b"/v1/completions";
        ask_body_from(&mut pool, address, path, &body, tokens, b"10.0.0.0:8000");
    };
    (0..20).for_each(|number| ask_from(filled_by, number, 0));
    ask_from(filled_by, 19, 4_950);
    for (number, address) in (8..).zip(misses_of) {
        ask_from(address, number, 0);
    }
    capacity(&pool, endpoint)
}

#[test]
fn a_client_beside_another_lowers_the_estimate_less_than_two_that_work_together() {
    let [ann, bob, eve] = ["10.1.1.1", "10.2.2.2", "10.3.3.3"];
    let alone = capacity_after_misses(eve, [eve; 3]);
    let together = capacity_after_misses(ann, [eve, bob, eve]);
    let beside_another = capacity_after_misses(ann, [eve; 3]);
    assert_eq!(together, alone, "each miss counts");
    assert!(
        alone < beside_another && beside_another < BLOCKS,
        "{alone} {beside_another}"
    );
}

#[test]
fn what_an_image_is_in_tokens_is_not_known_so_the_reply_proves_nothing() {
    for (image, proves) in [
        ("", true),
        (
            r#",{"type":"image_url","image_url":{"url":"http://a/b.png"}}"#,
            false,
        ),
    ] {
        let (mut pool, endpoint) = pool();
        let chat = |number: usize| {
            let text = format!("{number:07} is so ").repeat(850);
            format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"text","text":"{text}"}}{image}]}}]}}"#
            )
        };
        for number in (0..20).chain([8]) {
            ask_body(
                &mut pool,
                b"/v1/chat/completions",
                &chat(number),
                0,
                14_000,
                b"10.0.0.0:8000",
            );
        }
        assert_eq!(capacity(&pool, endpoint) < BLOCKS, proves, "{image}");
    }
}

#[test]
fn an_engine_that_had_all_of_it_is_believed_as_before() {
    let (mut pool, endpoint) = pool();
    (0..20).for_each(|number| ask(&mut pool, number, 0));
    (10..20).for_each(|number| ask(&mut pool, number, 99));
    assert_eq!(capacity(&pool, endpoint), BLOCKS);
}

#[test]
fn an_engine_that_had_more_than_believed_is_believed_to_hold_more() {
    let (mut pool, endpoint) = pool();
    (0..3).for_each(|number| ask(&mut pool, number, 90));
    assert!(
        capacity(&pool, endpoint) > BLOCKS,
        "{}",
        capacity(&pool, endpoint)
    );
    (3..100).for_each(|number| ask(&mut pool, number, 90));
    assert_eq!(capacity(&pool, endpoint), 2 * BLOCKS, "within reason");
}

#[test]
fn the_same_prompt_again_before_it_is_computed_proves_nothing() {
    let (mut pool, endpoint) = pool();
    (0..18).for_each(|number| ask(&mut pool, number, 0));
    ask(&mut pool, 17, 0);
    assert_eq!(capacity(&pool, endpoint), BLOCKS);
}

#[test]
fn of_a_prompt_that_another_works_through_the_reply_proves_nothing_whoever_serves() {
    for server in [b"10.0.0.0:8000", b"10.0.0.3:8000"] {
        let split = split_pool_update(6, 1); // two of these endpoints decode
        let decoding = [split.endpoints()[0].id, split.endpoints()[3].id];
        let (mut pool, _) = pool_of(split);
        for number in 0..6 {
            ask_served_by(&mut pool, number, 90, server);
        }
        assert_eq!(
            decoding.map(|endpoint| capacity(&pool, endpoint)),
            [BLOCKS; 2]
        );
    }
}

/// Returns as many bytes as `count` blocks have. The start of a prompt takes some bytes too, so a
/// prompt of this text has one more block.
fn blocks(letter: &str, count: usize) -> String {
    letter.repeat(count * 256)
}

#[test]
fn a_sixteenth_and_a_block_are_between_what_was_believed_and_what_proves_it_wrong() {
    let server = b"10.0.0.0:8000";
    let capacity_after = |believed: usize, cached: u32| {
        let (mut pool, endpoint) = pool();
        (0..8).for_each(|number| ask(&mut pool, number, 0));
        ask_prompt(&mut pool, &blocks("a", believed), 0, 48, server);
        (8..20).for_each(|number| ask(&mut pool, number, 0));
        assert_eq!(capacity(&pool, endpoint), BLOCKS);
        // In this test, one token of the engine's count is one block.
        ask_prompt(
            &mut pool,
            &(blocks("a", believed) + &blocks("b", 48 - believed)),
            cached,
            49,
            server,
        );
        capacity(&pool, endpoint).cmp(&BLOCKS)
    };
    use std::cmp::Ordering::{Equal, Greater, Less};
    assert_eq!(
        [44, 45, 49].map(|cached| capacity_after(48, cached)),
        [Less, Equal, Equal]
    );
    assert_eq!(
        [28, 29, 35, 36].map(|cached| capacity_after(32, cached)),
        [Less, Equal, Equal, Greater]
    );
    assert_eq!(
        [0, 1, 2].map(|cached| capacity_after(0, cached)),
        [Equal, Equal, Greater]
    );
}

#[test]
fn an_engine_that_counts_other_tokens_is_believed_too() {
    let (mut pool, _) = pool();
    let mut counted = 0;
    let mut estimate = |pool: &mut ManagedPool, number| {
        ask(pool, number, 0);
        pool.counters().prompt_tokens
            - std::mem::replace(&mut counted, pool.counters().prompt_tokens)
    };
    // The prompt is 850 times 14 bytes; the engine reports 5,000 tokens for it.
    assert_eq!(estimate(&mut pool, 0), 11_900 / 4);
    let last = (1..80)
        .map(|number| estimate(&mut pool, number))
        .last()
        .unwrap();
    assert!((4_950..=5_000).contains(&last), "{last}");
}
