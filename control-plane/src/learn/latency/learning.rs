//! The learning task of one pool: receives observations, and publishes models once a second.

mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use learning::{LatencyLearner, ObservationVerdict};
use pool_state::EncodedObservation;
use proto::{LearnedModels, state};
use scheduler::EndpointRef;
use scheduler::latency::{NoPrediction, SAMPLES_MIN};
use tokio::time::{Instant, MissedTickBehavior};

use super::calibration::PredictionScores;
use super::file::{ModelFile, SavedModel};
use super::intake::ObservationIntake;
use crate::learn::directory::{LearnerInbox, LearnerMessage, ObservationReport};
use crate::learn::learned_pools::LearnedPools;
use crate::shutdown::Shutdown;
use crate::state::life::DaemonLife;
use crate::state::peer::Origin;
use crate::state::pool_views::PoolTable;

/// The interval at which new models are published. A proxy applies a model in well under a
/// millisecond, and a drift should reach proxies within seconds.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);

/// The interval at which changed models are saved.
const KEEP_INTERVAL: Duration = Duration::from_secs(30);

/// The reason for a missing prediction while there is no latency model.
const TOO_LITTLE: NoPrediction = NoPrediction::TooLittleData;

/// With this many observations of its own, a daemon prefers its own models to those of proxies and
/// to those that the previous leader wrote into the file. A latency model needs as many
/// observations to predict.
const OWN_MIN: u64 = SAMPLES_MIN as u64;

/// The maximum number of origins, and of origins of one owner, whose models are taken until the
/// daemon has [`OWN_MIN`] observations. The models of a few contain what all proxies learned.
const CLAIMS_MAX: usize = 64;
const CLAIMS_PER_OWNER_MAX: usize = CLAIMS_MAX / 4;

/// The maximum number of messages taken from the queue at once.
const BATCH_MAX: usize = 64;

/// The settings of a pool's learner.
#[derive(Debug)]
pub struct LearningSettings {
    pub pool: Arc<str>,
    pub predict: bool,
    pub file: Option<Arc<ModelFile>>,
}

/// The tables that learning reads, and where it publishes models.
#[derive(Clone, Debug)]
pub struct LearningTables {
    pub life: Arc<DaemonLife>,
    pub pools: Arc<PoolTable>,
    pub learned: Arc<LearnedPools>,
}

/// The learner of one pool. The learner has many fields because one task owns all state of
/// learning: the state can then move as a whole to the training thread.
#[derive(Debug)]
pub struct LearningTask {
    settings: LearningSettings,
    tables: LearningTables,
    desk: LearnerInbox,
    intake: ObservationIntake,
    calibration: PredictionScores,
    learner: LatencyLearner,
    model: SavedModel,
    origin: ModelOrigin,
    began: Instant,
    kept: KeptModel,
    counts: LearningCounts,
    /// Prompt tokens of finished requests by endpoint, and how many of them were cached. Includes
    /// only requests whose usage reports cached tokens.
    cached: BTreeMap<EndpointRef, [u64; 2]>,
}

/// The origin of the current models.
#[derive(Debug)]
struct ModelOrigin {
    /// Whether the models are the built-in ones or those of the file, with fewer than [`OWN_MIN`]
    /// own observations. Proxies keep better models than these, and the daemon takes the first
    /// better ones that arrive.
    provisional: bool,
    /// The number of observations learned before the daemon last stopped leading. Another leader
    /// may have learned since then.
    earlier: u64,
    /// The origins whose models were taken since the daemon last began or stopped leading. The
    /// models of an origin are taken only once.
    claimed_by: BTreeSet<Origin>,
    /// Whether models from a proxy were taken and are not published yet.
    is_new: bool,
}

/// The models in the file, and when they were written.
#[derive(Debug)]
struct KeptModel {
    at: Instant,
    model: SavedModel,
}

/// The counts of a learner for its report.
#[derive(Debug, Default)]
struct LearningCounts {
    /// Messages that did not fit into the inbox, at the last check.
    overrun: u64,
    /// Requests without a prediction, by reason.
    abstained: BTreeMap<&'static str, u64>,
    published: u64,
    /// Models too large to be published.
    oversized: u64,
    /// The size of the last message in bytes.
    bytes: usize,
}

// === impl ModelOrigin ===

impl ModelOrigin {
    /// Creates the origin of built-in models, or of models in a file that were learned from
    /// `earlier` observations.
    fn provisional(earlier: u64) -> Self {
        Self {
            provisional: true,
            earlier,
            claimed_by: BTreeSet::new(),
            is_new: false,
        }
    }

    /// Whether the models of `origin` may be taken.
    fn admits(&self, origin: &Origin) -> bool {
        let owner = origin.owner();
        let of_owner = self.claimed_by.iter().filter(|of| of.owner() == owner);
        !self.claimed_by.contains(origin) && of_owner.count() < CLAIMS_PER_OWNER_MAX
    }
}

// === impl LearningSettings ===

impl LearningSettings {
    /// Returns the models in the file, if any.
    fn saved_model(&self) -> Option<SavedModel> {
        let saved = self.file.as_ref()?.model(&self.pool)?;
        Some(SavedModel {
            latency: saved.latency.filter(|_| self.predict),
            step: saved.step,
        })
    }
}

// === impl LearningTask ===

impl LearningTask {
    /// Creates a learner with the models in the file, if any.
    #[must_use]
    pub fn new(settings: LearningSettings, tables: LearningTables, desk: LearnerInbox) -> Self {
        let model = settings.saved_model().unwrap_or_default();
        let now = Instant::now();
        Self {
            learner: LatencyLearner::starting_from(&model.step, model.latency.as_ref()),
            origin: ModelOrigin::provisional(0),
            kept: KeptModel {
                at: now,
                model: model.clone(),
            },
            model,
            settings,
            tables,
            desk,
            intake: ObservationIntake::default(),
            calibration: PredictionScores::default(),
            began: now,
            counts: LearningCounts::default(),
            cached: BTreeMap::new(),
        }
    }

    pub async fn run(mut self, mut shutdown: Shutdown) {
        // Proxies send no observations before they know that a learner exists.
        self.publish();
        self.write_page();
        let mut tick = tokio::time::interval(PUBLISH_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut leadership = self.tables.life.subscribe();
        leadership.mark_changed(); // the daemon may lead already
        let mut led = false;
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                Ok(()) = leadership.changed() => {
                    let leads = leadership.borrow_and_update().leads;
                    match (std::mem::replace(&mut led, leads), leads) {
                        (false, true) => self.begin_leading(),
                        (true, false) => self.end_leading(),
                        _ => {}
                    }
                }
                count = self.desk.inbox.recv_many(&mut batch, BATCH_MAX) => {
                    if count == 0 {
                        return;
                    }
                    for report in batch.drain(..) {
                        match report {
                            LearnerMessage::Observations(report) => self.take(&report),
                            LearnerMessage::Models(origin, models) => {
                                self.take_models(&origin, *models);
                            }
                        }
                    }
                }
                _ = tick.tick() => {
                    let mut this = self;
                    // Training takes long, so it runs on a blocking thread.
                    self = match tokio::task::spawn_blocking(move || { this.tick(); this }).await {
                        Ok(this) => this,
                        Err(error) => {
                            tracing::error!(%error, "the learner of a pool failed; the pool keeps its model");
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

    /// Takes the models of the previous leader from the file, unless this daemon has learned its
    /// own models from the requests of its gateways.
    fn begin_leading(&mut self) {
        if !self.origin.provisional || self.own() >= OWN_MIN {
            return;
        }
        let Some(model) = self
            .settings
            .saved_model()
            .filter(|saved| *saved != self.model)
        else {
            return;
        };
        self.kept.model = model.clone();
        self.origin.claimed_by.clear();
        self.learner = LatencyLearner::starting_from(&model.step, model.latency.as_ref());
        self.model = model;
        self.publish();
    }

    /// Records that another daemon learns from now on, so that daemon's models will be better.
    fn end_leading(&mut self) {
        self.save();
        self.origin = ModelOrigin::provisional(self.intake.counts.learned);
        self.publish();
    }

    /// Returns the number of own observations, without those that another leader has replaced by
    /// better models.
    fn own(&self) -> u64 {
        self.intake
            .counts
            .learned
            .saturating_sub(self.origin.earlier)
    }

    /// Takes the parts of a proxy's models that the daemon's own models lack. The learner continues
    /// from these models with own observations, as after a start from the file. So a lie lasts only
    /// for some tens of requests, and replaces no learned models later. A learner that has samples
    /// loses them, but only to get its first latency model. The next tick publishes the models.
    fn take_models(&mut self, origin: &Origin, models: state::LearnedModels) {
        self.desk.queued_models.leave(origin);
        if self.origin.admits(origin)
            && self.wants_models()
            && let Ok(proto::LearnedModels {
                step,
                latency,
                provisional,
                ..
            }) = proto::learned(models)
            && let latency = latency.filter(|_| self.settings.predict)
            && (self.learner.standing().window == 0
                || (self.model.latency.is_none() && latency.is_some()))
        {
            let own = std::mem::take(&mut self.model);
            let model = if self.origin.provisional {
                SavedModel {
                    step,
                    latency: latency.or(own.latency),
                }
            } else {
                SavedModel {
                    step: own.step,
                    latency: own.latency.or(latency),
                }
            };
            tracing::info!(
                pool = &*self.settings.pool,
                "a proxy has the models of the previous leader; learning continues from them"
            );
            self.origin.provisional &= provisional;
            self.origin.claimed_by.insert(origin.clone());
            self.origin.is_new = true;
            self.learner = self
                .learner
                .going_on_from(&model.step, model.latency.as_ref());
            self.model = model;
        }
        self.report_wanted_models();
    }

    /// Whether the learner wants models from proxies.
    fn wants_models(&self) -> bool {
        let lacks_latency = self.settings.predict && self.model.latency.is_none();
        (self.origin.provisional || lacks_latency)
            && self.own() < OWN_MIN
            && self.origin.claimed_by.len() < CLAIMS_MAX
    }

    /// Reports to the streams of proxies whether the learner wants models.
    fn report_wanted_models(&self) {
        let wants = self.wants_models();
        self.desk.wants_models.store(wants, Ordering::Relaxed);
    }

    fn take(&mut self, report: &ObservationReport) {
        self.desk.shares.leave(&report.origin);
        let witness = self
            .intake
            .witness(report.process_id, &report.origin, Instant::now());
        let rows = self.intake.take(report.process_id, &report.message);
        let pools = self.tables.pools.views.borrow().clone();
        let Some(view) = pools.get(&self.settings.pool) else {
            return;
        };
        for observed in rows {
            let endpoint = observed.observation.endpoint;
            // The members are sorted by slot.
            let at = view
                .members
                .binary_search_by_key(&endpoint.slot, |member| member.id.slot);
            let is_present = at.is_ok_and(|at| {
                view.members
                    .get(at)
                    .is_some_and(|member| member.id == endpoint)
            });
            if self.intake.count(&observed, is_present) {
                self.learn(witness, &observed);
            }
        }
    }

    fn learn(&mut self, witness: u64, observed: &EncodedObservation) {
        let observation = &observed.observation;
        let verdict = self
            .learner
            .observe_of(witness, observation, observed.predicted.as_ref());
        let count = match verdict {
            ObservationVerdict::Refused => Some(&mut self.intake.counts.refused),
            ObservationVerdict::Outvoted => Some(&mut self.intake.counts.outvoted),
            ObservationVerdict::Learned | ObservationVerdict::Censored => None,
        };
        if let Some(count) = count {
            *count += 1;
            self.intake.counts.learned -= 1;
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
                // The learner has a model now, but the pick had no prediction. Either the request
                // was retried at another endpoint, or its proxy had an older model.
                Some(model) => model
                    .predict(observation.endpoint, &observation.conditions)
                    .err()
                    .map_or("at the pick alone", NoPrediction::reason),
            };
            *self.counts.abstained.entry(why).or_default() += 1;
        }
    }

    /// Does the work of every second: trains, publishes, saves and reports.
    fn tick(&mut self) {
        let overrun = self.desk.overrun.load(Ordering::Relaxed);
        self.intake.counts.lost += overrun - std::mem::replace(&mut self.counts.overrun, overrun);
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let latency = if self.settings.predict {
            self.learner.publish(now_ms)
        } else {
            None
        };
        let step = self.learner.step(now_ms);
        let is_settled = self.origin.provisional && self.own() >= OWN_MIN;
        self.origin.provisional &= !is_settled;
        let is_claimed = std::mem::take(&mut self.origin.is_new);
        let is_new = latency.is_some() || step != self.model.step || is_settled || is_claimed;
        self.model.step = step;
        self.model.latency = latency.or(self.model.latency.take());
        if is_new {
            self.publish();
        }
        let present: Vec<EndpointRef> = self
            .members()
            .into_iter()
            .map(|(endpoint, _)| endpoint)
            .collect();
        self.calibration
            .retain(|endpoint| present.contains(&endpoint));
        self.cached.retain(|endpoint, _| present.contains(endpoint));
        if self.tables.life.leads() && self.kept.at.elapsed() >= KEEP_INTERVAL {
            self.save();
        }
        self.write_page();
    }

    /// Publishes the models to all proxies of the pool.
    fn publish(&mut self) {
        self.report_wanted_models();
        let SavedModel { step, latency } = self.model.clone();
        let pool = self.settings.pool.to_string();
        let version = self.tables.life.next_version();
        let provisional = self.origin.provisional;
        let learned = LearnedModels {
            pool,
            version,
            step,
            latency,
            provisional,
        };
        let Some(message) = proto::encode_learned(&learned) else {
            self.counts.oversized += 1;
            tracing::error!(
                pool = &*self.settings.pool,
                "the learned models are too large for a message; proxies keep their models"
            );
            return;
        };
        self.counts.bytes = prost::Message::encoded_len(&message);
        self.counts.published += 1;
        self.tables.learned.models.send_modify(|learned| {
            learned.insert(Arc::clone(&self.settings.pool), Arc::new(message));
        });
    }

    fn save(&mut self) {
        self.kept.at = Instant::now();
        let Some(file) = self
            .settings
            .file
            .as_ref()
            .filter(|_| self.kept.model != self.model)
        else {
            return;
        };
        match file.save(&self.settings.pool, self.model.clone()) {
            Ok(()) => self.kept.model = self.model.clone(),
            Err(error) => {
                tracing::error!(pool = &*self.settings.pool, %error, "cannot save the models; trying again later");
            }
        }
    }

    fn members(&self) -> Vec<(EndpointRef, String)> {
        let pools = self.tables.pools.views.borrow().clone();
        let members = pools
            .get(&self.settings.pool)
            .map(|view| Arc::clone(&view.members))
            .unwrap_or_default();
        members
            .iter()
            .map(|member| (member.id, member.instance.name.clone()))
            .collect()
    }
}

/// Whether there is a measured time but no prediction to compare it with. A request that two
/// endpoints worked on has no times of its own.
fn lacks_prediction(observed: &EncodedObservation) -> bool {
    let measured = observed
        .observation
        .ttft_ms
        .or(observed.observation.tpot_ms);
    measured.is_some() && observed.predicted.is_none()
}

#[cfg(test)]
mod tests {
    use scheduler::Rng;
    use scheduler::latency::step::StepModel;
    use scheduler::latency::{
        Conditions, FirstToken, LatencyModel, Observation, Prediction, TokenGap,
    };

    use super::super::tests::observed;
    use super::*;
    use crate::learn::directory::LearnerDirectory;
    use crate::pool::writer::{Pool, PoolSettings, WallAndMonotonic};

    /// A daemon's learner of the pool `p`, and the messages that proxies send it.
    struct LearnerDrill {
        task: LearningTask,
        proxies: LearnerDirectory,
    }

    impl LearnerDrill {
        fn start(file: Option<&Arc<ModelFile>>) -> Self {
            let (proxies, mut desks) = LearnerDirectory::new([Arc::from("p")]);
            let settings = LearningSettings {
                pool: "p".into(),
                predict: true,
                file: file.cloned(),
            };
            let tables = LearningTables {
                life: Arc::new(DaemonLife::new(7, 1)),
                pools: Arc::new(PoolTable::new(Vec::new())),
                learned: Arc::default(),
            };
            let mut task = LearningTask::new(settings, tables, desks.remove("p").unwrap());
            task.publish();
            Self { task, proxies }
        }

        /// Gives the pool this many endpoints.
        fn pool_of(&mut self, endpoints: u16) -> Vec<EndpointRef> {
            let mut pool = Pool::new(PoolSettings {
                name: "p".into(),
                generation_first: 1,
                ..PoolSettings::default()
            });
            let instances = (1..=endpoints).map(|port| {
                discovery::Instance::new(format!("e{port}"), ([10, 0, 0, 1], port).into())
            });
            let now = WallAndMonotonic {
                instant: Instant::now(),
                wall: std::time::SystemTime::UNIX_EPOCH,
            };
            pool.replace_instances(instances.collect(), now);
            let view = pool.take_view().unwrap();
            let members = view.members.iter().map(|member| member.id).collect();
            self.task.tables.pools.publish(view);
            members
        }

        /// A proxy sends its own learned models. Returns whether the models were wanted.
        fn claims(&mut self, last: u8, models: &SavedModel, provisional: bool) -> bool {
            let SavedModel { step, latency } = models.clone();
            let learned = LearnedModels {
                pool: "p".to_owned(),
                version: scheduler::Version::default(),
                step,
                latency,
                provisional,
            };
            self.proxies
                .enqueue_models(&of(last), proto::encode_learned(&learned).unwrap());
            let Ok(LearnerMessage::Models(origin, models)) = self.task.desk.inbox.try_recv() else {
                return false;
            };
            let published = self.task.counts.published;
            self.task.take_models(&origin, *models);
            assert_eq!(self.task.counts.published, published, "the tick publishes");
            self.task.tick();
            true
        }

        fn learns(&mut self, observations: u64) {
            self.task.intake.counts.learned += observations;
            self.task.tick();
        }

        /// Returns the models that proxies get, and whether they are provisional.
        fn published(&self) -> (SavedModel, bool) {
            let message = (**self.task.tables.learned.models.borrow().get("p").unwrap()).clone();
            let LearnedModels {
                step,
                latency,
                provisional,
                ..
            } = proto::learned(message).unwrap();
            (SavedModel { step, latency }, provisional)
        }
    }

    fn of(last: u8) -> Origin {
        Origin {
            certificate: None,
            address: Some([10, 0, 0, last].into()),
        }
    }

    fn models(ms: f32) -> SavedModel {
        SavedModel {
            step: StepModel::from_parts([ms, 0.1, 0.0], [ms, 0.1, 1e-3], 100.0),
            latency: Some(LatencyModel::constant(ms, ms)),
        }
    }

    fn without_latency(models: &SavedModel) -> SavedModel {
        SavedModel {
            latency: None,
            ..models.clone()
        }
    }

    #[test]
    fn a_new_daemon_goes_on_from_the_first_proxy_that_has_models() {
        let mut daemon = LearnerDrill::start(None);
        assert_eq!(daemon.published(), (SavedModel::default(), true));
        // The few requests of a proxy that has just started weigh less than the models from another
        // proxy.
        daemon.learns(OWN_MIN - 1);
        assert!(daemon.published().1);
        let [first, second] = [20.0, 30.0].map(models);
        assert!(daemon.claims(1, &without_latency(&first), false));
        assert_eq!(daemon.published(), (without_latency(&first), false));
        assert!(daemon.claims(1, &second, false));
        assert_eq!(
            daemon.published().0.latency,
            None,
            "each may claim once, however often it sends"
        );
        assert!(daemon.claims(2, &second, false), "it lacks a latency model");
        assert_eq!(
            daemon.published(),
            (
                SavedModel {
                    latency: second.latency.clone(),
                    ..first.clone()
                },
                false
            )
        );
        assert!(!daemon.claims(3, &second, false));
        daemon.learns(1);
        assert_eq!(daemon.published().0.step, first.step);
    }

    #[test]
    fn pods_with_one_certificate_leave_claims_to_other_owners() {
        let pod = |last| Origin {
            certificate: Some("pods".into()),
            ..of(last)
        };
        let mut origin = ModelOrigin::provisional(0);
        for last in 0..=u8::MAX {
            if origin.admits(&pod(last)) {
                origin.claimed_by.insert(pod(last));
            }
        }
        assert_eq!(origin.claimed_by.len(), CLAIMS_PER_OWNER_MAX);
        assert!(origin.admits(&of(1)) && !origin.admits(&pod(1)));
    }

    #[test]
    fn models_that_a_proxy_sends_without_end_do_not_keep_out_those_of_another() {
        let mut daemon = LearnerDrill::start(None);
        let unreadable = || state::LearnedModels {
            pool: "p".to_owned(),
            ..state::LearnedModels::default()
        };
        (0..9).for_each(|_| daemon.proxies.enqueue_models(&of(1), unreadable()));
        let SavedModel { step, latency } = models(20.0);
        let learned = LearnedModels {
            pool: "p".to_owned(),
            version: scheduler::Version::default(),
            step,
            latency,
            provisional: false,
        };
        let learned = proto::encode_learned(&learned).unwrap();
        daemon.proxies.enqueue_models(&of(2), learned);
        let mut messages = 0;
        while let Ok(LearnerMessage::Models(origin, models)) = daemon.task.desk.inbox.try_recv() {
            daemon.task.take_models(&origin, *models);
            messages += 1;
        }
        daemon.task.tick();
        assert_eq!(messages, 2, "one of each");
        assert_eq!(daemon.published(), (models(20.0), false));
    }

    #[test]
    fn own_observations_count_more_than_the_models_of_a_proxy() {
        let mut daemon = LearnerDrill::start(None);
        daemon.learns(OWN_MIN);
        assert_eq!(
            daemon.published(),
            (SavedModel::default(), false),
            "they are settled, though nothing changed"
        );
        assert!(!daemon.claims(1, &models(20.0), false));
        assert_eq!(daemon.published(), (SavedModel::default(), false));
    }

    #[test]
    fn a_claim_restarts_no_window_and_is_no_prior() {
        let mut daemon = LearnerDrill::start(None);
        let row = observed(1, 40.0);
        daemon.task.learn(1, &row);
        assert_eq!(daemon.task.learner.standing().window, 1);
        // In an earlier version, each of these models emptied the learner's window of observations,
        // and was published.
        for last in 1..=20 {
            assert!(daemon.claims(last, &without_latency(&models(20.0)), false));
        }
        assert_eq!(daemon.task.learner.standing().window, 1);
        assert!(daemon.claims(1, &models(20.0), false));
        assert_eq!(daemon.published().0.latency, models(20.0).latency);
        daemon.task.learner.start_again();
        let step = daemon.task.learner.step(0);
        assert_eq!(step, StepModel::default(), "the prior, not the claim");
    }

    #[test]
    fn own_observations_replace_the_models_that_a_proxy_claimed() {
        let row = observed(1, 20.0);
        let predicted_ms = |daemon: &LearnerDrill| {
            let latency = daemon.published().0.latency.unwrap();
            let Observation {
                endpoint,
                conditions,
                ..
            } = &row.observation;
            latency.predict(*endpoint, conditions).unwrap().ttft_ms
        };
        let mut daemon = LearnerDrill::start(None);
        assert!(daemon.claims(1, &models(200.0), false));
        let claimed_ms = predicted_ms(&daemon);
        assert!((claimed_ms - 200.0).abs() < 1.0, "{claimed_ms} ms");
        for _ in 0..10 {
            for _ in 0..40 {
                daemon.task.intake.counts.learned += 1;
                daemon.task.learn(1, &row);
            }
            // The learner publishes at most twice a second.
            daemon.task.began -= PUBLISH_INTERVAL;
            daemon.task.tick();
        }
        let own_ms = predicted_ms(&daemon);
        assert!((own_ms - 20.0).abs() < 4.0, "{own_ms} ms");
    }

    #[test]
    fn a_leader_reads_the_file_of_the_one_before_unless_a_proxy_has_newer_models() {
        let folder = tempfile::tempdir().unwrap();
        let file = Arc::new(ModelFile::open(folder.path().join("models.json")));
        let [old, newer, claimed] = [10.0, 20.0, 30.0].map(models);
        file.save("p", old.clone()).unwrap();
        let mut daemon = LearnerDrill::start(Some(&file));
        assert_eq!(daemon.published(), (old.clone(), true));
        file.save("p", newer.clone()).unwrap();
        daemon.task.begin_leading();
        assert_eq!(daemon.published(), (newer.clone(), true));
        assert!(
            daemon.claims(1, &old, true),
            "models that another daemon has read from a file"
        );
        assert!(daemon.published().1, "better ones may come");
        assert!(daemon.claims(2, &claimed, false));
        assert_eq!(daemon.published(), (claimed.clone(), false));
        daemon.task.begin_leading();
        assert_eq!(daemon.published(), (claimed, false), "the file is older");
        // Another daemon leads for some time and writes its models.
        daemon.learns(OWN_MIN);
        daemon.task.end_leading();
        assert!(daemon.published().1);
        file.save("p", newer.clone()).unwrap();
        daemon.task.begin_leading();
        assert_eq!(daemon.published(), (newer, true));
    }

    #[test]
    fn models_that_cannot_be_read_are_asked_for_again() {
        let mut daemon = LearnerDrill::start(None);
        let unreadable = state::LearnedModels {
            pool: "p".to_owned(),
            ..state::LearnedModels::default()
        };
        daemon.proxies.enqueue_models(&of(1), unreadable);
        let Ok(LearnerMessage::Models(origin, models)) = daemon.task.desk.inbox.try_recv() else {
            panic!("it was wanted")
        };
        daemon.task.take_models(&origin, *models);
        assert_eq!(daemon.published(), (SavedModel::default(), true));
        assert!(daemon.claims(1, &self::models(20.0), false));
    }

    /// Returns the observations of ten requests at these engines. Each time is the true time
    /// multiplied by `factor` of the engine.
    fn observed_rows(
        engines: &[EndpointRef],
        rng: &mut Rng,
        factor: impl Fn(usize) -> f32,
    ) -> Vec<u8> {
        let truth = StepModel::from_parts([12.0, 0.06, 2e-6], [9.0, 0.08, 1e-4], 150.0);
        let mut rows = Vec::new();
        for _ in 0..10 {
            let engine = rng.below(engines.len());
            let noise = factor(engine) * (0.8 + 0.4 * rng.open01());
            let prompt_tokens = 50.0 + 4_000.0 * rng.open01();
            let uncached_tokens = prompt_tokens * rng.open01();
            let batch = 1.0 + 30.0 * rng.open01();
            let context_tokens = 50_000.0 * rng.open01();
            let plain = observed(0, 1.0);
            let observation = Observation {
                endpoint: engines[engine],
                conditions: Conditions {
                    prompt_tokens,
                    uncached_tokens,
                    ..Conditions::default()
                },
                ttft_ms: None,
                tpot_ms: None,
                first_token: Some(FirstToken {
                    uncached_tokens,
                    prompt_tokens,
                    service_ms: noise * truth.prefill_ms(uncached_tokens, prompt_tokens),
                }),
                gap: Some(TokenGap {
                    batch,
                    context_tokens,
                    gap_ms: noise * truth.decode_ms(batch, context_tokens),
                }),
                ..plain.observation
            };
            let row = EncodedObservation {
                observation,
                ..plain
            };
            rows.extend(row.to_bytes());
        }
        rows
    }

    /// Checks that the task tells the learner who observed. `learning::origins` has the rules.
    #[test]
    fn a_liar_among_four_proxies_teaches_the_published_model_nothing() {
        let mut daemon = LearnerDrill::start(None);
        let engines = daemon.pool_of(4);
        let mut rng = Rng::seeded(7);
        for second in 0..22 {
            for last in 1..=4 {
                let lies = last == 4 && second >= 10;
                let factor = |engine: usize| match (lies, engine) {
                    (false, _) => 1.0,
                    (true, 3) => 0.05,
                    (true, _) => 20.0,
                };
                let message = state::Observations {
                    pool: "p".to_owned(),
                    vm_id: 1,
                    first: 10 * second,
                    rows: observed_rows(&engines, &mut rng, factor),
                };
                daemon.task.take(&ObservationReport {
                    process_id: last.into(),
                    origin: of(last),
                    message,
                });
            }
            // A second passes.
            daemon.task.began -= Duration::from_secs(1);
            daemon.task.tick();
        }
        let model = daemon.published().0.step;
        let speeds = engines.iter().map(|engine| model.speed(*engine));
        let speeds: Vec<f32> = speeds
            .flat_map(|(prefill, decode)| [prefill, decode])
            .collect();
        let slowest = speeds.iter().copied().fold(0.0, f32::max);
        let fastest = speeds.iter().copied().fold(f32::MAX, f32::min);
        assert!(slowest < 1.5 * fastest, "{speeds:?}");
        let counts = daemon.task.intake.counts;
        assert!(counts.outvoted > 30 && counts.learned > 500, "{counts:?}");
    }

    #[test]
    fn only_a_request_with_a_measured_time_can_lack_a_prediction() {
        let plain = observed(1, 40.0);
        let timed = |ttft_ms, tpot_ms| EncodedObservation {
            observation: Observation {
                ttft_ms,
                tpot_ms,
                ..plain.observation
            },
            ..plain
        };
        assert_eq!(
            [
                timed(Some(40.0), None),
                timed(None, Some(11.0)),
                timed(None, None)
            ]
            .map(|row| lacks_prediction(&row)),
            [true, true, false]
        );
        let said = Prediction {
            ttft_ms: 40.0,
            ttft_p90_ms: 60.0,
            tpot_ms: 11.0,
            tpot_p90_ms: 15.0,
        };
        assert!(!lacks_prediction(&EncodedObservation {
            predicted: Some(said),
            ..plain
        }));
    }
}
