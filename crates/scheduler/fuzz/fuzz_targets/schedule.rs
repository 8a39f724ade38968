//! Schedules any request with any pipeline and pool. Scheduling must never panic, never leave the
//! subset hint, and never name an endpoint that is not ready.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use scheduler::in_flight::InFlight;
use scheduler::latency::LatencyModel;
use scheduler::metrics::METRICS;
use scheduler::plugin::ParameterValue;
use scheduler::registry::PLUGINS;
use scheduler::{
    AdapterRoom, Decision, Endpoint, EndpointMetrics, EndpointRef, Explanation, Generation,
    LocalState, LoraMetrics, Pipeline, PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec,
    RANKED_MAX, ROLE_LABEL, Readiness, Request, Rng, Slo, Slot, Snapshot, SubsetHint, TrackedSlo,
    Version, schedule,
};

#[derive(Arbitrary, Debug)]
struct Input {
    pipeline: AnyPipeline,
    pool: Vec<AnyEndpoint>,
    subset: Option<Vec<Entry>>,
    request: AnyRequest,
    local: AnyLocalState,
    seed: u64,
    slo: (Option<u32>, Option<u32>),
    prediction_based: bool,
    /// Predicted times, and the factors of each endpoint. `None` if prediction is off.
    predicted: Option<(f32, f32, Vec<(f32, f32)>)>,
    /// The numbers of `METRICS`, endpoint by endpoint. `None` leaves the number of `AnyMetrics`.
    /// This field is the last one, so that the seeds keep their meaning.
    numbers: Vec<Option<f32>>,
}

#[derive(Arbitrary, Debug)]
struct AnyPipeline {
    plugins: Vec<AnyPlugin>,
    /// Plugins by position, with their weights.
    profiles: Vec<(AnyName, Vec<(u8, f64)>)>,
    handler: Option<u8>,
    detector: Option<u8>,
    ranked_max: u8,
}

#[derive(Arbitrary, Debug)]
struct AnyRequest {
    model: String,
    headers: Vec<(AnyName, String)>,
    media_items: u32,
    priority: i32,
    max_tokens: Option<u32>,
    prompt_tokens: u32,
    blocks: u8,
    block_tokens: u32,
}

#[derive(Arbitrary, Debug)]
struct AnyLocalState {
    /// May be shorter or longer than the pool, like the other lists.
    matched_blocks: Vec<u32>,
    reuse_interval: f32,
    evicted_share: f32,
    ejected: Vec<bool>,
    failing: Vec<f32>,
    last_answers: Vec<u64>,
    last_cold_picks: Vec<u64>,
    adapter_rooms: Vec<Option<Option<u64>>>,
    metrics_stale: bool,
    peers_unreachable: bool,
}

#[derive(Arbitrary, Debug)]
struct AnyPlugin {
    /// Chooses a plugin type from the table. If it is `None`, `unknown` is the type.
    known: Option<u8>,
    unknown: String,
    parameters: Vec<(Option<u8>, String, AnyValue)>,
}

#[derive(Arbitrary, Debug)]
enum AnyValue {
    Number(f64),
    Whole(u8),
    Flag(bool),
    Text(String),
    Plugin(u8),
    List(Vec<AnyValue>),
    Map(Vec<(AnyName, AnyValue)>),
}

/// A name that has a meaning, or any other name.
#[derive(Arbitrary, Debug)]
enum AnyName {
    Known(u8),
    Other(String),
}

const NAMES: [&str; 16] = [
    "decode",
    "prefill",
    "encode",
    "EPP-Profile",
    "x-session-token",
    "session-id",
    "x-session-id",
    "deciders",
    "profiles",
    "header",
    "sources",
    "matchLabels",
    "metric",
    "maxValue",
    "threshold",
    "type",
];

#[derive(Arbitrary, Debug)]
struct AnyEndpoint {
    slot: u16,
    address: String,
    well_formed: bool,
    ready: bool,
    role: Option<u8>,
    labels: Vec<(String, String)>,
    attributes: Vec<(String, f32)>,
    age_ms: u64,
    metrics: AnyMetrics,
    in_flight: Vec<u32>,
}

#[derive(Arbitrary, Debug)]
struct AnyMetrics {
    queue: Option<f32>,
    running: Option<f32>,
    kv: Option<f32>,
    lora: Option<(Vec<String>, Vec<String>, u32)>,
}

#[derive(Arbitrary, Debug)]
enum Entry {
    Text(String),
    Socket(u8),
    Ip(u8),
}

const ROLES: [&str; 8] = [
    "encode",
    "prefill",
    "decode",
    "encode-prefill",
    "encode-decode",
    "prefill-decode",
    "both",
    "encode-prefill-decode",
];

fuzz_target!(|input: Input| {
    let Ok(pipeline) =
        Pipeline::build(&pipeline(&input)).inspect_err(|error| drop(error.to_string()))
    else {
        return;
    };
    let endpoints = input
        .pool
        .iter()
        .enumerate()
        .map(|(at, any)| any.endpoint(at))
        .collect();
    let mut metrics: Vec<_> = input.pool.iter().map(AnyEndpoint::metrics).collect();
    for (metrics, numbers) in metrics.iter_mut().zip(input.numbers.chunks(METRICS.len())) {
        for (metric, number) in METRICS.into_iter().zip(numbers) {
            if number.is_some() {
                (metric.set)(metrics, *number);
            }
        }
    }
    let Ok(snapshot) = Snapshot::try_new(Version::default(), endpoints, metrics, pipeline)
        .inspect_err(|error| drop(error.to_string()))
    else {
        return;
    };
    let model = input.predicted.as_ref().map(|(ttft_ms, tpot_ms, factors)| {
        let endpoints = snapshot.endpoints().iter().zip(factors);
        endpoints.fold(
            LatencyModel::constant(*ttft_ms, *tpot_ms),
            |model, (e, &(ttft, tpot))| model.with_endpoint(e.id, ttft, tpot),
        )
    });
    decide(
        &input,
        &snapshot.with_latency(model.map(std::sync::Arc::new)),
    );
});

fn decide(input: &Input, snapshot: &Snapshot) {
    let mut in_flight = InFlight::default();
    for (any, endpoint) in input.pool.iter().zip(snapshot.endpoints()) {
        for &tokens in &any.in_flight {
            let mut ticket = in_flight.admit(endpoint.id, tokens);
            let slo = Slo {
                ttft_us: Some(tokens),
                tpot_us: Some(tokens),
            };
            in_flight.track(
                &mut ticket,
                TrackedSlo {
                    slo,
                    counts: slo,
                    predicted: None,
                },
                "",
            );
        }
    }
    let entries: Option<Vec<String>> = input
        .subset
        .as_ref()
        .map(|entries| entries.iter().map(Entry::text).collect());
    let hint = entries
        .as_ref()
        .map(|entries| SubsetHint::parse(entries.iter().map(String::as_str)));
    let prefix_blocks: Vec<u64> = vec![0; input.request.blocks.into()];
    let headers: Vec<(&str, &str)> = input
        .request
        .headers
        .iter()
        .map(|(name, value)| (name.text(), value.as_str()))
        .collect();
    let request = Request {
        model: &input.request.model,
        subset: hint.as_ref(),
        priority: input.request.priority,
        prompt_tokens: input.request.prompt_tokens,
        prefix_blocks: &prefix_blocks,
        prefix_block_tokens: input.request.block_tokens,
        max_tokens: input.request.max_tokens,
        media_items: input.request.media_items,
        headers: &headers,
        slo: Slo {
            ttft_us: input.slo.0,
            tpot_us: input.slo.1,
        },
        prediction_based: input.prediction_based,
        stored_id: 0,
        client: 0,
    };
    let room = |room: &Option<Option<u64>>| match *room {
        None => AdapterRoom::Free,
        Some(None) => AdapterRoom::Loaded,
        Some(Some(displaced_used)) => AdapterRoom::Full { displaced_used },
    };
    let adapter_rooms: Vec<AdapterRoom> = input.local.adapter_rooms.iter().map(room).collect();
    let local = LocalState {
        in_flight: &in_flight,
        matched_blocks: &input.local.matched_blocks,
        reuse_interval: input.local.reuse_interval,
        evicted_share: input.local.evicted_share,
        ejected: &input.local.ejected,
        failing: &input.local.failing,
        last_answers: &input.local.last_answers,
        last_cold_picks: &input.local.last_cold_picks,
        adapter_rooms: &adapter_rooms,
        peers_unreachable: input.local.peers_unreachable,
        metrics_stale: input.local.metrics_stale,
    };
    let mut explanation = Explanation::default();
    let decision = schedule(
        snapshot,
        &request,
        local,
        &mut Rng::seeded(input.seed),
        Some(&mut explanation),
    );
    assert_eq!(
        schedule(
            snapshot,
            &request,
            local,
            &mut Rng::seeded(input.seed),
            None
        ),
        decision
    );
    for profile in &explanation.profiles {
        for (_, score) in profile.scores.iter().flat_map(|column| &column.scores) {
            assert!((0.0..=1.0).contains(score), "{score}");
        }
        for (_, total) in &profile.totals {
            assert!(total.is_finite(), "{total}");
        }
    }
    if let Decision::Route(route) = decision {
        let endpoint = |index| {
            snapshot
                .endpoint(index)
                .expect("a named endpoint is in the snapshot")
        };
        let picked: Vec<&Endpoint> = route.ranked.iter().map(endpoint).collect();
        assert!(picked.len() <= RANKED_MAX);
        for (place, one) in picked.iter().enumerate() {
            assert!(
                !picked[..place].iter().any(|before| before.id == one.id),
                "picked twice"
            );
        }
        for named_one in route.endpoints().map(endpoint) {
            assert_eq!(named_one.readiness, Readiness::Ready);
            assert!(
                entries
                    .as_ref()
                    .is_none_or(|entries| named(entries, &named_one.address)),
                "{} is outside the hint",
                named_one.address
            );
        }
    }
}

/// Whether an entry names the address, by meaning and not by spelling. This function shares no code
/// with the function that it checks.
fn named(entries: &[String], address: &str) -> bool {
    let socket: std::net::SocketAddr = address
        .parse()
        .expect("a hint names well-formed addresses only");
    entries.iter().map(|entry| entry.trim()).any(|entry| {
        entry.parse() == Ok(socket)
            || entry.trim_start_matches('[').trim_end_matches(']').parse() == Ok(socket.ip())
    })
}

/// Returns the name of the plugin at a position, so that one plugin can refer to another.
fn plugin_name(at: usize) -> String {
    format!("plugin {at}")
}

fn pipeline(input: &Input) -> PipelineSpec {
    let name = |at: u8| plugin_name(usize::from(at) % input.pipeline.plugins.len().max(1));
    let profile = |(name_of_it, parts): &(AnyName, Vec<(u8, f64)>)| ProfileSpec {
        name: name_of_it.text().to_owned(),
        plugins: parts
            .iter()
            .map(|&(at, weight)| ProfilePlugin {
                name: name(at),
                weight,
            })
            .collect(),
    };
    PipelineSpec {
        plugins: input
            .pipeline
            .plugins
            .iter()
            .enumerate()
            .map(|(at, any)| any.spec(at, &name))
            .collect(),
        profiles: input.pipeline.profiles.iter().map(profile).collect(),
        profile_handler: input.pipeline.handler.map(name).unwrap_or_default(),
        saturation_detector: input.pipeline.detector.map(name).unwrap_or_default(),
        ranked_max: u32::from(input.pipeline.ranked_max % 10),
        latency_prediction: input.predicted.is_some(),
    }
}

impl AnyPlugin {
    fn spec(&self, at: usize, plugin: &impl Fn(u8) -> String) -> PluginSpec {
        let known = self
            .known
            .map(|at| &PLUGINS[usize::from(at) % PLUGINS.len()]);
        let parameter = |(at, name, value): &(Option<u8>, String, AnyValue)| {
            let of_table = at.and_then(|at| {
                known.and_then(|plugin| {
                    plugin
                        .parameters
                        .get(usize::from(at) % plugin.parameters.len().max(1))
                })
            });
            (
                of_table.map_or_else(|| name.clone(), |parameter| parameter.name.to_owned()),
                value.value(plugin),
            )
        };
        PluginSpec {
            plugin_type: known
                .map_or_else(|| self.unknown.clone(), |plugin| plugin.name.to_owned()),
            name: plugin_name(at),
            parameters: self.parameters.iter().map(parameter).collect(),
        }
    }
}

impl AnyName {
    fn text(&self) -> &str {
        match self {
            Self::Known(at) => NAMES[usize::from(*at) % NAMES.len()],
            Self::Other(name) => name,
        }
    }
}

impl AnyValue {
    fn value(&self, plugin: &impl Fn(u8) -> String) -> ParameterValue {
        match self {
            Self::Number(number) => ParameterValue::Number(*number),
            Self::Whole(whole) => ParameterValue::Number(f64::from(*whole)),
            Self::Flag(flag) => ParameterValue::Flag(*flag),
            Self::Text(text) => ParameterValue::Text(text.clone()),
            Self::Plugin(at) => ParameterValue::Text(plugin(*at)),
            Self::List(items) => {
                ParameterValue::List(items.iter().map(|item| item.value(plugin)).collect())
            }
            Self::Map(entries) => ParameterValue::Map(
                entries
                    .iter()
                    .map(|(name, item)| (name.text().to_owned(), item.value(plugin)))
                    .collect(),
            ),
        }
    }
}

impl AnyEndpoint {
    fn endpoint(&self, at: usize) -> Endpoint {
        let address = if self.well_formed {
            format!("10.0.0.{}:8000", at % 256)
        } else {
            self.address.clone()
        };
        Endpoint {
            id: EndpointRef {
                slot: Slot(if self.well_formed {
                    u16::try_from(at).unwrap_or(u16::MAX)
                } else {
                    self.slot
                }),
                generation: Generation(1),
            },
            name: "pod".into(),
            address: address.into(),
            readiness: if self.ready {
                Readiness::Ready
            } else {
                Readiness::NotReady
            },
            labels: self.labels(),
            models: self.models(),
            age_ms: self.age_ms,
        }
    }

    fn labels(&self) -> Box<[(Box<str>, Box<str>)]> {
        let role = self.role.map(|at| {
            (
                ROLE_LABEL.to_owned(),
                ROLES[usize::from(at) % ROLES.len()].to_owned(),
            )
        });
        let mut labels: Vec<(Box<str>, Box<str>)> = self
            .labels
            .iter()
            .cloned()
            .chain(role)
            .map(|(key, value)| (key.into(), value.into()))
            .collect();
        labels.sort_unstable();
        labels.into()
    }

    /// Returns the served models. Every second role serves only one model, which may be the
    /// requested one.
    fn models(&self) -> std::sync::Arc<[Box<str>]> {
        self.role
            .filter(|at| at % 2 == 1)
            .map(|at| format!("m{}", at % 4).into())
            .into_iter()
            .collect()
    }

    fn metrics(&self) -> EndpointMetrics {
        let boxed = |names: &[String]| names.iter().map(|name| name.as_str().into()).collect();
        EndpointMetrics {
            queue_depth: self.metrics.queue,
            running_requests: self.metrics.running,
            kv_cache_utilization: self.metrics.kv,
            attributes: {
                let mut attributes: Vec<(Box<str>, f32)> = self
                    .attributes
                    .iter()
                    .map(|(key, value)| (key.as_str().into(), *value))
                    .collect();
                attributes.sort_by(|(a, _), (b, _)| a.cmp(b));
                attributes.into()
            },
            lora: self
                .metrics
                .lora
                .as_ref()
                .map(|(running, waiting, max)| LoraMetrics {
                    running: boxed(running),
                    waiting: boxed(waiting),
                    max: *max,
                    base_models: Box::new([]),
                }),
            ..EndpointMetrics::default()
        }
    }
}

impl Entry {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Socket(at) => format!("10.0.0.{at}:8000"),
            Self::Ip(at) => format!("10.0.0.{at}"),
        }
    }
}
