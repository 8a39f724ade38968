//! Measures the cost of a picker against two bases. A minimal Envoy shows what users pay in total,
//! and the shipped configuration without a picker shows what the picker adds. Every round runs all
//! paths directly one after the other.
//!
//! Around two standard cases, with bodies of 10 KB and of 100 KB, each case changes one factor:
//! body, connections, HTTP version, workers, endpoints, or pace of the engines. The order of the
//! paths rotates from round to round, so that no path is always first after the pause. The result
//! is the median, over the rounds, of the difference between the path and the base in the same
//! round. The machine may be shared and noisy. So the spread of the differences (interquartile
//! range) shows how reliable the differences are.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use testbed::Result;

use crate::load::{LoadFigures, LoadRun};
use crate::stats::{PairedDifference, iqr, median};
use crate::world::{BenchStack, RequestPath};
use crate::{Args, predicting, write_result};

/// The distance of backslashes in bodies with escapes, in bytes: as in code and quoted text.
const ESCAPE_EVERY: usize = 55;

/// The number of different bodies. They differ in their first bytes, so that most requests of a run
/// share no prefix.
const BODIES: usize = 64;

/// The load at which tail latency is measured, as a share of the requests/s that the slowest path
/// sustains.
const TAIL_LOAD: f64 = 0.5;

/// The body sizes of the standard cases. All other cases differ from a standard case in one factor.
pub(crate) const CENTRES: [usize; 2] = [10_000, 100_000];

/// The body sizes of a full run, and the body sizes of a run with `--quick`.
const SIZES: [usize; 6] = [1_000, 10_000, 100_000, 220_000, 400_000, 1_000_000];
const QUICK_SIZES: [usize; 3] = [10_000, 100_000, 400_000];

/// The number of endpoints and of connections in cases that change another factor.
pub(crate) const ENDPOINTS: usize = 100;
pub(crate) const CONNECTIONS: usize = 16;

/// The number of connections in cases with more workers, so that each worker has several
/// connections.
pub(crate) const MANY: usize = 64;
pub(crate) const WORKERS: u32 = 4;

/// The query for the pace of a real engine: 20 events, 10 ms apart.
const PACE: &str = "?chunks=20&every_ms=10";

/// One row of the result file. The fields are the columns of the published JSON table.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct OverheadRow {
    pub(crate) front: String,
    /// The base of the differences and ratios in this row.
    pub(crate) base: String,
    #[serde(flatten)]
    pub(crate) case: OverheadCase,
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) p50_us: f64,
    /// The CPU time of Envoy per request. With `ext_proc`, the CPU time of the daemon is included.
    pub(crate) cpu_us: f64,
    /// The CPU time of the daemon per request. The daemon always scrapes all endpoints, so this
    /// number is larger if there are few requests.
    pub(crate) daemon_us: f64,
    pub(crate) rps: f64,
    pub(crate) added_p50_us: f64,
    pub(crate) added_p99_us: f64,
    pub(crate) added_cpu_us: f64,
    /// The spreads of the added p50, the added p99 and the added CPU.
    pub(crate) iqr_us: f64,
    pub(crate) iqr_p99_us: f64,
    pub(crate) iqr_cpu_us: f64,
    pub(crate) p50_ratio: f64,
    pub(crate) iqr_p50_ratio: f64,
    pub(crate) cpu_ratio: f64,
    pub(crate) iqr_cpu_ratio: f64,
    pub(crate) rps_ratio: f64,
    pub(crate) iqr_rps_ratio: f64,
}

/// One case to measure.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) struct OverheadCase {
    pub(crate) body_bytes: usize,
    pub(crate) escapes: bool,
    /// Whether picks use predicted latency. Otherwise picks use the default profile.
    pub(crate) predicting: bool,
    pub(crate) endpoints: usize,
    pub(crate) connections: usize,
    pub(crate) workers: u32,
    pub(crate) http2: bool,
    /// Whether the engines answer at the pace of real engines. Otherwise the engines answer
    /// immediately.
    pub(crate) paced: bool,
    /// The requests/s of an open loop, in which a client sends requests independently of earlier
    /// answers. Null for a closed loop.
    pub(crate) rate_rps: Option<u32>,
}

pub(crate) async fn bench(args: &Args) -> Result<()> {
    let mut rows = Vec::new();
    let cases = if args.quick { quick_cases() } else { cases() };
    let mut left = cases.as_slice();
    while let Some(first) = left.first() {
        let stack = |case: &OverheadCase| (case.endpoints, case.workers, case.predicting);
        let (same, rest) = left.split_at(
            left.iter()
                .take_while(|case| stack(case) == stack(first))
                .count(),
        );
        rows.extend(stack_rows(args, *first, same).await?);
        left = rest;
    }
    write_result("overhead", &rows)
}

/// Measures the cases that share the stack of `first`.
async fn stack_rows(
    args: &Args,
    first: OverheadCase,
    cases: &[OverheadCase],
) -> Result<Vec<OverheadRow>> {
    let folder = tempfile::tempdir()?;
    let mut world = if first.predicting {
        predicting::world(first.endpoints, &args.daemon_argument, folder.path()).await?
    } else {
        BenchStack::start(first.endpoints, first.workers, &args.daemon_argument).await?
    };
    let mut rows = Vec::new();
    for case in cases {
        let measured = measure(args, *case, &mut world).await?;
        let slowest = measured.iter().map(|row| row.rps).fold(f64::MAX, f64::min);
        rows.extend(measured);
        if !args.quick
            && OverheadCase::around(case.body_bytes) == *case
            && CENTRES.contains(&case.body_bytes)
        {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "some thousands"
            )]
            let rate_rps = Some((slowest * TAIL_LOAD) as u32);
            rows.extend(
                measure(
                    args,
                    OverheadCase {
                        rate_rps,
                        connections: MANY,
                        ..*case
                    },
                    &mut world,
                )
                .await?,
            );
        }
    }
    world.stop().await?;
    Ok(rows)
}

/// Returns the cases of a full run. Cases with the same stack are adjacent.
fn cases() -> Vec<OverheadCase> {
    let centres = || CENTRES.into_iter().map(OverheadCase::around);
    let one_or_many = |case: OverheadCase| {
        [1, CONNECTIONS].map(|connections| OverheadCase {
            connections,
            ..case
        })
    };
    let mut cases: Vec<OverheadCase> = SIZES
        .into_iter()
        .map(OverheadCase::around)
        .flat_map(one_or_many)
        .collect();
    cases.extend(centres().map(|case| OverheadCase {
        connections: MANY,
        ..case
    }));
    cases.extend(centres().map(|case| OverheadCase {
        http2: true,
        ..case
    }));
    cases.extend(centres().map(|case| OverheadCase {
        connections: MANY,
        paced: true,
        ..case
    }));
    cases.extend([400_000, 1_000_000].map(|bytes| OverheadCase {
        escapes: true,
        ..OverheadCase::around(bytes)
    }));
    cases.extend(centres().map(|case| OverheadCase {
        workers: WORKERS,
        connections: MANY,
        ..case
    }));
    for endpoints in [10, 1_000] {
        cases.extend(one_or_many(OverheadCase {
            endpoints,
            ..OverheadCase::around(CENTRES[0])
        }));
        cases.push(OverheadCase {
            endpoints,
            ..OverheadCase::around(CENTRES[1])
        });
    }
    cases.extend(
        centres()
            .map(|case| OverheadCase {
                predicting: true,
                ..case
            })
            .flat_map(one_or_many),
    );
    cases
}

/// Returns the cases that the page's targets need. Cases with the same stack are adjacent.
fn quick_cases() -> Vec<OverheadCase> {
    let one_or_many = |case: OverheadCase| {
        [1, CONNECTIONS].map(|connections| OverheadCase {
            connections,
            ..case
        })
    };
    let mut cases: Vec<OverheadCase> = QUICK_SIZES
        .into_iter()
        .map(OverheadCase::around)
        .flat_map(one_or_many)
        .collect();
    let small = OverheadCase::around(CENTRES[0]);
    cases.extend([1, WORKERS].map(|workers| OverheadCase {
        workers,
        connections: MANY,
        ..small
    }));
    cases.extend([10, 1_000].map(|endpoints| OverheadCase {
        endpoints,
        connections: 1,
        ..small
    }));
    cases
}

async fn measure(
    args: &Args,
    case: OverheadCase,
    world: &mut BenchStack,
) -> Result<Vec<OverheadRow>> {
    let bodies = write_bodies(case.body_bytes, case.escapes, world.folder.path())?;
    let mut runs: [Vec<LoadFigures>; RequestPath::ALL.len()] = Default::default();
    for round in 0..args.rounds {
        for turn in 0..RequestPath::ALL.len() {
            let at = (round + turn) % RequestPath::ALL.len();
            let path = RequestPath::ALL[at];
            let closed = LoadRun::closed_loop(
                world.address(path),
                bodies.clone(),
                case.connections,
                args.seconds,
                world.processes(path),
            );
            let load = LoadRun {
                rate: case.rate_rps,
                http2: case.http2,
                query: if case.paced { PACE } else { "" },
                headers: if case.predicting {
                    predicting::HEADERS
                } else {
                    &[]
                },
                ..closed
            };
            let mut figures = load.run(world.folder.path()).await?;
            if path == RequestPath::ExtProc {
                figures.cpu_us += figures.daemon_us;
            }
            runs[at].push(figures);
        }
    }
    let of = |path: RequestPath| -> &[LoadFigures] {
        RequestPath::ALL
            .iter()
            .zip(&runs)
            .find(|(known, _)| **known == path)
            .map_or(&[], |(_, runs)| runs.as_slice())
    };
    let mut rows = Vec::new();
    for base in RequestPath::BASES {
        for path in [base].into_iter().chain(RequestPath::PICKERS) {
            rows.push(row(path, base, case, of(path), of(base)));
        }
    }
    rows.iter()
        .filter(|row| row.front != RequestPath::Minimal.name())
        .for_each(|row| println!("{}", describe_row(row)));
    Ok(rows)
}

fn row(
    path: RequestPath,
    base: RequestPath,
    case: OverheadCase,
    ours: &[LoadFigures],
    plain: &[LoadFigures],
) -> OverheadRow {
    type Figure = fn(&LoadFigures) -> f64;
    let of = |figure: Figure, runs: &[LoadFigures]| runs.iter().map(figure).collect::<Vec<f64>>();
    let added = |figure: Figure| PairedDifference::between(&of(figure, ours), &of(figure, plain));
    let ratios = |figure: Figure| {
        ours.iter()
            .zip(plain)
            .map(|(ours, plain)| figure(ours) / figure(plain))
            .collect::<Vec<f64>>()
    };
    let p50 = added(|m| m.p50_us);
    let p99 = added(|m| m.p99_us);
    let cpu = added(|m| m.cpu_us);
    let p50_ratios = ratios(|m| m.p50_us);
    let cpu_ratios = ratios(|m| m.cpu_us);
    let rps_ratios = ratios(|m| m.rps);
    OverheadRow {
        front: path.name().to_owned(),
        base: base.base_name().to_owned(),
        case,
        requests: ours.iter().map(|m| m.requests).sum(),
        errors: ours.iter().map(|m| m.errors).sum(),
        p50_us: median(&of(|m| m.p50_us, ours)),
        cpu_us: median(&of(|m| m.cpu_us, ours)),
        daemon_us: median(&of(|m| m.daemon_us, ours)),
        rps: median(&of(|m| m.rps, ours)),
        added_p50_us: p50.median,
        added_p99_us: p99.median,
        added_cpu_us: cpu.median,
        iqr_us: p50.iqr,
        iqr_p99_us: p99.iqr,
        iqr_cpu_us: cpu.iqr,
        p50_ratio: median(&p50_ratios),
        iqr_p50_ratio: iqr(&p50_ratios),
        cpu_ratio: median(&cpu_ratios),
        iqr_cpu_ratio: iqr(&cpu_ratios),
        rps_ratio: median(&rps_ratios),
        iqr_rps_ratio: iqr(&rps_ratios),
    }
}

fn describe_row(row: &OverheadRow) -> String {
    format!(
        "{:>8} / {:<7} {}: p50 {:>7.1} + {:.1} ({:.1}) us, {:.2} x  p99 + {:.0} ({:.0})  cpu {:>6.1} + {:.1} ({:.1}) us, {:.2} x  daemon {:.1}  req/s {:.0} %  errors {}",
        row.front,
        row.base,
        row.case.describe(),
        row.p50_us,
        row.added_p50_us,
        row.iqr_us,
        row.p50_ratio,
        row.added_p99_us,
        row.iqr_p99_us,
        row.cpu_us,
        row.added_cpu_us,
        row.iqr_cpu_us,
        row.cpu_ratio,
        row.daemon_us,
        100.0 * row.rps_ratio,
        row.errors,
    )
}

// === impl OverheadCase ===

impl OverheadCase {
    /// Returns the standard case with bodies of this size.
    pub(crate) fn around(body_bytes: usize) -> Self {
        Self {
            body_bytes,
            escapes: false,
            predicting: false,
            endpoints: ENDPOINTS,
            connections: CONNECTIONS,
            workers: 1,
            http2: false,
            paced: false,
            rate_rps: None,
        }
    }

    /// Describes the load of the case, and in which factors the case differs from the standard case
    /// of its body size.
    pub(crate) fn describe(&self) -> String {
        let load = self.rate_rps.map_or_else(
            || format!("{} connections", self.connections),
            |rate| format!("open loop, {rate}/s"),
        );
        let differences = [
            (self.http2, "HTTP/2".to_owned()),
            (self.paced, "engines at pace".to_owned()),
            (self.escapes, "escapes".to_owned()),
            (self.predicting, "predicting".to_owned()),
            (self.workers != 1, format!("{} workers", self.workers)),
            (
                self.endpoints != ENDPOINTS,
                format!("{} endpoints", self.endpoints),
            ),
        ];
        let differences = differences
            .into_iter()
            .filter_map(|(differs, what)| differs.then_some(what));
        let parts: Vec<String> = [format!("{} KB", self.body_bytes / 1_000), load]
            .into_iter()
            .chain(differences)
            .collect();
        parts.join(", ")
    }
}

/// Writes chat requests of about `body_bytes` bytes to a file, one per line. Returns the path of
/// the file.
pub(crate) fn write_bodies(body_bytes: usize, escapes: bool, folder: &Path) -> Result<PathBuf> {
    let file = folder.join(format!("bodies-{body_bytes}-{escapes}"));
    let lines: Vec<String> = (0..BODIES)
        .map(|i| {
            let mut text = format!("conversation {i} ");
            while text.len() < body_bytes.saturating_sub(120) {
                let word = if escapes && text.len() % ESCAPE_EVERY < 6 { "say \\\"" } else { "words " };
                text.push_str(word);
            }
            format!(r#"{{"model":"m","messages":[{{"role":"system","content":"be brief"}},{{"role":"user","content":"{text}"}}],"max_tokens":16}}"#)
        })
        .collect();
    std::fs::write(&file, lines.join("\n"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_factor_changes_at_a_time() {
        let factors = |case: OverheadCase| {
            let centre = OverheadCase::around(case.body_bytes);
            let several = case.workers != 1 || case.paced;
            [
                case.endpoints != centre.endpoints,
                case.workers != centre.workers,
                case.http2,
                case.paced,
                case.escapes,
                case.predicting,
                // In two kinds of cases the number of connections does not count as a changed
                // factor. Cases with one connection measure the latency of a lone request. Cases
                // with paced engines or several workers need many connections.
                case.connections != centre.connections && case.connections != 1 && !several,
            ]
            .into_iter()
            .filter(|changed| *changed)
            .count()
        };
        let cases = cases();
        assert!(cases.iter().all(|case| factors(*case) <= 1), "{cases:#?}");
        assert!(
            quick_cases().iter().all(|case| cases.contains(case)),
            "a quick run measures cases of the full one"
        );
        assert!(
            cases
                .iter()
                .enumerate()
                .all(|(at, case)| !cases[..at].contains(case)),
            "no case is measured twice"
        );
        for centre in CENTRES.map(OverheadCase::around) {
            assert!(cases.contains(&centre) && quick_cases().contains(&centre));
            for changed in [
                OverheadCase {
                    http2: true,
                    ..centre
                },
                OverheadCase {
                    connections: 1,
                    ..centre
                },
                OverheadCase {
                    connections: MANY,
                    ..centre
                },
                OverheadCase {
                    connections: MANY,
                    workers: WORKERS,
                    ..centre
                },
                OverheadCase {
                    connections: MANY,
                    paced: true,
                    ..centre
                },
            ] {
                assert!(cases.contains(&changed), "{changed:?}");
            }
        }
    }

    #[test]
    fn a_row_compares_with_its_base_round_by_round() {
        let figures = |cpu_us, rps| LoadFigures {
            requests: 1,
            p50_us: cpu_us,
            cpu_us,
            rps,
            ..LoadFigures::default()
        };
        let ours = [figures(30.0, 5.0), figures(60.0, 2.0)];
        let plain = [figures(10.0, 10.0), figures(20.0, 4.0)];
        let found = row(
            RequestPath::Filter,
            RequestPath::Minimal,
            OverheadCase::around(1_000),
            &ours,
            &plain,
        );
        assert_eq!(
            (found.front.as_str(), found.base.as_str()),
            ("filter", "minimal")
        );
        assert!(
            (found.cpu_ratio - 3.0).abs() < 1e-9 && (found.rps_ratio - 0.5).abs() < 1e-9,
            "{found:?}"
        );
        let text = serde_json::to_value(&found).unwrap();
        assert_eq!(
            (&text["body_bytes"], &text["workers"], &text["base"]),
            (&1_000.into(), &1.into(), &"minimal".into())
        );
    }
}
