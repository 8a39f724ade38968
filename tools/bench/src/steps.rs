//! Where CPU and latency go, for a request and for a streamed chunk: one Envoy has many listeners.
//! Each does one thing more than the listener before it, from plain Envoy to the filter and from
//! plain Envoy to ext_proc.
//!
//! Any picker that uses the same protocol pays for the steps before the last one. Only the last
//! step is the cost of this picker.

use std::net::SocketAddr;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use testbed::envoy::EnvoyConfig;
use testbed::front::{DaemonAndEnvoy, ExtraArgs};
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::{Result, root};

use crate::load::{LoadFigures, LoadRun};
use crate::overhead::write_bodies;
use crate::stats::{PairedDifference, median};
use crate::streams::{self, StreamRunFigures};
use crate::world::{
    ExtProcDaemon, add_ext_proc, add_shipped, addresses, listeners, wait_until_asked,
};
use crate::{Args, go_on, sink, write_result};

/// Compiled by `make bench` from `filter/examples/steps.rs`.
const MODULE: &str = "target/wasm32-wasip1/release/examples/steps.wasm";

const ENDPOINTS: usize = 100;

/// With one connection, the data that a step needs is no longer in the CPU caches when the next
/// request comes; with many it is.
const CONNECTIONS: [usize; 2] = [1, 16];

const BODIES: [usize; 2] = [10_000, 220_000];

/// The work of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FilterStep {
    Plain,
    Published,
    Retries,
    Wasm(&'static str),
    Filter,
    /// Calls an ext_proc server that decides nothing.
    GoesOn,
    ExtProc,
}

/// Steps, each with its description; each does one thing more than the one before it.
type StepLadder = &'static [(FilterStep, &'static str)];

const PLAIN: (FilterStep, &str) = (FilterStep::Plain, "plain Envoy");

const FILTER: StepLadder = &[
    PLAIN,
    (
        FilterStep::Published,
        "endpoint in a header, used by `override_host`",
    ),
    (FilterStep::Retries, "retries: Envoy keeps the request"),
    (FilterStep::Wasm("passes"), "empty wasm filter"),
    (FilterStep::Wasm("reads"), "body awaited and copied out"),
    (
        FilterStep::Wasm("speaks"),
        "all headers read, three set; three properties read",
    ),
    (FilterStep::Filter, "the picker"),
];

const EXT_PROC: StepLadder = &[
    PLAIN,
    (
        FilterStep::GoesOn,
        "ext_proc server that always answers the same",
    ),
    (FilterStep::ExtProc, "the picker"),
];

const CHUNKS: StepLadder = &[
    PLAIN,
    (FilterStep::Wasm("passes"), "empty wasm filter"),
    (FilterStep::Wasm("follows"), "pieces copied out"),
    (FilterStep::Filter, "the picker"),
];

/// One row of `steps.json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct StepRow {
    pub(crate) step: String,
    pub(crate) body_bytes: usize,
    pub(crate) connections: usize,
    /// CPU per request, of Envoy and of the daemon or ext_proc server.
    pub(crate) cpu_us: f64,
    /// Difference to the previous step.
    pub(crate) added_cpu_us: f64,
    pub(crate) iqr_us: f64,
    pub(crate) p50_us: f64,
    /// Difference to the previous step.
    pub(crate) added_p50_us: f64,
    pub(crate) iqr_p50_us: f64,
}

/// One row of `chunk-steps.json`: CPU per chunk, µs.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct ChunkRow {
    pub(crate) step: String,
    /// CPU of Envoy's workers, of the rest of Envoy, and of the daemon.
    pub(crate) cpu_us: [f64; 3],
    /// Difference of the workers' CPU to the previous step.
    pub(crate) added_us: f64,
    pub(crate) iqr_us: f64,
}

/// A listener for every step, and the processes behind them.
struct StepListeners {
    front: DaemonAndEnvoy,
    ext_proc_daemon: ExtProcDaemon,
    goes_on: ChildProcess,
    places: Vec<(FilterStep, ReservedPort)>,
    _servers: (ReservedPort, ChildProcess),
}

pub(crate) async fn bench(args: &Args) -> Result<()> {
    if !root().join(MODULE).exists() {
        return Err(format!("{MODULE} is missing: `make bench` compiles it").into());
    }
    let folder = tempfile::tempdir()?;
    let mut steps = StepListeners::start(args, folder.path()).await?;
    let mut rows = Vec::new();
    for ladder in [FILTER, EXT_PROC] {
        for (body_bytes, connections) in BODIES
            .into_iter()
            .flat_map(|bytes| CONNECTIONS.map(|connections| (bytes, connections)))
        {
            rows.extend(
                requests(
                    &mut steps,
                    args,
                    ladder,
                    (body_bytes, connections),
                    folder.path(),
                )
                .await?,
            );
        }
    }
    write_result("steps", &rows)?;
    let mut runs: Vec<Vec<StreamRunFigures>> = vec![Vec::new(); CHUNKS.len()];
    for round in 0..args.rounds {
        for turn in 0..CHUNKS.len() {
            let at = (round + turn) % CHUNKS.len();
            runs[at].push(
                streams::run(steps.address(CHUNKS[at].0), steps.processes(CHUNKS[at].0)).await?,
            );
        }
    }
    steps.front.stop().await?;
    steps.ext_proc_daemon.stop().await?;
    write_result("chunk-steps", &compare_chunks(&runs))
}

async fn requests(
    steps: &mut StepListeners,
    args: &Args,
    ladder: StepLadder,
    case: (usize, usize),
    folder: &Path,
) -> Result<Vec<StepRow>> {
    let (body_bytes, connections) = case;
    let bodies = write_bodies(body_bytes, false, folder)?;
    let mut runs: Vec<Vec<LoadFigures>> = vec![Vec::new(); ladder.len()];
    for round in 0..args.rounds {
        for turn in 0..ladder.len() {
            let at = (round + turn) % ladder.len();
            let target = steps.address(ladder[at].0);
            let processes = steps.processes(ladder[at].0);
            let load =
                LoadRun::closed_loop(target, bodies.clone(), connections, args.seconds, processes);
            runs[at].push(load.run(folder).await?);
        }
    }
    Ok(compare(ladder, case, &runs))
}

fn compare(
    ladder: StepLadder,
    (body_bytes, connections): (usize, usize),
    runs: &[Vec<LoadFigures>],
) -> Vec<StepRow> {
    let of = |figure: fn(&LoadFigures) -> f64, at: usize| {
        runs[at].iter().map(figure).collect::<Vec<f64>>()
    };
    let row = |at: usize| {
        let added =
            |figure| PairedDifference::of(&of(figure, at), &of(figure, at.saturating_sub(1)));
        let cpu = added(LoadFigures::sum_us);
        let p50 = added(|run| run.p50_us);
        StepRow {
            step: ladder[at].1.to_owned(),
            body_bytes,
            connections,
            cpu_us: median(&of(LoadFigures::sum_us, at)),
            added_cpu_us: cpu.median,
            iqr_us: cpu.iqr,
            p50_us: median(&of(|run| run.p50_us, at)),
            added_p50_us: p50.median,
            iqr_p50_us: p50.iqr,
        }
    };
    let rows: Vec<StepRow> = (0..ladder.len()).map(row).collect();
    for row in &rows {
        let StepRow {
            step,
            cpu_us,
            added_cpu_us,
            iqr_us,
            p50_us,
            added_p50_us,
            iqr_p50_us,
            ..
        } = row;
        println!(
            "{body_bytes:>7} B c={connections:<2} cpu {cpu_us:>6.1} + {added_cpu_us:.1} ({iqr_us:.1})  p50 {p50_us:>6.1} + {added_p50_us:.1} ({iqr_p50_us:.1})  {step}"
        );
    }
    rows
}

fn compare_chunks(runs: &[Vec<StreamRunFigures>]) -> Vec<ChunkRow> {
    let of = |part: usize, at: usize| {
        runs[at]
            .iter()
            .map(|run| run.cpu_us[part])
            .collect::<Vec<f64>>()
    };
    let row = |(at, (_, step)): (usize, &(FilterStep, &str))| {
        let added = PairedDifference::of(&of(0, at), &of(0, at.saturating_sub(1)));
        let cpu_us = [0, 1, 2].map(|part| median(&of(part, at)));
        println!(
            "a chunk: workers {:>5.2} + {:.2} ({:.2})  rest of Envoy {:.2}  daemon {:.2}  {step}",
            cpu_us[0], added.median, added.iqr, cpu_us[1], cpu_us[2]
        );
        ChunkRow {
            step: (*step).to_owned(),
            cpu_us,
            added_us: added.median,
            iqr_us: added.iqr,
        }
    };
    CHUNKS.iter().enumerate().map(row).collect()
}

// === impl StepListeners ===

impl StepListeners {
    async fn start(args: &Args, folder: &Path) -> Result<Self> {
        let servers = ReservedPort::lease()?;
        let sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder)?;
        let endpoints = addresses(ENDPOINTS, servers.number());
        let asked = ExtProcDaemon::start(&endpoints, &args.daemon_argument, folder)?;
        let silent = ReservedPort::lease()?;
        let goes_on = go_on::start(
            silent.address(),
            endpoints.first().ok_or("no endpoints")?,
            folder,
        )?;
        let mut places: Vec<(FilterStep, ReservedPort)> = Vec::new();
        for (step, _) in FILTER.iter().chain(EXT_PROC).chain(CHUNKS) {
            if *step != FilterStep::Filter && places.iter().all(|(known, _)| known != step) {
                places.push((*step, ReservedPort::lease()?));
            }
        }
        let more = ExtraArgs {
            daemon: &args.daemon_argument,
            envoy: &["--concurrency", "1"],
        };
        let front = DaemonAndEnvoy::start(&endpoints, more, |config| {
            places.iter().try_for_each(|(step, port)| match step {
                FilterStep::Plain => add_shipped(config, port.address(), &endpoints, false),
                FilterStep::GoesOn => {
                    add_ext_proc(config, "goes_on", port.address(), silent.number())
                }
                FilterStep::ExtProc => {
                    add_ext_proc(config, "ext_proc", port.address(), asked.port())
                }
                step => add(config, *step, port, &endpoints),
            })
        });
        let steps = Self {
            front: front.await?,
            ext_proc_daemon: asked,
            goes_on,
            places,
            _servers: (servers, sink),
        };
        wait_until_asked(steps.address(FilterStep::ExtProc)).await?;
        Ok(steps)
    }

    fn address(&self, step: FilterStep) -> SocketAddr {
        self.places
            .iter()
            .find(|(known, _)| *known == step)
            .map_or(DaemonAndEnvoy::address(), |(_, port)| port.address())
    }

    /// Envoy's process, and the daemon or ext_proc server that takes part in this step.
    fn processes(&mut self, step: FilterStep) -> [u32; 2] {
        let other = match step {
            FilterStep::GoesOn => self.goes_on.id(),
            FilterStep::ExtProc => self.ext_proc_daemon.id(),
            _ => self.front.daemon().id(),
        };
        [self.front.envoy().id(), other]
    }
}

/// Adds a listener for one of the steps between plain Envoy and the filter.
fn add(
    config: &mut EnvoyConfig,
    step: FilterStep,
    port: &ReservedPort,
    endpoints: &[String],
) -> Result<()> {
    let endpoint = endpoints.first().ok_or("no endpoints")?;
    let filters = match step {
        FilterStep::Published => vec![orders(endpoint, false)],
        FilterStep::Wasm("speaks") => vec![module("speaks", endpoint)],
        FilterStep::Wasm(depth) => vec![orders(endpoint, true), module(depth, endpoint)],
        _ => vec![orders(endpoint, true)],
    };
    let listeners = listeners(config)?;
    let mut listener = listeners
        .first()
        .cloned()
        .ok_or("the config has no listener")?;
    listener["name"] = format!("{step:?}").into();
    listener["address"]["socket_address"]["port_value"] = port.number().into();
    let shipped = listener
        .pointer_mut("/filter_chains/0/filters/0/typed_config/http_filters")
        .and_then(Value::as_array_mut);
    let shipped = shipped.ok_or("no HTTP filters")?;
    let at = shipped
        .iter()
        .position(|filter| filter["name"] == "switchpoint")
        .ok_or("no picker")?;
    shipped.splice(at..=at, filters);
    listeners.push(listener);
    Ok(())
}

/// A header mutation that always sets the same endpoint and, if `retries`, the headers for retries.
fn orders(endpoint: &str, retries: bool) -> Value {
    let headers = [
        ("x-gateway-destination-endpoint", endpoint),
        (
            "x-envoy-retry-on",
            "connect-failure,reset,retriable-status-codes",
        ),
        ("x-envoy-max-retries", "2"),
    ];
    let mutation =
        |(key, value): &(&str, &str)| json!({"append": {"header": {"key": key, "value": value}}});
    let mutations: Vec<Value> = headers
        .iter()
        .take(if retries { 3 } else { 1 })
        .map(mutation)
        .collect();
    json!({"name": "orders", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {"request_mutations": mutations},
    }})
}

fn module(depth: &str, endpoint: &str) -> Value {
    json!({"name": "steps", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
        "config": {
            "name": depth, "root_id": depth, "allow_on_headers_stop_iteration": true,
            "vm_config": {"vm_id": "steps", "runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": MODULE}}},
            "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": format!("{depth} {endpoint}")},
        },
    }})
}
