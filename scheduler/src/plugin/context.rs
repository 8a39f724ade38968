//! All a plugin may look at.

use crate::endpoint::EndpointIndex;
use crate::endpoint_table::EndpointTable;
use crate::in_flight::EndpointLoad;
use crate::local_state::LocalState;
use crate::metrics::EndpointMetrics;
use crate::predictions::{EndpointPrediction, Predictions};
use crate::request::Request;
use crate::settings::ProducerSettings;

/// All a plugin may look at.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The endpoints of the pool.
    pub table: &'a EndpointTable,
    /// The request.
    pub request: &'a Request<'a>,
    /// The proxy's own state.
    pub local: LocalState<'a>,
    /// What producers set.
    pub settings: &'a ProducerSettings,
    /// Is latency predicted in this pool?
    pub predicts: bool,
    /// What the request would see at each endpoint; predicted when the first plugin reads it.
    pub predictions: &'a Predictions,
    /// See [`Self::affinity_blocks`]; parallel to the table's endpoints.
    pub(crate) affinity_blocks: &'a [u32],
    /// Is it a stage before decode that is picked for, where nothing is put out?
    pub(crate) early_stage: bool,
}

// === impl Context ===

impl<'a> Context<'a> {
    /// What the engine last said of itself; `None` when that is too old to go by.
    #[must_use]
    pub fn metrics(&self, endpoint: EndpointIndex) -> Option<&EndpointMetrics> {
        if self.local.metrics_stale { None } else { self.table.metrics_of(endpoint) }
    }

    /// One number of it; `None` when unknown, stale, negative or not finite.
    #[must_use]
    pub fn metric(&self, endpoint: EndpointIndex, read: impl Fn(&EndpointMetrics) -> Option<f32>) -> Option<f32> {
        self.metrics(endpoint).and_then(read).filter(|value| value.is_finite() && *value >= 0.0)
    }

    /// A number that the metrics extractor was told to read; `None` when unknown, stale or not finite.
    #[must_use]
    pub fn attribute(&self, endpoint: EndpointIndex, key: &str) -> Option<f32> {
        self.metrics(endpoint)?.attribute(key).filter(|value| value.is_finite())
    }

    /// The value of a label of the endpoint.
    #[must_use]
    pub fn label(&self, endpoint: EndpointIndex, key: &str) -> Option<&str> {
        self.table.endpoint(endpoint)?.label(key)
    }

    /// What tells this agent's session from others: the first of the headers that agent-identity reads, not blank.
    #[must_use]
    pub fn agent_identity(&self) -> Option<&str> {
        let headers = &self.settings.identity.headers;
        headers.iter().filter_map(|name| self.request.header(name)).map(str::trim).find(|value| !value.is_empty())
    }

    /// What the proxy has outstanding there.
    #[must_use]
    pub fn load(&self, endpoint: EndpointIndex) -> EndpointLoad {
        self.table.id(endpoint).map(|id| self.local.in_flight.load(id)).unwrap_or_default()
    }

    /// How many requests that is.
    #[must_use]
    pub fn requests(&self, endpoint: EndpointIndex) -> u32 {
        self.table.id(endpoint).map(|id| self.local.in_flight.requests(id)).unwrap_or_default()
    }

    /// Prompt tokens of the request that the endpoint is not believed to hold already.
    #[must_use]
    pub fn uncached_tokens(&self, endpoint: EndpointIndex) -> u32 {
        self.tokens_without(self.local.matched_blocks(endpoint))
    }

    /// Blocks of the request's prefix that draw it to the endpoint: what it is believed to hold, and of its home what others may have put there.
    /// For those who weigh caches; what is computed, and how long that takes, goes by what is believed.
    #[must_use]
    pub fn affinity_blocks(&self, endpoint: EndpointIndex) -> u32 {
        self.affinity_blocks.get(endpoint.get()).copied().unwrap_or(0)
    }

    /// Prompt tokens of the request beyond those.
    #[must_use]
    pub fn tokens_without_affinity(&self, endpoint: EndpointIndex) -> u32 {
        self.tokens_without(self.affinity_blocks(endpoint))
    }

    fn tokens_without(&self, blocks: u32) -> u32 {
        self.request.prompt_tokens.saturating_sub(blocks.saturating_mul(self.request.prefix_block_tokens))
    }

    /// What the request would see there; `None` where nothing is predicted, or the model abstains.
    #[must_use]
    pub fn prediction(&self, endpoint: EndpointIndex) -> Option<&'a EndpointPrediction> {
        self.predictions.get(self.table, self.request, &self.local).get(endpoint.get())?.as_ref().ok()
    }
}
