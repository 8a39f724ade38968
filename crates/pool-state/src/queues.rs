//! The requests that one VM holds for one pool: bands by priority, flows by fairness id or client.
//!
//! The queues know numbers, not requests: the host that holds a stream finds it by its number. A
//! request leaves exactly once: it is sent, refused, or dropped because its client left.
//!
//! Releases happen in *passes*. A pass begins when an endpoint may have got room
//! ([`FlowQueues::room_changed`], [`FlowQueues::room_freed`]). A pass names the requests to try,
//! one by one, in the order of bands, flows and arrival ([`FlowQueues::next_due`]). The caller
//! picks an endpoint for each request, and reports whether the endpoint has room. If a request does
//! not fit, others that go to other endpoints may pass it, within [`LOOK_AHEAD`].

mod accounts;
mod arrival;
mod band;
mod counters;
mod displacement;
mod other_vms;
mod outside;
mod pass;
mod revocation;
mod room;
mod shared;
mod shares;

pub use arrival::{DEFAULT_FLOW, FlowArrival};
pub(crate) use arrival::{Waiting, short_id};
pub use counters::{BandCounters, FLOW_OUTCOMES, FlowOutcome, QueuedReason};
pub use room::FlowCharge;
pub(crate) use room::SentFlow;

use std::collections::VecDeque;

pub use band::FlowRef;
use band::{BandQueue, QueuedEntry};
use other_vms::SharedQueues;
use outside::OutsideQueues;
use pass::ReleasePass;
use revocation::Revocations;
use scheduler::flow::{FlowControl, TRIES_AT_ENDPOINT};
use scheduler::{EndpointRef, Timestamp};
pub(crate) use shared::ClaimedEntry;
pub use shared::FlowTurn;

/// The maximum number of bands. Priorities come from objectives. Priorities beyond this number
/// share the nearest band.
const BANDS_MAX: usize = 64;

/// The maximum number of requests that are checked between two ticks after the pool has changed. A
/// host resumes them all before its thread does anything else, and each one costs a pick.
const CHECKS_MAX: usize = 256;

/// The time over which the rate of releases is averaged, in ms.
const RATE_MS: f64 = 10_000.0;

/// The longest `Retry-After`, in seconds. For longer times, the rate of releases is not meaningful.
const RETRY_AFTER_S_MAX: u32 = 120;

#[derive(Debug, Default)]
pub struct FlowQueues {
    /// The bands, highest priority first.
    bands: Vec<BandQueue>,
    /// The number of the last request that was queued.
    last: u64,
    pass: ReleasePass,
    /// The requests that other VMs of the process hold.
    shared: SharedQueues,
    /// The requests that other proxies hold.
    outside: OutsideQueues,
    /// Running requests that may be given up.
    revocations: Revocations,
    /// Requests to refuse, until their hosts take the refusal.
    leaving: Vec<(u64, QueueRefusal)>,
    /// The numbers that no host has received yet: of requests in `leaving`, of queued requests to
    /// check, and of requests to give up.
    to_resume: VecDeque<u64>,
    /// The number of requests sent, decayed until this time.
    sent: (f64, Timestamp),
    ticked_at: Timestamp,
}

/// The place of a request in the queues.
#[derive(Debug)]
#[must_use = "a queued request that is not resumed or dropped stays counted"]
pub struct QueuedTicket {
    /// The number by which its host finds the stream.
    pub number: u64,
    flow: FlowRef,
    key: u64,
    /// Whether the band was empty before this request.
    pub(crate) is_first: bool,
}

/// The reason why a request that was queued, or would have to be queued, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueRefusal {
    pub outcome: FlowOutcome,
    /// The time after which to try again, in seconds.
    pub retry_after_s: u32,
}

// === impl QueuedTicket ===

impl QueuedTicket {
    pub(crate) fn priority(&self) -> i32 {
        self.flow.priority
    }

    /// The hash of the fairness id, or of the client.
    pub(crate) fn flow_id(&self) -> u64 {
        self.flow.id
    }
}

// === impl FlowQueues ===

impl FlowQueues {
    /// The number of requests queued.
    #[must_use]
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn queued(&self) -> usize {
        self.bands.iter().map(|band| band.queued).sum()
    }

    /// Whether nothing is queued or waits for its refusal.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queued() == 0 && self.leaving.is_empty() && self.revocations.is_empty()
    }

    /// The bytes of the requests queued.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bands.iter().map(|band| band.bytes).sum()
    }

    /// The counters of each band, the highest first.
    pub fn counters(&self) -> impl Iterator<Item = &BandCounters> {
        self.bands.iter().map(|band| &band.counters)
    }

    /// Whether [`Self::next_due`] may name a request. Ignores freed room that was not checked.
    #[must_use]
    pub fn is_due(&self) -> bool {
        let is_due = if self.is_shared() {
            self.shared.is_due()
        } else {
            self.queued() > 0 && self.pass.is_due()
        };
        !self.to_resume.is_empty() || is_due || self.revocations.has_asks()
    }

    /// Records that an endpoint may have got room. The next pass, or the next round of passes that
    /// all VMs make, tries every band again.
    pub fn room_changed(&mut self) {
        if self.is_shared() {
            self.shared.round.room_changed();
        } else if self.queued() > 0 {
            self.pass.begin();
        } else {
            self.shared.room_unclaimed = true;
        }
    }

    /// Records that a request at the endpoint has made room. This has the effect of
    /// [`Self::room_changed`] if any request fits there, which the owner of the loads checks
    /// ([`Self::freed`]).
    pub(crate) fn room_freed(&mut self, endpoint: EndpointRef) {
        if !self.any_queued() || !self.pass.add_freed(endpoint) {
            self.room_changed();
        }
    }

    /// Whether room was freed at an endpoint that was not checked yet.
    #[must_use]
    pub fn has_freed(&self) -> bool {
        !self.pass.freed().is_empty()
    }

    /// The endpoints where room was freed.
    pub(crate) fn freed(&self) -> &[EndpointRef] {
        self.pass.freed()
    }

    /// Records that the freed endpoints were checked.
    pub(crate) fn forget_freed(&mut self) {
        self.pass.forget_freed();
    }

    /// Records that no request of this priority fits at the endpoint, so this pass tries none
    /// there.
    pub(crate) fn endpoint_full(&mut self, endpoint: EndpointRef, priority: i32) {
        self.pass
            .endpoint_full(endpoint, priority, TRIES_AT_ENDPOINT);
    }

    /// Whether a request of this priority may be tried at once: no request of its band waits, and
    /// the next pass has no request of a higher band to try.
    pub(crate) fn may_pass(&mut self, priority: i32, now: Timestamp) -> bool {
        let higher_first = self.pass.is_due()
            && self
                .bands
                .iter()
                .any(|band| band.priority > priority && band.queued > 0);
        let band = self.band_mut(priority);
        band.seen = now;
        band.queued == 0 && !higher_first
    }

    /// Refuses a request that was removed from its band. Its host takes the refusal
    /// ([`Self::take_refusal`]).
    fn refuse(&mut self, priority: i32, entry: &QueuedEntry, outcome: FlowOutcome, now: Timestamp) {
        let refusal = self.refusal(outcome, priority);
        self.count_end(priority, entry, outcome, now);
        self.leaving.push((entry.number, refusal));
        self.to_resume.push_back(entry.number);
    }

    /// Counts a request that left its band.
    fn count_end(
        &mut self,
        priority: i32,
        entry: &QueuedEntry,
        outcome: FlowOutcome,
        now: Timestamp,
    ) {
        self.band_mut(priority)
            .counters
            .count(outcome, now.ms_since(entry.since));
        if entry.to_check {
            self.to_resume.retain(|number| *number != entry.number);
        }
    }

    /// Takes the refusal of a request that the limits or its TTL ended.
    pub(crate) fn take_refusal(&mut self, number: u64) -> Option<QueueRefusal> {
        let at = self
            .leaving
            .iter()
            .position(|(leaving, _)| *leaving == number)?;
        self.to_resume.retain(|other| *other != number);
        Some(self.leaving.swap_remove(at).1)
    }

    /// Removes a request that is sent, or that its client or the pool gave up. Does nothing if the
    /// request was removed before.
    pub(crate) fn remove(&mut self, ticket: &QueuedTicket, outcome: FlowOutcome, now: Timestamp) {
        if self.take_refusal(ticket.number).is_some() {
            return;
        }
        let priority = ticket.flow.priority;
        if let Some(entry) = self
            .band_mut(priority)
            .take(ticket.flow.at, ticket.key, ticket.number)
        {
            self.count_end(priority, &entry, outcome, now);
        }
    }

    /// The reason why the request is queued; `None` if it is not.
    #[must_use]
    pub fn reason(&self, ticket: &QueuedTicket, now: Timestamp) -> Option<QueuedReason> {
        let band = self
            .bands
            .iter()
            .find(|band| band.priority == ticket.flow.priority)?;
        Some(
            band.entry(ticket.flow.at, ticket.key, ticket.number)?
                .reason(band.priority, now),
        )
    }

    /// The requests that have waited longest, with their ids, as of the last tick.
    #[must_use]
    pub fn longest_queued(&self, most: usize) -> Vec<(&str, QueuedReason)> {
        let entries = self.bands.iter().flat_map(|band| {
            band.flows()
                .iter()
                .flat_map(|flow| &flow.queued)
                .map(|entry| (band.priority, entry))
        });
        let mut longest: Vec<(i32, &QueuedEntry)> = Vec::new();
        for (priority, entry) in entries {
            let at = longest.partition_point(|(_, other)| other.since <= entry.since);
            if at < most {
                longest.truncate(most - 1);
                longest.insert(at, (priority, entry));
            }
        }
        longest
            .into_iter()
            .map(|(priority, entry)| (&*entry.request_id, entry.reason(priority, self.ticked_at)))
            .collect()
    }

    /// The next request to resume; `None` ends the pass.
    pub fn next_due(&mut self, control: &FlowControl, now: Timestamp) -> Option<u64> {
        if let Some(number) = self.to_resume.pop_front() {
            return Some(number);
        }
        self.pass.next(&self.bands, control, now)
    }

    /// The next request to refuse when no request is queued any more.
    pub(crate) fn next_to_resume(&mut self) -> Option<u64> {
        self.to_resume.pop_front()
    }

    /// Whether an older request of at least this priority waits for room at `endpoint`.
    pub(crate) fn is_claimed(
        &self,
        endpoint: EndpointRef,
        priority: i32,
        number: Option<u64>,
    ) -> bool {
        self.pass.is_claimed(endpoint, priority, number)
    }

    /// Records that the endpoint picked for the request has no room, or, for `None`, that no
    /// endpoint can serve it now.
    pub(crate) fn found_full(
        &mut self,
        ticket: &QueuedTicket,
        endpoint: Option<EndpointRef>,
        now: Timestamp,
    ) {
        let priority = ticket.flow.priority;
        let entry = self
            .band_mut(priority)
            .entry_mut(ticket.flow.at, ticket.key, ticket.number);
        let waited_ms = entry.map_or(0, |entry| {
            entry.full_at = endpoint.or(entry.full_at);
            entry.nowhere = endpoint.is_none();
            now.ms_since(entry.since)
        });
        self.pass
            .found_full(ticket.number, endpoint, priority, waited_ms);
    }

    /// Ends the wait of requests whose time is over. `is_empty` says that no endpoint of the pool
    /// is ready.
    pub(crate) fn expire(&mut self, is_empty: bool, now: Timestamp) {
        self.ticked_at = now;
        let outcome = if is_empty {
            FlowOutcome::EvictedNoEndpoints
        } else {
            FlowOutcome::EvictedTtl
        };
        for at in 0..self.bands.len() {
            while let Some((priority, entry)) = self
                .bands
                .get_mut(at)
                .and_then(|band| Some((band.priority, band.take_expired(is_empty, now)?)))
            {
                self.refuse(priority, &entry, outcome, now);
            }
        }
        self.bands.iter_mut().for_each(|band| band.show_oldest(now));
        self.pass.forget_named();
        // A host that did not have the stream yet gets the number again.
        self.to_resume = self
            .leaving
            .iter()
            .map(|(number, _)| *number)
            .chain(self.revocations.numbers())
            .collect();
        for entry in self
            .bands
            .iter_mut()
            .flat_map(BandQueue::queued_mut)
            .filter(|entry| entry.to_check)
            .take(CHECKS_MAX)
        {
            self.to_resume.push_back(entry.number);
        }
    }

    /// Records that the pool has changed. Each queued request is resumed once, and refused if
    /// waiting can no longer help it. Requests beyond [`CHECKS_MAX`] wait for the next ticks.
    pub(crate) fn check_all(&mut self) {
        self.pass.forget_named();
        for entry in self.bands.iter_mut().flat_map(BandQueue::queued_mut) {
            let is_new = !std::mem::replace(&mut entry.to_check, true);
            if is_new && self.to_resume.len() < CHECKS_MAX {
                self.to_resume.push_back(entry.number);
            }
        }
    }

    /// Whether the request was resumed to be checked. A request that the pass names is tried, also
    /// if it was not checked yet.
    pub(crate) fn take_to_check(&mut self, ticket: &QueuedTicket) -> bool {
        let entry = self.band_mut(ticket.flow.priority).entry_mut(
            ticket.flow.at,
            ticket.key,
            ticket.number,
        );
        entry.is_some_and(|entry| std::mem::take(&mut entry.to_check))
            && !self.pass.is_named(ticket.number)
    }

    /// Refuses all requests, because the pool no longer has flow control.
    pub(crate) fn end_all(&mut self, now: Timestamp) {
        for at in 0..self.bands.len() {
            while let Some((priority, entry)) = self.bands.get_mut(at).and_then(|band| {
                Some((band.priority, band.take_expired(true, Timestamp(u64::MAX))?))
            }) {
                self.refuse(priority, &entry, FlowOutcome::EvictedOther, now);
            }
        }
    }

    /// The refusal of a request, with the time after which the requests before it will have been
    /// sent.
    pub(crate) fn refusal(&self, outcome: FlowOutcome, priority: i32) -> QueueRefusal {
        let before: usize = self
            .bands
            .iter()
            .filter(|band| band.priority >= priority)
            .map(|band| band.queued)
            .sum();
        let before = before as u64 + self.shared.queued(priority, i32::MAX).requests;
        let rate = self.sent.0 / RATE_MS * 1_000.0;
        let seconds = (before as f64 / rate.max(f64::MIN_POSITIVE)).ceil();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped"
        )]
        let retry_after_s = seconds.clamp(1.0, f64::from(RETRY_AFTER_S_MAX)) as u32;
        QueueRefusal {
            outcome,
            retry_after_s,
        }
    }

    fn band_mut(&mut self, priority: i32) -> &mut BandQueue {
        let at = self.bands.partition_point(|band| band.priority > priority);
        let exists = self
            .bands
            .get(at)
            .is_some_and(|band| band.priority == priority);
        let at = if exists || self.bands.len() >= BANDS_MAX {
            at.min(self.bands.len().saturating_sub(1))
        } else {
            self.bands.insert(at, BandQueue::new(priority));
            at
        };
        #[expect(clippy::indexing_slicing, reason = "found or inserted just above")]
        &mut self.bands[at]
    }
}

#[cfg(test)]
mod tests;
