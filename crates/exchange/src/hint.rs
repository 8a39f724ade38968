//! Reads the subset hint from the bytes that the proxy passes.

use scheduler::SubsetHint;

/// The maximum number of items of a list that are read. A pool has at most this many endpoints, so
/// more items cannot name more of them.
const ITEMS_MAX: usize = scheduler::ENDPOINTS_MAX;

/// Reads a hint that is present. Text is split at commas. An unreadable hint allows no endpoint.
#[must_use]
pub fn parse(bytes: &[u8]) -> SubsetHint {
    let items = list(bytes).unwrap_or_else(|| bytes.split(|&b| b == b',').collect());
    SubsetHint::parse(
        items
            .into_iter()
            .filter_map(|item| std::str::from_utf8(item).ok()),
    )
}

/// Returns the items if `bytes` are exactly one serialised list.
fn list(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let (count, mut sizes) = read_u32(bytes)?;
    let mut items = Vec::new();
    let table_bytes = count.checked_mul(8)?;
    let mut values = sizes.get(table_bytes..)?;
    for _ in 0..count {
        let (name_bytes, rest) = read_u32(sizes)?;
        let (value_bytes, rest) = read_u32(rest)?;
        sizes = rest;
        let name = values.get(..name_bytes)?;
        values = values
            .get(name_bytes..)?
            .strip_prefix(&[0])?
            .get(value_bytes..)?
            .strip_prefix(&[0])?;
        if items.len() < ITEMS_MAX {
            items.push(name);
        }
    }
    values.is_empty().then_some(items)
}

fn read_u32(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<4>()?;
    Some((usize::try_from(u32::from_le_bytes(*head)).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(items: &[&str]) -> Vec<u8> {
        let mut out = u32::try_from(items.len()).unwrap().to_le_bytes().to_vec();
        for item in items {
            out.extend(u32::try_from(item.len()).unwrap().to_le_bytes());
            out.extend(0u32.to_le_bytes());
        }
        for item in items {
            out.extend(item.as_bytes());
            out.extend([0, 0]);
        }
        out
    }

    #[test]
    fn a_list_as_envoy_serialises_it() {
        let bytes = pairs(&["10.0.0.1:8000", "10.0.0.2:8000"]);
        assert_eq!(bytes.len(), 50, "the size seen on the real host");
        let hint = parse(&bytes);
        assert!(
            hint.allows("10.0.0.1:8000")
                && hint.allows("10.0.0.2:8000")
                && !hint.allows("10.0.0.3:8000")
        );
    }

    #[test]
    fn empty_lists_and_empty_text_allow_nothing() {
        assert!(parse(&pairs(&[])).is_empty());
        assert!(parse(b"").is_empty());
        assert!(parse(b" , ,").is_empty());
    }

    #[test]
    fn plain_text() {
        let hint = parse(b"10.0.0.1:8000, [2001:db8::1]:8000");
        assert!(
            hint.allows("10.0.0.1:8000")
                && hint.allows("[2001:db8::1]:8000")
                && !hint.allows("10.0.0.2:8000")
        );
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            let _ = parse(&bytes);
        }

        #[test]
        fn truncated_lists_are_not_lists(cut in 1usize..49) {
            let bytes = pairs(&["10.0.0.1:8000", "10.0.0.2:8000"]);
            proptest::prop_assert!(list(&bytes[..bytes.len() - cut]).is_none());
        }
    }
}
