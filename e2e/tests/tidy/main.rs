//! Rules that no compiler lint can express, checked by reading the sources.
//!
//! A rule is a pure function from files to complaints, with a sample that it must complain about.
//! Each rule yields two tests: the repository keeps the rule, and the rule can fail. The rules do
//! not read this folder, because it contains the samples.

#![allow(clippy::expect_used, reason = "a test fails at the first error")]

mod rules;
mod tree;

use tree::{SourceFile, SourceTree};

/// Declares the rules: `name: function, [bad sample: path => text, ...]`.
macro_rules! rules {
    ($($name:ident: [$($path:literal => $text:expr),+ $(,)?];)+) => {$(
        mod $name {
            use super::{SourceFile, SourceTree, rules};

            #[test]
            fn holds() {
                let complaints = rules::$name(&SourceTree::of_repository());
                assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
            }

            #[test]
            fn can_fail() {
                let bad = SourceTree(vec![$(SourceFile { path: $path.into(), text: $text.into() }),+]);
                assert!(!rules::$name(&bad).is_empty(), "the sample should have been refused");
            }
        }
    )+};
}

rules! {
    hostcalls_stay_in_host: [
        "filter/src/http.rs" => "fn f(&self) { self.get_http_request_header(\":path\"); }",
        "filter/src/headers.rs" => "use proxy_wasm::types::Action;",
        "filter/src/host/shared.rs" => "proxy_wasm::hostcalls::get_current_time()",
    ];
    cells_are_opened_where_callbacks_enter: [
        "filter/src/state_link.rs" => "for replica in lead.replicas { self.send(replica.borrow_mut().share()); }",
        "filter/src/shared_data/placement_ring.rs" => "use std::cell::RefCell;",
    ];
    adapter_is_thin: ["filter/src/http.rs" => "let x = 1;\n".repeat(901)];
    scheduler_is_pure: ["crates/scheduler/Cargo.toml" => "[dependencies]\nserde.workspace = true\n"];
    direct_dependencies_are_few: ["crates/scheduler/Cargo.toml" => "[dependencies]\na = \"1\"\nb = \"1\"\nc = \"1\"\nd = \"1\"\n"];
    unsafe_stays_in_host: ["filter/src/root.rs" => "#[allow(unsafe_code)] // fast\nfn f() {}"];
    allows_have_a_reason: ["crates/proto/src/lib.rs" => "#[allow(clippy::all)]\nfn f() {}"];
    tests_are_never_ignored: ["crates/proto/src/lib.rs" => "#[test]\n#[ignore]\nfn f() {}"];
    modules_have_names: ["crates/proto/src/wire/mod.rs" => ""];
    members_take_the_lints: ["crates/proto/Cargo.toml" => "[package]\nname = \"proto\"\n"];
    members_take_the_repository: [
        "crates/proto/Cargo.toml" => "[package]\nname = \"proto\"\nlicense.workspace = true\n",
    ];
    fuzz_crates_stand_alone: ["crates/proto/fuzz/Cargo.toml" => "[package]\nname = \"proto-fuzz\"\n"];
    pure_crates_repeat_the_bans: [
        "clippy.toml" => "disallowed-methods = [\n  { path = \"std::env::set_var\", reason = \"races\" },\n]\n",
        "crates/exchange/clippy.toml" => "disallowed-methods = []\n",
    ];
    envoy_is_configured_in_one_place: ["e2e/tests/it/copy.yaml" => "static_resources:\n  listeners: []\n"];
    nothing_is_of_one_machine: ["README.md" => concat!("see /ro", "ot/notes.txt")];
    access_logs_cut_what_clients_write: [
        "envoy-config/standalone.yaml" => "request_id: \"%REQ(X-REQUEST-ID)%\"\npath: \"%PATH(NQ):256%\"\n"
    ];
    documented_verbs_exist: ["README.md" => "Type `make dinner`.", "Makefile" => "lint:\n\ttrue\n"];
    documented_flags_exist: [
        "README.md" => "    switchpointd serve --endpoint 127.0.0.1:8000 --dry-run\n",
        "control-plane/src/cli/args/endpoints.rs" => "pub endpoint: Vec<String>,",
    ];
    documented_drills_exist: [
        "docs/reference/failure-drills.md" => "| killed | `missing_module` | 1, 0 |\n",
        "e2e/tests/it/daemon_faults.rs" => "async fn something_else() {",
    ];
    recipes_list_every_file: [
        "crates/exchange/src/headers.rs" => "const LAST: RequestApi = RequestApi::Conversations;",
    ];
    recipes_count_their_files: [
        "CONTRIBUTING.md" => "**A thing** changes 3 files.\n1. `a/b.rs`: a row.\n2. `a/c.rs`, if it has one.\n",
    ];
    guide_names_files_from_the_root: [
        "CONTRIBUTING.md" => "1. `crates/a/src/b.rs`: a row.\n2. `b/c.rs`: another.\n",
        "crates/a/src/b/c.rs" => "",
    ];
    documented_ports_exist: [
        "docs/how-to/envoy.md" => "| 8081 | Envoy | clients |\n",
        "envoy-config/standalone.yaml" => "port_value: 8080",
    ];
}

#[test]
fn recipes_lack_a_file_in_any_folder_and_in_unit_tests() {
    let place = |path: &str, text: &str| SourceFile {
        path: path.into(),
        text: text.into(),
    };
    let used =
        "fn f() {}\n#[cfg(test)]\nmod tests {\n    use scheduler::metrics::KV_BLOCK_TOKENS;\n}\n";
    for path in [
        "crates/exchange/src/host.rs",
        "crates/exchange/tests/it/host.rs",
        "crates/exchange/benches/host.rs",
        "filter/fuzz/fuzz_targets/host.rs",
        "tools/simulator/src/host.rs",
        "e2e/tests/it/host.rs",
    ] {
        let tree = SourceTree(vec![place(path, used)]);
        let lacks = format!("CONTRIBUTING.md: the recipe **An engine's metric** lacks {path}");
        let complaints = rules::recipes_list_every_file(&tree);
        assert!(complaints.contains(&lacks), "{complaints:?}");
        let guide = format!("**An engine's metric** changes 1 file.\n1. `{path}`: a row.\n");
        let tree = SourceTree(vec![place("CONTRIBUTING.md", &guide), place(path, used)]);
        let complaints = rules::recipes_list_every_file(&tree);
        assert!(!complaints.contains(&lacks), "{complaints:?}");
    }
}

/// Checks which crates the wasm module is built from. `deny.toml` cannot express this rule, because
/// it checks one graph for all crates.
#[test]
fn the_module_is_built_without_the_daemons_stack() {
    let output = std::process::Command::new(env!("CARGO"))
        .args([
            "tree",
            "--locked",
            "-p",
            "filter",
            "--target",
            "wasm32-wasip1",
            "-e",
            "normal",
            "--prefix",
            "none",
        ])
        .current_dir(tree::root())
        .output()
        .expect("cargo tree runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let crates = String::from_utf8(output.stdout).expect("UTF-8");
    let complaints = rules::daemon_crates(&crates);
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    assert!(
        crates.contains("proxy-wasm "),
        "this is not the tree of the filter:\n{crates}"
    );
    assert_eq!(
        rules::daemon_crates("filter v0.1.0\ntokio v1.54.1\n").len(),
        1,
        "the check can fail"
    );
}
