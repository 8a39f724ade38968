//! Reads an `EndpointPickerConfig` file strictly, and reports on each item.
//!
//! Each item of a file is *implemented*, has *no effect* (with the reason), or is *refused* (with a
//! substitute). Otherwise the file is invalid, and the error gives line, path and the nearest known
//! name. Nothing is ignored silently, and all errors are reported together.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use discovery::file_watcher::FileWatcher;
use scheduler::PipelineSpec;

use crate::error::error_text;
use crate::scrape::MetricsDiscovery;
use crate::scrape::MetricsLocation;
use crate::scrape::engine::EngineTable;

pub mod gateway;
mod latency;
pub mod older;
mod page;
mod pasted;
mod reader;
mod reference_items;
mod report;
mod resolved;
mod schema;
mod status;
pub mod yaml;

pub use latency::{LatencyOptions, STRATEGY_VARIABLE};
pub use page::reference_page;
pub use reference_items::{FOREIGN as foreign_plugins, ItemSupport};
pub(crate) use report::LocatedNode;
pub use report::{ConfigItem, ConfigProblem, ConfigReport, ItemStatus, unknown};
pub use resolved::ResolvedConfig;
pub use status::{ConfigError, ConfigStatus};

/// The content of a configuration file, compiled.
#[derive(Clone, Debug)]
pub struct CompiledConfig {
    pub pipeline: PipelineSpec,
    /// The rules by which the daemon finds the metrics of endpoints.
    pub scraping: MetricsDiscovery,
    /// The text of the file, if it comes from one.
    pub text: Option<Arc<str>>,
}

/// A configuration file, which is read again when it changes.
#[derive(Debug)]
pub struct ConfigFile {
    follow: FileWatcher,
    latency: LatencyOptions,
}

/// Reads a file's text. Returns no configuration if the report has errors or refused items.
#[must_use]
pub fn read(text: &str) -> (ConfigReport, Option<CompiledConfig>) {
    let (report, config) = reader::read(text);
    let good = report.errors.is_empty() && !report.refuses();
    (report, config.filter(|_| good))
}

// === impl CompiledConfig ===

impl CompiledConfig {
    /// Returns the configuration of a daemon without a configuration file.
    ///
    /// # Errors
    /// Fails only if the built-in table of engines is invalid.
    pub fn default_config(latency: &LatencyOptions) -> Result<Self, String> {
        let engines = EngineTable::try_new(&[], "", "").map_err(error_text)?;
        let scraping = MetricsDiscovery {
            engines: Arc::new(engines),
            location: MetricsLocation::default(),
        };
        let mut pipeline = PipelineSpec::default();
        latency.apply(&mut pipeline);
        Ok(Self {
            pipeline,
            scraping,
            text: None,
        })
    }
}

// === impl ConfigFile ===

impl ConfigFile {
    /// Follows the file at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, latency: LatencyOptions) -> Self {
        Self {
            follow: FileWatcher::new(path),
            latency,
        }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        self.follow.path()
    }

    /// Waits for new content; the first call returns the current content. An error says why the
    /// content cannot be used. The call is cancel-safe.
    pub async fn changed(&mut self) -> Result<CompiledConfig, String> {
        let text = self.follow.changed().await.map_err(error_text)?;
        let (report, config) = read(&text);
        let file = self.follow.path().display().to_string();
        for item in report
            .items
            .iter()
            .filter(|item| item.status == ItemStatus::NoEffect)
        {
            tracing::info!(
                file,
                line = item.line,
                item = item.path,
                reason = item.reason,
                "an item of the configuration has no effect"
            );
        }
        let mut config = config.ok_or_else(|| report.complaints(&file))?;
        self.latency.apply(&mut config.pipeline);
        config.text = Some(Arc::from(&*text));
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use scheduler::registry::PLUGINS;

    use super::*;

    /// Returns a file with these lines after apiVersion (line 1) and kind (line 2).
    fn file(rest: &str) -> String {
        format!("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n{rest}")
    }

    fn good(text: &str) -> CompiledConfig {
        let (report, config) = read(text);
        config.unwrap_or_else(|| panic!("{}", report.complaints("f")))
    }

    /// Returns the errors of a file, as printed.
    fn complaints(rest: &str) -> String {
        let (report, config) = read(&file(rest));
        assert!(config.is_none(), "taken: {rest}");
        report.complaints("f")
    }

    #[test]
    fn a_profile_is_what_the_file_says() {
        let config = good(&file(
            "plugins:\n- {name: q, type: queue-scorer}\n- {type: active-request-scorer, parameters: {idleThreshold: 2}}\n- type: random-picker\n\
             schedulingProfiles:\n- name: mine\n  plugins:\n  - {pluginRef: q, weight: 2.5}\n  - pluginRef: active-request-scorer\n  - pluginRef: random-picker\n",
        ));
        let [profile] = config.pipeline.profiles.as_slice() else {
            panic!("{:?}", config.pipeline)
        };
        let parts: Vec<_> = profile
            .plugins
            .iter()
            .map(|p| (p.name.as_str(), p.weight))
            .collect();
        let expected = [
            ("q", 2.5),
            ("active-request-scorer", 1.0),
            ("random-picker", 1.0),
        ];
        assert_eq!(
            (profile.name.as_str(), parts.as_slice()),
            ("mine", expected.as_slice())
        );
        let types: Vec<_> = config
            .pipeline
            .plugins
            .iter()
            .map(|p| (p.plugin_type.as_str(), p.parameters.len()))
            .collect();
        assert_eq!(
            types,
            [
                ("queue-scorer", 0),
                ("active-request-scorer", 1),
                ("random-picker", 0)
            ]
        );
    }

    #[test]
    fn without_profiles_all_declared_plugins_are_one() {
        let config = good(&file(
            "plugins:\n- type: queue-scorer\n- type: random-picker\n",
        ));
        assert_eq!(config.pipeline.profiles[0].plugins.len(), 2);
        for nothing in [
            "",
            "plugins: []\n",
            "plugins:\nschedulingProfiles: []\n",
            "plugins: [{type: openai-parser}]\n",
        ] {
            assert_eq!(
                good(&file(nothing)).pipeline,
                PipelineSpec::default(),
                "no scheduling plugin is declared: the default applies"
            );
        }
    }

    #[test]
    fn a_profile_without_a_picker_takes_the_one_declared() {
        let config = good(&file(
            "plugins: [{type: queue-scorer}, {type: random-picker}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}, {name: b}]\n\
             # two profiles need a profile handler\n",
        ).replace("[{type: queue-scorer}", "[{type: header-profile-handler, parameters: {defaultProfile: a}}, {type: queue-scorer}"));
        let pickers: Vec<_> = config
            .pipeline
            .profiles
            .iter()
            .map(|p| p.plugins.last().map(|p| p.name.as_str()))
            .collect();
        assert_eq!(pickers, [Some("random-picker"); 2]);
    }

    #[test]
    fn every_dialect_is_spoken() {
        for version in [
            "llm-d.ai/v1",
            "llm-d.ai/v1alpha1",
            "inference.networking.x-k8s.io/v1alpha1",
        ] {
            good(&format!(
                "apiVersion: {version}\nkind: EndpointPickerConfig\n"
            ));
        }
    }

    #[test]
    fn a_mistake_is_named_with_line_path_and_what_was_meant() {
        for (rest, expected) in [
            (
                "pluggins: []\n",
                "f:3: pluggins: unknown field \"pluggins\"; did you mean \"plugins\"?",
            ),
            (
                "plugins:\n- {type: queue-scoer}\n",
                "f:4: plugins[0].type: unknown plugin type \"queue-scoer\"; did you mean \"queue-scorer\"?",
            ),
            (
                "plugins:\n- {type: queue-scorer, wieght: 2}\n",
                "f:4: plugins[0].wieght: unknown field",
            ),
            ("plugins:\n- {name: a}\n", "f:4: plugins[0]: has no type"),
            (
                "plugins:\n- {type: queue-scorer}\n- {type: queue-scorer}\n",
                "f:5: plugins[1]: the name \"queue-scorer\" is taken by plugins[0] (line 4)",
            ),
            (
                "plugins:\n- {type: queue-scorer, parameters: [1]}\n",
                "f:4: plugins[0].parameters: must be a map, not a list",
            ),
            (
                "plugins:\n- type: active-request-scorer\n  parameters:\n    idleTreshold: 1\n",
                "f:6: plugins[0].parameters.idleTreshold: unknown parameter",
            ),
            (
                "plugins:\n- type: utilization-filter\n  parameters:\n    conditions:\n    - metric: waiting-queue\n      maxVale: 5\n",
                "f:8: plugins[0].parameters.conditions[0].maxVale: in `conditions[0]`: unknown parameter `maxVale`; did you mean `maxValue`?",
            ),
            (
                "plugins:\n- type: core-metrics-extractor\n  parameters:\n    engineConfigs:\n    - name: a\n      kvUsageSpek: x\n",
                "f:8: plugins[0].parameters.engineConfigs[0].kvUsageSpek: unknown field \"kvUsageSpek\"; did you mean \"kvUsageSpec\"?",
            ),
            (
                "plugins:\n- {type: metrics-data-source, parameters: {port: 70000}}\n",
                "f:4: plugins[0].parameters.port",
            ),
            (
                "plugins:\n- {type: core-metrics-extractor, parameters: {defaultEngine: vlm}}\n",
                "f:4: plugins[0].parameters",
            ),
            (
                "schedulingProfiles:\n- name: a\n  plugins:\n  - pluginRef: q\n",
                "f:6: schedulingProfiles[0].plugins[0].pluginRef: unknown plugin name \"q\"",
            ),
            (
                "schedulingProfiles:\n- name: a\n  plugins:\n  - pluginRef: queue-scorer\n",
                "f:6: schedulingProfiles[0].plugins[0].pluginRef: \"queue-scorer\" is a plugin type, but no plugin of that name is declared",
            ),
            (
                "schedulingProfiles:\n- plugins: []\n",
                "f:4: schedulingProfiles[0]: has no name",
            ),
            (
                "featureGates: [flowContrl=true]\n",
                "f:3: featureGates[0]: unknown feature gate \"flowContrl\"; did you mean \"flowControl\"?",
            ),
            (
                "featureGates: [flowControl=yes]\n",
                "f:3: featureGates[0]: \"yes\" is neither true nor false",
            ),
            (
                "dataLayer: {sources: [{pluginRef: x}]}\n",
                "f:3: dataLayer.sources[0].pluginRef: unknown plugin name \"x\"",
            ),
            (
                "dataLayer: {sources: [{extractors: []}]}\n",
                "f:3: dataLayer.sources[0]: has no pluginRef",
            ),
            (
                "flowControl: {maxBytes: lots}\n",
                "f:3: flowControl.maxBytes: must be a quantity such as 5000, 1k or 10Gi, not \"lots\"",
            ),
            (
                "flowControl: {priorityBands: [{priority: 1.5}]}\n",
                "f:3: flowControl.priorityBands[0].priority: must be a whole number, not 1.5",
            ),
            ("plugins: [\n", "f:"),
            ("kind: EndpointPickerConfig\n", "f:3: "),
        ] {
            let said = complaints(rest);
            assert!(
                said.lines().any(|line| line.starts_with(expected)),
                "{rest}: no {expected} in\n{said}"
            );
        }
        let said = read("kind: Pod\n").0.complaints("f");
        assert!(
            said.contains("apiVersion: is missing")
                && said.contains("kind: must be EndpointPickerConfig, not \"Pod\""),
            "{said}"
        );
        let said = read("apiVersion: llm-d.ai/v2\nkind: EndpointPickerConfig\n")
            .0
            .complaints("f");
        assert!(
            said.contains("f:1: apiVersion: ") && said.contains("did you mean \"llm-d.ai/v1\"?"),
            "{said}"
        );
    }

    #[test]
    fn references_go_to_what_is_there_and_of_the_right_kind() {
        let handler = |deciders: &str| {
            format!(
                "plugins:\n- {{type: disagg-profile-handler, parameters: {deciders}}}\n- {{type: decode-filter}}\n- {{type: queue-scorer}}\n\
                 schedulingProfiles: [{{name: decode, plugins: [{{pluginRef: decode-filter}}]}}]\n"
            )
        };
        let path = "f:4: plugins[0].parameters.deciders.prefill: ";
        // A handler that refers to itself is the closest thing to a cycle that a file can contain.
        let itself = complaints(&handler("{deciders: {prefill: disagg-profile-handler}}"));
        assert!(
            itself.starts_with(&format!(
                "{path}\"disagg-profile-handler\" (line 4) is a profile handler"
            )),
            "{itself}"
        );
        let scorer = complaints(&handler("{deciders: {prefill: queue-scorer}}"));
        assert!(
            scorer.starts_with(&format!(
                "{path}\"queue-scorer\" (line 6) is a scorer (queue-scorer), not a decider"
            )),
            "{scorer}"
        );
        assert!(
            complaints(&handler("{deciders: {prefill: x}}"))
                .starts_with(&format!("{path}unknown plugin name \"x\""))
        );
        let profile = complaints(&handler("{profiles: {decode: decoed}}"));
        assert!(
            profile
                .contains("profiles.decode: unknown profile \"decoed\"; did you mean \"decode\"?"),
            "{profile}"
        );
        let complained = complaints(
            "plugins: [{type: disagg-profile-handler}]\nschedulingProfiles: [{name: all}]\n",
        );
        assert!(
            complained.contains("`decode`"),
            "its default profile must be declared: {complained}"
        );
    }

    #[test]
    fn each_dialect_has_its_own_places() {
        let v1 =
            |rest: &str| format!("apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n{rest}");
        for (older, newer) in [
            (
                "dataLayer: {discovery: {pluginRef: f}}",
                "dataLayer: {discovery: {endpoints: {pluginRef: f}}}",
            ),
            (
                "dataLayer: {crossReplicaSyncInterval: 1s}",
                "dataLayer: {crossReplica: {syncInterval: 1s}}",
            ),
            (
                "dataLayer: {crossReplicaPublishTimeout: 1s}",
                "dataLayer: {crossReplica: {publishTimeout: 1s}}",
            ),
            (
                "dataLayer: {crossReplicaSyncerPluginRef: s}",
                "dataLayer: {crossReplica: {syncerPluginRef: s}}",
            ),
            (
                "saturationDetector: {pluginRef: utilization-detector}",
                "requestHandler: {propagatePriority: false}",
            ),
            (
                "parser: {pluginRef: openai-parser}",
                "requestHandler: {propagatePriority: true}",
            ),
        ] {
            let plugins =
                "plugins: [{name: f, type: file-discovery}, {name: s, type: local-syncer}]\n";
            good(&file(&format!("{plugins}{older}\n")));
            good(&v1(&format!("{plugins}{newer}\n")));
            let said = |text: &str| read(text).0.complaints("f");
            assert!(
                said(&v1(&format!("{plugins}{older}\n")))
                    .contains("is a field of llm-d.ai/v1alpha1, not of llm-d.ai/v1; instead: "),
                "{older}"
            );
            assert!(
                said(&file(&format!("{plugins}{newer}\n")))
                    .contains("is a field of llm-d.ai/v1, not of llm-d.ai/v1alpha1"),
                "{newer}"
            );
        }
    }

    #[test]
    fn the_newer_place_of_the_saturation_detector_counts() {
        let plugins = "plugins: [{name: a, type: concurrency-detector}, {name: b, type: utilization-detector}]\n";
        let named = |rest: &str| {
            good(&file(&format!("{plugins}{rest}")))
                .pipeline
                .saturation_detector
        };
        assert_eq!(
            named("flowControl: {saturationDetector: {pluginRef: a}}\n"),
            "a"
        );
        assert_eq!(named("saturationDetector: {pluginRef: b}\n"), "b");
        assert_eq!(
            named(
                "saturationDetector: {pluginRef: b}\nflowControl: {saturationDetector: {pluginRef: a}}\n"
            ),
            "a"
        );
        assert_eq!(
            named(""),
            "",
            "one of another name than its type is no default"
        );
        assert_eq!(
            good(&file("plugins: [{type: utilization-detector}]\n"))
                .pipeline
                .saturation_detector,
            "utilization-detector"
        );
    }

    #[test]
    fn a_plugin_that_nothing_refers_to_has_no_effect() {
        let (report, _) = read(&file(
            "plugins: [{type: queue-scorer}, {type: token-load-scorer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]\n",
        ));
        let status = |path: &str| {
            report
                .items
                .iter()
                .find(|item| item.path == path)
                .map(|item| item.status)
        };
        assert_eq!(
            (status("plugins[0]"), status("plugins[1]")),
            (Some(ItemStatus::Implemented), Some(ItemStatus::NoEffect))
        );
    }

    #[test]
    fn there_is_one_document_and_what_says_nothing_beside_it_is_none() {
        let config = "plugins: [{type: queue-scorer}]\n";
        for text in [
            format!("{}---\n", file(config)),
            format!("---\n{}", file(config)),
            format!("# first\n---\n{}---\n# last\n", file(config)),
        ] {
            assert_eq!(good(&text).pipeline.plugins.len(), 1, "{text}");
        }
        let said = complaints("---\nkind: EndpointPickerConfig\n");
        assert!(said.starts_with("f:4: a second document begins"), "{said}");
    }

    #[test]
    fn errors_of_invalid_yaml_are_readable_for_its_author() {
        for rest in [
            "plugins: []\nplugins: []\n",
            ": 1\n",
            "plugins:\n\t- type: queue-scorer\n",
            "plugins: [*x]\n",
        ] {
            let said = complaints(rest);
            assert!(said.starts_with("f:"), "{said}");
            assert!(
                !["Policy", "Option", "from_str"]
                    .iter()
                    .any(|word| said.contains(word)),
                "the message is for programmers: {said}"
            );
        }
    }

    #[test]
    fn plugins_beyond_the_most_are_not_even_read() {
        let declared = |count: usize| {
            (0..count)
                .map(|i| format!("- {{name: q{i}, type: queue-scorer}}\n"))
                .collect::<String>()
        };
        good(&file(&format!("plugins:\n{}", declared(60))));
        let (report, config) = read(&file(&format!("plugins:\n{}", declared(10_000))));
        assert!(
            config.is_none() && report.items.len() < 100,
            "{}",
            report.items.len()
        );
        assert!(
            report
                .complaints("f")
                .contains("plugins: 10000 plugins, at most 64 are allowed"),
            "{}",
            report.complaints("f")
        );
    }

    #[test]
    fn a_second_picker_is_named_where_it_stands() {
        let said = complaints("plugins:\n- type: max-score-picker\n- type: random-picker\n");
        assert!(
            said.starts_with("f:5: plugins[1]: \"random-picker\" is a second picker"),
            "{said}"
        );
    }

    #[test]
    fn a_plugin_that_takes_no_part_in_profiles_may_be_named_there() {
        for (plugin, is) in [
            (
                "predicted-latency-producer",
                "is a producer: it applies in every profile",
            ),
            (
                "token-producer",
                "is a producer: it applies in every profile",
            ),
            (
                "openai-parser",
                "is a parser: it takes no part in a profile",
            ),
            (
                "single-profile-handler",
                "is a profile handler: it takes no part",
            ),
            (
                "prefill-header-handler",
                "is a plugin without references: it takes no part",
            ),
            ("metrics-data-source", "is a data source: it takes no part"),
        ] {
            let (report, config) = read(&file(&format!(
                "plugins: [{{type: {plugin}}}, {{type: queue-scorer}}]
\
                 schedulingProfiles: [{{name: a, plugins: [{{pluginRef: {plugin}, weight: 2}}, {{pluginRef: queue-scorer}}]}}]\n"
            )));
            let item = report
                .items
                .iter()
                .find(|item| item.path == "schedulingProfiles[0].plugins[0]")
                .unwrap();
            assert!(
                item.status == ItemStatus::NoEffect && item.reason.contains(is),
                "{item:?}"
            );
            assert_eq!(
                config.unwrap().pipeline.profiles[0].plugins.len(),
                1,
                "{plugin}"
            );
        }
    }

    /// The settings that llm-d-router of August 2026 reads, and those of its predecessors.
    #[test]
    fn settings_of_other_versions_are_read_or_refused_by_name() {
        let plugin = |plugin_type: &str, parameters: &str| {
            let second = if plugin_type == "disagg-profile-handler" {
                ", {name: x}"
            } else {
                ""
            };
            file(&format!(
                "plugins:\n- {{type: always-disagg-pd-decider}}\n- {{type: decode-filter}}\n- type: {plugin_type}\n  parameters: {{{parameters}}}\n\
                 schedulingProfiles: [{{name: decode, plugins: [{{pluginRef: decode-filter}}]}}{second}]\n"
            ))
        };
        for (plugin_type, parameters, part) in [
            (
                "disagg-profile-handler",
                "decodeProfile: decode",
                "the older name of profiles.decode",
            ),
            (
                "disagg-profile-handler",
                "prefillProfile: x, deciderPluginName: always-disagg-pd-decider",
                "the older name of deciders.prefill",
            ),
            (
                "disagg-profile-handler",
                "encodeProfile: x, encodeDeciderPluginName: always-disagg-pd-decider",
                "deciders.encode",
            ),
            (
                "disagg-profile-handler",
                "decodeProfile: x, profiles: {decode: decode}",
                "profiles.decode is used instead",
            ),
            (
                "disagg-profile-handler",
                "stageOrder: Decode_First",
                "what is done anyway",
            ),
            (
                "disagg-profile-handler",
                "stageOrder: prefill-first",
                "refused: decode is picked first, then prefill and encode for it; instead: decode-first",
            ),
            (
                "active-request-scorer",
                "requestTimeout: 2m",
                "a request counts until it ends",
            ),
            (
                "approx-prefix-cache-producer",
                "blockSize: 128",
                "the older name of blockSizeTokens",
            ),
            (
                "token-producer",
                "estimate: {video: {frames: {mode: sampled}}}",
                "a video counts as an image",
            ),
            (
                "token-producer",
                "udsTokenizerConfig: {socketFile: /s}",
                "no external tokenizer is called; instead: the estimate",
            ),
            (
                "no-hit-lru-scorer",
                "prefixPluginName: p, prefixPluginType: q",
                "all plugins share one prefix index",
            ),
            (
                "prefix-cache-scorer",
                "hashBlockSize: 5",
                "since llm-d-router v0.9; instead: its blockSizeTokens",
            ),
            (
                "prefix-cache-scorer",
                "autoTune: false",
                "since llm-d-router v0.9; instead: its autoTune",
            ),
            (
                "prefix-cache-scorer",
                "mode: cache_tracking",
                "KV events do not correct the prefix index yet; instead",
            ),
            (
                "predicted-latency-producer",
                "predictInPrepareData: true",
                "the older name of predictInProduce",
            ),
            (
                "program-aware-fairness",
                "strategy: LAS",
                "what is done anyway",
            ),
            (
                "program-aware-fairness",
                "strategy: turn-priority",
                "refused: not implemented in this version; instead: las",
            ),
            (
                "approx-prefix-cache-producer",
                "prefixHashSource: metadata",
                "instead: leave it out",
            ),
            (
                "program-aware-fairness",
                "lasDecayFactor: 0.9",
                "instead: lasHalfLifeSeconds",
            ),
            (
                "session-affinity-scorer",
                "headerName: x-session-token",
                "the older name of encodedEndpointHeaderConfig.header",
            ),
        ] {
            let (report, config) = read(&plugin(plugin_type, parameters));
            let items: String = report
                .items
                .iter()
                .map(|item| format!("{}\n", item.reason))
                .collect();
            let all = items + &report.complaints("f");
            assert!(
                report.errors.is_empty() && all.contains(part),
                "{plugin_type} {parameters}: {all}"
            );
            assert_eq!(
                config.is_none(),
                all.contains("refused: "),
                "{plugin_type} {parameters}: {all}"
            );
        }
        for gate in ["dataLayer", "enableLegacyMetrics", "prepareDataPlugins"] {
            good(&file(&format!("featureGates: [{gate}]\n")));
        }
        good(&file(
            "plugins: [{type: metrics-data-source}]\ndata: {sources: [{pluginRef: metrics-data-source, extractors: []}]}\n",
        ));
        good(&file("metadata: {name: mine}\n"));
        good(&file(
            "flowControl: {priorityBands: [{priority: 1, defaultRequestTTL: 1s}]}\n",
        ));
        for threshold in [
            "queueDepthThreshold: 5",
            "kvCacheUtilThreshold: 0.8",
            "metricsStalenessThreshold: 200ms",
        ] {
            let said = complaints(&format!("saturationDetector: {{{threshold}}}\n"));
            assert!(
                said.contains("refused")
                    && said.contains("instead: a plugin of the type utilization-detector"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_file_that_holds_the_configuration_is_recognised() {
        let text = file("plugins: []\n").replace('\n', "\n      ");
        for (outer, place) in [
            (
                format!("router:\n  epp:\n    a.yaml: |\n      {text}"),
                "f:3: router.epp.a.yaml: ",
            ),
            (
                format!("apiVersion: v1\nkind: ConfigMap\ndata:\n    a.yaml: |\n      {text}"),
                "f:4: data.a.yaml: ",
            ),
            (
                format!("kind: LLMInferenceService\nspec:\n  inline:\n      {text}"),
                "f:3: spec.inline: ",
            ),
            (
                format!("kind: Deployment\nargs:\n  - |\n      {text}"),
                ": args[0]: ",
            ),
        ] {
            let said = read(&outer).0.complaints("f");
            assert!(
                said.contains(place)
                    && said.contains("switchpoint-migrate")
                    && said.lines().count() == 1,
                "{said}"
            );
        }
    }

    #[test]
    fn weights_are_numbers_from_nothing_to_a_million() {
        let weighted = |plugin: &str, weight: &str| {
            file(&format!(
                "plugins: [{{type: queue-scorer}}, {{type: random-picker}}]\nschedulingProfiles: [{{name: a, plugins: [{{pluginRef: {plugin}, weight: {weight}}}]}}]\n"
            ))
        };
        for weight in ["-1", ".nan", ".inf", "1e7", "two", "true", "'1'", "[1]"] {
            let said = read(&weighted("queue-scorer", weight)).0.complaints("f");
            assert!(
                said.starts_with("f:4: schedulingProfiles[0].plugins[0].weight: "),
                "{weight}: {said}"
            );
        }
        for weight in ["0", "0.0", "1e6", "0.25"] {
            good(&weighted("queue-scorer", weight));
        }
        let (report, config) = read(&weighted("random-picker", "3"));
        let item = report
            .items
            .iter()
            .find(|item| item.path.ends_with(".weight"))
            .unwrap();
        assert!(
            config.is_some()
                && item.status == ItemStatus::NoEffect
                && item.reason.contains("only scorers"),
            "{item:?}"
        );
    }

    #[test]
    fn where_and_how_metrics_are_read_is_taken_over() {
        let config = good(&file(
            "plugins:\n- {type: metrics-data-source, parameters: {scheme: https, port: '9400', path: /m}}\n\
             - type: core-metrics-extractor\n  parameters:\n    defaultEngine: mine\n    engineConfigs: [{name: mine, queuedRequestsSpec: my_queue}]\n",
        ));
        let location = &config.scraping.location;
        assert_eq!(
            (location.https, location.port, location.path.as_deref()),
            (true, Some(9400), Some("/m"))
        );
        assert_eq!(&*config.scraping.engines.of_labels(&[]).name, "mine");
    }

    #[test]
    fn every_name_is_answered_for_once() {
        let ours: Vec<&str> = PLUGINS.iter().map(|p| p.name).collect();
        for (i, row) in reference_items::FOREIGN.iter().enumerate() {
            let name = row.name;
            assert!(!ours.contains(&name), "{name} is implemented");
            assert!(
                reference_items::FOREIGN
                    .iter()
                    .skip(i + 1)
                    .all(|other| other.name != name),
                "{name} twice"
            );
            // Some settings of this plugin have an effect only with the feature gate.
            let (report, config) = read(&file(&format!(
                "featureGates: [flowControl]\nplugins:\n- type: {name}\n"
            )));
            assert!(
                report.errors.is_empty(),
                "{name}: {}",
                report.complaints("f")
            );
            assert_eq!(
                config.is_none(),
                matches!(row.support, reference_items::ItemSupport::Refused(..)),
                "{name}"
            );
        }
        for (plugin_type, way, _) in reference_items::REFERENCES {
            let mut rows = PLUGINS
                .iter()
                .filter(|row| plugin_type.is_empty() || row.name == *plugin_type);
            assert!(
                rows.any(|row| row
                    .parameters
                    .iter()
                    .any(|parameter| parameter.name == way[0])),
                "{plugin_type} has no {way:?}"
            );
        }
    }
}
