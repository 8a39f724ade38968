//! `prefix-based-pd-decider`: when the decode server would have much of the prompt to work through itself.

use crate::endpoint::EndpointIndex;
use crate::plugin::{Context, Decider, Default, InvalidParameter, Parameter, Parameters, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "prefix-based-pd-decider",
    kind: Kind::Decider,
    doc: for_people(
        "Yes if nonCachedTokens > 0, the prompt has at least promptTokens tokens, and at least \
        nonCachedTokens of them are not cached at the decode pick.",
    ),
    source: for_people("llm-d-router, profilehandler/disagg"),
    parameters: &[
        Parameter { name: "nonCachedTokens", default: Default::Number(0.0), doc: for_people("tokens, a whole number; 0: never") },
        Parameter { name: "promptTokens", default: Default::Number(0.0), doc: for_people("tokens, a whole number; 0: any prompt") },
    ],
    needs: &[State::PrefixIndex, State::Prompt],
    build,
};

#[derive(Debug)]
struct PrefixBased {
    uncached_tokens_min: u32,
    prompt_tokens_min: u32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Decider(Box::new(PrefixBased {
        uncached_tokens_min: parameters.integer("nonCachedTokens", 0..=u32::MAX)?,
        prompt_tokens_min: parameters.integer("promptTokens", 0..=u32::MAX)?,
    })))
}

impl Decider for PrefixBased {
    fn disaggregates(&self, context: &Context<'_>, decode: EndpointIndex) -> bool {
        self.uncached_tokens_min > 0
            && context.request.prompt_tokens >= self.prompt_tokens_min
            && context.uncached_tokens(decode) >= self.uncached_tokens_min
    }
}
