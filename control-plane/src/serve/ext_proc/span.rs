//! The span of one request at the ext_proc server. It belongs to the trace of the gateway, by the
//! W3C trace context; a request without a sampled trace has none.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use exchange::trace::TRACEPARENT;
use tokio::sync::mpsc;

/// The most spans that wait for the collector: some seconds of a busy gateway whose every request
/// is sampled. Further ones are dropped and counted.
pub const SPANS_WAITING_MAX: usize = 8_192;

/// The most attributes of a span; a request has about fifteen.
const ATTRIBUTES_MAX: usize = 32;

/// The parent of a span, from a `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace.
    pub trace_id: u128,
    /// The span that called.
    pub parent: u64,
    /// Whether the caller records the trace.
    pub sampled: bool,
}

/// A span. Its attributes are names and values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestSpan {
    /// The trace and the parent.
    pub context: TraceContext,
    /// The span itself.
    pub id: u64,
    /// When the headers of the request came.
    pub began: SystemTime,
    /// When the stream ended.
    pub ended: SystemTime,
    /// What is known of the request.
    pub attributes: Vec<(String, String)>,
}

/// The counts of spans.
#[derive(Debug, Default)]
pub struct SpanCounts {
    /// Spans that the collector has.
    pub sent: AtomicU64,
    /// Spans that it did not take.
    pub failed: AtomicU64,
    /// Spans that did not fit into the queue.
    pub dropped: AtomicU64,
}

/// Where finished spans go.
#[derive(Clone, Debug)]
pub struct SpanQueue {
    spans: mpsc::Sender<RequestSpan>,
    counts: Arc<SpanCounts>,
}

// === impl TraceContext ===

impl TraceContext {
    /// Reads a `traceparent` of version 00, or of a later one that begins alike.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let mut part = |length: usize| {
            parts.next().filter(|part| part.len() == length && part.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'a'..=b'f')))
        };
        let (version, trace, parent, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        let trace_id = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
        let parent = u64::from_str_radix(parent, 16).ok().filter(|id| *id != 0)?;
        let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        let is_whole = version != "ff" && (version != "00" || parts.next().is_none());
        is_whole.then_some(Self { trace_id, parent, sampled })
    }

    /// Reads the header of a request.
    pub fn in_headers<'h>(mut pairs: impl Iterator<Item = (&'h [u8], &'h [u8])>) -> Option<Self> {
        let (_, value) = pairs.find(|(name, _)| *name == TRACEPARENT.as_bytes())?;
        Self::parse(std::str::from_utf8(value).ok()?)
    }
}

// === impl RequestSpan ===

impl RequestSpan {
    /// A span that begins now.
    #[must_use]
    pub fn begin(context: TraceContext) -> Self {
        let now = SystemTime::now();
        Self { context, id: rand::random::<u64>().max(1), began: now, ended: now, attributes: Vec::new() }
    }

    /// Adds an attribute under our prefix.
    pub fn tag(&mut self, name: &str, value: impl Into<String>) {
        if self.attributes.len() < ATTRIBUTES_MAX {
            self.attributes.push((format!("switchpoint.{name}"), value.into()));
        }
    }

    /// The memory of the span, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.attributes.iter().map(|(name, value)| name.capacity() + value.capacity()).sum()
    }
}

// === impl SpanQueue ===

impl SpanQueue {
    /// A queue, and its end for the exporter.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<RequestSpan>) {
        let (spans, receiver) = mpsc::channel(SPANS_WAITING_MAX);
        (Self { spans, counts: Arc::default() }, receiver)
    }

    /// The counts of the spans.
    #[must_use]
    pub fn counts(&self) -> &Arc<SpanCounts> {
        &self.counts
    }

    /// Ends a span, and sends it unless too many wait.
    pub fn end(&self, span: RequestSpan) {
        if self.spans.try_send(RequestSpan { ended: SystemTime::now(), ..span }).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_trace_context_is_read_as_the_w3c_says() {
        let read = TraceContext::parse(PARENT).unwrap();
        let expected = TraceContext { trace_id: 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c, parent: 0xb7ad_6b71_6920_3331, sampled: true };
        assert_eq!(read, expected);
        assert!(!TraceContext::parse(&PARENT.replace("-01", "-00")).unwrap().sampled);
        assert!(TraceContext::parse(&(PARENT.replacen("00", "01", 1) + "-later")).is_some());
        let invalid = [
            PARENT.to_uppercase(),
            format!("{PARENT}-more"),
            PARENT.replacen("00", "ff", 1),
            PARENT.replace("b7ad6b7169203331", "0000000000000000"),
            PARENT.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            PARENT.replace("-01", ""),
            String::new(),
        ];
        assert_eq!(invalid.iter().filter_map(|text| TraceContext::parse(text)).next(), None);
        let headers: [(&[u8], &[u8]); 2] = [(b":path", b"/"), (b"traceparent", PARENT.as_bytes())];
        assert_eq!(TraceContext::in_headers(headers.into_iter()), Some(expected));
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (queue, mut spans) = SpanQueue::new();
        let span = RequestSpan::begin(TraceContext::parse(PARENT).unwrap());
        (0..SPANS_WAITING_MAX + 3).for_each(|_| queue.end(span.clone()));
        assert_eq!((queue.counts().dropped.load(Ordering::Relaxed), spans.try_recv().is_ok()), (3, true));
    }
}
