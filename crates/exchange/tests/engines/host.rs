//! A proxy with several workers and engines in virtual time, with the real exchange, the real
//! scheduler, and the daemon's learner.
//!
//! ```text
//!  clients ─► a worker picks ─► engine ─► first token, others, end ─► that worker
//!                │   reports and placements, after SHARED_AFTER         │ observations
//!                ▼                                                      ▼
//!          other workers ◄── learned models, every LEARN_EVERY ──── learner
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use learning::StepLearner;
use pool_state::{LoadReportHead, OwnLoadReport, PeerLoadReport, Placement};
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, Pipeline, PipelineSpec, Readiness, Rng,
    Slot, Snapshot, Version,
};

use crate::engine::{EngineApi, EngineBehaviour, EngineServer, MS, ReportedMetrics};

/// The delay after which the other workers receive a worker's state.
const SHARED_AFTER: u64 = MS / 2;
/// The interval at which the daemon publishes what it learned.
const LEARN_EVERY: u64 = 1_000 * MS;
const SCRAPE_EVERY: u64 = 200 * MS;
/// The number of tokens of a reply.
const TOKENS: usize = 16;
/// The number of bytes that count as a token.
const TOKEN_BYTES: usize = 4;

/// The requests of one client, which it sends one after another.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScriptClient {
    /// The start of the first request, in ns from now.
    pub(crate) begins: u64,
    /// The pause from the end of a request to the start of the next request, in ns.
    pub(crate) pause: u64,
    pub(crate) prompts: VecDeque<String>,
}

/// The pick for a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostPick {
    pub(crate) server: usize,
    pub(crate) at: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum HostEvent {
    Send { client: usize },
    Token { flight: usize },
    Tell { worker: usize },
    Learn,
    Scrape,
}

struct HostWorker {
    pool: ManagedPool,
    row: OwnLoadReport,
    /// The load reports of the other workers.
    peers: Vec<PeerLoadReport>,
    changes: u64,
    telling: bool,
    placements: Vec<Placement>,
}

struct HostRequest {
    client: usize,
    worker: usize,
    server: usize,
    exchange: Exchange,
    next: u64,
    prompt_tokens: usize,
    tokens: usize,
}

/// Future events, in order of time, then in the order in which they were added.
#[derive(Default)]
struct HostAgenda {
    events: BinaryHeap<Reverse<(u64, u64, HostEvent)>>,
    planned: u64,
}

// === impl HostAgenda ===

impl HostAgenda {
    fn plan(&mut self, at: u64, event: HostEvent) {
        self.planned += 1;
        self.events.push(Reverse((at, self.planned, event)));
    }
}

pub(crate) struct EnginesHost {
    engine: EngineBehaviour,
    workers: Vec<HostWorker>,
    servers: Vec<EngineServer>,
    running: Vec<usize>,
    learner: StepLearner,
    rng: Rng,
    now: u64,
    agenda: HostAgenda,
    flights: Vec<Option<HostRequest>>,
    clients: Vec<ScriptClient>,
    picked: Vec<HostPick>,
    sequence: u64,
}

impl EnginesHost {
    pub(crate) fn new(engine: EngineBehaviour, workers: usize, servers: usize, seed: u64) -> Self {
        let worker = |at: usize| HostWorker {
            pool: ManagedPool::new(seed * 100 + at as u64, 1 << 15),
            row: OwnLoadReport::default(),
            peers: (0..workers).map(|_| PeerLoadReport::default()).collect(),
            changes: 0,
            telling: false,
            placements: Vec::new(),
        };
        let mut host = Self {
            engine,
            workers: (0..workers).map(worker).collect(),
            servers: Vec::new(),
            running: Vec::new(),
            learner: StepLearner::default(),
            rng: Rng::seeded(seed ^ 0x5eed),
            now: 1_000 * MS,
            agenda: HostAgenda::default(),
            flights: Vec::new(),
            clients: Vec::new(),
            picked: Vec::new(),
            sequence: 1,
        };
        host.grow(servers);
        for worker in &mut host.workers {
            worker.pool.set_placement_publishing(workers > 1);
            worker.pool.install_models(host.learner.model(), None);
        }
        host
    }

    /// Grows the pool to `servers` servers.
    pub(crate) fn grow(&mut self, servers: usize) {
        let before = self.servers.len();
        self.servers.resize(servers, EngineServer::default());
        self.running.resize(servers, 0);
        self.sequence += 1;
        for worker in &mut self.workers {
            let age_ms = |at: usize| {
                if at < before || before == 0 {
                    60_000
                } else {
                    0
                }
            };
            worker
                .pool
                .install(snapshot(servers, self.sequence, age_ms), 7, 1_000);
            let HostWorker { pool, peers, .. } = worker;
            pool.recount_load_reports(peers.iter());
        }
        self.scrape();
    }

    /// Runs the clients to their end, and returns the picks in order.
    pub(crate) fn play(&mut self, clients: Vec<ScriptClient>) -> Vec<HostPick> {
        self.agenda.events.clear();
        for (client, at) in clients
            .iter()
            .map(|client| client.begins)
            .enumerate()
            .filter(|(at, _)| !clients[*at].prompts.is_empty())
        {
            self.plan(self.now + at, HostEvent::Send { client });
        }
        let mut left: usize = clients.iter().map(|client| client.prompts.len()).sum();
        self.clients = clients;
        self.flights = Vec::new();
        self.picked = Vec::new();
        self.plan(self.now + LEARN_EVERY, HostEvent::Learn);
        self.plan(self.now, HostEvent::Scrape);
        while left > 0 {
            let Reverse((at, _, event)) = self.agenda.events.pop().expect("requests under way end");
            self.now = at;
            match event {
                HostEvent::Send { client } => self.send(client),
                HostEvent::Token { flight } => left -= usize::from(self.token(flight)),
                HostEvent::Tell { worker } => self.tell(worker),
                HostEvent::Learn => {
                    self.learn();
                    self.plan(self.now + LEARN_EVERY, HostEvent::Learn);
                }
                HostEvent::Scrape => {
                    self.scrape();
                    self.plan(self.now + SCRAPE_EVERY, HostEvent::Scrape);
                }
            }
        }
        // Publish the remaining changes, and let a second without requests pass.
        (0..self.workers.len()).for_each(|worker| self.tell(worker));
        self.now += LEARN_EVERY;
        self.learn();
        self.scrape();
        std::mem::take(&mut self.picked)
    }

    fn plan(&mut self, at: u64, event: HostEvent) {
        self.agenda.plan(at, event);
    }

    fn send(&mut self, client: usize) {
        let prompt = self.clients[client].prompts.pop_front().unwrap();
        let worker = self.rng.below(self.workers.len());
        let settings = ExchangeSettings::default();
        let now = Timestamp(self.now);
        let api = self.engine.api;
        let mut exchange = Exchange::new(now);
        let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", api.path())];
        let pool = &mut self.workers[worker].pool;
        let body = api.body(&prompt);
        exchange.request_headers(&settings, pairs, false);
        let read: &[u8] = if api == EngineApi::Rerank {
            b""
        } else {
            body.as_bytes()
        };
        let ExchangeStep::Forward(forward) = exchange.decide(&settings, pool, None, read, now)
        else {
            panic!("not routed")
        };
        let first = forward.set[0].1.split(',').next().unwrap().to_owned();
        let server = pool
            .snapshot()
            .unwrap()
            .endpoints()
            .iter()
            .position(|endpoint| *endpoint.address == *first)
            .unwrap();
        let prompt_tokens = body.len() / TOKEN_BYTES;
        let (at, next) = self.engine.answers(
            &mut self.servers[server],
            self.now,
            prompt_tokens,
            &mut self.rng,
        );
        self.running[server] += 1;
        self.picked.push(HostPick {
            server,
            at: self.now,
        });
        self.flights.push(Some(HostRequest {
            client,
            worker,
            server,
            exchange,
            next,
            prompt_tokens,
            tokens: 0,
        }));
        self.plan(
            at,
            HostEvent::Token {
                flight: self.flights.len() - 1,
            },
        );
        self.changed(worker);
    }

    /// Handles a token of a request. Returns whether this token was the last of the request.
    fn token(&mut self, at: usize) -> bool {
        let Some(mut flight) = self.flights[at].take() else {
            return false;
        };
        let pool = &mut self.workers[flight.worker].pool;
        let now = Timestamp(self.now);
        let streamed = self.engine.api == EngineApi::Chat;
        if flight.tokens == 0 {
            let address = address(flight.server);
            let head = ResponseHead {
                origin: ResponseOrigin::Upstream,
                status: 200,
                upstream_address: Some(address.as_bytes()),
                attempts: 1,
                content_type: Some(if streamed {
                    b"text/event-stream"
                } else {
                    b"application/json"
                }),
                ..ResponseHead::default()
            };
            flight.exchange.response_headers(pool, &head, now);
        }
        let rest = if streamed && flight.next > 0 {
            1
        } else {
            TOKENS
        };
        let mut text = String::new();
        if streamed {
            text.extend(
                (0..rest).map(|_| "data: {\"choices\":[{\"delta\":{\"content\":\"word \"}}]}\n\n"),
            );
        } else {
            text.push_str(r#"{"object":"list","data":[]"#);
        }
        flight.tokens += rest;
        let last = flight.tokens >= TOKENS;
        if last {
            let usage = format!(
                r#""usage":{{"prompt_tokens":{},"completion_tokens":{TOKENS}}}"#,
                flight.prompt_tokens
            );
            match (streamed, self.engine.usage) {
                (true, true) => text.push_str(&format!(
                    "data: {{\"choices\":[],{usage}}}\n\ndata: [DONE]\n\n"
                )),
                (true, false) => text.push_str("data: [DONE]\n\n"),
                (false, true) => text.push_str(&format!(",{usage}}}")),
                (false, false) => text.push('}'),
            }
        }
        flight
            .exchange
            .response_chunk(pool, text.as_bytes(), last, now);
        if !last {
            self.plan(self.now + flight.next, HostEvent::Token { flight: at });
            self.changed(flight.worker);
            self.flights[at] = Some(flight);
            return false;
        }
        flight.exchange.end(pool, now);
        let (_, observed) = pool.take_observations();
        for observed in observed {
            let pool_state::EncodedObservation { observation, .. } = observed;
            observation.first_token.map(|sample| {
                self.learner
                    .first_token(observation.endpoint, &sample, observation.queued())
            });
            observation
                .gap
                .map(|sample| self.learner.gap(observation.endpoint, &sample));
            observation
                .output_tokens
                .into_iter()
                .for_each(|tokens| self.learner.ended(observation.endpoint, tokens));
        }
        self.running[flight.server] -= 1;
        self.changed(flight.worker);
        let client = &self.clients[flight.client];
        if !client.prompts.is_empty() {
            self.plan(
                self.now + client.pause,
                HostEvent::Send {
                    client: flight.client,
                },
            );
        }
        true
    }

    /// If the worker's state has changed, schedules the event that sends this state to the other
    /// workers.
    fn changed(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        worker.placements.extend(worker.pool.take_placements());
        let changes = worker.pool.changes();
        if std::mem::replace(&mut worker.changes, changes) != changes
            && !std::mem::replace(&mut worker.telling, true)
        {
            self.plan(self.now + SHARED_AFTER, HostEvent::Tell { worker: at });
        }
    }

    fn tell(&mut self, from: usize) {
        let HostWorker {
            pool,
            row,
            telling,
            placements,
            ..
        } = &mut self.workers[from];
        *telling = false;
        let bytes = pool
            .write_load_report(row, LoadReportHead::default())
            .to_vec();
        let placements = std::mem::take(placements);
        for (_, other) in self
            .workers
            .iter_mut()
            .enumerate()
            .filter(|(at, _)| *at != from)
        {
            other
                .pool
                .read_load_report(&mut other.peers[from], bytes.clone(), true);
            for placement in &placements {
                other.pool.record_peer_placement(
                    placement.kind,
                    placement.endpoint,
                    &placement.blocks,
                    Timestamp(self.now),
                );
            }
        }
    }

    fn learn(&mut self) {
        self.learner.advance(self.now / MS);
        for worker in &mut self.workers {
            worker.pool.install_models(self.learner.model(), None);
        }
    }

    fn scrape(&mut self) {
        let metrics = |at: usize| match self.engine.metrics {
            ReportedMetrics::Missing => EndpointMetrics::default(),
            ReportedMetrics::Live => says(self.running[at] as f32, 0.1),
            // The metrics of the first server froze when it was full, and the metrics of the other
            // servers at other loads.
            ReportedMetrics::Frozen => {
                says(at as f32, if at == 0 { 1.0 } else { 0.1 * (at % 8) as f32 })
            }
        };
        let metrics: Vec<EndpointMetrics> = (0..self.servers.len()).map(metrics).collect();
        self.sequence += 1;
        for worker in &mut self.workers {
            let version = Version {
                term: 1,
                sequence: self.sequence,
            };
            let measured = worker
                .pool
                .snapshot()
                .unwrap()
                .with_metrics(version, metrics.clone())
                .unwrap();
            worker.pool.refresh(measured, Timestamp(self.now));
        }
    }
}

fn says(running: f32, kv_cache_utilization: f32) -> EndpointMetrics {
    EndpointMetrics {
        queue_depth: Some(0.0),
        running_requests: Some(running),
        kv_cache_utilization: Some(kv_cache_utilization),
        kv_block_tokens: Some(16),
        kv_blocks: Some(20_000),
        ..EndpointMetrics::default()
    }
}

fn address(server: usize) -> String {
    format!("10.0.0.{server}:8000")
}

fn snapshot(servers: usize, sequence: u64, age_ms: impl Fn(usize) -> u64) -> Snapshot {
    let endpoint = |at: usize| Endpoint {
        id: EndpointRef {
            slot: Slot(u16::try_from(at).unwrap()),
            generation: Generation(1),
        },
        name: format!("pod-{at}").into(),
        address: address(at).into(),
        readiness: Readiness::Ready,
        labels: Box::new([]),
        models: std::sync::Arc::default(),
        age_ms: age_ms(at),
    };
    let endpoints: Vec<Endpoint> = (0..servers).map(endpoint).collect();
    let metrics = vec![EndpointMetrics::default(); servers];
    Snapshot::try_new(
        Version { term: 1, sequence },
        endpoints,
        metrics,
        Pipeline::build(&PipelineSpec::default()).unwrap(),
    )
    .unwrap()
}
