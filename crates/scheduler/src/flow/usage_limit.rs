//! Usage limit policies decide how much of the pool a priority band may fill.

use super::settings::USAGE_LIMIT_DEFAULT;
use super::{BandRank, UsageCeiling, UsageLimitPolicy};
use crate::plugin::{InvalidParameter, Parameter, Parameters, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

pub(crate) const STATIC: PluginType = PluginType {
    name: USAGE_LIMIT_DEFAULT,
    kind: PluginKind::UsageLimit,
    doc: readable("All bands may fill the pool up to the threshold. The default."),
    source: readable("llm-d-router, flowcontrol/usagelimits"),
    parameters: &[Parameter::number(
        "threshold",
        1.0,
        "saturation from which on requests are held, above 0 to 1",
    )],
    needs: &[],
    build: build_static,
};

pub(crate) const HOLDBACK: PluginType = PluginType {
    name: "priority-holdback-policy",
    kind: PluginKind::UsageLimit,
    doc: readable(
        "The highest band may fill the pool up to maxCeiling, the lowest up to minCeiling. The \
        bands between get ceilings in equal steps by rank, or in proportion to their priority.",
    ),
    source: readable("llm-d-router, flowcontrol/usagelimits"),
    parameters: &[
        Parameter::required_number("minCeiling", "ceiling of the lowest band, 0 to 1"),
        Parameter::number("maxCeiling", 1.0, "ceiling of the highest band, 0 to 1"),
        Parameter::text("shape", "linear", "linear, the only one"),
        Parameter::text("domain", "rank", "rank or value"),
    ],
    needs: &[],
    build: build_holdback,
};

pub(crate) const REFLECTIVE: PluginType = PluginType {
    name: "soft-reflective-ceiling-policy",
    kind: PluginKind::UsageLimit,
    doc: readable(
        "The ceiling of a band falls as the load rises: 1 - rank / (bands - 1) x saturation, with \
        rank 0 for the highest band. Above its ceiling, one in s / (1 - s) attempts to send a \
        request of the band succeeds (s = saturation), and none from s = 1 on. llm-d counts \
        cycles of its dispatch loop, not attempts.",
    ),
    source: readable("llm-d-router, flowcontrol/usagelimits"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::UsageLimit(Box::new(SoftReflectiveCeiling))),
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

#[derive(Debug)]
struct SoftReflectiveCeiling;

fn build_static(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::UsageLimit(Box::new(StaticLimit {
        threshold: parameters.number("threshold", f64::MIN_POSITIVE..=1.0)?,
    })))
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
    fn ceiling(&self, _: BandRank, _: u64) -> UsageCeiling {
        UsageCeiling::Fixed(self.threshold)
    }
}

impl UsageLimitPolicy for PriorityHoldback {
    fn ceiling(&self, band: BandRank, _: u64) -> UsageCeiling {
        let below = if self.by_rank {
            band.share_by_rank()
        } else {
            band.share_by_value()
        };
        UsageCeiling::Fixed(self.max - below * (self.max - self.min))
    }
}

impl UsageLimitPolicy for SoftReflectiveCeiling {
    fn ceiling(&self, band: BandRank, turn: u64) -> UsageCeiling {
        UsageCeiling::Reflective {
            share: band.share_by_rank(),
            turn,
        }
    }
}

// === impl BandRank ===

impl BandRank {
    /// Returns 0 for the highest band and 1 for the lowest. The numbers of the bands in between are
    /// equally spaced.
    // The casts are exact, because a pool has few bands.
    fn share_by_rank(self) -> f64 {
        share(self.higher as f64, self.bands.saturating_sub(1) as f64)
    }

    /// Returns 0 for the highest band and 1 for the lowest. The numbers of the bands in between are
    /// in proportion to their priorities.
    fn share_by_value(self) -> f64 {
        let (own, highest, lowest) = self.priorities;
        share(
            f64::from(highest) - f64::from(own),
            f64::from(highest) - f64::from(lowest),
        )
    }
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 {
        (part / whole).clamp(0.0, 1.0)
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn ceilings_at(
        plugin: &PluginType,
        given: &[(&str, ParameterValue)],
        priorities: &[i32],
        saturation: f64,
        turn: u64,
    ) -> Vec<f64> {
        let given: Vec<(String, ParameterValue)> = given
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        let Ok(Plugin::UsageLimit(policy)) = plugin.build(&given) else {
            panic!("{}", plugin.name)
        };
        let highest = priorities[0];
        let lowest = priorities[priorities.len() - 1];
        let bands = priorities.len();
        let ceiling = |(higher, &own)| {
            policy.ceiling(
                BandRank {
                    higher,
                    bands,
                    priorities: (own, highest, lowest),
                },
                turn,
            )
        };
        priorities
            .iter()
            .enumerate()
            .map(ceiling)
            .map(|ceiling| ceiling.at(|| saturation))
            .collect()
    }

    fn ceilings(
        plugin: &PluginType,
        given: &[(&str, ParameterValue)],
        priorities: &[i32],
    ) -> Vec<f64> {
        ceilings_at(plugin, given, priorities, 0.5, 0)
    }

    #[test]
    fn lower_bands_have_lower_ceilings() {
        let min = |ceiling| ("minCeiling", ParameterValue::Number(ceiling));
        assert_eq!(ceilings(&STATIC, &[], &[100, 0, -10]), [1.0, 1.0, 1.0]);
        assert_eq!(
            ceilings(&HOLDBACK, &[min(0.5)], &[100, 0, -10]),
            [1.0, 0.75, 0.5]
        );
        assert_eq!(
            ceilings(
                &HOLDBACK,
                &[min(0.5), ("domain", ParameterValue::Text("value".into()))],
                &[100, 50, 0]
            ),
            [1.0, 0.75, 0.5]
        );
        assert_eq!(
            ceilings(&HOLDBACK, &[min(0.5)], &[7]),
            [1.0],
            "the only band is the highest"
        );
    }

    /// Checks three bands at a saturation of 0.8, where the middle band has a ceiling of 0.6 and
    /// the lowest band a ceiling of 0.2. One of every four checks lets requests of both bands pass.
    #[test]
    fn a_soft_ceiling_lets_every_few_requests_pass() {
        let at = |saturation, turn| ceilings_at(&REFLECTIVE, &[], &[100, 0, -10], saturation, turn);
        assert_eq!(at(0.4, 1), [1.0, 1.0, 1.0]);
        assert_eq!(
            at(0.65, 1),
            [1.0, 1.0, 0.0],
            "0.65 is below 0.675, and not below 0.35"
        );
        let passes: Vec<u64> = (0..12).filter(|turn| at(0.8, *turn)[1] == 1.0).collect();
        assert_eq!(passes, [0, 4, 8]);
        assert_eq!(
            [at(1.0, 0), at(7.5, 0), at(f64::NAN, 0)],
            [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
        );
        assert_eq!(
            ceilings_at(&REFLECTIVE, &[], &[7], 2.0, 1),
            [1.0],
            "the only band is the highest"
        );
    }
}
