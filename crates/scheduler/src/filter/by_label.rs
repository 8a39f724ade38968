//! `by-label`: llm-d's older filter by one label, which `label-selector-filter` and the role
//! filters have replaced.

use crate::filter::label_selector::LabelSelectorFilter;
use crate::plugin::{InvalidParameter, Parameter, Parameters, RequiredState, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "by-label",
    kind: PluginKind::Filter,
    doc: readable(
        "Keeps endpoints whose label has one of validValues; with allowsNoLabel also those \
        without the label. Deprecated: use label-selector-filter.",
    ),
    source: readable("llm-d-router, filter/bylabel"),
    parameters: &[
        Parameter::required("label", "the label"),
        Parameter::structured(
            "validValues",
            "[VALUE]",
            "at least one, unless allowsNoLabel is set",
        ),
        Parameter::flag("allowsNoLabel", false, "keep endpoints without the label"),
    ],
    needs: &[RequiredState::Labels],
    build,
};

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let label = parameters.text("label")?;
    let values = parameters.texts("validValues")?;
    let unlabelled = parameters.flag("allowsNoLabel")?;
    if values.is_empty() && !unlabelled {
        return Err(parameters.out_of_range("validValues"));
    }
    Ok(Plugin::Filter(Box::new(LabelSelectorFilter::one_of(
        label, &values, unlabelled,
    ))))
}
