//! The module as the host of an exchange's driver. Each call of the driver becomes calls to Envoy
//! and to the pool. If Envoy refuses a call, the refusal is counted, and the request continues.

mod body_room;

use std::borrow::Cow;
use std::sync::{Arc, Weak};

use exchange::bodies::AwaitedBody;
use exchange::usage::TokenUsage;
use exchange::{
    ExchangeOutcome, ExchangeSettings, LocalReply, ManagedPool, PoolUse, RequestChanges,
    RequestCount, RequestHost, ResponseOrigin, ResponseStep, RewriteError, Timestamp, headers,
    ready_reply, trace,
};
use front::metrics::Stat;

use crate::abi::{Attribute, BodyPart, HeaderKind, HeaderList, MetadataOwner, StreamHandle};
use crate::module_config::ModuleConfig;
use crate::panics::lock;
use crate::pool::NativePool;
use crate::process::{NativeProcess, process};
use crate::waker::{StreamWaker, WakeReason};
use crate::worker::SharedWorker;

/// The namespace of the metadata from which the cluster's load balancer reads the decision. With
/// the wasm filter, `header_to_metadata` copies it there.
const BALANCER: &str = "envoy.lb";
/// The key in that namespace that lets the fallback load balancer choose any host.
const OPEN: &str = "open";

/// The beginning of the names of filter states. The wasm filter has it too, so access logs and
/// spans need no other configuration.
const STATE_PREFIX: &str = "wasm.switchpoint_";

/// The place in a route's metadata where it may name its pool.
const ROUTE_POOL: (&str, &str) = ("switchpoint", "pool");

/// The host of the stream's driver.
pub(crate) struct StreamHost {
    pub(crate) handle: StreamHandle,
    pub(crate) module: Arc<ModuleConfig>,
    pub(crate) process: &'static NativeProcess,
    worker: SharedWorker,
    /// What wakes the stream. Most streams need it only once they are sent.
    waker: Option<Arc<StreamWaker>>,
    /// The reply to send when the hook ends, because Envoy calls other hooks meanwhile.
    pub(crate) reply: Option<LocalReply>,
    pub(crate) body: AwaitedBody,
    /// The client and the length of the body that Envoy keeps for a retry, if the body is long.
    kept: Option<(u64, usize)>,
    /// The index of the sent request among those of the worker.
    watch: Option<usize>,
}

// === impl StreamHost ===

impl RequestHost for StreamHost {
    type Pool = Arc<NativePool>;
    type RequestBody = Vec<u8>;
    type ResponseBody = Vec<u8>;

    const IS_FILTER: bool = true;

    fn now(&self) -> Timestamp {
        self.process.now()
    }

    fn settings(&self) -> &ExchangeSettings {
        &self.module.config.settings
    }

    fn ready_reply(&self) -> LocalReply {
        ready_reply(self.module.is_ready())
    }

    fn find_pool(&mut self) -> Option<Self::Pool> {
        let config = &self.module.config;
        let by_cluster = || {
            if config.knows_clusters() {
                config.pool_of_cluster(self.handle.cluster_name()?)
            } else {
                None
            }
        };
        let by_route = || {
            let (namespace, key) = ROUTE_POOL;
            let name = self.handle.metadata(MetadataOwner::Route, namespace, key)?;
            config.pool_named(name)
        };
        let position = config.only_pool().or_else(by_cluster).or_else(by_route)?;
        self.module.pool(position)
    }

    fn with_pool<R>(
        &self,
        pool: &Self::Pool,
        usage: PoolUse,
        _: Timestamp,
        act: impl FnOnce(&mut ManagedPool) -> R,
    ) -> R {
        let mut state = pool.lock();
        if usage == PoolUse::Resolve {
            // A tick has usually done it, and then this is one comparison.
            let entries = self.module.config.prefix_entries;
            state.pool.reserve_prefixes(entries);
        }
        act(&mut state.pool)
    }

    fn subset_hint(&self) -> Option<Cow<'_, [u8]>> {
        let subset = &self.module.config.settings.subset;
        let namespace = subset.namespace.as_str();
        let key = subset.key.as_str();
        if !self.handle.has_metadata(namespace, key) {
            return None;
        }
        let text = self.handle.metadata(MetadataOwner::Stream, namespace, key);
        // A value of another kind allows no endpoint.
        Some(text.map_or_else(
            || {
                let list = self.handle.metadata_list(namespace, key);
                Cow::Owned(list.unwrap_or_default().join(&b','))
            },
            Cow::Borrowed,
        ))
    }

    fn flow_id(&self) -> Option<Cow<'_, [u8]>> {
        let flow = &self.module.config.settings.flow;
        if flow.namespace.is_empty() {
            return None;
        }
        let id = self
            .handle
            .metadata(MetadataOwner::Stream, &flow.namespace, &flow.key)?;
        Some(Cow::Borrowed(id))
    }

    fn body_piece(&self, start: usize, size: usize) -> Cow<'_, [u8]> {
        range(self.request_chunks(), start, size)
    }

    fn take_body(&mut self, size: usize) -> Vec<u8> {
        range(self.request_chunks(), 0, size).into_owned()
    }

    fn forward(
        &mut self,
        changes: RequestChanges,
        body: Option<Vec<u8>>,
    ) -> Result<(), RewriteError> {
        if let Some((edit, body)) = changes.body.zip(body) {
            // Envoy can only drain and append, so the rest of the body follows the changed
            // beginning.
            let end = edit.end();
            let rest = range(self.request_chunks(), end, usize::MAX).into_owned();
            let changed = [edit.beginning(body), rest].concat();
            if !self.replace(BodyPart::BufferedRequest, &changed) {
                self.refused();
                return Err(RewriteError);
            }
        }
        for (name, value) in &changes.set {
            let destination = &self.module.config.settings.destination;
            if *name == destination.header || *name == destination.fallback_header {
                self.handle.set_metadata(BALANCER, name, value);
            }
            if name == headers::OPEN {
                // Only the balancer reads it.
                self.handle.set_metadata(BALANCER, OPEN, value);
            } else if !self
                .handle
                .set_header(HeaderKind::Request, name, value.as_bytes())
            {
                self.refused();
            }
        }
        Ok(())
    }

    fn may_keep(&mut self, client: u64, bytes: usize) -> bool {
        let bytes_max = self.module.config.kept_bodies_bytes();
        let may = self.kept.is_none() && lock(&self.worker).kept.keep(client, bytes, bytes_max);
        if may {
            self.kept = Some((client, bytes));
        }
        may
    }

    fn reply(&mut self, reply: LocalReply) {
        self.reply = Some(reply);
    }

    fn park(&mut self, pool: &Self::Pool, deadline: Timestamp, client: u64) -> bool {
        let stream = self.waker();
        self.process.park(pool, deadline, client, stream)
    }

    fn hold(&mut self, pool: &Self::Pool, number: u64) {
        self.process.metrics.count(Stat::Held);
        self.watch(pool, number);
    }

    fn watch(&mut self, pool: &Self::Pool, number: u64) {
        if let Some(waker) = self.waker().upgrade() {
            pool.lock().held.hold(number, &waker);
        }
    }

    fn release_queued(&mut self, pool: &Self::Pool) {
        pool.lock().release_next(self.process.now());
    }

    fn resume_after(&mut self, pool: &Self::Pool, at: Timestamp) {
        let stream = self.waker();
        if at > self.process.now() {
            self.process.park(pool, at, 0, stream);
        } else if let Some(stream) = stream.upgrade() {
            stream.wake(WakeReason::Resume);
        }
    }

    fn log_hold(&mut self, ms: u64, priority: i32) {
        self.set_state("held_ms", &ms.to_string());
        self.set_state("band", &priority.to_string());
    }

    fn is_traced<'h>(&mut self, pairs: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone) -> bool {
        self.module.config.trace_tags && trace::is_sampled(pairs)
    }

    fn trace_decision(&mut self, candidates: String) {
        self.set_state("candidates", &candidates);
    }

    fn trace_outcome(&mut self, outcome: &ExchangeOutcome) {
        for (name, value) in outcome.span_attributes() {
            self.set_state(name, &value);
        }
    }

    fn log_decision(&mut self, record: &str) {
        self.set_state("decision", record);
    }

    fn count(&mut self, pool: Option<&Self::Pool>, counted: RequestCount) {
        let stat = match counted {
            RequestCount::Picked { us } => {
                if let Some(pool) = pool {
                    pool.record_pick_time(us);
                }
                self.record(Stat::PickUs, us);
                Stat::Picked
            }
            RequestCount::FailedOpen => Stat::FailedOpen,
            RequestCount::Passed => Stat::Passed,
            RequestCount::Invalid => Stat::Invalid,
            RequestCount::Shed => Stat::Shed,
            RequestCount::Unavailable => Stat::Unavailable,
            RequestCount::Unread => Stat::Unread,
        };
        self.process.metrics.count(stat);
    }

    fn send_response_headers(&mut self, step: ResponseStep) {
        for name in step.remove {
            self.handle
                .remove_header(HeaderKind::Response, name.as_bytes());
        }
        for (name, value) in &step.set {
            if !self
                .handle
                .set_header(HeaderKind::Response, name, value.as_bytes())
            {
                self.refused();
            }
        }
    }

    fn watch_reply(&mut self) {
        let stream = self.waker();
        self.watch = Some(lock(&self.worker).watch_reply(stream));
    }

    fn take_response_body(&mut self, size: usize) -> Vec<u8> {
        let held = self.handle.body(BodyPart::BufferedResponse);
        let received = self.handle.body(BodyPart::ReceivedResponse);
        range([held, received].concat(), 0, size).into_owned()
    }

    fn send_response_body(&mut self, _: Vec<u8>, restored: Option<&[u8]>, held: bool) {
        let Some(restored) = restored else { return };
        if !self.replace(BodyPart::BufferedResponse, restored) {
            return self.refused();
        }
        if held {
            let length = restored.len().to_string();
            self.handle.set_header(
                HeaderKind::Response,
                headers::CONTENT_LENGTH,
                length.as_bytes(),
            );
        }
    }

    fn append_response(&mut self, _: &[u8]) {}

    fn endpoint_broke_off(&mut self) -> bool {
        let details = self.handle.attribute(Attribute::ResponseCodeDetails);
        ResponseOrigin::of_details(details) == ResponseOrigin::Lost
    }

    fn ended(&mut self, outcome: &ExchangeOutcome) {
        let failed = u64::from(outcome.failed_attempts);
        self.process.metrics.add(Stat::FailedAttempts, failed);
        if let Some(ttft_ms) = outcome.ttft_ms {
            self.record(Stat::TtftMs, ttft_ms);
        }
        self.count_tokens(outcome.usage);
    }
}

impl StreamHost {
    pub(crate) fn new(
        handle: StreamHandle,
        module: Arc<ModuleConfig>,
        worker: SharedWorker,
    ) -> Self {
        Self {
            handle,
            module,
            process: process(),
            worker,
            waker: None,
            reply: None,
            body: AwaitedBody::None,
            kept: None,
            watch: None,
        }
    }

    /// Removes the headers that clients must not set.
    pub(crate) fn strip_headers(&mut self, headers: &HeaderList) {
        let settings = &self.module.config.settings;
        for (name, _) in headers.iter().filter(|(name, _)| settings.removes(name)) {
            self.handle.remove_header(HeaderKind::Request, name);
        }
    }

    /// Returns the length of the request body so far.
    pub(crate) fn request_size(&self) -> usize {
        let held = self.handle.body_size(BodyPart::BufferedRequest);
        let received = self.handle.body_size(BodyPart::ReceivedRequest);
        if held > 0 && received > 0 && self.handle.is_received_buffered() {
            held
        } else {
            held.saturating_add(received)
        }
    }

    /// Returns the length of the piece of the response body, or of all of it if it is held.
    pub(crate) fn response_size(&self, is_held: bool) -> usize {
        let received = self.handle.body_size(BodyPart::ReceivedResponse);
        let held = if is_held {
            self.handle.body_size(BodyPart::BufferedResponse)
        } else {
            0
        };
        received.saturating_add(held)
    }

    /// Gives back what the stream has of its worker, and wakes it never again.
    pub(crate) fn leave_worker(&mut self) {
        self.body_ends();
        if let Some((client, bytes)) = self.kept.take() {
            lock(&self.worker).kept.release(client, bytes);
        }
        if let Some(watch) = self.watch.take() {
            lock(&self.worker).forget_reply(watch);
        }
        if let Some(waker) = self.waker.take() {
            waker.close();
        }
    }

    /// Returns what wakes the stream.
    fn waker(&mut self) -> Weak<StreamWaker> {
        let handle = &self.handle;
        let made = || Arc::new(StreamWaker::new(handle.scheduler()));
        Arc::downgrade(self.waker.get_or_insert_with(made))
    }

    /// Returns the pieces of the request body so far, in order.
    fn request_chunks(&self) -> Vec<&[u8]> {
        let mut chunks = self.handle.body(BodyPart::BufferedRequest);
        if chunks.is_empty() || !self.handle.is_received_buffered() {
            chunks.extend(self.handle.body(BodyPart::ReceivedRequest));
        }
        chunks
    }

    /// Replaces a whole body, which is held (`held`) or, if nothing is held, in the received piece.
    fn replace(&mut self, held: BodyPart, bytes: &[u8]) -> bool {
        let received = match held {
            BodyPart::BufferedRequest | BodyPart::ReceivedRequest => BodyPart::ReceivedRequest,
            BodyPart::BufferedResponse | BodyPart::ReceivedResponse => BodyPart::ReceivedResponse,
        };
        if self.handle.body_size(held) == 0 {
            return self.handle.replace_body(received, bytes);
        }
        // The last piece of a held body is usually in the same buffer already.
        let is_same = received == BodyPart::ReceivedRequest && self.handle.is_received_buffered();
        (is_same || self.handle.body_size(received) == 0 || self.handle.replace_body(received, &[]))
            && self.handle.replace_body(held, bytes)
    }

    /// Sets a filter state, which the access log and spans show.
    fn set_state(&mut self, name: &str, value: &str) {
        let key = [STATE_PREFIX, name].concat();
        if !self.handle.set_filter_state(&key, value.as_bytes()) {
            self.refused();
        }
    }

    /// Records a value in a histogram of the stream's configuration.
    fn record(&self, histogram: Stat, value: u64) {
        if let Some(id) = self.module.metrics.of(histogram) {
            self.handle.record(id, value);
        }
    }

    fn count_tokens(&self, usage: TokenUsage) {
        let completion = if usage.estimated {
            Stat::EstimatedTokens
        } else {
            Stat::CompletionTokens
        };
        for (stat, tokens) in [
            (Stat::PromptTokens, usage.prompt_tokens),
            (Stat::CachedTokens, usage.cached_tokens),
            (completion, usage.completion_tokens),
        ] {
            let tokens = u64::from(tokens.unwrap_or(0));
            self.process.metrics.add(stat, tokens);
        }
    }

    /// Counts a call that Envoy refused.
    fn refused(&self) {
        self.process.metrics.count(Stat::HostErrors);
    }
}

/// Returns at most `size` bytes of `chunks`, from offset `start`. The result is borrowed if it lies
/// in one chunk.
fn range(chunks: Vec<&[u8]>, start: usize, size: usize) -> Cow<'_, [u8]> {
    let mut skip = start;
    let mut left = size;
    let mut parts = Vec::new();
    for chunk in chunks {
        let from = skip.min(chunk.len());
        skip = skip.saturating_sub(from);
        let part = chunk.get(from..).unwrap_or_default();
        let part = part.get(..left).unwrap_or(part);
        left = left.saturating_sub(part.len());
        if !part.is_empty() {
            parts.push(part);
        }
        if left == 0 {
            break;
        }
    }
    match parts.as_slice() {
        &[only] => Cow::Borrowed(only),
        _ => Cow::Owned(parts.concat()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_out_of_chunks() {
        let chunks = || vec![&b"abc"[..], b"", b"defg", b"h"];
        let of =
            |start, size| String::from_utf8(range(chunks(), start, size).into_owned()).unwrap();
        assert_eq!(of(0, 100), "abcdefgh");
        assert_eq!(of(2, 3), "cde");
        assert_eq!(of(3, 4), "defg");
        assert_eq!(of(7, 1), "h");
        assert_eq!(of(8, 1), "");
        assert_eq!(of(0, 0), "");
        assert!(matches!(range(chunks(), 4, 2), Cow::Borrowed(b"ef")));
    }
}
