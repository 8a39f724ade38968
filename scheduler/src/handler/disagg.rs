//! `disagg-profile-handler`: decode on one model server, and where a decider says so prefill on a second and encode on others before it.
//!
//! Decode is picked first: the proxy sends the request there, and its sidecar calls the others, which headers name. A stage whose decider
//! says no, whose profile leaves nobody, or whose pick is the one that comes after it anyway, is left to the next: a request never fails for
//! want of a prefill server.

use crate::decision::{Decision, Route};
use crate::endpoint::EndpointIndex;
use crate::plugin::{Default, InvalidParameter, Parameter, Parameters, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::run::{ProfileHandler, Reference, Run, Stage};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "disagg-profile-handler",
    kind: Kind::ProfileHandler,
    doc: for_people(
        "Runs the decode profile, then the profile of each stage that its decider sends \
        elsewhere: encode (x-encoder-hosts-ports), prefill (x-prefiller-host-port).",
    ),
    source: for_people("llm-d-router, profilehandler/disagg"),
    parameters: &[
        Parameter {
            name: "profiles",
            default: Default::Structured("{decode: decode, prefill: prefill, encode: encode}"),
            doc: for_people("profile name of each stage"),
        },
        Parameter {
            name: "deciders",
            default: Default::Structured("{prefill: PLUGIN, encode: PLUGIN}"),
            doc: for_people("decider of each stage; a stage without one never runs elsewhere"),
        },
    ],
    needs: &[],
    build,
};

const PROFILES: &[Parameter] = &[
    Parameter { name: "decode", default: Default::Text("decode"), doc: for_people("a profile") },
    Parameter { name: "prefill", default: Default::Text("prefill"), doc: for_people("a profile") },
    Parameter { name: "encode", default: Default::Text("encode"), doc: for_people("a profile") },
];

const DECIDERS: &[Parameter] = &[
    Parameter { name: "prefill", default: Default::Text(""), doc: for_people("a decider") },
    Parameter { name: "encode", default: Default::Text(""), doc: for_people("a decider") },
];

#[derive(Debug)]
struct Disagg {
    decode_profile: Box<str>,
    prefill: Option<Elsewhere>,
    encode: Option<Elsewhere>,
}

/// A stage that may run elsewhere.
#[derive(Debug)]
struct Elsewhere {
    profile: Box<str>,
    decider: Box<str>,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let texts = |of: &Parameters<'_>, names: [&str; 2]| -> Result<[Box<str>; 2], InvalidParameter> {
        let [first, second] = names.map(|name| of.text(name).map(Box::from));
        Ok([first?, second?])
    };
    let stages = ["prefill", "encode"];
    let read_profiles = |of: &Parameters<'_>| Ok((of.text("decode")?.into(), texts(of, stages)?));
    let profiles = match parameters.nested("profiles", PROFILES, read_profiles)? {
        Some(given) => given,
        None => read_profiles(&Parameters::check(PROFILES, &[])?)?,
    };
    let deciders = parameters.nested("deciders", DECIDERS, |of| texts(of, stages))?.unwrap_or_default();
    let (decode_profile, [prefill, encode]) = profiles;
    let stage = |profile, decider: Box<str>| (!decider.is_empty()).then_some(Elsewhere { profile, decider });
    let [prefill_decider, encode_decider] = deciders;
    Ok(Plugin::ProfileHandler(Box::new(Disagg {
        decode_profile,
        prefill: stage(prefill, prefill_decider),
        encode: stage(encode, encode_decider),
    })))
}

impl Elsewhere {
    /// Whom the stage's profile picks, when its decider wants it run elsewhere than at `next`.
    fn picked(&self, run: &mut Run<'_>, decode: EndpointIndex, next: EndpointIndex) -> Vec<EndpointIndex> {
        if !run.disaggregates(&self.decider, decode) {
            return Vec::new();
        }
        run.early(&self.profile).map_or_else(|_| Vec::new(), |ranked| ranked.iter().filter(|&index| index != next).collect())
    }
}

impl ProfileHandler for Disagg {
    fn references(&self) -> Vec<Reference<'_>> {
        let stages = [&self.prefill, &self.encode].into_iter().flatten();
        let of_stages = stages.flat_map(|stage| [Reference::Profile(&stage.profile), Reference::Decider(&stage.decider)]);
        std::iter::once(Reference::Profile(&self.decode_profile)).chain(of_stages).collect()
    }

    fn disaggregates(&self) -> bool {
        true
    }

    fn stage_of(&self, profile: &str) -> Stage {
        let runs = |stage: &Option<Elsewhere>| stage.as_ref().is_some_and(|stage| *stage.profile == *profile);
        match (runs(&self.prefill), runs(&self.encode)) {
            (true, _) => Stage::Prefill,
            (_, true) => Stage::Encode,
            _ => Stage::Serving,
        }
    }

    fn route(&self, run: &mut Run<'_>) -> Decision {
        let ranked = match run.decoders(&self.decode_profile) {
            Ok(ranked) => ranked,
            Err(refused) => return refused,
        };
        let decode = ranked.first();
        let prefill = self.prefill.as_ref().and_then(|stage| stage.picked(run, decode, decode).first().copied());
        let encode = self.encode.as_ref().map(|stage| stage.picked(run, decode, prefill.unwrap_or(decode))).unwrap_or_default();
        Decision::Route(Route { prefill, encode, ..Route::to(ranked) })
    }
}
