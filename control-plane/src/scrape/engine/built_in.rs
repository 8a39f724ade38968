//! The engines that the daemon knows.

use scheduler::metrics::{
    KV_BLOCK_TOKENS, KV_BLOCKS, KV_CACHE_UTILIZATION, MetricDefinition, QUEUE_DEPTH,
    RUNNING_REQUESTS,
};

use super::{EngineSpec, EngineSpecBuilder, InvalidEngine, MetricMeaning, PROCESS_START};

/// The place of a number on an engine's page.
pub(super) enum BuiltInSource {
    /// The value of a series.
    Value(&'static str),
    /// The value of a label: the name of the series, then the name of the label.
    Label(&'static str, &'static str),
}
use BuiltInSource::{Label, Value};

pub(super) struct BuiltInEngine {
    pub(super) name: &'static str,
    pub(super) metrics_path: &'static str,
    pub(super) metrics_port: Option<u16>,
    /// Series with equal values of these labels belong to the same scheduler, because each
    /// tensor-parallel rank reports its scheduler. Of such series only the largest value is used.
    /// If the list is empty, each series belongs to a scheduler of its own.
    pub(super) shard_labels: &'static [&'static str],
    /// The label that marks a part: a series where this label is not empty is a part of the series
    /// where this label is empty, so the part is not counted again.
    pub(super) part_label: Option<&'static str>,
    /// The sources of each number, in order of preference. Numbers that are not listed are unknown
    /// for the engine.
    pub(super) numbers: &'static [(&'static MetricDefinition, &'static [BuiltInSource])],
    pub(super) lora: &'static [&'static str],
    pub(super) counters: &'static [&'static str],
    /// The counters of prompt tokens, and of the prompt tokens that came from the prefix cache.
    pub(super) prompt_tokens: Option<[&'static str; 2]>,
}

/// An engine with the usual location of metrics, but without metrics.
pub(super) const PLAIN: BuiltInEngine = BuiltInEngine {
    name: "",
    metrics_path: "/metrics",
    metrics_port: None,
    shard_labels: &[],
    part_label: None,
    numbers: &[],
    lora: &[],
    counters: &[],
    prompt_tokens: None,
};

/// The built-in engines. The names were verified in the engines' sources: vLLM v1
/// `vllm/v1/metrics/loggers.py` (data-parallel ranks as label `engine`) and v0 `engine/metrics.py`;
/// SGLang `observability/metrics_collector.py` (`priority=""` is the total, ranks in labels);
/// TensorRT-LLM `metrics/collector.py`, mounted by `serve/openai_server.py` at
/// `/prometheus/metrics` (`/metrics` is JSON there); Triton's documentation. All engines report
/// KV-cache utilization from 0 to 1, also vLLM in its metric `_perc`.
pub(super) const TABLE: &[BuiltInEngine] = &[
    BuiltInEngine {
        name: "vllm",
        numbers: &[
            (&QUEUE_DEPTH, &[Value("vllm:num_requests_waiting")]),
            (&RUNNING_REQUESTS, &[Value("vllm:num_requests_running")]),
            (
                &KV_CACHE_UTILIZATION,
                &[
                    Value("vllm:kv_cache_usage_perc"),
                    Value("vllm:gpu_cache_usage_perc"),
                ],
            ), // renamed in 0.9
            (
                &KV_BLOCK_TOKENS,
                &[Label("vllm:cache_config_info", "block_size")],
            ),
            (
                &KV_BLOCKS,
                &[Label("vllm:cache_config_info", "num_gpu_blocks")],
            ),
        ],
        lora: &["vllm:lora_requests_info"],
        counters: &["vllm:generation_tokens_total", "vllm:prompt_tokens_total"],
        prompt_tokens: Some(["vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"]),
        ..PLAIN
    },
    BuiltInEngine {
        name: "sglang",
        shard_labels: &["dp_rank", "dp"],
        part_label: Some("priority"),
        numbers: &[
            (&QUEUE_DEPTH, &[Value("sglang:num_queue_reqs")]),
            (&RUNNING_REQUESTS, &[Value("sglang:num_running_reqs")]),
            (&KV_CACHE_UTILIZATION, &[Value("sglang:token_usage")]),
            (
                &KV_BLOCK_TOKENS,
                &[
                    Value("sglang:page_size"),
                    Label("sglang:cache_config_info", "page_size"),
                ],
            ), // a gauge since 0.5.11
            (
                &KV_BLOCKS,
                &[
                    Value("sglang:num_pages"),
                    Label("sglang:cache_config_info", "num_pages"),
                ],
            ),
        ],
        counters: &[
            "sglang:generation_tokens_total",
            "sglang:prompt_tokens_total",
        ],
        prompt_tokens: Some(["sglang:prompt_tokens_total", "sglang:cached_tokens_total"]),
        ..PLAIN
    },
    BuiltInEngine {
        name: "trtllm-serve",
        metrics_path: "/prometheus/metrics",
        numbers: &[
            (&QUEUE_DEPTH, &[Value("trtllm_num_requests_waiting")]),
            (&RUNNING_REQUESTS, &[Value("trtllm_num_requests_running")]),
            (
                &KV_CACHE_UTILIZATION,
                &[Value("trtllm_kv_cache_utilization")],
            ),
            (
                &KV_BLOCK_TOKENS,
                &[Value("trtllm_kv_cache_tokens_per_block")],
            ),
            (&KV_BLOCKS, &[Value("trtllm_kv_cache_max_blocks")]),
        ],
        counters: &[
            "trtllm_generation_tokens_total",
            "trtllm_num_requests_completed_total",
        ],
        ..PLAIN
    },
    BuiltInEngine {
        name: "triton-tensorrt-llm",
        metrics_port: Some(8002),
        numbers: &[
            (
                &QUEUE_DEPTH,
                &[Value("nv_trt_llm_request_metrics{request_type=waiting}")],
            ),
            (
                &RUNNING_REQUESTS,
                &[Value("nv_trt_llm_request_metrics{request_type=scheduled}")],
            ),
            (
                &KV_CACHE_UTILIZATION,
                &[Value(
                    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
                )],
            ),
            (
                &KV_BLOCK_TOKENS,
                &[Value(
                    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
                )],
            ),
            (
                &KV_BLOCKS,
                &[Value(
                    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
                )],
            ),
        ],
        counters: &["nv_inference_request_success"],
        ..PLAIN
    },
    BuiltInEngine {
        name: "triton",
        metrics_port: Some(8002),
        numbers: &[
            (&QUEUE_DEPTH, &[Value("nv_inference_pending_request_count")]),
            // The running requests are missing because llm-d reads nv_inference_exec_count here,
            // which counts all executions since the start and only grows.
        ],
        counters: &["nv_inference_exec_count", "nv_inference_request_success"],
        ..PLAIN
    },
];

// === impl BuiltInEngine ===

impl BuiltInEngine {
    pub(super) fn spec(&self) -> Result<EngineSpec, InvalidEngine> {
        let mut builder = EngineSpecBuilder::new(self.name);
        for &(metric, sources) in self.numbers {
            for source in sources {
                let (spec, label) = match source {
                    Value(spec) => (spec, None),
                    Label(spec, label) => (spec, Some(*label)),
                };
                builder.push("built-in", MetricMeaning::Number(metric), spec, label)?;
            }
        }
        for spec in self.lora {
            builder.push("built-in", MetricMeaning::Lora, spec, None)?;
        }
        self.push_unconfigured(&mut builder)?;
        builder.build(Some(self), 1.0, Vec::new())
    }

    /// Adds the metrics that a configuration cannot change.
    pub(super) fn push_unconfigured(
        &self,
        builder: &mut EngineSpecBuilder<'_>,
    ) -> Result<(), InvalidEngine> {
        let counters = self
            .counters
            .iter()
            .map(|name| (MetricMeaning::Counter, *name));
        let tokens = self.prompt_tokens.into_iter().flat_map(|[all, cached]| {
            [
                (MetricMeaning::PromptTokens, all),
                (MetricMeaning::CachedTokens, cached),
            ]
        });
        for (meaning, name) in counters
            .chain(tokens)
            .chain([(MetricMeaning::ProcessStart, PROCESS_START)])
        {
            builder.push("built-in", meaning, name, None)?;
        }
        Ok(())
    }
}
