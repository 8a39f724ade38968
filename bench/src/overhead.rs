//! Measures the cost that a picker adds to a request: plain Envoy, the filter and ext_proc, one
//! right after the other in every round.
//!
//! The order of the variants rotates from round to round, so that none is always first after the
//! pause. The result is the median over the rounds of the difference to plain Envoy in the same
//! round. The machine may be shared and noisy: the spread of the differences (interquartile range)
//! says how much to trust them.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use testbed::Result;

use crate::load::{LoadFigures, LoadRun};
use crate::stats::{PairedDifference, median, quantile};
use crate::world::{BenchStack, RequestPath};
use crate::{Args, predicting, write_result};

/// In bodies with escapes, every 55th byte is a backslash, as in code and quoted text.
const ESCAPE_EVERY: usize = 55;

/// Bodies that differ in their first bytes, so that most requests of a run share no prefix.
const BODIES: usize = 64;

/// Load of the tail measurement, relative to the requests/s that the slowest variant sustains.
const TAIL_LOAD: f64 = 0.5;

/// Number of endpoints for which everything is measured. Other numbers are measured with two body
/// sizes only.
pub(crate) const ENDPOINTS: usize = 100;

/// Body sizes measured with every number of endpoints and every number of connections.
pub(crate) const BODIES_EVERYWHERE: [usize; 2] = [10_000, 220_000];

/// One row of the result file. Its fields are the columns of the published JSON table.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct OverheadRow {
    pub(crate) front: String,
    pub(crate) body_bytes: usize,
    pub(crate) escapes: bool,
    /// Whether picks use predicted latency; otherwise the default profile.
    pub(crate) predicting: bool,
    pub(crate) endpoints: usize,
    pub(crate) connections: usize,
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) cpu_us: f64,
    pub(crate) rps: f64,
    pub(crate) added_p50_us: f64,
    pub(crate) added_p99_us: f64,
    pub(crate) added_cpu_us: f64,
    pub(crate) rps_ratio: f64,
    pub(crate) iqr_rps_ratio: f64,
    /// Spread of the added p50.
    pub(crate) iqr_us: f64,
    /// Spread of the added p99, and of the added CPU.
    pub(crate) iqr_p99_us: f64,
    pub(crate) iqr_cpu_us: f64,
    /// Requests/s that are sent independently of earlier answers (open loop), else null.
    pub(crate) rate_rps: Option<u32>,
    pub(crate) p999_us: f64,
}

/// One case to measure.
#[derive(Clone, Copy, Debug)]
struct OverheadCase {
    endpoints: usize,
    body_bytes: usize,
    escapes: bool,
    predicting: bool,
    connections: usize,
    rate: Option<u32>,
}

pub(crate) async fn bench(args: &Args) -> Result<()> {
    let mut rows = Vec::new();
    for &endpoints in &args.endpoints {
        let mut world = BenchStack::start(endpoints, 1, &args.daemon_argument).await?;
        for case in cases(args, endpoints) {
            let measured = measure(args, case, &mut world).await?;
            let slowest = measured.iter().map(|row| row.rps).fold(f64::MAX, f64::min);
            rows.extend(measured);
            if tails(case) {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some thousands")]
                let rate = Some((slowest * TAIL_LOAD) as u32);
                rows.extend(measure(args, OverheadCase { rate, connections: 64, ..case }, &mut world).await?);
            }
        }
        world.stop().await?;
    }
    rows.extend(predicting(args).await?);
    write_result("overhead", &rows)
}

/// Measures with latency prediction on, in the pool where everything is measured.
async fn predicting(args: &Args) -> Result<Vec<OverheadRow>> {
    let folder = tempfile::tempdir()?;
    let mut world = predicting::world(ENDPOINTS, &args.daemon_argument, folder.path()).await?;
    let mut rows = Vec::new();
    for body_bytes in BODIES_EVERYWHERE {
        for connections in [1, 16] {
            let case = OverheadCase { endpoints: ENDPOINTS, body_bytes, escapes: false, predicting: true, connections, rate: None };
            rows.extend(measure(args, case, &mut world).await?);
        }
    }
    world.stop().await?;
    Ok(rows)
}

/// The cases of one pool size: all body sizes at [`ENDPOINTS`], otherwise [`BODIES_EVERYWHERE`].
/// Many connections and bodies with escapes are measured at [`ENDPOINTS`] only.
fn cases(args: &Args, endpoints: usize) -> Vec<OverheadCase> {
    let everything = endpoints == ENDPOINTS || args.endpoints.len() == 1;
    let mut cases = Vec::new();
    for &body_bytes in args.bodies.iter().filter(|bytes| everything || BODIES_EVERYWHERE.contains(bytes)) {
        for escapes in [false, true].into_iter().filter(|escapes| everything || !escapes) {
            for &connections in &args.connections {
                let many = connections > 16;
                if !many || (everything && !escapes && BODIES_EVERYWHERE.contains(&body_bytes)) {
                    cases.push(OverheadCase { endpoints, body_bytes, escapes, predicting: false, connections, rate: None });
                }
            }
        }
    }
    cases
}

fn tails(case: OverheadCase) -> bool {
    case.connections == 16 && case.endpoints == ENDPOINTS && !case.escapes && BODIES_EVERYWHERE.contains(&case.body_bytes)
}

async fn measure(args: &Args, case: OverheadCase, world: &mut BenchStack) -> Result<Vec<OverheadRow>> {
    let bodies = write_bodies(case.body_bytes, case.escapes, world.folder.path())?;
    let mut runs: [Vec<LoadFigures>; 3] = Default::default();
    for round in 0..args.rounds {
        for turn in 0..RequestPath::ALL.len() {
            let at = (round + turn) % RequestPath::ALL.len();
            let (target, processes) = (world.address(RequestPath::ALL[at]), world.processes(RequestPath::ALL[at]));
            let (connections, seconds, rate) = (case.connections, args.seconds, case.rate);
            let headers = if case.predicting { predicting::HEADERS } else { &[] };
            let load = LoadRun { target, bodies: bodies.clone(), connections, seconds, rate, processes, headers };
            runs[at].push(load.run(world.folder.path()).await?);
        }
    }
    let rows: Vec<OverheadRow> = RequestPath::ALL.iter().zip(&runs).map(|(way, ours)| row(*way, case, ours, &runs[0])).collect();
    for row in &rows[1..] {
        println!("{}", said(row, &rows[0]));
    }
    Ok(rows)
}

fn row(way: RequestPath, case: OverheadCase, ours: &[LoadFigures], plain: &[LoadFigures]) -> OverheadRow {
    let of = |figure: fn(&LoadFigures) -> f64, runs: &[LoadFigures]| runs.iter().map(figure).collect::<Vec<f64>>();
    let added = |figure| PairedDifference::of(&of(figure, ours), &of(figure, plain));
    let (p50, p99, cpu) = (added(|m| m.p50_us), added(|m| m.p99_us), added(|m| m.cpu_us));
    let ratios: Vec<f64> = ours.iter().zip(plain).map(|(ours, plain)| ours.rps / plain.rps).collect();
    OverheadRow {
        front: way.name().to_owned(),
        body_bytes: case.body_bytes,
        escapes: case.escapes,
        predicting: case.predicting,
        endpoints: case.endpoints,
        connections: case.connections,
        requests: ours.iter().map(|m| m.requests).sum(),
        errors: ours.iter().map(|m| m.errors).sum(),
        p50_us: median(&of(|m| m.p50_us, ours)),
        p99_us: median(&of(|m| m.p99_us, ours)),
        p999_us: median(&of(|m| m.p999_us, ours)),
        cpu_us: median(&of(|m| m.cpu_us, ours)),
        rps: median(&of(|m| m.rps, ours)),
        added_p50_us: p50.median,
        added_p99_us: p99.median,
        added_cpu_us: cpu.median,
        rps_ratio: median(&ratios),
        iqr_rps_ratio: quantile(&ratios, 0.75) - quantile(&ratios, 0.25),
        iqr_us: p50.iqr,
        iqr_p99_us: p99.iqr,
        iqr_cpu_us: cpu.iqr,
        rate_rps: case.rate,
    }
}

fn said(row: &OverheadRow, plain: &OverheadRow) -> String {
    format!(
        "{:>8}{} {:>4} endpoints {:>7} B escapes {:<5} c={:<2} {:<11} p50 {:>7.1} + {:.1} ({:.1}) us  p99 + {:.0} ({:.0})  cpu {:>6.1} + {:.1} ({:.1})  req/s {:.0} %  errors {}",
        row.front,
        if row.predicting { " predicting" } else { "" },
        row.endpoints,
        row.body_bytes,
        row.escapes,
        row.connections,
        row.rate_rps.map_or_else(|| "closed loop".to_owned(), |rate| format!("{rate}/s")),
        plain.p50_us,
        row.added_p50_us,
        row.iqr_us,
        row.added_p99_us,
        row.iqr_p99_us,
        plain.cpu_us,
        row.added_cpu_us,
        row.iqr_cpu_us,
        100.0 * row.rps_ratio,
        row.errors,
    )
}

/// Writes chat requests of about `body_bytes` bytes to a file, one per line.
pub(crate) fn write_bodies(body_bytes: usize, escapes: bool, folder: &Path) -> Result<PathBuf> {
    let file = folder.join(format!("bodies-{body_bytes}-{escapes}"));
    let lines: Vec<String> = (0..BODIES)
        .map(|i| {
            let mut text = format!("conversation {i} ");
            while text.len() < body_bytes.saturating_sub(120) {
                let word = if escapes && text.len() % ESCAPE_EVERY < 6 { "say \\\"" } else { "words " };
                text.push_str(word);
            }
            format!(r#"{{"model":"m","messages":[{{"role":"system","content":"be brief"}},{{"role":"user","content":"{text}"}}],"max_tokens":16}}"#)
        })
        .collect();
    std::fs::write(&file, lines.join("\n"))?;
    Ok(file)
}
