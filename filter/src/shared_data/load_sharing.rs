//! Load sharing: each VM publishes its load of a pool to the other VMs of its process, and reads
//! the loads of the other VMs, so that all VMs pick with the same state.
//!
//! ```text
//!  pick, first token, end, failure ──► own load report (and ring), at once
//!  pick ◄── reports of the others, at most every 2 ms ── rings of the others, at most every 10 ms
//! ```
//! A first token or the end of a response also triggers a reading, at shorter intervals, because no
//! request waits for this reading. So under traffic, most picks find that reports and rings were
//! just read.
//!
//! No VM is woken on the request path, because a wake-up costs up to 35 µs for each thread, while a
//! reading costs 0.7 µs for each VM. Load reports are better than proxy-wasm gauges, which are
//! atomics of the process. Reading two gauges for each of a hundred endpoints takes 15 µs, and a VM
//! that traps would leave its load in the gauges forever.

mod receive;

use exchange::{ManagedPool, Timestamp};
use pool_state::peers::{EncodedPlacements, take_peer_report};
use pool_state::{LoadReportHead, OwnLoadReport, PeerLoadReport, PeerReport, Placement};
use proto::shared_data::{RemotePeers, RingPosition};
use proto::state;
use scheduler::flow::QueuedInBand;

use super::placement_ring::PlacementRingWriter;
use super::vm_table::VmTable;
use crate::host::{Host, WriteCondition};
use receive::PeerVm;
pub use receive::ROW_EXPIRY_MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingOccasion {
    /// A request waits for the pick of its endpoint.
    Pick,
    /// A response passes or has ended; no request waits for a decision.
    End,
    /// A tick: no request waits.
    Tick,
    /// A held request is tried, so the reports of all VMs and proxies are read.
    Claim,
}

/// This VM's identity in the process.
#[derive(Clone, Copy, Debug)]
pub struct VmContext<'a> {
    /// The VM's random number.
    pub vm: u64,
    pub vm_slot: u16,
    pub vm_table: &'a VmTable,
}

/// The state of load sharing for one pool.
#[derive(Debug)]
pub struct LoadSharing {
    pool: Box<str>,
    own: PublishedLoad,
    /// The load reports and rings of the other VMs, by VM slot.
    peers: Vec<PeerVm>,
    /// The load of the other proxies together, in the report that the leader forwards.
    outside: PeerVm,
    /// The requests that the other proxies hold, and the key of these requests in shared data.
    outside_held: (Vec<QueuedInBand>, String),
    /// The number of other VMs that pick endpoints.
    picking: u64,
    read: ReadTimes,
    /// The time when this VM last noticed that ring segments were lost.
    lost_at: Option<Timestamp>,
    /// Whether the summed load is up to date with the reports last read and with the pool update.
    summed: bool,
}

#[derive(Debug)]
struct PublishedLoad {
    /// This VM's slot, and the key of this VM's report.
    place: Option<(u16, String)>,
    report: OwnLoadReport,
    ring: PlacementRingWriter,
    /// The pool's number of changes at the last publication.
    changes: Option<u64>,
    ring_position: RingPosition,
    /// Whether the report says that this VM holds requests (flow control).
    holds: bool,
}

/// The times when this VM last read the reports of other VMs; `None` before the first reading.
#[derive(Debug, Default)]
struct ReadTimes {
    /// The time of the last reading of the reports of VMs that pick endpoints.
    reports: Option<Timestamp>,
    /// The time of the last reading of all other reports.
    slow_reports: Option<Timestamp>,
    rings: Option<Timestamp>,
}

// === impl LoadSharing ===

impl LoadSharing {
    /// Creates the state for `pool`. Pool names come from the configuration, so the set of keys in
    /// shared data is fixed.
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
                holds: false,
            },
            peers: Vec::new(),
            outside: PeerVm::new(
                super::pool_key(pool, "row/outside"),
                PeerReport::of_proxies(),
            ),
            outside_held: (Vec::new(), super::pool_key(pool, "held/outside")),
            picking: 0,
            read: ReadTimes::default(),
            lost_at: None,
            summed: false,
        }
    }

    /// Records that a new pool update is in force, so the generations of endpoints may differ.
    pub fn pool_update_changed(&mut self) {
        self.summed = false;
    }

    /// Publishes this VM's changes since the last publication. At a tick, a VM that has load or
    /// holds requests also publishes an unchanged load, so that the load does not expire.
    pub fn publish<H: Host>(
        &mut self,
        host: &H,
        me: VmContext<'_>,
        pool: &mut ManagedPool,
        now: Timestamp,
        moment: SharingOccasion,
    ) {
        let changes = pool.changes();
        let holds = pool.queues().queued() > 0;
        let must_stay = moment == SharingOccasion::Tick && (holds || !self.own.report.is_idle());
        let is_news = match self.own.changes {
            None => changes > 0 || holds,
            Some(published) => published != changes || self.own.holds != holds || must_stay,
        };
        if !is_news && self.own.ring_position == self.own.ring.position() {
            return;
        }
        self.set_vm_slot(me);
        let own = &mut self.own;
        for placement in pool.take_placements() {
            let Placement {
                kind,
                endpoint,
                blocks,
                known,
            } = placement;
            own.ring.append(host, kind, endpoint, &blocks, known);
        }
        own.ring.flush(host);
        if let Some((_, key)) = &own.place {
            let head = LoadReportHead {
                vm: me.vm,
                written: now,
                ring: own.ring.position().to_marked_word(holds),
            };
            // If the host refuses the write, the next change or tick publishes the load again.
            let is_published = host
                .share(
                    key,
                    pool.write_load_report(&mut own.report, head),
                    WriteCondition::Any,
                )
                .is_ok();
            own.changes = is_published.then_some(changes).or(own.changes);
            own.ring_position = own.ring.position();
            own.holds = holds;
        }
    }

    /// Forwards the reports of the other proxies, with their age, to all VMs. Only the leader calls
    /// this function, and it must call [`Self::publish`] afterwards.
    pub fn forward_peers<H: Host>(
        &mut self,
        host: &H,
        me: VmContext<'_>,
        mut peers: state::PeerLoad,
        delay_us: u32,
        now: Timestamp,
    ) {
        let in_place_of_ring = RemotePeers::of_message(&peers, delay_us).to_word();
        if !peers.backlog.is_empty() {
            // The `ring` field of the report has a mark that makes readers read the backlog too.
            let _ = host.share(&self.outside_held.1, &peers.backlog, WriteCondition::Any);
        }
        if let Some(report) = take_peer_report(&mut peers, in_place_of_ring, now) {
            // If the host refuses the write, the daemon sends a newer report in a few ms.
            let _ = host.share(&self.outside.key, &report, WriteCondition::Any);
        }
        self.set_vm_slot(me);
        for (kind, endpoint, blocks) in EncodedPlacements::take(&mut peers).each() {
            // All blocks count as known, because they came from other proxies and must not be sent
            // back to these proxies.
            self.own
                .ring
                .append(host, kind, endpoint, &blocks, u32::MAX);
        }
        self.own.ring.flush(host);
    }

    /// Whether this VM lacks placements. This VM lacks placements if the other proxies and the
    /// daemon (last metrics at `metrics_at`) have been silent for long, or if ring segments were
    /// lost recently.
    #[must_use]
    pub fn are_peers_unreachable(&self, metrics_at: Option<Timestamp>, now: Timestamp) -> bool {
        self.alone_of(metrics_at, now) > 0
            || self.lost_at.is_some_and(|at| !is_long_since(Some(at), now))
    }

    /// Whether this VM has a load report of the other proxies that has not expired.
    pub fn knows_peers(&self, now: Timestamp) -> bool {
        self.outside.report.is_current(now)
    }

    /// Returns the last known number of proxies if neither the daemon nor the other proxies have
    /// sent anything for long; otherwise 0.
    pub fn alone_of(&self, metrics_at: Option<Timestamp>, now: Timestamp) -> u32 {
        let reported_at = self.outside.report().head().written;
        let proxies = self.remote_peers().proxies;
        if proxies > 1 && is_long_since(metrics_at, now) && is_long_since(Some(reported_at), now) {
            proxies
        } else {
            0
        }
    }

    /// Returns the load reports of the other VMs of this process, as last read.
    pub fn reports(&self) -> impl Iterator<Item = &PeerLoadReport> {
        self.peers.iter().map(PeerVm::report)
    }

    /// Returns the VM slot, the VM number and the ring position of each VM, including this VM.
    pub fn rings(&self) -> impl Iterator<Item = (u16, u64, RingPosition)> + '_ {
        let ring =
            |(vm_slot, peer): (u16, &PeerVm)| (vm_slot, peer.report.writer(), peer.ring_position());
        let own = self
            .own
            .place
            .as_ref()
            .map(|(vm_slot, _)| (*vm_slot, self.own.ring.vm(), self.own.ring.position()));
        (0_u16..)
            .zip(&self.peers)
            .filter(|(_, peer)| peer.report.is_from_writer())
            .map(ring)
            .chain(own)
    }

    /// Returns the state of the other proxies, as the last report of the other proxies has it.
    fn remote_peers(&self) -> RemotePeers {
        RemotePeers::of_word(self.outside.report().head().ring)
    }

    /// Drops the load of the other VMs, because this VM no longer shares, or has no VM slot.
    #[cold]
    pub fn forget_peers(&mut self, pool: &mut ManagedPool) {
        if self.read.reports.take().is_some() {
            self.summed = false;
            pool.recount_load_reports([]);
            pool.estimate_peer_picks(0, 0, Timestamp(0));
            pool.set_peers_unreachable(false);
            pool.queues_mut().set_peers(false, false);
            pool.queues_mut().set_alone(0);
        }
    }

    /// Resets the times of the last publication and reading, for measurements.
    #[cfg(feature = "drill")]
    pub fn reset(&mut self) {
        self.own.changes = None;
        self.read.reports = None;
        self.read.rings = None;
    }

    fn set_vm_slot(&mut self, me: VmContext<'_>) {
        if self
            .own
            .place
            .as_ref()
            .is_none_or(|(vm_slot, _)| *vm_slot != me.vm_slot)
        {
            self.own.place = Some((me.vm_slot, key(&self.pool, me.vm_slot)));
        }
        self.own.ring.set_vm_slot(me.vm, me.vm_slot);
    }
}

fn is_long_since(at: Option<Timestamp>, now: Timestamp) -> bool {
    at.is_none_or(|at| now.ms_since(at) >= proto::SHARE_EXPIRY_MS)
}

/// Returns the key of the report of the VM in `vm_slot`.
fn key(pool: &str, vm_slot: u16) -> String {
    super::slot_key(pool, "row", vm_slot)
}

#[cfg(test)]
mod tests;
