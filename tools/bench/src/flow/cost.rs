//! Measures the cost of flow control for a request: the CPU time of all threads of Envoy, and the
//! time in the wasm VMs.
//!
//! One engine answers each request after 4 ms, and flow control allows [`SEATS`] requests at this
//! engine. With [`SEATS`] connections, the proxy holds no request. With [`CONNECTIONS`], each
//! request waits for the end of an earlier request. In both cases the same number of requests run,
//! and the engine answers the same number per second. So the difference is the cost of holding and
//! releasing a request. The cases alternate in each round.
//!
//! A test build of the module measures the time in the VMs: the build reads the clock around each
//! call from the proxy. CPU is measured with the shipped module.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::stack::Stack;
use testbed::{Result, drill};

use crate::load::{LoadFigures, LoadRun};
use crate::stats::{PairedDifference, median};
use crate::{overhead, sink, world, write_result};

const BODY_BYTES: usize = 10_000;
const SEATS: usize = 4;
const CONNECTIONS: usize = 16;
const SECONDS: u32 = 2;
/// The query with which the engine answers after 4 ms.
const DELAYED: &str = "?chunks=1&every_ms=4";
/// The time within which a new configuration reaches all workers.
const SETTLE: Duration = Duration::from_secs(2);

/// One row of `flow-cost.json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct FlowCostRow {
    pub(crate) what: String,
    pub(crate) workers: u32,
    pub(crate) requests: u64,
    /// The share of the requests that flow control held.
    pub(crate) held_share: f64,
    /// The CPU time of Envoy for each request. The added cost is the difference to the base case,
    /// in which no request is held. If the case holds requests, the added cost is for each held
    /// request.
    pub(crate) cpu: AddedCost,
    /// The time in the VMs for each request. The added cost is computed as for `cpu`.
    pub(crate) vm: AddedCost,
    /// The number of calls into the VMs that the kernel interrupted, for each request. `vm` leaves
    /// out the time of these calls.
    pub(crate) interrupted: f64,
    pub(crate) errors: u64,
}

/// A cost, its base, and the added cost with its spread, in µs.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct AddedCost {
    pub(crate) us: f64,
    pub(crate) base_us: f64,
    pub(crate) added_us: f64,
    pub(crate) iqr_us: f64,
}

/// A case: the limit of flow control, the number of connections, and the query that sets how the
/// engine answers.
#[derive(Clone, Copy, Debug)]
struct CostCase {
    seats: Option<usize>,
    connections: usize,
    query: &'static str,
}

/// Two cases in which no request is held: without flow control, and with flow control.
const UNHELD: [CostCase; 2] = [
    CostCase {
        seats: None,
        connections: CONNECTIONS,
        query: "",
    },
    CostCase {
        seats: Some(10_000),
        connections: CONNECTIONS,
        query: "",
    },
];
/// Two cases with a limit of [`SEATS`] requests: with as many connections, which is the base, and
/// with more connections, so that requests are held.
const HELD: [CostCase; 2] = [
    CostCase {
        seats: Some(SEATS),
        connections: SEATS,
        query: DELAYED,
    },
    CostCase {
        seats: Some(SEATS),
        connections: CONNECTIONS,
        query: DELAYED,
    },
];

/// The wasm module that an Envoy loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Module {
    Shipped,
    /// The test build, which measures the time in the VM.
    Timed,
}

struct CaseRun {
    figures: LoadFigures,
    held_share: f64,
    vm_us: f64,
    interrupted: f64,
}

/// The runs of the base case and of the other case, round by round.
type PairedRuns = [Vec<CaseRun>; 2];

/// An Envoy in front of one engine.
struct CostStack {
    stack: Stack,
    module: Module,
    bodies: PathBuf,
    folder: tempfile::TempDir,
    _servers: (ReservedPort, ChildProcess),
}

pub(super) async fn bench(rounds: usize) -> Result<()> {
    let mut rows = Vec::new();
    for workers in [1, 2, 4] {
        let mut shipped = CostStack::start(workers, Module::Shipped).await?;
        let unheld = if workers == 1 {
            Some(shipped.measure(UNHELD, rounds).await?)
        } else {
            None
        };
        let held = shipped.measure(HELD, rounds).await?;
        drop(shipped);
        let mut timed = CostStack::start(workers, Module::Timed).await?;
        if let Some(unheld) = unheld {
            rows.push(row(
                "nothing is held",
                workers,
                &unheld,
                &timed.measure(UNHELD, rounds).await?,
            ));
        }
        rows.push(row(
            "held and released",
            workers,
            &held,
            &timed.measure(HELD, rounds).await?,
        ));
    }
    write_result("flow-cost", &rows)
}

// === impl CostStack ===

impl CostStack {
    async fn start(workers: u32, module: Module) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let servers = ReservedPort::lease()?;
        let sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder.path())?;
        let arguments = super::write_files(folder.path(), &config(None))?;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut builder = Stack::builder()
            .servers(0)
            .concurrency(workers)
            .daemon_arguments(&arguments)
            .quiet();
        if module == Module::Timed {
            builder = builder.envoy_config(drill::envoy_config()?);
        }
        for address in world::addresses(1, servers.number()) {
            builder = builder.stranger(address.parse()?);
        }
        let stack = builder.start().await?;
        let bodies = overhead::write_bodies(BODY_BYTES, false, folder.path())?;
        Ok(Self {
            stack,
            module,
            bodies,
            folder,
            _servers: (servers, sink),
        })
    }

    /// Measures two cases alternately, in this number of rounds.
    async fn measure(&mut self, cases: [CostCase; 2], rounds: usize) -> Result<PairedRuns> {
        let mut runs = PairedRuns::default();
        for round in 0..rounds {
            for turn in 0..cases.len() {
                let at = (round + turn) % cases.len();
                runs[at].push(self.run(cases[at]).await?);
            }
        }
        Ok(runs)
    }

    async fn run(&mut self, case: CostCase) -> Result<CaseRun> {
        self.configure(case.seats).await?;
        let before = self.counters().await?;
        let processes = [
            self.stack.envoy.process().id(),
            self.stack.daemon()?.process().id(),
        ];
        let load = LoadRun::closed_loop(
            self.stack.address(),
            self.bodies.clone(),
            case.connections,
            SECONDS,
            processes,
        );
        let figures = LoadRun {
            query: case.query,
            ..load
        }
        .run(self.folder.path())
        .await?;
        // Workers publish their counts only at their next tick.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let after = self.counters().await?;
        let per_request = |at: usize| (after[at] - before[at]) as f64 / figures.requests as f64;
        Ok(CaseRun {
            held_share: per_request(0),
            vm_us: per_request(1) / 1_000.0,
            interrupted: per_request(2),
            figures,
        })
    }

    /// Reads the counters: held requests, nanoseconds in the VMs, and interrupted calls.
    async fn counters(&self) -> Result<[i64; 3]> {
        let held = self
            .stack
            .envoy
            .picker_stat("switchpoint_held_total")
            .await?;
        if self.module == Module::Shipped {
            return Ok([held, 0, 0]);
        }
        let spent = self.stack.envoy.picker_stat(drill::VM_SPENT).await?;
        Ok([
            held,
            spent,
            self.stack.envoy.picker_stat(drill::VM_INTERRUPTED).await?,
        ])
    }

    /// Replaces the scheduling configuration, and waits until all workers use it.
    async fn configure(&mut self, seats: Option<usize>) -> Result<()> {
        let draft = self.folder.path().join("draft");
        let file = self.folder.path().join("picker.yaml");
        let text = config(seats);
        if std::fs::read_to_string(&file)? == text {
            return Ok(());
        }
        std::fs::write(&draft, text)?;
        std::fs::rename(draft, file)?;
        tokio::time::sleep(SETTLE).await;
        Ok(())
    }
}

/// Returns a scheduling configuration that holds requests beyond `seats` at an engine. With `None`,
/// the configuration has no flow control.
fn config(seats: Option<usize>) -> String {
    let head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n";
    let plugins = "plugins:\n- type: marginal-cost-scorer\n- type: max-score-picker\n";
    let Some(seats) = seats else {
        return format!("{head}{plugins}");
    };
    format!(
        "{head}featureGates: [flowControl]\n{plugins}- {{type: concurrency-detector, parameters: {{maxConcurrency: {seats}, headroom: 0}}}}\n\
         flowControl:\n  saturationDetector: {{pluginRef: concurrency-detector}}\n  defaultRequestTTL: 120s\n"
    )
}

fn row(what: &str, workers: u32, shipped: &PairedRuns, timed: &PairedRuns) -> FlowCostRow {
    let held_share = median(
        &shipped[1]
            .iter()
            .map(|run| run.held_share)
            .collect::<Vec<_>>(),
    );
    let per_held = if held_share > 0.0 { held_share } else { 1.0 };
    let cost = |runs: &PairedRuns, figure: fn(&CaseRun) -> f64| {
        let [base, ours] = runs
            .each_ref()
            .map(|runs| runs.iter().map(figure).collect::<Vec<f64>>());
        let added = PairedDifference::between(&ours, &base);
        AddedCost {
            us: median(&ours),
            base_us: median(&base),
            added_us: added.median / per_held,
            iqr_us: added.iqr / per_held,
        }
    };
    let row = FlowCostRow {
        what: what.to_owned(),
        workers,
        requests: shipped[1].iter().map(|run| run.figures.requests).sum(),
        held_share,
        cpu: cost(shipped, |run| run.figures.cpu_us),
        vm: cost(timed, |run| run.vm_us),
        interrupted: median(
            &timed[1]
                .iter()
                .map(|run| run.interrupted)
                .collect::<Vec<_>>(),
        ),
        errors: shipped
            .iter()
            .chain(timed)
            .flatten()
            .map(|run| run.figures.errors)
            .sum(),
    };
    let said = |cost: AddedCost| {
        format!(
            "{:.1} us, base {:.1}, costs {:.1} ({:.1})",
            cost.us, cost.base_us, cost.added_us, cost.iqr_us
        )
    };
    println!(
        "{workers} workers, {what}: CPU {}; in the VM {}; {:.0} % held, {:.4} calls interrupted, {} errors",
        said(row.cpu),
        said(row.vm),
        100.0 * row.held_share,
        row.interrupted,
        row.errors
    );
    row
}
