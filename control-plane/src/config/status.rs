//! The status of a pool's configuration: what is in force and since when, and why newer content of
//! the file is not in force.

use std::sync::Arc;
use std::time::SystemTime;

/// The status of one pool's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigStatus {
    /// The file; `None` means the default pipeline.
    pub file: Option<Arc<str>>,
    /// The text in force, where it is known.
    pub text: Option<Arc<str>>,
    /// Since when the current configuration is in force.
    pub since: SystemTime,
    /// When content of the file was last applied, whether or not it changed anything.
    pub taken_at: SystemTime,
    /// How often content was applied.
    pub taken: u64,
    /// How often content could not be used.
    pub refused: u64,
    /// Why the newest content is not in force; `None` if it is.
    pub error: Option<ConfigError>,
}

/// Why a file's content is not in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// All errors of the content, one line each.
    pub why: String,
    /// When the content was refused.
    pub at: SystemTime,
}

// === impl ConfigStatus ===

impl ConfigStatus {
    /// A configuration in force from `now` on.
    #[must_use]
    pub fn new(file: Option<Arc<str>>, now: SystemTime) -> Self {
        Self {
            file,
            text: None,
            since: now,
            taken_at: now,
            taken: 1,
            refused: 0,
            error: None,
        }
    }

    /// Records that content was applied. `changed` says whether the configuration in force changed.
    pub fn take(&mut self, changed: bool, now: SystemTime) {
        self.taken += 1;
        self.taken_at = now;
        self.error = None;
        if changed {
            self.since = now;
        }
    }

    /// Records that content cannot be used; the configuration in force stays.
    pub fn refuse(&mut self, why: String, now: SystemTime) {
        self.refused += 1;
        self.error = Some(ConfigError { why, at: now });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_error_stays_until_content_is_taken_and_since_moves_only_with_a_change() {
        let at = |s| SystemTime::UNIX_EPOCH + Duration::from_secs(s);
        let mut status = ConfigStatus::new(Some("f".into()), at(1));
        status.refuse("bad".to_owned(), at(2));
        assert_eq!(
            (
                status.since,
                status.refused,
                status.error.as_ref().map(|e| e.at)
            ),
            (at(1), 1, Some(at(2)))
        );
        status.take(false, at(3));
        assert_eq!(
            (status.since, status.taken_at, status.taken, &status.error),
            (at(1), at(3), 2, &None),
            "as it was before"
        );
        status.take(true, at(4));
        assert_eq!((status.since, status.taken_at), (at(4), at(4)));
    }
}
