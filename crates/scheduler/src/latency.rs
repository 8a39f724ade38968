//! Latency prediction: the prediction of how long a request would take at an endpoint.
//!
//! Switchpoint has two models. [`step::StepModel`] follows the work of an engine: it has the time
//! of a prefill and of a decode step of this engine in ms, and a relative speed for each endpoint.
//! [`LatencyModel`] is statistical and uses the step model. The latency model predicts the
//! logarithms of TTFT and TPOT from [`features()`], with an offset for each endpoint and quantiles
//! of the remaining error. So this model learns that a pod is slow, even if no label says that the
//! pod is slow.
//!
//! The inputs at a pick are [`Conditions`], and only [`features()`] converts them to numbers. Both
//! the proxy, which predicts, and the daemon, which learns (crate `learning`), call [`features()`],
//! so that training and serving use the same inputs.
//!
//! A model does not guess. With too little data, or outside the range of that data,
//! [`LatencyModel::predict`] gives the reason instead of a prediction.

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
