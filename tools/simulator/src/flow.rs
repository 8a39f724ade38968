//! The campaign of flow control: chat beside waves of batch requests, tenants, and bands.
//!
//! The policy `none` is Switchpoint's policy without flow control, and `ours` is the same policy
//! with flow control. `oracle` has the rules of `ours`, but knows the engines' true state and step
//! times at each pick. `llm-d-default` and `llm-d-tuned` pick with llm-d's scorers and hold
//! requests by llm-d's detectors. `llm-d-default` uses the engines' reports and the default
//! thresholds, `llm-d-tuned` a maximum number of requests at each endpoint. `dynamo` picks by the
//! cost of Dynamo's router and holds requests by its queue.

mod overshoot;
mod scenario;

use std::io::Write;
use std::path::PathBuf;

use scheduler::PluginSpec;
use scheduler::plugin::ParameterValue;
use serde_json::{Value, json};

use scenario::FlowScenario;

use crate::hardware::LLAMA_8B_H100;
use crate::parallel::parallel;
use crate::policy::{EXACT, GateFairness, GateRule, OURS, RoutingPolicy};
use crate::quantile::{quantile, sorted};
use crate::results;
use crate::workload::{RequestClass, Sampler, Workload, mix};
use crate::world::{self, PoolSetting, RequestOutcome, SharingMode};

/// The policy without flow control.
const NONE: &str = "none";

/// The length of the first part of a run, in s, which is not measured. In this part the step model
/// learns, and queues are still short.
const WARM_UP_S: f64 = 20.0;

/// The name under which the figures of all classes together are written.
const ALL: &str = "all";

/// The policy with llm-d's scorers and the weights of llm-d's guide.
const LLM_D: &str = "2/2/3";

/// The maximum number of requests at an endpoint that llm-d's guide for flow control recommends. Of
/// 32, 64, 100, 132, 200 and 256, this number is the best for batch prompts (`flow-control.md`).
const TUNED_REQUESTS: f64 = 132.0;

/// Dynamo's `--router-queue-threshold`. An engine is busy if it has more prompt tokens to compute
/// than this multiple of `max_num_batched_tokens`. 16 is the default in the documentation of the
/// router. The simulated queue also has the default `--router-queue-policy fcfs`.
const DYNAMO_THRESHOLD: f64 = 16.0;

/// Selects the scenarios, policies, loads and seeds to simulate.
#[derive(clap::Args)]
pub(crate) struct FlowCampaign {
    /// The scenarios: prompts, outputs, prefixes, unlike, pd, unknown-lengths, tenants, lengths,
    /// bands, starvation, two-engines.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "prompts,outputs,prefixes"
    )]
    scenarios: Vec<String>,
    /// The policies, separated by semicolons: none, ours, oracle, llm-d-default, llm-d-tuned,
    /// dynamo. llm-d-tuned and dynamo take their limit after a colon: `llm-d-tuned:100`.
    #[arg(
        long,
        value_delimiter = ';',
        default_value = "none;ours;oracle;llm-d-default;llm-d-tuned;dynamo"
    )]
    policies: Vec<String>,
    /// Loads, as shares of capacity; chat is 0.5 of it.
    #[arg(long, value_delimiter = ',', default_value = "0.7,1,1.3,2")]
    loads: Vec<f64>,
    /// Seeds.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,5")]
    seeds: Vec<u64>,
    #[command(flatten)]
    proxies: FlowProxies,
    /// The file of results.
    #[arg(long, default_value = "target/bench/flow-control.json")]
    file: PathBuf,
}

/// The length of a run, and its proxies.
#[derive(Clone, Copy, Debug, clap::Args)]
struct FlowProxies {
    /// Seconds of arrivals.
    #[arg(long, default_value_t = 300.0)]
    seconds: f64,
    /// Proxies.
    #[arg(long, default_value_t = 1)]
    proxies: usize,
    /// The time until the other proxies receive what a proxy shares, ms.
    #[arg(long, default_value_t = 10.0)]
    sharing_ms: f64,
    /// Let the proxies receive nothing from each other.
    #[arg(long)]
    alone: bool,
}

#[derive(Clone, Copy, Debug)]
struct FlowRun<'c> {
    scenario: &'c str,
    policy: &'c str,
    load: f64,
    seed: u64,
    proxies: FlowProxies,
}

// === impl FlowCampaign ===

impl FlowCampaign {
    /// Runs every combination of scenario, load, seed and policy. Prints the figures, and writes
    /// them to the file.
    pub(crate) fn run(&self, threads: usize) -> Result<(), String> {
        let rows = parallel(threads, &self.runs(), FlowRun::rows)?.concat();
        print(&rows);
        results::write(&self.file, &json!({ "rows": rows }))
    }

    fn runs(&self) -> Vec<FlowRun<'_>> {
        let mut runs = Vec::new();
        for scenario in &self.scenarios {
            for &load in &self.loads {
                for &seed in &self.seeds {
                    runs.extend(self.policies.iter().map(|policy| FlowRun {
                        scenario,
                        policy,
                        load,
                        seed,
                        proxies: self.proxies,
                    }));
                }
            }
        }
        runs
    }
}

fn print(rows: &[Value]) {
    let mut out = std::io::stdout().lock();
    let names = [
        "proxies",
        "load",
        "seed",
        "ttft_p50_ms",
        "ttft_p99_ms",
        "tpot_ms",
        "tokens_per_s",
        "share",
        "served",
        "overshoot",
        "per_proxy",
        "beyond",
    ];
    let _ = write!(out, "{:<10}{:<14}{:<10}", "scenario", "policy", "class");
    names
        .iter()
        .for_each(|name| drop(write!(out, "{name:>13}")));
    for row in rows {
        let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default();
        let _ = write!(
            out,
            "\n{:<10}{:<14}{:<10}",
            text("scenario"),
            text("policy"),
            text("class")
        );
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
        let (workload, names, outcomes) = self.outcomes()?;
        let all = self.row(ALL, |_| true, &workload, &outcomes);
        Ok(names
            .iter()
            .map(|of| self.row(of.name, |class| class == *of, &workload, &outcomes))
            .chain([all])
            .collect())
    }

    /// Plays the run. Returns its workload, the classes of the requests, and their outcomes.
    fn outcomes(&self) -> Result<(Workload, Vec<RequestClass>, Vec<RequestOutcome>), String> {
        let (routing, scrape_ms) = policy(self.policy)?;
        let scenario = FlowScenario::named(self.scenario)?;
        let plain = scenario.pool();
        let FlowProxies {
            seconds,
            proxies,
            sharing_ms,
            alone,
        } = self.proxies;
        let sharing = if proxies > 1 && !alone {
            SharingMode::After(sharing_ms)
        } else {
            plain.sharing
        };
        let setting = PoolSetting {
            scrape_ms: scrape_ms.unwrap_or(plain.scrape_ms),
            proxies,
            sharing,
            ..plain
        };
        let classes = scenario.classes(
            self.load,
            seconds,
            &mut Sampler::seeded(mix(self.seed, 4_711)),
        )?;
        let names: Vec<RequestClass> = classes.iter().map(|(class, _)| *class).collect();
        let workload = Workload::of_classes(classes);
        let outcomes = world::run(&workload, &routing, &setting, self.seed)?;
        Ok((workload, names, outcomes))
    }

    /// Returns the figures of a class. `tokens_per_s` counts the tokens of requests that ended
    /// after the warm-up and before the last arrival. `computed_per_s` leaves out the tokens that
    /// an engine had cached. `served` is `tokens_per_s` divided by the tokens of the class that
    /// arrive each second. For `overshoot`, `per_proxy` and `beyond` see [`overshoot`]. These three
    /// figures are 0 for all policies except ours.
    fn row(
        &self,
        class: &str,
        is_of: impl Fn(RequestClass) -> bool,
        workload: &Workload,
        outcomes: &[RequestOutcome],
    ) -> Value {
        let FlowProxies {
            seconds: arrivals_s,
            proxies,
            sharing_ms,
            ..
        } = self.proxies;
        let in_time = |o: &RequestOutcome| {
            o.at + o.e2e >= WARM_UP_S * 1e3 && o.at + o.e2e <= arrivals_s * 1e3
        };
        let tokens = |o: &RequestOutcome| f64::from(o.prompt) + f64::from(o.output);
        let own: Vec<&RequestOutcome> = (0_u32..)
            .zip(outcomes)
            .filter(|(number, _)| is_of(workload.class(*number)))
            .map(|(_, o)| o)
            .collect();
        let counted: Vec<&&RequestOutcome> =
            own.iter().filter(|o| o.at >= WARM_UP_S * 1e3).collect();
        let served = |of: &[&RequestOutcome]| {
            of.iter()
                .filter(|o| in_time(o))
                .map(|o| tokens(o))
                .sum::<f64>()
        };
        let reused: f64 = own
            .iter()
            .filter(|o| in_time(o))
            .map(|o| f64::from(o.cached))
            .sum();
        let total = outcomes
            .iter()
            .filter(|o| in_time(o))
            .map(tokens)
            .sum::<f64>();
        let done = served(&own);
        let ttft = sorted(counted.iter().map(|outcome| outcome.ttft));
        let tpot: Vec<f64> = counted
            .iter()
            .filter(|o| o.output > 1)
            .map(|o| (o.e2e - o.ttft) / f64::from(o.output - 1))
            .collect();
        let offered = own.iter().map(|o| tokens(o)).sum::<f64>() / arrivals_s;
        let (prompts, cached) = counted.iter().fold((0.0, 0.0), |(p, c), o| {
            (p + f64::from(o.prompt), c + f64::from(o.cached))
        });
        // Requests sent after the arrivals do not count: lower bands may then fill the engines.
        let sent: Vec<&RequestOutcome> = own
            .iter()
            .copied()
            .filter(|o| (WARM_UP_S * 1e3..arrivals_s * 1e3).contains(&o.sent))
            .collect();
        let seconds = arrivals_s - WARM_UP_S;
        json!({
            "scenario": self.scenario, "load": self.load, "policy": self.policy, "proxies": proxies, "seed": self.seed,
            "seconds": arrivals_s, "class": class, "requests": counted.len(),
            "ttft_p50_ms": quantile(&ttft, 0.5), "ttft_p99_ms": quantile(&ttft, 0.99),
            "tpot_ms": tpot.iter().sum::<f64>() / tpot.len().max(1) as f64,
            "tokens_per_s": done / seconds, "computed_per_s": (done - reused) / seconds, "share": if total > 0.0 { done / total } else { 0.0 },
            "served": if offered > 0.0 { done / seconds / offered } else { 0.0 },
            "cached": if prompts > 0.0 { cached / prompts } else { 0.0 },
            "overshoot": overshoot::most_at_once(&sent), "per_proxy": overshoot::most_of_one_proxy(sharing_ms, &sent),
            "beyond": overshoot::share_beyond(&sent),
        })
    }
}

/// Returns the policy with this name, and the time between its scrapes if this is not the pool's
/// usual time. A number after a colon in the name is the limit of `llm-d-tuned` or `dynamo`.
fn policy(name: &str) -> Result<(RoutingPolicy, Option<f64>), String> {
    let (name, number) = name
        .split_once(':')
        .map_or((name, None), |(name, number)| (name, Some(number)));
    let number = number
        .map(|number| {
            number
                .parse::<f64>()
                .map_err(|_| format!("`{number}` is no number"))
        })
        .transpose()?;
    // All policies except `oracle` use the pool's usual time between two scrapes, which is 50 ms,
    // as in llm-d.
    Ok(match name {
        NONE => (RoutingPolicy::named(OURS)?, None),
        "ours" => (RoutingPolicy::with_flow_control(OURS)?, None),
        "oracle" => (RoutingPolicy::with_flow_control(EXACT)?, Some(0.0)),
        "llm-d-default" => {
            let detector = PluginSpec::of_type("utilization-detector");
            (
                RoutingPolicy::behind_llm_d(LLM_D, detector, GateFairness::Strict)?,
                None,
            )
        }
        "llm-d-tuned" => {
            let most = (
                "maxConcurrency".to_owned(),
                ParameterValue::Number(number.unwrap_or(TUNED_REQUESTS)),
            );
            let detector = PluginSpec {
                parameters: vec![most],
                ..PluginSpec::of_type("concurrency-detector")
            };
            (
                RoutingPolicy::behind_llm_d(LLM_D, detector, GateFairness::RoundRobin)?,
                None,
            )
        }
        "dynamo" => {
            let most = number.unwrap_or(DYNAMO_THRESHOLD) * LLAMA_8B_H100.budget as f64;
            (
                RoutingPolicy::Gated(
                    Box::new(RoutingPolicy::named("dynamo")?),
                    GateRule::PrefillTokens(most),
                ),
                None,
            )
        }
        other => return Err(format!("no policy of flow control is called `{other}`")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: FlowProxies = FlowProxies {
        seconds: 30.0,
        proxies: 1,
        sharing_ms: 10.0,
        alone: false,
    };

    fn rows(scenario: &str, policy: &str, load: f64) -> Vec<Value> {
        let run = FlowRun {
            scenario,
            policy,
            load,
            seed: 101,
            proxies: ONE,
        };
        run.rows().unwrap()
    }

    fn figure(rows: &[Value], class: &str, name: &str) -> f64 {
        rows.iter().find(|row| row["class"] == class).unwrap()[name]
            .as_f64()
            .unwrap()
    }

    #[test]
    fn chat_passes_a_wave_and_tenants_share_tokens() {
        let [without, with] = ["none", "ours"].map(|policy| rows("prompts", policy, 2.0));
        let p99 = |rows: &[Value]| figure(rows, "critical", "ttft_p99_ms");
        assert!(
            p99(&with) < p99(&without) / 4.0,
            "{} with flow control, {} without",
            p99(&with),
            p99(&without)
        );
        let share = figure(&rows("lengths", "ours", 2.0), "long", "share");
        assert!(
            (0.4..=0.6).contains(&share),
            "the tenant with long requests gets {share}"
        );
    }

    /// Plays a run, and returns `overshoot`, `per_proxy` and `beyond` of all requests. Also returns
    /// whether the first two are within what `flow-control.md` says, and the share `beyond` is
    /// within the argument of this name.
    fn too_many(proxies: FlowProxies, beyond: f64) -> ([f64; 3], bool) {
        let run = FlowRun {
            scenario: "prompts",
            policy: "ours",
            load: 2.0,
            seed: 1,
            proxies: FlowProxies {
                seconds: 40.0,
                ..proxies
            },
        };
        let rows = run.rows().unwrap();
        let figures = ["overshoot", "per_proxy", "beyond"].map(|name| figure(&rows, ALL, name));
        let few = [1.5 * proxies.proxies as f64, 2.0, beyond];
        (
            figures,
            figures.iter().zip(few).all(|(figure, few)| *figure <= few),
        )
    }

    #[test]
    fn proxies_that_share_send_few_requests_too_many() {
        assert_eq!(too_many(ONE, 0.0).0, [0.0; 3], "one proxy knows all");
        for (proxies, beyond) in [(2, 0.06), (4, 0.12)] {
            let (figures, are_few) = too_many(FlowProxies { proxies, ..ONE }, beyond);
            assert!(
                are_few && figures[2] > 0.0,
                "{proxies} proxies: {figures:?}"
            );
        }
        let four = FlowProxies { proxies: 4, ..ONE };
        let late = FlowProxies {
            sharing_ms: 100.0,
            ..four
        };
        let (figures, are_few) = too_many(late, 0.12);
        assert!(
            !are_few,
            "sharing keeps them few: {figures:?} with a long delay"
        );
        let alone = FlowProxies {
            alone: true,
            ..four
        };
        let (figures, are_few) = too_many(alone, 0.12);
        assert!(
            are_few,
            "each that hears nothing keeps to its quarter: {figures:?}"
        );
    }

    #[test]
    fn every_policy_can_be_built() {
        for name in [
            NONE,
            "ours",
            "oracle",
            "llm-d-default",
            "llm-d-tuned:100",
            "dynamo:2",
        ] {
            let (policy, _) = policy(name).unwrap();
            scheduler::Pipeline::build(&policy.pipeline(false).unwrap()).unwrap();
        }
        assert!(policy("envoy").is_err() && policy("dynamo:much").is_err());
    }

    #[test]
    fn the_queues_of_others_let_chat_pass_a_wave() {
        let p99 = |policy: &str| figure(&rows("prompts", policy, 2.0), "critical", "ttft_p99_ms");
        let without = p99(NONE);
        for policy in ["llm-d-default", "llm-d-tuned", "dynamo:0.5"] {
            assert!(
                p99(policy) < without / 2.0,
                "{policy}: {} for {without}",
                p99(policy)
            );
        }
    }
}
