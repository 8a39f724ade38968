//! Writes `docs/reference/performance.md` and its plots from the results in `docs/data`. The text
//! around the figures comes from `performance.md.in` beside this file. A test compares the page
//! with the data.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use testbed::{Result, root};

use crate::world::RequestPath;
use crate::{flow, overhead, standing, streams};

mod chart;
mod tables;
mod targets;

const TEMPLATE: &str = include_str!("performance.md.in");

/// The parts of the bench whose results the page shows.
const PARTS: [&str; 5] = ["overhead", "streams", "standing", "flow", "flow-cost"];

/// The maximum number of running processes per core. A higher load average means that other
/// programs used the machine. The bench itself runs Envoy, a client, the servers and a daemon on
/// all cores.
const BUSY_PER_CORE: f64 = 2.0;

/// A mark in the template, and the function whose text replaces the mark.
type PagePart = (&'static str, fn(&BenchResults) -> Result<String>);

const MARKS: [PagePart; 12] = [
    ("<!-- machine: overhead -->", |measured| {
        Ok(measured.overhead.machine())
    }),
    ("<!-- machine: streams -->", |measured| {
        Ok(measured.streams.machine())
    }),
    ("<!-- machine: standing -->", |measured| {
        Ok(measured.standing.machine())
    }),
    ("<!-- machine: flow -->", |measured| {
        Ok(measured.flow.machine())
    }),
    ("<!-- machine: flow cost -->", |measured| {
        Ok(measured.flow_cost.machine())
    }),
    ("<!-- targets -->", targets::table),
    ("<!-- bases -->", tables::bases),
    ("<!-- requests -->", tables::requests),
    ("<!-- streams -->", tables::chunks),
    ("<!-- standing -->", tables::standing),
    ("<!-- flow -->", |measured| {
        tables::flow(&measured.flow.rows)
    }),
    ("<!-- flow cost -->", |measured| {
        tables::flow_cost(&measured.flow_cost.rows)
    }),
];

#[derive(Debug, Deserialize)]
struct ResultFile<T> {
    date: String,
    host: String,
    cores: u32,
    envoy: String,
    load_average: Option<f64>,
    rows: Vec<T>,
}

/// The results of all parts that the page shows.
struct BenchResults {
    overhead: ResultFile<overhead::OverheadRow>,
    streams: ResultFile<streams::StreamsRow>,
    standing: ResultFile<standing::StandingRow>,
    flow: ResultFile<flow::FlowRow>,
    flow_cost: ResultFile<flow::cost::FlowCostRow>,
}

// === impl ResultFile ===

impl<T> ResultFile<T> {
    /// Describes the machine and the conditions of the measurement.
    fn machine(&self) -> String {
        let Self {
            date,
            host,
            cores,
            envoy,
            load_average,
            rows,
        } = self;
        if rows.is_empty() {
            return "**Not measured yet; `make bench` does.**".to_owned();
        }
        let place = format!("Measured on {date} on {cores} cores ({host}), Envoy {envoy}");
        match load_average {
            None => format!("{place}."),
            Some(load) if *load > BUSY_PER_CORE * f64::from(*cores) => {
                format!(
                    "{place}.\n**Other programs used the machine (load average {load} at the end): these figures are indicative.**"
                )
            }
            Some(load) => format!("{place}, load average {load} at the end."),
        }
    }
}

// === impl BenchResults ===

impl BenchResults {
    fn read() -> Result<Self> {
        Ok(Self {
            overhead: file("overhead")?,
            streams: file("streams")?,
            standing: file("standing")?,
            flow: file("flow")?,
            flow_cost: file("flow-cost")?,
        })
    }

    /// Returns the row of a path in a case, compared with the path `base`.
    fn request(
        &self,
        path: RequestPath,
        base: RequestPath,
        case: overhead::OverheadCase,
    ) -> Option<&overhead::OverheadRow> {
        let wanted = |row: &&overhead::OverheadRow| {
            row.case == case && row.base == base.base_name() && row.front == path.name()
        };
        self.overhead.rows.iter().find(wanted)
    }
}

/// Copies the last results to `docs/data`, and writes the page and its plots.
pub(crate) fn write() -> Result<()> {
    for part in PARTS {
        let last = root().join("target/bench").join(format!("{part}.json"));
        if last.exists() {
            std::fs::copy(last, data(part))?;
        }
    }
    let measured = BenchResults::read()?;
    let docs = root().join("docs/reference");
    std::fs::write(docs.join("performance.md"), page(&measured)?)?;
    plots(&measured, &docs.join("performance"))?;
    println!("written to docs/reference/performance.md");
    Ok(())
}

fn page(measured: &BenchResults) -> Result<String> {
    let mut page = TEMPLATE.to_owned();
    for (mark, part) in MARKS {
        if !page.contains(mark) {
            return Err(format!("the template has no place for {mark}").into());
        }
        page = page.replace(mark, part(measured)?.trim_end());
    }
    Ok(page)
}

fn data(part: &str) -> std::path::PathBuf {
    root().join("docs/data").join(format!("{part}.json"))
}

fn file<T: DeserializeOwned>(part: &str) -> Result<ResultFile<T>> {
    let path = data(part);
    if !path.exists() {
        return Ok(ResultFile {
            date: String::new(),
            host: String::new(),
            cores: 0,
            envoy: String::new(),
            load_average: None,
            rows: Vec::new(),
        });
    }
    Ok(serde_json::from_slice(&std::fs::read(&path)?)
        .map_err(|error| format!("{}: {error}", path.display()))?)
}

fn plots(measured: &BenchResults, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let draw = |file: &str, title: &str, connections, figure: fn(&overhead::OverheadRow) -> f64| {
        let line = |path: RequestPath| {
            let is_drawn = |row: &&overhead::OverheadRow| {
                let case = overhead::OverheadCase {
                    connections,
                    ..overhead::OverheadCase::around(row.case.body_bytes)
                };
                row.case == case
                    && row.base == RequestPath::Minimal.base_name()
                    && row.front == path.name()
                    && figure(row) > 0.0
            };
            let rows = measured.overhead.rows.iter().filter(is_drawn);
            #[expect(clippy::cast_precision_loss, reason = "a size to draw")]
            let points = rows.map(|row| (row.case.body_bytes as f64, figure(row)));
            (path.name(), points.collect())
        };
        let lines = RequestPath::PICKERS.map(line);
        chart::draw(&folder.join(file), title, &lines)
    };
    draw(
        "latency.svg",
        "Added p50 over a minimal Envoy, one connection, 100 endpoints",
        1,
        |row| row.added_p50_us,
    )?;
    draw(
        "cpu.svg",
        "Added CPU over a minimal Envoy, 16 connections, 100 endpoints",
        16,
        |row| row.added_cpu_us,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_what_the_data_says() {
        let page = page(&BenchResults::read().unwrap()).unwrap();
        let file = root().join("docs/reference/performance.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&file, &page).unwrap();
        }
        let stale = "docs/reference/performance.md is stale: UPDATE_DOCS=1 cargo test -p bench prints it from docs/data again";
        assert!(
            std::fs::read_to_string(&file).unwrap_or_default() == page,
            "{stale}"
        );
    }

    #[test]
    fn the_template_has_a_place_for_everything() {
        assert!(
            MARKS
                .iter()
                .all(|(mark, _)| TEMPLATE.matches(mark).count() == 1)
        );
    }

    #[test]
    fn figures_of_a_busy_machine_are_called_indicative() {
        let date = "2026-11-22";
        let host = "x";
        let envoy = "1";
        let of = |load_average| {
            ResultFile {
                date: date.into(),
                host: host.into(),
                cores: 2,
                envoy: envoy.into(),
                load_average,
                rows: vec![0],
            }
            .machine()
        };
        assert!(
            of(Some(9.0)).contains("indicative")
                && !of(Some(2.5)).contains("indicative")
                && !of(None).contains("indicative")
        );
    }
}
