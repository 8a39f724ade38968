//! Makes the values of our chart (`deploy/charts/switchpoint`) from the values of llm-d's charts.

mod pool;
mod shape;

use self::shape::{ValueShape, client_port, text};
use super::items::GivenItems;
use super::picker::MigratedConfig;
use super::printer::short;
use super::report::ReportEntry;
use super::table::MigrationVerdict;
use super::tree::{list, map};
use crate::LlmdPicker;
use control_plane::config::yaml::YamlValue;
use control_plane::config::{LatencyOptions, STRATEGY_VARIABLE};

/// The argument of the daemon that turns on latency prediction.
const LATENCY_PREDICTION: &str = "--latency-prediction";

/// The settings that turn on latency prediction in llm-d: a value of its charts, or a flag of older
/// pickers.
const PREDICTION_SWITCHES: [&str; 2] = [
    "router.latencyPredictor.enabled",
    "--enable-latency-predictor",
];

/// The verbosity of llm-d's log that corresponds to `debug`.
const DEBUG_VERBOSITY: f64 = 4.0;

/// The prefixes of annotations that the migration leaves out, because these annotations concern the
/// picker's ports or a single rollout.
const ANNOTATIONS_LEFT: [&str; 2] = ["prometheus.io/", "kubectl.kubernetes.io/"];

/// The values of our chart.
#[derive(Debug)]
pub struct ChartValues {
    pub values: YamlValue,
    /// What is reported about settings that the chart cannot take unchanged.
    pub notes: Vec<ReportEntry>,
    /// The paths of items that the notes are about.
    pub unusable: Vec<String>,
}

/// Collects values of our chart from the items of llm-d's chart.
struct ValuesWriter<'p> {
    pickers: &'p [LlmdPicker],
    /// What is reported about settings that the chart cannot take unchanged.
    notes: Vec<ReportEntry>,
    /// The paths of items that our chart cannot use.
    unusable: Vec<String>,
}

/// Returns the values for these pickers, and notes on settings that the chart cannot take
/// unchanged.
#[must_use]
pub fn values(pickers: &[LlmdPicker], configs: &[MigratedConfig]) -> ChartValues {
    let mut writer = ValuesWriter {
        pickers,
        notes: Vec::new(),
        unusable: Vec::new(),
    };
    let own_gateway = pickers.iter().any(|picker| picker.standalone);
    let ext_proc = pickers.iter().any(|picker| !picker.standalone);
    let pools = pickers
        .iter()
        .zip(configs)
        .map(|(picker, config)| writer.pool(picker, config, own_gateway && pickers.len() > 1))
        .collect();
    let mut fields = vec![("pools", list(pools))];
    writer.copy(
        &mut fields,
        "router.clusterDomain",
        "clusterDomain",
        ValueShape::Text,
    );
    if pickers
        .iter()
        .any(|picker| picker.standalone && fails_open(&picker.items))
    {
        fields.push(("picker", map(vec![("failure_mode", text("open"))])));
    }
    let daemon = writer.daemon();
    if !daemon.is_empty() {
        fields.push(("daemon", map(daemon)));
    }
    fields.push(("gateway", map(writer.gateway(own_gateway))));
    if ext_proc {
        fields.push(("extProc", map(writer.ext_proc())));
    }
    let monitor = writer.monitor();
    if !monitor.is_empty() {
        fields.push(("monitoring", map(vec![("podMonitor", map(monitor))])));
    }
    ChartValues {
        values: map(fields),
        notes: writer.notes,
        unusable: writer.unusable,
    }
}

/// Whether a proxy without state forwards requests to any endpoint instead of refusing the
/// requests.
fn fails_open(items: &GivenItems) -> bool {
    items.is_on("router.proxy.failOpen")
}

// === impl ValuesWriter ===

impl ValuesWriter<'_> {
    fn daemon(&mut self) -> Vec<(&'static str, YamlValue)> {
        let mut daemon = Vec::new();
        let of_any = |path: &str| {
            self.pickers
                .iter()
                .find_map(|picker| picker.items.text(path))
        };
        if of_any("--v")
            .and_then(|v| v.parse().ok())
            .is_some_and(|v: f64| v >= DEBUG_VERBOSITY)
        {
            daemon.push(("logLevel", text("debug")));
        }
        if of_any("--zap-encoder").as_deref() == Some("json") {
            daemon.push(("logFormat", text("json")));
        }
        if self.pickers.iter().any(|picker| {
            PREDICTION_SWITCHES
                .iter()
                .any(|switch| picker.items.is_on(switch))
        }) {
            daemon.push(("extraArgs", list(vec![text(LATENCY_PREDICTION)])));
        }
        self.headroom_strategy(&mut daemon);
        for (path, ours, shape) in [
            ("router.epp.volumes", "extraVolumes", ValueShape::Maps),
            (
                "router.epp.volumeMounts",
                "extraVolumeMounts",
                ValueShape::Maps,
            ),
            (
                "router.epp.podAnnotations",
                "podAnnotations",
                ValueShape::Labels,
            ),
            ("router.epp.tolerations", "tolerations", ValueShape::Maps),
            ("router.epp.affinity", "affinity", ValueShape::Map),
        ] {
            self.copy(&mut daemon, path, ours, shape);
        }
        if let Some((_, YamlValue::Map(annotations))) = daemon
            .iter_mut()
            .find(|(name, _)| *name == "podAnnotations")
        {
            let before = annotations.len();
            annotations.retain(|(key, _)| {
                ANNOTATIONS_LEFT
                    .iter()
                    .all(|start| !key.name.starts_with(start))
            });
            if annotations.len() < before {
                let reason = "annotations of Prometheus and kubectl are not copied: metrics are on port 9091";
                self.note(
                    MigrationVerdict::Changed,
                    "annotations of the picker's pods",
                    None,
                    "monitoring.podMonitor.enabled",
                    reason,
                );
            }
        }
        daemon.retain(|(_, value)| !matches!(value, YamlValue::Map(entries) if entries.is_empty()));
        daemon
    }

    /// Sets the daemon's variable with the headroom strategy, which applies to all pools.
    fn headroom_strategy(&mut self, daemon: &mut Vec<(&'static str, YamlValue)>) {
        let item = format!("${STRATEGY_VARIABLE}");
        let pickers = self.pickers;
        let Some(items) = pickers
            .iter()
            .map(|picker| &picker.items)
            .find(|items| items.text(&item).is_some())
        else {
            return;
        };
        let strategy = items.text(&item).unwrap_or_default();
        match LatencyOptions::new(false, Some(strategy.clone())) {
            Ok(_) => daemon.push((
                "extraEnv",
                list(vec![map(vec![
                    ("name", text(STRATEGY_VARIABLE)),
                    ("value", text(&strategy)),
                ])]),
            )),
            Err(why) => {
                let shown = items.shown(&item).to_owned();
                self.unusable.push(item);
                self.note(
                    MigrationVerdict::Unknown,
                    &shown,
                    Some(&text(&strategy)),
                    "",
                    &format!("not copied: {why}"),
                );
            }
        }
    }

    fn gateway(&mut self, enabled: bool) -> Vec<(&'static str, YamlValue)> {
        let mut gateway = vec![("enabled", YamlValue::Flag(enabled))];
        if !enabled {
            return gateway;
        }
        let separate = |picker: &LlmdPicker| {
            picker.items.text("router.proxy.mode").as_deref() == Some("service")
        };
        if self.pickers.iter().any(separate) {
            self.copy(
                &mut gateway,
                "router.proxy.replicas",
                "replicas",
                ValueShape::Whole,
            );
        }
        let port = self
            .pickers
            .iter()
            .find_map(|picker| client_port(picker.items.get("router.extraServicePorts")?));
        if let Some(port) = port {
            gateway.push(("service", map(vec![("port", YamlValue::Number(port))])));
        }
        self.copy(
            &mut gateway,
            "router.proxy.resources",
            "resources",
            ValueShape::Resources,
        );
        gateway
    }

    fn ext_proc(&mut self) -> Vec<(&'static str, YamlValue)> {
        let mut ext_proc = vec![("enabled", YamlValue::Flag(true))];
        let ours = || self.pickers.iter().filter(|picker| !picker.standalone);
        let made: Vec<&GivenItems> = ours()
            .map(|picker| &picker.items)
            .filter(|items| makes_pool(items))
            .collect();
        if let Some(items) = made.first() {
            // The default of llm-d's charts is FailOpen, and that of our chart is FailClose.
            let closed =
                items.text("router.inferencePool.failureMode").as_deref() == Some("FailClose");
            ext_proc.push((
                "failureMode",
                text(if closed { "FailClose" } else { "FailOpen" }),
            ));
            if let Some(gateway) = items
                .text("httpRoute.inferenceGatewayName")
                .filter(|_| items.is_on("httpRoute.create"))
            {
                let mut parent = vec![("name", YamlValue::Text(gateway))];
                parent.extend(
                    items
                        .text("httpRoute.inferenceGatewayNamespace")
                        .map(|namespace| ("namespace", YamlValue::Text(namespace))),
                );
                ext_proc.push(("parentRefs", list(vec![map(parent)])));
            }
        }
        if ours().any(|picker| picker.items.text("provider.name").as_deref() == Some("istio")) {
            ext_proc.push(("istio", map(vec![("enabled", YamlValue::Flag(true))])));
        }
        let mut namespaces: Vec<&Option<String>> = ours().map(|picker| &picker.namespace).collect();
        namespaces.sort_unstable();
        namespaces.dedup();
        if namespaces.len() > 1 {
            let reason = "an InferencePool can only name a picker in its own namespace: migrate and install one namespace after the other (--namespace)";
            self.note(
                MigrationVerdict::Unknown,
                "pools in several namespaces",
                None,
                "extProc.enabled",
                reason,
            );
        }
        ext_proc
    }

    fn monitor(&mut self) -> Vec<(&'static str, YamlValue)> {
        let mut monitor = Vec::new();
        if self
            .pickers
            .iter()
            .any(|picker| picker.items.is_on("router.monitoring.prometheus.enabled"))
        {
            monitor.push(("enabled", YamlValue::Flag(true)));
            self.copy(
                &mut monitor,
                "router.monitoring.interval",
                "interval",
                ValueShape::Interval,
            );
            self.copy(
                &mut monitor,
                "router.monitoring.prometheus.extraLabels",
                "labels",
                ValueShape::Labels,
            );
        }
        monitor
    }

    /// Copies the item at `path` from the first picker that has the item, in the type that our
    /// chart needs.
    fn copy(
        &mut self,
        fields: &mut Vec<(&'static str, YamlValue)>,
        path: &str,
        ours: &'static str,
        shape: ValueShape,
    ) {
        let pickers = self.pickers;
        let Some(value) = pickers.iter().find_map(|picker| picker.items.get(path)) else {
            return;
        };
        match shape.shaped(value) {
            Some(YamlValue::Map(entries)) if entries.is_empty() => {}
            Some(YamlValue::List(items)) if items.is_empty() => {}
            Some(value) => fields.push((ours, value)),
            None => {
                let items = pickers
                    .iter()
                    .map(|picker| &picker.items)
                    .find(|items| items.get(path).is_some());
                let shown = items.map_or(path, |items| items.shown(path)).to_owned();
                self.unusable.push(path.to_owned());
                self.note(
                    MigrationVerdict::Unknown,
                    &shown,
                    Some(value),
                    "",
                    &format!("not copied: it must be {}", shape.label()),
                );
            }
        }
    }

    fn note(
        &mut self,
        verdict: MigrationVerdict,
        item: &str,
        value: Option<&YamlValue>,
        ours: &str,
        reason: &str,
    ) {
        let given = value.map(short).unwrap_or_default();
        let entry = ReportEntry {
            verdict,
            item: item.to_owned(),
            given,
            ours: ours.to_owned(),
            reason: reason.to_owned(),
        };
        if !self.notes.contains(&entry) {
            self.notes.push(entry);
        }
    }
}

/// Whether llm-d works without an InferencePool, so that our chart must make an InferencePool.
fn makes_pool(items: &GivenItems) -> bool {
    let unset = matches!(
        items.get("router.inferencePool.create"),
        Some(YamlValue::Flag(false))
    );
    unset || (items.get("--endpoint-selector").is_some() && items.get("--pool-name").is_none())
}
