//! Values in shared data are rows of little-endian 64-bit words: fixed, small, and the same for
//! every build of a schema.

/// Bytes of a word.
pub const WORD: usize = 8;

/// The first `N` words and the rest; `None` when there are fewer.
#[must_use]
pub fn split<const N: usize>(bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let (mut words, mut rest) = ([0; N], bytes);
    for word in &mut words {
        let (head, tail) = rest.split_first_chunk::<WORD>()?;
        (*word, rest) = (u64::from_le_bytes(*head), tail);
    }
    Some((words, rest))
}

/// The words of a value that has exactly `N` of them.
#[must_use]
pub fn read<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    split(bytes).and_then(|(words, rest)| rest.is_empty().then_some(words))
}

/// The bytes of `words`, followed by `rest`.
#[must_use]
pub fn write(words: &[u64], rest: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(words.len().saturating_mul(WORD).saturating_add(rest.len()));
    append(&mut bytes, words);
    bytes.extend_from_slice(rest);
    bytes
}

/// Appends `words` to `bytes`.
pub fn append(bytes: &mut Vec<u8>, words: &[u64]) {
    for word in words {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
}

/// A digest to tell messages apart, not a cryptographic one: FNV-1a over words (the last one filled
/// up with zeros) and the length.
#[must_use]
pub fn digest(bytes: &[u8]) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(PRIME).rotate_left(23);
    let (chunks, tail) = bytes.as_chunks::<WORD>();
    let hash = chunks.iter().fold(BASIS, |hash, chunk| mix(hash, u64::from_le_bytes(*chunk)));
    let last = tail.iter().rev().fold(0, |word, &byte| (word << 8) | u64::from(byte));
    mix(mix(hash, last), bytes.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let bytes = write(&[1, u64::MAX], b"rest");
        assert_eq!(split::<2>(&bytes), Some(([1, u64::MAX], b"rest".as_slice())));
        assert_eq!(read::<2>(&bytes), None);
        assert_eq!(read::<2>(&write(&[3, 4], b"")), Some([3, 4]));
        assert_eq!(split::<3>(&bytes), None);
    }

    #[test]
    fn digests_see_every_byte_and_the_length() {
        let base = vec![7_u8; 41];
        let mut all = vec![digest(&base), digest(&base[..40]), digest(&[])];
        for i in 0..base.len() {
            let mut other = base.clone();
            other[i] ^= 1;
            all.push(digest(&other));
        }
        all.push(digest(&[&base[..], &[0]].concat()));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
