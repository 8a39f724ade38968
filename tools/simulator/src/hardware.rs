//! The engines of the simulations, with measured step times.

use engine_sim::EngineProfile;

use crate::engine::{BLOCK_TOKENS, SimulatedEngineSpec};

/// An engine with Llama 3.1 8B on one H100 SXM.
pub(crate) const LLAMA_8B_H100: SimulatedEngineSpec = EngineProfile::Llama8bH100.spec(BLOCK_TOKENS);

/// An engine with Qwen3 32B on one H200 SXM.
pub(crate) const QWEN_32B_H200: SimulatedEngineSpec = EngineProfile::Qwen32bH200.spec(BLOCK_TOKENS);
