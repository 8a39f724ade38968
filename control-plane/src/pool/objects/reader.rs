//! Reads objects from YAML. Checks the name and type of each field, and reports on each object.
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
use crate::config::{ConfigReport, ItemStatus, LocatedNode, unknown};

/// The API groups of the kinds: the current group, then earlier groups. The reader accepts any
/// version, because later versions only added fields.
const GROUPS: [&str; 3] = [
    "llm-d.ai",
    "inference.networking.k8s.io",
    "inference.networking.x-k8s.io",
];

/// The API groups to which the pool of an object may belong.
const POOL_GROUPS: [&str; 2] = [
    "inference.networking.k8s.io",
    "inference.networking.x-k8s.io",
];

const POOL_KIND: &str = "InferencePool";

/// The fields of `metadata` in Kubernetes. Only name, namespace and creationTimestamp are read.
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
    /// An object that gives a name to a priority.
    InferenceObjective,
    /// A model that a pool serves.
    InferenceModel,
    /// An object that replaces requested models by other models.
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

/// The values that are read from the `metadata` of an object.
struct ObjectMeta {
    name: String,
    namespace: String,
    created: Option<String>,
}

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
            for (i, node) in documents.iter().enumerate() {
                let mut document = LocatedNode::root(node);
                if several {
                    document.path = format!("[{i}]");
                }
                reader.document(&document);
            }
        }
        Err((line, message)) => reader.report.problem("", line, message),
    }
    reader.report.errors.sort_by_key(|problem| problem.line);
    (reader.report, reader.objects)
}

// === impl ObjectReader ===

impl ObjectReader {
    /// Reads an object, or a `List` of objects as `kubectl get -o yaml` prints it.
    fn document(&mut self, at: &LocatedNode<'_>) {
        if at.node.get("kind").and_then(YamlNode::text) != Some("List") {
            return self.object(at);
        }
        self.report
            .map(at, &["apiVersion", "kind", "metadata", "items"]);
        for item in self.report.list(at.get("items").as_ref()) {
            self.object(&item);
        }
    }

    fn object(&mut self, at: &LocatedNode<'_>) {
        let wrong = self.report.errors.len();
        self.report
            .map(at, &["apiVersion", "kind", "metadata", "spec", "status"]);
        self.api_version(at);
        let Some(kind) = self.choice(at, "kind", &KINDS) else {
            return;
        };
        let meta = self.report.required(at, "metadata");
        let meta = meta.and_then(|meta| self.metadata(&meta));
        let Some(spec) = self.report.required(at, "spec") else {
            return;
        };
        let body = match kind {
            ObjectKind::InferenceObjective => self.objective(&spec),
            ObjectKind::InferenceModel => self.model(&spec),
            ObjectKind::InferenceModelRewrite => self.rewrite(&spec),
        };
        let pool = self.report.required(&spec, "poolRef");
        let pool = pool.and_then(|pool| self.pool(&pool));
        let (Some(body), Some(pool), Some(meta)) = (body, pool, meta) else {
            return;
        };
        let ObjectMeta {
            name,
            namespace,
            created,
        } = meta;
        let key = (kind, namespace.clone(), name.clone());
        if let Some(line) = self.lines.insert(key, at.node.line) {
            let message = format!("there is an {kind} {name:?} already (line {line})");
            self.report.wrong(at, message);
        }
        if self.report.errors.len() == wrong {
            let reason = format!("{kind} {name:?} of pool {pool:?}: {body}");
            self.report
                .item(&at.path, at.node.line, ItemStatus::Implemented, reason);
            self.objects.push(PoolObject {
                name,
                namespace,
                pool,
                created,
                body,
            });
        }
    }

    fn api_version(&mut self, at: &LocatedNode<'_>) {
        let Some(given) = self.report.required(at, "apiVersion") else {
            return;
        };
        let Some(text) = self.report.text(&given) else {
            return;
        };
        let (group, version) = text.split_once('/').unwrap_or((&text, ""));
        let starts_with_digit = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
        if !GROUPS.contains(&group) {
            let message = format!(
                "{} (followed by / and a version)",
                unknown("group", group, GROUPS)
            );
            self.report.wrong(&given, message);
        } else if !version.strip_prefix('v').is_some_and(starts_with_digit) {
            let message = format!("{version:?} is not a version such as v1alpha2");
            self.report.wrong(&given, message);
        }
    }

    fn metadata(&mut self, at: &LocatedNode<'_>) -> Option<ObjectMeta> {
        self.report.map(at, &METADATA);
        let name = self.named(at, "name")?;
        let namespace = match at.get("namespace") {
            Some(namespace) => self.name(&namespace)?,
            None => String::new(),
        };
        let created = match at.get("creationTimestamp") {
            Some(created) => Some(self.timestamp(&created)?),
            None => None,
        };
        Some(ObjectMeta {
            name,
            namespace,
            created,
        })
    }

    fn pool(&mut self, at: &LocatedNode<'_>) -> Option<String> {
        self.report.map(at, &["group", "kind", "name"]);
        for (field, allowed) in [("group", &POOL_GROUPS[..]), ("kind", &[POOL_KIND][..])] {
            let Some(given) = at.get(field) else {
                continue;
            };
            if let Some(text) = self.report.text(&given)
                && !allowed.contains(&text.as_str())
            {
                let message = unknown(field, &text, allowed.iter().copied());
                self.report.wrong(&given, message);
            }
        }
        self.named(at, "name")
    }

    fn objective(&mut self, spec: &LocatedNode<'_>) -> Option<ObjectBody> {
        self.report.map(spec, &["priority", "poolRef"]);
        let priority = match spec.get("priority") {
            Some(priority) => {
                self.whole_number(&priority, i64::from(i32::MIN)..=i64::from(i32::MAX))?
            }
            None => 0,
        };
        Some(ObjectBody::Objective {
            priority: i32::try_from(priority).ok()?,
        })
    }

    fn model(&mut self, spec: &LocatedNode<'_>) -> Option<ObjectBody> {
        self.report.map(
            spec,
            &["modelName", "criticality", "targetModels", "poolRef"],
        );
        let name = self.named(spec, "modelName")?;
        let criticality = match spec.get("criticality") {
            Some(_) => self.choice(spec, "criticality", &CRITICALITIES)?,
            None => Criticality::Standard,
        };
        Some(ObjectBody::Model(ModelSpec {
            name,
            priority: criticality.priority(),
            targets: self.targets(spec.get("targetModels"), "name", 0),
        }))
    }

    fn rewrite(&mut self, spec: &LocatedNode<'_>) -> Option<ObjectBody> {
        self.report.map(spec, &["rules", "poolRef"]);
        let rules = self.report.required(spec, "rules")?;
        let mut read = Vec::new();
        for rule in self.report.list(Some(&rules)) {
            self.report.map(&rule, &["matches", "targets"]);
            let mut models = Vec::new();
            for given in self.at_most(rule.get("matches").as_ref()) {
                models.extend(self.matched(&given));
            }
            let targets = self.targets(rule.get("targets"), "modelRewrite", 1);
            read.push(RewriteSpec { models, targets });
        }
        Some(ObjectBody::Rewrite(read))
    }

    fn matched(&mut self, at: &LocatedNode<'_>) -> Option<String> {
        self.report.map(at, &["model"]);
        let model = self.report.required(at, "model")?;
        self.report.map(&model, &["type", "value"]);
        if model.get("type").is_some() {
            self.choice(&model, "type", &[("Exact", ())]);
        }
        self.named(&model, "value")
    }

    /// Reads targets, with the model under `key` and weights of at least `weight_min`.
    fn targets(
        &mut self,
        list: Option<LocatedNode<'_>>,
        key: &str,
        weight_min: i64,
    ) -> Vec<TargetSpec> {
        let mut targets = Vec::new();
        for target in self.at_most(list.as_ref()) {
            self.report.map(&target, &[key, "weight"]);
            let model = self.named(&target, key);
            let weight = target.get("weight").and_then(|weight| {
                self.whole_number(&weight, weight_min..=i64::from(TARGET_WEIGHT_MAX))
            });
            targets.extend(model.map(|model| TargetSpec {
                model,
                weight: weight.and_then(|w| u32::try_from(w).ok()),
            }));
        }
        let unweighted = targets.iter().filter(|t| t.weight.is_none()).count();
        if let Some(list) = list
            && unweighted > 0
            && unweighted < targets.len()
        {
            let reason = format!(
                "{unweighted} of {} targets have no weight beside weighted ones: they are never picked",
                targets.len()
            );
            self.report
                .item(&list.path, list.node.line, ItemStatus::NoEffect, reason);
        }
        targets
    }

    // --- readers that check a node's type

    fn at_most<'n>(&mut self, at: Option<&LocatedNode<'n>>) -> Vec<LocatedNode<'n>> {
        let list = self.report.list(at);
        if let Some(at) = at
            && list.len() > TARGETS_MAX
        {
            let message = format!("has {}, at most {TARGETS_MAX} are allowed", list.len());
            self.report.wrong(at, message);
        }
        list
    }

    fn choice<T: Copy>(
        &mut self,
        at: &LocatedNode<'_>,
        name: &str,
        allowed: &[(&str, T)],
    ) -> Option<T> {
        let given = self.report.required(at, name)?;
        let text = self.report.text(&given)?;
        let found = allowed.iter().find(|(known, _)| *known == text);
        if found.is_none() {
            let message = unknown(name, &text, allowed.iter().map(|(known, _)| *known));
            self.report.wrong(&given, message);
        }
        found.map(|(_, value)| *value)
    }

    /// Reads a required name under a key.
    fn named(&mut self, at: &LocatedNode<'_>, key: &str) -> Option<String> {
        let name = self.report.required(at, key)?;
        self.name(&name)
    }

    fn name(&mut self, at: &LocatedNode<'_>) -> Option<String> {
        let text = self.report.text(at)?;
        if (1..=NAME_BYTES_MAX).contains(&text.len()) {
            return Some(text);
        }
        let message = format!(
            "has {} bytes, 1 to {NAME_BYTES_MAX} are allowed",
            text.len()
        );
        self.report.wrong(at, message);
        None
    }

    fn whole_number(&mut self, at: &LocatedNode<'_>, range: RangeInclusive<i64>) -> Option<i64> {
        if let YamlValue::Number(number) = at.node.value
            && number.fract() == 0.0
        {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "saturates, and no allowed range reaches that far"
            )]
            let number = number as i64;
            if range.contains(&number) {
                return Some(number);
            }
        }
        let message = format!(
            "must be a whole number from {} to {}",
            range.start(),
            range.end()
        );
        self.report.wrong(at, message);
        None
    }

    /// Reads a timestamp. Only the format of Kubernetes is accepted, so that timestamps sort as
    /// text.
    fn timestamp(&mut self, at: &LocatedNode<'_>) -> Option<String> {
        const SHAPE: &str = "0000-00-00T00:00:00Z";
        let text = self.report.text(at)?;
        let fits = |(given, shape): (u8, u8)| match shape {
            b'0' => given.is_ascii_digit(),
            _ => given == shape,
        };
        if text.len() == SHAPE.len() && text.bytes().zip(SHAPE.bytes()).all(fits) {
            return Some(text);
        }
        let message = format!("{text:?} is not a time such as 2026-11-21T15:06:35Z");
        self.report.wrong(at, message);
        None
    }
}

// === impl ObjectKind ===

impl ObjectKind {
    /// Returns the kind with this name or the nearest name; `None` if no name is near.
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
