//! The scraper: reads the load of a pool's endpoints at an adaptive pace and sends the load to the
//! pool.
//!
//! ```text
//!  watch<targets> ──▶ run: what is due ──▶ tasks: fetch ─▶ exposition ─▶ extract ──▶ run ──▶ mpsc<ScrapeEvent>
//!  picks ───────────▶ (BusyHint)                                (pure)     (pure)    pace, restarts
//! ```
//! A *page* is the answer of an engine to a request for its metrics, in the Prometheus text format.
//! One loop owns the state of all endpoints. Tasks only fetch and parse, each within a deadline.
//! There is at most one task for each endpoint, and at most [`SCRAPES_IN_FLIGHT_MAX`] in total. The
//! scraper stores no metrics. The pool decides by `observed_at` whether metrics are too old. A
//! failed scrape is an event of its own. The old metrics stay valid until they are stale.

pub mod engine;
mod engine_models;
pub mod exposition;
pub mod extract;
mod fetch;
pub mod http_client;
mod metric_spec;
mod pace;
mod stats;
mod target;
mod tls;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use scheduler::{EndpointMetrics, EndpointRef};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

pub use fetch::{FailReason, PAGE_BYTES_MAX};
pub use metric_spec::{InvalidMetricSpec, MetricSpec, SPEC_BYTES_MAX};
pub use pace::{SCRAPES_PER_SECOND_MAX, ScrapeIntervals};
pub use stats::{DURATION_BUCKETS_MS, ScrapeCounts, ScrapeStats};
pub use target::{InvalidMetricsPath, MetricsDiscovery, MetricsLocation, MetricsUrl, ScrapeTarget};
pub use tls::{EndpointTls, InvalidTls};

pub(crate) use engine_models::BASE_MODELS_MAX;
use engine_models::EngineModels;
use extract::RestartWatch;
use fetch::{FetchHabit, PageFetcher, ScrapedPage};
use pace::{ScrapeOutcome, ScrapePace};

/// The maximum number of scrapes that run at the same time. If all 1,024 endpoints of a full pool
/// hang, each of them occupies a scrape for the deadline (1 s) and then pauses for 5 s. So a sixth
/// of the endpoints occupy scrapes at any time, and working endpoints are still scraped in time.
pub const SCRAPES_IN_FLIGHT_MAX: usize = 256;

/// The maximum length of the queue of hints. Further hints are dropped, because one hint in two
/// seconds is enough for an endpoint.
const HINTS_MAX: usize = 1024;

/// The maximum time that one scrape may take. A page that takes longer would be stale when it
/// arrives. llm-d uses the same limit.
const DEADLINE: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct ScrapeConfig {
    pub intervals: ScrapeIntervals,
    /// The maximum time for one scrape, including a second request for the whole page.
    pub deadline: Duration,
    /// The TLS settings towards endpoints.
    pub tls: EndpointTls,
}

/// The metrics that an endpoint reports.
#[derive(Clone, Debug, PartialEq)]
pub struct ScrapedMetrics {
    /// The metrics. At least one of queue, running requests and KV-cache utilization is known.
    pub metrics: EndpointMetrics,
    /// The start of the process in Unix seconds, if the engine reports it.
    pub process_start: Option<f64>,
    /// The prompt tokens that the engine has computed since it started, if it reports them.
    pub computed_tokens: Option<u64>,
    /// The adapters that the engine is known to have, sorted, loaded or not.
    pub adapters: Arc<[Box<str>]>,
    /// The time when the answer began to arrive. The engine wrote the page just before, so the page
    /// does not include later picks.
    pub observed_at: Instant,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ScrapeEvent {
    Metrics(EndpointRef, ScrapedMetrics),
    /// A failed scrape, its reason, and the number of failed scrapes in a row.
    Failed(EndpointRef, FailReason, u32),
    /// Another process answers at the address. The scraper drops the first page of the new process,
    /// because that page belongs to the next generation.
    Restarted(EndpointRef),
    /// KV events show that the same process cleared its cache.
    Cleared(EndpointRef),
}

/// Reports picks to a scraper, so that the scraper scrapes the picked endpoint more often. A hint
/// is cheap. Hints are dropped when the queue is full.
#[derive(Clone, Debug)]
pub struct BusyHint(mpsc::Sender<EndpointRef>);

/// Scrapes the endpoints of one pool.
#[derive(Debug)]
pub struct Scraper {
    fetcher: PageFetcher,
    intervals: ScrapeIntervals,
    deadline: Duration,
    hints: mpsc::Receiver<EndpointRef>,
}

/// An endpoint and its scrape state.
struct ScrapeEntry {
    target: ScrapeTarget,
    /// A number that distinguishes this entry from an earlier entry with the same id.
    ticket: u64,
    /// The time when the next scrape begins; `None` during a scrape.
    due: Option<Instant>,
    pace: ScrapePace,
    habit: FetchHabit,
    restarts: RestartWatch,
    models: EngineModels,
}

/// All entries, and the order in which they are due.
#[derive(Default)]
struct ScrapeSchedule {
    by_id: HashMap<EndpointRef, ScrapeEntry>,
    due: BTreeSet<(Instant, EndpointRef)>,
    tickets: u64,
}

struct FinishedScrape {
    id: EndpointRef,
    ticket: u64,
    took: Duration,
    result: Result<ScrapedPage, FailReason>,
    models: EngineModels,
}

impl Default for ScrapeConfig {
    fn default() -> Self {
        Self {
            intervals: ScrapeIntervals::default(),
            deadline: DEADLINE,
            tls: EndpointTls::default(),
        }
    }
}

impl BusyHint {
    /// Reports that the endpoint was picked.
    pub fn hint(&self, id: EndpointRef) {
        let _ = self.0.try_send(id); // a full queue has hints enough
    }
}

impl Scraper {
    /// Creates a scraper, the handle for hints, and its counters.
    ///
    /// # Errors
    /// Returns [`InvalidTls`] when the TLS files cannot be used.
    pub fn try_new(
        config: &ScrapeConfig,
    ) -> Result<(Self, BusyHint, Arc<ScrapeStats>), InvalidTls> {
        let (sender, hints) = mpsc::channel(HINTS_MAX);
        let stats = Arc::new(ScrapeStats::default());
        let fetcher = PageFetcher {
            client: tls::client(&config.tls, config.deadline)?,
            stats: Arc::clone(&stats),
        };
        Ok((
            Self {
                fetcher,
                intervals: config.intervals,
                deadline: config.deadline,
                hints,
            },
            BusyHint(sender),
            stats,
        ))
    }

    /// Scrapes until the sender of `targets` or the receiver of `events` is dropped. A receiver
    /// that is too slow slows the scraper down.
    pub async fn run(
        mut self,
        mut targets: watch::Receiver<Arc<[ScrapeTarget]>>,
        events: mpsc::Sender<ScrapeEvent>,
    ) {
        let mut rows = ScrapeSchedule::default();
        let mut in_flight = JoinSet::new();
        let first = Arc::clone(&targets.borrow_and_update());
        rows.reconcile(&first, self.intervals);
        loop {
            self.start_due(&mut rows, &mut in_flight);
            let next = rows
                .next_due()
                .filter(|_| in_flight.len() < SCRAPES_IN_FLIGHT_MAX);
            tokio::select! {
                changed = targets.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let now = Arc::clone(&targets.borrow_and_update());
                    rows.reconcile(&now, self.intervals);
                }
                Some(done) = in_flight.join_next(), if !in_flight.is_empty() => {
                    let event = done.ok().and_then(|done| self.finish(&mut rows, done));
                    if let Some(event) = event && events.send(event).await.is_err() {
                        return;
                    }
                }
                Some(id) = self.hints.recv() => rows.hint(id, self.intervals),
                () = wait_until(next) => {}
                () = events.closed() => return,
            }
        }
    }

    fn start_due(&self, rows: &mut ScrapeSchedule, in_flight: &mut JoinSet<FinishedScrape>) {
        let now = Instant::now();
        while in_flight.len() < SCRAPES_IN_FLIGHT_MAX {
            let Some(row) = rows.take_due(now) else {
                return;
            };
            let fetcher = self.fetcher.clone();
            let target = row.target.clone();
            let habit = row.habit;
            let id = row.target.id;
            let ticket = row.ticket;
            let deadline = self.deadline;
            let mut models = row.models.clone();
            in_flight.spawn(async move {
                let begun = Instant::now();
                let result = timeout(deadline, fetcher.scrape(&target, habit))
                    .await
                    .unwrap_or(Err(FailReason::Timeout));
                let took = begun.elapsed();
                fetcher.stats.poll(took, result.as_ref().err());
                let lora = result
                    .as_ref()
                    .ok()
                    .and_then(|page| page.reading.metrics.lora.as_ref());
                if let Some(lora) = lora.filter(|lora| models.is_due(lora)) {
                    models.read(
                        fetcher.models_list(&target).await.as_deref(),
                        &lora.base_models,
                    );
                }
                FinishedScrape {
                    id,
                    ticket,
                    took,
                    result,
                    models,
                }
            });
        }
    }

    /// Processes a finished scrape. Returns `None` if its endpoint has been removed since the
    /// scrape began.
    fn finish(&self, rows: &mut ScrapeSchedule, done: FinishedScrape) -> Option<ScrapeEvent> {
        let row = rows
            .by_id
            .get_mut(&done.id)
            .filter(|row| row.ticket == done.ticket)?;
        let now = Instant::now();
        let event = match done.result {
            Err(reason) => row.fail(reason, done.took, now),
            Ok(page) => row.succeed(page, done.models, done.took, now),
        };
        if let ScrapeEvent::Restarted(_) = &event {
            self.fetcher.stats.restart();
        }
        let pace = row.pace;
        let pause = pace.pause(self.intervals, rows.by_id.len(), now, chance());
        rows.schedule(done.id, now + pause);
        Some(event)
    }
}

impl ScrapeEntry {
    fn fail(&mut self, reason: FailReason, took: Duration, now: Instant) -> ScrapeEvent {
        let outcome = match reason {
            FailReason::Connect(_) => ScrapeOutcome::Away,
            _ => ScrapeOutcome::Failed,
        };
        self.pace.record(outcome, took, now);
        let failures = self.pace.failures();
        if failures == 1 {
            tracing::warn!(endpoint = &*self.target.name, %reason, "scrape failed");
        }
        ScrapeEvent::Failed(self.target.id, reason, failures)
    }

    fn succeed(
        &mut self,
        page: ScrapedPage,
        mut models: EngineModels,
        took: Duration,
        now: Instant,
    ) -> ScrapeEvent {
        let endpoint = &*self.target.name;
        let id = self.target.id;
        let failures = self.pace.failures();
        if failures > 0 {
            tracing::info!(endpoint, failures, "scrape works again");
        }
        let outcome = if page.reading.is_busy() {
            ScrapeOutcome::Busy
        } else {
            ScrapeOutcome::Idle
        };
        self.pace.record(outcome, took, now);
        if self.restarts.observe(&page.reading) {
            self.habit = FetchHabit::default();
            self.models = EngineModels::default();
            return ScrapeEvent::Restarted(id);
        }
        self.habit = page.habit;
        let mut metrics = page.reading.metrics;
        if let Some(lora) = &mut metrics.lora {
            models.add_to(lora);
        }
        let adapters = models.adapters();
        self.models = models;
        ScrapeEvent::Metrics(
            id,
            ScrapedMetrics {
                metrics,
                process_start: page.reading.process_start,
                computed_tokens: page.reading.computed_tokens,
                adapters,
                observed_at: page.observed_at,
            },
        )
    }
}

impl ScrapeSchedule {
    /// Applies a new set of targets. Unchanged targets keep their state; all others start new.
    fn reconcile(&mut self, targets: &[ScrapeTarget], intervals: ScrapeIntervals) {
        let mut old = std::mem::take(&mut self.by_id);
        self.due.clear();
        let stays = |target: &ScrapeTarget, row: &ScrapeEntry| {
            row.target.url == target.url && Arc::ptr_eq(&row.target.engine, &target.engine)
        };
        let new = targets
            .iter()
            .filter(|target| !old.get(&target.id).is_some_and(|row| stays(target, row)))
            .count();
        let now = Instant::now();
        for target in targets {
            let row = match old.remove(&target.id).filter(|row| stays(target, row)) {
                Some(row) => ScrapeEntry {
                    target: target.clone(),
                    ..row
                },
                None => {
                    self.tickets += 1;
                    ScrapeEntry {
                        target: target.clone(),
                        ticket: self.tickets,
                        due: Some(now + pace::first_pause(intervals, new, chance())),
                        pace: ScrapePace::default(),
                        habit: FetchHabit::default(),
                        restarts: RestartWatch::default(),
                        models: EngineModels::default(),
                    }
                }
            };
            self.due.extend(row.due.map(|due| (due, target.id)));
            self.by_id.insert(target.id, row);
        }
    }

    fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    /// Returns the first entry that is due, if any, and marks it as being scraped.
    fn take_due(&mut self, now: Instant) -> Option<&ScrapeEntry> {
        let &(due, id) = self.due.first().filter(|(due, _)| *due <= now)?;
        self.due.remove(&(due, id));
        let row = self.by_id.get_mut(&id)?;
        row.due = None;
        Some(row)
    }

    fn schedule(&mut self, id: EndpointRef, due: Instant) {
        let Some(row) = self.by_id.get_mut(&id) else {
            return;
        };
        if let Some(before) = row.due.replace(due) {
            self.due.remove(&(before, id));
        }
        self.due.insert((due, id));
    }

    /// Brings the next scrape of a picked endpoint forward, unless the endpoint is failing.
    fn hint(&mut self, id: EndpointRef, intervals: ScrapeIntervals) {
        let endpoints = self.by_id.len();
        let Some(row) = self.by_id.get_mut(&id) else {
            return;
        };
        let now = Instant::now();
        row.pace.busy(now);
        let soon = now + row.pace.pause(intervals, endpoints, now, chance());
        if row.pace.failures() == 0 && row.due.is_some_and(|due| soon < due) {
            self.schedule(id, soon);
        }
    }
}

async fn wait_until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn chance() -> f64 {
    rand::rng().random()
}
