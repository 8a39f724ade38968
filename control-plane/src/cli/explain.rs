//! Explains a pick: why a request goes to an endpoint.
//!
//! The daemon answers (`POST /debug/explain`) with the same exchange and scheduler as its proxies;
//! the command sends the question and prints the answer. The daemon does not have the prefix index
//! of the proxies. So it explains a fresh request as if no endpoint had cached its prompt, and the
//! answer says so. A decision record contains the cached prefixes of its decision.

mod answer;
mod table;

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};

pub use self::answer::answer;
use self::table::table;
use crate::cli::args::OutputFormat;
use crate::scrape::http_client::{self, cause};

/// The largest question, in bytes: a request with the largest body that proxies take, escaped as
/// JSON.
pub const QUESTION_BYTES_MAX: usize = 64 << 20;

/// The longest answer, in bytes. The daemon refuses to give a longer one, because a part of the
/// answer would mislead.
pub const ANSWER_BYTES_MAX: usize = exchange::explain::REASONS_BYTES_MAX;

/// The maximum time that the daemon may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// The caller of a computation, which stops when the caller no longer waits.
#[derive(Debug)]
pub struct WaitingCaller(Weak<()>);

/// A question to the daemon: the body of `POST /debug/explain`.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExplainRequest {
    /// The pool of the request; required if the daemon has several pools.
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,

    /// The body of a request, or a decision record.
    #[arg(skip)]
    pub request: String,

    /// Path of the request, which determines its API.
    #[arg(long, value_name = "PATH", default_value = "/v1/chat/completions")]
    pub path: String,

    /// A header of the request; may be repeated.
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    pub headers: Vec<(String, String)>,

    /// The subset hint that a gateway would send: addresses, comma-separated.
    #[arg(long, value_name = "IP:PORT,...")]
    pub subset: Option<String>,

    /// Explain as if this endpoint did not exist. May be repeated.
    #[arg(long, value_name = "IP:PORT")]
    pub without: Vec<String>,

    /// Text of an EndpointPickerConfig to use instead of the configuration in force.
    #[arg(skip)]
    pub config: Option<String>,
}

/// Options of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The daemon's admin listener.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    pub admin: String,

    /// A file with the admin listener's token, if the daemon runs with --admin-token-file.
    #[arg(long, env = "SWITCHPOINT_ADMIN_TOKEN_FILE", value_name = "FILE")]
    pub admin_token_file: Option<PathBuf>,

    /// A file with the request's body, or with a decision record.
    #[arg(long = "request", value_name = "FILE")]
    pub file: PathBuf,

    /// The other options of the request to explain: pool, path, headers, subset hint, endpoints to
    /// leave out.
    #[command(flatten)]
    pub question: ExplainRequest,

    /// Explain with this EndpointPickerConfig instead of the current one.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// The output format: readable text, or one JSON object.
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

// === impl WaitingCaller ===

impl WaitingCaller {
    /// Returns a caller that waits until the first value is dropped.
    #[must_use]
    pub fn pair() -> (Arc<()>, Self) {
        let waits = Arc::new(());
        let caller = Self(Arc::downgrade(&waits));
        (waits, caller)
    }

    /// Checks that the caller still waits.
    ///
    /// # Errors
    /// Fails if the caller no longer waits.
    pub fn check(&self) -> Result<(), String> {
        if self.0.strong_count() == 0 {
            return Err("no client waits for the answer any more".to_owned());
        }
        Ok(())
    }
}

/// Checks that an answer of `bytes` bytes is not longer than [`ANSWER_BYTES_MAX`].
///
/// # Errors
/// Fails if the answer is longer.
pub fn check_answer(bytes: usize) -> Result<(), String> {
    if bytes > ANSWER_BYTES_MAX {
        return Err(format!(
            "the answer is longer than {} MiB; leave out endpoints (`without`), or shorten the names of plugins",
            ANSWER_BYTES_MAX >> 20
        ));
    }
    Ok(())
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("a header is NAME: VALUE")?;
    Ok((name.trim().to_ascii_lowercase(), value.trim().to_owned()))
}

/// Sends the question and returns the text to print.
///
/// # Errors
/// Fails if a file cannot be read, or the daemon refuses the question or cannot be reached.
pub async fn ask(args: ExplainArgs) -> Result<String, String> {
    let read = |path: &PathBuf| {
        let mut text = String::new();
        File::open(path)
            .and_then(|file| {
                file.take(QUESTION_BYTES_MAX as u64)
                    .read_to_string(&mut text)
            })
            .map_err(|e| format!("{}: {e}", path.display()))?;
        Ok::<_, String>(text)
    };
    let question = ExplainRequest {
        request: read(&args.file)?,
        config: args.config.as_ref().map(read).transpose()?,
        ..args.question
    };
    let base = if args.admin.contains("://") {
        args.admin.clone()
    } else {
        format!("http://{}", args.admin)
    };
    let url = format!("{}/debug/explain", base.trim_end_matches('/'));
    let client = http_client::build(|| reqwest::Client::builder().no_proxy().timeout(ANSWER_MAX))
        .map_err(|e| e.to_string())?;
    let mut request = client.post(&url).json(&question);
    if let Some(token) = &args.admin_token_file {
        request = request.bearer_auth(read(token)?.trim());
    }
    let response = request
        .send()
        .await
        .map_err(|e| format!("{url}: {}", cause(&e)))?;
    let status = response.status();
    let text = response
        .text()
        .await
        .map_err(|e| format!("{url}: {}", cause(&e)))?;
    if !status.is_success() {
        return Err(format!("{url}: {}", text.trim()));
    }
    match args.format {
        OutputFormat::Json => Ok(text + "\n"),
        OutputFormat::Text => serde_json::from_str(&text)
            .map(|answer| table(&answer))
            .map_err(|e| format!("{url}: {e}")),
    }
}
