//! One small sort for everything that is sorted here.
//!
//! The standard library's sorts take two to fifteen KB of code for each type they are used with,
//! and every proxy process pays about a hundred bytes of memory for each byte of the module. The
//! lists here are short.

/// Sorts in place by heapsort: O(n log n) for any input, in a few hundred bytes of code. It is not
/// stable.
pub fn sort_by<T>(rows: &mut [T], mut before: impl FnMut(&T, &T) -> bool) {
    let count = rows.len();
    for root in (0..count / 2).rev() {
        sift(rows, root, count, &mut before);
    }
    for end in (1..count).rev() {
        rows.swap(0, end);
        sift(rows, 0, end, &mut before);
    }
}

/// Moves the row at `root` down to its place within the first `end` rows.
fn sift<T>(rows: &mut [T], mut root: usize, end: usize, before: &mut dyn FnMut(&T, &T) -> bool) {
    loop {
        let left = 2 * root + 1;
        let Some(heap) = rows.get(..end) else { return };
        let child = match (heap.get(left), heap.get(left + 1)) {
            (Some(a), Some(b)) if before(a, b) => left + 1,
            (Some(_), _) => left,
            _ => return,
        };
        match (heap.get(root), heap.get(child)) {
            (Some(parent), Some(row)) if before(parent, row) => rows.swap(root, child),
            _ => return,
        }
        root = child;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sorts_as_the_standard_library_does(mut rows in prop::collection::vec(0_u8..20, 0..80)) {
            let mut expected = rows.clone();
            expected.sort_unstable();
            sort_by(&mut rows, |a, b| a < b);
            prop_assert_eq!(rows, expected);
        }
    }
}
