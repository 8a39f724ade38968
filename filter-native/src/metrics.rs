//! The metrics of the module: those of the wasm filter, by the same names, and two of its own.

use std::sync::atomic::{AtomicU64, Ordering};

use front::metrics::{METRICS, MetricKind, Stat};

use crate::abi::ConfigHandle;
use crate::{panics, pool};

const COUNT: usize = METRICS.len();

/// A counter: panics of the module that it caught.
const PANICS: &str = "switchpoint_native_panics_total";
/// A counter: the time that threads waited for the lock of a pool, in µs.
const LOCK_WAIT_US: &str = "switchpoint_native_lock_wait_us_total";

/// The counts of the process that Envoy does not have yet, and the values of gauges.
#[derive(Debug)]
pub(crate) struct ProcessMetrics([AtomicU64; COUNT]);

/// The numbers that one configuration of Envoy gave to the metrics. Envoy counts all
/// configurations in the same statistics.
#[derive(Debug)]
pub(crate) struct MetricIds {
    /// By position in [`METRICS`].
    shared: Vec<Option<usize>>,
    panics: Option<usize>,
    lock_wait_us: Option<usize>,
}

// === impl MetricIds ===

impl MetricIds {
    /// Defines all metrics for a configuration that is being created.
    pub(crate) fn define(handle: &ConfigHandle) -> Self {
        Self {
            shared: METRICS
                .iter()
                .map(|metric| handle.define(metric.kind, metric.name))
                .collect(),
            panics: handle.define(MetricKind::Counter, PANICS),
            lock_wait_us: handle.define(MetricKind::Counter, LOCK_WAIT_US),
        }
    }

    pub(crate) fn of(&self, stat: Stat) -> Option<usize> {
        self.shared.get(stat as usize).copied().flatten()
    }
}

// === impl ProcessMetrics ===

impl ProcessMetrics {
    pub(crate) fn new() -> Self {
        Self([const { AtomicU64::new(0) }; COUNT])
    }

    /// Counts for the next [`Self::flush`].
    pub(crate) fn add(&self, stat: Stat, amount: u64) {
        if let Some(value) = self.0.get(stat as usize) {
            value.fetch_add(amount, Ordering::Relaxed);
        }
    }

    pub(crate) fn count(&self, stat: Stat) {
        self.add(stat, 1);
    }

    /// Sets a gauge at the next [`Self::flush`].
    pub(crate) fn set(&self, gauge: Stat, value: u64) {
        if let Some(known) = self.0.get(gauge as usize) {
            known.store(value, Ordering::Relaxed);
        }
    }

    /// Brings Envoy's counters and gauges up to date. Runs on the main thread, once a tick.
    pub(crate) fn flush(&self, handle: &ConfigHandle, ids: &MetricIds) {
        for ((metric, value), id) in METRICS.iter().zip(&self.0).zip(&ids.shared) {
            let Some(id) = *id else { continue };
            match metric.kind {
                MetricKind::Counter => add(handle, Some(id), value.swap(0, Ordering::Relaxed)),
                MetricKind::Gauge => handle.set(id, value.load(Ordering::Relaxed)),
                MetricKind::Histogram => {}
            }
        }
        add(handle, ids.panics, panics::take_count());
        add(handle, ids.lock_wait_us, pool::take_lock_wait_us());
    }
}

fn add(handle: &ConfigHandle, counter: Option<usize>, amount: u64) {
    if let (Some(counter), 1..) = (counter, amount) {
        handle.add(counter, amount);
    }
}
