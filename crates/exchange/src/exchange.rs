//! One HTTP exchange as a state machine without I/O: headers and bytes in, actions out.
//!
//! [`Exchange`] holds the rules of the protocol and the phase of the request. A host does not call
//! it directly: [`RequestDriver`](crate::RequestDriver) calls it, in the right order for every
//! host. Code without a stream (an explanation, a replay, a benchmark) may call it directly.
//!
//! [`Exchange::end`] releases the resources of the pick exactly once in every case, because it
//! takes the hold by value.

mod body_limit;
mod client_facts;
mod forward;
mod outcome;
mod pending_request;
mod phase;
mod pick;
mod queued_request;
mod reply_progress;
mod request_head;
mod resolve;
mod response_head;
mod routed_request;
mod slo;
mod unread;

use scheduler::Snapshot;

use crate::api::{self, ApiFamily, RequestApi};
use crate::body;
use crate::explain::{DecisionReason, HEADER_ENDPOINTS_MAX};
use crate::headers;
use crate::prompt::HashSettings;
use crate::reply::{LocalReply, Refusal};
use crate::settings::{DecideAt, ExchangeSettings, FailureMode, HeaderTrust};
use pool_state::{ManagedPool, Timestamp};

use client_facts::ClientFacts;
use request_head::RequestHead;

pub use forward::RequestChanges;
pub use outcome::ExchangeOutcome;
pub use pending_request::{ParsedBody, PendingRequest};
pub(crate) use phase::ExchangePhase;
pub use pick::{ClaimedRequest, QueuedAttempt};
pub use response_head::{ResponseHead, ResponseOrigin};
pub use routed_request::{HELD_BYTES_MAX, ResponseBody, ResponseStep};
pub(crate) use unread::{AwaitedSide, BodyArrival, RELEASE_MS, ReplyDelay, ReplyKind};

/// The maximum number of bytes of request headers kept for plugins, names and values together. A
/// session and a few labels take a fraction of this.
const CAPTURED_BYTES_MAX: usize = 16_384;

#[derive(Debug)]
pub struct Exchange {
    pub(crate) phase: ExchangePhase,
    api: RequestApi,
    family: crate::api::ApiFamily,
    started: Timestamp,
    pub(crate) why: DecisionReason,
    /// Whether the host cannot show the body.
    unseen: bool,
    pub(crate) arrival: BodyArrival,
    facts: HeaderFacts,
}

/// The content of the request headers, owned, because the request may be held.
#[derive(Debug)]
struct HeaderFacts {
    /// The length of the body, if the client declared it.
    declared_bytes: Option<usize>,
    /// The model that a header names, used if the body is not seen.
    model: Option<Box<str>>,
    objective: Option<Box<str>>,
    rewrite: Option<Box<str>>,
    latency: Result<slo::RequestedSlo, slo::InvalidSloHeader>,
    client: ClientFacts,
    /// Headers that plugins read: names and values.
    captured: Vec<(Box<str>, Box<str>)>,
    /// The fairness id that the proxy set.
    flow: Option<Box<str>>,
    /// How long the request may be held, in ms.
    ttl_ms: Option<u64>,
    /// The `content-encoding` that is left after Envoy's decompression.
    encoding: Option<Box<str>>,
    /// The boundary of a form, which may be empty; `None` if the body is no form.
    boundary: Option<Box<[u8]>>,
    /// The hash of the id of the stored answer that the path names; 0 if it names none.
    stored_id: u64,
}

/// The next step of the host after the request headers.
#[derive(Debug, PartialEq, Eq)]
pub enum HeadersStep {
    /// Hold the headers, buffer the body, then decide.
    Buffer,
    /// Decide now, with an empty body. If there is a body, it passes unread.
    Decide,
    /// Answer with [`crate::ready_reply`].
    Ready,
    /// Answer with this reply.
    Reply(LocalReply),
}

/// The next step of the host after a decision.
#[derive(Debug, PartialEq, Eq)]
pub enum ExchangeStep {
    /// Apply these changes and let the request go on.
    Forward(RequestChanges),
    /// Answer with this reply.
    Reply(LocalReply),
    /// Hold the request until the pool names this number ([`ManagedPool::next_due`]), then call
    /// [`Exchange::try_queued`].
    Hold {
        /// The number of the request among the held ones.
        number: u64,
    },
    /// Hold the request until the pool has state, at most until `deadline`, then decide again.
    Park {
        /// The time when to stop waiting.
        deadline: Timestamp,
    },
}

// === impl Exchange ===

impl Exchange {
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self {
            phase: ExchangePhase::Started,
            api: RequestApi::Other {
                family: ApiFamily::OpenAi,
            },
            family: ApiFamily::OpenAi,
            started: now,
            why: DecisionReason::default(),
            unseen: false,
            arrival: BodyArrival::Whole,
            facts: HeaderFacts {
                declared_bytes: None,
                model: None,
                objective: None,
                rewrite: None,
                latency: Ok(slo::RequestedSlo::default()),
                client: ClientFacts::default(),
                captured: Vec::new(),
                flow: None,
                ttl_ms: None,
                encoding: None,
                boundary: None,
                stored_id: 0,
            },
        }
    }

    /// Makes the exchange explain every endpoint, regardless of the client's headers and the
    /// settings.
    #[must_use]
    pub fn with_explanation(mut self) -> Self {
        self.why.endpoints_max = usize::MAX;
        self
    }

    /// The reasons for the decision, as JSON ([`crate::explain::reasons`]); `None` after they were
    /// put into the response headers.
    #[must_use]
    pub fn reasons(&self) -> Option<&str> {
        self.why.reasons.as_deref()
    }

    /// Takes the decision record, if this decision is recorded.
    pub fn take_record(&mut self) -> Option<String> {
        self.why.record.take()
    }

    /// Reads the request headers. Names are lower-case. The caller removes headers that a client
    /// must not set ([`ExchangeSettings::removes`]).
    pub fn request_headers<'h>(
        &mut self,
        settings: &ExchangeSettings,
        pairs: impl IntoIterator<Item = (&'h [u8], &'h [u8])>,
        end_of_stream: bool,
    ) -> HeadersStep {
        let head = RequestHead::read(pairs, settings);
        self.api = RequestApi::for_request(head.method, head.path);
        self.family = self.api.error_family();
        if head.explain && settings.explain {
            self.why.endpoints_max = self.why.endpoints_max.max(HEADER_ENDPOINTS_MAX);
        }
        self.facts.objective = head
            .objective
            .get()
            .filter(|_| settings.objective_header == HeaderTrust::Trust)
            .map(Into::into);
        self.facts.rewrite = head.rewrite.get().map(Into::into);
        self.facts.latency = match settings.slo_headers {
            HeaderTrust::Trust => head.slo.read(),
            HeaderTrust::Ignore => Ok(slo::RequestedSlo::default()),
        };
        self.facts.client = ClientFacts::from_headers(&head, settings);
        self.facts.declared_bytes = head.content_length;
        self.facts.ttl_ms = head.ttl_ms;
        self.facts.encoding = head
            .encoding
            .map(|value| String::from_utf8_lossy(value).into());
        self.facts.model = head
            .model
            .and_then(|name| std::str::from_utf8(name).ok())
            .map(Into::into);
        if self.api == RequestApi::Task {
            self.facts.boundary = body::form::boundary(head.content_type).map(Into::into);
        }
        if self.api.may_name_stored() {
            self.facts.stored_id = api::hash_of_stored_id(head.path);
        }
        if head.path_is(settings.ready_path.as_bytes()) {
            self.phase = ExchangePhase::Answered { uncounted: None };
            return HeadersStep::Ready;
        }
        if self.api.is_grpc() && !head.grpc {
            self.api = RequestApi::Other {
                family: self.family,
            };
        }
        // The known gRPC methods have one message, so their bodies end. Any other endless request
        // on the path of an API is decided without a body, so it is refused as invalid JSON instead
        // of passing unread.
        let endless = head.unbuffered || head.grpc && !self.api.is_grpc();
        if settings.decide_at == DecideAt::Headers {
            self.set_body_unavailable();
        }
        if !self.api.reads_body() || end_of_stream || endless || self.unseen {
            return HeadersStep::Decide;
        }
        if let Some(reply) = head
            .content_length
            .and_then(|bytes| self.check_body_size(settings, bytes))
        {
            return HeadersStep::Reply(reply);
        }
        self.phase = ExchangePhase::Buffering;
        HeadersStep::Buffer
    }

    /// Keeps the request headers that the plugins of `pool` read. Before the first state, keeps all
    /// that fit. If the pool has no parser for the API, the body is not read.
    pub fn capture_headers<'h>(
        &mut self,
        pool: &ManagedPool,
        pairs: impl IntoIterator<Item = (&'h [u8], &'h [u8])>,
    ) {
        let pipeline = pool.snapshot().map(Snapshot::pipeline);
        if pipeline
            .zip(self.api.parser())
            .is_some_and(|(pipeline, parser)| !pipeline.reads(parser))
        {
            self.api = RequestApi::Other {
                family: self.family,
            };
        }
        let wanted = pipeline.map(|pipeline| pipeline.headers());
        let mut room = CAPTURED_BYTES_MAX;
        for (name, value) in pairs {
            if wanted.is_some_and(|wanted| !wanted.iter().any(|known| known.as_bytes() == name))
                || name.len() + value.len() > room
            {
                continue;
            }
            if let (Ok(name), Ok(value)) = (std::str::from_utf8(name), std::str::from_utf8(value)) {
                room -= name.len() + value.len();
                self.facts.captured.push((name.into(), value.into()));
            }
        }
    }

    /// Sets the fairness id of the request, which the proxy has checked. Text that is not UTF-8
    /// counts as no id. Unless a header names the client, the id also identifies the client.
    pub fn set_flow(&mut self, id: Option<&[u8]>) {
        self.facts.flow = id
            .and_then(|id| std::str::from_utf8(id).ok())
            .filter(|id| !id.is_empty())
            .map(Into::into);
        self.facts.client.set_name(self.facts.flow.as_deref());
    }

    /// A hash of the client's name if a header or the proxy's metadata gives one, otherwise of its
    /// downstream address.
    #[must_use]
    pub fn client(&self) -> u64 {
        self.facts.client.hash
    }

    /// The length of the request body, if the client declared it.
    pub(crate) fn declared_bytes(&self) -> Option<usize> {
        self.facts.declared_bytes
    }

    /// Whether a header or the proxy's metadata names the client.
    pub(crate) fn names_client(&self) -> bool {
        self.facts.client.is_named()
    }

    /// Records that the host cannot show the whole body before the decision. The decision then uses
    /// load, session and subset, and the body passes unchanged.
    pub fn set_body_unavailable(&mut self) {
        self.unseen = true;
    }

    /// Decides where the request goes. `hint` is the raw subset hint, `None` if absent. On an
    /// inference path, `body` must be the whole request body; on other paths it is not read.
    pub fn decide(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        hint: Option<&[u8]>,
        body: &[u8],
        now: Timestamp,
    ) -> ExchangeStep {
        let read = self.read(body, HashSettings::from_pool(pool));
        match self.resolve(settings, pool, read, now) {
            Ok(pending) => self.pick(settings, pool, hint, pending.with_hashes(), now),
            Err(step) => step,
        }
    }

    /// Whether the endpoint at `address` is tried first.
    #[must_use]
    pub fn is_first_endpoint(&self, address: &[u8]) -> bool {
        matches!(&self.phase, ExchangePhase::Routed(routed) if routed.is_first_endpoint(address))
    }

    /// Reads the response headers, from the upstream or from the proxy.
    pub fn response_headers(
        &mut self,
        pool: &mut ManagedPool,
        head: &ResponseHead<'_>,
        now: Timestamp,
    ) -> ResponseStep {
        match &mut self.phase {
            ExchangePhase::Routed(routed) => {
                let mut step = routed.response_headers(pool, head, now);
                step.set.extend(
                    self.why
                        .reasons
                        .take()
                        .map(|reasons| (headers::DECISION.into(), reasons)),
                );
                step
            }
            _ => ResponseStep::default(),
        }
    }

    /// Reads a piece of the response body. Returns the bytes that replace it, if it changes.
    pub fn response_chunk(
        &mut self,
        pool: &mut ManagedPool,
        bytes: &[u8],
        last: bool,
        now: Timestamp,
    ) -> Option<&[u8]> {
        if self.read_chunk(bytes, last, now) {
            self.report_progress(pool, now);
        }
        self.restore_chunk(bytes, last)
    }

    /// The first step of [`Self::response_chunk`], which reads the piece. Returns whether
    /// [`Self::report_progress`] must follow.
    pub(crate) fn read_chunk(&mut self, bytes: &[u8], last: bool, now: Timestamp) -> bool {
        match &mut self.phase {
            ExchangePhase::Routed(routed) => routed.read_chunk(bytes, last, now),
            _ => false,
        }
    }

    /// The second step of [`Self::response_chunk`], which reports to the pool what the reply has
    /// shown.
    pub(crate) fn report_progress(&mut self, pool: &mut ManagedPool, now: Timestamp) {
        if let ExchangePhase::Routed(routed) = &mut self.phase {
            routed.report_progress(pool, now);
        }
    }

    /// The last step of [`Self::response_chunk`].
    pub(crate) fn restore_chunk(&mut self, bytes: &[u8], last: bool) -> Option<&[u8]> {
        if let ExchangePhase::Routed(routed) = &mut self.phase {
            routed.restore_chunk(bytes, last)
        } else {
            None
        }
    }

    /// Whether the reply to an inference request has begun and not ended. In this case, call
    /// [`record_cut_off`](Self::record_cut_off) before [`end`](Self::end) if the engine broke off
    /// the reply.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(&self.phase, ExchangePhase::Routed(routed) if routed.is_open())
    }

    /// Records that the engine broke off its reply.
    pub fn record_cut_off(&mut self) {
        if let ExchangePhase::Routed(routed) = &mut self.phase {
            routed.record_cut_off();
        }
    }

    /// Ends the exchange and releases the resources of the pick. `None` if there is no pick to
    /// release.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn end(&mut self, pool: &mut ManagedPool, now: Timestamp) -> Option<ExchangeOutcome> {
        match std::mem::replace(&mut self.phase, ExchangePhase::Ended) {
            ExchangePhase::Routed(routed) => Some(routed.end(pool, now)),
            ExchangePhase::Answered { uncounted } => {
                self.phase = ExchangePhase::Answered { uncounted: None };
                uncounted
                    .into_iter()
                    .for_each(|reason| pool.counters_mut().count_dropped(reason));
                None
            }
            ExchangePhase::Queued(ticket, _) => {
                pool.drop_queued(ticket, now);
                None
            }
            _ => None,
        }
    }

    /// Ends an exchange whose [`RequestChanges`] the host could not apply. Releases the resources
    /// of the pick, and returns the reply for the client.
    pub fn abandon(&mut self, pool: &mut ManagedPool, now: Timestamp) -> LocalReply {
        let _ = self.end(pool, now);
        self.phase = ExchangePhase::Answered { uncounted: None };
        Refusal::Unsent.reply(self.family)
    }

    /// The number of a request that was sent and may be given up.
    pub(crate) fn revocable(&self) -> Option<u64> {
        match &self.phase {
            ExchangePhase::Routed(routed) => routed.revocable(),
            _ => None,
        }
    }

    /// Gives up the request if the pool says so. Releases the resources of the pick, and returns
    /// the reply for the client.
    pub(crate) fn give_up(
        &mut self,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> Option<(LocalReply, ExchangeOutcome)> {
        let ExchangePhase::Routed(routed) = &self.phase else {
            return None;
        };
        let retry_after_s = routed.take_revoked(pool)?;
        let outcome = self.end(pool, now)?;
        match self.refuse(pool, &Refusal::GivenUp { retry_after_s }) {
            ExchangeStep::Reply(reply) => Some((reply, outcome)),
            _ => None,
        }
    }

    fn refuse(&mut self, pool: &mut ManagedPool, refusal: &Refusal) -> ExchangeStep {
        self.phase = ExchangePhase::Answered { uncounted: None };
        pool.counters_mut().count_dropped(refusal.reason());
        let mut reply = refusal.reply(self.family);
        reply.headers.extend(
            self.why
                .reasons
                .clone()
                .map(|reasons| (headers::DECISION, reasons)),
        );
        ExchangeStep::Reply(reply)
    }

    fn without_state(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> ExchangeStep {
        let deadline = self.started.plus_ms(settings.cold_start_wait_ms);
        if now < deadline {
            self.phase = ExchangePhase::Parked;
            return ExchangeStep::Park { deadline };
        }
        match settings.failure_mode {
            FailureMode::Close => self.refuse(pool, &Refusal::NoState),
            FailureMode::Open => {
                self.phase = ExchangePhase::Passed;
                ExchangeStep::Forward(RequestChanges::open())
            }
        }
    }
}
