//! Line charts with logarithmic axes, as SVG text.

use std::fmt::Write as _;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const MARGIN: f64 = 56.0;

/// One line of a chart.
#[derive(Clone, Debug)]
pub(crate) struct ChartSeries {
    pub(crate) name: String,
    pub(crate) colour: &'static str,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A chart of `series`, whose points are all above 0.
pub(crate) fn chart(title: &str, x: &str, y: &str, series: &[ChartSeries]) -> String {
    let all = || series.iter().flat_map(|series| &series.points);
    let xs = range(all().map(|point| point.0));
    let ys = range(all().map(|point| point.1));
    let across = |value: f64| MARGIN + (WIDTH - 1.5 * MARGIN) * share(value, xs);
    let up = |value: f64| HEIGHT - MARGIN - (HEIGHT - 2.0 * MARGIN) * share(value, ys);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<text x=\"{MARGIN}\" y=\"24\" font-size=\"15\">{title}</text>\n"
    );
    let mut put = |line: String| writeln!(svg, "{line}");
    let mut draw = || -> std::fmt::Result {
        for mark in marks(ys) {
            let at = up(mark);
            put(format!(
                "<path d=\"M{MARGIN} {at:.1}H{:.1}\" stroke=\"#ddd\"/>",
                WIDTH - MARGIN / 2.0
            ))?;
            put(format!(
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                MARGIN - 6.0,
                at + 4.0,
                short(mark)
            ))?;
        }
        for mark in marks(xs) {
            let at = across(mark);
            put(format!(
                "<path d=\"M{at:.1} {MARGIN}V{:.1}\" stroke=\"#ddd\"/>",
                HEIGHT - MARGIN
            ))?;
            put(format!(
                "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                HEIGHT - MARGIN + 16.0,
                short(mark)
            ))?;
        }
        put(format!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{x}</text>",
            WIDTH / 2.0,
            HEIGHT - 14.0
        ))?;
        put(format!(
            "<text x=\"{MARGIN}\" y=\"{}\" fill=\"#555\">{y}</text>",
            MARGIN - 10.0
        ))?;
        for (at, series) in series.iter().enumerate() {
            let points: Vec<String> = series
                .points
                .iter()
                .map(|(x, y)| format!("{:.1},{:.1}", across(*x), up(*y)))
                .collect();
            put(format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>",
                points.join(" "),
                series.colour
            ))?;
            let right = WIDTH - MARGIN / 2.0;
            let line = 24.0 + 16.0 * f64::from(u8::try_from(at).unwrap_or(u8::MAX));
            put(format!(
                "<text x=\"{right}\" y=\"{line}\" text-anchor=\"end\" fill=\"{}\">{}</text>",
                series.colour, series.name
            ))?;
        }
        Ok(())
    };
    let _ = draw(); // writing to a String cannot fail
    svg.push_str("</svg>\n");
    svg
}

/// The smallest and the largest value, rounded out to powers of ten.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    if low > high {
        (1.0, 10.0)
    } else {
        (
            10f64.powf(low.log10().floor()),
            10f64.powf(high.log10().ceil()),
        )
    }
}

/// Position along the axis, 0 to 1.
fn share(value: f64, (low, high): (f64, f64)) -> f64 {
    if high > low {
        (value / low).log10() / (high / low).log10()
    } else {
        0.5
    }
}

fn marks((low, high): (f64, f64)) -> impl Iterator<Item = f64> {
    std::iter::successors(Some(low), |mark| Some(mark * 10.0))
        .take_while(move |mark| *mark <= high * 1.01)
}

fn short(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e3 => format!("{}k", v / 1e3),
        v => v.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_is_inside_of_the_chart() {
        let series = ChartSeries {
            name: "filter".to_owned(),
            colour: "#06c",
            points: vec![(1e3, 8.0), (1e4, 25.0), (1e6, 500.0)],
        };
        let svg = chart("added", "bytes", "us", &[series]);
        let points = svg
            .split("points=\"")
            .nth(1)
            .and_then(|rest| rest.split('"').next())
            .unwrap_or_default();
        for point in points.split(' ') {
            let (x, y) = point.split_once(',').unwrap_or_default();
            let (x, y): (f64, f64) = (x.parse().unwrap_or(f64::NAN), y.parse().unwrap_or(f64::NAN));
            assert!(
                (MARGIN..=WIDTH).contains(&x) && (MARGIN..=HEIGHT - MARGIN).contains(&y),
                "{point}"
            );
        }
        assert_eq!(points.split(' ').count(), 3);
    }
}
