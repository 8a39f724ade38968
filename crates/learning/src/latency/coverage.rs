//! Measures the share of outcomes within the predicted median and p90 on synthetic streams. Each
//! stream has 300 outcomes of one endpoint, and the tests count the last 90.

use super::p90::CoverageIntegrator;
use super::*;
use scheduler::latency::Conditions;
use scheduler::{Rng, Slot};

const POD: EndpointRef = EndpointRef {
    slot: Slot(0),
    generation: Generation(1),
};

const OUTCOMES: usize = 300;
const COUNTED: usize = 90;
const SEEDS: u64 = 12;

/// The standard deviation of the number of outcomes within the p90, if each of 90 outcomes were
/// independently within the p90 with probability 0.9: √(90 · 0.9 · 0.1).
const BINOMIAL: f32 = 2.85;

/// Returns the logarithm of the outcome at this position.
type Stream = fn(&mut Rng, usize) -> f32;

/// Returns a nearly normal number with mean 0 and deviation 1: a sum of three uniform numbers.
fn normal(rng: &mut Rng) -> f32 {
    2.0 * (rng.open01() + rng.open01() + rng.open01() - 1.5)
}

/// A description of each stream, and the outcome at a position in it.
const STREAMS: [(&str, Stream); 10] = [
    ("only trembles", |rng, _| 0.1 * normal(rng)),
    ("trembles and falls", |rng, at| {
        0.1 * normal(rng) - 0.01 * at as f32
    }),
    ("trembles and rises", |rng, at| {
        0.1 * normal(rng) + 0.01 * at as f32
    }),
    ("falls", |rng, at| 0.02 * normal(rng) - 0.01 * at as f32),
    ("rises", |rng, at| 0.02 * normal(rng) + 0.01 * at as f32),
    // The outcomes have a Pareto tail: one in a hundred exceeds four times the minimum, and one in
    // a thousand exceeds eight times the minimum.
    ("has a heavy tail", |rng, _| -0.3 * libm::logf(rng.open01())),
    ("steps up", |rng, at| {
        0.1 * normal(rng) + if at < 250 { 0.0 } else { 0.5 }
    }),
    ("steps down", |rng, at| {
        0.1 * normal(rng) - if at < 250 { 0.0 } else { 0.5 }
    }),
    // The stream is like an engine that admits requests in waves: it jumps by a third, with hardly
    // any noise between two jumps.
    ("falls and jumps back", |rng, at| {
        0.02 * normal(rng) - 0.01 * (at % 35) as f32
    }),
    ("falls and jumps back, and hardly trembles", |rng, at| {
        0.005 * normal(rng) - 0.0087 * (at % 35) as f32
    }),
];

/// The number of outcomes by which the streams of two seeds are shifted, so that waves are counted
/// from different phases.
const APART: usize = 3;

/// Counts the last outcomes of a stream that are within the median and within the p90, if `delay`
/// outcomes come between a pick and its own outcome.
fn within(stream: Stream, seed: u64, delay: usize) -> [usize; 2] {
    let mut rng = Rng::seeded(seed);
    let mut learner = LatencyLearner::default();
    let mut model = None::<LatencyModel>;
    let mut said: Vec<Option<Prediction>> = Vec::new();
    let mut within = [0; 2];
    for at in 0..OUTCOMES + delay {
        let conditions = Conditions {
            requests: delay as f32,
            prompt_tokens: 100.0,
            uncached_tokens: 100.0,
            ..Conditions::default()
        };
        said.push(
            model
                .as_ref()
                .and_then(|model| model.predict(POD, &conditions).ok()),
        );
        let Some(outcome) = at.checked_sub(delay) else {
            continue;
        };
        let ms = 200.0 * libm::expf(stream(&mut rng, outcome + APART * seed as usize));
        if let Some(said) = said[outcome].filter(|_| outcome >= OUTCOMES - COUNTED) {
            within[0] += usize::from(ms <= said.ttft_ms);
            within[1] += usize::from(ms <= said.ttft_p90_ms);
        }
        let output_tokens = None;
        let first_token = None;
        let gap = None;
        let ttft_ms = Some(ms);
        let tpot_ms = Some(ms / 10.0);
        let seen = Observation {
            endpoint: POD,
            conditions,
            ended: RequestEnd::Done,
            ttft_ms,
            tpot_ms,
            output_tokens,
            first_token,
            gap,
        };
        assert_eq!(
            learner.observe_after(&seen, said[outcome].as_ref(), delay as f32),
            ObservationVerdict::Learned
        );
        model = learner.publish(FIT_INTERVAL_MS * at as u64).or(model);
    }
    within
}

/// Returns the mean of each number of [`within`] over the seeds, and the standard deviation of the
/// second number.
fn over_seeds(stream: Stream, delay: usize) -> ([f32; 2], f32) {
    let all: Vec<[f32; 2]> = (0..SEEDS)
        .map(|seed| within(stream, seed, delay).map(|count| count as f32))
        .collect();
    let mean = [0, 1].map(|at| all.iter().map(|within| within[at]).sum::<f32>() / all.len() as f32);
    (
        mean,
        (all.iter()
            .map(|within| (within[1] - mean[1]).powi(2))
            .sum::<f32>()
            / all.len() as f32)
            .sqrt(),
    )
}

#[test]
fn nine_of_ten_of_few_outcomes_are_within_p90_with_half_the_deviation_of_chance() {
    for (name, stream) in STREAMS {
        let ([middle, ninth], spread) = over_seeds(stream, 0);
        assert!(
            (36.0..=54.0).contains(&middle),
            "40 to 60 % of 90 are within the middle where it {name}: {middle}"
        );
        assert!(
            (79.2..=82.8).contains(&ninth) && spread < BINOMIAL / 2.0,
            "88 to 92 % of 90 where it {name}: {ninth} ± {spread}"
        );
    }
}

#[test]
fn late_outcomes_are_left_to_chance() {
    for (name, stream) in [STREAMS[0], STREAMS[5]] {
        let ([_, ninth], spread) = over_seeds(stream, 30);
        assert!(
            (79.2..=82.8).contains(&ninth) && spread < 1.6 * BINOMIAL,
            "88 to 92 % of 90 where it {name}: {ninth} ± {spread}"
        );
    }
}

#[test]
fn a_surplus_above_p90_is_corrected_once_and_less_in_a_longer_run() {
    let after = |outcomes: usize, above: usize| {
        let mut integrator = CoverageIntegrator::default();
        (0..outcomes).for_each(|at| integrator.outcome(0.1, Some(at >= outcomes - above)));
        integrator.at()
    };
    let first = |above: f32| 0.5 * 0.1 * above; // each half of the scale
    assert!((after(1, 1) - first(0.9)).abs() < 1e-4);
    assert!(
        (after(20, 20) - first(3.0)).abs() < 1e-4,
        "no more than three at first: {}",
        after(20, 20)
    );
    assert!(
        (after(2_000, 20) - first(9.0) / 9.0).abs() < 1e-4,
        "three times as many later, by a ninth each: {}",
        after(2_000, 20)
    );
    let mut integrator = CoverageIntegrator::default();
    (0..10).for_each(|at| integrator.outcome(0.1, Some(at == 0)));
    assert!(
        integrator.at().abs() < 1e-4,
        "one of ten is as it should be: {}",
        integrator.at()
    );
    integrator.outcome(0.1, Some(true));
    integrator.outcome(0.1, None);
    assert_eq!(
        integrator.at(),
        0.0,
        "a prediction that is out of date is not corrected"
    );
}
