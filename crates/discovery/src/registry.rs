//! Registers instances: a handle keeps the registration, and ends it when dropped.
//!
//! One watch channel holds the state of the instance. The routes of [`crate::serve`] read this
//! channel, the backend follows it, and only the handle writes to it. So metadata can be read as
//! soon as it is set, whether the instance is ready or not.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use futures::future::BoxFuture;
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::backend::{Component, InvalidName, checked_name};
use crate::metadata::{Metadata, MetadataError};

/// Registers instances.
pub trait ServiceRegistry: Send + Sync {
    /// Registers this process as an instance of `component` in `namespace`: not ready, and without
    /// metadata.
    ///
    /// # Errors
    /// Returns [`RegisterError`], which says what has to change, or that a later attempt may
    /// succeed.
    fn register_instance<'a>(
        &'a self,
        namespace: &'a str,
        component: &'a str,
    ) -> BoxFuture<'a, Result<InstanceHandle, RegisterError>>;
}

/// Whether the instance may get traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceStatus {
    /// The instance may get traffic.
    Ready,
    /// The instance may not get traffic: it is starting, draining or broken.
    NotReady,
}

/// The address and the name of the process to register, for a registry that stores instances.
#[derive(Clone, Debug)]
pub struct Registrant {
    pub(crate) address: SocketAddr,
    name: Option<String>,
}

/// The reason why an instance could not be registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The namespace, component or id is not a valid name.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// The process is not deployed as the component it registers as. The deployment has to change,
    /// and trying again does not help.
    #[error("cannot register: {0}")]
    Refused(String),
    /// The backend cannot be reached. Trying again later may help.
    #[error("cannot register now: {0}")]
    Unavailable(String),
}

/// The current state of an instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Announcement {
    /// The generation of the instance.
    pub generation: Arc<str>,
    /// The metadata of the instance.
    pub metadata: Arc<Metadata>,
    /// A number that grows with each change of `metadata`.
    pub revision: u64,
    /// Whether the instance may get traffic.
    pub status: InstanceStatus,
}

/// A registration. Dropping it removes the instance.
pub struct InstanceHandle {
    id: Arc<str>,
    announcement: watch::Sender<Announcement>,
    _registration: Registration,
}

/// Ends the registration when dropped with its handle.
pub(crate) struct Registration {
    /// The task that publishes the state.
    pub(crate) task: Option<AbortHandle>,
    /// The function that removes the registration. The function must not block for long.
    pub(crate) withdraw: Option<Box<dyn FnOnce() + Send + Sync>>,
}

// === impl Registrant ===

impl From<SocketAddr> for Registrant {
    fn from(address: SocketAddr) -> Self {
        Self {
            address,
            name: None,
        }
    }
}

impl Registrant {
    /// Returns the registrant with this instance id instead of a generated one. A later
    /// registration under the same id replaces the earlier one.
    #[must_use]
    pub fn with_name(self, name: impl Into<String>) -> Self {
        Self {
            name: Some(name.into()),
            ..self
        }
    }

    /// Returns the instance id of this generation in that component.
    pub(crate) fn id(
        &self,
        component: &Component,
        generation: &str,
    ) -> Result<Arc<str>, InvalidName> {
        Ok(match &self.name {
            Some(name) => checked_name(name)?.into(),
            None => format!("{}-{generation}", component.name()).into(),
        })
    }
}

// === impl InstanceHandle ===

impl InstanceHandle {
    /// Creates a handle. `publish` starts the registration, which follows the state of the handle.
    pub(crate) fn new(
        id: Arc<str>,
        generation: Arc<str>,
        publish: impl FnOnce(watch::Receiver<Announcement>) -> Registration,
    ) -> Self {
        let said = Announcement {
            generation,
            metadata: Arc::default(),
            revision: 0,
            status: InstanceStatus::NotReady,
        };
        let (said, follow) = watch::channel(said);
        Self {
            id,
            announcement: said,
            _registration: publish(follow),
        }
    }

    /// Returns the unique id of the instance in the registry. In Kubernetes it is the name of the
    /// pod.
    pub fn instance_id(&self) -> &str {
        &self.id
    }

    /// Replaces the metadata of the instance. Readers get the new metadata immediately.
    ///
    /// # Errors
    /// Returns [`MetadataError`] if the metadata is too large, or a key that this crate reads has
    /// an invalid value. In this case the old metadata stays.
    pub fn set_metadata(&self, metadata: Map<String, Value>) -> Result<(), MetadataError> {
        let metadata = Arc::new(Metadata::try_new(metadata)?);
        self.announcement.send_if_modified(|said| {
            let changed = said.metadata != metadata;
            if changed {
                said.metadata = metadata;
                said.revision += 1;
            }
            changed
        });
        Ok(())
    }

    /// Sets whether the instance may get traffic.
    pub fn set_ready(&self, status: InstanceStatus) {
        self.announcement
            .send_if_modified(|said| std::mem::replace(&mut said.status, status) != status);
    }

    /// Returns a receiver of the current state and of every change of this state.
    pub fn follow(&self) -> watch::Receiver<Announcement> {
        self.announcement.subscribe()
    }
}

impl fmt::Debug for InstanceHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InstanceHandle")
            .field("id", &self.id)
            .field("said", &self.announcement.borrow())
            .finish_non_exhaustive()
    }
}

// === impl Registration ===

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
        if let Some(withdraw) = self.withdraw.take() {
            withdraw();
        }
    }
}

// === impl InstanceStatus ===

impl FromStr for InstanceStatus {
    type Err = String;

    /// Reads `ready` or `notready`, in any case and with or without a dash.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().replace(['-', '_'], "").as_str() {
            "ready" => Ok(Self::Ready),
            "notready" => Ok(Self::NotReady),
            _ => Err(format!("{text:?} is neither \"ready\" nor \"notready\"")),
        }
    }
}

impl fmt::Display for InstanceStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "ready",
            Self::NotReady => "notready",
        })
    }
}

/// Returns a unique generation of this process.
pub(crate) fn new_generation() -> Arc<str> {
    format!("{:016x}-{}", random(), std::process::id()).into()
}

/// Returns a random number, uniform in 0..=1.
#[cfg(any(feature = "kubernetes", feature = "etcd"))]
pub(crate) fn chance() -> f64 {
    f64::from(u16::try_from(random() >> 48).unwrap_or(0)) / f64::from(u16::MAX)
}

/// Returns a random number from the keys of a new hasher, the only source of randomness in the
/// standard library.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn handle() -> InstanceHandle {
        InstanceHandle::new("i".into(), "life".into(), |_| Registration {
            task: None,
            withdraw: None,
        })
    }

    #[test]
    fn an_unchanged_announcement_wakes_no_reader() {
        let handle = handle();
        let mut follow = handle.follow();
        let map = || json!({"model": "m"}).as_object().cloned().unwrap();
        handle.set_metadata(map()).unwrap();
        assert!(follow.has_changed().unwrap() && follow.borrow_and_update().revision == 1);
        handle.set_metadata(map()).unwrap();
        handle.set_ready(InstanceStatus::NotReady);
        assert!(!follow.has_changed().unwrap());
        handle
            .set_metadata(json!({"model": 7}).as_object().cloned().unwrap())
            .unwrap_err();
        assert!(
            !follow.has_changed().unwrap(),
            "refused metadata changes nothing"
        );
        handle.set_ready(InstanceStatus::Ready);
        let said = follow.borrow_and_update().clone();
        assert_eq!((said.status, said.revision), (InstanceStatus::Ready, 1));
    }

    #[test]
    fn status_is_read_as_people_write_it() {
        assert_eq!("ready".parse(), Ok(InstanceStatus::Ready));
        for text in ["notready", "NotReady", "not-ready", "not_ready"] {
            assert_eq!(text.parse(), Ok(InstanceStatus::NotReady));
        }
        assert!("yes".parse::<InstanceStatus>().is_err());
        assert_eq!(
            InstanceStatus::NotReady.to_string().parse(),
            Ok(InstanceStatus::NotReady)
        );
    }

    #[test]
    fn lives_have_names_of_their_own() {
        assert_ne!(new_generation(), new_generation());
    }
}
