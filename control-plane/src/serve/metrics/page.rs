//! Writes the metric families of a page one after another, in OpenMetrics.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use proto::HISTOGRAM_BOUNDS;

use crate::state::counters::TotalsHistogram;

pub(super) type MetricLabels = Vec<(&'static str, String)>;

/// The common part of several families: their labels, and the source of their values.
pub(super) type Rows<T> = Vec<(MetricLabels, T)>;

/// A metric family: its name, its help text, and the function that reads the value from a row.
pub(super) type Family<T, V> = (&'static str, &'static str, fn(T) -> V);

/// A histogram before it is written: for each bucket its upper bound and its own count, and the sum
/// of all values. The page has cumulative counts.
pub(super) struct HistogramBuckets {
    pub(super) counts: Vec<(f64, u64)>,
    pub(super) sum: f64,
}

/// Writes metric families one after another.
pub(super) struct MetricsPage<'e>(pub(super) DescriptorEncoder<'e>);

// === impl HistogramBuckets ===

impl HistogramBuckets {
    pub(super) fn scaled(histogram: &TotalsHistogram, scale: f64) -> Self {
        let bounds = HISTOGRAM_BOUNDS.iter().map(|bound| bound * scale);
        Self::new(bounds, &histogram.counts, histogram.sum * scale)
    }

    pub(super) fn new(bounds: impl Iterator<Item = f64>, counts: &[u64], sum: f64) -> Self {
        let bounds = bounds.chain([f64::INFINITY]);
        Self {
            counts: bounds.zip(counts.iter().copied()).collect(),
            sum,
        }
    }

    pub(super) fn sum_only(sum: u64, count: u64) -> Self {
        Self {
            counts: vec![(f64::INFINITY, count)],
            sum: float(sum),
        }
    }
}

impl EncodeMetric for HistogramBuckets {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let count = self
            .counts
            .iter()
            .fold(0, |sum, (_, count)| count.saturating_add(sum));
        encoder.encode_histogram::<NoLabelSet>(self.sum, count, &self.counts, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

// === impl MetricsPage ===

impl MetricsPage<'_> {
    /// Writes a counter. `name` has no `_total`, because the encoder appends it.
    pub(super) fn counter(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (MetricLabels, u64)>,
    ) -> fmt::Result {
        let mut family = self
            .0
            .encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in rows {
            labelled(&mut family, &labels, |row| {
                row.encode_counter::<NoLabelSet, _, f64>(&value, None)
            })?;
        }
        Ok(())
    }

    pub(super) fn gauge(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (MetricLabels, f64)>,
    ) -> fmt::Result {
        let mut family = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in rows {
            labelled(&mut family, &labels, |row| row.encode_gauge(&value))?;
        }
        Ok(())
    }

    /// Writes a counter for each of `families`.
    pub(super) fn counters<T: Copy, const N: usize>(
        &mut self,
        rows: &Rows<T>,
        families: [Family<T, u64>; N],
    ) -> fmt::Result {
        families
            .into_iter()
            .try_for_each(|(name, help, of)| self.counter(name, help, read(rows, of)))
    }

    /// Writes a gauge for each of `families`.
    pub(super) fn gauges<T: Copy, const N: usize>(
        &mut self,
        rows: &Rows<T>,
        families: [Family<T, f64>; N],
    ) -> fmt::Result {
        families
            .into_iter()
            .try_for_each(|(name, help, of)| self.gauge(name, help, read(rows, of)))
    }

    /// Writes a histogram for each of `families`.
    pub(super) fn histograms<T: Copy, const N: usize>(
        &mut self,
        rows: &Rows<T>,
        families: [Family<T, HistogramBuckets>; N],
    ) -> fmt::Result {
        families
            .into_iter()
            .try_for_each(|(name, help, of)| self.histogram(name, help, read(rows, of)))
    }

    pub(super) fn histogram(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (MetricLabels, HistogramBuckets)>,
    ) -> fmt::Result {
        let mut family = self
            .0
            .encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, buckets) in rows {
            buckets.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// Writes one row. Without labels, the row has no braces either.
fn labelled(
    family: &mut MetricEncoder<'_>,
    labels: &MetricLabels,
    write: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    if labels.is_empty() {
        write(family)
    } else {
        write(&mut family.encode_family(labels)?)
    }
}

fn read<T: Copy, V>(rows: &Rows<T>, of: fn(T) -> V) -> impl Iterator<Item = (MetricLabels, V)> {
    rows.iter()
        .map(move |(labels, row)| (labels.clone(), of(*row)))
}

/// Makes several rows of each of `rows`. The new rows differ in one more label.
pub(super) fn by<T: Copy, V, K: AsRef<str>, I: IntoIterator<Item = (K, V)>>(
    rows: &Rows<T>,
    label: &'static str,
    of: impl Fn(T) -> I,
) -> Rows<V> {
    rows.iter()
        .flat_map(|(labels, row)| {
            of(*row)
                .into_iter()
                .map(move |(name, value)| (with(labels, label, name.as_ref()), value))
        })
        .collect()
}

pub(super) fn with(labels: &MetricLabels, key: &'static str, value: &str) -> MetricLabels {
    let mut labels = labels.clone();
    labels.push((key, value.to_owned()));
    labels
}

/// Returns the mean and standard deviation of the known values; `None` if no value is known.
pub(super) fn moments(values: impl Iterator<Item = f32>) -> Option<(f64, f64)> {
    let values: Vec<f64> = values.map(f64::from).collect();
    let n = count(values.len());
    if values.is_empty() {
        return None;
    }
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    Some((mean, variance.sqrt()))
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus values are floats")]
pub(super) fn float(value: u64) -> f64 {
    value as f64
}

pub(super) fn count(value: usize) -> f64 {
    float(u64::try_from(value).unwrap_or(u64::MAX))
}

pub(super) fn flag(value: bool) -> f64 {
    f64::from(u8::from(value))
}
