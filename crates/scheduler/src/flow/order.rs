//! The common order of requests that the wasm VMs of a process hold for one pool.
//!
//! The VMs share one value, the [`SharedOrder`]. Each VM reads this value, decides alone, and
//! writes the value back only if no other VM wrote meanwhile (compare and set). Otherwise the VM
//! reads the value again.
//!
//! - An event that may have made room begins a new *round*. In a round, each request is tried at
//!   most once, beginning with the smallest [`QueuedTag`] of all VMs. A VM tries its next request
//!   while the tag of that request is the smallest. Then the VM passes the turn on: it wakes the VM
//!   with the smallest tag.
//! - To claim room at an endpoint, a VM first publishes its load including the new pick, and then
//!   writes the order. If the write fails, the VM takes the pick back. A VM reads the order before
//!   the loads of the other VMs. So if two VMs saw the same room, one of them writes too late.
//! - Each VM has a row in the order ([`OrderRow`]). A VM that did not write its row within
//!   [`WAKE_MS`] after it was woken, or for [`SILENT_MS`], is skipped until it writes again.

use std::cmp::Ordering;

use super::{BandAccount, FlowAccount};
use crate::endpoint::EndpointRef;
use crate::time::Timestamp;

/// The time after which a VM that was woken and has not written its row since is skipped, in ms.
const WAKE_MS: u64 = 20;

/// The time after which a row that was not written counts as the row of a VM that no longer exists,
/// in ms.
const SILENT_MS: u64 = 1_000;

/// The maximum time between two writes of its row by a VM that holds requests, in ms.
const REFRESH_MS: u64 = 200;

/// The maximum number of requests that are tried at one full endpoint in one round.
pub const TRIES_AT_ENDPOINT: u32 = 2;

/// The maximum number of flows of a band in the order. If a band has more flows, those that have
/// received the least service are left out.
const SHARED_FLOWS_MAX: usize = 256;

/// The maximum number of tokens by which a waiting flow can be behind the others. A flow that is
/// further behind has no waiting request, because the request would have been sent long before. A
/// flow falls behind when it gets tokens back, because an output was shorter than expected.
const OWED_TOKENS_MAX: f64 = 10_000.0;

/// The position of a request among all waiting requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueuedTag {
    /// Whether the credit for the band's minimum share covers the request.
    pub owed: bool,
    pub priority: i32,
    /// The hash of the request's fairness id. The hash is 0 if the VM holds several flows of the
    /// band, because another flow may come first when the rank of this flow changes.
    pub flow: u64,
    /// The rank that the request's flow will have when the requests that are before this request in
    /// its VM have been sent.
    pub rank: f64,
    /// The key of the request within its flow.
    pub key: u64,
}

/// The requests of a band that one VM holds: their number and their size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuedInBand {
    pub priority: i32,
    pub requests: u64,
    /// The total size of the requests in bytes.
    pub bytes: u64,
}

/// The requests and bytes that a flow has in a band.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerShare {
    /// The flow: the hash of its fairness id, or of the client.
    pub owner: u64,
    pub requests: u64,
    pub bytes: u64,
}

/// A band in the row of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowBand {
    pub queued: QueuedInBand,
    /// The flow that has the largest part of the band's queue in this VM.
    pub largest: OwnerShare,
    /// The number of requests that the VM must refuse, because all VMs together reached a limit.
    pub refuse: u64,
}

/// An endpoint that had no room in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FullEndpoint {
    pub endpoint: EndpointRef,
    /// The highest priority of the requests that found no room at the endpoint.
    pub priority: i32,
    /// The number of requests that found no room at the endpoint.
    pub tries: u32,
}

/// The row of one VM that holds requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OrderRow {
    pub vm: u64,
    /// The time when the VM wrote the row.
    pub written: Timestamp,
    /// The time when another VM woke the VM of this row; 0 after the VM wrote the row.
    pub woken: Timestamp,
    /// The round that `next` belongs to.
    pub round: u64,
    /// The tag of the first request that the VM holds.
    pub first: Option<QueuedTag>,
    /// The tag of the VM's first request that was not tried in `round`.
    pub next: Option<QueuedTag>,
    /// The requests that the VM holds, by band.
    pub bands: Vec<RowBand>,
    /// The endpoints that the requests wait for, and the highest priority at each. The list is
    /// empty if a request may also be sent to other endpoints, and then the VM itself must check
    /// for room.
    pub endpoints: Vec<(EndpointRef, i32)>,
}

/// The tokens that a band and its flows have received.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BandService {
    pub priority: i32,
    /// The tokens that the band can still claim for its minimum share.
    pub credit: f64,
    pub account: BandAccount,
    /// The accounts of the flows, by the hash of their fairness id.
    pub flows: Vec<(u64, FlowAccount)>,
}

/// The next step of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderStep {
    /// The VM must try the request in the `next` of its row.
    Try,
    /// The VM must write the order, and then wake the VM with this id.
    Write(Option<u64>),
    Rest,
}

/// The requests that all VMs of a process hold for one pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SharedOrder {
    pub round: u64,
    pub began: Timestamp,
    /// The rows of the VMs that hold requests.
    pub rows: Vec<OrderRow>,
    pub bands: Vec<BandService>,
    /// The endpoints that had no room in this round.
    pub full: Vec<FullEndpoint>,
}

// === impl QueuedTag ===

impl QueuedTag {
    /// Compares two tags. The request with the smallest tag is tried first.
    pub fn compare(&self, other: &Self) -> Ordering {
        let bands = other
            .owed
            .cmp(&self.owed)
            .then(other.priority.cmp(&self.priority));
        bands
            .then(self.rank.total_cmp(&other.rank))
            .then(self.key.cmp(&other.key))
    }
}

// === impl FullEndpoint ===

impl FullEndpoint {
    /// Whether no further request of this priority is tried at the endpoint in this round.
    pub fn stops(&self, endpoint: EndpointRef, priority: i32) -> bool {
        self.endpoint == endpoint && self.priority >= priority && self.tries >= TRIES_AT_ENDPOINT
    }
}

// === impl OrderRow ===

impl OrderRow {
    /// Whether the row belongs to a VM that is not `vm` and still responds to wake-ups.
    fn is_rival(&self, vm: u64, now: Timestamp) -> bool {
        let is_late = self.woken.0 != 0 && now.ms_since(self.woken) >= WAKE_MS;
        self.vm != vm && !is_late && now.ms_since(self.written) < SILENT_MS
    }

    /// Returns the tag of the first request that was not tried in this round.
    fn untried(&self, round: u64) -> Option<QueuedTag> {
        if self.round == round {
            self.next
        } else {
            self.first
        }
    }

    /// Whether every endpoint that the VM's requests wait for had no room in [`TRIES_AT_ENDPOINT`]
    /// tries.
    fn is_hopeless(&self, full: &[FullEndpoint]) -> bool {
        let is_full = |(endpoint, priority): &(EndpointRef, i32)| {
            full.iter().any(|full| full.stops(*endpoint, *priority))
        };
        !self.endpoints.is_empty() && self.endpoints.iter().all(is_full)
    }

    /// Returns the requests of a band that the VM holds.
    pub fn band(&self, priority: i32) -> Option<&RowBand> {
        self.bands
            .iter()
            .find(|band| band.queued.priority == priority)
    }

    /// Returns the requests of a band that the VM holds, mutably.
    pub fn band_mut(&mut self, priority: i32) -> Option<&mut RowBand> {
        self.bands
            .iter_mut()
            .find(|band| band.queued.priority == priority)
    }

    /// Records that the rank of a flow has changed from `before` to `after`. The tags in the row,
    /// which the VM of the row wrote earlier, change too. With the old tags, that VM would be
    /// woken, and immediately pass the turn on.
    pub fn change_rank(&mut self, priority: i32, flow: u64, before: f64, after: f64) {
        let tags = [&mut self.first, &mut self.next].into_iter().flatten();
        for tag in tags.filter(|tag| tag.priority == priority && tag.flow == flow) {
            // The new rank is exactly the rank that the VM of the row will compute, so that equal
            // ranks stay equal.
            tag.rank = if tag.rank.total_cmp(&before).is_eq() {
                after
            } else {
                tag.rank + (after - before)
            };
        }
    }
}

// === impl SharedOrder ===

impl SharedOrder {
    /// Begins a round: records that an event may have made room, so that every request may be tried
    /// again.
    pub fn begin_round(&mut self, now: Timestamp) {
        self.round += 1;
        self.began = now;
        self.full.clear();
    }

    pub fn row(&self, vm: u64) -> Option<&OrderRow> {
        self.rows.iter().find(|row| row.vm == vm)
    }

    /// Returns the rows of the other VMs, except VMs that no longer exist.
    pub fn rivals(&self, vm: u64, now: Timestamp) -> impl Iterator<Item = &OrderRow> {
        self.rows
            .iter()
            .filter(move |row| row.vm != vm && now.ms_since(row.written) < SILENT_MS)
    }

    /// Returns the smallest tag of the requests that other VMs have not tried in this round, and
    /// the VM that holds this request.
    fn smallest(&self, vm: u64, now: Timestamp) -> Option<(QueuedTag, u64)> {
        let mut smallest: Option<(QueuedTag, u64)> = None;
        for row in &self.rows {
            let Some(tag) = row.untried(self.round) else {
                continue;
            };
            let is_smaller = smallest.is_none_or(|(other, other_vm)| {
                tag.compare(&other).then(row.vm.cmp(&other_vm)).is_lt()
            });
            if is_smaller && row.is_rival(vm, now) && !row.is_hopeless(&self.full) {
                smallest = Some((tag, row.vm));
            }
        }
        smallest
    }

    /// Decides on the next step of the VM that has the row `own`. `begun` says whether the VM has
    /// begun a round that is not written yet.
    pub fn step(&mut self, own: OrderRow, begun: bool) -> OrderStep {
        let vm = own.vm;
        let now = own.written;
        if own.next.is_some_and(|tag| self.is_turn(vm, &tag, now)) {
            return OrderStep::Try;
        }
        let is_news = self.set_row(own) || begun;
        let wake = self.pass_on(vm, now);
        if is_news || wake.is_some() {
            OrderStep::Write(wake)
        } else {
            OrderStep::Rest
        }
    }

    /// Sets the row of a VM that will write the order whatever this returns. [`OrderStep::Try`]
    /// means that the VM still has the turn after the write.
    pub fn put(&mut self, own: OrderRow) -> OrderStep {
        let vm = own.vm;
        let now = own.written;
        let is_turn = own.next.is_some_and(|tag| self.is_turn(vm, &tag, now));
        self.set_row(own);
        if is_turn {
            OrderStep::Try
        } else {
            OrderStep::Write(self.pass_on(vm, now))
        }
    }

    /// Whether `vm` may try its request `tag`, because no other VM has a smaller tag to try.
    fn is_turn(&self, vm: u64, tag: &QueuedTag, now: Timestamp) -> bool {
        self.smallest(vm, now)
            .is_none_or(|(other, other_vm)| tag.compare(&other).then(vm.cmp(&other_vm)).is_lt())
    }

    /// Replaces the row of a VM. A VM that holds no request has no row. Returns whether the order
    /// should be written because of this change.
    pub fn set_row(&mut self, row: OrderRow) -> bool {
        let at = self.rows.iter().position(|known| known.vm == row.vm);
        let known = at.and_then(|at| self.rows.get_mut(at));
        match (known, row.bands.is_empty()) {
            (None, true) => false,
            (None, false) => {
                let now = row.written;
                self.rows
                    .retain(|known| now.ms_since(known.written) < SILENT_MS);
                self.rows.push(row);
                true
            }
            (Some(known), false) => {
                // A row is worth a write if a value other than its time has changed, or if the last
                // write is too old.
                let age_ms = row.written.ms_since(known.written);
                known.written = row.written;
                let is_news = *known != row || age_ms >= REFRESH_MS;
                *known = row;
                is_news
            }
            (Some(known), true) => {
                let vm = known.vm;
                self.rows.retain(|known| known.vm != vm);
                true
            }
        }
    }

    /// Passes the turn on. Returns the VM to wake, and records that this VM was woken. Returns
    /// `None` if that VM was woken already, or if no other VM has a request to try.
    fn pass_on(&mut self, vm: u64, now: Timestamp) -> Option<u64> {
        let (_, next) = self.smallest(vm, now)?;
        let row = self
            .rows
            .iter_mut()
            .find(|row| row.vm == next)
            .filter(|row| row.woken.0 == 0)?;
        row.woken = now;
        Some(next)
    }
}

// === impl BandService ===

impl BandService {
    /// Returns the account of a flow, if the order has an account for the flow.
    pub fn flow(&self, id: u64) -> Option<FlowAccount> {
        self.flows
            .iter()
            .find(|(known, _)| *known == id)
            .map(|(_, account)| *account)
    }

    /// Returns the account of a flow for which the order has no account.
    pub fn idle_flow(&self) -> FlowAccount {
        FlowAccount {
            start: self.account.virtual_time,
            ..FlowAccount::default()
        }
    }

    pub fn set_flow(&mut self, id: u64, account: FlowAccount) {
        match self.flows.iter_mut().find(|(known, _)| *known == id) {
            Some((_, known)) => *known = account,
            None => self.flows.push((id, account)),
        }
    }

    /// Removes flows whose accounts have no effect any more, and further flows until at most
    /// [`SHARED_FLOWS_MAX`] are left.
    pub fn trim(&mut self) {
        let idle = self.account.virtual_time;
        let is_owed = |start: f64| start < idle && start > idle - OWED_TOKENS_MAX;
        self.flows.retain(|(_, flow)| {
            flow.start > idle || is_owed(flow.start) || flow.turn > 0 || flow.attained > 0.0
        });
        while self.flows.len() > SHARED_FLOWS_MAX {
            // The code does not sort, because the compiled sort would be the largest function of
            // this file.
            let flows = self.flows.iter().enumerate();
            let least = flows.min_by(|(_, (_, a)), (_, (_, b))| {
                a.turn.cmp(&b.turn).then(a.start.total_cmp(&b.start))
            });
            let Some((least, _)) = least else { return };
            self.flows.swap_remove(least);
        }
    }
}

#[cfg(test)]
mod tests;
