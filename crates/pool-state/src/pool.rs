//! The state of one pool in one proxy VM, and the operations that change it. The VM is the only
//! writer.
//!
//! The snapshot comes from the daemon. The VM itself writes the ledger, the prefix index and the
//! ejections. The VM writes a pick into the ledger and the index immediately, before the engine
//! confirms anything, so the next pick takes this pick into account.
//!
//! Other workers and proxies pick too. Changes that they should see are counted
//! ([`ManagedPool::changes`]) and published ([`ManagedPool::write_load_report`],
//! [`ManagedPool::take_placements`]). Their own changes arrive by
//! [`ManagedPool::read_load_report`], [`ManagedPool::learn_ejection`] and
//! [`ManagedPool::record_peer_placement`]. The host transports these data.

mod accepted_kinds;
mod adapters;
mod admission;
mod answer_window;
mod cache;
mod cache_places;
mod commit;
mod connection_losses;
mod conversations;
mod counters;
mod crash_correlation;
mod ejection;
mod endpoints;
mod evictions;
mod failure_streak;
mod flow;
mod health;
mod ledger;
mod load_report;
mod lookups;
mod miss_cause;
mod missed;
mod observation;
mod pick;
mod placements;
mod plan;
mod relay_sum;
mod request_timing;
mod shared_streak;
mod sharing;
pub(crate) use sharing::peer_kind;
mod stored_answers;
mod token_rate;
mod unread;
mod verdicts;
mod witnesses;

pub use admission::{Claim, FlowAdmission};
pub use commit::Stale;
pub use counters::CountedRequest;
pub use counters::{
    CountHistogram, DURATION_BOUNDS_MS, EndpointCounters, LabelSource, MODELS_MAX, ModelCounters,
    ModelLabel, PoolCounters, TokenCounters, UNLISTED_NAME_BYTES_MAX,
};
pub use crash_correlation::PromptSuspicion;
pub use ejection::{Ejection, EjectionCause, Ejections};
pub use load_report::{LoadReportSum, OwnLoadReport, PeerLoadReport};
pub use miss_cause::{MISS_CAUSES, MissedTokens};
pub use pick::{LedgerHold, RecordedPick, SessionTokenHeader};
pub use placements::Placement;
pub use plan::{DecideBy, DecisionMaker, Plan, Planner, PoolReader};
pub use proto::placements::PlacementKind;
pub use relay_sum::RelaySum;
pub use request_timing::{RequestEnding, ms_between};
pub use unread::EngineCount;
pub use verdicts::SentRequest;
pub use witnesses::{RequestFailure, Witness};

use std::collections::VecDeque;

use cache::Cache;
use endpoints::Endpoints;
use ledger::Ledger;
use proto::load_report::LoadReportHead;
use proto::observation::EncodedObservation;
use scheduler::in_flight::InFlight;
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use scheduler::objects::{ModelRequest, UnknownModel};
use scheduler::prefix::PrefixIndex;
use scheduler::{EndpointMetrics, EndpointRef, PrefixSettings, Snapshot, TokenSettings};

use crate::queues::FlowQueues;
use crate::refusal::PickRefusal;
use scheduler::Timestamp;

/// The number of buckets of the prefix index that one tick sweeps. The sweep takes about 0.1 ms, so
/// the removal of an endpoint delays no request.
const SWEEP_BUCKETS: usize = 16_384;

/// The interval at which a decision is recorded for the daemon's console. With 256 endpoints, a
/// record takes 50 KB and 0.1 to 0.4 ms, so a worker spends less than a ten-thousandth of its time
/// on records.
const SAMPLE_INTERVAL_MS: u64 = 5_000;

/// One pool in one VM.
#[derive(Debug)]
pub struct ManagedPool {
    endpoints: Endpoints,
    ledger: Ledger,
    cache: Cache,
    planner: Planner,
    sample: DecisionSample,
    queues: FlowQueues,
}

/// A decision record for the daemon's console.
#[derive(Debug, Default)]
struct DecisionSample {
    /// The time from which the next decision may be recorded.
    due: Timestamp,
    record: Option<String>,
}

/// The result of the pool's objects for a request.
#[derive(Debug, Default)]
pub struct PoolResolution {
    /// The model to request from the engine. `None` means the model that the body names.
    pub target_model: Option<Box<str>>,
    /// A higher number is more important. A request below 0 may be shed.
    pub priority: i32,
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Creates a pool without a snapshot. `prefix_entries` is the size of the prefix index, 0 in a
    /// VM that serves no request.
    #[must_use]
    pub fn new(seed: u64, prefix_entries: usize) -> Self {
        Self {
            endpoints: Endpoints::new(seed),
            ledger: Ledger::default(),
            cache: Cache::new(prefix_entries),
            planner: Planner::new(seed),
            queues: FlowQueues::default(),
            sample: DecisionSample::default(),
        }
    }

    /// Installs a snapshot from the daemon in place of the present one. Endpoints that stay keep
    /// their metrics until newer metrics arrive. The data of endpoints that have left, or have a
    /// new generation, is removed immediately.
    pub fn install(&mut self, snapshot: Snapshot, hash_secret: u128, staleness_max_ms: u32) {
        let refs: Vec<EndpointRef> = snapshot.endpoints().iter().map(|e| e.id).collect();
        for removed in self.endpoints.refs().iter().filter(|id| !refs.contains(id)) {
            self.cache.forget(*removed);
            self.ledger.counters.forget(*removed);
        }
        self.ledger.counters.keep_endpoints(&refs);
        self.cache.remap(self.endpoints.refs(), &refs);
        let measured = self
            .endpoints
            .install(snapshot, refs, hash_secret, staleness_max_ms);
        if let Some((at, measured)) = measured {
            self.refresh(measured, at);
        }
        self.queues.room_changed();
        self.queues.check_all();
    }

    /// Installs the latency models that the daemon learned. From now on requests are observed.
    pub fn install_models(&mut self, step: StepModel, latency: Option<LatencyModel>) {
        self.endpoints.put_models(step, latency, false);
    }

    /// Like [`Self::install_models`], with the models of a message.
    pub fn install_learned(&mut self, learned: proto::LearnedModels) {
        self.endpoints
            .put_models(learned.step, learned.latency, learned.provisional);
    }

    /// Whether the pool keeps its models, because `learned` lacks something that they have. A
    /// daemon that has just started knows less than its proxies.
    #[must_use]
    pub fn keeps_models(&self, learned: &proto::LearnedModels) -> bool {
        let Some(held) = &self.endpoints.models else {
            return false;
        };
        let predicts = self
            .snapshot()
            .is_some_and(|snapshot| snapshot.pipeline().predicts());
        let ends_prediction = predicts && learned.latency.is_none() && held.latency.is_some();
        ends_prediction || learned.provisional && !held.provisional
    }

    /// The observations made since the last call, and the number of the first one. Numbers start at
    /// 0.
    pub fn take_observations(&mut self) -> (u64, VecDeque<EncodedObservation>) {
        self.ledger.observations.take()
    }

    /// Installs newer metrics: `snapshot` is [`Self::snapshot`] with the metrics of the time `at`.
    pub fn refresh(&mut self, snapshot: Snapshot, at: Timestamp) {
        if self.endpoints.refresh(snapshot, at) {
            self.judge_claims(at);
            if let Some(state) = &self.endpoints.state {
                let metrics = state.snapshot.metrics();
                self.ledger.in_flight.scraped(&state.refs, metrics);
            }
            self.queues.room_changed();
            self.cache.set_sizes(&self.endpoints);
        }
    }

    /// Creates the prefix index if the pool has none. Hosts call this function at a tick, or at the
    /// first request if the request comes sooner.
    pub fn reserve_prefixes(&mut self, entries: usize) {
        if self.cache.reserve(entries) {
            self.cache.set_sizes(&self.endpoints);
        }
    }

    /// The current snapshot; `None` before the first one.
    #[must_use]
    pub fn snapshot(&self) -> Option<&Snapshot> {
        self.endpoints.state.as_ref().map(|s| &s.snapshot)
    }

    #[must_use]
    pub fn counters(&self) -> &PoolCounters {
        &self.ledger.counters
    }

    /// The ledger.
    #[must_use]
    pub fn in_flight(&self) -> &InFlight {
        &self.ledger.in_flight
    }

    #[must_use]
    pub fn prefixes(&self) -> &PrefixIndex {
        &self.cache.prefixes
    }

    /// Does a bounded slice of housekeeping. Hosts call it at every tick, never in a request.
    pub fn tick(&mut self, now: Timestamp) {
        self.cache.sweep(SWEEP_BUCKETS, now);
        let failures = &mut self.endpoints.failures;
        let is_quiet = |endpoint| failures.health.is_quiet(endpoint, now);
        failures.ejections.tidy(is_quiet, now);
        self.tick_queues(now);
    }

    /// The known failures of endpoints.
    #[must_use]
    pub fn ejections(&self) -> &[Ejection] {
        self.endpoints.failures.ejections.rows()
    }

    /// Returns true for one call in `count` on average, at random. With 0, returns false and draws
    /// no random number.
    pub fn sample_one_in(&mut self, count: u32) -> bool {
        count > 0
            && self
                .planner
                .rng
                .below(usize::try_from(count).unwrap_or(usize::MAX))
                == 0
    }

    /// Whether the next decision is recorded for the daemon's console: at most one in
    /// [`SAMPLE_INTERVAL_MS`].
    pub fn is_sample_due(&mut self, now: Timestamp) -> bool {
        let is_due = now >= self.sample.due;
        if is_due {
            self.sample.due = now.plus_ms(SAMPLE_INTERVAL_MS);
        }
        is_due
    }

    /// Keeps the record of a sampled decision until the next report.
    pub fn keep_sample(&mut self, record: Option<String>) {
        self.sample.record = record;
    }

    /// Takes the last sampled decision; empty if there is none since the last call.
    pub fn take_sample(&mut self) -> String {
        self.sample.record.take().unwrap_or_default()
    }

    /// The counters, for events that only the host sees.
    pub fn counters_mut(&mut self) -> &mut PoolCounters {
        &mut self.ledger.counters
    }

    /// Estimates the tokens of this many bytes of prompt text from the usage that engines reported.
    pub fn text_tokens(&self, bytes: usize) -> u32 {
        self.cache.token_rate.tokens(bytes)
    }

    /// Estimates the tokens of a full block of a prompt, like [`Self::text_tokens`].
    pub fn block_tokens(&self, settings: PrefixSettings) -> u32 {
        self.cache.token_rate.block_tokens(settings.block_tokens)
    }

    /// The settings for prompt blocks and token counting; `None` before the first state.
    pub fn prompt_settings(&self) -> Option<(PrefixSettings, TokenSettings)> {
        let production = self.snapshot()?.pipeline().production();
        Some((production.prefix, production.token))
    }

    /// The secret that keys the hashes of prompts; 0 without state.
    #[must_use]
    pub fn hash_secret(&self) -> u128 {
        self.endpoints.state.as_ref().map_or(0, |s| s.hash_secret)
    }

    /// Finds the model to request from the engine, and the priority of the request.
    pub fn resolve(&mut self, requested: ModelRequest<'_>) -> Result<PoolResolution, PickRefusal> {
        let Some(snapshot) = self.endpoints.state.as_ref().map(|state| &state.snapshot) else {
            return Ok(PoolResolution::default());
        };
        let is_served = |model: &str| snapshot.is_named(model);
        let resolved = snapshot
            .objects()
            .resolve(requested, is_served, &mut self.planner.rng)
            .map_err(|UnknownModel(model)| PickRefusal::UnknownModel(model.into()))?;
        Ok(PoolResolution {
            target_model: resolved.target_model.map(Into::into),
            priority: resolved.priority,
        })
    }

    /// Whether an endpoint serves the model (even if it is not ready or not allowed), or an object
    /// names the model. A request for such a model is valid.
    pub fn knows_model(&self, model: &str) -> bool {
        let Some(snapshot) = self.snapshot() else {
            return false;
        };
        snapshot.objects().names(model)
            || snapshot.serves_anywhere(model)
            || snapshot
                .indices()
                .any(|index| snapshot.serves(index, model))
    }

    /// Counts the success (2xx) of this client's request.
    pub fn count_success(&mut self, counted: &mut CountedRequest, client: u64, now: Timestamp) {
        let Some(model) = counted.unnamed_model() else {
            return self.ledger.counters.renew(counted, now);
        };
        let is_listed = self
            .snapshot()
            .is_some_and(|snapshot| snapshot.lists(model));
        let source = if is_listed {
            LabelSource::Listed
        } else {
            LabelSource::Client {
                client,
                used_at: now,
            }
        };
        self.ledger.counters.count_success(counted, source);
    }

    /// Applies the load that an engine reported with a reply. This load is newer than any scrape.
    pub fn observe(&mut self, endpoint: EndpointRef, update: impl FnOnce(&mut EndpointMetrics)) {
        self.endpoints.observe(endpoint, update);
    }
}
