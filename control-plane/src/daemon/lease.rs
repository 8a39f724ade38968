//! One of several daemons leads; the others stand by.
//!
//! A daemon that stands by follows its endpoints and reads their metadata, so that none who lives is missed for being asked for the first time. It scrapes nobody
//! and serves no proxy. Its health, admin and metrics listeners are open ([`crate::serve::monitoring`]) and say that it lives and is not ready. When the lease is its own it starts as any daemon does: its term is
//! therefore newer than all before it, so proxies take its state over, and its generations are new (with a snapshot file on a volume that all
//! share they are the old ones, and so is the hash secret). Until it listens, proxies go on as they do without a daemon. One that loses the lease
//! ends, as Kubernetes' controllers do, and whoever keeps it running starts it anew.

use clap::Args;
use discovery::etcd::EtcdLease;
use discovery::kubernetes::{self, KubernetesLease};
use discovery::lease::{LeaseStore, campaign};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::cli::etcd_access::EtcdAccess;
use crate::error::FatalError;

/// Who leads, where there are several daemons.
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

    /// Who we are, for people who look at the lease; made unique.
    #[arg(long, env = "SWITCHPOINT_LEASE_IDENTITY", value_name = "NAME", default_value = "switchpointd")]
    pub lease_identity: String,

    /// How etcd is reached for it.
    #[command(flatten)]
    pub access: EtcdAccess,
}

/// A lease that is wanted, and perhaps held.
#[derive(Debug)]
pub struct LeaderLease {
    leads: watch::Receiver<bool>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

// === impl LeaseArgs ===

impl LeaseArgs {
    /// Begins to want the lease asked for, if any is.
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
        // Two of one name would both lead: a pod's name is used again by its next container.
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
