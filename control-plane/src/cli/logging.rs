//! The log: to stderr, as text or JSON lines.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::cli::args::{LogArgs, LogFormat};

/// What is logged when nobody says: our own news, others' warnings.
const DIRECTIVES_DEFAULT: &str = "warn,control_plane=info,discovery=info";

/// Starts logging, for the rest of the process. A level that cannot be read is reported and the default used: no reason not to serve.
pub fn init(log: &LogArgs) {
    let LogArgs { log_format, log_level } = log;
    let wanted = log_level.clone().or_else(|| std::env::var("RUST_LOG").ok()).filter(|w| !w.is_empty());
    let (filter, bad) = match wanted.as_deref().map(EnvFilter::try_new) {
        None => (EnvFilter::new(DIRECTIVES_DEFAULT), None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (EnvFilter::new(DIRECTIVES_DEFAULT), Some(error)),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match log_format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    if let Some(error) = bad {
        tracing::warn!(%error, "log level not understood; using {DIRECTIVES_DEFAULT}");
    }
}
