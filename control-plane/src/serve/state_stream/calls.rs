//! The state stream as HTTP calls, for proxies that allow their filters no gRPC: the same messages, the same [`StateServer`] behind them.
//!
//! ```text
//! POST /switchpoint/state/tell   messages of the proxy, framed   ──▶ 200
//! POST /switchpoint/state/hear   nothing                         ──▶ 200 and messages, framed, as soon as there are any; none after HOLD_MAX
//! ```
//! A header names the connection that a call belongs to. The first call of one tells a Hello, and begins what a stream is: a task with two ends, of
//! which the calls hold the other ones. It is over when its daemon end says so, which the next call is told, or when nobody has called for
//! [`SILENCE_MAX`]. A message that did not arrive is not sent again: the proxy then begins anew, as it does when a stream breaks.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use prost::Message;
use proto::state::proxy_message;
use proto::{MESSAGE_BYTES_MAX, frames, state};
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpConnectInfo;
use tonic::{Code, Status};

use super::{StateServer, refusal};
use crate::serve::listen::PeerName;
use crate::state::peer::{Origin, RemoteAddress, StreamQuota};

/// How long a call is held when there is nothing to say. Metrics come twice a second: this is for a proxy whose pools are not known yet.
const HOLD_MAX: Duration = Duration::from_secs(1);

/// A connection on which nobody called for so long is over: far above the pause between two calls, and what a proxy takes for our silence.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Messages told but not taken yet, of one connection; a call that tells more waits.
const TOLD_MAX: usize = 16;

/// The most messages of one call: those of seconds in which the daemon answered nothing.
const MESSAGES_MAX: usize = 4_096;

/// No further message is put into an answer of so many bytes.
const ANSWER_BYTES: usize = MESSAGE_BYTES_MAX / 4;

/// The header that names a connection.
const SESSION: &str = "x-switchpoint-session";

/// How long the body of a call may take: a proxy sends it at once.
const UPLOAD_MAX: Duration = Duration::from_secs(10);

/// The connections.
#[derive(Clone, Debug)]
struct CallConnections {
    server: StateServer,
    table: Arc<Mutex<BTreeMap<u64, Arc<CallConnection>>>>,
}

/// The proxy's ends of a connection.
#[derive(Debug)]
struct CallConnection {
    /// Whose it is: calls from elsewhere are none of it.
    origin: Origin,
    from_proxy: mpsc::Sender<Result<state::ProxyMessage, Status>>,
    to_proxy: AsyncMutex<mpsc::Receiver<Result<state::DaemonMessage, Status>>>,
    called: Mutex<Instant>,
}

/// The routes.
pub fn router(server: StateServer) -> Router {
    Router::new()
        .route("/switchpoint/state/tell", post(receive_call))
        .route("/switchpoint/state/hear", post(poll_call))
        .with_state(CallConnections { server, table: Arc::default() })
}

async fn receive_call(
    State(calls): State<CallConnections>,
    CallOrigin(remote): CallOrigin,
    headers: HeaderMap,
    body: Body,
) -> Result<(), CallRefusal> {
    let session = session(&headers)?;
    // Before it is read, and until all of it is taken: a body takes as much memory as a message may.
    let _permit = calls.server.shared.origins.acquire(StreamQuota::Upload, &remote.origin, Instant::now()).map_err(refusal)?;
    let body = tokio::time::timeout(UPLOAD_MAX, to_bytes(body, MESSAGE_BYTES_MAX)).await;
    let body = body.map_err(|_| Status::deadline_exceeded("the body took too long"))?;
    let messages = messages(&body.map_err(|error| Status::out_of_range(format!("{MESSAGE_BYTES_MAX} bytes at most: {error}")))?)?;
    let hello = matches!(messages.first(), Some(state::ProxyMessage { message: Some(proxy_message::Message::Hello(_)) }));
    let connection = match calls.find(session, &remote.origin) {
        Some(connection) => connection,
        None if hello => calls.begin(session, remote)?,
        None => return Err(over()),
    };
    for message in messages {
        connection.from_proxy.send(Ok(message)).await.map_err(|_| over())?;
    }
    Ok(())
}

async fn poll_call(
    State(calls): State<CallConnections>,
    CallOrigin(remote): CallOrigin,
    headers: HeaderMap,
) -> Result<Vec<u8>, CallRefusal> {
    let connection = calls.find(session(&headers)?, &remote.origin).ok_or_else(over)?;
    let mut heard = connection.to_proxy.lock().await;
    let mut answer = Vec::new();
    match tokio::time::timeout(HOLD_MAX, heard.recv()).await {
        Err(_) => return Ok(answer),
        Ok(first) => push(&mut answer, first.ok_or_else(over)?)?,
    }
    // What more there is right now; that it is the end, the next call is told.
    while answer.len() < ANSWER_BYTES
        && let Ok(Ok(message)) = heard.try_recv()
    {
        push(&mut answer, Ok(message))?;
    }
    connection.record_call();
    Ok(answer)
}

fn push(answer: &mut Vec<u8>, message: Result<state::DaemonMessage, Status>) -> Result<(), CallRefusal> {
    frames::push(answer, &message.map_err(CallRefusal)?.encode_to_vec());
    Ok(())
}

fn session(headers: &HeaderMap) -> Result<u64, CallRefusal> {
    let text = headers.get(SESSION).and_then(|value| value.to_str().ok());
    let session = text.and_then(|text| u64::from_str_radix(text, 16).ok());
    session.ok_or_else(|| CallRefusal(Status::invalid_argument(format!("header {SESSION} must be a number in hexadecimal digits"))))
}

fn messages(body: &[u8]) -> Result<Vec<state::ProxyMessage>, CallRefusal> {
    let (mut messages, mut rest) = (Vec::new(), body);
    while !rest.is_empty() && messages.len() < MESSAGES_MAX {
        let message = frames::take(rest).and_then(|(message, after)| {
            rest = after;
            state::ProxyMessage::decode(message).ok()
        });
        messages.push(message.ok_or_else(|| CallRefusal(Status::invalid_argument("this is no sequence of messages")))?);
    }
    if rest.is_empty() { Ok(messages) } else { Err(CallRefusal(Status::invalid_argument(format!("more than {MESSAGES_MAX} messages")))) }
}

fn over() -> CallRefusal {
    CallRefusal(Status::not_found("this connection is over; begin another with a Hello"))
}

// === impl CallConnections ===

impl CallConnections {
    /// The connection of that name, if it is of that origin.
    fn find(&self, session: u64, origin: &Origin) -> Option<Arc<CallConnection>> {
        let connection = self.table.lock().unwrap_or_else(PoisonError::into_inner).get(&session).cloned();
        connection.filter(|connection| connection.origin == *origin).inspect(|connection| connection.record_call())
    }

    /// Begins a connection, and ends it when it is over.
    fn begin(&self, session: u64, remote: RemoteAddress) -> Result<Arc<CallConnection>, CallRefusal> {
        let permit = self.server.acquire(&remote)?;
        let ((told, inbound), (outbound, heard)) = (mpsc::channel(TOLD_MAX), mpsc::channel(1));
        let origin = remote.origin.clone();
        let connection =
            Arc::new(CallConnection { origin, from_proxy: told, to_proxy: AsyncMutex::new(heard), called: Mutex::new(Instant::now()) });
        match self.table.lock().unwrap_or_else(PoisonError::into_inner).entry(session) {
            Entry::Vacant(entry) => drop(entry.insert(Arc::clone(&connection))),
            Entry::Occupied(_) => return Err(over()), // another's, or begun this moment by another call
        }
        let (calls, ours) = (self.clone(), Arc::clone(&connection));
        tokio::spawn(async move {
            // Calls come by many connections: none of them is that of an EDS stream for sure.
            let remote = RemoteAddress { socket: None, ..remote };
            let served = calls.server.clone().serve(ReceiverStream::new(inbound), outbound.clone(), remote, permit);
            let ended = tokio::select! {
                ended = served => ended,
                () = ours.wait_for_silence() => Ok(()),
            };
            if let Err(status) = ended {
                // For the call that waits, or the next.
                let _ = tokio::time::timeout(SILENCE_MAX, outbound.send(Err(status))).await;
                let _ = tokio::time::timeout(SILENCE_MAX, outbound.reserve()).await;
            }
            calls.table.lock().unwrap_or_else(PoisonError::into_inner).remove(&session);
        });
        Ok(connection)
    }
}

// === impl CallConnection ===

impl CallConnection {
    fn record_call(&self) {
        *self.called.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Returns when nobody has called for [`SILENCE_MAX`].
    async fn wait_for_silence(&self) {
        loop {
            let until = *self.called.lock().unwrap_or_else(PoisonError::into_inner) + SILENCE_MAX;
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// Why a call is refused, as the stream would have ended.
struct CallRefusal(Status);

impl From<Status> for CallRefusal {
    fn from(status: Status) -> Self {
        Self(status)
    }
}

/// Who calls.
struct CallOrigin(RemoteAddress);

impl<S: Sync> FromRequestParts<S> for CallOrigin {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let socket = parts.extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
        Ok(Self(RemoteAddress::new(parts.extensions.get::<PeerName>(), socket)))
    }
}

impl IntoResponse for CallRefusal {
    fn into_response(self) -> Response {
        let status = match self.0.code() {
            Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
            Code::NotFound | Code::Aborted => StatusCode::GONE,
            Code::OutOfRange => StatusCode::PAYLOAD_TOO_LARGE,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        (status, format!("{}\n", self.0.message())).into_response()
    }
}
