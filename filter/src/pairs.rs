//! The proxy-wasm "pairs" layout of header maps: the number of headers, a pair of lengths for each
//! header, then the names and values, with a NUL after each name and value.

/// An iterator over the headers of a serialized map, in order. The iteration ends early if the
/// bytes are truncated.
#[derive(Clone, Debug)]
pub struct HeaderPairs<'b> {
    left: usize,
    sizes: &'b [u8],
    values: &'b [u8],
}

// === impl HeaderPairs ===

impl<'b> HeaderPairs<'b> {
    /// Creates an iterator over the headers in `bytes`. If the bytes are invalid, the iterator
    /// gives no headers.
    #[must_use]
    pub fn new(bytes: &'b [u8]) -> Self {
        Self::framed(bytes).unwrap_or(Self {
            left: 0,
            sizes: &[],
            values: &[],
        })
    }

    fn framed(bytes: &'b [u8]) -> Option<Self> {
        let (left, rest) = take_size(bytes)?;
        let (sizes, values) = rest.split_at_checked(left.checked_mul(8)?)?;
        Some(Self {
            left,
            sizes,
            values,
        })
    }

    fn pair(&mut self) -> Option<(&'b [u8], &'b [u8])> {
        let (name_size, rest) = take_size(self.sizes)?;
        let (value_size, rest) = take_size(rest)?;
        self.sizes = rest;
        Some((self.text(name_size)?, self.text(value_size)?))
    }

    fn text(&mut self, size: usize) -> Option<&'b [u8]> {
        let (text, rest) = self.values.split_at_checked(size)?;
        self.values = rest.strip_prefix(&[0])?;
        Some(text)
    }
}

impl<'b> Iterator for HeaderPairs<'b> {
    type Item = (&'b [u8], &'b [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let pair = self.pair();
        if pair.is_none() {
            self.left = 0;
        }
        pair
    }
}

/// Serializes a header map.
#[must_use]
pub fn serialize(pairs: &[(&str, &str)]) -> Vec<u8> {
    // All sizes fit into 32 bits: a header map is far below 4 GiB, because it was parsed from one
    // request, or the filter made it.
    let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
    let mut bytes = Vec::from(size(pairs.len()));
    for (name, value) in pairs {
        bytes.extend(size(name.len()));
        bytes.extend(size(value.len()));
    }
    for (name, value) in pairs {
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
    }
    bytes
}

fn take_size(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<4>()?;
    Some((usize::try_from(u32::from_le_bytes(*head)).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let pairs = [(":method", "POST"), ("x-empty", ""), ("x-nul", "a\0b")];
        let bytes = serialize(&pairs);
        let read: Vec<_> = HeaderPairs::new(&bytes)
            .map(|(n, v)| {
                (
                    std::str::from_utf8(n).unwrap(),
                    std::str::from_utf8(v).unwrap(),
                )
            })
            .collect();
        assert_eq!(read, pairs);
    }

    #[test]
    fn every_truncation_yields_a_prefix() {
        let pairs = [("a", "1"), ("bb", "22"), ("ccc", "333")];
        let bytes = serialize(&pairs);
        for cut in 0..bytes.len() {
            assert!(HeaderPairs::new(&bytes[..cut]).count() < 3, "{cut}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            proptest::prop_assert!(HeaderPairs::new(&bytes).count() <= bytes.len() / 8);
        }
    }
}
