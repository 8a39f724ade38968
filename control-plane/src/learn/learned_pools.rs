//! The learned models of each pool, as state streams and pages read them.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use proto::state;
use scheduler::latency::step::StepModel;
use tokio::sync::watch;

use crate::learn::directory::{LearnerDirectory, LearnerReport};
use crate::state::peer::Origin;

/// The learned models, and their learners.
#[derive(Debug, Default)]
pub struct LearnedPools {
    /// The models of each pool; the learning task of the pool writes them.
    pub models: watch::Sender<BTreeMap<Arc<str>, Arc<state::LearnedModels>>>,
    /// The learners. The directory is set when the learners are started.
    pub learners: OnceLock<LearnerDirectory>,
}

// === impl LearnedPools ===

impl LearnedPools {
    /// Returns the step model of a pool, or the default model until one is learned.
    #[must_use]
    pub fn step_model(&self, pool: &str) -> Arc<StepModel> {
        let words = self
            .models
            .borrow()
            .get(pool)
            .map(|models| StepModel::from_words(&models.step));
        Arc::new(words.and_then(Result::ok).unwrap_or_default())
    }

    /// Returns the report of a pool's learner, or `None` before the learner has started.
    #[must_use]
    pub fn report(&self, pool: &str) -> Option<LearnerReport> {
        self.learners.get()?.report(pool)
    }

    /// Queues the observations of a process. The call never waits.
    pub fn observed(&self, process_id: u64, origin: &Origin, observations: state::Observations) {
        if let Some(learners) = self.learners.get() {
            learners.enqueue(process_id, origin, observations);
        }
    }

    /// Queues the learned models that a proxy has, if the daemon lacks them. The call never waits.
    pub fn claimed(&self, origin: &Origin, models: state::LearnedModels) {
        if let Some(learners) = self.learners.get() {
            learners.enqueue_models(origin, models);
        }
    }
}
