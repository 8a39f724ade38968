//! Tests the build script, which gives the program its commit.

use std::path::Path;
use std::process::Command;

#[allow(dead_code, reason = "cargo runs its `main`")]
#[path = "../../build.rs"]
mod build;

use build::{describe, of_repository};

fn git(folder: &Path, arguments: &[&str]) -> String {
    let identity = [
        "-c",
        "user.name=n",
        "-c",
        "user.email=e",
        "-c",
        "commit.gpgsign=false",
    ];
    let date = "2026-11-24T12:00:00Z";
    let mut command = Command::new("git");
    command
        .arg("-C")
        .arg(folder)
        .args(identity)
        .args(arguments)
        .env("GIT_AUTHOR_DATE", date)
        .env("GIT_COMMITTER_DATE", date);
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn the_commit_and_its_date_are_those_of_the_repository() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(of_repository(folder.path()), None, "no repository");
    git(folder.path(), &["init", "--quiet"]);
    assert_eq!(of_repository(folder.path()), None, "no commit");
    git(
        folder.path(),
        &["commit", "--quiet", "--allow-empty", "-m", "m"],
    );
    let hash = git(folder.path(), &["rev-parse", "HEAD"]);
    let found = of_repository(folder.path()).unwrap();
    assert_eq!(found, format!("{hash},2026-11-24"));
    assert_eq!(
        describe(Some(&found)),
        (hash[..7].to_owned(), format!("{}, 2026-11-24", &hash[..7]))
    );
    std::fs::create_dir(folder.path().join("vendored")).unwrap();
    assert_eq!(
        of_repository(&folder.path().join("vendored")),
        None,
        "a folder of another repository"
    );
}

#[test]
fn a_commit_without_a_date_and_no_commit_are_shown_as_such() {
    assert_eq!(
        describe(Some("502c016")),
        ("502c016".to_owned(), "502c016".to_owned())
    );
    assert_eq!(describe(None), ("unknown".to_owned(), "unknown".to_owned()));
}
