//! The `EndpointPickerConfig` file: read strictly, answered item by item.
//!
//! Every item of a file ends as one of three: *implemented*, *no effect* (with the reason), *refused* (with what to use instead); or the
//! file is invalid, with line, path and, where a name is nearly right, what was probably meant. Nothing is ignored in silence, and all
//! that is wrong is said at once.

use std::path::PathBuf;
use std::sync::Arc;

use discovery::content::Follow;
use scheduler::ProfileSpec;
use serde::Serialize;

use crate::feed::Scraping;
use crate::scrape::MetricsLocation;
use crate::scrape::engine::Engines;

mod known;
mod reader;
mod yaml;

/// What a file says, compiled.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// How requests are scheduled.
    pub profile: ProfileSpec,
    /// How endpoints are scraped.
    pub scraping: Scraping,
}

/// What `check` prints, and what start-up goes by.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// What becomes of each item, in the order of the file.
    pub items: Vec<Item>,
    /// What makes the file invalid.
    pub errors: Vec<Problem>,
}

/// One item of a file.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// Where: `plugins[2].parameters.threshold`.
    pub path: String,
    /// Line, from 1.
    pub line: u64,
    /// What becomes of it.
    pub status: Status,
    /// Why, for people.
    pub reason: String,
    /// What to use instead, when refused.
    pub substitute: Option<String>,
}

/// What becomes of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It does what it says.
    Implemented,
    /// It changes nothing here.
    NoEffect,
    /// It would change decisions and cannot be had.
    Refused,
}

/// Something that makes a file invalid.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Where.
    pub path: String,
    /// Line, from 1; 0 when it concerns the whole file.
    pub line: u64,
    /// What, and what was probably meant.
    pub message: String,
}

/// A configuration file that is followed.
#[derive(Debug)]
pub struct ConfigFile {
    follow: Follow,
}

/// Reads a file's text. The configuration is there unless the report names errors or refused items.
#[must_use]
pub fn read(text: &str) -> (Report, Option<PoolConfig>) {
    let (report, config) = reader::read(text);
    let good = report.errors.is_empty() && !report.refuses();
    (report, config.filter(|_| good))
}

// === impl PoolConfig ===

impl PoolConfig {
    /// What holds when there is no file.
    ///
    /// # Errors
    /// Never but by a mistake in the built-in table of engines.
    pub fn default_config() -> Result<Self, String> {
        let engines = Engines::try_new(&[], "", "").map_err(|e| e.to_string())?;
        let scraping = Scraping { engines: Arc::new(engines), location: MetricsLocation::default() };
        Ok(Self { profile: ProfileSpec::default_profile(), scraping })
    }
}

// === impl Report ===

impl Report {
    /// Is any item refused?
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.items.iter().any(|item| item.status == Status::Refused)
    }

    /// Everything that keeps the file from being used, a line each, with the file's name.
    #[must_use]
    pub fn complaints(&self, file: &str) -> String {
        let errors = self.errors.iter().map(|p| format!("{file}:{}: {}", p.line, at(&p.path, &p.message)));
        let refused = self.items.iter().filter(|item| item.status == Status::Refused).map(|item| {
            let instead = item.substitute.as_deref().map(|s| format!("; instead: {s}")).unwrap_or_default();
            format!("{file}:{}: {}: refused: {}{instead}", item.line, item.path, item.reason)
        });
        errors.chain(refused).collect::<Vec<_>>().join("\n")
    }
}

fn at(path: &str, message: &str) -> String {
    if path.is_empty() { message.to_owned() } else { format!("{path}: {message}") }
}

// === impl ConfigFile ===

impl ConfigFile {
    /// Follows the file at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { follow: Follow::new(path) }
    }

    /// Waits for the file to say something new; the first call tells what it says now. An error says why it cannot be used. Cancel-safe.
    pub async fn changed(&mut self) -> Result<PoolConfig, String> {
        let text = self.follow.changed().await.map_err(|e| e.to_string())?;
        let (report, config) = read(&text);
        let file = self.follow.path().display().to_string();
        for item in report.items.iter().filter(|item| item.status == Status::NoEffect) {
            tracing::info!(file, line = item.line, item = item.path, reason = item.reason, "has no effect");
        }
        config.ok_or_else(|| report.complaints(&file))
    }
}

#[cfg(test)]
mod tests {
    use scheduler::plugin::PLUGINS;

    use super::*;

    /// A file with these lines after apiVersion (line 1) and kind (line 2).
    fn file(rest: &str) -> String {
        format!("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n{rest}")
    }

    fn good(text: &str) -> PoolConfig {
        let (report, config) = read(text);
        config.unwrap_or_else(|| panic!("{}", report.complaints("f")))
    }

    /// What keeps a file from being used, as printed.
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
        let plugins: Vec<_> = config.profile.plugins.iter().map(|p| (p.plugin_type.as_str(), p.name.as_str(), p.weight)).collect();
        let expected =
            [("queue-scorer", "q", 2.5), ("active-request-scorer", "active-request-scorer", 1.0), ("random-picker", "random-picker", 1.0)];
        assert_eq!((config.profile.name.as_str(), plugins.as_slice()), ("mine", expected.as_slice()));
        assert_eq!(config.profile.plugins[1].parameters.len(), 1);
    }

    #[test]
    fn without_profiles_all_declared_plugins_are_one() {
        let config = good(&file("plugins:\n- type: queue-scorer\n- type: random-picker\n"));
        assert_eq!(config.profile.plugins.len(), 2);
        assert_eq!(good(&file("")).profile, ProfileSpec::default_profile(), "nothing declared: our default");
    }

    #[test]
    fn every_dialect_is_spoken() {
        for version in ["llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"] {
            good(&format!("apiVersion: {version}\nkind: EndpointPickerConfig\n"));
        }
    }

    #[test]
    fn mistakes_are_named_with_line_path_and_what_was_meant() {
        for (rest, expected) in [
            (
                "plugins:\n- type: queue-scoer\n",
                "f:4: plugins[0].type: unknown plugin type \"queue-scoer\"; did you mean \"queue-scorer\"?",
            ),
            ("pluggins: []\n", "f:3: pluggins: unknown field \"pluggins\"; did you mean \"plugins\"?"),
            ("plugins:\n- {type: queue-scorer, wieght: 2}\n", "f:4: plugins[0].wieght: unknown field"),
            ("plugins:\n- {name: a}\n", "f:4: plugins[0]: has no type"),
            (
                "plugins:\n- {type: queue-scorer}\n- {type: queue-scorer}\n",
                "f:5: plugins[1]: the name \"queue-scorer\" is taken by plugins[0]",
            ),
            (
                "plugins:\n- {type: active-request-scorer, parameters: {idleTreshold: 1}}\n",
                "f:4: plugins[0].parameters.idleTreshold: unknown parameter",
            ),
            ("plugins:\n- {type: active-request-scorer, parameters: {maxBusyScore: 7}}\n", "f:4: plugins[0].parameters.maxBusyScore"),
            ("plugins:\n- {type: queue-scorer, parameters: [1]}\n", "f:4: plugins[0].parameters: must be a map, not a list"),
            (
                "schedulingProfiles:\n- name: a\n  plugins:\n  - pluginRef: q\n",
                "f:6: schedulingProfiles[0].plugins[0].pluginRef: unknown plugin name \"q\"",
            ),
            ("schedulingProfiles:\n- plugins: []\n", "f:4: schedulingProfiles[0]: has no name"),
            (
                "featureGates: [flowContrl=true]\n",
                "f:3: featureGates[0]: unknown feature gate \"flowContrl\"; did you mean \"flowControl\"?",
            ),
            ("featureGates: [flowControl=yes]\n", "f:3: featureGates[0]: \"yes\" is neither true nor false"),
            ("dataLayer: {sources: [{pluginRef: x}]}\n", "f:3: dataLayer.sources[0].pluginRef: unknown plugin name \"x\""),
            ("plugins:\n- {type: metrics-data-source, parameters: {port: 70000}}\n", "f:4: plugins[0].parameters.port"),
            ("plugins:\n- {type: core-metrics-extractor, parameters: {defaultEngine: vlm}}\n", "f:4: plugins[0].parameters"),
            ("plugins: [\n", "f:"),
            ("kind: EndpointPickerConfig\n", "f:3: "),
        ] {
            let said = complaints(rest);
            assert!(said.lines().any(|line| line.starts_with(expected)), "{rest}: no {expected} in\n{said}");
        }
        let (report, _) = read("kind: Pod\n");
        let said = report.complaints("f");
        assert!(said.contains("apiVersion: is missing") && said.contains("kind: must be EndpointPickerConfig"), "{said}");
    }

    #[test]
    fn weights_are_numbers_from_nothing_to_a_million() {
        for weight in ["-1", ".nan", ".inf", "1e7", "two", "true"] {
            let rest = format!(
                "plugins: [{{type: queue-scorer}}]\nschedulingProfiles: [{{name: a, plugins: [{{pluginRef: queue-scorer, weight: {weight}}}]}}]\n"
            );
            let said = complaints(&rest);
            assert!(said.starts_with("f:4: ") || said.contains("weight") || said.contains("non-finite"), "{weight}: {said}");
        }
    }

    #[test]
    fn two_pickers_are_one_too_many() {
        assert!(complaints("plugins:\n- type: random-picker\n- type: max-score-picker\n").contains("random-picker, max-score-picker"));
    }

    #[test]
    fn what_is_refused_names_a_substitute() {
        for rest in ["featureGates: [flowControl]\n", "plugins:\n- type: session-affinity-scorer\n"] {
            assert!(complaints(rest).contains("; instead: "), "{rest}");
        }
        let two = "plugins: [{type: queue-scorer}]\nschedulingProfiles:\n- {name: a, plugins: []}\n- {name: b, plugins: []}\n";
        assert!(complaints(two).contains("f:6: schedulingProfiles[1]: refused"));
    }

    #[test]
    fn where_and_how_metrics_are_read_is_taken_over() {
        let config = good(&file(
            "plugins:\n- {type: metrics-data-source, parameters: {scheme: https, port: '9400', path: /m}}\n\
             - type: core-metrics-extractor\n  parameters:\n    defaultEngine: mine\n    engineConfigs: [{name: mine, queuedRequestsSpec: my_queue}]\n",
        ));
        let location = &config.scraping.location;
        assert_eq!((location.https, location.port, location.path.as_deref()), (true, Some(9400), Some("/m")));
        assert_eq!(&*config.scraping.engines.of_labels(&[]).name, "mine");
    }

    #[test]
    fn every_known_name_is_answered_for_once() {
        let ours: Vec<&str> = PLUGINS.iter().map(|p| p.name).collect();
        for (i, (name, fate)) in known::PLUGIN_TYPES.iter().enumerate() {
            assert!(!ours.contains(name), "{name} is implemented");
            assert!(known::PLUGIN_TYPES.iter().skip(i + 1).all(|(other, _)| other != name), "{name} twice");
            let (report, config) = read(&file(&format!("plugins:\n- type: {name}\n")));
            assert!(report.errors.is_empty(), "{name}: {}", report.complaints("f"));
            assert_eq!(config.is_none(), matches!(fate, known::Fate::Refused(_)), "{name}");
        }
        for plugin in PLUGINS {
            assert_eq!(good(&file(&format!("plugins:\n- type: {}\n", plugin.name))).profile.plugins.len(), 1);
        }
    }
}
