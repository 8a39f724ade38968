//! What state a plugin looks at, for people who want to know what a pipeline lives on.

use std::fmt;

/// Something that must be there, or a plugin cannot tell endpoints apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredState {
    /// Requests waiting, as engines report them.
    QueueDepth,
    /// Requests running, as engines report them.
    RunningRequests,
    /// KV-cache utilisation, as engines report it.
    KvCacheUtilization,
    /// LoRA adapters, as engines report them.
    Adapters,
    /// LoRA adapters that endpoints were given requests for.
    AdapterRooms,
    /// Metrics that configuration asks engines for.
    Attributes,
    /// What proxies have outstanding at each endpoint.
    InFlight,
    /// Which endpoint is believed to hold which prompt.
    PrefixIndex,
    /// What steps of the engines cost, as learned.
    StepModel,
    /// Endpoints that were lately given prompts which nobody held.
    ColdPicks,
    /// Length and parts of the request's own prompt.
    Prompt,
    /// Labels of endpoints.
    Labels,
    /// Headers of the request.
    Headers,
    /// What predicts latency.
    Latency,
}

impl fmt::Display for RequiredState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::QueueDepth => "scraped: requests waiting",
            Self::RunningRequests => "scraped: requests running",
            Self::KvCacheUtilization => "scraped: KV-cache utilisation",
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
