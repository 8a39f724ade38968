//! `always-disagg-pd-decider` and `always-disagg-multimodal-decider`: every request, and every one with something to encode.

use crate::endpoint::EndpointIndex;
use crate::plugin::{Context, Decider, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};

pub(crate) const PREFILL: PluginType = PluginType {
    name: "always-disagg-pd-decider",
    kind: Kind::Decider,
    doc: for_people("Always."),
    source: for_people("llm-d-router, profilehandler/disagg"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::Decider(Box::new(Always))),
};

pub(crate) const MULTIMODAL: PluginType = PluginType {
    name: "always-disagg-multimodal-decider",
    doc: for_people("Yes if the prompt contains an image, a video or an audio clip."),
    needs: &[State::Prompt],
    build: |_| Ok(Plugin::Decider(Box::new(Multimodal))),
    ..PREFILL
};

#[derive(Debug)]
struct Always;

#[derive(Debug)]
struct Multimodal;

impl Decider for Always {
    fn disaggregates(&self, _: &Context<'_>, _: EndpointIndex) -> bool {
        true
    }
}

impl Decider for Multimodal {
    fn disaggregates(&self, context: &Context<'_>, _: EndpointIndex) -> bool {
        context.request.media_items > 0
    }
}
