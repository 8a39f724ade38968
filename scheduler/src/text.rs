//! Texts that only people read.

/// Words that only people read: where nobody does, in the module inside the proxy, they take no memory.
#[must_use]
pub const fn for_people(words: &'static str) -> &'static str {
    if cfg!(target_arch = "wasm32") { "" } else { words }
}
