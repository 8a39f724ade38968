//! The request bodies of one host that are not complete yet. Their total size is bounded. A client
//! takes no room from others by sending slowly, or by sending few bytes that a decompressor makes
//! large. Each body counts with what its stream costs Envoy, from its headers on, so a client takes
//! no room from others by many bodies that do not arrive either.
//!
//! Some short bodies are not counted. So a request costs no memory and no search here while bodies
//! arrive as fast as usual.
//!
//! Each client has an equal share of the total, which applies only while other clients need room.
//! If there is no room, the host refuses the costliest body (bytes times time) of the clients above
//! their share. A body does not displace fast bodies of its own client: then it is refused itself.
//! A refused body of another stream stays in memory until the host refuses it. So a host holds at
//! most twice the total and one piece.

use pool_state::Timestamp;

/// The cost of a stream without its body, in bytes, which counts toward the total. Envoy 1.40 needs
/// 20 KB for an HTTP/2 stream, and 13 KB more for the longest headers (16 KiB).
const STREAM_BYTES: usize = 32 << 10;

/// The same cost if the body has no declared length. Then a decompressor may read the body, because
/// a decompressor removes the length. With the `chunk_size` of the shipped Envoy files, gzip needs
/// about 75 KB for its state, window and chunk.
pub const STREAM_WITHOUT_LENGTH_BYTES: usize = 128 << 10;

/// The maximum number of bodies that are not counted, while they are shorter than
/// `COUNTED_BYTES_MIN`. They cost Envoy at most 18 MiB. If bodies arrive within 10 ms, a worker
/// that gets 10,000 requests a second awaits 100 bodies.
pub const UNCOUNTED_MAX: usize = 128;

/// The minimum length of a body that counts in any case.
const COUNTED_BYTES_MIN: usize = 16_384;

/// A body is slow once it has been arriving for this time. In this time a line of 10 Mbit/s
/// delivers a prompt of 250,000 tokens.
const SLOW_MS: u64 = 1_000;

/// How the request body of a stream counts.
#[derive(Debug, Default)]
pub enum AwaitedBody {
    /// The stream awaits no body.
    #[default]
    None,
    /// The body is one of the first `UNCOUNTED_MAX`.
    Uncounted,
    Counted(CountedBody),
}

/// The index of a body among all that count, until [`BodiesInProgress::end`].
#[derive(Debug)]
pub struct CountedBody(usize);

#[derive(Debug)]
struct BodyInProgress<S> {
    /// The index of its client.
    client: usize,
    bytes: usize,
    since: Timestamp,
    stream: S,
    is_refused: bool,
}

/// The bodies of one client that are not refused. Without any, the entry is free.
#[derive(Debug, Default)]
struct ClientBodies {
    /// The client's hash ([`crate::RequestDriver::client`]).
    client: u64,
    bodies: usize,
    bytes: usize,
}

/// All unfinished request bodies of a host. `S` names a stream.
#[derive(Debug)]
pub struct BodiesInProgress<S> {
    /// The bodies that count, and free entries.
    bodies: Vec<Option<BodyInProgress<S>>>,
    clients: Vec<ClientBodies>,
    /// The bytes of all bodies that are not refused.
    bytes: usize,
    /// The number of bodies that are not counted.
    uncounted: usize,
    refused: Vec<S>,
}

/// Whether a body may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyRoom {
    /// There is room in the total.
    Free,
    /// There is room, because the host refuses bodies of other streams.
    AfterRefusals,
    /// There is no room, and this body must be refused.
    None,
}

/// Returns what a stream and `size` bytes of its body cost Envoy.
#[must_use]
pub fn cost_bytes(size: usize, has_length: bool) -> usize {
    size.saturating_add(if has_length {
        STREAM_BYTES
    } else {
        STREAM_WITHOUT_LENGTH_BYTES
    })
}

// === impl AwaitedBody ===

impl AwaitedBody {
    /// Whether the body counts once it has `size` bytes.
    #[must_use]
    pub fn counts(&self, size: usize) -> bool {
        size >= COUNTED_BYTES_MIN || matches!(self, Self::Counted(_))
    }
}

// === impl BodyInProgress ===

impl<S> BodyInProgress<S> {
    fn is_slow(&self, now: Timestamp) -> bool {
        now.ms_since(self.since) >= SLOW_MS
    }

    /// Returns the cost so far, in bytes times milliseconds. The number of bytes decides between
    /// two new bodies.
    fn cost(&self, now: Timestamp) -> (u64, usize) {
        let bytes = self.bytes;
        (
            (bytes as u64).saturating_mul(now.ms_since(self.since)),
            bytes,
        )
    }
}

// === impl BodiesInProgress ===

impl<S> Default for BodiesInProgress<S> {
    fn default() -> Self {
        Self {
            bodies: Vec::new(),
            clients: Vec::new(),
            bytes: 0,
            uncounted: 0,
            refused: Vec::new(),
        }
    }
}

impl<S: Clone> BodiesInProgress<S> {
    /// Whether no body is awaited, not even a refused one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0 && self.uncounted == 0 && self.bodies.iter().all(Option::is_none)
    }

    /// Begins to await a body without counting it. Returns false if too many are not counted.
    pub fn await_uncounted(&mut self) -> bool {
        let may = self.uncounted < UNCOUNTED_MAX;
        self.uncounted = self.uncounted.saturating_add(may.into());
        may
    }

    /// Records that the stream no longer awaits the body.
    pub fn end(&mut self, body: AwaitedBody) {
        match body {
            AwaitedBody::None => {}
            AwaitedBody::Uncounted => self.uncounted = self.uncounted.saturating_sub(1),
            AwaitedBody::Counted(counted) => {
                let CountedBody(place) = counted;
                let _ = self.refuse(place);
                if let Some(body) = self.bodies.get_mut(place) {
                    *body = None;
                }
            }
        }
    }

    /// Begins to count a body of this client.
    pub fn begin(&mut self, client: u64, stream: S, now: Timestamp) -> CountedBody {
        let body = BodyInProgress {
            client: self.begin_of_client(client),
            bytes: 0,
            since: now,
            stream,
            is_refused: false,
        };
        let free = self.bodies.iter().position(Option::is_none);
        let place = free.unwrap_or(self.bodies.len());
        match self.bodies.get_mut(place) {
            Some(empty) => *empty = Some(body),
            None => self.bodies.push(Some(body)),
        }
        CountedBody(place)
    }

    /// Counts one more body of this client. Returns the index of the client.
    fn begin_of_client(&mut self, client: u64) -> usize {
        let clients = &mut self.clients;
        let known = clients
            .iter()
            .position(|known| known.client == client && known.bodies > 0);
        let place = known
            .or_else(|| clients.iter().position(|known| known.bodies == 0))
            .unwrap_or(clients.len());
        if place == clients.len() {
            clients.push(ClientBodies::default());
        }
        if let Some(entry) = clients.get_mut(place) {
            entry.client = client;
            entry.bodies = entry.bodies.saturating_add(1);
        }
        place
    }

    /// Records that the body and its stream cost `bytes` bytes now. `bytes_max` is the maximum
    /// total.
    pub fn grow(
        &mut self,
        &CountedBody(place): &CountedBody,
        bytes: usize,
        bytes_max: usize,
        now: Timestamp,
    ) -> BodyRoom {
        let Some(Some(body)) = self.bodies.get_mut(place) else {
            return BodyRoom::None;
        };
        if body.is_refused {
            return BodyRoom::None;
        }
        let more = bytes.saturating_sub(body.bytes);
        body.bytes = body.bytes.saturating_add(more);
        self.bytes = self.bytes.saturating_add(more);
        let client = body.client;
        if let Some(client) = self.clients.get_mut(client) {
            client.bytes = client.bytes.saturating_add(more);
        }
        let mut room = BodyRoom::Free;
        while self.bytes > bytes_max {
            let costliest = self
                .costliest(client, bytes_max, now)
                .filter(|other| *other != place);
            let Some(other) = costliest else {
                let _ = self.refuse(place);
                return BodyRoom::None;
            };
            let stream = self.refuse(other);
            self.refused.extend(stream);
            room = BodyRoom::AfterRefusals;
        }
        room
    }

    /// Whether a body that counts has been arriving for at least `SLOW_MS`.
    #[must_use]
    pub fn is_slow(&self, body: &AwaitedBody, now: Timestamp) -> bool {
        let AwaitedBody::Counted(CountedBody(place)) = body else {
            return false;
        };
        matches!(self.bodies.get(*place), Some(Some(body)) if body.is_slow(now))
    }

    /// Returns the next stream to refuse. The filter may refuse it only in a root context.
    pub fn next_refused(&mut self) -> Option<S> {
        self.refused.pop()
    }

    /// Stops counting the body. Returns its stream, unless that was done before.
    fn refuse(&mut self, place: usize) -> Option<S> {
        let body = self.bodies.get_mut(place)?.as_mut()?;
        if std::mem::replace(&mut body.is_refused, true) {
            return None;
        }
        self.bytes = self.bytes.saturating_sub(body.bytes);
        if let Some(client) = self.clients.get_mut(body.client) {
            client.bytes = client.bytes.saturating_sub(body.bytes);
            client.bodies = client.bodies.saturating_sub(1);
        }
        Some(body.stream.clone())
    }

    /// Returns the costliest body of the clients above their share. `newest` is the client of the
    /// body that grows.
    fn costliest(&self, newest: usize, bytes_max: usize, now: Timestamp) -> Option<usize> {
        let clients = self.clients.iter().filter(|client| client.bodies > 0);
        let share = bytes_max.checked_div(clients.count()).unwrap_or(0);
        let is_above_share = |client: usize| {
            let client = self.clients.get(client);
            client.is_some_and(|client| client.bytes > share)
        };
        let may_go = |body: &BodyInProgress<S>| {
            !body.is_refused
                && is_above_share(body.client)
                && (body.is_slow(now) || body.client != newest)
        };
        self.bodies
            .iter()
            .enumerate()
            .filter_map(|(place, body)| Some((place, body.as_ref()?)))
            .filter(|&(_, body)| may_go(body))
            .max_by_key(|(_, body)| body.cost(now))
            .map(|(place, _)| place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const MAX: usize = 100 * MIB;

    /// All bodies; each stream has a number.
    #[derive(Default)]
    struct NumberedBodies {
        all: BodiesInProgress<usize>,
        begun: usize,
    }

    /// A stream's number and its body.
    struct SentBody(usize, AwaitedBody);

    impl NumberedBodies {
        /// Begins a body of `mib` MiB. Returns `None` if there is no room for it.
        fn send(&mut self, client: u64, mib: usize, now: Timestamp) -> Option<SentBody> {
            let number = self.begun;
            self.begun += 1;
            let body = self.all.begin(client, number, now);
            let room = self.all.grow(&body, mib * MIB, MAX, now);
            let body = AwaitedBody::Counted(body);
            if room == BodyRoom::None {
                self.all.end(body);
                return None;
            }
            Some(SentBody(number, body))
        }

        /// The numbers of the streams that were refused since the last call, in order.
        fn refused(&mut self) -> Vec<usize> {
            let mut refused: Vec<_> = std::iter::from_fn(|| self.all.next_refused()).collect();
            refused.sort_unstable();
            refused
        }

        fn held(&self) -> usize {
            let bodies = self.all.bodies.iter().flatten();
            bodies.map(|body| body.bytes).sum()
        }

        /// The bytes that count, the clients with bodies, and the bodies.
        fn sums(&self) -> (usize, usize, usize) {
            let clients = self.all.clients.iter();
            let clients = clients.filter(|client| client.bodies > 0 || client.bytes > 0);
            let bodies = self.all.bodies.iter().flatten();
            (self.all.bytes, clients.count(), bodies.count())
        }
    }

    #[test]
    fn one_client_alone_may_use_the_whole_sum() {
        let mut bodies = NumberedBodies::default();
        let sent: Vec<_> = (0..5)
            .map(|_| bodies.send(1, 20, Timestamp(0)).unwrap())
            .collect();
        assert!(
            bodies.send(1, 1, Timestamp(0)).is_none(),
            "a sixth does not fit, and none of the five is slow"
        );
        for SentBody(_, body) in sent {
            bodies.all.end(body);
        }
        assert_eq!(bodies.sums(), (0, 0, 0));
    }

    #[test]
    fn the_slowest_and_largest_of_the_heaviest_client_goes() {
        let start = Timestamp(0);
        let mut bodies = NumberedBodies::default();
        let _small_and_old = bodies.send(2, 1, start).unwrap();
        let SentBody(large_and_old, _) = bodies.send(1, 20, start).unwrap();
        let _larger_and_young = bodies.send(1, 22, start.plus_ms(600)).unwrap();
        let _middle = bodies.send(1, 10, start).unwrap();
        let _by_others = bodies.send(2, 48, start.plus_ms(900)).unwrap();
        assert_eq!(
            bodies.refused(),
            [large_and_old],
            "20 MiB x 900 ms of a client above its share"
        );
    }

    #[test]
    fn bombs_at_once_leave_room_for_the_bodies_of_others() {
        let now = Timestamp(0);
        let mut bodies = NumberedBodies::default();
        let honest: Vec<_> = (0..10).map(|_| bodies.send(3, 1, now).unwrap()).collect();
        let bombs: Vec<_> = (0..90).filter_map(|_| bodies.send(4, 22, now)).collect();
        assert_eq!(bombs.len(), 4);
        assert!(bodies.held() <= MAX);
        let more: Vec<_> = (0..20).map(|_| bodies.send(3, 2, now).unwrap()).collect();
        let refused = bodies.refused();
        let mut spared = honest.iter().chain(&more);
        assert!(spared.all(|SentBody(number, _)| !refused.contains(number)));
        assert!(
            bodies.held() <= 2 * MAX,
            "what is refused is held for a moment"
        );
    }

    #[test]
    fn a_body_that_stops_makes_room_for_its_own_clients_next() {
        let mut bodies = NumberedBodies::default();
        let _stopped: Vec<_> = (0..5)
            .map(|_| bodies.send(1, 20, Timestamp(0)).unwrap())
            .collect();
        let now = Timestamp(0).plus_ms(SLOW_MS);
        assert!(bodies.send(1, 5, now).is_some());
        assert_eq!(bodies.refused().len(), 1);
    }

    #[test]
    fn short_bodies_count_only_while_many_are_awaited() {
        let mut all = BodiesInProgress::<usize>::default();
        let awaited = (0..UNCOUNTED_MAX + 9).filter(|_| all.await_uncounted());
        assert_eq!(awaited.count(), UNCOUNTED_MAX);
        all.end(AwaitedBody::None);
        assert!(!all.await_uncounted());
        all.end(AwaitedBody::Uncounted);
        assert!(all.await_uncounted(), "one has gone");
        let counted = AwaitedBody::Counted(all.begin(1, 0, Timestamp(0)));
        let counts = |body: &AwaitedBody| [0, COUNTED_BYTES_MIN].map(|size| body.counts(size));
        assert_eq!(
            (counts(&AwaitedBody::Uncounted), counts(&counted)),
            ([false, true], [true, true])
        );
    }

    #[test]
    fn streams_whose_bodies_do_not_arrive_fill_the_sum_of_one_client_only() {
        let mut all = BodiesInProgress::default();
        let price = cost_bytes(0, false);
        let mut begin = |client| {
            let body = all.begin(client, (), Timestamp(0));
            let room = all.grow(&body, price, MAX, Timestamp(0));
            if room == BodyRoom::None {
                all.end(AwaitedBody::Counted(body));
            }
            room
        };
        let hostile = (0..2_000).filter(|_| begin(1) == BodyRoom::Free).count();
        assert_eq!(hostile, MAX / price);
        assert_eq!(begin(2), BodyRoom::AfterRefusals);
    }

    #[test]
    fn a_refused_body_counts_once_and_grows_no_more() {
        let now = Timestamp(0);
        let mut bodies = NumberedBodies::default();
        let body = bodies.all.begin(1, 0, now);
        assert_eq!(bodies.all.grow(&body, MAX + 1, MAX, now), BodyRoom::None);
        assert_eq!(bodies.all.grow(&body, MAX + 2, MAX, now), BodyRoom::None);
        bodies.all.end(AwaitedBody::Counted(body));
        assert_eq!(bodies.sums(), (0, 0, 0));
    }

    #[test]
    fn a_free_entry_is_used_again_and_a_body_does_not_shrink() {
        let now = Timestamp(0);
        let mut bodies = NumberedBodies::default();
        let SentBody(_, first) = bodies.send(1, 3, now).unwrap();
        let SentBody(_, second) = bodies.send(2, 4, now).unwrap();
        bodies.all.end(first);
        let SentBody(_, third) = bodies.send(3, 5, now).unwrap();
        assert_eq!((bodies.all.bodies.len(), bodies.all.clients.len()), (2, 2));
        let AwaitedBody::Counted(second) = second else {
            panic!("it counts")
        };
        assert_eq!(bodies.all.grow(&second, MIB, MAX, now), BodyRoom::Free);
        assert_eq!(bodies.sums(), (9 * MIB, 2, 2));
        bodies.all.end(AwaitedBody::Counted(second));
        bodies.all.end(third);
        assert_eq!(bodies.sums(), (0, 0, 0));
    }
}
