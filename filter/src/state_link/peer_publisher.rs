//! Publishes the load of all VMs of this process to the other proxies of a pool: the sum of the
//! VMs' load reports, and the VMs' placements. Only the leader does this.
//!
//! The leader publishes only if the daemon has reported other proxies, and then every few ms while
//! load or placements change.

use exchange::{ManagedPool, Timestamp};
use front::daemon_rules::ReportDelay;
use pool_state::peers::EncodedPlacements;
use pool_state::{LoadReportHead, LoadReportSum, ProxyPeers};
use proto::state;

use crate::host::Host;
use crate::shared_data::RingOwner;
use crate::shared_data::load_sharing::LoadSharing;
use crate::shared_data::placement_ring::{PlacementRingReader, ReadBudget};

/// The maximum number of blocks of placements in one message, which the last record may exceed.
/// This limit allows 1.6 to 3 MB per second. With more traffic, ring segments are overwritten
/// before the leader reads them, and count as lost.
const BLOCKS_MAX: usize = 1_024;
/// The time without a change after which traffic counts as stopped, in ms.
const QUIET_MS: u64 = 1_000;
/// The tick period under traffic, in ms. Picks with load that is 10 ms old are nearly as good as
/// picks with current load. With load that is 100 ms old, all proxies pick the same endpoint.
const BUSY_TICK_MS: u32 = 5;
/// The tick period without traffic, in ms: the longest delay until the first request in a burst is
/// published.
const QUIET_TICK_MS: u32 = 10;

#[derive(Debug, Default)]
pub struct PeerPublisher {
    peers: ProxyPeers,
    sum: LoadReportSum,
    /// The position up to which the ring in each VM slot was published.
    published: Vec<PlacementRingReader>,
    /// The report that was last sent, without its time.
    row: Vec<u8>,
    /// The held requests in the report that was last sent.
    held: Vec<u8>,
    changed_at: Timestamp,
    read_at: Timestamp,
    delay: ReportDelay,
}

// === impl PeerPublisher ===

impl PeerPublisher {
    /// Handles a message from the daemon. If the message shows that the daemon forwarded a report
    /// of this process, returns the delay of the oldest change in that report, in µs.
    pub fn receive_peers(&mut self, message: &state::PeerLoad, now: Timestamp) -> Option<u32> {
        self.peers.receive(message);
        self.delay.receive(message.stamp, now)
    }

    /// Returns the mean age of other proxies' reports on arrival, in µs; 0 before the first
    /// measurement.
    #[must_use]
    pub fn delay_us(&self) -> u32 {
        self.delay.mean_us()
    }

    /// Returns the tick period at which changes are published; `None` while the pool has no other
    /// proxy.
    #[must_use]
    pub fn tick_ms(&self, now: Timestamp) -> Option<u32> {
        let busy = now.ms_since(self.changed_at) < QUIET_MS;
        self.has_peers()
            .then_some(if busy { BUSY_TICK_MS } else { QUIET_TICK_MS })
    }

    /// Whether the pool has another proxy.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.peers.has_peers()
    }

    /// Returns the next report, if a report is due, and the number of ring segments lost since the
    /// last call.
    pub fn next_report<H: Host>(
        &mut self,
        host: &H,
        pool: (&str, &ManagedPool, Vec<u8>),
        sharing: &LoadSharing,
        now: Timestamp,
    ) -> (Option<state::LoadReport>, u32) {
        let (name, pool, held) = pool;
        let Some(snapshot) = pool.snapshot().filter(|_| self.has_peers()) else {
            return (None, 0);
        };
        self.sum.reset(
            snapshot.endpoints().iter().map(|e| e.id).collect(),
            sharing.reports(),
        );
        pool.in_flight()
            .rows()
            .for_each(|(endpoint, load)| self.sum.add(endpoint, load));
        let read_at = std::mem::replace(&mut self.read_at, now);
        let row = self.sum.row(
            LoadReportHead::default(),
            sharing.reports(),
            pool.ejections(),
        );
        let (encoded, lost) = self.placements(host, name, sharing);
        let is_changed = row != self.row || held != self.held;
        let is_news = is_changed || !encoded.is_empty();
        if is_news {
            self.changed_at = now;
        }
        if !self.peers.is_due(
            is_news,
            row.len() == LoadReportHead::BYTES && held.is_empty(),
            now,
        ) {
            return (None, lost);
        }
        self.row.clone_from(&row);
        self.held.clone_from(&held);
        // The stamp is the time of the last reading, because the oldest change may have happened
        // directly after it. A repeated report has no change, so it has no stamp.
        let stamp = if is_changed { read_at.0 } else { 0 };
        let mut report = state::LoadReport {
            pool: name.to_owned(),
            row,
            placements: encoded.placements,
            claims: encoded.claims,
            backlog: held,
            stamp,
        };
        self.peers.stamp(&mut report, now);
        (Some(report), lost)
    }

    fn placements<H: Host>(
        &mut self,
        host: &H,
        pool: &str,
        sharing: &LoadSharing,
    ) -> (EncodedPlacements, u32) {
        let mut encoded = EncodedPlacements::default();
        let mut budget = ReadBudget {
            blocks: BLOCKS_MAX,
            gaps: 0,
        };
        for (vm_slot, vm, end) in sharing.rings() {
            while self.published.len() <= usize::from(vm_slot) {
                self.published.push(PlacementRingReader::default());
            }
            if let Some(reader) = self.published.get_mut(usize::from(vm_slot)) {
                reader.read(
                    host,
                    RingOwner { pool, vm_slot, vm },
                    end,
                    &mut budget,
                    |record| {
                        encoded.append(record.kind, record.endpoint, record.new);
                        record.new.len()
                    },
                );
            }
        }
        (encoded, budget.gaps)
    }
}
