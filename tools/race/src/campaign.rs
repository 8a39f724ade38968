//! Runs the cells of the race, several at the same time, with the routers of a cell side by side.
//!
//! Each router runs with its engines in its own process and network namespaces, so it can use all
//! ports and shares only the cores. The campaign does not repeat a run whose record is on disk, so
//! a campaign that was stopped continues where it was.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use race_cells::Cell;
use testbed::Result;
use tokio::time::timeout;

use crate::mocker::MockerEngines;
use crate::record::RunRecord;
use crate::router::RouterKind;

/// The maximum time of a run after the last arrival. No session takes so long unless the router
/// hangs.
const ENDING: Duration = Duration::from_secs(900);

/// The maximum number of attempts for a router that runs alone. An attempt is repeated if the
/// machine was too slow.
const ROUNDS_ALONE: usize = 3;

/// A shell command that enables the loopback interface of the new network namespace, and then
/// replaces the shell by the program.
const IN_NAMESPACE: &str = "ip link set lo up && exec \"$0\" \"$@\"";

/// Like [`IN_NAMESPACE`], but also makes the receiver of a TCP segment acknowledge the segment
/// immediately. Dynamo's frontend does not set TCP_NODELAY, so its next tokens on a kept connection
/// would wait up to 40 ms for the acknowledgement.
const IN_DYNAMO_NAMESPACE: &str = concat!(
    "ip link set lo up && for to in 127.0.0.0/8 127.0.0.1; do ",
    "ip route change local $to dev lo table local proto kernel scope host src 127.0.0.1 quickack 1 || exit; done && ",
    "exec \"$0\" \"$@\""
);

/// Routers that run at the same time, so that a change in the machine's speed affects all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterGroup {
    /// The name of the group's folder.
    pub name: &'static str,
    /// The names of the cell's routers. The first is Switchpoint.
    pub routers: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct Campaign {
    /// The folder for the records of the runs.
    pub folder: PathBuf,
    /// The length of the arrivals, in s.
    pub arrivals_s: f64,
    /// The parts to run, in order.
    pub parts: Vec<RacePart>,
    /// The number of parts that run at the same time, at least 1.
    pub at_once: usize,
}

/// One cell with one seed and the routers that run side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct RacePart {
    pub cell: Cell,
    /// The seed of the cell's sessions.
    pub seed: u64,
    pub group: RouterGroup,
}

#[derive(Clone, Debug, Default)]
pub struct CampaignOutcome {
    /// The number of runs that were played and are in time.
    pub made: usize,
    /// The number of runs whose records were already on disk.
    pub kept: usize,
    /// The routers that have no run, each with the reason.
    pub skipped: Vec<String>,
}

// === impl RouterGroup ===

impl RouterGroup {
    /// Returns the group that runs in every cell with every seed: Switchpoint twice, and the
    /// fastest rival.
    #[must_use]
    pub fn core() -> Self {
        Self::new("core", &["ours", "ours-again", "smg"])
    }

    /// Returns the groups in which each other router runs beside Switchpoint. A full race runs them
    /// with one seed, in the cells at half load.
    #[must_use]
    pub fn others() -> [Self; 2] {
        [
            Self::new(
                "vllm-router",
                &["ours", "vllm-cache-aware", "vllm-round-robin"],
            ),
            Self::new(
                "envoy",
                &[
                    "ours",
                    "llm-d-default",
                    "llm-d-recommended",
                    "envoy-round-robin",
                ],
            ),
        ]
    }

    /// Returns the group of routers that runs in front of Dynamo's engines, with one seed.
    #[must_use]
    pub fn dynamo() -> Self {
        Self::new("dynamo", &["ours", "smg", "dynamo-kv"])
    }

    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::core())
            .chain(Self::others())
            .chain([Self::dynamo()])
    }

    #[must_use]
    pub fn new(name: &'static str, routers: &[&str]) -> Self {
        Self {
            name,
            routers: routers.iter().map(ToString::to_string).collect(),
        }
    }
}

// === impl RacePart ===

impl RacePart {
    /// Whether the routers of this part run one after the other, while no other part runs. Such a
    /// part has Dynamo's engines, which do not report how late they are. So nothing would show that
    /// the machine was too busy.
    fn is_alone(&self) -> bool {
        self.cell.is_dynamo()
    }
}

// === impl Campaign ===

impl Campaign {
    /// Runs the parts that are not on disk yet. Calls `say` with a line about each run.
    ///
    /// # Errors
    /// Fails if a run does not start, ends early or takes too long.
    pub async fn run(&self, say: impl Fn(String)) -> Result<CampaignOutcome> {
        let (alone, beside): (Vec<_>, Vec<_>) = self.parts.iter().partition(|part| part.is_alone());
        let mut outcome = CampaignOutcome::default();
        for (parts, at_once) in [(beside, self.at_once.max(1)), (alone, 1)] {
            let parts = parts.into_iter().map(|part| self.run_part(part, &say));
            let outcomes: Vec<_> = stream::iter(parts)
                .buffer_unordered(at_once)
                .try_collect()
                .await?;
            outcomes.into_iter().for_each(|part| outcome.add(part));
        }
        Ok(outcome)
    }

    async fn run_part(&self, part: &RacePart, say: &impl Fn(String)) -> Result<CampaignOutcome> {
        let mut outcome = CampaignOutcome::default();
        let mut wanted = Vec::new();
        for router in &part.group.routers {
            if !RouterKind::named(router)?.is_installed() {
                outcome.skipped.push(format!(
                    "{} seed {}: {router} is not installed",
                    part.cell.name, part.seed
                ));
            } else if part.cell.is_dynamo() && !MockerEngines::is_installed() {
                outcome.skipped.push(format!(
                    "{} seed {}: {router} lacks Dynamo's engines",
                    part.cell.name, part.seed
                ));
            } else if RunRecord::read(&self.path(part, router))?.is_some() {
                outcome.kept += 1;
            } else {
                wanted.push(router.clone());
            }
        }
        self.run_routers(part, &wanted, &mut outcome, say).await?;
        Ok(outcome)
    }

    #[must_use]
    pub fn path(&self, part: &RacePart, router: &str) -> PathBuf {
        RunRecord::path(
            &self.folder.join(part.group.name),
            part.cell.name,
            part.seed,
            router,
        )
    }

    /// Runs routers side by side. If the machine was too slow for a run, runs its router again
    /// beside half as many routers. A router of a part that runs alone runs alone again.
    async fn run_routers(
        &self,
        part: &RacePart,
        routers: &[String],
        outcome: &mut CampaignOutcome,
        say: &impl Fn(String),
    ) -> Result<()> {
        let halved = std::iter::successors(Some(routers.len()), |at_once| Some(at_once / 2))
            .take_while(|at_once| *at_once > 0);
        let rounds = if part.is_alone() {
            vec![1; ROUNDS_ALONE]
        } else {
            halved.collect()
        };
        let mut left = routers.to_vec();
        for at_once in rounds {
            let mut late = Vec::new();
            for side_by_side in left.chunks(at_once) {
                for run in self.run_side_by_side(part, side_by_side).await? {
                    say(line_of(&run));
                    if run.is_in_time() {
                        run.write(&self.path(part, &run.router))?;
                        outcome.made += 1;
                    } else {
                        late.push(run.router);
                    }
                }
            }
            left = late;
        }
        let cell = part.cell.name;
        let seed = part.seed;
        let too_slow = |router: String| {
            format!(
                "{cell} seed {seed}: {router} was late even alone; this machine is too slow for the cell"
            )
        };
        outcome.skipped.extend(left.into_iter().map(too_slow));
        Ok(())
    }

    async fn run_side_by_side(
        &self,
        part: &RacePart,
        routers: &[String],
    ) -> Result<Vec<RunRecord>> {
        let limit = Duration::from_secs_f64(self.arrivals_s) + ENDING;
        let RacePart { cell, seed, group } = part;
        let side_by_side = if part.is_alone() {
            1
        } else {
            routers.len() * self.at_once
        };
        let runs = routers.iter().map(|router| async move {
            let draft = self
                .folder
                .join("drafts")
                .join(format!("{}-{}-{seed}-{router}.json", group.name, cell.name));
            let mut child = self.play_in_namespace(cell, *seed, router, side_by_side, &draft)?;
            let status = timeout(limit, child.wait())
                .await
                .map_err(|_| format!("{} with {router} took longer than {limit:?}", cell.name))??;
            read_run(&draft, status, router)
        });
        futures::future::join_all(runs).await.into_iter().collect()
    }

    fn play_in_namespace(
        &self,
        cell: &Cell,
        seed: u64,
        router: &str,
        side_by_side: usize,
        out: &Path,
    ) -> Result<tokio::process::Child> {
        let script = if cell.is_dynamo() {
            IN_DYNAMO_NAMESPACE
        } else {
            IN_NAMESPACE
        };
        let mut command = Command::new("unshare");
        // In a process namespace of its own, all processes of a run end with the run.
        command
            .args([
                "--net",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                script,
            ])
            .arg(std::env::current_exe()?)
            .args(["play", "--cell", cell.name]);
        command.args([
            "--seed",
            &seed.to_string(),
            "--router",
            router,
            "--arrivals-s",
            &self.arrivals_s.to_string(),
        ]);
        command
            .args(["--side-by-side", &side_by_side.to_string(), "--out"])
            .arg(out);
        Ok(tokio::process::Command::from(command)
            .kill_on_drop(true)
            .spawn()?)
    }
}

// === impl CampaignOutcome ===

impl CampaignOutcome {
    fn add(&mut self, other: Self) {
        self.made += other.made;
        self.kept += other.kept;
        self.skipped.extend(other.skipped);
    }
}

/// Reads the record that the process of a run wrote.
fn read_run(path: &Path, status: ExitStatus, router: &str) -> Result<RunRecord> {
    if !status.success() {
        return Err(format!(
            "the run of {router} failed ({status}): see above. Network namespaces need root"
        )
        .into());
    }
    let run =
        RunRecord::read(path)?.ok_or_else(|| format!("the run of {router} left no record"))?;
    std::fs::remove_file(path)?;
    Ok(run)
}

/// Describes a run in one line, for the terminal.
fn line_of(run: &RunRecord) -> String {
    let figure = |figure: crate::judge::RaceFigure| figure.compute(run.requests.iter());
    let engines: Vec<String> = run
        .engines
        .iter()
        .map(|engine| engine.requests.to_string())
        .collect();
    format!(
        "{:14} seed {:3} {:18} e2e {:6.0} ms, TTFT {:5.0} ms, p99 {:5.0} ms, hits {:4.1} %, {} requests, {} failed, late {:.1} and {:.1} ms, by engine {}",
        run.cell,
        run.seed,
        run.router,
        figure(crate::judge::RaceFigure::EndToEndMean),
        figure(crate::judge::RaceFigure::FirstTokenMean),
        figure(crate::judge::RaceFigure::FirstTokenP99),
        run.hit_rate() * 100.0,
        run.requests.len(),
        run.failures(),
        run.generator_late_p99_ms(),
        run.engines_late_p99_ms(),
        engines.join(" "),
    )
}
