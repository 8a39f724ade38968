//! The gRPC service, and the transport of each of its streams.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use exchange::trace::{TRACEPARENT, TraceContext};
use exchange::{DestinationFormat, ExchangeSettings, Timestamp};
use futures::stream;
use http::{HeaderMap, HeaderValue};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use prost::bytes::Bytes;
use tokio::sync::{Notify, watch};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::metadata::{GRPC_CONTENT_TYPE, MetadataMap};
use tonic::server::NamedService;

use super::gateway_connection::GatewayConnection;
use super::memory::STREAMS_MAX;
use super::server::{ExtProcServer, ServedPool};
use super::session::{SessionAction, StreamSession};

/// The gRPC metadata that names the pool of a stream (`initial_metadata` in Envoy's
/// `grpc_service`). The metadata is not needed if there is one pool, nor where the stream's
/// authority is the Service that the pool's InferencePool names.
pub const POOL: &str = "x-switchpoint-pool";

/// The gRPC metadata with the format of the destination: `list` or `single`.
pub const DESTINATION_FORMAT: &str = "x-switchpoint-destination-format";

/// The maximum number of streams of one connection, so that one connection does not take all
/// streams. An Envoy with more opens another connection.
pub const STREAMS_PER_CONNECTION_MAX: u32 = 4_096;

/// Read-ahead of one stream, in bytes: some pieces of a body. The server reads a stream as soon as
/// data arrives, unless the proxy takes no answers.
pub const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// Read-ahead of a connection, in bytes. For each unread frame, the library h2 counts the bytes
/// that the frame lacks to 256. It closes a connection if the sum exceeds half of this. A daemon
/// that briefly gets no CPU must not lose a connection, so there is room for an unread frame of
/// every stream. So each connection can take this much memory beyond what the server's limit on
/// memory counts.
pub const CONNECTION_WINDOW_BYTES: u32 = 2 * 256 * STREAMS_PER_CONNECTION_MAX;

/// The longest header list of a gRPC request, in bytes; its metadata is two short names. Each open
/// stream may send this much.
pub const METADATA_BYTES_MAX: u32 = 16 << 10;

pub(super) const METHOD: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// Serves ext_proc streams.
#[derive(Clone, Debug)]
pub struct ExtProcService {
    server: Arc<ExtProcServer>,
    single: Arc<ExchangeSettings>,
    list: Arc<ExchangeSettings>,
    format: DestinationFormat,
    stopping: watch::Receiver<bool>,
}

/// A stream, and the source of its bytes.
struct StreamTransport {
    session: Arc<StreamSession>,
    server: Arc<ExtProcServer>,
    pool: Arc<ServedPool>,
    inbound: Body,
    stopping: watch::Receiver<bool>,
    ended: bool,
}

// === impl ExtProcService ===

impl ExtProcService {
    /// Creates the service; decisions use the state of `server`. `stopping` becomes true, or
    /// closes, when the daemon stops.
    #[must_use]
    pub fn new(
        server: Arc<ExtProcServer>,
        settings: &ExchangeSettings,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let with = |format| {
            let mut settings = settings.clone();
            settings.destination.format = format;
            settings.unread_reset_ms = 0; // Envoy takes no reply to a request whose reply has begun
            Arc::new(settings)
        };
        let single = with(DestinationFormat::Single);
        let list = with(DestinationFormat::List);
        Self {
            server,
            single,
            list,
            format: settings.destination.format,
            stopping,
        }
    }

    fn pool(&self, metadata: &MetadataMap, authority: &str) -> Result<Arc<ServedPool>, Status> {
        let name = word(metadata, POOL)?;
        let why = || match name {
            Some(name) => format!("there is no pool {name:?} here"),
            None => format!(
                "which pool? There are several, and {authority:?} is not the picker of exactly one InferencePool: give each pool its own \
                 Service or port, or name the pool in the gRPC metadata {POOL}"
            ),
        };
        let pool = self.server.pool(name).or_else(|| {
            if name.is_none() {
                self.server.pool_of_service(authority)
            } else {
                None
            }
        });
        pool.cloned().ok_or_else(|| Status::invalid_argument(why()))
    }

    fn settings(&self, metadata: &MetadataMap) -> Result<&Arc<ExchangeSettings>, Status> {
        let format = match word(metadata, DESTINATION_FORMAT)? {
            None => self.format,
            Some("single") => DestinationFormat::Single,
            Some("list") => DestinationFormat::List,
            Some(other) => {
                return Err(Status::invalid_argument(format!(
                    "the gRPC metadata {DESTINATION_FORMAT} is \"{other}\", not single or list"
                )));
            }
        };
        Ok(match format {
            DestinationFormat::Single => &self.single,
            DestinationFormat::List => &self.list,
        })
    }
}

fn word<'m>(metadata: &'m MetadataMap, name: &str) -> Result<Option<&'m str>, Status> {
    let value = metadata.get(name).map(|value| value.to_str());
    value
        .transpose()
        .map_err(|_| Status::invalid_argument(format!("the gRPC metadata {name} is no text")))
}

impl ExtProcService {
    fn stream(&self, request: http::Request<Body>) -> Result<StreamTransport, Status> {
        let (parts, inbound) = request.into_parts();
        if parts.uri.path() != METHOD {
            return Err(Status::unimplemented("the method is Process"));
        }
        if self.server.streams().open() >= STREAMS_MAX {
            return Err(Status::resource_exhausted(format!(
                "the picker serves {STREAMS_MAX} streams already"
            )));
        }
        let metadata = MetadataMap::from_headers(parts.headers);
        let pool = self.pool(
            &metadata,
            parts
                .uri
                .authority()
                .map_or("", |authority| authority.as_str()),
        )?;
        let session = StreamSession::new(&self.server, &pool, self.settings(&metadata)?);
        session.set_gateway(GatewayConnection::from_extensions(&parts.extensions));
        if self.server.spans().is_some() {
            session.set_parent(
                metadata
                    .get(TRACEPARENT)
                    .and_then(|value| TraceContext::parse(value.as_encoded_bytes())),
            );
        }
        Ok(StreamTransport {
            session,
            server: Arc::clone(&self.server),
            pool,
            inbound,
            stopping: self.stopping.clone(),
            ended: false,
        })
    }
}

impl NamedService for ExtProcService {
    const NAME: &'static str = "envoy.service.ext_proc.v3.ExternalProcessor";
}

impl Service<http::Request<Body>> for ExtProcService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        ready(Ok(match self.stream(request) {
            Ok(transport) => {
                let mut response = http::Response::new(Body::new(StreamBody::new(stream::unfold(
                    transport,
                    StreamTransport::next,
                ))));
                response
                    .headers_mut()
                    .insert(http::header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
                response
            }
            Err(status) => status.into_http(),
        }))
    }
}

// === impl StreamTransport ===

impl StreamTransport {
    /// The next frame, and the rest of the stream. The transport has no task or queue, so dropping
    /// it ends the stream.
    async fn next(mut self) -> Option<(Result<Frame<Bytes>, Status>, Self)> {
        if self.ended {
            return None;
        }
        loop {
            match self.session.next() {
                SessionAction::Send(bytes) => return Some((Ok(Frame::data(bytes)), self)),
                SessionAction::Listen => self.read_frame().await,
                SessionAction::Wait(deadline) => self.wait_for_state(deadline).await,
                SessionAction::Hold(wakes) => self.wait_for_room(&wakes).await,
                SessionAction::End(status) => {
                    self.ended = true;
                    return Some((Ok(Frame::trailers(trailers(&status))), self));
                }
            }
        }
    }

    async fn read_frame(&mut self) {
        tokio::select! {
            frame = self.inbound.frame() => self.take(frame),
            () = self.session.wait_for_wake() => {}
            () = self.session.wait_for_revocation() => { self.session.retry(self.server.now()); }
            // If the stream ends without an error, the proxy continues without the picker.
            () = stops(&mut self.stopping), if self.session.is_dispensable() => self.session.close(),
        }
    }

    /// Waits until the pool has state, or its client leaves.
    async fn wait_for_state(&mut self, deadline: Timestamp) {
        tokio::select! {
            waited = tokio::time::timeout_at(self.server.instant_of(deadline), self.pool.state()) => {
                self.session.retry(if waited.is_ok() { self.server.now() } else { self.server.now().max(deadline) });
            }
            frame = self.inbound.frame() => self.take(frame),
        }
    }

    /// Waits until the request may have room, or its client leaves.
    async fn wait_for_room(&mut self, wakes: &Notify) {
        tokio::select! {
            () = wakes.notified() => { self.session.retry(self.server.now()); }
            frame = self.inbound.frame() => self.take(frame),
        }
    }

    /// Takes a frame from the proxy. After the last frame or an error, the stream ends, because the
    /// proxy has left. The server then frees what the proxy sent.
    fn take(&self, frame: Option<Result<Frame<Bytes>, Status>>) {
        match frame.and_then(Result::ok) {
            Some(frame) => frame
                .data_ref()
                .into_iter()
                .for_each(|bytes| self.session.receive(bytes)),
            None => self.session.close(),
        }
    }
}

/// Waits until the daemon stops. Cancel-safe.
async fn stops(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stopping| *stopping).await; // an error means the same
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        trailers.insert("grpc-status", HeaderValue::from_static("13")); // the status message does not fit into a header
    }
    trailers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn more_streams_than_are_served_are_refused_at_once() {
        let server = ExtProcServer::new(&["p".into()]);
        let mut service = ExtProcService::new(
            Arc::clone(&server),
            &ExchangeSettings::default(),
            watch::channel(false).1,
        );
        let mut status = async || {
            let request = http::Request::post(METHOD).body(Body::empty()).unwrap();
            Status::from_header_map(service.call(request).await.unwrap().headers())
        };
        assert!(status().await.is_none());
        for _ in 0..STREAMS_MAX {
            server.streams().begin();
        }
        assert_eq!(
            status().await.unwrap().code(),
            tonic::Code::ResourceExhausted
        );
    }
}
