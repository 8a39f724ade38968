//! What the leader publishes to the other proxies of a pool for all VMs of its process: the sum of
//! their load reports, and their placements.
//!
//! Only when the daemon has reported other proxies; then every few ms while anything changes.

use exchange::{ManagedPool, Timestamp};
use pool_state::{LoadReportHead, LoadReportSum};
use proto::{placements, state};

use super::load_sharing::LoadSharing;
use super::placement_ring::{PlacementRingReader, ReadBudget};
use crate::host::Host;

/// A report without changes is sent again after this long, ms: four times before it would expire.
const AGAIN_MS: u64 = proto::SHARE_EXPIRY_MS / 4;
/// Blocks of placements in one message, and one record more: 1.6 to 3 MB a second at most. Under more, rings run over before they are read, which is counted.
const BLOCKS_MAX: usize = 1_024;
/// After this long without a change, ms, there is no traffic.
const QUIET_MS: u64 = 1_000;
/// Tick period under traffic. Picks with load that is 10 ms old are nearly as good as with current
/// load; at 100 ms all proxies run to the same endpoint.
const BUSY_TICK_MS: u32 = 5;
/// Tick period without traffic: how late the first request of a burst is published.
const QUIET_TICK_MS: u32 = 10;
/// A stamp that comes back later than this, ms, is ignored: the daemon was away meanwhile.
const DELAY_MAX_MS: u64 = proto::SHARE_EXPIRY_MS;
/// One more measured delay has a weight of one in this many.
const DELAYS: u32 = 8;

/// The state for one pool.
#[derive(Debug, Default)]
pub struct PeerPublisher {
    /// Proxies of the pool, this one included; 0 before the daemon has reported it.
    proxies: u32,
    sum: LoadReportSum,
    /// How far the ring in each VM slot was published.
    published: Vec<PlacementRingReader>,
    row: Vec<u8>,
    sent_at: Timestamp,
    changed_at: Timestamp,
    looked_at: Timestamp,
    /// The stamp that came back last.
    received_at: u64,
    /// The age of others' reports on arrival here, and of ours on arrival there, µs: a recent mean.
    delay_us: u32,
}

// === impl PeerPublisher ===

impl PeerPublisher {
    /// The daemon sent a message. Returns the age of our oldest report by now, µs, when the message
    /// says that more was forwarded: it takes as long to the others as back to us.
    pub fn receive_peers(&mut self, peers: &state::PeerLoad, now: Timestamp) -> Option<u32> {
        self.proxies = peers.proxies;
        let stamp = std::mem::replace(&mut self.received_at, peers.stamp);
        let delay = now.us_since(Timestamp(peers.stamp));
        if peers.stamp == 0 || peers.stamp == stamp || delay > DELAY_MAX_MS * 1_000 {
            return None;
        }
        let delay = u32::try_from(delay).unwrap_or(u32::MAX);
        let mean = if self.delay_us == 0 { delay } else { self.delay_us };
        self.delay_us = mean.saturating_sub(mean / DELAYS).saturating_add(delay / DELAYS);
        Some(delay)
    }

    /// How old what others tell is when it comes, µs; 0 while nothing is known of that.
    #[must_use]
    pub fn delay_us(&self) -> u32 {
        self.delay_us
    }

    /// How often to look whether there is something to tell; `None` while there is nobody to tell.
    #[must_use]
    pub fn tick_ms(&self, now: Timestamp) -> Option<u32> {
        let busy = now.ms_since(self.changed_at) < QUIET_MS;
        self.has_peers().then_some(if busy { BUSY_TICK_MS } else { QUIET_TICK_MS })
    }

    /// Is there another proxy?
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.proxies > 1
    }

    /// The next report, if there is one; and how many segments of rings were lost since the last.
    pub fn next_report<H: Host>(
        &mut self,
        host: &H,
        pool: (&str, &ManagedPool),
        sharing: &LoadSharing,
        now: Timestamp,
    ) -> (Option<state::LoadReport>, u32) {
        let (name, pool) = pool;
        let Some(snapshot) = pool.snapshot().filter(|_| self.has_peers()) else { return (None, 0) };
        self.sum.reset(snapshot.endpoints().iter().map(|e| e.id).collect(), sharing.rows());
        pool.in_flight().rows().for_each(|(endpoint, load)| self.sum.add(endpoint, load));
        let looked_at = std::mem::replace(&mut self.looked_at, now);
        let mut row = self.sum.row(LoadReportHead::default(), sharing.rows(), pool.ejections());
        let (placements, lost) = self.placements(host, name, sharing);
        let changed = row != self.row;
        if changed || !placements.is_empty() {
            self.changed_at = now;
        }
        let idle = row.len() == LoadReportHead::BYTES;
        if !changed && placements.is_empty() && (idle || now.ms_since(self.sent_at) < AGAIN_MS) {
            return (None, lost);
        }
        self.sent_at = now;
        self.row.clone_from(&row);
        LoadReportHead { written: now, ..LoadReportHead::default() }.stamp(&mut row);
        // The oldest change is from right after the last reading; a report that is only repeated
        // has none.
        let stamp = if changed { looked_at.0 } else { 0 };
        (Some(state::LoadReport { pool: name.to_owned(), row, placements, stamp }), lost)
    }

    fn placements<H: Host>(&mut self, host: &H, pool: &str, sharing: &LoadSharing) -> (Vec<u8>, u32) {
        let (mut told, mut budget) = (Vec::new(), ReadBudget { blocks: BLOCKS_MAX, gaps: 0 });
        for (vm_slot, vm, end) in sharing.rings() {
            while self.published.len() <= usize::from(vm_slot) {
                self.published.push(PlacementRingReader::default());
            }
            if let Some(reader) = self.published.get_mut(usize::from(vm_slot)) {
                reader.read(host, (pool, vm_slot, vm), end, &mut budget, |record| {
                    if !record.new.is_empty() {
                        placements::push(&mut told, record.endpoint, record.new);
                    }
                    record.new.len()
                });
            }
        }
        (told, budget.gaps)
    }
}
