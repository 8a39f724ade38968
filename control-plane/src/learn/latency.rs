//! Learns a step model of each pool's engines from finished requests, and measures how good
//! predictions were.
//!
//! ```text
//!  proxies, ext_proc ── observations ──▶ LearningTask, one per pool ── models ──▶ state streams, ext_proc ──▶ every snapshot
//!                                        │  checked, counted                 (their own version: no pool update is sent again)
//!                                        └──▶ calibration ──▶ /metrics, /debug/model        file ◀──▶ the next start
//! ```
//! The step model is always learned, because the default policy picks by it. Latencies are
//! predicted only with `--latency-prediction`. A task owns its learners, so training does not delay
//! the rest of the daemon, and the rest does not delay training. Messages that arrive during a
//! training wait in a bounded queue. When the queue is full, messages are dropped and counted.

use std::sync::Arc;

use crate::daemon::tasks::TaskGroup;
use crate::learn::directory::LearnerDirectory;

mod calibration;
mod file;
mod intake;
mod learning;

pub use calibration::{PredictedTarget, PredictionComparison, PredictionScore, RATIO_BOUNDS};
pub use file::{ModelFile, SavedModel};
pub use intake::{ObservationCounts, ObservationIntake};
pub use learning::{LearningSettings, LearningTables, LearningTask};

/// Starts a learner for each pool. `predict` turns on latency prediction. `file`, if any, has the
/// models of the previous start, and receives the models of this daemon while it leads.
pub fn spawn(
    group: &mut TaskGroup,
    tables: &LearningTables,
    predict: bool,
    file: Option<&Arc<ModelFile>>,
) {
    let (learners, desks) = LearnerDirectory::new(tables.pools.names.iter().map(Arc::clone));
    let _ = tables.learned.learners.set(learners); // a daemon is started once
    for (pool, desk) in desks {
        let learning = LearningTask::new(
            LearningSettings {
                pool,
                predict,
                file: file.cloned(),
            },
            tables.clone(),
            desk,
        );
        let stop = group.shutdown.clone();
        group.spawn("a learner", learning.run(stop));
    }
}

#[cfg(test)]
mod tests {
    use pool_state::EncodedObservation;
    use scheduler::latency::{Conditions, Observation, RequestEnd};
    use scheduler::{EndpointRef, Generation, Slot};

    use std::sync::atomic::Ordering;

    use proto::state;

    use super::*;
    use crate::learn::directory::MESSAGES_MAX;
    use crate::state::peer::Origin;

    pub(super) fn endpoint(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        }
    }

    /// Returns the observation of a successful request without a prediction.
    pub(super) fn observed(slot: u16, ttft_ms: f32) -> EncodedObservation {
        let conditions = Conditions {
            prompt_tokens: 100.0,
            uncached_tokens: 100.0,
            ..Conditions::default()
        };
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
        EncodedObservation {
            observation,
            predicted: None,
            prompt_tokens: None,
            cached_tokens: None,
            estimated: false,
        }
    }

    #[test]
    fn what_finds_the_queue_full_is_lost_and_counted() {
        let (learners, desks) = LearnerDirectory::new([Arc::from("p")]);
        let message = || state::Observations {
            pool: "p".to_owned(),
            ..state::Observations::default()
        };
        let origin = Origin::default();
        (0..MESSAGES_MAX + 5).for_each(|_| learners.enqueue(1, &origin, message()));
        learners.enqueue(
            1,
            &origin,
            state::Observations {
                pool: "another".to_owned(),
                ..message()
            },
        );
        assert_eq!(desks["p"].overrun.load(Ordering::Relaxed), 5);
        // When one origin has filled its part of the queue, another origin still has room.
        let other = Origin {
            certificate: Some("other".into()),
            ..origin
        };
        (0..10).for_each(|_| learners.enqueue(2, &other, message()));
        assert_eq!(desks["p"].overrun.load(Ordering::Relaxed), 5);
    }

    #[test]
    fn pods_with_one_certificate_leave_room_in_the_queue_to_another_owner() {
        let (learners, desks) = LearnerDirectory::new([Arc::from("p")]);
        let enqueue = |certificate: &str, last: u8| {
            let origin = Origin {
                certificate: Some(certificate.into()),
                address: Some([10, 0, 0, last].into()),
            };
            let message = state::Observations {
                pool: "p".to_owned(),
                ..state::Observations::default()
            };
            let lost = || desks["p"].overrun.load(Ordering::Relaxed);
            let before = lost();
            learners.enqueue(u64::from(last), &origin, message);
            lost() == before
        };
        let flood = (0..100_u8).flat_map(|last| [last; 20]);
        let queued = flood.filter(|last| enqueue("pods", *last)).count();
        assert_eq!(queued, MESSAGES_MAX, "the rest is for others");
        let honest = (0..10).filter(|last| enqueue("other", *last)).count();
        assert_eq!(honest, 10);
        // A message that was learned from makes room again.
        let taken = Origin {
            certificate: Some("pods".into()),
            address: Some([10, 0, 0, 1].into()),
        };
        (0..11).for_each(|_| desks["p"].shares.leave(&taken));
        assert!(enqueue("pods", 1) && !enqueue("pods", 1));
    }
}
