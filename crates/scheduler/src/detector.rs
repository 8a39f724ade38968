//! Saturation detectors measure how full the pool is. When a detector is used as a filter, it drops
//! the full endpoints.
//!
//! **Unknown is not full.** llm-d counts an endpoint with missing or old metrics as saturated, so
//! that one late scrape stops a pool. Switchpoint's detectors leave an endpoint with missing or old
//! metrics out of the mean, and this endpoint stays a candidate.

pub(crate) mod backlog;
pub(crate) mod concurrency;
pub(crate) mod utilization;

use crate::plugin::{InvalidParameter, Parameter, Parameters, producer_name};

const HEADROOM: Parameter = Parameter::number(
    "headroom",
    0.0,
    "as a filter: how far an endpoint may exceed the thresholds, as a share of them, 0 or more",
);

const IN_FLIGHT_PRODUCER: Parameter = producer_name("inFlightLoadProducerName");

/// Returns 1 + headroom, the factor by which filters raise the threshold.
fn relaxed(parameters: &Parameters<'_>) -> Result<f32, InvalidParameter> {
    // The cast is precise enough, because the number is within the range of an f32.
    let headroom = parameters.number(HEADROOM.name, 0.0..=1e6)? as f32;
    Ok(1.0 + headroom)
}
