//! `agent-identity`: sets the headers that identify an agent's session.

use crate::plugin::{InvalidParameter, Parameter, Parameters, RequiredState, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::settings::{IdentitySettings, ProducerSetting};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "agent-identity",
    kind: PluginKind::Producer,
    doc: readable(
        "Session = value of the first of these headers in the request: additionalSessionHeaders, \
        then x-claude-code-session-id, x-session-affinity, session-id, session_id.",
    ),
    source: readable("llm-d-router, requestheader/agentidentity"),
    parameters: &[Parameter::structured(
        "additionalSessionHeaders",
        "[HEADER]",
        "header names to read first",
    )],
    needs: &[RequiredState::Headers],
    build,
};

/// The headers that known agents send without configuration.
const KNOWN: [&str; 4] = [
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
];

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    IdentitySettings::read(parameters)
        .map(|settings| Plugin::Producer(ProducerSetting::Identity(settings)))
}

impl IdentitySettings {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        let additional = parameters.texts("additionalSessionHeaders")?;
        Ok(Self {
            headers: additional
                .into_iter()
                .chain(KNOWN)
                .map(|name| name.trim().to_ascii_lowercase().into())
                .collect(),
        })
    }
}
