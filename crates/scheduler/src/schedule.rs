//! Decides which endpoints a request is sent to, with the filters that always apply and the profile
//! handler, and explains the decision.

use crate::candidates::Candidates;
use crate::decision::{Decision, Explanation, RankedList, Route, UnavailableReason};
use crate::endpoint::{Endpoint, EndpointIndex, EndpointRef};
use crate::filter::{ReadinessFilter, ServesModelFilter, SubsetFilter};
use crate::flow::RoomLimits;
use crate::latency::{NoPrediction, Prediction};
use crate::local_state::LocalState;
use crate::plugin::{Context, Filter};
use crate::predictions::{self, EndpointPrediction, Predictions};
use crate::prefix::rendezvous_endpoint;
use crate::request::Request;
use crate::rng::Rng;
use crate::run::{SchedulingRun, run_filter};
use crate::slo::{Slo, TrackedSlo};
use crate::snapshot::Snapshot;

/// The filters that apply to every request: the name of each filter in explanations, and the result
/// if the filter leaves no endpoint.
const STRUCTURAL: [(&str, &dyn Filter, UnavailableReason); 3] = [
    (
        "ready",
        &ReadinessFilter,
        UnavailableReason::NoReadyEndpoint,
    ),
    ("subset", &SubsetFilter, UnavailableReason::SubsetEmpty),
    (
        "model",
        &ServesModelFilter,
        UnavailableReason::ModelNotServed,
    ),
];

/// The share of a prompt that its rendezvous endpoint is assumed to have cached. In the simulation,
/// 60 % halved the loss of latency when proxies share no state.
const HOME_PERCENT: u32 = 60;

/// Decides on `request` with the snapshot's pipeline. Changes only `rng`; the caller records the
/// outcome.
///
/// If `explanation` is given, it receives the dropped endpoints and the scores of each scorer.
/// Without `explanation`, the decision spends no time on reasons.
#[must_use]
pub fn schedule(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: LocalState<'_>,
    rng: &mut Rng,
    explanation: Option<&mut Explanation>,
) -> Decision {
    let predictions = Predictions::new(snapshot.pipeline().latency_settings());
    decide(snapshot, request, local, &predictions, rng, explanation)
}

/// Repeats an earlier decision: does [`schedule`] with `predicted`, the predictions of the earlier
/// decision, instead of the predictions of the current model.
#[must_use]
pub fn schedule_again(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: LocalState<'_>,
    predicted: Vec<Option<Prediction>>,
    rng: &mut Rng,
    explanation: Option<&mut Explanation>,
) -> Decision {
    let predictions = Predictions::recorded(snapshot.pipeline().latency_settings(), predicted);
    decide(snapshot, request, local, &predictions, rng, explanation)
}

/// Returns the predicted latency of `request` at each endpoint, or the reason why there is no
/// prediction, in the snapshot's order. The list is empty if prediction is off.
#[must_use]
pub fn predict(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: LocalState<'_>,
) -> Vec<Result<EndpointPrediction, NoPrediction>> {
    Predictions::new(snapshot.pipeline().latency_settings()).predict(
        snapshot.table(),
        request,
        &local,
    )
}

/// Returns the SLOs of `request` that later picks have to respect once `endpoint` serves it. Call
/// this function before the load of the request is added to `endpoint`.
#[must_use]
pub fn tracked_slo(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: LocalState<'_>,
    endpoint: EndpointIndex,
) -> TrackedSlo {
    predictions::tracked_slo(
        snapshot.table(),
        snapshot.pipeline().latency_settings(),
        request,
        &local,
        endpoint,
    )
}

/// Returns the SLOs of another proxy in `slo` that `endpoint` could meet if it were idle. Returns
/// `slo` unchanged if latency is not predicted.
#[must_use]
pub fn possible_slo(snapshot: &Snapshot, endpoint: EndpointRef, slo: Slo) -> Slo {
    let settings = snapshot.pipeline().latency_settings();
    predictions::possible_slo(snapshot.table(), settings, endpoint, slo)
}

/// Whether `request` may be sent to the endpoints of `route` now, within the limits of its band.
/// Without flow control, it always may.
#[must_use]
pub fn has_room(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: LocalState<'_>,
    route: &Route,
    limits: RoomLimits,
) -> bool {
    let pipeline = snapshot.pipeline();
    pipeline.flow_control().is_none()
        || pipeline.has_room(
            &context(snapshot, request, local, &Predictions::new(None)),
            route,
            limits,
        )
}

/// Whether the endpoint has no room even for a request without tokens, and so for no request that
/// needs only this endpoint.
#[must_use]
pub fn is_full(
    snapshot: &Snapshot,
    local: LocalState<'_>,
    endpoint: EndpointIndex,
    limits: RoomLimits,
) -> bool {
    RankedList::new([endpoint]).is_some_and(|one| {
        !has_room(
            snapshot,
            &Request::default(),
            local,
            &Route::to(one),
            limits,
        )
    })
}

/// Returns the saturation of the endpoints for which `counts` is true, according to the pool's
/// detector; 1 is full.
#[must_use]
pub fn saturation(
    snapshot: &Snapshot,
    local: LocalState<'_>,
    counts: impl Fn(&Endpoint) -> bool,
) -> f64 {
    let endpoints = snapshot.indices().zip(snapshot.endpoints());
    let counted: Vec<EndpointIndex> = endpoints
        .filter(|(_, endpoint)| counts(endpoint))
        .map(|(index, _)| index)
        .collect();
    snapshot.pipeline().saturation(
        &context(
            snapshot,
            &Request::default(),
            local,
            &Predictions::new(None),
        ),
        &counted,
    )
}

fn context<'a>(
    snapshot: &'a Snapshot,
    request: &'a Request<'a>,
    local: LocalState<'a>,
    predictions: &'a Predictions,
) -> Context<'a> {
    let table = snapshot.table();
    let pipeline = snapshot.pipeline();
    let settings = pipeline.production();
    let predicts = pipeline.predicts();
    Context {
        table,
        request,
        local,
        settings,
        predicts,
        predictions,
        affinity_blocks: local.matched_blocks,
        early_stage: false,
    }
}

fn decide(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: LocalState<'_>,
    predictions: &Predictions,
    rng: &mut Rng,
    mut explanation: Option<&mut Explanation>,
) -> Decision {
    let table = snapshot.table();
    let pipeline = snapshot.pipeline();
    let context = context(snapshot, request, local, predictions);
    if let Some(explanation) = explanation.as_deref_mut() {
        *explanation = Explanation {
            prompt_tokens: request.prompt_tokens,
            uncached_tokens: table
                .indices()
                .map(|index| context.uncached_tokens(index))
                .collect(),
            asks: request.slo,
            predictions: predictions.get(table, request, &local).to_vec(),
            ..Explanation::default()
        };
    }
    let mut allowed = Candidates::new(table.indices());
    for (name, filter, unavailable) in STRUCTURAL {
        run_filter(
            &context,
            name,
            filter,
            &mut allowed,
            rng,
            explanation.as_deref_mut().map(|e| &mut e.dropped),
        );
        if allowed.is_empty() {
            return Decision::Unavailable(unavailable);
        }
    }
    let affinity = local
        .peers_unreachable
        .then(|| rendezvous_affinity(&context, allowed.indices()));
    let context = Context {
        affinity_blocks: affinity.as_deref().unwrap_or(context.affinity_blocks),
        ..context
    };
    if let Some(why) = pipeline.sheds(&context, allowed.indices(), rng) {
        return Decision::Shed(why);
    }
    pipeline.handler().route(&mut SchedulingRun::new(
        context,
        pipeline.profiles(),
        allowed,
        rng,
        explanation,
    ))
}

/// Returns the affinity blocks of each endpoint: the cached blocks. If no endpoint has cached a
/// block of the prompt, favours the prompt's rendezvous endpoint, as if this endpoint had cached
/// [`HOME_PERCENT`] of the prompt.
#[cold]
fn rendezvous_affinity(context: &Context<'_>, allowed: &[EndpointIndex]) -> Vec<u32> {
    let mut affinity = context.local.matched_blocks.to_vec();
    let Some(head) = context
        .request
        .prefix_blocks
        .first()
        .filter(|_| affinity.iter().all(|&blocks| blocks == 0))
    else {
        return affinity;
    };
    let LocalState { in_flight, .. } = context.local;
    let may = |&index: &EndpointIndex| {
        Some((
            index,
            context
                .table
                .id(index)
                .filter(|_| !context.local.ejected(index))?,
        ))
    };
    let (indices, refs): (Vec<_>, Vec<_>) = allowed.iter().filter_map(may).unzip();
    let rendezvous =
        rendezvous_endpoint(*head, &refs, |at| Some(in_flight.requests(*refs.get(at)?)))
            .and_then(|at| indices.get(at));
    if let Some(blocks) = rendezvous.and_then(|index| affinity.get_mut(index.get())) {
        *blocks = context.request.blocks().saturating_mul(HOME_PERCENT) / 100;
    }
    affinity
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Endpoint, EndpointRef, Generation, Readiness, Slot};
    use crate::in_flight::InFlight;
    use crate::metrics::EndpointMetrics;
    use crate::pipeline::Pipeline;
    use crate::pipeline::{PipelineSpec, PluginSpec};
    use crate::request::SubsetHint;
    use crate::run::SETTLED_MS;
    use crate::snapshot::Version;

    fn by_queue(ranked_max: u32) -> PipelineSpec {
        PipelineSpec::of_one_profile(
            "queue",
            vec![(PluginSpec::of_type("queue-scorer"), 1.0)],
            ranked_max,
        )
    }

    /// Returns a snapshot with endpoints at 10.0.0.1:8000, 10.0.0.2:8000 and so on, which have
    /// these ages (in ms) and queue depths.
    fn pool(rows: &[(u64, f32)]) -> Snapshot {
        let endpoint = |at: usize, age_ms| Endpoint {
            id: EndpointRef {
                slot: Slot(u16::try_from(at).unwrap()),
                generation: Generation(0),
            },
            name: format!("pod-{at}").into(),
            address: format!("10.0.0.{}:8000", at + 1).into(),
            readiness: Readiness::Ready,
            labels: Box::new([]),
            models: std::sync::Arc::default(),
            age_ms,
        };
        let endpoints = rows
            .iter()
            .enumerate()
            .map(|(at, &(age_ms, _))| endpoint(at, age_ms))
            .collect();
        let metrics = rows
            .iter()
            .map(|&(_, queue)| EndpointMetrics {
                queue_depth: Some(queue),
                ..EndpointMetrics::default()
            })
            .collect();
        let pipeline = Pipeline::build(&by_queue(3)).unwrap();
        Snapshot::try_new(Version::default(), endpoints, metrics, pipeline).unwrap()
    }

    fn local<'a>(in_flight: &'a InFlight, ejected: &'a [bool]) -> LocalState<'a> {
        LocalState {
            ejected,
            ..LocalState::new(in_flight)
        }
    }

    fn route(
        snapshot: &Snapshot,
        request: &Request<'_>,
        ejected: &[bool],
    ) -> Result<Vec<usize>, UnavailableReason> {
        match schedule(
            snapshot,
            request,
            local(&InFlight::default(), ejected),
            &mut Rng::seeded(1),
            None,
        ) {
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
    fn each_reason_for_no_endpoint_has_its_name() {
        assert_eq!(
            route(&pool(&[]), &Request::default(), &[]),
            Err(UnavailableReason::NoReadyEndpoint)
        );
        let elsewhere = SubsetHint::parse(["10.9.9.9"]);
        let request = Request {
            subset: Some(&elsewhere),
            ..Request::default()
        };
        assert_eq!(
            route(&pool(&[(OLD, 0.0)]), &request, &[]),
            Err(UnavailableReason::SubsetEmpty)
        );
    }

    #[test]
    fn ejection_never_takes_the_last() {
        let pool = pool(&[(OLD, 0.0), (OLD, 9.0)]);
        assert_eq!(
            route(&pool, &Request::default(), &[true, false]),
            Ok(vec![1])
        );
        assert_eq!(
            route(&pool, &Request::default(), &[true, true]),
            Ok(vec![0, 1])
        );
        let first = SubsetHint::parse(["10.0.0.1"]);
        let request = Request {
            subset: Some(&first),
            ..Request::default()
        };
        assert_eq!(
            route(&pool, &request, &[true, false]),
            Ok(vec![0]),
            "the last of the subset is the last"
        );
    }

    #[test]
    fn a_list_of_new_endpoints_ends_with_the_best_settled_one() {
        let full = pool(&[(NEW, 0.0), (NEW, 1.0), (NEW, 2.0), (OLD, 9.0), (OLD, 8.0)]);
        assert_eq!(route(&full, &Request::default(), &[]), Ok(vec![0, 1, 4]));
        let short = pool(&[(NEW, 0.0), (OLD, 9.0)]);
        assert_eq!(route(&short, &Request::default(), &[]), Ok(vec![0, 1]));
        let young = pool(&[(NEW, 0.0), (NEW, 1.0), (NEW, 2.0), (NEW, 3.0)]);
        assert_eq!(
            route(&young, &Request::default(), &[]),
            Ok(vec![0, 1, 2]),
            "where none is settled there is none to add"
        );
        let mixed = pool(&[(NEW, 0.0), (OLD, 1.0), (NEW, 2.0), (OLD, 3.0)]);
        assert_eq!(
            route(&mixed, &Request::default(), &[]),
            Ok(vec![0, 1, 2]),
            "one settled endpoint in the list is enough"
        );
    }

    #[test]
    fn the_endpoint_that_answered_last_is_the_second_choice() {
        let pool = pool(&[(OLD, 0.0), (OLD, 1.0), (OLD, 2.0), (OLD, 3.0)]);
        let list = |last_answers: &[u64]| -> Vec<usize> {
            let in_flight = InFlight::default();
            match schedule(
                &pool,
                &Request::default(),
                LocalState {
                    last_answers,
                    ..local(&in_flight, &[])
                },
                &mut Rng::seeded(1),
                None,
            ) {
                Decision::Route(route) => route.ranked.iter().map(EndpointIndex::get).collect(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(list(&[]), [0, 1, 2]);
        assert_eq!(
            list(&[9, 0, 5, 7]),
            [0, 2, 1],
            "the first is the pick, and the fourth is not in the list"
        );
        assert_eq!(list(&[0, 5, 5, 5]), [0, 1, 2]);
    }

    #[test]
    fn a_list_of_one_is_not_taken_from_the_new() {
        let spec = by_queue(1);
        let rows = pool(&[(NEW, 0.0), (OLD, 9.0)]);
        let endpoints = rows.endpoints().to_vec();
        let metrics = rows.metrics().to_vec();
        let snapshot = Snapshot::try_new(
            Version::default(),
            endpoints,
            metrics,
            Pipeline::build(&spec).unwrap(),
        )
        .unwrap();
        assert_eq!(route(&snapshot, &Request::default(), &[]), Ok(vec![0]));
    }

    #[test]
    fn an_old_explanation_is_forgotten() {
        let pool = pool(&[(OLD, 0.0), (OLD, 4.0)]);
        let in_flight = InFlight::default();
        let mut fresh = Explanation::default();
        let _ = schedule(
            &pool,
            &Request::default(),
            local(&in_flight, &[]),
            &mut Rng::seeded(1),
            Some(&mut fresh),
        );
        let mut used = fresh.clone();
        let _ = schedule(
            &pool,
            &Request::default(),
            local(&in_flight, &[]),
            &mut Rng::seeded(1),
            Some(&mut used),
        );
        assert_eq!(fresh, used);
        assert_eq!(fresh.profiles.len(), 1);
        assert_eq!(
            (
                fresh.profiles[0].scores.len(),
                fresh.profiles[0].totals.len()
            ),
            (1, 2)
        );
    }
}
