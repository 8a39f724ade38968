//! One small sort function for this whole crate.
//!
//! A sort of the standard library takes two to fifteen KB of code for each type of item. One small
//! function saves memory, because each byte of the wasm module takes about a hundred bytes of
//! memory in every proxy process. The lists in this crate are short, so a fast sort is not needed.

/// Sorts in place by heapsort, which takes O(n log n) for every input and a few hundred bytes of
/// code. The sort is not stable.
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

/// Returns the middle value, or for an even number of values the lower of the two in the middle.
/// Returns `None` if there are no values. If fewer than half of the values are false, the result
/// stays within the range of the true values. Of two values, the lower is returned, because the
/// values that proxies claim are not negative but have no upper limit.
#[must_use]
pub fn lower_median(mut values: Vec<f64>) -> Option<f64> {
    sort_by(&mut values, |a, b| a < b);
    let middle = values.len().checked_sub(1)? / 2;
    values.get(middle).copied()
}

/// Moves the row at `root` down the heap of the first `end` rows, to its position in the heap.
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

    #[test]
    fn a_minority_moves_no_median_beyond_the_others() {
        assert_eq!(lower_median(vec![]), None);
        for lie in [0.0, 50.0, 1e9] {
            assert!((10.0..=12.0).contains(&lower_median(vec![10.0, lie, 12.0, 11.0]).unwrap()));
        }
        assert_eq!(lower_median(vec![1e9, 10.0]), Some(10.0));
        assert_eq!(lower_median(vec![7.0]), Some(7.0));
    }
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
