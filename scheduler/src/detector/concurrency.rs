//! `concurrency-detector`: how full endpoints are by what we have in flight there. Counted by us, so never stale and never unknown.

use crate::candidates::Candidates;
use crate::detector::{HEADROOM, IN_FLIGHT_PRODUCER, relaxed};
use crate::filter::keep;
use crate::in_flight::Load;
use crate::plugin::{
    Context, Default, Detector, Filter, InvalidParameter, Kind, Parameter, Parameters, Plugin, PluginType, State, for_people,
};
use crate::rng::Rng;
use crate::snapshot::EndpointIndex;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "concurrency-detector",
    kind: Kind::Detector,
    doc: for_people(
        "Saturation is what is in flight at all endpoints over what all can take: requests over maxConcurrency, prompt tokens over maxTokenConcurrency, or (hybrid) the greater of both. As a filter it drops endpoints that have reached the limit times 1 + headroom, unless all have.",
    ),
    source: for_people("llm-d-router, saturationdetector/concurrency"),
    parameters: &[
        Parameter { name: "concurrencyMode", default: Default::Text("requests"), doc: for_people("requests, tokens or hybrid") },
        Parameter {
            name: "maxConcurrency",
            default: Default::Number(100.0),
            doc: for_people("requests one endpoint can take, a whole number from 1"),
        },
        Parameter {
            name: "maxTokenConcurrency",
            default: Default::Number(1_000_000.0),
            doc: for_people("prompt tokens in flight one endpoint can take, a whole number from 1"),
        },
        HEADROOM,
        IN_FLIGHT_PRODUCER,
    ],
    needs: &[State::InFlight],
    build,
};

#[derive(Debug)]
struct Concurrency {
    /// `None` where requests do not count.
    requests_max: Option<f64>,
    /// `None` where tokens do not count.
    tokens_max: Option<f64>,
    /// Saturation below which a filter keeps an endpoint.
    kept_below: f64,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    parameters.text(IN_FLIGHT_PRODUCER.name)?;
    let modes = [("requests", (true, false)), ("tokens", (false, true)), ("hybrid", (true, true))];
    let (requests, tokens) = parameters.choice("concurrencyMode", &modes)?;
    let requests_max = f64::from(parameters.integer("maxConcurrency", 1..=u32::MAX)?);
    let tokens_max = f64::from(parameters.integer("maxTokenConcurrency", 1..=u32::MAX)?);
    Ok(Plugin::Detector(Box::new(Concurrency {
        requests_max: requests.then_some(requests_max),
        tokens_max: tokens.then_some(tokens_max),
        kept_below: f64::from(relaxed(parameters)?),
    })))
}

impl Concurrency {
    /// `count` endpoints with these loads together, as a share of what they can take.
    #[expect(clippy::cast_precision_loss, reason = "loads stay far below 2^52")]
    fn share(&self, requests: u64, tokens: u64, count: f64) -> f64 {
        let of = |load: u64, max: Option<f64>| max.map_or(0.0, |max| load as f64 / (max * count));
        of(requests, self.requests_max).max(of(tokens, self.tokens_max))
    }

    fn share_of(&self, load: Load) -> f64 {
        self.share(u64::from(load.requests), load.prefill_tokens, 1.0)
    }
}

impl Detector for Concurrency {
    fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64 {
        let loads = endpoints.iter().map(|&endpoint| context.load(endpoint));
        let add = |(requests, tokens, count), load: Load| {
            (u64::saturating_add(requests, u64::from(load.requests)), u64::saturating_add(tokens, load.prefill_tokens), count + 1.0)
        };
        let (requests, tokens, count) = loads.fold((0, 0, 0.0), add);
        if count > 0.0 { self.share(requests, tokens, count) } else { 0.0 }
    }
}

impl Filter for Concurrency {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        keep(candidates, true, |index| self.share_of(context.load(index)) < self.kept_below);
    }
}
