//! `endpoint-attribute-filter`: filters endpoints by one metric of the engine that `customMetrics`
//! configures.

use std::cmp::Ordering;

use crate::candidates::Candidates;
use crate::filter::keep;
use crate::plugin::{
    Context, Filter, InvalidParameter, METRICS_EXTRACTOR, Parameter, Parameters, RequiredState,
    attribute_key, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "endpoint-attribute-filter",
    kind: PluginKind::Filter,
    doc: readable("Keeps endpoints whose attribute satisfies the threshold."),
    source: readable("llm-d-router, filter/endpointattribute"),
    parameters: &[
        Parameter::required(
            "attribute",
            "name of the attribute, as in customMetrics; if it contains a / the producer is required",
        ),
        METRICS_EXTRACTOR,
        Parameter::text(
            "onMissing",
            "Pass",
            "endpoints without the attribute: Pass keeps them, Fail drops them",
        ),
        Parameter::flag("fallbackOnEmpty", false, "keep all if all would be dropped"),
        Parameter::structured(
            "algorithm",
            "{type: threshold, threshold: {operator: LessThan | LessThanOrEqual | GreaterThan | GreaterThanOrEqual | Equal | NotEqual, value}}",
            "the comparison, required",
        ),
    ],
    needs: &[RequiredState::Attributes],
    build,
};

const ALGORITHM: &[Parameter] = &[
    Parameter::required("type", "threshold"),
    Parameter::structured("threshold", "{operator, value}", "the comparison"),
];
const THRESHOLD: &[Parameter] = &[
    Parameter::required(
        "operator",
        "LessThan, LessThanOrEqual, GreaterThan, GreaterThanOrEqual, Equal or NotEqual",
    ),
    Parameter::number("value", 0.0, "what the attribute is compared with"),
];

/// An operator, as three results: whether the condition holds if the attribute is less than the
/// value, equal to it, and greater than it.
type ComparisonOperator = [bool; 3];

const OPERATORS: [(&str, ComparisonOperator); 6] = [
    ("LessThan", [true, false, false]),
    ("LessThanOrEqual", [true, true, false]),
    ("GreaterThan", [false, false, true]),
    ("GreaterThanOrEqual", [false, true, true]),
    ("Equal", [false, true, false]),
    ("NotEqual", [true, false, true]),
];

#[derive(Debug)]
struct EndpointAttributeFilter {
    key: Box<str>,
    pass_missing: bool,
    fall_back: bool,
    operator: ComparisonOperator,
    value: f32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let (operator, value) = parameters.require("algorithm", ALGORITHM, |algorithm| {
        algorithm.choice("type", &[("threshold", ())])?;
        algorithm.require("threshold", THRESHOLD, |threshold| {
            Ok((
                threshold.choice("operator", &OPERATORS)?,
                threshold.finite("value")?,
            ))
        })
    })?;
    Ok(Plugin::Filter(Box::new(EndpointAttributeFilter {
        key: attribute_key(parameters, "attribute")?,
        pass_missing: parameters.choice("onMissing", &[("Pass", true), ("Fail", false)])?,
        fall_back: parameters.flag("fallbackOnEmpty")?,
        operator,
        value,
    })))
}

impl EndpointAttributeFilter {
    fn passes(&self, attribute: Option<f32>) -> bool {
        let Some(attribute) = attribute else {
            return self.pass_missing;
        };
        let [less, equal, greater] = self.operator;
        match attribute.total_cmp(&self.value) {
            Ordering::Less => less,
            Ordering::Equal => equal,
            Ordering::Greater => greater,
        }
    }
}

impl Filter for EndpointAttributeFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        keep(candidates, self.fall_back, |endpoint| {
            self.passes(context.attribute(endpoint, &self.key))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_and_missing_attributes() {
        let passes = |name: &str, pass_missing| {
            let (_, operator) = OPERATORS
                .into_iter()
                .find(|(other, _)| *other == name)
                .unwrap();
            let filter = EndpointAttributeFilter {
                key: "depth".into(),
                pass_missing,
                fall_back: false,
                operator,
                value: 5.0,
            };
            [Some(4.0), Some(5.0), Some(6.0), None].map(|attribute| filter.passes(attribute))
        };
        assert_eq!(passes("LessThan", true), [true, false, false, true]);
        assert_eq!(passes("LessThanOrEqual", true), [true, true, false, true]);
        assert_eq!(passes("GreaterThan", false), [false, false, true, false]);
        assert_eq!(
            passes("GreaterThanOrEqual", false),
            [false, true, true, false]
        );
        assert_eq!(passes("Equal", false), [false, true, false, false]);
        assert_eq!(passes("NotEqual", true), [true, false, true, true]);
    }
}
