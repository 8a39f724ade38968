//! `always-disagg-pd-decider`: the prefill of every request runs on another endpoint.
//! `always-disagg-multimodal-decider`: the encode stage runs on another endpoint if the prompt has
//! media to encode.

use crate::endpoint::EndpointIndex;
use crate::plugin::{Context, Decider, RequiredState, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

pub(crate) const PREFILL: PluginType = PluginType {
    name: "always-disagg-pd-decider",
    kind: PluginKind::Decider,
    doc: readable("The stage always runs at another endpoint."),
    source: readable("llm-d-router, profilehandler/disagg"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::Decider(Box::new(AlwaysDecider))),
};

pub(crate) const MULTIMODAL: PluginType = PluginType {
    name: "always-disagg-multimodal-decider",
    doc: readable(
        "The stage runs at another endpoint if the prompt contains an image, a video or an audio \
        clip.",
    ),
    needs: &[RequiredState::Prompt],
    build: |_| Ok(Plugin::Decider(Box::new(MultimodalDecider))),
    ..PREFILL
};

#[derive(Debug)]
struct AlwaysDecider;

#[derive(Debug)]
struct MultimodalDecider;

impl Decider for AlwaysDecider {
    fn disaggregates(&self, _: &Context<'_>, _: EndpointIndex) -> bool {
        true
    }
}

impl Decider for MultimodalDecider {
    fn disaggregates(&self, context: &Context<'_>, _: EndpointIndex) -> bool {
        context.request.media_items > 0
    }
}
