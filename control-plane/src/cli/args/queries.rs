//! Options of `check` and `explain`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

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
    /// An EndpointPickerConfig, a file of objects as for --objects, or a file of Envoy or Envoy
    /// Gateway that asks the ext_proc server.
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
