//! `backlog-detector`: an endpoint is full for a request if the request would have to wait at the
//! endpoint. The detector decides this from the in-flight ledger and the learned step times, and
//! corrects both by the engine's reports. So no limit has to be found by load tests.

use crate::candidates::Candidates;
use crate::decision::Route;
use crate::endpoint::EndpointIndex;
use crate::filter::keep;
use crate::flow::RoomLimits;
use crate::in_flight::EndpointLoad;
use crate::metrics::{self, SEQUENCES_MAX_ATTRIBUTE};
use crate::plugin::{
    Context, Detector, Filter, InvalidParameter, Parameter, Parameters, RequiredState, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "backlog-detector",
    kind: PluginKind::Detector,
    doc: readable(
        "The default with flow control. A request waits until its endpoint has room: the prompts \
        before it take at most maxBacklogMs (for the highest band criticalMaxBacklogMs), a \
        sequence is free (max_num_seqs), and its tokens fit into kvCacheShare of the KV cache. \
        Lower bands leave sequenceReserve of the sequences and `reserve` of the cache free. An \
        unknown value never makes an endpoint full, and an endpoint without requests has room. \
        Saturation = mean over the endpoints of the greatest used share.",
    ),
    source: readable("Switchpoint"),
    parameters: &[
        Parameter::number(
            "maxBacklogMs",
            50.0,
            "prefill backlog at which an endpoint is full for lower bands, ms, 0 or more",
        ),
        Parameter::number(
            "criticalMaxBacklogMs",
            250.0,
            "prefill backlog at which an endpoint is full for the highest band, ms, 0 or more",
        ),
        Parameter::number(
            "reserve",
            0.1,
            "share of the KV cache that lower bands leave free, 0 to 0.9",
        ),
        Parameter::number(
            "sequenceReserve",
            SEQUENCE_RESERVE,
            "share of sequences that lower bands leave free, 0 to 0.9",
        ),
        Parameter::number(
            "kvCacheShare",
            0.95,
            "share of the KV cache that requests may fill, above 0 to 1",
        ),
    ],
    needs: &[
        RequiredState::InFlight,
        RequiredState::StepModel,
        RequiredState::PrefixIndex,
        RequiredState::Metric(&metrics::KV_CACHE_UTILIZATION),
        RequiredState::Metric(&metrics::KV_BLOCKS),
    ],
    build,
};

/// The default share of an endpoint's sequences that lower priority bands leave free. A burst in
/// lower bands takes sequences while the tokens of the highest band are still fast, and keeps these
/// sequences until the outputs of the burst end. The burst makes tokens slower, and with slower
/// tokens the highest band needs up to twice as many sequences. In the simulation (`simulator
/// flow`) with long outputs at twice the capacity, the p99 of the chat requests' time to first
/// token is 3 s if the share is a tenth, and 125 ms if it is a quarter. The quarter costs 2 % of
/// the tokens.
const SEQUENCE_RESERVE: f64 = 0.25;

#[derive(Debug)]
struct BacklogDetector {
    max_backlog_ms: f64,
    critical_max_backlog_ms: f64,
    reserve: f64,
    sequence_reserve: f64,
    kv_cache_share: f64,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Detector(Box::new(BacklogDetector {
        max_backlog_ms: parameters.number("maxBacklogMs", 0.0..=1e6)?,
        critical_max_backlog_ms: parameters.number("criticalMaxBacklogMs", 0.0..=1e6)?,
        reserve: parameters.number("reserve", 0.0..=0.9)?,
        sequence_reserve: parameters.number("sequenceReserve", 0.0..=0.9)?,
        kv_cache_share: parameters.number("kvCacheShare", f64::MIN_POSITIVE..=1.0)?,
    })))
}

/// Converts a count of tokens or requests, which stay far below 2^52.
fn wide(count: u64) -> f64 {
    count as f64
}

impl BacklogDetector {
    /// Returns the time to compute the prompts that wait at the endpoint or are being computed
    /// there, in ms.
    fn backlog_ms(context: &Context<'_>, endpoint: EndpointIndex, load: &EndpointLoad) -> f64 {
        let speed = context
            .table
            .id(endpoint)
            .map_or(1.0, |id| context.table.step.speed(id).0);
        f64::from(context.table.step.backlog_ms(&load.prefills) * speed)
    }

    /// Returns the share of the endpoint's sequences that `requests` use; `None` if the number of
    /// sequences is unknown.
    fn sequences(context: &Context<'_>, endpoint: EndpointIndex, requests: u32) -> Option<f64> {
        let max = context
            .table
            .metrics_of(endpoint)?
            .attribute(SEQUENCES_MAX_ATTRIBUTE)
            .filter(|max| *max >= 1.0)?;
        Some(f64::from(requests) / f64::from(max))
    }

    /// Returns the share of the endpoint's KV cache that is in use after a further prompt of `more`
    /// tokens, if the endpoint has not cached `uncached` of these tokens. Returns `None` if the
    /// size of the cache is unknown. Both the ledger's number and the engine's number can be too
    /// high: the ledger counts a shared prefix once for each request, and the engine's report is
    /// late. So the lower number is used.
    fn kv_cache(
        context: &Context<'_>,
        endpoint: EndpointIndex,
        load: &EndpointLoad,
        more: u32,
        uncached: u32,
    ) -> Option<f64> {
        let metrics = context.table.metrics_of(endpoint)?;
        let capacity = f64::from(metrics.kv_blocks?) * f64::from(metrics.kv_block_tokens?);
        if capacity <= 0.0 {
            return None;
        }
        let ledger = wide(load.decode_tokens) + wide(load.prefills.prompt_tokens) + f64::from(more);
        let reported = context.metric(endpoint, |m| m.kv_cache_utilization);
        let reported = reported.map(|used| {
            f64::from(used) * capacity + wide(load.prefills.uncached_tokens) + f64::from(uncached)
        });
        Some(reported.map_or(ledger, |reported| reported.min(ledger)) / capacity)
    }

    /// Whether the endpoint would begin with the prompt of the request soon.
    fn computes_soon(
        &self,
        context: &Context<'_>,
        endpoint: EndpointIndex,
        limits: RoomLimits,
    ) -> bool {
        let load = context.load(endpoint);
        let max_ms = if limits.critical {
            self.critical_max_backlog_ms
        } else {
            self.max_backlog_ms
        };
        load.prefills.prompts == 0
            || Self::backlog_ms(context, endpoint, &load) <= max_ms * limits.share
    }

    /// Whether the endpoint has a free sequence and KV cache for the request.
    fn holds(&self, context: &Context<'_>, endpoint: EndpointIndex, limits: RoomLimits) -> bool {
        let load = context.load(endpoint);
        if load.requests == 0 {
            return true;
        }
        let ceiling = limits
            .ceiling
            .at(|| self.used(context, endpoint) / limits.share);
        let without = |reserve: f64| {
            ceiling.min(if limits.critical { 1.0 } else { 1.0 - reserve }) * limits.share
        };
        let prompt = context.request.prompt_tokens;
        let metrics = context.table.metrics_of(endpoint);
        let prompt = metrics.map_or(prompt, |metrics| metrics.work_tokens(prompt));
        let uncached = context.uncached_tokens(endpoint).min(prompt);
        Self::sequences(context, endpoint, load.requests)
            .is_none_or(|used| used < without(self.sequence_reserve))
            && Self::kv_cache(context, endpoint, &load, prompt, uncached)
                .is_none_or(|used| used <= without(self.reserve) * self.kv_cache_share)
    }

    /// Returns the greatest used share: of backlog, sequences or KV cache.
    fn used(&self, context: &Context<'_>, endpoint: EndpointIndex) -> f64 {
        let load = context.load(endpoint);
        let backlog =
            Self::backlog_ms(context, endpoint, &load) / self.critical_max_backlog_ms.max(1.0);
        let sequences = Self::sequences(context, endpoint, load.requests).unwrap_or(0.0);
        let kv_cache =
            Self::kv_cache(context, endpoint, &load, 0, 0).unwrap_or(0.0) / self.kv_cache_share;
        backlog.max(sequences).max(kv_cache)
    }
}

impl Detector for BacklogDetector {
    fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64 {
        let sum: f64 = endpoints
            .iter()
            .map(|&endpoint| self.used(context, endpoint))
            .sum();
        if endpoints.is_empty() {
            0.0
        } else {
            sum / wide(endpoints.len() as u64)
        }
    }

    fn has_room(&self, context: &Context<'_>, route: &Route, limits: RoomLimits) -> bool {
        let serving = route.data_parallel.unwrap_or(route.ranked.first());
        self.computes_soon(context, route.prefill.unwrap_or(serving), limits)
            && self.holds(context, serving, limits)
    }

    fn is_per_endpoint(&self) -> bool {
        true
    }
}

impl Filter for BacklogDetector {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        keep(candidates, true, |index| {
            self.computes_soon(context, index, RoomLimits::ALL)
                && self.holds(context, index, RoomLimits::ALL)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Endpoint;
    use crate::flow::FLOW_CONTROL;
    use crate::in_flight::{InFlight, InFlightTicket};
    use crate::metrics::EndpointMetrics;
    use crate::snapshot::{Snapshot, Version};
    use crate::{
        LocalState, Pipeline, PipelineSpec, PluginSpec, RankedList, Request, Route, has_room,
        is_full,
    };

    /// Returns an endpoint with 20 sequences and a KV cache of 1,600 tokens.
    fn snapshot() -> Snapshot {
        let metrics = EndpointMetrics {
            attributes: Box::new([(SEQUENCES_MAX_ATTRIBUTE.into(), 20.0)]),
            kv_blocks: Some(100),
            kv_block_tokens: Some(16),
            ..EndpointMetrics::default()
        };
        let mut spec = PipelineSpec::default();
        spec.plugins.push(PluginSpec::of_type(FLOW_CONTROL));
        Snapshot::try_new(
            Version::default(),
            vec![Endpoint::ready(0, &[])],
            vec![metrics],
            Pipeline::build(&spec).unwrap(),
        )
        .unwrap()
    }

    /// Counts how many requests with prompts of this many tokens the endpoint admits. Each request
    /// has its first token when the next request arrives.
    fn admitted(tokens: u32, critical: bool, share: f64) -> usize {
        let snapshot = snapshot();
        let mut ledger = InFlight::default();
        let at = snapshot.endpoints()[0].id;
        let index = snapshot.indices().next().unwrap();
        let limits = RoomLimits {
            critical,
            share,
            ..RoomLimits::ALL
        };
        let mut running: Vec<InFlightTicket> = Vec::new();
        while running.len() < 99 && !is_full(&snapshot, LocalState::new(&ledger), index, limits) {
            let mut ticket = ledger.admit_prompt(at, tokens, tokens);
            ledger.first_token(&mut ticket, tokens);
            running.push(ticket);
        }
        let admitted = running.len();
        running
            .into_iter()
            .for_each(|ticket| ledger.release(ticket));
        admitted
    }

    #[test]
    fn lower_bands_leave_a_quarter_of_sequences_and_a_tenth_of_the_cache() {
        assert_eq!(
            [true, false].map(|critical| admitted(10, critical, 1.0)),
            [20, 15]
        );
        // The limits are 95 % of 1,600 tokens for a critical request, and nine tenths of that
        // number for another request.
        assert_eq!(
            [true, false].map(|critical| admitted(100, critical, 1.0)),
            [16, 14]
        );
    }

    #[test]
    fn a_prompt_that_is_longer_than_the_cache_waits_for_no_room() {
        let snapshot = snapshot();
        let index = snapshot.indices().next().unwrap();
        let at = snapshot.endpoints()[0].id;
        let mut ledger = InFlight::default();
        let mut running = ledger.admit_prompt(at, 100, 100);
        ledger.first_token(&mut running, 100);
        let route = Route::to(RankedList::new([index]).unwrap());
        let fits = |prompt_tokens| {
            let request = Request {
                prompt_tokens,
                ..Request::default()
            };
            let local = LocalState::new(&ledger);
            has_room(&snapshot, &request, local, &route, RoomLimits::ALL)
        };
        assert_eq!(
            [1_000, 6_400, 6_401].map(fits),
            [true, false, true],
            "the last is refused by the engine, and needs no memory"
        );
        ledger.release(running);
    }

    #[test]
    fn a_proxy_alone_fills_its_share_and_its_lower_bands_leave_the_reserve_of_that() {
        assert_eq!(
            [true, false].map(|critical| admitted(10, critical, 0.5)),
            [10, 8]
        );
        assert_eq!(
            [true, false].map(|critical| admitted(100, critical, 0.5)),
            [8, 7]
        );
    }
}
