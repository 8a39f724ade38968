//! A file followed by its content.
//!
//! Polled, not watched: a poll sees in-place writes, atomic renames, the symlink swaps of a mounted ConfigMap, network file systems
//! and files that do not exist yet, all by one means that cannot miss an event. Time stamps are not looked at, only content.
//! New content counts once two looks agree on it, so that a half-written file is not taken for a short one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::time::Instant;

/// How often a file is read: reading 1 MiB takes well under a millisecond, and people expect an edit to count at once.
pub const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// How long new content must stay the same before it counts: longer than a writer takes between two writes of one file.
pub const SETTLE: Duration = Duration::from_millis(50);

/// The largest file read, in bytes; the reference's own limit for an endpoints file.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// What a look at the file gave: its text, or why there is none.
pub type Content = Result<String, Unreadable>;

/// Why a file could not be read, for people. It is read again at the next poll.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {why}")]
pub struct Unreadable {
    /// The file.
    pub path: String,
    /// What went wrong.
    pub why: String,
}

/// Follows one file.
#[derive(Debug)]
pub struct Follow {
    path: PathBuf,
    told: Option<Content>,
    candidate: Option<Content>,
    next_look: Instant,
}

// === impl Follow ===

impl Follow {
    /// Begins with the file at `path`, which need not exist.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), told: None, candidate: None, next_look: Instant::now() }
    }

    /// The file followed.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the file says something else than last told; the first call tells what it says now. Cancel-safe.
    pub async fn changed(&mut self) -> Content {
        loop {
            tokio::time::sleep_until(self.next_look).await;
            let seen = read(&self.path).await;
            if self.told.as_ref() == Some(&seen) {
                self.candidate = None;
                self.next_look = Instant::now() + POLL_INTERVAL;
            } else if self.candidate.as_ref() == Some(&seen) {
                self.candidate = None;
                self.next_look = Instant::now() + POLL_INTERVAL;
                self.told = Some(seen.clone());
                return seen;
            } else {
                self.candidate = Some(seen);
                self.next_look = Instant::now() + SETTLE;
            }
        }
    }
}

/// Reads a text file of at most [`FILE_BYTES_MAX`].
///
/// # Errors
/// [`Unreadable`] names the file and says why.
pub async fn read(path: &Path) -> Content {
    let unreadable = |why: String| Unreadable { path: path.display().to_string(), why };
    let io = |e: std::io::Error| unreadable(e.to_string());
    // A named pipe would block the reader for ever; a directory has no content.
    if !tokio::fs::metadata(path).await.map_err(io)?.is_file() {
        return Err(unreadable("not a regular file".to_owned()));
    }
    let file = tokio::fs::File::open(path).await.map_err(io)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).await.map_err(io)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > FILE_BYTES_MAX {
        return Err(unreadable(format!("larger than {FILE_BYTES_MAX} bytes")));
    }
    String::from_utf8(bytes).map_err(|e| unreadable(format!("not UTF-8 after byte {}", e.utf8_error().valid_up_to())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing new for many polls?
    async fn quiet(file: &mut Follow) -> bool {
        tokio::time::timeout(POLL_INTERVAL * 20, file.changed()).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn content_counts_not_time_stamps_and_a_missing_file_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let mut file = Follow::new(&path);
        assert!(file.changed().await.unwrap_err().why.contains("No such file"));
        assert!(quiet(&mut file).await);
        std::fs::write(&path, "a").unwrap();
        assert_eq!(file.changed().await.as_deref(), Ok("a"));
        std::fs::write(&path, "a").unwrap();
        assert!(quiet(&mut file).await, "written again with the same content");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(file.changed().await.unwrap_err().why, "not a regular file");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_being_written_is_not_taken_for_a_short_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, "old").unwrap();
        let mut file = Follow::new(&path);
        file.changed().await.unwrap();
        let writer = async {
            for length in 1..200 {
                std::fs::write(&path, "x".repeat(length)).unwrap();
                tokio::time::sleep(SETTLE / 3).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            seen = file.changed() => assert_eq!(seen.unwrap().len(), 199, "half a file"),
            () = writer => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_too_large_or_not_text_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let limit = usize::try_from(FILE_BYTES_MAX).unwrap();
        std::fs::write(&path, vec![b' '; limit]).unwrap();
        assert_eq!(read(&path).await.unwrap().len(), limit);
        std::fs::write(&path, vec![b' '; limit + 1]).unwrap();
        assert!(read(&path).await.unwrap_err().why.contains("larger than"));
        std::fs::write(&path, b"ab\xff").unwrap();
        assert_eq!(read(&path).await.unwrap_err().why, "not UTF-8 after byte 2");
    }
}
