//! Decides which connections of a listener stay open if there are too many.
//!
//! A connection is in the waiting group until its first request, and in the served group after it.
//! Each group has a maximum. When a group is full, the client address with the most connections in
//! it loses one, so one address cannot keep others out. In a group that is more than half full, an
//! address with more than its part loses one as well, so that idle connections of one address leave
//! half of the memory free. All IPv6 addresses of one network count as one, because a host chooses
//! among them itself. Clients behind a load balancer or NAT have one address, and are bound only by
//! this half if no others connect. In the waiting
//! group the address loses its oldest connection, because a proper client makes a request within
//! milliseconds. In the served group it loses its newest, so that working connections stay.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::ConnectionBudget;
use crate::network::network;

/// The maximum time from accepting a connection to its first request, including the TLS and HTTP/2
/// handshakes. A peer on the same network needs milliseconds. Clients that connect long before
/// their first request have to connect again.
pub const FIRST_REQUEST_WAIT_MAX: Duration = Duration::from_secs(10);

/// One address may have one in this many of the connections of a group that is more than half full.
const ADDRESS_PARTS: usize = 4;

/// A group with more than one in this many of its connections is busy: only then is the part of an
/// address a limit, because before that it would take from one what no other needs.
const BUSY_PARTS: usize = 2;

/// The minimum part of an address, because many proxies may share an address. It is the number of
/// streams of each kind that an address may have (`STREAMS_PER_ORIGIN_MAX`).
const ADDRESS_PART_MIN: usize = 256;

/// The connections of one listener.
#[derive(Debug)]
pub(super) struct ConnectionLimits {
    waiting: ConnectionGroup,
    served: ConnectionGroup,
    /// The number of open connections, including those that must close but are still open.
    open: usize,
    open_max: usize,
    next: u64,
    closed: ClosedConnections,
}

/// How many connections were closed, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ClosedConnections {
    /// Closed because no request came in time.
    pub(super) silent: u64,
    /// Closed because the listener was full.
    pub(super) crowded: u64,
}

/// Connections that share one maximum.
#[derive(Debug)]
struct ConnectionGroup {
    open: usize,
    open_max: usize,
    /// The maximum number of connections of each [`network`].
    of_address_max: usize,
    /// Connections of each [`network`] by number; numbers grow with time.
    by_address: HashMap<IpAddr, BTreeMap<u64, OpenConnection>>,
}

/// An open connection, which closes when this value is dropped.
#[derive(Debug)]
struct OpenConnection {
    since: Instant,
    _open: oneshot::Sender<()>,
}

/// Which connection of an address leaves a full group.
#[derive(Clone, Copy, Debug)]
enum EvictionOrder {
    Oldest,
    Newest,
}

// === impl ConnectionLimits ===

impl ConnectionLimits {
    pub(super) fn new(budget: ConnectionBudget) -> Self {
        let waiting = budget.waiting_max();
        Self {
            waiting: ConnectionGroup::new(waiting),
            served: ConnectionGroup::new(budget.served_max()),
            open: 0,
            open_max: budget.open_max(),
            next: 0,
            closed: ClosedConnections::default(),
        }
    }

    /// Registers an accepted connection. Returns the connection's number and the signal to close
    /// the connection, or `None` if the caller must drop the connection at once.
    pub(super) fn admit(
        &mut self,
        address: IpAddr,
        now: Instant,
    ) -> Option<(u64, oneshot::Receiver<()>)> {
        if self.open >= self.open_max {
            self.closed.crowded += 1;
            return None;
        }
        self.open += 1;
        let (open, closed) = oneshot::channel();
        let number = self.next;
        self.next += 1;
        self.closed.crowded += self.waiting.insert(
            address,
            number,
            OpenConnection {
                since: now,
                _open: open,
            },
            EvictionOrder::Oldest,
        );
        Some((number, closed))
    }

    /// Records that a connection made its first request.
    pub(super) fn mark_requested(&mut self, address: IpAddr, number: u64) {
        if let Some(held) = self.waiting.remove(address, number) {
            self.closed.crowded += self
                .served
                .insert(address, number, held, EvictionOrder::Newest);
        }
    }

    pub(super) fn remove(&mut self, address: IpAddr, number: u64) {
        self.open = self.open.saturating_sub(1);
        if self.waiting.remove(address, number).is_none() {
            self.served.remove(address, number);
        }
    }

    /// Closes connections that waited too long for their first request.
    pub(super) fn sweep(&mut self, now: Instant) {
        self.closed.silent += self
            .waiting
            .retain(|held| now.saturating_duration_since(held.since) < FIRST_REQUEST_WAIT_MAX);
    }

    /// Returns the numbers of closed connections since the listener was opened.
    pub(super) fn closed(&self) -> ClosedConnections {
        self.closed
    }
}

// === impl ConnectionGroup ===

impl ConnectionGroup {
    fn new(held_max: usize) -> Self {
        Self {
            open: 0,
            open_max: held_max,
            of_address_max: ADDRESS_PART_MIN.max(held_max / ADDRESS_PARTS),
            by_address: HashMap::new(),
        }
    }

    /// Adds a connection. Returns how many connections were closed to make room, possibly the new
    /// connection itself.
    fn insert(
        &mut self,
        address: IpAddr,
        number: u64,
        held: OpenConnection,
        leaves: EvictionOrder,
    ) -> u64 {
        let address = network(address);
        let of_address = self.by_address.entry(address).or_default();
        of_address.insert(number, held);
        self.open += 1;
        let is_over =
            of_address.len() > self.of_address_max && self.open > self.open_max / BUSY_PARTS;
        let loser = if is_over {
            Some(address)
        } else if self.open > self.open_max {
            self.heaviest(address)
        } else {
            None
        };
        let leaver = loser.and_then(|loser| {
            let held = self.by_address.get(&loser)?;
            let number = match leaves {
                EvictionOrder::Oldest => held.keys().next(),
                EvictionOrder::Newest => held.keys().next_back(),
            };
            number.map(|number| (loser, *number))
        });
        leaver
            .and_then(|(address, number)| self.remove(address, number))
            .map_or(0, |_| 1)
    }

    /// Returns the address with the most connections. If several have the most, it is `new`, the
    /// address of the new connection, if that is one of them. So an address never loses a
    /// connection to another address that has as many.
    fn heaviest(&self, new: IpAddr) -> Option<IpAddr> {
        let heaviest = self
            .by_address
            .iter()
            .max_by_key(|(address, held)| (held.len(), **address == new));
        heaviest.map(|(address, _)| *address)
    }

    fn remove(&mut self, address: IpAddr, number: u64) -> Option<OpenConnection> {
        let address = network(address);
        let of_address = self.by_address.get_mut(&address)?;
        let held = of_address.remove(&number)?;
        if of_address.is_empty() {
            self.by_address.remove(&address);
        }
        self.open -= 1;
        Some(held)
    }

    /// Removes the connections that do not stay, and returns their number.
    fn retain(&mut self, stays: impl Fn(&OpenConnection) -> bool) -> u64 {
        let before = self.open;
        self.by_address.retain(|_, held| {
            held.retain(|_, held| stays(held));
            !held.is_empty()
        });
        self.open = self.by_address.values().map(BTreeMap::len).sum();
        u64::try_from(before - self.open).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTACKER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 66));

    fn other(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 1, n])
    }

    /// Creates limits of 4 waiting and 12 served connections.
    fn rooms() -> ConnectionLimits {
        ConnectionLimits::new(ConnectionBudget {
            connections_max: 16,
        })
    }

    fn is_open(closed: &mut oneshot::Receiver<()>) -> bool {
        closed.try_recv() == Err(oneshot::error::TryRecvError::Empty)
    }

    #[test]
    fn silent_connections_of_one_address_do_not_keep_others_out() {
        let mut rooms = rooms();
        let now = Instant::now();
        let mut proper = rooms.admit(other(1), now).unwrap();
        let mut silent: Vec<_> = (0..4)
            .map(|_| rooms.admit(ATTACKER, now).unwrap())
            .collect();
        assert!(is_open(&mut proper.1));
        let open: Vec<bool> = silent.iter_mut().map(|s| is_open(&mut s.1)).collect();
        assert_eq!(
            open,
            [false, true, true, true],
            "the oldest of the address with the most"
        );
        rooms.remove(ATTACKER, silent[0].0);
        let mut second = rooms.admit(other(2), now).unwrap();
        assert!(is_open(&mut second.1) && is_open(&mut proper.1) && !is_open(&mut silent[1].1));
    }

    #[test]
    fn addresses_of_one_ipv6_network_do_not_keep_others_out() {
        let mut rooms = rooms();
        let now = Instant::now();
        let of = |address: &str| address.parse::<IpAddr>().unwrap();
        let mut proper = rooms.admit(of("2001:db8:0:1::1"), now).unwrap();
        let mut silent: Vec<_> = (1..=4)
            .map(|host| rooms.admit(of(&format!("2001:db8::{host}")), now).unwrap())
            .collect();
        assert!(is_open(&mut proper.1) && !is_open(&mut silent[0].1));
        let mut second = rooms.admit(of("2001:db8:0:2::1"), now).unwrap();
        assert!(is_open(&mut second.1) && is_open(&mut proper.1) && !is_open(&mut silent[1].1));
        for (host, (number, _)) in (1..=4).zip(silent) {
            rooms.remove(of(&format!("2001:db8::{host}")), number);
        }
        assert!(rooms.waiting.by_address.len() == 2 && rooms.waiting.open == 2);
    }

    #[test]
    fn a_flood_from_our_own_address_gives_way_to_us() {
        let mut rooms = rooms();
        let now = Instant::now();
        let flood: Vec<_> = (0..4)
            .map(|_| rooms.admit(ATTACKER, now).unwrap())
            .collect();
        let mut proper = rooms.admit(ATTACKER, now).unwrap();
        assert!(is_open(&mut proper.1));
        rooms.mark_requested(ATTACKER, proper.0);
        for (number, _) in flood {
            rooms.remove(ATTACKER, number);
        }
        for _ in 0..4 {
            let (number, _closed) = rooms.admit(ATTACKER, now).unwrap();
            rooms.remove(ATTACKER, number);
        }
        assert!(
            is_open(&mut proper.1),
            "waiting connections do not close a served one"
        );
    }

    #[test]
    fn served_connections_are_shared_out_by_address() {
        let mut rooms = rooms();
        let now = Instant::now();
        let mut ask = |address| {
            let (number, closed) = rooms.admit(address, now).unwrap();
            rooms.mark_requested(address, number);
            (number, closed)
        };
        let mut hoard: Vec<_> = (0..12).map(|_| ask(ATTACKER)).collect();
        let mut refused = ask(ATTACKER);
        assert!(!is_open(&mut refused.1), "its own address holds the most");
        let mut proper = ask(other(1));
        assert!(is_open(&mut proper.1));
        assert!(
            !is_open(&mut hoard[11].1) && is_open(&mut hoard[0].1),
            "the newest of the address with the most is closed"
        );
        assert_eq!(
            rooms.closed(),
            ClosedConnections {
                silent: 0,
                crowded: 2
            }
        );
    }

    #[test]
    fn a_connection_without_a_request_is_closed_in_time() {
        let mut rooms = rooms();
        let now = Instant::now();
        let mut silent = rooms.admit(ATTACKER, now).unwrap();
        let mut asking = rooms.admit(other(1), now).unwrap();
        rooms.mark_requested(other(1), asking.0);
        rooms.sweep(now + FIRST_REQUEST_WAIT_MAX / 2);
        assert!(is_open(&mut silent.1));
        rooms.sweep(now + FIRST_REQUEST_WAIT_MAX);
        assert!(!is_open(&mut silent.1) && is_open(&mut asking.1));
        assert_eq!(
            rooms.closed(),
            ClosedConnections {
                silent: 1,
                crowded: 0
            }
        );
    }

    #[test]
    fn one_address_fills_at_most_half_of_each_group() {
        let mut rooms = ConnectionLimits::new(ConnectionBudget {
            connections_max: 8_192,
        });
        let now = Instant::now();
        let mut proper = rooms.admit(other(1), now).unwrap();
        let mut silent: Vec<_> = (0..1_200)
            .map(|_| rooms.admit(ATTACKER, now).unwrap())
            .collect();
        let open: Vec<bool> = silent.iter_mut().map(|s| is_open(&mut s.1)).collect();
        assert_eq!(open.iter().filter(|open| **open).count() + 1, 2_048 / 2);
        assert!(!open[0] && open[1_199], "the oldest are closed");
        for (number, _) in silent {
            rooms.remove(ATTACKER, number);
        }
        let mut idle: Vec<_> = (0..3_200)
            .map(|_| {
                let (number, closed) = rooms.admit(ATTACKER, now).unwrap();
                rooms.mark_requested(ATTACKER, number);
                closed
            })
            .collect();
        let open: Vec<bool> = idle.iter_mut().map(is_open).collect();
        assert_eq!(open.iter().filter(|open| **open).count(), 6_144 / 2);
        assert!(open[0] && !open[3_199], "working connections stay");
        assert!(is_open(&mut proper.1));
    }

    #[test]
    fn in_a_busy_group_an_address_keeps_its_part() {
        let mut rooms = ConnectionLimits::new(ConnectionBudget {
            connections_max: 8_192,
        });
        let now = Instant::now();
        let mut admit = |address| rooms.admit(address, now).unwrap().1;
        let mut crowd: Vec<_> = (0..4)
            .flat_map(|n| (0..256).map(move |_| other(n)))
            .map(&mut admit)
            .collect();
        let mut hoard: Vec<_> = (0..600).map(|_| admit(ATTACKER)).collect();
        let open = |all: &mut Vec<oneshot::Receiver<()>>| {
            let open = all.iter_mut().map(is_open);
            open.filter(|is_open| *is_open).count()
        };
        assert_eq!(open(&mut hoard), 2_048 / 4);
        assert_eq!(open(&mut crowd), 4 * 256);
    }

    #[test]
    fn descriptors_are_bounded_also_while_connections_close() {
        let mut rooms = rooms();
        let now = Instant::now();
        let admitted = (0..1_000).map_while(|_| rooms.admit(ATTACKER, now)).count();
        assert_eq!(
            admitted,
            ConnectionBudget {
                connections_max: 16
            }
            .open_max()
        );
    }
}
