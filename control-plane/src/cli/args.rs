//! The command line: all options with their defaults. Each option is also an environment variable.

mod endpoints;
mod examples;
mod ext_proc;
mod ports;
mod queries;
mod scaling;
mod values;
pub use endpoints::{EndpointTlsArgs, EndpointsArgs, ScrapeArgs};
pub use ext_proc::{
    DestinationFormatArg, ExchangeArgs, ExtProcArgs, FailureModeArg, HeaderTrustArg,
};
pub use ports::{AdminTls, StateTls};
pub use queries::{CheckArgs, CheckTarget, OutputFormat};
pub use scaling::ScalingArgs;
pub(crate) use scaling::spare;
pub(crate) use values::duration;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use discovery::backend::AppProtocol;

use self::examples::{EXAMPLES, EXPLAIN_EXAMPLES};
use self::values::listen;
use crate::cli::build::VERSION;
use crate::cli::explain::ExplainArgs;
use crate::cli::logging::LogArgs;
use crate::cli::register::{InstancesArgs, RegisterArgs};
use crate::config::STRATEGY_VARIABLE;
use crate::daemon::certificates::RenewalArgs;
use crate::daemon::lease::LeaseArgs;
use crate::pool::objects::ObjectsSource;

/// Discovers model servers, scrapes them, and sends their state to the Switchpoint filters in
/// Envoy.
#[derive(Debug, Parser)]
#[command(name = "switchpointd", version = VERSION, after_help = EXAMPLES, disable_help_subcommand = true)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// The commands of `switchpointd`.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Run the daemon.
    ///
    /// Exit code: 0 after SIGTERM or SIGINT, 1 if it could not start or had to stop, 2 for an
    /// invalid command line.
    #[command(after_help = EXAMPLES)]
    Serve(Box<ServeArgs>),
    /// Check a configuration file, or whether a model server reports what picking needs.
    ///
    /// Exit code: 0 valid, 1 invalid (or the server lacks a metric), 2 the file is valid, but
    /// uses something that Switchpoint refuses.
    #[command(after_help = EXAMPLES)]
    Check(CheckArgs),
    /// Runs `switchpoint-migrate`, which replaces this command. The next version drops the command.
    #[command(disable_help_flag = true)]
    Migrate {
        /// Arguments of `switchpoint-migrate`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Register a process of any language. The registration ends when this command ends.
    Register(Box<RegisterArgs>),
    /// List the instances that may get traffic, or watch them come and go.
    Instances(InstancesArgs),
    /// Explain why a request goes to an endpoint, with the live state of a running daemon.
    ///
    /// The file holds the body of a request, or a decision record (the field `decision` of the
    /// access log, with decision_log_one_in in the filter's configuration). A record has all inputs
    /// of its decision, so it gives the same ranked endpoints until the configuration changes.
    ///
    /// Exit code: 0 answered, 1 the file cannot be read or the daemon cannot be reached.
    #[command(after_help = EXPLAIN_EXAMPLES)]
    Explain(Box<ExplainArgs>),
}

/// Options of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The endpoints of the pool.
    #[command(flatten)]
    pub endpoints: EndpointsArgs,

    /// Accept loopback and link-local addresses from files, directories, etcd and Kubernetes. The
    /// risk: a proxy connects to such an address on its own machine, so a client that may write to
    /// the source can direct prompts to any port of that machine. Addresses of --endpoint need no
    /// flag.
    #[arg(long, env = "SWITCHPOINT_LOCAL_ENDPOINTS")]
    pub local_endpoints: bool,

    /// Name of the pool. Envoy's EDS service_name and the filter's configuration must have the same
    /// name.
    #[arg(
        long,
        env = "SWITCHPOINT_POOL",
        value_name = "NAME",
        default_value = "default"
    )]
    pub pool: String,

    /// The scheduling configuration: an EndpointPickerConfig like llm-d's. The daemon reads the
    /// file again when its content changes.
    #[arg(long, env = "SWITCHPOINT_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Models, rewrites and objectives.
    #[command(flatten)]
    pub objects: ObjectsSource,

    /// Leader election among several daemons.
    #[command(flatten)]
    pub lease: LeaseArgs,

    /// A file that keeps the data that the daemon's next start needs (slots, generations, hash
    /// secret). Without it, proxies lose their prefix state when the daemon restarts.
    #[arg(long, env = "SWITCHPOINT_SNAPSHOT_FILE", value_name = "FILE")]
    pub snapshot_file: Option<PathBuf>,

    /// Address of the gRPC listener that sends state to filters and EDS to Envoys.
    #[arg(
        long,
        env = "SWITCHPOINT_LISTEN_STATE",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:9004"
    )]
    pub listen_state: SocketAddr,

    /// Address of the admin listener: /livez /readyz /metrics /debug/endpoints /debug/running
    /// /debug/state /debug/config /debug/model /debug/scaling.
    #[arg(
        long,
        env = "SWITCHPOINT_LISTEN_ADMIN",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:9090"
    )]
    pub listen_admin: SocketAddr,

    /// Address of a read-only listener for Prometheus, without TLS: usually 0.0.0.0:9091, or
    /// `none`. This listener serves only /metrics, /livez and /readyz.
    #[arg(long, env = "SWITCHPOINT_LISTEN_METRICS", value_name = "IP:PORT", default_value = "none", value_parser = listen)]
    pub listen_metrics: OptionalAddress,

    /// The picker for gateways without the Switchpoint filter.
    #[command(flatten)]
    pub ext_proc: ExtProcArgs,

    /// The protocol that Envoy's clusters use towards model servers. An InferencePool with another
    /// appProtocol causes a warning.
    #[arg(long, env = "SWITCHPOINT_MODEL_SERVERS_SPEAK", value_enum, default_value_t = UpstreamProtocol::Http1)]
    pub model_servers_speak: UpstreamProtocol,

    /// Scraping.
    #[command(flatten)]
    pub scrape: ScrapeArgs,

    /// Latency prediction.
    #[command(flatten)]
    pub latency: LatencyArgs,

    /// The scaling signal.
    #[command(flatten)]
    pub scaling: ScalingArgs,

    /// TLS of the state listener.
    #[command(flatten)]
    pub state_tls: StateTls,

    /// Renewal of certificates in Kubernetes.
    #[command(flatten)]
    pub renewal: RenewalArgs,

    /// TLS of the admin listener.
    #[command(flatten)]
    pub admin_tls: AdminTls,

    /// Logging.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Latency prediction.
#[derive(Clone, Debug, Args)]
pub struct LatencyArgs {
    /// Predict TTFT and TPOT of requests, so that their SLOs (x-slo-ttft-ms, x-slo-tpot-ms) have an
    /// effect. The slo-aware-profile-handler then answers 400 to an inference request without an
    /// SLO, unless it has sloMissing: default. Other handlers accept requests without SLOs.
    #[arg(long, env = "SWITCHPOINT_LATENCY_PREDICTION")]
    pub latency_prediction: bool,

    /// File that keeps the learned latency models. The daemon writes it every 30 s if a model
    /// changed, and begins with these models at its next start. Another daemon may begin with a
    /// copy.
    #[arg(long, env = "SWITCHPOINT_LATENCY_MODEL_FILE", value_name = "FILE")]
    pub latency_model_file: Option<PathBuf>,

    /// Which SLO headroom is preferred if the configuration sets no strategy: least (or lowest), or
    /// most (or highest).
    #[arg(long, env = STRATEGY_VARIABLE, value_name = "WHICH")]
    pub headroom_selection_strategy: Option<String>,
}

/// The protocol that Envoy's clusters use towards model servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UpstreamProtocol {
    /// HTTP/1.1, as in the shipped Envoy files.
    Http1,
    /// HTTP/2 in plaintext, as with h2c.yaml.
    H2c,
}

/// An address to listen on, if any.
#[derive(Clone, Copy, Debug)]
pub struct OptionalAddress(pub Option<SocketAddr>);

impl From<UpstreamProtocol> for AppProtocol {
    fn from(protocol: UpstreamProtocol) -> Self {
        match protocol {
            UpstreamProtocol::Http1 => Self::Http,
            UpstreamProtocol::H2c => Self::H2c,
        }
    }
}
