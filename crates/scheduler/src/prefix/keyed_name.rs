//! Replaces a name by digits that only the owner of a key can compute.

use super::siphash::SipHash;

/// Returns 128 bits in hexadecimal digits that depend on `key` and `name`. Without the key, the
/// digits reveal nothing about the name, and the digits of another name cannot be computed.
#[must_use]
pub fn keyed_name(key: &str, name: &str) -> String {
    let [high, low] = [0, 1].map(|half| digest(0, key, half));
    let key = u128::from(high) << 64 | u128::from(low);
    let [high, low] = [0, 1].map(|half| digest(key, name, half));
    format!("{high:016x}{low:016x}")
}

fn digest(key: u128, text: &str, half: u64) -> u64 {
    let mut hash = SipHash::new(key);
    hash.field(text.as_bytes());
    hash.of_word(half)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keyed_name_depends_on_key_and_name() {
        let ann = keyed_name("a long key", "ann");
        assert_eq!(ann.len(), 32);
        assert_eq!(ann, keyed_name("a long key", "ann"));
        assert_ne!(ann, keyed_name("a long key", "bob"));
        assert_ne!(ann, keyed_name("another key", "ann"));
        assert_ne!(ann[..16], ann[16..]);
    }
}
