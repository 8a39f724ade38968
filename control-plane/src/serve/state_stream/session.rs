//! Decides the next message for one proxy. This module is pure, and takes the time as an argument.
//!
//! A session has no queue. Whenever the stream can take a message, [`StateSession::next`] makes the
//! newest message that is due. So a slow reader skips outdated messages.
//!
//! ```text
//! no pool update yet ── all members known to its Envoy, or FIRST_POOL_UPDATE_WAIT over ──▶ pool update ──▶ metrics, metrics, ...
//!        pool update ── revision changed, or its Envoy got to know withheld members ──▶ newer pool update
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use proto::{METRICS_INTERVAL_MAX_MS, PoolState, state};
use scheduler::{Endpoint, EndpointMetrics, Version};
use tokio::time::Instant;

use crate::pool::writer::{PoolMember, PoolView};
use crate::state::eds_streams::{EdsStreams, ProxyEds};
use crate::state::peer::ProxyProcess;
use crate::state::peer_relay::RelayCursor;
use crate::state::pool_views::PoolViews;
use crate::state::proxies::ProxyPool;
use crate::state::shared::DaemonState;

/// The maximum time from a Hello until an EDS stream of the same proxy opens. After that, the
/// daemon assumes that the proxy's Envoy gets its hosts from another source (Istio, static
/// clusters). From such an Envoy, the daemon withholds a new endpoint for the same time, so that
/// the other source can deliver the endpoint.
pub const EDS_ABSENT_GRACE: Duration = Duration::from_millis(300);

/// How long the first pool update of a stream waits to be complete. An Envoy acknowledges EDS
/// within milliseconds, and a proxy without state parks its requests for at most 2 s.
pub const FIRST_POOL_UPDATE_WAIT: Duration = Duration::from_secs(1);

/// The minimum time between two metrics messages of a pool. Engines change their gauges no faster
/// than their steps of about 20 ms, and a proxy's own count of requests in flight is newer anyway.
pub const METRICS_INTERVAL_MIN: Duration = Duration::from_millis(50);

/// The interval at which unchanged metrics are sent. The interval is half of that which the filter
/// requires.
const HEARTBEAT: Duration = Duration::from_millis(METRICS_INTERVAL_MAX_MS / 2);

/// The maximum number of sent pool updates that wait for an acknowledgement. A proxy that is
/// further behind acknowledges a newer update later.
const UNACKED_MAX: usize = 64;

/// The maximum number of times that the term of a stream is raised, for each pool, because the
/// proxy holds state of a later term. A correct proxy needs one raise, and each raise costs a whole
/// pool update.
pub const RAISES_MAX: u32 = 3;

/// The messages that were sent to one proxy.
#[derive(Debug)]
pub struct StateSession {
    peer: ProxyProcess,
    begun: Instant,
    pools: BTreeMap<String, PoolSession>,
}

/// The messages of one pool that were sent to a proxy.
#[derive(Debug, Default)]
struct PoolSession {
    pool_update: Option<SentPoolUpdate>,
    metrics: Option<SentMetrics>,
    unacked: VecDeque<(Version, u64)>,
    /// The lowest term of the proxy's pool updates: above the term of the state that the proxy held
    /// when it refused an update. The daemon's own term does not change, so a false report of one
    /// proxy does not affect others.
    term_min: u64,
    raises: u32,
    /// A version of a newer daemon that the proxy holds, and the time when the proxy reported it.
    /// The term is raised when it is certain that this daemon still leads.
    held: Option<HeldVersion>,
    relayed: RelayCursor,
    /// The sequence of the models sent last.
    learned: Option<u64>,
    status: ProxyPool,
}

#[derive(Clone, Copy, Debug)]
struct HeldVersion {
    version: Version,
    received_at: Instant,
}

#[derive(Debug)]
struct SentPoolUpdate {
    version: Version,
    revision: u64,
    /// The positions of the sent members in the view's list of members.
    rows: Vec<usize>,
}

#[derive(Debug)]
struct SentMetrics {
    at: Instant,
    revision: u64,
}

/// The members that may be sent to a proxy now.
#[derive(Clone, Copy, Debug)]
enum MemberGate {
    /// The members of this EDS revision, which the proxy's Envoy acknowledged.
    Eds(u64),
    /// The members that joined before this time, because the proxy's Envoy gets its hosts from
    /// another source.
    JoinedBefore(Instant),
    /// No members, because the proxy's Envoy may still open an EDS stream.
    Undecided,
}

// === impl StateSession ===

impl StateSession {
    /// Starts a session after a Hello that requested `pools`.
    #[must_use]
    pub fn new(peer: ProxyProcess, pools: impl IntoIterator<Item = String>, now: Instant) -> Self {
        Self {
            peer,
            begun: now,
            pools: pools
                .into_iter()
                .map(|name| (name, PoolSession::default()))
                .collect(),
        }
    }

    /// Returns the state of each pool that the proxy has, for debug pages and to wait for the
    /// proxy's acknowledgement.
    #[must_use]
    pub fn status(&self) -> BTreeMap<String, ProxyPool> {
        self.pools
            .iter()
            .map(|(name, pool)| (name.clone(), pool.status.clone()))
            .collect()
    }

    /// Returns the newest message that is due, if any. The order is pool updates, metrics, learned
    /// models, load of other proxies.
    pub fn next(&mut self, shared: &DaemonState, now: Instant) -> Option<state::DaemonMessage> {
        use state::daemon_message::Message::{LearnedModels, Metrics, PeerLoad, PoolUpdate};
        let views = shared.pools.views.borrow().clone();
        let eds = shared.proxies.eds.borrow();
        let peer = &self.peer;
        let begun = self.begun;
        let wrap = |message| {
            Some(state::DaemonMessage {
                message: Some(message),
            })
        };
        for (name, pool) in &mut self.pools {
            let Some(view) = views.get(name) else {
                continue;
            };
            let gate = gate(peer, begun, name, &eds, now);
            if let Some(pool_update) = pool.next_pool_update(view, gate, begun, shared, now) {
                return wrap(PoolUpdate(pool_update));
            }
        }
        for (name, pool) in &mut self.pools {
            let Some(view) = views.get(name) else {
                continue;
            };
            if let Some(metrics) = pool.next_metrics(view, shared, now) {
                return wrap(Metrics(metrics));
            }
        }
        for (name, pool) in self
            .pools
            .iter_mut()
            .filter(|(_, pool)| pool.pool_update.is_some())
        {
            if let Some(learned) = pool.next_models(name, shared) {
                return wrap(LearnedModels(learned));
            }
        }
        for (name, pool) in self
            .pools
            .iter_mut()
            .filter(|(_, pool)| pool.pool_update.is_some())
        {
            let Some(view) = views.get(name) else {
                continue;
            };
            if let Some(peers) = shared
                .proxies
                .relay()
                .next(view, peer.id, &mut pool.relayed, now)
            {
                return wrap(PeerLoad(peers));
            }
        }
        None
    }

    /// Returns when the proxy may next get the load of other proxies, over all pools. A time in the
    /// past means at once.
    #[must_use]
    pub fn relay_at(&self, now: Instant) -> Instant {
        self.pools
            .values()
            .filter_map(|pool| pool.relayed.due_at())
            .max()
            .unwrap_or(now)
    }

    /// Returns the time when to call [`Self::next`] again if nothing changes.
    #[must_use]
    pub fn wake_at(&self, pools: &PoolViews, now: Instant) -> Instant {
        let mut at = now + HEARTBEAT;
        for (name, pool) in &self.pools {
            let Some(view) = pools.get(name) else {
                continue;
            };
            if pool.pool_update.is_none() {
                at = at.min(next_after(
                    now,
                    [
                        self.begun + EDS_ABSENT_GRACE,
                        self.begun + FIRST_POOL_UPDATE_WAIT,
                    ],
                ));
            }
            if pool.status.withheld > 0 {
                at = at.min(next_after(
                    now,
                    view.members.iter().map(|m| m.joined + EDS_ABSENT_GRACE),
                ));
            }
            if pool.relayed.has_more() {
                at = at.min(pool.relayed.due_at().unwrap_or(now));
            }
            if let Some(sent) = &pool.metrics {
                let interval = if sent.revision == view.metrics_revision {
                    HEARTBEAT
                } else {
                    METRICS_INTERVAL_MIN
                };
                at = at.min(sent.at + interval);
            }
        }
        at
    }

    /// Records an acknowledgement or refusal of a pool update. A version that was not sent is
    /// ignored.
    pub fn ack(&mut self, ack: state::Ack, now: Instant) -> Option<&ProxyPool> {
        let state::Ack {
            pool,
            version,
            refused,
            held,
        } = ack;
        let [version, held] = [version, held].map(|v| {
            v.map(|v| Version {
                term: v.term,
                sequence: v.sequence,
            })
        });
        let version = version?;
        let pool = self.pools.get_mut(&pool)?;
        let position = pool.unacked.iter().position(|(sent, _)| *sent == version)?;
        let acked = pool.unacked.drain(..=position).next_back()?;
        if refused.is_empty() {
            pool.status.acked = Some(acked);
            pool.status.acked_at = Some(now);
            pool.status.refused = None;
        } else {
            pool.status.refused = Some(refused);
            pool.held = held
                .filter(|held| *held > version)
                .map(|version| HeldVersion {
                    version,
                    received_at: now,
                });
        }
        Some(&pool.status)
    }
}

// === impl PoolSession ===

impl PoolSession {
    /// Raises the term above `held`, the version of the state that the proxy has from another
    /// daemon, or from a start of this daemon whose clock was ahead. The proxy refuses any older
    /// version. If the term is at the end of its range, the proxy keeps its state until it is
    /// restarted.
    fn raise_above(&mut self, held: Version) {
        if let Some(above) = held.term.checked_add(1)
            && self.raises < RAISES_MAX
        {
            self.raises += 1;
            self.term_min = above;
            self.pool_update = None;
            self.learned = None;
        }
    }

    fn of_term(&self, version: Version) -> Version {
        Version {
            term: version.term.max(self.term_min),
            ..version
        }
    }

    fn next_pool_update(
        &mut self,
        view: &PoolView,
        gate: MemberGate,
        begun: Instant,
        shared: &DaemonState,
        now: Instant,
    ) -> Option<state::PoolUpdate> {
        if let Some(held) = self.held
            && shared.life.is_sole_leader_since(held.received_at)
        {
            self.held = None;
            self.raise_above(held.version);
        }
        let rows: Vec<usize> = (0..)
            .zip(view.members.iter())
            .filter(|(_, m)| gate.admits(m))
            .map(|(i, _)| i)
            .collect();
        let withheld = view.members.len() - rows.len();
        self.status.withheld = withheld;
        let due = match &self.pool_update {
            // A first pool update without all members would replace a complete one that the proxy
            // may have, or release its parked requests too early.
            None => {
                withheld == 0 && !matches!(gate, MemberGate::Undecided)
                    || now >= begun + FIRST_POOL_UPDATE_WAIT
            }
            Some(sent) => sent.revision != view.revision || sent.rows != rows,
        };
        // If all members are withheld, sends nothing, because the proxy would treat the pool as
        // empty.
        if !due || (rows.is_empty() && withheld > 0) {
            return None;
        }
        let version = self.of_term(shared.life.next_version());
        let endpoints: Vec<Endpoint> = rows
            .iter()
            .filter_map(|&i| view.members.get(i))
            .map(|m| m.endpoint(now))
            .collect();
        let pool_update = proto::encode_pool_update(PoolState {
            pool: &view.name,
            version,
            endpoints: &endpoints,
            pipeline: &view.pipeline,
            objects: &view.objects,
            hash_secret: shared.life.pool_hash_secret(&view.name),
            staleness_max_ms: u32::try_from(view.staleness_max.as_millis()).unwrap_or(u32::MAX),
        });
        self.pool_update = Some(SentPoolUpdate {
            version,
            revision: view.revision,
            rows,
        });
        self.metrics = None;
        self.status.sent = Some((version, view.revision));
        self.unacked.push_back((version, view.revision));
        if self.unacked.len() > UNACKED_MAX {
            self.unacked.pop_front();
        }
        Some(pool_update)
    }

    fn next_metrics(
        &mut self,
        view: &PoolView,
        shared: &DaemonState,
        now: Instant,
    ) -> Option<state::Metrics> {
        let pool_update = self.pool_update.as_ref()?;
        let due = self.metrics.as_ref().is_none_or(|sent| {
            let interval = if sent.revision == view.metrics_revision {
                HEARTBEAT
            } else {
                METRICS_INTERVAL_MIN
            };
            now >= sent.at + interval
        });
        if !due {
            return None;
        }
        // While a newer pool update is withheld, the sent endpoints are not those of the view, so
        // this sends a heartbeat with unknown metrics.
        let current = pool_update.revision == view.revision;
        let of_row = |&i: &usize| {
            view.metrics
                .get(i)
                .filter(|_| current)
                .cloned()
                .unwrap_or_default()
        };
        let metrics: Vec<EndpointMetrics> = pool_update.rows.iter().map(of_row).collect();
        self.metrics = Some(SentMetrics {
            at: now,
            revision: view.metrics_revision,
        });
        Some(proto::encode_metrics(
            &view.name,
            pool_update.version,
            shared.life.next_version().sequence,
            &metrics,
        ))
    }

    fn next_models(&mut self, name: &str, shared: &DaemonState) -> Option<state::LearnedModels> {
        let newest = shared.learned.models.borrow().get(name).map(Arc::clone)?;
        let sequence = newest.version?.sequence;
        let is_new = self.learned.replace(sequence) != Some(sequence);
        is_new.then(|| {
            let mut learned = (*newest).clone();
            if let Some(version) = &mut learned.version {
                // The models may be older than the term. Proxies refuse models of an earlier term.
                version.term = shared.life.term().max(self.term_min);
            }
            learned
        })
    }
}

// === impl MemberGate ===

impl MemberGate {
    fn admits(self, member: &PoolMember) -> bool {
        match self {
            Self::Eds(acked) => member.eds_since <= acked,
            Self::JoinedBefore(moment) => member.joined <= moment,
            Self::Undecided => false,
        }
    }
}

fn gate(
    peer: &ProxyProcess,
    begun: Instant,
    pool: &str,
    eds: &EdsStreams,
    now: Instant,
) -> MemberGate {
    match eds.state_of(peer, pool, now) {
        ProxyEds::Acked(revision) => MemberGate::Eds(revision),
        ProxyEds::None if now < begun + EDS_ABSENT_GRACE => MemberGate::Undecided,
        ProxyEds::None => now
            .checked_sub(EDS_ABSENT_GRACE)
            .map_or(MemberGate::Undecided, MemberGate::JoinedBefore),
    }
}

fn next_after(now: Instant, moments: impl IntoIterator<Item = Instant>) -> Instant {
    moments
        .into_iter()
        .filter(|&at| at > now)
        .min()
        .unwrap_or(now + HEARTBEAT)
}
