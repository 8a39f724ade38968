//! A directory as a registry, with one file for each instance:
//! `<root>/<namespace>/<component>/<instance id>.json`.
//!
//! ```json
//! {"generation": "5f1c-4242", "address": "10.0.0.1:8000", "ready": true, "heartbeat_seconds": 5,
//!  "labels": {"llm-d.ai/role": "decode"}, "metadata": {"model": {"name": "Qwen3-32B"}}}
//! ```
//! The directory is meant for one machine, or for a shared file system without a cluster. Writers
//! rename whole files into place, so a reader never sees a partial file. Names that begin with a
//! dot are skipped. Only the *content* of a file counts. A running process must also touch a file
//! with `heartbeat_seconds` at this interval. After [`HEARTBEATS_MISSED_MAX`] missed heartbeats,
//! the instance of the file counts as dead. The reader measures the time since the last heartbeat
//! on its own monotonic clock, from the moment when it saw the timestamp change. So clock jumps and
//! clock skew expire no instance. A file written by hand has no heartbeat and stays until it is
//! removed.
//!
//! Kernel notifications trigger reads, and a poll finds the changes that the notifications miss.
//! Each read covers the whole directory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::stream::BoxStream;
use notify::{RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::backend::{
    Backend, BackendEvent, Component, ComponentFollower, InstanceReadiness, InstanceRecord, stream,
};
use crate::document::{DOCUMENT_BYTES_MAX, InstanceDocument};
use crate::event::MetadataPolicy;
use crate::instance::RECORDS_MAX;
use crate::watch::Discovery;
use crate::whole_file;

mod registry;
pub use registry::DirectoryRegistry;

/// The interval at which the directory is read without a notification. Changes that another host
/// makes on a network file system cause no notification.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The interval at which the directory is read if notifications are not available, mostly because
/// the folder does not exist yet.
pub const POLL_INTERVAL_UNWATCHED: Duration = Duration::from_millis(250);

/// The minimum time between two reads after notifications. A hundred processes that start together
/// cost a few reads, not hundreds.
const LOOKS_APART: Duration = Duration::from_millis(5);

/// The interval at which a registered process touches its file. A hundred instances cause twenty
/// cheap writes a second, and a dead process is noticed within 15 s.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

/// The number of missed heartbeats after which an instance counts as dead. A machine that swaps may
/// miss two heartbeats.
pub const HEARTBEATS_MISSED_MAX: u32 = 3;

/// The maximum number of entries of a folder that are listed. The maximum is higher than
/// [`RECORDS_MAX`], because some entries may not be instances. The maximum is low enough to list
/// the folder within milliseconds.
const FILES_LISTED_MAX: usize = 16 * RECORDS_MAX;

/// A directory as a discovery backend.
#[derive(Clone, Debug)]
pub struct DirectoryBackend {
    root: PathBuf,
}

/// Reads a directory repeatedly.
#[derive(Debug)]
struct DirectoryScanner {
    folder: PathBuf,
    /// The last content of each file, and the time when its timestamp last changed.
    files: HashMap<PathBuf, ScannedFile>,
    published: BTreeMap<Arc<str>, Arc<InstanceRecord>>,
    synced: bool,
}

#[derive(Debug)]
struct ScannedFile {
    modified: SystemTime,
    moved: Instant,
    /// Whether a heartbeat was seen; otherwise the file may be left over from a process that died
    /// earlier.
    alive: bool,
    record: Result<(InstanceRecord, Option<Duration>), String>,
}

// === impl DirectoryBackend ===

impl DirectoryBackend {
    /// Creates a backend for the directory at `root`, which need not exist yet.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Creates discovery with this backend.
    #[must_use]
    pub fn discovery(self) -> Discovery<Self> {
        Discovery::new(self, MetadataPolicy::Preferred)
    }
}

impl Backend for DirectoryBackend {
    fn follow(
        &self,
        component: &Component,
        relist: Arc<Notify>,
    ) -> BoxStream<'static, BackendEvent> {
        let folder = self.root.join(component.namespace()).join(component.name());
        let scanner = DirectoryScanner {
            folder: folder.clone(),
            files: HashMap::new(),
            published: BTreeMap::new(),
            synced: false,
        };
        stream(DirectoryFollower {
            scanner: Some(scanner),
            looks: ScanTimer::new(relist),
            folder,
        })
    }
}

struct DirectoryFollower {
    /// The scanner of the folder; `None` while a read uses it.
    scanner: Option<DirectoryScanner>,
    looks: ScanTimer,
    folder: PathBuf,
}

impl ComponentFollower for DirectoryFollower {
    async fn next(&mut self) -> Option<Vec<BackendEvent>> {
        self.looks.next(&self.folder).await;
        let mut scanner = self.scanner.take()?;
        let scan = move || {
            let events = scanner.scan();
            (scanner, events)
        };
        let (scanner, events) = tokio::task::spawn_blocking(scan).await.ok()?;
        self.scanner = Some(scanner);
        Some(events)
    }
}

// === impl DirectoryScanner ===

impl DirectoryScanner {
    fn scan(&mut self) -> Vec<BackendEvent> {
        let names = match self.list() {
            Ok(names) => names,
            Err(why) => return vec![BackendEvent::Failed(why)],
        };
        let (names, warning) = self.limited(names);
        self.files.retain(|path, _| names.contains(path));
        for path in names {
            self.look(path);
        }
        let now = Instant::now();
        let mut records = BTreeMap::new();
        for (path, entry) in &self.files {
            // If a file cannot be read now, its last content stays in use.
            match &entry.record {
                Ok((record, heartbeat)) => {
                    let mut record = record.clone();
                    if let Some(heartbeat) = heartbeat {
                        judge(&mut record, entry, *heartbeat, now);
                    }
                    records.insert(Arc::from(record.name()), Arc::new(record));
                }
                Err(_) => {
                    let id = path
                        .file_stem()
                        .and_then(|s| s.to_str())
                        .unwrap_or_default();
                    if let Some((id, record)) = self.published.get_key_value(id) {
                        records.insert(Arc::clone(id), Arc::clone(record));
                    }
                }
            }
        }
        let mut events = self.publish(records);
        events.push(BackendEvent::Warns(warning));
        events
    }

    /// Returns at most [`RECORDS_MAX`] files, known files first, and a warning if the folder has
    /// more files.
    fn limited(&self, mut paths: BTreeSet<PathBuf>) -> (BTreeSet<PathBuf>, Option<String>) {
        let beyond = paths.len().saturating_sub(RECORDS_MAX);
        if beyond == 0 {
            return (paths, None);
        }
        let new = paths.extract_if(.., |path| !self.files.contains_key(path));
        let new: Vec<PathBuf> = new.collect();
        let room = RECORDS_MAX.saturating_sub(paths.len());
        paths.extend(new.into_iter().take(room));
        let folder = self.folder.display();
        let warning = format!("{beyond} files in {folder} are ignored: {RECORDS_MAX} are read");
        (paths, Some(warning))
    }

    fn publish(&mut self, records: BTreeMap<Arc<str>, Arc<InstanceRecord>>) -> Vec<BackendEvent> {
        if !std::mem::replace(&mut self.synced, true) {
            self.published.clone_from(&records);
            return vec![BackendEvent::Reset(records.into_values().collect())];
        }
        let removed = self
            .published
            .keys()
            .filter(|id| !records.contains_key(*id))
            .map(|id| BackendEvent::Delete(Arc::clone(id)));
        let new = records
            .iter()
            .filter(|(id, record)| self.published.get(*id) != Some(*record));
        let mut events: Vec<_> = removed
            .chain(new.map(|(_, record)| BackendEvent::Apply(Arc::clone(record))))
            .collect();
        if events.is_empty() {
            events.push(BackendEvent::Alive);
        }
        self.published = records;
        events
    }

    /// Returns the files of the folder. A folder that does not exist has no files, because no
    /// instance has registered yet.
    fn list(&self) -> Result<BTreeSet<PathBuf>, String> {
        let wrong = |e: io::Error| format!("{}: {e}", self.folder.display());
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            Err(e) => return Err(wrong(e)),
        };
        let mut paths = BTreeSet::new();
        let mut listed = 0;
        for entry in entries.take(FILES_LISTED_MAX) {
            listed += 1;
            let path = entry.map_err(wrong)?.path();
            let hidden = path
                .file_name()
                .and_then(|n| n.to_str())
                .is_none_or(|n| n.starts_with('.'));
            if !hidden && path.extension().is_some_and(|e| e == "json") {
                paths.insert(path);
            }
        }
        if listed == FILES_LISTED_MAX {
            // A known file stays in the list while it exists.
            let known = self.files.keys().filter(|path| path.exists());
            paths.extend(known.cloned());
        }
        Ok(paths)
    }

    fn look(&mut self, path: PathBuf) {
        let read = read(&path);
        let modified = modified(&path);
        let now = Instant::now();
        match self.files.get_mut(&path) {
            Some(entry) => {
                if entry.modified != modified {
                    entry.modified = modified;
                    entry.moved = now;
                    entry.alive = true;
                }
                entry.record = read;
            }
            None => {
                // The age of a file is only a hint, because it depends on the wall clock. An
                // instance with a new file counts as alive immediately; an instance with an old
                // file counts only after a heartbeat.
                let age = SystemTime::now()
                    .duration_since(modified)
                    .unwrap_or_default();
                let alive = age < HEARTBEAT * HEARTBEATS_MISSED_MAX;
                self.files.insert(
                    path,
                    ScannedFile {
                        modified,
                        moved: now,
                        alive,
                        record: read,
                    },
                );
            }
        }
    }
}

fn judge(record: &mut InstanceRecord, entry: &ScannedFile, heartbeat: Duration, now: Instant) {
    let silent = now.saturating_duration_since(entry.moved);
    if record.readiness == InstanceReadiness::Ready && silent > heartbeat * HEARTBEATS_MISSED_MAX {
        record.readiness = InstanceReadiness::NotReady(format!(
            "no heartbeat for more than {:?}",
            heartbeat * HEARTBEATS_MISSED_MAX
        ));
    } else if record.readiness == InstanceReadiness::Ready && !entry.alive {
        record.readiness =
            InstanceReadiness::NotReady("its file is old and no heartbeat was seen yet".to_owned());
    }
}

fn modified(path: &Path) -> SystemTime {
    std::fs::metadata(path)
        .and_then(|m| m.modified())
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

fn read(path: &Path) -> Result<(InstanceRecord, Option<Duration>), String> {
    let id = path
        .file_stem()
        .and_then(|s| s.to_str())
        .unwrap_or_default();
    let document = whole_file::read(path, DOCUMENT_BYTES_MAX as u64).map_err(|e| e.to_string())?;
    parse(id, &document)
}

/// Reads an instance file: the record, and its heartbeat interval if it has one.
///
/// # Errors
/// Fails if the file is not a valid document, and says what is invalid.
pub fn parse(id: &str, text: &[u8]) -> Result<(InstanceRecord, Option<Duration>), String> {
    let document = InstanceDocument::parse(text)?;
    let heartbeat = document
        .heartbeat_seconds
        .map(|s| Duration::from_secs(u64::from(s.max(1))));
    Ok((document.record(id, 0)?, heartbeat))
}

// === Looks ===

/// Decides when to read a folder.
#[derive(Debug)]
struct ScanTimer {
    relist: Arc<Notify>,
    wake: Arc<Notify>,
    watcher: Option<notify::RecommendedWatcher>,
    first: bool,
}

impl ScanTimer {
    fn new(relist: Arc<Notify>) -> Self {
        Self {
            relist,
            wake: Arc::new(Notify::new()),
            watcher: None,
            first: true,
        }
    }

    /// Waits until it is time to read. This function sets the watch before the read, so no change
    /// between the two is missed.
    async fn next(&mut self, folder: &Path) {
        if !std::mem::take(&mut self.first) {
            let poll = if self.watcher.is_some() {
                POLL_INTERVAL
            } else {
                POLL_INTERVAL_UNWATCHED
            };
            tokio::select! {
                () = self.wake.notified() => return tokio::time::sleep(LOOKS_APART).await,
                () = self.relist.notified() => {}
                () = tokio::time::sleep(poll) => {}
            }
        }
        // The watch is set again at each poll, because another folder may now have the same path.
        self.watcher = self.watch(folder);
    }

    fn watch(&self, folder: &Path) -> Option<notify::RecommendedWatcher> {
        let wake = Arc::clone(&self.wake);
        let tell = move |event: notify::Result<notify::Event>| {
            use notify::event::{EventKind, ModifyKind};
            // Heartbeats change only the timestamps of files, and the next poll sees them. Errors
            // and overflows trigger a read.
            if !event.is_ok_and(|e| {
                matches!(
                    e.kind,
                    EventKind::Access(_) | EventKind::Modify(ModifyKind::Metadata(_))
                )
            }) {
                wake.notify_one();
            }
        };
        let mut watcher = notify::recommended_watcher(tell).ok()?;
        watcher.watch(folder, RecursiveMode::NonRecursive).ok()?;
        Some(watcher)
    }
}
