//! Decodes the daemon's messages and applies them to a pool, for all hosts.
//!
//! ```text
//!  message ── DaemonUpdate::decode ──► update ── AppliedVersions::apply ──► pool, Applied
//!                     └─► RejectedMessage ──► log line, refusal
//! ```
//! A message is applied as a whole or not at all. A host decides when to decode, and where updates
//! come from. The host also sends the acknowledgement, and turns an outcome into log lines and
//! statistics. The load of other proxies goes to [`crate::peers`].

use std::ops::Deref;

use proto::InvalidState;
use proto::state::{self, daemon_message};
use scheduler::{Snapshot, Timestamp, Version};

use crate::pool::ManagedPool;

/// A decoded message from the daemon.
#[derive(Debug)]
pub enum DaemonUpdate {
    /// The daemon's greeting.
    Welcome(state::Welcome),
    /// A complete pool, except its metrics.
    PoolUpdate(Box<proto::PoolUpdate>),
    /// New metrics for a pool that has a snapshot.
    Metrics {
        pool: String,
        /// The current snapshot with the new metrics.
        snapshot: Box<Snapshot>,
        /// A number that grows with every message of one leader term.
        sequence: u64,
    },
    /// The load and placements of the other proxies of a pool.
    Peers(state::PeerLoad),
    /// The learned models of a pool.
    Learned(Box<proto::LearnedModels>),
    /// Learned models for the pool with this name, which keeps its own models, because they are
    /// better. The daemon should get the pool's models instead.
    Outweighed(String),
    /// Nothing to apply: this host has no pool update of the pool yet, or a newer daemon sent an
    /// unknown kind of message.
    Nothing,
}

/// A message that was refused as a whole. The daemon is at fault, and the same message will be
/// refused again.
#[derive(Clone, Debug, PartialEq)]
pub struct RejectedMessage {
    /// The name of the message's pool; empty when the name cannot be read.
    pub pool: String,
    /// The version of the message, if it is a pool update.
    pub version: Option<state::Version>,
    /// The reason of the refusal.
    pub why: String,
}

/// The versions of the daemon's messages that are in force in a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct AppliedVersions {
    pool_update: Version,
    metrics_sequence: u64,
    metrics_at: Option<Timestamp>,
    models: Version,
}

/// The part of a pool that an update changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// The endpoints, the pipeline and the objects. [`ManagedPool::recount_load_reports`] must
    /// follow.
    PoolUpdate,
    Metrics,
    Models,
    Nothing,
}

// === impl DaemonUpdate ===

impl DaemonUpdate {
    /// Decodes a message; `find` returns the current state of a pool by name.
    ///
    /// # Errors
    /// Returns [`RejectedMessage`] if no part of the message may be used.
    pub fn decode<R>(
        message: state::DaemonMessage,
        find: impl FnOnce(&str) -> Option<R>,
    ) -> Result<Self, RejectedMessage>
    where
        R: Deref,
        R::Target: AsRef<ManagedPool>,
    {
        use daemon_message::Message::{LearnedModels, Metrics, PeerLoad, PoolUpdate, Welcome};
        match message.message {
            Some(Welcome(welcome)) => Ok(Self::Welcome(welcome)),
            Some(PeerLoad(peers)) => Ok(Self::Peers(peers)),
            Some(LearnedModels(learned)) => {
                let rejected = RejectedMessage::for_pool(&learned.pool, None);
                let learned = proto::learned(learned).map_err(rejected)?;
                if find(&learned.pool).is_some_and(|found| found.as_ref().keeps_models(&learned)) {
                    return Ok(Self::Outweighed(learned.pool));
                }
                Ok(Self::Learned(Box::new(learned)))
            }
            Some(PoolUpdate(pool_update)) => {
                let rejected = RejectedMessage::for_pool(&pool_update.pool, pool_update.version);
                proto::pool_update(pool_update)
                    .map(|pool_update| Self::PoolUpdate(Box::new(pool_update)))
                    .map_err(rejected)
            }
            Some(Metrics(metrics)) => {
                let Some(found) = find(&metrics.pool) else {
                    return Ok(Self::Nothing);
                };
                let Some(snapshot) = found.as_ref().snapshot() else {
                    return Ok(Self::Nothing);
                };
                match proto::metrics(&metrics, snapshot) {
                    Ok(snapshot) => Ok(Self::Metrics {
                        pool: metrics.pool,
                        snapshot: Box::new(snapshot),
                        sequence: metrics.sequence,
                    }),
                    // The metrics belong to a pool update that was refused or has not arrived.
                    Err(InvalidState::OtherPoolUpdate) => Ok(Self::Nothing),
                    Err(why) => Err(RejectedMessage::for_pool(&metrics.pool, None)(why)),
                }
            }
            None => Ok(Self::Nothing),
        }
    }

    /// Decodes the bytes of a message, like [`Self::decode`].
    ///
    /// # Errors
    /// Returns [`RejectedMessage`] if no part of the message may be used.
    pub fn decode_bytes<R>(
        message: &[u8],
        find: impl FnOnce(&str) -> Option<R>,
    ) -> Result<Self, RejectedMessage>
    where
        R: Deref,
        R::Target: AsRef<ManagedPool>,
    {
        Self::decode(
            proto::daemon_message(message).map_err(RejectedMessage::for_pool("", None))?,
            find,
        )
    }

    /// Refuses a version that is far in the future, by the clock of this host.
    ///
    /// # Errors
    /// Returns [`RejectedMessage`] for such a version. Then no part of the message may be used.
    pub fn check_term(self, unix_ms: u64) -> Result<Self, RejectedMessage> {
        let (pool, version, is_acked) = match &self {
            Self::PoolUpdate(update) => (&update.pool, update.snapshot.version(), true),
            Self::Learned(learned) => (&learned.pool, learned.version, false),
            _ => return Ok(self),
        };
        if proto::terms::is_credible(version.term, unix_ms) {
            return Ok(self);
        }
        Err(RejectedMessage {
            pool: pool.clone(),
            version: is_acked.then(|| wire_version(version)),
            why: format!(
                "term {} is more than a day ahead of this proxy's clock",
                version.term
            ),
        })
    }

    /// The pool that the update changes; `None` when it changes none.
    #[must_use]
    pub fn pool(&self) -> Option<&str> {
        match self {
            Self::PoolUpdate(pool_update) => Some(&pool_update.pool),
            Self::Metrics { pool, .. } => Some(pool),
            Self::Peers(peers) => Some(&peers.pool),
            Self::Learned(learned) => Some(&learned.pool),
            Self::Welcome(_) | Self::Outweighed(_) | Self::Nothing => None,
        }
    }

    /// The acknowledgement of the update; `None` for a message that is not acknowledged.
    #[must_use]
    pub fn ack(&self) -> Option<state::Ack> {
        let Self::PoolUpdate(pool_update) = self else {
            return None;
        };
        let version = Some(wire_version(pool_update.snapshot.version()));
        Some(state::Ack {
            pool: pool_update.pool.clone(),
            version,
            ..state::Ack::default()
        })
    }

    /// Refuses a pool update that was decoded; `None` for a message that is not acknowledged.
    #[must_use]
    pub fn refuse(&self, why: &str) -> Option<RejectedMessage> {
        self.ack().map(|ack| RejectedMessage {
            pool: ack.pool,
            version: ack.version,
            why: why.to_owned(),
        })
    }
}

// === impl RejectedMessage ===

impl RejectedMessage {
    fn for_pool(
        pool: &str,
        version: Option<state::Version>,
    ) -> impl FnOnce(InvalidState) -> Self + use<> {
        let pool = pool.to_owned();
        move |why| Self {
            pool,
            version,
            why: why.to_string(),
        }
    }

    /// Whether an operator must act, because a wrong pool update stays wrong. Metrics arrive many
    /// times a second, and the next ones may be good.
    #[must_use]
    pub fn needs_operator(&self) -> bool {
        self.version.is_some() || self.pool.is_empty()
    }

    /// The refusal for the daemon; `None` for a message that is not acknowledged.
    #[must_use]
    pub fn ack(self) -> Option<state::Ack> {
        let Self { pool, version, why } = self;
        version.is_some().then_some(state::Ack {
            pool,
            version,
            refused: why,
            held: None,
        })
    }
}

// === impl AppliedVersions ===

impl AppliedVersions {
    /// The version of the pool update in force.
    #[must_use]
    pub fn pool_update(&self) -> Version {
        self.pool_update
    }

    /// The sequence of the metrics in force; 0 if none arrived since the last pool update.
    #[must_use]
    pub fn metrics_sequence(&self) -> u64 {
        self.metrics_sequence
    }

    /// The time when the current metrics were received. `None` before the first metrics.
    #[must_use]
    pub fn metrics_at(&self) -> Option<Timestamp> {
        self.metrics_at
    }

    /// The version of the learned models in force.
    #[must_use]
    pub fn models(&self) -> Version {
        self.models
    }

    /// Applies an update that was received at `received` to its pool. Endpoints that stay keep
    /// their metrics until the next ones arrive.
    pub fn apply(
        &mut self,
        pool: &mut ManagedPool,
        update: DaemonUpdate,
        received: Timestamp,
    ) -> Applied {
        match update {
            DaemonUpdate::PoolUpdate(pool_update) => {
                let proto::PoolUpdate {
                    snapshot,
                    hash_secret,
                    staleness_max_ms,
                    ..
                } = *pool_update;
                self.pool_update = snapshot.version();
                self.metrics_sequence = 0;
                pool.install(snapshot, hash_secret, staleness_max_ms);
                Applied::PoolUpdate
            }
            DaemonUpdate::Metrics {
                snapshot, sequence, ..
            } => {
                self.metrics_sequence = sequence;
                self.metrics_at = Some(received);
                pool.refresh(*snapshot, received);
                Applied::Metrics
            }
            DaemonUpdate::Learned(learned) => {
                self.models = learned.version;
                pool.install_learned(*learned);
                Applied::Models
            }
            DaemonUpdate::Welcome(_)
            | DaemonUpdate::Peers(_)
            | DaemonUpdate::Outweighed(_)
            | DaemonUpdate::Nothing => Applied::Nothing,
        }
    }
}

/// Converts a version to the type in messages.
#[must_use]
pub fn wire_version(version: Version) -> state::Version {
    state::Version {
        term: version.term,
        sequence: version.sequence,
    }
}

#[cfg(test)]
mod tests {
    use proto::{PoolState, encode_metrics, encode_pool_update};
    use scheduler::latency::step::StepModel;
    use scheduler::latency::{Conditions, LatencyModel};
    use scheduler::objects::ObjectsSpec;
    use scheduler::{
        Endpoint, EndpointMetrics, EndpointRef, Generation, PipelineSpec, ProfileSpec, Readiness,
        Slot,
    };

    use super::*;

    fn pool_update(sequence: u64, addresses: &[&str]) -> state::DaemonMessage {
        let endpoint = |(slot, address): (u16, &&str)| Endpoint {
            id: EndpointRef {
                slot: Slot(slot),
                generation: Generation(1),
            },
            name: format!("engine-{slot}").into(),
            address: (*address).into(),
            readiness: Readiness::Ready,
            labels: Box::default(),
            models: std::sync::Arc::default(),
            age_ms: 0,
        };
        let endpoints: Vec<Endpoint> = (0_u16..).zip(addresses).map(endpoint).collect();
        let pipeline = PipelineSpec {
            profiles: vec![ProfileSpec {
                name: "default".to_owned(),
                plugins: Vec::new(),
            }],
            ranked_max: 1,
            ..PipelineSpec::default()
        };
        let update = encode_pool_update(PoolState {
            pool: "p",
            version: Version { term: 1, sequence },
            endpoints: &endpoints,
            pipeline: &pipeline,
            objects: &ObjectsSpec::default(),
            hash_secret: 5,
            staleness_max_ms: 1_000,
        });
        message(daemon_message::Message::PoolUpdate(update))
    }

    fn metrics(sequence: u64, queue: f32) -> state::DaemonMessage {
        let row = EndpointMetrics {
            queue_depth: Some(queue),
            ..EndpointMetrics::default()
        };
        message(daemon_message::Message::Metrics(encode_metrics(
            "p",
            Version {
                term: 1,
                sequence: 1,
            },
            sequence,
            &[row],
        )))
    }

    fn message(message: daemon_message::Message) -> state::DaemonMessage {
        state::DaemonMessage {
            message: Some(message),
        }
    }

    /// A host with nothing but a pool.
    struct BarePool(ManagedPool);

    impl AsRef<ManagedPool> for BarePool {
        fn as_ref(&self) -> &ManagedPool {
            &self.0
        }
    }

    #[test]
    fn messages_apply_in_order_and_metrics_only_to_their_pool_update() {
        let mut pool = BarePool(ManagedPool::new(1, 0));
        let mut applied = AppliedVersions::default();
        let now = Timestamp(7);
        assert!(
            matches!(
                DaemonUpdate::decode(metrics(2, 3.0), |_| Some(&pool)),
                Ok(DaemonUpdate::Nothing)
            ),
            "no pool update yet"
        );
        let update =
            DaemonUpdate::decode(pool_update(1, &["10.0.0.1:1"]), |_| Some(&pool)).unwrap();
        let ack = update.ack().unwrap();
        assert_eq!(
            (
                update.pool(),
                ack.pool.as_str(),
                ack.version.map(|v| v.sequence)
            ),
            (Some("p"), "p", Some(1))
        );
        assert_eq!(applied.apply(&mut pool.0, update, now), Applied::PoolUpdate);
        assert_eq!(
            (applied.pool_update().sequence, applied.metrics_at()),
            (1, None)
        );
        let update = DaemonUpdate::decode(metrics(2, 3.0), |_| Some(&pool)).unwrap();
        assert_eq!(update.ack(), None);
        assert_eq!(applied.apply(&mut pool.0, update, now), Applied::Metrics);
        assert_eq!(
            (applied.metrics_sequence(), applied.metrics_at()),
            (2, Some(now))
        );
        assert_eq!(
            pool.0.snapshot().unwrap().metrics()[0].queue_depth,
            Some(3.0)
        );
        let update =
            DaemonUpdate::decode(pool_update(2, &["10.0.0.1:1"]), |_| Some(&pool)).unwrap();
        assert_eq!(applied.apply(&mut pool.0, update, now), Applied::PoolUpdate);
        assert_eq!(applied.metrics_sequence(), 0);
        assert!(
            matches!(
                DaemonUpdate::decode(metrics(3, 4.0), |_| Some(&pool)),
                Ok(DaemonUpdate::Nothing)
            ),
            "of another pool update"
        );
    }

    /// Models that predict this latency in ms for every request; without one, no latency model.
    fn learned(sequence: u64, latency_ms: Option<f32>, provisional: bool) -> state::DaemonMessage {
        let step = StepModel::from_parts(
            [latency_ms.unwrap_or(10.0), 0.1, 0.0],
            [9.0, 0.1, 0.0],
            100.0,
        );
        let latency = latency_ms.map(|ms| LatencyModel::constant(ms, 5.0));
        let learned = proto::LearnedModels {
            pool: "p".to_owned(),
            version: Version { term: 1, sequence },
            step,
            latency,
            provisional,
        };
        message(daemon_message::Message::LearnedModels(
            proto::encode_learned(&learned).unwrap(),
        ))
    }

    /// Applies messages to a pool. Returns the time to the first token that the pool then predicts,
    /// if it predicts, and whether it accepted the last message.
    fn predicted(predicts: bool, messages: Vec<state::DaemonMessage>) -> (Option<f32>, bool) {
        let mut pool = BarePool(ManagedPool::new(1, 0));
        let mut applied = AppliedVersions::default();
        let mut last = Applied::Nothing;
        let daemon_message::Message::PoolUpdate(mut update) =
            pool_update(1, &["10.0.0.1:1"]).message.unwrap()
        else {
            panic!()
        };
        update.pipeline.as_mut().unwrap().latency_prediction = predicts;
        for message in [message(daemon_message::Message::PoolUpdate(update))]
            .into_iter()
            .chain(messages)
        {
            let update = DaemonUpdate::decode(message, |_| Some(&pool)).unwrap();
            last = applied.apply(&mut pool.0, update, Timestamp(7));
        }
        let latency = pool.0.snapshot().unwrap().table().latency();
        let at = EndpointRef {
            slot: Slot(0),
            generation: Generation(1),
        };
        (
            latency.map(|model| {
                model
                    .predict(at, &Conditions::default())
                    .unwrap()
                    .ttft_ms
                    .round()
            }),
            last == Applied::Models,
        )
    }

    #[test]
    fn models_stay_until_others_come_that_lack_nothing_of_what_they_have() {
        let whole = |sequence, ms| learned(sequence, Some(ms), false);
        assert_eq!(predicted(true, vec![whole(2, 50.0)]), (Some(50.0), true));
        assert_eq!(
            predicted(true, vec![whole(2, 50.0), whole(3, 70.0)]),
            (Some(70.0), true)
        );
        for (lacks, said) in [
            ("all", learned(3, None, true)),
            ("requests", learned(3, Some(70.0), true)),
            ("latency", learned(3, None, false)),
        ] {
            assert_eq!(
                predicted(true, vec![whole(2, 50.0), said.clone()]),
                (Some(50.0), false),
                "{lacks}"
            );
            assert_eq!(
                predicted(true, vec![whole(2, 50.0), said, whole(4, 70.0)]),
                (Some(70.0), true),
                "{lacks}"
            );
        }
        // A daemon without latency prediction publishes no latency model, and its models are still
        // complete.
        assert_eq!(
            predicted(false, vec![whole(2, 50.0), learned(3, None, false)]),
            (None, true)
        );
        assert_eq!(
            predicted(false, vec![whole(2, 50.0), learned(3, None, true)]),
            (Some(50.0), false),
            "its steps are kept"
        );
        // Models that are not better are replaced.
        assert_eq!(
            predicted(true, vec![learned(2, None, true), learned(3, None, true)]),
            (None, true)
        );
        assert_eq!(
            predicted(
                true,
                vec![learned(2, None, false), learned(3, Some(70.0), false)]
            ),
            (Some(70.0), true)
        );
        assert_eq!(
            predicted(true, vec![learned(2, Some(50.0), true), whole(3, 70.0)]),
            (Some(70.0), true)
        );
    }

    #[test]
    fn refusals_name_the_pool_update_and_the_reason() {
        let none = |_: &str| None::<&BarePool>;
        let refused = DaemonUpdate::decode(pool_update(2, &["localhost:1"]), none).unwrap_err();
        assert!(
            refused.needs_operator() && refused.why.contains("localhost:1"),
            "{}",
            refused.why
        );
        let ack = refused.ack().unwrap();
        assert_eq!(
            (
                ack.pool.as_str(),
                ack.version.map(|v| v.sequence),
                ack.refused.is_empty()
            ),
            ("p", Some(2), false)
        );
        let unreadable = DaemonUpdate::decode_bytes(b"\xff", none).unwrap_err();
        assert!(unreadable.pool.is_empty() && unreadable.needs_operator());
        assert_eq!(unreadable.ack(), None);
        assert!(
            matches!(
                DaemonUpdate::decode_bytes(b"", none),
                Ok(DaemonUpdate::Nothing)
            ),
            "a message of a newer daemon"
        );
        let update = DaemonUpdate::decode(pool_update(2, &["10.0.0.1:1"]), none).unwrap();
        assert_eq!(
            update
                .refuse("no such pool")
                .and_then(RejectedMessage::ack)
                .map(|ack| ack.refused),
            Some("no such pool".to_owned())
        );
        assert_eq!(DaemonUpdate::Nothing.refuse("no such pool"), None);
    }
}
