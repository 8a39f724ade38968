//! Where a request's CPU goes: listeners of one Envoy that do one thing more each, from plain to the filter.
//!
//! What the steps between plain and ours add is what any picker in wasm pays that speaks the protocol; only the last is ours to make cheaper.

use e2e::envoy::Config;
use e2e::front::{Front, More};
use e2e::ports::Port;
use e2e::{Result, root};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::load::{Load, Measured};
use crate::overhead::write_bodies;
use crate::stats::{Paired, median};
use crate::world::{add_plain, addresses, listeners};
use crate::{Args, sink, write_result};

/// Compiled by `make bench` from `filter/examples/steps.rs`.
const MODULE: &str = "target/wasm32-wasip1/release/examples/steps.wasm";

const ENDPOINTS: usize = 100;

/// One, where what a step needs is no longer in the caches when the next request comes, and many.
const CONNECTIONS: [usize; 2] = [1, 16];

const BODIES: [usize; 2] = [10_000, 220_000];

/// What a listener does beyond the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Plain,
    Told,
    Retries,
    Wasm(&'static str),
    Ours,
}

const STEPS: [(Step, &str); 7] = [
    (Step::Plain, "plain Envoy, round robin"),
    (Step::Told, "told its endpoint: a header, made metadata, obeyed by `override_host`"),
    (Step::Retries, "retries armed by headers: Envoy keeps the request until it is answered"),
    (Step::Wasm("passes"), "a wasm filter that is called and does nothing"),
    (Step::Wasm("reads"), "it waits for the body and copies it out"),
    (Step::Wasm("speaks"), "it reads the headers both ways, sets three, and asks for three properties"),
    (Step::Ours, "the picker: parse, hash, look up, score, count, tell the others, read the reply"),
];

/// One row of the result file.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Row {
    pub(crate) step: String,
    pub(crate) body_bytes: usize,
    pub(crate) connections: usize,
    /// Of Envoy and the daemon, for each request.
    pub(crate) cpu_us: f64,
    /// Over the step before.
    pub(crate) added_cpu_us: f64,
    pub(crate) iqr_us: f64,
    pub(crate) p50_us: f64,
    /// Over the step before.
    pub(crate) added_p50_us: f64,
    pub(crate) iqr_p50_us: f64,
}

pub(crate) async fn bench(args: &Args) -> Result<()> {
    if !root().join(MODULE).exists() {
        return Err(format!("{MODULE} is missing: `make bench` compiles it").into());
    }
    let (servers, folder) = (Port::lease()?, tempfile::tempdir()?);
    let ports = STEPS.iter().map(|_| Port::lease()).collect::<Result<Vec<_>>>()?;
    let _sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder.path())?;
    let endpoints = addresses(ENDPOINTS, servers.number());
    let more = More { daemon: &args.daemon_argument, envoy: &["--concurrency", "1"] };
    let mut front = Front::start(&endpoints, more, |config| {
        STEPS.iter().zip(&ports).try_for_each(|((step, _), port)| add(config, *step, port, &endpoints))
    })
    .await?;
    let processes = [front.envoy().id(), front.daemon().id()];
    let mut rows = Vec::new();
    for (body_bytes, connections) in BODIES.into_iter().flat_map(|bytes| CONNECTIONS.map(|connections| (bytes, connections))) {
        let bodies = write_bodies(body_bytes, false, folder.path())?;
        let mut runs: Vec<Vec<Measured>> = vec![Vec::new(); STEPS.len()];
        for round in 0..args.rounds {
            for turn in 0..STEPS.len() {
                let at = (round + turn) % STEPS.len();
                let target = if STEPS[at].0 == Step::Ours { Front::address() } else { ports[at].address() };
                let (bodies, seconds) = (bodies.clone(), args.seconds);
                let load = Load { target, bodies, connections, seconds, rate: None, processes, headers: &[] };
                runs[at].push(load.run(folder.path()).await?);
            }
        }
        rows.extend(compare(body_bytes, connections, &runs));
    }
    front.stop().await?;
    write_result("steps", &rows)
}

fn compare(body_bytes: usize, connections: usize, runs: &[Vec<Measured>]) -> Vec<Row> {
    let of = |figure: fn(&Measured) -> f64, at: usize| runs[at].iter().map(figure).collect::<Vec<f64>>();
    let row = |at: usize| {
        let added = |figure| Paired::of(&of(figure, at), &of(figure, at.saturating_sub(1)));
        let (cpu, p50) = (added(|run| run.cpu_us), added(|run| run.p50_us));
        Row {
            step: STEPS[at].1.to_owned(),
            body_bytes,
            connections,
            cpu_us: median(&of(|run| run.cpu_us, at)),
            added_cpu_us: cpu.median,
            iqr_us: cpu.iqr,
            p50_us: median(&of(|run| run.p50_us, at)),
            added_p50_us: p50.median,
            iqr_p50_us: p50.iqr,
        }
    };
    let rows: Vec<Row> = (0..STEPS.len()).map(row).collect();
    for row in &rows {
        let Row { step, cpu_us, added_cpu_us, iqr_us, p50_us, added_p50_us, iqr_p50_us, .. } = row;
        println!(
            "{body_bytes:>7} B c={connections:<2} cpu {cpu_us:>6.1} + {added_cpu_us:.1} ({iqr_us:.1})  p50 {p50_us:>6.1} + {added_p50_us:.1} ({iqr_p50_us:.1})  {step}"
        );
    }
    rows
}

/// A listener for this step, where there is none yet.
fn add(config: &mut Config, step: Step, port: &Port, endpoints: &[String]) -> Result<()> {
    let endpoint = endpoints.first().ok_or("no endpoints")?;
    let filters = match step {
        Step::Ours => return Ok(()),
        Step::Plain => return add_plain(config, port.address(), endpoints),
        Step::Told => vec![orders(endpoint, false)],
        Step::Retries => vec![orders(endpoint, true)],
        Step::Wasm("speaks") => vec![module("speaks", endpoint)],
        Step::Wasm(depth) => vec![orders(endpoint, true), module(depth, endpoint)],
    };
    let listeners = listeners(config)?;
    let mut listener = listeners.first().cloned().ok_or("the config has no listener")?;
    listener["name"] = format!("{step:?}").into();
    listener["address"]["socket_address"]["port_value"] = port.number().into();
    let shipped = listener.pointer_mut("/filter_chains/0/filters/0/typed_config/http_filters").and_then(Value::as_array_mut);
    let shipped = shipped.ok_or("no HTTP filters")?;
    let at = shipped.iter().position(|filter| filter["name"] == "switchpoint").ok_or("no picker")?;
    shipped.splice(at..=at, filters);
    listeners.push(listener);
    Ok(())
}

/// Sets the headers of a picker that always says the same, those of retries on request.
fn orders(endpoint: &str, retries: bool) -> Value {
    let headers = [
        ("x-gateway-destination-endpoint", endpoint),
        ("x-envoy-retry-on", "connect-failure,reset,retriable-status-codes"),
        ("x-envoy-max-retries", "2"),
    ];
    let mutation = |(key, value): &(&str, &str)| json!({"append": {"header": {"key": key, "value": value}}});
    let mutations: Vec<Value> = headers.iter().take(if retries { 3 } else { 1 }).map(mutation).collect();
    json!({"name": "orders", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {"request_mutations": mutations},
    }})
}

fn module(depth: &str, endpoint: &str) -> Value {
    json!({"name": "steps", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
        "config": {
            "name": depth, "root_id": depth, "allow_on_headers_stop_iteration": true,
            "vm_config": {"vm_id": "steps", "runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": MODULE}}},
            "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": format!("{depth} {endpoint}")},
        },
    }})
}
