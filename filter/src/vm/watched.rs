//! The streams on which the VM acts in callbacks of a root context: sent requests that may make no
//! progress, and bodies for which there is no room.

use std::rc::{Rc, Weak};

use exchange::bodies::BodiesInProgress;
use exchange::{KeptBodies, Timestamp};

use super::parked_request::ParkedRequest;

/// The interval at which sent requests are checked, in ms: a fifth of the shortest silence after
/// which the filter acts on a request.
const CHECK_MS: u64 = 1_000;

/// The maximum number of local replies in one callback of a root context. Envoy sends these replies
/// after the callback. Each reply calls the VM, and before this call returns, Envoy sends the next
/// reply. So each reply takes more of the stack, for which V8 allows about 1 MB: with this maximum,
/// each reply may take 15 KB.
const LOCAL_REPLIES_MAX: usize = 64;

#[derive(Default)]
pub struct WatchedStreams {
    pub bodies: BodiesInProgress<Weak<dyn ParkedRequest>>,
    pub kept: KeptBodies,
    /// The sent requests of this VM that have not ended, by index. A free index has `None`.
    replies: Vec<Option<Weak<dyn ParkedRequest>>>,
    free: Vec<usize>,
    /// The time when the last round of checks began.
    checked: Timestamp,
    /// The index that the round of checks has come to, if the round has not ended.
    place: Option<usize>,
    /// The number of local replies since the last callback of a root context began.
    local_replies: usize,
}

// === impl WatchedStreams ===

impl WatchedStreams {
    /// Watches a sent request from now on. Returns the index of the request.
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

    /// Returns the next sent request to check now, if a round of checks is due.
    pub fn next_reply(&mut self, now: Timestamp) -> Option<Rc<dyn ParkedRequest>> {
        while let Some(place) = self.next_place(now) {
            let reply = self.replies.get(place).and_then(Option::as_ref);
            if let Some(request) = reply.and_then(Weak::upgrade) {
                return Some(request);
            }
        }
        None
    }

    /// Returns the next index to check now, if a round of checks is due.
    fn next_place(&mut self, now: Timestamp) -> Option<usize> {
        let place = match self.place {
            Some(place) => place,
            None if now.ms_since(self.checked) < CHECK_MS => return None,
            None => {
                self.checked = now;
                0
            }
        };
        self.place = (place < self.replies.len()).then(|| place.saturating_add(1));
        self.place.map(|_| place)
    }

    /// Records that a callback of a root context begins, which may send new local replies.
    pub fn begin_callback(&mut self) {
        self.local_replies = 0;
    }

    pub fn count_local_reply(&mut self) {
        self.local_replies = self.local_replies.saturating_add(1);
    }

    /// Whether this callback may send another local reply.
    pub fn may_reply(&self) -> bool {
        self.local_replies < LOCAL_REPLIES_MAX
    }
}

impl std::fmt::Debug for WatchedStreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WatchedStreams")
            .field("replies", &self.replies.len())
            .finish_non_exhaustive()
    }
}
