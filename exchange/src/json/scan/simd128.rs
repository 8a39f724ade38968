//! Computes the masks of a block with wasm vector instructions, which the module is built with.
//! `tests/wasm` tests this file.

use std::arch::wasm32::{u8x16_bitmask, u8x16_eq, u8x16_le, u8x16_splat, u64x2, v128, v128_any_true, v128_or, v128_xor};

use super::BLOCK_BYTES;

/// Returns one bit for each byte that is a quote, a backslash or a control character, and whether
/// all bytes are ASCII.
#[inline(always)] // alone it halves the speed of long strings: a call for every block, its result through memory
pub(super) fn masks(block: &[u8; BLOCK_BYTES]) -> (u64, bool) {
    // Flipping bit 1 moves the quote next to the control characters, which stay control characters.
    // So one comparison finds both.
    let special = |bytes: v128| {
        let quote_or_control = u8x16_le(v128_xor(bytes, u8x16_splat(b'"' ^ b' ')), u8x16_splat(b' '));
        v128_or(quote_or_control, u8x16_eq(bytes, u8x16_splat(b'\\')))
    };
    let (quarters, _) = block.as_chunks();
    let &[a, b, c, d] = quarters else { return (0, false) };
    let [a, b, c, d] = [vector(&a), vector(&b), vector(&c), vector(&d)];
    let ascii = u8x16_bitmask(v128_or(v128_or(a, b), v128_or(c, d))) == 0;
    let [a, b, c, d] = [special(a), special(b), special(c), special(d)];
    if !v128_any_true(v128_or(v128_or(a, b), v128_or(c, d))) {
        return (0, ascii);
    }
    let bits = |vector: v128| u64::from(u8x16_bitmask(vector));
    (bits(a) | bits(b) << 16 | bits(c) << 32 | bits(d) << 48, ascii)
}

/// Loads 16 bytes. It compiles to one load; the intrinsic for a load takes a pointer and is unsafe.
fn vector(bytes: &[u8; 16]) -> v128 {
    let (words, _) = bytes.as_chunks();
    let word = |word: Option<&[u8; 8]>| word.map_or(0, |word| u64::from_le_bytes(*word));
    u64x2(word(words.first()), word(words.last()))
}
