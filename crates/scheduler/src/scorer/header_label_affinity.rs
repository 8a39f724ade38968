//! `header-label-affinity-scorer`: prefers endpoints whose label has the value of a request header.

use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, readable,
};
use crate::plugin_type::{ClientHeaders, Plugin, PluginKind, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "header-label-affinity-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "1 if the label equals the request's header, else 0. 0 for all if the header is missing.",
    ),
    source: readable("llm-d-router, scorer/headerlabelaffinity"),
    parameters: &[
        Parameter::required("headerName", "request header, case-insensitive"),
        Parameter::required("labelKey", "endpoint label"),
    ],
    needs: &[RequiredState::Headers, RequiredState::Labels],
    build,
};

#[derive(Debug)]
struct HeaderLabelAffinityScorer {
    header: Box<str>,
    label: Box<str>,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let header = parameters.header("headerName")?;
    let headers = ClientHeaders {
        read: vec![header.clone()],
        session_token: None,
    };
    Ok(Plugin::Scorer(Box::new(HeaderLabelAffinityScorer {
        header,
        label: parameters.text("labelKey")?.into(),
    }))
    .with_headers(headers))
}

impl Scorer for HeaderLabelAffinityScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let Some(wanted) = context
            .request
            .header(&self.header)
            .filter(|value| !value.is_empty())
        else {
            return;
        };
        for (score, &endpoint) in scores.iter_mut().zip(endpoints) {
            *score = if context.label(endpoint, &self.label) == Some(wanted) {
                1.0
            } else {
                0.0
            };
        }
    }
}
