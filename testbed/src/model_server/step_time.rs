//! How long one engine step takes.
//!
//! Calibrated on measured kernels (bf16, one GPU): decode is affine in batch size and context, prefill is affine in new tokens plus
//! attention over the context. A mixed step reads the weights once, so prefill only adds what exceeds the weight floor of decode:
//! `overhead + decode(B, K) + max(0, prefill(n | ctx) - d0)`.

use clap::ValueEnum;

/// Sampling, norms and the CPU between two steps, which kernel tables leave out: idle TPOT of a real engine is about 1 ms above them.
const STEP_OVERHEAD_MS: f64 = 1.0;

/// A model on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StepTimeProfile {
    /// Llama 3.1 8B on one H100 SXM.
    #[value(name = "llama31-8b-h100")]
    Llama8bH100,
    /// Llama 3.1 8B on one A100 SXM.
    #[value(name = "llama31-8b-a100")]
    Llama8bA100,
    /// Llama 3.1 8B on one H200 SXM.
    #[value(name = "llama31-8b-h200")]
    Llama8bH200,
    /// Qwen3 32B on one H200 SXM.
    #[value(name = "qwen3-32b-h200")]
    Qwen32bH200,
}

impl StepTimeProfile {
    /// The name the model is served under unless told otherwise.
    pub fn model(self) -> &'static str {
        match self {
            Self::Llama8bH100 | Self::Llama8bA100 | Self::Llama8bH200 => "meta-llama/Llama-3.1-8B-Instruct",
            Self::Qwen32bH200 => "Qwen/Qwen3-32B",
        }
    }

    /// KV blocks of 16 tokens that fit beside the weights at 0.9 memory utilisation.
    pub fn kv_blocks(self) -> u32 {
        match self {
            Self::Llama8bH100 | Self::Llama8bA100 => 26_313,
            Self::Llama8bH200 => 54_421,
            Self::Qwen32bH200 => 15_423,
        }
    }

    pub(super) fn step_times(self) -> StepTimes {
        let (decode, prefill) = match self {
            Self::Llama8bH100 => ([6.07, 0.00745, 4.31e-5], [2.6, 0.0168, 5.46e-7]),
            Self::Llama8bA100 => ([10.69, 0.0248, 8.08e-5], [2.8, 0.0581, 0.0]),
            Self::Llama8bH200 => ([4.57, 0.00926, 2.87e-5], [1.6, 0.01785, 2.88e-7]),
            Self::Qwen32bH200 => ([18.17, 0.0248, 5.81e-5], [3.5, 0.0807, 4.22e-7]),
        };
        StepTimes { decode, prefill }
    }
}

/// What one step has to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ModelBatch {
    /// Sequences that decode one token.
    pub decodes: u32,
    /// Sum of their context lengths, in tokens.
    pub decode_context: u64,
    /// New prompt tokens.
    pub prefill_tokens: u32,
    /// Sum over prefilling sequences of `(cached + new)^2 - cached^2`: what attention costs.
    pub prefill_attention: f64,
}

impl ModelBatch {
    pub(super) fn add_decode(&mut self, context: u32) {
        self.decodes += 1;
        self.decode_context += u64::from(context);
    }

    pub(super) fn add_prefill(&mut self, cached: u32, new: u32) {
        let (from, to) = (f64::from(cached), f64::from(cached) + f64::from(new));
        self.prefill_tokens += new;
        self.prefill_attention += to * to - from * from;
    }

    pub(super) fn tokens(&self) -> u32 {
        self.decodes + self.prefill_tokens
    }
}

/// Coefficients in ms: decode `d0 + d1 B + d2 K`, prefill `p0 + p1 n + p2 attention`.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepTimes {
    decode: [f64; 3],
    prefill: [f64; 3],
}

impl StepTimes {
    pub(super) fn step_ms(&self, batch: &ModelBatch) -> f64 {
        let [d0, d1, d2] = self.decode;
        let [p0, p1, p2] = self.prefill;
        let decode = d0 + d1 * f64::from(batch.decodes) + d2 * batch.decode_context as f64;
        let prefill =
            if batch.prefill_tokens == 0 { 0.0 } else { p0 + p1 * f64::from(batch.prefill_tokens) + p2 * batch.prefill_attention };
        STEP_OVERHEAD_MS + decode + (prefill - d0).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn batch(decodes: u32, context: u32, prefill: u32) -> ModelBatch {
        let mut batch = ModelBatch { decodes, decode_context: u64::from(decodes) * u64::from(context), ..ModelBatch::default() };
        if prefill > 0 {
            batch.add_prefill(0, prefill);
        }
        batch
    }

    /// The measured table points of the profiles, within 12 % and after taking the overhead off.
    #[test]
    fn steps_match_the_measured_points() {
        for (profile, batch, measured_ms) in [
            (StepTimeProfile::Llama8bH100, batch(1, 0, 0), 6.1),
            (StepTimeProfile::Llama8bH100, batch(32, 1024, 0), 7.9),
            (StepTimeProfile::Llama8bH100, batch(64, 4096, 0), 18.0),
            (StepTimeProfile::Llama8bH100, batch(0, 0, 2048), 40.1),
            (StepTimeProfile::Llama8bH100, batch(0, 0, 8192), 185.0),
            (StepTimeProfile::Llama8bA100, batch(64, 4096, 0), 32.3),
            (StepTimeProfile::Llama8bA100, batch(0, 0, 2048), 115.6),
            (StepTimeProfile::Llama8bA100, batch(0, 0, 8192), 530.0),
            (StepTimeProfile::Llama8bH200, batch(128, 1024, 0), 9.3),
            (StepTimeProfile::Llama8bH200, batch(0, 0, 8192), 165.0),
            (StepTimeProfile::Qwen32bH200, batch(128, 1024, 0), 27.1),
            (StepTimeProfile::Qwen32bH200, batch(0, 0, 4096), 349.5),
        ] {
            let step_ms = profile.step_times().step_ms(&batch) - STEP_OVERHEAD_MS;
            assert!((step_ms / measured_ms - 1.0).abs() < 0.12, "{profile:?} {batch:?}: {step_ms} against {measured_ms}");
        }
    }

    #[test]
    fn a_cached_prefix_still_costs_its_attention() {
        let step_ms = |cached: u32| {
            let mut batch = ModelBatch::default();
            batch.add_prefill(cached, 2048);
            StepTimeProfile::Llama8bH100.step_times().step_ms(&batch)
        };
        let attention_ms = 5.46e-7 * 2.0 * 8192.0 * 2048.0;
        assert!((step_ms(8192) - step_ms(0) - attention_ms).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn more_load_never_makes_a_step_shorter(
            decodes in 0..512_u32, context in 0..8192_u32, prefill in 0..16_384_u32, cached in 0..65_536_u32, more in 1..4096_u32,
        ) {
            for profile in StepTimeProfile::value_variants() {
                let times = profile.step_times();
                let base = batch(decodes, context, prefill);
                let step_ms = times.step_ms(&base);
                let (mut decode, mut prefill) = (base, base);
                decode.add_decode(context);
                prefill.add_prefill(cached, more);
                prop_assert!(times.step_ms(&decode) > step_ms);
                prop_assert!(times.step_ms(&prefill) >= step_ms);
                let mut deeper = base;
                deeper.add_prefill(cached + more, more);
                prop_assert!(times.step_ms(&deeper) >= times.step_ms(&prefill));
            }
        }
    }
}
