//! `utilization-filter`: drops endpoints that are too busy by at least one of a list of metrics.

use crate::candidates::Candidates;
use crate::endpoint::EndpointIndex;
use crate::filter::keep;
use crate::metrics::{KV_CACHE_UTILIZATION, QUEUE_DEPTH, RUNNING_REQUESTS};
use crate::plugin::{
    Context, Filter, InvalidParameter, Parameter, Parameters, RequiredState, producer_name,
    readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "utilization-filter",
    kind: PluginKind::Filter,
    doc: readable(
        "Drops endpoints where a listed metric exceeds its maxValue. An unknown metric does not \
        drop an endpoint.",
    ),
    source: readable("llm-d-router, filter/utilization"),
    parameters: &[
        Parameter::structured(
            "conditions",
            "[{metric: active-requests | running-requests | waiting-queue | kv-cache-utilization, maxValue}]",
            "at least one condition; kv-cache-utilization is a share from 0 to 1",
        ),
        Parameter::flag("fallbackOnEmpty", false, "keep all if all would be dropped"),
        producer_name("inFlightLoadProducerName"),
    ],
    needs: &[
        RequiredState::Metric(&QUEUE_DEPTH),
        RequiredState::Metric(&RUNNING_REQUESTS),
        RequiredState::Metric(&KV_CACHE_UTILIZATION),
        RequiredState::InFlight,
    ],
    build,
};

const CONDITION: &[Parameter] = &[
    Parameter::required(
        "metric",
        "active-requests, running-requests, waiting-queue or kv-cache-utilization",
    ),
    Parameter::required_number("maxValue", "0 or more; at most 1 for kv-cache-utilization"),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum UtilizationMetric {
    ActiveRequests,
    RunningRequests,
    WaitingQueue,
    KvCacheUtilization,
}

#[derive(Debug)]
struct UtilizationFilter {
    conditions: Vec<(UtilizationMetric, f32)>,
    fall_back: bool,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let metrics = [
        ("active-requests", UtilizationMetric::ActiveRequests),
        ("running-requests", UtilizationMetric::RunningRequests),
        ("waiting-queue", UtilizationMetric::WaitingQueue),
        (
            "kv-cache-utilization",
            UtilizationMetric::KvCacheUtilization,
        ),
    ];
    let conditions = parameters.each("conditions", CONDITION, |condition| {
        let metric = condition.choice("metric", &metrics)?;
        let max = if metric == UtilizationMetric::KvCacheUtilization {
            1.0
        } else {
            f64::from(f32::MAX)
        };
        // An f32 is precise enough for the limit, because metrics are f32 too.
        let max = condition.number("maxValue", 0.0..=max)? as f32;
        Ok((metric, max))
    })?;
    if conditions.is_empty() {
        return Err(InvalidParameter::Missing("conditions".to_owned()));
    }
    Ok(Plugin::Filter(Box::new(UtilizationFilter {
        conditions,
        fall_back: parameters.flag("fallbackOnEmpty")?,
    })))
}

impl UtilizationMetric {
    fn read(self, context: &Context<'_>, endpoint: EndpointIndex) -> Option<f32> {
        match self {
            // The cast is exact, because an endpoint has fewer than 16 million requests.
            Self::ActiveRequests => Some(context.requests(endpoint) as f32),
            Self::RunningRequests => context.metric(endpoint, |m| m.running_requests),
            Self::WaitingQueue => context.metric(endpoint, |m| m.queue_depth),
            Self::KvCacheUtilization => context.metric(endpoint, |m| m.kv_cache_utilization),
        }
    }
}

impl Filter for UtilizationFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        keep(candidates, self.fall_back, |endpoint| {
            self.conditions.iter().all(|(metric, max)| {
                metric
                    .read(context, endpoint)
                    .is_none_or(|value| value <= *max)
            })
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn refusal(metric: &str, max: f64) -> String {
        let condition = vec![
            ("metric".to_owned(), ParameterValue::Text(metric.to_owned())),
            ("maxValue".to_owned(), ParameterValue::Number(max)),
        ];
        PLUGIN
            .build(&[(
                "conditions".to_owned(),
                ParameterValue::List(vec![ParameterValue::Map(condition)]),
            )])
            .map(drop)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn conditions_that_make_no_sense_are_refused() {
        assert_eq!(
            PLUGIN.build(&[]).unwrap_err().to_string(),
            "parameter `conditions` must be given"
        );
        let max = "in `conditions[0]`: parameter `maxValue` is out of range: 0 or more; at most 1 for kv-cache-utilization";
        assert_eq!(refusal("kv-cache-utilization", 1.01), max);
        assert_eq!(refusal("waiting-queue", -1.0), max);
        assert_eq!(refusal("waiting-queue", f64::NAN), max);
        assert!(
            refusal("queue", 1.0)
                .starts_with("in `conditions[0]`: parameter `metric` is out of range")
        );
    }
}
