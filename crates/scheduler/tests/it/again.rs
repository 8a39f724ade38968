//! Predictions of a request: at each endpoint, and for the endpoint that gets the request. When a
//! decision is repeated, recorded predictions replace those of the model.

use std::sync::Arc;

use learning::LatencyLearner;
use scheduler::in_flight::InFlight;
use scheduler::latency::step::StepModel;
use scheduler::latency::{Conditions, LatencyModel, Observation, Prediction, RequestEnd, TokenGap};
use scheduler::{
    Explanation, LocalState, Request, Rng, Slo, Snapshot, predict, schedule_again, tracked_slo,
};

use crate::case::DecisionCase;

/// The TTFT and TPOT that the model predicts at each endpoint, in ms.
const PREDICTED: [[f32; 2]; 4] = [[190.0, 10.0], [150.0, 45.0], [110.0, 30.0], [400.0, 30.0]];

fn snapshot() -> Snapshot {
    snapshot_with("")
}

/// Returns the snapshot with further plugins in its pipeline.
fn snapshot_with(plugins: &str) -> Snapshot {
    let rows: String = PREDICTED
        .iter()
        .zip('a'..)
        .map(|([ttft, tpot], name)| format!("  {name}  {ttft}  {tpot}\n"))
        .collect();
    let profile = "profile\n  latency-scorer\n  max-score-picker\n";
    let text = format!(
        "{plugins}\n{profile}\npool\n  name  ttft  tpot\n{rows}\nrequest\n  latency_prediction yes\n"
    );
    DecisionCase::parse(&text).unwrap().snapshot().unwrap()
}

fn with_local<R>(run: impl FnOnce(LocalState<'_>) -> R) -> R {
    let in_flight = InFlight::default();
    run(LocalState::new(&in_flight))
}

fn slo(ttft_ms: u32, tpot_ms: u32) -> Slo {
    Slo {
        ttft_us: Some(ttft_ms * 1_000),
        tpot_us: Some(tpot_ms * 1_000),
    }
}

fn asking(slo: Slo) -> Request<'static> {
    Request {
        slo,
        prompt_tokens: 100,
        ..Request::default()
    }
}

#[test]
fn each_endpoint_has_its_prospect() {
    let snapshot = snapshot();
    let predicted = with_local(|local| predict(&snapshot, &asking(slo(200, 50)), local));
    let predicted: Vec<[f32; 2]> = predicted
        .into_iter()
        .map(|predicted| predicted.unwrap().prediction)
        .map(|p| [p.ttft_ms, p.tpot_ms])
        .collect();
    assert_eq!(predicted.len(), PREDICTED.len());
    assert!(
        predicted
            .as_flattened()
            .iter()
            .zip(PREDICTED.as_flattened())
            .all(|(predicted, is)| (predicted - is).abs() < 0.01),
        "{predicted:?}"
    );
}

#[test]
fn what_can_be_kept_is_promised_and_no_more() {
    let snapshot = snapshot();
    let first = snapshot.indices().next().unwrap();
    let counts =
        |asked: Slo| with_local(|local| tracked_slo(&snapshot, &asking(asked), local, first));
    assert_eq!(
        (counts(slo(191, 11)).slo, counts(slo(191, 11)).counts),
        (slo(191, 11), slo(191, 11))
    );
    assert_eq!(
        counts(slo(189, 11)).counts,
        Slo {
            ttft_us: None,
            ..slo(0, 11)
        }
    );
    assert_eq!(
        counts(slo(191, 9)).counts,
        Slo {
            tpot_us: None,
            ..slo(191, 0)
        }
    );
    assert!(counts(slo(189, 9)).predicted.is_some());
}

#[test]
fn of_a_time_per_token_only_what_may_be_used_up_is_promised() {
    let snapshot = snapshot_with("plugins\n  predicted-latency-producer sloBufferFactor=0.5");
    let first = snapshot.indices().next().unwrap();
    let counts =
        |asked| with_local(|local| tracked_slo(&snapshot, &asking(asked), local, first)).counts;
    assert_eq!(
        [counts(slo(191, 21)), counts(slo(191, 19))],
        [
            slo(191, 21),
            Slo {
                tpot_us: None,
                ..slo(191, 0)
            }
        ]
    );
}

/// Returns a model that learned from `requests` requests of a pool. In that pool a first token
/// takes 20 ms plus 0.05 ms per uncached token, and a fifth more for each other request. Each
/// further token takes 9 ms, plus 1 ms for each other request and for each thousand tokens of the
/// prompt.
fn learned(snapshot: &Snapshot, requests: u64) -> Arc<LatencyModel> {
    let mut rng = Rng::seeded(3);
    let mut learner = LatencyLearner::default();
    for at in 0..requests {
        let requests = (rng.open01() * 10.0).floor();
        let tokens = rng.open01() * 8_000.0;
        let conditions = Conditions {
            queued: Some(0.0),
            running: Some(requests),
            requests,
            prompt_tokens: tokens,
            uncached_tokens: tokens,
            ..Conditions::default()
        };
        let tpot_ms = 9.0 + requests + 0.001 * tokens;
        let observation = Observation {
            endpoint: snapshot.endpoints()[rng.below(PREDICTED.len())].id,
            conditions,
            ended: RequestEnd::Done,
            ttft_ms: Some((20.0 + 0.05 * tokens) * (1.0 + 0.2 * requests)),
            tpot_ms: Some(tpot_ms),
            output_tokens: None,
            first_token: None,
            gap: Some(TokenGap {
                batch: requests + 1.0,
                context_tokens: tokens,
                gap_ms: tpot_ms,
            }),
        };
        learner.observe(&observation, None);
        learner.publish(at * 50);
    }
    Arc::new(learner.model().unwrap())
}

#[test]
fn an_slo_that_an_idle_endpoint_could_not_keep_does_not_count() {
    let snapshot = snapshot();
    let model = learned(&snapshot, 2_000);
    let snapshot = snapshot.with_latency(Some(model));
    let first = snapshot.indices().next().unwrap();
    let counts = |prompt_tokens, asked| {
        let request = Request {
            prompt_tokens,
            ..asking(asked)
        };
        let Slo { ttft_us, tpot_us } =
            with_local(|local| tracked_slo(&snapshot, &request, local, first)).counts;
        (ttft_us.is_some(), tpot_us.is_some())
    };
    // The long request takes 370 ms of prefill, then 16 ms per token. A short prompt takes 25 ms
    // and 9 ms.
    assert_eq!(
        [(200, 12), (200, 20), (600, 12)].map(|(ttft, tpot)| counts(7_000, slo(ttft, tpot))),
        [(false, false), (false, true), (true, false)]
    );
    assert_eq!(counts(100, slo(200, 12)), (true, true));
}

#[test]
fn without_a_prediction_the_step_model_decides_which_slos_count() {
    let snapshot = snapshot();
    let model = learned(&snapshot, 40);
    let first = snapshot.indices().next().unwrap();
    let step = StepModel::from_parts([10.0, 0.05, 0.0], [5.0, 0.5, 0.001], 200.0).with_speed(
        snapshot.endpoints()[0].id,
        2.0,
        3.0,
    );
    let snapshot = snapshot.with_latency(Some(model)).with_step(Arc::new(step));
    let tracked = |asked| {
        let request = Request {
            prompt_tokens: 1_000,
            ..asking(asked)
        };
        with_local(|local| tracked_slo(&snapshot, &request, local, first))
    };
    // TTFT is twice the sum of 10 ms and 50 ms for the prompt. TPOT is three times the sum of 5 ms,
    // 0.5 ms for the request, and 1 ms for its context.
    assert_eq!(
        (
            tracked(slo(121, 20)).counts,
            tracked(slo(121, 20)).predicted
        ),
        (slo(121, 20), None)
    );
    assert_eq!(tracked(slo(119, 19)).counts, Slo::default());
}

#[test]
fn an_endpoint_without_a_prediction_counts_as_the_mean_of_the_best() {
    let snapshot = snapshot();
    let again = |unknown: usize| -> Vec<f32> {
        let predicted = PREDICTED
            .iter()
            .enumerate()
            .map(|(at, &[ttft_ms, tpot_ms])| {
                (at != unknown).then_some(Prediction {
                    ttft_ms,
                    tpot_ms,
                    ttft_p90_ms: ttft_ms,
                    tpot_p90_ms: tpot_ms,
                })
            });
        let mut explanation = Explanation::default();
        with_local(|local| {
            let request = asking(slo(200, 50));
            schedule_again(
                &snapshot,
                &request,
                local,
                predicted.collect(),
                &mut Rng::seeded(1),
                Some(&mut explanation),
            )
        });
        assert_eq!(
            (
                explanation.prompt_tokens,
                &explanation.uncached_tokens[..],
                explanation.asks
            ),
            (100, &[100; 4][..], slo(200, 50))
        );
        explanation.profiles[0]
            .totals
            .iter()
            .map(|(_, score)| *score)
            .collect()
    };
    let near = |scores: &[f32], expected: [f32; 4]| {
        assert!(
            scores
                .iter()
                .zip(expected)
                .all(|(score, expected)| (score - expected).abs() < 0.001),
            "{scores:?} {expected:?}"
        );
    };
    near(&again(4), [0.81, 0.61, 0.12, 0.0]);
    // Over a and b alone, TTFT headrooms are 10 and 50, and TPOT headrooms are 40 and 5.
    near(&again(2), [0.81, 0.2, 0.505, 0.0]);
}
