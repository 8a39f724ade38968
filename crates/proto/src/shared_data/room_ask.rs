//! A message between VMs, through the queue that wakes a VM. The message says that a request waits
//! for room, and that the receiver may abort a running request to make this room.
//!
//! ```text
//!  mark | priority, VMs that may still be asked: 32 bits each | endpoint | name of the pool
//! ```
//! If the request can use room at every endpoint of the pool, the endpoint word is `ANYWHERE`.
//! Other messages in the queue only wake the VM.

use scheduler::flow::RoomAsk;

use crate::words::{self, pair, unpair};

/// The first word of the message: "room ask".
const MARK: u64 = u64::from_le_bytes(*b"room ask");

/// The endpoint word if the request can use room at every endpoint of the pool. No snapshot has the
/// slot in this word.
const ANYWHERE: u64 = u64::MAX;

/// Encodes the request for room `ask` in a pool. `left` is the number of further VMs that may be
/// asked.
#[must_use]
pub fn write(pool: &str, ask: RoomAsk, left: u32) -> Vec<u8> {
    let endpoint = ask
        .endpoint
        .map_or(ANYWHERE, |endpoint| words::of_endpoint(endpoint, 0));
    words::write(
        &[MARK, pair(ask.priority.cast_unsigned(), left), endpoint],
        pool.as_bytes(),
    )
}

/// Reads a message: the pool, the [`RoomAsk`], and how many further VMs may be asked. Returns
/// `None` for another kind of message.
#[must_use]
pub fn read(bytes: &[u8]) -> Option<(&str, RoomAsk, u32)> {
    let ([mark, numbers, endpoint], pool) = words::split(bytes)?;
    let (priority, left) = unpair(numbers);
    let endpoint = words::endpoint(endpoint).map(|(endpoint, _)| endpoint);
    let pool = std::str::from_utf8(pool).ok()?;
    (mark == MARK).then_some((
        pool,
        RoomAsk {
            endpoint,
            priority: priority.cast_signed(),
        },
        left,
    ))
}
