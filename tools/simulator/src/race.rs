//! The race of routers in virtual time. The simulator plays the cells (workload and pool) of the
//! crate `race-cells`, with the same sessions as the race in real time.

mod capacity;
mod compare;
mod fleet;
mod play;
mod row;
mod table;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use engine_sim::EngineProfile;
use race_cells::{Cell, CellChange, CellEngines, EngineSpeed};

use crate::policy::{OURS, RoutingPolicy};
use crate::results;
use crate::workload::SESSION_BLOCK_TOKENS;
use crate::world::{Failover, PoolSetting, SettingChange, SharingMode};

/// What `simulator race` does.
#[derive(Subcommand)]
pub(crate) enum RaceTask {
    /// Plays cells with policies. Prints a line of figures for each, and writes them to FILE.
    Play {
        /// Names of the cells [default: all].
        #[arg(long, value_delimiter = ',')]
        cells: Vec<String>,
        /// Routers of the race or policies, by name, separated by semicolons.
        #[arg(long, value_delimiter = ';', default_values_t = play::ROUTERS.map(str::to_owned))]
        routers: Vec<String>,
        /// Seeds. The requests of all seeds are measured together.
        #[arg(long, value_delimiter = ',', default_values_t = [101, 102])]
        seeds: Vec<u64>,
        /// Runs with each seed. Later runs have the same sessions a little later, and other random
        /// numbers in the routers.
        #[arg(long, default_value_t = 10)]
        repeats: u64,
        /// Seconds of arrivals. Cold requests are those of sessions that arrive in the first
        /// quarter.
        #[arg(long, default_value_t = 120.0)]
        seconds: f64,
        /// The file of results.
        #[arg(long, default_value = PLAYED)]
        file: PathBuf,
    },
    /// Prints the figures of a file of results as a table in Markdown.
    Table {
        /// The file of results.
        #[arg(long, default_value = PLAYED)]
        file: PathBuf,
    },
    /// Compares results with those of the race in real time. Prints a table in Markdown.
    Compare {
        /// The results of the race.
        #[arg(long, default_value = RACED)]
        race: PathBuf,
        /// The file of results.
        #[arg(long, default_value = PLAYED)]
        file: PathBuf,
    },
    /// Writes the table of `compare` into its page.
    Publish {
        /// The results of the race.
        #[arg(long, default_value = RACED)]
        race: PathBuf,
        /// The file of results.
        #[arg(long, default_value = PLAYED)]
        file: PathBuf,
        /// The page.
        #[arg(long, default_value = "docs/reference/race-simulator.md")]
        page: PathBuf,
    },
    /// Plays a large pool behind several gateways, in the shape of pull request 2438 of smg: the
    /// share of cached tokens, and how evenly engines get requests.
    Fleet {
        /// Engines.
        #[arg(long, default_value_t = 60)]
        engines: usize,
        /// Gateways.
        #[arg(long, default_value_t = 8)]
        gateways: usize,
        /// Loads as shares of what round robin can serve, percent.
        #[arg(long, value_delimiter = ',', default_values_t = [50, 100])]
        loads: Vec<u32>,
        /// Seeds.
        #[arg(long, value_delimiter = ',', default_values_t = [101, 102])]
        seeds: Vec<u64>,
        /// Seconds of arrivals.
        #[arg(long, default_value_t = 180.0)]
        seconds: f64,
    },
    /// Finds how many sessions of each workload a policy serves each second, and how many KV blocks
    /// the live sessions need at half of that rate.
    Capacity {
        /// The policy. The capacity of a cell is that of round robin.
        #[arg(long, default_value = "round-robin")]
        policy: String,
        /// Seeds.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3, 4, 5])]
        seeds: Vec<u64>,
    },
}

/// The file with the results of the race in real time.
const RACED: &str = "docs/data/race.json";

/// The file into which `play` writes its results.
const PLAYED: &str = "target/bench/race-sim.json";

/// The daemon's default time between two scrapes of an engine, in ms: with work, and without work.
const BUSY_SCRAPE_MS: f64 = 100.0;
const IDLE_SCRAPE_MS: f64 = 1_000.0;

/// The maximum number of sequences that an engine runs at the same time.
const SEQUENCES_MAX: usize = 24;

// === impl RaceTask ===

impl RaceTask {
    pub(crate) fn run(&self, threads: usize) -> Result<(), String> {
        match self {
            Self::Play {
                cells,
                routers,
                seeds,
                repeats,
                seconds,
                file,
            } => play::run(
                &play::RacePlan {
                    cells,
                    routers,
                    seeds,
                    repeats: *repeats,
                    seconds: *seconds,
                },
                threads,
                file,
            ),
            Self::Table { file } => print(&table::text(&results::read(file)?)?),
            Self::Compare { race, file } => print(&compare::text(
                &results::read(race)?,
                &results::read(file)?,
            )?),
            Self::Publish { race, file, page } => {
                let compared = compare::text(&results::read(race)?, &results::read(file)?)?;
                publish(page, &compared)
            }
            Self::Fleet {
                engines,
                gateways,
                loads,
                seeds,
                seconds,
            } => {
                let fleet = |load_percent| fleet::RaceFleet {
                    engines: *engines,
                    gateways: *gateways,
                    seconds: *seconds,
                    load_percent,
                };
                fleet::print_head();
                loads
                    .iter()
                    .try_for_each(|load| fleet::print(&fleet(*load), seeds, threads))
            }
            Self::Capacity { policy, seeds } => capacity::print(policy, seeds, threads),
        }
    }
}

fn setting(engines: CellEngines) -> PoolSetting {
    let mut setting = PoolSetting::plain(EngineProfile::Qwen32bH200.spec(SESSION_BLOCK_TOKENS));
    setting.replicas = engines.count;
    setting.scrape_ms = BUSY_SCRAPE_MS;
    setting.idle_scrape_ms = IDLE_SCRAPE_MS;
    setting.engine.sequences_max = SEQUENCES_MAX;
    if let Some(blocks) = engines.kv_blocks {
        setting.engine.kv_blocks = blocks as usize;
    }
    if engines.speed == EngineSpeed::HalfAreHalfAsFast {
        setting.half_slowdown = 2.0;
    }
    setting
}

fn print(text: &str) -> Result<(), String> {
    std::io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(|error| error.to_string())
}

/// Replaces the table between the two marks in the page.
fn publish(page: &Path, table: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", page.display());
    let text = std::fs::read_to_string(page).map_err(failed)?;
    let [begin, end] = ["begin", "end"].map(|mark| format!("<!-- compared: {mark} -->"));
    let (before, rest) = text
        .split_once(&begin)
        .ok_or_else(|| format!("the page has no mark `{begin}`"))?;
    let (_, after) = rest
        .split_once(&end)
        .ok_or_else(|| format!("the page has no mark `{end}`"))?;
    let table = table.trim_end();
    std::fs::write(page, format!("{before}{begin}\n\n{table}\n\n{end}{after}")).map_err(failed)
}

/// The time until the other gateways receive the data that a gateway shares, in ms.
const SHARING_MS: f64 = 10.0;

/// Returns the pool of a cell, and its gateways. Gateways with Switchpoint's picker share their
/// state. Any other gateway knows only the requests that it sent itself.
fn cell_setting(cell: &Cell, router: &str, arrivals_ms: f64) -> PoolSetting {
    let is_ours = router.starts_with(OURS) || router.starts_with("llm-d");
    let sharing = if is_ours {
        SharingMode::After(SHARING_MS)
    } else {
        SharingMode::Private
    };
    let mut setting = PoolSetting {
        proxies: cell.gateways,
        sharing,
        ..setting(cell.engines)
    };
    if cell.change == CellChange::KillAddRestart {
        // Envoy waits at most 5 ms before its first retry. Every second, the daemon also scrapes
        // engines that do not answer, so an engine gets requests again soon after a restart. smg
        // waits 50 ms before its first retry, and checks the health of workers every minute. Two
        // checks must succeed before smg uses a worker again, so smg does not use a restarted
        // engine again during the run.
        let failover = if is_ours {
            Failover {
                retry_ms: 5.0,
                readmits: true,
            }
        } else {
            Failover {
                retry_ms: 50.0,
                readmits: false,
            }
        };
        setting.replicas += 1;
        setting.change = Some(SettingChange {
            arrivals_ms,
            failover,
        });
    }
    setting
}

/// Returns the policy for a name, which is the name of a router in the race or of a policy.
fn policy_of(router: &str) -> Result<RoutingPolicy, String> {
    RoutingPolicy::named(match router {
        "vllm-cache-aware" => "vllm-router",
        "vllm-round-robin" | "envoy-round-robin" => "round-robin",
        "llm-d-default" => "2/2/3",
        "llm-d-recommended" => "affinity+token-load:peakPrefillThroughput=11800",
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Workload;
    use crate::world::{self, RequestOutcome};

    #[test]
    fn a_table_replaces_what_is_between_its_marks() {
        let page = std::env::temp_dir().join(format!("race-page-{}.md", std::process::id()));
        let old = "before <!-- compared: begin -->old<!-- compared: end --> after";
        std::fs::write(&page, old).unwrap();
        publish(&page, "new\n").unwrap();
        let text = std::fs::read_to_string(&page).unwrap();
        std::fs::write(&page, "no mark").unwrap();
        assert!(publish(&page, "new").is_err());
        std::fs::remove_file(&page).unwrap();
        assert_eq!(
            text,
            "before <!-- compared: begin -->\n\nnew\n\n<!-- compared: end --> after"
        );
    }

    #[test]
    fn an_engine_that_died_gets_no_request_and_one_that_is_added_or_returns_does() {
        const ARRIVALS_MS: f64 = 60_000.0;
        let cell = Cell::find("change").unwrap();
        let workload = Workload::of_sessions(&cell.sessions(1, ARRIVALS_MS / 1e3));
        for (router, returns) in [("ours", true), ("smg", false)] {
            let setting = cell_setting(&cell, router, ARRIVALS_MS);
            let outcomes = world::run(&workload, &policy_of(router).unwrap(), &setting, 1).unwrap();
            let sent = |engine: usize, [from, to]: [f64; 2]| {
                let is_it = |outcome: &&RequestOutcome| {
                    outcome.engine == engine && (from..to).contains(&(outcome.sent / ARRIVALS_MS))
                };
                outcomes.iter().filter(is_it).count()
            };
            assert_eq!(
                (
                    sent(0, [0.25, 9.0]),
                    sent(8, [0.0, 0.5]),
                    sent(1, [0.75, 0.83])
                ),
                (0, 0, 0),
                "{router}"
            );
            assert!(
                sent(0, [0.0, 0.25]) > 0 && sent(8, [0.5, 9.0]) > 0,
                "{router}"
            );
            assert_eq!(sent(1, [0.83, 9.0]) > 0, returns, "{router}");
            let failed: Vec<_> = outcomes
                .iter()
                .filter(|outcome| outcome.has_failed)
                .collect();
            assert!(
                (1..=40).contains(&failed.len())
                    && failed.iter().all(|outcome| outcome.e2e == world::FAILED_MS),
                "{router}"
            );
            assert!(
                outcomes.iter().all(|outcome| outcome.e2e > 0.0),
                "every request ends"
            );
        }
    }
}
