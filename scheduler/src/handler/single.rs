//! `single-profile-handler`: one profile for every request.

use crate::decision::{Decision, Route};
use crate::pipeline::Reference;
use crate::plugin::{InvalidParameter, Kind, Parameters, Plugin, PluginType, ProfileHandler, for_people};
use crate::schedule::Run;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "single-profile-handler",
    kind: Kind::ProfileHandler,
    doc: for_people("Runs the only profile."),
    source: for_people("llm-d-router, profilehandler/single"),
    parameters: &[],
    needs: &[],
    build,
};

#[derive(Debug)]
pub(crate) struct SingleProfile;

fn build(_: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::ProfileHandler(Box::new(SingleProfile)))
}

impl ProfileHandler for SingleProfile {
    fn references(&self) -> Vec<Reference<'_>> {
        vec![Reference::OnlyProfile]
    }

    fn route(&self, run: &mut Run<'_>) -> Decision {
        run.only_profile().map_or_else(|refused| refused, |ranked| Decision::Route(Route::to(ranked)))
    }
}
