//! The targets of the page, each with its measured figure.

use std::fmt::Write as _;

use testbed::Result;

use FigureBound::{AtLeast, AtMost};
use FigureUnit::{Micros, Number, Percent, Times};

use super::BenchResults;
use crate::overhead::{CENTRES, MANY, OverheadCase, OverheadRow, WORKERS};
use crate::world::RequestPath::{ExtProc, Filter, Minimal, Shipped};

struct TargetFigure {
    what: &'static str,
    bound: FigureBound,
    unit: FigureUnit,
    found: fn(&BenchResults) -> Option<FoundFigure>,
}

#[derive(Clone, Copy)]
enum FigureBound {
    AtMost(f64),
    AtLeast(f64),
}

/// The form in which a figure is printed.
#[derive(Clone, Copy)]
enum FigureUnit {
    Micros,
    Number,
    Percent,
    Times,
}

/// A measured figure. `iqr` is its interquartile range, or 0 if the figure is not a median of
/// rounds.
#[derive(Clone, Copy)]
struct FoundFigure {
    value: f64,
    iqr: f64,
}

const TARGETS: [TargetFigure; 17] = [
    ratio("CPU per request, 16 connections, 10 KB", AtMost(2.0), |m| {
        m.cpu(10_000)
    }),
    ratio(
        "CPU per request, 16 connections, 100 KB",
        AtMost(2.3),
        |m| m.cpu(100_000),
    ),
    ratio(
        "CPU per request, 16 connections, 400 KB",
        AtMost(2.4),
        |m| m.cpu(400_000),
    ),
    share("requests/s, 16 connections, 10 KB", AtLeast(0.48), |m| {
        m.rps(10_000)
    }),
    share("requests/s, 16 connections, 100 KB", AtLeast(0.42), |m| {
        m.rps(100_000)
    }),
    share("requests/s, 16 connections, 400 KB", AtLeast(0.40), |m| {
        m.rps(400_000)
    }),
    ratio("p50, 1 connection, 10 KB", AtMost(1.7), |m| m.p50(10_000)),
    ratio("p50, 1 connection, 100 KB", AtMost(1.7), |m| m.p50(100_000)),
    ratio("p50, 1 connection, 400 KB", AtMost(1.9), |m| m.p50(400_000)),
    ratio(
        "the filter alone, over the shipped configuration: CPU at 10 KB",
        AtMost(0.75),
        BenchResults::filter_alone,
    ),
    TargetFigure {
        what: "four workers: requests/s relative to the minimal Envoy, divided by the same with one worker, 10 KB",
        bound: AtLeast(0.95),
        unit: Number,
        found: BenchResults::four_workers,
    },
    micros("CPU of a streamed chunk, added", AtMost(3.0), |m| {
        m.chunk("filter")
    }),
    micros(
        "ext_proc: p50 added at 10 KB, 1 connection",
        AtMost(450.0),
        BenchResults::ext_proc,
    ),
    micros(
        "p50, 10 -> 1,000 endpoints, 10 KB, 1 connection",
        AtMost(40.0),
        BenchResults::growth,
    ),
    TargetFigure {
        what: "scraping 100 endpoints at least once a second, cores",
        bound: AtMost(0.03),
        unit: Number,
        found: |m| m.stands("scraping 100 "),
    },
    TargetFigure {
        what: "one more worker and its VM, 100 endpoints x 6,600 blocks, MiB",
        bound: AtMost(16.0),
        unit: Number,
        found: |m| m.stands("each further worker and its VM, after"),
    },
    TargetFigure {
        what: "errors in all runs of this page",
        bound: AtMost(0.0),
        unit: Number,
        found: BenchResults::errors,
    },
];

const fn ratio(
    what: &'static str,
    bound: FigureBound,
    found: fn(&BenchResults) -> Option<FoundFigure>,
) -> TargetFigure {
    TargetFigure {
        what,
        bound,
        unit: Times,
        found,
    }
}

const fn share(
    what: &'static str,
    bound: FigureBound,
    found: fn(&BenchResults) -> Option<FoundFigure>,
) -> TargetFigure {
    TargetFigure {
        what,
        bound,
        unit: Percent,
        found,
    }
}

const fn micros(
    what: &'static str,
    bound: FigureBound,
    found: fn(&BenchResults) -> Option<FoundFigure>,
) -> TargetFigure {
    TargetFigure {
        what,
        bound,
        unit: Micros,
        found,
    }
}

// === impl BenchResults ===

impl BenchResults {
    /// Returns the filter's row in the standard case of this body size, compared with the minimal
    /// Envoy.
    fn filter(&self, body_bytes: usize) -> Option<&OverheadRow> {
        self.request(Filter, Minimal, OverheadCase::around(body_bytes))
    }

    fn cpu(&self, body_bytes: usize) -> Option<FoundFigure> {
        self.filter(body_bytes).map(|row| FoundFigure {
            value: row.cpu_ratio,
            iqr: row.iqr_cpu_ratio,
        })
    }

    fn rps(&self, body_bytes: usize) -> Option<FoundFigure> {
        self.filter(body_bytes).map(|row| FoundFigure {
            value: row.rps_ratio,
            iqr: row.iqr_rps_ratio,
        })
    }

    fn p50(&self, body_bytes: usize) -> Option<FoundFigure> {
        let row = self.request(
            Filter,
            Minimal,
            OverheadCase {
                connections: 1,
                ..OverheadCase::around(body_bytes)
            },
        )?;
        Some(FoundFigure {
            value: row.p50_ratio,
            iqr: row.iqr_p50_ratio,
        })
    }

    /// Returns the CPU time that the filter adds to the shipped configuration, as a multiple of the
    /// minimal Envoy's CPU time.
    fn filter_alone(&self) -> Option<FoundFigure> {
        let case = OverheadCase::around(CENTRES[0]);
        let over = self.request(Filter, Shipped, case)?;
        let minimal = self.request(Minimal, Minimal, case)?;
        Some(FoundFigure {
            value: over.added_cpu_us / minimal.cpu_us,
            iqr: over.iqr_cpu_us / minimal.cpu_us,
        })
    }

    /// Returns the ratio of requests/s (filter to minimal Envoy) with four workers, divided by the
    /// same ratio with one worker. The two ratios come from separate runs, so the spread is the sum
    /// of both spreads.
    fn four_workers(&self) -> Option<FoundFigure> {
        let of = |workers| {
            self.request(
                Filter,
                Minimal,
                OverheadCase {
                    workers,
                    connections: MANY,
                    ..OverheadCase::around(CENTRES[0])
                },
            )
        };
        let one = of(1)?;
        let four = of(WORKERS)?;
        Some(FoundFigure {
            value: four.rps_ratio / one.rps_ratio,
            iqr: (four.iqr_rps_ratio + one.iqr_rps_ratio) / one.rps_ratio,
        })
    }

    fn ext_proc(&self) -> Option<FoundFigure> {
        let row = self.request(
            ExtProc,
            Shipped,
            OverheadCase {
                connections: 1,
                ..OverheadCase::around(CENTRES[0])
            },
        )?;
        Some(FoundFigure {
            value: row.added_p50_us,
            iqr: row.iqr_us,
        })
    }

    /// Returns how much the added p50 grows from 10 to 1,000 endpoints. Both values come from
    /// separate runs, so the spread is the sum of both spreads.
    fn growth(&self) -> Option<FoundFigure> {
        let of = |endpoints| {
            self.request(
                Filter,
                Shipped,
                OverheadCase {
                    endpoints,
                    connections: 1,
                    ..OverheadCase::around(CENTRES[0])
                },
            )
        };
        let few = of(10)?;
        let many = of(1_000)?;
        Some(FoundFigure {
            value: many.added_p50_us - few.added_p50_us,
            iqr: few.iqr_us + many.iqr_us,
        })
    }

    fn chunk(&self, front: &str) -> Option<FoundFigure> {
        let row = self.streams.rows.iter().find(|row| row.front == front)?;
        Some(FoundFigure {
            value: row.added_cpu_us,
            iqr: row.iqr_us,
        })
    }

    fn stands(&self, what: &str) -> Option<FoundFigure> {
        let row = self
            .standing
            .rows
            .iter()
            .find(|row| row.what.starts_with(what))?;
        Some(FoundFigure {
            value: row.value,
            iqr: 0.0,
        })
    }

    #[expect(clippy::cast_precision_loss, reason = "a count of errors")]
    fn errors(&self) -> Option<FoundFigure> {
        if self.overhead.rows.is_empty() {
            return None;
        }
        let requests: u64 = self.overhead.rows.iter().map(|row| row.errors).sum();
        Some(FoundFigure {
            value: requests as f64,
            iqr: 0.0,
        })
    }
}

// === impl FoundFigure ===

impl FoundFigure {
    fn verdict(self, bound: FigureBound) -> &'static str {
        let (distance, met) = match bound {
            AtMost(bound) => (self.value - bound, self.value <= bound),
            AtLeast(bound) => (self.value - bound, self.value >= bound),
        };
        match (self.iqr > 0.0 && distance.abs() <= self.iqr, met) {
            (true, _) => "inside the noise",
            (false, true) => "met",
            (false, false) => "**not met**",
        }
    }
}

// === impl FigureUnit ===

impl FigureUnit {
    fn print(self, value: f64) -> String {
        match self {
            Micros => format!("{value:.1} µs"),
            Number => format!("{value:.3}")
                .trim_end_matches('0')
                .trim_end_matches('.')
                .to_owned(),
            Percent => format!("{:.0} %", 100.0 * value),
            Times => format!("{value:.2} x"),
        }
    }
}

/// Returns the table of targets with the measured figures.
pub(super) fn table(measured: &BenchResults) -> Result<String> {
    let mut text = String::from(
        "| the filter, relative to the minimal Envoy | target | measured (spread) | |\n|---|---|---|---|\n",
    );
    for TargetFigure {
        what,
        bound,
        unit,
        found,
    } in &TARGETS
    {
        let (sign, number) = match bound {
            AtMost(number) => ("≤", number),
            AtLeast(number) => ("≥", number),
        };
        let (figure, verdict) = match found(measured) {
            Some(found) if found.iqr > 0.0 => (
                format!("{} ({})", unit.print(found.value), unit.print(found.iqr)),
                found.verdict(*bound),
            ),
            Some(found) => (unit.print(found.value), found.verdict(*bound)),
            None => ("-".to_owned(), "not measured"),
        };
        writeln!(
            text,
            "| {what} | {sign} {} | {figure} | {verdict} |",
            unit.print(*number)
        )?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_inside_the_noise_is_not_called_met() {
        let found = |value, iqr| FoundFigure { value, iqr };
        assert_eq!(found(2.1, 0.2).verdict(AtMost(2.0)), "inside the noise");
        assert_eq!(found(1.7, 0.2).verdict(AtMost(2.0)), "met");
        assert_eq!(found(2.4, 0.2).verdict(AtMost(2.0)), "**not met**");
        assert_eq!(found(0.0, 0.0).verdict(AtMost(0.0)), "met");
        assert_eq!(found(0.7, 0.0).verdict(AtLeast(0.6)), "met");
        assert_eq!(found(0.7, 0.1).verdict(AtLeast(0.65)), "inside the noise");
        assert_eq!(found(0.5, 0.01).verdict(AtLeast(0.6)), "**not met**");
    }
}
