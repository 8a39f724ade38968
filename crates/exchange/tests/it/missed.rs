//! Prompt tokens that engines had to compute, by cause.

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use pool_state::{MISS_CAUSES, TokenCounters};
use scheduler::{EndpointMetrics, Version};

use crate::release::{pool_update, split_pool_update};

/// Sends a prompt. Returns the first endpoint of the ranked list.
fn send(pool: &mut ManagedPool, prompt: &str, hint: Option<&[u8]>) -> (Exchange, String) {
    let mut exchange = Exchange::new(Timestamp(0));
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/completions")];
    exchange.request_headers(&ExchangeSettings::default(), pairs, false);
    let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
    let ExchangeStep::Forward(forward) = exchange.decide(
        &ExchangeSettings::default(),
        pool,
        hint,
        body.as_bytes(),
        Timestamp(0),
    ) else {
        panic!("not routed")
    };
    let first = forward.set[0].1.split(',').next().unwrap().to_owned();
    (exchange, first)
}

/// Sends a prompt, and lets the first endpoint of the ranked list serve it, with this usage.
/// Returns that endpoint.
fn ask(pool: &mut ManagedPool, prompt: &str, hint: Option<&[u8]>, usage: &str) -> String {
    let (mut exchange, first) = send(pool, prompt, hint);
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(first.as_bytes()),
        attempts: 1,
        content_type: Some(b"application/json"),
        ..ResponseHead::default()
    };
    exchange.response_headers(pool, &head, Timestamp(1));
    exchange.response_chunk(
        pool,
        format!(r#"{{"usage":{{{usage}}}}}"#).as_bytes(),
        true,
        Timestamp(1),
    );
    exchange.end(pool, Timestamp(1));
    first
}

fn usage(prompt: u32, cached: u32) -> String {
    format!(
        r#""prompt_tokens":{prompt},"completion_tokens":1,"prompt_tokens_details":{{"cached_tokens":{cached}}}"#
    )
}

fn tokens(pool: &ManagedPool) -> TokenCounters {
    let mut sum = TokenCounters::default();
    for model in pool.counters().models() {
        sum.prompt += model.tokens.prompt;
        sum.cached += model.tokens.cached;
        sum.missed
            .iter_mut()
            .zip(model.tokens.missed)
            .for_each(|(total, count)| *total += count);
    }
    assert_eq!(
        sum.cached + sum.missed.iter().sum::<u64>(),
        sum.prompt,
        "hits and misses are the prompts: {sum:?}"
    );
    sum
}

fn missed_by(pool: &ManagedPool) -> Vec<(&'static str, u64)> {
    MISS_CAUSES
        .into_iter()
        .zip(tokens(pool).missed)
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// Returns a prompt that is one byte shorter than forty blocks.
fn prompt(letter: &str) -> String {
    letter.repeat(40 * 256 - 1)
}

fn pool(endpoints: u8) -> ManagedPool {
    let update = pool_update(endpoints, 1);
    let room = EndpointMetrics {
        kv_blocks: Some(400),
        kv_block_tokens: Some(64),
        ..EndpointMetrics::default()
    };
    let measured = update
        .with_metrics(
            Version {
                term: 1,
                sequence: 2,
            },
            vec![room; usize::from(endpoints)],
        )
        .unwrap();
    let mut pool = ManagedPool::new(7, 65_536);
    pool.install(update, 7, 1_000);
    pool.refresh(measured, Timestamp(0));
    pool
}

/// An engine refuses such a prompt, but not before it has received and tokenized it.
#[test]
fn prompts_that_are_longer_than_any_cache_move_no_other_prompt_and_are_no_load() {
    let mut pool = pool(4);
    let letters = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let homes = letters.map(|letter| ask(&mut pool, &prompt(letter), None, &usage(2_560, 0)));
    let entries = pool.prefixes().stats().entries;
    let long = "z".repeat(800_000);
    let mut refused = Vec::new();
    for number in 0..3 {
        refused.push(send(&mut pool, &format!("{number} {long}"), None).0);
    }
    let load: u64 = pool
        .in_flight()
        .rows()
        .map(|(_, load)| load.prefill_tokens)
        .sum();
    assert_eq!((load, pool.prefixes().stats().entries), (0, entries));
    for (letter, home) in letters.iter().zip(homes) {
        let again = ask(&mut pool, &prompt(letter), None, &usage(2_560, 2_544));
        assert_eq!(again, home, "{letter}");
    }
    for mut exchange in refused {
        exchange.end(&mut pool, Timestamp(1));
    }
}

#[test]
fn a_new_prompt_was_never_seen_and_a_repeated_one_is_a_hit_but_for_its_end() {
    let mut pool = pool(1);
    ask(&mut pool, &prompt("a"), None, &usage(1_000, 0));
    assert_eq!(missed_by(&pool), [("never_seen", 1_000)]);
    ask(&mut pool, &prompt("a"), None, &usage(1_000, 984));
    assert_eq!(
        (missed_by(&pool), tokens(&pool).cached),
        (vec![("never_seen", 1_000), ("rounding", 16)], 984)
    );
    ask(
        &mut pool,
        &(prompt("a") + &prompt("b")),
        None,
        &usage(2_000, 1_000),
    );
    assert_eq!(missed_by(&pool), [("never_seen", 2_000), ("rounding", 16)]);
}

#[test]
fn an_engine_that_lost_what_it_was_given_disproves_the_belief() {
    let mut pool = pool(1);
    ask(&mut pool, &prompt("a"), None, &usage(1_000, 0));
    ask(&mut pool, &prompt("a"), None, &usage(1_000, 0));
    assert_eq!(
        missed_by(&pool),
        [("never_seen", 1_000), ("wrong_belief", 1_000)]
    );
}

#[test]
fn a_prompt_that_goes_elsewhere_is_moved() {
    let mut pool = pool(2);
    let first = ask(
        &mut pool,
        &prompt("a"),
        Some(b"10.0.0.0:8000"),
        &usage(1_000, 0),
    );
    let second = ask(
        &mut pool,
        &prompt("a"),
        Some(b"10.0.0.1:8000"),
        &usage(1_000, 0),
    );
    assert_ne!(first, second);
    assert_eq!(missed_by(&pool), [("never_seen", 1_000), ("moved", 1_000)]);
}

#[test]
fn what_many_prompts_displaced_is_evicted() {
    let mut pool = pool(1);
    for letter in ('a'..='z').chain('A'..='Z') {
        ask(
            &mut pool,
            &prompt(&letter.to_string()),
            None,
            &usage(1_000, 0),
        );
    }
    ask(&mut pool, &prompt("a"), None, &usage(1_000, 0));
    assert_eq!(
        missed_by(&pool),
        [("never_seen", 52_000), ("evicted", 1_000)]
    );
}

#[test]
fn a_restart_is_remembered_for_ten_minutes() {
    let minutes = |minutes: u64| Timestamp(minutes * 60_000_000_000);
    let lost = |later: u64| {
        let mut pool = pool(2);
        ask(&mut pool, &prompt("a"), None, &usage(1_000, 0));
        pool.install(pool_update(2, 2), 7, 1_000);
        [1, 1 + later, 1 + later]
            .into_iter()
            .for_each(|at| pool.tick(minutes(at)));
        ask(&mut pool, &prompt("a"), None, &usage(1_000, 0));
        missed_by(&pool)
    };
    assert_eq!(lost(9), [("never_seen", 1_000), ("restart", 1_000)]);
    assert_eq!(lost(10), [("never_seen", 2_000)]);
}

#[test]
fn an_engine_that_is_silent_about_its_cache_says_nothing_until_it_spoke_once() {
    let mut pool = pool(1);
    let silent = r#""prompt_tokens":1000,"completion_tokens":1"#;
    ask(&mut pool, &prompt("a"), None, silent);
    assert_eq!(missed_by(&pool), [("unknown", 1_000)]);
    ask(&mut pool, &prompt("a"), None, &usage(1_000, 1_000));
    ask(&mut pool, &prompt("b"), None, silent);
    assert_eq!(
        missed_by(&pool),
        [("never_seen", 1_000), ("unknown", 1_000)],
        "vLLM leaves out a zero"
    );
    ask(&mut pool, &prompt("c"), None, &usage(1_000, 4_000));
    assert_eq!(tokens(&pool).cached, 2_000, "no more than the prompt has");
}

#[test]
fn of_a_prompt_that_a_prefill_endpoint_computes_the_cause_is_unknown() {
    let mut pool = ManagedPool::new(7, 65_536);
    pool.install(split_pool_update(6, 1), 7, 1_000);
    ask(&mut pool, &prompt("a"), None, &usage(1_000, 100));
    assert_eq!(missed_by(&pool), [("unknown", 900)]);
}
