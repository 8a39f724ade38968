//! A table with the type of every field of a configuration file, except plugins and profiles, and
//! with what is reported about the field in each dialect.
//!
//! Sources: llm-d-router `apix/config/v1alpha1/endpointpickerconfig_types.go`; for `llm-d.ai/v1`
//! the fields that llm-d's loader moves when it converts a file.

use scheduler::registry::PluginKind;

use super::reference_items::{ItemSupport, PluginRole};
use ItemSupport::{FlowControl, NoEffect, Refused};
use SchemaShape::{Duration, Flag, Integer, List, Map, Number, Own, Quantity, Reference};

/// A dialect of the file, by `apiVersion`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConfigDialect {
    /// `llm-d.ai/v1`.
    V1,
    /// `llm-d.ai/v1alpha1`, and its older name `inference.networking.x-k8s.io/v1alpha1`.
    #[default]
    V1Alpha1,
}

/// The dialects that can be read.
pub const API_VERSIONS: [(&str, ConfigDialect); 3] = [
    ("llm-d.ai/v1", ConfigDialect::V1),
    ("llm-d.ai/v1alpha1", ConfigDialect::V1Alpha1),
    (
        "inference.networking.x-k8s.io/v1alpha1",
        ConfigDialect::V1Alpha1,
    ),
];

pub const KIND: &str = "EndpointPickerConfig";

/// A field that a map may have.
#[derive(Clone, Copy, Debug)]
pub struct SchemaField {
    pub name: &'static str,
    /// The type of the value.
    pub shape: SchemaShape,
    pub required: bool,
    /// The report on the field. The value is `None` if the function that reads the field, or the
    /// entries of the fields inside it, report something.
    pub fate: Option<ItemSupport>,
    /// The only dialect that has the field, and the path of its counterpart in the other dialect
    /// (`""`: none).
    pub only: Option<(ConfigDialect, &'static str)>,
}

#[derive(Clone, Copy, Debug)]
pub enum SchemaShape {
    /// A separate function, not this table, checks the value.
    Own,
    Flag,
    Integer,
    Number,
    /// A quantity as Kubernetes writes it: `5000`, `1k`, `10Gi`.
    Quantity,
    /// A duration as Go writes it: `60s`, `1m30s`.
    Duration,
    /// The name of a declared plugin of that role.
    Reference(PluginRole),
    List(&'static SchemaShape),
    /// A map with these fields.
    Map(&'static [SchemaField]),
}

const SCRAPES: ItemSupport = NoEffect("the daemon scrapes every endpoint by itself");
const SHARES: ItemSupport = NoEffect("proxies share their state through the daemon");
const DISCOVERS: ItemSupport =
    NoEffect("endpoints come from --endpoints-file, --endpoint or --pools");

pub const FILE: &[SchemaField] = &[
    own("apiVersion"),
    own("kind"),
    field(
        "metadata",
        Own,
        NoEffect("the file is no Kubernetes object"),
    ),
    own("featureGates"),
    own("plugins"),
    own("schedulingProfiles"),
    answered_within("dataLayer", Map(DATA_LAYER)),
    answered_within("flowControl", Map(FLOW_CONTROL)),
    answered_within("requestHandler", Map(REQUEST_HANDLER)),
    SchemaField {
        only: Some((ConfigDialect::V1Alpha1, "flowControl.saturationDetector")),
        ..answered_within("saturationDetector", OLDER_DETECTOR)
    },
    older(
        "data",
        Map(&[answered_within("sources", List(&Map(SOURCE)))]),
        SCRAPES,
        "dataLayer",
    ),
    SchemaField {
        only: Some((ConfigDialect::V1Alpha1, "requestHandler.parsers")),
        ..answered_within("parser", PARSER)
    },
];

const DATA_LAYER: &[SchemaField] = &[
    field("injectDefaults", Flag, SCRAPES),
    field("sources", List(&Map(SOURCE)), SCRAPES),
    answered_within("discovery", Map(DISCOVERY)),
    older(
        "peerDiscovery",
        Map(&[reference("pluginRef", PluginRole::Peers)]),
        SHARES,
        "dataLayer.discovery.peers",
    ),
    older(
        "crossReplicaSyncerPluginRef",
        Reference(PluginRole::Syncer),
        SHARES,
        "dataLayer.crossReplica.syncerPluginRef",
    ),
    older(
        "crossReplicaSyncInterval",
        Duration,
        SHARES,
        "dataLayer.crossReplica.syncInterval",
    ),
    older(
        "crossReplicaPublishTimeout",
        Duration,
        SHARES,
        "dataLayer.crossReplica.publishTimeout",
    ),
    newer(
        "crossReplica",
        Map(CROSS_REPLICA),
        SHARES,
        "dataLayer.crossReplicaSyncerPluginRef and its neighbours",
    ),
];

const SOURCE: &[SchemaField] = &[
    reference("pluginRef", PluginRole::Source),
    answered_within(
        "extractors",
        List(&Map(&[reference("pluginRef", PluginRole::Extractor)])),
    ),
];

const DISCOVERY: &[SchemaField] = &[
    older(
        "pluginRef",
        Reference(PluginRole::Discovery),
        DISCOVERS,
        "dataLayer.discovery.endpoints.pluginRef",
    ),
    newer(
        "endpoints",
        Map(&[reference("pluginRef", PluginRole::Discovery)]),
        DISCOVERS,
        "dataLayer.discovery.pluginRef",
    ),
    newer(
        "peers",
        Map(&[reference("pluginRef", PluginRole::Peers)]),
        SHARES,
        "dataLayer.peerDiscovery",
    ),
];

const CROSS_REPLICA: &[SchemaField] = &[
    optional("syncerPluginRef", PluginRole::Syncer),
    answered_within("syncInterval", Duration),
    answered_within("publishTimeout", Duration),
];

const FLOW_CONTROL: &[SchemaField] = &[
    field(
        "maxBytes",
        Quantity,
        FlowControl("the most bytes of bodies held in all, in each worker"),
    ),
    field(
        "maxRequests",
        Quantity,
        FlowControl("the most requests held in all, in each worker"),
    ),
    field(
        "defaultRequestTTL",
        Duration,
        FlowControl("the longest wait of a request, then 429"),
    ),
    field(
        "noEndpointRequestTTL",
        Duration,
        FlowControl("the longest wait while no endpoint is ready, then 503"),
    ),
    field(
        "defaultPriorityBand",
        Map(BAND),
        FlowControl("the rules of bands that are not listed"),
    ),
    field(
        "defaultNegativePriorityBand",
        Map(BAND),
        FlowControl("the rules of bands below 0 that are not listed"),
    ),
    field(
        "priorityBands",
        List(&Map(BAND)),
        FlowControl("the rules of each band"),
    ),
    field(
        "usageLimitPolicyPluginRef",
        Reference(PluginRole::Scheduling(PluginKind::UsageLimit)),
        FlowControl("how much of the pool each band may fill"),
    ),
    answered_within("saturationDetector", DETECTOR),
    answered_within("enableEviction", Flag),
];

const BAND: &[SchemaField] = &[
    answered_within("priority", Integer),
    answered_within("maxBytes", Quantity),
    answered_within("maxRequests", Quantity),
    optional(
        "fairnessPolicyRef",
        PluginRole::Scheduling(PluginKind::Fairness),
    ),
    optional(
        "orderingPolicyRef",
        PluginRole::Scheduling(PluginKind::Ordering),
    ),
    answered_within("defaultRequestTTL", Duration),
];

const REQUEST_HANDLER: &[SchemaField] = &[
    answered_within("parsers", List(&PARSER)),
    newer(
        "propagatePriority",
        Flag,
        NoEffect("headers of a client's priority stay on the request; none is added"),
        "",
    ),
];

const DETECTOR: SchemaShape = Map(&[optional(
    "pluginRef",
    PluginRole::Scheduling(PluginKind::Detector),
)]);
/// The saturation detector with the thresholds that it had in the Inference Extension up to v1.4.
const OLDER_DETECTOR: SchemaShape = Map(&[
    optional("pluginRef", PluginRole::Scheduling(PluginKind::Detector)),
    field("queueDepthThreshold", Integer, THRESHOLD),
    field("kvCacheUtilThreshold", Number, THRESHOLD),
    field("metricsStalenessThreshold", Duration, THRESHOLD),
]);
const THRESHOLD: ItemSupport = Refused(
    "a field of the Inference Extension up to v1.4",
    "a plugin of the type utilization-detector with this parameter, which applies once it is declared",
);
const PARSER: SchemaShape = Map(&[reference(
    "pluginRef",
    PluginRole::Scheduling(PluginKind::Parser),
)]);

const fn own(name: &'static str) -> SchemaField {
    answered_within(name, Own)
}

const fn answered_within(name: &'static str, shape: SchemaShape) -> SchemaField {
    SchemaField {
        name,
        shape,
        required: false,
        fate: None,
        only: None,
    }
}

const fn field(name: &'static str, shape: SchemaShape, fate: ItemSupport) -> SchemaField {
    SchemaField {
        fate: Some(fate),
        ..answered_within(name, shape)
    }
}

const fn reference(name: &'static str, role: PluginRole) -> SchemaField {
    SchemaField {
        required: true,
        ..optional(name, role)
    }
}

const fn optional(name: &'static str, role: PluginRole) -> SchemaField {
    answered_within(name, Reference(role))
}

const fn older(
    name: &'static str,
    shape: SchemaShape,
    fate: ItemSupport,
    now: &'static str,
) -> SchemaField {
    SchemaField {
        only: Some((ConfigDialect::V1Alpha1, now)),
        ..field(name, shape, fate)
    }
}

const fn newer(
    name: &'static str,
    shape: SchemaShape,
    fate: ItemSupport,
    before: &'static str,
) -> SchemaField {
    SchemaField {
        only: Some((ConfigDialect::V1, before)),
        ..field(name, shape, fate)
    }
}

// === impl SchemaShape ===

impl SchemaShape {
    /// Returns the number of a quantity: digits, optionally a decimal point, optionally a suffix.
    #[must_use]
    pub fn quantity(text: &str) -> Option<f64> {
        const SUFFIXES: [(&str, f64); 14] = [
            ("m", 1e-3),
            ("k", 1e3),
            ("M", 1e6),
            ("G", 1e9),
            ("T", 1e12),
            ("P", 1e15),
            ("E", 1e18),
            ("Ki", 1024.0),
            ("Mi", 1_048_576.0),
            ("Gi", 1_073_741_824.0),
            ("Ti", 1_099_511_627_776.0),
            ("Pi", 1_125_899_906_842_624.0),
            ("Ei", 1_152_921_504_606_846_976.0),
            ("", 1.0),
        ];
        let end = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        let factor = SUFFIXES
            .iter()
            .find(|(known, _)| *known == suffix)
            .map(|(_, factor)| *factor)?;
        number.parse::<f64>().ok().map(|number| number * factor)
    }

    /// Returns the milliseconds of a duration: numbers, each with its unit, or a bare 0.
    #[must_use]
    pub fn duration_ms(text: &str) -> Option<f64> {
        const UNITS: [(&str, f64); 7] = [
            ("ns", 1e-6),
            ("us", 1e-3),
            ("µs", 1e-3),
            ("ms", 1.0),
            ("s", 1e3),
            ("m", 60e3),
            ("h", 3_600e3),
        ];
        if text == "0" {
            return Some(0.0);
        }
        let mut rest = text;
        let mut sum = 0.0;
        while !rest.is_empty() {
            let end = rest
                .find(|c: char| !c.is_ascii_digit() && c != '.')
                .unwrap_or(rest.len());
            let (number, behind) = rest.split_at(end);
            let end = behind
                .find(|c: char| c.is_ascii_digit() || c == '.')
                .unwrap_or(behind.len());
            let (unit, next) = behind.split_at(end);
            let (_, factor) = UNITS.iter().find(|(known, _)| *known == unit)?;
            sum += number.parse::<f64>().ok()? * factor;
            rest = next;
        }
        (!text.is_empty()).then_some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_and_times_are_distinguished_from_other_text() {
        let quantities = [
            ("0", 0.0),
            ("5000", 5e3),
            ("1k", 1e3),
            ("10Gi", 10_737_418_240.0),
            ("1.5M", 1.5e6),
            ("250m", 0.25),
        ];
        for (good, number) in quantities {
            assert_eq!(SchemaShape::quantity(good), Some(number), "{good}");
        }
        for bad in ["", "k", "1 k", "1kb", "ten", "-1", "1.2.3"] {
            assert_eq!(SchemaShape::quantity(bad), None, "{bad}");
        }
        for (good, ms) in [
            ("0", 0.0),
            ("0s", 0.0),
            ("60s", 60e3),
            ("1m30s", 90e3),
            ("1.5h", 5_400e3),
            ("100ms", 100.0),
        ] {
            assert_eq!(SchemaShape::duration_ms(good), Some(ms), "{good}");
        }
        for bad in ["", "s", "60", "1 s", "1d", "1m30", "-1s"] {
            assert_eq!(SchemaShape::duration_ms(bad), None, "{bad}");
        }
    }
}
