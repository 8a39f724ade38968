//! The table of everything that llm-d's charts, and the older charts of the Gateway API Inference
//! Extension, can set. Each item has a verdict, a name in our chart, and a reason.
//!
//! The module [`super::page`] prints the table of `docs/how-to/migrate.md` from these rows.

pub(super) mod flags;
pub(super) mod values;

use self::flags::{ENVIRONMENT, FLAGS};
use self::values::VALUES;

/// The result for an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MigrationVerdict {
    /// The item has no counterpart, and what it did is lost.
    NoEquivalent,
    /// The item is not in the table.
    Unknown,
    /// The item is replaced, or our chart does not need the item.
    Changed,
    /// The item means the same in our chart, or was not in use.
    Kept,
}

/// One row: a value, a flag (`--name`) or an environment variable (`$NAME`).
#[derive(Clone, Copy, Debug)]
pub struct MigrationRow {
    /// The path in the newest chart, such as `router.epp.replicas`. The row covers every path below
    /// this path that has no row.
    pub path: &'static str,
    /// Paths of the same value in older charts.
    pub older: &'static [&'static str],
    pub verdict: MigrationVerdict,
    /// The name in our chart; empty if our chart has no counterpart.
    pub ours: &'static str,
    pub reason: &'static str,
    /// The values with which the pool loses nothing although the item has no equivalent.
    pub harmless: &'static [&'static str],
    /// The path of the value that must be true for the item to have an effect. Empty if the item
    /// always has an effect.
    pub switch: &'static str,
}

/// Creates a row for an item that means the same in our chart.
const fn kept(path: &'static str, ours: &'static str, reason: &'static str) -> MigrationRow {
    row(path, MigrationVerdict::Kept, ours, reason)
}

/// Creates a row for an item that is replaced or not needed.
const fn changed(path: &'static str, ours: &'static str, reason: &'static str) -> MigrationRow {
    row(path, MigrationVerdict::Changed, ours, reason)
}

/// Creates a row for an item without counterpart.
const fn none(path: &'static str, reason: &'static str) -> MigrationRow {
    row(path, MigrationVerdict::NoEquivalent, "", reason)
}

const fn row(
    path: &'static str,
    verdict: MigrationVerdict,
    ours: &'static str,
    reason: &'static str,
) -> MigrationRow {
    MigrationRow {
        path,
        older: &[],
        verdict,
        ours,
        reason,
        harmless: &[],
        switch: "",
    }
}

pub fn rows() -> impl Iterator<Item = &'static MigrationRow> {
    VALUES.iter().chain(FLAGS).chain(ENVIRONMENT)
}

/// Returns the row that covers a path, and the path in the newest chart.
#[must_use]
pub fn row_of(path: &str) -> Option<(&'static MigrationRow, String)> {
    let candidates = rows().flat_map(|row| {
        std::iter::once(row.path)
            .chain(row.older.iter().copied())
            .map(move |name| (name, row))
    });
    let covering = candidates.filter_map(|(name, row)| Some((name.len(), row, below(path, name)?)));
    covering
        .max_by_key(|(length, ..)| *length)
        .map(|(_, row, rest)| (row, format!("{}{rest}", row.path)))
}

/// Whether the table has rows for parts of the value at this path, so that each part is looked up
/// separately.
#[must_use]
pub fn has_rows_below(path: &str) -> bool {
    rows()
        .flat_map(|row| std::iter::once(row.path).chain(row.older.iter().copied()))
        .any(|name| below(name, path).is_some_and(|rest| !rest.is_empty()))
}

/// Returns the rest of `path` after `start`, if the path is `start` or lies below it.
fn below<'p>(path: &'p str, start: &str) -> Option<&'p str> {
    path.strip_prefix(start)
        .filter(|rest| rest.is_empty() || rest.starts_with('.'))
}

// === impl MigrationVerdict ===

impl MigrationVerdict {
    /// All verdicts, in the order of a report.
    pub const ALL: [Self; 4] = [Self::NoEquivalent, Self::Unknown, Self::Changed, Self::Kept];

    /// Returns the verdict as printed in the documentation.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NoEquivalent => "no equivalent",
            Self::Unknown => "unknown",
            Self::Changed => "changed",
            Self::Kept => "kept",
        }
    }
}

// === impl MigrationRow ===

impl MigrationRow {
    const fn older(self, older: &'static [&'static str]) -> Self {
        Self { older, ..self }
    }

    const fn harmless(self, harmless: &'static [&'static str]) -> Self {
        Self { harmless, ..self }
    }

    const fn with(self, switch: &'static str) -> Self {
        Self { switch, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_path_has_one_row_and_every_row_its_reason() {
        let mut seen = BTreeSet::new();
        for row in rows() {
            for path in std::iter::once(&row.path).chain(row.older) {
                assert!(seen.insert(*path), "{path} has two rows");
                assert!(!path.ends_with('.') && !path.contains('*'), "{path}");
            }
            assert!(
                !row.reason.is_empty() && !row.reason.ends_with('.'),
                "{}: {:?}",
                row.path,
                row.reason
            );
            assert!(
                row.verdict == MigrationVerdict::NoEquivalent
                    || (row.harmless.is_empty() && row.switch.is_empty()),
                "{}",
                row.path
            );
            assert!(
                row.verdict != MigrationVerdict::Kept || !row.ours.is_empty(),
                "{} is kept under no name",
                row.path
            );
            assert!(
                row.switch.is_empty() || rows().any(|other| other.path == row.switch),
                "{}",
                row.switch
            );
        }
    }

    #[test]
    fn the_longest_path_counts_and_older_paths_are_translated() {
        let of = |path| row_of(path).map(|(row, newest)| (row.path, newest));
        assert_eq!(
            of("router.epp.replicas"),
            Some(("router.epp.replicas", "router.epp.replicas".to_owned()))
        );
        assert_eq!(
            of("inferenceExtension.replicas"),
            Some(("router.epp.replicas", "router.epp.replicas".to_owned()))
        );
        assert_eq!(
            of("router.proxy.presets.envoy.image"),
            Some((
                "router.proxy.presets",
                "router.proxy.presets.envoy.image".to_owned()
            ))
        );
        assert_eq!(
            of("inferenceExtension.sidecar.args")
                .map(|(_, newest)| newest)
                .as_deref(),
            Some("router.proxy.args")
        );
        assert_eq!(
            (of("router"), of("router.epp.replica"), of("")),
            (None, None, None)
        );
        assert!(
            has_rows_below("router")
                && has_rows_below("router.epp")
                && !has_rows_below("router.epp.replicas")
        );
    }
}
