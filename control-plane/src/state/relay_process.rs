//! The processes of a pool that share their load, and what was sent to each.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use pool_state::PeerLoadReport;
use proto::placements::{self, PlacementKind};
use scheduler::EndpointRef;
use tokio::time::Instant;

use crate::state::backlog_sum::QueuedRequests;
use crate::state::peer::Origin;

/// The part of a pool's placements and load that was sent to a proxy.
#[derive(Clone, Copy, Debug, Default)]
pub struct RelayCursor {
    pub(super) version: u64,
    /// The number of the first placement that was not sent to the proxy.
    pub(super) placement: u64,
    pub(super) sent_at: Option<Instant>,
    /// The time until the next message.
    pub(super) interval: Duration,
    /// Whether more was due than fits into one message.
    pub(super) more: bool,
}

/// A process that joins a pool with a stream.
#[derive(Clone, Copy, Debug)]
pub struct RelayMember<'a> {
    pub process_id: u64,
    pub stream_id: u64,
    pub origin: &'a Origin,
}

/// A process of a pool.
#[derive(Debug)]
pub(super) struct RelayProcess {
    pub(super) origin: Origin,
    /// The stream that the process belongs to, which is its newest stream that requested the pool.
    pub(super) stream_id: u64,
    pub(super) row: PeerLoadReport,
    pub(super) row_bytes: usize,
    /// The requests that the process's flow control queues.
    pub(super) backlog: QueuedRequests,
    pub(super) claimed: ClaimedPrompts,
    pub(super) received_at: Instant,
    /// The time when the process's load report was last used.
    pub(super) counted_at: Option<Instant>,
    /// The stamp of the last load report that had one; 0 if none had one.
    pub(super) stamp: u64,
}

/// The minimum number of a process's last claims that are remembered. The maximum is twice as many.
/// A busy proxy has half as many requests without a reply.
const CLAIMS_MAX: usize = 1_024;

/// The last prompts that a process claimed when it sent them, each by its endpoint and the hash of
/// all its blocks. The process may withdraw these claims, and no others.
#[derive(Debug, Default)]
pub(super) struct ClaimedPrompts {
    newest: BTreeSet<(EndpointRef, u64)>,
    older: BTreeSet<(EndpointRef, u64)>,
    /// The key of the hashes. A process does not know this key, so it cannot make two prompts with
    /// the same hash.
    key: RandomState,
}

// === impl ClaimedPrompts ===

impl ClaimedPrompts {
    /// Returns the claims in a message, without withdrawals of prompts that the process has not
    /// claimed. A claim that the process repeats takes back its earlier one first. Otherwise other
    /// proxies would see two claims, which no withdrawal takes away.
    pub(super) fn admit(&mut self, mut claims: &[u8]) -> Vec<u8> {
        let mut admitted = Vec::new();
        while let Some(claim) = placements::take(claims) {
            let prompt = (claim.endpoint, self.key.hash_one(claim.blocks));
            let kind = PlacementKind::of_number(claim.kind);
            let (bytes, rest) = claims.split_at(claims.len() - claim.rest.len());
            let is_admitted = match kind {
                Some(_) if claim.blocks.is_empty() => false,
                Some(PlacementKind::PeerWithdrawn) => false,
                Some(PlacementKind::Withdrawn) => {
                    self.newest.remove(&prompt) || self.older.remove(&prompt)
                }
                Some(PlacementKind::Unconfirmed) => {
                    if self.add(prompt) {
                        let earlier = PlacementKind::Withdrawn;
                        let hashes = claim.hashes();
                        placements::push_claim(&mut admitted, earlier, claim.endpoint, &hashes);
                    }
                    true
                }
                _ => true,
            };
            if is_admitted {
                admitted.extend_from_slice(bytes);
            }
            claims = rest;
        }
        admitted
    }

    /// Remembers a claim. Returns whether the process made it before.
    fn add(&mut self, prompt: (EndpointRef, u64)) -> bool {
        let was_older = self.older.remove(&prompt);
        if self.newest.len() >= CLAIMS_MAX {
            self.older = std::mem::take(&mut self.newest);
        }
        // It may have become one of the older claims just now.
        let was_newest = self.older.remove(&prompt) | !self.newest.insert(prompt);
        was_older || was_newest
    }
}

// === impl RelayCursor ===

impl RelayCursor {
    /// Returns the time when the proxy may next get a message. `None` means immediately.
    #[must_use]
    pub fn due_at(&self) -> Option<Instant> {
        self.sent_at.map(|at| at + self.interval)
    }

    /// Returns whether something is due that did not fit into the last message.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.more
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due_at().is_none_or(|at| at <= now)
    }
}

// === impl RelayProcess ===

impl RelayProcess {
    pub(super) fn new(member: RelayMember<'_>, now: Instant) -> Self {
        Self {
            origin: member.origin.clone(),
            stream_id: member.stream_id,
            row: PeerLoadReport::default(),
            row_bytes: 0,
            backlog: QueuedRequests::default(),
            claimed: ClaimedPrompts::default(),
            received_at: now,
            counted_at: None,
            stamp: 0,
        }
    }
}
