//! Policies for which no plugin exists. They read the same data as Switchpoint's policy: the same
//! in-flight ledger and prefix index, of the same age.

use scheduler::in_flight::EndpointLoad;
use scheduler::{Endpoint, EndpointMetrics, LocalState, Readiness, Rng, Snapshot};

use super::gateway::{self, PolicyMemory};
use crate::engine::{BLOCK_TOKENS, EngineJob, SimulatedEngine};

/// A policy that picks without the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BaselinePolicy {
    RoundRobin,
    /// NVIDIA Dynamo's KV router at temperature 0. The cost is blocks to prefill + blocks in use.
    /// If engines have roles, the cost of a prefill engine is the blocks to prefill, and that of
    /// other engines the blocks in use.
    Dynamo,
    /// SGLang's gateway 1.13, policy `cache_aware`: see [`gateway`].
    Smg,
    /// vllm-router 0.1.17, policy `cache_aware`: see [`gateway`].
    VllmRouter,
}

/// The inputs of a policy.
pub(crate) struct PolicyView<'a, 'w> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) local: LocalState<'a>,
    pub(crate) job: &'a EngineJob<'w>,
    pub(crate) engines: &'a [SimulatedEngine<'w>],
    pub(crate) now: f64,
    /// The number of the pick.
    pub(crate) turn: usize,
}

// === impl BaselinePolicy ===

impl BaselinePolicy {
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "round-robin" => Self::RoundRobin,
            "dynamo" => Self::Dynamo,
            "smg" => Self::Smg,
            "vllm-router" => Self::VllmRouter,
            _ => return None,
        })
    }

    /// Whether the policy picks two engines for a request if engines have roles.
    pub(crate) fn knows_roles(self) -> bool {
        self == Self::Dynamo
    }

    /// Returns the position of the engine that computes the prompt for the decode engine. `None` if
    /// engines have no roles. The router of prefill engines does not count sequences that decode.
    pub(crate) fn pick_prefill(self, view: &PolicyView<'_, '_>, rng: &mut Rng) -> Option<usize> {
        let prefillers: Vec<usize> = view.ready(|endpoint| !endpoint.decodes());
        lowest(&prefillers, &|at| view.waiting(at) + view.uncached(at), rng)
    }

    /// Returns the position of the picked endpoint, which is ready and decodes; `None` if there is
    /// none.
    pub(crate) fn pick(
        self,
        view: &PolicyView<'_, '_>,
        memory: &mut PolicyMemory,
        rng: &mut Rng,
    ) -> Option<usize> {
        let ready: Vec<usize> = view.ready(Endpoint::decodes);
        let lowest = |cost: &dyn Fn(usize) -> f64, rng: &mut Rng| lowest(&ready, cost, rng);
        match self {
            Self::RoundRobin => ready.get(view.turn % ready.len().max(1)).copied(),
            // If other engines prefill, a prefix cached at a decode engine saves nothing.
            Self::Dynamo if has_roles(view.snapshot) => lowest(&|at| view.context(at), rng),
            Self::Dynamo => lowest(
                &|at| {
                    view.waiting(at)
                        + view.uncached(at)
                        + view.context(at)
                        + f64::from(view.job.prompt)
                },
                rng,
            ),
            Self::Smg => memory.pick_smg(view, &ready, rng),
            Self::VllmRouter => gateway::pick_vllm_router(view, &ready),
        }
    }
}

// === impl PolicyView ===

impl PolicyView<'_, '_> {
    /// Returns the positions of the ready endpoints for which `is` holds.
    fn ready(&self, is: impl Fn(&Endpoint) -> bool) -> Vec<usize> {
        let endpoints = self.snapshot.endpoints().iter().enumerate();
        endpoints
            .filter(|(_, endpoint)| endpoint.readiness == Readiness::Ready && is(endpoint))
            .map(|(at, _)| at)
            .collect()
    }

    fn load(&self, at: usize) -> EndpointLoad {
        let endpoint = self.snapshot.endpoints().get(at);
        endpoint
            .map(|endpoint| self.local.in_flight.load(endpoint.id))
            .unwrap_or_default()
    }

    /// Returns the number of requests that this proxy has in flight at the engine.
    pub(super) fn own_requests(&self, at: usize) -> f64 {
        let endpoint = self.snapshot.endpoints().get(at);
        endpoint.map_or(0.0, |endpoint| {
            f64::from(self.local.in_flight.own(endpoint.id).requests)
        })
    }

    /// Returns the waiting requests and the KV use that the engine reports.
    pub(super) fn reported(&self, at: usize) -> (f64, f64) {
        let metrics = self.snapshot.metrics().get(at);
        let number = |of: fn(&EndpointMetrics) -> Option<f32>| {
            f64::from(metrics.and_then(of).unwrap_or(0.0))
        };
        (
            number(|metrics| metrics.queue_depth),
            number(|metrics| metrics.kv_cache_utilization),
        )
    }

    /// Returns the uncached tokens of prompts without a first token.
    fn waiting(&self, at: usize) -> f64 {
        self.load(at).prefill_tokens as f64
    }

    /// Returns the tokens of all requests in flight.
    fn context(&self, at: usize) -> f64 {
        (self.load(at).decode_tokens + self.load(at).prefills.prompt_tokens) as f64
    }

    /// Estimates the tokens of the prompt that engine `at` has not cached.
    fn uncached(&self, at: usize) -> f64 {
        let matched =
            self.local.matched_blocks.get(at).copied().unwrap_or(0) as usize * BLOCK_TOKENS;
        // The last token of a prompt is always computed.
        (f64::from(self.job.prompt) - matched as f64).max(1.0)
    }
}

/// Whether some engines only compute prompts for others.
pub(crate) fn has_roles(snapshot: &Snapshot) -> bool {
    !snapshot.endpoints().iter().all(Endpoint::decodes)
}

/// Returns the position of lowest cost, and a random one if several costs are equal.
pub(super) fn lowest(
    positions: &[usize],
    cost: &dyn Fn(usize) -> f64,
    rng: &mut Rng,
) -> Option<usize> {
    let costs = positions.iter().map(|&at| (cost(at), rng.next_u64(), at));
    costs
        .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
        .map(|(_, _, at)| at)
}
