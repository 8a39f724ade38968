//! `prefix-based-pd-decider`: prefill runs on another endpoint if much of the prompt is not cached
//! at the decode endpoint.

use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, Decider, InvalidParameter, Parameter, Parameters, RequiredState, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "prefix-based-pd-decider",
    kind: PluginKind::Decider,
    doc: readable(
        "The stage runs at another endpoint if nonCachedTokens > 0, the prompt has at least \
        promptTokens tokens, and at least nonCachedTokens of them are not cached at the decode \
        pick.",
    ),
    source: readable("llm-d-router, profilehandler/disagg"),
    parameters: &[
        Parameter::number("nonCachedTokens", 0.0, "tokens, integer; 0: never"),
        Parameter::number("promptTokens", 0.0, "tokens, integer; 0: any prompt"),
    ],
    needs: &[RequiredState::PrefixIndex, RequiredState::Prompt],
    build,
};

#[derive(Debug)]
struct PrefixBasedDecider {
    uncached_tokens_min: u32,
    prompt_tokens_min: u32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Decider(Box::new(PrefixBasedDecider {
        uncached_tokens_min: parameters.integer("nonCachedTokens", 0..=u32::MAX)?,
        prompt_tokens_min: parameters.integer("promptTokens", 0..=u32::MAX)?,
    })))
}

impl Decider for PrefixBasedDecider {
    fn disaggregates(&self, context: &Context<'_>, decode: EndpointIndex) -> bool {
        self.uncached_tokens_min > 0
            && context.request.prompt_tokens >= self.prompt_tokens_min
            && context.uncached_tokens(decode) >= self.uncached_tokens_min
    }
}
