//! What the picker adds to a request: the same Envoy with and without it, side by side in one run.
//!
//! One Envoy process serves two listeners that differ in the wasm filter alone; behind both stand sinks that answer at once, so that what is
//! measured is the proxy. Modes are interleaved in rounds and medians are compared: this machine may be shared and noisy. CPU is the Envoy
//! process's own scheduler clock, in nanoseconds. With one connection, everything is pinned to one core: unpinned, wake-ups across cores
//! move the median by more than what is looked for.
#![allow(clippy::print_stdout, reason = "this program talks to a person")]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use e2e::envoy::Config;
use e2e::front::{Front, More};
use e2e::ports::Port;
use e2e::{Result, root};
use serde::Serialize;
use serde_json::{Value, json};

#[path = "bench/load.rs"]
mod load;
#[path = "bench/relay.rs"]
mod relay;
#[path = "bench/sharing.rs"]
mod sharing;
#[path = "bench/sink.rs"]
mod sink;

use load::{Load, Measured};

/// Share of backslashes in the bodies that have any: one in so many bytes, as code and quoted text do.
const ESCAPE_EVERY: usize = 55;

/// As the measured baselines of this field have it: what a request costs must not depend on which worker a connection fell to.
const ONE_WORKER: More<'_> = More { daemon: &[], envoy: &["--concurrency", "1"] };

/// Bodies that differ in their first bytes, so that most requests of a run share no prefix.
const BODIES: usize = 64;

#[derive(Debug, Parser)]
#[command(about = "Latency and CPU that the picker adds to plain Envoy -> target/bench/overhead.json", long_about = None)]
struct Args {
    #[command(subcommand)]
    part: Option<Part>,
    /// Body sizes, bytes
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 10_000, 100_000, 400_000])]
    bodies: Vec<usize>,
    /// Endpoints in the pool
    #[arg(long, value_delimiter = ',', default_values_t = [10, 100])]
    endpoints: Vec<usize>,
    /// Rounds, each measuring every mode once
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of load for each mode and round
    #[arg(long, default_value_t = 1)]
    seconds: u32,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// One worker against several, of one proxy and of two: hits, spread, bursts, cost of a pick -> target/bench/sharing.json
    Sharing(sharing::Args),
    /// One daemon that carries many proxies: its CPU, and how old load and placements are when they arrive
    Relay(relay::Args),
    /// Be the model servers (started by the bench itself)
    #[command(hide = true)]
    Sink {
        /// Addresses to listen on
        #[arg(long, value_delimiter = ',')]
        listen: Vec<SocketAddr>,
    },
}

/// One row of the result file.
#[derive(Debug, Serialize)]
struct Row {
    front: &'static str,
    body_bytes: usize,
    escapes: bool,
    endpoints: usize,
    connections: usize,
    requests: u64,
    errors: u64,
    p50_us: f64,
    p99_us: f64,
    cpu_us: f64,
    rps: f64,
    added_p50_us: f64,
    added_p99_us: f64,
    added_cpu_us: f64,
    rps_ratio: f64,
    iqr_us: f64,
}

/// One thing to measure.
#[derive(Clone, Copy, Debug)]
struct Case {
    endpoints: usize,
    body_bytes: usize,
    escapes: bool,
    connections: usize,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.part {
        Some(Part::Sharing(args)) => sharing::bench(*args).await,
        Some(Part::Relay(args)) => relay::bench(*args).await,
        Some(Part::Sink { listen }) => sink::serve(listen).await,
        None => bench(&args).await,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn bench(args: &Args) -> Result<()> {
    let mut rows = Vec::new();
    for &endpoints in &args.endpoints {
        let ports = (0..endpoints).map(|_| Port::lease()).collect::<Result<Vec<_>>>()?;
        let addresses: Vec<String> = ports.iter().map(|p| p.address().to_string()).collect();
        let folder = tempfile::tempdir()?;
        let _sink = sink::start(&addresses, folder.path())?;
        let plain = Port::lease()?;
        let mut front = Front::start(&addresses, ONE_WORKER, |config| add_plain_listener(config, plain.address(), &addresses)).await?;
        for case in cases(args, endpoints) {
            rows.extend(measure(args, case, &mut front, plain.address(), folder.path()).await?);
        }
        front.stop().await?;
    }
    report(&rows)
}

fn cases(args: &Args, endpoints: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for &body_bytes in &args.bodies {
        for escapes in [false, true] {
            for connections in [1, 16] {
                cases.push(Case { endpoints, body_bytes, escapes, connections });
            }
        }
    }
    cases
}

async fn measure(args: &Args, case: Case, front: &mut Front, plain: SocketAddr, folder: &Path) -> Result<[Row; 2]> {
    let bodies = write_bodies(case, folder)?;
    let load = |target: SocketAddr, envoy: u32| Load {
        target,
        bodies: bodies.clone(),
        connections: case.connections,
        seconds: args.seconds,
        envoy,
    };
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        without.push(load(plain, front.envoy().id()).run(folder).await?);
        with.push(load(Front::address(), front.envoy().id()).run(folder).await?);
    }
    let (base, ours) = (Measured::median(&without), Measured::median(&with));
    let row = |front, m: &Measured, runs: &[Measured]| Row {
        front,
        body_bytes: case.body_bytes,
        escapes: case.escapes,
        endpoints: case.endpoints,
        connections: case.connections,
        requests: runs.iter().map(|r| r.requests).sum(),
        errors: runs.iter().map(|r| r.errors).sum(),
        p50_us: m.p50_us,
        p99_us: m.p99_us,
        cpu_us: m.cpu_us,
        rps: m.rps,
        added_p50_us: m.p50_us - base.p50_us,
        added_p99_us: m.p99_us - base.p99_us,
        added_cpu_us: m.cpu_us - base.cpu_us,
        rps_ratio: m.rps / base.rps,
        iqr_us: Measured::iqr(runs),
    };
    let rows = [row("plain", &base, &without), row("filter", &ours, &with)];
    println!(
        "{:>4} endpoints {:>7} B escapes {:<5} c={:<2}  p50 {:>7.1} -> {:>7.1} us (+{:.1})  p99 +{:.0}  cpu {:>6.1} -> {:>6.1} us (+{:.1})",
        case.endpoints,
        case.body_bytes,
        case.escapes,
        case.connections,
        base.p50_us,
        ours.p50_us,
        rows[1].added_p50_us,
        rows[1].added_p99_us,
        base.cpu_us,
        ours.cpu_us,
        rows[1].added_cpu_us
    );
    Ok(rows)
}

/// Chat requests of about the size asked for, one a line.
fn write_bodies(case: Case, folder: &Path) -> Result<PathBuf> {
    let file = folder.join(format!("bodies-{}-{}", case.body_bytes, case.escapes));
    let lines: Vec<String> = (0..BODIES)
        .map(|i| {
            let mut text = format!("conversation {i} ");
            while text.len() < case.body_bytes.saturating_sub(120) {
                let word = if case.escapes && text.len() % ESCAPE_EVERY < 6 { "say \\\"" } else { "words " };
                text.push_str(word);
            }
            format!(r#"{{"model":"m","messages":[{{"role":"system","content":"be brief"}},{{"role":"user","content":"{text}"}}],"max_tokens":16}}"#)
        })
        .collect();
    std::fs::write(&file, lines.join("\n"))?;
    Ok(file)
}

/// A second listener, as shipped but for the picker, over the same endpoints by round robin.
fn add_plain_listener(config: &mut Config, address: SocketAddr, endpoints: &[String]) -> Result<()> {
    let hosts: Vec<Value> = endpoints
        .iter()
        .filter_map(|e| e.parse::<SocketAddr>().ok())
        .map(|e| json!({"endpoint": {"address": {"socket_address": {"address": e.ip().to_string(), "port_value": e.port()}}}}))
        .collect();
    let value = config.value();
    let clusters = value.pointer_mut("/static_resources/clusters").and_then(Value::as_array_mut).ok_or("the config has no clusters")?;
    let mut cluster = clusters.first().cloned().ok_or("the config has no cluster")?;
    let fields = cluster.as_object_mut().ok_or("a cluster is no object")?;
    fields.retain(|key, _| !["eds_cluster_config", "load_balancing_policy"].contains(&key.as_str()));
    fields.insert("name".into(), "plain".into());
    fields.insert("type".into(), "STATIC".into());
    fields.insert("load_assignment".into(), json!({"cluster_name": "plain", "endpoints": [{"lb_endpoints": hosts}]}));
    clusters.push(cluster);

    let listeners = value.pointer_mut("/static_resources/listeners").and_then(Value::as_array_mut).ok_or("the config has no listeners")?;
    let mut listener = listeners.first().cloned().ok_or("the config has no listener")?;
    listener["name"] = "plain".into();
    listener["address"]["socket_address"]["port_value"] = address.port().into();
    let hcm = listener.pointer_mut("/filter_chains/0/filters/0/typed_config").ok_or("the listener has no HTTP filter chain")?;
    hcm["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = "plain".into();
    let filters = hcm["http_filters"].as_array_mut().ok_or("no HTTP filters")?;
    filters.retain(|filter| filter["name"] != "switchpoint" && filter["name"] != "header_to_metadata");
    listeners.push(listener);
    Ok(())
}

fn report(rows: &[Row]) -> Result<()> {
    let file = root().join("target/bench/overhead.json");
    std::fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let version = std::process::Command::new(e2e::envoy::Envoy::binary()).arg("--version").output()?;
    let version = String::from_utf8_lossy(&version.stdout);
    let envoy = version.split('/').nth(1).unwrap_or("unknown").to_owned();
    let result = json!({"host": std::env::consts::ARCH, "cores": cores, "envoy": envoy, "rows": rows});
    std::fs::write(&file, serde_json::to_string_pretty(&result)?)?;
    println!("\n{}\nwritten to target/bench/overhead.json", summary(rows));
    Ok(())
}

fn summary(rows: &[Row]) -> Table {
    let mut table = Table::new();
    let header = ["body", "escapes", "endpoints", "conn.", "added p50 µs", "added p99 µs", "added CPU µs", "req/s of plain", "errors"];
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    for r in rows.iter().filter(|r| r.front == "filter") {
        table.add_row([
            format!("{} KB", r.body_bytes / 1000),
            r.escapes.to_string(),
            r.endpoints.to_string(),
            r.connections.to_string(),
            format!("{:.1}", r.added_p50_us),
            format!("{:.0}", r.added_p99_us),
            format!("{:.1}", r.added_cpu_us),
            format!("{:.0} %", 100.0 * r.rps_ratio),
            r.errors.to_string(),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
