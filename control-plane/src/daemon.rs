//! Connects the tasks of the daemon, and defines the order of shutdown.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use discovery::WatchedComponent;
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_server::EndpointDiscoveryServiceServer;
use proto::state::state_service_server::StateServiceServer;
use proto::{MESSAGE_BYTES_MAX, PROXY_MESSAGE_BYTES_MAX};
use tokio::task::JoinSet;
use tonic::service::Routes;

use crate::cli::args::{EndpointTlsArgs, ObjectsArgs, ScrapeArgs, ServeArgs, StateTls};
use crate::cli::build::VERSION;
use crate::config::LatencyOptions;
use crate::error::FatalError;
use crate::learn::latency;
use crate::pool::backends;
use crate::pool::endpoint_source;
use crate::pool::objects::{ObjectsSource, PoolName};
use crate::pool::pools_file::PoolSource;
use crate::pool::startup::{PoolTask, ScrapeSettings};
use crate::pool::watched::{EndpointSource, WatchedComponents};
use crate::scaling;
use crate::scrape::{EndpointTls, ScrapeIntervals};
use crate::serve::admin::AdminServer;
use crate::serve::eds::{self, EdsServer};
use crate::serve::exposure;
use crate::serve::ext_proc;
use crate::serve::listen::{IncomingConnections, ListenerName, TlsFiles, identify, raise_descriptors};
use crate::serve::monitoring::{MonitoringServer, ended, open, server};
use crate::serve::scaler::ScalerListener;
use crate::serve::state_stream::{self, StateServer};
use crate::shutdown::{self, Shutdown};
use crate::state::shared::{DaemonState, ScraperHandle};
use crate::state::snapshot_file::{SavedState, SnapshotFile};

pub mod lease;
pub mod signals;

use signals::SignalWatch;

/// How long tasks may take to stop. Streams end at once; only a scrape or a disk write takes time.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(5);

/// Runs the daemon until a signal stops it.
///
/// # Errors
/// [`FatalError`] says why it could not start, or had to stop.
pub async fn serve(args: ServeArgs) -> Result<(), FatalError> {
    let mut signals = SignalWatch::listen().map_err(FatalError::Signals)?;
    tracing::info!(version = VERSION, "starting");
    raise_descriptors();
    let wanted = args.lease.clone();
    let following = StandbyDaemon::begin(args).await?;
    let mut lease = wanted.want().await?;
    if let Some(lease) = &mut lease {
        tokio::select! {
            won = lease.won() => won?,
            _ = signals.received() => return Ok(()),
        }
    }
    let mut daemon = following.start_leading().await?;
    let ended = tokio::select! {
        signal = signals.received() => {
            tracing::info!(signal, "stopping");
            Ok(())
        }
        task = daemon.task_ended() => Err(FatalError::TaskEnded(task)),
        () = lease::lost(&mut lease) => Err(FatalError::LeaseLost),
    };
    daemon.stop().await;
    if let Some(lease) = lease {
        lease.give_back().await;
    }
    ended
}

/// A daemon that stands by: it follows its endpoints and their metadata and answers probes, but
/// serves no proxy. When it becomes leader, it knows its endpoints already.
pub struct StandbyDaemon {
    args: ServeArgs,
    pools: Vec<(PoolSource, EndpointSource)>,
    /// The listeners that a standby has open.
    pub monitoring: MonitoringServer,
    tasks: JoinSet<&'static str>,
    trigger: shutdown::ShutdownTrigger,
    shutdown: Shutdown,
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    /// The address of the state listener (state and EDS).
    pub state_address: SocketAddr,
    /// The address of the admin routes.
    pub admin_address: SocketAddr,
    /// The address of the metrics listener, if there is one.
    pub metrics_address: Option<SocketAddr>,
    /// The address of the ext_proc server, if there is one.
    pub ext_proc_address: Option<SocketAddr>,
    /// The address of the health service, if there is one.
    pub health_address: Option<SocketAddr>,
    /// The address of the scaler, if there is one.
    pub scaler_address: Option<SocketAddr>,
    /// The state that the daemon's tasks share.
    pub shared: Arc<DaemonState>,
    tasks: JoinSet<&'static str>,
    trigger: shutdown::ShutdownTrigger,
}

// === impl StandbyDaemon ===

impl StandbyDaemon {
    /// Begins to follow the endpoints of all pools, and opens the listeners of a standby.
    ///
    /// # Errors
    /// [`FatalError::Usage`] when pools or sources are invalid, or a listener would be exposed
    /// without protection; [`FatalError::Listen`] when one cannot be opened.
    pub async fn begin(args: ServeArgs) -> Result<Self, FatalError> {
        for warning in exposure::check(&args).map_err(FatalError::Usage)? {
            tracing::warn!("{warning}");
        }
        let (endpoints, pool, config) = (args.endpoints.clone(), args.pool.clone(), args.config.clone());
        let mut pools = Vec::new();
        for pool in endpoint_source::pools(endpoints, pool, config, objects_of(args.objects.clone())).await? {
            let source = endpoint_source::open(pool.endpoints.clone()).await?;
            pools.push((pool, source));
        }
        let (trigger, shutdown) = shutdown::channel();
        let mut tasks = JoinSet::new();
        let monitoring = MonitoringServer::open(&args, &mut tasks, &shutdown).await?;
        Ok(Self { args, pools, monitoring, tasks, trigger, shutdown })
    }

    /// The discovered components that the standby follows.
    pub fn components(&self) -> impl Iterator<Item = &WatchedComponent> {
        self.pools.iter().flat_map(|(_, source)| source.components.iter().map(|(_, followed)| followed))
    }

    /// Starts everything else, and serves before it returns. Files are read, and the term begins,
    /// when this is called, not when the standby began.
    ///
    /// # Errors
    /// [`FatalError`] says why the daemon cannot start.
    pub async fn start_leading(self) -> Result<Daemon, FatalError> {
        Daemon::of(self).await
    }
}

// === impl Daemon ===

impl Daemon {
    /// Starts everything, and serves before it returns.
    ///
    /// # Errors
    /// [`FatalError`] says why the daemon cannot start.
    pub async fn start(args: ServeArgs) -> Result<Self, FatalError> {
        StandbyDaemon::begin(args).await?.start_leading().await
    }

    async fn of(following: StandbyDaemon) -> Result<Self, FatalError> {
        let StandbyDaemon { args, pools: followed, monitoring, mut tasks, trigger, shutdown } = following;
        let ServeArgs { snapshot_file, listen_state, ext_proc, scrape, latency, state_tls, model_servers_speak, scaling, .. } = args;
        let snapshot = snapshot_file.map(|path| Arc::new(SnapshotFile::new(path)));
        let before = snapshot.as_ref().and_then(|file| file.load());
        let life = DaemonTerm::after(before.as_ref());

        let scrape = scraping(scrape);
        let learning = (latency.latency_prediction, latency.latency_model_file);
        let latency = LatencyOptions::new(latency.latency_prediction, latency.headroom_selection_strategy).map_err(FatalError::Usage)?;
        let served: Arc<[PoolName]> = followed.iter().map(|(pool, _)| pool.named()).collect();
        let mut pools = Vec::new();
        for pool in followed {
            let saved = before.as_ref().and_then(|saved| saved.pools.get(&pool.0.name));
            pools.push(PoolTask::prepare(pool, saved, (&scrape, &latency), &served, life.generation_first).await?);
        }
        let scrapers: BTreeMap<Arc<str>, ScraperHandle> = pools.iter().map(PoolTask::scraper).collect();
        let components: Arc<BTreeMap<Arc<str>, WatchedComponents>> = Arc::new(pools.iter().map(PoolTask::components).collect());
        let shared = DaemonState::new(life.term, life.hash_secret, scrapers);
        let _ = shared.discovery.components.set(Arc::clone(&components)); // a daemon is started once
        backends::compare_protocols(&shared, &components, model_servers_speak);

        let state = open(ListenerName::State, listen_state, state_files(state_tls), &shutdown).await?;
        let ext_proc = ext_proc::ExtProcListener::open(ext_proc, &shutdown).await?;
        let scaler = ScalerListener::open(scaling.listen_scaler, &shutdown).await?;
        let state_address = state.address();
        let scaler_address = scaler.as_ref().map(ScalerListener::address);
        let ext_proc_address = ext_proc.as_ref().map(ext_proc::ExtProcListener::address);
        if let Some(file) = &snapshot {
            let first = SavedState::of(&shared, &shared.pools.borrow(), &before.map(|saved| saved.pools).unwrap_or_default());
            file.store(&first).map_err(FatalError::Snapshot)?;
            let keep = Arc::clone(file).keep(Arc::clone(&shared), first, shutdown.clone());
            tasks.spawn(async {
                keep.await;
                "snapshot file"
            });
        }
        for pool in pools {
            pool.spawn(&mut tasks, &shared, &shutdown);
        }
        latency::spawn(&mut tasks, &shared, learning, &shutdown);
        let signals = scaling::spawn(&mut tasks, &shared, scaling.goal(), &shutdown);
        if let Some(scaler) = scaler {
            scaler.spawn(&mut tasks, &shared, signals, &shutdown);
        }
        let health = monitoring.health.clone();
        if let Some(listener) = ext_proc {
            listener.spawn(&mut tasks, &shared, health, &shutdown);
        } else {
            let readiness = health.follow(Arc::clone(&shared), shutdown.clone());
            tasks.spawn(async {
                readiness.await;
                "readiness"
            });
        }
        tasks.spawn(serve_state(state, Arc::clone(&shared), shutdown));
        monitoring.leads(AdminServer { shared: Arc::clone(&shared), snapshot, components }).await;
        let MonitoringServer { admin_address, metrics_address, health_address, .. } = monitoring;
        let shown = ext_proc_address.map(tracing::field::display);
        tracing::info!(state = %state_address, admin = %admin_address, ext_proc = shown, term = shared.life.term, pools = ?shared.pool_names, "serving");
        Ok(Self { state_address, admin_address, metrics_address, ext_proc_address, health_address, scaler_address, shared, tasks, trigger })
    }

    /// Waits until a task ends and returns the name of the task. No task should end before
    /// shutdown.
    pub async fn task_ended(&mut self) -> &'static str {
        match self.tasks.join_next().await {
            Some(Ok(name)) => name,
            Some(Err(_)) => "a task (it panicked)",
            None => "all tasks",
        }
    }

    /// Stops all tasks; abandons those that take longer than [`SHUTDOWN_DEADLINE`].
    pub async fn stop(mut self) {
        self.trigger.pull();
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(SHUTDOWN_DEADLINE, all).await.is_err() {
            tracing::warn!(after = ?SHUTDOWN_DEADLINE, "some tasks did not stop in time; leaving them");
        }
    }
}

/// The values that distinguish this start of the daemon from others.
struct DaemonTerm {
    term: u64,
    hash_secret: u128,
    generation_first: u32,
}

impl DaemonTerm {
    /// Creates the values of this start. The term is larger than the one in the snapshot file and,
    /// in case the file is lost or old, not smaller than the clock.
    fn after(before: Option<&SavedState>) -> Self {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let unix_ms = u64::try_from(unix.as_millis()).unwrap_or(u64::MAX);
        Self {
            term: before.map_or(0, |saved| saved.term.saturating_add(1)).max(unix_ms),
            hash_secret: before.map_or_else(rand::random, |saved| saved.hash_secret),
            generation_first: u32::try_from(unix.as_secs()).unwrap_or(1),
        }
    }
}

fn objects_of(args: ObjectsArgs) -> ObjectsSource {
    let ObjectsArgs { objects, objects_kubernetes, strict_models } = args;
    ObjectsSource { path: objects, kubernetes: objects_kubernetes, strict_models }
}

fn state_files(args: StateTls) -> Option<TlsFiles> {
    let StateTls { state_tls_cert, state_tls_key, state_tls_client_ca, .. } = args;
    Some(TlsFiles { cert: state_tls_cert?, key: state_tls_key?, client_ca: state_tls_client_ca })
}

fn scraping(args: ScrapeArgs) -> ScrapeSettings {
    let ScrapeArgs { scrape_interval, scrape_interval_busy, staleness_max, endpoint_tls } = args;
    let EndpointTlsArgs { endpoint_tls_ca, endpoint_tls_cert, endpoint_tls_key, endpoint_tls_insecure } = endpoint_tls;
    let tls = EndpointTls {
        ca_file: endpoint_tls_ca,
        identity: endpoint_tls_cert.zip(endpoint_tls_key),
        insecure_skip_verify: endpoint_tls_insecure,
    };
    ScrapeSettings { intervals: ScrapeIntervals { idle: scrape_interval, busy: scrape_interval_busy }, tls, staleness_max }
}

/// Serves state and EDS until `shutdown`.
pub async fn serve_state(incoming: IncomingConnections, shared: Arc<DaemonState>, mut shutdown: Shutdown) -> &'static str {
    let state = StateServer::new(Arc::clone(&shared), shutdown.clone());
    let calls = state_stream::calls::router(state.clone());
    let state =
        StateServiceServer::new(state).max_decoding_message_size(PROXY_MESSAGE_BYTES_MAX).max_encoding_message_size(MESSAGE_BYTES_MAX);
    let eds = EndpointDiscoveryServiceServer::new(EdsServer::new(shared, shutdown.clone()));
    let eds = eds.max_decoding_message_size(eds::REQUEST_BYTES_MAX);
    let served = server()
        .accept_http1(true) // calls may use HTTP/1.1 or HTTP/2
        .layer(identify())
        .add_routes(Routes::from(calls))
        .add_service(state)
        .add_service(eds)
        .serve_with_incoming_shutdown(incoming, async move { shutdown.begun().await })
        .await;
    ended(served, "state listener")
}
