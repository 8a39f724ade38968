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
use pool_state::peers::take_peer_report;
use pool_state::{LoadReportHead, OwnLoadReport, PeerLoadReport, PeerReport};
use proto::shared_data::{RemotePeers, RingPosition};
use proto::{placements, state};

use super::placement_ring::{PlacementRingReader, PlacementRingWriter, ReadBudget};
use super::vm_table::VmTable;
use crate::host::{Host, WriteCondition};

/// A report that was not written for this long does not count: ten ticks. A VM with anything
/// outstanding writes at each tick, so a VM that trapped with open streams leaves nothing behind.
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

/// The state for one pool.
#[derive(Debug)]
pub struct LoadSharing {
    pool: Box<str>,
    own: PublishedLoad,
    /// By VM slot.
    peers: Vec<PeerVm>,
    /// The other proxies together, as the leader reports them.
    outside: PeerVm,
    /// How many others pick.
    picking: u64,
    read: ReadTimes,
    /// When a loss in a ring was last noticed.
    lost_at: Option<Timestamp>,
    /// Whether the sum of the others matches the reports last read and the current pool update.
    summed: bool,
}

/// What this VM publishes.
#[derive(Debug)]
struct PublishedLoad {
    /// This VM's slot, and the key of its report.
    place: Option<(u16, String)>,
    report: OwnLoadReport,
    ring: PlacementRingWriter,
    /// The count of the pool's changes that were published.
    changes: Option<u64>,
    ring_position: RingPosition,
}

/// When this VM last read; `None` before the first time.
#[derive(Debug, Default)]
struct ReadTimes {
    /// The reports of VMs that pick.
    reports: Option<Timestamp>,
    /// All other reports.
    slow_reports: Option<Timestamp>,
    /// The rings.
    rings: Option<Timestamp>,
}

/// Another VM.
#[derive(Debug)]
struct PeerVm {
    key: String,
    /// The token of the last write that was read.
    token: Option<u32>,
    report: PeerReport,
    /// Whether it picks, as far as known.
    serves: bool,
    ring: PlacementRingReader,
}

// === impl LoadSharing ===

impl LoadSharing {
    /// For `pool`, a name from the filter's configuration, so that keys are a fixed set.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        Self {
            pool: pool.into(),
            own: PublishedLoad {
                place: None,
                report: OwnLoadReport::default(),
                ring: PlacementRingWriter::new(pool),
                changes: None,
                ring_position: RingPosition::default(),
            },
            peers: Vec::new(),
            outside: PeerVm::new(format!("switchpoint/1/pool/{pool}/row/outside"), PeerReport::of_proxies()),
            picking: 0,
            read: ReadTimes::default(),
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
        let is_news = match self.own.changes {
            None => changes > 0,
            Some(published) => published != changes || (moment == SharingOccasion::Tick && !self.own.report.is_idle()),
        };
        if !is_news && self.own.ring_position == self.own.ring.position() {
            return;
        }
        self.set_vm_slot(me);
        let own = &mut self.own;
        for placement in pool.take_placements() {
            own.ring.append(host, placement.endpoint, &placement.blocks, placement.known);
        }
        own.ring.flush(host);
        if let Some((_, key)) = &own.place {
            let head = LoadReportHead { vm: me.vm, written: now, ring: own.ring.position().to_word() };
            // If the host refuses, the next change or tick publishes it.
            let is_published = host.share(key, pool.write_load_report(&mut own.report, head), WriteCondition::Any).is_ok();
            own.changes = is_published.then_some(changes).or(own.changes);
            own.ring_position = own.ring.position();
        }
    }

    /// Forwards the reports of the other proxies, with their age, to all VMs; [`Self::publish`]
    /// must follow. Only the leader calls it.
    pub fn forward_peers<H: Host>(&mut self, host: &H, me: VmContext<'_>, mut peers: state::PeerLoad, delay_us: u32, now: Timestamp) {
        let in_place_of_ring = RemotePeers::of_message(&peers, delay_us).to_word();
        if let Some(report) = take_peer_report(&mut peers, in_place_of_ring, now) {
            // If the host refuses, the report is sent again in a few ms.
            let _ = host.share(&self.outside.key, &report, WriteCondition::Any);
        }
        self.set_vm_slot(me);
        for (endpoint, blocks) in placements::each(&peers.placements) {
            // All of it counts as known: it came from other proxies and must not go back.
            self.own.ring.append(host, endpoint, &blocks, u32::MAX);
        }
        self.own.ring.flush(host);
    }

    /// Whether other processes or VMs pick whose placements do not arrive here: another proxy that
    /// has reported nothing for long while the daemon is silent too (its last metrics were received
    /// at `metrics_at`), or a VM in whose ring something was lost lately.
    #[must_use]
    pub fn are_peers_unreachable(&self, metrics_at: Option<Timestamp>, now: Timestamp) -> bool {
        let long_since = |at: Option<Timestamp>| at.is_none_or(|at| now.ms_since(at) >= proto::SHARE_EXPIRY_MS);
        let reported_at = self.outside.report().head().written;
        (self.remote_peers().proxies > 1 && long_since(metrics_at) && long_since(Some(reported_at))) || !long_since(self.lost_at)
    }

    /// The reports of the other VMs of this process, as last read.
    pub fn reports(&self) -> impl Iterator<Item = &PeerLoadReport> {
        self.peers.iter().map(PeerVm::report)
    }

    /// The ring positions of all VMs, this one included: VM slot, VM, position.
    pub fn rings(&self) -> impl Iterator<Item = (u16, u64, RingPosition)> + '_ {
        let ring = |(vm_slot, peer): (u16, &PeerVm)| (vm_slot, peer.report.writer(), peer.ring_position());
        let own = self.own.place.as_ref().map(|(vm_slot, _)| (*vm_slot, self.own.ring.vm(), self.own.ring.position()));
        (0_u16..).zip(&self.peers).filter(|(_, peer)| peer.report.is_from_writer()).map(ring).chain(own)
    }

    /// What is known about the other proxies.
    fn remote_peers(&self) -> RemotePeers {
        RemotePeers::of_word(self.outside.report().head().ring)
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
        let rings = due(self.read.rings, rings_ms.max(spread_ms)) && pool.prefixes().bytes() > 0;
        if rings || due(self.read.reports, rows_ms.max(spread_ms)) {
            self.read.reports = Some(now);
            // Without other proxies, only their return has to be noticed.
            let slow_ms = if self.remote_peers().proxies > 1 { SLOW_ROWS_MS } else { RINGS_AT_PICK_MS };
            let slow = rings || due(self.read.slow_reports, slow_ms) || !self.summed;
            if slow {
                self.read.slow_reports = Some(now);
            }
            self.receive_load_reports(host, me, pool, now, slow);
        }
        if rings { self.receive_placements(host, pool, now, moment) } else { 0 }
    }

    /// This VM shares nothing any more, or has no VM slot: no other VM counts here.
    #[cold]
    pub fn forget_peers(&mut self, pool: &mut ManagedPool) {
        if self.read.reports.take().is_some() {
            self.summed = false;
            pool.recount_load_reports([]);
            pool.estimate_peer_picks(0, 0, Timestamp(0));
            pool.set_peers_unreachable(false);
        }
    }

    /// Forgets when it last published and read, for measurements.
    #[cfg(feature = "drill")]
    pub fn reset(&mut self) {
        self.own.changes = None;
        (self.read.reports, self.read.rings) = (None, None);
    }

    fn set_vm_slot(&mut self, me: VmContext<'_>) {
        if self.own.place.as_ref().is_none_or(|(vm_slot, _)| *vm_slot != me.vm_slot) {
            self.own.place = Some((me.vm_slot, key(&self.pool, me.vm_slot)));
        }
        self.own.ring.set_vm_slot(me.vm, me.vm_slot);
    }

    /// Reads the reports of VMs that pick, and those of all others when that is due.
    fn receive_load_reports<H: Host>(&mut self, host: &H, me: VmContext<'_>, pool: &mut ManagedPool, now: Timestamp, slow: bool) {
        for peer in &mut self.peers {
            peer.report.set_writer(0);
        }
        self.picking = 0;
        for (vm_slot, row) in me.vm_table.alive(now).filter(|(_, row)| row.vm != me.vm) {
            while self.peers.len() <= usize::from(vm_slot) {
                let vm_slot = u16::try_from(self.peers.len()).unwrap_or(u16::MAX);
                self.peers.push(PeerVm::new(key(&self.pool, vm_slot), PeerReport::of_vm(ROW_EXPIRY_MS)));
            }
            self.picking = self.picking.saturating_add(u64::from(row.serves));
            if let Some(peer) = self.peers.get_mut(usize::from(vm_slot)) {
                peer.report.set_writer(row.vm);
                peer.serves = row.serves;
            }
        }
        let mut slos = false;
        for peer in self.peers.iter_mut().chain([&mut self.outside]) {
            slos |= peer.receive(host, pool, now, slow);
        }
        let outside = self.remote_peers();
        let stands_for = if self.outside.report.is_current(now) { outside.active } else { 0 };
        pool.estimate_peer_picks(stands_for, u64::from(outside.delay_us), now);
        let reports = self.peers.iter().chain([&self.outside]).map(PeerVm::report);
        if !std::mem::replace(&mut self.summed, true) {
            pool.recount_load_reports(reports);
        } else if slos {
            pool.recompute_peer_slos(reports);
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
            if peer.report.is_from_writer() {
                let end = peer.ring_position();
                all &= peer.ring.read(host, (&self.pool, vm_slot, peer.report.writer()), end, &mut budget, |record| {
                    pool.record_peer_placement(record.endpoint, record.blocks, now);
                    record.blocks.len()
                });
            }
        }
        if all {
            self.read.rings = Some(now);
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

// === impl PeerVm ===

impl PeerVm {
    fn new(key: String, report: PeerReport) -> Self {
        Self { key, token: None, report, serves: false, ring: PlacementRingReader::default() }
    }

    fn report(&self) -> &PeerLoadReport {
        self.report.report()
    }

    fn ring_position(&self) -> RingPosition {
        RingPosition::of_word(self.report().head().ring)
    }

    /// Reads the report if it was written since the last time; a slow one only when it is due.
    /// Returns whether SLOs must be computed again.
    fn receive<H: Host>(&mut self, host: &H, pool: &mut ManagedPool, now: Timestamp, slow: bool) -> bool {
        let writer = self.report.writer();
        let is_slow = writer == LoadReportHead::OUTSIDE || (!self.serves && self.token.is_some() && self.report().is_idle());
        let shared = if writer == 0 || (is_slow && !slow) { None } else { host.shared(&self.key).ok().flatten() };
        let mut slos = false;
        if let Some(shared) = shared.filter(|shared| self.token != Some(shared.token)) {
            self.token = Some(shared.token);
            slos = self.report.read(pool, shared.bytes, now);
        }
        self.report.count(pool, now) | slos
    }
}

#[cfg(test)]
mod tests;
