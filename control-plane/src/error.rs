//! Errors that end the daemon.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;

/// Describes an error, for `map_err`.
pub fn error_text(error: impl Display) -> String {
    error.to_string()
}

/// The reason why the daemon could not start, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum FatalError {
    /// The command line, or a file that it names, is invalid. The operator must change it.
    #[error("{0}")]
    Usage(String),
    /// A listener could not be opened.
    #[error("cannot listen on {address} (--listen-{what}): {source}")]
    Listen {
        what: &'static str,
        address: SocketAddr,
        source: io::Error,
    },
    /// The snapshot file cannot be written, so the next start could not take a newer term.
    #[error("cannot write the snapshot file: {0}")]
    Snapshot(io::Error),
    /// Signal handlers cannot be installed.
    #[error("cannot listen for signals: {0}")]
    Signals(io::Error),
    /// The campaign for the lease ended, so this daemon could never lead again.
    #[error("the campaign for the lease ended unexpectedly")]
    CampaignEnded,
    /// A task ended that should run until shutdown.
    #[error("{0} ended unexpectedly")]
    TaskEnded(&'static str),
}
