//! Tests with requests of a client to a fake Envoy.

use std::sync::{Arc, MutexGuard};

use pool_state::DaemonUpdate;
use prost::Message as _;
use proto::state::{self, daemon_message};

use super::*;
use crate::abi::fake::{self, FakeExchange};
use crate::pool::{Applying, NativePoolState};

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;
const DESTINATION: &str = "x-gateway-destination-endpoint";

fn module(pool: &str, rest: &str) -> Arc<ModuleConfig> {
    let json = format!(r#"{{"pools": [{{"name": "{pool}"}}]{rest}}}"#);
    fake::config(&json).unwrap()
}

type Headers = Vec<(Vec<u8>, Vec<u8>)>;

fn headers_of(pairs: &[(&str, &str)]) -> Headers {
    let owned = pairs.iter();
    owned
        .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()))
        .collect()
}

/// Gives the only pool of a configuration two endpoints.
fn give_state(module: &ModuleConfig) {
    let pool = module.pool(0).unwrap();
    let endpoint = |slot: u32| state::Endpoint {
        slot,
        generation: 1,
        name: format!("server-{slot}"),
        address: format!("10.0.0.{slot}:8000"),
        ready: true,
        age_ms: 60_000,
        ..state::Endpoint::default()
    };
    let names = ["queue-scorer", "prefix-cache-scorer", "max-score-picker"];
    let plugin = |name: &str| state::Plugin {
        r#type: name.into(),
        name: name.into(),
        parameters: vec![],
    };
    let part = |name: &str| state::ProfilePlugin {
        name: name.into(),
        weight: 1.0,
    };
    let update = state::PoolUpdate {
        pool: pool.name.to_string(),
        version: Some(state::Version {
            term: 1,
            sequence: 1,
        }),
        endpoints: [1, 2].map(endpoint).into(),
        pipeline: Some(state::Pipeline {
            plugins: names.map(plugin).into(),
            profiles: vec![state::Profile {
                name: "test".into(),
                plugins: names.map(part).into(),
            }],
            ranked_max: 3,
            ..state::Pipeline::default()
        }),
        hash_secret: 1,
        staleness_max_ms: 2_000,
        ..state::PoolUpdate::default()
    };
    let message = state::DaemonMessage {
        message: Some(daemon_message::Message::PoolUpdate(update)),
    };
    let bytes = message.encode_to_vec();
    let find = |_: &str| None::<MutexGuard<'_, NativePoolState>>;
    let update = DaemonUpdate::decode_bytes(&bytes, find).unwrap();
    let applied = pool.apply(update, &bytes, process().now());
    assert!(matches!(applied, Applying::Done(_)), "{applied:?}");
}

/// Begins a stream of a client's request, which has a body.
fn post(module: &Arc<ModuleConfig>, more: &[(&str, &str)]) -> (FakeExchange, HookStatus) {
    let exchange = FakeExchange::new(module);
    let headers = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("content-type", "application/json"),
    ];
    let headers = headers_of(&[&headers[..], more].concat());
    exchange.envoy.headers.borrow_mut().insert(0, headers);
    let status = exchange.module.request_headers(false);
    (exchange, status)
}

/// Delivers a whole request body in two pieces, as Envoy does.
fn body(exchange: &FakeExchange, body: &str) -> HookStatus {
    let (first, _) = body.split_at(body.len() / 2);
    let bodies = &exchange.envoy.bodies;
    bodies.borrow_mut().insert(0, first.into());
    assert_eq!(exchange.module.request_body(false), HookStatus::Hold);
    // Envoy appends the last piece to the held ones before it calls the hook.
    bodies.borrow_mut().insert(0, Vec::new());
    bodies.borrow_mut().insert(1, body.into());
    exchange.module.request_body(true)
}

/// Delivers the headers of a reply, and its only piece. Returns the piece that the client gets.
fn respond(exchange: &FakeExchange, upstream: &str, reply: &str) -> String {
    let headers = [
        (":status", "200"),
        ("content-type", "application/json"),
        ("x-envoy-upstream-service-time", "1"),
    ];
    let headers = headers_of(&headers);
    exchange.envoy.headers.borrow_mut().insert(2, headers);
    let address = Attribute::UpstreamAddress as u32;
    let attributes = &exchange.envoy.attributes;
    attributes.borrow_mut().insert(address, upstream.into());
    let status = exchange.module.response_headers(false);
    let part = if status == HookStatus::Hold { 3 } else { 2 };
    exchange
        .envoy
        .bodies
        .borrow_mut()
        .insert(part, reply.into());
    assert_eq!(exchange.module.response_body(true), HookStatus::Go);
    exchange.module.end();
    let bodies = exchange.envoy.bodies.borrow();
    String::from_utf8(bodies[&part].clone()).unwrap()
}

fn running(module: &ModuleConfig) -> u64 {
    let pool = module.pool(0).unwrap();
    let state = pool.lock();
    let loads = state.pool.in_flight().rows();
    loads.map(|(_, load)| u64::from(load.requests)).sum()
}

#[test]
fn a_request_goes_to_a_picked_endpoint_and_gives_its_place_back() {
    let module = module("picked", "");
    give_state(&module);
    let (exchange, status) = post(&module, &[(DESTINATION, "1.2.3.4:5")]);
    assert_eq!(status, HookStatus::Hold);
    assert_eq!(exchange.request_header(DESTINATION), None, "a client's own");
    assert_eq!(body(&exchange, CHAT), HookStatus::Go);
    let ranked = exchange.request_header(DESTINATION).unwrap();
    assert!(
        ranked.contains("10.0.0.1:8000") && ranked.contains(','),
        "{ranked}"
    );
    assert_eq!(
        exchange.metadata("envoy.lb", DESTINATION),
        Some(ranked.clone())
    );
    assert_eq!(running(&module), 1);
    let first = ranked.split(',').next().unwrap();
    let reply = r#"{"model":"m","usage":{"prompt_tokens":3,"completion_tokens":4}}"#;
    assert_eq!(respond(&exchange, first, reply), reply);
    assert_eq!(running(&module), 0);
}

#[test]
fn a_stream_that_envoy_destroys_without_an_end_gives_its_place_back() {
    let module = module("destroyed", "");
    give_state(&module);
    let (exchange, _) = post(&module, &[]);
    assert_eq!(body(&exchange, CHAT), HookStatus::Go);
    assert_eq!(running(&module), 1);
    drop(exchange);
    assert_eq!(running(&module), 0);
}

#[test]
fn a_request_before_the_first_state_waits_for_it() {
    let module = module("parked", "");
    let (exchange, _) = post(&module, &[]);
    assert_eq!(body(&exchange, CHAT), HookStatus::Hold);
    assert!(exchange.deliver_events().is_empty());
    give_state(&module);
    process().wake_parked(process().now());
    assert_eq!(exchange.deliver_events(), [WakeReason::Resume as u64]);
    assert_eq!(exchange.envoy.resumed.get(), 1);
    assert!(exchange.request_header(DESTINATION).is_some());
}

#[test]
fn a_bad_body_is_answered_after_the_hook() {
    let module = module("refused", "");
    give_state(&module);
    let (exchange, _) = post(&module, &[]);
    assert_eq!(body(&exchange, "{not json}"), HookStatus::Answered);
    let reply = exchange.envoy.reply.borrow();
    assert_eq!(reply.as_ref().map(|(status, _)| *status), Some(400));
}

#[test]
fn the_ready_path_follows_the_state() {
    let module = module("ready", "");
    let ask = || {
        let exchange = FakeExchange::new(&module);
        let headers = [(":method", "GET"), (":path", "/switchpoint/ready")];
        let headers = headers_of(&headers);
        exchange.envoy.headers.borrow_mut().insert(0, headers);
        assert_eq!(exchange.module.request_headers(true), HookStatus::Answered);
        let reply = exchange.envoy.reply.borrow();
        reply.as_ref().map_or(0, |(status, _)| *status)
    };
    assert_eq!(ask(), 503);
    give_state(&module);
    assert_eq!(ask(), 200);
}

#[test]
fn after_a_panic_a_request_is_answered_as_configured() {
    let closed = module("panicked", "");
    let (exchange, _) = post(&closed, &[]);
    let status = exchange.module.after_panic(StreamPhase::Request);
    assert_eq!(status, HookStatus::Answered);
    let reply = exchange.envoy.reply.borrow().clone().unwrap();
    assert_eq!((reply.0, &reply.1[..]), (503, FAILED.as_bytes()));
    assert_eq!(exchange.module.request_body(true), HookStatus::Go, "broken");

    let open = module("panicked", r#", "failure_mode": "open""#);
    let (exchange, _) = post(&open, &[]);
    let status = exchange.module.after_panic(StreamPhase::Woken);
    assert_eq!(status, HookStatus::Go);
    assert_eq!(exchange.envoy.resumed.get(), 1);
    assert_eq!(exchange.metadata("envoy.lb", "open").as_deref(), Some("1"));
    assert!(exchange.envoy.reply.borrow().is_none());
}

#[test]
fn a_response_passes_after_a_panic() {
    let module = module("response", "");
    give_state(&module);
    let (exchange, _) = post(&module, &[]);
    assert_eq!(body(&exchange, CHAT), HookStatus::Go);
    let status = exchange.module.after_panic(StreamPhase::Response);
    assert_eq!(status, HookStatus::Go);
    assert_eq!(exchange.module.response_headers(false), HookStatus::Go);
    exchange.module.end();
    assert_eq!(running(&module), 0, "a broken stream gives its place back");
}
