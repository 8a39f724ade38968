//! Judges the runs and writes the page: `docs/reference/race.md`, a picture for each workload, and
//! `docs/data/race.json`, from which the page can be printed again.

mod dynamo;
mod picture;
mod summary;

use std::fmt::Write as _;
use std::path::Path;

use race_cells::{Cell, CellChange, CellSource, EngineSpeed, PublishedShape, RaceWorkload};
use testbed::Result;

use crate::campaign::RouterGroup;
use crate::judge::RaceFigure;
use crate::results::{AGAIN, CellResult, FigureResult, OURS, RaceResults, RouterResult};

const HEAD: &str = "# The race: beside other routers

`make race` plays the same sessions at several routers, each in front of eight simulated engines of its own that run
in real time, and prints this page. A session is sent from its first turn to its last; a later turn is sent a
recorded pause after the reply before it. The same turn of the same session is compared between the routers. Each
router has two threads.

Engines are `qwen3-32b-h200` with at most 24 sequences, unless a cell says otherwise. Load is a share of what round
robin can serve. \"Cold\" are the sessions that arrive in the first quarter, when caches are empty; \"warm\" are all
others. A client gives up after 60 s; any request that fails counts as 60 s. Ratios are ours over the other router's,
with an interval of 95 % (bootstrap over sessions, seeds pooled): below 1, ours is faster. A difference no larger than
that of ours against ours counts as equal. In pictures, what is below 0.25 or above 2 is drawn at the edge.

The routers of a cell run side by side. A run whose engines or clients were more than 5 ms late (99th percentile) is
repeated beside fewer others, and left out if it is late even alone. Where commits of ours differ, all are named.

";

const CHANGE: &str = "\
After a quarter of the arrivals the first engine dies, after half of them a ninth is added, after three quarters the
second restarts, empty.";

const PUBLISHED_TITLE: &str = "In the shape of published tables

`llm-d-groups` and `llm-d-unique` have the shape of llm-d-benchmark pull request 1908, with `qwen3-32b-h200` engines of
at most 256 sequences; `higress` that of Higress pull request 4352, with three engines that run Llama 3 8B as an A10
does (at most 32 sequences, 2,400 blocks); `mooncake` is a piece of a public trace. Only the shape is theirs: their
figures are of real GPUs.";

/// Judges the runs of `folder` and writes the page, the pictures and the data below `docs`.
/// `before` is a folder with runs of the policy before.
///
/// # Errors
/// If a run cannot be read, or a file cannot be written.
pub fn write(folder: &Path, before: Option<&Path>, docs: &Path) -> Result<()> {
    let data = docs.join("data/race.json");
    let mut results = RaceResults::read(&data)?;
    for cell in Cell::all() {
        for group in RouterGroup::all() {
            CellResult::of_runs(folder, &cell, &group)?
                .into_iter()
                .for_each(|result| results.put(result));
        }
    }
    if let Some(before) = before {
        results.before = summary::earlier(before)?;
    }
    std::fs::write(&data, serde_json::to_string_pretty(&results)? + "\n")?;
    std::fs::create_dir_all(docs.join("reference/race"))?;
    let mut page = HEAD.to_owned();
    page.push_str(&not_run(&results));
    page.push_str(&summary::section(&results));
    page.push_str(&losses(&results));
    for workload in RaceWorkload::ALL {
        let of = |cell: &Cell| cell.workload() == Some(workload);
        section(
            &capitalised(workload.name()),
            workload.name(),
            of,
            &results,
            docs,
            &mut page,
        )?;
    }
    section(
        PUBLISHED_TITLE,
        "published",
        |cell| cell.workload().is_none(),
        &results,
        docs,
        &mut page,
    )?;
    page.push_str(&others(&results));
    page.push_str(&dynamo::section(&results));
    Ok(std::fs::write(
        docs.join("reference/race.md"),
        page.trim_end().to_owned() + "\n",
    )?)
}

/// A sentence on the cells without a result.
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

/// Every place where another router is faster.
fn losses(results: &RaceResults) -> String {
    if results.cells.is_empty() {
        return String::new();
    }
    let mut text = "## Where we lose\n\n".to_owned();
    let before = text.len();
    for result in &results.cells {
        for router in result
            .routers
            .iter()
            .filter(|router| ![OURS, AGAIN].contains(&router.router.as_str()))
        {
            for (row, figures) in [("cold", &router.cold), ("warm", &router.warm)] {
                // Of Dynamo's engines only the first figure counts.
                let counted = if result.group == dynamo::GROUP {
                    1
                } else {
                    figures.len()
                };
                let counted = RaceFigure::ALL.iter().zip(figures).take(counted);
                for (figure, found) in
                    counted.filter(|(_, found)| found.verdict.as_deref() == Some("slower"))
                {
                    let _ = writeln!(
                        text,
                        "- {} ({row}): {} is {} of {}'s.",
                        result.cell,
                        figure.name(),
                        ratio(found),
                        router.router
                    ); // a String
                }
            }
        }
    }
    if text.len() == before {
        text.push_str("Nowhere by these runs.\n");
    }
    text.push('\n');
    text
}

/// The tables and the picture of some cells.
fn section(
    title: &str,
    name: &str,
    has: impl Fn(&Cell) -> bool,
    results: &RaceResults,
    docs: &Path,
    page: &mut String,
) -> Result<()> {
    let of = |result: &&CellResult| Cell::find(&result.cell).is_some_and(|cell| has(&cell));
    let cells: Vec<&CellResult> = results.of_group("core").filter(of).collect();
    if cells.is_empty() {
        return Ok(());
    }
    let file = format!("{}.svg", name.replace(' ', "-"));
    picture::draw(&cells, name, &docs.join("reference/race").join(&file))?;
    writeln!(
        page,
        "## {title}\n\n![Ratio of ours to smg and to ours](race/{file})\n"
    )?;
    for result in cells {
        cell_tables(result, page)?;
    }
    Ok(())
}

/// How the sessions of a cell arrive, in words.
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

/// What sets a cell apart from others of its workload; nothing, or lines.
fn particular_of(cell: &Cell) -> String {
    let mut notes = Vec::new();
    if cell.workload().is_some() {
        let few = |blocks: u32| {
            format!(
                "Each engine has only {},{:03} KV blocks of 16 tokens.",
                blocks / 1_000,
                blocks % 1_000
            )
        };
        notes.extend(cell.engines.kv_blocks.map(few));
    }
    if cell.engines.speed == EngineSpeed::HalfAreHalfAsFast {
        notes.push("The second half of the engines takes twice as long for each step.".to_owned());
    }
    if cell.change == CellChange::KillAddRestart {
        notes.push(CHANGE.to_owned());
    }
    if cell.gateways > 1 {
        notes.push(format!(
            "Each router has {} processes, which take the sessions in turn.",
            cell.gateways
        ));
    }
    notes
        .iter()
        .fold(String::new(), |text, note| text + note + "\n")
}

fn cell_tables(result: &CellResult, page: &mut String) -> Result<()> {
    let cell = Cell::find(&result.cell);
    let mut arrivals = cell.as_ref().map_or_else(String::new, arrivals_of);
    if cell.is_some_and(|cell| cell.workload().is_some()) {
        write!(arrivals, ", {:.0} s of arrivals", result.arrivals_s)?;
    }
    let particular = cell.as_ref().map_or_else(String::new, particular_of);
    writeln!(
        page,
        "### {}\n\n{arrivals}.\n{particular}{}, {}.\n",
        result.cell,
        seeds_of(result),
        stacks_of(result)
    )?;
    for (row, figures) in [
        (
            "warm",
            (|router: &RouterResult| router.warm.clone()) as fn(&RouterResult) -> Vec<FigureResult>,
        ),
        ("cold", |router| router.cold.clone()),
    ] {
        let header: Vec<&str> = std::iter::once(row)
            .chain(RaceFigure::ALL.iter().map(|figure| figure.name()))
            .collect();
        let mut table = MarkdownTable::with_header(&header);
        for router in &result.routers {
            table.row(
                std::iter::once(router.router.clone()).chain(figures(router).iter().map(cell_text)),
            );
        }
        writeln!(page, "{}", table.0)?;
    }
    let mut counts = MarkdownTable::with_header(&[
        "router",
        "version",
        "requests",
        "failed",
        "hits",
        "busiest / mean",
        "by engine, first seed",
    ]);
    for router in &result.routers {
        counts.row(counts_of(router).into_iter());
    }
    writeln!(page, "{}", counts.0)?;
    Ok(())
}

fn seeds_of(result: &CellResult) -> String {
    let seeds: Vec<String> = result.seeds.iter().map(ToString::to_string).collect();
    format!(
        "{} {}",
        if seeds.len() == 1 { "Seed" } else { "Seeds" },
        seeds.join(" ")
    )
}

/// How many stacks ran at the same time, in words.
fn stacks_of(result: &CellResult) -> String {
    let [fewest, most] = result.side_by_side;
    match (fewest, most) {
        (_, 1) => "1 stack at a time".to_owned(),
        _ if fewest == most => format!("{most} stacks at once"),
        _ => format!("{fewest} to {most} stacks at once"),
    }
}

/// The routers beside ours and smg, one seed each.
fn others(results: &RaceResults) -> String {
    let mut table = MarkdownTable::with_header(&[
        "cell",
        "router",
        "end to end",
        "TTFT mean",
        "TTFT p99",
        "TPOT mean",
        "TPOT p99",
        "hits",
        "failed",
        "by engine",
    ]);
    let mut rows = 0;
    let mut versions = Vec::new();
    for result in results
        .cells
        .iter()
        .filter(|result| !["core", dynamo::GROUP].contains(&result.group.as_str()))
    {
        for router in &result.routers {
            let engines: Vec<String> = router.by_engine.iter().map(ToString::to_string).collect();
            let head = [result.cell.clone(), router.router.clone()];
            let tail = [
                percent(router.hit_rate),
                router.failures.to_string(),
                engines.join(" "),
            ];
            table.row(
                head.into_iter()
                    .chain(router.warm.iter().map(cell_text))
                    .chain(tail),
            );
            versions.push(format!("{} {}", router.router, router.version));
            rows += 1;
        }
    }
    versions.sort();
    versions.dedup();
    if rows == 0 {
        return String::new();
    }
    format!(
        "## Other routers\n\nWarm rows of one seed. Ratios are of the row of ours above, in the same cell. Versions:\n{}.\n\n{}\n",
        versions.join(",\n"),
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

fn counts_of(router: &RouterResult) -> Vec<String> {
    let engines: Vec<String> = router.by_engine.iter().map(ToString::to_string).collect();
    let counts = [router.requests, router.failures].map(|count| count.to_string());
    let [requests, failures] = counts;
    vec![
        router.router.clone(),
        router.version.clone(),
        requests,
        failures,
        percent(router.hit_rate),
        format!("{:.2}", router.busiest),
        engines.join(" "),
    ]
}

/// A figure with the ratio of ours to it.
fn cell_text(figure: &FigureResult) -> String {
    let ms = format!("{:.0}", figure.ms);
    match (&figure.ours_over, figure.verdict.as_deref()) {
        (Some(_), Some(verdict)) => format!("{ms}; {} {verdict}", ratio(figure)),
        _ => ms,
    }
}

fn ratio(figure: &FigureResult) -> String {
    let digits = figure
        .ours_over
        .map_or(2, |[ratio, ..]| if ratio < 0.095 { 3 } else { 2 });
    figure
        .ours_over
        .map_or(String::new(), |[ratio, low, high]| {
            format!("{ratio:.digits$} ({low:.digits$} to {high:.digits$})")
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
            by_engine: vec![4, 6],
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
            side_by_side: [2, 3],
            routers,
        });
        results
    }

    #[test]
    fn a_page_says_where_we_lose_and_what_was_not_run() {
        assert!(
            losses(&result("slower"))
                .contains("- agents-50 (warm): TTFT, p99 is 1.10 (1.05 to 1.20) of smg's.")
        );
        assert!(losses(&result("equal")).contains("Nowhere"));
        let missing = not_run(&result("equal"));
        assert!(
            missing.contains("tenants-50") && !missing.contains("agents-50"),
            "{missing}"
        );
    }

    #[test]
    fn a_page_says_what_sets_a_cell_apart_and_how_it_ran() {
        let particular = |name| particular_of(&Cell::find(name).expect("a cell"));
        assert_eq!(particular("agents-50"), "");
        assert_eq!(
            particular("agents-tight"),
            "Each engine has only 2,200 KV blocks of 16 tokens.\n"
        );
        assert_eq!(particular("higress"), "", "its section says it");
        assert_eq!(
            particular("unequal"),
            "The second half of the engines takes twice as long for each step.\n"
        );
        assert!(
            particular("change").ends_with("restarts, empty.\n")
                && particular("two-gateways").contains("2 processes")
        );
        let mut results = result("equal");
        let cell = results.cells.first_mut().expect("a cell");
        assert_eq!(
            (seeds_of(cell), stacks_of(cell)),
            ("Seed 101".to_owned(), "2 to 3 stacks at once".to_owned())
        );
        cell.seeds = vec![101, 102];
        cell.side_by_side = [1, 1];
        assert_eq!(
            (seeds_of(cell), stacks_of(cell)),
            ("Seeds 101 102".to_owned(), "1 stack at a time".to_owned())
        );
        assert_eq!(
            ratio(&figure(1.0, Some([0.0016, 0.001, 0.0024]), "faster")),
            "0.002 (0.001 to 0.002)"
        );
    }

    #[test]
    fn of_dynamo_s_engines_a_page_has_only_end_to_end() {
        let mut results = result("slower");
        for cell in &mut results.cells {
            cell.cell = "dynamo-agents".into();
            cell.group = dynamo::GROUP.into();
        }
        assert_eq!(
            losses(&results).matches("of smg's.").count(),
            2,
            "cold and warm"
        );
        let section = dynamo::section(&results);
        assert!(
            section.contains("| dynamo-agents | smg | 1 | 100; 1.10 (1.05 to 1.20) slower |"),
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
        std::fs::create_dir_all(folder.path().join("reference")).expect("a folder");
        std::fs::write(
            folder.path().join("data/race.json"),
            serde_json::to_string(&result("slower")).expect("JSON"),
        )
        .expect("a file");
        write(&folder.path().join("no runs"), None, folder.path()).expect("a page");
        let page =
            std::fs::read_to_string(folder.path().join("reference/race.md")).expect("the page");
        assert!(
            page.contains("| smg | 100; 1.10 (1.05 to 1.20) slower |"),
            "{page}"
        );
        assert!(folder.path().join("reference/race/agents.svg").is_file());
    }

    #[test]
    fn a_later_result_of_a_cell_replaces_the_earlier_one() {
        let mut results = result("slower");
        results.put(result("equal").cells.remove(0));
        assert_eq!(results, result("equal"));
    }
}
