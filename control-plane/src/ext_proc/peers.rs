//! The front among the proxies of a pool: what it has under way and placed is told to them, and theirs to it, by the daemon's relay.

use exchange::pool::{Ejection, OwnRow, PeerRow, Placement, RowHead};
use exchange::{Pool, Time};
use proto::{SHARE_BLOCKS_MAX, SHARE_EXPIRY_MS, state};
use scheduler::{EndpointRef, Incarnation, Slot};

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
        for state::Placement { slot, incarnation, blocks } in told.placements {
            if let Ok(slot) = u16::try_from(slot) {
                pool.placed(EndpointRef { slot: Slot(slot), incarnation: Incarnation(incarnation) }, &blocks);
            }
        }
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
        let placements = pool.take_placements().into_iter().filter_map(placement).collect();
        Some(state::Share { pool: name.to_owned(), row, placements, stamp: 0 })
    }
}

/// What of a placement is news.
fn placement(placed: Placement) -> Option<state::Placement> {
    let Placement { endpoint, blocks, known } = placed;
    let news = blocks.get(usize::try_from(known).ok()?..)?;
    let news = news.get(..SHARE_BLOCKS_MAX).unwrap_or(news);
    let (slot, incarnation) = (u32::from(endpoint.slot.0), endpoint.incarnation.0);
    (!news.is_empty()).then(|| state::Placement { slot, incarnation, blocks: news.to_vec() })
}
