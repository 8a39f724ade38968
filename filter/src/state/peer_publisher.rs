//! What the VM that leads tells the other proxies of a pool, for all VMs of its process: their rows as one, and their placements.
//!
//! Only when the daemon said that there are others; then every few ms, as long as anything changes.

use exchange::{ManagedPool, Timestamp};
use pool_state::{LoadReportHead, LoadReportSum};
use proto::{placements, state};

use super::load_sharing::LoadSharing;
use super::placement_ring::{PlacementRingReader, ReadBudget};
use crate::host::Host;

/// A row in which nothing changed is told again after so long, in ms: four times before it would count no more.
const AGAIN_MS: u64 = proto::SHARE_EXPIRY_MS / 4;
/// Blocks of placements in one message, and one record more: 1.6 to 3 MB a second at most. Under more, rings run over before they are read, which is counted.
const BLOCKS_MAX: usize = 1_024;
/// After so long without a change, in ms, there is no traffic.
const QUIET_MS: u64 = 1_000;
/// Tick period while there is traffic. Load that is 10 ms old picks nearly as well as load of now; at 100 ms it makes all proxies run to the same
/// endpoint.
const BUSY_TICK_MS: u32 = 5;
/// Tick period while there is none: how late the first request of a burst is told.
const QUIET_TICK_MS: u32 = 10;
/// A stamp that comes back later than this, in ms, says nothing: the daemon was away meanwhile.
const DELAY_MAX_MS: u64 = proto::SHARE_EXPIRY_MS;
/// The weight of one more measured delay is one in so many.
const DELAYS: u32 = 8;

/// One pool's share of it.
#[derive(Debug, Default)]
pub struct PeerPublisher {
    /// Proxies of the pool, this one included; 0 while the daemon has not said.
    proxies: u32,
    sum: LoadReportSum,
    /// How far the ring at each VM slot was told.
    published: Vec<PlacementRingReader>,
    row: Vec<u8>,
    sent_at: Timestamp,
    changed_at: Timestamp,
    looked_at: Timestamp,
    /// The stamp that came back last.
    received_at: u64,
    /// What comes of others is so old, and what is told of here, where it comes, µs: a mean of late.
    delay_us: u32,
}

// === impl PeerPublisher ===

impl PeerPublisher {
    /// The daemon spoke. Returns how old the oldest of our news was by now, µs, when it says that something more has been passed on: to the others
    /// it takes as long as back to us.
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

    /// What is to be told now, if anything; and how many segments of rings were lost on the way.
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
        // The oldest news is of right after the last look; told again only because it stands, it is no news.
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
