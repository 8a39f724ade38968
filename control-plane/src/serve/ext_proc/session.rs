//! One ext_proc stream, from its bytes to its bytes: messages are read, the conversation answers, and what all of it holds is accounted.
//!
//! No sockets and no waiting here, as in [`ExtProcStream`]. A stream that waits for its proxy holds memory, a place and perhaps a pick, so its waiting
//! has an end ([`StreamSession::expire`]). That is found out from outside: HTTP/2 does not ask a stream for more while the proxy takes nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use exchange::{ExchangeSettings, Timestamp};
use prost::Message;
use prost::bytes::{BufMut, Bytes, BytesMut};
use tokio::sync::Notify;
use tonic::Status;

use super::ext_proc_stream::{ExtProcStream, StreamAction};
use super::framing::{EXPANSION_MAX, MessageReader};
use super::memory::MemoryAccount;
use super::refusal::StreamRefusal;
use super::server::{ExtProcServer, ServedPool};

/// How long a proxy may be silent while it owes us the rest of a body or of a message, or takes nothing of what it asked for, in ms. A client that
/// is slower than that is gone.
pub const SILENCE_MS_MAX: u64 = 30_000;

/// How long a request's body may take altogether, in ms: as long as the shipped Envoy configuration gives a request (`request_timeout`).
pub const BODY_MS_MAX: u64 = 300_000;

/// Answers are put together up to this length, in bytes: one HTTP/2 frame.
const BATCH_BYTES: usize = 16 << 10;

/// A message with no more than this besides a body is not accounted while it is decoded: there are as many of those as worker threads, no more.
const SMALL_ENVELOPE_BYTES: usize = 4 << 10;

/// A stream.
#[derive(Debug)]
pub struct StreamSession {
    state: Mutex<SessionState>,
    woken: Notify,
    front: Arc<ExtProcServer>,
    number: u64,
}

/// What is to be done.
#[derive(Debug)]
pub enum SessionAction {
    /// Send these bytes; then ask again.
    Send(Bytes),
    /// Bring the next bytes by [`StreamSession::receive`].
    Listen,
    /// Call [`StreamSession::retry`] when the pool has state, or at this moment.
    Wait(Timestamp),
    /// End the stream.
    End(Status),
}

#[derive(Debug)]
struct SessionState {
    framing: MessageReader,
    /// `None` once it is over.
    conversation: Option<ExtProcStream>,
    account: MemoryAccount,
    /// Bytes that were given to be sent, and are not known to be.
    unsent: usize,
    /// The proxy has said something.
    begun: bool,
    /// When the proxy last sent or took something.
    moved: Timestamp,
    /// Since when it owes us something.
    owed: Option<Timestamp>,
    /// Why it is over.
    over: Option<Status>,
}

// === impl StreamSession ===

impl StreamSession {
    /// A stream that has only just begun.
    #[must_use]
    pub fn new(front: &Arc<ExtProcServer>, pool: &Arc<ServedPool>, settings: &Arc<ExchangeSettings>) -> Arc<Self> {
        let conversation = ExtProcStream::new(Arc::clone(front), Arc::clone(pool), Arc::clone(settings));
        let (number, now) = (conversation.number(), front.now());
        let state = SessionState {
            framing: MessageReader::default(),
            conversation: Some(conversation),
            account: front.streams().memory().account(),
            unsent: 0,
            begun: false,
            moved: now,
            owed: Some(now),
            over: None,
        };
        let talk = Arc::new(Self { state: Mutex::new(state), woken: Notify::new(), front: Arc::clone(front), number });
        front.register(number, Arc::downgrade(&talk));
        talk
    }

    /// The proxy has taken what it was sent. What is next?
    pub fn next(&self) -> SessionAction {
        let now = self.front.now();
        let mut state = self.lock();
        if std::mem::take(&mut state.unsent) > 0 {
            state.moved = now;
            state.owed = None;
        }
        let act = state.act();
        if let SessionAction::Send(bytes) = &act {
            state.unsent = bytes.len();
            state.moved = now;
        }
        state.settle(now);
        act
    }

    /// The proxy sent these bytes.
    pub fn receive(&self, bytes: &[u8]) {
        let now = self.front.now();
        let mut state = self.lock();
        state.moved = now;
        if state.conversation.is_some() {
            state.framing.push(bytes);
            if state.hold(0).is_err() {
                state.refuse(StreamRefusal::Memory);
            }
        }
        state.settle(now);
    }

    /// The pool has state, or this is the moment it should have had some.
    pub fn retry(&self, now: Timestamp) -> StreamAction {
        let mut state = self.lock();
        let next = state.conversation.as_mut().map_or(StreamAction::Listen, |conversation| conversation.retry(now));
        state.settle(now);
        next
    }

    /// The proxy says nothing more: what the stream holds is released.
    pub fn close(&self) {
        self.lock().end(Status::ok(""));
    }

    /// May the proxy go on without us?
    #[must_use]
    pub fn is_dispensable(&self) -> bool {
        self.lock().conversation.as_ref().is_some_and(ExtProcStream::is_dispensable)
    }

    /// How much memory it takes for what the proxy sent and has not taken, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.lock().memory()
    }

    /// Resolves when [`Self::next`] is to be asked though nothing came.
    pub async fn wait_for_wake(&self) {
        self.woken.notified().await;
    }

    /// Ends what has waited for its proxy too long.
    pub fn expire(&self, now: Timestamp) {
        let mut state = self.lock();
        if !state.is_overdue(now) {
            return;
        }
        let awaits_body = state.conversation.as_ref().is_some_and(ExtProcStream::awaits_body);
        if awaits_body && state.unsent == 0 {
            state.refuse(StreamRefusal::Slow);
        } else {
            state.end(Status::deadline_exceeded("the proxy owed the rest of a message, or did not take its answer"));
        }
        state.settle(now);
        drop(state);
        self.woken.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StreamSession {
    fn drop(&mut self) {
        self.front.forget(self.number);
    }
}

// === impl SessionState ===

impl SessionState {
    fn act(&mut self) -> SessionAction {
        loop {
            let Some(conversation) = &mut self.conversation else {
                return SessionAction::End(self.over.take().unwrap_or_else(|| Status::ok("")));
            };
            if let Some(bytes) = batch(conversation) {
                return SessionAction::Send(bytes);
            }
            if conversation.is_over() {
                self.end(Status::ok(""));
                continue;
            }
            match self.read() {
                Ok(Some(StreamAction::Listen)) => {}
                Ok(Some(StreamAction::Wait(deadline))) => return SessionAction::Wait(deadline),
                Ok(None) => return SessionAction::Listen,
                Err(status) => self.end(status),
            }
        }
    }

    /// Reads one message; `None` if none is whole.
    fn read(&mut self) -> Result<Option<StreamAction>, Status> {
        let Some(layout) = self.framing.next()? else { return Ok(None) };
        let envelope = layout.envelope_bytes();
        if envelope > SMALL_ENVELOPE_BYTES && self.hold(envelope * EXPANSION_MAX).is_err() {
            self.refuse(StreamRefusal::Memory);
            return Ok(Some(StreamAction::Listen));
        }
        let message = self.framing.take(layout)?;
        self.begun = true;
        let next = self.conversation.as_mut().map_or(StreamAction::Listen, |conversation| conversation.receive(message));
        if self.hold(0).is_err() {
            self.refuse(StreamRefusal::Memory);
            return Ok(Some(StreamAction::Listen));
        }
        Ok(Some(next))
    }

    /// Accounts for what it holds, and `more`.
    fn hold(&mut self, more: usize) -> Result<(), super::memory::MemoryExceeded> {
        self.account.hold(self.memory() + more)
    }

    fn memory(&self) -> usize {
        self.framing.memory() + self.conversation.as_ref().map_or(0, ExtProcStream::memory) + self.unsent
    }

    fn refuse(&mut self, refusal: StreamRefusal) {
        self.framing.clear();
        if let Some(conversation) = &mut self.conversation {
            conversation.refuse(refusal);
        }
    }

    fn end(&mut self, status: Status) {
        self.framing.clear();
        self.conversation = None;
        self.over = Some(status);
        self.account.record(self.unsent);
    }

    /// After every step: the account says what is held, and the clock what is owed.
    fn settle(&mut self, now: Timestamp) {
        self.account.record(self.memory());
        let owes = self.unsent > 0
            || !self.begun
            || self.framing.is_within_a_message()
            || self.conversation.as_ref().is_some_and(|conversation| conversation.awaits_body());
        self.owed = if owes { self.owed.or(Some(now)) } else { None };
    }

    fn is_overdue(&self, now: Timestamp) -> bool {
        let Some(owed) = self.owed else { return false };
        self.conversation.is_some() && (now >= self.moved.plus_ms(SILENCE_MS_MAX) || now >= owed.plus_ms(BODY_MS_MAX))
    }
}

/// The next answers, as they are sent.
fn batch(conversation: &mut ExtProcStream) -> Option<Bytes> {
    let mut bytes = BytesMut::new();
    while bytes.len() < BATCH_BYTES {
        let Some(answer) = conversation.next_answer() else { break };
        let len = answer.encoded_len();
        bytes.reserve(5 + len);
        bytes.put_u8(0); // not compressed
        bytes.put_u32(u32::try_from(len).unwrap_or(u32::MAX)); // no answer is longer than what came
        answer.encode_raw(&mut bytes);
    }
    (!bytes.is_empty()).then(|| bytes.freeze())
}

#[cfg(test)]
mod tests;
