//! The streams of one worker thread: bodies that are not complete, bodies kept for retries, and
//! sent requests.
//!
//! Only the worker changes it, except that the main thread looks at the sent requests once a
//! second. So its lock is nearly always free.

use std::sync::{Arc, Mutex, Weak};

use exchange::KeptBodies;
use exchange::bodies::BodiesInProgress;

use crate::waker::StreamWaker;

pub(crate) type SharedWorker = Arc<Mutex<WorkerStreams>>;

#[derive(Default)]
pub(crate) struct WorkerStreams {
    pub(crate) bodies: BodiesInProgress<Weak<StreamWaker>>,
    pub(crate) kept: KeptBodies,
    /// The sent requests that have not ended, by index. A free index has `None`.
    replies: Vec<Option<Weak<StreamWaker>>>,
    free: Vec<usize>,
}

// === impl WorkerStreams ===

impl WorkerStreams {
    /// Watches a sent request. Returns its index.
    pub(crate) fn watch_reply(&mut self, stream: Weak<StreamWaker>) -> usize {
        let place = self.free.pop().unwrap_or(self.replies.len());
        match self.replies.get_mut(place) {
            Some(empty) => *empty = Some(stream),
            None => self.replies.push(Some(stream)),
        }
        place
    }

    /// Stops watching the request at index `place`, and frees the index.
    pub(crate) fn forget_reply(&mut self, place: usize) {
        if let Some(reply) = self.replies.get_mut(place) {
            *reply = None;
            self.free.push(place);
        }
    }

    /// Returns the streams of the sent requests.
    pub(crate) fn sent(&self) -> Vec<Arc<StreamWaker>> {
        self.replies
            .iter()
            .flatten()
            .filter_map(Weak::upgrade)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_used_again_after_its_request() {
        let waker = Arc::new(StreamWaker::new(None));
        let mut worker = WorkerStreams::default();
        let places = [0, 1].map(|_| worker.watch_reply(Arc::downgrade(&waker)));
        assert_eq!((places, worker.sent().len()), ([0, 1], 2));
        worker.forget_reply(0);
        assert_eq!(worker.sent().len(), 1);
        assert_eq!(worker.watch_reply(Arc::downgrade(&waker)), 0);
        drop(waker);
        assert!(worker.sent().is_empty(), "the streams are gone");
    }
}
