//! The one narrow trait through which all other modules call the proxy. Only `abi` calls the
//! proxy-wasm ABI.
//!
//! The filter has bindings of its own instead of those of the proxy-wasm SDK. The SDK returns a
//! status as a Rust enum, which is undefined behaviour for a status that the enum does not list.
//! The SDK also panics on most statuses that the enum lists, and on every header that is not UTF-8;
//! a panic fails all streams of a worker. In our bindings a status is a number, a value is bytes,
//! and every answer of the host is a `Result`. Only streams and calls are opened through the SDK,
//! because the SDK's dispatcher knows only streams and calls that the SDK opened (see `abi`).

#[cfg(target_arch = "wasm32")]
mod abi;

use std::fmt;

#[cfg(target_arch = "wasm32")]
pub use abi::{ProxyWasm, install_logger};
use exchange::Timestamp;
pub use front::daemon_rules::percent_decoded;
pub use front::metrics::MetricKind;

/// A status of the host other than success. The host or the filter has caused the error, never a
/// client. If the filter repeats the call in the same phase, the call fails again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HostError(u32);

pub type Result<T, E = HostError> = core::result::Result<T, E>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderMap {
    Request = 0,
    Response = 2,
    /// The headers of the response to an HTTP call.
    Answer = 6,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyBuffer {
    /// The part of the request body that is buffered.
    RequestBody = 0,
    /// A piece of the response body.
    ResponseBody = 1,
    /// The body of the response to an HTTP call.
    Answer = 4,
    StreamMessage = 5,
    Configuration = 7,
}

/// The condition for a write to shared data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCondition {
    Any,
    /// The host writes only if the key has no value.
    Absent,
    /// The host writes only if the value is unchanged since the read that returned this token.
    Token(u32),
}

/// A shared value and the token of its last write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedValue {
    pub bytes: Vec<u8>,
    /// The token, which changes with every write.
    pub token: u32,
}

/// The proxy. A call about a request acts on the context of the current callback, or on the context
/// that [`Host::focus`] selected last.
///
/// No host call runs a callback. If a call has an immediate effect (a reply, or the end of a call
/// that cannot be made), the proxy delivers that effect in a callback after the current one. So the
/// filter may keep a cell borrowed during a host call, but not during a call of a filter function
/// that borrows the cell again.
pub trait Host: Clone + 'static {
    /// Returns the monotonic time, from a clock that all VMs of a process share.
    fn now(&self) -> Timestamp;
    /// Returns the wall-clock time, in ms since 1970; 0 if the host has no wall clock.
    fn unix_ms(&self) -> u64;
    /// Returns random bits.
    fn entropy(&self) -> u64;
    /// Reads shared data. `None` means that the key was never written. An empty value means that
    /// the key was removed, but a removed key still has a token.
    fn shared(&self, key: &str) -> Result<Option<SharedValue>>;
    /// Writes shared data. Returns [`HostError::CONFLICT`] if the condition does not hold.
    fn share(&self, key: &str, value: &[u8], expect: WriteCondition) -> Result<()>;
    /// Makes the current root context the only consumer of a queue; returns the queue's number.
    fn queue_register(&self, name: &str) -> Result<u32>;
    /// Appends `item` to a queue, and wakes the queue's consumer.
    fn queue_push(&self, queue: u32, item: &[u8]) -> Result<()>;
    /// Takes the oldest item of a queue.
    fn queue_pop(&self, queue: u32) -> Result<Option<Vec<u8>>>;
    /// Opens a gRPC stream. `upstream` is a serialized `GrpcService`.
    fn stream_open(&self, upstream: &str, service: &str, method: &str) -> Result<u32>;
    /// Sends a message on a stream of the current root context.
    fn stream_send(&self, stream: u32, message: &[u8]) -> Result<()>;
    /// Ends a stream of the current root context. No callback follows.
    fn stream_cancel(&self, stream: u32) -> Result<()>;
    /// Sends an HTTP request to a cluster, as a call of the current root context. A callback
    /// delivers the response, or reports that the call got no response.
    fn call(
        &self,
        cluster: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        timeout_ms: u64,
    ) -> Result<u32>;
    /// Returns the message with which the other side ended the stream of the current callback.
    fn stream_status(&self) -> String;
    /// Reads a property; `None` if the property does not exist.
    fn property(&self, path: &[&str]) -> Result<Option<Vec<u8>>>;
    /// Sets a property of the stream, which the access log shows as the filter state `wasm.<name>`.
    fn property_set(&self, name: &str, value: &[u8]) -> Result<()>;
    /// Returns all headers, as serialized pairs. This call works only during the headers callback,
    /// or while the headers are held.
    fn headers(&self, map: HeaderMap) -> Result<Vec<u8>>;
    fn header_set(&self, map: HeaderMap, name: &str, value: &[u8]) -> Result<()>;
    fn header_remove(&self, map: HeaderMap, name: &str) -> Result<()>;
    /// Reads at most `size` bytes of a buffer, from offset `start`.
    fn buffer(&self, buffer: BodyBuffer, start: usize, size: usize) -> Result<Vec<u8>>;
    /// Replaces the first `size` bytes of a body, which the filter must be allowed to read now. The
    /// host can replace only the beginning of a body.
    fn buffer_replace(&self, buffer: BodyBuffer, size: usize, bytes: &[u8]) -> Result<()>;
    /// Answers the request; `headers` are serialized pairs. The reply takes effect when the current
    /// callback returns.
    fn reply(&self, status: u16, headers: &[u8], body: &[u8]) -> Result<()>;
    /// Resumes a held request. After that, the filter cannot change the headers of the request.
    fn resume_request(&self) -> Result<()>;
    /// Makes later calls act on another context of this VM. Fails if the context no longer exists.
    fn focus(&self, context: u32) -> Result<()>;
    /// Sets the tick period of the current root context.
    fn tick_period(&self, period_ms: u32) -> Result<()>;
    /// Finds or creates a statistic, and returns its number.
    fn metric(&self, kind: MetricKind, name: &str) -> Result<u32>;
    /// Adds `amount` to a gauge, or to a counter, where it must be more than 0.
    fn metric_add(&self, metric: u32, amount: i64) -> Result<()>;
    /// Sets a gauge to `value`, or records `value` in a histogram.
    fn metric_record(&self, metric: u32, value: u64) -> Result<()>;
    /// Applies the host's log level from now on.
    fn follow_log_level(&self);
}

// === impl HostError ===

impl HostError {
    /// The requested item does not exist.
    pub const NOT_FOUND: Self = Self(1);
    /// The condition of a write to shared data does not hold.
    pub const CONFLICT: Self = Self(8);
    /// The host failed.
    pub const INTERNAL: Self = Self(10);
}

impl fmt::Debug for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            1 => "not found",
            2 => "bad argument",
            3 => "serialization failure",
            4 => "parse failure",
            7 => "empty",
            8 => "conflict",
            10 => "internal failure",
            12 => "unimplemented",
            _ => "status",
        };
        write!(f, "{name} ({})", self.0)
    }
}

impl std::error::Error for HostError {}
