//! `session-affinity-scorer`: a session's requests go where the session is.

use crate::endpoint::EndpointIndex;
use crate::plugin::session_affinity::{self, Session};
use crate::plugin::{Context, InvalidParameter, Parameters, Scorer, State, for_people};
use crate::plugin_type::{ClientHeaders, Kind, Plugin, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "session-affinity-scorer",
    kind: Kind::Scorer,
    doc: for_people("1 for the endpoint of the request's session, else 0."),
    source: session_affinity::SOURCE,
    parameters: session_affinity::PARAMETERS,
    needs: &[State::Headers],
    build,
};

#[derive(Debug)]
struct SessionAffinity(Session);

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let session = Session::read(parameters)?;
    let headers = ClientHeaders { read: session.headers().to_vec(), session_token: session.token().cloned() };
    Ok(Plugin::Scorer(Box::new(SessionAffinity(session))).with_headers(headers))
}

impl Scorer for SessionAffinity {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let Some(at) = self.0.endpoint(context, endpoints) else { return };
        for (score, _) in scores.iter_mut().zip(endpoints).filter(|(_, endpoint)| **endpoint == at) {
            *score = 1.0;
        }
    }
}
