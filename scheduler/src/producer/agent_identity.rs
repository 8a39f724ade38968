//! `agent-identity`: which headers tell an agent's sessions apart.

use crate::plugin::{Default, InvalidParameter, Parameter, Parameters, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::settings::{IdentitySettings, Producer};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "agent-identity",
    kind: Kind::Producer,
    doc: for_people(
        "Session = value of the first of these headers in the request: additionalSessionHeaders, \
        then x-claude-code-session-id, x-session-affinity, session-id, session_id.",
    ),
    source: for_people("llm-d-router, requestheader/agentidentity"),
    parameters: &[Parameter {
        name: "additionalSessionHeaders",
        default: Default::Structured("[HEADER]"),
        doc: for_people("header names to read first"),
    }],
    needs: &[State::Headers],
    build,
};

/// Headers that agents send of themselves.
const KNOWN: [&str; 4] = ["x-claude-code-session-id", "x-session-affinity", "session-id", "session_id"];

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    IdentitySettings::read(parameters).map(|settings| Plugin::Producer(Producer::Identity(settings)))
}

impl IdentitySettings {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        let additional = parameters.texts("additionalSessionHeaders")?;
        Ok(Self { headers: additional.into_iter().chain(KNOWN).map(|name| name.trim().to_ascii_lowercase().into()).collect() })
    }
}
