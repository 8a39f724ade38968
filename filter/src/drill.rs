//! Causes faults for drills, in test builds only (feature `drill`).
//!
//! - A VM traps when it reads [`TRAP`], as if the VM had a bug. If [`TRAP`] is in a request header,
//!   the VM that serves the request traps. If [`TRAP`] is in a message from the daemon, the leader
//!   traps while it decodes the message.
//! - The first leader of a process that receives [`STALL`] from the daemon stalls for longer than a
//!   lease lasts.
//! - The gauge [`KEYS`] has the number of keys of shared data, which the host never frees.
//!
//! The shipped module has no drills. An end-to-end test searches the module for the word "drill".

pub mod sharing_cost;
pub mod vm_time;

use std::cell::RefCell;

use crate::host::{Host, MetricKind, WriteCondition};

/// The text that makes a VM trap when it reads the text.
pub const TRAP: &[u8] = b"x-drill-trap";

/// The text that makes a leader stall when it reads the text, once in a process.
pub const STALL: &[u8] = b"x-drill-stall";

/// The duration of the stall, in ms: a few times the duration of the lease in drills.
const STALL_MS: u64 = 4_000;

/// The gauge with the number of keys of shared data that each VM has written, summed over the VMs.
const KEYS: &str = "switchpoint_drill_keys";

thread_local! {
    /// The hashes of the keys that this VM has written, sorted.
    static WRITTEN: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Counts a key of shared data that this VM writes.
pub fn wrote<H: Host>(host: &H, key: &str) {
    let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let is_new = WRITTEN.with_borrow_mut(|written| match written.binary_search(&hash) {
        Ok(_) => false,
        Err(at) => {
            written.insert(at, hash);
            true
        }
    });
    if is_new && let Ok(gauge) = host.metric(MetricKind::Gauge, KEYS) {
        let _ = host.metric_add(gauge, 1);
    }
}

/// Traps if the bytes contain [`TRAP`].
pub fn obey(bytes: &[u8]) {
    if bytes.windows(TRAP.len()).any(|word| word == TRAP) {
        log::error!("a drill makes this VM trap");
        #[cfg(target_arch = "wasm32")]
        core::arch::wasm32::unreachable();
        #[cfg(not(target_arch = "wasm32"))]
        std::process::abort();
    }
}

/// Stalls if the bytes contain [`STALL`]. The stall is a busy loop, because a wasm thread cannot
/// sleep.
pub fn stall<H: Host>(host: &H, bytes: &[u8]) {
    let requested = bytes.windows(STALL.len()).any(|word| word == STALL);
    if requested
        && host
            .share("switchpoint/1/drill/stalled", b"1", WriteCondition::Absent)
            .is_ok()
    {
        log::error!("a drill makes this VM stand still");
        let until = host.now().plus_ms(STALL_MS);
        while host.now() < until {}
    }
}
