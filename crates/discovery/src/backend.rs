//! The interface of a discovery backend: a stream of events about registered instances.
//!
//! A backend reports *records*. Metadata fetching, events and subscribers are the same for all
//! backends, and are in [`crate::Discovery`]. Three rules keep backends simple:
//!
//! - a [`BackendEvent::Apply`] has the full value, never a difference;
//! - a [`BackendEvent::Reset`] replaces the whole set, so a backend may send its set again at any
//!   time, and sends it after every reconnect;
//! - a [`BackendEvent::Failed`] changes nothing, so the last set stays in use.

use std::net::SocketAddr;
use std::sync::Arc;

use futures::stream::{BoxStream, StreamExt};
use tokio::sync::Notify;

use crate::instance::{Instance, NAME_BYTES_MAX};
use crate::metadata::Metadata;

/// The instances to follow: one component of one namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Component {
    namespace: Arc<str>,
    name: Arc<str>,
}

/// One instance as a backend reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceRecord {
    /// The instance, without metadata.
    pub instance: Instance,
    /// Whether the instance may get traffic.
    pub readiness: InstanceReadiness,
    /// The source of the instance's metadata.
    pub metadata: MetadataSource,
    /// The rank among records with the same address: the record with the greater value replaces the
    /// others. A new pod may get the IP address of an old pod whose record still exists. Each
    /// backend uses its own number, which grows with time.
    pub freshness: u64,
}

/// Whether an instance may get traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceReadiness {
    /// The instance may get traffic.
    Ready,
    /// The registry reports the instance as not ready, but the instance itself does not. For
    /// example, its node has lost contact with the API server. The instance may get traffic as long
    /// as it answers.
    Unconfirmed(String),
    /// The instance may not get traffic, for this reason.
    NotReady(String),
}

/// The source of an instance's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetadataSource {
    /// The instance has no metadata.
    None,
    /// The metadata came with the record.
    Given(Arc<Metadata>),
    /// The instance serves its metadata itself, by `GET /metadata` at this address.
    At(SocketAddr),
}

/// The action of gateways on a request for which no endpoint is picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickerFailureMode {
    /// The gateway refuses the request.
    Close,
    /// The gateway sends the request to any instance.
    Open,
}

/// The protocol of the instances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AppProtocol {
    /// HTTP/1.1.
    #[default]
    Http,
    /// HTTP/2 without TLS, which gRPC needs.
    H2c,
}

/// The settings that an `InferencePool` has for gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRequirements {
    /// The action of gateways on a request for which no endpoint is picked.
    pub failure_mode: PickerFailureMode,
    /// The protocol towards instances.
    pub protocol: AppProtocol,
    /// The endpoint picker that gateways call; `None` if the pool's reference to its picker names
    /// no Service.
    pub picker: Option<PickerService>,
}

/// The Service of an endpoint picker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickerService {
    /// The namespace of the Service.
    pub namespace: Arc<str>,
    /// The name of the Service.
    pub name: Arc<str>,
    /// The port of the Service, if the reference names one.
    pub port: Option<u16>,
}

/// An event of a backend. The first event that changes the set is a [`BackendEvent::Reset`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendEvent {
    /// The whole set of records. This set replaces everything that the backend reported before.
    Reset(Vec<Arc<InstanceRecord>>),
    /// A new record, or a new value of a known record.
    Apply(Arc<InstanceRecord>),
    /// The record with this name was removed.
    Delete(Arc<str>),
    /// The backend cannot be reached or read, for this reason. The last set stays in use.
    Failed(String),
    /// Settings for gateways from the registry (an `InferencePool` has them); `None` if the
    /// registry has no settings, or no longer has them.
    Requirements(Option<PoolRequirements>),
    /// The backend cannot read optional data, for this reason; `None` when it can read the data
    /// again. The set of instances is complete without these data.
    Warns(Option<String>),
    /// The backend is reachable and nothing changed.
    Alive,
}

/// Reports the registered instances.
pub trait Backend: Send + Sync + 'static {
    /// Returns the events of one component. The stream ends only with the backend. Soon after
    /// `relist` is notified, the stream sends a [`BackendEvent::Reset`].
    fn follow(
        &self,
        component: &Component,
        relist: Arc<Notify>,
    ) -> BoxStream<'static, BackendEvent>;
}

/// A component that a backend follows.
pub(crate) trait ComponentFollower: Send + 'static {
    /// Returns the next events, in order; `None` ends the stream.
    fn next(&mut self) -> impl Future<Output = Option<Vec<BackendEvent>>> + Send;
}

/// Returns the events of `following` as a stream, one by one.
pub(crate) fn stream(following: impl ComponentFollower) -> BoxStream<'static, BackendEvent> {
    futures::stream::unfold(following, |mut following| async move {
        Some((futures::stream::iter(following.next().await?), following))
    })
    .flatten()
    .boxed()
}

/// The reason why a namespace or component name is refused. The caller has to choose another name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a valid name: 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' and '.', beginning with a letter or digit"
)]
pub struct InvalidName(pub String);

// === impl Component ===

impl Component {
    /// Creates a component from its names.
    ///
    /// # Errors
    /// Returns [`InvalidName`] if a name is not valid as a label, a key and a folder, because it
    /// becomes all three.
    pub fn try_new(namespace: &str, name: &str) -> Result<Self, InvalidName> {
        Ok(Self {
            namespace: checked_name(namespace)?.into(),
            name: checked_name(name)?.into(),
        })
    }

    /// Returns the namespace of the component.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the name of the component in its namespace.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Checks that a name is valid as a label, a key and a file name.
///
/// # Errors
/// Returns [`InvalidName`] if the name is not valid.
pub fn checked_name(name: &str) -> Result<&str, InvalidName> {
    let allowed = name
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let begins = name
        .as_bytes()
        .first()
        .is_some_and(u8::is_ascii_alphanumeric);
    if allowed && begins && name.len() <= NAME_BYTES_MAX {
        Ok(name)
    } else {
        Err(InvalidName(name.to_owned()))
    }
}

// === impl InstanceReadiness ===

impl InstanceReadiness {
    /// Returns whether the instance may get traffic.
    pub fn may_serve(&self) -> bool {
        !matches!(self, Self::NotReady(_))
    }
}

// === impl InstanceRecord ===

impl InstanceRecord {
    /// Returns the name of the instance.
    pub fn name(&self) -> &str {
        &self.instance.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_a_folder_or_a_prefix_are_refused() {
        for good in ["dynamo", "decode-1", "a.b_c", "0"] {
            assert_eq!(checked_name(good), Ok(good));
        }
        for bad in [
            "",
            ".",
            "..",
            ".a",
            "a/b",
            "a b",
            "ä",
            "-a",
            "a\0",
            &"x".repeat(254),
        ] {
            assert!(
                Component::try_new("n", bad).is_err() && Component::try_new(bad, "c").is_err(),
                "{bad:?}"
            );
        }
    }
}
