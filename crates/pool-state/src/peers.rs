//! Shares a pool's load and placements (which prompts went where) with the other proxies, through
//! the daemon.
//!
//! ```text
//!  own load, new placements ── ProxyPeers ──► LoadReport ──► daemon
//!  pool ◄── PeerReport ◄── PeerLoad ◄── daemon
//! ```
//! A process with one VM uses [`LocalPeer`]. The filter uses the other types of this module,
//! because its VMs also read each other's reports, and one VM reports for all.

use proto::load_report::LoadReportHead;
use proto::placements::PlacementKind;
use proto::{SHARE_EXPIRY_MS, placements, state};
use scheduler::{EndpointRef, Timestamp};

use crate::pool::{Ejection, ManagedPool, OwnLoadReport, PeerLoadReport, Placement, peer_kind};

/// The interval at which an unchanged report is repeated, in ms: a quarter of the time after which
/// a report expires.
const REPEAT_MS: u64 = SHARE_EXPIRY_MS / 4;

/// The load report of one other VM, or of all other proxies together, as read into a pool.
#[derive(Debug)]
pub struct PeerReport {
    report: PeerLoadReport,
    /// The VM whose report is used; 0 for none.
    writer: u64,
    expiry_ms: u64,
}

/// The number of proxies of a pool, and the time of this process's last report to them.
#[derive(Debug, Default)]
pub struct ProxyPeers {
    /// The number of the pool's proxies, including this one; 0 before the daemon has sent the
    /// number.
    proxies: u32,
    sent_at: Timestamp,
}

/// A process with one VM, as one of the proxies of a pool.
#[derive(Debug)]
pub struct LocalPeer {
    joined: bool,
    peers: ProxyPeers,
    own: OwnLoadReport,
    /// The value of [`ManagedPool::changes`] at the last published report.
    published: u64,
    others: PeerReport,
}

/// Takes the load report of all other proxies out of a message. Converts its times to the local
/// clock, and writes `ring` into its head. `None` if the report is invalid.
#[must_use]
pub fn take_peer_report(
    message: &mut state::PeerLoad,
    ring: u64,
    now: Timestamp,
) -> Option<Vec<u8>> {
    let mut report = std::mem::take(&mut message.row);
    LoadReportHead {
        vm: LoadReportHead::OUTSIDE,
        written: now,
        ring,
    }
    .receive(&mut report)
    .then_some(report)
}

/// The placements in a message to or from the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedPlacements {
    /// The confirmed placements.
    pub placements: Vec<u8>,
    /// The placements of all other kinds, such as unconfirmed and withdrawn ones.
    pub claims: Vec<u8>,
}

// === impl EncodedPlacements ===

impl EncodedPlacements {
    /// Appends a placement, unless `new` is empty. `new` has those blocks of the prompt that the
    /// endpoint did not have cached.
    pub fn append(&mut self, kind: PlacementKind, endpoint: EndpointRef, new: &[u64]) {
        if new.is_empty() {
            return;
        }
        let to = match kind {
            PlacementKind::Confirmed => &mut self.placements,
            _ => &mut self.claims,
        };
        placements::push_claim(to, kind, endpoint, new);
    }

    /// The length of all placements, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.placements.len().saturating_add(self.claims.len())
    }

    /// Appends the placements of a later message.
    pub fn extend(&mut self, later: &Self) {
        self.placements.extend_from_slice(&later.placements);
        self.claims.extend_from_slice(&later.claims);
    }

    /// Whether there are no placements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.placements.is_empty() && self.claims.is_empty()
    }

    /// All placements in the order in which they apply, without those that only workers of one
    /// process accept from each other. A mark, which is no prompt block, always has the kind
    /// [`PlacementKind::OverShare`].
    pub fn each(&self) -> impl Iterator<Item = (PlacementKind, EndpointRef, Vec<u64>)> {
        let confirmed = placements::each(&self.placements)
            .map(|(endpoint, blocks)| (PlacementKind::Confirmed, endpoint, blocks));
        placements::each_claim(&self.claims)
            .chain(confirmed)
            .filter_map(|(kind, endpoint, blocks)| {
                Some((peer_kind(kind, &blocks)?, endpoint, blocks))
            })
    }

    /// Takes the placements out of a message.
    #[must_use]
    pub fn take(message: &mut state::PeerLoad) -> Self {
        Self {
            placements: std::mem::take(&mut message.placements),
            claims: std::mem::take(&mut message.claims),
        }
    }
}

// === impl PeerReport ===

impl PeerReport {
    /// The report of a VM of this process, which expires after `expiry_ms`. Its writer is not set
    /// yet.
    #[must_use]
    pub fn of_vm(expiry_ms: u64) -> Self {
        Self {
            report: PeerLoadReport::default(),
            writer: 0,
            expiry_ms,
        }
    }

    /// The report of all other proxies together.
    #[must_use]
    pub fn of_proxies() -> Self {
        Self {
            report: PeerLoadReport::default(),
            writer: LoadReportHead::OUTSIDE,
            expiry_ms: SHARE_EXPIRY_MS,
        }
    }

    /// The report, as last read.
    #[must_use]
    pub fn report(&self) -> &PeerLoadReport {
        &self.report
    }

    /// The VM whose report is used; 0 for none.
    #[must_use]
    pub fn writer(&self) -> u64 {
        self.writer
    }

    /// Sets the VM whose report is used.
    pub fn set_writer(&mut self, vm: u64) {
        self.writer = vm;
    }

    /// Whether [`Self::writer`] wrote the report.
    #[must_use]
    pub fn is_from_writer(&self) -> bool {
        self.writer != 0 && self.report.head().vm == self.writer
    }

    /// Whether [`Self::writer`] wrote the report, and the report has not expired.
    #[must_use]
    pub fn is_current(&self, now: Timestamp) -> bool {
        self.is_from_writer() && now.ms_since(self.report.head().written) < self.expiry_ms
    }

    /// Reads newer bytes of the report and applies its failures; [`Self::count`] must follow.
    /// Returns whether [`ManagedPool::recompute_peer_slos`] must follow.
    pub fn read(&mut self, pool: &mut ManagedPool, bytes: Vec<u8>, now: Timestamp) -> bool {
        let counts = self.report.counts();
        let slos = pool.read_load_report(&mut self.report, bytes, counts);
        if self.is_from_writer() {
            let outside = self.writer == LoadReportHead::OUTSIDE;
            let failures = self.report.ejections().map(|failure| Ejection {
                outside: failure.outside || outside,
                ..failure
            });
            failures.for_each(|failure| pool.learn_ejection(failure, now));
        }
        slos
    }

    /// Counts the load of the report while it is current. Returns whether
    /// [`ManagedPool::recompute_peer_slos`] must follow.
    pub fn count(&mut self, pool: &mut ManagedPool, now: Timestamp) -> bool {
        let counts = self.is_current(now);
        pool.count_load_report(&mut self.report, counts)
    }
}

// === impl ProxyPeers ===

impl ProxyPeers {
    /// Takes the number of proxies from a message.
    pub fn receive(&mut self, message: &state::PeerLoad) {
        self.proxies = message.proxies;
    }

    /// Whether there is another proxy.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.proxies > 1
    }

    /// Whether a report is due. A changed report is due at once. An unchanged one is due after
    /// [`REPEAT_MS`], unless it has no load.
    #[must_use]
    pub fn is_due(&self, is_changed: bool, is_idle: bool, now: Timestamp) -> bool {
        self.has_peers() && (is_changed || (!is_idle && now.ms_since(self.sent_at) >= REPEAT_MS))
    }

    /// Stamps a message that is sent now.
    pub fn stamp(&mut self, report: &mut state::LoadReport, now: Timestamp) {
        self.sent_at = now;
        LoadReportHead {
            written: now,
            ..LoadReportHead::default()
        }
        .stamp(&mut report.row);
    }
}

// === impl LocalPeer ===

impl Default for LocalPeer {
    fn default() -> Self {
        Self {
            joined: false,
            peers: ProxyPeers::default(),
            own: OwnLoadReport::default(),
            published: 0,
            others: PeerReport::of_proxies(),
        }
    }
}

impl LocalPeer {
    /// Makes the process one of the proxies that share the pool. Returns false if it already is
    /// one.
    pub fn join(&mut self) -> bool {
        !std::mem::replace(&mut self.joined, true)
    }

    /// Whether there is another proxy to report to.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.joined && self.peers.has_peers()
    }

    /// Receives the load of all other proxies, and their placements.
    pub fn receive(
        &mut self,
        pool: &mut ManagedPool,
        mut message: state::PeerLoad,
        now: Timestamp,
    ) {
        self.peers.receive(&message);
        pool.set_placement_publishing(self.has_peers());
        if let Some(report) = take_peer_report(&mut message, 0, now) {
            let slos = self.others.read(pool, report, now);
            if self.others.count(pool, now) | slos {
                pool.recompute_peer_slos([self.others.report()]);
            }
        }
        for (kind, endpoint, blocks) in EncodedPlacements::take(&mut message).each() {
            pool.record_peer_placement(kind, endpoint, &blocks, now);
        }
    }

    /// Counts the load of the other proxies again, after a pool update.
    pub fn recount(&self, pool: &mut ManagedPool) {
        pool.recount_load_reports([self.others.report()]);
    }

    /// Stops counting the load of the other proxies when they have been silent for too long.
    pub fn expire(&mut self, pool: &mut ManagedPool, now: Timestamp) {
        if self.others.count(pool, now) {
            pool.recompute_peer_slos([self.others.report()]);
        }
    }

    /// The report that is due now, if any.
    pub fn next_report(
        &mut self,
        name: &str,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> Option<state::LoadReport> {
        let changes = pool.changes();
        if !self.joined
            || !self
                .peers
                .is_due(self.published != changes, self.own.is_idle(), now)
        {
            return None;
        }
        self.published = changes;
        let row = pool
            .write_load_report(&mut self.own, LoadReportHead::default())
            .to_vec();
        let mut encoded = EncodedPlacements::default();
        for Placement {
            kind,
            endpoint,
            blocks,
            known,
        } in pool.take_placements()
        {
            let new = usize::try_from(known)
                .ok()
                .and_then(|known| blocks.get(known..))
                .unwrap_or_default();
            encoded.append(kind, endpoint, new);
        }
        let mut report = state::LoadReport {
            pool: name.to_owned(),
            row,
            placements: encoded.placements,
            claims: encoded.claims,
            backlog: pool.queues().backlog(),
            stamp: 0,
        };
        self.peers.stamp(&mut report, now);
        Some(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(proxies: u32, row: Vec<u8>) -> state::PeerLoad {
        state::PeerLoad {
            pool: "p".to_owned(),
            proxies,
            row,
            ..state::PeerLoad::default()
        }
    }

    #[test]
    fn a_claim_without_blocks_is_no_pick() {
        let at = EndpointRef {
            slot: scheduler::Slot(0),
            generation: scheduler::Generation(1),
        };
        let mut sent = EncodedPlacements::default();
        let kind = PlacementKind::Unconfirmed;
        placements::push_claim(&mut sent.claims, kind, at, &[]);
        placements::push_claim(&mut sent.claims, kind, at, &[2, 4]);
        let received: Vec<_> = sent.each().collect();
        assert_eq!(received, [(kind, at, vec![2, 4])]);
    }

    #[test]
    fn a_peers_withdrawal_is_told_apart_from_a_workers() {
        let at = EndpointRef {
            slot: scheduler::Slot(0),
            generation: scheduler::Generation(1),
        };
        let mut sent = EncodedPlacements::default();
        sent.append(PlacementKind::Withdrawn, at, &[2, 4]);
        sent.append(PlacementKind::PeerWithdrawn, at, &[6]);
        let received: Vec<_> = sent.each().collect();
        assert_eq!(received, [(PlacementKind::PeerWithdrawn, at, vec![2, 4])]);
    }

    #[test]
    fn a_report_is_due_on_change_and_repeated_while_it_has_load() {
        let mut peers = ProxyPeers::default();
        let at = |ms| Timestamp(0).plus_ms(1_000_000 + ms);
        assert!(!peers.is_due(true, false, at(0)), "no other proxy");
        peers.receive(&message(2, Vec::new()));
        assert!(peers.is_due(true, true, at(0)) && !peers.is_due(false, true, at(0)));
        let mut report = state::LoadReport {
            row: vec![0; LoadReportHead::BYTES],
            ..state::LoadReport::default()
        };
        peers.stamp(&mut report, at(0));
        assert_eq!(report.row[8..16], at(0).0.to_le_bytes());
        assert!(!peers.is_due(false, false, at(REPEAT_MS - 1)));
        assert!(
            peers.is_due(false, false, at(REPEAT_MS)) && !peers.is_due(false, true, at(REPEAT_MS))
        );
    }

    #[test]
    fn the_report_of_the_others_counts_until_it_expires_and_garbage_changes_nothing() {
        let mut pool = ManagedPool::new(1, 0);
        let mut peer = LocalPeer::default();
        let at = |ms| Timestamp(0).plus_ms(1_000_000 + ms);
        let empty = || vec![0; LoadReportHead::BYTES];
        peer.receive(&mut pool, message(2, empty()), at(0));
        assert!(!peer.has_peers() && peer.join() && peer.has_peers() && !peer.join());
        assert!(peer.others.report().counts());
        peer.receive(&mut pool, message(3, vec![1, 2, 3]), at(5));
        assert_eq!(peer.others.report().head().written, at(0));
        peer.expire(&mut pool, at(SHARE_EXPIRY_MS - 1));
        assert!(peer.others.report().counts());
        peer.expire(&mut pool, at(SHARE_EXPIRY_MS));
        assert!(!peer.others.report().counts());
        peer.receive(&mut pool, message(3, empty()), at(SHARE_EXPIRY_MS + 1));
        assert!(peer.others.report().counts(), "it is there again");
    }

    #[test]
    fn a_process_of_one_vm_reports_each_change_once() {
        let mut pool = ManagedPool::new(1, 0);
        let mut peer = LocalPeer::default();
        let now = Timestamp(0).plus_ms(1_000_000);
        peer.receive(&mut pool, message(2, vec![0; LoadReportHead::BYTES]), now);
        peer.join();
        assert_eq!(
            peer.next_report("p", &mut pool, now),
            None,
            "nothing has changed"
        );
        peer.published = 1;
        let report = peer.next_report("p", &mut pool, now).unwrap();
        assert_eq!(
            (report.pool.as_str(), report.row.len(), report.stamp),
            ("p", LoadReportHead::BYTES, 0)
        );
        assert_eq!(peer.next_report("p", &mut pool, now), None);
    }
}
