//! Starts one pool: its state, its scraper, and the event loop that connects them.

use std::sync::Arc;
use std::time::Duration;

use scheduler::objects::ObjectsSpec;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::config::{CompiledConfig, ConfigFile, LatencyOptions};
use crate::error::FatalError;
use crate::kv_events::{EMPTIED_MAX, KvEventPorts, KvEventStats, KvEventSubscriber};
use crate::pool::discovery_source::{FollowedEndpoints, WatchedComponents};
use crate::pool::event_loop::{Adoption, AdoptionSender, PoolFeed, SCRAPE_EVENTS_MAX};
use crate::pool::objects::{ObjectSelection, ObjectsFile, ObjectsSource, PoolName, PoolObjects};
use crate::pool::pools_file::PoolSource;
use crate::pool::writer::{Pool, PoolSettings, WallAndMonotonic};
use crate::scrape::MetricsDiscovery;
use crate::scrape::{ScrapeConfig, Scraper};
use crate::shutdown::Shutdown;
use crate::state::reports::ScraperHandle;
use crate::state::shared::DaemonState;
use crate::state::snapshot_file::SavedPool;

/// The maximum time that start-up waits for the first objects from a cluster. A reachable API
/// server answers within milliseconds.
const FIRST_OBJECTS_WAIT: Duration = Duration::from_secs(3);

/// The scrape settings of all pools.
#[derive(Clone, Debug)]
pub struct ScrapeSettings {
    pub scraper: ScrapeConfig,
    /// The age above which metrics are unknown.
    pub staleness_max: Duration,
    pub kv_events: KvEventPorts,
}

/// A pool that is ready to start.
pub struct PoolTask {
    pool: Pool,
    endpoints: FollowedEndpoints,
    scraping: MetricsDiscovery,
    config: Option<ConfigFile>,
    objects: Option<ObjectsFile>,
    scraper: Scraper,
    handle: ScraperHandle,
    kv_events: KvEventPorts,
    adoptions: (AdoptionSender, mpsc::Receiver<Adoption>),
}

// === impl PoolTask ===

impl PoolTask {
    /// Reads all files and settings that must be valid at start. Later, invalid content is only
    /// reported.
    ///
    /// # Errors
    /// Returns [`FatalError::Usage`] if a file or a setting is invalid.
    pub async fn prepare(
        source: PoolSource,
        endpoints: FollowedEndpoints,
        saved: Option<&SavedPool>,
        scrape: &ScrapeSettings,
        latency: &LatencyOptions,
        served: &Arc<[PoolName]>,
    ) -> Result<Self, FatalError> {
        let selection = ObjectSelection {
            pool: source.named(),
            served: Arc::clone(served),
            strict_models: source.objects.strict_models,
        };
        let mut config = source
            .config
            .map(|path| ConfigFile::new(path, latency.clone()));
        let compiled = match &mut config {
            Some(file) => file.changed().await,
            None => CompiledConfig::default_config(latency),
        }
        .map_err(FatalError::Usage)?;
        let (objects, found) = first_objects(source.objects, &source.name, selection).await?;
        let mut pool = Pool::new(PoolSettings {
            name: source.name.into(),
            pipeline: compiled.pipeline,
            config_file: config
                .as_ref()
                .map(|file| file.path().display().to_string().into()),
            objects: found,
            objects_file: objects.as_ref().map(|file| file.described().into()),
            staleness_max: scrape.staleness_max,
            // The first generation is random, and a daemon uses only thousands of the 2^32 values.
            // So two starts, or two daemons with one lease, practically never give the same slot
            // and generation to different endpoints.
            generation_first: rand::random(),
        });
        pool.set_config_text(compiled.text);
        if let Some(saved) = saved {
            let endpoints = saved.endpoints();
            tracing::info!(
                pool = &**pool.name(),
                endpoints = endpoints.len(),
                "restored from the snapshot file"
            );
            pool.adopt(endpoints, WallAndMonotonic::read());
        }
        let (scraper, busy, stats) =
            Scraper::try_new(&scrape.scraper).map_err(|e| FatalError::Usage(e.to_string()))?;
        Ok(Self {
            pool,
            endpoints,
            scraping: compiled.scraping,
            config,
            objects,
            scraper,
            handle: ScraperHandle {
                busy,
                stats,
                kv_events: Arc::new(KvEventStats::default()),
            },
            kv_events: scrape.kv_events,
            adoptions: AdoptionSender::channel(),
        })
    }

    /// Returns the pool's name and the handle of its scraper.
    #[must_use]
    pub fn scraper(&self) -> (Arc<str>, ScraperHandle) {
        (Arc::clone(self.pool.name()), self.handle.clone())
    }

    /// Returns the pool's name and its discovered components.
    #[must_use]
    pub fn components(&self) -> (Arc<str>, WatchedComponents) {
        (
            Arc::clone(self.pool.name()),
            self.endpoints.components.clone(),
        )
    }

    /// Returns the pool's name, and the sender that gives its endpoints the slots of another
    /// leader.
    #[must_use]
    pub fn adoptions(&self) -> (Arc<str>, AdoptionSender) {
        (Arc::clone(self.pool.name()), self.adoptions.0.clone())
    }

    /// Starts the tasks of the pool.
    pub fn spawn(
        self,
        tasks: &mut JoinSet<&'static str>,
        shared: &Arc<DaemonState>,
        shutdown: &Shutdown,
    ) {
        let (targets, targets_seen) = watch::channel(Arc::from([]));
        let (events, scrapes) = mpsc::channel(SCRAPE_EVENTS_MAX);
        let (emptied, emptied_seen) = mpsc::channel(EMPTIED_MAX);
        let subscriber = KvEventSubscriber {
            pool: Arc::clone(self.pool.name()),
            views: Arc::clone(&shared.pools),
            ports: self.kv_events,
            stats: Arc::clone(&self.handle.kv_events),
            emptied,
        };
        let feed = PoolFeed {
            pool: self.pool,
            views: Arc::clone(&shared.pools),
            proxies: Arc::clone(&shared.proxies),
            targets,
            scraping: self.scraping,
            config: self.config,
            objects: self.objects,
            adoptions: self.adoptions.1,
            emptied: emptied_seen,
        };
        let changes = self.endpoints.changes;
        let scraper = self.scraper;
        let stop = shutdown.clone();
        tasks.spawn(async move {
            feed.run(changes, scrapes, stop).await;
            "a pool"
        });
        tasks.spawn(async move {
            scraper.run(targets_seen, events).await;
            "a scraper"
        });
        let stop = shutdown.clone();
        tasks.spawn(async move {
            subscriber.run(stop).await;
            "a subscriber to KV events"
        });
    }
}

/// Returns the first objects of a pool, and the source that reports their changes.
async fn first_objects(
    source: ObjectsSource,
    pool: &str,
    selection: ObjectSelection,
) -> Result<(Option<ObjectsFile>, PoolObjects), FatalError> {
    let none = || PoolObjects {
        spec: ObjectsSpec {
            strict_models: source.strict_models,
            ..ObjectsSpec::default()
        },
        ..PoolObjects::default()
    };
    let (objects, found) = if let Some(namespace) = source.kubernetes {
        let mut objects = ObjectsFile::in_cluster(namespace, pool.into(), selection)
            .await
            .map_err(FatalError::Usage)?;
        // The pool starts without objects if the cluster does not answer, because requests must not
        // wait for the cluster.
        let found = tokio::time::timeout(FIRST_OBJECTS_WAIT, objects.changed()).await;
        match found.unwrap_or_else(|_| Err("no answer yet".to_owned())) {
            Ok(found) => (objects, found),
            Err(why) => {
                tracing::error!(
                    pool,
                    why,
                    "objects are not available yet; starting without objects"
                );
                return Ok((Some(objects), none()));
            }
        }
    } else if let Some(path) = source.path {
        let mut files = ObjectsFile::new(path, pool.into(), selection);
        let found = files.changed().await.map_err(FatalError::Usage)?;
        (files, found)
    } else {
        return Ok((None, none()));
    };
    found.log(pool);
    Ok((Some(objects), found))
}
