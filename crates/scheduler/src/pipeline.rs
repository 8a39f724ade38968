//! The pipeline that schedules the requests of a pool: the declared plugins, the profiles made of
//! these plugins, and the handler that chooses profiles.

mod profile;
mod spec;

pub use spec::{
    InvalidPipeline, PLUGINS_MAX, PROFILES_MAX, PipelineSpec, PluginSpec, ProfilePlugin,
    ProfileSpec, WEIGHT_MAX,
};

use crate::decision::{Route, ShedReason};
use crate::detector::{backlog, utilization::UtilizationDetector};
use crate::endpoint::EndpointIndex;
use crate::flow::{FlowControl, FlowSettings, Policies, RoomLimits};
use crate::handler::single;
use crate::plugin::{Admitter, Context, Detector};
use crate::registry::{Plugin, PluginKind, lookup};
use crate::rng::Rng;
use crate::run::{ProfileHandler, Profiles, Reference, Stage};
use crate::session::SessionToken;
use crate::settings::{LatencySettings, ProducerSettings};
use spec::{check_size, no_such};

/// A pipeline, validated when it is built.
#[derive(Debug)]
pub struct Pipeline {
    profiles: Profiles,
    handler: Box<dyn ProfileHandler>,
    detector: Box<dyn Detector>,
    admitters: Vec<Box<dyn Admitter>>,
    flow_control: Option<FlowControl>,
    production: ProducerSettings,
    headers: Vec<Box<str>>,
    session_tokens: Vec<SessionToken>,
    predicts: bool,
    /// The types of the declared parsers.
    parsers: Vec<&'static str>,
}

/// The header with the id of a request, which lists of running requests show.
pub const REQUEST_ID: &str = "x-request-id";

/// The headers with the fairness id of a request, by the current and the older name. The picker
/// reads these headers only where the operator trusts them.
pub const FAIRNESS_ID: [&str; 2] = [
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
];

// === impl Pipeline ===

impl Pipeline {
    /// Looks up every plugin, checks its parameters, builds it and resolves all references.
    ///
    /// # Errors
    /// Returns [`InvalidPipeline`], which names the first error. The operator has to change the
    /// configuration.
    pub fn build(spec: &PipelineSpec) -> Result<Self, InvalidPipeline> {
        check_size(spec)?;
        let built_in = |error| InvalidPipeline::Parameter {
            plugin: "built in".to_owned(),
            error,
        };
        let mut pipeline = Self {
            profiles: Profiles::new(
                spec.profiles
                    .iter()
                    .map(|profile| profile::build(profile, spec))
                    .collect::<Result<_, _>>()?,
            ),
            handler: Box::new(single::SingleProfileHandler),
            detector: Box::new(UtilizationDetector::with_defaults().map_err(built_in)?),
            admitters: Vec::new(),
            flow_control: None,
            production: ProducerSettings::with_defaults().map_err(built_in)?,
            headers: Vec::new(),
            session_tokens: Vec::new(),
            predicts: spec.latency_prediction,
            parsers: Vec::new(),
        };
        let mut settings = None;
        let mut policies = Policies::default();
        for plugin in &spec.plugins {
            match plugin.build()?.0 {
                Plugin::FlowControl(given) => settings = Some(*given),
                Plugin::Fairness(policy) => policies.fairness.push((plugin.name().into(), policy)),
                Plugin::Ordering(policy) => policies.ordering.push((plugin.name().into(), policy)),
                Plugin::UsageLimit(policy) => {
                    policies.usage_limit.push((plugin.name().into(), policy));
                }
                built => pipeline.declare(plugin.name(), built, spec),
            }
        }
        if let Some(settings) = settings {
            pipeline.hold_requests(settings, policies, spec)?;
        }
        let identity = pipeline.production.identity.headers.clone();
        pipeline.read_headers(&identity);
        if spec.latency_prediction || pipeline.flow_control().is_some() {
            pipeline.read_headers(&[REQUEST_ID.into()]);
        }
        pipeline.check_references(spec)?;
        Ok(pipeline)
    }

    /// Adds a plugin that works without a profile: as soon as it is declared, or if the pipeline
    /// names it. Of other plugins, records only the headers, because each profile has separate
    /// instances of its plugins.
    fn declare(&mut self, name: &str, built: Plugin, spec: &PipelineSpec) {
        let (built, headers) = built.split();
        self.read_headers(&headers.read);
        if let Some(token) = headers
            .session_token
            .filter(|token| !self.session_tokens.contains(token))
        {
            self.session_tokens.push(token);
        }
        match built {
            Plugin::ProfileHandler(handler) if name == spec.profile_handler => {
                self.handler = handler;
            }
            Plugin::Detector(detector) if name == spec.saturation_detector => {
                self.detector = detector;
            }
            Plugin::Decider(decider) => self.profiles.add_decider(name, decider),
            Plugin::Admitter(admitter) => self.admitters.push(admitter),
            Plugin::Producer(producer) => self.production.set(producer),
            Plugin::Parser(parser) => self.parsers.push(parser),
            _ => {}
        }
    }

    /// Turns flow control on. If no detector is declared, uses the backlog detector.
    fn hold_requests(
        &mut self,
        settings: FlowSettings,
        policies: Policies,
        spec: &PipelineSpec,
    ) -> Result<(), InvalidPipeline> {
        let built = FlowControl::build(settings, policies);
        self.flow_control =
            Some(built.map_err(|(kind, name)| no_such(kind, &name, "flow control"))?);
        if spec.saturation_detector.is_empty() {
            let built_in = |error| InvalidPipeline::Parameter {
                plugin: "built in".to_owned(),
                error,
            };
            if let Plugin::Detector(detector) = backlog::PLUGIN.build(&[]).map_err(built_in)? {
                self.detector = detector;
            }
        }
        self.read_headers(&FAIRNESS_ID.map(Into::into));
        Ok(())
    }

    /// Returns flow control; `None` if it is off.
    pub fn flow_control(&self) -> Option<&FlowControl> {
        self.flow_control.as_ref()
    }

    /// Returns [`crate::plugin::Detector::requests_max`]; `None` without flow control.
    pub fn requests_max(&self) -> Option<f64> {
        self.flow_control
            .as_ref()
            .and_then(|_| self.detector.requests_max())
    }

    pub(crate) fn has_room(
        &self,
        context: &Context<'_>,
        route: &Route,
        limits: RoomLimits,
    ) -> bool {
        self.detector.has_room(context, route, limits)
    }

    /// Whether a request must have room at its picked endpoint; otherwise, room somewhere in the
    /// pool is enough.
    pub fn needs_room_at_endpoint(&self) -> bool {
        self.detector.is_per_endpoint()
    }

    pub(crate) fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64 {
        self.detector.saturation(context, endpoints)
    }

    /// Whether the pipeline reads requests of the API of this parser. Without a declared parser,
    /// the pipeline reads all APIs.
    pub fn reads(&self, parser: &str) -> bool {
        self.parsers.is_empty() || self.parsers.contains(&parser)
    }

    /// Returns the lower-case names of the request headers that the pipeline reads.
    /// [`crate::Request::headers`] needs no other headers.
    pub fn headers(&self) -> &[Box<str>] {
        &self.headers
    }

    /// Returns the settings of declared producers, and the default settings of other producers.
    pub fn production(&self) -> &ProducerSettings {
        &self.production
    }

    /// Returns the response headers that name an endpoint to the client, which sends the name back.
    pub fn session_tokens(&self) -> &[SessionToken] {
        &self.session_tokens
    }

    /// Whether latency is predicted. Without predictions SLOs have no effect.
    pub fn predicts(&self) -> bool {
        self.predicts
    }

    /// Returns the settings that say how predictions are used; `None` if prediction is off.
    pub(crate) fn latency_settings(&self) -> Option<LatencySettings> {
        Some(self.production.latency).filter(|settings| self.predicts && settings.predict)
    }

    /// Whether every inference request must have an SLO.
    pub fn demands_slo(&self) -> bool {
        self.predicts && self.handler.demands_slo()
    }

    /// Returns [`crate::ProfileHandler::disaggregates`] of the profile handler.
    pub fn disaggregates(&self) -> bool {
        self.handler.disaggregates()
    }

    pub fn stage_of(&self, profile: &str) -> Stage {
        self.handler.stage_of(profile)
    }

    pub(crate) fn profiles(&self) -> &Profiles {
        &self.profiles
    }

    pub(crate) fn handler(&self) -> &dyn ProfileHandler {
        &*self.handler
    }

    /// Returns the reason to shed the request although these candidates could serve it, if there is
    /// a reason.
    pub(crate) fn sheds(
        &self,
        context: &Context<'_>,
        candidates: &[EndpointIndex],
        rng: &mut Rng,
    ) -> Option<ShedReason> {
        let sheddable = context.request.priority < 0;
        // With flow control, a sheddable request waits instead.
        if sheddable
            && self.flow_control.is_none()
            && self.detector.saturation(context, candidates) >= 1.0
        {
            return Some(ShedReason::Saturated);
        }
        self.admitters
            .iter()
            .any(|admitter| !admitter.admits(context, candidates, rng))
            .then_some(ShedReason::Admitter)
    }

    fn read_headers(&mut self, names: &[Box<str>]) {
        for name in names {
            let name = name.to_ascii_lowercase();
            if !self.headers.iter().any(|known| **known == *name) {
                self.headers.push(name.into());
            }
        }
    }

    fn check_references(&self, spec: &PipelineSpec) -> Result<(), InvalidPipeline> {
        let is = |name: &str, kind| {
            let declared = spec.plugins.iter().find(|plugin| plugin.name() == name);
            name.is_empty()
                || declared
                    .and_then(|plugin| lookup(&plugin.plugin_type))
                    .is_some_and(|row| row.kind == kind)
        };
        if !is(&spec.profile_handler, PluginKind::ProfileHandler) {
            return Err(no_such(
                "profile handler",
                &spec.profile_handler,
                "the pipeline",
            ));
        }
        if !is(&spec.saturation_detector, PluginKind::Detector) {
            return Err(no_such(
                "saturation detector",
                &spec.saturation_detector,
                "the pipeline",
            ));
        }
        let count = self.profiles.count();
        for reference in self.handler.references() {
            match reference {
                Reference::OnlyProfile if count != 1 => {
                    return Err(InvalidPipeline::NotOneProfile(count));
                }
                Reference::ProfileOfSeveral(_) if count == 1 => {}
                Reference::Profile(name) | Reference::ProfileOfSeveral(name)
                    if self.profiles.get(name).is_none() =>
                {
                    return Err(no_such("profile", name, "the profile handler"));
                }
                Reference::Decider(name) if self.profiles.decider(name).is_none() => {
                    return Err(no_such("decider", name, "the profile handler"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
