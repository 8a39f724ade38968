//! Reads objects from YAML: each field is known and typed, and each object gets an answer.
//!
//! Sources: llm-d-router `apix/v1alpha2`; for `InferenceModel`, gateway-api-inference-extension
//! before 1.0.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use scheduler::objects::{
    Criticality, ModelSpec, NAME_BYTES_MAX, RewriteSpec, TARGET_WEIGHT_MAX, TARGETS_MAX, TargetSpec,
};
use scheduler::plugin::closest;

use super::{ObjectBody, PoolObject};
use crate::config::yaml::{self, YamlNode, YamlValue};
use crate::config::{ConfigItem, ConfigProblem, ConfigReport, ItemStatus, below, unknown};

/// API groups of the kinds: the current one and earlier ones. Any version is accepted, because
/// later versions only added fields.
const GROUPS: [&str; 3] = [
    "llm-d.ai",
    "inference.networking.k8s.io",
    "inference.networking.x-k8s.io",
];

/// API groups of the pool that an object names.
const POOL_GROUPS: [&str; 2] = [
    "inference.networking.k8s.io",
    "inference.networking.x-k8s.io",
];

const POOL_KIND: &str = "InferencePool";

/// Fields of `metadata` in Kubernetes. Only name, namespace and creationTimestamp are read.
const METADATA: [&str; 12] = [
    "name",
    "namespace",
    "creationTimestamp",
    "labels",
    "annotations",
    "uid",
    "resourceVersion",
    "generation",
    "managedFields",
    "ownerReferences",
    "finalizers",
    "selfLink",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    /// A priority by name.
    InferenceObjective,
    /// A model that a pool serves.
    InferenceModel,
    /// Replaces requested models by others.
    InferenceModelRewrite,
}

const KINDS: [(&str, ObjectKind); 3] = [
    ("InferenceObjective", ObjectKind::InferenceObjective),
    ("InferenceModel", ObjectKind::InferenceModel),
    ("InferenceModelRewrite", ObjectKind::InferenceModelRewrite),
];

const CRITICALITIES: [(&str, Criticality); 3] = [
    ("Critical", Criticality::Critical),
    ("Standard", Criticality::Standard),
    ("Sheddable", Criticality::Sheddable),
];

/// Reads one file.
#[derive(Default)]
struct ObjectReader {
    report: ConfigReport,
    objects: Vec<PoolObject>,
    lines: BTreeMap<(ObjectKind, String, String), u64>,
}

/// Reads a file's text. Returns the report on each object, and the valid objects.
#[must_use]
pub fn read(text: &str) -> (ConfigReport, Vec<PoolObject>) {
    let mut reader = ObjectReader::default();
    match yaml::parse_all(text) {
        Ok(documents) => {
            let several = documents.len() > 1;
            for (i, document) in documents.iter().enumerate() {
                reader.document(
                    document,
                    &if several {
                        format!("[{i}]")
                    } else {
                        String::new()
                    },
                );
            }
        }
        Err((line, message)) => reader.problem("", line, message),
    }
    reader.report.errors.sort_by_key(|problem| problem.line);
    (reader.report, reader.objects)
}

// === impl ObjectReader ===

impl ObjectReader {
    /// Reads an object, or a `List` of objects as `kubectl get -o yaml` prints it.
    fn document(&mut self, node: &YamlNode, path: &str) {
        if !matches!(node.get("kind"), Some(YamlNode { value: YamlValue::Text(kind), .. }) if kind == "List")
        {
            return self.object(node, path);
        }
        self.fields(node, path, &["apiVersion", "kind", "metadata", "items"]);
        let at = below(path, "items");
        for (i, item) in self.list(node.get("items"), &at).iter().enumerate() {
            self.object(item, &format!("{at}[{i}]"));
        }
    }

    fn object(&mut self, node: &YamlNode, path: &str) {
        let wrong = self.report.errors.len();
        self.fields(
            node,
            path,
            &["apiVersion", "kind", "metadata", "spec", "status"],
        );
        self.api_version(node, path);
        let Some(kind) = self.choice(node, path, "kind", &KINDS) else {
            return;
        };
        let meta = self
            .required(node, path, "metadata")
            .and_then(|meta| self.metadata(meta, &below(path, "metadata")));
        let at = below(path, "spec");
        let Some(spec) = self.required(node, path, "spec") else {
            return;
        };
        let body = match kind {
            ObjectKind::InferenceObjective => self.objective(spec, &at),
            ObjectKind::InferenceModel => self.model(spec, &at),
            ObjectKind::InferenceModelRewrite => self.rewrite(spec, &at),
        };
        let pool = self
            .required(spec, &at, "poolRef")
            .and_then(|pool| self.pool(pool, &below(&at, "poolRef")));
        let (Some(body), Some(pool), Some((name, namespace, created))) = (body, pool, meta) else {
            return;
        };
        if let Some(line) = self
            .lines
            .insert((kind, namespace.clone(), name.clone()), node.line)
        {
            self.problem(
                path,
                node.line,
                format!("there is an {kind} {name:?} already (line {line})"),
            );
        }
        if self.report.errors.len() == wrong {
            let reason = format!("{kind} {name:?} of pool {pool:?}: {body}");
            self.report.items.push(ConfigItem {
                path: path.to_owned(),
                line: node.line,
                status: ItemStatus::Implemented,
                reason,
                substitute: None,
            });
            self.objects.push(PoolObject {
                name,
                namespace,
                pool,
                created,
                body,
            });
        }
    }

    fn api_version(&mut self, node: &YamlNode, path: &str) {
        let Some(given) = self.required(node, path, "apiVersion") else {
            return;
        };
        let at = below(path, "apiVersion");
        let Some(text) = self.text(given, &at) else {
            return;
        };
        let (group, version) = text.split_once('/').unwrap_or((&text, ""));
        if !GROUPS.contains(&group) {
            self.problem(
                &at,
                given.line,
                format!(
                    "{} (followed by / and a version)",
                    unknown("group", group, GROUPS)
                ),
            );
        } else if !version
            .strip_prefix('v')
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        {
            self.problem(
                &at,
                given.line,
                format!("{version:?} is not a version such as v1alpha2"),
            );
        }
    }

    /// Reads name, namespace and creation time.
    fn metadata(
        &mut self,
        node: &YamlNode,
        path: &str,
    ) -> Option<(String, String, Option<String>)> {
        self.fields(node, path, &METADATA);
        let name = self
            .required(node, path, "name")
            .and_then(|name| self.name(name, &below(path, "name")))?;
        let namespace = match node.get("namespace") {
            Some(namespace) => self.name(namespace, &below(path, "namespace"))?,
            None => String::new(),
        };
        let created = match node.get("creationTimestamp") {
            Some(created) => Some(self.timestamp(created, &below(path, "creationTimestamp"))?),
            None => None,
        };
        Some((name, namespace, created))
    }

    fn pool(&mut self, node: &YamlNode, path: &str) -> Option<String> {
        self.fields(node, path, &["group", "kind", "name"]);
        for (field, allowed) in [("group", &POOL_GROUPS[..]), ("kind", &[POOL_KIND][..])] {
            let Some(given) = node.get(field) else {
                continue;
            };
            let at = below(path, field);
            if let Some(text) = self
                .text(given, &at)
                .filter(|text| !allowed.contains(&text.as_str()))
            {
                self.problem(
                    &at,
                    given.line,
                    unknown(field, &text, allowed.iter().copied()),
                );
            }
        }
        self.required(node, path, "name")
            .and_then(|name| self.name(name, &below(path, "name")))
    }

    fn objective(&mut self, spec: &YamlNode, path: &str) -> Option<ObjectBody> {
        self.fields(spec, path, &["priority", "poolRef"]);
        let range = i64::from(i32::MIN)..=i64::from(i32::MAX);
        let priority = match spec.get("priority") {
            Some(priority) => self.whole(priority, &below(path, "priority"), &range)?,
            None => 0,
        };
        Some(ObjectBody::Objective {
            priority: i32::try_from(priority).ok()?,
        })
    }

    fn model(&mut self, spec: &YamlNode, path: &str) -> Option<ObjectBody> {
        self.fields(
            spec,
            path,
            &["modelName", "criticality", "targetModels", "poolRef"],
        );
        let name = self
            .required(spec, path, "modelName")
            .and_then(|name| self.name(name, &below(path, "modelName")))?;
        let criticality = match spec.get("criticality") {
            Some(_) => self.choice(spec, path, "criticality", &CRITICALITIES)?,
            None => Criticality::Standard,
        };
        let targets = self.targets(
            spec.get("targetModels"),
            &below(path, "targetModels"),
            "name",
            0,
        );
        Some(ObjectBody::Model(ModelSpec {
            name,
            priority: criticality.priority(),
            targets,
        }))
    }

    fn rewrite(&mut self, spec: &YamlNode, path: &str) -> Option<ObjectBody> {
        self.fields(spec, path, &["rules", "poolRef"]);
        let rules = self.required(spec, path, "rules")?;
        let at = below(path, "rules");
        let mut read = Vec::new();
        for (i, rule) in self.list(Some(rules), &at).iter().enumerate() {
            let at = format!("{at}[{i}]");
            self.fields(rule, &at, &["matches", "targets"]);
            let matches = below(&at, "matches");
            let targets = below(&at, "targets");
            let mut models = Vec::new();
            for (i, given) in self
                .at_most(rule.get("matches"), &matches)
                .iter()
                .enumerate()
            {
                models.extend(self.matched(given, &format!("{matches}[{i}]")));
            }
            let targets = self.targets(rule.get("targets"), &targets, "modelRewrite", 1);
            read.push(RewriteSpec { models, targets });
        }
        Some(ObjectBody::Rewrite(read))
    }

    fn matched(&mut self, node: &YamlNode, path: &str) -> Option<String> {
        self.fields(node, path, &["model"]);
        let model = self.required(node, path, "model")?;
        let at = below(path, "model");
        self.fields(model, &at, &["type", "value"]);
        if model.get("type").is_some() {
            self.choice(model, &at, "type", &[("Exact", ())]);
        }
        self.required(model, &at, "value")
            .and_then(|value| self.name(value, &below(&at, "value")))
    }

    /// Reads targets, with the model under `key` and weights of at least `weight_min`.
    fn targets(
        &mut self,
        node: Option<&YamlNode>,
        path: &str,
        key: &str,
        weight_min: i64,
    ) -> Vec<TargetSpec> {
        let mut targets = Vec::new();
        for (i, target) in self.at_most(node, path).iter().enumerate() {
            let path = format!("{path}[{i}]");
            self.fields(target, &path, &[key, "weight"]);
            let model = self
                .required(target, &path, key)
                .and_then(|model| self.name(model, &below(&path, key)));
            let range = weight_min..=i64::from(TARGET_WEIGHT_MAX);
            let weight = target
                .get("weight")
                .and_then(|weight| self.whole(weight, &below(&path, "weight"), &range));
            targets.extend(model.map(|model| TargetSpec {
                model,
                weight: weight.and_then(|w| u32::try_from(w).ok()),
            }));
        }
        let unweighted = targets.iter().filter(|t| t.weight.is_none()).count();
        if unweighted > 0 && unweighted < targets.len() {
            let reason = format!(
                "{unweighted} of {} targets have no weight beside weighted ones: they are never picked",
                targets.len()
            );
            let line = node.map_or(0, |n| n.line);
            self.report.items.push(ConfigItem {
                path: path.to_owned(),
                line,
                status: ItemStatus::NoEffect,
                reason,
                substitute: None,
            });
        }
        targets
    }

    // --- nodes as what they must be

    fn problem(&mut self, path: &str, line: u64, message: impl Into<String>) {
        self.report.errors.push(ConfigProblem {
            path: path.to_owned(),
            line,
            message: message.into(),
        });
    }

    fn fields(&mut self, node: &YamlNode, path: &str, allowed: &[&str]) {
        if !matches!(node.value, YamlValue::Map(_)) {
            self.problem(
                path,
                node.line,
                format!("must be a map, not {}", node.value.kind()),
            );
        }
        for (key, _) in node
            .entries()
            .iter()
            .filter(|(key, _)| !allowed.contains(&key.name.as_str()))
        {
            self.problem(
                &below(path, &key.name),
                key.line,
                unknown("field", &key.name, allowed.iter().copied()),
            );
        }
    }

    fn required<'n>(&mut self, node: &'n YamlNode, path: &str, name: &str) -> Option<&'n YamlNode> {
        let found = node.get(name);
        if found.is_none() && matches!(node.value, YamlValue::Map(_)) {
            self.problem(path, node.line, format!("has no {name}"));
        }
        found
    }

    fn list<'n>(&mut self, node: Option<&'n YamlNode>, path: &str) -> &'n [YamlNode] {
        match node.map(|n| (&n.value, n.line)) {
            Some((YamlValue::List(list), _)) => list,
            None => &[],
            Some((other, line)) => {
                self.problem(path, line, format!("must be a list, not {}", other.kind()));
                &[]
            }
        }
    }

    fn at_most<'n>(&mut self, node: Option<&'n YamlNode>, path: &str) -> &'n [YamlNode] {
        let list = self.list(node, path);
        if list.len() > TARGETS_MAX {
            self.problem(
                path,
                node.map_or(0, |n| n.line),
                format!("has {}, at most {TARGETS_MAX} are allowed", list.len()),
            );
        }
        list
    }

    fn choice<T: Copy>(
        &mut self,
        node: &YamlNode,
        path: &str,
        name: &str,
        allowed: &[(&str, T)],
    ) -> Option<T> {
        let given = self.required(node, path, name)?;
        let at = below(path, name);
        let text = self.text(given, &at)?;
        let found = allowed
            .iter()
            .find(|(known, _)| *known == text)
            .map(|(_, value)| *value);
        if found.is_none() {
            self.problem(
                &at,
                given.line,
                unknown(name, &text, allowed.iter().map(|(known, _)| *known)),
            );
        }
        found
    }

    fn text(&mut self, node: &YamlNode, path: &str) -> Option<String> {
        match &node.value {
            YamlValue::Text(text) => Some(text.clone()),
            other => {
                self.problem(
                    path,
                    node.line,
                    format!("must be text, not {}", other.kind()),
                );
                None
            }
        }
    }

    fn name(&mut self, node: &YamlNode, path: &str) -> Option<String> {
        let text = self.text(node, path)?;
        if (1..=NAME_BYTES_MAX).contains(&text.len()) {
            return Some(text);
        }
        self.problem(
            path,
            node.line,
            format!(
                "has {} bytes, 1 to {NAME_BYTES_MAX} are allowed",
                text.len()
            ),
        );
        None
    }

    fn whole(&mut self, node: &YamlNode, path: &str, range: &RangeInclusive<i64>) -> Option<i64> {
        let number = match &node.value {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "saturates, and no allowed range reaches that far"
            )]
            YamlValue::Number(number) if number.fract() == 0.0 => Some(*number as i64),
            _ => None,
        };
        let found = number.filter(|number| range.contains(number));
        if found.is_none() {
            self.problem(
                path,
                node.line,
                format!(
                    "must be a whole number from {} to {}",
                    range.start(),
                    range.end()
                ),
            );
        }
        found
    }

    /// Reads a timestamp. Only the format of Kubernetes is accepted, so that timestamps sort as
    /// text.
    fn timestamp(&mut self, node: &YamlNode, path: &str) -> Option<String> {
        const SHAPE: &str = "0000-00-00T00:00:00Z";
        let text = self.text(node, path)?;
        let digit = |given: u8, shape: u8| {
            if shape == b'0' {
                given.is_ascii_digit()
            } else {
                given == shape
            }
        };
        if text.len() == SHAPE.len()
            && text
                .bytes()
                .zip(SHAPE.bytes())
                .all(|(given, shape)| digit(given, shape))
        {
            return Some(text);
        }
        self.problem(
            path,
            node.line,
            format!("{text:?} is not a time such as 2026-11-21T15:06:35Z"),
        );
        None
    }
}

// === impl ObjectKind ===

impl ObjectKind {
    /// The kind with this name or the nearest name; `None` if none is near.
    #[must_use]
    pub fn nearest(name: &str) -> Option<Self> {
        let meant = closest(name, KINDS.map(|(known, _)| known))?;
        KINDS
            .iter()
            .find(|(known, _)| *known == meant)
            .map(|(_, kind)| *kind)
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS
            .iter()
            .find(|(_, kind)| kind == self)
            .map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

// === impl ObjectBody ===

/// Describes the object in one line.
impl fmt::Display for ObjectBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Objective { priority } => write!(f, "priority {priority}"),
            Self::Model(model) if model.targets.is_empty() => {
                write!(f, "model {:?}, priority {}", model.name, model.priority)
            }
            Self::Model(model) => write!(
                f,
                "model {:?}, priority {}, targets {}",
                model.name,
                model.priority,
                listed(&model.targets)
            ),
            Self::Rewrite(rules) => {
                for (i, rule) in rules.iter().enumerate() {
                    let models = if rule.models.is_empty() {
                        "any model".to_owned()
                    } else {
                        rule.models.join(" or ")
                    };
                    let targets = if rule.targets.is_empty() {
                        "itself".to_owned()
                    } else {
                        listed(&rule.targets)
                    };
                    write!(
                        f,
                        "{}{models} becomes {targets}",
                        if i == 0 { "" } else { "; " }
                    )?;
                }
                Ok(())
            }
        }
    }
}

fn listed(targets: &[TargetSpec]) -> String {
    let one = |t: &TargetSpec| {
        t.weight.map_or_else(
            || t.model.clone(),
            |weight| format!("{} ({weight})", t.model),
        )
    };
    targets.iter().map(one).collect::<Vec<_>>().join(", ")
}
