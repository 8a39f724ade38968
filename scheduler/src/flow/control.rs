//! The settings of flow control: the section `flowControl` of a configuration, as a plugin that
//! the reader of the file makes of it.

use super::{FairnessPolicy, OrderingPolicy, UsageLimitPolicy, fairness, ordering, usage_limit};
use crate::plugin::{InvalidParameter, Parameter, ParameterDefault, Parameters, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

/// The name of the plugin. Files do not declare it.
pub const FLOW_CONTROL: &str = "flow-control";

/// The most bands of a configuration. Every release goes through them.
const BANDS_MAX: usize = 32;

/// Requests and bytes that a band holds at most, where the file sets no limit: llm-d's defaults.
const BAND_REQUESTS: f64 = 5_000.0;
const BAND_BYTES: f64 = 1e9;

/// The longest TTL, in ms: one day, which no proxy waits for.
const TTL_MS_MAX: f64 = 86_400_000.0;

/// How long a request waits by default, in ms: llm-d's default.
const TTL_MS: f64 = 60_000.0;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: FLOW_CONTROL,
    kind: PluginKind::FlowControl,
    doc: readable("The section flowControl: requests wait in the proxy until an endpoint has room for them."),
    source: readable("llm-d-router, flowcontrol"),
    parameters: &[
        Parameter { name: "maxRequests", default: ParameterDefault::Number(0.0), doc: readable("requests held in all; 0: no limit") },
        Parameter { name: "maxBytes", default: ParameterDefault::Number(0.0), doc: readable("bytes of bodies held in all; 0: no limit") },
        Parameter { name: "ttlMs", default: ParameterDefault::Number(TTL_MS), doc: readable("longest wait, ms; 0: no limit") },
        Parameter {
            name: "noEndpointTtlMs",
            default: ParameterDefault::Number(TTL_MS),
            doc: readable("longest wait while no endpoint is ready, ms; 0: no limit"),
        },
        Parameter { name: "usageLimit", default: ParameterDefault::Text(usage_limit::STATIC.name), doc: readable("usage limit policy") },
        Parameter { name: "defaultBand", default: ParameterDefault::Structured("{maxRequests, ...}"), doc: readable("other bands") },
        Parameter {
            name: "defaultNegativeBand",
            default: ParameterDefault::Structured("{maxRequests, ...}"),
            doc: readable("other bands of negative priority"),
        },
        Parameter { name: "bands", default: ParameterDefault::Structured("[{priority, ...}]"), doc: readable("the bands by priority") },
    ],
    needs: &[],
    build: |parameters| Ok(Plugin::FlowControl(Box::new(FlowSettings::read(parameters)?))),
};

const BAND: &[Parameter] = &[
    Parameter { name: "priority", default: ParameterDefault::Number(0.0), doc: readable("whole number") },
    Parameter { name: "maxRequests", default: ParameterDefault::Number(0.0), doc: readable("requests held; 0: the default") },
    Parameter { name: "maxBytes", default: ParameterDefault::Number(0.0), doc: readable("bytes held; 0: the default") },
    Parameter { name: "ttlMs", default: ParameterDefault::Number(-1.0), doc: readable("longest wait, ms; 0: no limit; -1: as above") },
    Parameter { name: "fairness", default: ParameterDefault::Text(fairness::TOKENS.name), doc: readable("fairness policy") },
    Parameter { name: "ordering", default: ParameterDefault::Text(ordering::FCFS.name), doc: readable("ordering policy") },
];

/// The section as given; policies by name.
#[derive(Debug)]
pub struct FlowSettings {
    max_requests: u64,
    max_bytes: u64,
    ttl_ms: u64,
    no_endpoint_ttl_ms: u64,
    usage_limit: Box<str>,
    /// The templates of bands that are not listed: from priority 0, and below.
    templates: [BandSettings; 2],
    bands: Vec<BandSettings>,
}

#[derive(Clone, Debug)]
struct BandSettings {
    priority: i32,
    max_requests: u64,
    max_bytes: u64,
    /// `None`: that of the section.
    ttl_ms: Option<u64>,
    fairness: Box<str>,
    ordering: Box<str>,
}

/// The policies of a pipeline, by name.
#[derive(Debug, Default)]
pub(crate) struct Policies {
    pub(crate) fairness: Vec<(Box<str>, Box<dyn FairnessPolicy>)>,
    pub(crate) ordering: Vec<(Box<str>, Box<dyn OrderingPolicy>)>,
    pub(crate) usage_limit: Vec<(Box<str>, Box<dyn UsageLimitPolicy>)>,
}

/// Flow control of a pipeline: the settings and their policies.
#[derive(Debug)]
pub struct FlowControl {
    settings: FlowSettings,
    policies: Policies,
}

/// The rules of one band.
#[derive(Clone, Copy, Debug)]
pub struct BandRules<'f> {
    /// The most requests held.
    pub max_requests: u64,
    /// The most bytes held.
    pub max_bytes: u64,
    /// The longest wait, in ms.
    pub ttl_ms: u64,
    /// Chooses the flow.
    pub fairness: &'f (dyn FairnessPolicy + 'static),
    /// Orders a flow.
    pub ordering: &'f (dyn OrderingPolicy + 'static),
}

/// Reads a limit; 0 is `zero`.
fn limit(parameters: &Parameters<'_>, name: &str, zero: f64) -> Result<u64, InvalidParameter> {
    let given = parameters.number(name, 0.0..=1e18)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within 0 and 1e18, or saturating")]
    let whole = (if given > 0.0 { given } else { zero }) as u64;
    Ok(whole)
}

/// Reads a TTL; 0 is none.
fn ttl(parameters: &Parameters<'_>, name: &str) -> Result<u64, InvalidParameter> {
    parameters.number(name, 0.0..=TTL_MS_MAX)?;
    limit(parameters, name, f64::INFINITY)
}

// === impl FlowSettings ===

impl FlowSettings {
    fn read(parameters: &Parameters<'_>) -> Result<Self, InvalidParameter> {
        let template = |name: &str| Ok(parameters.nested(name, BAND, BandSettings::read)?.map_or_else(BandSettings::by_default, Ok)?);
        let default = template("defaultBand")?;
        let negative = match parameters.structured("defaultNegativeBand")? {
            Some(_) => template("defaultNegativeBand")?,
            None => default.clone(),
        };
        let bands = parameters.each("bands", BAND, BandSettings::read)?;
        let twice = bands.iter().enumerate().any(|(at, band)| bands.iter().skip(at + 1).any(|other| other.priority == band.priority));
        if twice || bands.len() > BANDS_MAX {
            return Err(parameters.out_of_range("bands"));
        }
        Ok(Self {
            max_requests: limit(parameters, "maxRequests", f64::INFINITY)?,
            max_bytes: limit(parameters, "maxBytes", f64::INFINITY)?,
            ttl_ms: ttl(parameters, "ttlMs")?,
            no_endpoint_ttl_ms: ttl(parameters, "noEndpointTtlMs")?,
            usage_limit: parameters.text("usageLimit")?.into(),
            templates: [default, negative],
            bands,
        })
    }

    fn all_bands(&self) -> impl Iterator<Item = &BandSettings> {
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
        let ttl_ms = if parameters.number("ttlMs", -1.0..=TTL_MS_MAX)? < 0.0 { None } else { Some(ttl(parameters, "ttlMs")?) };
        #[expect(clippy::cast_possible_truncation, reason = "whole, and within the range of i32")]
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

// === impl Policies ===

impl Policies {
    /// Adds the policies that apply without being declared.
    fn add_defaults(&mut self) -> Result<(), InvalidParameter> {
        for plugin in [&fairness::TOKENS, &fairness::STRICT, &fairness::ROUND_ROBIN, &fairness::LEAST_SERVICE, &fairness::LEAST_SERVICE_POLICY]
        {
            if let Plugin::Fairness(policy) = plugin.build(&[])? {
                self.fairness.push((plugin.name.into(), policy));
            }
        }
        for plugin in [&ordering::FCFS, &ordering::EDF, &ordering::SLO_DEADLINE] {
            if let Plugin::Ordering(policy) = plugin.build(&[])? {
                self.ordering.push((plugin.name.into(), policy));
            }
        }
        if let Plugin::UsageLimit(policy) = usage_limit::STATIC.build(&[])? {
            self.usage_limit.push((usage_limit::STATIC.name.into(), policy));
        }
        Ok(())
    }
}

// === impl FlowControl ===

impl FlowControl {
    /// Finds the policies of the settings among the declared ones and the defaults.
    ///
    /// # Errors
    /// The kind and the name of a policy that does not exist.
    pub(crate) fn build(settings: FlowSettings, mut policies: Policies) -> Result<Self, (&'static str, String)> {
        policies.add_defaults().map_err(|_| ("policy", String::new()))?;
        for band in settings.all_bands() {
            if named(&policies.fairness, &band.fairness).is_none() {
                return Err(("fairness policy", band.fairness.to_string()));
            }
            if named(&policies.ordering, &band.ordering).is_none() {
                return Err(("ordering policy", band.ordering.to_string()));
            }
        }
        match named(&policies.usage_limit, &settings.usage_limit) {
            None => Err(("usage limit policy", settings.usage_limit.to_string())),
            Some(_) => Ok(Self { settings, policies }),
        }
    }

    /// The rules of the band of this priority.
    #[must_use]
    pub fn band(&self, priority: i32) -> Option<BandRules<'_>> {
        let [default, negative] = &self.settings.templates;
        let template = if priority < 0 { negative } else { default };
        let band = self.settings.bands.iter().find(|band| band.priority == priority).unwrap_or(template);
        Some(BandRules {
            max_requests: band.max_requests,
            max_bytes: band.max_bytes,
            ttl_ms: band.ttl_ms.unwrap_or(self.settings.ttl_ms),
            fairness: named(&self.policies.fairness, &band.fairness)?,
            ordering: named(&self.policies.ordering, &band.ordering)?,
        })
    }

    /// The most requests and bytes held in all.
    #[must_use]
    pub fn limits(&self) -> (u64, u64) {
        (self.settings.max_requests, self.settings.max_bytes)
    }

    /// The longest wait while no endpoint is ready, in ms.
    #[must_use]
    pub fn no_endpoint_ttl_ms(&self) -> u64 {
        self.settings.no_endpoint_ttl_ms
    }

    /// Says how much of the pool a band may fill.
    #[must_use]
    pub fn usage_limit(&self) -> Option<&dyn UsageLimitPolicy> {
        named(&self.policies.usage_limit, &self.settings.usage_limit)
    }
}

/// The policy of that name; a declared one goes before a default.
fn named<'p, P: ?Sized>(policies: &'p [(Box<str>, Box<P>)], name: &str) -> Option<&'p P> {
    policies.iter().find(|(known, _)| **known == *name).map(|(_, policy)| &**policy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::ParameterValue;

    fn settings(given: &[(&str, ParameterValue)]) -> Result<FlowSettings, InvalidParameter> {
        let given: Vec<_> = given.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        match PLUGIN.build(&given)? {
            Plugin::FlowControl(settings) => Ok(*settings),
            other => panic!("{other:?}"),
        }
    }

    fn band(priority: f64, more: &[(&str, ParameterValue)]) -> ParameterValue {
        let mut entries = vec![("priority".to_owned(), ParameterValue::Number(priority))];
        entries.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        ParameterValue::Map(entries)
    }

    #[test]
    fn bands_that_are_not_listed_follow_a_template() {
        let number = ParameterValue::Number;
        let bands = ParameterValue::List(vec![band(100.0, &[("maxRequests", number(7.0)), ("ttlMs", number(5.0))])]);
        let negative = ParameterValue::Map(vec![("maxRequests".to_owned(), number(3.0))]);
        let settings = settings(&[("bands", bands), ("defaultNegativeBand", negative), ("ttlMs", number(0.0))]).unwrap();
        let control = FlowControl::build(settings, Policies::default()).unwrap();
        let rules = |priority| control.band(priority).map(|rules| (rules.max_requests, rules.max_bytes, rules.ttl_ms));
        assert_eq!(rules(100), Some((7, 1_000_000_000, 5)));
        assert_eq!(rules(1), Some((5_000, 1_000_000_000, u64::MAX)), "0s is no limit");
        assert_eq!(rules(-1), Some((3, 1_000_000_000, u64::MAX)));
        assert_eq!(control.limits(), (u64::MAX, u64::MAX));
        assert_eq!(control.band(0).unwrap().fairness.minimum_share(), 0.05);
    }

    #[test]
    fn a_band_twice_or_an_unknown_policy_is_refused() {
        let twice = ParameterValue::List(vec![band(1.0, &[]), band(1.0, &[])]);
        assert!(matches!(settings(&[("bands", twice)]), Err(InvalidParameter::OutOfRange { .. })));
        let odd = ParameterValue::List(vec![band(1.0, &[("fairness", ParameterValue::Text("fair".into()))])]);
        let refused = FlowControl::build(settings(&[("bands", odd)]).unwrap(), Policies::default()).unwrap_err();
        assert_eq!(refused, ("fairness policy", "fair".to_owned()));
    }
}
