//! Fairness policies choose from which flow of a priority band the next request is sent.

use super::settings::FAIRNESS_DEFAULT;
use super::{BandAccount, FairnessPolicy, FlowAccount, FlowCost};
use crate::plugin::{InvalidParameter, Parameter, Parameters, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::time::Timestamp;

pub(crate) const STRICT: PluginType = PluginType {
    name: "global-strict-fairness-policy",
    kind: PluginKind::Fairness,
    doc: readable("Ignores flows: the ordering policy decides among all requests of the band."),
    source: readable("llm-d-router, flowcontrol/fairness"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::Fairness(Box::new(StrictFairness))),
};

pub(crate) const ROUND_ROBIN: PluginType = PluginType {
    name: "round-robin-fairness-policy",
    kind: PluginKind::Fairness,
    doc: readable("Serves flows in turn: next is the flow that was served the longest time ago."),
    source: readable("llm-d-router, flowcontrol/fairness"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::Fairness(Box::new(RoundRobinFairness))),
};

pub(crate) const LEAST_SERVICE: PluginType = PluginType {
    name: "program-aware-fairness",
    kind: PluginKind::Fairness,
    doc: readable(
        "Next is the flow with the lowest lasWeightService * service - lasWeightHeadWait * wait. \
        Service = prompt tokens + 2 * output tokens of the flow, halved every lasHalfLifeSeconds, \
        in thousands; wait = seconds that its first request has waited.",
    ),
    source: readable("llm-d-router, flowcontrol/fairness"),
    parameters: LEAST_SERVICE_PARAMETERS,
    needs: &[],
    build: build_least_service,
};

/// The policy [`LEAST_SERVICE`], under its name in newer versions of llm-d-router.
pub(crate) const LEAST_SERVICE_POLICY: PluginType = PluginType {
    name: "program-aware-fairness-policy",
    doc: readable("The name of program-aware-fairness in newer versions of llm-d-router."),
    ..LEAST_SERVICE
};

pub(crate) const TOKENS: PluginType = PluginType {
    name: FAIRNESS_DEFAULT,
    kind: PluginKind::Fairness,
    doc: readable(
        "The default. Start-time fair queueing in tokens: next is the flow that has received the \
        fewest tokens since it began to wait. A flow pays for uncached prompt tokens and expected \
        output, corrected at the end of each reply. A flow without requests gains no credit.",
    ),
    source: readable("Switchpoint; Goyal, Vin and Cheng, Start-time Fair Queueing, 1996"),
    parameters: &[MINIMUM_SHARE],
    needs: &[],
    build: build_tokens,
};

const LEAST_SERVICE_PARAMETERS: &[Parameter] = &[
    Parameter::text("strategy", "las", "las, the only one"),
    Parameter::number("lasWeightService", 0.8, "weight of the service, 0 or more"),
    Parameter::number("lasWeightHeadWait", 0.2, "weight of the wait, 0 or more"),
    Parameter::number(
        "lasHalfLifeSeconds",
        60.0,
        "time in which service counts half, above 0",
    ),
    Parameter::number(
        "evictionTtlSeconds",
        3_600.0,
        "no effect: the oldest flow without requests is dropped when there are too many",
    ),
    Parameter::number(
        "evictionSweepSeconds",
        300.0,
        "no effect: the oldest flow without requests is dropped when there are too many",
    ),
];

/// The weight of an output token, as in llm-d. A prompt token has weight 1. An output token weighs
/// more, because it takes a step of the engine, and a prompt token takes only a fraction of a step.
const OUTPUT_WEIGHT: f64 = 2.0;

/// The number of received tokens that count like one second of waiting: one stream gets about a
/// thousand tokens in a second.
const SERVICE_UNIT: f64 = 1_000.0;

/// The minimum share of the tokens for a band that waits behind higher bands, if the configuration
/// has no share.
pub(super) const MINIMUM_SHARE_DEFAULT: f64 = 0.05;

pub(super) const MINIMUM_SHARE: Parameter = Parameter::number(
    "minimumShare",
    MINIMUM_SHARE_DEFAULT,
    "share of all tokens that a band gets while it waits behind higher ones, 0 to 0.5",
);

#[derive(Debug)]
struct StrictFairness;

#[derive(Debug)]
struct RoundRobinFairness;

#[derive(Debug)]
struct LeastServiceFairness {
    service_weight: f64,
    wait_weight: f64,
    half_life_ms: f64,
}

#[derive(Debug)]
struct TokenFairness {
    minimum_share: f64,
}

fn build_least_service(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    parameters.choice("strategy", &[("las", ())])?;
    parameters.number("evictionTtlSeconds", 0.0..=1e9)?;
    parameters.number("evictionSweepSeconds", 0.0..=1e9)?;
    Ok(Plugin::Fairness(Box::new(LeastServiceFairness {
        service_weight: parameters.number("lasWeightService", 0.0..=1e6)?,
        wait_weight: parameters.number("lasWeightHeadWait", 0.0..=1e6)?,
        half_life_ms: parameters.number("lasHalfLifeSeconds", 0.001..=1e9)? * 1_000.0,
    })))
}

fn build_tokens(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Fairness(Box::new(TokenFairness {
        minimum_share: parameters.number(MINIMUM_SHARE.name, 0.0..=0.5)?,
    })))
}

impl FairnessPolicy for StrictFairness {
    fn rank(&self, _: &FlowAccount, _: &BandAccount, _: f64, _: Timestamp) -> f64 {
        0.0
    }

    fn charge(&self, _: &mut FlowAccount, _: &mut BandAccount, _: FlowCost, _: Timestamp) {}

    fn settle(&self, _: &mut FlowAccount, _: f64) {}
}

impl FairnessPolicy for RoundRobinFairness {
    // The cast is exact, because turns stay far below 2^52.
    fn rank(&self, flow: &FlowAccount, _: &BandAccount, _: f64, _: Timestamp) -> f64 {
        flow.turn as f64
    }

    fn charge(&self, flow: &mut FlowAccount, band: &mut BandAccount, _: FlowCost, _: Timestamp) {
        band.turn = band.turn.saturating_add(1);
        flow.turn = band.turn;
    }

    fn settle(&self, _: &mut FlowAccount, _: f64) {}
}

impl LeastServiceFairness {
    // The cast is exact, because milliseconds stay far below 2^52.
    fn attained(&self, flow: &FlowAccount, now: Timestamp) -> f64 {
        flow.attained * libm::exp2(-(now.ms_since(flow.attained_at) as f64) / self.half_life_ms)
    }
}

impl FairnessPolicy for LeastServiceFairness {
    fn rank(&self, flow: &FlowAccount, _: &BandAccount, waited_ms: f64, now: Timestamp) -> f64 {
        self.service_weight * self.attained(flow, now) / SERVICE_UNIT
            - self.wait_weight * waited_ms / 1_000.0
    }

    fn charge(&self, flow: &mut FlowAccount, _: &mut BandAccount, cost: FlowCost, now: Timestamp) {
        flow.attained = self.attained(flow, now) + cost.prompt + OUTPUT_WEIGHT * cost.output;
        flow.attained_at = now;
    }

    fn settle(&self, flow: &mut FlowAccount, output: f64) {
        flow.attained = (flow.attained + OUTPUT_WEIGHT * output).max(0.0);
    }
}

impl FairnessPolicy for TokenFairness {
    fn rank(&self, flow: &FlowAccount, _: &BandAccount, _: f64, _: Timestamp) -> f64 {
        flow.start
    }

    /// A flow that was idle gets no credit for the idle time. A flow that waits keeps its credit,
    /// even if other flows are served first because the endpoint of this flow has no room.
    fn begin(&self, flow: &mut FlowAccount, band: &BandAccount) {
        flow.start = flow.start.max(band.virtual_time);
    }

    fn advance(&self, band: &mut BandAccount, lowest: f64) {
        band.virtual_time = band.virtual_time.max(lowest);
    }

    fn charge(&self, flow: &mut FlowAccount, _: &mut BandAccount, cost: FlowCost, _: Timestamp) {
        flow.start += cost.tokens().max(1.0);
    }

    fn settle(&self, flow: &mut FlowAccount, output: f64) {
        flow.start += output;
    }

    fn minimum_share(&self) -> f64 {
        self.minimum_share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policy(plugin: &PluginType) -> Box<dyn FairnessPolicy> {
        match plugin.build(&[]) {
            Ok(Plugin::Fairness(policy)) => policy,
            other => panic!("{other:?}"),
        }
    }

    /// Serves `turns` requests to flows that always have a waiting request. Returns the tokens that
    /// each flow received.
    fn served(policy: &dyn FairnessPolicy, costs: &[f64], turns: usize) -> Vec<f64> {
        let mut flows = vec![FlowAccount::default(); costs.len()];
        let mut band = BandAccount::default();
        let mut tokens = vec![0.0; costs.len()];
        for _ in 0..turns {
            let now = Timestamp::default();
            let ranks: Vec<f64> = flows
                .iter()
                .map(|flow| policy.rank(flow, &band, 0.0, now))
                .collect();
            let next = (0..ranks.len())
                .min_by(|a, b| ranks[*a].total_cmp(&ranks[*b]))
                .unwrap();
            policy.advance(&mut band, ranks[next]);
            policy.charge(
                &mut flows[next],
                &mut band,
                FlowCost {
                    prompt: costs[next],
                    output: 0.0,
                },
                now,
            );
            tokens[next] += costs[next];
        }
        tokens
    }

    #[test]
    fn round_robin_counts_requests_and_ours_counts_tokens() {
        let costs = [100.0, 1_000.0];
        assert_eq!(
            served(&*policy(&ROUND_ROBIN), &costs, 100),
            [5_000.0, 50_000.0]
        );
        let ours = served(&*policy(&TOKENS), &costs, 110);
        assert_eq!(ours, [10_000.0, 10_000.0]);
    }

    #[test]
    fn a_flow_that_was_idle_saves_nothing() {
        let policy = policy(&TOKENS);
        let mut busy = FlowAccount::default();
        let mut idle = FlowAccount::default();
        let mut band = BandAccount::default();
        let cost = FlowCost {
            prompt: 100.0,
            output: 0.0,
        };
        let now = Timestamp::default();
        for _ in 0..1_000 {
            policy.advance(
                &mut band,
                policy.rank(&busy, &BandAccount::default(), 0.0, now),
            );
            policy.charge(&mut busy, &mut band, cost, now);
        }
        policy.begin(&mut idle, &band);
        let mut turns = 0;
        while policy.rank(&idle, &band, 0.0, now) <= policy.rank(&busy, &band, 0.0, now) {
            policy.charge(&mut idle, &mut band, cost, now);
            turns += 1;
        }
        assert!(turns <= 2, "{turns} requests in a row");
    }

    #[test]
    fn service_is_forgotten_with_its_half_life_and_waiting_counts() {
        let policy = policy(&LEAST_SERVICE);
        let mut flow = FlowAccount::default();
        let mut band = BandAccount::default();
        policy.charge(
            &mut flow,
            &mut band,
            FlowCost {
                prompt: 1_000.0,
                output: 500.0,
            },
            Timestamp::default(),
        );
        let rank = |waited_ms, s: u64| {
            policy.rank(
                &flow,
                &band,
                waited_ms,
                Timestamp::default().plus_ms(s * 1_000),
            )
        };
        assert_eq!(
            [
                rank(0.0, 0),
                rank(0.0, 60),
                rank(0.0, 120),
                rank(1_000.0, 0)
            ],
            [1.6, 0.8, 0.4, 1.6 - 0.2]
        );
    }

    proptest! {
        /// Checks the law of start-time fair queueing: the tokens that two flows receive, if both
        /// always wait, differ by at most one request of each flow.
        #[test]
        fn flows_that_wait_receive_equal_tokens(costs in prop::collection::vec(1.0_f64..5_000.0, 2..6), turns in 1_usize..400) {
            let tokens = served(&*policy(&TOKENS), &costs, turns);
            for a in 0..costs.len() {
                for b in 0..costs.len() {
                    prop_assert!((tokens[a] - tokens[b]).abs() <= costs[a] + costs[b] + 1e-6, "{tokens:?} of {costs:?}");
                }
            }
        }
    }
}
