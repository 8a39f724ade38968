//! One ext_proc stream, from received bytes to sent bytes. The session reads messages, passes them
//! to an [`ExtProcStream`], writes the answers, and accounts for the memory of all parts.
//!
//! Like [`ExtProcStream`], it uses no sockets and does not wait. A stream that waits for its proxy
//! holds memory, a permit and perhaps a pick, so the wait is limited ([`ExpiringStream::expire`]).
//! A separate task of the server enforces the limit, because HTTP/2 does not poll a stream while
//! the proxy takes no data.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use exchange::bodies::BodyRoom;
use exchange::trace::TraceContext;
use exchange::{ExchangeSettings, Timestamp};
use prost::Message;
use prost::bytes::{BufMut, Bytes, BytesMut};
use tokio::sync::Notify;
use tonic::Status;

use super::ext_proc_stream::{ExtProcStream, StreamAction};
use super::framing::{EXPANSION_MAX, MessageReader};
use super::gateway_connection::GatewayConnection;
use super::memory::{BodyPlace, IncompleteBody, MemoryAccount};
use super::open_streams::ExpiringStream;
use super::refusal::StreamRefusal;
use super::server::{ExtProcServer, ServedPool};

/// How long a proxy may be silent while the rest of a body or of a message is missing, or may take
/// no data of its answer, in ms. A client that is slower counts as gone. A proxy that sends only
/// complete bodies may be silent for [`BODY_MS_MAX`].
pub const SILENCE_MS_MAX: u64 = 30_000;

/// How long a request's body may take in total, in ms: the `request_timeout` of the shipped Envoy
/// configuration.
pub const BODY_MS_MAX: u64 = 300_000;

/// Answers are sent together up to this length, in bytes: one HTTP/2 frame.
const BATCH_BYTES: usize = 16 << 10;

/// A message with at most this many bytes besides a body is not accounted while it is decoded. The
/// number of worker threads limits how many are decoded at once.
const SMALL_ENVELOPE_BYTES: usize = 4 << 10;

/// A hidden body without a declared length counts as if this many of its bytes arrived in each ms,
/// so after about a second as [`HIDDEN_BODY_MAX`]. A decompressor may have read it, and makes as
/// many bytes in less time. An honest body arrives faster, and costs little.
const HIDDEN_BYTES_PER_MS: u64 = 25_000;

/// The maximum number of bytes of a body that the gateway holds: `request_body_buffer_limit` of the
/// shipped Envoy files.
const HIDDEN_BODY_MAX: usize = 32 << 20;

#[derive(Debug)]
pub struct StreamSession {
    state: Mutex<SessionState>,
    woken: Notify,
    server: Arc<ExtProcServer>,
    number: u64,
}

/// The next action of the caller.
#[derive(Debug)]
pub enum SessionAction {
    /// Send these bytes; then call [`StreamSession::next`] again.
    Send(Bytes),
    /// Pass the next bytes to [`StreamSession::receive`].
    Listen,
    /// Call [`StreamSession::retry`] when the pool has state, at this moment at the latest.
    Wait(Timestamp),
    /// Call [`StreamSession::retry`] after each notification.
    Hold(Arc<Notify>),
    /// End the stream.
    End(Status),
}

#[derive(Debug)]
struct SessionState {
    framing: MessageReader,
    /// The stream; `None` after its end.
    stream: Option<ExtProcStream>,
    /// The number of the stream.
    number: u64,
    account: MemoryAccount,
    /// The numbers of other streams whose bodies must be refused, because this body needs room.
    displaced: Vec<u64>,
    /// Bytes that were returned for sending and are perhaps not sent yet.
    unsent: usize,
    /// Whether the proxy has sent a message.
    begun: bool,
    /// When the proxy last sent or took data.
    moved: Timestamp,
    /// Since when the session waits for the proxy to send or take data.
    owed: Option<Timestamp>,
    /// Why the stream has ended.
    over: Option<Status>,
}

// === impl StreamSession ===

impl StreamSession {
    #[must_use]
    pub fn new(
        server: &Arc<ExtProcServer>,
        pool: &Arc<ServedPool>,
        settings: &Arc<ExchangeSettings>,
    ) -> Arc<Self> {
        let stream = ExtProcStream::new(Arc::clone(server), Arc::clone(pool), Arc::clone(settings));
        let number = stream.number();
        let now = server.now();
        let state = SessionState {
            framing: MessageReader::default(),
            stream: Some(stream),
            number,
            account: server.streams().memory().account(),
            displaced: Vec::new(),
            unsent: 0,
            begun: false,
            moved: now,
            owed: Some(now),
            over: None,
        };
        let session = Arc::new(Self {
            state: Mutex::new(state),
            woken: Notify::new(),
            server: Arc::clone(server),
            number,
        });
        let weak = Arc::downgrade(&session);
        server.open_streams().insert(number, weak);
        session
    }

    /// Returns what to do next. Call this after the proxy has taken the bytes that were sent.
    pub fn next(&self) -> SessionAction {
        let now = self.server.now();
        let mut state = self.lock();
        if std::mem::take(&mut state.unsent) > 0 {
            state.moved = now;
            state.owed = None;
        }
        let act = state.act(now);
        if let SessionAction::Send(bytes) = &act {
            state.unsent = bytes.len();
            state.moved = now;
        }
        self.end_step(state, now);
        act
    }

    /// Receives bytes from the proxy.
    pub fn receive(&self, bytes: &[u8]) {
        let now = self.server.now();
        let mut state = self.lock();
        state.moved = now;
        if state.stream.is_some() {
            state.framing.push(bytes);
            state.check_room(now);
        }
        self.end_step(state, now);
    }

    /// Continues a parked request, because the pool has state, or because `now` is the deadline.
    pub fn retry(&self, now: Timestamp) -> StreamAction {
        let mut state = self.lock();
        let next = state
            .stream
            .as_mut()
            .map_or(StreamAction::Listen, |stream| stream.retry(now));
        state.settle(now);
        next
    }

    /// Releases the memory and the pick of the stream, because the proxy sends nothing more.
    pub fn close(&self) {
        self.lock().end(Status::ok(""));
    }

    /// Sets the caller's span, from the gRPC metadata of the stream.
    pub fn set_parent(&self, parent: Option<TraceContext>) {
        if let Some(stream) = &mut self.lock().stream {
            stream.set_parent(parent);
        }
    }

    /// Sets the connection of the stream.
    pub(super) fn set_gateway(&self, gateway: GatewayConnection) {
        if let Some(stream) = &mut self.lock().stream {
            stream.set_gateway(gateway);
        }
    }

    /// Whether the proxy can continue without the daemon.
    #[must_use]
    pub fn is_dispensable(&self) -> bool {
        self.lock()
            .stream
            .as_ref()
            .is_some_and(ExtProcStream::is_dispensable)
    }

    /// The memory of the data that the proxy sent, and of the answers that it has not taken, in
    /// bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.lock().memory()
    }

    /// Resolves when [`Self::next`] must be called although no bytes arrived.
    pub async fn wait_for_wake(&self) {
        self.woken.notified().await;
    }

    /// Resolves when [`Self::retry`] must be called although the request was sent, because the
    /// request may be given up.
    pub async fn wait_for_revocation(&self) {
        let wakes = self.lock().stream.as_ref().and_then(ExtProcStream::watched);
        match wakes {
            Some(wakes) => wakes.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Ends a step that may have made this stream's body longer. No two sessions are locked at the
    /// same time.
    fn end_step(&self, mut state: MutexGuard<'_, SessionState>, now: Timestamp) {
        state.settle(now);
        let displaced = std::mem::take(&mut state.displaced);
        drop(state);
        self.server.refuse_bodies(&displaced, now);
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExpiringStream for StreamSession {
    fn expire(&self, now: Timestamp) {
        let mut state = self.lock();
        if let Some(stream) = &mut state.stream {
            stream.check_reply(now);
        }
        if !state.is_overdue(now) {
            if state.awaits_hidden_body() {
                state.check_room(now);
                let is_refused = !state.awaits_body();
                self.end_step(state, now);
                if is_refused {
                    self.woken.notify_one();
                }
            }
            return;
        }
        if state.awaits_body() && state.unsent == 0 {
            state.refuse(StreamRefusal::Slow);
        } else {
            state.end(Status::deadline_exceeded(
                "the proxy did not send the rest of a message, or did not take its answer",
            ));
        }
        state.settle(now);
        drop(state);
        self.woken.notify_one();
    }

    fn refuse_body(&self, now: Timestamp) {
        let mut state = self.lock();
        if !state.awaits_body() {
            return;
        }
        state.refuse_body(now);
        state.settle(now);
        drop(state);
        self.woken.notify_one();
    }
}

impl Drop for StreamSession {
    fn drop(&mut self) {
        self.server.open_streams().remove(self.number);
    }
}

// === impl SessionState ===

impl SessionState {
    fn act(&mut self, now: Timestamp) -> SessionAction {
        loop {
            let Some(stream) = &mut self.stream else {
                return SessionAction::End(self.over.take().unwrap_or_else(|| Status::ok("")));
            };
            if let Some(bytes) = batch(stream) {
                return SessionAction::Send(bytes);
            }
            if stream.is_over() {
                self.end(Status::ok(""));
                continue;
            }
            match stream.action() {
                StreamAction::Listen => {}
                StreamAction::Wait(deadline) => return SessionAction::Wait(deadline),
                StreamAction::Hold(wakes) => return SessionAction::Hold(wakes),
            }
            match self.read(now) {
                Ok(true) => {}
                Ok(false) => return SessionAction::Listen,
                Err(status) => self.end(status),
            }
        }
    }

    /// Reads one message; false if none is complete.
    fn read(&mut self, now: Timestamp) -> Result<bool, Status> {
        let Some(layout) = self.framing.next()? else {
            return Ok(false);
        };
        let envelope = layout.envelope_bytes();
        if envelope > SMALL_ENVELOPE_BYTES && self.hold(envelope * EXPANSION_MAX).is_err() {
            self.refuse(StreamRefusal::Memory);
            return Ok(true);
        }
        let message = self.framing.take(layout)?;
        self.begun = true;
        if let Some(stream) = &mut self.stream {
            let _ = stream.receive(message);
            let client = stream.client();
            if self.account.set_client(client) && self.account.has_too_many_streams() {
                self.refuse(StreamRefusal::Streams);
            }
        }
        self.check_room(now);
        Ok(true)
    }

    /// Accounts for what the session holds, and for the body that it awaits. Refuses the request if
    /// there is no room.
    fn check_room(&mut self, now: Timestamp) {
        if self.hold(0).is_err() {
            self.refuse(StreamRefusal::Memory);
        } else if let Some(body) = self.incomplete_body(now)
            && self.account.await_body(body, now, &mut self.displaced) == BodyRoom::None
        {
            self.refuse_body(now);
        }
    }

    /// The body that the stream awaits. While the proxy holds it, it counts with the length that
    /// the client declared, because the proxy may hold as much.
    fn incomplete_body(&self, now: Timestamp) -> Option<IncompleteBody> {
        let stream = self.stream.as_ref().filter(|stream| stream.awaits_body())?;
        let declared = stream.declared_bytes();
        let place = if self.awaits_hidden_body() {
            BodyPlace::Gateway(stream.gateway().address())
        } else {
            BodyPlace::Server
        };
        let bytes = match place {
            BodyPlace::Server => self.memory(),
            BodyPlace::Gateway(_) => declared.unwrap_or_else(|| {
                let awaited_ms = self.owed.map_or(0, |since| now.ms_since(since));
                let arrived = usize::try_from(awaited_ms.saturating_mul(HIDDEN_BYTES_PER_MS));
                arrived.map_or(HIDDEN_BODY_MAX, |bytes| bytes.min(HIDDEN_BODY_MAX))
            }),
        };
        Some(IncompleteBody {
            stream: self.number,
            place,
            bytes,
            has_length: declared.is_some(),
        })
    }

    /// Whether the proxy holds the body that the stream awaits, and sends it when it is complete.
    fn awaits_hidden_body(&self) -> bool {
        let stream = self.stream.as_ref();
        stream.is_some_and(|stream| stream.awaits_body() && stream.is_body_hidden())
            && !self.framing.is_within_a_message()
    }

    fn awaits_body(&self) -> bool {
        self.stream.as_ref().is_some_and(ExtProcStream::awaits_body)
    }

    /// Accounts for the memory that the session holds, and for `more` bytes.
    fn hold(&mut self, more: usize) -> Result<(), super::memory::MemoryExceeded> {
        self.account.hold(self.memory() + more)
    }

    fn memory(&self) -> usize {
        self.framing.memory() + self.stream.as_ref().map_or(0, ExtProcStream::memory) + self.unsent
    }

    fn refuse(&mut self, refusal: StreamRefusal) {
        self.framing.clear();
        if let Some(stream) = &mut self.stream {
            stream.refuse(refusal);
        }
    }

    /// Refuses the request, because there is no room for its body.
    fn refuse_body(&mut self, now: Timestamp) {
        let is_slow = self.account.has_slow_body(now);
        self.framing.clear();
        if let Some(stream) = &mut self.stream {
            stream.refuse_body(is_slow);
        }
    }

    fn end(&mut self, status: Status) {
        self.framing.clear();
        self.stream = None;
        self.over = Some(status);
        self.account.record(self.unsent);
        self.account.body_ends();
    }

    /// Brings the account and the clocks up to date, after every step.
    fn settle(&mut self, now: Timestamp) {
        self.account.record(self.memory());
        let awaits_body = self.awaits_body();
        if !awaits_body {
            self.account.body_ends();
        }
        let owes =
            self.unsent > 0 || !self.begun || self.framing.is_within_a_message() || awaits_body;
        self.owed = if owes { self.owed.or(Some(now)) } else { None };
    }

    fn is_overdue(&self, now: Timestamp) -> bool {
        let Some(owed) = self.owed.filter(|_| self.stream.is_some()) else {
            return false;
        };
        // While the proxy holds a body, the daemon cannot see whether its client is silent.
        let may_be_silent = self.awaits_hidden_body() && self.unsent == 0;
        now >= owed.plus_ms(BODY_MS_MAX)
            || !may_be_silent && now >= self.moved.plus_ms(SILENCE_MS_MAX)
    }
}

/// The next answers, as bytes.
fn batch(stream: &mut ExtProcStream) -> Option<Bytes> {
    let mut bytes = BytesMut::new();
    while bytes.len() < BATCH_BYTES {
        let Some(answer) = stream.next_answer() else {
            break;
        };
        let len = answer.encoded_len();
        bytes.reserve(5 + len);
        bytes.put_u8(0); // flag: not compressed
        bytes.put_u32(u32::try_from(len).unwrap_or(u32::MAX)); // no answer is longer than the received message
        answer.encode_raw(&mut bytes);
    }
    (!bytes.is_empty()).then(|| bytes.freeze())
}

#[cfg(test)]
mod tests;
