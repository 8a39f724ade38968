//! Relays load and placements between the proxies of a pool.
//!
//! ```text
//!  LoadReport of a process ──▶ load: replaces its row ──▶ sum of all rows ──▶ PeerLoad to each other process: the sum without its row
//!                         └──▶ placements: bounded queue, oldest dropped ──▶ PeerLoad to each other process: each placement once
//! ```
//! Only [`pool_state::RelaySum`] reads the bytes of load reports. Placements are passed on
//! unchanged, and those beyond their origin's share are passed on as claims
//! ([`super::placement_shares`]). The cost of a message depends on its bytes and on the endpoints
//! of the pool, but not on the number of processes. There is one sum of all reports, and each
//! process gets the sum without its own part. The relay saves nothing: reports are absolute and
//! sent again, and placements are estimates. The times in a report use the clock of its process.
//! They are converted to the daemon's clock on arrival, and to the receiver's clock by the
//! receiver.

mod active;

use std::collections::BTreeMap;
use std::time::Duration;

use exchange::Timestamp;
use pool_state::peers::EncodedPlacements;
use pool_state::{LoadReportHead, RelaySum};
use proto::{PLACEMENTS_BYTES_MAX, SHARE_EXPIRY_MS, placements, state};
use scheduler::{ENDPOINTS_MAX, EndpointRef};
use tokio::time::Instant;

use crate::pool::writer::PoolView;
use crate::state::backlog_sum::{BacklogSum, QueuedRequests};
use crate::state::kept_placements::KeptPlacements;
use crate::state::origin_totals::OriginTable;
pub use crate::state::origin_totals::{ACTIVE_PER_ORIGIN_MAX, ACTIVE_PER_OWNER_MAX};
use crate::state::peer::Origin;
use crate::state::placement_shares::{PlacementShares, PlacingPeer};
use crate::state::relay_process::RelayProcess;
pub use crate::state::relay_process::{RelayCursor, RelayMember};

/// The minimum time between two messages to a proxy. Picks with a load that is 10 ms old are nearly
/// as good as with the current load, and each message costs CPU on both sides.
pub const SHARE_INTERVAL: Duration = Duration::from_millis(5);

/// The longest load report that is accepted, in bytes: the maximum number of endpoints, each with
/// its SLOs.
pub const ROW_BYTES_MAX: usize = 80 * ENDPOINTS_MAX + 64;

/// The maximum number of bytes of load reports that are kept from one origin in all pools: those of
/// 256 proxies that are busy at 1,000 endpoints each. A report beyond that is not accepted.
const ROW_BYTES_PER_ORIGIN_MAX: usize = 16 << 20;

/// The maximum for all origins of an owner while another owner has reports.
const ROW_BYTES_PER_OWNER_MAX: usize = 4 * ROW_BYTES_PER_ORIGIN_MAX;

/// The interval at which the relay looks for load reports that are too old: a fortieth of the time
/// for which a report is used.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(SHARE_EXPIRY_MS / 40);

/// The start of the relay's clock, in ms. The start is larger than any age in a report, so that
/// times do not become negative.
const CLOCK_BEGINS_MS: u64 = 86_400_000;

/// The relay of one daemon.
#[derive(Debug)]
pub struct PeerRelay {
    began: Instant,
    pools: BTreeMap<String, PoolRelay>,
    /// The bytes of the load reports of each owner and each origin in all pools.
    row_bytes: [BTreeMap<Origin, usize>; 2],
}

#[derive(Debug, Default)]
struct PoolRelay {
    /// The revision of the view that the sum was made for.
    revision: u64,
    sum: RelaySum,
    backlog: BacklogSum,
    processes: BTreeMap<u64, RelayProcess>,
    origins: OriginTable,
    shares: PlacementShares,
    /// The number of processes whose load report is used, or was used within a minute, with at most
    /// [`ACTIVE_PER_ORIGIN_MAX`] of each origin and [`ACTIVE_PER_OWNER_MAX`] of each owner.
    recent: u32,
    /// The time when the relay last looked for load reports that are too old.
    expired_at: Option<Instant>,
    kept: KeptPlacements,
    /// Grows with every change that proxies should get.
    version: u64,
}

// === impl PeerRelay ===

impl Default for PeerRelay {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            pools: BTreeMap::new(),
            row_bytes: [BTreeMap::new(), BTreeMap::new()],
        }
    }
}

impl PeerRelay {
    /// Adds a process whose stream requested `pool`. From then on the process belongs to this
    /// stream, and to no older one.
    pub fn join(&mut self, pool: &str, member: RelayMember<'_>, now: Instant) {
        self.pools
            .entry(pool.to_owned())
            .or_default()
            .join(member, now);
    }

    /// Removes a process whose stream ended, with its load, unless the process belongs to a newer
    /// stream.
    pub fn leave(&mut self, pool: &str, process_id: u64, stream_id: u64) {
        let Some(pool) = self.pools.get_mut(pool) else {
            return;
        };
        let owned = pool.processes.get(&process_id);
        if owned.is_none_or(|process| process.stream_id != stream_id) {
            return;
        }
        if let Some(process) = pool.leave(process_id) {
            change_row_bytes(&mut self.row_bytes, &process.origin, process.row_bytes, 0);
        }
    }

    /// Includes only load at the endpoints of `view` from now on.
    pub fn follow(&mut self, view: &PoolView) {
        if let Some(pool) = self.pools.get_mut(&*view.name) {
            pool.follow(view);
        }
    }

    /// Records a load report. The report is ignored if the proxy did not request the pool.
    pub fn receive(&mut self, process_id: u64, mut share: state::LoadReport, now: Instant) {
        let head = LoadReportHead {
            vm: process_id,
            written: self.time(now),
            ring: 0,
        };
        let Some(pool) = self.pools.get_mut(&share.pool) else {
            return;
        };
        let Some(process) = pool.processes.get_mut(&process_id) else {
            return;
        };
        process.received_at = now;
        let queued = QueuedRequests::read(&share.backlog);
        pool.backlog
            .replace(&process.origin, &mut process.backlog, queued);
        process.stamp = if share.stamp == 0 {
            process.stamp
        } else {
            share.stamp
        };
        let claims = process.claimed.admit(&share.claims);
        let origin = process.origin.clone();
        if share.row.len() <= ROW_BYTES_MAX
            && head.receive(&mut share.row)
            && let Some(row) = pool.sum.of_present(&share.row)
            && change_row_bytes(&mut self.row_bytes, &origin, process.row_bytes, row.len())
        {
            process.row_bytes = row.len();
            let counted = process.row.counts();
            pool.sum.read(&mut process.row, row);
            pool.origins.set_active(&origin, counted, true);
        }
        let peer = PlacingPeer {
            process_id,
            origin: &origin,
            processes: pool.origins.get(&origin).map_or(1, |of| of.processes),
            divided_by: pool.origins.divided_by(&origin),
        };
        for (piece, count) in placements::pieces(&claims, PLACEMENTS_BYTES_MAX) {
            let claims = EncodedPlacements {
                claims: piece.to_vec(),
                ..EncodedPlacements::default()
            };
            pool.kept.keep(&mut pool.origins, peer, claims, count, now);
        }
        for (piece, count) in placements::pieces(&share.placements, PLACEMENTS_BYTES_MAX) {
            let divided = pool.shares.divide(piece, peer);
            pool.kept.keep(&mut pool.origins, peer, divided, count, now);
        }
        pool.kept.drop_old(&mut pool.origins, now);
        pool.version += 1;
    }

    /// Returns the next message of the pool for `process_id`, if one is due.
    pub fn next(
        &mut self,
        view: &PoolView,
        process_id: u64,
        cursor: &mut RelayCursor,
        now: Instant,
    ) -> Option<state::PeerLoad> {
        let written = self.time(now);
        let pool = self.pools.get_mut(&*view.name)?;
        if !cursor.is_due(now) {
            return None;
        }
        pool.expire(now);
        pool.follow(view);
        pool.shares.follow(view);
        if cursor.version == pool.version {
            return None;
        }
        let (encoded, all) = pool.placements_for(process_id, cursor);
        cursor.sent_at = Some(now);
        cursor.interval = pool.interval(process_id);
        cursor.version = if all { pool.version } else { cursor.version };
        cursor.more = !all;
        let proxies = pool.proxies(process_id);
        let stamp = pool
            .processes
            .get(&process_id)
            .map_or(0, |process| process.stamp);
        let active = pool.active_others(process_id);
        let own = pool.processes.get(&process_id);
        let none = (Origin::default(), QueuedRequests::default());
        let (origin, queued) = own.map_or((&none.0, &none.1), |own| (&own.origin, &own.backlog));
        let backlog = pool.backlog.without(origin, queued, now);
        let row = pool.report_without(process_id, written);
        Some(state::PeerLoad {
            pool: view.name.to_string(),
            proxies,
            row,
            placements: encoded.placements,
            claims: encoded.claims,
            stamp,
            active,
            backlog,
        })
    }

    fn time(&self, now: Instant) -> Timestamp {
        let began = Timestamp(0).plus_ms(CLOCK_BEGINS_MS);
        let since =
            u64::try_from(now.saturating_duration_since(self.began).as_nanos()).unwrap_or(u64::MAX);
        Timestamp(began.0.saturating_add(since))
    }

    /// Returns the number of placements of a pool that some proxy did not get.
    #[must_use]
    pub fn dropped(&self, pool: &str) -> u64 {
        self.pools.get(pool).map_or(0, |pool| pool.kept.dropped)
    }

    /// The number of placements of a pool that were beyond the share of their proxy.
    #[must_use]
    pub fn over_share(&self, pool: &str) -> u64 {
        let pool = self.pools.get(pool);
        pool.map_or(0, |pool| pool.shares.over_share)
    }
}

/// Changes the bytes that a process of `origin` has. Returns whether the new ones fit. If they do
/// not, nothing changes.
fn change_row_bytes(
    levels: &mut [BTreeMap<Origin, usize>; 2],
    origin: &Origin,
    before: usize,
    after: usize,
) -> bool {
    let [owners, _] = &*levels;
    let remote = owners.keys().filter(|owner| owner.is_remote());
    let owner_max = match remote.take(2).count() {
        0 | 1 => usize::MAX,
        _ => ROW_BYTES_PER_OWNER_MAX,
    };
    let known = levels.iter().zip(origin.levels());
    let fits = known
        .zip([owner_max, ROW_BYTES_PER_ORIGIN_MAX])
        .all(|((rows, of), max)| {
            rows.get(&of).copied().unwrap_or_default() - before + after <= max
        });
    if !fits && after > before {
        return false;
    }
    for (rows, of) in levels.iter_mut().zip(origin.levels()) {
        let bytes = rows.entry(of.clone()).or_default();
        *bytes = *bytes - before + after;
        if *bytes == 0 {
            rows.remove(&of);
        }
    }
    true
}

// === impl PoolRelay ===

impl PoolRelay {
    fn join(&mut self, member: RelayMember<'_>, now: Instant) {
        self.version += 1;
        if let Some(process) = self.processes.get_mut(&member.process_id) {
            process.stream_id = member.stream_id;
            return;
        }
        self.processes
            .insert(member.process_id, RelayProcess::new(member, now));
        self.origins.join(member.origin);
    }

    fn leave(&mut self, process_id: u64) -> Option<RelayProcess> {
        let mut process = self.processes.remove(&process_id)?;
        let counted = process.row.counts();
        self.origins.set_active(&process.origin, counted, false);
        self.sum.remove(&mut process.row);
        let none = QueuedRequests::default();
        self.backlog
            .replace(&process.origin, &mut process.backlog, none);
        self.version += 1;
        self.origins.leave(&process.origin);
        Some(process)
    }

    /// Returns the time between two messages to a process.
    fn interval(&self, process_id: u64) -> Duration {
        let own = self.processes.get(&process_id);
        SHARE_INTERVAL * own.map_or(1, |own| self.origins.message_shares(&own.origin))
    }

    /// Stops counting the reports of processes that have been silent for too long.
    fn expire(&mut self, now: Instant) {
        let is_due = |last| now.saturating_duration_since(last) >= EXPIRY_INTERVAL;
        if !self.expired_at.is_none_or(is_due) {
            return;
        }
        self.expired_at = Some(now);
        self.count_recent(now);
        let mut silent = Vec::new();
        for process in self.processes.values_mut() {
            let is_silent = now.saturating_duration_since(process.received_at)
                >= Duration::from_millis(SHARE_EXPIRY_MS);
            if is_silent && (process.row.counts() || !process.backlog.is_empty()) {
                if process.row.counts() {
                    silent.push(process.origin.clone());
                }
                self.sum.remove(&mut process.row);
                let none = QueuedRequests::default();
                self.backlog
                    .replace(&process.origin, &mut process.backlog, none);
                self.version += 1;
            }
        }
        for origin in silent {
            self.origins.set_active(&origin, true, false);
        }
    }

    /// Resets the sum to the endpoints and generations of a changed pool.
    fn follow(&mut self, view: &PoolView) {
        if self.revision != view.revision {
            self.revision = view.revision;
            let present: Vec<EndpointRef> = view.members.iter().map(|member| member.id).collect();
            self.sum
                .reset(present, self.processes.values().map(|process| &process.row));
        }
    }

    fn report_without(&mut self, process_id: u64, written: Timestamp) -> Vec<u8> {
        let head = LoadReportHead {
            vm: LoadReportHead::OUTSIDE,
            written,
            ring: 0,
        };
        let own = self.processes.get(&process_id).map(|own| &own.row);
        self.sum.row_without(head, own)
    }

    /// Returns the placements that fit one message, and whether they are all that are due.
    fn placements_for(
        &mut self,
        process_id: u64,
        cursor: &mut RelayCursor,
    ) -> (EncodedPlacements, bool) {
        let oldest = self
            .kept
            .batches
            .front()
            .map_or(self.kept.next, |placed| placed.first);
        let lost = oldest.saturating_sub(cursor.placement);
        // Placements from before a new proxy joined are not counted as lost.
        self.kept.dropped += if cursor.sent_at.is_some() { lost } else { 0 };
        let mut encoded = EncodedPlacements::default();
        let due = self
            .kept
            .batches
            .partition_point(|placed| placed.first < cursor.placement);
        let due = self
            .kept
            .batches
            .range(due..)
            .filter(|placed| placed.process_id != process_id);
        for placed in due {
            if placed.encoded.is_empty() {
                self.kept.dropped += placed.count;
                continue;
            }
            if encoded.bytes() + placed.encoded.bytes() > PLACEMENTS_BYTES_MAX {
                cursor.placement = placed.first;
                return (encoded, false);
            }
            encoded.extend(&placed.encoded);
        }
        cursor.placement = self.kept.next;
        (encoded, true)
    }
}

#[cfg(test)]
mod tests {
    use pool_state::{LoadReportSum, PeerLoadReport};
    use scheduler::prefix::{BlockClaim, PrefixIndex};

    use super::*;
    use crate::pool::writer::{Pool, PoolSettings, WallAndMonotonic};
    use crate::state::kept_placements::{BYTES_PER_ORIGIN_MAX, BYTES_PER_OWNER_MAX, KEPT_MAX};

    fn relay() -> (PoolRelay, Instant) {
        let mut pool = PoolRelay::default();
        let now = Instant::now();
        for process_id in 1..=3 {
            pool.join(member(process_id, &Origin::default()), now);
        }
        (pool, now)
    }

    /// Creates a process whose stream has the same number.
    fn member(process_id: u64, origin: &Origin) -> RelayMember<'_> {
        RelayMember {
            process_id,
            stream_id: process_id,
            origin,
        }
    }

    fn with_pool(pool: PoolRelay, began: Instant) -> PeerRelay {
        PeerRelay {
            began,
            pools: BTreeMap::from([("p".to_owned(), pool)]),
            ..PeerRelay::default()
        }
    }

    fn placed(relay: &mut PeerRelay, process_id: u64, block: u64, blocks: usize) {
        let at = EndpointRef {
            slot: scheduler::Slot(1),
            generation: scheduler::Generation(1),
        };
        let mut placements = Vec::new();
        placements::push(&mut placements, at, &vec![block; blocks]);
        let share = state::LoadReport {
            pool: "p".to_owned(),
            placements,
            ..state::LoadReport::default()
        };
        relay.receive(process_id, share, Instant::now());
    }

    fn firsts(placements: &[u8]) -> Vec<u64> {
        placements::each(placements)
            .map(|(_, blocks)| blocks[0])
            .collect()
    }

    #[test]
    fn each_placement_goes_once_to_every_other_process() {
        let (pool, now) = relay();
        let mut relay = with_pool(pool, now);
        placed(&mut relay, 1, 10, 3);
        placed(&mut relay, 2, 20, 3);
        placed(&mut relay, 9, 90, 3);
        let pool = relay.pools.get_mut("p").unwrap();
        let mut cursors = [RelayCursor::default(); 4];
        for (process_id, expected) in [(1, vec![20]), (2, vec![10]), (3, vec![10, 20])] {
            let (placements, all) =
                pool.placements_for(process_id, &mut cursors[process_id as usize]);
            assert_eq!(
                (firsts(&placements.placements), all),
                (expected, true),
                "reports of a process that did not join are ignored"
            );
            assert_eq!(
                pool.placements_for(process_id, &mut cursors[process_id as usize])
                    .0
                    .bytes(),
                0
            );
        }
    }

    #[test]
    fn a_process_withdraws_only_what_it_claimed() {
        let (pool, now) = relay();
        let mut relay = with_pool(pool, now);
        let at = EndpointRef {
            slot: scheduler::Slot(1),
            generation: scheduler::Generation(1),
        };
        let send_all = |relay: &mut PeerRelay, process_id, kind, blocks: &[u64]| {
            let mut claims = Vec::new();
            placements::push_claim(&mut claims, kind, at, blocks);
            let share = state::LoadReport {
                pool: "p".to_owned(),
                claims,
                ..state::LoadReport::default()
            };
            relay.receive(process_id, share, now);
        };
        let send = |relay: &mut PeerRelay, process_id, kind, block| {
            send_all(relay, process_id, kind, &[block, block + 1]);
        };
        use placements::PlacementKind::{PeerWithdrawn, Unconfirmed, Withdrawn};
        send_all(&mut relay, 2, Unconfirmed, &[]);
        send_all(&mut relay, 2, Unconfirmed, &[10]);
        send(&mut relay, 1, Unconfirmed, 10);
        send(&mut relay, 2, Withdrawn, 10);
        send(&mut relay, 1, Unconfirmed, 20);
        send(&mut relay, 2, PeerWithdrawn, 20);
        send(&mut relay, 1, Withdrawn, 10);
        send(&mut relay, 1, Withdrawn, 10);
        let pool = relay.pools.get_mut("p").unwrap();
        let (sent, _) = pool.placements_for(3, &mut RelayCursor::default());
        let sent: Vec<_> = placements::each_claim(&sent.claims)
            .map(|(kind, _, blocks)| (kind, blocks[0]))
            .collect();
        assert_eq!(
            sent,
            [
                (Unconfirmed, 10),
                (Unconfirmed, 10),
                (Unconfirmed, 20),
                (Withdrawn, 10)
            ],
            "process 2 claimed only the first block"
        );
    }

    #[test]
    fn a_process_that_claims_twice_can_withdraw_its_claim() {
        use placements::PlacementKind::{PeerWithdrawn, Unconfirmed, Withdrawn};
        let (pool, now) = relay();
        let mut relay = with_pool(pool, now);
        let at = EndpointRef {
            slot: scheduler::Slot(1),
            generation: scheduler::Generation(1),
        };
        let blocks = [20, 22];
        let send = |relay: &mut PeerRelay, process_id, kind| {
            let mut claims = Vec::new();
            placements::push_claim(&mut claims, kind, at, &blocks);
            let share = state::LoadReport {
                pool: "p".to_owned(),
                claims,
                ..state::LoadReport::default()
            };
            relay.receive(process_id, share, now);
        };
        // What process 3 has cached at the endpoint, by its index, after these claims.
        let cached = |relay: &mut PeerRelay| {
            let pool = relay.pools.get_mut("p").unwrap();
            let (sent, _) = pool.placements_for(3, &mut RelayCursor::default());
            let mut index = PrefixIndex::with_capacity(1 << 10);
            index.set_capacity(at, 400);
            for (kind, at, blocks) in placements::each_claim(&sent.claims) {
                match kind {
                    Unconfirmed => index.claim(at, &blocks, BlockClaim::Unconfirmed),
                    Withdrawn | PeerWithdrawn => index.withdraw_of_peer(at, &blocks),
                    _ => {}
                }
            }
            let mut known = Vec::new();
            index.matched(&blocks, &[at], &mut known);
            known[0].cached
        };
        send(&mut relay, 1, Unconfirmed);
        send(&mut relay, 1, Unconfirmed);
        assert_eq!(cached(&mut relay), 2);
        send(&mut relay, 1, Withdrawn);
        assert_eq!(cached(&mut relay), 0, "no other process claimed the prompt");
        send(&mut relay, 1, Withdrawn);
        send(&mut relay, 2, Unconfirmed);
        send(&mut relay, 1, Unconfirmed);
        send(&mut relay, 1, Unconfirmed);
        send(&mut relay, 1, Withdrawn);
        assert_eq!(cached(&mut relay), 2, "process 2 claimed the prompt too");
    }

    #[test]
    fn the_oldest_of_an_origin_go_first_when_it_places_too_much_and_that_is_counted() {
        let (pool, now) = relay();
        let mut relay = with_pool(pool, now);
        relay.join("p", member(4, &of(4)), now);
        let mut cursor = RelayCursor {
            sent_at: Some(now),
            ..RelayCursor::default()
        };
        placed(&mut relay, 4, 1_000, 3);
        // Each of these batches fills a message.
        let kept = (BYTES_PER_ORIGIN_MAX / PLACEMENTS_BYTES_MAX) as u64;
        for block in 0..kept + 500 {
            placed(&mut relay, 1, block, PLACEMENTS_BYTES_MAX / 8 - 2);
        }
        let pool = relay.pools.get_mut("p").unwrap();
        let mut got = Vec::new();
        while let (placements, all) = pool.placements_for(2, &mut cursor)
            && !placements.is_empty()
        {
            assert!(placements.bytes() <= PLACEMENTS_BYTES_MAX);
            got.extend(firsts(&placements.placements));
            if all {
                break;
            }
        }
        assert_eq!(
            got,
            [1_000]
                .into_iter()
                .chain(500..500 + kept)
                .collect::<Vec<_>>(),
            "the placement of the other origin is kept"
        );
        assert_eq!(
            (pool.kept.dropped, pool.kept.bytes),
            (
                500,
                pool.kept
                    .batches
                    .iter()
                    .map(|placed| placed.encoded.bytes())
                    .sum()
            )
        );
    }

    #[test]
    fn an_origin_that_leaves_and_comes_again_has_the_room_of_one() {
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        relay.join("p", member(99, &of(9)), now);
        let batches = (BYTES_PER_ORIGIN_MAX / PLACEMENTS_BYTES_MAX) as u64;
        for process_id in 1..=4 {
            relay.join("p", member(process_id, &of(1)), now);
            for block in 0..batches {
                placed(&mut relay, process_id, block, PLACEMENTS_BYTES_MAX / 8 - 2);
            }
            relay.leave("p", process_id, process_id);
        }
        let pool = relay.pools.get_mut("p").unwrap();
        assert!(
            pool.kept.bytes <= BYTES_PER_ORIGIN_MAX,
            "{}",
            pool.kept.bytes
        );
        pool.kept
            .drop_old(&mut pool.origins, now + KEPT_MAX + Duration::from_secs(60));
        assert!(pool.origins.get(&of(1)).is_none(), "nothing of it is left");
    }

    #[test]
    fn placements_of_many_pods_with_one_certificate_leave_room_to_others() {
        let pod = |certificate: &str, last: u8| Origin {
            certificate: Some(certificate.into()),
            ..of(last)
        };
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        relay.join("p", member(99, &pod("other", 9)), now);
        placed(&mut relay, 99, 1_000, 3);
        let batches = (BYTES_PER_ORIGIN_MAX / PLACEMENTS_BYTES_MAX) as u64;
        for process_id in 1..=8 {
            let origin = pod("tenant", u8::try_from(process_id).unwrap());
            relay.join("p", member(process_id, &origin), now);
            for block in 0..batches {
                placed(&mut relay, process_id, block, PLACEMENTS_BYTES_MAX / 8 - 2);
            }
        }
        let pool = relay.pools.get_mut("p").unwrap();
        let kept = |pool: &PoolRelay, last: u64| {
            let batches = pool.kept.batches.iter();
            batches
                .filter(|batch| batch.process_id == last && !batch.encoded.is_empty())
                .count()
        };
        assert_eq!(kept(pool, 99), 1, "before, that was 0");
        assert_eq!(kept(pool, 8), batches as usize, "the newest of the tenant");
        assert!(pool.kept.bytes <= BYTES_PER_OWNER_MAX + 100);
        for process_id in (1..=8).chain([99]) {
            relay.leave("p", process_id, process_id);
        }
        let pool = relay.pools.get_mut("p").unwrap();
        pool.kept
            .drop_old(&mut pool.origins, now + KEPT_MAX + Duration::from_secs(60));
        assert!(pool.origins.is_empty() && pool.kept.bytes == 0);
    }

    #[test]
    fn placements_are_kept_for_no_longer_than_they_count() {
        let (pool, now) = relay();
        let mut relay = with_pool(pool, now);
        for block in 0..1_000 {
            placed(&mut relay, 1, block, 3);
        }
        let pool = relay.pools.get_mut("p").unwrap();
        pool.kept.drop_old(&mut pool.origins, now);
        assert_eq!(pool.kept.batches.len(), 1_000);
        pool.kept
            .drop_old(&mut pool.origins, now + KEPT_MAX + Duration::from_secs(60));
        assert_eq!(
            (
                pool.kept.batches.len(),
                pool.kept.bytes,
                pool.origins.get(&Origin::default()).unwrap().kept.bytes
            ),
            (0, 0, 0)
        );
        assert!(
            pool.origins
                .get(&Origin::default())
                .unwrap()
                .kept
                .pieces
                .is_empty()
        );
    }

    #[test]
    fn each_gets_the_sum_of_the_others_until_they_are_silent_or_gone() {
        let (mut pool, now) = relay();
        let at = EndpointRef {
            slot: scheduler::Slot(4),
            generation: scheduler::Generation(1),
        };
        pool.sum.reset(vec![at], []);
        for (process_id, requests) in [(1, 10), (2, 200), (3, 3_000)] {
            let mut ledger = scheduler::in_flight::InFlight::default();
            for _ in 0..requests {
                drop(ledger.admit(at, 1));
            }
            let mut sum = LoadReportSum::default();
            sum.reset(vec![at], []);
            ledger
                .rows()
                .for_each(|(endpoint, load)| sum.add(endpoint, load));
            let head = LoadReportHead {
                vm: process_id,
                ..LoadReportHead::default()
            };
            let row = sum.row(head, [], &[]);
            pool.sum
                .read(&mut pool.processes.get_mut(&process_id).unwrap().row, row);
            pool.origins.set_active(&Origin::default(), false, true);
        }
        let heard = |pool: &mut PoolRelay, process_id| {
            let mut sum = LoadReportSum::default();
            let mut row = PeerLoadReport::default();
            sum.reset(vec![at], []);
            sum.read(&mut row, pool.report_without(process_id, Timestamp(0)));
            sum.load(at).requests
        };
        assert_eq!(
            [1, 2, 3].map(|process_id| heard(&mut pool, process_id)),
            [3_200, 3_010, 210]
        );
        assert_eq!(
            [1, 2, 3].map(|process_id| heard(&mut pool, process_id)),
            [3_200, 3_010, 210],
            "reading changes nothing"
        );
        pool.processes.get_mut(&2).unwrap().received_at = now + Duration::from_secs(1);
        pool.expire(now + Duration::from_millis(SHARE_EXPIRY_MS));
        assert_eq!(
            [1, 2, 3].map(|process_id| heard(&mut pool, process_id)),
            [200, 0, 200]
        );
        let mut relay = with_pool(pool, now);
        relay.leave("p", 2, 2);
        assert_eq!(heard(relay.pools.get_mut("p").unwrap(), 1), 0);
    }

    fn of(last: u8) -> Origin {
        Origin {
            certificate: None,
            address: Some([10, 0, 0, last].into()),
        }
    }

    #[test]
    fn many_processes_of_one_origin_stand_for_a_few() {
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        let row = || state::LoadReport {
            pool: "p".to_owned(),
            row: vec![0; LoadReportHead::BYTES],
            ..state::LoadReport::default()
        };
        for process_id in 1..=100 {
            let origin = of(if process_id <= 3 { 1 } else { 2 });
            relay.join("p", member(process_id, &origin), now);
            relay.receive(process_id, row(), now);
        }
        let active = |relay: &PeerRelay, id| relay.pools["p"].active_others(id);
        assert_eq!(
            [1, 4, 999].map(|id| active(&relay, id)),
            [
                2 + ACTIVE_PER_ORIGIN_MAX,
                3 + ACTIVE_PER_ORIGIN_MAX,
                3 + ACTIVE_PER_ORIGIN_MAX
            ]
        );
        (4..=90).for_each(|id| relay.leave("p", id, id));
        assert_eq!([1, 91].map(|id| active(&relay, id)), [12, 12]);
        relay
            .pools
            .get_mut("p")
            .unwrap()
            .expire(now + Duration::from_secs(3));
        assert_eq!([1, 91].map(|id| active(&relay, id)), [0, 0]);
        (1..=100).for_each(|id| relay.leave("p", id, id));
        assert!(relay.pools["p"].origins.is_empty());
    }

    #[test]
    fn streams_without_load_do_not_divide_the_pool() {
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        let row = || state::LoadReport {
            pool: "p".to_owned(),
            row: vec![0; LoadReportHead::BYTES],
            ..state::LoadReport::default()
        };
        (1..=2).for_each(|id| relay.join("p", member(id, &of(1)), now));
        (3..=250).for_each(|id| relay.join("p", member(id, &of(2)), now));
        let proxies = |relay: &mut PeerRelay, id, ms| {
            let pool = relay.pools.get_mut("p").unwrap();
            pool.expire(now + Duration::from_millis(ms));
            pool.proxies(id)
        };
        assert_eq!(proxies(&mut relay, 1, 0), 2, "there are others");
        (1..=3).for_each(|id| relay.receive(id, row(), now));
        assert_eq!([1, 4].map(|id| proxies(&mut relay, id, 100)), [3, 4]);
        (4..=250).for_each(|id| relay.receive(id, row(), now));
        assert_eq!(
            [1, 250].map(|id| proxies(&mut relay, id, 200)),
            [2 + ACTIVE_PER_ORIGIN_MAX, 3 + ACTIVE_PER_ORIGIN_MAX]
        );
        assert_eq!(
            [5_000, 50_000, 70_000].map(|ms| proxies(&mut relay, 1, ms)),
            [2 + ACTIVE_PER_ORIGIN_MAX, 2 + ACTIVE_PER_ORIGIN_MAX, 2],
            "silent ones count for a minute"
        );
    }

    #[test]
    fn a_process_stays_until_its_newest_stream_that_requested_the_pool_ends() {
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        let origin = of(1);
        let join = |relay: &mut PeerRelay, stream_id| {
            let newest = RelayMember {
                stream_id,
                ..member(1, &origin)
            };
            relay.join("p", newest, now);
        };
        join(&mut relay, 10);
        join(&mut relay, 11);
        relay.leave("p", 1, 10);
        assert_eq!(
            relay.pools["p"].processes.len(),
            1,
            "the newer stream has it"
        );
        relay.leave("p", 1, 11);
        assert!(relay.pools["p"].processes.is_empty());
        // A newer stream that did not request the pool does not keep the process in the pool.
        join(&mut relay, 12);
        relay.leave("p", 1, 12);
        assert!(relay.pools["p"].processes.is_empty());
        assert!(relay.row_bytes.iter().all(BTreeMap::is_empty));
    }

    #[test]
    fn the_rows_of_an_owner_have_a_limit_beside_another_owner() {
        let pod = |last| Origin {
            certificate: Some("pods".into()),
            ..of(last)
        };
        let accepted = |rows: &mut [BTreeMap<Origin, usize>; 2]| {
            let accepts =
                |last: &u8| change_row_bytes(rows, &pod(*last), 0, ROW_BYTES_PER_ORIGIN_MAX);
            (1..=9).filter(accepts).count()
        };
        let mut rows = [BTreeMap::new(), BTreeMap::new()];
        assert_eq!(accepted(&mut rows), 9, "there is no other owner");
        let mut rows = [BTreeMap::new(), BTreeMap::new()];
        assert!(change_row_bytes(&mut rows, &of(99), 0, 1));
        assert_eq!(accepted(&mut rows), 4);
        assert!(change_row_bytes(
            &mut rows,
            &pod(1),
            ROW_BYTES_PER_ORIGIN_MAX,
            0
        ));
        let left: usize = rows[0].values().sum();
        assert_eq!(left, 3 * ROW_BYTES_PER_ORIGIN_MAX + 1);
    }

    #[test]
    fn the_rows_of_an_origin_have_a_limit_and_what_is_left_goes_with_the_streams() {
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        let present: Vec<EndpointRef> = (0..ENDPOINTS_MAX)
            .map(|slot| EndpointRef {
                slot: scheduler::Slot(u16::try_from(slot).unwrap()),
                generation: scheduler::Generation(1),
            })
            .collect();
        let mut full = LoadReportSum::default();
        full.reset(present.clone(), []);
        for endpoint in &present {
            let load = scheduler::in_flight::EndpointLoad {
                requests: 1,
                ..Default::default()
            };
            full.add(*endpoint, load);
        }
        let row = full.row(LoadReportHead::default(), [], &[]);
        let fitting = ROW_BYTES_PER_ORIGIN_MAX / row.len();
        let all = u64::try_from(fitting).unwrap() + 9;
        for process_id in 1..=all {
            relay.join("p", member(process_id, &of(1)), now);
            let pool = relay.pools.get_mut("p").unwrap();
            if process_id == 1 {
                pool.sum.reset(present.clone(), []);
            }
            let share = state::LoadReport {
                pool: "p".to_owned(),
                row: row.clone(),
                ..state::LoadReport::default()
            };
            relay.receive(process_id, share, now);
        }
        let counted = |relay: &PeerRelay| {
            let processes = relay.pools["p"].processes.values();
            processes.filter(|process| process.row.counts()).count()
        };
        assert_eq!(counted(&relay), fitting);
        assert_eq!(relay.row_bytes[1][&of(1)], fitting * row.len());
        (1..=all).for_each(|id| relay.leave("p", id, id));
        assert!(relay.row_bytes.iter().all(BTreeMap::is_empty));
        assert!(relay.pools["p"].origins.is_empty());
        assert_eq!(relay.pools["p"].origins.active(), 0);
    }

    /// A view of a pool with this many endpoints.
    fn view_of(endpoints: u16) -> PoolView {
        let mut pool = Pool::new(PoolSettings {
            name: "p".into(),
            generation_first: 1,
            ..PoolSettings::default()
        });
        let instances = (1..=endpoints)
            .map(|port| discovery::Instance::new(format!("e{port}"), ([10, 0, 0, 1], port).into()));
        let now = WallAndMonotonic {
            instant: Instant::now(),
            wall: std::time::SystemTime::UNIX_EPOCH,
        };
        pool.replace_instances(instances.collect(), now);
        pool.take_view().unwrap()
    }

    /// Lets each of the processes report its load and get a message, twice. Returns the entries of
    /// reports that this cost.
    fn entries_of_a_round(processes: u64) -> u64 {
        let view = view_of(16);
        let mut full = LoadReportSum::default();
        full.reset(view.members.iter().map(|member| member.id).collect(), []);
        for member in view.members.iter() {
            let load = scheduler::in_flight::EndpointLoad {
                requests: 1,
                ..Default::default()
            };
            full.add(member.id, load);
        }
        let row = full.row(LoadReportHead::default(), [], &[]);
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        let origin = of(1);
        (1..=processes).for_each(|id| relay.join("p", member(id, &origin), now));
        relay.follow(&view);
        let mut cursors = vec![RelayCursor::default(); 1 + processes as usize];
        for round in 1..=2 {
            let now = now + round * Duration::from_secs(1);
            for id in 1..=processes {
                let share = state::LoadReport {
                    pool: "p".to_owned(),
                    row: row.clone(),
                    ..state::LoadReport::default()
                };
                relay.receive(id, share, now);
                let sent = relay.next(&view, id, &mut cursors[id as usize], now);
                assert!(sent.is_some_and(|sent| id == 1 || sent.row.len() > LoadReportHead::BYTES));
            }
        }
        relay.pools["p"].sum.entries()
    }

    #[test]
    fn the_cost_of_a_message_does_not_grow_with_the_number_of_processes() {
        let [few, many] = [64, 128].map(entries_of_a_round);
        assert!(few > 2 * 64 * 16, "{few}");
        assert!(many <= 2 * few + few / 16, "{few}, then {many}");
    }

    #[test]
    fn an_origin_with_many_processes_gets_the_messages_of_a_few_while_there_are_others() {
        let mut pool = PoolRelay::default();
        let now = Instant::now();
        for process_id in 1..=160 {
            pool.join(member(process_id, &of(1)), now);
        }
        assert_eq!(pool.interval(1), SHARE_INTERVAL, "there is no other");
        pool.join(member(161, &of(2)), now);
        assert_eq!(
            [1, 161].map(|id| pool.interval(id)),
            [10 * SHARE_INTERVAL, SHARE_INTERVAL]
        );
    }

    /// One of many pods with the same certificate.
    fn pod(last: u8) -> Origin {
        Origin {
            certificate: Some("pods".into()),
            ..of(last)
        }
    }

    /// Joins a process and receives its first report.
    fn join_active(relay: &mut PeerRelay, id: u64, origin: &Origin, now: Instant) {
        relay.join("p", member(id, origin), now);
        let row = state::LoadReport {
            pool: "p".to_owned(),
            row: vec![0; LoadReportHead::BYTES],
            ..state::LoadReport::default()
        };
        relay.receive(id, row, now);
    }

    #[test]
    fn pods_with_one_certificate_have_the_share_of_an_owner_beside_another() {
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        let add = |relay: &mut PeerRelay, id, origin: &Origin| join_active(relay, id, origin, now);
        let shown = |relay: &mut PeerRelay, id: u64, ms: u64| {
            let pool = relay.pools.get_mut("p").unwrap();
            pool.expire(now + Duration::from_millis(ms));
            (pool.active_others(id), pool.proxies(id), pool.interval(id))
        };
        (1..=128).for_each(|id| add(&mut relay, id, &pod(u8::try_from(id).unwrap())));
        let alone = (127, 128, SHARE_INTERVAL);
        assert_eq!(shown(&mut relay, 1, 0), alone, "there is no other owner");
        add(&mut relay, 200, &of(200));
        let most = ACTIVE_PER_OWNER_MAX;
        assert_eq!(
            [1, 200].map(|id| shown(&mut relay, id, 100)),
            [
                (1 + most, 2 + most, 2 * SHARE_INTERVAL),
                (most, 1 + most, SHARE_INTERVAL)
            ]
        );
        (1..=65).for_each(|id| relay.leave("p", id, id));
        assert_eq!(shown(&mut relay, 200, 200), (63, 64, SHARE_INTERVAL));
        assert_eq!(shown(&mut relay, 128, 300), (63, 64, SHARE_INTERVAL));
        relay.leave("p", 200, 200);
        assert_eq!(shown(&mut relay, 128, 400), (62, 63, SHARE_INTERVAL));
    }

    #[test]
    fn a_fleet_beside_the_ext_proc_server_and_an_owner_that_left_has_no_limit() {
        let mut relay = PeerRelay::default();
        let now = Instant::now();
        let add = |relay: &mut PeerRelay, id, origin: &Origin| join_active(relay, id, origin, now);
        // The daemon's own ext_proc server has no connection, so it has no address.
        add(&mut relay, 300, &Origin::default());
        (1..=128).for_each(|id| add(&mut relay, id, &pod(u8::try_from(id).unwrap())));
        relay.join("p", member(200, &of(200)), now);
        placed(&mut relay, 200, 1_000, 3);
        relay.leave("p", 200, 200);
        let pool = relay.pools.get_mut("p").unwrap();
        assert!(pool.origins.get(&of(200)).is_some(), "its placements stay");
        pool.expire(now);
        assert_eq!(
            (pool.active_others(1), pool.interval(1)),
            (128, SHARE_INTERVAL)
        );
        assert_eq!(pool.origins.divided_by(&pod(1)), None);
    }

    #[test]
    fn what_is_no_row_counts_nothing() {
        let (pool, now) = relay();
        let mut relay = with_pool(pool, now);
        for row in [
            vec![0xff; 7],
            vec![0xff; ROW_BYTES_MAX],
            vec![0xff; ROW_BYTES_MAX + 1],
        ] {
            relay.receive(
                1,
                state::LoadReport {
                    pool: "p".to_owned(),
                    row,
                    ..state::LoadReport::default()
                },
                now,
            );
        }
        assert_eq!(
            relay
                .pools
                .get_mut("p")
                .unwrap()
                .report_without(2, Timestamp(0))
                .len(),
            LoadReportHead::BYTES
        );
    }
}
