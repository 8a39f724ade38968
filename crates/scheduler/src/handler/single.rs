//! `single-profile-handler`: runs the only profile for every request.

use crate::decision::{Decision, Route};
use crate::plugin::readable;
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::run::{ProfileHandler, Reference, SchedulingRun};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "single-profile-handler",
    kind: PluginKind::ProfileHandler,
    doc: readable("Runs the only profile."),
    source: readable("llm-d-router, profilehandler/single"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::ProfileHandler(Box::new(SingleProfileHandler))),
};

#[derive(Debug)]
pub(crate) struct SingleProfileHandler;

impl ProfileHandler for SingleProfileHandler {
    fn references(&self) -> Vec<Reference<'_>> {
        vec![Reference::OnlyProfile]
    }

    fn route(&self, run: &mut SchedulingRun<'_>) -> Decision {
        run.only_profile().map_or_else(
            |refused| refused,
            |ranked| Decision::Route(Route::to(ranked)),
        )
    }
}
