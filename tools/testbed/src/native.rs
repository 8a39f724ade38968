//! The picker as a native module of Envoy, built with the calling program.

use std::path::PathBuf;

use crate::Result;

/// The file of the module.
const FILE: &str = "libswitchpoint_native.so";

/// Returns the folder of the module, which is a folder above the calling program.
///
/// # Errors
/// Fails if the module was not built.
pub fn folder() -> Result<PathBuf> {
    let us = std::env::current_exe()?;
    us.ancestors()
        .skip(1)
        .take(2)
        .find(|folder| folder.join(FILE).is_file())
        .map(PathBuf::from)
        .ok_or_else(|| format!("{FILE} is not built: cargo build -p filter-native").into())
}
