//! Token counts as engines report them in `usage`, in the spelling of each API.

pub use pool_state::TokenUsage;

use crate::json::{JsonError, JsonReader};

/// Reads a `usage` object. The members of the object replace known values, and other values stay.
///
/// OpenAI counts cached tokens within `prompt_tokens` (`input_tokens` in Responses). Anthropic
/// counts them in addition to `input_tokens`.
#[inline(never)] // several callers, and the wasm module should be small
pub(crate) fn read(usage: &mut TokenUsage, reader: &mut JsonReader<'_>) -> Result<(), JsonError> {
    let mut beside = 0_u32;
    let mut seen = TokenUsage::default();
    reader.members(|reader, key| {
        match key.name().as_ref() {
            b"prompt_tokens" | b"input_tokens" => seen.prompt_tokens = reader.count()?,
            b"completion_tokens" | b"output_tokens" => seen.completion_tokens = reader.count()?,
            b"prompt_tokens_details" | b"input_tokens_details" => {
                reader.members(|reader, key| match key.name().as_ref() {
                    b"cached_tokens" => reader.count().map(|count| seen.cached_tokens = count),
                    _ => reader.skip().map(drop),
                })?;
            }
            b"cached_tokens" => seen.cached_tokens = reader.count()?,
            b"cache_read_input_tokens" => {
                seen.cached_tokens = reader.count()?;
                beside = beside.saturating_add(seen.cached_tokens.unwrap_or(0));
            }
            b"cache_creation_input_tokens" => {
                beside = beside.saturating_add(reader.count()?.unwrap_or(0));
            }
            _ => return reader.skip().map(drop),
        }
        Ok(())
    })?;
    usage.prompt_tokens = seen
        .prompt_tokens
        .map(|tokens| tokens.saturating_add(beside))
        .or(usage.prompt_tokens);
    usage.completion_tokens = seen.completion_tokens.or(usage.completion_tokens);
    usage.cached_tokens = seen.cached_tokens.or(usage.cached_tokens);
    Ok(())
}
