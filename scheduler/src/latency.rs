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

mod at_pick;

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

/// What a request would see at an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Time to the first token, ms: the middle of what is expected.
    pub ttft_ms: f32,
    /// Time for each further token, ms: the middle.
    pub tpot_ms: f32,
    /// Nine of ten requests have their first token within this, ms.
    pub ttft_p90_ms: f32,
    /// Nine of ten requests have their further tokens within this, ms a token.
    pub tpot_p90_ms: f32,
}

/// Why a model says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abstention {
    /// It has seen too few requests.
    TooLittleData,
    /// This feature lies outside what it has seen.
    OutsideRange(&'static str),
}

// === impl Abstention ===

impl Abstention {
    /// For people, in a few words.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::TooLittleData => "too little data",
            Self::OutsideRange(_) => "outside what was seen",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_nothing_is_said_can_be_read() {
        let reasons = [Abstention::TooLittleData, Abstention::OutsideRange("queued")].map(Abstention::reason);
        assert_eq!(reasons, ["too little data", "outside what was seen"]);
    }
}
