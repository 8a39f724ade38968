//! The context of a decision: everything that a plugin may read.

use crate::endpoint::EndpointIndex;
use crate::endpoint_table::EndpointTable;
use crate::in_flight::EndpointLoad;
use crate::local_state::LocalState;
use crate::metrics::EndpointMetrics;
use crate::predictions::{EndpointPrediction, Predictions};
use crate::request::Request;
use crate::settings::ProducerSettings;

/// Everything that a plugin may read for one decision.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The endpoints of the pool.
    pub table: &'a EndpointTable,
    pub request: &'a Request<'a>,
    /// The state of this proxy.
    pub local: LocalState<'a>,
    pub settings: &'a ProducerSettings,
    /// Whether latency is predicted in this pool.
    pub predicts: bool,
    /// The predicted latency at each endpoint; the predictions are computed when the first plugin
    /// reads them.
    pub predictions: &'a Predictions,
    /// The values of [`Self::affinity_blocks`], in the order of the table's endpoints.
    pub(crate) affinity_blocks: &'a [u32],
    /// Whether the pick is for a stage before decode, which generates no output.
    pub(crate) early_stage: bool,
}

// === impl Context ===

impl<'a> Context<'a> {
    /// Returns the last report of the endpoint's engine; `None` if the report is too old.
    pub fn metrics(&self, endpoint: EndpointIndex) -> Option<&EndpointMetrics> {
        if self.local.metrics_stale {
            None
        } else {
            self.table.metrics_of(endpoint)
        }
    }

    /// Returns one number of the engine's last report; `None` if it is unknown, stale, negative or
    /// not finite.
    pub fn metric(
        &self,
        endpoint: EndpointIndex,
        read: impl Fn(&EndpointMetrics) -> Option<f32>,
    ) -> Option<f32> {
        self.metrics(endpoint)
            .and_then(read)
            .filter(|value| value.is_finite() && *value >= 0.0)
    }

    /// Returns a number that `customMetrics` configures; `None` if it is unknown, stale or not
    /// finite.
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

    /// Returns the load in flight at the endpoint, of this proxy and of all other proxies.
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

    /// Returns the estimated number of the request's prompt tokens that the endpoint has not
    /// cached.
    pub fn uncached_tokens(&self, endpoint: EndpointIndex) -> u32 {
        self.tokens_without(self.local.matched_blocks(endpoint))
    }

    /// Returns the blocks of the request's prefix for which plugins prefer the endpoint: the blocks
    /// that the endpoint has cached, and at the rendezvous endpoint also the blocks that other
    /// proxies may have sent to it. The estimates of prefill work and prefill time use the cached
    /// blocks alone.
    pub fn affinity_blocks(&self, endpoint: EndpointIndex) -> u32 {
        self.affinity_blocks
            .get(endpoint.get())
            .copied()
            .unwrap_or(0)
    }

    /// Returns the number of the request's prompt tokens beyond [`Self::affinity_blocks`].
    pub fn tokens_without_affinity(&self, endpoint: EndpointIndex) -> u32 {
        self.tokens_without(self.affinity_blocks(endpoint))
    }

    fn tokens_without(&self, blocks: u32) -> u32 {
        self.request
            .prompt_tokens
            .saturating_sub(blocks.saturating_mul(self.request.prefix_block_tokens))
    }

    /// Returns the predicted latency at the endpoint. Returns `None` if prediction is off, or if
    /// the model gives no prediction.
    pub fn prediction(&self, endpoint: EndpointIndex) -> Option<&'a EndpointPrediction> {
        self.predictions
            .get(self.table, self.request, &self.local)
            .get(endpoint.get())?
            .as_ref()
            .ok()
    }
}
