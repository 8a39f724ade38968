//! Finds the end of a JSON string. This loop takes most of the time of reading a body.
//!
//! Bytes are read in blocks. A block becomes a mask with one bit for each byte that needs a
//! decision (quote, backslash, control character), and only those bytes are visited. The same pass
//! finds whether any byte is not ASCII, so that plain bodies need no separate UTF-8 check.

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd128;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use simd128::{masks, operands};

/// A complete string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScannedString {
    /// Offset of the closing quote.
    pub end: usize,
    pub escaped: bool,
    /// Whether all bytes are ASCII. Also false if a byte shortly after the string is not ASCII.
    pub ascii: bool,
}

/// The place where a scan stopped before the end of its string, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StringStop {
    /// Offset of the byte that a string must not contain, or the length of the input if the string
    /// has no end.
    pub offset: usize,
    /// Offset after the bytes that are certainly part of the string. Once there is more input, the
    /// scan can continue there.
    pub scanned: usize,
    /// Whether those bytes have an escape.
    pub escaped: bool,
    /// Whether those bytes are ASCII. Also false if a byte shortly after them is not ASCII.
    pub ascii: bool,
}

/// The number of bytes that are examined together. A mask register has one bit for each, and four
/// vectors of SSE2 or wasm hold them.
const BLOCK_BYTES: usize = 64;

/// Finds the end of the string whose first byte (after the opening quote) is at `start`.
///
/// # Errors
/// Returns the place where the scan stopped, because of a byte or because `bytes` end.
pub fn string(bytes: &[u8], start: usize) -> Result<ScannedString, StringStop> {
    let mut at = start;
    let mut escaped = false;
    let mut ascii = true;
    let operands = operands();
    'blocks: loop {
        #[cfg(test)]
        super::steps::add();
        let rest = bytes.get(at..).unwrap_or_default();
        let last; // one call of `masks`, so that it is inlined
        let block = match rest.first_chunk() {
            Some(block) => block,
            None => {
                last = last_block(rest);
                &last
            }
        };
        let (mut special, block_ascii) = masks(block, operands);
        ascii &= block_ascii;
        while special != 0 {
            let index = special.trailing_zeros() as usize;
            let here = at + index;
            match bytes.get(here) {
                Some(b'"') => {
                    return Ok(ScannedString {
                        end: here,
                        escaped,
                        ascii,
                    });
                }
                Some(b'\\') => {
                    let len = escape_len(bytes, here).map_err(|offset| StringStop {
                        offset,
                        scanned: here,
                        escaped,
                        ascii,
                    })?;
                    escaped = true;
                    let next = index + len;
                    if next >= BLOCK_BYTES {
                        at += next;
                        continue 'blocks;
                    }
                    special &= u64::MAX << next;
                }
                Some(_) => {
                    return Err(StringStop {
                        offset: here,
                        scanned: here,
                        escaped,
                        ascii,
                    });
                }
                None => {
                    return Err(StringStop {
                        offset: bytes.len(),
                        scanned: bytes.len(),
                        escaped,
                        ascii,
                    });
                }
            }
        }
        at += BLOCK_BYTES;
    }
}

/// Returns the end of the input, padded with quotes. A padding quote ends the search, and its
/// offset distinguishes it from a real quote.
#[cold]
fn last_block(rest: &[u8]) -> [u8; BLOCK_BYTES] {
    let mut block = [b'"'; BLOCK_BYTES];
    block
        .iter_mut()
        .zip(rest)
        .for_each(|(to, from)| *to = *from);
    block
}

/// Returns the length of the escape whose backslash is at `at`.
fn escape_len(bytes: &[u8], at: usize) -> Result<usize, usize> {
    match bytes.get(at + 1) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(2),
        Some(b'u') => match (at + 2..at + 6)
            .find(|&digit| !bytes.get(digit).is_some_and(u8::is_ascii_hexdigit))
        {
            None => Ok(6),
            Some(digit) => Err(digit.min(bytes.len())),
        },
        Some(_) => Err(at + 1),
        None => Err(bytes.len()),
    }
}

/// No operands: the native code compares with constants.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
#[derive(Clone, Copy)]
struct NoOperands;

#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
fn operands() -> NoOperands {
    NoOperands
}

/// Returns one bit for each quote, backslash and control character, and whether all bytes are
/// ASCII. The function avoids vector intrinsics, which would need `unsafe`. The compiler vectorises
/// the check of whole blocks. Only blocks with one of these bytes are read eight bytes at a time.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
#[inline(always)] // alone it halves the speed of long strings: a call for every block, its result through memory
fn masks(block: &[u8; BLOCK_BYTES], _: NoOperands) -> (u64, bool) {
    let mut special = false;
    let mut bits = 0;
    for &byte in block {
        special |= byte == b'"' || byte == b'\\' || byte < b' ';
        bits |= byte;
    }
    let (words, _) = block.as_chunks::<8>();
    let words = words
        .iter()
        .map(|word| special_bits(u64::from_le_bytes(*word)));
    (
        if special {
            words.rev().fold(0, |mask, bits| mask << 8 | bits)
        } else {
            0
        },
        bits.is_ascii(),
    )
}

/// Returns one bit for each of the eight bytes, the lowest first. The arithmetic that compares a
/// byte does not carry into the next byte.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
fn special_bits(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = ONES * 0x80;
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let is_zero = |word: u64| !(((word & !HIGH) + !HIGH) | word | !HIGH);
    let quote = is_zero(word ^ (ONES * b'"' as u64));
    let backslash = is_zero(word ^ (ONES * b'\\' as u64));
    let control = is_zero(word & (ONES * 0xe0));
    ((quote | backslash | control) >> 7).wrapping_mul(GATHER) >> 56
}
