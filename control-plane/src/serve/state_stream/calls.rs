//! Serves the state stream as HTTP calls, for proxies that do not let their filters use gRPC. The
//! messages and the [`StateServer`] are those of the gRPC stream.
//!
//! ```text
//! POST /switchpoint/state/tell   messages from the proxy, framed ──▶ 200
//! POST /switchpoint/state/hear   nothing                         ──▶ 200 and messages, framed, as soon as there are any; none after HOLD_MAX
//! ```
//! A header names the connection that a call belongs to. The first call of a connection sends a
//! Hello and starts the task of a stream. The calls write to one of its channels and read the
//! other. The connection ends when the daemon ends it, which the next call reports, or after
//! [`SILENCE_MAX`] without a call. A lost message is not sent again. The proxy then begins a new
//! connection, as after a broken stream.
//!
//! What waits here has limits. A message that the task has not taken yet keeps the permit of the
//! body that it came in. An answer that is not sent yet keeps the connection from making another.

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
use futures::{StreamExt, stream};
use prost::Message;
use proto::state::proxy_message;
use proto::{CALL_BYTES_MAX, MESSAGE_BYTES_MAX, frames, state};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpConnectInfo;
use tonic::{Code, Status};

use super::{StateServer, refusal};
use crate::serve::listen::PeerName;
use crate::state::peer::{Origin, QuotaPermit, RemoteAddress, StreamQuota};

/// How long a call is held while there is no message. Metrics are sent at least twice a second, so
/// this matters only for a proxy without known pools.
const HOLD_MAX: Duration = Duration::from_secs(1);

/// How long a connection stays open without a call. The time is far longer than the pause between
/// two calls. A proxy assumes after the same time that the daemon is gone.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The maximum number of messages of one connection that were received but not processed yet. A
/// call with more has to wait.
const UNREAD_MAX: usize = 16;

/// The maximum number of messages in one call: those of several seconds without an answer from the
/// daemon.
const MESSAGES_MAX: usize = 4_096;

/// An answer with this many bytes or more gets no further message.
const ANSWER_BYTES: usize = MESSAGE_BYTES_MAX / 4;

/// The header that names a connection.
const SESSION: &str = "x-switchpoint-session";

/// The maximum time that the body of a call may take to arrive. A proxy sends it at once.
const UPLOAD_MAX: Duration = Duration::from_secs(10);

/// All connections, by the number in the header.
#[derive(Clone, Debug)]
struct CallConnections {
    server: StateServer,
    table: Arc<Mutex<BTreeMap<u64, Arc<CallConnection>>>>,
}

/// The proxy's side of a connection.
#[derive(Debug)]
struct CallConnection {
    /// The origin that began the connection. Calls of other origins cannot use it.
    origin: Origin,
    /// The permit of the stream. It is returned when the connection is over and its last answer is
    /// sent.
    permit: QuotaPermit,
    from_proxy: mpsc::Sender<QueuedMessage>,
    to_proxy: Arc<AsyncMutex<MessagesToProxy>>,
    /// The number of calls for messages so far. Only the newest call waits.
    polls: watch::Sender<u64>,
    called: Mutex<Instant>,
}

/// A message that the task of the connection has not taken yet.
#[derive(Debug)]
struct QueuedMessage {
    message: state::ProxyMessage,
    /// All messages of a body share its permit.
    _body: Arc<QuotaPermit>,
}

type MessagesToProxy = mpsc::Receiver<Result<state::DaemonMessage, Status>>;

/// Keeps the connection of an answer from making another answer, and its permit from returning.
type AnswerGuard = (OwnedMutexGuard<MessagesToProxy>, Arc<CallConnection>);

pub fn router(server: StateServer) -> Router {
    Router::new()
        .route("/switchpoint/state/tell", post(receive_call))
        .route("/switchpoint/state/hear", post(poll_call))
        .with_state(CallConnections {
            server,
            table: Arc::default(),
        })
}

async fn receive_call(
    State(calls): State<CallConnections>,
    CallOrigin(remote): CallOrigin,
    headers: HeaderMap,
    body: Body,
) -> Result<(), CallRefusal> {
    let session = session(&headers)?;
    // The permit is acquired before the body is read, and held until the connection's task has
    // taken all messages of the body, because a body can be as large as a message. The messages of
    // the body are decoded one by one.
    let permit = calls
        .server
        .shared
        .proxies
        .acquire(StreamQuota::Upload, &remote.origin, Instant::now())
        .map_err(refusal)?;
    let permit = Arc::new(permit);
    let body = tokio::time::timeout(UPLOAD_MAX, to_bytes(body, CALL_BYTES_MAX)).await;
    let body = body.map_err(|_| Status::deadline_exceeded("the body took too long"))?;
    let body = body.map_err(|error| {
        Status::out_of_range(format!("{CALL_BYTES_MAX} bytes at most: {error}"))
    })?;
    let mut frames = split(&body)?.into_iter();
    let first = frames.next().map(decode).transpose()?;
    let hello = matches!(
        first,
        Some(state::ProxyMessage {
            message: Some(proxy_message::Message::Hello(_))
        })
    );
    let connection = match calls.find(session, &remote.origin) {
        Some(connection) => connection,
        None if hello => calls.begin(session, remote)?,
        None => return Err(over()),
    };
    let rest = frames.map(decode);
    for message in first.map(Ok).into_iter().chain(rest) {
        let queued = QueuedMessage {
            message: message?,
            _body: Arc::clone(&permit),
        };
        connection
            .from_proxy
            .send(queued)
            .await
            .map_err(|_| over())?;
    }
    Ok(())
}

async fn poll_call(
    State(calls): State<CallConnections>,
    CallOrigin(remote): CallOrigin,
    headers: HeaderMap,
) -> Result<Body, CallRefusal> {
    let connection = calls
        .find(session(&headers)?, &remote.origin)
        .ok_or_else(over)?;
    let mut answer = Vec::new();
    let newer = connection.begin_poll();
    tokio::pin!(newer);
    let held_until = Instant::now() + HOLD_MAX;
    let mut to_proxy = tokio::select! {
        to_proxy = Arc::clone(&connection.to_proxy).lock_owned() => to_proxy,
        () = &mut newer => return Ok(Body::empty()),
        () = tokio::time::sleep_until(held_until) => return Ok(Body::empty()),
    };
    tokio::select! {
        first = to_proxy.recv() => push(&mut answer, first.ok_or_else(over)?)?,
        () = &mut newer => return Ok(Body::empty()),
        () = tokio::time::sleep_until(held_until) => return Ok(Body::empty()),
    }
    // Adds the messages that are ready now. If the connection ended, the next call reports it.
    while answer.len() < ANSWER_BYTES
        && let Ok(Ok(message)) = to_proxy.try_recv()
    {
        push(&mut answer, Ok(message))?;
    }
    connection.record_call();
    Ok(guarded(answer, (to_proxy, Arc::clone(&connection))))
}

/// Returns a body that keeps `guard` until the proxy has made room for the whole answer. Over
/// HTTP/2, the server sends a part as soon as there is room for its first byte. So the last byte is
/// a part of its own: when it is sent, there is room for all bytes.
fn guarded(mut answer: Vec<u8>, guard: AnswerGuard) -> Body {
    let last = answer.split_off(answer.len().saturating_sub(1));
    Body::from_stream(stream::unfold(
        ([answer, last].into_iter(), guard),
        |(mut parts, guard)| async move {
            let part = parts.next()?;
            Some((Ok::<_, Infallible>(part), (parts, guard)))
        },
    ))
}

fn push(
    answer: &mut Vec<u8>,
    message: Result<state::DaemonMessage, Status>,
) -> Result<(), CallRefusal> {
    frames::push(answer, &message.map_err(CallRefusal)?.encode_to_vec());
    Ok(())
}

fn session(headers: &HeaderMap) -> Result<u64, CallRefusal> {
    let text = headers.get(SESSION).and_then(|value| value.to_str().ok());
    let session = text.and_then(|text| u64::from_str_radix(text, 16).ok());
    session.ok_or_else(|| {
        CallRefusal(Status::invalid_argument(format!(
            "header {SESSION} must be a number in hexadecimal digits"
        )))
    })
}

/// Returns the bytes of each message of a body.
fn split(body: &[u8]) -> Result<Vec<&[u8]>, CallRefusal> {
    let mut messages = Vec::new();
    let mut rest = body;
    while !rest.is_empty() && messages.len() < MESSAGES_MAX {
        let (message, after) = frames::take(rest).ok_or_else(|| {
            CallRefusal(Status::invalid_argument(
                "the body is not a sequence of messages",
            ))
        })?;
        messages.push(message);
        rest = after;
    }
    if rest.is_empty() {
        Ok(messages)
    } else {
        Err(CallRefusal(Status::invalid_argument(format!(
            "more than {MESSAGES_MAX} messages"
        ))))
    }
}

fn decode(message: &[u8]) -> Result<state::ProxyMessage, CallRefusal> {
    proto::proxy_message(message).map_err(|why| {
        CallRefusal(Status::invalid_argument(format!(
            "the body is not a sequence of messages: {why}"
        )))
    })
}

fn over() -> CallRefusal {
    CallRefusal(Status::not_found(
        "this connection is over; begin another with a Hello",
    ))
}

// === impl CallConnections ===

impl CallConnections {
    /// Returns the connection with this number, if it belongs to this origin.
    fn find(&self, session: u64, origin: &Origin) -> Option<Arc<CallConnection>> {
        let connection = self
            .table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&session)
            .cloned();
        connection
            .filter(|connection| connection.origin == *origin)
            .inspect(|connection| connection.record_call())
    }

    /// Begins a connection, and removes it when it has ended.
    fn begin(
        &self,
        session: u64,
        remote: RemoteAddress,
    ) -> Result<Arc<CallConnection>, CallRefusal> {
        let permit = self.server.acquire(&remote)?;
        let ((from_proxy, inbound), (outbound, to_proxy)) =
            (mpsc::channel(UNREAD_MAX), mpsc::channel(1));
        let origin = remote.origin.clone();
        let connection = Arc::new(CallConnection {
            origin,
            permit,
            from_proxy,
            to_proxy: Arc::new(AsyncMutex::new(to_proxy)),
            polls: watch::Sender::new(0),
            called: Mutex::new(Instant::now()),
        });
        match self
            .table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(session)
        {
            Entry::Vacant(entry) => drop(entry.insert(Arc::clone(&connection))),
            Entry::Occupied(_) => return Err(over()), // it belongs to another origin, or another call has just begun it
        }
        let calls = self.clone();
        let ours = Arc::clone(&connection);
        tokio::spawn(async move {
            // Calls use many TCP connections, so none of them identifies the EDS stream of the same
            // Envoy.
            let remote = RemoteAddress {
                socket: None,
                ..remote
            };
            let inbound = ReceiverStream::new(inbound);
            let served = calls.server.clone().serve(
                inbound.map(|queued| Ok::<_, Status>(queued.message)),
                outbound.clone(),
                remote,
                &ours.permit,
            );
            let ended = tokio::select! {
                ended = served => ended,
                () = ours.wait_for_silence() => Ok(()),
            };
            if let Err(status) = ended {
                // The error goes to the waiting call, or to the next one.
                let _ = tokio::time::timeout(SILENCE_MAX, outbound.send(Err(status))).await;
                let _ = tokio::time::timeout(SILENCE_MAX, outbound.reserve()).await;
            }
            calls
                .table
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&session);
        });
        Ok(connection)
    }
}

// === impl CallConnection ===

impl CallConnection {
    fn record_call(&self) {
        *self.called.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Ends the wait of an older call for messages, whose connection may be dead. The future ends
    /// when a newer call begins.
    fn begin_poll(&self) -> impl Future<Output = ()> {
        let mut number = 0;
        self.polls.send_modify(|polls| {
            *polls += 1;
            number = *polls;
        });
        let mut polls = self.polls.subscribe();
        async move {
            let _ = polls.wait_for(|newest| *newest != number).await;
        }
    }

    /// Returns after [`SILENCE_MAX`] without a call.
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

/// The reason why a call is refused: the status that would have ended a stream.
struct CallRefusal(Status);

impl From<Status> for CallRefusal {
    fn from(status: Status) -> Self {
        Self(status)
    }
}

/// The origin and address of a caller.
struct CallOrigin(RemoteAddress);

impl<S: Sync> FromRequestParts<S> for CallOrigin {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let socket = parts
            .extensions
            .get::<TcpConnectInfo>()
            .and_then(TcpConnectInfo::remote_addr);
        Ok(Self(RemoteAddress::new(
            parts.extensions.get::<PeerName>(),
            socket,
        )))
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
