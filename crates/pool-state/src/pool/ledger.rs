//! One VM's requests in flight at the endpoints of a pool, its counters and its measurements.

use scheduler::Timestamp;
use scheduler::in_flight::{InFlight, PeerLoads};

use super::counters::PoolCounters;
use super::observation::ObservationQueue;

/// The requests of a pool, running and ended.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) in_flight: InFlight,
    pub(super) counters: PoolCounters,
    pub(super) observations: ObservationQueue,
    /// For each slot, the time when a first token last arrived.
    pub(super) first_tokens: Vec<Timestamp>,
    /// See [`super::ManagedPool::changes`].
    pub(super) changes: u64,
    /// How often the loads of other VMs and proxies changed.
    reports: u64,
}

// === impl Ledger ===

impl Ledger {
    /// A number that grows with every change of a load.
    pub(super) fn version(&self) -> u64 {
        self.changes + self.reports
    }

    /// The loads of other VMs and proxies, for updates.
    pub(super) fn others_mut(&mut self) -> &mut PeerLoads {
        self.reports += 1;
        self.in_flight.others_mut()
    }
}
