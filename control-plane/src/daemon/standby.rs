//! The part of the daemon that runs with and without the lease. This part follows the pools,
//! scrapes their endpoints, answers ext_proc and probes, and learns.
//!
//! A standby has its own slots, generations and hash secret. Until the daemon leads, only its
//! ext_proc server uses these values. Generations are random, so two daemons have different
//! generations.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use discovery::LocalAddresses;
use discovery::backend::AppProtocol;
use ext_proc::ExtProcServer;
use learning::scaling::ScalingGoal;

use crate::cli::args::{
    EndpointTlsArgs, LatencyArgs, OptionalAddress, ScrapeArgs, ServeArgs, StateTls,
};
use crate::config::LatencyOptions;
use crate::error::FatalError;
use crate::kv_events::KvEventPorts;
use crate::learn::latency::{self, LearningTables, ModelFile};
use crate::pool::discovery_source::{self, DiscoverySetup, FollowedEndpoints};
use crate::pool::event_loop::AdoptionSender;
use crate::pool::objects::PoolName;
use crate::pool::pools_file::PoolSource;
use crate::pool::sources;
use crate::pool::startup::{PoolTask, ScrapeSettings};
use crate::scaling::{ScalingInputs, ScalingSignals};
use crate::scrape::{EndpointTls, ScrapeConfig, ScrapeIntervals};
use crate::serve::explanations::ExplanationDesk;
use crate::serve::exposure;
use crate::serve::ext_proc::ExtProcListener;
use crate::serve::health::HealthChecks;
use crate::serve::listen::{ServerTls, TlsFiles};
use crate::serve::monitoring::MonitoringServer;
use crate::serve::shown_state::ShownState;
use crate::state::client_names::ClientNames;
use crate::state::life::DaemonLife;
use crate::state::shared::DaemonState;
use crate::state::snapshot_file::{SavedState, SnapshotFile};
use crate::state::traffic::TrafficRecorder;

use super::LeadingDaemon;
use super::signals::SignalWatch;
use super::tasks::TaskGroup;

/// The interval at which a stopping daemon checks whether replies still pass through it.
const REPLY_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A running daemon that does not lead, or the part of a leader that continues when it stops
/// leading.
#[derive(Debug)]
pub struct StandbyDaemon {
    pub admin_address: SocketAddr,
    /// The address of the ext_proc server, if there is one.
    pub ext_proc_address: Option<SocketAddr>,
    /// The listeners for probes and operators.
    pub monitoring: MonitoringServer,
    /// The state that the daemon's tasks share.
    pub shared: Arc<DaemonState>,
    pub traffic: Arc<TrafficRecorder>,
    ext_proc: Option<Arc<ExtProcServer>>,
    /// The address where the leader serves state, and the protection of that listener.
    pub(super) listen_state: (SocketAddr, ServerTls),
    /// The address where the leader serves the scaler, and the signals that it answers with.
    pub(super) scaler: (OptionalAddress, Arc<ScalingSignals>),
    pub(super) snapshot: Option<Arc<SnapshotFile>>,
    pub(super) models: Option<Arc<ModelFile>>,
    adoptions: BTreeMap<Arc<str>, AdoptionSender>,
    group: TaskGroup,
}

// === impl StandbyDaemon ===

impl StandbyDaemon {
    /// Returns the leader terms of the daemon.
    pub fn life(&self) -> Arc<DaemonLife> {
        Arc::clone(&self.shared.life)
    }

    /// Starts all tasks except those of a leader, and serves before it returns.
    ///
    /// # Errors
    /// Returns [`FatalError::Usage`] if pools, sources or files are invalid, or if a listener would
    /// be exposed without protection. Returns [`FatalError::Listen`] if a listener cannot be
    /// opened.
    pub async fn start(args: ServeArgs) -> Result<Self, FatalError> {
        for warning in exposure::check(&args).map_err(FatalError::Usage)? {
            tracing::warn!("{warning}");
        }
        let sources = follow_sources(&args).await?;
        let mut group = TaskGroup::new();
        // Answers probes while the pools are read, because each pool may take seconds.
        let monitoring = MonitoringServer::open(&args, &mut group.tasks, &group.shutdown).await?;
        let ServeArgs {
            snapshot_file,
            listen_state,
            ext_proc,
            scrape,
            latency,
            state_tls,
            model_servers_speak,
            scaling,
            ..
        } = args;
        let snapshot = snapshot_file.map(|path| Arc::new(SnapshotFile::new(path)));
        let saved = snapshot
            .as_ref()
            .and_then(|file| file.load().inspect(|saved| file.remember(saved)));
        let options = latency_options(&latency)?;
        let pools = prepare(sources, saved.as_ref(), &scraping(scrape), &options).await?;

        let shared = shared_state(saved.as_ref(), &pools, &state_tls)?;
        let discovery = Arc::new(DiscoverySetup {
            cluster_protocol: AppProtocol::from(model_servers_speak),
            components: pools.iter().map(PoolTask::components).collect(),
        });
        discovery_source::compare_protocols(&discovery);
        let listener = ExtProcListener::open(ext_proc, &group.shutdown).await?;
        let ext_proc_address = listener.as_ref().map(ExtProcListener::address);
        let adoptions = pools.iter().map(PoolTask::adoptions).collect();
        for pool in pools {
            pool.spawn(&mut group.tasks, &shared, &group.shutdown);
        }
        let models = spawn_learning(&mut group, &shared, latency);
        let signals = spawn_signals(&mut group, &shared, &discovery, scaling.goal());
        let traffic = spawn_traffic(&mut group, &shared);
        let health = monitoring.health.clone();
        let ext_proc = spawn_ext_proc(listener, &mut group, &shared, &discovery, health);
        monitoring.shows(ShownState {
            shared: Arc::clone(&shared),
            snapshot: snapshot.clone(),
            discovery,
            signals: Arc::clone(&signals),
            traffic: Arc::clone(&traffic),
            ext_proc: ext_proc.clone(),
            explanations: ExplanationDesk::default(),
        });
        let listen_state = (listen_state, state_files(state_tls).into());
        let scaler = (scaling.listen_scaler, signals);
        tracing::info!(ext_proc = ext_proc_address.map(tracing::field::display), pools = ?shared.pools.names, "started");
        Ok(Self {
            admin_address: monitoring.admin_address,
            ext_proc_address,
            monitoring,
            shared,
            traffic,
            ext_proc,
            listen_state,
            scaler,
            snapshot,
            models,
            adoptions,
            group,
        })
    }

    /// Begins to lead, and serves state before it returns.
    ///
    /// # Errors
    /// Returns [`FatalError`] if the daemon cannot lead.
    pub async fn lead(&self) -> Result<LeadingDaemon, FatalError> {
        LeadingDaemon::begin(self).await
    }

    /// Waits until a task ends and returns its name. No task should end before [`Self::stop`].
    pub async fn task_ended(&mut self) -> &'static str {
        self.group.task_ended().await
    }

    /// Gives the endpoints of each pool the slots and generations that they had at another leader.
    pub(super) async fn adopt(&self, saved: &SavedState) {
        for (name, pool) in &saved.pools {
            if let Some(adoptions) = self.adoptions.get(name.as_str()) {
                adoptions.adopt(pool.endpoints()).await;
            }
        }
    }

    /// Reports permanently that this daemon is not ready, so that gateways call another daemon.
    pub async fn stop_ready(&self) {
        self.monitoring.health.stop_ready().await;
    }

    /// Answers ext_proc for the time `drain`, because a gateway calls this daemon until it has
    /// learned that the daemon is not ready. Then waits until no exchange is open, for at most the
    /// time `replies`. A second signal ends both waits.
    pub async fn drain(&self, drain: Duration, replies: Duration, signals: &mut SignalWatch) {
        tracing::info!(
            ?drain,
            "answering ext_proc until gateways call another daemon"
        );
        if tokio::time::timeout(drain, signals.received())
            .await
            .is_ok()
        {
            return;
        }
        let open = || {
            let server = self.ext_proc.as_ref();
            server.map_or(0, |server| server.streams().open())
        };
        tracing::info!(open = open(), wait = ?replies, "waiting until the replies that pass through this daemon end");
        let ended = async {
            while open() > 0 {
                tokio::time::sleep(REPLY_POLL_INTERVAL).await;
            }
        };
        tokio::select! {
            _ = tokio::time::timeout(replies, ended) => {}
            _ = signals.received() => {}
        }
    }

    pub async fn stop(self) {
        self.group.stop().await;
    }
}

/// Returns the configured pools and their sources, and follows the sources from now on.
async fn follow_sources(
    args: &ServeArgs,
) -> Result<Vec<(PoolSource, FollowedEndpoints)>, FatalError> {
    let endpoints = args.endpoints.clone();
    let pool = args.pool.clone();
    let config = args.config.clone();
    let local = if args.local_endpoints {
        LocalAddresses::Allowed
    } else {
        LocalAddresses::Refused
    };
    let mut sources = Vec::new();
    for pool in sources::pools(endpoints, pool, config, args.objects.clone()).await? {
        let source = sources::open(pool.endpoints.clone(), local).await?;
        sources.push((pool, source));
    }
    Ok(sources)
}

/// Creates the tables of a daemon with these pools. Only the term and the hash secret come from the
/// snapshot file, because its pools are those of the previous leader.
fn shared_state(
    saved: Option<&SavedState>,
    pools: &[PoolTask],
    state_tls: &StateTls,
) -> Result<Arc<DaemonState>, FatalError> {
    let (term, secret) = saved.map_or_else(
        || (0, rand::random()),
        |saved| (saved.term, saved.hash_secret),
    );
    let scrapers: BTreeMap<_, _> = pools.iter().map(PoolTask::scraper).collect();
    let served: Vec<Arc<str>> = scrapers.keys().cloned().collect();
    let names = state_tls.state_tls_client_names.clone();
    let clients = ClientNames::try_new(names, &served).map_err(FatalError::Usage)?;
    Ok(DaemonState::new(term, secret, scrapers, clients))
}

/// Starts the learners. Returns the file of the learned models, if there is one.
fn spawn_learning(
    group: &mut TaskGroup,
    shared: &DaemonState,
    latency: LatencyArgs,
) -> Option<Arc<ModelFile>> {
    let file = latency.latency_model_file;
    let models = file.map(|path| Arc::new(ModelFile::open(path)));
    let tables = LearningTables {
        life: Arc::clone(&shared.life),
        pools: Arc::clone(&shared.pools),
        learned: Arc::clone(&shared.learned),
    };
    latency::spawn(group, &tables, latency.latency_prediction, models.as_ref());
    models
}

fn spawn_traffic(group: &mut TaskGroup, shared: &DaemonState) -> Arc<TrafficRecorder> {
    let traffic = TrafficRecorder::new(Arc::clone(&shared.pools), Arc::clone(&shared.reports));
    let stop = group.shutdown.clone();
    group.spawn("traffic history", Arc::clone(&traffic).run(stop));
    traffic
}

/// Starts the ext_proc server, or without it the task that reports readiness.
fn spawn_ext_proc(
    listener: Option<ExtProcListener>,
    group: &mut TaskGroup,
    shared: &Arc<DaemonState>,
    discovery: &DiscoverySetup,
    health: HealthChecks,
) -> Option<Arc<ExtProcServer>> {
    let Some(listener) = listener else {
        let life = Arc::clone(&shared.life);
        let pools = Arc::clone(&shared.pools);
        let stop = group.shutdown.clone();
        group.spawn("readiness", health.follow(life, pools, stop));
        return None;
    };
    Some(listener.spawn(group, shared, discovery, health))
}

/// Starts to record the traffic that the scaling signals are computed from.
fn spawn_signals(
    group: &mut TaskGroup,
    shared: &DaemonState,
    discovery: &Arc<DiscoverySetup>,
    goal: ScalingGoal,
) -> Arc<ScalingSignals> {
    let inputs = ScalingInputs {
        life: Arc::clone(&shared.life),
        pools: Arc::clone(&shared.pools),
        reports: Arc::clone(&shared.reports),
        learned: Arc::clone(&shared.learned),
        discovery: Arc::clone(discovery),
    };
    let signals = ScalingSignals::new(goal, inputs);
    let stop = group.shutdown.clone();
    group.spawn("traffic of groups", Arc::clone(&signals).run(stop));
    signals
}

async fn prepare(
    sources: Vec<(PoolSource, FollowedEndpoints)>,
    saved: Option<&SavedState>,
    scrape: &ScrapeSettings,
    latency: &LatencyOptions,
) -> Result<Vec<PoolTask>, FatalError> {
    let served: Arc<[PoolName]> = sources.iter().map(|(pool, _)| pool.named()).collect();
    let mut pools = Vec::new();
    for (source, endpoints) in sources {
        let saved = saved.and_then(|saved| saved.pools.get(&source.name));
        pools.push(PoolTask::prepare(source, endpoints, saved, scrape, latency, &served).await?);
    }
    Ok(pools)
}

fn latency_options(args: &LatencyArgs) -> Result<LatencyOptions, FatalError> {
    let strategy = args.headroom_selection_strategy.clone();
    LatencyOptions::new(args.latency_prediction, strategy).map_err(FatalError::Usage)
}

fn state_files(args: StateTls) -> Option<TlsFiles> {
    let StateTls {
        state_tls_cert,
        state_tls_key,
        state_tls_client_ca,
        ..
    } = args;
    Some(TlsFiles {
        cert: state_tls_cert?,
        key: state_tls_key?,
        client_ca: state_tls_client_ca,
    })
}

fn scraping(args: ScrapeArgs) -> ScrapeSettings {
    let ScrapeArgs {
        scrape_interval,
        scrape_interval_busy,
        staleness_max,
        kv_events_port,
        kv_events_replay_port,
        endpoint_tls,
    } = args;
    let EndpointTlsArgs {
        endpoint_tls_ca,
        endpoint_tls_cert,
        endpoint_tls_key,
        endpoint_tls_insecure,
    } = endpoint_tls;
    let tls = EndpointTls {
        ca_file: endpoint_tls_ca,
        identity: endpoint_tls_cert.zip(endpoint_tls_key),
        insecure_skip_verify: endpoint_tls_insecure,
    };
    ScrapeSettings {
        scraper: ScrapeConfig {
            intervals: ScrapeIntervals {
                idle: scrape_interval,
                busy: scrape_interval_busy,
            },
            tls,
            ..ScrapeConfig::default()
        },
        staleness_max,
        kv_events: KvEventPorts {
            events: kv_events_port,
            replay: kv_events_replay_port,
        },
    }
}
