//! The status of a pool's configuration: the current configuration, its start, and the reason why
//! newer content of the file is not used.

use std::sync::Arc;
use std::time::SystemTime;

/// The status of one pool's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigStatus {
    /// The path of the configuration file; `None` means the default pipeline.
    pub file: Option<Arc<str>>,
    /// The text of the current configuration, where it is known.
    pub text: Option<Arc<str>>,
    /// The time when the current configuration came into force.
    pub since: SystemTime,
    /// The time when content of the file was last applied, whether or not it changed anything.
    pub taken_at: SystemTime,
    /// The number of times content was applied.
    pub taken: u64,
    /// The number of times content could not be used.
    pub refused: u64,
    /// The reason why the newest content is not used; `None` if it is used.
    pub error: Option<ConfigError>,
}

/// The reason why the content of a file is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// All errors of the content, one line each.
    pub why: String,
    /// The time when the content was refused.
    pub at: SystemTime,
}

// === impl ConfigStatus ===

impl ConfigStatus {
    /// Creates the status of a configuration that is in force from `now` on.
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

    /// Records that the new content cannot be used. The current configuration stays.
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
