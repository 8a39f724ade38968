//! Registers instances in etcd. Each instance is a key under a lease that is kept alive.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::{Mutex, watch};
use tonic::Status;

use super::api::{self, kv_client::KvClient, lease_client::LeaseClient};
use super::connection::{EtcdConfig, EtcdConnection, REQUEST_DEADLINE, within};
use crate::backend::Component;
use crate::document::{DOCUMENT_BYTES_MAX, InstanceDocument};
use crate::registry::{
    Announcement, InstanceHandle, RegisterError, Registrant, Registration, ServiceRegistry,
    new_generation,
};
use crate::wait::wait_after;

/// The time for which an instance stays registered after its last keep-alive. With ten seconds, a
/// common choice, slow DNS or a leader election removed whole deployments.
pub const LEASE: Duration = Duration::from_secs(30);

/// An etcd cluster as a registry.
#[derive(Clone, Debug)]
pub struct EtcdRegistry {
    connection: EtcdConnection,
    registrant: Registrant,
}

// === impl EtcdRegistry ===

impl EtcdRegistry {
    /// Creates a registry in the cluster of `config`.
    ///
    /// # Errors
    /// Fails if no endpoint is given, or if an endpoint or a certificate is invalid.
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
                // Without a runtime no request can be sent, and the lease then expires.
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
            // No caller gets the error, because the instance keeps serving. Readers see the
            // instance disappear with its lease and come back.
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
                    // Each keep-alive uses its own stream, because a long stream that hangs would
                    // be noticed only when the lease is lost.
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
        let document =
            InstanceDocument::from_announcement(&said.borrow_and_update(), &self.registrant);
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
