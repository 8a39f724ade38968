//! Leader election among several daemons; the others stand by.
//!
//! A standby follows its endpoints and reads their metadata, so that no running endpoint is missing
//! when it takes over. It scrapes no endpoint and serves no proxy. Its health, admin and metrics
//! listeners are open ([`crate::serve::monitoring`]) and report that it is alive and not ready.
//! When it gets the lease it starts like any daemon: its term is newer than all before it, so
//! proxies take its state, and its generations are new (with a snapshot file on a shared volume
//! they are the old ones, and so is the hash secret). Until it listens, proxies go on as without a
//! daemon. A daemon that loses the lease exits, as Kubernetes' controllers do, and is started
//! again.

use clap::Args;
use discovery::etcd::EtcdLease;
use discovery::kubernetes::{self, KubernetesLease};
use discovery::lease::{LeaseStore, campaign};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::cli::etcd_access::EtcdAccess;
use crate::error::FatalError;

/// Leader election among several daemons.
#[derive(Clone, Debug, Default, Args)]
pub struct LeaseArgs {
    /// Lead only with the Lease of this namespace and name in Kubernetes; else stand by.
    #[arg(long, env = "SWITCHPOINT_LEASE_KUBERNETES", value_name = "NAMESPACE/NAME", conflicts_with = "lease_etcd")]
    pub lease_kubernetes: Option<String>,

    /// The same with a lease in etcd, at these members: http://host:port or https://host:port.
    #[arg(long, env = "SWITCHPOINT_LEASE_ETCD", value_name = "URL", value_delimiter = ',')]
    pub lease_etcd: Vec<String>,

    /// Name of the lease in etcd.
    #[arg(long, env = "SWITCHPOINT_LEASE_NAME", value_name = "NAME", default_value = "switchpointd")]
    pub lease_name: String,

    /// The holder's name in the lease; a suffix makes it unique.
    #[arg(long, env = "SWITCHPOINT_LEASE_IDENTITY", value_name = "NAME", default_value = "switchpointd")]
    pub lease_identity: String,

    /// Access to etcd for it.
    #[command(flatten)]
    pub access: EtcdAccess,
}

/// A lease that this daemon campaigns for, or holds.
#[derive(Debug)]
pub struct LeaderLease {
    leads: watch::Receiver<bool>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

// === impl LeaseArgs ===

impl LeaseArgs {
    /// Begins to campaign for the configured lease, if there is one.
    ///
    /// # Errors
    /// [`FatalError::Usage`] says what is wrong.
    pub async fn want(self) -> Result<Option<LeaderLease>, FatalError> {
        let Self { lease_kubernetes, lease_etcd, lease_name, lease_identity, access } = self;
        let store: Box<dyn LeaseStore> = match lease_kubernetes {
            Some(given) => {
                let Some((namespace, name)) = given.split_once('/').filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
                else {
                    return Err(FatalError::Usage(format!("--lease-kubernetes {given:?}: give NAMESPACE/NAME")));
                };
                Box::new(KubernetesLease::new(kubernetes::connect().await.map_err(FatalError::Usage)?, namespace, name))
            }
            None if lease_etcd.is_empty() => return Ok(None),
            None => {
                let config = access.config(lease_etcd).await.map_err(FatalError::Usage)?;
                Box::new(EtcdLease::new(config, &lease_name).map_err(FatalError::Usage)?)
            }
        };
        // Two processes of one name would both lead: the next container of a pod has the same name.
        let me = format!("{lease_identity}_{:016x}", rand::random::<u64>());
        let (leads, follow) = watch::channel(false);
        let (stop, stopped) = oneshot::channel::<()>();
        tracing::info!(me, "standing by until the lease is ours");
        let task = tokio::spawn(async move {
            let failed = |why: String| tracing::warn!(why, "the lease cannot be had or renewed now");
            campaign(&*store, me, &leads, async { drop(stopped.await) }, failed).await;
        });
        Ok(Some(LeaderLease { leads: follow, stop: Some(stop), task }))
    }
}

// === impl LeaderLease ===

impl LeaderLease {
    /// Stands by until the lease is ours.
    ///
    /// # Errors
    /// [`FatalError::LeaseLost`] when it never can be.
    pub async fn won(&mut self) -> Result<(), FatalError> {
        self.leads.wait_for(|leads| *leads).await.map(drop).map_err(|_| FatalError::LeaseLost)
    }

    /// Waits for the lease to be lost.
    pub async fn lost(&mut self) {
        let _ = self.leads.wait_for(|leads| !*leads).await; // nobody renews it any more: that is a loss too
    }

    /// Gives it back, so that another need not wait for it to lapse.
    pub async fn give_back(mut self) {
        drop(self.stop.take());
        let _ = self.task.await;
    }
}

/// Waits for the loss of a lease, if there is one.
pub async fn lost(lease: &mut Option<LeaderLease>) {
    match lease {
        Some(lease) => lease.lost().await,
        None => std::future::pending().await,
    }
}
