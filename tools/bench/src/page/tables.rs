//! The tables of the page.

use std::fmt::Write as _;

use testbed::Result;

use super::BenchResults;
use crate::flow::FlowRow;
use crate::flow::cost::{AddedCost, FlowCostRow};
use crate::overhead::{CONNECTIONS, OverheadCase, OverheadRow};
use crate::world::RequestPath;

/// The body sizes in the table that compares the pickers with both bases (a minimal Envoy and the
/// shipped Envoy), in bytes.
const SIZES: [usize; 6] = [1_000, 10_000, 100_000, 220_000, 400_000, 1_000_000];

/// Returns a difference with its spread, as text.
fn spread(value: f64, iqr: f64) -> String {
    format!("{value:.0} ({iqr:.0})")
}

/// Returns a table of the CPU time per request of four paths: the minimal Envoy, the shipped Envoy
/// without a picker, and both pickers.
pub(super) fn bases(measured: &BenchResults) -> Result<String> {
    let mut text = String::from(
        "| body, KB | connections | minimal Envoy | shipped, no picker | filter | ext_proc | filter over shipped | filter / minimal | p50: filter / minimal |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for body_bytes in SIZES {
        for connections in [1, CONNECTIONS] {
            let case = OverheadCase {
                connections,
                ..OverheadCase::around(body_bytes)
            };
            let of = |path, base| measured.request(path, base, case);
            let (Some(minimal), Some(shipped), Some(filter), Some(ext_proc), Some(over)) = (
                of(RequestPath::Minimal, RequestPath::Minimal),
                of(RequestPath::Shipped, RequestPath::Shipped),
                of(RequestPath::Filter, RequestPath::Minimal),
                of(RequestPath::ExtProc, RequestPath::Minimal),
                of(RequestPath::Filter, RequestPath::Shipped),
            ) else {
                continue;
            };
            let cpu = [minimal, shipped, filter, ext_proc]
                .map(|row| format!("{:.0}", row.cpu_us))
                .join(" | ");
            let ratios = format!(
                "{:.2} ({:.2}) | {:.2} ({:.2})",
                filter.cpu_ratio, filter.iqr_cpu_ratio, filter.p50_ratio, filter.iqr_p50_ratio
            );
            let added = spread(over.added_cpu_us, over.iqr_cpu_us);
            writeln!(
                text,
                "| {} | {connections} | {cpu} | {added} | {ratios} |",
                body_bytes / 1_000
            )?;
        }
    }
    Ok(text)
}

/// Returns a table of the costs that the pickers add to the shipped configuration, with a row for
/// each case.
pub(super) fn requests(measured: &BenchResults) -> Result<String> {
    let base = RequestPath::Shipped;
    let mut text = String::from(
        "| case | p50, no picker | filter: p50 | p99 | CPU | requests/s | ext_proc: p50 | p99 | CPU | requests/s |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    let rows = measured.overhead.rows.iter();
    let plain = |row: &&OverheadRow| row.base == base.base_name() && row.front == base.name();
    for plain in rows.filter(plain) {
        let pickers = RequestPath::PICKERS
            .into_iter()
            .filter_map(|picker| measured.request(picker, base, plain.case));
        let columns: Vec<String> = pickers.map(added).collect();
        writeln!(
            text,
            "| {} | {:.0} | {} |",
            plain.case.describe(),
            plain.p50_us,
            columns.join(" | ")
        )?;
    }
    Ok(text)
}

/// Returns the columns of one picker, as text.
fn added(row: &OverheadRow) -> String {
    format!(
        "{} | {} | {} | {:.0} %",
        spread(row.added_p50_us, row.iqr_us),
        spread(row.added_p99_us, row.iqr_p99_us),
        spread(row.added_cpu_us, row.iqr_cpu_us),
        100.0 * row.rps_ratio
    )
}

pub(super) fn chunks(measured: &BenchResults) -> Result<String> {
    let mut text = String::from(
        "| path | chunks/s | CPU per chunk µs | added (spread) |\n|---|---|---|---|\n",
    );
    for row in &measured.streams.rows {
        writeln!(
            text,
            "| {} | {:.0} | {:.2} | {:.2} ({:.2}) |",
            row.front, row.chunks_per_s, row.cpu_us, row.added_cpu_us, row.iqr_us
        )?;
    }
    Ok(text)
}

pub(super) fn standing(measured: &BenchResults) -> Result<String> {
    let mut text = String::from("| what | median | worst |\n|---|---|---|\n");
    for row in &measured.standing.rows {
        let worst = row
            .worst
            .map(|worst| format!("{worst:.3} {}", row.unit))
            .unwrap_or_default();
        writeln!(
            text,
            "| {} | {:.3} {} | {worst} |",
            row.what, row.value, row.unit
        )?;
    }
    Ok(text)
}

pub(super) fn flow(rows: &[FlowRow]) -> Result<String> {
    let mut text = String::from(
        "| proxies x workers | requests | failed | held | load | chat TTFT p50, ms | p99, ms | p99 of 1 x 1 | tokens/s: chat, large, small | \
         share of small |\n|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let first = rows.first().map_or(f64::NAN, |row| row.chat_p99_ms);
    for row in rows {
        let FlowRow {
            proxies,
            workers,
            requests,
            failures,
            held,
            load,
            chat_p50_ms,
            chat_p99_ms,
            small_share,
            ..
        } = row;
        let killed = if row.daemon_killed {
            ", daemon killed"
        } else {
            ""
        };
        let rates: Vec<String> = row
            .tokens_per_s
            .iter()
            .map(|(_, rate)| format!("{rate:.0}"))
            .collect();
        write!(
            text,
            "| {proxies} x {workers}{killed} | {requests} | {failures} | {held} | {load:.2} | {chat_p50_ms:.0} | {chat_p99_ms:.0} "
        )?;
        writeln!(
            text,
            "| {:.2} | {} | {small_share:.3} |",
            chat_p99_ms / first,
            rates.join(", ")
        )?;
    }
    Ok(text)
}

pub(super) fn flow_cost(rows: &[FlowCostRow]) -> Result<String> {
    let mut text = String::from(
        "| workers | case | held | CPU of Envoy | beside | costs (spread) | time in the VMs | beside | costs (spread) | released by another | errors |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let by_own = rows
        .iter()
        .find(|row| row.workers == 1 && row.held_share > 0.0)
        .map_or(f64::NAN, |row| row.vm.added_us);
    for row in rows {
        let said = |cost: AddedCost| {
            format!(
                "{:.1} | {:.1} | {:.1} ({:.1})",
                cost.us, cost.base_us, cost.added_us, cost.iqr_us
            )
        };
        let workers = f64::from(row.workers);
        let by_another = match row.workers {
            1 => "-".to_owned(),
            // With W workers, the worker that got a request also releases it with probability 1/W.
            _ => format!(
                "{:.1}",
                (row.vm.added_us - by_own / workers) * workers / (workers - 1.0)
            ),
        };
        let held = format!("{:.0} %", 100.0 * row.held_share);
        writeln!(
            text,
            "| {workers} | {} | {held} | {} | {} | {by_another} | {} |",
            row.what,
            said(row.cpu),
            said(row.vm),
            row.errors
        )?;
    }
    Ok(text)
}
