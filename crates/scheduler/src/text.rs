//! Texts for documentation.

/// Returns a text for printed documentation. The wasm module prints no documentation, so in the
/// module the text is empty and takes no memory.
#[must_use]
pub const fn readable(words: &'static str) -> &'static str {
    if cfg!(target_arch = "wasm32") {
        ""
    } else {
        words
    }
}
