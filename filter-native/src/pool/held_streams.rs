//! The streams of the requests that a pool holds or may give up, by the request's number.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use crate::waker::{StreamWaker, WakeReason};

/// Ended streams are removed once this many streams are known beyond twice the number of those that
/// were left after the last removal.
const ENDED_STREAMS_MAX: usize = 64;

/// The maximum number of requests that were due before their stream was known. A worker makes its
/// stream known within µs.
const MISSED_MAX: usize = 64;

#[derive(Default)]
pub(crate) struct HeldStreams {
    streams: BTreeMap<u64, Weak<StreamWaker>>,
    /// The number of streams that were left when ended streams were last removed.
    alive: usize,
    /// The requests that were due after a worker queued them, but before it made their stream
    /// known, because another worker freed room meanwhile.
    missed: Vec<u64>,
}

// === impl HeldStreams ===

impl HeldStreams {
    /// Makes the stream of a request known. Wakes the stream at once if its request was due before.
    pub(crate) fn hold(&mut self, number: u64, stream: &Arc<StreamWaker>) {
        let most = self.alive.saturating_mul(2);
        if self.streams.len() > most.saturating_add(ENDED_STREAMS_MAX) {
            self.streams.retain(|_, stream| stream.strong_count() > 0);
            self.alive = self.streams.len();
        }
        self.streams.insert(number, Arc::downgrade(stream));
        let before = self.missed.len();
        self.missed.retain(|missed| *missed != number);
        if self.missed.len() < before {
            stream.wake(WakeReason::Resume);
        }
    }

    /// Wakes the stream of a request that is due. Returns false if there is no such stream.
    pub(crate) fn wake(&mut self, number: u64) -> bool {
        match self.streams.get(&number) {
            Some(stream) => stream
                .upgrade()
                .is_some_and(|stream| stream.wake(WakeReason::Resume)),
            None => {
                if self.missed.len() < MISSED_MAX {
                    self.missed.push(number);
                }
                false
            }
        }
    }

    /// Forgets requests that were due without a stream: their streams have ended.
    pub(crate) fn forget_missed(&mut self) {
        self.missed.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_was_due_too_early_is_due_when_its_stream_is_known() {
        let mut held = HeldStreams::default();
        assert!(!held.wake(7));
        assert_eq!(held.missed, [7]);
        let stream = Arc::new(StreamWaker::new(None));
        held.hold(7, &stream);
        assert!(held.missed.is_empty());
        assert!(!held.wake(7), "its stream has ended");
        assert!(held.missed.is_empty(), "it was known");
    }

    #[test]
    fn ended_streams_are_removed() {
        let mut held = HeldStreams::default();
        for number in 0..1_000 {
            held.hold(number, &Arc::new(StreamWaker::new(None)));
        }
        assert!(held.streams.len() < 200, "{}", held.streams.len());
    }
}
