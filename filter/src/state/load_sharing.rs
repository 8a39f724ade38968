//! What this VM tells the other VMs of a pool, and what it hears of them: all of a process pick as one.
//!
//! ```text
//!  pick, first token, end, failure ──► own row (and ring), at once
//!  pick ◄── rows of the others, at most every 2 ms ── rings of the others, at most every 10 ms
//! ```
//! Responses that bring news (a first token, an end) look too, and sooner, when nobody waits: where there is traffic, a pick mostly finds both read a moment ago.
//!
//! Nobody is woken on the request path: that costs up to 35 µs a thread, a look costs 0.7 µs a VM. Rows are preferred over gauges, which are
//! atomics of the process: a hundred endpoints with two numbers each are 15 µs of gauges to read, and a VM that traps would leave its share
//! in them for ever.

use exchange::{ManagedPool, Timestamp};
use pool_state::{Ejection, LoadReportHead, OwnLoadReport, PeerLoadReport};
use proto::{placements, state};

use super::placement_ring::{PlacementRingReader, PlacementRingWriter, ReadBudget, RingPosition};
use super::vm_table::VmTable;
use crate::host::{Host, WriteCondition};

/// A row that was not written again for this long counts nothing: ten ticks, at each of which a VM that has anything outstanding writes. So a
/// VM that trapped with streams open leaves nothing behind.
pub const ROW_EXPIRY_MS: u64 = 1_000;
/// At a pick rows of others are read anew when the last look is so long ago, in ms ...
const ROWS_MS: u64 = 2;
/// ... and when nobody waits for it, sooner.
const ROWS_AT_END_MS: u64 = 1;
/// ... but no more than so many a millisecond, in a process of more than 64 workers: a row costs 1 to 2 µs, so that looks never take more than a
/// twentieth of a worker. With 192 workers the last look is 6 ms old, with 511 it is 15.
const ROWS_A_MS: u64 = 32;
/// Rows of those that do not pick, and of all other proxies together: no more often than the daemon tells.
const SLOW_ROWS_MS: u64 = 5;
/// At a pick rings are read when the last look is so long ago, in ms ...
const RINGS_AT_PICK_MS: u64 = 10;
/// ... and at the end of a request, when nobody waits for it, sooner.
const RINGS_AT_END_MS: u64 = 5;
/// Blocks taken in at a pick: up to 50 µs. What is left comes with the next look.
const BLOCKS_AT_PICK: usize = 2_048;
/// Blocks taken in at the end of a request: up to 0.2 ms.
const BLOCKS_AT_END: usize = 8_192;
/// Blocks taken in at a tick: up to 2 ms, when a VM has just begun and reads what all others have in their rings.
const BLOCKS_AT_TICK: usize = 65_536;

/// When something is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingOccasion {
    /// A request waits for its decision.
    Pick,
    /// A response goes by, or has ended: nobody waits for a decision.
    End,
    /// Nobody waits.
    Tick,
}

/// This VM among the others.
#[derive(Clone, Copy, Debug)]
pub struct VmContext<'a> {
    /// Its identity.
    pub vm: u64,
    /// Its VM slot.
    pub vm_slot: u16,
    /// All VMs.
    pub vm_table: &'a VmTable,
}

/// What the row of all other proxies says of them in place of a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RemotePeers {
    /// Proxies of the pool, this one included.
    proxies: u32,
    /// How many others have told anything of late.
    active: u32,
    /// How old what they tell is when it comes, µs.
    delay_us: u32,
}

/// One pool's share of it.
#[derive(Debug)]
pub struct LoadSharing {
    pool: Box<str>,
    /// The VM slot this VM writes at, and the key of its row.
    own: Option<(u16, String)>,
    /// By VM slot.
    peers: Vec<PeerVm>,
    /// The other proxies together, by the word of the VM that leads.
    outside: PeerVm,
    ring: PlacementRingWriter,
    published_ring: RingPosition,
    row: OwnLoadReport,
    /// The pool's changes that were told, and when.
    published: Option<(u64, Timestamp)>,
    /// How many others pick.
    picking: u64,
    rows_at: Option<Timestamp>,
    slow_rows_at: Option<Timestamp>,
    rings_at: Option<Timestamp>,
    /// When something of a ring was last found to be lost.
    lost_at: Option<Timestamp>,
    /// Is the sum of the others that of the rows last seen, and of the pool update in force?
    summed: bool,
}

/// Another VM.
#[derive(Debug)]
struct PeerVm {
    key: String,
    /// Of the last write seen.
    token: Option<u32>,
    row: PeerLoadReport,
    /// Who has the VM slot; 0 when nobody does.
    vm: u64,
    /// Does it pick, as far as it is known?
    serves: bool,
    expiry_ms: u64,
    ring: PlacementRingReader,
}

// === impl LoadSharing ===

impl LoadSharing {
    /// Of `pool`, which is a name from the filter's configuration: a fixed set.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        Self {
            pool: pool.into(),
            own: None,
            peers: Vec::new(),
            outside: PeerVm {
                vm: LoadReportHead::OUTSIDE,
                expiry_ms: proto::SHARE_EXPIRY_MS,
                ..PeerVm::new(format!("switchpoint/1/pool/{pool}/row/outside"))
            },
            ring: PlacementRingWriter::new(pool),
            published_ring: RingPosition::default(),
            row: OwnLoadReport::default(),
            published: None,
            picking: 0,
            rows_at: None,
            slow_rows_at: None,
            rings_at: None,
            lost_at: None,
            summed: false,
        }
    }

    /// Another pool update is in force: other lives of endpoints count.
    pub fn pool_update_changed(&mut self) {
        self.summed = false;
    }

    /// Tells the others what changed here since the last time. At a tick also what did not, so that it goes on to count.
    pub fn publish<H: Host>(&mut self, host: &H, me: VmContext<'_>, pool: &mut ManagedPool, now: Timestamp, moment: SharingOccasion) {
        let changes = pool.changes();
        let news = match self.published {
            None => changes > 0,
            Some((told, _)) => told != changes || (moment == SharingOccasion::Tick && !self.row.is_idle()),
        };
        if !news && self.published_ring == self.ring.position() {
            return;
        }
        self.set_vm_slot(me);
        for placement in pool.take_placements() {
            self.ring.append(host, placement.endpoint, &placement.blocks, placement.known);
        }
        self.ring.flush(host);
        if let Some((_, key)) = &self.own {
            let head = LoadReportHead { vm: me.vm, written: now, ring: self.ring.position().to_word() };
            // What the host does not take is told with the next change, or the next tick.
            let told = host.share(key, pool.write_load_report(&mut self.row, head), WriteCondition::Any).is_ok();
            self.published = told.then_some((changes, now)).or(self.published);
            self.published_ring = self.ring.position();
        }
    }

    /// Passes on to all VMs what the other proxies told, and after how long it comes; [`Self::publish`] must follow. Only the VM that leads does.
    pub fn forward_peers<H: Host>(&mut self, host: &H, me: VmContext<'_>, peers: state::PeerLoad, delay_us: u32, now: Timestamp) {
        let mut row = peers.row;
        let outside = RemotePeers { proxies: peers.proxies, active: peers.active, delay_us };
        // In place of a ring.
        if (LoadReportHead { vm: LoadReportHead::OUTSIDE, written: now, ring: outside.to_word() }).receive(&mut row) {
            // One that is not taken is told again in a few ms.
            let _ = host.share(&self.outside.key, &row, WriteCondition::Any);
        }
        self.set_vm_slot(me);
        for (endpoint, blocks) in placements::each(&peers.placements) {
            // All of it known: it came from outside and does not go there again.
            self.ring.append(host, endpoint, &blocks, u32::MAX);
        }
        self.ring.flush(host);
    }

    /// Do others pick whose placements are not known here? Another proxy, and long ago it was when it told anything, and when the daemon told of
    /// endpoints, which was last at `heard`; or whoever wrote a ring of which something was lost of late.
    #[must_use]
    pub fn are_peers_unreachable(&self, heard: Option<Timestamp>, now: Timestamp) -> bool {
        let long_since = |at: Option<Timestamp>| at.is_none_or(|at| now.ms_since(at) >= proto::SHARE_EXPIRY_MS);
        let told = self.outside.row.head().written;
        (self.remote_peers().proxies > 1 && long_since(heard) && long_since(Some(told))) || !long_since(self.lost_at)
    }

    /// The rows of the other VMs of this process, as last read.
    pub fn rows(&self) -> impl Iterator<Item = &PeerLoadReport> {
        self.peers.iter().map(|peer| &peer.row)
    }

    /// How far the rings of all VMs are, this one's too: the VM slot, the VM, the position.
    pub fn rings(&self) -> impl Iterator<Item = (u16, u64, RingPosition)> + '_ {
        let ring = |(vm_slot, peer): (u16, &PeerVm)| (vm_slot, peer.vm, RingPosition::of_word(peer.row.head().ring));
        let own = self.own.as_ref().map(|(vm_slot, _)| (*vm_slot, self.ring.vm(), self.ring.position()));
        (0_u16..).zip(&self.peers).filter(|(_, peer)| peer.has_vm_slot()).map(ring).chain(own)
    }

    /// What is known of the other proxies.
    fn remote_peers(&self) -> RemotePeers {
        RemotePeers::of_word(self.outside.row.head().ring)
    }

    /// Takes in what the others told, as far as it is due. Returns how much of their rings was lost.
    pub fn receive<H: Host>(
        &mut self,
        host: &H,
        me: VmContext<'_>,
        pool: &mut ManagedPool,
        now: Timestamp,
        moment: SharingOccasion,
    ) -> u32 {
        let due = |at: Option<Timestamp>, ms: u64| moment == SharingOccasion::Tick || at.is_none_or(|at| now.ms_since(at) >= ms);
        let spread_ms = self.picking / ROWS_A_MS;
        let (rows_ms, rings_ms) =
            if moment == SharingOccasion::Pick { (ROWS_MS, RINGS_AT_PICK_MS) } else { (ROWS_AT_END_MS, RINGS_AT_END_MS) };
        let rings = due(self.rings_at, rings_ms.max(spread_ms)) && pool.prefixes().bytes() > 0;
        if rings || due(self.rows_at, rows_ms.max(spread_ms)) {
            self.rows_at = Some(now);
            // With nobody outside, only the end of that is to be noticed.
            let slow_ms = if self.remote_peers().proxies > 1 { SLOW_ROWS_MS } else { RINGS_AT_PICK_MS };
            let slow = rings || due(self.slow_rows_at, slow_ms) || !self.summed;
            if slow {
                self.slow_rows_at = Some(now);
            }
            self.receive_load_reports(host, me, pool, now, slow);
        }
        if rings { self.receive_placements(host, pool, now, moment) } else { 0 }
    }

    /// This VM shares nothing any more, or has no VM slot: nobody else counts here.
    #[cold]
    pub fn forget_peers(&mut self, pool: &mut ManagedPool) {
        if self.rows_at.take().is_some() {
            self.summed = false;
            pool.recount_load_reports([]);
            pool.estimate_peer_picks(0, 0, Timestamp(0));
            pool.set_peers_unreachable(false);
        }
    }

    /// As if nothing had been told or heard for long, for measurements.
    #[cfg(feature = "drill")]
    pub fn reset(&mut self) {
        (self.published, self.rows_at, self.slow_rows_at, self.rings_at) = (None, None, self.slow_rows_at, None);
    }

    fn set_vm_slot(&mut self, me: VmContext<'_>) {
        if self.own.as_ref().is_none_or(|(vm_slot, _)| *vm_slot != me.vm_slot) {
            self.own = Some((me.vm_slot, key(&self.pool, me.vm_slot)));
        }
        self.ring.sit(me.vm, me.vm_slot);
    }

    /// Reads the rows of those that pick; of all others too, when that is due.
    fn receive_load_reports<H: Host>(&mut self, host: &H, me: VmContext<'_>, pool: &mut ManagedPool, now: Timestamp, slow: bool) {
        for peer in &mut self.peers {
            peer.vm = 0;
        }
        self.picking = 0;
        for (vm_slot, row) in me.vm_table.alive(now).filter(|(_, row)| row.vm != me.vm) {
            while self.peers.len() <= usize::from(vm_slot) {
                let vm_slot = u16::try_from(self.peers.len()).unwrap_or(u16::MAX);
                self.peers.push(PeerVm::new(key(&self.pool, vm_slot)));
            }
            self.picking = self.picking.saturating_add(u64::from(row.serves));
            if let Some(peer) = self.peers.get_mut(usize::from(vm_slot)) {
                (peer.vm, peer.serves) = (row.vm, row.serves);
            }
        }
        let mut slos = false;
        for peer in self.peers.iter_mut().chain([&mut self.outside]) {
            slos |= peer.receive(host, pool, now, slow);
        }
        let outside = self.remote_peers();
        let stands_for = if self.outside.counts(now) { outside.active } else { 0 };
        pool.estimate_peer_picks(stands_for, u64::from(outside.delay_us), now);
        let rows = self.peers.iter().chain([&self.outside]).map(|peer| &peer.row);
        if !std::mem::replace(&mut self.summed, true) {
            pool.recount_load_reports(rows);
        } else if slos {
            pool.recompute_peer_slos(rows);
        }
    }

    fn receive_placements<H: Host>(&mut self, host: &H, pool: &mut ManagedPool, now: Timestamp, moment: SharingOccasion) -> u32 {
        let blocks = match moment {
            SharingOccasion::Pick => BLOCKS_AT_PICK,
            SharingOccasion::End => BLOCKS_AT_END,
            SharingOccasion::Tick => BLOCKS_AT_TICK,
        };
        let (mut budget, mut all) = (ReadBudget { blocks, gaps: 0 }, true);
        for (vm_slot, peer) in (0_u16..).zip(&mut self.peers) {
            if peer.has_vm_slot() {
                let end = RingPosition::of_word(peer.row.head().ring);
                all &= peer.ring.read(host, (&self.pool, vm_slot, peer.vm), end, &mut budget, |record| {
                    pool.record_peer_placement(record.endpoint, record.blocks, now);
                    record.blocks.len()
                });
            }
        }
        if all {
            self.rings_at = Some(now);
        }
        if budget.gaps > 0 {
            self.lost_at = Some(now);
        }
        budget.gaps
    }
}

/// Where the row of the VM at `vm_slot` is.
fn key(pool: &str, vm_slot: u16) -> String {
    format!("switchpoint/1/pool/{pool}/row/{vm_slot}")
}

// === impl RemotePeers ===

impl RemotePeers {
    fn to_word(self) -> u64 {
        let short = |count: u32| u64::from(count.min(0xffff));
        short(self.proxies) | short(self.active) << 16 | u64::from(self.delay_us) << 32
    }

    fn of_word(word: u64) -> Self {
        let [a, b, c, d, delay @ ..] = word.to_le_bytes();
        let short = |bytes| u32::from(u16::from_le_bytes(bytes));
        Self { proxies: short([a, b]), active: short([c, d]), delay_us: u32::from_le_bytes(delay) }
    }
}

// === impl PeerVm ===

impl PeerVm {
    fn new(key: String) -> Self {
        Self {
            key,
            token: None,
            row: PeerLoadReport::default(),
            vm: 0,
            serves: false,
            expiry_ms: ROW_EXPIRY_MS,
            ring: PlacementRingReader::default(),
        }
    }

    /// Is the row that of the VM that has the VM slot?
    fn has_vm_slot(&self) -> bool {
        self.vm != 0 && self.row.head().vm == self.vm
    }

    fn counts(&self, now: Timestamp) -> bool {
        self.has_vm_slot() && now.ms_since(self.row.head().written) < self.expiry_ms
    }

    /// Takes in the row if it was written since the last look; of one that has little to say, when it is its turn. Says whether SLOs are to be put
    /// together anew.
    fn receive<H: Host>(&mut self, host: &H, pool: &mut ManagedPool, now: Timestamp, slow: bool) -> bool {
        let little = self.vm == LoadReportHead::OUTSIDE || (!self.serves && self.token.is_some() && self.row.is_idle());
        let shared = if self.vm == 0 || (little && !slow) { None } else { host.shared(&self.key).ok().flatten() };
        let mut slos = false;
        if let Some(shared) = shared.filter(|shared| self.token != Some(shared.token)) {
            self.token = Some(shared.token);
            let counts = self.row.counts();
            slos = pool.read_load_report(&mut self.row, shared.bytes, counts);
            if self.has_vm_slot() {
                let outside = self.vm == LoadReportHead::OUTSIDE;
                self.row.ejections().for_each(|told| pool.learn_ejection(Ejection { outside: told.outside || outside, ..told }, now));
            }
        }
        let counts = self.counts(now);
        pool.count_load_report(&mut self.row, counts) | slos
    }
}

#[cfg(test)]
mod tests;
