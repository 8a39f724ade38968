//! The place of a request is free when its reply has ended, or when its client does not read it. A
//! silent engine keeps the place.

use std::cell::RefCell;
use std::rc::Rc;

use exchange::driver::ReplyCheck;
use exchange::{FilterStatus, ManagedPool, RequestDriver, ResponseHead, ResponseOrigin};
use scheduler::{EndpointMetrics, Version};

use crate::memory_host::{CHAT, MemoryHost};
use crate::release::pool_update;

/// A piece that makes a reply long enough for a proxy to stop reading it.
const PIECE: usize = 20_000;

struct UnreadCase {
    pool: Rc<RefCell<ManagedPool>>,
    host: MemoryHost,
    driver: RequestDriver<MemoryHost>,
}

impl UnreadCase {
    /// Sends a request to a pool of one endpoint, and answers it with headers.
    fn answered(head: ResponseHead<'_>) -> Self {
        let mut pool = ManagedPool::new(7, 1024);
        pool.install(pool_update(1, 1), 7, 1_000_000);
        let pool = Rc::new(RefCell::new(pool));
        let mut host = MemoryHost::new(&pool, CHAT);
        let (mut driver, _) = host.send_with(&[]);
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: 200,
            upstream_address: Some(b"10.0.0.0:8000"),
            attempts: 1,
            ..head
        };
        assert_eq!(driver.response_headers(&mut host, &head), FilterStatus::Go);
        host.log.clear();
        Self { pool, host, driver }
    }

    fn whole() -> Self {
        Self::answered(ResponseHead {
            content_type: Some(b"application/json"),
            content_length: Some(1 << 20),
            ..ResponseHead::default()
        })
    }

    fn stream() -> Self {
        Self::answered(ResponseHead {
            content_type: Some(b"text/event-stream"),
            ..ResponseHead::default()
        })
    }

    fn piece(&mut self, size: usize) {
        assert_eq!(
            self.driver.response_body(&mut self.host, size, false),
            FilterStatus::Go
        );
    }

    /// Lets time pass, and then checks the reply. Returns what the host did.
    fn wait(&mut self, ms: u64) -> (ReplyCheck, String) {
        self.host.now = self.host.now.plus_ms(ms);
        self.host.log.clear();
        let now = self.host.now;
        let check = self.driver.check_reply(&mut self.host, now);
        (check, self.host.log.join(", "))
    }

    /// The engine reports its running and queued requests.
    fn report(&mut self, running: f32, queued: f32) {
        let mut pool = self.pool.borrow_mut();
        let metrics = EndpointMetrics {
            running_requests: Some(running),
            queue_depth: Some(queued),
            ..EndpointMetrics::default()
        };
        let sequence = pool.snapshot().unwrap().version().sequence + 1;
        let snapshot = pool
            .snapshot()
            .unwrap()
            .with_metrics(Version { term: 1, sequence }, vec![metrics])
            .unwrap();
        pool.refresh(snapshot, self.host.now);
    }

    /// The requests with a place, and those whose client does not read.
    fn places(&self) -> (u32, u32) {
        let pool = self.pool.borrow();
        let endpoint = pool.snapshot().unwrap().endpoints()[0].id;
        (
            pool.in_flight().own(endpoint).requests,
            pool.in_flight().suspended(endpoint),
        )
    }
}

fn again(log: &str) -> (ReplyCheck, String) {
    (ReplyCheck::Again, log.to_owned())
}

#[test]
fn the_place_is_free_at_the_last_byte_and_not_when_the_client_has_read_it() {
    let mut case = UnreadCase::whole();
    case.piece(PIECE);
    assert_eq!(case.places(), (1, 0));
    let _ = case.driver.response_body(&mut case.host, 1, true);
    assert_eq!(case.places(), (0, 0));
    case.host.log.clear();
    assert_eq!(case.wait(100_000), (ReplyCheck::Ended, String::new()));
    case.driver.end(&mut case.host);
    assert!(case.host.log.is_empty(), "it ends once");
}

#[test]
fn the_place_is_free_at_the_trailers_and_at_headers_without_a_body() {
    let mut case = UnreadCase::stream();
    case.driver.response_trailers(&mut case.host);
    assert_eq!(case.places(), (0, 0));
    let case = UnreadCase::answered(ResponseHead {
        end_of_stream: true,
        ..ResponseHead::default()
    });
    assert_eq!(case.places(), (0, 0));
}

#[test]
fn a_complete_reply_that_stops_is_not_read_and_is_reset_later() {
    let mut case = UnreadCase::whole();
    case.piece(PIECE);
    assert_eq!(case.wait(4_999), again(""));
    assert_eq!(case.wait(1), again("Unread"));
    assert_eq!(case.places(), (0, 1));
    assert_eq!(case.wait(54_999), again(""));
    let (check, log) = case.wait(1);
    assert_eq!(check, ReplyCheck::Ended);
    assert!(log.ends_with("reply 408 unread-reply"), "{log}");
    assert_eq!(case.places(), (0, 0));
    case.driver.end(&mut case.host);
    assert_eq!(
        case.pool.borrow().counters().dropped(),
        [("unread-reply", 1)]
    );
}

#[test]
fn no_reply_is_reset_where_the_settings_say_never() {
    let mut case = UnreadCase::whole();
    case.host.settings.unread_reset_ms = 0;
    case.piece(PIECE);
    let _ = case.wait(5_000);
    assert_eq!(case.wait(100_000_000), again(""));
}

#[test]
fn a_client_that_reads_slowly_is_not_cut() {
    let mut case = UnreadCase::whole();
    for _ in 0..100 {
        case.piece(PIECE);
        assert_eq!(case.wait(1), again(""));
        assert_eq!(case.wait(4_000), again(""));
    }
    for _ in 0..3 {
        case.piece(1);
        let _ = case.wait(1);
        let _ = case.wait(5_000);
        assert_eq!(case.wait(50_000), again(""), "it reads once in a minute");
        assert_eq!(case.places(), (0, 1), "the engine has long ended");
    }
}

#[test]
fn a_short_reply_waits_for_its_engine() {
    let mut case = UnreadCase::whole();
    case.piece(10_000);
    assert_eq!(case.wait(1_000_000), again(""));
    assert_eq!(case.places(), (1, 0));
}

#[test]
fn a_stream_keeps_its_place_while_its_engine_may_be_thinking() {
    let mut case = UnreadCase::stream();
    case.piece(PIECE);
    assert_eq!(case.wait(1_000_000), again(""), "the engine has no metrics");
    case.report(1.0, 0.0);
    assert_eq!(case.wait(1_000_000), again(""), "it runs the request");
    case.report(0.0, 1.0);
    assert_eq!(case.wait(1_000_000), again(""), "it has preempted it");
    assert_eq!(case.places(), (1, 0));
}

#[test]
fn a_stream_whose_engine_has_nothing_left_is_not_read() {
    let mut case = UnreadCase::stream();
    case.piece(PIECE);
    case.host.now = case.host.now.plus_ms(5_000);
    case.report(0.0, 0.0);
    assert_eq!(case.wait(0), again("Unread"));
    assert_eq!(case.places(), (0, 1));
    case.piece(100);
    assert_eq!(case.places(), (1, 0), "its engine had something left");
    let _ = case.wait(1);
    assert_eq!(case.wait(5_000), again("Unread"));
    assert_eq!(case.wait(60_000), again(""), "the engine may run a tool");
    case.piece(1 << 20);
    let _ = case.wait(1);
    assert_eq!(case.wait(5_000), again("Unread"));
    let (check, _) = case.wait(60_000);
    assert_eq!(check, ReplyCheck::Ended);
}

#[test]
fn an_upgraded_connection_may_be_silent() {
    let mut case = UnreadCase::stream();
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 101,
        upstream_address: Some(b"10.0.0.0:8000"),
        attempts: 1,
        ..ResponseHead::default()
    };
    let _ = case.driver.response_headers(&mut case.host, &head);
    case.piece(2 << 20);
    case.report(0.0, 0.0);
    assert_eq!(case.wait(1_000_000), again(""));
    assert_eq!(case.places(), (1, 0));
}

#[test]
fn a_stream_of_an_engine_that_runs_others_is_freed_and_not_cut() {
    let mut case = UnreadCase::stream();
    let mut second = MemoryHost::new(&case.pool, CHAT);
    let (_, flow) = second.send_with(&[]);
    assert_eq!(flow, FilterStatus::Go);
    case.piece(PIECE);
    case.host.now = case.host.now.plus_ms(5_000);
    case.report(1.0, 0.0);
    assert_eq!(case.places(), (2, 0));
    assert_eq!(case.wait(0), again("Unread"), "it runs one of two");
    assert_eq!(case.places(), (1, 1));
    assert_eq!(
        case.wait(1_000_000),
        again(""),
        "the one that it runs may be this one"
    );
}
