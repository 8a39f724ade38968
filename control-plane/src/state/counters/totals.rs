//! Counts of a pool, and their addition. Clients choose some of the names, so each kind of name has
//! a limit. All names beyond the limit are counted as one.

use std::collections::BTreeMap;

use pool_state::MISS_CAUSES;
use pool_state::queues::FLOW_OUTCOMES;
use proto::HISTOGRAM_BOUNDS;
use scheduler::{ENDPOINTS_MAX, Generation, Slot};

use super::pool_names::{OtherNames, PoolNames};

/// The maximum number of models counted separately in a pool. The rest are counted as [`OTHER`].
/// llm-d has the same limit.
pub const MODELS_MAX: usize = 1000;

/// The maximum number of these models that only client requests name, over all wasm VMs. One VM has
/// the same limit. Each such model takes some 90 lines of the metrics page, so all take at most 2.5
/// MB.
const UNLISTED_MAX: usize = pool_state::MODELS_MAX;

/// The label of all models beyond the limit.
pub const OTHER: &str = "other";

/// The maximum number of drop reasons of a pool, and of HTTP statuses of a model, that are counted
/// separately.
pub(super) const KEYS_MAX: usize = 64;

/// The maximum number of endpoints of a pool with counts: the endpoints that the pool has, and
/// three times as many that it recently had.
pub(super) const ENDPOINTS_KNOWN_MAX: usize = 4 * ENDPOINTS_MAX;

/// The maximum number of priority bands that are read from a VM's report. A VM has the same limit.
pub(super) const BANDS_MAX: usize = 64;

/// The maximum of each count. A proxy may report any number, and f64 adds 1 only to numbers below
/// 2⁵³. So no VM has more than a VM counts in years, and all buckets of all VMs together stay below
/// 2⁵³.
#[derive(Clone, Copy, Debug)]
pub(super) struct CountLimit {
    /// The limit for numbers of requests.
    requests: u64,
    /// The limit for tokens, bytes and times, whose last digits matter less.
    amount: u64,
    /// The limit for the sums of histograms.
    sum: f64,
}

/// Counts of a pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CounterTotals {
    /// The number of VMs that reported recently.
    pub vms: u64,
    /// Counts of each generation of an endpoint.
    pub endpoints: BTreeMap<(Generation, Slot), EndpointTotals>,
    /// Counts of requests, by label.
    pub models: BTreeMap<TotalsLabel, ModelTotals>,
    /// The number of requests that proxies refused, by drop reason.
    pub dropped: BTreeMap<String, u64>,
    /// The time that picks took, in µs.
    pub pick_us: TotalsHistogram,
    /// The number of entries of the largest prefix index.
    pub prefix_entries: u64,
    /// The number of entries that were evicted from prefix indexes.
    pub prefix_evictions: u64,
    /// The number of placements (prompts cached at endpoints) that other proxies did not get,
    /// because too many were waiting.
    pub placements_dropped: u64,
    /// The running requests with an SLO, one text for each VM, as [`exchange::record::running`]
    /// writes it.
    pub running: Vec<Box<str>>,
    /// The counts of flow control, by priority.
    pub bands: BTreeMap<i32, BandTotals>,
}

/// Counts of one band of flow control.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BandTotals {
    /// The number of requests in the queue now.
    pub held: u64,
    /// The memory of the queued requests in the proxy, in bytes, with their bodies.
    pub bytes: u64,
    /// The time that the oldest queued request has waited, in ms.
    pub oldest_ms: u64,
    /// The endpoint that was picked for the oldest request and had no room: slot and generation.
    pub full_at: Option<(u32, u32)>,
    /// The number of requests by outcome, in the order of [`pool_state::queues::FLOW_OUTCOMES`].
    pub outcomes: [u64; FLOW_OUTCOMES.len()],
    /// The number of running requests of the band that were evicted for requests of other bands.
    pub given_up: u64,
    /// The number of running requests of other bands that were evicted for requests of the band.
    pub given_up_for: u64,
    /// The time in the queue of requests that were sent, in ms.
    pub queue_ms: TotalsHistogram,
}

/// The label of a count of requests.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TotalsLabel {
    /// The requested model.
    pub model: String,
    /// The model in the request to the endpoint.
    pub target: String,
    pub priority: i32,
}

/// Counts of one generation of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointTotals {
    /// The number of times that the endpoint was the first of a ranked list.
    pub picked: u64,
    /// The number of answered requests.
    pub served: u64,
    /// The number of requests that were refused or reset before a response.
    pub failed: u64,
    /// The number of requests in flight now.
    pub requests: u64,
    /// The number of prompt tokens in flight now.
    pub prefill_tokens: u64,
    /// The number of tokens that are being generated now.
    pub decode_tokens: u64,
    /// The number of prompts that wait for their first token now.
    pub prompts: u64,
    /// The number of requests with an SLO in flight now.
    pub tracked: u64,
    /// The number of requests in flight whose client does not read the reply.
    pub unread: u64,
}

/// The type has many fields, because each field is a separate metric.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelTotals {
    /// Whether discovery, an object or an engine lists the model. Otherwise only clients name the
    /// model.
    pub listed: bool,
    /// The number of requests that began.
    pub requests: u64,
    /// The number of error answers, by HTTP status.
    pub errors: BTreeMap<String, u64>,
    /// The time of whole exchanges, in ms.
    pub duration_ms: TotalsHistogram,
    /// The time to the first token, in ms.
    pub ttft_ms: TotalsHistogram,
    /// The time for each further token, in ms.
    pub tpot_ms: TotalsHistogram,
    pub prompt_tokens: u64,
    /// The number of generated tokens.
    pub completion_tokens: u64,
    /// The number of prompt tokens that the engine had cached.
    pub cached_tokens: u64,
    /// The number of prompt tokens that were not cached, by cause, in the order of
    /// [`pool_state::MISS_CAUSES`].
    pub missed_tokens: [u64; MISS_CAUSES.len()],
    /// The number of bytes of request bodies.
    pub request_bytes: u64,
    /// The number of bytes of response bodies.
    pub response_bytes: u64,
    /// The number of requests in flight now.
    pub running: u64,
    /// The numbers of requests with an SLO: met, missed, shed.
    pub slo: [u64; 3],
}

/// Counts by bucket of [`HISTOGRAM_BOUNDS`]. The last bucket is unbounded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TotalsHistogram {
    pub counts: [u64; HISTOGRAM_BOUNDS.len() + 1],
    pub sum: f64,
}

// === impl CountLimit ===

impl CountLimit {
    pub(super) const OF_VM: Self = Self {
        requests: 1 << 36,
        amount: 1 << 50,
        sum: 3e14,
    };

    pub(super) const OF_RETIRED: Self = Self {
        requests: 1 << 46,
        amount: 1 << 59,
        sum: 6e17,
    };

    /// The limit for first reports. This limit is less than [`Self::OF_RETIRED`], because first
    /// reports are subtracted from all counts.
    pub(super) const OF_FIRST_REPORTS: Self = Self {
        requests: 1 << 45,
        amount: 1 << 58,
        sum: 3e17,
    };

    fn cut_requests<'c>(self, counts: impl IntoIterator<Item = &'c mut u64>) {
        for count in counts {
            *count = (*count).min(self.requests);
        }
    }

    fn cut_amounts<'c>(self, amounts: impl IntoIterator<Item = &'c mut u64>) {
        for amount in amounts {
            *amount = (*amount).min(self.amount);
        }
    }

    fn cut_histograms<'c>(self, histograms: impl IntoIterator<Item = &'c mut TotalsHistogram>) {
        for TotalsHistogram { counts, sum } in histograms {
            self.cut_requests(counts);
            *sum = sum.min(self.sum);
        }
    }
}

// === impl CounterTotals ===

impl CounterTotals {
    /// Cuts each count to its maximum.
    pub(super) fn cut(&mut self, limit: CountLimit) {
        for row in self.endpoints.values_mut() {
            limit.cut_requests([&mut row.picked, &mut row.served, &mut row.failed]);
            limit.cut_requests([&mut row.requests, &mut row.prompts]);
            limit.cut_requests([&mut row.tracked, &mut row.unread]);
            limit.cut_amounts([&mut row.prefill_tokens, &mut row.decode_tokens]);
        }
        for row in self.models.values_mut() {
            limit.cut_requests([&mut row.requests, &mut row.running]);
            limit.cut_requests(row.errors.values_mut().chain(&mut row.slo));
            limit.cut_histograms([&mut row.duration_ms, &mut row.ttft_ms, &mut row.tpot_ms]);
            limit.cut_amounts([&mut row.prompt_tokens, &mut row.completion_tokens]);
            limit.cut_amounts([&mut row.cached_tokens]);
            limit.cut_amounts([&mut row.request_bytes, &mut row.response_bytes]);
            limit.cut_amounts(&mut row.missed_tokens);
        }
        for row in self.bands.values_mut() {
            limit.cut_requests([&mut row.held, &mut row.given_up, &mut row.given_up_for]);
            limit.cut_requests(&mut row.outcomes);
            limit.cut_amounts([&mut row.bytes, &mut row.oldest_ms]);
            limit.cut_histograms([&mut row.queue_ms]);
        }
        limit.cut_requests(self.dropped.values_mut());
        limit.cut_histograms([&mut self.pick_us]);
        limit.cut_requests([&mut self.prefix_entries, &mut self.prefix_evictions]);
        limit.cut_requests([&mut self.placements_dropped]);
    }

    /// Returns the approximate memory of the totals, in bytes.
    pub(super) fn bytes(&self) -> usize {
        // The memory that a tree uses for each entry, in addition to the entry.
        const NODE: usize = 16;
        let counts = |counts: &BTreeMap<String, u64>| {
            counts
                .keys()
                .map(|key| key.len() + size_of::<(String, u64)>() + NODE)
                .sum::<usize>()
        };
        let model = |(label, totals): (&TotalsLabel, &ModelTotals)| {
            size_of::<(TotalsLabel, ModelTotals)>()
                + NODE
                + label.model.len()
                + label.target.len()
                + counts(&totals.errors)
        };
        let endpoints =
            self.endpoints.len() * (size_of::<((Generation, Slot), EndpointTotals)>() + NODE);
        let running = self
            .running
            .iter()
            .map(|running| running.len() + size_of::<Box<str>>())
            .sum::<usize>();
        let bands = self.bands.len() * (size_of::<(i32, BandTotals)>() + NODE);
        bands
            + endpoints
            + self.models.iter().map(model).sum::<usize>()
            + counts(&self.dropped)
            + running
    }

    /// Adds the counts of `other`, separately for each name in `names`. Adds the requests in flight
    /// of `other` only if `fresh`.
    pub(super) fn add(&mut self, other: &Self, fresh: bool, names: &PoolNames, others: OtherNames) {
        if fresh {
            self.vms += other.vms;
            self.prefix_entries = self.prefix_entries.max(other.prefix_entries);
            self.running.extend(other.running.iter().cloned());
        }
        for (id, row) in &other.endpoints {
            if self.endpoints.len() < ENDPOINTS_KNOWN_MAX || self.endpoints.contains_key(id) {
                self.endpoints.entry(*id).or_default().add(row, fresh);
            }
        }
        let is_counted = |is_shown: bool| is_shown || others == OtherNames::Count;
        for (label, row) in &other.models {
            let is_shown = names.models.has(label);
            if is_counted(is_shown) {
                let other = TotalsLabel::other();
                let shown = if is_shown { label } else { &other };
                self.model_mut(shown, row.listed, MODELS_MAX)
                    .add(row, fresh);
            }
        }
        for (priority, row) in &other.bands {
            if names.priorities.has(priority) {
                self.bands.entry(*priority).or_default().add(row, fresh);
            }
        }
        for (reason, count) in &other.dropped {
            let is_shown = names.reasons.has(reason);
            if is_counted(is_shown) {
                let shown = if is_shown { reason } else { OTHER };
                add_to(self.dropped.entry(shown.to_owned()).or_default(), *count);
            }
        }
        self.pick_us.add(&other.pick_us);
        add_to(&mut self.prefix_evictions, other.prefix_evictions);
        add_to(&mut self.placements_dropped, other.placements_dropped);
    }

    /// Returns the counts of a model. If there is no room for another name, returns the counts of
    /// all other models.
    pub(super) fn model_mut(
        &mut self,
        label: &TotalsLabel,
        listed: bool,
        models_max: usize,
    ) -> &mut ModelTotals {
        let has_room = || {
            let unlisted = || self.models.values().filter(|row| !row.listed).count();
            self.models.len() < models_max && (listed || unlisted() < UNLISTED_MAX)
        };
        let is_own = self.models.contains_key(label) || has_room();
        let label = if is_own {
            label.clone()
        } else {
            TotalsLabel::other()
        };
        let row = self.models.entry(label).or_default();
        row.listed |= listed || !is_own;
        row
    }
}

// === impl TotalsLabel ===

impl TotalsLabel {
    /// Returns the label of models that have no label of their own.
    pub(super) fn other() -> Self {
        Self {
            model: OTHER.to_owned(),
            target: OTHER.to_owned(),
            priority: 0,
        }
    }
}

// === impl BandTotals ===

impl BandTotals {
    fn add(&mut self, other: &Self, fresh: bool) {
        if fresh {
            add_to(&mut self.held, other.held);
            add_to(&mut self.bytes, other.bytes);
            if other.oldest_ms > self.oldest_ms {
                self.oldest_ms = other.oldest_ms;
                self.full_at = other.full_at;
            }
        }
        other
            .outcomes
            .iter()
            .zip(&mut self.outcomes)
            .for_each(|(count, total)| add_to(total, *count));
        add_to(&mut self.given_up, other.given_up);
        add_to(&mut self.given_up_for, other.given_up_for);
        self.queue_ms.add(&other.queue_ms);
    }
}

// === impl EndpointTotals ===

impl EndpointTotals {
    fn add(&mut self, other: &Self, fresh: bool) {
        let Self {
            picked,
            served,
            failed,
            requests,
            prefill_tokens,
            decode_tokens,
            prompts,
            tracked,
            unread,
        } = other;
        add_to(&mut self.picked, *picked);
        add_to(&mut self.served, *served);
        add_to(&mut self.failed, *failed);
        if fresh {
            add_to(&mut self.requests, *requests);
            add_to(&mut self.prefill_tokens, *prefill_tokens);
            add_to(&mut self.decode_tokens, *decode_tokens);
            add_to(&mut self.prompts, *prompts);
            add_to(&mut self.tracked, *tracked);
            add_to(&mut self.unread, *unread);
        }
    }
}

// === impl ModelTotals ===

impl ModelTotals {
    /// Adds the counts of `other`, and its requests in flight only if `fresh`.
    pub(crate) fn add(&mut self, other: &Self, fresh: bool) {
        add_to(&mut self.requests, other.requests);
        add_counts(
            &mut self.errors,
            other
                .errors
                .iter()
                .map(|(key, count)| (key.clone(), *count)),
        );
        self.duration_ms.add(&other.duration_ms);
        self.ttft_ms.add(&other.ttft_ms);
        self.tpot_ms.add(&other.tpot_ms);
        add_to(&mut self.prompt_tokens, other.prompt_tokens);
        add_to(&mut self.completion_tokens, other.completion_tokens);
        add_to(&mut self.cached_tokens, other.cached_tokens);
        add_to(&mut self.request_bytes, other.request_bytes);
        add_to(&mut self.response_bytes, other.response_bytes);
        self.missed_tokens
            .iter_mut()
            .zip(other.missed_tokens)
            .for_each(|(total, count)| add_to(total, count));
        self.slo
            .iter_mut()
            .zip(other.slo)
            .for_each(|(total, count)| add_to(total, count));
        if fresh {
            add_to(&mut self.running, other.running);
        }
    }
}

// === impl TotalsHistogram ===

impl TotalsHistogram {
    /// Returns the number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Counts `value` in the bucket of the first bound that is not below `value`.
    pub fn record(&mut self, value: f64) {
        if let Some(count) = self
            .counts
            .get_mut(HISTOGRAM_BOUNDS.partition_point(|bound| *bound < value))
        {
            *count += 1;
        }
        self.sum += value;
    }

    fn add(&mut self, other: &Self) {
        self.counts
            .iter_mut()
            .zip(other.counts)
            .for_each(|(bucket, count)| add_to(bucket, count));
        self.sum += other.sum;
    }
}

fn add_to(total: &mut u64, count: u64) {
    *total = total.saturating_add(count);
}

pub(super) fn add_counts(
    totals: &mut BTreeMap<String, u64>,
    counts: impl IntoIterator<Item = (String, u64)>,
) {
    for (key, count) in counts {
        let room = totals.len() < KEYS_MAX || totals.contains_key(&key);
        add_to(
            totals
                .entry(if room { key } else { OTHER.to_owned() })
                .or_default(),
            count,
        );
    }
}
