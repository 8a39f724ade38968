//! What the reference has and we do not run as such: one table, so that every name is answered for.

use std::fmt;

use scheduler::registry::{self, Kind};

/// What becomes of an item that is not implemented as such.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It does what it says, as part of something that is not a plugin here.
    Implemented(&'static str),
    /// What it does happens here anyway, or cannot matter; for this reason.
    NoEffect(&'static str),
    /// It would change decisions and is not there, for the reason; use the second instead.
    Refused(&'static str, &'static str),
}
use Fate::{Implemented, NoEffect, Refused};

/// What a plugin is for: what may refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// One that schedules.
    Scheduling(Kind),
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
    /// `flowControl.priorityBands[].fairnessPolicyRef`.
    Fairness,
    /// `flowControl.priorityBands[].orderingPolicyRef`.
    Ordering,
    /// `flowControl.usageLimitPolicyPluginRef`.
    UsageLimit,
    /// What the reference would run by its declaration alone.
    Unreferred,
}

/// A plugin type of the reference that is not one of [`registry::PLUGINS`].
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    /// Its `type`.
    pub name: &'static str,
    /// What it is for.
    pub role: Role,
    /// What becomes of it.
    pub fate: Fate,
}

const NOT_YET: &str = "not implemented in this version";
const NO_QUEUE: &str = "requests are not queued in the proxy in this version";
const NO_EVENTS: &str = "engines' KV events are not read in this version";

const SCORER: Role = Role::Scheduling(Kind::Scorer);
const FILTER: Role = Role::Scheduling(Kind::Filter);
const HANDLER: Role = Role::Scheduling(Kind::ProfileHandler);
const PRODUCER_ROLE: Role = Role::Scheduling(Kind::Producer);

/// Sources: llm-d-router `cmd/epp/runner/runner.go` (`registerInTreePlugins`), v0.10 and what came after it.
#[rustfmt::skip] // a table
pub const FOREIGN: &[Foreign] = &[
    row("metrics-data-source", Role::Source, Implemented("where endpoints are scraped; applies whether declared or not")),
    row("core-metrics-extractor", Role::Extractor, Implemented("which engine metrics are read; applies whether declared or not")),
    row("file-discovery", Role::Discovery, NoEffect("endpoints come from --endpoints-file")),
    row("k8s-notification-source", Role::Source, NoEffect("discovery watches its source itself")),
    row("endpoint-notification-source", Role::Source, NoEffect("discovery watches its source itself")),
    row("local-syncer", Role::Syncer, NoEffect("proxies share their state through the daemon")),
    row("disagg-headers-handler", Role::Unreferred, NoEffect("disagg-profile-handler sets the headers itself")),
    row("prefill-header-handler", Role::Unreferred, NoEffect("disagg-profile-handler sets the headers itself")),

    row("tokenizer", PRODUCER_ROLE, Refused("deprecated in llm-d-router", "token-producer")),
    row("pd-profile-handler", HANDLER, Refused("deprecated in llm-d-router", "disagg-profile-handler, its deciders.prefill for deciderPluginName")),
    row("precise-prefix-cache-scorer", SCORER, Refused(NO_EVENTS, "prefix-cache-scorer")),
    row("precise-prefix-cache-producer", Role::Extractor, Refused(NO_EVENTS, "approx-prefix-cache-producer: its index is corrected by cached_tokens")),
    row("burst-prefix-cache-producer", Role::Unreferred, Refused(NOT_YET, "approx-prefix-cache-producer: its index changes at the pick, so requests of a burst find each other")),
    row("multicluster-approx-prefix-cache-producer", Role::Unreferred, Refused(NOT_YET, "approx-prefix-cache-producer in a pool for each cluster (--pools)")),
    row("mm-embeddings-cache-scorer", SCORER, Refused(NOT_YET, "prefix-cache-scorer")),
    row("mm-embeddings-cache-producer", Role::Extractor, Refused(NOT_YET, "approx-prefix-cache-producer")),
    row("session-id-producer", Role::Unreferred, Refused(NOT_YET, "session-affinity-scorer with sources, which reads the header itself")),
    row("label-producer", Role::Unreferred, Refused(NOT_YET, "label-selector-filter or header-label-affinity-scorer, which read labels themselves")),
    row("endpoint-attribute-weight-scorer", SCORER, Refused(NOT_YET, "endpoint-attribute-scorer")),
    row("topology-affinity-scorer", SCORER, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("topology-affinity-filter", FILTER, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("topology-extractor", Role::Extractor, Refused(NOT_YET, "a pool for each zone (--pools)")),
    row("multicluster-queue-scorer", SCORER, Refused(NOT_YET, "queue-scorer in a pool for each cluster (--pools)")),
    row("multicluster-kv-cache-utilization-scorer", SCORER, Refused(NOT_YET, "kv-cache-utilization-scorer in a pool for each cluster (--pools)")),
    row("multicluster-prefix-cache-scorer", SCORER, Refused(NOT_YET, "prefix-cache-scorer in a pool for each cluster (--pools)")),
    row("multicluster-session-affinity-filter", FILTER, Refused(NOT_YET, "session-affinity-filter in a pool for each cluster (--pools)")),
    row("multicluster-metrics-data-source", Role::Source, Refused(NOT_YET, "metrics-data-source in a pool for each cluster (--pools)")),
    row("multicluster-metrics-extractor", Role::Extractor, Refused(NOT_YET, "core-metrics-extractor in a pool for each cluster (--pools)")),
    row("multicluster-file-discovery", Role::Discovery, Refused(NOT_YET, "file-discovery: a pool for each cluster (--pools)")),
    row("p2p-source-producer", Role::Unreferred, Refused(NOT_YET, "prefix-cache-scorer")),
    row("disaggregatedset-rollout-screener", Role::Unreferred, Refused(NOT_YET, "a pool for each revision (--pools)")),
    row("disaggregatedset-rollout-pod-extractor", Role::Extractor, Refused(NOT_YET, "a pool for each revision (--pools)")),
    row("reserve-endpoint", Role::Unreferred, Refused(NOT_YET, "label-selector-filter")),
    row("prefill-pin-screener", Role::Unreferred, Refused(NOT_YET, "session-affinity-filter in the prefill profile")),
    row("request-attribute-reporter", Role::Unreferred, Refused(NOT_YET, "Envoy's access log, which has the token counts")),
    row("models-responder", Role::Unreferred, Refused(NOT_YET, "a model server, which answers /v1/models itself")),
    row("models-data-source", Role::Source, Refused(NOT_YET, "a pool for each model (--pools)")),
    row("models-data-extractor", Role::Extractor, Refused(NOT_YET, "a pool for each model (--pools)")),
    row("dcgm-data-source", Role::Source, Refused(NOT_YET, "metrics-data-source: engines report their own load")),
    row("dcgm-extractor", Role::Extractor, Refused(NOT_YET, "core-metrics-extractor with customMetrics")),
    row("global-strict-fairness-policy", Role::Fairness, Refused(NO_QUEUE, "nothing; leave it out")),
    row("round-robin-fairness-policy", Role::Fairness, Refused(NO_QUEUE, "nothing; leave it out")),
    row("program-aware-fairness", Role::Fairness, Refused(NO_QUEUE, "nothing; leave it out")),
    row("program-aware-fairness-policy", Role::Fairness, Refused(NO_QUEUE, "nothing; leave it out")),
    row("fcfs-ordering-policy", Role::Ordering, Refused(NO_QUEUE, "nothing; leave it out")),
    row("edf-ordering-policy", Role::Ordering, Refused(NO_QUEUE, "nothing; leave it out")),
    row("slo-deadline-ordering-policy", Role::Ordering, Refused(NO_QUEUE, "nothing; leave it out")),
    row("static-usage-limit-policy", Role::UsageLimit, Refused(NO_QUEUE, "the thresholds of utilization-detector")),
    row("priority-holdback-policy", Role::UsageLimit, Refused(NO_QUEUE, "probabilistic-admitter")),
    row("soft-reflective-ceiling-policy", Role::UsageLimit, Refused(NO_QUEUE, "probabilistic-admitter")),
    row("sheddable-eviction-filter", Role::Unreferred, Refused(NO_QUEUE, "nothing; leave it out")),
    row("eviction-sheddable-filter", Role::Unreferred, Refused(NO_QUEUE, "nothing; leave it out")),
    row("priority-then-time-eviction-order-policy", Role::Unreferred, Refused(NO_QUEUE, "nothing; leave it out")),
    row("eviction-priority-then-time-ordering", Role::Unreferred, Refused(NO_QUEUE, "nothing; leave it out")),
    row("header-based-testing-filter", FILTER, Refused("only llm-d-router's tests use it", "the subset hint of the Endpoint Picker Protocol")),
    row("destination-endpoint-served-verifier", Role::Unreferred, Refused("only llm-d-router's tests use it", "Envoy's access log, which names the served endpoint")),
];

/// Feature gates of the reference and what becomes of each when on.
pub const FEATURE_GATES: &[(&str, Fate)] = &[
    ("flowControl", Refused(NO_QUEUE, "engines' own queues, balanced by queue-scorer, and shedding by saturationDetector")),
    ("haPopulateNonLeaderDatastore", NoEffect("standby daemons follow discovery anyway")),
];

/// Parameters of our types that the scheduler does not know: type, parameter, and what becomes of it.
pub const PARAMETERS: &[(&str, &str, Fate)] = &[
    ("token-producer", "vllm", Refused("no other server is asked for tokens", "the estimate, which is the default")),
    ("token-producer", "modelName", NoEffect("tokens are estimated, whatever the model")),
    ("predicted-latency-producer", "contextTTL", NoEffect("a request is forgotten when it ends, however it ends")),
];

/// How the doc of a parameter begins that is checked and changes nothing.
pub const NO_EFFECT: &str = "no effect: ";

/// Parameters that name something else in the file: type (empty: any), way to the parameter, and what it names. All there are lead from a handler to
/// its deciders and profiles, or from a scorer to its producer, none back: a cycle cannot be written, it is a reference of the wrong kind.
pub const REFERENCES: &[(&str, &[&str], Target)] = &[
    ("disagg-profile-handler", &["deciders", "prefill"], DECIDER),
    ("disagg-profile-handler", &["deciders", "encode"], DECIDER),
    ("disagg-profile-handler", &["profiles", "decode"], Target::Profile),
    ("disagg-profile-handler", &["profiles", "prefill"], Target::Profile),
    ("disagg-profile-handler", &["profiles", "encode"], Target::Profile),
    ("header-profile-handler", &["defaultProfile"], Target::Profile),
    ("slo-aware-profile-handler", &["defaultProfile"], Target::Profile),
    ("slo-aware-profile-handler", &["sloProfile"], Target::Profile),
    ("", &["prefixMatchInfoProducerName"], PRODUCER),
    ("", &["inFlightLoadProducerName"], PRODUCER),
    ("", &["latencyPredictionInfoProducerName"], PRODUCER),
    ("endpoint-attribute-scorer", &["producer"], Target::Plugin(Role::Extractor)),
    ("endpoint-attribute-filter", &["producer"], Target::Plugin(Role::Extractor)),
];

/// What a parameter names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A declared plugin.
    Plugin(Role),
    /// A profile.
    Profile,
}

const DECIDER: Target = Target::Plugin(Role::Scheduling(Kind::Decider));
const PRODUCER: Target = Target::Plugin(PRODUCER_ROLE);

const fn row(name: &'static str, role: Role, fate: Fate) -> Foreign {
    Foreign { name, role, fate }
}

/// The type of the reference of that name that is not ours.
#[must_use]
pub fn foreign(plugin_type: &str) -> Option<&'static Foreign> {
    FOREIGN.iter().find(|row| row.name == plugin_type)
}

/// Every plugin type there is an answer for.
pub fn plugin_types() -> impl Iterator<Item = &'static str> + Clone {
    registry::PLUGINS.iter().map(|row| row.name).chain(FOREIGN.iter().map(|row| row.name))
}

// === impl Role ===

impl Role {
    /// What that plugin type is for; `None` when there is no such type.
    #[must_use]
    pub fn of(plugin_type: &str) -> Option<Self> {
        match registry::lookup(plugin_type) {
            Some(row) => Some(Self::Scheduling(row.kind)),
            None => foreign(plugin_type).map(|row| row.role),
        }
    }

    /// Types that a reference may name without declaring them: the reference makes those.
    #[must_use]
    pub fn made_on_demand(self, plugin_type: &str) -> bool {
        match self {
            Self::Scheduling(Kind::Parser | Kind::Producer) | Self::Fairness | Self::Ordering | Self::UsageLimit => {
                Self::of(plugin_type) == Some(self)
            }
            Self::Scheduling(Kind::Detector) => plugin_type == "utilization-detector",
            Self::Extractor => plugin_type == "core-metrics-extractor",
            _ => false,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scheduling(Kind::Filter) => "a filter",
            Self::Scheduling(Kind::Scorer) => "a scorer",
            Self::Scheduling(Kind::Picker) => "a picker",
            Self::Scheduling(Kind::ProfileHandler) => "a profile handler",
            Self::Scheduling(Kind::Decider) => "a decider",
            Self::Scheduling(Kind::Detector) => "a saturation detector",
            Self::Scheduling(Kind::Admitter) => "an admitter",
            Self::Scheduling(Kind::Producer) => "a producer",
            Self::Scheduling(Kind::Parser) => "a parser",
            Self::Source => "a data source",
            Self::Extractor => "an extractor",
            Self::Discovery => "a discovery",
            Self::Peers => "a discovery of peers",
            Self::Syncer => "a cross-replica syncer",
            Self::Fairness => "a fairness policy",
            Self::Ordering => "an ordering policy",
            Self::UsageLimit => "a usage limit policy",
            Self::Unreferred => "nothing that is referred to",
        })
    }
}
