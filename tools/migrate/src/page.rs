//! Prints the tables of `docs/how-to/migrate.md`.

use std::fmt::Write;

use super::table::flags::{ENVIRONMENT, FLAGS};
use super::table::values::VALUES;
use super::table::{MigrationRow, MigrationVerdict};

#[must_use]
pub fn table_markdown() -> String {
    let mut page = String::new(); // writing to a String cannot fail
    for (title, what, rows) in [
        ("Values of the charts", "value", VALUES),
        ("Flags", "flag", FLAGS),
        ("Environment variables", "variable", ENVIRONMENT),
    ] {
        let _ = writeln!(
            page,
            "### {title}\n\n| {what} | verdict | here | why |\n|---|---|---|---|"
        );
        let mut rest = rows;
        while let Some((first, after)) = rest.split_first() {
            // Neighbours with one answer share a line.
            let same = after
                .iter()
                .take_while(|row| {
                    answer(row) == answer(first) && row.older.is_empty() && first.older.is_empty()
                })
                .count();
            line(&mut page, &rest[..=same]);
            rest = &after[same..];
        }
        page.push('\n');
    }
    page.truncate(page.trim_end().len());
    page.push('\n');
    page
}

fn answer(
    row: &MigrationRow,
) -> (
    MigrationVerdict,
    &'static str,
    &'static str,
    &'static str,
    &'static [&'static str],
) {
    (row.verdict, row.ours, row.reason, row.switch, row.harmless)
}

fn line(page: &mut String, rows: &[MigrationRow]) {
    let [row, ..] = rows else { return };
    let code = |name: &str| format!("`{}`", name.trim_start_matches('$'));
    let mut names = rows
        .iter()
        .map(|row| code(row.path))
        .collect::<Vec<_>>()
        .join(", ");
    if !row.older.is_empty() {
        let _ = write!(
            names,
            "; older {}",
            row.older
                .iter()
                .map(|name| code(name))
                .collect::<Vec<_>>()
                .join(", ")
        );
    }
    let harmless: Vec<String> = row
        .harmless
        .iter()
        .filter(|value| !value.is_empty())
        .map(|value| code(value))
        .collect();
    let mut verdict = row.verdict.label().to_owned();
    if !harmless.is_empty() {
        let _ = write!(verdict, ", except {}", harmless.join(", "));
    }
    if !row.switch.is_empty() {
        let _ = write!(verdict, ", if {} is on", code(row.switch));
    }
    let ours = if row.ours.is_empty() {
        String::new()
    } else {
        code(row.ours)
    };
    let _ = writeln!(page, "| {names} | {verdict} | {ours} | {} |", row.reason);
}
