//! One ext_proc stream: one exchange, as the proxy reports it. Messages in, answers out; no
//! sockets, no waiting.
//!
//! The rules are [`Exchange`]'s. This module knows when the answers take effect in each mode of
//! sending bodies:
//!
//! | request body | decided | destination goes with | the held body |
//! |---|---|---|---|
//! | full duplex, streamed early | at the last byte | the answer to the headers, given only then | the pieces as they came, with the model's name replaced |
//! | buffered, buffered partial | at the one piece | the answer to that piece, for which the headers wait | replaced if it changed |
//! | streamed, none | at the headers, which do not wait | the answer to the headers | passes unread |
//!
//! A stream ends when the proxy has no more messages, or its client left: either way the pick is
//! released, once, when this is dropped.

use std::sync::Arc;

use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse};
use exchange::api::ApiFamily;
use exchange::rewrite::BodyEdit;
use exchange::{
    Exchange, ExchangeSettings, ExchangeStep, HeadersStep, LocalReply, PendingRequest, RequestChanges, ResponseBody, ResponseHead,
    ResponseOrigin, Timestamp, headers, ready_reply,
};

use super::answers::{self, AnswerQueue};
use super::held_body::{BodyPieces, HeldBody};
use super::refusal::StreamRefusal;
use super::server::{ExtProcServer, ServedPool};
use super::wire::{self, BodyDirection, BodyMode, BodyModes, HeaderChanges};

/// The longest piece of a body in one full-duplex message, in bytes: Envoy's limit is 64 KiB.
const PIECE_BYTES_MAX: usize = 60 << 10;

/// The served endpoint, under the destination's namespace.
const SERVED: &str = "x-gateway-destination-endpoint-served";

/// What a stream needs from its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamAction {
    /// The next message.
    Listen,
    /// A call of [`ExtProcStream::retry`] when the pool has state, or at this moment.
    Wait(Timestamp),
}

/// One exchange.
#[derive(Debug)]
pub struct ExtProcStream {
    front: Arc<ExtProcServer>,
    pool: Arc<ServedPool>,
    settings: Arc<ExchangeSettings>,
    exchange: Exchange,
    number: u64,
    /// The family of the API.
    family: ApiFamily,
    /// Length of the request headers, some of which the exchange keeps.
    head_bytes: usize,
    modes: Option<BodyModes>,
    request: RequestProgress,
    hint: Option<Vec<u8>>,
    /// Control headers that the client sent.
    stripped: Vec<String>,
    held: HeldBody,
    /// How the held body's end came.
    end: RequestEndedBy,
    response: ResponseBody,
    out: AnswerQueue,
}

/// How far the request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestProgress {
    /// Nothing is decided, and nothing is to be: its body flows by.
    Passing,
    /// Waiting for its last byte; the headers are answered already, or not.
    Buffering {
        /// Are they?
        headers_answered: bool,
    },
    /// Decided as far as its bytes go; waiting for state.
    Parked {
        /// As above.
        headers_answered: bool,
    },
    /// Sent to a picked endpoint.
    Routed,
    /// Answered by us.
    Answered,
}

/// What the request's last byte came with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestEndedBy {
    Headers,
    Body,
    Trailers,
}

// === impl ExtProcStream ===

impl ExtProcStream {
    /// A stream that has only just begun.
    #[must_use]
    pub fn new(front: Arc<ExtProcServer>, pool: Arc<ServedPool>, settings: Arc<ExchangeSettings>) -> Self {
        let number = front.streams().begin();
        Self {
            exchange: Exchange::new(front.now()),
            number,
            family: ApiFamily::OpenAi,
            head_bytes: 0,
            front,
            pool,
            settings,
            modes: None,
            request: RequestProgress::Passing,
            hint: None,
            stripped: Vec::new(),
            held: HeldBody::default(),
            end: RequestEndedBy::Headers,
            response: ResponseBody::Ignore,
            out: AnswerQueue::default(),
        }
    }

    /// Its number among all streams since the start.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What is to be sent next.
    pub fn next_answer(&mut self) -> Option<ProcessingResponse> {
        self.out.next()
    }

    /// All that is to be sent, in order.
    pub fn answers(&mut self) -> impl Iterator<Item = ProcessingResponse> {
        std::iter::from_fn(|| self.out.next())
    }

    /// How much memory it takes for what the proxy sent, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        let hint = self.hint.as_ref().map_or(0, Vec::capacity);
        self.head_bytes + hint + self.held.memory() + self.out.memory()
    }

    /// Is the request's body on its way, and nothing can be done before its end?
    #[must_use]
    pub fn awaits_body(&self) -> bool {
        matches!(self.request, RequestProgress::Buffering { .. })
    }

    /// The client was answered by us, and that has been sent: the proxy has nothing more to ask.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.request == RequestProgress::Answered && self.out.is_empty()
    }

    /// Answers the client in place of all that is not sent yet, and gives back what the pick and the body hold.
    pub fn refuse(&mut self, refusal: StreamRefusal) {
        self.front.streams().refuse();
        self.release();
        self.out.clear();
        self.hint = None;
        self.reply(refusal.reply(self.family));
    }

    /// May the proxy go on without us? Then a daemon that stops cuts nobody's reply.
    #[must_use]
    pub fn is_dispensable(&self) -> bool {
        let restoring = matches!(self.response, ResponseBody::Restore | ResponseBody::Hold);
        let duplex = self.modes().response == BodyMode::FullDuplex;
        self.request == RequestProgress::Routed && !restoring && !duplex
    }

    /// The proxy says something.
    pub fn receive(&mut self, mut message: ProcessingRequest) -> StreamAction {
        // One that only looks on heeds no answer, so it is no pick of ours that counts.
        if message.observability_mode {
            return StreamAction::Listen;
        }
        if self.modes.is_none() {
            self.modes = Some(BodyModes::of(message.protocol_config.as_ref()));
        }
        match message.request.take() {
            Some(Part::RequestHeaders(headers)) => return self.request_headers(&message, &headers),
            Some(Part::RequestBody(body)) => return self.request_body(body),
            Some(Part::RequestTrailers(_)) => return self.request_trailers(),
            Some(Part::ResponseHeaders(headers)) => self.response_headers(&message, &headers),
            Some(Part::ResponseBody(body)) => self.response_body(body),
            Some(Part::ResponseTrailers(_)) => self.response_trailers(),
            None => {} // a newer proxy's flow control, which we never turn on
        }
        StreamAction::Listen
    }

    /// There is state, or there will be none in time.
    pub fn retry(&mut self, now: Timestamp) -> StreamAction {
        match self.request {
            RequestProgress::Parked { headers_answered } => self.decide(headers_answered, now),
            _ => StreamAction::Listen,
        }
    }

    fn modes(&self) -> BodyModes {
        self.modes.unwrap_or(BodyModes::of(None))
    }

    fn request_headers(&mut self, message: &ProcessingRequest, headers: &HttpHeaders) -> StreamAction {
        self.release(); // a proxy that begins twice must not leak the first pick, nor its body
        self.held = HeldBody::default();
        self.exchange = Exchange::new(self.front.now());
        let pairs = wire::pairs(headers.headers.as_ref());
        self.family = wire::family(pairs.clone());
        self.head_bytes = pairs.clone().map(|(name, value)| name.len() + value.len()).sum();
        let settings = Arc::clone(&self.settings);
        self.stripped = pairs.clone().filter(|(name, _)| settings.removes(name)).map(|(name, _)| lossy(name)).collect();
        let hint = wire::metadata(message.metadata_context.as_ref(), &settings.subset_namespace, &settings.subset_key);
        self.hint = hint.map(wire::subset_hint);
        let step = self.exchange.request_headers(&settings, pairs.clone(), headers.end_of_stream);
        if step == HeadersStep::Ready {
            self.reply(ready_reply(self.front.is_ready()));
            return StreamAction::Listen;
        }
        self.exchange.capture_headers(&self.pool.lock().pool, pairs);
        match (step, self.modes().request) {
            (HeadersStep::Reply(reply), _) => self.reply(reply),
            (HeadersStep::Buffer, BodyMode::FullDuplex | BodyMode::Streamed { early: true }) => {
                self.request = RequestProgress::Buffering { headers_answered: false };
            }
            (HeadersStep::Buffer, BodyMode::Buffered | BodyMode::BufferedPartial) => {
                self.request = RequestProgress::Buffering { headers_answered: true };
                let changes = HeaderChanges { remove: std::mem::take(&mut self.stripped), set: Vec::new() };
                self.answer(wire::headers_answer(BodyDirection::Request, changes));
            }
            (HeadersStep::Buffer, BodyMode::None | BodyMode::Streamed { early: false }) => {
                self.exchange.set_body_unavailable();
                return self.decide(false, self.front.now());
            }
            (HeadersStep::Decide | HeadersStep::Ready, _) => return self.decide(false, self.front.now()),
        }
        StreamAction::Listen
    }

    fn request_body(&mut self, HttpBody { body, end_of_stream, .. }: HttpBody) -> StreamAction {
        let RequestProgress::Buffering { headers_answered } = self.request else {
            if self.request != RequestProgress::Answered {
                self.forward_body(BodyDirection::Request, body, end_of_stream);
            }
            return StreamAction::Listen;
        };
        self.held.push(body);
        if let Some(reply) = self.exchange.check_body_size(&self.settings, self.held.len()) {
            self.reply(reply);
            return StreamAction::Listen;
        }
        let mode = self.modes().request;
        if mode == BodyMode::BufferedPartial && !end_of_stream {
            self.exchange.set_body_unavailable(); // what is cut off cannot be read
        }
        if end_of_stream || matches!(mode, BodyMode::Buffered | BodyMode::BufferedPartial) {
            self.end = RequestEndedBy::Body;
            return self.decide(headers_answered, self.front.now());
        }
        StreamAction::Listen
    }

    fn request_trailers(&mut self) -> StreamAction {
        match self.request {
            RequestProgress::Buffering { headers_answered } => {
                self.end = RequestEndedBy::Trailers;
                return self.decide(headers_answered, self.front.now());
            }
            RequestProgress::Parked { .. } => self.end = RequestEndedBy::Trailers,
            RequestProgress::Answered => {}
            RequestProgress::Passing | RequestProgress::Routed => self.answer(wire::trailers_answer(BodyDirection::Request)),
        }
        StreamAction::Listen
    }

    /// The pool is locked for what needs it alone: other exchanges do not wait while this one's body is read and its prompt hashed.
    fn decide(&mut self, headers_answered: bool, now: Timestamp) -> StreamAction {
        let step = {
            let (exchange, settings) = (&mut self.exchange, &*self.settings);
            let read = exchange.read(self.held.bytes());
            let resolved = {
                let mut inner = self.pool.lock();
                inner.prepare_index();
                exchange.resolve(settings, &mut inner.pool, read, now)
            };
            match resolved.map(PendingRequest::with_hashes) {
                Ok(asking) => {
                    let mut inner = self.pool.lock();
                    let step = exchange.pick(settings, &mut inner.pool, self.hint.as_deref(), asking, now);
                    if matches!(step, ExchangeStep::Forward(_)) {
                        inner.record_pick_time(self.front.now().us_since(now));
                    }
                    step
                }
                Err(step) => step,
            }
        };
        match step {
            ExchangeStep::Forward(forward) => self.forward(forward, headers_answered),
            ExchangeStep::Reply(reply) => self.reply(reply),
            ExchangeStep::Park { deadline } => {
                self.request = RequestProgress::Parked { headers_answered };
                return StreamAction::Wait(deadline);
            }
        }
        StreamAction::Listen
    }

    /// Sends the request on, with all of it that was held.
    fn forward(&mut self, forward: RequestChanges, headers_answered: bool) {
        let RequestChanges { set, body: splice } = forward;
        self.request = RequestProgress::Routed;
        let (open, set): (Vec<_>, Vec<_>) = set.into_iter().partition(|(name, _)| name == headers::OPEN);
        let known = [&self.settings.destination_header, &self.settings.fallback_header];
        let told = set.iter().filter(|(name, _)| known.contains(&name)).cloned();
        // What a `header_to_metadata` behind the filter does, the front can say itself.
        let metadata = told.chain(open.into_iter().map(|(_, value)| ("open".to_owned(), value)));
        let metadata = wire::destination_metadata(self.front.destination_namespace(), metadata);
        let mut remove = std::mem::take(&mut self.stripped);
        remove.retain(|name| !set.iter().any(|(set, _)| set == name));
        let changes = HeaderChanges { remove, set };
        let mode_override = if self.end == RequestEndedBy::Headers { wire::decline_request_body(self.modes()) } else { None };
        if headers_answered {
            let (answer, body_bytes) = self.buffered_answer(splice, changes);
            let answer = ProcessingResponse { dynamic_metadata: metadata, mode_override, ..answer };
            self.out.push(answer, body_bytes);
        } else {
            let answer = wire::headers_answer(BodyDirection::Request, changes);
            self.answer(ProcessingResponse { dynamic_metadata: metadata, mode_override, ..answer });
            self.send_pieces(splice);
        }
    }

    /// The answer to a body that came as one piece, and how long the body in it is.
    fn buffered_answer(&mut self, splice: Option<BodyEdit>, changes: HeaderChanges) -> (ProcessingResponse, usize) {
        // Trailers came in place of a body. Their answer cannot change headers; the destination goes as metadata alone.
        let Some(piece) = self.held.take(splice) else { return (wire::trailers_answer(BodyDirection::Request), 0) };
        let replacement = piece.changed.then_some(piece.bytes);
        let body_bytes = replacement.as_ref().map_or(0, Vec::len);
        (wire::body_answer(BodyDirection::Request, replacement, changes), body_bytes)
    }

    fn send_pieces(&mut self, splice: Option<BodyEdit>) {
        let duplex = self.modes().request == BodyMode::FullDuplex;
        // Where each piece is answered, they stay as they were.
        let pieces = self.held.take_pieces(splice, if duplex { PIECE_BYTES_MAX } else { usize::MAX });
        self.out.push_body(answers::AnswerBody {
            pieces,
            direction: BodyDirection::Request,
            duplex,
            ends: self.end == RequestEndedBy::Body,
        });
        if self.end == RequestEndedBy::Trailers {
            self.answer(wire::trailers_answer(BodyDirection::Request));
        }
    }

    /// A piece of a body that is none of our business.
    fn forward_body(&mut self, direction: BodyDirection, body: Vec<u8>, end_of_stream: bool) {
        let modes = self.modes();
        let mode = if direction == BodyDirection::Request { modes.request } else { modes.response };
        if mode == BodyMode::FullDuplex {
            self.send_duplex(direction, body, end_of_stream);
        } else {
            self.answer(wire::body_answer(direction, None, HeaderChanges::default()));
        }
    }

    fn send_duplex(&mut self, direction: BodyDirection, body: Vec<u8>, ends: bool) {
        if body.len() > PIECE_BYTES_MAX {
            let pieces = BodyPieces::of(body, PIECE_BYTES_MAX);
            self.out.push_body(answers::AnswerBody { pieces, direction, duplex: true, ends });
        } else {
            let body_bytes = body.len();
            self.out.push(wire::streamed_body(direction, body, ends), body_bytes);
        }
    }

    /// Sends a message without a body to speak of.
    fn answer(&mut self, message: ProcessingResponse) {
        self.out.push(message, 0);
    }

    fn reply(&mut self, reply: LocalReply) {
        self.request = RequestProgress::Answered;
        self.held = HeldBody::default();
        self.answer(wire::immediate(reply));
    }

    fn response_headers(&mut self, message: &ProcessingRequest, given: &HttpHeaders) {
        let mut changes = HeaderChanges::default();
        if self.request == RequestProgress::Routed {
            let head = self.response_head(message, given);
            let now = self.front.now();
            let step = self.exchange.response_headers(&mut self.pool.lock().pool, &head, now);
            self.response = step.body;
            changes.remove = step.remove.into_iter().map(str::to_owned).collect();
            changes.set = step.set.into_iter().map(|(name, value)| (name.into_owned(), value)).collect();
        }
        self.answer(wire::headers_answer(BodyDirection::Response, changes));
    }

    /// What of a response's headers matters, and who served by the attributes that the proxy sends along, else by the protocol's word for it.
    fn response_head<'m>(&self, message: &'m ProcessingRequest, given: &'m HttpHeaders) -> ResponseHead<'m> {
        let mut head = ResponseHead::read(wire::pairs(given.headers.as_ref()));
        let served = wire::metadata(message.metadata_context.as_ref(), self.front.destination_namespace(), SERVED).and_then(wire::text);
        match wire::text_attribute(message, "response.code_details") {
            Some(details) => {
                head.origin = ResponseOrigin::of_details(details.as_bytes());
                head.upstream_address = wire::text_attribute(message, "upstream.address").or(served).map(str::as_bytes);
                head.attempts = wire::count_attribute(message, "upstream.request_attempt_count").unwrap_or(0);
            }
            None => {
                // The proxy's own words for a server that failed are not told from a server's: nothing is learned of those.
                head.origin = if matches!(head.status, 502..=504) { ResponseOrigin::Ours } else { ResponseOrigin::Upstream };
                head.upstream_address = served.map(str::as_bytes);
            }
        }
        head.end_of_stream = given.end_of_stream;
        match self.modes().response {
            // Only here do the headers wait for the body, so that they can tell its new length.
            BodyMode::Buffered => {}
            // A body that nobody shows us is as good as one in a code.
            BodyMode::None => head.encoded = true,
            BodyMode::Streamed { .. } | BodyMode::BufferedPartial | BodyMode::FullDuplex => {
                head.content_length = head.content_length.map(|_| usize::MAX);
            }
        }
        head
    }

    fn response_body(&mut self, HttpBody { body, end_of_stream, .. }: HttpBody) {
        if self.response == ResponseBody::Ignore {
            return self.forward_body(BodyDirection::Response, body, end_of_stream);
        }
        let mode = self.modes().response;
        let whole = matches!(mode, BodyMode::Buffered | BodyMode::BufferedPartial);
        let now = self.front.now();
        let restored = {
            let mut inner = self.pool.lock();
            self.exchange.response_chunk(&mut inner.pool, &body, end_of_stream || whole, now).map(<[u8]>::to_vec)
        };
        if mode == BodyMode::FullDuplex {
            return self.send_duplex(BodyDirection::Response, restored.unwrap_or(body), end_of_stream);
        }
        let mut changes = HeaderChanges::default();
        if let (ResponseBody::Hold, Some(restored)) = (self.response, &restored) {
            changes.set.push((headers::CONTENT_LENGTH.to_owned(), restored.len().to_string()));
        }
        let body_bytes = restored.as_ref().map_or(0, Vec::len);
        self.out.push(wire::body_answer(BodyDirection::Response, restored, changes), body_bytes);
    }

    fn response_trailers(&mut self) {
        if self.response == ResponseBody::Read {
            let now = self.front.now();
            self.exchange.response_chunk(&mut self.pool.lock().pool, &[], true, now);
        }
        let restoring = matches!(self.response, ResponseBody::Restore | ResponseBody::Hold);
        if restoring && self.modes().response == BodyMode::FullDuplex {
            let now = self.front.now();
            let rest = self.exchange.response_chunk(&mut self.pool.lock().pool, &[], true, now).map(<[u8]>::to_vec);
            rest.into_iter().for_each(|rest| self.answer(wire::streamed_body(BodyDirection::Response, rest, false)));
        }
        self.answer(wire::trailers_answer(BodyDirection::Response));
    }

    fn release(&mut self) {
        let now = self.front.now();
        let _ = self.exchange.end(&mut self.pool.lock().pool, now);
    }
}

impl Drop for ExtProcStream {
    fn drop(&mut self) {
        self.release();
        self.front.streams().end();
    }
}

fn lossy(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

#[cfg(test)]
pub(super) mod tests;
