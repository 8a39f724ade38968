//! `session-affinity-scorer`: prefers the endpoint of the request's session.

use crate::endpoint::EndpointIndex;
use crate::plugin::session_affinity::{self, SessionAffinity};
use crate::plugin::{Context, InvalidParameter, Parameters, RequiredState, Scorer, readable};
use crate::plugin_type::{ClientHeaders, Plugin, PluginKind, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "session-affinity-scorer",
    kind: PluginKind::Scorer,
    doc: readable("1 for the endpoint of the request's session, else 0."),
    source: session_affinity::SOURCE,
    parameters: session_affinity::PARAMETERS,
    needs: &[RequiredState::Headers],
    build,
};

#[derive(Debug)]
struct SessionAffinityScorer(SessionAffinity);

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let session = SessionAffinity::read(parameters)?;
    let headers = ClientHeaders {
        read: session.headers().to_vec(),
        session_token: session.token().cloned(),
    };
    Ok(Plugin::Scorer(Box::new(SessionAffinityScorer(session))).with_headers(headers))
}

impl Scorer for SessionAffinityScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let Some(at) = self.0.endpoint(context, endpoints) else {
            return;
        };
        for (score, _) in scores
            .iter_mut()
            .zip(endpoints)
            .filter(|(_, endpoint)| **endpoint == at)
        {
            *score = 1.0;
        }
    }
}
