//! `switchpointd migrate`, the former name of `switchpoint-migrate`: runs that program.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

const PROGRAM: &str = "switchpoint-migrate";

/// Replaces this process by the program `switchpoint-migrate`, beside the program of this process
/// or in PATH. Returns only if the program cannot be started, with the reason.
#[must_use]
pub fn run(arguments: Vec<OsString>) -> String {
    let beside = std::env::current_exe()
        .ok()
        .map(|file| file.with_file_name(PROGRAM))
        .filter(|file| file.is_file());
    let program = beside.unwrap_or_else(|| PathBuf::from(PROGRAM));
    let error = Command::new(program).args(arguments).exec();
    match error.kind() {
        ErrorKind::NotFound => format!(
            "{PROGRAM} is missing: put it beside switchpointd or into PATH; releases and the image of the daemon have it, `make build` builds it"
        ),
        _ => format!("cannot run {PROGRAM}: {error}"),
    }
}
