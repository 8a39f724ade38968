//! The log: to stderr, as text or JSON lines.

use std::io::IsTerminal;

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

/// The default level: messages of this project, and warnings of libraries.
const DIRECTIVES_DEFAULT: &str = "warn,control_plane=info,discovery=info";

/// Logging, to stderr.
#[derive(Debug, Args)]
#[command(next_help_heading = "Log, to stderr")]
pub struct LogArgs {
    /// The format of log lines.
    #[arg(long, env = "SWITCHPOINT_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// The level: error, warn, info, debug or trace, or directives as in RUST_LOG. If this option
    /// is not given, RUST_LOG is used.
    #[arg(long, env = "SWITCHPOINT_LOG_LEVEL", value_name = "LEVEL")]
    pub log_level: Option<String>,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Readable text.
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging for the rest of the process. If the level is invalid, reports this and uses the
/// default.
pub fn init(log: &LogArgs) {
    let LogArgs {
        log_format,
        log_level,
    } = log;
    let wanted = log_level
        .clone()
        .or_else(|| std::env::var("RUST_LOG").ok())
        .filter(|w| !w.is_empty());
    let (filter, bad) = match wanted.as_deref().map(EnvFilter::try_new) {
        None => (EnvFilter::new(DIRECTIVES_DEFAULT), None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (EnvFilter::new(DIRECTIVES_DEFAULT), Some(error)),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match log_format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    if let Some(error) = bad {
        tracing::warn!(%error, "log level is invalid; using {DIRECTIVES_DEFAULT}");
    }
}
