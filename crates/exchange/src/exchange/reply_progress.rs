//! The tokens of one reply: the times when they arrived, and the tokens not reported to the pool
//! yet.

use pool_state::{Timestamp, ms_between};
use scheduler::EndpointRef;

use crate::sse::ChunkProgress;

/// The number of tokens after which their mean pace is published. With this number, a slower stream
/// is noticed soon, and publishing costs nothing.
const PACE_TOKENS: u32 = 16;

/// The interval at which a stream reports its tokens to the pool, in ms. The pool reads them for
/// load reports, which are sent every 100 ms or less often. A stream of 100 tokens/s then calls the
/// pool once for five tokens. The few tokens between which the pool measures a gap are reported at
/// once.
const REPORT_MS: u64 = 50;

#[derive(Debug)]
pub(super) struct ReplyProgress {
    pub(super) first_token_at: Option<Timestamp>,
    pub(super) last_token_at: Option<Timestamp>,
    unreported: UnreportedProgress,
    /// The pool measures a gap after this many more tokens.
    measured_after: u32,
    /// The tokens whose pace is not published yet, and the time before the first of them.
    paced_tokens: u32,
    paced_since: Timestamp,
}

/// The progress since it was reported to the pool.
#[derive(Debug)]
pub(super) struct UnreportedProgress {
    /// The time of the previous report.
    since: Timestamp,
    /// Tokens, counted as events of the stream.
    pub(super) tokens: u32,
    /// Whether the first token is one of them.
    pub(super) first_token: bool,
    /// The endpoint that stored the answer, and the hash of the answer's id.
    pub(super) stored: Option<(EndpointRef, u64)>,
}

// === impl ReplyProgress ===

impl ReplyProgress {
    pub(super) const fn new(now: Timestamp) -> Self {
        Self {
            first_token_at: None,
            last_token_at: None,
            unreported: UnreportedProgress::new(now),
            measured_after: u32::MAX,
            paced_tokens: 0,
            paced_since: now,
        }
    }

    pub(super) fn add_chunk(&mut self, chunk: &ChunkProgress, now: Timestamp) {
        if chunk.first_token {
            self.first_token_at = Some(now);
            self.unreported.first_token = true;
        }
        if chunk.events > 0 {
            self.last_token_at = Some(now);
            self.unreported.tokens = self.unreported.tokens.saturating_add(chunk.events);
        }
    }

    /// Records that an endpoint stored the answer under the id with this hash.
    pub(super) const fn add_stored(&mut self, answer: (EndpointRef, u64)) {
        self.unreported.stored = Some(answer);
    }

    /// Whether a report to the pool is due.
    pub(super) fn is_report_due(&self, now: Timestamp) -> bool {
        let unreported = &self.unreported;
        unreported.first_token
            || unreported.stored.is_some()
            || (unreported.tokens > 0
                && (unreported.tokens >= self.measured_after
                    || now.ms_since(unreported.since) >= REPORT_MS))
    }

    /// Makes the report due after `tokens` more tokens, or [`REPORT_MS`].
    pub(super) const fn measure_after(&mut self, tokens: u32) {
        self.measured_after = tokens;
    }

    pub(super) const fn take_unreported(&mut self, now: Timestamp) -> UnreportedProgress {
        std::mem::replace(&mut self.unreported, UnreportedProgress::new(now))
    }

    /// Adds reported tokens. Returns their mean pace in ms per token, once there are enough.
    #[expect(clippy::cast_precision_loss, reason = "a few tokens")]
    pub(super) fn take_pace(
        &mut self,
        reported: &UnreportedProgress,
        now: Timestamp,
    ) -> Option<f32> {
        if reported.first_token {
            // Tokens that arrive with the first token have no pace, because their time is the TTFT.
            self.paced_since = now;
            return None;
        }
        self.paced_tokens = self.paced_tokens.saturating_add(reported.tokens);
        if self.paced_tokens < PACE_TOKENS {
            return None;
        }
        let pace_ms = ms_between(self.paced_since, now) / self.paced_tokens as f32;
        self.paced_since = now;
        self.paced_tokens = 0;
        Some(pace_ms)
    }
}

// === impl UnreportedProgress ===

impl UnreportedProgress {
    const fn new(since: Timestamp) -> Self {
        Self {
            since,
            tokens: 0,
            first_token: false,
            stored: None,
        }
    }
}
