//! The peers of the daemon on the state port, and the share of the daemon's resources that each may
//! use.
//!
//! | type | meaning | use |
//! |---|---|---|
//! | [`Origin`] | certificate name and IP address, which the connection proves | limits of streams, memory, time and weight |
//! | its [`Origin::owner`] | certificate name with all its addresses; without a certificate, the address | the same, before the addresses divide it |
//! | [`RemoteAddress`] | origin and port: one connection | matching an Envoy's EDS streams with its state stream |
//! | [`ProxyProcess`] | one proxy process: certificate name (without one, the address), node id and random process id | rows, counters and placements |
//!
//! A peer chooses its node id and process id itself. These ids distinguish peers but give no extra
//! share: a thousand peers of one origin together get the share of one origin.
//!
//! The number of addresses is no proof: a tenant with one certificate starts as many pods as it
//! likes. So the shares of an owner are limited too, but only against other owners: proxies that
//! all have the same certificate lose nothing by it.

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

use crate::network::network;
use crate::serve::listen::PeerName;

/// The maximum number of streams of one kind that are served at the same time. A cluster has far
/// fewer proxies, and memory allows far more streams.
pub const STREAMS_MAX: usize = 4096;

/// The maximum number of streams of one kind from one origin. The limit is a sixteenth of all
/// streams, so that only many hostile hosts together can use up all streams. One host runs far
/// fewer proxies. A fleet with more proxies behind one address needs more daemons.
pub const STREAMS_PER_ORIGIN_MAX: usize = STREAMS_MAX / 16;

/// The maximum number of bodies of HTTP calls from one origin that are being read, or have messages
/// that wait. A process sends one body at a time. Each body may be as large as a message.
pub const UPLOADS_PER_ORIGIN_MAX: usize = 16;

/// The maximum number of bodies as for [`UPLOADS_PER_ORIGIN_MAX`], but from all origins, 32 MiB in
/// total.
const UPLOADS_MAX: usize = 64;

/// The part of the permits of each [`StreamQuota`], as one in this many, that is reserved for
/// owners with few permits. So owners that use up their shares cannot keep out all others.
const RESERVED_PARTS: usize = 4;

/// The number of streams below which an owner may take a reserved stream. The number is a sixteenth
/// of the reserved streams, and far more than the gateways of one namespace open.
const FEW_STREAMS: usize = STREAMS_MAX / RESERVED_PARTS / 16;

/// The number of calls below which an origin may take a reserved call. A process sends one call at
/// a time, and the daemon may not have taken the messages of the call before.
const FEW_UPLOADS: usize = 2;

/// The maximum cost of the messages from one origin in a second, in bytes. The busiest proxy needs
/// a tenth of this cost. Messages beyond this cost stay unread, so HTTP/2 flow control slows the
/// sender down.
pub const COST_PER_SECOND: u32 = 64 << 20;

/// The maximum cost of the messages from one owner in a second while there are other owners, as a
/// multiple of [`COST_PER_SECOND`].
const OWNER_TIMES: u32 = 4;

/// The duration whose cost an origin may use in advance, so that it may exceed [`COST_PER_SECOND`]
/// for a short time. So many proxies of one host can reconnect at the same time.
const COST_BURST: Duration = Duration::from_secs(1);

/// The fixed cost of a message, in bytes.
pub const MESSAGE_COST: usize = 1 << 10;

/// The fixed cost of an EDS request, in bytes. The cost is high because an answer may wake every
/// state stream.
pub const EDS_REQUEST_COST: usize = 64 << 10;

/// The cost of starting a stream, or of changing its pools, in bytes. A new stream gets whole pools
/// and wakes every other stream.
const STREAM_COST: usize = 1 << 20;

/// The identity that a connection proves of its client.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    /// The name in the client certificate, if there is one.
    pub certificate: Option<Arc<str>>,
    /// The address without the port. For IPv6, this is the network of the address.
    pub address: Option<IpAddr>,
}

/// The other end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteAddress {
    pub origin: Origin,
    /// The address with its port, which identifies one connection. The value is `None` if the
    /// address is unknown.
    pub socket: Option<SocketAddr>,
}

#[derive(Clone, Debug)]
pub struct ProxyProcess {
    pub node_id: String,
    /// A number that identifies the certificate name (or address), the node id and the process id
    /// together, until the daemon restarts. The process id itself is not kept, because another peer
    /// could take over the stream with it. Logs and pages show this id instead.
    pub id: u64,
    pub remote: RemoteAddress,
}

/// The resources that are limited for each origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamQuota {
    /// State streams, and the HTTP calls that replace them.
    StateStream,
    EdsStream,
    /// Bodies of HTTP calls that are being read, or have messages that wait.
    Upload,
}

/// The resources used by each origin.
#[derive(Debug, Default)]
pub struct OriginQuotas {
    table: Mutex<QuotaTable>,
    /// The key of the hash for [`ProxyProcess::id`], so that a peer cannot choose a process id that
    /// yields another peer's id.
    key: RandomState,
}

#[derive(Debug, Default)]
struct QuotaTable {
    taken: [usize; KINDS],
    refused: [u64; KINDS],
    origins: BTreeMap<Origin, OriginUsage>,
    owners: BTreeMap<Origin, OriginUsage>,
}

/// The resources used by an origin or an owner.
#[derive(Clone, Copy, Debug)]
struct OriginUsage {
    taken: [usize; KINDS],
    /// The time until which the rate is used up. If the time is in the past, the next message may
    /// be read immediately.
    paid_at: Instant,
}

const KINDS: usize = 3;

/// A permit for one resource, which is returned when dropped.
#[derive(Debug)]
pub struct QuotaPermit {
    origins: Arc<OriginQuotas>,
    origin: Origin,
    kind: StreamQuota,
}

/// The reason why a permit is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaExceeded {
    /// The origin uses its whole share.
    #[error("this address and certificate have {0} {1} open already, which is their share")]
    Share(usize, StreamQuota),
    /// All permits are in use.
    #[error("{0} {1} are open already; try another daemon")]
    All(usize, StreamQuota),
}

// === impl Origin ===

impl Origin {
    /// Returns the certificate with all its addresses; without a certificate, the address.
    #[must_use]
    pub fn owner(&self) -> Self {
        Self {
            certificate: self.certificate.clone(),
            address: self.address.filter(|_| self.certificate.is_none()),
        }
    }

    /// Whether the peer reached the daemon by a connection. Only the daemon's own ext_proc server
    /// does not. It is no tenant, so a fleet with one certificate needs no share beside it.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the two identities whose use of resources is limited: the owner, and the origin
    /// itself.
    #[must_use]
    pub fn levels(&self) -> [Self; 2] {
        [self.owner(), self.clone()]
    }
}

// === impl RemoteAddress ===

impl RemoteAddress {
    /// Reads the address from the extensions of a request on a listener of the daemon.
    #[must_use]
    pub fn from_extensions(extensions: &Extensions) -> Self {
        Self::new(
            extensions.get::<PeerName>(),
            extensions
                .get::<TcpConnectInfo>()
                .and_then(TcpConnectInfo::remote_addr),
        )
    }

    /// Creates the address `socket` of a peer whose certificate has the name `name`.
    #[must_use]
    pub fn new(name: Option<&PeerName>, socket: Option<SocketAddr>) -> Self {
        let certificate = name.and_then(|PeerName(name)| name.clone());
        Self {
            origin: Origin {
                certificate,
                address: socket.map(|socket| network(socket.ip())),
            },
            socket,
        }
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
    /// Creates the identity of the daemon's own ext_proc server, which reaches the state without a
    /// connection.
    #[must_use]
    pub fn ext_proc_server(node_id: &str, process_id: u64) -> Self {
        Self {
            node_id: node_id.to_owned(),
            id: process_id,
            remote: RemoteAddress::default(),
        }
    }
}

// === impl StreamQuota ===

impl StreamQuota {
    pub const ALL: [Self; KINDS] = [Self::StateStream, Self::EdsStream, Self::Upload];

    /// Returns the maximum number of permits in total, and for one origin.
    const fn max(self) -> (usize, usize) {
        match self {
            Self::StateStream | Self::EdsStream => (STREAMS_MAX, STREAMS_PER_ORIGIN_MAX),
            Self::Upload => (UPLOADS_MAX, UPLOADS_PER_ORIGIN_MAX),
        }
    }

    /// Returns the numbers of permits below which an owner, and its origin, may take a reserved
    /// permit. All proxies of a namespace may have one certificate, so their owner may take several
    /// permits.
    const fn few(self) -> (usize, usize) {
        match self {
            Self::StateStream | Self::EdsStream => (FEW_STREAMS, FEW_STREAMS),
            Self::Upload => (UPLOADS_PER_ORIGIN_MAX, FEW_UPLOADS),
        }
    }

    /// Returns the name in metric labels.
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
    /// Acquires a permit for `origin`.
    ///
    /// # Errors
    /// Returns [`QuotaExceeded`] if the origin's share or all permits are in use.
    pub fn acquire(
        self: &Arc<Self>,
        kind: StreamQuota,
        origin: &Origin,
        now: Instant,
    ) -> Result<QuotaPermit, QuotaExceeded> {
        let mut table = self.lock();
        let (all_max, each_max) = kind.max();
        if !table.origins.contains_key(origin) {
            let is_used = |usage: &OriginUsage| usage.taken != [0; KINDS] || usage.paid_at > now;
            table.origins.retain(|_, usage| is_used(usage));
            table.owners.retain(|_, usage| is_used(usage));
        }
        let QuotaTable {
            taken,
            refused,
            origins,
            owners,
        } = &mut *table;
        let new = OriginUsage {
            taken: [0; KINDS],
            paid_at: now,
        };
        let of_owner = owners.entry(origin.owner()).or_insert(new);
        let of_owner = kind.of(&mut of_owner.taken);
        let usage = origins.entry(origin.clone()).or_insert(new);
        let all = kind.of(taken);
        let own = kind.of(&mut usage.taken);
        let (few_of_owner, few_of_origin) = kind.few();
        let reserved = match *of_owner < few_of_owner && *own < few_of_origin {
            true => 0,
            false => all_max / RESERVED_PARTS,
        };
        let full = if *own >= each_max {
            QuotaExceeded::Share(each_max, kind)
        } else if *all >= all_max - reserved {
            QuotaExceeded::All(all_max - reserved, kind)
        } else {
            *all += 1;
            *own += 1;
            *of_owner += 1;
            drop(table);
            return Ok(QuotaPermit {
                origins: Arc::clone(self),
                origin: origin.clone(),
                kind,
            });
        };
        for (count, _) in refused
            .iter_mut()
            .zip(StreamQuota::ALL)
            .filter(|(_, of)| *of == kind)
        {
            *count += 1;
        }
        Err(full)
    }

    /// Returns the number of refused permits since the start, by resource.
    pub fn refused(&self) -> impl Iterator<Item = (StreamQuota, u64)> {
        StreamQuota::ALL.into_iter().zip(self.lock().refused)
    }

    /// Returns the process that sent `hello` from `remote`.
    pub fn peer(&self, hello: &state::Hello, remote: RemoteAddress) -> ProxyProcess {
        // Without a certificate, only the address is proved.
        let address = remote
            .origin
            .address
            .filter(|_| remote.origin.certificate.is_none());
        let id = self
            .key
            .hash_one((
                &remote.origin.certificate,
                address,
                &hello.node_id,
                hello.process_id,
            ))
            .max(1); // 0 is reserved
        ProxyProcess {
            node_id: hello.node_id.clone(),
            id,
            remote,
        }
    }

    fn lock(&self) -> MutexGuard<'_, QuotaTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl OriginUsage ===

impl OriginUsage {
    /// Uses up the rate for this time. Returns when the next message may be read.
    fn pay(&mut self, time: Duration, now: Instant) -> Instant {
        self.paid_at = self.paid_at.max(now) + time;
        self.paid_at
            .checked_sub(COST_BURST)
            .map_or(now, |at| at.max(now))
    }
}

// === impl QuotaPermit ===

impl QuotaPermit {
    /// Returns the origin that the permit belongs to.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Charges the start of the stream, or a change of its pools. Returns the time when it may be
    /// read.
    pub fn begin(&self, now: Instant) -> Instant {
        self.charge(STREAM_COST, now)
    }

    /// Charges a message of `bytes`. Returns the time when the next message may be read.
    pub fn message(&self, bytes: usize, now: Instant) -> Instant {
        self.charge(bytes.saturating_add(MESSAGE_COST), now)
    }

    fn charge(&self, cost: usize, now: Instant) -> Instant {
        let time = Duration::from_secs(1).saturating_mul(u32::try_from(cost).unwrap_or(u32::MAX))
            / COST_PER_SECOND;
        let mut table = self.origins.lock();
        let QuotaTable {
            origins, owners, ..
        } = &mut *table;
        let of_origin = origins.get_mut(&self.origin);
        let of_origin = of_origin.map(|usage| usage.pay(time, now));
        let has_others = owners.len() > 1;
        let of_owner = owners.get_mut(&self.origin.owner());
        let of_owner = of_owner.filter(|_| has_others);
        let of_owner = of_owner.map(|usage| usage.pay(time / OWNER_TIMES, now));
        of_origin.max(of_owner).unwrap_or(now)
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        let mut table = self.origins.lock();
        let QuotaTable {
            taken,
            origins,
            owners,
            ..
        } = &mut *table;
        *self.kind.of(taken) -= 1;
        if let Some(of_owner) = owners.get_mut(&self.origin.owner()) {
            *self.kind.of(&mut of_owner.taken) -= 1;
        }
        if let Some(usage) = origins.get_mut(&self.origin) {
            *self.kind.of(&mut usage.taken) -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(last: u8) -> Origin {
        Origin {
            certificate: None,
            address: Some([10, 0, 0, last].into()),
        }
    }

    #[test]
    fn pods_with_one_certificate_share_a_rate_beside_other_certificates() {
        let origins = Arc::new(OriginQuotas::default());
        let now = Instant::now();
        let take = |of: &Origin| origins.acquire(StreamQuota::StateStream, of, now).unwrap();
        let pod = |last| Origin {
            certificate: Some("pods".into()),
            ..origin(last)
        };
        let pods: Vec<QuotaPermit> = (0..16).map(|last| take(&pod(last))).collect();
        let send = || pods.iter().map(|pod| pod.message(24 << 20, now)).max();
        assert_eq!(send(), Some(now), "there is no other certificate");
        let other = take(&origin(99));
        assert!(send() > Some(now + Duration::from_millis(400)));
        assert_eq!(other.message(24 << 20, now), now);
    }

    #[test]
    fn one_origin_cannot_take_what_others_need_and_gives_back_what_it_had() {
        let origins = Arc::new(OriginQuotas::default());
        let now = Instant::now();
        let take = |last| origins.acquire(StreamQuota::StateStream, &origin(last), now);
        let permits: Vec<QuotaPermit> = (0..4_096).filter_map(|_| take(1).ok()).collect();
        assert_eq!(permits.len(), STREAMS_PER_ORIGIN_MAX);
        assert_eq!(
            take(1).unwrap_err(),
            QuotaExceeded::Share(STREAMS_PER_ORIGIN_MAX, StreamQuota::StateStream)
        );
        assert!(
            take(2).is_ok()
                && origins
                    .acquire(StreamQuota::EdsStream, &origin(1), now)
                    .is_ok()
        );
        let others: Vec<QuotaPermit> = (2..40)
            .flat_map(|last| (0..4_096).map_while(move |_| Some(last)))
            .filter_map(|last| take(last).ok())
            .collect();
        assert_eq!(permits.len() + others.len(), STREAMS_MAX);
        assert_eq!(
            take(99).unwrap_err(),
            QuotaExceeded::All(STREAMS_MAX, StreamQuota::StateStream)
        );
        assert!(
            origins
                .refused()
                .any(|(kind, count)| kind == StreamQuota::StateStream && count > 3_000)
        );
        drop((permits, others));
        assert!(take(1).is_ok());
        assert!(origins.lock().origins.len() <= 41);
        let _ = origins.acquire(
            StreamQuota::StateStream,
            &origin(200),
            now + Duration::from_secs(60),
        );
        assert_eq!(
            origins.lock().origins.len(),
            1,
            "origins without permits are removed"
        );
    }

    #[test]
    fn origins_that_use_up_their_shares_of_calls_leave_some_to_others() {
        let origins = Arc::new(OriginQuotas::default());
        let now = Instant::now();
        let take = |last| origins.acquire(StreamQuota::Upload, &origin(last), now);
        let permits: Vec<QuotaPermit> = (1..=4)
            .flat_map(|last| (0..UPLOADS_PER_ORIGIN_MAX).map(move |_| last))
            .filter_map(|last| take(last).ok())
            .collect();
        assert_eq!(
            permits.len(),
            UPLOADS_MAX - UPLOADS_MAX / RESERVED_PARTS + FEW_UPLOADS,
            "the first of the fourth are of the reserved"
        );
        let _few = [(); FEW_UPLOADS].map(|()| take(5).unwrap());
        assert!(take(5).is_err() && take(6).is_ok());
    }

    #[test]
    fn a_flood_of_calls_leaves_some_to_each_of_the_proxies_with_another_certificate() {
        let origins = Arc::new(OriginQuotas::default());
        let now = Instant::now();
        let take = |certificate: &str, last| {
            let origin = Origin {
                certificate: Some(certificate.into()),
                ..origin(last)
            };
            origins.acquire(StreamQuota::Upload, &origin, now)
        };
        let _flood: Vec<QuotaPermit> = (1..=9)
            .flat_map(|last| (0..UPLOADS_PER_ORIGIN_MAX).map(move |_| last))
            .filter_map(|last| take("hostile", last).ok())
            .collect();
        assert!(take("hostile", 10).is_err());
        let fleet: Vec<QuotaPermit> = (11..=31)
            .filter_map(|last| take("fleet", last).ok())
            .collect();
        assert_eq!(
            fleet.len(),
            UPLOADS_MAX / RESERVED_PARTS,
            "one for each proxy"
        );
    }

    #[test]
    fn a_host_does_not_become_another_origin_by_another_address_of_its_network() {
        let of = |address: &str| {
            let socket = format!("{address}:1").parse().unwrap();
            RemoteAddress::new(None, Some(socket)).origin
        };
        assert_eq!(of("[2001:db8::1]"), of("[2001:db8::ffff:2]"));
        assert_ne!(of("[2001:db8::1]"), of("[2001:db8:0:1::1]"));
        assert_eq!(of("[::ffff:10.0.0.1]"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }

    #[test]
    fn what_comes_too_fast_waits_and_so_does_what_a_neighbour_says() {
        let origins = Arc::new(OriginQuotas::default());
        let now = Instant::now();
        let [one, two] = [(); 2].map(|()| {
            origins
                .acquire(StreamQuota::StateStream, &origin(1), now)
                .unwrap()
        });
        let other = origins
            .acquire(StreamQuota::StateStream, &origin(2), now)
            .unwrap();
        let second = usize::try_from(COST_PER_SECOND).unwrap();
        assert_eq!(one.message(second - MESSAGE_COST, now), now, "a burst");
        assert_eq!(
            two.message(second - MESSAGE_COST, now),
            now + Duration::from_secs(1),
            "the streams of one origin share one allowance"
        );
        assert_eq!(other.message(100, now), now);
        let later = now + Duration::from_secs(3);
        assert_eq!(one.message(100, later), later);
        drop((one, two));
        let again = origins
            .acquire(StreamQuota::StateStream, &origin(1), now)
            .unwrap();
        assert!(
            again.begin(now) > now,
            "reconnecting does not reset the allowance"
        );
    }

    #[test]
    fn a_process_is_known_by_certificate_node_and_process_id_together() {
        let origins = OriginQuotas::default();
        let id = |certificate: Option<&str>, address: u8, node_id: &str, process_id| {
            let origin = Origin {
                certificate: certificate.map(Arc::from),
                ..origin(address)
            };
            let hello = state::Hello {
                node_id: node_id.to_owned(),
                process_id,
                ..state::Hello::default()
            };
            origins
                .peer(
                    &hello,
                    RemoteAddress {
                        origin,
                        socket: None,
                    },
                )
                .id
        };
        let known = id(Some("a"), 1, "n", 1);
        assert_eq!(
            known,
            id(Some("a"), 2, "n", 1),
            "a process may reconnect from another address"
        );
        assert_ne!(
            id(None, 1, "n", 1),
            id(None, 2, "n", 1),
            "without a certificate the address is part of the id"
        );
        for other in [
            id(None, 1, "n", 1),
            id(Some("b"), 1, "n", 1),
            id(Some("a"), 1, "m", 1),
            id(Some("a"), 1, "n", 2),
        ] {
            assert_ne!(known, other);
        }
    }
}
