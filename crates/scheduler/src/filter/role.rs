//! `decode-filter`, `prefill-filter`, `encode-filter`: keep the endpoints whose label names a role
//! that serves the stage.
//!
//! An endpoint without the label serves prefill and decode, but passes only the decode filter.

use crate::endpoint::ROLE_LABEL;
use crate::filter::label_selector::LabelSelectorFilter;
use crate::plugin::{InvalidParameter, Parameters, RequiredState, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

/// The roles, and whether each role serves encode, prefill and decode. `both` is the deprecated
/// name of `prefill-decode`.
const ROLES: [(&str, [bool; 3]); 8] = [
    ("encode", [true, false, false]),
    ("prefill", [false, true, false]),
    ("decode", [false, false, true]),
    ("encode-prefill", [true, true, false]),
    ("encode-decode", [true, false, true]),
    ("prefill-decode", [false, true, true]),
    ("both", [false, true, true]),
    ("encode-prefill-decode", [true, true, true]),
];

const SOURCE: &str = readable("llm-d-router, filter/bylabel");

pub(crate) const ENCODE: PluginType = PluginType {
    name: "encode-filter",
    kind: PluginKind::Filter,
    doc: readable(
        "Keeps endpoints whose label llm-d.ai/role is encode, encode-prefill, encode-decode or encode-prefill-decode.",
    ),
    source: SOURCE,
    parameters: &[],
    needs: &[RequiredState::Labels],
    build: |_| stage(0),
};

pub(crate) const PREFILL: PluginType = PluginType {
    name: "prefill-filter",
    doc: readable(
        "Keeps endpoints whose label llm-d.ai/role is prefill, encode-prefill, prefill-decode (older: both) or encode-prefill-decode.",
    ),
    build: |_| stage(1),
    ..ENCODE
};

pub(crate) const DECODE: PluginType = PluginType {
    name: "decode-filter",
    doc: readable(
        "Keeps endpoints whose label llm-d.ai/role is decode, encode-decode, prefill-decode (older: both) or encode-prefill-decode, and those without the label.",
    ),
    build: |_: &Parameters<'_>| stage(2),
    ..ENCODE
};

const DECODE_STAGE: usize = 2;

fn stage(stage: usize) -> Result<Plugin, InvalidParameter> {
    let serves = |(_, stages): &&(&str, [bool; 3])| stages.get(stage).copied().unwrap_or(false);
    let roles: Vec<&str> = ROLES.iter().filter(serves).map(|(role, _)| *role).collect();
    Ok(Plugin::Filter(Box::new(LabelSelectorFilter::one_of(
        ROLE_LABEL,
        &roles,
        stage == DECODE_STAGE,
    ))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_serves_the_stages_it_is_named_after() {
        for (role, [encode, prefill, decode]) in ROLES {
            let named = |stage: &str| {
                role == stage
                    || role.split('-').any(|part| part == stage)
                    || (role == "both" && stage != "encode")
            };
            assert_eq!(
                (encode, prefill, decode),
                (named("encode"), named("prefill"), named("decode")),
                "{role}"
            );
            assert_eq!(
                crate::endpoint::decodes(Some(role)),
                decode,
                "{role}: the hosts of the proxy's cluster follow the same table"
            );
        }
    }
}
