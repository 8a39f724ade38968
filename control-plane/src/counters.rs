//! What is counted: by the VMs of the proxies, as they report it, and by the daemon itself.

use proto::state;
use tokio::time::Instant;

/// All counters of the daemon.
#[derive(Debug, Default)]
pub struct Counters {
    rosters_refused: u64,
    eds_refused: u64,
}

// === impl Counters ===

impl Counters {
    /// A proxy refused a roster.
    pub fn roster_refused(&mut self) {
        self.rosters_refused += 1;
    }

    /// An Envoy refused an EDS response.
    pub fn eds_refused(&mut self) {
        self.eds_refused += 1;
    }

    /// A process reported what its VMs counted.
    pub fn report(&mut self, _process_id: u64, _report: &state::Report, _now: Instant) {}
}
