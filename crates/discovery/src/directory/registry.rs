//! Registers instances in a directory. Each instance is a file, which the process touches while it
//! runs.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW};
use tokio::sync::watch;

use super::{HEARTBEAT, POLL_INTERVAL, read};
use crate::backend::Component;
use crate::document::InstanceDocument;
use crate::registry::{
    Announcement, InstanceHandle, RegisterError, Registrant, Registration, ServiceRegistry,
    new_generation,
};
use crate::whole_file;

/// The mode of an instance's file, which has no secrets.
const MODE: u32 = 0o644;

/// Sets both timestamps of a file to the present.
const NOW: Timestamps = Timestamps {
    last_access: PRESENT,
    last_modification: PRESENT,
};

const PRESENT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: UTIME_NOW,
};

/// A directory as a registry.
#[derive(Clone, Debug)]
pub struct DirectoryRegistry {
    root: PathBuf,
    registrant: Registrant,
}

// === impl DirectoryRegistry ===

impl DirectoryRegistry {
    /// Creates a registry in the directory at `root`. The directory is created if it does not
    /// exist.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>, registrant: impl Into<Registrant>) -> Self {
        Self {
            root: root.into(),
            registrant: registrant.into(),
        }
    }

    fn register(&self, namespace: &str, component: &str) -> Result<InstanceHandle, RegisterError> {
        let component = Component::try_new(namespace, component)?;
        let generation = new_generation();
        let id = self.registrant.id(&component, &generation)?;
        let folder = self.root.join(component.namespace()).join(component.name());
        std::fs::create_dir_all(&folder)
            .map_err(|e| RegisterError::Refused(format!("{}: {e}", folder.display())))?;
        let registration = Arc::new(DirectoryRegistration {
            path: folder.join(format!("{id}.json")),
            temporary: folder.join(format!(".{id}.{generation}")),
            generation: Arc::clone(&generation),
            registrant: self.registrant.clone(),
            open: Mutex::new(true),
        });
        Ok(InstanceHandle::new(id, generation, |said| {
            let task = tokio::spawn(Arc::clone(&registration).keep(said)).abort_handle();
            Registration {
                task: Some(task),
                withdraw: Some(Box::new(move || registration.withdraw())),
            }
        }))
    }
}

impl ServiceRegistry for DirectoryRegistry {
    fn register_instance<'a>(
        &'a self,
        namespace: &'a str,
        component: &'a str,
    ) -> BoxFuture<'a, Result<InstanceHandle, RegisterError>> {
        Box::pin(async move { self.register(namespace, component) })
    }
}

/// The file of a registered instance.
#[derive(Debug)]
struct DirectoryRegistration {
    path: PathBuf,
    temporary: PathBuf,
    generation: Arc<str>,
    registrant: Registrant,
    /// Whether the registration has not been withdrawn yet. The lock is held while the file is
    /// written, so that no write happens after the withdrawal.
    open: Mutex<bool>,
}

impl DirectoryRegistration {
    /// Writes the file at every change, touches it in between, and creates it again if it was
    /// removed.
    async fn keep(self: Arc<Self>, mut said: watch::Receiver<Announcement>) {
        said.mark_changed();
        loop {
            let write = tokio::select! {
                changed = said.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    true
                }
                () = tokio::time::sleep(HEARTBEAT) => false,
            };
            let this = Arc::clone(&self);
            let now = said.borrow_and_update().clone();
            let kept = tokio::task::spawn_blocking(move || {
                if write {
                    this.write(&now)
                } else {
                    this.touch(&now)
                }
            })
            .await;
            if !matches!(kept, Ok(Ok(()))) {
                tokio::time::sleep(POLL_INTERVAL).await; // a full disk or a missing folder: try again until the handle is dropped
                said.mark_changed();
            }
        }
    }

    fn write(&self, said: &Announcement) -> io::Result<()> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if !*open {
            return Ok(());
        }
        let heartbeat_seconds = u32::try_from(HEARTBEAT.as_secs()).ok();
        let file = InstanceDocument {
            heartbeat_seconds,
            ..InstanceDocument::from_announcement(said, &self.registrant)
        };
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        whole_file::replace(
            &self.path,
            &self.temporary,
            &serde_json::to_vec(&file)?,
            MODE,
        )
    }

    fn touch(&self, said: &Announcement) -> io::Result<()> {
        match self.is_ours() {
            // If another process has put a symbolic link at this path, the call changes the link
            // itself.
            Some(true) => rustix::fs::utimensat(CWD, &self.path, &NOW, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(io::Error::from),
            Some(false) => Ok(()), // another process registered under the same id
            None => self.write(said),
        }
    }

    fn withdraw(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        *open = false;
        if self.is_ours() == Some(true) {
            let _ = std::fs::remove_file(&self.path); // if that fails, the missing heartbeats end the registration
        }
        let _ = std::fs::remove_file(&self.temporary);
    }

    /// Returns whether this process wrote the file; `None` if the file does not exist or cannot be
    /// read.
    fn is_ours(&self) -> Option<bool> {
        let (record, _) = read(&self.path).ok()?;
        Some(record.instance.generation == *self.generation)
    }
}
