//! Running requests that are given up for waiting requests of higher priority.
//!
//! Only a request of negative priority without a first response byte is given up. The lowest
//! priority comes first, and within a priority the request that was sent last, which loses the
//! least work. A request that was sent for the minimum share of its band is not given up, or the
//! band would lose that share.
//!
//! ```text
//!            sent                     a request finds no room           its host takes it
//!  (running) ────► may be given up ──────────────────────────► marked ──────────────────► given up
//!                        │ first byte, or end                    │ first byte, or end
//!                        ▼                                       ▼
//!                     forgotten                               forgotten
//! ```
//! A waiting request asks at most once in [`ASK_AGAIN_MS`], so in that time no more requests are
//! given up than wait. If this VM has no request to give up, the other VMs are asked one after
//! another. A VM asks with a [`RoomAsk`]. If the waiting request gets room first, the [`RoomAsk`]
//! is not withdrawn. A VM that knows of no waiting request drops the [`RoomAsk`].

use scheduler::flow::RoomAsk;
use scheduler::{EndpointRef, Timestamp};

use super::band::QueuedEntry;
use super::pass::SCAN_MAX;
use super::{FlowCharge, FlowOutcome, FlowQueues, QueuedTicket};

/// The maximum number of requests that one VM gives up in a second. Each time, the work of an
/// engine is lost and the client sends again. So a burst of more important requests takes room at
/// this pace, in addition to the room that becomes free by itself.
pub(super) const REVOKED_PER_S_MAX: u32 = 50;

/// A request that still waits after this time asks again, in ms. Its [`RoomAsk`] may have reached
/// no VM with a request to give up, or a VM that had given up too many. The room of a request that
/// is given up is free within a few ms, so even a busy machine rarely gives up two for one.
pub(super) const ASK_AGAIN_MS: u64 = 1_000;

/// The running requests that may be given up.
#[derive(Debug, Default)]
pub(super) struct Revocations {
    /// The requests in the order in which they were sent.
    running: Vec<RevocableRequest>,
    /// Requests to give up, until their hosts take them, each with the priority of the waiting
    /// request.
    marked: Vec<(RevocableRequest, i32)>,
    /// The requests for room that go to other VMs.
    asks: Vec<RoomAsk>,
    /// The second that is counted, and the number of requests marked in it.
    second: (u64, u32),
}

/// A running request.
#[derive(Clone, Copy, Debug)]
struct RevocableRequest {
    number: u64,
    priority: i32,
    endpoint: EndpointRef,
}

/// Whether the request may ask for room: it has not asked yet, or its last [`RoomAsk`] is at least
/// [`ASK_AGAIN_MS`] old.
fn may_ask(entry: &QueuedEntry, now: Timestamp) -> bool {
    entry
        .asked
        .is_none_or(|asked| now.ms_since(asked) >= ASK_AGAIN_MS)
}

/// Whether the request waits for the room that another request asks for: room at `endpoint`, or at
/// any endpoint.
fn waits_for(entry: &QueuedEntry, endpoint: Option<EndpointRef>) -> bool {
    !entry.nowhere && entry.full_at.is_some() && (endpoint.is_none() || entry.full_at == endpoint)
}

// === impl Revocations ===

impl Revocations {
    /// Whether no request is marked.
    pub(super) fn is_empty(&self) -> bool {
        self.marked.is_empty()
    }

    /// Whether other VMs must be asked.
    pub(super) fn has_asks(&self) -> bool {
        !self.asks.is_empty()
    }

    /// The numbers of marked requests.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.marked.iter().map(|(request, _)| request.number)
    }

    /// Marks a running request to be given up. Returns its number; `None` if there is none, or too
    /// many were given up.
    fn mark(&mut self, ask: RoomAsk, now: Timestamp) -> Option<u64> {
        let second = now.ms_since(Timestamp(0)) / 1_000;
        if self.second.0 != second {
            self.second = (second, 0);
        }
        let is_lower = |request: &RevocableRequest| {
            request.priority < ask.priority && ask.endpoint.is_none_or(|at| at == request.endpoint)
        };
        let all = self
            .running
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, request)| is_lower(request));
        let (at, _) = all
            .min_by_key(|(_, request)| request.priority)
            .filter(|_| self.second.1 < REVOKED_PER_S_MAX)?;
        self.second.1 += 1;
        let request = self.running.remove(at);
        self.marked.push((request, ask.priority));
        Some(request.number)
    }
}

// === impl FlowQueues ===

impl FlowQueues {
    /// Records that a request of negative priority was sent, so it may be given up until its first
    /// byte. `number` is its number, if it was queued. Returns its number; `None` if it must not be
    /// given up.
    pub(crate) fn watch(
        &mut self,
        charge: &FlowCharge,
        endpoint: EndpointRef,
        number: Option<u64>,
    ) -> Option<u64> {
        let priority = charge.flow.priority;
        if priority >= 0 || charge.owed {
            return None;
        }
        let number = number.unwrap_or_else(|| {
            self.last += 1;
            self.last
        });
        self.revocations.running.push(RevocableRequest {
            number,
            priority,
            endpoint,
        });
        Some(number)
    }

    /// Records that the request has its first byte or has ended, so it can no longer be given up.
    pub(crate) fn forget(&mut self, number: u64) {
        self.revocations
            .running
            .retain(|request| request.number != number);
        let marked = &mut self.revocations.marked;
        if marked.iter().any(|(request, _)| request.number == number) {
            marked.retain(|(request, _)| request.number != number);
            self.to_resume.retain(|other| *other != number);
        }
    }

    /// Takes a request that is marked, and counts it. Returns when its client may try again, in
    /// seconds.
    pub(crate) fn take_marked(&mut self, number: u64) -> Option<u32> {
        let (request, waiting) = self
            .revocations
            .marked
            .iter()
            .copied()
            .find(|(request, _)| request.number == number)?;
        self.forget(number);
        self.band_mut(request.priority).counters.given_up += 1;
        self.band_mut(waiting).counters.given_up_for += 1;
        Some(
            self.refusal(FlowOutcome::EvictedOther, request.priority)
                .retry_after_s,
        )
    }

    /// Records that a waiting request found no room. The request asks for a running request to be
    /// given up, here or in another VM. If no request of its band has room there (`is_full`), the
    /// other requests that wait for this endpoint are not tried now, and ask too.
    pub(crate) fn ask_for_room(
        &mut self,
        ticket: &QueuedTicket,
        endpoint: Option<EndpointRef>,
        is_full: bool,
        now: Timestamp,
    ) {
        let priority = ticket.flow.priority;
        let number = ticket.number;
        let band = self.band_mut(priority);
        let own = band
            .entry_mut(ticket.flow.at, ticket.key, number)
            .into_iter()
            .filter(|entry| may_ask(entry, now));
        let own = own.map(|entry| entry.asked = Some(now)).count();
        let others = band
            .queued_mut()
            .filter(|entry| is_full && waits_for(entry, endpoint) && may_ask(entry, now));
        let others = others
            .take(SCAN_MAX)
            .map(|entry| entry.asked = Some(now))
            .count();
        for _ in 0..own + others {
            let ask = RoomAsk { endpoint, priority };
            if !self.give_up_for(ask, now) && self.has_flow_peers() {
                self.revocations.asks.push(ask);
            }
        }
    }

    /// Handles a [`RoomAsk`] from another VM. Returns false if another VM must be asked, because no
    /// running request is given up here. The caller knows by the load reports whether any request
    /// waits.
    pub fn give_room(&mut self, ask: RoomAsk, now: Timestamp) -> bool {
        !self.any_queued() || self.give_up_for(ask, now)
    }

    /// Marks a running request of lower priority, which is then ended to make room. Returns false
    /// if there is none, or if too many were ended.
    pub(crate) fn give_up_for(&mut self, ask: RoomAsk, now: Timestamp) -> bool {
        let number = self.revocations.mark(ask, now);
        self.to_resume.extend(number);
        number.is_some()
    }

    /// Takes the requests for room that go to other VMs.
    pub fn take_asks(&mut self) -> Vec<RoomAsk> {
        std::mem::take(&mut self.revocations.asks)
    }
}

#[cfg(test)]
mod tests;
