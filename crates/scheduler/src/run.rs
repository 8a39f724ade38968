//! Runs the profiles of a pipeline for one request. A profile filters, scores and picks endpoints.
//! Profile handlers choose the profiles.

mod profile;
pub(crate) use profile::{Profile, Profiles};

use crate::candidates::{Candidates, unit};
use crate::decision::{
    Decision, DroppedEndpoint, Explanation, ProfileExplanation, RankedList, ScoreColumn,
    ShedReason, UnavailableReason,
};
use crate::endpoint::EndpointIndex;
use crate::endpoint_table::EndpointTable;
use crate::filter::{DecoderFilter, EjectionFilter};
use crate::plugin::{Context, Filter, PluginDebug, debug_by_show};
use crate::rng::Rng;

/// The time that an endpoint must have been in the pool to be the last of a ranked list, in ms.
/// Envoy's workers may not know a newer endpoint yet, so a request could fail if its list had only
/// new endpoints. Updates of Envoy's workers take well under a second.
pub const SETTLED_MS: u64 = 5_000;

/// The result of a profile that leaves no endpoint.
const NOBODY: Decision = Decision::Unavailable(UnavailableReason::Filtered);

/// Chooses the profiles for a request, and combines the picks of these profiles into one decision.
pub trait ProfileHandler: PluginDebug + Send + Sync {
    /// Returns the names that the handler refers to. The pipeline checks these names when it is
    /// built.
    fn references(&self) -> Vec<Reference<'_>>;

    /// Whether the handler may split a request among endpoints of several roles. In this case the
    /// proxy sends no request to endpoints that never decode.
    fn disaggregates(&self) -> bool {
        false
    }

    /// Whether every inference request must have an SLO, if the pipeline predicts latency.
    fn demands_slo(&self) -> bool {
        false
    }

    /// Returns the stage of a request for which the profile with this name picks an endpoint.
    fn stage_of(&self, _profile: &str) -> Stage {
        Stage::Serving
    }

    /// Runs profiles and decides.
    fn route(&self, run: &mut SchedulingRun<'_>) -> Decision;
}

/// A profile or plugin that a plugin refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference<'a> {
    /// The only profile. It is an error if the pipeline has several profiles.
    OnlyProfile,
    Profile(&'a str),
    /// The profile with this name if the pipeline has several profiles. If it has only one, that
    /// profile, whatever its name.
    ProfileOfSeveral(&'a str),
    /// A plugin of kind decider.
    Decider(&'a str),
}

/// The stage of a request for which a profile picks an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Serving the request: decode, and also prefill unless another endpoint does the prefill.
    Serving,
    /// Computing the prompt of the request before another endpoint serves the request.
    Prefill,
    /// Encoding the images, videos and audio clips of the request before another endpoint computes
    /// its prompt.
    Encode,
}

/// The scheduling of one request, in the form in which a profile handler controls it.
#[derive(Debug)]
pub struct SchedulingRun<'r> {
    context: Context<'r>,
    profiles: &'r Profiles,
    /// The endpoints that may be picked: ready, and allowed by the proxy.
    allowed: Candidates,
    rng: &'r mut Rng,
    explanation: Option<&'r mut Explanation>,
}

debug_by_show!(ProfileHandler);

// === impl SchedulingRun ===

impl<'r> SchedulingRun<'r> {
    pub(crate) fn new(
        context: Context<'r>,
        profiles: &'r Profiles,
        allowed: Candidates,
        rng: &'r mut Rng,
        explanation: Option<&'r mut Explanation>,
    ) -> Self {
        Self {
            context,
            profiles,
            allowed,
            rng,
            explanation,
        }
    }

    pub fn context(&self) -> &Context<'r> {
        &self.context
    }

    /// Returns the endpoints that may be picked: ready, and allowed by the proxy.
    pub fn allowed(&self) -> &[EndpointIndex] {
        self.allowed.indices()
    }

    pub fn profiles(&self) -> usize {
        self.profiles.count()
    }

    /// Whether there is a profile with this name.
    pub fn has_profile(&self, name: &str) -> bool {
        self.profiles.get(name).is_some()
    }

    /// Runs the only profile, and returns its ranked list.
    ///
    /// # Errors
    /// Returns the refusal if the profile leaves no endpoint or sheds the request.
    pub fn only_profile(&mut self) -> Result<RankedList, Decision> {
        self.profiles
            .only()
            .ok_or(NOBODY)
            .and_then(|profile| self.run(profile, profile.ranked_max, None))
    }

    /// Runs a profile for a ranked list.
    ///
    /// # Errors
    /// Returns the decision if the profile leaves no endpoint, does not exist, or sheds the
    /// request.
    pub fn ranked(&mut self, profile: &str) -> Result<RankedList, Decision> {
        self.profiles
            .get(profile)
            .ok_or(NOBODY)
            .and_then(|profile| self.run(profile, profile.ranked_max, None))
    }

    /// Runs a profile for a ranked list of endpoints whose role lets them decode.
    ///
    /// # Errors
    /// Returns the decision if the profile leaves no endpoint, does not exist, or sheds the
    /// request.
    pub fn decoders(&mut self, profile: &str) -> Result<RankedList, Decision> {
        let decoder: (&str, &dyn Filter) = ("role", &DecoderFilter);
        self.profiles
            .get(profile)
            .ok_or(NOBODY)
            .and_then(|profile| self.run(profile, profile.ranked_max, Some(decoder)))
    }

    /// Runs a profile for a stage before decode. The list has one endpoint unless the picker's
    /// parameter sets its length.
    ///
    /// # Errors
    /// Returns the decision if the profile leaves no endpoint, does not exist, or sheds the
    /// request.
    pub fn early(&mut self, profile: &str) -> Result<RankedList, Decision> {
        self.context.early_stage = true;
        let ranked = self
            .profiles
            .get(profile)
            .ok_or(NOBODY)
            .and_then(|profile| self.run(profile, profile.listed.unwrap_or(1), None));
        self.context.early_stage = false;
        ranked
    }

    /// Whether this decider wants another endpoint to run its stage, if `decode` serves the rest.
    pub fn disaggregates(&self, decider: &str, decode: EndpointIndex) -> bool {
        self.profiles
            .decider(decider)
            .is_some_and(|decider| decider.disaggregates(&self.context, decode))
    }

    /// Runs a profile for a list of at most `max` endpoints, with the filter `before`, if given,
    /// before the profile's filters.
    fn run(
        &mut self,
        profile: &Profile,
        max: usize,
        first: Option<(&str, &dyn Filter)>,
    ) -> Result<RankedList, Decision> {
        let context = self.context;
        let mut explanation = self.explanation.is_some().then(|| ProfileExplanation {
            name: profile.name.clone(),
            ..ProfileExplanation::default()
        });
        let mut candidates = self.filtered(profile, first, explanation.as_mut());
        let sheds = !candidates.is_empty()
            && profile
                .shedders
                .iter()
                .any(|shedder| shedder.sheds(&context, candidates.indices()));
        let ranked = if candidates.is_empty() || sheds {
            None
        } else {
            score(&context, profile, &mut candidates, explanation.as_mut());
            pick(&context, profile, &candidates, max, self.rng)
        };
        if let (Some(all), Some(this)) = (self.explanation.as_deref_mut(), explanation) {
            all.profiles.push(this);
        }
        let ranked = ranked.ok_or(if sheds {
            Decision::Shed(ShedReason::Slo)
        } else {
            NOBODY
        })?;
        let ranked = end_settled(context.table, &candidates, ranked, max, self.rng);
        Ok(second_answers(&context, ranked, profile.puts_late_last()))
    }

    /// Returns the candidates after the profile's filters, without ejected endpoints, unless only
    /// ejected endpoints are left.
    fn filtered(
        &mut self,
        profile: &Profile,
        first: Option<(&str, &dyn Filter)>,
        mut explanation: Option<&mut ProfileExplanation>,
    ) -> Candidates {
        let any_ejected = self
            .allowed
            .indices()
            .iter()
            .any(|&index| self.context.local.ejected(index));
        let ejected: (&str, &dyn Filter) = ("ejected", &EjectionFilter);
        for second in [any_ejected.then_some(ejected), None] {
            let mut left = self.allowed.clone();
            if let Some(explanation) = explanation.as_deref_mut() {
                explanation.dropped.clear();
            }
            let configured = profile
                .filters
                .iter()
                .map(|(name, filter)| (&**name, &**filter));
            for (name, filter) in first.into_iter().chain(second).chain(configured) {
                run_filter(
                    &self.context,
                    name,
                    filter,
                    &mut left,
                    self.rng,
                    explanation.as_deref_mut().map(|e| &mut e.dropped),
                );
                if left.is_empty() {
                    break;
                }
            }
            if !left.is_empty() || second.is_none() {
                return left;
            }
        }
        Candidates::default()
    }
}

/// Runs one filter and records the endpoints that it dropped.
pub(crate) fn run_filter(
    context: &Context<'_>,
    name: &str,
    filter: &dyn Filter,
    candidates: &mut Candidates,
    rng: &mut Rng,
    dropped: Option<&mut Vec<DroppedEndpoint>>,
) {
    let Some(noted) = dropped else {
        return filter.filter(context, candidates, rng);
    };
    let before = candidates.indices().to_vec();
    filter.filter(context, candidates, rng);
    let dropped = before
        .into_iter()
        .filter(|index| !candidates.indices().contains(index));
    noted.extend(dropped.map(|endpoint| DroppedEndpoint {
        endpoint,
        by: name.into(),
    }));
}

/// Adds up the weighted scores of each candidate, and records the scores.
fn score(
    context: &Context<'_>,
    profile: &Profile,
    candidates: &mut Candidates,
    mut explanation: Option<&mut ProfileExplanation>,
) {
    let mut column = vec![0.0; candidates.len()];
    for (name, weight, scorer) in &profile.scorers {
        column.fill(0.0);
        scorer.score(context, candidates.indices(), &mut column);
        candidates.add(*weight, &column);
        if let Some(explanation) = explanation.as_deref_mut() {
            let scores = candidates
                .indices()
                .iter()
                .copied()
                .zip(column.iter().copied().map(unit))
                .collect();
            let cost_terms = scorer.cost_terms(context, candidates.indices());
            explanation.scores.push(ScoreColumn {
                scorer: name.clone(),
                weight: *weight,
                scores,
                cost_terms,
            });
        }
    }
    if let Some(explanation) = explanation {
        explanation.totals = candidates
            .indices()
            .iter()
            .copied()
            .zip(candidates.scores().iter().copied())
            .collect();
    }
}

/// Makes the list with the profile's picker. If late endpoints (predicted to miss the SLO) are
/// ranked last, a random draw may still put a late endpoint first, so that the model learns about
/// late endpoints.
fn pick(
    context: &Context<'_>,
    profile: &Profile,
    candidates: &Candidates,
    max: usize,
    rng: &mut Rng,
) -> Option<RankedList> {
    if !profile.puts_late_last()
        || !candidates
            .indices()
            .iter()
            .any(|&index| is_late(context, index))
    {
        return profile.picker.pick(candidates, max, rng);
    }
    pick_in_time_first(context, profile, candidates, max, rng)
}

#[cold] // because most profiles have no SLO
#[inline(never)]
fn pick_in_time_first(
    context: &Context<'_>,
    profile: &Profile,
    candidates: &Candidates,
    max: usize,
    rng: &mut Rng,
) -> Option<RankedList> {
    let drawn = if profile.picker.draws() {
        profile.picker.pick(candidates, 1, rng)
    } else {
        None
    };
    let mut others = candidates.clone();
    others.sink(&|index| is_late(context, index));
    let others = profile.picker.pick(&others, max, rng)?;
    let first = drawn.map_or_else(|| others.first(), |drawn| drawn.first());
    let mut rest: Vec<EndpointIndex> = Vec::new();
    for index in others.iter() {
        if index != first && rest.len() + 1 < max {
            rest.push(index);
        }
    }
    RankedList::new(std::iter::once(first).chain(rest))
}

/// Whether the endpoint is predicted to miss the SLOs; false without a prediction.
#[inline(never)]
fn is_late(context: &Context<'_>, index: EndpointIndex) -> bool {
    context
        .prediction(index)
        .is_some_and(|predicted| !predicted.is_valid())
}

/// Makes the best endpoint that has been in the pool for [`SETTLED_MS`] the last of the list, if no
/// endpoint of the list has been in the pool for so long and `max` is above 1.
fn end_settled(
    table: &EndpointTable,
    candidates: &Candidates,
    ranked: RankedList,
    max: usize,
    rng: &mut Rng,
) -> RankedList {
    let settled = |index: EndpointIndex| {
        table
            .endpoint(index)
            .is_some_and(|e| e.age_ms >= SETTLED_MS)
    };
    // The first endpoint stays, because a new endpoint also has to get requests.
    if max < 2 || ranked.iter().any(settled) {
        return ranked;
    }
    let mut others = candidates.clone();
    others.retain(settled);
    let Some(last) = crate::picker::rank(&others, 1, rng, |score, _| score) else {
        return ranked;
    };
    let kept = ranked.len().min(max - 1);
    RankedList::new(ranked.iter().take(kept).chain(last.iter())).unwrap_or(ranked)
}

/// Moves the endpoint that answered most recently to the second place of the list, because a retry
/// must not meet another dead endpoint. If late endpoints are ranked last, this endpoint must not
/// be late, unless all endpoints are late.
fn second_answers(context: &Context<'_>, ranked: RankedList, late_last: bool) -> RankedList {
    let last_answer = |index: &EndpointIndex| {
        context
            .table
            .id(*index)
            .map_or(0, |id| context.local.last_answer(id.slot))
    };
    let Some(first) = ranked.iter().next() else {
        return ranked;
    };
    let mut rest: Vec<EndpointIndex> = ranked.iter().skip(1).collect();
    let in_time = if late_last {
        rest.iter()
            .take_while(|&&index| !is_late(context, index))
            .count()
    } else {
        0
    };
    let considered = if in_time > 0 { in_time } else { rest.len() };
    // If several endpoints answered equally recently, or no answer is known, the first of them in
    // the list is chosen.
    let Some(best) = (0..considered)
        .rev()
        .max_by_key(|&at| rest.get(at).map_or(0, last_answer))
    else {
        return ranked;
    };
    if best == 0 {
        return ranked;
    }
    rest.get_mut(..=best).unwrap_or_default().rotate_right(1);
    RankedList::new(std::iter::once(first).chain(rest)).unwrap_or(ranked)
}
