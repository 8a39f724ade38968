//! Reads the settings for engines' metrics: `core-metrics-extractor` and `metrics-data-source`.

use std::sync::Arc;

use super::ConfigReader;
use super::plugins::DeclaredPlugin;
use crate::config::yaml::YamlValue;
use crate::config::{ItemStatus, LocatedNode, unknown};
use crate::scrape::MetricsDiscovery;
use crate::scrape::engine::{CustomMetric, EngineConfig, EngineTable};

/// Parameters of `metrics-data-source`.
const DATA_SOURCE: [&str; 8] = [
    "scheme",
    "path",
    "port",
    "interval",
    "insecureSkipVerify",
    "caCertPath",
    "clientCertPath",
    "clientKeyPath",
];

// === impl ConfigReader ===

impl ConfigReader {
    /// Returns the collected settings, or the built-in settings if the file has none.
    pub(super) fn scraping(&mut self) -> Option<MetricsDiscovery> {
        let engines = match self.engines.take() {
            Some(engines) => engines,
            None => EngineTable::try_new(&[], "", "").ok()?,
        };
        Some(MetricsDiscovery {
            engines: Arc::new(engines),
            location: std::mem::take(&mut self.location),
        })
    }

    /// Reads `core-metrics-extractor`: the names of engines' metrics.
    pub(super) fn extractor(&mut self, declared: &DeclaredPlugin) {
        const USED: [(&str, &str); 3] = [
            ("engineConfigs", "the metric names of an engine"),
            ("defaultEngine", "the engine of endpoints without a label"),
            (
                "engineLabelKey",
                "the label that names an endpoint's engine",
            ),
        ];
        let parameters = declared.located();
        let [default_engine, label] = ["defaultEngine", "engineLabelKey"].map(|name| {
            let given = parameters.get(name);
            given
                .and_then(|given| self.text(&given))
                .unwrap_or_default()
        });
        let mut configs = Vec::new();
        for engine in self.report.list(parameters.get("engineConfigs").as_ref()) {
            configs.extend(self.engine(&engine));
        }
        match EngineTable::try_new(&configs, &default_engine, &label) {
            Ok(engines) => self.engines = Some(engines),
            Err(error) => {
                self.report
                    .problem(&parameters.path, declared.line, error.to_string());
            }
        }
        for (key, entry) in parameters.entries() {
            if let Some((_, meaning)) = USED.iter().find(|(name, _)| *name == key.name) {
                self.report
                    .item(&entry.path, key.line, ItemStatus::Implemented, *meaning);
            } else {
                let message = unknown("parameter", &key.name, USED.map(|(name, _)| name));
                self.report.problem(&entry.path, key.line, message);
            }
        }
    }

    fn engine(&mut self, engine: &LocatedNode<'_>) -> Option<EngineConfig> {
        let problems = self.report.errors.len();
        self.report.map(engine, &EngineConfig::FIELDS)?;
        for metric in self.report.list(engine.get("customMetrics").as_ref()) {
            self.report.map(&metric, &CustomMetric::FIELDS);
        }
        if self.report.errors.len() > problems {
            return None;
        }
        serde_json::from_value(engine.node.value.to_json())
            .inspect_err(|error| self.report.wrong(engine, error.to_string()))
            .ok()
    }

    /// Reads `metrics-data-source`: where the metrics of endpoints are.
    pub(super) fn data_source(&mut self, declared: &DeclaredPlugin) {
        for (key, entry) in declared.located().entries() {
            let no_effect = match (key.name.as_str(), &entry.node.value) {
                ("scheme", YamlValue::Text(scheme)) if scheme == "http" || scheme == "https" => {
                    self.location.https = scheme == "https";
                    None
                }
                ("path", YamlValue::Text(text)) if text.starts_with('/') => {
                    self.location.path = Some(text.clone());
                    None
                }
                ("port", value) if port(value).is_some() => {
                    self.location.port = port(value);
                    None
                }
                ("scheme" | "path" | "port", _) => {
                    let message =
                        "must be: scheme http or https, path with its leading '/', port 1 to 65535";
                    self.report.problem(&entry.path, key.line, message);
                    continue;
                }
                ("interval", _) => Some("set by --scrape-interval and --scrape-interval-busy"),
                ("insecureSkipVerify" | "caCertPath" | "clientCertPath" | "clientKeyPath", _) => {
                    Some(
                        "set by --endpoint-tls-ca, --endpoint-tls-cert, --endpoint-tls-key, --endpoint-tls-insecure",
                    )
                }
                (other, _) => {
                    let message = unknown("parameter", other, DATA_SOURCE);
                    self.report.problem(&entry.path, key.line, message);
                    continue;
                }
            };
            let (status, reason) = match no_effect {
                Some(reason) => (ItemStatus::NoEffect, reason),
                None => (ItemStatus::Implemented, "where an endpoint's metrics are"),
            };
            self.report.item(&entry.path, key.line, status, reason);
        }
    }
}

fn port(value: &YamlValue) -> Option<u16> {
    let number = match value {
        YamlValue::Number(number) if number.fract() == 0.0 && (1.0..=65535.0).contains(number) => {
            number.to_string()
        }
        YamlValue::Text(text) => text.clone(),
        _ => return None,
    };
    number.parse().ok().filter(|&p: &u16| p > 0)
}
