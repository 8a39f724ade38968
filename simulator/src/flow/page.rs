//! The results of the campaign as tables of a page: means over the seeds.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{ALL, NONE, POLICIES};

const BEGIN: &str = "<!-- campaign: begin -->\n";
const END: &str = "<!-- campaign: end -->\n";

/// The figures that are averaged.
const FIGURES: [&str; 7] = ["ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "tokens_per_s", "share", "served", "cached"];

/// The keys by which results belong together.
const KEYS: [&str; 5] = ["scenario", "load", "policy", "proxies", "class"];

/// The scenarios with chat, and what their batch requests are.
const WAVES: [(&str, &str); 3] = [
    ("prompts", "long prompts (6,000 tokens in, 200 out)"),
    ("outputs", "long outputs (500 in, 1,500 out)"),
    ("prefixes", "shared prefixes (7,200 in, 5,632 of them shared in each of 150 tenants, 200 out)"),
];

/// Means over the seeds, in the order of the results.
pub(super) fn means(rows: &[Value]) -> Vec<Value> {
    let key = |row: &Value| KEYS.map(|name| row[name].to_string());
    let mut groups: Vec<(Map<String, Value>, Vec<&Value>)> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|(_, members)| members.first().is_some_and(|first| key(first) == key(row))) {
            Some((_, members)) => members.push(row),
            None => groups.push((KEYS.iter().map(|name| ((*name).to_owned(), row[*name].clone())).collect(), vec![row])),
        }
    }
    let of = |(mut fields, members): (Map<String, Value>, Vec<&Value>)| {
        fields.insert("seeds".into(), members.len().into());
        for name in FIGURES {
            let sum: f64 = members.iter().filter_map(|row| row[name].as_f64()).sum();
            #[expect(clippy::cast_precision_loss, reason = "a handful of seeds")]
            fields.insert(name.into(), json!((sum / members.len() as f64 * 1e4).round() / 1e4));
        }
        Value::Object(fields)
    };
    groups.into_iter().map(of).collect()
}

/// The page with the tables of these means between its marks.
///
/// # Errors
/// When the page has no such marks.
pub(super) fn with_results(page: &str, means: &[Value]) -> Result<String, String> {
    let (before, rest) = page.split_once(BEGIN).ok_or("the page has no mark for the tables")?;
    let (_, after) = rest.split_once(END).ok_or("the page has no second mark")?;
    Ok(format!("{before}{BEGIN}\n{}\n{END}{after}", tables(means)))
}

/// A figure of one class in one cell; `None` if it was not run.
fn figure(means: &[Value], (scenario, load, policy, proxies, class): (&str, f64, &str, u64, &str), name: &str) -> Option<f64> {
    let is = |row: &&Value| {
        row["scenario"] == scenario && row["load"] == load && row["policy"] == policy && row["proxies"] == proxies && row["class"] == class
    };
    means.iter().find(is)?[name].as_f64()
}

fn loads(means: &[Value], scenario: &str) -> Vec<f64> {
    let mut loads: Vec<f64> = means.iter().filter(|row| row["scenario"] == scenario).filter_map(|row| row["load"].as_f64()).collect();
    loads.sort_by(f64::total_cmp);
    loads.dedup();
    loads
}

fn tables(means: &[Value]) -> String {
    let mut text = String::new();
    for (scenario, what) in WAVES {
        let _ = write!(text, "Waves of {what}:\n\n| load | |");
        head(&mut text);
        for load in loads(means, scenario) {
            let chat = |policy: &str, name: &str| figure(means, (scenario, load, policy, 1, "critical"), name);
            let all = |policy: &str, name: &str| figure(means, (scenario, load, policy, 1, ALL), name);
            row(&mut text, &format!("{load:.1} | TTFT p99 of chat, ms"), |policy| chat(policy, "ttft_p99_ms").map(whole));
            row(&mut text, " | TPOT of chat, ms", |policy| chat(policy, "tpot_ms").map(whole));
            let tokens = |policy: &str| Some(all(policy, "tokens_per_s")? / all(NONE, "tokens_per_s")?);
            row(&mut text, " | tokens/s in all, of `none`", |policy| tokens(policy).map(|share| format!("{share:.3}")));
        }
        text.push('\n');
    }
    text.push_str("Two tenants: one asks for 0.3 of the capacity, the other one for the rest of the load:\n\n| load | |");
    head(&mut text);
    for load in loads(means, "tenants") {
        let small = |policy: &str, name: &str| figure(means, ("tenants", load, policy, 1, "small"), name);
        row(&mut text, &format!("{load:.1} | served of what the small one asks"), |policy| small(policy, "served").map(percent));
        row(&mut text, " | its TTFT p99, ms", |policy| small(policy, "ttft_p99_ms").map(whole));
    }
    text.push_str("\nTwo tenants that ask for half of the load each, the requests of one ten times as long:\n\n| load | |");
    head(&mut text);
    for load in loads(means, "lengths") {
        let share = |policy: &str| figure(means, ("lengths", load, policy, 1, "long"), "share");
        row(&mut text, &format!("{load:.1} | share of tokens of the one with long requests"), |policy| share(policy).map(percent));
    }
    text.push_str("\nThree bands: chat, one that asks for the rest of the load, and one below it that asks for 0.3:\n\n| load | |");
    head(&mut text);
    for load in loads(means, "bands") {
        let of = |policy: &str, class: &str, name: &str| figure(means, ("bands", load, policy, 1, class), name);
        row(&mut text, &format!("{load:.1} | TTFT p99 of chat, ms"), |policy| of(policy, "critical", "ttft_p99_ms").map(whole));
        row(&mut text, " | share of tokens of the lowest band", |policy| of(policy, "low", "share").map(percent));
    }
    text
}

fn head(text: &mut String) {
    POLICIES.iter().for_each(|policy| text.extend([" `", policy, "` |"]));
    let _ = writeln!(text, "\n|---|---|{}", "---|".repeat(POLICIES.len()));
}

fn row(text: &mut String, name: &str, cell: impl Fn(&str) -> Option<String>) {
    let _ = write!(text, "| {name} |");
    for policy in POLICIES {
        let _ = write!(text, " {} |", cell(policy).unwrap_or_else(|| "-".to_owned()));
    }
    text.push('\n');
}

fn whole(number: f64) -> String {
    let digits = format!("{number:.0}");
    let grouped = digits.as_bytes().rchunks(3).rev().map(|part| String::from_utf8_lossy(part).into_owned());
    grouped.collect::<Vec<_>>().join(",")
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_over_the_seeds_of_a_cell() {
        let row = |seed: u64, policy: &str, ttft: f64| json!({"scenario": "prompts", "load": 1.3, "policy": policy, "proxies": 1, "class": "critical", "seed": seed, "ttft_p99_ms": ttft});
        let means = means(&[row(1, NONE, 10_000.0), row(1, "ours", 100.0), row(2, NONE, 20_000.0), row(2, "ours", 200.0)]);
        assert_eq!(means.len(), 2);
        assert_eq!((means[1]["seeds"].as_u64(), means[1]["ttft_p99_ms"].as_f64()), (Some(2), Some(150.0)));
        let page = with_results(&format!("before\n{BEGIN}old\n{END}after\n"), &means).unwrap();
        assert!(page.contains("| 1.3 | TTFT p99 of chat, ms | 15,000 | 150 | - | - |") && page.ends_with("after\n"), "{page}");
        assert!(with_results("no mark", &means).is_err());
    }

    #[test]
    fn the_page_has_the_published_results() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let data: Value = serde_json::from_str(&std::fs::read_to_string(root.join(super::super::DATA)).unwrap()).unwrap();
        let page = std::fs::read_to_string(root.join(super::super::PAGE)).unwrap();
        let rows = data["rows"].as_array().unwrap();
        assert_eq!(with_results(&page, rows).unwrap(), page, "simulator flow-page writes the page");
    }
}
