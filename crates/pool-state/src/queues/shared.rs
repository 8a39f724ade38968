//! The queues of this VM as a part of the order that all VMs of the process share
//! ([`scheduler::flow::SharedOrder`]).
//!
//! While no VM holds anything, nothing is shared. While one does, each VM holds what arrives, and
//! sends it by a claim: [`FlowQueues::turn`], a pick, [`FlowQueues::write_order`], and then
//! [`FlowQueues::order_written`], or [`FlowQueues::put_back`] if another VM wrote first.

use scheduler::flow::{
    BandAccount, BandHeld, BandService, FlowAccount, FlowControl, OrderRow, OrderStep, SharedOrder,
};
use scheduler::{EndpointRef, Timestamp};

use super::band::{BandQueue, HeldEntry};
use super::counters::FlowOutcome;
use super::pass::{ReleasePass, SCAN_MAX};
use super::{FlowQueues, HeldTicket};

/// A new round begins at a tick if a load report changed and the last round is this old, in ms: the
/// net under events that no VM saw.
const ROUND_MS: u64 = 10;

/// The most requests of a VM whose endpoints its row names: with more, another VM cannot tell
/// whether one of them could go. A pass looks at the first [`SCAN_MAX`] of a flow at most.
const ROW_ENTRIES_MAX: usize = 256;

/// The next step of a host for held requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowTurn {
    /// Resume the request of this number, to refuse it.
    Resume(u64),
    /// Read the loads of the other VMs, then resume the request of this number.
    Try(u64),
    /// Write the order, then wake this VM. Nothing else is to be done if it was written.
    Write(Option<u64>),
    /// A request of this VM is next, which may not be resumed now: wake this VM itself.
    WakeSelf,
    /// Nothing.
    Rest,
}

/// The most endpoints of a row.
const ROW_ENDPOINTS_MAX: usize = 8;

/// What is known of the other VMs.
#[derive(Debug, Default)]
pub(super) struct SharedQueues {
    /// Whether other VMs serve requests.
    has_peers: bool,
    /// Whether one of them holds any.
    others_hold: bool,
    /// Something may have made room; no round has begun for it yet.
    event: bool,
    /// Since the reports of the others were last read, room was made that no VM was known to wait
    /// for.
    unheard: bool,
    /// A round has begun that is not written yet.
    begun: bool,
    /// A load report of another VM has changed since the last round.
    rows_changed: bool,
    /// Whether the order must be read.
    look: bool,
    /// The requests that the others hold, by band, and the lowest rank there.
    bands: Vec<(BandHeld, f64)>,
    /// Requests that other VMs must refuse, until they are asked to.
    evict: u64,
    /// How many requests others asked this VM to refuse, and it has.
    evicted: u64,
}

// === impl SharedQueues ===

impl SharedQueues {
    pub(super) fn is_due(&self) -> bool {
        self.event || self.look
    }

    pub(super) fn room_changed(&mut self) {
        self.event = true;
    }

    pub(super) fn room_changed_for_none(&mut self) {
        self.unheard = true;
    }

    /// The requests that the others hold of a band.
    pub(super) fn held(&self, priority: i32) -> BandHeld {
        self.bands
            .iter()
            .map(|(band, _)| *band)
            .find(|band| band.priority == priority)
            .unwrap_or_default()
    }

    /// The requests that the others hold in all.
    pub(super) fn held_in_all(&self) -> BandHeld {
        let add = |sum: BandHeld, (band, _): &(BandHeld, f64)| BandHeld {
            requests: sum.requests.saturating_add(band.requests),
            bytes: sum.bytes.saturating_add(band.bytes),
            ..sum
        };
        self.bands.iter().fold(BandHeld::default(), add)
    }

    /// The requests that the others hold of this priority or a higher one.
    pub(super) fn held_from(&self, priority: i32) -> u64 {
        self.bands
            .iter()
            .filter(|(band, _)| band.priority >= priority)
            .map(|(band, _)| band.requests)
            .sum()
    }

    /// The lowest band that another VM holds.
    pub(super) fn lowest(&self) -> Option<i32> {
        self.bands
            .iter()
            .filter(|(band, _)| band.requests > 0)
            .map(|(band, _)| band.priority)
            .min()
    }

    /// The lowest rank of a band in another VM.
    pub(super) fn lowest_rank(&self, priority: i32) -> Option<f64> {
        self.bands
            .iter()
            .find(|(band, rank)| band.priority == priority && rank.is_finite())
            .map(|(_, rank)| *rank)
    }

    /// Has another VM refuse the newest request of its lowest band, if that is below `priority` and
    /// the lowest of all. False if there is none.
    pub(super) fn evict_below(&mut self, priority: i32, own_lowest: Option<i32>) -> bool {
        let lowest = self
            .bands
            .iter_mut()
            .map(|(band, _)| band)
            .filter(|band| band.requests > 0)
            .min_by_key(|band| band.priority);
        let Some(band) = lowest.filter(|band| {
            band.priority < priority && own_lowest.is_none_or(|own| band.priority < own)
        }) else {
            return false;
        };
        let bytes = band.bytes / band.requests;
        band.requests -= 1;
        band.bytes -= bytes;
        self.evict += 1;
        true
    }

    /// Takes what the other rows say.
    fn read(&mut self, order: &SharedOrder, vm: u64, now: Timestamp) {
        self.bands.clear();
        for row in order.rivals(vm, now) {
            for held in &row.bands {
                let rank = row
                    .first
                    .filter(|tag| tag.priority == held.priority)
                    .map_or(f64::INFINITY, |tag| tag.rank);
                match self
                    .bands
                    .iter_mut()
                    .find(|(band, _)| band.priority == held.priority)
                {
                    Some((band, lowest)) => {
                        band.requests = band.requests.saturating_add(held.requests);
                        band.bytes = band.bytes.saturating_add(held.bytes);
                        *lowest = lowest.min(rank);
                    }
                    None => self.bands.push((*held, rank)),
                }
            }
        }
    }
}

// === impl FlowQueues ===

impl FlowQueues {
    /// Whether the order of all VMs counts: another VM serves requests, and one of them holds some.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared.has_peers && (self.held > 0 || self.shared.others_hold)
    }

    /// Whether other VMs serve requests.
    #[must_use]
    pub fn has_flow_peers(&self) -> bool {
        self.shared.has_peers
    }

    /// Sets whether other VMs serve requests, and whether one of them holds any, as their load
    /// reports say.
    pub fn set_peers(&mut self, has_peers: bool, others_hold: bool) {
        let was_shared = self.is_shared();
        // Another VM may have begun to wait when room was made here. A later one has read of it.
        self.shared.event |=
            std::mem::take(&mut self.shared.unheard) && others_hold && !self.shared.others_hold;
        self.shared.has_peers = has_peers;
        self.shared.others_hold = others_hold;
        if !others_hold {
            self.shared.bands.clear();
        }
        if was_shared && !self.is_shared() {
            self.shared = SharedQueues {
                has_peers,
                ..SharedQueues::default()
            };
            if self.held > 0 {
                self.room_changed();
            }
        }
    }

    /// The requests that this VM holds, in the bytes that other proxies get.
    #[must_use]
    pub fn backlog(&self) -> Vec<u8> {
        proto::backlog::write(&self.held_by_band())
    }

    /// The requests that this VM holds, by band.
    pub fn held_by_band(&self) -> Vec<BandHeld> {
        let held = self.bands.iter().filter(|band| band.held > 0);
        held.map(BandQueue::held_here).collect()
    }

    /// Whether this VM or another one of the process holds requests.
    #[must_use]
    pub fn any_held(&self) -> bool {
        self.held > 0 || self.shared.others_hold
    }

    /// Sets what other proxies hold, how many requests of theirs run, and the age of that in µs.
    pub fn set_outside(&mut self, bands: &[BandHeld], running: u64, delay_us: u64) {
        if self.outside.set(bands, running, delay_us) {
            self.others_freed();
        }
    }

    /// Others may have made room, or may leave it: like [`Self::room_freed`] for each endpoint that
    /// a request waits for.
    pub(crate) fn others_freed(&mut self) {
        let awaited = self.awaited();
        if awaited.is_empty() {
            self.room_changed();
        }
        awaited
            .into_iter()
            .for_each(|(endpoint, _)| self.room_freed(endpoint));
    }

    /// Sets how many proxies there are, if nothing is received from the others; 0 otherwise.
    pub fn set_alone(&mut self, of: u32) {
        self.outside.set_alone(of);
    }

    /// How many picks of other proxies a pick here stands for.
    pub(crate) fn stands_for(&self, active: u32) -> u32 {
        self.outside.stands_for(self.any_held(), active)
    }

    /// Whether a request of this priority must leave to other proxies what it finds.
    pub(crate) fn is_over_share(&self, priority: i32, running: impl FnOnce() -> u64) -> bool {
        let Some(band) = self
            .bands
            .iter()
            .find(|band| band.priority == priority)
            .filter(|_| self.outside.holds_any())
        else {
            return false;
        };
        let held = band.held as u64 + self.shared.held(priority).requests;
        !band.is_owed() && self.outside.is_over_share(priority, held.max(1), running())
    }

    /// A band over its share has found room. Whether it leaves that to other proxies.
    pub(crate) fn leaves_room(&mut self, priority: i32, now: Timestamp) -> bool {
        self.outside.leaves_room(priority, now)
    }

    /// A tick: room that was left to other proxies may be this one's now. Not for a wake-up: VMs
    /// would wake each other for new rounds as long as room is left.
    pub fn retry_left_room(&mut self) {
        if self.outside.is_patient() {
            self.room_changed();
        }
    }

    /// The load report of another VM has changed.
    pub(crate) fn peer_changed(&mut self) {
        if self.is_shared() {
            self.shared.rows_changed = true;
        } else if self.held > 0 {
            self.room_changed();
        }
    }

    /// Has the order read soon: another VM woke this one, or a tick has come.
    pub fn look_at_order(&mut self) {
        if self.is_shared() {
            self.look();
        }
    }

    /// The order must be read.
    pub(crate) fn look(&mut self) {
        self.shared.look = true;
    }

    /// Decides on the next step of the host, which `may_resume` a request now. `order` was read
    /// just now.
    pub(crate) fn turn(
        &mut self,
        control: &FlowControl,
        order: &mut SharedOrder,
        vm: u64,
        may_resume: bool,
        now: Timestamp,
    ) -> FlowTurn {
        self.read_order(control, order, vm, now);
        let asked = order.row(vm).map_or(0, |row| row.evict);
        for _ in std::mem::replace(&mut self.shared.evicted, asked)..asked {
            self.evict_newest(now);
        }
        if !may_resume && !self.to_resume.is_empty() {
            return FlowTurn::WakeSelf;
        }
        if let Some(number) = self.to_resume.pop_front() {
            return FlowTurn::Resume(number);
        }
        if std::mem::take(&mut self.shared.rows_changed) && now.ms_since(order.began) >= ROUND_MS {
            self.shared.event = true;
        }
        // The order was read again: what was begun and not written is not in it.
        self.shared.event |= std::mem::take(&mut self.shared.begun);
        self.write_accounts(control, order, vm, now);
        let next = self.begin_round(control, order, now);
        let step = order.step(
            self.row(control, order, vm, now),
            self.shared.begun || self.shared.evict > 0,
        );
        self.shared.look = step == OrderStep::Try;
        match step {
            OrderStep::Try if !may_resume => FlowTurn::WakeSelf,
            OrderStep::Try => {
                next.into_iter().for_each(|next| self.pass.take(next));
                next.map_or(FlowTurn::Rest, |next| FlowTurn::Try(next.number))
            }
            OrderStep::Write(wake) => {
                self.write_evictions(order, vm);
                FlowTurn::Write(wake)
            }
            OrderStep::Rest => FlowTurn::Rest,
        }
    }

    /// Puts what this VM holds into the order, to be written. Returns the VM to wake after that.
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
        self.write_evictions(order, vm);
        // If the write succeeds, nothing was written since the order was read: what it asks this VM
        // for is known.
        let asks_to_refuse = order
            .row(vm)
            .is_some_and(|row| row.evict > self.shared.evicted);
        self.shared.look = step == OrderStep::Try || asks_to_refuse;
        if let OrderStep::Write(wake) = step {
            wake
        } else {
            None
        }
    }

    /// Enters the round of the order, with what is full in it.
    pub(crate) fn enter_round(&mut self, order: &SharedOrder) {
        self.pass.enter(order);
    }

    /// Nothing is due until the next tick or event.
    pub fn rest(&mut self) {
        self.shared.event = false;
        self.shared.begun = false;
        self.shared.look = false;
    }

    /// The order was written. If not (another VM wrote first), it is read again.
    pub fn order_written(&mut self, written: bool) {
        if !written {
            self.shared.look = true;
            return;
        }
        self.shared.begun = false;
        self.shared.evict = 0;
        for flow in self.bands.iter_mut().flat_map(|band| band.flows_mut()) {
            flow.passed = false;
            flow.joins_at = None;
            flow.settled = 0.0;
        }
    }

    /// Takes a request out, for the time of its claim.
    pub(crate) fn take_for_claim(&mut self, ticket: &HeldTicket) -> Option<ClaimedEntry> {
        let entry =
            self.band_mut(ticket.flow.priority)
                .take(ticket.flow.at, ticket.key, ticket.number)?;
        self.held = self.held.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(entry.bytes);
        let accounts = self.band_mut(ticket.flow.priority).accounts(ticket.flow.at);
        Some(ClaimedEntry {
            entry,
            accounts,
            sent: self.sent,
        })
    }

    /// The request was sent.
    pub(crate) fn claimed(&mut self, ticket: &HeldTicket, entry: &ClaimedEntry, now: Timestamp) {
        self.band_mut(ticket.flow.priority)
            .counters
            .count(FlowOutcome::Dispatched, now.ms_since(entry.entry.since));
        self.outside.took_room(ticket.flow.priority);
    }

    /// The request waits again, and its flow is not charged. Its place had been free meanwhile, for
    /// others to see: that is an event.
    pub(crate) fn put_back(&mut self, ticket: &HeldTicket, claimed: ClaimedEntry) {
        let ClaimedEntry {
            entry,
            accounts,
            sent,
        } = claimed;
        self.held += 1;
        self.bytes = self.bytes.saturating_add(entry.bytes);
        self.sent = sent;
        let band = self.band_mut(ticket.flow.priority);
        band.set_accounts(ticket.flow.at, accounts);
        band.put_back(ticket.flow.at, entry);
        // The claim may have marked the endpoint as full.
        self.pass.begin();
        self.shared.event = true;
    }

    /// Takes over the accounts of the order, with what was charged here without a claim, and what
    /// the others hold.
    pub(crate) fn read_order(
        &mut self,
        control: &FlowControl,
        order: &SharedOrder,
        vm: u64,
        now: Timestamp,
    ) {
        self.shared.read(order, vm, now);
        for band in &mut self.bands {
            let service = order
                .bands
                .iter()
                .find(|service| service.priority == band.priority);
            let Some((service, rules)) = service.zip(control.band(band.priority)) else {
                continue;
            };
            let before = std::mem::replace(&mut band.account, service.account);
            band.credit = service.credit;
            for flow in band.flows_mut() {
                let known = service.flow(flow.id);
                if std::mem::take(&mut flow.passed) {
                    // Virtual times of VMs that shared nothing are not comparable: the lead is.
                    flow.joins_at = Some(
                        service.account.virtual_time
                            + (flow.account.start - before.virtual_time).max(0.0),
                    );
                }
                let mut account = known.unwrap_or(service.idle_flow());
                rules.fairness.settle(&mut account, flow.settled);
                if let Some(start) = flow.joins_at {
                    account.start = account.start.max(start);
                    account.attained = account.attained.max(flow.account.attained);
                    account.attained_at = account.attained_at.max(flow.account.attained_at);
                }
                flow.account = account;
            }
        }
    }

    fn begin_round(
        &mut self,
        control: &FlowControl,
        order: &mut SharedOrder,
        now: Timestamp,
    ) -> Option<super::pass::Candidate> {
        if self.shared.event && !self.shared.begun {
            order.begin_round(now);
            self.shared.event = false;
            self.shared.begun = true;
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
            evict: order.row(vm).map_or(0, |row| row.evict),
            bands: self.held_by_band(),
            endpoints: self.awaited(),
        }
    }

    /// The endpoints that the requests wait for, and the highest priority at each. Empty if one may
    /// go elsewhere, or there are too many.
    fn awaited(&self) -> Vec<(EndpointRef, i32)> {
        let mut awaited: Vec<(EndpointRef, i32)> = Vec::new();
        let flows = self
            .bands
            .iter()
            .flat_map(|band| band.flows().iter().map(|flow| (flow, band.priority)));
        let entries = flows.flat_map(|(flow, priority)| {
            flow.held
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

    /// Asks the VM with the lowest band to refuse what is over the limits.
    fn write_evictions(&self, order: &mut SharedOrder, vm: u64) {
        let lowest = |row: &OrderRow| row.bands.iter().map(|band| band.priority).min();
        if let Some(row) = order
            .rows
            .iter_mut()
            .filter(|row| row.vm != vm)
            .min_by_key(|row| lowest(row))
        {
            row.evict += self.shared.evict;
        }
    }

    /// Writes the accounts, and what they change in the rows of the other VMs.
    fn write_accounts(
        &self,
        control: &FlowControl,
        order: &mut SharedOrder,
        vm: u64,
        now: Timestamp,
    ) {
        for band in self.bands.iter().filter(|band| !band.flows().is_empty()) {
            let at = order
                .bands
                .iter()
                .position(|service| service.priority == band.priority)
                .unwrap_or_else(|| {
                    order.bands.push(BandService {
                        priority: band.priority,
                        ..BandService::default()
                    });
                    order.bands.len() - 1
                });
            let rank = |account: &FlowAccount| {
                Some(
                    control
                        .band(band.priority)?
                        .fairness
                        .rank(account, &band.account, 0.0, now),
                )
            };
            let SharedOrder { rows, bands, .. } = order;
            let Some(service) = bands.get_mut(at) else {
                continue;
            };
            for flow in band.flows() {
                let before = rank(&service.flow(flow.id).unwrap_or(service.idle_flow()));
                if let Some((before, after)) = before
                    .zip(rank(&flow.account))
                    .filter(|(before, after)| before != after)
                {
                    let others = rows.iter_mut().filter(|row| row.vm != vm);
                    others.for_each(|row| row.change_rank((band.priority, flow.id), before, after));
                }
                service.set_flow(flow.id, flow.account);
            }
            service.account = band.account;
            service.credit = band.credit;
            service.trim();
        }
    }
}

/// A request that is taken out of its queue for the time of its claim.
#[derive(Debug)]
pub(crate) struct ClaimedEntry {
    entry: HeldEntry,
    /// The accounts of its band and flow before it was charged.
    accounts: (BandAccount, FlowAccount),
    /// The rate of releases before.
    sent: (f64, Timestamp),
}

#[cfg(test)]
mod tests;
