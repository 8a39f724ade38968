//! Simulates the daemon's learning: the real learner learns the step model from picks, first tokens
//! and ends of requests.

use std::collections::VecDeque;

use learning::StepLearner;
use scheduler::EndpointRef;
use scheduler::in_flight::EndpointLoad;
use scheduler::latency::step::StepModel;
use scheduler::latency::{FirstToken, TokenGap};

use crate::engine::StepTimeModel;

#[derive(Debug)]
pub(crate) struct SimulatedLearner {
    learner: StepLearner,
    places: Vec<EndpointHistory>,
}

/// The data of one endpoint from which samples for the learner are made.
#[derive(Clone, Debug, Default)]
struct EndpointHistory {
    waiting: VecDeque<WaitingRequest>,
    last_first_token: f64,
}

/// A request that has no first token yet.
#[derive(Clone, Copy, Debug)]
struct WaitingRequest {
    request: u32,
    picked: f64,
    uncached: u32,
    prompt: u32,
}

// === impl SimulatedLearner ===

impl SimulatedLearner {
    pub(crate) fn new(endpoints: usize) -> Self {
        Self {
            learner: StepLearner::default(),
            places: vec![EndpointHistory::default(); endpoints],
        }
    }

    pub(crate) fn picked(&mut self, at: usize, request: u32, now: f64, uncached: u32, prompt: u32) {
        if let Some(place) = self.places.get_mut(at) {
            place.waiting.push_back(WaitingRequest {
                request,
                picked: now,
                uncached,
                prompt,
            });
        }
    }

    /// Records a first token. The time until this token is a sample of a prefill only if the
    /// request is the oldest that waits at the endpoint.
    pub(crate) fn first_token(
        &mut self,
        at: usize,
        endpoint: Option<EndpointRef>,
        request: u32,
        now: f64,
    ) {
        let Some(place) = self.places.get_mut(at) else {
            return;
        };
        let Some(turn) = place
            .waiting
            .iter()
            .position(|waiting| waiting.request == request)
        else {
            return;
        };
        let Some(waiting) = place.waiting.remove(turn) else {
            return;
        };
        if turn > 0 {
            return;
        }
        let queued = place.last_first_token > waiting.picked;
        let service_ms = now - waiting.picked.max(place.last_first_token);
        place.last_first_token = now;
        let uncached_tokens = waiting.uncached as f32;
        let prompt_tokens = waiting.prompt as f32;
        if let Some(endpoint) = endpoint {
            self.learner.first_token(
                endpoint,
                &FirstToken {
                    uncached_tokens,
                    prompt_tokens,
                    service_ms: service_ms as f32,
                },
                queued,
            );
        }
    }

    /// Records a gap between two tokens of a stream. `load` is the endpoint's load as a proxy knows
    /// it. The gap is a sample for the learner only if no request waits for its first token at the
    /// endpoint.
    pub(crate) fn gap(
        &mut self,
        at: usize,
        endpoint: EndpointRef,
        load: EndpointLoad,
        gap_ms: f64,
    ) {
        let waits = self
            .places
            .get(at)
            .is_none_or(|place| !place.waiting.is_empty());
        if !waits && load.requests > 0 {
            let sample = TokenGap {
                batch: load.requests as f32,
                context_tokens: load.decode_tokens as f32,
                gap_ms: gap_ms as f32,
            };
            self.learner.gap(endpoint, &sample);
        }
    }

    pub(crate) fn output(&mut self, endpoint: Option<EndpointRef>, tokens: u32) {
        if let Some(endpoint) = endpoint {
            self.learner.ended(endpoint, tokens);
        }
    }

    /// Returns the model that has been learned by the time `now`, in ms.
    pub(crate) fn publish(&mut self, now: f64) -> StepModel {
        self.learner.advance(now as u64);
        self.learner.model()
    }

    /// Returns a model with the engines' true step times instead of learned step times. Only the
    /// output length is learned.
    pub(crate) fn exact_model(
        &self,
        engines: impl Iterator<Item = (EndpointRef, StepTimeModel)> + Clone,
    ) -> StepModel {
        let slowdowns = || engines.clone().map(|(_, times)| times.slowdown);
        let average = slowdowns().sum::<f64>() / slowdowns().count().max(1) as f64;
        let Some((
            _,
            StepTimeModel {
                prefill: [p0, p1, p2],
                decode: [d0, d1, d2],
                overhead,
                ..
            },
        )) = engines.clone().next()
        else {
            return self.learner.model();
        };
        let [prefill, decode] = [[p0 + overhead, p1, p2], [d0 + overhead, d1, d2]]
            .map(|times| times.map(|ms| (ms * average) as f32));
        engines.fold(
            StepModel::from_parts(prefill, decode, self.learner.model().output_tokens()),
            |model, (endpoint, times)| {
                let speed = (times.slowdown / average) as f32;
                model.with_speed(endpoint, speed, speed)
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::LLAMA_8B_H100;
    use scheduler::{Generation, Slot};

    #[test]
    fn the_exact_model_has_the_step_times_of_each_engine() {
        let refs = [0, 1, 2].map(|slot| EndpointRef {
            slot: Slot(slot),
            generation: Generation(4),
        });
        let times = [1.0, 4.0, 1.0].map(|slowdown| StepTimeModel {
            slowdown,
            ..LLAMA_8B_H100.times
        });
        let model = SimulatedLearner::new(3).exact_model(refs.into_iter().zip(times));
        for (endpoint, times) in refs.into_iter().zip(times) {
            let (prefill, decode) = model.speed(endpoint);
            let expected = f64::from(prefill * model.prefill_ms(1_000.0, 3_000.0));
            let taken = times.prefill_ms(1_000.0, 2_000.0);
            assert!((expected / taken - 1.0).abs() < 1e-4, "{expected} {taken}");
            let expected = f64::from(decode * model.decode_ms(8.0, 9_000.0));
            let taken = times.decode_ms(8.0, 9_000.0);
            assert!((expected / taken - 1.0).abs() < 1e-4, "{expected} {taken}");
        }
        let mean: f64 = refs
            .iter()
            .map(|endpoint| f64::from(model.speed(*endpoint).0))
            .sum::<f64>()
            / 3.0;
        assert!(
            (mean - 1.0).abs() < 1e-6,
            "speeds are against the average engine"
        );
    }
}
