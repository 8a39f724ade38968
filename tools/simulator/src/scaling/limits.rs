//! The goal and the bounds of every run of the scaling campaign.

/// The SLOs of every request: TTFT and TPOT, in seconds.
pub(super) const TTFT_SLO_S: f64 = 2.0;
pub(super) const TPOT_SLO_S: f64 = 0.1;

/// The minimum and the maximum number of replicas, and the number at the start.
pub(super) const REPLICAS_MIN: usize = 1;
pub(super) const REPLICAS_MAX: usize = 24;
pub(super) const REPLICAS_FIRST: usize = 3;
