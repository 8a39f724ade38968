//! What a request asks of latency.

use crate::latency::Prediction;

/// Service level objectives of one request: how long it wants to wait at most. `None` asks for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    /// To its first token, µs.
    pub ttft_us: Option<u32>,
    /// For each further token, µs.
    pub tpot_us: Option<u32>,
}

/// The SLOs of a request that was sent to an endpoint: which of them count for requests that come
/// later, and what was predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrackedSlo {
    /// What the request asked for.
    pub slo: Slo,
    /// Those of its SLOs that the endpoint could meet if it were idle. An SLO that it never could would make everybody else yield for nothing.
    pub counts: Slo,
    /// What was predicted, unless nothing was.
    pub predicted: Option<Prediction>,
}

// === impl Slo ===

impl Slo {
    /// Does it ask for anything?
    #[must_use]
    pub fn any(self) -> bool {
        self.ttft_us.is_some() || self.tpot_us.is_some()
    }

    /// The stricter of both, each by itself.
    #[must_use]
    pub fn strictest(self, other: Self) -> Self {
        let lowest = |one: Option<u32>, two: Option<u32>| one.into_iter().chain(two).min();
        Self { ttft_us: lowest(self.ttft_us, other.ttft_us), tpot_us: lowest(self.tpot_us, other.tpot_us) }
    }
}

/// Microseconds as milliseconds.
#[expect(clippy::cast_precision_loss, reason = "the last digits of minutes in microseconds do not count")]
pub(crate) fn ms(us: u32) -> f32 {
    us as f32 / 1_000.0
}
