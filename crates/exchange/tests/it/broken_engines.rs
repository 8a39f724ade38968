//! One of four engines is broken and answers immediately, while the others take time to reply. The
//! broken engine must get almost no traffic, and must get traffic again when it is repaired. The
//! tests run in virtual time, with four workers that share state like the workers of one proxy.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, Refusal, RequestChanges, ResponseHead,
    ResponseOrigin, Timestamp, api::ApiFamily,
};
use scheduler::latency::step::StepModel;

use crate::release::pool_update;
use crate::sharing_workers::{self, SharingWorker};

const ENGINES: u8 = 4;
const WORKERS: usize = 4;
const CLIENTS: usize = 32;
const SEEDS: u64 = 20;
/// The duration of a reply of a healthy engine, in ms.
const REPLY_MS: u64 = 500;
/// The interval at which workers publish load reports, in ms.
const REPORT_MS: u64 = 2;
const BROKEN: &str = "10.0.0.0:8000";

/// The answer that a broken engine gives immediately.
#[derive(Clone, Copy, Debug)]
enum EngineFault {
    Status(u16),
    EmptyReply,
    ErrorInReply,
    Html,
    EmptyObject,
    CutAfterFirstToken,
    OnlyARole,
    Reset,
}

const FAULTS: [EngineFault; 11] = [
    EngineFault::Status(500),
    EngineFault::Status(404),
    EngineFault::Status(401),
    EngineFault::Status(502),
    EngineFault::EmptyReply,
    EngineFault::ErrorInReply,
    EngineFault::Html,
    EngineFault::EmptyObject,
    EngineFault::CutAfterFirstToken,
    EngineFault::OnlyARole,
    EngineFault::Reset,
];

const TOKEN: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const REPLY: &[u8] = br#"{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":500,"completion_tokens":20}}"#;

/// A request in flight.
struct BrokenEnginesRequest {
    worker: usize,
    client: usize,
    exchange: Exchange,
    to: String,
}

/// The pool, its workers and its clients at one moment.
struct BrokenEnginesWorld {
    workers: Vec<SharingWorker>,
    now_ms: u64,
    ends: BinaryHeap<Reverse<(u64, usize)>>,
    flights: Vec<Option<BrokenEnginesRequest>>,
    fault: Option<EngineFault>,
    sent: usize,
    /// The time at which each request was sent, in ms, and whether the broken engine got the
    /// request.
    log: Vec<(u64, bool)>,
}

fn at(ms: u64) -> Timestamp {
    Timestamp(0).plus_ms(ms)
}

// === impl BrokenEnginesWorld ===

impl BrokenEnginesWorld {
    fn new(seed: u64, fault: EngineFault) -> Self {
        let worker = |index: usize| {
            let mut pool = ManagedPool::new(seed * 100 + index as u64, 1 << 12);
            pool.install(pool_update(ENGINES, 1), 7, 1_000);
            pool.install_models(StepModel::default(), None);
            pool.recount_load_reports([]);
            SharingWorker::new(pool, WORKERS)
        };
        Self {
            workers: (0..WORKERS).map(worker).collect(),
            now_ms: 100,
            ends: BinaryHeap::new(),
            flights: Vec::new(),
            fault: Some(fault),
            sent: 0,
            log: Vec::new(),
        }
    }

    fn run_until(&mut self, end_ms: u64) {
        if self.sent == 0 {
            (0..CLIENTS).for_each(|client| self.send(client));
        }
        let mut reported_ms = 0;
        while let Some(&Reverse((due_ms, flight))) = self.ends.peek().filter(|due| due.0.0 < end_ms)
        {
            self.ends.pop();
            self.now_ms = due_ms;
            if due_ms >= reported_ms + REPORT_MS {
                reported_ms = due_ms;
                self.share_reports();
            }
            let client = self.answer(flight);
            self.send(client);
        }
        self.now_ms = end_ms;
    }

    /// Sends a client's next request. Half of the prompts are distinct; the others are one of four
    /// that repeat.
    fn send(&mut self, client: usize) {
        self.sent += 1;
        let prompt = if self.sent.is_multiple_of(2) {
            format!("prompt {}", self.sent)
        } else {
            format!("prompt of four: {}", client % 4)
        };
        let worker = client % WORKERS;
        let streamed = matches!(self.fault, Some(EngineFault::CutAfterFirstToken));
        let (exchange, to) = request(
            &mut self.workers[worker].pool,
            &prompt.repeat(30),
            streamed,
            at(self.now_ms),
        );
        let to = to.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"));
        let to = to.split(',').next().unwrap_or_default().to_owned();
        let is_broken = to == BROKEN && self.fault.is_some();
        self.log.push((self.now_ms, to == BROKEN));
        self.flights.push(Some(BrokenEnginesRequest {
            worker,
            client,
            exchange,
            to,
        }));
        let took_ms = if is_broken {
            1
        } else {
            REPLY_MS + (self.sent as u64 * 37) % 101
        };
        self.ends
            .push(Reverse((self.now_ms + took_ms, self.flights.len() - 1)));
    }

    fn answer(&mut self, flight: usize) -> usize {
        let BrokenEnginesRequest {
            worker,
            client,
            mut exchange,
            to,
        } = self.flights[flight].take().unwrap();
        let pool = &mut self.workers[worker].pool;
        let now = at(self.now_ms);
        match self.fault.filter(|_| to == BROKEN) {
            None => answer_well(&mut exchange, pool, &to, now),
            Some(fault) => answer_badly(&mut exchange, pool, &to, fault, now),
        }
        exchange.end(pool, now);
        client
    }

    fn share_reports(&mut self) {
        let now = at(self.now_ms);
        sharing_workers::share_reports(&mut self.workers, now);
    }

    /// Returns the broken engine's share of the requests that were sent since `ms`.
    fn share_since(&self, ms: u64) -> f64 {
        let since: Vec<bool> = self
            .log
            .iter()
            .filter(|(sent, _)| *sent >= ms)
            .map(|(_, broken)| *broken)
            .collect();
        since.iter().filter(|broken| **broken).count() as f64 / since.len().max(1) as f64
    }
}

/// Sends a request. Returns the endpoint that gets the request, or the status and drop reason of
/// the refusal.
fn request(
    pool: &mut ManagedPool,
    prompt: &str,
    streamed: bool,
    now: Timestamp,
) -> (Exchange, Result<String, (u16, String)>) {
    request_of("m", pool, prompt, streamed, now)
}

fn request_of(
    model: &str,
    pool: &mut ManagedPool,
    prompt: &str,
    streamed: bool,
    now: Timestamp,
) -> (Exchange, Result<String, (u16, String)>) {
    let settings = ExchangeSettings::default();
    let mut exchange = Exchange::new(now);
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/chat/completions")];
    exchange.request_headers(&settings, pairs, false);
    exchange.capture_headers(pool, pairs);
    let body = format!(
        r#"{{"model":"{model}","stream":{streamed},"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
    );
    let to = match exchange.decide(&settings, pool, None, body.as_bytes(), now) {
        ExchangeStep::Forward(forward) => Ok(destination(&forward)),
        ExchangeStep::Reply(reply) => Err((reply.status, String::from_utf8(reply.body).unwrap())),
        ExchangeStep::Park { .. } | ExchangeStep::Hold { .. } => {
            panic!("there is state, and no flow control")
        }
    };
    (exchange, to)
}

fn destination(forward: &RequestChanges) -> String {
    forward
        .set
        .iter()
        .find(|(name, _)| name == "x-gateway-destination-endpoint")
        .map(|(_, value)| value.clone())
        .unwrap()
}

fn header<'f>(forward: &'f RequestChanges, wanted: &str) -> &'f str {
    forward
        .set
        .iter()
        .find(|(name, _)| name == wanted)
        .map_or("", |(_, value)| value)
}

pub(crate) fn head(to: &str, status: u16) -> ResponseHead<'_> {
    ResponseHead {
        origin: ResponseOrigin::Upstream,
        status,
        upstream_address: Some(to.as_bytes()),
        attempts: 1,
        ..ResponseHead::default()
    }
}

pub(crate) fn answer_well(
    exchange: &mut Exchange,
    pool: &mut ManagedPool,
    to: &str,
    now: Timestamp,
) {
    exchange.response_headers(pool, &head(to, 200), now);
    exchange.response_chunk(pool, REPLY, true, now);
}

fn answer_badly(
    exchange: &mut Exchange,
    pool: &mut ManagedPool,
    to: &str,
    fault: EngineFault,
    now: Timestamp,
) {
    match fault {
        EngineFault::Status(status) => {
            exchange.response_headers(pool, &head(to, status), now);
            exchange.response_chunk(pool, br#"{"error":{"message":"no"}}"#, true, now);
        }
        EngineFault::EmptyReply => drop(exchange.response_headers(
            pool,
            &ResponseHead {
                end_of_stream: true,
                ..head(to, 200)
            },
            now,
        )),
        EngineFault::ErrorInReply => {
            exchange.response_headers(pool, &head(to, 200), now);
            exchange.response_chunk(
                pool,
                br#"{"error":{"message":"CUDA error","type":"InternalServerError","code":500}}"#,
                true,
                now,
            );
        }
        EngineFault::Html | EngineFault::EmptyObject => {
            let body: &[u8] = if matches!(fault, EngineFault::Html) {
                b"<html><h1>It works!</h1></html>"
            } else {
                b"{}"
            };
            exchange.response_headers(pool, &head(to, 200), now);
            exchange.response_chunk(pool, body, true, now);
        }
        EngineFault::OnlyARole => {
            let head = ResponseHead {
                content_type: Some(b"text/event-stream"),
                ..head(to, 200)
            };
            exchange.response_headers(pool, &head, now);
            exchange.response_chunk(
                pool,
                b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n",
                true,
                now,
            );
        }
        EngineFault::CutAfterFirstToken => {
            let head = ResponseHead {
                content_type: Some(b"text/event-stream"),
                ..head(to, 200)
            };
            exchange.response_headers(pool, &head, now);
            exchange.response_chunk(pool, TOKEN, false, now);
            assert!(exchange.is_open());
            exchange.record_cut_off();
        }
        EngineFault::Reset => {
            let head = ResponseHead {
                origin: ResponseOrigin::Lost,
                ..head(to, 503)
            };
            exchange.response_headers(pool, &head, now);
        }
    }
}

#[test]
fn a_broken_engine_gets_next_to_no_traffic_and_traffic_again_once_it_is_mended() {
    for fault in FAULTS {
        for seed in 0..SEEDS {
            let mut world = BrokenEnginesWorld::new(seed, fault);
            world.run_until(5_100);
            let share = world.share_since(1_100);
            assert!(
                share <= 0.02,
                "{fault:?}, seed {seed}: {:.1} % of the requests after the first second",
                share * 100.0
            );
            world.fault = None;
            world.run_until(15_600);
            let share = world.share_since(15_100);
            assert!(
                (0.1..0.4).contains(&share),
                "{fault:?}, seed {seed}: {:.1} % ten seconds after it was mended",
                share * 100.0
            );
        }
    }
}

/// Checks an engine that fails before any other engine answers. All clients begin at the same time,
/// so the broken engine fails several requests before any other engine has answered.
#[test]
fn an_engine_that_fails_before_any_other_answers_is_ejected_when_one_does() {
    let fault = EngineFault::Status(500);
    let mut pool = BrokenEnginesWorld::new(1, fault).workers.remove(0).pool;
    let mut sent = Vec::new();
    for n in 0..CLIENTS {
        let (exchange, to) = request(&mut pool, &format!("prompt {n}"), false, at(100));
        let to = to.unwrap().split(',').next().unwrap().to_owned();
        sent.push((exchange, to));
    }
    let (failing, working): (Vec<_>, Vec<_>) = sent.into_iter().partition(|(_, to)| to == BROKEN);
    for (mut exchange, to) in failing {
        answer_badly(&mut exchange, &mut pool, &to, fault, at(101));
        exchange.end(&mut pool, at(101));
    }
    assert!(pool.ejections().is_empty(), "no engine does better");
    // Further good answers after the first do not delay the probe.
    let mut until = None;
    for (now, (mut exchange, to)) in (600..603).map(at).zip(working) {
        answer_well(&mut exchange, &mut pool, &to, now);
        exchange.end(&mut pool, now);
        let ejected: Vec<_> = pool.ejections().iter().map(|row| row.until).collect();
        assert_eq!(ejected, [*until.get_or_insert(ejected[0])]);
    }
}

#[test]
fn a_wrong_model_name_ejects_no_endpoint() {
    let mut pool = BrokenEnginesWorld::new(1, EngineFault::Reset)
        .workers
        .remove(0)
        .pool;
    for n in 0..100_u64 {
        let now = at(100 + n * 50);
        let (mut exchange, to) = request(&mut pool, &format!("prompt {n}"), false, now);
        let to = to.unwrap().split(',').next().unwrap().to_owned();
        exchange.response_headers(&mut pool, &head(&to, 404), now);
        exchange.response_chunk(
            &mut pool,
            br#"{"error":{"message":"no such model","code":404}}"#,
            true,
            now,
        );
        assert_eq!(
            exchange.end(&mut pool, now).unwrap().verdict,
            pool_state::verdict::Verdict::Misdirected
        );
    }
    assert!(pool.ejections().is_empty(), "{:?}", pool.ejections());
}

/// Checks that a pool is used like any other, and prompts return, if all its servers echo, or leave
/// out the end mark of their streams.
#[test]
fn where_all_answers_are_strange_none_is_ejected_and_prompts_return() {
    for (content_type, body) in [
        (None, b"you said: hello".as_slice()),
        (Some(b"text/event-stream".as_slice()), TOKEN),
    ] {
        let mut pool = BrokenEnginesWorld::new(1, EngineFault::Reset)
            .workers
            .remove(0)
            .pool;
        let mut homes = std::collections::BTreeMap::new();
        for n in 0..60_u64 {
            let now = at(100 + n * 50);
            let (mut exchange, to) = request(
                &mut pool,
                &format!("conversation {} ", n % 6).repeat(400),
                content_type.is_some(),
                now,
            );
            let to = to.unwrap().split(',').next().unwrap().to_owned();
            exchange.response_headers(
                &mut pool,
                &ResponseHead {
                    content_type,
                    ..head(&to, 200)
                },
                now,
            );
            exchange.response_chunk(&mut pool, body, true, now);
            assert_eq!(
                exchange.end(&mut pool, now).unwrap().verdict,
                pool_state::verdict::Verdict::Strange
            );
            assert_eq!(
                *homes.entry(n % 6).or_insert_with(|| to.clone()),
                to,
                "prompt {n}"
            );
        }
        assert!(pool.ejections().is_empty(), "{:?}", pool.ejections());
    }
}

/// Checks a pool in which every engine echoes requests for one model and serves the other model.
#[test]
fn where_all_answers_of_one_model_are_strange_none_is_ejected_and_its_prompts_return() {
    let mut pool = BrokenEnginesWorld::new(1, EngineFault::Reset)
        .workers
        .remove(0)
        .pool;
    let mut homes = std::collections::BTreeMap::new();
    for n in 0..100_u64 {
        let now = at(100 + n * 50);
        let conversation = n / 2 % 6;
        let (model, prompt) = if n % 2 == 0 {
            ("echoed", format!("hello {conversation} ").repeat(400))
        } else {
            ("m", format!("prompt {n}"))
        };
        let (mut exchange, to) = request_of(model, &mut pool, &prompt, false, now);
        let to = to.unwrap().split(',').next().unwrap().to_owned();
        if n % 2 == 0 {
            answer_badly(&mut exchange, &mut pool, &to, EngineFault::Html, now);
            assert_eq!(
                *homes.entry(conversation).or_insert_with(|| to.clone()),
                to,
                "request {n}"
            );
        } else {
            answer_well(&mut exchange, &mut pool, &to, now);
        }
        exchange.end(&mut pool, now);
    }
    assert!(pool.ejections().is_empty(), "{:?}", pool.ejections());
}

#[test]
fn a_wave_of_bad_prompts_among_good_ones_ejects_no_endpoint() {
    for status in [500, 400] {
        let mut pool = BrokenEnginesWorld::new(1, EngineFault::Reset)
            .workers
            .remove(0)
            .pool;
        for n in 0..400_u64 {
            let now = at(100 + n * 10);
            let prompt = format!("prompt {n}").repeat(50);
            let (mut exchange, to) = request(&mut pool, &prompt, false, now);
            let to = to.unwrap().split(',').next().unwrap().to_owned();
            let fault = EngineFault::Status(status);
            match n % 5 {
                0 => answer_well(&mut exchange, &mut pool, &to, now),
                _ => answer_badly(&mut exchange, &mut pool, &to, fault, now),
            }
            exchange.end(&mut pool, now);
        }
        let ejections = pool.ejections();
        assert!(ejections.is_empty(), "{status}: {ejections:?}");
    }
}

/// Checks a pool with one client that sends one request a second. Each fifth of its prompts fails
/// at every engine. A probe reaches the client, so a broken engine must get few probes.
#[test]
fn a_broken_engine_gets_few_requests_of_a_quiet_pool_in_which_some_prompts_fail_everywhere() {
    for (seed, status) in [(1, 400), (2, 500), (3, 400), (4, 500)] {
        let fault = EngineFault::Status(500);
        let mut pool = BrokenEnginesWorld::new(seed, fault).workers.remove(0).pool;
        let mut to_broken = 0;
        for n in 0..360_u64 {
            let now = at(100 + n * 1_000);
            pool.tick(now);
            let prompt = format!("prompt {n}").repeat(30);
            let (mut exchange, to) = request(&mut pool, &prompt, false, now);
            let to = to.unwrap().split(',').next().unwrap().to_owned();
            let end = if to == BROKEN {
                to_broken += u64::from(n >= 60);
                answer_badly(&mut exchange, &mut pool, &to, fault, now.plus_ms(1));
                now.plus_ms(1)
            } else if n % 5 == 3 {
                let fault = EngineFault::Status(status);
                answer_badly(&mut exchange, &mut pool, &to, fault, now.plus_ms(1));
                now.plus_ms(1)
            } else {
                answer_well(&mut exchange, &mut pool, &to, now.plus_ms(REPLY_MS));
                now.plus_ms(REPLY_MS)
            };
            exchange.end(&mut pool, end);
        }
        assert!(
            to_broken <= 30,
            "seed {seed}, {status}: {to_broken} of 300 requests after the first minute"
        );
    }
}

/// Checks that streams are compared only with streams. One engine alone has streamed, without work,
/// while all engines accept other requests. No other engine has shown yet that the streams are
/// valid.
#[test]
fn streams_are_compared_only_with_streams() {
    let strange =
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let work = std::str::from_utf8(TOKEN).unwrap().to_owned() + strange;
    // Each list has all three endpoints, so the proxy may use every endpoint.
    let mut pool = ManagedPool::new(1, 1 << 12);
    pool.install(pool_update(3, 1), 7, 1_000);
    let mut n = 0;
    let mut send = |pool: &mut ManagedPool, by: Option<&str>, stream: Option<&str>| {
        n += 1;
        let now = at(100 + n * 50);
        let prompt = format!("prompt {n}");
        let (mut exchange, to) = request(pool, &prompt, stream.is_some(), now);
        let to = to.unwrap();
        let by = by.unwrap_or_else(|| to.split(',').next().unwrap());
        match stream {
            None => answer_well(&mut exchange, pool, by, now),
            Some(stream) => {
                let head = ResponseHead {
                    content_type: Some(b"text/event-stream"),
                    ..head(by, 200)
                };
                exchange.response_headers(pool, &head, now);
                exchange.response_chunk(pool, stream.as_bytes(), true, now);
            }
        }
        exchange.end(pool, now);
        !pool.ejections().is_empty()
    };
    for _ in 0..8 {
        send(&mut pool, None, None);
    }
    assert!(!(0..20).any(|_| send(&mut pool, Some(BROKEN), Some(strange))));
    send(&mut pool, Some("10.0.0.1:8000"), Some(&work));
    assert!((0..20).any(|_| send(&mut pool, Some(BROKEN), Some(strange))));
}

#[test]
fn a_prompt_that_crashes_two_engines_is_refused_and_others_are_not() {
    let mut pool = BrokenEnginesWorld::new(1, EngineFault::Reset)
        .workers
        .remove(0)
        .pool;
    let well = |pool: &mut ManagedPool, ms: u64, n: u64| {
        let (mut exchange, to) = request(pool, &format!("fine {n}").repeat(50), false, at(ms));
        let to = to.unwrap().split(',').next().unwrap().to_owned();
        answer_well(&mut exchange, pool, &to, at(ms + 1));
        exchange.end(pool, at(ms + 1));
    };
    (0..40).for_each(|n| well(&mut pool, 1_000 + n * 10, n));
    let (mut exchange, to) = request(&mut pool, &"poison".repeat(50), false, at(1_500));
    let to = to.unwrap();
    let second = to.split(',').nth(1).unwrap();
    let lost = ResponseHead {
        origin: ResponseOrigin::Lost,
        attempts: 2,
        ..head(second, 503)
    };
    exchange.response_headers(&mut pool, &lost, at(1_510));
    exchange.end(&mut pool, at(1_510));

    let (_, refused) = request(&mut pool, &"poison".repeat(50), false, at(2_000));
    let (status, body) = refused.unwrap_err();
    assert_eq!(status, 502);
    assert_eq!(
        body.as_bytes(),
        Refusal::CrashingPrompt.reply(ApiFamily::OpenAi).body
    );
    assert_eq!(pool.counters().dropped(), [("rejected-crashing-prompt", 1)]);
    well(&mut pool, 2_100, 99);
    assert!(
        request(&mut pool, &"poison".repeat(50), false, at(62_000))
            .1
            .is_ok(),
        "a minute later the prompt may be tried again"
    );
}

/// Checks ejections on a path that is no inference. Such a path is retried only if there was no
/// connection, but its last attempt may lose a connection as well.
#[test]
fn only_a_refused_connection_ejects_at_once_on_a_path_that_is_no_inference() {
    for (origin, ejected) in [
        (ResponseOrigin::Lost, 0),
        (ResponseOrigin::TimedOut, 0),
        (ResponseOrigin::Proxy, 1),
    ] {
        let mut pool = BrokenEnginesWorld::new(1, EngineFault::Reset)
            .workers
            .remove(0)
            .pool;
        for n in 0..40 {
            let now = at(200 + n);
            let prompt = format!("prompt {n}").repeat(50);
            let (mut exchange, to) = request(&mut pool, &prompt, false, now);
            let to = to.unwrap().split(',').next().unwrap().to_owned();
            answer_well(&mut exchange, &mut pool, &to, now);
            exchange.end(&mut pool, now);
        }
        let settings = ExchangeSettings::default();
        let mut exchange = Exchange::new(at(300));
        let pairs: [(&[u8], &[u8]); 2] =
            [(b":method", b"POST"), (b":path", b"/v1/load_lora_adapter")];
        exchange.request_headers(&settings, pairs, false);
        exchange.capture_headers(&pool, pairs);
        let ExchangeStep::Forward(forward) =
            exchange.decide(&settings, &mut pool, None, b"{}", at(300))
        else {
            panic!("not routed")
        };
        let list = destination(&forward);
        let head = ResponseHead {
            origin,
            ..head(list.split(',').next().unwrap(), 503)
        };
        exchange.response_headers(&mut pool, &head, at(301));
        exchange.end(&mut pool, at(301));
        assert_eq!(pool.ejections().len(), ejected, "{origin:?}");
    }
}

#[test]
fn a_lost_connection_is_tried_once_more_where_the_second_answered() {
    let mut pool = BrokenEnginesWorld::new(1, EngineFault::Reset)
        .workers
        .remove(0)
        .pool;
    let retries = |pool: &mut ManagedPool, path: &str, body: &str, ms: u64| {
        let settings = ExchangeSettings::default();
        let mut exchange = Exchange::new(at(ms));
        let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", path.as_bytes())];
        exchange.request_headers(&settings, pairs, false);
        exchange.capture_headers(pool, pairs);
        let ExchangeStep::Forward(forward) =
            exchange.decide(&settings, pool, None, body.as_bytes(), at(ms))
        else {
            panic!("not routed")
        };
        exchange.end(pool, at(ms));
        format!(
            "{} {}",
            header(&forward, "x-envoy-max-retries"),
            header(&forward, "x-envoy-retry-on")
        )
    };
    let chat = "/v1/chat/completions";
    let other = "/v1/load_lora_adapter";
    let asking = |more: &str| {
        format!(r#"{{"model":"m",{more}"messages":[{{"role":"user","content":"hi"}}]}}"#)
    };
    let all = "connect-failure,reset,retriable-status-codes";
    assert_eq!(
        retries(&mut pool, chat, &asking(""), 100),
        format!("2 {all}"),
        "no endpoint has answered yet"
    );
    for slot in 0..u64::from(ENGINES) * 4 {
        let (mut exchange, to) = request(
            &mut pool,
            &format!("prompt {slot}").repeat(50),
            false,
            at(200 + slot),
        );
        let to = to.unwrap().split(',').next().unwrap().to_owned();
        answer_well(&mut exchange, &mut pool, &to, at(200 + slot));
        exchange.end(&mut pool, at(200 + slot));
    }
    // An engine that reports far too many tokens makes every reply look as long as an hour.
    let usual = StepModel::default();
    let misled = StepModel::from_parts(usual.prefill(), usual.decode(), 266_436.0);
    pool.install_models(misled, None);
    for limit in ["", r#""max_tokens":20,"#] {
        assert_eq!(
            retries(&mut pool, chat, &asking(limit), 300),
            format!("1 {all}")
        );
    }
    assert_eq!(
        retries(&mut pool, chat, &asking(r#""max_tokens":100000,"#), 300),
        "2 connect-failure,retriable-status-codes",
        "minutes of work"
    );
    assert_eq!(
        retries(
            &mut pool,
            chat,
            &asking(r#""max_tokens":100000,"stream":true,"#),
            300
        ),
        format!("1 {all}"),
        "a stream loses its beginning"
    );
    assert_eq!(
        retries(&mut pool, other, "{}", 300),
        "2 connect-failure",
        "its effects must not be repeated"
    );
}
