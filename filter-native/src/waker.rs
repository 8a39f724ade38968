//! Wakes a stream on its worker, from any thread.

use std::sync::Mutex;

use crate::abi::StreamScheduler;
use crate::panics::lock;

/// The work of a woken stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WakeReason {
    /// Decide a held request again, or let a held piece go on.
    Resume = 1,
    /// Check whether the client reads the reply.
    CheckReply = 2,
    /// Refuse the body, because others need its room.
    RefuseBody = 3,
}

/// Wakes one stream until [`Self::close`]. Other threads hold it weakly.
pub(crate) struct StreamWaker(Mutex<Option<StreamScheduler>>);

// === impl WakeReason ===

impl WakeReason {
    pub(crate) fn of_event(event: u64) -> Option<Self> {
        [Self::Resume, Self::CheckReply, Self::RefuseBody]
            .into_iter()
            .find(|reason| *reason as u64 == event)
    }
}

// === impl StreamWaker ===

impl StreamWaker {
    pub(crate) fn new(scheduler: Option<StreamScheduler>) -> Self {
        Self(Mutex::new(scheduler))
    }

    /// Wakes the stream soon, but not during this call. Returns false if the stream has ended.
    pub(crate) fn wake(&self, reason: WakeReason) -> bool {
        let scheduler = lock(&self.0);
        if let Some(scheduler) = &*scheduler {
            scheduler.send(reason as u64);
        }
        scheduler.is_some()
    }

    /// Wakes the stream never again. Its scheduler must go before its worker does.
    pub(crate) fn close(&self) {
        lock(&self.0).take();
    }
}
