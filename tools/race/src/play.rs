//! Plays one run: starts engines and a router in front of them, and sends the sessions of a cell.

use std::net::SocketAddr;
use std::time::Duration;

use race_cells::{Cell, CellChange, CellEngine, CellSource, EngineSpeed, PublishedShape};
use serde_json::Value;
use testbed::Result;
use testbed::model_server::{
    EngineProfile, FaultMode, ModelServer, ModelServerOptions, ServerFault,
};
use testbed::ports::ReservedPort;
use tokio::time::sleep_until;

use crate::mocker::{MockerEngines, MockerFront};
use crate::player::{SessionPlan, SessionPlayer};
use crate::record::{EngineRecord, RunRecord};
use crate::recording;
use crate::router::{RouterEngines, RouterKind, RunningRouter};
use crate::serving::MODEL;

/// The number of tokens that an engine sends in one write.
const TOKENS_PER_WRITE: u32 = 4;
/// The time for which a restarted engine does not answer.
const RESTART: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum RaceEngines {
    Servers {
        servers: Vec<ModelServer>,
        _ports: Vec<ReservedPort>,
    },
    Mockers(MockerEngines),
}

/// Plays the cell once with this router.
///
/// # Errors
/// Fails if an engine or the router does not start, or ends during the run.
pub async fn play(
    cell: &Cell,
    seed: u64,
    router_name: &str,
    arrivals_s: f64,
    side_by_side: usize,
) -> Result<RunRecord> {
    let router = RouterKind::named(router_name)?;
    let mut engines = RaceEngines::start(cell, &router).await?;
    let addresses = engines.addresses();
    let in_pool = addresses.get(..cell.engines.count).unwrap_or(&addresses);
    let mut running = router
        .start(
            RouterEngines {
                addresses: in_pool,
                mockers: engines.mockers(),
            },
            cell.gateways,
        )
        .await?;
    let before = engines.count().await?;
    let plan = plan(cell, seed, arrivals_s)?;
    let player = SessionPlayer::new(running.addresses.clone(), MODEL);
    let (requests, changed) = tokio::join!(
        player.play(plan),
        engines.change(cell.change, &running, &player, arrivals_s)
    );
    changed?;
    running.check_running()?;
    engines.check_running()?;
    let counted = engines
        .count()
        .await?
        .into_iter()
        .zip(before)
        .map(|(after, before)| after.since(&before));
    Ok(RunRecord {
        cell: cell.name.to_owned(),
        seed,
        router: router_name.to_owned(),
        version: router.version(),
        side_by_side,
        arrivals_s,
        requests,
        engines: counted.collect(),
    })
}

fn plan(cell: &Cell, seed: u64, arrivals_s: f64) -> Result<SessionPlan> {
    let sessions = match cell.source {
        CellSource::Published(PublishedShape::Recorded) => recording::sessions(seed, arrivals_s)?,
        _ => cell.sessions(seed, arrivals_s),
    };
    Ok(match cell.source {
        CellSource::Random { .. } => {
            let cold = sessions
                .iter()
                .filter(|session| session.start_ms < arrivals_s * 1e3 / 4.0)
                .count();
            SessionPlan {
                sessions,
                cold,
                clients: None,
            }
        }
        CellSource::Published(shape) => SessionPlan {
            cold: sessions.len() / 4,
            clients: shape.clients(),
            sessions,
        },
    })
}

// === impl RaceEngines ===

impl RaceEngines {
    async fn start(cell: &Cell, router: &RouterKind) -> Result<Self> {
        match cell.engines.kind {
            CellEngine::Qwen32bH200 => Self::start_servers(cell, EngineProfile::Qwen32bH200, 1.0),
            CellEngine::Llama8bA10 => Self::start_servers(cell, EngineProfile::Llama8bA100, 3.0),
            CellEngine::DynamoMocker { .. } => {
                let front = if matches!(router, RouterKind::Dynamo(_)) {
                    MockerFront::Shared
                } else {
                    MockerFront::OneEach
                };
                Ok(Self::Mockers(
                    MockerEngines::start(cell.engines.count, front).await?,
                ))
            }
        }
    }

    /// Starts the engines of a cell, and one more if the run adds an engine later. The engines'
    /// steps take `slowdown` times as long as in the profile.
    fn start_servers(cell: &Cell, profile: EngineProfile, slowdown: f64) -> Result<Self> {
        let added = usize::from(cell.change == CellChange::KillAddRestart);
        let mut servers = Vec::new();
        let mut ports = Vec::new();
        for index in 0..cell.engines.count + added {
            let port = ReservedPort::lease()?;
            let slow = cell.engines.speed == EngineSpeed::HalfAreHalfAsFast
                && index * 2 >= cell.engines.count;
            servers.push(ModelServer::start(ModelServerOptions {
                listen: port.address(),
                profile,
                models: vec![MODEL.to_owned()],
                slowdown: if slow { 2.0 * slowdown } else { slowdown },
                max_num_seqs: cell.engines.sequences_max,
                num_gpu_blocks: cell.engines.kv_blocks,
                chunks_per_write: TOKENS_PER_WRITE,
                ..ModelServerOptions::default()
            })?);
            ports.push(port);
        }
        Ok(Self::Servers {
            servers,
            _ports: ports,
        })
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        match self {
            Self::Servers { servers, .. } => servers.iter().map(ModelServer::addr).collect(),
            Self::Mockers(mockers) => mockers.addresses(),
        }
    }

    fn mockers(&self) -> Option<&MockerEngines> {
        if let Self::Mockers(mockers) = self {
            Some(mockers)
        } else {
            None
        }
    }

    fn check_running(&mut self) -> Result<()> {
        if let Self::Mockers(mockers) = self {
            mockers.check_running()
        } else {
            Ok(())
        }
    }

    /// Waits for the times of the cell's changes, and changes the pool at each of them.
    async fn change(
        &self,
        change: CellChange,
        router: &RunningRouter,
        player: &SessionPlayer,
        arrivals_s: f64,
    ) -> Result<()> {
        let Self::Servers { servers, .. } = self else {
            return Ok(());
        };
        if change == CellChange::None {
            return Ok(());
        }
        let at = |share: f64| player.start() + Duration::from_secs_f64(arrivals_s * share);
        let all = self.addresses();
        let [killed, restarted] = [servers.first(), servers.get(1)]
            .map(|server| server.ok_or("there are too few engines"));
        sleep_until(at(0.25)).await;
        killed?.fault(ServerFault::new(FaultMode::Refuse)).await;
        sleep_until(at(0.5)).await;
        router
            .add(&all, *all.last().ok_or("there is no engine")?)
            .await?;
        sleep_until(at(0.75)).await;
        restarted?.restart(Some(RESTART)).await;
        Ok(())
    }

    async fn count(&self) -> Result<Vec<EngineRecord>> {
        let servers = match self {
            Self::Servers { servers, .. } => servers,
            Self::Mockers(mockers) => return mockers.count().await,
        };
        let mut counts = Vec::new();
        for server in servers {
            counts.push(EngineRecord::from_state(&server.state().await?));
        }
        Ok(counts)
    }
}

// === impl EngineRecord ===

impl EngineRecord {
    /// Reads the counts from a reply to `GET /admin/state`.
    fn from_state(state: &Value) -> Self {
        let count = |key: &str| state[key].as_u64().unwrap_or(0);
        let finished = |kind: &str| state["finished"][kind].as_u64().unwrap_or(0);
        Self {
            requests: finished("stop") + finished("length"),
            prompt_tokens: count("prefix_query_tokens"),
            cached_tokens: count("prefix_hit_tokens"),
            late_p99_ms: state["step_late_p99_ms"].as_f64().unwrap_or(0.0),
        }
    }

    /// Returns by how much the counts grew since `before`. An engine that has restarted counts from
    /// zero, so its counts are returned as they are.
    fn since(&self, before: &Self) -> Self {
        let restarted =
            self.requests < before.requests || self.prompt_tokens < before.prompt_tokens;
        let since = |now: u64, then: u64| if restarted { now } else { now - then };
        Self {
            requests: since(self.requests, before.requests),
            prompt_tokens: since(self.prompt_tokens, before.prompt_tokens),
            cached_tokens: since(self.cached_tokens, before.cached_tokens),
            late_p99_ms: self.late_p99_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    /// `make e2e-long` runs these tests, because each takes a minute.
    mod slow {
        use std::collections::BTreeMap;

        use race_cells::RaceWorkload;
        use tokio::sync::Mutex;

        use super::super::*;
        use crate::judge::{CachePhase, RaceFigure, RaceVerdict, RouterRatio};

        const ARRIVALS_S: f64 = 20.0;
        const SEED: u64 = 1;

        /// The lock that a test holds while it measures, so that no other test here uses the cores.
        static ALONE: Mutex<()> = Mutex::const_new(());

        /// Compares Envoy's round robin with itself, with a router that is slower by 20 ms, and
        /// with a router that fails two requests of a hundred.
        #[tokio::test(flavor = "multi_thread")]
        async fn the_race_sees_delays_and_failures_and_no_difference_where_there_is_none() {
            let _alone = ALONE.lock().await;
            let source = CellSource::Random {
                workload: RaceWorkload::Chat,
                load_percent: 40,
            };
            let cell = Cell {
                source,
                ..Cell::find("chat-50").expect("a cell")
            };
            let names = [
                "envoy-round-robin",
                "envoy-round-robin",
                "envoy-delay",
                "envoy-drop",
            ];
            let runs = names.map(|name| play(&cell, SEED, name, ARRIVALS_S, names.len()));
            let runs = futures::future::join_all(runs)
                .await
                .into_iter()
                .collect::<Result<Vec<_>>>()
                .expect("four runs");
            let ratio = |other: usize| {
                RaceFigure::FirstTokenMean
                    .ratio(CachePhase::Warm, &[&runs[0]], &[&runs[other]])
                    .expect("pairs")
            };
            let [same, delayed, dropping] = [1, 2, 3].map(ratio);
            let verdict = |ratio: RouterRatio| ratio.verdict(Some(same));
            let expected = [RaceVerdict::Equal, RaceVerdict::Faster, RaceVerdict::Faster];
            assert_eq!(
                [same, delayed, dropping].map(verdict),
                expected,
                "{same:?} {delayed:?} {dropping:?}"
            );
            let failures: BTreeMap<&str, usize> = runs
                .iter()
                .map(|run| (run.router.as_str(), run.failures()))
                .collect();
            assert_eq!(
                (failures["envoy-round-robin"], failures["envoy-delay"]),
                (0, 0)
            );
            assert!(failures["envoy-drop"] > 0);
            // Clients and engines must have counted the same number of requests.
            for run in runs.iter().filter(|run| run.router != "envoy-drop") {
                let counted: u64 = run.engines.iter().map(|engine| engine.requests).sum();
                assert_eq!(counted, run.requests.len() as u64, "{}", run.router);
                let cached = |sum: u64| sum as f64;
                let seen: u64 = run
                    .requests
                    .iter()
                    .map(|request| request.tokens.cached)
                    .sum();
                let engines: u64 = run.engines.iter().map(|engine| engine.cached_tokens).sum();
                assert!(
                    (cached(seen) - cached(engines)).abs() < 1e-9,
                    "{}: {seen} and {engines} cached tokens",
                    run.router
                );
            }
        }

        /// Checks the picks for a single client. All sessions of the race come from one address, so
        /// the picker takes them for one client.
        #[tokio::test(flavor = "multi_thread")]
        async fn one_client_alone_uses_all_engines_and_finds_its_prompts_again() {
            let _alone = ALONE.lock().await;
            let cell = Cell::find("agents-50").expect("a cell");
            let names = ["envoy-round-robin", "ours"];
            let runs = names.map(|name| play(&cell, SEED, name, ARRIVALS_S, names.len()));
            let runs = futures::future::join_all(runs)
                .await
                .into_iter()
                .collect::<Result<Vec<_>>>()
                .expect("two runs");
            let hits = |run: &RunRecord| {
                let sum = |of: fn(&EngineRecord) -> u64| run.engines.iter().map(of).sum::<u64>();
                let cached = sum(|engine| engine.cached_tokens);
                cached as f64 / sum(|engine| engine.prompt_tokens) as f64
            };
            let [theirs, ours] = [0, 1].map(|run| hits(&runs[run]));
            let requests: Vec<u64> = runs[1].engines.iter().map(|e| e.requests).collect();
            println!("{theirs:.3} and {ours:.3} of the tokens cached, {requests:?} requests");
            assert_eq!(runs[1].failures(), 0);
            assert!(ours > theirs, "{ours:.3}, round robin {theirs:.3}");
            let third = requests.iter().sum::<u64>() / (3 * requests.len() as u64);
            assert!(
                requests.iter().all(|of_one| *of_one >= third),
                "{requests:?}"
            );
        }
    }
}
