//! Latency prediction: how long a request would take at an endpoint, and how that is learned.
//!
//! There are two models. [`step::StepModel`] is physical: the time of a prefill and of a decode
//! step of this engine, in ms, and a relative speed for each endpoint. [`LatencyModel`] is
//! statistical and uses the first: TTFT and TPOT in log space from [`features()`], with a residual
//! for each endpoint (a slow pod is learned without labels) and quantiles of the remaining error.
//!
//! The inputs at a pick are [`Conditions`], and only [`features()`] converts them to numbers. The
//! proxy that predicts and the daemon that learns ([`learn::LatencyLearner`]) call the same
//! function, so there is no training/serving skew.
//!
//! A model does not guess: with too little data, or outside the range it has seen,
//! [`LatencyModel::predict`] abstains and says why.

mod conditions;
pub use conditions::Conditions;

mod features;
pub use features::{FEATURES, FEATURES_COUNT, Feature, Features, features};

pub mod step;

mod least_squares;
mod shape;
mod words;
pub use words::{InvalidModel, WORDS_MAX};

mod model;
pub use model::{BEYOND_TIMES, EndpointFactor, LatencyModel, SAMPLES_MIN};

pub mod learn;

mod calibration;
pub use calibration::Calibration;

mod prediction;
pub use prediction::{NoPrediction, Prediction};
