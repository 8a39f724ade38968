//! Formats an answer of `explain` as readable text.

use std::fmt::Write;

use serde_json::{Map, Value};

/// Returns the answer as readable text: the picked endpoints, and a table of candidates for each
/// profile.
pub(super) fn table(answer: &Value) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let list = |name: &str| -> Vec<&str> {
        answer[name]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect()
    };
    match list("picked").as_slice() {
        [] => {}
        picked => {
            let _ = writeln!(out, "picked: {}", picked.join(", then "));
        }
    }
    if answer["held"].is_object() {
        let held = &answer["held"];
        let cause = held["full"].as_str().map_or_else(
            || "no endpoint can take it".to_owned(),
            |full| format!("{full} has no room"),
        );
        let _ = writeln!(out, "held at priority {}: {cause}", held["priority"]);
    }
    for stage in ["prefill", "encode", "data_parallel", "was_picked"] {
        let addresses = list(stage);
        if !addresses.is_empty() {
            let _ = writeln!(out, "{}: {}", stage.replace('_', " "), addresses.join(", "));
        }
    }
    if let Some(reply) = answer.get("reply") {
        let message = reply["body"]["error"]["message"]
            .as_str()
            .unwrap_or_default();
        let _ = writeln!(out, "answered {}: {message}", reply["status"]);
    }
    if let Some(refused) = answer["refused"].as_str() {
        let _ = writeln!(out, "refused: {refused}");
    }
    let none = Vec::new();
    let profiles = answer["profiles"].as_array().unwrap_or(&none).iter();
    let first = [(
        answer["profile"].as_str().unwrap_or("default"),
        &answer["candidates"],
    )]
    .into_iter();
    for (name, candidates) in
        first.chain(profiles.map(|p| (p["name"].as_str().unwrap_or_default(), &p["candidates"])))
    {
        let rows = candidates.as_array().unwrap_or(&none);
        if !rows.is_empty() {
            let _ = writeln!(out, "\nprofile {name}\n{}", candidates_table(rows));
        }
        if let Some(costs) = costs_table(rows) {
            let _ = writeln!(out, "\ncost in ms, lowest is best\n{costs}");
        }
    }
    if let Some(note) = answer["note"].as_str() {
        let _ = writeln!(out, "\nnote: {note}");
    }
    out
}

/// Returns a table with a row for each candidate: its score by scorer, its total, and the plugin
/// that dropped it.
fn candidates_table(rows: &[Value]) -> comfy_table::Table {
    let scorers = names_in(rows, "scores");
    let mut table = empty_table();
    table.set_header(
        ["endpoint"]
            .into_iter()
            .chain(scorers.iter().copied())
            .chain(["total", "dropped by"]),
    );
    for row in rows {
        let scores = scorers.iter().map(|scorer| text(&row["scores"][*scorer]));
        table.add_row(
            [text(&row["endpoint"])]
                .into_iter()
                .chain(scores)
                .chain([text(&row["total"]), text(&row["dropped_by"])]),
        );
    }
    table
}

/// Returns a table with a row for each candidate that has a cost: the terms of this cost. Returns
/// `None` if no scorer compared costs.
fn costs_table(rows: &[Value]) -> Option<comfy_table::Table> {
    let terms = names_in(rows, "cost");
    let mut table = empty_table();
    table.set_header(["endpoint"].into_iter().chain(terms.iter().copied()));
    for row in rows.iter().filter(|row| row["cost"].is_object()) {
        table.add_row(
            [text(&row["endpoint"])]
                .into_iter()
                .chain(terms.iter().map(|term| text(&row["cost"][*term]))),
        );
    }
    (!terms.is_empty()).then_some(table)
}

/// Returns the names in the object `member` of all rows, in the order in which they first appear.
fn names_in<'a>(rows: &'a [Value], member: &str) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for name in rows
        .iter()
        .filter_map(|row| row[member].as_object())
        .flat_map(Map::keys)
    {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

fn empty_table() -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::ASCII_BORDERS_ONLY_CONDENSED);
    table
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
