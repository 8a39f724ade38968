//! Prints the figures of both policies: while requests run, and at the end.

use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

use crate::cpu::CpuMeter;
use crate::policy::{DemoPolicy, PolicyFigures};

/// Width of the progress bar, in characters.
const BAR: usize = 30;

/// The figures while requests run: on a terminal a table that is drawn again in place, elsewhere
/// one line for each policy.
pub(crate) struct LiveView {
    terminal: bool,
    length: Duration,
    /// The number of lines of the last drawing, which the next drawing replaces.
    lines: usize,
}

// === impl LiveView ===

impl LiveView {
    /// Creates a view of a run that sends its last request before `length` has passed.
    pub(crate) fn new(terminal: bool, length: Duration) -> Self {
        Self {
            terminal,
            length,
            lines: 0,
        }
    }

    pub(crate) fn on_terminal(&self) -> bool {
        self.terminal
    }

    pub(crate) fn show(&mut self, elapsed: Duration, policies: &[DemoPolicy], cpu: &CpuMeter) {
        let figures: Vec<_> = policies
            .iter()
            .map(|policy| (policy.name(), policy.figures()))
            .collect();
        if !self.terminal {
            println!("{}", self.plain(elapsed, &figures));
            return;
        }
        let drawn = self.drawing(elapsed, &figures, cpu.busy_so_far());
        if self.lines > 0 {
            print!("\x1b[{}A\x1b[J", self.lines);
        }
        println!("{drawn}");
        self.lines = drawn.lines().count();
    }

    fn plain(&self, elapsed: Duration, figures: &[(&str, PolicyFigures)]) -> String {
        let mut text = format!(
            "{:.0} s, {}",
            elapsed.as_secs_f64(),
            self.left(elapsed, figures)
        );
        for (name, seen) in figures {
            let PolicyFigures {
                done,
                hit_rate,
                ttft_p50,
                ttft_p95,
                ttft_mean,
                ..
            } = seen;
            let [p50, p95, mean] = [ttft_p50, ttft_p95, ttft_mean].map(|time| ms(*time));
            let hits = percent(*hit_rate);
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "\n  {name:11}  {done:4} done, hit rate {hits:>6}, TTFT p50 {p50:>9}, p95 {p95:>9}, mean {mean:>9}"
            );
        }
        text
    }

    fn drawing(
        &self,
        elapsed: Duration,
        figures: &[(&str, PolicyFigures)],
        busy: Option<f64>,
    ) -> String {
        let mut table = table(&[
            "policy",
            "done",
            "in flight",
            "hit rate",
            "TTFT p50",
            "TTFT p95",
            "TTFT mean",
        ]);
        for (name, seen) in figures {
            table.add_row([
                (*name).to_owned(),
                seen.done.to_string(),
                (seen.sent - seen.done).to_string(),
                percent(seen.hit_rate),
                ms(seen.ttft_p50),
                ms(seen.ttft_p95),
                ms(seen.ttft_mean),
            ]);
        }
        let share = (elapsed.as_secs_f64() / self.length.as_secs_f64().max(1e-9)).min(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "between 0 and BAR"
        )]
        let filled = (share * BAR as f64) as usize;
        let bar = "█".repeat(filled) + &"░".repeat(BAR - filled);
        let cpu = busy.map_or_else(String::new, |busy| format!("   (CPU {})", percent(busy)));
        format!(
            "{bar}  {:.0} s, {}{cpu}\n{}",
            elapsed.as_secs_f64(),
            self.left(elapsed, figures),
            right(table)
        )
    }

    fn left(&self, elapsed: Duration, figures: &[(&str, PolicyFigures)]) -> String {
        let open: usize = figures.iter().map(|(_, seen)| seen.sent - seen.done).sum();
        match self.length.saturating_sub(elapsed) {
            Duration::ZERO if open > 0 => format!("waiting for the last {open} replies"),
            Duration::ZERO => "all replies are in".to_owned(),
            left => format!("{:.0} s left", left.as_secs_f64().ceil()),
        }
    }
}

/// Returns the figures of both policies at the end, what the second policy gains over the first,
/// and the requests that failed.
pub(crate) fn comparison(policies: &[DemoPolicy; 2]) -> String {
    let seen = policies.each_ref().map(DemoPolicy::figures);
    let failed: Vec<String> = policies
        .iter()
        .zip(&seen)
        .map(|(policy, seen)| format!("{} by {}", seen.failed, policy.name()))
        .collect();
    let mut table = table(&[
        "policy",
        "done",
        "hit rate",
        "TTFT p50",
        "TTFT p95",
        "TTFT mean",
        "reply p50",
    ]);
    for (policy, seen) in policies.iter().zip(&seen) {
        table.add_row([
            policy.name().to_owned(),
            seen.done.to_string(),
            percent(seen.hit_rate),
            ms(seen.ttft_p50),
            ms(seen.ttft_p95),
            ms(seen.ttft_mean),
            ms(seen.reply_p50),
        ]);
    }
    let [theirs, ours] = &seen;
    let gain = |of: fn(&PolicyFigures) -> Duration| gain(of(theirs), of(ours));
    table.add_row([
        "gain".to_owned(),
        String::new(),
        format!("{:+.1} pp", 100.0 * (ours.hit_rate - theirs.hit_rate)),
        gain(|seen| seen.ttft_p50),
        gain(|seen| seen.ttft_p95),
        gain(|seen| seen.ttft_mean),
        gain(|seen| seen.reply_p50),
    ]);
    format!("{}\nFailed requests: {}.", right(table), failed.join(", "))
}

/// Returns the ratio of `theirs` to `ours`: below 1 if ours is longer.
fn gain(theirs: Duration, ours: Duration) -> String {
    if ours.is_zero() {
        "-".to_owned()
    } else {
        format!("{:.1} x", theirs.as_secs_f64() / ours.as_secs_f64())
    }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_header(header.to_vec());
    table
}

/// Aligns all columns but the first to the right.
fn right(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn ms(time: Duration) -> String {
    if time.is_zero() {
        "-".to_owned()
    } else {
        format!("{} ms", time.as_millis())
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(done: usize, ttft_ms: u64) -> PolicyFigures {
        let ttft = Duration::from_millis(ttft_ms);
        PolicyFigures {
            sent: done + 2,
            done,
            hit_rate: 0.5,
            ttft_p50: ttft,
            ttft_p95: ttft,
            ttft_mean: ttft,
            ..PolicyFigures::default()
        }
    }

    #[test]
    fn the_live_view_says_what_is_left() {
        let view = LiveView::new(true, Duration::from_secs(100));
        let figures = [
            ("round robin", figures(10, 800)),
            ("switchpoint", figures(12, 90)),
        ];
        let drawing = view.drawing(Duration::from_secs(50), &figures, Some(0.25));
        for part in [
            "50 s, 50 s left",
            "CPU 25.0 %",
            "┆   10 ┆",
            "┆   12 ┆",
            "800 ms",
            "90 ms",
            "50.0 %",
        ] {
            assert!(drawing.contains(part), "{part} in\n{drawing}");
        }
        assert!(
            drawing.lines().all(|line| line.chars().count() <= 80),
            "fits a terminal:\n{drawing}"
        );
        let plain = view.plain(Duration::from_secs(101), &figures);
        assert!(
            plain.starts_with("101 s, waiting for the last 4 replies\n"),
            "{plain}"
        );
        assert!(
            plain.contains("switchpoint    12 done, hit rate 50.0 %, TTFT p50     90 ms"),
            "{plain}"
        );
    }

    #[test]
    fn a_gain_below_one_is_a_loss() {
        let ms = Duration::from_millis;
        assert_eq!(
            [
                gain(ms(900), ms(100)),
                gain(ms(50), ms(100)),
                gain(ms(50), ms(0))
            ],
            ["9.0 x", "0.5 x", "-"]
        );
    }
}
