//! The scenarios of the campaign: their requests and engines.

use crate::hardware::LLAMA_8B_H100;
use crate::trace::{ID_TOKENS, TraceRequest, azure_conversations};
use crate::workload::{RequestClass, Sampler};
use crate::world::PoolSetting;

/// A batch wave lasts for 8 of every 20 s.
const WAVE_S: f64 = 20.0;
const WAVE_ON_S: f64 = 8.0;

/// The rate of chat that eight engines sustain, requests a second. A rate is sustained if the
/// median TTFT of the last 30 % of arrivals stays under 5 s.
const CHAT_CAPACITY: f64 = 209.0;

/// The share of capacity that chat takes, and a tenant below its share.
const CHAT_LOAD: f64 = 0.5;
const SMALL_LOAD: f64 = 0.3;

/// The share of capacity that the lowest of three bands asks for, and that requests with very long
/// prompts ask for.
const LOW_LOAD: f64 = 0.3;
const HUGE_LOAD: f64 = 0.2;

/// How much longer the slow engines of `unlike` take, and the capacity of four fast and four slow
/// engines, of that of eight fast ones.
const SLOWDOWN: f64 = 2.0;
const UNLIKE_CAPACITY: f64 = 0.75;

/// The engines of `pd` that compute prompts for the other ones, and the capacity of all of them, of
/// that of eight that do both.
const PREFILLERS: usize = 4;
const SPLIT_CAPACITY: f64 = 0.8;

/// The spread of an estimate of a prompt's tokens from its bytes: two of three prompts have between
/// 0.74 and 1.35 times as many.
const PROMPT_ERROR: f64 = 0.3;

/// How much longer the engines of `two-engines` take, the waves there, and the load of the rates
/// that [`FlowScenario::classes`] has for them.
const TWO_SLOWDOWN: f64 = 5.0;
const TWO_WAVE_S: f64 = 40.0;
const TWO_ON_S: f64 = 24.0;
const TWO_LOAD: f64 = 1.3;

/// Batch requests of one kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchKind {
    prompt: u32,
    output: f64,
    /// The spreads of the lengths of prompts and of outputs, log-normal.
    spreads: (f64, f64),
    /// Tokens of the prompt that all requests of one of 150 tenants share.
    shared: u32,
    /// The rate that eight engines sustain without other requests, requests a second: what `none`
    /// serves beside chat when it is offered far too much, divided by the share that chat leaves.
    capacity: f64,
}

const PROMPTS: BatchKind = BatchKind {
    prompt: 6_000,
    output: 200.0,
    spreads: (0.0, 0.3),
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

/// A tenth of [`PROMPTS`] in each request, at ten times the rate.
const SHORT_PROMPTS: BatchKind = BatchKind {
    prompt: 600,
    output: 20.0,
    capacity: 420.0,
    ..PROMPTS
};

/// Five of [`PROMPTS`] in one.
const HUGE_PROMPTS: BatchKind = BatchKind {
    prompt: 30_000,
    capacity: 8.4,
    ..PROMPTS
};

/// As [`PROMPTS`] on average.
const SPREAD: BatchKind = BatchKind {
    spreads: (0.8, 1.2),
    ..PROMPTS
};

/// The requests of a run, and its pool.
#[derive(Clone, Copy, Debug)]
pub(super) enum FlowScenario {
    /// Chat beside waves of one kind.
    Waves(BatchKind),
    /// The same on engines of two speeds.
    Unlike(BatchKind),
    /// The same on engines with roles.
    Split(BatchKind),
    /// The same with unknown lengths.
    Unknown(BatchKind),
    /// One tenant below its share, another that asks for the rest of the load.
    Tenants,
    /// Two tenants that ask for half of the load each; the requests of one are ten times as long.
    Lengths,
    /// Chat, a band that asks for the rest of the load, and a band below it.
    Bands,
    /// Requests of one flow, a few of them with prompts five times as long.
    Starvation,
    /// Chat, and waves of two tenants, on two slow engines: what `bench flow` sends through Envoy.
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

    /// The requests by class, for so many seconds.
    pub(super) fn classes(
        self,
        load: f64,
        seconds: f64,
        dice: &mut Sampler,
    ) -> Result<Vec<(RequestClass, Vec<TraceRequest>)>, String> {
        let class = |name, priority, flow| RequestClass {
            name,
            priority,
            flow,
            prompt_error: 0.0,
        };
        let critical = class("critical", 10, "");
        let batch = class("batch", 0, "");
        let rest = |taken: f64| (load - taken).max(0.0);
        let on = |kind: BatchKind, capacity: f64, dice: &mut Sampler| -> Result<_, String> {
            let kind = BatchKind {
                capacity: kind.capacity * capacity,
                ..kind
            };
            Ok(vec![
                (critical, chat(capacity, seconds, dice)?),
                (batch, kind.waves(rest(CHAT_LOAD), seconds, dice)),
            ])
        };
        Ok(match self {
            Self::Waves(kind) => on(kind, 1.0, dice)?,
            Self::Unlike(kind) => on(kind, UNLIKE_CAPACITY, dice)?,
            Self::Split(kind) => on(kind, SPLIT_CAPACITY, dice)?,
            Self::Unknown(kind) => {
                let unknown = |(class, lines)| {
                    (
                        RequestClass {
                            prompt_error: PROMPT_ERROR,
                            ..class
                        },
                        lines,
                    )
                };
                on(kind, 1.0, dice)?.into_iter().map(unknown).collect()
            }
            Self::Tenants => vec![
                (
                    class("small", 0, "small"),
                    PROMPTS.steady(SMALL_LOAD, seconds, dice),
                ),
                (
                    class("large", 0, "large"),
                    PROMPTS.steady(rest(SMALL_LOAD), seconds, dice),
                ),
            ],
            Self::Lengths => vec![
                (
                    class("short", 0, "short"),
                    SHORT_PROMPTS.steady(load / 2.0, seconds, dice),
                ),
                (
                    class("long", 0, "long"),
                    PROMPTS.steady(load / 2.0, seconds, dice),
                ),
            ],
            Self::Bands => vec![
                // Without flow control, a negative priority would be refused.
                (class("critical", 20, ""), chat(1.0, seconds, dice)?),
                (
                    class("standard", 10, ""),
                    PROMPTS.steady(rest(CHAT_LOAD), seconds, dice),
                ),
                (class("low", 0, ""), PROMPTS.steady(LOW_LOAD, seconds, dice)),
            ],
            Self::Starvation => vec![
                (
                    class("short", 0, ""),
                    PROMPTS.steady(rest(HUGE_LOAD), seconds, dice),
                ),
                (
                    class("huge", 0, ""),
                    HUGE_PROMPTS.steady(HUGE_LOAD, seconds, dice),
                ),
            ],
            Self::TwoEngines => {
                let more = rest(CHAT_LOAD) / (TWO_LOAD - CHAT_LOAD);
                vec![
                    (
                        critical,
                        steady(12.0, (512, 16), (TWO_WAVE_S, TWO_WAVE_S), seconds, dice),
                    ),
                    (
                        class("large", -10, "large"),
                        steady(
                            3.4 * more,
                            (2_048, 64),
                            (TWO_ON_S, TWO_WAVE_S),
                            seconds,
                            dice,
                        ),
                    ),
                    (
                        class("small", -10, "small"),
                        steady(
                            4.6 * more,
                            (1_024, 32),
                            (TWO_ON_S, TWO_WAVE_S),
                            seconds,
                            dice,
                        ),
                    ),
                ]
            }
        })
    }
}

/// Chat for engines with this share of the capacity of eight fast ones.
fn chat(capacity: f64, seconds: f64, dice: &mut Sampler) -> Result<Vec<TraceRequest>, String> {
    let chat = azure_conversations()?;
    let rate = CHAT_LOAD * CHAT_CAPACITY * capacity;
    let mut at = 0.0;
    let mut lines = Vec::new();
    while at < seconds * 1e3 {
        let line = chat.get(dice.below(chat.len())).ok_or("an empty trace")?;
        lines.push(TraceRequest { at, ..line.clone() });
        at += dice.exponential() * 1e3 / rate;
    }
    Ok(lines)
}

/// Requests of one length at this rate, in the first part of every period.
fn steady(
    rate: f64,
    (prompt, output): (u32, u32),
    (on_s, period_s): (f64, f64),
    seconds: f64,
    dice: &mut Sampler,
) -> Vec<TraceRequest> {
    let mut lines = Vec::new();
    let mut busy = 0.0;
    loop {
        busy += dice.exponential() / rate.max(f64::MIN_POSITIVE);
        let at = (busy / on_s).floor() * period_s + busy % on_s;
        if at >= seconds {
            return lines;
        }
        lines.push(TraceRequest {
            at: at * 1e3,
            prompt,
            output,
            ..TraceRequest::default()
        });
    }
}

// === impl BatchKind ===

impl BatchKind {
    /// Requests that take this share of capacity on average, all in the first part of every wave.
    fn waves(self, load: f64, seconds: f64, dice: &mut Sampler) -> Vec<TraceRequest> {
        self.requests(load, WAVE_ON_S, seconds, dice)
    }

    /// Requests that take this share of capacity all the time.
    fn steady(self, load: f64, seconds: f64, dice: &mut Sampler) -> Vec<TraceRequest> {
        self.requests(load, WAVE_S, seconds, dice)
    }

    fn requests(self, load: f64, on_s: f64, seconds: f64, dice: &mut Sampler) -> Vec<TraceRequest> {
        let rate = load * self.capacity * WAVE_S / on_s;
        let mut lines = Vec::new();
        let mut busy = 0.0;
        if rate <= 0.0 {
            return lines;
        }
        loop {
            busy += dice.exponential() / rate;
            let at = (busy / on_s).floor() * WAVE_S + busy % on_s;
            if at >= seconds {
                return lines;
            }
            lines.push(TraceRequest {
                at: at * 1e3,
                ..self.request(lines.len() as u64, dice)
            });
        }
    }

    fn request(self, number: u64, dice: &mut Sampler) -> TraceRequest {
        /// Tenants with a prefix of their own.
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
        let (of_prompt, of_output) = self.spreads;
        let mean = f64::from(self.prompt);
        let prompt = if of_prompt > 0.0 {
            dice.tokens(mean, of_prompt, (mean / 20.0, mean * 5.0))
        } else {
            self.prompt
        };
        // The tails of a wide spread are long.
        let reach = if of_output > 1.0 { 20.0 } else { 5.0 };
        let output = dice.tokens(
            self.output,
            of_output,
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

    /// Requests, mean tokens of prompts and of outputs, and the shortest and longest prompt.
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
