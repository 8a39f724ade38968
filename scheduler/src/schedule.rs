//! Filter, score, pick: all the control flow of scheduling.

use crate::candidates::{Candidates, unit};
use crate::decision::{Decision, Drop, Explanation, ProfileExplanation, Ranked, ScoreColumn, Shed, Unavailable};
use crate::endpoint::EndpointIndex;
use crate::filter::{Decoder, Ejected, Ready, ServesModel, Subset};
use crate::latency::Prediction;
use crate::local::Local;
use crate::pipeline::{Pipeline, Profile};
use crate::plugin::{Context, Filter};
use crate::prefix::home;
use crate::prospects::Prospects;
use crate::request::Request;
use crate::rng::Rng;
use crate::snapshot::Snapshot;

/// How long an endpoint must have been in the pool to be the last resort of a list. A newer one may not have reached every worker of
/// Envoy's cluster yet, and a list of such alone could fail whole; updates take well under a second.
pub const SETTLED_MS: u64 = 5_000;

/// The filters every request passes first: the name explanations call each by, and what it means when nobody is left.
const STRUCTURAL: [(&str, &dyn Filter, Unavailable); 3] = [
    ("ready", &Ready, Unavailable::NoReadyEndpoint),
    ("subset", &Subset, Unavailable::SubsetEmpty),
    ("model", &ServesModel, Unavailable::ModelNotServed),
];

/// How much of a prompt its home is assumed to hold: as a prior of 60 % it halved what private state costs.
const HOME_PERCENT: u32 = 60;

/// What a profile that leaves nobody comes to.
const NOBODY: Decision = Decision::Unavailable(Unavailable::Filtered);

/// One request on its way through a pipeline: what a profile handler works with.
#[derive(Debug)]
pub struct Run<'r> {
    context: Context<'r>,
    pipeline: &'r Pipeline,
    /// Who is ready and allowed.
    allowed: Candidates,
    rng: &'r mut Rng,
    explanation: Option<&'r mut Explanation>,
}

/// Decides on `request` by the snapshot's pipeline. Mutates nothing but `rng`: the caller records the outcome.
///
/// `explanation`, when given, is filled with who was dropped by whom and each scorer's scores; when not, reasons cost nothing.
#[must_use]
pub fn schedule(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: Local<'_>,
    rng: &mut Rng,
    explanation: Option<&mut Explanation>,
) -> Decision {
    decide(
        Context { snapshot, request, local, prospects: &Prospects::default(), drawing: local.matched_blocks, early_stage: false },
        rng,
        explanation,
    )
}

/// A decision made before, made again: as [`schedule`], with what was `predicted` then of each endpoint in place of what the model says now.
#[must_use]
pub fn schedule_again(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: Local<'_>,
    predicted: Vec<Option<Prediction>>,
    rng: &mut Rng,
    explanation: Option<&mut Explanation>,
) -> Decision {
    decide(
        Context { snapshot, request, local, prospects: &Prospects::recorded(predicted), drawing: local.matched_blocks, early_stage: false },
        rng,
        explanation,
    )
}

fn decide(context: Context<'_>, rng: &mut Rng, mut explanation: Option<&mut Explanation>) -> Decision {
    let Context { snapshot, request, prospects, .. } = context;
    if let Some(explanation) = explanation.as_deref_mut() {
        *explanation = Explanation {
            prompt_tokens: request.prompt_tokens,
            uncached_tokens: snapshot.indices().map(|index| context.uncached_tokens(index)).collect(),
            asks: request.slo,
            prospects: prospects.get(&context).to_vec(),
            ..Explanation::default()
        };
    }
    let pipeline = snapshot.pipeline();
    let mut allowed = Candidates::new(snapshot.indices());
    for (name, filter, unavailable) in STRUCTURAL {
        narrow(&context, (name, filter), &mut allowed, rng, explanation.as_deref_mut().map(|e| &mut e.dropped));
        if allowed.is_empty() {
            return Decision::Unavailable(unavailable);
        }
    }
    let drawing = context.local.out_of_touch.then(|| drawn_home(&context, allowed.indices()));
    let context = Context { drawing: drawing.as_deref().unwrap_or(context.drawing), ..context };
    if let Some(why) = pipeline.sheds(&context, allowed.indices(), rng) {
        return Decision::Shed(why);
    }
    pipeline.handler().route(&mut Run { context, pipeline, allowed, rng, explanation })
}

/// Of a prompt that nobody is believed to hold anything of, its home among those it may go to draws it as if it held some.
#[cold]
fn drawn_home(context: &Context<'_>, allowed: &[EndpointIndex]) -> Vec<u32> {
    let mut drawing = context.local.matched_blocks.to_vec();
    let Some(head) = context.request.prefix_blocks.first().filter(|_| drawing.iter().all(|&blocks| blocks == 0)) else { return drawing };
    let Local { in_flight, .. } = context.local;
    let may = |&index: &EndpointIndex| Some((index, context.snapshot.id(index).filter(|_| !context.local.ejected(index))?));
    let (indices, refs): (Vec<_>, Vec<_>) = allowed.iter().filter_map(may).unzip();
    let home = home(*head, &refs, |at| Some(in_flight.requests(*refs.get(at)?))).and_then(|at| indices.get(at));
    if let Some(blocks) = home.and_then(|index| drawing.get_mut(index.get())) {
        *blocks = context.request.blocks().saturating_mul(HOME_PERCENT) / 100;
    }
    drawing
}

// === impl Run ===

impl<'r> Run<'r> {
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
        self.pipeline.profiles()
    }

    /// Is there a profile of this name?
    #[must_use]
    pub fn has_profile(&self, name: &str) -> bool {
        self.pipeline.profile(name).is_some()
    }

    /// Runs the only profile.
    ///
    /// # Errors
    /// The decision when it leaves nobody, or sheds the request.
    pub fn only_profile(&mut self) -> Result<Ranked, Decision> {
        self.pipeline.only_profile().ok_or(NOBODY).and_then(|profile| self.run(profile, profile.ranked_max, None))
    }

    /// Runs a profile for a list to try one after another.
    ///
    /// # Errors
    /// The decision when it leaves nobody, is not there, or sheds the request.
    pub fn ranked(&mut self, profile: &str) -> Result<Ranked, Decision> {
        self.pipeline.profile(profile).ok_or(NOBODY).and_then(|profile| self.run(profile, profile.ranked_max, None))
    }

    /// Runs a profile, for a list to try one after another, among those whose role lets them decode.
    ///
    /// # Errors
    /// The decision when it leaves nobody, is not there, or sheds the request.
    pub fn decoders(&mut self, profile: &str) -> Result<Ranked, Decision> {
        let decoder: (&str, &dyn Filter) = ("role", &Decoder);
        self.pipeline.profile(profile).ok_or(NOBODY).and_then(|profile| self.run(profile, profile.ranked_max, Some(decoder)))
    }

    /// Runs a profile for a stage before decode, for as many as its picker is told to list, or else for one.
    ///
    /// # Errors
    /// The decision when it leaves nobody, is not there, or sheds the request.
    pub fn early(&mut self, profile: &str) -> Result<Ranked, Decision> {
        self.context.early_stage = true;
        let ranked = self.pipeline.profile(profile).ok_or(NOBODY).and_then(|profile| self.run(profile, profile.listed.unwrap_or(1), None));
        self.context.early_stage = false;
        ranked
    }

    /// Does this decider want the request disaggregated, where `decode` would do the rest?
    #[must_use]
    pub fn disaggregates(&self, decider: &str, decode: EndpointIndex) -> bool {
        self.pipeline.decider(decider).is_some_and(|decider| decider.disaggregates(&self.context, decode))
    }

    /// Runs a profile, after one more filter perhaps, for a list of `max`.
    fn run(&mut self, profile: &Profile, max: usize, first: Option<(&str, &dyn Filter)>) -> Result<Ranked, Decision> {
        let context = self.context;
        let mut explanation =
            self.explanation.is_some().then(|| ProfileExplanation { name: profile.name.clone(), ..ProfileExplanation::default() });
        let mut candidates = self.filtered(profile, first, explanation.as_mut());
        let sheds = profile.scorers.iter().any(|(.., scorer)| !candidates.is_empty() && scorer.sheds(&context, candidates.indices()));
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
        let ranked = end_settled(context.snapshot, &candidates, ranked, max, self.rng);
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
fn narrow(
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
    context.prospect(index).is_some_and(|prospect| !prospect.is_valid())
}

/// Makes the list end with a settled endpoint, the best there is, when it names none and has a place other than the first.
fn end_settled(snapshot: &Snapshot, candidates: &Candidates, ranked: Ranked, max: usize, rng: &mut Rng) -> Ranked {
    let settled = |index: EndpointIndex| snapshot.endpoint(index).is_some_and(|e| e.age_ms >= SETTLED_MS);
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
    let last_answer = |index: &EndpointIndex| context.snapshot.id(*index).map_or(0, |id| context.local.last_answer(id.slot));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Endpoint, EndpointRef, Incarnation, Readiness, Slot};
    use crate::in_flight::InFlight;
    use crate::metrics::EndpointMetrics;
    use crate::pipeline::{PipelineSpec, PluginSpec};
    use crate::request::SubsetHint;
    use crate::snapshot::Version;

    fn by_queue(ranked_max: u32) -> PipelineSpec {
        PipelineSpec::of_one_profile("queue", vec![(PluginSpec::of_type("queue-scorer"), 1.0)], ranked_max)
    }

    /// Endpoints 10.0.0.1:8000 and on, by age and queue depth.
    fn pool(rows: &[(u64, f32)]) -> Snapshot {
        let endpoint = |at: usize, age_ms| Endpoint {
            id: EndpointRef { slot: Slot(u16::try_from(at).unwrap()), incarnation: Incarnation(0) },
            name: format!("pod-{at}").into(),
            address: format!("10.0.0.{}:8000", at + 1).into(),
            readiness: Readiness::Ready,
            labels: Box::new([]),
            models: std::sync::Arc::default(),
            age_ms,
        };
        let endpoints = rows.iter().enumerate().map(|(at, &(age_ms, _))| endpoint(at, age_ms)).collect();
        let metrics = rows.iter().map(|&(_, queue)| EndpointMetrics { queue_depth: Some(queue), ..EndpointMetrics::default() }).collect();
        let pipeline = Pipeline::build(&by_queue(3)).unwrap();
        Snapshot::try_new(Version::default(), endpoints, metrics, pipeline).unwrap()
    }

    fn local<'a>(in_flight: &'a InFlight, ejected: &'a [bool]) -> Local<'a> {
        Local {
            in_flight,
            matched_blocks: &[],
            prefix_idle: 0.0,
            prefix_ages: &[],
            ejected,
            failing: &[],
            last_answers: &[],
            last_cold_picks: &[],
            adapter_rooms: &[],
            out_of_touch: false,
            metrics_stale: false,
        }
    }

    fn route(snapshot: &Snapshot, request: &Request<'_>, ejected: &[bool]) -> Result<Vec<usize>, Unavailable> {
        match schedule(snapshot, request, local(&InFlight::default(), ejected), &mut Rng::seeded(1), None) {
            Decision::Route(route) => Ok(route.ranked.iter().map(EndpointIndex::get).collect()),
            Decision::Unavailable(why) => Err(why),
            other => panic!("{other:?}"),
        }
    }

    const OLD: u64 = SETTLED_MS;
    const NEW: u64 = SETTLED_MS - 1;

    #[test]
    fn shortest_queue_first() {
        let pool = pool(&[(OLD, 5.0), (OLD, 0.0), (OLD, 9.0), (OLD, 2.0)]);
        assert_eq!(route(&pool, &Request::default(), &[]), Ok(vec![1, 3, 0]));
    }

    #[test]
    fn each_way_to_have_nobody_has_its_name() {
        assert_eq!(route(&pool(&[]), &Request::default(), &[]), Err(Unavailable::NoReadyEndpoint));
        let elsewhere = SubsetHint::parse(["10.9.9.9"]);
        let request = Request { subset: Some(&elsewhere), ..Request::default() };
        assert_eq!(route(&pool(&[(OLD, 0.0)]), &request, &[]), Err(Unavailable::SubsetEmpty));
    }

    #[test]
    fn ejection_never_takes_the_last() {
        let pool = pool(&[(OLD, 0.0), (OLD, 9.0)]);
        assert_eq!(route(&pool, &Request::default(), &[true, false]), Ok(vec![1]));
        assert_eq!(route(&pool, &Request::default(), &[true, true]), Ok(vec![0, 1]));
        let first = SubsetHint::parse(["10.0.0.1"]);
        let request = Request { subset: Some(&first), ..Request::default() };
        assert_eq!(route(&pool, &request, &[true, false]), Ok(vec![0]), "the last of the subset is the last");
    }

    #[test]
    fn a_list_of_new_endpoints_ends_with_the_best_settled_one() {
        let full = pool(&[(NEW, 0.0), (NEW, 1.0), (NEW, 2.0), (OLD, 9.0), (OLD, 8.0)]);
        assert_eq!(route(&full, &Request::default(), &[]), Ok(vec![0, 1, 4]));
        let short = pool(&[(NEW, 0.0), (OLD, 9.0)]);
        assert_eq!(route(&short, &Request::default(), &[]), Ok(vec![0, 1]));
        let young = pool(&[(NEW, 0.0), (NEW, 1.0), (NEW, 2.0), (NEW, 3.0)]);
        assert_eq!(route(&young, &Request::default(), &[]), Ok(vec![0, 1, 2]), "where none is settled there is none to add");
        let mixed = pool(&[(NEW, 0.0), (OLD, 1.0), (NEW, 2.0), (OLD, 3.0)]);
        assert_eq!(route(&mixed, &Request::default(), &[]), Ok(vec![0, 1, 2]), "one settled endpoint in the list is enough");
    }

    #[test]
    fn the_endpoint_that_answered_last_is_the_second_choice() {
        let pool = pool(&[(OLD, 0.0), (OLD, 1.0), (OLD, 2.0), (OLD, 3.0)]);
        let list = |last_answers: &[u64]| -> Vec<usize> {
            let in_flight = InFlight::default();
            match schedule(&pool, &Request::default(), Local { last_answers, ..local(&in_flight, &[]) }, &mut Rng::seeded(1), None) {
                Decision::Route(route) => route.ranked.iter().map(EndpointIndex::get).collect(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(list(&[]), [0, 1, 2]);
        assert_eq!(list(&[9, 0, 5, 7]), [0, 2, 1], "the first is the pick, and the fourth is not in the list");
        assert_eq!(list(&[0, 5, 5, 5]), [0, 1, 2]);
    }

    #[test]
    fn a_list_of_one_is_not_taken_from_the_new() {
        let spec = by_queue(1);
        let rows = pool(&[(NEW, 0.0), (OLD, 9.0)]);
        let (endpoints, metrics) = (rows.endpoints().to_vec(), rows.metrics().to_vec());
        let snapshot = Snapshot::try_new(Version::default(), endpoints, metrics, Pipeline::build(&spec).unwrap()).unwrap();
        assert_eq!(route(&snapshot, &Request::default(), &[]), Ok(vec![0]));
    }

    #[test]
    fn an_old_explanation_is_forgotten() {
        let pool = pool(&[(OLD, 0.0), (OLD, 4.0)]);
        let in_flight = InFlight::default();
        let mut fresh = Explanation::default();
        let _ = schedule(&pool, &Request::default(), local(&in_flight, &[]), &mut Rng::seeded(1), Some(&mut fresh));
        let mut used = fresh.clone();
        let _ = schedule(&pool, &Request::default(), local(&in_flight, &[]), &mut Rng::seeded(1), Some(&mut used));
        assert_eq!(fresh, used);
        assert_eq!(fresh.profiles.len(), 1);
        assert_eq!((fresh.profiles[0].scores.len(), fresh.profiles[0].totals.len()), (1, 2));
    }
}
