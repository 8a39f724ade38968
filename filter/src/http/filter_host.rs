//! The filter as the host of an exchange's driver. Each call of the driver becomes calls to the
//! proxy ([`Host`]) and the VM. If the proxy refuses a call, the refusal is counted, and the
//! request continues.

use std::borrow::Cow;
use std::cell::RefCell;
use std::rc::{Rc, Weak};

use exchange::bodies::AwaitedBody;
use exchange::usage::TokenUsage;
use exchange::{
    ExchangeOutcome, ExchangeSettings, FilterStatus, LocalReply, ManagedPool, PoolUse,
    RequestChanges, RequestCount, RequestHost, ResponseOrigin, ResponseStep, RewriteError,
    Timestamp, headers, ready_reply, trace,
};

use crate::host::{BodyBuffer, HeaderMap, Host, HostError};
use crate::metrics::{FilterMetrics, Stat};
use crate::pairs::{self, HeaderPairs};
use crate::shared_data::load_sharing::SharingOccasion;
use crate::vm::VmState;
use crate::vm::parked_request::ParkedRequest;
use crate::vm::replica::PoolReplica;
use front::config::FilterConfig;

/// The property that has the record of a decision. The access log shows it as
/// `%FILTER_STATE(wasm.switchpoint_decision:PLAIN)%`.
const RECORD: &str = "switchpoint_decision";

/// The properties of a request that was held: how long, and the priority of its band. The access
/// log shows them like [`RECORD`].
const HELD_MS: &str = "switchpoint_held_ms";
const BAND: &str = "switchpoint_band";

/// The property in which a route may name its pool. Only routes that share a cluster need it.
const ROUTE_POOL: [&str; 5] = [
    "xds",
    "route_metadata",
    "filter_metadata",
    "switchpoint",
    "pool",
];

/// The host of the stream's driver.
pub(super) struct FilterHost<H: Host> {
    pub(super) id: u32,
    pub(super) proxy: H,
    pub(super) vm: Rc<RefCell<VmState<H>>>,
    pub(super) metrics: Rc<FilterMetrics<H>>,
    pub(super) config: Rc<FilterConfig>,
    pub(super) stream: Weak<dyn ParkedRequest>,
    /// Length of the piece of the response body that the driver took last.
    pub(super) response_bytes: usize,
    /// Whether the last piece of the response body has arrived. The end of the stream follows at
    /// once.
    pub(super) is_ending: bool,
    /// Whether the request headers went on before the decision, to a buffer filter that holds them.
    /// After that, Envoy allows no change of these headers.
    pub(super) headers_went_on: bool,
    pub(super) body: AwaitedBody,
    /// The client and the length of the body that Envoy keeps for a retry, if the body is long.
    pub(super) kept: Option<(u64, usize)>,
    /// The index of the sent request in the VM's `WatchedStreams`.
    pub(super) watch: Option<usize>,
}

// === impl FilterHost ===

impl<H: Host> RequestHost for FilterHost<H> {
    type Pool = Rc<RefCell<PoolReplica>>;
    type RequestBody = Vec<u8>;
    type ResponseBody = Vec<u8>;

    const IS_FILTER: bool = true;

    fn now(&self) -> Timestamp {
        self.proxy.now()
    }

    fn settings(&self) -> &ExchangeSettings {
        &self.config.settings
    }

    /// Builds the reply on the ready path. A process is ready even if some workers share no load;
    /// the reply has the number of these workers.
    fn ready_reply(&self) -> LocalReply {
        let vm = self.vm.borrow();
        let ready = vm.is_ready(&self.config);
        let reply = ready_reply(ready);
        match vm.without_vm_slot() {
            0 => reply,
            vms => LocalReply {
                body: format!(r#"{{"ready":{ready},"vms_without_slot":{vms}}}"#).into_bytes(),
                ..reply
            },
        }
    }

    fn find_pool(&mut self) -> Option<Self::Pool> {
        let config = &self.config;
        let by_cluster = || {
            config
                .knows_clusters()
                .then(|| config.pool_of_cluster(&self.text(&["xds", "cluster_name"])))
                .flatten()
        };
        let by_route = || config.pool_named(&self.text(&ROUTE_POOL));
        let position = config.only_pool().or_else(by_cluster).or_else(by_route)?;
        self.vm.borrow().replica(&config.pools.get(position)?.name)
    }

    fn with_pool<R>(
        &self,
        replica: &Self::Pool,
        usage: PoolUse,
        now: Timestamp,
        act: impl FnOnce(&mut ManagedPool) -> R,
    ) -> R {
        let replica = &mut *replica.borrow_mut();
        self.before(replica, usage, now);
        let changes = replica.pool.changes();
        let result = act(&mut replica.pool);
        let changed = replica.pool.changes() != changes;
        self.after(replica, usage, changed, now);
        result
    }

    fn subset_hint(&self) -> Option<Cow<'_, [u8]>> {
        let settings = &self.config.settings;
        let path = [
            "metadata",
            "filter_metadata",
            settings.subset.namespace.as_str(),
            settings.subset.key.as_str(),
        ];
        self.proxy
            .property(&path)
            .unwrap_or_else(|e| Some(self.failed("the subset hint", e)))
            .map(Cow::Owned)
    }

    fn flow_id(&self) -> Option<Cow<'_, [u8]>> {
        let settings = &self.config.settings.flow;
        if settings.namespace.is_empty() {
            return None;
        }
        let path: Vec<&str> = ["metadata", "filter_metadata", settings.namespace.as_str()]
            .into_iter()
            .chain(settings.key.split('/'))
            .collect();
        self.proxy
            .property(&path)
            .unwrap_or_else(|e| Some(self.failed("the fairness id", e)))
            .map(Cow::Owned)
    }

    fn body_piece(&self, start: usize, size: usize) -> Cow<'_, [u8]> {
        self.bytes(
            BodyBuffer::RequestBody,
            start,
            size,
            "a piece of the request body",
        )
        .into()
    }

    fn take_body(&mut self, size: usize) -> Vec<u8> {
        self.bytes(BodyBuffer::RequestBody, 0, size, "the request body")
    }

    fn forward(
        &mut self,
        forward: RequestChanges,
        body: Option<Vec<u8>>,
    ) -> Result<(), RewriteError> {
        if let Some((splice, body)) = forward.body.zip(body)
            && let Err(error) = self.proxy.buffer_replace(
                BodyBuffer::RequestBody,
                splice.end(),
                &splice.beginning(body),
            )
        {
            self.failed::<()>("another model name", error);
            return Err(RewriteError);
        }
        for (name, value) in &forward.set {
            let set = if self.headers_went_on {
                self.proxy.property_set(name, value.as_bytes())
            } else {
                self.proxy
                    .header_set(HeaderMap::Request, name, value.as_bytes())
            };
            set.unwrap_or_else(|e| self.failed("a request header", e));
        }
        Ok(())
    }

    fn may_keep(&mut self, client: u64, bytes: usize) -> bool {
        let bytes_max = self.config.kept_bodies_bytes();
        let may = self.kept.is_none()
            && self.with_vm(|vm| vm.watched().kept.keep(client, bytes, bytes_max));
        if may {
            self.kept = Some((client, bytes));
        }
        may
    }

    fn reply(&mut self, reply: LocalReply) {
        self.with_vm(|vm| vm.watched().count_local_reply());
        let headers: Vec<(&str, &str)> = reply
            .headers
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        self.proxy
            .reply(reply.status, &pairs::serialize(&headers), &reply.body)
            .unwrap_or_else(|e| self.failed("a reply", e));
    }

    fn park(&mut self, replica: &Self::Pool, deadline: Timestamp, client: u64) -> bool {
        self.vm
            .borrow_mut()
            .park(deadline, client, Rc::clone(replica), self.stream.clone())
    }

    fn hold(&mut self, replica: &Self::Pool, number: u64) {
        self.metrics.collect(Stat::Held, 1);
        replica.borrow_mut().hold(number, self.stream.clone());
        if replica.borrow().pool.queues().is_shared() {
            let now = self.proxy.now();
            // If another VM wrote the order first, this VM soon reads the order again and then
            // writes.
            self.claim(replica, now);
            self.vm
                .borrow()
                .look_at_freed(&mut replica.borrow_mut(), now);
            self.release_queued(replica);
        }
    }

    fn watch(&mut self, replica: &Self::Pool, number: u64) {
        replica.borrow_mut().hold(number, self.stream.clone());
    }

    fn claim(&self, replica: &Self::Pool, now: Timestamp) -> bool {
        self.vm.borrow().claim(&mut replica.borrow_mut(), now)
    }

    fn release_queued(&mut self, replica: &Self::Pool) {
        // If freed room was not looked at yet, the end of the stream does that at once.
        if replica.borrow().pool.queues().is_due() {
            self.vm.borrow_mut().release_soon(&mut replica.borrow_mut());
        }
    }

    fn log_hold(&mut self, ms: u64, priority: i32) {
        for (name, value) in [(HELD_MS, ms.to_string()), (BAND, priority.to_string())] {
            self.proxy
                .property_set(name, value.as_bytes())
                .unwrap_or_else(|e| self.failed("a property of a held request", e));
        }
    }

    fn is_traced<'h>(&mut self, pairs: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone) -> bool {
        self.config.trace_tags && trace::is_sampled(pairs)
    }

    fn trace_decision(&mut self, candidates: String) {
        self.tag("candidates", &candidates);
    }

    fn trace_outcome(&mut self, outcome: &ExchangeOutcome) {
        for (name, value) in outcome.span_attributes() {
            self.tag(name, &value);
        }
    }

    fn resume_after(&mut self, replica: &Self::Pool, at: Timestamp) {
        self.vm
            .borrow_mut()
            .retry_after(at, Rc::clone(replica), self.stream.clone());
    }

    fn log_decision(&mut self, record: &str) {
        self.proxy
            .property_set(RECORD, record.as_bytes())
            .unwrap_or_else(|e| self.failed("the record of a decision", e));
    }

    fn count(&mut self, replica: Option<&Self::Pool>, counted: RequestCount) {
        let stat = match counted {
            RequestCount::Picked { us } => {
                replica
                    .into_iter()
                    .for_each(|replica| replica.borrow_mut().record_pick_time(us));
                self.metrics.record(Stat::PickUs, us);
                return self.metrics.collect(Stat::Picked, 1);
            }
            RequestCount::FailedOpen => Stat::FailedOpen,
            RequestCount::Passed => Stat::Passed,
            RequestCount::Invalid => Stat::Invalid,
            RequestCount::Shed => Stat::Shed,
            RequestCount::Unavailable => Stat::Unavailable,
            RequestCount::Unread => Stat::Unread,
        };
        self.metrics.count(stat);
    }

    fn send_response_headers(&mut self, step: ResponseStep) {
        for name in step.remove {
            self.proxy
                .header_remove(HeaderMap::Response, name)
                .unwrap_or_else(|e| self.failed("a response header", e));
        }
        for (name, value) in &step.set {
            self.proxy
                .header_set(HeaderMap::Response, name, value.as_bytes())
                .unwrap_or_else(|e| self.failed("a response header", e));
        }
    }

    fn watch_reply(&mut self) {
        self.watch = Some(self.with_vm(|vm| vm.watched().watch_reply(self.stream.clone())));
    }

    fn take_response_body(&mut self, size: usize) -> Vec<u8> {
        self.response_bytes = size;
        self.bytes(BodyBuffer::ResponseBody, 0, size, "the response body")
    }

    fn send_response_body(&mut self, _: Vec<u8>, restored: Option<&[u8]>, held: bool) {
        let Some(restored) = restored else { return };
        match self
            .proxy
            .buffer_replace(BodyBuffer::ResponseBody, self.response_bytes, restored)
        {
            Ok(()) if held => self
                .proxy
                .header_set(
                    HeaderMap::Response,
                    headers::CONTENT_LENGTH,
                    restored.len().to_string().as_bytes(),
                )
                .unwrap_or_else(|e| self.failed("a response header", e)),
            Ok(()) => {}
            Err(error) => self.failed("the client's model name", error),
        }
    }

    fn append_response(&mut self, _: &[u8]) {}

    fn endpoint_broke_off(&mut self) -> bool {
        ResponseOrigin::of_details(&self.text(&["response", "code_details"]))
            == ResponseOrigin::Lost
    }

    fn ended(&mut self, outcome: &ExchangeOutcome) {
        self.metrics
            .add(Stat::FailedAttempts, outcome.failed_attempts);
        if let Some(ttft_ms) = outcome.ttft_ms {
            self.metrics.record(Stat::TtftMs, ttft_ms);
        }
        self.count_tokens(outcome.usage);
    }
}

impl<H: Host> FilterHost<H> {
    pub(super) fn with_vm<R>(&self, act: impl FnOnce(&mut VmState<H>) -> R) -> R {
        act(&mut self.vm.borrow_mut())
    }

    /// Reads the load of the other VMs before a pick.
    fn before(&self, replica: &mut PoolReplica, usage: PoolUse, now: Timestamp) {
        if usage == PoolUse::Resolve {
            replica.pool.reserve_prefixes(self.config.prefix_entries);
            #[cfg(feature = "drill")]
            let _timer = crate::drill::sharing_cost::PickTimer::before_pick(&self.proxy);
            self.vm
                .borrow()
                .receive_loads(replica, now, SharingOccasion::Pick);
            self.vm.borrow().read_order(replica, now);
        }
    }

    /// Publishes the VM's load after a pick. After a response, also reads the load of the other
    /// VMs, because no request waits then.
    fn after(&self, replica: &mut PoolReplica, usage: PoolUse, changed: bool, now: Timestamp) {
        let vm = self.vm.borrow();
        match usage {
            PoolUse::Capture | PoolUse::Resolve => {}
            PoolUse::Pick => {
                #[cfg(feature = "drill")]
                let _timer = crate::drill::sharing_cost::PickTimer::after_pick(&self.proxy);
                vm.publish_load(replica, now, SharingOccasion::Pick);
            }
            // Most pieces bring only one more token, which is not published. The changes by the
            // last piece are published by the end of the stream, which follows at once.
            PoolUse::ReadResponse if !changed || self.is_ending => {}
            PoolUse::Respond | PoolUse::ReadResponse | PoolUse::Release => {
                vm.publish_load(replica, now, SharingOccasion::End);
                vm.receive_loads(replica, now, SharingOccasion::End);
                vm.look_at_freed(replica, now);
                if usage == PoolUse::Release {
                    vm.publish_observations(replica);
                }
            }
        }
    }

    fn bytes(&self, buffer: BodyBuffer, start: usize, size: usize, what: &str) -> Vec<u8> {
        match size {
            0 => Vec::new(),
            size => self
                .proxy
                .buffer(buffer, start, size)
                .unwrap_or_else(|e| self.failed(what, e)),
        }
    }

    fn count_tokens(&self, usage: TokenUsage) {
        let completion = if usage.estimated {
            Stat::EstimatedTokens
        } else {
            Stat::CompletionTokens
        };
        self.metrics
            .collect(Stat::PromptTokens, usage.prompt_tokens.unwrap_or(0));
        self.metrics
            .collect(Stat::CachedTokens, usage.cached_tokens.unwrap_or(0));
        self.metrics
            .collect(completion, usage.completion_tokens.unwrap_or(0));
    }

    /// Sets a property that appears as a tag in the proxy's trace span.
    fn tag(&self, name: &str, value: &str) {
        let name = ["switchpoint_", name].concat();
        self.proxy
            .property_set(&name, value.as_bytes())
            .unwrap_or_else(|e| self.failed("a tag of a trace span", e));
    }

    /// Lets the headers go on to the buffer filter after this one. That filter sets the body's
    /// length, which may change before. A later filter turns the properties of [`Self::forward`]
    /// into headers.
    pub(super) fn let_headers_go(&mut self) -> FilterStatus {
        self.headers_went_on = true;
        self.proxy
            .header_remove(HeaderMap::Request, headers::CONTENT_LENGTH)
            .unwrap_or_else(|e| self.failed("the removal of content-length", e));
        FilterStatus::Go
    }

    /// Removes the headers that clients must not set.
    pub(super) fn strip_headers(&self, bytes: &[u8]) {
        let settings = &self.config.settings;
        for (name, _) in HeaderPairs::new(bytes).filter(|(name, _)| settings.removes(name)) {
            let name = String::from_utf8_lossy(name);
            self.proxy
                .header_remove(HeaderMap::Request, &name)
                .unwrap_or_else(|e| self.failed("a client's header", e));
        }
    }

    /// Counts the attempts that the proxy made.
    pub(super) fn attempt_count(&self) -> u32 {
        let attempts = self
            .text(&["upstream", "request_attempt_count"])
            .first_chunk()
            .map_or(0, |bytes| u64::from_le_bytes(*bytes));
        u32::try_from(attempts).unwrap_or(u32::MAX)
    }

    /// Returns a property; empty if it does not exist.
    pub(super) fn text(&self, path: &[&str]) -> Vec<u8> {
        self.proxy
            .property(path)
            .unwrap_or_else(|e| self.failed("a property", e))
            .unwrap_or_default()
    }

    /// Counts a call that the proxy refused, and returns a default as the call's result.
    pub(super) fn failed<T: Default>(&self, what: &str, error: HostError) -> T {
        self.metrics.count(Stat::HostErrors);
        log::debug!("the proxy refused {what}: {error}");
        T::default()
    }
}
