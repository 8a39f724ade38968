//! Strategies for any valid state.

use std::net::SocketAddr;

use proptest::collection::vec;
use proptest::prelude::*;
use proto::state;
use scheduler::metrics::{METRICS, MetricDefinition, MetricUnit};
use scheduler::objects::{ModelSpec, ObjectiveSpec, ObjectsSpec, RewriteSpec, TargetSpec};
use scheduler::registry::{PLUGINS, PluginKind};
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, LoraMetrics, PipelineSpec, PluginSpec,
    RANKED_MAX, Readiness, Slot, Version,
};

/// The state of a pool in the daemon.
#[derive(Clone, Debug)]
pub(crate) struct PoolCase {
    pub(crate) version: Version,
    pub(crate) endpoints: Vec<Endpoint>,
    pub(crate) metrics: Vec<EndpointMetrics>,
    pub(crate) pipeline: PipelineSpec,
    pub(crate) objects: ObjectsSpec,
    pub(crate) hash_secret: u128,
    pub(crate) staleness_max_ms: u32,
}

pub(crate) fn any_pool() -> impl Strategy<Value = PoolCase> {
    let rows = vec((any_endpoint(), any_metrics()), 0..20);
    let numbers = (any::<u128>(), any::<u32>());
    (any_version(), rows, any_pipeline(), any_objects(), numbers).prop_map(
        |(version, rows, pipeline, objects, numbers)| {
            let (hash_secret, staleness_max_ms) = numbers;
            let (mut endpoints, metrics): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
            // Each slot and each address is used once.
            for (i, endpoint) in (0u16..).zip(&mut endpoints) {
                endpoint.id.slot = Slot(i * 7 % 1024);
                let mut address: SocketAddr = endpoint.address.parse().unwrap();
                address.set_port(i + 1);
                endpoint.address = address.to_string().into();
            }
            PoolCase {
                version,
                endpoints,
                metrics,
                pipeline,
                objects,
                hash_secret,
                staleness_max_ms,
            }
        },
    )
}

pub(crate) fn any_version() -> impl Strategy<Value = Version> {
    (any::<u64>(), any::<u64>()).prop_map(|(term, sequence)| Version { term, sequence })
}

fn any_endpoint() -> impl Strategy<Value = Endpoint> {
    let labels = proptest::collection::btree_map("[a-z./-]{1,12}", ".{0,12}", 0..4);
    // There are only a few names, so that endpoints have equal and different sets of models.
    let models = proptest::collection::btree_set("[ab]{1,2}", 0..3);
    (
        any::<u32>(),
        ".{0,20}",
        any::<SocketAddr>(),
        any::<bool>(),
        labels,
        models,
        any::<u64>(),
    )
        .prop_map(
            |(generation, name, mut address, ready, labels, models, age_ms)| {
                if let SocketAddr::V6(v6) = &mut address {
                    v6.set_flowinfo(0);
                    v6.set_scope_id(0);
                }
                Endpoint {
                    id: EndpointRef {
                        slot: Slot(0),
                        generation: Generation(generation),
                    },
                    name: name.into(),
                    address: address.to_string().into(),
                    readiness: if ready {
                        Readiness::Ready
                    } else {
                        Readiness::NotReady
                    },
                    labels: labels
                        .into_iter()
                        .map(|(k, v)| (k.into(), v.into()))
                        .collect(),
                    models: models.into_iter().map(Into::into).collect(),
                    age_ms,
                }
            },
        )
}

fn any_metrics() -> impl Strategy<Value = EndpointMetrics> {
    let number = |metric: &'static MetricDefinition| {
        let value = match metric.unit {
            MetricUnit::Requests => (0.0f32..1e9).boxed(),
            MetricUnit::Share => (0.0f32..=1.0).boxed(),
            MetricUnit::Count => (1u32..=1 << 24).prop_map(|count| count as f32).boxed(),
        };
        proptest::option::of(value)
    };
    let numbers: Vec<_> = METRICS.into_iter().map(number).collect();
    let names = || vec("[a-z]{1,8}".prop_map(Into::into), 0..4).prop_map(Vec::into_boxed_slice);
    let lora = proptest::option::of((names(), names(), any::<u32>(), names()).prop_map(
        |(running, waiting, max, base_models)| LoraMetrics {
            running,
            waiting,
            max,
            base_models,
        },
    ));
    let attributes = proptest::collection::btree_map(
        proptest::sample::select(vec!["depth", "free", "x/y"]),
        -1e9f32..1e9,
        0..3,
    )
    .prop_map(|attributes| {
        attributes
            .into_iter()
            .map(|(key, value)| (key.into(), value))
            .collect()
    });
    (numbers, lora, attributes).prop_map(|(numbers, lora, attributes)| {
        let mut metrics = EndpointMetrics {
            lora,
            attributes,
            ..EndpointMetrics::default()
        };
        METRICS
            .into_iter()
            .zip(numbers)
            .for_each(|(metric, number)| (metric.set)(&mut metrics, number));
        metrics
    })
}

/// Returns the smallest possible pipeline.
pub(crate) fn one_profile() -> state::Pipeline {
    state::Pipeline {
        profiles: vec![state::Profile::default()],
        ranked_max: 3,
        ..Default::default()
    }
}

fn any_objects() -> impl Strategy<Value = ObjectsSpec> {
    let name = || ".{1,20}";
    let targets = || {
        let target = (name(), proptest::option::of(0..=1_000_000_u32))
            .prop_map(|(model, weight)| TargetSpec { model, weight });
        vec(target, 0..4)
    };
    let objective =
        (name(), any::<i32>()).prop_map(|(name, priority)| ObjectiveSpec { name, priority });
    let model = (name(), any::<i32>(), targets()).prop_map(|(name, priority, targets)| ModelSpec {
        name,
        priority,
        targets,
    });
    let rewrite = (vec(name(), 0..3), targets())
        .prop_map(|(models, targets)| RewriteSpec { models, targets });
    (
        vec(objective, 0..4),
        vec(model, 0..4),
        vec(rewrite, 0..4),
        any::<bool>(),
    )
        .prop_map(
            |(objectives, models, rewrites, strict_models)| ObjectsSpec {
                objectives,
                models,
                rewrites,
                strict_models,
            },
        )
}

fn any_pipeline() -> impl Strategy<Value = PipelineSpec> {
    // The pipeline has only plugin types that need no parameter.
    let of_kind = |kinds: &[PluginKind]| {
        let simple = PLUGINS
            .iter()
            .filter(|p| kinds.contains(&p.kind) && p.build(&[]).is_ok());
        simple.map(|p| p.name).collect::<Vec<_>>()
    };
    let plugin = |types| (proptest::sample::select(types), 0.0f64..1e6);
    let parts = vec(
        plugin(of_kind(&[PluginKind::Filter, PluginKind::Scorer])),
        0..6,
    );
    let picker = proptest::option::of(plugin(of_kind(&[PluginKind::Picker])));
    let ranked_max = 1..=u32::try_from(RANKED_MAX).unwrap();
    (".{0,10}", parts, picker, ranked_max, any::<bool>()).prop_map(
        |(name, parts, picker, ranked_max, handler)| {
            let named = |(at, (plugin_type, weight)): (usize, (&str, f64))| {
                (
                    PluginSpec {
                        name: format!("{plugin_type} {at}"),
                        ..PluginSpec::of_type(plugin_type)
                    },
                    weight,
                )
            };
            let mut spec = PipelineSpec::of_one_profile(
                &name,
                parts
                    .into_iter()
                    .chain(picker)
                    .enumerate()
                    .map(named)
                    .collect(),
                ranked_max,
            );
            if handler {
                spec.plugins
                    .push(PluginSpec::of_type("single-profile-handler"));
                spec.profile_handler = "single-profile-handler".to_owned();
            }
            spec
        },
    )
}
