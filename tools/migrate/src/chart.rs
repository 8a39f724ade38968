//! The values of our chart (`deploy/charts/switchpoint`).

use super::items::{GivenItems, plain};
use super::picker::MigratedConfig;
use super::printer::short;
use super::report::ReportEntry;
use super::table::MigrationVerdict;
use super::tree::{list, map};
use crate::LlmdPicker;
use control_plane::config::yaml::{YamlKey, YamlNode, YamlValue};
use control_plane::config::{LatencyOptions, STRATEGY_VARIABLE};

/// The argument of the daemon that turns on latency prediction.
const LATENCY_PREDICTION: &str = "--latency-prediction";

/// What turns latency prediction on in llm-d: a value of its charts, or a flag of older pickers.
const PREDICTION_SWITCHES: [&str; 2] = [
    "router.latencyPredictor.enabled",
    "--enable-latency-predictor",
];

/// The verbosity of llm-d's log that corresponds to `debug`.
const DEBUG_VERBOSITY: f64 = 4.0;

/// Annotations of pods that are about the picker's ports or one rollout.
const ANNOTATIONS_LEFT: [&str; 2] = ["prometheus.io/", "kubectl.kubernetes.io/"];

/// The longest name of a pool in our chart.
const POOL_NAME_CHARACTERS_MAX: usize = 40;
/// The longest name of an InferencePool in our chart.
const POOL_CHARACTERS_MAX: usize = 63;
/// The longest name of a namespace.
const NAMESPACE_CHARACTERS_MAX: usize = 63;
/// The most target ports of an InferencePool.
const TARGET_PORTS_MAX: usize = 8;
/// The port of model servers whose ports are not given.
const PORT_DEFAULT: f64 = 8000.0;

/// The shape that a value must have in our chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueShape {
    Map,
    Maps,
    Resources,
    Labels,
    Whole,
    Interval,
    Text,
}

/// The values of our chart.
#[derive(Debug)]
pub struct ChartValues {
    /// The values.
    pub values: YamlValue,
    /// Answers for what the chart cannot take as it is.
    pub notes: Vec<ReportEntry>,
    /// Paths of items that the notes are about.
    pub unusable: Vec<String>,
}

/// Collects values of our chart from items of llm-d's.
struct ValuesWriter<'p> {
    pickers: &'p [LlmdPicker],
    /// Answers for what the chart cannot take as it is.
    notes: Vec<ReportEntry>,
    /// Paths of items that cannot be used.
    unusable: Vec<String>,
}

/// The values for these pickers, and answers for what the chart cannot take as it is.
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

/// Whether requests of a proxy go to any endpoint while the proxy has no state.
fn fails_open(items: &GivenItems) -> bool {
    items.is_on("router.proxy.failOpen")
}

// === impl ValuesWriter ===

impl ValuesWriter<'_> {
    fn pool(&mut self, picker: &LlmdPicker, config: &MigratedConfig, shared: bool) -> YamlValue {
        let name = pool_name(&picker.name);
        let mut pool = vec![("name", text(&name))];
        if name != picker.name {
            self.note(
                MigrationVerdict::Changed,
                "the name of the pool",
                Some(&text(&picker.name)),
                "pools[].name",
                "names of pools are short, of small letters, digits and -",
            );
        }
        match &picker.namespace {
            Some(namespace) if is_name(namespace, NAMESPACE_CHARACTERS_MAX) => {
                pool.push(("namespace", text(namespace)));
            }
            Some(namespace) => {
                self.note(
                    MigrationVerdict::Unknown,
                    "the namespace of the pool",
                    Some(&text(namespace)),
                    "",
                    "is no name of a namespace",
                );
            }
            None => {}
        }
        if shared {
            pool.push(("hosts", list(vec![text(&name)])));
            self.note(
                MigrationVerdict::Changed,
                "the Service of each picker",
                None,
                "pools[].hosts",
                "several pools behind one gateway differ by host: write the hosts that clients use",
            );
        }
        pool.push(if makes_pool(&picker.items) {
            ("modelServers", self.model_servers(&picker.items))
        } else {
            ("inferencePool", self.reference(picker))
        });
        if picker
            .items
            .text("router.modelServers.protocol")
            .is_some_and(|protocol| ["grpc", "h2c"].contains(&protocol.as_str()))
        {
            pool.push(("appProtocol", text("kubernetes.io/h2c")));
        }
        if let Some(tree) = &config.tree {
            pool.push(("config", tree.value.clone()));
        }
        map(pool)
    }

    /// The InferencePool that exists.
    fn reference(&mut self, picker: &LlmdPicker) -> YamlValue {
        if !is_name(&picker.name, POOL_CHARACTERS_MAX) {
            self.note(
                MigrationVerdict::Unknown,
                "the name of the InferencePool",
                Some(&text(&picker.name)),
                "",
                "the chart takes names of small letters, digits and -",
            );
        }
        let mut reference = vec![("name", text(&picker.name))];
        let group = picker
            .items
            .text("inferencePool.apiVersion")
            .or_else(|| picker.items.text("--pool-group"));
        if group.is_some_and(|group| group.starts_with("inference.networking.x-k8s.io")) {
            reference.push(("apiVersion", text("inference.networking.x-k8s.io/v1alpha2")));
        }
        map(reference)
    }

    /// The labels and ports of an InferencePool that the chart makes.
    fn model_servers(&mut self, items: &GivenItems) -> YamlValue {
        let selector = items
            .get("--endpoint-selector")
            .or_else(|| items.get("router.modelServers.matchLabels"));
        let labels = match selector {
            Some(YamlValue::Map(entries)) if !entries.is_empty() => labels(entries),
            Some(YamlValue::Text(text)) => equalities(text),
            _ => None,
        };
        let labels = labels.unwrap_or_else(|| {
            let reason =
                "must be a map, or equalities such as app=vllm: replace the label CHANGE-ME";
            self.note(
                MigrationVerdict::Unknown,
                "the labels of the model servers",
                selector,
                "pools[].modelServers.matchLabels",
                reason,
            );
            map(vec![("CHANGE-ME", text(""))])
        });
        let given = [
            "--endpoint-target-ports",
            "router.modelServers.targetPorts",
            "router.modelServers.targetPortNumber",
        ];
        let given = given.iter().find_map(|path| items.get(path));
        let ports = given.map_or_else(|| vec![PORT_DEFAULT], ports);
        let mut servers = vec![("matchLabels", labels)];
        if (1..=TARGET_PORTS_MAX).contains(&ports.len()) {
            servers.push((
                "targetPorts",
                list(
                    ports
                        .into_iter()
                        .map(|port| map(vec![("number", YamlValue::Number(port))]))
                        .collect(),
                ),
            ));
        } else {
            self.note(
                MigrationVerdict::Unknown,
                "the ports of the model servers",
                given,
                "pools[].modelServers.targetPorts",
                "must be 1 to 8 numbers from 1 to 65535",
            );
        }
        map(servers)
    }

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

    /// Sets the daemon's variable with the headroom strategy, which is that of all pools.
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
            // The default of llm-d's charts is FailOpen, that of ours FailClose.
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

    /// Copies the value of the first picker that sets it, in the shape of our chart.
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

// === impl ValueShape ===

impl ValueShape {
    /// The value in this shape, if it has it.
    fn shaped(self, value: &YamlValue) -> Option<YamlValue> {
        match (self, value) {
            (Self::Map, YamlValue::Map(_)) => Some(value.clone()),
            (Self::Maps, YamlValue::List(items)) => items
                .iter()
                .all(|item| matches!(item.value, YamlValue::Map(_)))
                .then(|| value.clone()),
            (Self::Resources, YamlValue::Map(entries)) => {
                let known = |(key, node): &(YamlKey, YamlNode)| {
                    ["requests", "limits"].contains(&key.name.as_str())
                        && matches!(node.value, YamlValue::Map(_))
                };
                entries.iter().all(known).then(|| value.clone())
            }
            (Self::Labels, YamlValue::Map(entries)) => labels(entries),
            (Self::Whole, YamlValue::Number(number)) => {
                (number.fract() == 0.0 && (1.0..1e6).contains(number)).then(|| value.clone())
            }
            (Self::Interval, YamlValue::Text(text)) => is_interval(text).then(|| value.clone()),
            (Self::Text, YamlValue::Text(text)) => (!text.is_empty()).then(|| value.clone()),
            _ => None,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Map => "a map",
            Self::Maps => "a list of maps",
            Self::Resources => "requests and limits",
            Self::Labels => "a map of text",
            Self::Whole => "a whole number from 1",
            Self::Interval => "a time such as 10s",
            Self::Text => "text",
        }
    }
}

fn text(text: &str) -> YamlValue {
    YamlValue::Text(text.to_owned())
}

/// Whether the chart takes this name: small letters, digits and `-`.
fn is_name(name: &str, characters_max: usize) -> bool {
    let inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty()
        && name.len() <= characters_max
        && name.chars().all(inside)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// The name of a pool in our chart.
fn pool_name(name: &str) -> String {
    let inside = name.chars().map(|c| {
        if c.is_ascii_alphanumeric() {
            c.to_ascii_lowercase()
        } else {
            '-'
        }
    });
    let cut: String = inside
        .skip_while(|c| *c == '-')
        .take(POOL_NAME_CHARACTERS_MAX)
        .collect();
    let cut = cut.trim_end_matches('-');
    if cut.is_empty() {
        "pool".to_owned()
    } else {
        cut.to_owned()
    }
}

/// Whether llm-d works without an InferencePool, so that the chart must make one.
fn makes_pool(items: &GivenItems) -> bool {
    let unset = matches!(
        items.get("router.inferencePool.create"),
        Some(YamlValue::Flag(false))
    );
    unset || (items.get("--endpoint-selector").is_some() && items.get("--pool-name").is_none())
}

/// A map whose values are text, as labels and annotations must be.
fn labels(entries: &[(YamlKey, YamlNode)]) -> Option<YamlValue> {
    let scalar = |value: &YamlValue| !matches!(value, YamlValue::Map(_) | YamlValue::List(_));
    let all = entries.iter().map(|(key, node)| {
        scalar(&node.value).then(|| (key.name.as_str(), YamlValue::Text(plain(&node.value))))
    });
    Some(map(all.collect::<Option<Vec<_>>>()?))
}

/// `app=vllm,env=prod` as a map.
fn equalities(text: &str) -> Option<YamlValue> {
    let pair = |term: &str| {
        let (name, value) = term.split_once('=')?;
        let name = name.trim().to_owned();
        let value = value.trim_start_matches('=').trim().to_owned();
        (!name.is_empty() && !name.contains(['!', ' ', '(']) && !value.contains([' ', '(']))
            .then_some((name, value))
    };
    let pairs: Vec<(String, String)> = text.split(',').map(pair).collect::<Option<_>>()?;
    Some(map(pairs
        .iter()
        .map(|(name, value)| (name.as_str(), YamlValue::Text(value.clone())))
        .collect()))
}

/// Ports in every form that the charts know: `8000`, `8000,8001`, `[{number: 8000}]`.
fn ports(value: &YamlValue) -> Vec<f64> {
    let port =
        |number: f64| (number.fract() == 0.0 && (1.0..65536.0).contains(&number)).then_some(number);
    match value {
        YamlValue::Number(number) => port(*number).into_iter().collect(),
        YamlValue::Text(text) => text
            .split(',')
            .filter_map(|part| port(part.trim().parse().ok()?))
            .collect(),
        YamlValue::List(items) => items
            .iter()
            .flat_map(|item| {
                item.get("number")
                    .map_or_else(|| ports(&item.value), |number| ports(&number.value))
            })
            .collect(),
        YamlValue::Null | YamlValue::Flag(_) | YamlValue::Map(_) => Vec::new(),
    }
}

/// The port for clients among further ports of llm-d's Service: the one named `http`, or the first.
fn client_port(value: &YamlValue) -> Option<f64> {
    let YamlValue::List(items) = value else {
        return None;
    };
    let named = items.iter().find(|item| {
        item.get("name")
            .is_some_and(|name| plain(&name.value) == "http")
    });
    ports(&named.or_else(|| items.first())?.get("port")?.value)
        .first()
        .copied()
}

fn is_interval(text: &str) -> bool {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[number.len()..];
    !number.is_empty()
        && number.chars().all(|c| c.is_ascii_digit())
        && ["ms", "s", "m", "h"].contains(&unit)
}
