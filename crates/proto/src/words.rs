//! Little-endian words of 64 bits. All data between VMs or proxies consist of words, except
//! protobuf messages. Because the byte order is fixed, native and wasm builds with the same schema
//! read and write the same bytes.
//!
//! An endpoint takes one word: 16 bits for its slot, 16 bits for another number (such as a kind),
//! 32 bits for its generation.

use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};

pub const WORD: usize = 8;

/// Splits off the first `N` words; `None` if there are fewer words.
#[must_use]
#[inline]
pub fn split<const N: usize>(bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let mut words = [0; N];
    let mut rest = bytes;
    for word in &mut words {
        let (head, tail) = rest.split_first_chunk::<WORD>()?;
        (*word, rest) = (u64::from_le_bytes(*head), tail);
    }
    Some((words, rest))
}

/// Reads a value that has exactly `N` words.
#[must_use]
pub fn read<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    split(bytes).and_then(|(words, rest)| rest.is_empty().then_some(words))
}

/// Reads exactly `BYTES` bytes as words.
#[must_use]
#[inline]
pub fn of_bytes<const BYTES: usize, const WORDS: usize>(bytes: &[u8; BYTES]) -> [u64; WORDS] {
    const { assert!(BYTES == WORDS * WORD) };
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<WORD>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// Writes exactly `WORDS` words as bytes.
#[must_use]
#[inline]
pub fn to_bytes<const WORDS: usize, const BYTES: usize>(words: [u64; WORDS]) -> [u8; BYTES] {
    const { assert!(BYTES == WORDS * WORD) };
    let mut bytes = [0; BYTES];
    for (to, word) in bytes.as_chunks_mut::<WORD>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}

/// Encodes `words`, followed by `rest`.
#[must_use]
pub fn write(words: &[u64], rest: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(words.len().saturating_mul(WORD).saturating_add(rest.len()));
    append(&mut bytes, words);
    bytes.extend_from_slice(rest);
    bytes
}

#[inline]
pub fn append(bytes: &mut Vec<u8>, words: &[u64]) {
    for word in words {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
}

/// Returns the word with these halves.
#[must_use]
#[inline]
pub fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Returns the halves of a word, the low half first.
#[must_use]
#[inline]
pub fn unpair(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Encodes an endpoint and another number as a word.
#[must_use]
#[inline]
pub fn of_endpoint(endpoint: EndpointRef, number: u16) -> u64 {
    u64::from(endpoint.slot.0) | u64::from(number) << 16 | u64::from(endpoint.generation.0) << 32
}

/// Decodes the endpoint and the other number of a word; `None` for a slot that no snapshot has.
#[must_use]
#[inline]
pub fn endpoint(word: u64) -> Option<(EndpointRef, u16)> {
    let (low, generation) = unpair(word);
    let slot = low as u16;
    let number = (low >> 16) as u16;
    (usize::from(slot) < ENDPOINTS_MAX).then_some((
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(generation),
        },
        number,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_words_are_read_back() {
        let bytes = write(&[1, u64::MAX], b"rest");
        assert_eq!(
            split::<2>(&bytes),
            Some(([1, u64::MAX], b"rest".as_slice()))
        );
        assert_eq!(read::<2>(&bytes), None);
        assert_eq!(read::<2>(&write(&[3, 4], b"")), Some([3, 4]));
        assert_eq!(split::<3>(&bytes), None);
        let bytes: [u8; 16] = to_bytes([7, 8]);
        assert_eq!(of_bytes::<16, 2>(&bytes), [7, 8]);
        assert_eq!(unpair(pair(5, u32::MAX)), (5, u32::MAX));
    }

    #[test]
    fn a_slot_beyond_the_last_one_is_refused() {
        let at = |slot| EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        };
        let last = at(u16::try_from(ENDPOINTS_MAX).unwrap() - 1);
        assert_eq!(endpoint(of_endpoint(last, 5)), Some((last, 5)));
        assert_eq!(endpoint(of_endpoint(at(last.slot.0 + 1), 5)), None);
    }
}
