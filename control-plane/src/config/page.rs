//! `docs/reference/plugins.md`: what can be configured, printed from the tables that reading goes by.

use std::fmt::Write;

use scheduler::registry::reference_markdown;

use super::known::{FEATURE_GATES, FOREIGN, Fate};

const HEAD: &str = "\
# Plugins

Printed from the code, do not edit: `UPDATE_DOCS=1 cargo test -p control-plane --test it docs`. What is different from the reference on
purpose: [differences.md](differences.md). What a file of yours comes to: `switchpointd check FILE`.

Scores are from 0 to 1; a total is the sum of each times its weight (1 unless given). Names are those of llm-d-router's plugins, and so are
parameters and their defaults, unless said otherwise.
";

/// The page.
#[must_use]
pub fn reference_page() -> String {
    let mut page = format!("{HEAD}\n{}", reference_markdown());
    // Writing to a String cannot fail.
    let _ = writeln!(page, "## Not plugins here\n\n| type | what it does |\n|---|---|");
    for row in FOREIGN {
        if let Fate::Implemented(what) = row.fate {
            let _ = writeln!(page, "| `{}` | {what} |", row.name);
        }
    }
    let _ = writeln!(page, "\n## Of the reference, and without effect here\n\n| type | why |\n|---|---|");
    for row in FOREIGN {
        if let Fate::NoEffect(why) = row.fate {
            let _ = writeln!(page, "| `{}` | {why} |", row.name);
        }
    }
    let _ = writeln!(page, "\n## Of the reference, and refused\n\n| type | why | instead |\n|---|---|---|");
    for row in FOREIGN {
        if let Fate::Refused(why, instead) = row.fate {
            let _ = writeln!(page, "| `{}` | {why} | {instead} |", row.name);
        }
    }
    let _ = writeln!(page, "\n## Feature gates, when on\n\n| gate | what becomes of it |\n|---|---|");
    for (name, fate) in FEATURE_GATES {
        let _ = match fate {
            Fate::Implemented(why) | Fate::NoEffect(why) => writeln!(page, "| `{name}` | no effect: {why} |"),
            Fate::Refused(why, instead) => writeln!(page, "| `{name}` | refused: {why}; instead: {instead} |"),
        };
    }
    page
}
