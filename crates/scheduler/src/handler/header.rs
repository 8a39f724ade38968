//! `header-profile-handler`: a request header names the profile. This handler is for a coordinator
//! that sends the stages of a request (such as prefill and decode) one after another.

use crate::decision::{Decision, Route};
use crate::plugin::{InvalidParameter, Parameter, Parameters, RequiredState, readable};
use crate::plugin_type::{ClientHeaders, Plugin, PluginKind, PluginType};
use crate::run::{ProfileHandler, Reference, SchedulingRun};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "header-profile-handler",
    kind: PluginKind::ProfileHandler,
    doc: readable(
        "Runs the profile named in the request's header, or defaultProfile without the header. If \
        there is only one profile, it runs that one. An unknown name is answered 400.",
    ),
    source: readable("llm-d-router, profilehandler/headerprofile"),
    parameters: &[
        Parameter::text("headerName", "EPP-Profile", "the header, case-insensitive"),
        Parameter::text(
            "defaultProfile",
            "decode",
            "profile for requests without the header",
        ),
    ],
    needs: &[RequiredState::Headers],
    build,
};

#[derive(Debug)]
struct HeaderProfileHandler {
    header: Box<str>,
    default_profile: Box<str>,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let header: Box<str> = parameters
        .text("headerName")?
        .trim()
        .to_ascii_lowercase()
        .into();
    let headers = ClientHeaders {
        read: vec![header.clone()],
        session_token: None,
    };
    let default_profile = parameters.text("defaultProfile")?.trim().into();
    Ok(Plugin::ProfileHandler(Box::new(HeaderProfileHandler {
        header,
        default_profile,
    }))
    .with_headers(headers))
}

impl ProfileHandler for HeaderProfileHandler {
    fn references(&self) -> Vec<Reference<'_>> {
        vec![Reference::ProfileOfSeveral(&self.default_profile)]
    }

    fn route(&self, run: &mut SchedulingRun<'_>) -> Decision {
        let named = run
            .context()
            .request
            .header(&self.header)
            .map(str::trim)
            .filter(|name| !name.is_empty());
        let ranked = match named {
            _ if run.profiles() == 1 => run.only_profile(),
            Some(name) if !run.has_profile(name) => return Decision::UnknownProfile(name.into()),
            name => run.ranked(name.unwrap_or(&self.default_profile)),
        };
        ranked.map_or_else(
            |refused| refused,
            |ranked| Decision::Route(Route::to(ranked)),
        )
    }
}
