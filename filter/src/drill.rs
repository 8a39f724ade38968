//! Test builds only (feature `drill`): a VM traps when it reads [`TRAP`], as if it had the bug that it must not have.
//!
//! In a request header it is the VM that serves; in a message of the daemon the VM that leads, while it decodes. The shipped module has none of
//! this: an end-to-end test looks for the word in it.

/// What kills the VM that reads it.
pub const TRAP: &[u8] = b"x-drill-trap";

/// Traps if told to.
pub fn obey(bytes: &[u8]) {
    if bytes.windows(TRAP.len()).any(|word| word == TRAP) {
        log::error!("trap, as told by a drill");
        #[cfg(target_arch = "wasm32")]
        core::arch::wasm32::unreachable();
        #[cfg(not(target_arch = "wasm32"))]
        std::process::abort();
    }
}
