//! The learners of all pools: the queues for their observations, and their reports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::state;
use scheduler::EndpointRef;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::state::peer::Origin;

use super::latency::{ObservationCounts, PredictedTarget, PredictionComparison, PredictionScore};

/// The maximum queue length of a pool's learner, in messages. A few hundred proxies do not send
/// more during one training.
pub(super) const MESSAGES_MAX: usize = 1_024;

/// The queue takes this many further messages, but only from origins with fewer than
/// [`FEW_MESSAGES`] messages in the queue, whose owner has fewer than [`FEW_OF_OWNER`]. So an origin
/// or owner that fills the queue takes no room from others.
const RESERVED_MESSAGES: usize = 256;

/// An origin with fewer queued messages than this may use the reserved room. Some proxies send
/// about as many during one training.
const FEW_MESSAGES: usize = 16;

/// The same for all origins of an owner: a quarter of the reserved room.
const FEW_OF_OWNER: usize = RESERVED_MESSAGES / 4;

/// The maximum number of messages with models in a queue, one of each owner. So an owner that sends
/// models without end takes no room from others, and the messages of a pool take 4 MiB at most.
const MODELS_MAX: usize = 8;

/// The learners of all pools: their queues and reports.
#[derive(Debug, Default)]
pub struct LearnerDirectory {
    pools: BTreeMap<Arc<str>, LearnerHandle>,
}

/// One pool's learner: its queue and report.
#[derive(Debug)]
struct LearnerHandle {
    sender: mpsc::Sender<LearnerMessage>,
    shares: Arc<QueueShares>,
    /// Messages dropped because the queue was full.
    overrun: Arc<AtomicU64>,
    /// Whether the learner accepts learned models from proxies.
    wants_models: Arc<AtomicBool>,
    queued_models: Arc<QueuedModels>,
    page: Arc<Mutex<LearnerReport>>,
}

/// A message from a proxy process to a learner.
#[derive(Debug)]
pub enum LearnerMessage {
    /// Observations of finished requests.
    Observations(ObservationReport),
    /// The learned models that the proxy has.
    Models(Origin, Box<state::LearnedModels>),
}

/// Observations of one proxy process.
#[derive(Debug)]
pub struct ObservationReport {
    pub(super) process_id: u64,
    pub(super) origin: Origin,
    pub(super) message: state::Observations,
}

/// The number of messages that each owner and each origin has in a queue.
#[derive(Debug, Default)]
pub(super) struct QueueShares {
    queued: Mutex<[BTreeMap<Origin, usize>; 2]>,
}

/// The owners that have a message with models in a queue.
#[derive(Debug, Default)]
pub(super) struct QueuedModels(Mutex<BTreeSet<Origin>>);

/// The learner's end of the queue, for its task.
#[derive(Debug)]
pub struct LearnerInbox {
    pub(super) inbox: mpsc::Receiver<LearnerMessage>,
    pub(super) shares: Arc<QueueShares>,
    pub(super) overrun: Arc<AtomicU64>,
    pub(super) wants_models: Arc<AtomicBool>,
    pub(super) queued_models: Arc<QueuedModels>,
    pub(super) page: Arc<Mutex<LearnerReport>>,
}

/// The report of a pool's learner, for pages and metrics.
#[derive(Clone, Debug, Default)]
pub struct LearnerReport {
    /// Counts of the observations by result.
    pub counts: ObservationCounts,
    /// Requests without a prediction, by reason.
    pub abstained: BTreeMap<&'static str, u64>,
    /// Scores over all endpoints of the pool, in the order of [`PredictedTarget::ALL`].
    pub pool: [PredictionScore; 2],
    /// Predictions compared with measurements since the start, in the order of
    /// [`PredictedTarget::ALL`].
    pub compared: [PredictionComparison; 2],
    pub endpoints: Vec<(String, [PredictionScore; 2])>,
    pub learned: BTreeMap<EndpointRef, LearnedEndpoint>,
    pub published: u64,
    /// Models too large to publish.
    pub oversized: u64,
    /// Size of the last published message, in bytes.
    pub bytes: usize,
    /// Whether a latency model is in use.
    pub predicts: bool,
    /// Further values for the debug page.
    pub shown: Value,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LearnedEndpoint {
    /// The time of a prefill relative to an average endpoint.
    pub prefill_time: Option<f32>,
    /// The time of a decode step relative to an average endpoint.
    pub decode_time: Option<f32>,
    /// Prompt tokens of finished requests whose usage reports cached tokens.
    pub prompt_tokens: u64,
    /// How many of these tokens the engine had cached.
    pub cached_tokens: u64,
}

// === impl LearnerDirectory ===

impl LearnerDirectory {
    /// Creates a learner for each pool. Returns the inboxes for the learning tasks.
    #[must_use]
    pub fn new(
        pools: impl IntoIterator<Item = Arc<str>>,
    ) -> (Self, BTreeMap<Arc<str>, LearnerInbox>) {
        let mut learners = BTreeMap::new();
        let mut desks = BTreeMap::new();
        for name in pools {
            let (sender, inbox) = mpsc::channel(MESSAGES_MAX + RESERVED_MESSAGES);
            let shares = Arc::<QueueShares>::default();
            let overrun = Arc::<AtomicU64>::default();
            let page = Arc::<Mutex<LearnerReport>>::default();
            let wants_models = Arc::<AtomicBool>::default();
            let queued_models = Arc::<QueuedModels>::default();
            let desk = LearnerInbox {
                inbox,
                shares: Arc::clone(&shares),
                overrun: Arc::clone(&overrun),
                wants_models: Arc::clone(&wants_models),
                queued_models: Arc::clone(&queued_models),
                page: Arc::clone(&page),
            };
            desks.insert(Arc::clone(&name), desk);
            learners.insert(
                name,
                LearnerHandle {
                    sender,
                    shares,
                    overrun,
                    wants_models,
                    queued_models,
                    page,
                },
            );
        }
        (Self { pools: learners }, desks)
    }

    /// Queues the observations of a process. Never waits. If the queue is full, observations are
    /// dropped and counted.
    pub fn enqueue(&self, process_id: u64, origin: &Origin, message: state::Observations) {
        let Some(learner) = self.pools.get(message.pool.as_str()) else {
            return;
        };
        let report = LearnerMessage::Observations(ObservationReport {
            process_id,
            origin: origin.clone(),
            message,
        });
        if !learner.shares.enter(origin) {
            learner.overrun.fetch_add(1, Ordering::Relaxed);
        } else if learner.sender.try_send(report).is_err() {
            learner.shares.leave(origin);
            learner.overrun.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Queues the learned models from a proxy, if the pool's learner wants any. Never waits. If the
    /// queue is full, the learner waits for the models of the next proxy.
    pub fn enqueue_models(&self, origin: &Origin, models: state::LearnedModels) {
        let Some(learner) = self.pools.get(models.pool.as_str()) else {
            return;
        };
        let is_wanted = learner.wants_models.load(Ordering::Relaxed);
        if !is_wanted || !learner.queued_models.enter(origin) {
            return;
        }
        let message = LearnerMessage::Models(origin.clone(), Box::new(models));
        if learner.sender.try_send(message).is_err() {
            learner.queued_models.leave(origin);
        }
    }

    /// Returns the report of a pool's learner, at most a second old.
    #[must_use]
    pub fn report(&self, pool: &str) -> Option<LearnerReport> {
        self.pools.get(pool).map(|learner| {
            learner
                .page
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone()
        })
    }

    /// Returns the reports of all pools as JSON.
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

// === impl QueuedModels ===

impl QueuedModels {
    /// Records that a message of the origin enters the queue. Returns false if the queue has no
    /// room for it.
    fn enter(&self, origin: &Origin) -> bool {
        let mut owners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        owners.len() < MODELS_MAX && owners.insert(origin.owner())
    }

    /// Records that the message of the origin has left the queue.
    pub(super) fn leave(&self, origin: &Origin) {
        let mut owners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        owners.remove(&origin.owner());
    }
}

// === impl QueueShares ===

impl QueueShares {
    fn lock(&self) -> MutexGuard<'_, [BTreeMap<Origin, usize>; 2]> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more message from the origin. Returns false if the queue has no room for it.
    fn enter(&self, origin: &Origin) -> bool {
        let mut queued = self.lock();
        let [of_owners, _] = &*queued;
        let all: usize = of_owners.values().sum();
        let levels = queued.iter().zip(origin.levels());
        let has_few = levels
            .zip([FEW_OF_OWNER, FEW_MESSAGES])
            .all(|((rows, of), few)| rows.get(&of).is_none_or(|count| *count < few));
        let has_room = all < MESSAGES_MAX || has_few;
        if has_room {
            for (rows, of) in queued.iter_mut().zip(origin.levels()) {
                *rows.entry(of).or_default() += 1;
            }
        }
        has_room
    }

    /// Records that a message of the origin has left the queue.
    pub(super) fn leave(&self, origin: &Origin) {
        for (rows, of) in self.lock().iter_mut().zip(origin.levels()) {
            if let Some(count) = rows.get_mut(&of) {
                *count -= 1;
                if *count == 0 {
                    rows.remove(&of);
                }
            }
        }
    }
}

fn scores(of: &[PredictionScore; 2]) -> Value {
    let row = |(target, score): (PredictedTarget, &PredictionScore)| {
        let PredictionScore {
            count,
            recent,
            mape,
            pinball90_ms,
            coverage90,
        } = score;
        let said = if *recent == 0 {
            json!({ "count": count })
        } else {
            json!({ "count": count, "recent": recent, "mape": mape, "pinball90_ms": pinball90_ms, "coverage90": coverage90 })
        };
        (target.name().to_owned(), said)
    };
    PredictedTarget::ALL
        .into_iter()
        .zip(of)
        .map(row)
        .collect::<serde_json::Map<_, _>>()
        .into()
}
