//! The answer of a latency model: a prediction, or the reason why the model gives no prediction.

/// The latency that a request would see at an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The median time to the first token (TTFT), in ms.
    pub ttft_ms: f32,
    /// The median time per output token after the first token (TPOT), in ms.
    pub tpot_ms: f32,
    /// The TTFT that nine of ten requests do not exceed, in ms.
    pub ttft_p90_ms: f32,
    /// The TPOT that nine of ten requests do not exceed, in ms per token.
    pub tpot_p90_ms: f32,
}

/// The reason why a model gives no prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPrediction {
    /// The model has learned from too few requests.
    TooLittleData,
    /// The named feature of the request is outside the range of the model's data.
    OutsideRange(&'static str),
}

// === impl NoPrediction ===

impl NoPrediction {
    /// Returns the reason in a few words, for logs and `explain`.
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
    fn reasons_for_no_prediction_are_readable() {
        let reasons = [
            NoPrediction::TooLittleData,
            NoPrediction::OutsideRange("queued"),
        ]
        .map(NoPrediction::reason);
        assert_eq!(reasons, ["too little data", "outside what was seen"]);
    }
}
