//! Judges the runs and writes the page: `docs/reference/race.md`, its two pictures, and
//! `docs/data/race.json`. The page can be printed again from this JSON file.

mod dynamo;
mod picture;
mod summary;

use std::fmt::Write as _;
use std::path::Path;

use race_cells::{Cell, CellChange, CellSource, EngineSpeed, PublishedShape};
use testbed::Result;

use crate::campaign::RouterGroup;
use crate::judge::RaceFigure;
use crate::results::{AGAIN, CellResult, FigureResult, OURS, RaceResults, RouterResult};

const HEAD: &str = "# The race: beside other routers

`make race` plays the same sessions at several routers, side by side, and prints this page. Each router has two threads
and eight simulated engines of its own. The engines run in real time, with the profile `qwen3-32b-h200` and at most 24
sequences unless the cell (workload and load) says otherwise. No figure comes from a GPU. After each reply a client
waits for a recorded pause, then sends the next turn of the session. A client gives up after 60 s, and the times of a
failed request are 60 s.

Load is a share of the rate that round robin sustains. Cold sessions arrive in the run's first quarter, when caches are
empty; later sessions are warm. **A ratio is Switchpoint's time over the other router's: below 1, Switchpoint is
faster.** The 95 % interval is a bootstrap over the sessions of all seeds. `=` marks a difference that is no larger than
between two Switchpoint runs; bold marks a router that is faster than Switchpoint. A run whose clients or engines are
more than 5 ms late (99th percentile) is repeated with fewer routers side by side, or left out.

";

const CHANGE: &str =
    "an engine dies after a quarter, one is added after half, one restarts after three quarters";

const PUBLISHED: &str = "
The last cells repeat the workloads of published benchmarks, but not their hardware: `llm-d-groups` and `llm-d-unique`
are from llm-d-benchmark pull request 1908 (at most 256 sequences), `higress` is from Higress pull request 4352 (three
engines like Llama 3 8B on an A10), and `mooncake` is a piece of a public trace. The pictures' axes end at 0.25 and 2.

";

/// Judges the runs of `folder` and writes the page, the pictures and the data below `docs`.
///
/// # Errors
/// Fails if a run cannot be read, or a file cannot be written.
pub fn write(folder: &Path, docs: &Path) -> Result<()> {
    let data = docs.join("data/race.json");
    let mut results = RaceResults::read(&data)?;
    for cell in Cell::all() {
        for group in RouterGroup::all() {
            CellResult::of_runs(folder, &cell, &group)?
                .into_iter()
                .for_each(|result| results.put(result));
        }
    }
    std::fs::write(&data, results.to_lines()?)?;
    pictures(&results, &docs.join("reference/race"))?;
    let mut page = HEAD.to_owned();
    page.push_str(&versions(&results));
    page.push_str(&not_run(&results));
    page.push_str(&losses(&results));
    page.push_str(&summary::section(&results));
    page.push_str(&cells(&results));
    page.push_str(&others(&results));
    page.push_str(&dynamo::section(&results));
    Ok(std::fs::write(
        docs.join("reference/race.md"),
        page.trim_end().to_owned() + "\n",
    )?)
}

/// Draws two pictures: one of the cells with our own workloads, the other of the cells with
/// published loads.
fn pictures(results: &RaceResults, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    for (name, is_ours) in [("workloads", true), ("published", false)] {
        let has_workload = |result: &&CellResult| {
            Cell::find(&result.cell).is_some_and(|cell| cell.workload().is_some() == is_ours)
        };
        let cells: Vec<&CellResult> = results.of_group("core").filter(has_workload).collect();
        if !cells.is_empty() {
            picture::draw(&cells, name, &folder.join(format!("{name}.svg")))?;
        }
    }
    Ok(())
}

/// Returns a sentence with the versions of all routers, or an empty text without results.
fn versions(results: &RaceResults) -> String {
    let routers = results.cells.iter().flat_map(|cell| &cell.routers);
    let mut versions: Vec<String> = routers
        .filter(|router| router.router != AGAIN)
        .map(|router| format!("{} {}", router.router, router.version))
        .collect();
    versions.sort();
    versions.dedup();
    if versions.is_empty() {
        String::new()
    } else {
        let meaning = "hexadecimal: commits of this repository; ours: Switchpoint";
        format!("Versions ({meaning}): {}.\n\n", versions.join(",\n"))
    }
}

/// Returns a sentence that lists the cells without a result, or an empty text.
fn not_run(results: &RaceResults) -> String {
    let group = |cell: &Cell| {
        if cell.is_dynamo() {
            dynamo::GROUP
        } else {
            "core"
        }
    };
    let has_run = |cell: &Cell| {
        results
            .of_group(group(cell))
            .any(|result| result.cell == cell.name)
    };
    let without: Vec<&str> = Cell::all()
        .filter(|cell| !has_run(cell))
        .map(|cell| cell.name)
        .collect();
    if without.is_empty() {
        String::new()
    } else {
        format!("Not run yet:\n{}.\n\n", without.join(",\n"))
    }
}

/// Returns a section with a line for each router and phase of a cell in which the router is faster
/// than Switchpoint.
fn losses(results: &RaceResults) -> String {
    if results.cells.is_empty() {
        return String::new();
    }
    let mut lines = Vec::new();
    for result in &results.cells {
        for router in result
            .routers
            .iter()
            .filter(|router| ![OURS, AGAIN].contains(&router.router.as_str()))
        {
            for (phase, figures) in [("cold", &router.cold), ("warm", &router.warm)] {
                // In cells with Dynamo's engines, only the first figure is compared.
                let counted = if result.group == dynamo::GROUP {
                    1
                } else {
                    figures.len()
                };
                let lost: Vec<String> = RaceFigure::ALL
                    .iter()
                    .zip(figures)
                    .take(counted)
                    .filter(|(_, found)| found.verdict.as_deref() == Some("slower"))
                    .map(|(figure, found)| format!("{} {}", figure.name(), ratio(found)))
                    .collect();
                if !lost.is_empty() {
                    let names = format!("{}, {phase}, ratio to {}", result.cell, router.router);
                    lines.push(format!("- {names}:\n  {}.\n", lost.join(";\n  ")));
                }
            }
        }
    }
    if lines.is_empty() {
        lines.push("Nowhere by these runs.\n".to_owned());
    }
    format!("## Where we lose\n\n{}\n", lines.concat())
}

/// Describes how the sessions of a cell arrive, for the page.
pub fn arrivals_of(cell: &Cell) -> String {
    let per_s = cell.sessions_per_s().unwrap_or_default();
    match cell.source {
        CellSource::Random {
            workload,
            load_percent,
        } => {
            format!(
                "{}: {load_percent} % load, {per_s:.2} sessions/s",
                capitalised(workload.name())
            )
        }
        CellSource::Published(shape) => match shape {
            PublishedShape::SharedGroups { .. } => {
                format!("512 prompts of 2,048 tokens with 8 questions each: {per_s:.0} requests/s")
            }
            PublishedShape::UniquePrompts { .. } => {
                format!("Prompts of 2,300 tokens that share nothing: {per_s:.0} requests/s")
            }
            PublishedShape::TenTurns => {
                "Ten turns a session, 40 sessions at a time, 1,200 requests".to_owned()
            }
            PublishedShape::Recorded => {
                "Two minutes of the Mooncake trace of conversations, prompts of up to 32,000 tokens"
                    .to_owned()
            }
        },
    }
}

/// Describes what distinguishes a cell from the plain cells of its workload. Returns an empty text
/// if nothing does.
fn particular_of(cell: &Cell) -> String {
    let mut notes = Vec::new();
    if cell.workload().is_some() {
        let few = |blocks: u32| format!("engines with {blocks} KV blocks of 16 tokens");
        notes.extend(cell.engines.kv_blocks.map(few));
    }
    if cell.engines.speed == EngineSpeed::HalfAreHalfAsFast {
        notes.push("half of the engines take twice as long for a step".to_owned());
    }
    if cell.change == CellChange::KillAddRestart {
        notes.push(CHANGE.to_owned());
    }
    if cell.gateways > 1 {
        notes.push(format!("{} processes of each router", cell.gateways));
    }
    notes.join("; ")
}

/// Describes how the sessions arrive, and for how long if `arrivals_s` sets the length.
fn duration_of(cell: &Cell, arrivals_s: f64) -> String {
    if cell.workload().is_some() {
        format!("{}, {arrivals_s:.0} s", arrivals_of(cell))
    } else {
        arrivals_of(cell)
    }
}

fn cells(results: &RaceResults) -> String {
    let mut table =
        MarkdownTable::with_header(&["cell", "sessions", "differs by", "seeds", "requests"]);
    for result in results.of_group("core") {
        let cell = Cell::find(&result.cell);
        let seeds: Vec<String> = result.seeds.iter().map(ToString::to_string).collect();
        let requests = result.routers.first().map_or(0, |router| router.requests);
        table.row(
            [
                result.cell.clone(),
                cell.as_ref()
                    .map_or_else(String::new, |cell| duration_of(cell, result.arrivals_s)),
                cell.as_ref().map_or_else(String::new, particular_of),
                seeds.join(" "),
                requests.to_string(),
            ]
            .into_iter(),
        );
    }
    if results.of_group("core").next().is_none() {
        return String::new();
    }
    let pictures = "![Ratio of Switchpoint to smg and to itself](race/workloads.svg)\n\n![Ratio of Switchpoint to smg and to itself](race/published.svg)\n";
    format!("## Cells\n\n{}{PUBLISHED}{pictures}\n", table.0)
}

/// The number of figures in the table of the other routers. The table leaves out the fifth, the p99
/// of TPOT.
const OTHERS_FIGURES: usize = 4;

/// Returns a table of the routers other than Switchpoint and smg, which have a run with only one
/// seed.
fn others(results: &RaceResults) -> String {
    let mut table = MarkdownTable::with_header(&[
        "cell",
        "router",
        "end to end",
        "TTFT mean",
        "TTFT p99",
        "TPOT mean",
        "hits",
        "failed",
        "busiest",
    ]);
    let mut rows = 0;
    for result in results
        .cells
        .iter()
        .filter(|result| !["core", dynamo::GROUP].contains(&result.group.as_str()))
    {
        for router in result.routers.iter().filter(|router| router.router != OURS) {
            let head = [result.cell.clone(), router.router.clone()];
            let figures = router.warm.iter().take(OTHERS_FIGURES).map(cell_text);
            table.row(head.into_iter().chain(figures).chain(counts_of(router)));
            rows += 1;
        }
    }
    if rows == 0 {
        return String::new();
    }
    format!(
        "## Other routers\n\nThe table has warm sessions of one seed: times in ms, and Switchpoint's ratio. \"Busiest\" is the busiest engine's number
of requests over the mean.\n\n{}\n",
        table.0
    )
}

#[derive(Debug)]
struct MarkdownTable(String);

impl MarkdownTable {
    fn with_header(header: &[&str]) -> Self {
        let mut table = Self(String::new());
        table.row(header.iter().map(|name| (*name).to_owned()));
        table.row(header.iter().map(|_| "---".to_owned()));
        table
    }

    fn row(&mut self, cells: impl Iterator<Item = String>) {
        let _ = writeln!(self.0, "| {} |", cells.collect::<Vec<_>>().join(" | ")); // writing to a String cannot fail
    }
}

/// Returns the hit rate, the number of failures, and how uneven the load of the engines was.
fn counts_of(router: &RouterResult) -> [String; 3] {
    [
        percent(router.hit_rate),
        router.failures.to_string(),
        format!("{:.2}", router.busiest),
    ]
}

/// Returns the text of a figure. Appends Switchpoint's ratio to the figure if the figure has one.
fn cell_text(figure: &FigureResult) -> String {
    let ms = format!("{:.0}", figure.ms);
    if figure.ours_over.is_some() {
        format!("{ms}; {}", judged(figure))
    } else {
        ms
    }
}

/// Returns the figure's ratio, marked by its verdict.
fn judged(figure: &FigureResult) -> String {
    let ratio = ratio(figure);
    match figure.verdict.as_deref() {
        Some("slower") => format!("**{ratio}**"),
        Some("equal") => format!("{ratio} ="),
        _ => ratio,
    }
}

fn ratio(figure: &FigureResult) -> String {
    figure
        .ours_over
        .map_or(String::new(), |[ratio, low, high]| {
            let digits = if ratio < 0.095 { 3 } else { 2 };
            format!("{ratio:.digits$} ({low:.digits$}-{high:.digits$})")
        })
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn capitalised(name: &str) -> String {
    let mut letters = name.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(ms: f64, ours_over: Option<[f64; 3]>, verdict: &str) -> FigureResult {
        FigureResult {
            ms,
            ours_over,
            verdict: ours_over.map(|_| verdict.to_owned()),
        }
    }

    fn router(name: &str, ours_over: Option<[f64; 3]>, verdict: &str) -> RouterResult {
        let figures = vec![figure(100.0, ours_over, verdict); RaceFigure::ALL.len()];
        RouterResult {
            router: name.into(),
            version: "1".into(),
            requests: 10,
            failures: 1,
            hit_rate: 0.5,
            busiest: 1.25,
            cold: figures.clone(),
            warm: figures,
        }
    }

    fn result(verdict: &str) -> RaceResults {
        let routers = vec![
            router(OURS, None, ""),
            router(AGAIN, Some([1.0, 0.99, 1.01]), "equal"),
            router("smg", Some([1.1, 1.05, 1.2]), verdict),
        ];
        let mut results = RaceResults::default();
        results.put(CellResult {
            cell: "agents-50".into(),
            group: "core".into(),
            seeds: vec![101],
            arrivals_s: 120.0,
            routers,
        });
        results
    }

    #[test]
    fn a_page_says_where_we_lose_and_what_was_not_run() {
        assert!(
            losses(&result("slower")).contains(
                "- agents-50, warm, ratio to smg:\n  end to end 1.10 (1.05-1.20);\n  TTFT mean 1.10"
            ),
            "{}",
            losses(&result("slower"))
        );
        assert!(losses(&result("equal")).contains("Nowhere"));
        let missing = not_run(&result("equal"));
        assert!(
            missing.contains("tenants-50") && !missing.contains("agents-50"),
            "{missing}"
        );
    }

    #[test]
    fn a_page_says_what_sets_a_cell_apart() {
        let particular = |name| particular_of(&Cell::find(name).expect("a cell"));
        assert_eq!(
            ["agents-50", "higress", "agents-tight", "two-gateways"].map(particular),
            [
                "",
                "",
                "engines with 2200 KV blocks of 16 tokens",
                "2 processes of each router"
            ]
        );
        assert!(particular("unequal").contains("half of the engines"));
        assert_eq!(particular("change"), CHANGE);
    }

    #[test]
    fn a_ratio_is_marked_by_its_verdict_and_has_more_digits_if_small() {
        let marked = |verdict: &str| judged(&figure(1.0, Some([0.0016, 0.001, 0.0024]), verdict));
        assert_eq!(
            ["faster", "equal", "slower"].map(marked),
            [
                "0.002 (0.001-0.002)",
                "0.002 (0.001-0.002) =",
                "**0.002 (0.001-0.002)**"
            ]
        );
    }

    #[test]
    fn of_dynamo_s_engines_a_page_has_only_end_to_end() {
        let mut results = result("slower");
        for cell in &mut results.cells {
            cell.cell = "dynamo-agents".into();
            cell.group = dynamo::GROUP.into();
        }
        let lost = losses(&results);
        assert!(
            lost.contains("cold, ratio to smg:\n  end to end") && !lost.contains("TTFT"),
            "{lost}"
        );
        let section = dynamo::section(&results);
        assert!(
            section.contains("| dynamo-agents | smg | 100; **1.10 (1.05-1.20)** |"),
            "{section}"
        );
        assert!(others(&results).is_empty() && dynamo::section(&result("slower")).is_empty());
        assert!(
            not_run(&results).contains("agents-50,\n")
                && !not_run(&results).contains("dynamo-agents")
        );
    }

    #[test]
    fn a_page_is_written_from_the_data_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(folder.path().join("data")).expect("a folder");
        let data = folder.path().join("data/race.json");
        let results = result("slower");
        std::fs::write(&data, results.to_lines().expect("JSON")).expect("a file");
        write(&folder.path().join("no runs"), folder.path()).expect("a page");
        let page =
            std::fs::read_to_string(folder.path().join("reference/race.md")).expect("the page");
        assert!(
            page.contains("| agents-50 | **1.10 (1.05-1.20)**; 100 |"),
            "{page}"
        );
        assert!(folder.path().join("reference/race/workloads.svg").is_file());
        assert_eq!(RaceResults::read(&data).expect("results"), results);
    }

    #[test]
    fn a_later_result_of_a_cell_replaces_the_earlier_one() {
        let mut results = result("slower");
        results.put(result("equal").cells.remove(0));
        assert_eq!(results, result("equal"));
    }
}
