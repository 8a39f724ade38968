//! The table of plugins: look-up, validation and the printed reference use this table, so each
//! default appears once.
//!
//! Only this module knows all plugins. A new plugin needs a file, a `mod` line, and a row in
//! [`PLUGINS`]. The formula of a scorer or filter must also be in `tests/it/oracle.rs`, the second
//! implementation that tests compare with.

mod reference;

pub use crate::plugin_type::{ClientHeaders, Plugin, PluginKind, PluginType};
pub use reference::reference_markdown;

use crate::{admitter, decider, detector, filter, flow, handler, parser, picker, producer, scorer};

/// Every plugin, in the order of the printed reference. The structural filters are not in this
/// table, because no configuration may leave them out.
pub static PLUGINS: &[PluginType] = &[
    scorer::queue::PLUGIN,
    scorer::kv_cache_utilization::PLUGIN,
    scorer::running_requests_size::PLUGIN,
    scorer::active_request::PLUGIN,
    scorer::token_load::PLUGIN,
    scorer::prefix_cache::PLUGIN,
    scorer::marginal_cost::PLUGIN,
    scorer::lora_affinity::PLUGIN,
    scorer::load_aware::PLUGIN,
    scorer::no_hit_lru::PLUGIN,
    scorer::context_length_aware::PLUGIN,
    scorer::session_affinity::PLUGIN,
    scorer::header_label_affinity::PLUGIN,
    scorer::latency::LATENCY,
    scorer::latency::SLO,
    scorer::endpoint_attribute::PLUGIN,
    filter::label_selector::PLUGIN,
    filter::label_selector::BY_LABEL_SELECTOR,
    filter::by_label::PLUGIN,
    filter::role::DECODE,
    filter::role::PREFILL,
    filter::role::ENCODE,
    filter::prefix_cache_affinity::PLUGIN,
    filter::slo_headroom_tier::PLUGIN,
    filter::utilization::PLUGIN,
    filter::endpoint_attribute::PLUGIN,
    filter::session_affinity::PLUGIN,
    picker::max_score::PLUGIN,
    picker::weighted_random::PLUGIN,
    picker::random::PLUGIN,
    handler::single::PLUGIN,
    handler::header::PLUGIN,
    handler::disagg::PLUGIN,
    handler::data_parallel::PLUGIN,
    handler::slo_aware::PLUGIN,
    decider::prefix_based::PLUGIN,
    decider::always::PREFILL,
    decider::always::MULTIMODAL,
    detector::backlog::PLUGIN,
    detector::utilization::PLUGIN,
    detector::concurrency::PLUGIN,
    admitter::probabilistic::PLUGIN,
    admitter::latency_slo::PLUGIN,
    flow::fairness::TOKENS,
    flow::fairness::STRICT,
    flow::fairness::ROUND_ROBIN,
    flow::fairness::LEAST_SERVICE,
    flow::fairness::LEAST_SERVICE_POLICY,
    flow::ordering::FCFS,
    flow::ordering::EDF,
    flow::ordering::SLO_DEADLINE,
    flow::usage_limit::STATIC,
    flow::usage_limit::HOLDBACK,
    flow::usage_limit::REFLECTIVE,
    flow::PLUGIN,
    producer::approx_prefix_cache::PLUGIN,
    producer::inflight_load::PLUGIN,
    producer::token::PLUGIN,
    producer::predicted_latency::PLUGIN,
    producer::predicted_latency::TRACKER,
    producer::agent_identity::PLUGIN,
    parser::OPENAI,
    parser::ANTHROPIC,
    parser::VLLM_HTTP,
    parser::VLLM_GRPC,
    parser::SGLANG_HTTP,
    parser::VERTEX_AI,
    parser::PASSTHROUGH,
];

#[must_use]
pub fn lookup(plugin_type: &str) -> Option<&'static PluginType> {
    PLUGINS.iter().find(|plugin| plugin.name == plugin_type)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::{InvalidParameter, ParameterDefault, ParameterValue};

    /// Returns the phase in which a plugin works.
    fn kind(plugin: &Plugin) -> PluginKind {
        match plugin {
            Plugin::Filter(_) => PluginKind::Filter,
            Plugin::Scorer(_) | Plugin::FilteringScorer(..) | Plugin::SheddingScorer(..) => {
                PluginKind::Scorer
            }
            Plugin::Picker(_) => PluginKind::Picker,
            Plugin::ProfileHandler(_) => PluginKind::ProfileHandler,
            Plugin::Decider(_) => PluginKind::Decider,
            Plugin::Detector(_) => PluginKind::Detector,
            Plugin::Admitter(_) => PluginKind::Admitter,
            Plugin::Fairness(_) => PluginKind::Fairness,
            Plugin::Ordering(_) => PluginKind::Ordering,
            Plugin::UsageLimit(_) => PluginKind::UsageLimit,
            Plugin::FlowControl(_) => PluginKind::FlowControl,
            Plugin::Producer(_) => PluginKind::Producer,
            Plugin::Parser(_) => PluginKind::Parser,
            Plugin::WithHeaders(_, plugin) => kind(plugin),
        }
    }

    #[test]
    fn every_name_is_there_once_and_found() {
        for plugin in PLUGINS {
            assert_eq!(
                PLUGINS
                    .iter()
                    .filter(|other| other.name == plugin.name)
                    .count(),
                1,
                "{}",
                plugin.name
            );
            assert_eq!(
                lookup(plugin.name).map(|found| found.name),
                Some(plugin.name)
            );
        }
        assert!(lookup("queue-scorer ").is_none());
    }

    #[test]
    fn every_plugin_accepts_its_own_defaults_and_is_of_its_kind() {
        for plugin in PLUGINS {
            match plugin.build(&[]) {
                Ok(built) => assert_eq!(kind(&built), plugin.kind, "{}", plugin.name),
                Err(error) => assert!(
                    matches!(error, InvalidParameter::Missing(_)),
                    "{}: {error}",
                    plugin.name
                ),
            }
        }
    }

    #[test]
    fn every_parameter_refuses_numbers_out_of_range() {
        for (plugin, parameter) in PLUGINS
            .iter()
            .flat_map(|p| p.parameters.iter().map(move |parameter| (p, parameter)))
        {
            if !matches!(parameter.default, ParameterDefault::Number(_)) {
                continue;
            }
            for bad in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
                let error = plugin
                    .build(&[(parameter.name.to_owned(), ParameterValue::Number(bad))])
                    .unwrap_err();
                assert_eq!(
                    error,
                    InvalidParameter::OutOfRange {
                        name: parameter.name.to_owned(),
                        allowed: parameter.doc
                    }
                );
            }
        }
    }
}
