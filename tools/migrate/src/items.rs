//! The items of an llm-d installation: each value, flag and variable with its path in the newest
//! chart, for every form of input.

use std::collections::BTreeSet;

use super::printer::short;
use super::report::ReportEntry;
use super::table::{MigrationRow, MigrationVerdict, row_of, rows};
use control_plane::config::unknown;
use control_plane::config::yaml::YamlValue;

#[derive(Clone, Debug)]
pub struct GivenItem {
    /// The path in the migration table.
    pub path: String,
    /// The path as the author of the input wrote it.
    pub shown: String,
    pub value: YamlValue,
}

/// All items of one picker.
#[derive(Clone, Debug, Default)]
pub struct GivenItems {
    items: Vec<GivenItem>,
}

// === impl GivenItems ===

impl GivenItems {
    /// Adds an item. If two items have the same path, the report shows both, and the migration uses
    /// the later item.
    pub fn push(&mut self, item: GivenItem) {
        self.items.push(item);
    }

    /// Adds an item with its path in the newest chart, and with what the author of the input wrote.
    pub fn add(&mut self, path: &str, shown: String, value: YamlValue) {
        self.push(GivenItem {
            path: path.to_owned(),
            shown,
            value,
        });
    }

    /// Adds an item that no row of the table covers.
    pub fn unknown(&mut self, path: &str, value: YamlValue) {
        self.add(path, path.to_owned(), value);
    }

    /// Returns all items, in the order of the input.
    #[must_use]
    pub fn all(&self) -> &[GivenItem] {
        &self.items
    }

    #[must_use]
    pub fn get(&self, path: &str) -> Option<&YamlValue> {
        self.items
            .iter()
            .rev()
            .find(|item| item.path == path)
            .map(|item| &item.value)
    }

    /// Returns the value of an item as text; numbers and flags are printed.
    #[must_use]
    pub fn text(&self, path: &str) -> Option<String> {
        self.get(path).map(plain).filter(|text| !text.is_empty())
    }

    /// Whether an item is set and true.
    #[must_use]
    pub fn is_on(&self, path: &str) -> bool {
        match (self.get(path), path) {
            // If no value sets tracing, the flag `--tracing` decides. Without the flag, tracing is
            // on if an `OTEL_` variable is set.
            (None, "router.tracing.enabled") => {
                let traced = |item: &GivenItem| item.path.starts_with("$OTEL_");
                self.get("--tracing")
                    .map_or_else(|| self.items.iter().any(traced), is_true)
            }
            (value, _) => value.is_some_and(is_true),
        }
    }

    /// Whether at least one item is set at this path or below this path.
    #[must_use]
    pub fn any_below(&self, path: &str) -> bool {
        self.items.iter().any(|item| {
            item.path
                .strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    }

    /// Returns the path of an item as the author of the input wrote the path.
    #[must_use]
    pub fn shown<'p>(&'p self, path: &'p str) -> &'p str {
        self.items
            .iter()
            .rev()
            .find(|item| item.path == path)
            .map_or(path, |item| &item.shown)
    }

    /// Returns the report on all items except those at these paths.
    #[must_use]
    pub fn report(&self, except: &[String]) -> Vec<ReportEntry> {
        self.items
            .iter()
            .filter(|item| !except.contains(&item.path))
            .map(|item| self.entry(item))
            .collect()
    }

    fn entry(&self, item: &GivenItem) -> ReportEntry {
        // The report shows no value of a configuration, because the configuration's items are
        // reported one by one. The report shows no value of an object either.
        let config = matches!(
            item.path.as_str(),
            "router.epp.pluginsCustomConfig" | "--config-text"
        );
        let present = item.value == YamlValue::Null
            || (item.value == YamlValue::Flag(true) && item.shown.contains(' '));
        let given = if config || present {
            String::new()
        } else {
            short(&item.value)
        };
        let entry = |verdict, ours: &str, reason: String| ReportEntry {
            verdict,
            item: item.shown.clone(),
            given: given.clone(),
            ours: ours.to_owned(),
            reason,
        };
        let Some((row, newest)) = row_of(&item.path) else {
            let known: BTreeSet<&str> = rows()
                .flat_map(|row| std::iter::once(row.path).chain(row.older.iter().copied()))
                .collect();
            let near = unknown("item", &item.path, known.iter().copied());
            let near = near
                .split_once("; did you mean")
                .map(|(_, near)| format!("; did you mean{near}"))
                .unwrap_or_default();
            return entry(
                MigrationVerdict::Unknown,
                "",
                format!("not in llm-d's charts as they are known here{near}"),
            );
        };
        if let Some(reason) = self.harmless(row, &newest, item) {
            return entry(MigrationVerdict::Kept, "", reason);
        }
        entry(row.verdict, row.ours, row.reason.to_owned())
    }

    /// Returns the reason why nothing is lost although the item has no equivalent.
    fn harmless(&self, row: &MigrationRow, newest: &str, item: &GivenItem) -> Option<String> {
        if row.verdict != MigrationVerdict::NoEquivalent {
            return None;
        }
        let empty = match &item.value {
            YamlValue::Null => true,
            YamlValue::List(list) => list.is_empty(),
            YamlValue::Map(entries) => entries.is_empty(),
            _ => false,
        };
        if empty || (newest == row.path && row.harmless.contains(&plain(&item.value).as_str())) {
            return Some("nothing is lost with this value".to_owned());
        }
        (!row.switch.is_empty() && !self.is_on(row.switch))
            .then(|| format!("not in use: {} is off", row.switch))
    }
}

/// Returns a value as text without quotes.
#[must_use]
pub fn plain(value: &YamlValue) -> String {
    match value {
        YamlValue::Text(text) => text.clone(),
        YamlValue::Null => String::new(),
        other => short(other),
    }
}

/// Whether a value means true, also as Go's flags and YAML 1.1 write it.
fn is_true(value: &YamlValue) -> bool {
    match value {
        YamlValue::Flag(flag) => *flag,
        YamlValue::Text(text) => matches!(
            text.to_ascii_lowercase().as_str(),
            "true" | "t" | "1" | "yes" | "on" | "y" | ""
        ),
        YamlValue::Number(number) => *number == 1.0,
        _ => false,
    }
}
