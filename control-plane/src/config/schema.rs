//! The shape of the file beside its plugins and profiles: ONE table, so that every field is known, typed and answered for in each dialect.
//!
//! Sources: llm-d-router `apix/config/v1alpha1/endpointpickerconfig_types.go`; for `llm-d.ai/v1` what its loader's conversion moves.

use scheduler::registry::Kind;

use super::known::{Fate, Role};

/// A dialect of the file, by `apiVersion`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `llm-d.ai/v1`.
    V1,
    /// `llm-d.ai/v1alpha1`, and its older name `inference.networking.x-k8s.io/v1alpha1`.
    V1Alpha1,
}

/// The dialects spoken.
pub const API_VERSIONS: [(&str, Dialect); 3] =
    [("llm-d.ai/v1", Dialect::V1), ("llm-d.ai/v1alpha1", Dialect::V1Alpha1), ("inference.networking.x-k8s.io/v1alpha1", Dialect::V1Alpha1)];

/// The one kind of file there is.
pub const KIND: &str = "EndpointPickerConfig";

/// A field that a map may have.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its key.
    pub name: &'static str,
    /// What stands there.
    pub shape: Shape,
    /// Must it be there?
    pub required: bool,
    /// What becomes of it; `None`: whoever reads it, or the fields within, say so.
    pub fate: Option<Fate>,
    /// The one dialect that has it, if not all do, and where the others have it (`""`: nowhere).
    pub only: Option<(Dialect, &'static str)>,
}

/// What may stand at a field.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// Read by a function of its own.
    Own,
    /// true or false.
    Flag,
    /// A whole number.
    Integer,
    /// A quantity as Kubernetes writes it: `5000`, `1k`, `10Gi`.
    Quantity,
    /// A time as Go writes it: `60s`, `1m30s`.
    Duration,
    /// The name of a declared plugin of that role.
    Reference(Role),
    /// A list of such.
    List(&'static Shape),
    /// These fields.
    Map(&'static [Field]),
}

/// Without the feature gate these do nothing at the reference either; with it the gate itself is refused.
const QUEUES: Fate = Fate::NoEffect("it counts only with the feature gate flowControl, which is refused");
const SCRAPES: Fate = Fate::NoEffect("the daemon scrapes every endpoint by itself");
const SHARES: Fate = Fate::NoEffect("proxies share their state through the daemon");
const DISCOVERS: Fate = Fate::NoEffect("endpoints come from --endpoints-file, --endpoint or --pools");

/// The whole file.
pub const FILE: &[Field] = &[
    own("apiVersion"),
    own("kind"),
    own("featureGates"),
    own("plugins"),
    own("schedulingProfiles"),
    answered_within("dataLayer", Shape::Map(DATA_LAYER)),
    answered_within("flowControl", Shape::Map(FLOW_CONTROL)),
    answered_within("requestHandler", Shape::Map(REQUEST_HANDLER)),
    Field { only: Some((Dialect::V1Alpha1, "flowControl.saturationDetector")), ..answered_within("saturationDetector", DETECTOR) },
    Field { only: Some((Dialect::V1Alpha1, "requestHandler.parsers")), ..answered_within("parser", PARSER) },
];

const DATA_LAYER: &[Field] = &[
    field("injectDefaults", Shape::Flag, SCRAPES),
    field("sources", Shape::List(&Shape::Map(SOURCE)), SCRAPES),
    answered_within("discovery", Shape::Map(DISCOVERY)),
    older("peerDiscovery", Shape::Map(&[reference("pluginRef", Role::Peers)]), SHARES, "dataLayer.discovery.peers"),
    older("crossReplicaSyncerPluginRef", Shape::Reference(Role::Syncer), SHARES, "dataLayer.crossReplica.syncerPluginRef"),
    older("crossReplicaSyncInterval", Shape::Duration, SHARES, "dataLayer.crossReplica.syncInterval"),
    older("crossReplicaPublishTimeout", Shape::Duration, SHARES, "dataLayer.crossReplica.publishTimeout"),
    newer("crossReplica", Shape::Map(CROSS_REPLICA), SHARES, "dataLayer.crossReplicaSyncerPluginRef and its neighbours"),
];

const SOURCE: &[Field] = &[
    reference("pluginRef", Role::Source),
    answered_within("extractors", Shape::List(&Shape::Map(&[reference("pluginRef", Role::Extractor)]))),
];

const DISCOVERY: &[Field] = &[
    older("pluginRef", Shape::Reference(Role::Discovery), DISCOVERS, "dataLayer.discovery.endpoints.pluginRef"),
    newer("endpoints", Shape::Map(&[reference("pluginRef", Role::Discovery)]), DISCOVERS, "dataLayer.discovery.pluginRef"),
    newer("peers", Shape::Map(&[reference("pluginRef", Role::Peers)]), SHARES, "dataLayer.peerDiscovery"),
];

const CROSS_REPLICA: &[Field] = &[
    optional("syncerPluginRef", Role::Syncer),
    answered_within("syncInterval", Shape::Duration),
    answered_within("publishTimeout", Shape::Duration),
];

const FLOW_CONTROL: &[Field] = &[
    field("maxBytes", Shape::Quantity, QUEUES),
    field("maxRequests", Shape::Quantity, QUEUES),
    field("defaultRequestTTL", Shape::Duration, QUEUES),
    field("noEndpointRequestTTL", Shape::Duration, QUEUES),
    field("defaultPriorityBand", Shape::Map(BAND), QUEUES),
    field("defaultNegativePriorityBand", Shape::Map(BAND), QUEUES),
    field("priorityBands", Shape::List(&Shape::Map(BAND)), QUEUES),
    field("usageLimitPolicyPluginRef", Shape::Reference(Role::UsageLimit), QUEUES),
    answered_within("saturationDetector", DETECTOR),
    field("enableEviction", Shape::Flag, QUEUES),
];

const BAND: &[Field] = &[
    answered_within("priority", Shape::Integer),
    answered_within("maxBytes", Shape::Quantity),
    answered_within("maxRequests", Shape::Quantity),
    optional("fairnessPolicyRef", Role::Fairness),
    optional("orderingPolicyRef", Role::Ordering),
    Field { only: Some((Dialect::V1, "")), ..answered_within("defaultRequestTTL", Shape::Duration) },
];

const REQUEST_HANDLER: &[Field] = &[
    answered_within("parsers", Shape::List(&PARSER)),
    newer("propagatePriority", Shape::Flag, Fate::NoEffect("headers of a client's priority stay on the request; none is added"), ""),
];

const DETECTOR: Shape = Shape::Map(&[optional("pluginRef", Role::Scheduling(Kind::Detector))]);
const PARSER: Shape = Shape::Map(&[reference("pluginRef", Role::Scheduling(Kind::Parser))]);

const fn own(name: &'static str) -> Field {
    answered_within(name, Shape::Own)
}

const fn answered_within(name: &'static str, shape: Shape) -> Field {
    Field { name, shape, required: false, fate: None, only: None }
}

const fn field(name: &'static str, shape: Shape, fate: Fate) -> Field {
    Field { fate: Some(fate), ..answered_within(name, shape) }
}

const fn reference(name: &'static str, role: Role) -> Field {
    Field { required: true, ..optional(name, role) }
}

const fn optional(name: &'static str, role: Role) -> Field {
    answered_within(name, Shape::Reference(role))
}

const fn older(name: &'static str, shape: Shape, fate: Fate, now: &'static str) -> Field {
    Field { only: Some((Dialect::V1Alpha1, now)), ..field(name, shape, fate) }
}

const fn newer(name: &'static str, shape: Shape, fate: Fate, before: &'static str) -> Field {
    Field { only: Some((Dialect::V1, before)), ..field(name, shape, fate) }
}

// === impl Shape ===

impl Shape {
    /// Is this text a quantity: digits, perhaps a point, perhaps a suffix?
    #[must_use]
    pub fn is_quantity(text: &str) -> bool {
        const SUFFIXES: [&str; 14] = ["m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", ""];
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        number.parse::<f64>().is_ok() && SUFFIXES.contains(&suffix)
    }

    /// Is this text a time: numbers, each with its unit, or a bare 0?
    #[must_use]
    pub fn is_duration(text: &str) -> bool {
        const UNITS: [&str; 7] = ["ns", "us", "µs", "ms", "s", "m", "h"];
        let mut rest = text;
        while !rest.is_empty() {
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
            let (number, behind) = rest.split_at(end);
            let end = behind.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(behind.len());
            let (unit, next) = behind.split_at(end);
            if number.parse::<f64>().is_err() || !UNITS.contains(&unit) {
                return text == "0";
            }
            rest = next;
        }
        !text.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_and_times_are_told_from_other_text() {
        for good in ["0", "5000", "1k", "10Gi", "1.5M", "250m"] {
            assert!(Shape::is_quantity(good), "{good}");
        }
        for bad in ["", "k", "1 k", "1kb", "ten", "-1", "1.2.3"] {
            assert!(!Shape::is_quantity(bad), "{bad}");
        }
        for good in ["0", "0s", "60s", "1m30s", "1.5h", "100ms"] {
            assert!(Shape::is_duration(good), "{good}");
        }
        for bad in ["", "s", "60", "1 s", "1d", "1m30", "-1s"] {
            assert!(!Shape::is_duration(bad), "{bad}");
        }
    }
}
