//! The report on a configuration file, and access to the file's nodes that reports errors.

use std::fmt;

use scheduler::plugin::closest;
use serde::Serialize;

use super::yaml::{YamlKey, YamlNode, YamlValue};

/// The maximum number of names listed for an unknown name without a near match.
const NAMES_LISTED_MAX: usize = 12;

/// The output of `check`. By the same report the daemon decides whether it uses a file.
#[derive(Debug, Default, Serialize)]
pub struct ConfigReport {
    /// The items in the order of the file, each with what Switchpoint does with the item.
    pub items: Vec<ConfigItem>,
    /// The errors that make the file invalid.
    pub errors: Vec<ConfigProblem>,
}

/// One item of a file.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct ConfigItem {
    /// The path of the item: `plugins[2].parameters.threshold`.
    pub path: String,
    /// The line number of the item in the file. The first line is 1.
    pub line: u64,
    /// What Switchpoint does with the item.
    pub status: ItemStatus,
    pub reason: String,
    /// The substitute that the operator can use, if the item is refused.
    pub substitute: Option<String>,
}

/// What Switchpoint does with an item of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemStatus {
    /// The item does what its documentation says.
    Implemented,
    /// The item changes nothing in Switchpoint.
    NoEffect,
    /// The item would change decisions, and Switchpoint does not have it.
    Refused,
    /// The item, or the lack of it, is likely to cause problems.
    Warning,
}

/// Something that makes a file invalid.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct ConfigProblem {
    pub path: String,
    /// The line number. The first line is 1. The number is 0 if the error concerns the whole file.
    pub line: u64,
    /// The error, with the nearest known name.
    pub message: String,
}

/// A YAML node and its path in the file. Error messages name the path.
#[derive(Clone, Debug)]
pub struct LocatedNode<'n> {
    pub path: String,
    pub node: &'n YamlNode,
}

// === impl LocatedNode ===

impl<'n> LocatedNode<'n> {
    #[must_use]
    pub fn root(node: &'n YamlNode) -> Self {
        Self {
            path: String::new(),
            node,
        }
    }

    /// Returns the value of a key; `None` if the value is empty.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Self> {
        Some(self.child(name, self.node.get(name)?))
    }

    /// Returns the node at the end of this path of keys.
    #[must_use]
    pub fn at(&self, way: &[&str]) -> Option<Self> {
        Some(self.child(&way.join("."), self.node.at(way)?))
    }

    /// Returns the items of a list; none for other values.
    pub fn items(&self) -> impl Iterator<Item = Self> + use<'n> {
        let list: &[YamlNode] = match &self.node.value {
            YamlValue::List(list) => list,
            _ => &[],
        };
        let path = self.path.clone();
        list.iter().enumerate().map(move |(at, node)| Self {
            path: format!("{path}[{at}]"),
            node,
        })
    }

    /// Returns the entries of a map; none for other values.
    pub fn entries(&self) -> impl Iterator<Item = (&'n YamlKey, Self)> {
        let entries = self.node.entries().iter();
        entries.map(|(key, node)| (key, self.child(&key.name, node)))
    }

    fn child(&self, name: &str, node: &'n YamlNode) -> Self {
        Self {
            path: below(&self.path, name),
            node,
        }
    }
}

// === impl ConfigReport ===

impl ConfigReport {
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.items
            .iter()
            .any(|item| item.status == ItemStatus::Refused)
    }

    /// Returns all problems that prevent the use of the file, one line each, starting with the name
    /// of the file.
    #[must_use]
    pub fn complaints(&self, file: &str) -> String {
        let errors = self
            .errors
            .iter()
            .map(|problem| format!("{file}:{}: {problem}", problem.line));
        let refused = self
            .items
            .iter()
            .filter(|item| item.status == ItemStatus::Refused)
            .map(|item| {
                format!(
                    "{file}:{}: {}: refused: {}",
                    item.line,
                    item.path,
                    item.advice()
                )
            });
        errors.chain(refused).collect::<Vec<_>>().join("\n")
    }

    pub(crate) fn problem(&mut self, path: &str, line: u64, message: impl Into<String>) {
        self.errors.push(ConfigProblem {
            path: path.to_owned(),
            line,
            message: message.into(),
        });
    }

    /// Reports that a node is invalid.
    pub(crate) fn wrong(&mut self, at: &LocatedNode<'_>, message: impl Into<String>) {
        self.problem(&at.path, at.node.line, message);
    }

    pub(crate) fn wrong_type(&mut self, at: &LocatedNode<'_>, wanted: &str) {
        self.wrong(
            at,
            format!("must be {wanted}, not {}", at.node.value.kind()),
        );
    }

    pub(crate) fn item(
        &mut self,
        path: &str,
        line: u64,
        status: ItemStatus,
        reason: impl Into<String>,
    ) {
        self.items.push(ConfigItem {
            path: path.to_owned(),
            line,
            status,
            reason: reason.into(),
            substitute: None,
        });
    }

    /// Checks that a node is a map with no fields other than `allowed`.
    pub(crate) fn map(&mut self, at: &LocatedNode<'_>, allowed: &[&str]) -> Option<()> {
        if !matches!(at.node.value, YamlValue::Map(_)) {
            self.wrong_type(at, "a map");
            return None;
        }
        for (key, entry) in at.entries() {
            if !allowed.contains(&key.name.as_str()) {
                let message = unknown("field", &key.name, allowed.iter().copied());
                self.problem(&entry.path, key.line, message);
            }
        }
        Some(())
    }

    /// Returns the items of a list. An absent list has no items.
    pub(crate) fn list<'n>(&mut self, at: Option<&LocatedNode<'n>>) -> Vec<LocatedNode<'n>> {
        let Some(at) = at else { return Vec::new() };
        if !matches!(at.node.value, YamlValue::List(_) | YamlValue::Null) {
            self.wrong_type(at, "a list");
        }
        at.items().collect()
    }

    /// Returns the value of a key that a map must have.
    pub(crate) fn required<'n>(
        &mut self,
        at: &LocatedNode<'n>,
        name: &str,
    ) -> Option<LocatedNode<'n>> {
        let found = at.get(name);
        if found.is_none() && matches!(at.node.value, YamlValue::Map(_)) {
            self.wrong(at, format!("has no {name}"));
        }
        found
    }

    pub(crate) fn text(&mut self, at: &LocatedNode<'_>) -> Option<String> {
        let text = at.node.text();
        if text.is_none() {
            self.wrong_type(at, "text");
        }
        text.map(str::to_owned)
    }

    pub(crate) fn number(&mut self, at: &LocatedNode<'_>) -> Option<f64> {
        if let YamlValue::Number(number) = at.node.value {
            return Some(number);
        }
        self.wrong_type(at, "a number");
        None
    }
}

// === impl ConfigItem ===

impl ConfigItem {
    /// Returns the reason, and the substitute if there is one.
    #[must_use]
    pub fn advice(&self) -> String {
        match &self.substitute {
            Some(substitute) => format!("{}; instead: {substitute}", self.reason),
            None => self.reason.clone(),
        }
    }
}

// === impl ConfigProblem ===

/// Formats the message after its path, if it has a path.
impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

/// Returns the path of the field `name` in `path`.
fn below(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

pub fn unknown<'a>(
    what: &str,
    name: &str,
    known: impl IntoIterator<Item = &'a str> + Clone,
) -> String {
    match closest(name, known.clone()) {
        Some(near) => format!("unknown {what} {name:?}; did you mean {near:?}?"),
        None => {
            let known: Vec<&str> = known.into_iter().take(NAMES_LISTED_MAX).collect();
            let known = if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            };
            format!("unknown {what} {name:?}; known are {known}")
        }
    }
}
