//! The shape of the file except plugins and profiles. It is one table, so that every field has a
//! type and an answer in each dialect.
//!
//! Sources: llm-d-router `apix/config/v1alpha1/endpointpickerconfig_types.go`; for `llm-d.ai/v1`
//! the fields that the conversion of its loader moves.

use scheduler::registry::PluginKind;

use super::reference_items::{ItemSupport, PluginRole};

/// A dialect of the file, by `apiVersion`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigDialect {
    /// `llm-d.ai/v1`.
    V1,
    /// `llm-d.ai/v1alpha1`, and its older name `inference.networking.x-k8s.io/v1alpha1`.
    V1Alpha1,
}

/// The dialects that can be read.
pub const API_VERSIONS: [(&str, ConfigDialect); 3] = [
    ("llm-d.ai/v1", ConfigDialect::V1),
    ("llm-d.ai/v1alpha1", ConfigDialect::V1Alpha1),
    ("inference.networking.x-k8s.io/v1alpha1", ConfigDialect::V1Alpha1),
];

/// The kind of the file.
pub const KIND: &str = "EndpointPickerConfig";

/// A field that a map may have.
#[derive(Clone, Copy, Debug)]
pub struct SchemaField {
    /// The key of the field.
    pub name: &'static str,
    /// The value.
    pub shape: SchemaShape,
    /// Whether the field is required.
    pub required: bool,
    /// The answer for the field; `None` if the function that reads it, or its own fields, give one.
    pub fate: Option<ItemSupport>,
    /// The only dialect that has the field, and the path of the counterpart in the other (`""`:
    /// none).
    pub only: Option<(ConfigDialect, &'static str)>,
}

/// The shape of a field.
#[derive(Clone, Copy, Debug)]
pub enum SchemaShape {
    /// Read by a function of its own, not by the table.
    Own,
    /// true or false.
    Flag,
    /// A whole number.
    Integer,
    /// A quantity as Kubernetes writes it: `5000`, `1k`, `10Gi`.
    Quantity,
    /// A duration as Go writes it: `60s`, `1m30s`.
    Duration,
    /// The name of a declared plugin of that role.
    Reference(PluginRole),
    /// A list of values of this shape.
    List(&'static SchemaShape),
    /// A map with these fields.
    Map(&'static [SchemaField]),
}

/// In llm-d these have no effect without the feature gate either, and the gate itself is refused.
const QUEUES: ItemSupport = ItemSupport::NoEffect("it counts only with the feature gate flowControl, which is refused");
const SCRAPES: ItemSupport = ItemSupport::NoEffect("the daemon scrapes every endpoint by itself");
const SHARES: ItemSupport = ItemSupport::NoEffect("proxies share their state through the daemon");
const DISCOVERS: ItemSupport = ItemSupport::NoEffect("endpoints come from --endpoints-file, --endpoint or --pools");

/// The whole file.
pub const FILE: &[SchemaField] = &[
    own("apiVersion"),
    own("kind"),
    own("featureGates"),
    own("plugins"),
    own("schedulingProfiles"),
    answered_within("dataLayer", SchemaShape::Map(DATA_LAYER)),
    answered_within("flowControl", SchemaShape::Map(FLOW_CONTROL)),
    answered_within("requestHandler", SchemaShape::Map(REQUEST_HANDLER)),
    SchemaField {
        only: Some((ConfigDialect::V1Alpha1, "flowControl.saturationDetector")),
        ..answered_within("saturationDetector", DETECTOR)
    },
    SchemaField { only: Some((ConfigDialect::V1Alpha1, "requestHandler.parsers")), ..answered_within("parser", PARSER) },
];

const DATA_LAYER: &[SchemaField] = &[
    field("injectDefaults", SchemaShape::Flag, SCRAPES),
    field("sources", SchemaShape::List(&SchemaShape::Map(SOURCE)), SCRAPES),
    answered_within("discovery", SchemaShape::Map(DISCOVERY)),
    older("peerDiscovery", SchemaShape::Map(&[reference("pluginRef", PluginRole::Peers)]), SHARES, "dataLayer.discovery.peers"),
    older("crossReplicaSyncerPluginRef", SchemaShape::Reference(PluginRole::Syncer), SHARES, "dataLayer.crossReplica.syncerPluginRef"),
    older("crossReplicaSyncInterval", SchemaShape::Duration, SHARES, "dataLayer.crossReplica.syncInterval"),
    older("crossReplicaPublishTimeout", SchemaShape::Duration, SHARES, "dataLayer.crossReplica.publishTimeout"),
    newer("crossReplica", SchemaShape::Map(CROSS_REPLICA), SHARES, "dataLayer.crossReplicaSyncerPluginRef and its neighbours"),
];

const SOURCE: &[SchemaField] = &[
    reference("pluginRef", PluginRole::Source),
    answered_within("extractors", SchemaShape::List(&SchemaShape::Map(&[reference("pluginRef", PluginRole::Extractor)]))),
];

const DISCOVERY: &[SchemaField] = &[
    older("pluginRef", SchemaShape::Reference(PluginRole::Discovery), DISCOVERS, "dataLayer.discovery.endpoints.pluginRef"),
    newer("endpoints", SchemaShape::Map(&[reference("pluginRef", PluginRole::Discovery)]), DISCOVERS, "dataLayer.discovery.pluginRef"),
    newer("peers", SchemaShape::Map(&[reference("pluginRef", PluginRole::Peers)]), SHARES, "dataLayer.peerDiscovery"),
];

const CROSS_REPLICA: &[SchemaField] = &[
    optional("syncerPluginRef", PluginRole::Syncer),
    answered_within("syncInterval", SchemaShape::Duration),
    answered_within("publishTimeout", SchemaShape::Duration),
];

const FLOW_CONTROL: &[SchemaField] = &[
    field("maxBytes", SchemaShape::Quantity, QUEUES),
    field("maxRequests", SchemaShape::Quantity, QUEUES),
    field("defaultRequestTTL", SchemaShape::Duration, QUEUES),
    field("noEndpointRequestTTL", SchemaShape::Duration, QUEUES),
    field("defaultPriorityBand", SchemaShape::Map(BAND), QUEUES),
    field("defaultNegativePriorityBand", SchemaShape::Map(BAND), QUEUES),
    field("priorityBands", SchemaShape::List(&SchemaShape::Map(BAND)), QUEUES),
    field("usageLimitPolicyPluginRef", SchemaShape::Reference(PluginRole::UsageLimit), QUEUES),
    answered_within("saturationDetector", DETECTOR),
    field("enableEviction", SchemaShape::Flag, QUEUES),
];

const BAND: &[SchemaField] = &[
    answered_within("priority", SchemaShape::Integer),
    answered_within("maxBytes", SchemaShape::Quantity),
    answered_within("maxRequests", SchemaShape::Quantity),
    optional("fairnessPolicyRef", PluginRole::Fairness),
    optional("orderingPolicyRef", PluginRole::Ordering),
    SchemaField { only: Some((ConfigDialect::V1, "")), ..answered_within("defaultRequestTTL", SchemaShape::Duration) },
];

const REQUEST_HANDLER: &[SchemaField] = &[
    answered_within("parsers", SchemaShape::List(&PARSER)),
    newer(
        "propagatePriority",
        SchemaShape::Flag,
        ItemSupport::NoEffect("headers of a client's priority stay on the request; none is added"),
        "",
    ),
];

const DETECTOR: SchemaShape = SchemaShape::Map(&[optional("pluginRef", PluginRole::Scheduling(PluginKind::Detector))]);
const PARSER: SchemaShape = SchemaShape::Map(&[reference("pluginRef", PluginRole::Scheduling(PluginKind::Parser))]);

const fn own(name: &'static str) -> SchemaField {
    answered_within(name, SchemaShape::Own)
}

const fn answered_within(name: &'static str, shape: SchemaShape) -> SchemaField {
    SchemaField { name, shape, required: false, fate: None, only: None }
}

const fn field(name: &'static str, shape: SchemaShape, fate: ItemSupport) -> SchemaField {
    SchemaField { fate: Some(fate), ..answered_within(name, shape) }
}

const fn reference(name: &'static str, role: PluginRole) -> SchemaField {
    SchemaField { required: true, ..optional(name, role) }
}

const fn optional(name: &'static str, role: PluginRole) -> SchemaField {
    answered_within(name, SchemaShape::Reference(role))
}

const fn older(name: &'static str, shape: SchemaShape, fate: ItemSupport, now: &'static str) -> SchemaField {
    SchemaField { only: Some((ConfigDialect::V1Alpha1, now)), ..field(name, shape, fate) }
}

const fn newer(name: &'static str, shape: SchemaShape, fate: ItemSupport, before: &'static str) -> SchemaField {
    SchemaField { only: Some((ConfigDialect::V1, before)), ..field(name, shape, fate) }
}

// === impl SchemaShape ===

impl SchemaShape {
    /// Whether the text is a quantity: digits, optionally a decimal point, optionally a suffix.
    #[must_use]
    pub fn is_quantity(text: &str) -> bool {
        const SUFFIXES: [&str; 14] = ["m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", ""];
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        number.parse::<f64>().is_ok() && SUFFIXES.contains(&suffix)
    }

    /// Whether the text is a duration: numbers, each with its unit, or a bare 0.
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
    fn quantities_and_times_are_distinguished_from_other_text() {
        for good in ["0", "5000", "1k", "10Gi", "1.5M", "250m"] {
            assert!(SchemaShape::is_quantity(good), "{good}");
        }
        for bad in ["", "k", "1 k", "1kb", "ten", "-1", "1.2.3"] {
            assert!(!SchemaShape::is_quantity(bad), "{bad}");
        }
        for good in ["0", "0s", "60s", "1m30s", "1.5h", "100ms"] {
            assert!(SchemaShape::is_duration(good), "{good}");
        }
        for bad in ["", "s", "60", "1 s", "1d", "1m30", "-1s"] {
            assert!(!SchemaShape::is_duration(bad), "{bad}");
        }
    }
}
