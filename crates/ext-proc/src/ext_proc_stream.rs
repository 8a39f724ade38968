//! One ext_proc stream: a [`RequestDriver`] and its host. The stream takes messages and gives
//! answers, without sockets or waiting.
//!
//! The driver decides what is done, and when (see [`exchange::driver`]). The mode in which the
//! proxy sends bodies decides which answer has the destination:
//!
//! - Full duplex, streamed early: the driver decides at the last byte. The answer to the headers,
//!   which is sent only then, has the destination. The held pieces follow as they came, with the
//!   model's name replaced.
//! - Buffered, buffered partial: the driver decides at the only piece. The answer to that piece has
//!   the destination, because the headers wait for it; the piece is replaced if it changed.
//! - Streamed, none: the driver decides at the headers, which do not wait for the body. The answer
//!   to the headers has the destination; the body passes unread.
//!
//! A stream ends when the proxy has nothing more to send, or its client left. In both cases
//! dropping the stream releases the ledger entries of the pick, once.

mod host;

use std::sync::Arc;

use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use exchange::api::ApiFamily;
use exchange::trace::TraceContext;
use exchange::{BodyProgress, ExchangeSettings, RequestDriver, Timestamp};
use tokio::sync::Notify;

pub use self::host::StreamAction;
use self::host::{ExtProcHost, ResponsePiece};
use super::gateway_connection::GatewayConnection;
use super::refusal::StreamRefusal;
use super::server::{ExtProcServer, ServedPool};
use super::wire::{self, BodyDirection, BodyMode, BodyModes};

#[derive(Debug)]
pub struct ExtProcStream {
    driver: RequestDriver<ExtProcHost>,
    host: ExtProcHost,
    number: u64,
    /// The family of the request's API.
    family: ApiFamily,
    /// Length of the request headers, in bytes. The driver keeps some of them.
    head_bytes: usize,
}

// === impl ExtProcStream ===

impl ExtProcStream {
    #[must_use]
    pub fn new(
        server: Arc<ExtProcServer>,
        pool: Arc<ServedPool>,
        settings: Arc<ExchangeSettings>,
    ) -> Self {
        let number = server.streams().begin();
        let host = ExtProcHost::new(server, pool, settings);
        Self {
            driver: RequestDriver::default(),
            host,
            number,
            family: ApiFamily::OpenAi,
            head_bytes: 0,
        }
    }

    /// Sets the caller's span. This span takes precedence over a span that the request's headers
    /// name.
    pub fn set_parent(&mut self, parent: Option<TraceContext>) {
        self.host.parent = parent;
    }

    /// Sets the connection of the stream.
    pub(super) fn set_gateway(&mut self, gateway: GatewayConnection) {
        self.host.gateway = gateway;
    }

    pub(super) fn gateway(&self) -> GatewayConnection {
        self.host.gateway
    }

    /// The number of the stream, counted since the start.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The next answer to send.
    pub fn next_answer(&mut self) -> Option<ProcessingResponse> {
        self.host.out.next()
    }

    /// All answers to send, in order.
    pub fn answers(&mut self) -> impl Iterator<Item = ProcessingResponse> {
        std::iter::from_fn(|| self.host.out.next())
    }

    /// Whether the stream waits, and for what.
    #[must_use]
    pub fn action(&self) -> StreamAction {
        self.host.action()
    }

    /// The memory of the data that the proxy sent, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.head_bytes + self.driver.memory() + self.host.memory()
    }

    /// The client of the request, as a hash; 0 before the request headers.
    #[must_use]
    pub fn client(&self) -> u64 {
        self.driver.client()
    }

    /// Whether the stream waits for the end of the request's body.
    #[must_use]
    pub fn awaits_body(&self) -> bool {
        self.driver.awaits_body()
    }

    /// Whether the proxy sends a request's body only when it is complete. Until then, the proxy
    /// holds the body.
    #[must_use]
    pub fn is_body_hidden(&self) -> bool {
        let mode = self.host.modes().request;
        matches!(mode, BodyMode::Buffered | BodyMode::BufferedPartial)
    }

    /// The length of the request's body, if its client declared it.
    #[must_use]
    pub fn declared_bytes(&self) -> Option<usize> {
        self.driver.declared_bytes()
    }

    /// What wakes the stream if its request may be given up after it was sent.
    #[must_use]
    pub fn watched(&self) -> Option<Arc<Notify>> {
        self.host
            .watched
            .clone()
            .filter(|_| self.driver.is_revocable())
    }

    /// Whether the client's local reply has been sent. Then the proxy sends nothing more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.driver.is_answered() && self.host.out.is_empty()
    }

    /// Replies to the client, drops the answers that are not sent yet, and releases the pick and
    /// the body.
    pub fn refuse(&mut self, refusal: StreamRefusal) {
        self.drop_answers();
        self.driver
            .answer(&mut self.host, refusal.reply(self.family));
    }

    /// Like [`Self::refuse`], for a request whose incomplete body has no room. `is_slow` says
    /// whether the body has been arriving for a long time.
    pub fn refuse_body(&mut self, is_slow: bool) {
        self.drop_answers();
        self.driver.refuse_body(&mut self.host, is_slow);
    }

    /// Counts a refusal, and drops the answers that are not sent yet.
    fn drop_answers(&mut self) {
        self.host.server.streams().refuse();
        self.host.out.clear();
        self.host.hint = None;
    }

    /// Whether the proxy can continue without the daemon. Then a daemon that stops breaks no reply.
    #[must_use]
    pub fn is_dispensable(&self) -> bool {
        let duplex = self.host.modes().response == BodyMode::FullDuplex;
        self.driver.is_routed() && !self.driver.restores_response() && !duplex
    }

    /// Handles a message from the proxy. Returns what the stream needs next.
    pub fn receive(&mut self, mut message: ProcessingRequest) -> StreamAction {
        // In observability mode Envoy ignores answers, so no pick is counted.
        if message.observability_mode {
            return StreamAction::Listen;
        }
        if self.host.modes.is_none() {
            self.host.modes = Some(BodyModes::from_config(message.protocol_config.as_ref()));
        }
        match message.request.take() {
            Some(Part::RequestHeaders(headers)) => self.request_headers(&message, &headers),
            Some(Part::RequestBody(body)) => self.request_body(body),
            Some(Part::RequestTrailers(_)) => self.request_trailers(),
            Some(Part::ResponseHeaders(headers)) => {
                let head = self.host.response_head(&message, &headers);
                self.driver.response_headers(&mut self.host, &head);
            }
            Some(Part::ResponseBody(body)) => self.response_body(body),
            Some(Part::ResponseTrailers(_)) => {
                self.driver.response_trailers(&mut self.host);
                self.host
                    .answer(wire::trailers_answer(BodyDirection::Response));
            }
            None => {} // flow control of newer proxies, which this server never enables
        }
        self.host.action()
    }

    /// Continues a parked or held request, because the pool has state, `now` is the deadline, or
    /// the pool named the request. If the pool gives up a request that was sent, answers it,
    /// because Envoy accepts an immediate response until the response headers.
    pub fn retry(&mut self, now: Timestamp) -> StreamAction {
        self.host.parking = None;
        self.driver.resume(&mut self.host, now);
        self.host.action()
    }

    /// Stops counting a request at its endpoint if the proxy's pieces show that its client does not
    /// read the reply.
    pub fn check_reply(&mut self, now: Timestamp) {
        self.driver.check_reply(&mut self.host, now);
    }

    fn request_headers(&mut self, message: &ProcessingRequest, headers: &HttpHeaders) {
        let pairs = wire::pairs(headers.headers.as_ref());
        self.family = wire::family(pairs.clone());
        self.head_bytes = pairs
            .clone()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        self.host.begin(message, pairs.clone());
        self.driver
            .request_headers(&mut self.host, pairs, headers.end_of_stream);
    }

    fn request_body(
        &mut self,
        HttpBody {
            body,
            end_of_stream,
            ..
        }: HttpBody,
    ) {
        let progress = match self.host.modes().request {
            _ if end_of_stream => BodyProgress::Whole,
            BodyMode::Buffered => BodyProgress::Whole,
            BodyMode::BufferedPartial => BodyProgress::CutOff,
            BodyMode::None | BodyMode::Streamed { .. } | BodyMode::FullDuplex => {
                BodyProgress::Partial
            }
        };
        if self.driver.holds_request() {
            let size = self.host.hold(body, progress);
            self.driver.request_body(&mut self.host, size, progress);
        } else if !self.driver.is_answered() {
            self.driver
                .request_body(&mut self.host, body.len(), progress);
            self.host
                .forward_body(BodyDirection::Request, body, end_of_stream);
        }
    }

    fn request_trailers(&mut self) {
        if self.driver.holds_request() {
            self.host.end_with_trailers();
            self.driver.request_trailers(&mut self.host);
        } else if !self.driver.is_answered() {
            self.driver.request_trailers(&mut self.host);
            self.host
                .answer(wire::trailers_answer(BodyDirection::Request));
        }
    }

    fn response_body(
        &mut self,
        HttpBody {
            body,
            end_of_stream,
            ..
        }: HttpBody,
    ) {
        let mode = self.host.modes().response;
        let size = body.len();
        self.host.piece = Some(ResponsePiece {
            bytes: body,
            ends: end_of_stream,
        });
        if mode == BodyMode::BufferedPartial && !end_of_stream {
            self.driver.response_cut_off(&mut self.host, size);
        } else {
            let last = end_of_stream || mode == BodyMode::Buffered;
            self.driver.response_body(&mut self.host, size, last);
        }
        // If the driver did not take the piece, forward it unread.
        if let Some(ResponsePiece { bytes, ends }) = self.host.piece.take() {
            self.host.forward_body(BodyDirection::Response, bytes, ends);
        }
    }
}

impl Drop for ExtProcStream {
    fn drop(&mut self) {
        self.driver.end(&mut self.host);
        self.host.end_span();
        self.host.server.streams().end();
    }
}

#[cfg(test)]
pub(super) mod tests;
