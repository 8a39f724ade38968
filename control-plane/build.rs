//! Gives the program its commit, for `--version`, the log and the metrics.
//!
//! The commit comes from the environment variable `SWITCHPOINT_COMMIT` (`HASH` or `HASH,DATE`), for
//! builds without a repository, else from git. Only release builds call git, because otherwise each
//! commit would compile this crate and its tests again. The date is the commit's, so a build can be
//! reproduced.

#![allow(clippy::print_stdout, reason = "cargo reads it")]

use std::path::Path;
use std::process::Command;

const VARIABLE: &str = "SWITCHPOINT_COMMIT";

/// The digits of a hash that are shown.
const DIGITS: usize = 7;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let given = std::env::var(VARIABLE)
        .ok()
        .filter(|given| !given.is_empty());
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| is_release.then(|| of_repository(&repository)).flatten());
    let (commit, shown) = describe(commit.as_deref());
    println!("cargo::rustc-env=SWITCHPOINT_BUILD_COMMIT={commit}");
    println!(
        "cargo::rustc-env=SWITCHPOINT_BUILD_VERSION={} ({shown})",
        env!("CARGO_PKG_VERSION")
    );
}

/// The commit of the repository in this folder as `HASH,DATE`. `None` without a repository or git.
/// A later commit or checkout runs this script again.
pub fn of_repository(folder: &Path) -> Option<String> {
    if !folder.join(".git").exists() {
        return None; // a folder of another repository, for example of vendored crates
    }
    let git = |arguments: &[&str]| -> Option<String> {
        let output = Command::new("git")
            .arg("-C")
            .arg(folder)
            .args(arguments)
            .output()
            .ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name])?;
        let path = folder.join(path);
        // Cargo runs the script each time if a path does not exist.
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    git(&["log", "-1", "--format=%H,%cs"])
}

/// The short hash, and the text in the parentheses of the version.
pub fn describe(commit: Option<&str>) -> (String, String) {
    let Some(commit) = commit else {
        return ("unknown".to_owned(), "unknown".to_owned());
    };
    let (hash, date) = commit
        .split_once(',')
        .map_or((commit, None), |(hash, date)| (hash, Some(date)));
    let hash: String = hash.trim().chars().take(DIGITS).collect();
    let shown = date.map_or_else(|| hash.clone(), |date| format!("{hash}, {}", date.trim()));
    (hash, shown)
}
