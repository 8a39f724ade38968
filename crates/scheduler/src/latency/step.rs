//! The model of the time that an engine takes for its steps: prefill and decode.
//!
//! For `n` prompt tokens with `u` uncached tokens, a prefill takes `c0 + c1 u + c2 (n² - (n-u)²)`
//! ms: a constant, the time for each uncached token, and the time for the attention of each
//! uncached token to all tokens before it. A decode step of a batch of `B` requests with `K`
//! context tokens takes `e0 + e1 B + e2 K` ms. Each time is multiplied by the relative speed of the
//! endpoint.

use std::ops::RangeInclusive;

use super::words::{InvalidModel, WordReader, put};
use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation};
use crate::in_flight::{ATTENTION_UNIT, EndpointLoad, PendingPrefills};

/// The cost of the steps of a pool's engines, in ms. The default model is rough, and the learner
/// corrects it within a few tens of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct StepModel {
    /// The coefficients `c0`, `c1`, `c2` of a prefill.
    prefill: [f32; 3],
    /// The coefficients `e0`, `e1`, `e2` of a decode step.
    decode: [f32; 3],
    /// The mean number of output tokens of a request.
    output_tokens: f32,
    /// The relative speeds of endpoints, by slot.
    speeds: Box<[EndpointSpeed]>,
}

/// The relative speeds of one endpoint: the times of this endpoint as multiples of an average
/// endpoint's times. A value above 1 is slower.
#[derive(Clone, Copy, Debug, PartialEq)]
struct EndpointSpeed {
    generation: Generation,
    prefill: f32,
    decode: f32,
}

/// The coefficients of a prefill with which a pool starts. The coefficients come from the
/// simulations in which the default policy was tuned. No machine has exactly these coefficients, so
/// no code may depend on them.
const PREFILL_PRIOR: [f32; 3] = [10.0, 0.05, 1e-6];
const DECODE_PRIOR: [f32; 3] = [11.0, 0.025, 8e-5];
const OUTPUT_TOKENS_PRIOR: f32 = 200.0;

/// The valid range of a coefficient, in ms: no engine takes ten seconds for one token.
const COEFFICIENTS: RangeInclusive<f32> = 0.0..=10_000.0;

/// The valid range of the mean output, in tokens.
pub const OUTPUT_TOKENS: RangeInclusive<f32> = 1.0..=1_000_000.0;

/// The valid range of a relative speed. No accelerator is outside this range. The range is limited
/// because a wrong speed must not make an endpoint attract all requests, or never get a request
/// again.
pub const SPEEDS: RangeInclusive<f32> = 0.05..=20.0;

const AVERAGE: EndpointSpeed = EndpointSpeed {
    generation: Generation(0),
    prefill: 1.0,
    decode: 1.0,
};

/// The first word of an encoded step model, which names its layout.
const LAYOUT: u32 = 0x5731;

// === impl StepModel ===

impl Default for StepModel {
    fn default() -> Self {
        Self {
            prefill: PREFILL_PRIOR,
            decode: DECODE_PRIOR,
            output_tokens: OUTPUT_TOKENS_PRIOR,
            speeds: Box::default(),
        }
    }
}

impl StepModel {
    /// Returns a model with these coefficients in ms, in which all endpoints are equal. Each number
    /// is clamped to its valid range; NaN becomes the minimum.
    #[must_use]
    pub fn from_parts(prefill: [f32; 3], decode: [f32; 3], output_tokens: f32) -> Self {
        let within = |coefficients: [f32; 3]| coefficients.map(|c| nearest(c, &COEFFICIENTS));
        let output_tokens = nearest(output_tokens, &OUTPUT_TOKENS);
        Self {
            prefill: within(prefill),
            decode: within(decode),
            output_tokens,
            speeds: Box::default(),
        }
    }

    /// Returns the model with the relative speeds of `endpoint` set: its times as multiples of an
    /// average endpoint's times. A value below 1 is faster.
    #[must_use]
    pub fn with_speed(self, endpoint: EndpointRef, prefill: f32, decode: f32) -> Self {
        let slot = usize::from(endpoint.slot.0);
        let mut speeds = self.speeds.into_vec();
        if speeds.len() <= slot && slot < ENDPOINTS_MAX {
            speeds.resize(slot + 1, AVERAGE);
        }
        if let Some(speed) = speeds.get_mut(slot) {
            let prefill = nearest(prefill, &SPEEDS);
            let decode = nearest(decode, &SPEEDS);
            *speed = EndpointSpeed {
                generation: endpoint.generation,
                prefill,
                decode,
            };
        }
        Self {
            speeds: speeds.into(),
            ..self
        }
    }

    /// Returns the model without differences between endpoints.
    pub fn without_speeds(&self) -> Self {
        Self {
            speeds: Box::default(),
            ..*self
        }
    }

    /// Returns the time of a prefill of `uncached` of `prompt` tokens at an average endpoint, in
    /// ms.
    pub fn prefill_ms(&self, uncached: f32, prompt: f32) -> f32 {
        let [c0, c1, c2] = self.prefill;
        c0 + uncached * (c1 + c2 * (prompt + prompt - uncached))
    }

    /// Returns the time of a decode step of `batch` requests with `context_tokens` in total at an
    /// average endpoint, in ms.
    pub fn decode_ms(&self, batch: f32, context_tokens: f32) -> f32 {
        let [e0, e1, e2] = self.decode;
        e0 + e1 * batch + e2 * context_tokens
    }

    /// Returns the time to the first token and the time to the last of `output` tokens, in ms, for
    /// a request with `prompt` tokens at `endpoint`, which already has `load`. `uncached` of the
    /// prompt tokens are not cached at `endpoint`.
    // The casts to f32 are exact enough, because a time is known to at most seven digits.
    pub fn expected_ms(
        &self,
        endpoint: EndpointRef,
        load: &EndpointLoad,
        uncached: f32,
        prompt: f32,
        output: f32,
    ) -> (f32, f32) {
        let ((prefill_speed, decode_speed), [_, per_token, _]) =
            (self.speed(endpoint), self.prefill);
        let waiting = per_token * load.prefills.uncached_tokens as f32;
        let first_token = prefill_speed * (waiting + self.prefill_ms(uncached, prompt));
        let step = self.decode_ms(
            load.requests as f32 + 1.0,
            load.decode_tokens as f32 + prompt,
        );
        (first_token, first_token + decode_speed * step * output)
    }

    /// Returns the time in which an average endpoint computes its waiting prompts, in ms. Leaves
    /// out the constant `c0`, because an engine computes several prompts in one step.
    // The casts to f32 are exact enough, because a time is known to at most seven digits.
    pub fn backlog_ms(&self, pending: &PendingPrefills) -> f32 {
        let [_, per_token, per_pair] = self.prefill;
        per_token * pending.uncached_tokens as f32
            + per_pair * pending.attention as f32 * ATTENTION_UNIT as f32
    }

    pub fn prefill(&self) -> [f32; 3] {
        self.prefill
    }

    pub fn decode(&self) -> [f32; 3] {
        self.decode
    }

    pub fn output_tokens(&self) -> f32 {
        self.output_tokens
    }

    /// Returns the relative speeds of `endpoint` for a prefill and for a decode step, as multiples
    /// of an average endpoint's time. Both are 1 if this generation is unknown.
    pub fn speed(&self, endpoint: EndpointRef) -> (f32, f32) {
        self.learned_speed(endpoint).unwrap_or((1.0, 1.0))
    }

    /// Returns the value of [`Self::speed`], or `None` if the model does not know this generation.
    pub fn learned_speed(&self, endpoint: EndpointRef) -> Option<(f32, f32)> {
        let speed = self
            .speeds
            .get(usize::from(endpoint.slot.0))
            .filter(|speed| speed.generation == endpoint.generation);
        speed.map(|speed| (speed.prefill, speed.decode))
    }

    /// Encodes the model as 32-bit words, for proxies and files.
    pub fn words(&self) -> Vec<u32> {
        let mut words = vec![LAYOUT];
        self.put_costs(&mut words);
        for speed in &self.speeds {
            words.push(speed.generation.0);
            put(&mut words, &[speed.prefill, speed.decode]);
        }
        words
    }

    /// Decodes a model and checks every number.
    ///
    /// # Errors
    /// Returns [`InvalidModel`] if the words are not a valid model.
    pub fn from_words(words: &[u32]) -> Result<Self, InvalidModel> {
        let count = words.len();
        let mut words = WordReader::new(words, LAYOUT)?;
        let mut model = Self::read_costs(&mut words)?;
        let mut speeds = Vec::new();
        while !words.ended() {
            if speeds.len() >= ENDPOINTS_MAX {
                return Err(InvalidModel::Length(count));
            }
            let generation = Generation(words.word()?);
            speeds.push(EndpointSpeed {
                generation,
                prefill: words.number(&SPEEDS)?,
                decode: words.number(&SPEEDS)?,
            });
        }
        model.speeds = speeds.into();
        Ok(model)
    }

    /// Appends everything but the speeds.
    pub(super) fn put_costs(&self, words: &mut Vec<u32>) {
        put(words, &self.prefill);
        put(words, &self.decode);
        put(words, &[self.output_tokens]);
    }

    /// Reads what [`Self::put_costs`] wrote.
    pub(super) fn read_costs(words: &mut WordReader<'_>) -> Result<Self, InvalidModel> {
        let prefill = words.numbers(&COEFFICIENTS)?;
        let decode = words.numbers(&COEFFICIENTS)?;
        Ok(Self {
            prefill,
            decode,
            output_tokens: words.number(&OUTPUT_TOKENS)?,
            speeds: Box::default(),
        })
    }
}

/// Clamps `number` to `range`; NaN becomes the minimum.
fn nearest(number: f32, range: &RangeInclusive<f32>) -> f32 {
    if number.is_nan() {
        *range.start()
    } else {
        number.clamp(*range.start(), *range.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Slot;
    use proptest::prelude::*;

    #[test]
    fn a_prefill_computes_uncached_tokens_but_attends_to_all() {
        let model = StepModel::from_parts([10.0, 0.05, 1e-6], [11.0, 0.025, 8e-5], 200.0);
        assert_eq!(model.prefill_ms(0.0, 8_000.0), 10.0);
        assert!(
            (model.prefill_ms(1_000.0, 1_000.0) - 61.0).abs() < 1e-3,
            "10 + 50 + 1"
        );
        assert!(
            (model.prefill_ms(1_000.0, 8_000.0) - 75.0).abs() < 1e-3,
            "10 + 50 + 8,000² - 7,000² millionths"
        );
        assert!((model.decode_ms(4.0, 10_000.0) - 11.9).abs() < 1e-3);
    }

    #[test]
    fn impossible_numbers_are_clamped_or_refused() {
        let endpoint = EndpointRef {
            slot: Slot(2),
            generation: Generation(5),
        };
        let model = StepModel::from_parts([f32::NAN, -1.0, f32::INFINITY], [0.0; 3], f32::NAN)
            .with_speed(endpoint, f32::NAN, 1e9);
        assert_eq!(
            (
                model.prefill(),
                model.output_tokens(),
                model.speed(endpoint)
            ),
            ([0.0, 0.0, 10_000.0], 1.0, (0.05, 20.0))
        );
        let beyond = EndpointRef {
            slot: Slot(1024),
            ..endpoint
        };
        assert_eq!(model.with_speed(beyond, 2.0, 2.0).speed(beyond), (1.0, 1.0));
        let words = StepModel::default().with_speed(endpoint, 2.0, 3.0).words();
        for at in 1..8 {
            for number in [f32::NAN, -1.0, f32::INFINITY, 1e30] {
                let mut bad = words.clone();
                bad[at] = number.to_bits();
                assert_eq!(StepModel::from_words(&bad), Err(InvalidModel::Word(at)));
            }
        }
        assert_eq!(
            StepModel::from_words(&words[..words.len() - 1]),
            Err(InvalidModel::Length(words.len() - 1))
        );
        assert_eq!(StepModel::from_words(&[]), Err(InvalidModel::Layout(0)));
    }

    proptest! {
        #[test]
        fn a_model_comes_back_from_its_words(
            prefill in prop::array::uniform3(0.0_f32..10.0),
            speeds in prop::collection::vec((0_u16..40, any::<u32>(), 0.1_f32..10.0, 0.1_f32..10.0), 0..20),
        ) {
            let model = speeds.iter().fold(StepModel::from_parts(prefill, prefill, 77.0), |model, &(slot, generation, p, d)| {
                model.with_speed(EndpointRef { slot: Slot(slot), generation: Generation(generation) }, p, d)
            });
            prop_assert_eq!(StepModel::from_words(&model.words()), Ok(model));
        }

        #[test]
        fn any_words_are_read_or_refused(words in prop::collection::vec(any::<u32>(), 0..60), known in any::<bool>()) {
            let mut words = words;
            if let Some(first) = words.first_mut().filter(|_| known) {
                *first = LAYOUT;
            }
            if let Ok(model) = StepModel::from_words(&words) {
                prop_assert!(model.prefill_ms(10.0, 20.0).is_finite());
            }
        }
    }
}
