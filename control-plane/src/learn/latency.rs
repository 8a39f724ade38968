//! What is learned of each pool's engines, from what ended requests saw; and how good the predictions made with it were.
//!
//! ```text
//!  proxies, front ── Observations ──▶ Learning, a task for each pool ── Learned ──▶ state streams, front ──▶ every snapshot
//!                                        │  held to the rules, counted              (a version of its own: resends no pool update)
//!                                        └──▶ calibration ──▶ /metrics, /debug/model        file ◀──▶ the next life
//! ```
//! What engines' steps cost is always learned: the default policy picks by it. Latencies are predicted where `--latency-prediction` says so. A task has
//! its learners to itself, so training waits for nobody and nobody for it; what is told while it trains waits in a bounded queue, and what finds
//! that full is lost, and counted.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use proto::state;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::shutdown::Shutdown;
use crate::state::shared::DaemonState;

mod calibration;
mod file;
mod intake;
mod learning;

pub use calibration::{PredictedTarget, PredictionComparison, PredictionScore, RATIO_BOUNDS};
pub use file::{ModelFile, SavedModel};
pub use intake::ObservationCounts;
pub use learning::{LearningSettings, LearningTask};

/// Messages that wait for a pool's learner: those of a few hundred proxies in the time a training takes.
const TOLD_MAX: usize = 1_024;

/// What the learners of all pools are told, and say of themselves.
#[derive(Debug, Default)]
pub struct LearnerDirectory {
    pools: BTreeMap<Arc<str>, LearnerHandle>,
}

/// What a pool's learner is told, and says of itself.
#[derive(Debug)]
struct LearnerHandle {
    sender: mpsc::Sender<ObservationReport>,
    /// Messages that found the queue full.
    overrun: Arc<AtomicU64>,
    page: Arc<Mutex<LearnerReport>>,
}

/// Observations of a process.
#[derive(Debug)]
pub struct ObservationReport {
    process_id: u64,
    message: state::Observations,
}

/// A pool's learner as its task holds it.
#[derive(Debug)]
pub struct LearnerInbox {
    inbox: mpsc::Receiver<ObservationReport>,
    overrun: Arc<AtomicU64>,
    page: Arc<Mutex<LearnerReport>>,
}

/// What a pool's learner says of itself, for people and for metrics.
#[derive(Clone, Debug, Default)]
pub struct LearnerReport {
    /// What became of the observations.
    pub counts: ObservationCounts,
    /// Requests of which nothing was predicted, by reason.
    pub abstained: BTreeMap<&'static str, u64>,
    /// Of all endpoints together.
    pub pool: [PredictionScore; 2],
    /// What was predicted against what came, since the start.
    pub compared: [PredictionComparison; 2],
    /// By name of endpoint.
    pub endpoints: Vec<(String, [PredictionScore; 2])>,
    /// Models published.
    pub published: u64,
    /// Models too large to publish.
    pub oversized: u64,
    /// Bytes of the last message.
    pub bytes: usize,
    /// Is a latency model in force?
    pub predicts: bool,
    /// What people are shown besides.
    pub shown: Value,
}

/// Sets a learner going for each pool; `predict` latencies or not, and keep models in `file`, if any.
pub fn spawn(tasks: &mut JoinSet<&'static str>, shared: &Arc<DaemonState>, (predict, file): (bool, Option<PathBuf>), shutdown: &Shutdown) {
    let (learners, desks) = LearnerDirectory::new(shared.pool_names.iter().map(Arc::clone));
    let _ = shared.learners.set(learners); // a daemon is started once
    let file = file.map(|path| Arc::new(ModelFile::open(path)));
    for (pool, desk) in desks {
        let learning = LearningTask::new(LearningSettings { pool, predict, file: file.clone() }, Arc::clone(shared), desk);
        let shutdown = shutdown.clone();
        tasks.spawn(async move {
            learning.run(shutdown).await;
            "a learner"
        });
    }
}

// === impl LearnerDirectory ===

impl LearnerDirectory {
    /// One for each pool; the desks are their tasks'.
    #[must_use]
    pub fn new(pools: impl IntoIterator<Item = Arc<str>>) -> (Self, BTreeMap<Arc<str>, LearnerInbox>) {
        let (mut learners, mut desks) = (BTreeMap::new(), BTreeMap::new());
        for name in pools {
            let (told, inbox) = mpsc::channel(TOLD_MAX);
            let (overrun, page) = (Arc::<AtomicU64>::default(), Arc::<Mutex<LearnerReport>>::default());
            desks.insert(Arc::clone(&name), LearnerInbox { inbox, overrun: Arc::clone(&overrun), page: Arc::clone(&page) });
            learners.insert(name, LearnerHandle { sender: told, overrun, page });
        }
        (Self { pools: learners }, desks)
    }

    /// A process told what ended requests saw. Never waits.
    pub fn enqueue(&self, process_id: u64, message: state::Observations) {
        let Some(learner) = self.pools.get(message.pool.as_str()) else { return };
        if learner.sender.try_send(ObservationReport { process_id, message }).is_err() {
            learner.overrun.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What a pool's learner says of itself; at most a second old.
    #[must_use]
    pub fn report(&self, pool: &str) -> Option<LearnerReport> {
        self.pools.get(pool).map(|learner| learner.page.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Of all pools, for people.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let rows = self.pools.keys().filter_map(|name| Some((name, self.report(name)?))).map(|(name, page)| {
            let LearnerReport { counts, abstained, pool, endpoints, published, oversized, bytes, predicts, shown, .. } = page;
            let mut row = json!({ "pool": &**name });
            row["observations"] = counts.rows().into_iter().map(|(name, count)| (name.to_owned(), json!(count))).collect();
            row["abstained"] = json!(abstained);
            row["calibration"] = json!({
                "pool": scores(&pool),
                "endpoints": endpoints.iter().map(|(name, of)| (name.clone(), scores(of))).collect::<serde_json::Map<_, _>>(),
            });
            row["published"] = json!({ "count": published, "refused_as_too_large": oversized, "bytes": bytes });
            row["predicts"] = json!(predicts);
            if let Value::Object(shown) = shown {
                shown.into_iter().for_each(|(key, value)| row[key] = value);
            }
            row
        });
        json!({ "pools": rows.collect::<Vec<_>>() })
    }
}

fn scores(of: &[PredictionScore; 2]) -> Value {
    let row = |(target, score): (PredictedTarget, &PredictionScore)| {
        let PredictionScore { count, recent, mape, pinball90_ms, coverage90 } = score;
        let said = if *recent == 0 {
            json!({ "count": count })
        } else {
            json!({ "count": count, "recent": recent, "mape": mape, "pinball90_ms": pinball90_ms, "coverage90": coverage90 })
        };
        (target.name().to_owned(), said)
    };
    PredictedTarget::ALL.into_iter().zip(of).map(row).collect::<serde_json::Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use pool_state::EncodedObservation;
    use scheduler::latency::Conditions;
    use scheduler::latency::learn::{Observation, RequestEnd};
    use scheduler::{EndpointRef, Generation, Slot};

    use super::*;

    pub(super) fn endpoint(slot: u16) -> EndpointRef {
        EndpointRef { slot: Slot(slot), generation: Generation(1) }
    }

    /// A request that ended well, of which nothing was predicted.
    pub(super) fn observed(slot: u16, ttft_ms: f32) -> EncodedObservation {
        let conditions = Conditions { prompt_tokens: 100.0, uncached_tokens: 100.0, ..Conditions::default() };
        let observation = Observation {
            endpoint: endpoint(slot),
            conditions,
            ended: RequestEnd::Done,
            ttft_ms: Some(ttft_ms),
            tpot_ms: Some(11.0),
            output_tokens: Some(20),
            first_token: None,
            gap: None,
        };
        EncodedObservation { observation, predicted: None, prompt_tokens: None, cached_tokens: None, estimated: false }
    }

    #[test]
    fn what_finds_the_queue_full_is_lost_and_counted() {
        let (learners, desks) = LearnerDirectory::new([Arc::from("p")]);
        let message = || state::Observations { pool: "p".to_owned(), ..state::Observations::default() };
        (0..TOLD_MAX + 5).for_each(|_| learners.enqueue(1, message()));
        learners.enqueue(1, state::Observations { pool: "another".to_owned(), ..message() });
        assert_eq!(desks["p"].overrun.load(Ordering::Relaxed), 5);
    }
}
