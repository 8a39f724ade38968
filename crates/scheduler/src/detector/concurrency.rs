//! `concurrency-detector`: measures saturation by the load in flight. The in-flight ledger counts
//! this load, so it is never stale or unknown.

use crate::candidates::Candidates;
use crate::detector::{HEADROOM, IN_FLIGHT_PRODUCER, relaxed};
use crate::endpoint::EndpointIndex;
use crate::filter::keep;
use crate::metrics::SEQUENCES_MAX_ATTRIBUTE;
use crate::plugin::{
    Context, Detector, Filter, InvalidParameter, Parameter, Parameters, RequiredState, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "concurrency-detector",
    kind: PluginKind::Detector,
    doc: readable(
        "Saturation = load in flight at all endpoints / their capacity: requests / maxConcurrency, \
        prompt tokens / maxTokenConcurrency, or (hybrid) the greater of both. As a filter it drops \
        endpoints at or above the limit times 1 + headroom, unless all endpoints are. max_num_seqs \
        in an endpoint's metadata lowers its limit of requests.",
    ),
    source: readable("llm-d-router, saturationdetector/concurrency"),
    parameters: &[
        Parameter::text("concurrencyMode", "requests", "requests, tokens or hybrid"),
        Parameter::number(
            "maxConcurrency",
            100.0,
            "requests that one endpoint can take, integer from 1",
        ),
        Parameter::number(
            "maxTokenConcurrency",
            1_000_000.0,
            "prompt tokens in flight that one endpoint can take, integer from 1",
        ),
        HEADROOM,
        IN_FLIGHT_PRODUCER,
    ],
    needs: &[RequiredState::InFlight],
    build,
};

#[derive(Debug)]
struct ConcurrencyDetector {
    /// The maximum number of requests at an endpoint; `None` means no limit.
    requests_max: Option<f64>,
    /// The maximum number of tokens at an endpoint; `None` means no limit.
    tokens_max: Option<f64>,
    /// The saturation below which the detector keeps endpoints when it is used as a filter.
    kept_below: f64,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    parameters.text(IN_FLIGHT_PRODUCER.name)?;
    let modes = [
        ("requests", (true, false)),
        ("tokens", (false, true)),
        ("hybrid", (true, true)),
    ];
    let (requests, tokens) = parameters.choice("concurrencyMode", &modes)?;
    let requests_max = f64::from(parameters.integer("maxConcurrency", 1..=u32::MAX)?);
    let tokens_max = f64::from(parameters.integer("maxTokenConcurrency", 1..=u32::MAX)?);
    Ok(Plugin::Detector(Box::new(ConcurrencyDetector {
        requests_max: requests.then_some(requests_max),
        tokens_max: tokens.then_some(tokens_max),
        kept_below: f64::from(relaxed(parameters)?),
    })))
}

impl ConcurrencyDetector {
    /// Returns the load of these endpoints together, as a share of their capacity.
    // The casts are exact, because loads stay far below 2^52.
    fn share(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64 {
        let mut requests = (0_u64, 0.0);
        let mut tokens = (0_u64, 0.0);
        for &endpoint in endpoints {
            let load = context.load(endpoint);
            requests = (
                requests.0.saturating_add(u64::from(load.requests)),
                requests.1 + self.requests_max_of(context, endpoint),
            );
            tokens = (
                tokens.0.saturating_add(load.prefill_tokens),
                tokens.1 + self.tokens_max.unwrap_or(0.0),
            );
        }
        let of = |(load, max): (u64, f64)| if max > 0.0 { load as f64 / max } else { 0.0 };
        of(requests).max(of(tokens))
    }

    /// Returns the configured limit, or the limit that the engine reports if that limit is lower.
    fn requests_max_of(&self, context: &Context<'_>, endpoint: EndpointIndex) -> f64 {
        let own = context
            .table
            .metrics_of(endpoint)
            .and_then(|metrics| metrics.attribute(SEQUENCES_MAX_ATTRIBUTE));
        self.requests_max.map_or(0.0, |max| {
            own.map_or(max, |own| max.min(f64::from(own).max(1.0)))
        })
    }
}

impl Detector for ConcurrencyDetector {
    fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64 {
        self.share(context, endpoints)
    }

    fn requests_max(&self) -> Option<f64> {
        self.requests_max
    }
}

impl Filter for ConcurrencyDetector {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        keep(candidates, true, |index| {
            self.share(context, &[index]) < self.kept_below
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Endpoint, ROLE_LABEL};
    use crate::flow::{FLOW_CONTROL, RoomLimits};
    use crate::in_flight::InFlight;
    use crate::metrics::EndpointMetrics;
    use crate::plugin::ParameterValue;
    use crate::snapshot::{Snapshot, Version};
    use crate::{LocalState, Pipeline, PipelineSpec, PluginSpec, is_full};

    /// Returns a snapshot with an endpoint for each role. Each endpoint may have two requests.
    fn snapshot(roles: &[&str]) -> Snapshot {
        let parameters = vec![("maxConcurrency".to_owned(), ParameterValue::Number(2.0))];
        let detector = PluginSpec {
            parameters,
            ..PluginSpec::of_type(PLUGIN.name)
        };
        let mut spec = PipelineSpec {
            saturation_detector: PLUGIN.name.to_owned(),
            ..PipelineSpec::default()
        };
        spec.plugins
            .extend([detector, PluginSpec::of_type(FLOW_CONTROL)]);
        let endpoints: Vec<Endpoint> = (0..)
            .zip(roles)
            .map(|(slot, role)| Endpoint::ready(slot, &[(ROLE_LABEL, role)]))
            .collect();
        let metrics = vec![EndpointMetrics::default(); endpoints.len()];
        Snapshot::try_new(
            Version::default(),
            endpoints,
            metrics,
            Pipeline::build(&spec).unwrap(),
        )
        .unwrap()
    }

    /// Whether a pool of these roles is full with two requests at its last endpoint.
    fn is_full_with_two_at_the_last(roles: &[&str]) -> bool {
        let snapshot = snapshot(roles);
        let mut ledger = InFlight::default();
        let last = snapshot.endpoints().last().unwrap().id;
        let running = [(); 2].map(|()| ledger.admit(last, 0));
        let index = snapshot.indices().next().unwrap();
        let is_full = is_full(&snapshot, LocalState::new(&ledger), index, RoomLimits::ALL);
        running
            .into_iter()
            .for_each(|ticket| ledger.release(ticket));
        is_full
    }

    #[test]
    fn a_pool_is_as_full_as_its_fuller_stage() {
        assert!(
            !is_full_with_two_at_the_last(&["both", "both"]),
            "one of two is idle"
        );
        for roles in [["prefill", "decode"], ["decode", "prefill"]] {
            assert!(is_full_with_two_at_the_last(&roles), "{roles:?}");
        }
    }
}
