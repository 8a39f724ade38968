//! The table of llm-d's items without a counterpart here, so that every known name has an answer.

use std::fmt;

use scheduler::registry::{self, PluginKind};

/// The answer for an item without a counterpart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemSupport {
    /// Implemented here by something that is not a plugin.
    Implemented(&'static str),
    /// Implemented with the feature gate `flowControl`, without effect otherwise.
    FlowControl(&'static str),
    /// The item has no effect here; the text is the reason.
    NoEffect(&'static str),
    /// The item would change decisions and is not available. The first text is the reason, the
    /// second names what to use instead.
    Refused(&'static str, &'static str),
}
use ItemSupport::{Implemented, NoEffect, Refused};

/// The role of a plugin, which decides which items may refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginRole {
    /// A scheduling plugin.
    Scheduling(PluginKind),
    /// `dataLayer.sources[]`.
    Source,
    /// `dataLayer.sources[].extractors[]`.
    Extractor,
    /// `dataLayer.discovery`.
    Discovery,
    /// `dataLayer.discovery.peers`.
    Peers,
    /// `dataLayer.crossReplica`.
    Syncer,
    /// No item refers to the plugin: llm-d runs it when it is declared.
    Unreferred,
}

/// A plugin type of llm-d that is not in [`registry::PLUGINS`].
#[derive(Clone, Copy, Debug)]
pub struct ReferencePlugin {
    /// The `type` of the plugin.
    pub name: &'static str,
    /// The role of the plugin.
    pub role: PluginRole,
    /// The answer.
    pub support: ItemSupport,
}

const NOT_YET: &str = "not implemented in this version";
/// Why the plugins of revocation have no effect.
const EVICTION: &str = "enableEviction has this rule: negative priorities only, the lowest first, then the newest";
const NO_EVENTS: &str = "engines' KV events are not read in this version";

const SCORER: PluginRole = PluginRole::Scheduling(PluginKind::Scorer);
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
    row("multicluster-approx-prefix-cache-producer", PluginRole::Unreferred, Refused(NOT_YET, "approx-prefix-cache-producer in a pool for each cluster (--pools)")),
    row("mm-embeddings-cache-scorer", SCORER, Refused(NOT_YET, "prefix-cache-scorer")),
    row("mm-embeddings-cache-producer", PluginRole::Extractor, Refused(NOT_YET, "approx-prefix-cache-producer")),
    row("session-id-producer", PluginRole::Unreferred, Refused(NOT_YET, "session-affinity-scorer with sources, which reads the header itself")),
    row("label-producer", PluginRole::Unreferred, Refused(NOT_YET, "label-selector-filter or header-label-affinity-scorer, which read labels themselves")),
    row("endpoint-attribute-weight-scorer", SCORER, Refused(NOT_YET, "endpoint-attribute-scorer")),
    row("topology-affinity-scorer", SCORER, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("topology-affinity-filter", FILTER, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("topology-extractor", PluginRole::Extractor, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("multicluster-queue-scorer", SCORER, Refused(NOT_YET, "queue-scorer in a pool for each cluster (--pools)")),
    row("multicluster-kv-cache-utilization-scorer", SCORER, Refused(NOT_YET, "kv-cache-utilization-scorer in a pool for each cluster (--pools)")),
    row("multicluster-prefix-cache-scorer", SCORER, Refused(NOT_YET, "prefix-cache-scorer in a pool for each cluster (--pools)")),
    row("multicluster-session-affinity-filter", FILTER, Refused(NOT_YET, "session-affinity-filter in a pool for each cluster (--pools)")),
    row("multicluster-metrics-data-source", PluginRole::Source, Refused(NOT_YET, "metrics-data-source in a pool for each cluster (--pools)")),
    row("multicluster-metrics-extractor", PluginRole::Extractor, Refused(NOT_YET, "core-metrics-extractor in a pool for each cluster (--pools)")),
    row("multicluster-file-discovery", PluginRole::Discovery, Refused(NOT_YET, "file-discovery: a pool for each cluster (--pools)")),
    row("p2p-source-producer", PluginRole::Unreferred, Refused(NOT_YET, "prefix-cache-scorer")),
    row("disaggregatedset-rollout-screener", PluginRole::Unreferred, Refused(NOT_YET, "a pool for each revision (--pools)")),
    row("disaggregatedset-rollout-pod-extractor", PluginRole::Extractor, Refused(NOT_YET, "a pool for each revision (--pools)")),
    row("reserve-endpoint", PluginRole::Unreferred, Refused(NOT_YET, "label-selector-filter")),
    row("prefill-pin-screener", PluginRole::Unreferred, Refused(NOT_YET, "session-affinity-filter in the prefill profile")),
    row("request-attribute-reporter", PluginRole::Unreferred, Refused(NOT_YET, "Envoy's access log, which has the token counts")),
    row("models-responder", PluginRole::Unreferred, Refused(NOT_YET, "a model server, which answers /v1/models itself")),
    row("models-data-source", PluginRole::Source, Refused(NOT_YET, "a pool for each model (--pools)")),
    row("models-data-extractor", PluginRole::Extractor, Refused(NOT_YET, "a pool for each model (--pools)")),
    row("dcgm-data-source", PluginRole::Source, Refused(NOT_YET, "metrics-data-source: engines report their own load")),
    row("dcgm-extractor", PluginRole::Extractor, Refused(NOT_YET, "core-metrics-extractor with customMetrics")),
    row("sheddable-eviction-filter", PluginRole::Unreferred, NoEffect(EVICTION)),
    row("eviction-sheddable-filter", PluginRole::Unreferred, NoEffect(EVICTION)),
    row("priority-then-time-eviction-order-policy", PluginRole::Unreferred, NoEffect(EVICTION)),
    row("eviction-priority-then-time-ordering", PluginRole::Unreferred, NoEffect(EVICTION)),
    row("header-based-testing-filter", FILTER, Refused("only llm-d-router's tests use it", "the subset hint of the Endpoint Picker Protocol")),
    row("destination-endpoint-served-verifier", PluginRole::Unreferred, Refused("only llm-d-router's tests use it", "Envoy's access log, which names the served endpoint")),
];

/// The feature gate of flow control.
pub const FLOW_CONTROL_GATE: &str = "flowControl";

/// The feature gates of llm-d, and the answer when a gate is on.
pub const FEATURE_GATES: &[(&str, ItemSupport)] = &[
    (FLOW_CONTROL_GATE, Implemented("requests wait in the proxy until an endpoint has room for them")),
    ("haPopulateNonLeaderDatastore", NoEffect("standby daemons follow discovery anyway")),
];

/// Parameters of implemented types that the scheduler does not have: type, parameter and answer.
pub const PARAMETERS: &[(&str, &str, ItemSupport)] = &[
    ("token-producer", "vllm", Refused("no external tokenizer is called", "the estimate, which is the default")),
    ("token-producer", "modelName", NoEffect("tokens are estimated in the same way for every model")),
    ("predicted-latency-producer", "contextTTL", NoEffect("the context of a request is dropped when the request ends")),
];

/// The first words of the doc of a parameter that is checked but has no effect.
pub const NO_EFFECT: &str = "no effect: ";

/// Parameters that name something else in the file: type (empty: any), path of the parameter, and
/// what it names. All of them lead from a handler to its deciders and profiles, or from a scorer to
/// its producer. No reference leads back, so a cycle always contains a reference of the wrong kind.
pub const REFERENCES: &[(&str, &[&str], ParameterReference)] = &[
    ("disagg-profile-handler", &["deciders", "prefill"], DECIDER),
    ("disagg-profile-handler", &["deciders", "encode"], DECIDER),
    ("disagg-profile-handler", &["profiles", "decode"], ParameterReference::Profile),
    ("disagg-profile-handler", &["profiles", "prefill"], ParameterReference::Profile),
    ("disagg-profile-handler", &["profiles", "encode"], ParameterReference::Profile),
    ("header-profile-handler", &["defaultProfile"], ParameterReference::Profile),
    ("slo-aware-profile-handler", &["defaultProfile"], ParameterReference::Profile),
    ("slo-aware-profile-handler", &["sloProfile"], ParameterReference::Profile),
    ("", &["prefixMatchInfoProducerName"], PRODUCER),
    ("", &["inFlightLoadProducerName"], PRODUCER),
    ("", &["latencyPredictionInfoProducerName"], PRODUCER),
    ("endpoint-attribute-scorer", &["producer"], ParameterReference::Plugin(PluginRole::Extractor)),
    ("endpoint-attribute-filter", &["producer"], ParameterReference::Plugin(PluginRole::Extractor)),
];

/// The kind of item that a parameter names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterReference {
    /// A declared plugin.
    Plugin(PluginRole),
    /// A profile.
    Profile,
}

const DECIDER: ParameterReference = ParameterReference::Plugin(PluginRole::Scheduling(PluginKind::Decider));
const PRODUCER: ParameterReference = ParameterReference::Plugin(PRODUCER_ROLE);

const fn row(name: &'static str, role: PluginRole, fate: ItemSupport) -> ReferencePlugin {
    ReferencePlugin { name, role, support: fate }
}

/// The entry of [`FOREIGN`] for a plugin type.
#[must_use]
pub fn foreign(plugin_type: &str) -> Option<&'static ReferencePlugin> {
    FOREIGN.iter().find(|row| row.name == plugin_type)
}

/// Every plugin type that has an answer.
pub fn plugin_types() -> impl Iterator<Item = &'static str> + Clone {
    registry::PLUGINS.iter().filter(|row| row.kind != PluginKind::FlowControl).map(|row| row.name).chain(FOREIGN.iter().map(|row| row.name))
}

// === impl PluginRole ===

impl PluginRole {
    /// The role of a plugin type; `None` if there is no such type.
    #[must_use]
    pub fn of(plugin_type: &str) -> Option<Self> {
        match registry::lookup(plugin_type) {
            Some(row) => Some(Self::Scheduling(row.kind)),
            None => foreign(plugin_type).map(|row| row.role),
        }
    }

    /// Whether a reference may name this type although it is not declared, because llm-d creates
    /// it.
    #[must_use]
    pub fn made_on_demand(self, plugin_type: &str) -> bool {
        match self {
            Self::Scheduling(
                PluginKind::Parser | PluginKind::Producer | PluginKind::Fairness | PluginKind::Ordering | PluginKind::UsageLimit,
            ) => Self::of(plugin_type) == Some(self),
            Self::Scheduling(PluginKind::Detector) => matches!(plugin_type, "utilization-detector" | "backlog-detector"),
            Self::Extractor => plugin_type == "core-metrics-extractor",
            _ => false,
        }
    }
}

impl fmt::Display for PluginRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scheduling(PluginKind::Filter) => "a filter",
            Self::Scheduling(PluginKind::Scorer) => "a scorer",
            Self::Scheduling(PluginKind::Picker) => "a picker",
            Self::Scheduling(PluginKind::ProfileHandler) => "a profile handler",
            Self::Scheduling(PluginKind::Decider) => "a decider",
            Self::Scheduling(PluginKind::Detector) => "a saturation detector",
            Self::Scheduling(PluginKind::Admitter) => "an admitter",
            Self::Scheduling(PluginKind::Fairness) => "a fairness policy",
            Self::Scheduling(PluginKind::Ordering) => "an ordering policy",
            Self::Scheduling(PluginKind::UsageLimit) => "a usage limit policy",
            Self::Scheduling(PluginKind::FlowControl) => "the section flowControl",
            Self::Scheduling(PluginKind::Producer) => "a producer",
            Self::Scheduling(PluginKind::Parser) => "a parser",
            Self::Source => "a data source",
            Self::Extractor => "an extractor",
            Self::Discovery => "a discovery plugin",
            Self::Peers => "a peer discovery plugin",
            Self::Syncer => "a cross-replica syncer",
            Self::Unreferred => "a plugin without references",
        })
    }
}
