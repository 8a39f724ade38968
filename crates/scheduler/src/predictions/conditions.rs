//! Reads the conditions of a pick from the scheduler's inputs, for both prediction and learning.

use crate::endpoint::EndpointIndex;
use crate::endpoint_table::EndpointTable;
use crate::latency::Conditions;
use crate::local_state::LocalState;
use crate::metrics::EndpointMetrics;
use crate::request::Request;

// === impl Conditions ===

impl Conditions {
    /// Returns the present conditions of `request` and of the endpoint at `index`, without the load
    /// of the request itself. Returns the default conditions for a position outside the table.
    /// Scraped numbers that are too old count as unknown.
    #[must_use]
    pub fn at_pick(
        table: &EndpointTable,
        local: &LocalState<'_>,
        request: &Request<'_>,
        index: EndpointIndex,
    ) -> Self {
        let (Some(endpoint), Some(said)) = (table.endpoint(index), table.metrics_of(index)) else {
            return Self::default();
        };
        let unknown = EndpointMetrics::default();
        let metrics = if local.metrics_stale { &unknown } else { said };
        let load = local.in_flight.load(endpoint.id);
        let cached = local
            .matched_blocks(index)
            .saturating_mul(request.prefix_block_tokens)
            .min(request.prompt_tokens);
        Self {
            queued: metrics.queue_depth,
            running: metrics.running_requests,
            requests: local.in_flight.requests_now(endpoint.id, metrics),
            prefill_tokens: count(load.prefills.uncached_tokens),
            context_tokens: count(load.decode_tokens),
            kv_utilization: metrics.kv_cache_utilization,
            prompt_tokens: count(request.prompt_tokens.into()),
            uncached_tokens: count(request.prompt_tokens.saturating_sub(cached).into()),
        }
    }
}

/// Limits a count to the largest valid condition.
// The cast is exact up to 2^24.
fn count(tokens: u64) -> f32 {
    const MAX: u64 = 1 << f32::MANTISSA_DIGITS;
    tokens.min(MAX) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Endpoint;
    use crate::in_flight::InFlight;
    use crate::snapshot::{Snapshot, Version};
    use crate::{Pipeline, PipelineSpec, ProfileSpec};

    fn snapshot(metrics: EndpointMetrics) -> Snapshot {
        let profiles = vec![ProfileSpec {
            name: "default".to_owned(),
            plugins: Vec::new(),
        }];
        let spec = PipelineSpec {
            profiles,
            ranked_max: 1,
            ..PipelineSpec::default()
        };
        Snapshot::try_new(
            Version::default(),
            vec![Endpoint::ready(3, &[])],
            vec![metrics],
            Pipeline::build(&spec).unwrap(),
        )
        .unwrap()
    }

    #[test]
    fn scrape_ledger_and_prompt_are_combined_and_stale_metrics_are_unknown() {
        let metrics = EndpointMetrics {
            queue_depth: Some(2.0),
            running_requests: Some(5.0),
            kv_cache_utilization: Some(0.25),
            ..EndpointMetrics::default()
        };
        let snapshot = snapshot(metrics);
        let at = snapshot.endpoints()[0].id;
        let mut ledger = InFlight::default();
        ledger.scraped(&[at], snapshot.metrics());
        let mut decoding = ledger.admit_prompt(at, 100, 100);
        ledger.first_token(&mut decoding, 100);
        let waiting = ledger.admit_prompt(at, 1_000, 400);
        let matched = [3];
        let local = LocalState {
            matched_blocks: &matched,
            ..LocalState::new(&ledger)
        };
        let request = Request {
            prompt_tokens: 200,
            prefix_block_tokens: 64,
            ..Request::default()
        };
        let index = snapshot.indices().next().unwrap();
        let fresh = Conditions {
            queued: Some(2.0),
            running: Some(5.0),
            requests: 9.0,
            prefill_tokens: 400.0,
            context_tokens: 100.0,
            kv_utilization: Some(0.25),
            prompt_tokens: 200.0,
            uncached_tokens: 8.0,
        };
        assert_eq!(
            Conditions::at_pick(&snapshot, &local, &request, index),
            fresh
        );
        let stale = Conditions {
            queued: None,
            running: None,
            requests: 2.0,
            kv_utilization: None,
            ..fresh
        };
        assert_eq!(
            Conditions::at_pick(
                &snapshot,
                &LocalState {
                    metrics_stale: true,
                    ..local
                },
                &request,
                index
            ),
            stale
        );
        ledger.release(decoding);
        ledger.release(waiting);
    }
}
