//! Keeps one subscription for each endpoint of a pool whose engine publishes KV events.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use scheduler::EndpointRef;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};

use super::stats::KvEventStats;
use super::subscription::PublisherSubscription;
use super::target::{KvEventPorts, KvEventTarget};
use crate::pool::writer::PoolView;
use crate::scrape::ScrapeEvent;
use crate::shutdown::Shutdown;
use crate::state::pool_views::PoolTable;

/// Subscribes to the publishers of one pool.
#[derive(Debug)]
pub struct KvEventSubscriber {
    pub pool: Arc<str>,
    pub views: Arc<PoolTable>,
    pub ports: KvEventPorts,
    pub stats: Arc<KvEventStats>,
    /// Reports restarts and cleared caches.
    pub emptied: mpsc::Sender<ScrapeEvent>,
}

/// The running subscriptions, by the address of their endpoint.
#[derive(Debug, Default)]
struct RunningSubscriptions {
    by_endpoint: BTreeMap<SocketAddr, RunningSubscription>,
    tasks: JoinSet<()>,
}

#[derive(Debug)]
struct RunningSubscription {
    target: KvEventTarget,
    /// The endpoint's present generation.
    current: watch::Sender<EndpointRef>,
    task: AbortHandle,
}

// === impl KvEventSubscriber ===

impl KvEventSubscriber {
    /// Follows the pool until the signal. The subscriptions end with this call.
    pub async fn run(self, mut shutdown: Shutdown) {
        let mut views = self.views.views.subscribe();
        let mut running = RunningSubscriptions::default();
        let mut revision = 0;
        loop {
            let view = {
                let views = views.borrow_and_update();
                let mut changed = views.iter().filter(|view| view.revision != revision);
                changed.find(|view| view.name == self.pool).cloned()
            };
            if let Some(view) = view {
                revision = view.revision;
                self.reconcile(&mut running, &view);
            }
            tokio::select! {
                changed = views.changed() => if changed.is_err() { return },
                Some(_) = running.tasks.join_next() => {} // removes what was aborted
                () = shutdown.begun() => return,
            }
        }
    }

    /// Ends the subscriptions that are not needed any more, and begins new ones.
    fn reconcile(&self, running: &mut RunningSubscriptions, view: &PoolView) {
        let members = view.members.iter();
        let wanted: BTreeMap<SocketAddr, (EndpointRef, KvEventTarget)> = members
            .filter_map(|member| {
                let target = self.ports.target(&member.instance)?;
                Some((target.endpoint, (member.id, target)))
            })
            .collect();
        running.by_endpoint.retain(|endpoint, subscription| {
            let stays = wanted
                .get(endpoint)
                .is_some_and(|(_, target)| *target == subscription.target);
            if !stays {
                subscription.task.abort();
                self.stats.end(*endpoint);
            }
            stays
        });
        for (endpoint, (id, target)) in wanted {
            if let Some(subscription) = running.by_endpoint.get(&endpoint) {
                subscription.current.send_replace(id);
                continue;
            }
            self.stats.begin(endpoint, &target.name);
            let (current, current_seen) = watch::channel(id);
            let subscription = PublisherSubscription::new(
                target.clone(),
                Arc::clone(&self.stats),
                self.emptied.clone(),
                current_seen,
            );
            let task = running.tasks.spawn(subscription.run());
            running.by_endpoint.insert(
                endpoint,
                RunningSubscription {
                    target,
                    current,
                    task,
                },
            );
        }
    }
}
