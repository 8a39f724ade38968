//! Prompt prefixes: block hashes, and the index of which endpoint is believed to hold which.
//!
//! An engine keeps the KV blocks of prompts it has served and skips their prefill when a prompt begins the same way. So the picker cuts a
//! prompt into blocks, hashes each over everything before it ([`BlockHasher`]), and remembers at every pick which endpoint was given which
//! hashes ([`PrefixIndex`]). What comes out of the index is a belief, right most of the time and cheap always: engines tell nobody what
//! they evict.

mod siphash;
mod xxh64;
pub(crate) use xxh64::xxh64;

mod hash;
pub use hash::{BLOCK_BYTES_DEFAULT, BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BLOCKS_MAX, BlockHasher, DENSE_BLOCKS, STRIDE, blocks_of};

mod rendezvous;
pub use rendezvous::rendezvous_endpoint;

mod lookup;
pub use lookup::Matched;
mod owners;
pub use owners::Reuse;
mod table;

mod cache_estimate;
pub use cache_estimate::CacheEstimate;

mod index;
pub use index::{ENTRIES_DEFAULT, ENTRIES_MAX, PrefixIndex, PrefixStats};
