//! The driver of one request, which every host uses. A driver receives the events of a stream, and
//! calls the host for the necessary actions.
//!
//! A host connects a proxy with this crate: the wasm filter, the ext_proc server, a native Envoy
//! module. A host only translates calls. The driver decides the rest: the phases, parking, whether
//! headers and bytes are held, and when a body is read. It also decides whether a request may be
//! retried, when a pick is released, which endpoint served, and what is counted.
//!
//! ```text
//!                    Started
//!                       │ request headers
//!          ┌────────────┼───────────────────────────┐
//!          │ body is    │ no body, upgrade, gRPC,   │ route without a pool
//!          │ read       │ other path, body unseen   │
//!          ▼            │                           │
//!      Buffering        │                           │
//!          │ last byte  ▼                           │
//!          └─────────► decide ◄── state, deadline ─┐│
//!                       │                          ││
//!                       ├── no state yet ────► Parked
//!                       ├── no room ─────────► Queued ── due ──► decide
//!                       │                           │
//!          ┌────────────┼─────────────┐             │
//!          │ refused    │ picked      │ failed open │
//!          ▼            ▼             ▼             │
//!      Answered       Routed        Passed ◄────────┘
//!                       │ end of the reply or of the stream
//!                       ▼
//!                     Ended
//! ```
//! A body above the size limit leads from Buffering to Answered. The end of the stream leads from
//! every other phase to Ended, but an answered request stays Answered. The phases are one enum, in
//! `crates/exchange/src/exchange/phase.rs`.
//!
//! # What a host must do
//!
//! A host implements [`RequestHost`] and has one [`RequestDriver`] for each stream. The host calls
//! the driver for each event, in the order in which the proxy delivers them:
//!
//! | event | call | afterwards |
//! |---|---|---|
//! | request headers | [`RequestDriver::request_headers`] | follow the [`FilterStatus`] |
//! | piece of the request body | [`RequestDriver::request_body`], the size so far | follow it |
//! | request trailers | [`RequestDriver::request_trailers`] | follow it |
//! | state arrived, a time that the driver gave, or a held request is due | [`RequestDriver::resume`] | on `Go`, resume |
//! | response headers | [`RequestDriver::response_headers`] | follow it |
//! | piece of the response body | [`RequestDriver::response_body`] | follow it |
//! | response trailers | [`RequestDriver::response_trailers`] | let them go on |
//! | about once a second after the pick | [`RequestDriver::check_reply`] | |
//! | end of the stream, for any reason | [`RequestDriver::end`] | |
//!
//! A host removes the request headers that a client must not set
//! ([`crate::ExchangeSettings::removes`]) before it forwards the request.
//!
//! In each event, the driver calls the host in this order:
//!
//! 1. Request headers: `find_pool`, then `wait_for_body` if the body is read. Without a pool, only
//!    `count`. While a long body arrives, `body_piece`.
//! 2. Decision: `body_piece`, or `take_body` if the body is complete; `with_pool`
//!    ([`PoolUse::Resolve`]); `subset_hint`; `with_pool` ([`PoolUse::Pick`]); `log_decision`. Then
//!    `may_keep` for a long body, `forward` and `count`, or `count` and `reply`, or `park` or
//!    `hold`, and `keep_body`.
//! 3. Response headers: `with_pool` ([`PoolUse::Respond`]), `send_response_headers`.
//! 4. Response body: `take_response_body`; `with_pool` ([`PoolUse::ReadResponse`]) at the first
//!    token, every 50 ms and at the end; `send_response_body`.
//! 5. End of the reply or of the stream: `with_pool` ([`PoolUse::Release`]), `ended`.
//!
//! # What a host must never do
//!
//! - Let a request go on after a [`FilterStatus::Hold`].
//! - Call the driver from one of its own methods, or block in one.
//! - Leave out [`RequestDriver::end`]: the endpoint would seem loaded forever. A second call does
//!   no harm.
//! - Keep the pool locked after [`RequestHost::with_pool`] returns.
//! - Change a body where the driver does not say so, or read it to decide.
//!
//! All calls are dispatched statically, and bodies are handed over without a copy. So a driver
//! costs as much as the same code inside the host.

mod decide;
mod host;
mod reading;
mod response;
mod unread;
pub use host::{BodyProgress, FilterStatus, PoolUse, RequestCount, RequestHost, RewriteError};

use pool_state::Timestamp;

use crate::exchange::{BodyArrival, ExchangePhase};
use crate::reply::Refusal;
use crate::{Exchange, HashSettings, HeadersStep, LocalReply, ResponseBody};
use reading::BodyReading;
use unread::ReplyFlow;

#[derive(Debug)]
pub struct RequestDriver<H: RequestHost> {
    exchange: Exchange,
    /// The pool of the request's route, until [`Self::end`].
    pool: Option<H::Pool>,
    /// Length of the request body received so far.
    body_bytes: usize,
    /// Whether the last byte of the request has arrived.
    is_whole: bool,
    reading: BodyReading,
    pieces: BodyDelivery,
    response: ResponseBody,
    /// Length of the held response body received so far.
    response_bytes: usize,
    reply_flow: ReplyFlow,
}

/// How the pieces of a request body reach a filter ([`RequestHost::IS_FILTER`]). If a filter held a
/// piece and the proxy resumed the request before the last piece, Envoy up to 1.39 drops the next
/// piece. So the filter holds the next piece too, and releases it with the piece after it, or
/// later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyDelivery {
    /// No piece arrived.
    None,
    /// Each piece was held or went on, as the [`FilterStatus`] of its event said.
    InStep,
    /// Pieces went on by [`RequestDriver::resume`], so the next one is held.
    Ahead,
    /// One piece is held until the next event or [`RequestDriver::resume`].
    HoldNext,
}

// === impl RequestDriver ===

impl<H: RequestHost> Default for RequestDriver<H> {
    fn default() -> Self {
        Self {
            exchange: Exchange::new(Timestamp(0)),
            pool: None,
            body_bytes: 0,
            is_whole: false,
            reading: BodyReading::default(),
            pieces: BodyDelivery::None,
            response: ResponseBody::Ignore,
            response_bytes: 0,
            reply_flow: ReplyFlow::default(),
        }
    }
}

impl<H: RequestHost> RequestDriver<H> {
    /// Handles the request headers. Names are lower-case.
    pub fn request_headers<'h>(
        &mut self,
        host: &mut H,
        pairs: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone,
        end_of_stream: bool,
    ) -> FilterStatus {
        self.end(host); // if a proxy begins twice, the load of the first pick must not stay
        *self = Self {
            exchange: Exchange::new(host.now()),
            is_whole: end_of_stream,
            ..Self::default()
        };
        self.exchange.arrival = if end_of_stream {
            BodyArrival::Whole
        } else if host.shows_body_end() {
            BodyArrival::Partial
        } else {
            BodyArrival::Unseen
        };
        let step = self
            .exchange
            .request_headers(host.settings(), pairs.clone(), end_of_stream);
        if step == HeadersStep::Ready {
            host.reply(host.ready_reply());
            return FilterStatus::Hold;
        }
        self.pool = host.find_pool();
        self.exchange.set_traced(host.is_traced(pairs.clone()));
        let Some(pool) = &self.pool else {
            self.exchange.phase = ExchangePhase::Passed;
            host.count(None, RequestCount::Passed);
            return FilterStatus::Go;
        };
        let exchange = &mut self.exchange;
        let (queues, hashing) = host.with_pool(pool, PoolUse::Capture, Timestamp(0), |pool| {
            exchange.capture_headers(pool, pairs);
            (pool.flow_control().is_some(), HashSettings::from_pool(pool))
        });
        self.reading = BodyReading::new(hashing);
        if queues || !exchange.names_client() {
            exchange.set_flow(host.flow_id().as_deref());
        }
        match step {
            HeadersStep::Buffer if host.wait_for_body() => FilterStatus::Hold,
            HeadersStep::Buffer => {
                self.exchange.set_body_unavailable();
                self.decide(host)
            }
            HeadersStep::Decide | HeadersStep::Ready => self.decide(host),
            HeadersStep::Reply(reply) => self.refuse(host, reply),
        }
    }

    /// Handles a piece of the request body. `size` is the length of the body so far. A body that
    /// passes unread needs no `size`.
    pub fn request_body(
        &mut self,
        host: &mut H,
        size: usize,
        progress: BodyProgress,
    ) -> FilterStatus {
        self.body_bytes = size;
        if self.pieces == BodyDelivery::None {
            self.pieces = BodyDelivery::InStep;
        }
        if self.awaits_body()
            && let Some(reply) = self.exchange.check_body_size(host.settings(), size)
        {
            return self.refuse(host, reply);
        }
        let status = match progress {
            BodyProgress::Whole => self.request_complete(host),
            BodyProgress::CutOff if self.awaits_body() => {
                self.exchange.set_body_unavailable();
                self.decide(host)
            }
            BodyProgress::Partial if self.awaits_body() => {
                self.reading.read_some(&self.exchange, host, size);
                FilterStatus::Hold
            }
            BodyProgress::CutOff | BodyProgress::Partial => self.status(),
        };
        if status == FilterStatus::Go {
            self.pass_piece(host)
        } else {
            status
        }
    }

    /// Refuses a request whose body is not complete, because the host has no room for it.
    pub fn refuse_body(&mut self, host: &mut H, is_slow: bool) -> FilterStatus {
        if !self.awaits_body() {
            return self.status();
        }
        let reply = self
            .exchange
            .refuse_body(&Refusal::NoRoomForBody { is_slow });
        self.refuse(host, reply)
    }

    /// Handles the request trailers. The held part of the body goes on before the trailers.
    pub fn request_trailers(&mut self, host: &mut H) -> FilterStatus {
        if self.pieces == BodyDelivery::HoldNext {
            self.pieces = BodyDelivery::InStep;
        }
        self.request_complete(host)
    }

    /// Decides again, because the pool has state, or because the time of [`RequestHost::park`] or
    /// [`RequestHost::resume_after`] has come. On [`FilterStatus::Go`], the request goes on with
    /// the held part of its body.
    pub fn resume(&mut self, host: &mut H, now: Timestamp) -> FilterStatus {
        if self.is_revocable() && self.give_up(host, now) {
            return FilterStatus::Hold;
        }
        if matches!(self.exchange.phase, ExchangePhase::Queued(..)) {
            if self.decide_queued(host, now) == FilterStatus::Hold {
                return FilterStatus::Hold;
            }
        } else if matches!(self.exchange.phase, ExchangePhase::Parked) {
            if let Some(pool) = &self.pool {
                self.reading =
                    BodyReading::new(host.with_pool(pool, PoolUse::Capture, now, |pool| {
                        HashSettings::from_pool(pool)
                    }));
            }
            let body = self.body(host);
            if self.decide_at(host, body, now) == FilterStatus::Hold {
                return FilterStatus::Hold;
            }
        }
        if H::IS_FILTER && self.pieces != BodyDelivery::None {
            self.pieces = BodyDelivery::Ahead;
        }
        FilterStatus::Go
    }

    /// Handles the end of the reply or of the stream, whichever comes first. Releases the resources
    /// of the pick, once.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn end(&mut self, host: &mut H) {
        self.pieces = BodyDelivery::None;
        self.reading = BodyReading::default();
        let Some(pool) = self.pool.take() else { return };
        let now = host.now();
        self.settle_delay(host, now);
        let exchange = &mut self.exchange;
        let (outcome, due) = host.with_pool(&pool, PoolUse::Release, now, |pool| {
            (exchange.end(pool, now), pool.has_due())
        });
        if due {
            host.release_queued(&pool);
        }
        if let Some(outcome) = outcome {
            host.ended(&outcome);
        }
    }

    /// Ends the request with the host's own reply.
    pub fn answer(&mut self, host: &mut H, reply: LocalReply) -> FilterStatus {
        self.end(host);
        self.exchange.phase = ExchangePhase::Answered { uncounted: None };
        host.reply(reply);
        FilterStatus::Hold
    }

    /// The client of the request as a hash ([`Exchange::client`]).
    #[must_use]
    pub fn client(&self) -> u64 {
        self.exchange.client()
    }

    /// The length of the request body, if the client declared it. A decompressor in front removes
    /// this length.
    #[must_use]
    pub fn declared_bytes(&self) -> Option<usize> {
        self.exchange.declared_bytes()
    }

    /// Whether [`Self::resume`] must still be called, at the time that the driver gave.
    #[must_use]
    pub fn waits(&self) -> bool {
        matches!(self.exchange.phase, ExchangePhase::Parked)
            || self.pieces == BodyDelivery::HoldNext
    }

    /// Whether flow control holds the request.
    #[must_use]
    pub fn is_queued(&self) -> bool {
        matches!(self.exchange.phase, ExchangePhase::Queued(..))
    }

    /// Whether the request was sent, and the pool may still give it up.
    #[must_use]
    pub fn is_revocable(&self) -> bool {
        self.exchange.revocable().is_some()
    }

    /// Whether the request is held until its last body byte.
    #[must_use]
    pub fn awaits_body(&self) -> bool {
        matches!(self.exchange.phase, ExchangePhase::Buffering)
    }

    /// Whether the request is held, together with the pieces of its body that arrive.
    #[must_use]
    pub fn holds_request(&self) -> bool {
        matches!(
            self.exchange.phase,
            ExchangePhase::Buffering | ExchangePhase::Parked | ExchangePhase::Queued(..)
        )
    }

    /// The memory of a body that is being read, in bytes. The host has the body itself.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.reading.memory()
    }

    /// Whether the client got a local reply.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        matches!(self.exchange.phase, ExchangePhase::Answered { .. })
    }

    /// Whether a picked endpoint has the request. Only in this case do its response headers matter.
    #[must_use]
    pub fn is_routed(&self) -> bool {
        matches!(self.exchange.phase, ExchangePhase::Routed(_))
    }

    /// Whether this is the address of the endpoint that is tried first.
    #[must_use]
    pub fn is_first_endpoint(&self, address: &[u8]) -> bool {
        self.exchange.is_first_endpoint(address)
    }

    /// Whether the response is changed before it reaches the client. If so, the proxy needs the
    /// host until the end of the response.
    #[must_use]
    pub fn restores_response(&self) -> bool {
        matches!(self.response, ResponseBody::Restore | ResponseBody::Hold)
    }

    /// Returns the status for the current phase. A request goes on only if it is decided, or needs
    /// no decision.
    fn status(&self) -> FilterStatus {
        match self.exchange.phase {
            ExchangePhase::Started
            | ExchangePhase::Routed(_)
            | ExchangePhase::Passed
            | ExchangePhase::Ended => FilterStatus::Go,
            ExchangePhase::Buffering
            | ExchangePhase::Parked
            | ExchangePhase::Queued(..)
            | ExchangePhase::Answered { .. } => FilterStatus::Hold,
        }
    }

    /// Handles the last byte of the request.
    fn request_complete(&mut self, host: &mut H) -> FilterStatus {
        self.is_whole = true;
        let before = std::mem::replace(&mut self.exchange.arrival, BodyArrival::Whole);
        if self.awaits_body() {
            return self.decide(host);
        }
        if before != BodyArrival::Whole {
            self.body_passes(host);
        }
        self.status()
    }

    fn pass_piece(&mut self, host: &mut H) -> FilterStatus {
        match &self.pool {
            Some(pool) if self.pieces == BodyDelivery::Ahead => {
                self.pieces = BodyDelivery::HoldNext;
                host.resume_after(pool, host.now());
                FilterStatus::Hold
            }
            _ => {
                self.pieces = BodyDelivery::InStep;
                FilterStatus::Go
            }
        }
    }

    /// Takes the body from the host, if the body is complete.
    fn body(&self, host: &mut H) -> Option<H::RequestBody> {
        self.is_whole.then(|| host.take_body(self.body_bytes))
    }
}
