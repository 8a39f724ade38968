//! The causes of missed prompt tokens, and counts by cause.

/// The causes, in the order of [`MissCause`], as labels.
pub const MISS_CAUSES: [&str; 7] = [
    "never_seen",
    "evicted",
    "moved",
    "wrong_belief",
    "restart",
    "rounding",
    "unknown",
];

/// The reason why a part of a prompt was not cached where it was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum MissCause {
    /// No endpoint received this part, as far as the index remembers.
    NeverSeen,
    /// An endpoint received this part so long ago that the index takes it as evicted.
    Evicted,
    /// By estimate, another endpoint had this part cached, but load, a filter or a retry moved the
    /// request.
    Moved,
    /// By estimate, the endpoint should have had this part cached.
    WrongBelief,
    /// The endpoint that received this part has restarted since then, or has left the pool.
    Restart,
    /// The end of the cached part: engines cache whole blocks, and add the tokens of a template.
    Rounding,
    /// The engine did not report its cached tokens, or the prompt's blocks do not show where the
    /// tokens are.
    Unknown,
}

/// Missed tokens by cause, in the order of [`MISS_CAUSES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissedTokens(pub [u32; MISS_CAUSES.len()]);

// === impl MissedTokens ===

impl MissedTokens {
    pub(super) fn set(&mut self, cause: MissCause, tokens: u32) {
        if let Some(count) = self.0.get_mut(cause as usize) {
            *count = tokens;
        }
    }

    /// The cause of most missed tokens, and their number; `None` if there are none.
    #[must_use]
    pub fn main_cause(&self) -> Option<(&'static str, u32)> {
        let causes = MISS_CAUSES
            .into_iter()
            .zip(self.0)
            .filter(|(_, tokens)| *tokens > 0);
        causes.max_by_key(|(_, tokens)| *tokens)
    }
}
