//! The version and the commit of this build.

/// The version with the commit and its date, for example `0.1.0 (502c016, 2026-11-24)`, or `0.1.0
/// (unknown)`.
pub const VERSION: &str = env!("SWITCHPOINT_BUILD_VERSION");

/// The short hash of the commit, or `unknown`: in debug builds, and in builds without a repository
/// and without the environment variable `SWITCHPOINT_COMMIT`.
pub const COMMIT: &str = env!("SWITCHPOINT_BUILD_COMMIT");
