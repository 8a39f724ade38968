//! The parameters with which plugins name a producer.

use super::parameters::{InvalidParameter, Parameter, Parameters};

/// Declares the parameter that names the producer of a plugin's data. Switchpoint has exactly one
/// producer of each kind, declared or not, so the name has no effect.
pub(crate) const fn producer_name(name: &'static str) -> Parameter {
    Parameter::text(
        name,
        "",
        "no effect: each producer exists once, declared or not",
    )
}

/// The parameter that names the producer of endpoint attributes.
pub(crate) const METRICS_EXTRACTOR: Parameter = Parameter::text(
    "producer",
    "",
    "core-metrics-extractor or empty: no other plugin produces attributes",
);

/// Reads the key of an attribute. A key with a slash is the older spelling `KEY/PRODUCER`, which
/// would match nothing. A key with a slash is refused unless the configuration names the producer
/// separately.
pub(crate) fn attribute_key(
    parameters: &Parameters<'_>,
    name: &str,
) -> Result<Box<str>, InvalidParameter> {
    let said = parameters.choice(
        METRICS_EXTRACTOR.name,
        &[("", false), ("core-metrics-extractor", true)],
    )?;
    let key = parameters.text(name)?;
    if key.contains('/') && !said {
        Err(parameters.out_of_range(name))
    } else {
        Ok(key.into())
    }
}
