//! `prefix-cache-affinity-filter`: keeps the endpoints that have cached most of the prompt, unless
//! these endpoints are too busy compared with the other endpoints.

use crate::candidates::Candidates;
use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, Filter, InvalidParameter, Parameter, Parameters, RequiredState, producer_name,
    readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;
use crate::scorer::PREFIX_PRODUCER;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "prefix-cache-affinity-filter",
    kind: PluginKind::Filter,
    doc: readable(
        "Keeps endpoints with matched blocks / all blocks >= affinityThreshold. Keeps all \
        endpoints in three cases: no endpoint has enough matched blocks; the lowest TTFT of those \
        with enough exceeds that of the others by more than maxTTFTPenaltyMs; at random, with \
        explorationProbability. TTFT = prompt tokens in flight / peakPrefillThroughput, or the \
        predicted TTFT (ttftSource).",
    ),
    source: readable("llm-d-router, filter/prefixcacheaffinity"),
    parameters: &[
        Parameter::number(
            "affinityThreshold",
            0.8,
            "share of the prompt's blocks that must be cached, 0 to 1; 0 keeps all",
        ),
        Parameter::number(
            "explorationProbability",
            0.0,
            "how often to keep all, 0 to 1",
        ),
        Parameter::number(
            "maxTTFTPenaltyMs",
            18_000.0,
            "highest extra TTFT accepted for a cached prompt, ms, 0 to 1e9; 0: no limit",
        ),
        Parameter::text(
            "ttftSource",
            "prefillThroughput",
            "prefillThroughput, or latencyPredictor, which compares endpoints with a prediction only",
        ),
        Parameter::number(
            "peakPrefillThroughput",
            15_928.0,
            "prompt tokens per second of one endpoint, up to 1e9; above 0 unless maxTTFTPenaltyMs is 0",
        ),
        PREFIX_PRODUCER,
        producer_name("inFlightLoadProducerName"),
        producer_name("latencyPredictionInfoProducerName"),
    ],
    needs: &[
        RequiredState::PrefixIndex,
        RequiredState::InFlight,
        RequiredState::Latency,
    ],
    build,
};

/// The maximum of the parameters in milliseconds and in tokens per second. This maximum is far
/// above real values, and the product of two such values is finite.
const QUANTITY_MAX: f64 = 1e9;

#[derive(Debug)]
struct PrefixCacheAffinityFilter {
    threshold: f64,
    exploration: f64,
    /// The extra cost that is accepted so that a request gets an endpoint that has cached its
    /// prompt. `None` means no limit.
    penalty: Option<AffinityPenalty>,
}

/// The amount by which the best endpoint that has cached the prompt may be worse than the best
/// other endpoint.
#[derive(Clone, Copy, Debug)]
enum AffinityPenalty {
    /// A difference in the number of prompt tokens in flight.
    Tokens(f64),
    /// A difference in predicted TTFT, in ms.
    Ms(f64),
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let predicted = parameters.choice(
        "ttftSource",
        &[("prefillThroughput", false), ("latencyPredictor", true)],
    )?;
    let penalty_ms = parameters.number("maxTTFTPenaltyMs", 0.0..=QUANTITY_MAX)?;
    let tokens_per_s = parameters.number("peakPrefillThroughput", 0.0..=QUANTITY_MAX)?;
    if penalty_ms > 0.0 && tokens_per_s <= 0.0 && !predicted {
        return Err(parameters.out_of_range("peakPrefillThroughput"));
    }
    Ok(Plugin::Filter(Box::new(PrefixCacheAffinityFilter {
        threshold: parameters.number("affinityThreshold", 0.0..=1.0)?,
        exploration: parameters.number("explorationProbability", 0.0..=1.0)?,
        penalty: (penalty_ms > 0.0).then_some(if predicted {
            AffinityPenalty::Ms(penalty_ms)
        } else {
            AffinityPenalty::Tokens(penalty_ms / 1000.0 * tokens_per_s)
        }),
    })))
}

impl PrefixCacheAffinityFilter {
    fn holds(&self, context: &Context<'_>, endpoint: EndpointIndex) -> bool {
        let matched = context.affinity_blocks(endpoint);
        let blocks = context.request.blocks();
        f64::from(matched) >= self.threshold * f64::from(blocks)
    }

    /// Whether another endpoint is better by more than the penalty than every endpoint that has
    /// cached the prompt.
    fn too_slow(&self, context: &Context<'_>, candidates: &Candidates) -> bool {
        let Some(penalty) = self.penalty else {
            return false;
        };
        let cost = |endpoint: EndpointIndex| match penalty {
            // The cast is exact, because tokens in flight stay far below 2^52.
            AffinityPenalty::Tokens(_) => Some(context.load(endpoint).prefill_tokens as f64),
            AffinityPenalty::Ms(_) => context
                .prediction(endpoint)
                .map(|predicted| f64::from(predicted.prediction.ttft_ms)),
        };
        let least = |holding: bool| {
            let of = candidates
                .indices()
                .iter()
                .filter(|&&endpoint| self.holds(context, endpoint) == holding);
            of.filter_map(|&endpoint| cost(endpoint))
                .fold(f64::INFINITY, f64::min)
        };
        let (here, elsewhere, AffinityPenalty::Tokens(most) | AffinityPenalty::Ms(most)) =
            (least(true), least(false), penalty);
        here.is_finite() && here - elsewhere > most
    }
}

impl Filter for PrefixCacheAffinityFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, rng: &mut Rng) {
        if self.threshold <= 0.0
            || (self.exploration > 0.0 && f64::from(rng.open01()) < self.exploration)
        {
            return;
        }
        let any = candidates
            .indices()
            .iter()
            .any(|&endpoint| self.holds(context, endpoint));
        if any && !self.too_slow(context, candidates) {
            candidates.retain(|endpoint| self.holds(context, endpoint));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn refusal(given: &[(&str, ParameterValue)]) -> String {
        let given: Vec<(String, ParameterValue)> = given
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        PLUGIN.build(&given).map(drop).unwrap_err().to_string()
    }

    fn idle_throughput() -> (&'static str, ParameterValue) {
        ("peakPrefillThroughput", ParameterValue::Number(0.0))
    }

    #[test]
    fn no_throughput_needs_no_penalty() {
        let idle = idle_throughput();
        let any = ("maxTTFTPenaltyMs", ParameterValue::Number(0.0));
        assert!(
            refusal(std::slice::from_ref(&idle))
                .starts_with("parameter `peakPrefillThroughput` is out of range")
        );
        let given = [idle, any].map(|(name, value)| (name.to_owned(), value));
        assert!(PLUGIN.build(&given).is_ok());
        let predicted = (
            "ttftSource",
            ParameterValue::Text("latencyPredictor".to_owned()),
        );
        let given = [idle_throughput(), predicted].map(|(name, value)| (name.to_owned(), value));
        assert!(
            PLUGIN.build(&given).is_ok(),
            "predictions need no throughput"
        );
    }
}
