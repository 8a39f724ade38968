//! Failures that are the fault of an engine, or of a client. One of several engines is broken in a
//! way that looks healthy, or one client sends requests that fail at every engine, or replies have
//! an unusual shape. The tests run in virtual time, with workers that share ejections like the
//! workers of one proxy.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use scheduler::latency::RequestEnd;
use scheduler::latency::step::StepModel;

use crate::release::pool_update;
use crate::sharing_workers::{self, SharingWorker};

const WORKERS: usize = 2;
const CLIENTS: usize = 32;
/// The duration of a reply of a healthy engine, in ms.
const REPLY_MS: u64 = 1_000;
/// The interval at which workers publish load reports, in ms.
const REPORT_MS: u64 = 2;
/// The time when the bad client begins, in ms. Requests of other clients have succeeded by then.
const BAD_FROM_MS: u64 = 7_000;
/// The interval between two requests of the bad client, in ms: 21 requests in a second.
const BAD_EVERY_MS: u64 = 48;
const BAD_A_SECOND: usize = 21;
const END_MS: u64 = 15_100;
/// The interval between two requests of an open flow, in ms.
const OPEN_EVERY_MS: u64 = 20;
/// The number of turns of a conversation.
const TURNS: usize = 10;

const CHAT: BlameApi = BlameApi::new("/v1/chat/completions", false);
const GENERATE: BlameApi = BlameApi::new("/generate", false);
const RESPONSES: BlameApi = BlameApi::new("/v1/responses", false);
const APIS: [BlameApi; 14] = [
    CHAT,
    BlameApi::new("/v1/chat/completions", true),
    BlameApi::new("/v1/completions", false),
    BlameApi::new("/v1/completions", true),
    GENERATE,
    BlameApi::new("/generate", true),
    BlameApi::new("/v1/messages", false),
    BlameApi::new("/v1/messages", true),
    RESPONSES,
    BlameApi::new("/v1/responses", true),
    BlameApi::new("/invocations", false),
    BlameApi::new("/invocations", true),
    BlameApi::new("/inference/v1/generate", false),
    BlameApi::new("/inference/v1/generate", true),
];

/// The kinds of bad clients: the status of each reply, and the prompts.
const BAD: [(u16, BadPrompts); 4] = [
    (400, BadPrompts::Shared),
    (500, BadPrompts::Distinct),
    (500, BadPrompts::Same),
    (200, BadPrompts::Distinct),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlameApi {
    path: &'static str,
    streamed: bool,
}

/// The answer that engine 0 gives immediately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlameFault {
    None,
    /// The engine answers 200 with a finish reason, and no token.
    NoWork,
    /// The engine answers all requests with this status.
    Refuses(u16),
    /// The engine answers every second prompt with this status.
    RefusesHalf(u16),
}

/// The requests of the bad client.
#[derive(Clone, Copy, Debug)]
struct BadClient {
    status: u16,
    key: BadKey,
    prompts: BadPrompts,
}

/// The credentials of a bad client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BadKey {
    None,
    Own,
    /// The client sends new credentials with each request. Engines that check no credentials accept
    /// them.
    Invented,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BadPrompts {
    Distinct,
    Same,
    /// The prompts are distinct, but begin like a conversation of another client.
    Shared,
    /// Each request continues a response that no engine knows.
    InventedId,
    /// Each request continues a conversation that no engine knows.
    InventedConversation,
    /// All requests continue one conversation, whose first request succeeds. Each second, nine
    /// distinct requests come at the same time. The other requests repeat one prompt.
    Aimed,
}

struct BlameFlight {
    worker: usize,
    /// The client of the request, or `None` for the bad client.
    client: Option<usize>,
    exchange: Exchange,
    to: usize,
    fails: bool,
}

/// Engines and clients. The struct has many fields, because each kind of test has a switch.
struct BlameWorld {
    api: BlameApi,
    /// Whether every second client sends arrays of prompts and gets arrays of replies.
    batches: bool,
    reply_ms: u64,
    keys: bool,
    /// Whether each client has a different address.
    addresses: bool,
    /// Whether a request comes every [`OPEN_EVERY_MS`], however many requests wait for their
    /// replies.
    is_open: bool,
    fault: BlameFault,
    bad: Option<BadClient>,
    workers: Vec<SharingWorker>,
    now_ms: u64,
    ends: BinaryHeap<Reverse<(u64, usize)>>,
    flights: Vec<Option<BlameFlight>>,
    turns: Vec<usize>,
    found: BlameFindings,
}

/// What happened after the first two seconds.
#[derive(Clone, Debug, Default)]
struct BlameFindings {
    sent: u64,
    to_first: u64,
    /// The number of turns that were not the first of their conversation.
    later: u64,
    returned: u64,
    home: Vec<usize>,
    /// The number of times that the workers exchanged reports.
    moments: u64,
    ejected: u64,
}

fn at(ms: u64) -> Timestamp {
    Timestamp(0).plus_ms(ms)
}

fn address(engine: usize) -> String {
    format!("10.0.0.{engine}:8000")
}

fn events(events: &[&str]) -> String {
    events
        .iter()
        .map(|event| format!("data: {event}\n\n"))
        .collect()
}

// === impl BlameApi ===

impl BlameApi {
    const fn new(path: &'static str, streamed: bool) -> Self {
        Self { path, streamed }
    }

    /// Returns the path whose bodies and replies have the same form.
    fn form(self) -> &'static str {
        match self.path {
            "/invocations" => CHAT.path,
            path => path,
        }
    }

    fn body(self, prompt: &str, more: &str) -> String {
        let streamed = self.streamed;
        let prompt = match self.form() {
            "/v1/chat/completions" | "/v1/messages" => {
                format!(r#""messages":[{{"role":"user","content":"{prompt}"}}]"#)
            }
            "/v1/completions" => format!(r#""prompt":"{prompt}""#),
            "/v1/responses" => format!(r#""input":"{prompt}""#),
            "/inference/v1/generate" => format!(r#""token_ids":{:?}"#, prompt.as_bytes()),
            _ => format!(r#""text":"{prompt}""#),
        };
        format!(r#"{{"model":"m","stream":{streamed},{more}{prompt}}}"#)
    }

    /// Returns a reply with two tokens, or with none.
    fn reply(self, works: bool) -> String {
        let (text, reason, tokens) = if works {
            ("hello", "stop", 2)
        } else {
            ("", "abort", 0)
        };
        let usage = format!(r#""usage":{{"prompt_tokens":300,"completion_tokens":{tokens}}}"#);
        let meta = format!(
            r#""meta_info":{{"finish_reason":{{"type":"{reason}"}},"prompt_tokens":300,"completion_tokens":{tokens}}}"#
        );
        match (self.form(), self.streamed) {
            ("/v1/chat/completions", false) => format!(
                r#"{{"id":"c","object":"chat.completion","model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"{reason}"}}],{usage}}}"#
            ),
            ("/v1/chat/completions", true) => format!(
                "data: {{\"choices\":[{{\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}}}}]}}\n\ndata: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":\"{reason}\"}}]}}\n\ndata: [DONE]\n\n"
            ),
            ("/v1/completions", false) => format!(
                r#"{{"id":"c","choices":[{{"text":"{text}","finish_reason":"{reason}"}}],{usage}}}"#
            ),
            ("/v1/completions", true) => {
                format!(
                    "data: {{\"choices\":[{{\"text\":\"{text}\",\"finish_reason\":\"{reason}\"}}]}}\n\ndata: {{\"choices\":[],{usage}}}\n\ndata: [DONE]\n\n"
                )
            }
            ("/generate", false) => format!(r#"{{"text":"{text}","output_ids":[],{meta}}}"#),
            ("/generate", true) => {
                format!("data: {{\"text\":\"{text}\",{meta}}}\n\ndata: [DONE]\n\n")
            }
            ("/inference/v1/generate", streamed) => {
                let ids = if works { "[7,8]" } else { "[]" };
                let reply =
                    format!(r#"{{"choices":[{{"token_ids":{ids},"finish_reason":"{reason}"}}]}}"#);
                if streamed {
                    format!("data: {reply}\n\ndata: [DONE]\n\n")
                } else {
                    reply
                }
            }
            ("/v1/messages", true) => events(&[
                // The engine writes this count before it generates.
                r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":300,"output_tokens":1}}}"#,
                r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
                &format!(
                    r#"{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":"{text}"}}}}"#
                ),
                &format!(
                    r#"{{"type":"message_delta","delta":{{"stop_reason":"end_turn"}},"usage":{{"output_tokens":{tokens}}}}}"#
                ),
                r#"{"type":"message_stop"}"#,
            ]),
            ("/v1/messages", false) => {
                let content = if works {
                    r#"{"type":"text","text":"hello"}"#
                } else {
                    ""
                };
                format!(
                    r#"{{"type":"message","content":[{content}],"stop_reason":"end_turn","usage":{{"input_tokens":300,"output_tokens":{tokens}}}}}"#
                )
            }
            (_, true) => events(&[
                r#"{"type":"response.created","response":{"status":"in_progress","output":[]}}"#,
                &format!(r#"{{"type":"response.output_text.delta","delta":"{text}"}}"#),
                &format!(
                    r#"{{"type":"response.completed","response":{{"usage":{{"input_tokens":300,"output_tokens":{tokens}}}}}}}"#
                ),
            ]),
            (_, false) => {
                let output = if works {
                    r#"{"type":"message","content":[{"type":"output_text","text":"hello"}]}"#
                } else {
                    ""
                };
                format!(
                    r#"{{"object":"response","status":"incomplete","output":[{output}],"usage":{{"input_tokens":300,"output_tokens":{tokens}}}}}"#
                )
            }
        }
    }
}

// === impl BlameWorld ===

impl BlameWorld {
    fn new(seed: u64, engines: u8) -> Self {
        let worker = |index: usize| {
            let mut pool = ManagedPool::new(seed * 100 + index as u64, 1 << 14);
            pool.install(pool_update(engines, 1), 7, 1_000);
            pool.install_models(StepModel::default(), None);
            pool.recount_load_reports([]);
            SharingWorker::new(pool, WORKERS)
        };
        Self {
            api: CHAT,
            batches: false,
            reply_ms: REPLY_MS,
            keys: false,
            addresses: false,
            is_open: false,
            fault: BlameFault::None,
            bad: None,
            workers: (0..WORKERS).map(worker).collect(),
            now_ms: 100,
            ends: BinaryHeap::new(),
            flights: Vec::new(),
            turns: vec![0; CLIENTS],
            found: BlameFindings {
                home: vec![usize::MAX; CLIENTS],
                ..BlameFindings::default()
            },
        }
    }

    /// Simulates until the end time, with `number` clients. Each client sends one request after
    /// another, or the clients take turns in an open flow.
    fn run(mut self, number: usize) -> BlameFindings {
        (0..number).for_each(|client| self.converse(client));
        let mut reported_ms = 0;
        let mut bad_ms = BAD_FROM_MS;
        let mut bad_sent = 0;
        let mut open_ms = self.now_ms;
        let mut open_sent = 0;
        while let Some(&Reverse((due_ms, flight))) = self.ends.peek().filter(|due| due.0.0 < END_MS)
        {
            if self.bad.is_some() && bad_ms <= due_ms {
                self.now_ms = bad_ms;
                self.misbehave(bad_sent);
                bad_ms += BAD_EVERY_MS;
                bad_sent += 1;
                continue;
            }
            if self.is_open && open_ms <= due_ms {
                self.now_ms = open_ms;
                self.converse(open_sent % number);
                open_ms += OPEN_EVERY_MS;
                open_sent += 1;
                continue;
            }
            self.ends.pop();
            self.now_ms = due_ms;
            if due_ms >= reported_ms + REPORT_MS {
                reported_ms = due_ms;
                self.share_reports();
            }
            if let Some(client) = self.answer(flight).filter(|_| !self.is_open) {
                self.converse(client);
            }
        }
        self.found
    }

    /// Sends the next turn of a client's conversation.
    fn converse(&mut self, client: usize) {
        let turn = self.turns[client];
        self.turns[client] += 1;
        let prompt = conversation(client, turn / TURNS, turn % TURNS);
        let key = if self.keys {
            format!("Bearer {client}")
        } else {
            String::new()
        };
        let body = self.api.body(&prompt, "");
        let body = if self.is_batch(client) {
            body.replace(r#""text":"#, r#""text":["a","#)
                .replace(r#""}"#, r#""]}"#)
        } else {
            body
        };
        let to = self.send(Some(client), &body, &key);
        let found = &mut self.found;
        if self.now_ms >= 2_000 {
            found.sent += 1;
            found.to_first += u64::from(to == 0);
            found.later += u64::from(!turn.is_multiple_of(TURNS));
            found.returned += u64::from(!turn.is_multiple_of(TURNS) && found.home[client] == to);
        }
        found.home[client] = to;
    }

    fn is_batch(&self, client: usize) -> bool {
        self.batches && client.is_multiple_of(2)
    }

    fn misbehave(&mut self, number: usize) {
        let Some(bad) = self.bad else { return };
        let again = BAD_A_SECOND * usize::from(bad.prompts == BadPrompts::Aimed);
        let at_once = match number.checked_rem(again) {
            Some(1) => 9,
            _ => 1,
        };
        (0..at_once).for_each(|nth| self.misbehave_once(bad, number, nth));
    }

    fn misbehave_once(&mut self, bad: BadClient, number: usize, nth: usize) {
        let prompt = match bad.prompts {
            BadPrompts::Aimed => {
                let which = if number % BAD_A_SECOND == 1 {
                    format!("{number} {nth}")
                } else {
                    "again".repeat(usize::from(number > 0))
                };
                "the same beginning ".repeat(60) + &which
            }
            BadPrompts::Same => "the same again ".repeat(40),
            BadPrompts::Shared => {
                conversation(0, self.turns[0].saturating_sub(1) / TURNS, 0)
                    + &format!("number {number}")
            }
            BadPrompts::Distinct | BadPrompts::InventedId | BadPrompts::InventedConversation => {
                format!("number {number} ").repeat(40)
            }
        };
        let more = match bad.prompts {
            BadPrompts::InventedId => r#""previous_response_id":"resp_1","#,
            BadPrompts::InventedConversation => r#""conversation":"conv_1","#,
            _ => "",
        };
        let key = match bad.key {
            BadKey::None => String::new(),
            BadKey::Own => "Bearer bad".to_owned(),
            BadKey::Invented => format!("Bearer bad {number}"),
        };
        self.send(None, &self.api.body(&prompt, more), &key);
    }

    fn send(&mut self, client: Option<usize>, body: &str, key: &str) -> usize {
        let worker = client.unwrap_or(self.flights.len()) % WORKERS;
        let settings = ExchangeSettings::default();
        let now = at(self.now_ms);
        let pool = &mut self.workers[worker].pool;
        let mut exchange = Exchange::new(now);
        let address = client
            .filter(|_| self.addresses)
            .map_or("10.1.0.0".to_owned(), |client| format!("10.2.0.{client}"));
        let pairs: [(&[u8], &[u8]); 4] = [
            (b":method", b"POST"),
            (b":path", self.api.path.as_bytes()),
            (b"authorization", key.as_bytes()),
            (b"x-forwarded-for", address.as_bytes()),
        ];
        exchange.request_headers(&settings, pairs, false);
        exchange.capture_headers(pool, pairs);
        let step = exchange.decide(&settings, pool, None, body.as_bytes(), now);
        let ExchangeStep::Forward(forward) = step else {
            panic!("not routed: {step:?}")
        };
        let list = &forward
            .set
            .iter()
            .find(|(name, _)| name == "x-gateway-destination-endpoint")
            .unwrap()
            .1;
        let first = list.split(',').next().unwrap();
        let to = first["10.0.0.".len()..]
            .split(':')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        let fails = match (client, self.fault) {
            (None, _) => !body.ends_with(r#"beginning "}]}"#),
            (Some(_), BlameFault::NoWork | BlameFault::Refuses(_)) => to == 0,
            (Some(client), BlameFault::RefusesHalf(_)) => {
                to == 0 && self.turns[client].is_multiple_of(2)
            }
            (Some(_), BlameFault::None) => false,
        };
        let took_ms = if fails {
            1
        } else {
            self.reply_ms + (self.flights.len() as u64 * 37) % 201
        };
        self.ends
            .push(Reverse((self.now_ms + took_ms, self.flights.len())));
        self.flights.push(Some(BlameFlight {
            worker,
            client,
            exchange,
            to,
            fails,
        }));
        to
    }

    /// Handles the reply to a request. Returns the client, unless it is the bad client.
    fn answer(&mut self, flight: usize) -> Option<usize> {
        let BlameFlight {
            worker,
            client,
            mut exchange,
            to,
            fails,
        } = self.flights[flight].take()?;
        let batches = self.batches;
        let pool = &mut self.workers[worker].pool;
        let now = at(self.now_ms);
        let address = address(to);
        let status = match (client, self.fault) {
            _ if !fails => 200,
            (None, _) => self.bad.map_or(200, |bad| bad.status),
            (Some(_), BlameFault::Refuses(status) | BlameFault::RefusesHalf(status)) => status,
            (Some(_), _) => 200,
        };
        let content_type: &[u8] = if self.api.streamed && status == 200 {
            b"text/event-stream"
        } else {
            b"application/json"
        };
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status,
            upstream_address: Some(address.as_bytes()),
            attempts: 1,
            content_type: Some(content_type),
            ..ResponseHead::default()
        };
        exchange.response_headers(pool, &head, now);
        let error = || r#"{"error":{"message":"no"}}"#.to_owned();
        let body = if status == 200 {
            self.api.reply(!fails)
        } else {
            error()
        };
        let body = if client.is_some_and(|client| batches && client.is_multiple_of(2)) {
            format!("[{body},{body}]")
        } else {
            body
        };
        exchange.response_chunk(pool, body.as_bytes(), true, now);
        exchange.end(pool, now);
        let (_, observed) = pool.take_observations();
        let is_learned = observed
            .iter()
            .any(|observed| observed.observation.ended == RequestEnd::Done);
        assert!(
            !fails || !is_learned,
            "learned from a reply without work: {observed:?}"
        );
        client
    }

    fn share_reports(&mut self) {
        let now = at(self.now_ms);
        sharing_workers::share_reports(&mut self.workers, now);
        self.found.moments += 1;
        self.found.ejected += self.workers[0]
            .pool
            .ejections()
            .iter()
            .filter(|row| row.failures > 0 && row.until > now)
            .count() as u64;
    }
}

// === impl BlameFindings ===

impl BlameFindings {
    fn to_first(&self) -> f64 {
        self.to_first as f64 / self.sent.max(1) as f64
    }

    fn ejected(&self) -> f64 {
        self.ejected as f64 / self.moments.max(1) as f64
    }

    fn returned(&self) -> f64 {
        self.returned as f64 / self.later.max(1) as f64
    }
}

fn conversation(client: usize, number: usize, turn: usize) -> String {
    format!("conversation {number} of client {client} ").repeat(60)
        + &"and so on ".repeat(turn * 10)
}

#[test]
fn an_engine_that_answers_200_without_work_gets_next_to_no_requests() {
    for api in APIS {
        for (seed, clients, keys) in [(1, 16, false), (2, 32, true)] {
            let mut world = BlameWorld::new(seed, 4);
            world.api = api;
            world.fault = BlameFault::NoWork;
            world.keys = keys;
            world.reply_ms = REPLY_MS / 2;
            let share = world.run(clients).to_first();
            assert!(
                share <= 0.02,
                "{api:?}, {clients} clients, keys {keys}: {:.1} %",
                share * 100.0
            );
        }
    }
}

#[test]
fn an_engine_that_refuses_what_others_accept_gets_next_to_no_requests() {
    for status in [400, 422, 404, 401] {
        for (seed, clients, keys) in [(1, 16, false), (2, 32, false), (3, 16, true), (4, 2, false)]
        {
            let mut world = BlameWorld::new(seed, 4);
            world.fault = BlameFault::Refuses(status);
            world.keys = keys;
            world.reply_ms = REPLY_MS / 2;
            let share = world.run(clients).to_first();
            assert!(
                share <= 0.02 || clients < 16,
                "{status}, {clients} clients, keys {keys}: {:.1} %",
                share * 100.0
            );
            assert!(
                share <= 0.20,
                "{status}, {clients} clients, keys {keys}: {:.1} %",
                share * 100.0
            );
        }
    }
}

#[test]
fn an_engine_that_answers_at_once_without_work_gets_next_to_no_requests_of_an_open_flow() {
    for api in APIS {
        for fault in [BlameFault::NoWork, BlameFault::Refuses(400)] {
            let mut world = BlameWorld::new(1, 4);
            world.api = api;
            world.fault = fault;
            world.is_open = true;
            world.reply_ms = REPLY_MS / 2;
            let share = world.run(CLIENTS).to_first();
            assert!(share <= 0.02, "{api:?}, {fault:?}: {:.1} %", share * 100.0);
        }
    }
}

#[test]
fn an_engine_that_refuses_half_of_what_others_accept_gets_few_requests() {
    for status in [400, 500] {
        let mut world = BlameWorld::new(1, 4);
        world.fault = BlameFault::RefusesHalf(status);
        let share = world.run(32).to_first();
        assert!(share <= 0.10, "{status}: {:.1} %", share * 100.0);
    }
}

#[test]
fn the_failures_of_one_client_eject_no_engine() {
    let mut bad = Vec::new();
    for (clients, reply_ms) in [(32, REPLY_MS), (8, REPLY_MS), (32, 5 * REPLY_MS)] {
        for (key, keys) in [
            (BadKey::Own, false),
            (BadKey::Own, true),
            (BadKey::None, false),
            (BadKey::Invented, true),
        ] {
            let quiet = || {
                let mut world = BlameWorld::new(1, 8);
                world.keys = keys;
                world.reply_ms = reply_ms;
                world
            };
            let returned = quiet().run(clients).returned();
            for (status, prompts) in BAD {
                let mut world = quiet();
                world.bad = Some(BadClient {
                    status,
                    key,
                    prompts,
                });
                let found = world.run(clients);
                let line = format!(
                    "{clients} clients, {reply_ms} ms, keys {keys}; {status} {prompts:?} key {key:?}: {:.2} ejected, {:.3} returned, without {returned:.3}",
                    found.ejected(),
                    found.returned()
                );
                println!("{line}");
                // Without a separate key, the bad client looks like the other clients, so its
                // failures affect them.
                let moved = if key == BadKey::Own { 0.05 } else { 0.25 };
                if found.ejected() > 0.0 || found.returned() < returned - moved {
                    bad.push(line);
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn the_aimed_failures_of_one_address_eject_no_engine() {
    let mut bad = Vec::new();
    for (clients, reply_ms) in [(32, REPLY_MS), (8, REPLY_MS), (32, 5 * REPLY_MS)] {
        let quiet = || {
            let mut world = BlameWorld::new(1, 8);
            world.addresses = true;
            world.reply_ms = reply_ms;
            world
        };
        let returned = quiet().run(clients).returned();
        for key in [BadKey::None, BadKey::Invented] {
            for prompts in [BadPrompts::Aimed, BadPrompts::Distinct, BadPrompts::Same] {
                let mut world = quiet();
                world.bad = Some(BadClient {
                    status: 500,
                    key,
                    prompts,
                });
                let found = world.run(clients);
                let line = format!(
                    "{clients} clients, {reply_ms} ms, {prompts:?} key {key:?}: {:.2} ejected, {:.3} returned, without {returned:.3}",
                    found.ejected(),
                    found.returned()
                );
                println!("{line}");
                if found.ejected() > 0.0 || found.returned() < returned - 0.05 {
                    bad.push(line);
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn a_broken_engine_is_found_whether_its_clients_have_addresses_or_not() {
    for addresses in [false, true] {
        for clients in [2, 3, 16] {
            let mut world = BlameWorld::new(1, 4);
            world.addresses = addresses;
            world.fault = BlameFault::Refuses(500);
            world.reply_ms = REPLY_MS / 2;
            let share = world.run(clients).to_first();
            let max = if clients < 16 { 0.20 } else { 0.02 };
            assert!(
                share <= max,
                "{clients} clients, addresses {addresses}: {:.1} %",
                share * 100.0
            );
        }
    }
}

#[test]
fn a_client_of_batches_keeps_the_engines_that_have_its_prompts() {
    let mut world = BlameWorld::new(1, 4);
    world.api = GENERATE;
    world.batches = true;
    let found = world.run(16);
    assert!(
        found.ejected() == 0.0 && found.returned() > 0.97,
        "{found:?}"
    );
}

#[test]
fn a_response_that_no_engine_knows_is_its_clients_fault() {
    for prompts in [BadPrompts::InventedId, BadPrompts::InventedConversation] {
        for status in [400, 404] {
            let mut world = BlameWorld::new(1, 8);
            world.api = RESPONSES;
            world.bad = Some(BadClient {
                status,
                key: BadKey::None,
                prompts,
            });
            let found = world.run(16);
            assert!(
                found.ejected() == 0.0 && found.returned() > 0.97,
                "{status} {prompts:?}: {found:?}"
            );
        }
    }
}
