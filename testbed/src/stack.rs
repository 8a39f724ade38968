//! The product, standing: simulated model servers, `switchpointd`, Envoy with the picker inside.
//!
//! ```text
//!   client ──▶ Envoy + picker ──▶ model servers (in this process)
//!                  ▲   ▲              ▲
//!            state │   │ EDS          │ /metrics
//!                  └── switchpointd ──┘
//! ```
//! Each stack has ports and files of its own, so tests run side by side; it takes its processes with it when it goes, and shows what they last said.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use http::Request;
use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::client::{self, Body, ClientReply};
use crate::cuttable_link::CuttableLink;
use crate::daemon::{DaemonProcess, DaemonSettings};
use crate::envoy::{EnvoyConfig, EnvoyOptions, EnvoyProcess};
use crate::model_server::{self, ModelServer};
use crate::ports::ReservedPort;
use crate::{Result, scorers, wait_for};

/// From nothing to a picker with state, on a machine that compiles at the same time.
const START_LIMIT: Duration = Duration::from_secs(90);

/// Lines of each log shown when a test fails.
const LINES_SHOWN: usize = 60;

/// Who asks the picker, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickerMode {
    /// The filter in the proxy: `standalone.yaml`.
    Filter,
    /// The proxy asks the daemon by the Endpoint Picker Protocol: `ext_proc.yaml`.
    ExtProc,
}

/// What to build. Every setting has the value that most tests want.
#[derive(Debug)]
pub struct StackBuilder {
    front: PickerMode,
    servers: Vec<model_server::ModelServerOptions>,
    strangers: Vec<SocketAddr>,
    envoy: EnvoyOptions,
    edits: Vec<ConfigEdit>,
    daemon_arguments: Vec<String>,
    scorers: Vec<(String, u32)>,
    daemon_threads: Option<u32>,
    daemon_environment: Vec<(String, String)>,
    daemon: bool,
    ready: bool,
    quiet: bool,
}

/// A change to the shipped config.
enum ConfigEdit {
    Picker(Map<String, Value>),
    FilterBeforePicker(Value),
    Anything(Box<dyn Fn(&mut Value) + Send>),
}

/// A running stack.
#[derive(Debug)]
pub struct Stack {
    /// The model servers, in order; their endpoints are named `server-0`, `server-1`, …
    pub servers: Vec<ModelServer>,
    /// The proxy.
    pub envoy: EnvoyProcess,
    /// The daemon, unless the stack was built without.
    pub daemon: Option<DaemonProcess>,
    /// How to start it later, if so.
    absent: Option<DaemonSettings>,
    _ports: Vec<ReservedPort>,
    folder: TempDir,
    quiet: bool,
}

impl std::fmt::Debug for ConfigEdit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Picker(keys) => f.debug_tuple("Picker").field(keys).finish(),
            Self::FilterBeforePicker(filter) => f.debug_tuple("FilterBeforePicker").field(filter).finish(),
            Self::Anything(_) => f.write_str("Anything"),
        }
    }
}

// === impl PickerMode ===

impl PickerMode {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Filter, Self::ExtProc];

    /// Its file of `envoy-config/`.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Self::Filter => "standalone.yaml",
            Self::ExtProc => "ext_proc.yaml",
        }
    }

    /// What of the picker's configuration the daemon is told, where it is the daemon that picks.
    fn daemon_arguments(self, edits: &[ConfigEdit]) -> Vec<String> {
        let keys = edits.iter().filter_map(|edit| if let ConfigEdit::Picker(keys) = edit { Some(keys) } else { None }).flatten();
        let argument = |(key, value): (&String, &Value)| match (key.as_str(), value) {
            ("explain", Value::Bool(true)) => vec!["--ext-proc-explain".to_owned()],
            ("objective_header", Value::String(word)) => vec!["--ext-proc-objective-header".to_owned(), word.clone()],
            _ => Vec::new(),
        };
        keys.filter(|_| self == Self::ExtProc).flat_map(argument).collect()
    }
}

// === impl StackBuilder ===

impl StackBuilder {
    /// By another front than the filter.
    #[must_use]
    pub fn front(mut self, front: PickerMode) -> Self {
        self.front = front;
        self
    }

    /// So many model servers that serve the model `demo` and answer at once.
    #[must_use]
    pub fn servers(self, count: usize) -> Self {
        let options =
            model_server::ModelServerOptions { models: vec!["demo".to_owned()], speed: 0.0, ..model_server::ModelServerOptions::default() };
        self.servers_like(count, &options)
    }

    /// So many model servers like this one.
    #[must_use]
    pub fn servers_like(mut self, count: usize, options: &model_server::ModelServerOptions) -> Self {
        self.servers = vec![options.clone(); count];
        self
    }

    /// So many more, like this one: a pool of unequal machines.
    #[must_use]
    pub fn more_servers_like(mut self, count: usize, options: &model_server::ModelServerOptions) -> Self {
        self.servers.extend(vec![options.clone(); count]);
        self
    }

    /// An endpoint that is no model server of ours: something that a test lets listen there, or nothing.
    #[must_use]
    pub fn stranger(mut self, address: SocketAddr) -> Self {
        self.strangers.push(address);
        self
    }

    /// Worker threads of Envoy (1 unless said).
    #[must_use]
    pub fn concurrency(mut self, workers: u32) -> Self {
        self.envoy.concurrency = workers;
        self
    }

    /// Further arguments of Envoy.
    #[must_use]
    pub fn envoy_arguments(mut self, arguments: &[&str]) -> Self {
        self.envoy.arguments.extend(arguments.iter().map(ToString::to_string));
        self
    }

    /// With hot restart; further arguments must then name a base id that nobody else uses.
    #[must_use]
    pub fn hot_restart(mut self) -> Self {
        self.envoy.hot_restart = true;
        self
    }

    /// Runs Envoy by the shipped `start.sh`, with this drain time.
    #[must_use]
    pub fn start_script(mut self, drain_s: u32) -> Self {
        self.envoy.start_script = Some(drain_s);
        self
    }

    /// Sets keys of the picker's configuration; `keys` is a JSON object. Where the daemon picks, there are `explain`, `objective_header` and
    /// `destination_format`.
    #[must_use]
    pub fn picker(mut self, keys: Value) -> Self {
        if let Value::Object(keys) = keys {
            self.edits.push(ConfigEdit::Picker(keys));
        }
        self
    }

    /// Puts a filter right before the picker.
    #[must_use]
    pub fn filter_before_picker(mut self, filter: Value) -> Self {
        self.edits.push(ConfigEdit::FilterBeforePicker(filter));
        self
    }

    /// Changes the shipped config in any way; for what no user can do by the file's own means, say why at the call.
    #[must_use]
    pub fn envoy_config(mut self, edit: impl Fn(&mut Value) + Send + 'static) -> Self {
        self.edits.push(ConfigEdit::Anything(Box::new(edit)));
        self
    }

    /// Puts a cable between Envoy and the daemon, for the test to plug in.
    #[must_use]
    pub fn cable(self, cable: &CuttableLink) -> Self {
        let end = cable.address().port();
        let place = "/static_resources/clusters/1/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address/socket_address/port_value";
        let cabled = move |config: &mut Value| {
            if let Some(port) = config.pointer_mut(place) {
                *port = end.into();
            }
        };
        self.envoy_config(cabled).without_waiting()
    }

    /// Further arguments of `switchpointd serve`.
    #[must_use]
    pub fn daemon_arguments(mut self, arguments: &[&str]) -> Self {
        self.daemon_arguments.extend(arguments.iter().map(ToString::to_string));
        self
    }

    /// Configured to go by these scorers with their weights, in place of the default profile.
    #[must_use]
    pub fn scored_by(mut self, scorers: &[(&str, u32)]) -> Self {
        self.scorers = scorers.iter().map(|&(scorer, weight)| (scorer.to_owned(), weight)).collect();
        self
    }

    /// Threads that the daemon serves with.
    #[must_use]
    pub fn daemon_threads(mut self, threads: u32) -> Self {
        self.daemon_threads = Some(threads);
        self
    }

    /// A further variable of the daemon's environment.
    #[must_use]
    pub fn daemon_environment(mut self, name: &str, value: &str) -> Self {
        self.daemon_environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// No daemon: how a proxy starts without one. The stack is then up when Envoy is.
    #[must_use]
    pub fn without_daemon(mut self) -> Self {
        self.daemon = false;
        self.without_waiting()
    }

    /// Returns as soon as Envoy listens, whether the picker has state or not.
    #[must_use]
    pub fn without_waiting(mut self) -> Self {
        self.ready = false;
        self
    }

    /// Says nothing at its end. Else it shows the last lines of its logs, which a test runner keeps to itself unless the test fails.
    #[must_use]
    pub fn quiet(mut self) -> Self {
        self.quiet = true;
        self
    }

    /// Starts it all. Must be called in a tokio runtime, which then runs the model servers too.
    ///
    /// # Errors
    /// If a part cannot be started or does not come up, with the last lines of the logs.
    pub async fn start(self) -> Result<Stack> {
        let folder = tempfile::Builder::new().prefix("switchpoint-e2e-").tempdir()?;
        let mut ports = Vec::new();
        let mut lease = || -> Result<SocketAddr> {
            let port = ReservedPort::lease()?;
            let address = port.address();
            ports.push(port);
            Ok(address)
        };
        let mut servers = Vec::new();
        for options in self.servers {
            // A leased port: a server that closes its socket, to refuse, keeps its place.
            servers.push(ModelServer::start(model_server::ModelServerOptions { listen: lease()?, ..options })?);
        }
        let (listener, admin) = (lease()?, lease()?);
        let mut settings = DaemonSettings::new(folder.path())?;
        (settings.arguments, settings.threads) = (self.daemon_arguments, self.daemon_threads);
        settings.environment = self.daemon_environment;
        settings.arguments.extend(self.front.daemon_arguments(&self.edits));
        if !self.scorers.is_empty() {
            settings.arguments.extend(["--config".to_owned(), scorers::write(&self.scorers, folder.path())?]);
        }
        let mut ports_of_file = vec![(8080, listener.port()), (9901, admin.port()), (9004, settings.state.number())];
        if self.front == PickerMode::ExtProc {
            ports_of_file.push((9002, settings.ext_proc.number()));
        }
        let config = configured(self.front, &self.edits, &ports_of_file)?;
        let strangers = self.strangers.iter().enumerate().map(|(index, address)| (format!("stranger-{index}"), *address));
        settings.write_endpoints(&endpoints(&servers).into_iter().chain(strangers).collect::<Vec<_>>())?;
        let (daemon, absent) = if self.daemon { (Some(DaemonProcess::start(settings)?), None) } else { (None, Some(settings)) };
        let envoy = EnvoyProcess::start(&config, listener, admin, &self.envoy, folder.path())?;
        let mut stack = Stack { servers, envoy, daemon, absent, _ports: ports, folder, quiet: self.quiet };
        match stack.wait_until_up(self.ready).await {
            Ok(()) => Ok(stack),
            Err(error) => Err(format!("{error}\n{}", stack.logs()).into()),
        }
    }
}

fn configured(front: PickerMode, edits: &[ConfigEdit], ports: &[(u16, u16)]) -> Result<EnvoyConfig> {
    let mut config = EnvoyConfig::shipped(front.file())?;
    for &(from, to) in ports {
        config.replace_port(from, to)?;
    }
    for edit in edits {
        match edit {
            ConfigEdit::Picker(keys) => match front {
                PickerMode::Filter => config.set_picker(keys)?,
                PickerMode::ExtProc => keys.iter().try_for_each(|(key, value)| config.set_daemon(key, value))?,
            },
            ConfigEdit::FilterBeforePicker(filter) => config.insert_before_picker(filter.clone())?,
            ConfigEdit::Anything(edit) => edit(config.value()),
        }
    }
    Ok(config)
}

fn endpoints(servers: &[ModelServer]) -> Vec<(String, SocketAddr)> {
    servers.iter().enumerate().map(|(index, server)| (format!("server-{index}"), server.addr())).collect()
}

// === impl Stack ===

impl Stack {
    /// Describes a stack: one model server, one worker, as shipped.
    pub fn builder() -> StackBuilder {
        StackBuilder {
            front: PickerMode::Filter,
            servers: Vec::new(),
            strangers: Vec::new(),
            envoy: EnvoyOptions::default(),
            edits: Vec::new(),
            daemon_arguments: Vec::new(),
            scorers: Vec::new(),
            daemon_threads: None,
            daemon_environment: Vec::new(),
            daemon: true,
            ready: true,
            quiet: false,
        }
        .servers(1)
    }

    /// Starts so many model servers behind everything as shipped.
    ///
    /// # Errors
    /// If a part does not come up.
    pub async fn start(servers: usize) -> Result<Self> {
        Self::builder().servers(servers).start().await
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.envoy.listener()
    }

    /// `GET path` through Envoy.
    ///
    /// # Errors
    /// If there is no whole reply.
    pub async fn get(&self, path: &str) -> Result<ClientReply> {
        client::get(self.address(), path).await
    }

    /// `POST path` with JSON through Envoy.
    ///
    /// # Errors
    /// If there is no whole reply.
    pub async fn post(&self, path: &str, body: &Value) -> Result<ClientReply> {
        client::post(self.address(), path, body.to_string()).await
    }

    /// Sends any request through Envoy by HTTP/1.1.
    ///
    /// # Errors
    /// If there is no whole reply.
    pub async fn send(&self, request: Request<Body>) -> Result<ClientReply> {
        client::send(self.address(), request).await
    }

    /// Index of the server that answered.
    ///
    /// # Errors
    /// If none of ours did.
    pub fn server_of(&self, reply: &ClientReply) -> Result<usize> {
        let by = reply.header("x-served-by");
        let index = self.servers.iter().position(|server| server.addr().to_string() == by);
        index.ok_or_else(|| format!("no server of ours answered: {} {:?} {}", reply.status, by, reply.text()).into())
    }

    /// The daemon.
    ///
    /// # Errors
    /// If the stack was built without one.
    pub fn daemon(&mut self) -> Result<&mut DaemonProcess> {
        Ok(self.daemon.as_mut().ok_or("this stack has no daemon")?)
    }

    /// Starts the daemon of a stack that was built without.
    ///
    /// # Errors
    /// If it cannot be run, or runs already.
    pub fn start_daemon(&mut self) -> Result<()> {
        let settings = self.absent.take().ok_or("this stack has a daemon already")?;
        self.daemon = Some(DaemonProcess::start(settings)?);
        Ok(())
    }

    /// Makes these of the servers the pool, by index.
    ///
    /// # Errors
    /// If there is no daemon to read it, or no such server.
    pub fn set_pool(&mut self, indices: &[usize]) -> Result<()> {
        let all = endpoints(&self.servers);
        let chosen = indices.iter().map(|index| all.get(*index).cloned().ok_or("no such server")).collect::<Result<Vec<_>, _>>()?;
        self.daemon()?.settings().write_endpoints(&chosen)
    }

    /// The folder of its logs and files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The last lines of every log.
    pub fn logs(&mut self) -> String {
        let daemon = self.daemon.as_mut().map(|daemon| daemon.process().log_tail(LINES_SHOWN)).unwrap_or_default();
        daemon + &self.envoy.process().log_tail(LINES_SHOWN)
    }

    /// Waits until the picker has state.
    ///
    /// # Errors
    /// If that takes too long, or a process ended.
    pub async fn wait_until_ready(&mut self) -> Result<()> {
        self.wait_until_up(true).await
    }

    async fn wait_until_up(&mut self, ready: bool) -> Result<()> {
        let (listener, admin) = (self.envoy.listener(), self.envoy.admin());
        let up = || async move {
            // Envoy says LIVE when its workers serve; the picker says ready when it has state.
            let live = client::get(admin, "/ready").await.is_ok_and(|reply| reply.status == 200);
            let has_state = || async { client::get(listener, "/switchpoint/ready").await.is_ok_and(|reply| reply.status == 200) };
            (live && (!ready || has_state().await)).then_some(())
        };
        tokio::select! {
            up = wait_for(START_LIMIT, "the picker's state", up) => up,
            ended = Self::an_end(&mut self.envoy, self.daemon.as_mut()) => Err(ended),
        }
    }

    /// Returns when one of the processes has ended.
    async fn an_end(envoy: &mut EnvoyProcess, mut daemon: Option<&mut DaemonProcess>) -> crate::Error {
        loop {
            let daemon_runs = daemon.as_mut().map_or(Ok(()), |daemon| daemon.process().check_running());
            if let Err(ended) = envoy.process().check_running().and(daemon_runs) {
                return ended;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if !self.quiet {
            let logs = self.logs();
            #[allow(clippy::print_stdout, reason = "a test that fails, by panic or by error, shows what the processes said")]
            {
                println!("{logs}");
            }
        }
    }
}
