//! The state that a plugin reads, for the printed reference and for `switchpointd check`.

use std::fmt;

use crate::metrics::MetricDefinition;

/// State that a plugin needs to distinguish endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredState {
    /// A number that engines report.
    Metric(&'static MetricDefinition),
    /// LoRA adapters, as engines report them.
    Adapters,
    /// LoRA adapters of recent picks, by endpoint.
    AdapterRooms,
    /// Metrics that `customMetrics` configures.
    Attributes,
    /// The load in flight at each endpoint.
    InFlight,
    PrefixIndex,
    /// The learned cost of engine steps.
    StepModel,
    /// The last pick of each endpoint for a prompt that was cached nowhere.
    ColdPicks,
    /// Length and parts of the request's own prompt.
    Prompt,
    /// Labels of endpoints.
    Labels,
    /// Headers of the request.
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
            Self::Attributes => "scraped: customMetrics",
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
