//! The streams on which the VM acts from a root context: sent requests that may make no progress,
//! and bodies without room.

use std::rc::{Rc, Weak};

use exchange::Timestamp;

use super::bodies::BodiesInProgress;
use super::parked_request::ParkedRequest;

/// The interval at which sent requests are checked, in ms: a fifth of the shortest time without a
/// byte after which a request is judged.
const CHECK_MS: u64 = 1_000;

#[derive(Default)]
pub struct WatchedStreams {
    pub bodies: BodiesInProgress,
    /// The sent requests of this VM that have not ended, and empty places.
    replies: Vec<Option<Weak<dyn ParkedRequest>>>,
    /// The empty places.
    free: Vec<usize>,
    checked: Timestamp,
}

// === impl WatchedStreams ===

impl WatchedStreams {
    /// Watches a sent request from now on. Returns its place.
    pub fn watch_reply(&mut self, stream: Weak<dyn ParkedRequest>) -> usize {
        let place = self.free.pop().unwrap_or(self.replies.len());
        match self.replies.get_mut(place) {
            Some(empty) => *empty = Some(stream),
            None => self.replies.push(Some(stream)),
        }
        place
    }

    /// Stops watching the request at index `place`, and frees the index.
    pub fn forget_reply(&mut self, place: usize) {
        if let Some(reply) = self.replies.get_mut(place) {
            *reply = None;
            self.free.push(place);
        }
    }

    /// Returns the number of places to check now; 0 if no check is due.
    pub fn due_replies(&mut self, now: Timestamp) -> usize {
        if now.ms_since(self.checked) < CHECK_MS {
            return 0;
        }
        self.checked = now;
        self.replies.len()
    }

    pub fn reply(&self, place: usize) -> Option<Rc<dyn ParkedRequest>> {
        self.replies.get(place)?.as_ref()?.upgrade()
    }
}

impl std::fmt::Debug for WatchedStreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WatchedStreams")
            .field("replies", &self.replies.len())
            .finish_non_exhaustive()
    }
}
