//! Any profile, pool and request: scheduling never panics, never leaves the subset hint, never picks who is not ready.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use scheduler::in_flight::InFlight;
use scheduler::plugin::{PLUGINS, Value};
use scheduler::{
    Decision, Endpoint, EndpointMetrics, EndpointRef, Explanation, Incarnation, Local, LoraMetrics, PluginSpec, Profile, ProfileSpec,
    Readiness, Request, Rng, Slot, Snapshot, SubsetHint, Version, schedule,
};

#[derive(Arbitrary, Debug)]
struct Input {
    plugins: Vec<AnyPlugin>,
    ranked_max: u8,
    pool: Vec<AnyEndpoint>,
    subset: Option<Vec<Entry>>,
    model: String,
    prompt_tokens: u32,
    blocks: u8,
    block_tokens: u32,
    /// May be shorter or longer than the pool.
    matched_blocks: Vec<u32>,
    ejected: Vec<bool>,
    metrics_stale: bool,
    seed: u64,
}

#[derive(Arbitrary, Debug)]
struct AnyPlugin {
    /// One of the table, or else a name of its own.
    known: Option<u8>,
    unknown: String,
    weight: f64,
    parameters: Vec<(Option<u8>, String, AnyValue)>,
}

#[derive(Arbitrary, Debug)]
enum AnyValue {
    Number(f64),
    Whole(u8),
    Flag(bool),
    Text(String),
}

#[derive(Arbitrary, Debug)]
struct AnyEndpoint {
    slot: u16,
    address: String,
    well_formed: bool,
    ready: bool,
    age_ms: u64,
    queue: Option<f32>,
    running: Option<f32>,
    kv: Option<f32>,
    lora: Option<(Vec<String>, Vec<String>, u32)>,
    in_flight: Vec<u32>,
}

#[derive(Arbitrary, Debug)]
enum Entry {
    Text(String),
    Socket(u8),
    Ip(u8),
}

fuzz_target!(|input: Input| {
    let Ok(profile) = Profile::build(&profile(&input)).inspect_err(|error| drop(error.to_string())) else {
        return;
    };
    let endpoints = input.pool.iter().enumerate().map(|(at, any)| any.endpoint(at)).collect();
    let metrics = input.pool.iter().map(AnyEndpoint::metrics).collect();
    let Ok(snapshot) = Snapshot::try_new(Version::default(), endpoints, metrics, profile).inspect_err(|error| drop(error.to_string()))
    else {
        return;
    };
    decide(&input, &snapshot);
});

fn decide(input: &Input, snapshot: &Snapshot) {
    let mut in_flight = InFlight::default();
    for (any, endpoint) in input.pool.iter().zip(snapshot.endpoints()) {
        any.in_flight.iter().for_each(|&tokens| drop(in_flight.admit(endpoint.id, tokens)));
    }
    let entries: Option<Vec<String>> = input.subset.as_ref().map(|entries| entries.iter().map(Entry::text).collect());
    let hint = entries.as_ref().map(|entries| SubsetHint::parse(entries.iter().map(String::as_str)));
    let prefix_blocks: Vec<u64> = (0..u64::from(input.blocks)).collect();
    let request = Request {
        model: &input.model,
        subset: hint.as_ref(),
        prompt_tokens: input.prompt_tokens,
        prefix_blocks: &prefix_blocks,
        prefix_block_tokens: input.block_tokens,
        ..Request::default()
    };
    let local =
        Local { in_flight: &in_flight, matched_blocks: &input.matched_blocks, ejected: &input.ejected, metrics_stale: input.metrics_stale };
    let mut explanation = Explanation::default();
    let decision = schedule(snapshot, &request, local, &mut Rng::seeded(input.seed), Some(&mut explanation));
    assert_eq!(schedule(snapshot, &request, local, &mut Rng::seeded(input.seed), None), decision);
    for (_, score) in explanation.scores.iter().flat_map(|column| &column.scores) {
        assert!((0.0..=1.0).contains(score), "{score}");
    }
    for (_, total) in &explanation.totals {
        assert!(total.is_finite(), "{total}");
    }
    if let Decision::Route(ranked) = decision {
        let picked: Vec<&Endpoint> = ranked.iter().map(|index| snapshot.endpoint(index).expect("a pick is of the snapshot")).collect();
        assert!(picked.len() <= snapshot.profile().ranked_max());
        for (place, endpoint) in picked.iter().enumerate() {
            assert_eq!(endpoint.readiness, Readiness::Ready);
            assert!(!picked[..place].iter().any(|before| before.id == endpoint.id), "picked twice");
            assert!(entries.as_ref().is_none_or(|entries| named(entries, &endpoint.address)), "{} is outside the hint", endpoint.address);
        }
    }
}

/// Does an entry name the address? By meaning, not by spelling; written apart from the code it checks.
fn named(entries: &[String], address: &str) -> bool {
    let socket: std::net::SocketAddr = address.parse().expect("a hint names well-formed addresses only");
    entries
        .iter()
        .map(|entry| entry.trim())
        .any(|entry| entry.parse() == Ok(socket) || entry.trim_start_matches('[').trim_end_matches(']').parse() == Ok(socket.ip()))
}

fn profile(input: &Input) -> ProfileSpec {
    ProfileSpec {
        name: String::new(),
        plugins: input.plugins.iter().map(AnyPlugin::spec).collect(),
        ranked_max: u32::from(input.ranked_max % 10),
    }
}

impl AnyPlugin {
    fn spec(&self) -> PluginSpec {
        let known = self.known.map(|at| &PLUGINS[usize::from(at) % PLUGINS.len()]);
        let parameter = |(at, name, value): &(Option<u8>, String, AnyValue)| {
            let of_table =
                at.and_then(|at| known.and_then(|plugin| plugin.parameters.get(usize::from(at) % plugin.parameters.len().max(1))));
            (of_table.map_or_else(|| name.clone(), |parameter| parameter.name.to_owned()), value.value())
        };
        PluginSpec {
            plugin_type: known.map_or_else(|| self.unknown.clone(), |plugin| plugin.name.to_owned()),
            name: self.unknown.clone(),
            weight: self.weight,
            parameters: self.parameters.iter().map(parameter).collect(),
        }
    }
}

impl AnyValue {
    fn value(&self) -> Value {
        match self {
            Self::Number(number) => Value::Number(*number),
            Self::Whole(whole) => Value::Number(f64::from(*whole)),
            Self::Flag(flag) => Value::Flag(*flag),
            Self::Text(text) => Value::Text(text.clone()),
        }
    }
}

impl AnyEndpoint {
    fn endpoint(&self, at: usize) -> Endpoint {
        let address = if self.well_formed { format!("10.0.0.{}:8000", at % 256) } else { self.address.clone() };
        Endpoint {
            id: EndpointRef {
                slot: Slot(if self.well_formed { u16::try_from(at).unwrap_or(u16::MAX) } else { self.slot }),
                incarnation: Incarnation(1),
            },
            name: "pod".into(),
            address: address.into(),
            readiness: if self.ready { Readiness::Ready } else { Readiness::NotReady },
            labels: Box::new([]),
            age_ms: self.age_ms,
        }
    }

    fn metrics(&self) -> EndpointMetrics {
        let boxed = |names: &[String]| names.iter().map(|name| name.as_str().into()).collect();
        EndpointMetrics {
            queue_depth: self.queue,
            running_requests: self.running,
            kv_cache_utilization: self.kv,
            lora: self.lora.as_ref().map(|(running, waiting, max)| LoraMetrics {
                running: boxed(running),
                waiting: boxed(waiting),
                max: *max,
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
