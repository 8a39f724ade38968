//! Runs every test of `tests/it` again, built for wasm with the vector instructions of the module,
//! on the same golden files.
#![cfg(test)]

// The build takes a minute or more.
mod slow {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .canonicalize()
            .unwrap()
    }

    /// Builds `tests/it` for wasm, in a separate target folder, because the build that runs this
    /// test holds the lock of the usual folder.
    fn build() -> PathBuf {
        let output = Command::new(env!("CARGO"))
            .args([
                "test",
                "--no-run",
                "-p",
                "exchange",
                "--test",
                "it",
                "--target",
                "wasm32-wasip1",
                "--message-format",
                "json-render-diagnostics",
            ])
            .current_dir(root())
            .env("CARGO_TARGET_DIR", root().join("target/wasm-golden"))
            // The tests run in one thread. With this level they are five times as fast as without
            // optimisation.
            .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
            // The settings of the outer cargo's build must not leak into this build.
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "`tests/it` does not build for wasm32-wasip1: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let messages = String::from_utf8(output.stdout).unwrap();
        let messages = messages
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let artefacts: Vec<String> = messages
            .filter_map(|m| Some(m["executable"].as_str()?.to_owned()))
            .collect();
        let [wasm] = &artefacts[..] else {
            panic!("not one artefact: {artefacts:?}")
        };
        wasm.into()
    }

    #[test]
    fn every_test_passes_in_wasm() {
        let python = root().join(".venv/bin/python");
        assert!(
            python.exists(),
            "{} is missing: run `make setup` first",
            python.display()
        );
        let crate_root = env!("CARGO_MANIFEST_DIR");
        let output = Command::new(python)
            .arg(Path::new(crate_root).join("tests/wasm/run.py"))
            .arg(build())
            .arg(crate_root)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{said}\n{} (is `wasmtime` there? run `make setup`)",
            String::from_utf8_lossy(&output.stderr)
        );
        let passed = said
            .lines()
            .filter(|line| line.starts_with("test ") && line.ends_with("... ok"))
            .count();
        assert!(passed >= 20, "only {passed} tests ran: {said}");
    }
}
