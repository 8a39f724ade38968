//! The shutdown signal of all tasks.

use tokio::sync::watch;

/// Sends the shutdown signal when pulled, or when dropped.
#[derive(Debug)]
pub struct ShutdownTrigger(watch::Sender<bool>);

/// Receives the shutdown signal.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<bool>);

/// Creates a trigger and a receiver of its signal.
#[must_use]
pub fn channel() -> (ShutdownTrigger, Shutdown) {
    let (sender, receiver) = watch::channel(false);
    (ShutdownTrigger(sender), Shutdown(receiver))
}

impl ShutdownTrigger {
    pub fn pull(&self) {
        self.0.send_replace(true);
    }
}

impl Shutdown {
    /// Waits for the signal. The call is cancel-safe.
    pub async fn begun(&mut self) {
        let _ = self.0.wait_for(|begun| *begun).await; // an error means a dropped trigger: shut down too
    }

    /// Returns a receiver that becomes true with the signal.
    #[must_use]
    pub fn receiver(&self) -> watch::Receiver<bool> {
        self.0.clone()
    }
}
