//! The program, run from a command line.

use std::process::{Command, Output};
use std::time::Duration;

use control_plane::cli::build::{COMMIT, VERSION};
use tempfile::TempDir;

use super::harness::write;

fn run(args: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_switchpointd"))
        .args(args)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn check(args: &[&str], code: i32, expected: &[&str]) {
    let output = run(args, &[]);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
    for part in expected {
        assert!(said.contains(part), "{args:?}: no {part:?} in {said}");
    }
}

#[test]
fn help_teaches() {
    check(
        &["--help"],
        0,
        &[
            "Examples:",
            "serve --endpoint 127.0.0.1:8000",
            "switchpointd check config.yaml",
        ],
    );
    check(
        &["serve", "--help"],
        0,
        &[
            "--endpoints-file",
            "SWITCHPOINT_ENDPOINTS_FILE",
            "default: 127.0.0.1:9004",
            "endpoints:",
        ],
    );
    check(
        &["--version"],
        0,
        &[
            &format!("switchpointd {VERSION}"),
            env!("CARGO_PKG_VERSION"),
            COMMIT,
        ],
    );
}

#[test]
fn every_option_of_serve_is_an_environment_variable_too() {
    let help = said(&run(&["serve", "--help"], &[]));
    let options = help
        .lines()
        .map(str::trim)
        .filter_map(|l| l.strip_prefix("--"))
        .filter_map(|l| l.split([' ', '\n']).next());
    let mut count = 0;
    for option in options.filter(|o| *o != "help") {
        let variable = match option {
            // This is the name in llm-d.
            "headroom-selection-strategy" => "HEADROOM_SELECTION_STRATEGY".to_owned(),
            _ => format!("SWITCHPOINT_{}", option.to_uppercase().replace('-', "_")),
        };
        assert!(
            help.contains(&format!("[env: {variable}="))
                || help.contains(&format!("[env: {variable}]")),
            "--{option} has no {variable}"
        );
        count += 1;
    }
    assert!(count > 15, "{count} options found in\n{help}");
}

#[test]
fn a_command_line_that_cannot_be_is_refused_with_code_2() {
    check(&["serve"], 2, &["--endpoints-file", "--endpoint"]);
    check(
        &["serve", "--endpoint", "a:1", "--endpoints-file", "f"],
        2,
        &["cannot be used with"],
    );
    check(
        &["serve", "--endpoint", "a:1", "--listen-ext-proc", "x"],
        2,
        &["127.0.0.1:9002", "none"],
    );
    check(
        &["serve", "--endpoint", "a:1", "--ext-proc-tls-cert", "c"],
        2,
        &["--ext-proc-tls-key"],
    );
    check(
        &[
            "serve",
            "--endpoint",
            "a:1",
            "--ext-proc-plaintext",
            "--ext-proc-tls-cert",
            "c",
        ],
        2,
        &["cannot be used with"],
    );
    check(
        &["serve", "--endpoint", "a:1", "--listen-exit-proc", "x"],
        2,
        &["unexpected argument '--listen-exit-proc'"],
    );
    check(
        &["serve", "--endpoint", "a:1", "--scrape-interval", "5"],
        2,
        &["250ms"],
    );
    check(
        &["serve", "--endpoint", "a:1", "--state-tls-cert", "c"],
        2,
        &["--state-tls-key"],
    );
    check(
        &["serve", "--pools", "p", "--config", "c"],
        2,
        &["cannot be used with"],
    );
    check(&["check"], 2, &["FILE"]);
    let output = run(
        &["serve"],
        &[
            ("SWITCHPOINT_ENDPOINT", "127.0.0.1:1"),
            ("SWITCHPOINT_LISTEN_STATE", "nonsense"),
        ],
    );
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn what_cannot_start_ends_with_code_1_and_the_reason() {
    let none = ["--listen-ext-proc", "none", "--listen-health", "none"];
    let anywhere = [
        &[
            "serve",
            "--listen-state",
            "127.0.0.1:0",
            "--listen-admin",
            "127.0.0.1:0",
        ][..],
        &none,
    ]
    .concat();
    let serve = |args: &[&'static str]| [&anywhere, args].concat();
    check(&serve(&["--endpoint", "127.0.0.1"]), 1, &["HOST:PORT"]);
    check(
        &serve(&["--endpoint", "no-such-host.invalid:80"]),
        1,
        &["no-such-host.invalid"],
    );
    check(
        &serve(&["--endpoint", "127.0.0.1:1,127.0.0.1:1"]),
        1,
        &["two endpoints"],
    );
    check(
        &serve(&["--endpoint", "127.0.0.1:1", "--config", "/no/such/file"]),
        1,
        &["/no/such/file", "No such file"],
    );
    check(
        &serve(&["--endpoint", "127.0.0.1:1", "--objects", "/no/such/folder"]),
        1,
        &["/no/such/folder", "No such file"],
    );
    check(
        &serve(&[
            "--endpoint",
            "127.0.0.1:1",
            "--snapshot-file",
            "/no/such/folder/file",
        ]),
        1,
        &["snapshot file"],
    );
    check(
        &serve(&[
            "--endpoint",
            "127.0.0.1:1",
            "--state-tls-cert",
            "/no/c",
            "--state-tls-key",
            "/no/k",
        ]),
        1,
        &["--listen-state", "/no/c"],
    );
    let elsewhere = [
        "serve",
        "--endpoint",
        "127.0.0.1:1",
        "--listen-admin",
        "127.0.0.1:0",
        "--listen-state",
        "192.0.2.1:9",
        "--insecure-state",
    ];
    check(
        &[&elsewhere[..], &none].concat(),
        1,
        &["insecure-state", "cannot listen on 192.0.2.1:9"],
    );
    let token = serve(&[
        "--endpoint",
        "127.0.0.1:1",
        "--admin-token-file",
        "/no/such/token",
    ]);
    check(&token, 1, &["--admin-token-file", "/no/such/token"]);
}

#[test]
fn an_unprotected_listener_beyond_loopback_is_refused_and_says_what_to_set() {
    let serve = |args: &[&'static str]| [&["serve", "--endpoint", "127.0.0.1:1"], args].concat();
    check(
        &serve(&["--listen-state", "0.0.0.0:0"]),
        1,
        &[
            "--listen-state 0.0.0.0:0",
            "prompt",
            "--state-tls-client-ca",
            "--insecure-state",
        ],
    );
    check(
        &serve(&["--listen-admin", "[::]:0"]),
        1,
        &[
            "--listen-admin [::]:0",
            "--admin-token-file",
            "--insecure-admin",
        ],
    );
    let ext_proc = ["--listen-ext-proc", "0.0.0.0:0", "--ext-proc-plaintext"];
    check(
        &serve(&ext_proc),
        1,
        &[
            "--listen-ext-proc 0.0.0.0:0",
            "prompts",
            "--insecure-ext-proc",
        ],
    );
}

#[test]
fn check_answers_for_every_item() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("config.yaml");
    let path = file.to_str().unwrap();
    let with = |plugins: &str| {
        write(
            &file,
            &format!(
                "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n{plugins}"
            ),
        );
    };
    with("- type: queue-scorer\n- type: file-discovery\n");
    check(
        &["check", path],
        0,
        &[
            "config.yaml:4: implemented: plugins[0]",
            "config.yaml:5: no effect: plugins[1]",
            "fine",
        ],
    );
    with("- type: queue-scorer\n- type: precise-prefix-cache-scorer\n");
    check(
        &["check", path],
        2,
        &[
            "config.yaml:5: refused: plugins[1]",
            "instead: prefix-cache-scorer",
        ],
    );
    with("- type: quue-scorer\n");
    check(
        &["check", path],
        1,
        &[
            "config.yaml:4: error: plugins[0].type",
            "did you mean \"queue-scorer\"?",
        ],
    );
    let output = run(&["check", "--format", "json", path], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["errors"][0]["line"], 4);
    write(
        &file,
        "apiVersion: llm-d.ai/v1alpha1\n  kind: EndpointPickerConfig\n  plugins:\n  - type: queue-scorer\n",
    );
    check(
        &["check", path],
        1,
        &[
            "config.yaml:2: error: ",
            "; all lines after the first",
            ": indent them alike\n",
        ],
    );
    check(&["check", "/no/such/file"], 1, &["No such file"]);
    // `check` also tries Triton's port 8002. No other program uses this address, so the port is
    // free.
    check(
        &["check", "--endpoint", "127.231.47.11:1"],
        1,
        &["Connection refused"],
    );
}

#[test]
fn check_answers_for_objects_too() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("objects.yaml");
    let path = file.to_str().unwrap();
    let with = |kind: &str| {
        write(
            &file,
            &format!(
                "apiVersion: llm-d.ai/v1alpha2\nkind: {kind}\nmetadata: {{name: batch}}\nspec: {{priority: -1, poolRef: {{name: p}}}}\n"
            ),
        );
    };
    with("InferenceObjective");
    check(
        &["check", path],
        0,
        &[
            "objects.yaml:1: implemented: InferenceObjective \"batch\" of pool \"p\": priority -1",
            "fine",
        ],
    );
    with("InferenceModel");
    check(
        &["check", path],
        1,
        &[
            "objects.yaml:4: error: spec.priority: unknown field \"priority\"",
            "spec: has no modelName",
            "invalid",
        ],
    );
    let output = run(&["check", "--format", "json", path], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["errors"][0]["path"], "spec.priority");
    let serve = [
        "serve",
        "--endpoint",
        "127.0.0.1:1",
        "--listen-admin",
        "127.0.0.1:0",
        "--objects",
        folder.path().to_str().unwrap(),
    ];
    check(&serve, 1, &["objects.yaml:4: spec.priority: unknown field"]);
}

#[test]
fn check_warns_of_a_gateway_that_waits_too_short_for_held_requests() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("envoy.yaml");
    let path = file.to_str().unwrap();
    let with = |limit: &str| {
        write(
            &file,
            &format!(
                "http_filters:\n- typed_config:\n    \"@type\": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor\n    message_timeout: 5s\n{limit}"
            ),
        );
    };
    with("");
    check(
        &["check", path],
        0,
        &[
            "envoy.yaml:3: warning: max_message_timeout: not given: ",
            "envoy.yaml: fine\n",
        ],
    );
    let output = run(&["check", "--format", "json", path], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["items"][0]["status"], "warning", "{report}");
    with("    max_message_timeout: 3600s\n");
    let said = said(&run(&["check", path], &[]));
    assert!(!said.contains("warning") && said.contains("fine"), "{said}");
}

#[tokio::test]
async fn sigterm_stops_it_soon_and_well() {
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_switchpointd"))
        .args([
            "serve",
            "--endpoint",
            "127.0.0.1:1",
            "--listen-state",
            "127.0.0.1:0",
            "--listen-admin",
            "127.0.0.1:0",
            "--listen-ext-proc",
            "none",
            "--listen-health",
            "none",
            "--log-format",
            "json",
        ])
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = tokio::io::BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("\"serving\"") {
        line.clear();
        assert_ne!(
            tokio::io::AsyncBufReadExt::read_line(&mut lines, &mut line)
                .await
                .unwrap(),
            0,
            "ended before it served"
        );
        let parsed: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert!(parsed["level"].is_string());
    }
    let pid = child.id().unwrap().to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &pid])
            .status()
            .unwrap()
            .success()
    );
    let status = tokio::time::timeout(Duration::from_secs(10), child.wait())
        .await
        .expect("it does not stop")
        .unwrap();
    assert_eq!(status.code(), Some(0));
}

#[tokio::test]
async fn it_scrapes_plain_http_on_a_system_without_ca_certificates() {
    let nothing = tempfile::tempdir().unwrap();
    let engine = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = engine.local_addr().unwrap().to_string();
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_switchpointd"))
        .args([
            "serve",
            "--endpoint",
            &endpoint,
            "--listen-state",
            "127.0.0.1:0",
            "--listen-admin",
            "127.0.0.1:0",
        ])
        .args(["--listen-ext-proc", "none", "--listen-health", "none"])
        .env("SSL_CERT_FILE", nothing.path().join("none.pem"))
        .env("SSL_CERT_DIR", nothing.path())
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let asked = tokio::time::timeout(Duration::from_secs(30), engine.accept()).await;
    let _ = child.start_kill();
    let log = String::from_utf8(child.wait_with_output().await.unwrap().stderr).unwrap();
    assert!(asked.is_ok(), "the engine was not scraped: {log}");
    assert!(
        log.contains("WARN") && log.contains("no CA certificates"),
        "{log}"
    );
}

/// Checks the arguments that the migration program gets. A `sh` under the name of the program shows
/// the arguments.
#[test]
fn migrate_runs_the_program_of_its_own_and_says_so() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("path");
    std::fs::create_dir(&path).unwrap();
    let daemon = folder.path().join("switchpointd");
    std::fs::hard_link(env!("CARGO_BIN_EXE_switchpointd"), &daemon).unwrap();
    let run = || {
        Command::new(&daemon)
            .args([
                "migrate",
                "-c",
                "echo $0 $@; exit 3",
                "-f",
                "--pool",
                "a",
                "--help",
            ])
            .env("PATH", &path)
            .output()
            .unwrap()
    };
    let missing = run();
    let message = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert_eq!(missing.status.code(), Some(1), "{message}");
    assert!(
        message.contains("switchpoint-migrate is missing: put it beside"),
        "{message}"
    );

    for place in [path.as_path(), folder.path()] {
        std::os::unix::fs::symlink("/bin/sh", place.join("switchpoint-migrate")).unwrap();
        let output = run();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{message}");
        assert_eq!(output.stdout, b"-f --pool a --help\n");
        assert!(
            message.lines().count() == 1 && message.contains("switchpoint-migrate"),
            "{message}"
        );
        std::fs::remove_file(place.join("switchpoint-migrate")).unwrap();
    }
}
