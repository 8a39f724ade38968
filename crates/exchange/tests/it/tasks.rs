//! Requests whose body is read only for its model, in JSON or in a form, and requests that name an
//! answer that one endpoint keeps.

use std::sync::Arc;

use exchange::{
    BodyProgress, Exchange, ExchangeSettings, ExchangeStep, FilterStatus, HeadersStep, ManagedPool,
    RequestChanges, ResponseBody, ResponseHead, ResponseOrigin, Timestamp,
};
use scheduler::objects::{ModelSpec, Objects, ObjectsSpec, TargetSpec};
use scheduler::{EndpointMetrics, Pipeline, PipelineSpec, Snapshot, Version};

use crate::memory_host::MemoryHost;
use crate::release::pool_update;

const FORM: &str = "multipart/form-data; boundary=x";

/// Returns a pool whose first endpoint serves `a` and whose second endpoint serves `b`. `alias` is
/// another name of `b`.
fn two_models() -> ManagedPool {
    let mut endpoints = pool_update(2, 1).endpoints().to_vec();
    endpoints
        .iter_mut()
        .zip(["a", "b"])
        .for_each(|(endpoint, model)| endpoint.models = Arc::from([Box::from(model)]));
    let model = |name: &str, target: &str, priority| ModelSpec {
        name: name.to_owned(),
        priority,
        targets: vec![TargetSpec {
            model: target.to_owned(),
            weight: None,
        }],
    };
    let models = vec![
        model("alias", "b", -1),
        model("a", "a", 0),
        model("b", "b", 0),
    ];
    let objects = Objects::build(&ObjectsSpec {
        models,
        ..ObjectsSpec::default()
    })
    .unwrap();
    let pipeline = Pipeline::build(&PipelineSpec::default()).unwrap();
    let metrics = vec![EndpointMetrics::default(); 2];
    let snapshot = Snapshot::try_new(
        Version {
            term: 1,
            sequence: 1,
        },
        endpoints,
        metrics,
        pipeline,
    )
    .unwrap()
    .with_objects(objects);
    let mut pool = ManagedPool::new(7, 1024);
    pool.install(snapshot, 7, 1_000);
    pool
}

fn plain(endpoints: u8) -> ManagedPool {
    let mut pool = ManagedPool::new(7, 1024);
    pool.install(pool_update(endpoints, 1), 7, 1_000);
    pool
}

fn now() -> Timestamp {
    Timestamp(0).plus_ms(10_000)
}

struct Sent {
    exchange: Exchange,
    step: ExchangeStep,
}

fn send(pool: &mut ManagedPool, request_line: &str, content_type: &str, body: &[u8]) -> Sent {
    let (method, path) = request_line.split_once(' ').unwrap();
    let mut exchange = Exchange::new(now());
    let settings = ExchangeSettings::default();
    let length = body.len().to_string();
    let pairs = [
        (":method", method),
        (":path", path),
        ("content-type", content_type),
        ("content-length", &length),
    ];
    let step = exchange.request_headers(
        &settings,
        pairs.map(|(name, value)| (name.as_bytes(), value.as_bytes())),
        body.is_empty(),
    );
    assert_eq!(
        step == HeadersStep::Buffer,
        !body.is_empty() && method == "POST",
        "{path}"
    );
    let step = exchange.decide(&settings, pool, None, body, now());
    Sent { exchange, step }
}

impl Sent {
    fn changes(&self) -> &RequestChanges {
        match &self.step {
            ExchangeStep::Forward(changes) => changes,
            other => panic!("{other:?}"),
        }
    }

    fn status(&self) -> u16 {
        match &self.step {
            ExchangeStep::Reply(reply) => reply.status,
            ExchangeStep::Forward(_) => 200,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the first endpoint of the list.
    fn first(&self) -> String {
        let list = self
            .changes()
            .set
            .iter()
            .find(|(name, _)| name == "x-gateway-destination-endpoint")
            .unwrap();
        list.1.split(',').next().unwrap().to_owned()
    }

    /// Returns the body as the engine gets it.
    fn body(&self, body: &[u8]) -> Vec<u8> {
        let Some(edit) = &self.changes().body else {
            return body.to_vec();
        };
        [
            edit.beginning(body[..edit.range.end].to_vec()),
            body[edit.range.end..].to_vec(),
        ]
        .concat()
    }

    /// Lets the endpoint give this answer. Returns the bytes that the client gets.
    fn answer(
        mut self,
        pool: &mut ManagedPool,
        content_type: &str,
        by: &str,
        chunks: &[&str],
    ) -> String {
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: 200,
            upstream_address: Some(by.as_bytes()),
            attempts: 1,
            content_type: Some(content_type.as_bytes()),
            ..ResponseHead::default()
        };
        let step = self.exchange.response_headers(pool, &head, now());
        let mut got = String::new();
        for (at, chunk) in chunks.iter().enumerate() {
            let last = at + 1 == chunks.len();
            let restored = self
                .exchange
                .response_chunk(pool, chunk.as_bytes(), last, now());
            let passed = if step.body == ResponseBody::Ignore {
                None
            } else {
                restored
            };
            got.push_str(passed.map_or(*chunk, |bytes| std::str::from_utf8(bytes).unwrap()));
        }
        self.exchange.end(pool, now());
        got
    }
}

fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let part = |(name, value): &(&str, &str)| {
        format!("--x\r\ncontent-disposition: form-data; name={name}\r\n\r\n{value}\r\n")
    };
    format!("{}--x--\r\n", parts.iter().map(part).collect::<String>()).into_bytes()
}

const TASKS: [&str; 11] = [
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/edits",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/v1/score",
    "/v2/rerank",
    "/v1/responses/input_tokens",
];

#[test]
fn a_task_goes_where_its_model_is_served_and_an_alias_is_renamed_and_back() {
    let mut pool = two_models();
    for path in TASKS {
        for content_type in ["application/json", FORM] {
            let body = |model: &str| match content_type {
                FORM => form(&[
                    ("file; filename=f", "RIFF\"model\":\"b\""),
                    ("model", model),
                ]),
                _ => format!(r#"{{"input":"x","nested":{{"model":"b"}},"model":"{model}"}}"#)
                    .into_bytes(),
            };
            let mut post = |model: &str| {
                send(
                    &mut pool,
                    &format!("POST {path}"),
                    content_type,
                    &body(model),
                )
            };
            assert_eq!(post("c").status(), 404, "{path} {content_type}");
            for _ in 0..4 {
                assert_eq!(post("a").first(), "10.0.0.0:8000", "{path} {content_type}");
            }
            let renamed = post("alias");
            assert_eq!(renamed.first(), "10.0.0.1:8000");
            assert_eq!(
                String::from_utf8(renamed.body(&body("alias"))),
                String::from_utf8(body("b")),
                "{path} {content_type}"
            );
            let length = renamed
                .changes()
                .set
                .iter()
                .find(|(name, _)| name == "content-length")
                .unwrap();
            assert_eq!(length.1, body("b").len().to_string());
            let reply = renamed.answer(
                &mut pool,
                "application/json",
                "10.0.0.1:8000",
                &[r#"{"model":"b","text":"b"}"#],
            );
            assert_eq!(
                reply, r#"{"model":"alias","text":"b"}"#,
                "{path} {content_type}"
            );
        }
    }
}

#[test]
fn a_task_counts_for_its_model_and_priority_and_in_the_ledger() {
    for path in TASKS.into_iter().chain(["/rerank", "/score"]) {
        let mut pool = two_models();
        let sent = send(
            &mut pool,
            &format!("POST {path}"),
            FORM,
            &form(&[("model", "alias")]),
        );
        let second = pool.snapshot().unwrap().endpoints()[1].id;
        assert_eq!(pool.in_flight().own(second).requests, 1, "{path}");
        sent.answer(
            &mut pool,
            "application/json",
            "10.0.0.1:8000",
            &[r#"{"model":"b","text":"b"}"#],
        );
        assert_eq!(pool.in_flight().own(second).requests, 0, "{path}");
        let row = pool
            .counters()
            .models()
            .iter()
            .find(|row| *row.label.model == *"alias")
            .unwrap();
        assert_eq!(
            (row.label.priority, &*row.label.target_model),
            (-1, "b"),
            "{path}"
        );
    }
}

/// Checks the order of held tasks: the engine takes one request at a time, and three tasks of one
/// tenant come before a task of another tenant.
#[test]
fn a_held_task_waits_in_the_flow_of_its_tenant() {
    for path in TASKS {
        for (content_type, body) in [
            ("application/json", br#"{"input":"x","model":"m"}"#.to_vec()),
            (FORM, form(&[("model", "m")])),
        ] {
            let next = tenant_after_the_first(path, content_type, &body);
            assert_eq!(next, Some("two"), "{path} {content_type}");
        }
    }
}

/// Sends this task for one tenant three times, then for another, and ends the first. Returns the
/// tenant whose task is sent next.
fn tenant_after_the_first(path: &str, content_type: &str, body: &[u8]) -> Option<&'static str> {
    let pool = crate::queued::pool(&[]);
    let mut pool = pool.borrow_mut();
    let settings = ExchangeSettings::default();
    let pairs = [
        (":method", "POST"),
        (":path", path),
        ("content-type", content_type),
    ];
    let pairs = pairs.map(|(name, value)| (name.as_bytes(), value.as_bytes()));
    let mut sent = Vec::new();
    let mut held = Vec::new();
    for tenant in ["one", "one", "one", "two"] {
        let mut exchange = Exchange::new(now());
        exchange.request_headers(&settings, pairs, false);
        exchange.set_flow(Some(tenant.as_bytes()));
        match exchange.decide(&settings, &mut pool, None, body, now()) {
            ExchangeStep::Forward(_) => sent.push(exchange),
            ExchangeStep::Hold { number } => held.push((number, tenant)),
            other => panic!("{path}: {other:?}"),
        }
    }
    assert_eq!((sent.len(), held.len()), (1, 3), "{path} {content_type}");
    let later = now().plus_ms(100);
    sent[0].end(&mut pool, later);
    let next = pool.next_due(later);
    let next = held.iter().find(|(number, _)| Some(*number) == next);
    next.map(|(_, tenant)| *tenant)
}

#[test]
fn a_task_without_a_model_passes_and_one_that_is_not_read_is_refused() {
    let mut pool = two_models();
    for (content_type, body) in [
        ("application/json", &b"{}"[..]),
        (FORM, b"--x--"),
        ("", br#"{"model":7}"#),
    ] {
        let sent = send(&mut pool, "POST /tokenize", content_type, body);
        assert_eq!(
            (sent.status(), sent.body(body)),
            (200, body.to_vec()),
            "{content_type}"
        );
    }
    for path in ["/v1/responses/resp_1/cancel", "/v1/audio/speech"] {
        assert_eq!(
            send(&mut pool, &format!("POST {path}"), "application/json", b"").status(),
            200,
            "{path}: no body at all"
        );
    }
    for (content_type, body) in [
        ("application/json", &b"{"[..]),
        ("application/json", b"[]"),
        (FORM, b"{}"),
        ("multipart/form-data", b"--x--"),
        (FORM, b"--x\r\n"),
    ] {
        assert_eq!(
            send(&mut pool, "POST /tokenize", content_type, body).status(),
            400,
            "{content_type}"
        );
    }
    let limit = ExchangeSettings::default().body_limit_bytes;
    let mut exchange = Exchange::new(now());
    let length = (limit + 1).to_string();
    let pairs = [
        (":method", "POST"),
        (":path", "/v1/audio/transcriptions"),
        ("content-type", FORM),
        ("content-length", &length),
    ];
    let pairs = pairs.map(|(name, value)| (name.as_bytes(), value.as_bytes()));
    let step = exchange.request_headers(&ExchangeSettings::default(), pairs, false);
    assert!(
        matches!(step, HeadersStep::Reply(reply) if reply.status == 413),
        "a model behind it could not be read"
    );
}

#[test]
fn a_large_form_is_read_piece_by_piece() {
    let pool = std::rc::Rc::new(std::cell::RefCell::new(two_models()));
    let body = form(&[
        ("file; filename=f", &"RIFF\r\n--".repeat(400_000)),
        ("model", "a"),
    ]);
    let mut host = MemoryHost::new(&pool, &body);
    let mut driver = exchange::RequestDriver::default();
    let head = [
        (":method", "POST"),
        (":path", "/v1/audio/transcriptions"),
        ("content-type", FORM),
    ];
    let _ = driver.request_headers(
        &mut host,
        head.into_iter()
            .map(|(name, value)| (name.as_bytes(), value.as_bytes())),
        false,
    );
    for size in (100_000..body.len()).step_by(100_000) {
        assert_eq!(
            driver.request_body(&mut host, size, BodyProgress::Partial),
            FilterStatus::Hold
        );
        assert!(driver.memory() < 16_384);
    }
    assert_eq!(
        driver.request_body(&mut host, body.len(), BodyProgress::Whole),
        FilterStatus::Go
    );
    assert_eq!(
        host.log.first().map(String::as_str),
        Some("forward 0 bytes to 10.0.0.0:8000"),
        "the host keeps the body"
    );
}

const RESPONSES: &str = "POST /v1/responses";

/// Lets the endpoint `by` create a response, whichever endpoint was picked.
fn respond(pool: &mut ManagedPool, by: &str, content_type: &str, chunks: &[&str]) {
    // A pool of three endpoints ranks all three, so the proxy may use any of them.
    send(
        pool,
        RESPONSES,
        "application/json",
        br#"{"model":"m","input":"x"}"#,
    )
    .answer(pool, content_type, by, chunks);
}

fn follow_up(pool: &mut ManagedPool, id: &str) -> Vec<String> {
    let body = format!(r#"{{"model":"m","input":"more","previous_response_id":"{id}"}}"#);
    let conversation = [
        format!(r#"{{"model":"m","conversation":"{id}"}}"#),
        format!(r#"{{"model":"m","conversation":{{"id":"{id}"}}}}"#),
    ];
    let mut firsts = Vec::new();
    for body in [body].iter().chain(&conversation) {
        firsts.push(send(pool, RESPONSES, "application/json", body.as_bytes()).first());
    }
    for path in [
        format!("/v1/responses/{id}"),
        format!("/v1/responses/{id}?stream=true"),
        format!("/app/v1/conversations/{id}/items"),
    ] {
        firsts.push(send(pool, &format!("GET {path}"), "", b"").first());
    }
    firsts.push(send(pool, &format!("DELETE /v1/responses/{id}"), "", b"").first());
    firsts.push(
        send(
            pool,
            &format!("POST /v1/responses/{id}/cancel"),
            "application/json",
            b"",
        )
        .first(),
    );
    firsts.push(
        send(
            pool,
            &format!("POST /v1/conversations/{id}/items"),
            "application/json",
            br#"{"items":[]}"#,
        )
        .first(),
    );
    firsts
}

#[test]
fn what_follows_a_response_goes_where_it_was_made() {
    let long = format!(r#"{{"id":"long","output":"{}"}}"#, "x".repeat(100_000));
    let created =
        r#"data: {"type":"response.created","response":{"id":"live","status":"in_progress"}}"#;
    let verbose = format!(
        "data: {{\"type\":\"response.created\",\"response\":{{\"id\":\"wordy\",\"instructions\":\"{}\"}}}}\n\n",
        "x".repeat(99_000)
    );
    for (id, content_type, chunks) in [
        (
            "resp_1",
            "application/json",
            vec![r#"{"id":"resp_1","object":"response","output":[{"id":"msg_1"}]}"#],
        ),
        (
            "resp_2",
            "application/json",
            vec![r#"{"object":"response","#, r#""id":"resp_2"}"#],
        ),
        ("long", "application/json", vec![&long]),
        ("live", "text/event-stream", vec![created, "\n", "\n"]),
        ("wordy", "text/event-stream", vec![&verbose]),
    ] {
        for by in ["10.0.0.0:8000", "10.0.0.1:8000", "10.0.0.2:8000"] {
            let mut pool = plain(3);
            respond(&mut pool, by, content_type, &chunks);
            assert_eq!(follow_up(&mut pool, id), [by; 9], "{id}");
        }
    }
}

#[test]
fn an_id_is_known_while_its_stream_still_runs_and_unknown_ids_go_anywhere() {
    let mut pool = plain(3);
    let mut sent = send(
        &mut pool,
        RESPONSES,
        "application/json",
        br#"{"model":"m","input":"x","stream":true}"#,
    );
    let by = sent.first();
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(by.as_bytes()),
        attempts: 1,
        content_type: Some(b"text/event-stream"),
        ..ResponseHead::default()
    };
    sent.exchange.response_headers(&mut pool, &head, now());
    sent.exchange.response_chunk(
        &mut pool,
        b"data: {\"response\":{\"id\":\"resp_1\"}}\n\n",
        false,
        now(),
    );
    assert_eq!(
        send(&mut pool, "POST /v1/responses/resp_1/cancel", "", b"").first(),
        by
    );
    let firsts: std::collections::BTreeSet<String> = (0..30)
        .flat_map(|_| follow_up(&mut pool, "resp_2"))
        .collect();
    assert_eq!(firsts.len(), 3, "an unknown id");
}

#[test]
fn a_path_with_an_unknown_id_is_its_clients_fault() {
    let mut pool = plain(3);
    for n in 0..120 {
        for line in [
            "GET /v1/responses/gone",
            "DELETE /v1/conversations/gone",
            "POST /v1/responses/gone/cancel",
        ] {
            let Sent { mut exchange, .. } = send(&mut pool, line, "", b"");
            let by = format!("10.0.0.{}:8000", n % 3);
            let head = ResponseHead {
                origin: ResponseOrigin::Upstream,
                status: if n % 3 == 0 { 404 } else { 200 },
                upstream_address: Some(by.as_bytes()),
                attempts: 1,
                ..ResponseHead::default()
            };
            let later = now().plus_ms(n * 50);
            exchange.response_headers(&mut pool, &head, later);
            let reply = if n % 3 == 0 {
                r#"{"error":{}}"#
            } else {
                r#"{"id":"x"}"#
            };
            exchange.response_chunk(&mut pool, reply.as_bytes(), true, later);
            exchange.end(&mut pool, later);
            assert!(pool.ejections().is_empty(), "{line}, request {n}");
        }
    }
}

#[test]
fn an_endpoint_that_is_gone_ejected_or_not_allowed_is_not_waited_for() {
    let reply = [r#"{"id":"resp_1"}"#];
    let mut pool = plain(3);
    respond(&mut pool, "10.0.0.1:8000", "application/json", &reply);
    let body = br#"{"model":"m","previous_response_id":"resp_1"}"#;
    let hinted = |pool: &mut ManagedPool, hint: &str| {
        let mut exchange = Exchange::new(now());
        let settings = ExchangeSettings::default();
        let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/responses")];
        exchange.request_headers(&settings, pairs, false);
        let step = exchange.decide(&settings, pool, Some(hint.as_bytes()), body, now());
        Sent { exchange, step }.first()
    };
    assert_eq!(
        hinted(&mut pool, "10.0.0.0:8000,10.0.0.1:8000"),
        "10.0.0.1:8000"
    );
    assert_eq!(hinted(&mut pool, "10.0.0.2:8000"), "10.0.0.2:8000");
    let endpoint = pool.snapshot().unwrap().endpoints()[1].id;
    let ejection = pool_state::Ejection {
        at: now(),
        failures: 1,
        until: now().plus_ms(1_000),
        endpoint,
        outside: false,
        by_answers: false,
        is_own: false,
    };
    pool.learn_ejection(ejection, now());
    assert!(
        follow_up(&mut pool, "resp_1")
            .iter()
            .all(|first| first != "10.0.0.1:8000"),
        "ejected"
    );
    let mut pool = plain(3);
    respond(&mut pool, "10.0.0.2:8000", "application/json", &reply);
    pool.install(pool_update(2, 1), 7, 1_000);
    assert_eq!(
        send(&mut pool, RESPONSES, "application/json", body).status(),
        200,
        "gone"
    );
    let mut pool = plain(3);
    respond(&mut pool, "10.0.0.2:8000", "application/json", &reply);
    pool.install(pool_update(3, 2), 7, 1_000);
    let firsts: std::collections::BTreeSet<String> = (0..20)
        .flat_map(|_| follow_up(&mut pool, "resp_1"))
        .collect();
    assert!(firsts.len() > 1, "a restarted engine has lost it");
}

#[test]
fn others_learn_where_a_response_was_made() {
    let mut one = plain(3);
    let mut other = plain(3);
    one.set_placement_publishing(true);
    respond(
        &mut one,
        "10.0.0.1:8000",
        "application/json",
        &[r#"{"id":"resp_1"}"#],
    );
    let changes = one.changes();
    for placement in one.take_placements() {
        other.record_peer_placement(placement.kind, placement.endpoint, &placement.blocks, now());
    }
    assert!(changes > 0);
    assert_eq!(follow_up(&mut other, "resp_1"), ["10.0.0.1:8000"; 9]);
}
