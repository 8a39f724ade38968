//! The settings of flow control. The reader of configuration files turns the section `flowControl`
//! into this plugin.

use super::settings::{FlowSettings, SECTION};
use super::{FairnessPolicy, OrderingPolicy, UsageLimitPolicy, fairness, ordering, usage_limit};
use crate::plugin::{InvalidParameter, ParameterValue, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

/// The name of the plugin. Configuration files do not declare the plugin by this name.
pub const FLOW_CONTROL: &str = "flow-control";

pub(crate) const PLUGIN: PluginType = PluginType {
    name: FLOW_CONTROL,
    kind: PluginKind::FlowControl,
    doc: readable(
        "The section flowControl: requests wait in the proxy until an endpoint has room for them.",
    ),
    source: readable("llm-d-router, flowcontrol"),
    parameters: SECTION,
    needs: &[],
    build: |parameters| {
        Ok(Plugin::FlowControl(Box::new(FlowSettings::read(
            parameters,
        )?)))
    },
};

/// The policies of a pipeline, by name.
#[derive(Debug, Default)]
pub(crate) struct Policies {
    pub(crate) fairness: Vec<(Box<str>, Box<dyn FairnessPolicy>)>,
    pub(crate) ordering: Vec<(Box<str>, Box<dyn OrderingPolicy>)>,
    pub(crate) usage_limit: Vec<(Box<str>, Box<dyn UsageLimitPolicy>)>,
}

/// Flow control of a pipeline: the settings, and the policies that the settings name.
#[derive(Debug)]
pub struct FlowControl {
    settings: FlowSettings,
    policies: Policies,
}

#[derive(Clone, Copy, Debug)]
pub struct BandRules<'f> {
    /// The maximum number of queued requests of the band.
    pub max_requests: u64,
    /// The maximum total size of the queued requests of the band, in bytes.
    pub max_bytes: u64,
    pub ttl_ms: u64,
    /// The policy that chooses the flow that is served next.
    pub fairness: &'f (dyn FairnessPolicy + 'static),
    /// The policy that orders the requests of a flow.
    pub ordering: &'f (dyn OrderingPolicy + 'static),
}

// === impl Policies ===

impl Policies {
    /// Adds the policies that apply even if they are not declared.
    fn add_defaults(&mut self, minimum_share: f64) -> Result<(), InvalidParameter> {
        let share = [(
            fairness::MINIMUM_SHARE.name.to_owned(),
            ParameterValue::Number(minimum_share),
        )];
        if let Plugin::Fairness(policy) = fairness::TOKENS.build(&share)? {
            self.fairness.push((fairness::TOKENS.name.into(), policy));
        }
        for plugin in [
            &fairness::STRICT,
            &fairness::ROUND_ROBIN,
            &fairness::LEAST_SERVICE,
            &fairness::LEAST_SERVICE_POLICY,
        ] {
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
            self.usage_limit
                .push((usage_limit::STATIC.name.into(), policy));
        }
        Ok(())
    }
}

// === impl FlowControl ===

impl FlowControl {
    /// Looks up each policy that the settings name among the declared and the default policies.
    ///
    /// # Errors
    /// Fails if a policy does not exist, and returns its kind and name.
    pub(crate) fn build(
        settings: FlowSettings,
        mut policies: Policies,
    ) -> Result<Self, (&'static str, String)> {
        policies
            .add_defaults(settings.minimum_share)
            .map_err(|_| ("policy", String::new()))?;
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

    #[inline(never)] // several callers, and the wasm module should be small
    pub fn band(&self, priority: i32) -> Option<BandRules<'_>> {
        let [default, negative] = &self.settings.templates;
        let template = if priority < 0 { negative } else { default };
        let band = self
            .settings
            .bands
            .iter()
            .find(|band| band.priority == priority)
            .unwrap_or(template);
        Some(BandRules {
            max_requests: band.max_requests,
            max_bytes: band.max_bytes,
            ttl_ms: band.ttl_ms.unwrap_or(self.settings.ttl_ms),
            fairness: named(&self.policies.fairness, &band.fairness)?,
            ordering: named(&self.policies.ordering, &band.ordering)?,
        })
    }

    /// Returns the maximum number of requests, and of bytes, in all queues together.
    pub fn limits(&self) -> (u64, u64) {
        (self.settings.max_requests, self.settings.max_bytes)
    }

    /// Returns the maximum wait of a request while no endpoint is ready, in ms. With 0, a request
    /// is refused immediately if no endpoint is ready.
    pub fn no_endpoint_ttl_ms(&self) -> u64 {
        self.settings.no_endpoint_ttl_ms
    }

    /// Returns the maximum wait of a request over all bands, in ms.
    pub fn longest_wait_ms(&self) -> u64 {
        let of_bands = self
            .settings
            .all_bands()
            .filter_map(|band| band.ttl_ms)
            .max();
        of_bands.map_or(self.settings.ttl_ms, |ttl_ms| {
            ttl_ms.max(self.settings.ttl_ms)
        })
    }

    /// Whether running requests are aborted for waiting requests of higher priority.
    pub fn evicts(&self) -> bool {
        self.settings.eviction
    }

    /// Returns the policy that says how much of the pool a band may fill.
    pub fn usage_limit(&self) -> Option<&dyn UsageLimitPolicy> {
        named(&self.policies.usage_limit, &self.settings.usage_limit)
    }
}

/// Returns the policy with this name. A declared policy has precedence over a default policy.
fn named<'p, P: ?Sized>(policies: &'p [(Box<str>, Box<P>)], name: &str) -> Option<&'p P> {
    policies
        .iter()
        .find(|(known, _)| **known == *name)
        .map(|(_, policy)| &**policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(given: &[(&str, ParameterValue)]) -> Result<FlowSettings, InvalidParameter> {
        let given: Vec<_> = given
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        match PLUGIN.build(&given)? {
            Plugin::FlowControl(settings) => Ok(*settings),
            other => panic!("{other:?}"),
        }
    }

    fn band(priority: f64, more: &[(&str, ParameterValue)]) -> ParameterValue {
        let mut entries = vec![("priority".to_owned(), ParameterValue::Number(priority))];
        entries.extend(
            more.iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone())),
        );
        ParameterValue::Map(entries)
    }

    #[test]
    fn bands_that_are_not_listed_follow_a_template() {
        let number = ParameterValue::Number;
        let bands = ParameterValue::List(vec![band(
            100.0,
            &[("maxRequests", number(7.0)), ("ttlMs", number(5.0))],
        )]);
        let negative = ParameterValue::Map(vec![("maxRequests".to_owned(), number(3.0))]);
        let settings = settings(&[
            ("bands", bands),
            ("defaultNegativeBand", negative),
            ("ttlMs", number(0.0)),
        ])
        .unwrap();
        let control = FlowControl::build(settings, Policies::default()).unwrap();
        let rules = |priority| {
            control
                .band(priority)
                .map(|rules| (rules.max_requests, rules.max_bytes, rules.ttl_ms))
        };
        assert_eq!(rules(100), Some((7, 1_000_000_000, 5)));
        assert_eq!(
            rules(1),
            Some((5_000, 1_000_000_000, u64::MAX)),
            "0s is no limit"
        );
        assert_eq!(rules(-1), Some((3, 1_000_000_000, u64::MAX)));
        assert_eq!(control.limits(), (u64::MAX, u64::MAX));
        assert_eq!(
            (control.no_endpoint_ttl_ms(), control.longest_wait_ms()),
            (0, u64::MAX)
        );
        assert_eq!(control.band(0).unwrap().fairness.minimum_share(), 0.05);
    }

    #[test]
    fn the_longest_wait_is_that_of_the_section_or_a_band_and_none_is_for_the_first_endpoint() {
        let number = |ms| ParameterValue::Number(ms);
        let bands = || {
            ParameterValue::List(vec![
                band(1.0, &[("ttlMs", number(90_000.0))]),
                band(2.0, &[("ttlMs", number(5.0))]),
            ])
        };
        for (given, expected) in [
            (vec![], (0, 60_000)),
            (vec![("bands", bands())], (0, 90_000)),
            (
                vec![
                    ("bands", bands()),
                    ("ttlMs", number(100_000.0)),
                    ("noEndpointTtlMs", number(7.0)),
                ],
                (7, 100_000),
            ),
            (vec![("noEndpointTtlMs", number(0.0))], (0, 60_000)),
        ] {
            let control =
                FlowControl::build(settings(&given).unwrap(), Policies::default()).unwrap();
            assert_eq!(
                (control.no_endpoint_ttl_ms(), control.longest_wait_ms()),
                expected,
                "{given:?}"
            );
        }
    }

    #[test]
    fn the_minimum_share_of_the_section_is_that_of_the_undeclared_policy() {
        let settings = settings(&[("minimumShare", ParameterValue::Number(0.0))]).unwrap();
        let control = FlowControl::build(settings, Policies::default()).unwrap();
        assert_eq!(control.band(0).unwrap().fairness.minimum_share(), 0.0);
    }

    #[test]
    fn a_band_twice_or_an_unknown_policy_is_refused() {
        let twice = ParameterValue::List(vec![band(1.0, &[]), band(1.0, &[])]);
        assert!(matches!(
            settings(&[("bands", twice)]),
            Err(InvalidParameter::OutOfRange { .. })
        ));
        let odd = ParameterValue::List(vec![band(
            1.0,
            &[("fairness", ParameterValue::Text("fair".into()))],
        )]);
        let refused = FlowControl::build(settings(&[("bands", odd)]).unwrap(), Policies::default())
            .unwrap_err();
        assert_eq!(refused, ("fairness policy", "fair".to_owned()));
    }
}
