//! Prints `docs/reference/engines.md` from the measurements in `docs/data/engines.json`.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::broken_pools::PoolRequests;
use crate::engine_matrix::{BOUNDS, BUSIEST_MAX, MatrixBounds, MatrixResult};

/// The text above the tables, before the bounds.
const HEAD: &str = "# Engines of every kind

This page shows how the default configuration spreads requests over unusual engines, and over pools with a broken
engine, behind a real Envoy. The tests print the page: `target/release/bench engines` writes
`target/bench/engines.json`; copy that to `docs/data/` and run `UPDATE_DOCS=1 cargo test -p testbed --lib engine_page`.

| engine | behaviour |
|---|---|
| `constant-0.3-s` | the whole reply after 0.3 s |
| `constant-per-token` | 150 ms to the first token, 20 ms per further token, at any load |
| `no-metrics` | as `constant-per-token`; `/metrics` is 404 |
| `frozen-metrics` | as `constant-per-token`; `/metrics` always says that the engine is idle |
| `no-usage` | as `constant-per-token`; replies do not report token counts |
| `four-at-once` | four requests at a time, 0.2 s each; the others wait in a queue |
| `grows-with-prompt` | 0.1 ms per prompt token, at any load |
| `at-once` | replies at once |
| `embeddings`, `rerank` | the API of this name; each reply after 20 ms |

";

/// The text between the two tables.
const BROKEN: &str = "
One of four engines is broken: it answers at once, in the way that the first column names, and its metrics look healthy.
The other engines take 0.5 s. 32 clients send requests, which are counted for 12 s, beginning 2 s after the first
request. At most 2 % may go to the broken engine. The requests are streamed chats. Engines without work get all APIs
that generate in turn, streamed and unstreamed: in the first row `/generate` and `/inference/v1/generate`, in the second
row the other APIs.

";

/// One row of the data. Columns that do not apply to the row are null.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatrixRow {
    engine: String,
    #[serde(flatten)]
    shape: MatrixShape,
    worst_burst: Option<u64>,
    servers_used: Option<usize>,
    returned: Option<f64>,
    busiest_over_mean: Option<f64>,
    new_after_s: Option<f64>,
    share_of_broken: Option<f64>,
}

/// The numbers of proxies and workers of a run, and the seed of the run's prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatrixShape {
    pub workers: u32,
    pub proxies: u32,
    pub seed: u64,
}

#[derive(Debug, Deserialize)]
struct MatrixData {
    host: String,
    cores: usize,
    envoy: String,
    /// Other facts that readers need about this measurement. A person writes them.
    #[serde(default)]
    remark: String,
    rows: Vec<MatrixRow>,
}

// === impl MatrixRow ===

impl MatrixRow {
    /// Creates the row of a working engine.
    #[must_use]
    pub fn of_engine(shape: MatrixShape, found: &MatrixResult) -> Self {
        Self {
            engine: found.engine.to_owned(),
            shape,
            worst_burst: Some(found.worst_burst),
            servers_used: found.servers_used,
            returned: found.returned,
            busiest_over_mean: Some(found.busiest_over_mean),
            new_after_s: found.new_after.map(|after| after.as_secs_f64()),
            share_of_broken: None,
        }
    }

    /// Creates the row of a pool with a broken engine.
    #[must_use]
    pub fn of_broken(shape: MatrixShape, sent: &PoolRequests) -> Self {
        Self {
            engine: sent.fault.clone(),
            shape,
            worst_burst: None,
            servers_used: None,
            returned: None,
            busiest_over_mean: None,
            new_after_s: None,
            share_of_broken: Some(sent.share_of_broken()),
        }
    }

    fn misses_a_bound(&self) -> bool {
        self.worst_burst
            .is_some_and(|burst| burst > BOUNDS.burst_max)
            || self
                .servers_used
                .is_some_and(|used| used < BOUNDS.servers_used_min)
            || self
                .returned
                .is_some_and(|returned| returned < BOUNDS.returned_min)
            || self
                .busiest_over_mean
                .is_some_and(|busiest| busiest > BUSIEST_MAX)
            || (self.share_of_broken.is_none() && self.new_after_s.is_none_or(|after| after > 1.0))
            || self.share_of_broken.is_some_and(|share| share > 0.02)
    }
}

/// Prints the page for this data.
///
/// # Errors
/// Fails if the data is not a list of [`MatrixRow`]s.
pub fn page(data: &str) -> Result<String, serde_json::Error> {
    let data: MatrixData = serde_json::from_str(data)?;
    let mut page = HEAD.to_owned();
    let MatrixBounds {
        burst_max,
        servers_used_min,
        returned_min,
    } = BOUNDS;
    let _ = write!(
        page,
        "| column | meaning | bound |\n|---|---|---|\n\
         | burst | two bursts, each of 64 long distinct prompts within 200 ms, over 16 idle servers: the most requests of a burst at one server (4 is even) | at most {burst_max} |\n\
         | returned | 16 distinct long prefixes with 6 turns each over 8 servers: share of later turns that go to the server of the first turn | at least {returned_min} |\n\
         | servers used | how many of those 8 had a first turn | at least {servers_used_min} |\n\
         | busiest / mean | 1,000 requests at concurrency 32 over 8 servers: requests of the busiest server over the mean | at most {BUSIEST_MAX} |\n\
         | new after, s | time from the changed endpoints file to the first request at a ninth server | at most 1 |\n\n\
         Each figure is the worst of four set-ups: 4, 1 and 2 workers with one proxy, 2 workers with two proxies. `misses` lists\n\
         the set-ups (workers x proxies) that break a bound; these are known faults. `-` means that the prompt of `rerank` is not\n\
         read.\n\n\
         Measured on {} ({} cores, Envoy {}), one run each with seed {}.{}\n\n\
         | engine | burst | returned | servers used | busiest / mean | new after, s | misses |\n|---|---|---|---|---|---|---|\n",
        data.host,
        data.cores,
        data.envoy,
        data.rows.first().map_or(0, |row| row.shape.seed),
        data.remark,
    );
    let (broken, whole): (Vec<&MatrixRow>, Vec<&MatrixRow>) = data
        .rows
        .iter()
        .partition(|row| row.share_of_broken.is_some());
    for (engine, rows) in by_engine(&whole) {
        let greatest = |figure: fn(&MatrixRow) -> Option<f64>| {
            rows.iter().copied().filter_map(figure).reduce(f64::max)
        };
        let least = |figure: fn(&MatrixRow) -> Option<f64>| {
            rows.iter().copied().filter_map(figure).reduce(f64::min)
        };
        let figures = [
            number(greatest(|row| row.worst_burst.map(|burst| burst as f64)), 0),
            number(least(|row| row.returned), 3),
            number(least(|row| row.servers_used.map(|used| used as f64)), 0),
            number(greatest(|row| row.busiest_over_mean), 2),
            number(greatest(|row| row.new_after_s), 2),
        ];
        let _ = writeln!(
            page,
            "| {engine} | {} | {} |",
            figures.join(" | "),
            misses(&rows)
        );
    }
    page.push_str(BROKEN);
    page.push_str("| broken engine | share of requests | misses |\n|---|---|---|\n");
    for (engine, rows) in by_engine(&broken) {
        let share = rows
            .iter()
            .filter_map(|row| row.share_of_broken)
            .reduce(f64::max);
        let _ = writeln!(
            page,
            "| {engine} | {} % | {} |",
            number(share.map(|share| share * 100.0), 2),
            misses(&rows)
        );
    }
    Ok(page)
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

/// Groups the rows by engine, in the order of the data.
fn by_engine<'a>(rows: &[&'a MatrixRow]) -> Vec<(&'a str, Vec<&'a MatrixRow>)> {
    let mut engines: Vec<(&str, Vec<&MatrixRow>)> = Vec::new();
    for &row in rows {
        match engines.iter_mut().find(|(name, _)| *name == row.engine) {
            Some((_, of)) => of.push(row),
            None => engines.push((&row.engine, vec![row])),
        }
    }
    engines
}

/// Returns the shapes whose rows exceed a bound.
fn misses(rows: &[&MatrixRow]) -> String {
    let shapes = rows
        .iter()
        .filter(|row| row.misses_a_bound())
        .map(|row| row.shape);
    shapes
        .map(
            |MatrixShape {
                 workers, proxies, ..
             }| format!("{workers} x {proxies}"),
        )
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root;

    #[test]
    fn the_page_of_engines_says_what_the_data_says() {
        let page =
            page(&std::fs::read_to_string(root().join("docs/data/engines.json")).unwrap()).unwrap();
        let file = root().join("docs/reference/engines.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&file, &page).unwrap();
        }
        assert!(
            std::fs::read_to_string(&file).unwrap_or_default() == page,
            "docs/reference/engines.md is stale; its head says how to print it again"
        );
    }
}
