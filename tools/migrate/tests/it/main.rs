//! `switchpoint-migrate` with installations in the shape of llm-d's guides: `tests/installations/*.yaml`.
//! The first line of each file has its arguments. Beside each file are the values (`.values`) and
//! the report (`.report`, Markdown) that the command prints.
//!
//! `UPDATE_GOLDENS=1` writes the current output into the files; read the diff before you commit it.

#![cfg(test)] // so that lints treat helpers outside #[test] functions as test code

use std::path::{Path, PathBuf};

use clap::Parser;
use control_plane::config;
use migrate::MigrateArgs;
use proptest::prelude::*;

mod docs;

const FOLDER: &str = "tests/installations"; // tests run in the folder of their crate

fn files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(FOLDER).unwrap();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|file| file.extension().is_some_and(|e| e == "yaml"))
        .collect();
    files.sort();
    assert!(files.len() >= 7, "{} files", files.len());
    files
}

/// Compares the output with the golden file beside the input, or writes it with `UPDATE_GOLDENS`.
fn golden(file: &Path, extension: &str, printed: &str) {
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

/// Runs the command. Returns the exit code, stdout and stderr.
async fn run(arguments: &[&str]) -> (u8, String, String) {
    let args =
        MigrateArgs::try_parse_from(["switchpoint-migrate"].iter().chain(arguments)).unwrap();
    let mut out = Vec::new();
    let mut err = Vec::new();
    let code = migrate::run(args, &mut out, &mut err).await;
    (
        code,
        String::from_utf8(out).unwrap(),
        String::from_utf8(err).unwrap(),
    )
}

async fn run_file(file: &Path) -> (u8, String, String) {
    let text = std::fs::read_to_string(file).unwrap();
    let first = text
        .lines()
        .next()
        .unwrap()
        .trim_start_matches("# ")
        .replace("OBJECTS ", "");
    let arguments = first.replace("FILE", file.to_str().unwrap());
    run(&arguments.split_whitespace().collect::<Vec<_>>()).await
}

#[tokio::test]
async fn each_installation_becomes_what_its_golden_says() {
    for file in files() {
        let (code, values, report) = run_file(&file).await;
        let lossless = report.contains("\n0 no equivalent, 0 unknown, ");
        assert_eq!(
            code,
            if lossless { 0 } else { 3 },
            "{}: {report}",
            file.display()
        );
        golden(&file, "values", &values);
        golden(&file, "report", &report);
    }
}

#[tokio::test]
async fn the_files_of_a_folder_say_the_same_and_the_configuration_loads() {
    for file in files() {
        let folder = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        let first = text
            .lines()
            .next()
            .unwrap()
            .trim_start_matches("# ")
            .replace("OBJECTS ", "")
            .replace("FILE", file.to_str().unwrap());
        let written = format!(
            "{first} --output-dir {}",
            folder.path().join("new").display()
        );
        let (code, out, err) = run(&written.split_whitespace().collect::<Vec<_>>()).await;
        assert!(out.is_empty() && err.contains(" kept."), "{err}");
        let (same_code, values, report) = run_file(&file).await;
        let read =
            |name: &str| std::fs::read_to_string(folder.path().join("new").join(name)).unwrap();
        assert_eq!(
            (code, read("values.yaml"), read("report.md")),
            (same_code, values, report)
        );
        let written = std::fs::read_dir(folder.path().join("new"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let pickers: Vec<String> = written.filter(|name| name.starts_with("picker")).collect();
        assert!(!pickers.is_empty());
        for picker in &pickers {
            assert!(
                config::read(&read(picker)).1.is_some(),
                "{}: {}",
                file.display(),
                config::read(&read(picker)).0.complaints(picker)
            );
        }
    }
}

#[tokio::test]
async fn input_that_cannot_be_read_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let laughs = "a: &a [x,x,x,x,x,x,x,x]\n".to_owned()
        + &(b'b'..=b'j')
            .map(|c| {
                let before = (c - 1) as char;
                let c = c as char;
                format!("{c}: &{c} [{}]\n", vec![format!("*{before}"); 8].join(","))
            })
            .collect::<String>();
    let huge = format!("# {}\n", "x".repeat(5 << 20));
    let many = "kind: List\nitems:\n".to_owned() + &"- kind: A\n".repeat(10_001);
    for (name, text, why) in [
        ("bomb", laughs.as_str(), ""),
        ("deep", &"[".repeat(100_000), ""),
        ("huge", &huge, "larger than 4194304 bytes"),
        ("many", &many, "more than 10000 objects"),
        ("nothing", "", "no endpoint picker among 0 objects"),
        (
            "other",
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n",
            "no endpoint picker among 1 objects",
        ),
        (
            "no-kind",
            "a: 1\n",
            "it has no kind; values belong after -f",
        ),
        ("list", "kind: List\nitems: [1, {}]\n", "it has no kind"),
    ] {
        let path = file(name, text);
        let (code, out, err) = run(&[&path]).await;
        assert!(
            code == 1
                && out.is_empty()
                && err.contains(why)
                && err.contains(&path) != why.starts_with("no endpoint"),
            "{name}: {err}"
        );
        assert!(err.len() < 1_000, "{name}: {err}");
        if why.is_empty() || name == "huge" {
            let (code, _, err) = run(&["-f", &path, "--pool", "a"]).await;
            assert!(code == 1 && err.contains(why), "{name}: {err}");
        }
    }
    let (code, _, err) = run(&[
        "-f",
        &file("objects", "apiVersion: v1\nkind: List\n"),
        "--pool",
        "a",
    ])
    .await;
    assert!(code == 1 && err.contains("give it without -f"), "{err}");
    let (code, _, err) = run(&[folder.path().join("absent").to_str().unwrap()]).await;
    assert!(code == 1 && err.contains("No such file"), "{err}");
}

#[test]
fn wrong_usage_is_an_error_of_the_command_line() {
    for arguments in [
        &[][..],
        &["-f", "a"],
        &["--cluster"],
        &["-f", "a", "--pool", "b", "c"],
        &["-", "--cluster", "--namespace", "a"],
    ] {
        let error = MigrateArgs::try_parse_from(["switchpoint-migrate"].iter().chain(arguments))
            .unwrap_err();
        assert_eq!(error.exit_code(), 2, "{arguments:?}");
    }
}

/// Returns an API server that serves the objects of a file as lists.
fn api_server(objects: &serde_json::Value) -> axum::Router {
    let items = objects["items"].as_array().unwrap().clone();
    let answer = move |uri: axum::http::Uri| async move {
        let resource = uri.path().rsplit('/').next().unwrap_or_default().to_owned();
        let of_kind = |item: &&serde_json::Value| {
            format!("{}s", item["kind"].as_str().unwrap().to_lowercase()) == resource
        };
        let found: Vec<serde_json::Value> = items.iter().filter(of_kind).cloned().collect();
        let Some(first) = found.first() else {
            return Err(axum::http::StatusCode::NOT_FOUND);
        };
        let kind = format!("{}List", first["kind"].as_str().unwrap());
        let bare = found.into_iter().map(|mut item| {
            item.as_object_mut().unwrap().remove("kind");
            item
        });
        Ok(axum::Json(
            serde_json::json!({ "kind": kind, "apiVersion": "v1", "items": bare.collect::<Vec<_>>() }),
        ))
    };
    axum::Router::new().fallback(answer)
}

#[tokio::test]
async fn a_cluster_gives_the_same_as_its_objects_in_a_file() {
    let file = Path::new(FOLDER).join("running-picker.yaml");
    let objects: serde_json::Value =
        serde_saphyr::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, api_server(&objects)).await });
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("config");
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "a",
        "clusters": [{"name": "a", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "a", "user": {}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let command = |pool: &str| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_switchpoint-migrate"));
        command
            .args(["--cluster", "--namespace", "default", "--pool", pool])
            .env("KUBECONFIG", &kubeconfig);
        command
    };
    let output = command("llama").output().await.unwrap();
    let (_, values, _) = run_file(&file).await;
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned()
        ),
        (Some(0), values),
        "{err}"
    );
    let output = command("other").output().await.unwrap();
    assert_eq!(
        output.status.code(),
        Some(1),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    server.abort();
}

/// Keys and values from real charts and objects.
const WORDS: &[&str] = &[
    "router",
    "epp",
    "flags",
    "env",
    "name",
    "value",
    "pluginsConfigFile",
    "pluginsCustomConfig",
    "default-plugins.yaml",
    "modelServers",
    "matchLabels",
    "targetPorts",
    "number",
    "proxy",
    "resources",
    "monitoring",
    "prometheus",
    "enabled",
    "inferenceExtension",
    "inferencePool",
    "create",
    "extraServicePorts",
    "port",
    "provider",
    "httpRoute",
    "kind",
    "metadata",
    "spec",
    "data",
    "template",
    "containers",
    "args",
    "items",
    "plugins",
    "type",
    "parameters",
    "schedulingProfiles",
    "pluginRef",
    "queue-scorer",
    "tokenizer",
    "apiVersion",
    "llm-d.ai/v1",
    "EndpointPickerConfig",
    "Deployment",
    "InferencePool",
    "List",
    "--pool-name",
];

/// Generates values with the keys of real charts, in wrong shapes of every kind.
fn values() -> impl Strategy<Value = serde_json::Value> {
    let word = prop::sample::select(WORDS).prop_map(str::to_owned);
    let config = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: tokenizer}, {type: [}]\n".to_owned();
    let scalar = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        word.clone().prop_map(Into::into),
        ".{0,12}".prop_map(Into::into),
        Just(config.into()),
    ];
    scalar.prop_recursive(6, 80, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Into::into),
            prop::collection::btree_map(prop_oneof![4 => word.clone(), 1 => ".{0,8}"], inner, 0..6)
                .prop_map(|entries| serde_json::Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn any_yaml_is_survived(documents in prop::collection::vec(values(), 1..3), bytes in "(?s).{0,60}") {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let text = documents.iter().map(|document| format!("---\n{document}\n")).collect::<String>();
        let wrapped = format!("router: {}\ninferenceExtension: {}\n", documents[0], documents[0]);
        for text in [text, wrapped, bytes] {
            std::fs::write(&path, &text).unwrap();
            for arguments in [&["-f", path.to_str().unwrap(), "--pool", "a"][..], &[path.to_str().unwrap()]] {
                let (code, values, report) = runtime.block_on(run(arguments));
                prop_assert!([0, 1, 3].contains(&code), "{code}: {report}");
                if code != 1 {
                    let read: serde_json::Value = serde_saphyr::from_str(&values).map_err(|e| TestCaseError::fail(format!("{e}\n{values}")))?;
                    prop_assert!(read["pools"].is_array(), "{values}");
                    prop_assert!(report.lines().all(|line| line.chars().count() < 1_200), "{report}");
                }
            }
        }
    }
}

/// A test with Helm. `make e2e-long` builds Helm and runs the test.
mod slow {
    use std::io::Write;

    use super::*;

    #[tokio::test]
    async fn our_chart_takes_the_values() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let helm = root.join(".tools/bin/helm");
        let chart = root.join("deploy/charts/switchpoint");
        if !helm.exists() {
            // Writes to stdout itself, because `cargo test` hides the output of `print!` for tests
            // that pass.
            let why =
                "there is no helm; `.ci/cluster_tools.py helm` builds it where Go is installed";
            writeln!(
                std::io::stdout(),
                "SKIPPED slow::our_chart_takes_the_values: {why}"
            )
            .unwrap();
            return;
        }
        for file in files() {
            let values = file.with_extension("values");
            let text = std::fs::read_to_string(&values).unwrap();
            let namespace = text
                .lines()
                .find_map(|line| line.strip_prefix("  namespace: "))
                .unwrap_or("default");
            let mut command = std::process::Command::new(&helm);
            let output = command
                .args([
                    "template",
                    "test",
                    "--api-versions",
                    "monitoring.coreos.com/v1",
                    "--namespace",
                    namespace,
                    // The chart refuses ext_proc without them, and the report says so.
                    "--set-json",
                    r#"networkPolicy.extProcGateways=[{"namespaceSelector":{}}]"#,
                    "-f",
                ])
                .arg(&values)
                .arg(&chart)
                .output()
                .unwrap();
            assert!(
                output.status.success(),
                "{}: {}",
                values.display(),
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
}
