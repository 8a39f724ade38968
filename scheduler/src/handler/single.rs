//! `single-profile-handler`: one profile for every request.

use crate::decision::{Decision, Route};
use crate::plugin::{InvalidParameter, Parameters, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::run::{ProfileHandler, Reference, Run};

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
