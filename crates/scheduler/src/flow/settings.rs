//! The settings of flow control as the configuration gives them. The settings refer to policies by
//! name.

use crate::plugin::{InvalidParameter, Parameter, Parameters};

/// The fairness policy of bands that do not name a fairness policy. The constants below are the
/// default ordering policy of bands, and the default usage limit policy of pools.
pub(crate) const FAIRNESS_DEFAULT: &str = "token-fairness-policy";
pub(crate) const ORDERING_DEFAULT: &str = "fcfs-ordering-policy";
pub(crate) const USAGE_LIMIT_DEFAULT: &str = "static-usage-limit-policy";

/// The maximum number of bands of a configuration. The number is limited, because all bands are
/// searched each time a queued request is sent.
const BANDS_MAX: usize = 32;

/// The default limit of the number of requests that a band holds. [`BAND_BYTES`] is the default
/// limit of their bytes. Both are llm-d's defaults.
const BAND_REQUESTS: f64 = 5_000.0;
const BAND_BYTES: f64 = 1e9;

/// The maximum TTL, in ms: one day, longer than a proxy waits.
const TTL_MS_MAX: f64 = 86_400_000.0;

/// The default of the maximum wait of a request, in ms, which is llm-d's default.
const TTL_MS: f64 = 60_000.0;

pub(super) const SECTION: &[Parameter] = &[
    Parameter::number("maxRequests", 0.0, "requests held in all; 0: no limit"),
    Parameter::number("maxBytes", 0.0, "bytes of bodies held in all; 0: no limit"),
    Parameter::number("ttlMs", TTL_MS, "longest wait, ms; 0: no limit"),
    Parameter::number(
        "noEndpointTtlMs",
        0.0,
        "longest wait while no endpoint is ready, ms; 0: none, 503 at once",
    ),
    Parameter::text("usageLimit", USAGE_LIMIT_DEFAULT, "usage limit policy"),
    Parameter::number(
        "minimumShare",
        super::fairness::MINIMUM_SHARE_DEFAULT,
        "minimumShare of token-fairness-policy where it is not declared, 0 to 0.5",
    ),
    Parameter::structured("defaultBand", "{maxRequests, ...}", "other bands"),
    Parameter::structured(
        "defaultNegativeBand",
        "{maxRequests, ...}",
        "other bands of negative priority",
    ),
    Parameter::flag(
        "eviction",
        false,
        "running requests of negative priority are given up before their first byte, for requests of higher priority that wait",
    ),
    Parameter::structured("bands", "[{priority, ...}]", "the bands by priority"),
];

const BAND: &[Parameter] = &[
    Parameter::number("priority", 0.0, "whole number"),
    Parameter::number("maxRequests", 0.0, "requests held; 0: the default"),
    Parameter::number("maxBytes", 0.0, "bytes held; 0: the default"),
    Parameter::number("ttlMs", -1.0, "longest wait, ms; 0: no limit; -1: as above"),
    Parameter::text("fairness", FAIRNESS_DEFAULT, "fairness policy"),
    Parameter::text("ordering", ORDERING_DEFAULT, "ordering policy"),
];

/// The section `flowControl` as the configuration gives it. The section refers to policies by name.
#[derive(Debug)]
pub struct FlowSettings {
    pub(super) max_requests: u64,
    pub(super) max_bytes: u64,
    pub(super) ttl_ms: u64,
    /// The maximum wait while no endpoint is ready, in ms. With 0, requests do not wait if no
    /// endpoint is ready.
    pub(super) no_endpoint_ttl_ms: u64,
    pub(super) usage_limit: Box<str>,
    pub(super) minimum_share: f64,
    pub(super) eviction: bool,
    /// The settings of bands that are not in the list: first for priorities from 0 on, then for
    /// priorities below 0.
    pub(super) templates: [BandSettings; 2],
    pub(super) bands: Vec<BandSettings>,
}

#[derive(Clone, Debug)]
pub(super) struct BandSettings {
    pub(super) priority: i32,
    pub(super) max_requests: u64,
    pub(super) max_bytes: u64,
    /// The maximum wait of the band's requests, in ms. `None` means the TTL of the section.
    pub(super) ttl_ms: Option<u64>,
    pub(super) fairness: Box<str>,
    pub(super) ordering: Box<str>,
}

/// Reads a limit, and returns `zero` for the value 0.
fn limit(parameters: &Parameters<'_>, name: &str, zero: f64) -> Result<u64, InvalidParameter> {
    let given = parameters.number(name, 0.0..=1e18)?;
    // The cast is safe: the number is at most 1e18, or an infinite `zero`, for which the cast
    // saturates.
    let whole = (if given > 0.0 { given } else { zero }) as u64;
    Ok(whole)
}

/// Reads a TTL in ms; 0 means no limit.
fn ttl(parameters: &Parameters<'_>, name: &str) -> Result<u64, InvalidParameter> {
    parameters.number(name, 0.0..=TTL_MS_MAX)?;
    limit(parameters, name, f64::INFINITY)
}

/// Reads the maximum wait while no endpoint is ready, in ms; 0 means no wait.
fn no_endpoint_ttl(parameters: &Parameters<'_>) -> Result<u64, InvalidParameter> {
    parameters.number("noEndpointTtlMs", 0.0..=TTL_MS_MAX)?;
    limit(parameters, "noEndpointTtlMs", 0.0)
}

// === impl FlowSettings ===

impl FlowSettings {
    pub(super) fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        let template = |name: &str| {
            parameters
                .nested(name, BAND, BandSettings::read)?
                .map_or_else(BandSettings::by_default, Ok)
        };
        let default = template("defaultBand")?;
        let negative = match parameters.structured("defaultNegativeBand")? {
            Some(_) => template("defaultNegativeBand")?,
            None => default.clone(),
        };
        let bands = parameters.each("bands", BAND, BandSettings::read)?;
        let twice = bands.iter().enumerate().any(|(at, band)| {
            bands
                .iter()
                .skip(at + 1)
                .any(|other| other.priority == band.priority)
        });
        if twice || bands.len() > BANDS_MAX {
            return Err(parameters.out_of_range("bands"));
        }
        Ok(Self {
            max_requests: limit(parameters, "maxRequests", f64::INFINITY)?,
            max_bytes: limit(parameters, "maxBytes", f64::INFINITY)?,
            ttl_ms: ttl(parameters, "ttlMs")?,
            no_endpoint_ttl_ms: no_endpoint_ttl(parameters)?,
            usage_limit: parameters.text("usageLimit")?.into(),
            minimum_share: parameters.number("minimumShare", 0.0..=0.5)?,
            eviction: parameters.flag("eviction")?,
            templates: [default, negative],
            bands,
        })
    }

    pub(super) fn all_bands(&self) -> impl Iterator<Item = &BandSettings> {
        self.bands.iter().chain(&self.templates)
    }
}

// === impl BandSettings ===

impl BandSettings {
    fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        let priority = parameters.number("priority", f64::from(i32::MIN)..=f64::from(i32::MAX))?;
        if priority.fract() != 0.0 {
            return Err(parameters.out_of_range("priority"));
        }
        let ttl_ms = if parameters.number("ttlMs", -1.0..=TTL_MS_MAX)? < 0.0 {
            None
        } else {
            Some(ttl(parameters, "ttlMs")?)
        };
        // The cast changes nothing, because the priority is whole and within the range of i32.
        let priority = priority as i32;
        Ok(Self {
            priority,
            max_requests: limit(parameters, "maxRequests", BAND_REQUESTS)?,
            max_bytes: limit(parameters, "maxBytes", BAND_BYTES)?,
            ttl_ms,
            fairness: parameters.text("fairness")?.into(),
            ordering: parameters.text("ordering")?.into(),
        })
    }

    fn by_default() -> Result<Self, InvalidParameter> {
        Self::read(&Parameters::check(BAND, &[])?)
    }
}
