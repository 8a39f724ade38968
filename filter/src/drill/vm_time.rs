//! Measures the time that a VM spends in the module, in test builds only (feature `drill`). The
//! time of a call lasts from the moment when the proxy calls the module until the module returns,
//! and includes host calls. What the proxy does after the return, for example to resume a request,
//! does not count. This module also answers requests that have the header of a drill.

use std::cell::Cell;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType};

use super::sharing_cost;
use crate::host::{HeaderMap, Host, MetricKind};
use crate::pairs;
use crate::root::FilterRoot;

/// The counter with the time in all VMs, in ns, without the calls that took at least
/// [`INTERRUPTED_NS`].
pub const SPENT: &str = "switchpoint_drill_vm_ns";
/// The counter with the number of calls that took at least [`INTERRUPTED_NS`].
pub const INTERRUPTED: &str = "switchpoint_drill_vm_interrupted";

/// The time from which a call counts as interrupted, in ns: the kernel gave the core to another
/// thread. In the benchmark, no call computes for a tenth of this time.
const INTERRUPTED_NS: u64 = 1_000_000;

thread_local! {
    /// The time and the number of interrupted calls of this VM that are not yet in [`SPENT`] and
    /// [`INTERRUPTED`].
    static PENDING: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

pub struct TimedRoot<H: Host> {
    context: FilterRoot<H>,
    host: H,
}

struct TimedStream<H: Host> {
    context: Box<dyn HttpContext>,
    host: H,
}

/// Makes a call, and measures its time without the time of reading the clock.
fn timed<H: Host, R>(host: &H, call: impl FnOnce() -> R) -> R {
    let before = host.now();
    let began = host.now();
    let outcome = call();
    let reading_ns = began.0.saturating_sub(before.0);
    let spent_ns = host
        .now()
        .0
        .saturating_sub(began.0)
        .saturating_sub(reading_ns);
    let (spent, interrupted) = PENDING.get();
    PENDING.set(match spent_ns {
        INTERRUPTED_NS.. => (spent, interrupted.saturating_add(1)),
        _ => (spent.saturating_add(spent_ns), interrupted),
    });
    outcome
}

/// Adds what this VM has measured to the counters.
fn report<H: Host>(host: &H) {
    let (spent, interrupted) = PENDING.take();
    for (name, amount) in [(SPENT, spent), (INTERRUPTED, interrupted)] {
        if amount > 0
            && let Ok(counter) = host.metric(MetricKind::Counter, name)
        {
            let _ = host.metric_add(counter, i64::try_from(amount).unwrap_or(i64::MAX));
        }
    }
}

// === impl TimedRoot ===

impl<H: Host> TimedRoot<H> {
    /// Measures the calls of this context and of its streams.
    pub fn new(context: FilterRoot<H>, host: H) -> Self {
        Self { context, host }
    }
}

impl<H: Host> Context for TimedRoot<H> {
    fn on_done(&mut self) -> bool {
        timed(&self.host, || self.context.on_done())
    }

    fn on_grpc_stream_message(&mut self, stream: u32, size: usize) {
        timed(&self.host, || {
            self.context.on_grpc_stream_message(stream, size);
        });
    }

    fn on_grpc_stream_close(&mut self, stream: u32, code: u32) {
        timed(&self.host, || {
            self.context.on_grpc_stream_close(stream, code);
        });
    }

    fn on_http_call_response(&mut self, call: u32, headers: usize, size: usize, trailers: usize) {
        timed(&self.host, || {
            self.context
                .on_http_call_response(call, headers, size, trailers);
        });
    }
}

impl<H: Host> RootContext for TimedRoot<H> {
    fn on_configure(&mut self, size: usize) -> bool {
        self.context.on_configure(size)
    }

    fn on_tick(&mut self) {
        timed(&self.host, || self.context.on_tick());
        report(&self.host);
    }

    fn on_queue_ready(&mut self, queue: u32) {
        timed(&self.host, || self.context.on_queue_ready(queue));
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        let context = timed(&self.host, || self.context.create_http_context(id))?;
        Some(Box::new(TimedStream {
            context,
            host: self.host.clone(),
        }))
    }

    fn get_type(&self) -> Option<ContextType> {
        self.context.get_type()
    }
}

// === impl TimedStream ===

impl<H: Host> Context for TimedStream<H> {
    fn on_done(&mut self) -> bool {
        timed(&self.host, || self.context.on_done())
    }
}

impl<H: Host> HttpContext for TimedStream<H> {
    fn on_http_request_headers(&mut self, count: usize, end_of_stream: bool) -> Action {
        let bytes = self.host.headers(HeaderMap::Request).unwrap_or_default();
        super::obey(&bytes);
        if let Some(cost) = sharing_cost::cost(&self.host, &bytes) {
            let _ = self
                .host
                .reply(200, &pairs::serialize(&[]), cost.as_bytes());
            return Action::Pause;
        }
        timed(&self.host, || {
            self.context.on_http_request_headers(count, end_of_stream)
        })
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        timed(&self.host, || {
            self.context.on_http_request_body(size, end_of_stream)
        })
    }

    fn on_http_request_trailers(&mut self, count: usize) -> Action {
        timed(&self.host, || self.context.on_http_request_trailers(count))
    }

    fn on_http_response_headers(&mut self, count: usize, end_of_stream: bool) -> Action {
        timed(&self.host, || {
            self.context.on_http_response_headers(count, end_of_stream)
        })
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        timed(&self.host, || {
            self.context.on_http_response_body(size, end_of_stream)
        })
    }

    fn on_http_response_trailers(&mut self, count: usize) -> Action {
        timed(&self.host, || self.context.on_http_response_trailers(count))
    }
}
