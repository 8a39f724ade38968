//! The policies that the simulator compares: configurations of Switchpoint's plugins, and small
//! models of other routers for which no plugin exists.

mod baseline;
mod gate;
mod gateway;
pub(crate) use baseline::{BaselinePolicy, PolicyView, has_roles};
pub(crate) use gate::{GateFairness, GateRule, RequestGate};
pub(crate) use gateway::PolicyMemory;

use scheduler::plugin::ParameterValue;
use scheduler::{PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec};

use crate::engine::EngineJob;
use crate::hardware::LLAMA_8B_H100;
use crate::workload::RequestClass;

/// The rule by which a proxy picks an endpoint.
#[derive(Clone, Debug)]
pub(crate) enum RoutingPolicy {
    /// The scheduler with these plugins, and with learned step times.
    Config(PipelineSpec),
    /// The scheduler with these plugins. The daemon does not learn step times, but knows the exact
    /// step times of each engine.
    Exact(PipelineSpec),
    /// A policy of another router, which is not a plugin.
    Rival(BaselinePolicy),
    /// A policy behind the queue of another router.
    Gated(Box<RoutingPolicy>, GateRule),
}

/// The name of Switchpoint's default policy.
pub(crate) const OURS: &str = "ours";

/// The name of Switchpoint's default policy with exact step times. The difference to [`OURS`] is
/// what learning costs.
pub(crate) const EXACT: &str = "ours-exact";

// === impl RoutingPolicy ===

impl RoutingPolicy {
    /// Returns the policy with this name and parameters, for example
    /// `ours:ttftWeight=3,failureMs=0`.
    ///
    /// # Errors
    /// Fails when no policy has this name.
    pub(crate) fn named(name: &str) -> Result<Self, String> {
        let (name, parameters) = name.split_once(':').unwrap_or((name, ""));
        let parameters = numbers(parameters)?;
        let of_cost = |parameters| {
            let plugin = PluginSpec {
                parameters,
                ..PluginSpec::of_type("marginal-cost-scorer")
            };
            PipelineSpec::of_one_profile("simulated", vec![(plugin, 1.0)], 1)
        };
        Ok(match name {
            EXACT => Self::Exact(of_cost(parameters)),
            OURS => Self::Config(of_cost(parameters)),
            "2/2/3" => Self::weighted(),
            "affinity+token-load" => Self::affinity(parameters),
            _ => Self::Rival(
                BaselinePolicy::named(name)
                    .ok_or_else(|| format!("no policy is called `{name}`"))?,
            ),
        })
    }

    fn weighted() -> Self {
        let scorers = [
            ("queue-scorer", 2.0),
            ("kv-cache-utilization-scorer", 2.0),
            ("prefix-cache-scorer", 3.0),
        ];
        let plugins = scorers.map(|(kind, weight)| (PluginSpec::of_type(kind), weight));
        Self::Config(PipelineSpec::of_one_profile("simulated", plugins.into(), 1))
    }

    /// Returns the policy that llm-d recommends. `parameters` are set in the policy's filter.
    fn affinity(mut parameters: Vec<(String, ParameterValue)>) -> Self {
        let spec = LLAMA_8B_H100;
        let peak = spec.budget as f64 / spec.times.cold_ms(8192, spec.budget) * 1e3;
        for default in [
            number("maxTTFTPenaltyMs", 14_000.0),
            number("peakPrefillThroughput", peak.round()),
        ] {
            if parameters.iter().all(|(name, _)| *name != default.0) {
                parameters.push(default);
            }
        }
        let filter = PluginSpec {
            parameters,
            ..PluginSpec::of_type("prefix-cache-affinity-filter")
        };
        let scorer = PluginSpec::of_type("token-load-scorer");
        let plugins = vec![(filter, 1.0), (scorer, 1.0)];
        Self::Config(PipelineSpec::of_one_profile("simulated", plugins, 1))
    }

    /// Returns the policy with this name behind llm-d's queue, with this detector. Requests may
    /// wait in the queue without a limit.
    pub(crate) fn behind_llm_d(
        name: &str,
        detector: PluginSpec,
        fairness: GateFairness,
    ) -> Result<Self, String> {
        let Self::Config(mut spec) = Self::named(name)? else {
            return Err(format!("`{name}` is no configuration"));
        };
        spec.saturation_detector = detector.name().to_owned();
        spec.plugins.push(detector);
        Ok(Self::Gated(
            Box::new(Self::Config(spec)),
            GateRule::Paced(fairness),
        ))
    }

    /// Returns the policy with this name, with Switchpoint's flow control. Requests may wait
    /// without a limit.
    pub(crate) fn with_flow_control(name: &str) -> Result<Self, String> {
        let named = Self::named(name)?;
        let (Self::Config(mut spec) | Self::Exact(mut spec)) = named.clone() else {
            return Err(format!("`{name}` is no configuration"));
        };
        let band = vec![number("maxRequests", f64::from(u32::MAX))];
        let parameters = vec![
            number("ttlMs", 0.0),
            number("noEndpointTtlMs", 0.0),
            ("defaultBand".to_owned(), ParameterValue::Map(band)),
        ];
        spec.plugins.push(PluginSpec {
            parameters,
            ..PluginSpec::of_type(scheduler::flow::FLOW_CONTROL)
        });
        Ok(if matches!(named, Self::Exact(_)) {
            Self::Exact(spec)
        } else {
            Self::Config(spec)
        })
    }

    /// Whether the policy has Switchpoint's flow control.
    pub(crate) fn holds(&self) -> bool {
        let (Self::Config(spec) | Self::Exact(spec)) = self else {
            return false;
        };
        spec.plugins
            .iter()
            .any(|plugin| plugin.plugin_type == scheduler::flow::FLOW_CONTROL)
    }

    /// Returns the scheduler pipeline of each simulated proxy. A policy that picks without the
    /// scheduler gets the default pipeline. In a `split` pool some engines prefill and the others
    /// decode.
    ///
    /// # Errors
    /// Fails when the policy cannot pick two engines for a request.
    pub(crate) fn pipeline(&self, split: bool) -> Result<PipelineSpec, String> {
        match self {
            Self::Config(spec) | Self::Exact(spec) if split => Ok(disaggregated(spec)),
            Self::Config(spec) | Self::Exact(spec) => Ok(spec.clone()),
            Self::Rival(rival) if split && !rival.knows_roles() => {
                Err(format!("{rival:?} picks one engine for a request, not two"))
            }
            Self::Rival(_) => Ok(PipelineSpec::default()),
            Self::Gated(picks, _) => picks.pipeline(split),
        }
    }

    /// Returns the rule of another router's queue in front of the policy, or `None` without such a
    /// queue.
    pub(crate) fn gate(&self) -> Option<GateRule> {
        if let Self::Gated(_, rule) = self {
            Some(*rule)
        } else {
            None
        }
    }

    /// Returns the number of prompt tokens of a request that the policy works with. Switchpoint's
    /// proxy and llm-d's picker estimate this number from bytes, and other routers count it.
    pub(crate) fn prompt_tokens(&self, job: &EngineJob<'_>, class: RequestClass) -> u32 {
        match self {
            Self::Config(_) => class.estimate(job.request, job.prompt),
            Self::Exact(_) | Self::Rival(_) => job.prompt,
            Self::Gated(picks, _) => picks.prompt_tokens(job, class),
        }
    }
}

/// Returns a pipeline that uses one profile for decode and for prefill. Another engine computes the
/// prompt if the decode engine has not cached enough of it.
fn disaggregated(spec: &PipelineSpec) -> PipelineSpec {
    /// The minimum number of uncached tokens for which another engine computes the prompt and
    /// transfers the KV.
    const UNCACHED_TOKENS: f64 = 256.0;
    let decider = PluginSpec {
        parameters: vec![number("nonCachedTokens", UNCACHED_TOKENS)],
        ..PluginSpec::of_type("prefix-based-pd-decider")
    };
    let deciders = ParameterValue::Map(vec![(
        "prefill".to_owned(),
        ParameterValue::Text(decider.name().to_owned()),
    )]);
    let handler = PluginSpec {
        parameters: vec![("deciders".to_owned(), deciders)],
        ..PluginSpec::of_type("disagg-profile-handler")
    };
    let of = |stage: &str| {
        let filter = ProfilePlugin {
            name: format!("{stage}-filter"),
            weight: 1.0,
        };
        let scorers = spec
            .profiles
            .iter()
            .flat_map(|profile| profile.plugins.clone());
        ProfileSpec {
            name: stage.to_owned(),
            plugins: std::iter::once(filter).chain(scorers).collect(),
        }
    };
    let filters = ["prefill-filter", "decode-filter"].map(PluginSpec::of_type);
    let plugins = spec
        .plugins
        .iter()
        .cloned()
        .chain(filters)
        .chain([decider, handler.clone()])
        .collect();
    PipelineSpec {
        plugins,
        profiles: vec![of("decode"), of("prefill")],
        profile_handler: handler.name().to_owned(),
        ..spec.clone()
    }
}

fn number(key: &str, number: f64) -> (String, ParameterValue) {
    (key.to_owned(), ParameterValue::Number(number))
}

/// Parses parameters written as `key=number,key=number`.
fn numbers(text: &str) -> Result<Vec<(String, ParameterValue)>, String> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let parsed = pair
                .split_once('=')
                .and_then(|(key, text)| Some(number(key, text.parse().ok()?)));
            parsed.ok_or_else(|| format!("`{pair}` is no key=number"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_can_be_built() {
        for name in ["ours", "ours-exact", "2/2/3", "affinity+token-load", "smg"] {
            let policy = RoutingPolicy::named(name).unwrap();
            scheduler::Pipeline::build(&policy.pipeline(false).unwrap()).unwrap();
        }
        assert!(
            RoutingPolicy::named("best").is_err()
                && RoutingPolicy::named("ours:ttftWeight").is_err()
        );
        assert!(
            scheduler::Pipeline::build(
                &RoutingPolicy::named("ours:ttftWeight=0")
                    .unwrap()
                    .pipeline(true)
                    .unwrap()
            )
            .is_ok()
        );
    }
}
