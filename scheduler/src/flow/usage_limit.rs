//! Usage limit policies: how much of the pool a band may fill.

use super::settings::USAGE_LIMIT_DEFAULT;
use super::{BandRank, UsageLimitPolicy};
use crate::plugin::{InvalidParameter, Parameter, ParameterDefault, Parameters, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

pub(crate) const STATIC: PluginType = PluginType {
    name: USAGE_LIMIT_DEFAULT,
    kind: PluginKind::UsageLimit,
    doc: readable("All bands may fill the pool up to the threshold. The default."),
    source: readable("llm-d-router, flowcontrol/usagelimits"),
    parameters: &[Parameter {
        name: "threshold",
        default: ParameterDefault::Number(1.0),
        doc: readable("saturation from which on requests are held, above 0 to 1"),
    }],
    needs: &[],
    build: build_static,
};

pub(crate) const HOLDBACK: PluginType = PluginType {
    name: "priority-holdback-policy",
    kind: PluginKind::UsageLimit,
    doc: readable(
        "The highest band may fill the pool up to maxCeiling, the lowest up to minCeiling, those \
        between in equal steps by their rank, or in proportion to their priority.",
    ),
    source: readable("llm-d-router, flowcontrol/usagelimits"),
    parameters: &[
        Parameter { name: "minCeiling", default: ParameterDefault::RequiredNumber, doc: readable("ceiling of the lowest band, 0 to 1") },
        Parameter { name: "maxCeiling", default: ParameterDefault::Number(1.0), doc: readable("ceiling of the highest band, 0 to 1") },
        Parameter { name: "shape", default: ParameterDefault::Text("linear"), doc: readable("linear, the only one") },
        Parameter { name: "domain", default: ParameterDefault::Text("rank"), doc: readable("rank or value") },
    ],
    needs: &[],
    build: build_holdback,
};

#[derive(Debug)]
struct StaticLimit {
    threshold: f64,
}

#[derive(Debug)]
struct PriorityHoldback {
    min: f64,
    max: f64,
    by_rank: bool,
}

fn build_static(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::UsageLimit(Box::new(StaticLimit { threshold: parameters.number("threshold", f64::MIN_POSITIVE..=1.0)? })))
}

fn build_holdback(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    parameters.choice("shape", &[("linear", ())])?;
    let max = parameters.number("maxCeiling", 0.0..=1.0)?;
    Ok(Plugin::UsageLimit(Box::new(PriorityHoldback {
        min: parameters.number("minCeiling", 0.0..=max)?,
        max,
        by_rank: parameters.choice("domain", &[("rank", true), ("value", false)])?,
    })))
}

impl UsageLimitPolicy for StaticLimit {
    fn ceiling(&self, _: BandRank) -> f64 {
        self.threshold
    }
}

impl UsageLimitPolicy for PriorityHoldback {
    #[expect(clippy::cast_precision_loss, reason = "there are few bands")]
    fn ceiling(&self, band: BandRank) -> f64 {
        let (own, highest, lowest) = band.priorities;
        let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 };
        let below = if self.by_rank {
            share(band.higher as f64, band.bands.saturating_sub(1) as f64)
        } else {
            share(f64::from(highest) - f64::from(own), f64::from(highest) - f64::from(lowest))
        };
        self.max - below * (self.max - self.min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn ceilings(plugin: &PluginType, given: &[(&str, ParameterValue)], priorities: &[i32]) -> Vec<f64> {
        let given: Vec<(String, ParameterValue)> = given.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let Ok(Plugin::UsageLimit(policy)) = plugin.build(&given) else { panic!("{}", plugin.name) };
        let (highest, lowest, bands) = (priorities[0], priorities[priorities.len() - 1], priorities.len());
        let ceiling = |(higher, &own)| policy.ceiling(BandRank { higher, bands, priorities: (own, highest, lowest) });
        priorities.iter().enumerate().map(ceiling).collect()
    }

    #[test]
    fn lower_bands_have_lower_ceilings() {
        let min = |ceiling| ("minCeiling", ParameterValue::Number(ceiling));
        assert_eq!(ceilings(&STATIC, &[], &[100, 0, -10]), [1.0, 1.0, 1.0]);
        assert_eq!(ceilings(&HOLDBACK, &[min(0.5)], &[100, 0, -10]), [1.0, 0.75, 0.5]);
        assert_eq!(ceilings(&HOLDBACK, &[min(0.5), ("domain", ParameterValue::Text("value".into()))], &[100, 50, 0]), [1.0, 0.75, 0.5]);
        assert_eq!(ceilings(&HOLDBACK, &[min(0.5)], &[7]), [1.0], "the only band is the highest");
    }
}
