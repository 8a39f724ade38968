//! Typical configuration files, in a folder for each verdict:
//! `tests/configs/{good,refused,invalid}/*.yaml`. Beside each file is the output of `switchpointd
//! check`.
//!
//! `UPDATE_GOLDENS=1` writes the current output into the files; read the diff before you commit it.

use std::path::{Path, PathBuf};

use control_plane::cli::args::{CheckArgs, CheckTarget, OutputFormat};
use control_plane::cli::check::{CheckVerdict, check};
use control_plane::config;
use serde_json::Value;

use crate::daemon::harness;

const FOLDERS: [(&str, CheckVerdict); 3] = [
    ("good", CheckVerdict::Fine),
    ("refused", CheckVerdict::Refused),
    ("invalid", CheckVerdict::Invalid),
];

/// Returns the files with their expected verdicts.
fn files() -> Vec<(PathBuf, CheckVerdict)> {
    let of = |(folder, verdict): (&str, CheckVerdict)| {
        let entries = std::fs::read_dir(Path::new("tests/configs").join(folder)).unwrap(); // tests run in the folder of their crate
        let files = entries.map(|entry| entry.unwrap().path()).filter(|file| {
            file.extension()
                .is_some_and(|extension| extension == "yaml")
        });
        files.map(|file| (file, verdict)).collect::<Vec<_>>()
    };
    let mut files: Vec<(PathBuf, CheckVerdict)> = FOLDERS.into_iter().flat_map(of).collect();
    files.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(files.len() > 30, "{} files", files.len());
    files
}

async fn checked(file: &Path, format: OutputFormat) -> (String, CheckVerdict) {
    check(CheckArgs {
        what: CheckTarget {
            file: Some(file.to_owned()),
            endpoint: None,
        },
        engine: None,
        format,
    })
    .await
}

/// Compares the output with the golden file beside the input, or writes it with `UPDATE_GOLDENS`.
pub(crate) fn golden(file: &Path, extension: &str, printed: &str) {
    let golden = file.with_extension(extension);
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::write(&golden, printed).unwrap();
    }
    let expected = std::fs::read_to_string(&golden).unwrap_or_default();
    assert!(
        expected == printed,
        "{} has:\n{expected}\nbut the output is:\n{printed}",
        golden.display()
    );
}

#[tokio::test]
async fn each_file_loads_to_what_its_golden_says() {
    for (file, expected) in files() {
        let (printed, verdict) = checked(&file, OutputFormat::Text).await;
        assert_eq!(verdict, expected, "{}:\n{printed}", file.display());
        golden(&file, "txt", &printed);
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(
            config::read(&text).1.is_some(),
            verdict == CheckVerdict::Fine,
            "{}",
            file.display()
        );
    }
}

#[tokio::test]
async fn json_says_the_same_in_another_form() {
    for name in ["good/pd", "good/flow-control", "invalid/everything-wrong"] {
        let file = Path::new("tests/configs").join(name).with_extension("yaml");
        let (printed, _) = checked(&file, OutputFormat::Json).await;
        golden(&file, "json", &printed);
    }
    for (file, _) in files() {
        let (printed, verdict) = checked(&file, OutputFormat::Json).await;
        let report: Value = serde_json::from_str(&printed).unwrap();
        let items = report["items"].as_array().unwrap();
        let refused = |item: &&Value| item["status"] == "refused" && item["substitute"].is_string();
        let errors = report["errors"].as_array().unwrap().len();
        let refused = items.iter().filter(refused).count();
        let expected = match (errors, refused) {
            (0, 0) => CheckVerdict::Fine,
            (0, _) => CheckVerdict::Refused,
            _ => CheckVerdict::Invalid,
        };
        assert_eq!(verdict, expected, "{}", file.display());
        assert_eq!(
            report["pipeline"].is_object(),
            verdict == CheckVerdict::Fine,
            "{}",
            file.display()
        );
        assert!(items.iter().all(|item| {
            ["implemented", "no_effect", "refused"].contains(&item["status"].as_str().unwrap())
        }));
    }
}

#[tokio::test]
async fn the_daemon_starts_with_each_good_file_and_shows_it() {
    for (file, _) in files()
        .into_iter()
        .filter(|(_, verdict)| *verdict == CheckVerdict::Fine)
    {
        let path = file.to_str().unwrap();
        let daemon = harness::daemon(&["--endpoint", "127.0.0.1:1", "--config", path]).await;
        let shown = harness::get_json(daemon.admin_address, "/debug/config").await;
        let (printed, _) = checked(&file, OutputFormat::Json).await;
        let report: Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(shown["pools"][0]["pipeline"], report["pipeline"], "{path}");
        assert_eq!(
            (&shown["pools"][0]["file"], &shown["pools"][0]["error"]),
            (&Value::from(path), &Value::Null)
        );
        daemon.stop().await;
    }
}

/// Returns damaged copies of a file: one line is lost, doubled, moved or cut, or the file ends
/// early.
fn slips(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let joined = |lines: &[&str]| lines.join("\n") + "\n";
    let slip = |at: usize| {
        let mut lost = lines.clone();
        let mut doubled = lines.clone();
        let mut moved = lines.clone();
        let mut cut = lines.clone();
        lost.remove(at);
        doubled.insert(at, lines[at]);
        moved.swap(at, (at + 1) % lines.len());
        cut[at] = &lines[at][..lines[at]
            .char_indices()
            .nth(lines[at].chars().count() / 2)
            .map_or(0, |(byte, _)| byte)];
        [
            joined(&lost),
            joined(&doubled),
            joined(&moved),
            joined(&cut),
            joined(&lines[..at]),
        ]
    };
    (0..lines.len()).flat_map(slip).collect()
}

#[test]
fn a_damaged_file_loads_to_a_pipeline_or_is_refused_with_a_word() {
    let mut loaded = 0;
    let mut refused = 0;
    for (file, _) in files() {
        for text in slips(&std::fs::read_to_string(&file).unwrap()) {
            match config::read(&text) {
                (_, Some(config)) => {
                    scheduler::Pipeline::build(&config.pipeline).unwrap_or_else(|e| {
                        panic!(
                            "{}: the filter would refuse it: {e}\n{text}",
                            file.display()
                        )
                    });
                    assert_eq!(
                        config::ResolvedConfig::from_spec(&config.pipeline)
                            .profiles
                            .len(),
                        config.pipeline.profiles.len()
                    );
                    loaded += 1;
                }
                (report, None) => {
                    assert!(
                        !report.complaints("f").is_empty(),
                        "{}: refused without a reason\n{text}",
                        file.display()
                    );
                    refused += 1;
                }
            }
        }
    }
    assert!(loaded > 100 && refused > 100, "{loaded} {refused}");
}
