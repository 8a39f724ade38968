use super::choice::{TREES_SAMPLES_MIN, chosen};
use super::fit::FitRow;
use super::offset::EndpointOffsets;
use super::p90::{LogOutcome, P90Tracker};
use super::target::FRESH_MIN;
use super::*;
use crate::Calibration;
use proptest::prelude::*;
use scheduler::latency::{
    Conditions, FirstToken, InvalidModel, NoPrediction, SAMPLES_MIN, TERMS, WORDS_MAX,
};
use scheduler::{ENDPOINTS_MAX, Rng, Slot};

const ENDPOINTS: u16 = 4;

/// Positions of the sample counts in the words of a model without trees.
const SAMPLES_AT: [usize; 2] = [18, 44];

fn endpoint(slot: u16, generation: u32) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(generation),
    }
}

/// A pool of engines whose prefill time grows with the queue and the prompt, and whose decode step
/// takes longer if more requests run.
struct LearnerWorld {
    rng: Rng,
    learner: LatencyLearner,
    model: Option<LatencyModel>,
    now_ms: u64,
    /// The factor on the times of each slot's engine.
    factors: [f32; ENDPOINTS as usize],
    generations: [u32; ENDPOINTS as usize],
}

impl LearnerWorld {
    fn new(seed: u64) -> Self {
        Self {
            rng: Rng::seeded(seed),
            learner: LatencyLearner::default(),
            model: None,
            now_ms: 0,
            factors: [1.0; 4],
            generations: [1; 4],
        }
    }

    fn conditions(&mut self) -> Conditions {
        let requests = (self.rng.open01() * 30.0).floor();
        let queued = (requests - 20.0).max(0.0);
        let prompt_tokens = 20.0 + (8_000.0 * self.rng.open01() * self.rng.open01()).floor();
        Conditions {
            queued: Some(queued),
            running: Some(requests - queued),
            requests,
            prefill_tokens: queued * 1_500.0,
            context_tokens: (requests - queued) * 2_000.0,
            kv_utilization: Some(requests / 40.0),
            prompt_tokens,
            uncached_tokens: (prompt_tokens * self.rng.open01()).floor(),
        }
    }

    /// Sends one request to `slot`. Returns the relative errors of its prediction (TTFT, TPOT), if
    /// the model predicted the request.
    fn request(&mut self, slot: u16) -> Option<(f32, f32)> {
        let at = usize::from(slot);
        let endpoint = endpoint(slot, self.generations[at]);
        let conditions = self.conditions();
        let (ttft_ms, tpot_ms) = self.takes(slot, &conditions);
        let predicted = self
            .model
            .as_ref()
            .and_then(|model| model.predict(endpoint, &conditions).ok());
        self.learn(
            Observation {
                ttft_ms: Some(ttft_ms),
                tpot_ms: Some(tpot_ms),
                ..bare(endpoint, conditions)
            },
            predicted.as_ref(),
        );
        predicted.map(|said| {
            (
                (said.ttft_ms / ttft_ms - 1.0).abs(),
                (said.tpot_ms / tpot_ms - 1.0).abs(),
            )
        })
    }

    /// Returns the TTFT and the TPOT of a request at `slot` under these conditions, with noise of
    /// up to a tenth in both directions.
    fn takes(&mut self, slot: u16, conditions: &Conditions) -> (f32, f32) {
        let factor = self.factors[usize::from(slot)];
        let mut noisy = |ms: f32| factor * (0.9 + 0.2 * self.rng.open01()) * ms;
        (
            noisy(25.0 + 0.04 * (conditions.uncached_tokens + conditions.prefill_tokens)),
            noisy(8.0 + 0.3 * conditions.requests),
        )
    }

    fn learn(&mut self, observation: Observation, said: Option<&Prediction>) {
        assert_eq!(
            self.learner.observe(&observation, said),
            ObservationVerdict::Learned
        );
        self.now_ms += 50;
        self.model = self.learner.publish(self.now_ms).or(self.model.take());
    }

    /// Sends `requests` over all endpoints; returns the mean errors of the last `judged` that
    /// `slot` served.
    fn run(&mut self, requests: usize, judged: usize, slot: u16) -> (f32, f32) {
        let mut errors = Vec::new();
        for _ in 0..requests {
            let served = u16::try_from(self.rng.below(usize::from(ENDPOINTS))).unwrap();
            errors.extend(self.request(served).filter(|_| served == slot));
        }
        let last = &errors[errors.len().saturating_sub(judged)..];
        let count = last.len() as f32;
        (
            last.iter().map(|e| e.0).sum::<f32>() / count,
            last.iter().map(|e| e.1).sum::<f32>() / count,
        )
    }
}

fn bare(endpoint: EndpointRef, conditions: Conditions) -> Observation {
    let ttft_ms = None;
    let tpot_ms = None;
    let output_tokens = None;
    let first_token = None;
    let gap = None;
    Observation {
        endpoint,
        conditions,
        ended: RequestEnd::Done,
        ttft_ms,
        tpot_ms,
        output_tokens,
        first_token,
        gap,
    }
}

#[test]
fn the_model_starts_empty_then_has_too_little_data_then_predicts() {
    let mut world = LearnerWorld::new(1);
    for _ in 0..FRESH_MIN - 1 {
        assert_eq!(world.request(0), None);
    }
    assert_eq!(
        world.model, None,
        "nothing is published before there is anything to fit to"
    );
    while world.learner.standing().learned < u64::from(SAMPLES_MIN) - 2 {
        world.request(0);
    }
    let model = world.model.as_ref().unwrap();
    assert_eq!(
        model.predict(endpoint(0, 1), &Conditions::default()),
        Err(NoPrediction::TooLittleData)
    );
    let (ttft, tpot) = world.run(200, 100, 0);
    assert!(
        ttft < 0.12 && tpot < 0.12,
        "a tenth of noise either way, and little more: {ttft} {tpot}"
    );
}

#[test]
fn predictions_are_within_the_noise_and_nine_of_ten_outcomes_within_p90() {
    let mut calibration = [Calibration::default(); 2];
    for seed in 2..6 {
        let mut world = LearnerWorld::new(seed);
        world.run(1_500, 1, 0);
        for _ in 0..500 {
            let conditions = world.conditions();
            let said = world
                .model
                .as_ref()
                .unwrap()
                .predict(endpoint(1, 1), &conditions)
                .unwrap();
            let (ttft_ms, tpot_ms) = world.takes(1, &conditions);
            calibration[0].add(said.ttft_ms, said.ttft_p90_ms, ttft_ms);
            calibration[1].add(said.tpot_ms, said.tpot_p90_ms, tpot_ms);
        }
    }
    for calibration in calibration {
        let mape = calibration.mape().unwrap();
        let coverage = calibration.coverage90().unwrap();
        assert!(
            mape < 0.07 && (0.85..0.95).contains(&coverage),
            "{mape} {coverage}"
        );
    }
}

#[test]
fn nine_of_ten_are_within_p90_while_the_whole_pool_slows_down() {
    let mut world = LearnerWorld::new(5);
    world.run(1_000, 1, 0);
    let mut within = [0_u16; 2];
    for at in 0..600_u16 {
        world.factors = world.factors.map(|factor| factor * 1.002);
        let endpoint = endpoint(at % ENDPOINTS, 1);
        let conditions = world.conditions();
        let said = world
            .model
            .as_ref()
            .unwrap()
            .predict(endpoint, &conditions)
            .unwrap();
        let (ttft_ms, tpot_ms) = world.takes(at % ENDPOINTS, &conditions);
        within[0] += u16::from(ttft_ms <= said.ttft_p90_ms);
        within[1] += u16::from(tpot_ms <= said.tpot_p90_ms);
        world.learn(
            Observation {
                ttft_ms: Some(ttft_ms),
                tpot_ms: Some(tpot_ms),
                ..bare(endpoint, conditions)
            },
            Some(&said),
        );
    }
    assert!(
        within.iter().all(|within| (516..=564).contains(within)),
        "86 to 94 % of 600: {within:?}"
    );
}

#[test]
fn an_endpoint_that_slows_down_threefold_is_known_within_two_hundred_requests() {
    let mut before = [0.0; 2];
    let mut after = [0.0; 2];
    let mut others = [0.0; 2];
    let add =
        |sums: &mut [f32; 2], errors: (f32, f32)| *sums = [sums[0] + errors.0, sums[1] + errors.1];
    for seed in 3..9 {
        let mut world = LearnerWorld::new(seed);
        add(&mut before, world.run(1_000, 150, 2));
        world.factors[2] = 3.0;
        // About fifty of the two hundred requests go to the endpoint itself.
        world.run(200, 1, 2);
        add(&mut after, world.run(400, 100, 2));
        add(&mut others, world.run(400, 100, 1));
        assert!(world.learner.standing().drifts > 0);
    }
    for (errors, whose) in [(after, "its own"), (others, "the others'")] {
        assert!(
            errors[0] <= 1.2 * before[0] && errors[1] <= 1.2 * before[1],
            "{whose}, of six seeds: {before:?} -> {errors:?}"
        );
    }
}

#[test]
fn a_slow_pod_is_learned_without_a_label_and_its_successor_at_the_address_starts_clean() {
    let mut world = LearnerWorld::new(9);
    world.factors[3] = 2.5;
    world.run(1_000, 1, 0);
    let model = world.model.clone().unwrap();
    let factor = model
        .endpoints()
        .find(|factor| factor.endpoint == endpoint(3, 1))
        .unwrap();
    let others = model
        .endpoints()
        .find(|factor| factor.endpoint == endpoint(1, 1))
        .map_or(1.0, |factor| factor.ttft);
    assert!(
        (2.2..2.8).contains(&(factor.ttft / others)),
        "{factor:?} {others}"
    );

    let conditions = world.conditions();
    let of = |model: &LatencyModel, generation| {
        model
            .predict(endpoint(3, generation), &conditions)
            .unwrap()
            .ttft_ms
    };
    assert!(
        of(&model, 2) < of(&model, 1) / 1.5,
        "nothing of the former generation counts for the next"
    );
    (world.generations[3], world.factors[3]) = (2, 1.0);
    let errors = world.run(400, 50, 3);
    assert!(errors.0 < 0.12, "{errors:?}");
    let model = world.model.unwrap();
    assert!(
        (0.85..1.15).contains(
            &(of(&model, 2) / model.predict(endpoint(1, 1), &conditions).unwrap().ttft_ms)
        )
    );
}

#[test]
fn impossible_and_aborted_requests_teach_nothing() {
    let mut world = LearnerWorld::new(10);
    world.run(500, 1, 0);
    let before = world.learner.standing();
    let words = world.learner.model().unwrap().words();
    let good = Observation {
        ttft_ms: Some(100.0),
        tpot_ms: Some(10.0),
        ..bare(endpoint(0, 1), world.conditions())
    };
    let mut absurd = Vec::new();
    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 1e30] {
        let with = |of: fn(&mut Observation, f32)| {
            let mut bad = good;
            of(&mut bad, number);
            bad
        };
        absurd.extend([
            with(|o, number| o.ttft_ms = Some(number)),
            with(|o, number| o.tpot_ms = Some(number)),
            with(|o, number| o.conditions.requests = number),
            with(|o, number| o.conditions.queued = Some(number)),
            with(|o, number| o.conditions.prompt_tokens = number),
            with(|o, number| o.conditions.uncached_tokens = number),
            with(|o, number| o.conditions.kv_utilization = Some(number)),
        ]);
    }
    absurd.push(Observation {
        ttft_ms: Some(0.0),
        ..good
    });
    absurd.push(Observation {
        conditions: Conditions {
            kv_utilization: Some(1.5),
            ..good.conditions
        },
        ..good
    });
    for bad in &absurd {
        assert_eq!(
            world.learner.observe(bad, None),
            ObservationVerdict::Refused,
            "{bad:?}"
        );
    }
    let step = world.learner.step(world.now_ms);
    let first_token = Some(FirstToken {
        uncached_tokens: 900.0,
        prompt_tokens: 900.0,
        service_ms: 2_000.0,
    });
    for ended in [RequestEnd::Aborted, RequestEnd::Failed] {
        assert_eq!(
            world.learner.observe(
                &Observation {
                    ended,
                    first_token,
                    ..good
                },
                None
            ),
            ObservationVerdict::Censored
        );
    }
    assert_eq!(
        world.learner.step(world.now_ms),
        step,
        "the step model did not learn either"
    );
    assert_eq!(world.learner.model().unwrap().words(), words);
    let after = world.learner.standing();
    assert_eq!(
        after,
        LearnerStatus {
            refused: absurd.len() as u64,
            censored: 2,
            ..before
        }
    );
    let nonsense = Prediction {
        ttft_ms: f32::NAN,
        tpot_ms: -1.0,
        ttft_p90_ms: 0.0,
        tpot_p90_ms: f32::INFINITY,
    };
    let huge = Prediction {
        ttft_ms: f32::MAX,
        tpot_ms: f32::MAX,
        ttft_p90_ms: f32::MAX,
        tpot_p90_ms: f32::MAX,
    };
    for said in [nonsense, huge] {
        assert_eq!(
            world.learner.observe(&good, Some(&said)),
            ObservationVerdict::Learned,
            "nonsense predictions are ignored"
        );
    }
    assert!(
        world
            .learner
            .model()
            .unwrap()
            .predict(endpoint(0, 1), &good.conditions)
            .is_ok()
    );
}

#[test]
fn the_model_extrapolates_for_a_while_and_then_abstains() {
    let mut world = LearnerWorld::new(11);
    world.run(800, 1, 0);
    let model = world.model.clone().unwrap();
    let of_queue = |queued: f32| Conditions {
        queued: Some(queued),
        running: Some(20.0),
        requests: 20.0 + queued,
        prefill_tokens: queued * 1_500.0,
        context_tokens: 40_000.0,
        kv_utilization: Some(0.5),
        prompt_tokens: 1_000.0,
        uncached_tokens: 1_000.0,
    };
    let twice = model
        .predict(endpoint(0, 1), &of_queue(18.0))
        .unwrap()
        .ttft_ms
        / (25.0 + 0.04 * 28_000.0);
    assert!(
        (0.75..1.25).contains(&twice),
        "a queue twice as long as ever: {twice}"
    );
    assert!(
        model.limits()[2] > 20.0 && model.limits()[2] < 1_000.0,
        "requests: {:?}",
        model.limits()
    );
    assert_eq!(
        model.predict(endpoint(0, 1), &of_queue(1_000.0)),
        Err(NoPrediction::OutsideRange("requests"))
    );
    let mut said = Vec::new();
    model.predict_all(
        [
            (endpoint(0, 1), of_queue(5.0)),
            (endpoint(1, 1), of_queue(5_000.0)),
        ],
        &mut said,
    );
    assert!(said[0].is_ok() && said[1].is_err());
    let many: Vec<_> = (0..37)
        .map(|slot| (endpoint(slot % 6, 1), world.conditions()))
        .collect();
    model.predict_all(many.iter().copied(), &mut said);
    let one_by_one: Vec<_> = many
        .iter()
        .map(|(endpoint, conditions)| model.predict(*endpoint, conditions))
        .collect();
    assert_eq!(said, one_by_one, "together as one by one, to the last bit");
}

#[test]
fn a_shape_that_is_no_better_does_not_take_the_place_of_the_one_in_force() {
    let mut world = LearnerWorld::new(12);
    world.run(2_000, 1, 0);
    let standing = world.learner.standing();
    assert!(
        standing.rejected > 0 && standing.adopted > 0,
        "{standing:?}"
    );
    assert_eq!(standing.window, world.learner.window.len());
    assert!(standing.window <= window::SAMPLES_MAX);
}

#[test]
fn what_was_learned_starts_another_learner() {
    let mut world = LearnerWorld::new(13);
    world.run(500, 1, 0);
    let model = world.model.clone().unwrap();
    let read = LatencyModel::from_words(&model.words()).unwrap();
    let mut next = LatencyLearner::starting_from(&world.learner.step(world.now_ms), Some(&read));
    let started = next.publish(0).unwrap();
    let conditions = world.conditions();
    let said = |model: &LatencyModel| model.predict(endpoint(9, 1), &conditions).unwrap();
    assert!((said(&started).ttft_ms / said(&model).ttft_ms - 1.0).abs() < 1e-3);
    assert_eq!(
        (started.samples(), next.publish(0)),
        (model.samples(), None),
        "nothing is published twice"
    );
}

#[test]
fn the_largest_model_fits_and_no_word_of_it_is_taken_on_trust() {
    let mut world = LearnerWorld::new(14);
    world.run(300, 1, 0);
    let mut model = world.model.unwrap();
    for slot in 0..u16::try_from(ENDPOINTS_MAX).unwrap() {
        model = model.with_endpoint(endpoint(slot, u32::MAX), 2.0, 3.0);
    }
    let words = model.words();
    assert!(
        words.len() <= WORDS_MAX && model.bytes() <= 65_536,
        "{} bytes",
        model.bytes()
    );
    assert_eq!(model.bytes(), size_of_val(&words[..]));
    assert_eq!(LatencyModel::from_words(&words).as_ref(), Ok(&model));
    let mut longer = words.clone();
    longer.extend([1, 0, 0]);
    assert_eq!(
        LatencyModel::from_words(&longer),
        Err(InvalidModel::Length(longer.len())),
        "one endpoint too many"
    );
    assert_eq!(
        LatencyModel::from_words(&words[..words.len() - 1]),
        Err(InvalidModel::Length(words.len() - 1))
    );
    assert_eq!(
        LatencyModel::from_words(&vec![0; WORDS_MAX + 1]),
        Err(InvalidModel::TooLong(WORDS_MAX + 1))
    );
    assert_eq!(LatencyModel::from_words(&[7]), Err(InvalidModel::Layout(7)));
    let trees = words[SAMPLES_AT[0] + 1 + TERMS] as usize;
    assert_eq!(trees, model.trees().0);
    for at in (1..60).filter(|at| trees == 0 || *at < 40) {
        let mut bad = words.clone();
        bad[at] = f32::NAN.to_bits();
        // NaN as a number of trees is refused as too large, but a number of samples may be any
        // number.
        let read = LatencyModel::from_words(&bad).map(|read| read.words());
        assert!(
            read == Err(InvalidModel::Word(at)) || (read == Ok(bad) && SAMPLES_AT.contains(&at)),
            "word {at}"
        );
    }
}

/// Returns a row whose time is `log` (a logarithm) and whose features are all 0.
fn took(log: f32, weight: f32) -> FitRow {
    FitRow {
        x: [0.0; FEATURES_COUNT],
        terms: [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        log,
        weight,
    }
}

#[test]
fn trees_that_say_nothing_are_left_out() {
    let rows = [took(0.0, 1.0); TREES_SAMPLES_MIN];
    assert_eq!(chosen(&rows, &rows[..32], 32).trees, 0);
}

#[test]
fn a_loss_is_the_mean_of_what_rows_are_off_by_and_of_two_equal_ones_the_shorter_is_the_median() {
    let rows = [took(1.0, 3.0), took(0.0, 3.0), took(0.5, 2.0)];
    let median = fit::constant(&rows[..2]);
    assert_eq!(median.weights[0], 1.0);
    assert_eq!(fit::loss(&median, &rows, 0.0), 0.5);
    assert_eq!(fit::loss(&median, &rows, 0.5), 0.375);
    assert_eq!(fit::loss(&median, &[], 0.0), f32::INFINITY);
}

#[test]
fn an_unknown_endpoint_has_the_mean_offset() {
    let mut offsets = EndpointOffsets::default();
    (0..20).for_each(|_| _ = offsets.push(endpoint(1, 1), 1.0, 5.0));
    (0..20).for_each(|_| _ = offsets.push(endpoint(2, 1), 0.0, 5.0));
    assert_eq!(
        [endpoint(1, 2), endpoint(0, 0), endpoint(9, 1)].map(|unknown| offsets.offset_of(unknown)),
        [offsets.mean(); 3]
    );
    assert!(
        offsets.offset_of(endpoint(1, 1)) > offsets.mean()
            && offsets.offset_of(endpoint(2, 1)) < offsets.mean()
    );
    assert!(offsets.published(0).is_none() && offsets.published(1).is_some());
}

#[test]
fn outcomes_that_arrive_at_once_are_followed_at_once_and_late_ones_slowly() {
    let after_a_change = |delay: f32| {
        let mut offsets = EndpointOffsets::default();
        (0..40).for_each(|_| _ = offsets.push(endpoint(1, 1), 0.0, delay));
        (0..20).for_each(|_| _ = offsets.push(endpoint(1, 1), 0.2, delay)); // within the noise, so no jump is detected
        offsets.offset_of(endpoint(1, 1))
    };
    assert!(after_a_change(0.0) > 0.16, "{}", after_a_change(0.0));
    assert!(after_a_change(50.0) < 0.08, "{}", after_a_change(50.0));
}

/// Returns the published offset of an endpoint, mean included, after this many outcomes. Between
/// each outcome and its pick, `delay` others arrived.
fn published_after(outcomes: usize, delay: f32, error: impl Fn(usize) -> f32) -> f32 {
    let mut offsets = EndpointOffsets::default();
    for at in 0..outcomes {
        let endpoint = endpoint(0, 1);
        let said = offsets
            .published(0)
            .map_or(0.0, |(_, offset)| offset + offsets.mean());
        offsets.confirm(endpoint, said, error(at));
        offsets.push(endpoint, error(at), delay);
    }
    offsets
        .published(0)
        .map_or(0.0, |(_, offset)| offset + offsets.mean())
}

#[test]
fn a_drift_is_extrapolated_if_outcomes_arrive_at_once_and_noise_is_not() {
    let falls = |at: usize| -0.01 * at as f32;
    let published = published_after(150, 0.0, falls);
    let next = falls(150);
    assert!((published - next).abs() < 0.03, "{published} {next}");
    assert!(
        published_after(150, 30.0, falls) > next + 0.09,
        "an outcome that arrives late may be out of date"
    );
    let trembles = |at: usize| if at.is_multiple_of(2) { 0.2 } else { -0.2 };
    assert!(
        published_after(150, 0.0, trembles).abs() < 0.03,
        "{}",
        published_after(150, 0.0, trembles)
    );
}

#[test]
fn an_offset_that_once_proved_wrong_can_prove_true_again() {
    let mut offsets = EndpointOffsets::default();
    (0..20).for_each(|_| offsets.confirm(endpoint(1, 1), -0.2, 1.5));
    let least = offsets.trust();
    assert!(least < 0.5, "{least}");
    // The current offset is the trusted share of the deviation 1.4.
    (0..30).for_each(|_| offsets.confirm(endpoint(1, 1), 1.4 * offsets.trust(), 1.4));
    assert!(offsets.trust() > 0.9, "{}", offsets.trust());
}

/// Counts how many of the last 300 of 600 outcomes were within their p90. Each outcome is `step`
/// lower than the one before.
fn within_while_falling(step: f32, delay: f32) -> usize {
    let mut ninth = P90Tracker::starting_at(0.0);
    let mut rng = Rng::seeded(7);
    let outcome = |at: usize| {
        let value = 0.1 * rng.open01() - step * at as f32;
        let within = value <= ninth.at();
        ninth.outcome(LogOutcome {
            value,
            base: 0.0,
            delay,
        });
        within
    };
    let all: Vec<bool> = (0..600).map(outcome).collect();
    all[300..].iter().filter(|within| **within).count()
}

#[test]
fn a_decile_comes_down_as_fast_as_it_goes_up() {
    for step in [0.0, 0.001, -0.001] {
        let within = within_while_falling(step, 0.0);
        assert!(
            (255..=285).contains(&within),
            "85 to 95 % of 300, by steps of {step}: {within}"
        );
    }
    let within = within_while_falling(0.001, 100.0);
    assert!(
        within > 285,
        "no oscillation when outcomes arrive late: {within}"
    );
}

#[test]
fn each_class_of_requests_has_room_of_its_own() {
    let mut window = SampleWindow::default();
    for queued in [0.0, 1.0, 4.0, 16.0, 64.0] {
        for uncached_tokens in [0.0, 256.0, 2_048.0, 8_192.0] {
            let conditions = Conditions {
                queued: Some(queued),
                prompt_tokens: uncached_tokens,
                uncached_tokens,
                ..Conditions::default()
            };
            (0..1_000).for_each(|_| {
                window.push(RequestSample::new(endpoint(0, 1), conditions, None, None));
            });
        }
    }
    assert_eq!(window.len(), window::SAMPLES_MAX);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_observations_give_a_valid_model_with_finite_predictions(
        observations in prop::collection::vec((0_u16..6, 0_u32..3, prop::array::uniform5(0.0_f32..20_000.0), 0.01_f32..1e6, 0.01_f32..1e5), 40..160),
        asked in prop::array::uniform5(0.0_f32..20_000.0),
    ) {
        let conditions = |[requests, prefill_tokens, context_tokens, prompt_tokens, share]: [f32; 5]| Conditions {
            queued: Some(requests / 2.0),
            requests,
            prefill_tokens,
            context_tokens,
            kv_utilization: Some(share / 20_000.0),
            prompt_tokens,
            uncached_tokens: prompt_tokens * share / 20_000.0,
            running: None,
        };
        let mut learner = LatencyLearner::default();
        let mut now_ms = 0;
        for (slot, generation, numbers, ttft, tpot) in observations {
            let observation = Observation { ttft_ms: Some(ttft), tpot_ms: Some(tpot), ..bare(endpoint(slot, generation), conditions(numbers)) };
            prop_assert_eq!(learner.observe(&observation, None), ObservationVerdict::Learned);
            now_ms += 300;
            if let Some(model) = learner.publish(now_ms) {
                prop_assert_eq!(LatencyModel::from_words(&model.words()), Ok(model.clone()));
                if let Ok(said) = model.predict(endpoint(slot, generation), &conditions(asked)) {
                    for ms in [said.ttft_ms, said.tpot_ms, said.ttft_p90_ms, said.tpot_p90_ms] {
                        prop_assert!(ms.is_finite() && ms > 0.0, "{:?}", said);
                    }
                    prop_assert!(said.ttft_p90_ms >= said.ttft_ms && said.tpot_p90_ms >= said.tpot_ms);
                }
            }
        }
    }

    #[test]
    fn any_words_are_read_or_refused(words in prop::collection::vec(any::<u32>(), 0..90), known in any::<bool>()) {
        let mut words = words;
        if let Some(first) = words.first_mut().filter(|_| known) {
            *first = 0x4c33;
        }
        if let Ok(model) = LatencyModel::from_words(&words) {
            prop_assert_eq!(LatencyModel::from_words(&model.words()), Ok(model));
        }
    }
}
