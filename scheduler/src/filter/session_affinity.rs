//! `session-affinity-filter`: a session's requests go where the session is, and nowhere else as long as that endpoint is there.

use crate::candidates::Candidates;
use crate::plugin::{Context, Filter, InvalidParameter, Kind, Parameters, Plugin, PluginType, State, for_people};
use crate::rng::Rng;
use crate::session::{self, Session, SessionToken};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "session-affinity-filter",
    kind: Kind::Filter,
    doc: for_people(
        "Keeps the endpoint of the request's session. Keeps all if there is no \
    session, or if that endpoint is not a candidate.",
    ),
    source: session::SOURCE,
    parameters: session::PARAMETERS,
    needs: &[State::Headers],
    build,
};

#[derive(Debug)]
struct SessionAffinity(Session);

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Filter(Box::new(SessionAffinity(Session::read(parameters)?))))
}

impl Filter for SessionAffinity {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        if let Some(at) = self.0.endpoint(context, candidates.indices()) {
            candidates.retain(|endpoint| endpoint == at);
        }
    }

    fn headers(&self) -> &[Box<str>] {
        self.0.headers()
    }

    fn session_token(&self) -> Option<&SessionToken> {
        self.0.token()
    }
}
