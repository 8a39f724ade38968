//! Prompt prefixes: the block hashes of a prompt, and the index that estimates which endpoint has
//! cached which blocks.
//!
//! An engine keeps the KV blocks of prompts it has served and skips their prefill when a prompt
//! starts with the same text. So the picker cuts a prompt into blocks, hashes each block together
//! with everything before it ([`block_hashes`]), and records at every pick which endpoint got which
//! hashes ([`PrefixIndex`]). The index is only an estimate, because engines do not report what they
//! evict.

mod keyed_name;
mod siphash;
mod xxh64;
pub(crate) use xxh64::xxh64;

mod hash;
pub use hash::{
    BLOCK_BYTES_DEFAULT, BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BLOCKS_MAX, DENSE_BLOCKS, OpaquePiece,
    STRIDE, SectionSums, block_hashes, blocks_of, is_wide,
};

pub use keyed_name::keyed_name;
mod rendezvous;
pub use rendezvous::rendezvous_endpoint;

mod lookup;
pub use lookup::MatchLength;
mod age_bands;
mod owners;
pub use owners::ReuseDistance;
mod table;

mod cache_estimate;
pub use cache_estimate::CacheEstimate;

mod recall;
pub use recall::RecalledLength;

mod placing;
pub use placing::BlockClaim;

mod index;
pub use index::{ENTRIES_DEFAULT, ENTRIES_MAX, PrefixIndex, PrefixStats, REQUESTED_ONCE};
