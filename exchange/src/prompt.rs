//! From a parsed body to the chained hashes of its prompt.

use scheduler::prefix::BlockHasher;

use crate::body::{Parsed, Piece};
use crate::pool::BLOCK_BYTES;

/// Hashes of the prompt's blocks, first block first, each chained over all before it, keyed by the deployment's secret.
pub(crate) fn blocks(parsed: &Parsed<'_>, secret: u64) -> Vec<u64> {
    let mut blocks = Vec::with_capacity(parsed.prompt_bytes / BLOCK_BYTES + 2);
    let mut hasher = BlockHasher::new(secret, parsed.model.as_bytes(), b"", parsed.cache_salt, BLOCK_BYTES);
    for piece in &parsed.prompt {
        match piece {
            Piece::Text(bytes) => hasher.update(bytes, &mut blocks),
            Piece::Boundary => hasher.separator(&mut blocks),
        }
    }
    hasher.finish(&mut blocks);
    blocks
}
