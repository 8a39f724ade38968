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
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Extension, State};
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

use super::StateServer;
use crate::shared::STREAMS_MAX;

/// How long a call is held when there is nothing to say. Metrics come twice a second: this is for a proxy whose pools are not known yet.
const HOLD_MAX: Duration = Duration::from_secs(1);

/// A connection on which nobody called for so long is over: far above the pause between two calls, and what a proxy takes for our silence.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Messages told but not taken yet, of one connection; a call that tells more waits.
const TOLD_MAX: usize = 16;

/// No further message is put into an answer of so many bytes.
const ANSWER_BYTES: usize = MESSAGE_BYTES_MAX / 4;

/// The header that names a connection.
const SESSION: &str = "x-switchpoint-session";

/// The connections.
#[derive(Clone, Debug)]
struct Calls {
    server: StateServer,
    table: Arc<Mutex<BTreeMap<u64, Arc<Connection>>>>,
}

/// The proxy's ends of a connection.
#[derive(Debug)]
struct Connection {
    told: mpsc::Sender<Result<state::ProxyMessage, Status>>,
    heard: AsyncMutex<mpsc::Receiver<Result<state::DaemonMessage, Status>>>,
    called: Mutex<Instant>,
}

/// The routes.
pub fn router(server: StateServer) -> Router {
    Router::new()
        .route("/switchpoint/state/tell", post(tell))
        .route("/switchpoint/state/hear", post(hear))
        .layer(DefaultBodyLimit::max(MESSAGE_BYTES_MAX))
        .with_state(Calls { server, table: Arc::default() })
}

async fn tell(State(calls): State<Calls>, peer: Option<Extension<TcpConnectInfo>>, headers: HeaderMap, body: Bytes) -> Result<(), Refusal> {
    let session = session(&headers)?;
    let messages = messages(&body)?;
    let hello = matches!(messages.first(), Some(state::ProxyMessage { message: Some(proxy_message::Message::Hello(_)) }));
    let connection = match calls.find(session) {
        Some(connection) => connection,
        None if hello => calls.begin(session, peer.and_then(|Extension(peer)| peer.remote_addr()))?,
        None => return Err(over()),
    };
    for message in messages {
        connection.told.send(Ok(message)).await.map_err(|_| over())?;
    }
    Ok(())
}

async fn hear(State(calls): State<Calls>, headers: HeaderMap) -> Result<Vec<u8>, Refusal> {
    let connection = calls.find(session(&headers)?).ok_or_else(over)?;
    let mut heard = connection.heard.lock().await;
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
    connection.touch();
    Ok(answer)
}

fn push(answer: &mut Vec<u8>, message: Result<state::DaemonMessage, Status>) -> Result<(), Refusal> {
    frames::push(answer, &message.map_err(Refusal)?.encode_to_vec());
    Ok(())
}

fn session(headers: &HeaderMap) -> Result<u64, Refusal> {
    let text = headers.get(SESSION).and_then(|value| value.to_str().ok());
    let session = text.and_then(|text| u64::from_str_radix(text, 16).ok());
    session.ok_or_else(|| Refusal(Status::invalid_argument(format!("header {SESSION} must be a number in hexadecimal digits"))))
}

fn messages(body: &[u8]) -> Result<Vec<state::ProxyMessage>, Refusal> {
    let (mut messages, mut rest) = (Vec::new(), body);
    while !rest.is_empty() {
        let message = frames::take(rest).and_then(|(message, after)| {
            rest = after;
            state::ProxyMessage::decode(message).ok()
        });
        messages.push(message.ok_or_else(|| Refusal(Status::invalid_argument("this is no sequence of messages")))?);
    }
    Ok(messages)
}

fn over() -> Refusal {
    Refusal(Status::not_found("this connection is over; begin another with a Hello"))
}

// === impl Calls ===

impl Calls {
    fn find(&self, session: u64) -> Option<Arc<Connection>> {
        let connection = self.table.lock().unwrap_or_else(PoisonError::into_inner).get(&session).cloned();
        connection.inspect(|connection| connection.touch())
    }

    /// Begins a connection, and ends it when it is over.
    fn begin(&self, session: u64, peer: Option<SocketAddr>) -> Result<Arc<Connection>, Refusal> {
        let ((told, inbound), (outbound, heard)) = (mpsc::channel(TOLD_MAX), mpsc::channel(1));
        let connection = Arc::new(Connection { told, heard: AsyncMutex::new(heard), called: Mutex::new(Instant::now()) });
        {
            let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
            if table.len() >= STREAMS_MAX {
                return Err(Refusal(Status::resource_exhausted(format!("{STREAMS_MAX} connections are open already"))));
            }
            table.insert(session, Arc::clone(&connection));
        }
        let (calls, ours) = (self.clone(), Arc::clone(&connection));
        tokio::spawn(async move {
            let peer = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
            let served = calls.server.clone().serve(ReceiverStream::new(inbound), outbound.clone(), peer);
            let ended = tokio::select! {
                ended = served => ended,
                () = ours.silent() => Ok(()),
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

// === impl Connection ===

impl Connection {
    fn touch(&self) {
        *self.called.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Returns when nobody has called for [`SILENCE_MAX`].
    async fn silent(&self) {
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
struct Refusal(Status);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self.0.code() {
            Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
            Code::NotFound | Code::Aborted => StatusCode::GONE,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        (status, format!("{}\n", self.0.message())).into_response()
    }
}
