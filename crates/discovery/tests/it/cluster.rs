//! A real etcd and kube-apiserver, and for some tests kube-controller-manager. All tests that run
//! at the same time share these servers. The servers end with the last test.
//!
//! The binaries are those of `KUBEBUILDER_ASSETS`, or those that `.ci/cluster_tools.py` built into
//! `.tools/bin`. Without these binaries, each test that needs a cluster reports that it is skipped,
//! and is counted as skipped.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test stops where it cannot go on"
)]
#![allow(
    dead_code,
    reason = "also a part of other tests, none of which uses all of it"
)]

use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use axum::http::Request;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::Mutex as AsyncMutex;

/// The maximum time for the start, which takes about ten seconds, and much longer while compilers
/// run.
const START_MAX: Duration = Duration::from_secs(120);

/// The tokens that the API server accepts. Authentication is not tested here, so all tests know the
/// tokens.
const TOKENS: &str =
    "tok,admin,1,\"system:masters\"\nlimited,limited,2\nworker,worker,3\nslices,slices,4\n";

pub(crate) struct TestCluster {
    pub(crate) etcd: Mutex<ClusterProcess>,
    pub(crate) apiserver: Mutex<ClusterProcess>,
    manager: Option<ClusterProcess>,
    port: u16,
    folder: TempDir,
}

/// A process that can be killed and started again with the same arguments.
pub(crate) struct ClusterProcess {
    binary: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    child: Option<Child>,
}

/// Returns the cluster that all tests share, or `None` without the binaries.
pub(crate) async fn shared() -> Option<Arc<TestCluster>> {
    static SHARED: AsyncMutex<Weak<TestCluster>> = AsyncMutex::const_new(Weak::new());
    share(&SHARED, TestCluster::start()).await
}

/// Returns the cluster that all tests with controllers share, or `None` without the binaries.
pub(crate) async fn shared_with_controllers() -> Option<Arc<TestCluster>> {
    static SHARED: AsyncMutex<Weak<TestCluster>> = AsyncMutex::const_new(Weak::new());
    share(&SHARED, TestCluster::start_with_controllers()).await
}

async fn share(
    shared: &AsyncMutex<Weak<TestCluster>>,
    start: impl Future<Output = Option<TestCluster>>,
) -> Option<Arc<TestCluster>> {
    let mut shared = shared.lock().await;
    if let Some(cluster) = shared.upgrade() {
        return Some(cluster);
    }
    let cluster = Arc::new(start.await?);
    *shared = Arc::downgrade(&cluster);
    Some(cluster)
}

/// Returns the folder with the tools that `.ci/cluster_tools.py` builds. Tests of several crates
/// compile this file, so the search works from the folder of each crate.
fn tools() -> PathBuf {
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = folders.filter(|folder| folder.join("envoy-config").is_dir());
    root.last()
        .expect("a folder of the repository")
        .join(".tools")
}

/// Returns the path of this program.
pub(crate) fn tool(name: &str) -> Option<PathBuf> {
    let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    let built = tools().join("bin");
    let found = assets
        .into_iter()
        .chain([built])
        .map(|folder| folder.join(name))
        .find(|path| path.exists());
    if found.is_none() {
        skipped(&format!(
            "there is no {name}; `.ci/cluster_tools.py {name}` builds it where Go is installed"
        ));
    }
    found
}

/// Reports that the test of this thread cannot run here. `.ci/steps.py` counts these lines. The
/// tests do not write these lines with `print!`, because `cargo test` hides its output for tests
/// that pass.
pub(crate) fn skipped(why: &str) {
    let thread = std::thread::current();
    let _ = writeln!(
        std::io::stdout(),
        "SKIPPED {}: {why}",
        thread.name().unwrap_or("a_test")
    );
}

/// Returns all objects of a YAML file.
pub(crate) fn objects(path: &Path) -> Vec<Value> {
    let text =
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let all: Vec<Value> = serde_saphyr::from_multiple(&text)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    all.into_iter().filter(|object| !object.is_null()).collect()
}

/// Returns the published definitions whose file name contains `part`, if `.ci/cluster_tools.py` has
/// fetched them.
pub(crate) fn definitions(part: &str) -> Option<Vec<Value>> {
    let folder = tools().join("schemas");
    let files = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path());
    let all = files
        .filter(|file| file.to_string_lossy().contains(part))
        .flat_map(|file| objects(&file));
    let all: Vec<Value> = all
        .filter(|object| object["kind"] == "CustomResourceDefinition")
        .collect();
    if all.is_empty() {
        skipped(&format!(
            "there are no schemas {part:?}; `.ci/cluster_tools.py schemas` fetches them where Go is installed"
        ));
        return None;
    }
    Some(all)
}

/// Creates an object. The object may exist already.
pub(crate) async fn post(client: &Client, path: &str, object: &Value) -> Result<Value, String> {
    let request = Request::post(path)
        .header("content-type", "application/json")
        .body(object.to_string().into_bytes())
        .unwrap();
    client
        .request(request)
        .await
        .map_err(|error| error.to_string())
}

/// Installs these definitions and waits until the API server serves them.
pub(crate) async fn define(client: &Client, definitions: &[Value]) {
    for definition in definitions {
        match post(
            client,
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            definition,
        )
        .await
        {
            Ok(_) => {}
            Err(error) => assert!(
                error.contains("already exists"),
                "{}: {error}",
                definition["metadata"]["name"]
            ),
        }
    }
    let began = Instant::now();
    for definition in definitions {
        let spec = &definition["spec"];
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let path = format!(
            "/apis/{}/{}/{}?limit=1",
            text(&spec["group"]),
            text(&spec["versions"][0]["name"]),
            text(&spec["names"]["plural"])
        );
        while client
            .request_text(Request::get(&path).body(Vec::new()).unwrap())
            .await
            .is_err()
        {
            assert!(began.elapsed() < START_MAX, "{path} is not served");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Returns a port that is free now.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

pub(crate) fn etcd(binary: PathBuf, folder: &Path, port: u16) -> ClusterProcess {
    etcd_at(binary, folder, &format!("http://127.0.0.1:{port}"), &[])
}

/// Starts an etcd with the client URL `client` and further arguments.
pub(crate) fn etcd_at(
    binary: PathBuf,
    folder: &Path,
    client: &str,
    further: &[String],
) -> ClusterProcess {
    let peer = format!("http://127.0.0.1:{}", free_port());
    let arguments = [
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
        "--unsafe-no-fsync".to_owned(),
    ];
    ClusterProcess::new(
        binary,
        [&arguments, further].concat(),
        folder.join("etcd.log"),
    )
}

/// Copies a folder and its content.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

impl TestCluster {
    /// Starts a cluster for one test alone, which may break the cluster. No controller runs in this
    /// cluster.
    pub(crate) async fn start() -> Option<Self> {
        let etcd_binary = tool("etcd")?;
        let api_binary = tool("kube-apiserver")?;
        let folder = tempfile::tempdir().unwrap();
        let etcd_port = free_port();
        let port = free_port();
        let path = |name: &str| folder.path().join(name).display().to_string();
        fs::write(path("tokens.csv"), TOKENS).unwrap();
        let account_key = rcgen::KeyPair::generate().unwrap();
        fs::write(path("sa.key"), account_key.serialize_pem()).unwrap();
        fs::write(path("sa.pub"), account_key.public_key_pem()).unwrap();
        let kubeconfig = format!(
            "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{port}', insecure-skip-tls-verify: true}}}}]\n\
             users: [{{name: u, user: {{token: tok}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n"
        );
        fs::write(path("kubeconfig"), kubeconfig).unwrap();
        let api = [
            format!("--etcd-servers=http://127.0.0.1:{etcd_port}"),
            format!("--cert-dir={}", path("certs")),
            format!("--secure-port={port}"),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--service-account-key-file={}", path("sa.pub")),
            format!("--service-account-signing-key-file={}", path("sa.key")),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--token-auth-file={}", path("tokens.csv")),
            "--authorization-mode=RBAC".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
            "--disable-admission-plugins=ServiceAccount".to_owned(),
        ];
        let etcd = etcd(etcd_binary, folder.path(), etcd_port);
        let apiserver = ClusterProcess::new(
            api_binary,
            api.to_vec(),
            folder.path().join("apiserver.log"),
        );
        let cluster = Self {
            etcd: Mutex::new(etcd),
            apiserver: Mutex::new(apiserver),
            manager: None,
            port,
            folder,
        };
        cluster.wait_ready().await;
        Some(cluster)
    }

    /// Starts an API server with the real controllers for EndpointSlices and for garbage
    /// collection. `make e2e-long` builds the controllers, so tests that need them are in modules
    /// `slow`.
    pub(crate) async fn start_with_controllers() -> Option<Self> {
        let manager = tool("kube-controller-manager")?;
        let mut cluster = Self::start().await?;
        let controllers = "--controllers=endpointslice-controller,garbage-collector-controller";
        let arguments = [
            format!("--kubeconfig={}", cluster.kubeconfig().display()),
            controllers.into(),
            "--leader-elect=false".into(),
            "--secure-port=0".into(),
        ];
        cluster.manager = Some(ClusterProcess::new(
            manager,
            arguments.to_vec(),
            cluster.folder.path().join("manager.log"),
        ));
        Some(cluster)
    }

    /// Returns a client with this user's token.
    pub(crate) async fn client(&self, token: &str) -> Client {
        let mut kubeconfig = Kubeconfig::read_from(self.folder.path().join("kubeconfig")).unwrap();
        kubeconfig.auth_infos[0].auth_info.as_mut().unwrap().token = Some(token.to_owned().into());
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .unwrap();
        discovery::kubernetes::client(config).unwrap()
    }

    /// Returns the path of the administrator's kubeconfig.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    pub(crate) async fn wait_ready(&self) {
        let client = self.client("tok").await;
        let began = Instant::now();
        loop {
            let request = Request::get("/readyz").body(Vec::new()).unwrap();
            match client.request_text(request).await {
                Ok(text) if text == "ok" => return,
                answer => assert!(
                    began.elapsed() < START_MAX,
                    "port {}: {answer:?}\n{}",
                    self.port,
                    self.log_tail("apiserver.log")
                ),
            }
            assert!(
                self.apiserver.lock().unwrap().is_running(),
                "{}",
                self.log_tail("apiserver.log")
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Returns the data folder of etcd.
    pub(crate) fn etcd_data(&self) -> PathBuf {
        self.folder.path().join("etcd")
    }

    fn log_tail(&self, name: &str) -> String {
        let text = fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl ClusterProcess {
    fn new(binary: PathBuf, arguments: Vec<String>, log: PathBuf) -> Self {
        let mut service = Self {
            binary,
            arguments,
            log,
            child: None,
        };
        service.start();
        service
    }

    pub(crate) fn start(&mut self) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .unwrap();
        let mut command = Command::new(&self.binary);
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    /// Kills the process without warning, like a power failure.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends `STOP` or `CONT`: the process then behaves like a paused machine.
    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.as_ref().unwrap().id().to_string();
        assert!(
            Command::new("kill")
                .args(["-s", name, &id])
                .status()
                .unwrap()
                .success()
        );
    }

    fn is_running(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|child| child.try_wait().unwrap().is_none())
    }
}

impl Drop for ClusterProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
