//! The race compares Switchpoint with real rivals, on the same engines and with the same requests.
//!
//! | command | does |
//! |---|---|
//! | `run` | runs cells, seeds and routers that are not in `target/race` yet |
//! | `page` | judges the runs: `docs/data/race.json`, `docs/reference/race.md` and its pictures |
//! | `list` | prints cells and routers |
//!
//! Engines and rivals are real processes with real sockets, and only the GPU is simulated. The race
//! starts each router with its engines in a network namespace of its own, which needs root.
#![allow(clippy::print_stdout, reason = "this program talks to a person")]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use race_cells::Cell;
use testbed::{Result, root};

mod campaign;
mod judge;
mod mocker;
mod page;
mod play;
mod player;
mod record;
mod recording;
mod results;
mod router;
mod serving;

use campaign::{Campaign, RacePart, RouterGroup};

/// The seeds of the published results. Policies are tuned with the seeds 1 to 20, so that no policy
/// is fitted to the seeds of the published results.
const JUDGING: std::ops::RangeInclusive<u64> = 101..=105;
/// The only seed of the published cells, of Dynamo's cells, and of the routers other than
/// Switchpoint and smg.
const OTHERS_SEED: u64 = 101;

const STOPPED: &str =
    "stopped; the runs that had ended are kept, and the same command goes on from there";

/// Compares routers on the same engines with the same requests.
#[derive(Debug, Parser)]
#[command(about, long_about = None)]
struct RaceArgs {
    #[command(subcommand)]
    command: RaceCommand,
}

#[derive(Debug, Subcommand)]
enum RaceCommand {
    /// Run the cells that are not in the folder yet; you may stop the race at any time and start it
    /// again
    Run(RunArgs),
    /// Judge the runs -> docs/data/race.json, docs/reference/race.md
    Page(FolderArgs),
    /// Print the cells and the routers
    List,
    /// Play one cell with one router, in this network namespace
    #[command(hide = true)]
    Play(PlayArgs),
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// The folder of the runs
    #[arg(long, default_value = "target/race")]
    folder: PathBuf,
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    folder: FolderArgs,

    /// Run only two cells with one seed, in 10 minutes; the whole race takes some 2 hours
    #[arg(long)]
    quick: bool,

    /// Only these cells
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    cells: Vec<String>,

    /// Run only these seeds [default: 101 to 105, for judging; use 1 to 20 for tuning]
    #[arg(long, value_delimiter = ',', value_name = "N,...")]
    seeds: Vec<u64>,

    /// Run these routers side by side, in place of the groups of the race. Our policy with other
    /// parameters: ours:ttftWeight=3/queueExternality=0
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    routers: Vec<String>,

    /// Seconds in which sessions arrive; each session runs to its end
    #[arg(long, default_value_t = 120.0, value_name = "S")]
    arrivals_s: f64,

    /// Cells and seeds that run at the same time, three stacks each. Late runs are repeated, so
    /// take fewer on a busy machine
    #[arg(long, default_value_t = 2, value_name = "N")]
    at_once: usize,
}

#[derive(Debug, Args)]
struct PlayArgs {
    #[arg(long)]
    cell: String,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    router: String,
    #[arg(long)]
    arrivals_s: f64,
    #[arg(long)]
    side_by_side: usize,
    #[arg(long)]
    out: PathBuf,
}

fn main() -> ExitCode {
    match run(RaceArgs::parse().command) {
        Ok(code) => code,
        Err(error) => {
            println!("race: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: RaceCommand) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    match command {
        RaceCommand::Run(args) => runtime.block_on(run_campaign(&args)),
        RaceCommand::Page(args) => {
            page::write(&root().join(args.folder), &root().join("docs")).map(|()| ExitCode::SUCCESS)
        }
        RaceCommand::List => {
            Cell::all()
                .for_each(|cell| println!("cell    {:16} {}", cell.name, page::arrivals_of(&cell)));
            RouterGroup::all().for_each(|group| {
                println!("routers {:16} {}", group.name, group.routers.join(" "));
            });
            Ok(ExitCode::SUCCESS)
        }
        RaceCommand::Play(args) => {
            let cell = cell_named(&args.cell)?;
            let run = runtime.block_on(play::play(
                &cell,
                args.seed,
                &args.router,
                args.arrivals_s,
                args.side_by_side,
            ))?;
            run.write(&args.out).map(|()| ExitCode::SUCCESS)
        }
    }
}

async fn run_campaign(args: &RunArgs) -> Result<ExitCode> {
    let folder = root().join(&args.folder.folder);
    let campaign = Campaign {
        folder,
        arrivals_s: args.arrivals_s,
        parts: args.parts()?,
        at_once: args.at_once,
    };
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let outcome = tokio::select! {
        outcome = campaign.run(|line| println!("{line}")) => outcome?,
        // Returning from this function ends all runs in flight.
        _ = tokio::signal::ctrl_c() => return Err(STOPPED.into()),
        _ = terminate.recv() => return Err(STOPPED.into()),
    };
    outcome
        .skipped
        .iter()
        .for_each(|skipped| println!("SKIPPED {skipped}"));
    println!(
        "{} runs made, {} were there, {} skipped",
        outcome.made,
        outcome.kept,
        outcome.skipped.len()
    );
    Ok(if outcome.made + outcome.kept > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn cell_named(name: &str) -> Result<Cell> {
    let names = || {
        Cell::all()
            .map(|cell| cell.name)
            .collect::<Vec<_>>()
            .join(" ")
    };
    Cell::find(name).ok_or_else(|| format!("there is no cell `{name}`; cells: {}", names()).into())
}

// === impl RunArgs ===

impl RunArgs {
    /// Returns the cells, seeds and routers to run, in order. A seed runs in all cells before the
    /// next seed begins, so that the first results come early.
    fn parts(&self) -> Result<Vec<RacePart>> {
        let cells = match (self.cells.is_empty(), self.quick) {
            (false, _) => self
                .cells
                .iter()
                .map(|name| cell_named(name))
                .collect::<Result<Vec<_>>>()?,
            (true, true) => vec![cell_named("agents-50")?, cell_named("tenants-tight")?],
            (true, false) => Cell::judged().chain(Cell::DYNAMO).collect(),
        };
        let seeds = match (self.seeds.is_empty(), self.quick) {
            (false, _) => self.seeds.clone(),
            (true, true) => vec![1],
            (true, false) => JUDGING.collect(),
        };
        let of_all_seeds = |cells: &[Cell], group: &RouterGroup| -> Vec<RacePart> {
            seeds
                .iter()
                .flat_map(|seed| {
                    cells.iter().map(|cell| RacePart {
                        cell: *cell,
                        seed: *seed,
                        group: group.clone(),
                    })
                })
                .collect()
        };
        if !self.routers.is_empty() {
            return Ok(of_all_seeds(&cells, &self.chosen_routers()?));
        }
        let (dynamo, ours): (Vec<Cell>, Vec<Cell>) = cells.into_iter().partition(Cell::is_dynamo);
        let mut parts = of_all_seeds(&ours, &RouterGroup::core());
        if !self.quick && seeds.contains(&OTHERS_SEED) {
            let once = |cell: &Cell, group| RacePart {
                cell: *cell,
                seed: OTHERS_SEED,
                group,
            };
            let half = ours.iter().filter(|cell| cell.name.ends_with("-50"));
            parts
                .extend(half.flat_map(|cell| RouterGroup::others().map(|group| once(cell, group))));
            if self.cells.is_empty() {
                parts.extend(
                    Cell::PUBLISHED
                        .iter()
                        .map(|cell| once(cell, RouterGroup::core())),
                );
            }
            parts.extend(dynamo.iter().map(|cell| once(cell, RouterGroup::dynamo())));
        }
        Ok(parts)
    }

    fn chosen_routers(&self) -> Result<RouterGroup> {
        // A comma separates routers on the command line, so a slash separates the parameters of a
        // router.
        let routers: Vec<String> = self
            .routers
            .iter()
            .map(|router| router.replace('/', ","))
            .collect();
        for router in &routers {
            router::RouterKind::named(router)?;
        }
        Ok(RouterGroup {
            name: "chosen",
            routers,
        })
    }
}
