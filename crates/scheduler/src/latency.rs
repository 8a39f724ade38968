//! Latency prediction: how long a request would take at an endpoint.
//!
//! There are two models. [`step::StepModel`] is physical: it has the time of a prefill and of a
//! decode step of this engine in ms, and a relative speed for each endpoint. [`LatencyModel`] is
//! statistical and uses the step model. It predicts TTFT and TPOT in log space from [`features()`],
//! with an offset for each endpoint and quantiles of the remaining error. So the model learns that
//! a pod is slow without labels that say so.
//!
//! The inputs at a pick are [`Conditions`], and only [`features()`] converts them to numbers. Both
//! the proxy, which predicts, and the daemon, which learns (crate `learning`), call it, so there is
//! no training/serving skew.
//!
//! A model does not guess. With too little data, or outside the range of that data,
//! [`LatencyModel::predict`] abstains and gives the reason.

mod conditions;
pub use conditions::Conditions;

mod features;
pub use features::{
    FEATURES, FEATURES_COUNT, Feature, Features, TERMS, features, tpot_terms, ttft_terms,
};

pub mod step;

pub mod shape;
mod words;
pub use words::{InvalidModel, WORDS_MAX};

mod model;
pub use model::{
    BEYOND_TIMES, EndpointFactor, EndpointOffset, LatencyModel, OFFSETS, SAMPLES_MIN,
    TargetPredictor,
};

mod observation;
pub use observation::{FirstToken, Observation, RequestEnd, TokenGap};

mod prediction;
pub use prediction::{NoPrediction, Prediction};
