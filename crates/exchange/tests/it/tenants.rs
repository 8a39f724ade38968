//! Tests that clients learn nothing from each other, and take nothing from each other: the salt of
//! the prefix cache, prompts that crashed engines, and bodies whose prompt is not read.

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, HeadersStep, ManagedPool, RequestChanges,
    ResponseHead, ResponseOrigin, Timestamp,
};
use serde_json::{Value, json};

use crate::release::pool_update;

fn pool() -> ManagedPool {
    let mut pool = ManagedPool::new(7, 1 << 12);
    pool.install(pool_update(2, 1), 7, 1_000);
    pool
}

fn salting() -> ExchangeSettings {
    ExchangeSettings {
        client_header: "x-tenant".to_owned(),
        cache_salt_key: "a key of 16 bytes".to_owned(),
        ..ExchangeSettings::default()
    }
}

/// Sends a request, which is routed or refused.
fn send(
    pool: &mut ManagedPool,
    settings: &ExchangeSettings,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
    now: Timestamp,
) -> (Exchange, Result<RequestChanges, u16>) {
    let mut exchange = Exchange::new(now);
    let length = body.len().to_string();
    let all: Vec<(&[u8], &[u8])> = [
        (":method", "POST"),
        (":path", path),
        ("content-length", length.as_str()),
    ]
    .iter()
    .chain(headers)
    .map(|(name, value)| (name.as_bytes(), value.as_bytes()))
    .collect();
    let step = exchange.request_headers(settings, all.iter().copied(), false);
    if let HeadersStep::Reply(reply) = step {
        return (exchange, Err(reply.status));
    }
    exchange.capture_headers(pool, all.iter().copied());
    let seen = if step == HeadersStep::Buffer {
        body
    } else {
        ""
    };
    let result = match exchange.decide(settings, pool, None, seen.as_bytes(), now) {
        ExchangeStep::Forward(changes) => Ok(changes),
        ExchangeStep::Reply(reply) => Err(reply.status),
        ExchangeStep::Park { .. } | ExchangeStep::Hold { .. } => panic!("there is state"),
    };
    (exchange, result)
}

/// Returns the body as the engine gets it. The body must have the declared length.
fn engine_body(changes: &RequestChanges, body: &str) -> Value {
    let Some(edit) = &changes.body else {
        return serde_json::from_str(body).unwrap();
    };
    let (before, behind) = body.as_bytes().split_at(edit.end());
    let sent = [&edit.beginning(before.to_vec()), behind].concat();
    let length = changes
        .set
        .iter()
        .find(|(name, _)| name == "content-length");
    assert_eq!(length.unwrap().1, sent.len().to_string());
    serde_json::from_slice(&sent)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&sent)))
}

fn salt_of(path: &str, tenant: &str, body: &str) -> Value {
    let (_, changes) = send(
        &mut pool(),
        &salting(),
        path,
        &[("x-tenant", tenant)],
        body,
        Timestamp(0),
    );
    let mut sent = engine_body(&changes.unwrap(), body);
    let name = if path == "/generate" {
        "extra_key"
    } else {
        "cache_salt"
    };
    let salt = sent.as_object_mut().unwrap().remove(name).unwrap();
    let mut given: Value = serde_json::from_str(body).unwrap();
    given.as_object_mut().unwrap().remove(name);
    assert_eq!(sent, given, "nothing else changes");
    salt
}

#[test]
fn each_tenant_has_a_salt_that_no_body_changes() {
    let chat = "/v1/chat/completions";
    let messages = r#""messages":[{"role":"user","content":"cache_salt"}]"#;
    let ann = salt_of(chat, "ann", &format!(r#"{{"model":"m",{messages}}}"#));
    assert_eq!(ann.as_str().unwrap().len(), 32);
    assert_ne!(
        ann,
        salt_of(chat, "bob", &format!(r#"{{"model":"m",{messages}}}"#))
    );
    assert_ne!(
        ann,
        salt_of(chat, "", &format!(r#"{{"model":"m",{messages}}}"#))
    );
    for body in [
        format!(r#" {{ "model": "m", "cache_salt": "bobs", {messages}}}"#),
        format!(r#"{{{messages},"cache_salt":"x","model":"m","cache\u005fsalt":"y\"z"}}"#),
        format!(r#"{{"cache_salt":null,"model":"m",{messages}}}"#),
        format!(r#"{{"model":"m",{messages},"cache_salt" : 17 }}"#),
        format!("\r\n{{{messages},\n\"model\":\"m\"}}"),
    ] {
        assert_eq!(ann, salt_of(chat, "ann", &body), "{body}");
    }
    for (path, body) in [
        ("/v1/completions", r#"{"model":"m","prompt":"hi"}"#),
        (
            "/v1/messages",
            r#"{"model":"m","max_tokens":1,"messages":[]}"#,
        ),
        ("/v1/score", r#"{"model":"m","text_1":"a","text_2":"b"}"#),
        ("/generate", r#"{"text":"hi","extra_key":"bobs"}"#),
        ("/generate", r#"{"text":"hi","cache_salt":"bobs"}"#),
    ] {
        assert_eq!(ann, salt_of(path, "ann", body), "{path}");
    }
}

#[test]
fn without_members_or_a_key_a_body_stays_as_it_is() {
    for (settings, path, body) in [
        (salting(), "/v1/responses/resp_1/cancel", "{}"),
        (
            ExchangeSettings::default(),
            "/v1/completions",
            r#"{"model":"m","prompt":"hi","cache_salt":"own"}"#,
        ),
    ] {
        let headers = [("x-tenant", "ann")];
        let (_, changes) = send(&mut pool(), &settings, path, &headers, body, Timestamp(0));
        assert_eq!(changes.unwrap().body, None, "{path}");
    }
}

#[test]
fn the_picker_separates_tenants_as_engines_do() {
    let prompt = "a long prompt ".repeat(400);
    let body = json!({"model": "m", "prompt": prompt, "cache_salt": "same"}).to_string();
    // With one endpoint, every request is picked for the endpoint with the prefix.
    let mut pool = ManagedPool::new(7, 1 << 12);
    pool.install(pool_update(1, 1), 7, 1_000);
    let mut matched = |tenant: &str, ms: u64| {
        let before = pool.counters().matched_tokens;
        let (mut exchange, changes) = send(
            &mut pool,
            &salting(),
            "/v1/completions",
            &[("x-tenant", tenant)],
            &body,
            Timestamp(0).plus_ms(ms),
        );
        let set = changes.unwrap().set;
        let to = set
            .iter()
            .find(|(name, _)| name == "x-gateway-destination-endpoint")
            .unwrap();
        let now = Timestamp(0).plus_ms(ms);
        crate::broken_engines::answer_well(&mut exchange, &mut pool, &to.1, now);
        exchange.end(&mut pool, now);
        pool.counters().matched_tokens - before
    };
    assert_eq!(matched("ann", 1), 0);
    assert!(matched("ann", 2) > 0, "the tenant's own prefix");
    assert_eq!(matched("bob", 3), 0, "another tenant's prefix");
    assert!(matched("bob", 4) > 0, "now it is also bob's");
}

fn lost(at: &str) -> ResponseHead<'_> {
    ResponseHead {
        origin: ResponseOrigin::Lost,
        attempts: 2,
        ..crate::broken_engines::head(at, 503)
    }
}

#[test]
fn one_clients_crashes_refuse_no_prompt_of_another_and_a_probe_is_sent_once() {
    let mut pool = pool();
    let settings = ExchangeSettings::default();
    let chat = |prompt: &str| {
        json!({"model": "m", "messages": [{"role": "user", "content": prompt.repeat(50)}]})
            .to_string()
    };
    let ask = |pool: &mut ManagedPool, address: &str, prompt: &str, ms: u64| {
        let (exchange, changes) = send(
            pool,
            &settings,
            "/v1/chat/completions",
            &[("x-forwarded-for", address)],
            &chat(prompt),
            Timestamp(0).plus_ms(ms),
        );
        let header = |name: &str| {
            let changes = changes.as_ref().unwrap();
            let found = changes.set.iter().find(|(known, _)| known == name);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let to = changes
            .as_ref()
            .map(|_| header("x-gateway-destination-endpoint"))
            .map_err(|status| *status);
        let reasons = changes.as_ref().map(|_| header("x-envoy-retry-on"));
        (exchange, to, reasons.unwrap_or_default())
    };
    for n in 0..40 {
        let ms = 1_000 + n * 10;
        let (mut exchange, to, _) = ask(&mut pool, "10.0.0.1", &format!("fine {n}"), ms);
        let to = to.unwrap().split(',').next().unwrap().to_owned();
        crate::broken_engines::answer_well(&mut exchange, &mut pool, &to, Timestamp(0).plus_ms(ms));
        exchange.end(&mut pool, Timestamp(0).plus_ms(ms));
    }
    let crash = |pool: &mut ManagedPool, mut exchange: Exchange, to: &str, ms: u64| {
        let last = to.split(',').next_back().unwrap();
        exchange.response_headers(pool, &lost(last), Timestamp(0).plus_ms(ms));
        exchange.end(pool, Timestamp(0).plus_ms(ms));
    };
    let (exchange, to, _) = ask(&mut pool, "1.1.1.1,10.0.0.66", "poison", 1_500);
    crash(&mut pool, exchange, &to.unwrap(), 1_510);
    let (_, refused, _) = ask(&mut pool, "2.2.2.2,10.0.0.66", "poison", 2_000);
    assert_eq!(refused, Err(502), "its own client");
    let (mut exchange, to, _) = ask(&mut pool, "10.0.0.1", "poison", 2_010);
    assert!(to.is_ok(), "another client");
    exchange.end(&mut pool, Timestamp(0).plus_ms(2_020));

    let (mut exchange, to, reasons) = ask(&mut pool, "10.0.0.66", "poison", 7_000);
    assert!(to.is_ok(), "a probe after 5 s");
    assert!(!reasons.contains("reset"), "{reasons}");
    let (_, refused, _) = ask(&mut pool, "10.0.0.66", "poison", 7_010);
    assert_eq!(refused, Err(502), "one only");
    exchange.end(&mut pool, Timestamp(0).plus_ms(7_020));
}

/// Sends a prompt of the client at this address. Returns the ranked list.
fn chat(pool: &mut ManagedPool, address: &str, prompt: &str, ms: u64) -> (Exchange, String) {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": prompt.repeat(50)}]});
    let (exchange, changes) = send(
        pool,
        &ExchangeSettings::default(),
        "/v1/chat/completions",
        &[("x-forwarded-for", address)],
        &body.to_string(),
        Timestamp(0).plus_ms(ms),
    );
    let set = changes.unwrap().set;
    let mut headers = set.into_iter();
    let to = headers.find(|(name, _)| name == "x-gateway-destination-endpoint");
    (exchange, to.unwrap().1)
}

fn first_of(list: &str) -> String {
    list.split(',').next().unwrap().to_owned()
}

/// A request of this client is answered. Returns the endpoint.
fn well(pool: &mut ManagedPool, address: &str, prompt: &str, ms: u64) -> String {
    let (mut exchange, to) = chat(pool, address, prompt, ms);
    let to = first_of(&to);
    crate::broken_engines::answer_well(&mut exchange, pool, &to, Timestamp(0).plus_ms(ms));
    exchange.end(pool, Timestamp(0).plus_ms(ms));
    to
}

/// A pool of four endpoints. Two clients were answered, the last time at 1,390 ms.
fn pool_of_two_clients() -> ManagedPool {
    let mut pool = ManagedPool::new(7, 1 << 12);
    pool.install(pool_update(4, 1), 7, 1_000);
    for n in 0..40 {
        let address = ["10.0.0.1", "10.0.0.2"][n as usize % 2];
        well(&mut pool, address, &format!("fine {n}"), 1_000 + n * 10);
    }
    pool
}

#[test]
fn lost_connections_of_one_client_eject_no_endpoint_of_others() {
    let mut pool = pool_of_two_clients();
    for n in 0..400 {
        let ms = 1_400 + n * 10;
        let (mut exchange, to) = chat(&mut pool, "10.0.0.66", &format!("poison {n}"), ms);
        let second = to.split(',').nth(1).unwrap_or(&to);
        let now = Timestamp(0).plus_ms(ms);
        exchange.response_headers(&mut pool, &lost(second), now);
        exchange.end(&mut pool, now);
        assert!(pool.ejections().is_empty(), "{n}");
        if n % 4 == 0 {
            well(&mut pool, "10.0.0.1", &format!("fine {n}"), ms);
        }
    }
}

#[test]
fn a_client_that_lost_a_connection_avoids_the_endpoint_and_others_do_not() {
    let mut pool = pool_of_two_clients();
    let (mut exchange, to) = chat(&mut pool, "10.0.0.66", "poison", 1_400);
    let to = first_of(&to);
    let now = Timestamp(0).plus_ms(1_410);
    let head = ResponseHead {
        attempts: 1,
        ..lost(&to)
    };
    exchange.response_headers(&mut pool, &head, now);
    exchange.end(&mut pool, now);
    assert!(pool.ejections().is_empty());
    // So many requests at the same time need all endpoints.
    let mut is_sent_there = |address: &str, ms: u64| {
        let now = Timestamp(0).plus_ms(ms);
        let prompt = |n| format!("{address} {n} {ms}");
        let sent: Vec<_> = (0..40)
            .map(|n| chat(&mut pool, address, &prompt(n), ms))
            .collect();
        let is_there = sent.iter().any(|(_, list)| first_of(list) == to);
        for (mut exchange, _) in sent {
            exchange.end(&mut pool, now);
        }
        is_there
    };
    assert!(!is_sent_there("10.0.0.66", 1_420));
    assert!(is_sent_there("10.0.0.1", 1_450));
    assert!(is_sent_there("10.0.0.66", 7_000), "five seconds later");
}

#[test]
fn a_lost_connection_ejects_at_once_if_another_endpoint_served_the_request() {
    let mut pool = pool_of_two_clients();
    let (mut exchange, list) = chat(&mut pool, "10.0.0.66", "a prompt", 3_000);
    let second = list.split(',').nth(1).unwrap();
    let head = ResponseHead {
        attempts: 2,
        ..crate::broken_engines::head(second, 200)
    };
    exchange.response_headers(&mut pool, &head, Timestamp(0).plus_ms(3_010));
    exchange.end(&mut pool, Timestamp(0).plus_ms(3_010));
    assert_eq!(pool.ejections().len(), 1, "no endpoint answered lately");
}

fn prefill_tokens(path: &str, headers: &[(&str, &str)], body: &str) -> u64 {
    let mut pool = pool();
    let settings = ExchangeSettings::default();
    let (mut exchange, changes) = send(&mut pool, &settings, path, headers, body, Timestamp(0));
    changes.unwrap();
    let tokens = pool.in_flight().rows().map(|(_, load)| load.prefill_tokens);
    let tokens = tokens.sum();
    exchange.end(&mut pool, Timestamp(0));
    tokens
}

#[test]
fn a_body_whose_prompt_is_not_read_counts_by_its_size() {
    let json = json!({"model": "m", "text_1": "a", "text_2": "b".repeat(4_000)}).to_string();
    for path in [
        "/v1/score",
        "/rerank",
        "/pooling",
        "/classify",
        "/v1/responses/compact",
    ] {
        let tokens = prefill_tokens(path, &[], &json);
        assert!((1_000..1_020).contains(&tokens), "{path}: {tokens}");
    }
    let opaque = prefill_tokens("/vllm.grpc.engine.VllmEngine/Generate", &[], &json);
    assert!((1_000..1_020).contains(&opaque), "{opaque}");
    let form = format!(
        "--x\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--x\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\n{}\r\n--x--\r\n",
        "f".repeat(8_000)
    );
    let headers = [("content-type", "multipart/form-data; boundary=x")];
    let tokens = prefill_tokens("/v1/audio/transcriptions", &headers, &form);
    assert!((100..110).contains(&tokens), "{tokens}");
}

#[test]
fn every_body_that_is_held_has_the_same_limit() {
    let settings = ExchangeSettings {
        body_limit_bytes: 1_000,
        ..ExchangeSettings::default()
    };
    let body = json!({"model": "m", "prompt": "p".repeat(1_000)}).to_string();
    let sent = |path: &str| {
        let (_, changes) = send(&mut pool(), &settings, path, &[], &body, Timestamp(0));
        changes.err()
    };
    for path in ["/v1/completions", "/v1/score"] {
        assert_eq!(sent(path), Some(413), "{path}");
    }
    // The proxy forwards this body while it arrives.
    assert_eq!(sent("/v2/models/m/infer"), None);
}

#[test]
fn an_engine_claims_no_more_tokens_than_its_reply_can_have() {
    let reply = |usage: u32, events: &str| {
        format!(
            "{events}data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":5,\"completion_tokens\":{usage}}}}}\n\ndata: [DONE]\n\n"
        )
    };
    let event = "data: {\"choices\":[{\"delta\":{\"content\":\"word \"}}]}\n\n";
    let claimed_by = |path: &str, body: &str, reply: &str| {
        let mut pool = pool();
        let (mut exchange, changes) = send(
            &mut pool,
            &ExchangeSettings::default(),
            path,
            &[],
            body,
            Timestamp(0),
        );
        let set = changes.unwrap().set;
        let to = set[0].1.split(',').next().unwrap().to_owned();
        let content_type: &[u8] = if reply.starts_with("data:") {
            b"text/event-stream"
        } else {
            b"application/json"
        };
        let head = ResponseHead {
            content_type: Some(content_type),
            ..crate::broken_engines::head(&to, 200)
        };
        exchange.response_headers(&mut pool, &head, Timestamp(0).plus_ms(5));
        let now = Timestamp(0).plus_ms(10);
        exchange.response_chunk(&mut pool, reply.as_bytes(), true, now);
        exchange
            .end(&mut pool, now)
            .unwrap()
            .usage
            .completion_tokens
    };
    let claimed = |limit: &str, reply: &str| {
        let body = format!(r#"{{"model":"m",{limit}"stream":true,"prompt":"hi"}}"#);
        claimed_by("/v1/completions", &body, reply)
    };
    let lie = reply(u32::MAX, &event.repeat(3));
    assert_eq!(claimed("", &lie), Some(u32::try_from(lie.len()).unwrap()));
    assert_eq!(claimed(r#""max_tokens":7,"#, &lie), Some(7));
    assert_eq!(
        claimed(r#""max_tokens":7,"n":2,"#, &lie),
        Some(u32::try_from(lie.len()).unwrap()),
        "each output may be as long"
    );
    assert_eq!(claimed("", &reply(4, &event.repeat(3))), Some(4));
    let usage = r#""usage":{"prompt_tokens":5,"completion_tokens":4294967295}"#;
    let messages = r#""messages":[{"role":"user","content":"hi"}]"#;
    for (path, prompt, choice) in [
        ("/v1/completions", r#""prompt":"hi""#, r#""text":"word""#),
        (
            "/v1/chat/completions",
            messages,
            r#""message":{"content":"word"}"#,
        ),
    ] {
        let whole = format!(r#"{{"choices":[{{{choice}}}],{usage}}}"#);
        let bytes = u32::try_from(whole.len()).unwrap();
        for (limit, most) in [("", bytes), (r#""max_tokens":7,"#, 7)] {
            let body = format!(r#"{{"model":"m",{limit}{prompt}}}"#);
            assert_eq!(claimed_by(path, &body, &whole), Some(most), "{path}");
        }
    }
}
