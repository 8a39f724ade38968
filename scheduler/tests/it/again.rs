//! What is predicted of a request: told of each endpoint, promised of the one it goes to, and taken in place of the model when a decision is made
//! again.

use std::sync::Arc;

use scheduler::in_flight::InFlight;
use scheduler::latency::learn::{Ended, Learner, Observation};
use scheduler::latency::{Conditions, LatencyModel, Prediction};
use scheduler::{Explanation, Local, Request, Rng, Slo, Snapshot, promise, prospects, schedule_again};

use crate::case::Case;

/// By the model, TTFT and TPOT.
const PREDICTED: [[f32; 2]; 4] = [[190.0, 10.0], [150.0, 45.0], [110.0, 30.0], [400.0, 30.0]];

fn snapshot() -> Snapshot {
    let rows: String = PREDICTED.iter().zip('a'..).map(|([ttft, tpot], name)| format!("  {name}  {ttft}  {tpot}\n")).collect();
    let profile = "profile\n  latency-scorer\n  max-score-picker\n";
    let text = format!("{profile}\npool\n  name  ttft  tpot\n{rows}\nrequest\n  latency_prediction yes\n");
    Case::parse(&text).unwrap().snapshot().unwrap()
}

fn with_local<R>(run: impl FnOnce(Local<'_>) -> R) -> R {
    let in_flight = InFlight::default();
    run(Local { in_flight: &in_flight, matched_blocks: &[], ejected: &[], last_cold_picks: &[], adapter_rooms: &[], metrics_stale: false })
}

fn slo(ttft_ms: u32, tpot_ms: u32) -> Slo {
    Slo { ttft_us: Some(ttft_ms * 1_000), tpot_us: Some(tpot_ms * 1_000) }
}

fn asking(slo: Slo) -> Request<'static> {
    Request { slo, prompt_tokens: 100, ..Request::default() }
}

#[test]
fn each_endpoint_has_its_prospect() {
    let snapshot = snapshot();
    let told = with_local(|local| prospects(&snapshot, &asking(slo(200, 50)), local));
    let told: Vec<[f32; 2]> = told.into_iter().map(|told| told.unwrap().prediction).map(|p| [p.ttft_ms, p.tpot_ms]).collect();
    assert_eq!(told.len(), PREDICTED.len());
    assert!(told.as_flattened().iter().zip(PREDICTED.as_flattened()).all(|(told, is)| (told - is).abs() < 0.01), "{told:?}");
}

#[test]
fn what_can_be_kept_is_promised_and_no_more() {
    let snapshot = snapshot();
    let first = snapshot.indices().next().unwrap();
    let counts = |asked: Slo| with_local(|local| promise(&snapshot, &asking(asked), local, first));
    assert_eq!((counts(slo(191, 11)).slo, counts(slo(191, 11)).counts), (slo(191, 11), slo(191, 11)));
    assert_eq!(counts(slo(189, 11)).counts, Slo { ttft_us: None, ..slo(0, 11) });
    assert_eq!(counts(slo(191, 9)).counts, Slo { tpot_us: None, ..slo(191, 0) });
    assert!(counts(slo(189, 9)).predicted.is_some());
}

/// Learned of a pool where a first token takes 20 ms, 0.05 for each token that is not cached, and a fifth more for each other request.
fn learned(snapshot: &Snapshot) -> Arc<LatencyModel> {
    let (mut rng, mut learner) = (Rng::seeded(3), Learner::default());
    for at in 0..2_000_u64 {
        let (requests, tokens) = ((rng.open01() * 10.0).floor(), rng.open01() * 8_000.0);
        let conditions = Conditions {
            queued: Some(0.0),
            running: Some(requests),
            requests,
            prompt_tokens: tokens,
            uncached_tokens: tokens,
            ..Conditions::default()
        };
        let observation = Observation {
            endpoint: snapshot.endpoints()[rng.below(PREDICTED.len())].id,
            conditions,
            ended: Ended::Done,
            ttft_ms: Some((20.0 + 0.05 * tokens) * (1.0 + 0.2 * requests)),
            tpot_ms: Some(9.0 + requests),
            output_tokens: None,
            first_token: None,
            gap: None,
        };
        learner.observe(&observation, None);
        learner.publish(at * 50);
    }
    Arc::new(learner.model().unwrap())
}

#[test]
fn what_an_idle_endpoint_could_not_keep_of_this_very_prompt_counts_for_nobody() {
    let snapshot = snapshot();
    let model = learned(&snapshot);
    let snapshot = snapshot.with_latency(Some(model));
    let first = snapshot.indices().next().unwrap();
    let counts = |prompt_tokens, ttft_ms| {
        let request = Request { prompt_tokens, ..asking(slo(ttft_ms, 1_000)) };
        with_local(|local| promise(&snapshot, &request, local, first)).counts.ttft_us.is_some()
    };
    // 370 ms of work; a short prompt takes 25.
    assert!(!counts(7_000, 200) && counts(7_000, 600));
    assert!(counts(100, 200));
}

#[test]
fn of_whom_nothing_was_predicted_counts_as_the_mean_of_the_best() {
    let snapshot = snapshot();
    let again = |unknown: usize| -> Vec<f32> {
        let predicted = PREDICTED.iter().enumerate().map(|(at, &[ttft_ms, tpot_ms])| {
            (at != unknown).then_some(Prediction { ttft_ms, tpot_ms, ttft_p90_ms: ttft_ms, tpot_p90_ms: tpot_ms })
        });
        let mut explanation = Explanation::default();
        with_local(|local| {
            let request = asking(slo(200, 50));
            schedule_again(&snapshot, &request, local, predicted.collect(), &mut Rng::seeded(1), Some(&mut explanation))
        });
        assert_eq!((explanation.prompt_tokens, &explanation.uncached_tokens[..], explanation.asks), (100, &[100; 4][..], slo(200, 50)));
        explanation.profiles[0].totals.iter().map(|(_, score)| *score).collect()
    };
    let near = |scores: &[f32], expected: [f32; 4]| {
        assert!(scores.iter().zip(expected).all(|(score, expected)| (score - expected).abs() < 0.001), "{scores:?} {expected:?}");
    };
    near(&again(4), [0.81, 0.61, 0.12, 0.0]);
    // Of a and b alone TTFT headrooms are 10 and 50, TPOT headrooms 40 and 5.
    near(&again(2), [0.81, 0.2, 0.505, 0.0]);
}
