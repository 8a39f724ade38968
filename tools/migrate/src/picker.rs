//! Migrates an EndpointPickerConfig. A configuration that means the same in Switchpoint is kept.
//! Any other configuration is changed until `switchpointd check` accepts the result.
//!
//! The table of the configuration reader says what is reported about each item. This module adds
//! replacements that need no decision by the operator.

mod editor;

use self::editor::ConfigEditor;
use super::printer;
use super::report::ReportEntry;
use super::table::MigrationVerdict;
use control_plane::config::yaml::{self, YamlNode, YamlValue};
use control_plane::config::{self, older};

/// The maximum number of rounds of changes. Each round removes the items that the reader names. A
/// change may make another item wrong, such as a reference to a removed plugin.
const ROUNDS_MAX: usize = 8;

/// The fields without which a file cannot be repaired.
const FIELDS_NEEDED: [&str; 4] = ["apiVersion", "kind", "plugins", "schedulingProfiles"];

/// The configuration after migration.
#[derive(Debug, Default)]
pub struct MigratedConfig {
    /// The configuration as a tree. `None` means the daemon's default.
    pub tree: Option<YamlNode>,
    /// The text of the configuration, with the comments of its author if nothing was changed.
    pub text: Option<String>,
    /// The report entries about the items of the configuration.
    pub entries: Vec<ReportEntry>,
}

/// Changes that flags of llm-d's picker make to the configuration.
#[derive(Clone, Debug, Default)]
pub struct PluginParameters {
    /// Parameters of `metrics-data-source`.
    pub data_source: Vec<(String, YamlValue)>,
    /// Parameters of `core-metrics-extractor`.
    pub extractor: Vec<(String, YamlValue)>,
}

/// Migrates a configuration.
#[must_use]
pub fn migrate(text: &str, extra: &PluginParameters) -> MigratedConfig {
    let tree = match yaml::parse(text) {
        Ok(tree) if matches!(tree.value, YamlValue::Map(_)) => tree,
        Ok(_) => return unreadable("it is not a map of fields"),
        Err((line, why)) => return unreadable(&format!("line {line}: {why}")),
    };
    let mut editor = ConfigEditor {
        tree,
        entries: Vec::new(),
    };
    editor.add_parameters(extra);
    for _ in 0..ROUNDS_MAX {
        older::move_parameters(&mut editor.tree);
        let printed = printer::print(&editor.tree.value, 0);
        let (report, config) = config::read(&printed);
        if config.is_some() {
            editor.keep(&report.items);
            let unchanged = config::read(text).1.is_some()
                && editor
                    .entries
                    .iter()
                    .all(|entry| entry.verdict == MigrationVerdict::Kept);
            let text = if unchanged { text.to_owned() } else { printed };
            return MigratedConfig {
                tree: Some(editor.tree),
                text: Some(text),
                entries: editor.entries,
            };
        }
        if let Err(why) = editor.change(&report.items, &report.errors) {
            let mut failed = unreadable(&why);
            failed.entries.splice(0..0, editor.entries);
            return failed;
        }
    }
    let mut failed = unreadable("it has too many errors");
    failed.entries.splice(0..0, editor.entries);
    failed
}

fn unreadable(why: &str) -> MigratedConfig {
    let reason = format!(
        "cannot be used ({why}): the pool has the default configuration until you write one"
    );
    MigratedConfig {
        tree: None,
        text: None,
        entries: vec![entry(
            MigrationVerdict::Unknown,
            "EndpointPickerConfig".to_owned(),
            "",
            reason,
        )],
    }
}

fn entry(
    verdict: MigrationVerdict,
    item: String,
    ours: &str,
    reason: impl Into<String>,
) -> ReportEntry {
    ReportEntry {
        verdict,
        item,
        given: String::new(),
        ours: ours.to_owned(),
        reason: reason.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::editor::REPLACEMENTS;
    use super::*;
    use control_plane::config::{ItemSupport, foreign_plugins};

    #[test]
    fn every_refused_type_leaves_a_file_that_loads() {
        for row in foreign_plugins {
            let ItemSupport::Refused(..) = row.support else {
                continue;
            };
            let text = format!(
                "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\nplugins:\n- type: queue-scorer\n\
                 - type: {}\n",
                row.name
            );
            let migrated = migrate(&text, &PluginParameters::default());
            assert!(
                migrated
                    .text
                    .as_deref()
                    .is_some_and(|text| config::read(text).1.is_some()),
                "{}: {:?}",
                row.name,
                migrated.entries
            );
            let mentions = |entry: &&ReportEntry| {
                entry.verdict < MigrationVerdict::Kept && entry.item.contains(row.name)
            };
            assert_eq!(
                migrated.entries.iter().filter(mentions).count(),
                1,
                "{}: {:?}",
                row.name,
                migrated.entries
            );
        }
        for (name, _) in REPLACEMENTS {
            assert!(foreign_plugins.iter().any(|row| row.name == *name && matches!(row.support, ItemSupport::Refused(..))), "{name}");
        }
    }

    #[test]
    fn a_file_that_needs_no_change_keeps_its_comments() {
        let text = "# mine\napiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}] # all\n";
        assert_eq!(
            migrate(text, &PluginParameters::default()).text.as_deref(),
            Some(text)
        );
    }
}
