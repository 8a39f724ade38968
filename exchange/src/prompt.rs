//! From a parsed body to the chained hashes of its prompt.

use scheduler::prefix::BlockHasher;
use scheduler::{BYTES_PER_TOKEN, PrefixSettings, TokenSettings};

use crate::body::{Parsed, Piece};

/// Hashes of the prompt's blocks, first block first, each chained over all before it and over the `model` that is to read it, keyed by the
/// deployment's secret.
pub(crate) fn blocks(parsed: &Parsed<'_>, model: &str, secret: u64, settings: PrefixSettings) -> Vec<u64> {
    let block_bytes = settings.block_bytes();
    let mut blocks = Vec::with_capacity((parsed.prompt_bytes / block_bytes.max(1) + 2).min(settings.blocks_max));
    let mut hasher = BlockHasher::new(secret, model.as_bytes(), b"", parsed.cache_salt, block_bytes).up_to(settings.blocks_max);
    for piece in parsed.prompt() {
        match piece {
            Piece::Text(bytes) => hasher.update(bytes, &mut blocks),
            Piece::Media(bytes) => hasher.opaque(bytes, &mut blocks),
        }
        hasher.separator(&mut blocks);
    }
    hasher.finish(&mut blocks);
    blocks
}

/// Estimated tokens of the prompt: its text at [`BYTES_PER_TOKEN`], the ids where the client sent those, and what images count for.
pub(crate) fn tokens(parsed: &Parsed<'_>, settings: TokenSettings) -> u32 {
    let text = u32::try_from(parsed.prompt_bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX);
    text.saturating_add(parsed.prompt_token_ids).saturating_add(parsed.media_items.saturating_mul(settings.media_tokens))
}
