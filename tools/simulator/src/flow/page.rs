//! The results of the campaign as tables of a page: means over the seeds.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{ALL, NONE, POLICIES};
use FigureFormat::{OfNone, Percent, Whole};

const BEGIN: &str = "<!-- campaign: begin -->\n";
const END: &str = "<!-- campaign: end -->\n";

/// The figures that are averaged.
const FIGURES: [&str; 8] = [
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_ms",
    "tokens_per_s",
    "computed_per_s",
    "share",
    "served",
    "cached",
];

/// The keys by which results belong together.
const KEYS: [&str; 5] = ["scenario", "load", "policy", "proxies", "class"];

/// A table of one scenario: for each load, a row for each of `lines`.
struct ScenarioTable {
    scenario: &'static str,
    title: &'static str,
    lines: &'static [FigureLine],
}

/// A row: its label, the class, the figure, and how to print it.
struct FigureLine(&'static str, &'static str, &'static str, FigureFormat);

#[derive(Clone, Copy)]
enum FigureFormat {
    Whole,
    Percent,
    /// As a multiple of the figure of [`NONE`].
    OfNone,
}

const CHAT: &[FigureLine] = &[
    FigureLine("TTFT p99 of chat, ms", "critical", "ttft_p99_ms", Whole),
    FigureLine("TPOT of chat, ms", "critical", "tpot_ms", Whole),
    FigureLine("tokens/s in all, of `none`", ALL, "tokens_per_s", OfNone),
];

/// Chat shares no prefix. `none` serves less of it, and so more tokens that are cached.
const CHAT_BESIDE_PREFIXES: &[FigureLine] = &[
    FigureLine("TTFT p99 of chat, ms", "critical", "ttft_p99_ms", Whole),
    FigureLine("TPOT of chat, ms", "critical", "tpot_ms", Whole),
    FigureLine("tokens/s in all, of `none`", ALL, "tokens_per_s", OfNone),
    FigureLine("those not cached, of `none`", ALL, "computed_per_s", OfNone),
];

const TABLES: [ScenarioTable; 10] = [
    ScenarioTable {
        scenario: "prompts",
        title: "Waves of long prompts (6,000 tokens in, 200 out)",
        lines: CHAT,
    },
    ScenarioTable {
        scenario: "outputs",
        title: "Waves of long outputs (500 in, 1,500 out)",
        lines: CHAT,
    },
    ScenarioTable {
        scenario: "prefixes",
        title: "Waves of shared prefixes (7,200 in, 5,632 of them shared in each of 150 tenants, 200 out)",
        lines: CHAT_BESIDE_PREFIXES,
    },
    ScenarioTable {
        scenario: "unlike",
        title: "Waves of long prompts, four engines half as fast as the other four",
        lines: CHAT,
    },
    ScenarioTable {
        scenario: "pd",
        title: "Waves of long prompts, four engines for prefill and four for decode",
        lines: CHAT,
    },
    ScenarioTable {
        scenario: "unknown-lengths",
        title: "Waves of lengths that vary (300 to 30,000 in, 5 to 4,000 out), prompts misjudged by some 30 %",
        lines: CHAT,
    },
    ScenarioTable {
        scenario: "tenants",
        title: "Two tenants: one asks for 0.3 of the capacity, the other one for the rest of the load",
        lines: &[
            FigureLine(
                "served of what the small one asks",
                "small",
                "served",
                Percent,
            ),
            FigureLine("its TTFT p99, ms", "small", "ttft_p99_ms", Whole),
        ],
    },
    ScenarioTable {
        scenario: "lengths",
        title: "Two tenants that ask for half of the load each, the requests of one ten times as long",
        lines: &[FigureLine(
            "share of tokens of the one with long requests",
            "long",
            "share",
            Percent,
        )],
    },
    ScenarioTable {
        scenario: "bands",
        title: "Three bands: chat, one that asks for the rest of the load, and one below it that asks for 0.3",
        lines: &[
            FigureLine("TTFT p99 of chat, ms", "critical", "ttft_p99_ms", Whole),
            FigureLine(
                "share of tokens of the lowest band",
                "low",
                "share",
                Percent,
            ),
        ],
    },
    ScenarioTable {
        scenario: "starvation",
        title: "One tenant: requests with 6,000 tokens in, and some with 30,000 that ask for 0.2 of the capacity",
        lines: &[
            FigureLine(
                "TTFT p99 of the long ones, ms",
                "huge",
                "ttft_p99_ms",
                Whole,
            ),
            FigureLine("TTFT p99 of the others, ms", "short", "ttft_p99_ms", Whole),
            FigureLine("tokens/s in all, of `none`", ALL, "tokens_per_s", OfNone),
        ],
    },
];

/// Means over the seeds, in the order of the results.
pub(super) fn means(rows: &[Value]) -> Vec<Value> {
    let key = |row: &Value| KEYS.map(|name| row[name].to_string());
    let mut groups: Vec<(Map<String, Value>, Vec<&Value>)> = Vec::new();
    for row in rows {
        match groups
            .iter_mut()
            .find(|(_, members)| members.first().is_some_and(|first| key(first) == key(row)))
        {
            Some((_, members)) => members.push(row),
            None => groups.push((
                KEYS.iter()
                    .map(|name| ((*name).to_owned(), row[*name].clone()))
                    .collect(),
                vec![row],
            )),
        }
    }
    let of = |(mut fields, members): (Map<String, Value>, Vec<&Value>)| {
        fields.insert(
            "seeds".into(),
            members.iter().map(|row| row["seed"].clone()).collect(),
        );
        for name in FIGURES {
            let sum: f64 = members.iter().filter_map(|row| row[name].as_f64()).sum();
            #[expect(clippy::cast_precision_loss, reason = "a handful of seeds")]
            fields.insert(
                name.into(),
                json!((sum / members.len() as f64 * 1e4).round() / 1e4),
            );
        }
        Value::Object(fields)
    };
    groups.into_iter().map(of).collect()
}

/// The page with the tables of these means between its marks.
///
/// # Errors
/// When the page has no such marks, or policies of one cell were run with other seeds.
pub(super) fn with_results(page: &str, means: &[Value]) -> Result<String, String> {
    let (before, rest) = page
        .split_once(BEGIN)
        .ok_or("the page has no mark for the tables")?;
    let (_, after) = rest.split_once(END).ok_or("the page has no second mark")?;
    let tables: Vec<String> = TABLES
        .iter()
        .filter_map(|table| table.text(means).transpose())
        .collect::<Result<_, _>>()?;
    Ok(format!(
        "{before}{BEGIN}\n{}\n{END}{after}",
        tables.join("\n")
    ))
}

/// A figure of one class in one cell; `None` if it was not run.
fn figure(
    means: &[Value],
    (scenario, load, policy, proxies, class): (&str, f64, &str, u64, &str),
    name: &str,
) -> Option<f64> {
    let is = |row: &&Value| {
        row["scenario"] == scenario
            && row["load"] == load
            && row["policy"] == policy
            && row["proxies"] == proxies
            && row["class"] == class
    };
    means.iter().find(is)?[name].as_f64()
}

fn loads(means: &[Value], scenario: &str) -> Vec<f64> {
    let mut loads: Vec<f64> = means
        .iter()
        .filter(|row| row["scenario"] == scenario)
        .filter_map(|row| row["load"].as_f64())
        .collect();
    loads.sort_by(f64::total_cmp);
    loads.dedup();
    loads
}

// === impl ScenarioTable ===

impl ScenarioTable {
    /// The table in Markdown; `None` if nothing was run.
    fn text(&self, means: &[Value]) -> Result<Option<String>, String> {
        let loads = loads(means, self.scenario);
        if loads.is_empty() {
            return Ok(None);
        }
        let names = POLICIES.map(|policy| format!(" `{policy}` |")).concat();
        let mut text = format!("{} ({}):\n\n", self.title, self.seeds(means)?);
        let _ = writeln!(
            text,
            "| load | |{names}\n|---|---|{}",
            "---|".repeat(POLICIES.len())
        );
        for load in loads {
            for (at, FigureLine(label, class, name, format)) in self.lines.iter().enumerate() {
                let load_cell = if at == 0 {
                    format!("{load:.1}")
                } else {
                    String::new()
                };
                let of =
                    |policy: &str| figure(means, (self.scenario, load, policy, 1, class), name);
                let cells = POLICIES.map(|policy| {
                    format!(
                        " {} |",
                        format
                            .cell(of(policy), of(NONE))
                            .unwrap_or_else(|| "-".to_owned())
                    )
                });
                let _ = writeln!(text, "| {load_cell} | {label} |{}", cells.concat());
            }
        }
        Ok(Some(text))
    }

    /// The seeds of the table. Policies can be compared only if their seeds are the same.
    fn seeds(&self, means: &[Value]) -> Result<String, String> {
        let mut all = means
            .iter()
            .filter(|row| row["scenario"] == self.scenario && row["proxies"] == 1)
            .map(|row| &row["seeds"]);
        let first = all
            .next()
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        if all.any(|seeds| seeds.as_array() != Some(&first)) {
            return Err(format!(
                "the results of `{}` are not all of the same seeds",
                self.scenario
            ));
        }
        let numbers: Vec<String> = first.iter().map(Value::to_string).collect();
        Ok(format!(
            "seed{} {}",
            if numbers.len() > 1 { "s" } else { "" },
            numbers.join(", ")
        ))
    }
}

// === impl FigureFormat ===

impl FigureFormat {
    fn cell(self, figure: Option<f64>, none: Option<f64>) -> Option<String> {
        // The sum of nothing is -0.
        let figure = figure.map(|figure| figure + 0.0);
        Some(match self {
            Self::Whole => whole(figure?),
            Self::Percent => format!("{:.1} %", figure? * 100.0),
            Self::OfNone => format!("{:.3}", figure? / none?),
        })
    }
}

fn whole(number: f64) -> String {
    let digits = format!("{number:.0}");
    let grouped = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|part| String::from_utf8_lossy(part).into_owned());
    grouped.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_over_the_seeds_of_a_cell() {
        let row = |seed: u64, policy: &str, ttft: f64| json!({"scenario": "prompts", "load": 1.3, "policy": policy, "proxies": 1, "class": "critical", "seed": seed, "ttft_p99_ms": ttft});
        let means = means(&[
            row(1, NONE, 10_000.0),
            row(1, "ours", 100.0),
            row(2, NONE, 20_000.0),
            row(2, "ours", 200.0),
        ]);
        assert_eq!(means.len(), 2);
        assert_eq!(
            (&means[1]["seeds"], means[1]["ttft_p99_ms"].as_f64()),
            (&json!([1, 2]), Some(150.0))
        );
        let page = with_results(&format!("before\n{BEGIN}old\n{END}after\n"), &means).unwrap();
        assert!(
            page.contains("(seeds 1, 2):") && page.ends_with("after\n"),
            "{page}"
        );
        assert!(
            page.contains(
                "| 1.3 | TTFT p99 of chat, ms | 15,000 | 150 | - | - | - | - |\n|  | TPOT"
            ),
            "{page}"
        );
        assert!(with_results("no mark", &means).is_err());
    }

    #[test]
    fn policies_with_other_seeds_are_not_compared() {
        let row = |policy: &str, seeds: Value| json!({"scenario": "prompts", "load": 1.3, "policy": policy, "proxies": 1, "class": "critical", "seeds": seeds, "ttft_p99_ms": 1.0});
        let page = format!("{BEGIN}{END}");
        assert!(
            with_results(
                &page,
                &[row(NONE, json!([1, 2])), row("ours", json!([1, 2]))]
            )
            .is_ok()
        );
        assert!(with_results(&page, &[row(NONE, json!([1, 2])), row("ours", json!([1]))]).is_err());
    }

    #[test]
    fn the_page_has_the_published_results() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let data: Value =
            serde_json::from_str(&std::fs::read_to_string(root.join(super::super::DATA)).unwrap())
                .unwrap();
        let page = std::fs::read_to_string(root.join(super::super::PAGE)).unwrap();
        let rows = data["rows"].as_array().unwrap();
        assert_eq!(
            with_results(&page, rows).unwrap(),
            page,
            "simulator flow-page writes the page"
        );
    }
}
