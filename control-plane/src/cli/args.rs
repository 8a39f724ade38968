//! The command line: all options with their defaults. Each option is also an environment variable.

mod ports;
mod values;
pub use ports::{AdminTls, StateTls};

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use self::values::{duration, header_name, listen};
use crate::cli::build::VERSION;
use crate::cli::logging::LogArgs;
use crate::cli::migrate::MigrateArgs;
use crate::cli::register::{InstancesArgs, RegisterArgs};
use crate::config::STRATEGY_VARIABLE;
use crate::daemon::lease::LeaseArgs;

const EXAMPLES: &str = "\
Examples:
  Two model servers on this machine:
    switchpointd serve --endpoint 127.0.0.1:8000 --endpoint 127.0.0.1:8001

  A list that may change while running (names, labels; the format of llm-d's file-discovery):
    switchpointd serve --endpoints-file endpoints.yaml --snapshot-file state.json

      endpoints:
      - {name: gpu-0, address: 10.0.0.1, port: 8000}
      - {name: gpu-1, address: 10.0.0.2, port: 8000, labels: {llm-d.ai/engine-type: sglang}}

  See what it knows:
    curl -s 127.0.0.1:9090/debug/endpoints

  Check a configuration of llm-d's picker, and whether a model server reports the needed metrics:
    switchpointd check config.yaml
    switchpointd check --endpoint 10.0.0.1:8000

Every option is also an environment variable: --listen-admin is SWITCHPOINT_LISTEN_ADMIN.
";

const MIGRATE_EXAMPLES: &str = "\
Examples:
  The values with which llm-d's release `llama` was installed:
    helm get values llama -n prod > llama.values.yaml
    switchpointd migrate -f llama.values.yaml --pool llama --namespace prod > values.yaml

  A running picker:
    kubectl get configmap,deployment,inferencepool,service -n prod -o yaml | switchpointd migrate -
    switchpointd migrate --cluster --namespace prod --pool llama --output-dir switchpoint/

  One configuration file:
    switchpointd migrate picker.yaml

stdout has the values of our chart, with the configuration of each pool; stderr has the report:

    - `router.epp.replicas` = `3` -> `daemon.replicas`: two daemons: one leads, one stands by; ...
    - `router.tracing.enabled` = `true`: the picker has no spans of its own; ...

docs/how-to/migrate.md has the steps of a migration and a table of all items.
";

const EXPLAIN_EXAMPLES: &str = "\
Examples:
    switchpointd explain --request body.json
    switchpointd explain --request body.json --without 10.0.0.1:8000 --config other.yaml
    jq -r 'select(.decision) | .decision' access.log | head -1 > decision.json
    switchpointd explain --request decision.json --format json
";

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
    /// Exit code: 0 valid, 1 invalid (or the server lacks something), 2 the file uses something
    /// that is refused here.
    #[command(after_help = EXAMPLES)]
    Check(CheckArgs),
    /// Turn the values of llm-d's charts, or a running endpoint picker, into values of our chart.
    ///
    /// Each item is kept, changed, or has no equivalent; the report has the reason. Nothing is
    /// installed and no object is changed.
    ///
    /// Exit code: 0 all kept or changed, 1 the input cannot be read, 2 an invalid command line, 3
    /// something has no equivalent or is unknown.
    #[command(after_help = MIGRATE_EXAMPLES)]
    Migrate(Box<MigrateArgs>),
    /// Register a process of any language; the registration ends with this process.
    Register(Box<RegisterArgs>),
    /// List the instances that may get traffic, or watch them come and go.
    Instances(InstancesArgs),
    /// Explain why a request goes to an endpoint, by the live state of a running daemon.
    ///
    /// The file holds the body of a request, or a decision record (the field `decision` of the
    /// access log, with decision_log_one_in in the filter's configuration). A record has all inputs
    /// of its decision, so it gives the same list while the configuration is the same.
    ///
    /// Exit code: 0 answered, 1 the file cannot be read or the daemon cannot be reached.
    #[command(after_help = EXPLAIN_EXAMPLES)]
    Explain(ExplainArgs),
}

/// Options of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The daemon's admin listener.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    pub admin: String,

    /// The token of that listener, where the daemon has --admin-token-file.
    #[arg(long, env = "SWITCHPOINT_ADMIN_TOKEN_FILE", value_name = "FILE")]
    pub admin_token_file: Option<PathBuf>,

    /// The request's body, or a decision record.
    #[arg(long, value_name = "FILE")]
    pub request: PathBuf,

    /// The pool; needed where there are several.
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,

    /// Path of the request, which decides its API.
    #[arg(long, value_name = "PATH", default_value = "/v1/chat/completions")]
    pub path: String,

    /// A header of the request; may be repeated.
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    pub headers: Vec<(String, String)>,

    /// The subset hint that a gateway would give: addresses, comma-separated.
    #[arg(long, value_name = "IP:PORT,...")]
    pub subset: Option<String>,

    /// Explain as if this endpoint did not exist. May be repeated.
    #[arg(long, value_name = "IP:PORT")]
    pub without: Vec<String>,

    /// Explain with this EndpointPickerConfig instead of the current one.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Readable text, or one JSON object.
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("a header is NAME: VALUE")?;
    Ok((name.trim().to_ascii_lowercase(), value.trim().to_owned()))
}

/// Options of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// What to check.
    #[command(flatten)]
    pub what: CheckTarget,

    /// The engine of that server, as in its label llm-d.ai/engine-type. If not given, it is
    /// recognised by its metrics.
    #[arg(long, value_name = "NAME", requires = "endpoint")]
    pub engine: Option<String>,

    /// Readable text, or one JSON object.
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

/// What to check: exactly one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct CheckTarget {
    /// An EndpointPickerConfig, or a file of objects as for --objects.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// A model server: its /metrics page is fetched once and checked.
    #[arg(long, value_name = "HOST:PORT")]
    pub endpoint: Option<String>,
}

/// The output format of `check` and `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Readable text.
    Text,
    /// One JSON object.
    Json,
}

/// Options of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The endpoints of the pool.
    #[command(flatten)]
    pub endpoints: EndpointsArgs,

    /// Name of the pool; Envoy's EDS service_name and the filter's pool must be the same.
    #[arg(long, env = "SWITCHPOINT_POOL", value_name = "NAME", default_value = "default")]
    pub pool: String,

    /// The scheduling configuration: an EndpointPickerConfig like llm-d's; read again when its
    /// content changes.
    #[arg(long, env = "SWITCHPOINT_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Models, rewrites and objectives.
    #[command(flatten)]
    pub objects: ObjectsArgs,

    /// Leader election among several daemons.
    #[command(flatten)]
    pub lease: LeaseArgs,

    /// A file for what the next start needs (slots, generations, hash secret). Without it, proxies
    /// lose their prefix state when the daemon restarts.
    #[arg(long, env = "SWITCHPOINT_SNAPSHOT_FILE", value_name = "FILE")]
    pub snapshot_file: Option<PathBuf>,

    /// The gRPC listener that sends state to filters and EDS to Envoys.
    #[arg(long, env = "SWITCHPOINT_LISTEN_STATE", value_name = "IP:PORT", default_value = "127.0.0.1:9004")]
    pub listen_state: SocketAddr,

    /// The admin listener: /livez /readyz /metrics /debug/endpoints /debug/running /debug/state
    /// /debug/config /debug/model.
    #[arg(long, env = "SWITCHPOINT_LISTEN_ADMIN", value_name = "IP:PORT", default_value = "127.0.0.1:9090")]
    pub listen_admin: SocketAddr,

    /// A read-only listener for Prometheus, without TLS: /metrics /livez /readyz and nothing else.
    /// Usually 0.0.0.0:9091; `none`: not opened.
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

    /// TLS of the state listener.
    #[command(flatten)]
    pub state_tls: StateTls,

    /// TLS of the admin listener.
    #[command(flatten)]
    pub admin_tls: AdminTls,

    /// Logging.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The picker for gateways that speak the Endpoint Picker Protocol (Envoy's ext_proc).
#[derive(Debug, Args)]
#[command(next_help_heading = "Endpoint Picker Protocol (ext_proc)")]
pub struct ExtProcArgs {
    /// The ext_proc listener, for gateways without the filter; `none`: not opened.
    #[arg(long, env = "SWITCHPOINT_LISTEN_EXT_PROC", value_name = "IP:PORT", default_value = "127.0.0.1:9002", value_parser = listen)]
    pub listen_ext_proc: OptionalAddress,

    /// gRPC health in plaintext, also served by a standby. Services: liveness, leading, readiness,
    /// envoy.service.ext_proc.v3.ExternalProcessor; `none`: not opened.
    #[arg(long, env = "SWITCHPOINT_LISTEN_HEALTH", value_name = "IP:PORT", default_value = "127.0.0.1:9003", value_parser = listen)]
    pub listen_health: OptionalAddress,

    /// Certificate with its chain, PEM; read again when it changes. If not given, a self-signed one
    /// is created at each start.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_TLS_CERT", value_name = "FILE", requires = "ext_proc_tls_key")]
    pub ext_proc_tls_cert: Option<PathBuf>,

    /// The key of that certificate, PEM.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_TLS_KEY", value_name = "FILE", requires = "ext_proc_tls_cert")]
    pub ext_proc_tls_key: Option<PathBuf>,

    /// Demand client certificates signed by this CA, PEM.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_TLS_CLIENT_CA", value_name = "FILE", requires = "ext_proc_tls_cert")]
    pub ext_proc_tls_client_ca: Option<PathBuf>,

    /// No TLS. Beyond loopback this needs --insecure-ext-proc too.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_PLAINTEXT", conflicts_with = "ext_proc_tls_cert")]
    pub ext_proc_plaintext: bool,

    /// Allow --ext-proc-plaintext beyond loopback. The risk: any machine between gateway and daemon
    /// can read every prompt and reply, and change where requests go and what they contain.
    #[arg(long, env = "SWITCHPOINT_INSECURE_EXT_PROC")]
    pub insecure_ext_proc: bool,

    /// The format of the destination, unless the stream's gRPC metadata
    /// x-switchpoint-destination-format says otherwise.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_DESTINATION_FORMAT", value_enum, default_value_t = DestinationFormatArg::Single)]
    pub ext_proc_destination_format: DestinationFormatArg,

    /// Whether the objective header of a request counts.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_OBJECTIVE_HEADER", value_enum, default_value_t = ObjectiveHeaderArg::Ignore)]
    pub ext_proc_objective_header: ObjectiveHeaderArg,

    /// Give clients that request it (x-switchpoint-explain: 1) the reasons of a decision.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_EXPLAIN")]
    pub ext_proc_explain: bool,

    /// Other request-handling settings; the filter's configuration has the same ones under these
    /// names.
    #[command(flatten)]
    pub exchanges: ExchangeArgs,
}

/// Request-handling settings. Options that are not given keep their defaults.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Endpoint Picker Protocol (ext_proc)")]
pub struct ExchangeArgs {
    /// Header that names the model where a gateway does not show the body [default:
    /// x-gateway-model-name].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_MODEL_HEADER", value_name = "NAME", value_parser = header_name)]
    pub ext_proc_model_header: Option<String>,

    /// Header, and metadata key, of the destination [default: x-gateway-destination-endpoint].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_DESTINATION_HEADER", value_name = "NAME", value_parser = header_name)]
    pub ext_proc_destination_header: Option<String>,

    /// Metadata namespace of the destination and of the endpoint that served [default: envoy.lb].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_DESTINATION_NAMESPACE", value_name = "NAME")]
    pub ext_proc_destination_namespace: Option<String>,

    /// Metadata namespace of the subset hint [default: envoy.lb.subset_hint].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_SUBSET_NAMESPACE", value_name = "NAME")]
    pub ext_proc_subset_namespace: Option<String>,

    /// Key of the subset hint in it [default: x-gateway-destination-endpoint-subset].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_SUBSET_KEY", value_name = "NAME")]
    pub ext_proc_subset_key: Option<String>,

    /// What happens to a request before the first state has arrived: refuse it, or let any endpoint
    /// serve it [default: close].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_FAILURE_MODE", value_enum)]
    pub ext_proc_failure_mode: Option<FailureModeArg>,

    /// How long a request may wait for the first state. Set `message_timeout` of the gateway higher
    /// [default: 2s].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_COLD_START_WAIT", value_name = "DURATION", value_parser = duration)]
    pub ext_proc_cold_start_wait: Option<Duration>,

    /// Largest request body on an inference path, in bytes [default: 25165824].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_BODY_LIMIT_BYTES", value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1_024..=BODY_LIMIT_BYTES_MAX))]
    pub ext_proc_body_limit_bytes: Option<u32>,

    /// Time from the start of one attempt of a streamed request to its response headers [default:
    /// no limit].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_PER_TRY_TIMEOUT", value_name = "DURATION", value_parser = duration)]
    pub ext_proc_per_try_timeout: Option<Duration>,

    /// Do not retry a failed attempt at the next ranked endpoint.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_NO_RETRY")]
    pub ext_proc_no_retry: bool,
}

/// A body is one ext_proc message; a message has at most 33 MiB
/// ([`crate::serve::ext_proc::MESSAGE_BYTES_MAX`]).
const BODY_LIMIT_BYTES_MAX: i64 = 32 << 20;

/// The protocol that Envoy's clusters use towards model servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UpstreamProtocol {
    /// HTTP/1.1, as in the shipped Envoy files.
    Http1,
    /// HTTP/2 in plaintext, as with h2c.yaml.
    H2c,
}

/// What happens to a request before the first state has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FailureModeArg {
    /// The request is refused (503).
    Close,
    /// Any endpoint may serve the request.
    Open,
}

/// An address to listen on, if any.
#[derive(Clone, Copy, Debug)]
pub struct OptionalAddress(pub Option<SocketAddr>);

/// The format of the ranked list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DestinationFormatArg {
    /// The best endpoint, and the second one under x-gateway-destination-endpoint-fallback, as
    /// ORIGINAL_DST clusters expect.
    Single,
    /// The whole list, comma-separated, for clusters that try one endpoint after the other
    /// (`override_host`).
    List,
}

/// Whether the objective header of a request is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ObjectiveHeaderArg {
    /// Clients may set it but not choose their priority: the header is removed.
    Ignore,
    /// A proxy in front of the gateway sets it and removes the client's own.
    Trust,
}

/// Models, rewrites and objectives.
#[derive(Clone, Debug, Args)]
pub struct ObjectsArgs {
    /// InferenceObjective, InferenceModel and InferenceModelRewrite objects in YAML: all files of a
    /// folder, or one file; read again when they change. Only objects whose poolRef names the pool
    /// apply.
    #[arg(long, env = "SWITCHPOINT_OBJECTS", value_name = "DIR")]
    pub objects: Option<PathBuf>,

    /// The same objects from this namespace of the API server (in-cluster, or of the kubeconfig).
    #[arg(long, env = "SWITCHPOINT_OBJECTS_KUBERNETES", value_name = "NAMESPACE", conflicts_with = "objects")]
    pub objects_kubernetes: Option<String>,

    /// Answer 404 to a model that no object names, even if there is no InferenceModel.
    #[arg(long, env = "SWITCHPOINT_STRICT_MODELS")]
    pub strict_models: bool,
}

/// Latency prediction.
#[derive(Clone, Debug, Args)]
pub struct LatencyArgs {
    /// Predict TTFT and TPOT of requests, so that their SLOs (x-slo-ttft-ms, x-slo-tpot-ms) count.
    /// With the slo-aware-profile-handler every inference request must then have an SLO (else 400),
    /// unless the handler has sloMissing: default. With any other handler no request needs one.
    #[arg(long, env = "SWITCHPOINT_LATENCY_PREDICTION")]
    pub latency_prediction: bool,

    /// File of the learned models, written every 30 s if a model changed. The next start begins
    /// with them; another daemon may begin with them too.
    #[arg(long, env = "SWITCHPOINT_LATENCY_MODEL_FILE", value_name = "FILE")]
    pub latency_model_file: Option<PathBuf>,

    /// Which headroom is best where the configuration has no strategy: least (or lowest), or most
    /// (or highest).
    #[arg(long, env = STRATEGY_VARIABLE, value_name = "WHICH")]
    pub headroom_selection_strategy: Option<String>,
}

/// Scraping.
#[derive(Debug, Args)]
#[command(next_help_heading = "Scraping")]
pub struct ScrapeArgs {
    /// How often an idle endpoint is scraped.
    #[arg(long, env = "SWITCHPOINT_SCRAPE_INTERVAL", value_name = "DURATION", default_value = "1s", value_parser = duration)]
    pub scrape_interval: Duration,

    /// How often an endpoint with work is scraped.
    #[arg(long, env = "SWITCHPOINT_SCRAPE_INTERVAL_BUSY", value_name = "DURATION", default_value = "100ms", value_parser = duration)]
    pub scrape_interval_busy: Duration,

    /// Metrics older than this count as unknown (which means neither idle nor full).
    #[arg(long, env = "SWITCHPOINT_STALENESS_MAX", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub staleness_max: Duration,

    /// TLS towards endpoints.
    #[command(flatten)]
    pub endpoint_tls: EndpointTlsArgs,
}

/// TLS towards endpoints that serve their metrics by https (`metrics: {scheme: https}`, or
/// `metrics-data-source` in --config).
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS towards endpoints")]
pub struct EndpointTlsArgs {
    /// Trust servers signed by this CA, PEM. If not given, the system's CAs are trusted.
    #[arg(long, env = "SWITCHPOINT_ENDPOINT_TLS_CA", value_name = "FILE")]
    pub endpoint_tls_ca: Option<PathBuf>,

    /// Client certificate for these servers, PEM.
    #[arg(long, env = "SWITCHPOINT_ENDPOINT_TLS_CERT", value_name = "FILE", requires = "endpoint_tls_key")]
    pub endpoint_tls_cert: Option<PathBuf>,

    /// The key of that certificate, PEM.
    #[arg(long, env = "SWITCHPOINT_ENDPOINT_TLS_KEY", value_name = "FILE", requires = "endpoint_tls_cert")]
    pub endpoint_tls_key: Option<PathBuf>,

    /// Do not check servers' certificates.
    #[arg(long, env = "SWITCHPOINT_ENDPOINT_TLS_INSECURE")]
    pub endpoint_tls_insecure: bool,
}

/// The source of endpoints: exactly one of these.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct EndpointsArgs {
    /// YAML list of endpoints; read again when its content changes.
    #[arg(long, env = "SWITCHPOINT_ENDPOINTS_FILE", value_name = "FILE")]
    pub endpoints_file: Option<PathBuf>,

    /// A model server; repeat for more. A host name is resolved once, at start.
    #[arg(long, env = "SWITCHPOINT_ENDPOINT", value_name = "HOST:PORT", value_delimiter = ',')]
    pub endpoint: Vec<String>,

    /// YAML list of pools, each with its own endpoints and configuration. Excludes --pool and
    /// --config.
    #[arg(long, env = "SWITCHPOINT_POOLS", value_name = "FILE", conflicts_with_all = ["pool", "config"])]
    pub pools: Option<PathBuf>,
}
