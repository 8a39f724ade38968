//! The cases of `tests/golden`, each decided as its file says.

use std::path::PathBuf;

use crate::case::{Case, Digits};

/// Every golden file with its text, by name.
pub fn files() -> Vec<(PathBuf, String)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 25, "golden files are missing: {files:?}");
    files.into_iter().map(|file| (file.clone(), std::fs::read_to_string(file).unwrap())).collect()
}

#[test]
fn every_case_is_decided_as_it_says() {
    let mut wrong = String::new();
    for (file, text) in files() {
        assert!(text.starts_with("# "), "{}: a case begins by saying what it shows", file.display());
        let case = Case::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let decided = case.decide().unwrap().render(Digits::Few);
        if decided.trim() != case.expected.trim() {
            wrong.push_str(&format!("{}\nexpected\n{}\ndecided\n{decided}\n", file.display(), case.expected));
        }
    }
    assert!(wrong.is_empty(), "{wrong}\nto accept: cargo run -p scheduler --example golden -- --accept scheduler/tests/golden/*.txt");
}

#[test]
fn a_case_that_is_wrong_says_where() {
    for (text, expected) in [
        ("queue 3", "before any section, in line: queue 3"),
        ("pool\nname queue\na", "1 cells under 2 columns, in line: a"),
        ("pool\nname colour\na red", "unknown column `colour`, in line: a red"),
        ("pool\nname queue\na many", "`many` is no such number, in line: a many"),
        ("pool\nname ready\na perhaps", "`perhaps` is neither yes nor no, in line: a perhaps"),
        ("request\nmodle llama", "unknown fact `modle`, in line: modle llama"),
        ("profile\nqueue-scorer heavy", "`heavy` is no such number, in line: queue-scorer heavy"),
        ("profile a b\nqueue-scorer", "before any section, in line: profile a b"),
    ] {
        assert_eq!(Case::parse(text).unwrap_err(), expected);
    }
}
