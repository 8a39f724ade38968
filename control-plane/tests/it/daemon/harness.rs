//! A daemon in this process, and clients that act as its peers.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use control_plane::cli::args::{Cli, CliCommand, ServeArgs};
use control_plane::config::CompiledConfig;
use control_plane::daemon::{LeadingDaemon, StandbyDaemon, serve_state};
use control_plane::pool::event_loop::{AdoptionSender, PoolFeed};
use control_plane::pool::writer::{Pool, PoolSettings};
use control_plane::scrape::{ScrapeConfig, ScrapeEvent, Scraper};
use control_plane::serve::listen::{ListenerName, listen};
use control_plane::shutdown::{self, ShutdownTrigger};
use control_plane::state::client_names::ClientNames;
use control_plane::state::reports::ScraperHandle;
use control_plane::state::shared::DaemonState;
use discovery::{Instance, SetChange, SetChanges};
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::config::endpoint::v3::{ClusterLoadAssignment, LbEndpoint};
use envoy_types::pb::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_client::EndpointDiscoveryServiceClient;
use envoy_types::pb::google::rpc;
use futures::StreamExt;
use prost::Message;
use proto::state::state_service_client::StateServiceClient;
use proto::state::{self, daemon_message, proxy_message};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// The maximum time of a step. It is longer than every step takes on a busy machine, so only a
/// failure reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon that leads.
pub(crate) struct Daemon {
    pub(crate) state_address: SocketAddr,
    pub(crate) admin_address: SocketAddr,
    pub(crate) metrics_address: Option<SocketAddr>,
    pub(crate) ext_proc_address: Option<SocketAddr>,
    pub(crate) health_address: Option<SocketAddr>,
    pub(crate) scaler_address: Option<SocketAddr>,
    pub(crate) shared: Arc<DaemonState>,
    pub(crate) standby: StandbyDaemon,
    leading: LeadingDaemon,
}

/// One pool named `default`, fed by the test, behind a real gRPC listener.
pub(crate) struct DaemonHarness {
    pub(crate) shared: Arc<DaemonState>,
    pub(crate) address: SocketAddr,
    changes: mpsc::Sender<SetChange>,
    scrapes: mpsc::Sender<ScrapeEvent>,
    _trigger: ShutdownTrigger,
}

/// The filter's side of the state stream.
pub(crate) struct FilterStream {
    pub(crate) outbound: mpsc::Sender<state::ProxyMessage>,
    pub(crate) inbound: Streaming<state::DaemonMessage>,
}

/// Envoy's side of an EDS stream.
pub(crate) struct EnvoyStream {
    outbound: mpsc::Sender<DiscoveryRequest>,
    inbound: Streaming<DiscoveryResponse>,
    node_id: String,
}

pub(crate) fn instance(name: &str, port: u16) -> Instance {
    Instance::new(name, SocketAddr::from(([127, 0, 0, 1], port)))
}

/// Starts the daemon as the command line would, on free ports.
pub(crate) async fn daemon(args: &[&str]) -> Daemon {
    Daemon::from_standby(StandbyDaemon::start(serve(args)).await.unwrap()).await
}

/// Returns the arguments of `switchpointd serve` for a daemon on free ports.
pub(crate) fn serve(args: &[&str]) -> ServeArgs {
    let ports = [
        "--listen-state",
        "--listen-admin",
        "--listen-ext-proc",
        "--listen-health",
    ]
    .into_iter()
    .flat_map(|l| [l, "127.0.0.1:0"]);
    let line = ["switchpointd", "serve", "--local-endpoints"]
        .into_iter()
        .chain(args.iter().copied())
        .chain(ports);
    let CliCommand::Serve(serve) = Cli::try_parse_from(line).unwrap().command else {
        panic!("not serve")
    };
    *serve
}

pub(crate) fn write(path: &Path, text: &str) {
    let temporary = path.with_extension("tmp");
    std::fs::write(&temporary, text).unwrap();
    std::fs::rename(temporary, path).unwrap();
}

/// Returns an endpoints file with these ports.
pub(crate) fn endpoints(ports: &[u16]) -> String {
    let rows: String = ports
        .iter()
        .map(|p| format!("- {{name: e{p}, address: 127.0.0.1, port: {p}}}\n"))
        .collect();
    if rows.is_empty() {
        "endpoints: []\n".to_owned()
    } else {
        format!("endpoints:\n{rows}")
    }
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let response = reqwest::get(format!("http://{address}{path}"))
        .await
        .unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

pub(crate) async fn get_json(address: SocketAddr, path: &str) -> serde_json::Value {
    serde_json::from_str(&get(address, path).await.1).unwrap()
}

/// Checks the condition again and again until it holds.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let patient = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, patient)
        .await
        .unwrap_or_else(|_| panic!("never: {what}"));
}

// === impl Daemon ===

impl Daemon {
    /// Lets `standby` lead, and returns it as a leading daemon.
    pub(crate) async fn from_standby(standby: StandbyDaemon) -> Self {
        let leading = standby.lead().await.unwrap();
        Self {
            state_address: leading.state_address,
            admin_address: standby.admin_address,
            metrics_address: standby.monitoring.metrics_address,
            ext_proc_address: standby.ext_proc_address,
            health_address: standby.monitoring.health_address,
            scaler_address: leading.scaler_address,
            shared: Arc::clone(&standby.shared),
            standby,
            leading,
        }
    }

    pub(crate) async fn stop(self) {
        self.leading.end().await;
        self.standby.stop().await;
    }
}

// === impl DaemonHarness ===

impl DaemonHarness {
    pub(crate) async fn start(instances: Vec<Instance>) -> Self {
        let (changes, changed) = mpsc::channel(16);
        let rig = Self::fed_by(
            ReceiverStream::new(changed)
                .chain(futures::stream::pending())
                .boxed(),
            changes,
        )
        .await;
        rig.reset(instances).await;
        rig
    }

    /// Starts a daemon that gets its endpoints from the test's own discovery.
    pub(crate) async fn following(discovered: SetChanges) -> Self {
        Self::fed_by(discovered, mpsc::channel(1).0).await
    }

    async fn fed_by(discovered: SetChanges, changes: mpsc::Sender<SetChange>) -> Self {
        let (trigger, shutdown) = shutdown::channel();
        let (scrapes, scraped) = mpsc::channel(1024);
        let (_scraper, busy, stats) = Scraper::try_new(&ScrapeConfig::default()).unwrap();
        let shared = DaemonState::new(
            7,
            99,
            [(
                Arc::from("default"),
                ScraperHandle {
                    busy,
                    stats,
                    kv_events: Arc::default(),
                },
            )]
            .into(),
            ClientNames::Any,
        );
        let CompiledConfig {
            pipeline, scraping, ..
        } = CompiledConfig::default_config(&control_plane::config::LatencyOptions::default())
            .unwrap();
        let settings = PoolSettings {
            name: "default".into(),
            pipeline,
            staleness_max: Duration::from_secs(5),
            generation_first: 1,
            ..PoolSettings::default()
        };
        let (targets, _) = watch::channel(Arc::from([]));
        let feed = PoolFeed {
            pool: Pool::new(settings),
            views: Arc::clone(&shared.pools),
            proxies: Arc::clone(&shared.proxies),
            targets,
            scraping,
            config: None,
            objects: None,
            adoptions: AdoptionSender::channel().1,
            emptied: mpsc::channel(1).1,
        };
        tokio::spawn(feed.run(discovered, scraped, shutdown.clone()));
        let incoming = listen(
            ListenerName::State,
            ([127, 0, 0, 1], 0).into(),
            None,
            shutdown.clone(),
        )
        .await
        .unwrap();
        let address = incoming.address();
        tokio::spawn(serve_state(incoming, Arc::clone(&shared), shutdown));
        Self {
            shared,
            address,
            changes,
            scrapes,
            _trigger: trigger,
        }
    }

    pub(crate) async fn reset(&self, instances: Vec<Instance>) {
        self.changes
            .send(SetChange::Reset(instances))
            .await
            .unwrap();
    }

    pub(crate) async fn scraped(&self, event: ScrapeEvent) {
        self.scrapes.send(event).await.unwrap();
    }
}

// === impl FilterStream ===

impl FilterStream {
    /// Connects without sending anything.
    pub(crate) async fn silent(address: SocketAddr) -> Self {
        let channel = Channel::from_shared(format!("http://{address}"))
            .unwrap()
            .connect()
            .await
            .unwrap();
        Self::over(channel).await.unwrap()
    }

    pub(crate) async fn over(channel: Channel) -> Result<Self, Status> {
        let (outbound, messages) = mpsc::channel(16);
        let mut client =
            StateServiceClient::new(channel).max_decoding_message_size(proto::MESSAGE_BYTES_MAX);
        let inbound = client
            .stream(ReceiverStream::new(messages))
            .await?
            .into_inner();
        Ok(Self { outbound, inbound })
    }

    /// Connects, sends a Hello and reads the Welcome.
    pub(crate) async fn connect(
        address: SocketAddr,
        node_id: &str,
        process_id: u64,
        pools: &[&str],
    ) -> (Self, state::Welcome) {
        let mut filter = Self::silent(address).await;
        filter
            .hello(proto::SCHEMA, node_id, process_id, pools)
            .await;
        match filter.next().await {
            Ok(daemon_message::Message::Welcome(welcome)) => (filter, welcome),
            other => panic!("not a welcome: {other:?}"),
        }
    }

    pub(crate) async fn say(&self, message: proxy_message::Message) {
        self.outbound
            .send(state::ProxyMessage {
                message: Some(message),
            })
            .await
            .unwrap();
    }

    /// Sends a message. Returns false if the stream has ended.
    pub(crate) async fn tell(&self, message: proxy_message::Message) -> bool {
        self.outbound
            .send(state::ProxyMessage {
                message: Some(message),
            })
            .await
            .is_ok()
    }

    pub(crate) async fn hello(&self, schema: u32, node_id: &str, process_id: u64, pools: &[&str]) {
        let pools = pools.iter().map(|&p| p.to_owned()).collect();
        self.say(proxy_message::Message::Hello(state::Hello {
            schema,
            node_id: node_id.to_owned(),
            process_id,
            pools,
            release: "9.8.7".to_owned(),
        }))
        .await;
    }

    /// Sends a Hello. Returns false if the stream has ended.
    pub(crate) async fn introduce(&self, node_id: &str, pools: &[&str]) -> bool {
        self.tell(proxy_message::Message::Hello(state::Hello {
            schema: proto::SCHEMA,
            node_id: node_id.to_owned(),
            process_id: 1,
            pools: pools.iter().map(|&p| p.to_owned()).collect(),
            release: String::new(),
        }))
        .await
    }

    pub(crate) async fn next(&mut self) -> Result<daemon_message::Message, Status> {
        let next = tokio::time::timeout(PATIENCE, self.inbound.message())
            .await
            .expect("the daemon stopped answering")?;
        Ok(next
            .expect("the stream ended")
            .message
            .expect("an empty message"))
    }

    pub(crate) async fn metrics(&mut self) -> state::Metrics {
        loop {
            if let daemon_message::Message::Metrics(metrics) = self.next().await.unwrap() {
                return metrics;
            }
        }
    }

    /// Waits for the next pool update, and acknowledges it.
    pub(crate) async fn pool_update(&mut self) -> state::PoolUpdate {
        let pool_update = self.pool_update_unanswered().await;
        self.ack(&pool_update, "").await;
        pool_update
    }

    pub(crate) async fn pool_update_unanswered(&mut self) -> state::PoolUpdate {
        loop {
            if let daemon_message::Message::PoolUpdate(pool_update) = self.next().await.unwrap() {
                return pool_update;
            }
        }
    }

    pub(crate) async fn ack(&self, pool_update: &state::PoolUpdate, refused: &str) {
        let ack = state::Ack {
            pool: pool_update.pool.clone(),
            version: pool_update.version,
            refused: refused.to_owned(),
            held: None,
        };
        self.say(proxy_message::Message::Ack(ack)).await;
    }

    /// Returns the pool update that arrives within `time`, or `None`.
    pub(crate) async fn pool_update_within(&mut self, time: Duration) -> Option<state::PoolUpdate> {
        tokio::time::timeout(time, self.pool_update()).await.ok()
    }
}

// === impl EnvoyStream ===

impl EnvoyStream {
    /// Subscribes to the pool `default`.
    pub(crate) async fn connect(address: SocketAddr, node_id: &str) -> Self {
        let channel = Channel::from_shared(format!("http://{address}"))
            .unwrap()
            .connect()
            .await
            .unwrap();
        Self::over(channel, node_id).await
    }

    /// Subscribes over this connection.
    pub(crate) async fn over(channel: Channel, node_id: &str) -> Self {
        let envoy = Self {
            node_id: node_id.to_owned(),
            ..Self::mute(channel).await
        };
        envoy.send("", None, &["default"]).await;
        envoy
    }

    /// Opens a stream without subscribing.
    pub(crate) async fn mute(channel: Channel) -> Self {
        let (outbound, messages) = mpsc::channel(16);
        let stream = EndpointDiscoveryServiceClient::new(channel)
            .stream_endpoints(ReceiverStream::new(messages))
            .await
            .unwrap();
        Self {
            inbound: stream.into_inner(),
            outbound,
            node_id: String::new(),
        }
    }

    pub(crate) async fn send(&self, nonce: &str, refused: Option<&str>, names: &[&str]) {
        let request = DiscoveryRequest {
            node: Some(Node {
                id: self.node_id.clone(),
                ..Node::default()
            }),
            type_url: control_plane::serve::eds::TYPE_URL.to_owned(),
            resource_names: names.iter().map(|&n| n.to_owned()).collect(),
            response_nonce: nonce.to_owned(),
            error_detail: refused.map(|why| rpc::Status {
                message: why.to_owned(),
                ..rpc::Status::default()
            }),
            ..DiscoveryRequest::default()
        };
        self.outbound.send(request).await.unwrap();
    }

    pub(crate) async fn ack(&self, response: &DiscoveryResponse) {
        self.send(&response.nonce, None, &["default"]).await;
    }

    pub(crate) async fn next(&mut self) -> Result<DiscoveryResponse, Status> {
        let next = tokio::time::timeout(PATIENCE, self.inbound.message())
            .await
            .expect("the daemon stopped answering")?;
        Ok(next.expect("the stream ended"))
    }

    /// Waits for the next set of endpoints, acknowledges it, and returns its ports.
    pub(crate) async fn ports(&mut self) -> Vec<u32> {
        let response = self.next().await.unwrap();
        self.ack(&response).await;
        ports(&response)
    }

    pub(crate) async fn within(&mut self, time: Duration) -> Option<DiscoveryResponse> {
        tokio::time::timeout(time, self.next())
            .await
            .ok()
            .map(Result::unwrap)
    }
}

pub(crate) fn assignments(response: &DiscoveryResponse) -> Vec<ClusterLoadAssignment> {
    let resources = response.resources.iter();
    resources
        .map(|resource| ClusterLoadAssignment::decode(resource.value.as_slice()).unwrap())
        .collect()
}

pub(crate) fn assignment(response: &DiscoveryResponse) -> ClusterLoadAssignment {
    let [assignment] = <[_; 1]>::try_from(assignments(response)).unwrap();
    assignment
}

pub(crate) fn ports(response: &DiscoveryResponse) -> Vec<u32> {
    assignment(response)
        .endpoints
        .iter()
        .flat_map(|l| &l.lb_endpoints)
        .map(port)
        .collect()
}

fn port(endpoint: &LbEndpoint) -> u32 {
    use envoy_types::pb::envoy::config::core::v3::address::Address::SocketAddress;
    use envoy_types::pb::envoy::config::core::v3::socket_address::PortSpecifier::PortValue;
    use envoy_types::pb::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier::Endpoint;
    let Some(Endpoint(endpoint)) = &endpoint.host_identifier else {
        panic!("no endpoint")
    };
    let Some(SocketAddress(address)) = &endpoint.address.as_ref().unwrap().address else {
        panic!("no socket address")
    };
    let Some(PortValue(port)) = address.port_specifier else {
        panic!("no port")
    };
    port
}

pub(crate) fn names(pool_update: &state::PoolUpdate) -> Vec<&str> {
    pool_update
        .endpoints
        .iter()
        .map(|e| e.name.as_str())
        .collect()
}
