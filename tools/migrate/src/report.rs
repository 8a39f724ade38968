//! The report: each item with its result and the reason, as Markdown that is also readable as text.

use std::fmt::Write;

use super::table::MigrationVerdict;

/// The longest value that a report shows, in characters. The report cuts longer values.
const GIVEN_CHARACTERS_MAX: usize = 60;
/// The maximum number of listed objects that belong to no picker.
const OTHERS_MAX: usize = 20;

/// The entry of the report about one item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportEntry {
    /// The result for the item.
    pub verdict: MigrationVerdict,
    pub item: String,
    /// The value of the item; empty if the path is enough to know the item.
    pub given: String,
    /// The name of the item's counterpart in our chart; empty if our chart has no counterpart.
    pub ours: String,
    pub reason: String,
}

/// The report on one picker.
#[derive(Clone, Debug)]
pub struct PoolReport {
    pub pool: String,
    /// The entries about the items of the pool's picker.
    pub entries: Vec<ReportEntry>,
}

/// Returns the number of items with this verdict.
#[must_use]
pub fn count(reports: &[PoolReport], verdict: MigrationVerdict) -> usize {
    reports
        .iter()
        .flat_map(|report| &report.entries)
        .filter(|entry| entry.verdict == verdict)
        .count()
}

/// Prints the report. `others` are objects that belong to no picker.
#[must_use]
pub fn print(reports: &[PoolReport], others: &[String]) -> String {
    let mut text = String::from("# From llm-d's picker to Switchpoint\n\n"); // writing to a String cannot fail
    let counts = MigrationVerdict::ALL
        .map(|verdict| format!("{} {}", count(reports, verdict), verdict.label()));
    let _ = writeln!(text, "{}.", counts.join(", "));
    for report in reports {
        if reports.len() > 1 {
            let _ = writeln!(text, "\n# Pool {}", report.pool);
        }
        for verdict in MigrationVerdict::ALL {
            let mut of = report
                .entries
                .iter()
                .filter(|entry| entry.verdict == verdict)
                .peekable();
            if of.peek().is_none() {
                continue;
            }
            let _ = writeln!(text, "\n## {}\n", heading(verdict));
            of.for_each(|entry| line(&mut text, entry));
        }
    }
    if !others.is_empty() {
        let more = others.len().saturating_sub(OTHERS_MAX);
        let listed = others
            .iter()
            .take(OTHERS_MAX)
            .map(|other| one_line(other, GIVEN_CHARACTERS_MAX))
            .collect::<Vec<_>>()
            .join(", ");
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        let _ = writeln!(
            text,
            "\nObjects that belong to no endpoint picker, not read: {listed}{more}."
        );
    }
    let _ = writeln!(text, "\nThe next steps: docs/how-to/migrate.md.");
    text
}

fn heading(verdict: MigrationVerdict) -> &'static str {
    match verdict {
        MigrationVerdict::NoEquivalent => {
            "No equivalent: something is lost, decide whether you need it"
        }
        MigrationVerdict::Unknown => "Unknown: check by hand",
        MigrationVerdict::Changed => "Changed: replaced, or not needed",
        MigrationVerdict::Kept => "Kept",
    }
}

fn line(text: &mut String, entry: &ReportEntry) {
    let ReportEntry {
        item,
        given,
        ours,
        reason,
        ..
    } = entry;
    let _ = write!(text, "- {}", code(item, 4 * GIVEN_CHARACTERS_MAX));
    if !given.is_empty() {
        let _ = write!(text, " = {}", code(given, GIVEN_CHARACTERS_MAX));
    }
    if !ours.is_empty() {
        let _ = write!(text, " -> `{ours}`");
    }
    let _ = writeln!(text, ": {}", one_line(reason, 8 * GIVEN_CHARACTERS_MAX));
}

/// Replaces characters that would break a line, and cuts the text to a length.
fn one_line(text: &str, characters_max: usize) -> String {
    let safe = text.chars().map(|c| {
        if c.is_control() {
            ' '
        } else if c == '`' {
            '\''
        } else {
            c
        }
    });
    let mut cut: String = safe.take(characters_max).collect();
    if text.chars().nth(characters_max).is_some() {
        cut.push('…');
    }
    cut
}

/// Formats text as a code span.
fn code(text: &str, characters_max: usize) -> String {
    format!("`{}`", one_line(text, characters_max).replace('`', "'"))
}
