//! Writes `docs/reference/performance.md` and its plots from the last results. The text around the
//! figures comes from `performance.md` beside this file.

use std::fmt::Write as _;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;
use testbed::{Result, root};

use FigureBound::{AtLeast, AtMost};

use crate::svg::{ChartSeries, chart};
use crate::world::RequestPath;

use crate::{overhead, standing, steps, streams};

const TEMPLATE: &str = include_str!("performance.md");

/// Places of the template that figures replace, in the order in which [`write`] makes them.
const MARKS: [&str; 7] = [
    "<!-- machine -->",
    "<!-- targets -->",
    "<!-- overhead -->",
    "<!-- streams -->",
    "<!-- standing -->",
    "<!-- steps -->",
    "<!-- chunk steps -->",
];

/// A figure with a target.
struct TargetFigure {
    what: &'static str,
    reference: &'static str,
    /// The target, in the unit of `what`.
    bound: FigureBound,
    found: fn(&BenchResults) -> Option<FoundFigure>,
}

/// The target of a figure.
#[derive(Clone, Copy)]
enum FigureBound {
    AtMost(f64),
    AtLeast(f64),
}

/// A measured figure; `iqr` is its interquartile range if it is a difference, else 0.
#[derive(Clone, Copy)]
struct FoundFigure {
    value: f64,
    iqr: f64,
}

struct BenchResults {
    overhead: Vec<overhead::OverheadRow>,
    streams: Vec<streams::StreamsRow>,
    standing: Vec<standing::StandingRow>,
    steps: Vec<steps::StepRow>,
    chunk_steps: Vec<steps::ChunkRow>,
}

const TARGETS: [TargetFigure; 20] = [
    TargetFigure {
        what: "p50 at 10 KB, 1 connection, µs",
        reference: "+1,020",
        bound: AtMost(25.0),
        found: |m| m.p50("filter", 10_000, 100),
    },
    TargetFigure { what: "p50 at 100 KB, µs", reference: "+2,990", bound: AtMost(60.0), found: |m| m.p50("filter", 100_000, 100) },
    TargetFigure { what: "p50 at 220 KB, µs", reference: "+5,090", bound: AtMost(120.0), found: |m| m.p50("filter", 220_000, 100) },
    TargetFigure { what: "p50 at 400 KB, µs", reference: "+8,380", bound: AtMost(200.0), found: |m| m.p50("filter", 400_000, 100) },
    TargetFigure { what: "p50 at 1 MB, µs", reference: "-", bound: AtMost(500.0), found: |m| m.p50("filter", 1_000_000, 100) },
    TargetFigure {
        what: "CPU per request at 10 KB, 16 connections, µs",
        reference: "+748",
        bound: AtMost(20.0),
        found: |m| m.cpu("filter", 10_000),
    },
    TargetFigure {
        what: "CPU per request at 220 KB, 16 connections, µs",
        reference: "+5,537",
        bound: AtMost(75.0),
        found: |m| m.cpu("filter", 220_000),
    },
    TargetFigure {
        what: "CPU per request at 400 KB, 16 connections, µs",
        reference: "+10,215",
        bound: AtMost(170.0),
        found: |m| m.cpu("filter", 400_000),
    },
    TargetFigure { what: "p50, 10 -> 1,000 endpoints at 10 KB, µs", reference: "-", bound: AtMost(40.0), found: BenchResults::growth },
    TargetFigure { what: "CPU per streamed chunk, µs", reference: "+85", bound: AtMost(3.0), found: |m| m.chunk("filter") },
    TargetFigure {
        what: "scraping 100 endpoints at least once a second, cores",
        reference: "0.15",
        bound: AtMost(0.03),
        found: |m| m.stands("scraping 100 "),
    },
    TargetFigure {
        what: "requests/s at 220 KB, 16 connections, relative to plain Envoy",
        reference: "0.04",
        bound: AtLeast(0.6),
        found: BenchResults::rps,
    },
    TargetFigure {
        what: "one more worker and its VM, 100 endpoints x 6,600 blocks, MiB",
        reference: "-",
        bound: AtMost(16.0),
        found: |m| m.stands("each further worker and its VM, after"),
    },
    TargetFigure {
        what: "ext_proc: p50 at 10 KB, µs (a quarter of llm-d's)",
        reference: "+1,020",
        bound: AtMost(255.0),
        found: |m| m.p50("ext_proc", 10_000, 100),
    },
    TargetFigure {
        what: "ext_proc: p50 at 100 KB, µs",
        reference: "+2,990",
        bound: AtMost(747.0),
        found: |m| m.p50("ext_proc", 100_000, 100),
    },
    TargetFigure {
        what: "ext_proc: p50 at 400 KB, µs",
        reference: "+8,380",
        bound: AtMost(2_095.0),
        found: |m| m.p50("ext_proc", 400_000, 100),
    },
    TargetFigure {
        what: "ext_proc: CPU at 10 KB, 16 connections, µs",
        reference: "+748",
        bound: AtMost(187.0),
        found: |m| m.cpu("ext_proc", 10_000),
    },
    TargetFigure {
        what: "ext_proc: CPU at 400 KB, 16 connections, µs",
        reference: "+10,215",
        bound: AtMost(2_554.0),
        found: |m| m.cpu("ext_proc", 400_000),
    },
    TargetFigure {
        what: "ext_proc: p50 at 220 KB, µs",
        reference: "+5,090",
        bound: AtMost(1_272.0),
        found: |m| m.p50("ext_proc", 220_000, 100),
    },
    TargetFigure {
        what: "ext_proc: CPU at 220 KB, 16 connections, µs",
        reference: "+5,537",
        bound: AtMost(1_384.0),
        found: |m| m.cpu("ext_proc", 220_000),
    },
];

// === impl BenchResults ===

impl BenchResults {
    fn read() -> Result<Self> {
        Ok(Self {
            overhead: rows("overhead")?,
            streams: rows("streams")?,
            standing: rows("standing")?,
            steps: rows("steps")?,
            chunk_steps: rows("chunk-steps")?,
        })
    }

    fn request(&self, front: &str, body_bytes: usize, endpoints: usize, connections: usize) -> Option<&overhead::OverheadRow> {
        let same = |row: &&overhead::OverheadRow| row.front == front && row.body_bytes == body_bytes && row.endpoints == endpoints;
        self.overhead
            .iter()
            .filter(same)
            .find(|row| row.connections == connections && !row.escapes && !row.predicting && row.rate_rps.is_none())
    }

    /// The row of plain Envoy for the same case.
    fn beside(&self, row: &overhead::OverheadRow) -> Option<&overhead::OverheadRow> {
        let case =
            |row: &overhead::OverheadRow| (row.body_bytes, row.escapes, row.predicting, row.endpoints, row.connections, row.rate_rps);
        self.overhead.iter().find(|plain| plain.front == RequestPath::Plain.name() && case(plain) == case(row))
    }

    fn p50(&self, front: &str, body_bytes: usize, endpoints: usize) -> Option<FoundFigure> {
        self.request(front, body_bytes, endpoints, 1).map(|row| FoundFigure { value: row.added_p50_us, iqr: row.iqr_us })
    }

    fn cpu(&self, front: &str, body_bytes: usize) -> Option<FoundFigure> {
        self.request(front, body_bytes, 100, 16).map(|row| FoundFigure { value: row.added_cpu_us, iqr: row.iqr_cpu_us })
    }

    /// The difference between two pool sizes. They are measured in separate runs, so the spread is
    /// the sum of both.
    fn growth(&self) -> Option<FoundFigure> {
        let (few, many) = (self.p50("filter", 10_000, 10)?, self.p50("filter", 10_000, 1_000)?);
        Some(FoundFigure { value: many.value - few.value, iqr: few.iqr + many.iqr })
    }

    fn rps(&self) -> Option<FoundFigure> {
        self.request("filter", 220_000, 100, 16).map(|row| FoundFigure { value: row.rps_ratio, iqr: row.iqr_rps_ratio })
    }

    fn chunk(&self, front: &str) -> Option<FoundFigure> {
        let row = self.streams.iter().find(|row| row.front == front)?;
        Some(FoundFigure { value: row.added_cpu_us, iqr: row.iqr_us })
    }

    fn stands(&self, what: &str) -> Option<FoundFigure> {
        let row = self.standing.iter().find(|row| row.what.starts_with(what))?;
        Some(FoundFigure { value: row.value, iqr: 0.0 })
    }
}

// === impl FoundFigure ===

impl FoundFigure {
    fn verdict(self, bound: FigureBound) -> &'static str {
        let met = match bound {
            AtMost(_) if self.value.abs() <= self.iqr => return "inside the noise",
            AtMost(bound) => self.value <= bound,
            AtLeast(bound) if (self.value - bound).abs() <= self.iqr => return "inside the noise",
            AtLeast(bound) => self.value >= bound,
        };
        if met { "met" } else { "**not met**" }
    }
}

/// Writes the page and its plots.
pub(crate) fn write() -> Result<()> {
    let measured = BenchResults::read()?;
    let parts = [
        machine()?,
        targets(&measured)?,
        requests(&measured)?,
        chunks(&measured)?,
        standing(&measured)?,
        steps(&measured)?,
        chunk_steps(&measured)?,
    ];
    let mut page = TEMPLATE.to_owned();
    for (mark, part) in MARKS.iter().zip(parts) {
        if !page.contains(mark) {
            return Err(format!("the template has no place for {mark}").into());
        }
        page = page.replace(mark, part.trim_end());
    }
    let docs = root().join("docs/reference");
    std::fs::write(docs.join("performance.md"), page)?;
    plots(&measured, &docs.join("performance"))?;
    println!("written to docs/reference/performance.md");
    Ok(())
}

fn file(part: &str) -> Result<Value> {
    let path = root().join("target/bench").join(format!("{part}.json"));
    let bench = if part == "chunk-steps" { "steps" } else { part };
    let text = std::fs::read(&path).map_err(|error| format!("{}: {error}: run `bench {bench}` first", path.display()))?;
    Ok(serde_json::from_slice(&text)?)
}

fn rows<T: DeserializeOwned>(part: &str) -> Result<Vec<T>> {
    Ok(serde_json::from_value(file(part)?["rows"].take())?)
}

fn machine() -> Result<String> {
    let head = file("overhead")?;
    Ok(format!(
        "Measured on {} cores ({}), Envoy {}, load average {} at the end of the requests.",
        head["cores"],
        head["host"].as_str().unwrap_or_default(),
        head["envoy"].as_str().unwrap_or_default(),
        head["load_average"]
    ))
}

fn targets(measured: &BenchResults) -> Result<String> {
    let mut text =
        String::from("| added over plain Envoy, 100 endpoints | target | measured (spread) | | llm-d v0.10 |\n|---|---|---|---|---|\n");
    for TargetFigure { what, reference, bound, found } in &TARGETS {
        let (sign, number) = match bound {
            AtMost(number) => ("≤", number),
            AtLeast(number) => ("≥", number),
        };
        let (figure, verdict) = match found(measured) {
            Some(found) if found.iqr > 0.0 => (format!("{:.2} ({:.2})", found.value, found.iqr), found.verdict(*bound)),
            Some(found) => (format!("{:.3}", found.value), found.verdict(*bound)),
            None => ("-".to_owned(), "not measured"),
        };
        writeln!(text, "| {what} | {sign} {number} | {figure} | {verdict} | {reference} |")?;
    }
    Ok(text)
}

fn requests(measured: &BenchResults) -> Result<String> {
    let mut text = String::from(
        "| way | body, KB | endpoints | connections | plain p50 µs | added p50 | added p99 | added CPU | req/s relative to plain | errors |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    let spread = |value: f64, iqr: f64| {
        let note = if value.abs() <= iqr { ", noise" } else { "" };
        format!("{value:.0} ({iqr:.0}{note})")
    };
    for row in measured.overhead.iter().filter(|row| row.front != RequestPath::Plain.name() && !row.escapes) {
        let load = row.rate_rps.map_or_else(|| row.connections.to_string(), |rate| format!("open, {rate}/s"));
        writeln!(
            text,
            "| {}{} | {} | {} | {load} | {:.0} | {} | {} | {} | {:.0} % | {} |",
            row.front,
            if row.predicting { ", predicting" } else { "" },
            row.body_bytes / 1000,
            row.endpoints,
            measured.beside(row).map_or(f64::NAN, |plain| plain.p50_us),
            spread(row.added_p50_us, row.iqr_us),
            spread(row.added_p99_us, row.iqr_p99_us),
            spread(row.added_cpu_us, row.iqr_cpu_us),
            100.0 * row.rps_ratio,
            row.errors,
        )?;
    }
    Ok(text)
}

fn chunks(measured: &BenchResults) -> Result<String> {
    let mut text = String::from("| way | chunks/s | CPU per chunk µs | added (spread) |\n|---|---|---|---|\n");
    for row in &measured.streams {
        writeln!(text, "| {} | {:.0} | {:.2} | {:.2} ({:.2}) |", row.front, row.chunks_per_s, row.cpu_us, row.added_cpu_us, row.iqr_us)?;
    }
    Ok(text)
}

fn standing(measured: &BenchResults) -> Result<String> {
    let mut text = String::from("| what | median | worst |\n|---|---|---|\n");
    for row in &measured.standing {
        let worst = row.worst.map(|worst| format!("{worst:.3} {}", row.unit)).unwrap_or_default();
        writeln!(text, "| {} | {:.3} {} | {worst} |", row.what, row.value, row.unit)?;
    }
    Ok(text)
}

fn steps(measured: &BenchResults) -> Result<String> {
    let mut text = String::from(
        "| body, KB | connections | step | CPU per request µs | added (spread) | p50 µs | added (spread) |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for row in &measured.steps {
        let steps::StepRow { step, body_bytes, connections, cpu_us, added_cpu_us, iqr_us, p50_us, added_p50_us, iqr_p50_us } = row;
        let kb = body_bytes / 1000;
        let (cpu, p50) =
            (format!("{cpu_us:.0} | {added_cpu_us:.1} ({iqr_us:.1})"), format!("{p50_us:.0} | {added_p50_us:.1} ({iqr_p50_us:.1})"));
        writeln!(text, "| {kb} | {connections} | {step} | {cpu} | {p50} |")?;
    }
    Ok(text)
}

fn chunk_steps(measured: &BenchResults) -> Result<String> {
    let mut text = String::from(
        "| step | workers, µs per chunk | added (spread) | rest of Envoy | daemon |\n\
         |---|---|---|---|---|\n",
    );
    for steps::ChunkRow { step, cpu_us: [workers, rest, daemon], added_us, iqr_us } in &measured.chunk_steps {
        writeln!(text, "| {step} | {workers:.1} | {added_us:.1} ({iqr_us:.1}) | {rest:.1} | {daemon:.1} |")?;
    }
    Ok(text)
}

fn plots(measured: &BenchResults, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let series = |connections: usize, figure: fn(&overhead::OverheadRow) -> f64| -> Vec<ChartSeries> {
        let line = |way: &str, colour| {
            let of = measured
                .overhead
                .iter()
                .filter(|row| row.front == way && row.connections == connections && row.endpoints == overhead::ENDPOINTS);
            #[expect(clippy::cast_precision_loss, reason = "a size to draw")]
            let points =
                of.filter(|row| !row.escapes && !row.predicting && row.rate_rps.is_none()).map(|row| (row.body_bytes as f64, figure(row)));
            ChartSeries { name: way.to_owned(), colour, points: points.filter(|(_, y)| *y > 0.0).collect() }
        };
        vec![line("filter", "#0a6"), line("ext_proc", "#c40")]
    };
    let latency = chart("Added p50, one connection, 100 endpoints", "body, bytes", "µs", &series(1, |row| row.added_p50_us));
    let cpu = chart("Added CPU per request, 16 connections, 100 endpoints", "body, bytes", "µs", &series(16, |row| row.added_cpu_us));
    std::fs::write(folder.join("latency.svg"), latency)?;
    std::fs::write(folder.join("cpu.svg"), cpu)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_inside_the_noise_is_not_called_met() {
        let found = |value, iqr| FoundFigure { value, iqr };
        assert_eq!(found(5.0, 9.0).verdict(AtMost(25.0)), "inside the noise");
        assert_eq!(found(20.0, 2.0).verdict(AtMost(25.0)), "met");
        assert_eq!(found(30.0, 2.0).verdict(AtMost(25.0)), "**not met**");
        assert_eq!(found(0.7, 0.0).verdict(AtLeast(0.6)), "met");
        assert_eq!(found(0.7, 0.1).verdict(AtLeast(0.6)), "inside the noise");
        assert_eq!(found(0.5, 0.01).verdict(AtLeast(0.6)), "**not met**");
    }

    #[test]
    fn the_template_has_a_place_for_everything() {
        assert!(MARKS.iter().all(|mark| TEMPLATE.matches(mark).count() == 1));
    }
}
