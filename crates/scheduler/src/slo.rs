//! The latency objectives of a request.

use crate::latency::Prediction;

/// The latency objectives (SLOs) of one request. `None` means no objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    /// Time to the first token, µs.
    pub ttft_us: Option<u32>,
    /// Time for each further token, µs.
    pub tpot_us: Option<u32>,
}

/// The SLOs and the prediction of a request that was sent to an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrackedSlo {
    pub slo: Slo,
    /// The SLOs that later picks have to respect: those that the endpoint could meet if it were
    /// idle. Others would keep requests away from it without any benefit.
    pub counts: Slo,
    /// The prediction, if there was one.
    pub predicted: Option<Prediction>,
}

// === impl Slo ===

impl Slo {
    #[must_use]
    pub fn any(self) -> bool {
        self.ttft_us.is_some() || self.tpot_us.is_some()
    }

    /// Returns the stricter value of each SLO.
    #[must_use]
    pub fn strictest(self, other: Self) -> Self {
        let lowest = |one: Option<u32>, two: Option<u32>| one.into_iter().chain(two).min();
        Self {
            ttft_us: lowest(self.ttft_us, other.ttft_us),
            tpot_us: lowest(self.tpot_us, other.tpot_us),
        }
    }
}

// The cast may lose the last digits of a number of minutes.
pub(crate) fn ms(us: u32) -> f32 {
    us as f32 / 1_000.0
}
