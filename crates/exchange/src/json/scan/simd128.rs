//! Computes the masks of a block with wasm vector instructions, which the module is built with.
//! `tests/wasm` tests this file.

use std::arch::wasm32::{
    i8x16_lt, u8x16_bitmask, u8x16_eq, u64x2, v128, v128_any_true, v128_or, v128_xor,
};
use std::hint::black_box;

use super::BLOCK_BYTES;

/// The bytes that [`masks`] compares with, 16 of each.
static OPERANDS: [[u8; 16]; 3] = [[b'\\'; 16], [FLIP; 16], [(b' ' + 1) ^ SIGN; 16]];

/// The sign bit. A signed comparison is one instruction, an unsigned one takes four.
const SIGN: u8 = 0x80;

/// Flipping bit 1 moves the quote next to the control characters, and these stay control
/// characters. So one comparison finds both. Flipping the sign bit makes it a signed comparison.
const FLIP: u8 = b'"' ^ b' ' ^ SIGN;

/// The operands in registers.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    backslash: v128,
    flip: v128,
    end: v128,
}

/// Loads the operands, once for each string. The compilers must not know the operands as constants:
/// V8 creates a constant vector again at each use, with three instructions, which doubles the time
/// for a block.
#[inline(always)]
pub(super) fn operands() -> Operands {
    let [backslash, flip, end] = black_box(&OPERANDS);
    Operands {
        backslash: vector(backslash),
        flip: vector(flip),
        end: vector(end),
    }
}

/// Returns one bit for each byte that is a quote, a backslash or a control character, and whether
/// all bytes are ASCII.
#[inline(always)] // alone it halves the speed of long strings: a call for every block, its result through memory
pub(super) fn masks(block: &[u8; BLOCK_BYTES], operands: Operands) -> (u64, bool) {
    let special = |bytes: v128| {
        let quote_or_control = i8x16_lt(v128_xor(bytes, operands.flip), operands.end);
        v128_or(quote_or_control, u8x16_eq(bytes, operands.backslash))
    };
    let (quarters, _) = block.as_chunks();
    let &[a, b, c, d] = quarters else {
        return (0, false);
    };
    let [a, b, c, d] = [vector(&a), vector(&b), vector(&c), vector(&d)];
    let ascii = u8x16_bitmask(v128_or(v128_or(a, b), v128_or(c, d))) == 0;
    let [a, b, c, d] = [special(a), special(b), special(c), special(d)];
    if !v128_any_true(v128_or(v128_or(a, b), v128_or(c, d))) {
        return (0, ascii);
    }
    let bits = |vector: v128| u64::from(u8x16_bitmask(vector));
    (
        bits(a) | bits(b) << 16 | bits(c) << 32 | bits(d) << 48,
        ascii,
    )
}

/// Loads 16 bytes. The function compiles to one load. The intrinsic for a load takes a pointer and
/// is unsafe.
fn vector(bytes: &[u8; 16]) -> v128 {
    let (words, _) = bytes.as_chunks();
    let word = |word: Option<&[u8; 8]>| word.map_or(0, |word| u64::from_le_bytes(*word));
    u64x2(word(words.first()), word(words.last()))
}
