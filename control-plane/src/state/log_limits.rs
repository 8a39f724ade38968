//! Limits of what peers may write to the log. A peer chooses its names and may be refused as often
//! as it can ask.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The maximum number of names in one line.
const NAMES_SHOWN_MAX: usize = 8;

/// The maximum length of a name in a line, in bytes. A byte of a name may take six bytes in the
/// log.
const NAME_BYTES_SHOWN_MAX: usize = 64;

/// The maximum number of lines about refusals in [`LINES_INTERVAL`], for all peers.
const LINES_MAX: u32 = 10;

/// The interval in which at most [`LINES_MAX`] lines are logged.
const LINES_INTERVAL: Duration = Duration::from_secs(10);

/// Shows the first of some names, and the number of the other names.
pub struct ShownNames<'n>(pub &'n [String]);

/// Counts the lines about refusals.
#[derive(Debug, Default)]
pub struct RefusalLines(Mutex<LineCount>);

#[derive(Debug, Default)]
struct LineCount {
    /// The time of the first line of the current interval.
    since: Option<Instant>,
    lines: u32,
}

/// Returns the beginning of a name.
#[must_use]
pub fn shown_name(name: &str) -> &str {
    name.get(..name.floor_char_boundary(NAME_BYTES_SHOWN_MAX))
        .unwrap_or_default()
}

// === impl ShownNames ===

impl fmt::Debug for ShownNames<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.0.iter().take(NAMES_SHOWN_MAX);
        f.debug_list()
            .entries(shown.map(|name| shown_name(name)))
            .finish()?;
        match self.0.len().saturating_sub(NAMES_SHOWN_MAX) {
            0 => Ok(()),
            others => write!(f, " and {others} more"),
        }
    }
}

// === impl RefusalLines ===

impl RefusalLines {
    /// Returns whether one more line may be logged. Logs once in each interval that lines are left
    /// out.
    pub fn admit(&self, now: Instant) -> bool {
        let mut count = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |since: Instant| now.saturating_duration_since(since) >= LINES_INTERVAL;
        if count.since.is_none_or(is_over) {
            *count = LineCount {
                since: Some(now),
                lines: 0,
            };
        }
        count.lines = count.lines.saturating_add(1);
        let lines = count.lines;
        drop(count);
        if lines == LINES_MAX + 1 {
            tracing::warn!("more refusals are not shown for up to {LINES_INTERVAL:?}");
        }
        lines <= LINES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_in_length_and_number() {
        let name = |text: &str| text.to_owned();
        assert_eq!(
            format!("{:?}", ShownNames(&[name("a"), name("b")])),
            r#"["a", "b"]"#
        );
        let longest = vec!["\u{1}".repeat(1_024); 256];
        let line = format!("{:?}", ShownNames(&longest));
        assert!(line.ends_with("] and 248 more"), "{line}");
        assert!(line.len() < 4_096, "{line}");
        assert_eq!(shown_name(&"ä".repeat(100)), "ä".repeat(32));
    }

    #[test]
    fn a_flood_of_refusals_gets_few_lines_and_later_ones_are_shown_again() {
        let lines = RefusalLines::default();
        let now = Instant::now();
        let shown = |now| (0..1_000).filter(|_| lines.admit(now)).count();
        assert_eq!(shown(now), 10);
        assert_eq!(shown(now + LINES_INTERVAL / 2), 0);
        assert_eq!(shown(now + LINES_INTERVAL), 10);
    }
}
