//! Decisions are the same natively and in wasm, to the last digit of every score.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::case::{DecisionCase, Digits};
use crate::golden;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// Builds the example `golden` as the module is built, from the same compiled dependencies.
fn build() -> PathBuf {
    let status = Command::new(env!("CARGO"))
        .args([
            "--config",
            "filter/module.toml",
            "build",
            "--locked",
            "--quiet",
        ])
        .args(["--release", "--target", "wasm32-wasip1"])
        .args(["-p", "scheduler", "--example", "golden"])
        .current_dir(root())
        // Settings of the outer cargo must not affect this build.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .unwrap();
    assert!(
        status.success(),
        "the example `golden` does not build for wasm32-wasip1"
    );
    root().join("target/wasm32-wasip1/release/examples/golden.wasm")
}

#[test]
fn every_golden_case_is_decided_alike() {
    let python = root().join(".venv/bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `make setup` first",
        python.display()
    );
    let files = golden::files();
    let output = Command::new(python)
        .arg(root().join("crates/scheduler/tests/wasm_golden.py"))
        .arg(build())
        .args(files.iter().map(|(file, _)| file))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{} (is `wasmtime` there? run `make setup`)",
        String::from_utf8_lossy(&output.stderr)
    );
    let in_wasm = String::from_utf8(output.stdout).unwrap();
    let native: String = files
        .iter()
        .map(|(_, text)| {
            DecisionCase::parse(text)
                .unwrap()
                .decide()
                .unwrap()
                .render(Digits::All)
        })
        .collect();
    assert!(
        native.lines().count() > 4 * files.len(),
        "there is something to compare"
    );
    assert_eq!(native, in_wasm);
}
