//! Saturation detectors: how full the pool is and, used as filters, which endpoints are full.
//!
//! **Unknown is not full.** llm-d counts an endpoint with missing or old metrics as saturated, so
//! that one late scrape stops a pool. Here it is left out of the mean and stays a candidate.

pub(crate) mod backlog;
pub(crate) mod concurrency;
pub(crate) mod utilization;

use crate::plugin::{
    InvalidParameter, PRODUCER_NAME, Parameter, ParameterDefault, Parameters, readable,
};

const HEADROOM: Parameter = Parameter {
    name: "headroom",
    default: ParameterDefault::Number(0.0),
    doc: readable(
        "as a filter: how far an endpoint may exceed the thresholds, as a share of them, 0 or more",
    ),
};

const IN_FLIGHT_PRODUCER: Parameter = Parameter {
    name: "inFlightLoadProducerName",
    ..PRODUCER_NAME
};

/// The headroom as a factor of the threshold.
fn relaxed(parameters: &Parameters<'_>) -> Result<f32, InvalidParameter> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "within the range of an f32"
    )]
    let headroom = parameters.number(HEADROOM.name, 0.0..=1e6)? as f32;
    Ok(1.0 + headroom)
}
