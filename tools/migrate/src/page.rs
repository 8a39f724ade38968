//! Prints the table of `docs/how-to/migrate.md`: the items that have no equivalent in Switchpoint.

use super::table::{MigrationVerdict, rows};

#[must_use]
pub fn table_markdown() -> String {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for row in rows().filter(|row| row.verdict == MigrationVerdict::NoEquivalent) {
        let item = format!("`{}`", row.path.trim_start_matches('$'));
        match reasons.iter_mut().find(|(reason, _)| *reason == row.reason) {
            Some((_, items)) => items.push(item),
            None => reasons.push((row.reason, vec![item])),
        }
    }
    let lines: String = reasons
        .iter()
        .map(|(reason, items)| format!("| {} | {reason} |\n", items.join(", ")))
        .collect();
    format!("| item | why |\n|---|---|\n{lines}")
}
