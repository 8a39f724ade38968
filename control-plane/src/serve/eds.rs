//! Serves EDS for the pools, on the listener of the state stream. In Envoy's configuration, the
//! `eds_config` of a cluster names this daemon, and the `service_name` of the cluster is the pool.
//!
//! The variants of EDS, state of the world and incremental, are thin adapters of
//! [`EdsSubscription`]. Every endpoint has the metadata `envoy.lb: {open: "1"}`, so that a subset
//! load balancer can send to any endpoint the requests that fail open, and only these requests.
//! Health is not sent, because Envoy ignores it for hosts that a header names.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::{Request, Response, Status, Streaming};

use crate::serve::state_stream::admission::NAME_BYTES_MAX;
use crate::serve::state_stream::refusal;
use crate::shutdown::Shutdown;
use crate::state::client_names::RequestedPools;
use crate::state::eds_streams::EdsStream;
use crate::state::log_limits::{ShownNames, shown_name};
use crate::state::peer::{self, EDS_REQUEST_COST, QuotaPermit, RemoteAddress};
use crate::state::shared::DaemonState;

mod request;
mod subscription;
mod variant;
use request::{EdsCodec, EdsRequest, SubscriptionChange};
pub use subscription::{DueResponse, EDS_ACK_WAIT_MAX, EdsSubscription, EnvoyAnswer};
pub use variant::TYPE_URL;
use variant::{DeltaXds, SotwXds, XdsVariant};

/// The maximum number of names that one stream may subscribe to: more pools than any Envoy has.
const NAMES_MAX: usize = 256;

/// The largest request accepted, in bytes. Envoy's first request names all of its extensions, about
/// 100 KB.
const REQUEST_BYTES_MAX: usize = 512 << 10;

const SOTW_METHOD: &str = "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints";
const DELTA_METHOD: &str = "/envoy.service.endpoint.v3.EndpointDiscoveryService/DeltaEndpoints";

/// The maximum time that a new stream may take to send its first request.
const FIRST_REQUEST_WAIT_MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct EdsServer {
    shared: Arc<DaemonState>,
    shutdown: Shutdown,
}

/// The method of one variant.
struct EdsMethod<V> {
    server: EdsServer,
    variant: PhantomData<V>,
}

/// A stream's row in the table of EDS streams; dropping it removes the row.
struct EdsStreamGuard {
    shared: Arc<DaemonState>,
    stream_id: u64,
    node_id: String,
    remote: RemoteAddress,
}

type XdsResponseStream<V> = ReceiverStream<Result<<V as XdsVariant>::XdsResponse, Status>>;

// === impl EdsServer ===

impl EdsServer {
    /// Serves the state in `shared` until `shutdown`.
    #[must_use]
    pub fn new(shared: Arc<DaemonState>, shutdown: Shutdown) -> Self {
        Self { shared, shutdown }
    }

    /// Answers a call of one method.
    async fn answer<V: XdsVariant>(
        self,
        request: http::Request<Body>,
    ) -> Result<http::Response<Body>, Infallible> {
        let method = EdsMethod {
            server: self,
            variant: PhantomData::<V>,
        };
        let mut grpc = Grpc::new(EdsCodec::<V::XdsRequest>::default())
            .max_decoding_message_size(REQUEST_BYTES_MAX);
        Ok(grpc.streaming(method, request).await)
    }

    fn open<V: XdsVariant>(
        &self,
        request: Request<Streaming<EdsRequest>>,
    ) -> Result<Response<XdsResponseStream<V>>, Status> {
        let remote = RemoteAddress::from_extensions(request.extensions());
        let permit = self
            .shared
            .proxies
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
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn serve<V: XdsVariant>(
        mut self,
        mut inbound: Streaming<EdsRequest>,
        outbound: &mpsc::Sender<Result<V::XdsResponse, Status>>,
        remote: RemoteAddress,
        permit: QuotaPermit,
    ) -> Result<(), Status> {
        tokio::time::sleep_until(permit.begin(Instant::now())).await;
        let first = tokio::time::timeout(FIRST_REQUEST_WAIT_MAX, inbound.message());
        let Some(first) = first
            .await
            .map_err(|_| Status::deadline_exceeded("no request came"))??
        else {
            return Ok(());
        };
        // Requests above the rate of the origin stay unread, so HTTP/2 flow control slows the
        // sender down.
        let pay =
            |bytes: usize| permit.message(bytes.saturating_add(EDS_REQUEST_COST), Instant::now());
        let mut read_at = pay(first.bytes);
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
                    read_at = pay(request.bytes);
                    if self.receive(&mut subscription, request, &row)? {
                        read_at = permit.begin(Instant::now());
                    }
                }
                () = tokio::time::sleep_until(read_at), if !may_read => {}
                () = tokio::time::sleep_until(late_at.unwrap_or(read_at)), if late_at.is_some() => self.mark_late(&mut subscription, &row),
                changed = pools.changed() => changed.map_err(|_| Status::unavailable("shutting down"))?,
                () = outbound.closed() => return Ok(()),
                () = self.shutdown.begun() => return Err(Status::unavailable("the daemon is shutting down")),
            }
        }
    }

    /// Processes a request. Returns whether the request changed the subscribed names.
    fn receive(
        &self,
        subscription: &mut EdsSubscription,
        asked: EdsRequest,
        row: &EdsStreamGuard,
    ) -> Result<bool, Status> {
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
                if self.shared.proxies.refusal_lines.admit(Instant::now()) {
                    tracing::error!(why, names = ?subscription.names(), "Envoy refused an EDS response and keeps its old hosts");
                }
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
        // Only the pools that this daemon serves, and to which the Envoy's certificate gives
        // access, are kept. Other names are logged and counted once per stream, because an Envoy
        // may repeat them.
        let origin = &row.remote.origin;
        let served = &self.shared.pools.names;
        let sorted = self.shared.proxies.clients.sort(names, origin, served);
        let is_whole = sorted.unknown.is_empty() && sorted.refused.is_empty();
        if !is_whole && subscription.is_first_unserved() {
            self.report_unserved(&sorted, row);
        }
        let names: BTreeSet<String> = sorted.allowed.into_iter().collect();
        let is_changed = names != *subscription.names();
        subscription.set_names(names);
        row.update(subscription);
        Ok(is_changed)
    }

    fn report_unserved(&self, sorted: &RequestedPools, row: &EdsStreamGuard) {
        let lines = &self.shared.proxies.refusal_lines;
        let now = Instant::now();
        if !sorted.unknown.is_empty() && lines.admit(now) {
            tracing::warn!(unknown = ?ShownNames(&sorted.unknown), pools = ?self.shared.pools.names, "an Envoy subscribes to pools that are not configured here");
        }
        if !sorted.refused.is_empty() {
            self.shared.reports.counters().pools_refused += sorted.refused.len() as u64;
            if lines.admit(now) {
                tracing::warn!(node = shown_name(&row.node_id), peer = %row.remote, certificate = row.remote.origin.certificate.as_deref(), refused = ?ShownNames(&sorted.refused), "an Envoy subscribes to pools to which its certificate gives no access (--state-tls-client-names)");
            }
        }
    }

    /// Marks a stream as late because its Envoy does not answer. Pool updates then no longer wait
    /// for the stream.
    fn mark_late(&self, subscription: &mut EdsSubscription, row: &EdsStreamGuard) {
        subscription.mark_late();
        row.update(subscription);
        self.shared.reports.counters().eds_unanswered += 1;
        let peer = row.remote.to_string();
        tracing::warn!(peer, node = shown_name(&row.node_id), names = ?subscription.names(), "an Envoy has not applied an EDS response for {EDS_ACK_WAIT_MAX:?}; its filter now gets pool updates with endpoints that the Envoy may not have yet");
    }
}

impl NamedService for EdsServer {
    const NAME: &'static str = "envoy.service.endpoint.v3.EndpointDiscoveryService";
}

// This server replaces the generated server of envoy-types, which would decode all fields of a
// request.
impl Service<http::Request<Body>> for EdsServer {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let server = self.clone();
        match request.uri().path() {
            SOTW_METHOD => Box::pin(server.answer::<SotwXds>(request)),
            DELTA_METHOD => Box::pin(server.answer::<DeltaXds>(request)),
            _ => {
                let status = Status::unimplemented(
                    "EDS is served by stream only: StreamEndpoints or DeltaEndpoints",
                );
                let response: http::Response<Body> = status.into_http();
                Box::pin(ready(Ok(response)))
            }
        }
    }
}

// === impl EdsMethod ===

impl<V: XdsVariant> StreamingService<EdsRequest> for EdsMethod<V> {
    type Response = V::XdsResponse;
    type ResponseStream = XdsResponseStream<V>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<EdsRequest>>) -> Self::Future {
        ready(self.server.open::<V>(request))
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
