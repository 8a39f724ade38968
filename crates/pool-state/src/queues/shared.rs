//! The queues of this VM as a part of the order that all VMs of the process share
//! ([`scheduler::flow::SharedOrder`]).
//!
//! While no VM holds a request, nothing is shared. While a VM holds one, each VM holds all arriving
//! requests and sends them by a claim: [`FlowQueues::turn`], a pick, [`FlowQueues::write_order`],
//! and then [`FlowQueues::order_written`], or [`FlowQueues::put_back`] if another VM wrote first.

use scheduler::flow::{
    BandAccount, FlowAccount, FlowControl, OrderRow, OrderStep, QueuedInBand, RowBand, SharedOrder,
};
use scheduler::{EndpointRef, Timestamp};

use super::band::{BandQueue, QueuedEntry};
use super::counters::FlowOutcome;
use super::displacement::limits;
use super::other_vms::{OtherVms, RoundState, SharedQueues};
use super::pass::{ReleasePass, SCAN_MAX};
use super::{FlowQueues, QueuedTicket};

/// A new round begins at a tick if a load report changed and the last round is this old, in ms.
/// This covers events that no VM saw.
const ROUND_MS: u64 = 10;

/// The maximum number of requests of a VM for which its row names the endpoints. With more, another
/// VM cannot know whether one of them could go. A pass examines at most the first [`SCAN_MAX`] of a
/// flow.
const ROW_ENTRIES_MAX: usize = 256;

/// The next step of a host for queued requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowTurn {
    /// Resume the held request with this number, and refuse it.
    Resume(u64),
    /// Read the loads of the other VMs, then resume the request with this number.
    Try(u64),
    /// Write the order. After a successful write, wake the VM with this number, if any, and do
    /// nothing else.
    Write(Option<u64>),
    /// A request of this VM is next but may not be resumed now, so wake this VM itself.
    WakeSelf,
    /// Do nothing.
    Rest,
}

/// The maximum number of endpoints that the row of a VM names.
const ROW_ENDPOINTS_MAX: usize = 8;

// === impl FlowQueues ===

impl FlowQueues {
    /// Whether the order of all VMs is used: another VM serves requests, and at least one VM holds
    /// requests.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        match self.shared.others {
            OtherVms::None => false,
            OtherVms::Idle => self.queued() > 0,
            OtherVms::Holding => true,
        }
    }

    /// Whether other VMs serve requests.
    #[must_use]
    pub fn has_flow_peers(&self) -> bool {
        self.shared.others != OtherVms::None
    }

    /// Sets whether other VMs serve requests, and whether another VM holds requests, as their load
    /// reports say.
    pub fn set_peers(&mut self, has_peers: bool, others_hold: bool) {
        let was_shared = self.is_shared();
        let before = self.shared.others;
        let others = match (has_peers, others_hold) {
            (true, true) => OtherVms::Holding,
            (true, false) => OtherVms::Idle,
            (false, _) => OtherVms::None,
        };
        self.shared.others = others;
        let holds = others == OtherVms::Holding;
        // Another VM may have begun to wait when room was made here. A VM that began later already
        // knew of the room.
        if std::mem::take(&mut self.shared.room_unclaimed) && holds && before != others {
            self.shared.round.room_changed();
        }
        if !holds {
            self.shared.forget_bands();
        }
        if was_shared && !self.is_shared() {
            self.shared = SharedQueues::default();
            self.shared.others = others;
            // No other VM is left to ask.
            self.take_asks();
            if self.queued() > 0 {
                self.room_changed();
            }
        }
    }

    /// The requests that this VM holds, encoded for other proxies.
    #[must_use]
    pub fn backlog(&self) -> Vec<u8> {
        proto::backlog::write(&self.queued_by_band())
    }

    /// The requests that this VM holds, by band.
    pub fn queued_by_band(&self) -> Vec<QueuedInBand> {
        let queued = self.bands.iter().filter(|band| band.queued > 0);
        queued.map(BandQueue::queued_here).collect()
    }

    /// Whether this VM or another one of the process holds requests.
    #[must_use]
    pub fn any_queued(&self) -> bool {
        self.queued() > 0 || self.shared.others == OtherVms::Holding
    }

    /// Sets the requests that other proxies hold, how many of their requests run, and the age of
    /// these numbers in µs.
    pub fn set_outside(&mut self, bands: &[QueuedInBand], running: u64, delay_us: u64) {
        if self.outside.set(bands, running, delay_us) {
            self.others_freed();
        }
    }

    /// Records that other proxies may have freed room, or may have left room to this proxy. This
    /// has the effect of [`Self::room_freed`] for each endpoint that a request waits for.
    pub(crate) fn others_freed(&mut self) {
        let awaited = self.awaited();
        if awaited.is_empty() {
            self.room_changed();
        }
        awaited
            .into_iter()
            .for_each(|(endpoint, _)| self.room_freed(endpoint));
    }

    /// Sets how many proxies there are, if nothing is received from the other proxies; 0 otherwise.
    pub fn set_alone(&mut self, of: u32) {
        self.outside.set_alone(of);
    }

    /// Returns for how many of `active` other proxies each pick here also counts.
    pub(crate) fn proxies_per_pick(&self, active: u32) -> u32 {
        self.outside.proxies_per_pick(self.any_queued(), active)
    }

    /// Sets this proxy's part of the running requests, while the load of the other proxies is
    /// known.
    pub(crate) fn set_part(&mut self, part: f64) {
        self.outside.set_part(part);
    }

    /// Whether a request of this priority must leave the room that it finds to other proxies.
    /// `known` returns the highest priority of the pool's objects and the running requests.
    pub(crate) fn is_over_share(&self, priority: i32, known: impl FnOnce() -> (i32, u64)) -> bool {
        let Some(band) = self
            .bands
            .iter()
            .find(|band| band.priority == priority)
            .filter(|_| self.outside.holds_any())
        else {
            return false;
        };
        let queued = band.queued as u64 + self.shared.queued(priority, priority).requests;
        if band.is_owed() {
            return false;
        }
        let (highest, running) = known();
        let highest = self
            .bands
            .first()
            .map_or(highest, |band| band.priority.max(highest));
        self.outside
            .is_over_share(priority, highest, queued.max(1), running)
    }

    /// Records that a band over its share has found room. Returns whether the band leaves it to
    /// other proxies.
    pub(crate) fn leaves_room(&mut self, priority: i32, now: Timestamp) -> bool {
        self.outside.leaves_room(priority, now)
    }

    /// Lets a pass try requests in room that was left to other proxies, because this proxy may use
    /// it now. The VM calls this at a tick. After a wake-up it does not, because VMs would wake
    /// each other for new rounds as long as room is left.
    pub fn retry_left_room(&mut self) {
        if self.outside.is_patient() {
            self.room_changed();
        }
    }

    /// Records that the load report of another VM has changed.
    pub(crate) fn peer_changed(&mut self) {
        if self.is_shared() {
            self.shared.rows_changed = true;
        } else if self.queued() > 0 {
            self.room_changed();
        }
    }

    /// Causes the order to be read soon, because another VM woke this one, or a tick has come.
    pub fn look_at_order(&mut self) {
        if self.is_shared() {
            self.look();
        }
    }

    /// Records that the order must be read.
    pub(crate) fn look(&mut self) {
        self.shared.look = true;
    }

    /// Decides on the next step of the host, which may resume a request now if `may_resume`. The
    /// host has read `order` just before.
    pub(crate) fn turn(
        &mut self,
        control: &FlowControl,
        order: &mut SharedOrder,
        vm: u64,
        may_resume: bool,
        now: Timestamp,
    ) -> FlowTurn {
        self.read_order(control, order, vm, now);
        let own = order.row(vm).into_iter().flat_map(|row| &row.bands);
        let asks = own.map(|band| (band.queued.priority, band.refuse));
        self.refuse_asked(control, asks, now);
        if let Some(turn) = self.next_left(may_resume) {
            return turn;
        }
        if std::mem::take(&mut self.shared.rows_changed) && now.ms_since(order.began) >= ROUND_MS {
            self.shared.round.room_changed();
        }
        self.shared.round.reread();
        self.write_accounts(control, order, vm, now);
        let next = self.begin_round(control, order, now);
        let step = order.step(
            self.row(control, order, vm, now),
            self.shared.round.is_begun() || !self.shared.asks.is_empty(),
        );
        self.shared.look = step == OrderStep::Try;
        match step {
            OrderStep::Try if !may_resume => FlowTurn::WakeSelf,
            OrderStep::Try => {
                next.into_iter().for_each(|next| self.pass.take(next));
                next.map_or(FlowTurn::Rest, |next| FlowTurn::Try(next.number))
            }
            OrderStep::Write(wake) => {
                self.shared.write_asks(order);
                FlowTurn::Write(wake)
            }
            OrderStep::Rest => FlowTurn::Rest,
        }
    }

    /// Decides on the next step of a host whose pool has no flow control (any more): the requests
    /// that have left the queues are resumed, and nothing else is due.
    pub(crate) fn turn_without_control(&mut self, may_resume: bool) -> FlowTurn {
        self.next_left(may_resume).unwrap_or_else(|| {
            self.rest();
            FlowTurn::Rest
        })
    }

    /// Resumes a request that has left its queue, if there is one.
    fn next_left(&mut self, may_resume: bool) -> Option<FlowTurn> {
        if may_resume {
            self.to_resume.pop_front().map(FlowTurn::Resume)
        } else {
            (!self.to_resume.is_empty()).then_some(FlowTurn::WakeSelf)
        }
    }

    /// Writes the requests that this VM holds into the order. Returns the VM to wake after the
    /// order is written.
    pub(crate) fn write_order(
        &mut self,
        control: &FlowControl,
        order: &mut SharedOrder,
        vm: u64,
        now: Timestamp,
    ) -> Option<u64> {
        self.write_accounts(control, order, vm, now);
        self.begin_round(control, order, now);
        let step = order.put(self.row(control, order, vm, now));
        self.shared.write_asks(order);
        // If the write succeeds, no VM wrote since the order was read, so this VM knows everything
        // that the order asks of it.
        let asks_to_refuse = order
            .row(vm)
            .is_some_and(|row| row.bands.iter().any(|band| band.refuse > 0));
        self.shared.look = step == OrderStep::Try || asks_to_refuse;
        if let OrderStep::Write(wake) = step {
            wake
        } else {
            None
        }
    }

    /// Enters the round of the order, with the full endpoints in it.
    pub(crate) fn enter_round(&mut self, order: &SharedOrder) {
        self.pass.enter(order);
    }

    /// Records that this VM need not look at its queues until the next tick or event.
    pub fn rest(&mut self) {
        self.shared.round = RoundState::Quiet;
        self.shared.look = false;
    }

    /// Records whether the order was written. If another VM wrote first, the order is read again.
    pub fn order_written(&mut self, written: bool) {
        if !written {
            self.shared.look = true;
            return;
        }
        self.shared.round.written();
        self.shared.asks.clear();
        self.bands.iter_mut().for_each(|band| band.refused = 0);
        for flow in self.bands.iter_mut().flat_map(|band| band.flows_mut()) {
            flow.passed = false;
            flow.joins_at = None;
            flow.settled = 0.0;
        }
    }

    /// Takes a request out of its queue while this VM claims room for it at an endpoint.
    pub(crate) fn take_for_claim(&mut self, ticket: &QueuedTicket) -> Option<ClaimedEntry> {
        let entry =
            self.band_mut(ticket.flow.priority)
                .take(ticket.flow.at, ticket.key, ticket.number)?;
        let band = self.band_mut(ticket.flow.priority);
        let band_account = band.account;
        let flow_account = band.flow_mut(ticket.flow.at).copied().unwrap_or_default();
        Some(ClaimedEntry {
            entry,
            band_account,
            flow_account,
            sent: self.sent,
        })
    }

    /// Records that the request was sent.
    pub(crate) fn claimed(&mut self, ticket: &QueuedTicket, entry: &ClaimedEntry, now: Timestamp) {
        self.band_mut(ticket.flow.priority)
            .counters
            .count(FlowOutcome::Dispatched, now.ms_since(entry.entry.since));
        self.outside.took_room(ticket.flow.priority);
    }

    /// Records that the request waits again, and its flow is not charged. Other VMs may have seen
    /// its claimed load meanwhile, so a new round begins.
    pub(crate) fn put_back(&mut self, ticket: &QueuedTicket, claimed: ClaimedEntry) {
        let ClaimedEntry {
            entry,
            band_account,
            flow_account,
            sent,
        } = claimed;
        self.sent = sent;
        let band = self.band_mut(ticket.flow.priority);
        band.account = band_account;
        if let Some(account) = band.flow_mut(ticket.flow.at) {
            *account = flow_account;
        }
        band.put_back(ticket.flow.at, entry);
        // The claim may have marked the endpoint as full.
        self.pass.begin();
        self.shared.round.room_changed();
    }

    fn begin_round(
        &mut self,
        control: &FlowControl,
        order: &mut SharedOrder,
        now: Timestamp,
    ) -> Option<super::pass::Candidate> {
        if self.shared.round == RoundState::Due {
            order.begin_round(now);
            self.shared.round = RoundState::Begun;
        }
        self.pass.follow(order);
        self.pass.peek(&self.bands, control, now)
    }

    fn row(&self, control: &FlowControl, order: &SharedOrder, vm: u64, now: Timestamp) -> OrderRow {
        OrderRow {
            vm,
            written: now,
            woken: Timestamp(0),
            round: order.round,
            first: ReleasePass::default()
                .peek(&self.bands, control, now)
                .map(|first| first.tag),
            next: self
                .pass
                .peek(&self.bands, control, now)
                .map(|next| next.tag),
            bands: self.row_bands(control, order.row(vm)),
            endpoints: self.awaited(),
        }
    }

    /// The bands in the row of this VM, with the requests that it was asked to refuse and still
    /// holds.
    fn row_bands(&self, control: &FlowControl, before: Option<&OrderRow>) -> Vec<RowBand> {
        let queued = self.bands.iter().filter(|band| band.queued > 0);
        let of_row = |band: &BandQueue| {
            let rules = limits(control, band.priority)?;
            let before = before.and_then(|row| row.band(band.priority));
            Some(RowBand {
                queued: band.queued_here(),
                largest: band.shares.largest(&rules),
                refuse: before.map_or(0, |row| row.refuse.saturating_sub(band.refused)),
            })
        };
        queued.filter_map(of_row).collect()
    }

    /// The endpoints that the requests wait for, and the highest priority at each. The list is
    /// empty if a request may also go elsewhere, or if there are too many endpoints.
    fn awaited(&self) -> Vec<(EndpointRef, i32)> {
        let mut awaited: Vec<(EndpointRef, i32)> = Vec::new();
        let flows = self
            .bands
            .iter()
            .flat_map(|band| band.flows().iter().map(|flow| (flow, band.priority)));
        let entries = flows.flat_map(|(flow, priority)| {
            flow.queued
                .iter()
                .take(SCAN_MAX)
                .map(move |entry| (entry, priority))
        });
        for (at, (entry, priority)) in entries.take(ROW_ENTRIES_MAX + 1).enumerate() {
            let known = entry
                .full_at
                .filter(|_| !entry.nowhere && at < ROW_ENTRIES_MAX);
            let Some(endpoint) = known else {
                return Vec::new();
            };
            match awaited.iter_mut().find(|(known, _)| *known == endpoint) {
                Some((_, highest)) => *highest = priority.max(*highest),
                None => awaited.push((endpoint, priority)),
            }
            if awaited.len() > ROW_ENDPOINTS_MAX {
                return Vec::new();
            }
        }
        awaited
    }
}

/// A request that has left its queue while this VM claims room for it at an endpoint. If the claim
/// fails, the request goes back into its queue.
#[derive(Debug)]
pub(crate) struct ClaimedEntry {
    entry: QueuedEntry,
    /// The accounts of its band and flow before the charge.
    band_account: BandAccount,
    flow_account: FlowAccount,
    /// The rate at which requests were sent before this one.
    sent: (f64, Timestamp),
}

#[cfg(test)]
mod tests;
