//! The span of one request at the ext_proc server. The span belongs to the trace of the gateway, by
//! the W3C trace context. A request without a sampled trace has no span.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use exchange::trace::TraceContext;
use tokio::sync::mpsc;

/// The maximum number of spans that wait for the collector: some seconds of a busy gateway whose
/// every request is sampled, and up to 16 MB. Further spans are dropped and counted.
pub const SPANS_WAITING_MAX: usize = 8_192;

/// The maximum number of attributes of a span. A request has about fifteen.
const ATTRIBUTES_MAX: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestSpan {
    /// The trace and the parent.
    pub context: TraceContext,
    pub id: u64,
    /// When the headers of the request came.
    pub began: SystemTime,
    /// When the stream ended.
    pub ended: SystemTime,
    /// Names and values of the facts about the request.
    pub attributes: Vec<(String, String)>,
}

#[derive(Debug, Default)]
pub struct SpanCounts {
    /// Spans that the collector has.
    pub sent: AtomicU64,
    /// Spans that the collector did not take.
    pub failed: AtomicU64,
    /// Spans that did not fit into the queue.
    pub dropped: AtomicU64,
}

/// The queue of finished spans.
#[derive(Clone, Debug)]
pub struct SpanQueue {
    spans: mpsc::Sender<RequestSpan>,
    counts: Arc<SpanCounts>,
}

// === impl RequestSpan ===

impl RequestSpan {
    /// A span that begins now.
    #[must_use]
    pub fn begin(context: TraceContext) -> Self {
        let now = SystemTime::now();
        Self {
            context,
            id: rand::random::<u64>().max(1),
            began: now,
            ended: now,
            attributes: Vec::new(),
        }
    }

    /// Adds an attribute with the prefix `switchpoint.`.
    pub fn tag(&mut self, name: &str, value: impl Into<String>) {
        if self.attributes.len() < ATTRIBUTES_MAX {
            self.attributes
                .push((format!("switchpoint.{name}"), value.into()));
        }
    }

    /// The memory of the span, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.attributes
            .iter()
            .map(|(name, value)| name.capacity() + value.capacity())
            .sum()
    }
}

// === impl SpanQueue ===

impl SpanQueue {
    /// A queue, and the receiver for the exporter.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<RequestSpan>) {
        let (spans, receiver) = mpsc::channel(SPANS_WAITING_MAX);
        (
            Self {
                spans,
                counts: Arc::default(),
            },
            receiver,
        )
    }

    #[must_use]
    pub fn counts(&self) -> &Arc<SpanCounts> {
        &self.counts
    }

    /// Ends a span, and sends it unless too many wait.
    pub fn end(&self, span: RequestSpan) {
        if self
            .spans
            .try_send(RequestSpan {
                ended: SystemTime::now(),
                ..span
            })
            .is_err()
        {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (queue, mut spans) = SpanQueue::new();
        let span = RequestSpan::begin(TraceContext {
            trace_id: 1,
            parent: 2,
            sampled: true,
        });
        (0..SPANS_WAITING_MAX + 3).for_each(|_| queue.end(span.clone()));
        assert_eq!(
            (
                queue.counts().dropped.load(Ordering::Relaxed),
                spans.try_recv().is_ok()
            ),
            (3, true)
        );
    }
}
