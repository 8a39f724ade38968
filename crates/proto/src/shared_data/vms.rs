//! The rows of the VM table, and the leader's data about other proxies.

use scheduler::Timestamp;

use crate::state;
use crate::words;

const ROW_WORDS: usize = 4;

/// The row of a VM in the VM table. The bytes have the VM, the time of its last heartbeat, its
/// queue, and 1 if the VM serves requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmEntry {
    /// The random identity of the VM; 0 means no VM.
    pub vm: u64,
    pub heartbeat: Timestamp,
    /// The queue that wakes the VM; 0 before the VM has a queue.
    pub queue: u32,
    /// Whether the VM has ever served a request.
    pub serves: bool,
}

/// The leader's counts of the other proxies of a pool. The field `ring` in the head of those
/// proxies' load report has these counts: 15 bits for `proxies`, a bit for `holds`, 16 bits for
/// `active`, and 32 bits for `delay_us`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemotePeers {
    /// The number of proxies of the pool, including this proxy.
    pub proxies: u32,
    /// The number of other proxies that reported recently.
    pub active: u32,
    /// The age of the other proxies' reports when these reports arrive, in µs.
    pub delay_us: u32,
    /// Whether another proxy holds requests.
    pub holds: bool,
}

/// The bit of the encoded number of proxies that is set if [`RemotePeers::holds`] is true.
const HOLDS_FLAG: u64 = 1 << 15;

// === impl VmEntry ===

impl VmEntry {
    /// Reads the rows of a table, at most `rows_max`.
    #[must_use]
    pub fn read_table(table: &[u8], rows_max: usize) -> Vec<Self> {
        let mut rest = table;
        let row = || {
            let ([vm, heartbeat, queue, serves], tail) = words::split::<ROW_WORDS>(rest)?;
            rest = tail;
            Some(Self {
                vm,
                heartbeat: Timestamp(heartbeat),
                queue: u32::try_from(queue).unwrap_or(0),
                serves: serves == 1,
            })
        };
        std::iter::from_fn(row).take(rows_max).collect()
    }

    /// Encodes a table with these rows.
    #[must_use]
    pub fn write_table(rows: &[Self]) -> Vec<u8> {
        let words: Vec<u64> = rows
            .iter()
            .flat_map(|row| {
                [
                    row.vm,
                    row.heartbeat.0,
                    u64::from(row.queue),
                    u64::from(row.serves),
                ]
            })
            .collect();
        words::write(&words, &[])
    }
}

// === impl RemotePeers ===

impl RemotePeers {
    /// Reads the numbers from a daemon's message. `delay_us` is the age of the reports in the
    /// message.
    #[must_use]
    pub fn of_message(message: &state::PeerLoad, delay_us: u32) -> Self {
        Self {
            proxies: message.proxies,
            active: message.active,
            delay_us,
            holds: !message.backlog.is_empty(),
        }
    }

    /// Encodes the numbers as a word.
    #[must_use]
    pub fn to_word(self) -> u64 {
        let short = |count: u32, max: u32| u64::from(count.min(max));
        let holds = if self.holds { HOLDS_FLAG } else { 0 };
        short(self.proxies, 0x7fff)
            | holds
            | short(self.active, 0xffff) << 16
            | u64::from(self.delay_us) << 32
    }

    /// Decodes a word. Every word is valid.
    #[must_use]
    pub fn of_word(word: u64) -> Self {
        let [a, b, c, d, delay @ ..] = word.to_le_bytes();
        let short = |bytes| u32::from(u16::from_le_bytes(bytes));
        let holds = word & HOLDS_FLAG != 0;
        Self {
            proxies: short([a, b & 0x7f]),
            active: short([c, d]),
            delay_us: u32::from_le_bytes(delay),
            holds,
        }
    }
}
