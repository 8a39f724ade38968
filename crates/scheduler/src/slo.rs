//! The latency objectives of a request.

use crate::latency::Prediction;

/// The latency objectives (SLOs) of one request. `None` means no objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    /// The limit of the time to the first token, in µs.
    pub ttft_us: Option<u32>,
    /// The limit of the time for each further token, in µs.
    pub tpot_us: Option<u32>,
}

/// The SLOs and the prediction of a request that was sent to an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrackedSlo {
    pub slo: Slo,
    /// The SLOs that later picks have to respect: those that the endpoint could meet if it were
    /// idle. Other SLOs would keep requests away from the endpoint without a benefit.
    pub counts: Slo,
    /// The prediction for the request at the endpoint, if the model gave a prediction.
    pub predicted: Option<Prediction>,
}

// === impl Slo ===

impl Slo {
    #[must_use]
    pub fn any(self) -> bool {
        self.ttft_us.is_some() || self.tpot_us.is_some()
    }

    /// Returns the stricter value of each SLO in `self` and `other`.
    #[must_use]
    pub fn strictest(self, other: Self) -> Self {
        let lowest = |one: Option<u32>, two: Option<u32>| one.into_iter().chain(two).min();
        Self {
            ttft_us: lowest(self.ttft_us, other.ttft_us),
            tpot_us: lowest(self.tpot_us, other.tpot_us),
        }
    }
}

// The cast may lose the last digits of a time of several minutes, which does not matter.
pub(crate) fn ms(us: u32) -> f32 {
    us as f32 / 1_000.0
}
