//! Options of the ext_proc server.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::OptionalAddress;
use super::values::{collector, duration, header_name, listen};

/// The picker for gateways that use the Endpoint Picker Protocol (Envoy's ext_proc).
#[derive(Debug, Args)]
#[command(next_help_heading = "Endpoint Picker Protocol (ext_proc)")]
pub struct ExtProcArgs {
    /// Address of the ext_proc listener, for gateways without the filter, or `none`.
    #[arg(long, env = "SWITCHPOINT_LISTEN_EXT_PROC", value_name = "IP:PORT", default_value = "127.0.0.1:9002", value_parser = listen)]
    pub listen_ext_proc: OptionalAddress,

    /// Address of the gRPC health listener (plaintext), or `none`. A standby serves health too.
    /// Services: liveness, leading, readiness, envoy.service.ext_proc.v3.ExternalProcessor.
    #[arg(long, env = "SWITCHPOINT_LISTEN_HEALTH", value_name = "IP:PORT", default_value = "127.0.0.1:9003", value_parser = listen)]
    pub listen_health: OptionalAddress,

    /// Certificate with its chain, PEM; read again when it changes. If not given, the daemon makes
    /// a self-signed certificate at each start.
    #[arg(
        long,
        env = "SWITCHPOINT_EXT_PROC_TLS_CERT",
        value_name = "FILE",
        requires = "ext_proc_tls_key"
    )]
    pub ext_proc_tls_cert: Option<PathBuf>,

    /// The private key of the listener's certificate, PEM.
    #[arg(
        long,
        env = "SWITCHPOINT_EXT_PROC_TLS_KEY",
        value_name = "FILE",
        requires = "ext_proc_tls_cert"
    )]
    pub ext_proc_tls_key: Option<PathBuf>,

    /// Demand client certificates signed by this CA, PEM.
    #[arg(
        long,
        env = "SWITCHPOINT_EXT_PROC_TLS_CLIENT_CA",
        value_name = "FILE",
        requires = "ext_proc_tls_cert"
    )]
    pub ext_proc_tls_client_ca: Option<PathBuf>,

    /// Serve ext_proc without TLS. Beyond loopback this needs --insecure-ext-proc too.
    #[arg(
        long,
        env = "SWITCHPOINT_EXT_PROC_PLAINTEXT",
        conflicts_with = "ext_proc_tls_cert"
    )]
    pub ext_proc_plaintext: bool,

    /// Allow --ext-proc-plaintext beyond loopback. The risk: any machine between gateway and daemon
    /// can read every prompt and reply, and change where requests go and what they contain.
    #[arg(long, env = "SWITCHPOINT_INSECURE_EXT_PROC")]
    pub insecure_ext_proc: bool,

    /// The format of the picked destination, unless the stream's gRPC metadata
    /// x-switchpoint-destination-format names another.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_DESTINATION_FORMAT", value_enum, default_value_t = DestinationFormatArg::Single)]
    pub ext_proc_destination_format: DestinationFormatArg,

    /// Whether to trust the header of a request that names its InferenceObjective, and so its
    /// priority.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_OBJECTIVE_HEADER", value_enum, default_value_t = HeaderTrustArg::Ignore)]
    pub ext_proc_objective_header: HeaderTrustArg,

    /// Tell clients why an endpoint was picked, if they send the header x-switchpoint-explain: 1.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_EXPLAIN")]
    pub ext_proc_explain: bool,

    /// URL of an OpenTelemetry collector (OTLP over HTTP). It gets a span of each request whose
    /// trace the gateway samples [default: no spans].
    #[arg(long, env = "SWITCHPOINT_OTLP_ENDPOINT", value_name = "URL", value_parser = collector)]
    pub otlp_endpoint: Option<reqwest::Url>,

    /// How long the daemon answers ext_proc after SIGTERM. Meanwhile gateways notice that this
    /// daemon is not ready and call another daemon [default: not at all].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_DRAIN", value_name = "DURATION", value_parser = duration)]
    pub ext_proc_drain: Option<Duration>,

    /// How long the daemon then waits, after --ext-proc-drain, for replies that still pass through
    /// it. The pod's termination grace period must cover both times [default: 5s].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_REPLY_WAIT", value_name = "DURATION", value_parser = duration, requires = "ext_proc_drain")]
    pub ext_proc_reply_wait: Option<Duration>,

    /// Other settings for handling requests. The filter's configuration has the same settings under
    /// the same names.
    #[command(flatten)]
    pub exchanges: ExchangeArgs,
}

/// Request-handling settings. Options that are not given keep their defaults.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Endpoint Picker Protocol (ext_proc)")]
pub struct ExchangeArgs {
    /// Header that names the model if a gateway does not send the body [default:
    /// x-gateway-model-name].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_MODEL_HEADER", value_name = "NAME", value_parser = header_name)]
    pub ext_proc_model_header: Option<String>,

    /// Header, and metadata key, that carry the picked destination [default:
    /// x-gateway-destination-endpoint].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_DESTINATION_HEADER", value_name = "NAME", value_parser = header_name)]
    pub ext_proc_destination_header: Option<String>,

    /// Metadata namespace of the destination, and of the endpoint that answered [default:
    /// envoy.lb].
    #[arg(
        long,
        env = "SWITCHPOINT_EXT_PROC_DESTINATION_NAMESPACE",
        value_name = "NAME"
    )]
    pub ext_proc_destination_namespace: Option<String>,

    /// Metadata namespace of the subset hint [default: envoy.lb.subset_hint].
    #[arg(
        long,
        env = "SWITCHPOINT_EXT_PROC_SUBSET_NAMESPACE",
        value_name = "NAME"
    )]
    pub ext_proc_subset_namespace: Option<String>,

    /// Key of the subset hint in its namespace [default: x-gateway-destination-endpoint-subset].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_SUBSET_KEY", value_name = "NAME")]
    pub ext_proc_subset_key: Option<String>,

    /// Metadata namespace of the fairness id, for flow control [default: none].
    #[arg(
        long,
        env = "SWITCHPOINT_EXT_PROC_FAIRNESS_NAMESPACE",
        value_name = "NAME",
        requires = "ext_proc_fairness_key"
    )]
    pub ext_proc_fairness_namespace: Option<String>,

    /// Path of the fairness id in its namespace, with keys separated by /, such as jwt_payload/sub.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_FAIRNESS_KEY", value_name = "PATH")]
    pub ext_proc_fairness_key: Option<String>,

    /// Whether to trust the header with a request's fairness id [default: ignore].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_FAIRNESS_HEADER", value_enum)]
    pub ext_proc_fairness_header: Option<HeaderTrustArg>,

    /// Header by which a proxy in front names the authenticated client. The proxy must replace a
    /// header that the client sent [default: the fairness id, else the address].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_CLIENT_HEADER", value_name = "NAME", value_parser = header_name)]
    pub ext_proc_client_header: Option<String>,

    /// Secret of at least 16 characters from which each authenticated client gets a cache_salt, so
    /// that no client can find out what others have cached. Set the environment variable rather
    /// than the flag, so that the process list does not contain the secret [default: clients
    /// choose].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_CACHE_SALT_KEY", value_name = "SECRET", value_parser = secret, hide_env_values = true)]
    pub ext_proc_cache_salt_key: Option<String>,

    /// Whether to trust the SLO headers of requests [default: trust].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_SLO_HEADERS", value_enum)]
    pub ext_proc_slo_headers: Option<HeaderTrustArg>,

    /// Header by which a request can shorten its longest wait in flow control, in ms [default:
    /// none].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_TTL_HEADER", value_name = "NAME")]
    pub ext_proc_ttl_header: Option<String>,

    /// What to do with a request before the pool's first state has arrived: refuse the request, or
    /// let any endpoint serve it [default: close].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_FAILURE_MODE", value_enum)]
    pub ext_proc_failure_mode: Option<FailureModeArg>,

    /// How long a request may wait for the pool's first state. Set the gateway's `message_timeout`
    /// higher [default: 2s].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_COLD_START_WAIT", value_name = "DURATION", value_parser = duration)]
    pub ext_proc_cold_start_wait: Option<Duration>,

    /// Largest request body on an inference path, in bytes [default: 25165824].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_BODY_LIMIT_BYTES", value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1_024..=BODY_LIMIT_BYTES_MAX))]
    pub ext_proc_body_limit_bytes: Option<u32>,

    /// The longest time from the start of an attempt of a streamed request to its response headers
    /// [default: no limit].
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_PER_TRY_TIMEOUT", value_name = "DURATION", value_parser = duration)]
    pub ext_proc_per_try_timeout: Option<Duration>,

    /// If an attempt fails, do not retry it at the next ranked endpoint.
    #[arg(long, env = "SWITCHPOINT_EXT_PROC_NO_RETRY")]
    pub ext_proc_no_retry: bool,
}

/// Reads a secret that cannot be guessed, by the same rules as the filter's configuration.
fn secret(text: &str) -> Result<String, String> {
    if text.len() >= 16 {
        Ok(text.to_owned())
    } else {
        Err("at least 16 characters".to_owned())
    }
}

/// A body is one ext_proc message, and a message has at most 33 MiB
/// ([`::ext_proc::MESSAGE_BYTES_MAX`]).
const BODY_LIMIT_BYTES_MAX: i64 = 32 << 20;

/// What happens to a request before the first state has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FailureModeArg {
    /// The request is refused (503).
    Close,
    /// Any endpoint may serve the request.
    Open,
}

/// The format of the ranked list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DestinationFormatArg {
    /// The best endpoint, and the second one under x-gateway-destination-endpoint-fallback, as
    /// ORIGINAL_DST clusters expect.
    Single,
    /// The whole list, comma-separated, for clusters that try its endpoints in order
    /// (`override_host`).
    List,
}

/// Whether to trust a header that affects other clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HeaderTrustArg {
    /// Clients may set the header, so it has no effect.
    Ignore,
    /// A proxy in front of the gateway sets the header and removes the client's own.
    Trust,
}
