//! The signals that end the process.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// A receiver of signals, which works from its creation on. A signal that arrives while the daemon
/// starts is kept and handled later. Such a signal does not kill the process.
#[derive(Debug)]
pub struct SignalWatch {
    terminate: Signal,
    interrupt: Signal,
}

// === impl SignalWatch ===

impl SignalWatch {
    /// Begins to listen.
    ///
    /// # Errors
    /// Returns the error of the operating system if a handler cannot be installed.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for a signal and returns its name. The call is cancel-safe.
    pub async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
