//! Parsers select the APIs whose requests are read. The crate `exchange` parses the requests; a
//! pipeline only says which APIs it reads.

use crate::plugin::{Parameters, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

const SOURCE: &str = readable("llm-d-router, requesthandling/parsers");

pub(crate) const OPENAI: PluginType = PluginType {
    name: "openai-parser",
    kind: PluginKind::Parser,
    doc: readable(
        "Reads requests of OpenAI's API: chat completions, completions, responses, conversations, \
        embeddings, image generations, renderings.",
    ),
    source: SOURCE,
    parameters: &[],
    needs: &[],
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("openai-parser")),
};

pub(crate) const ANTHROPIC: PluginType = PluginType {
    name: "anthropic-parser",
    doc: readable("Reads requests of Anthropic's API: messages and count_tokens."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("anthropic-parser")),
    ..OPENAI
};

pub(crate) const VLLM_HTTP: PluginType = PluginType {
    name: "vllmhttp-parser",
    doc: readable("Reads requests of vLLM's own API: inference/v1/generate."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("vllmhttp-parser")),
    ..OPENAI
};

pub(crate) const VLLM_GRPC: PluginType = PluginType {
    name: "vllmgrpc-parser",
    doc: readable("Passes requests of vLLM's gRPC API unread."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("vllmgrpc-parser")),
    ..OPENAI
};

pub(crate) const SGLANG_HTTP: PluginType = PluginType {
    name: "sglanghttp-parser",
    doc: readable("Reads requests of SGLang's own API: generate."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("sglanghttp-parser")),
    ..OPENAI
};

pub(crate) const VERTEX_AI: PluginType = PluginType {
    name: "vertexai-parser",
    doc: readable("Reads requests of Vertex AI's gRPC API: chats and raw predictions."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("vertexai-parser")),
    ..OPENAI
};

pub(crate) const PASSTHROUGH: PluginType = PluginType {
    name: "passthrough-parser",
    doc: readable(
        "Requests that no other parser reads are scheduled unread, by load, sessions and labels, \
        with or without this parser. As the only parser, it leaves all requests unread.",
    ),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("passthrough-parser")),
    ..OPENAI
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::PLUGINS;

    #[test]
    fn each_is_built_under_its_own_name() {
        let parsers: Vec<_> = PLUGINS
            .iter()
            .filter(|plugin| plugin.kind == PluginKind::Parser)
            .collect();
        assert_eq!(parsers.len(), 7);
        for parser in parsers {
            let built = parser.build(&[]).unwrap();
            assert!(
                matches!(built, Plugin::Parser(name) if name == parser.name),
                "{built:?} of {}",
                parser.name
            );
        }
    }
}
