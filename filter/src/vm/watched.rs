//! The streams on which the VM acts from a root context: replies that may make no progress, and
//! bodies without room.

use std::rc::Weak;

use exchange::Timestamp;

use super::bodies::BodiesInProgress;
use super::parked_request::ParkedRequest;

/// The interval at which replies are checked, in ms: a fifth of the shortest pause that counts.
const CHECK_MS: u64 = 1_000;

#[derive(Default)]
pub struct WatchedStreams {
    pub bodies: BodiesInProgress,
    /// The long replies of this VM that have not ended, and no others.
    replies: Vec<Weak<dyn ParkedRequest>>,
    checked: Timestamp,
}

// === impl WatchedStreams ===

impl WatchedStreams {
    /// Watches a reply from now on.
    pub fn watch_reply(&mut self, stream: Weak<dyn ParkedRequest>) {
        self.replies.push(stream);
    }

    /// Returns the replies to check now. The caller gives back those that continue.
    pub fn take_replies(&mut self, now: Timestamp) -> Vec<Weak<dyn ParkedRequest>> {
        if now.ms_since(self.checked) < CHECK_MS {
            return Vec::new();
        }
        self.checked = now;
        std::mem::take(&mut self.replies)
    }

    pub fn watch_again(&mut self, replies: Vec<Weak<dyn ParkedRequest>>) {
        self.replies.extend(replies);
    }
}

impl std::fmt::Debug for WatchedStreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WatchedStreams")
            .field("replies", &self.replies.len())
            .finish_non_exhaustive()
    }
}
