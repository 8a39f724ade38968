//! The order in which the requests of the queues are tried.

use scheduler::flow::{FlowAccount, FlowControl, FullEndpoint, QueuedTag, SharedOrder};
use scheduler::{EndpointRef, Timestamp};

use super::band::{BandQueue, FlowQueue, QueuedEntry};

/// The maximum number of requests of a band that are tried in one pass without success. In the
/// simulation, a maximum of one costs a tenth of the throughput if a prompt waits for the endpoint
/// that has it cached. A maximum above eight gains nothing.
pub(super) const LOOK_AHEAD: usize = 8;

/// The maximum number of full endpoints in the order of the VMs, which limits its size. An endpoint
/// that is left out costs each VM two tries.
const FULL_SHARED_MAX: usize = 64;

/// The maximum number of requests of a band that are examined in one pass.
pub(super) const SCAN_MAX: usize = 64;

/// The maximum number of endpoints with freed room that are checked before a pass. With more, the
/// pass begins at once. One call ends requests at one or two endpoints.
const FREED_MAX: usize = 8;

/// From this wait on, in ms, a request claims its endpoint: no later request may take the room
/// there, so short prompts cannot pass a long prompt forever.
const CLAIM_AFTER_MS: u64 = 1_000;

#[derive(Debug, Default)]
pub(super) struct ReleasePass {
    due: bool,
    /// The round of the order that the VMs share.
    round: u64,
    /// The numbers of the requests that were tried without success.
    tried: Vec<u64>,
    /// The numbers of the requests that were named since the last call of [`Self::forget_named`].
    named: Vec<u64>,
    full: Vec<FullEndpoint>,
    /// The endpoints where requests made room since the last check.
    freed: Vec<EndpointRef>,
    /// The requests that claim an endpoint, each as endpoint, priority and number.
    claims: Vec<(EndpointRef, i32, u64)>,
    /// The number of requests that this pass tried again although no endpoint could serve them
    /// before.
    nowhere: usize,
}

/// The next request to try.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) number: u64,
    pub(super) tag: QueuedTag,
    /// Whether no endpoint could serve it before. Such a request does not count towards
    /// [`LOOK_AHEAD`].
    nowhere: bool,
}

// === impl ReleasePass ===

impl ReleasePass {
    pub(super) fn begin(&mut self) {
        self.due = true;
        self.tried.clear();
        self.full.clear();
        self.claims.clear();
        self.nowhere = 0;
    }

    pub(super) fn is_due(&self) -> bool {
        self.due
    }

    /// Records that a request found no room.
    pub(super) fn found_full(
        &mut self,
        number: u64,
        endpoint: Option<EndpointRef>,
        priority: i32,
        waited_ms: u64,
    ) {
        if !self.tried.contains(&number) {
            self.tried.push(number);
        }
        let Some(endpoint) = endpoint else { return };
        if waited_ms >= CLAIM_AFTER_MS && !self.is_claimed(endpoint, priority, None) {
            self.claims.push((endpoint, priority, number));
        }
        self.endpoint_full(endpoint, priority, 1);
    }

    /// Counts requests that found no room at the endpoint.
    pub(super) fn endpoint_full(&mut self, endpoint: EndpointRef, priority: i32, tries: u32) {
        match self
            .full
            .iter_mut()
            .find(|full| full.endpoint == endpoint && full.priority >= priority)
        {
            Some(full) => full.tries = full.tries.saturating_add(tries),
            None => self.full.push(FullEndpoint {
                endpoint,
                priority,
                tries,
            }),
        }
    }

    /// Records an endpoint where room was made. Returns false if there are too many.
    pub(super) fn add_freed(&mut self, endpoint: EndpointRef) -> bool {
        let is_known = self.freed.contains(&endpoint);
        if !is_known && self.freed.len() < FREED_MAX {
            self.freed.push(endpoint);
            return true;
        }
        is_known
    }

    pub(super) fn freed(&self) -> &[EndpointRef] {
        &self.freed
    }

    pub(super) fn forget_freed(&mut self) {
        self.freed.clear();
    }

    /// Begins a pass for each new round of the shared order, and adds the endpoints that other VMs
    /// found full.
    pub(super) fn enter(&mut self, order: &SharedOrder) {
        if self.round != order.round {
            self.begin();
            self.round = order.round;
        }
        for full in &order.full {
            match self
                .full
                .iter_mut()
                .find(|own| own.endpoint == full.endpoint && own.priority == full.priority)
            {
                Some(own) => own.tries = own.tries.max(full.tries),
                None => self.full.push(*full),
            }
        }
    }

    /// Whether another request of at least this priority claims the endpoint.
    pub(super) fn is_claimed(
        &self,
        endpoint: EndpointRef,
        priority: i32,
        number: Option<u64>,
    ) -> bool {
        self.claims
            .iter()
            .any(|(at, by, claims)| *at == endpoint && *by >= priority && Some(*claims) != number)
    }

    /// Like [`Self::enter`], and adds the endpoints that this VM found full to the order.
    pub(super) fn follow(&mut self, order: &mut SharedOrder) {
        self.enter(order);
        order.full.clear();
        order.full.extend(self.full.iter().take(FULL_SHARED_MAX));
    }

    /// The next request to try.
    pub(super) fn next(
        &mut self,
        bands: &[BandQueue],
        control: &FlowControl,
        now: Timestamp,
    ) -> Option<u64> {
        if !self.due {
            return None;
        }
        let next = self.peek(bands, control, now);
        self.due = next.is_some();
        let next = next?;
        self.take(next);
        Some(next.number)
    }

    /// Records that the request is tried now. Its number must not be given again in this pass to a
    /// host that lost it.
    pub(super) fn take(&mut self, candidate: Candidate) {
        self.nowhere += usize::from(candidate.nowhere);
        self.tried.push(candidate.number);
        self.named.push(candidate.number);
    }

    pub(super) fn is_named(&self, number: u64) -> bool {
        self.named.contains(&number)
    }

    pub(super) fn forget_named(&mut self) {
        self.named.clear();
    }

    /// The request that [`Self::next`] would name. Bands with a claim on their minimum share come
    /// first.
    #[inline(never)] // inlined at each of its callers, it would be most of the code here
    pub(super) fn peek(
        &self,
        bands: &[BandQueue],
        control: &FlowControl,
        now: Timestamp,
    ) -> Option<Candidate> {
        let waiting = |owed: bool| {
            bands
                .iter()
                .filter(move |band| band.queued > 0 && band.is_owed() == owed)
        };
        waiting(true)
            .chain(waiting(false))
            .find_map(|band| self.next_of(band, control, now))
    }

    /// The next request of a band. Walks through the band as if each request were sent, so that
    /// flows alternate by their fairness.
    fn next_of(
        &self,
        band: &BandQueue,
        control: &FlowControl,
        now: Timestamp,
    ) -> Option<Candidate> {
        let rules = control.band(band.priority)?;
        let mut account = band.account;
        let mut walks: Vec<FlowWalk<'_>> = band
            .flows()
            .iter()
            .filter_map(FlowWalk::from_queue)
            .collect();
        let mut tries = 0;
        let mut scanned = 0;
        let is_only_flow = walks.len() == 1;
        while tries < LOOK_AHEAD && scanned < SCAN_MAX {
            let rank = |walk: &FlowWalk<'_>| {
                let entry = walk.entry()?;
                let waited_ms = now.ms_since(entry.since) as f64;
                Some((
                    rules.fairness.rank(&walk.account, &account, waited_ms, now),
                    entry.key,
                    entry.number,
                ))
            };
            let best = walks
                .iter()
                .enumerate()
                .filter_map(|(at, walk)| Some((rank(walk)?, at)));
            let best = best.min_by(|((a, a_key, a_no), _), ((b, b_key, b_no), _)| {
                a.total_cmp(b).then((a_key, a_no).cmp(&(b_key, b_no)))
            });
            let ((rank, key, number), at) = best?;
            let walk = walks.get_mut(at)?;
            let entry = walk.entry()?;
            let tried = self.tried.contains(&number);
            if !tried && !self.is_hopeless(entry, band.priority) {
                let flow = if is_only_flow { walk.queue.id } else { 0 };
                let tag = QueuedTag {
                    owed: band.is_owed(),
                    priority: band.priority,
                    flow,
                    rank,
                    key,
                };
                return Some(Candidate {
                    number,
                    tag,
                    nowhere: entry.nowhere,
                });
            }
            scanned += usize::from(!entry.nowhere);
            tries += usize::from(tried && !entry.nowhere);
            rules
                .fairness
                .charge(&mut walk.account, &mut account, entry.cost, now);
            walk.at += 1;
        }
        None
    }

    /// Whether so many requests found no room where this request would go that it need not be
    /// tried.
    fn is_hopeless(&self, entry: &QueuedEntry, priority: i32) -> bool {
        if entry.nowhere {
            return self.nowhere >= SCAN_MAX;
        }
        entry
            .full_at
            .is_some_and(|endpoint| self.full.iter().any(|full| full.stops(endpoint, priority)))
    }
}

/// A walk through the requests of a flow.
struct FlowWalk<'b> {
    queue: &'b FlowQueue,
    account: FlowAccount,
    at: usize,
}

impl<'b> FlowWalk<'b> {
    fn from_queue(queue: &'b FlowQueue) -> Option<Self> {
        (!queue.queued.is_empty()).then_some(Self {
            queue,
            account: queue.account,
            at: 0,
        })
    }

    fn entry(&self) -> Option<&'b QueuedEntry> {
        self.queue.queued.get(self.at)
    }
}
