//! Compares routing policies in virtual time: `make sim`. The results are in
//! docs/reference/routing-quality.md.
//!
//! Engines are simulated; the scheduler, its plugins, the pool state and the step learner are the
//! real ones.
#![deny(clippy::indexing_slicing)]

mod campaign;
mod engine;
mod event_queue;
mod flow;
mod grid;
mod hardware;
mod learning;
mod measure;
mod policy;
mod race;
mod recovery;
mod report;
mod router;
mod scaling;
mod slo;
mod store;
mod trace;
mod validate;
mod workload;
mod world;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand};

use crate::flow::FlowCampaign;
use crate::grid::ExperimentGrid;
use crate::race::RaceTask;
use crate::scaling::{ScalingRule, TrafficShape};
use crate::slo::{SloAttainment, SloPolicy};
use crate::store::ResultStore;
use crate::workload::WorkloadKind;

#[derive(Parser)]
#[command(about = "Compares routing policies in virtual time", version)]
struct Args {
    #[command(subcommand)]
    task: SimulatorTask,
    /// Number of runs at a time; each is one thread.
    #[arg(long, global = true, default_value_t = 2)]
    threads: usize,
}

#[derive(Subcommand)]
enum SimulatorTask {
    /// Runs campaigns by name, the main one when none is named, and adds the results to FILE.
    Run {
        /// Names of the campaigns; `all` is every campaign that this binary has engines for.
        names: Vec<String>,
        /// Run only these policies, separated by semicolons.
        #[arg(long, value_delimiter = ';')]
        policies: Vec<String>,
        /// The file of results.
        #[arg(long, default_value = QUALITY)]
        file: PathBuf,
        /// Run only these shares of capacity.
        #[arg(long, value_delimiter = ',')]
        loads: Vec<f64>,
        /// Run only these seeds.
        #[arg(long, value_delimiter = ',')]
        seeds: Vec<u64>,
        /// Skip the runs that FILE has. Use it after an interruption, never after a change of code.
        #[arg(long)]
        resume: bool,
    },
    /// Finds the highest rates at which 90 % of the requests meet their SLO, and adds them to FILE.
    Rates {
        /// Run only these policies, separated by semicolons.
        #[arg(long, value_delimiter = ';')]
        policies: Vec<String>,
        /// The file of results.
        #[arg(long, default_value = QUALITY)]
        file: PathBuf,
    },
    /// Measures how long policies take to recover after a pool has changed, and adds that to FILE.
    Recover {
        /// Run only these policies, separated by semicolons.
        #[arg(long, value_delimiter = ';')]
        policies: Vec<String>,
        /// The file of results.
        #[arg(long, default_value = QUALITY)]
        file: PathBuf,
    },
    /// Writes docs/reference/routing-quality.md from the results in FILE. Replays runs of real
    /// engines for it.
    Report {
        /// The file of results.
        #[arg(long, default_value = QUALITY)]
        file: PathBuf,
        /// The folder of the page.
        #[arg(long, default_value = "docs/reference")]
        docs: PathBuf,
    },
    /// Runs requests of three SLO classes on a pool of two speeds. Prints the share of each class
    /// that meets its SLO, and adds it to FILE.
    Slo {
        /// The policies: slo, newer, default, weighed, turns; separated by semicolons, the first
        /// two with parameters.
        #[arg(long, value_delimiter = ';', default_values_t = ["slo", "slo:headroomSelectionStrategy=most", "default", "weighed", "turns"].map(str::to_owned))]
        by: Vec<String>,
        /// The load, as a share of the pool's capacity.
        #[arg(long, default_value_t = 0.9)]
        load: f64,
        /// The TPOT SLO of critical requests, ms. Only results of the default are added to FILE.
        #[arg(long, default_value_t = slo::CRITICAL_TPOT_MS)]
        critical_tpot_ms: f64,
        /// Seeds.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3, 4, 5])]
        seeds: Vec<u64>,
        /// The file of results.
        #[arg(long, default_value = QUALITY)]
        file: PathBuf,
    },
    /// Runs chat with waves of batch requests, with and without flow control. Prints a line of
    /// figures for each class, and writes them to FILE.
    Flow {
        /// The scenarios: prompts, outputs, prefixes, unlike, pd, unknown-lengths, tenants,
        /// lengths, bands, starvation, two-engines.
        #[arg(long, value_delimiter = ',', default_values_t = ["prompts", "outputs", "prefixes"].map(str::to_owned))]
        scenarios: Vec<String>,
        /// The policies: none, ours, oracle, llm-d-default, llm-d-tuned, dynamo; separated by
        /// semicolons. The last two take their limit after a colon: `llm-d-tuned:100`.
        #[arg(long, value_delimiter = ';', default_values_t = flow::POLICIES.map(str::to_owned))]
        policies: Vec<String>,
        /// Loads, as shares of capacity; chat is 0.5 of it.
        #[arg(long, value_delimiter = ',', default_values_t = [0.7, 1.0, 1.3, 2.0])]
        loads: Vec<f64>,
        /// Seeds.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3, 4, 5])]
        seeds: Vec<u64>,
        /// Seconds of arrivals.
        #[arg(long, default_value_t = 300.0)]
        seconds: f64,
        /// Proxies.
        #[arg(long, default_value_t = 1)]
        proxies: usize,
        /// How long what a proxy shares takes to the others, ms.
        #[arg(long, default_value_t = flow::SHARING_MS)]
        sharing_ms: f64,
        /// Let the proxies hear nothing of each other.
        #[arg(long)]
        alone: bool,
        /// The file of results.
        #[arg(long, default_value = "target/bench/flow-control.json")]
        file: PathBuf,
    },
    /// Writes docs/data/flow-control.json and the tables of docs/reference/flow-control.md from the
    /// results of `flow`.
    FlowPage {
        /// The files of results.
        #[arg(
            long,
            value_delimiter = ',',
            default_value = "target/bench/flow-control.json"
        )]
        files: Vec<PathBuf>,
    },
    /// Plays two minutes of batch waves with and without flow control, and writes
    /// docs/data/flow-wave.json and the picture of docs/how-to/flow-control.md.
    FlowWave,
    /// Runs the campaign `scaling`: share in time and GPU-hours of each signal to scale by.
    Scale {
        /// Run only these signals.
        #[arg(long, value_delimiter = ',')]
        signals: Vec<String>,
        /// Run only these shapes of traffic.
        #[arg(long, value_delimiter = ',')]
        traffic: Vec<String>,
        /// Run only these start-up delays, s.
        #[arg(long, value_delimiter = ',', default_values_t = scaling::STARTUPS_S)]
        startups: Vec<f64>,
        /// Seeds. Those of the published tables are 4 and 5; tune on others.
        #[arg(long, value_delimiter = ',', default_values_t = [4, 5])]
        seeds: Vec<u64>,
        /// Write the results to docs/data/scaling.json and docs/how-to/scale.md.
        #[arg(long)]
        publish: bool,
    },
    /// Plays the cells of the race in virtual time.
    Race {
        #[command(subcommand)]
        task: RaceTask,
    },
    /// Runs policies over workloads and prints a line of figures for each.
    Try {
        /// Workloads, by name; by default those of the campaign.
        #[arg(long, value_delimiter = ',')]
        workloads: Vec<String>,
        /// Shares of capacity.
        #[arg(long, value_delimiter = ',', default_values_t = [0.7])]
        loads: Vec<f64>,
        /// Policies, by name, separated by semicolons.
        #[arg(long, value_delimiter = ';')]
        policies: Vec<String>,
        /// Seeds. Those of the published tables are 1 to 5; tune on others.
        #[arg(long, value_delimiter = ',', default_values_t = [101])]
        seeds: Vec<u64>,
        /// The campaign that has the pool.
        #[arg(long, default_value = campaign::MAIN_TABLE)]
        setting: String,
    },
}

/// Guesses of a fit to a real engine's run, for each budget and number of sequences. They take a
/// few seconds.
const VALIDATION_TRIES: usize = 150;

/// Relative to the root of the repository, where `make` runs.
const QUALITY: &str = "target/bench/quality.json";

/// The results of part `quality` of `make bench`, in the same folder.
const QUALITY_REAL: &str = "quality-real.json";

/// The results of the campaign `scaling`, and their page.
const SCALING: &str = "docs/data/scaling.json";
const SCALING_PAGE: &str = "docs/how-to/scale.md";

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "simulator: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<(), String> {
    match args.task {
        SimulatorTask::Run {
            names,
            policies,
            loads,
            seeds,
            file,
            resume,
        } => campaigns(
            &names,
            (&policies, &loads, &seeds),
            (&file, resume),
            args.threads,
        ),
        SimulatorTask::Rates { policies, file } => {
            let rates = campaign::highest_rates(&policies, args.threads)?;
            keep(
                &file,
                ResultStore {
                    rates,
                    ..ResultStore::default()
                },
            )
        }
        SimulatorTask::Recover { policies, file } => {
            let recoveries = campaign::recoveries(&policies, args.threads)?;
            keep(
                &file,
                ResultStore {
                    recoveries,
                    ..ResultStore::default()
                },
            )
        }
        SimulatorTask::Report { file, docs } => report::write(
            &ResultStore::read(&file)?,
            &validate::all(VALIDATION_TRIES)?,
            &file.with_file_name(QUALITY_REAL),
            &docs,
        ),
        SimulatorTask::Slo {
            by,
            load,
            critical_tpot_ms,
            seeds,
            file,
        } => {
            let slo = attainment(&by, (load, critical_tpot_ms), &seeds, args.threads)?;
            if critical_tpot_ms == slo::CRITICAL_TPOT_MS {
                keep(
                    &file,
                    ResultStore {
                        slo,
                        ..ResultStore::default()
                    },
                )
            } else {
                Ok(())
            }
        }
        SimulatorTask::Flow {
            scenarios,
            policies,
            loads,
            seeds,
            seconds,
            proxies,
            sharing_ms,
            alone,
            file,
        } => FlowCampaign {
            scenarios,
            policies,
            loads,
            seeds,
            seconds,
            proxies,
            sharing_ms,
            alone,
        }
        .run(args.threads, &file),
        SimulatorTask::FlowPage { files } => flow::publish(&files),
        SimulatorTask::FlowWave => flow::publish_wave(args.threads),
        SimulatorTask::Scale {
            signals,
            traffic,
            startups,
            seeds,
            publish,
        } => {
            let rules: Vec<ScalingRule> =
                selected(&ScalingRule::ALL, &signals, |rule| rule.name())?;
            let shapes: Vec<TrafficShape> =
                selected(&TrafficShape::ALL, &traffic, |shape| shape.name())?;
            let results = scaling::campaign(&rules, &shapes, &startups, &seeds, args.threads)?;
            if publish {
                scaling::publish(&results, Path::new(SCALING), Path::new(SCALING_PAGE))
            } else {
                Ok(())
            }
        }
        SimulatorTask::Race { task } => task.run(args.threads),
        SimulatorTask::Try {
            workloads,
            loads,
            policies,
            seeds,
            setting,
        } => {
            let campaign = named(&setting)?;
            let kinds = if workloads.is_empty() {
                campaign.kinds.clone()
            } else {
                kinds(&workloads)?
            };
            let grid = ExperimentGrid {
                kinds,
                loads,
                policies,
                seeds,
                ..campaign
            };
            let mut out = std::io::stdout().lock();
            let head = [
                "TTFT mean",
                "p50",
                "p90",
                "p99",
                "E2E mean",
                "TPOT p99",
                "SLO",
                "hits",
            ];
            let _ = writeln!(
                out,
                "{:<18}{:>5} {:<36}{:>5}{}",
                "workload",
                "load",
                "policy",
                "seed",
                head.map(|h| format!("{h:>10}")).concat()
            );
            grid.run(args.threads, &[], |cells| {
                for cell in cells {
                    let m = &cell.measures;
                    let figures = [
                        m.ttft_mean,
                        m.ttft_p50,
                        m.ttft_p90,
                        m.ttft_p99,
                        m.e2e_mean,
                        m.tpot_p99,
                    ]
                    .map(|ms| format!("{ms:>10.1}"));
                    let shares = [m.slo, m.hits].map(|share| format!("{share:>10.4}"));
                    let figures = figures.concat();
                    let shares = shares.concat();
                    let _ = writeln!(
                        out,
                        "{:<18}{:>5} {:<36}{:>5}{figures}{shares}",
                        cell.workload, cell.load, cell.policy, cell.seed
                    );
                }
                Ok(())
            })
        }
    }
}

/// Adds results to the file.
fn keep(file: &Path, new: ResultStore) -> Result<(), String> {
    let mut store = ResultStore::read(file)?;
    store.put(new);
    store.write(file)
}

fn campaigns(
    names: &[String],
    (policies, loads, seeds): (&[String], &[f64], &[u64]),
    (file, resume): (&Path, bool),
    threads: usize,
) -> Result<(), String> {
    let wanted: Vec<ExperimentGrid> = match names {
        [] => vec![named(campaign::MAIN_TABLE)?],
        names if names.iter().any(|name| name == "all") => campaign::all()
            .into_iter()
            .filter(|grid| grid.setting.model.is_there())
            .collect(),
        names => names
            .iter()
            .map(|name| named(name))
            .collect::<Result<_, _>>()?,
    };
    let began = Instant::now();
    for mut grid in wanted {
        if !policies.is_empty() {
            grid.policies = policies.to_vec();
        }
        if !loads.is_empty() {
            grid.loads = loads.to_vec();
        }
        if !seeds.is_empty() {
            grid.seeds = seeds.to_vec();
        }
        let known = if resume {
            ResultStore::read(file)?.cells
        } else {
            Vec::new()
        };
        let pieces = grid.kinds.len() * grid.seeds.len();
        let mut done = 0;
        grid.run(threads, &known, |cells| {
            done += 1;
            let last = cells.last().map_or(String::new(), |cell| {
                format!("{}, seed {}", cell.workload, cell.seed)
            });
            let since = began.elapsed().as_secs();
            let _ = writeln!(
                std::io::stderr(),
                "{since:>5} s  {} {done} of {pieces}: {last}, {} runs",
                grid.name,
                cells.len()
            );
            keep(
                file,
                ResultStore {
                    cells,
                    ..ResultStore::default()
                },
            )
        })?;
    }
    Ok(())
}

/// Prints the share of each class that meets its SLO, over all seeds and of the worst seed.
fn attainment(
    by: &[String],
    (load, critical_tpot_ms): (f64, f64),
    seeds: &[u64],
    threads: usize,
) -> Result<Vec<SloAttainment>, String> {
    let rate = load * slo::capacity()?;
    let mut out = std::io::stdout().lock();
    let mut all = Vec::new();
    let _ = writeln!(
        out,
        "{rate:.1} requests/s, seeds {seeds:?}: in time % (of the worst seed), shed %"
    );
    for name in by {
        let policy = SloPolicy::named(name)?;
        let runs = grid::parallel(threads, seeds, |seed| {
            slo::run(&policy, (rate, critical_tpot_ms), *seed)
        })?;
        let _ = write!(out, "{name:<44}");
        for slo::SloClass { name: class, .. } in slo::CLASSES {
            let of: Vec<slo::ClassOutcome> = runs
                .iter()
                .filter_map(|run| run.get(class).copied())
                .collect();
            let in_time = 100.0 * slo::share(&of, |o| o.in_time);
            let shed = 100.0 * slo::share(&of, |o| o.shed);
            let worst = 100.0 * of.iter().map(|o| o.attainment()).fold(1.0, f64::min);
            let _ = write!(out, "{class:>10} {in_time:>5.1} ({worst:>5.1}) {shed:>5.1}");
            let by = name.clone();
            let class = class.to_owned();
            all.extend(of.iter().zip(seeds).map(|(&outcome, &seed)| SloAttainment {
                by: by.clone(),
                load,
                class: class.clone(),
                seed,
                outcome,
            }));
        }
        let _ = writeln!(out);
    }
    Ok(all)
}

/// The campaign of this name.
fn named(name: &str) -> Result<ExperimentGrid, String> {
    let known = || {
        campaign::all()
            .iter()
            .map(|grid| grid.name.clone())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let found = campaign::all().into_iter().find(|grid| grid.name == name);
    found.ok_or_else(|| format!("no campaign is called `{name}`; there are {}", known()))
}

/// The members of `all` with these names; all members if there is no name.
fn selected<T: Copy>(
    all: &[T],
    names: &[String],
    name: fn(T) -> &'static str,
) -> Result<Vec<T>, String> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    let find = |wanted: &String| all.iter().copied().find(|one| name(*one) == wanted);
    names
        .iter()
        .map(|wanted| find(wanted).ok_or_else(|| format!("there is no `{wanted}`")))
        .collect()
}

fn kinds(names: &[String]) -> Result<Vec<WorkloadKind>, String> {
    names
        .iter()
        .map(|name| {
            WorkloadKind::all()
                .find(|kind| kind.name() == name)
                .ok_or_else(|| format!("no workload is called `{name}`"))
        })
        .collect()
}
