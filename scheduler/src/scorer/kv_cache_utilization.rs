//! `kv-cache-utilization-scorer`: the emptier the KV cache, the better.

use crate::endpoint::EndpointIndex;
use crate::plugin::{Context, InvalidParameter, Parameters, Scorer, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::scorer::rate;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "kv-cache-utilization-scorer",
    kind: Kind::Scorer,
    doc: for_people("1 - u, u = share of KV-cache blocks in use."),
    source: for_people("llm-d-router, scorer/kvcacheutilization"),
    parameters: &[],
    needs: &[State::KvCacheUtilization],
    build,
};

#[derive(Debug)]
struct KvCacheUtilization;

fn build(_: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(KvCacheUtilization)))
}

impl Scorer for KvCacheUtilization {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        rate(endpoints, scores, |endpoint| context.metric(endpoint, |m| m.kv_cache_utilization).map(|u| (1.0 - u).max(0.0)));
    }
}
