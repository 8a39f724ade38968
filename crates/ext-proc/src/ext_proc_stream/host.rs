//! Implements [`RequestHost`] for an ext_proc stream: turns the calls of the request driver into
//! answers to the proxy.

mod bodies;
mod response_head;

use std::borrow::Cow;
use std::sync::Arc;

use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use exchange::trace::TraceContext;
use exchange::{
    ExchangeOutcome, ExchangeSettings, LocalReply, ManagedPool, PoolUse, RequestChanges,
    RequestCount, RequestHost, ResponseStep, RewriteError, Timestamp, headers, ready_reply,
};
use scheduler::flow::FlowControl;
use tokio::sync::{Notify, OwnedSemaphorePermit};

use super::super::answers::AnswerQueue;
use super::super::gateway_connection::GatewayConnection;
use super::super::held_body::HeldBody;
use super::super::retry_copies::RetryCopy;
use super::super::server::{ExtProcServer, ServedPool};
use super::super::span::RequestSpan;
use super::super::wire::{self, BodyDirection, BodyMode, BodyModes, HeaderChanges};

/// Longest piece of a body in one full-duplex message, in bytes: Envoy takes at most 64 KiB.
pub(super) const PIECE_BYTES_MAX: usize = 60 << 10;

/// The maximum time for which the server asks a proxy to wait while a request is held, in ms: the
/// `max_message_timeout` of the shipped file.
const HOLD_MS_MAX: u64 = 3_600_000;

/// The server asks a proxy to wait this much longer than a request may be held, in ms: as long as
/// the proxy waits for any answer (`message_timeout` of the shipped file).
const ANSWER_MS: u64 = 5_000;

/// The next thing that a stream needs.
#[derive(Clone, Debug)]
pub enum StreamAction {
    /// The next message.
    Listen,
    /// A call of [`super::ExtProcStream::retry`] when the pool has state, at this moment at the
    /// latest.
    Wait(Timestamp),
    /// A call of [`super::ExtProcStream::retry`] after each notification.
    Hold(Arc<Notify>),
}

/// The host of one stream's driver. Most of its fields are facts about the request.
#[derive(Debug)]
pub struct ExtProcHost {
    pub(super) server: Arc<ExtProcServer>,
    pool: Arc<ServedPool>,
    settings: Arc<ExchangeSettings>,
    pub(super) gateway: GatewayConnection,
    pub(super) modes: Option<BodyModes>,
    pub(super) hint: Option<Vec<u8>>,
    /// Control headers that the client sent; they are removed.
    stripped: Vec<String>,
    held: HeldBody,
    /// The body that the proxy keeps for a retry, if the body is long.
    kept: Option<RetryCopy>,
    end: RequestEndedBy,
    /// Whether the request headers were answered before the decision.
    headers_answered: bool,
    /// The deadline of a parked request, and its permit among the parked requests.
    pub(super) parking: Option<(Timestamp, OwnedSemaphorePermit)>,
    /// Wakes a request that flow control holds.
    pub(super) hold: Option<Arc<Notify>>,
    /// Wakes a request that was sent and may be given up.
    pub(super) watched: Option<Arc<Notify>>,
    /// The fairness id that the proxy set.
    flow_id: Option<Vec<u8>>,
    /// The piece of the response body that the driver may take.
    pub(super) piece: Option<ResponsePiece>,
    pub(super) out: AnswerQueue,
    /// The caller's span, if the stream names one.
    pub(super) parent: Option<TraceContext>,
    /// The span of the request, if its trace is sampled.
    span: Option<Box<RequestSpan>>,
}

#[derive(Debug, Default)]
pub struct ResponsePiece {
    pub(super) bytes: Vec<u8>,
    /// Whether the piece is the last.
    pub(super) ends: bool,
}

/// The message that ended the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestEndedBy {
    Headers,
    Body,
    Trailers,
}

// === impl ExtProcHost ===

impl RequestHost for ExtProcHost {
    type Pool = Arc<ServedPool>;
    type RequestBody = HeldBody;
    type ResponseBody = ResponsePiece;

    const IS_FILTER: bool = false;

    fn now(&self) -> Timestamp {
        self.server.now()
    }

    fn settings(&self) -> &ExchangeSettings {
        &self.settings
    }

    fn ready_reply(&self) -> LocalReply {
        ready_reply(self.server.is_ready())
    }

    fn find_pool(&mut self) -> Option<Arc<ServedPool>> {
        Some(Arc::clone(&self.pool))
    }

    /// The lock is held for one step, so that other streams do not wait while this one reads and
    /// hashes a body.
    fn with_pool<R>(
        &self,
        pool: &Arc<ServedPool>,
        usage: PoolUse,
        _: Timestamp,
        act: impl FnOnce(&mut ManagedPool) -> R,
    ) -> R {
        let mut inner = pool.lock();
        if usage == PoolUse::Resolve {
            inner.prepare_index();
        }
        act(&mut inner.pool)
    }

    fn subset_hint(&self) -> Option<Cow<'_, [u8]>> {
        self.hint.as_deref().map(Cow::Borrowed)
    }

    fn wait_for_body(&mut self) -> bool {
        match self.modes().request {
            BodyMode::FullDuplex | BodyMode::Streamed { early: true } => true,
            BodyMode::Buffered | BodyMode::BufferedPartial => {
                self.headers_answered = true;
                let changes = HeaderChanges {
                    remove: std::mem::take(&mut self.stripped),
                    set: Vec::new(),
                };
                self.answer(wire::headers_answer(BodyDirection::Request, changes));
                true
            }
            BodyMode::None | BodyMode::Streamed { early: false } => false,
        }
    }

    fn shows_body_end(&self) -> bool {
        let modes = self.modes();
        modes.request != BodyMode::None && wire::decline_request_body(modes).is_none()
    }

    fn body_piece(&self, start: usize, size: usize) -> Cow<'_, [u8]> {
        self.held
            .as_ref()
            .get(start..start.saturating_add(size))
            .unwrap_or_default()
            .into()
    }

    fn take_body(&mut self, _: usize) -> HeldBody {
        std::mem::take(&mut self.held)
    }

    fn keep_body(&mut self, body: HeldBody) {
        self.held = body;
    }

    fn forward(
        &mut self,
        RequestChanges { set, body: edit }: RequestChanges,
        body: Option<HeldBody>,
    ) -> Result<(), RewriteError> {
        body.into_iter().for_each(|body| self.held = body);
        self.hold = None;
        let (open, set): (Vec<_>, Vec<_>) =
            set.into_iter().partition(|(name, _)| name == headers::OPEN);
        let known = [
            &self.settings.destination.header,
            &self.settings.destination.fallback_header,
        ];
        if let Some((_, destination)) = set
            .iter()
            .find(|(name, _)| *name == self.settings.destination.header)
        {
            self.span
                .iter_mut()
                .for_each(|span| span.tag("destination", destination.as_str()));
        }
        let destinations = set
            .iter()
            .filter(|(name, _)| known.contains(&name))
            .cloned();
        // The metadata that `header_to_metadata` sets behind the filter is set here directly.
        let metadata = destinations.chain(
            open.into_iter()
                .map(|(_, value)| ("open".to_owned(), value)),
        );
        let metadata = wire::destination_metadata(self.server.destination_namespace(), metadata);
        let mut remove = std::mem::take(&mut self.stripped);
        remove.retain(|name| !set.iter().any(|(set, _)| set == name));
        let changes = HeaderChanges { remove, set };
        let mode_override = if self.end == RequestEndedBy::Headers {
            wire::decline_request_body(self.modes())
        } else {
            None
        };
        if self.headers_answered {
            let (answer, body_bytes) = self.buffered_answer(edit, changes);
            let answer = ProcessingResponse {
                dynamic_metadata: metadata,
                mode_override,
                ..answer
            };
            self.out.push(answer, body_bytes);
        } else {
            let answer = wire::headers_answer(BodyDirection::Request, changes);
            self.answer(ProcessingResponse {
                dynamic_metadata: metadata,
                mode_override,
                ..answer
            });
            self.send_pieces(edit);
        }
        Ok(())
    }

    fn may_keep(&mut self, client: u64, bytes: usize) -> bool {
        self.kept = RetryCopy::keep(self.server.retry_copies(), self.gateway, client, bytes);
        self.kept.is_some()
    }

    fn reply(&mut self, reply: LocalReply) {
        self.held = HeldBody::default();
        self.parking = None;
        self.hold = None;
        self.tag("refused", &reply.status.to_string());
        self.answer(wire::immediate(reply));
    }

    fn park(&mut self, _: &Arc<ServedPool>, deadline: Timestamp, _: u64) -> bool {
        self.parking = self.server.parking_place().map(|place| (deadline, place));
        self.parking.is_some()
    }

    fn flow_id(&self) -> Option<Cow<'_, [u8]>> {
        self.flow_id.as_deref().map(Cow::Borrowed)
    }

    fn hold(&mut self, pool: &Arc<ServedPool>, number: u64) {
        if self.hold.is_none() {
            self.ask_for_time(pool);
        }
        let wakes = self.hold.get_or_insert_default();
        pool.lock().hold(number, wakes);
    }

    fn watch(&mut self, pool: &Arc<ServedPool>, number: u64) {
        let wakes = self.watched.get_or_insert_default();
        pool.lock().hold(number, wakes);
    }

    fn release_queued(&mut self, pool: &Arc<ServedPool>) {
        pool.lock().release_next(self.server.now());
    }

    fn resume_after(&mut self, _: &Arc<ServedPool>, _: Timestamp) {}

    fn log_decision(&mut self, _: &str) {}

    fn log_hold(&mut self, ms: u64, priority: i32) {
        self.tag("held_ms", &ms.to_string());
        self.tag("band", &priority.to_string());
    }

    fn is_traced<'h>(&mut self, pairs: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone) -> bool {
        self.end_span();
        if self.server.spans().is_some() {
            let parent = self
                .parent
                .or_else(|| TraceContext::in_headers(pairs))
                .filter(|parent| parent.sampled);
            self.span = parent.map(|parent| Box::new(RequestSpan::begin(parent)));
        }
        self.span.is_some()
    }

    fn trace_decision(&mut self, candidates: String) {
        self.tag("candidates", &candidates);
    }

    /// The pool itself counts everything except the time of a pick.
    fn count(&mut self, pool: Option<&Arc<ServedPool>>, count: RequestCount) {
        if let (Some(pool), RequestCount::Picked { us }) = (pool, count) {
            pool.lock().record_pick_time(us);
        }
    }

    fn send_response_headers(&mut self, step: ResponseStep) {
        let remove = step.remove.into_iter().map(str::to_owned).collect();
        let set = step
            .set
            .into_iter()
            .map(|(name, value)| (name.into_owned(), value))
            .collect();
        self.answer(wire::headers_answer(
            BodyDirection::Response,
            HeaderChanges { remove, set },
        ));
    }

    fn take_response_body(&mut self, _: usize) -> ResponsePiece {
        self.piece.take().unwrap_or_default()
    }

    fn send_response_body(
        &mut self,
        ResponsePiece { bytes, ends }: ResponsePiece,
        restored: Option<&[u8]>,
        held: bool,
    ) {
        let restored = restored.map(<[u8]>::to_vec);
        if self.modes().response == BodyMode::FullDuplex {
            return self.send_duplex(BodyDirection::Response, restored.unwrap_or(bytes), ends);
        }
        let mut changes = HeaderChanges::default();
        if let Some(restored) = restored.as_ref().filter(|_| held) {
            changes.set.push((
                headers::CONTENT_LENGTH.to_owned(),
                restored.len().to_string(),
            ));
        }
        let body_bytes = restored.as_ref().map_or(0, Vec::len);
        self.out.push(
            wire::body_answer(BodyDirection::Response, restored, changes),
            body_bytes,
        );
    }

    fn append_response(&mut self, bytes: &[u8]) {
        if self.modes().response == BodyMode::FullDuplex {
            self.answer(wire::streamed_body(
                BodyDirection::Response,
                bytes.to_vec(),
                false,
            ));
        }
    }

    /// The proxy does not report who closed the connection.
    fn endpoint_broke_off(&mut self) -> bool {
        false
    }

    fn ended(&mut self, outcome: &ExchangeOutcome) {
        if self.span.is_some() {
            self.tag("status", &outcome.status.to_string());
            self.tag("failed_attempts", &outcome.failed_attempts.to_string());
            outcome
                .span_attributes()
                .into_iter()
                .for_each(|(name, value)| self.tag(name, &value));
        }
    }
}

impl ExtProcHost {
    pub(super) fn new(
        server: Arc<ExtProcServer>,
        pool: Arc<ServedPool>,
        settings: Arc<ExchangeSettings>,
    ) -> Self {
        Self {
            server,
            pool,
            settings,
            gateway: GatewayConnection::default(),
            modes: None,
            hint: None,
            stripped: Vec::new(),
            held: HeldBody::default(),
            kept: None,
            end: RequestEndedBy::Headers,
            headers_answered: false,
            parking: None,
            hold: None,
            watched: None,
            flow_id: None,
            piece: None,
            out: AnswerQueue::default(),
            parent: None,
            span: None,
        }
    }

    /// Begins a request: takes the control headers and the subset hint from its first message.
    pub(super) fn begin<'m>(
        &mut self,
        message: &ProcessingRequest,
        pairs: impl Iterator<Item = (&'m [u8], &'m [u8])>,
    ) {
        self.held = HeldBody::default();
        self.kept = None;
        self.end = RequestEndedBy::Headers;
        self.headers_answered = false;
        self.parking = None;
        self.hold = None;
        let settings = &self.settings;
        self.stripped = pairs
            .filter(|(name, _)| settings.removes(name))
            .map(|(name, _)| String::from_utf8_lossy(name).into_owned())
            .collect();
        let hint = wire::metadata(
            message.metadata_context.as_ref(),
            &settings.subset.namespace,
            &settings.subset.key,
        );
        self.hint = hint.map(wire::subset_hint);
        let flow_id = wire::metadata_at(
            message.metadata_context.as_ref(),
            &settings.flow.namespace,
            settings.flow.key.split('/'),
        );
        self.flow_id = flow_id
            .and_then(wire::text)
            .map(|id| id.as_bytes().to_vec());
    }

    /// Tells the proxy that the answer may take as long as flow control holds a request. In full
    /// duplex, Envoy has no limit for an answer, and other gateways need not know the message.
    fn ask_for_time(&mut self, pool: &Arc<ServedPool>) {
        let longest = pool
            .lock()
            .pool
            .flow_control()
            .map(FlowControl::longest_wait_ms);
        if let Some(ms) = longest.filter(|_| self.modes().request != BodyMode::FullDuplex) {
            self.answer(wire::wait_longer(
                ms.saturating_add(ANSWER_MS).min(HOLD_MS_MAX),
            ));
        }
    }

    fn tag(&mut self, name: &str, value: &str) {
        self.span.iter_mut().for_each(|span| span.tag(name, value));
    }

    /// Ends the span of the request, if it has one.
    pub(super) fn end_span(&mut self) {
        if let (Some(span), Some(spans)) = (self.span.take(), self.server.spans()) {
            spans.end(*span);
        }
    }

    /// Memory for what the proxy sent, in bytes.
    pub(super) fn memory(&self) -> usize {
        let of_name = |name: &String| size_of::<String>() + name.capacity();
        self.stripped.iter().map(of_name).sum::<usize>()
            + self.hint.as_ref().map_or(0, Vec::capacity)
            + self.held.memory()
            + self.out.memory()
            + self.span.as_ref().map_or(0, |span| span.memory())
    }

    /// The next thing that the stream needs.
    pub(super) fn action(&self) -> StreamAction {
        match (&self.hold, &self.parking) {
            (Some(wakes), _) => StreamAction::Hold(Arc::clone(wakes)),
            (None, Some((deadline, _))) => StreamAction::Wait(*deadline),
            (None, None) => StreamAction::Listen,
        }
    }

    pub(super) fn modes(&self) -> BodyModes {
        self.modes.unwrap_or(BodyModes::from_config(None))
    }

    /// Sends a message without a body.
    pub(super) fn answer(&mut self, message: ProcessingResponse) {
        self.out.push(message, 0);
    }
}

impl AsRef<[u8]> for ResponsePiece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
