//! Decides the next response of one EDS stream. This module is pure, and the same for both variants
//! of the protocol.
//!
//! At most one response waits for an answer. After Envoy's acknowledgement or refusal, the next
//! response has the newest set. A refused set is not sent again. Envoy keeps its last good set
//! until the set changes. An Envoy normally answers immediately. An Envoy that has not applied a
//! response for [`EDS_ACK_WAIT_MAX`] is late until it applies a response.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::state::eds_streams::EdsAck;
use crate::state::pool_views::PoolViews;

/// The maximum time that pool updates wait for an Envoy to apply an EDS response. Envoys need
/// milliseconds, a busy Envoy up to a second. A client that takes longer is broken or is not an
/// Envoy. Such a client must not keep endpoints from its proxy forever.
pub const EDS_ACK_WAIT_MAX: Duration = Duration::from_secs(5);

/// The subscriptions of a stream.
#[derive(Debug, Default)]
pub struct EdsSubscription {
    names: BTreeSet<String>,
    in_flight: Option<PendingResponse>,
    /// The revisions sent, by pool, whether answered or not.
    sent: BTreeMap<String, u64>,
    acks: BTreeMap<String, EdsAck>,
    nonce: u64,
    /// Whether names of this stream that the daemon does not serve were logged.
    unserved: bool,
    /// The time when the oldest response that is not applied yet was sent.
    waits: Option<Instant>,
}

#[derive(Debug)]
struct PendingResponse {
    nonce: String,
    revisions: Vec<(String, u64)>,
}

/// A response to send.
#[derive(Debug, PartialEq, Eq)]
pub struct DueResponse {
    /// The nonce that Envoy returns with its answer.
    pub nonce: String,
    /// The pools that changed.
    pub changed: Vec<String>,
}

/// Envoy's answer to a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvoyAnswer {
    /// Envoy applied the response.
    Accepted,
    /// Envoy refused the response, for this reason.
    Refused(String),
}

// === impl EdsSubscription ===

impl EdsSubscription {
    /// Replaces the subscribed names. Pools of new names become due.
    pub fn set_names(&mut self, names: BTreeSet<String>) {
        self.sent.retain(|name, _| names.contains(name));
        self.acks.retain(|name, _| names.contains(name));
        for name in &names {
            self.acks.entry(name.clone()).or_default();
        }
        self.names = names;
    }

    /// Returns true only at its first call, so that a stream's names that are not served are logged
    /// once.
    pub fn is_first_unserved(&mut self) -> bool {
        !std::mem::replace(&mut self.unserved, true)
    }

    #[must_use]
    pub fn names(&self) -> &BTreeSet<String> {
        &self.names
    }

    #[must_use]
    pub fn acks(&self) -> &BTreeMap<String, EdsAck> {
        &self.acks
    }

    /// Applies Envoy's answer to the response with `nonce`. Returns whether this was the answer to
    /// the last response. Other answers are ignored.
    pub fn answer(&mut self, nonce: &str, answer: &EnvoyAnswer) -> bool {
        let Some(in_flight) = self.in_flight.take_if(|f| f.nonce == nonce) else {
            return false;
        };
        for (name, revision) in in_flight.revisions {
            let Some(ack) = self.acks.get_mut(&name) else {
                continue;
            };
            match answer {
                EnvoyAnswer::Accepted => {
                    *ack = EdsAck {
                        acked: revision,
                        ..EdsAck::default()
                    }
                }
                EnvoyAnswer::Refused(why) => ack.refused = Some(why.clone()),
            }
        }
        if *answer == EnvoyAnswer::Accepted {
            self.waits = None;
        }
        true
    }

    /// Returns the time when the stream becomes late if Envoy does not answer. Returns `None` if
    /// all responses are answered, or the stream is late already.
    #[must_use]
    pub fn late_at(&self) -> Option<Instant> {
        self.waits
            .filter(|_| self.acks.values().all(|ack| !ack.late))
            .map(|since| since + EDS_ACK_WAIT_MAX)
    }

    /// Marks the pools without acknowledgement as late, at the time of [`Self::late_at`].
    pub fn mark_late(&mut self) {
        let behind = |(name, ack): &(&String, &mut EdsAck)| {
            self.sent.get(*name).is_some_and(|sent| *sent > ack.acked)
        };
        self.acks
            .iter_mut()
            .filter(behind)
            .for_each(|(_, ack)| ack.late = true);
    }

    /// Returns the next response, if one is due. Records the returned response as sent.
    pub fn due(&mut self, pools: &PoolViews, now: Instant) -> Option<DueResponse> {
        if self.in_flight.is_some() {
            return None;
        }
        let current = |name: &String| {
            pools
                .get(name)
                .map(|view| (name.clone(), view.eds.revision))
        };
        let known: Vec<(String, u64)> = self.names.iter().filter_map(current).collect();
        let revisions: Vec<(String, u64)> = known
            .into_iter()
            .filter(|(name, revision)| self.sent.get(name) != Some(revision))
            .collect();
        if revisions.is_empty() {
            return None;
        }
        self.nonce += 1;
        self.waits = self.waits.or(Some(now));
        let nonce = self.nonce.to_string();
        self.sent.extend(revisions.iter().cloned());
        let changed = revisions.iter().map(|(name, _)| name.clone()).collect();
        self.in_flight = Some(PendingResponse {
            nonce: nonce.clone(),
            revisions,
        });
        Some(DueResponse { nonce, changed })
    }
}
