//! Requests that flow control holds, through the driver, with the host in memory.

use std::cell::RefCell;
use std::rc::Rc;

use exchange::driver::{FilterStatus, RequestDriver};
use exchange::{HeaderTrust, ManagedPool, ResponseHead, ResponseOrigin, Timestamp};
use scheduler::objects::{ObjectiveSpec, Objects, ObjectsSpec};
use scheduler::plugin::ParameterValue;
use scheduler::{PipelineSpec, PluginSpec};

use crate::memory_host::{CHAT, MemoryHost};
use crate::release::pool_update_of;

/// Returns a pool of one endpoint that takes one request at a time.
pub(crate) fn pool(section: &[(&str, f64)]) -> Rc<RefCell<ManagedPool>> {
    pool_of(1, 1.0, section)
}

/// Returns a pool of endpoints that take this many requests at a time.
fn pool_of(endpoints: u8, places: f64, section: &[(&str, f64)]) -> Rc<RefCell<ManagedPool>> {
    let number =
        |(name, number): &(&str, f64)| ((*name).to_owned(), ParameterValue::Number(*number));
    let detector = PluginSpec {
        parameters: vec![number(&("maxConcurrency", places))],
        ..PluginSpec::of_type("concurrency-detector")
    };
    let control = PluginSpec {
        parameters: section.iter().map(number).collect(),
        ..PluginSpec::of_type(scheduler::flow::FLOW_CONTROL)
    };
    let mut spec = PipelineSpec {
        saturation_detector: detector.name().to_owned(),
        ..PipelineSpec::default()
    };
    spec.plugins.extend([detector, control]);
    let objective = |(name, priority): (&str, i32)| ObjectiveSpec {
        name: name.to_owned(),
        priority,
    };
    let objectives = [("chat", 10), ("batch", -10)].map(objective).into();
    let objects = Objects::build(&ObjectsSpec {
        objectives,
        ..ObjectsSpec::default()
    })
    .unwrap();
    let mut pool = ManagedPool::new(7, 1024);
    pool.install(
        pool_update_of(endpoints, 1, &spec, |_| "").with_objects(objects),
        7,
        1_000,
    );
    Rc::new(RefCell::new(pool))
}

/// One client: its driver and host.
struct QueuedClient {
    host: MemoryHost,
    driver: RequestDriver<MemoryHost>,
    flow: FilterStatus,
}

impl QueuedClient {
    fn sends(pool: &Rc<RefCell<ManagedPool>>, objective: &str) -> Self {
        Self::sends_with(pool, objective, &[])
    }

    fn sends_with(
        pool: &Rc<RefCell<ManagedPool>>,
        objective: &str,
        more: &[(&[u8], &[u8])],
    ) -> Self {
        let mut host = MemoryHost::new(pool, CHAT);
        host.settings.objective_header = HeaderTrust::Trust;
        host.settings.flow.header = HeaderTrust::Trust;
        host.settings.flow.ttl_header = "x-queue-ttl-ms".to_owned();
        host.settings.explain = true;
        let own: [(&[u8], &[u8]); 2] = [
            (b"x-llm-d-inference-objective", objective.as_bytes()),
            (b"x-llm-d-inference-fairness-id", b"tenant-1"),
        ];
        let (driver, flow) = host.send_with(&[&own, more].concat());
        Self { host, driver, flow }
    }

    /// Sends a request at this time from this address, which is its client.
    fn sends_from(pool: &Rc<RefCell<ManagedPool>>, address: &[u8], now: Timestamp) -> Self {
        let mut host = MemoryHost::new(pool, CHAT);
        host.now = now;
        let (driver, flow) = host.send_with(&[(b"x-forwarded-for", address)]);
        Self { host, driver, flow }
    }

    fn is_queued(&self) -> bool {
        self.driver.is_queued()
    }

    /// Lets the engine send the headers of a reply that it has computed, of this many bytes.
    fn computes(&mut self, bytes: usize) {
        self.answers(b"application/json", Some(bytes));
    }

    /// Lets the engine send the headers of a reply of this type and length.
    fn answers(&mut self, content_type: &[u8], content_length: Option<usize>) {
        let address = self.endpoint();
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: 200,
            upstream_address: Some(address.as_bytes()),
            attempts: 1,
            content_type: Some(content_type),
            content_length,
            ..ResponseHead::default()
        };
        let flow = self.driver.response_headers(&mut self.host, &head);
        assert_eq!(flow, FilterStatus::Go);
    }

    /// The address of the endpoint that is tried first.
    fn endpoint(&self) -> String {
        let mut log = self.host.log.iter();
        let line = log.find(|line| line.starts_with("forward ")).unwrap();
        let list = line.rsplit(' ').next().unwrap();
        list.split(',').next().unwrap().to_owned()
    }

    fn holds(&self, number: u64) -> bool {
        self.is_queued() && self.host.held == Some(number)
    }

    fn check(&mut self, now: Timestamp) {
        self.host.now = now;
        self.driver.check_reply(&mut self.host, now);
    }
}

impl AsMut<QueuedClient> for QueuedClient {
    fn as_mut(&mut self) -> &mut QueuedClient {
        self
    }
}

/// Resumes the held requests that the pool names, as a host does.
fn release<T: AsMut<QueuedClient>>(
    pool: &Rc<RefCell<ManagedPool>>,
    clients: &mut [T],
    now: Timestamp,
) {
    loop {
        let Some(number) = pool.borrow_mut().next_due(now) else {
            return;
        };
        let mut all = clients.iter_mut().map(T::as_mut);
        if let Some(client) = all.find(|client| client.holds(number)) {
            client.host.now = now;
            client.flow = client.driver.resume(&mut client.host, now);
        }
    }
}

#[test]
fn chat_is_released_before_a_batch_that_came_earlier() {
    let pool = pool(&[]);
    let mut clients: Vec<QueuedClient> = ["batch", "batch", "batch", "chat"]
        .map(|objective| QueuedClient::sends(&pool, objective))
        .into();
    assert_eq!(
        clients.iter().map(|client| client.flow).collect::<Vec<_>>(),
        [
            FilterStatus::Go,
            FilterStatus::Hold,
            FilterStatus::Hold,
            FilterStatus::Hold
        ]
    );
    assert_eq!(clients[3].host.log, ["hold"]);
    for (ends, next) in [(0, 3), (3, 1), (1, 2)] {
        let QueuedClient { host, driver, .. } = &mut clients[ends];
        host.answer(driver, "10.0.0.0:8000");
        let now = Timestamp(0).plus_ms(100);
        release(&pool, &mut clients, now);
        assert_eq!(
            (clients[next].flow, clients[next].driver.is_routed()),
            (FilterStatus::Go, true),
            "client {next}"
        );
        let log = &clients[next].host.log;
        assert!(
            log[1].starts_with("held for 99 ms in band") && log[2].starts_with("forward"),
            "{log:?}"
        );
    }
    let QueuedClient { host, driver, .. } = &mut clients[2];
    host.answer(driver, "10.0.0.0:8000");
    let pool = pool.borrow();
    assert!(pool.queues().is_empty() && pool.in_flight().rows().next().is_none());
    let durations_ms: f64 = pool
        .counters()
        .models()
        .iter()
        .map(|model| model.duration_ms.sum)
        .sum();
    assert!(
        durations_ms >= 3.0 * 99.0,
        "what clients wait for is measured, holds included: {durations_ms} ms"
    );
}

#[test]
fn a_client_without_a_fairness_id_does_not_wait_behind_all_of_another() {
    let pool = pool(&[]);
    let from =
        |address: &'static [u8]| QueuedClient::sends_from(&pool, address, Timestamp(0).plus_ms(1));
    let mut clients: Vec<QueuedClient> = (0..5).map(|_| from(b"10.9.9.1")).collect();
    clients.push(from(b"10.9.9.2"));
    let QueuedClient { host, driver, .. } = &mut clients[0];
    host.answer(driver, "10.0.0.0:8000");
    release(&pool, &mut clients, Timestamp(0).plus_ms(100));
    let mut routed = clients.iter().map(|client| client.driver.is_routed());
    assert_eq!(routed.rposition(|is_routed| is_routed), Some(5));
}

/// Two clients send six requests each to an endpoint with one place. The first client's requests
/// leave the place as `leave` does; those of the second client end at once. Returns the order in
/// which the first eight get the place.
fn order_beside(leave: impl Fn(&mut QueuedClient)) -> Vec<usize> {
    const OF_EACH: usize = 6;
    let pool = pool(&[]);
    let from =
        |address: &'static [u8]| QueuedClient::sends_from(&pool, address, Timestamp(0).plus_ms(1));
    let mut clients: Vec<QueuedClient> = (0..OF_EACH).map(|_| from(b"10.9.9.1")).collect();
    clients.extend((0..OF_EACH).map(|_| from(b"10.9.9.2")));
    let mut order: Vec<usize> = Vec::new();
    for _ in 0..OF_EACH + 2 {
        let is_next = |at: &usize| clients[*at].driver.is_routed() && !order.contains(at);
        let at = (0..clients.len()).find(is_next).unwrap();
        order.push(at);
        let client = &mut clients[at];
        if at < OF_EACH {
            leave(client);
        } else {
            client.driver.end(&mut client.host);
        }
        let now = client.host.now;
        release(&pool, &mut clients, now);
    }
    order
}

/// Keeps the place for 4.9 s, and ends the request.
fn end_late(QueuedClient { host, driver, .. }: &mut QueuedClient) {
    host.now = host.now.plus_ms(4_900);
    driver.end(host);
}

#[test]
fn a_client_that_breaks_off_silent_requests_pays_for_the_time_of_their_places() {
    assert_eq!(order_beside(end_late), [0, 6, 7, 8, 9, 10, 11, 1]);
}

#[test]
fn a_client_that_does_not_read_pays_when_its_place_is_free() {
    let order = order_beside(|client| {
        client.computes(60_000);
        client.check(client.host.now.plus_ms(5_000));
    });
    assert_eq!(order, [0, 6, 7, 8, 9, 10, 11, 1]);
}

/// Lets the client read a computed reply of this many bytes 4.9 s after its headers.
fn read_late(client: &mut QueuedClient, bytes: usize) {
    client.computes(bytes);
    client.host.now = client.host.now.plus_ms(4_900);
    let flow = client.driver.response_body(&mut client.host, bytes, true);
    assert_eq!(flow, FilterStatus::Go);
}

#[test]
fn a_client_that_reads_late_pays_for_the_time_of_its_place() {
    let order = order_beside(|client| read_late(client, 60_000));
    assert_eq!(order, [0, 6, 7, 8, 9, 10, 11, 1]);
    let order = order_beside(|client| read_late(client, 12 << 20));
    assert!(
        order[..4].contains(&1),
        "it had no place after its headers: {order:?}"
    );
}

#[test]
fn a_flow_pays_for_the_place_of_a_stream_that_pauses() {
    let order = order_beside(|QueuedClient { host, driver, .. }| {
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: 200,
            upstream_address: Some(b"10.0.0.0:8000"),
            attempts: 1,
            content_type: Some(b"text/event-stream"),
            ..ResponseHead::default()
        };
        assert_eq!(driver.response_headers(host, &head), FilterStatus::Go);
        host.now = host.now.plus_ms(4_900);
        assert_eq!(driver.response_body(host, 100, true), FilterStatus::Go);
    });
    assert_eq!(order, [0, 6, 7, 8, 9, 10, 11, 1]);
}

/// The way in which a client treats a reply of 12 MiB.
#[derive(Clone, Copy, Debug)]
enum LongReply {
    /// The client reads the reply 4.8 s after the headers.
    ReadLate,
    /// The same, with a reply of unknown length.
    ChunkedReadLate,
    /// The same, with a stream.
    StreamReadLate,
    /// The client reads nothing of its connection, so the headers arrive only when it reads, after
    /// 4.8 s.
    HeadersReadLate,
    /// The client never reads the reply, keeps the stream, and sends its next request after 4.9 s.
    Kept,
}

impl LongReply {
    /// The time from the request to the headers.
    fn headers_ms(self) -> u64 {
        match self {
            Self::HeadersReadLate => 4_800,
            _ => 10,
        }
    }
}

/// One of several loops of a client. A loop sends its next request after its last one.
struct ClientLoop {
    /// `None` for a client that reads at once a reply that takes 300 ms.
    reply: Option<LongReply>,
    client: QueuedClient,
    /// When the engine began with the request, and whether it has sent the headers.
    sent: Option<(Timestamp, bool)>,
}

impl AsMut<QueuedClient> for ClientLoop {
    fn as_mut(&mut self) -> &mut QueuedClient {
        &mut self.client
    }
}

impl ClientLoop {
    fn begins(pool: &Rc<RefCell<ManagedPool>>, reply: Option<LongReply>, now: Timestamp) -> Self {
        let address: &[u8] = match reply {
            Some(_) => b"10.9.9.9",
            None => b"10.9.9.2",
        };
        Self {
            reply,
            client: QueuedClient::sends_from(pool, address, now),
            sent: None,
        }
    }

    /// Does what is due at this time. Returns the status of a request that has ended for its loop.
    fn step(&mut self, now: Timestamp) -> Option<u16> {
        let client = &mut self.client;
        client.host.now = now;
        if client.driver.is_answered() {
            return Some(429);
        }
        if self.sent.is_none() && client.driver.is_routed() {
            self.sent = Some((now, false));
        }
        let (since, has_headers) = self.sent.as_mut()?;
        let ms = now.ms_since(*since);
        match self.reply {
            None if ms >= 300 => {
                let address = client.endpoint();
                client.host.answer(&mut client.driver, &address);
                Some(200)
            }
            Some(reply) if ms >= reply.headers_ms() && !std::mem::replace(has_headers, true) => {
                match reply {
                    LongReply::ChunkedReadLate => client.answers(b"application/json", None),
                    LongReply::StreamReadLate => client.answers(b"text/event-stream", None),
                    _ => client.computes(12 << 20),
                }
                None
            }
            Some(LongReply::Kept) => (ms >= 4_900).then_some(200),
            Some(_) if ms >= 4_800 => {
                let _ = client.driver.response_body(&mut client.host, 1, true);
                Some(200)
            }
            _ => None,
        }
    }
}

/// Twelve loops of a client send requests of 300 ms to two endpoints with four places each, for
/// 45 s. After 10 s, sixteen loops of another client begin, which ask for long replies. Returns how
/// many of the first client's requests then get 200, and how many 429.
fn replies_beside(reply: Option<LongReply>) -> [usize; 2] {
    let pool = pool_of(2, 4.0, &[("ttlMs", 5_000.0)]);
    let at = |ms| Timestamp(0).plus_ms(ms);
    let mut loops: Vec<ClientLoop> = (0..12)
        .map(|_| ClientLoop::begins(&pool, None, at(0)))
        .collect();
    let mut kept = Vec::new();
    let mut counts = [0; 2];
    for ms in (10..45_000).step_by(10) {
        let now = at(ms);
        let is_attacked = ms >= 10_000;
        if is_attacked && reply.is_some() && loops.len() < 28 && ms % 50 == 0 {
            loops.push(ClientLoop::begins(&pool, reply, now));
        }
        let mut ended = Vec::new();
        for place in 0..loops.len() {
            let one = &mut loops[place];
            let Some(status) = one.step(now) else {
                continue;
            };
            if one.reply.is_none() && is_attacked {
                counts[usize::from(status == 429)] += 1;
            }
            ended.push(place);
            release(&pool, &mut loops, now);
        }
        // The next requests of these loops come after the room was given to others.
        for place in ended {
            let next = ClientLoop::begins(&pool, loops[place].reply, now);
            kept.push(std::mem::replace(&mut loops[place], next).client);
        }
        if ms % 100 == 0 {
            pool.borrow_mut().tick(now);
        }
        if ms % 1_000 == 0 {
            let running = loops.iter_mut().map(|one| &mut one.client);
            running
                .chain(&mut kept)
                .for_each(|client| client.check(now));
            kept.retain(|client| client.driver.is_routed());
        }
        release(&pool, &mut loops, now);
    }
    counts
}

#[test]
fn requests_beside_a_client_that_reads_late_or_never_keep_their_places() {
    let [alone, refused] = replies_beside(None);
    assert!(alone > 800 && refused == 0, "{alone}, {refused}");
    for reply in [LongReply::ReadLate, LongReply::Kept] {
        let [served, refused] = replies_beside(Some(reply));
        assert_eq!(refused, 0);
        assert!(served * 10 >= alone * 9, "{served} of {alone}");
    }
}

/// Checks how far the picker is from the bounds above where it does not know in time that a reply
/// waits for its client. A request without headers may wait for its engine, so it costs nothing
/// more.
#[test]
fn replies_that_may_wait_for_their_engine_leave_others_at_least_some_places() {
    let [alone, _] = replies_beside(None);
    for (reply, part) in [
        (LongReply::ChunkedReadLate, 4),
        (LongReply::StreamReadLate, 4),
        (LongReply::HeadersReadLate, 25),
    ] {
        let [served, refused] = replies_beside(Some(reply));
        assert!(
            served * part >= alone,
            "{reply:?}: {served} of {alone}, {refused} refused"
        );
    }
}

#[test]
fn a_client_does_not_pay_for_a_reply_that_its_engine_breaks_off() {
    let order = order_beside(|client| {
        client.host.broke_off = true;
        end_late(client);
    });
    assert!(order[..4].contains(&1), "they take turns: {order:?}");
}

#[test]
fn a_client_that_leaves_while_held_costs_nothing_more() {
    let pool = pool(&[]);
    let mut clients: Vec<QueuedClient> = ["batch", "batch"]
        .map(|objective| QueuedClient::sends(&pool, objective))
        .into();
    let QueuedClient { host, driver, .. } = &mut clients[1];
    driver.end(host);
    assert_eq!(
        (pool.borrow().queues().queued(), host.log.as_slice()),
        (0, &["hold".to_owned()][..])
    );
    let QueuedClient { host, driver, .. } = &mut clients[0];
    host.answer(driver, "10.0.0.0:8000");
    release(&pool, &mut clients, Timestamp(0).plus_ms(9));
    assert_eq!(clients[1].host.log, ["hold"], "it is never sent");
}

#[test]
fn a_request_that_waits_too_long_or_over_the_limit_is_refused_with_its_reason() {
    let pool = pool(&[("ttlMs", 50.0), ("maxRequests", 1.0)]);
    let mut clients: Vec<QueuedClient> = ["batch", "batch", "batch", "chat"]
        .map(|objective| QueuedClient::sends(&pool, objective))
        .into();
    let refused = |client: &QueuedClient| client.host.log.last().cloned().unwrap_or_default();
    assert!(
        refused(&clients[2]).starts_with("reply 429 rejected-saturated, retry after "),
        "{:?}",
        clients[2].host.log
    );
    release(&pool, &mut clients, Timestamp(0).plus_ms(9));
    assert!(
        refused(&clients[1]).starts_with("reply 429 rejected-saturated"),
        "chat took its place: {:?}",
        clients[1].host.log
    );
    let now = Timestamp(0).plus_ms(60);
    pool.borrow_mut().tick(now);
    release(&pool, &mut clients, now);
    assert!(
        refused(&clients[3]).starts_with("reply 429 rejected-ttl-expired"),
        "{:?}",
        clients[3].host.log
    );
    clients
        .iter_mut()
        .for_each(|QueuedClient { host, driver, .. }| driver.end(host));
    let pool = pool.borrow();
    assert!(pool.queues().is_empty() && pool.in_flight().rows().next().is_none());
}

#[test]
fn a_request_may_shorten_its_wait_and_not_prolong_it() {
    let pool = pool(&[("ttlMs", 50.0)]);
    let ttl = |ms| QueuedClient::sends_with(&pool, "batch", &[(b"x-queue-ttl-ms", ms)]);
    let mut clients = [
        QueuedClient::sends(&pool, "batch"),
        ttl(b"20"),
        ttl(b"5000"),
        ttl(b"soon"),
    ];
    let expired = |clients: &[QueuedClient]| {
        clients
            .iter()
            .map(|client| {
                client
                    .host
                    .log
                    .last()
                    .is_some_and(|last| last.contains("429 rejected-ttl-expired"))
            })
            .collect::<Vec<_>>()
    };
    for (ms, expected) in [
        (10, [false, false, false, false]),
        (30, [false, true, false, false]),
        (60, [false, true, true, true]),
    ] {
        let now = Timestamp(0).plus_ms(ms);
        pool.borrow_mut().tick(now);
        release(&pool, &mut clients, now);
        assert_eq!(expired(&clients), expected, "after {ms} ms");
    }
}

#[test]
fn the_operator_finds_a_held_request_by_its_id() {
    let pool = pool(&[]);
    let _clients = [
        QueuedClient::sends(&pool, "batch"),
        QueuedClient::sends_with(&pool, "batch", &[(b"x-request-id", b"find-me")]),
    ];
    pool.borrow_mut().tick(Timestamp(0).plus_ms(41));
    let shown = exchange::record::running(&pool.borrow());
    assert_eq!(
        shown,
        r#"[{"held":"find-me","priority":-10,"ms":40,"slot":0,"generation":1}]"#
    );
}

#[test]
fn the_client_may_ask_why_a_request_was_held_and_how_long() {
    let pool = pool(&[]);
    let explained =
        || QueuedClient::sends_with(&pool, "batch", &[(b"x-switchpoint-explain", b"1")]);
    let mut clients = [explained(), explained()];
    let oldest = |ms| {
        pool.borrow_mut().tick(Timestamp(0).plus_ms(ms));
        let pool = pool.borrow();
        pool.queues()
            .counters()
            .find_map(|band| band.oldest)
            .map(|oldest| (oldest.ms, oldest.full_at.is_some()))
    };
    assert_eq!(oldest(41), Some((40, true)), "the operator sees it, too");
    let now = Timestamp(0).plus_ms(100);
    let answer = |at: usize, clients: &mut [QueuedClient]| {
        let QueuedClient { host, driver, .. } = &mut clients[at];
        host.answer(driver, "10.0.0.0:8000");
        release(&pool, clients, now);
        clients[at].host.reasons.clone().unwrap()
    };
    assert!(
        !answer(0, &mut clients).contains("\"held\""),
        "it went at once"
    );
    let reasons = answer(1, &mut clients);
    assert!(
        reasons.contains(r#""held":{"ms":99,"priority":-10,"full":"10.0.0.0:8000"}"#),
        "{reasons}"
    );
    assert_eq!(oldest(200), None);
}

#[test]
fn the_limit_of_bytes_counts_the_memory_that_the_proxy_keeps() {
    let limit = CHAT.len() as f64 + 100.0;
    let pool = pool(&[("maxBytes", limit)]);
    let clients = ["batch", "batch"].map(|objective| QueuedClient::sends(&pool, objective));
    let last = clients[1].host.log.last().unwrap();
    assert!(
        last.starts_with("reply 429 rejected-saturated"),
        "a body of {} bytes is within {limit}: {last}",
        CHAT.len()
    );
}

#[test]
fn a_request_that_waited_too_long_is_refused_without_a_decision() {
    let pool = pool(&[]);
    let asks: [(&[u8], &[u8]); 2] = [(b"x-queue-ttl-ms", b"20"), (b"x-switchpoint-explain", b"1")];
    let mut clients = vec![
        QueuedClient::sends(&pool, "chat"),
        QueuedClient::sends_with(&pool, "chat", &asks),
    ];
    assert!(clients[1].is_queued());
    let now = Timestamp(0).plus_ms(60);
    pool.borrow_mut().tick(now);
    release(&pool, &mut clients, now);
    let last = clients[1].host.log.last().unwrap();
    assert!(last.starts_with("reply 429 rejected-ttl-expired"), "{last}");
    assert!(
        !last.contains("\"picked\":[\""),
        "it names an endpoint: {last}"
    );
}
