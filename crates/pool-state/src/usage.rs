//! Token counts of one exchange, as the engine reports them.

/// The token counts of one exchange. `None` means unknown, not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: Option<u32>,
    /// Tokens generated.
    pub completion_tokens: Option<u32>,
    /// Tokens of the prompt that the engine took from its prefix cache.
    pub cached_tokens: Option<u32>,
    /// Whether `completion_tokens` was counted by events, because the engine reported none.
    pub estimated: bool,
}
