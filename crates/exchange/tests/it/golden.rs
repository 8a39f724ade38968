//! Text files of cases: the input, and below it, in lines that start with `=> `, the outcome.
//!
//! `UPDATE_GOLDENS=1` writes the outcomes into the files; read the diff before committing it.

use std::path::{Path, PathBuf};

/// Compares the outcome of every case in `tests/golden/<folder>` with the file. A case is a head
/// line (which starts with `/`), the input lines, and the outcome. Lines that start with `#` stand
/// between cases.
pub(crate) fn check(folder: &str, mut outcome: impl FnMut(&str, &[u8]) -> String) {
    let mut wrong = Vec::new();
    for (file, text) in files(folder) {
        let now = rerun(&text, &mut outcome);
        if std::env::var_os("UPDATE_GOLDENS").is_some() {
            std::fs::write(&file, &now).unwrap();
        } else if now != text {
            wrong.push(format!("{}:\n{now}", file.display()));
        }
    }
    assert!(
        wrong.is_empty(),
        "these cases have other outcomes:\n{}",
        wrong.join("\n")
    );
}

/// Calls `case` with the head and the input of each case.
pub(crate) fn for_each_case(folder: &str, mut case: impl FnMut(&str, &[u8])) {
    for (_, text) in files(folder) {
        rerun(&text, &mut |head, given| {
            case(head, given);
            String::new()
        });
    }
}

fn files(folder: &str) -> Vec<(PathBuf, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|f| f.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no goldens in {}", dir.display());
    files
        .into_iter()
        .map(|file| (file.clone(), std::fs::read_to_string(file).unwrap()))
        .collect()
}

fn rerun(text: &str, outcome: &mut impl FnMut(&str, &[u8]) -> String) -> String {
    let mut out = String::new();
    let mut head = None;
    let mut given = String::new();
    let lines = text.lines().filter(|line| !line.starts_with("=> "));
    for line in lines.chain(["#"]) {
        let comment = line.starts_with('#');
        if !comment && !line.starts_with('/') {
            given += &format!("{line}\n");
            continue;
        }
        let given = std::mem::take(&mut given);
        let given = given.trim_end_matches('\n');
        if let Some(head) = head.take() {
            out += &format!("{head}\n{given}\n");
            outcome(head, given.as_bytes())
                .lines()
                .for_each(|line| out += &format!("=> {line}\n"));
            out += "\n";
        }
        if comment {
            out += &format!("{line}\n");
        } else {
            head = Some(line);
        }
    }
    out.trim_end_matches(['#', '\n']).to_owned() + "\n"
}
