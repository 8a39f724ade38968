//! Builds the filter module with a way to make its VMs trap, for drills that lose a VM.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::{Result, client, root};

/// A word in a daemon message that stops the leader VM for some seconds, once per process; see
/// `filter/src/drill.rs`.
pub const STALL: &str = "x-drill-stall";

/// A word that makes a VM trap. The VM reads it as the name of a request header or in a daemon
/// message; see `filter/src/drill.rs`.
pub const TRAP: &str = "x-drill-trap";

/// The request header by which a client asks the drill module for the cost of sharing per pick. The
/// value has the numbers of peers and endpoints: `peers/endpoints`.
pub const COST: &str = "x-drill-cost";

/// A counter of the drill module: the time spent in all VMs, in ns (see
/// `filter/src/drill/vm_time.rs`).
pub const VM_SPENT: &str = "switchpoint_drill_vm_ns";

/// A counter of the drill module: the calls that are not in [`VM_SPENT`] because the kernel
/// interrupted them.
pub const VM_INTERRUPTED: &str = "switchpoint_drill_vm_interrupted";

/// Whether a client lost a request with this error text because a VM trapped.
#[must_use]
pub fn is_of_a_trap(failure: &str) -> bool {
    client::is_broken_off(failure)
        || (failure.starts_with("503 ") && failure.contains("the endpoint picker failed; retry"))
}

/// Whether this line of Envoy's access log is of a request that was lost because a VM trapped.
#[must_use]
pub fn is_lost_to_a_trap(line: &Value) -> bool {
    line["details"] == "wasm_fail_stream"
}

/// Builds the drill module like the shipped module, from the same compiled dependencies. It is an
/// example, so its file is not the file of the shipped module. A second build is quick.
///
/// # Errors
/// Fails if the module does not compile.
pub fn module() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    BUILT
        .get_or_init(|| build().map_err(|error| error.to_string()))
        .clone()
        .map_err(Into::into)
}

/// Returns an edit of the shipped config that loads the drill module in place of the shipped
/// module.
///
/// # Errors
/// Fails if the module does not compile.
pub fn envoy_config() -> Result<impl Fn(&mut Value) + Send + 'static> {
    let module = module()?;
    Ok(move |config: &mut Value| {
        let path =
            "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
        let filters = config
            .pointer_mut(path)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten();
        for filter in filters.filter(|filter| filter["name"] == "switchpoint") {
            filter["typed_config"]["config"]["vm_config"]["code"] =
                json!({"local": {"filename": module}});
        }
    })
}

fn build() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["--config", "filter/module.toml", "build", "--locked"])
        .args(["-p", "filter", "--example", "drill", "--features", "drill"])
        .args(["--release", "--target", "wasm32-wasip1"])
        .current_dir(root());
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!(
            "the drill module does not compile: {}",
            String::from_utf8_lossy(&output.stderr)
        )
        .into());
    }
    Ok(root().join("target/wasm32-wasip1/release/examples/drill.wasm"))
}
