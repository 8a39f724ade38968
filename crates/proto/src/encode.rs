//! Converts scheduler types to messages.

use std::collections::BTreeSet;

use scheduler::metrics::{METRICS, MetricDefinition};
use scheduler::objects::ObjectsSpec;
use scheduler::{
    ATTRIBUTES_MAX, Endpoint, EndpointMetrics, PipelineSpec, PluginSpec, ProfileSpec, Readiness,
    Version,
};

use crate::{objects, state};

/// The daemon's state of a pool, as references to its parts.
#[derive(Clone, Copy, Debug)]
pub struct PoolState<'a> {
    pub pool: &'a str,
    pub version: Version,
    pub endpoints: &'a [Endpoint],
    /// The configuration of the pipeline that schedules requests.
    pub pipeline: &'a PipelineSpec,
    pub objects: &'a ObjectsSpec,
    /// The key of the hashes of prompt blocks.
    pub hash_secret: u128,
    /// The time in ms after which metrics that were not refreshed count as unknown.
    pub staleness_max_ms: u32,
}

/// Encodes a pool without its metrics.
#[must_use]
pub fn encode_pool_update(pool: PoolState<'_>) -> state::PoolUpdate {
    let sets: BTreeSet<&[Box<str>]> = pool
        .endpoints
        .iter()
        .map(|e| &*e.models)
        .filter(|models| !models.is_empty())
        .collect();
    let sets: Vec<&[Box<str>]> = sets.into_iter().collect();
    state::PoolUpdate {
        pool: pool.pool.to_owned(),
        version: Some(version(pool.version)),
        endpoints: pool.endpoints.iter().map(|e| endpoint(e, &sets)).collect(),
        pipeline: Some(pipeline(pool.pipeline)),
        hash_secret: low(pool.hash_secret),
        hash_secret_high: low(pool.hash_secret >> 64),
        staleness_max_ms: pool.staleness_max_ms,
        objects: (!pool.objects.is_empty()).then(|| objects::encode(pool.objects)),
        model_sets: sets
            .iter()
            .map(|set| state::ModelSet {
                models: set.iter().map(ToString::to_string).collect(),
            })
            .collect(),
    }
}

// The cast keeps the lower half of the secret.
fn low(secret: u128) -> u64 {
    secret as u64
}

/// Encodes the metrics of a pool's endpoints, in the order of the pool update's endpoints.
#[must_use]
pub fn encode_metrics(
    pool: &str,
    pool_update: Version,
    sequence: u64,
    metrics: &[EndpointMetrics],
) -> state::Metrics {
    state::Metrics {
        pool: pool.to_owned(),
        pool_update: Some(version(pool_update)),
        sequence,
        columns: METRICS
            .iter()
            .map(|metric| column(metric, metrics))
            .collect(),
        lora: (0u32..)
            .zip(metrics)
            .filter_map(|(index, m)| m.lora.as_ref().map(|l| lora(index, l)))
            .collect(),
        attributes: attributes(metrics),
    }
}

fn column(metric: &MetricDefinition, metrics: &[EndpointMetrics]) -> state::MetricColumn {
    state::MetricColumn {
        name: metric.name.to_owned(),
        values: metrics
            .iter()
            .map(|m| (metric.get)(m).unwrap_or(f32::NAN))
            .collect(),
    }
}

fn version(version: Version) -> state::Version {
    state::Version {
        term: version.term,
        sequence: version.sequence,
    }
}

/// Converts an endpoint to a message. `sets` is sorted, so that a binary search finds the
/// endpoint's set of models.
fn endpoint(endpoint: &Endpoint, sets: &[&[Box<str>]]) -> state::Endpoint {
    state::Endpoint {
        slot: u32::from(endpoint.id.slot.0),
        generation: endpoint.id.generation.0,
        name: endpoint.name.to_string(),
        address: endpoint.address.to_string(),
        ready: endpoint.readiness == Readiness::Ready,
        labels: endpoint
            .labels
            .iter()
            .map(|(k, v)| state::Label {
                key: k.to_string(),
                value: v.to_string(),
            })
            .collect(),
        age_ms: endpoint.age_ms,
        model_set: sets
            .binary_search(&&*endpoint.models)
            .ok()
            .and_then(|at| u32::try_from(at + 1).ok())
            .unwrap_or(0),
    }
}

fn pipeline(spec: &PipelineSpec) -> state::Pipeline {
    state::Pipeline {
        plugins: spec.plugins.iter().map(plugin).collect(),
        profiles: spec.profiles.iter().map(profile).collect(),
        profile_handler: spec.profile_handler.clone(),
        saturation_detector: spec.saturation_detector.clone(),
        ranked_max: spec.ranked_max,
        latency_prediction: spec.latency_prediction,
    }
}

fn plugin(spec: &PluginSpec) -> state::Plugin {
    state::Plugin {
        r#type: spec.plugin_type.clone(),
        name: spec.name.clone(),
        parameters: spec
            .parameters
            .iter()
            .map(|(name, value)| parameter(name, value))
            .collect(),
    }
}

fn profile(spec: &ProfileSpec) -> state::Profile {
    let plugins = spec.plugins.iter().map(|part| state::ProfilePlugin {
        name: part.name.clone(),
        weight: part.weight,
    });
    state::Profile {
        name: spec.name.clone(),
        plugins: plugins.collect(),
    }
}

pub(crate) fn parameter(name: &str, value: &scheduler::plugin::ParameterValue) -> state::Parameter {
    use scheduler::plugin::ParameterValue;
    use state::parameter::Value as Wire;
    let value = match value {
        ParameterValue::Number(n) => Wire::Number(*n),
        ParameterValue::Flag(f) => Wire::Flag(*f),
        ParameterValue::Text(t) => Wire::Text(t.clone()),
        ParameterValue::List(items) => Wire::List(state::ParameterList {
            items: items.iter().map(|item| parameter("", item)).collect(),
        }),
        ParameterValue::Map(entries) => Wire::Map(state::ParameterMap {
            entries: entries
                .iter()
                .map(|(name, value)| parameter(name, value))
                .collect(),
        }),
    };
    state::Parameter {
        name: name.to_owned(),
        value: Some(value),
    }
}

fn attributes(metrics: &[EndpointMetrics]) -> Vec<state::Attribute> {
    let keys: BTreeSet<&str> = metrics
        .iter()
        .flat_map(|m| m.attributes.iter().map(|(key, _)| &**key))
        .collect();
    let column = |key: &str| {
        metrics
            .iter()
            .map(|m| m.attribute(key).unwrap_or(f32::NAN))
            .collect()
    };
    keys.into_iter()
        .take(ATTRIBUTES_MAX)
        .map(|key| state::Attribute {
            key: key.to_owned(),
            values: column(key),
        })
        .collect()
}

fn lora(index: u32, lora: &scheduler::LoraMetrics) -> state::Lora {
    let names = |list: &[Box<str>]| list.iter().map(ToString::to_string).collect();
    state::Lora {
        index,
        running: names(&lora.running),
        waiting: names(&lora.waiting),
        max: lora.max,
        base_models: names(&lora.base_models),
    }
}
