//! Engines as users configure them.

use scheduler::metrics::{
    KV_BLOCK_TOKENS, KV_BLOCKS, KV_CACHE_UTILIZATION, QUEUE_DEPTH, RUNNING_REQUESTS,
};
use serde::Deserialize;

use super::built_in::{PLAIN, TABLE};
use super::{EngineSpec, EngineSpecBuilder, InvalidEngine, KEY_BYTES_MAX, MetricMeaning};

/// The metric names of one engine as users configure them: `engineConfigs[]` of llm-d's
/// `core-metrics-extractor`, plus a scale. A spec has the form `metric` or `metric{label=value}`;
/// an empty spec means that the engine does not report the metric.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineConfig {
    /// The engine, as in the endpoint label.
    pub name: String,
    /// The spec of the number of waiting requests.
    #[serde(default)]
    pub queued_requests_spec: String,
    #[serde(default)]
    pub running_requests_spec: String,
    /// The spec of the KV-cache utilization.
    #[serde(default)]
    pub kv_usage_spec: String,
    /// The factor that scales the KV-cache utilization to 0..1: 1 by default, 0.01 for a metric in
    /// per cent. llm-d has no such setting.
    #[serde(default)]
    pub kv_usage_scale: Option<f64>,
    /// The spec of the LoRA adapters, with the labels `running_lora_adapters`,
    /// `waiting_lora_adapters`, `max_lora`.
    #[serde(default, rename = "loraSpec")]
    pub lora_spec: String,
    /// The spec of a series whose labels are the cache configuration.
    #[serde(default)]
    pub cache_info_spec: String,
    /// The label of `cacheInfoSpec` with the tokens of a block; `block_size` by default.
    #[serde(default)]
    pub cache_block_size_label_name: String,
    /// The label of `cacheInfoSpec` with the number of blocks; `num_gpu_blocks` by default.
    #[serde(default)]
    pub cache_num_blocks_label_name: String,
    /// The spec of a series whose value is the number of tokens in a block.
    #[serde(default)]
    pub cache_block_size_spec: String,
    /// The spec of a series whose value is the number of blocks.
    #[serde(default)]
    pub cache_num_blocks_spec: String,
    /// More numbers that are sent to proxies, each under its key.
    #[serde(default)]
    pub custom_metrics: Vec<CustomMetric>,
}

/// A scalar that is sent to proxies under a key.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CustomMetric {
    pub attribute_key: String,
    pub metric_spec: String,
}

impl EngineConfig {
    /// The names of the fields in the configuration.
    pub const FIELDS: [&str; 12] = [
        "name",
        "queuedRequestsSpec",
        "runningRequestsSpec",
        "kvUsageSpec",
        "kvUsageScale",
        "loraSpec",
        "cacheInfoSpec",
        "cacheBlockSizeLabelName",
        "cacheNumBlocksLabelName",
        "cacheBlockSizeSpec",
        "cacheNumBlocksSpec",
        "customMetrics",
    ];

    pub(super) fn spec(&self) -> Result<EngineSpec, InvalidEngine> {
        let name = &self.name;
        if name.is_empty() || name == "default" {
            return Err(InvalidEngine::Name(name.clone())); // llm-d reserves "default"
        }
        let scale = self.kv_usage_scale.unwrap_or(1.0);
        if !(scale.is_finite() && scale > 0.0) {
            return Err(InvalidEngine::Scale(name.clone()));
        }
        let mut builder = EngineSpecBuilder::new(name);
        let number = MetricMeaning::Number;
        for (field, meaning, spec) in [
            (
                "queuedRequestsSpec",
                number(&QUEUE_DEPTH),
                &self.queued_requests_spec,
            ),
            (
                "runningRequestsSpec",
                number(&RUNNING_REQUESTS),
                &self.running_requests_spec,
            ),
            (
                "kvUsageSpec",
                number(&KV_CACHE_UTILIZATION),
                &self.kv_usage_spec,
            ),
            ("loraSpec", MetricMeaning::Lora, &self.lora_spec),
            (
                "cacheBlockSizeSpec",
                number(&KV_BLOCK_TOKENS),
                &self.cache_block_size_spec,
            ),
            (
                "cacheNumBlocksSpec",
                number(&KV_BLOCKS),
                &self.cache_num_blocks_spec,
            ),
        ] {
            builder.push(field, meaning, spec, None)?;
        }
        for (meaning, label, default) in [
            (
                number(&KV_BLOCK_TOKENS),
                self.cache_block_size_label_name.as_str(),
                "block_size",
            ),
            (
                number(&KV_BLOCKS),
                &self.cache_num_blocks_label_name,
                "num_gpu_blocks",
            ),
        ] {
            let label = if label.is_empty() { default } else { label };
            builder.push("cacheInfoSpec", meaning, &self.cache_info_spec, Some(label))?;
        }
        let custom = self.push_custom_metrics(&mut builder)?;
        let row = TABLE.iter().find(|row| row.name == name);
        row.unwrap_or(&PLAIN).push_unconfigured(&mut builder)?;
        builder.build(row, scale, custom)
    }

    /// Adds the custom metrics, and returns their keys.
    fn push_custom_metrics(
        &self,
        builder: &mut EngineSpecBuilder<'_>,
    ) -> Result<Vec<Box<str>>, InvalidEngine> {
        let mut custom: Vec<&CustomMetric> = self.custom_metrics.iter().collect();
        custom.sort_by(|a, b| a.attribute_key.cmp(&b.attribute_key));
        let mut keys: Vec<Box<str>> = Vec::with_capacity(custom.len());
        for (index, metric) in custom.into_iter().enumerate() {
            let key = &metric.attribute_key;
            let again = keys.last().is_some_and(|last| **last == **key);
            if key.is_empty() || key.len() > KEY_BYTES_MAX || again {
                return Err(InvalidEngine::Key {
                    engine: self.name.clone(),
                    key: key.clone(),
                });
            }
            builder.push(
                "customMetrics",
                MetricMeaning::Custom(index),
                &metric.metric_spec,
                None,
            )?;
            keys.push(key.as_str().into());
        }
        Ok(keys)
    }
}

impl CustomMetric {
    /// The names of the fields in the configuration.
    pub const FIELDS: [&str; 2] = ["attributeKey", "metricSpec"];
}
