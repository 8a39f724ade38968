//! One exchange, hosted by the proxy: what a callback brings goes to [`Exchange`], what its step asks for goes to the [`Host`].
//!
//! ```text
//!  Passing (no pool of ours, or gone on undecided)
//!  Buffering ── last byte ──► decide ──► Routed, or Answered
//!                               │ no state yet
//!                               └──► Parked ── state, or the deadline ──► decide
//! ```
//! A request is held from its headers on, because headers can be changed only so long; it goes on when it is decided. One whose body is read is
//! decided when its last byte is in; any other at its headers, and a parked one of those goes on with as much of its body as there is: the body of
//! a gRPC stream has no end that could be waited for. Whatever is needed of headers later is taken while they can be read.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use exchange::usage::Usage;
use exchange::{Exchange, Forward, HeadersStep, Origin, Reply, ResponseBody, ResponseHead, Step, Time, headers, ready_reply};

use super::stage::{Flow, Pieces, Request};
use crate::config::FilterConfig;
use crate::host::{Buffer, Host, HostError, Map};
use crate::metrics::{Metrics, Stat};
use crate::pairs::{self, Pairs};
use crate::state::replica::Replica;
use crate::state::sharing::Moment;
use crate::state::{Vm, Waiting};

/// The property that a recorded decision is put into; the access log shows it as `%FILTER_STATE(wasm.switchpoint_decision:PLAIN)%`.
const RECORD: &str = "switchpoint_decision";

/// Envoy gives it to what comes from upstream, and to nothing that it or a filter says itself.
const UPSTREAM_TIME: &[u8] = b"x-envoy-upstream-service-time";

/// Where a route may name its pool, for routes that no cluster tells apart.
const ROUTE_POOL: [&str; 5] = ["xds", "route_metadata", "filter_metadata", "switchpoint", "pool"];

/// One exchange and its host.
pub struct Hosted<H: Host> {
    id: u32,
    host: H,
    vm: Rc<RefCell<Vm<H>>>,
    metrics: Rc<Metrics<H>>,
    config: Rc<FilterConfig>,
    me: Weak<Self>,
    exchange: RefCell<Exchange>,
    replica: RefCell<Option<Rc<RefCell<Replica>>>>,
    request: Cell<Request>,
    body_size: Cell<usize>,
    pieces: Cell<Pieces>,
    /// Is its last byte in?
    whole: Cell<bool>,
    response: Cell<ResponseBody>,
    /// How much of a held response is in.
    response_size: Cell<usize>,
}

// === impl Hosted ===

impl<H: Host> Hosted<H> {
    /// An exchange that has only just begun, on the proxy's context `id`.
    pub fn new(id: u32, host: H, vm: Rc<RefCell<Vm<H>>>, config: Rc<FilterConfig>) -> Rc<Self> {
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
            request: Cell::new(Request::Passing),
            body_size: Cell::new(0),
            pieces: Cell::new(Pieces::None),
            whole: Cell::new(false),
            response: Cell::new(ResponseBody::Ignore),
            response_size: Cell::new(0),
        })
    }

    /// Opens what callbacks share, for as long as `act` takes. It is handed all that it may work on, and calls nothing of ours that opens a cell; the
    /// host does not call back ([`Host`]).
    fn open<R>(&self, replica: &RefCell<Replica>, act: impl FnOnce(&Vm<H>, &mut Exchange, &mut Replica) -> R) -> R {
        act(&self.vm.borrow(), &mut self.exchange.borrow_mut(), &mut replica.borrow_mut())
    }

    /// The request headers are in.
    pub fn request_headers(&self, end_of_stream: bool) -> Flow {
        self.end(); // a proxy that begins twice must not leak the first pick
        self.whole.set(end_of_stream);
        self.vm.borrow_mut().serves();
        let bytes = self.host.headers(Map::Request).unwrap_or_else(|e| self.failed("request headers", e));
        #[cfg(feature = "drill")]
        crate::drill::obey(&bytes);
        #[cfg(feature = "drill")]
        if let Some(cost) = crate::sharing_cost::cost(&self.host, &bytes) {
            return self.reply(&Reply { status: 200, headers: Vec::new(), body: cost.into_bytes() });
        }
        self.strip(&bytes);
        let step = self.exchange.borrow_mut().request_headers(&self.config.settings, Pairs::new(&bytes), end_of_stream);
        if step == HeadersStep::Ready {
            let (ready, without_seat) = (self.vm.borrow().is_ready(&self.config), self.vm.borrow().without_seat());
            return self.reply(&ready_reply_of(ready, without_seat));
        }
        let replica = self.pool();
        if replica.is_none() {
            self.metrics.count(Stat::Passed);
            return Flow::Go;
        }
        if let Some(replica) = &replica {
            self.exchange.borrow_mut().capture(&replica.borrow().pool, Pairs::new(&bytes));
        }
        *self.replica.borrow_mut() = replica;
        match step {
            HeadersStep::Buffer => {
                self.request.set(Request::Buffering);
                Flow::Hold
            }
            HeadersStep::Decide | HeadersStep::Ready => self.decide(Vec::new(), self.host.now()),
            HeadersStep::Reply(reply) => self.refuse(&reply),
        }
    }

    /// The request body, as far as it is in, is `size` bytes long.
    pub fn request_body(&self, size: usize, end_of_stream: bool) -> Flow {
        self.body_size.set(size);
        if self.pieces.get() == Pieces::None {
            self.pieces.set(Pieces::InStep);
        }
        if self.request.get() == Request::Buffering {
            let too_large = self.exchange.borrow_mut().body_grew(&self.config.settings, size);
            if let Some(reply) = too_large {
                return self.refuse(&reply);
            }
        }
        let flow = match self.request.get() {
            _ if end_of_stream => self.request_complete(),
            Request::Passing | Request::Routed => Flow::Go,
            Request::Buffering | Request::Parked | Request::Answered => Flow::Hold,
        };
        if flow == Flow::Go { self.pass_on() } else { flow }
    }

    /// A piece may go on.
    fn pass_on(&self) -> Flow {
        if self.pieces.get() != Pieces::Ahead {
            self.pieces.set(Pieces::InStep);
            return Flow::Go;
        }
        let Some(replica) = self.replica.borrow().clone() else { return Flow::Go };
        self.pieces.set(Pieces::Held);
        let (me, now): (Weak<dyn Waiting>, _) = (self.me.clone(), self.host.now());
        self.vm.borrow_mut().hold(now, replica, me);
        Flow::Hold
    }

    /// The request ends with trailers. What is held of its body goes on before them.
    pub fn request_trailers(&self) -> Flow {
        if self.pieces.get() == Pieces::Held {
            self.pieces.set(Pieces::InStep);
        }
        self.request_complete()
    }

    /// The request's last byte is in.
    fn request_complete(&self) -> Flow {
        self.whole.set(true);
        match self.request.get() {
            Request::Passing | Request::Routed => Flow::Go,
            Request::Parked | Request::Answered => Flow::Hold,
            Request::Buffering => {
                let now = self.host.now();
                self.decide(self.body(), now)
            }
        }
    }

    fn body(&self) -> Vec<u8> {
        match self.body_size.get() {
            0 => Vec::new(),
            size => self.host.buffer(Buffer::RequestBody, size).unwrap_or_else(|e| self.failed("the request body", e)),
        }
    }

    fn decide(&self, body: Vec<u8>, now: Time) -> Flow {
        let Some(replica) = self.replica.borrow().clone() else { return Flow::Go };
        let settings = &self.config.settings;
        let path = ["metadata", "filter_metadata", settings.subset_namespace.as_str(), settings.subset_key.as_str()];
        // One that cannot be read allows nobody: never more than was meant.
        let hint = self.host.property(&path).unwrap_or_else(|e| Some(self.failed("the subset hint", e)));
        let step = self.open(&replica, |vm, exchange, replica| {
            replica.pool.reserve_prefixes(self.config.prefix_entries);
            #[cfg(feature = "drill")]
            let watch = crate::sharing_cost::Watch::of(&self.host);
            vm.hear(replica, now, Moment::Pick);
            #[cfg(feature = "drill")]
            let watch = watch.paused(&self.host);
            let step = exchange.decide(settings, &mut replica.pool, hint.as_deref(), &body, now);
            #[cfg(feature = "drill")]
            let watch = watch.resumed(&self.host);
            vm.tell(replica, now, Moment::Pick);
            #[cfg(feature = "drill")]
            watch.paused(&self.host).done();
            step
        });
        let record = self.exchange.borrow_mut().take_record();
        if let Some(record) = record {
            self.host.property_set(RECORD, record.as_bytes()).unwrap_or_else(|e| self.failed("the record of a decision", e));
        }
        match step {
            Step::Forward(forward) => self.forward(&forward, body, &replica, now),
            Step::Reply(reply) => self.refuse(&reply),
            Step::Park { deadline } => {
                self.request.set(Request::Parked);
                let me: Weak<dyn Waiting> = self.me.clone();
                let parked = self.vm.borrow_mut().park(deadline, replica, me);
                // No room to wait in: what the deadline would bring comes now.
                if parked { Flow::Hold } else { self.decide(body, deadline) }
            }
        }
    }

    fn forward(&self, forward: &Forward, body: Vec<u8>, replica: &RefCell<Replica>, since: Time) -> Flow {
        if let Some(splice) = &forward.body
            && let Err(error) = self.host.buffer_replace(Buffer::RequestBody, splice.range.end, &splice.beginning(body))
        {
            self.failed::<()>("another model name", error);
            let reply = self.open(replica, |_, exchange, replica| exchange.abandon(&mut replica.pool, since));
            return self.refuse(&reply);
        }
        // The proxy's router keeps a body that it may have to send again where the proxy also keeps what it holds for us, and would send that twice
        // after a request that goes on in the middle of its body (Envoy 1.40). So such a request has one attempt.
        let once = self.pieces.get() != Pieces::None && !self.whole.get();
        for (name, value) in forward.set.iter().filter(|(name, _)| !(once && name == headers::RETRY_ON)) {
            self.host.header_set(Map::Request, name, value.as_bytes()).unwrap_or_else(|e| self.failed("a request header", e));
        }
        self.forwarded(replica, since);
        Flow::Go
    }

    fn forwarded(&self, replica: &RefCell<Replica>, since: Time) {
        let us = self.host.now().us_since(since);
        let picked = self.open(replica, |_, _, replica| {
            let picked = replica.has_state();
            if picked {
                replica.pick_took(us);
            }
            picked
        });
        if picked {
            self.metrics.record(Stat::PickUs, us);
            self.metrics.count(Stat::Picked);
            self.request.set(Request::Routed);
        } else {
            self.metrics.count(Stat::FailedOpen);
            self.request.set(Request::Passing);
        }
    }

    /// Answers a request that is refused.
    fn refuse(&self, reply: &Reply) -> Flow {
        match reply.status {
            429 => self.metrics.count(Stat::Shed),
            400..=499 => self.metrics.count(Stat::Invalid),
            _ => self.metrics.count(Stat::Unavailable),
        }
        self.reply(reply)
    }

    fn reply(&self, reply: &Reply) -> Flow {
        self.request.set(Request::Answered);
        let headers: Vec<(&str, &str)> = reply.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.host.reply(reply.status, &pairs::serialize(&headers), &reply.body).unwrap_or_else(|e| self.failed("a reply", e));
        Flow::Hold
    }

    /// Response headers are there, whoever made them.
    pub fn response_headers(&self, end_of_stream: bool) -> Flow {
        if self.request.get() != Request::Routed {
            return Flow::Go;
        }
        let Some(replica) = self.replica.borrow().clone() else { return Flow::Go };
        let bytes = self.host.headers(Map::Response).unwrap_or_else(|e| self.failed("response headers", e));
        // Each property costs as much as all the headers, so those that can say nothing new are not asked for: only replies from upstream have
        // this header (where Envoy is told to leave it out, the property tells), and before who was asked first nobody failed.
        let from_upstream = Pairs::new(&bytes).any(|(name, _)| name == UPSTREAM_TIME);
        let origin = if from_upstream { Origin::Upstream } else { Origin::of_details(&self.text(&["response", "code_details"])) };
        let upstream = self.text(&["upstream", "address"]);
        let first = origin == Origin::Upstream && self.exchange.borrow().asked_first(&upstream);
        let head = ResponseHead {
            origin,
            upstream_address: (!upstream.is_empty()).then_some(upstream.as_slice()),
            attempts: if first { 1 } else { self.attempts() },
            end_of_stream,
            ..ResponseHead::read(Pairs::new(&bytes))
        };
        let now = self.host.now();
        let step = self.open(&replica, |_, exchange, replica| exchange.response_headers(&mut replica.pool, &head, now));
        self.shared(&replica, now);
        self.response.set(step.body);
        for name in step.remove {
            self.host.header_remove(Map::Response, name).unwrap_or_else(|e| self.failed("a response header", e));
        }
        for (name, value) in &step.set {
            self.host.header_set(Map::Response, name, value.as_bytes()).unwrap_or_else(|e| self.failed("a response header", e));
        }
        if step.body == ResponseBody::Hold && !end_of_stream { Flow::Hold } else { Flow::Go }
    }

    /// A piece of the response body is there; of a held one, all that is in.
    pub fn response_body(&self, size: usize, last: bool) -> Flow {
        match self.response.get() {
            ResponseBody::Hold if !last => {
                self.response_size.set(size);
                return Flow::Hold;
            }
            ResponseBody::Ignore => {}
            ResponseBody::Read if size == 0 && !last => {}
            body => self.response_piece(size, last, body == ResponseBody::Hold),
        }
        Flow::Go
    }

    /// The response's last byte is in, if trailers say so.
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
            size => self.host.buffer(Buffer::ResponseBody, size).unwrap_or_else(|e| self.failed("the response body", e)),
        };
        let now = self.host.now();
        let (restored, news) = self.open(&replica, |_, exchange, replica| {
            let changes = replica.pool.changes();
            let restored = exchange.response_chunk(&mut replica.pool, &bytes, last, now);
            let restored = restored.map(|bytes| self.host.buffer_replace(Buffer::ResponseBody, size, bytes).map(|()| bytes.len()));
            (restored, replica.pool.changes() != changes)
        });
        match restored {
            Some(Ok(length)) if held => self
                .host
                .header_set(Map::Response, headers::CONTENT_LENGTH, length.to_string().as_bytes())
                .unwrap_or_else(|e| self.failed("a response header", e)),
            Some(Err(error)) => self.failed("the client's model name", error),
            _ => {}
        }
        // Most pieces bring a token that nobody is told of; and a pick looks at what others tell by itself.
        if news {
            self.shared(&replica, now);
        }
    }

    /// The other VMs are told and heard, when no request waits for it here.
    fn shared(&self, replica: &RefCell<Replica>, now: Time) {
        self.open(replica, |vm, _, replica| {
            vm.tell(replica, now, Moment::End);
            vm.hear(replica, now, Moment::End);
        });
    }

    /// The exchange is over, in whatever way.
    pub fn end(&self) {
        if self.request.get() == Request::Parked {
            self.request.set(Request::Passing);
        }
        self.pieces.set(Pieces::None);
        let Some(replica) = self.replica.borrow().clone() else { return };
        let now = self.host.now();
        let is_open = self.exchange.borrow().is_open();
        if is_open && Origin::of_details(&self.text(&["response", "code_details"])) == Origin::Lost {
            self.exchange.borrow_mut().cut_off();
        }
        let outcome = self.open(&replica, |_, exchange, replica| exchange.end(&mut replica.pool, now));
        self.shared(&replica, now);
        self.open(&replica, |vm, _, replica| vm.tell_observed(replica));
        if let Some(outcome) = outcome {
            self.metrics.add(Stat::FailedAttempts, outcome.failed_attempts);
            if let Some(ttft_ms) = outcome.ttft_ms {
                self.metrics.record(Stat::TtftMs, ttft_ms);
            }
            self.count_tokens(outcome.usage);
        }
    }

    fn count_tokens(&self, usage: Usage) {
        let completion = if usage.estimated { Stat::EstimatedTokens } else { Stat::CompletionTokens };
        self.metrics.add(Stat::PromptTokens, usage.prompt_tokens.unwrap_or(0));
        self.metrics.add(Stat::CachedTokens, usage.cached_tokens.unwrap_or(0));
        self.metrics.add(completion, usage.completion_tokens.unwrap_or(0));
    }

    /// The pool this request is for, by the route it took.
    fn pool(&self) -> Option<Rc<RefCell<Replica>>> {
        let config = &self.config;
        let by_cluster = || config.knows_clusters().then(|| config.pool_of_cluster(&self.text(&["xds", "cluster_name"]))).flatten();
        let by_route = || config.pool_named(&self.text(&ROUTE_POOL));
        let position = config.only_pool().or_else(by_cluster).or_else(by_route)?;
        self.vm.borrow().replica(&config.pools.get(position)?.name)
    }

    /// Removes what a client must not set.
    fn strip(&self, bytes: &[u8]) {
        let settings = &self.config.settings;
        for (name, _) in Pairs::new(bytes).filter(|(name, _)| settings.removes(name)) {
            let name = String::from_utf8_lossy(name);
            self.host.header_remove(Map::Request, &name).unwrap_or_else(|e| self.failed("a client's header", e));
        }
    }

    /// How many endpoints were tried.
    fn attempts(&self) -> u32 {
        let attempts = self.text(&["upstream", "request_attempt_count"]).first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        u32::try_from(attempts).unwrap_or(u32::MAX)
    }

    /// A property; empty when there is none.
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

/// The answer of the ready path. A process in which some workers share nothing serves all the same: it says so, and is ready.
fn ready_reply_of(ready: bool, without_seat: usize) -> Reply {
    let reply = ready_reply(ready);
    match without_seat {
        0 => reply,
        vms => Reply { body: format!(r#"{{"ready":{ready},"vms_without_seat":{vms}}}"#).into_bytes(), ..reply },
    }
}

impl<H: Host> Waiting for Hosted<H> {
    fn waits(&self) -> bool {
        self.request.get() == Request::Parked || self.pieces.get() == Pieces::Held
    }

    fn retry(&self) {
        // The proxy has no such stream any more when its client has left.
        if !self.waits() || self.host.focus(self.id).is_err() {
            return;
        }
        // A body that is not whole is not read: its request was to be decided without. What of it is in goes on with the headers.
        let parked = self.request.get() == Request::Parked;
        let body = || if self.whole.get() { self.body() } else { Vec::new() };
        if parked && self.decide(body(), self.host.now()) == Flow::Hold {
            return;
        }
        if self.pieces.get() != Pieces::None {
            self.pieces.set(Pieces::Ahead);
        }
        self.host.resume_request().unwrap_or_else(|e| self.failed("a resumption", e));
    }
}
