//! Describes a stack (see [`crate::stack`]), and starts it.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Map, Value};

use super::{Stack, endpoints};
use crate::cuttable_link::CuttableLink;
use crate::daemon::{DaemonProcess, DaemonSettings};
use crate::envoy::{EnvoyConfig, EnvoyOptions, EnvoyProcess, EnvoySharing};
use crate::model_server::{ModelServer, ModelServerOptions};
use crate::ports::ReservedPort;
use crate::shared_envoy::EnvoyShare;
use crate::{Result, native, scorers};

/// The process that picks endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickerMode {
    /// The filter in the proxy picks; the configuration is `standalone.yaml`.
    Filter,
    /// The daemon picks, and the proxy calls the daemon by the Endpoint Picker Protocol; the
    /// configuration is `ext_proc.yaml`.
    ExtProc,
    /// The native module in the proxy picks; the configuration is `standalone.yaml` with the
    /// fragment `native.yaml`.
    Native,
}

/// Describes a stack to start. Every setting defaults to what most tests need.
#[derive(Debug)]
pub struct StackBuilder {
    front: PickerMode,
    servers: Vec<ModelServerOptions>,
    foreign_endpoints: Vec<SocketAddr>,
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

enum ConfigEdit {
    Picker(Map<String, Value>),
    FilterBeforePicker(Value),
    Anything(Box<dyn Fn(&mut Value) + Send>),
}

impl std::fmt::Debug for ConfigEdit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Picker(keys) => f.debug_tuple("Picker").field(keys).finish(),
            Self::FilterBeforePicker(filter) => {
                f.debug_tuple("FilterBeforePicker").field(filter).finish()
            }
            Self::Anything(_) => f.write_str("Anything"),
        }
    }
}

// === impl PickerMode ===

impl PickerMode {
    /// The modes that are not experimental.
    pub const ALL: [Self; 2] = [Self::Filter, Self::ExtProc];

    /// Returns the shipped config.
    ///
    /// # Errors
    /// Fails if the file does not exist or is not YAML.
    pub fn config(self) -> Result<EnvoyConfig> {
        let file = match self {
            Self::Filter | Self::Native => "standalone.yaml",
            Self::ExtProc => "ext_proc.yaml",
        };
        let mut config = EnvoyConfig::shipped(file)?;
        if self == Self::Native {
            config.use_native_module()?;
        }
        Ok(config)
    }

    /// Returns the daemon's arguments for the picker configuration in `edits`, if the daemon picks.
    fn daemon_arguments(self, edits: &[ConfigEdit]) -> Vec<String> {
        let keys = edits
            .iter()
            .filter_map(|edit| {
                if let ConfigEdit::Picker(keys) = edit {
                    Some(keys)
                } else {
                    None
                }
            })
            .flatten();
        let argument = |(key, value): (&String, &Value)| match (key.as_str(), value) {
            ("explain", Value::Bool(true)) => vec!["--ext-proc-explain".to_owned()],
            ("objective_header" | "slo_headers", Value::String(word)) => {
                vec![
                    format!("--ext-proc-{}", key.replace('_', "-")),
                    word.clone(),
                ]
            }
            _ => Vec::new(),
        };
        keys.filter(|_| self == Self::ExtProc)
            .flat_map(argument)
            .collect()
    }
}

// === impl StackBuilder ===

impl StackBuilder {
    pub(super) fn new() -> Self {
        Self {
            front: PickerMode::Filter,
            servers: Vec::new(),
            foreign_endpoints: Vec::new(),
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
    }

    /// Sets which process picks; by default the proxy picks.
    #[must_use]
    pub fn front(mut self, front: PickerMode) -> Self {
        self.front = front;
        self
    }

    /// Starts `count` model servers that serve the model `demo` and answer immediately.
    #[must_use]
    pub fn servers(self, count: usize) -> Self {
        let options = ModelServerOptions {
            models: vec!["demo".to_owned()],
            speed: 0.0,
            ..ModelServerOptions::default()
        };
        self.servers_like(count, &options)
    }

    /// Starts `count` model servers with these options.
    #[must_use]
    pub fn servers_like(mut self, count: usize, options: &ModelServerOptions) -> Self {
        self.servers = vec![options.clone(); count];
        self
    }

    /// Adds `count` model servers with these options, for a pool of unequal machines.
    #[must_use]
    pub fn more_servers_like(mut self, count: usize, options: &ModelServerOptions) -> Self {
        self.servers.extend(vec![options.clone(); count]);
        self
    }

    /// Adds an endpoint that is not one of the stack's model servers: for example an address
    /// without a listener.
    #[must_use]
    pub fn stranger(mut self, address: SocketAddr) -> Self {
        self.foreign_endpoints.push(address);
        self
    }

    /// Sets the worker threads of Envoy; 1 by default.
    #[must_use]
    pub fn concurrency(mut self, workers: u32) -> Self {
        self.envoy.concurrency = workers;
        self
    }

    /// Adds arguments of Envoy.
    #[must_use]
    pub fn envoy_arguments(mut self, arguments: &[&str]) -> Self {
        self.envoy
            .arguments
            .extend(arguments.iter().map(ToString::to_string));
        self
    }

    /// Enables hot restart. The arguments must then have a base id that no other Envoy uses.
    #[must_use]
    pub fn hot_restart(mut self) -> Self {
        self.envoy.hot_restart = true;
        self
    }

    /// Runs Envoy by the shipped `start.sh`, with this drain time in seconds.
    #[must_use]
    pub fn start_script(mut self, drain_s: u32) -> Self {
        self.envoy.start_script = Some(drain_s);
        self
    }

    /// Sets keys of the picker's configuration; `keys` is a JSON object. If the daemon picks, the
    /// allowed keys are `explain`, `objective_header`, `slo_headers` and `destination_format`.
    #[must_use]
    pub fn picker(mut self, keys: Value) -> Self {
        if let Value::Object(keys) = keys {
            self.edits.push(ConfigEdit::Picker(keys));
        }
        self
    }

    /// Inserts a filter right before the picker.
    #[must_use]
    pub fn filter_before_picker(mut self, filter: Value) -> Self {
        self.edits.push(ConfigEdit::FilterBeforePicker(filter));
        self
    }

    /// Changes the shipped config in any way. If users cannot make the same change in the file,
    /// give the reason at the call.
    #[must_use]
    pub fn envoy_config(mut self, edit: impl Fn(&mut Value) + Send + 'static) -> Self {
        self.edits.push(ConfigEdit::Anything(Box::new(edit)));
        self
    }

    /// Puts a link between Envoy and the daemon. The test later connects the link to the daemon.
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

    /// Adds arguments of `switchpointd serve`.
    #[must_use]
    pub fn daemon_arguments(mut self, arguments: &[&str]) -> Self {
        self.daemon_arguments
            .extend(arguments.iter().map(ToString::to_string));
        self
    }

    /// Configures these scorers with their weights in place of the default profile.
    #[must_use]
    pub fn scored_by(mut self, scorers: &[(&str, u32)]) -> Self {
        self.scorers = scorers
            .iter()
            .map(|&(scorer, weight)| (scorer.to_owned(), weight))
            .collect();
        self
    }

    /// Sets the worker threads of the daemon.
    #[must_use]
    pub fn daemon_threads(mut self, threads: u32) -> Self {
        self.daemon_threads = Some(threads);
        self
    }

    /// Adds an environment variable of the daemon.
    #[must_use]
    pub fn daemon_environment(mut self, name: &str, value: &str) -> Self {
        self.daemon_environment
            .push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts no daemon, to test how a proxy starts without one. The stack is ready when Envoy
    /// runs.
    #[must_use]
    pub fn without_daemon(mut self) -> Self {
        self.daemon = false;
        self.without_waiting()
    }

    /// Returns as soon as Envoy listens, even if the picker has no state.
    #[must_use]
    pub fn without_waiting(mut self) -> Self {
        self.ready = false;
        self
    }

    /// Prints no logs at the end. By default the stack prints the last lines of its logs; the test
    /// runner shows this output only if the test fails.
    #[must_use]
    pub fn quiet(mut self) -> Self {
        self.quiet = true;
        self
    }

    /// Shares an Envoy with other stacks, which saves the three seconds in which an Envoy compiles
    /// the filter. Use a shared Envoy for tests that read only replies, the access log and the
    /// daemon's pages. If the daemon or the native module picks, the stack still has its own Envoy,
    /// which compiles no filter.
    #[must_use]
    pub fn shared_envoy(mut self) -> Self {
        self.envoy.sharing = EnvoySharing::Together;
        self
    }

    /// Like [`Self::shared_envoy`], but no other stack uses the Envoy at the same time, and
    /// counters begin at 0. Use this method for tests that also read statistics and admin pages of
    /// Envoy.
    #[must_use]
    pub fn envoy_in_turn(mut self) -> Self {
        self.envoy.sharing = EnvoySharing::InTurn;
        self
    }

    /// Starts the stack. The caller must be in a tokio runtime, which then also runs the model
    /// servers.
    ///
    /// # Errors
    /// Fails if a part does not start. The error has the last lines of the logs.
    pub async fn start(mut self) -> Result<Stack> {
        let is_native = self.front == PickerMode::Native;
        self.envoy.modules = is_native.then(native::folder).transpose()?;
        let folder = tempfile::Builder::new()
            .prefix("switchpoint-e2e-")
            .tempdir()?;
        let mut ports = Vec::new();
        let mut lease = || -> Result<SocketAddr> {
            let port = ReservedPort::lease()?;
            let address = port.address();
            ports.push(port);
            Ok(address)
        };
        let mut servers = Vec::new();
        for options in &self.servers {
            // The leased port stays reserved while the server closes its socket to refuse
            // connections.
            servers.push(ModelServer::start(ModelServerOptions {
                listen: lease()?,
                ..options.clone()
            })?);
        }
        let listener = lease()?;
        let admin = lease()?;
        let mut settings = self.daemon_settings(folder.path())?;
        let is_own = self.envoy.sharing == EnvoySharing::Own || self.front != PickerMode::Filter;
        let share = if is_own {
            None
        } else {
            let (share, port) = EnvoyShare::reserve(self.envoy.concurrency, self.envoy.sharing)?;
            settings.state = port;
            Some(share)
        };
        let foreign = self.foreign_endpoints.iter().enumerate();
        let foreign = foreign.map(|(index, address)| (format!("stranger-{index}"), *address));
        let endpoints = endpoints(&servers).into_iter().chain(foreign);
        settings.write_endpoints(&endpoints.collect::<Vec<_>>())?;
        let mut ports_of_file = vec![
            (8080, listener.port()),
            (9901, admin.port()),
            (9004, settings.state.number()),
        ];
        if self.front == PickerMode::ExtProc {
            ports_of_file.push((9002, settings.ext_proc.number()));
        }
        let config = configured(self.front, &self.edits, &ports_of_file)?;
        let (daemon, absent) = if self.daemon {
            (Some(DaemonProcess::start(settings)?), None)
        } else {
            (None, Some(settings))
        };
        let envoy = if let Some(share) = share {
            EnvoyProcess::share(share, &config, listener, &self.envoy, folder.path()).await?
        } else {
            EnvoyProcess::start(&config, listener, admin, &self.envoy, folder.path())?
        };
        let mut stack = Stack {
            servers,
            envoy,
            daemon,
            absent,
            _ports: ports,
            folder,
            quiet: self.quiet,
        };
        match stack.wait_until_up(self.ready).await {
            Ok(()) => Ok(stack),
            Err(error) => Err(format!("{error}\n{}", stack.logs()).into()),
        }
    }

    fn daemon_settings(&self, folder: &Path) -> Result<DaemonSettings> {
        let mut settings = DaemonSettings::new(folder)?;
        settings.threads = self.daemon_threads;
        settings.environment.clone_from(&self.daemon_environment);
        settings.arguments.clone_from(&self.daemon_arguments);
        settings
            .arguments
            .extend(self.front.daemon_arguments(&self.edits));
        if !self.scorers.is_empty() {
            let config = scorers::write(&self.scorers, folder)?;
            settings.arguments.extend(["--config".to_owned(), config]);
        }
        Ok(settings)
    }
}

fn configured(
    front: PickerMode,
    edits: &[ConfigEdit],
    ports: &[(u16, u16)],
) -> Result<EnvoyConfig> {
    let mut config = front.config()?;
    for &(from, to) in ports {
        config.replace_port(from, to)?;
    }
    for edit in edits {
        match edit {
            ConfigEdit::Picker(keys) => match front {
                PickerMode::Filter | PickerMode::Native => config.set_picker(keys)?,
                PickerMode::ExtProc => keys
                    .iter()
                    .try_for_each(|(key, value)| config.set_daemon(key, value))?,
            },
            ConfigEdit::FilterBeforePicker(filter) => {
                config.insert_before_picker(filter.clone())?;
            }
            ConfigEdit::Anything(edit) => edit(config.value()),
        }
    }
    Ok(config)
}
