//! Engine profiles: measured step times and KV memory of a model on a GPU.
//!
//! The step times are fitted to the kernel tables of AIConfigurator (vLLM 0.19, bf16, one GPU). The
//! overheads come from measurements of real servers. Without load, TPOT is about 1 ms above the
//! kernel times, and TTFT is about 7 ms above the time of the first step.

use std::fmt;
use std::str::FromStr;

use crate::{SimulatedEngineSpec, StepTimeModel};

/// A model on a GPU whose step times and KV memory were measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineProfile {
    /// Llama 3.1 8B on one H100 SXM.
    Llama8bH100,
    /// Llama 3.1 8B on one A100 SXM.
    Llama8bA100,
    /// Llama 3.1 8B on one H200 SXM.
    Llama8bH200,
    /// Qwen3 32B on one H200 SXM.
    Qwen32bH200,
}

// === impl EngineProfile ===

impl EngineProfile {
    pub const ALL: [Self; 4] = [
        Self::Llama8bH100,
        Self::Llama8bA100,
        Self::Llama8bH200,
        Self::Qwen32bH200,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama8bH100 => "llama31-8b-h100",
            Self::Llama8bA100 => "llama31-8b-a100",
            Self::Llama8bH200 => "llama31-8b-h200",
            Self::Qwen32bH200 => "qwen3-32b-h200",
        }
    }

    pub const fn model(self) -> &'static str {
        match self {
            Self::Llama8bH100 | Self::Llama8bA100 | Self::Llama8bH200 => {
                "meta-llama/Llama-3.1-8B-Instruct"
            }
            Self::Qwen32bH200 => "Qwen/Qwen3-32B",
        }
    }

    /// Returns the number of tokens whose KV fits beside the weights at a memory utilisation of
    /// 0.9. The number is a multiple of 16, because blocks have 16 tokens.
    pub const fn kv_tokens(self) -> usize {
        16 * match self {
            Self::Llama8bH100 | Self::Llama8bA100 => 26_313,
            Self::Llama8bH200 => 54_421,
            Self::Qwen32bH200 => 15_423,
        }
    }

    pub const fn times(self) -> StepTimeModel {
        let (decode, prefill) = match self {
            Self::Llama8bH100 => ([6.07, 0.00745, 4.31e-5], [2.6, 0.0168, 5.46e-7]),
            Self::Llama8bA100 => ([10.69, 0.0248, 8.08e-5], [2.8, 0.0581, 0.0]),
            Self::Llama8bH200 => ([4.57, 0.00926, 2.87e-5], [1.6, 0.01785, 2.88e-7]),
            Self::Qwen32bH200 => ([18.17, 0.0248, 5.81e-5], [3.5, 0.0807, 4.22e-7]),
        };
        StepTimeModel {
            decode,
            prefill,
            overhead: 1.0,
            slowdown: 1.0,
        }
    }

    /// Returns the limits of an engine with KV blocks of `block_tokens` tokens. The engine runs at
    /// most 256 sequences, computes at most 8,192 tokens in a step, and has no LoRA adapters.
    pub const fn spec(self, block_tokens: usize) -> SimulatedEngineSpec {
        SimulatedEngineSpec {
            times: self.times(),
            kv_blocks: self.kv_tokens() / block_tokens,
            block_tokens,
            budget: 8192,
            sequences_max: 256,
            api_ms: 7.0,
            adapter_places: 0,
            adapter_load_ms: 0.0,
        }
    }
}

impl fmt::Display for EngineProfile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for EngineProfile {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|profile| profile.name() == name)
            .ok_or_else(|| format!("there is no engine profile `{name}`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepBatch;

    /// Checks that step times without the overhead match the measured points of the kernel tables
    /// within 12 %.
    #[test]
    fn steps_match_the_measured_points() {
        let decodes = |sequences: f64, context: f64| StepBatch {
            sequences,
            context: sequences * context,
            ..StepBatch::default()
        };
        let prefill = |tokens: f64| StepBatch {
            prefill: tokens,
            pairs: tokens * tokens,
            ..StepBatch::default()
        };
        for (profile, batch, measured_ms) in [
            (EngineProfile::Llama8bH100, decodes(1.0, 0.0), 6.1),
            (EngineProfile::Llama8bH100, decodes(32.0, 1024.0), 7.9),
            (EngineProfile::Llama8bH100, decodes(64.0, 4096.0), 18.0),
            (EngineProfile::Llama8bH100, prefill(2048.0), 40.1),
            (EngineProfile::Llama8bH100, prefill(8192.0), 185.0),
            (EngineProfile::Llama8bA100, decodes(64.0, 4096.0), 32.3),
            (EngineProfile::Llama8bA100, prefill(2048.0), 115.6),
            (EngineProfile::Llama8bA100, prefill(8192.0), 530.0),
            (EngineProfile::Llama8bH200, decodes(128.0, 1024.0), 9.3),
            (EngineProfile::Llama8bH200, prefill(8192.0), 165.0),
            (EngineProfile::Qwen32bH200, decodes(128.0, 1024.0), 27.1),
            (EngineProfile::Qwen32bH200, prefill(4096.0), 349.5),
        ] {
            let step_ms = profile.times().step_ms(batch) - profile.times().overhead;
            assert!(
                (step_ms / measured_ms - 1.0).abs() < 0.12,
                "{profile:?} {batch:?}: {step_ms} against {measured_ms}"
            );
        }
    }

    #[test]
    fn a_profile_is_found_by_its_name() {
        for profile in EngineProfile::ALL {
            assert_eq!(profile.to_string().parse(), Ok(profile));
        }
        assert!("h100".parse::<EngineProfile>().is_err());
    }
}
