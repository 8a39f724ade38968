//! The plugin reference in the documentation, printed from the same table that the scheduler uses.

use std::fmt::Write;

use super::PLUGINS;
use crate::plugin::Parameter;
use crate::plugin_type::{PluginKind, PluginType};

/// The sections of the page, in order.
const TITLES: [(&str, PluginKind); 9] = [
    ("Filters", PluginKind::Filter),
    ("Scorers", PluginKind::Scorer),
    ("Pickers", PluginKind::Picker),
    ("Profile handlers", PluginKind::ProfileHandler),
    ("Deciders", PluginKind::Decider),
    ("Saturation detectors", PluginKind::Detector),
    ("Admitters", PluginKind::Admitter),
    ("Producers", PluginKind::Producer),
    ("Parsers", PluginKind::Parser),
];

/// The start of the doc of a parameter without effect.
const NO_EFFECT: &str = "no effect";

/// Width of the lines of the page, except tables.
const WIDTH: usize = 120;

/// Every plugin with its formula, source, parameters and defaults, as Markdown.
#[must_use]
pub fn reference_markdown() -> String {
    let mut page = String::new();
    for (title, kind) in TITLES {
        let mut plugins = PLUGINS.iter().filter(|plugin| plugin.kind == kind).peekable();
        if plugins.peek().is_some() {
            let _ = writeln!(page, "## {title}\n");
            plugins.for_each(|plugin| write_plugin(&mut page, plugin));
        }
    }
    page
}

fn write_plugin(page: &mut String, plugin: &PluginType) {
    // Writing to a String cannot fail.
    let _ = writeln!(page, "### `{}`\n\n{}\n\nSource: {}.\n", plugin.name, wrap(plugin.doc), plugin.source);
    if !plugin.needs.is_empty() {
        let needs: Vec<String> = plugin.needs.iter().map(ToString::to_string).collect();
        let _ = writeln!(page, "{}\n", wrap(&format!("Needs {}.", needs.join(", "))));
    }
    let has_no_effect = |parameter: &&Parameter| parameter.doc.starts_with(NO_EFFECT);
    let (idle, active): (Vec<&Parameter>, Vec<&Parameter>) = plugin.parameters.iter().partition(has_no_effect);
    if !active.is_empty() {
        let _ = writeln!(page, "| parameter | default | meaning |\n|---|---|---|");
        for parameter in active {
            let default = parameter.default.to_string().replace('|', "\\|"); // else it would end the cell
            let _ = writeln!(page, "| `{}` | {default} | {} |", parameter.name, parameter.doc);
        }
        page.push('\n');
    }
    let mut reasons: Vec<&str> = idle.iter().map(|parameter| parameter.doc).collect();
    reasons.dedup();
    for reason in reasons {
        let names: Vec<String> =
            idle.iter().filter(|parameter| parameter.doc == reason).map(|parameter| format!("`{}`", parameter.name)).collect();
        let reason = reason.trim_start_matches(NO_EFFECT).trim_start_matches(": ");
        let _ = writeln!(page, "{}\n", wrap(&format!("No effect: {} ({reason}).", names.join(", "))));
    }
}

/// Breaks a paragraph into lines of at most `WIDTH` characters.
fn wrap(paragraph: &str) -> String {
    let mut wrapped = String::new();
    let mut width = 0;
    for word in paragraph.split(' ') {
        let length = word.chars().count();
        if width > 0 && width + 1 + length <= WIDTH {
            wrapped.push(' ');
            width += 1;
        } else if width > 0 {
            wrapped.push('\n');
            width = 0;
        }
        wrapped.push_str(word);
        width += length;
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_it_stands_on_the_page() {
        let page = include_str!("../../../docs/reference/plugins.md");
        assert!(page.contains(&reference_markdown()), "docs/reference/plugins.md is stale; its head says how to print it again");
    }

    #[test]
    fn says_everything_in_the_table() {
        let page = reference_markdown();
        assert_eq!(page.matches("\n## ").count() + 1, TITLES.len(), "each kind once");
        assert_eq!(page.matches("### ").count(), PLUGINS.len(), "each plugin once");
        assert_eq!(page.matches("\nNeeds ").count(), PLUGINS.iter().filter(|plugin| !plugin.needs.is_empty()).count());
        assert!(page.contains("\nNeeds scraped: requests waiting.\n"));
        for plugin in PLUGINS {
            let title = page.get(..page.find(&format!("### `{}`", plugin.name)).unwrap()).unwrap().rsplit("\n## ").next().unwrap();
            let (kind, _) = TITLES.iter().find(|(_, kind)| *kind == plugin.kind).unwrap();
            assert!(title.trim_start_matches("## ").starts_with(kind), "{} under {kind}", plugin.name);
            assert!(page.contains(&format!("### `{}`\n\n{}\n\nSource: {}.\n", plugin.name, wrap(plugin.doc), plugin.source)));
        }
        assert!(page.contains("| `matchLengthScaleTokens` | 8192 | matched tokens"));
        assert!(page.find("## Scorers").unwrap() < page.find("## Pickers").unwrap());
        assert!(page.find("## Filters").unwrap() < page.find("## Scorers").unwrap());
    }
}
