//! The front among the proxies of a pool: what it has under way and placed is told to them, and theirs to it, by the daemon's relay.

use exchange::{ManagedPool, Timestamp};
use pool_state::{Ejection, LoadReportHead, OwnLoadReport, PeerLoadReport, Placement};
use proto::{SHARE_EXPIRY_MS, placements, state};

/// A row in which nothing changed is told again after so long, in ms: four times before it would count no more.
const AGAIN_MS: u64 = SHARE_EXPIRY_MS / 4;

/// One pool's share of it.
#[derive(Debug, Default)]
pub struct LocalPeer {
    joined: bool,
    /// Proxies of the pool, the front included; 0 while nobody said.
    proxies: u32,
    own: OwnLoadReport,
    published: Option<(u64, Timestamp)>,
    others: PeerLoadReport,
    received_at: Timestamp,
}

// === impl LocalPeer ===

impl LocalPeer {
    /// From now on it is one of them. False when it was already.
    pub fn join(&mut self) -> bool {
        !std::mem::replace(&mut self.joined, true)
    }

    /// Whether anything publishes them.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.joined && self.proxies > 1
    }

    /// Takes in what all others have under way, and what they placed.
    pub fn receive(&mut self, pool: &mut ManagedPool, mut told: state::PeerLoad, now: Timestamp) {
        self.proxies = told.proxies;
        self.received_at = now;
        pool.set_placement_publishing(self.has_peers());
        if (LoadReportHead { vm: LoadReportHead::OUTSIDE, written: now, ring: 0 }).receive(&mut told.row) {
            if pool.read_load_report(&mut self.others, told.row, true) {
                pool.recompute_peer_slos([&self.others]);
            }
            self.others.ejections().for_each(|told| pool.learn_ejection(Ejection { outside: true, ..told }, now));
        }
        placements::each(&told.placements).for_each(|(endpoint, blocks)| pool.record_peer_placement(endpoint, &blocks, now));
    }

    /// Another pool update is in force.
    pub fn recount(&self, pool: &mut ManagedPool) {
        pool.recount_load_reports([&self.others]);
    }

    /// What the others said counts no more once they fell silent.
    pub fn expire(&mut self, pool: &mut ManagedPool, now: Timestamp) {
        let counts = self.others.counts() && now.ms_since(self.received_at) < SHARE_EXPIRY_MS;
        if pool.count_load_report(&mut self.others, counts) {
            pool.recompute_peer_slos([&self.others]);
        }
    }

    /// What is to be told now, if anything.
    pub fn next_report(&mut self, name: &str, pool: &mut ManagedPool, now: Timestamp) -> Option<state::LoadReport> {
        let changes = pool.changes();
        let due = match self.published {
            None => changes > 0,
            Some((told, at)) => told != changes || (!self.own.is_idle() && now.ms_since(at) >= AGAIN_MS),
        };
        if !self.has_peers() || !due {
            return None;
        }
        self.published = Some((changes, now));
        let row = pool.write_load_report(&mut self.own, LoadReportHead { written: now, ..LoadReportHead::default() }).to_vec();
        let mut told = Vec::new();
        for Placement { endpoint, blocks, known } in pool.take_placements() {
            let news = usize::try_from(known).ok().and_then(|known| blocks.get(known..)).unwrap_or_default();
            if !news.is_empty() {
                placements::push(&mut told, endpoint, news);
            }
        }
        Some(state::LoadReport { pool: name.to_owned(), row, placements: told, stamp: 0 })
    }
}
