//! `slo-aware-profile-handler`: requests with a header that asks for scheduling by SLOs run the SLO
//! profile, and other requests run the default profile.
//!
//! | prediction | SLO | header | runs |
//! |---|---|---|---|
//! | off | any | any | the default profile |
//! | on | none | any | nothing: 400, unless `sloMissing: default`, then the default profile |
//! | on | some | false or absent | the default profile; its SLO still counts for later picks |
//! | on | some | true | the SLO profile |

use crate::decision::{Decision, Route};
use crate::plugin::{InvalidParameter, Parameter, Parameters, RequiredState, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::run::{ProfileHandler, Reference, SchedulingRun};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "slo-aware-profile-handler",
    kind: PluginKind::ProfileHandler,
    doc: readable(
        "Runs sloProfile for requests with an SLO and the header PredictionBasedRouting: true, \
        and defaultProfile for the others. Without --latency-prediction all use defaultProfile; \
        with it, an inference request without an SLO is answered 400.",
    ),
    source: readable("Gateway API Inference Extension, issue 1323"),
    parameters: &[
        Parameter::text("defaultProfile", "default", "profile for other requests"),
        Parameter::text("sloProfile", "slo", "profile for requests with an SLO"),
        Parameter::text(
            "sloMissing",
            "refuse",
            "requests without an SLO while latency is predicted: refuse (400), or default \
                (runs defaultProfile)",
        ),
    ],
    needs: &[RequiredState::Headers, RequiredState::Latency],
    build,
};

#[derive(Debug)]
struct SloAwareProfileHandler {
    default_profile: Box<str>,
    slo_profile: Box<str>,
    demands_slo: bool,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::ProfileHandler(Box::new(SloAwareProfileHandler {
        default_profile: parameters.text("defaultProfile")?.trim().into(),
        slo_profile: parameters.text("sloProfile")?.trim().into(),
        demands_slo: parameters.choice("sloMissing", &[("refuse", true), ("default", false)])?,
    })))
}

impl ProfileHandler for SloAwareProfileHandler {
    fn references(&self) -> Vec<Reference<'_>> {
        vec![
            Reference::Profile(&self.default_profile),
            Reference::Profile(&self.slo_profile),
        ]
    }

    fn demands_slo(&self) -> bool {
        self.demands_slo
    }

    fn route(&self, run: &mut SchedulingRun<'_>) -> Decision {
        let context = run.context();
        let by_slo =
            context.predicts && context.request.slo.any() && context.request.prediction_based;
        let ranked = run.ranked(if by_slo {
            &self.slo_profile
        } else {
            &self.default_profile
        });
        ranked.map_or_else(
            |refused| refused,
            |ranked| Decision::Route(Route::to(ranked)),
        )
    }
}
