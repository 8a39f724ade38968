//! A proxy process in memory for tests: shared data, queues and streams that work like those of the
//! real host, and a record of the calls. Clones of a host belong to the same process.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "part of tests: it fails by panicking"
)]

mod calls;
mod messages;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

pub use calls::{FakeCall, RecordedCall};
use exchange::Timestamp;
pub use messages::{encode, endpoints, metrics_message, pool_update_message};

use crate::host::{
    BodyBuffer, HeaderMap, Host, HostError, MetricKind, Result, SharedValue, WriteCondition,
};
use crate::pairs;

type FakeHook = Box<dyn FnOnce()>;

#[derive(Clone, Default)]
pub struct FakeHost(Rc<FakeProcess>);

/// The parts of the proxy that host calls read and change. Each of its fields is a cell, so that a
/// test can read one field while a call uses another field.
#[derive(Default)]
pub struct FakeProcess {
    pub now_ms: Cell<u64>,
    pub shared: RefCell<BTreeMap<String, (Vec<u8>, u32)>>,
    pub writes: Cell<u32>,
    pub reads: Cell<u32>,
    pub queues: RefCell<Vec<(String, VecDeque<Vec<u8>>)>>,
    pub properties: RefCell<BTreeMap<String, Vec<u8>>>,
    pub grpc: FakeGrpc,
    pub http: FakeHttp,
    /// The replies, the resumptions and similar effects of the calls, in order, as text.
    pub log: RefCell<Vec<String>>,
    metrics: FakeMetrics,
    /// The calls that were made since [`FakeHost::record_calls`]; `None` before the recording
    /// began.
    recorded: RefCell<Option<Vec<RecordedCall>>>,
    entropy: Cell<u64>,
    pub faults: FakeFaults,
}

/// The streams and the HTTP calls to the daemon.
#[derive(Default)]
pub struct FakeGrpc {
    /// For each opened stream, whether it is still open.
    pub streams: RefCell<Vec<bool>>,
    pub sent: RefCell<Vec<(u32, Vec<u8>)>>,
    /// The calls made to the daemon: path, session and body of each.
    pub calls: RefCell<Vec<(String, String, Vec<u8>)>>,
}

/// The current request and its response.
#[derive(Default)]
pub struct FakeHttp {
    pub request: RefCell<Vec<(String, String)>>,
    pub response: RefCell<Vec<(String, String)>>,
    /// The headers of the daemon's answer to a call.
    pub answer: RefCell<Vec<(String, String)>>,
    /// The contents that the next read of a buffer returns.
    pub buffers: RefCell<BTreeMap<u32, Vec<u8>>>,
    /// Whether writes to buffers fail.
    pub read_only: Cell<bool>,
    /// The contexts that no longer exist.
    pub removed: RefCell<Vec<u32>>,
}

#[derive(Default)]
struct FakeMetrics {
    values: RefCell<BTreeMap<String, u64>>,
    /// The names of the metrics, by number.
    names: RefCell<Vec<String>>,
}

/// The calls that fail, and what another thread does between two calls.
#[derive(Default)]
pub struct FakeFaults {
    /// The properties that cannot be read.
    pub unreadable: RefCell<Vec<String>>,
    failing: RefCell<BTreeSet<FakeCall>>,
    /// The number of calls that succeed before one call fails.
    fails_after: Cell<Option<u32>>,
    hook: RefCell<Option<FakeHook>>,
}

impl std::ops::Deref for FakeHost {
    type Target = FakeProcess;

    fn deref(&self) -> &FakeProcess {
        &self.0
    }
}

impl FakeHost {
    pub fn new() -> Self {
        let host = Self::default();
        host.now_ms.set(1_000_000);
        host
    }

    /// Runs `hook` just before the next write to shared data, to simulate another thread that
    /// writes between a VM's read and its write.
    pub fn before_next_share(&self, hook: impl FnOnce() + 'static) {
        *self.faults.hook.borrow_mut() = Some(Box::new(hook));
    }

    /// Makes every call of these kinds fail from now on, and lets calls of all other kinds succeed.
    pub fn fail(&self, kinds: &[FakeCall]) {
        *self.faults.failing.borrow_mut() = kinds.iter().copied().collect();
    }

    /// Makes a single call fail, after `count` calls, whatever their kind.
    pub fn fail_after(&self, count: u32) {
        self.faults.fails_after.set(Some(count));
    }

    fn may_fail(&self, call: FakeCall) -> Result<()> {
        let left = self.faults.fails_after.get();
        self.faults
            .fails_after
            .set(left.and_then(|left| left.checked_sub(1)));
        if left == Some(0) || self.faults.failing.borrow().contains(&call) {
            Err(HostError::INTERNAL)
        } else {
            Ok(())
        }
    }

    /// Records every call from now on.
    pub fn record_calls(&self) {
        *self.recorded.borrow_mut() = Some(Vec::new());
    }

    /// Returns the calls recorded since the last [`Self::take_calls`].
    pub fn take_calls(&self) -> Vec<RecordedCall> {
        self.recorded
            .borrow_mut()
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    fn record(&self, call: FakeCall, name: &str, sent: usize, received: usize) {
        if let Some(recorded) = &mut *self.recorded.borrow_mut() {
            recorded.push(RecordedCall {
                call,
                name: name.to_owned(),
                sent,
                received,
            });
        }
    }

    pub fn pass_ms(&self, ms: u64) {
        self.now_ms.set(self.now_ms.get() + ms);
    }

    pub fn note(&self, text: impl Into<String>) {
        self.log.borrow_mut().push(text.into());
    }

    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.borrow_mut())
    }

    pub fn metric_value(&self, name: &str) -> u64 {
        self.metrics.values.borrow().get(name).copied().unwrap_or(0)
    }

    fn map(&self, map: HeaderMap) -> &RefCell<Vec<(String, String)>> {
        match map {
            HeaderMap::Request => &self.http.request,
            HeaderMap::Response => &self.http.response,
            HeaderMap::Answer => &self.http.answer,
        }
    }
}

/// The wall-clock time at which the fake monotonic clock began.
pub const FAKE_UNIX_MS: u64 = 1_800_000_000_000;

impl Host for FakeHost {
    fn now(&self) -> Timestamp {
        self.record(FakeCall::Clock, "", 0, 0);
        Timestamp(0).plus_ms(self.now_ms.get())
    }

    fn unix_ms(&self) -> u64 {
        FAKE_UNIX_MS + self.now_ms.get()
    }

    fn entropy(&self) -> u64 {
        self.entropy.set(self.entropy.get() + 1);
        self.entropy.get()
    }

    fn shared(&self, key: &str) -> Result<Option<SharedValue>> {
        self.may_fail(FakeCall::Shared)?;
        self.reads.set(self.reads.get() + 1);
        let size = self
            .shared
            .borrow()
            .get(key)
            .map_or(0, |(bytes, _)| bytes.len());
        self.record(FakeCall::Shared, key, key.len(), size);
        Ok(self
            .shared
            .borrow()
            .get(key)
            .map(|(bytes, token)| SharedValue {
                bytes: bytes.clone(),
                token: *token,
            }))
    }

    fn share(&self, key: &str, value: &[u8], expect: WriteCondition) -> Result<()> {
        self.may_fail(FakeCall::Share)?;
        let hook = self.faults.hook.borrow_mut().take();
        if let Some(hook) = hook {
            hook();
        }
        let held = self.shared.borrow().get(key).map(|(_, token)| *token);
        match (expect, held) {
            (WriteCondition::Absent, Some(_)) => return Err(HostError::CONFLICT),
            (WriteCondition::Token(token), Some(held)) if token != held => {
                return Err(HostError::CONFLICT);
            }
            _ => {}
        }
        self.writes.set(self.writes.get() + 1);
        self.record(FakeCall::Share, key, key.len() + value.len(), 0);
        self.shared
            .borrow_mut()
            .insert(key.to_owned(), (value.to_vec(), self.writes.get()));
        Ok(())
    }

    fn queue_register(&self, name: &str) -> Result<u32> {
        self.may_fail(FakeCall::QueueRegister)?;
        self.record(FakeCall::QueueRegister, "", 0, 0);
        let mut queues = self.queues.borrow_mut();
        let position = queues
            .iter()
            .position(|(n, _)| n == name)
            .unwrap_or_else(|| {
                queues.push((name.to_owned(), VecDeque::new()));
                queues.len() - 1
            });
        Ok(u32::try_from(position).unwrap() + 1)
    }

    fn queue_push(&self, queue: u32, item: &[u8]) -> Result<()> {
        self.may_fail(FakeCall::QueuePush)?;
        self.record(FakeCall::QueuePush, "", 0, 0);
        let mut queues = self.queues.borrow_mut();
        let (_, items) = queues
            .get_mut(queue as usize - 1)
            .ok_or(HostError::NOT_FOUND)?;
        items.push_back(item.to_vec());
        Ok(())
    }

    fn queue_pop(&self, queue: u32) -> Result<Option<Vec<u8>>> {
        self.may_fail(FakeCall::QueuePop)?;
        self.record(FakeCall::QueuePop, "", 0, 0);
        let mut queues = self.queues.borrow_mut();
        let (_, items) = queues
            .get_mut(queue as usize - 1)
            .ok_or(HostError::NOT_FOUND)?;
        Ok(items.pop_front())
    }

    fn stream_open(&self, upstream: &str, service: &str, method: &str) -> Result<u32> {
        self.may_fail(FakeCall::StreamOpen)?;
        assert!(upstream.contains("switchpoint-state"));
        assert_eq!(
            (service, method),
            ("switchpoint.state.v1.StateService", "Stream")
        );
        self.grpc.streams.borrow_mut().push(true);
        Ok(u32::try_from(self.grpc.streams.borrow().len()).unwrap())
    }

    fn stream_send(&self, stream: u32, message: &[u8]) -> Result<()> {
        self.may_fail(FakeCall::StreamSend)?;
        self.record(FakeCall::StreamSend, "", 0, 0);
        if !self.grpc.streams.borrow()[stream as usize - 1] {
            return Err(HostError::NOT_FOUND);
        }
        self.grpc.sent.borrow_mut().push((stream, message.to_vec()));
        Ok(())
    }

    fn stream_cancel(&self, stream: u32) -> Result<()> {
        self.may_fail(FakeCall::StreamCancel)?;
        self.grpc.streams.borrow_mut()[stream as usize - 1] = false;
        Ok(())
    }

    fn call(
        &self,
        cluster: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        timeout_ms: u64,
    ) -> Result<u32> {
        self.may_fail(FakeCall::Call)?;
        self.record(FakeCall::Call, "", 0, 0);
        assert!(cluster == "switchpoint-state" && timeout_ms > 0);
        let value = |name: &str| {
            headers
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, value)| (*value).to_owned())
                .unwrap()
        };
        assert_eq!(
            (value(":method").as_str(), value(":authority").as_str()),
            ("POST", "switchpoint-state")
        );
        self.grpc.calls.borrow_mut().push((
            value(":path"),
            value("x-switchpoint-session"),
            body.to_vec(),
        ));
        Ok(u32::try_from(self.grpc.calls.borrow().len()).unwrap())
    }

    fn stream_status(&self) -> String {
        "unavailable".to_owned()
    }

    fn property(&self, path: &[&str]) -> Result<Option<Vec<u8>>> {
        self.may_fail(FakeCall::Property)?;
        let path = path.join(".");
        if self.faults.unreadable.borrow().contains(&path) {
            return Err(HostError::INTERNAL);
        }
        let value = self.properties.borrow().get(&path).cloned();
        self.record(
            FakeCall::Property,
            &path,
            path.len() + 1,
            value.as_ref().map_or(0, Vec::len),
        );
        Ok(value)
    }

    fn property_set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.may_fail(FakeCall::PropertySet)?;
        self.record(FakeCall::PropertySet, name, name.len() + value.len(), 0);
        self.properties
            .borrow_mut()
            .insert(name.to_owned(), value.to_vec());
        Ok(())
    }

    fn headers(&self, map: HeaderMap) -> Result<Vec<u8>> {
        self.may_fail(FakeCall::Headers)?;
        let headers = self.map(map).borrow();
        let bytes = pairs::serialize(
            &headers
                .iter()
                .map(|(n, v)| (n.as_str(), v.as_str()))
                .collect::<Vec<_>>(),
        );
        self.record(FakeCall::Headers, &format!("{map:?}"), 0, bytes.len());
        Ok(bytes)
    }

    fn header_set(&self, map: HeaderMap, name: &str, value: &[u8]) -> Result<()> {
        self.may_fail(FakeCall::HeaderSet)?;
        self.record(FakeCall::HeaderSet, name, name.len() + value.len(), 0);
        self.map(map).borrow_mut().retain(|(n, _)| n != name);
        self.map(map)
            .borrow_mut()
            .push((name.to_owned(), String::from_utf8_lossy(value).into_owned()));
        Ok(())
    }

    fn header_remove(&self, map: HeaderMap, name: &str) -> Result<()> {
        self.may_fail(FakeCall::HeaderRemove)?;
        self.record(FakeCall::HeaderRemove, name, name.len(), 0);
        self.map(map).borrow_mut().retain(|(n, _)| n != name);
        Ok(())
    }

    fn buffer(&self, buffer: BodyBuffer, start: usize, size: usize) -> Result<Vec<u8>> {
        self.may_fail(FakeCall::Buffer)?;
        let mut bytes = self
            .http
            .buffers
            .borrow()
            .get(&(buffer as u32))
            .cloned()
            .unwrap_or_default();
        bytes.drain(..start.min(bytes.len()));
        bytes.truncate(size);
        self.record(FakeCall::Buffer, &format!("{buffer:?}"), 0, bytes.len());
        Ok(bytes)
    }

    fn buffer_replace(&self, buffer: BodyBuffer, size: usize, bytes: &[u8]) -> Result<()> {
        self.may_fail(FakeCall::BufferReplace)?;
        self.record(
            FakeCall::BufferReplace,
            &format!("{buffer:?}"),
            bytes.len(),
            0,
        );
        if self.http.read_only.get() {
            return Err(HostError::INTERNAL);
        }
        let mut buffers = self.http.buffers.borrow_mut();
        let held = buffers.entry(buffer as u32).or_default();
        let rest = held.split_off(size.min(held.len()));
        *held = [bytes, &rest].concat();
        Ok(())
    }

    fn reply(&self, status: u16, _headers: &[u8], body: &[u8]) -> Result<()> {
        self.may_fail(FakeCall::Reply)?;
        self.record(FakeCall::Reply, "", 0, 0);
        self.note(format!("reply {status} {}", String::from_utf8_lossy(body)));
        Ok(())
    }

    fn resume_request(&self) -> Result<()> {
        self.may_fail(FakeCall::ResumeRequest)?;
        self.record(FakeCall::ResumeRequest, "", 0, 0);
        self.note("resume");
        Ok(())
    }

    fn focus(&self, context: u32) -> Result<()> {
        self.may_fail(FakeCall::Focus)?;
        self.record(FakeCall::Focus, "", 0, 0);
        if self.http.removed.borrow().contains(&context) {
            return Err(HostError::NOT_FOUND);
        }
        self.note(format!("focus {context}"));
        Ok(())
    }

    fn tick_period(&self, period_ms: u32) -> Result<()> {
        self.may_fail(FakeCall::TickPeriod)?;
        self.record(FakeCall::TickPeriod, "", 0, 0);
        self.note(format!("tick every {period_ms} ms"));
        Ok(())
    }

    fn metric(&self, _kind: MetricKind, name: &str) -> Result<u32> {
        self.may_fail(FakeCall::Metric)?;
        self.record(FakeCall::Metric, "", 0, 0);
        self.metrics.names.borrow_mut().push(name.to_owned());
        Ok(u32::try_from(self.metrics.names.borrow().len()).unwrap() - 1)
    }

    fn metric_add(&self, metric: u32, amount: i64) -> Result<()> {
        self.may_fail(FakeCall::MetricAdd)?;
        let name = self.metrics.names.borrow()[metric as usize].clone();
        self.record(FakeCall::MetricAdd, &name, 0, 0);
        *self.metrics.values.borrow_mut().entry(name).or_default() +=
            u64::try_from(amount).unwrap();
        Ok(())
    }

    fn metric_record(&self, metric: u32, value: u64) -> Result<()> {
        self.may_fail(FakeCall::MetricRecord)?;
        let name = self.metrics.names.borrow()[metric as usize].clone();
        self.record(FakeCall::MetricRecord, &name, 0, 0);
        self.metrics.values.borrow_mut().insert(name, value);
        Ok(())
    }

    fn follow_log_level(&self) {}
}
