//! The event loop of one pool. The loop turns events of discovery, the scraper, KV events, the
//! configuration file and the proxies into calls of [`Pool`], and publishes the result.

use std::sync::Arc;
use std::time::Duration;

use discovery::{
    Instance, InstanceMetricsLocation as Located, MetricsScheme, SetChange, SetChanges,
};
use futures::StreamExt;
use futures::future::OptionFuture;
use scheduler::EndpointRef;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior};

use crate::config::{CompiledConfig, ConfigFile};
use crate::kv_events::EMPTIED_MAX;
use crate::pool::objects::{ObjectsFile, PoolObjects};
use crate::pool::writer::{Pool, PoolMember, PoolView, UNCONFIRMED_MAX, WallAndMonotonic};
use crate::scrape::{MetricsDiscovery, MetricsLocation, ScrapeEvent, ScrapeTarget};
use crate::shutdown::Shutdown;
use crate::state::pool_views::PoolTable;
use crate::state::proxies::ProxyTables;

/// The interval at which departures and staleness are checked. Both are measured in seconds.
const AGEING_INTERVAL: Duration = Duration::from_millis(100);

/// The shortest time between two publications with new metrics only. The time is half of the
/// interval of messages to a proxy, so that the wait adds little to the age of metrics.
const METRICS_PUBLISH_INTERVAL: Duration = Duration::from_millis(25);

/// The maximum number of scrape events that wait: one for each endpoint of a full pool. A full
/// queue slows the scraper down.
pub const SCRAPE_EVENTS_MAX: usize = 1024;

/// Reports to the event loop of a pool the slots and generations that the previous leader assigned.
#[derive(Clone, Debug)]
pub struct AdoptionSender(mpsc::Sender<Adoption>);

/// Endpoints with the slots and generations that another daemon gave them.
#[derive(Debug)]
pub struct Adoption {
    endpoints: Vec<(EndpointRef, Instance)>,
    /// The channel that gets a message after the pool has published these endpoints.
    done: oneshot::Sender<()>,
}

/// A pool, and the sources that it gets its data from.
#[derive(Debug)]
pub struct PoolFeed {
    pub pool: Pool,
    /// The table where views are published.
    pub views: Arc<PoolTable>,
    /// The updates that proxies acknowledged.
    pub proxies: Arc<ProxyTables>,
    pub targets: watch::Sender<Arc<[ScrapeTarget]>>,
    /// The rules for finding the metrics of endpoints.
    pub scraping: MetricsDiscovery,
    /// The pool's configuration file, if it has one.
    pub config: Option<ConfigFile>,
    /// The source of the pool's objects, if there is one.
    pub objects: Option<ObjectsFile>,
    /// Slots and generations that another leader assigned.
    pub adoptions: mpsc::Receiver<Adoption>,
    /// Restarts and cleared caches that KV events show.
    pub emptied: mpsc::Receiver<ScrapeEvent>,
}

// === impl AdoptionSender ===

impl AdoptionSender {
    /// Creates a channel to a pool. The channel holds one message, because a daemon adopts
    /// endpoints only once per term.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<Adoption>) {
        let (sender, receiver) = mpsc::channel(1);
        (Self(sender), receiver)
    }

    /// Gives the endpoints of the pool these slots and generations. Returns when the pool has
    /// published them.
    pub async fn adopt(&self, endpoints: Vec<(EndpointRef, Instance)>) {
        let (done, published) = oneshot::channel();
        if self.0.send(Adoption { endpoints, done }).await.is_ok() {
            let _ = published.await; // a pool that has ended publishes nothing
        }
    }
}

// === impl PoolFeed ===

impl PoolFeed {
    pub async fn run(
        mut self,
        mut changes: SetChanges,
        mut scrapes: mpsc::Receiver<ScrapeEvent>,
        mut shutdown: Shutdown,
    ) {
        let mut proxies = self.proxies.streams.subscribe();
        let mut ageing = tokio::time::interval(AGEING_INTERVAL);
        ageing.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut batch = Vec::new();
        let mut published = LastPublished::default();
        loop {
            self.publish(&mut published);
            tokio::select! {
                Some(change) = changes.next() => self.apply_discovery(change),
                count = scrapes.recv_many(&mut batch, SCRAPE_EVENTS_MAX), if published.metrics_due() => {
                    for event in batch.drain(..) {
                        self.pool.observe(event, WallAndMonotonic::read());
                    }
                    if count == 0 {
                        tracing::error!("the scraper ended; metrics will be unknown");
                        return;
                    }
                }
                () = tokio::time::sleep_until(published.metrics_after), if !published.metrics_due() => {}
                Some(config) = OptionFuture::from(self.config.as_mut().map(ConfigFile::changed)) => {
                    self.apply_config(config, &mut published);
                }
                Some(objects) = OptionFuture::from(self.objects.as_mut().map(ObjectsFile::changed)) => {
                    self.apply_objects(objects);
                }
                Some(Adoption { endpoints, done }) = self.adoptions.recv() => {
                    self.pool.adopt(endpoints, WallAndMonotonic::read());
                    self.publish(&mut published);
                    let _ = done.send(()); // no receiver waits if the daemon stops meanwhile
                }
                Some(event) = self.emptied.recv() => self.apply_emptied(event),
                Ok(()) = proxies.changed(), if !self.pool.is_settled() => self.settle(),
                _ = ageing.tick() => {
                    self.settle();
                    self.pool.expire(WallAndMonotonic::read());
                }
                () = shutdown.begun() => return,
            }
        }
    }

    fn apply_discovery(&mut self, change: SetChange) {
        match change {
            SetChange::Reset(instances) => {
                tracing::info!(
                    pool = &**self.pool.name(),
                    endpoints = instances.len(),
                    "endpoints discovered"
                );
                self.pool
                    .replace_instances(instances, WallAndMonotonic::read());
            }
            SetChange::Unreadable(why) => {
                tracing::error!(
                    pool = &**self.pool.name(),
                    why,
                    "endpoints cannot be read; the last good set stays"
                );
                self.pool.set_discovery_error(why);
            }
        }
    }

    fn apply_config(
        &mut self,
        config: Result<CompiledConfig, String>,
        published: &mut LastPublished,
    ) {
        match config {
            Ok(CompiledConfig {
                pipeline,
                scraping,
                text,
            }) => {
                tracing::info!(
                    pool = &**self.pool.name(),
                    profiles = pipeline.profiles.len(),
                    plugins = pipeline.plugins.len(),
                    "configuration in force"
                );
                self.scraping = scraping;
                published.revision = 0; // the targets of the scraper may change
                self.pool.configure(Ok(pipeline), WallAndMonotonic::read());
                self.pool.set_config_text(text);
            }
            Err(why) => {
                tracing::error!(
                    pool = &**self.pool.name(),
                    why,
                    "configuration cannot be used; the last good one stays"
                );
                self.pool.configure(Err(why), WallAndMonotonic::read());
            }
        }
    }

    /// Applies this event and all that wait, so that a pool whose engines are all cleared at once
    /// is published once.
    fn apply_emptied(&mut self, first: ScrapeEvent) {
        self.pool.observe(first, WallAndMonotonic::read());
        for _ in 0..EMPTIED_MAX {
            let Ok(event) = self.emptied.try_recv() else {
                return;
            };
            self.pool.observe(event, WallAndMonotonic::read());
        }
    }

    fn apply_objects(&mut self, objects: Result<PoolObjects, String>) {
        let pool = &**self.pool.name();
        match &objects {
            Ok(objects) => objects.log(pool),
            Err(why) => {
                tracing::error!(pool, why, "objects cannot be used; the last good ones stay");
            }
        }
        self.pool.set_objects(objects, WallAndMonotonic::read());
    }

    fn settle(&mut self) {
        let proxies = &self.proxies;
        let name = Arc::clone(self.pool.name());
        self.pool.settle(
            |revision| proxies.acknowledged(&name, revision),
            WallAndMonotonic::read(),
        );
    }

    fn publish(&mut self, published: &mut LastPublished) {
        let Some(view) = self.pool.take_view() else {
            return;
        };
        published.metrics_after = Instant::now() + METRICS_PUBLISH_INTERVAL;
        if view.revision != published.revision {
            published.revision = view.revision;
            published.log_unconfirmed(&view);
            self.targets.send_replace(targets(&view, &self.scraping));
        }
        self.views.publish(view);
    }
}

/// The state that was published last.
#[derive(Debug)]
struct LastPublished {
    revision: u64,
    metrics_after: Instant,
    /// The number of unconfirmed endpoints in the pool.
    unconfirmed: usize,
}

impl Default for LastPublished {
    fn default() -> Self {
        Self {
            revision: 0,
            metrics_after: Instant::now(),
            unconfirmed: 0,
        }
    }
}

impl LastPublished {
    fn metrics_due(&self) -> bool {
        Instant::now() >= self.metrics_after
    }

    /// Logs when the number of unconfirmed endpoints in the pool changes.
    fn log_unconfirmed(&mut self, view: &PoolView) {
        let unconfirmed = view
            .members
            .iter()
            .filter_map(|member| member.instance.unconfirmed.as_deref());
        let why = unconfirmed.clone().next();
        let count = unconfirmed.count();
        let before = std::mem::replace(&mut self.unconfirmed, count);
        let pool = &*view.name;
        let endpoints = view.members.len();
        match why {
            Some(why) if count != before => tracing::warn!(
                pool,
                unconfirmed = count,
                endpoints,
                why,
                "discovery reports endpoints as not ready; they stay while they answer, for at most {} s",
                UNCONFIRMED_MAX.as_secs()
            ),
            None if before > 0 => {
                tracing::info!(pool, endpoints, "discovery confirms all endpoints again");
            }
            _ => {}
        }
    }
}

fn targets(view: &PoolView, scraping: &MetricsDiscovery) -> Arc<[ScrapeTarget]> {
    view.members
        .iter()
        .filter_map(|member| target(member, scraping))
        .collect()
}

fn target(member: &PoolMember, scraping: &MetricsDiscovery) -> Option<ScrapeTarget> {
    let PoolMember { id, instance, .. } = member;
    let labels: Vec<(Box<str>, Box<str>)> = instance
        .labels
        .iter()
        .map(|(k, v)| (k.as_str().into(), v.as_str().into()))
        .collect();
    let engine = scraping.engines.of_labels(&labels);
    let Located { scheme, port, path } = &instance.metrics;
    let location = MetricsLocation {
        https: scheme.map_or(scraping.location.https, |s| s == MetricsScheme::Https),
        port: port.or(scraping.location.port),
        path: path.clone().or_else(|| scraping.location.path.clone()),
    };
    let url = location.url(instance.address, &engine);
    let url = url
        .inspect_err(
            |why| tracing::error!(endpoint = instance.name, %why, "endpoint cannot be scraped"),
        )
        .ok()?;
    Some(ScrapeTarget {
        id: *id,
        name: instance.name.as_str().into(),
        url,
        engine,
    })
}
