//! The latency model with which a proxy predicts TTFT and TPOT.

use std::ops::RangeInclusive;

use super::features::{
    FEATURES, FEATURES_COUNT, Features, TERMS, features, tpot_terms, ttft_terms,
};
use super::shape::{FeatureColumns, LANES, LatencyShape, MS_MIN, P90Spread};
use super::step::StepModel;
use super::words::{InvalidModel, WordReader, put};
use super::{Conditions, NoPrediction, Prediction};
use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};

/// The minimum number of samples of TTFT, and of TPOT, that a model needs before it predicts.
pub const SAMPLES_MIN: u32 = 64;

/// The multiple of the largest observed value of a feature up to which a model extrapolates. Beyond
/// this limit the model gives no prediction.
pub const BEYOND_TIMES: f32 = 4.0;

/// Predicts TTFT and TPOT. A model is immutable: later learning creates another model.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyModel {
    /// The step model for [`features()`]. In this step model all endpoints are equal; the
    /// differences between endpoints are in `offsets`.
    pub step: StepModel,
    pub ttft: TargetPredictor,
    pub tpot: TargetPredictor,
    /// The largest value of each feature for which the model predicts.
    pub limits: Features,
    /// The offsets of endpoints, by slot.
    pub offsets: Box<[EndpointOffset]>,
}

/// The predictor of TTFT or of TPOT.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetPredictor {
    /// The number of requests from which the predictor was learned.
    pub samples: u32,
    pub shape: LatencyShape,
    pub spread: P90Spread,
}

/// The deviations of one endpoint from the model's TTFT and TPOT, as logarithms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EndpointOffset {
    pub generation: Generation,
    pub ttft: f32,
    pub tpot: f32,
}

/// The factors of one endpoint in a model, for display.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EndpointFactor {
    pub endpoint: EndpointRef,
    /// The endpoint's TTFT as a multiple of the other endpoints' TTFT.
    pub ttft: f32,
    /// The endpoint's TPOT as a multiple of the other endpoints' TPOT.
    pub tpot: f32,
}

const AVERAGE: EndpointOffset = EndpointOffset {
    generation: Generation(0),
    ttft: 0.0,
    tpot: 0.0,
};

const NOBODY: EndpointRef = EndpointRef {
    slot: Slot(0),
    generation: Generation(0),
};

/// The first word of an encoded latency model, which names its layout.
const LAYOUT: u32 = 0x4c33;

/// The largest prediction, in ms: a day. The limit keeps every result of later arithmetic finite.
const MS_MAX: f32 = 86_400_000.0;

/// The valid range of an endpoint's offset, as a logarithm: from about 150 times as fast to about
/// 150 times as slow.
pub const OFFSETS: RangeInclusive<f32> = -5.0..=5.0;

// === impl LatencyModel ===

impl LatencyModel {
    /// Returns a model that predicts the same TTFT and TPOT for every request, for tests and for
    /// pools with fixed times. A time that is not positive and finite becomes 1 ms.
    #[must_use]
    pub fn constant(ttft_ms: f32, tpot_ms: f32) -> Self {
        let head = |ms: f32| {
            let ms = if ms > 0.0 && ms.is_finite() { ms } else { 1.0 };
            let shape = LatencyShape {
                weights: [ms, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
                trees: Box::default(),
            };
            TargetPredictor {
                samples: u32::MAX,
                shape,
                spread: P90Spread::from_factor(1.0),
            }
        };
        let limits = [f32::MAX; FEATURES_COUNT];
        Self {
            step: StepModel::default(),
            ttft: head(ttft_ms),
            tpot: head(tpot_ms),
            limits,
            offsets: Box::default(),
        }
    }

    /// Returns the model with the factors of `endpoint` set: its TTFT and TPOT as multiples of the
    /// TTFT and TPOT of the other endpoints.
    #[must_use]
    pub fn with_endpoint(self, endpoint: EndpointRef, ttft_factor: f32, tpot_factor: f32) -> Self {
        let offset = |factor: f32| libm::logf(factor).clamp(*OFFSETS.start(), *OFFSETS.end());
        let slot = usize::from(endpoint.slot.0);
        let mut offsets = self.offsets.into_vec();
        if offsets.len() <= slot && slot < ENDPOINTS_MAX {
            offsets.resize(slot + 1, AVERAGE);
        }
        if let Some(row) = offsets.get_mut(slot) {
            *row = EndpointOffset {
                generation: endpoint.generation,
                ttft: offset(ttft_factor),
                tpot: offset(tpot_factor),
            };
        }
        Self {
            offsets: offsets.into(),
            ..self
        }
    }

    /// Predicts the latency of a request at `endpoint` under `conditions`.
    ///
    /// # Errors
    /// Returns [`NoPrediction`] if the model has too little data, or if a feature is out of range.
    pub fn predict(
        &self,
        endpoint: EndpointRef,
        conditions: &Conditions,
    ) -> Result<Prediction, NoPrediction> {
        let x = features(conditions, &self.step);
        let ttft = self.ttft.shape.correction(&x);
        let tpot = self.tpot.shape.correction(&x);
        self.say(endpoint, &x, ttft, tpot)
    }

    /// Does [`Self::predict`] for many endpoints together. Clears `out`, and adds one prediction
    /// for each of `rows`.
    pub fn predict_all(
        &self,
        rows: impl IntoIterator<Item = (EndpointRef, Conditions)>,
        out: &mut Vec<Result<Prediction, NoPrediction>>,
    ) {
        out.clear();
        let mut rows = rows.into_iter();
        let mut block: [(EndpointRef, Features); LANES] = [(NOBODY, [0.0; FEATURES_COUNT]); LANES];
        loop {
            let mut count = 0;
            for (place, (endpoint, conditions)) in block.iter_mut().zip(rows.by_ref()) {
                *place = (endpoint, features(&conditions, &self.step));
                count += 1;
            }
            self.say_all(block.get(..count).unwrap_or_default(), out);
            if count < LANES {
                return;
            }
        }
    }

    fn say_all(
        &self,
        block: &[(EndpointRef, Features)],
        out: &mut Vec<Result<Prediction, NoPrediction>>,
    ) {
        let mut columns: FeatureColumns = [[0.0; LANES]; FEATURES_COUNT];
        for (lane, (_, x)) in block.iter().enumerate() {
            for (column, value) in columns.iter_mut().zip(x) {
                column
                    .get_mut(lane)
                    .into_iter()
                    .for_each(|place| *place = *value);
            }
        }
        let corrections = self
            .ttft
            .shape
            .corrections(&columns)
            .into_iter()
            .zip(self.tpot.shape.corrections(&columns));
        out.extend(
            block
                .iter()
                .zip(corrections)
                .map(|((endpoint, x), (ttft, tpot))| self.say(*endpoint, x, ttft, tpot)),
        );
    }

    /// Returns the prediction for these features. `ttft` and `tpot` are the corrections by the
    /// trees, as logarithms.
    fn say(
        &self,
        endpoint: EndpointRef,
        x: &Features,
        ttft: f32,
        tpot: f32,
    ) -> Result<Prediction, NoPrediction> {
        if !self.can_predict() {
            return Err(NoPrediction::TooLittleData);
        }
        if x.iter()
            .zip(&self.limits)
            .any(|(value, limit)| value > limit)
        {
            return Err(self.outside(x));
        }
        let offset = self.offset(endpoint);
        let (ttft_ms, ttft_p90_ms) = self.ttft.say(&ttft_terms(x), ttft + offset.ttft);
        let (tpot_ms, tpot_p90_ms) = self.tpot.say(&tpot_terms(x), tpot + offset.tpot);
        Ok(Prediction {
            ttft_ms,
            tpot_ms,
            ttft_p90_ms,
            tpot_p90_ms,
        })
    }

    /// Returns the number of requests from which the model was learned: the smaller of the counts
    /// for TTFT and TPOT.
    pub fn samples(&self) -> u32 {
        self.ttft.samples.min(self.tpot.samples)
    }

    /// Returns whether the model was learned from enough requests to predict.
    pub fn can_predict(&self) -> bool {
        self.samples() >= SAMPLES_MIN
    }

    /// Returns the numbers of trees that correct TTFT and TPOT.
    pub fn trees(&self) -> (usize, usize) {
        (self.ttft.shape.trees.len(), self.tpot.shape.trees.len())
    }

    pub fn limits(&self) -> &Features {
        &self.limits
    }

    /// Returns the endpoints whose TTFT or TPOT is known to differ from that of the other
    /// endpoints, by slot.
    pub fn endpoints(&self) -> impl Iterator<Item = EndpointFactor> + '_ {
        let known = (0_u16..)
            .zip(&self.offsets)
            .filter(|(_, offset)| (offset.ttft, offset.tpot) != (0.0, 0.0));
        known.map(|(slot, offset)| EndpointFactor {
            endpoint: EndpointRef {
                slot: Slot(slot),
                generation: offset.generation,
            },
            ttft: libm::expf(offset.ttft),
            tpot: libm::expf(offset.tpot),
        })
    }

    /// Encodes the model as 32-bit words, at most [`WORDS_MAX`](super::WORDS_MAX), for proxies and
    /// files.
    pub fn words(&self) -> Vec<u32> {
        let mut words = vec![LAYOUT];
        self.step.put_costs(&mut words);
        put(&mut words, &self.limits);
        for head in [&self.ttft, &self.tpot] {
            words.push(head.samples);
            head.shape.put(&mut words);
            head.spread.put(&mut words);
        }
        for offset in &self.offsets {
            words.push(offset.generation.0);
            put(&mut words, &[offset.ttft, offset.tpot]);
        }
        words
    }

    /// Returns the encoded size of the model, in bytes.
    pub fn bytes(&self) -> usize {
        4 * self.words().len()
    }

    /// Decodes a model and checks every number.
    ///
    /// # Errors
    /// Returns [`InvalidModel`] if the words are not a valid model.
    pub fn from_words(words: &[u32]) -> Result<Self, InvalidModel> {
        let count = words.len();
        let mut words = WordReader::new(words, LAYOUT)?;
        let step = StepModel::read_costs(&mut words)?;
        let limits = words.numbers(&(0.0..=f32::MAX))?;
        let mut head = || {
            Ok(TargetPredictor {
                samples: words.word()?,
                shape: LatencyShape::read(&mut words)?,
                spread: P90Spread::read(&mut words)?,
            })
        };
        let ttft = head()?;
        let tpot = head()?;
        let mut offsets = Vec::new();
        while !words.ended() {
            if offsets.len() >= ENDPOINTS_MAX {
                return Err(InvalidModel::Length(count));
            }
            let generation = Generation(words.word()?);
            offsets.push(EndpointOffset {
                generation,
                ttft: words.number(&OFFSETS)?,
                tpot: words.number(&OFFSETS)?,
            });
        }
        Ok(Self {
            step,
            ttft,
            tpot,
            limits,
            offsets: offsets.into(),
        })
    }

    fn outside(&self, x: &Features) -> NoPrediction {
        let beyond = x
            .iter()
            .zip(&self.limits)
            .position(|(value, limit)| value > limit);
        let feature = beyond.and_then(|at| FEATURES.get(at));
        NoPrediction::OutsideRange(feature.map_or("", |feature| feature.name))
    }

    fn offset(&self, endpoint: EndpointRef) -> EndpointOffset {
        let offset = self
            .offsets
            .get(usize::from(endpoint.slot.0))
            .filter(|row| row.generation == endpoint.generation);
        offset.copied().unwrap_or(AVERAGE)
    }
}

// === impl TargetPredictor ===

impl TargetPredictor {
    /// Returns the median and the p90, in ms.
    fn say(&self, terms: &[f32; TERMS], correction: f32) -> (f32, f32) {
        let ms = (self.shape.base_ms(terms) * libm::expf(correction)).clamp(MS_MIN, MS_MAX);
        (ms, self.spread.p90_ms(ms).max(ms))
    }
}

#[cfg(test)]
mod tests {
    use super::super::words::WORDS_MAX;
    use super::*;
    use crate::latency::shape::{BINS, DEPTH, DecisionTree};

    fn endpoint(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        }
    }

    fn ttft_ms(model: &LatencyModel, slot: u16) -> f32 {
        model
            .predict(endpoint(slot), &Conditions::default())
            .unwrap()
            .ttft_ms
    }

    #[test]
    fn a_time_that_cannot_be_agreed_is_one_ms() {
        for ms in [0.0, -3.0, f32::NAN, f32::INFINITY] {
            assert_eq!(
                LatencyModel::constant(ms, 5.0),
                LatencyModel::constant(1.0, 5.0),
                "{ms}"
            );
        }
    }

    #[test]
    fn an_endpoint_more_leaves_the_others_as_they_were_and_none_lies_beyond_the_last_slot() {
        let model = LatencyModel::constant(100.0, 5.0)
            .with_endpoint(endpoint(5), 2.0, 1.0)
            .with_endpoint(endpoint(2), 3.0, 1.0);
        assert_eq!(
            [2, 3, 5].map(|slot| ttft_ms(&model, slot).round()),
            [300.0, 100.0, 200.0]
        );
        let last = u16::try_from(ENDPOINTS_MAX).unwrap();
        assert_eq!(model.clone().with_endpoint(endpoint(last), 2.0, 2.0), model);
        assert_eq!(
            ttft_ms(&model.with_endpoint(endpoint(last - 1), 2.0, 2.0), last - 1).round(),
            200.0
        );
    }

    #[test]
    fn it_speaks_from_the_least_samples_on_and_up_to_its_limits() {
        let mut model = LatencyModel::constant(100.0, 5.0);
        (model.limits[2], model.limits[3]) = (7.0, 4.0);
        let with = |requests: f32, queued: f32| Conditions {
            requests,
            queued: Some(queued),
            ..Conditions::default()
        };
        assert!(model.predict(endpoint(0), &with(7.0, 4.0)).is_ok());
        assert_eq!(
            model.predict(endpoint(0), &with(7.0, 5.0)),
            Err(NoPrediction::OutsideRange("queued"))
        );
        model.ttft.samples = SAMPLES_MIN;
        model.tpot.samples = SAMPLES_MIN;
        assert!(model.predict(endpoint(0), &Conditions::default()).is_ok());
        model.tpot.samples -= 1;
        assert_eq!(
            model.predict(endpoint(0), &Conditions::default()),
            Err(NoPrediction::TooLittleData)
        );
    }

    #[test]
    fn a_bin_of_the_decile_ends_with_its_end() {
        let mut spread = P90Spread::from_factor(1.5);
        (spread.ends[0], spread.factors[0]) = (100.0, 2.0);
        assert_eq!(
            [99.0, 100.0, 102.0].map(|ms| spread.p90_ms(ms)),
            [198.0, 200.0, 153.0]
        );
        (spread.ends, spread.factors[BINS - 1]) = ([100.0; BINS - 1], 3.0);
        assert_eq!(spread.p90_ms(102.0), 306.0, "the last bin has no end");
    }

    #[test]
    fn a_tree_asks_for_features_that_there_are() {
        let mut model = LatencyModel::constant(100.0, 5.0);
        let last = u8::try_from(FEATURES_COUNT - 1).unwrap();
        model.ttft.shape.trees = [DecisionTree {
            features: [last; DEPTH],
            thresholds: [0.0; DEPTH],
            leaves: [0.1; 1 << DEPTH],
        }]
        .into();
        let words = model.words();
        assert_eq!(LatencyModel::from_words(&words), Ok(model));
        let at = words
            .iter()
            .position(|word| *word == u32::from(last))
            .unwrap();
        let mut beyond = words;
        beyond[at] += 1;
        assert_eq!(
            LatencyModel::from_words(&beyond),
            Err(InvalidModel::Word(at))
        );
    }

    #[test]
    fn as_many_words_as_are_allowed_are_read() {
        assert_eq!(
            LatencyModel::from_words(&vec![7; WORDS_MAX]),
            Err(InvalidModel::Layout(7))
        );
        assert_eq!(
            LatencyModel::from_words(&vec![7; WORDS_MAX + 1]),
            Err(InvalidModel::TooLong(WORDS_MAX + 1))
        );
    }
}
