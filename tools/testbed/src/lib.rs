//! The parts of tests, benchmarks and the demo: a real Envoy with the real filter, the real daemon,
//! and simulated model servers.
//!
//! [`stack::Stack`] starts all these parts for one test. The other modules can also be used alone.

pub mod broken_pools;
pub mod certificates;
pub mod client;
pub mod cuttable_link;
pub mod daemon;
pub mod drill;
pub mod engine_matrix;
pub mod engine_page;
pub mod envoy;
pub mod fleet;
pub mod front;
pub mod load;
pub mod model_server;
pub mod native;
pub mod plain_engine;
pub mod plain_pools;
pub mod ports;
pub mod process;
pub mod replay;
pub mod scorers;
pub mod second_envoy;
pub mod sessions;
mod shared_envoy;
pub mod stack;
pub mod trace;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// An error for the reader of a failing test. No code handles errors by kind.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Time between two checks of a condition.
const POLL: Duration = Duration::from_millis(10);

/// The root of the repository, to which the paths of shipped files are relative. The value of
/// `CARGO_MANIFEST_DIR` at run time has precedence over the value at compile time, because a copy
/// of the repository that shares a target folder has its own files.
pub fn root() -> PathBuf {
    let us = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    us.ancestors()
        .find(|folder| folder.join("envoy-config").is_dir())
        .map_or_else(PathBuf::new, Path::to_owned)
}

/// Evaluates a condition until it gives a value.
///
/// # Errors
/// Fails if the condition gives no value within `limit`. The error names `what`.
pub async fn wait_for<T, F: Future<Output = Option<T>>>(
    limit: Duration,
    what: &str,
    mut look: impl FnMut() -> F,
) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = look().await {
            return Ok(value);
        }
        if Instant::now() > end {
            return Err(format!("waited {limit:?} for {what}").into());
        }
        tokio::time::sleep(POLL).await;
    }
}
