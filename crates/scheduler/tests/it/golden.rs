//! The golden cases of `tests/golden`: each must be decided as its file expects.

use std::path::PathBuf;

use scheduler::Decision;

use crate::case::{DecisionCase, Digits};

/// Returns every golden file with its text, by name.
pub fn files() -> Vec<(PathBuf, String)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() >= 25, "golden files are missing: {files:?}");
    files
        .into_iter()
        .map(|file| (file.clone(), std::fs::read_to_string(file).unwrap()))
        .collect()
}

#[test]
fn every_case_is_decided_as_its_file_expects() {
    let mut wrong = String::new();
    for (file, text) in files() {
        assert!(
            text.starts_with("# "),
            "{}: a case begins by saying what it shows",
            file.display()
        );
        let case = DecisionCase::parse(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let decided = case.decide().unwrap().render(Digits::Few);
        if decided.trim() != case.expected.trim() {
            wrong.push_str(&format!(
                "{}\nexpected\n{}\ndecided\n{decided}\n",
                file.display(),
                case.expected
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{wrong}\nto accept: cargo run -p scheduler --example golden -- --accept crates/scheduler/tests/golden/*.txt"
    );
}

#[test]
fn a_case_that_is_wrong_says_where() {
    for (text, expected) in [
        ("queue 3", "before any section, in line: queue 3"),
        ("pool\nname queue\na", "1 cells under 2 columns, in line: a"),
        (
            "pool\nname colour\na red",
            "unknown column `colour`, in line: a red",
        ),
        (
            "pool\nname queue\na many",
            "`many` is no such number, in line: a many",
        ),
        (
            "pool\nname ready\na perhaps",
            "`perhaps` is neither yes nor no, in line: a perhaps",
        ),
        (
            "request\nmodle llama",
            "unknown fact `modle`, in line: modle llama",
        ),
        (
            "profile\nqueue-scorer heavy",
            "`heavy` is no such number, in line: queue-scorer heavy",
        ),
        (
            "profile a b\nqueue-scorer",
            "before any section, in line: profile a b",
        ),
    ] {
        assert_eq!(DecisionCase::parse(text).unwrap_err(), expected);
    }
}

/// A case in which endpoints 0 and 3 are in time. Endpoints 1 and 2 are late, although a second
/// scorer ranks them best and they gave the latest answers.
const LATE: &str = "
profile
  slo-scorer explorationShare=0.3
  queue-scorer
  weighted-random-picker
  ranked_max 4
pool
  name  ttft  tpot  in_flight  queue  last_answer
  a     100   30    2          9      1
  b     250   20    1          0      9
  c     350   20    1          0      8
  d     20    10    1          9      2
request
  latency_prediction yes
  ttft_slo 200
  tpot_slo 50
";

#[test]
fn exploration_changes_only_the_first_of_a_list_that_names_endpoints_in_time_before_late_ones() {
    for (picker, explores) in [
        ("weighted-random-picker", true),
        ("max-score-picker", false),
    ] {
        let mut explored = 0;
        for seed in 0..200 {
            let case = DecisionCase::parse(
                &LATE
                    .replace("weighted-random-picker", picker)
                    .replace("request\n", &format!("request\n  seed {seed}\n")),
            )
            .unwrap();
            let Decision::Route(route) = case.decide().unwrap().decision else {
                panic!("{picker} {seed}")
            };
            let late: Vec<bool> = route
                .ranked
                .iter()
                .map(|index| [1, 2].contains(&index.get()))
                .collect();
            assert_eq!(late.len(), 4);
            assert!(late[1..].is_sorted(), "{picker} {seed}: {late:?}");
            explored += usize::from(late[0]);
        }
        assert_eq!(explored > 0, explores, "{picker}: {explored}");
    }
}
