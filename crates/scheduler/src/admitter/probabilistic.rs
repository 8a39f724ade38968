//! `probabilistic-admitter`: refuses a share of the sheddable requests. The share grows with
//! saturation, and begins to grow long before the pool is full.

use crate::detector::utilization::{KV_CACHE, QUEUE_DEPTH, UtilizationThresholds};
use crate::endpoint::EndpointIndex;
use crate::metrics;
use crate::plugin::{
    Admitter, Context, InvalidParameter, Parameter, Parameters, RequiredState, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "probabilistic-admitter",
    kind: PluginKind::Admitter,
    doc: readable(
        "Refuses a request of negative priority with probability min(s^power * k, 1), s = \
        saturation as in utilization-detector.",
    ),
    source: readable("llm-d-router, admitter/probabilisticadmitter"),
    parameters: &[
        QUEUE_DEPTH,
        KV_CACHE,
        Parameter::number("power", 5.0, "higher values start refusals later, above 0"),
        Parameter::number(
            "k",
            300.0,
            "higher values make refusals rise faster, above 0",
        ),
    ],
    needs: &[
        RequiredState::Metric(&metrics::QUEUE_DEPTH),
        RequiredState::Metric(&metrics::KV_CACHE_UTILIZATION),
    ],
    build,
};

#[derive(Debug)]
struct ProbabilisticAdmitter {
    thresholds: UtilizationThresholds,
    power: f64,
    k: f64,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Admitter(Box::new(ProbabilisticAdmitter {
        thresholds: UtilizationThresholds::read(parameters)?,
        power: parameters.number("power", f64::MIN_POSITIVE..=1e6)?,
        k: parameters.number("k", f64::MIN_POSITIVE..=1e12)?,
    })))
}

impl ProbabilisticAdmitter {
    /// Returns the probability of a refusal, 0 to 1.
    fn refusal(&self, saturation: f64) -> f64 {
        (libm::pow(saturation, self.power) * self.k).min(1.0)
    }
}

impl Admitter for ProbabilisticAdmitter {
    fn admits(&self, context: &Context<'_>, endpoints: &[EndpointIndex], rng: &mut Rng) -> bool {
        context.request.priority >= 0
            || f64::from(rng.open01())
                >= self.refusal(self.thresholds.saturation(context, endpoints))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_rise_as_the_reference_says() {
        let thresholds =
            UtilizationThresholds::read(&Parameters::check(PLUGIN.parameters, &[]).unwrap())
                .unwrap();
        let admitter = ProbabilisticAdmitter {
            thresholds,
            power: 5.0,
            k: 300.0,
        };
        assert_eq!(admitter.refusal(0.0), 0.0);
        assert!(
            (admitter.refusal(0.15) - 0.0228).abs() < 1e-4,
            "2.3 % at 0.15"
        );
        assert_eq!(admitter.refusal(0.34), 1.0, "all at 0.34");
        assert_eq!(admitter.refusal(1e300), 1.0);
    }
}
