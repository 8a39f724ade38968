//! `utilization-detector`: measures saturation by the queue and the KV cache that engines report.

use crate::candidates::Candidates;
use crate::detector::{HEADROOM, IN_FLIGHT_PRODUCER, relaxed};
use crate::endpoint::EndpointIndex;
use crate::filter::keep;
use crate::metrics;
use crate::plugin::{
    Context, Detector, Filter, InvalidParameter, Parameter, Parameters, RequiredState, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "utilization-detector",
    kind: PluginKind::Detector,
    doc: readable(
        "Saturation = mean over the endpoints of max(q / queueDepthThreshold, u / \
        kvCacheUtilThreshold), q = requests waiting, u = share of the KV cache in use; endpoints \
        that report neither are left out. The largest value is lowered to max(1, mean of the \
        others), so no single engine can make the pool look full. As a filter it drops endpoints \
        above 1 + headroom, unless all endpoints are.",
    ),
    source: readable("llm-d-router, saturationdetector/utilization"),
    parameters: &[
        QUEUE_DEPTH,
        KV_CACHE,
        HEADROOM,
        Parameter::text(
            "metricsStalenessThreshold",
            "200ms",
            "no effect: --staleness-max applies to all plugins",
        ),
        IN_FLIGHT_PRODUCER,
    ],
    needs: &[
        RequiredState::Metric(&metrics::QUEUE_DEPTH),
        RequiredState::Metric(&metrics::KV_CACHE_UTILIZATION),
    ],
    build,
};

/// The parameter for the number of waiting requests at which an endpoint is full.
pub(crate) const QUEUE_DEPTH: Parameter = Parameter::number(
    "queueDepthThreshold",
    5.0,
    "requests waiting at which an endpoint is full, integer from 1",
);

/// The parameter for the KV cache use at which an endpoint is full.
pub(crate) const KV_CACHE: Parameter = Parameter::number(
    "kvCacheUtilThreshold",
    0.8,
    "share of the KV cache in use at which an endpoint is full, above 0 to 1",
);

/// The thresholds at which an endpoint is full.
#[derive(Debug)]
pub(crate) struct UtilizationThresholds {
    queue_depth: f32,
    kv_cache_utilization: f32,
}

#[derive(Debug)]
pub(crate) struct UtilizationDetector {
    thresholds: UtilizationThresholds,
    /// The maximum saturation of the endpoints that the detector keeps when it is used as a filter.
    kept_max: f32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Detector(Box::new(UtilizationDetector::read(
        parameters,
    )?)))
}

impl UtilizationThresholds {
    // The casts are precise enough, because thresholds need no more digits than an f32 has.
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        Ok(Self {
            queue_depth: parameters.integer(QUEUE_DEPTH.name, 1..=u32::MAX)? as f32,
            kv_cache_utilization: parameters
                .number(KV_CACHE.name, f64::from(f32::MIN_POSITIVE)..=1.0)?
                as f32,
        })
    }

    /// Returns the saturation of one endpoint; `None` if its metrics are unknown.
    fn saturation_of(&self, context: &Context<'_>, endpoint: EndpointIndex) -> Option<f32> {
        let queue = context
            .metric(endpoint, |m| m.queue_depth)
            .map(|q| q / self.queue_depth);
        let cache = context
            .metric(endpoint, |m| m.kv_cache_utilization)
            .map(|u| u / self.kv_cache_utilization);
        match (queue, cache) {
            (Some(queue), Some(cache)) => Some(queue.max(cache)),
            (queue, cache) => queue.or(cache),
        }
    }

    /// Returns the mean saturation of the endpoints with known metrics; 0 if no endpoint has known
    /// metrics. If several endpoints have known metrics, the largest value is limited to 1 (full),
    /// or to the mean of the other values if that mean is above 1. So the report of one engine
    /// sheds no request while other engines have room.
    pub(crate) fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64 {
        let known = endpoints
            .iter()
            .filter_map(|&endpoint| self.saturation_of(context, endpoint));
        bounded_mean(known.map(f64::from))
    }
}

fn bounded_mean(values: impl Iterator<Item = f64>) -> f64 {
    let (others, largest, count) = values
        .fold((0.0, 0.0_f64, 0_u32), |(others, largest, count), one| {
            (others + largest.min(one), largest.max(one), count + 1)
        });
    match count {
        0 => 0.0,
        1 => largest,
        _ => {
            let bounded = largest.min((others / f64::from(count - 1)).max(1.0));
            (others + bounded) / f64::from(count)
        }
    }
}

impl UtilizationDetector {
    fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        parameters.text("metricsStalenessThreshold")?;
        parameters.text(IN_FLIGHT_PRODUCER.name)?;
        Ok(Self {
            thresholds: UtilizationThresholds::read(parameters)?,
            kept_max: relaxed(parameters)?,
        })
    }

    /// Returns the detector of a pipeline that does not name a detector.
    pub(crate) fn with_defaults() -> Result<Self, InvalidParameter> {
        Self::read(&Parameters::check(PLUGIN.parameters, &[])?)
    }
}

impl Detector for UtilizationDetector {
    fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64 {
        self.thresholds.saturation(context, endpoints)
    }
}

impl Filter for UtilizationDetector {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        keep(candidates, true, |index| {
            self.thresholds
                .saturation_of(context, index)
                .is_none_or(|s| s <= self.kept_max)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_engines_claims_saturate_no_pool() {
        let mean = |values: &[f64]| bounded_mean(values.iter().copied());
        assert_eq!(mean(&[]), 0.0);
        assert_eq!(mean(&[3.0]), 3.0, "alone");
        assert_eq!(mean(&[0.5, 0.25]), 0.375);
        assert_eq!(mean(&[3.0, 3.0, 3.0]), 3.0);
        for lie in [2.0, 1e9, 1e30] {
            assert!(mean(&[0.9, lie, 0.9, 0.9]) < 1.0);
            assert!(mean(&[lie, 0.9]) < 1.0);
            assert!(mean(&[1.1, lie, 1.1, 1.1]) >= 1.0, "all are full");
        }
    }
}
