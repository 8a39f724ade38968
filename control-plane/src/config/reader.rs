//! Walks the tree of a file, answers for every item of it, and gathers what it configures.

use std::sync::Arc;

use scheduler::plugin::{self, InvalidParameter, Kind, closest};
use scheduler::{InvalidProfile, PluginSpec, Profile, ProfileSpec};

use super::known::{FEATURE_GATES, Fate, PARAMETERS, PLUGIN_TYPES, SECTIONS};
use super::yaml::{self, Key, Node, Value};
use super::{Item, PoolConfig, Problem, Report, Status};
use crate::feed::Scraping;
use crate::scrape::MetricsLocation;
use crate::scrape::engine::{EngineConfig, Engines};

/// The dialects spoken: the reference's current and older names of one format.
const API_VERSIONS: [&str; 3] = ["llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"];

const KIND: &str = "EndpointPickerConfig";

/// Endpoints in a ranked list when the file does not say: two retries have somewhere good to go.
const RANKED_MAX_DEFAULT: u32 = 3;

/// The largest plugin name or text parameter, in bytes, so that a profile of [`scheduler`]'s size fits a message beside a full roster.
const TEXT_BYTES_MAX: usize = 1024;

/// A plugin as declared.
struct Declared {
    name: String,
    plugin_type: String,
    parameters: Vec<(Key, Node)>,
    path: String,
    line: u64,
}

/// Reads one file.
#[derive(Default)]
struct Reader {
    report: Report,
    plugins: Vec<Declared>,
    engines: Option<Engines>,
    location: MetricsLocation,
}

/// Reads a file's text: what becomes of it, and what it configures as far as it can be told.
pub(super) fn read(text: &str) -> (Report, Option<PoolConfig>) {
    let mut reader = Reader::default();
    let config = match yaml::parse(text) {
        Ok(root) => reader.file(&root),
        Err((line, message)) => {
            reader.problem("", line, message);
            None
        }
    };
    (reader.report, config)
}

// === impl Reader ===

impl Reader {
    fn problem(&mut self, path: &str, line: u64, message: impl Into<String>) {
        self.report.errors.push(Problem { path: path.to_owned(), line, message: message.into() });
    }

    fn item(&mut self, path: &str, line: u64, status: Status, reason: impl Into<String>) {
        self.report.items.push(Item { path: path.to_owned(), line, status, reason: reason.into(), substitute: None });
    }

    fn fate(&mut self, path: &str, line: u64, fate: Fate) {
        match fate {
            Fate::NoEffect(reason) => self.item(path, line, Status::NoEffect, reason),
            Fate::Refused(instead) => self.report.items.push(Item {
                path: path.to_owned(),
                line,
                status: Status::Refused,
                reason: "not there in this version".to_owned(),
                substitute: Some(instead.to_owned()),
            }),
        }
    }

    fn file(&mut self, root: &Node) -> Option<PoolConfig> {
        let section_names = SECTIONS.iter().map(|(name, ..)| *name);
        let names: Vec<&str> =
            ["apiVersion", "kind", "metadata", "featureGates", "plugins", "schedulingProfiles"].into_iter().chain(section_names).collect();
        let top = self.map(root, "", &names)?;
        let get = |name: &str| top.iter().find(|(k, _)| k.name == name);
        self.constant(get("apiVersion"), "apiVersion", &API_VERSIONS);
        self.constant(get("kind"), "kind", &[KIND]);
        if let Some((_, gates)) = get("featureGates") {
            self.feature_gates(gates);
        }
        if let Some((_, plugins)) = get("plugins") {
            self.plugins(plugins);
        }
        for (name, allowed, fate) in SECTIONS {
            if let Some((key, section)) = get(name) {
                self.map(section, name, allowed);
                self.references(section, name);
                self.fate(name, key.line, *fate);
            }
        }
        let profile = match get("schedulingProfiles") {
            Some((_, profiles)) => self.profiles(profiles)?,
            None => self.implied_profile(),
        };
        self.one_picker(&profile.plugins, get("schedulingProfiles").map_or(0, |(key, _)| key.line));
        self.check_profile(&profile);
        let engines = match self.engines.take() {
            Some(engines) => engines,
            None => Engines::try_new(&[], "", "").ok()?,
        };
        Some(PoolConfig { profile, scraping: Scraping { engines: Arc::new(engines), location: std::mem::take(&mut self.location) } })
    }

    fn constant(&mut self, entry: Option<&(Key, Node)>, name: &str, allowed: &[&str]) {
        match entry {
            Some((_, Node { value: Value::Text(text), .. })) if allowed.contains(&text.as_str()) => {}
            Some((key, _)) => self.problem(name, key.line, format!("must be {}", allowed.join(" or "))),
            None => self.problem(name, 0, format!("is missing: {}", allowed.join(" or "))),
        }
    }

    fn feature_gates(&mut self, gates: &Node) {
        for (i, gate) in self.list(gates, "featureGates").iter().enumerate() {
            let path = format!("featureGates[{i}]");
            let Some(text) = self.text(gate, &path) else { continue };
            let (name, on) = match text.split_once('=') {
                None => (text.as_str(), true),
                Some((name, "true")) => (name, true),
                Some((name, "false")) => (name, false),
                Some((_, other)) => {
                    self.problem(&path, gate.line, format!("{other:?} is neither true nor false"));
                    continue;
                }
            };
            match FEATURE_GATES.iter().find(|(known, _)| *known == name) {
                Some((_, Fate::Refused(_))) if !on => self.item(&path, gate.line, Status::NoEffect, "it is off anyway"),
                Some((_, fate)) => self.fate(&path, gate.line, *fate),
                None => self.problem(&path, gate.line, unknown("feature gate", name, FEATURE_GATES.iter().map(|(n, _)| *n))),
            }
        }
    }

    fn plugins(&mut self, plugins: &Node) {
        for (i, plugin) in self.list(plugins, "plugins").iter().enumerate() {
            let path = format!("plugins[{i}]");
            let Some(declared) = self.declared(plugin, path) else { continue };
            if let Some(other) = self.plugins.iter().find(|p| p.name == declared.name) {
                let message = format!("the name {:?} is taken by {} (line {})", declared.name, other.path, other.line);
                self.problem(&declared.path, declared.line, message);
            }
            self.plugin_type(&declared);
            self.plugins.push(declared);
        }
    }

    fn declared(&mut self, plugin: &Node, path: String) -> Option<Declared> {
        let entries = self.map(plugin, &path, &["name", "type", "parameters"])?;
        let get = |name: &str| entries.iter().find(|(k, _)| k.name == name).map(|(_, n)| n);
        let Some(plugin_type) = get("type") else {
            self.problem(&path, plugin.line, "has no type");
            return None;
        };
        let plugin_type = self.text(plugin_type, &format!("{path}.type"))?;
        let name = match get("name") {
            Some(name) => self.text(name, &format!("{path}.name"))?,
            None => plugin_type.clone(),
        };
        let parameters = match get("parameters") {
            None | Some(Node { value: Value::Null, .. }) => Vec::new(),
            Some(Node { value: Value::Map(entries), .. }) => entries.clone(),
            Some(other) => {
                self.problem(&format!("{path}.parameters"), other.line, format!("must be a map, not {}", other.value.kind()));
                return None;
            }
        };
        Some(Declared { name, plugin_type, parameters, path, line: plugin.line })
    }

    /// Says what becomes of a declared plugin.
    fn plugin_type(&mut self, declared: &Declared) {
        let Declared { plugin_type, path, line, parameters, .. } = declared;
        if let Some(row) = plugin::lookup(plugin_type) {
            let (given, problems) = parameters_of(declared);
            for (key, message) in problems {
                self.problem(&format!("{path}.parameters.{}", key.name), key.line, message);
            }
            for (key, _) in parameters {
                if let Some((.., fate)) = PARAMETERS.iter().find(|(t, p, _)| t == plugin_type && *p == key.name) {
                    self.fate(&format!("{path}.parameters.{}", key.name), key.line, *fate);
                }
            }
            if let Err(error) = row.build(&given) {
                let key = parameters.iter().map(|(k, _)| k).find(|k| k.name == parameter_name(&error));
                let line = key.map_or(*line, |k| k.line);
                self.problem(&format!("{path}.parameters.{}", parameter_name(&error)), line, error.to_string());
            }
            self.item(path, *line, Status::Implemented, row.doc);
            return;
        }
        match PLUGIN_TYPES.iter().find(|(name, _)| name == plugin_type) {
            Some((_, fate)) => {
                self.fate(path, *line, *fate);
                match plugin_type.as_str() {
                    "core-metrics-extractor" => self.extractor(declared),
                    "metrics-data-source" => self.data_source(declared),
                    _ => {
                        if let Fate::NoEffect(_) = fate {
                            self.ignored_parameters(declared, &[]);
                        }
                    }
                }
            }
            None => {
                let names = plugin::PLUGINS.iter().map(|p| p.name).chain(PLUGIN_TYPES.iter().map(|(name, _)| *name));
                self.problem(&format!("{path}.type"), *line, unknown("plugin type", plugin_type, names));
            }
        }
    }

    fn ignored_parameters(&mut self, declared: &Declared, used: &[&str]) {
        for (key, _) in declared.parameters.iter().filter(|(key, _)| !used.contains(&key.name.as_str())) {
            let path = format!("{}.parameters.{}", declared.path, key.name);
            self.item(&path, key.line, Status::NoEffect, format!("{} does nothing of its own here", declared.plugin_type));
        }
    }

    /// `core-metrics-extractor`: names of engines' metrics.
    fn extractor(&mut self, declared: &Declared) {
        const USED: [&str; 3] = ["engineConfigs", "defaultEngine", "engineLabelKey"];
        self.ignored_parameters(declared, &USED);
        let get = |name: &str| declared.parameters.iter().find(|(k, _)| k.name == name);
        let path = format!("{}.parameters", declared.path);
        let mut texts = [String::new(), String::new()];
        for (name, text) in ["defaultEngine", "engineLabelKey"].into_iter().zip(&mut texts) {
            if let Some((_, node)) = get(name) {
                *text = self.text(node, &format!("{path}.{name}")).unwrap_or_default();
            }
        }
        let [default_engine, label] = texts;
        let mut configs = Vec::new();
        if let Some((_, node)) = get("engineConfigs") {
            for (i, engine) in self.list(node, &format!("{path}.engineConfigs")).iter().enumerate() {
                match serde_json::from_value::<EngineConfig>(engine.value.to_json()) {
                    Ok(config) => configs.push(config),
                    Err(error) => self.problem(&format!("{path}.engineConfigs[{i}]"), engine.line, error.to_string()),
                }
            }
        }
        match Engines::try_new(&configs, &default_engine, &label) {
            Ok(engines) => self.engines = Some(engines),
            Err(error) => self.problem(&path, declared.line, error.to_string()),
        }
    }

    /// `metrics-data-source`: where metrics are.
    fn data_source(&mut self, declared: &Declared) {
        for (key, node) in &declared.parameters {
            let path = format!("{}.parameters.{}", declared.path, key.name);
            match (key.name.as_str(), &node.value) {
                ("scheme", Value::Text(scheme)) if scheme == "http" || scheme == "https" => self.location.https = scheme == "https",
                ("path", Value::Text(text)) if text.starts_with('/') => self.location.path = Some(text.clone()),
                ("port", value) if port(value).is_some() => self.location.port = port(value),
                ("scheme" | "path" | "port", _) => {
                    self.problem(&path, key.line, "must be: scheme http or https, path with its leading '/', port 1 to 65535");
                }
                ("interval", _) => self.item(&path, key.line, Status::NoEffect, "set by --scrape-interval and --scrape-interval-busy"),
                ("insecureSkipVerify" | "caCertPath" | "clientCertPath" | "clientKeyPath", _) => {
                    self.item(
                        &path,
                        key.line,
                        Status::NoEffect,
                        "set by --endpoint-tls-ca, --endpoint-tls-cert, --endpoint-tls-key, --endpoint-tls-insecure",
                    );
                }
                (other, _) => {
                    let known =
                        ["scheme", "path", "port", "interval", "insecureSkipVerify", "caCertPath", "clientCertPath", "clientKeyPath"];
                    self.problem(&path, key.line, unknown("parameter", other, known));
                }
            }
        }
    }

    fn profiles(&mut self, profiles: &Node) -> Option<ProfileSpec> {
        let profiles = self.list(profiles, "schedulingProfiles").to_vec();
        for (i, extra) in profiles.iter().enumerate().skip(1) {
            self.fate(&format!("schedulingProfiles[{i}]"), extra.line, Fate::Refused("a pool for each profile (--pools)"));
        }
        let Some(first) = profiles.first() else {
            return Some(self.implied_profile());
        };
        let path = "schedulingProfiles[0]";
        let entries = self.map(first, path, &["name", "plugins"])?;
        let get = |name: &str| entries.iter().find(|(k, _)| k.name == name).map(|(_, n)| n);
        let name = match get("name") {
            Some(name) => self.text(name, &format!("{path}.name"))?,
            None => {
                self.problem(path, first.line, "has no name");
                return None;
            }
        };
        let mut plugins = Vec::new();
        if let Some(node) = get("plugins") {
            for (i, reference) in self.list(node, &format!("{path}.plugins")).iter().enumerate() {
                plugins.extend(self.profile_plugin(reference, &format!("{path}.plugins[{i}]")));
            }
        }
        Some(ProfileSpec { name, plugins, ranked_max: RANKED_MAX_DEFAULT })
    }

    fn one_picker(&mut self, plugins: &[PluginSpec], line: u64) {
        let is_picker = |p: &&PluginSpec| plugin::lookup(&p.plugin_type).is_some_and(|row| row.kind == Kind::Picker);
        let pickers: Vec<&str> = plugins.iter().filter(is_picker).map(|p| p.name.as_str()).collect();
        if pickers.len() > 1 {
            self.problem(
                "schedulingProfiles[0]",
                line,
                format!("a profile has one picker, this one {}: {}", pickers.len(), pickers.join(", ")),
            );
        }
    }

    fn profile_plugin(&mut self, reference: &Node, path: &str) -> Option<PluginSpec> {
        let entries = self.map(reference, path, &["pluginRef", "weight"])?;
        let get = |name: &str| entries.iter().find(|(k, _)| k.name == name).map(|(_, n)| n);
        let Some(node) = get("pluginRef") else {
            self.problem(path, reference.line, "has no pluginRef");
            return None;
        };
        let name = self.reference(node, &format!("{path}.pluginRef"))?;
        let weight = match get("weight") {
            None => 1.0,
            Some(Node { value: Value::Number(weight), .. }) => *weight,
            Some(other) => {
                self.problem(&format!("{path}.weight"), other.line, format!("must be a number, not {}", other.value.kind()));
                return None;
            }
        };
        let declared = self.plugins.iter().find(|p| p.name == name)?;
        let row = plugin::lookup(&declared.plugin_type)?;
        let spec = spec(declared, weight);
        if row.kind == Kind::Scorer {
            if !(0.0..=scheduler::WEIGHT_MAX).contains(&weight) {
                self.problem(
                    &format!("{path}.weight"),
                    reference.line,
                    format!("a weight is a number from 0 to {}", scheduler::WEIGHT_MAX),
                );
            }
        } else if get("weight").is_some() {
            self.item(&format!("{path}.weight"), reference.line, Status::NoEffect, "only scorers are weighted");
        }
        Some(spec)
    }

    /// No profile is given: all plugins declared, each with weight 1.
    fn implied_profile(&mut self) -> ProfileSpec {
        let ours = self.plugins.iter().filter(|p| plugin::lookup(&p.plugin_type).is_some());
        let plugins: Vec<PluginSpec> = ours.map(|declared| spec(declared, 1.0)).collect();
        if plugins.is_empty() {
            self.item("schedulingProfiles", 0, Status::NoEffect, "no scheduling plugin is declared: the default profile holds");
            return ProfileSpec::default_profile();
        }
        ProfileSpec { name: "default".to_owned(), plugins, ranked_max: RANKED_MAX_DEFAULT }
    }

    /// What only the whole profile can be wrong in; the rest was found where it stands.
    fn check_profile(&mut self, profile: &ProfileSpec) {
        match Profile::build(profile) {
            Ok(_)
            | Err(
                InvalidProfile::Parameter { .. }
                | InvalidProfile::Weight { .. }
                | InvalidProfile::UnknownPlugin(_)
                | InvalidProfile::TwoPickers(..),
            ) => {}
            Err(error) => self.problem("schedulingProfiles[0]", 0, error.to_string()),
        }
    }

    /// Every `pluginRef` below a section must name a declared plugin.
    fn references(&mut self, node: &Node, path: &str) {
        match &node.value {
            Value::List(list) => list.iter().enumerate().for_each(|(i, n)| self.references(n, &format!("{path}[{i}]"))),
            Value::Map(entries) => {
                for (key, value) in entries {
                    let path = format!("{path}.{}", key.name);
                    if key.name == "pluginRef" {
                        self.reference(value, &path);
                    } else {
                        self.references(value, &path);
                    }
                }
            }
            _ => {}
        }
    }

    fn reference(&mut self, node: &Node, path: &str) -> Option<String> {
        let name = self.text(node, path)?;
        if self.plugins.iter().any(|p| p.name == name) {
            return Some(name);
        }
        let message = unknown("plugin name", &name, self.plugins.iter().map(|p| p.name.as_str()));
        self.problem(path, node.line, message);
        None
    }

    fn map<'n>(&mut self, node: &'n Node, path: &str, allowed: &[&str]) -> Option<&'n [(Key, Node)]> {
        let Value::Map(entries) = &node.value else {
            self.problem(path, node.line, format!("must be a map, not {}", node.value.kind()));
            return None;
        };
        for (key, _) in entries.iter().filter(|(key, _)| !allowed.contains(&key.name.as_str())) {
            let path = if path.is_empty() { key.name.clone() } else { format!("{path}.{}", key.name) };
            self.problem(&path, key.line, unknown("field", &key.name, allowed.iter().copied()));
        }
        Some(entries)
    }

    fn list<'n>(&mut self, node: &'n Node, path: &str) -> &'n [Node] {
        match &node.value {
            Value::List(list) => list,
            Value::Null => &[],
            other => {
                self.problem(path, node.line, format!("must be a list, not {}", other.kind()));
                &[]
            }
        }
    }

    fn text(&mut self, node: &Node, path: &str) -> Option<String> {
        match &node.value {
            Value::Text(text) if text.len() <= TEXT_BYTES_MAX => Some(text.clone()),
            Value::Text(text) => {
                self.problem(path, node.line, format!("{} bytes; at most {TEXT_BYTES_MAX} are allowed", text.len()));
                None
            }
            other => {
                self.problem(path, node.line, format!("must be text, not {}", other.kind()));
                None
            }
        }
    }
}

fn spec(declared: &Declared, weight: f64) -> PluginSpec {
    PluginSpec { plugin_type: declared.plugin_type.clone(), name: declared.name.clone(), weight, parameters: parameters_of(declared).0 }
}

type Given = Vec<(String, plugin::Value)>;

/// Parameters as the scheduler takes them, and those whose values it cannot take.
fn parameters_of(declared: &Declared) -> (Given, Vec<(&Key, String)>) {
    let (mut given, mut problems) = (Vec::new(), Vec::new());
    let elsewhere = |key: &Key| PARAMETERS.iter().any(|(t, p, _)| *t == declared.plugin_type && *p == key.name);
    for (key, node) in declared.parameters.iter().filter(|(key, _)| !elsewhere(key)) {
        let value = match &node.value {
            Value::Number(number) => plugin::Value::Number(*number),
            Value::Flag(flag) => plugin::Value::Flag(*flag),
            Value::Text(text) if text.len() <= TEXT_BYTES_MAX => plugin::Value::Text(text.clone()),
            other => {
                problems.push((key, format!("must be a number, a flag or a short text, not {}", other.kind())));
                continue;
            }
        };
        given.push((key.name.clone(), value));
    }
    (given, problems)
}

fn parameter_name(error: &InvalidParameter) -> &str {
    match error {
        InvalidParameter::Unknown { name, .. }
        | InvalidParameter::Duplicate(name)
        | InvalidParameter::Missing(name)
        | InvalidParameter::TooLarge(name)
        | InvalidParameter::WrongType { name, .. }
        | InvalidParameter::OutOfRange { name, .. } => name,
        InvalidParameter::Within { path, .. } => path.split('[').next().unwrap_or(path),
    }
}

fn port(value: &Value) -> Option<u16> {
    let number = match value {
        Value::Number(number) if number.fract() == 0.0 && (1.0..=65535.0).contains(number) => number.to_string(),
        Value::Text(text) => text.clone(),
        _ => return None,
    };
    number.parse().ok().filter(|&p: &u16| p > 0)
}

fn unknown<'a>(what: &str, name: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    match closest(name, known.clone()) {
        Some(near) => format!("unknown {what} {name:?}; did you mean {near:?}?"),
        None => {
            let known: Vec<&str> = known.into_iter().take(12).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            format!("unknown {what} {name:?}; known are {known}")
        }
    }
}
