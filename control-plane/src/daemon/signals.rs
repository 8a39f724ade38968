//! The signals that end the process.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Hears them from the moment it is made: one that comes while the daemon starts is kept until it can be obeyed, and kills nobody.
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
    /// Those of the operating system, which rules out that any can be heard.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for one; says which it was. Cancel-safe.
    pub async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
