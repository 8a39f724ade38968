//! Times as text.

use std::time::SystemTime;

/// Formats a time as `2026-11-21T15:06:35.123Z`. The date is computed as in Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
pub(super) fn rfc3339(time: SystemTime) -> String {
    let since_epoch = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = since_epoch.as_secs();
    let millis = since_epoch.subsec_millis();
    let days = seconds / 86_400 + 719_468;
    let of_day = seconds % 86_400;
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_shifted + 2) / 5 + 1;
    let month = if month_shifted < 10 {
        month_shifted + 3
    } else {
        month_shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let hour = of_day / 3_600;
    let minute = of_day / 60 % 60;
    let second = of_day % 60;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_written_as_date_does() {
        let check = |millis, expected| {
            assert_eq!(
                rfc3339(SystemTime::UNIX_EPOCH + Duration::from_millis(millis)),
                expected
            );
        };
        check(0, "1970-01-01T00:00:00.000Z");
        check(951_782_400_000, "2000-02-29T00:00:00.000Z");
        check(1_795_273_595_123, "2026-11-21T15:06:35.123Z");
        check(4_107_542_399_999, "2100-02-28T23:59:59.999Z");
        check(4_107_542_400_000, "2100-03-01T00:00:00.000Z");
    }
}
