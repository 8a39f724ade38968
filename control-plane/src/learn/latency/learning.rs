//! The learning task of one pool: receives observations, and publishes models once a second.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use pool_state::EncodedObservation;
use proto::LearnedModels;
use scheduler::EndpointRef;
use scheduler::latency::learn::{LatencyLearner, LearnerStatus, ObservationVerdict};
use scheduler::latency::{FEATURES, NoPrediction, SAMPLES_MIN};
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior};

use super::calibration::{PredictedTarget, PredictionScores};
use super::file::{ModelFile, SavedModel};
use super::intake::ObservationIntake;
use crate::learn::directory::{LearnedEndpoint, LearnerInbox, LearnerReport, ObservationReport};
use crate::shutdown::Shutdown;
use crate::state::shared::DaemonState;

/// How often new models are published. A proxy applies a model in well under a millisecond, and a
/// drift should reach proxies within seconds.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);

/// How often changed models are saved.
const KEEP_INTERVAL: Duration = Duration::from_secs(30);

/// The reason for no prediction before there is a latency model.
const TOO_LITTLE: NoPrediction = NoPrediction::TooLittleData;

/// Messages taken at once from the queue.
const BATCH_MAX: usize = 64;

/// The settings of a pool's learner.
#[derive(Debug)]
pub struct LearningSettings {
    /// Name of the pool.
    pub pool: Arc<str>,
    /// Whether latencies are predicted.
    pub predict: bool,
    /// The file of models, if any.
    pub file: Option<Arc<ModelFile>>,
}

/// The learner of one pool. It has many fields because one task owns all state of learning, so that
/// the state can move as a whole to the thread that trains.
#[derive(Debug)]
pub struct LearningTask {
    settings: LearningSettings,
    shared: Arc<DaemonState>,
    desk: LearnerInbox,
    intake: ObservationIntake,
    calibration: PredictionScores,
    learner: LatencyLearner,
    /// The current models.
    model: SavedModel,
    began: Instant,
    kept_at: Instant,
    kept: SavedModel,
    counts: LearningCounts,
    /// Prompt tokens of finished requests by endpoint, and how many of them were cached; only of
    /// requests whose usage says it.
    cached: BTreeMap<EndpointRef, [u64; 2]>,
}

/// The counts of a learner for its report.
#[derive(Debug, Default)]
struct LearningCounts {
    /// Messages that did not fit into the inbox, at the last look.
    overrun: u64,
    /// Requests without a prediction, by reason.
    abstained: BTreeMap<&'static str, u64>,
    /// Models published.
    published: u64,
    /// Models too large to be published.
    oversized: u64,
    /// Size of the last message.
    bytes: usize,
}

// === impl LearningSettings ===

impl LearningSettings {
    /// The models in the file, if any.
    fn saved_model(&self) -> Option<SavedModel> {
        let saved = self.file.as_ref()?.model(&self.pool)?;
        Some(SavedModel { latency: saved.latency.filter(|_| self.predict), step: saved.step })
    }
}

// === impl LearningTask ===

impl LearningTask {
    /// Begins with the models in the file, if any.
    #[must_use]
    pub fn new(settings: LearningSettings, shared: Arc<DaemonState>, desk: LearnerInbox) -> Self {
        let model = settings.saved_model().unwrap_or_default();
        let now = Instant::now();
        Self {
            learner: LatencyLearner::starting_from(&model.step, model.latency.as_ref()),
            kept: model.clone(),
            model,
            settings,
            shared,
            desk,
            intake: ObservationIntake::default(),
            calibration: PredictionScores::default(),
            began: now,
            kept_at: now,
            counts: LearningCounts::default(),
            cached: BTreeMap::new(),
        }
    }

    /// Learns until `shutdown`.
    pub async fn run(mut self, mut shutdown: Shutdown) {
        // Proxies send no observations before they know that a learner exists.
        self.publish();
        self.write_page();
        let mut tick = tokio::time::interval(PUBLISH_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut leadership = self.shared.life.subscribe();
        leadership.mark_changed(); // the daemon may lead already
        let mut led = false;
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                Ok(()) = leadership.changed() => {
                    let leads = leadership.borrow_and_update().leads;
                    match (std::mem::replace(&mut led, leads), leads) {
                        (false, true) => self.begin_leading(),
                        (true, false) => self.save(),
                        _ => {}
                    }
                }
                count = self.desk.inbox.recv_many(&mut batch, BATCH_MAX) => {
                    if count == 0 {
                        return;
                    }
                    for told in batch.drain(..) {
                        self.take(&told);
                    }
                }
                _ = tick.tick() => {
                    let mut this = self;
                    // Training takes long, so it runs on a blocking thread.
                    self = match tokio::task::spawn_blocking(move || { this.tick(); this }).await {
                        Ok(this) => this,
                        Err(error) => {
                            tracing::error!(%error, "a learner failed; its pool keeps the model it has");
                            return shutdown.begun().await;
                        }
                    };
                }
                () = shutdown.begun() => {
                    if led {
                        self.save();
                    }
                    return;
                }
            }
        }
    }

    /// Takes the models of the leader before, unless this daemon has learned its own from the
    /// requests of its gateways.
    fn begin_leading(&mut self) {
        if self.intake.counts.learned > 0 {
            return;
        }
        let Some(model) = self.settings.saved_model().filter(|saved| *saved != self.model) else { return };
        self.learner = LatencyLearner::starting_from(&model.step, model.latency.as_ref());
        (self.kept, self.model) = (model.clone(), model);
        self.publish();
    }

    fn take(&mut self, told: &ObservationReport) {
        let rows = self.intake.take(told.process_id, &told.message);
        let pools = self.shared.pools.borrow().clone();
        let Some(view) = pools.get(&self.settings.pool) else { return };
        for observed in rows {
            let endpoint = observed.observation.endpoint;
            // A pool has at most 1,024 members, sorted by slot.
            let at = view.members.binary_search_by_key(&endpoint.slot, |member| member.id.slot);
            let is_present = at.is_ok_and(|at| view.members.get(at).is_some_and(|member| member.id == endpoint));
            if self.intake.count(&observed, is_present) {
                self.learn(&observed);
            }
        }
    }

    fn learn(&mut self, observed: &EncodedObservation) {
        let observation = &observed.observation;
        if self.learner.observe(observation, observed.predicted.as_ref()) == ObservationVerdict::Refused {
            self.intake.counts.learned -= 1;
            self.intake.counts.refused += 1;
            return;
        }
        self.calibration.record(observed);
        if let (Some(prompt), Some(cached)) = (observed.prompt_tokens, observed.cached_tokens) {
            let [prompts, hits] = self.cached.entry(observation.endpoint).or_default();
            *prompts += u64::from(prompt);
            *hits += u64::from(cached);
        }
        if self.settings.predict && lacks_prediction(observed) {
            let why = match &self.model.latency {
                None => TOO_LITTLE.reason(),
                // The learner now has a model but the pick had no prediction: the request was
                // retried at another endpoint, or its proxy had an older model.
                Some(model) => {
                    model.predict(observation.endpoint, &observation.conditions).err().map_or("at the pick alone", NoPrediction::reason)
                }
            };
            *self.counts.abstained.entry(why).or_default() += 1;
        }
    }

    /// Does the work of every second: train, publish, save, report.
    fn tick(&mut self) {
        let overrun = self.desk.overrun.load(Ordering::Relaxed);
        self.intake.counts.lost += overrun - std::mem::replace(&mut self.counts.overrun, overrun);
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let latency = if self.settings.predict { self.learner.publish(now_ms) } else { None };
        let step = self.learner.step(now_ms);
        let is_new = latency.is_some() || step != self.model.step;
        self.model.step = step;
        self.model.latency = latency.or(self.model.latency.take());
        if is_new {
            self.publish();
        }
        let present: Vec<EndpointRef> = self.members().into_iter().map(|(endpoint, _)| endpoint).collect();
        self.calibration.retain(|endpoint| present.contains(&endpoint));
        self.cached.retain(|endpoint, _| present.contains(endpoint));
        if self.shared.life.leads() && self.kept_at.elapsed() >= KEEP_INTERVAL {
            self.save();
        }
        self.write_page();
    }

    /// Publishes the models to all proxies of the pool.
    fn publish(&mut self) {
        let SavedModel { step, latency } = self.model.clone();
        let learned = LearnedModels { pool: self.settings.pool.to_string(), version: self.shared.next_version(), step, latency };
        let Some(message) = proto::encode_learned(&learned) else {
            self.counts.oversized += 1;
            tracing::error!(pool = &*self.settings.pool, "the learned models are too large for a message; proxies keep their models");
            return;
        };
        self.counts.bytes = prost::Message::encoded_len(&message);
        self.counts.published += 1;
        self.shared.learning.models.send_modify(|learned| {
            learned.insert(Arc::clone(&self.settings.pool), Arc::new(message));
        });
    }

    fn save(&mut self) {
        self.kept_at = Instant::now();
        let Some(file) = self.settings.file.as_ref().filter(|_| self.kept != self.model) else { return };
        match file.save(&self.settings.pool, self.model.clone()) {
            Ok(()) => self.kept = self.model.clone(),
            Err(error) => tracing::error!(pool = &*self.settings.pool, %error, "cannot save the models; trying again later"),
        }
    }

    fn members(&self) -> Vec<(EndpointRef, String)> {
        let pools = self.shared.pools.borrow().clone();
        let members = pools.get(&self.settings.pool).map(|view| Arc::clone(&view.members)).unwrap_or_default();
        members.iter().map(|member| (member.id, member.instance.name.clone())).collect()
    }

    fn write_page(&self) {
        let members = self.members();
        let of = |endpoint| PredictedTarget::ALL.map(|target| self.calibration.of_endpoint(endpoint, target));
        let page = LearnerReport {
            counts: self.intake.counts,
            abstained: self.counts.abstained.clone(),
            pool: PredictedTarget::ALL.map(|target| self.calibration.of_pool(target)),
            compared: self.calibration.comparisons(),
            endpoints: members.iter().map(|(endpoint, name)| (name.clone(), of(*endpoint))).collect(),
            learned: members.iter().map(|(endpoint, _)| (*endpoint, self.learned(*endpoint))).collect(),
            published: self.counts.published,
            oversized: self.counts.oversized,
            bytes: self.counts.bytes,
            predicts: self.model.latency.is_some(),
            shown: self.to_json(&members),
        };
        *self.desk.page.lock().unwrap_or_else(PoisonError::into_inner) = page;
    }

    fn learned(&self, endpoint: EndpointRef) -> LearnedEndpoint {
        let [prompt_tokens, cached_tokens] = self.cached.get(&endpoint).copied().unwrap_or_default();
        let step = &self.model.step;
        let is_known = step.learned_speed(endpoint).is_some() || self.learner.has_compared(endpoint);
        let (prefill_time, decode_time) = is_known.then(|| step.speed(endpoint)).unzip();
        LearnedEndpoint { prefill_time, decode_time, prompt_tokens, cached_tokens }
    }

    /// The models as JSON.
    fn to_json(&self, members: &[(EndpointRef, String)]) -> Value {
        let LearnerStatus { window, adopted, rejected, drifts, .. } = self.learner.standing();
        let step = &self.model.step;
        let speeds = members.iter().map(|(endpoint, name)| {
            let (prefill, decode) = step.speed(*endpoint);
            (name.clone(), json!({ "prefill": prefill, "decode": decode }))
        });
        json!({
            "step": {
                "prefill": step.prefill(),
                "decode": step.decode(),
                "output_tokens": step.output_tokens(),
                "speeds": speeds.collect::<serde_json::Map<_, _>>(),
            },
            "latency": self.latency_json(members),
            "learning": { "window": window, "adopted": adopted, "rejected": rejected, "drifts": drifts },
        })
    }

    fn latency_json(&self, members: &[(EndpointRef, String)]) -> Value {
        if !self.settings.predict {
            return json!({ "abstains": "latency prediction is off (--latency-prediction)" });
        }
        let Some(model) = &self.model.latency else { return json!({ "abstains": TOO_LITTLE.reason() }) };
        let abstains = (model.samples() < SAMPLES_MIN).then(|| TOO_LITTLE.reason());
        let (ttft_trees, tpot_trees) = model.trees();
        let limits = FEATURES.iter().zip(model.limits()).map(|(feature, limit)| (feature.name.to_owned(), json!(limit)));
        // Only endpoints of the current generation: values of another generation do not apply.
        let named = |known: EndpointRef| members.iter().find(|(endpoint, _)| *endpoint == known).map(|(_, name)| name.clone());
        let endpoints = model.endpoints().filter_map(|factor| {
            let name = named(factor.endpoint)?;
            Some((name, json!({ "ttft_factor": factor.ttft, "tpot_factor": factor.tpot })))
        });
        json!({
            "abstains": abstains,
            "samples": model.samples(),
            "trees": { "ttft": ttft_trees, "tpot": tpot_trees },
            "seen_up_to": limits.collect::<serde_json::Map<_, _>>(),
            "endpoints": endpoints.collect::<serde_json::Map<_, _>>(),
        })
    }
}

/// Whether a prediction could have been compared with a measured time, but none was made. What two
/// endpoints worked on has no times of its own.
fn lacks_prediction(observed: &EncodedObservation) -> bool {
    let measured = observed.observation.ttft_ms.or(observed.observation.tpot_ms);
    measured.is_some() && observed.predicted.is_none()
}

#[cfg(test)]
mod tests {
    use scheduler::latency::Prediction;
    use scheduler::latency::learn::Observation;

    use super::super::tests::observed;
    use super::*;

    #[test]
    fn only_a_request_with_a_measured_time_can_lack_a_prediction() {
        let plain = observed(1, 40.0);
        let timed = |ttft_ms, tpot_ms| EncodedObservation { observation: Observation { ttft_ms, tpot_ms, ..plain.observation }, ..plain };
        assert_eq!(
            [timed(Some(40.0), None), timed(None, Some(11.0)), timed(None, None)].map(|row| lacks_prediction(&row)),
            [true, true, false]
        );
        let said = Prediction { ttft_ms: 40.0, ttft_p90_ms: 60.0, tpot_ms: 11.0, tpot_p90_ms: 15.0 };
        assert!(!lacks_prediction(&EncodedObservation { predicted: Some(said), ..plain }));
    }
}
