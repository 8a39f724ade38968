//! Reads the load reports and placements of the other VMs and of the other proxies.

use exchange::{ManagedPool, Timestamp};
use pool_state::{LoadReportHead, PeerLoadReport, PeerReport};
use proto::backlog;
use proto::shared_data::RingPosition;

use super::{LoadSharing, SharingOccasion, VmContext, key};
use crate::host::Host;
use crate::shared_data::RingOwner;
use crate::shared_data::placement_ring::{PlacementRingReader, ReadBudget};

/// The time after which a report expires if its VM has not written it again, in ms (ten ticks). A
/// VM with load writes its report at each tick, so only the load of a VM that trapped with open
/// streams expires.
pub const ROW_EXPIRY_MS: u64 = 1_000;
/// The minimum interval between two readings of the other VMs' reports at picks, in ms.
pub(super) const ROWS_MS: u64 = 2;
/// The minimum interval between two readings of the other VMs' reports at the end of requests, in
/// ms. The interval is shorter than at a pick, because no request waits.
const ROWS_AT_END_MS: u64 = 1;
/// The maximum number of reports that a VM reads per millisecond, which matters beyond 64 workers.
/// A report costs 1 to 2 µs, so reading takes at most a twentieth of a worker's time. With 192
/// workers the last reading is up to 6 ms old, and with 511 workers up to 15 ms.
pub(super) const ROWS_A_MS: u64 = 32;
/// The minimum interval between two readings of the reports of VMs that do not pick, and of the
/// report of all other proxies together, in ms. The daemon does not send the load of other proxies
/// more often.
pub(super) const SLOW_ROWS_MS: u64 = 5;
/// The minimum interval between two readings of the VMs' placement rings at picks, in ms.
pub(super) const RINGS_AT_PICK_MS: u64 = 10;
/// The minimum interval between two readings of the placement rings at the end of requests, in ms.
/// The interval is shorter than at a pick, because no request waits.
const RINGS_AT_END_MS: u64 = 5;
/// The maximum number of prompt blocks read from rings at a pick, which takes up to 50 µs. The next
/// reading reads the rest.
const BLOCKS_AT_PICK: usize = 2_048;
/// The maximum number of blocks read at the end of a request, which takes up to 0.2 ms.
const BLOCKS_AT_END: usize = 8_192;
/// The maximum number of blocks read at a tick. Reading them takes up to 2 ms in a VM that has just
/// started and reads the rings of all other VMs.
pub(super) const BLOCKS_AT_TICK: usize = 65_536;

/// The choice of the reports that are read in addition to the reports of VMs that pick.
#[derive(Clone, Copy, Debug)]
struct SlowReports {
    /// The reports of VMs that do not pick.
    idle: bool,
    /// The report of all other proxies together.
    outside: bool,
}

/// The data that this VM has read from one other VM.
#[derive(Debug)]
pub(super) struct PeerVm {
    pub(super) key: String,
    /// The token of the last write of the report that this VM has read.
    token: Option<u32>,
    pub(super) report: PeerReport,
    /// Whether this VM knows that the other VM picks endpoints.
    serves: bool,
    ring: PlacementRingReader,
}

// === impl LoadSharing ===

impl LoadSharing {
    /// Reads the reports and rings of the other VMs whose next reading is due. Returns the number
    /// of ring segments that were lost.
    pub fn receive<H: Host>(
        &mut self,
        host: &H,
        me: VmContext<'_>,
        pool: &mut ManagedPool,
        now: Timestamp,
        moment: SharingOccasion,
    ) -> u32 {
        let due = |at: Option<Timestamp>, ms: u64| {
            moment == SharingOccasion::Tick || at.is_none_or(|at| now.ms_since(at) >= ms)
        };
        let spread_ms = self.picking / ROWS_A_MS;
        let (rows_ms, rings_ms) = if moment == SharingOccasion::End {
            (ROWS_AT_END_MS, RINGS_AT_END_MS)
        } else {
            (ROWS_MS, RINGS_AT_PICK_MS)
        };
        let rings = due(self.read.rings, rings_ms.max(spread_ms)) && pool.prefixes().bytes() > 0;
        if rings
            || moment == SharingOccasion::Claim
            || due(self.read.reports, rows_ms.max(spread_ms))
        {
            self.read.reports = Some(now);
            // Without other proxies, a reading only has to notice the first other proxy, so
            // readings are rarer.
            let slow_ms = if self.remote_peers().proxies > 1 {
                SLOW_ROWS_MS
            } else {
                RINGS_AT_PICK_MS
            };
            let slow = rings || due(self.read.slow_reports, slow_ms) || !self.summed;
            if slow {
                self.read.slow_reports = Some(now);
            }
            let claims = moment == SharingOccasion::Claim;
            let outside = slow || (claims && self.remote_peers().proxies > 1);
            self.receive_load_reports(
                host,
                me,
                pool,
                now,
                SlowReports {
                    idle: slow || claims,
                    outside,
                },
            );
        }
        if rings {
            self.receive_placements(host, pool, now, moment)
        } else {
            0
        }
    }

    /// Reads the reports of VMs that pick, and the reports that `slow` selects.
    fn receive_load_reports<H: Host>(
        &mut self,
        host: &H,
        me: VmContext<'_>,
        pool: &mut ManagedPool,
        now: Timestamp,
        slow: SlowReports,
    ) {
        for peer in &mut self.peers {
            peer.report.set_writer(0);
        }
        self.picking = 0;
        for (vm_slot, row) in me.vm_table.alive(now).filter(|(_, row)| row.vm != me.vm) {
            while self.peers.len() <= usize::from(vm_slot) {
                let vm_slot = u16::try_from(self.peers.len()).unwrap_or(u16::MAX);
                self.peers.push(PeerVm::new(
                    key(&self.pool, vm_slot),
                    PeerReport::of_vm(ROW_EXPIRY_MS),
                ));
            }
            self.picking = self.picking.saturating_add(u64::from(row.serves));
            if let Some(peer) = self.peers.get_mut(usize::from(vm_slot)) {
                peer.report.set_writer(row.vm);
                peer.serves = row.serves;
            }
        }
        let mut slos = false;
        let read_before = self.outside.token;
        for peer in &mut self.peers {
            slos |= peer.receive(host, pool, now, slow.idle);
        }
        slos |= self.outside.receive(host, pool, now, slow.outside);
        let is_news = self.outside.token != read_before;
        self.receive_backlog(host, pool, is_news, now);
        let holds = |peer: &PeerVm| {
            peer.report.is_current(now) && RingPosition::is_marked(peer.report().head().ring)
        };
        pool.queues_mut().set_peers(
            self.picking > 0 || self.remote_peers().proxies > 1,
            self.peers.iter().any(holds),
        );
        let outside = self.remote_peers();
        let proxies = if self.outside.report.is_current(now) {
            outside.active
        } else {
            0
        };
        pool.estimate_peer_picks(proxies, u64::from(outside.delay_us), now);
        let reports = self.peers.iter().chain([&self.outside]).map(PeerVm::report);
        if !std::mem::replace(&mut self.summed, true) {
            pool.recount_load_reports(reports);
        } else if slos {
            pool.recompute_peer_slos(reports);
        }
    }

    /// Reads the requests that the other proxies hold.
    fn receive_backlog<H: Host>(
        &mut self,
        host: &H,
        pool: &mut ManagedPool,
        is_news: bool,
        now: Timestamp,
    ) {
        let outside = self.remote_peers();
        let (bands, key) = &mut self.outside_held;
        if !outside.holds || !self.outside.report.is_current(now) {
            if bands.is_empty() {
                return;
            }
            bands.clear();
        } else if is_news {
            *bands = host
                .shared(key)
                .ok()
                .flatten()
                .map_or_else(Vec::new, |shared| backlog::read(&shared.bytes));
        }
        let running = pool.in_flight().outside_requests();
        pool.queues_mut()
            .set_outside(bands, running, u64::from(outside.delay_us));
    }

    fn receive_placements<H: Host>(
        &mut self,
        host: &H,
        pool: &mut ManagedPool,
        now: Timestamp,
        moment: SharingOccasion,
    ) -> u32 {
        let blocks = match moment {
            SharingOccasion::Pick | SharingOccasion::Claim => BLOCKS_AT_PICK,
            SharingOccasion::End => BLOCKS_AT_END,
            SharingOccasion::Tick => BLOCKS_AT_TICK,
        };
        let mut budget = ReadBudget { blocks, gaps: 0 };
        let mut all = true;
        for (vm_slot, peer) in (0_u16..).zip(&mut self.peers) {
            if peer.report.is_from_writer() {
                let end = peer.ring_position();
                all &= peer.ring.read(
                    host,
                    RingOwner {
                        pool: &self.pool,
                        vm_slot,
                        vm: peer.report.writer(),
                    },
                    end,
                    &mut budget,
                    |record| {
                        pool.record_peer_placement(
                            record.kind,
                            record.endpoint,
                            record.blocks,
                            now,
                        );
                        record.blocks.len()
                    },
                );
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

// === impl PeerVm ===

impl PeerVm {
    pub(super) fn new(key: String, report: PeerReport) -> Self {
        Self {
            key,
            token: None,
            report,
            serves: false,
            ring: PlacementRingReader::default(),
        }
    }

    pub(super) fn report(&self) -> &PeerLoadReport {
        self.report.report()
    }

    pub(super) fn ring_position(&self) -> RingPosition {
        RingPosition::of_word(self.report().head().ring)
    }

    /// Reads the report of the other VM if it was written since the last reading. Reads the report
    /// of a VM that does not pick only if `slow` is set. Returns whether the SLOs of the sum must
    /// be computed again.
    fn receive<H: Host>(
        &mut self,
        host: &H,
        pool: &mut ManagedPool,
        now: Timestamp,
        slow: bool,
    ) -> bool {
        let writer = self.report.writer();
        let is_slow = writer == LoadReportHead::OUTSIDE
            || (!self.serves && self.token.is_some() && self.report().is_idle());
        let shared = if writer == 0 || (is_slow && !slow) {
            None
        } else {
            host.shared(&self.key).ok().flatten()
        };
        let mut slos = false;
        if let Some(shared) = shared.filter(|shared| self.token != Some(shared.token)) {
            self.token = Some(shared.token);
            slos = self.report.read(pool, shared.bytes, now);
        }
        self.report.count(pool, now) | slos
    }
}
