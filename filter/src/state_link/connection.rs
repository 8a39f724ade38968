//! The connection to the daemon: a gRPC stream or, if the proxy does not let its filters use
//! streams, HTTP calls.
//!
//! A stream and calls carry the same messages in the same order. A failed call ends the whole
//! connection, and the next connection begins with a Hello. There are two kinds of calls, each with
//! at most one open call:
//!
//! ```text
//! /switchpoint/state/tell   body: the waiting messages             ──▶ 200; then the next call
//! /switchpoint/state/hear   no body; held by the daemon until it
//!                           has messages                           ──▶ 200 and messages; then the next call
//! ```
//! A call cannot be cancelled. So the response to a call of a closed connection is ignored.

use std::fmt;

use prost::Message;
use proto::{CALL_BYTES_MAX, MESSAGE_BYTES_MAX, frames};

use crate::host::{BodyBuffer, HeaderMap, Host, HostError, Result};
use crate::pairs::HeaderPairs;
use front::config::{StateConfig, StateTransport};

/// The maximum length, in bytes, of a message that the proxy receives on the stream. The number
/// slightly exceeds the protocol's limit. The encoding of this number (E1 80 80 02) is valid UTF-8,
/// which the SDK requires of a serialized message.
const RECEIVE_BYTES_MAX: u32 = 4_194_304 + 97;

/// The maximum number of bytes that wait for the daemon. With HTTP calls, these are the bytes that
/// the daemon has not received; on a stream, the bytes that were sent since the daemon's last
/// message. A daemon sends a message every second, and 200 VMs send at most about 10 MiB in a
/// second. If the daemon is further behind, the link is closed, because waiting bytes use the
/// proxy's memory.
const WAITING_BYTES_MAX: usize = 4 * MESSAGE_BYTES_MAX;

/// The header that names the connection in each of its calls.
const SESSION: &str = "x-switchpoint-session";

#[derive(Debug)]
pub enum StateConnection {
    Stream(GrpcStream),
    Calls(HttpCalls),
}

#[derive(Debug)]
pub struct GrpcStream {
    number: u32,
    /// The number of bytes sent since the daemon's last message. The number is counted because the
    /// proxy buffers the bytes that the daemon does not read, and does not report how many bytes it
    /// buffers.
    unacknowledged_bytes: usize,
}

/// The reason why a connection can no longer be used.
#[derive(Debug)]
pub enum ConnectionFailure {
    /// The proxy refused a call that the connection needs.
    Refused(HostError),
    /// The daemon reads too slowly, and too many bytes wait.
    Full,
}

/// A connection of HTTP calls instead of a stream.
#[derive(Debug)]
pub struct HttpCalls {
    session: String,
    /// The messages that were not sent yet, with the gRPC frame of each.
    outbox: Vec<u8>,
    send_call: Option<u32>,
    receive_call: Option<u32>,
    /// Whether the daemon has answered a call of this connection.
    known: bool,
}

/// The response to a call. The default is that no response arrived.
#[derive(Debug, Default)]
pub struct CallResponse {
    /// The header `:status` of the response; `None` if no response arrived.
    pub status: Option<Vec<u8>>,
    pub body: Vec<u8>,
}

// === impl StateConnection ===

impl StateConnection {
    /// Opens a connection. With HTTP calls, the first messages go out with the first call.
    pub fn open<H: Host>(host: &H, config: &StateConfig) -> Result<Self> {
        match config.transport {
            StateTransport::Grpc => host
                .stream_open(
                    &service(config),
                    "switchpoint.state.v1.StateService",
                    "Stream",
                )
                .map(|number| {
                    Self::Stream(GrpcStream {
                        number,
                        unacknowledged_bytes: 0,
                    })
                }),
            StateTransport::Http => Ok(Self::Calls(HttpCalls::new(host.entropy()))),
        }
    }

    /// Sends a message. After an error, the connection can no longer be used.
    pub fn send<H: Host>(
        &mut self,
        host: &H,
        config: &StateConfig,
        message: &[u8],
    ) -> Result<(), ConnectionFailure> {
        match self {
            Self::Stream(stream) => stream.send(host, message),
            Self::Calls(calls) => calls.send(host, config, message),
        }
    }

    /// Records that a message from the daemon arrived.
    pub fn record_received(&mut self) {
        if let Self::Stream(stream) = self {
            stream.unacknowledged_bytes = 0;
        }
    }

    /// Makes the calls that the connection can make now. Does nothing for a stream.
    pub fn drive<H: Host>(
        &mut self,
        host: &H,
        config: &StateConfig,
    ) -> Result<(), ConnectionFailure> {
        match self {
            Self::Stream(_) => Ok(()),
            Self::Calls(calls) => calls.drive(host, config),
        }
    }

    /// Ends the connection. A stream must be ended in a callback of the root context that opened
    /// it.
    pub fn close<H: Host>(&self, host: &H) {
        if let Self::Stream(stream) = self {
            let _ = host.stream_cancel(stream.number);
        }
    }

    /// Whether the connection is the stream `number`.
    pub fn is_stream(&self, number: u32) -> bool {
        matches!(self, Self::Stream(stream) if stream.number == number)
    }

    /// Returns the HTTP calls of the connection, if `call` is one of them.
    pub fn calls_with(&mut self, call: u32) -> Option<&mut HttpCalls> {
        match self {
            Self::Calls(calls)
                if calls.send_call == Some(call) || calls.receive_call == Some(call) =>
            {
                Some(calls)
            }
            _ => None,
        }
    }
}

// === impl GrpcStream ===

impl GrpcStream {
    fn send<H: Host>(&mut self, host: &H, message: &[u8]) -> Result<(), ConnectionFailure> {
        self.unacknowledged_bytes = self.unacknowledged_bytes.saturating_add(message.len());
        if self.unacknowledged_bytes > WAITING_BYTES_MAX {
            return Err(ConnectionFailure::Full);
        }
        // An error is ignored: if the stream is closed, the stream's callback reports that.
        host.stream_send(self.number, message).or(Ok(()))
    }
}

// === impl ConnectionFailure ===

impl From<HostError> for ConnectionFailure {
    fn from(error: HostError) -> Self {
        Self::Refused(error)
    }
}

impl fmt::Display for ConnectionFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "cannot open it: {error}"),
            Self::Full => write!(
                f,
                "it does not read: more than {WAITING_BYTES_MAX} bytes wait"
            ),
        }
    }
}

// === impl CallResponse ===

impl CallResponse {
    /// Reads the response that the current callback delivers. The body has `size` bytes.
    pub fn read<H: Host>(host: &H, size: usize) -> Self {
        let headers = host.headers(HeaderMap::Answer).unwrap_or_default();
        let status = HeaderPairs::new(&headers)
            .find(|(name, _)| *name == b":status")
            .map(|(_, value)| value.to_vec());
        match host.buffer(BodyBuffer::Answer, 0, size) {
            Ok(body) => Self { status, body },
            Err(_) => Self::default(),
        }
    }
}

// === impl HttpCalls ===

impl HttpCalls {
    fn new(session: u64) -> Self {
        Self {
            session: format!("{session:016x}"),
            outbox: Vec::new(),
            send_call: None,
            receive_call: None,
            known: false,
        }
    }

    fn send<H: Host>(
        &mut self,
        host: &H,
        config: &StateConfig,
        message: &[u8],
    ) -> Result<(), ConnectionFailure> {
        if self.outbox.len().saturating_add(message.len()) > WAITING_BYTES_MAX {
            return Err(ConnectionFailure::Full);
        }
        frames::push(&mut self.outbox, message);
        self.drive(host, config)
    }

    fn drive<H: Host>(&mut self, host: &H, config: &StateConfig) -> Result<(), ConnectionFailure> {
        if self.send_call.is_none() && !self.outbox.is_empty() {
            let (body, rest) = first_call(&self.outbox);
            self.send_call = Some(self.call(host, config, "/switchpoint/state/tell", body)?);
            self.outbox = rest.to_vec();
        }
        if self.receive_call.is_none() && self.known {
            self.receive_call = Some(self.call(host, config, "/switchpoint/state/hear", &[])?);
        }
        Ok(())
    }

    fn call<H: Host>(
        &self,
        host: &H,
        config: &StateConfig,
        path: &str,
        body: &[u8],
    ) -> Result<u32> {
        let authority = if config.authority.is_empty() {
            &config.cluster
        } else {
            &config.authority
        };
        let headers = [
            (":method", "POST"),
            (":path", path),
            (":authority", authority),
            (SESSION, &self.session),
        ];
        host.call(&config.cluster, &headers, body, config.silence_max_ms)
    }

    /// Handles the response to `call`. Returns the framed messages in the response and whether the
    /// next call may be made immediately, or the reason why the connection has ended.
    pub fn take_response(
        &mut self,
        call: u32,
        answer: CallResponse,
    ) -> Result<(Vec<u8>, bool), String> {
        let is_sent = self.send_call == Some(call);
        let place = if is_sent {
            &mut self.send_call
        } else {
            &mut self.receive_call
        };
        *place = None;
        match answer.status.as_deref() {
            Some(b"200") => {}
            None => return Err("it does not answer".to_owned()),
            Some(status) => {
                let text = |bytes: &[u8]| {
                    String::from_utf8_lossy(bytes.get(..200).unwrap_or(bytes))
                        .trim_end()
                        .to_owned()
                };
                return Err(format!(
                    "it answers {}: {}",
                    text(status),
                    text(&answer.body)
                ));
            }
        }
        self.known = true;
        // If the daemon answered without a message, the next call follows at the next tick.
        let continues = is_sent || !answer.body.is_empty();
        Ok(if is_sent {
            (Vec::new(), continues)
        } else {
            (answer.body, continues)
        })
    }
}

/// Splits an outbox into the messages for the next call and the rest. The daemon refuses a call
/// with a larger body.
fn first_call(outbox: &[u8]) -> (&[u8], &[u8]) {
    let mut size = 0;
    let mut rest = outbox;
    while let Some((_, after)) = frames::take(rest) {
        let grown = outbox.len().saturating_sub(after.len());
        // A message that is too large for one call is sent alone, and the daemon refuses it.
        if size > 0 && grown > CALL_BYTES_MAX {
            break;
        }
        size = grown;
        rest = after;
    }
    outbox.split_at_checked(size).unwrap_or((outbox, &[]))
}

/// Returns a serialized `envoy.config.core.v3.GrpcService`. The function does not return the bare
/// name of the cluster, which the host accepts too: the host first tries to read the text as a
/// message, and some names happen to be valid messages. Names have at most 48 bytes, so that every
/// length in the message is one ASCII byte.
fn service(config: &StateConfig) -> String {
    #[derive(Clone, PartialEq, Message)]
    struct GrpcService {
        #[prost(message, optional, tag = "1")]
        envoy_grpc: Option<EnvoyGrpc>,
    }
    #[derive(Clone, PartialEq, Message)]
    struct EnvoyGrpc {
        #[prost(string, tag = "1")]
        cluster_name: String,
        #[prost(string, tag = "2")]
        authority: String,
        #[prost(message, optional, tag = "4")]
        max_receive_message_length: Option<u32>,
    }
    let cluster_name = config.cluster.clone();
    let authority = config.authority.clone();
    let envoy_grpc = Some(EnvoyGrpc {
        cluster_name,
        authority,
        max_receive_message_length: Some(RECEIVE_BYTES_MAX),
    });
    String::from_utf8(GrpcService { envoy_grpc }.encode_to_vec()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use front::config::{FilterConfig, NAME_BYTES_MAX};

    #[test]
    fn a_call_takes_whole_messages_and_no_more_than_the_daemon_does() {
        let mut outbox = Vec::new();
        let sizes = [
            CALL_BYTES_MAX / 2,
            CALL_BYTES_MAX / 2 - 8,
            10,
            CALL_BYTES_MAX + 1,
            3,
        ];
        sizes
            .iter()
            .for_each(|size| frames::push(&mut outbox, &vec![7; *size]));
        let mut rest = outbox.as_slice();
        let mut calls = Vec::new();
        while !rest.is_empty() {
            let (body, after) = first_call(rest);
            calls.push(body.len());
            rest = after;
        }
        assert_eq!(calls, [CALL_BYTES_MAX, 14, CALL_BYTES_MAX + 5, 7]);
        assert_eq!(first_call(&[]), (&[][..], &[][..]));
    }

    #[test]
    fn any_service_allowed_is_text_and_limits_what_is_received() {
        assert!(RECEIVE_BYTES_MAX as usize >= proto::MESSAGE_BYTES_MAX);
        for (cluster, authority) in [(1, 0), (NAME_BYTES_MAX, NAME_BYTES_MAX), (17, 3)] {
            let mut state = FilterConfig::default().state;
            state.cluster = "c".repeat(cluster);
            state.authority = "a".repeat(authority);
            let service = service(&state);
            assert!(
                service.contains(&state.cluster) && service.len() > cluster + authority,
                "{service:?}"
            );
            assert!(
                service
                    .as_bytes()
                    .windows(4)
                    .any(|w| w == [0xE1, 0x80, 0x80, 0x02]),
                "{service:?}"
            );
        }
    }
}
