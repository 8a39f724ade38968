//! Traffic and latency of the last hour, in memory: a ring of samples for each pool.
//!
//! A sample is the difference of two readings of the counters. The first report of a VM is left
//! out, because it counts events from before this daemon ran.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use proto::HISTOGRAM_BOUNDS;
use tokio::time::{Instant, MissedTickBehavior};

use crate::shutdown::Shutdown;
use crate::state::counters::{CounterTotals, ModelTotals, TotalsHistogram};
use crate::state::pool_views::PoolTable;
use crate::state::reports::RequestReports;

/// The time between samples. Proxies report once a second, so each sample has several reports.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);

/// The maximum number of samples kept of one pool: one hour. An hour of samples takes about 80 KB.
pub const SAMPLES_MAX: usize = 360;

/// Samples the counters of all pools.
#[derive(Debug)]
pub struct TrafficRecorder {
    pools: Arc<PoolTable>,
    reports: Arc<RequestReports>,
    history: Mutex<TrafficHistory>,
}

/// The samples of all pools.
#[derive(Debug, Default)]
pub struct TrafficHistory {
    pools: BTreeMap<Arc<str>, PoolTraffic>,
}

#[derive(Debug, Default)]
struct PoolTraffic {
    samples: VecDeque<TrafficSample>,
    before: Option<(Instant, TrafficReading)>,
}

/// The cumulative numbers that a sample is computed from.
#[derive(Clone, Debug, Default)]
struct TrafficReading {
    all: ModelTotals,
    refused: u64,
}

/// The traffic of one pool within an interval. The type has many fields because each is a line in a
/// chart.
#[derive(Clone, Debug, PartialEq)]
pub struct TrafficSample {
    /// The end of the interval.
    pub at: SystemTime,
    /// The length of the interval, in seconds.
    pub seconds: f64,
    /// The number of requests that began.
    pub requests: u64,
    /// The number of answers with status 400 to 499.
    pub client_errors: u64,
    /// The number of answers with status 500 and above.
    pub server_errors: u64,
    /// The number of requests that proxies refused.
    pub refused: u64,
    /// The number of prompt tokens, as engines reported it.
    pub prompt_tokens: u64,
    /// The number of prompt tokens that engines had cached.
    pub cached_tokens: u64,
    /// The number of generated tokens.
    pub output_tokens: u64,
    /// The number of requests in flight at the end of the interval.
    pub running: u64,
    /// The number of requests that flow control held at the end of the interval.
    pub held: u64,
    /// The numbers of requests with an SLO: met, missed, shed.
    pub slo: [u64; 3],
    /// The time to the first token.
    pub ttft: Option<LatencyQuantiles>,
    /// The time for each further token.
    pub tpot: Option<LatencyQuantiles>,
    /// The time of whole exchanges.
    pub duration: Option<LatencyQuantiles>,
}

/// Quantiles in ms, interpolated within the buckets of a histogram as Prometheus does it. Above the
/// last bound there is no bucket width, so the bound itself is used for all greater values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyQuantiles {
    pub p50: f64,
    pub p99: f64,
}

// === impl TrafficRecorder ===

impl TrafficRecorder {
    #[must_use]
    pub fn new(pools: Arc<PoolTable>, reports: Arc<RequestReports>) -> Arc<Self> {
        Arc::new(Self {
            pools,
            reports,
            history: Mutex::default(),
        })
    }

    /// Takes a sample of every pool each [`SAMPLE_INTERVAL`] until `shutdown`.
    pub async fn run(self: Arc<Self>, mut shutdown: Shutdown) {
        let mut tick = tokio::time::interval(SAMPLE_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                now = tick.tick() => self.sample(now),
                () = shutdown.begun() => return,
            }
        }
    }

    pub fn sample(&self, now: Instant) {
        for pool in &self.pools.names {
            let (totals, earlier) = {
                let counters = self.reports.counters();
                (counters.totals(pool, now), counters.first_reports(pool))
            };
            self.history().record(pool, &totals, &earlier, now);
        }
    }

    pub fn history(&self) -> MutexGuard<'_, TrafficHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl TrafficHistory ===

impl TrafficHistory {
    /// Adds a sample of `pool`: the difference between `totals` and the totals of the last call.
    /// `earlier` has the counts from before this daemon ran. The first call adds no sample.
    pub fn record(
        &mut self,
        pool: &Arc<str>,
        totals: &CounterTotals,
        earlier: &CounterTotals,
        now: Instant,
    ) {
        let reading =
            TrafficReading::from_totals(totals).minus(&TrafficReading::from_totals(earlier));
        let running = totals.models.values().map(|model| model.running).sum();
        let held = totals.bands.values().map(|band| band.held).sum();
        let traffic = self.pools.entry(Arc::clone(pool)).or_default();
        if let Some((since, before)) = traffic.before.replace((now, reading.clone())) {
            while traffic.samples.len() >= SAMPLES_MAX {
                traffic.samples.pop_front();
            }
            let seconds = now.saturating_duration_since(since).as_secs_f64();
            traffic
                .samples
                .push_back(reading.minus(&before).sample(seconds, running, held));
        }
    }

    /// Returns the samples of each pool, oldest first.
    pub fn pools(&self) -> impl Iterator<Item = (&Arc<str>, impl Iterator<Item = &TrafficSample>)> {
        self.pools
            .iter()
            .map(|(pool, traffic)| (pool, traffic.samples.iter()))
    }
}

// === impl TrafficReading ===

impl TrafficReading {
    fn from_totals(totals: &CounterTotals) -> Self {
        let mut all = ModelTotals::default();
        totals
            .models
            .values()
            .for_each(|model| all.add(model, false));
        Self {
            all,
            refused: totals.dropped.values().sum(),
        }
    }

    /// Returns the growth since `before`. The growth of a count that fell is zero.
    fn minus(&self, before: &Self) -> Self {
        let now = &self.all;
        let old = &before.all;
        let errors = now.errors.iter().map(|(status, count)| {
            (
                status.clone(),
                count.saturating_sub(old.errors.get(status).copied().unwrap_or(0)),
            )
        });
        let all = ModelTotals {
            requests: now.requests.saturating_sub(old.requests),
            errors: errors.collect(),
            duration_ms: growth(&now.duration_ms, &old.duration_ms),
            ttft_ms: growth(&now.ttft_ms, &old.ttft_ms),
            tpot_ms: growth(&now.tpot_ms, &old.tpot_ms),
            prompt_tokens: now.prompt_tokens.saturating_sub(old.prompt_tokens),
            completion_tokens: now.completion_tokens.saturating_sub(old.completion_tokens),
            cached_tokens: now.cached_tokens.saturating_sub(old.cached_tokens),
            slo: std::array::from_fn(|at| now.slo[at].saturating_sub(old.slo[at])),
            ..ModelTotals::default()
        };
        Self {
            all,
            refused: self.refused.saturating_sub(before.refused),
        }
    }

    fn sample(&self, seconds: f64, running: u64, held: u64) -> TrafficSample {
        let errors = |class: fn(u16) -> bool| {
            let of_class = self
                .all
                .errors
                .iter()
                .filter(|(status, _)| status.parse().is_ok_and(class));
            of_class.map(|(_, count)| count).sum()
        };
        TrafficSample {
            at: SystemTime::now(),
            seconds,
            requests: self.all.requests,
            client_errors: errors(|status| (400..500).contains(&status)),
            server_errors: errors(|status| status >= 500),
            refused: self.refused,
            prompt_tokens: self.all.prompt_tokens,
            cached_tokens: self.all.cached_tokens,
            output_tokens: self.all.completion_tokens,
            running,
            held,
            slo: self.all.slo,
            ttft: LatencyQuantiles::from_histogram(&self.all.ttft_ms),
            tpot: LatencyQuantiles::from_histogram(&self.all.tpot_ms),
            duration: LatencyQuantiles::from_histogram(&self.all.duration_ms),
        }
    }
}

fn growth(now: &TotalsHistogram, before: &TotalsHistogram) -> TotalsHistogram {
    let counts = std::array::from_fn(|at| now.counts[at].saturating_sub(before.counts[at]));
    TotalsHistogram {
        counts,
        sum: (now.sum - before.sum).max(0.0),
    }
}

// === impl LatencyQuantiles ===

impl LatencyQuantiles {
    /// Returns the quantiles of a histogram; `None` without values.
    #[must_use]
    pub fn from_histogram(histogram: &TotalsHistogram) -> Option<Self> {
        (histogram.count() > 0).then(|| Self {
            p50: quantile(histogram, 0.5),
            p99: quantile(histogram, 0.99),
        })
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts within one interval stay far below 2^52"
)]
fn quantile(histogram: &TotalsHistogram, share: f64) -> f64 {
    let rank = share * histogram.count() as f64;
    let mut below = 0.0;
    let mut lower = 0.0;
    for (bound, count) in HISTOGRAM_BOUNDS.iter().zip(histogram.counts) {
        let count = count as f64;
        if count > 0.0 && below + count >= rank {
            return lower + (bound - lower) * (rank - below) / count;
        }
        below += count;
        lower = *bound;
    }
    lower
}

#[cfg(test)]
mod tests {
    use proto::state;

    use crate::state::counters::{CounterStore, TotalsLabel, VmReport};
    use crate::state::peer::{Origin, ProxyProcess, RemoteAddress};

    use super::*;

    fn totals(requests: u64, ttfts_ms: &[f64]) -> CounterTotals {
        let mut model = ModelTotals {
            requests,
            running: 3,
            slo: [requests, 1, 0],
            ..ModelTotals::default()
        };
        ttfts_ms.iter().for_each(|ms| model.ttft_ms.record(*ms));
        model.errors.insert("404".to_owned(), requests);
        model.errors.insert("503".to_owned(), 2 * requests);
        let mut totals = CounterTotals::default();
        totals.models.insert(
            TotalsLabel {
                model: "m".to_owned(),
                target: "m".to_owned(),
                priority: 0,
            },
            model,
        );
        totals.dropped.insert("no endpoint".to_owned(), requests);
        totals
    }

    fn samples(history: &TrafficHistory) -> Vec<TrafficSample> {
        history
            .pools()
            .flat_map(|(_, samples)| samples.cloned())
            .collect()
    }

    #[test]
    fn a_sample_is_the_growth_within_its_interval() {
        let mut history = TrafficHistory::default();
        let pool = Arc::from("p");
        let begin = Instant::now();
        history.record(&pool, &totals(5, &[1.5]), &CounterTotals::default(), begin);
        assert_eq!(samples(&history), [], "the first call sets the beginning");
        history.record(
            &pool,
            &totals(9, &[1.5, 4.0, 4.0]),
            &CounterTotals::default(),
            begin + SAMPLE_INTERVAL,
        );
        let [sample] = samples(&history).try_into().unwrap();
        assert_eq!(
            (
                sample.requests,
                sample.client_errors,
                sample.server_errors,
                sample.refused
            ),
            (4, 4, 8, 4)
        );
        assert_eq!(
            (sample.running, sample.slo, sample.seconds),
            (3, [4, 0, 0], 10.0)
        );
        assert_eq!(
            sample.ttft,
            Some(LatencyQuantiles {
                p50: 3.5,
                p99: 4.97
            }),
            "both are between 2 and 5 ms"
        );
        assert_eq!(sample.tpot, None);
    }

    #[test]
    fn counts_from_before_this_daemon_do_not_appear_as_traffic() {
        let mut history = TrafficHistory::default();
        let pool = Arc::from("p");
        let begin = Instant::now();
        history.record(
            &pool,
            &CounterTotals::default(),
            &CounterTotals::default(),
            begin,
        );
        history.record(
            &pool,
            &totals(1_000_002, &[]),
            &totals(1_000_000, &[]),
            begin + SAMPLE_INTERVAL,
        );
        assert_eq!(samples(&history)[0].requests, 2);
    }

    #[test]
    fn first_counts_of_made_up_vms_are_no_traffic_and_hide_none() {
        let proxy = |last: u8| ProxyProcess {
            node_id: "n".to_owned(),
            id: last.into(),
            remote: RemoteAddress {
                origin: Origin {
                    certificate: None,
                    address: Some([10, 0, 0, last].into()),
                },
                socket: None,
            },
        };
        let report = |vm_id, requests| {
            vec![VmReport::from_vm(state::VmCounters {
                pool: "p".to_owned(),
                vm_id,
                models: vec![state::ModelCounters {
                    model: "m".to_owned(),
                    requests,
                    prompt_tokens: requests,
                    ..Default::default()
                }],
                ..Default::default()
            })]
        };
        let mut store = CounterStore::default();
        let mut history = TrafficHistory::default();
        let pool = Arc::from("p");
        let begin = Instant::now();
        let mut sample = |store: &CounterStore, now| {
            history.record(
                &pool,
                &store.totals("p", now),
                &store.first_reports("p"),
                now,
            );
            samples(&history).pop()
        };
        store.report(&proxy(1), report(1, 1_000), begin);
        assert_eq!(sample(&store, begin), None);
        for vm_id in 0..100 {
            store.report(&proxy(2), report(vm_id, u64::MAX), begin);
        }
        store.report(&proxy(1), report(1, 1_002), begin);
        let sample = sample(&store, begin + SAMPLE_INTERVAL).unwrap();
        assert_eq!((sample.requests, sample.prompt_tokens), (2, 2));
        let arrivals = store.take_arrivals("p");
        let made_up = proxy(2).remote.origin;
        assert!(!arrivals.contains_key(&made_up), "{arrivals:?}");
    }

    #[test]
    fn an_hour_is_kept() {
        let mut history = TrafficHistory::default();
        let pool = Arc::from("p");
        let begin = Instant::now();
        for at in 0..u32::try_from(SAMPLES_MAX).unwrap() + 10 {
            history.record(
                &pool,
                &totals(u64::from(at), &[]),
                &CounterTotals::default(),
                begin + SAMPLE_INTERVAL * at,
            );
        }
        assert_eq!(samples(&history).len(), SAMPLES_MAX);
        assert_eq!(
            SAMPLE_INTERVAL * u32::try_from(SAMPLES_MAX).unwrap(),
            Duration::from_secs(3_600)
        );
    }

    #[test]
    fn values_above_the_last_bound_have_its_value() {
        let mut histogram = TotalsHistogram::default();
        histogram.record(1e9);
        assert_eq!(
            LatencyQuantiles::from_histogram(&histogram),
            Some(LatencyQuantiles {
                p50: 600_000.0,
                p99: 600_000.0
            })
        );
    }
}
