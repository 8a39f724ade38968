//! Measures the cost of one decision. Run it natively with `cargo bench -p scheduler`, or build it
//! with `--target wasm32-wasip1` and run it in a WASI host. `both.py` does both.
//!
//! The first part measures whole decisions with six scorers and max-score-picker, where the metrics
//! of all endpoints are different and the prompt has 100 blocks. This part prints nanoseconds per
//! decision, as the median of many rounds. The second part measures single plugins: how many
//! nanoseconds per endpoint each plugin adds to a decision, in a pool of 100 endpoints. The last
//! part measures latency prediction: the nanoseconds to predict for all endpoints of a pool, and
//! the nanoseconds of a whole decision that uses predictions.
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

#[path = "../tests/it/parameters.rs"]
mod parameters;
#[path = "../tests/it/case/values.rs"]
mod values;

use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

use learning::LatencyLearner;
use scheduler::in_flight::InFlight;
use scheduler::latency::{Conditions, LatencyModel, Observation, RequestEnd};
use scheduler::registry::{PLUGINS, PluginKind};
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Explanation, Generation, LocalState, LoraMetrics,
    Pipeline, PipelineSpec, PluginSpec, Readiness, Request, Rng, Slot, Snapshot, SubsetHint,
    Version, schedule, session_token,
};

/// The number of decisions that are timed together, because one decision is shorter than the
/// resolution of the clock.
const BATCH: u32 = 200;
/// The number of predictions for a whole pool that are timed together. The number is small, because
/// a batch must be shorter than a time slice on a busy machine.
const PREDICTION_BATCH: u32 = 5;
const ROUNDS: usize = 101;

const SCORERS: [&str; 6] = [
    "queue-scorer",
    "kv-cache-utilization-scorer",
    "running-requests-size-scorer",
    "active-request-scorer",
    "token-load-scorer",
    "prefix-cache-scorer",
];

/// The number of endpoints in the pool in which single plugins are timed.
const ENDPOINTS: u16 = 100;

fn main() -> Result<(), String> {
    let mut out = std::io::stdout();
    let _ = writeln!(
        out,
        "{:>9} {:>8} {:>8} {:>8} {:>8}",
        "endpoints", "plain", "weighted", "subset", "explain"
    );
    for endpoints in [8, 64, 100, 512] {
        let plain = BenchPool::new(endpoints, "max-score-picker")?;
        let weighted = BenchPool::new(endpoints, "weighted-random-picker")?;
        let row = [
            plain.cost_ns(false, false),
            weighted.cost_ns(false, false),
            plain.cost_ns(true, false),
            plain.cost_ns(false, true),
        ];
        let _ = writeln!(
            out,
            "{endpoints:>9} {:>8} {:>8} {:>8} {:>8}",
            row[0], row[1], row[2], row[3]
        );
    }
    let _ = writeln!(out, "\n{:<32} {:>11}", "plugin", "ns/endpoint");
    let without = BenchPool::with(ENDPOINTS, vec![PluginSpec::of_type("random-picker")])?
        .cost_ns(false, false);
    for plugin in PLUGINS.iter().filter(|plugin| {
        matches!(
            plugin.kind,
            PluginKind::Filter | PluginKind::Detector | PluginKind::Scorer | PluginKind::Picker
        )
    }) {
        let spec = PluginSpec {
            parameters: values::parameters(&parameters::words(plugin.name)),
            ..PluginSpec::of_type(plugin.name)
        };
        let picker =
            (plugin.kind != PluginKind::Picker).then(|| PluginSpec::of_type("random-picker"));
        let with = BenchPool::with(ENDPOINTS, [spec].into_iter().chain(picker).collect())?
            .cost_ns(false, false);
        #[expect(clippy::cast_precision_loss, reason = "microseconds")]
        let cost = (with as f64
            - if plugin.kind == PluginKind::Picker {
                0.0
            } else {
                without as f64
            })
            / f64::from(ENDPOINTS);
        let _ = writeln!(out, "{:<32} {cost:>11.1}", plugin.name);
    }
    let model = learned();
    let trees = model.trees();
    let _ = writeln!(
        out,
        "\n{:<32} {:>11} {:>11} {:>11}",
        format!("prediction({}+{}_trees)", trees.0, trees.1),
        "predict_ns",
        "decide_ns",
        "bytes"
    );
    for endpoints in [100, 1_000] {
        let plugins = [
            "predicted-latency-producer",
            "latency-scorer",
            "max-score-picker",
        ];
        let pool = BenchPool::with(endpoints, plugins.map(PluginSpec::of_type).into())?
            .with_latency(model.clone());
        let predict = pool.predict_ns(&model);
        let decide = pool.cost_ns(false, false);
        let _ = writeln!(
            out,
            "{:<32} {predict:>11} {decide:>11} {:>11}",
            format!("{endpoints}_endpoints"),
            model.bytes()
        );
    }
    Ok(())
}

/// Returns a model with the maximum number of trees, which is learned from a pool that no sum of
/// terms describes.
fn learned() -> LatencyModel {
    let mut rng = Rng::seeded(3);
    let mut learner = LatencyLearner::default();
    for at in 0..4_000_u64 {
        let conditions = conditions(&mut rng);
        let odd = if conditions.requests > 20.0 && conditions.prompt_tokens < 4_000.0 {
            2.0
        } else {
            1.0
        };
        let odd = odd
            * if conditions.kv_utilization > Some(0.7) && conditions.context_tokens > 20_000.0 {
                1.7
            } else {
                1.0
            };
        let observation = Observation {
            endpoint: endpoint(u16::try_from(rng.below(100)).unwrap_or(0)).id,
            conditions,
            ended: RequestEnd::Done,
            ttft_ms: Some(odd * (20.0 + 0.05 * conditions.uncached_tokens)),
            tpot_ms: Some(odd * (9.0 + 0.2 * conditions.requests)),
            output_tokens: None,
            first_token: None,
            gap: None,
        };
        learner.observe(&observation, None);
        learner.publish(at * 50);
    }
    learner
        .model()
        .unwrap_or_else(|| LatencyModel::constant(100.0, 10.0))
}

fn conditions(rng: &mut Rng) -> Conditions {
    let requests = rng.open01() * 30.0;
    let prompt_tokens = rng.open01() * 8_000.0;
    Conditions {
        queued: Some(0.0),
        running: Some(requests),
        requests,
        prefill_tokens: rng.open01() * 5_000.0,
        context_tokens: rng.open01() * 40_000.0,
        kv_utilization: Some(rng.open01()),
        prompt_tokens,
        uncached_tokens: prompt_tokens * rng.open01(),
    }
}

struct BenchPool {
    snapshot: Snapshot,
    in_flight: InFlight,
    matched_blocks: Vec<u32>,
    hint: SubsetHint,
}

impl BenchPool {
    fn new(size: u16, picker: &str) -> Result<Self, String> {
        Self::with(
            size,
            SCORERS
                .into_iter()
                .chain([picker])
                .map(PluginSpec::of_type)
                .collect(),
        )
    }

    fn with(size: u16, plugins: Vec<PluginSpec>) -> Result<Self, String> {
        let mut rng = Rng::seeded(1);
        let endpoints: Vec<Endpoint> = (0..size).map(endpoint).collect();
        let metrics = (0..size).map(|_| metrics(&mut rng)).collect();
        let mut in_flight = InFlight::default();
        for endpoint in &endpoints {
            // The requests are never released, so the pool's load stays constant.
            (0..rng.below(8)).for_each(|_| drop(in_flight.admit(endpoint.id, 1_000)));
        }
        let hint = SubsetHint::parse(
            endpoints
                .iter()
                .step_by(2)
                .map(|endpoint| &*endpoint.address),
        );
        let plugins = plugins.into_iter().map(|plugin| (plugin, 1.0)).collect();
        let spec = PipelineSpec {
            latency_prediction: true,
            ..PipelineSpec::of_one_profile("bench", plugins, 3)
        };
        let pipeline = Pipeline::build(&spec).map_err(|e| e.to_string())?;
        let snapshot = Snapshot::try_new(Version::default(), endpoints, metrics, pipeline)
            .map_err(|e| e.to_string())?;
        let matched_blocks = (0..u32::from(size)).map(|at| at * 37 % 100).collect();
        Ok(Self {
            snapshot,
            in_flight,
            matched_blocks,
            hint,
        })
    }

    fn with_latency(self, model: LatencyModel) -> Self {
        Self {
            snapshot: self.snapshot.with_latency(Some(std::sync::Arc::new(model))),
            ..self
        }
    }

    /// Returns the nanoseconds that one prediction for all endpoints takes. The conditions are
    /// prepared before the measurement.
    fn predict_ns(&self, model: &LatencyModel) -> u128 {
        let mut rng = Rng::seeded(4);
        let rows: Vec<_> = self
            .snapshot
            .endpoints()
            .iter()
            .map(|endpoint| (endpoint.id, conditions(&mut rng)))
            .collect();
        let mut out = Vec::new();
        median_ns(PREDICTION_BATCH, || {
            model.predict_all(black_box(&rows).iter().copied(), &mut out);
        })
    }

    /// Returns the nanoseconds that one decision takes. If `subset` is true, a hint allows only
    /// half of the pool. If `explain` is true, the decision is explained.
    fn cost_ns(&self, subset: bool, explain: bool) -> u128 {
        let blocks = [0; 100];
        let token = session_token("pod-50");
        let headers = [("x-tier", "gold"), ("x-session-token", token.as_str())];
        let request = Request {
            model: "sql",
            headers: &headers,
            subset: subset.then_some(&self.hint),
            prompt_tokens: 6_400,
            prefix_blocks: &blocks,
            prefix_block_tokens: 64,
            ..Request::default()
        };
        let local = LocalState {
            matched_blocks: &self.matched_blocks,
            ..LocalState::new(&self.in_flight)
        };
        let batch = if self.snapshot.latency().is_some() {
            PREDICTION_BATCH
        } else {
            BATCH
        };
        let mut rng = Rng::seeded(2);
        let mut explanation = Explanation::default();
        median_ns(batch, || {
            black_box(schedule(
                &self.snapshot,
                black_box(&request),
                local,
                &mut rng,
                explain.then_some(&mut explanation),
            ));
        })
    }
}

/// Returns the nanoseconds that one call takes: the median over the rounds.
fn median_ns(batch: u32, mut call: impl FnMut()) -> u128 {
    let mut rounds: Vec<u128> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            (0..batch).for_each(|_| call());
            start.elapsed().as_nanos() / u128::from(batch)
        })
        .collect();
    rounds.sort_unstable();
    rounds[ROUNDS / 2]
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
        labels: Box::new([
            ("llm-d.ai/context-length-range".into(), "0-8192".into()),
            ("llm-d.ai/role".into(), "both".into()),
            ("tier".into(), "gold".into()),
        ]),
        models: std::sync::Arc::default(),
        age_ms: 60_000,
    }
}

fn metrics(rng: &mut Rng) -> EndpointMetrics {
    EndpointMetrics {
        queue_depth: Some(rng.open01() * 20.0),
        running_requests: Some(rng.open01() * 64.0),
        kv_cache_utilization: Some(rng.open01()),
        lora: Some(LoraMetrics {
            running: Box::new(["chat".into(), "sql".into()]),
            waiting: Box::new([]),
            max: 4,
            base_models: Box::new([]),
        }),
        attributes: Box::new([("depth".into(), rng.open01())]),
        ..EndpointMetrics::default()
    }
}
