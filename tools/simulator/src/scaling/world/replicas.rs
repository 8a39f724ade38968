//! Orders, starts and removes the replicas of a run.

use scheduler::{Endpoint, EndpointRef, Generation, Readiness, Slot, Version};

use super::{ScalingEvent, ScalingWorld};
use crate::engine::SimulatedEngine;
use crate::hardware::QWEN_32B_H200;
use crate::scaling::limits::{REPLICAS_FIRST, REPLICAS_MAX};
use crate::scaling::traffic::LASTING_S;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplicaState {
    Off,
    Starting,
    Ready,
    /// The replica gets no more requests, and ends with its last request.
    Draining,
}

pub(super) struct Replica<'w> {
    pub(super) engine: SimulatedEngine<'w>,
    pub(super) state: ReplicaState,
    generation: u32,
    /// The time when the autoscaler ordered the replica, in ms.
    pub(super) ordered_at: f64,
    pub(super) steps: u64,
    pub(super) in_flight: usize,
}

/// Returns all replicas as they are at the start of a run: the first few are ready, the others are
/// off.
pub(super) fn at_start<'w>() -> Vec<Replica<'w>> {
    let replica = |at| Replica {
        engine: SimulatedEngine::new(QWEN_32B_H200),
        state: if at < REPLICAS_FIRST {
            ReplicaState::Ready
        } else {
            ReplicaState::Off
        },
        generation: 1,
        ordered_at: 0.0,
        steps: 0,
        in_flight: 0,
    };
    (0..REPLICAS_MAX).map(replica).collect()
}

pub(super) fn endpoints(replicas: &[Replica<'_>]) -> Vec<Endpoint> {
    let replicas = replicas.iter().enumerate();
    replicas
        .map(|(at, replica)| endpoint(at, replica))
        .collect()
}

fn endpoint(at: usize, replica: &Replica<'_>) -> Endpoint {
    Endpoint {
        id: EndpointRef {
            slot: Slot(u16::try_from(at).unwrap_or(u16::MAX)),
            generation: Generation(replica.generation),
        },
        name: format!("engine-{at}").into(),
        address: format!("10.0.0.{}:8000", at + 1).into(),
        readiness: if replica.state == ReplicaState::Ready {
            Readiness::Ready
        } else {
            Readiness::NotReady
        },
        labels: Box::default(),
        models: Default::default(),
        age_ms: 60_000,
    }
}

impl ScalingWorld<'_> {
    /// Ends a replica, and adds the replica's hours up to the last arrival to the total.
    pub(super) fn end(&mut self, at: usize, now: f64) {
        let Some(replica) = self
            .replicas
            .get_mut(at)
            .filter(|replica| replica.state != ReplicaState::Off)
        else {
            return;
        };
        self.replica_ms += (now.min(LASTING_S * 1e3) - replica.ordered_at).max(0.0);
        replica.state = ReplicaState::Off;
    }

    pub(super) fn order(&mut self, now: f64) {
        let free = self
            .replicas
            .iter_mut()
            .enumerate()
            .find(|(_, replica)| replica.state == ReplicaState::Off);
        let Some((at, replica)) = free else { return };
        replica.state = ReplicaState::Starting;
        replica.ordered_at = now;
        replica.generation += 1;
        self.events.plan(
            now + self.startup_ms,
            ScalingEvent::Started {
                at,
                generation: replica.generation,
            },
        );
    }

    /// Removes a replica as Kubernetes does: first a replica that is not ready yet, then the
    /// youngest replica.
    pub(super) fn remove(&mut self, now: f64) {
        let rank = |state| match state {
            ReplicaState::Starting => Some(1),
            ReplicaState::Ready => Some(0),
            ReplicaState::Off | ReplicaState::Draining => None,
        };
        let candidates = self
            .replicas
            .iter()
            .enumerate()
            .filter_map(|(at, r)| Some((rank(r.state)?, r.ordered_at, at)));
        let Some((_, _, at)) = candidates.max_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)))
        else {
            return;
        };
        let Some(replica) = self.replicas.get_mut(at) else {
            return;
        };
        if replica.in_flight == 0 {
            self.end(at, now);
        } else {
            replica.state = ReplicaState::Draining;
        }
    }

    pub(super) fn started(&mut self, at: usize, generation: u32) {
        let Some(replica) = self.replicas.get_mut(at) else {
            return;
        };
        if replica.state == ReplicaState::Starting && replica.generation == generation {
            replica.state = ReplicaState::Ready;
            replica.engine.forget();
            self.install();
        }
    }

    /// Sends the proxy a pool update.
    pub(super) fn install(&mut self) {
        let endpoints = endpoints(&self.replicas);
        let updated = self.pool.snapshot().and_then(|snapshot| {
            let metrics = snapshot.metrics().to_vec();
            snapshot
                .with_endpoints(Version::default(), endpoints, metrics)
                .ok()
        });
        updated
            .into_iter()
            .for_each(|snapshot| self.pool.install(snapshot, 0, u32::MAX));
    }
}
