//! How long a request would take at an endpoint: what is predicted at a pick, and how that is learned.
//!
//! Two layers, one family. [`step::StepModel`] is physics: what a prefill and a decode step of this engine cost, in ms, with a speed for
//! each endpoint. [`LatencyModel`] is statistics on top: TTFT and TPOT in log space from [`features()`], the step model's
//! times among them, with a residual for each endpoint (so a slow pod is learned without labels) and with quantiles of what is left.
//!
//! What is true at a pick is a [`Conditions`], and [`features()`] is the only way from there to numbers: the proxy that predicts and
//! the daemon that learns ([`learn::Learner`]) call the same function, so there is no skew between them.
//!
//! A model says nothing rather than guess: with too little data or outside what it has seen, [`LatencyModel::predict`] abstains, and says why.

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
pub use prediction::{Abstention, Prediction};
