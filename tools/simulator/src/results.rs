//! Reads and writes files of results.

use std::path::Path;

use serde_json::Value;

/// Reads a file of results.
///
/// # Errors
/// Fails when the file cannot be read, or is not JSON.
pub(crate) fn read(file: &Path) -> Result<Value, String> {
    let text =
        std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))
}

/// Writes the file. Creates its folder if necessary.
///
/// # Errors
/// Fails when the file cannot be written.
pub(crate) fn write(file: &Path, value: &Value) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", file.display());
    file.parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .map_err(failed)?;
    std::fs::write(file, format!("{value:#}\n")).map_err(failed)
}
