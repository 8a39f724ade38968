//! Plays routing, flow control and scaling in virtual time.
//!
//! Only the engines are simulated. The scheduler, its plugins, the pool state and the step learner
//! are the product's code.
#![deny(clippy::indexing_slicing)]

mod engine;
mod event_queue;
mod flow;
mod hardware;
mod learning;
mod parallel;
mod policy;
mod quantile;
mod race;
mod results;
mod router;
mod scaling;
mod trace;
mod workload;
mod world;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::flow::FlowCampaign;
use crate::race::RaceTask;
use crate::scaling::ScalingCampaign;

#[derive(Parser)]
#[command(
    about = "Plays routing, flow control and scaling in virtual time",
    version
)]
struct Args {
    #[command(subcommand)]
    task: SimulatorTask,
    /// Number of runs at a time; each is one thread.
    #[arg(long, global = true, default_value_t = 2)]
    threads: usize,
}

#[derive(Subcommand)]
enum SimulatorTask {
    /// Plays the cells of the race.
    Race {
        #[command(subcommand)]
        task: RaceTask,
    },
    /// Runs chat with waves of batch requests, with and without flow control. Prints a line of
    /// figures for each class, and writes them to FILE.
    Flow(FlowCampaign),
    /// Prints the share in time and the GPU-hours of each scaling signal.
    Scale(ScalingCampaign),
}

fn main() -> ExitCode {
    let Args { task, threads } = Args::parse();
    let outcome = match task {
        SimulatorTask::Race { task } => task.run(threads),
        SimulatorTask::Flow(campaign) => campaign.run(threads),
        SimulatorTask::Scale(campaign) => campaign.run(threads),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "simulator: {error}");
            ExitCode::FAILURE
        }
    }
}
