//! `header-label-affinity-scorer`: the request names in a header what it wants, the endpoint has it in a label.

use crate::plugin::{Context, Default, InvalidParameter, Kind, Parameter, Parameters, Plugin, PluginType, Scorer, State, for_people};
use crate::snapshot::EndpointIndex;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "header-label-affinity-scorer",
    kind: Kind::Scorer,
    doc: for_people("1 if the label equals the request's header, else 0. 0 for all if the header is missing."),
    source: for_people("llm-d-router, scorer/headerlabelaffinity"),
    parameters: &[
        Parameter { name: "headerName", default: Default::Required, doc: for_people("request header, case-insensitive") },
        Parameter { name: "labelKey", default: Default::Required, doc: for_people("endpoint label") },
    ],
    needs: &[State::Headers, State::Labels],
    build,
};

#[derive(Debug)]
struct HeaderLabelAffinity {
    header: [Box<str>; 1],
    label: Box<str>,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let header = [parameters.header("headerName")?];
    Ok(Plugin::Scorer(Box::new(HeaderLabelAffinity { header, label: parameters.text("labelKey")?.into() })))
}

impl Scorer for HeaderLabelAffinity {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let [header] = &self.header;
        let Some(wanted) = context.request.header(header).filter(|value| !value.is_empty()) else { return };
        for (score, &endpoint) in scores.iter_mut().zip(endpoints) {
            *score = if context.label(endpoint, &self.label) == Some(wanted) { 1.0 } else { 0.0 };
        }
    }

    fn headers(&self) -> &[Box<str>] {
        &self.header
    }
}
