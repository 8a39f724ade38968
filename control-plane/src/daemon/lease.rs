//! Leader election among several daemons. Daemons that do not lead stand by.
//!
//! A standby follows and scrapes its endpoints and answers ext_proc, so gateways do not notice a
//! change of the leader. A standby serves no proxy: its state listener is closed. When a standby
//! gets the lease, its term is newer than all earlier terms, so proxies accept its state. The new
//! leader uses its own slots, generations and hash secret. With a snapshot file on a shared volume,
//! the new leader uses the values of the previous leader. Until the new leader's state listener is
//! open, proxies pick as if there were no daemon. A daemon that loses the lease closes the state
//! listener, stands by, and campaigns again.

use std::sync::Arc;

use clap::Args;
use discovery::etcd::EtcdLease;
use discovery::kubernetes::{self, KubernetesLease};
use discovery::lease::{LeaseStore, campaign};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::cli::etcd_access::EtcdAccess;
use crate::error::FatalError;
use crate::state::life::DaemonLife;

/// Leader election among several daemons.
#[derive(Clone, Debug, Default, Args)]
pub struct LeaseArgs {
    /// Lead only while this daemon holds this Lease (namespace and name) in Kubernetes, and
    /// otherwise stand by.
    #[arg(
        long,
        env = "SWITCHPOINT_LEASE_KUBERNETES",
        value_name = "NAMESPACE/NAME",
        conflicts_with = "lease_etcd"
    )]
    pub lease_kubernetes: Option<String>,

    /// Lead only while holding a lease in etcd, at these members: http://host:port or
    /// https://host:port.
    #[arg(
        long,
        env = "SWITCHPOINT_LEASE_ETCD",
        value_name = "URL",
        value_delimiter = ','
    )]
    pub lease_etcd: Vec<String>,

    /// Name of the lease in etcd.
    #[arg(
        long,
        env = "SWITCHPOINT_LEASE_NAME",
        value_name = "NAME",
        default_value = "switchpointd"
    )]
    pub lease_name: String,

    /// The holder's name in the lease. A random suffix makes it unique.
    #[arg(
        long,
        env = "SWITCHPOINT_LEASE_IDENTITY",
        value_name = "NAME",
        default_value = "switchpointd"
    )]
    pub lease_identity: String,

    /// Access to etcd for the lease.
    #[command(flatten)]
    pub access: EtcdAccess,
}

/// A lease that this daemon holds or campaigns for.
#[derive(Debug)]
pub struct LeaderLease {
    leads: watch::Receiver<bool>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

// === impl LeaseArgs ===

impl LeaseArgs {
    /// Begins to campaign for the configured lease, if there is one. Each renewal is reported to
    /// `life`.
    ///
    /// # Errors
    /// Returns [`FatalError::Usage`] if an option or the access to the store is invalid.
    pub async fn want(self, life: Arc<DaemonLife>) -> Result<Option<LeaderLease>, FatalError> {
        let Self {
            lease_kubernetes,
            lease_etcd,
            lease_name,
            lease_identity,
            access,
        } = self;
        let store: Box<dyn LeaseStore> = match lease_kubernetes {
            Some(given) => {
                let Some((namespace, name)) = given
                    .split_once('/')
                    .filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
                else {
                    return Err(FatalError::Usage(format!(
                        "--lease-kubernetes {given:?}: give NAMESPACE/NAME"
                    )));
                };
                Box::new(KubernetesLease::new(
                    kubernetes::connect().await.map_err(FatalError::Usage)?,
                    namespace,
                    name,
                ))
            }
            None if lease_etcd.is_empty() => return Ok(None),
            None => {
                let config = access.config(lease_etcd).await.map_err(FatalError::Usage)?;
                Box::new(EtcdLease::new(config, &lease_name).map_err(FatalError::Usage)?)
            }
        };
        // The random suffix prevents two processes of one name from leading at the same time: the
        // next container of a pod has the same name.
        let me = format!("{lease_identity}_{:016x}", rand::random::<u64>());
        let (leads, follow) = watch::channel(false);
        let (stop, stopped) = oneshot::channel::<()>();
        tracing::info!(me, "standing by until this daemon gets the lease");
        life.require_lease();
        let task = tokio::spawn(async move {
            let renewed = |at| life.record_renewal(at);
            let failed = |why: String| tracing::warn!(why, "cannot acquire or renew the lease now");
            let stopped = async { drop(stopped.await) };
            campaign(&*store, me, &leads, stopped, renewed, failed).await;
        });
        Ok(Some(LeaderLease {
            leads: follow,
            stop: Some(stop),
            task,
        }))
    }
}

// === impl LeaderLease ===

impl LeaderLease {
    /// Stands by until this daemon holds the lease.
    ///
    /// # Errors
    /// Returns [`FatalError::CampaignEnded`] if the campaign ended without the lease.
    pub async fn won(&mut self) -> Result<(), FatalError> {
        self.leads
            .wait_for(|leads| *leads)
            .await
            .map(drop)
            .map_err(|_| FatalError::CampaignEnded)
    }

    /// Waits for the lease to be lost.
    pub async fn lost(&mut self) {
        let _ = self.leads.wait_for(|leads| !*leads).await; // an ended campaign does not renew the lease, so it is lost
    }

    /// Releases the lease, so that another daemon need not wait for it to expire.
    pub async fn give_back(mut self) {
        drop(self.stop.take());
        let _ = self.task.await;
    }
}

/// Stands by until this daemon holds `lease`. Returns immediately if there is no lease.
///
/// # Errors
/// Returns [`FatalError::CampaignEnded`] if the campaign ended without the lease.
pub async fn won(lease: &mut Option<LeaderLease>) -> Result<(), FatalError> {
    match lease {
        Some(lease) => lease.won().await,
        None => Ok(()),
    }
}

/// Waits for the loss of `lease`; waits forever if there is no lease.
pub async fn lost(lease: &mut Option<LeaderLease>) {
    match lease {
        Some(lease) => lease.lost().await,
        None => std::future::pending().await,
    }
}
