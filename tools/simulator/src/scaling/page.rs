//! The results of the campaign as tables of a page.

use std::fmt::Write;

use super::{STARTUPS_S, ScalingResult, ScalingRule, ScalingSetting, TrafficShape};

/// The shares of requests in time for which the page shows the cost.
const LEVELS: [f64; 3] = [0.9, 0.95, 0.99];

const BEGIN: &str = "<!-- scaling: begin -->\n";
const END: &str = "<!-- scaling: end -->\n";

/// A point of a curve: GPU-hours and the share in time, means over the seeds.
pub(super) type CurvePoint = (f64, f64);

/// A point of another signal above our curve, and our share in time at its cost.
struct BetterPoint {
    shape: TrafficShape,
    startup_s: f64,
    rule: ScalingRule,
    point: CurvePoint,
    ours: f64,
}

/// The page with the tables of these results between its marks.
///
/// # Errors
/// When the page has no such marks.
pub(super) fn with_results(page: &str, results: &[ScalingResult]) -> Result<String, String> {
    let (before, rest) = page
        .split_once(BEGIN)
        .ok_or("the page has no mark for the tables")?;
    let (_, after) = rest.split_once(END).ok_or("the page has no second mark")?;
    Ok(format!("{before}{BEGIN}{}{END}{after}", tables(results)))
}

fn tables(results: &[ScalingResult]) -> String {
    let mut text = String::new();
    for startup_s in STARTUPS_S {
        let _ = write!(text, "Replicas start within {startup_s} s:\n\n| signal |");
        for shape in TrafficShape::ALL {
            for level in LEVELS {
                let _ = write!(text, " {} {} % |", shape.name(), level * 100.0);
            }
        }
        let _ = writeln!(
            text,
            "\n|---|{}",
            "---|".repeat(TrafficShape::ALL.len() * LEVELS.len())
        );
        for rule in ScalingRule::ALL {
            let _ = write!(text, "| {} |", rule.name());
            for shape in TrafficShape::ALL {
                let curve = curve(results, shape, startup_s, rule);
                for level in LEVELS {
                    let _ = match hours_for(&curve, level) {
                        Some(hours) => write!(text, " {hours:.1} |"),
                        None => write!(text, " - |"),
                    };
                }
            }
            text.push('\n');
        }
        text.push('\n');
    }
    let lost = losses(results);
    let _ = writeln!(
        text,
        "Of {} points of other signals, {} are on or below our curve.",
        lost.0,
        lost.0 - lost.1.len()
    );
    if !lost.1.is_empty() {
        let _ = writeln!(text, "These are above it:");
        let _ = writeln!(
            text,
            "\n| traffic | start-up | signal | GPU-hours | in time, % | ours at the same cost, % |\n|---|---|---|---|---|---|"
        );
        for BetterPoint {
            shape,
            startup_s,
            rule,
            point: (hours, share),
            ours,
        } in lost.1
        {
            let shape = shape.name();
            let rule = rule.name();
            let share = share * 100.0;
            let ours = ours * 100.0;
            let _ = writeln!(
                text,
                "| {shape} | {startup_s} s | {rule} | {hours:.1} | {share:.1} | {ours:.1} |"
            );
        }
    }
    text.push('\n');
    text
}

/// The curve of a signal: its points by cost, without those that cost more and serve no better.
pub(super) fn curve(
    results: &[ScalingResult],
    shape: TrafficShape,
    startup_s: f64,
    rule: ScalingRule,
) -> Vec<CurvePoint> {
    let mut points = points(results, shape, startup_s, rule);
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut best = f64::NEG_INFINITY;
    points.retain(|(_, share)| {
        let better = *share > best;
        best = best.max(*share);
        better
    });
    points
}

fn points(
    results: &[ScalingResult],
    shape: TrafficShape,
    startup_s: f64,
    rule: ScalingRule,
) -> Vec<CurvePoint> {
    let of = |setting: ScalingSetting| {
        let is_it = |r: &&ScalingResult| {
            r.traffic == shape.name()
                && r.signal == rule.name()
                && r.startup_s.total_cmp(&startup_s).is_eq()
                && r.setting == setting
        };
        let runs: Vec<&ScalingResult> = results.iter().filter(is_it).collect();
        let mean = |of: fn(&ScalingResult) -> f64| {
            runs.iter().map(|run| of(run)).sum::<f64>() / runs.len() as f64
        };
        (!runs.is_empty()).then(|| {
            (
                mean(|run| run.outcome.gpu_hours),
                mean(|run| run.outcome.attainment),
            )
        })
    };
    rule.settings().into_iter().filter_map(of).collect()
}

/// The GPU-hours at which the curve reaches this share in time, between its points by a line.
fn hours_for(curve: &[CurvePoint], level: f64) -> Option<f64> {
    let at = curve.iter().position(|(_, share)| *share >= level)?;
    let (hours, share) = *curve.get(at)?;
    let Some((before, below)) = at.checked_sub(1).and_then(|before| curve.get(before)) else {
        return Some(hours);
    };
    Some(before + (hours - before) * (level - below) / (share - below))
}

/// The share in time that the curve reaches at this cost; 0 below its first point.
fn share_at(curve: &[CurvePoint], hours: f64) -> f64 {
    let Some(at) = curve.iter().position(|point| point.0 > hours) else {
        return curve.last().map_or(0.0, |point| point.1);
    };
    let Some((before, below)) = at.checked_sub(1).and_then(|before| curve.get(before)) else {
        return 0.0;
    };
    let (after, share) = curve.get(at).copied().unwrap_or((hours, *below));
    below + (share - below) * (hours - before) / (after - before)
}

/// The number of points of other signals, and those above our curve, with our share at their cost:
/// that of the line between the two points of our curve beside it. A point that costs more than all
/// of ours is compared with our best one, and one that costs less than all is above. The oracle is
/// no signal.
fn losses(results: &[ScalingResult]) -> (usize, Vec<BetterPoint>) {
    /// Half a percentage point: less than what two seeds differ by.
    const EQUAL: f64 = 0.005;
    let mut count = 0;
    let mut above = Vec::new();
    for shape in TrafficShape::ALL {
        for startup_s in STARTUPS_S {
            let ours = curve(results, shape, startup_s, ScalingRule::Ours);
            for rule in ScalingRule::ALL
                .into_iter()
                .filter(|rule| !matches!(rule, ScalingRule::Ours | ScalingRule::Oracle))
            {
                for point in points(results, shape, startup_s, rule) {
                    count += 1;
                    let share = share_at(&ours, point.0);
                    if point.1 > share + EQUAL {
                        above.push(BetterPoint {
                            shape,
                            startup_s,
                            rule,
                            point,
                            ours: share,
                        });
                    }
                }
            }
        }
    }
    (count, above)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_are_read_between_their_points() {
        let curve = [(2.0, 0.5), (4.0, 0.75), (8.0, 1.0)];
        assert_eq!(
            [0.25, 0.625, 0.875, 1.0].map(|level| hours_for(&curve, level)),
            [Some(2.0), Some(3.0), Some(6.0), Some(8.0)]
        );
        assert_eq!(hours_for(&curve[..2], 0.875), None);
        assert_eq!(
            [1.0, 3.0, 6.0, 9.0].map(|hours| share_at(&curve, hours)),
            [0.0, 0.625, 0.875, 1.0]
        );
    }

    #[test]
    fn the_page_has_the_tables_and_the_figure_of_the_data() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let data = std::fs::read_to_string(root.join("docs/data/scaling.json")).unwrap();
        let data: serde_json::Value = serde_json::from_str(&data).unwrap();
        let results: Vec<ScalingResult> = data["rows"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| ScalingResult::from_json(row).unwrap())
            .collect();
        assert!(
            losses(&results).1.is_empty(),
            "a signal has a point above ours"
        );
        let page = root.join("docs/how-to/scale.md");
        let written = std::fs::read_to_string(&page).unwrap();
        let fresh = with_results(&written, &results).unwrap();
        let (figure, drawn) = (
            root.join("docs/how-to/scale.svg"),
            crate::scaling::figure::svg(&results).unwrap(),
        );
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&page, fresh).unwrap();
            std::fs::write(figure, drawn).unwrap();
        } else {
            assert!(
                drawn == std::fs::read_to_string(figure).unwrap(),
                "docs/how-to/scale.svg is stale"
            );
            assert!(
                fresh == written,
                "docs/how-to/scale.md is stale: UPDATE_DOCS=1 cargo test -p simulator scaling"
            );
        }
    }
}
