//! The values that pages show of a learner: its counts, its scores and its models.

use std::sync::PoisonError;

use learning::LearnerStatus;
use scheduler::EndpointRef;
use scheduler::latency::{FEATURES, LatencyModel};
use serde_json::{Map, Value, json};

use super::{LearningTask, TOO_LITTLE};
use crate::learn::directory::{LearnedEndpoint, LearnerReport};
use crate::learn::latency::calibration::PredictedTarget;

// === impl LearningTask ===

impl LearningTask {
    pub(super) fn write_page(&self) {
        let members = self.members();
        let of = |endpoint| {
            PredictedTarget::ALL.map(|target| self.calibration.of_endpoint(endpoint, target))
        };
        let page = LearnerReport {
            counts: self.intake.counts,
            abstained: self.counts.abstained.clone(),
            pool: PredictedTarget::ALL.map(|target| self.calibration.of_pool(target)),
            compared: self.calibration.comparisons(),
            endpoints: members
                .iter()
                .map(|(endpoint, name)| (name.clone(), of(*endpoint)))
                .collect(),
            learned: members
                .iter()
                .map(|(endpoint, _)| (*endpoint, self.learned(*endpoint)))
                .collect(),
            published: self.counts.published,
            oversized: self.counts.oversized,
            bytes: self.counts.bytes,
            predicts: self
                .model
                .latency
                .as_ref()
                .is_some_and(LatencyModel::can_predict),
            shown: self.to_json(&members),
        };
        *self
            .desk
            .page
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = page;
    }

    fn learned(&self, endpoint: EndpointRef) -> LearnedEndpoint {
        let [prompt_tokens, cached_tokens] =
            self.cached.get(&endpoint).copied().unwrap_or_default();
        let step = &self.model.step;
        let is_known =
            step.learned_speed(endpoint).is_some() || self.learner.has_compared(endpoint);
        let (prefill_time, decode_time) = is_known.then(|| step.speed(endpoint)).unzip();
        LearnedEndpoint {
            prefill_time,
            decode_time,
            prompt_tokens,
            cached_tokens,
        }
    }

    /// Returns the models as JSON.
    fn to_json(&self, members: &[(EndpointRef, String)]) -> Value {
        let LearnerStatus {
            window,
            adopted,
            rejected,
            drifts,
            ..
        } = self.learner.standing();
        let step = &self.model.step;
        let speeds = members.iter().map(|(endpoint, name)| {
            let (prefill, decode) = step.speed(*endpoint);
            (
                name.clone(),
                json!({ "prefill": prefill, "decode": decode }),
            )
        });
        json!({
            "step": {
                "prefill": step.prefill(),
                "decode": step.decode(),
                "output_tokens": step.output_tokens(),
                "speeds": speeds.collect::<Map<_, _>>(),
            },
            "latency": self.latency_json(members),
            "provisional": self.origin.provisional,
            "learning": { "window": window, "adopted": adopted, "rejected": rejected, "drifts": drifts },
        })
    }

    fn latency_json(&self, members: &[(EndpointRef, String)]) -> Value {
        if !self.settings.predict {
            return json!({ "abstains": "latency prediction is off (--latency-prediction)" });
        }
        let Some(model) = &self.model.latency else {
            return json!({ "abstains": TOO_LITTLE.reason() });
        };
        let abstains = (!model.can_predict()).then(|| TOO_LITTLE.reason());
        let (ttft_trees, tpot_trees) = model.trees();
        let limits = FEATURES
            .iter()
            .zip(model.limits())
            .map(|(feature, limit)| (feature.name.to_owned(), json!(limit)));
        // Only endpoints of the current generation are shown, because values of another generation
        // do not apply.
        let named = |known: EndpointRef| {
            members
                .iter()
                .find(|(endpoint, _)| *endpoint == known)
                .map(|(_, name)| name.clone())
        };
        let endpoints = model.endpoints().filter_map(|factor| {
            let name = named(factor.endpoint)?;
            Some((
                name,
                json!({ "ttft_factor": factor.ttft, "tpot_factor": factor.tpot }),
            ))
        });
        json!({
            "abstains": abstains,
            "samples": model.samples(),
            "trees": { "ttft": ttft_trees, "tpot": tpot_trees },
            "seen_up_to": limits.collect::<Map<_, _>>(),
            "endpoints": endpoints.collect::<Map<_, _>>(),
        })
    }
}
