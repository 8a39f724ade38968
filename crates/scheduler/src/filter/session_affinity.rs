//! `session-affinity-filter`: keeps only the endpoint of the request's session, as long as this
//! endpoint is a candidate.

use crate::candidates::Candidates;
use crate::plugin::session_affinity::{self, SessionAffinity};
use crate::plugin::{Context, Filter, InvalidParameter, Parameters, RequiredState, readable};
use crate::plugin_type::{ClientHeaders, Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "session-affinity-filter",
    kind: PluginKind::Filter,
    doc: readable(
        "Keeps the endpoint of the request's session. Keeps all if there is no session, or if that endpoint is not a candidate.",
    ),
    source: session_affinity::SOURCE,
    parameters: session_affinity::PARAMETERS,
    needs: &[RequiredState::Headers],
    build,
};

#[derive(Debug)]
struct SessionAffinityFilter(SessionAffinity);

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let session = SessionAffinity::read(parameters)?;
    let headers = ClientHeaders {
        read: session.headers().to_vec(),
        session_token: session.token().cloned(),
    };
    Ok(Plugin::Filter(Box::new(SessionAffinityFilter(session))).with_headers(headers))
}

impl Filter for SessionAffinityFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        if let Some(at) = self.0.endpoint(context, candidates.indices()) {
            candidates.retain(|endpoint| endpoint == at);
        }
    }
}
