//! A complete host in memory: the smallest code that drives requests without Envoy. Read it beside
//! the rules in `crates/exchange/src/driver.rs`.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use exchange::driver::{
    BodyProgress, FilterStatus, PoolUse, RequestCount, RequestHost, RewriteError,
};
use exchange::{
    ExchangeOutcome, ExchangeSettings, LocalReply, ManagedPool, RequestChanges, RequestDriver,
    ResponseHead, ResponseOrigin, ResponseStep, Timestamp,
};

use crate::release::pool_update;

pub(crate) const CHAT: &[u8] = br#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;
const REPLY: &[u8] = br#"{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#;
const HEADERS: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/chat/completions")];

/// One stream of the host. The pool outlives the stream.
pub(crate) struct MemoryHost {
    pool: Rc<RefCell<ManagedPool>>,
    pub(crate) settings: ExchangeSettings,
    pub(crate) now: Timestamp,
    request: Vec<u8>,
    response: Vec<u8>,
    /// The actions of the host, in order.
    pub(crate) log: Vec<String>,
    /// The number under which the request is held.
    pub(crate) held: Option<u64>,
    /// The reasons for the decision, which the client got in a header.
    pub(crate) reasons: Option<String>,
    /// Whether the endpoint breaks off its reply.
    pub(crate) broke_off: bool,
    /// The number of times that the host used the pool for a piece of a reply.
    reports: Cell<usize>,
}

// === impl MemoryHost ===

impl MemoryHost {
    pub(crate) fn new(pool: &Rc<RefCell<ManagedPool>>, request: &[u8]) -> Self {
        let settings = ExchangeSettings::default();
        let request = request.to_vec();
        let response = REPLY.to_vec();
        Self {
            pool: Rc::clone(pool),
            settings,
            now: Timestamp(0).plus_ms(1),
            request,
            response,
            log: Vec::new(),
            held: None,
            reasons: None,
            broke_off: false,
            reports: Cell::new(0),
        }
    }

    fn send(&mut self) -> (RequestDriver<Self>, FilterStatus) {
        self.send_with(&[])
    }

    /// Sends the whole request with more headers.
    pub(crate) fn send_with(
        &mut self,
        headers: &[(&[u8], &[u8])],
    ) -> (RequestDriver<Self>, FilterStatus) {
        let mut driver = RequestDriver::default();
        let _ = driver.request_headers(
            self,
            HEADERS.into_iter().chain(headers.iter().copied()),
            false,
        );
        let size = self.request.len();
        let flow = driver.request_body(self, size, BodyProgress::Whole);
        (driver, flow)
    }

    /// Lets the endpoint answer, and ends the stream.
    pub(crate) fn answer(&mut self, driver: &mut RequestDriver<Self>, upstream_address: &str) {
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: 200,
            upstream_address: Some(upstream_address.as_bytes()),
            attempts: 1,
            ..ResponseHead::default()
        };
        assert_eq!(driver.response_headers(self, &head), FilterStatus::Go);
        let size = self.response.len();
        assert_eq!(driver.response_body(self, size, true), FilterStatus::Go);
        driver.end(self);
    }
}

impl RequestHost for MemoryHost {
    type Pool = Rc<RefCell<ManagedPool>>;
    type RequestBody = Vec<u8>;
    type ResponseBody = Vec<u8>;

    const IS_FILTER: bool = false;

    fn now(&self) -> Timestamp {
        self.now
    }

    fn settings(&self) -> &ExchangeSettings {
        &self.settings
    }

    fn ready_reply(&self) -> LocalReply {
        LocalReply {
            status: 200,
            headers: Vec::new(),
            body: Vec::new(),
        }
    }

    fn find_pool(&mut self) -> Option<Self::Pool> {
        Some(Rc::clone(&self.pool))
    }

    fn with_pool<R>(
        &self,
        pool: &Self::Pool,
        usage: PoolUse,
        _now: Timestamp,
        act: impl FnOnce(&mut ManagedPool) -> R,
    ) -> R {
        let reports = usize::from(usage == PoolUse::ReadResponse);
        self.reports.set(self.reports.get() + reports);
        act(&mut pool.borrow_mut())
    }

    fn subset_hint(&self) -> Option<Cow<'_, [u8]>> {
        None
    }

    fn body_piece(&self, start: usize, size: usize) -> Cow<'_, [u8]> {
        self.request
            .get(start..start.saturating_add(size))
            .unwrap_or_default()
            .into()
    }

    fn take_body(&mut self, _size: usize) -> Vec<u8> {
        std::mem::take(&mut self.request)
    }

    fn keep_body(&mut self, body: Vec<u8>) {
        self.request = body;
    }

    fn forward(
        &mut self,
        changes: RequestChanges,
        body: Option<Vec<u8>>,
    ) -> Result<(), RewriteError> {
        let destination = changes
            .set
            .iter()
            .find(|(name, _)| *name == self.settings.destination.header)
            .map(|(_, value)| value.as_str());
        self.log.push(format!(
            "forward {} bytes to {}",
            body.map_or(0, |body| body.len()),
            destination.unwrap_or("any")
        ));
        Ok(())
    }

    fn reply(&mut self, reply: LocalReply) {
        let header = |name: &str| {
            reply
                .headers
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| value.as_str())
        };
        let reason = header("x-llm-d-request-dropped-reason").filter(|_| reply.status != 400);
        let after = header("retry-after")
            .map(|after| format!(", retry after {after}"))
            .unwrap_or_default();
        let decision = header("x-switchpoint-decision")
            .map(|decision| format!(", decision {decision}"))
            .unwrap_or_default();
        self.log.push(format!(
            "reply {}{}{after}{decision}",
            reply.status,
            reason
                .map(|reason| format!(" {reason}"))
                .unwrap_or_default()
        ));
    }

    fn park(&mut self, _pool: &Self::Pool, _deadline: Timestamp, _client: u64) -> bool {
        self.log.push("park".to_owned());
        true
    }

    fn hold(&mut self, _pool: &Self::Pool, number: u64) {
        self.held = Some(number);
        self.log.push("hold".to_owned());
    }

    /// Does nothing, because a test calls [`ManagedPool::next_due`] itself.
    fn release_queued(&mut self, _pool: &Self::Pool) {}

    fn log_hold(&mut self, ms: u64, priority: i32) {
        self.log
            .push(format!("held for {ms} ms in band {priority}"));
    }

    fn resume_after(&mut self, _pool: &Self::Pool, _at: Timestamp) {
        unreachable!("only a filter resumes in the middle of a body");
    }

    fn log_decision(&mut self, record: &str) {
        self.log.push(format!("record of {} bytes", record.len()));
    }

    fn count(&mut self, _pool: Option<&Self::Pool>, count: RequestCount) {
        self.log.push(format!("{count:?}"));
    }

    fn send_response_headers(&mut self, step: ResponseStep) {
        self.reasons = step
            .set
            .into_iter()
            .find(|(name, _)| *name == "x-switchpoint-decision")
            .map(|(_, value)| value);
    }

    fn take_response_body(&mut self, _size: usize) -> Vec<u8> {
        std::mem::take(&mut self.response)
    }

    fn send_response_body(&mut self, body: Vec<u8>, restored: Option<&[u8]>, _held: bool) {
        self.log.push(format!(
            "{} bytes to the client",
            restored.unwrap_or(&body).len()
        ));
    }

    fn append_response(&mut self, _bytes: &[u8]) {}

    fn endpoint_broke_off(&mut self) -> bool {
        self.broke_off
    }

    fn ended(&mut self, outcome: &ExchangeOutcome) {
        self.log.push(format!(
            "{:?}, {:?} tokens",
            outcome.verdict, outcome.usage.completion_tokens
        ));
    }
}

/// Returns a pool with two endpoints, or a pool without state.
fn pool(with_state: bool) -> Rc<RefCell<ManagedPool>> {
    let mut pool = ManagedPool::new(7, 1024);
    if with_state {
        pool.install(pool_update(2, 1), 7, 1_000);
    }
    Rc::new(RefCell::new(pool))
}

fn in_flight(pool: &RefCell<ManagedPool>) -> Vec<u32> {
    let pool = pool.borrow();
    let endpoints = pool
        .snapshot()
        .map(|snapshot| snapshot.endpoints())
        .unwrap_or_default();
    endpoints
        .iter()
        .map(|endpoint| pool.in_flight().own(endpoint.id).requests)
        .collect()
}

#[test]
fn a_request_is_routed_and_released() {
    let pool = pool(true);
    let mut host = MemoryHost::new(&pool, CHAT);
    let (mut driver, flow) = host.send();
    assert_eq!(
        (
            flow,
            driver.is_routed(),
            in_flight(&pool).iter().sum::<u32>()
        ),
        (FilterStatus::Go, true, 1)
    );
    let forwarded = host.log.first().cloned().unwrap_or_default();
    let first = forwarded
        .rsplit(' ')
        .next()
        .and_then(|list| list.split(',').next())
        .unwrap();
    assert!(
        forwarded.starts_with("forward 60 bytes to 10.0.0."),
        "{forwarded}"
    );
    host.answer(&mut driver, first);
    driver.end(&mut host); // a second end does no harm
    assert_eq!(
        host.log[1..],
        [
            "Picked { us: 0 }",
            "92 bytes to the client",
            "Success, Some(1) tokens"
        ]
    );
    assert_eq!(in_flight(&pool), [0, 0]);
}

#[test]
fn a_request_waits_for_the_first_state() {
    let pool = pool(false);
    let mut host = MemoryHost::new(&pool, CHAT);
    let (mut driver, flow) = host.send();
    assert_eq!(
        (flow, driver.waits(), host.log.as_slice()),
        (FilterStatus::Hold, true, &["park".to_owned()][..])
    );
    pool.borrow_mut().install(pool_update(2, 1), 7, 1_000);
    host.now = host.now.plus_ms(10);
    let now = host.now;
    assert_eq!(driver.resume(&mut host, now), FilterStatus::Go);
    assert!(
        host.log[1].starts_with("forward 60 bytes"),
        "{:?}",
        host.log
    );
    driver.end(&mut host);
    assert_eq!(in_flight(&pool), [0, 0]);
}

#[test]
fn an_invalid_body_is_refused() {
    let pool = pool(true);
    let mut host = MemoryHost::new(&pool, b"{");
    let (mut driver, flow) = host.send();
    assert_eq!(
        (flow, driver.is_answered(), host.log.as_slice()),
        (
            FilterStatus::Hold,
            true,
            &["Invalid".into(), "reply 400".into()][..]
        )
    );
    driver.end(&mut host);
    assert_eq!(host.log.len(), 2, "an answered request has no outcome");
}

/// Sends a long request in two pieces; the pool's state may change between them. Returns the number
/// of blocks that the pool remembers afterwards, and again after the same request in one piece.
fn in_two_pieces(between: impl FnOnce(&mut ManagedPool)) -> [usize; 2] {
    let pool = pool(true);
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"{}"}}],"model":"m"}}"#,
        "some words ".repeat(9_000)
    );
    let mut host = MemoryHost::new(&pool, body.as_bytes());
    let mut driver = RequestDriver::default();
    let _ = driver.request_headers(&mut host, HEADERS.into_iter(), false);
    assert_eq!(
        driver.request_body(&mut host, 50_000, BodyProgress::Partial),
        FilterStatus::Hold
    );
    between(&mut pool.borrow_mut());
    assert_eq!(
        driver.request_body(&mut host, body.len(), BodyProgress::Whole),
        FilterStatus::Go
    );
    let entries = || pool.borrow().prefixes().stats().entries;
    let once = entries();
    assert_eq!(
        MemoryHost::new(&pool, body.as_bytes()).send().1,
        FilterStatus::Go
    );
    [once, entries()]
}

#[test]
fn a_body_in_pieces_has_the_blocks_of_a_whole_one_though_the_secret_changes() {
    let unchanged = in_two_pieces(|_| ());
    assert!(
        unchanged[0] > 100 && unchanged[0] == unchanged[1],
        "{unchanged:?}"
    );
    assert_eq!(
        in_two_pieces(|pool| pool.install(pool_update(2, 1), 8, 1_000)),
        unchanged
    );
}

#[test]
fn a_stream_touches_the_pool_at_its_first_token_each_50_ms_and_at_its_end() {
    let pool = pool(true);
    let mut host = MemoryHost::new(&pool, CHAT);
    let (mut driver, _) = host.send();
    let head = ResponseHead {
        origin: ResponseOrigin::Upstream,
        status: 200,
        upstream_address: Some(b"10.0.0.0:8000"),
        attempts: 1,
        content_type: Some(b"text/event-stream"),
        ..ResponseHead::default()
    };
    let _ = driver.response_headers(&mut host, &head);
    let endpoint = pool.borrow().snapshot().unwrap().endpoints()[0].id;
    let decode_tokens = || pool.borrow().in_flight().load(endpoint).decode_tokens;
    let mut reports = Vec::new();
    for piece in 0..20 {
        host.now = Timestamp(0).plus_ms(100 + 10 * piece);
        host.response = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n".to_vec();
        let size = host.response.len();
        let before = host.reports.get();
        let _ = driver.response_body(&mut host, size, false);
        if host.reports.get() != before {
            reports.push((piece, decode_tokens()));
        }
    }
    let prompt = reports[0].1 - 1;
    let seen: Vec<_> = reports
        .iter()
        .map(|(at, all)| (*at, all - prompt))
        .collect();
    assert_eq!(seen, [(0, 1), (5, 6), (10, 11), (15, 16)]);
    // The last four tokens are part of the outcome without a separate report.
    driver.end(&mut host);
    assert!(
        host.log.last().unwrap().contains("Some(20) tokens"),
        "{:?}",
        host.log
    );
    assert_eq!((host.reports.get(), decode_tokens()), (4, 0));
}
