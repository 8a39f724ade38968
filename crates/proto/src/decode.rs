//! Converts messages to scheduler types. A message that breaks a rule is refused as a whole, and
//! [`InvalidState`] names the field.

use std::fmt;
use std::sync::Arc;

use scheduler::latency::InvalidModel;
use scheduler::metrics::MetricDefinition;
use scheduler::objects::{InvalidObjects, Objects};
use scheduler::plugin::{ParameterValue, VALUE_DEPTH_MAX};
use scheduler::sort::sort_by;
use scheduler::{
    ATTRIBUTES_MAX, Endpoint, EndpointMetrics, EndpointRef, Generation, InvalidPipeline,
    InvalidSnapshot, LoraMetrics, Pipeline, PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec,
    Readiness, Slot, Snapshot, Version,
};

use crate::wire_limits::LimitedMessage;
use crate::{objects, state};

/// The reason why a message was refused. The daemon has caused the error, and the same message will
/// be refused again.
#[derive(Clone, Debug, PartialEq)]
pub enum InvalidState {
    /// A required field is missing.
    Missing(&'static str),
    /// A number is outside its range.
    OutOfRange(&'static str),
    /// An address is not `ip:port`.
    Address(String),
    /// The length of a metrics column differs from the number of endpoints.
    ColumnLength(&'static str),
    /// The metrics do not belong to the current pool update.
    OtherPoolUpdate,
    /// The snapshot as a whole breaks a rule.
    Snapshot(InvalidSnapshot),
    /// The pipeline breaks a rule.
    Pipeline(InvalidPipeline),
    /// The objects break a rule.
    Objects(InvalidObjects),
    /// The words of a model are invalid.
    Model(InvalidModel),
    /// The message has more entries of a type than the limit of this type.
    TooMany { entries: &'static str, max: usize },
    /// The bytes end within a field.
    Malformed,
    /// The bytes are not a valid message.
    Bytes(prost::DecodeError),
}

/// A decoded and checked pool update. The metrics of its snapshot are unknown.
#[derive(Debug)]
pub struct PoolUpdate {
    pub pool: String,
    pub snapshot: Snapshot,
    /// The key of the hashes of prompt blocks.
    pub hash_secret: u128,
    /// The time in ms after which metrics that were not refreshed count as unknown.
    pub staleness_max_ms: u32,
}

/// Decodes the bytes of a message from the daemon, after counting its entries.
///
/// # Errors
/// Returns [`InvalidState::TooMany`], or the reason why the bytes are not a message.
pub fn daemon_message(bytes: &[u8]) -> Result<state::DaemonMessage, InvalidState> {
    state::DaemonMessage::decode_limited(bytes)
}

/// Decodes the bytes of a message from a proxy, after counting its entries.
///
/// # Errors
/// Returns [`InvalidState::TooMany`], or the reason why the bytes are not a message.
pub fn proxy_message(bytes: &[u8]) -> Result<state::ProxyMessage, InvalidState> {
    state::ProxyMessage::decode_limited(bytes)
}

/// Decodes a pool update.
///
/// # Errors
/// Returns [`InvalidState`] if the message breaks a rule. In this case no part of the message may
/// be used.
pub fn pool_update(message: state::PoolUpdate) -> Result<PoolUpdate, InvalidState> {
    let version = version(message.version.as_ref(), "version")?;
    let spec = pipeline(message.pipeline.ok_or(InvalidState::Missing("pipeline"))?)?;
    let pipeline = Pipeline::build(&spec).map_err(InvalidState::Pipeline)?;
    let sets: Vec<Arc<[Box<str>]>> = message.model_sets.into_iter().map(model_set).collect();
    let endpoints = message
        .endpoints
        .into_iter()
        .map(|message| endpoint(message, &sets))
        .collect::<Result<Vec<_>, _>>()?;
    let unknown = vec![EndpointMetrics::default(); endpoints.len()];
    let objects = Objects::build(&objects::decode(message.objects.unwrap_or_default()))
        .map_err(InvalidState::Objects)?;
    let snapshot = Snapshot::try_new(version, endpoints, unknown, pipeline)
        .map_err(InvalidState::Snapshot)?
        .with_objects(objects);
    let hash_secret = u128::from(message.hash_secret_high) << 64 | u128::from(message.hash_secret);
    Ok(PoolUpdate {
        pool: message.pool,
        snapshot,
        hash_secret,
        staleness_max_ms: message.staleness_max_ms,
    })
}

/// Decodes metrics, and returns `onto` with these metrics. Each column of the metrics has one
/// number for each endpoint of `onto`, in the order of the endpoints.
///
/// # Errors
/// Returns [`InvalidState::OtherPoolUpdate`] if the metrics belong to another pool update. Every
/// other error names the broken rule.
pub fn metrics(message: &state::Metrics, onto: &Snapshot) -> Result<Snapshot, InvalidState> {
    let pool_update = version(message.pool_update.as_ref(), "pool_update")?;
    if pool_update != onto.version() {
        return Err(InvalidState::OtherPoolUpdate);
    }
    let n = onto.endpoints().len();
    let attributes = attributes(&message.attributes, n)?;
    let mut metrics: Vec<EndpointMetrics> =
        (0..n).map(|i| endpoint_attributes(attributes, i)).collect();
    for column in &message.columns {
        let Some(metric) = MetricDefinition::named(&column.name) else {
            continue;
        };
        if column.values.len() != n {
            return Err(InvalidState::ColumnLength(metric.name));
        }
        metrics
            .iter_mut()
            .zip(&column.values)
            .for_each(|(row, value)| (metric.set)(row, metric.unit.valid(*value)));
    }
    for lora in &message.lora {
        let row = usize::try_from(lora.index)
            .ok()
            .and_then(|i| metrics.get_mut(i))
            .ok_or(InvalidState::OutOfRange("lora.index"))?;
        let names = |list: &[String]| list.iter().map(|s| s.as_str().into()).collect();
        row.lora = Some(LoraMetrics {
            running: names(&lora.running),
            waiting: names(&lora.waiting),
            max: lora.max,
            base_models: names(&lora.base_models),
        });
    }
    onto.with_metrics(pool_update, metrics)
        .map_err(InvalidState::Snapshot)
}

// === impl InvalidState ===

impl fmt::Display for InvalidState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(field) => write!(f, "`{field}` is missing"),
            Self::OutOfRange(field) => write!(f, "`{field}` is out of range"),
            Self::Address(address) => write!(f, "address `{address}` is not `ip:port`"),
            Self::ColumnLength(column) => write!(
                f,
                "metrics column `{column}` does not run parallel to the endpoints"
            ),
            Self::OtherPoolUpdate => {
                f.write_str("the metrics are of another pool update than the one held")
            }
            Self::Snapshot(why) => why.fmt(f),
            Self::Pipeline(why) => why.fmt(f),
            Self::Objects(why) => why.fmt(f),
            Self::Model(why) => why.fmt(f),
            Self::TooMany { entries, max } => write!(f, "more than {max} of `{entries}`"),
            Self::Malformed => f.write_str("the bytes end within a field"),
            Self::Bytes(why) => why.fmt(f),
        }
    }
}

impl std::error::Error for InvalidState {}

/// Checks the attributes. Readers look attributes up by binary search, so the keys of the
/// attributes must be in order.
fn attributes(columns: &[state::Attribute], n: usize) -> Result<&[state::Attribute], InvalidState> {
    if columns.iter().any(|column| column.values.len() != n) {
        return Err(InvalidState::ColumnLength("attributes"));
    }
    if columns.len() > ATTRIBUTES_MAX || !columns.is_sorted_by(|a, b| a.key < b.key) {
        return Err(InvalidState::OutOfRange("attributes"));
    }
    Ok(columns)
}

fn endpoint_attributes(columns: &[state::Attribute], i: usize) -> EndpointMetrics {
    EndpointMetrics {
        attributes: columns
            .iter()
            .filter_map(|column| attribute(column, i))
            .collect(),
        ..EndpointMetrics::default()
    }
}

fn attribute(column: &state::Attribute, i: usize) -> Option<(Box<str>, f32)> {
    let value = column
        .values
        .get(i)
        .copied()
        .filter(|value| value.is_finite())?;
    Some((column.key.as_str().into(), value))
}

pub(crate) fn version(
    version: Option<&state::Version>,
    field: &'static str,
) -> Result<Version, InvalidState> {
    version
        .map(|v| Version {
            term: v.term,
            sequence: v.sequence,
        })
        .ok_or(InvalidState::Missing(field))
}

/// Decodes a set of models, and sorts the set, because readers look models up by binary search.
fn model_set(message: state::ModelSet) -> Arc<[Box<str>]> {
    let mut models: Vec<Box<str>> = message.models.into_iter().map(Into::into).collect();
    sort_by(&mut models, |a, b| a < b);
    models.into()
}

fn endpoint(message: state::Endpoint, sets: &[Arc<[Box<str>]>]) -> Result<Endpoint, InvalidState> {
    let slot =
        u16::try_from(message.slot).map_err(|_| InvalidState::OutOfRange("endpoints.slot"))?;
    if message.address.parse::<std::net::SocketAddr>().is_err() {
        return Err(InvalidState::Address(message.address));
    }
    let mut labels: Vec<(Box<str>, Box<str>)> = message
        .labels
        .into_iter()
        .map(|l| (l.key.into(), l.value.into()))
        .collect();
    sort_by(&mut labels, |a, b| a < b);
    let models = match usize::try_from(message.model_set)
        .unwrap_or(usize::MAX)
        .checked_sub(1)
    {
        Some(set) => sets
            .get(set)
            .cloned()
            .ok_or(InvalidState::OutOfRange("endpoints.model_set"))?,
        None => Arc::default(),
    };
    Ok(Endpoint {
        id: EndpointRef {
            slot: Slot(slot),
            generation: Generation(message.generation),
        },
        name: message.name.into(),
        address: message.address.into(),
        readiness: if message.ready {
            Readiness::Ready
        } else {
            Readiness::NotReady
        },
        labels: labels.into(),
        models,
        age_ms: message.age_ms,
    })
}

fn pipeline(message: state::Pipeline) -> Result<PipelineSpec, InvalidState> {
    Ok(PipelineSpec {
        plugins: message
            .plugins
            .into_iter()
            .map(plugin)
            .collect::<Result<_, _>>()?,
        profiles: message.profiles.into_iter().map(profile).collect(),
        profile_handler: message.profile_handler,
        saturation_detector: message.saturation_detector,
        ranked_max: message.ranked_max,
        latency_prediction: message.latency_prediction,
    })
}

fn profile(message: state::Profile) -> ProfileSpec {
    let plugins = message.plugins.into_iter().map(|part| ProfilePlugin {
        name: part.name,
        weight: part.weight,
    });
    ProfileSpec {
        name: message.name,
        plugins: plugins.collect(),
    }
}

fn plugin(message: state::Plugin) -> Result<PluginSpec, InvalidState> {
    let parameters = message
        .parameters
        .into_iter()
        .map(|given| parameter(given, VALUE_DEPTH_MAX))
        .collect::<Result<_, _>>()?;
    Ok(PluginSpec {
        plugin_type: message.r#type,
        name: message.name,
        parameters,
    })
}

/// Decodes a parameter, and checks the depth of its values. The scheduler checks the number of
/// values when it builds the plugin.
fn parameter(
    message: state::Parameter,
    depth_left: usize,
) -> Result<(String, ParameterValue), InvalidState> {
    use state::parameter::Value as Wire;
    const FIELD: &str = "pipeline.plugins.parameters.value";
    let within = |messages: Vec<state::Parameter>| {
        let depth_left = depth_left
            .checked_sub(1)
            .ok_or(InvalidState::OutOfRange(FIELD))?;
        messages
            .into_iter()
            .map(|message| parameter(message, depth_left))
            .collect::<Result<Vec<_>, _>>()
    };
    let value = match message.value.ok_or(InvalidState::Missing(FIELD))? {
        Wire::Number(n) => ParameterValue::Number(n),
        Wire::Flag(f) => ParameterValue::Flag(f),
        Wire::Text(t) => ParameterValue::Text(t),
        Wire::List(list) => ParameterValue::List(
            within(list.items)?
                .into_iter()
                .map(|(_, value)| value)
                .collect(),
        ),
        Wire::Map(map) => ParameterValue::Map(within(map.entries)?),
    };
    Ok((message.name, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode;

    fn nested(depth: usize) -> ParameterValue {
        (0..depth).fold(ParameterValue::Number(1.0), |inner, at| {
            if at % 2 == 0 {
                ParameterValue::List(vec![inner])
            } else {
                ParameterValue::Map(vec![("k".to_owned(), inner)])
            }
        })
    }

    #[test]
    fn structured_parameters_arrive_as_they_were() {
        let text = |text: &str| ParameterValue::Text(text.to_owned());
        let map = ParameterValue::Map(vec![
            ("b".to_owned(), text("2")),
            (
                "a".to_owned(),
                ParameterValue::List(vec![
                    ParameterValue::Flag(true),
                    text(""),
                    ParameterValue::List(vec![]),
                ]),
            ),
        ]);
        for value in [map, ParameterValue::Map(vec![]), nested(VALUE_DEPTH_MAX)] {
            assert_eq!(
                parameter(encode::parameter("p", &value), VALUE_DEPTH_MAX),
                Ok(("p".to_owned(), value))
            );
        }
    }

    #[test]
    fn a_value_that_lies_too_deep_or_is_none_is_refused() {
        let refused = |message| parameter(message, VALUE_DEPTH_MAX).unwrap_err();
        assert_eq!(
            refused(encode::parameter("p", &nested(VALUE_DEPTH_MAX + 1))),
            InvalidState::OutOfRange("pipeline.plugins.parameters.value")
        );
        let hole = state::Parameter {
            name: "k".to_owned(),
            value: None,
        };
        let list = state::parameter::Value::List(state::ParameterList { items: vec![hole] });
        let message = state::Parameter {
            name: "p".to_owned(),
            value: Some(list),
        };
        assert_eq!(
            refused(message),
            InvalidState::Missing("pipeline.plugins.parameters.value")
        );
    }
}
