//! Pools, profiles and requests of any kind, for property tests.

use proptest::prelude::*;
use scheduler::metrics::{KV_BLOCK_TOKENS, METRICS, MetricDefinition, MetricUnit};
use scheduler::registry::{PLUGINS, PluginKind};
use scheduler::{
    AdapterRoom, Endpoint, EndpointMetrics, LoraMetrics, PipelineSpec, PluginSpec, Readiness, Slo,
};

use crate::case::{self, DecisionCase, EndpointCase, RequestCase};
use crate::parameters;

/// Generates a metric as a model server might report it: absent, valid, or nonsense.
pub fn metric(sane: impl Strategy<Value = f32> + 'static) -> BoxedStrategy<Option<f32>> {
    prop_oneof![
        1 => Just(None),
        6 => sane.prop_map(Some),
        1 => prop::num::f32::ANY.prop_map(Some),
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, -0.0, f32::MAX, f32::MIN_POSITIVE]).prop_map(Some),
    ]
    .boxed()
}

/// Generates a value of a metric. There are few distinct values, so that ties and exact extremes
/// are common.
fn number(definition: &MetricDefinition) -> BoxedStrategy<Option<f32>> {
    match definition.unit {
        MetricUnit::Requests => metric((0_u8..6).prop_map(f32::from)),
        MetricUnit::Share => metric(0.0_f32..=1.0),
        MetricUnit::Count if *definition == KV_BLOCK_TOKENS => {
            prop::option::of(prop::sample::select(vec![0.0_f32, 16.0, 64.0])).boxed()
        }
        MetricUnit::Count => prop::option::of((0_u16..3_000).prop_map(f32::from)).boxed(),
    }
}

fn adapters() -> impl Strategy<Value = Box<[Box<str>]>> {
    prop::sample::subsequence(vec!["chat", "code", "sql"], 0..=3)
        .prop_map(|names| names.into_iter().map(Into::into).collect())
}

fn lora() -> impl Strategy<Value = Option<LoraMetrics>> {
    prop::option::of(
        (adapters(), adapters(), 0_u32..5).prop_map(|(running, waiting, max)| LoraMetrics {
            running,
            waiting,
            max,
            base_models: [].into(),
        }),
    )
}

/// Generates a report with a value of every metric in [`METRICS`].
fn metrics() -> impl Strategy<Value = EndpointMetrics> {
    let depth = prop::option::of(-3_i8..4);
    (METRICS.map(number), lora(), depth).prop_map(|(numbers, lora, depth)| {
        let depth = depth.map(|depth| ("depth".into(), f32::from(depth)));
        let mut metrics = EndpointMetrics {
            lora,
            attributes: depth.into_iter().collect(),
            ..EndpointMetrics::default()
        };
        for (metric, number) in METRICS.into_iter().zip(numbers) {
            (metric.set)(&mut metrics, number);
        }
        metrics
    })
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    let ages = prop::sample::select(vec![0_u64, 4_999, 5_000, 60_000]);
    let labels = (
        prop::option::of("[0-9]{1,4}-[0-9]{1,5}"),
        prop::option::of(prop::sample::select(vec!["prefill", "decode", "both"])),
        prop::option::of(prop::sample::select(vec!["gold", "silver"])),
    );
    let not_ready = prop::bool::weighted(0.2);
    (ages, labels, not_ready).prop_map(|(age_ms, (range, role, tier), not_ready)| {
        let labels = [
            ("llm-d.ai/context-length-range", range),
            ("llm-d.ai/role", role.map(str::to_owned)),
            ("tier", tier.map(str::to_owned)),
        ];
        Endpoint {
            readiness: if not_ready {
                Readiness::NotReady
            } else {
                Readiness::Ready
            },
            labels: labels
                .into_iter()
                .filter_map(|(key, value)| Some((key.into(), value?.into())))
                .collect(),
            age_ms,
            ..EndpointCase::new(0, "").endpoint
        }
    })
}

/// Generates an endpoint with its state. Every field is named here, so a new field of
/// [`EndpointCase`] does not compile until it has random values.
fn row() -> impl Strategy<Value = EndpointCase> {
    let own = (0_u32..5, 0_u32..10_000, 0_u32..20);
    let ejected = prop::bool::weighted(0.2);
    let rooms = prop_oneof![
        3 => Just(AdapterRoom::Unknown),
        1 => Just(AdapterRoom::Loaded),
        1 => Just(AdapterRoom::Free),
        2 => (0_u64..4).prop_map(|displaced_used| AdapterRoom::Full { displaced_used }),
    ];
    (endpoint(), metrics(), own, ejected, 0_u64..4, rooms).prop_map(
        |(endpoint, metrics, own, ejected, last_cold_pick, adapter_room)| {
            let (in_flight, prefill_tokens, matched_blocks) = own;
            EndpointCase {
                endpoint,
                metrics,
                in_flight,
                prefill_tokens,
                matched_blocks,
                ejected,
                last_cold_pick,
                last_pick: last_cold_pick,
                adapter_room,
                // The second scheduler in `oracle.rs` knows neither failures nor latency.
                failing: 0.0,
                last_answer: 0,
                predicted: None,
                slo: Slo::default(),
            }
        },
    )
}

/// Generates any pool of at most 12 endpoints, named and addressed by position.
pub fn pool() -> impl Strategy<Value = Vec<EndpointCase>> {
    prop::collection::vec(row(), 0..12).prop_map(|rows| {
        rows.into_iter()
            .enumerate()
            .map(|(at, row)| placed(at, row))
            .collect()
    })
}

fn placed(at: usize, row: EndpointCase) -> EndpointCase {
    let place = EndpointCase::new(at, &format!("pod-{at}")).endpoint;
    let endpoint = Endpoint {
        id: place.id,
        name: place.name,
        address: place.address,
        ..row.endpoint
    };
    EndpointCase { endpoint, ..row }
}

fn plugin(at: usize, plugin_type: &str) -> PluginSpec {
    PluginSpec {
        name: format!("{plugin_type}-{at}"),
        parameters: case::parameters(&parameters::words(plugin_type)),
        ..PluginSpec::of_type(plugin_type)
    }
}

/// Generates a pipeline of any scorers with any weights, and this picker.
pub fn pipeline(picker: &'static str) -> impl Strategy<Value = PipelineSpec> {
    let scorers: Vec<&str> = PLUGINS
        .iter()
        .filter(|plugin| plugin.kind == PluginKind::Scorer)
        .map(|plugin| plugin.name)
        .collect();
    let weights = prop::sample::select(vec![0.0, 0.5, 1.0, 2.0, 3.0, 100.0]);
    (
        prop::collection::vec((prop::sample::select(scorers), weights), 0..8),
        1_u32..=8,
    )
        .prop_map(move |(scorers, ranked_max)| {
            let mut plugins: Vec<_> = scorers
                .into_iter()
                .enumerate()
                .map(|(at, (name, weight))| (plugin(at, name), weight))
                .collect();
            plugins.push((PluginSpec::of_type(picker), 1.0));
            PipelineSpec::of_one_profile("any", plugins, ranked_max)
        })
}

/// Generates a pipeline of any filters, in any order, before a scorer.
pub fn filters() -> impl Strategy<Value = PipelineSpec> {
    let filters: Vec<&str> = PLUGINS
        .iter()
        .filter(|plugin| plugin.kind == PluginKind::Filter)
        .map(|plugin| plugin.name)
        .collect();
    (
        prop::collection::vec(prop::sample::select(filters), 1..4),
        1_u32..=8,
    )
        .prop_map(|(filters, ranked_max)| {
            let mut plugins: Vec<_> = filters
                .into_iter()
                .enumerate()
                .map(|(at, name)| (plugin(at, name), 1.0))
                .collect();
            plugins.push((PluginSpec::of_type("queue-scorer"), 1.0));
            PipelineSpec::of_one_profile("any", plugins, ranked_max)
        })
}

/// Generates a pipeline of one profile with any picker.
pub fn any_pipeline() -> impl Strategy<Value = PipelineSpec> {
    prop_oneof![
        pipeline("max-score-picker"),
        pipeline("weighted-random-picker"),
        pipeline("random-picker")
    ]
}

fn hint() -> impl Strategy<Value = Option<Vec<String>>> {
    let entry = prop_oneof![
        8 => (1_usize..14).prop_map(|at| format!("10.0.0.{at}")),
        8 => (1_usize..14).prop_map(|at| format!("10.0.0.{at}:8000")),
        2 => (1_usize..14).prop_map(|at| format!("10.0.0.{at}:8001")),
        1 => "[ -~]{0,12}",
    ];
    prop::option::weighted(0.4, prop::collection::vec(entry, 0..10))
}

/// Generates any case with a pipeline of this kind.
pub fn case(pipeline: impl Strategy<Value = PipelineSpec>) -> impl Strategy<Value = DecisionCase> {
    let request = (
        hint(),
        0_u32..20_000,
        0_u32..20,
        prop::sample::select(vec![0_u32, 16, 64, u32::MAX]),
    );
    let model = prop::sample::select(vec!["", "llama", "sql"]);
    let reuse_interval = prop::sample::select(vec![0.0_f32, 0.1, 1.0, 20.0, 1e9]);
    let evicted_share = prop::sample::select(vec![0.0_f32, 0.0, 0.3, 1.0, f32::NAN]);
    let token = (0_usize..14).prop_map(|at| {
        (
            "X-Session-Token".to_owned(),
            scheduler::session_token(&format!("pod-{at}")),
        )
    });
    let headers = prop::sample::subsequence(vec!["gold", "silver"], 0..2)
        .prop_map(|tiers| tiers.into_iter().map(tier).collect::<Vec<_>>());
    let headers = (headers, prop::option::of(token))
        .prop_map(|(tiers, token)| tiers.into_iter().chain(token).collect());
    (
        pipeline,
        pool(),
        (request, reuse_interval, evicted_share),
        (model, headers),
        prop::bool::weighted(0.1),
        any::<u64>(),
    )
        .prop_map(
            |(
                pipeline,
                pool,
                ((subset, prompt_tokens, blocks, block_tokens), reuse_interval, evicted_share),
                (model, headers),
                metrics_stale,
                seed,
            )| {
                // Every field is named here, so a new field does not compile until it has random
                // values. The second scheduler in `oracle.rs` knows no latency.
                let request = RequestCase {
                    model: model.to_owned(),
                    headers,
                    media_items: 0,
                    priority: 0,
                    subset,
                    prompt_tokens,
                    blocks,
                    block_tokens,
                    slo: Slo::default(),
                    prediction_based: false,
                };
                DecisionCase {
                    pipeline,
                    pool,
                    request,
                    reuse_interval,
                    evicted_share,
                    metrics_stale,
                    seed,
                    expected: String::new(),
                }
            },
        )
}

fn tier(tier: &str) -> (String, String) {
    ("x-tier".to_owned(), tier.to_owned())
}
