//! How engines' metrics are read: `core-metrics-extractor` and `metrics-data-source`.

use std::sync::Arc;

use super::plugins::DeclaredPlugin;
use super::{ConfigReader, below, unknown};
use crate::config::ItemStatus;
use crate::config::yaml::{YamlNode, YamlValue};
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
    /// The collected settings; built-in ones where the file has none.
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
        let mut texts = [String::new(), String::new()];
        for (name, text) in ["defaultEngine", "engineLabelKey"]
            .into_iter()
            .zip(&mut texts)
        {
            if let Some(node) = declared.parameters.get(name) {
                *text = self
                    .text(node, &declared.parameter(name))
                    .unwrap_or_default();
            }
        }
        let [default_engine, label] = texts;
        let mut configs = Vec::new();
        if let Some(node) = declared.parameters.get("engineConfigs") {
            let path = declared.parameter("engineConfigs");
            for (i, engine) in self.list(node, &path).iter().enumerate() {
                configs.extend(self.engine(engine, &format!("{path}[{i}]")));
            }
        }
        match EngineTable::try_new(&configs, &default_engine, &label) {
            Ok(engines) => self.engines = Some(engines),
            Err(error) => self.problem(
                &format!("{}.parameters", declared.path),
                declared.line,
                error.to_string(),
            ),
        }
        for (key, _) in declared.entries() {
            let path = declared.parameter(&key.name);
            match USED.iter().find(|(name, _)| *name == key.name) {
                Some((_, meaning)) => self.item(&path, key.line, ItemStatus::Implemented, *meaning),
                None => self.problem(
                    &path,
                    key.line,
                    unknown("parameter", &key.name, USED.map(|(name, _)| name)),
                ),
            }
        }
    }

    fn engine(&mut self, engine: &YamlNode, path: &str) -> Option<EngineConfig> {
        let problems = self.report.errors.len();
        self.map(engine, path, &EngineConfig::FIELDS)?;
        if let Some(custom) = engine.get("customMetrics") {
            for (i, metric) in self
                .list(custom, &below(path, "customMetrics"))
                .iter()
                .enumerate()
            {
                self.map(
                    metric,
                    &format!("{path}.customMetrics[{i}]"),
                    &CustomMetric::FIELDS,
                );
            }
        }
        if self.report.errors.len() > problems {
            return None;
        }
        let read = serde_json::from_value(engine.value.to_json());
        read.inspect_err(|error| self.problem(path, engine.line, error.to_string()))
            .ok()
    }

    /// Reads `metrics-data-source`: where the metrics of endpoints are.
    pub(super) fn data_source(&mut self, declared: &DeclaredPlugin) {
        for (key, node) in declared.entries() {
            let path = declared.parameter(&key.name);
            match (key.name.as_str(), &node.value) {
                ("scheme", YamlValue::Text(scheme)) if scheme == "http" || scheme == "https" => {
                    self.location.https = scheme == "https";
                }
                ("path", YamlValue::Text(text)) if text.starts_with('/') => {
                    self.location.path = Some(text.clone());
                }
                ("port", value) if port(value).is_some() => self.location.port = port(value),
                ("scheme" | "path" | "port", _) => {
                    self.problem(
                        &path,
                        key.line,
                        "must be: scheme http or https, path with its leading '/', port 1 to 65535",
                    );
                    continue;
                }
                ("interval", _) => {
                    self.item(
                        &path,
                        key.line,
                        ItemStatus::NoEffect,
                        "set by --scrape-interval and --scrape-interval-busy",
                    );
                    continue;
                }
                ("insecureSkipVerify" | "caCertPath" | "clientCertPath" | "clientKeyPath", _) => {
                    let flags = "set by --endpoint-tls-ca, --endpoint-tls-cert, --endpoint-tls-key, --endpoint-tls-insecure";
                    self.item(&path, key.line, ItemStatus::NoEffect, flags);
                    continue;
                }
                (other, _) => {
                    self.problem(&path, key.line, unknown("parameter", other, DATA_SOURCE));
                    continue;
                }
            }
            self.item(
                &path,
                key.line,
                ItemStatus::Implemented,
                "where an endpoint's metrics are",
            );
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
