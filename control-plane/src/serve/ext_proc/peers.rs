//! The front among the proxies of a pool: what it has under way and placed is told to them, and theirs to it, by the daemon's relay.

use exchange::{Pool, Time};
use pool_state::{Ejection, OwnRow, PeerRow, Placement, RowHead};
use proto::{SHARE_EXPIRY_MS, placements, state};

/// A row in which nothing changed is told again after so long, in ms: four times before it would count no more.
const AGAIN_MS: u64 = SHARE_EXPIRY_MS / 4;

/// One pool's share of it.
#[derive(Debug, Default)]
pub struct Peers {
    joined: bool,
    /// Proxies of the pool, the front included; 0 while nobody said.
    proxies: u32,
    own: OwnRow,
    told: Option<(u64, Time)>,
    others: PeerRow,
    heard_at: Time,
}

// === impl Peers ===

impl Peers {
    /// From now on it is one of them. False when it was already.
    pub fn join(&mut self) -> bool {
        !std::mem::replace(&mut self.joined, true)
    }

    /// Is there anybody to tell?
    #[must_use]
    pub fn has_listeners(&self) -> bool {
        self.joined && self.proxies > 1
    }

    /// Takes in what all others have under way, and what they placed.
    pub fn heard(&mut self, pool: &mut Pool, mut told: state::Peers, now: Time) {
        self.proxies = told.proxies;
        self.heard_at = now;
        pool.tell_placements(self.has_listeners());
        if (RowHead { vm: RowHead::OUTSIDE, written: now, ring: 0 }).receive(&mut told.row) {
            if pool.read_row(&mut self.others, told.row, true) {
                pool.put_slos_together([&self.others]);
            }
            self.others.ejections().for_each(|told| pool.learn(Ejection { outside: true, ..told }, now));
        }
        placements::each(&told.placements).for_each(|(endpoint, blocks)| pool.placed(endpoint, &blocks, now));
    }

    /// Another roster is in force.
    pub fn count_anew(&self, pool: &mut Pool) {
        pool.count_anew([&self.others]);
    }

    /// What the others said counts no more once they fell silent.
    pub fn expire(&mut self, pool: &mut Pool, now: Time) {
        let counts = self.others.counts() && now.ms_since(self.heard_at) < SHARE_EXPIRY_MS;
        if pool.count_row(&mut self.others, counts) {
            pool.put_slos_together([&self.others]);
        }
    }

    /// What is to be told now, if anything.
    pub fn share(&mut self, name: &str, pool: &mut Pool, now: Time) -> Option<state::Share> {
        let changes = pool.changes();
        let due = match self.told {
            None => changes > 0,
            Some((told, at)) => told != changes || (!self.own.is_idle() && now.ms_since(at) >= AGAIN_MS),
        };
        if !self.has_listeners() || !due {
            return None;
        }
        self.told = Some((changes, now));
        let row = pool.write_row(&mut self.own, RowHead { written: now, ..RowHead::default() }).to_vec();
        let mut told = Vec::new();
        for Placement { endpoint, blocks, known } in pool.take_placements() {
            let news = usize::try_from(known).ok().and_then(|known| blocks.get(known..)).unwrap_or_default();
            if !news.is_empty() {
                placements::push(&mut told, endpoint, news);
            }
        }
        Some(state::Share { pool: name.to_owned(), row, placements: told, stamp: 0 })
    }
}
