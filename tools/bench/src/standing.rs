//! Measures costs that do not depend on traffic: scraping an idle pool, memory, the time from start
//! to the first pick, and the time from a change of the endpoints until the change takes effect.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use http::Request;
use serde::{Deserialize, Serialize};
use testbed::ports::ReservedPort;
use testbed::process::{ChildProcess, memory_bytes};
use testbed::{Result, client, root};

use crate::load::cpu_ns;
use crate::stats::{median, quantile};
use crate::world::{BenchStack, RequestPath, addresses};
use crate::{Args, sink, write_result};

/// The pause before scraping is measured, so that the start of the daemon is not counted.
const SETTLE: Duration = Duration::from_secs(3);
/// The interval between two scrapes of an endpoint. The daemon varies the interval by a tenth in
/// both directions. So even with the time to fetch a page, no metric is older than a second.
const SCRAPE_INTERVAL: &str = "900ms";
const SCRAPE_WINDOWS: usize = 3;
/// The number of starts with each number of workers, to measure memory.
const MEMORY_ROUNDS: usize = 3;
const SCRAPE_WINDOW: Duration = Duration::from_secs(8);

/// The number of prompts, and the number of blocks in each prompt. These prompts put 6,600 blocks
/// of each of 100 endpoints into the prefix index. The prompts are so short that the index has an
/// entry for each block.
const PROMPTS: usize = 5_500;
const BLOCKS: usize = 120;
const BLOCK_BYTES: usize = 256;

/// The number of changes of the endpoints that are timed.
const CHANGES: usize = 20;

const LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct StandingRow {
    pub(crate) what: String,
    pub(crate) unit: String,
    pub(crate) value: f64,
    /// The worst of several values, or null if only one value was measured.
    pub(crate) worst: Option<f64>,
}

pub(crate) async fn bench(args: &Args) -> Result<()> {
    let mut rows = Vec::new();
    for endpoints in [10, 100, 1_000] {
        rows.push(scraping(endpoints).await?);
    }
    rows.extend(memory(args).await?);
    rows.extend(starts(args).await?);
    rows.push(changes(args).await?);
    for row in &rows {
        println!(
            "{}: {:.3} {}{}",
            row.what,
            row.value,
            row.unit,
            row.worst
                .map(|worst| format!(" (worst {worst:.3})"))
                .unwrap_or_default()
        );
    }
    write_result("standing", &rows)
}

fn row(what: impl Into<String>, unit: &str, values: &[f64]) -> StandingRow {
    let worst = (values.len() > 1).then(|| quantile(values, 1.0));
    StandingRow {
        what: what.into(),
        unit: unit.to_owned(),
        value: median(values),
        worst,
    }
}

/// Measures the CPU use of a daemon that scrapes engines and has no clients. Each metrics page is
/// as long as an engine's page.
#[expect(clippy::cast_precision_loss, reason = "nanoseconds of some seconds")]
async fn scraping(endpoints: usize) -> Result<StandingRow> {
    let folder = tempfile::tempdir()?;
    let servers = ReservedPort::lease()?;
    let _sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder.path())?;
    let listen = [ReservedPort::lease()?, ReservedPort::lease()?];
    let mut command = Command::new(root().join("target/release/switchpointd"));
    command.arg("serve").args(
        addresses(endpoints, servers.number())
            .iter()
            .flat_map(|e| ["--endpoint".to_owned(), e.clone()]),
    );
    command.args([
        "--listen-ext-proc",
        "none",
        "--listen-health",
        "none",
        "--scrape-interval",
        SCRAPE_INTERVAL,
    ]);
    command
        .arg("--listen-state")
        .arg(listen[0].address().to_string())
        .arg("--listen-admin")
        .arg(listen[1].address().to_string());
    let mut daemon = ChildProcess::spawn("switchpointd", &mut command, folder.path())?;
    tokio::time::sleep(SETTLE).await;
    daemon.check_running()?;
    let mut cores = Vec::new();
    for _ in 0..SCRAPE_WINDOWS {
        let before = cpu_ns(daemon.id())?;
        let began = Instant::now();
        tokio::time::sleep(SCRAPE_WINDOW).await;
        cores.push((cpu_ns(daemon.id())? - before) as f64 / began.elapsed().as_nanos() as f64);
    }
    let often = if endpoints > 450 {
        "at the limit of 500 pages per second"
    } else {
        "each every 0.8 to 1 s"
    };
    Ok(row(
        format!("scraping {endpoints} endpoints, {often}, pages of 38 KB"),
        "cores",
        &cores,
    ))
}

/// Returns the resident memory of a process, in MiB.
fn resident_mb(pid: u32) -> Result<f64> {
    Ok(memory_bytes(pid)? as f64 / f64::from(1 << 20))
}

/// Measures the memory of Envoy with one worker and with three workers, before and after prompts
/// that fill the prefix index.
async fn memory(args: &Args) -> Result<Vec<StandingRow>> {
    let mut seen: [[Vec<f64>; 2]; 2] = Default::default();
    let mut daemon_mb = Vec::new();
    for (at, workers) in [1, 3]
        .into_iter()
        .enumerate()
        .cycle()
        .take(2 * MEMORY_ROUNDS)
    {
        let mut world = BenchStack::start(100, workers, &args.daemon_argument).await?;
        client::get(world.address(RequestPath::Filter), "/v1/models").await?;
        let [envoy, daemon] = world.processes(RequestPath::Filter);
        let fresh = resident_mb(envoy)?;
        for prompt in 0..PROMPTS {
            let text: String = (0..BLOCKS)
                .map(|block| format!("{prompt:>8} {block:>width$}", width = BLOCK_BYTES - 9))
                .collect();
            let body =
                format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
            let reply = client::post(
                world.address(RequestPath::Filter),
                "/v1/chat/completions",
                body,
            )
            .await?;
            if reply.status != 200 {
                return Err(format!("{} {}", reply.status, reply.text()).into());
            }
        }
        tokio::time::sleep(SETTLE).await;
        seen[at][0].push(fresh);
        seen[at][1].push(resident_mb(envoy)?);
        daemon_mb.push(resident_mb(daemon)?);
        world.stop().await?;
    }
    let [one, three] = &seen;
    let each = |moment: usize| {
        three[moment]
            .iter()
            .zip(&one[moment])
            .map(|(three, one)| (three - one) / 2.0)
            .collect::<Vec<f64>>()
    };
    Ok(vec![
        row(
            "Envoy with one worker, 100 endpoints, fresh",
            "MiB",
            &one[0],
        ),
        row(
            "Envoy with one worker, after 5,500 prompts of 120 blocks",
            "MiB",
            &one[1],
        ),
        row("each further worker and its VM, fresh", "MiB", &each(0)),
        row(
            "each further worker and its VM, after those prompts",
            "MiB",
            &each(1),
        ),
        row(
            "the daemon, 100 endpoints, after those prompts",
            "MiB",
            &daemon_mb,
        ),
    ])
}

/// Measures the time from the start of the daemon and Envoy to the first picked request.
async fn starts(args: &Args) -> Result<Vec<StandingRow>> {
    let mut seconds = Vec::new();
    for _ in 0..3 {
        let began = Instant::now();
        let world = BenchStack::start(10, 1, &args.daemon_argument).await?;
        let body = r#"{"model":"m","messages":[]}"#;
        let reply = client::post(
            world.address(RequestPath::Filter),
            "/v1/chat/completions",
            body,
        )
        .await?;
        if reply.header("x-destination").is_empty() {
            return Err(format!("not picked: {} {}", reply.status, reply.text()).into());
        }
        seconds.push(began.elapsed().as_secs_f64());
        world.stop().await?;
    }
    Ok(vec![row(
        "from start to the first pick, with compilation of the module",
        "s",
        &seconds,
    )])
}

/// Measures the time from a change of the endpoints file to the first pick without the removed
/// endpoint.
async fn changes(args: &Args) -> Result<StandingRow> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("endpoints.yaml");
    let servers = ReservedPort::lease()?;
    let addresses = addresses(2, servers.number());
    write_endpoints(&file, &addresses)?;
    let arguments = args
        .daemon_argument
        .iter()
        .cloned()
        .chain(["--local-endpoints", "--endpoints-file"].map(str::to_owned))
        .chain([file.display().to_string()]);
    let world = BenchStack::start_at(servers, &[], 2, 1, &arguments.collect::<Vec<_>>()).await?;
    let target = world.address(RequestPath::Filter);
    let mut ms = Vec::new();
    for change in 0..CHANGES {
        let whole = &addresses[..];
        let left = &addresses[change % 2..=change % 2];
        write_endpoints(&file, left)?;
        let began = Instant::now();
        until_named(target, left.len()).await?;
        ms.push(began.elapsed().as_secs_f64() * 1e3);
        write_endpoints(&file, whole)?;
        until_named(target, whole.len()).await?;
    }
    world.stop().await?;
    Ok(row(
        "from a changed endpoints file to a pick without the removed endpoint",
        "ms",
        &ms,
    ))
}

async fn until_named(target: SocketAddr, endpoints: usize) -> Result<()> {
    let end = Instant::now() + LIMIT;
    while Instant::now() < end {
        let request = Request::get("/v1/models").body(client::empty())?;
        let reply = client::send(target, request).await?;
        if reply
            .header("x-destination")
            .split(',')
            .filter(|name| !name.is_empty())
            .count()
            == endpoints
        {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Err("the change did not reach the picker in time".into())
}

fn write_endpoints(file: &Path, addresses: &[String]) -> Result<()> {
    let entry = |address: &String| {
        let (host, port) = address.split_once(':').unwrap_or_default();
        format!("- {{name: '{address}', address: {host}, port: '{port}'}}\n")
    };
    let draft = file.with_extension("draft");
    std::fs::write(
        &draft,
        format!(
            "endpoints:\n{}",
            addresses.iter().map(entry).collect::<String>()
        ),
    )?;
    Ok(std::fs::rename(draft, file)?)
}
