//! The place of a request is free when its reply has ended or is computed, or when its client does
//! not read the reply. A silent engine keeps the place.

use std::cell::RefCell;
use std::rc::Rc;

use exchange::{DecideAt, FilterStatus, ManagedPool, RequestDriver, ResponseHead, ResponseOrigin};
use scheduler::{EndpointMetrics, Snapshot, Version};

use crate::memory_host::{CHAT, MemoryHost};
use crate::release::{pool_update, split_pool_update};

/// The length in bytes of a piece that makes a reply long enough for a proxy to stop reading the
/// reply.
const PIECE: usize = 20_000;

struct UnreadCase {
    pool: Rc<RefCell<ManagedPool>>,
    host: MemoryHost,
    driver: RequestDriver<MemoryHost>,
}

impl UnreadCase {
    /// Sends a request to a pool of one endpoint.
    fn sent() -> Self {
        Self::sent_to(pool_update(1, 1))
    }

    fn sent_to(endpoints: Snapshot) -> Self {
        let mut pool = ManagedPool::new(7, 1024);
        pool.install(endpoints, 7, 5_000);
        let pool = Rc::new(RefCell::new(pool));
        let mut host = MemoryHost::new(&pool, CHAT);
        let (driver, _) = host.send_with(&[]);
        host.log.clear();
        Self { pool, host, driver }
    }

    /// Sends a request, and answers it with headers.
    fn answered(head: ResponseHead<'_>) -> Self {
        let mut case = Self::sent();
        case.answer(head);
        case
    }

    fn answer(&mut self, head: ResponseHead<'_>) {
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: 200,
            upstream_address: Some(b"10.0.0.0:8000"),
            attempts: 1,
            ..head
        };
        let flow = self.driver.response_headers(&mut self.host, &head);
        assert_eq!(flow, FilterStatus::Go);
        self.host.log.clear();
    }

    /// A computed reply that a proxy can buffer.
    fn json() -> Self {
        Self::json_of(65_536)
    }

    fn json_of(bytes: usize) -> Self {
        Self::answered(ResponseHead {
            content_type: Some(b"application/json"),
            content_length: Some(bytes),
            ..ResponseHead::default()
        })
    }

    fn stream() -> Self {
        Self::answered(ResponseHead {
            content_type: Some(b"text/event-stream"),
            ..ResponseHead::default()
        })
    }

    /// Lets a piece of the reply arrive, and lets the next check see this piece.
    fn piece(&mut self, size: usize) {
        assert_eq!(
            self.driver.response_body(&mut self.host, size, false),
            FilterStatus::Go
        );
        assert_eq!(self.wait(0), "");
    }

    /// Lets time pass, and then checks the reply. Returns what the host did.
    fn wait(&mut self, ms: u64) -> String {
        self.host.now = self.host.now.plus_ms(ms);
        self.host.log.clear();
        let now = self.host.now;
        self.driver.check_reply(&mut self.host, now);
        self.host.log.join(", ")
    }

    /// Lets time pass, in which the engine reports its requests each second. Then checks the reply.
    fn wait_with(&mut self, ms: u64, running: f32, queued: f32) -> String {
        self.host.now = self.host.now.plus_ms(ms);
        self.report(running, queued);
        self.wait(0)
    }

    /// Makes the engine report its running and queued requests.
    fn report(&mut self, running: f32, queued: f32) {
        self.report_all(&[(running, queued)]);
    }

    /// Makes each engine report its running and queued requests.
    fn report_all(&mut self, counts: &[(f32, f32)]) {
        let mut pool = self.pool.borrow_mut();
        let metrics = counts.iter().map(|&(running, queued)| EndpointMetrics {
            running_requests: Some(running),
            queue_depth: Some(queued),
            ..EndpointMetrics::default()
        });
        let sequence = pool.snapshot().unwrap().version().sequence + 1;
        let snapshot = pool
            .snapshot()
            .unwrap()
            .with_metrics(Version { term: 1, sequence }, metrics.collect())
            .unwrap();
        pool.refresh(snapshot, self.host.now);
    }

    /// Returns the number of requests with a place, and of requests whose client does not read.
    fn places(&self) -> (u32, u32) {
        let pool = self.pool.borrow();
        let endpoint = pool.snapshot().unwrap().endpoints()[0].id;
        (
            pool.in_flight().own(endpoint).requests,
            pool.in_flight().suspended(endpoint),
        )
    }
}

#[test]
fn the_place_is_free_at_the_last_byte_and_not_when_the_client_has_read_it() {
    let mut case = UnreadCase::json();
    case.piece(PIECE);
    assert_eq!(case.places(), (1, 0));
    let _ = case.driver.response_body(&mut case.host, 1, true);
    assert_eq!(case.places(), (0, 0));
    case.host.log.clear();
    assert_eq!(case.wait(100_000), "");
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
    let mut case = UnreadCase::json();
    case.piece(PIECE);
    assert_eq!(case.wait(4_999), "");
    assert_eq!(case.wait(1), "Unread");
    assert_eq!(case.places(), (0, 1));
    assert_eq!(case.wait(54_999), "");
    let log = case.wait(1);
    assert!(log.ends_with("reply 408 unread-reply"), "{log}");
    assert_eq!(case.places(), (0, 0));
    case.driver.end(&mut case.host);
    assert_eq!(
        case.pool.borrow().counters().dropped(),
        [("unread-reply", 1)]
    );
}

#[test]
fn a_computed_reply_that_no_proxy_buffers_takes_no_place_and_is_reset_as_others() {
    let mut case = UnreadCase::json_of(65_537);
    assert_eq!(case.places(), (0, 1), "the engine has done its work");
    case.piece(PIECE);
    assert_eq!(case.wait(4_999), "");
    assert_eq!(case.wait(1), "Unread");
    let log = case.wait(55_000);
    assert!(log.ends_with("reply 408 unread-reply"), "{log}");
    assert_eq!(case.places(), (0, 0));
    let mut case = UnreadCase::json_of(1 << 20);
    case.piece(PIECE);
    let _ = case.driver.response_body(&mut case.host, 1, true);
    assert_eq!(case.places(), (0, 0));
}

#[test]
fn no_reply_is_reset_where_the_settings_say_never() {
    let mut case = UnreadCase::json();
    case.host.settings.unread_reset_ms = 0;
    case.piece(PIECE);
    let _ = case.wait(5_000);
    assert_eq!(case.wait(100_000_000), "");
}

#[test]
fn a_client_that_reads_slowly_is_not_cut() {
    let mut case = UnreadCase::json();
    case.piece(PIECE);
    assert_eq!(case.wait(4_999), "");
    case.piece(PIECE);
    assert_eq!(case.wait(1), "Unread", "the engine has ended");
    for _ in 0..3 {
        case.piece(1);
        assert_eq!(case.wait(55_000), "", "it reads once in a minute");
        assert_eq!(case.places(), (0, 1));
    }
}

/// Sends pieces of this size, one in each period of this many seconds, while the engine reports no
/// request. Returns the seconds in which the request had its place, of five hundred, and checks
/// that it was not cut.
fn seconds_of_a_place(bytes: usize, period: u32) -> u32 {
    let mut case = UnreadCase::stream();
    case.report(1.0, 0.0);
    case.piece(PIECE);
    let mut seconds = 0;
    for second in 1..=500 {
        case.report(0.0, 0.0);
        let log = case.wait(980);
        assert!(log.is_empty() || log == "Unread", "{log}");
        seconds += case.places().0;
        if second % period == 0 {
            case.piece(bytes);
        }
    }
    seconds
}

#[test]
fn a_client_that_reads_a_little_at_a_time_keeps_its_stream_and_not_the_place() {
    assert_eq!(
        seconds_of_a_place(PIECE, 5),
        500,
        "at the pace of the engine"
    );
    for bytes in [1, 100, PIECE / 10] {
        assert!(seconds_of_a_place(bytes, 5) < 10, "{bytes}");
    }
    for bytes in [1, 10, 100] {
        assert!(seconds_of_a_place(bytes, 1) < 10, "{bytes}, each second");
    }
}

#[test]
fn a_burst_sets_no_pace_for_a_reply_whose_engine_works() {
    let mut case = UnreadCase::stream();
    case.report(1.0, 0.0);
    case.piece(50 * PIECE);
    for _ in 0..60 {
        case.report(1.0, 0.0);
        assert_eq!(case.wait(1_000), "");
        case.piece(8_192);
    }
    case.report(0.0, 0.0);
    assert_eq!(case.wait(1_000), "", "one odd report");
    assert_eq!(case.places(), (1, 0));
}

#[test]
fn a_short_reply_is_unread_as_well_because_other_streams_may_fill_the_buffer() {
    let mut case = UnreadCase::json();
    case.piece(10_000);
    assert_eq!(case.wait(5_000), "Unread");
    assert_eq!(case.places(), (0, 1));
}

#[test]
fn a_stream_keeps_its_place_while_its_engine_may_be_thinking() {
    let mut case = UnreadCase::stream();
    case.piece(PIECE);
    assert_eq!(case.wait(1_000_000), "", "the engine has no metrics");
    assert_eq!(
        case.wait_with(1_000_000, 1.0, 0.0),
        "",
        "it runs the request"
    );
    assert_eq!(
        case.wait_with(1_000_000, 0.0, 1.0),
        "",
        "it has preempted it"
    );
    assert_eq!(case.places(), (1, 0));
}

#[test]
fn a_stream_whose_engine_has_nothing_left_is_not_read() {
    let mut case = UnreadCase::stream();
    case.report(1.0, 0.0);
    case.piece(PIECE);
    assert_eq!(case.wait_with(5_100, 0.0, 0.0), "Unread");
    assert_eq!(case.places(), (0, 1));
    case.piece(100);
    assert_eq!(case.places(), (0, 1), "the client may have read this");
    case.piece(PIECE);
    assert_eq!(case.places(), (1, 0), "its engine had something left");
    assert_eq!(case.wait_with(5_100, 0.0, 0.0), "Unread");
    assert_eq!(
        case.wait_with(60_000, 0.0, 0.0),
        "",
        "the engine may run a tool"
    );
    case.piece(1 << 20);
    assert_eq!(case.wait_with(5_100, 0.0, 0.0), "Unread");
    let log = case.wait_with(60_000, 0.0, 0.0);
    assert!(log.ends_with("reply 408 unread-reply"), "{log}");
}

#[test]
fn a_request_without_any_reply_is_unread_when_its_engine_has_ended_it() {
    let mut case = UnreadCase::sent();
    assert_eq!(case.wait_with(4_000, 1.0, 0.0), "");
    assert_eq!(case.wait_with(999, 0.0, 0.0), "", "it may be on its way");
    assert_eq!(case.wait_with(100, 0.0, 0.0), "Unread");
    assert_eq!(case.places(), (0, 1));
    assert_eq!(case.wait_with(500_000, 0.0, 0.0), "", "it is not answered");
    case.answer(ResponseHead::default());
    assert_eq!(case.places(), (1, 0), "the proxy reads its reply");
    case.piece(10);
    let _ = case.driver.response_body(&mut case.host, 1, true);
    assert_eq!(case.places(), (0, 0));
}

#[test]
fn a_request_whose_prefill_takes_long_keeps_its_place() {
    let mut case = UnreadCase::sent();
    for _ in 0..100 {
        assert_eq!(case.wait_with(10_000, 1.0, 0.0), "", "the engine counts it");
    }
    let mut silent = UnreadCase::sent();
    for _ in 0..100 {
        let log = silent.wait_with(10_000, 0.0, 0.0);
        assert_eq!(log, "", "the engine counts none");
    }
    assert_eq!((case.places(), silent.places()), ((1, 0), (1, 0)));
}

#[test]
fn an_engine_that_counts_no_request_in_prefill_has_a_millisecond_for_each_token() {
    let mut case = UnreadCase::sent();
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}]}}"#,
        "word ".repeat(16_000)
    );
    let mut host = MemoryHost::new(&case.pool, body.as_bytes());
    let (driver, _) = host.send_with(&[]);
    case.driver.end(&mut case.host);
    case.host = host;
    case.driver = driver;
    case.report(1.0, 0.0);
    assert_eq!(case.wait_with(20_000, 0.0, 0.0), "", "20,000 tokens");
    assert_eq!(case.wait_with(20_000, 0.0, 0.0), "Unread");
}

#[test]
fn the_declared_length_of_a_body_that_is_not_read_excuses_no_silence() {
    let mut case = UnreadCase::sent();
    let mut host = MemoryHost::new(&case.pool, CHAT);
    host.settings.decide_at = DecideAt::Headers;
    let length: [(&[u8], &[u8]); 1] = [(b"content-length", b"25000000")];
    let (driver, _) = host.send_with(&length);
    case.driver.end(&mut case.host);
    case.host = host;
    case.driver = driver;
    assert_eq!(case.wait(0), "");
    case.report(1.0, 0.0);
    assert_eq!(case.wait_with(5_100, 0.0, 0.0), "Unread");
}

#[test]
fn a_request_in_stages_is_unread_when_none_of_its_engines_has_it() {
    let mut case = UnreadCase::sent_to(split_pool_update(3, 1));
    let loads = |case: &UnreadCase| {
        let pool = case.pool.borrow();
        let endpoints = pool.snapshot().unwrap().endpoints();
        endpoints
            .iter()
            .map(|endpoint| pool.in_flight().own(endpoint.id).requests)
            .sum::<u32>()
    };
    let before = loads(&case);
    assert_eq!(before, 3, "each stage has it");
    case.report_all(&[(1.0, 0.0); 3]);
    case.host.now = case.host.now.plus_ms(6_000);
    for busy in 0..3 {
        case.report_all(&[0, 1, 2].map(|at| (f32::from(u8::from(at == busy)), 0.0)));
        let _ = case.wait(0);
        assert_eq!(loads(&case), before, "engine {busy} has it");
    }
    case.report_all(&[(0.0, 0.0); 3]);
    let _ = case.wait(0);
    assert_eq!(loads(&case), 0);
    case.answer(ResponseHead::default());
    assert_eq!(loads(&case), 1, "the serving engine");
}

#[test]
fn a_silent_upgraded_connection_has_no_place_and_is_not_reset() {
    let mut case = UnreadCase::sent();
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 101,
        upstream_address: Some(b"10.0.0.0:8000"),
        attempts: 1,
        content_length: Some(0),
        ..ResponseHead::default()
    };
    let _ = case.driver.response_headers(&mut case.host, &head);
    case.piece(2 << 20);
    assert_eq!(case.wait_with(5_100, 1.0, 0.0), "", "its engine has it");
    assert_eq!(case.wait_with(100, 0.0, 0.0), "Unread");
    assert_eq!(case.places(), (0, 1));
    assert_eq!(case.wait_with(1_000_000, 0.0, 0.0), "", "never reset");
    case.piece(100);
    assert_eq!(case.places(), (1, 0), "its engine has work again");
}

#[test]
fn a_stream_of_an_engine_that_runs_others_is_freed_and_not_cut() {
    let mut case = UnreadCase::stream();
    let mut second = MemoryHost::new(&case.pool, CHAT);
    let (_, flow) = second.send_with(&[]);
    assert_eq!(flow, FilterStatus::Go);
    case.piece(PIECE);
    case.host.now = case.host.now.plus_ms(5_100);
    case.report(1.0, 0.0);
    assert_eq!(case.places(), (2, 0));
    assert_eq!(case.wait(0), "Unread", "it runs one of two");
    assert_eq!(case.places(), (1, 1));
    assert_eq!(
        case.wait_with(1_000_000, 1.0, 0.0),
        "",
        "the one that it runs may be this one"
    );
}
