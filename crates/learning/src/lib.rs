//! The learning half of the daemon: from a pool's finished requests it computes the step model, the
//! latency model and the scaling signal.
//!
//! No code of this crate runs for a request. Proxies use the results, [`StepModel`] and
//! [`LatencyModel`], which are part of the crate `scheduler`. Like `scheduler`, this crate reads no
//! clock, entropy, file, socket or environment.
//!
//! [`StepModel`]: scheduler::latency::step::StepModel
//! [`LatencyModel`]: scheduler::latency::LatencyModel
#![deny(clippy::indexing_slicing, clippy::cast_lossless)]
// Tests compare floats exactly on purpose: every host must compute the same numbers.
#![cfg_attr(not(test), deny(clippy::float_cmp))]
#![forbid(unsafe_code)]

mod least_squares;
mod origins;
mod step;
pub use step::StepLearner;
mod latency;
pub use latency::{LatencyLearner, LearnerStatus, ObservationVerdict};
mod calibration;
pub use calibration::Calibration;
pub mod scaling;
