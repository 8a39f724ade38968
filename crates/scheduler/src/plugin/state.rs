//! The state that a plugin reads, for the printed reference and for `switchpointd check`.

use std::fmt;

use crate::metrics::MetricDefinition;

/// A kind of state by which a plugin distinguishes endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredState {
    /// A number that engines report.
    Metric(&'static MetricDefinition),
    /// The LoRA adapters that engines report.
    Adapters,
    /// The LoRA adapters that recent picks have used at each endpoint.
    AdapterRooms,
    /// The metrics that `customMetrics` configures.
    Attributes,
    /// The load in flight at each endpoint.
    InFlight,
    PrefixIndex,
    /// The learned cost of engine steps.
    StepModel,
    /// The last pick of each endpoint for a prompt that was cached nowhere.
    ColdPicks,
    /// The length and the parts of the request's prompt.
    Prompt,
    /// The labels of endpoints.
    Labels,
    /// The headers of the request.
    Headers,
    /// The latency model.
    Latency,
}

impl fmt::Display for RequiredState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Metric(metric) => return write!(f, "scraped: {}", metric.help),
            Self::Adapters => "scraped: LoRA adapters",
            Self::AdapterRooms => "recent adapter placements",
            Self::Attributes => "scraped: metrics of customMetrics",
            Self::InFlight => "in-flight ledger",
            Self::PrefixIndex => "prefix index",
            Self::StepModel => "learned step times",
            Self::ColdPicks => "recent cold picks",
            Self::Prompt => "the prompt",
            Self::Labels => "endpoint labels",
            Self::Headers => "request headers",
            Self::Latency => "latency model",
        })
    }
}
