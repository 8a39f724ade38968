//! The race in virtual time: the cells of `race-cells`, with the same sessions as in real time.

mod capacity;
mod play;
mod row;

use std::path::PathBuf;

use clap::Subcommand;
use engine_sim::EngineProfile;
use race_cells::{Cell, CellEngines, EngineSpeed};

use crate::policy::OURS;
use crate::workload::SESSION_BLOCK_TOKENS;
use crate::world::{PoolSetting, SharingMode};

/// What `simulator race` does.
#[derive(Subcommand)]
pub(crate) enum RaceTask {
    /// Plays cells with policies. Prints a line of figures for each, and writes them to FILE.
    Play {
        /// Cells, by name; by default all that can be played.
        #[arg(long, value_delimiter = ',')]
        cells: Vec<String>,
        /// Policies, by name, separated by semicolons.
        #[arg(long, value_delimiter = ';', default_values_t = play::POLICIES.map(str::to_owned))]
        policies: Vec<String>,
        /// Seeds. The requests of all are measured together.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3])]
        seeds: Vec<u64>,
        /// Seconds of arrivals. The requests of sessions of the first quarter are the cold ones.
        #[arg(long, default_value_t = 120.0)]
        seconds: f64,
        /// The file of results.
        #[arg(long, default_value = "target/bench/race-sim.json")]
        file: PathBuf,
    },
    /// Finds how many sessions a second a policy serves of each workload, and how many KV blocks
    /// the sessions need that are live at half of it.
    Capacity {
        /// The policy; the capacity of a cell is that of round robin.
        #[arg(long, default_value = "round-robin")]
        policy: String,
        /// Seeds.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3, 4, 5])]
        seeds: Vec<u64>,
    },
}

/// Most sequences that an engine runs at a time.
const SEQUENCES_MAX: usize = 24;

// === impl RaceTask ===

impl RaceTask {
    pub(crate) fn run(&self, threads: usize) -> Result<(), String> {
        match self {
            Self::Play { cells, policies, seeds, seconds, file } => {
                play::run(&play::RacePlan { cells, policies, seeds, seconds: *seconds }, threads, file)
            }
            Self::Capacity { policy, seeds } => capacity::print(policy, seeds, threads),
        }
    }
}

/// The pool of these engines.
fn setting(engines: CellEngines) -> PoolSetting {
    let mut setting = PoolSetting::plain(EngineProfile::Qwen32bH200.spec(SESSION_BLOCK_TOKENS));
    setting.replicas = engines.count;
    setting.engine.sequences_max = SEQUENCES_MAX;
    if let Some(blocks) = engines.kv_blocks {
        setting.engine.kv_blocks = blocks as usize;
    }
    if engines.speed == EngineSpeed::HalfAreHalfAsFast {
        setting.half_slowdown = 2.0;
    }
    setting
}

/// The pool of a cell, and its gateways. Those of our policy share their state; those of others
/// know only what they sent themselves.
fn cell_setting(cell: &Cell, policy: &str) -> PoolSetting {
    /// How long what a gateway shares takes to the other.
    const SHARING_MS: f64 = 10.0;
    let sharing = if policy.starts_with(OURS) { SharingMode::After(SHARING_MS) } else { SharingMode::Private };
    PoolSetting { proxies: cell.gateways, sharing, ..setting(cell.engines) }
}
