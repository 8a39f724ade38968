//! What a backend is: something that tells who is registered, as four verbs.
//!
//! A backend reports *records* and knows nothing of metadata fetching, events or subscribers: those are the same for all, in
//! [`crate::Discovery`]. Three rules make it hard to get wrong:
//!
//! - an [`BackendEvent::Apply`] is the full value, never a difference;
//! - a [`BackendEvent::Reset`] replaces the whole set, so a backend may resynchronise at any moment, and does after every reconnect;
//! - a [`BackendEvent::Failed`] changes no set: what was last told stays in force.

use std::net::SocketAddr;
use std::sync::Arc;

use futures::stream::{BoxStream, StreamExt};
use tokio::sync::Notify;

use crate::instance::{Instance, NAME_BYTES_MAX};
use crate::metadata::Metadata;

/// Whom is asked for: the instances of one component of one namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Component {
    namespace: Arc<str>,
    name: Arc<str>,
}

/// What a backend knows of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The instance, without metadata.
    pub instance: Instance,
    /// May it get traffic?
    pub readiness: Readiness,
    /// Where its metadata is.
    pub metadata: MetadataSource,
    /// Of two records that claim one address, the one with the greater value has it: an IP address may be given to a new pod while the old
    /// one lingers. Any measure of a backend's own that grows with time.
    pub freshness: u64,
}

/// May an instance get traffic?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Yes.
    Ready,
    /// No, for this reason.
    NotReady(String),
}

/// Where an instance's metadata is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetadataSource {
    /// It has none.
    None,
    /// It came with the record.
    Given(Arc<Metadata>),
    /// The instance itself serves it, by `GET /metadata` at this address.
    At(SocketAddr),
}

/// What is to become of a request when whoever asks for a pick gets none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureMode {
    /// It is refused.
    Close,
    /// It goes to any instance.
    Open,
}

/// What instances speak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AppProtocol {
    /// HTTP/1.1.
    #[default]
    Http,
    /// HTTP/2 in clear, which gRPC needs.
    H2c,
}

/// What an `InferencePool` asks of gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// When they get no pick.
    pub failure_mode: FailureMode,
    /// Towards instances.
    pub protocol: AppProtocol,
    /// The Service that gateways ask for a pick; `None` where the reference names no Service.
    pub picker: Option<PickerService>,
}

/// The Service that gateways are to ask for picks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickerService {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// The port of it, where one is named.
    pub port: Option<u16>,
}

/// What a backend tells. The first that changes the set is a [`BackendEvent::Reset`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendEvent {
    /// The whole set; replaces all that was told before.
    Reset(Vec<Arc<Record>>),
    /// A record that is new, or has another value.
    Apply(Arc<Record>),
    /// The record of that name is no more.
    Delete(Arc<str>),
    /// The backend cannot be reached or read, for this reason. What was last told stays in force.
    Failed(String),
    /// The registry asks this of gateways, or of them no more: an `InferencePool` does.
    Asks(Option<Asked>),
    /// The backend cannot read something optional, for this reason; `None` once it can again. The set of instances is complete without it.
    Warns(Option<String>),
    /// The backend is there and nothing changed.
    Alive,
}

/// Tells who is registered.
pub trait Backend: Send + Sync + 'static {
    /// Follows one component. The stream ends only with the backend; when `relist` is notified, it tells a [`BackendEvent::Reset`] soon.
    fn follow(&self, component: &Component, relist: Arc<Notify>) -> BoxStream<'static, BackendEvent>;
}

/// A component as a backend follows it.
pub(crate) trait Following: Send + 'static {
    /// What is told next, in order; `None` ends it.
    fn next(&mut self) -> impl Future<Output = Option<Vec<BackendEvent>>> + Send;
}

/// What `following` tells, one by one.
pub(crate) fn stream(following: impl Following) -> BoxStream<'static, BackendEvent> {
    futures::stream::unfold(following, |mut following| async move { Some((futures::stream::iter(following.next().await?), following)) })
        .flatten()
        .boxed()
}

/// Why a namespace or component is refused. Whoever chose the name is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no name: 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' and '.', beginning with a letter or digit")]
pub struct InvalidName(pub String);

// === impl Component ===

impl Component {
    /// A component by its names.
    ///
    /// # Errors
    /// [`InvalidName`]: the names become labels, keys and folders, so they are held to what is allowed in all of these.
    pub fn try_new(namespace: &str, name: &str) -> Result<Self, InvalidName> {
        Ok(Self { namespace: checked_name(namespace)?.into(), name: checked_name(name)?.into() })
    }

    /// Its namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Its name in that namespace.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Holds a name to what is allowed in labels, keys and file names alike.
///
/// # Errors
/// [`InvalidName`].
pub fn checked_name(name: &str) -> Result<&str, InvalidName> {
    let allowed = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let begins = name.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric);
    if allowed && begins && name.len() <= NAME_BYTES_MAX { Ok(name) } else { Err(InvalidName(name.to_owned())) }
}

// === impl Record ===

impl Record {
    /// Its name.
    #[must_use]
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
        for bad in ["", ".", "..", ".a", "a/b", "a b", "ä", "-a", "a\0", &"x".repeat(254)] {
            assert!(Component::try_new("n", bad).is_err() && Component::try_new(bad, "c").is_err(), "{bad:?}");
        }
    }
}
