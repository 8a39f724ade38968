//! `session-affinity-scorer`: a session's requests go where the session is.

use crate::plugin::{Context, InvalidParameter, Kind, Parameters, Plugin, PluginType, Scorer, State, for_people};
use crate::session::{self, Session, SessionToken};
use crate::snapshot::EndpointIndex;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "session-affinity-scorer",
    kind: Kind::Scorer,
    doc: for_people("1 for the endpoint of the request's session, else 0."),
    source: session::SOURCE,
    parameters: session::PARAMETERS,
    needs: &[State::Headers],
    build,
};

#[derive(Debug)]
struct SessionAffinity(Session);

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(SessionAffinity(Session::read(parameters)?))))
}

impl Scorer for SessionAffinity {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let Some(at) = self.0.endpoint(context, endpoints) else { return };
        for (score, _) in scores.iter_mut().zip(endpoints).filter(|(_, endpoint)| **endpoint == at) {
            *score = 1.0;
        }
    }

    fn headers(&self) -> &[Box<str>] {
        self.0.headers()
    }

    fn session_token(&self) -> Option<&SessionToken> {
        self.0.token()
    }
}
