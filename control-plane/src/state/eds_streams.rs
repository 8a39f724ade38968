//! The EDS streams of Envoys, and the revisions that each stream acknowledged, while the stream is
//! open and for [`EDS_LINGER`] after.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::state::peer::{Origin, ProxyProcess, RemoteAddress, STREAMS_MAX};

/// The time for which the acknowledgements of a closed EDS stream are still used for its Envoy.
/// Envoy waits up to 30 s before it reconnects, and keeps its hosts until then.
pub const EDS_LINGER: Duration = Duration::from_secs(35);

/// The maximum number of closed streams that are remembered, and of those of one owner, so that one
/// that opens and closes streams without end leaves room to others.
const CLOSED_MAX: usize = STREAMS_MAX;
const CLOSED_PER_OWNER_MAX: usize = CLOSED_MAX / 2;

/// The EDS streams of all Envoys.
///
/// Envoy does not report which process an EDS stream belongs to. Streams on the same connection as
/// a state stream belong to its process. If a process has no such stream, streams of the same
/// origin and node id are assumed to belong to the process.
#[derive(Clone, Debug, Default)]
pub struct EdsStreams {
    /// The open streams, by stream id.
    pub open: BTreeMap<u64, EdsStream>,
    /// The open streams of each Envoy, identified by origin and node id.
    by_envoy: BTreeMap<(Origin, String), BTreeSet<u64>>,
    closed: BTreeMap<(Origin, String, String), ClosedEdsStream>,
}

#[derive(Clone, Debug)]
struct ClosedEdsStream {
    at: Instant,
    acked: u64,
}

/// The status of an Envoy's EDS stream.
#[derive(Clone, Debug)]
pub struct EdsStream {
    pub node_id: String,
    /// The address from which the Envoy connects.
    pub remote: RemoteAddress,
    /// The time when the stream was opened.
    pub since: SystemTime,
    /// The state that the Envoy has, by subscribed pool.
    pub pools: BTreeMap<String, EdsAck>,
}

/// The EDS state of a pool that an Envoy has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdsAck {
    /// The newest EDS revision that the Envoy acknowledged; 0 means none.
    pub acked: u64,
    /// The reason why the Envoy refused the last response; `None` if the Envoy did not refuse it.
    pub refused: Option<String>,
    /// Whether the Envoy has not applied the newest response for longer than
    /// [`crate::serve::eds::EDS_ACK_WAIT_MAX`].
    pub late: bool,
}

/// The EDS state of a pool that the streams of a proxy's Envoy have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyEds {
    /// No stream subscribes to the pool, or none answers. Envoy gets its hosts from another source,
    /// or has not subscribed yet.
    None,
    /// All streams acknowledged this revision or a newer one.
    Acked(u64),
}

// === impl EdsStreams ===

impl EdsStreams {
    /// Returns the state of `pool` that the streams of `peer`'s Envoy have. Streams closed less
    /// than [`EDS_LINGER`] ago are included with their last state.
    #[must_use]
    pub fn state_of(&self, peer: &ProxyProcess, pool: &str, now: Instant) -> ProxyEds {
        let ProxyProcess {
            node_id, remote, ..
        } = peer;
        let envoy = (remote.origin.clone(), node_id.clone());
        let streams = self
            .by_envoy
            .get(&envoy)
            .into_iter()
            .flatten()
            .filter_map(|id| self.open.get(id));
        let acks =
            streams.filter_map(|stream| Some((stream.is_of(remote), stream.pools.get(pool)?)));
        let [mut own, mut any] = [EdsAckSummary::default(); 2];
        for (is_own, ack) in acks {
            if is_own {
                // An Envoy that refused a set has not applied it, even if that was long ago.
                own.add(ack, ack.late && ack.refused.is_none());
            } else {
                any.add(ack, ack.late);
            }
        }
        let acks = if own.streams > 0 { own } else { any };
        match (
            acks.least,
            self.closed.get(&(envoy.0, envoy.1, pool.to_owned())),
        ) {
            (Some(acked), _) => ProxyEds::Acked(acked),
            (None, Some(closed))
                if acks.streams == 0 && now.saturating_duration_since(closed.at) < EDS_LINGER =>
            {
                ProxyEds::Acked(closed.acked)
            }
            _ => ProxyEds::None,
        }
    }

    pub fn open(&mut self, stream_id: u64, stream: EdsStream) {
        self.by_envoy
            .entry(stream.envoy())
            .or_default()
            .insert(stream_id);
        self.open.insert(stream_id, stream);
    }

    /// Removes a stream. The acknowledgements of the stream stay valid for [`EDS_LINGER`].
    pub fn close(&mut self, stream_id: u64, now: Instant) {
        self.closed
            .retain(|_, closed| now.saturating_duration_since(closed.at) < EDS_LINGER);
        let Some(stream) = self.open.remove(&stream_id) else {
            return;
        };
        let envoy = stream.envoy();
        if let Some(streams) = self.by_envoy.get_mut(&envoy) {
            streams.remove(&stream_id);
            if streams.is_empty() {
                self.by_envoy.remove(&envoy);
            }
        }
        let owner = envoy.0.owner();
        let closed_of_owner = self.closed.keys().filter(|(of, ..)| of.owner() == owner);
        let mut of_owner = closed_of_owner.count();
        // A stream that acknowledged nothing gives no information about its Envoy.
        for (pool, ack) in stream
            .pools
            .into_iter()
            .filter(|(_, ack)| ack.acked > 0 && !ack.late)
        {
            let key = (envoy.0.clone(), envoy.1.clone(), pool);
            let has_room = self.closed.len() < CLOSED_MAX && of_owner < CLOSED_PER_OWNER_MAX;
            if has_room || self.closed.contains_key(&key) {
                let closed = ClosedEdsStream {
                    at: now,
                    acked: ack.acked,
                };
                of_owner += usize::from(self.closed.insert(key, closed).is_none());
            }
        }
    }
}

/// A summary of what some streams acknowledged.
#[derive(Clone, Copy, Debug, Default)]
struct EdsAckSummary {
    streams: usize,
    /// The lowest revision that these streams acknowledged.
    least: Option<u64>,
}

impl EdsAckSummary {
    fn add(&mut self, ack: &EdsAck, is_left_out: bool) {
        self.streams += 1;
        if !is_left_out {
            self.least = Some(self.least.map_or(ack.acked, |least| least.min(ack.acked)));
        }
    }
}

// === impl EdsStream ===

impl EdsStream {
    fn envoy(&self) -> (Origin, String) {
        (self.remote.origin.clone(), self.node_id.clone())
    }

    /// Returns whether the stream is on the connection `remote`.
    fn is_of(&self, remote: &RemoteAddress) -> bool {
        self.remote.socket.is_some() && self.remote.socket == remote.socket
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: &str = "n";

    fn remote(last: u8, port: u16) -> RemoteAddress {
        RemoteAddress::new(None, Some(([10, 0, 0, last], port).into()))
    }

    fn peer(remote: RemoteAddress) -> ProxyProcess {
        ProxyProcess {
            node_id: NODE.to_owned(),
            id: 1,
            remote,
        }
    }

    fn stream(remote: RemoteAddress, acked: u64) -> EdsStream {
        let pools = BTreeMap::from([(
            "p".to_owned(),
            EdsAck {
                acked,
                ..EdsAck::default()
            },
        )]);
        EdsStream {
            node_id: NODE.to_owned(),
            remote,
            since: SystemTime::UNIX_EPOCH,
            pools,
        }
    }

    #[test]
    fn a_proxy_has_what_all_streams_of_its_connection_have_else_those_of_its_origin_and_node() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        assert_eq!(eds.state_of(&peer(remote(1, 1)), "p", now), ProxyEds::None);
        eds.open(1, stream(remote(1, 1), 5));
        eds.open(2, stream(remote(1, 1), 4));
        eds.open(3, stream(remote(1, 2), 3));
        eds.open(4, stream(remote(2, 1), 1));
        eds.open(
            5,
            EdsStream {
                node_id: "other".to_owned(),
                ..stream(remote(1, 1), 0)
            },
        );
        assert_eq!(
            eds.state_of(&peer(remote(1, 1)), "p", now),
            ProxyEds::Acked(4)
        );
        assert_eq!(
            eds.state_of(&peer(remote(1, 9)), "p", now),
            ProxyEds::Acked(3)
        );
        assert_eq!(eds.state_of(&peer(remote(3, 1)), "p", now), ProxyEds::None);
        assert_eq!(
            eds.state_of(&peer(remote(1, 1)), "another pool", now),
            ProxyEds::None
        );
    }

    #[test]
    fn one_that_does_not_answer_counts_no_more_and_one_that_refuses_only_for_its_own_connection() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        let mut late = stream(remote(1, 1), 0);
        late.pools.get_mut("p").unwrap().late = true;
        eds.open(1, late.clone());
        assert_eq!(eds.state_of(&peer(remote(1, 1)), "p", now), ProxyEds::None);
        late.pools.get_mut("p").unwrap().refused = Some("no".to_owned());
        eds.open(1, late);
        assert_eq!(
            eds.state_of(&peer(remote(1, 1)), "p", now),
            ProxyEds::Acked(0)
        );
        assert_eq!(eds.state_of(&peer(remote(1, 2)), "p", now), ProxyEds::None);
        eds.open(2, stream(remote(1, 2), 8));
        assert_eq!(
            eds.state_of(&peer(remote(1, 3)), "p", now),
            ProxyEds::Acked(8)
        );
    }

    #[test]
    fn closed_streams_of_one_address_leave_room_to_those_of_others() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        let mut close = |last: u8, node_id: String| {
            let closed = EdsStream {
                node_id,
                ..stream(remote(last, 1), 5)
            };
            eds.open(1, closed);
            eds.close(1, now);
        };
        (0..=STREAMS_MAX).for_each(|node| close(2, node.to_string()));
        close(1, NODE.to_owned());
        let honest = eds.state_of(&peer(remote(1, 9)), "p", now);
        assert_eq!(honest, ProxyEds::Acked(5));
        assert_eq!(eds.closed.len(), CLOSED_PER_OWNER_MAX + 1);
    }

    #[test]
    fn a_closed_stream_stands_for_its_envoy_until_envoy_must_be_back() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        let peer = peer(remote(1, 9));
        eds.open(1, stream(remote(1, 1), 5));
        eds.open(2, stream(remote(1, 2), 3));
        eds.close(1, now);
        assert_eq!(
            eds.state_of(&peer, "p", now),
            ProxyEds::Acked(3),
            "open streams count before closed ones"
        );
        eds.close(2, now);
        assert_eq!(
            eds.state_of(&peer, "p", now + EDS_LINGER / 2),
            ProxyEds::Acked(3)
        );
        assert_eq!(eds.state_of(&peer, "p", now + EDS_LINGER), ProxyEds::None);
        eds.open(3, stream(remote(1, 1), 0));
        eds.close(3, now);
        assert_eq!(
            eds.state_of(&peer, "p", now),
            ProxyEds::Acked(3),
            "a stream that acknowledged nothing is ignored"
        );
        eds.close(9, now); // This stream was never opened.
        assert!(eds.by_envoy.is_empty());
    }
}
