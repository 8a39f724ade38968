//! Calls the callbacks of some streams in any order, before and after there is state. Nothing may
//! panic, and when all streams have ended, nothing may be in flight.
#![no_main]

use std::cell::RefCell;
use std::rc::Rc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use proxy_wasm::traits::{Context, HttpContext};
use switchpoint::config::FilterConfig;
use switchpoint::fake::{FakeHost, pool_update_message};
use switchpoint::host::{BodyBuffer, Host};
use switchpoint::http::HttpStreamContext;
use switchpoint::vm::VmState;
use switchpoint::shared_data::snapshot_store::SharedSnapshotStore;

#[derive(Arbitrary, Debug)]
struct Step {
    stream: u8,
    event: CallbackEvent,
}

#[derive(Arbitrary, Debug)]
enum CallbackEvent {
    Headers {
        path: u8,
        extra: Option<(String, String)>,
        end: bool,
    },
    Body {
        body: u8,
        grown: u16,
        end: bool,
    },
    Trailers,
    Response {
        details: u8,
        upstream: u8,
        attempts: u8,
        headers: Vec<(String, String)>,
    },
    Chunk {
        bytes: Vec<u8>,
        end: bool,
    },
    Done,
    PoolUpdate {
        endpoints: u8,
        sequence: u8,
    },
    Tick,
    Hint(Option<Vec<u8>>),
}

const STREAMS: usize = 4;
const PATHS: [&str; 5] = [
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/models",
    "/switchpoint/ready",
    "",
];
const BODIES: [&str; 4] = [
    r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}"#,
    r#"{"model":"m"}"#,
    "{",
    "",
];
const ADDRESSES: [&str; 3] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];

fuzz_target!(|steps: Vec<Step>| {
    let host = FakeHost::new();
    let config = Rc::new(
        FilterConfig::parse(
            br#"{"pools": [{"name": "default"}], "explain": true, "prefix_entries": 64}"#,
        )
        .unwrap(),
    );
    let vm = Rc::new(RefCell::new(VmState::new(host.clone())));
    vm.borrow_mut().configure(1, Rc::clone(&config));
    let stream = |id| HttpStreamContext::new(id, host.clone(), Rc::clone(&vm), Rc::clone(&config));
    let mut streams: Vec<HttpStreamContext<FakeHost>> =
        (0..STREAMS as u32).map(|i| stream(10 + i)).collect();
    for Step {
        stream: which,
        event,
    } in steps.into_iter().take(100)
    {
        let at = usize::from(which) % STREAMS;
        let context = &mut streams[at];
        match event {
            CallbackEvent::Headers { path, extra, end } => {
                let mut headers = vec![
                    (":method".into(), "POST".into()),
                    (":path".into(), PATHS[usize::from(path) % 5].into()),
                ];
                headers.extend(extra);
                *host.http.request.borrow_mut() = headers;
                context.on_http_request_headers(3, end);
            }
            CallbackEvent::Body { body, grown, end } => {
                let body = BODIES[usize::from(body) % 4];
                host.http
                    .buffers
                    .borrow_mut()
                    .insert(BodyBuffer::RequestBody as u32, body.into());
                context.on_http_request_body(body.len() + usize::from(grown), end);
            }
            CallbackEvent::Trailers => drop(context.on_http_request_trailers(0)),
            CallbackEvent::Response {
                details,
                upstream,
                attempts,
                headers,
            } => {
                let mut properties = host.properties.borrow_mut();
                let details: &[u8] =
                    [&b"via_upstream"[..], b"", b"response_timeout"][usize::from(details) % 3];
                properties.insert("response.code_details".into(), details.to_vec());
                properties.insert(
                    "upstream.address".into(),
                    ADDRESSES[usize::from(upstream) % 3].into(),
                );
                properties.insert(
                    "upstream.request_attempt_count".into(),
                    u64::from(attempts).to_le_bytes().to_vec(),
                );
                drop(properties);
                *host.http.response.borrow_mut() =
                    [vec![(":status".into(), "200".into())], headers].concat();
                context.on_http_response_headers(0, false);
            }
            CallbackEvent::Chunk { bytes, end } => {
                let size = bytes.len();
                host.http
                    .buffers
                    .borrow_mut()
                    .insert(BodyBuffer::ResponseBody as u32, bytes);
                context.on_http_response_body(size, end);
            }
            CallbackEvent::Done => {
                context.on_done();
                streams[at] = stream(10 + at as u32);
            }
            CallbackEvent::PoolUpdate {
                endpoints,
                sequence,
            } => {
                let version = scheduler::Version {
                    term: 1,
                    sequence: u64::from(sequence),
                };
                let replica = vm.borrow().replica("default").unwrap();
                let pool_update = pool_update_message(
                    "default",
                    version,
                    &ADDRESSES[..usize::from(endpoints) % 4],
                );
                let _ = SharedSnapshotStore::new("default").publish_pool_update(
                    &host,
                    1,
                    version,
                    &pool_update,
                    host.now(),
                );
                replica.borrow_mut().refresh(&host).unwrap();
            }
            CallbackEvent::Tick => {
                host.pass_ms(700);
                let due = vm.borrow_mut().tick(1);
                due.iter().for_each(|request| request.retry());
            }
            CallbackEvent::Hint(hint) => {
                let path = "metadata.filter_metadata.envoy.lb.subset_hint.x-gateway-destination-endpoint-subset";
                match hint {
                    Some(hint) => drop(host.properties.borrow_mut().insert(path.into(), hint)),
                    None => drop(host.properties.borrow_mut().remove(path)),
                }
            }
        }
    }
    for stream in &mut streams {
        stream.on_done();
    }
    let replica = vm.borrow().replica("default").unwrap();
    assert_eq!(replica.borrow().pool.in_flight().rows().count(), 0);
});
