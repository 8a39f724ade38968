//! Unfinished work costs other requests nothing. Such work is a reply that its client does not
//! read, or a body that has not arrived completely.

use exchange::bodies::STREAM_WITHOUT_LENGTH_BYTES;

use super::*;
use crate::resume::check_streams;

/// Lets a second pass, and acts like a root context at its end.
fn second(world: &HttpWorld) {
    world.host.pass_ms(1_000);
    check_streams(&world.vm, world.host.now());
}

/// Returns a chat request whose reply of 60 KB has begun.
fn long_reply(world: &HttpWorld) -> HttpStreamContext<FakeHost> {
    let (mut stream, _) = world.post("/v1/chat/completions");
    assert_eq!(world.body(&mut stream, CHAT), Action::Continue);
    world.respond(
        &mut stream,
        "via_upstream",
        "10.0.0.1:8000",
        &[
            (":status", "200"),
            ("content-type", "application/json"),
            ("content-length", "60000"),
        ],
    );
    let (_, action) = world.piece(&mut stream, &" ".repeat(20_000), false);
    assert_eq!(action, Action::Continue);
    stream
}

#[test]
fn the_place_of_a_reply_that_nobody_reads_is_free_and_the_stream_is_reset_later() {
    let world = HttpWorld::ready();
    let mut stream = long_reply(&world);
    (0..4).for_each(|_| second(&world));
    assert_eq!(world.in_flight(), 1);
    (0..2).for_each(|_| second(&world));
    assert_eq!(world.in_flight(), 0);
    assert_eq!(world.host.metric_value("switchpoint_unread_total"), 1);
    world.host.take_log();
    (0..60).for_each(|_| second(&world));
    let log = world.host.take_log();
    assert!(
        log.iter()
            .filter(|line| line.starts_with("reply 408"))
            .count()
            == 1,
        "{log:?}"
    );
    stream.on_done();
    assert_eq!(world.host.metric_value("switchpoint_unread_total"), 1);
}

#[test]
fn a_reply_that_ends_is_not_looked_at_any_more() {
    let world = HttpWorld::ready();
    let mut stream = long_reply(&world);
    second(&world);
    world.piece(&mut stream, "{}", true);
    assert_eq!(world.in_flight(), 0, "before the client has read it");
    world.host.take_log();
    (0..100).for_each(|_| second(&world));
    assert_eq!(world.host.take_log(), Vec::<String>::new());
    stream.on_done();
    assert_eq!(world.host.metric_value("switchpoint_unread_total"), 0);
}

#[test]
fn a_body_that_is_not_read_counts_when_it_has_arrived() {
    let world = HttpWorld::ready();
    let headers = [
        (":method", "POST"),
        (":path", "/v2/models/m/infer"),
        ("content-length", "25000000"),
    ];
    let (mut stream, action) = world.headers(&headers, false);
    let load = || {
        let replica = world.vm.borrow().replica("default").unwrap();
        let replica = replica.borrow();
        let rows = replica.pool.in_flight().rows();
        rows.map(|(_, load)| (load.requests, load.prefill_tokens))
            .collect::<Vec<_>>()
    };
    assert_eq!((action, load()), (Action::Continue, vec![(1, 0)]));
    (0..4).for_each(|_| second(&world));
    assert_eq!(load(), [(1, 0)]);
    (0..2).for_each(|_| second(&world));
    assert!(load().is_empty(), "no endpoint works on it");
    assert_eq!(stream.on_http_request_body(1_000, false), Action::Continue);
    second(&world);
    assert!(load().is_empty(), "nor now");
    assert_eq!(stream.on_http_request_body(1_000, true), Action::Continue);
    (0..100).for_each(|_| second(&world));
    assert_eq!(load(), [(1, 6_250_000)]);
    stream.on_done();
    assert!(load().is_empty());
}

/// Returns a proxy with room for the longest unfinished body, of 40,000 bytes.
fn narrow() -> HttpWorld {
    narrow_with("")
}

/// Returns the same proxy with these additional fields in its configuration.
fn narrow_with(fields: &str) -> HttpWorld {
    let world = HttpWorld::new(&format!(
        r#"{{"pools": [{{"name": "default"}}], "body_limit_bytes": 40000, "bodies_in_progress_bytes": 50000{fields}}}"#
    ));
    world.state("default");
    world
}

/// Begins a request of this client, and sends nothing of its body.
fn await_body(
    world: &HttpWorld,
    address: &str,
    path: &str,
    length: &str,
) -> HttpStreamContext<FakeHost> {
    let headers = [
        (":method", "POST"),
        (":path", path),
        ("x-forwarded-for", address),
        ("content-length", length),
    ];
    let headers = &headers[..if length.is_empty() { 3 } else { 4 }];
    world.headers(headers, false).0
}

/// Sends 30,000 bytes of a longer body.
fn begin(world: &HttpWorld, address: &str) -> HttpStreamContext<FakeHost> {
    begin_as(world, address, "")
}

/// Begins a request of a tenant.
fn begin_as(world: &HttpWorld, address: &str, tenant: &str) -> HttpStreamContext<FakeHost> {
    let headers = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("x-forwarded-for", address),
        ("x-tenant", tenant),
    ];
    let (mut stream, _) = world.headers(&headers, false);
    world.host.take_log();
    assert_eq!(stream.on_http_request_body(30_000, false), Action::Pause);
    stream
}

/// Returns the replies since the last call, by status.
fn replies(world: &HttpWorld) -> Vec<String> {
    let log = world.host.take_log();
    log.iter()
        .filter_map(|line| line.strip_prefix("reply "))
        .map(|reply| reply.chars().take(3).collect())
        .collect()
}

#[test]
fn a_client_that_sends_too_much_at_once_has_its_newest_body_refused() {
    let world = narrow();
    let mut first = begin(&world, "10.1.1.1");
    assert_eq!(replies(&world), [""; 0]);
    let mut second = begin(&world, "10.1.1.1");
    assert_eq!(replies(&world), ["413"]);
    second.on_done();
    first.on_done();
    let _third = begin(&world, "10.1.1.1");
    assert_eq!(replies(&world), [""; 0], "the room of both is free");
}

#[test]
fn a_slow_body_makes_room_for_the_next_one() {
    let world = narrow();
    let mut slow = begin(&world, "10.1.1.1");
    second(&world);
    let mut next = begin(&world, "10.1.1.1");
    assert_eq!(replies(&world), [""; 0]);
    second(&world);
    assert_eq!(replies(&world), ["408"]);
    slow.on_done();
    next.on_done();
}

#[test]
fn a_client_makes_room_for_another_one() {
    let world = narrow();
    let mut first = begin(&world, "10.1.1.1");
    let mut other = begin(&world, "10.2.2.2");
    assert_eq!(replies(&world), [""; 0]);
    check_streams(&world.vm, world.host.now());
    assert_eq!(replies(&world), ["413"]);
    first.on_done();
    other.on_done();
}

#[test]
fn a_callback_refuses_some_bodies_and_the_next_one_the_rest() {
    let world = HttpWorld::new(
        r#"{"pools": [{"name": "default"}], "body_limit_bytes": 16000000, "bodies_in_progress_bytes": 32214400}"#,
    );
    world.state("default");
    let held: Vec<_> = (0..200).map(|_| begin(&world, "10.1.1.1")).collect();
    let mut other = begin(&world, "10.2.2.2");
    let half = 16_107_200 - STREAM_WITHOUT_LENGTH_BYTES;
    assert_eq!(other.on_http_request_body(half, false), Action::Pause);
    let refused = [(); 3].map(|()| {
        world.vm.borrow_mut().watched().begin_callback();
        check_streams(&world.vm, world.host.now());
        replies(&world).len()
    });
    assert_eq!(refused, [64, 36, 0], "the other client gets its half");
    drop(held);
}

#[test]
fn a_tenant_has_one_share_at_all_its_addresses_and_an_address_one_for_each_tenant() {
    let by_header = r#", "client_header": "x-tenant""#;
    let by_metadata = r#", "fairness_namespace": "jwt", "fairness_key": "sub""#;
    for fields in [by_header, by_metadata] {
        let begin = |world: &HttpWorld, address: &str, tenant: &str| {
            let mut properties = world.host.properties.borrow_mut();
            properties.insert("metadata.filter_metadata.jwt.sub".into(), tenant.into());
            drop(properties);
            begin_as(world, address, tenant)
        };
        let world = narrow_with(fields);
        let _first = begin(&world, "10.1.1.1", "red");
        let _elsewhere = begin(&world, "10.2.2.2", "red");
        assert_eq!(replies(&world), ["413"], "{fields}");
        let _other = begin(&world, "10.1.1.1", "blue");
        assert_eq!(replies(&world), [""; 0], "{fields}");
        check_streams(&world.vm, world.host.now());
        assert_eq!(replies(&world), ["413"], "{fields}");
    }
}

#[test]
fn a_whole_body_takes_no_room() {
    let world = narrow();
    for _ in 0..3 {
        let mut stream = begin(&world, "10.1.1.1");
        let _ = stream.on_http_request_body(30_000, true);
    }
    let _next = begin(&world, "10.1.1.1");
    assert_eq!(replies(&world), [""; 0]);
}

#[test]
fn streams_whose_bodies_do_not_arrive_count_once_many_are_awaited() {
    const UNCOUNTED: usize = 128;
    const COUNTED: usize = 32;
    let world = HttpWorld::new(&format!(
        r#"{{"pools": [{{"name": "default"}}], "body_limit_bytes": 40000, "bodies_in_progress_bytes": {}}}"#,
        COUNTED * STREAM_WITHOUT_LENGTH_BYTES
    ));
    world.state("default");
    let chat = |address: &str| await_body(&world, address, "/v1/chat/completions", "");
    let mut open: Vec<_> = (0..UNCOUNTED + COUNTED).map(|_| chat("10.1.1.1")).collect();
    assert_eq!(replies(&world), [""; 0]);
    let mut refused = chat("10.1.1.1");
    assert_eq!(replies(&world), ["413"]);
    refused.on_done();
    let mut other = chat("10.2.2.2");
    check_streams(&world.vm, world.host.now());
    assert_eq!(replies(&world), ["413"], "a stream of the first client");
    assert_eq!(world.body(&mut other, CHAT), Action::Continue);
    for stream in &mut open {
        stream.on_done();
    }
    let _again: Vec<_> = (0..UNCOUNTED + COUNTED).map(|_| chat("10.1.1.1")).collect();
    assert_eq!(replies(&world), [""; 0], "all places are free again");
}

#[test]
fn a_long_body_is_kept_for_a_retry_while_its_client_has_room_and_a_short_one_always() {
    let world =
        HttpWorld::new(r#"{"pools": [{"name": "default"}], "bodies_in_progress_bytes": 1000000}"#);
    world.state("default");
    let retries = || world.request_header("x-envoy-retry-on").is_some();
    let send = |address: &str, bytes: usize| {
        let mut stream = await_body(&world, address, "/v1/chat/completions", "");
        let body = format!("{CHAT}{}", " ".repeat(bytes - CHAT.len()));
        assert_eq!(world.body(&mut stream, &body), Action::Continue);
        (stream, retries())
    };
    let (mut first, is_kept) = send("10.1.1.1", 300_000);
    assert!(is_kept);
    assert!(!send("10.1.1.1", 150_000).1, "7/8 of 500,000 bytes");
    assert!(send("10.1.1.1", 60_000).1, "short");
    assert!(send("10.2.2.2", 90_000).1, "half of the rest");
    first.on_done();
    assert!(send("10.1.1.1", 180_000).1);
    // The length of a body that is not read is what its client declared, or the longest.
    for (length, is_kept) in [("1000", true), ("450000", false), ("", false)] {
        await_body(&world, "10.3.3.3", "/pictures", length);
        assert_eq!(retries(), is_kept, "{length:?}");
    }
}
