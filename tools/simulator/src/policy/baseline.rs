//! Policies for which no plugin exists. They read the same data as Switchpoint's policy: an
//! in-flight ledger and a prefix index of the same age.

use scheduler::in_flight::EndpointLoad;
use scheduler::{Endpoint, EndpointMetrics, LocalState, Readiness, Rng, Snapshot};

use super::gateway::{self, PolicyMemory};
use crate::engine::{BLOCK_TOKENS, EngineJob, SimulatedEngine};

/// A policy that picks without the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BaselinePolicy {
    RoundRobin,
    /// NVIDIA Dynamo's KV router at temperature 0. The cost of an engine is the number of blocks to
    /// prefill plus the number of blocks in use. If engines have roles, the cost of a prefill
    /// engine is only the blocks to prefill, and the cost of a decode engine only the blocks in
    /// use.
    Dynamo,
    /// SGLang's gateway 1.13 with its policy `cache_aware`: see [`gateway`].
    Smg,
    /// vllm-router 0.1.17 with its policy `cache_aware`: see [`gateway`].
    VllmRouter,
}

/// The data that a policy reads for a pick.
pub(crate) struct PolicyView<'a, 'w> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) local: LocalState<'a>,
    pub(crate) job: &'a EngineJob<'w>,
    pub(crate) engines: &'a [SimulatedEngine<'w>],
    pub(crate) now: f64,
    /// A number that grows with every pick.
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

    /// Whether the policy picks a prefill engine and a decode engine if engines have roles.
    pub(crate) fn knows_roles(self) -> bool {
        self == Self::Dynamo
    }

    /// Returns the position of the engine that computes the prompt for the decode engine, or `None`
    /// if engines have no roles. The cost leaves out sequences that decode, because the router of
    /// prefill engines does not count them.
    pub(crate) fn pick_prefill(self, view: &PolicyView<'_, '_>, rng: &mut Rng) -> Option<usize> {
        let prefillers: Vec<usize> = view.ready(|endpoint| !endpoint.decodes());
        lowest(&prefillers, &|at| view.waiting(at) + view.uncached(at), rng)
    }

    /// Returns the position of the picked endpoint, or `None` if no endpoint that decodes is ready.
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
            // If other engines prefill, a prefix that a decode engine has cached saves nothing.
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
    /// Returns the positions of the ready endpoints for which `is` returns true.
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

    /// Returns the number of waiting requests and the KV use that the engine reports.
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

    /// Returns the uncached tokens of the prompts that have no first token yet.
    fn waiting(&self, at: usize) -> f64 {
        self.load(at).prefill_tokens as f64
    }

    /// Returns the tokens of all requests in flight at the engine.
    fn context(&self, at: usize) -> f64 {
        (self.load(at).decode_tokens + self.load(at).prefills.prompt_tokens) as f64
    }

    /// Returns an estimate of the tokens of the prompt that engine `at` has not cached.
    fn uncached(&self, at: usize) -> f64 {
        let matched =
            self.local.matched_blocks.get(at).copied().unwrap_or(0) as usize * BLOCK_TOKENS;
        // An engine always computes the last token of a prompt.
        (f64::from(self.job.prompt) - matched as f64).max(1.0)
    }
}

/// Whether the pool has engines that only compute prompts for other engines.
pub(crate) fn has_roles(snapshot: &Snapshot) -> bool {
    !snapshot.endpoints().iter().all(Endpoint::decodes)
}

/// Returns the position with the lowest cost, or a random one of several with the lowest cost.
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
