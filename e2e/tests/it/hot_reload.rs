//! The scheduling configuration file is rewritten while requests run.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use testbed::client;
use testbed::load::LoadGenerator;
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use crate::echo;

/// The maximum wait for a start, and for a change without a promised time.
const LIMIT: Duration = Duration::from_secs(30);

/// The maximum time until a configuration is in force. The product promises one second on an idle
/// machine, but a test machine may compile at the same time.
const IN_FORCE_LIMIT: Duration = Duration::from_secs(10);

const WORKERS: usize = 4;

/// Returns a configuration that allows one endpoint only, so that each pick shows which
/// configuration made it.
fn only(server: usize) -> String {
    format!(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: label-selector-filter\n  parameters: {{matchLabels: {{server: '{server}'}}}}\n- type: random-picker\n"
    )
}

/// The ways in which operators and kubelets replace a file.
#[derive(Clone, Copy, Debug)]
enum WriteMethod {
    Rename,
    InPlace,
    Symlink,
}

/// A folder like a mounted ConfigMap: `config.yaml -> ..data/config.yaml`, `..data -> ..N`.
struct ConfigMapMount {
    folder: TempDir,
    version: usize,
}

impl ConfigMapMount {
    fn new(text: &str) -> Result<Self> {
        let mut mounted = Self {
            folder: tempfile::tempdir()?,
            version: 0,
        };
        mounted.swap(text)?;
        symlink("..data/config.yaml", mounted.file())?;
        Ok(mounted)
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("config.yaml")
    }

    fn write(&mut self, way: WriteMethod, text: &str) -> Result<()> {
        match way {
            WriteMethod::Symlink => self.swap(text),
            WriteMethod::InPlace => Ok(std::fs::write(self.file(), text)?),
            WriteMethod::Rename => {
                // Replaces the file that the kubelet's symlink points to, as an editor does.
                let target = std::fs::canonicalize(self.file())?;
                let draft = target.with_extension("draft");
                std::fs::write(&draft, text)?;
                Ok(std::fs::rename(draft, target)?)
            }
        }
    }

    fn swap(&mut self, text: &str) -> Result<()> {
        self.version += 1;
        let name = format!("..{}", self.version);
        let at = |name: &str| self.folder.path().join(name);
        std::fs::create_dir(at(&name))?;
        std::fs::write(at(&name).join("config.yaml"), text)?;
        symlink(&name, at("..data_tmp"))?;
        Ok(std::fs::rename(at("..data_tmp"), at("..data"))?)
    }
}

/// Returns an endpoints file that gives each endpoint a different label.
fn endpoints(stack: &Stack) -> String {
    let row = |(i, server): (usize, &testbed::model_server::ModelServer)| {
        let address = server.addr();
        format!(
            "- {{name: server-{i}, address: {}, port: {}, labels: {{server: '{i}'}}}}\n",
            address.ip(),
            address.port()
        )
    };
    format!(
        "endpoints:\n{}",
        stack
            .servers
            .iter()
            .enumerate()
            .map(row)
            .collect::<String>()
    )
}

async fn start(config: &Path) -> Result<Stack> {
    let config = config.to_str().ok_or("a path of text")?;
    let arguments = ["--config", config];
    // No pick may be made before the endpoints have their labels, which the code below sets.
    let mut stack = Stack::builder()
        .servers(2)
        .concurrency(4)
        .daemon_arguments(&arguments)
        .without_waiting()
        .shared_envoy()
        .start()
        .await?;
    let text = endpoints(&stack);
    stack.daemon()?.settings().write_endpoints_file(&text)?;
    stack.wait_until_ready().await?;
    let labelled = || async { (picks(&stack).await.ok()? == BTreeSet::from([0])).then_some(()) };
    wait_for(LIMIT, "the labels to be known", labelled).await?;
    Ok(stack)
}

/// Sends requests, and returns the servers that answer. Each request uses a separate connection, so
/// Envoy chooses a worker for each. Of a million rounds, 40 omit one of the workers.
async fn picks(stack: &Stack) -> Result<BTreeSet<usize>> {
    let mut picks = BTreeSet::new();
    for _ in 0..10 * WORKERS {
        let reply = stack
            .post("/v1/chat/completions", &echo::chat("who?"))
            .await?;
        picks.insert(stack.server_of(&reply)?);
    }
    Ok(picks)
}

async fn until_all_go_to(stack: &Stack, server: usize) -> Result<Duration> {
    let began = Instant::now();
    let all = || async { (picks(stack).await.ok()? == BTreeSet::from([server])).then_some(()) };
    wait_for(
        IN_FORCE_LIMIT,
        &format!("every worker to pick server {server}"),
        all,
    )
    .await?;
    Ok(began.elapsed())
}

async fn debug_config(stack: &Stack) -> Result<Value> {
    let reply = stack
        .daemon
        .as_ref()
        .ok_or("no daemon")?
        .admin("/debug/config")
        .await?;
    Ok(reply.json()?["pools"][0].clone())
}

#[tokio::test]
async fn picks_follow_the_file_and_no_request_is_lost() -> Result<()> {
    let mut mounted = ConfigMapMount::new(&only(0))?;
    let stack = start(&mounted.file()).await?;
    let load = LoadGenerator::start(stack.address(), 6);
    for round in 1..=10 {
        let way = [
            WriteMethod::Rename,
            WriteMethod::InPlace,
            WriteMethod::Symlink,
        ][round % 3];
        mounted.write(way, &only(round % 2))?;
        until_all_go_to(&stack, round % 2).await?;
        // A configuration that was applied stays: no worker returns to an earlier configuration.
        assert_eq!(
            picks(&stack).await?,
            BTreeSet::from([round % 2]),
            "round {round}, {way:?}"
        );
    }
    let config = debug_config(&stack).await?;
    assert_eq!(
        (&config["error"], config["taken"].as_u64()),
        (&Value::Null, Some(11)),
        "{config}"
    );
    load.stop().await?.check_all_served()
}

#[tokio::test]
async fn a_bad_file_changes_nothing_and_is_seen() -> Result<()> {
    let mut mounted = ConfigMapMount::new(&only(0))?;
    let mut stack = start(&mounted.file()).await?;
    let load = LoadGenerator::start(stack.address(), 4);
    let good = debug_config(&stack).await?;
    let drills = [
        ("plugins: [", "config.yaml:"),
        (
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scoer\n",
            "did you mean \\\"queue-scorer\\\"?",
        ),
        (
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: topology-affinity-scorer\n",
            "refused",
        ),
    ];
    for (round, (text, why)) in drills.iter().enumerate() {
        mounted.write(WriteMethod::Rename, text)?;
        let reported = || async {
            let config = debug_config(&stack).await.ok()?;
            config["error"]["message"]
                .to_string()
                .contains(why)
                .then_some(config)
        };
        let config = wait_for(LIMIT, &format!("/debug/config to say {why}"), reported).await?;
        assert_eq!(
            (&config["pipeline"], &config["since"]),
            (&good["pipeline"], &good["since"]),
            "the last good configuration stays"
        );
        assert_eq!(config["refused"], round + 1);
        assert_eq!(picks(&stack).await?, BTreeSet::from([0]));
    }
    let page = stack.daemon()?.admin("/metrics").await?.text();
    assert!(
        page.contains("switchpoint_config_last_reload_successful{pool=\"default\"} 0"),
        "{page}"
    );
    assert!(
        page.contains("switchpoint_config_reloads_total{pool=\"default\",result=\"failure\"} 3"),
        "{page}"
    );
    let log = stack.daemon()?.process().stderr();
    assert!(
        log.contains("configuration cannot be used; the last good one stays")
            && log.contains("queue-scoer"),
        "{log}"
    );

    mounted.write(WriteMethod::Rename, &only(1))?;
    until_all_go_to(&stack, 1).await?;
    let mended = debug_config(&stack).await?;
    assert_eq!(mended["error"], Value::Null);
    assert_ne!(mended["since"], good["since"]);
    let page = client::get(stack.daemon()?.settings().admin.address(), "/metrics")
        .await?
        .text();
    assert!(
        page.contains("switchpoint_config_last_reload_successful{pool=\"default\"} 1"),
        "{page}"
    );
    load.stop().await?.check_all_served()
}
