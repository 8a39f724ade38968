//! The snapshot file, with the data that the next start of the daemon needs to continue without a
//! change for proxies.
//!
//! The file has the term, the hash secret, and the endpoints of every pool with slots and
//! generations. The file has no metrics, because they would be stale. Whenever a pool update
//! changes, the daemon writes a new file completely and renames it into place. A file that cannot
//! be read is renamed with a warning, and the daemon starts without it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use discovery::whole_file::{self, with_suffix};
use discovery::{Instance, InstanceMetricsLocation, Metadata, MetricsScheme};
use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::shutdown::Shutdown;
use crate::state::life::unix_ms;
use crate::state::pool_views::PoolViews;
use crate::state::shared::DaemonState;

/// The version of the format. A file with another version is not read.
const SCHEMA: u32 = 1;

/// The file mode: only the owner may read it, because it contains the hash secret.
const MODE: u32 = 0o600;

/// The largest file read, in bytes: several full pools with all their labels.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// The time to wait after a change, so that several changes are written together.
const SETTLE: Duration = Duration::from_millis(50);

/// The content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedState {
    schema: u32,
    /// The term of the daemon that wrote the file.
    pub term: u64,
    /// The key of the hashes of prompt blocks. The key is in hexadecimal, because JSON numbers are
    /// not exact beyond 2^53.
    #[serde(with = "hex")]
    pub hash_secret: u128,
    pub pools: BTreeMap<String, SavedPool>,
}

/// The saved part of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedPool {
    /// The next generation to use. Releases before 0.2 need it, because they continue with it.
    pub generation_next: u32,
    endpoints: Vec<SavedEndpoint>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedEndpoint {
    slot: u16,
    generation: u32,
    name: String,
    namespace: String,
    /// The generation as discovery reports it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    instance_generation: String,
    address: std::net::SocketAddr,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    labels: Vec<(String, String)>,
    /// The known keys of the metadata. Other keys may be large, and discovery reads them again at
    /// the start.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    metadata: Map<String, Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metrics_https: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metrics_port: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metrics_path: Option<String>,
}

/// A snapshot file, and the time when it was last written.
#[derive(Debug)]
pub struct SnapshotFile {
    path: PathBuf,
    written_unix_ms: AtomicU64,
    /// The content that this daemon read or wrote last.
    known: Mutex<Option<SavedState>>,
}

// === impl SavedState ===

impl SavedState {
    /// Returns the current state of `pools`. For a pool without a complete set, the state comes
    /// from `before`, the newest saved state.
    #[must_use]
    pub fn capture(
        shared: &DaemonState,
        pools: &PoolViews,
        before: &BTreeMap<String, SavedPool>,
    ) -> Self {
        let mut saved = before.clone();
        saved.retain(|name, _| shared.pools.names.iter().any(|n| **n == **name));
        for view in pools.iter().filter(|view| view.sources.complete) {
            let endpoints = view
                .members
                .iter()
                .map(|m| SavedEndpoint::from_instance(m.id, &m.instance))
                .collect();
            saved.insert(
                view.name.to_string(),
                SavedPool {
                    generation_next: view.generation_next,
                    endpoints,
                },
            );
        }
        Self {
            schema: SCHEMA,
            term: shared.life.term(),
            hash_secret: shared.life.hash_secret(),
            pools: saved,
        }
    }

    /// Reads the text of a snapshot file.
    ///
    /// # Errors
    /// Fails if the text is invalid.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str::<Self>(text)
            .map_err(|e| e.to_string())
            .and_then(Self::validate)
    }

    /// Checks the rules that the pool relies on, and that proxies will accept the next term.
    fn validate(self) -> Result<Self, String> {
        if self.schema != SCHEMA {
            return Err(format!(
                "schema {}, this release reads {SCHEMA}",
                self.schema
            ));
        }
        if !proto::terms::is_credible(self.term, unix_ms()) {
            return Err(format!(
                "term {} is more than a day ahead of the clock",
                self.term
            ));
        }
        for (name, pool) in &self.pools {
            let slots: BTreeSet<u16> = pool.endpoints.iter().map(|e| e.slot).collect();
            if slots.len() != pool.endpoints.len()
                || slots
                    .last()
                    .is_some_and(|&s| usize::from(s) >= ENDPOINTS_MAX)
            {
                return Err(format!(
                    "pool {name:?}: slots are not distinct numbers below {ENDPOINTS_MAX}"
                ));
            }
            let instances: Vec<Instance> =
                pool.endpoints.iter().map(SavedEndpoint::instance).collect();
            discovery::validate(&instances).map_err(|why| format!("pool {name:?}: {why}"))?;
        }
        Ok(self)
    }
}

// === impl SavedPool ===

impl SavedPool {
    /// Returns the endpoints with slots and generations.
    #[must_use]
    pub fn endpoints(&self) -> Vec<(EndpointRef, Instance)> {
        let id = |e: &SavedEndpoint| EndpointRef {
            slot: Slot(e.slot),
            generation: Generation(e.generation),
        };
        self.endpoints
            .iter()
            .map(|e| (id(e), e.instance()))
            .collect()
    }
}

// === impl SavedEndpoint ===

impl SavedEndpoint {
    fn from_instance(id: EndpointRef, instance: &Instance) -> Self {
        let Instance {
            name,
            namespace,
            generation: instance_generation,
            address,
            labels,
            metrics,
            metadata,
            unconfirmed: _,
        } = instance.clone();
        Self {
            slot: id.slot.0,
            generation: id.generation.0,
            name,
            namespace,
            instance_generation,
            address,
            labels,
            metadata: metadata.map_or_else(Map::new, |m| m.understood()),
            metrics_https: metrics.scheme.map(|s| s == MetricsScheme::Https),
            metrics_port: metrics.port,
            metrics_path: metrics.path,
        }
    }

    fn instance(&self) -> Instance {
        let scheme = |https| {
            if https {
                MetricsScheme::Https
            } else {
                MetricsScheme::Http
            }
        };
        // The metadata was valid when it was saved. If a later release is stricter, discovery reads
        // the metadata again from the source.
        let metadata = Some(&self.metadata)
            .filter(|m| !m.is_empty())
            .and_then(|m| Metadata::try_new(m.clone()).ok());
        Instance {
            namespace: self.namespace.clone(),
            generation: self.instance_generation.clone(),
            labels: self.labels.clone(),
            metrics: InstanceMetricsLocation {
                scheme: self.metrics_https.map(scheme),
                port: self.metrics_port,
                path: self.metrics_path.clone(),
            },
            metadata: metadata.map(Arc::new),
            ..Instance::new(self.name.clone(), self.address)
        }
    }
}

// === impl SnapshotFile ===

impl SnapshotFile {
    /// Returns the file at `path`, which need not exist yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            written_unix_ms: AtomicU64::new(0),
            known: Mutex::new(None),
        }
    }

    /// Reads the file of an earlier start, or of another daemon. An unreadable file is renamed to
    /// `<file>.corrupt`, and treated as missing.
    #[must_use]
    pub fn load(&self) -> Option<SavedState> {
        let loaded = match read(&self.path) {
            Ok(None) => return None,
            Ok(Some(text)) => SavedState::parse(&text),
            Err(error) => Err(error.to_string()),
        };
        loaded
            .inspect_err(|why| {
                let aside = with_suffix(&self.path, ".corrupt");
                let moved = fs::rename(&self.path, &aside).is_ok();
                let aside = aside.display().to_string();
                tracing::warn!(file = %self.path.display(), why, moved_to = moved.then_some(aside), "snapshot file cannot be used; starting without it");
            })
            .ok()
    }

    /// Returns whether this daemon wrote this content, or already has it. If the result is false,
    /// another daemon has led meanwhile.
    #[must_use]
    pub fn knows(&self, saved: &SavedState) -> bool {
        self.known
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            == Some(saved)
    }

    /// Records that the daemon's state has this content.
    pub fn remember(&self, saved: &SavedState) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(saved.clone());
    }

    /// Replaces the file by `saved` atomically, so that no reader finds a part of the file.
    ///
    /// # Errors
    /// Returns the error of the file system. In this case the old file is intact.
    pub fn store(&self, saved: &SavedState) -> io::Result<()> {
        let text = serde_json::to_string(saved).map_err(io::Error::other)?;
        let temporary = with_suffix(&self.path, ".new");
        whole_file::replace(&self.path, &temporary, text.as_bytes(), MODE)?;
        self.remember(saved);
        let folder = self
            .path
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()?;
        let unix = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        self.written_unix_ms.store(
            u64::try_from(unix.as_millis()).unwrap_or(0),
            Ordering::Relaxed,
        );
        Ok(())
    }

    /// Returns when the file was last written, in ms since the epoch; 0 means never.
    #[must_use]
    pub fn written_unix_ms(&self) -> u64 {
        self.written_unix_ms.load(Ordering::Relaxed)
    }

    /// Keeps the file up to date until `shutdown`, then writes it a last time.
    pub async fn keep(
        self: Arc<Self>,
        shared: Arc<DaemonState>,
        mut last: SavedState,
        mut shutdown: Shutdown,
    ) {
        let mut pools = shared.pools.views.subscribe();
        let mut written = Vec::new();
        loop {
            let stopping = tokio::select! {
                changed = pools.changed() => changed.is_err(),
                () = shutdown.begun() => true,
            };
            if !stopping {
                tokio::time::sleep(SETTLE).await;
            }
            let views = pools.borrow_and_update().clone();
            // Most changes are of metrics, which are not saved.
            let pool_updates: Vec<u64> = views
                .iter()
                .filter(|v| v.sources.complete)
                .map(|v| v.revision)
                .collect();
            if pool_updates != written {
                let now = SavedState::capture(&shared, &views, &last.pools);
                let file = Arc::clone(&self);
                let saved = now.clone();
                match tokio::task::spawn_blocking(move || file.store(&saved))
                    .await
                    .unwrap_or_else(|e| Err(io::Error::other(e)))
                {
                    Ok(()) => (last, written) = (now, pool_updates),
                    Err(error) => {
                        shared.reports.counters().snapshot_write_errors += 1;
                        tracing::error!(file = %self.path.display(), %error, "snapshot file not written; trying again at the next change");
                    }
                }
            }
            if stopping {
                return;
            }
        }
    }
}

fn read(path: &Path) -> io::Result<Option<String>> {
    match whole_file::read_text(path, FILE_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &u128, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{value:032x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<u128, D::Error> {
        let text = String::deserialize(deserializer)?;
        u128::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_far_future_is_not_used() {
        let file =
            |term: u64| format!(r#"{{"schema":1,"term":{term},"hash_secret":"00","pools":{{}}}}"#);
        SavedState::parse(&file(unix_ms())).unwrap();
        let refused = SavedState::parse(&file(u64::MAX)).unwrap_err();
        assert!(refused.contains("ahead of the clock"), "{refused}");
    }
}
