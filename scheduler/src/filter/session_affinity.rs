//! `session-affinity-filter`: a session's requests go where the session is, and nowhere else as long as that endpoint is there.

use crate::candidates::Candidates;
use crate::plugin::session_affinity::{self, Session};
use crate::plugin::{Context, Filter, InvalidParameter, Parameters, State, for_people};
use crate::plugin_type::{ClientHeaders, Kind, Plugin, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "session-affinity-filter",
    kind: Kind::Filter,
    doc: for_people(
        "Keeps the endpoint of the request's session. Keeps all if there is no session, or if that endpoint is not a candidate.",
    ),
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
    Ok(Plugin::Filter(Box::new(SessionAffinity(session))).with_headers(headers))
}

impl Filter for SessionAffinity {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        if let Some(at) = self.0.endpoint(context, candidates.indices()) {
            candidates.retain(|endpoint| endpoint == at);
        }
    }
}
