//! The built-in configurations of llm-d's charts, and what the picker's flags add to these
//! configurations.
//!
//! Source: llm-d-router `config/charts/routerlib/templates/_config.yaml`.

use super::items::{GivenItems, plain};
use super::picker::PluginParameters;
use super::report::ReportEntry;
use super::table::MigrationVerdict;
use crate::{LlmdPicker, tree};
use control_plane::config::yaml::YamlValue;

/// The file name of the configuration that a chart uses if its values name no other configuration.
const DEFAULT_FILE: &str = "default-plugins.yaml";

/// The file name of the charts' configuration for requests that no parser reads.
const AGNOSTIC_FILE: &str = "payload-agnostic.yaml";

const HEAD: &str = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n";

const DEFAULT: &str = "\
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: 2
  - pluginRef: kv-cache-utilization-scorer
    weight: 2
  - pluginRef: prefix-cache-scorer
    weight: 3
";

const AGNOSTIC: &str = "\
- type: passthrough-parser
- type: active-request-scorer
- type: session-affinity-scorer
requestHandler:
  parsers:
  - pluginRef: passthrough-parser
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: active-request-scorer
    weight: 1
  - pluginRef: session-affinity-scorer
    weight: 1
";

const PREDICTING: &str = "\
- type: predicted-latency-producer
- name: strict-affinity-filter
  type: prefix-cache-affinity-filter
  parameters: {affinityThreshold: 0.99, ttftSource: latencyPredictor, maxTTFTPenaltyMs: 5000}
- name: loose-affinity-filter
  type: prefix-cache-affinity-filter
  parameters: {affinityThreshold: 0.80, ttftSource: latencyPredictor, maxTTFTPenaltyMs: 5000}
- type: latency-scorer
- type: weighted-random-picker
- type: slo-headroom-tier-filter
- type: latency-slo-admitter
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: predicted-latency-producer
  - pluginRef: strict-affinity-filter
  - pluginRef: slo-headroom-tier-filter
  - pluginRef: loose-affinity-filter
  - pluginRef: latency-scorer
  - pluginRef: weighted-random-picker
";

/// The flags that name an engine's metrics, and the fields of `engineConfigs` for them.
const METRIC_FLAGS: [(&str, &str); 5] = [
    ("--total-queued-requests-metric", "queuedRequestsSpec"),
    ("--total-running-requests-metric", "runningRequestsSpec"),
    ("--kv-cache-usage-percentage-metric", "kvUsageSpec"),
    ("--lora-info-metric", "loraSpec"),
    ("--cache-info-metric", "cacheInfoSpec"),
];

/// The prefixes of the metrics of known engines.
const ENGINES: [(&str, &str); 4] = [
    ("vllm:", "vllm"),
    ("sglang:", "sglang"),
    ("nv_trt_llm_", "triton-tensorrt-llm"),
    ("trtllm_", "trtllm-serve"),
];

/// Returns the file name and the text of the configuration that a chart's values choose, or an
/// entry for the report if the text is missing.
pub fn chosen(items: &GivenItems) -> (Option<(String, String)>, Option<ReportEntry>) {
    let file = items
        .text("router.epp.pluginsConfigFile")
        .unwrap_or_else(|| DEFAULT_FILE.to_owned());
    let custom = match items.get("router.epp.pluginsCustomConfig") {
        Some(YamlValue::Map(files)) => files
            .iter()
            .find(|(key, _)| key.name == file)
            .map(|(_, node)| plain(&node.value)),
        _ => None,
    };
    let built_in = match file.as_str() {
        DEFAULT_FILE if items.is_on("router.latencyPredictor.enabled") => {
            Some(format!("{HEAD}{PREDICTING}"))
        }
        DEFAULT_FILE => Some(format!("{HEAD}{DEFAULT}")),
        AGNOSTIC_FILE => Some(format!("{HEAD}{AGNOSTIC}")),
        _ => None,
    };
    match custom.or(built_in) {
        Some(text) => (Some((file, text)), None),
        None => {
            let reason = "is not among pluginsCustomConfig: the pool has the default configuration until you write one".to_owned();
            let entry = ReportEntry {
                verdict: MigrationVerdict::Unknown,
                item: file,
                given: String::new(),
                ours: String::new(),
                reason,
            };
            (None, Some(entry))
        }
    }
}

/// Whether a pool's configuration is llm-d's default configuration. Charts add the engine, and the
/// location of the engine's metrics, to the default configuration.
#[must_use]
pub fn is_default(picker: &LlmdPicker) -> bool {
    let custom = match picker.items.get("router.epp.pluginsCustomConfig") {
        Some(YamlValue::Map(files)) => files.iter().any(|(key, _)| key.name == DEFAULT_FILE),
        _ => false,
    };
    !custom
        && picker
            .config
            .as_ref()
            .is_some_and(|(file, _)| file == DEFAULT_FILE)
}

/// Returns the parameters that values and flags add to the configuration.
#[must_use]
pub fn parameters(picker: &LlmdPicker) -> PluginParameters {
    let items = &picker.items;
    let mut all = PluginParameters::default();
    let mut add = |name: &str, value: Option<YamlValue>, default: &str| {
        if let Some(value) =
            value.filter(|value| plain(value) != default && !plain(value).is_empty())
        {
            all.data_source.push((name.to_owned(), value));
        }
    };
    add(
        "scheme",
        items.get("--model-server-metrics-scheme").cloned(),
        "http",
    );
    add(
        "path",
        items.get("--model-server-metrics-path").cloned(),
        "/metrics",
    );
    add(
        "port",
        items.get("--model-server-metrics-port").cloned(),
        "0",
    );
    if is_default(picker) {
        add(
            "scheme",
            items.get("router.epp.metricsDataSource.scheme").cloned(),
            "http",
        );
        add(
            "path",
            items.get("router.epp.metricsDataSource.path").cloned(),
            "/metrics",
        );
        if let Some(engine) = items
            .text("router.modelServers.type")
            .filter(|engine| engine != "vllm")
        {
            all.extractor
                .push(("defaultEngine".to_owned(), YamlValue::Text(engine)));
        }
    }
    engine(items, &mut all);
    all
}

/// Adds the engine whose metrics the flags name.
fn engine(items: &GivenItems, all: &mut PluginParameters) {
    let given = METRIC_FLAGS
        .iter()
        .filter_map(|(flag, field)| Some((*field, items.text(flag)?)));
    let given: Vec<(&str, String)> = given
        .filter(|(_, metric)| !metric.starts_with("vllm:"))
        .collect();
    let Some((_, first)) = given.first() else {
        return;
    };
    if let Some((_, engine)) = ENGINES.iter().find(|(start, _)| first.starts_with(start)) {
        all.extractor.push((
            "defaultEngine".to_owned(),
            YamlValue::Text((*engine).to_owned()),
        ));
        return;
    }
    let mut fields = vec![("name", YamlValue::Text("migrated".to_owned()))];
    fields.extend(
        given
            .into_iter()
            .map(|(field, metric)| (field, YamlValue::Text(metric))),
    );
    all.extractor.push((
        "defaultEngine".to_owned(),
        YamlValue::Text("migrated".to_owned()),
    ));
    all.extractor.push((
        "engineConfigs".to_owned(),
        tree::list(vec![tree::map(fields)]),
    ));
}

/// Returns the parsers of the default configuration, or `None` for all parsers.
#[must_use]
pub fn parsers(picker: &LlmdPicker) -> Option<Vec<String>> {
    let items = &picker.items;
    let listed = match items.get("router.epp.parsers") {
        Some(YamlValue::List(list)) => list.iter().map(|node| plain(&node.value)).collect(),
        Some(YamlValue::Text(text)) if !text.is_empty() => vec![text.clone()],
        _ if items.text("router.modelServers.type").as_deref() == Some("triton") => {
            vec!["passthrough-parser".to_owned()]
        }
        _ => Vec::new(),
    };
    (is_default(picker) && !listed.is_empty()).then_some(listed)
}
