//! The plugins, feature gates and parameters of llm-d that the scheduler does not have. With this
//! table, the check of a configuration file has an answer for every name that llm-d knows.

use std::fmt;

use scheduler::registry::{self, PluginKind};

use super::yaml::YamlValue;

/// The report on an item of llm-d that is no plugin of Switchpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemSupport {
    /// Switchpoint has this item, but not as a plugin.
    Implemented(&'static str),
    /// The item is implemented with the feature gate `flowControl`, and has no effect without the
    /// gate.
    FlowControl(&'static str),
    /// The item has no effect in Switchpoint; the text is the reason.
    NoEffect(&'static str),
    /// The item would change decisions, and Switchpoint does not have it. The first text is the
    /// reason, the second names what to use instead.
    Refused(&'static str, &'static str),
}
use ItemSupport::{Implemented, NoEffect, Refused};

/// The role of a plugin, which decides which items may refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginRole {
    Scheduling(PluginKind),
    /// `dataLayer.sources[]` refers to the plugin.
    Source,
    /// `dataLayer.sources[].extractors[]` refers to the plugin.
    Extractor,
    /// `dataLayer.discovery` refers to the plugin.
    Discovery,
    /// `dataLayer.discovery.peers` refers to the plugin.
    Peers,
    /// `dataLayer.crossReplica` refers to the plugin.
    Syncer,
    /// No item refers to the plugin: llm-d runs it when it is declared.
    Unreferred,
}

/// A plugin type of llm-d that is not in [`registry::PLUGINS`].
#[derive(Clone, Copy, Debug)]
pub struct ReferencePlugin {
    pub name: &'static str,
    pub role: PluginRole,
    /// The report on the plugin.
    pub support: ItemSupport,
}

const NOT_YET: &str = "not implemented in this version";
/// The reason why llm-d's eviction plugins have no effect.
const EVICTION: &str =
    "enableEviction has this rule: negative priorities only, the lowest first, then the newest";
/// The reason why plugin types that existed only in older versions of llm-d-router are refused.
const RENAMED: &str = "a type of older versions of llm-d or the Inference Extension";
const NO_EVENTS: &str = "engines' KV events do not correct the prefix index yet";

const SCORER: PluginRole = PluginRole::Scheduling(PluginKind::Scorer);
const DETECTOR: PluginRole = PluginRole::Scheduling(PluginKind::Detector);
const FILTER: PluginRole = PluginRole::Scheduling(PluginKind::Filter);
const HANDLER: PluginRole = PluginRole::Scheduling(PluginKind::ProfileHandler);
const PRODUCER_ROLE: PluginRole = PluginRole::Scheduling(PluginKind::Producer);

/// Source: llm-d-router `cmd/epp/runner/runner.go` (`registerInTreePlugins`), v0.10 and later.
#[rustfmt::skip] // a table
pub const FOREIGN: &[ReferencePlugin] = &[
    row("metrics-data-source", PluginRole::Source, Implemented("where endpoints are scraped; applies whether declared or not")),
    row("core-metrics-extractor", PluginRole::Extractor, Implemented("which engine metrics are read; applies whether declared or not")),
    row("file-discovery", PluginRole::Discovery, NoEffect("endpoints come from --endpoints-file")),
    row("k8s-notification-source", PluginRole::Source, NoEffect("discovery watches its source itself")),
    row("endpoint-notification-source", PluginRole::Source, NoEffect("discovery watches its source itself")),
    row("local-syncer", PluginRole::Syncer, NoEffect("proxies share their state through the daemon")),
    row("disagg-headers-handler", PluginRole::Unreferred, NoEffect("disagg-profile-handler sets the headers itself")),
    row("prefill-header-handler", PluginRole::Unreferred, NoEffect("disagg-profile-handler sets the headers itself")),

    row("tokenizer", PRODUCER_ROLE, Refused("deprecated in llm-d-router", "token-producer")),
    row("pd-profile-handler", HANDLER, Refused("deprecated in llm-d-router", "disagg-profile-handler, its deciders.prefill for deciderPluginName")),
    row("precise-prefix-cache-scorer", SCORER, Refused(NO_EVENTS, "prefix-cache-scorer")),
    row("precise-prefix-cache-producer", PluginRole::Extractor, Refused(NO_EVENTS, "approx-prefix-cache-producer: its index is corrected by cached_tokens")),
    row("burst-prefix-cache-producer", PluginRole::Unreferred, Refused(NOT_YET, "approx-prefix-cache-producer: its index is updated at the pick, so requests of a burst share their prefix")),
    row("multicluster-approx-prefix-cache-producer", PluginRole::Unreferred, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("mm-embeddings-cache-scorer", SCORER, Refused(NOT_YET, "prefix-cache-scorer")),
    row("mm-embeddings-cache-producer", PluginRole::Extractor, Refused(NOT_YET, "approx-prefix-cache-producer")),
    row("session-id-producer", PluginRole::Unreferred, Refused(NOT_YET, "session-affinity-scorer with sources")),
    row("label-producer", PluginRole::Unreferred, Refused(NOT_YET, "label-selector-filter or header-label-affinity-scorer")),
    row("lmetric-scorer", SCORER, Refused(NOT_YET, "marginal-cost-scorer, or prefix-cache-scorer and active-request-scorer")),
    row("thunder-agent", SCORER, Refused(NOT_YET, "session-affinity-scorer, and program-aware-fairness with flowControl")),
    row("active-request-filter", FILTER, Refused(NOT_YET, "utilization-filter with active-requests")),
    row("max-saturation-detector", DETECTOR, Refused(NOT_YET, "utilization-detector, concurrency-detector or backlog-detector")),
    row("latency-observer-producer-hub", PluginRole::Source, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("latency-observation-scorer-hub", SCORER, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("endpoint-attribute-weight-scorer", SCORER, Refused(NOT_YET, "endpoint-attribute-scorer")),
    row("topology-affinity-scorer", SCORER, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("topology-affinity-filter", FILTER, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("topology-extractor", PluginRole::Extractor, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("multicluster-queue-scorer", SCORER, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("multicluster-kv-cache-utilization-scorer", SCORER, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("multicluster-prefix-cache-scorer", SCORER, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("multicluster-session-affinity-filter", FILTER, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("multicluster-metrics-data-source", PluginRole::Source, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("multicluster-metrics-extractor", PluginRole::Extractor, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("multicluster-file-discovery", PluginRole::Discovery, Refused(NOT_YET, "a pool for each cluster (--pools)")),
    row("p2p-source-producer", PluginRole::Unreferred, Refused(NOT_YET, "prefix-cache-scorer")),
    row("disaggregatedset-rollout-screener", PluginRole::Unreferred, Refused(NOT_YET, "a pool for each revision (--pools)")),
    row("disaggregatedset-rollout-pod-extractor", PluginRole::Extractor, Refused(NOT_YET, "a pool for each revision (--pools)")),
    row("reserve-endpoint", PluginRole::Unreferred, Refused(NOT_YET, "label-selector-filter")),
    row("prefill-pin-screener", PluginRole::Unreferred, Refused(NOT_YET, "session-affinity-filter in the prefill profile")),
    row("request-attribute-reporter", PluginRole::Unreferred, Refused(NOT_YET, "Envoy's access log")),
    row("models-responder", PluginRole::Unreferred, Refused(NOT_YET, "the model server's /v1/models")),
    row("models-data-source", PluginRole::Source, Refused(NOT_YET, "a pool for each model (--pools)")),
    row("models-data-extractor", PluginRole::Extractor, Refused(NOT_YET, "a pool for each model (--pools)")),
    row("dcgm-data-source", PluginRole::Source, Refused(NOT_YET, "metrics-data-source: engines report their own load")),
    row("dcgm-extractor", PluginRole::Extractor, Refused(NOT_YET, "core-metrics-extractor with customMetrics")),
    row("sheddable-eviction-filter", PluginRole::Unreferred, NoEffect(EVICTION)),
    row("eviction-sheddable-filter", PluginRole::Unreferred, NoEffect(EVICTION)),
    row("priority-then-time-eviction-order-policy", PluginRole::Unreferred, NoEffect(EVICTION)),
    row("eviction-priority-then-time-ordering", PluginRole::Unreferred, NoEffect(EVICTION)),
    row("kv-cache-scorer", SCORER, Refused(RENAMED, "kv-cache-utilization-scorer")),
    row("model-server-protocol-metrics", PluginRole::Extractor, Refused(RENAMED, "core-metrics-extractor with engineConfigs")),
    row("model-server-protocol-models", PluginRole::Extractor, Refused(RENAMED, "a pool for each model (--pools)")),
    row("predicted-latency-scorer", SCORER, Refused(RENAMED, "predicted-latency-producer, latency-scorer and slo-headroom-tier-filter")),
    row("slo-aware-routing", SCORER, Refused(RENAMED, "predicted-latency-producer, latency-scorer and slo-headroom-tier-filter")),
    row("decision-tree-filter", FILTER, Refused(RENAMED, "scorers with weights")),
    row("least-queue-filter", FILTER, Refused(RENAMED, "queue-scorer")),
    row("low-queue-filter", FILTER, Refused(RENAMED, "utilization-filter with waiting-queue")),
    row("least-kv-cache-filter", FILTER, Refused(RENAMED, "kv-cache-utilization-scorer")),
    row("lora-affinity-filter", FILTER, Refused(RENAMED, "lora-affinity-scorer")),
    row("header-based-testing-filter", FILTER, Refused("only llm-d-router's tests use it", "the subset hint of the Endpoint Picker Protocol")),
    row("destination-endpoint-served-verifier", PluginRole::Unreferred, Refused("only llm-d-router's tests use it", "Envoy's access log")),
];

pub const FLOW_CONTROL_GATE: &str = "flowControl";

/// The feature gates of llm-d, each with what is reported about a configuration file that turns the
/// gate on.
pub const FEATURE_GATES: &[(&str, ItemSupport)] = &[
    (
        FLOW_CONTROL_GATE,
        Implemented("requests wait in the proxy until an endpoint has room for them"),
    ),
    (
        "haPopulateNonLeaderDatastore",
        NoEffect("standby daemons follow discovery anyway"),
    ),
    ("dataLayer", NoEffect("a gate of older versions")),
    ("enableLegacyMetrics", NoEffect("a gate of older versions")),
    ("prepareDataPlugins", NoEffect("a gate of older versions")),
];

/// A parameter of llm-d that the scheduler does not have, although it has the plugin type.
#[derive(Clone, Copy, Debug)]
pub struct LlmdParameter {
    pub plugin_type: &'static str,
    pub way: &'static [&'static str],
    /// The values that request the behaviour that Switchpoint always has, in lower case without
    /// hyphens.
    pub usual: &'static [&'static str],
    /// The report on all other values.
    pub support: ItemSupport,
}

const USUAL: ItemSupport = Implemented("what is done anyway");
/// The reason why a parameter of `prefix-cache-scorer` is refused.
const IN_THE_PRODUCER: &str = "a parameter of approx-prefix-cache-producer since llm-d-router v0.9";
const NO_TOKENIZER: ItemSupport = Refused(
    "no external tokenizer is called",
    "the estimate, which is the default",
);
const ONE_PRODUCER: ItemSupport = NoEffect("each producer exists once, declared or not");
const ONE_INDEX: ItemSupport = NoEffect("all plugins share one prefix index");

/// The parameters of llm-d that the scheduler does not have.
#[rustfmt::skip] // a table
pub const PARAMETERS: &[LlmdParameter] = &[
    parameter("token-producer", &["vllm"], NO_TOKENIZER),
    parameter("token-producer", &["udsTokenizerConfig"], NO_TOKENIZER),
    parameter("token-producer", &["modelName"], NoEffect("tokens are estimated in the same way for every model")),
    parameter("token-producer", &["estimate", "video"], NoEffect("a video counts as an image")),
    parameter("predicted-latency-producer", &["contextTTL"], NoEffect("the context of a request is dropped when the request ends")),
    parameter("predicted-latency-producer", &["encoderCacheMatchInfoProducerName"], NoEffect("the features of the model are fixed")),
    parameter("active-request-scorer", &["requestTimeout"], NoEffect("a request counts until it ends, as in llm-d-router since v0.9")),
    parameter("active-request-scorer", &["inFlightLoadProducerName"], ONE_PRODUCER),
    parameter("token-load-scorer", &["inFlightLoadProducerName"], ONE_PRODUCER),
    parameter("slo-headroom-tier-filter", &["latencyPredictionInfoProducerName"], ONE_PRODUCER),
    parameter("no-hit-lru-scorer", &["prefixPluginType"], ONE_INDEX),
    parameter("no-hit-lru-scorer", &["prefixPluginName"], ONE_INDEX),
    parameter("prefix-cache-scorer", &["hashBlockSize"], Refused(IN_THE_PRODUCER, "its blockSizeTokens, in tokens (characters / 4)")),
    parameter("prefix-cache-scorer", &["blockSize"], Refused(IN_THE_PRODUCER, "its blockSizeTokens, in tokens (characters / 4)")),
    parameter("prefix-cache-scorer", &["blockSizeTokens"], Refused(IN_THE_PRODUCER, "its blockSizeTokens")),
    parameter("prefix-cache-scorer", &["maxPrefixBlocksToMatch"], Refused(IN_THE_PRODUCER, "its maxPrefixTokensToMatch, in tokens (blocks * blockSizeTokens)")),
    parameter("prefix-cache-scorer", &["maxPrefixTokensToMatch"], Refused(IN_THE_PRODUCER, "its maxPrefixTokensToMatch")),
    parameter("prefix-cache-scorer", &["lruCapacityPerServer"], Refused(IN_THE_PRODUCER, "its lruCapacityPerServer")),
    parameter("prefix-cache-scorer", &["autoTune"], Refused(IN_THE_PRODUCER, "its autoTune")),
    parameter("prefix-cache-scorer", &["mode"], Refused(NO_EVENTS, "leave it out: the index is corrected by cached_tokens")),
    parameter("prefix-cache-scorer", &["tokenProcessorConfig"], Refused(NO_EVENTS, "leave it out: the index is corrected by cached_tokens")),
    parameter("prefix-cache-scorer", &["indexerConfig"], Refused(NO_EVENTS, "leave it out: the index is corrected by cached_tokens")),
    parameter("prefix-cache-scorer", &["kvEventsConfig"], Refused(NO_EVENTS, "leave it out: the index is corrected by cached_tokens")),
    parameter("program-aware-fairness", &["lasDecayFactor"], Refused("a decay per pick in llm-d-router up to v0.10", "lasHalfLifeSeconds")),
    parameter("program-aware-fairness-policy", &["lasDecayFactor"], Refused("a decay per pick in llm-d-router up to v0.10", "lasHalfLifeSeconds")),
    parameter("approx-prefix-cache-producer", &["prefixHashSource"], Refused("blocks are hashed here, from the prompt", "leave it out")),
    LlmdParameter {
        usual: &["", "las"],
        ..parameter("program-aware-fairness", &["strategy"], Refused(NOT_YET, "las"))
    },
    LlmdParameter {
        usual: &["", "las"],
        ..parameter("program-aware-fairness-policy", &["strategy"], Refused(NOT_YET, "las"))
    },
    LlmdParameter {
        usual: &["", "decode", "decodefirst"],
        ..parameter("disagg-profile-handler", &["stageOrder"], Refused("decode is picked first, then prefill and encode for it", "decode-first"))
    },
];

/// The first words of the documentation of a parameter that is checked but has no effect.
pub const NO_EFFECT: &str = "no effect: ";

/// The parameters that name another item of the file: plugin type (empty: any), path of the
/// parameter, and kind of the named item. Each reference leads from a handler to its deciders and
/// profiles, or from a scorer to its producer. No reference leads back, so a cycle always contains
/// a reference of the wrong kind.
pub const REFERENCES: &[(&str, &[&str], ParameterReference)] = &[
    ("disagg-profile-handler", &["deciders", "prefill"], DECIDER),
    ("disagg-profile-handler", &["deciders", "encode"], DECIDER),
    (
        "disagg-profile-handler",
        &["profiles", "decode"],
        ParameterReference::Profile,
    ),
    (
        "disagg-profile-handler",
        &["profiles", "prefill"],
        ParameterReference::Profile,
    ),
    (
        "disagg-profile-handler",
        &["profiles", "encode"],
        ParameterReference::Profile,
    ),
    (
        "header-profile-handler",
        &["defaultProfile"],
        ParameterReference::Profile,
    ),
    (
        "slo-aware-profile-handler",
        &["defaultProfile"],
        ParameterReference::Profile,
    ),
    (
        "slo-aware-profile-handler",
        &["sloProfile"],
        ParameterReference::Profile,
    ),
    ("", &["prefixMatchInfoProducerName"], PRODUCER),
    ("", &["inFlightLoadProducerName"], PRODUCER),
    ("", &["latencyPredictionInfoProducerName"], PRODUCER),
    (
        "endpoint-attribute-scorer",
        &["producer"],
        ParameterReference::Plugin(PluginRole::Extractor),
    ),
    (
        "endpoint-attribute-filter",
        &["producer"],
        ParameterReference::Plugin(PluginRole::Extractor),
    ),
];

/// The kind of item that a parameter names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterReference {
    /// A declared plugin.
    Plugin(PluginRole),
    Profile,
}

const DECIDER: ParameterReference =
    ParameterReference::Plugin(PluginRole::Scheduling(PluginKind::Decider));
const PRODUCER: ParameterReference = ParameterReference::Plugin(PRODUCER_ROLE);

const fn row(name: &'static str, role: PluginRole, fate: ItemSupport) -> ReferencePlugin {
    ReferencePlugin {
        name,
        role,
        support: fate,
    }
}

const fn parameter(
    plugin_type: &'static str,
    way: &'static [&'static str],
    support: ItemSupport,
) -> LlmdParameter {
    LlmdParameter {
        plugin_type,
        way,
        usual: &[],
        support,
    }
}

/// Returns the entry of [`FOREIGN`] for a plugin type.
#[must_use]
pub fn foreign(plugin_type: &str) -> Option<&'static ReferencePlugin> {
    FOREIGN.iter().find(|row| row.name == plugin_type)
}

/// Returns every plugin type that the check of a configuration file has an answer for.
pub fn plugin_types() -> impl Iterator<Item = &'static str> + Clone {
    registry::PLUGINS
        .iter()
        .filter(|row| row.kind != PluginKind::FlowControl)
        .map(|row| row.name)
        .chain(FOREIGN.iter().map(|row| row.name))
}

// === impl LlmdParameter ===

impl LlmdParameter {
    #[must_use]
    pub fn answer(&self, value: &YamlValue) -> ItemSupport {
        match value {
            YamlValue::Null if !self.usual.is_empty() => USUAL,
            YamlValue::Text(text)
                if self
                    .usual
                    .contains(&text.replace(['-', '_'], "").to_lowercase().as_str()) =>
            {
                USUAL
            }
            _ => self.support,
        }
    }
}

pub fn kind_name(kind: PluginKind) -> &'static str {
    match kind {
        PluginKind::Filter => "filter",
        PluginKind::Scorer => "scorer",
        PluginKind::Picker => "picker",
        PluginKind::ProfileHandler => "profile handler",
        PluginKind::Decider => "decider",
        PluginKind::Detector => "detector",
        PluginKind::Admitter => "admitter",
        PluginKind::Fairness => "fairness policy",
        PluginKind::Ordering => "ordering policy",
        PluginKind::UsageLimit => "usage limit policy",
        PluginKind::FlowControl => "flow control",
        PluginKind::Producer => "producer",
        PluginKind::Parser => "parser",
    }
}

// === impl PluginRole ===

impl PluginRole {
    /// Returns the role of a plugin type; `None` if there is no such type.
    #[must_use]
    pub fn from_plugin_type(plugin_type: &str) -> Option<Self> {
        match registry::lookup(plugin_type) {
            Some(row) => Some(Self::Scheduling(row.kind)),
            None => foreign(plugin_type).map(|row| row.role),
        }
    }

    /// Returns whether a reference may name this type although it is not declared, because llm-d
    /// creates it.
    #[must_use]
    pub fn made_on_demand(self, plugin_type: &str) -> bool {
        match self {
            Self::Scheduling(
                PluginKind::Parser
                | PluginKind::Producer
                | PluginKind::Fairness
                | PluginKind::Ordering
                | PluginKind::UsageLimit,
            ) => Self::from_plugin_type(plugin_type) == Some(self),
            Self::Scheduling(PluginKind::Detector) => {
                matches!(plugin_type, "utilization-detector" | "backlog-detector")
            }
            Self::Extractor => plugin_type == "core-metrics-extractor",
            _ => false,
        }
    }
}

impl fmt::Display for PluginRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scheduling(PluginKind::Detector) => "a saturation detector",
            Self::Scheduling(PluginKind::FlowControl) => "the section flowControl",
            Self::Scheduling(kind) => {
                let kind = kind_name(*kind);
                let article = if kind.starts_with(['a', 'o']) {
                    "an"
                } else {
                    "a"
                };
                return write!(f, "{article} {kind}");
            }
            Self::Source => "a data source",
            Self::Extractor => "an extractor",
            Self::Discovery => "a discovery plugin",
            Self::Peers => "a peer discovery plugin",
            Self::Syncer => "a cross-replica syncer",
            Self::Unreferred => "a plugin without references",
        })
    }
}
