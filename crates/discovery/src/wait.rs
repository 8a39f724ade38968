//! Waits until an optional time, and computes waits after errors.

use tokio::time::Instant;

/// Sleeps until this time, or forever if there is no time.
pub(crate) async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Returns the time to wait after this many errors in a row: from 250 ms, doubled up to 10 s. Half
/// of the wait is random, so that not all daemons connect again at the same time.
#[cfg(any(feature = "kubernetes", feature = "etcd"))]
pub(crate) fn wait_after(errors: u32) -> std::time::Duration {
    std::time::Duration::from_millis(250 << errors.min(16))
        .min(std::time::Duration::from_secs(10))
        .mul_f64(0.5 + crate::registry::chance() / 2.0)
}
