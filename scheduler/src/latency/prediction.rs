//! What a model answers: a prediction, or why it says nothing.

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
pub enum NoPrediction {
    /// It has seen too few requests.
    TooLittleData,
    /// This feature lies outside what it has seen.
    OutsideRange(&'static str),
}

// === impl NoPrediction ===

impl NoPrediction {
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
        let reasons = [NoPrediction::TooLittleData, NoPrediction::OutsideRange("queued")].map(NoPrediction::reason);
        assert_eq!(reasons, ["too little data", "outside what was seen"]);
    }
}
