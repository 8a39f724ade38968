//! What one decision costs: `cargo bench -p scheduler`, or built with `--target wasm32-wasip1` and run in any WASI host.
//!
//! Six scorers and max-score, metrics all different, a prompt of 100 blocks; nanoseconds a decision, the median of many rounds.
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

use scheduler::in_flight::InFlight;
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Explanation, Incarnation, Local, Pipeline, PipelineSpec, PluginSpec, Readiness, Request, Rng,
    Slot, Snapshot, SubsetHint, Version, schedule,
};

/// Decisions timed together: one alone is shorter than the clock is fine.
const BATCH: u32 = 200;
const ROUNDS: usize = 101;

const SCORERS: [&str; 6] = [
    "queue-scorer",
    "kv-cache-utilization-scorer",
    "running-requests-size-scorer",
    "active-request-scorer",
    "token-load-scorer",
    "prefix-cache-scorer",
];

fn main() -> Result<(), String> {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{:>9} {:>8} {:>8} {:>8} {:>8}", "endpoints", "plain", "weighted", "subset", "explain");
    for endpoints in [8, 64, 100, 512] {
        let plain = Pool::new(endpoints, "max-score-picker")?;
        let weighted = Pool::new(endpoints, "weighted-random-picker")?;
        let row = [plain.cost_ns(false, false), weighted.cost_ns(false, false), plain.cost_ns(true, false), plain.cost_ns(false, true)];
        let _ = writeln!(out, "{endpoints:>9} {:>8} {:>8} {:>8} {:>8}", row[0], row[1], row[2], row[3]);
    }
    Ok(())
}

struct Pool {
    snapshot: Snapshot,
    in_flight: InFlight,
    matched_blocks: Vec<u32>,
    hint: SubsetHint,
}

impl Pool {
    fn new(size: u16, picker: &str) -> Result<Self, String> {
        let mut rng = Rng::seeded(1);
        let endpoints: Vec<Endpoint> = (0..size).map(endpoint).collect();
        let metrics = (0..size).map(|_| metrics(&mut rng)).collect();
        let mut in_flight = InFlight::default();
        for endpoint in &endpoints {
            // Never released: the pool stays as it is.
            (0..rng.below(8)).for_each(|_| drop(in_flight.admit(endpoint.id, 1_000)));
        }
        let hint = SubsetHint::parse(endpoints.iter().step_by(2).map(|endpoint| &*endpoint.address));
        let plugins = SCORERS.into_iter().chain([picker]).map(|plugin_type| (PluginSpec::of_type(plugin_type), 1.0)).collect();
        let pipeline = Pipeline::build(&PipelineSpec::of_one_profile("bench", plugins, 3)).map_err(|e| e.to_string())?;
        let snapshot = Snapshot::try_new(Version::default(), endpoints, metrics, pipeline).map_err(|e| e.to_string())?;
        let matched_blocks = (0..u32::from(size)).map(|at| at * 37 % 100).collect();
        Ok(Self { snapshot, in_flight, matched_blocks, hint })
    }

    /// Nanoseconds a decision, with half of the pool allowed by a hint or all of it, with reasons or without.
    fn cost_ns(&self, subset: bool, explain: bool) -> u128 {
        let blocks: Vec<u64> = (0..100).collect();
        let request = Request {
            model: "llama",
            subset: subset.then_some(&self.hint),
            prompt_tokens: 6_400,
            prefix_blocks: &blocks,
            prefix_block_tokens: 64,
            ..Request::default()
        };
        let local = Local {
            in_flight: &self.in_flight,
            matched_blocks: &self.matched_blocks,
            ejected: &[],
            last_cold_picks: &[],
            adapter_rooms: &[],
            metrics_stale: false,
        };
        let mut rng = Rng::seeded(2);
        let mut explanation = Explanation::default();
        let mut rounds: Vec<u128> = (0..ROUNDS)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..BATCH {
                    black_box(schedule(&self.snapshot, black_box(&request), local, &mut rng, explain.then_some(&mut explanation)));
                }
                start.elapsed().as_nanos() / u128::from(BATCH)
            })
            .collect();
        rounds.sort_unstable();
        rounds[ROUNDS / 2]
    }
}

fn endpoint(at: u16) -> Endpoint {
    Endpoint {
        id: EndpointRef { slot: Slot(at), incarnation: Incarnation(1) },
        name: format!("pod-{at}").into(),
        address: format!("10.0.{}.{}:8000", at / 250, at % 250 + 1).into(),
        readiness: Readiness::Ready,
        labels: Box::new([]),
        age_ms: 60_000,
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
