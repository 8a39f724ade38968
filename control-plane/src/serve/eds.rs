//! EDS for the pools, on the listener of the state stream. The `eds_config` of a cluster in Envoy
//! names this daemon, and its `service_name` is the pool.
//!
//! Both variants, state of the world and incremental, are thin adapters of [`EdsSubscription`].
//! Every endpoint has the metadata `envoy.lb: {open: "1"}`, so that a subset load balancer that
//! refuses everything else can fail open for one request. Health is not sent, because Envoy ignores
//! it for hosts that a header names.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use envoy_types::pb::envoy::config::core::v3::address::Address as AddressKind;
use envoy_types::pb::envoy::config::core::v3::socket_address::{PortSpecifier, Protocol};
use envoy_types::pb::envoy::config::core::v3::{Address, Metadata, SocketAddress};
use envoy_types::pb::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier;
use envoy_types::pb::envoy::config::endpoint::v3::{
    ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_server::EndpointDiscoveryService;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Any, Struct, Value};
use envoy_types::pb::google::rpc;
use futures::Stream;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::pool::writer::PoolView;
use crate::serve::state_stream::admission::{NAME_BYTES_MAX, REASON_BYTES_MAX};
use crate::serve::state_stream::refusal;
use crate::shutdown::Shutdown;
use crate::state::eds_streams::EdsStream;
use crate::state::peer::{self, EDS_REQUEST_COST, QuotaPermit, RemoteAddress};
use crate::state::pool_views::PoolViews;
use crate::state::shared::DaemonState;

mod subscription;
pub use subscription::{DueResponse, EdsSubscription, EnvoyAnswer};

/// The only resource type served here.
pub const TYPE_URL: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// The most names that one stream may subscribe to: more than the pools of any Envoy.
const NAMES_MAX: usize = 256;

/// How long pool updates wait for an Envoy to apply an EDS response. Envoys need milliseconds, a
/// busy one up to a second. A client that takes longer is broken or not an Envoy, and must not
/// withhold endpoints from its proxy forever.
pub const EDS_ACK_WAIT_MAX: Duration = Duration::from_secs(5);

/// The largest request accepted, in bytes. Envoy's first request names all of its extensions, some
/// 100 KB.
pub const REQUEST_BYTES_MAX: usize = 512 << 10;

/// How long a new stream may take to send its first request.
const FIRST_REQUEST_WAIT_MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct EdsServer {
    shared: Arc<DaemonState>,
    shutdown: Shutdown,
}

/// The parts of a request that matter, for both variants.
struct EdsRequest {
    node_id: Option<String>,
    type_url: String,
    names: SubscriptionChange,
    nonce: String,
    error: Option<String>,
}

enum SubscriptionChange {
    /// All names that are subscribed now.
    All(Vec<String>),
    /// Names added and names removed.
    Delta {
        more: Vec<String>,
        fewer: Vec<String>,
    },
}

/// The differences of the two variants: their messages.
trait XdsVariant: Send + 'static {
    type XdsRequest: Send + 'static;
    type XdsResponse: Send + 'static;

    fn bytes(request: &Self::XdsRequest) -> usize;
    fn parse_request(request: Self::XdsRequest) -> EdsRequest;
    fn build_response(
        due: &DueResponse,
        names: &BTreeSet<String>,
        pools: &PoolViews,
        version: String,
    ) -> Self::XdsResponse;
}

struct SotwXds;
struct DeltaXds;

/// A stream's row in the table of EDS streams; dropping it removes the row.
struct EdsStreamGuard {
    shared: Arc<DaemonState>,
    stream_id: u64,
    node_id: String,
    remote: RemoteAddress,
}

type XdsResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

// === impl EdsServer ===

impl EdsServer {
    /// Serves the state in `shared` until `shutdown`.
    #[must_use]
    pub fn new(shared: Arc<DaemonState>, shutdown: Shutdown) -> Self {
        Self { shared, shutdown }
    }

    fn open<V: XdsVariant>(
        &self,
        request: Request<Streaming<V::XdsRequest>>,
    ) -> Result<Response<XdsResponseStream<V::XdsResponse>>, Status> {
        let remote = RemoteAddress::of(request.extensions());
        let permit = self
            .shared
            .proxies
            .origins
            .acquire(peer::StreamQuota::EdsStream, &remote.origin, Instant::now())
            .map_err(refusal)?;
        let inbound = request.into_inner();
        let (outbound, messages) = mpsc::channel(1);
        let server = self.clone();
        tokio::spawn(async move {
            if let Err(status) = server.serve::<V>(inbound, &outbound, remote, permit).await {
                let _ = outbound.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }

    async fn serve<V: XdsVariant>(
        mut self,
        mut inbound: Streaming<V::XdsRequest>,
        outbound: &mpsc::Sender<Result<V::XdsResponse, Status>>,
        remote: RemoteAddress,
        permit: QuotaPermit,
    ) -> Result<(), Status> {
        let first = tokio::time::timeout(FIRST_REQUEST_WAIT_MAX, inbound.message());
        let Some(first) = first
            .await
            .map_err(|_| Status::deadline_exceeded("no request came"))??
        else {
            return Ok(());
        };
        // Requests above the origin's rate stay unread, so that flow control slows the sender down.
        let pay =
            |bytes: usize| permit.message(bytes.saturating_add(EDS_REQUEST_COST), Instant::now());
        let mut read_at = pay(V::bytes(&first));
        let first = V::parse_request(first);
        let row = EdsStreamGuard::insert(&self.shared, &first, remote)?;
        let mut subscription = EdsSubscription::default();
        let mut pools = self.shared.pools.views.subscribe();
        self.receive(&mut subscription, first, &row)?;
        loop {
            let views = pools.borrow_and_update().clone();
            if let Some(due) = subscription.due(&views, Instant::now()) {
                let version = self.shared.life.next_version();
                let version = format!("{}.{}", version.term, version.sequence);
                if outbound
                    .send(Ok(V::build_response(
                        &due,
                        subscription.names(),
                        &views,
                        version,
                    )))
                    .await
                    .is_err()
                {
                    return Ok(());
                }
                continue;
            }
            let may_read = read_at <= Instant::now();
            let late_at = subscription.late_at();
            tokio::select! {
                request = inbound.message(), if may_read => {
                    let Some(request) = request? else { return Ok(()) };
                    read_at = pay(V::bytes(&request));
                    self.receive(&mut subscription, V::parse_request(request), &row)?;
                }
                () = tokio::time::sleep_until(read_at), if !may_read => {}
                () = tokio::time::sleep_until(late_at.unwrap_or(read_at)), if late_at.is_some() => self.mark_late(&mut subscription, &row),
                changed = pools.changed() => changed.map_err(|_| Status::unavailable("shutting down"))?,
                () = outbound.closed() => return Ok(()),
                () = self.shutdown.begun() => return Err(Status::unavailable("the daemon is shutting down")),
            }
        }
    }

    fn receive(
        &self,
        subscription: &mut EdsSubscription,
        asked: EdsRequest,
        row: &EdsStreamGuard,
    ) -> Result<(), Status> {
        if !asked.type_url.is_empty() && asked.type_url != TYPE_URL {
            return Err(Status::invalid_argument(format!(
                "{} is not served here, only {TYPE_URL}",
                asked.type_url
            )));
        }
        if !asked.nonce.is_empty() {
            let answer = asked
                .error
                .map_or(EnvoyAnswer::Accepted, EnvoyAnswer::Refused);
            let counts = subscription.answer(&asked.nonce, &answer);
            if let EnvoyAnswer::Refused(why) = &answer
                && counts
            {
                tracing::error!(why, names = ?subscription.names(), "Envoy refused an EDS response; it keeps its old hosts");
                self.shared.reports.counters().eds_refused += 1;
            }
        }
        let names: BTreeSet<String> = match asked.names {
            SubscriptionChange::All(names) => names.into_iter().collect(),
            SubscriptionChange::Delta { more, fewer } => {
                let mut names = subscription.names().clone();
                names.extend(more);
                names.retain(|name| !fewer.contains(name));
                names
            }
        };
        if names.len() > NAMES_MAX {
            return Err(Status::invalid_argument(format!(
                "{} names subscribed to, at most {NAMES_MAX}",
                names.len()
            )));
        }
        // Only names of known pools are kept. Unknown ones are logged once for each stream, because
        // an Envoy may repeat them.
        let is_served = |name: &String| {
            self.shared
                .pools
                .names
                .iter()
                .any(|known| **known == **name)
        };
        let (names, unknown): (BTreeSet<String>, BTreeSet<String>) =
            names.into_iter().partition(is_served);
        if !unknown.is_empty() && subscription.is_first_unknown() {
            let unknown: Vec<&str> = unknown
                .iter()
                .filter_map(|name| name.get(..name.floor_char_boundary(NAME_BYTES_MAX)))
                .collect();
            tracing::warn!(?unknown, pools = ?self.shared.pools.names, "an Envoy subscribes to pools that are not configured here");
        }
        subscription.set_names(names);
        row.update(subscription);
        Ok(())
    }

    /// Marks a stream as late because its Envoy does not answer: pool updates no longer wait for
    /// it.
    fn mark_late(&self, subscription: &mut EdsSubscription, row: &EdsStreamGuard) {
        subscription.mark_late();
        row.update(subscription);
        self.shared.reports.counters().eds_unanswered += 1;
        let peer = row.remote.to_string();
        tracing::warn!(peer, node = row.node_id, names = ?subscription.names(), "an Envoy has not applied its hosts for {EDS_ACK_WAIT_MAX:?}; its proxy gets new endpoints without waiting for it");
    }
}

#[tonic::async_trait]
impl EndpointDiscoveryService for EdsServer {
    type StreamEndpointsStream = XdsResponseStream<DiscoveryResponse>;
    type DeltaEndpointsStream = XdsResponseStream<DeltaDiscoveryResponse>;

    async fn stream_endpoints(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamEndpointsStream>, Status> {
        self.open::<SotwXds>(request)
    }

    async fn delta_endpoints(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaEndpointsStream>, Status> {
        self.open::<DeltaXds>(request)
    }

    async fn fetch_endpoints(
        &self,
        _request: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented(
            "EDS is served by stream only: StreamEndpoints or DeltaEndpoints",
        ))
    }
}

// === impl SotwXds ===

impl XdsVariant for SotwXds {
    type XdsRequest = DiscoveryRequest;
    type XdsResponse = DiscoveryResponse;

    fn bytes(request: &DiscoveryRequest) -> usize {
        request.encoded_len()
    }

    fn parse_request(request: DiscoveryRequest) -> EdsRequest {
        EdsRequest {
            node_id: request.node.map(|n| n.id),
            type_url: request.type_url,
            names: SubscriptionChange::All(request.resource_names),
            nonce: request.response_nonce,
            error: request.error_detail.map(reason),
        }
    }

    fn build_response(
        due: &DueResponse,
        names: &BTreeSet<String>,
        pools: &PoolViews,
        version: String,
    ) -> DiscoveryResponse {
        let resources = names
            .iter()
            .filter_map(|name| pools.get(name))
            .map(resource)
            .collect();
        DiscoveryResponse {
            version_info: version,
            resources,
            type_url: TYPE_URL.to_owned(),
            nonce: due.nonce.clone(),
            ..DiscoveryResponse::default()
        }
    }
}

// === impl DeltaXds ===

impl XdsVariant for DeltaXds {
    type XdsRequest = DeltaDiscoveryRequest;
    type XdsResponse = DeltaDiscoveryResponse;

    fn bytes(request: &DeltaDiscoveryRequest) -> usize {
        request.encoded_len()
    }

    fn parse_request(request: DeltaDiscoveryRequest) -> EdsRequest {
        EdsRequest {
            node_id: request.node.map(|n| n.id),
            type_url: request.type_url,
            names: SubscriptionChange::Delta {
                more: request.resource_names_subscribe,
                fewer: request.resource_names_unsubscribe,
            },
            nonce: request.response_nonce,
            error: request.error_detail.map(reason),
        }
    }

    fn build_response(
        due: &DueResponse,
        _names: &BTreeSet<String>,
        pools: &PoolViews,
        version: String,
    ) -> DeltaDiscoveryResponse {
        let resources = due
            .changed
            .iter()
            .filter_map(|name| pools.get(name))
            .map(|view| Resource {
                name: view.name.to_string(),
                version: version.clone(),
                resource: Some(resource(view)),
                ..Resource::default()
            })
            .collect();
        DeltaDiscoveryResponse {
            system_version_info: version,
            resources,
            type_url: TYPE_URL.to_owned(),
            nonce: due.nonce.clone(),
            ..DeltaDiscoveryResponse::default()
        }
    }
}

// === impl EdsStreamGuard ===

impl EdsStreamGuard {
    fn insert(
        shared: &Arc<DaemonState>,
        asked: &EdsRequest,
        remote: RemoteAddress,
    ) -> Result<Self, Status> {
        let node_id = asked.node_id.clone().unwrap_or_default();
        if node_id.len() > NAME_BYTES_MAX {
            return Err(Status::invalid_argument(format!(
                "a node id is longer than {NAME_BYTES_MAX} bytes"
            )));
        }
        let stream_id = shared.life.next_stream_id();
        let pools = std::collections::BTreeMap::new();
        let stream = EdsStream {
            node_id: node_id.clone(),
            remote: remote.clone(),
            since: SystemTime::now(),
            pools,
        };
        shared
            .proxies
            .eds
            .send_modify(|eds| eds.open(stream_id, stream));
        Ok(Self {
            shared: Arc::clone(shared),
            stream_id,
            node_id,
            remote,
        })
    }

    fn update(&self, subscription: &EdsSubscription) {
        self.shared.proxies.eds.send_if_modified(|eds| {
            let Some(stream) = eds.open.get_mut(&self.stream_id) else {
                return false;
            };
            let changed = stream.pools != *subscription.acks();
            stream.pools.clone_from(subscription.acks());
            changed
        });
    }
}

impl Drop for EdsStreamGuard {
    fn drop(&mut self) {
        self.shared
            .proxies
            .eds
            .send_modify(|eds| eds.close(self.stream_id, Instant::now()));
    }
}

/// Returns the reason why Envoy refused a response, truncated to [`REASON_BYTES_MAX`].
fn reason(error: rpc::Status) -> String {
    let rpc::Status { mut message, .. } = error;
    message.truncate(message.floor_char_boundary(REASON_BYTES_MAX));
    message
}

fn resource(view: &PoolView) -> Any {
    let assignment = ClusterLoadAssignment {
        cluster_name: view.name.to_string(),
        endpoints: vec![LocalityLbEndpoints {
            lb_endpoints: view
                .eds
                .addresses
                .iter()
                .map(|&address| lb_endpoint(address))
                .collect(),
            ..LocalityLbEndpoints::default()
        }],
        ..ClusterLoadAssignment::default()
    };
    Any {
        type_url: TYPE_URL.to_owned(),
        value: assignment.encode_to_vec(),
    }
}

fn lb_endpoint(address: SocketAddr) -> LbEndpoint {
    let socket_address = SocketAddress {
        protocol: Protocol::Tcp.into(),
        address: address.ip().to_string(),
        port_specifier: Some(PortSpecifier::PortValue(u32::from(address.port()))),
        ..SocketAddress::default()
    };
    let address = Address {
        address: Some(AddressKind::SocketAddress(socket_address)),
    };
    let open = Value {
        kind: Some(Kind::StringValue("1".to_owned())),
    };
    let metadata = Metadata {
        filter_metadata: HashMap::from([(
            "envoy.lb".to_owned(),
            Struct {
                fields: HashMap::from([("open".to_owned(), open)]),
            },
        )]),
        ..Metadata::default()
    };
    LbEndpoint {
        metadata: Some(metadata),
        host_identifier: Some(HostIdentifier::Endpoint(Endpoint {
            address: Some(address),
            ..Endpoint::default()
        })),
        ..LbEndpoint::default()
    }
}
