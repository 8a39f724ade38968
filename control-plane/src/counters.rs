//! What is counted: by the VMs of the proxies, as they report it, and by the daemon itself.
//!
//! A VM's report is cumulative since it started, so a lost one loses nothing and the newest replaces the one before. A VM that fell
//! silent keeps its counts (totals never fall), but what it had outstanding is over. Beyond [`VMS_MAX`] or [`BYTES_MAX`], and beyond its share
//! of either for each origin, the longest silent are folded into a retired total of their pool; should such a one report again, it is counted twice,
//! which a scrape shows as a jump and nothing else depends on.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::{HISTOGRAM_BOUNDS, state};
use scheduler::{ENDPOINTS_MAX, EndpointRef, Incarnation, Slot};
use tokio::time::Instant;

use crate::peer::{Origin, Peer};

/// The most VMs counted one by one: the workers of a few hundred proxies. Typically some 10 KB each.
pub const VMS_MAX: usize = 4096;

/// The most VMs counted one by one of one origin: the workers of the largest hosts, in some pools.
const VMS_PER_ORIGIN_MAX: usize = VMS_MAX / 8;

/// The most memory that VMs counted one by one take, in bytes, about: 4,096 of them in a pool of 300 endpoints.
pub const BYTES_MAX: usize = 128 << 20;

/// The most memory of it that VMs of one origin take.
const BYTES_PER_ORIGIN_MAX: usize = BYTES_MAX / 8;

/// When there are too many, so much is left of what there may be: then it takes as many reports again until the next look at all of them.
const LEFT_EIGHTHS: usize = 7;

/// The most models told apart in a pool; the rest is counted as [`OTHER`]. Clients choose these names; the reference has the same cap.
pub const MODELS_MAX: usize = 1000;

/// The most models of one VM that are kept.
const MODELS_PER_VM_MAX: usize = exchange::pool::MODELS_MAX + 1;

/// Stands for all models beyond the cap.
pub const OTHER: &str = "other";

/// The longest model name or reason kept, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// The most drop reasons or HTTP statuses kept apart in one place.
const KEYS_MAX: usize = 64;

/// What a VM said is outstanding counts for this long; it reports every second or so.
const OUTSTANDING_FRESH: Duration = Duration::from_secs(10);

/// All counters of the daemon.
#[derive(Debug, Default)]
pub struct Counters {
    /// Rosters refused by proxies.
    pub rosters_refused: u64,
    /// EDS responses refused by Envoys.
    pub eds_refused: u64,
    /// Responses by EDS that were not taken over in time: rosters no longer wait for them.
    pub eds_unanswered: u64,
    /// Other messages of proxies that were out of bounds.
    pub said_refused: u64,
    /// Reports received.
    pub reports: u64,
    /// Parts of reports that could not be read, or were of pools that are not served.
    pub reports_invalid: u64,
    /// Writes of the snapshot file that failed.
    pub snapshot_write_errors: u64,
    vms: BTreeMap<VmKey, Vm>,
    /// What the VMs of each origin take.
    origins: BTreeMap<Origin, Taken>,
    all: Taken,
    /// By pool that is served.
    retired: BTreeMap<String, Totals>,
}

/// What VMs take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Taken {
    vms: usize,
    bytes: usize,
}

/// What a VM counted in a pool, ready to be added up.
#[derive(Debug)]
pub struct Counted {
    pool: String,
    vm_id: u64,
    totals: Totals,
}

/// A VM's share in one pool.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct VmKey {
    /// See [`Peer::id`].
    peer: u64,
    vm_id: u64,
    pool: String,
}

/// The front of this process, which is no VM: VMs have random ids, and no peer has the id 0.
const FRONT: VmKey = VmKey { peer: 0, vm_id: 0, pool: String::new() };

#[derive(Debug)]
struct Vm {
    origin: Origin,
    totals: Totals,
    bytes: usize,
    seen: Instant,
}

/// Counts of a pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// VMs that reported lately.
    pub vms: u64,
    /// By life of an endpoint.
    pub endpoints: BTreeMap<(Incarnation, Slot), EndpointTotals>,
    /// By what they are told apart by.
    pub models: BTreeMap<Label, ModelTotals>,
    /// Requests refused by us, by drop reason.
    pub dropped: BTreeMap<String, u64>,
    /// Time of a pick, in µs.
    pub pick_us: Histogram,
    /// Entries of the largest prefix index.
    pub prefix_entries: u64,
    /// Entries evicted.
    pub prefix_evictions: u64,
    /// Placements that nobody was told of, as too many waited to be told.
    pub placements_dropped: u64,
}

/// What counts of requests are told apart by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    /// The model asked for.
    pub model: String,
    /// The model sent on.
    pub target: String,
    /// The priority.
    pub priority: i32,
}

/// Counts of one endpoint's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointTotals {
    /// Named first in a ranked list.
    pub picked: u64,
    /// Answered.
    pub served: u64,
    /// Refused or reset before a response.
    pub failed: u64,
    /// Requests outstanding now.
    pub requests: u64,
    /// Prompt tokens outstanding now.
    pub prefill_tokens: u64,
    /// Tokens being generated now.
    pub decode_tokens: u64,
    /// Prompts whose first token is waited for now.
    pub prompts: u64,
    /// Requests with an SLO outstanding now.
    pub tracked: u64,
}

/// Counts of one model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelTotals {
    /// Requests begun.
    pub requests: u64,
    /// By HTTP status of the reply.
    pub errors: BTreeMap<String, u64>,
    /// Whole exchanges, in ms.
    pub duration_ms: Histogram,
    /// Time to the first token, in ms.
    pub ttft_ms: Histogram,
    /// Time for each further token, in ms.
    pub tpot_ms: Histogram,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Tokens of prompts that the engine had cached.
    pub cached_tokens: u64,
    /// Bytes of request bodies.
    pub request_bytes: u64,
    /// Bytes of response bodies.
    pub response_bytes: u64,
    /// Requests outstanding now.
    pub running: u64,
}

/// Counts by bucket of [`HISTOGRAM_BOUNDS`], the last one unbounded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Histogram {
    /// By bucket.
    pub counts: [u64; HISTOGRAM_BOUNDS.len() + 1],
    /// Sum of the values.
    pub sum: f64,
}

// === impl Counters ===

impl Counters {
    /// A process reported what its VMs counted, of pools that are served. Says who was given work since the report before, or has some: those of earlier
    /// stages are in flight without being counted as picked.
    pub fn report(&mut self, peer: &Peer, report: Vec<Counted>, now: Instant) -> Vec<(String, EndpointRef)> {
        self.reports += 1;
        let mut picked = Vec::new();
        for Counted { pool, vm_id, totals } in report {
            let key = VmKey { peer: peer.id, vm_id, pool };
            let ids = self.take(key.clone(), &peer.remote.origin, totals, now);
            picked.extend(ids.into_iter().map(|id| (key.pool.clone(), id)));
        }
        picked
    }

    /// Our own front counted this of a pool: its cumulative totals. Says who was given work as [`Self::report`] does.
    pub fn front(&mut self, pool: &str, totals: Totals, now: Instant) -> Vec<EndpointRef> {
        self.take(VmKey { pool: pool.to_owned(), ..FRONT }, &Origin::default(), totals, now)
    }

    fn take(&mut self, key: VmKey, origin: &Origin, totals: Totals, now: Instant) -> Vec<EndpointRef> {
        let before = self.remove(&key).unwrap_or_default();
        let more = |id: &(Incarnation, Slot), now: &EndpointTotals| {
            now.requests > 0 || now.picked > before.endpoints.get(id).map_or(0, |b| b.picked)
        };
        let picked = totals.endpoints.iter().filter(|(id, row)| more(id, row));
        let picked = picked.map(|(&(incarnation, slot), _)| EndpointRef { slot, incarnation }).collect();
        let bytes = totals.bytes() + size_of::<(VmKey, Vm)>();
        let of = self.origins.entry(origin.clone()).or_default();
        of.add(bytes);
        self.all.add(bytes);
        let (of, all) = (*of, self.all);
        self.vms.insert(key, Vm { origin: origin.clone(), totals, bytes, seen: now });
        if of.vms > VMS_PER_ORIGIN_MAX || of.bytes > BYTES_PER_ORIGIN_MAX {
            self.retire(Some(origin), (VMS_PER_ORIGIN_MAX, BYTES_PER_ORIGIN_MAX));
        } else if all.vms > VMS_MAX || all.bytes > BYTES_MAX {
            self.retire(None, (VMS_MAX, BYTES_MAX));
        }
        picked
    }

    /// The totals of a pool.
    #[must_use]
    pub fn totals(&self, pool: &str, now: Instant) -> Totals {
        let mut totals = self.retired.get(pool).cloned().unwrap_or_default();
        for (_, vm) in self.vms.iter().filter(|(key, _)| key.pool == pool) {
            totals.add(&vm.totals, now.saturating_duration_since(vm.seen) < OUTSTANDING_FRESH);
        }
        totals
    }

    fn remove(&mut self, key: &VmKey) -> Option<Totals> {
        let vm = self.vms.remove(key)?;
        self.all.subtract(vm.bytes);
        if let Some(of) = self.origins.get_mut(&vm.origin) {
            of.subtract(vm.bytes);
            if of.vms == 0 {
                self.origins.remove(&vm.origin);
            }
        }
        Some(vm.totals)
    }

    /// Folds the longest silent, of one origin or of all, until some room is left under these limits.
    fn retire(&mut self, origin: Option<&Origin>, (vms_max, bytes_max): (usize, usize)) {
        let of_origin = self.vms.iter().filter(|(_, vm)| origin.is_none_or(|origin| vm.origin == *origin));
        let mut oldest: Vec<(Instant, VmKey)> = of_origin.map(|(key, vm)| (vm.seen, key.clone())).collect();
        oldest.sort();
        for (_, key) in oldest {
            let taken = origin.map_or(self.all, |origin| self.origins.get(origin).copied().unwrap_or_default());
            if taken.vms <= vms_max * LEFT_EIGHTHS / 8 && taken.bytes <= bytes_max * LEFT_EIGHTHS / 8 {
                return;
            }
            if let Some(totals) = self.remove(&key) {
                self.retired.entry(key.pool).or_default().add(&totals, false);
            }
        }
    }
}

// === impl Taken ===

impl Taken {
    fn add(&mut self, bytes: usize) {
        self.vms += 1;
        self.bytes += bytes;
    }

    fn subtract(&mut self, bytes: usize) {
        self.vms -= 1;
        self.bytes -= bytes;
    }
}

// === impl Counted ===

impl Counted {
    /// What a VM says.
    #[must_use]
    pub fn of_vm(mut counters: state::VmCounters) -> Self {
        let pool = std::mem::take(&mut counters.pool);
        Self { pool, vm_id: counters.vm_id, totals: Totals::of_vm(counters) }
    }
}

// === impl Totals ===

impl Totals {
    fn of_vm(counters: state::VmCounters) -> Self {
        let state::VmCounters { endpoints, models, dropped, pick_us, prefix_entries, prefix_evictions, placements_dropped, .. } = counters;
        let pick_us = Histogram::of(pick_us);
        let mut totals = Self { vms: 1, pick_us, prefix_entries, prefix_evictions, placements_dropped, ..Self::default() };
        for e in endpoints.into_iter().take(ENDPOINTS_MAX) {
            let Ok(slot) = u16::try_from(e.slot) else { continue };
            let state::EndpointCounters {
                incarnation,
                picked,
                served,
                failed,
                requests,
                prefill_tokens,
                decode_tokens,
                prompts,
                tracked,
                ..
            } = e;
            let row = EndpointTotals { picked, served, failed, requests, prefill_tokens, decode_tokens, prompts, tracked };
            totals.endpoints.insert((Incarnation(incarnation), Slot(slot)), row);
        }
        for m in models {
            let label = Label { model: shorten(&m.model), target: shorten(&m.target_model), priority: m.priority };
            totals.of(label, MODELS_PER_VM_MAX).add(&ModelTotals::of(m), true);
        }
        add_counts(&mut totals.dropped, dropped.into_iter().map(|c| (shorten(&c.key), c.count)));
        totals
    }

    /// What was counted in this process, where nothing need be checked.
    #[must_use]
    pub fn of_pool(pool: &exchange::Pool, pick_us: &exchange::pool::Histogram) -> Self {
        let (counters, prefixes) = (pool.counters(), pool.prefixes().stats());
        let endpoint = |c: &exchange::pool::EndpointCounters| {
            let load = pool.in_flight().own(c.endpoint);
            let row = EndpointTotals {
                picked: c.picked,
                served: c.served,
                failed: c.failed,
                requests: u64::from(load.requests),
                prefill_tokens: load.prefill_tokens,
                decode_tokens: load.decode_tokens,
                prompts: u64::from(load.prefills.prompts),
                tracked: pool.in_flight().running(c.endpoint).len() as u64,
            };
            ((c.endpoint.incarnation, c.endpoint.slot), row)
        };
        Self {
            vms: 1,
            endpoints: counters.endpoints().iter().map(endpoint).collect(),
            models: counters.models().iter().map(|m| (Label::of_front(&m.label), ModelTotals::of_front(m))).collect(),
            dropped: counters.dropped().iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect(),
            pick_us: Histogram::of_front(pick_us),
            prefix_entries: prefixes.entries as u64,
            prefix_evictions: prefixes.evictions,
            placements_dropped: pool.placements_dropped(),
        }
    }

    /// How much memory it takes, about.
    fn bytes(&self) -> usize {
        // What a tree of such entries takes for each, besides the entry.
        const NODE: usize = 16;
        let counts = |counts: &BTreeMap<String, u64>| counts.keys().map(|key| key.len() + size_of::<(String, u64)>() + NODE).sum::<usize>();
        let model = |(label, totals): (&Label, &ModelTotals)| {
            size_of::<(Label, ModelTotals)>() + NODE + label.model.len() + label.target.len() + counts(&totals.errors)
        };
        let endpoints = self.endpoints.len() * (size_of::<((Incarnation, Slot), EndpointTotals)>() + NODE);
        endpoints + self.models.iter().map(model).sum::<usize>() + counts(&self.dropped)
    }

    /// Adds another's counts; what it has outstanding only if that is `fresh`.
    fn add(&mut self, other: &Self, fresh: bool) {
        if fresh {
            self.vms += other.vms;
            self.prefix_entries = self.prefix_entries.max(other.prefix_entries);
        }
        for (id, row) in &other.endpoints {
            self.endpoints.entry(*id).or_default().add(row, fresh);
        }
        // Lives long over; the newest are the largest.
        while self.endpoints.len() > 4 * ENDPOINTS_MAX {
            self.endpoints.pop_first();
        }
        for (label, row) in &other.models {
            self.of(label.clone(), MODELS_MAX).add(row, fresh);
        }
        add_counts(&mut self.dropped, other.dropped.iter().map(|(key, count)| (key.clone(), *count)));
        self.pick_us.add(&other.pick_us);
        add_to(&mut self.prefix_evictions, other.prefix_evictions);
        add_to(&mut self.placements_dropped, other.placements_dropped);
    }

    fn of(&mut self, label: Label, models_max: usize) -> &mut ModelTotals {
        let room = self.models.len() < models_max || self.models.contains_key(&label);
        let other = || Label { model: OTHER.to_owned(), target: OTHER.to_owned(), priority: 0 };
        self.models.entry(if room { label } else { other() }).or_default()
    }
}

// === impl Label ===

impl Label {
    fn of_front(label: &exchange::pool::Label) -> Self {
        Self { model: label.model.to_string(), target: label.target_model.to_string(), priority: label.priority }
    }
}

// === impl EndpointTotals ===

impl EndpointTotals {
    fn add(&mut self, other: &Self, fresh: bool) {
        let Self { picked, served, failed, requests, prefill_tokens, decode_tokens, prompts, tracked } = other;
        add_to(&mut self.picked, *picked);
        add_to(&mut self.served, *served);
        add_to(&mut self.failed, *failed);
        if fresh {
            add_to(&mut self.requests, *requests);
            add_to(&mut self.prefill_tokens, *prefill_tokens);
            add_to(&mut self.decode_tokens, *decode_tokens);
            add_to(&mut self.prompts, *prompts);
            add_to(&mut self.tracked, *tracked);
        }
    }
}

// === impl ModelTotals ===

impl ModelTotals {
    fn of(m: state::ModelCounters) -> Self {
        let mut errors = BTreeMap::new();
        add_counts(&mut errors, m.errors.into_iter().map(|c| (shorten(&c.key), c.count)));
        Self {
            requests: m.requests,
            errors,
            duration_ms: Histogram::of(m.duration_ms),
            ttft_ms: Histogram::of(m.ttft_ms),
            tpot_ms: Histogram::of(m.tpot_ms),
            prompt_tokens: m.prompt_tokens,
            completion_tokens: m.completion_tokens,
            cached_tokens: m.cached_tokens,
            request_bytes: m.request_bytes,
            response_bytes: m.response_bytes,
            running: m.running,
        }
    }

    fn of_front(m: &exchange::pool::ModelCounters) -> Self {
        Self {
            requests: m.requests,
            errors: m.errors.iter().map(|(status, count)| (status.to_string(), *count)).collect(),
            duration_ms: Histogram::of_front(&m.duration_ms),
            ttft_ms: Histogram::of_front(&m.ttft_ms),
            tpot_ms: Histogram::of_front(&m.tpot_ms),
            prompt_tokens: m.prompt_tokens,
            completion_tokens: m.completion_tokens,
            cached_tokens: m.cached_tokens,
            request_bytes: m.request_bytes,
            response_bytes: m.response_bytes,
            running: m.running,
        }
    }

    fn add(&mut self, other: &Self, fresh: bool) {
        add_to(&mut self.requests, other.requests);
        add_counts(&mut self.errors, other.errors.iter().map(|(key, count)| (key.clone(), *count)));
        self.duration_ms.add(&other.duration_ms);
        self.ttft_ms.add(&other.ttft_ms);
        self.tpot_ms.add(&other.tpot_ms);
        add_to(&mut self.prompt_tokens, other.prompt_tokens);
        add_to(&mut self.completion_tokens, other.completion_tokens);
        add_to(&mut self.cached_tokens, other.cached_tokens);
        add_to(&mut self.request_bytes, other.request_bytes);
        add_to(&mut self.response_bytes, other.response_bytes);
        if fresh {
            add_to(&mut self.running, other.running);
        }
    }
}

// === impl Histogram ===

impl Histogram {
    /// How many values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    fn of(message: Option<state::Histogram>) -> Self {
        let mut histogram = Self::default();
        if let Some(state::Histogram { counts, sum }) = message {
            histogram.counts.iter_mut().zip(counts).for_each(|(bucket, count)| *bucket = count);
            histogram.sum = if sum.is_finite() && sum >= 0.0 { sum } else { 0.0 };
        }
        histogram
    }

    fn of_front(histogram: &exchange::pool::Histogram) -> Self {
        Self { counts: histogram.counts, sum: histogram.sum }
    }

    fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts).for_each(|(bucket, count)| add_to(bucket, count));
        self.sum += other.sum;
    }
}

fn add_to(total: &mut u64, count: u64) {
    *total = total.saturating_add(count);
}

fn add_counts(totals: &mut BTreeMap<String, u64>, counts: impl IntoIterator<Item = (String, u64)>) {
    for (key, count) in counts {
        let room = totals.len() < KEYS_MAX || totals.contains_key(&key);
        add_to(totals.entry(if room { key } else { OTHER.to_owned() }).or_default(), count);
    }
}

fn shorten(name: &str) -> String {
    name.get(..name.floor_char_boundary(NAME_BYTES_MAX)).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM's counters: what was picked, and what is in flight, at slots 0, 1, ...
    fn counters(vm_id: u64, rows: &[(u64, u64)]) -> Counted {
        let row = |(slot, &(picked, requests)): (usize, &(u64, u64))| {
            let slot = u32::try_from(slot).unwrap();
            state::EndpointCounters { slot, incarnation: 1, picked, requests, ..Default::default() }
        };
        let endpoints = rows.iter().enumerate().map(row).collect();
        Counted::of_vm(state::VmCounters { pool: "p".to_owned(), vm_id, endpoints, ..Default::default() })
    }

    fn peer(id: u64, last: u8) -> Peer {
        let origin = Origin { certificate: None, address: Some([10, 0, 0, last].into()) };
        Peer { node_id: "n".to_owned(), process_id: id, id, remote: crate::peer::Remote { origin, socket: None } }
    }

    #[test]
    fn who_has_work_is_told_though_it_was_picked_for_an_earlier_stage() {
        let mut all = Counters::default();
        let mut told = |rows: &[(u64, u64)]| {
            let found = all.report(&peer(1, 1), vec![counters(1, rows)], Instant::now());
            found.into_iter().map(|(_, endpoint)| endpoint.slot.0).collect::<Vec<_>>()
        };
        assert_eq!(told(&[(1, 0), (0, 1), (0, 0)]), [0, 1], "picked; at work; neither");
        assert_eq!(told(&[(1, 0), (0, 0), (0, 0)]), [0; 0], "all over");
        assert_eq!(told(&[(2, 0), (0, 0), (0, 0)]), [0]);
    }

    #[test]
    fn one_origin_takes_its_share_of_memory_and_no_count_is_lost() {
        let (mut all, now) = (Counters::default(), Instant::now());
        all.report(&peer(1, 1), vec![counters(1, &[(1, 0)])], now);
        for vm in 0..3_000 {
            let later = now + Duration::from_millis(vm + 1);
            all.report(&peer(2 + vm % 50, 2), vec![counters(vm, &[(1, 0)])], later);
            assert!(all.vms.len() <= VMS_PER_ORIGIN_MAX + 1);
        }
        // Large ones, of many more models than there are: held to fewer, and counted by their size.
        let models = |vm: u64| {
            let error = |i: u64| state::Count { key: format!("{i}-{}", "x".repeat(300)), count: 1 };
            let model =
                |i: u64| state::ModelCounters { model: format!("{vm}-{i}"), errors: (0..100).map(error).collect(), ..Default::default() };
            Counted::of_vm(state::VmCounters {
                pool: "p".to_owned(),
                vm_id: vm,
                models: (0..150).map(model).collect(),
                ..Default::default()
            })
        };
        for vm in 10_000..10_040 {
            all.report(&peer(99, 2), vec![models(vm)], now + Duration::from_secs(60));
            assert!(all.all.bytes <= BYTES_PER_ORIGIN_MAX + (4 << 20), "{:?}", all.all);
        }
        assert!(all.vms.contains_key(&VmKey { peer: 1, vm_id: 1, pool: "p".to_owned() }), "another's is not touched");
        let totals = all.totals("p", now);
        assert_eq!(totals.endpoints[&(Incarnation(1), Slot(0))].picked, 3_001);
        let sum = all.vms.values().fold(Taken::default(), |mut sum, vm| {
            sum.add(vm.bytes);
            sum
        });
        assert_eq!(sum, all.all);
    }
}
