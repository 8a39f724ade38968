//! From a parsed body to the chained hashes of its prompt.

use scheduler::prefix::{BlockHasher, DENSE_BLOCKS, STRIDE};
use scheduler::{PrefixSettings, TokenSettings};

use crate::body::{Parsed, Piece};

/// Hashes of the prompt's blocks, first block first, each chained over all before it and over the `model` that is to read it, keyed by the
/// deployment's secret.
pub(crate) fn blocks(parsed: &Parsed<'_>, model: &str, secret: u64, settings: PrefixSettings) -> Vec<u64> {
    let block_bytes = settings.block_bytes();
    let expected = (parsed.prompt_bytes / block_bytes.max(1)).min(settings.blocks_max);
    let mut hashes = Vec::with_capacity(expected.min(DENSE_BLOCKS) + expected.saturating_sub(DENSE_BLOCKS) / STRIDE + 2);
    let mut hasher = BlockHasher::new(secret, model.as_bytes(), b"", parsed.cache_salt, block_bytes).up_to(settings.blocks_max);
    for piece in parsed.prompt() {
        match piece {
            Piece::Text(bytes) => hasher.update(bytes, &mut hashes),
            Piece::Media(bytes) => hasher.opaque(bytes, &mut hashes),
        }
        hasher.separator(&mut hashes);
    }
    hasher.finish(&mut hashes);
    hashes
}

/// Bytes of the prompt where it is text alone, as far as they can be counted; else 0.
pub(crate) fn text_bytes(parsed: &Parsed<'_>) -> u32 {
    let mixed = parsed.prompt_token_ids > 0 || parsed.media_items > 0;
    u32::try_from(parsed.prompt_bytes).ok().filter(|_| !mixed).unwrap_or(0)
}

/// Estimated tokens of the prompt: what its bytes of text are by `text`, the ids where the client sent those, and what images count for.
pub(crate) fn tokens(parsed: &Parsed<'_>, settings: TokenSettings, text: impl Fn(usize) -> u32) -> u32 {
    text(parsed.prompt_bytes)
        .saturating_add(parsed.prompt_token_ids)
        .saturating_add(parsed.media_items.saturating_mul(settings.media_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Api;
    use crate::body;

    #[test]
    fn only_a_prompt_of_text_alone_says_how_many_tokens_a_byte_is() {
        let text = body::parse(Api::of(b"POST", b"/v1/completions"), br#"{"model": "m", "prompt": "four"}"#).unwrap();
        let with = |prompt_token_ids, media_items| {
            let mut prompt = text.clone();
            (prompt.prompt_token_ids, prompt.media_items) = (prompt_token_ids, media_items);
            text_bytes(&prompt)
        };
        assert_eq!([with(0, 0), with(1, 0), with(0, 1), with(1, 1)], [4, 0, 0, 0]);
    }
}
