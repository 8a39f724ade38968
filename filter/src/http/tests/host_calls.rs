//! The budget of host calls: which host calls one request makes in each phase, how often, and how
//! many bytes they pass. A test compares the table in `docs/reference/host-calls.md` with the code,
//! so that a new call on the request path is a visible decision.
//!
//! `UPDATE_DOCS=1` writes the measured table into that page; read the diff before committing it.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::*;
use crate::fake::{FakeCall, RecordedCall};

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/reference/host-calls.md"
);
const BEGIN: &str = "<!-- calls -->\n";

/// Headers as a client and Envoy send them.
const REQUEST: [(&str, &str); 10] = [
    (":authority", "llm.example.com"),
    (":path", "/v1/chat/completions"),
    (":method", "POST"),
    (":scheme", "https"),
    ("user-agent", "OpenAI/Python 1.99.1"),
    ("accept", "application/json"),
    ("content-type", "application/json"),
    ("content-length", "10000"),
    ("x-forwarded-proto", "https"),
    ("x-request-id", "6f0d8f0e-58a1-4a6c-9a52-5d5e0a3ba6b1"),
];
const RESPONSE: [(&str, &str); 5] = [
    (":status", "200"),
    ("content-type", "text/event-stream; charset=utf-8"),
    ("date", "Wed, 25 Nov 2026 08:00:00 GMT"),
    ("server", "uvicorn"),
    ("x-envoy-upstream-service-time", "35"),
];
const CHUNK: &str = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n";
const LAST_CHUNK: &str = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[],\"usage\":{\"prompt_tokens\":2500,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":1024}}}\n\ndata: [DONE]\n\n";

struct PhaseCalls {
    name: &'static str,
    calls: Vec<RecordedCall>,
}

impl PhaseCalls {
    fn count(&self, is_counted: impl Fn(FakeCall) -> bool) -> usize {
        self.calls
            .iter()
            .filter(|call| is_counted(call.call))
            .count()
    }

    fn sent(&self) -> usize {
        self.calls.iter().map(|call| call.sent).sum()
    }

    fn received(&self) -> usize {
        self.calls.iter().map(|call| call.received).sum()
    }
}

/// Returns a worker that shares its load with another worker, and a request that runs at the other
/// worker. The last request of the first worker ended 3 ms ago.
fn two_workers() -> (HttpWorld, HttpStreamContext<FakeHost>) {
    let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
    world.state("default");
    let mut vm = VmState::new(world.host.clone());
    vm.configure(1, Rc::clone(&world.config));
    let other = HttpWorld {
        host: world.host.clone(),
        vm: Rc::new(RefCell::new(vm)),
        config: Rc::clone(&world.config),
        streams: std::cell::Cell::new(1_000),
    };
    for worker in [&world, &other] {
        worker.vm.borrow_mut().mark_serving();
    }
    for _ in 0..2 {
        world.host.pass_ms(100);
        for worker in [&world, &other] {
            worker.vm.borrow_mut().tick(1);
        }
    }
    let (mut stream, _) = other.post("/v1/chat/completions");
    assert_eq!(other.body(&mut stream, CHAT), Action::Continue);
    one_request(&world);
    world.host.pass_ms(3);
    (world, stream)
}

/// Sends a chat request with a body of 10 KB and a streamed reply of three chunks.
fn one_request(world: &HttpWorld) -> Vec<PhaseCalls> {
    let mut phases = Vec::new();
    world.host.record_calls();
    let mut phase = |name| {
        phases.push(PhaseCalls {
            name,
            calls: world.host.take_calls(),
        });
    };
    let (mut stream, _) = world.headers(&REQUEST, false);
    phase("request headers");
    let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(220);
    let body = format!(
        r#"{{"model":"m","stream":true,"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
    );
    world
        .host
        .http
        .buffers
        .borrow_mut()
        .insert(BodyBuffer::RequestBody as u32, body.clone().into());
    stream.on_http_request_body(4_096, false);
    phase("a piece of the body before the last");
    assert_eq!(
        stream.on_http_request_body(body.len(), true),
        Action::Continue
    );
    phase("the last piece of the body, and the pick");
    world.host.pass_ms(30);
    let destination = world.request_header(DESTINATION).unwrap();
    world.respond(
        &mut stream,
        "via_upstream",
        destination.split(',').next().unwrap(),
        &RESPONSE,
    );
    phase("response headers");
    for (name, chunk) in [
        ("first chunk", CHUNK),
        ("a chunk between", CHUNK),
        ("last chunk, with usage", LAST_CHUNK),
    ] {
        world.host.pass_ms(10);
        world.piece(&mut stream, chunk, false);
        phase(name);
    }
    stream.on_http_response_body(0, true);
    phase("end of the response body");
    assert!(stream.on_done());
    phase("end of the stream, and log");
    phases
}

/// Describes a host call in the words of the table.
fn meaning(call: FakeCall) -> &'static str {
    match call {
        FakeCall::Clock => "read the clock",
        FakeCall::Shared => "read shared data",
        FakeCall::Share => "write shared data",
        FakeCall::Property => "read a property",
        FakeCall::PropertySet => "set a property",
        FakeCall::Headers => "read all headers",
        FakeCall::HeaderSet => "set a header",
        FakeCall::HeaderRemove => "remove a header",
        FakeCall::Buffer => "read a body",
        FakeCall::BufferReplace => "change a body",
        FakeCall::MetricAdd => "add to a counter",
        FakeCall::MetricRecord => "record in a histogram",
        other => panic!("{other:?} has no place on the path of a request"),
    }
}

fn table(phases: &[PhaseCalls]) -> String {
    let mut page = String::from(
        "\n| phase | calls | of them shared data | bytes to the proxy | bytes from the proxy |\n|---|---|---|---|---|\n",
    );
    let is_shared = |call| matches!(call, FakeCall::Shared | FakeCall::Share);
    for phase in phases {
        let calls = phase.count(|_| true);
        let shared = phase.count(is_shared);
        writeln!(
            page,
            "| {} | {calls} | {shared} | {} | {} |",
            phase.name,
            phase.sent(),
            phase.received()
        )
        .unwrap();
    }
    let sum = |of: &dyn Fn(&PhaseCalls) -> usize| phases.iter().map(of).sum::<usize>();
    let calls = sum(&|phase| phase.count(|_| true));
    let shared = sum(&|phase| phase.count(is_shared));
    writeln!(
        page,
        "| **all** | **{calls}** | **{shared}** | **{}** | **{}** |",
        sum(&PhaseCalls::sent),
        sum(&PhaseCalls::received)
    )
    .unwrap();
    page.push_str(
        "\nEach call:\n\n| phase | call | name | times | bytes to the proxy | bytes from the proxy |\n|---|---|---|---|---|---|\n",
    );
    for phase in phases {
        let mut rows: BTreeMap<(FakeCall, &str), (usize, usize, usize)> = BTreeMap::new();
        for RecordedCall {
            call,
            name,
            sent,
            received,
        } in &phase.calls
        {
            let row = rows.entry((*call, name)).or_default();
            *row = (row.0 + 1, row.1 + sent, row.2 + received);
        }
        let mut phase_name = phase.name; // only on the first row of the phase
        for ((call, name), (times, sent, received)) in rows {
            let name = if name.is_empty() {
                String::new()
            } else {
                format!("`{name}`")
            };
            let call = meaning(call);
            writeln!(
                page,
                "| {phase_name} | {call} | {name} | {times} | {sent} | {received} |"
            )
            .unwrap();
            phase_name = "";
        }
    }
    page
}

#[test]
fn a_request_makes_the_host_calls_of_its_budget_and_no_others() {
    let (world, _open) = two_workers();
    let phases = one_request(&world);
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (text, _) = page.split_once(BEGIN).unwrap();
    let now = format!("{text}{BEGIN}{}", table(&phases));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        return std::fs::write(PAGE, now).unwrap();
    }
    assert_eq!(
        page, now,
        "the calls changed; if that is meant: UPDATE_DOCS=1 cargo test -p filter --lib host_calls"
    );
}

#[test]
fn the_last_piece_of_a_reply_and_the_end_of_the_stream_publish_once() {
    let (world, _other) = two_workers();
    let (mut stream, _) = world.post("/v1/chat/completions");
    assert_eq!(world.body(&mut stream, CHAT), Action::Continue);
    let destination = world.request_header(DESTINATION).unwrap();
    let head = [
        (":status", "200"),
        ("content-type", "application/json"),
        ("x-envoy-upstream-service-time", "35"),
    ];
    world.respond(
        &mut stream,
        "via_upstream",
        destination.split(',').next().unwrap(),
        &head,
    );
    let writes = |world: &HttpWorld| {
        world
            .host
            .take_calls()
            .iter()
            .filter(|call| call.call == FakeCall::Share)
            .count()
    };
    world.host.record_calls();
    world.piece(
        &mut stream,
        r#"{"model":"m","usage":{"prompt_tokens":9,"completion_tokens":1}}"#,
        true,
    );
    assert_eq!(
        writes(&world),
        2,
        "the load report, and the confirmed placement"
    );
    assert!(stream.on_done());
    assert_eq!(writes(&world), 0);
}
