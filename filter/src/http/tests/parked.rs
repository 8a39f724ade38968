//! Requests that come before the first state of their pool.

use super::*;
use crate::resume::retry;

/// Runs the next tick, like the root context.
fn tick(world: &HttpWorld) {
    world.host.pass_ms(100);
    let due = world.vm.borrow_mut().tick(1);
    due.iter().for_each(|request| request.retry());
}

#[test]
fn a_request_before_the_first_state_waits_for_it() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
    let (mut stream, _) = world.post("/v1/chat/completions");
    assert_eq!(world.body(&mut stream, CHAT), Action::Pause);
    world.host.take_log();
    tick(&world);
    assert_eq!(world.host.take_log(), [""; 0]);
    world.state("default");
    tick(&world);
    assert_eq!(world.host.take_log(), ["focus 11", "resume"]);
    assert!(world.request_header(DESTINATION).is_some());
    assert_eq!(world.in_flight(), 1);
    tick(&world);
    assert_eq!(world.host.take_log(), [""; 0], "once");
    stream.on_done();
    assert_eq!(world.in_flight(), 0);
}

#[test]
fn without_state_until_the_deadline_it_is_refused_or_sent_anywhere() {
    for (mode, expected) in [("close", "reply 503"), ("open", "resume")] {
        let world = HttpWorld::new(&format!(
            r#"{{"pools": [{{"name": "default"}}], "failure_mode": "{mode}", "cold_start_wait_ms": 300}}"#
        ));
        let (mut stream, _) = world.post("/v1/chat/completions");
        assert_eq!(world.body(&mut stream, CHAT), Action::Pause);
        world.host.take_log();
        (0..3).for_each(|_| tick(&world));
        let log = world.host.take_log();
        assert!(log.len() == 2 && log[1].starts_with(expected), "{log:?}");
        assert_eq!(
            world.request_header("x-switchpoint-open").is_some(),
            mode == "open"
        );
        assert_eq!(
            world.host.metric_value("switchpoint_failed_open_total"),
            u64::from(mode == "open")
        );
        world.respond(&mut stream, "", "", &[(":status", "503")]);
        stream.on_done();
    }
}

#[test]
fn a_callback_refuses_some_requests_and_the_next_one_the_rest() {
    let world = HttpWorld::new(
        r#"{"pools": [{"name": "default"}], "failure_mode": "close", "cold_start_wait_ms": 300}"#,
    );
    let parked = || {
        let (mut stream, _) = world.post("/v1/chat/completions");
        assert_eq!(world.body(&mut stream, CHAT), Action::Pause);
        stream
    };
    let streams: Vec<_> = (0..100).map(|_| parked()).collect();
    world.host.take_log();
    world.host.pass_ms(300);
    let refused = [(); 3].map(|()| {
        world.host.pass_ms(100);
        let due = world.vm.borrow_mut().tick(1);
        retry(&world.vm, due);
        let log = world.host.take_log();
        log.iter()
            .filter(|line| line.starts_with("reply 503"))
            .count()
    });
    assert_eq!(refused, [64, 36, 0]);
    drop(streams);
}

#[test]
fn a_client_that_leaves_while_it_waits_is_forgotten() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
    let (mut stream, _) = world.post("/v1/chat/completions");
    world.body(&mut stream, CHAT);
    world.host.http.removed.borrow_mut().push(11);
    stream.on_done();
    world.host.take_log();
    world.state("default");
    tick(&world);
    assert_eq!((world.host.take_log(), world.in_flight()), (vec![], 0));
    drop(stream);
    tick(&world);
}

#[test]
fn a_vm_that_replaces_a_lost_one_has_its_state_before_its_first_tick() {
    let lost = HttpWorld::ready();
    let mut healed = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
    healed.host = lost.host.clone();
    healed.vm = Rc::new(RefCell::new(VmState::new(lost.host)));
    healed
        .vm
        .borrow_mut()
        .configure(1, Rc::clone(&healed.config));
    let (_, action) = healed.headers(&[(":method", "GET"), (":path", "/v1/models")], true);
    assert_eq!(action, Action::Continue);
    assert!(healed.request_header(DESTINATION).is_some());
    assert_eq!(healed.host.metric_value("switchpoint_parked_total"), 0);
}

/// Requests that are decided at their headers, without waiting for their bodies. Some of these
/// bodies never end.
const UNREAD: [&[(&str, &str)]; 3] = [
    &[(":method", "POST"), (":path", "/pictures")],
    &[
        (":method", "POST"),
        (":path", "/some.Service/Talk"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ],
    &[
        (":method", "GET"),
        (":path", "/"),
        ("upgrade", "websocket"),
        ("connection", "upgrade"),
    ],
];

#[test]
fn a_parked_request_is_decided_when_state_comes_however_much_of_its_body_is_in() {
    for headers in UNREAD {
        for pieces in 0..3 {
            let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
            let (mut stream, action) = world.headers(headers, false);
            assert_eq!(action, Action::Pause);
            for piece in 1..=pieces {
                assert_eq!(stream.on_http_request_body(5 * piece, false), Action::Pause);
            }
            world.state("default");
            world.host.take_log();
            tick(&world);
            assert_eq!(
                world.host.take_log(),
                ["focus 11", "resume"],
                "{headers:?}: {pieces} pieces of the body have come"
            );
            assert!(world.request_header(DESTINATION).is_some());
            assert_eq!(
                world.request_header("x-envoy-retry-on").is_some(),
                pieces == 0,
                "no byte is sent twice"
            );
            assert_eq!(world.in_flight(), 1);
            // If pieces were held before, Envoy up to 1.39 drops the next piece when it passes
            // alone.
            let next = if pieces == 0 {
                Action::Continue
            } else {
                Action::Pause
            };
            assert_eq!(stream.on_http_request_body(9, false), next);
            assert_eq!(
                stream.on_http_request_body(9, false),
                Action::Continue,
                "further pieces pass"
            );
            assert_eq!(stream.on_http_request_body(9, false), Action::Continue);
            tick(&world);
            assert_eq!(world.host.take_log(), [""; 0]);
            assert_eq!(stream.on_http_request_body(9, true), Action::Continue);
            stream.on_done();
            assert_eq!(world.in_flight(), 0);
        }
    }
}

#[test]
fn a_client_that_waits_for_answers_has_each_of_its_pieces_sent_at_a_tick() {
    for last in ["data", "trailers"] {
        let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
        let (mut stream, _) = world.headers(UNREAD[1], false);
        stream.on_http_request_body(5, false);
        world.state("default");
        tick(&world);
        world.host.take_log();
        for _ in 0..3 {
            assert_eq!(stream.on_http_request_body(5, false), Action::Pause);
            tick(&world);
            assert_eq!(world.host.take_log(), ["focus 11", "resume"]);
            tick(&world);
            assert_eq!(world.host.take_log(), [""; 0], "once");
        }
        if last == "data" {
            assert_eq!(stream.on_http_request_body(5, true), Action::Pause);
            tick(&world);
            assert_eq!(world.host.take_log(), ["focus 11", "resume"]);
        } else {
            assert_eq!(stream.on_http_request_body(5, false), Action::Pause);
            assert_eq!(
                stream.on_http_request_trailers(1),
                Action::Continue,
                "the held piece goes on with the trailers"
            );
        }
        world.host.http.removed.borrow_mut().push(11);
        stream.on_done();
        tick(&world);
        assert_eq!(
            (
                world.host.take_log(),
                world.in_flight(),
                world.vm.borrow().parked_count()
            ),
            (vec![], 0, 0)
        );
    }
}

#[test]
fn a_parked_request_whose_body_never_ends_is_answered_at_its_deadline() {
    for (mode, expected) in [("close", "reply 503"), ("open", "resume")] {
        for headers in UNREAD {
            let world = HttpWorld::new(&format!(
                r#"{{"pools": [{{"name": "default"}}], "failure_mode": "{mode}", "cold_start_wait_ms": 300}}"#
            ));
            let (mut stream, _) = world.headers(headers, false);
            assert_eq!(stream.on_http_request_body(5, false), Action::Pause);
            world.host.take_log();
            (0..3).for_each(|_| tick(&world));
            let log = world.host.take_log();
            assert!(
                log.len() == 2 && log[1].starts_with(expected),
                "{headers:?}: {log:?}"
            );
            stream.on_http_request_body(5, false);
            let after = if mode == "open" {
                Action::Continue
            } else {
                Action::Pause
            };
            assert_eq!(stream.on_http_request_body(5, false), after);
        }
    }
}

#[test]
fn a_client_that_leaves_while_its_body_comes_is_forgotten() {
    for headers in UNREAD {
        let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
        let (mut stream, _) = world.headers(headers, false);
        assert_eq!(stream.on_http_request_body(5, false), Action::Pause);
        world.host.http.removed.borrow_mut().push(11);
        stream.on_done();
        world.host.take_log();
        world.state("default");
        tick(&world);
        assert_eq!((world.host.take_log(), world.in_flight()), (vec![], 0));
    }
}

#[test]
fn a_parked_request_that_the_proxy_does_not_find_at_first_is_decided_at_the_next_tick() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
    let (mut stream, _) = world.post("/v1/chat/completions");
    world.body(&mut stream, CHAT);
    world.state("default");
    world.host.fail(&[crate::fake::FakeCall::Focus]);
    tick(&world);
    assert_eq!(world.in_flight(), 0);
    world.host.fail(&[]);
    tick(&world);
    assert_eq!(world.in_flight(), 1);
    stream.on_done();
    assert_eq!(world.in_flight(), 0);
}

#[test]
fn more_requests_than_may_wait_are_answered_at_once() {
    let world = HttpWorld::new(r#"{"pools": [{"name": "default"}]}"#);
    let mut waiting = Vec::new();
    while world.host.log.borrow().is_empty() {
        let (stream, action) = world.headers(&[(":method", "GET"), (":path", "/")], true);
        assert_eq!(action, Action::Pause);
        waiting.push(stream);
    }
    assert_eq!(waiting.len(), 1_025);
    assert!(world.host.take_log()[0].starts_with("reply 503"));
}
