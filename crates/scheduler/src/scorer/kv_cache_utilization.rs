//! `kv-cache-utilization-scorer`: an endpoint with an emptier KV cache is better.

use crate::endpoint::EndpointIndex;
use crate::metrics::KV_CACHE_UTILIZATION;
use crate::plugin::{Context, RequiredState, Scorer, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::rate;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "kv-cache-utilization-scorer",
    kind: PluginKind::Scorer,
    doc: readable("1 - u, u = share of KV-cache blocks in use."),
    source: readable("llm-d-router, scorer/kvcacheutilization"),
    parameters: &[],
    needs: &[RequiredState::Metric(&KV_CACHE_UTILIZATION)],
    build: |_| Ok(Plugin::Scorer(Box::new(KvCacheUtilizationScorer))),
};

#[derive(Debug)]
struct KvCacheUtilizationScorer;

impl Scorer for KvCacheUtilizationScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        rate(endpoints, scores, |endpoint| {
            context
                .metric(endpoint, |m| m.kv_cache_utilization)
                .map(|u| (1.0 - u).max(0.0))
        });
    }
}
