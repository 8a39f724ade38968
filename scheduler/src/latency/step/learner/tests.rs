use super::*;
use crate::endpoint::Slot;
use crate::rng::Rng;
use proptest::prelude::*;

fn endpoint(slot: u16, generation: u32) -> EndpointRef {
    EndpointRef { slot: Slot(slot), generation: Generation(generation) }
}

/// Samples of engines with the costs of `truth`, each `factor(slot)` times as long, with a tenth of
/// noise.
fn taught(learner: &mut StepLearner, truth: &StepModel, (seed, samples): (u64, usize), factor: impl Fn(u16) -> f32) {
    let mut rng = Rng::seeded(seed);
    for _ in 0..samples {
        let slot = u16::try_from(rng.below(4)).unwrap();
        let noise = factor(slot) * (0.9 + 0.2 * rng.open01());
        let prompt = 50.0 + 8_000.0 * rng.open01() * rng.open01();
        let uncached = prompt * rng.open01();
        let service_ms = noise * truth.prefill_ms(uncached, prompt);
        assert!(learner.first_token(
            endpoint(slot, 1),
            &FirstToken { uncached_tokens: uncached, prompt_tokens: prompt, service_ms },
            false
        ));
        let (batch, context_tokens) = (1.0 + 60.0 * rng.open01(), 100_000.0 * rng.open01());
        let gap_ms = noise * truth.decode_ms(batch, context_tokens);
        assert!(learner.gap(endpoint(slot, 1), &TokenGap { batch, context_tokens, gap_ms }));
    }
}

fn off(model: &StepModel, truth: &StepModel) -> f32 {
    let prefills = [(100.0, 100.0), (500.0, 4_000.0), (4_000.0, 4_000.0), (8_000.0, 8_000.0)];
    let steps = [(1.0, 1_000.0), (32.0, 30_000.0), (64.0, 100_000.0)];
    let prefills = prefills.iter().map(|&(u, n)| model.prefill_ms(u, n) / truth.prefill_ms(u, n));
    let steps = steps.iter().map(|&(b, k)| model.decode_ms(b, k) / truth.decode_ms(b, k));
    prefills.chain(steps).map(|ratio| (ratio - 1.0).abs()).fold(0.0, f32::max)
}

/// Llama-3.1-8B on an H100, from kernel measurements.
fn h100() -> StepModel {
    StepModel::of([9.6, 0.0168, 5.46e-7], [7.07, 0.00745, 4.31e-5], 200.0)
}

#[test]
fn learns_another_machine_than_its_prior_and_forgets_it_for_a_third() {
    let mut learner = StepLearner::default();
    taught(&mut learner, &h100(), (1, 60), |_| 1.0);
    assert!(off(&learner.model(), &h100()) < 0.25, "{:?}", learner.model());
    taught(&mut learner, &h100(), (2, 1_000), |_| 1.0);
    assert!(off(&learner.model(), &h100()) < 0.05, "{:?}", learner.model());
    assert_eq!(learner.model().speed(endpoint(1, 1)), (1.0, 1.0), "noise does not sort equal endpoints");
    assert_eq!(learner.model(), learner.model().without_speeds(), "and no speeds are published");
    assert!(learner.has_compared(endpoint(1, 1)), "but it is known to be average");
    assert!(!learner.has_compared(endpoint(1, 2)) && !learner.has_compared(endpoint(99, 1)));
    let qwen = StepModel::of([10.5, 0.0807, 4.22e-7], [19.2, 0.0248, 5.81e-5], 200.0);
    taught(&mut learner, &qwen, (3, 4_000), |_| 1.0);
    assert!(off(&learner.model(), &qwen) < 0.1, "{:?}", learner.model());
}

#[test]
fn a_slow_endpoint_is_learned_and_its_successor_starts_clean() {
    let mut learner = StepLearner::default();
    taught(&mut learner, &h100(), (1, 2_000), |slot| if slot == 2 { 2.0 } else { 1.0 });
    let model = learner.model();
    let ratio = |of: fn((f32, f32)) -> f32| of(model.speed(endpoint(2, 1))) / of(model.speed(endpoint(0, 1)));
    assert!((1.8..2.2).contains(&ratio(|s| s.0)) && (1.8..2.2).contains(&ratio(|s| s.1)), "{model:?}");
    assert_eq!(model.speed(endpoint(2, 9)), (1.0, 1.0));
    let gap = TokenGap { batch: 1.0, context_tokens: 100.0, gap_ms: model.decode_ms(1.0, 100.0) };
    assert!(learner.gap(endpoint(2, 9), &gap));
    assert_eq!((learner.model().speed(endpoint(2, 9)), learner.model().speed(endpoint(2, 1))), ((1.0, 1.0), (1.0, 1.0)));
}

#[test]
fn an_endpoint_that_alone_gets_a_kind_of_prompt_is_not_faster_for_it() {
    let mut learner = StepLearner::default();
    let mut first = |slot, tokens: (f32, f32), service_ms, queued| {
        let sample = FirstToken { uncached_tokens: tokens.0, prompt_tokens: tokens.1, service_ms };
        assert!(learner.first_token(endpoint(slot, 1), &sample, queued));
    };
    // An engine that takes 150 ms for every request. First short prompts everywhere, most of them
    // beside others.
    for round in 0..500_u16 {
        let alone = round % 80 < 8;
        first(round % 8, (310.0, 310.0), if alone { 150.0 } else { 37.0 }, !alone);
    }
    // Then conversations, one after another, at one endpoint.
    for turn in 0..100 {
        let tokens = [(1_510.0, 1_510.0), (100.0, 1_570.0), (97.0, 1_630.0), (93.0, 1_690.0)][turn % 4];
        first(4, tokens, 150.0, false);
    }
    assert_eq!(learner.model(), learner.model().without_speeds());
}

#[test]
fn impossible_samples_teach_nothing_and_a_stall_little() {
    let mut learner = StepLearner::default();
    taught(&mut learner, &h100(), (1, 500), |_| 1.0);
    let before = learner.model();
    let good = FirstToken { uncached_tokens: 10.0, prompt_tokens: 20.0, service_ms: 12.0 };
    for bad in [f32::NAN, f32::INFINITY, -1.0, 1e30] {
        assert!(!learner.first_token(endpoint(0, 1), &FirstToken { service_ms: bad, ..good }, false));
        assert!(!learner.first_token(endpoint(0, 1), &FirstToken { uncached_tokens: bad, ..good }, false));
        assert!(!learner.gap(endpoint(0, 1), &TokenGap { batch: bad, context_tokens: 1.0, gap_ms: 7.0 }));
        assert!(!learner.gap(endpoint(0, 1), &TokenGap { batch: 1.0, context_tokens: 1.0, gap_ms: bad }));
    }
    assert!(!learner.gap(endpoint(5_000, 1), &TokenGap { batch: 1.0, context_tokens: 1.0, gap_ms: 7.0 }));
    assert_eq!(learner.model(), before);
    assert!(learner.first_token(endpoint(0, 1), &FirstToken { service_ms: 500_000.0, ..good }, false));
    assert!(off(&learner.model(), &before) < 0.05, "{:?} {before:?}", learner.model());
}

#[test]
fn one_in_fifty_that_stalls_for_ten_seconds_does_not_spoil_it() {
    let mut learner = StepLearner::default();
    for round in 0..100_u16 {
        taught(&mut learner, &h100(), (u64::from(round), 50), |_| 1.0);
        let tokens = f32::from(round % 10) * 400.0;
        let sample = FirstToken { uncached_tokens: tokens, prompt_tokens: tokens + 400.0, service_ms: 10_000.0 };
        assert!(learner.first_token(endpoint(round % 4, 1), &sample, false));
        let gap = TokenGap { batch: 1.0 + tokens / 60.0, context_tokens: 25.0 * tokens, gap_ms: 10_000.0 };
        assert!(learner.gap(endpoint(round % 4, 1), &gap));
    }
    let (model, speeds) = (learner.model(), [0, 1, 2, 3].map(|slot| learner.model().speed(endpoint(slot, 1))));
    assert!(off(&model, &h100()) < 0.2, "{model:?}");
    assert!(speeds.iter().all(|(prefill, decode)| (0.9..1.1).contains(prefill) && (0.9..1.1).contains(decode)), "{speeds:?}");
}

#[test]
fn the_mean_output_is_followed() {
    let mut learner = StepLearner::default();
    (0..2_000).for_each(|_| learner.ended(50));
    assert!((learner.model().output_tokens() - 50.0).abs() < 1.0);
    learner.ended(u32::MAX);
    assert!(learner.model().output_tokens() <= 6_000.0, "one absurd count moves it by its share of the maximum");
}

proptest! {
    #[test]
    fn any_samples_give_a_valid_model(
        samples in prop::collection::vec((0_u16..6, 0_u32..3, prop::array::uniform3(prop::num::f32::ANY)), 0..60),
        small in prop::collection::vec((0_u16..6, prop::array::uniform3(0.0_f32..1e6)), 0..60),
    ) {
        let mut learner = StepLearner::default();
        let small = small.into_iter().map(|(slot, numbers)| (slot, 1, numbers));
        for (slot, generation, [a, b, ms]) in samples.into_iter().chain(small) {
            learner.first_token(endpoint(slot, generation), &FirstToken { uncached_tokens: a, prompt_tokens: b, service_ms: ms }, slot % 2 == 0);
            learner.gap(endpoint(slot, generation), &TokenGap { batch: a, context_tokens: b, gap_ms: ms });
            learner.ended(a as u32);
        }
        let model = learner.model();
        prop_assert_eq!(StepModel::from_words(&model.words()), Ok(model), "every number is one it may be");
    }
}
