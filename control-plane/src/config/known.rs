//! What the reference has and we do not run as such: one table, so that every name is answered for.

/// What becomes of a plugin type of the reference that is not one of [`scheduler::plugin::PLUGINS`].
#[derive(Clone, Copy, Debug)]
pub enum Fate {
    /// What it does happens here anyway, or cannot matter; for this reason.
    NoEffect(&'static str),
    /// It would change decisions and is not there; use this instead.
    Refused(&'static str),
}

/// By type. Sources: llm-d-router `cmd/epp/runner/runner.go` (`registerInTreePlugins`), v0.10.
pub const PLUGIN_TYPES: &[(&str, Fate)] = &[
    ("single-profile-handler", Fate::NoEffect("a pool has one profile; nothing has to choose it")),
    ("approx-prefix-cache-producer", Fate::NoEffect("the prefix index is always kept, sized by what the engines report")),
    ("inflight-load-producer", Fate::NoEffect("in-flight requests and tokens are always counted, at the pick")),
    ("token-producer", Fate::NoEffect("tokens are always estimated from the prompt's bytes")),
    ("tokenizer", Fate::NoEffect("tokens are always estimated from the prompt's bytes")),
    ("metrics-data-source", Fate::NoEffect("endpoints are always scraped; scheme, port and path are taken over")),
    (
        "core-metrics-extractor",
        Fate::NoEffect("engine metrics are always read; engineConfigs, defaultEngine and engineLabelKey are taken over"),
    ),
    ("file-discovery", Fate::NoEffect("endpoints come from --endpoints-file")),
    ("k8s-notification-source", Fate::NoEffect("discovery follows its source by itself")),
    ("endpoint-notification-source", Fate::NoEffect("discovery follows its source by itself")),
    ("openai-parser", Fate::NoEffect("the API is told by the path of each request")),
    ("anthropic-parser", Fate::NoEffect("the API is told by the path of each request")),
    ("passthrough-parser", Fate::NoEffect("requests of an unknown API are routed without reading them")),
    ("vllmhttp-parser", Fate::NoEffect("requests of this API are routed without reading the prompt")),
    ("vllmgrpc-parser", Fate::NoEffect("requests of this API are routed without reading the prompt")),
    ("sglanghttp-parser", Fate::NoEffect("requests of this API are routed without reading the prompt")),
    ("vertexai-parser", Fate::NoEffect("requests of this API are routed without reading the prompt")),
    ("load-aware-scorer", Fate::Refused("queue-scorer")),
    ("no-hit-lru-scorer", Fate::Refused("active-request-scorer: it spreads cold prompts by load")),
    ("latency-scorer", Fate::Refused("active-request-scorer with token-load-scorer")),
    ("slo-scorer", Fate::Refused("active-request-scorer with token-load-scorer")),
    ("precise-prefix-cache-scorer", Fate::Refused("prefix-cache-scorer")),
    ("precise-prefix-cache-producer", Fate::Refused("prefix-cache-scorer: its index is corrected by cached_tokens")),
    ("burst-prefix-cache-producer", Fate::Refused("prefix-cache-scorer: its index changes at the pick, so bursts stay together")),
    ("context-length-aware", Fate::Refused("a pool for each context length (--pools)")),
    ("mm-embeddings-cache-scorer", Fate::Refused("prefix-cache-scorer")),
    ("mm-embeddings-cache-producer", Fate::Refused("prefix-cache-scorer")),
    ("session-affinity-scorer", Fate::Refused("prefix-cache-scorer: a session's prompts share their prefix")),
    ("session-affinity-filter", Fate::Refused("prefix-cache-scorer: a session's prompts share their prefix")),
    ("session-id-producer", Fate::Refused("prefix-cache-scorer: a session's prompts share their prefix")),
    ("header-label-affinity-scorer", Fate::Refused("the subset hint of the Endpoint Picker Protocol")),
    ("endpoint-attribute-scorer", Fate::Refused("queue-scorer or kv-cache-utilization-scorer")),
    ("endpoint-attribute-filter", Fate::Refused("the subset hint of the Endpoint Picker Protocol")),
    ("topology-affinity-scorer", Fate::Refused("a pool for each zone (--pools)")),
    ("topology-affinity-filter", Fate::Refused("a pool for each zone (--pools)")),
    ("topology-extractor", Fate::Refused("a pool for each zone (--pools)")),
    ("multicluster-queue-scorer", Fate::Refused("a pool for each cluster (--pools)")),
    ("multicluster-kv-cache-utilization-scorer", Fate::Refused("a pool for each cluster (--pools)")),
    ("multicluster-prefix-cache-scorer", Fate::Refused("a pool for each cluster (--pools)")),
    ("multicluster-session-affinity-filter", Fate::Refused("a pool for each cluster (--pools)")),
    ("prefix-cache-affinity-filter", Fate::Refused("prefix-cache-scorer with token-load-scorer")),
    ("slo-headroom-tier-filter", Fate::Refused("active-request-scorer with token-load-scorer")),
    ("decode-filter", Fate::Refused("a pool of the decode endpoints alone (--pools)")),
    ("prefill-filter", Fate::Refused("a pool of the prefill endpoints alone (--pools)")),
    ("encode-filter", Fate::Refused("a pool of the encode endpoints alone (--pools)")),
    ("label-selector-filter", Fate::Refused("a pool of the selected endpoints alone (--pools)")),
    ("by-label", Fate::Refused("a pool of the selected endpoints alone (--pools)")),
    ("by-label-selector", Fate::Refused("a pool of the selected endpoints alone (--pools)")),
    ("utilization-filter", Fate::Refused("kv-cache-utilization-scorer with queue-scorer")),
    ("utilization-detector", Fate::Refused("queue-scorer: nothing is shed yet")),
    ("concurrency-detector", Fate::Refused("active-request-scorer: nothing is shed yet")),
    ("header-profile-handler", Fate::Refused("a pool for each profile (--pools)")),
    ("disagg-profile-handler", Fate::Refused("engines that serve prefill and decode together")),
    ("pd-profile-handler", Fate::Refused("engines that serve prefill and decode together")),
    ("data-parallel-profile-handler", Fate::Refused("one endpoint for each rank")),
    ("disagg-headers-handler", Fate::Refused("engines that serve prefill and decode together")),
    ("prefill-header-handler", Fate::Refused("engines that serve prefill and decode together")),
    ("prefix-based-pd-decider", Fate::Refused("engines that serve prefill and decode together")),
    ("always-disagg-pd-decider", Fate::Refused("engines that serve prefill and decode together")),
    ("always-disagg-multimodal-decider", Fate::Refused("engines that serve prefill and decode together")),
    ("predicted-latency-producer", Fate::Refused("active-request-scorer with token-load-scorer")),
    ("p2p-source-producer", Fate::Refused("prefix-cache-scorer")),
    ("latency-slo-admitter", Fate::Refused("nothing is shed yet; leave it out")),
    ("probabilistic-admitter", Fate::Refused("nothing is shed yet; leave it out")),
    ("disaggregatedset-rollout-screener", Fate::Refused("a pool for each revision (--pools)")),
    ("agent-identity", Fate::Refused("nothing is queued by fairness here; leave it out")),
    ("request-attribute-reporter", Fate::Refused("Envoy's access log, which has the token counts")),
    ("global-strict-fairness-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("round-robin-fairness-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("program-aware-fairness-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("fcfs-ordering-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("edf-ordering-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("slo-deadline-ordering-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("static-usage-limit-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("priority-holdback-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("soft-reflective-ceiling-policy", Fate::Refused("nothing is queued here; leave it out")),
    ("eviction-sheddable-filter", Fate::Refused("nothing is queued here; leave it out")),
    ("eviction-priority-then-time-ordering", Fate::Refused("nothing is queued here; leave it out")),
    ("models-data-source", Fate::Refused("a pool for each model (--pools)")),
    ("models-data-extractor", Fate::Refused("a pool for each model (--pools)")),
    ("dcgm-data-source", Fate::Refused("metrics-data-source: engines report their own load")),
    ("dcgm-extractor", Fate::Refused("core-metrics-extractor: engines report their own load")),
    ("slo-aware-profile-handler", Fate::Refused("single-profile-handler")),
    ("slo-request-tracker", Fate::Refused("nothing is predicted yet; leave it out")),
];

/// Sections of the file beside plugins and profiles, what they may hold, and what becomes of them.
pub const SECTIONS: &[(&str, &[&str], Fate)] = &[
    (
        "dataLayer",
        &["injectDefaults", "sources", "discovery", "peerDiscovery", "crossReplicaSyncerPluginRef", "crossReplicaSyncInterval"],
        Fate::NoEffect("the daemon discovers, scrapes and shares by itself"),
    ),
    (
        "flowControl",
        &[
            "maxBytes",
            "maxRequests",
            "defaultRequestTTL",
            "noEndpointRequestTTL",
            "defaultPriorityBand",
            "defaultNegativePriorityBand",
            "priorityBands",
            "usageLimitPolicyPluginRef",
            "saturationDetector",
            "enableEviction",
        ],
        Fate::NoEffect("it counts only with the feature gate flowControl, which is refused"),
    ),
    ("requestHandler", &["parsers"], Fate::NoEffect("the API is told by the path of each request")),
    ("saturationDetector", &["pluginRef"], Fate::NoEffect("nothing is shed by saturation yet")),
    ("parser", &["pluginRef"], Fate::NoEffect("the API is told by the path of each request")),
];

/// Feature gates of the reference, whether each is on when not named, and what becomes of it when on.
pub const FEATURE_GATES: &[(&str, Fate)] = &[
    ("flowControl", Fate::Refused("engines' own queues, which queue-scorer evens out")),
    ("haPopulateNonLeaderDatastore", Fate::NoEffect("there are no standbys to keep warm")),
];

/// Parameters that a plugin type of ours has at the reference but not here.
pub const PARAMETERS: &[(&str, &str, Fate)] = &[(
    "prefix-cache-scorer",
    "prefixMatchInfoProducerName",
    Fate::NoEffect("there is one prefix index; every prefix-cache-scorer reads it"),
)];
