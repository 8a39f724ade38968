//! Records one decision with all its inputs, so that it can be examined and repeated
//! ([`ParsedRecord::replay`]) later and in another process.
//!
//! A record has the inputs of [`scheduler::schedule`]: the facts of the request, every endpoint
//! with its metrics, load and matched blocks, and the state of the random generator. Because a
//! record is a line in a log, it has no prompt and no hash of a prompt, and only the headers that
//! the operator lists. A record does not have the labels of endpoints or the pipeline: a replay
//! uses the current labels and the current pipeline, or another pipeline.

#[expect(
    clippy::indexing_slicing,
    reason = "a JSON value indexed by a name gives null if it has no such member"
)]
mod replay;

pub use replay::{InvalidRecord, ParsedRecord, RECORD_BYTES_MAX, ReplayedDecision};

use scheduler::in_flight::{EndpointLoad, RunningRequest};
use scheduler::latency::Prediction;
use scheduler::metrics::METRICS;
use scheduler::{
    AdapterRoom, Endpoint, EndpointMetrics, LocalState, Readiness, Request, Rng, Snapshot,
};

use crate::json::write::JsonWriter;
use pool_state::{EndpointCounters, ManagedPool};

/// The maximum number of endpoints in a pool whose decisions are recorded. A record is a line in a
/// log, with some 200 bytes for each endpoint.
pub const RECORDED_ENDPOINTS_MAX: usize = 256;

/// The maximum number of bytes of a model's name in a record. Real names are at most as long as a
/// path, but clients may send any name.
const MODEL_BYTES_MAX: usize = 256;

/// The maximum number of running requests recorded for each endpoint. The requests with the
/// strictest SLOs are recorded, because only these limit other requests.
const RUNNING_MAX: usize = 4;

/// The maximum number of running requests of a pool that [`running`] returns. They take some 10 KB
/// of JSON, once a second.
const RUNNING_SHOWN_MAX: usize = 64;

/// The maximum number of held requests of a pool that [`running`] returns. The function returns the
/// requests that have waited longest.
const QUEUED_SHOWN_MAX: usize = 64;

/// Returns the running requests with an SLO, by endpoint, and those that flow control holds, as
/// JSON for the debug page. The strictest SLO of an endpoint comes first.
#[must_use]
pub fn running(pool: &ManagedPool) -> String {
    let mut w = JsonWriter::default();
    let mut room = RUNNING_SHOWN_MAX;
    w.array(|w| {
        for EndpointCounters { endpoint, .. } in pool.counters().endpoints() {
            let queue = pool.in_flight().running(*endpoint);
            let shown = queue.get(..queue.len().min(room)).unwrap_or_default();
            if shown.is_empty() {
                continue;
            }
            room -= shown.len();
            w.object(|w| {
                w.name("slot").plain(endpoint.slot.0);
                w.name("generation").plain(endpoint.generation.0);
                w.name("running")
                    .array(|w| shown.iter().for_each(|running| running_members(w, running)));
            });
        }
        for (request, reason) in pool.queues().longest_queued(QUEUED_SHOWN_MAX) {
            w.object(|w| {
                w.name("held").string(request);
                w.name("priority").plain(reason.priority);
                w.name("ms").plain(reason.ms);
                w.name("slot")
                    .option(reason.full_at, |w, full| w.plain(full.slot.0));
                w.name("generation")
                    .option(reason.full_at, |w, full| w.plain(full.generation.0));
            });
        }
    });
    w.finish()
}

/// The inputs of a decision, as JSON.
#[derive(Debug)]
pub struct DecisionRecord(String);

// === impl DecisionRecord ===

impl DecisionRecord {
    /// Records the inputs of `schedule` and the request headers that `headers` lists,
    /// comma-separated. `None` if the pool is too large.
    #[must_use]
    pub fn from_decision(
        snapshot: &Snapshot,
        request: &Request<'_>,
        local: LocalState<'_>,
        rng: &Rng,
        headers: &str,
    ) -> Option<Self> {
        if snapshot.endpoints().len() > RECORDED_ENDPOINTS_MAX {
            return None;
        }
        let mut w = JsonWriter::default();
        let version = snapshot.version();
        w.object(|w| {
            w.name("version").array(|w| {
                w.plain(version.term);
                w.plain(version.sequence);
            });
            w.name("rng").plain(rng.state());
            w.name("metrics_stale").plain(local.metrics_stale);
            w.name("out_of_touch").plain(local.peers_unreachable);
            w.name("reuse_interval").float(local.reuse_interval);
            w.name("evicted_share").float(local.evicted_share);
            w.name("request")
                .object(|w| request_members(w, request, headers));
            let prospects = scheduler::predict(snapshot, request, local);
            w.name("endpoints").array(|w| {
                for ((endpoint, metrics), index) in snapshot
                    .endpoints()
                    .iter()
                    .zip(snapshot.metrics())
                    .zip(snapshot.indices())
                {
                    w.object(|w| {
                        endpoint_members(w, endpoint, local.in_flight.load(endpoint.id));
                        w.name("matched_blocks").plain(local.matched_blocks(index));
                        w.name("cold_pick").plain(local.last_cold_pick(index));
                        w.name("last_pick")
                            .plain(local.in_flight.last_pick(endpoint.id));
                        w.name("ejected").plain(local.ejected(index));
                        w.name("last_answer")
                            .plain(local.last_answer(endpoint.id.slot));
                        w.name("failing").float(local.failing(index));
                        w.name("adapter_room");
                        match local.adapter_room(index) {
                            AdapterRoom::Unknown => w.null(),
                            AdapterRoom::Loaded => w.string("loaded"),
                            AdapterRoom::Free => w.string("free"),
                            AdapterRoom::Full { displaced_used } => w.plain(displaced_used),
                        }
                        if let Some(prospect) = prospects.get(index.get()) {
                            let predicted =
                                prospect.as_ref().ok().map(|prospect| &prospect.prediction);
                            w.name("predicted").option(predicted, prediction);
                            let queue = local.in_flight.running(endpoint.id);
                            w.name("running").array(|w| {
                                queue
                                    .iter()
                                    .take(RUNNING_MAX)
                                    .for_each(|running| running_members(w, running));
                            });
                        }
                        metrics_members(w, metrics);
                    });
                }
            });
        });
        Some(Self(w.finish()))
    }

    /// Returns the record with the picked endpoints, as one line.
    #[must_use]
    pub fn to_json<'a>(self, picked: impl IntoIterator<Item = &'a str>) -> String {
        let mut list = JsonWriter::default();
        list.strings(picked);
        let members = self.0.strip_suffix('}').unwrap_or_default();
        [members, ",\"picked\":", &list.finish(), "}"].concat()
    }
}

/// Writes the prediction as `[ttft_ms, tpot_ms, ttft_p90_ms, tpot_p90_ms]`.
fn prediction(w: &mut JsonWriter, prediction: &Prediction) {
    let Prediction {
        ttft_ms,
        tpot_ms,
        ttft_p90_ms,
        tpot_p90_ms,
    } = *prediction;
    w.array(|w| {
        [ttft_ms, tpot_ms, ttft_p90_ms, tpot_p90_ms]
            .into_iter()
            .for_each(|ms| w.float(ms));
    });
}

/// Writes the members of a running request with an SLO.
#[inline(never)] // it is written in two places
fn running_members(w: &mut JsonWriter, running: &RunningRequest) {
    w.object(|w| {
        w.name("id").plain(running.id);
        w.name("request").string(&running.request_id);
        w.name("ttft_slo_us")
            .option(running.slo.ttft_us, |w, us| w.plain(us));
        w.name("tpot_slo_us")
            .option(running.slo.tpot_us, |w, us| w.plain(us));
        w.name("predicted")
            .option(running.predicted.as_ref(), prediction);
        w.name("ttft_ms")
            .option(running.ttft_ms, |w, ms| w.float(ms));
        w.name("tpots_ms")
            .array(|w| running.tpots_ms.iter().for_each(|ms| w.float(*ms)));
    });
}

fn request_members(w: &mut JsonWriter, request: &Request<'_>, headers: &str) {
    let listed = |name: &str| {
        headers
            .split(',')
            .any(|listed| listed.eq_ignore_ascii_case(name))
    };
    w.name("model").string(
        request
            .model
            .get(..request.model.floor_char_boundary(MODEL_BYTES_MAX))
            .unwrap_or_default(),
    );
    w.name("priority").plain(request.priority);
    w.name("prompt_tokens").plain(request.prompt_tokens);
    w.name("blocks").plain(request.blocks());
    w.name("block_tokens").plain(request.prefix_block_tokens);
    w.name("max_tokens")
        .option(request.max_tokens, |w, tokens| w.plain(tokens));
    w.name("media_items").plain(request.media_items);
    w.name("headers").object(|w| {
        for &(name, value) in request.headers.iter().filter(|(name, _)| listed(name)) {
            w.name(name).string(value);
        }
    });
    if request.slo.any() || request.prediction_based {
        w.name("slo_ttft_us")
            .option(request.slo.ttft_us, |w, us| w.plain(us));
        w.name("slo_tpot_us")
            .option(request.slo.tpot_us, |w, us| w.plain(us));
        w.name("prediction_based").plain(request.prediction_based);
    }
    w.name("subset")
        .option(request.subset, |w, subset| w.string(&subset.to_string()));
}

fn endpoint_members(w: &mut JsonWriter, endpoint: &Endpoint, load: EndpointLoad) {
    w.name("endpoint").string(&endpoint.address);
    w.name("name").string(&endpoint.name);
    w.name("slot").plain(endpoint.id.slot.0);
    w.name("generation").plain(endpoint.id.generation.0);
    w.name("ready")
        .plain(endpoint.readiness == Readiness::Ready);
    w.name("age_ms").plain(endpoint.age_ms);
    w.name("requests").plain(load.requests);
    w.name("prefill_tokens").plain(load.prefill_tokens);
    w.name("decode_tokens").plain(load.decode_tokens);
    let prefills = load.prefills;
    for (name, sum) in [
        ("prefill_prompts", u64::from(prefills.prompts)),
        ("prefill_prompt_tokens", prefills.prompt_tokens),
        ("prefill_uncached_tokens", prefills.uncached_tokens),
        ("prefill_attention", prefills.attention),
    ] {
        w.name(name).plain(sum);
    }
    for (name, slo) in [
        ("ttft_slo_us", load.ttft_slo_us),
        ("tpot_slo_us", load.tpot_slo_us),
    ] {
        w.name(name).option(slo, |w, us| w.plain(us));
    }
}

fn metrics_members(w: &mut JsonWriter, metrics: &EndpointMetrics) {
    for metric in METRICS {
        w.name(metric.name)
            .option(finite((metric.get)(metrics)), |w, number| w.float(number));
    }
    if let Some(lora) = &metrics.lora {
        w.name("lora").object(|w| {
            w.name("running")
                .strings(lora.running.iter().map(|name| &**name));
            w.name("waiting")
                .strings(lora.waiting.iter().map(|name| &**name));
            w.name("max").plain(lora.max);
            w.name("base_models")
                .strings(lora.base_models.iter().map(|name| &**name));
        });
    }
    w.name("attributes").object(|w| {
        for (key, number) in &metrics.attributes {
            w.name(key)
                .option(finite(Some(*number)), |w, number| w.float(number));
        }
    });
}

/// Drops infinite numbers, which JSON does not have. Every plugin treats them as unknown.
fn finite(number: Option<f32>) -> Option<f32> {
    number.filter(|number| number.is_finite())
}
