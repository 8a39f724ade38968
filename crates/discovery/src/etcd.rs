//! etcd as registry: an instance is a key under a lease,
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
//! registrant disappears with its lease, after at most [`LEASE`], and at once when its handle is
//! dropped. Pings on the connection notice a failed etcd within [`PING_INTERVAL`] and
//! [`PING_TIMEOUT`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use tokio::sync::{Mutex, Notify, watch};
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status, Streaming};

use crate::backend::{
    Backend, BackendEvent, Component, ComponentFollower, InstanceRecord, checked_name, stream,
};
use crate::document::{DOCUMENT_BYTES_MAX, InstanceDocument};
use crate::event::MetadataPolicy;
use crate::instance::INSTANCES_MAX;
use crate::registry::{
    Announcement, InstanceHandle, RegisterError, Registrant, Registration, ServiceRegistry, chance,
    new_generation,
};
use crate::watch::Discovery;

use api::auth_client::AuthClient;
use api::kv_client::KvClient;
use api::lease_client::LeaseClient;
use api::watch_client::WatchClient;

mod lease;

pub use lease::EtcdLease;

/// Generated from `etcd.proto` and committed; a test generates it again and compares.
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

/// The default prefix of the keys of instances.
pub const PREFIX_DEFAULT: &str = "/switchpoint/instances";

/// How long an instance stays registered after its last keep-alive. Ten seconds is a common choice,
/// but with it a slow DNS or a leader election removed whole deployments.
pub const LEASE: Duration = Duration::from_secs(30);

/// How often the connection is pinged.
pub const PING_INTERVAL: Duration = Duration::from_secs(5);

/// How long a ping may take.
pub const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one request may take; a keep-alive has to fit into a third of the lease.
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);

/// The first wait after an error. It doubles up to [`RETRY_MAX`]; up to half of it is random.
const RETRY_FIRST: Duration = Duration::from_millis(250);

/// The longest wait after an error.
const RETRY_MAX: Duration = Duration::from_secs(10);

/// The largest answer accepted, in bytes: a full component with modest metadata. A larger answer is
/// refused, so that it does not fill the memory.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// How to reach etcd.
#[derive(Clone, Debug, Default)]
pub struct EtcdConfig {
    /// Members, as `http://host:port` or `https://host:port`.
    pub endpoints: Vec<String>,
    /// The prefix of the keys of instances; [`PREFIX_DEFAULT`] when empty.
    pub prefix: String,
    /// User and password.
    pub user: Option<(String, String)>,
    /// The CA that signed the members' certificates, PEM.
    pub ca: Option<Vec<u8>>,
    /// The client certificate and its key, PEM.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// An etcd cluster as a discovery backend.
#[derive(Clone, Debug)]
pub struct Etcd {
    connection: EtcdConnection,
}

/// An etcd cluster as a registry.
#[derive(Clone, Debug)]
pub struct EtcdRegistry {
    connection: EtcdConnection,
    registrant: Registrant,
}

#[derive(Clone, Debug)]
struct EtcdConnection {
    channel: Channel,
    prefix: Arc<str>,
    user: Option<(String, String)>,
    /// The token of the user. It is renewed when etcd refuses it.
    token: Arc<Mutex<Option<MetadataValue<tonic::metadata::Ascii>>>>,
}

// === impl EtcdConnection ===

impl EtcdConnection {
    fn open(config: EtcdConfig) -> Result<Self, String> {
        let EtcdConfig {
            endpoints,
            prefix,
            user,
            ca,
            identity,
        } = config;
        let mut tls = ClientTlsConfig::new();
        tls = ca
            .into_iter()
            .fold(tls, |tls, ca| tls.ca_certificate(Certificate::from_pem(ca)));
        tls = identity.into_iter().fold(tls, |tls, (cert, key)| {
            tls.identity(Identity::from_pem(cert, key))
        });
        let mut members = Vec::new();
        for given in endpoints {
            let wrong = |e: tonic::transport::Error| format!("etcd endpoint {given:?}: {e}");
            let mut member = Endpoint::from_shared(given.clone()).map_err(wrong)?;
            if given.starts_with("https://") {
                member = member.tls_config(tls.clone()).map_err(wrong)?;
            }
            let member = member.connect_timeout(REQUEST_DEADLINE).tcp_nodelay(true);
            members.push(
                member
                    .http2_keep_alive_interval(PING_INTERVAL)
                    .keep_alive_timeout(PING_TIMEOUT)
                    .keep_alive_while_idle(true),
            );
        }
        let channel = match members.as_slice() {
            [] => return Err("no etcd endpoint is given".to_owned()),
            [one] => one.connect_lazy(),
            _ => Channel::balance_list(members.into_iter()),
        };
        let prefix = if prefix.is_empty() {
            PREFIX_DEFAULT
        } else {
            prefix.trim_end_matches('/')
        };
        Ok(Self {
            channel,
            prefix: prefix.into(),
            user,
            token: Arc::default(),
        })
    }

    /// The prefix of a component's keys. It ends in a slash, so that `a` does not match `ab`.
    fn folder(&self, component: &Component) -> String {
        format!(
            "{}/{}/{}/",
            self.prefix,
            component.namespace(),
            component.name()
        )
    }

    /// A request with the token of the user, if there is one. A unary request has a deadline.
    async fn request<T>(&self, message: T, unary: bool) -> Result<Request<T>, Status> {
        let mut request = Request::new(message);
        if unary {
            request.set_timeout(REQUEST_DEADLINE);
        }
        // A member without a leader refuses the request; otherwise it would answer from old state.
        request
            .metadata_mut()
            .insert("hasleader", MetadataValue::from_static("true"));
        if let Some((name, password)) = &self.user {
            let mut token = self.token.lock().await;
            if token.is_none() {
                let ask = api::AuthenticateRequest {
                    name: name.clone(),
                    password: password.clone(),
                };
                let answer =
                    within(AuthClient::new(self.channel.clone()).authenticate(ask)).await?;
                *token = answer.token.parse().ok();
            }
            if let Some(token) = &*token {
                request.metadata_mut().insert("token", token.clone());
            }
        }
        Ok(request)
    }

    /// The error as text. It also drops the token, which may have expired.
    async fn failed(&self, status: Status) -> String {
        *self.token.lock().await = None;
        let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&status);
        let mut text = format!("etcd: {}", status.message());
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        text
    }
}

async fn within<T>(
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    let answer = tokio::time::timeout(REQUEST_DEADLINE, answer).await;
    Ok(answer
        .map_err(|_| Status::deadline_exceeded(format!("no answer within {REQUEST_DEADLINE:?}")))??
        .into_inner())
}

fn wait_after(failures: u32) -> Duration {
    RETRY_FIRST
        .saturating_mul(1 << failures.min(16))
        .min(RETRY_MAX)
        .mul_f64(0.5 + chance() / 2.0)
}

// === impl Etcd ===

impl Etcd {
    /// A backend for that cluster. Does not connect yet.
    ///
    /// # Errors
    /// Says what is invalid in the configuration.
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
            failures: 0,
            relist,
        };
        stream(follow)
    }
}

struct EtcdFollower {
    connection: EtcdConnection,
    folder: String,
    /// The open watch; `None`: list first.
    watch: Option<Streaming<api::WatchResponse>>,
    /// The last record by key. It stays in force if a new value cannot be read.
    known: BTreeMap<String, Arc<InstanceRecord>>,
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
                Ok(records) => vec![BackendEvent::Reset(records)],
                Err(status) => self.failed(status).await,
            };
        };
        let told = tokio::select! {
            told = watch.message() => told,
            () = self.relist.notified() => {
                self.watch = None;
                return Vec::new();
            }
        };
        match told {
            Ok(Some(told)) if told.canceled || told.compact_revision > 0 => {
                let why = format!(
                    "watch cancelled: {} (compacted at {})",
                    told.cancel_reason, told.compact_revision
                );
                self.failed(Status::aborted(why)).await
            }
            Ok(Some(told)) => {
                self.failures = 0;
                let events: Vec<_> = told
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

    /// Lists the whole set, and opens a watch of everything after it.
    async fn list(&mut self) -> Result<Vec<Arc<InstanceRecord>>, Status> {
        let channel = &self.connection.channel;
        let key = self.folder.clone().into_bytes();
        let range_end = range_end(&self.folder);
        let limit = i64::try_from(INSTANCES_MAX + 1).unwrap_or(i64::MAX);
        let ask = api::RangeRequest {
            key: key.clone(),
            range_end: range_end.clone(),
            limit,
        };
        let mut kv = KvClient::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        let listed = within(kv.range(self.connection.request(ask, true).await?)).await?;
        if listed.more || listed.kvs.len() > INSTANCES_MAX {
            return Err(Status::out_of_range(format!(
                "more than {INSTANCES_MAX} instances under {}",
                self.folder
            )));
        }
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
        Ok(self.known.values().cloned().collect())
    }

    fn event(&mut self, event: api::Event) -> Option<BackendEvent> {
        let kv = event.kv?;
        let id = self.id(&kv.key)?;
        if event.r#type == i32::from(api::event::EventType::Delete as i16) {
            self.known.remove(&id);
            return Some(BackendEvent::Delete(id.into()));
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

/// The first key after all keys with `prefix`. The prefix ends in a slash, and `0` is the next
/// character.
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

// === impl EtcdRegistry ===

impl EtcdRegistry {
    /// Registers in that cluster.
    ///
    /// # Errors
    /// Says what is invalid in the configuration.
    pub fn new(config: EtcdConfig, registrant: impl Into<Registrant>) -> Result<Self, String> {
        Ok(Self {
            connection: EtcdConnection::open(config)?,
            registrant: registrant.into(),
        })
    }

    fn register(&self, namespace: &str, component: &str) -> Result<InstanceHandle, RegisterError> {
        let component = Component::try_new(namespace, component)?;
        let generation = new_generation();
        let id = self.registrant.id(&component, &generation)?;
        let keeper = EtcdRegistration {
            connection: self.connection.clone(),
            key: format!("{}{id}", self.connection.folder(&component)).into_bytes(),
            registrant: self.registrant.clone(),
            lease: Arc::default(),
        };
        Ok(InstanceHandle::new(id, generation, |said| {
            let lease = Arc::clone(&keeper.lease);
            let connection = keeper.connection.clone();
            let task = tokio::spawn(keeper.keep(said)).abort_handle();
            let revoke = move || {
                // Without a runtime no request can be sent; the lease then expires.
                if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                    runtime.spawn(async move { revoke(&connection, *lease.lock().await).await });
                }
            };
            Registration {
                task: Some(task),
                withdraw: Some(Box::new(revoke)),
            }
        }))
    }
}

impl ServiceRegistry for EtcdRegistry {
    fn register_instance<'a>(
        &'a self,
        namespace: &'a str,
        component: &'a str,
    ) -> BoxFuture<'a, Result<InstanceHandle, RegisterError>> {
        Box::pin(async move { self.register(namespace, component) })
    }
}

/// Keeps one instance registered while it runs.
struct EtcdRegistration {
    connection: EtcdConnection,
    key: Vec<u8>,
    registrant: Registrant,
    lease: Arc<Mutex<Option<i64>>>,
}

impl EtcdRegistration {
    async fn keep(self, mut said: watch::Receiver<Announcement>) {
        let mut failures = 0;
        loop {
            let Err(status) = self.hold(&mut said, &mut failures).await;
            // No caller gets the error, because the instance keeps serving. Readers see it
            // disappear with its lease and come back.
            self.connection.failed(status).await;
            tokio::time::sleep(wait_after(failures)).await;
            failures += 1;
        }
    }

    /// Holds one lease, from its grant to its loss.
    async fn hold(
        &self,
        said: &mut watch::Receiver<Announcement>,
        failures: &mut u32,
    ) -> Result<std::convert::Infallible, Status> {
        let mut client = LeaseClient::new(self.connection.channel.clone());
        revoke(&self.connection, self.lease.lock().await.take()).await; // if the old lease still exists, its key must not outlive this process
        let ask = api::LeaseGrantRequest {
            ttl: i64::try_from(LEASE.as_secs()).unwrap_or(i64::MAX),
            id: 0,
        };
        let lease = within(client.lease_grant(self.connection.request(ask, true).await?)).await?;
        *self.lease.lock().await = Some(lease.id);
        self.put(lease.id, said).await?;
        *failures = 0;
        let interval = Duration::from_secs(u64::try_from(lease.ttl).unwrap_or(1).max(1)) / 3;
        let mut due = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
        loop {
            tokio::select! {
                changed = said.changed() => match changed {
                    Ok(()) => self.put(lease.id, said).await?,
                    Err(_) => return Err(Status::cancelled("the handle was dropped")),
                },
                _ = due.tick() => {
                    // Each keep-alive uses a stream of its own: if a long stream hangs, that shows
                    // only when the lease is lost.
                    let ask = futures::stream::iter([api::LeaseKeepAliveRequest { id: lease.id }]);
                    let mut answers = within(client.lease_keep_alive(self.connection.request(ask, false).await?)).await?;
                    let answer = tokio::time::timeout(REQUEST_DEADLINE, answers.message()).await;
                    let kept = answer.map_err(|_| Status::deadline_exceeded("the lease was not confirmed"))??;
                    if kept.is_none_or(|kept| kept.ttl <= 0) {
                        return Err(Status::not_found("the lease is lost"));
                    }
                }
            }
        }
    }

    async fn put(
        &self,
        lease: i64,
        said: &mut watch::Receiver<Announcement>,
    ) -> Result<(), Status> {
        let document = InstanceDocument::of(&said.borrow_and_update(), &self.registrant);
        let value = serde_json::to_vec(&document).map_err(|e| Status::internal(e.to_string()))?;
        let put = api::PutRequest {
            key: self.key.clone(),
            value,
            lease,
        };
        let mut kv = KvClient::new(self.connection.channel.clone())
            .max_encoding_message_size(2 * DOCUMENT_BYTES_MAX);
        within(kv.put(self.connection.request(put, true).await?))
            .await
            .map(drop)
    }
}

async fn revoke(connection: &EtcdConnection, lease: Option<i64>) {
    let Some(id) = lease else { return };
    if let Ok(request) = connection
        .request(api::LeaseRevokeRequest { id }, true)
        .await
    {
        let _ = within(LeaseClient::new(connection.channel.clone()).lease_revoke(request)).await; // otherwise it expires
    }
}
