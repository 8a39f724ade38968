//! Prints the plugin reference of the documentation from the table that the scheduler uses.

use std::fmt::Write;

use super::PLUGINS;
use crate::plugin::{Parameter, producer_name};
use crate::plugin_type::{PluginKind, PluginType};

/// The titles of the page's sections, in order, and the kind of plugin in each section.
const TITLES: [(&str, PluginKind); 12] = [
    ("Filters", PluginKind::Filter),
    ("Scorers", PluginKind::Scorer),
    ("Pickers", PluginKind::Picker),
    ("Profile handlers", PluginKind::ProfileHandler),
    ("Deciders", PluginKind::Decider),
    ("Saturation detectors", PluginKind::Detector),
    ("Fairness policies", PluginKind::Fairness),
    ("Ordering policies", PluginKind::Ordering),
    ("Usage limit policies", PluginKind::UsageLimit),
    ("Admitters", PluginKind::Admitter),
    ("Producers", PluginKind::Producer),
    ("Parsers", PluginKind::Parser),
];

/// The start of the doc of a parameter without effect.
const NO_EFFECT: &str = "no effect";

/// The maximum width, in characters, of the lines of the page, except tables.
const WIDTH: usize = 120;

/// The start of the `source` of most plugins, which the page states once.
const LLM_D: &str = "llm-d-router, ";

/// The beginning of the description of a state that engines report.
const SCRAPED: &str = "scraped: ";

/// The minimum number of parameters that a plugin shares with an earlier plugin so that the page
/// refers to the earlier plugin instead of repeating them.
const SHARED_MIN: usize = 2;

/// Returns every plugin with its formula, source, parameters and defaults, as Markdown.
#[must_use]
pub fn reference_markdown() -> String {
    let mut page = format!("{}\n\n", wrap(&introduction()));
    let mut earlier: Vec<&PluginType> = Vec::new();
    for (title, kind) in TITLES {
        let mut plugins = PLUGINS
            .iter()
            .filter(|plugin| plugin.kind == kind)
            .peekable();
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
    // The result is ignored, because writing to a String cannot fail.
    let _ = writeln!(page, "### `{}`\n\n{}\n", plugin.name, wrap(plugin.doc));
    let origin = origin(plugin);
    if !origin.is_empty() {
        let _ = writeln!(page, "{}\n", wrap(&origin));
    }
    let parameters = plugin
        .parameters
        .iter()
        .filter(|parameter| parameter.doc != producer_name("").doc);
    let (idle, active): (Vec<&Parameter>, Vec<&Parameter>) =
        parameters.partition(|parameter| parameter.doc.starts_with(NO_EFFECT));
    let shared = |other: &PluginType| {
        active
            .iter()
            .filter(|parameter| other.parameters.contains(parameter))
            .count()
    };
    // The page refers to the earlier plugin that shares the most parameters; if several do, to the
    // first of them.
    let like = earlier
        .iter()
        .rev()
        .max_by_key(|other| shared(other))
        .filter(|other| {
            let count = shared(other);
            count > 0 && (count >= SHARED_MIN || count == active.len())
        });
    let (referred, own): (Vec<&Parameter>, Vec<&Parameter>) = active
        .iter()
        .partition(|parameter| like.is_some_and(|other| other.parameters.contains(parameter)));
    if !own.is_empty() {
        let _ = writeln!(page, "| parameter | default | meaning |\n|---|---|---|");
        for parameter in own {
            let default = parameter.default.to_string().replace('|', "\\|"); // an unescaped bar would end the cell
            let _ = writeln!(
                page,
                "| `{}` | {default} | {} |",
                parameter.name, parameter.doc
            );
        }
        page.push('\n');
    }
    if let Some(other) = like {
        let _ = writeln!(
            page,
            "{}\n",
            wrap(&format!(
                "Parameters as in `{}`: {}.",
                other.name,
                names(&referred)
            ))
        );
    }
    if !idle.is_empty() {
        let _ = writeln!(
            page,
            "{}\n",
            wrap(&format!("No effect: {}.", without_effect(&idle)))
        );
    }
}

/// Returns the facts that apply to many plugins.
fn introduction() -> String {
    let mut names: Vec<&str> = Vec::new();
    for parameter in PLUGINS
        .iter()
        .flat_map(|plugin| plugin.parameters)
        .filter(|parameter| parameter.doc == producer_name("").doc)
    {
        if !names.contains(&parameter.name) {
            names.push(parameter.name);
        }
    }
    format!(
        "\"Needs\" lists the state that a plugin reads; scraped state is reported by the engines. \"No effect\" lists \
        parameters that are accepted and ignored. So are the names of producers (`{}`), because each producer exists \
        once, declared or not.",
        names.join("`, `")
    )
}

/// Returns the source of a plugin, unless the source is only llm-d-router, and the state that the
/// plugin reads.
fn origin(plugin: &PluginType) -> String {
    let llm_d_alone = plugin.source.starts_with(LLM_D) && !plugin.source.contains([';', '(']);
    let source = if llm_d_alone {
        String::new()
    } else {
        format!("Source: {}.", plugin.source)
    };
    let needs: Vec<String> = plugin.needs.iter().map(ToString::to_string).collect();
    let (scraped, own): (Vec<&str>, Vec<&str>) = needs
        .iter()
        .map(String::as_str)
        .partition(|need| need.starts_with(SCRAPED));
    let scraped: Vec<&str> = scraped
        .into_iter()
        .map(|need| need.trim_start_matches(SCRAPED))
        .collect();
    let needs = match (own.join(", "), scraped.join(", ")) {
        (own, scraped) if own.is_empty() && scraped.is_empty() => String::new(),
        (own, scraped) if scraped.is_empty() => format!("Needs {own}."),
        (own, scraped) if own.is_empty() => format!("Needs {SCRAPED}{scraped}."),
        (own, scraped) => format!("Needs {own}; {SCRAPED}{scraped}."),
    };
    [source, needs]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Lists the parameters without effect, and puts parameters with the same reason together.
fn without_effect(idle: &[&Parameter]) -> String {
    let mut reasons: Vec<&str> = idle.iter().map(|parameter| parameter.doc).collect();
    reasons.dedup();
    let group = |reason: &&str| {
        let group: Vec<&Parameter> = idle
            .iter()
            .copied()
            .filter(|parameter| parameter.doc == *reason)
            .collect();
        format!(
            "{} ({})",
            names(&group),
            reason
                .trim_start_matches(NO_EFFECT)
                .trim_start_matches(": ")
        )
    };
    reasons.iter().map(group).collect::<Vec<_>>().join("; ")
}

fn names(parameters: &[&Parameter]) -> String {
    parameters
        .iter()
        .map(|parameter| format!("`{}`", parameter.name))
        .collect::<Vec<_>>()
        .join(", ")
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
        let page = include_str!("../../../../docs/reference/plugins.md");
        assert!(
            page.contains(&reference_markdown()),
            "docs/reference/plugins.md is stale; its head says how to print it again"
        );
    }

    #[test]
    fn says_everything_in_the_table() {
        let page = reference_markdown();
        assert_eq!(
            page.matches("\n## ").count(),
            TITLES.len(),
            "each kind once"
        );
        // Flow control is left out, because configuration files do not declare the section
        // flowControl as a plugin.
        let declared = || {
            PLUGINS
                .iter()
                .filter(|plugin| plugin.kind != PluginKind::FlowControl)
        };
        assert_eq!(
            page.matches("### ").count(),
            declared().count(),
            "each plugin once"
        );
        assert!(page.contains("\nNeeds scraped: requests waiting.\n"));
        for plugin in declared() {
            let (before, section) = page
                .split_once(&format!("### `{}`\n\n", plugin.name))
                .unwrap();
            let title = before.rsplit("\n## ").next().unwrap();
            let (kind, _) = TITLES
                .iter()
                .find(|(_, kind)| *kind == plugin.kind)
                .unwrap();
            assert!(title.starts_with(kind), "{} under {kind}", plugin.name);
            let section = section.split("\n##").next().unwrap();
            assert!(
                section.starts_with(&format!("{}\n", wrap(plugin.doc))),
                "{section}"
            );
            assert_eq!(
                section.contains("Needs "),
                !plugin.needs.is_empty(),
                "{section}"
            );
            for parameter in plugin.parameters {
                let place = if parameter.doc == producer_name("").doc {
                    page.as_str()
                } else {
                    section
                };
                assert!(
                    place.contains(&format!("`{}`", parameter.name)),
                    "{} in {section}",
                    parameter.name
                );
            }
        }
        assert!(
            page.contains("\nParameters as in `latency-scorer`: `headroomSelectionStrategy`,"),
            "equal parameters are printed once"
        );
        assert!(page.contains("| `matchLengthScaleTokens` | 8192 | matched tokens"));
        assert!(page.find("## Scorers").unwrap() < page.find("## Pickers").unwrap());
        assert!(page.find("## Filters").unwrap() < page.find("## Scorers").unwrap());
    }
}
