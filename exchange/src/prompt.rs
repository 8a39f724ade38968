//! From a parsed body to the chained hashes of its prompt.

use scheduler::prefix::{BLOCKS_MAX, BlockHasher};

use crate::body::{Parsed, Piece};
use crate::pool::{BLOCK_BYTES, BYTES_PER_TOKEN};

/// Hashes of the prompt's blocks, first block first, each chained over all before it and over the `model` that is to read it, keyed by the
/// deployment's secret.
pub(crate) fn blocks(parsed: &Parsed<'_>, model: &str, secret: u64) -> Vec<u64> {
    let mut blocks = Vec::with_capacity((parsed.prompt_bytes / BLOCK_BYTES + 2).min(BLOCKS_MAX));
    let mut hasher = BlockHasher::new(secret, model.as_bytes(), b"", parsed.cache_salt, BLOCK_BYTES);
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

/// Estimated tokens of the prompt: its text at [`BYTES_PER_TOKEN`], and the ids where the client sent those.
pub(crate) fn tokens(parsed: &Parsed<'_>) -> u32 {
    u32::try_from(parsed.prompt_bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX).saturating_add(parsed.prompt_token_ids)
}
