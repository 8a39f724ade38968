//! Measures the cost of a whole exchange without a proxy, from the request's headers to the end of
//! the reply, natively and in wasm.
//!
//! ```text
//! cargo run --release -p exchange --example request_bench
//! cargo build --release -p exchange --example request_bench --target wasm32-wasip1
//! ```
//!
//! Run the built `.wasm` file with node or wasmtime.
//!
//! `cold` prompts were not sent to any endpoint before; `next turn` repeats them with 1 KB more.
//! Each figure is the median of single exchanges. The prefix index is as large as in a proxy and
//! filled, so most of it is not in a CPU cache. Absolute figures depend on the machine and are not
//! tested anywhere.
#![allow(clippy::print_stdout, clippy::disallowed_methods)] // it is a program that measures time and prints it

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, ManagedPool, ResponseHead, ResponseOrigin, Timestamp,
};
use pool_state::{LoadReportHead, OwnLoadReport, PlacementKind};
use scheduler::latency::step::StepModel;
use scheduler::prefix::ENTRIES_DEFAULT;
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, Pipeline, PipelineSpec, Readiness, Rng,
    SETTLED_MS, Slot, Snapshot, Version,
};

const REQUESTS: usize = 200;
const EVENTS: usize = 50_000;
const REPLY: &[u8] =
    br#"{"id":"1","choices":[{"message":{"content":"ok"}}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}"#;
const EVENT: &[u8] = b"data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1750000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n";

fn main() -> Result<(), String> {
    println!(
        "{:>9} {:>6} {:>9} {:>10} {:>9} {:>9} {:>9}",
        "endpoints", "KB", "prompt", "headers us", "decide us", "reply us", "all us"
    );
    for endpoints in [10, 100, 1_000] {
        let mut world = BenchWorld::new(endpoints)?;
        for kilobytes in [1, 10, 100, 220, 400] {
            let cold: Vec<String> = (0..REQUESTS)
                .map(|at| text(&mut world.rng, kilobytes * 1_000, at))
                .collect();
            world.row(endpoints, kilobytes, "cold", &cold);
            let next: Vec<String> = cold
                .iter()
                .map(|text| format!("{text}{}", "more ".repeat(200)))
                .collect();
            world.row(endpoints, kilobytes, "next turn", &next);
        }
    }
    let mut world = BenchWorld::new(100)?;
    let mut exchange = world.sent(&body("a short prompt", true));
    world.answered(&mut exchange, b"text/event-stream");
    let start = Instant::now();
    for _ in 0..EVENTS {
        world.now.0 += 1_000_000;
        black_box(exchange.response_chunk(&mut world.pool, black_box(EVENT), false, world.now));
    }
    println!(
        "\nan event of a stream: {:.0} ns",
        start.elapsed().as_nanos() as f64 / EVENTS as f64
    );
    Ok(())
}

struct BenchWorld {
    pool: ManagedPool,
    settings: ExchangeSettings,
    row: OwnLoadReport,
    rng: Rng,
    now: Timestamp,
}

impl BenchWorld {
    fn new(endpoints: u16) -> Result<Self, String> {
        let mut rng = Rng::seeded(1);
        let rows: Vec<Endpoint> = (0..endpoints).map(endpoint).collect();
        let metrics: Vec<EndpointMetrics> = rows.iter().map(|_| metrics(&mut rng)).collect();
        let pipeline = Pipeline::build(&PipelineSpec::default()).map_err(|e| e.to_string())?;
        let refs: Vec<EndpointRef> = rows.iter().map(|e| e.id).collect();
        let snapshot = Snapshot::try_new(
            Version {
                term: 1,
                sequence: 1,
            },
            rows,
            metrics.clone(),
            pipeline,
        )
        .map_err(|e| e.to_string())?;
        let mut pool = ManagedPool::new(1, ENTRIES_DEFAULT);
        let measured = snapshot
            .with_metrics(snapshot.version(), metrics)
            .map_err(|e| e.to_string())?;
        pool.install(snapshot, 7, u32::MAX);
        pool.refresh(measured, Timestamp(1));
        pool.install_models(StepModel::default(), None);
        pool.recount_load_reports([]);
        pool.set_placement_publishing(true);
        for at in 0..6_600 {
            let blocks: Vec<u64> = (0..100).map(|_| rng.next_u64() << 1).collect();
            pool.record_peer_placement(
                PlacementKind::Confirmed,
                refs[at % refs.len()],
                &blocks,
                Timestamp(1),
            );
        }
        Ok(Self {
            pool,
            settings: ExchangeSettings::default(),
            row: OwnLoadReport::default(),
            rng,
            now: Timestamp(1_000_000),
        })
    }

    fn row(&mut self, endpoints: u16, kilobytes: usize, name: &str, prompts: &[String]) {
        let mut times: [Vec<f64>; 3] = Default::default();
        for prompt in prompts {
            let body = body(prompt, false);
            let start = Instant::now();
            let mut exchange = self.asked();
            let asked = start.elapsed();
            self.decided(&mut exchange, &body);
            let decided = start.elapsed();
            self.answered(&mut exchange, b"application/json");
            exchange.response_chunk(&mut self.pool, REPLY, true, self.now);
            exchange.end(&mut self.pool, self.now);
            self.count_call();
            let all = start.elapsed();
            for (times, time) in times
                .iter_mut()
                .zip([asked, decided - asked, all - decided])
            {
                times.push(time.as_nanos() as f64 / 1_000.0);
            }
        }
        let [asked, decided, replied] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        println!(
            "{endpoints:>9} {kilobytes:>6} {name:>9} {asked:>10.2} {decided:>9.2} {replied:>9.2} {:>9.2}",
            asked + decided + replied
        );
    }

    fn asked(&mut self) -> Exchange {
        let pairs: [(&[u8], &[u8]); 4] = [
            (b":method", b"POST"),
            (b":path", b"/v1/chat/completions"),
            (b":authority", b"localhost"),
            (b"content-type", b"application/json"),
        ];
        self.now.0 += 1_000;
        let mut exchange = Exchange::new(self.now);
        exchange.request_headers(&self.settings, pairs, false);
        exchange.capture_headers(&self.pool, pairs);
        exchange
    }

    fn decided(&mut self, exchange: &mut Exchange, body: &str) {
        let step = exchange.decide(
            &self.settings,
            &mut self.pool,
            None,
            body.as_bytes(),
            self.now,
        );
        assert!(matches!(step, ExchangeStep::Forward(_)), "{step:?}");
        self.count_call();
    }

    fn sent(&mut self, body: &str) -> Exchange {
        let mut exchange = self.asked();
        self.decided(&mut exchange, body);
        exchange
    }

    fn answered(&mut self, exchange: &mut Exchange, content_type: &[u8]) {
        let head = ResponseHead {
            origin: ResponseOrigin::Upstream,
            status: 200,
            attempts: 1,
            content_type: Some(content_type),
            ..ResponseHead::default()
        };
        black_box(exchange.response_headers(&mut self.pool, &head, self.now));
    }

    fn count_call(&mut self) {
        black_box(self.pool.take_placements());
        black_box(
            self.pool
                .write_load_report(&mut self.row, LoadReportHead::default()),
        );
    }
}

fn body(prompt: &str, stream: bool) -> String {
    format!(
        r#"{{"model":"m","stream":{stream},"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
    )
}

/// Returns a text with a beginning that no other text has.
fn text(rng: &mut Rng, bytes: usize, at: usize) -> String {
    let mut text = format!("{at} ");
    while text.len() < bytes {
        let _ = write!(text, "{:016x} some words of it ", rng.next_u64());
    }
    text.truncate(bytes);
    text
}

fn endpoint(at: u16) -> Endpoint {
    Endpoint {
        id: EndpointRef {
            slot: Slot(at),
            generation: Generation(1),
        },
        name: format!("pod-{at}").into(),
        address: format!("10.0.{}.{}:8000", at / 250, at % 250 + 1).into(),
        readiness: Readiness::Ready,
        labels: Box::new([]),
        models: std::sync::Arc::default(),
        age_ms: SETTLED_MS,
    }
}

fn metrics(rng: &mut Rng) -> EndpointMetrics {
    EndpointMetrics {
        queue_depth: Some(rng.open01() * 20.0),
        running_requests: Some(rng.open01() * 64.0),
        kv_cache_utilization: Some(rng.open01()),
        ..EndpointMetrics::default()
    }
}
