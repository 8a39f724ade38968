//! Everything that a plugin may read.

use crate::endpoint::EndpointIndex;
use crate::endpoint_table::EndpointTable;
use crate::in_flight::EndpointLoad;
use crate::local_state::LocalState;
use crate::metrics::EndpointMetrics;
use crate::predictions::{EndpointPrediction, Predictions};
use crate::request::Request;
use crate::settings::ProducerSettings;

/// Everything that a plugin may read.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The endpoints of the pool.
    pub table: &'a EndpointTable,
    pub request: &'a Request<'a>,
    /// The proxy's own state.
    pub local: LocalState<'a>,
    pub settings: &'a ProducerSettings,
    /// Whether latency is predicted in this pool.
    pub predicts: bool,
    /// The predicted latency at each endpoint; computed when the first plugin reads it.
    pub predictions: &'a Predictions,
    /// The values of [`Self::affinity_blocks`], in the order of the table's endpoints.
    pub(crate) affinity_blocks: &'a [u32],
    /// Whether the pick is for a stage before decode, which generates no output.
    pub(crate) early_stage: bool,
}

// === impl Context ===

impl<'a> Context<'a> {
    /// Returns the engine's last report; `None` if it is too old.
    pub fn metrics(&self, endpoint: EndpointIndex) -> Option<&EndpointMetrics> {
        if self.local.metrics_stale {
            None
        } else {
            self.table.metrics_of(endpoint)
        }
    }

    /// Returns one number of the engine's last report; `None` if unknown, stale, negative or not
    /// finite.
    pub fn metric(
        &self,
        endpoint: EndpointIndex,
        read: impl Fn(&EndpointMetrics) -> Option<f32>,
    ) -> Option<f32> {
        self.metrics(endpoint)
            .and_then(read)
            .filter(|value| value.is_finite() && *value >= 0.0)
    }

    /// Returns a number that `customMetrics` configures; `None` if unknown, stale or not finite.
    pub fn attribute(&self, endpoint: EndpointIndex, key: &str) -> Option<f32> {
        self.metrics(endpoint)?
            .attribute(key)
            .filter(|value| value.is_finite())
    }

    pub fn label(&self, endpoint: EndpointIndex, key: &str) -> Option<&str> {
        self.table.endpoint(endpoint)?.label(key)
    }

    /// Returns the agent's session: the value of the first header of `agent-identity` that is
    /// present and not blank.
    pub fn agent_identity(&self) -> Option<&str> {
        let headers = &self.settings.identity.headers;
        headers
            .iter()
            .filter_map(|name| self.request.header(name))
            .map(str::trim)
            .find(|value| !value.is_empty())
    }

    /// Returns the load in flight at the endpoint, from this proxy and its peers.
    pub fn load(&self, endpoint: EndpointIndex) -> EndpointLoad {
        self.table
            .id(endpoint)
            .map(|id| self.local.in_flight.load(id))
            .unwrap_or_default()
    }

    /// Returns the number of requests in [`Self::load`].
    pub fn requests(&self, endpoint: EndpointIndex) -> u32 {
        self.table
            .id(endpoint)
            .map(|id| self.local.in_flight.requests(id))
            .unwrap_or_default()
    }

    /// Returns the request's prompt tokens that are estimated not to be cached at the endpoint.
    pub fn uncached_tokens(&self, endpoint: EndpointIndex) -> u32 {
        self.tokens_without(self.local.matched_blocks(endpoint))
    }

    /// Returns the blocks of the request's prefix for which plugins prefer the endpoint: those
    /// cached there, and at the rendezvous endpoint also those that other proxies may have sent
    /// there. The prefill work and its time follow from the cached blocks alone.
    pub fn affinity_blocks(&self, endpoint: EndpointIndex) -> u32 {
        self.affinity_blocks
            .get(endpoint.get())
            .copied()
            .unwrap_or(0)
    }

    /// Returns the request's prompt tokens beyond [`Self::affinity_blocks`].
    pub fn tokens_without_affinity(&self, endpoint: EndpointIndex) -> u32 {
        self.tokens_without(self.affinity_blocks(endpoint))
    }

    fn tokens_without(&self, blocks: u32) -> u32 {
        self.request
            .prompt_tokens
            .saturating_sub(blocks.saturating_mul(self.request.prefix_block_tokens))
    }

    /// Returns the predicted latency at the endpoint. `None` if prediction is off, or if the model
    /// abstains.
    pub fn prediction(&self, endpoint: EndpointIndex) -> Option<&'a EndpointPrediction> {
        self.predictions
            .get(self.table, self.request, &self.local)
            .get(endpoint.get())?
            .as_ref()
            .ok()
    }
}
