//! Suggests a known name for a misspelt name.

/// The maximum length of a name that is compared, in characters. No known name is longer, and the
/// work grows with the product of both lengths.
const NAME_CHARS_MAX: usize = 64;

/// Returns the name in `known` that is most similar to `name`, if `name` can be a typing error: at
/// most one edit for each three letters.
pub fn closest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.chars().count() > NAME_CHARS_MAX {
        return None;
    }
    let near_enough = name.chars().count() / 3;
    known
        .into_iter()
        .map(|other| (edits(name, other), other))
        .filter(|(edits, _)| *edits <= near_enough)
        .min()
        .map(|(_, other)| other)
}

/// Returns the Levenshtein distance of `a` and `b`, ignoring ASCII case. `row[j]` is the distance
/// to the first `j` letters of `b`.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.to_ascii_lowercase().chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.to_ascii_lowercase().chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        let (first, rest) = match row.split_first_mut() {
            Some(split) => split,
            None => return 0,
        };
        *first = left;
        for (cell, other) in rest.iter_mut().zip(&b) {
            left = (diagonal + usize::from(letter != *other))
                .min(left + 1)
                .min(*cell + 1);
            diagonal = std::mem::replace(cell, left);
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "", 3),
            ("kitten", "sitting", 3),
            ("queue", "quue", 1),
            ("Ab", "aB", 0),
        ] {
            assert_eq!(edits(a, b), expected, "{a} {b}");
            assert_eq!(edits(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn near_names_only() {
        let known = ["queue-scorer", "random-picker", "max-score-picker"];
        assert_eq!(closest("queue-score", known), Some("queue-scorer"));
        assert_eq!(closest("Random_Picker", known), Some("random-picker"));
        assert_eq!(
            closest("kwee-scorer!", known),
            Some("queue-scorer"),
            "four edits in twelve letters"
        );
        assert_eq!(
            closest("kwe-scorer", known),
            None,
            "four in ten are too many"
        );
        assert_eq!(closest("banana", known), None);
        assert_eq!(closest("", known), None);
        let long = "q".repeat(65);
        assert_eq!(
            closest(&long, [long.as_str()]),
            None,
            "too long to be compared"
        );
        assert_eq!(closest(&long[1..], [long.as_str()]), Some(long.as_str()));
    }
}
