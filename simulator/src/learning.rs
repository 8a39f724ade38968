//! The daemon's part in a run: it hears of picks, first tokens and ends, and learns the step model from them with the real learner.

use std::collections::VecDeque;

use scheduler::EndpointRef;
use scheduler::in_flight::Load;
use scheduler::latency::step::{FirstToken, Gap, Learner, StepModel};

#[derive(Debug)]
pub(crate) struct Learning {
    learner: Learner,
    places: Vec<Place>,
}

/// What is known of one endpoint.
#[derive(Clone, Debug, Default)]
struct Place {
    waiting: VecDeque<Waiting>,
    last_first_token: f64,
}

/// A request without a first token.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    request: u32,
    picked: f64,
    uncached: u32,
    prompt: u32,
}

// === impl Learning ===

impl Learning {
    pub(crate) fn new(endpoints: usize) -> Self {
        Self { learner: Learner::default(), places: vec![Place::default(); endpoints] }
    }

    pub(crate) fn picked(&mut self, at: usize, request: u32, now: f64, (uncached, prompt): (u32, u32)) {
        if let Some(place) = self.places.get_mut(at) {
            place.waiting.push_back(Waiting { request, picked: now, uncached, prompt });
        }
    }

    /// A first token is out. It says how long a prefill takes when its request was the one that waited longest.
    pub(crate) fn first_token(&mut self, at: usize, endpoint: Option<EndpointRef>, request: u32, now: f64) {
        let Some(place) = self.places.get_mut(at) else { return };
        let Some(turn) = place.waiting.iter().position(|waiting| waiting.request == request) else { return };
        let Some(waiting) = place.waiting.remove(turn) else { return };
        if turn > 0 {
            return;
        }
        let service_ms = now - waiting.picked.max(place.last_first_token);
        place.last_first_token = now;
        let (uncached_tokens, prompt_tokens) = (waiting.uncached as f32, waiting.prompt as f32);
        if let Some(endpoint) = endpoint {
            self.learner.first_token(endpoint, &FirstToken { uncached_tokens, prompt_tokens, service_ms: service_ms as f32 });
        }
    }

    /// A gap between two tokens of a stream, at an endpoint believed to have this load: of use where no prefill is believed to run.
    pub(crate) fn gap(&mut self, at: usize, endpoint: EndpointRef, load: Load, gap_ms: f64) {
        let waits = self.places.get(at).is_none_or(|place| !place.waiting.is_empty());
        if !waits && load.requests > 0 {
            let sample = Gap { batch: load.requests as f32, context_tokens: load.decode_tokens as f32, gap_ms: gap_ms as f32 };
            self.learner.gap(endpoint, &sample);
        }
    }

    pub(crate) fn output(&mut self, tokens: u32) {
        self.learner.ended(tokens);
    }

    pub(crate) fn publish(&self) -> StepModel {
        self.learner.model()
    }
}
