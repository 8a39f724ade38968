//! `endpoint-attribute-scorer`: scores endpoints by one metric of the engine that `customMetrics`
//! configures.

use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, InvalidParameter, METRICS_EXTRACTOR, Parameter, Parameters, RequiredState, Scorer,
    attribute_key, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::{rate, rate_by_load};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "endpoint-attribute-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "(v - min) / (max - min), or 1 minus that if lower is better. min and max are taken over \
        the candidates (1 when all are equal), or fixed; then the score is clamped to 0..1.",
    ),
    source: readable("llm-d-router, scorer/endpointattribute"),
    parameters: &[
        Parameter::required(
            "attributeKey",
            "name of the attribute, as in customMetrics; if it contains a / the producer is required",
        ),
        METRICS_EXTRACTOR,
        Parameter::structured(
            "algorithm",
            "{type: linear_lower_is_better | linear_higher_is_better, normalization: {adaptiveRange: {}} | {fixedRange: {min, max}}}",
            "which direction is better (required), and the range; by default that of the candidates",
        ),
    ],
    needs: &[RequiredState::Attributes],
    build,
};

const ALGORITHM: &[Parameter] = &[
    Parameter::required("type", "linear_lower_is_better or linear_higher_is_better"),
    Parameter::structured(
        "normalization",
        "{adaptiveRange: {}} or {fixedRange: {min, max}}",
        "at most one of the two",
    ),
];
const NORMALIZATION: &[Parameter] = &[
    Parameter::structured("adaptiveRange", "{}", "the range of the candidates' values"),
    Parameter::structured("fixedRange", "{min, max}", "a range of its own"),
];
const FIXED_RANGE: &[Parameter] = &[
    Parameter::number("min", 0.0, "below max"),
    Parameter::required_number("max", "above min"),
];

#[derive(Debug)]
struct EndpointAttributeScorer {
    key: Box<str>,
    /// The factor of the value: 1 if a lower value is better, -1 if a higher value is better.
    sign: f32,
    /// The minimum and the maximum of the value. `None` means the minimum and the maximum over the
    /// candidates.
    range: Option<(f32, f32)>,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let key = attribute_key(parameters, "attributeKey")?;
    let (sign, range) = parameters.require("algorithm", ALGORITHM, |algorithm| {
        let sign = algorithm.choice(
            "type",
            &[
                ("linear_lower_is_better", 1.0),
                ("linear_higher_is_better", -1.0),
            ],
        )?;
        Ok((
            sign,
            algorithm
                .nested("normalization", NORMALIZATION, range)?
                .flatten(),
        ))
    })?;
    Ok(Plugin::Scorer(Box::new(EndpointAttributeScorer {
        key,
        sign,
        range,
    })))
}

fn range(normalization: &Parameters<'_>) -> Result<Option<(f32, f32)>, InvalidParameter> {
    let adaptive = normalization.nested("adaptiveRange", &[], |_| Ok(()))?;
    let fixed = normalization.nested("fixedRange", FIXED_RANGE, |fixed| {
        let min = fixed.finite("min")?;
        let max = fixed.finite("max")?;
        if min < max {
            Ok((min, max))
        } else {
            Err(fixed.out_of_range("max"))
        }
    })?;
    if adaptive.is_some() && fixed.is_some() {
        Err(normalization.out_of_range("fixedRange"))
    } else {
        Ok(fixed)
    }
}

impl Scorer for EndpointAttributeScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let value = |endpoint| context.attribute(endpoint, &self.key);
        match self.range {
            None => rate_by_load(endpoints, scores, |endpoint| {
                value(endpoint).map(|value| self.sign * value)
            }),
            Some((min, max)) => rate(endpoints, scores, |endpoint| {
                let share = ((value(endpoint)? - min) / (max - min)).clamp(0.0, 1.0);
                Some(if self.sign > 0.0 { 1.0 - share } else { share })
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn map(entries: &[(&str, ParameterValue)]) -> ParameterValue {
        ParameterValue::Map(
            entries
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect(),
        )
    }

    fn refusal(algorithm: &[(&str, ParameterValue)]) -> String {
        let given = [
            (
                "attributeKey".to_owned(),
                ParameterValue::Text("depth".to_owned()),
            ),
            ("algorithm".to_owned(), map(algorithm)),
        ];
        PLUGIN.build(&given).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_say_which_end_is_better_is_refused() {
        let key = [(
            "attributeKey".to_owned(),
            ParameterValue::Text("depth".to_owned()),
        )];
        assert_eq!(
            PLUGIN.build(&key).unwrap_err().to_string(),
            "parameter `algorithm` must be given"
        );
        assert_eq!(
            refusal(&[]),
            "in `algorithm`: parameter `type` must be given"
        );
        assert!(
            refusal(&[("type", ParameterValue::Text("linear".to_owned()))])
                .starts_with("in `algorithm`: parameter `type` is out of range")
        );
    }

    #[test]
    fn a_range_that_is_none_or_two_ranges_are_refused() {
        let lower = (
            "type",
            ParameterValue::Text("linear_lower_is_better".to_owned()),
        );
        let fixed = |min, max| {
            (
                "fixedRange",
                map(&[
                    ("min", ParameterValue::Number(min)),
                    ("max", ParameterValue::Number(max)),
                ]),
            )
        };
        let normalization = |entries: &[(&str, ParameterValue)]| {
            refusal(&[lower.clone(), ("normalization", map(entries))])
        };
        let at = "in `algorithm`: in `normalization`: ";
        assert_eq!(
            normalization(&[fixed(1.0, 1.0)]),
            format!("{at}in `fixedRange`: parameter `max` is out of range: above min")
        );
        assert_eq!(
            normalization(&[("fixedRange", map(&[]))]),
            format!("{at}in `fixedRange`: parameter `max` must be given")
        );
        assert_eq!(
            normalization(&[fixed(0.0, 1.0), ("adaptiveRange", map(&[]))]),
            format!("{at}parameter `fixedRange` is out of range: a range of its own")
        );
        assert!(
            normalization(&[(
                "adaptiveRange",
                map(&[("min", ParameterValue::Number(0.0))])
            )])
            .contains("unknown parameter `min`")
        );
    }
}
