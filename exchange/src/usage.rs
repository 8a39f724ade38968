//! Token counts as engines report them in `usage`, in the spelling of each API.

use crate::json::{JsonError, Reader};

/// What one exchange cost. Absent is not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: Option<u32>,
    /// Tokens generated.
    pub completion_tokens: Option<u32>,
    /// Tokens of the prompt that the engine took from its prefix cache.
    pub cached_tokens: Option<u32>,
    /// `completion_tokens` is our count of events, since the engine reported none.
    pub estimated: bool,
}

// === impl Usage ===

impl Usage {
    /// Reads a `usage` object. What it names replaces what was known, what it does not name stays.
    ///
    /// OpenAI counts cached tokens within `prompt_tokens` (`input_tokens` in Responses); Anthropic counts them beside `input_tokens`.
    pub(crate) fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), JsonError> {
        let mut beside = 0_u32;
        let mut seen = Self::default();
        reader.members(|reader, key| {
            match key.name().as_ref() {
                b"prompt_tokens" | b"input_tokens" => seen.prompt_tokens = reader.count()?,
                b"completion_tokens" | b"output_tokens" => seen.completion_tokens = reader.count()?,
                b"prompt_tokens_details" | b"input_tokens_details" => reader.members(|reader, key| match key.name().as_ref() {
                    b"cached_tokens" => reader.count().map(|count| seen.cached_tokens = count),
                    _ => reader.skip().map(drop),
                })?,
                b"cached_tokens" => seen.cached_tokens = reader.count()?,
                b"cache_read_input_tokens" => {
                    seen.cached_tokens = reader.count()?;
                    beside = beside.saturating_add(seen.cached_tokens.unwrap_or(0));
                }
                b"cache_creation_input_tokens" => beside = beside.saturating_add(reader.count()?.unwrap_or(0)),
                _ => return reader.skip().map(drop),
            }
            Ok(())
        })?;
        self.prompt_tokens = seen.prompt_tokens.map(|tokens| tokens.saturating_add(beside)).or(self.prompt_tokens);
        self.completion_tokens = seen.completion_tokens.or(self.completion_tokens);
        self.cached_tokens = seen.cached_tokens.or(self.cached_tokens);
        Ok(())
    }
}
