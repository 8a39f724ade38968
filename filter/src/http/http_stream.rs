//! One HTTP stream of the proxy: callbacks go to [`Exchange`], the steps of the exchange go to the
//! [`Host`].
//!
//! ```text
//!  Passing (no pool, or passed without a decision)
//!  Buffering ── last byte ──► decide ──► Routed, or Answered
//!                               │ no state yet
//!                               └──► Parked ── state, or the deadline ──► decide
//! ```
//! A request is held from its headers on, because headers can be changed only until they are sent
//! on; it goes on when it is decided. A request whose body is read is decided at its last byte, any
//! other at its headers. A parked request of the second kind goes on with the part of its body that
//! has arrived: the body of a gRPC stream has no end to wait for. Everything that later steps need
//! from the headers is copied while they can be read.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use exchange::usage::TokenUsage;
use exchange::{
    Exchange, ExchangeStep, HeadersStep, LocalReply, RequestChanges, ResponseBody, ResponseHead, ResponseOrigin, Timestamp, headers,
    ready_reply,
};

use super::stage::{BodyDelivery, FilterAction, RequestStage};
use crate::config::FilterConfig;
use crate::host::{BodyBuffer, HeaderMap, Host, HostError};
use crate::metrics::{FilterMetrics, Stat};
use crate::pairs::{self, HeaderPairs};
use crate::state::load_sharing::SharingOccasion;
use crate::state::replica::PoolReplica;
use crate::state::{ParkedRequest, VmState};

/// The property that a recorded decision is put into; the access log shows it as `%FILTER_STATE(wasm.switchpoint_decision:PLAIN)%`.
const RECORD: &str = "switchpoint_decision";

/// Envoy adds it to replies of the upstream, and not to its own replies or those of filters.
const UPSTREAM_TIME: &[u8] = b"x-envoy-upstream-service-time";

/// Where a route can name its pool, for routes with the same cluster.
const ROUTE_POOL: [&str; 5] = ["xds", "route_metadata", "filter_metadata", "switchpoint", "pool"];

/// One exchange and its host.
pub struct HttpStream<H: Host> {
    id: u32,
    host: H,
    vm: Rc<RefCell<VmState<H>>>,
    metrics: Rc<FilterMetrics<H>>,
    config: Rc<FilterConfig>,
    me: Weak<Self>,
    exchange: RefCell<Exchange>,
    replica: RefCell<Option<Rc<RefCell<PoolReplica>>>>,
    request: Cell<RequestStage>,
    body_size: Cell<usize>,
    pieces: Cell<BodyDelivery>,
    /// Is its last byte in?
    complete: Cell<bool>,
    response: Cell<ResponseBody>,
    /// How much of a held response has arrived.
    response_size: Cell<usize>,
}

// === impl HttpStream ===

impl<H: Host> HttpStream<H> {
    /// An exchange that has only just begun, on the proxy's context `id`.
    pub fn new(id: u32, host: H, vm: Rc<RefCell<VmState<H>>>, config: Rc<FilterConfig>) -> Rc<Self> {
        let (now, metrics) = (host.now(), vm.borrow().metrics());
        Rc::new_cyclic(|me| Self {
            id,
            host,
            vm,
            metrics,
            config,
            me: me.clone(),
            exchange: RefCell::new(Exchange::new(now)),
            replica: RefCell::new(None),
            request: Cell::new(RequestStage::Passing),
            body_size: Cell::new(0),
            pieces: Cell::new(BodyDelivery::None),
            complete: Cell::new(false),
            response: Cell::new(ResponseBody::Ignore),
            response_size: Cell::new(0),
        })
    }

    /// Opens what callbacks share, for as long as `act` takes. It is handed all that it may work on, and calls nothing of ours that opens a cell; the
    /// host does not call back ([`Host`]).
    fn open<R>(&self, replica: &RefCell<PoolReplica>, act: impl FnOnce(&VmState<H>, &mut Exchange, &mut PoolReplica) -> R) -> R {
        act(&self.vm.borrow(), &mut self.exchange.borrow_mut(), &mut replica.borrow_mut())
    }

    /// The request headers are in.
    pub fn request_headers(&self, end_of_stream: bool) -> FilterAction {
        self.end(); // a proxy that begins twice must not leak the first pick
        self.complete.set(end_of_stream);
        self.vm.borrow_mut().mark_serving();
        let bytes = self.host.headers(HeaderMap::Request).unwrap_or_else(|e| self.failed("request headers", e));
        #[cfg(feature = "drill")]
        crate::drill::obey(&bytes);
        #[cfg(feature = "drill")]
        if let Some(cost) = crate::sharing_cost::cost(&self.host, &bytes) {
            return self.reply(&LocalReply { status: 200, headers: Vec::new(), body: cost.into_bytes() });
        }
        self.strip_headers(&bytes);
        let step = self.exchange.borrow_mut().request_headers(&self.config.settings, HeaderPairs::new(&bytes), end_of_stream);
        if step == HeadersStep::Ready {
            let (ready, without_vm_slot) = (self.vm.borrow().is_ready(&self.config), self.vm.borrow().without_vm_slot());
            return self.reply(&ready_reply_of(ready, without_vm_slot));
        }
        let replica = self.pool();
        if replica.is_none() {
            self.metrics.count(Stat::Passed);
            return FilterAction::Go;
        }
        if let Some(replica) = &replica {
            self.exchange.borrow_mut().capture_headers(&replica.borrow().pool, HeaderPairs::new(&bytes));
        }
        *self.replica.borrow_mut() = replica;
        match step {
            HeadersStep::Buffer => {
                self.request.set(RequestStage::Buffering);
                FilterAction::Hold
            }
            HeadersStep::Decide | HeadersStep::Ready => self.decide(Vec::new(), self.host.now()),
            HeadersStep::Reply(reply) => self.refuse(&reply),
        }
    }

    /// The request body has `size` bytes so far.
    pub fn request_body(&self, size: usize, end_of_stream: bool) -> FilterAction {
        self.body_size.set(size);
        if self.pieces.get() == BodyDelivery::None {
            self.pieces.set(BodyDelivery::InStep);
        }
        if self.request.get() == RequestStage::Buffering {
            let too_large = self.exchange.borrow_mut().check_body_size(&self.config.settings, size);
            if let Some(reply) = too_large {
                return self.refuse(&reply);
            }
        }
        let flow = match self.request.get() {
            _ if end_of_stream => self.request_complete(),
            RequestStage::Passing | RequestStage::Routed => FilterAction::Go,
            RequestStage::Buffering | RequestStage::Parked | RequestStage::Answered => FilterAction::Hold,
        };
        if flow == FilterAction::Go { self.release_body() } else { flow }
    }

    /// A piece may go on.
    fn release_body(&self) -> FilterAction {
        if self.pieces.get() != BodyDelivery::Ahead {
            self.pieces.set(BodyDelivery::InStep);
            return FilterAction::Go;
        }
        let Some(replica) = self.replica.borrow().clone() else { return FilterAction::Go };
        self.pieces.set(BodyDelivery::HoldNext);
        let (me, now): (Weak<dyn ParkedRequest>, _) = (self.me.clone(), self.host.now());
        self.vm.borrow_mut().retry_after(now, replica, me);
        FilterAction::Hold
    }

    /// The request ends with trailers. The held part of its body goes on before them.
    pub fn request_trailers(&self) -> FilterAction {
        if self.pieces.get() == BodyDelivery::HoldNext {
            self.pieces.set(BodyDelivery::InStep);
        }
        self.request_complete()
    }

    /// The request's last byte is in.
    fn request_complete(&self) -> FilterAction {
        self.complete.set(true);
        match self.request.get() {
            RequestStage::Passing | RequestStage::Routed => FilterAction::Go,
            RequestStage::Parked | RequestStage::Answered => FilterAction::Hold,
            RequestStage::Buffering => {
                let now = self.host.now();
                self.decide(self.body(), now)
            }
        }
    }

    fn body(&self) -> Vec<u8> {
        match self.body_size.get() {
            0 => Vec::new(),
            size => self.host.buffer(BodyBuffer::RequestBody, size).unwrap_or_else(|e| self.failed("the request body", e)),
        }
    }

    fn decide(&self, body: Vec<u8>, now: Timestamp) -> FilterAction {
        let Some(replica) = self.replica.borrow().clone() else { return FilterAction::Go };
        let settings = &self.config.settings;
        let path = ["metadata", "filter_metadata", settings.subset_namespace.as_str(), settings.subset_key.as_str()];
        // An unreadable hint allows no endpoint: never more than intended.
        let hint = self.host.property(&path).unwrap_or_else(|e| Some(self.failed("the subset hint", e)));
        let step = self.open(&replica, |vm, exchange, replica| {
            replica.pool.reserve_prefixes(self.config.prefix_entries);
            #[cfg(feature = "drill")]
            let watch = crate::sharing_cost::DrillTimer::of(&self.host);
            vm.receive_loads(replica, now, SharingOccasion::Pick);
            #[cfg(feature = "drill")]
            let watch = watch.paused(&self.host);
            let step = exchange.decide(settings, &mut replica.pool, hint.as_deref(), &body, now);
            #[cfg(feature = "drill")]
            let watch = watch.resumed(&self.host);
            vm.publish_load(replica, now, SharingOccasion::Pick);
            #[cfg(feature = "drill")]
            watch.paused(&self.host).done();
            step
        });
        let record = self.exchange.borrow_mut().take_record();
        if let Some(record) = record {
            self.host.property_set(RECORD, record.as_bytes()).unwrap_or_else(|e| self.failed("the record of a decision", e));
        }
        match step {
            ExchangeStep::Forward(forward) => self.forward(&forward, body, &replica, now),
            ExchangeStep::Reply(reply) => self.refuse(&reply),
            ExchangeStep::Park { deadline } => {
                self.request.set(RequestStage::Parked);
                let me: Weak<dyn ParkedRequest> = self.me.clone();
                let parked = self.vm.borrow_mut().park(deadline, replica, me);
                // No room to wait in: what the deadline would bring comes now.
                if parked { FilterAction::Hold } else { self.decide(body, deadline) }
            }
        }
    }

    fn forward(&self, forward: &RequestChanges, body: Vec<u8>, replica: &RefCell<PoolReplica>, since: Timestamp) -> FilterAction {
        if let Some(splice) = &forward.body
            && let Err(error) = self.host.buffer_replace(BodyBuffer::RequestBody, splice.range.end, &splice.beginning(body))
        {
            self.failed::<()>("another model name", error);
            let reply = self.open(replica, |_, exchange, replica| exchange.abandon(&mut replica.pool, since));
            return self.refuse(&reply);
        }
        // Envoy's router keeps a body for a retry in the buffer where Envoy also keeps the held
        // part, and would send that part twice after a request that goes on in the middle of its
        // body (Envoy 1.40). So such a request has one attempt.
        let once = self.pieces.get() != BodyDelivery::None && !self.complete.get();
        for (name, value) in forward.set.iter().filter(|(name, _)| !(once && name == headers::RETRY_ON)) {
            self.host.header_set(HeaderMap::Request, name, value.as_bytes()).unwrap_or_else(|e| self.failed("a request header", e));
        }
        self.forwarded(replica, since);
        FilterAction::Go
    }

    fn forwarded(&self, replica: &RefCell<PoolReplica>, since: Timestamp) {
        let us = self.host.now().us_since(since);
        let picked = self.open(replica, |_, _, replica| {
            let picked = replica.has_state();
            if picked {
                replica.record_pick_time(us);
            }
            picked
        });
        if picked {
            self.metrics.record(Stat::PickUs, us);
            self.metrics.count(Stat::Picked);
            self.request.set(RequestStage::Routed);
        } else {
            self.metrics.count(Stat::FailedOpen);
            self.request.set(RequestStage::Passing);
        }
    }

    /// Answers a request that is refused.
    fn refuse(&self, reply: &LocalReply) -> FilterAction {
        match reply.status {
            429 => self.metrics.count(Stat::Shed),
            400..=499 => self.metrics.count(Stat::Invalid),
            _ => self.metrics.count(Stat::Unavailable),
        }
        self.reply(reply)
    }

    fn reply(&self, reply: &LocalReply) -> FilterAction {
        self.request.set(RequestStage::Answered);
        let headers: Vec<(&str, &str)> = reply.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.host.reply(reply.status, &pairs::serialize(&headers), &reply.body).unwrap_or_else(|e| self.failed("a reply", e));
        FilterAction::Hold
    }

    /// Response headers arrived, from the upstream or from the proxy.
    pub fn response_headers(&self, end_of_stream: bool) -> FilterAction {
        if self.request.get() != RequestStage::Routed {
            return FilterAction::Go;
        }
        let Some(replica) = self.replica.borrow().clone() else { return FilterAction::Go };
        let bytes = self.host.headers(HeaderMap::Response).unwrap_or_else(|e| self.failed("response headers", e));
        // A property costs as much as all headers, so it is read only where it can say something
        // new: only replies from the upstream have this header (where Envoy is configured to omit
        // it, the property says so), and no endpoint before the first one can have failed.
        let from_upstream = HeaderPairs::new(&bytes).any(|(name, _)| name == UPSTREAM_TIME);
        let origin =
            if from_upstream { ResponseOrigin::Upstream } else { ResponseOrigin::of_details(&self.text(&["response", "code_details"])) };
        let upstream = self.text(&["upstream", "address"]);
        let first = origin == ResponseOrigin::Upstream && self.exchange.borrow().is_first_endpoint(&upstream);
        let head = ResponseHead {
            origin,
            upstream_address: (!upstream.is_empty()).then_some(upstream.as_slice()),
            attempts: if first { 1 } else { self.attempt_count() },
            end_of_stream,
            ..ResponseHead::read(HeaderPairs::new(&bytes))
        };
        let now = self.host.now();
        let step = self.open(&replica, |_, exchange, replica| exchange.response_headers(&mut replica.pool, &head, now));
        self.share_state(&replica, now);
        self.response.set(step.body);
        for name in step.remove {
            self.host.header_remove(HeaderMap::Response, name).unwrap_or_else(|e| self.failed("a response header", e));
        }
        for (name, value) in &step.set {
            self.host.header_set(HeaderMap::Response, name, value.as_bytes()).unwrap_or_else(|e| self.failed("a response header", e));
        }
        if step.body == ResponseBody::Hold && !end_of_stream { FilterAction::Hold } else { FilterAction::Go }
    }

    /// A piece of the response body arrived; for a held body, everything so far.
    pub fn response_body(&self, size: usize, last: bool) -> FilterAction {
        match self.response.get() {
            ResponseBody::Hold if !last => {
                self.response_size.set(size);
                return FilterAction::Hold;
            }
            ResponseBody::Ignore => {}
            ResponseBody::Read if size == 0 && !last => {}
            body => self.response_piece(size, last, body == ResponseBody::Hold),
        }
        FilterAction::Go
    }

    /// The response has ended with trailers.
    pub fn response_complete(&self) {
        match self.response.get() {
            ResponseBody::Hold => self.response_piece(self.response_size.get(), true, true),
            ResponseBody::Read => self.response_piece(0, true, false),
            ResponseBody::Ignore | ResponseBody::Restore => {}
        }
    }

    fn response_piece(&self, size: usize, last: bool, held: bool) {
        let Some(replica) = self.replica.borrow().clone() else { return };
        let bytes = match size {
            0 => Vec::new(),
            size => self.host.buffer(BodyBuffer::ResponseBody, size).unwrap_or_else(|e| self.failed("the response body", e)),
        };
        let now = self.host.now();
        let (restored, news) = self.open(&replica, |_, exchange, replica| {
            let changes = replica.pool.changes();
            let restored = exchange.response_chunk(&mut replica.pool, &bytes, last, now);
            let restored = restored.map(|bytes| self.host.buffer_replace(BodyBuffer::ResponseBody, size, bytes).map(|()| bytes.len()));
            (restored, replica.pool.changes() != changes)
        });
        match restored {
            Some(Ok(length)) if held => self
                .host
                .header_set(HeaderMap::Response, headers::CONTENT_LENGTH, length.to_string().as_bytes())
                .unwrap_or_else(|e| self.failed("a response header", e)),
            Some(Err(error)) => self.failed("the client's model name", error),
            _ => {}
        }
        // Most pieces have one token more, which is not published; and a pick reads the reports of
        // others itself.
        if news {
            self.share_state(&replica, now);
        }
    }

    /// Publishes to and reads from the other VMs while no request waits for it here.
    fn share_state(&self, replica: &RefCell<PoolReplica>, now: Timestamp) {
        self.open(replica, |vm, _, replica| {
            vm.publish_load(replica, now, SharingOccasion::End);
            vm.receive_loads(replica, now, SharingOccasion::End);
        });
    }

    /// The stream has ended.
    pub fn end(&self) {
        if self.request.get() == RequestStage::Parked {
            self.request.set(RequestStage::Passing);
        }
        self.pieces.set(BodyDelivery::None);
        let Some(replica) = self.replica.borrow().clone() else { return };
        let now = self.host.now();
        let is_open = self.exchange.borrow().is_open();
        if is_open && ResponseOrigin::of_details(&self.text(&["response", "code_details"])) == ResponseOrigin::Lost {
            self.exchange.borrow_mut().record_cut_off();
        }
        let outcome = self.open(&replica, |_, exchange, replica| exchange.end(&mut replica.pool, now));
        self.share_state(&replica, now);
        self.open(&replica, |vm, _, replica| vm.publish_observations(replica));
        if let Some(outcome) = outcome {
            self.metrics.add(Stat::FailedAttempts, outcome.failed_attempts);
            if let Some(ttft_ms) = outcome.ttft_ms {
                self.metrics.record(Stat::TtftMs, ttft_ms);
            }
            self.count_tokens(outcome.usage);
        }
    }

    fn count_tokens(&self, usage: TokenUsage) {
        let completion = if usage.estimated { Stat::EstimatedTokens } else { Stat::CompletionTokens };
        self.metrics.add(Stat::PromptTokens, usage.prompt_tokens.unwrap_or(0));
        self.metrics.add(Stat::CachedTokens, usage.cached_tokens.unwrap_or(0));
        self.metrics.add(completion, usage.completion_tokens.unwrap_or(0));
    }

    /// The pool this request is for, by the route it took.
    fn pool(&self) -> Option<Rc<RefCell<PoolReplica>>> {
        let config = &self.config;
        let by_cluster = || config.knows_clusters().then(|| config.pool_of_cluster(&self.text(&["xds", "cluster_name"]))).flatten();
        let by_route = || config.pool_named(&self.text(&ROUTE_POOL));
        let position = config.only_pool().or_else(by_cluster).or_else(by_route)?;
        self.vm.borrow().replica(&config.pools.get(position)?.name)
    }

    /// Removes what a client must not set.
    fn strip_headers(&self, bytes: &[u8]) {
        let settings = &self.config.settings;
        for (name, _) in HeaderPairs::new(bytes).filter(|(name, _)| settings.removes(name)) {
            let name = String::from_utf8_lossy(name);
            self.host.header_remove(HeaderMap::Request, &name).unwrap_or_else(|e| self.failed("a client's header", e));
        }
    }

    /// How many attempts the proxy made.
    fn attempt_count(&self) -> u32 {
        let attempts = self.text(&["upstream", "request_attempt_count"]).first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        u32::try_from(attempts).unwrap_or(u32::MAX)
    }

    /// A property; empty if it does not exist.
    fn text(&self, path: &[&str]) -> Vec<u8> {
        self.host.property(path).unwrap_or_else(|e| self.failed("a property", e)).unwrap_or_default()
    }

    /// Goes on without what the proxy refused.
    fn failed<T: Default>(&self, what: &str, error: HostError) -> T {
        self.metrics.count(Stat::HostErrors);
        log::debug!("the proxy refused {what}: {error}");
        T::default()
    }
}

/// The reply of the ready path. A process in which some workers have no VM slot serves too: it
/// reports that, and is ready.
fn ready_reply_of(ready: bool, without_vm_slot: usize) -> LocalReply {
    let reply = ready_reply(ready);
    match without_vm_slot {
        0 => reply,
        vms => LocalReply { body: format!(r#"{{"ready":{ready},"vms_without_slot":{vms}}}"#).into_bytes(), ..reply },
    }
}

impl<H: Host> ParkedRequest for HttpStream<H> {
    fn waits(&self) -> bool {
        self.request.get() == RequestStage::Parked || self.pieces.get() == BodyDelivery::HoldNext
    }

    fn retry(&self) {
        // The proxy has no such stream any more after its client left.
        if !self.waits() || self.host.focus(self.id).is_err() {
            return;
        }
        // An incomplete body is not read: the request is decided without it. The part that arrived
        // goes on with the headers.
        let parked = self.request.get() == RequestStage::Parked;
        let body = || if self.complete.get() { self.body() } else { Vec::new() };
        if parked && self.decide(body(), self.host.now()) == FilterAction::Hold {
            return;
        }
        if self.pieces.get() != BodyDelivery::None {
            self.pieces.set(BodyDelivery::Ahead);
        }
        self.host.resume_request().unwrap_or_else(|e| self.failed("a resumption", e));
    }
}
