//! What this VM tells the other VMs of a pool, and what it hears of them: all of a process pick as one.
//!
//! ```text
//!  pick, first token, end, failure ──► own row (and ring), at once
//!  pick ◄── rows of the others, at most every 2 ms ── rings of the others, at most every 10 ms (by then mostly read when some request ended)
//! ```
//! Nobody is woken on the request path: that costs up to 35 µs a thread, a look costs 0.7 µs a VM. Rows are preferred over gauges, which are
//! atomics of the process: a hundred endpoints with two numbers each are 15 µs of gauges to read, and a VM that traps would leave its share
//! in them for ever.
//!
//! The load of an endpoint is the sum of the rows as they are now, so it needs no correction by time: a scraped metric never enters it.

use exchange::{Pool, Time};

use super::ring::{Budget, Reader, Writer};
use super::roll::Roll;
use super::rows::Row;
use crate::host::{Expect, Host};

/// Rows of others are read anew when the last look is so long ago, in ms.
const ROWS_MS: u64 = 2;
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
pub enum Moment {
    /// A request waits for its decision.
    Pick,
    /// A request has ended.
    End,
    /// Nobody waits.
    Tick,
}

/// This VM among the others.
#[derive(Clone, Copy, Debug)]
pub struct Me<'a> {
    /// Its identity.
    pub vm: u64,
    /// Its seat.
    pub seat: u16,
    /// All VMs.
    pub roll: &'a Roll,
}

/// One pool's share of it.
#[derive(Debug)]
pub struct Sharing {
    pool: Box<str>,
    /// The seat this VM writes at, and the key of its row.
    own: Option<(u16, String)>,
    /// By seat.
    peers: Vec<Peer>,
    ring: Writer,
    row: Row,
    /// The pool's changes that were told, and when.
    told: Option<(u64, Time)>,
    rows_at: Option<Time>,
    rings_at: Option<Time>,
    /// Is the sum of the others that of the rows last seen, and of the roster in force?
    summed: bool,
}

/// Another VM.
#[derive(Debug)]
struct Peer {
    key: String,
    /// Of the last write seen.
    token: Option<u32>,
    row: Row,
    /// Who has the seat; 0 when nobody does.
    vm: u64,
    /// Is its load in the sum?
    counts: bool,
    ring: Reader,
}

// === impl Sharing ===

impl Sharing {
    /// Of `pool`, which is a name from the filter's configuration: a fixed set.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        Self {
            pool: pool.into(),
            own: None,
            peers: Vec::new(),
            ring: Writer::new(pool),
            row: Row::default(),
            told: None,
            rows_at: None,
            rings_at: None,
            summed: false,
        }
    }

    /// Another roster is in force: other lives of endpoints count.
    pub fn roster_changed(&mut self) {
        self.summed = false;
    }

    /// Tells the others what changed here since the last time. At a tick also what did not, so that it goes on to count.
    pub fn tell<H: Host>(&mut self, host: &H, me: Me<'_>, pool: &mut Pool, now: Time, moment: Moment) {
        let changes = pool.changes();
        let news = match self.told {
            None => changes > 0,
            Some((told, _)) => told != changes || (moment == Moment::Tick && !self.row.loads.is_empty()),
        };
        if !news {
            return;
        }
        self.sit(me);
        for placement in pool.take_placements() {
            self.ring.append(host, placement.endpoint, &placement.blocks);
        }
        self.ring.flush(host);
        let row = &mut self.row;
        (row.vm, row.written, row.ring) = (me.vm, now, self.ring.position());
        row.loads.clear();
        row.loads.extend(pool.in_flight().rows());
        row.ejections.clear();
        row.ejections.extend_from_slice(pool.ejections());
        if let Some((_, key)) = &self.own {
            // What the host does not take is told with the next change, or the next tick.
            let told = host.share(key, &row.to_bytes(), Expect::Any).is_ok();
            self.told = told.then_some((changes, now)).or(self.told);
        }
    }

    /// Takes in what the others told, as far as it is due. Returns how much of their rings was lost.
    pub fn hear<H: Host>(&mut self, host: &H, me: Me<'_>, pool: &mut Pool, now: Time, moment: Moment) -> u32 {
        let due = |at: Option<Time>, ms: u64| moment == Moment::Tick || at.is_none_or(|at| now.ms_since(at) >= ms);
        let rings_ms = if moment == Moment::Pick { RINGS_AT_PICK_MS } else { RINGS_AT_END_MS };
        let rings = due(self.rings_at, rings_ms) && pool.prefixes().bytes() > 0;
        if (moment != Moment::End || rings) && due(self.rows_at, ROWS_MS) {
            self.rows_at = Some(now);
            self.hear_rows(host, me, pool, now);
        }
        if rings { self.hear_rings(host, pool, now, moment) } else { 0 }
    }

    fn sit(&mut self, me: Me<'_>) {
        if self.own.as_ref().is_none_or(|(seat, _)| *seat != me.seat) {
            self.own = Some((me.seat, key(&self.pool, me.seat)));
        }
        self.ring.sit(me.vm, me.seat);
    }

    fn hear_rows<H: Host>(&mut self, host: &H, me: Me<'_>, pool: &mut Pool, now: Time) {
        for peer in &mut self.peers {
            peer.vm = 0;
        }
        for (seat, vm) in me.roll.alive(now).filter(|(_, row)| row.vm != me.vm).map(|(seat, row)| (seat, row.vm)) {
            while self.peers.len() <= usize::from(seat) {
                let seat = u16::try_from(self.peers.len()).unwrap_or(u16::MAX);
                self.peers.push(Peer::new(key(&self.pool, seat)));
            }
            if let Some(peer) = self.peers.get_mut(usize::from(seat)) {
                peer.vm = vm;
            }
        }
        for peer in &mut self.peers {
            let news = peer.vm != 0 && peer.look(host);
            if news && peer.row.vm == peer.vm {
                peer.row.ejections.iter().for_each(|ejection| pool.learn(*ejection, now));
            }
            let counts = peer.row.vm == peer.vm && peer.vm != 0 && peer.row.is_fresh(now);
            self.summed &= counts == peer.counts && !(counts && news);
            peer.counts = counts;
        }
        if !std::mem::replace(&mut self.summed, true) {
            pool.others(self.peers.iter().filter(|peer| peer.counts).flat_map(|peer| peer.row.loads.iter().copied()));
        }
    }

    fn hear_rings<H: Host>(&mut self, host: &H, pool: &mut Pool, now: Time, moment: Moment) -> u32 {
        let blocks = match moment {
            Moment::Pick => BLOCKS_AT_PICK,
            Moment::End => BLOCKS_AT_END,
            Moment::Tick => BLOCKS_AT_TICK,
        };
        let (mut budget, mut all) = (Budget { blocks, gaps: 0 }, true);
        for (seat, peer) in (0_u16..).zip(&mut self.peers) {
            if peer.vm != 0 && peer.row.vm == peer.vm {
                let end = peer.row.ring;
                all &=
                    peer.ring.read(host, (&self.pool, seat, peer.vm), end, &mut budget, |endpoint, blocks| pool.placed(endpoint, blocks));
            }
        }
        if all {
            self.rings_at = Some(now);
        }
        budget.gaps
    }
}

/// Where the row of the VM at `seat` is.
fn key(pool: &str, seat: u16) -> String {
    format!("switchpoint/1/pool/{pool}/row/{seat}")
}

// === impl Peer ===

impl Peer {
    fn new(key: String) -> Self {
        Self { key, token: None, row: Row::default(), vm: 0, counts: false, ring: Reader::default() }
    }

    /// Reads the row if it was written since the last look; says whether it was.
    fn look<H: Host>(&mut self, host: &H) -> bool {
        let Ok(Some(shared)) = host.shared(&self.key) else { return false };
        if self.token == Some(shared.token) {
            return false;
        }
        self.token = Some(shared.token);
        self.row.read(&shared.bytes);
        true
    }
}

#[cfg(test)]
mod tests;
