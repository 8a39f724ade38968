//! `disagg-profile-handler`: one model server decodes. If a decider demands it, a second server
//! runs the prefill first, and further servers encode media before the prefill.
//!
//! The decode server is picked first, because the proxy sends the request to this server. The
//! sidecar of the decode server calls the other servers, which are named in headers. A stage runs
//! at the endpoint of the next stage in three cases: the stage's decider decides against another
//! endpoint, its profile leaves no endpoint, or its profile picks the endpoint of the next stage.
//! So a request never fails for lack of a prefill server.

use crate::decision::{Decision, Route};
use crate::endpoint::EndpointIndex;
use crate::plugin::{InvalidParameter, Parameter, Parameters, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::run::{ProfileHandler, Reference, SchedulingRun, Stage};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "disagg-profile-handler",
    kind: PluginKind::ProfileHandler,
    doc: readable(
        "Runs the decode profile, which picks the endpoint that gets the request. If the decider \
        of the stage prefill or encode wants another endpoint, also runs that stage's profile, and \
        names its picks in the header x-prefiller-host-port or x-encoder-hosts-ports.",
    ),
    source: readable("llm-d-router, profilehandler/disagg"),
    parameters: &[
        Parameter::structured(
            "profiles",
            "{decode: decode, prefill: prefill, encode: encode}",
            "profile name of each stage",
        ),
        Parameter::structured(
            "deciders",
            "{prefill: PLUGIN, encode: PLUGIN}",
            "decider of each stage; a stage without one never runs elsewhere",
        ),
    ],
    needs: &[],
    build,
};

const PROFILES: &[Parameter] = &[
    Parameter::text("decode", "decode", "a profile"),
    Parameter::text("prefill", "prefill", "a profile"),
    Parameter::text("encode", "encode", "a profile"),
];

const DECIDERS: &[Parameter] = &[
    Parameter::text("prefill", "", "a decider"),
    Parameter::text("encode", "", "a decider"),
];

#[derive(Debug)]
struct DisaggProfileHandler {
    decode_profile: Box<str>,
    prefill: Option<RemoteStage>,
    encode: Option<RemoteStage>,
}

/// A stage that may run on another endpoint than the next stage.
#[derive(Debug)]
struct RemoteStage {
    profile: Box<str>,
    decider: Box<str>,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let texts =
        |of: &Parameters<'_>, names: [&str; 2]| -> Result<[Box<str>; 2], InvalidParameter> {
            let [first, second] = names.map(|name| of.text(name).map(Box::from));
            Ok([first?, second?])
        };
    let stages = ["prefill", "encode"];
    let read_profiles = |of: &Parameters<'_>| Ok((of.text("decode")?.into(), texts(of, stages)?));
    let profiles = match parameters.nested("profiles", PROFILES, read_profiles)? {
        Some(given) => given,
        None => read_profiles(&Parameters::check(PROFILES, &[])?)?,
    };
    let deciders = parameters
        .nested("deciders", DECIDERS, |of| texts(of, stages))?
        .unwrap_or_default();
    let (decode_profile, [prefill, encode]) = profiles;
    let stage = |profile, decider: Box<str>| {
        (!decider.is_empty()).then_some(RemoteStage { profile, decider })
    };
    let [prefill_decider, encode_decider] = deciders;
    Ok(Plugin::ProfileHandler(Box::new(DisaggProfileHandler {
        decode_profile,
        prefill: stage(prefill, prefill_decider),
        encode: stage(encode, encode_decider),
    })))
}

impl RemoteStage {
    /// Returns the endpoints that the stage's profile picks, without `next`. The list is empty if
    /// the decider wants the stage to run at `next`.
    fn picked(
        &self,
        run: &mut SchedulingRun<'_>,
        decode: EndpointIndex,
        next: EndpointIndex,
    ) -> Vec<EndpointIndex> {
        if !run.disaggregates(&self.decider, decode) {
            return Vec::new();
        }
        run.early(&self.profile).map_or_else(
            |_| Vec::new(),
            |ranked| ranked.iter().filter(|&index| index != next).collect(),
        )
    }
}

impl ProfileHandler for DisaggProfileHandler {
    fn references(&self) -> Vec<Reference<'_>> {
        let stages = [&self.prefill, &self.encode].into_iter().flatten();
        let of_stages = stages.flat_map(|stage| {
            [
                Reference::Profile(&stage.profile),
                Reference::Decider(&stage.decider),
            ]
        });
        std::iter::once(Reference::Profile(&self.decode_profile))
            .chain(of_stages)
            .collect()
    }

    fn disaggregates(&self) -> bool {
        true
    }

    fn stage_of(&self, profile: &str) -> Stage {
        let runs = |stage: &Option<RemoteStage>| {
            stage
                .as_ref()
                .is_some_and(|stage| *stage.profile == *profile)
        };
        match (runs(&self.prefill), runs(&self.encode)) {
            (true, _) => Stage::Prefill,
            (_, true) => Stage::Encode,
            _ => Stage::Serving,
        }
    }

    fn route(&self, run: &mut SchedulingRun<'_>) -> Decision {
        let ranked = match run.decoders(&self.decode_profile) {
            Ok(ranked) => ranked,
            Err(refused) => return refused,
        };
        let decode = ranked.first();
        let prefill = self
            .prefill
            .as_ref()
            .and_then(|stage| stage.picked(run, decode, decode).first().copied());
        let encode = self
            .encode
            .as_ref()
            .map(|stage| stage.picked(run, decode, prefill.unwrap_or(decode)))
            .unwrap_or_default();
        Decision::Route(Route {
            prefill,
            encode,
            ..Route::to(ranked)
        })
    }
}
