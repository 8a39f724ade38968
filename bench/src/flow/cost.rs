//! What flow control costs a request: CPU of Envoy, all threads.
//!
//! One engine answers each request after 4 ms, and flow control lets it have [`SEATS`] requests.
//! With as many connections nothing is held; with [`CONNECTIONS`], each request waits for the end
//! of an earlier one. In both cases as many requests run and as many are answered per second, so
//! the difference is the cost of holding and releasing one. Cases take turns in each round.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use testbed::Result;
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::stack::Stack;

use crate::load::{LoadFigures, LoadRun};
use crate::stats::{PairedDifference, median};
use crate::{overhead, sink, world, write_result};

const BODY_BYTES: usize = 10_000;
const SEATS: usize = 4;
const CONNECTIONS: usize = 16;
const SECONDS: u32 = 2;
/// The engine answers after a while.
const DELAYED: &str = "?chunks=1&every_ms=4";
/// A new configuration reaches all workers within this time.
const SETTLE: Duration = Duration::from_secs(2);

/// One row of `flow-cost.json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct FlowCostRow {
    pub(crate) what: String,
    pub(crate) workers: u32,
    pub(crate) requests: u64,
    /// Share of the requests that were held.
    pub(crate) held_share: f64,
    /// CPU of Envoy per request in the case, and in the one it is compared with.
    pub(crate) cpu_us: f64,
    pub(crate) base_cpu_us: f64,
    /// The difference, per request that was held if any was.
    pub(crate) cost_us: f64,
    pub(crate) iqr_us: f64,
    pub(crate) errors: u64,
}

/// A case: flow control, connections, and how the engine answers.
#[derive(Clone, Copy, Debug)]
struct CostCase {
    seats: Option<usize>,
    connections: usize,
    query: &'static str,
}

/// Not held at all: without flow control, and with it.
const UNHELD: [CostCase; 2] =
    [CostCase { seats: None, connections: CONNECTIONS, query: "" }, CostCase { seats: Some(10_000), connections: CONNECTIONS, query: "" }];
/// As many connections as seats, and more.
const HELD: [CostCase; 2] = [
    CostCase { seats: Some(SEATS), connections: SEATS, query: DELAYED },
    CostCase { seats: Some(SEATS), connections: CONNECTIONS, query: DELAYED },
];

/// The figures of a case, and the share of requests held, round by round.
type CaseRuns = Vec<(LoadFigures, f64)>;

/// An Envoy in front of one engine.
struct CostStack {
    stack: Stack,
    bodies: PathBuf,
    folder: tempfile::TempDir,
    _servers: (ReservedPort, ChildProcess),
}

pub(super) async fn bench(rounds: usize) -> Result<()> {
    let mut rows = Vec::new();
    for workers in [1, 2, 4] {
        let mut stack = CostStack::start(workers).await?;
        if workers == 1 {
            rows.push(row("nothing is held", workers, &stack.measure(UNHELD, rounds).await?));
        }
        rows.push(row("held and released", workers, &stack.measure(HELD, rounds).await?));
    }
    write_result("flow-cost", &rows)
}

// === impl CostStack ===

impl CostStack {
    async fn start(workers: u32) -> Result<Self> {
        let (folder, servers) = (tempfile::tempdir()?, ReservedPort::lease()?);
        let sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder.path())?;
        let arguments = super::write_files(folder.path(), &config(None))?;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut builder = Stack::builder().servers(0).concurrency(workers).daemon_arguments(&arguments).quiet();
        for address in world::addresses(1, servers.number()) {
            builder = builder.stranger(address.parse()?);
        }
        let stack = builder.start().await?;
        let bodies = overhead::write_bodies(BODY_BYTES, false, folder.path())?;
        Ok(Self { stack, bodies, folder, _servers: (servers, sink) })
    }

    /// Measures two cases, which take turns.
    async fn measure(&mut self, cases: [CostCase; 2], rounds: usize) -> Result<[CaseRuns; 2]> {
        let mut runs: [CaseRuns; 2] = Default::default();
        for round in 0..rounds {
            for turn in 0..cases.len() {
                let at = (round + turn) % cases.len();
                runs[at].push(self.run(cases[at]).await?);
            }
        }
        Ok(runs)
    }

    async fn run(&mut self, case: CostCase) -> Result<(LoadFigures, f64)> {
        self.configure(case.seats).await?;
        let held_before = self.held().await?;
        let processes = [self.stack.envoy.process().id(), self.stack.daemon()?.process().id()];
        let load = LoadRun::closed_loop(self.stack.address(), self.bodies.clone(), case.connections, SECONDS, processes);
        let figures = LoadRun { query: case.query, ..load }.run(self.folder.path()).await?;
        // Workers add their counts at their next tick.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let held = (self.held().await? - held_before) as f64;
        Ok((figures.clone(), held / figures.requests as f64))
    }

    async fn held(&self) -> Result<i64> {
        self.stack.envoy.picker_stat("switchpoint_held_total").await
    }

    /// Replaces the scheduling configuration, and waits until it is in use.
    async fn configure(&mut self, seats: Option<usize>) -> Result<()> {
        let (draft, file, text) = (self.folder.path().join("draft"), self.folder.path().join("picker.yaml"), config(seats));
        if std::fs::read_to_string(&file)? == text {
            return Ok(());
        }
        std::fs::write(&draft, text)?;
        std::fs::rename(draft, file)?;
        tokio::time::sleep(SETTLE).await;
        Ok(())
    }
}

/// A scheduling configuration that holds requests beyond `seats`; `None` holds none.
fn config(seats: Option<usize>) -> String {
    let head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n";
    let plugins = "plugins:\n- type: marginal-cost-scorer\n- type: max-score-picker\n";
    let Some(seats) = seats else { return format!("{head}{plugins}") };
    format!(
        "{head}featureGates: [flowControl]\n{plugins}- {{type: concurrency-detector, parameters: {{maxConcurrency: {seats}, headroom: 0}}}}\n\
         flowControl:\n  saturationDetector: {{pluginRef: concurrency-detector}}\n  defaultRequestTTL: 120s\n"
    )
}

fn row(what: &str, workers: u32, [base, ours]: &[CaseRuns; 2]) -> FlowCostRow {
    let cpu = |runs: &CaseRuns| runs.iter().map(|(figures, _)| figures.cpu_us).collect::<Vec<f64>>();
    let held_share = median(&ours.iter().map(|(_, held)| *held).collect::<Vec<_>>());
    let added = PairedDifference::of(&cpu(ours), &cpu(base));
    let per_held = if held_share > 0.0 { held_share } else { 1.0 };
    let row = FlowCostRow {
        what: what.to_owned(),
        workers,
        requests: ours.iter().map(|(figures, _)| figures.requests).sum(),
        held_share,
        cpu_us: median(&cpu(ours)),
        base_cpu_us: median(&cpu(base)),
        cost_us: added.median / per_held,
        iqr_us: added.iqr / per_held,
        errors: base.iter().chain(ours).map(|(figures, _)| figures.errors).sum(),
    };
    println!(
        "{workers} workers, {what}: {:.1} us, base {:.1}; costs {:.1} ({:.1}) us; {:.0} % held, {} errors",
        row.cpu_us,
        row.base_cpu_us,
        row.cost_us,
        row.iqr_us,
        100.0 * row.held_share,
        row.errors
    );
    row
}
