//! What one proxy VM knows of one pool, and the verbs that change it: pick, record, place, eject, count.
//!
//! A host (the wasm filter, the ext_proc server, the simulator) owns one [`Pool`] for each pool and each VM. There is no I/O here and no HTTP:
//! time and randomness are arguments, what a pick is refused for is a [`PickRefusal`], and what an answer of an endpoint means is a
//! [`Verdict`].
#![deny(clippy::indexing_slicing, clippy::string_slice)]
#![forbid(unsafe_code)]

mod pool;
pub use pool::*;

mod refusal;
pub use refusal::PickRefusal;

mod time;
pub use time::Timestamp;

mod usage;
pub use usage::TokenUsage;

pub mod verdict;
pub use verdict::Verdict;
