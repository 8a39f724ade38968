//! The requests and engines of each scenario of the simulation of flow control.

use crate::hardware::LLAMA_8B_H100;
use crate::trace::{ID_TOKENS, TraceRequest, azure_conversations};
use crate::workload::{RequestClass, Sampler};
use crate::world::PoolSetting;

/// Waves of requests. Requests arrive only in the first `on_s` seconds of every period.
#[derive(Clone, Copy)]
struct BatchWave {
    on_s: f64,
    period_s: f64,
}

const WAVE: BatchWave = BatchWave {
    on_s: 8.0,
    period_s: 20.0,
};

/// The rate of chat requests that eight engines sustain, in requests a second. A rate is sustained
/// if the median TTFT of the last 30 % of arrivals stays under 5 s.
const CHAT_CAPACITY: f64 = 209.0;

/// The share of the capacity that chat demands, and the share of a tenant below its fair share.
const CHAT_LOAD: f64 = 0.5;
const SMALL_LOAD: f64 = 0.3;

/// The share of the capacity that the lowest of three bands demands, and the share of requests with
/// very long prompts.
const LOW_LOAD: f64 = 0.3;
const HUGE_LOAD: f64 = 0.2;

/// Two constants for the scenario `unlike`. `SLOWDOWN` is how many times as long a step takes on a
/// slow engine. `UNLIKE_CAPACITY` is the capacity of four fast and four slow engines, relative to
/// eight fast engines.
const SLOWDOWN: f64 = 2.0;
const UNLIKE_CAPACITY: f64 = 0.75;

/// Two constants for the scenario `pd`. `PREFILLERS` is the number of engines that compute prompts
/// for the other engines. `SPLIT_CAPACITY` is the capacity of all engines, relative to eight
/// engines that prefill and decode.
const PREFILLERS: usize = 4;
const SPLIT_CAPACITY: f64 = 0.8;

/// The spread of an estimate of a prompt's tokens from its bytes: two of three prompts have between
/// 0.74 and 1.35 times the estimate.
const PROMPT_ERROR: f64 = 0.3;

/// Three constants for the scenario `two-engines`: how many times as long its engines take, its
/// waves, and the load at which its tenants have the rates in [`FlowArrivals::of_two_engines`].
const TWO_SLOWDOWN: f64 = 5.0;
const TWO_WAVE: BatchWave = BatchWave {
    on_s: 24.0,
    period_s: 40.0,
};
const TWO_LOAD: f64 = 1.3;

/// The lengths and the rate of a kind of batch requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchKind {
    prompt: u32,
    output: f64,
    /// The spreads (standard deviations of the logarithm) of the log-normal lengths.
    prompt_spread: f64,
    output_spread: f64,
    /// The number of tokens of the prompt that all requests of a tenant share. There are 150
    /// tenants.
    shared: u32,
    /// The rate that eight engines sustain without other requests, in requests a second. To measure
    /// this rate, far too many requests arrive beside chat. The rate is then what the policy `none`
    /// serves, divided by the share of the capacity that chat leaves.
    capacity: f64,
}

const PROMPTS: BatchKind = BatchKind {
    prompt: 6_000,
    output: 200.0,
    prompt_spread: 0.0,
    output_spread: 0.3,
    shared: 0,
    capacity: 42.0,
};
const OUTPUTS: BatchKind = BatchKind {
    prompt: 500,
    output: 1_500.0,
    capacity: 59.0,
    ..PROMPTS
};
const PREFIXES: BatchKind = BatchKind {
    prompt: 7_200,
    shared: 5_632,
    capacity: 76.0,
    ..PROMPTS
};

/// Requests with a tenth of the prompt tokens of [`PROMPTS`], at ten times the rate.
const SHORT_PROMPTS: BatchKind = BatchKind {
    prompt: 600,
    output: 20.0,
    capacity: 420.0,
    ..PROMPTS
};

/// Requests with five times the prompt tokens of [`PROMPTS`].
const HUGE_PROMPTS: BatchKind = BatchKind {
    prompt: 30_000,
    capacity: 8.4,
    ..PROMPTS
};

/// Requests as long as [`PROMPTS`] on average, but with a wider spread.
const SPREAD: BatchKind = BatchKind {
    prompt_spread: 0.8,
    output_spread: 1.2,
    ..PROMPTS
};

/// Draws the requests of a run.
struct FlowArrivals<'d> {
    seconds: f64,
    dice: &'d mut Sampler,
}

/// A scenario: the requests of a run, and the pool.
#[derive(Clone, Copy, Debug)]
pub(super) enum FlowScenario {
    /// Chat, and waves of batch requests of this kind.
    Waves(BatchKind),
    /// Chat, and waves of batch requests of this kind, on engines of two speeds.
    Unlike(BatchKind),
    /// Chat, and waves of batch requests of this kind, on a pool in which some engines only
    /// prefill.
    Split(BatchKind),
    /// Chat, and waves of batch requests of this kind. The proxies only estimate the tokens of
    /// prompts.
    Unknown(BatchKind),
    /// One tenant that demands less than its fair share, and another that demands the rest of the
    /// load.
    Tenants,
    /// Two tenants with a demand of half of the load each. The requests of one tenant are ten times
    /// as long.
    Lengths,
    /// Chat in the highest of three bands, a middle band that demands the rest of the load, and a
    /// low band.
    Bands,
    /// Requests of one flow. A few requests have prompts five times as long as the others.
    Starvation,
    /// Chat and waves of batch requests of two tenants, on two slow engines. `bench flow` sends the
    /// same requests through Envoy.
    TwoEngines,
}

const SCENARIOS: [(&str, FlowScenario); 11] = [
    ("prompts", FlowScenario::Waves(PROMPTS)),
    ("outputs", FlowScenario::Waves(OUTPUTS)),
    ("prefixes", FlowScenario::Waves(PREFIXES)),
    ("unlike", FlowScenario::Unlike(PROMPTS)),
    ("pd", FlowScenario::Split(PROMPTS)),
    ("unknown-lengths", FlowScenario::Unknown(SPREAD)),
    ("tenants", FlowScenario::Tenants),
    ("lengths", FlowScenario::Lengths),
    ("bands", FlowScenario::Bands),
    ("starvation", FlowScenario::Starvation),
    ("two-engines", FlowScenario::TwoEngines),
];

// === impl FlowScenario ===

impl FlowScenario {
    pub(super) fn named(name: &str) -> Result<Self, String> {
        let found = SCENARIOS.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, scenario)| *scenario)
            .ok_or_else(|| format!("no scenario of flow control is called `{name}`"))
    }

    pub(super) fn pool(self) -> PoolSetting {
        let plain = PoolSetting::plain(LLAMA_8B_H100);
        match self {
            Self::Unlike(_) => PoolSetting {
                odd_slowdown: SLOWDOWN,
                ..plain
            },
            Self::Split(_) => PoolSetting {
                prefillers: PREFILLERS,
                ..plain
            },
            Self::TwoEngines => {
                let mut engine = LLAMA_8B_H100;
                engine.times.slowdown *= TWO_SLOWDOWN;
                engine.api_ms *= TWO_SLOWDOWN;
                PoolSetting {
                    engine,
                    replicas: 2,
                    ..plain
                }
            }
            _ => plain,
        }
    }

    /// Returns the requests of a run of `seconds` seconds, by class.
    pub(super) fn classes(
        self,
        load: f64,
        seconds: f64,
        dice: &mut Sampler,
    ) -> Result<Vec<(RequestClass, Vec<TraceRequest>)>, String> {
        let rest = |taken: f64| (load - taken).max(0.0);
        let mut arrivals = FlowArrivals { seconds, dice };
        Ok(match self {
            Self::Waves(kind) => arrivals.beside_chat(kind, 1.0, rest(CHAT_LOAD))?,
            Self::Unlike(kind) => arrivals.beside_chat(kind, UNLIKE_CAPACITY, rest(CHAT_LOAD))?,
            Self::Split(kind) => arrivals.beside_chat(kind, SPLIT_CAPACITY, rest(CHAT_LOAD))?,
            Self::Unknown(kind) => {
                let mut classes = arrivals.beside_chat(kind, 1.0, rest(CHAT_LOAD))?;
                for (class, _) in &mut classes {
                    class.prompt_error = PROMPT_ERROR;
                }
                classes
            }
            Self::Tenants => vec![
                (tenant("small"), arrivals.steady(PROMPTS, SMALL_LOAD)),
                (tenant("large"), arrivals.steady(PROMPTS, rest(SMALL_LOAD))),
            ],
            Self::Lengths => vec![
                (tenant("short"), arrivals.steady(SHORT_PROMPTS, load / 2.0)),
                (tenant("long"), arrivals.steady(PROMPTS, load / 2.0)),
            ],
            Self::Bands => vec![
                // No priority here is negative, because a proxy without flow control may refuse
                // requests with a negative priority.
                (band("critical", 20), arrivals.chat(1.0)?),
                (
                    band("standard", 10),
                    arrivals.steady(PROMPTS, rest(CHAT_LOAD)),
                ),
                (band("low", 0), arrivals.steady(PROMPTS, LOW_LOAD)),
            ],
            Self::Starvation => vec![
                (band("short", 0), arrivals.steady(PROMPTS, rest(HUGE_LOAD))),
                (band("huge", 0), arrivals.steady(HUGE_PROMPTS, HUGE_LOAD)),
            ],
            Self::TwoEngines => arrivals.of_two_engines(rest(CHAT_LOAD) / (TWO_LOAD - CHAT_LOAD)),
        })
    }
}

fn band(name: &'static str, priority: i32) -> RequestClass {
    RequestClass {
        name,
        priority,
        ..RequestClass::default()
    }
}

/// Returns the class of a tenant's requests, which form one flow.
fn tenant(name: &'static str) -> RequestClass {
    RequestClass {
        flow: name,
        ..band(name, 0)
    }
}

// === impl FlowArrivals ===

impl FlowArrivals<'_> {
    /// Draws chat, and waves of batch requests of one kind. `capacity` is the capacity of the
    /// engines, relative to eight fast engines.
    fn beside_chat(
        &mut self,
        kind: BatchKind,
        capacity: f64,
        load: f64,
    ) -> Result<Vec<(RequestClass, Vec<TraceRequest>)>, String> {
        let chat = self.chat(capacity)?;
        let batch = self.requests(kind, load * capacity, WAVE);
        Ok(vec![
            (band("critical", 10), chat),
            (band("batch", 0), batch),
        ])
    }

    /// Draws chat for engines with this capacity, relative to eight fast engines.
    fn chat(&mut self, capacity: f64) -> Result<Vec<TraceRequest>, String> {
        let chat = azure_conversations()?;
        let rate = CHAT_LOAD * CHAT_CAPACITY * capacity;
        let mut at = 0.0;
        let mut lines = Vec::new();
        while at < self.seconds * 1e3 {
            let line = chat
                .get(self.dice.below(chat.len()))
                .ok_or("an empty trace")?;
            lines.push(TraceRequest { at, ..line.clone() });
            at += self.dice.exponential() * 1e3 / rate;
        }
        Ok(lines)
    }

    /// Draws chat, and waves of batch requests of two tenants, at `times` the tenants' usual rate.
    fn of_two_engines(&mut self, times: f64) -> Vec<(RequestClass, Vec<TraceRequest>)> {
        let share = TWO_WAVE.on_s / TWO_WAVE.period_s;
        let mut of_flow = |name: &'static str, kind: BatchKind| {
            let class = RequestClass {
                priority: -10,
                ..tenant(name)
            };
            (class, self.requests(kind, share * times, TWO_WAVE))
        };
        let large = of_flow("large", of_length(2_048, 64, 3.4));
        let small = of_flow("small", of_length(1_024, 32, 4.6));
        let chat = self.steady(of_length(512, 16, 12.0), 1.0);
        vec![(band("critical", 10), chat), large, small]
    }

    /// Draws requests that always demand this share of the capacity.
    fn steady(&mut self, kind: BatchKind, load: f64) -> Vec<TraceRequest> {
        let always = BatchWave {
            on_s: WAVE.period_s,
            ..WAVE
        };
        self.requests(kind, load, always)
    }

    /// Draws requests that demand this share of the capacity on average, but arrive only in the
    /// first part of every period.
    fn requests(&mut self, kind: BatchKind, load: f64, wave: BatchWave) -> Vec<TraceRequest> {
        let BatchWave { on_s, period_s } = wave;
        let rate = load * kind.capacity * period_s / on_s;
        let mut lines = Vec::new();
        let mut busy = 0.0;
        if rate <= 0.0 {
            return lines;
        }
        loop {
            busy += self.dice.exponential() / rate;
            let at = (busy / on_s).floor() * period_s + busy % on_s;
            if at >= self.seconds {
                return lines;
            }
            lines.push(TraceRequest {
                at: at * 1e3,
                ..kind.request(lines.len() as u64, self.dice)
            });
        }
    }
}

// === impl BatchKind ===

/// Returns a kind whose requests all have one length. Eight engines sustain `rate` requests a
/// second of this kind.
fn of_length(prompt: u32, output: u32, rate: f64) -> BatchKind {
    BatchKind {
        prompt,
        output: f64::from(output),
        output_spread: 0.0,
        capacity: rate,
        ..PROMPTS
    }
}

impl BatchKind {
    fn request(self, number: u64, dice: &mut Sampler) -> TraceRequest {
        /// The number of tenants. Each tenant has its own prefix.
        const TENANTS: usize = 150;
        let tenant = dice.below(TENANTS) as u64;
        let shared =
            (0..u64::from(self.shared) / ID_TOKENS as u64).map(|id| 10_000_000 + tenant * 64 + id);
        let own = (0..u64::from(self.prompt - self.shared).div_ceil(ID_TOKENS as u64))
            .map(|id| 1_000_000_000 + number * 64 + id);
        let ids = if self.shared > 0 {
            shared.chain(own).collect()
        } else {
            Vec::new()
        };
        let mean = f64::from(self.prompt);
        let prompt = if self.prompt_spread > 0.0 {
            dice.tokens(mean, self.prompt_spread, (mean / 20.0, mean * 5.0))
        } else {
            self.prompt
        };
        // The longest output is further from the mean if the spread is wide.
        let reach = if self.output_spread > 1.0 { 20.0 } else { 5.0 };
        let output = dice.tokens(
            self.output,
            self.output_spread,
            (self.output / reach / 2.0, self.output * reach),
        );
        TraceRequest {
            prompt,
            output,
            ids,
            ..TraceRequest::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(name: &str) -> Vec<(RequestClass, Vec<TraceRequest>)> {
        FlowScenario::named(name)
            .unwrap()
            .classes(1.3, 40.0, &mut Sampler::seeded(1))
            .unwrap()
    }

    /// Returns the number of requests, the mean tokens of prompts and of outputs, and the tokens of
    /// the shortest and of the longest prompt.
    fn lengths(lines: &[TraceRequest]) -> (f64, f64, f64, u32, u32) {
        let count = lines.len() as f64;
        let mean = |of: fn(&TraceRequest) -> u32| {
            lines.iter().map(|line| f64::from(of(line))).sum::<f64>() / count
        };
        let prompts = || lines.iter().map(|line| line.prompt);
        (
            count,
            mean(|line| line.prompt),
            mean(|line| line.output),
            prompts().min().unwrap(),
            prompts().max().unwrap(),
        )
    }

    #[test]
    fn every_scenario_has_requests_of_each_class() {
        for (name, _) in SCENARIOS {
            assert!(
                classes(name).iter().all(|(_, lines)| !lines.is_empty()),
                "{name}"
            );
        }
        assert!(FlowScenario::named("storms").is_err());
    }

    #[test]
    fn slow_engines_are_asked_for_less() {
        let slowdown = |name: &str| FlowScenario::named(name).unwrap().pool().odd_slowdown;
        assert_eq!((slowdown("unlike"), slowdown("prompts")), (2.0, 1.0));
        for (unlike, like) in classes("unlike").iter().zip(&classes("prompts")) {
            let share = unlike.1.len() as f64 / like.1.len() as f64;
            assert!((0.68..0.82).contains(&share), "{share} of {}", like.0.name);
        }
    }

    #[test]
    fn unknown_lengths_spread_around_the_known_ones() {
        let known = lengths(&classes("prompts")[1].1);
        let unknown = lengths(&classes("unknown-lengths")[1].1);
        assert_eq!((known.3, known.4), (6_000, 6_000));
        assert!(
            (0.85..1.15).contains(&(unknown.1 / known.1))
                && (0.8..1.2).contains(&(unknown.2 / known.2)),
            "{unknown:?}"
        );
        assert!(unknown.3 < 1_500 && unknown.4 > 20_000, "{unknown:?}");
        let (class, _) = classes("unknown-lengths")[1];
        let estimates: Vec<f64> = (0..2_000)
            .map(|request| f64::from(class.estimate(request, 6_000)) / 6_000.0)
            .collect();
        let mean = estimates.iter().sum::<f64>() / 2_000.0;
        let near = estimates
            .iter()
            .filter(|estimate| (0.74..1.35).contains(*estimate))
            .count();
        assert!(
            (0.97..1.03).contains(&mean) && (1_250..1_450).contains(&near),
            "{mean}, {near}"
        );
        assert_eq!(classes("prompts")[1].0.estimate(1, 6_000), 6_000);
    }

    #[test]
    fn a_few_very_long_prompts_are_of_the_same_flow_as_the_others() {
        let [(short, many), (huge, few)] = &classes("starvation")[..] else {
            panic!("two classes")
        };
        assert_eq!((short.priority, short.flow), (huge.priority, huge.flow));
        assert!(many.len() > 15 * few.len() && few.iter().all(|line| line.prompt == 30_000));
    }
}
