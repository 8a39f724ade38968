//! The repository as a list of files in memory.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders without hand-written files, and the samples of this test.
const UNREAD: &[&str] = &[
    ".git",
    ".venv",
    ".venv-1.38",
    ".tools",
    "target",
    "node_modules",
    "e2e/tests/tidy",
];

/// The extensions of the files that are read: everything that contributors edit.
const READ: &[&str] = &[
    "rs", "toml", "yaml", "yml", "md", "py", "sh", "proto", "txt", "json",
];

/// One file, by its path from the root.
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Files, ordered by path.
pub(crate) struct SourceTree(pub(crate) Vec<SourceFile>);

// === impl SourceTree ===

impl SourceTree {
    /// Reads every file of the work tree that contributors edit.
    pub(crate) fn of_repository() -> Self {
        let root = root();
        let mut files = Vec::new();
        read(&root, &root, &mut files);
        files.sort_by(|a, b| a.path.cmp(&b.path));
        assert!(
            files.len() > 20,
            "the repository was not found at {}",
            root.display()
        );
        Self(files)
    }

    /// Returns the files whose path satisfies `wanted`.
    pub(crate) fn where_path(
        &self,
        wanted: impl Fn(&str) -> bool,
    ) -> impl Iterator<Item = &SourceFile> {
        self.0.iter().filter(move |file| wanted(&file.path))
    }

    /// Returns the files under `folder` that end in `suffix`. `folder` ends in `/`, or is empty for
    /// all files.
    pub(crate) fn under(
        &self,
        folder: &'static str,
        suffix: &'static str,
    ) -> impl Iterator<Item = &SourceFile> {
        self.where_path(move |path| path.starts_with(folder) && path.ends_with(suffix))
    }

    /// Returns the text of one file, or an empty text if the file does not exist.
    pub(crate) fn text(&self, path: &str) -> &str {
        self.0
            .iter()
            .find(|file| file.path == path)
            .map_or("", |file| &file.text)
    }
}

// === impl SourceFile ===

impl SourceFile {
    /// Returns the numbered lines of code, without comments, and without the unit tests at the end.
    pub(crate) fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.before_tests()
            .filter(|(_, line)| !line.trim_start().starts_with("//"))
    }

    /// Returns the numbered lines up to the unit tests at the end of the file.
    pub(crate) fn before_tests(&self) -> impl Iterator<Item = (usize, &str)> {
        self.lines()
            .take_while(|(_, line)| !line.starts_with("#[cfg(test)]"))
    }

    /// Returns all lines, numbered from 1.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .enumerate()
            .map(|(at, line)| (at + 1, line))
    }
}

/// Returns the root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(root: &Path, folder: &Path, files: &mut Vec<SourceFile>) {
    for entry in fs::read_dir(folder).expect("a readable folder").flatten() {
        // A link into the repository is not a second file: the chart links files of envoy-config.
        if entry.file_type().is_ok_and(|kind| kind.is_symlink()) {
            continue;
        }
        let full = entry.path();
        let path = full
            .strip_prefix(root)
            .expect("under the root")
            .to_string_lossy()
            .into_owned();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let ours = !path.ends_with("/target")
                && !path.contains("/corpus")
                && !path.contains("/artifacts");
            if ours && !UNREAD.contains(&path.as_str()) {
                read(root, &full, files);
            }
        } else if path == "Makefile"
            || READ
                .iter()
                .any(|suffix| path.ends_with(&format!(".{suffix}")))
        {
            // Skips files that are not text, or that were deleted during the walk.
            if let Ok(text) = fs::read_to_string(&full) {
                files.push(SourceFile { path, text });
            }
        }
    }
}
