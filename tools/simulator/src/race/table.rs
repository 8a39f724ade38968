//! Prints a file of results as a table in Markdown, with a line for each cell and router.

use std::fmt::Write as _;

use serde_json::Value;

use super::compare::{PlayedFigures, rows};

/// Returns the table as text.
///
/// # Errors
/// Fails when the results have another form.
pub(super) fn text(results: &Value) -> Result<String, String> {
    let head = "| cell | router | E2E | TTFT | TPOT | hits % | busiest | failed | cold E2E | cold TTFT | cold hits % |";
    let mut out = format!(
        "{head}\n|{}\n",
        "---|".repeat(head.matches('|').count() - 1)
    );
    let mut last = "";
    for (cell, router) in rows(results)?
        .into_iter()
        .filter(|[_, _, row]| *row == "warm")
        .map(|[cell, router, _]| (cell, router))
    {
        let of = |row: &str| {
            PlayedFigures::from_results(results, [cell, router, row])
                .ok_or_else(|| format!("{cell}, {router}: no row `{row}`"))
        };
        let ([warm, cold], all) = ([of("warm")?, of("cold")?], of("all")?);
        let ms = |ms: f64| grouped(ms.round() as u64);
        let _ = writeln!(
            out,
            "| {} | {router} | {} | {} / {} | {:.1} / {:.1} | {:.1} | {:.2} | {} | {} | {} / {} | {:.1} |",
            if cell == last { "" } else { cell },
            ms(warm.number("e2e_mean_ms")),
            ms(warm.number("ttft_mean_ms")),
            ms(warm.number("ttft_p99_ms")),
            warm.number("tpot_mean_ms"),
            warm.number("tpot_p99_ms"),
            100.0 * warm.number("hit_rate"),
            all.number("busiest"),
            all.number("failures"),
            ms(cold.number("e2e_mean_ms")),
            ms(cold.number("ttft_mean_ms")),
            ms(cold.number("ttft_p99_ms")),
            100.0 * cold.number("hit_rate"),
        );
        last = cell;
    }
    Ok(out)
}

/// Returns a number as text, with commas between groups of three digits.
fn grouped(number: u64) -> String {
    let rest = number % 1_000;
    if number < 1_000 {
        rest.to_string()
    } else {
        format!("{},{rest:03}", grouped(number / 1_000))
    }
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_have_commas() {
        assert_eq!(
            [0, 999, 1_000, 1_234_056].map(grouped),
            ["0", "999", "1,000", "1,234,056"]
        );
    }
}
