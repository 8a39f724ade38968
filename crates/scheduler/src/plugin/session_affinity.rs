//! Finds the session of a request, and the endpoint of that session. Both strategies store nothing,
//! so all workers and proxies choose the same endpoint, even after a restart:
//!
//! - `encoded_endpoint_header`: the client names the endpoint. Each response has a token: the name
//!   of the endpoint that served the request, in base64. The client sends the token with the next
//!   request.
//! - `session_id`: the client sends a session id in a header. The session's endpoint is the
//!   candidate with the highest hash of session id and endpoint (rendezvous hashing). When an
//!   endpoint leaves, only the sessions of this endpoint move: each session moves to the same
//!   second choice in every proxy, until the endpoint returns. An endpoint that joins gets an equal
//!   part of the sessions. Instead, llm-d keeps a table from session id to endpoint in each
//!   replica, with a time to live.
//!
//! Source: llm-d-router, scheduling/util/sessionaffinity. Thaler and Ravishankar, "Using name-based
//! mappings to increase hit rates", 1998.

use super::context::Context;
use super::parameters::{InvalidParameter, Parameter, Parameters};
use crate::endpoint::EndpointIndex;
use crate::rng::Rng;
use crate::session::{SessionToken, decode_token, name_hash};
use crate::text::readable;

pub(crate) const SOURCE: &str = readable("llm-d-router, scheduling/util/sessionaffinity");

/// The parameters of both the scorer and the filter.
pub(crate) const PARAMETERS: &[Parameter] = &[
    Parameter::text(
        "strategy",
        "encoded_endpoint_header",
        "encoded_endpoint_header or session_id",
    ),
    Parameter::structured(
        "encodedEndpointHeaderConfig",
        "{header: x-session-token}",
        "request and response header that carries the token",
    ),
    Parameter::structured(
        "sessionIdConfig",
        "{sources: [{header: x-session-id}], evictionTtlSeconds, evictionSweepSeconds}",
        "sources of the id, first present wins: {header: NAME} or {attribute: agent-identity}; eviction settings have no effect",
    ),
    Parameter::text(
        "profileName",
        "",
        "profile whose pick the token names; empty: the served endpoint",
    ),
];

const TOKEN_HEADER: &[Parameter] = &[Parameter::text(
    "header",
    "x-session-token",
    "a header name",
)];
const SESSION_ID: &[Parameter] = &[
    Parameter::structured(
        "sources",
        "[{header: NAME} or {attribute: agent-identity}]",
        "in order of priority",
    ),
    Parameter::number(
        "evictionTtlSeconds",
        300.0,
        "no effect: nothing is remembered; above 0",
    ),
    Parameter::number(
        "evictionSweepSeconds",
        10.0,
        "no effect: nothing is remembered; above 0",
    ),
];
const ID_SOURCE: &[Parameter] = &[
    Parameter::text(
        "header",
        "",
        "a header name; exactly one of header and attribute must be given",
    ),
    Parameter::text("attribute", "", "agent-identity; there is no other"),
    Parameter::text("producer", "", "empty, or agent-identity"),
];

const ID_HEADER: &str = "x-session-id";

/// The way in which one plugin finds the session of a request.
#[derive(Debug)]
pub(crate) struct SessionAffinity {
    strategy: SessionStrategy,
    headers: Box<[Box<str>]>,
}

#[derive(Debug)]
enum SessionStrategy {
    Token(SessionToken),
    Id(Box<[SessionIdSource]>),
}

#[derive(Debug)]
enum SessionIdSource {
    Header(Box<str>),
    AgentIdentity,
}

// === impl SessionAffinity ===

impl SessionAffinity {
    pub(crate) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        let by_id = parameters.choice(
            "strategy",
            &[("encoded_endpoint_header", false), ("session_id", true)],
        )?;
        let header = parameters.nested("encodedEndpointHeaderConfig", TOKEN_HEADER, |config| {
            config.header("header")
        })?;
        let sources = parameters
            .nested("sessionIdConfig", SESSION_ID, sources)?
            .unwrap_or_default();
        if !by_id {
            let header = header.unwrap_or_else(|| TOKEN_HEADER_NAME.into());
            let token = SessionToken {
                header: header.clone(),
                profile: parameters.text("profileName")?.into(),
            };
            return Ok(Self {
                strategy: SessionStrategy::Token(token),
                headers: Box::new([header]),
            });
        }
        let sources = if sources.is_empty() {
            vec![SessionIdSource::Header(ID_HEADER.into())]
        } else {
            sources
        };
        let headers = sources.iter().flat_map(SessionIdSource::headers).collect();
        Ok(Self {
            strategy: SessionStrategy::Id(sources.into()),
            headers,
        })
    }

    /// Returns the endpoint of the request's session. Returns `None` if the request has no session,
    /// or if its token names an endpoint that is not among `endpoints`.
    pub(crate) fn endpoint(
        &self,
        context: &Context<'_>,
        endpoints: &[EndpointIndex],
    ) -> Option<EndpointIndex> {
        match &self.strategy {
            SessionStrategy::Token(token) => {
                let name = decode_token(context.request.header(&token.header)?)?;
                let named = |index: &EndpointIndex| {
                    context
                        .table
                        .endpoint(*index)
                        .is_some_and(|e| e.name.as_bytes() == name)
                };
                endpoints.iter().copied().find(named)
            }
            SessionStrategy::Id(sources) => {
                let id = sources
                    .iter()
                    .filter_map(|source| source.read(context))
                    .map(str::trim)
                    .find(|id| !id.is_empty())?;
                let id = name_hash(id);
                endpoints
                    .iter()
                    .copied()
                    .max_by_key(|&index| weight(id, context.table.name_hash(index)))
            }
        }
    }

    /// Returns the names of the request headers that the plugin reads.
    pub(crate) fn headers(&self) -> &[Box<str>] {
        &self.headers
    }

    /// Returns the response header that clients send back, if the strategy has a token.
    pub(crate) fn token(&self) -> Option<&SessionToken> {
        if let SessionStrategy::Token(token) = &self.strategy {
            Some(token)
        } else {
            None
        }
    }
}

// === impl SessionIdSource ===

impl SessionIdSource {
    fn headers(&self) -> Vec<Box<str>> {
        match self {
            Self::Header(name) => vec![name.clone()],
            // The list is empty, because the pipeline itself reads the headers of agent-identity.
            Self::AgentIdentity => Vec::new(),
        }
    }

    fn read<'c>(&self, context: &'c Context<'_>) -> Option<&'c str> {
        match self {
            Self::Header(name) => context.request.header(name),
            Self::AgentIdentity => context.agent_identity(),
        }
    }
}

const TOKEN_HEADER_NAME: &str = "x-session-token";

fn sources(config: &Parameters<'_>) -> Result<Vec<SessionIdSource>, InvalidParameter> {
    for unused in ["evictionTtlSeconds", "evictionSweepSeconds"] {
        config.number(unused, f64::MIN_POSITIVE..=f64::MAX)?;
    }
    config.each("sources", ID_SOURCE, |source| {
        source.choice("producer", &[("", ()), ("agent-identity", ())])?;
        let attribute = source.choice("attribute", &[("", false), ("agent-identity", true)])?;
        match (source.text("header")?.is_empty(), attribute) {
            (false, false) => source.header("header").map(SessionIdSource::Header),
            (true, true) => Ok(SessionIdSource::AgentIdentity),
            _ => Err(source.out_of_range("header")),
        }
    })
}

/// Returns the hash of a session and an endpoint, with the finalizer of SplitMix64, as in
/// [`crate::Rng`].
fn weight(id: u64, endpoint: u64) -> u64 {
    Rng::seeded(id ^ endpoint).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::xxh64;

    #[test]
    fn ids_spread_evenly_and_an_endpoint_takes_only_its_share() {
        let names: Vec<u64> = (0..10)
            .map(|at| xxh64(format!("pod-{at}").as_bytes()))
            .collect();
        let at = |names: &[u64], id: u64| {
            (0..names.len())
                .max_by_key(|&at| weight(xxh64(&id.to_le_bytes()), names[at]))
                .unwrap()
        };
        let mut counts = [0_u32; 10];
        let mut moved = 0;
        for id in 0..10_000 {
            let before = at(&names, id);
            counts[before] += 1;
            let after = at(&names[..9], id);
            moved += u32::from(after != before);
            assert!(
                before == 9 || after == before,
                "only sessions of the endpoint that left move"
            );
        }
        assert_eq!(moved, counts[9]);
        assert!(
            counts.iter().all(|count| (850..1150).contains(count)),
            "{counts:?}"
        );
    }
}
