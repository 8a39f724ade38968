//! The plugin reference in the documentation, printed from the same table that the scheduler uses.

use std::fmt::Write;

use super::PLUGINS;
use crate::plugin::{PRODUCER_NAME, Parameter};
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

/// What the head of each plugin means, once.
const INTRODUCTION: &str = "A source without another name is a path in llm-d-router. Needs: the state that a plugin reads; scraped \
                            state is reported by the engines. No effect: parameters that are accepted and ignored; a producer's name \
                            is one, because each producer exists once, declared or not.";

/// The source of most plugins, which [`INTRODUCTION`] names.
const LLM_D: &str = "llm-d-router, ";

/// How the description of state begins that engines report.
const SCRAPED: &str = "scraped: ";

/// With this many equal parameters, a plugin refers to an earlier one.
const SHARED_MIN: usize = 2;

/// Every plugin with its formula, source, parameters and defaults, as Markdown.
#[must_use]
pub fn reference_markdown() -> String {
    let mut page = format!("{}\n\n", wrap(INTRODUCTION));
    let mut earlier: Vec<&PluginType> = Vec::new();
    for (title, kind) in TITLES {
        let mut plugins = PLUGINS.iter().filter(|plugin| plugin.kind == kind).peekable();
        if plugins.peek().is_some() {
            let _ = writeln!(page, "## {title}\n");
        }
        for plugin in plugins {
            write_plugin(&mut page, plugin, &earlier);
            earlier.push(plugin);
        }
    }
    page
}

fn write_plugin(page: &mut String, plugin: &PluginType, earlier: &[&PluginType]) {
    // Writing to a String cannot fail.
    let _ = writeln!(page, "### `{}`\n\n{}\n\n{}\n", plugin.name, wrap(plugin.doc), wrap(&origin(plugin)));
    let has_no_effect = |parameter: &&Parameter| parameter.doc.starts_with(NO_EFFECT);
    let (idle, active): (Vec<&Parameter>, Vec<&Parameter>) = plugin.parameters.iter().partition(has_no_effect);
    let shared = |other: &PluginType| active.iter().filter(|parameter| other.parameters.contains(parameter)).count();
    // The first of those that share most.
    let like = earlier.iter().rev().max_by_key(|other| shared(other)).filter(|other| {
        let count = shared(other);
        count > 0 && (count >= SHARED_MIN || count == active.len())
    });
    let (referred, own): (Vec<&Parameter>, Vec<&Parameter>) =
        active.iter().partition(|parameter| like.is_some_and(|other| other.parameters.contains(parameter)));
    if !own.is_empty() {
        let _ = writeln!(page, "| parameter | default | meaning |\n|---|---|---|");
        for parameter in own {
            let default = parameter.default.to_string().replace('|', "\\|"); // else it would end the cell
            let _ = writeln!(page, "| `{}` | {default} | {} |", parameter.name, parameter.doc);
        }
        page.push('\n');
    }
    if let Some(other) = like {
        let _ = writeln!(page, "{}\n", wrap(&format!("As in `{}`: {}.", other.name, names(&referred))));
    }
    if !idle.is_empty() {
        let _ = writeln!(page, "{}\n", wrap(&format!("No effect: {}.", without_effect(&idle))));
    }
}

/// The source of a plugin, and the state that it reads.
fn origin(plugin: &PluginType) -> String {
    let mut text = format!("Source: {}.", plugin.source.trim_start_matches(LLM_D));
    let needs: Vec<String> = plugin.needs.iter().map(ToString::to_string).collect();
    let (scraped, own): (Vec<&String>, Vec<&String>) = needs.iter().partition(|need| need.starts_with(SCRAPED));
    let own: Vec<&str> = own.into_iter().map(String::as_str).collect();
    let scraped: Vec<&str> = scraped.into_iter().map(|need| need.trim_start_matches(SCRAPED)).collect();
    let groups = [own.join(", "), if scraped.is_empty() { String::new() } else { format!("{SCRAPED}{}", scraped.join(", ")) }];
    let groups: Vec<&str> = groups.iter().map(String::as_str).filter(|group| !group.is_empty()).collect();
    if !groups.is_empty() {
        let _ = write!(text, " Needs {}.", groups.join("; "));
    }
    text
}

/// Parameters without effect, those with the same reason together.
fn without_effect(idle: &[&Parameter]) -> String {
    let mut reasons: Vec<&str> = idle.iter().map(|parameter| parameter.doc).collect();
    reasons.dedup();
    let group = |reason: &&str| {
        let group: Vec<&Parameter> = idle.iter().copied().filter(|parameter| parameter.doc == *reason).collect();
        let why = reason.trim_start_matches(NO_EFFECT).trim_start_matches(": ");
        if *reason == PRODUCER_NAME.doc { names(&group) } else { format!("{} ({why})", names(&group)) }
    };
    reasons.iter().map(group).collect::<Vec<_>>().join("; ")
}

fn names(parameters: &[&Parameter]) -> String {
    parameters.iter().map(|parameter| format!("`{}`", parameter.name)).collect::<Vec<_>>().join(", ")
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
        assert!(page.contains("\nSource: scorer/queuedepth. Needs scraped: requests waiting.\n"));
        for plugin in PLUGINS {
            let (before, section) = page.split_once(&format!("### `{}`\n\n", plugin.name)).unwrap();
            let title = before.rsplit("\n## ").next().unwrap();
            let (kind, _) = TITLES.iter().find(|(_, kind)| *kind == plugin.kind).unwrap();
            assert!(title.starts_with(kind), "{} under {kind}", plugin.name);
            let section = section.split("\n##").next().unwrap();
            assert!(section.starts_with(&format!("{}\n\nSource: ", wrap(plugin.doc))), "{section}");
            assert_eq!(section.contains(" Needs "), !plugin.needs.is_empty(), "{section}");
            for parameter in plugin.parameters {
                assert!(section.contains(&format!("`{}`", parameter.name)), "{} in {section}", parameter.name);
            }
        }
        assert!(page.contains("\nAs in `latency-scorer`: `headroomSelectionStrategy`, `ttftWeight`"), "equal parameters are printed once");
        assert!(page.contains("| `matchLengthScaleTokens` | 8192 | matched tokens"));
        assert!(page.find("## Scorers").unwrap() < page.find("## Pickers").unwrap());
        assert!(page.find("## Filters").unwrap() < page.find("## Scorers").unwrap());
    }
}
