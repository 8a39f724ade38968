//! Measures what workers and proxies gain by sharing state, and what sharing costs for each pick.
//!
//! The same conversations and the same bursts ([`testbed::fleet`]) are sent through several shapes:
//! one worker, four workers of one proxy, and two proxies of two and of four workers. Each shape
//! runs with sharing on and off. The cost is measured in a worker's VM in a real Envoy, by a module
//! that is built with the same options as the shipped module.

use std::path::Path;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use http::Request;
use serde::Serialize;
use serde_json::{Value, json};
use testbed::fleet::{
    BURST, BURST_MAX, BURST_SERVERS, ConversationPlan, Fleet, FleetOutcome, FleetShape,
};
use testbed::model_server::ModelServerOptions;
use testbed::ports::ReservedPort;
use testbed::stack::Stack;
use testbed::{Result, client, drill, root};

use crate::load::LoadRun;
use crate::{overhead, sink, world};

/// The number of model servers for conversations.
const SERVERS: usize = 8;
/// The speed of the simulated servers relative to measured engines. The servers are so slow that
/// each runs about six requests. If a server ran one or two requests, the spread would be mostly
/// chance.
const SPEED: f64 = 0.25;
/// The target for cache hits: the maximum share by which hits may be below the hits of one worker.
const HITS_WITHIN: f64 = 0.02;
/// The target for the spread of running requests: the maximum share by which the spread may exceed
/// the spread with one worker.
const SPREAD_WITHIN: f64 = 0.1;
/// The number of endpoints in the pool in which the cost of a pick is measured. All endpoints have
/// requests in flight.
const ENDPOINTS: u32 = 100;
/// The number of peers and of endpoints for a further measurement of the cost, as in a proxy of
/// sixteen workers with 500 endpoints.
const LARGE: [u32; 2] = [15, 500];
/// The number of workers and of connections of the proxy in which the cost under load is measured.
/// After the load, requests on new connections read the result. These requests are so many that
/// each worker almost surely answers one.
const LIVE_WORKERS: u32 = 4;
const LIVE_CONNECTIONS: usize = 16;
const LIVE_SECONDS: u32 = 6;
const LIVE_BODY_BYTES: usize = 10_000;
const LIVE_ASKED: usize = 64;

/// Sets the bursts and the conversations to measure.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Args {
    /// Bursts for each shape
    #[arg(long, default_value_t = 20)]
    seeds: usize,
    /// Runs of conversations for each shape
    #[arg(long, default_value_t = 3)]
    runs: u64,
    /// Conversations in each run
    #[arg(long, default_value_t = 90)]
    conversations: usize,
}

/// One row of the result file: a run of conversations, or a burst. A figure that was not measured
/// is null.
#[derive(Debug, Default, Serialize)]
struct SharingRow {
    workers: u32,
    proxies: u32,
    sharing: bool,
    seed: u64,
    hit_rate: Option<f64>,
    running_cv: Option<f64>,
    /// The mean number of running requests per server.
    running: Option<f64>,
    burst_max: Option<usize>,
    pick_cost_us: f64,
}

/// The cost of sharing for each pick, in µs.
#[derive(Clone, Copy, Debug)]
struct SharingCost {
    /// The time to read the load reports of the other workers, if all these reports have changed.
    hear_us: f64,
    /// The time to publish this worker's own load report.
    tell_us: f64,
}

/// Measures, prints and writes `target/bench/sharing.json`.
pub(crate) async fn bench(args: Args) -> Result<()> {
    let four = cost(3, ENDPOINTS).await?;
    let large = cost(LARGE[0], LARGE[1]).await?;
    println!("{}", describe_cost(3, ENDPOINTS, four));
    println!("{}", describe_cost(LARGE[0], LARGE[1], large));
    println!("{}", live().await?);
    let two = cost(1, ENDPOINTS).await?;
    let mut rows = Vec::new();
    let shapes = [
        FleetShape::ONE,
        FleetShape::FOUR_WORKERS,
        FleetShape::TWO_BY_TWO,
        FleetShape::TWO_BY_FOUR,
    ];
    for (shape, sharing) in shapes
        .into_iter()
        .flat_map(|shape| [(shape, true), (shape, false)])
    {
        let pick_cost_us = match (sharing, shape.workers) {
            (true, 4) => four.sum(),
            (true, 2) => two.sum(),
            _ => 0.0,
        };
        let row = SharingRow {
            workers: shape.workers,
            proxies: shape.proxies,
            sharing,
            pick_cost_us,
            ..SharingRow::default()
        };
        for seed in 1..=args.runs {
            let (outcome, delays) = converse(args, shape, sharing, seed).await?;
            println!(
                "{} x {} workers, sharing {sharing:<5} seed {seed}: {} requests, {:.1} % of prompt tokens cached, {:.1} running at a server, spread {:.3}{delays}",
                shape.proxies,
                shape.workers,
                outcome.requests,
                100.0 * outcome.hit_rate,
                outcome.running,
                outcome.running_cv
            );
            let hit_rate = Some(outcome.hit_rate);
            let running_cv = Some(outcome.running_cv);
            let running = Some(outcome.running);
            rows.push(SharingRow {
                seed,
                hit_rate,
                running_cv,
                running,
                ..row
            });
        }
        let fleet = Fleet::for_bursts(shape, sharing).await?;
        for seed in 1..=args.seeds {
            rows.push(SharingRow {
                seed: seed as u64,
                burst_max: Some(fleet.burst(seed).await?),
                ..row
            });
        }
    }
    report(&rows, &shapes)
}

async fn converse(
    args: Args,
    shape: FleetShape,
    sharing: bool,
    seed: u64,
) -> Result<(FleetOutcome, String)> {
    let fleet = Fleet::start(
        shape,
        sharing,
        SERVERS,
        &ModelServerOptions {
            speed: SPEED,
            ..ModelServerOptions::default()
        },
    )
    .await?;
    let begin_within = std::time::Duration::from_secs(15);
    let outcome = fleet
        .converse(ConversationPlan {
            count: args.conversations,
            turns: 8,
            begin_within,
            seed,
        })
        .await?;
    // The other proxy measures the age of load reports when it receives them.
    let page = fleet
        .stack
        .envoy
        .admin_page(
            "/stats?filter=switchpoint_share_delay_us&format=json&histogram_buckets=summary",
        )
        .await?;
    Ok((
        outcome,
        if shape.proxies > 1 && sharing {
            delays(&serde_json::from_str(&page)?)
        } else {
            String::new()
        },
    ))
}

/// Returns the median and the 99th percentile of the age of load reports when the other proxy
/// receives them, as text.
fn delays(stats: &Value) -> String {
    let histogram = stats.pointer("/stats/0/histograms");
    let quantiles = histogram
        .and_then(|h| h["supported_quantiles"].as_array())
        .cloned()
        .unwrap_or_default();
    let values = histogram
        .and_then(|h| h.pointer("/computed_quantiles/0/values"))
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let of = |wanted: f64| {
        let at = quantiles
            .iter()
            .position(|quantile| quantile.as_f64() == Some(wanted));
        at.and_then(|at| values.get(at)?.get("cumulative")?.as_f64())
            .map_or("?".to_owned(), |us| format!("{:.1}", us / 1e3))
    };
    format!(
        ", load is {} ms old when it reaches the other proxy (p99 {})",
        of(50.0),
        of(99.0)
    )
}

// === impl SharingCost ===

impl SharingCost {
    fn sum(self) -> f64 {
        self.hear_us + self.tell_us
    }
}

/// Measures the cost in the VM of a proxy with one worker, beside `peers` simulated VMs.
async fn cost(peers: u32, endpoints: u32) -> Result<SharingCost> {
    let stack = Stack::builder()
        .envoy_config(drill::envoy_config()?)
        .quiet()
        .start()
        .await?;
    let asked = Request::get("/health")
        .header(drill::COST, format!("{peers}/{endpoints}"))
        .body(client::empty())?;
    let said = client::send(stack.address(), asked).await?.json()?;
    let number = |key: &str| {
        said[key]
            .as_f64()
            .ok_or_else(|| format!("no {key} in {said}"))
    };
    Ok(SharingCost {
        hear_us: number("hear_us")?,
        tell_us: number("tell_us")?,
    })
}

/// Measures the cost of the last picks of each worker's VM under load. Before most of these picks,
/// the VM has just read the other workers' load reports.
async fn live() -> Result<String> {
    let servers = ReservedPort::lease()?;
    let folder = tempfile::tempdir()?;
    let _sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder.path())?;
    let mut builder = Stack::builder()
        .servers(0)
        .concurrency(LIVE_WORKERS)
        .envoy_config(drill::envoy_config()?)
        .quiet();
    for address in world::addresses(ENDPOINTS as usize, servers.number()) {
        builder = builder.stranger(address.parse()?);
    }
    let mut stack = builder.start().await?;
    let processes = [stack.envoy.process().id(), stack.daemon()?.process().id()];
    let bodies = overhead::write_bodies(LIVE_BODY_BYTES, false, folder.path())?;
    let load = LoadRun::closed_loop(
        stack.address(),
        bodies,
        LIVE_CONNECTIONS,
        LIVE_SECONDS,
        processes,
    );
    let measured = load.run(folder.path()).await?;
    let mut picks = 0.0;
    let mut sum_us = 0.0;
    let mut calm_us = 0.0;
    for _ in 0..LIVE_ASKED {
        let asked = Request::get("/health")
            .header(drill::COST, "live")
            .body(client::empty())?;
        let said = client::send(stack.address(), asked).await?.json()?;
        let number = |key: &str| {
            said[key]
                .as_f64()
                .ok_or_else(|| format!("no {key} in {said}"))
        };
        let of = number("picks")?;
        picks += of;
        sum_us += of * number("mean_us")?;
        calm_us += of * number("calm_us")?;
    }
    Ok(format!(
        "{LIVE_WORKERS} workers, {ENDPOINTS} endpoints, {LIVE_CONNECTIONS} connections, {:.0} requests/s: sharing cost {:.2} us per pick, mean of the last {picks} picks; {:.2} without the slowest 1 %",
        measured.rps,
        sum_us / picks.max(1.0),
        calm_us / picks.max(1.0)
    ))
}

fn describe_cost(peers: u32, endpoints: u32, cost: SharingCost) -> String {
    format!(
        "a pick with {} workers and {endpoints} endpoints, when all other workers have changed: {:.2} us to read their load, {:.2} us to publish its own",
        peers + 1,
        cost.hear_us,
        cost.tell_us
    )
}

fn report(rows: &[SharingRow], shapes: &[FleetShape]) -> Result<()> {
    let file = root().join("target/bench/sharing.json");
    std::fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
    std::fs::write(
        &file,
        serde_json::to_string_pretty(&json!({ "rows": rows }))?,
    )?;
    let mut table = Table::new();
    let fullest = format!("fullest of {BURST_SERVERS} after {BURST} (most {BURST_MAX})");
    table.load_style(UTF8_FULL_CONDENSED).set_header([
        "proxies x workers",
        "sharing",
        "cached",
        "spread",
        &*fullest,
        "bursts above",
    ]);
    for (shape, sharing) in shapes
        .iter()
        .flat_map(|shape| [(*shape, true), (*shape, false)])
    {
        let bursts: Vec<usize> = rows_of(rows, shape, sharing)
            .filter_map(|row| row.burst_max)
            .collect();
        table.add_row([
            format!("{} x {}", shape.proxies, shape.workers),
            sharing.to_string(),
            format!(
                "{:.1} %",
                100.0 * mean(rows, shape, sharing, |row| row.hit_rate)
            ),
            format!("{:.3}", mean(rows, shape, sharing, |row| row.running_cv)),
            bursts
                .iter()
                .max()
                .map_or_else(String::new, ToString::to_string),
            format!(
                "{} of {}",
                bursts
                    .iter()
                    .filter(|fullest| **fullest > BURST_MAX)
                    .count(),
                bursts.len()
            ),
        ]);
    }
    println!("\n{table}");
    let many = shapes.iter().filter(|shape| **shape != FleetShape::ONE);
    many.flat_map(|shape| [(*shape, true), (*shape, false)])
        .for_each(|(shape, sharing)| println!("{}", verdict(rows, shape, sharing)));
    println!("written to target/bench/sharing.json");
    Ok(())
}

fn rows_of(
    rows: &[SharingRow],
    shape: FleetShape,
    sharing: bool,
) -> impl Iterator<Item = &SharingRow> {
    rows.iter().filter(move |row| {
        (row.proxies, row.workers, row.sharing) == (shape.proxies, shape.workers, sharing)
    })
}

fn mean(
    rows: &[SharingRow],
    shape: FleetShape,
    sharing: bool,
    of_row: fn(&SharingRow) -> Option<f64>,
) -> f64 {
    let values: Vec<f64> = rows_of(rows, shape, sharing).filter_map(of_row).collect();
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Compares a shape with one worker. Uses the single worker's runs with and without sharing,
/// because a single worker has nothing to share.
fn verdict(rows: &[SharingRow], shape: FleetShape, sharing: bool) -> String {
    let one = |of: fn(&SharingRow) -> Option<f64>| {
        f64::midpoint(
            mean(rows, FleetShape::ONE, true, of),
            mean(rows, FleetShape::ONE, false, of),
        )
    };
    let hits: fn(&SharingRow) -> Option<f64> = |row| row.hit_rate;
    let spread: fn(&SharingRow) -> Option<f64> = |row| row.running_cv;
    let missing = 1.0 - mean(rows, shape, sharing, hits) / one(hits);
    let wider = mean(rows, shape, sharing, spread) / one(spread) - 1.0;
    let word = |met| if met { "met" } else { "NOT met" };
    format!(
        "{} x {} with sharing {}, compared with one worker: hits {:+.1} % (within {:.0} %: {}), spread {:+.1} % (within {:.0} %: {})",
        shape.proxies,
        shape.workers,
        if sharing { "on" } else { "off" },
        -100.0 * missing,
        100.0 * HITS_WITHIN,
        word(missing <= HITS_WITHIN),
        100.0 * wider,
        100.0 * SPREAD_WITHIN,
        word(wider <= SPREAD_WITHIN)
    )
}
