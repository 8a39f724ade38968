//! Publishes the load of all VMs of this process to the other proxies of a pool: the sum of the
//! VMs' load reports, and the VMs' placements. Only the leader does this.
//!
//! The leader publishes only if the daemon has reported other proxies, and then every few ms while
//! load or placements change.

use exchange::{ManagedPool, Timestamp};
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
/// The maximum age, in ms, at which a stamp (the time of a report, which the daemon returns) is
/// used. An older stamp is ignored, because the daemon was away.
const DELAY_MAX_MS: u64 = proto::SHARE_EXPIRY_MS;
/// The divisor that gives the weight of a new measurement in the mean delay: 1 / `DELAYS`.
const DELAYS: u32 = 8;

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

/// The delay between two proxies: the age of other proxies' reports when they arrive at this proxy.
/// This age is assumed to equal the age of this proxy's reports when they arrive at the other
/// proxies.
#[derive(Debug, Default)]
struct ReportDelay {
    /// The last stamp that the daemon returned.
    stamp: u64,
    /// A recent mean of the delay, in µs; 0 before the first measurement.
    mean_us: u32,
}

// === impl ReportDelay ===

impl ReportDelay {
    /// Handles a stamp that the daemon returned. A new stamp shows that the daemon forwarded a
    /// report of this process, and then this returns the delay of the oldest change in that report,
    /// in µs. The stamp is assumed to take as long to return as the report takes to reach the other
    /// proxies.
    fn receive(&mut self, stamp: u64, now: Timestamp) -> Option<u32> {
        let before = std::mem::replace(&mut self.stamp, stamp);
        let delay = now.us_since(Timestamp(stamp));
        if stamp == 0 || stamp == before || delay > DELAY_MAX_MS * 1_000 {
            return None;
        }
        let delay = u32::try_from(delay).unwrap_or(u32::MAX);
        let mean = if self.mean_us == 0 {
            delay
        } else {
            self.mean_us
        };
        self.mean_us = mean
            .saturating_sub(mean / DELAYS)
            .saturating_add(delay / DELAYS);
        Some(delay)
    }
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
        self.delay.mean_us
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
