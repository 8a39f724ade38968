//! The campaign of flow control: chat beside waves of batch requests, tenants, and three bands.
//!
//! `none` is our policy without flow control, `ours` with it. `oracle` has the engines' true state
//! and step times at each pick, and the same rules. `llm-d-default` and `llm-d-tuned` pick with
//! llm-d's scorers and hold by its detectors: by the engines' reports with the default thresholds,
//! and by a number of requests at each endpoint.

mod page;

use std::io::Write;
use std::path::Path;

use scheduler::PluginSpec;
use scheduler::plugin::ParameterValue;
use serde_json::{Value, json};

use crate::grid::parallel;
use crate::hardware::LLAMA_8B_H100;
use crate::measure::{quantile, sorted};
use crate::policy::{EXACT, OURS, RoutingPolicy};
use crate::trace::{self, TraceRequest};
use crate::workload::{RequestClass, Sampler, Workload, WorkloadKind, mix};
use crate::world::{self, PoolSetting, RequestOutcome, SharingMode};

/// The policies of the published tables. `llm-d-default` is left out: at each scrape all held
/// requests that fit the last report are sent at once here, and one each millisecond in llm-d.
const POLICIES: [&str; 4] = [NONE, "ours", "oracle", "llm-d-tuned"];

/// Without flow control.
const NONE: &str = "none";

/// The published means, and the page with their tables.
const DATA: &str = "docs/data/flow-control.json";
const PAGE: &str = "docs/how-to/flow-control.md";

/// A batch wave lasts for 8 of every 20 s.
const WAVE_S: f64 = 20.0;
const WAVE_ON_S: f64 = 8.0;

/// The share of capacity that chat takes, and a tenant below its share.
const CHAT_LOAD: f64 = 0.5;
const SMALL_LOAD: f64 = 0.3;

/// The share of capacity that the lowest of three bands asks for.
const LOW_LOAD: f64 = 0.3;

/// The first seconds, which do not count: the step model learns, and no queue has built up.
const WARM_UP_S: f64 = 20.0;

/// How long what a proxy shares takes to the others, ms.
const SHARING_MS: f64 = 10.0;

/// The name of the figures of all classes together.
const ALL: &str = "all";

/// llm-d's scorers, with the weights of its guide.
const LLM_D: &str = "2/2/3";

/// The number of requests at an endpoint that llm-d's guide for flow control recommends. Among 32,
/// 64, 100, 132, 200 and 256 it is the best for batch prompts (`flow-control.md`).
const TUNED_REQUESTS: f64 = 132.0;

/// Batch requests of one kind.
#[derive(Clone, Copy, Debug)]
struct BatchKind {
    prompt: u32,
    output: f64,
    /// Tokens of the prompt that all requests of one of 150 tenants share.
    shared: u32,
    /// The rate that eight engines sustain without other requests, requests a second: what `none`
    /// serves beside chat when it is offered far too much, divided by the share that chat leaves.
    capacity: f64,
}

const PROMPTS: BatchKind = BatchKind { prompt: 6_000, output: 200.0, shared: 0, capacity: 42.0 };
const OUTPUTS: BatchKind = BatchKind { prompt: 500, output: 1_500.0, shared: 0, capacity: 59.0 };
const PREFIXES: BatchKind = BatchKind { prompt: 7_200, output: 200.0, shared: 5_632, capacity: 76.0 };

/// A tenth of [`PROMPTS`] in each request, at ten times the rate.
const SHORT_PROMPTS: BatchKind = BatchKind { prompt: 600, output: 20.0, shared: 0, capacity: 420.0 };

/// The scenarios, by name.
#[derive(Clone, Copy, Debug)]
enum FlowScenario {
    /// Chat beside waves of one kind.
    Waves(BatchKind),
    /// One tenant below its share, another that asks for the rest of the load.
    Tenants,
    /// Two tenants that ask for half of the load each; the requests of one are ten times as long.
    Lengths,
    /// Chat, a band that asks for the rest of the load, and a band below it.
    Bands,
}

const SCENARIOS: [(&str, FlowScenario); 6] = [
    ("prompts", FlowScenario::Waves(PROMPTS)),
    ("outputs", FlowScenario::Waves(OUTPUTS)),
    ("prefixes", FlowScenario::Waves(PREFIXES)),
    ("tenants", FlowScenario::Tenants),
    ("lengths", FlowScenario::Lengths),
    ("bands", FlowScenario::Bands),
];

/// What to run.
#[derive(Debug)]
pub(crate) struct FlowCampaign {
    pub(crate) scenarios: Vec<String>,
    pub(crate) policies: Vec<String>,
    pub(crate) loads: Vec<f64>,
    pub(crate) seeds: Vec<u64>,
    pub(crate) seconds: f64,
    pub(crate) proxies: usize,
}

/// One run.
#[derive(Clone, Copy, Debug)]
struct FlowRun<'c> {
    scenario: &'c str,
    policy: &'c str,
    load: f64,
    seed: u64,
    seconds: f64,
    proxies: usize,
}

// === impl FlowCampaign ===

impl FlowCampaign {
    /// Runs every combination, prints the figures, and writes them to `file`.
    pub(crate) fn run(&self, threads: usize, file: &Path) -> Result<(), String> {
        let rows: Vec<Value> = parallel(threads, &self.runs(), FlowRun::rows)?.into_iter().flatten().collect();
        print(&rows);
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        }
        std::fs::write(file, format!("{:#}\n", json!({ "rows": rows }))).map_err(|error| format!("{}: {error}", file.display()))
    }

    fn runs(&self) -> Vec<FlowRun<'_>> {
        let mut runs = Vec::new();
        for scenario in &self.scenarios {
            for &load in &self.loads {
                for &seed in &self.seeds {
                    let run = |policy| FlowRun { scenario, policy, load, seed, seconds: self.seconds, proxies: self.proxies };
                    runs.extend(self.policies.iter().map(|policy| run(policy.as_str())));
                }
            }
        }
        runs
    }
}

/// Publishes the results in `files`: their means, and the tables of the page.
///
/// # Errors
/// When a file cannot be read or written.
pub(crate) fn publish(files: &[std::path::PathBuf]) -> Result<(), String> {
    let read = |file: &Path| std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()));
    let write = |file: &str, text: String| std::fs::write(file, text).map_err(|error| format!("{file}: {error}"));
    let mut rows = Vec::new();
    for file in files {
        let results: Value = serde_json::from_str(&read(file)?).map_err(|error| format!("{}: {error}", file.display()))?;
        rows.extend(results.get("rows").and_then(Value::as_array).cloned().unwrap_or_default());
    }
    rows.retain(|row| row.get("policy").and_then(Value::as_str).is_some_and(|policy| POLICIES.contains(&policy)));
    let means = page::means(&rows);
    write(DATA, format!("{:#}\n", json!({ "rows": means })))?;
    write(PAGE, page::with_results(&read(Path::new(PAGE))?, &means)?)
}

fn print(rows: &[Value]) {
    let mut out = std::io::stdout().lock();
    let names = ["load", "seed", "ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "tokens_per_s", "share", "served"];
    let _ = write!(out, "{:<10}{:<14}{:<10}", "scenario", "policy", "class");
    names.iter().for_each(|name| drop(write!(out, "{name:>13}")));
    for row in rows {
        let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default();
        let _ = write!(out, "\n{:<10}{:<14}{:<10}", text("scenario"), text("policy"), text("class"));
        for name in names {
            let number = row.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
            let _ = write!(out, "{number:>13.3}");
        }
    }
    let _ = writeln!(out);
}

// === impl FlowRun ===

impl FlowRun<'_> {
    fn rows(&self) -> Result<Vec<Value>, String> {
        let (routing, scrape_ms) = policy(self.policy)?;
        let plain = PoolSetting::plain(LLAMA_8B_H100);
        let sharing = if self.proxies > 1 { SharingMode::After(SHARING_MS) } else { plain.sharing };
        let setting = PoolSetting { scrape_ms: scrape_ms.unwrap_or(plain.scrape_ms), proxies: self.proxies, sharing, ..plain };
        let classes = self.classes()?;
        let names: Vec<RequestClass> = classes.iter().map(|(class, _)| *class).collect();
        let workload = Workload::of_classes(classes);
        let outcomes = world::run(&workload, workload.rate, &routing, &setting, self.seed)?;
        let all = self.row(ALL, |_| true, &workload, &outcomes);
        Ok(names.iter().map(|of| self.row(of.name, |class| class == *of, &workload, &outcomes)).chain([all]).collect())
    }

    /// The requests by class.
    fn classes(&self) -> Result<Vec<(RequestClass, Vec<TraceRequest>)>, String> {
        let found = SCENARIOS.iter().find(|(name, _)| *name == self.scenario);
        let (_, scenario) = found.ok_or_else(|| format!("no scenario of flow control is called `{}`", self.scenario))?;
        let dice = &mut Sampler::seeded(mix(self.seed, 4_711));
        let class = |name, priority, flow| RequestClass { name, priority, flow };
        let rest = |taken: f64| (self.load - taken).max(0.0);
        Ok(match *scenario {
            FlowScenario::Waves(kind) => vec![
                (class("critical", 10, ""), self.chat(dice)?),
                (class("batch", 0, ""), self.batch(kind, rest(CHAT_LOAD), WAVE_ON_S, dice)),
            ],
            FlowScenario::Tenants => vec![
                (class("small", 0, "small"), self.batch(PROMPTS, SMALL_LOAD, WAVE_S, dice)),
                (class("large", 0, "large"), self.batch(PROMPTS, rest(SMALL_LOAD), WAVE_S, dice)),
            ],
            FlowScenario::Lengths => vec![
                (class("short", 0, "short"), self.batch(SHORT_PROMPTS, self.load / 2.0, WAVE_S, dice)),
                (class("long", 0, "long"), self.batch(PROMPTS, self.load / 2.0, WAVE_S, dice)),
            ],
            FlowScenario::Bands => vec![
                // Without flow control, a negative priority would be refused.
                (class("critical", 20, ""), self.chat(dice)?),
                (class("standard", 10, ""), self.batch(PROMPTS, rest(CHAT_LOAD), WAVE_S, dice)),
                (class("low", 0, ""), self.batch(PROMPTS, LOW_LOAD, WAVE_S, dice)),
            ],
        })
    }

    fn chat(&self, dice: &mut Sampler) -> Result<Vec<TraceRequest>, String> {
        let chat = trace::azure("conv")?;
        let (rate, mut at) = (CHAT_LOAD * WorkloadKind::Chat.capacity(), 0.0);
        let mut lines = Vec::new();
        while at < self.seconds * 1e3 {
            let line = chat.get(dice.below(chat.len())).ok_or("an empty trace")?;
            lines.push(TraceRequest { at, ..line.clone() });
            at += dice.exponential() * 1e3 / rate;
        }
        Ok(lines)
    }

    /// Requests that take this share of capacity on average, in the first `on_s` of every wave.
    fn batch(&self, kind: BatchKind, load: f64, on_s: f64, dice: &mut Sampler) -> Vec<TraceRequest> {
        let rate = load * kind.capacity * WAVE_S / on_s;
        let (mut lines, mut busy) = (Vec::new(), 0.0);
        if rate <= 0.0 {
            return lines;
        }
        loop {
            busy += dice.exponential() / rate;
            let at = (busy / on_s).floor() * WAVE_S + busy % on_s;
            if at >= self.seconds {
                return lines;
            }
            lines.push(TraceRequest { at: at * 1e3, ..kind.request(lines.len() as u64, dice) });
        }
    }

    /// The figures of a class. Tokens count for requests that ended before the last arrival;
    /// `served` is their share of the tokens that arrived in time to end.
    fn row(&self, class: &str, is_of: impl Fn(RequestClass) -> bool, workload: &Workload, outcomes: &[RequestOutcome]) -> Value {
        let in_time = |o: &RequestOutcome| o.at + o.e2e >= WARM_UP_S * 1e3 && o.at + o.e2e <= self.seconds * 1e3;
        let tokens = |o: &RequestOutcome| f64::from(o.prompt) + f64::from(o.output);
        let own: Vec<&RequestOutcome> =
            (0_u32..).zip(outcomes).filter(|(number, _)| is_of(workload.class(*number))).map(|(_, o)| o).collect();
        let counted: Vec<&&RequestOutcome> = own.iter().filter(|o| o.at >= WARM_UP_S * 1e3).collect();
        let served = |of: &[&RequestOutcome]| of.iter().filter(|o| in_time(o)).map(|o| tokens(o)).sum::<f64>();
        let (total, done) = (outcomes.iter().filter(|o| in_time(o)).map(tokens).sum::<f64>(), served(&own));
        let ttft = sorted(counted.iter().map(|outcome| outcome.ttft));
        let tpot: Vec<f64> = counted.iter().filter(|o| o.output > 1).map(|o| (o.e2e - o.ttft) / f64::from(o.output - 1)).collect();
        let offered = own.iter().map(|o| tokens(o)).sum::<f64>() / self.seconds;
        let (prompts, cached) = counted.iter().fold((0.0, 0.0), |(p, c), o| (p + f64::from(o.prompt), c + f64::from(o.cached)));
        let seconds = self.seconds - WARM_UP_S;
        json!({
            "scenario": self.scenario, "load": self.load, "policy": self.policy, "proxies": self.proxies, "seed": self.seed,
            "seconds": self.seconds, "class": class, "requests": counted.len(),
            "ttft_p50_ms": quantile(&ttft, 0.5), "ttft_p99_ms": quantile(&ttft, 0.99),
            "tpot_ms": tpot.iter().sum::<f64>() / tpot.len().max(1) as f64,
            "tokens_per_s": done / seconds, "share": if total > 0.0 { done / total } else { 0.0 },
            "served": if offered > 0.0 { done / seconds / offered } else { 0.0 },
            "cached": if prompts > 0.0 { cached / prompts } else { 0.0 },
        })
    }
}

// === impl BatchKind ===

impl BatchKind {
    fn request(self, number: u64, dice: &mut Sampler) -> TraceRequest {
        /// Tenants with a prefix of their own.
        const TENANTS: usize = 150;
        let tenant = dice.below(TENANTS) as u64;
        let shared = (0..u64::from(self.shared) / trace::ID_TOKENS as u64).map(|id| 10_000_000 + tenant * 64 + id);
        let own = (0..u64::from(self.prompt - self.shared).div_ceil(trace::ID_TOKENS as u64)).map(|id| 1_000_000_000 + number * 64 + id);
        let ids = if self.shared > 0 { shared.chain(own).collect() } else { Vec::new() };
        let output = dice.tokens(self.output, 0.3, (self.output / 10.0, self.output * 5.0));
        TraceRequest { prompt: self.prompt, output, ids, ..TraceRequest::default() }
    }
}

/// The policy of this name, and the time between its scrapes where it is not the usual one.
fn policy(name: &str) -> Result<(RoutingPolicy, Option<f64>), String> {
    let detector = |name: &str, parameters| PluginSpec { parameters, ..PluginSpec::of_type(name) };
    // llm-d scrapes every 50 ms, as we do here.
    let by_number = |requests: f64| {
        let number = ("maxConcurrency".to_owned(), ParameterValue::Number(requests));
        RoutingPolicy::with_flow_control(LLM_D, Some(detector("concurrency-detector", vec![number])))
    };
    Ok(match name {
        "none" => (RoutingPolicy::named(OURS)?, None),
        "ours" => (RoutingPolicy::with_flow_control(OURS, None)?, None),
        "oracle" => (RoutingPolicy::with_flow_control(EXACT, None)?, Some(0.0)),
        "llm-d-default" => (RoutingPolicy::with_flow_control(LLM_D, Some(detector("utilization-detector", Vec::new())))?, None),
        "llm-d-tuned" => (by_number(TUNED_REQUESTS)?, None),
        other => match other.strip_prefix("llm-d-tuned:").and_then(|requests| requests.parse().ok()) {
            Some(requests) => (by_number(requests)?, None),
            None => return Err(format!("no policy of flow control is called `{other}`")),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(scenario: &str, policy: &str, load: f64) -> Vec<Value> {
        FlowRun { scenario, policy, load, seed: 101, seconds: 30.0, proxies: 1 }.rows().unwrap()
    }

    fn figure(rows: &[Value], class: &str, name: &str) -> f64 {
        rows.iter().find(|row| row["class"] == class).unwrap()[name].as_f64().unwrap()
    }

    #[test]
    fn chat_passes_a_wave_and_tenants_share_tokens() {
        let [without, with] = ["none", "ours"].map(|policy| rows("prompts", policy, 2.0));
        let p99 = |rows: &[Value]| figure(rows, "critical", "ttft_p99_ms");
        assert!(p99(&with) < p99(&without) / 4.0, "{} with flow control, {} without", p99(&with), p99(&without));
        let share = figure(&rows("lengths", "ours", 2.0), "long", "share");
        assert!((0.4..=0.6).contains(&share), "the tenant with long requests gets {share}");
    }

    #[test]
    fn every_policy_and_scenario_can_be_run() {
        for name in ["none", "ours", "oracle", "llm-d-default", "llm-d-tuned", "llm-d-tuned:100"] {
            let (policy, _) = policy(name).unwrap();
            scheduler::Pipeline::build(&policy.pipeline(false).unwrap()).unwrap();
        }
        assert!(policy("dynamo").is_err());
        for (scenario, _) in SCENARIOS {
            let run = FlowRun { scenario, policy: "ours", load: 1.3, seed: 1, seconds: 2.0, proxies: 1 };
            assert!(run.classes().unwrap().iter().all(|(_, lines)| !lines.is_empty()), "{scenario}");
        }
    }
}
