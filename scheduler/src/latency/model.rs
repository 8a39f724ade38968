//! The model that a proxy holds: small, immutable, plain numbers.

use std::ops::RangeInclusive;

use super::features::{FEATURES_COUNT, Features, features};
use super::step::StepModel;
use super::words::{InvalidModel, Words, put};
use super::{Abstention, Conditions, Prediction};
use crate::snapshot::{ENDPOINTS_MAX, EndpointRef, Incarnation};

/// Predicts TTFT and TPOT. Immutable: what was learned since is another model.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyModel {
    step: StepModel,
    ttft: Head,
    tpot: Head,
    /// By slot.
    residuals: Box<[Residual]>,
}

/// One target: the logarithm of its milliseconds is linear in the features.
#[derive(Clone, Debug, PartialEq)]
struct Head {
    bias: f32,
    weights: Features,
    /// How many times the middle the ninth decile is, as a logarithm.
    spread90: f32,
}

/// What one endpoint differs by, as logarithms.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Residual {
    incarnation: Incarnation,
    ttft: f32,
    tpot: f32,
}

const AVERAGE: Residual = Residual { incarnation: Incarnation(0), ttft: 0.0, tpot: 0.0 };

/// The first word of a model: which layout the others have.
const LAYOUT: u32 = 0x4c31;

/// What a weight or another logarithm may be.
const LOGS: RangeInclusive<f32> = -100.0..=100.0;

// === impl LatencyModel ===

impl LatencyModel {
    /// A model that says the same of every request: for tests, and for a pool whose times are agreed rather than learned. What is not positive counts
    /// as one ms.
    #[must_use]
    pub fn constant(ttft_ms: f32, tpot_ms: f32) -> Self {
        let head = |ms: f32| Head {
            bias: libm::logf(if ms.is_finite() && ms > 0.0 { ms } else { 1.0 }),
            weights: [0.0; FEATURES_COUNT],
            spread90: 0.0,
        };
        Self { step: StepModel::default(), ttft: head(ttft_ms), tpot: head(tpot_ms), residuals: Box::default() }
    }

    /// The same, where this endpoint takes so many times as long as the others: to its first token, and for each further one.
    #[must_use]
    pub fn with_endpoint(self, endpoint: EndpointRef, ttft_factor: f32, tpot_factor: f32) -> Self {
        let slot = usize::from(endpoint.slot.0);
        let mut residuals = self.residuals.into_vec();
        if residuals.len() <= slot {
            residuals.resize(slot + 1, AVERAGE);
        }
        if let Some(residual) = residuals.get_mut(slot) {
            *residual = Residual { incarnation: endpoint.incarnation, ttft: libm::logf(ttft_factor), tpot: libm::logf(tpot_factor) };
        }
        Self { residuals: residuals.into(), ..self }
    }

    /// What a request would see at `endpoint` under these conditions.
    ///
    /// # Errors
    /// [`Abstention`]: why nothing is predicted.
    pub fn predict(&self, endpoint: EndpointRef, conditions: &Conditions) -> Result<Prediction, Abstention> {
        let x = features(conditions, &self.step);
        let residual = self.residual(endpoint);
        let (ttft_ms, tpot_ms) = (libm::expf(self.ttft.log(&x) + residual.ttft), libm::expf(self.tpot.log(&x) + residual.tpot));
        Ok(Prediction {
            ttft_ms,
            tpot_ms,
            ttft_p90_ms: ttft_ms * libm::expf(self.ttft.spread90),
            tpot_p90_ms: tpot_ms * libm::expf(self.tpot.spread90),
        })
    }

    /// [`Self::predict`] for many at once: `out` is cleared and then runs parallel to `rows`.
    pub fn predict_all(&self, rows: impl IntoIterator<Item = (EndpointRef, Conditions)>, out: &mut Vec<Result<Prediction, Abstention>>) {
        out.clear();
        out.extend(rows.into_iter().map(|(endpoint, conditions)| self.predict(endpoint, &conditions)));
    }

    /// The whole model as 32-bit words, at most [`WORDS_MAX`](super::WORDS_MAX): how it goes to a proxy or into a file.
    #[must_use]
    pub fn words(&self) -> Vec<u32> {
        let mut words = vec![LAYOUT];
        self.step.put_costs(&mut words);
        for head in [&self.ttft, &self.tpot] {
            put(&mut words, &[head.bias, head.spread90]);
            put(&mut words, &head.weights);
        }
        for residual in &self.residuals {
            words.push(residual.incarnation.0);
            put(&mut words, &[residual.ttft, residual.tpot]);
        }
        words
    }

    /// The model of these words, each number of it looked at.
    ///
    /// # Errors
    /// [`InvalidModel`]; nothing of it may then be used.
    pub fn from_words(words: &[u32]) -> Result<Self, InvalidModel> {
        let count = words.len();
        let mut words = Words::of(words, LAYOUT)?;
        let step = StepModel::read_costs(&mut words)?;
        let mut head = || Ok(Head { bias: words.number(&LOGS)?, spread90: words.number(&LOGS)?, weights: words.numbers(&LOGS)? });
        let (ttft, tpot) = (head()?, head()?);
        let mut residuals = Vec::new();
        while !words.ended() {
            if residuals.len() >= ENDPOINTS_MAX {
                return Err(InvalidModel::Length(count));
            }
            let incarnation = Incarnation(words.word()?);
            residuals.push(Residual { incarnation, ttft: words.number(&LOGS)?, tpot: words.number(&LOGS)? });
        }
        Ok(Self { step, ttft, tpot, residuals: residuals.into() })
    }

    fn residual(&self, endpoint: EndpointRef) -> Residual {
        let residual = self.residuals.get(usize::from(endpoint.slot.0)).filter(|row| row.incarnation == endpoint.incarnation);
        residual.copied().unwrap_or(AVERAGE)
    }
}

// === impl Head ===

impl Head {
    fn log(&self, x: &Features) -> f32 {
        self.bias + x.iter().zip(&self.weights).map(|(x, weight)| x * weight).sum::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Slot;

    #[test]
    fn a_model_by_hand_says_what_it_was_told() {
        let slow = EndpointRef { slot: Slot(3), incarnation: Incarnation(7) };
        let model = LatencyModel::constant(200.0, 20.0).with_endpoint(slow, 2.0, 3.0);
        let at = |endpoint| model.predict(endpoint, &Conditions::default()).unwrap();
        let close = |a: f32, b: f32| (a / b - 1.0).abs() < 1e-5;
        assert!(close(at(slow).ttft_ms, 400.0) && close(at(slow).tpot_ms, 60.0), "{:?}", at(slow));
        let replaced = EndpointRef { incarnation: Incarnation(8), ..slow };
        assert!(close(at(replaced).ttft_ms, 200.0) && close(at(replaced).tpot_ms, 20.0));
        assert_eq!(LatencyModel::from_words(&model.words()), Ok(model));
    }
}
