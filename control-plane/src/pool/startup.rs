//! Start of one pool: its state, its scraper, and the event loop that connects them.

use std::sync::Arc;
use std::time::Duration;

use scheduler::objects::ObjectsSpec;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::config::{CompiledConfig, ConfigFile, LatencyOptions};
use crate::error::FatalError;
use crate::pool::event_loop::{Adoption, AdoptionSender, PoolFeed, SCRAPE_EVENTS_MAX};
use crate::pool::objects::{ObjectSelection, ObjectsFile, ObjectsSource, PoolName, PoolObjects};
use crate::pool::pools_file::PoolSource;
use crate::pool::watched::{EndpointSource, WatchedComponents};
use crate::pool::writer::{Pool, PoolSettings, WallAndMonotonic};
use crate::scrape::MetricsDiscovery;
use crate::scrape::{EndpointTls, ScrapeConfig, ScrapeIntervals, Scraper};
use crate::shutdown::Shutdown;
use crate::state::shared::{DaemonState, ScraperHandle};
use crate::state::snapshot_file::SavedPool;

/// How long start-up waits for the first objects of a cluster: a reachable API server answers in
/// milliseconds.
const FIRST_OBJECTS_WAIT: Duration = Duration::from_secs(3);

/// The scrape settings of all pools.
#[derive(Clone, Debug)]
pub struct ScrapeSettings {
    pub intervals: ScrapeIntervals,
    /// TLS towards endpoints.
    pub tls: EndpointTls,
    /// Metrics older than this are unknown.
    pub staleness_max: Duration,
}

/// A pool that is ready to start.
pub struct PoolTask {
    pool: Pool,
    source: EndpointSource,
    scraping: MetricsDiscovery,
    config: Option<ConfigFile>,
    objects: Option<ObjectsFile>,
    scraper: Scraper,
    handle: ScraperHandle,
    adoptions: (AdoptionSender, mpsc::Receiver<Adoption>),
}

// === impl PoolTask ===

impl PoolTask {
    /// Reads everything that must be valid at start. Later, invalid content is only reported.
    ///
    /// # Errors
    /// [`FatalError::Usage`] says what is invalid.
    pub async fn prepare(
        (pool, source): (PoolSource, EndpointSource),
        saved: Option<&SavedPool>,
        (scrape, latency): (&ScrapeSettings, &LatencyOptions),
        served: &Arc<[PoolName]>,
    ) -> Result<Self, FatalError> {
        let selection = ObjectSelection {
            pool: pool.named(),
            served: Arc::clone(served),
            strict_models: pool.objects.strict_models,
        };
        let PoolSource {
            name,
            config,
            objects,
            ..
        } = pool;
        let mut config = config.map(|path| ConfigFile::new(path, latency.clone()));
        let CompiledConfig {
            pipeline,
            scraping,
            text,
        } = match &mut config {
            Some(file) => file.changed().await,
            None => CompiledConfig::default_config(latency),
        }
        .map_err(FatalError::Usage)?;
        let (objects, found) = first_objects(objects, &name, selection).await?;
        let config_file = config
            .as_ref()
            .map(|file| file.path().display().to_string().into());
        // Random, so that no two starts, and no two daemons of one lease, give the same slot and
        // generation to different endpoints: they give out thousands of 2^32.
        let generation_first = rand::random();
        let settings = PoolSettings {
            name: name.into(),
            pipeline,
            config_file,
            staleness_max: scrape.staleness_max,
            generation_first,
        };
        let objects_file = objects.as_ref().map(|file| file.described().into());
        let mut pool = Pool::new(settings).with_objects(objects_file, found);
        pool.set_config_text(text);
        if let Some(saved) = saved {
            let endpoints = saved.endpoints();
            tracing::info!(
                pool = &**pool.name(),
                endpoints = endpoints.len(),
                "restored from the snapshot file"
            );
            pool.restore(endpoints, WallAndMonotonic::read());
        }
        let config_of_scraper = ScrapeConfig {
            intervals: scrape.intervals,
            tls: scrape.tls.clone(),
            ..ScrapeConfig::default()
        };
        let (scraper, busy, stats) =
            Scraper::try_new(&config_of_scraper).map_err(|e| FatalError::Usage(e.to_string()))?;
        let handle = ScraperHandle { busy, stats };
        let adoptions = AdoptionSender::channel();
        Ok(Self {
            pool,
            source,
            scraping,
            config,
            objects,
            scraper,
            handle,
            adoptions,
        })
    }

    /// The pool's name and the handle of its scraper.
    #[must_use]
    pub fn scraper(&self) -> (Arc<str>, ScraperHandle) {
        (Arc::clone(self.pool.name()), self.handle.clone())
    }

    /// The pool's name and its discovered components.
    #[must_use]
    pub fn components(&self) -> (Arc<str>, WatchedComponents) {
        (Arc::clone(self.pool.name()), self.source.components.clone())
    }

    /// The pool's name, and the way to give its endpoints the slots of another leader.
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
        let Self {
            pool,
            source,
            scraping,
            config,
            objects,
            scraper,
            handle: _,
            adoptions: (_, adoptions),
        } = self;
        let (targets, targets_seen) = watch::channel(Arc::from([]));
        let (events, scrapes) = mpsc::channel(SCRAPE_EVENTS_MAX);
        let feed = PoolFeed {
            pool,
            shared: Arc::clone(shared),
            targets,
            scraping,
            config,
            objects,
            adoptions,
        };
        let stop = shutdown.clone();
        tasks.spawn(async move {
            feed.run(source.changes, scrapes, stop).await;
            "a pool"
        });
        tasks.spawn(async move {
            scraper.run(targets_seen, events).await;
            "a scraper"
        });
    }
}

/// The first objects of a pool, and the source that follows them.
async fn first_objects(
    source: ObjectsSource,
    pool: &str,
    selection: ObjectSelection,
) -> Result<(Option<ObjectsFile>, PoolObjects), FatalError> {
    let ObjectsSource {
        path,
        kubernetes,
        strict_models,
    } = source;
    let none = || PoolObjects {
        spec: ObjectsSpec {
            strict_models,
            ..ObjectsSpec::default()
        },
        ..PoolObjects::default()
    };
    if let Some(namespace) = kubernetes {
        let mut objects = ObjectsFile::in_cluster(namespace, pool.into(), selection)
            .await
            .map_err(FatalError::Usage)?;
        // Start without objects if the cluster does not answer: requests must not wait for it.
        let found = tokio::time::timeout(FIRST_OBJECTS_WAIT, objects.changed()).await;
        let found = found.unwrap_or_else(|_| Err("no answer yet".to_owned()));
        let found = found.inspect_err(|why| {
            tracing::error!(
                pool,
                why,
                "objects are not available yet; starting without them"
            );
        });
        let found = found.inspect(|found| found.log(pool));
        return Ok((Some(objects), found.unwrap_or_else(|_| none())));
    }
    let Some(path) = path else {
        return Ok((None, none()));
    };
    let mut files = ObjectsFile::new(path, pool.into(), selection);
    let found = files.changed().await.map_err(FatalError::Usage)?;
    found.log(pool);
    Ok((Some(files), found))
}
