//! Who speaks to the daemon on the state port, and how much of the daemon each may take.
//!
//! | word | what it is | what it is for |
//! |---|---|---|
//! | [`Origin`] | certificate name and IP address: what the connection itself proves | sharing out streams, memory, time and weight |
//! | [`RemoteAddress`] | origin and port: one connection | matching an Envoy's EDS streams with its state stream |
//! | [`ProxyProcess`] | certificate name (without one: the address), node id and random process id: one proxy process | rows, counters and placements |
//!
//! Node id and process id are the peer's own choice. They tell peers apart and earn nothing: a thousand peers of one origin get together what one gets.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::state;
use tokio::time::Instant;
use tonic::Extensions;
use tonic::transport::server::TcpConnectInfo;

use crate::serve::listen::PeerName;

/// The most streams of one kind served at once: far above the proxies of a cluster, far below what memory holds.
pub const STREAMS_MAX: usize = 4096;

/// The most streams of one kind from one origin: a sixteenth of all, so that many hostile hosts are needed to take them from the others. Far above the
/// processes of one host; a fleet of more proxies than this behind one address needs more daemons.
pub const STREAMS_PER_ORIGIN_MAX: usize = STREAMS_MAX / 16;

/// The most bodies of calls read at once from one origin: a process has one under way. Each is as large as a message may be.
pub const UPLOADS_PER_ORIGIN_MAX: usize = 16;

/// The most bodies of calls read at once, 256 MiB of them.
const UPLOADS_MAX: usize = 64;

/// What one origin may cost in a second, in bytes read: ten times what the busiest proxy tells. What comes faster waits in the network.
const COST_PER_SECOND: u32 = 64 << 20;

/// How far ahead an origin may be of that: as many proxies of one host as may come back at the same moment.
const COST_BURST: Duration = Duration::from_secs(1);

/// What any message costs besides its bytes.
const MESSAGE_COST: usize = 1 << 10;

/// What an EDS request costs besides its bytes: it may wake every state stream.
pub const EDS_REQUEST_COST: usize = 64 << 10;

/// What a stream costs to begin: it is sent whole pools, and wakes every other stream.
const STREAM_COST: usize = 1 << 20;

/// What connections prove of where they come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    /// The name in the client certificate, if there is one.
    pub certificate: Option<Arc<str>>,
    /// The address, without the port.
    pub address: Option<IpAddr>,
}

/// The other end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteAddress {
    /// Where it comes from.
    pub origin: Origin,
    /// The address with its port: one connection.
    pub socket: Option<SocketAddr>,
}

/// One proxy process.
#[derive(Clone, Debug)]
pub struct ProxyProcess {
    /// Envoy's node id.
    pub node_id: String,
    /// The random id of its process.
    pub process_id: u64,
    /// Stands for certificate name, node id and process id together, for this life of the daemon.
    pub id: u64,
    /// The connection it speaks by.
    pub remote: RemoteAddress,
}

/// What is shared out among origins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamQuota {
    /// State streams, and the calls that stand for them.
    StateStream,
    /// EDS streams.
    EdsStream,
    /// Bodies of calls that are being read.
    Upload,
}

/// What each origin has of the daemon.
#[derive(Debug, Default)]
pub struct OriginQuotas {
    table: Mutex<QuotaTable>,
    /// Keys [`ProxyProcess::id`], so that nobody can choose a process id that gives another's.
    key: RandomState,
}

#[derive(Debug, Default)]
struct QuotaTable {
    taken: [usize; KINDS],
    refused: [u64; KINDS],
    origins: BTreeMap<Origin, OriginUsage>,
}

#[derive(Debug)]
struct OriginUsage {
    taken: [usize; KINDS],
    /// What it cost so far is paid for at this moment.
    paid_at: Instant,
}

const KINDS: usize = 3;

/// One of what is shared out; given back when dropped.
#[derive(Debug)]
pub struct QuotaPermit {
    origins: Arc<OriginQuotas>,
    origin: Origin,
    kind: StreamQuota,
}

/// Why there is no seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaExceeded {
    /// The origin has its share.
    #[error("this address and certificate have {0} {1} open already, which is their share")]
    Share(usize, StreamQuota),
    /// All are taken.
    #[error("{0} {1} are open already; try another daemon")]
    All(usize, StreamQuota),
}

// === impl RemoteAddress ===

impl RemoteAddress {
    /// As the listener knows it.
    #[must_use]
    pub fn of(extensions: &Extensions) -> Self {
        Self::new(extensions.get::<PeerName>(), extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr))
    }

    /// At this address, with the certificate of that name.
    #[must_use]
    pub fn new(name: Option<&PeerName>, socket: Option<SocketAddr>) -> Self {
        let certificate = name.and_then(|PeerName(name)| name.clone());
        Self { origin: Origin { certificate, address: socket.map(|socket| socket.ip()) }, socket }
    }
}

impl fmt::Display for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.socket {
            Some(socket) => socket.fmt(f),
            None => f.write_str("unknown"),
        }
    }
}

// === impl ProxyProcess ===

impl ProxyProcess {
    /// The daemon's own front, which no connection leads to.
    #[must_use]
    pub fn front(node_id: &str, process_id: u64) -> Self {
        Self { node_id: node_id.to_owned(), process_id, id: process_id, remote: RemoteAddress::default() }
    }
}

// === impl StreamQuota ===

impl StreamQuota {
    /// All of them.
    pub const ALL: [Self; KINDS] = [Self::StateStream, Self::EdsStream, Self::Upload];

    /// At most so many in all, and of one origin.
    const fn max(self) -> (usize, usize) {
        match self {
            Self::StateStream | Self::EdsStream => (STREAMS_MAX, STREAMS_PER_ORIGIN_MAX),
            Self::Upload => (UPLOADS_MAX, UPLOADS_PER_ORIGIN_MAX),
        }
    }

    /// For labels of metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::StateStream => "state",
            Self::EdsStream => "eds",
            Self::Upload => "upload",
        }
    }

    fn of(self, counts: &mut [usize; KINDS]) -> &mut usize {
        let [state, eds, upload] = counts;
        match self {
            Self::StateStream => state,
            Self::EdsStream => eds,
            Self::Upload => upload,
        }
    }
}

impl fmt::Display for StreamQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::StateStream => "state streams",
            Self::EdsStream => "EDS streams",
            Self::Upload => "calls",
        })
    }
}

// === impl OriginQuotas ===

impl OriginQuotas {
    /// Takes a seat for `origin`.
    ///
    /// # Errors
    /// [`QuotaExceeded`] when the origin has its share, or all are taken.
    pub fn acquire(self: &Arc<Self>, kind: StreamQuota, origin: &Origin, now: Instant) -> Result<QuotaPermit, QuotaExceeded> {
        let mut table = self.lock();
        let (all_max, each_max) = kind.max();
        if !table.origins.contains_key(origin) {
            table.origins.retain(|_, usage| usage.taken != [0; KINDS] || usage.paid_at > now);
        }
        let QuotaTable { taken, refused, origins } = &mut *table;
        let usage = origins.entry(origin.clone()).or_insert(OriginUsage { taken: [0; KINDS], paid_at: now });
        let (all, own) = (kind.of(taken), kind.of(&mut usage.taken));
        let full = if *own >= each_max {
            QuotaExceeded::Share(each_max, kind)
        } else if *all >= all_max {
            QuotaExceeded::All(all_max, kind)
        } else {
            *all += 1;
            *own += 1;
            drop(table);
            return Ok(QuotaPermit { origins: Arc::clone(self), origin: origin.clone(), kind });
        };
        for (count, _) in refused.iter_mut().zip(StreamQuota::ALL).filter(|(_, of)| *of == kind) {
            *count += 1;
        }
        Err(full)
    }

    /// Seats refused so far, by kind.
    pub fn refused(&self) -> impl Iterator<Item = (StreamQuota, u64)> {
        StreamQuota::ALL.into_iter().zip(self.lock().refused)
    }

    /// The process that says so of itself at `remote`.
    pub fn peer(&self, hello: &state::Hello, remote: RemoteAddress) -> ProxyProcess {
        // Without a certificate the address is all that is proved.
        let address = remote.origin.address.filter(|_| remote.origin.certificate.is_none());
        let id = self.key.hash_one((&remote.origin.certificate, address, &hello.node_id, hello.process_id)).max(1); // 0 is nobody's
        ProxyProcess { node_id: hello.node_id.clone(), process_id: hello.process_id, id, remote }
    }

    fn lock(&self) -> MutexGuard<'_, QuotaTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl QuotaPermit ===

impl QuotaPermit {
    /// Where it is taken from.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The stream begins. Returns from when on it may be read.
    pub fn begin(&self, now: Instant) -> Instant {
        self.charge(STREAM_COST, now)
    }

    /// A message of `bytes` came. Returns when the next may be read.
    pub fn message(&self, bytes: usize, now: Instant) -> Instant {
        self.charge(bytes.saturating_add(MESSAGE_COST), now)
    }

    fn charge(&self, cost: usize, now: Instant) -> Instant {
        let time = Duration::from_secs(1).saturating_mul(u32::try_from(cost).unwrap_or(u32::MAX)) / COST_PER_SECOND;
        let mut table = self.origins.lock();
        let Some(usage) = table.origins.get_mut(&self.origin) else { return now };
        usage.paid_at = usage.paid_at.max(now) + time;
        usage.paid_at.checked_sub(COST_BURST).map_or(now, |at| at.max(now))
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        let mut table = self.origins.lock();
        let QuotaTable { taken, origins, .. } = &mut *table;
        *self.kind.of(taken) -= 1;
        if let Some(usage) = origins.get_mut(&self.origin) {
            *self.kind.of(&mut usage.taken) -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(last: u8) -> Origin {
        Origin { certificate: None, address: Some([10, 0, 0, last].into()) }
    }

    #[test]
    fn one_origin_cannot_take_what_others_need_and_gives_back_what_it_had() {
        let (origins, now) = (Arc::new(OriginQuotas::default()), Instant::now());
        let take = |last| origins.acquire(StreamQuota::StateStream, &origin(last), now);
        let permits: Vec<QuotaPermit> = (0..4_096).filter_map(|_| take(1).ok()).collect();
        assert_eq!(permits.len(), STREAMS_PER_ORIGIN_MAX);
        assert_eq!(take(1).unwrap_err(), QuotaExceeded::Share(STREAMS_PER_ORIGIN_MAX, StreamQuota::StateStream));
        assert!(take(2).is_ok() && origins.acquire(StreamQuota::EdsStream, &origin(1), now).is_ok());
        let others: Vec<QuotaPermit> =
            (2..20).flat_map(|last| (0..4_096).map_while(move |_| Some(last))).filter_map(|last| take(last).ok()).collect();
        assert_eq!(permits.len() + others.len(), STREAMS_MAX);
        assert_eq!(take(99).unwrap_err(), QuotaExceeded::All(STREAMS_MAX, StreamQuota::StateStream));
        assert!(origins.refused().any(|(kind, count)| kind == StreamQuota::StateStream && count > 3_000));
        drop((permits, others));
        assert!(take(1).is_ok());
        assert!(origins.lock().origins.len() <= 21);
        let _ = origins.acquire(StreamQuota::StateStream, &origin(200), now + Duration::from_secs(60));
        assert_eq!(origins.lock().origins.len(), 1, "those that are gone are forgotten");
    }

    #[test]
    fn what_comes_too_fast_waits_and_so_does_what_a_neighbour_says() {
        let (origins, now) = (Arc::new(OriginQuotas::default()), Instant::now());
        let [one, two] = [(); 2].map(|()| origins.acquire(StreamQuota::StateStream, &origin(1), now).unwrap());
        let other = origins.acquire(StreamQuota::StateStream, &origin(2), now).unwrap();
        let second = usize::try_from(COST_PER_SECOND).unwrap();
        assert_eq!(one.message(second - MESSAGE_COST, now), now, "a burst");
        assert_eq!(two.message(second - MESSAGE_COST, now), now + Duration::from_secs(1), "one origin, one allowance");
        assert_eq!(other.message(100, now), now);
        let later = now + Duration::from_secs(3);
        assert_eq!(one.message(100, later), later);
        drop((one, two));
        let again = origins.acquire(StreamQuota::StateStream, &origin(1), now).unwrap();
        assert!(again.begin(now) > now, "coming back is no way round it");
    }

    #[test]
    fn a_process_is_known_by_certificate_node_and_process_id_together() {
        let origins = OriginQuotas::default();
        let id = |certificate: Option<&str>, address: u8, node_id: &str, process_id| {
            let origin = Origin { certificate: certificate.map(Arc::from), ..origin(address) };
            let hello = state::Hello { node_id: node_id.to_owned(), process_id, ..state::Hello::default() };
            origins.peer(&hello, RemoteAddress { origin, socket: None }).id
        };
        let known = id(Some("a"), 1, "n", 1);
        assert_eq!(known, id(Some("a"), 2, "n", 1), "a process may come back by another address");
        assert_ne!(id(None, 1, "n", 1), id(None, 2, "n", 1), "without a certificate that would be anybody's word");
        for other in [id(None, 1, "n", 1), id(Some("b"), 1, "n", 1), id(Some("a"), 1, "m", 1), id(Some("a"), 1, "n", 2)] {
            assert_ne!(known, other);
        }
    }
}
