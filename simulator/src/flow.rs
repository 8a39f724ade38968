//! The campaign of flow control: chat beside waves of batch requests.
//!
//! `none` is our policy without flow control, `ours` with it. `oracle` has the engines' true state
//! and step times at each pick, and the same rules.

use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use crate::grid::parallel;
use crate::hardware::LLAMA_8B_H100;
use crate::measure::{quantile, sorted};
use crate::policy::{OURS, RoutingPolicy};
use crate::trace::{self, TraceRequest};
use crate::workload::{Sampler, Workload, WorkloadKind, mix};
use crate::world::{self, PoolSetting, RequestOutcome};

/// The name of the scenario: batch prompts of 6,000 tokens with 200 tokens of output, for 8 of
/// every 20 s.
const SCENARIO: &str = "batch-waves";
const BATCH_PROMPT: u32 = 6_000;
const BATCH_OUTPUT: f64 = 200.0;
const WAVE_S: f64 = 20.0;
const WAVE_ON_S: f64 = 8.0;

/// The share of capacity that chat takes.
const CHAT_LOAD: f64 = 0.5;

/// Batch requests that the pool sustains alone, requests a second: the eight engines compute one
/// prompt after the other, and a third of the time goes to decode steps.
const BATCH_CAPACITY: f64 = 14.0;

/// The classes: name and priority.
const CLASSES: [(&str, i32); 2] = [("critical", 10), ("batch", 0)];

/// The first seconds, which do not count: the step model learns, and no queue has built up.
const WARM_UP_S: f64 = 20.0;

/// Runs every combination, prints the figures, and writes them to `file`.
pub(crate) fn campaign(
    (policies, loads, seeds): (&[String], &[f64], &[u64]),
    seconds: f64,
    threads: usize,
    file: &Path,
) -> Result<(), String> {
    let jobs: Vec<(f64, u64, &String)> = loads
        .iter()
        .flat_map(|&load| seeds.iter().flat_map(move |&seed| policies.iter().map(move |policy| (load, seed, policy))))
        .collect();
    let rows = parallel(threads, &jobs, |&(load, seed, policy)| run(load, seed, policy, seconds))?;
    let mut out = std::io::stdout().lock();
    let _ = writeln!(
        out,
        "{:>5} {:<8}{:>5} {:<9}{:>12}{:>12}{:>10}{:>12}",
        "load", "policy", "seed", "class", "TTFT p50", "p99", "TPOT", "tokens/s"
    );
    for row in rows.iter().flatten() {
        let number = |name: &str| row.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
        let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default();
        let _ = writeln!(
            out,
            "{:>5} {:<8}{:>5} {:<9}{:>12.1}{:>12.1}{:>10.1}{:>12.0}",
            number("load"),
            text("policy"),
            number("seed"),
            text("class"),
            number("ttft_p50_ms"),
            number("ttft_p99_ms"),
            number("tpot_ms"),
            number("tokens_per_s")
        );
    }
    let rows: Vec<Value> = rows.into_iter().flatten().collect();
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    std::fs::write(file, format!("{:#}\n", json!({ "rows": rows }))).map_err(|error| format!("{}: {error}", file.display()))
}

fn run(load: f64, seed: u64, policy: &str, seconds: f64) -> Result<Vec<Value>, String> {
    let plain = PoolSetting::plain(LLAMA_8B_H100);
    let (routing, setting) = match policy {
        "none" => (RoutingPolicy::named(OURS)?, plain),
        "ours" => (RoutingPolicy::with_flow_control(false)?, plain),
        "oracle" => (RoutingPolicy::with_flow_control(true)?, PoolSetting { scrape_ms: 0.0, ..plain }),
        other => return Err(format!("no policy of flow control is called `{other}`")),
    };
    let workload = workload(load, seed, seconds)?;
    let outcomes = world::run(&workload, workload.rate, &routing, &setting, seed)?;
    Ok(CLASSES.iter().map(|&(class, priority)| row((load, seed, policy, seconds), (class, priority), &workload, &outcomes)).collect())
}

/// Chat at its own share, and as much batch as the load needs.
fn workload(load: f64, seed: u64, seconds: f64) -> Result<Workload, String> {
    let dice = &mut Sampler::seeded(mix(seed, 4_711));
    let chat = trace::azure("conv")?;
    let (rate, mut at) = (CHAT_LOAD * WorkloadKind::Chat.capacity(), 0.0);
    let mut lines = Vec::new();
    while at < seconds * 1e3 {
        at += dice.exponential() * 1e3 / rate;
        let line = chat.get(dice.below(chat.len())).ok_or("an empty trace")?;
        lines.push(TraceRequest { at, ..line.clone() });
    }
    let mut batch = Vec::new();
    let rate = (load - CHAT_LOAD).max(0.0) * BATCH_CAPACITY * WAVE_S / WAVE_ON_S;
    let mut busy = 0.0;
    while rate > 0.0 {
        busy += dice.exponential() / rate;
        let at = (busy / WAVE_ON_S).floor() * WAVE_S + busy % WAVE_ON_S;
        if at >= seconds {
            break;
        }
        let output = dice.tokens(BATCH_OUTPUT, 0.3, (20.0, 1_000.0));
        batch.push(TraceRequest { at: at * 1e3, prompt: BATCH_PROMPT, output, ..TraceRequest::default() });
    }
    let [(_, critical), (_, low)] = CLASSES;
    Ok(Workload::of_classes(vec![(lines, critical), (batch, low)]))
}

/// The figures of a class. Tokens count for requests that ended before the last arrival.
fn row(
    (load, seed, policy, seconds): (f64, u64, &str, f64),
    (class, priority): (&str, i32),
    workload: &Workload,
    outcomes: &[RequestOutcome],
) -> Value {
    let of_class = |of: &dyn Fn(&RequestOutcome) -> f64| -> f64 {
        let counted = (0_u32..).zip(outcomes).filter(|(number, _)| workload.priority(*number) == priority);
        counted.filter(|(_, o)| o.at >= WARM_UP_S * 1e3 && o.at + o.e2e <= seconds * 1e3).map(|(_, o)| of(o)).sum()
    };
    let tokens = |o: &RequestOutcome| f64::from(o.prompt) + f64::from(o.output);
    let all = (0_u32..).zip(outcomes).filter(|(number, o)| workload.priority(*number) == priority && o.at >= WARM_UP_S * 1e3);
    let all: Vec<&RequestOutcome> = all.map(|(_, outcome)| outcome).collect();
    let ttft = sorted(all.iter().map(|outcome| outcome.ttft));
    let tpot: Vec<f64> = all.iter().filter(|o| o.output > 1).map(|o| (o.e2e - o.ttft) / f64::from(o.output - 1)).collect();
    let total: f64 = outcomes.iter().filter(|o| o.at >= WARM_UP_S * 1e3 && o.at + o.e2e <= seconds * 1e3).map(tokens).sum();
    let own = of_class(&tokens);
    json!({
        "scenario": SCENARIO, "load": load, "policy": policy, "proxies": 1, "workers": 1, "seed": seed, "class": class,
        "ttft_p50_ms": quantile(&ttft, 0.5), "ttft_p99_ms": quantile(&ttft, 0.99),
        "tpot_ms": tpot.iter().sum::<f64>() / tpot.len().max(1) as f64,
        "tokens_per_s": own / (seconds - WARM_UP_S), "share": if total > 0.0 { own / total } else { 0.0 },
        "held": Value::Null, "rejected": 0, "failed": 0,
    })
}
