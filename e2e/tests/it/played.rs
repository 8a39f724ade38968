//! A daemon that the test simulates: it sends exactly the messages that the test gives it, and
//! records what it receives.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::Stream;
use proto::state::state_service_server::{StateService, StateServiceServer};
use proto::state::{self, daemon_message, proxy_message};
use proto::{PoolState, encode_metrics, encode_pool_update};
use scheduler::objects::ObjectsSpec;
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, PipelineSpec, PluginSpec, Readiness, Slot,
    Version,
};
use serde_json::{Value, json};
use testbed::ports::ReservedPort;
use testbed::{Result, wait_for};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

/// The maximum time from a message to its effect. The product promises milliseconds.
const LIMIT: Duration = Duration::from_secs(30);

type PlayedMessages = mpsc::UnboundedSender<Result<state::DaemonMessage, Status>>;

/// The simulated daemon.
pub(crate) struct PlayedDaemon {
    stage: Arc<PlayedState>,
    address: SocketAddr,
    /// The port of the server; `None` if another process leased the port.
    port: Option<ReservedPort>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct PlayedState {
    /// The schema version in the Welcome message.
    schema: AtomicU32,
    /// The messages that follow each Welcome message.
    opening: Mutex<Vec<state::DaemonMessage>>,
    /// The sender of the newest stream.
    lines: Mutex<Option<PlayedMessages>>,
    received: Mutex<Vec<proxy_message::Message>>,
}

// === impl PlayedDaemon ===

impl PlayedDaemon {
    /// Starts the daemon: every stream gets a Welcome and then `opening`.
    pub(crate) async fn start(opening: Vec<state::DaemonMessage>) -> Result<Self> {
        let port = ReservedPort::lease()?;
        let mut played = Self::start_at(port.address()).await?;
        played.rehearse(proto::SCHEMA, opening);
        played.port = Some(port);
        Ok(played)
    }

    /// Starts at the address of another daemon, without messages after the Welcome.
    pub(crate) async fn start_at(address: SocketAddr) -> Result<Self> {
        let stage = Arc::new(PlayedState {
            schema: proto::SCHEMA.into(),
            ..PlayedState::default()
        });
        let listener = tokio::net::TcpListener::bind(address).await?;
        // The server has no size limit, so that tests can send messages that are too large.
        let service = StateServiceServer::new(PlayedService(stage.clone()))
            .max_encoding_message_size(usize::MAX);
        let server = tonic::transport::Server::builder().add_service(service);
        // With a shutdown signal that never comes, connections end when the task is aborted.
        let server = server
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), std::future::pending());
        let task = tokio::spawn(async move {
            let _ = server.await; // The server runs until the test ends.
        });
        Ok(Self {
            stage,
            address,
            port: None,
            task,
        })
    }

    /// Returns an edit of the shipped configuration: state comes from this daemon, and Envoy knows
    /// `hosts` without the daemon.
    pub(crate) fn envoy_config(
        &self,
        hosts: &[SocketAddr],
    ) -> impl Fn(&mut Value) + Send + 'static {
        let hosts = known_hosts(hosts);
        let port = self.address.port();
        move |config| {
            hosts(config);
            let state = config.pointer_mut("/static_resources/clusters/1/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address");
            *state.expect("the cluster of the daemon") =
                json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
        }
    }

    /// Sets the schema of the next Welcome, and the messages that follow it.
    pub(crate) fn rehearse(&self, schema: u32, opening: Vec<state::DaemonMessage>) {
        self.stage.schema.store(schema, Ordering::Relaxed);
        *lock(&self.stage.opening) = opening;
    }

    /// Sends a message on the newest stream.
    pub(crate) fn say(&self, message: state::DaemonMessage) -> Result<()> {
        let lines = lock(&self.stage.lines);
        Ok(lines
            .as_ref()
            .ok_or("no stream is open")?
            .send(Ok(message))?)
    }

    /// Ends the newest stream with an error.
    pub(crate) fn leave(&self) {
        if let Some(lines) = lock(&self.stage.lines).take() {
            // The stream may have ended already.
            let _ = lines.send(Err(Status::unavailable("the test ends this stream")));
        }
    }

    /// Waits for a message from a proxy that satisfies `pick`, from the first message on.
    pub(crate) async fn hear<T>(
        &self,
        what: &str,
        pick: impl Fn(&proxy_message::Message) -> Option<T>,
    ) -> Result<T> {
        wait_for(LIMIT, what, || async {
            lock(&self.stage.received).iter().find_map(&pick)
        })
        .await
    }

    /// Returns all messages received so far.
    pub(crate) fn received(&self) -> Vec<proxy_message::Message> {
        lock(&self.stage.received).clone()
    }
}

impl Drop for PlayedDaemon {
    fn drop(&mut self) {
        drop(self.port.take());
        self.task.abort();
    }
}

struct PlayedService(Arc<PlayedState>);

#[tonic::async_trait]
impl StateService for PlayedService {
    type StreamStream = Pin<Box<dyn Stream<Item = Result<state::DaemonMessage, Status>> + Send>>;

    async fn stream(
        &self,
        request: Request<Streaming<state::ProxyMessage>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        let stage = self.0.clone();
        let mut inbound = request.into_inner();
        let (lines, messages) = mpsc::unbounded_channel();
        let schema = stage.schema.load(Ordering::Relaxed);
        let welcome = state::Welcome {
            schema,
            release: "played".to_owned(),
            unknown_pools: Vec::new(),
            refused_pools: Vec::new(),
        };
        let opening = lock(&stage.opening).clone();
        for message in [message(daemon_message::Message::Welcome(welcome))]
            .into_iter()
            .chain(opening)
        {
            let _ = lines.send(Ok(message)); // the receiver still exists
        }
        *lock(&stage.lines) = Some(lines);
        tokio::spawn(async move {
            while let Some(Ok(state::ProxyMessage {
                message: Some(message),
            })) = inbound.next().await
            {
                lock(&stage.received).push(message);
            }
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            messages,
        ))))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === Messages ===

pub(crate) fn message(message: daemon_message::Message) -> state::DaemonMessage {
    state::DaemonMessage {
        message: Some(message),
    }
}

/// Returns a pool update of the pool `default` as the daemon would send it, scored by queue length.
pub(crate) fn pool_update(term: u64, sequence: u64, hosts: &[SocketAddr]) -> state::PoolUpdate {
    let endpoint = |(slot, address): (u16, &SocketAddr)| Endpoint {
        id: EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        },
        name: format!("server-{slot}").into(),
        address: address.to_string().into(),
        readiness: Readiness::Ready,
        labels: Box::default(),
        models: std::sync::Arc::default(),
        age_ms: 60_000,
    };
    let endpoints: Vec<Endpoint> = (0..).zip(hosts).map(endpoint).collect();
    encode_pool_update(PoolState {
        pool: "default",
        version: Version { term, sequence },
        endpoints: &endpoints,
        objects: &ObjectsSpec::default(),
        pipeline: &PipelineSpec::of_one_profile(
            "default",
            vec![(PluginSpec::of_type("queue-scorer"), 1.0)],
            3,
        ),
        hash_secret: 1,
        staleness_max_ms: 600_000,
    })
}

/// Returns metrics for the pool update of this version, with these queues and otherwise idle
/// engines.
pub(crate) fn metrics(pool_update: (u64, u64), sequence: u64, queues: &[f32]) -> state::Metrics {
    let metrics = |queue: &f32| EndpointMetrics {
        queue_depth: Some(*queue),
        running_requests: Some(0.0),
        kv_cache_utilization: Some(0.0),
        kv_block_tokens: Some(16),
        kv_blocks: Some(1_000),
        ..EndpointMetrics::default()
    };
    let version = Version {
        term: pool_update.0,
        sequence: pool_update.1,
    };
    encode_metrics(
        "default",
        version,
        sequence,
        &queues.iter().map(metrics).collect::<Vec<_>>(),
    )
}

/// Returns an edit of the shipped configuration: Envoy knows these hosts from another source than
/// the daemon, as with Istio.
pub(crate) fn known_hosts(hosts: &[SocketAddr]) -> impl Fn(&mut Value) + Send + 'static {
    let host = |host: &SocketAddr| {
        json!({
            "endpoint": {"address": {"socket_address": {"address": host.ip().to_string(), "port_value": host.port()}}},
            "metadata": {"filter_metadata": {"envoy.lb": {"open": "1"}}},
        })
    };
    let hosts: Vec<Value> = hosts.iter().map(host).collect();
    move |config| {
        let cluster = config
            .pointer_mut("/static_resources/clusters/0")
            .and_then(Value::as_object_mut)
            .expect("the pool's cluster");
        cluster.remove("eds_cluster_config");
        cluster.insert("type".to_owned(), json!("STATIC"));
        cluster.insert(
            "load_assignment".to_owned(),
            json!({"cluster_name": "inference-pool", "endpoints": [{"lb_endpoints": hosts}]}),
        );
    }
}
