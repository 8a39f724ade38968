//! The request bodies of one VM that are not complete yet. Their total size is bounded. A client
//! takes no room from others by sending slowly, or by sending few bytes that a decompressor makes
//! large. Each body counts with what its stream costs Envoy, from its headers on, so a client takes
//! no room from others by many bodies that do not arrive either.
//!
//! Some short bodies are not counted. So a request costs no memory and no search here while bodies
//! arrive as fast as usual.
//!
//! Each client has an equal share of the total, which applies only while other clients need room.
//! If there is no room, the VM refuses the costliest body (bytes times time) of the clients above
//! their share. A body does not displace fast bodies of its own client: then it is refused itself.
//! A refused body of another stream stays in memory until a root context refuses it. So the VM
//! holds at most twice the total and one piece.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use exchange::Timestamp;

use super::parked_request::ParkedRequest;

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
const UNCOUNTED_MAX: usize = 128;

/// The minimum length of a body that counts in any case.
const COUNTED_BYTES_MIN: usize = 16_384;

/// A body is slow once it has been arriving for this time. In this time a line of 10 Mbit/s
/// delivers a prompt of 250,000 tokens.
const SLOW_MS: u64 = 1_000;

/// A body in progress, which its stream and the VM both hold.
pub struct BodyInProgress {
    client: Rc<ClientBodies>,
    bytes: Cell<usize>,
    since: Timestamp,
    stream: Weak<dyn ParkedRequest>,
    is_refused: Cell<bool>,
}

/// How the request body of a stream counts.
#[derive(Default)]
pub enum AwaitedBody {
    /// The stream awaits no body.
    #[default]
    None,
    /// The body is one of the first `UNCOUNTED_MAX`.
    Uncounted,
    Counted(Rc<BodyInProgress>),
}

/// The bodies of one client that are not refused.
struct ClientBodies {
    /// The client's hash ([`exchange::RequestDriver::client`]).
    client: u64,
    bodies: Cell<usize>,
    bytes: Cell<usize>,
}

/// All unfinished request bodies of a VM.
#[derive(Default)]
pub struct BodiesInProgress {
    bodies: Vec<Rc<BodyInProgress>>,
    clients: Vec<Rc<ClientBodies>>,
    /// The bytes of all bodies that are not refused.
    bytes: usize,
    /// The number of bodies that are not counted.
    uncounted: usize,
    refused: Vec<Weak<dyn ParkedRequest>>,
}

/// Whether a body may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyRoom {
    /// There is room in the total.
    Free,
    /// There is room, because the VM refuses bodies of other streams.
    AfterRefusals,
    /// There is no room, and this body must be refused.
    None,
}

/// Adds to a cell, which cannot overflow, because bodies are far too short.
fn add(cell: &Cell<usize>, amount: usize) {
    cell.set(cell.get().saturating_add(amount));
}

fn subtract(cell: &Cell<usize>, amount: usize) {
    cell.set(cell.get().saturating_sub(amount));
}

/// Returns what a stream and `size` bytes of its body cost Envoy.
pub fn cost_bytes(size: usize, has_length: bool) -> usize {
    size.saturating_add(if has_length {
        STREAM_BYTES
    } else {
        STREAM_WITHOUT_LENGTH_BYTES
    })
}

// === impl BodyInProgress ===

impl BodyInProgress {
    /// Whether the body has been arriving for at least `SLOW_MS`.
    pub fn is_slow(&self, now: Timestamp) -> bool {
        now.ms_since(self.since) >= SLOW_MS
    }

    /// Returns the cost so far, in bytes times milliseconds. The number of bytes decides between
    /// two new bodies.
    fn cost(&self, now: Timestamp) -> (u64, usize) {
        let bytes = self.bytes.get();
        (
            (bytes as u64).saturating_mul(now.ms_since(self.since)),
            bytes,
        )
    }
}

// === impl AwaitedBody ===

impl AwaitedBody {
    /// Whether the body counts once it has `size` bytes.
    pub fn counts(&self, size: usize) -> bool {
        size >= COUNTED_BYTES_MIN || matches!(self, Self::Counted(_))
    }
}

// === impl BodiesInProgress ===

impl BodiesInProgress {
    /// Begins to await a body without counting it. Returns false if too many are not counted.
    pub fn await_uncounted(&mut self) -> bool {
        let may = self.uncounted < UNCOUNTED_MAX;
        self.uncounted = self.uncounted.saturating_add(may.into());
        may
    }

    /// Records that the stream no longer awaits the body.
    pub fn end(&mut self, body: &AwaitedBody) {
        match body {
            AwaitedBody::None => {}
            AwaitedBody::Uncounted => self.uncounted = self.uncounted.saturating_sub(1),
            AwaitedBody::Counted(body) => self.remove(body),
        }
    }

    /// Begins to count a body of this client.
    pub fn begin(
        &mut self,
        client: u64,
        stream: Weak<dyn ParkedRequest>,
        now: Timestamp,
    ) -> Rc<BodyInProgress> {
        let known = self.clients.iter().find(|known| known.client == client);
        let client = known.map(Rc::clone).unwrap_or_else(|| {
            let client = Rc::new(ClientBodies {
                client,
                bodies: Cell::new(0),
                bytes: Cell::new(0),
            });
            self.clients.push(Rc::clone(&client));
            client
        });
        add(&client.bodies, 1);
        let body = Rc::new(BodyInProgress {
            client,
            bytes: Cell::new(0),
            since: now,
            stream,
            is_refused: Cell::new(false),
        });
        self.bodies.push(Rc::clone(&body));
        body
    }

    /// Records that the body and its stream cost `bytes` bytes now. `bytes_max` is the maximum
    /// total.
    pub fn grow(
        &mut self,
        body: &Rc<BodyInProgress>,
        bytes: usize,
        bytes_max: usize,
        now: Timestamp,
    ) -> BodyRoom {
        if body.is_refused.get() {
            return BodyRoom::None;
        }
        let more = bytes.saturating_sub(body.bytes.replace(bytes));
        add(&body.client.bytes, more);
        self.bytes = self.bytes.saturating_add(more);
        let mut room = BodyRoom::Free;
        while self.bytes > bytes_max {
            let costliest = self
                .costliest(body, bytes_max, now)
                .filter(|other| !Rc::ptr_eq(other, body));
            let Some(other) = costliest else {
                self.refuse(body);
                return BodyRoom::None;
            };
            self.refuse(&other);
            self.refused.push(other.stream.clone());
            room = BodyRoom::AfterRefusals;
        }
        room
    }

    /// Forgets a body that is complete, or whose stream has ended.
    fn remove(&mut self, body: &Rc<BodyInProgress>) {
        self.bodies.retain(|known| !Rc::ptr_eq(known, body));
        self.refuse(body);
    }

    /// Returns the next stream to refuse. Only a root context may refuse it.
    pub fn next_refused(&mut self) -> Option<Weak<dyn ParkedRequest>> {
        self.refused.pop()
    }

    /// Stops counting the body.
    fn refuse(&mut self, body: &BodyInProgress) {
        if body.is_refused.replace(true) {
            return;
        }
        let bytes = body.bytes.get();
        self.bytes = self.bytes.saturating_sub(bytes);
        subtract(&body.client.bytes, bytes);
        subtract(&body.client.bodies, 1);
        if body.client.bodies.get() == 0 {
            self.clients
                .retain(|known| !Rc::ptr_eq(known, &body.client));
        }
    }

    /// Returns the costliest body of the clients above their share.
    fn costliest(
        &self,
        newest: &BodyInProgress,
        bytes_max: usize,
        now: Timestamp,
    ) -> Option<Rc<BodyInProgress>> {
        let share = bytes_max.checked_div(self.clients.len()).unwrap_or(0);
        let may_go = |body: &&Rc<BodyInProgress>| {
            !body.is_refused.get()
                && body.client.bytes.get() > share
                && (body.is_slow(now) || !Rc::ptr_eq(&body.client, &newest.client))
        };
        self.bodies
            .iter()
            .filter(may_go)
            .max_by_key(|body| body.cost(now))
            .map(Rc::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const MAX: usize = 100 * MIB;

    struct NoStream;

    impl ParkedRequest for NoStream {
        fn waits(&self) -> bool {
            false
        }
        fn retry(&self) {}
        fn check_reply(&self, _: Timestamp) {}
        fn refuse_body(&self) {}
    }

    fn nobody() -> Weak<dyn ParkedRequest> {
        Weak::<NoStream>::new()
    }

    /// Begins a body of `mib` MiB. Returns `None` if there is no room for it.
    fn send(
        all: &mut BodiesInProgress,
        client: u64,
        mib: usize,
        now: Timestamp,
    ) -> Option<Rc<BodyInProgress>> {
        let body = all.begin(client, nobody(), now);
        let room = all.grow(&body, mib * MIB, MAX, now);
        if room == BodyRoom::None {
            all.remove(&body);
            return None;
        }
        Some(body)
    }

    fn held(all: &BodiesInProgress) -> usize {
        all.bodies.iter().map(|body| body.bytes.get()).sum()
    }

    #[test]
    fn one_client_alone_may_use_the_whole_sum() {
        let mut all = BodiesInProgress::default();
        let bodies: Vec<_> = (0..5)
            .map(|_| send(&mut all, 1, 20, Timestamp(0)).unwrap())
            .collect();
        assert!(
            send(&mut all, 1, 1, Timestamp(0)).is_none(),
            "a sixth does not fit, and none of the five is slow"
        );
        for body in &bodies {
            all.remove(body);
        }
        assert_eq!((all.bytes, all.clients.len(), held(&all)), (0, 0, 0));
    }

    #[test]
    fn the_slowest_and_largest_of_the_heaviest_client_goes() {
        let start = Timestamp(0);
        let mut all = BodiesInProgress::default();
        let small_and_old = send(&mut all, 2, 1, start).unwrap();
        let large_and_old = send(&mut all, 1, 20, start).unwrap();
        let later = start.plus_ms(600);
        let larger_and_young = send(&mut all, 1, 22, later).unwrap();
        let middle = send(&mut all, 1, 10, start).unwrap();
        let now = start.plus_ms(900);
        let by_others = send(&mut all, 2, 48, now).unwrap();
        assert_eq!(
            [
                &small_and_old,
                &large_and_old,
                &larger_and_young,
                &middle,
                &by_others
            ]
            .map(|body| body.is_refused.get()),
            [false, true, false, false, false],
            "20 MiB x 900 ms of a client above its share"
        );
        assert!(all.next_refused().is_some());
        assert!(all.next_refused().is_none());
    }

    #[test]
    fn bombs_at_once_leave_room_for_the_bodies_of_others() {
        let now = Timestamp(0);
        let mut all = BodiesInProgress::default();
        let honest: Vec<_> = (0..10)
            .map(|_| send(&mut all, 3, 1, now).unwrap())
            .collect();
        let bombs: Vec<_> = (0..90).filter_map(|_| send(&mut all, 4, 22, now)).collect();
        assert_eq!(bombs.len(), 4);
        assert!(held(&all) <= MAX);
        let more: Vec<_> = (0..20)
            .map(|_| send(&mut all, 3, 2, now).unwrap())
            .collect();
        assert!(
            honest
                .iter()
                .chain(&more)
                .all(|body| !body.is_refused.get())
        );
        assert!(
            held(&all) <= 2 * MAX,
            "what is refused is held for a moment"
        );
    }

    #[test]
    fn a_body_that_stops_makes_room_for_its_own_clients_next() {
        let mut all = BodiesInProgress::default();
        let stopped: Vec<_> = (0..5)
            .map(|_| send(&mut all, 1, 20, Timestamp(0)).unwrap())
            .collect();
        let now = Timestamp(0).plus_ms(SLOW_MS);
        assert!(send(&mut all, 1, 5, now).is_some());
        assert_eq!(
            stopped.iter().filter(|body| body.is_refused.get()).count(),
            1
        );
    }

    #[test]
    fn short_bodies_count_only_while_many_are_awaited() {
        let mut all = BodiesInProgress::default();
        let awaited = (0..UNCOUNTED_MAX + 9).filter(|_| all.await_uncounted());
        assert_eq!(awaited.count(), UNCOUNTED_MAX);
        all.end(&AwaitedBody::None);
        assert!(!all.await_uncounted());
        all.end(&AwaitedBody::Uncounted);
        assert!(all.await_uncounted(), "one has gone");
        let counted = AwaitedBody::Counted(all.begin(1, nobody(), Timestamp(0)));
        let counts = |body: &AwaitedBody| [0, COUNTED_BYTES_MIN].map(|size| body.counts(size));
        assert_eq!(
            (counts(&AwaitedBody::Uncounted), counts(&counted)),
            ([false, true], [true, true])
        );
        all.end(&counted);
        assert_eq!((all.bodies.len(), all.clients.len()), (0, 0));
    }

    #[test]
    fn streams_whose_bodies_do_not_arrive_fill_the_sum_of_one_client_only() {
        let mut all = BodiesInProgress::default();
        let price = cost_bytes(0, false);
        let mut begin = |client| {
            let body = all.begin(client, nobody(), Timestamp(0));
            let room = all.grow(&body, price, MAX, Timestamp(0));
            if room == BodyRoom::None {
                all.remove(&body);
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
        let mut all = BodiesInProgress::default();
        let body = all.begin(1, nobody(), now);
        assert_eq!(all.grow(&body, MAX + 1, MAX, now), BodyRoom::None);
        assert_eq!(all.grow(&body, MAX + 2, MAX, now), BodyRoom::None);
        all.remove(&body);
        assert_eq!((all.bytes, all.clients.len(), all.bodies.len()), (0, 0, 0));
    }
}
