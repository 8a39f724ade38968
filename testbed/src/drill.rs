//! The picker's module with a way to make it trap: how drills lose a VM for real.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::{Result, client, root};

/// The word that stops the VM that leads for some seconds when the daemon says it, once in a process; see `filter/src/drill.rs`.
pub const STALL: &str = "x-drill-stall";

/// The word that kills the VM that reads it, as a request header's name or in what the daemon says; see `filter/src/drill.rs`.
pub const TRAP: &str = "x-drill-trap";

/// The request header that asks for what sharing costs a pick; its value is `peers/endpoints`.
pub const COST: &str = "x-drill-cost";

/// Did a client, by its own words, lose this request to a VM that trapped?
#[must_use]
pub fn is_of_a_trap(failure: &str) -> bool {
    client::is_broken_off(failure) || (failure.starts_with("503 ") && failure.contains("the endpoint picker failed; retry"))
}

/// Was this line of Envoy's access log lost to one?
#[must_use]
pub fn is_lost_to_a_trap(line: &Value) -> bool {
    line["details"] == "wasm_fail_stream"
}

/// Builds the module as the shipped one is, into a target folder of its own: nothing shipped is ever made from it. Quick when done before.
///
/// # Errors
/// If it does not compile.
pub fn module() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    BUILT.get_or_init(|| build().map_err(|error| error.to_string())).clone().map_err(Into::into)
}

/// An edit of the shipped config that runs this module in place of the shipped one.
///
/// # Errors
/// If it does not compile.
pub fn envoy_config() -> Result<impl Fn(&mut Value) + Send + 'static> {
    let module = module()?;
    Ok(move |config: &mut Value| {
        let path = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
        let filters = config.pointer_mut(path).and_then(Value::as_array_mut).into_iter().flatten();
        for filter in filters.filter(|filter| filter["name"] == "switchpoint") {
            filter["typed_config"]["config"]["vm_config"]["code"] = json!({"local": {"filename": module}});
        }
    })
}

fn build() -> Result<PathBuf> {
    let folder = root().join("target/drill");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["--config", "filter/module.toml", "rustc", "--locked", "--lib", "--crate-type", "cdylib", "-p", "filter"]);
    command.args(["--release", "--features", "drill", "--target", "wasm32-wasip1"]).arg("--target-dir").arg(&folder).current_dir(root());
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!("the drill module does not compile: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(folder.join("wasm32-wasip1/release/switchpoint.wasm"))
}
