//! etcd as a registry. An instance is a key under a lease:
//! `<prefix>/<namespace>/<component>/<instance id>`. The value is the document of
//! [`crate::directory`], without heartbeat.
//!
//! ```text
//! registrant   grant ─▶ put ─▶ keep alive every third of the lease; put again at every change
//!                ▲                │ lost, refused, silent
//!                └── after a wait ┘      the instance keeps its id, whatever lease it has
//! reader       list at revision R ─▶ watch from R + 1
//!                ▲                      │ broken, compacted, cancelled, silent
//!                └────── after a wait ──┘      a list replaces the set, so missed events do not matter
//! ```
//! A registrant that cannot reach etcd keeps serving and registers again when it can. A dead
//! registrant disappears with its lease, after at most [`LEASE`], and immediately when its handle
//! is dropped. Pings on the connection notice a failed etcd within [`PING_INTERVAL`] and
//! [`PING_TIMEOUT`].

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::stream::{BoxStream, StreamExt};
use tokio::sync::Notify;
use tonic::{Status, Streaming};

use crate::backend::{
    Backend, BackendEvent, Component, ComponentFollower, InstanceRecord, checked_name, stream,
};
use crate::document::InstanceDocument;
use crate::event::MetadataPolicy;
use crate::instance::{INSTANCES_MAX, RECORDS_MAX};
use crate::wait::wait_after;
use crate::watch::Discovery;

use api::kv_client::KvClient;
use api::watch_client::WatchClient;

mod connection;
mod lease;
mod registry;

pub use connection::{EtcdConfig, PING_INTERVAL, PING_TIMEOUT, PREFIX_DEFAULT};
use connection::{EtcdConnection, within};
pub use lease::EtcdLease;
pub use registry::{EtcdRegistry, LEASE};

/// Code that is generated from `etcd.proto` and committed. A test generates the code again and
/// compares.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
mod api {
    include!("etcd/gen/etcdserverpb.rs");
}

/// The largest answer accepted, in bytes: a full component with modest metadata. A larger answer is
/// refused, so that it does not fill the memory.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// etcd's numbers for the order of a list.
const ASCENDING: i32 = 1;
const BY_CREATION: i32 = 2;

/// An etcd cluster as a discovery backend.
#[derive(Clone, Debug)]
pub struct Etcd {
    connection: EtcdConnection,
}

// === impl Etcd ===

impl Etcd {
    /// Creates a backend for the cluster of `config`. The backend does not connect yet.
    ///
    /// # Errors
    /// Fails if no endpoint is given, or if an endpoint or a certificate is invalid.
    pub fn new(config: EtcdConfig) -> Result<Self, String> {
        Ok(Self {
            connection: EtcdConnection::open(config)?,
        })
    }

    /// Creates discovery with this backend.
    #[must_use]
    pub fn discovery(self) -> Discovery<Self> {
        Discovery::new(self, MetadataPolicy::Preferred)
    }
}

impl Backend for Etcd {
    fn follow(
        &self,
        component: &Component,
        relist: Arc<Notify>,
    ) -> BoxStream<'static, BackendEvent> {
        let folder = self.connection.folder(component);
        let follow = EtcdFollower {
            connection: self.connection.clone(),
            folder,
            watch: None,
            known: BTreeMap::new(),
            is_partial: false,
            failures: 0,
            relist,
        };
        stream(follow)
    }
}

struct EtcdFollower {
    connection: EtcdConnection,
    folder: String,
    /// The open watch. `None` means that the keys must be listed first.
    watch: Option<Streaming<api::WatchResponse>>,
    /// The last record by key. A record stays in use if a new value cannot be read.
    known: BTreeMap<String, Arc<InstanceRecord>>,
    /// Whether etcd has keys that are not in `known`, because the component has too many keys.
    is_partial: bool,
    failures: u32,
    relist: Arc<Notify>,
}

// === impl EtcdFollower ===

impl ComponentFollower for EtcdFollower {
    async fn next(&mut self) -> Option<Vec<BackendEvent>> {
        Some(self.step().await)
    }
}

impl EtcdFollower {
    async fn step(&mut self) -> Vec<BackendEvent> {
        let Some(watch) = &mut self.watch else {
            if self.failures > 0 {
                tokio::time::sleep(wait_after(self.failures - 1)).await;
            }
            return match self.list().await {
                Ok(events) => events,
                Err(status) => self.failed(status).await,
            };
        };
        let message = tokio::select! {
            message = watch.message() => message,
            () = self.relist.notified() => {
                self.watch = None;
                return Vec::new();
            }
        };
        match message {
            Ok(Some(message)) if message.canceled || message.compact_revision > 0 => {
                let why = format!(
                    "watch cancelled: {} (compacted at {})",
                    message.cancel_reason, message.compact_revision
                );
                self.failed(Status::aborted(why)).await
            }
            Ok(Some(message)) => {
                self.failures = 0;
                let events: Vec<_> = message
                    .events
                    .into_iter()
                    .filter_map(|event| self.event(event))
                    .collect();
                if events.is_empty() {
                    vec![BackendEvent::Alive]
                } else {
                    events
                }
            }
            Ok(None) => self.failed(Status::unavailable("the watch ended")).await,
            Err(status) => self.failed(status).await,
        }
    }

    /// Lists the oldest [`RECORDS_MAX`] keys, and opens a watch of all changes after the list.
    async fn list(&mut self) -> Result<Vec<BackendEvent>, Status> {
        let channel = &self.connection.channel;
        let key = self.folder.clone().into_bytes();
        let range_end = range_end(&self.folder);
        let limit = i64::try_from(RECORDS_MAX).unwrap_or(i64::MAX);
        let ask = api::RangeRequest {
            key: key.clone(),
            range_end: range_end.clone(),
            limit,
            sort_order: ASCENDING,
            sort_target: BY_CREATION,
        };
        let mut kv = KvClient::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        let listed = within(kv.range(self.connection.request(ask, true).await?)).await?;
        self.is_partial = listed.more;
        let beyond = listed.count.saturating_sub(limit);
        let start_revision = listed.header.map_or(0, |header| header.revision) + 1;
        let create = api::WatchCreateRequest {
            key,
            range_end,
            start_revision,
            progress_notify: true,
        };
        let create = api::WatchRequest {
            request_union: Some(api::watch_request::RequestUnion::CreateRequest(create)),
        };
        // The stream of requests stays open, because its end would end the watch.
        let requests = futures::stream::iter([create]).chain(futures::stream::pending());
        let mut watch =
            WatchClient::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        self.watch =
            Some(within(watch.watch(self.connection.request(requests, false).await?)).await?);
        let before = std::mem::take(&mut self.known);
        for kv in listed.kvs {
            let Some(id) = self.id(&kv.key) else { continue };
            let record = record(&id, &kv).or_else(|| before.get(&id).cloned());
            self.known.extend(record.map(|record| (id, record)));
        }
        let warning = listed.more.then(|| {
            format!(
                "{beyond} keys under {} are ignored: the oldest {RECORDS_MAX} are read",
                self.folder
            )
        });
        let records = self.known.values().cloned().collect();
        Ok(vec![
            BackendEvent::Reset(records),
            BackendEvent::Warns(warning),
        ])
    }

    fn event(&mut self, event: api::Event) -> Option<BackendEvent> {
        let kv = event.kv?;
        let id = self.id(&kv.key)?;
        if event.r#type == i32::from(api::event::EventType::Delete as i16) {
            self.known.remove(&id);
            if self.is_partial && self.known.len() < INSTANCES_MAX {
                self.relist.notify_one();
            }
            return Some(BackendEvent::Delete(id.into()));
        }
        if !self.known.contains_key(&id) && self.known.len() >= RECORDS_MAX {
            self.is_partial = true;
            return None;
        }
        let record = record(&id, &kv)?;
        self.known.insert(id, Arc::clone(&record));
        Some(BackendEvent::Apply(record))
    }

    fn id(&self, key: &[u8]) -> Option<String> {
        let id = std::str::from_utf8(key).ok()?.strip_prefix(&self.folder)?;
        checked_name(id).ok().map(str::to_owned)
    }

    async fn failed(&mut self, status: Status) -> Vec<BackendEvent> {
        self.watch = None;
        self.failures += 1;
        vec![BackendEvent::Failed(self.connection.failed(status).await)]
    }
}

/// Returns the first key after all keys with `prefix`. The prefix ends in a slash, and `0` is the
/// next character.
fn range_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

fn record(id: &str, kv: &api::KeyValue) -> Option<Arc<InstanceRecord>> {
    let freshness = u64::try_from(kv.create_revision).unwrap_or(0);
    InstanceDocument::parse(&kv.value)
        .and_then(|document| document.record(id, freshness))
        .ok()
        .map(Arc::new)
}
