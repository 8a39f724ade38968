//! `endpoint-attribute-scorer`: any number that the engine exports and the metrics extractor was told to read (`customMetrics`).

use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, Default, InvalidParameter, METRICS_EXTRACTOR, Parameter, Parameters, Scorer, State, attribute_key, for_people,
};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::scorer::{rate, rate_by_load};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "endpoint-attribute-scorer",
    kind: Kind::Scorer,
    doc: for_people(
        "(v - min) / (max - min), or 1 minus that if lower is better. min and max are those of \
        the candidates (1 when all are equal), or fixed; then the score is clamped to 0..1.",
    ),
    source: for_people("llm-d-router, scorer/endpointattribute"),
    parameters: &[
        Parameter {
            name: "attributeKey",
            default: Default::Required,
            doc: for_people("name of the attribute, as in customMetrics; if it contains a / the producer is required"),
        },
        METRICS_EXTRACTOR,
        Parameter {
            name: "algorithm",
            default: Default::Structured(
                "{type: linear_lower_is_better | linear_higher_is_better, normalization: {adaptiveRange: {}} | {fixedRange: {min, max}}}",
            ),
            doc: for_people("which direction is better (required), and the range; by default that of the candidates"),
        },
    ],
    needs: &[State::Attributes],
    build,
};

const ALGORITHM: &[Parameter] = &[
    Parameter { name: "type", default: Default::Required, doc: for_people("linear_lower_is_better or linear_higher_is_better") },
    Parameter {
        name: "normalization",
        default: Default::Structured("{adaptiveRange: {}} or {fixedRange: {min, max}}"),
        doc: for_people("at most one of the two"),
    },
];
const NORMALIZATION: &[Parameter] = &[
    Parameter { name: "adaptiveRange", default: Default::Structured("{}"), doc: for_people("the range of the candidates' values") },
    Parameter { name: "fixedRange", default: Default::Structured("{min, max}"), doc: for_people("a range of its own") },
];
const FIXED_RANGE: &[Parameter] = &[
    Parameter { name: "min", default: Default::Number(0.0), doc: for_people("below max") },
    Parameter { name: "max", default: Default::RequiredNumber, doc: for_people("above min") },
];

#[derive(Debug)]
struct EndpointAttribute {
    key: Box<str>,
    /// 1 where lower is better, -1 where higher is.
    sign: f32,
    /// Least and greatest; `None`: those of the candidates.
    range: Option<(f32, f32)>,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let key = attribute_key(parameters, "attributeKey")?;
    let (sign, range) = parameters.require("algorithm", ALGORITHM, |algorithm| {
        let sign = algorithm.choice("type", &[("linear_lower_is_better", 1.0), ("linear_higher_is_better", -1.0)])?;
        Ok((sign, algorithm.nested("normalization", NORMALIZATION, range)?.flatten()))
    })?;
    Ok(Plugin::Scorer(Box::new(EndpointAttribute { key, sign, range })))
}

fn range(normalization: &Parameters<'_>) -> Result<Option<(f32, f32)>, InvalidParameter> {
    let adaptive = normalization.nested("adaptiveRange", &[], |_| Ok(()))?;
    let fixed = normalization.nested("fixedRange", FIXED_RANGE, |fixed| {
        let (min, max) = (fixed.finite("min")?, fixed.finite("max")?);
        if min < max { Ok((min, max)) } else { Err(fixed.out_of_range("max")) }
    })?;
    if adaptive.is_some() && fixed.is_some() { Err(normalization.out_of_range("fixedRange")) } else { Ok(fixed) }
}

impl Scorer for EndpointAttribute {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let value = |endpoint| context.attribute(endpoint, &self.key);
        match self.range {
            None => rate_by_load(endpoints, scores, |endpoint| value(endpoint).map(|value| self.sign * value)),
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
    use crate::plugin::Value;

    fn map(entries: &[(&str, Value)]) -> Value {
        Value::Map(entries.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect())
    }

    fn refusal(algorithm: &[(&str, Value)]) -> String {
        let given = [("attributeKey".to_owned(), Value::Text("depth".to_owned())), ("algorithm".to_owned(), map(algorithm))];
        PLUGIN.build(&given).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_say_which_end_is_better_is_refused() {
        let key = [("attributeKey".to_owned(), Value::Text("depth".to_owned()))];
        assert_eq!(PLUGIN.build(&key).unwrap_err().to_string(), "parameter `algorithm` must be given");
        assert_eq!(refusal(&[]), "in `algorithm`: parameter `type` must be given");
        assert!(refusal(&[("type", Value::Text("linear".to_owned()))]).starts_with("in `algorithm`: parameter `type` is out of range"));
    }

    #[test]
    fn a_range_that_is_none_or_two_ranges_are_refused() {
        let lower = ("type", Value::Text("linear_lower_is_better".to_owned()));
        let fixed = |min, max| ("fixedRange", map(&[("min", Value::Number(min)), ("max", Value::Number(max))]));
        let normalization = |entries: &[(&str, Value)]| refusal(&[lower.clone(), ("normalization", map(entries))]);
        let at = "in `algorithm`: in `normalization`: ";
        assert_eq!(normalization(&[fixed(1.0, 1.0)]), format!("{at}in `fixedRange`: parameter `max` is out of range: above min"));
        assert_eq!(normalization(&[("fixedRange", map(&[]))]), format!("{at}in `fixedRange`: parameter `max` must be given"));
        assert_eq!(
            normalization(&[fixed(0.0, 1.0), ("adaptiveRange", map(&[]))]),
            format!("{at}parameter `fixedRange` is out of range: a range of its own")
        );
        assert!(normalization(&[("adaptiveRange", map(&[("min", Value::Number(0.0))]))]).contains("unknown parameter `min`"));
    }
}
