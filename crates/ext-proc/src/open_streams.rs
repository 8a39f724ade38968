//! The open streams of the ext_proc server, so that it can end those that wait too long, or whose
//! room others need.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use exchange::Timestamp;

/// A stream that may wait only for a limited time, and only while there is room for its body.
pub trait ExpiringStream: Debug + Send + Sync {
    /// Ends the stream if it has waited too long for its proxy.
    fn expire(&self, now: Timestamp);
    /// Refuses the request if its body is not complete.
    fn refuse_body(&self, now: Timestamp);
}

#[derive(Debug, Default)]
pub struct OpenStreams(Mutex<HashMap<u64, Weak<dyn ExpiringStream>>>);

// === impl OpenStreams ===

impl OpenStreams {
    /// Adds a stream, so that [`Self::expire`] checks it.
    pub fn insert(&self, number: u64, stream: Weak<dyn ExpiringStream>) {
        self.lock().insert(number, stream);
    }

    /// Removes a stream that has ended.
    pub fn remove(&self, number: u64) {
        self.lock().remove(&number);
    }

    /// The open stream with this number.
    pub fn get(&self, number: u64) -> Option<Arc<dyn ExpiringStream>> {
        self.lock().get(&number).and_then(Weak::upgrade)
    }

    /// Ends the streams that have waited too long.
    pub fn expire(&self, now: Timestamp) {
        let streams: Vec<Arc<dyn ExpiringStream>> =
            self.lock().values().filter_map(Weak::upgrade).collect();
        streams.iter().for_each(|stream| stream.expire(now));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Weak<dyn ExpiringStream>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
