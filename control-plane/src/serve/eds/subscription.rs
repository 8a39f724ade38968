//! What one EDS stream sends next: pure, the same for both variants of the protocol.
//!
//! One response is out at a time. The next one, after its acknowledgement or refusal, has the
//! newest set. A refused set is not sent again: Envoy keeps its last good one until the set
//! changes. Envoys answer at once; one that has not applied a response for [`EDS_ACK_WAIT_MAX`] is
//! marked late until it has.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use super::EDS_ACK_WAIT_MAX;
use crate::state::shared::{EdsAck, PoolViews};

/// A stream's subscriptions.
#[derive(Debug, Default)]
pub struct EdsSubscription {
    names: BTreeSet<String>,
    in_flight: Option<PendingResponse>,
    /// Revisions sent, by pool; answered or not.
    sent: BTreeMap<String, u64>,
    acks: BTreeMap<String, EdsAck>,
    nonce: u64,
    /// Whether unknown names of this stream were logged.
    unknown: bool,
    /// Since when something sent is not taken over.
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
    /// Comes back with the answer.
    pub nonce: String,
    /// The pools that changed.
    pub changed: Vec<String>,
}

/// Envoy's answer to a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvoyAnswer {
    /// It took the response over.
    Accepted,
    /// It did not, for this reason.
    Refused(String),
}

// === impl EdsSubscription ===

impl EdsSubscription {
    /// Replaces the subscribed names. New ones are sent.
    pub fn set_names(&mut self, names: BTreeSet<String>) {
        self.sent.retain(|name, _| names.contains(name));
        self.acks.retain(|name, _| names.contains(name));
        for name in &names {
            self.acks.entry(name.clone()).or_default();
        }
        self.names = names;
    }

    /// Whether this is the first unknown name.
    pub fn is_first_unknown(&mut self) -> bool {
        !std::mem::replace(&mut self.unknown, true)
    }

    /// The names subscribed to.
    #[must_use]
    pub fn names(&self) -> &BTreeSet<String> {
        &self.names
    }

    /// The acknowledgements, by pool.
    #[must_use]
    pub fn acks(&self) -> &BTreeMap<String, EdsAck> {
        &self.acks
    }

    /// Takes Envoy's answer to the response with `nonce`. An answer to an older response is
    /// ignored.
    pub fn answer(&mut self, nonce: &str, answer: &EnvoyAnswer) -> bool {
        let Some(in_flight) = self.in_flight.take_if(|f| f.nonce == nonce) else { return false };
        for (name, revision) in in_flight.revisions {
            let Some(ack) = self.acks.get_mut(&name) else { continue };
            match answer {
                EnvoyAnswer::Accepted => *ack = EdsAck { acked: revision, ..EdsAck::default() },
                EnvoyAnswer::Refused(why) => ack.refused = Some(why.clone()),
            }
        }
        if *answer == EnvoyAnswer::Accepted {
            self.waits = None;
        }
        true
    }

    /// When it will be late, if it is not already and does not answer.
    #[must_use]
    pub fn late_at(&self) -> Option<Instant> {
        self.waits.filter(|_| self.acks.values().all(|ack| !ack.late)).map(|since| since + EDS_ACK_WAIT_MAX)
    }

    /// The time of [`Self::late_at`] has come.
    pub fn mark_late(&mut self) {
        let behind = |(name, ack): &(&String, &mut EdsAck)| self.sent.get(*name).is_some_and(|sent| *sent > ack.acked);
        self.acks.iter_mut().filter(behind).for_each(|(_, ack)| ack.late = true);
    }

    /// The next response, if there is one; it counts as sent.
    pub fn due(&mut self, pools: &PoolViews, now: Instant) -> Option<DueResponse> {
        if self.in_flight.is_some() {
            return None;
        }
        let current = |name: &String| pools.get(name).map(|view| (name.clone(), view.eds.revision));
        let known: Vec<(String, u64)> = self.names.iter().filter_map(current).collect();
        let revisions: Vec<(String, u64)> = known.into_iter().filter(|(name, revision)| self.sent.get(name) != Some(revision)).collect();
        if revisions.is_empty() {
            return None;
        }
        self.nonce += 1;
        self.waits = self.waits.or(Some(now));
        let nonce = self.nonce.to_string();
        self.sent.extend(revisions.iter().cloned());
        let changed = revisions.iter().map(|(name, _)| name.clone()).collect();
        self.in_flight = Some(PendingResponse { nonce: nonce.clone(), revisions });
        Some(DueResponse { nonce, changed })
    }
}
