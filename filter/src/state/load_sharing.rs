//! What this VM publishes to the other VMs of a process about a pool, and reads from them, so that
//! all of them pick with the same state.
//!
//! ```text
//!  pick, first token, end, failure ──► own load report (and ring), at once
//!  pick ◄── reports of the others, at most every 2 ms ── rings of the others, at most every 10 ms
//! ```
//! Responses with news (a first token, an end) read too, and sooner, because no request waits for
//! them: under traffic a pick mostly finds both read a moment ago.
//!
//! No VM is woken on the request path: that costs up to 35 µs a thread, while reading costs 0.7 µs
//! a VM. Reports are better than gauges, which are atomics of the process: a hundred endpoints with
//! two numbers each cost 15 µs to read as gauges, and a VM that traps would leave its share in them
//! for ever.

use exchange::{ManagedPool, Timestamp};
use pool_state::{Ejection, LoadReportHead, OwnLoadReport, PeerLoadReport};
use proto::{placements, state};

use super::placement_ring::{PlacementRingReader, PlacementRingWriter, ReadBudget, RingPosition};
use super::vm_table::VmTable;
use crate::host::{Host, WriteCondition};

/// A report that was not written for this long does not count: ten ticks, at each of which a VM
/// with anything outstanding writes. So a VM that trapped with open streams leaves nothing behind.
pub const ROW_EXPIRY_MS: u64 = 1_000;
/// At a pick, reports of others are read again if the last reading is this old, ms ...
const ROWS_MS: u64 = 2;
/// ... and sooner when no request waits for it.
const ROWS_AT_END_MS: u64 = 1;
/// ... but no more than this many per millisecond, in a process of more than 64 workers: a report
/// costs 1 to 2 µs, so reading never takes more than a twentieth of a worker. With 192 workers the
/// last reading is 6 ms old, with 511 it is 15.
const ROWS_A_MS: u64 = 32;
/// Reports of VMs that do not pick, and of all other proxies together, are read no more often than
/// the daemon sends them.
const SLOW_ROWS_MS: u64 = 5;
/// At a pick rings are read when the last look is so long ago, in ms ...
const RINGS_AT_PICK_MS: u64 = 10;
/// ... and sooner at the end of a request, when no request waits for it.
const RINGS_AT_END_MS: u64 = 5;
/// Blocks read at a pick: up to 50 µs. The next reading takes the rest.
const BLOCKS_AT_PICK: usize = 2_048;
/// Blocks taken in at the end of a request: up to 0.2 ms.
const BLOCKS_AT_END: usize = 8_192;
/// Blocks read at a tick: up to 2 ms, when a VM has just started and reads the rings of all others.
const BLOCKS_AT_TICK: usize = 65_536;

/// When something is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingOccasion {
    /// A request waits for its decision.
    Pick,
    /// A response passes or has ended: no decision waits.
    End,
    /// No request waits.
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

/// What the report of all other proxies says in place of a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RemotePeers {
    /// Proxies of the pool, this one included.
    proxies: u32,
    /// How many other proxies reported lately.
    active: u32,
    /// The age of their reports on arrival, µs.
    delay_us: u32,
}

/// The state for one pool.
#[derive(Debug)]
pub struct LoadSharing {
    pool: Box<str>,
    /// This VM's slot, and the key of its report.
    own: Option<(u16, String)>,
    /// By VM slot.
    peers: Vec<PeerVm>,
    /// The other proxies together, as the leader reports them.
    outside: PeerVm,
    ring: PlacementRingWriter,
    published_ring: RingPosition,
    row: OwnLoadReport,
    /// The count of the pool's changes that were published, and when.
    published: Option<(u64, Timestamp)>,
    /// How many others pick.
    picking: u64,
    rows_at: Option<Timestamp>,
    slow_rows_at: Option<Timestamp>,
    rings_at: Option<Timestamp>,
    /// When a loss in a ring was last noticed.
    lost_at: Option<Timestamp>,
    /// Whether the sum of the others matches the reports last read and the current pool update.
    summed: bool,
}

/// Another VM.
#[derive(Debug)]
struct PeerVm {
    key: String,
    /// The token of the last write that was read.
    token: Option<u32>,
    row: PeerLoadReport,
    /// The VM in the slot; 0 if none.
    vm: u64,
    /// Whether it picks, as far as known.
    serves: bool,
    expiry_ms: u64,
    ring: PlacementRingReader,
}

// === impl LoadSharing ===

impl LoadSharing {
    /// For `pool`, a name from the filter's configuration, so that keys are a fixed set.
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

    /// Another pool update is in force: other generations of endpoints count.
    pub fn pool_update_changed(&mut self) {
        self.summed = false;
    }

    /// Publishes what changed here since the last time; at a tick also what did not change, so that
    /// it keeps counting.
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
            // If the host refuses, the next change or tick publishes it.
            let told = host.share(key, pool.write_load_report(&mut self.row, head), WriteCondition::Any).is_ok();
            self.published = told.then_some((changes, now)).or(self.published);
            self.published_ring = self.ring.position();
        }
    }

    /// Forwards the reports of the other proxies, with their age, to all VMs; [`Self::publish`]
    /// must follow. Only the leader calls it.
    pub fn forward_peers<H: Host>(&mut self, host: &H, me: VmContext<'_>, peers: state::PeerLoad, delay_us: u32, now: Timestamp) {
        let mut row = peers.row;
        let outside = RemotePeers { proxies: peers.proxies, active: peers.active, delay_us };
        // In place of a ring.
        if (LoadReportHead { vm: LoadReportHead::OUTSIDE, written: now, ring: outside.to_word() }).receive(&mut row) {
            // If the host refuses, the report is sent again in a few ms.
            let _ = host.share(&self.outside.key, &row, WriteCondition::Any);
        }
        self.set_vm_slot(me);
        for (endpoint, blocks) in placements::each(&peers.placements) {
            // All of it counts as known: it came from other proxies and must not go back.
            self.ring.append(host, endpoint, &blocks, u32::MAX);
        }
        self.ring.flush(host);
    }

    /// Whether other processes or VMs pick whose placements do not arrive here: another proxy that
    /// has reported nothing for long while the daemon is silent too (its last message was at
    /// `heard`), or a VM in whose ring something was lost lately.
    #[must_use]
    pub fn are_peers_unreachable(&self, heard: Option<Timestamp>, now: Timestamp) -> bool {
        let long_since = |at: Option<Timestamp>| at.is_none_or(|at| now.ms_since(at) >= proto::SHARE_EXPIRY_MS);
        let told = self.outside.row.head().written;
        (self.remote_peers().proxies > 1 && long_since(heard) && long_since(Some(told))) || !long_since(self.lost_at)
    }

    /// The reports of the other VMs of this process, as last read.
    pub fn rows(&self) -> impl Iterator<Item = &PeerLoadReport> {
        self.peers.iter().map(|peer| &peer.row)
    }

    /// The ring positions of all VMs, this one included: VM slot, VM, position.
    pub fn rings(&self) -> impl Iterator<Item = (u16, u64, RingPosition)> + '_ {
        let ring = |(vm_slot, peer): (u16, &PeerVm)| (vm_slot, peer.vm, RingPosition::of_word(peer.row.head().ring));
        let own = self.own.as_ref().map(|(vm_slot, _)| (*vm_slot, self.ring.vm(), self.ring.position()));
        (0_u16..).zip(&self.peers).filter(|(_, peer)| peer.has_vm_slot()).map(ring).chain(own)
    }

    /// What is known about the other proxies.
    fn remote_peers(&self) -> RemotePeers {
        RemotePeers::of_word(self.outside.row.head().ring)
    }

    /// Reads what the others published, as far as it is due. Returns how much of their rings was
    /// lost.
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
            // Without other proxies, only their return has to be noticed.
            let slow_ms = if self.remote_peers().proxies > 1 { SLOW_ROWS_MS } else { RINGS_AT_PICK_MS };
            let slow = rings || due(self.slow_rows_at, slow_ms) || !self.summed;
            if slow {
                self.slow_rows_at = Some(now);
            }
            self.receive_load_reports(host, me, pool, now, slow);
        }
        if rings { self.receive_placements(host, pool, now, moment) } else { 0 }
    }

    /// This VM shares nothing any more, or has no VM slot: no other VM counts here.
    #[cold]
    pub fn forget_peers(&mut self, pool: &mut ManagedPool) {
        if self.rows_at.take().is_some() {
            self.summed = false;
            pool.recount_load_reports([]);
            pool.estimate_peer_picks(0, 0, Timestamp(0));
            pool.set_peers_unreachable(false);
        }
    }

    /// Forgets when it last published and read, for measurements.
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

    /// Reads the reports of VMs that pick, and those of all others when that is due.
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

/// The key of the report of the VM in `vm_slot`.
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

    /// Whether the report is from the VM in the slot.
    fn has_vm_slot(&self) -> bool {
        self.vm != 0 && self.row.head().vm == self.vm
    }

    fn counts(&self, now: Timestamp) -> bool {
        self.has_vm_slot() && now.ms_since(self.row.head().written) < self.expiry_ms
    }

    /// Reads the report if it was written since the last time; a slow one only when it is due.
    /// Returns whether SLOs must be computed again.
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
