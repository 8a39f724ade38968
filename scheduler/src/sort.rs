//! One small sort for all that is sorted here.
//!
//! The standard library's sorts are two to fifteen KB of code for each type they are used with, and every proxy process pays about a hundred
//! bytes of memory for each byte of the module. What is sorted here is short.

/// Sorts in place, by heapsort: O(n log n) whatever the input, in a few hundred bytes of code. Equals may change places.
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

/// Lets the row at `root` sink below those that belong behind it, within the first `end` rows.
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
