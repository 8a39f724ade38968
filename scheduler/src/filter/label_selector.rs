//! `label-selector-filter`: keeps endpoints whose labels match, by the rules of Kubernetes. `by-label-selector` is its older name.

use crate::candidates::Candidates;
use crate::plugin::{Context, Default, Filter, InvalidParameter, Parameter, Parameters, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "label-selector-filter",
    kind: Kind::Filter,
    doc: for_people(
        "Keeps endpoints that have all of matchLabels and satisfy all of matchExpressions. An \
        endpoint without the label satisfies NotIn. Without conditions it keeps all.",
    ),
    source: for_people("llm-d-router, filter/bylabel; Kubernetes, labels and selectors"),
    parameters: &[
        Parameter {
            name: "matchLabels",
            default: Default::Structured("{LABEL: VALUE}"),
            doc: for_people("labels and the value that each must have"),
        },
        Parameter {
            name: "matchExpressions",
            default: Default::Structured("[{key, operator: In | NotIn | Exists | DoesNotExist, values: [VALUE]}]"),
            doc: for_people("one condition per label; values only for In and NotIn"),
        },
    ],
    needs: &[State::Labels],
    build,
};

/// The same under the name the reference deprecates.
pub(crate) const BY_LABEL_SELECTOR: PluginType = PluginType { name: "by-label-selector", ..PLUGIN };

const EXPRESSION: &[Parameter] = &[
    Parameter { name: "key", default: Default::Required, doc: for_people("a label") },
    Parameter { name: "operator", default: Default::Required, doc: for_people("In, NotIn, Exists or DoesNotExist") },
    Parameter {
        name: "values",
        default: Default::Structured("[VALUE]"),
        doc: for_people("one at least for In and NotIn, none for the others"),
    },
];

/// Conditions that must all hold.
#[derive(Debug)]
pub(crate) struct Selector(Vec<Requirement>);

/// A condition on one label.
#[derive(Debug)]
struct Requirement {
    key: Box<str>,
    values: Box<[Box<str>]>,
    /// Does it hold of a label with one of the values, with another value, of no such label?
    holds: Holds,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holds {
    listed: bool,
    other: bool,
    absent: bool,
}

const IN: Holds = Holds { listed: true, other: false, absent: false };
const NOT_IN: Holds = Holds { listed: false, other: true, absent: true };
const EXISTS: Holds = Holds { listed: true, other: true, absent: false };
const DOES_NOT_EXIST: Holds = Holds { listed: false, other: false, absent: true };

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let labels = parameters.text_map("matchLabels")?.into_iter();
    let mut requirements: Vec<Requirement> = labels.map(|(key, value)| Requirement::new(key, &[value], IN)).collect();
    requirements.extend(parameters.each("matchExpressions", EXPRESSION, |expression| {
        let operators = [("In", IN), ("NotIn", NOT_IN), ("Exists", EXISTS), ("DoesNotExist", DOES_NOT_EXIST)];
        let holds = expression.choice("operator", &operators)?;
        let values = expression.texts("values")?;
        if values.is_empty() == (holds.listed != holds.other) {
            return Err(expression.out_of_range("values"));
        }
        Ok(Requirement::new(expression.text("key")?, &values, holds))
    })?);
    Ok(Plugin::Filter(Box::new(Selector(requirements))))
}

// === impl Selector ===

impl Selector {
    /// One label with one of these values; `unlabelled`: or without it.
    pub(crate) fn one_of(key: &str, values: &[&str], unlabelled: bool) -> Self {
        Self(vec![Requirement::new(key, values, Holds { absent: unlabelled, ..IN })])
    }
}

impl Filter for Selector {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        candidates.retain(|endpoint| self.0.iter().all(|requirement| requirement.holds(context.label(endpoint, &requirement.key))));
    }
}

// === impl Requirement ===

impl Requirement {
    fn new(key: &str, values: &[&str], holds: Holds) -> Self {
        Self { key: key.into(), values: values.iter().map(|&value| value.into()).collect(), holds }
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
    use crate::plugin::Value;

    fn holds(holds: Holds, values: &[&str]) -> [bool; 4] {
        let requirement = Requirement::new("zone", values, holds);
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
        let text = |text: &str| Value::Text(text.to_owned());
        let values = Value::List(values.iter().map(|value| text(value)).collect());
        let expression = [("key", text("zone")), ("operator", text(operator)), ("values", values)];
        let expression = Value::Map(expression.map(|(name, value)| (name.to_owned(), value)).to_vec());
        PLUGIN.build(&[("matchExpressions".to_owned(), Value::List(vec![expression]))]).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn values_go_with_in_and_not_in_alone() {
        let values = "in `matchExpressions[0]`: parameter `values` is out of range: one at least for In and NotIn, none for the others";
        for (operator, given) in [("In", [].as_slice()), ("NotIn", &[]), ("Exists", &["a"]), ("DoesNotExist", &["a"])] {
            assert_eq!(refusal(operator, given), values, "{operator}");
        }
        assert!(refusal("in", &["a"]).starts_with("in `matchExpressions[0]`: parameter `operator` is out of range"));
    }
}
