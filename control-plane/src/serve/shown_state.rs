//! The state that the pages for operators show.

use std::sync::Arc;

use ext_proc::ExtProcServer;

use crate::pool::discovery_source::DiscoverySetup;
use crate::scaling::ScalingSignals;
use crate::serve::explanations::ExplanationDesk;
use crate::state::shared::DaemonState;
use crate::state::snapshot_file::SnapshotFile;
use crate::state::traffic::TrafficRecorder;

/// The tables, and the data that only pages read. A page gets the parts that it shows.
#[derive(Clone, Debug)]
pub struct ShownState {
    pub shared: Arc<DaemonState>,
    /// The snapshot file, if there is one.
    pub snapshot: Option<Arc<SnapshotFile>>,
    pub discovery: Arc<DiscoverySetup>,
    pub signals: Arc<ScalingSignals>,
    pub traffic: Arc<TrafficRecorder>,
    /// The daemon's own ext_proc server, if it runs.
    pub ext_proc: Option<Arc<ExtProcServer>>,
    /// Computes explanations, one at a time.
    pub explanations: ExplanationDesk,
}

// === impl ShownState ===

impl ShownState {
    /// Returns whether the daemon has clients: proxies because it leads, or gateways by ext_proc.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.shared.life.leads() || self.ext_proc.is_some()
    }

    /// Returns when the snapshot file was written, in ms since the epoch, if it was.
    #[must_use]
    pub fn snapshot_written_unix_ms(&self) -> Option<u64> {
        let written = self.snapshot.as_ref()?.written_unix_ms();
        (written > 0).then_some(written)
    }
}
