//! `by-label`: the reference's older way to filter by one label; `label-selector-filter` and the role filters say the same.

use crate::filter::label_selector::Selector;
use crate::plugin::{Default, InvalidParameter, Parameter, Parameters, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "by-label",
    kind: Kind::Filter,
    doc: for_people(
        "Keeps endpoints whose label has one of validValues; with allowsNoLabel also those \
        without the label. Deprecated: use label-selector-filter.",
    ),
    source: for_people("llm-d-router, filter/bylabel"),
    parameters: &[
        Parameter { name: "label", default: Default::Required, doc: for_people("the label") },
        Parameter {
            name: "validValues",
            default: Default::Structured("[VALUE]"),
            doc: for_people("at least one, unless allowsNoLabel is set"),
        },
        Parameter { name: "allowsNoLabel", default: Default::Flag(false), doc: for_people("keep endpoints without the label") },
    ],
    needs: &[State::Labels],
    build,
};

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let label = parameters.text("label")?;
    let (values, unlabelled) = (parameters.texts("validValues")?, parameters.flag("allowsNoLabel")?);
    if values.is_empty() && !unlabelled {
        return Err(parameters.out_of_range("validValues"));
    }
    Ok(Plugin::Filter(Box::new(Selector::one_of(label, &values, unlabelled))))
}
