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

impl Usage {
    /// Reads a `usage` object; what it names replaces what was known.
    pub(crate) fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), JsonError> {
        reader.members(|reader, key| {
            let field = match key.name().as_ref() {
                b"prompt_tokens" | b"input_tokens" => &mut self.prompt_tokens,
                b"completion_tokens" | b"output_tokens" => &mut self.completion_tokens,
                b"cache_read_input_tokens" => &mut self.cached_tokens,
                b"prompt_tokens_details" | b"input_tokens_details" => return self.read_details(reader),
                _ => return reader.skip().map(drop),
            };
            *field = reader.count()?.or(*field);
            Ok(())
        })
    }

    fn read_details(&mut self, reader: &mut Reader<'_>) -> Result<(), JsonError> {
        reader.members(|reader, key| match key.name().as_ref() {
            b"cached_tokens" => reader.count().map(|count| self.cached_tokens = count.or(self.cached_tokens)),
            _ => reader.skip().map(drop),
        })
    }
}
