//! One signal that all tasks hear: it is time to stop.

use tokio::sync::watch;

/// Tells all holders of its [`Shutdown`]s to stop, at the latest when dropped.
#[derive(Debug)]
pub struct ShutdownTrigger(watch::Sender<bool>);

/// Hears of it.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<bool>);

/// A trigger and its ear.
#[must_use]
pub fn channel() -> (ShutdownTrigger, Shutdown) {
    let (sender, receiver) = watch::channel(false);
    (ShutdownTrigger(sender), Shutdown(receiver))
}

impl ShutdownTrigger {
    /// Now.
    pub fn pull(&self) {
        self.0.send_replace(true);
    }
}

impl Shutdown {
    /// Waits until it is time. Cancel-safe.
    pub async fn begun(&mut self) {
        let _ = self.0.wait_for(|begun| *begun).await; // an error is a dropped trigger, which says the same
    }
}
