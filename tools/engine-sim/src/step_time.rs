//! Computes how long one engine step takes:
//!
//! `slowdown × (overhead + decode(B, K) + max(0, prefill(n, pairs) - d0)) + loading`
//!
//! - `decode(B, K) = d0 + d1 B + d2 K`, for `B` sequences with `K` tokens of context in total.
//! - `prefill(n, pairs) = p0 + p1 n + p2 pairs`, for `n` new tokens. `pairs` is the sum over the
//!   prefilling sequences of `(cached + new)² - cached²`: the cost of attention.
//!
//! A step reads the weights once, and `d0` is the time of that read. So a prefill adds only what
//! exceeds `d0`.

/// The coefficients of the step time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTimeModel {
    /// The coefficients of decoding, in ms: constant, per sequence, per token of context.
    pub decode: [f64; 3],
    /// The coefficients of prefilling, in ms: constant, per token, per pair of tokens.
    pub prefill: [f64; 3],
    /// The time per step, in ms, that kernel measurements leave out: sampling, and the CPU between
    /// two steps.
    pub overhead: f64,
    /// A factor on all these times. With 1, the times are as measured.
    pub slowdown: f64,
}

/// The work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepBatch {
    /// The number of sequences that decode one token in this step.
    pub sequences: f64,
    /// The sum of the context lengths of the decoding sequences, in tokens.
    pub context: f64,
    pub prefill: f64,
    /// The sum over the prefilling sequences of `(cached + new)² - cached²`.
    pub pairs: f64,
    /// The time to load LoRA adapters, in ms.
    pub loading_ms: f64,
}

// === impl StepBatch ===

impl StepBatch {
    /// Adds one decoded token. `context` is the number of tokens that the token attends to,
    /// including the token itself.
    pub(crate) fn add_decode(&mut self, context: usize) {
        self.sequences += 1.0;
        self.context += context as f64;
    }

    /// Adds the prompt tokens `from..to` of one sequence.
    pub(crate) fn add_prefill(&mut self, from: usize, to: usize) {
        self.prefill += (to - from) as f64;
        self.pairs += (to as f64).powi(2) - (from as f64).powi(2);
    }

    pub(crate) fn tokens(&self) -> u32 {
        (self.sequences + self.prefill) as u32
    }
}

// === impl StepTimeModel ===

impl StepTimeModel {
    pub fn step_ms(&self, batch: StepBatch) -> f64 {
        let [d0, d1, d2] = self.decode;
        let [p0, p1, p2] = self.prefill;
        let decode = d0 + d1 * batch.sequences + d2 * batch.context;
        let prefill = if batch.prefill > 0.0 {
            (p0 + p1 * batch.prefill + p2 * batch.pairs - d0).max(0.0)
        } else {
            0.0
        };
        self.slowdown * (self.overhead + decode + prefill) + batch.loading_ms
    }

    /// Returns the duration in ms of a step that decodes `sequences` sequences with `context`
    /// tokens in total.
    pub fn decode_ms(&self, sequences: f64, context: f64) -> f64 {
        self.step_ms(StepBatch {
            sequences,
            context,
            ..StepBatch::default()
        })
    }

    /// Returns the duration in ms of a step that prefills `tokens` tokens of a prompt whose first
    /// `done` tokens are computed.
    pub fn prefill_ms(&self, tokens: f64, done: f64) -> f64 {
        self.step_ms(StepBatch {
            prefill: tokens,
            pairs: (done + tokens).powi(2) - done.powi(2),
            ..StepBatch::default()
        })
    }

    /// Returns the prefill time in ms of a prompt on an idle engine with an empty cache. The engine
    /// computes the prompt in chunks of `budget` tokens.
    pub fn cold_ms(&self, tokens: u32, budget: usize) -> f64 {
        let mut done = 0.0;
        let mut total = 0.0;
        while done < f64::from(tokens) {
            let chunk = (f64::from(tokens) - done).min(budget as f64);
            total += self.prefill_ms(chunk, done);
            done += chunk;
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineProfile;
    use proptest::prelude::*;

    fn batch(decodes: u32, context: usize, prefill: usize) -> StepBatch {
        let mut batch = StepBatch::default();
        (0..decodes).for_each(|_| batch.add_decode(context));
        batch.add_prefill(0, prefill);
        batch
    }

    #[test]
    fn a_cached_prefix_still_costs_its_attention() {
        let times = EngineProfile::Llama8bH100.times();
        let step_ms = |cached: f64| times.prefill_ms(2048.0, cached);
        let attention_ms = times.prefill[2] * 2.0 * 8192.0 * 2048.0;
        assert!((step_ms(8192.0) - step_ms(0.0) - attention_ms).abs() < 1e-9);
    }

    #[test]
    fn loading_adapters_is_not_slowed_down() {
        let times = StepTimeModel {
            slowdown: 3.0,
            ..EngineProfile::Llama8bH100.times()
        };
        let plain = batch(2, 100, 0);
        assert_eq!(
            times.step_ms(StepBatch {
                loading_ms: 50.0,
                ..plain
            }),
            times.step_ms(plain) + 50.0
        );
        assert_eq!(batch(3, 10, 7).tokens(), 10);
    }

    proptest! {
        #[test]
        fn more_load_never_makes_a_step_shorter(
            decodes in 0..512_u32, context in 0..8192_usize, prefill in 0..16_384_usize, cached in 0..65_536_usize, more in 1..4096_usize,
        ) {
            for profile in EngineProfile::ALL {
                let times = profile.times();
                let base = batch(decodes, context, prefill);
                let step_ms = times.step_ms(base);
                let mut decode = base;
                let mut prefill = base;
                let mut deeper = base;
                decode.add_decode(context + 1);
                prefill.add_prefill(cached, cached + more);
                deeper.add_prefill(cached + more, cached + 2 * more);
                prop_assert!(times.step_ms(decode) > step_ms);
                prop_assert!(times.step_ms(prefill) >= step_ms);
                prop_assert!(times.step_ms(deeper) >= times.step_ms(prefill));
            }
        }
    }
}
