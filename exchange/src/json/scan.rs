//! Where a JSON string ends: the one hot loop of reading bodies.
//!
//! Bytes are looked at in blocks. A block becomes a mask with one bit for each byte that needs a decision (quote, backslash, control
//! character), and only those bytes are visited. Whether any byte is beyond ASCII falls out of the same pass, so that plain bodies need no
//! separate UTF-8 check.

/// A string that was found whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Offset of the closing quote.
    pub end: usize,
    /// It has at least one escape.
    pub escaped: bool,
    /// False if some byte may be beyond ASCII (it may also stand a little behind the string).
    pub ascii: bool,
}

/// Bytes looked at together. One mask register; SSE2 and wasm take it as four vectors.
const BLOCK_BYTES: usize = 64;

/// Finds the end of the string whose first byte (behind the opening quote) is at `start`.
///
/// # Errors
/// The offset of the byte that cannot be in a string, or the length of `bytes` if it never ends.
pub fn string(bytes: &[u8], start: usize) -> Result<Found, usize> {
    let mut at = start;
    let mut escaped = false;
    let mut ascii = true;
    'blocks: loop {
        let rest = bytes.get(at..).unwrap_or_default();
        // Behind the input stand quotes: they end the loop, and are told from a real quote by their offset.
        let mut last = [b'"'; BLOCK_BYTES];
        let block = match rest.first_chunk() {
            Some(block) => block,
            None => {
                last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
                &last
            }
        };
        let (mut special, block_ascii) = masks(block);
        ascii &= block_ascii;
        while special != 0 {
            let index = special.trailing_zeros() as usize;
            let here = at + index;
            match bytes.get(here) {
                Some(b'"') => return Ok(Found { end: here, escaped, ascii }),
                Some(b'\\') => {
                    escaped = true;
                    let next = index + escape_len(bytes, here)?;
                    if next >= BLOCK_BYTES {
                        at += next;
                        continue 'blocks;
                    }
                    special &= u64::MAX << next;
                }
                Some(_) => return Err(here),
                None => return Err(bytes.len()),
            }
        }
        at += BLOCK_BYTES;
    }
}

/// The length of the escape whose backslash is at `at`.
fn escape_len(bytes: &[u8], at: usize) -> Result<usize, usize> {
    match bytes.get(at + 1) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(2),
        Some(b'u') => match (at + 2..at + 6).find(|&digit| !bytes.get(digit).is_some_and(u8::is_ascii_hexdigit)) {
            None => Ok(6),
            Some(digit) => Err(digit.min(bytes.len())),
        },
        Some(_) => Err(at + 1),
        None => Err(bytes.len()),
    }
}

/// One bit for each byte that is a quote, a backslash or a control character; and whether all bytes are ASCII.
fn masks(block: &[u8; BLOCK_BYTES]) -> (u64, bool) {
    let mut special = 0;
    let mut high = 0;
    for (index, &byte) in block.iter().enumerate() {
        special |= u64::from(byte == b'"' || byte == b'\\' || byte < b' ') << index;
        high |= byte;
    }
    (special, high < 0x80)
}
