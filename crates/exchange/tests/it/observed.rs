//! Observations of ended requests: the conditions at the pick and the measured times, for the
//! served endpoint.

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use pool_state::{EncodedObservation, OBSERVATIONS_MAX};
use scheduler::latency::step::StepModel;
use scheduler::latency::{Conditions, LatencyModel, RequestEnd};
use scheduler::{EndpointMetrics, EndpointRef, Version};

use crate::release::{pool_update, pool_update_of_stages};

const TOKEN: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n";
const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":5,\"prompt_tokens_details\":{\"cached_tokens\":25}}}\n\n";

fn at_ms(ms: u64) -> Timestamp {
    Timestamp(0).plus_ms(1_000 + ms)
}

/// Returns a pool with this many endpoints, `10.0.0.0:8000` and so on, and a step model.
fn pool(endpoints: u8) -> ManagedPool {
    let mut pool = ManagedPool::new(1, 1024);
    pool.install(pool_update(endpoints, 1), 7, 10_000);
    pool.install_models(StepModel::default(), None);
    pool
}

fn sent(pool: &mut ManagedPool, at: Timestamp) -> Exchange {
    sent_prompt(pool, "x", at)
}

fn sent_prompt(pool: &mut ManagedPool, word: &str, at: Timestamp) -> Exchange {
    let settings = ExchangeSettings::default();
    let mut exchange = Exchange::new(at);
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/completions")];
    exchange.request_headers(&settings, pairs, false);
    // 400 bytes are 100 tokens.
    let body = format!(
        r#"{{"model":"m","stream":true,"prompt":"{}"}}"#,
        word.repeat(400)
    );
    let ExchangeStep::Forward(_) = exchange.decide(&settings, pool, None, body.as_bytes(), at)
    else {
        panic!("not routed")
    };
    exchange
}

fn answered(
    exchange: &mut Exchange,
    pool: &mut ManagedPool,
    server: &str,
    attempts: u32,
    status: u16,
    at: Timestamp,
) {
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status,
        upstream_address: Some(server.as_bytes()),
        attempts,
        content_type: Some(b"text/event-stream"),
        ..ResponseHead::default()
    };
    exchange.response_headers(pool, &head, at);
}

/// Sends a request whose reply is a stream of these events, each at its time in ms after the pick.
/// `whole` says whether the stream is complete or cut off. Returns the observation.
fn streamed(pool: &mut ManagedPool, events: &[(u64, &str)], whole: bool) -> EncodedObservation {
    let mut exchange = sent(pool, at_ms(0));
    let server = pool.snapshot().unwrap().endpoints()[0].address.to_string();
    answered(&mut exchange, pool, &server, 1, 200, at_ms(1));
    let last = events.last().unwrap().0;
    for (ms, event) in events {
        exchange.response_chunk(pool, event.as_bytes(), false, at_ms(*ms));
    }
    if whole {
        exchange.response_chunk(pool, b"", true, at_ms(last));
    }
    exchange.end(pool, at_ms(last));
    only(pool)
}

fn only(pool: &mut ManagedPool) -> EncodedObservation {
    let (_, rows) = pool.take_observations();
    assert_eq!(rows.len(), 1, "{rows:?}");
    rows[0]
}

#[test]
fn nothing_is_observed_until_somebody_learns() {
    let mut pool = ManagedPool::new(1, 1024);
    pool.install(pool_update(1, 1), 7, 10_000);
    let mut exchange = sent(&mut pool, at_ms(0));
    answered(&mut exchange, &mut pool, "10.0.0.0:8000", 1, 200, at_ms(1));
    exchange.response_chunk(&mut pool, TOKEN.as_bytes(), true, at_ms(9));
    exchange.end(&mut pool, at_ms(9));
    assert_eq!(pool.take_observations().1.len(), 0);
}

#[test]
fn a_stream_tells_its_times_by_tokens_and_its_conditions_as_at_the_pick() {
    let mut pool = pool(1);
    let said = EndpointMetrics {
        queue_depth: Some(3.0),
        running_requests: Some(2.0),
        ..EndpointMetrics::default()
    };
    let measured = pool
        .snapshot()
        .unwrap()
        .with_metrics(
            Version {
                term: 1,
                sequence: 2,
            },
            vec![said],
        )
        .unwrap();
    pool.refresh(measured, at_ms(0));
    // Another request runs at the endpoint, and has had its first token.
    let mut other = sent(&mut pool, at_ms(0));
    answered(&mut other, &mut pool, "10.0.0.0:8000", 1, 200, at_ms(0));
    other.response_chunk(&mut pool, TOKEN.as_bytes(), false, at_ms(0));

    let observed = streamed(
        &mut pool,
        &[
            (40, TOKEN),
            (50, TOKEN),
            (60, TOKEN),
            (80, TOKEN),
            (80, USAGE),
        ],
        true,
    );
    let observation = observed.observation;
    let conditions = Conditions {
        queued: Some(3.0),
        running: Some(2.0),
        requests: 6.0,
        context_tokens: 101.0,
        prompt_tokens: 100.0,
        // The other request has the same prompt, so the prompt is estimated to be cached.
        uncached_tokens: 0.0,
        ..Conditions::default()
    };
    assert_eq!(observation.conditions, conditions);
    assert_eq!(
        (observation.ended, observation.ttft_ms, observation.tpot_ms),
        (RequestEnd::Done, Some(40.0), Some(10.0))
    );
    assert_eq!(
        (
            observation.output_tokens,
            observed.prompt_tokens,
            observed.cached_tokens,
            observed.estimated
        ),
        (Some(5), Some(100), Some(25), false)
    );
    let first_token = observation.first_token.unwrap();
    assert_eq!(
        (
            first_token.uncached_tokens,
            first_token.prompt_tokens,
            first_token.service_ms
        ),
        (75.0, 100.0, 40.0),
        "by the cached tokens that the engine reported"
    );
    assert_eq!(observed.predicted, None);
    other.end(&mut pool, at_ms(90));
    assert_eq!(pool.in_flight().rows().count(), 0);
}

#[test]
fn without_usage_tokens_are_events_and_it_says_so() {
    let observed = streamed(&mut pool(1), &[(40, TOKEN), (60, TOKEN)], true);
    assert_eq!(
        (
            observed.estimated,
            observed.observation.output_tokens,
            observed.observation.tpot_ms
        ),
        (true, Some(2), Some(20.0))
    );
}

#[test]
fn what_was_predicted_at_the_pick_is_told_with_what_came() {
    let mut pool = pool(1);
    pool.install_models(
        StepModel::default(),
        Some(LatencyModel::constant(55.0, 9.0)),
    );
    let observed = streamed(&mut pool, &[(40, TOKEN)], true);
    assert!(
        (observed.predicted.unwrap().ttft_ms - 55.0).abs() < 0.1,
        "{:?}",
        observed.predicted
    );
    // A pool update keeps the latency model.
    pool.install(pool_update(1, 1), 7, 10_000);
    assert!(pool.snapshot().unwrap().latency().is_some());
}

#[test]
fn one_that_left_is_censored_and_one_that_failed_says_so() {
    assert_eq!(
        streamed(&mut pool(1), &[(40, TOKEN), (60, TOKEN)], false)
            .observation
            .ended,
        RequestEnd::Aborted
    );
    let mut pool = pool(1);
    let exchange = &mut sent(&mut pool, at_ms(0));
    exchange.end(&mut pool, at_ms(5));
    assert_eq!(
        only(&mut pool).observation.ended,
        RequestEnd::Aborted,
        "before any answer"
    );
    let mut exchange = sent(&mut pool, at_ms(0));
    answered(&mut exchange, &mut pool, "10.0.0.0:8000", 1, 500, at_ms(1));
    exchange.end(&mut pool, at_ms(5));
    assert_eq!(only(&mut pool).observation.ended, RequestEnd::Failed);
}

#[test]
fn after_a_retry_who_served_is_told_of_with_its_own_conditions_and_no_time_that_was_not_its_own() {
    let mut pool = pool(3);
    let mut exchange = sent(&mut pool, at_ms(0));
    let picked = pool.in_flight().rows().next().unwrap().0;
    // Another endpoint answers at the second attempt. Envoy reports its address.
    let second = pool
        .snapshot()
        .unwrap()
        .endpoints()
        .iter()
        .find(|e| e.id != picked)
        .unwrap()
        .clone();
    answered(&mut exchange, &mut pool, &second.address, 2, 200, at_ms(30));
    exchange.response_chunk(&mut pool, TOKEN.as_bytes(), false, at_ms(40));
    exchange.response_chunk(&mut pool, TOKEN.as_bytes(), true, at_ms(50));
    exchange.end(&mut pool, at_ms(50));
    let observation = only(&mut pool).observation;
    assert_eq!(observation.endpoint, second.id);
    assert_eq!(
        (
            observation.ttft_ms,
            observation.first_token,
            observation.tpot_ms
        ),
        (None, None, Some(10.0))
    );
    assert_eq!(observation.conditions.requests, 0.0, "as at the pick");
}

#[test]
fn what_an_encoder_works_on_is_no_measure_of_any() {
    for (earlier, observed) in [
        (&["prefill", "encode"][..], 0),
        (&["prefill"], 1),
        (&["encode"], 0),
        (&[], 1),
    ] {
        let mut pool = ManagedPool::new(1, 1024);
        pool.install(pool_update_of_stages(6, 1, earlier), 7, 10_000);
        pool.install_models(StepModel::default(), None);
        let mut exchange = sent(&mut pool, at_ms(0));
        exchange.end(&mut pool, at_ms(5));
        assert_eq!(pool.take_observations().1.len(), observed, "{earlier:?}");
    }
}

/// Sends a request whose prompt one endpoint computes, and whose tokens another endpoint streams,
/// 10 ms each. With `retried` the other decode endpoint serves. Returns the endpoint that computes
/// the prompt, the endpoint that serves, and the observations.
fn prefilled_elsewhere(retried: bool) -> (EndpointRef, EndpointRef, Vec<EncodedObservation>) {
    let mut pool = ManagedPool::new(1, 1024);
    pool.install(pool_update_of_stages(6, 1, &["prefill"]), 7, 10_000);
    pool.install_models(
        StepModel::default(),
        Some(LatencyModel::constant(55.0, 9.0)),
    );
    let mut exchange = sent(&mut pool, at_ms(0));
    // Every third endpoint is for decode, and the next one for prefill.
    let charged: Vec<EndpointRef> = pool
        .in_flight()
        .rows()
        .map(|(endpoint, _)| endpoint)
        .collect();
    let of_stage = |stage| {
        charged
            .iter()
            .copied()
            .find(|endpoint| endpoint.slot.0 % 3 == stage)
            .unwrap()
    };
    let prefill = of_stage(1);
    let picked = of_stage(0);
    let is_server = |endpoint: EndpointRef| {
        endpoint.slot.0.is_multiple_of(3) && (endpoint != picked) == retried
    };
    let server = pool
        .snapshot()
        .unwrap()
        .endpoints()
        .iter()
        .find(|endpoint| is_server(endpoint.id))
        .unwrap()
        .clone();
    answered(
        &mut exchange,
        &mut pool,
        &server.address,
        1 + u32::from(retried),
        200,
        at_ms(39),
    );
    for token in 0..8 {
        exchange.response_chunk(&mut pool, TOKEN.as_bytes(), false, at_ms(40 + 10 * token));
    }
    exchange.response_chunk(&mut pool, USAGE.as_bytes(), true, at_ms(110));
    exchange.end(&mut pool, at_ms(110));
    (prefill, server.id, pool.take_observations().1.into())
}

#[test]
fn what_two_endpoints_work_on_is_a_prefill_of_one_and_token_gaps_of_the_other() {
    let (prefill, server, rows) = prefilled_elsewhere(false);
    let [served, prefilled] = rows[..] else {
        panic!("{rows:?}")
    };
    let first_token = prefilled.observation.first_token.unwrap();
    assert_eq!(prefilled.observation.endpoint, prefill);
    assert_eq!(
        (
            first_token.uncached_tokens,
            first_token.prompt_tokens,
            first_token.service_ms
        ),
        (100.0, 100.0, 40.0)
    );
    assert_eq!(
        (
            prefilled.observation.gap,
            prefilled.observation.output_tokens
        ),
        (None, None)
    );
    assert_eq!(
        (served.observation.endpoint, served.observation.first_token),
        (server, None)
    );
    assert_eq!(
        (
            served.observation.gap.unwrap().gap_ms,
            served.observation.output_tokens
        ),
        (10.0, Some(5))
    );
    for EncodedObservation {
        observation,
        predicted,
        prompt_tokens,
        cached_tokens,
        ..
    } in [served, prefilled]
    {
        let whole = (
            observation.ttft_ms,
            observation.tpot_ms,
            predicted,
            prompt_tokens,
            cached_tokens,
        );
        assert_eq!(
            whole,
            (None, None, None, None, None),
            "the times of the whole belong to neither"
        );
    }
}

#[test]
fn after_a_retry_no_prefill_at_another_endpoint_is_observed() {
    let (_, server, rows) = prefilled_elsewhere(true);
    let [served] = rows[..] else {
        panic!("{rows:?}")
    };
    assert_eq!(
        (
            served.observation.endpoint,
            served.observation.first_token,
            served.observation.ttft_ms
        ),
        (server, None, None)
    );
}

#[test]
fn another_tokenizer_is_learned_of_what_replies_tell_and_prompts_count_by_it() {
    let mut pool = pool(1);
    let usage =
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1200,\"completion_tokens\":5}}\n\n";
    let mut prompt_tokens = || {
        let mut exchange = sent_prompt(&mut pool, "words ", at_ms(0));
        answered(&mut exchange, &mut pool, "10.0.0.0:8000", 1, 200, at_ms(1));
        exchange.response_chunk(&mut pool, TOKEN.as_bytes(), false, at_ms(40));
        exchange.response_chunk(&mut pool, usage.as_bytes(), true, at_ms(50));
        exchange.end(&mut pool, at_ms(50));
        only(&mut pool).observation.conditions.prompt_tokens
    };
    assert_eq!(prompt_tokens(), 600.0, "2,400 bytes, four to a token");
    let learned = (0..80).map(|_| prompt_tokens()).last().unwrap_or(0.0);
    assert!(
        (1_150.0..=1_200.0).contains(&learned),
        "two to a token: {learned}"
    );
}

#[test]
fn a_request_without_a_prompt_is_no_measure() {
    let settings = ExchangeSettings::default();
    let mut pool = pool(1);
    let mut exchange = Exchange::new(at_ms(0));
    exchange.request_headers(
        &settings,
        [(&b":method"[..], &b"GET"[..]), (b":path", b"/v1/models")],
        true,
    );
    assert!(matches!(
        exchange.decide(&settings, &mut pool, None, b"", at_ms(0)),
        ExchangeStep::Forward(_)
    ));
    exchange.end(&mut pool, at_ms(5));
    assert_eq!(pool.take_observations().1.len(), 0);
}

#[test]
fn an_answer_in_one_piece_tells_its_tokens() {
    let mut pool = pool(1);
    let mut exchange = sent(&mut pool, at_ms(0));
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        attempts: 1,
        ..ResponseHead::default()
    };
    exchange.response_headers(&mut pool, &head, at_ms(1));
    exchange.response_chunk(
        &mut pool,
        br#"{"usage":{"prompt_tokens":100,"completion_tokens":5}}"#,
        true,
        at_ms(9),
    );
    exchange.end(&mut pool, at_ms(9));
    let observation = only(&mut pool).observation;
    assert_eq!(
        (
            observation.ended,
            observation.ttft_ms,
            observation.output_tokens
        ),
        (RequestEnd::Done, None, Some(5))
    );
}

#[test]
fn the_second_of_two_prefills_is_measured_from_the_first_token_before_it() {
    let mut pool = pool(1);
    let mut one = sent(&mut pool, at_ms(0));
    let mut two = sent(&mut pool, at_ms(10));
    for (exchange, ms) in [(&mut one, 50), (&mut two, 80)] {
        answered(exchange, &mut pool, "10.0.0.0:8000", 1, 200, at_ms(ms));
        exchange.response_chunk(&mut pool, TOKEN.as_bytes(), true, at_ms(ms));
    }
    one.end(&mut pool, at_ms(100));
    two.end(&mut pool, at_ms(100));
    let service_ms: Vec<f32> = pool
        .take_observations()
        .1
        .iter()
        .map(|o| o.observation.first_token.unwrap().service_ms)
        .collect();
    assert_eq!(service_ms, [50.0, 30.0]);
}

#[test]
fn a_gap_is_measured_while_nobody_waits_for_a_first_token() {
    let events: Vec<(u64, &str)> = (0..20).map(|n| (100 + 12 * n, TOKEN)).collect();
    let mut pool = pool(1);
    let gap = streamed(&mut pool, &events, true).observation.gap.unwrap();
    assert_eq!((gap.batch, gap.gap_ms), (1.0, 12.0));
    assert!((100.0..=120.0).contains(&gap.context_tokens), "{gap:?}");
    // The gap is measured over four tokens, from the second on.
    let uneven = [100, 150, 162, 174, 186, 198, 400, 600, 800].map(|ms| (ms, TOKEN));
    assert_eq!(
        streamed(&mut pool, &uneven, true)
            .observation
            .gap
            .unwrap()
            .gap_ms,
        12.0
    );
    // An answer of six tokens in less than 50 ms is measured too.
    let short = [100, 103, 106, 109, 112, 115].map(|ms| (ms, TOKEN));
    let gap = streamed(&mut pool, &short, true).observation.gap;
    assert_eq!(gap.unwrap().gap_ms, 3.0);
    // During the whole stream, another request waits for its first token at the endpoint.
    let mut waiting = sent_prompt(&mut pool, "y", at_ms(0));
    assert_eq!(streamed(&mut pool, &events, true).observation.gap, None);
    waiting.end(&mut pool, at_ms(900));
}

#[test]
fn the_oldest_go_when_nobody_takes_them() {
    let mut pool = pool(1);
    for _ in 0..OBSERVATIONS_MAX + 7 {
        sent(&mut pool, at_ms(0)).end(&mut pool, at_ms(5));
    }
    let (first, rows) = pool.take_observations();
    assert_eq!((first, rows.len()), (7, OBSERVATIONS_MAX));
    sent(&mut pool, at_ms(0)).end(&mut pool, at_ms(5));
    assert_eq!(pool.take_observations().0, 7 + OBSERVATIONS_MAX as u64);
}
