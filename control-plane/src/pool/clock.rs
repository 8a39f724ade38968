//! One point in time on two clocks.

use std::time::SystemTime;

use tokio::time::Instant;

/// One point in time on both clocks. Durations use the monotonic clock, and reports use the wall
/// clock.
#[derive(Clone, Copy, Debug)]
pub struct WallAndMonotonic {
    pub instant: Instant,
    /// The wall clock, for reports and files.
    pub wall: SystemTime,
}

// === impl WallAndMonotonic ===

impl WallAndMonotonic {
    #[must_use]
    pub fn read() -> Self {
        Self {
            instant: Instant::now(),
            wall: SystemTime::now(),
        }
    }
}
