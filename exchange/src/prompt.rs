//! Computes the chained hashes of the prompt of a parsed body.

use scheduler::prefix::{BlockHasher, DENSE_BLOCKS, STRIDE, blocks_of};
use scheduler::{PrefixSettings, TokenSettings};

use crate::body::{ParsedRequest, PromptPiece};

/// Returns the hashes of the prompt's blocks, first block first. Each hash covers all blocks before
/// it and the `model`, and is keyed by the deployment's secret.
pub(crate) fn blocks(parsed: &ParsedRequest<'_>, model: &str, secret: u128, settings: PrefixSettings) -> Vec<u64> {
    let block_bytes = settings.block_bytes();
    let expected = (parsed.prompt_bytes / block_bytes.max(1)).min(settings.blocks_max);
    let mut hashes = Vec::with_capacity(expected.min(DENSE_BLOCKS) + expected.saturating_sub(DENSE_BLOCKS) / STRIDE + 2);
    let mut hasher = BlockHasher::new(secret, model.as_bytes(), b"", parsed.cache_salt, block_bytes).up_to(settings.blocks_max);
    for piece in parsed.prompt() {
        match piece {
            PromptPiece::Text(bytes) => hasher.update(bytes, &mut hashes),
            PromptPiece::Media(bytes) => hasher.opaque(bytes, &mut hashes),
        }
        hasher.separator(&mut hashes);
    }
    hasher.finish(&mut hashes);
    hashes
}

/// Returns the bytes of a prompt that has only text; 0 for other prompts.
pub(crate) fn text_bytes(parsed: &ParsedRequest<'_>) -> u32 {
    let mixed = parsed.prompt_token_ids > 0 || parsed.media_items > 0;
    u32::try_from(parsed.prompt_bytes).ok().filter(|_| !mixed).unwrap_or(0)
}

/// Returns the number of blocks with these hashes, if the prompt's tokens are spread evenly over
/// them.
pub(crate) fn even_blocks(parsed: &ParsedRequest<'_>, hashes: &[u64], settings: PrefixSettings) -> Option<u32> {
    let blocks = blocks_of(hashes, hashes.len());
    let whole = usize::try_from(blocks).is_ok_and(|blocks| blocks < settings.blocks_max);
    (whole && parsed.media_items == 0).then_some(blocks)
}

/// Estimates the tokens of the prompt: `text` estimates its text; token ids count if the client
/// sent them; images have a fixed count.
pub(crate) fn tokens(parsed: &ParsedRequest<'_>, settings: TokenSettings, text: impl Fn(usize) -> u32) -> u32 {
    text(parsed.prompt_bytes)
        .saturating_add(parsed.prompt_token_ids)
        .saturating_add(parsed.media_items.saturating_mul(settings.media_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::RequestApi;
    use crate::body;

    fn four() -> ParsedRequest<'static> {
        body::parse(RequestApi::of(b"POST", b"/v1/completions"), br#"{"model": "m", "prompt": "four"}"#).unwrap()
    }

    #[test]
    fn only_a_prompt_of_text_alone_says_how_many_tokens_a_byte_is() {
        let with = |prompt_token_ids, media_items| {
            let mut prompt = four();
            (prompt.prompt_token_ids, prompt.media_items) = (prompt_token_ids, media_items);
            text_bytes(&prompt)
        };
        assert_eq!([with(0, 0), with(1, 0), with(0, 1), with(1, 1)], [4, 0, 0, 0]);
    }

    #[test]
    fn only_of_a_whole_prompt_without_images_a_part_of_its_tokens_is_that_part_of_its_blocks() {
        let blocks = |media_items, blocks_max| {
            let mut prompt = four();
            prompt.media_items = media_items;
            let settings = PrefixSettings { block_tokens: 64, blocks_max, blocks_per_endpoint: 100, auto_tune: false };
            even_blocks(&prompt, &[2, 4, 6, 8], settings)
        };
        assert_eq!([blocks(0, 5), blocks(0, 4), blocks(1, 5)], [Some(4), None, None]);
    }
}
