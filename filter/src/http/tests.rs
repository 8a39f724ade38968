//! Tests with requests of a client to a proxy in memory.

mod host_calls;
mod long_bodies;
mod parked;
mod queued;
mod refusing;
mod traced;
mod unfinished;

use super::*;
use crate::fake::{FakeHost, pool_update_message};
use crate::host::BodyBuffer;
use exchange::Timestamp;
use scheduler::Version;

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;
const DESTINATION: &str = "x-gateway-destination-endpoint";

/// A proxy with one VM.
struct HttpWorld {
    host: FakeHost,
    vm: Rc<RefCell<VmState<FakeHost>>>,
    config: Rc<FilterConfig>,
    streams: std::cell::Cell<u32>,
}

impl HttpWorld {
    fn new(config: &str) -> Self {
        let host = FakeHost::new();
        let config = Rc::new(FilterConfig::parse(config.as_bytes()).unwrap());
        let mut vm = VmState::new(host.clone());
        vm.configure(1, Rc::clone(&config));
        let vm = Rc::new(RefCell::new(vm));
        Self {
            host,
            vm,
            config,
            streams: std::cell::Cell::new(10),
        }
    }

    /// Makes a proxy with one pool of two endpoints.
    fn ready() -> Self {
        let world = Self::new(r#"{"pools": [{"name": "default"}], "explain": true}"#);
        world.state("default");
        world
    }

    fn state(&self, pool: &str) {
        let version = Version {
            term: 1,
            sequence: 1,
        };
        let replica = self.vm.borrow().replica(pool).unwrap();
        let pool_update = pool_update_message(pool, version, &["10.0.0.1:8000", "10.0.0.2:8000"]);
        crate::shared_data::snapshot_store::SharedSnapshotStore::new(&replica.borrow().name)
            .publish_pool_update(&self.host, 1, version, &pool_update, Timestamp(1))
            .unwrap();
        replica.borrow_mut().refresh(&self.host).unwrap();
    }

    fn stream(&self) -> HttpStreamContext<FakeHost> {
        self.streams.set(self.streams.get() + 1);
        HttpStreamContext::new(
            self.streams.get(),
            self.host.clone(),
            Rc::clone(&self.vm),
            Rc::clone(&self.config),
        )
    }

    /// Begins a stream with these request headers.
    fn headers(
        &self,
        headers: &[(&str, &str)],
        end: bool,
    ) -> (HttpStreamContext<FakeHost>, Action) {
        *self.host.http.request.borrow_mut() = headers
            .iter()
            .map(|(n, v)| ((*n).into(), (*v).into()))
            .collect();
        let mut stream = self.stream();
        let action = stream.on_http_request_headers(headers.len(), end);
        (stream, action)
    }

    fn post(&self, path: &str) -> (HttpStreamContext<FakeHost>, Action) {
        self.headers(
            &[
                (":method", "POST"),
                (":path", path),
                ("content-type", "application/json"),
            ],
            false,
        )
    }

    /// Delivers the whole body, then the callback that ends it, as with HTTP/1.
    fn body(&self, stream: &mut HttpStreamContext<FakeHost>, body: &str) -> Action {
        self.host
            .http
            .buffers
            .borrow_mut()
            .insert(BodyBuffer::RequestBody as u32, body.into());
        assert_eq!(
            stream.on_http_request_body(body.len(), false),
            Action::Pause
        );
        stream.on_http_request_body(body.len(), true)
    }

    fn respond(
        &self,
        stream: &mut HttpStreamContext<FakeHost>,
        details: &str,
        upstream: &str,
        headers: &[(&str, &str)],
    ) -> Action {
        *self.host.http.response.borrow_mut() = headers
            .iter()
            .map(|(n, v)| ((*n).into(), (*v).into()))
            .collect();
        let mut properties = self.host.properties.borrow_mut();
        properties.insert("response.code_details".into(), details.into());
        properties.insert("upstream.address".into(), upstream.into());
        properties
            .entry("upstream.request_attempt_count".into())
            .or_insert(1_u64.to_le_bytes().into());
        drop(properties);
        stream.on_http_response_headers(headers.len(), false)
    }

    fn buffer(&self, buffer: BodyBuffer) -> String {
        String::from_utf8(self.host.http.buffers.borrow()[&(buffer as u32)].clone()).unwrap()
    }

    /// Delivers a piece of the response body. Returns the bytes that Envoy forwards in its place.
    fn piece(
        &self,
        stream: &mut HttpStreamContext<FakeHost>,
        piece: &str,
        last: bool,
    ) -> (String, Action) {
        self.host
            .http
            .buffers
            .borrow_mut()
            .insert(BodyBuffer::ResponseBody as u32, piece.into());
        let action = stream.on_http_response_body(piece.len(), last);
        (self.buffer(BodyBuffer::ResponseBody), action)
    }

    fn response_header(&self, name: &str) -> Option<String> {
        self.host
            .http
            .response
            .borrow()
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.clone())
    }

    fn request_header(&self, name: &str) -> Option<String> {
        self.host
            .http
            .request
            .borrow()
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.clone())
    }

    fn in_flight(&self) -> u32 {
        let replica = self.vm.borrow().replica("default").unwrap();
        let replica = replica.borrow();
        replica
            .pool
            .in_flight()
            .rows()
            .map(|(_, load)| load.requests)
            .sum()
    }
}

#[test]
fn a_chat_request_is_held_picked_and_released() {
    let world = HttpWorld::ready();
    let (mut stream, action) = world.post("/v1/chat/completions");
    assert_eq!(action, Action::Pause);
    assert_eq!(world.body(&mut stream, CHAT), Action::Continue);
    let destination = world.request_header(DESTINATION).unwrap();
    assert_eq!(destination.split(',').count(), 2, "{destination}");
    assert_eq!(world.in_flight(), 1);
    let first = destination.split(',').next().unwrap();
    world.respond(
        &mut stream,
        "via_upstream",
        first,
        &[
            (":status", "200"),
            ("content-type", "text/event-stream"),
            ("endpoint-load-metrics", "x"),
        ],
    );
    assert!(
        world
            .host
            .http
            .response
            .borrow()
            .iter()
            .all(|(n, _)| n != "endpoint-load-metrics")
    );
    let event = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n";
    world
        .host
        .http
        .buffers
        .borrow_mut()
        .insert(BodyBuffer::ResponseBody as u32, event.into());
    world.host.pass_ms(30);
    stream.on_http_response_body(event.len(), false);
    stream.on_http_response_body(0, true);
    stream.on_done();
    stream.on_done();
    assert_eq!(world.in_flight(), 0);
    let picked = || world.host.metric_value("switchpoint_picked_total");
    assert_eq!(picked(), 0, "added at the next tick");
    world.vm.borrow_mut().tick(1);
    assert_eq!(picked(), 1);
    world.vm.borrow_mut().tick(1);
    assert_eq!(picked(), 1, "once");
    assert_eq!(world.host.metric_value("switchpoint_ttft_ms"), 30);
    assert_eq!(world.host.metric_value("switchpoint_host_errors_total"), 0);
}

#[test]
fn headers_that_the_filter_may_not_hold_go_on_and_properties_say_what_to_set() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "default"}], "hold_headers": false}"#);
    world.state("default");
    let length = CHAT.len().to_string();
    let chat = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("content-length", length.as_str()),
    ];
    let (mut stream, action) = world.headers(&chat, false);
    assert_eq!(
        (action, world.request_header("content-length")),
        (Action::Continue, None)
    );
    assert_eq!(world.body(&mut stream, CHAT), Action::Continue);
    assert_eq!(world.request_header(DESTINATION), None, "they went on");
    let property = |name: &str| {
        world
            .host
            .properties
            .borrow()
            .get(name)
            .map(|value| String::from_utf8(value.clone()).unwrap())
    };
    assert_eq!(property(DESTINATION).unwrap().split(',').count(), 2);
    assert_eq!(property("x-envoy-max-retries").as_deref(), Some("1"));
    stream.on_done();

    let (mut stream, _) = world.headers(&chat, false);
    assert_eq!(world.body(&mut stream, "{"), Action::Pause, "refused");
    stream.on_done();
    let (_, action) = world.headers(
        &[
            (":method", "POST"),
            (":path", "/v1/completions"),
            ("content-length", "999999999"),
        ],
        false,
    );
    assert_eq!(action, Action::Pause, "answered at the headers");
    let (_, action) = world.headers(&[(":method", "GET"), (":path", "/v1/models")], true);
    assert_eq!(action, Action::Continue);
    assert!(
        world.request_header(DESTINATION).is_some(),
        "decided at the headers"
    );
}

const ALIAS: &str = r#"{"model":"alias","messages":[{"role":"user","content":"alias"}]}"#;

/// Returns a stream whose request was sent with another model name.
fn renamed(world: &HttpWorld) -> HttpStreamContext<FakeHost> {
    let length = ALIAS.len().to_string();
    let (mut stream, _) = world.headers(
        &[
            (":method", "POST"),
            (":path", "/v1/chat/completions"),
            ("content-length", &length),
            ("accept-encoding", "gzip"),
        ],
        false,
    );
    assert_eq!(world.body(&mut stream, ALIAS), Action::Continue);
    stream
}

#[test]
fn a_model_sent_under_another_name_has_its_own_in_the_reply() {
    let world = HttpWorld::ready();
    let mut stream = renamed(&world);
    let sent = ALIAS.replacen("alias", "served", 1);
    assert_eq!(world.buffer(BodyBuffer::RequestBody), sent);
    assert_eq!(
        world.request_header("content-length"),
        Some(sent.len().to_string())
    );
    assert_eq!(
        world.request_header("accept-encoding").as_deref(),
        Some("identity")
    );
    world.respond(
        &mut stream,
        "via_upstream",
        "10.0.0.1:8000",
        &[(":status", "200"), ("content-type", "text/event-stream")],
    );
    assert_eq!(
        world.piece(&mut stream, "data: {\"model\":\"ser", false),
        ("data: {\"model\":".to_owned(), Action::Continue)
    );
    assert_eq!(
        world.piece(&mut stream, "ved\",\"x\":1}\n\n", false),
        ("\"alias\",\"x\":1}\n\n".to_owned(), Action::Continue)
    );
    assert_eq!(
        world.piece(&mut stream, "data: {\"model\":\"se", false),
        ("data: {\"model\":".to_owned(), Action::Continue)
    );
    assert_eq!(
        world.piece(&mut stream, "", true),
        ("\"se".to_owned(), Action::Continue),
        "cut off by the engine"
    );
    stream.on_done();
    assert_eq!(
        (
            world.in_flight(),
            world.host.metric_value("switchpoint_host_errors_total")
        ),
        (0, 0)
    );
}

#[test]
fn a_short_unstreamed_reply_is_held_to_get_its_right_length() {
    let world = HttpWorld::ready();
    let answer = [
        (":status", "200"),
        ("content-type", "application/json"),
        ("content-length", "31"),
    ];
    for trailers in [false, true] {
        let mut stream = renamed(&world);
        assert_eq!(
            world.respond(&mut stream, "via_upstream", "10.0.0.1:8000", &answer),
            Action::Pause
        );
        let body = r#"{"id":"1","model":"served"}    "#;
        assert_eq!(
            world.piece(&mut stream, r#"{"id":"1","model":"s"#, false).1,
            Action::Pause
        );
        let restored = body.replace("served", "alias");
        if trailers {
            assert_eq!(
                world.piece(&mut stream, body, false),
                (body.to_owned(), Action::Pause)
            );
            assert_eq!(stream.on_http_response_trailers(1), Action::Continue);
            assert_eq!(world.buffer(BodyBuffer::ResponseBody), restored);
        } else {
            assert_eq!(
                world.piece(&mut stream, body, true),
                (restored, Action::Continue)
            );
        }
        assert_eq!(
            world.response_header("content-length").as_deref(),
            Some("30")
        );
        stream.on_done();
    }
    let mut stream = renamed(&world);
    let long = [
        (":status", "200"),
        ("content-type", "application/json"),
        ("content-length", "100000"),
    ];
    assert_eq!(
        world.respond(&mut stream, "via_upstream", "10.0.0.1:8000", &long),
        Action::Continue
    );
    assert_eq!(
        world.response_header("content-length"),
        None,
        "the reply is too long to be held, so it goes on as it comes"
    );
    stream.on_done();
    assert_eq!(world.host.metric_value("switchpoint_host_errors_total"), 0);
}

#[test]
fn a_proxy_that_does_not_let_a_body_be_changed_sends_none_under_a_wrong_name() {
    let world = HttpWorld::ready();
    world.host.http.read_only.set(true);
    let (mut stream, _) = world.post("/v1/chat/completions");
    assert_eq!(world.body(&mut stream, ALIAS), Action::Pause);
    assert!(world.host.take_log()[0].starts_with("reply 500 "));
    assert_eq!(
        (world.in_flight(), world.request_header(DESTINATION)),
        (0, None)
    );

    world.host.http.read_only.set(false);
    let mut stream = renamed(&world);
    world.host.http.read_only.set(true);
    world.respond(
        &mut stream,
        "via_upstream",
        "10.0.0.1:8000",
        &[(":status", "200"), ("content-length", "18")],
    );
    assert_eq!(
        world.piece(&mut stream, r#"{"model":"served"}"#, true),
        (r#"{"model":"served"}"#.to_owned(), Action::Continue)
    );
    assert_eq!(
        world.response_header("content-length").as_deref(),
        Some("18"),
        "unchanged as its body"
    );
}

#[test]
fn every_control_header_of_a_client_is_removed() {
    let world =
        HttpWorld::new(r#"{"pools": [{"name": "default"}], "destination_header": "x-mine"}"#);
    world.state("default");
    let forged = [
        (":method", "GET"),
        (":path", "/"),
        ("x-mine", "6.6.6.6:1"),
        ("x-mine", "6.6.6.6:2"),
        (DESTINATION, "6.6.6.6:3"),
        ("x-prefiller-host-port", "6.6.6.6:4"),
    ];
    let (_, action) = world.headers(&forged, true);
    assert_eq!(action, Action::Continue);
    assert!(
        world
            .host
            .http
            .request
            .borrow()
            .iter()
            .all(|(_, v)| !v.contains("6.6.6.6")),
        "{:?}",
        world.host.http.request.borrow()
    );
    assert!(world.request_header("x-mine").unwrap().contains("10.0.0."));
}

#[test]
fn requests_without_a_body_upgrades_and_unknown_paths_are_decided_at_their_headers() {
    let world = HttpWorld::ready();
    for (headers, end) in [
        (&[(":method", "GET"), (":path", "/v1/models")][..], true),
        (
            &[
                (":method", "GET"),
                (":path", "/v1/realtime"),
                ("upgrade", "websocket"),
            ],
            false,
        ),
        (&[(":method", "POST"), (":path", "/pictures")], false),
    ] {
        let (mut stream, action) = world.headers(headers, end);
        assert_eq!(action, Action::Continue, "{headers:?}");
        assert!(world.request_header(DESTINATION).is_some(), "{headers:?}");
        assert_eq!(
            stream.on_http_request_body(10, true),
            Action::Continue,
            "its body flows by"
        );
        stream.on_done();
    }
}

#[test]
fn what_is_read_is_refused_where_its_body_would_have_no_end() {
    let world = HttpWorld::ready();
    for header in [
        ("upgrade", "websocket"),
        ("content-type", "application/grpc"),
    ] {
        let (mut stream, action) = world.headers(
            &[
                (":method", "POST"),
                (":path", "/v1/chat/%63ompletions"),
                header,
            ],
            false,
        );
        assert_eq!(action, Action::Pause, "{header:?}");
        assert!(
            world
                .host
                .take_log()
                .iter()
                .any(|line| line.starts_with("reply 400 ")),
            "{header:?}"
        );
        assert!(world.request_header(DESTINATION).is_none(), "{header:?}");
        stream.on_done();
    }
}

#[test]
fn a_body_in_a_coding_that_is_left_is_415_with_its_name() {
    let encoded = "\u{1f}\u{8b}\u{8}";
    for (values, named) in [
        (&["deflate"][..], "deflate"),
        (&["br"], "br"),
        (&["BR"], "BR"),
        (&["x-gzip"], "x-gzip"),
        (&["gzip, gzip"], "gzip, gzip"),
        (&["gzip", "br"], "gzip"),
        (&["identity", "br"], "br"),
        (&["br", "identity"], "br"),
        (&["identity, br"], "identity, br"),
    ] {
        for spaces in [0, 100_000] {
            let world = HttpWorld::ready();
            let mut headers = vec![(":method", "POST"), (":path", "/v1/chat/completions")];
            headers.extend(values.iter().map(|value| ("content-encoding", *value)));
            let (mut stream, _) = world.headers(&headers, false);
            let body = encoded.to_owned() + &" ".repeat(spaces);
            for end in [body.len() / 2, body.len()] {
                world.host.http.buffers.borrow_mut().insert(
                    BodyBuffer::RequestBody as u32,
                    body.as_bytes()[..end].into(),
                );
                assert_eq!(
                    stream.on_http_request_body(end, end == body.len()),
                    Action::Pause
                );
            }
            let log = world.host.take_log();
            let said = format!(
                "content-encoding \\\"{named}\\\" is not read here; send the body without it"
            );
            assert!(
                log.iter()
                    .any(|line| line.starts_with("reply 415 ") && line.contains(&said)),
                "{values:?}: {log:?}"
            );
        }
    }
    for none in ["identity", "Identity", ""] {
        let world = HttpWorld::ready();
        let headers = [
            (":method", "POST"),
            (":path", "/v1/chat/completions"),
            ("content-encoding", none),
        ];
        for (body, status) in [(CHAT, None), ("{]", Some("reply 400 "))] {
            let (mut stream, _) = world.headers(&headers, false);
            world
                .host
                .http
                .buffers
                .borrow_mut()
                .insert(BodyBuffer::RequestBody as u32, body.into());
            let _ = stream.on_http_request_body(body.len(), true);
            let log = world.host.take_log();
            assert_eq!(
                log.iter().any(|line| line.starts_with("reply ")),
                status.is_some(),
                "{none:?}: {log:?}"
            );
            assert!(
                status.is_none_or(|status| log.iter().any(|line| line.starts_with(status))),
                "{none:?}: {log:?}"
            );
        }
    }
}

#[test]
fn trailers_end_a_body_and_an_empty_one_too() {
    let world = HttpWorld::ready();
    let (mut stream, _) = world.post("/v1/chat/completions");
    world
        .host
        .http
        .buffers
        .borrow_mut()
        .insert(BodyBuffer::RequestBody as u32, CHAT.into());
    assert_eq!(
        stream.on_http_request_body(CHAT.len(), false),
        Action::Pause
    );
    assert_eq!(stream.on_http_request_trailers(1), Action::Continue);
    assert!(world.request_header(DESTINATION).is_some());

    world.host.take_log();
    let (mut stream, _) = world.post("/v1/chat/completions");
    assert_eq!(
        stream.on_http_request_trailers(1),
        Action::Pause,
        "headers and trailers alone: no body callback ever comes"
    );
    assert!(world.host.take_log()[0].starts_with("reply 400 "));
}

#[test]
fn a_body_beyond_the_limit_is_refused_as_soon_as_it_is_known() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "default"}], "body_limit_bytes": 1024}"#);
    world.state("default");
    let declared = [
        (":method", "POST"),
        (":path", "/v1/completions"),
        ("content-length", "1025"),
    ];
    let (mut stream, action) = world.headers(&declared, false);
    assert_eq!(action, Action::Pause);
    assert!(world.host.take_log()[0].starts_with("reply 413 "));
    assert_eq!(
        stream.on_http_request_body(1, true),
        Action::Pause,
        "it is answered, so nothing goes on"
    );
    let (mut stream, _) = world.post("/v1/completions");
    assert_eq!(stream.on_http_request_body(1024, false), Action::Pause);
    assert_eq!(world.host.take_log(), [""; 0]);
    assert_eq!(stream.on_http_request_body(1025, false), Action::Pause);
    assert!(world.host.take_log()[0].starts_with("reply 413 "));
    assert_eq!(
        world.host.metric_value("switchpoint_refused_invalid_total"),
        2
    );
}

#[test]
fn a_hint_that_allows_nobody_is_a_503() {
    let world = HttpWorld::ready();
    let hint =
        "metadata.filter_metadata.envoy.lb.subset_hint.x-gateway-destination-endpoint-subset";
    world
        .host
        .properties
        .borrow_mut()
        .insert(hint.into(), b"10.0.0.9:1".to_vec());
    let (_, action) = world.headers(&[(":method", "GET"), (":path", "/")], true);
    assert_eq!(action, Action::Pause);
    assert!(world.host.take_log()[0].starts_with("reply 503 "));
    world
        .host
        .properties
        .borrow_mut()
        .insert(hint.into(), b"10.0.0.2:8000".to_vec());
    world.headers(&[(":method", "GET"), (":path", "/")], true);
    assert_eq!(
        world.request_header(DESTINATION).as_deref(),
        Some("10.0.0.2:8000")
    );
    world.host.faults.unreadable.borrow_mut().push(hint.into());
    world.headers(&[(":method", "GET"), (":path", "/")], true);
    assert!(
        world.host.take_log()[0].starts_with("reply 503 "),
        "a hint that cannot be read allows no endpoint"
    );
    assert_eq!(world.host.metric_value("switchpoint_host_errors_total"), 1);
}

#[test]
fn routes_leader_to_their_pools_and_others_pass() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "a", "clusters": ["ca"]}, {"name": "b"}]}"#);
    world.state("a");
    world.state("b");
    let route = |cluster: &str, pool: &str| {
        let mut properties = world.host.properties.borrow_mut();
        properties.clear();
        properties.insert("xds.cluster_name".into(), cluster.into());
        properties.insert(
            "xds.route_metadata.filter_metadata.switchpoint.pool".into(),
            pool.into(),
        );
        drop(properties);
        let (_, action) = world.headers(
            &[
                (":method", "GET"),
                (":path", "/"),
                (DESTINATION, "6.6.6.6:1"),
            ],
            true,
        );
        assert_eq!(action, Action::Continue);
        world.request_header(DESTINATION).is_some()
    };
    assert!(route("ca", "") && route("other", "b"));
    assert!(!route("other", "") && !route("other", "unknown"));
    assert_eq!(world.host.metric_value("switchpoint_passed_total"), 2);
}

#[test]
fn the_ready_path_tells_of_all_pools() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "a"}, {"name": "b"}]}"#);
    let ask = || {
        let (_, action) = world.headers(
            &[(":method", "GET"), (":path", "/switchpoint/ready?x")],
            true,
        );
        assert_eq!(action, Action::Pause);
        world.host.take_log().remove(0)
    };
    world.state("a");
    assert!(ask().starts_with("reply 503"));
    world.state("b");
    assert_eq!(ask(), r#"reply 200 {"ready":true}"#);
    // If there are more VMs than slots, this VM serves requests too. The ready reply has the number
    // of VMs without a slot.
    for vm_slot in 0..crate::shared_data::vm_table::VM_SLOTS_MAX as u64 + 2 {
        let row = proto::shared_data::VmEntry {
            vm: 1_000 + vm_slot,
            heartbeat: world.host.now(),
            queue: 0,
            serves: true,
        };
        crate::shared_data::vm_table::VmTable::write_heartbeat(&world.host, row).unwrap();
    }
    // A VM that serves requests leaves a free lease to the other VMs for some time.
    for _ in 0..2 {
        world.host.pass_ms(600);
        world.vm.borrow_mut().tick(1);
    }
    world.host.take_log();
    assert_eq!(ask(), r#"reply 200 {"ready":true,"vms_without_slot":3}"#);
    assert_eq!(
        world.host.metric_value("switchpoint_vms_without_vm_slot"),
        3
    );
    assert_eq!(
        world
            .host
            .metric_value("switchpoint_refused_unavailable_total"),
        0
    );
}

/// After a retry, a property names the endpoint that failed. No property is read if the headers and
/// the address tell enough.
#[test]
fn who_failed_is_known_whichever_way_the_proxy_says_where_a_reply_is_from() {
    const FROM_UPSTREAM: (&str, &str) = ("x-envoy-upstream-service-time", "3");
    for (headers, details) in [
        (vec![(":status", "200"), FROM_UPSTREAM], "not to be asked"),
        (vec![(":status", "200")], "via_upstream"),
    ] {
        for (place, failed) in [(0, 0), (1, 1)] {
            let world = HttpWorld::ready();
            let (mut stream, _) = world.post("/v1/chat/completions");
            assert_eq!(world.body(&mut stream, CHAT), Action::Continue);
            let list = world
                .host
                .http
                .request
                .borrow()
                .iter()
                .find(|(name, _)| name == DESTINATION)
                .unwrap()
                .1
                .clone();
            let upstream = list.split(',').nth(place).unwrap().to_owned();
            world.host.properties.borrow_mut().insert(
                "upstream.request_attempt_count".into(),
                (place as u64 + 1).to_le_bytes().into(),
            );
            world.respond(&mut stream, details, &upstream, &headers);
            assert!(stream.on_done());
            assert_eq!(
                world.host.metric_value("switchpoint_failed_attempts_total"),
                failed,
                "{details}: {place}"
            );
        }
    }
}
