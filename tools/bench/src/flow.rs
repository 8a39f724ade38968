//! Measures flow control on a real Envoy: chat beside a wave of batch requests of two tenants. The
//! waves go through one worker, through four workers, and through two proxies of four workers. The
//! last run kills the daemon in the middle of the wave. [`cost`] measures the cost of flow control
//! for a request.
//!
//! The engines are simulated. They have a fifth of the speed of measured engines, so that the
//! engines, and not this machine, are the bottleneck.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use futures::future::try_join_all;
use serde::{Deserialize, Serialize};
use serde_json::json;
use testbed::fleet::{Fleet, FleetShape};
use testbed::model_server::ModelServerOptions;
use testbed::replay::{self, ReplayPlan, ReplayProgress, ReplayResult};
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::Stack;
use testbed::trace::Arrival;
use testbed::{Result, client};

use crate::stats::quantile;
use crate::write_result;

pub(crate) mod cost;
mod load;

use load::{CLASSES, TrafficClass};

/// The number of engines. Each engine simulates Llama 3.1 8B on one H100.
const SERVERS: usize = 2;

/// The time from the first chat to the begin of the wave.
const WAVE_BEGINS: Duration = Duration::from_secs(4);
const CHAT_AFTER: Duration = Duration::from_secs(4);
/// The time in the wave at which the measurement of shares begins. From then on, both tenants have
/// held requests.
const SHARES_AFTER: Duration = Duration::from_secs(8);

const SHAPES: [FleetShape; 3] = [
    FleetShape::ONE,
    FleetShape::FOUR_WORKERS,
    FleetShape {
        proxies: 2,
        workers: 4,
    },
];

const CONFIG: &str = "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: marginal-cost-scorer
- type: max-score-picker
flowControl:
  defaultRequestTTL: 280s
  priorityBands:
  - {priority: 10}
  - {priority: -10, maxRequests: 5000}
";

/// Sets the waves, the engines and the rounds to measure.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Args {
    /// Waves through each shape, each with arrivals of its own
    #[arg(long, default_value_t = 2)]
    rounds: u64,
    /// Seed of the first wave; the next waves have the next seeds
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds of a wave
    #[arg(long, default_value_t = 24)]
    wave: u64,
    /// Speed of the engines relative to measured ones
    #[arg(long, default_value_t = 0.2)]
    speed: f64,
    /// KV blocks of 16 tokens of each engine [default: what the GPU has]
    #[arg(long)]
    kv_blocks: Option<u32>,
    /// Measure only the waves, or only the cost of a request
    #[arg(long)]
    only: Option<FlowHalf>,
    /// Rounds that measure the cost of a request
    #[arg(long, default_value_t = 9)]
    cost_rounds: usize,
}

/// What `--only` measures: the waves, or the cost of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FlowHalf {
    Waves,
    Cost,
}

/// One row of `flow.json`: all waves through one shape.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct FlowRow {
    pub(crate) proxies: u32,
    pub(crate) workers: u32,
    pub(crate) daemon_killed: bool,
    pub(crate) requests: usize,
    pub(crate) failures: usize,
    /// The number of requests that flow control held.
    pub(crate) held: i64,
    /// The tokens/s that clients offer in the wave, divided by the tokens/s that the engines serve
    /// in the second part of the wave.
    pub(crate) load: f64,
    pub(crate) chat_p50_ms: f64,
    pub(crate) chat_p99_ms: f64,
    /// The tokens/s of each class in the second part of the wave.
    pub(crate) tokens_per_s: Vec<(String, f64)>,
    /// The share of the batch tokens that the tenant with the lower demand got.
    pub(crate) small_share: f64,
}

/// Measures, prints and writes `target/bench/flow.json` and `flow-cost.json`.
pub(crate) async fn bench(args: Args) -> Result<()> {
    if args.only != Some(FlowHalf::Cost) {
        waves(args).await?;
    }
    if args.only != Some(FlowHalf::Waves) {
        cost::bench(args.cost_rounds).await?;
    }
    Ok(())
}

async fn waves(args: Args) -> Result<()> {
    let mut runs: [Vec<WaveRun>; 4] = Default::default();
    for seed in args.seed..args.seed + args.rounds {
        for (at, shape) in SHAPES.into_iter().enumerate() {
            runs[at].push(WaveRun::start(shape, args, seed, false).await?);
        }
        runs[SHAPES.len()].push(WaveRun::start(SHAPES[2], args, seed, true).await?);
    }
    let shapes = SHAPES.into_iter().chain([SHAPES[2]]);
    let rows: Vec<FlowRow> = shapes
        .zip(&runs)
        .enumerate()
        .map(|(at, (shape, runs))| row(shape, at == SHAPES.len(), runs, args))
        .collect();
    println!("{}", table(&rows));
    write_result("flow", &rows)?;
    let failures: usize = rows.iter().map(|row| row.failures).sum();
    if failures > 0 {
        Err(format!("{failures} requests failed").into())
    } else {
        Ok(())
    }
}

/// The results of one wave through one shape.
struct WaveRun {
    /// The results by class, in the order of [`CLASSES`].
    classes: Vec<Vec<ReplayResult>>,
    held: i64,
}

// === impl WaveRun ===

impl WaveRun {
    async fn start(shape: FleetShape, args: Args, seed: u64, kills: bool) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut fleet = start(shape, args, folder.path()).await?;
        let wave = Duration::from_secs(args.wave);
        let addresses = fleet.addresses();
        let begun = Instant::now();
        let replays = CLASSES
            .iter()
            .map(|class| replay_class(class, addresses.clone(), class.arrivals(wave, seed), begun));
        let replays = tokio::spawn(try_join_all(replays.collect::<Vec<_>>()));
        if kills {
            tokio::time::sleep(WAVE_BEGINS + wave / 2).await;
            fleet.stack.daemon()?.process().kill()?;
        }
        let classes = replays.await??;
        let mut held = fleet
            .stack
            .envoy
            .picker_stat("switchpoint_held_total")
            .await?;
        for second in &fleet.seconds {
            held += second.envoy.picker_stat("switchpoint_held_total").await?;
        }
        let run = Self { classes, held };
        let word = if kills { ", daemon killed" } else { "" };
        println!(
            "{} x {}{word}, seed {seed}: {} requests, {} failed, {held} held, chat p99 {:.0} ms, longest {:.0?}, at most {:.0} ms late",
            shape.proxies,
            shape.workers,
            run.classes.iter().map(Vec::len).sum::<usize>(),
            run.failures(),
            quantile(&run.chat_ms(wave), 0.99),
            run.longest_chats(wave),
            run.classes
                .iter()
                .flatten()
                .map(|seen| ms(seen.late))
                .fold(0.0, f64::max),
        );
        Ok(run)
    }

    fn failures(&self) -> usize {
        self.classes
            .iter()
            .flatten()
            .filter(|seen| seen.status != 200 || seen.ttft.is_none())
            .count()
    }

    /// Returns the times to the first token of the chats that arrived during the wave, in ms.
    fn chat_ms(&self, wave: Duration) -> Vec<f64> {
        let in_wave = |seen: &&ReplayResult| (WAVE_BEGINS..WAVE_BEGINS + wave).contains(&seen.at);
        self.classes[0]
            .iter()
            .filter(in_wave)
            .filter_map(|seen| seen.ttft.map(ms))
            .collect()
    }

    /// Returns the five slowest chats that arrived during the wave: time of arrival in s, and time
    /// to the first token in ms.
    fn longest_chats(&self, wave: Duration) -> Vec<(f64, f64)> {
        let in_wave = |seen: &&ReplayResult| (WAVE_BEGINS..WAVE_BEGINS + wave).contains(&seen.at);
        let time = |seen: &ReplayResult| Some((seen.at.as_secs_f64(), ms(seen.ttft?)));
        let mut times: Vec<(f64, f64)> = self.classes[0]
            .iter()
            .filter(in_wave)
            .filter_map(time)
            .collect();
        times.sort_by(|a, b| b.1.total_cmp(&a.1));
        times.truncate(5);
        times
    }

    /// Returns the tokens/s of a class in the second part of the wave, in which all tenants have
    /// held requests. Counts the requests whose first token came in this part.
    fn tokens_per_s(&self, class: usize, wave: Duration) -> f64 {
        let part = WAVE_BEGINS + SHARES_AFTER..WAVE_BEGINS + wave;
        let began = |seen: &&ReplayResult| {
            seen.ttft
                .is_some_and(|ttft| part.contains(&(seen.at + seen.late + ttft)))
        };
        let count = self.classes[class].iter().filter(began).count();
        CLASSES[class].tokens() * count as f64 / (part.end - part.start).as_secs_f64()
    }
}

async fn start(shape: FleetShape, args: Args, folder: &Path) -> Result<Fleet> {
    let server = ModelServerOptions {
        models: vec![load::MODEL.into()],
        speed: args.speed,
        num_gpu_blocks: args.kv_blocks,
        ..ModelServerOptions::default()
    };
    let arguments = write_files(folder, CONFIG)?;
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let builder = Stack::builder()
        .servers_like(SERVERS, &server)
        .concurrency(shape.workers)
        .daemon_arguments(&arguments);
    let trusted = json!({"objective_header": "trust", "fairness_header": "trust"});
    let mut fleet = Fleet {
        stack: builder.picker(trusted).quiet().start().await?,
        seconds: Vec::new(),
    };
    for proxy in 1..shape.proxies {
        fleet.seconds.push(
            SecondEnvoy::start(&fleet.stack, &format!("proxy-{proxy}"), shape.workers).await?,
        );
    }
    // Each worker must have served a request before the waves, and the proxies must have found each
    // other.
    for address in fleet.addresses() {
        try_join_all((0..50 * shape.workers).map(|_| client::get(address, "/v1/models"))).await?;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    Ok(fleet)
}

/// Writes the objectives and a scheduling configuration. Returns the daemon's arguments that name
/// both files.
fn write_files(folder: &Path, config: &str) -> Result<Vec<String>> {
    let objective = |(name, priority): (&str, i32)| {
        json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": name},
               "spec": {"priority": priority, "poolRef": {"name": "default"}}})
        .to_string()
    };
    let objects = folder.join("objects.yaml");
    let file = folder.join("picker.yaml");
    std::fs::write(
        &objects,
        [("chat", 10), ("batch", -10)]
            .map(objective)
            .join("\n---\n"),
    )?;
    std::fs::write(&file, config)?;
    Ok(vec![
        "--objects".into(),
        objects.display().to_string(),
        "--config".into(),
        file.display().to_string(),
    ])
}

/// Sends the requests of a class, to each proxy in turn.
async fn replay_class(
    class: &'static TrafficClass,
    proxies: Vec<SocketAddr>,
    arrivals: Vec<Arrival>,
    begun: Instant,
) -> Result<Vec<ReplayResult>> {
    let progress = ReplayProgress::default();
    let replays = proxies.iter().enumerate().map(|(at, &target)| {
        let mine: Vec<Arrival> = arrivals
            .iter()
            .skip(at)
            .step_by(proxies.len())
            .cloned()
            .collect();
        let plan = ReplayPlan {
            target,
            model: load::MODEL.into(),
            headers: class.headers(),
            rate: 1.0,
        };
        let progress = &progress;
        async move { replay::run_observed(&plan, &mine, begun, progress).await }
    });
    try_join_all(replays).await?;
    Ok(progress.results())
}

fn row(shape: FleetShape, daemon_killed: bool, runs: &[WaveRun], args: Args) -> FlowRow {
    let wave = Duration::from_secs(args.wave);
    let chat: Vec<f64> = runs.iter().flat_map(|run| run.chat_ms(wave)).collect();
    let rate = |class| {
        runs.iter()
            .map(|run| run.tokens_per_s(class, wave))
            .sum::<f64>()
            / runs.len() as f64
    };
    let rates = [rate(0), rate(1), rate(2)];
    FlowRow {
        proxies: shape.proxies,
        workers: shape.workers,
        daemon_killed,
        requests: runs.iter().flat_map(|run| &run.classes).map(Vec::len).sum(),
        failures: runs.iter().map(WaveRun::failures).sum(),
        held: runs.iter().map(|run| run.held).sum(),
        load: CLASSES.iter().map(TrafficClass::offered).sum::<f64>() / rates.iter().sum::<f64>(),
        chat_p50_ms: quantile(&chat, 0.5),
        chat_p99_ms: quantile(&chat, 0.99),
        tokens_per_s: CLASSES
            .iter()
            .map(|class| class.name.to_owned())
            .zip(rates)
            .collect(),
        small_share: rates[2] / (rates[1] + rates[2]),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn table(rows: &[FlowRow]) -> Table {
    let mut table = Table::new();
    let head = [
        "proxies x workers",
        "requests",
        "failed",
        "held",
        "load",
        "chat TTFT p50, ms",
        "p99",
        "of 1 x 1",
    ];
    table.load_style(UTF8_FULL_CONDENSED).set_header(
        head.into_iter()
            .chain(CLASSES.iter().map(|class| class.name))
            .chain(["small's share"]),
    );
    for row in rows {
        let killed = if row.daemon_killed {
            ", daemon killed"
        } else {
            ""
        };
        let cells = [
            format!("{} x {}{killed}", row.proxies, row.workers),
            row.requests.to_string(),
            row.failures.to_string(),
            row.held.to_string(),
            format!("{:.2}", row.load),
            format!("{:.0}", row.chat_p50_ms),
            format!("{:.0}", row.chat_p99_ms),
            format!("{:.2}", row.chat_p99_ms / rows[0].chat_p99_ms),
        ];
        let rates = row
            .tokens_per_s
            .iter()
            .map(|(_, rate)| format!("{rate:.0} tokens/s"));
        table.add_row(
            cells
                .into_iter()
                .chain(rates)
                .chain([format!("{:.3}", row.small_share)]),
        );
    }
    table
}
