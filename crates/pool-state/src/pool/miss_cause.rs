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

/// Why a part of a prompt was not cached where it was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum MissCause {
    /// No endpoint was given it, as far as the index remembers.
    NeverSeen,
    /// An endpoint was given it so long ago that it counts as evicted.
    Evicted,
    /// Another endpoint had it cached, by belief: load, a filter or a retry moved the request.
    Moved,
    /// The endpoint should have had it cached, by belief.
    WrongBelief,
    /// An endpoint was given it that has restarted since, or is gone.
    Restart,
    /// The end of what was cached: engines cache whole blocks and add the tokens of a template.
    Rounding,
    /// The engine did not say what it had cached, or the prompt's blocks do not say where tokens
    /// are.
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
