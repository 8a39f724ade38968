//! Parsers: the APIs whose requests are read. The parsing itself is in `exchange`; a pipeline only
//! says which APIs it reads.

use crate::plugin::{Parameters, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};

const SOURCE: &str = for_people("llm-d-router, requesthandling/parsers");

pub(crate) const OPENAI: PluginType = PluginType {
    name: "openai-parser",
    kind: Kind::Parser,
    doc: for_people(
        "Requests of OpenAI's API are read: chat completions, completions, responses, conversations, embeddings, image generations, renderings.",
    ),
    source: SOURCE,
    parameters: &[],
    needs: &[],
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("openai-parser")),
};

pub(crate) const ANTHROPIC: PluginType = PluginType {
    name: "anthropic-parser",
    doc: for_people("Requests of Anthropic's API are read: messages and their count_tokens."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("anthropic-parser")),
    ..OPENAI
};

pub(crate) const VLLM_HTTP: PluginType = PluginType {
    name: "vllmhttp-parser",
    doc: for_people("Requests of vLLM's own API are read: inference/v1/generate."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("vllmhttp-parser")),
    ..OPENAI
};

pub(crate) const VLLM_GRPC: PluginType = PluginType {
    name: "vllmgrpc-parser",
    doc: for_people("Requests of vLLM's gRPC API go as they are: nothing of them is read here."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("vllmgrpc-parser")),
    ..OPENAI
};

pub(crate) const SGLANG_HTTP: PluginType = PluginType {
    name: "sglanghttp-parser",
    doc: for_people("Requests of SGLang's own API are read: generate."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("sglanghttp-parser")),
    ..OPENAI
};

pub(crate) const VERTEX_AI: PluginType = PluginType {
    name: "vertexai-parser",
    doc: for_people("Requests of Vertex AI's gRPC API are read: chats and raw predictions."),
    build: |_: &Parameters<'_>| Ok(Plugin::Parser("vertexai-parser")),
    ..OPENAI
};

pub(crate) const PASSTHROUGH: PluginType = PluginType {
    name: "passthrough-parser",
    doc: for_people(
        "Requests that no other parser reads go as they are, by load, sessions and labels. They always do; alone it means that none is read.",
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
        let parsers: Vec<_> = PLUGINS.iter().filter(|plugin| plugin.kind == Kind::Parser).collect();
        assert_eq!(parsers.len(), 7);
        for parser in parsers {
            let built = parser.build(&[]).unwrap();
            assert!(matches!(built, Plugin::Parser(name) if name == parser.name), "{built:?} of {}", parser.name);
        }
    }
}
