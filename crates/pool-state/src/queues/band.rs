//! The requests of one priority.

use std::collections::VecDeque;

use scheduler::flow::{
    BandAccount, FairnessPolicy, FlowAccount, FlowCost, OwnerShare, QueuedInBand,
};
use scheduler::{EndpointRef, Timestamp};

use super::counters::{BandCounters, QueuedReason};
use super::shares::OwnerShares;

/// The maximum number of flows of a band with an account of their own. Fairness ids may come from
/// many tenants. Further flows share these accounts.
pub(super) const FLOWS_MAX: usize = 256;

/// A flow of a band.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRef {
    pub(super) priority: i32,
    pub(super) at: usize,
    pub(super) id: u64,
}

#[derive(Debug)]
pub(super) struct BandQueue {
    pub(super) priority: i32,
    flows: Vec<FlowQueue>,
    pub(super) shares: OwnerShares,
    pub(super) queued: usize,
    pub(super) bytes: u64,
    pub(super) account: BandAccount,
    /// The tokens that the band can still claim for its minimum share.
    pub(super) credit: f64,
    /// Whether the band's last try was for its minimum share.
    pub(super) tried_owed: bool,
    /// How often a request of the band was tried.
    pub(super) turns: u64,
    /// The time when the band last had a request.
    pub(super) seen: Timestamp,
    /// How many requests this VM has refused for other VMs, until the order has this number.
    pub(super) refused: u64,
    pub(super) counters: BandCounters,
}

#[derive(Debug, Default)]
pub(super) struct FlowQueue {
    pub(super) id: u64,
    pub(super) account: FlowAccount,
    /// Whether the flow sent a request without a claim, so it was charged in this VM's virtual
    /// time.
    pub(super) passed: bool,
    /// The start of the flow in the virtual time of all VMs, until the order is written.
    pub(super) joins_at: Option<f64>,
    /// Output tokens settled since the shared order was last written.
    pub(super) settled: f64,
    /// The time when the flow last had a request.
    seen: Timestamp,
    /// The queued requests, by key and number.
    pub(super) queued: VecDeque<QueuedEntry>,
}

/// One request. The policies and limits read most of its fields.
#[derive(Clone, Debug)]
pub(super) struct QueuedEntry {
    pub(super) key: u64,
    pub(super) number: u64,
    pub(super) since: Timestamp,
    pub(super) expires: Timestamp,
    /// The time when the request is given up if no endpoint is ready.
    pub(super) gives_up: Timestamp,
    pub(super) bytes: u64,
    /// The owner of the queue share that the request uses.
    pub(super) owner: u64,
    pub(super) cost: FlowCost,
    /// The endpoint that was last picked for it and had no room.
    pub(super) full_at: Option<EndpointRef>,
    /// Whether no endpoint could serve it at the last try.
    pub(super) nowhere: bool,
    /// The time when it last requested that a running request be given up.
    pub(super) asked: Option<Timestamp>,
    /// Whether the pool has changed since the last check that an endpoint may serve the request.
    pub(super) to_check: bool,
    pub(super) request_id: Box<str>,
}

// === impl BandQueue ===

impl BandQueue {
    pub(super) fn new(priority: i32) -> Self {
        Self {
            priority,
            flows: Vec::new(),
            shares: OwnerShares::default(),
            queued: 0,
            bytes: 0,
            account: BandAccount::default(),
            credit: 0.0,
            tried_owed: false,
            turns: 0,
            seen: Timestamp::default(),
            refused: 0,
            counters: BandCounters {
                priority,
                ..BandCounters::default()
            },
        }
    }

    /// The requests queued.
    pub(super) fn queued_here(&self) -> QueuedInBand {
        QueuedInBand {
            priority: self.priority,
            requests: self.queued as u64,
            bytes: self.bytes,
        }
    }

    /// The flows of the band, for changes of their accounts.
    pub(super) fn flows_mut(&mut self) -> &mut [FlowQueue] {
        &mut self.flows
    }

    pub(super) fn flows(&self) -> &[FlowQueue] {
        &self.flows
    }

    /// Finds the account of a flow, or creates one. If there are too many, an account without
    /// requests is replaced, the oldest first. If every account has requests, flows share one.
    pub(super) fn flow_ref(&mut self, id: u64) -> FlowRef {
        let at = self
            .flows
            .iter()
            .position(|flow| flow.id == id)
            .unwrap_or_else(|| {
                let fresh = FlowQueue {
                    id,
                    ..FlowQueue::default()
                };
                if self.flows.len() < FLOWS_MAX {
                    self.flows.push(fresh);
                    return self.flows.len() - 1;
                }
                let idle = self
                    .flows
                    .iter()
                    .enumerate()
                    .filter(|(_, flow)| flow.queued.is_empty())
                    .min_by_key(|(_, flow)| flow.seen);
                match idle.map(|(at, _)| at) {
                    Some(at) => {
                        self.flows.get_mut(at).into_iter().for_each(|flow| {
                            *flow = FlowQueue {
                                id,
                                ..FlowQueue::default()
                            }
                        });
                        at
                    }
                    None => usize::try_from(id % FLOWS_MAX as u64).unwrap_or(0),
                }
            });
        FlowRef {
            priority: self.priority,
            at,
            id,
        }
    }

    pub(super) fn push(&mut self, at: usize, fairness: &dyn FairnessPolicy, entry: QueuedEntry) {
        let Some(flow) = self.flows.get_mut(at) else {
            return;
        };
        if flow.queued.is_empty() {
            fairness.begin(&mut flow.account, &self.account);
        }
        flow.seen = entry.since;
        self.put_back(at, entry);
    }

    fn position(&self, flow: usize, key: u64, number: u64) -> Option<usize> {
        self.flows
            .get(flow)?
            .queued
            .binary_search_by(|other| (other.key, other.number).cmp(&(key, number)))
            .ok()
    }

    pub(super) fn entry(&self, flow: usize, key: u64, number: u64) -> Option<&QueuedEntry> {
        let at = self.position(flow, key, number)?;
        self.flows.get(flow)?.queued.get(at)
    }

    pub(super) fn entry_mut(
        &mut self,
        flow: usize,
        key: u64,
        number: u64,
    ) -> Option<&mut QueuedEntry> {
        let at = self.position(flow, key, number)?;
        self.flows.get_mut(flow)?.queued.get_mut(at)
    }

    /// The requests queued, flow by flow.
    pub(super) fn queued_mut(&mut self) -> impl Iterator<Item = &mut QueuedEntry> {
        self.flows.iter_mut().flat_map(|flow| &mut flow.queued)
    }

    /// Puts back a request that was taken out just now.
    pub(super) fn put_back(&mut self, flow: usize, entry: QueuedEntry) {
        let Some(flow) = self.flows.get_mut(flow) else {
            return;
        };
        self.queued += 1;
        self.bytes = self.bytes.saturating_add(entry.bytes);
        self.shares.add(OwnerShare {
            owner: entry.owner,
            requests: 1,
            bytes: entry.bytes,
        });
        let at = flow
            .queued
            .partition_point(|other| (other.key, other.number) < (entry.key, entry.number));
        flow.queued.insert(at, entry);
        self.show();
    }

    /// Takes a request out of the band.
    pub(super) fn take(&mut self, flow: usize, key: u64, number: u64) -> Option<QueuedEntry> {
        let at = self.position(flow, key, number)?;
        self.take_at(flow, at)
    }

    fn take_at(&mut self, flow: usize, at: usize) -> Option<QueuedEntry> {
        let entry = self.flows.get_mut(flow)?.queued.remove(at)?;
        self.queued = self.queued.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(entry.bytes);
        self.shares.remove(entry.owner, entry.bytes);
        self.show();
        Some(entry)
    }

    /// Removes the newest request of an owner. Returns the position of its flow, and the request.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn take_newest_of(&mut self, owner: u64) -> Option<(usize, QueuedEntry)> {
        let mut newest = (0, 0, 0);
        for (at, flow) in self.flows.iter().enumerate() {
            for (place, entry) in flow.queued.iter().enumerate() {
                if entry.owner == owner && entry.number > newest.0 {
                    newest = (entry.number, at, place);
                }
            }
        }
        let (number, flow, place) = newest;
        if number == 0 {
            return None;
        }
        Some((flow, self.take_at(flow, place)?))
    }

    /// Takes out a request whose time is over.
    pub(super) fn take_expired(&mut self, is_empty: bool, now: Timestamp) -> Option<QueuedEntry> {
        let over =
            |entry: &QueuedEntry| entry.expires <= now || (is_empty && entry.gives_up <= now);
        let found = self
            .flows
            .iter()
            .enumerate()
            .find_map(|(flow, queue)| Some((flow, queue.queued.iter().position(over)?)));
        found.and_then(|(flow, at)| self.take_at(flow, at))
    }

    /// Records that a request of the flow goes at once, while no request of the band waits.
    pub(super) fn pass(&mut self, flow: usize, fairness: &dyn FairnessPolicy) {
        if let Some(flow) = self.flows.get_mut(flow) {
            fairness.begin(&mut flow.account, &self.account);
            flow.passed = true;
        }
    }

    /// Whether the band's unused minimum share pays for its next request.
    pub(super) fn is_owed(&self) -> bool {
        let head = self
            .flows
            .iter()
            .filter_map(|flow| flow.queued.front())
            .min_by_key(|entry| entry.number);
        head.is_some_and(|entry| self.credit >= entry.cost.tokens())
    }

    /// Counts an attempt to send a request. Returns whether it is for the minimum share of the
    /// band, and how many attempts there were before.
    pub(super) fn next_turn(&mut self) -> (bool, u64) {
        self.tried_owed = self.is_owed();
        self.turns = self.turns.wrapping_add(1);
        (self.tried_owed, self.turns.wrapping_sub(1))
    }

    /// Charges a flow. `rival` is the lowest rank of the band in other VMs.
    pub(super) fn charge(
        &mut self,
        flow: usize,
        fairness: &dyn FairnessPolicy,
        cost: FlowCost,
        rival: Option<f64>,
        now: Timestamp,
    ) {
        let mut lowest = rival.unwrap_or(f64::INFINITY);
        for (at, other) in self.flows.iter().enumerate() {
            if at == flow || !other.queued.is_empty() {
                lowest = lowest.min(fairness.rank(&other.account, &self.account, 0.0, now));
            }
        }
        let Some(flow) = self.flows.get_mut(flow) else {
            return;
        };
        flow.seen = now;
        fairness.advance(&mut self.account, lowest);
        fairness.charge(&mut flow.account, &mut self.account, cost, now);
    }

    /// The account of a flow, which is restored if a claim fails.
    pub(super) fn flow_mut(&mut self, flow: usize) -> Option<&mut FlowAccount> {
        self.flows.get_mut(flow).map(|flow| &mut flow.account)
    }

    pub(super) fn settle(&mut self, flow: FlowRef, fairness: &dyn FairnessPolicy, output: f64) {
        if let Some(queue) = self
            .flows
            .get_mut(flow.at)
            .filter(|queue| queue.id == flow.id)
        {
            fairness.settle(&mut queue.account, output);
            queue.settled += output;
        }
    }

    fn show(&mut self) {
        self.counters.queued = self.queued as u64;
        self.counters.bytes = self.bytes;
        if self.queued == 0 {
            self.counters.oldest = None;
        }
    }

    /// Puts the request that has waited longest into the counters.
    pub(super) fn show_oldest(&mut self, now: Timestamp) {
        let oldest = self
            .flows
            .iter()
            .flat_map(|flow| &flow.queued)
            .min_by_key(|entry| entry.since);
        self.counters.oldest = oldest.map(|entry| entry.reason(self.priority, now));
    }
}

// === impl QueuedEntry ===

impl QueuedEntry {
    pub(super) fn reason(&self, priority: i32, now: Timestamp) -> QueuedReason {
        QueuedReason {
            ms: now.ms_since(self.since),
            priority,
            full_at: self.full_at.filter(|_| !self.nowhere),
        }
    }
}
