//! `label-selector-filter`: keeps endpoints whose labels match, by the rules of Kubernetes.
//! `by-label-selector` is the older name of this filter.

use crate::candidates::Candidates;
use crate::plugin::{
    Context, Filter, InvalidParameter, Parameter, Parameters, RequiredState, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "label-selector-filter",
    kind: PluginKind::Filter,
    doc: readable(
        "Keeps endpoints that have all of matchLabels and satisfy all of matchExpressions. An \
        endpoint without the label satisfies NotIn. Without conditions it keeps all.",
    ),
    source: readable("llm-d-router, filter/bylabel"),
    parameters: &[
        Parameter::structured(
            "matchLabels",
            "{LABEL: VALUE}",
            "labels and the value that each must have",
        ),
        Parameter::structured(
            "matchExpressions",
            "[{key, operator: In | NotIn | Exists | DoesNotExist, values: [VALUE]}]",
            "one condition per label; values only for In and NotIn",
        ),
    ],
    needs: &[RequiredState::Labels],
    build,
};

/// The plugin `label-selector-filter` by the name that llm-d has deprecated.
pub(crate) const BY_LABEL_SELECTOR: PluginType = PluginType {
    name: "by-label-selector",
    doc: readable("Deprecated name of label-selector-filter."),
    ..PLUGIN
};

const EXPRESSION: &[Parameter] = &[
    Parameter::required("key", "a label"),
    Parameter::required("operator", "In, NotIn, Exists or DoesNotExist"),
    Parameter::structured(
        "values",
        "[VALUE]",
        "one at least for In and NotIn, none for the others",
    ),
];

/// A filter with these conditions. An endpoint must meet all conditions.
#[derive(Debug)]
pub(crate) struct LabelSelectorFilter(Vec<LabelRequirement>);

/// A condition on one label.
#[derive(Debug)]
struct LabelRequirement {
    key: Box<str>,
    values: Box<[Box<str>]>,
    /// Whether the condition holds for a label with a listed value, for a label with another value,
    /// and for an endpoint without the label.
    holds: LabelOperator,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LabelOperator {
    listed: bool,
    other: bool,
    absent: bool,
}

const IN: LabelOperator = LabelOperator {
    listed: true,
    other: false,
    absent: false,
};
const NOT_IN: LabelOperator = LabelOperator {
    listed: false,
    other: true,
    absent: true,
};
const EXISTS: LabelOperator = LabelOperator {
    listed: true,
    other: true,
    absent: false,
};
const DOES_NOT_EXIST: LabelOperator = LabelOperator {
    listed: false,
    other: false,
    absent: true,
};

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let labels = parameters.text_map("matchLabels")?.into_iter();
    let mut requirements: Vec<LabelRequirement> = labels
        .map(|(key, value)| LabelRequirement::new(key, &[value], IN))
        .collect();
    requirements.extend(
        parameters.each("matchExpressions", EXPRESSION, |expression| {
            let operators = [
                ("In", IN),
                ("NotIn", NOT_IN),
                ("Exists", EXISTS),
                ("DoesNotExist", DOES_NOT_EXIST),
            ];
            let holds = expression.choice("operator", &operators)?;
            let values = expression.texts("values")?;
            if values.is_empty() == (holds.listed != holds.other) {
                return Err(expression.out_of_range("values"));
            }
            Ok(LabelRequirement::new(
                expression.text("key")?,
                &values,
                holds,
            ))
        })?,
    );
    Ok(Plugin::Filter(Box::new(LabelSelectorFilter(requirements))))
}

// === impl LabelSelectorFilter ===

impl LabelSelectorFilter {
    /// Returns a filter that requires the label `key` with one of these values. With `unlabelled`,
    /// an endpoint may also lack the label.
    pub(crate) fn one_of(key: &str, values: &[&str], unlabelled: bool) -> Self {
        Self(vec![LabelRequirement::new(
            key,
            values,
            LabelOperator {
                absent: unlabelled,
                ..IN
            },
        )])
    }
}

impl Filter for LabelSelectorFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        candidates.retain(|endpoint| {
            self.0
                .iter()
                .all(|requirement| requirement.holds(context.label(endpoint, &requirement.key)))
        });
    }
}

// === impl LabelRequirement ===

impl LabelRequirement {
    fn new(key: &str, values: &[&str], holds: LabelOperator) -> Self {
        Self {
            key: key.into(),
            values: values.iter().map(|&value| value.into()).collect(),
            holds,
        }
    }

    fn holds(&self, label: Option<&str>) -> bool {
        match label {
            None => self.holds.absent,
            Some(value) if self.values.iter().any(|listed| **listed == *value) => self.holds.listed,
            Some(_) => self.holds.other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn holds(holds: LabelOperator, values: &[&str]) -> [bool; 4] {
        let requirement = LabelRequirement::new("zone", values, holds);
        [Some("a"), Some("b"), Some(""), None].map(|label| requirement.holds(label))
    }

    #[test]
    fn operators_as_in_kubernetes() {
        assert_eq!(holds(IN, &["a"]), [true, false, false, false]);
        assert_eq!(holds(IN, &["a", ""]), [true, false, true, false]);
        assert_eq!(holds(NOT_IN, &["a"]), [false, true, true, true]);
        assert_eq!(holds(EXISTS, &[]), [true, true, true, false]);
        assert_eq!(holds(DOES_NOT_EXIST, &[]), [false, false, false, true]);
    }

    fn refusal(operator: &str, values: &[&str]) -> String {
        let text = |text: &str| ParameterValue::Text(text.to_owned());
        let values = ParameterValue::List(values.iter().map(|value| text(value)).collect());
        let expression = [
            ("key", text("zone")),
            ("operator", text(operator)),
            ("values", values),
        ];
        let expression = ParameterValue::Map(
            expression
                .map(|(name, value)| (name.to_owned(), value))
                .to_vec(),
        );
        PLUGIN
            .build(&[(
                "matchExpressions".to_owned(),
                ParameterValue::List(vec![expression]),
            )])
            .map(drop)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn values_go_with_in_and_not_in_alone() {
        let values = "in `matchExpressions[0]`: parameter `values` is out of range: one at least for In and NotIn, none for the others";
        for (operator, given) in [
            ("In", [].as_slice()),
            ("NotIn", &[]),
            ("Exists", &["a"]),
            ("DoesNotExist", &["a"]),
        ] {
            assert_eq!(refusal(operator, given), values, "{operator}");
        }
        assert!(
            refusal("in", &["a"])
                .starts_with("in `matchExpressions[0]`: parameter `operator` is out of range")
        );
    }
}
