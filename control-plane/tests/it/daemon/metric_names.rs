//! Compares `docs/reference/metrics.md` with the page of a running daemon: which of llm-d's metrics
//! exist here, and the tables of our own metrics.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use super::harness::{daemon, get};

const LLM_D: &str = "llm_d_epp_";

/// A metric as a page declares it.
#[derive(Debug, PartialEq, Eq)]
struct DeclaredMetric {
    kind: String,
    help: String,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Returns the metrics that a page declares, by the name that Prometheus stores.
fn declared(page: &str) -> BTreeMap<String, DeclaredMetric> {
    let lines = |word: &str| -> BTreeMap<String, String> {
        let rows = page
            .lines()
            .filter_map(|line| line.strip_prefix(word)?.trim().split_once(' '));
        rows.map(|(name, text)| (name.to_owned(), text.trim_end_matches("..").to_owned()))
            .collect()
    };
    let mut helps = lines("# HELP");
    let stored = |name: String, kind: &str| {
        if kind == "counter" {
            format!("{name}_total")
        } else {
            name
        }
    };
    lines("# TYPE")
        .into_iter()
        .map(|(name, kind)| {
            let help = helps.remove(&name).unwrap_or_default();
            (stored(name, &kind), DeclaredMetric { help, kind })
        })
        .collect()
}

/// Returns the text before a part, the text between the marks `begin` and `end` of the part, and
/// the text after it.
fn part<'a>(document: &'a str, name: &str) -> (&'a str, &'a str, &'a str) {
    let (before, rest) = document
        .split_once(&format!("<!-- {name}: begin -->\n"))
        .unwrap();
    let (inside, after) = rest.split_once(&format!("<!-- {name}: end -->")).unwrap();
    (before, inside, after)
}

/// Returns the cells of a table, without its head.
fn rows(table: &str) -> Vec<Vec<&str>> {
    table
        .lines()
        .skip(2)
        .map(|line| {
            line.trim_matches('|')
                .split('|')
                .map(|cell| cell.trim().trim_matches('`'))
                .collect()
        })
        .collect()
}

fn table<'a>(metrics: impl Iterator<Item = (&'a str, &'a str, &'a str)>) -> String {
    let mut text = "| name | type | meaning |\n|---|---|---|\n".to_owned();
    for (name, kind, help) in metrics {
        writeln!(
            text,
            "| `{name}` | {kind} | {} |",
            help.trim_end_matches('.').replace('|', "\\|")
        )
        .unwrap();
    }
    text
}

/// Returns the rows of the filter's table: name, kind and meaning.
fn filter_metrics(source: &str) -> Vec<(String, String, String)> {
    let row = |line: &str| {
        let (kind, rest) = line.trim().split_once(": ")?.1.split_once(" \"")?;
        let (name, rest) = rest.split_once("\", \"")?;
        Some((
            name.to_owned(),
            kind.to_lowercase(),
            rest.strip_suffix("\";")?.to_owned(),
        ))
    };
    source
        .lines()
        .filter_map(row)
        .filter(|(name, ..)| name.starts_with("switchpoint_"))
        .collect()
}

/// Returns the type of a published metric. A name with `*` at its end means all names with this
/// beginning.
fn published<'a>(page: &'a BTreeMap<String, DeclaredMetric>, name: &str) -> Option<&'a str> {
    let metric = match name.strip_suffix('*') {
        Some(family) => page
            .iter()
            .find(|(known, _)| known.starts_with(family))
            .map(|(_, metric)| metric),
        None => page.get(name),
    };
    metric.map(|metric| metric.kind.as_str())
}

#[tokio::test]
async fn metric_names_of_llm_d_are_those_of_the_document() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let page = declared(&get(daemon.admin_address, "/metrics").await.1);
    let document = std::fs::read_to_string(root().join("docs/reference/metrics.md")).unwrap();
    let filter = filter_metrics(
        &std::fs::read_to_string(root().join("crates/front/src/metrics.rs")).unwrap(),
    );
    let listed = rows(part(&document, "llm-d").1);
    assert!(listed.len() > 50, "{} rows", listed.len());
    for row in &listed {
        let [name, kind, here, note] = row[..] else {
            panic!("{row:?}")
        };
        let found = published(&page, name);
        match here {
            "yes" => assert_eq!(found, Some(kind), "{name}"),
            "no" => assert!(
                found.is_none() && !note.is_empty(),
                "{name} is published, or has no reason: {found:?} {note}"
            ),
            other => panic!("{name}: {other}"),
        }
        // A note may only name metrics that exist, or other rows of this table.
        let is_known = |word: &str| {
            let rows = listed
                .iter()
                .map(|row| row[0])
                .chain(filter.iter().map(|(name, ..)| name.as_str()));
            page.contains_key(word) || rows.into_iter().any(|known| known == word)
        };
        let mut words = note.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let unknown = words.find(|word| {
            ["switchpoint_", LLM_D]
                .iter()
                .any(|prefix| word.starts_with(prefix))
                && !is_known(word)
        });
        assert_eq!(
            unknown, None,
            "{name}: its note names a metric that does not exist"
        );
    }
    let unlisted: Vec<&String> = page
        .keys()
        .filter(|name| name.starts_with(LLM_D) && !listed.iter().any(|row| row[0] == name.as_str()))
        .collect();
    assert!(
        unlisted.is_empty(),
        "published, but not llm-d's names: {unlisted:?}"
    );
    daemon.stop().await;
}

#[tokio::test]
async fn metric_names_of_the_daemon_and_the_filter_are_in_the_document() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let page = declared(&get(daemon.admin_address, "/metrics").await.1);
    daemon.stop().await;
    let own = page
        .iter()
        .filter(|(name, _)| name.starts_with("switchpoint_"));
    let daemon_table = table(
        own.map(|(name, metric)| (name.as_str(), metric.kind.as_str(), metric.help.as_str())),
    );
    let source = std::fs::read_to_string(root().join("crates/front/src/metrics.rs")).unwrap();
    let filter = filter_metrics(&source);
    assert!(filter.len() > 20, "{filter:?}");
    let filter_table = table(
        filter
            .iter()
            .map(|(name, kind, help)| (name.as_str(), kind.as_str(), help.as_str())),
    );

    let file = root().join("docs/reference/metrics.md");
    let mut document = std::fs::read_to_string(&file).unwrap();
    let written = document.clone();
    for (name, fresh) in [("daemon", daemon_table), ("filter", filter_table)] {
        let (before, _, after) = part(&document, name);
        document = format!("{before}<!-- {name}: begin -->\n{fresh}<!-- {name}: end -->{after}");
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &document).unwrap();
    } else {
        assert!(
            written == document,
            "docs/reference/metrics.md is stale: UPDATE_DOCS=1 cargo test -p control-plane --test daemon metric_names"
        );
    }
}
