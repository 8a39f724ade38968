//! Follows the content of a file, or of the files of a folder.
//!
//! A watcher polls. A poll sees in-place writes, atomic renames and the symlink swaps of a mounted
//! ConfigMap. A poll also works on network file systems and for files that do not exist yet, and
//! cannot miss an event. The watcher compares content, not timestamps. New content counts when two
//! reads are equal, so a partly written file does not count as complete.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use crate::whole_file;

/// The interval at which a file is read. Reading 1 MiB takes well under a millisecond, and users
/// expect an edit to take effect immediately.
pub const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The time for which new content must stay the same before it is used. The time is longer than a
/// writer takes between two writes to one file.
pub const SETTLE: Duration = Duration::from_millis(50);

/// The largest file, in bytes. llm-d has the same limit for an endpoints file.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// The maximum number of files in a folder. Operators write these files by hand, one for each
/// configured thing.
pub const FILES_MAX: usize = 256;

/// The maximum number of bytes of all files of a folder together, because every poll reads all
/// files.
pub const FOLDER_BYTES_MAX: usize = 4 << 20;

/// The extensions of the files that are read in a folder. Hidden files, such as those of an editor
/// or a mounted ConfigMap, are skipped.
pub const FOLDER_EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// The content at a path, or the reason why the content could not be read.
pub type FileContent<C = String> = Result<C, ReadError>;

/// Content that a [`PathWatcher`] can follow.
pub trait Readable: Clone + PartialEq + Send {
    /// Reads the current content at `path`.
    fn read(path: &Path) -> impl Future<Output = FileContent<Self>> + Send;
}

/// The path and text of the file at a path, or of all files of the folder at this path, sorted by
/// name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSet(pub Vec<(PathBuf, String)>);

/// The reason why a file could not be read. The next poll reads it again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {why}")]
pub struct ReadError {
    /// The path of the file or folder.
    pub path: String,
    /// The reason, in words.
    pub why: String,
}

/// Follows one file.
pub type FileWatcher = PathWatcher<String>;

/// Follows one file, or all files of a folder.
pub type FileSetWatcher = PathWatcher<FileSet>;

/// Follows the content at a path.
#[derive(Debug)]
pub struct PathWatcher<C> {
    path: PathBuf,
    last_content: Option<FileContent<C>>,
    candidate: Option<FileContent<C>>,
    next_look: Instant,
}

// === impl PathWatcher ===

impl<C: Readable> PathWatcher<C> {
    /// Starts with the content at `path`, which need not exist.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            last_content: None,
            candidate: None,
            next_look: Instant::now(),
        }
    }

    /// Returns the path that is followed.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the content changes; the first call returns the current content. The call is
    /// cancel-safe.
    pub async fn changed(&mut self) -> FileContent<C> {
        loop {
            tokio::time::sleep_until(self.next_look).await;
            let seen = C::read(&self.path).await;
            if self.last_content.as_ref() == Some(&seen) {
                self.candidate = None;
                self.next_look = Instant::now() + POLL_INTERVAL;
            } else if self.candidate.as_ref() == Some(&seen) {
                self.candidate = None;
                self.next_look = Instant::now() + POLL_INTERVAL;
                self.last_content = Some(seen.clone());
                return seen;
            } else {
                self.candidate = Some(seen);
                self.next_look = Instant::now() + SETTLE;
            }
        }
    }
}

// === impl Readable ===

impl Readable for String {
    async fn read(path: &Path) -> FileContent {
        read(path).await
    }
}

impl Readable for FileSet {
    async fn read(path: &Path) -> FileContent<Self> {
        read_all(path).await
    }
}

/// Reads the file at `path`, or all files of the folder at `path`.
///
/// # Errors
/// Returns [`ReadError`], which names the file or folder and the reason. An unreadable file is an
/// error of the whole folder, because the other files may have another meaning without it.
pub async fn read_all(path: &Path) -> FileContent<FileSet> {
    let unreadable = |why: String| ReadError {
        path: path.display().to_string(),
        why,
    };
    let io = |e: std::io::Error| unreadable(e.to_string());
    if !tokio::fs::metadata(path).await.map_err(io)?.is_dir() {
        return Ok(FileSet(vec![(path.to_owned(), read(path).await?)]));
    }
    let mut names = Vec::new();
    let mut entries = tokio::fs::read_dir(path).await.map_err(io)?;
    while let Some(entry) = entries.next_entry().await.map_err(io)? {
        let name = PathBuf::from(entry.file_name());
        let wanted = name
            .extension()
            .is_some_and(|e| FOLDER_EXTENSIONS.iter().any(|wanted| e == *wanted));
        if wanted && !name.as_os_str().as_encoded_bytes().starts_with(b".") {
            names.push(path.join(name));
        }
    }
    if names.len() > FILES_MAX {
        return Err(unreadable(format!(
            "{} files, at most {FILES_MAX} are read",
            names.len()
        )));
    }
    names.sort_unstable();
    let mut files = Vec::with_capacity(names.len());
    let mut bytes = 0_usize;
    for name in names {
        let text = read(&name).await?;
        bytes = bytes.saturating_add(text.len());
        if bytes > FOLDER_BYTES_MAX {
            return Err(unreadable(format!(
                "files of more than {FOLDER_BYTES_MAX} bytes together"
            )));
        }
        files.push((name, text));
    }
    Ok(FileSet(files))
}

/// Reads a text file of at most [`FILE_BYTES_MAX`].
///
/// # Errors
/// Returns [`ReadError`], which names the file and the reason.
pub async fn read(path: &Path) -> FileContent {
    let unreadable = |why: String| ReadError {
        path: path.display().to_string(),
        why,
    };
    let io = |e: std::io::Error| unreadable(e.to_string());
    let file = path.to_owned();
    let reading = move || whole_file::read(&file, FILE_BYTES_MAX);
    let bytes = tokio::task::spawn_blocking(reading)
        .await
        .map_err(|e| unreadable(e.to_string()))?
        .map_err(io)?;
    String::from_utf8(bytes).map_err(|e| {
        unreadable(format!(
            "not UTF-8 after byte {}",
            e.utf8_error().valid_up_to()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether many polls find nothing new.
    async fn quiet<C: Readable>(file: &mut PathWatcher<C>) -> bool {
        tokio::time::timeout(POLL_INTERVAL * 20, file.changed())
            .await
            .is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn content_counts_not_time_stamps_and_a_missing_file_is_reported_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let mut file = FileWatcher::new(&path);
        assert!(
            file.changed()
                .await
                .unwrap_err()
                .why
                .contains("No such file")
        );
        assert!(quiet(&mut file).await);
        std::fs::write(&path, "a").unwrap();
        assert_eq!(file.changed().await.as_deref(), Ok("a"));
        std::fs::write(&path, "a").unwrap();
        assert!(
            quiet(&mut file).await,
            "written again with the same content"
        );
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(file.changed().await.unwrap_err().why, "not a regular file");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_being_written_is_not_taken_for_a_short_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, "old").unwrap();
        let mut file = FileWatcher::new(&path);
        file.changed().await.unwrap();
        let writer = async {
            for length in 1..200 {
                std::fs::write(&path, "x".repeat(length)).unwrap();
                tokio::time::sleep(SETTLE / 3).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            seen = file.changed() => assert_eq!(seen.unwrap().len(), 199, "a partly written file"),
            () = writer => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_folder_is_its_visible_files_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let names = |files: &FileSet| {
            files
                .0
                .iter()
                .map(|(path, text)| format!("{}={text}", path.file_name().unwrap().display()))
                .collect::<Vec<_>>()
        };
        let mut follow = FileSetWatcher::new(folder.path());
        assert_eq!(
            names(&follow.changed().await.unwrap()),
            Vec::<String>::new()
        );
        for (name, text) in [
            ("b.yaml", "2"),
            ("a.yml", "1"),
            ("c.json", "3"),
            (".hidden.yaml", "x"),
            ("notes.txt", "x"),
            ("yaml", "x"),
        ] {
            write(name, text);
        }
        assert_eq!(
            names(&follow.changed().await.unwrap()),
            ["a.yml=1", "b.yaml=2", "c.json=3"]
        );
        write("notes.txt", "y");
        assert!(
            quiet(&mut follow).await,
            "files with other extensions do not count"
        );
        std::fs::remove_file(folder.path().join("a.yml")).unwrap();
        assert_eq!(
            names(&follow.changed().await.unwrap()),
            ["b.yaml=2", "c.json=3"]
        );
        std::fs::create_dir(folder.path().join("d.yaml")).unwrap();
        assert!(
            follow.changed().await.unwrap_err().path.ends_with("d.yaml"),
            "an unreadable file is not left out"
        );
        assert_eq!(
            names(&read_all(&folder.path().join("b.yaml")).await.unwrap()),
            ["b.yaml=2"],
            "a single file is a set of one"
        );
    }

    #[tokio::test]
    async fn a_folder_has_its_limits() {
        let folder = tempfile::tempdir().unwrap();
        for i in 0..=FILES_MAX {
            std::fs::write(folder.path().join(format!("{i}.yaml")), "").unwrap();
        }
        assert!(
            read_all(folder.path())
                .await
                .unwrap_err()
                .why
                .starts_with("257 files")
        );
        std::fs::remove_file(folder.path().join("0.yaml")).unwrap();
        for i in 1..=4 {
            std::fs::write(
                folder.path().join(format!("{i}.yaml")),
                vec![b' '; FOLDER_BYTES_MAX / 4],
            )
            .unwrap();
        }
        assert_eq!(read_all(folder.path()).await.unwrap().0.len(), FILES_MAX);
        std::fs::write(folder.path().join("5.yaml"), " ").unwrap();
        assert!(
            read_all(folder.path())
                .await
                .unwrap_err()
                .why
                .contains("together")
        );
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
