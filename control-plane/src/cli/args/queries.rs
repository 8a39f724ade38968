//! Options of `check`, and the output format.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Options of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// What to check.
    #[command(flatten)]
    pub what: CheckTarget,

    /// The engine of the server at --endpoint, as in its label llm-d.ai/engine-type. If not given,
    /// the engine is recognised by its metrics.
    #[arg(long, value_name = "NAME", requires = "endpoint")]
    pub engine: Option<String>,

    /// The output format: readable text, or one JSON object.
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

/// What to check: exactly one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct CheckTarget {
    /// An EndpointPickerConfig, a file of objects as for --objects, or the configuration of an
    /// Envoy or Envoy Gateway that calls the ext_proc server.
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
