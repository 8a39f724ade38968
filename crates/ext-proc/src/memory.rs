//! Limits the memory that all streams together may hold.
//!
//! Every stream has a [`MemoryAccount`] of the bytes it holds: an unfinished message, a body that
//! waits for its last byte, answers that the proxy has not taken. The sum over all streams stays
//! within [`HELD_BYTES_MAX`]. A stream may hold at most a quarter of the memory that the other
//! streams leave. The more bytes are held, the fewer bytes a single stream may add. So a few large
//! bodies do not block all other requests, and a small request still gets memory. A client may hold
//! three quarters of what other clients leave, and each of its streams at most half of what is left
//! of that. Beyond that, a client may hold one body of maximum length if there is room for another.
//! So however much one client holds, three others may send the longest body at the same time.
//!
//! Bodies that are not complete yet have a smaller limit, as in the filter ([`exchange::bodies`]).
//! If they reach it, the costliest is refused, which need not be the newest. A body that the
//! gateway holds until it is complete takes no memory here, so it counts toward a limit of its
//! gateway.

use std::collections::HashMap;
use std::mem;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use exchange::Timestamp;
use exchange::bodies::{AwaitedBody, BodiesInProgress, BodyRoom, cost_bytes};

/// The maximum number of bytes that all streams hold together: 16 bodies of the longest kind (24
/// MiB). The shipped Kubernetes manifest gives the daemon 1 GiB. Pools, scraping, EDS and the state
/// streams need up to a quarter of it, and ext_proc streams with their HTTP/2 buffers another
/// quarter.
pub const HELD_BYTES_MAX: usize = 384 << 20;

/// The maximum cost of all incomplete bodies whose parts the proxies send, in bytes: eight bodies
/// of the longest kind. The other half of the memory is for complete bodies and for answers.
pub(super) const INCOMPLETE_BYTES_MAX: usize = HELD_BYTES_MAX / 2;

/// The maximum cost of the incomplete bodies that the gateways at one address hold for this daemon,
/// in bytes. For a moment a gateway holds several times as much, because it copies a body into a
/// message, and refused bodies go later. Five times this maximum is less than the heap limit of the
/// shipped Envoy files (2 GiB).
pub(super) const HIDDEN_BYTES_MAX: usize = 384 << 20;

/// The maximum number of streams of all connections: one for each exchange of all gateways. Each
/// takes some KiB besides its accounted memory.
pub const STREAMS_MAX: u64 = 16_384;

/// The longest body, in bytes.
const BODY_MAX: usize = 24 << 20;

/// A stream holds at most one part in this many of the bytes that the other streams leave. With no
/// other stream, a body of 24 MiB fits into its share.
const SHARE: usize = 4;

/// The streams of a client hold less than this many quarters of the bytes that other clients
/// leave, and are at most as many quarters of the streams. The last quarter is four bodies of
/// [`BODY_MAX`].
const CLIENT_QUARTERS: usize = 3;

/// While only one client has streams, it has at most this many. So another client has room for its
/// first streams.
const STREAMS_OF_ONLY_CLIENT_MAX: u64 = STREAMS_MAX / 8 * 7;

/// A stream holds at most one part in this many of what is left to its client.
const SHARE_OF_CLIENT: usize = 2;

/// The number of bytes that all streams hold.
#[derive(Debug, Default)]
pub struct StreamMemory(Mutex<UsedMemory>);

#[derive(Debug, Default)]
struct UsedMemory {
    bytes: usize,
    /// The bytes of each client that holds some.
    clients: HashMap<u64, usize>,
    /// The number of streams of each known client, and their sum.
    streams: HashMap<u64, u64>,
    streams_of_clients: u64,
    /// The incomplete bodies at each place, by the numbers of their streams.
    incomplete: HashMap<BodyPlace, BodiesInProgress<u64>>,
}

/// Where the bytes of incomplete bodies are. Each place has its own limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BodyPlace {
    /// In this server.
    #[default]
    Server,
    /// In the gateway at this address, which sends a body only when it is complete. All gateways
    /// without a known address count as one.
    Gateway(Option<IpAddr>),
}

/// The number of bytes that one stream holds. Dropping the account releases them.
#[derive(Debug)]
pub struct MemoryAccount {
    memory: Arc<StreamMemory>,
    client: u64,
    bytes: usize,
    body: AwaitedBody,
    /// Where `body` counts.
    place: BodyPlace,
}

/// The request body that a stream awaits.
#[derive(Clone, Copy, Debug)]
pub struct IncompleteBody {
    pub stream: u64,
    pub place: BodyPlace,
    /// The bytes that it takes there.
    pub bytes: usize,
    /// Whether its client declared its length.
    pub has_length: bool,
}

/// A stream would hold more than its own share, or than the share of its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryExceeded;

// === impl StreamMemory ===

impl StreamMemory {
    /// The number of bytes that are held now.
    #[must_use]
    pub fn used(&self) -> usize {
        self.lock().bytes
    }

    /// Opens an account that holds nothing.
    #[must_use]
    pub fn account(self: &Arc<Self>) -> MemoryAccount {
        MemoryAccount {
            memory: Arc::clone(self),
            client: 0,
            bytes: 0,
            body: AwaitedBody::None,
            place: BodyPlace::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, UsedMemory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl UsedMemory ===

impl UsedMemory {
    /// Records that a stream of this client held `had` bytes, and now holds `has`.
    fn change(&mut self, client: u64, had: usize, has: usize) {
        self.bytes = self.bytes - had + has;
        let held = self.clients.entry(client).or_default();
        *held = *held - had + has;
        if *held == 0 {
            self.clients.remove(&client);
        }
    }

    /// Records that a stream of this client begins. The client 0 is unknown, so its streams are not
    /// counted.
    fn begin_stream(&mut self, client: u64) {
        if client != 0 {
            *self.streams.entry(client).or_default() += 1;
            self.streams_of_clients += 1;
        }
    }

    /// Records that a stream of this client has ended.
    fn end_stream(&mut self, client: u64) {
        if let Some(streams) = self.streams.get_mut(&client) {
            *streams -= 1;
            if *streams == 0 {
                self.streams.remove(&client);
            }
            self.streams_of_clients -= 1;
        }
    }

    /// Whether a stream of this client that held `had` bytes may hold `has`.
    fn fits(&self, client: u64, had: usize, has: usize) -> bool {
        let of_client = self.clients.get(&client).copied().unwrap_or(0);
        let left_by_streams = HELD_BYTES_MAX.saturating_sub(self.bytes - had);
        let left_by_clients = HELD_BYTES_MAX.saturating_sub(self.bytes - of_client);
        let of_clients = left_by_clients / 4 * CLIENT_QUARTERS;
        let left_to_client = of_clients.saturating_sub(of_client - had);
        let is_only_body = of_client - had + has <= BODY_MAX && has + BODY_MAX <= left_by_streams;
        is_only_body || has <= left_by_streams / SHARE && has <= left_to_client / SHARE_OF_CLIENT
    }
}

// === impl MemoryAccount ===

impl MemoryAccount {
    /// Sets the number of bytes that the stream holds.
    ///
    /// # Errors
    /// Returns [`MemoryExceeded`] if the number is larger than before and larger than the share.
    /// Then the account is unchanged.
    pub fn hold(&mut self, bytes: usize) -> Result<(), MemoryExceeded> {
        if bytes <= self.bytes {
            self.record(bytes);
            return Ok(());
        }
        let mut used = self.memory.lock();
        if !used.fits(self.client, self.bytes, bytes) {
            return Err(MemoryExceeded);
        }
        used.change(self.client, self.bytes, bytes);
        drop(used);
        self.bytes = bytes;
        Ok(())
    }

    /// Sets the number of bytes that the stream holds, even beyond its share.
    pub fn record(&mut self, bytes: usize) {
        if bytes != self.bytes {
            self.memory.lock().change(self.client, self.bytes, bytes);
            self.bytes = bytes;
        }
    }

    /// Sets the client of the stream. Until then, the client is unknown (0). Returns whether the
    /// client is another one than before.
    pub fn set_client(&mut self, client: u64) -> bool {
        if client == self.client {
            return false;
        }
        let mut used = self.memory.lock();
        used.change(self.client, self.bytes, 0);
        used.change(client, 0, self.bytes);
        used.end_stream(self.client);
        used.begin_stream(client);
        drop(used);
        self.client = client;
        self.body_ends();
        true
    }

    /// Whether the client of the stream has more streams than its share.
    #[must_use]
    pub fn has_too_many_streams(&self) -> bool {
        let used = self.memory.lock();
        let of_client = used.streams.get(&self.client).copied().unwrap_or(0);
        let of_others = used.streams_of_clients - of_client;
        if of_others == 0 {
            of_client > STREAMS_OF_ONLY_CLIENT_MAX
        } else {
            of_client > STREAMS_MAX.saturating_sub(of_others) / 4 * CLIENT_QUARTERS as u64
        }
    }

    /// Counts the body that the stream awaits. Returns whether there is room for it. Appends the
    /// numbers of streams that must be refused to make this room.
    pub fn await_body(
        &mut self,
        awaited: IncompleteBody,
        now: Timestamp,
        refused: &mut Vec<u64>,
    ) -> BodyRoom {
        if self.place != awaited.place {
            self.body_ends();
            self.place = awaited.place;
        }
        let mut used = self.memory.lock();
        let bytes_max = match self.place {
            BodyPlace::Server => INCOMPLETE_BYTES_MAX,
            BodyPlace::Gateway(_) => HIDDEN_BYTES_MAX,
        };
        let incomplete = used.incomplete.entry(self.place).or_default();
        if matches!(self.body, AwaitedBody::None) && incomplete.await_uncounted() {
            self.body = AwaitedBody::Uncounted;
        }
        if matches!(self.body, AwaitedBody::Uncounted) && !self.body.counts(awaited.bytes) {
            return BodyRoom::Free;
        }
        let body = match mem::take(&mut self.body) {
            AwaitedBody::Counted(body) => body,
            uncounted => {
                incomplete.end(uncounted);
                incomplete.begin(self.client, awaited.stream, now)
            }
        };
        let bytes = cost_bytes(awaited.bytes, awaited.has_length);
        let room = incomplete.grow(&body, bytes, bytes_max, now);
        refused.extend(std::iter::from_fn(|| incomplete.next_refused()));
        drop(used);
        self.body = AwaitedBody::Counted(body);
        room
    }

    /// Records that the body is complete or refused, or that the stream has ended.
    pub fn body_ends(&mut self) {
        let body = mem::take(&mut self.body);
        if matches!(body, AwaitedBody::None) {
            return;
        }
        let mut used = self.memory.lock();
        if let Some(incomplete) = used.incomplete.get_mut(&self.place) {
            incomplete.end(body);
            if incomplete.is_empty() {
                used.incomplete.remove(&self.place);
            }
        }
    }

    /// Whether the body that the stream awaits counts, and has been arriving for a second.
    #[must_use]
    pub fn has_slow_body(&self, now: Timestamp) -> bool {
        let used = self.memory.lock();
        let incomplete = used.incomplete.get(&self.place);
        incomplete.is_some_and(|incomplete| incomplete.is_slow(&self.body, now))
    }
}

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        self.record(0);
        self.body_ends();
        self.memory.lock().end_stream(self.client);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_an_account_holds_is_given_back_when_it_is_dropped() {
        let memory = Arc::new(StreamMemory::default());
        let mut first = memory.account();
        let mut second = memory.account();
        assert_eq!(
            (first.hold(5), second.hold(7), first.hold(2)),
            (Ok(()), Ok(()), Ok(()))
        );
        assert_eq!(memory.used(), 9);
        drop(first);
        assert_eq!(memory.used(), 7);
        drop(second);
        assert_eq!(memory.used(), 0);
    }

    #[test]
    fn large_bodies_leave_room_for_small_ones() {
        let memory = Arc::new(StreamMemory::default());
        let mut accounts: Vec<MemoryAccount> = (0..60).map(|_| memory.account()).collect();
        let held = accounts
            .iter_mut()
            .filter_map(|account| account.hold(BODY_MAX).ok())
            .count();
        assert_eq!(held, 11, "of 60 bodies of 24 MiB");
        assert_eq!(
            memory.account().hold(1 << 20),
            Ok(()),
            "a prompt of a quarter of a million tokens"
        );
    }

    #[test]
    fn however_much_one_client_holds_three_others_may_send_the_longest_body() {
        let memory = Arc::new(StreamMemory::default());
        let account = |client| {
            let mut account = memory.account();
            account.set_client(client);
            account
        };
        let mut hostile = Vec::new();
        for bytes in (0..20).map(|halved| BODY_MAX >> halved) {
            let one = || {
                let mut account = account(1);
                account.hold(bytes).ok().map(|()| account)
            };
            hostile.extend(std::iter::from_fn(one));
        }
        assert!(memory.used() > HELD_BYTES_MAX / 2, "{}", memory.used());
        let mut others = [2, 3, 4].map(account);
        for other in &mut others {
            assert_eq!(other.hold(BODY_MAX), Ok(()));
        }
        assert_eq!(account(5).hold(1 << 20), Ok(()), "and a small one");
        drop(hostile);
        assert_eq!(memory.used(), BODY_MAX * 3);
    }

    #[test]
    fn one_that_may_not_grow_keeps_what_it_had() {
        let memory = Arc::new(StreamMemory::default());
        let mut account = memory.account();
        assert_eq!(account.hold(HELD_BYTES_MAX / SHARE), Ok(()));
        assert_eq!(
            account.hold(HELD_BYTES_MAX / SHARE + 1),
            Err(MemoryExceeded)
        );
        assert_eq!(memory.used(), HELD_BYTES_MAX / SHARE);
    }

    proptest! {
        #[test]
        fn the_sum_is_bounded_and_exact(steps in prop::collection::vec((0_usize..8, 0_usize..HELD_BYTES_MAX), 0..100)) {
            let memory = Arc::new(StreamMemory::default());
            let mut accounts: Vec<MemoryAccount> = (0..8).map(|_| memory.account()).collect();
            for (index, bytes) in steps {
                accounts[index].set_client(bytes as u64 % 3);
                let _ = accounts[index].hold(bytes);
                prop_assert!(memory.used() <= HELD_BYTES_MAX);
                prop_assert_eq!(memory.used(), accounts.iter().map(|account| account.bytes).sum::<usize>());
            }
            drop(accounts);
            prop_assert_eq!(memory.used(), 0);
        }
    }
}
