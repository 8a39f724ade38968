//! One request on its way through the profiles of a pipeline: filter, score, pick. Profile handlers
//! say which profiles run.

mod profile;
pub(crate) use profile::{Profile, Profiles};

use crate::candidates::{Candidates, unit};
use crate::decision::{Decision, Drop, Explanation, ProfileExplanation, Ranked, ScoreColumn, Shed, Unavailable};
use crate::endpoint::EndpointIndex;
use crate::endpoint_table::EndpointTable;
use crate::filter::{Decoder, Ejected};
use crate::plugin::{Context, Filter, Show, debug_by_show};
use crate::rng::Rng;

/// How long an endpoint must have been in the pool to be the last resort of a list. A newer one may not have reached every worker of
/// Envoy's cluster yet, and a list of such alone could fail whole; updates take well under a second.
pub const SETTLED_MS: u64 = 5_000;

/// What a profile that leaves nobody comes to.
const NOBODY: Decision = Decision::Unavailable(Unavailable::Filtered);

/// Chooses the profiles a request runs and makes one decision of their picks.
pub trait ProfileHandler: Show + Send + Sync {
    /// What it refers to by name; checked when the pipeline is built.
    fn references(&self) -> Vec<Reference<'_>>;

    /// May it split a request among endpoints of several roles? Then those that never decode are no destination of the proxy's.
    fn disaggregates(&self) -> bool {
        false
    }

    /// Must every inference request have an SLO, where latency is predicted?
    fn demands_slo(&self) -> bool {
        false
    }

    /// What part of a request the profile of this name picks for.
    fn stage_of(&self, _profile: &str) -> Stage {
        Stage::Serving
    }

    /// Runs profiles and decides.
    fn route(&self, run: &mut Run<'_>) -> Decision;
}

/// Something that a plugin refers to by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference<'a> {
    /// The only profile: there must be no other.
    OnlyProfile,
    /// A profile.
    Profile(&'a str),
    /// A profile, unless there is only one, which then stands for it.
    ProfileOfSeveral(&'a str),
    /// A plugin of kind decider.
    Decider(&'a str),
}

/// What part of a request a profile picks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Answering it.
    Serving,
    /// Working through its prompt first.
    Prefill,
    /// Encoding its images, videos and audio clips first.
    Encode,
}

/// One request on its way through a pipeline: what a profile handler works with.
#[derive(Debug)]
pub struct Run<'r> {
    context: Context<'r>,
    profiles: &'r Profiles,
    /// Who is ready and allowed.
    allowed: Candidates,
    rng: &'r mut Rng,
    explanation: Option<&'r mut Explanation>,
}

debug_by_show!(ProfileHandler);

// === impl Run ===

impl<'r> Run<'r> {
    pub(crate) fn new(
        context: Context<'r>,
        profiles: &'r Profiles,
        allowed: Candidates,
        rng: &'r mut Rng,
        explanation: Option<&'r mut Explanation>,
    ) -> Self {
        Self { context, profiles, allowed, rng, explanation }
    }

    /// All there is to look at.
    #[must_use]
    pub fn context(&self) -> &Context<'r> {
        &self.context
    }

    /// Who may be named in the decision at all: ready, and allowed by the proxy.
    #[must_use]
    pub fn allowed(&self) -> &[EndpointIndex] {
        self.allowed.indices()
    }

    /// How many profiles there are.
    #[must_use]
    pub fn profiles(&self) -> usize {
        self.profiles.count()
    }

    /// Is there a profile of this name?
    #[must_use]
    pub fn has_profile(&self, name: &str) -> bool {
        self.profiles.get(name).is_some()
    }

    /// Runs the only profile.
    ///
    /// # Errors
    /// The decision when it leaves nobody, or sheds the request.
    pub fn only_profile(&mut self) -> Result<Ranked, Decision> {
        self.profiles.only().ok_or(NOBODY).and_then(|profile| self.run(profile, profile.ranked_max, None))
    }

    /// Runs a profile for a list to try one after another.
    ///
    /// # Errors
    /// The decision when it leaves nobody, is not there, or sheds the request.
    pub fn ranked(&mut self, profile: &str) -> Result<Ranked, Decision> {
        self.profiles.get(profile).ok_or(NOBODY).and_then(|profile| self.run(profile, profile.ranked_max, None))
    }

    /// Runs a profile, for a list to try one after another, among those whose role lets them decode.
    ///
    /// # Errors
    /// The decision when it leaves nobody, is not there, or sheds the request.
    pub fn decoders(&mut self, profile: &str) -> Result<Ranked, Decision> {
        let decoder: (&str, &dyn Filter) = ("role", &Decoder);
        self.profiles.get(profile).ok_or(NOBODY).and_then(|profile| self.run(profile, profile.ranked_max, Some(decoder)))
    }

    /// Runs a profile for a stage before decode, for as many as its picker is told to list, or else for one.
    ///
    /// # Errors
    /// The decision when it leaves nobody, is not there, or sheds the request.
    pub fn early(&mut self, profile: &str) -> Result<Ranked, Decision> {
        self.context.early_stage = true;
        let ranked = self.profiles.get(profile).ok_or(NOBODY).and_then(|profile| self.run(profile, profile.listed.unwrap_or(1), None));
        self.context.early_stage = false;
        ranked
    }

    /// Does this decider want the request disaggregated, where `decode` would do the rest?
    #[must_use]
    pub fn disaggregates(&self, decider: &str, decode: EndpointIndex) -> bool {
        self.profiles.decider(decider).is_some_and(|decider| decider.disaggregates(&self.context, decode))
    }

    /// Runs a profile, after one more filter perhaps, for a list of `max`.
    fn run(&mut self, profile: &Profile, max: usize, first: Option<(&str, &dyn Filter)>) -> Result<Ranked, Decision> {
        let context = self.context;
        let mut explanation =
            self.explanation.is_some().then(|| ProfileExplanation { name: profile.name.clone(), ..ProfileExplanation::default() });
        let mut candidates = self.filtered(profile, first, explanation.as_mut());
        let sheds = !candidates.is_empty() && profile.shedders.iter().any(|shedder| shedder.sheds(&context, candidates.indices()));
        let ranked = if candidates.is_empty() || sheds {
            None
        } else {
            score(&context, profile, &mut candidates, explanation.as_mut());
            pick(&context, profile, &candidates, max, self.rng)
        };
        if let (Some(all), Some(this)) = (self.explanation.as_deref_mut(), explanation) {
            all.profiles.push(this);
        }
        let ranked = ranked.ok_or(if sheds { Decision::Shed(Shed::Slo) } else { NOBODY })?;
        let ranked = end_settled(context.table, &candidates, ranked, max, self.rng);
        Ok(second_answers(&context, ranked, profile.puts_late_last()))
    }

    /// Whom a profile leaves: without the ejected, unless that leaves nobody.
    fn filtered(
        &mut self,
        profile: &Profile,
        first: Option<(&str, &dyn Filter)>,
        mut explanation: Option<&mut ProfileExplanation>,
    ) -> Candidates {
        let any_ejected = self.allowed.indices().iter().any(|&index| self.context.local.ejected(index));
        let ejected: (&str, &dyn Filter) = ("ejected", &Ejected);
        for second in [any_ejected.then_some(ejected), None] {
            let mut left = self.allowed.clone();
            if let Some(explanation) = explanation.as_deref_mut() {
                explanation.dropped.clear();
            }
            let configured = profile.filters.iter().map(|(name, filter)| (&**name, &**filter));
            for filter in first.into_iter().chain(second).chain(configured) {
                narrow(&self.context, filter, &mut left, self.rng, explanation.as_deref_mut().map(|e| &mut e.dropped));
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

/// Runs one filter and notes whom it dropped.
pub(crate) fn narrow(
    context: &Context<'_>,
    (name, filter): (&str, &dyn Filter),
    candidates: &mut Candidates,
    rng: &mut Rng,
    dropped: Option<&mut Vec<Drop>>,
) {
    let Some(noted) = dropped else {
        return filter.filter(context, candidates, rng);
    };
    let before = candidates.indices().to_vec();
    filter.filter(context, candidates, rng);
    let dropped = before.into_iter().filter(|index| !candidates.indices().contains(index));
    noted.extend(dropped.map(|endpoint| Drop { endpoint, by: name.into() }));
}

/// Adds up the weighted scores, through one column that all scorers share, and notes them.
fn score(context: &Context<'_>, profile: &Profile, candidates: &mut Candidates, mut explanation: Option<&mut ProfileExplanation>) {
    let mut column = vec![0.0; candidates.len()];
    for (name, weight, scorer) in &profile.scorers {
        column.fill(0.0);
        scorer.score(context, candidates.indices(), &mut column);
        candidates.add(*weight, &column);
        if let Some(explanation) = explanation.as_deref_mut() {
            let scores = candidates.indices().iter().copied().zip(column.iter().copied().map(unit)).collect();
            let cost_terms = scorer.cost_terms(context, candidates.indices());
            explanation.scores.push(ScoreColumn { scorer: name.clone(), weight: *weight, scores, cost_terms });
        }
    }
    if let Some(explanation) = explanation {
        explanation.totals = candidates.indices().iter().copied().zip(candidates.scores().iter().copied()).collect();
    }
}

/// The list by the profile's picker. Where a scorer puts late endpoints last, only the first of a draw may be one of them, so that it is learned about.
fn pick(context: &Context<'_>, profile: &Profile, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<Ranked> {
    if !profile.puts_late_last() || !candidates.indices().iter().any(|&index| is_late(context, index)) {
        return profile.picker.pick(candidates, max, rng);
    }
    pick_in_time_first(context, profile, candidates, max, rng)
}

#[cold] // most profiles go by no SLO
#[inline(never)]
fn pick_in_time_first(context: &Context<'_>, profile: &Profile, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<Ranked> {
    let drawn = if profile.picker.draws() { profile.picker.pick(candidates, 1, rng) } else { None };
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
    Ranked::new(std::iter::once(first).chain(rest))
}

/// Would it serve the request too late, by what is predicted? Nothing is said against an endpoint of which nothing is.
#[inline(never)]
fn is_late(context: &Context<'_>, index: EndpointIndex) -> bool {
    context.prediction(index).is_some_and(|predicted| !predicted.is_valid())
}

/// Makes the list end with a settled endpoint, the best there is, when it names none and has a place other than the first.
fn end_settled(table: &EndpointTable, candidates: &Candidates, ranked: Ranked, max: usize, rng: &mut Rng) -> Ranked {
    let settled = |index: EndpointIndex| table.endpoint(index).is_some_and(|e| e.age_ms >= SETTLED_MS);
    // The first is the pick: a new endpoint must get requests to become of use.
    if max < 2 || ranked.iter().any(settled) {
        return ranked;
    }
    let mut others = candidates.clone();
    others.retain(settled);
    let Some(last) = crate::picker::rank(&others, 1, rng, |score, _| score) else {
        return ranked;
    };
    let kept = ranked.len().min(max - 1);
    Ranked::new(ranked.iter().take(kept).chain(last.iter())).unwrap_or(ranked)
}

/// Makes the endpoint that answered last the second of the list: a request that is tried once more must not meet one that is gone. Where late endpoints
/// stand last, it is one of those in time, while there are any.
fn second_answers(context: &Context<'_>, ranked: Ranked, late_last: bool) -> Ranked {
    let last_answer = |index: &EndpointIndex| context.table.id(*index).map_or(0, |id| context.local.last_answer(id.slot));
    let Some(first) = ranked.iter().next() else { return ranked };
    let mut rest: Vec<EndpointIndex> = ranked.iter().skip(1).collect();
    let in_time = if late_last { rest.iter().take_while(|&&index| !is_late(context, index)).count() } else { 0 };
    let considered = if in_time > 0 { in_time } else { rest.len() };
    // The first of the greatest, so that the ranking decides where nothing is known.
    let Some(best) = (0..considered).rev().max_by_key(|&at| rest.get(at).map_or(0, last_answer)) else { return ranked };
    if best == 0 {
        return ranked;
    }
    rest.get_mut(..=best).unwrap_or_default().rotate_right(1);
    Ranked::new(std::iter::once(first).chain(rest)).unwrap_or(ranked)
}
