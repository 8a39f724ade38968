//! The picker for gateways that speak the Endpoint Picker Protocol over Envoy's external processing service.
//!
//! ```text
//!  gateway ── one gRPC stream an HTTP exchange ──▶ Conversation ──▶ exchange::Exchange ──▶ scheduler
//!                                                       │ one step under its lock
//!                                                     Front ◀── push::Session ◀── pools of the daemon
//! ```
//! The same exchange and the same scheduler as in the wasm filter: no rule of the protocol is written here, only how Envoy's messages bring in
//! what happens and take out what is to be done.

mod conversation;
mod front;
mod held;
mod peers;
mod serve;
mod wire;

pub use conversation::{Conversation, Next};
pub use front::{Front, FrontPool, Inner, Streams};
pub use serve::Listening;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{ExternalProcessor, ExternalProcessorServer};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use exchange::{DestinationFormat, Settings, Time};
use futures::Stream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use crate::health;
use crate::shutdown::Shutdown;

/// Names the pool of a stream, among its gRPC metadata (`initial_metadata` in Envoy's `grpc_service`); not needed where there is but one.
pub const POOL: &str = "x-switchpoint-pool";

/// How the destination is told on a stream, likewise: `list` or `single`.
pub const DESTINATION_FORMAT: &str = "x-switchpoint-destination-format";

/// The longest message taken, in bytes: a body of Envoy's own limit in the shipped files (32 MiB) with its headers, so that one between that and
/// our own limit (24 MiB) is refused in the words of its API. What a stream holds is bounded by our own limit.
pub const MESSAGE_BYTES_MAX: usize = 33 << 20;

/// The most streams of one connection: all exchanges of an Envoy worker share one, and each lasts as long as its reply.
pub const STREAMS_PER_CONNECTION_MAX: u32 = 16_384;

/// Read-ahead of one stream, in bytes: some pieces of a body.
pub const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// Read-ahead of a connection, in bytes.
pub const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Serves ext_proc streams.
#[derive(Clone, Debug)]
pub struct ExtProcServer {
    front: Arc<Front>,
    single: Arc<Settings>,
    list: Arc<Settings>,
    format: DestinationFormat,
    shutdown: Shutdown,
}

/// A conversation and the stream it is held on.
struct Talk {
    conversation: Conversation,
    front: Arc<Front>,
    pool: Arc<FrontPool>,
    inbound: Streaming<ProcessingRequest>,
    answers: VecDeque<ProcessingResponse>,
    shutdown: Shutdown,
}

// === impl ExtProcServer ===

impl ExtProcServer {
    /// Decides by what `front` knows.
    #[must_use]
    pub fn new(front: Arc<Front>, settings: &Settings, shutdown: Shutdown) -> Self {
        let with = |destination_format| Arc::new(Settings { destination_format, ..settings.clone() });
        let (single, list) = (with(DestinationFormat::Single), with(DestinationFormat::List));
        Self { front, single, list, format: settings.destination_format, shutdown }
    }

    /// The gRPC service.
    #[must_use]
    pub fn into_service(self) -> ExternalProcessorServer<Self> {
        ExternalProcessorServer::new(self).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    fn pool(&self, metadata: &MetadataMap) -> Result<Arc<FrontPool>, Status> {
        let name = word(metadata, POOL)?;
        let why = || match name {
            Some(name) => Status::invalid_argument(format!("there is no pool {name:?} here")),
            None => Status::invalid_argument(format!("which pool? There are several: name one in the gRPC metadata {POOL}")),
        };
        self.front.pool(name).cloned().ok_or_else(why)
    }

    fn settings(&self, metadata: &MetadataMap) -> Result<&Arc<Settings>, Status> {
        let format = match word(metadata, DESTINATION_FORMAT)? {
            None => self.format,
            Some("single") => DestinationFormat::Single,
            Some("list") => DestinationFormat::List,
            Some(other) => {
                return Err(Status::invalid_argument(format!("the gRPC metadata {DESTINATION_FORMAT} is \"{other}\", not single or list")));
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
    value.transpose().map_err(|_| Status::invalid_argument(format!("the gRPC metadata {name} is no text")))
}

#[tonic::async_trait]
impl ExternalProcessor for ExtProcServer {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

    async fn process(&self, request: Request<Streaming<ProcessingRequest>>) -> Result<Response<Self::ProcessStream>, Status> {
        let pool = self.pool(request.metadata())?;
        let settings = Arc::clone(self.settings(request.metadata())?);
        let (front, shutdown) = (Arc::clone(&self.front), self.shutdown.clone());
        let conversation = Conversation::new(Arc::clone(&front), Arc::clone(&pool), settings);
        let talk = Talk { conversation, front, pool, inbound: request.into_inner(), answers: VecDeque::new(), shutdown };
        Ok(Response::new(Box::pin(futures::stream::unfold(talk, Talk::next))))
    }
}

// === impl Talk ===

impl Talk {
    /// The next answer, and what comes after it. No task and no queue of its own: a stream that is dropped is a conversation that is over.
    async fn next(mut self) -> Option<(Result<ProcessingResponse, Status>, Self)> {
        loop {
            if let Some(answer) = self.answers.pop_front() {
                return Some((Ok(answer), self));
            }
            let message = tokio::select! {
                message = self.inbound.message() => message,
                // By a clean end the proxy is told to go on without us.
                () = self.shutdown.begun(), if self.conversation.is_dispensable() => return None,
            };
            // An end in error is one too: the proxy has left.
            let message = message.ok().flatten()?;
            let mut next = self.conversation.receive(message);
            while let Next::Wait(deadline) = next {
                next = self.park(deadline).await;
            }
            self.answers.extend(self.conversation.answers());
        }
    }

    async fn park(&mut self, deadline: Time) -> Next {
        // No room to wait in: what the deadline would bring comes now.
        let Ok(_place) = self.front.parking.try_acquire() else { return self.conversation.retry(deadline) };
        let waited = tokio::time::timeout_at(self.front.instant(deadline), self.pool.state()).await;
        self.conversation.retry(if waited.is_ok() { self.front.now() } else { self.front.now().max(deadline) })
    }
}
