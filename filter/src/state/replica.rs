//! One pool in one VM: what the daemon says of it, as far as this VM has taken it over, beside what the VM knows itself.
//!
//! A replica changes only in [`Replica::install`] and [`Replica::measure`], whole or not at all, never while a request is being decided (a VM that replaced a lost one does it before its first). Both are given
//! what [`decode`] made of a message: the leader decodes it off the wire, everybody else off the notice board.

use std::ops::Deref;

use exchange::{Pool, Time};
use pool_state::{DURATION_BOUNDS_MS, Histogram, Observed};
use prost::Message;
use proto::state::{self, daemon_message};
use scheduler::{Snapshot, Version};

use super::board::{Board, Seen};
use super::observed;
use super::outward::Outward;
use super::roll::{Roll, Row};
use super::sharing::Sharing;
use crate::host::{Host, Result};

/// One pool.
#[derive(Debug)]
pub struct Replica {
    /// Its name with the daemon.
    pub name: Box<str>,
    /// Where the leader puts up what it heard.
    pub board: Board,
    /// What requests are decided with.
    pub pool: Pool,
    /// Time a pick took, µs.
    pub pick_us: Histogram,
    /// What this VM and the others tell each other.
    pub sharing: Sharing,
    /// What this VM tells other proxies while it leads.
    pub outward: Outward,
    /// Where the leader puts up what the daemon learned.
    pub learned_board: Board,
    /// What this VM tells the daemon of ended requests.
    observed: observed::Writer,
    /// By seat, how far the leader has read what other VMs tell so.
    observed_by: Vec<observed::Reader>,
    learned: Version,
    learned_seen: Option<Seen>,
    version: Version,
    metrics_sequence: u64,
    metrics_at: Option<Time>,
    seen: Option<Seen>,
}

/// What a message of the daemon comes to.
#[derive(Debug)]
pub enum Update {
    /// The daemon's greeting.
    Welcome(state::Welcome),
    /// A whole pool but for its metrics.
    Roster(Box<proto::Roster>),
    /// A pool in force with other metrics.
    Metrics {
        /// Its name.
        pool: String,
        /// The snapshot in force, with these metrics.
        snapshot: Box<Snapshot>,
        /// Grows with every message of a term.
        sequence: u64,
    },
    /// What the other proxies of a pool have under way, and placed.
    Peers(state::Peers),
    /// What was learned of a pool.
    Learned(Box<proto::Learned>),
    /// Nothing to us: of a pool we have no roster of, or of a newer daemon.
    Nothing,
}

/// A message that was refused whole. The daemon is at fault; the same message will be refused again.
#[derive(Clone, Debug, PartialEq)]
pub struct Refused {
    /// The pool it is of; empty when not even that could be read.
    pub pool: String,
    /// The version of the roster it is, if it is one.
    pub version: Option<state::Version>,
    /// What is wrong with it.
    pub why: String,
}

/// What a look at the board brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refreshed {
    /// A roster was taken over.
    pub roster: bool,
    /// Metrics were taken over.
    pub metrics: bool,
    /// What was learned was taken over.
    pub learned: bool,
    /// What is on the board could not be read.
    pub refused: bool,
}

// === impl Replica ===

impl Replica {
    /// A pool nothing is known of yet, without a prefix index: a tick brings that, or the first request.
    #[must_use]
    pub fn new(name: &str, seed: u64) -> Self {
        Self {
            name: name.into(),
            board: Board::new(name),
            pool: Pool::new(seed, 0),
            pick_us: Histogram::default(),
            sharing: Sharing::new(name),
            outward: Outward::default(),
            learned_board: Board::of_learned(name),
            observed: observed::Writer::default(),
            observed_by: Vec::new(),
            learned: Version::default(),
            learned_seen: None,
            version: Version::default(),
            metrics_sequence: 0,
            metrics_at: None,
            seen: None,
        }
    }

    /// Is anything known of the pool?
    #[must_use]
    pub fn has_state(&self) -> bool {
        self.pool.snapshot().is_some()
    }

    /// The version in force here.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The newest metrics in force here.
    #[must_use]
    pub fn metrics_sequence(&self) -> u64 {
        self.metrics_sequence
    }

    /// When the metrics in force were received; `None` before any.
    #[must_use]
    pub fn metrics_at(&self) -> Option<Time> {
        self.metrics_at
    }

    /// Notes that a pick took `us` microseconds.
    #[expect(clippy::cast_precision_loss, reason = "a pick is far below 2^52 µs")]
    pub fn pick_took(&mut self, us: u64) {
        self.pick_us.record(us as f64, &DURATION_BOUNDS_MS);
    }

    /// Takes over what is new on the board. What cannot be read stays there, and what was in force stays in force.
    ///
    /// # Errors
    /// What the host says.
    pub fn refresh<H: Host>(&mut self, host: &H) -> Result<Refreshed> {
        let mut refreshed = self.refresh_learned(host)?;
        let Some(seen) = self.board.look(host)?.filter(|seen| self.seen != Some(*seen)) else { return Ok(refreshed) };
        // A side that is being replaced this moment is looked for again; one that cannot be read is not.
        let mut settled = true;
        if seen.head.version > self.version {
            match self.board.roster(host, seen.head)? {
                None => settled = false,
                Some(notice) => match decode(notice.message(), |_| None::<&Self>) {
                    Ok(Update::Roster(roster)) => {
                        self.install(*roster);
                        refreshed.roster = true;
                    }
                    _ => refreshed.refused = true,
                },
            }
        }
        if seen.head.version == self.version && seen.head.metrics_sequence > self.metrics_sequence {
            match self.board.metrics(host, seen.head)? {
                None => settled = false,
                Some(notice) => match decode(notice.message(), |_| Some(&*self)) {
                    Ok(Update::Metrics { snapshot, sequence, .. }) => {
                        self.measure(*snapshot, sequence, notice.received);
                        refreshed.metrics = true;
                    }
                    _ => refreshed.refused = true,
                },
            }
        }
        self.seen = settled.then_some(seen);
        Ok(refreshed)
    }

    fn refresh_learned<H: Host>(&mut self, host: &H) -> Result<Refreshed> {
        let mut refreshed = Refreshed::default();
        let Some(seen) = self.learned_board.look(host)?.filter(|seen| self.learned_seen != Some(*seen)) else { return Ok(refreshed) };
        let notice = if seen.head.version > self.learned { self.learned_board.roster(host, seen.head)? } else { None };
        // As with the roster: what is being replaced is looked for again, what cannot be read is not.
        self.learned_seen = (notice.is_some() || seen.head.version <= self.learned).then_some(seen);
        if let Some(notice) = notice {
            match decode(notice.message(), |_| None::<&Self>) {
                Ok(Update::Learned(learned)) => {
                    self.learn(*learned);
                    refreshed.learned = true;
                }
                _ => refreshed.refused = true,
            }
        }
        Ok(refreshed)
    }

    /// What ended requests told the VMs of the process since the last time: a message for each that has any.
    pub fn read_observed<H: Host>(&mut self, host: &H, roll: &Roll, now: Time) -> Vec<state::Observations> {
        let Self { name, observed_by, .. } = self;
        let read = |(seat, row): (u16, Row)| {
            while observed_by.len() <= usize::from(seat) {
                observed_by.push(observed::Reader::default());
            }
            observed_by.get_mut(usize::from(seat))?.read(host, (name, seat, row.vm))
        };
        roll.alive(now).filter_map(read).collect()
    }

    /// Puts what ended requests told here where the VM that leads finds it.
    pub fn tell_observed<H: Host>(&mut self, host: &H, seat: u16, vm: u64) {
        let (_, rows) = self.pool.take_observed();
        self.observed.append(host, (&self.name, seat, vm), rows.iter().map(Observed::to_bytes));
    }

    /// Takes over what was learned.
    pub fn learn(&mut self, learned: proto::Learned) {
        self.learned = learned.version;
        self.pool.learned(learned.step, learned.latency);
    }

    /// Takes over a roster. Endpoints that stay keep their metrics until the next come.
    pub fn install(&mut self, roster: proto::Roster) {
        let proto::Roster { snapshot, hash_secret, staleness_max_ms, .. } = roster;
        self.version = snapshot.version();
        self.metrics_sequence = 0;
        self.pool.install(snapshot, hash_secret, staleness_max_ms);
        self.sharing.roster_changed();
    }

    /// Takes over metrics that were received at `at`.
    pub fn measure(&mut self, snapshot: Snapshot, sequence: u64, at: Time) {
        self.metrics_sequence = sequence;
        self.metrics_at = Some(at);
        self.pool.refresh(snapshot, at);
    }
}

/// Reads a message of the daemon; `find` gives the replica of a pool.
///
/// # Errors
/// [`Refused`] says why nothing of it may be used.
pub fn decode<R: Deref<Target = Replica>>(message: &[u8], find: impl FnOnce(&str) -> Option<R>) -> Result<Update, Refused> {
    use daemon_message::Message::{Learned, Metrics, Peers, Roster, Welcome};
    #[cfg(feature = "drill")]
    crate::drill::obey(message);
    let unreadable = |e: prost::DecodeError| Refused { pool: String::new(), version: None, why: e.to_string() };
    match state::DaemonMessage::decode(message).map_err(unreadable)?.message {
        Some(Welcome(welcome)) => Ok(Update::Welcome(welcome)),
        Some(Peers(peers)) => Ok(Update::Peers(peers)),
        Some(Learned(learned)) => {
            let pool = learned.pool.clone();
            let refused = |why: proto::InvalidState| Refused { pool, version: None, why: why.to_string() };
            proto::learned(learned).map(|learned| Update::Learned(Box::new(learned))).map_err(refused)
        }
        Some(Roster(roster)) => {
            let (pool, version) = (roster.pool.clone(), roster.version);
            let refused = |why: proto::InvalidState| Refused { pool, version, why: why.to_string() };
            proto::roster(roster).map(|roster| Update::Roster(Box::new(roster))).map_err(refused)
        }
        Some(Metrics(metrics)) => {
            let Some(replica) = find(&metrics.pool) else { return Ok(Update::Nothing) };
            let Some(snapshot) = replica.pool.snapshot() else { return Ok(Update::Nothing) };
            match proto::metrics(&metrics, snapshot) {
                Ok(snapshot) => Ok(Update::Metrics { pool: metrics.pool, snapshot: Box::new(snapshot), sequence: metrics.sequence }),
                // Of a roster that was refused, or is not here yet.
                Err(proto::InvalidState::OtherRoster) => Ok(Update::Nothing),
                Err(why) => Err(Refused { pool: metrics.pool, version: None, why: why.to_string() }),
            }
        }
        None => Ok(Update::Nothing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeHost, metrics_message, roster_message};

    fn queues(replica: &Replica) -> Vec<Option<f32>> {
        replica.pool.snapshot().unwrap().metrics().iter().map(|m| m.queue_depth).collect()
    }

    #[test]
    fn a_replica_follows_the_board_whole() {
        let host = FakeHost::new();
        let mut replica = Replica::new("default", 1);
        assert_eq!(replica.refresh(&host).unwrap(), Refreshed::default());
        assert!(!replica.has_state());

        let v1 = Version { term: 3, sequence: 1 };
        replica.board.post_roster(&host, 1, v1, &roster_message("default", v1, &["10.0.0.1:1", "10.0.0.2:1"]), host.now()).unwrap();
        replica.board.post_metrics(&host, 1, (v1, 2), &metrics_message("default", v1, 2, &[1.0, 2.0]), host.now()).unwrap();
        assert_eq!(replica.refresh(&host).unwrap(), Refreshed { roster: true, metrics: true, ..Refreshed::default() });
        assert_eq!((replica.version(), queues(&replica)), (v1, vec![Some(1.0), Some(2.0)]));
        assert_eq!(replica.refresh(&host).unwrap(), Refreshed::default(), "nothing new");

        let v2 = Version { term: 3, sequence: 3 };
        replica.board.post_roster(&host, 1, v2, &roster_message("default", v2, &["10.0.0.9:1", "10.0.0.2:1"]), host.now()).unwrap();
        assert_eq!(replica.refresh(&host).unwrap(), Refreshed { roster: true, ..Refreshed::default() });
        assert_eq!(queues(&replica), [None, Some(2.0)], "an endpoint that stays keeps its metrics, a new one has none");
    }

    #[test]
    fn what_cannot_be_read_leaves_all_as_it_was_and_is_read_once() {
        let host = FakeHost::new();
        let mut replica = Replica::new("default", 1);
        let v1 = Version { term: 3, sequence: 1 };
        replica.board.post_roster(&host, 1, v1, &roster_message("default", v1, &["10.0.0.1:1"]), host.now()).unwrap();
        replica.refresh(&host).unwrap();
        replica.board.post_roster(&host, 1, Version { term: 3, sequence: 2 }, b"\xff\xff", host.now()).unwrap();
        assert!(replica.refresh(&host).unwrap().refused);
        assert_eq!(replica.version(), v1);
        assert_eq!(replica.refresh(&host).unwrap(), Refreshed::default());
    }

    #[test]
    fn refusals_name_the_roster_and_what_is_wrong() {
        let v = Version { term: 1, sequence: 2 };
        let refused = decode(&roster_message("p", v, &["localhost:1"]), |_| None::<&Replica>).unwrap_err();
        assert_eq!((refused.pool.as_str(), refused.version.map(|v| v.sequence)), ("p", Some(2)));
        assert!(refused.why.contains("localhost:1"), "{}", refused.why);
        assert_eq!(decode(b"\xff", |_| None::<&Replica>).unwrap_err().pool, "");
        assert!(matches!(decode(b"", |_| None::<&Replica>), Ok(Update::Nothing)), "a message of a newer daemon");
    }
}
