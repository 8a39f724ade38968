//! Tests the way from registration to a routed request: workers are registered by `switchpointd
//! register`, the daemon discovers them, and Envoy sends each request to a worker whose metadata
//! names the model. These tests use a directory and etcd; tests with Kubernetes are in another
//! file. The daemon notices killed workers only after 15 to 30 s, so such tests are in
//! `control-plane` and in `make e2e-long`.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::load::LoadGenerator;
use testbed::process::ChildProcess;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, daemon, wait_for};

use crate::cluster;

/// The maximum wait for a change, which exceeds the longest lease. After an outage of the API
/// server, Kubernetes' controllers wait for up to 30 s before they retry, and then the daemon waits
/// for up to 10 s. The limit exceeds both times together, also on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// A registered worker whose health the test controls.
pub(crate) struct RegisteredWorker {
    pub(crate) sidecar: ChildProcess,
    pub(crate) healthy: Arc<AtomicBool>,
    folder: TempDir,
}

impl RegisteredWorker {
    /// Registers a worker with this metadata through the registry that `arguments` name.
    pub(crate) async fn register(
        arguments: &[String],
        component: &str,
        name: &str,
        metadata: &Value,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("metadata.json");
        std::fs::write(&file, metadata.to_string())?;
        let healthy = Arc::new(AtomicBool::new(true));
        let answer = Arc::clone(&healthy);
        let health = move || async move {
            if answer.load(Ordering::Relaxed) {
                StatusCode::OK
            } else {
                StatusCode::SERVICE_UNAVAILABLE
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let probe = format!("http://{}/health", listener.local_addr()?);
        tokio::spawn(async move {
            axum::serve(listener, Router::new().route("/health", get(health))).await
        });
        let mut command = Command::new(daemon::binary()?);
        command.args([
            "register",
            "--namespace",
            "dynamo",
            "--component",
            component,
            "--name",
            name,
            "--probe",
            &probe,
        ]);
        command.arg("--metadata-file").arg(&file).args(arguments);
        Ok(Self {
            sidecar: ChildProcess::spawn("register", &mut command, folder.path())?,
            healthy,
            folder,
        })
    }

    pub(crate) fn say(&self, metadata: &Value) -> Result<()> {
        Ok(std::fs::write(
            self.folder.path().join("metadata.json"),
            metadata.to_string(),
        )?)
    }
}

/// Writes a pools file with one pool, whose endpoints come from `source`.
pub(crate) fn fed_by(folder: &Path, source: &Value) -> Result<String> {
    let file = folder.join("pools.json");
    let mut pool = json!({"name": "default"});
    for (key, value) in source.as_object().into_iter().flatten() {
        pool[key] = value.clone();
    }
    std::fs::write(&file, json!({ "pools": [pool] }).to_string())?;
    Ok(file.display().to_string())
}

/// Sends a request for a model. Returns the status and, if the status is 200, the served endpoint.
/// Each prompt is different, so that no cached prefix affects the pick.
pub(crate) async fn asked(stack: &Stack, model: &str) -> Result<(u16, String)> {
    static PROMPTS: AtomicUsize = AtomicUsize::new(0);
    let prompt = format!("{} is there?", PROMPTS.fetch_add(1, Ordering::Relaxed));
    let chat =
        json!({"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": prompt}]});
    let reply = stack.post("/v1/chat/completions", &chat).await?;
    Ok((reply.status, reply.header("x-served-by").to_owned()))
}

pub(crate) async fn until(stack: &Stack, model: &str, status: u16, by: &str) -> Result<()> {
    let look =
        || async { (asked(stack, model).await.ok()? == (status, by.to_owned())).then_some(()) };
    wait_for(
        LIMIT,
        &format!("{model} to be answered {status} by {by:?}"),
        look,
    )
    .await
}

async fn until_not_served(stack: &Stack, model: &str) -> Result<()> {
    let look = || async { (asked(stack, model).await.ok()?.0 != 200).then_some(()) };
    wait_for(LIMIT, &format!("{model} not to be served"), look).await
}

fn serves(models: &[&str]) -> Value {
    json!({"Model": models.iter().map(|name| json!({"name": name, "runtime_config": {"total_kv_blocks": 24064, "max_num_seqs": 256}})).collect::<Vec<_>>()})
}

fn builder() -> StackBuilder {
    let options = testbed::model_server::ModelServerOptions {
        models: vec!["llama".into(), "qwen".into()],
        speed: 0.0,
        ..Default::default()
    };
    Stack::builder().servers_like(3, &options)
}

/// Plays the life of a worker: it registers with metadata, becomes ready, and is picked for its
/// models only. When it is not ready, it is not picked. Returns the last worker, which alone serves
/// `llama`, with the stack and the folder of its files.
async fn whole_flow(
    source: Value,
    registry: Vec<String>,
) -> Result<(RegisteredWorker, Stack, TempDir)> {
    let folder = tempfile::tempdir()?;
    let pools = fed_by(folder.path(), &source)?;
    let stack = builder()
        .daemon_arguments(&["--pools", &pools])
        .shared_envoy()
        .start()
        .await?;
    assert_eq!(
        asked(&stack, "llama").await?.0,
        503,
        "no worker is registered"
    );
    let address = |at: usize| stack.servers[at].addr().to_string();
    let register = async |at: usize, component: &str, metadata: Value| {
        let arguments = [registry.clone(), vec!["--address".to_owned(), address(at)]].concat();
        RegisteredWorker::register(&arguments, component, &format!("worker-{at}"), &metadata).await
    };
    let first = register(0, "decode", serves(&["llama"])).await?;
    until(&stack, "llama", 200, &address(0)).await?;
    assert_eq!(
        asked(&stack, "qwen").await?.0,
        404,
        "no worker serves this model"
    );
    let second = register(1, "decode", serves(&["qwen"])).await?;
    until(&stack, "qwen", 200, &address(1)).await?;
    for _ in 0..20 {
        assert_eq!(asked(&stack, "llama").await?, (200, address(0)));
        assert_eq!(asked(&stack, "qwen").await?, (200, address(1)));
    }
    shown(&stack, &address(0)).await?;
    second.healthy.store(false, Ordering::Relaxed);
    until(&stack, "qwen", 404, "").await?;
    second.healthy.store(true, Ordering::Relaxed);
    until(&stack, "qwen", 200, &address(1)).await?;
    // A worker loads a model later; only its metadata changes.
    first.say(&serves(&["llama", "qwen"]))?;
    until(&stack, "qwen", 200, &address(0)).await?;
    first.say(&serves(&["llama"]))?;
    until(&stack, "qwen", 200, &address(1)).await?;
    // The pool ignores a component that it does not name. The pool takes the second component that
    // it names, with that component's role.
    let _other = register(2, "elsewhere", serves(&["llama"])).await?;
    first.healthy.store(false, Ordering::Relaxed);
    until(&stack, "llama", 404, "").await?;
    let third = register(2, "prefill", serves(&["llama"])).await?;
    until(&stack, "llama", 200, &address(2)).await?;
    Ok((third, stack, folder))
}

/// Checks what the debug pages show of an instance: its models, its capacity, and the age of the
/// source.
async fn shown(stack: &Stack, address: &str) -> Result<()> {
    let daemon = stack.daemon.as_ref().ok_or("no daemon")?;
    let rows = daemon.endpoints().await?;
    let row = rows
        .iter()
        .find(|row| row["address"] == address)
        .ok_or("the address is not in the pool")?;
    assert_eq!(row["models"], json!(["llama"]));
    assert_eq!(row["metrics"]["attributes"]["max_num_seqs"], 256.0);
    let page = daemon.admin("/debug/instances").await?.json()?;
    assert!(page["instances"].as_array().is_some_and(|all| {
        all.iter()
            .any(|row| row["address"] == address && row["state"] == "ready")
    }));
    assert!(
        page["sources"][0]["age_seconds"]
            .as_f64()
            .is_some_and(|age| age < 60.0),
        "{page}"
    );
    let metrics = daemon.admin("/metrics").await?.text();
    assert!(
        metrics
            .lines()
            .any(|line| line.starts_with("switchpoint_discovery_age_seconds{")),
        "the age is also a metric"
    );
    Ok(())
}

/// Checks models when metadata names only the base model: adapters are loaded and unloaded without
/// a change of metadata.
#[tokio::test]
async fn an_adapter_is_served_where_metadata_names_the_base_model_alone() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let objects = tempfile::tempdir()?;
    let registry = folder.path().display().to_string();
    let pools = fed_by(
        objects.path(),
        &json!({"directory": {"path": registry, "namespace": "dynamo", "components": components()}}),
    )?;
    let model = |name: &str, targets: Value| {
        json!({"apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferenceModel", "metadata": {"name": name},
               "spec": {"modelName": name, "poolRef": {"name": "default"}, "targetModels": targets}})
    };
    let wanted = objects.path().join("objects");
    std::fs::create_dir(&wanted)?;
    std::fs::write(
        wanted.join("targeted.json"),
        model("targeted", json!([{"name": "style"}])).to_string(),
    )?;
    std::fs::write(
        wanted.join("reported.json"),
        model("reported", json!([])).to_string(),
    )?;
    let adapters = vec![
        "style".to_owned(),
        "reported".to_owned(),
        "listed".to_owned(),
    ];
    let options = testbed::model_server::ModelServerOptions {
        models: vec!["llama".into()],
        loras: adapters,
        speed: 1.0,
        ..Default::default()
    };
    let arguments = [
        "--pools",
        &pools,
        "--objects",
        &wanted.display().to_string(),
    ];
    let stack = Stack::builder()
        .servers_like(2, &options)
        .daemon_arguments(&arguments)
        .shared_envoy()
        .start()
        .await?;
    let mut workers = Vec::new();
    for (at, server) in stack.servers.iter().enumerate() {
        let arguments = [
            "--directory",
            &registry,
            "--address",
            &server.addr().to_string(),
        ]
        .map(str::to_owned);
        workers.push(
            RegisteredWorker::register(
                &arguments,
                "decode",
                &format!("worker-{at}"),
                &serves(&["llama"]),
            )
            .await?,
        );
    }
    let listed =
        || async { (stack.daemon.as_ref()?.endpoints().await.ok()?.len() == 2).then_some(()) };
    wait_for(LIMIT, "both workers", listed).await?;

    let known = || async { (asked(&stack, "targeted").await.ok()?.0 != 503).then_some(()) };
    wait_for(LIMIT, "the proxy to know a worker", known).await?;
    for _ in 0..4 {
        assert_eq!(
            asked(&stack, "targeted").await?.0,
            200,
            "an object targets the adapter"
        );
        assert_eq!(
            asked(&stack, "reported").await?.0,
            200,
            "an object without targets names the adapter"
        );
    }
    assert_eq!(
        asked(&stack, "listed").await?.0,
        404,
        "objects list the models of the pool"
    );
    drop(workers);
    Ok(())
}

/// Checks that an adapter is served where its engine lists it, whether a request uses the adapter
/// or not. The pool has no objects.
#[tokio::test]
async fn an_adapter_is_served_where_its_engine_lists_it_also_while_it_is_idle() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let objects = tempfile::tempdir()?;
    let registry = folder.path().display().to_string();
    let pools = fed_by(
        objects.path(),
        &json!({"directory": {"path": registry, "namespace": "dynamo", "components": components()}}),
    )?;
    let server = |adapters: &[&str]| testbed::model_server::ModelServerOptions {
        models: vec!["llama".into()],
        loras: adapters.iter().map(|name| (*name).to_owned()).collect(),
        speed: 0.0,
        ..Default::default()
    };
    let arguments = ["--pools", &pools, "--strict-models"];
    let builder = Stack::builder()
        .servers_like(1, &server(&["sql"]))
        .more_servers_like(1, &server(&["poems", "sql"]));
    let stack = builder
        .daemon_arguments(&arguments)
        .shared_envoy()
        .start()
        .await?;
    let mut workers = Vec::new();
    for (at, server) in stack.servers.iter().enumerate() {
        let arguments = [
            "--directory",
            &registry,
            "--address",
            &server.addr().to_string(),
        ]
        .map(str::to_owned);
        workers.push(
            RegisteredWorker::register(
                &arguments,
                "decode",
                &format!("worker-{at}"),
                &serves(&["llama"]),
            )
            .await?,
        );
    }
    let second = stack.servers[1].addr().to_string();
    until(&stack, "poems", 200, &second).await?;
    for _ in 0..8 {
        assert_eq!(
            asked(&stack, "poems").await?,
            (200, second.clone()),
            "no request uses it"
        );
        assert_eq!(asked(&stack, "sql").await?.0, 200);
        assert_eq!(
            asked(&stack, "llama").await?.0,
            200,
            "--strict-models accepts what metadata names"
        );
    }
    assert_eq!(asked(&stack, "unheard").await?.0, 404);
    drop(workers);
    Ok(())
}

/// Checks that the picker also reads the model of an upload.
#[tokio::test]
async fn an_upload_goes_where_its_model_is_served() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let files = tempfile::tempdir()?;
    let registry = folder.path().display().to_string();
    let pools = fed_by(
        files.path(),
        &json!({"directory": {"path": registry, "namespace": "dynamo", "components": components()}}),
    )?;
    let wanted = files.path().join("objects");
    std::fs::create_dir(&wanted)?;
    let rewrite = json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceModelRewrite", "metadata": {"name": "alias"},
        "spec": {"poolRef": {"name": "default"},
                 "rules": [{"matches": [{"model": {"value": "alias"}}], "targets": [{"modelRewrite": "qwen"}]}]}});
    std::fs::write(wanted.join("alias.json"), rewrite.to_string())?;
    let arguments = [
        "--pools",
        &pools,
        "--objects",
        &wanted.display().to_string(),
    ];
    let stack = builder()
        .daemon_arguments(&arguments)
        .shared_envoy()
        .start()
        .await?;
    let mut workers = Vec::new();
    for (at, model) in [(0, "llama"), (1, "qwen")] {
        let arguments = [
            "--directory",
            &registry,
            "--address",
            &stack.servers[at].addr().to_string(),
        ]
        .map(str::to_owned);
        workers.push(
            RegisteredWorker::register(
                &arguments,
                "decode",
                &format!("worker-{at}"),
                &serves(&[model]),
            )
            .await?,
        );
        until(&stack, model, 200, &stack.servers[at].addr().to_string()).await?;
    }
    let upload = async |model: &str, before: bool| {
        let field = |name: &str, value: &str| {
            format!("--x\r\nContent-Disposition: form-data; name={name}\r\n\r\n{value}\r\n")
        };
        let file = field("\"file\"; filename=\"a.wav\"", &"RIFF\r\n".repeat(500_000));
        let model = field("\"model\"", model);
        let parts = if before { [model, file] } else { [file, model] };
        let body = format!("{}--x--\r\n", parts.concat());
        let request = http::Request::post("/v1/audio/transcriptions")
            .header("content-type", "multipart/form-data; boundary=x");
        let reply = stack
            .send(request.body(testbed::client::full(body))?)
            .await?;
        Ok::<_, testbed::Error>((
            reply.status,
            reply.header("x-served-by").to_owned(),
            reply.json()?["body_bytes"].as_u64(),
        ))
    };
    for before in [true, false] {
        let sent = upload("llama", before).await?;
        assert_eq!(
            (sent.0, sent.1.as_str()),
            (200, &*stack.servers[0].addr().to_string())
        );
        let (status, by, bytes) = upload("alias", before).await?;
        assert_eq!(
            (status, by),
            (200, stack.servers[1].addr().to_string()),
            "an alias"
        );
        assert_eq!(
            bytes.zip(sent.2).map(|(alias, llama)| llama - alias),
            Some(1),
            "the engine gets `qwen`"
        );
        assert_eq!(upload("unheard", before).await?.0, 404);
    }
    drop(workers);
    Ok(())
}

fn components() -> Value {
    json!([{"name": "decode", "role": "decode"}, {"name": "prefill", "role": "prefill"}])
}

#[tokio::test]
async fn from_registration_to_request_by_a_directory() -> Result<()> {
    let registry = tempfile::tempdir()?;
    let path = registry.path().display().to_string();
    let source =
        json!({"directory": {"path": path, "namespace": "dynamo", "components": components()}});
    let (mut last, stack, _folder) =
        whole_flow(source, vec!["--directory".to_owned(), path]).await?;
    last.sidecar.stop(LIMIT).await?;
    until_not_served(&stack, "llama").await
}

#[tokio::test]
async fn from_registration_to_request_by_etcd() -> Result<()> {
    let Some(etcd) = EtcdProcess::start() else {
        return Ok(());
    };
    let source = json!({"etcd": {"endpoints": [etcd.url], "namespace": "dynamo", "components": components()}});
    whole_flow(source, vec!["--etcd".to_owned(), etcd.url.clone()])
        .await
        .map(drop)
}

/// Checks that `switchpointd instances` prints what `switchpointd register` registered.
#[tokio::test]
async fn a_terminal_lists_what_a_sidecar_registered() -> Result<()> {
    let registry = tempfile::tempdir()?;
    let path = registry.path().display().to_string();
    let arguments = ["--directory", &path, "--address", "10.0.0.1:8000"].map(str::to_owned);
    let _worker =
        RegisteredWorker::register(&arguments, "decode", "worker-0", &serves(&["llama"])).await?;
    let list = || {
        let mut command = Command::new(daemon::binary().ok()?);
        let output = command
            .args([
                "instances",
                "--directory",
                &path,
                "--namespace",
                "dynamo",
                "--component",
                "decode",
            ])
            .output()
            .ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        ["worker-0", "10.0.0.1:8000", "llama"]
            .iter()
            .all(|part| text.contains(part))
            .then_some(())
    };
    wait_for(LIMIT, "the table to name it", || async { list() }).await
}

/// A real etcd server.
pub(crate) struct EtcdProcess {
    _service: cluster::ClusterProcess,
    pub(crate) url: String,
    _folder: TempDir,
}

impl EtcdProcess {
    pub(crate) fn start() -> Option<Self> {
        let binary = cluster::tool("etcd")?;
        let folder = tempfile::tempdir().ok()?;
        let port = cluster::free_port();
        Some(Self {
            _service: cluster::etcd(binary, folder.path(), port),
            url: format!("http://127.0.0.1:{port}"),
            _folder: folder,
        })
    }
}

/// The way in which the first leading daemon ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaderEnd {
    /// SIGTERM ends the daemon, which gives the lease back.
    Stopped,
    /// SIGKILL ends the daemon, so the lease has to expire.
    Killed,
}

/// Runs two daemons with one lease. The leading daemon ends under load and the other daemon takes
/// over. Then the other daemon is stopped and the first daemon leads again.
pub(crate) async fn fail_over(lease: &[&str], source: &Value, end: LeaderEnd) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let pools = fed_by(folder.path(), source)?;
    let spare = daemon::DaemonSettings::new(folder.path())?;
    let other = spare.state.number();
    let arguments = [&["--pools", &pools], lease].concat();
    let mut stack = builder()
        .daemon_arguments(&arguments)
        .envoy_config(move |config| both_daemons(config, other))
        .start()
        .await?;
    let mut spare = spare;
    spare.arguments = arguments.iter().map(ToString::to_string).collect();
    let mut second = daemon::DaemonProcess::start(spare)?;
    wait_for(LIMIT, "the second to stand by", || async {
        (!leads(&second).await?).then_some(())
    })
    .await?;
    wait_for(LIMIT, "a request to be served", || async {
        (asked(&stack, "demo").await.ok()?.0 == 200).then_some(())
    })
    .await?;
    let load = LoadGenerator::start(stack.address(), 2);
    load.wait_for_more(50, LIMIT).await?;
    match end {
        LeaderEnd::Stopped => stack.daemon()?.process().stop(LIMIT).await.map(drop)?,
        LeaderEnd::Killed => stack.daemon()?.process().kill().map(drop)?,
    }
    wait_for(LIMIT, "the second to lead", || async {
        leads(&second).await?.then_some(())
    })
    .await?;
    load.wait_for_more(50, LIMIT).await?;
    proxy_acknowledged(&second).await?;
    // The first daemon restarts and stands by until the second stops.
    stack.daemon()?.start_again()?;
    load.wait_for_more(50, LIMIT).await?;
    second.process().stop(LIMIT).await?;
    wait_for(LIMIT, "the first to lead again", || async {
        leads(stack.daemon.as_ref()?).await?.then_some(())
    })
    .await?;
    proxy_acknowledged(stack.daemon()?).await?;
    load.wait_for_more(50, LIMIT).await?;
    load.stop().await?.check_all_served()
}

/// Returns whether this daemon leads, or `None` if the daemon does not answer.
pub(crate) async fn leads(daemon: &daemon::DaemonProcess) -> Option<bool> {
    daemon.admin("/debug/state").await.ok()?.json().ok()?["leads"].as_bool()
}

/// Waits until a proxy has acknowledged this daemon's state.
async fn proxy_acknowledged(daemon: &daemon::DaemonProcess) -> Result<()> {
    let acked = || async {
        let state = daemon.admin("/debug/state").await.ok()?.json().ok()?;
        let proxies = state["proxies"].as_array()?;
        proxies
            .iter()
            .any(|proxy| {
                proxy.to_string().contains("acked") && !proxy.to_string().contains("\"acked\":null")
            })
            .then_some(())
    };
    wait_for(LIMIT, "a proxy to acknowledge its state", acked).await
}

/// Puts both daemons behind one cluster, as behind a Service.
pub(crate) fn both_daemons(config: &mut Value, other: u16) {
    let clusters = config["static_resources"]["clusters"]
        .as_array_mut()
        .into_iter()
        .flatten();
    for cluster in clusters.filter(|cluster| cluster["name"] == "switchpoint-state") {
        let hosts = &mut cluster["load_assignment"]["endpoints"][0]["lb_endpoints"];
        let mut host = hosts[0].clone();
        host["endpoint"]["address"]["socket_address"]["port_value"] = other.into();
        hosts
            .as_array_mut()
            .into_iter()
            .for_each(|hosts| hosts.push(host.clone()));
    }
}

#[tokio::test]
async fn daemons_fail_over_by_a_lease_in_etcd_and_no_request_notices() -> Result<()> {
    fail_over_by_etcd(LeaderEnd::Stopped).await
}

async fn fail_over_by_etcd(end: LeaderEnd) -> Result<()> {
    let Some(etcd) = EtcdProcess::start() else {
        return Ok(());
    };
    let servers = [
        testbed::model_server::ModelServer::start(demo())?,
        testbed::model_server::ModelServer::start(demo())?,
    ];
    let addresses: BTreeSet<SocketAddr> = servers
        .iter()
        .map(testbed::model_server::ModelServer::addr)
        .collect();
    let source =
        json!({"endpoints": addresses.iter().map(ToString::to_string).collect::<Vec<_>>()});
    fail_over(&["--lease-etcd", &etcd.url], &source, end).await
}

fn demo() -> testbed::model_server::ModelServerOptions {
    testbed::model_server::ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        ..Default::default()
    }
}

/// `make e2e-long` runs these tests.
mod slow {
    use super::*;

    #[tokio::test]
    async fn a_killed_worker_is_gone_when_its_lease_in_etcd_has_lapsed() -> Result<()> {
        let Some(etcd) = EtcdProcess::start() else {
            return Ok(());
        };
        let folder = tempfile::tempdir()?;
        let source = json!({"etcd": {"endpoints": [etcd.url], "namespace": "dynamo", "components": components()}});
        let pools = fed_by(folder.path(), &source)?;
        let stack = builder()
            .daemon_arguments(&["--pools", &pools])
            .start()
            .await?;
        let address = stack.servers[0].addr().to_string();
        let arguments = ["--etcd", &etcd.url, "--address", &address].map(str::to_owned);
        let mut worker =
            RegisteredWorker::register(&arguments, "decode", "worker-0", &serves(&["llama"]))
                .await?;
        until(&stack, "llama", 200, &address).await?;
        worker.sidecar.kill()?;
        until_not_served(&stack, "llama").await
    }

    #[tokio::test]
    async fn a_killed_daemon_is_replaced_when_its_lease_in_etcd_has_lapsed() -> Result<()> {
        fail_over_by_etcd(LeaderEnd::Killed).await
    }
}
