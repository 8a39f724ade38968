//! Engines with measured step times: fits to kernel tables of AIConfigurator (vLLM 0.19, bf16, one
//! GPU), with an overhead of 1 ms for each step and 7 ms for each request as measured on real
//! servers.

use crate::engine::{BLOCK_TOKENS, SimulatedEngineSpec, StepTimeModel};

/// Llama 3.1 8B on one H100 SXM.
pub(crate) const LLAMA_8B_H100: SimulatedEngineSpec = SimulatedEngineSpec {
    times: StepTimeModel { decode: [6.07, 0.00745, 4.31e-5], prefill: [2.6, 0.0168, 5.46e-7], overhead: 1.0, slowdown: 1.0 },
    kv_blocks: 26_313 * 16 / BLOCK_TOKENS,
    budget: 8192,
    sequences_max: 256,
    api_ms: 7.0,
    adapter_places: 0,
    adapter_load_ms: 0.0,
};

/// Qwen3 32B on one H200 SXM.
pub(crate) const QWEN_32B_H200: SimulatedEngineSpec = SimulatedEngineSpec {
    times: StepTimeModel { decode: [18.17, 0.0248, 5.81e-5], prefill: [3.5, 0.0807, 4.22e-7], overhead: 1.0, slowdown: 1.0 },
    kv_blocks: 15_423 * 16 / BLOCK_TOKENS,
    ..LLAMA_8B_H100
};
