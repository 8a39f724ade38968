use super::*;
use proptest::prelude::*;
use scheduler::{Rng, Slot};

fn endpoint(slot: u16, generation: u32) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(generation),
    }
}

/// Returns a learner with samples from engines that take `factor(slot)` times the times of `truth`,
/// with a tenth of noise.
fn taught(
    learner: &mut StepLearner,
    truth: &StepModel,
    seed: u64,
    samples: usize,
    factor: impl Fn(u16) -> f32,
) {
    let mut rng = Rng::seeded(seed);
    for _ in 0..samples {
        let slot = u16::try_from(rng.below(4)).unwrap();
        let noise = factor(slot) * (0.9 + 0.2 * rng.open01());
        let prompt = 50.0 + 8_000.0 * rng.open01() * rng.open01();
        let uncached = prompt * rng.open01();
        let service_ms = noise * truth.prefill_ms(uncached, prompt);
        assert!(learner.first_token(
            endpoint(slot, 1),
            &FirstToken {
                uncached_tokens: uncached,
                prompt_tokens: prompt,
                service_ms
            },
            false
        ));
        let batch = 1.0 + 60.0 * rng.open01();
        let context_tokens = 100_000.0 * rng.open01();
        let gap_ms = noise * truth.decode_ms(batch, context_tokens);
        assert!(learner.gap(
            endpoint(slot, 1),
            &TokenGap {
                batch,
                context_tokens,
                gap_ms
            }
        ));
    }
}

fn off(model: &StepModel, truth: &StepModel) -> f32 {
    let prefills = [
        (100.0, 100.0),
        (500.0, 4_000.0),
        (4_000.0, 4_000.0),
        (8_000.0, 8_000.0),
    ];
    let steps = [(1.0, 1_000.0), (32.0, 30_000.0), (64.0, 100_000.0)];
    let prefills = prefills
        .iter()
        .map(|&(u, n)| model.prefill_ms(u, n) / truth.prefill_ms(u, n));
    let steps = steps
        .iter()
        .map(|&(b, k)| model.decode_ms(b, k) / truth.decode_ms(b, k));
    prefills
        .chain(steps)
        .map(|ratio| (ratio - 1.0).abs())
        .fold(0.0, f32::max)
}

/// Returns the step model of Llama-3.1-8B on an H100, as kernel measurements give it.
fn h100() -> StepModel {
    StepModel::from_parts([9.6, 0.0168, 5.46e-7], [7.07, 0.00745, 4.31e-5], 200.0)
}

#[test]
fn learns_another_machine_than_its_prior_and_forgets_it_for_a_third() {
    let mut learner = StepLearner::default();
    taught(&mut learner, &h100(), 1, 60, |_| 1.0);
    assert!(
        off(&learner.model(), &h100()) < 0.25,
        "{:?}",
        learner.model()
    );
    taught(&mut learner, &h100(), 2, 1_000, |_| 1.0);
    assert!(
        off(&learner.model(), &h100()) < 0.05,
        "{:?}",
        learner.model()
    );
    assert_eq!(
        learner.model().speed(endpoint(1, 1)),
        (1.0, 1.0),
        "noise does not sort equal endpoints"
    );
    assert_eq!(
        learner.model(),
        learner.model().without_speeds(),
        "and no speeds are published"
    );
    assert!(
        learner.has_compared(endpoint(1, 1)),
        "but it is known to be average"
    );
    assert!(!learner.has_compared(endpoint(1, 2)) && !learner.has_compared(endpoint(99, 1)));
    let qwen = StepModel::from_parts([10.5, 0.0807, 4.22e-7], [19.2, 0.0248, 5.81e-5], 200.0);
    taught(&mut learner, &qwen, 3, 4_000, |_| 1.0);
    assert!(off(&learner.model(), &qwen) < 0.1, "{:?}", learner.model());
}

#[test]
fn a_slow_endpoint_is_learned_and_its_successor_starts_clean() {
    let mut learner = StepLearner::default();
    taught(&mut learner, &h100(), 1, 2_000, |slot| {
        if slot == 2 { 2.0 } else { 1.0 }
    });
    let model = learner.model();
    let ratio = |of: fn((f32, f32)) -> f32| {
        of(model.speed(endpoint(2, 1))) / of(model.speed(endpoint(0, 1)))
    };
    assert!(
        (1.8..2.2).contains(&ratio(|s| s.0)) && (1.8..2.2).contains(&ratio(|s| s.1)),
        "{model:?}"
    );
    assert_eq!(model.speed(endpoint(2, 9)), (1.0, 1.0));
    let gap = TokenGap {
        batch: 1.0,
        context_tokens: 100.0,
        gap_ms: model.decode_ms(1.0, 100.0),
    };
    assert!(learner.gap(endpoint(2, 9), &gap));
    assert_eq!(
        (
            learner.model().speed(endpoint(2, 9)),
            learner.model().speed(endpoint(2, 1))
        ),
        ((1.0, 1.0), (1.0, 1.0))
    );
}

#[test]
fn an_endpoint_that_alone_gets_a_kind_of_prompt_is_not_faster_for_it() {
    let mut learner = StepLearner::default();
    let mut first = |slot, tokens: (f32, f32), service_ms, queued| {
        let sample = FirstToken {
            uncached_tokens: tokens.0,
            prompt_tokens: tokens.1,
            service_ms,
        };
        assert!(learner.first_token(endpoint(slot, 1), &sample, queued));
    };
    // The engines take 150 ms for every request. First all engines get short prompts, most of them
    // together with other prompts.
    for round in 0..500_u16 {
        let alone = round % 80 < 8;
        first(
            round % 8,
            (310.0, 310.0),
            if alone { 150.0 } else { 37.0 },
            !alone,
        );
    }
    // Then conversations run at one endpoint, one after another.
    for turn in 0..100 {
        let tokens = [
            (1_510.0, 1_510.0),
            (100.0, 1_570.0),
            (97.0, 1_630.0),
            (93.0, 1_690.0),
        ][turn % 4];
        first(4, tokens, 150.0, false);
    }
    assert_eq!(learner.model(), learner.model().without_speeds());
}

#[test]
fn impossible_samples_teach_nothing_and_a_stall_little() {
    let mut learner = StepLearner::default();
    taught(&mut learner, &h100(), 1, 500, |_| 1.0);
    let before = learner.model();
    let good = FirstToken {
        uncached_tokens: 10.0,
        prompt_tokens: 20.0,
        service_ms: 12.0,
    };
    for bad in [f32::NAN, f32::INFINITY, -1.0, 1e30] {
        assert!(!learner.first_token(
            endpoint(0, 1),
            &FirstToken {
                service_ms: bad,
                ..good
            },
            false
        ));
        assert!(!learner.first_token(
            endpoint(0, 1),
            &FirstToken {
                uncached_tokens: bad,
                ..good
            },
            false
        ));
        assert!(!learner.gap(
            endpoint(0, 1),
            &TokenGap {
                batch: bad,
                context_tokens: 1.0,
                gap_ms: 7.0
            }
        ));
        assert!(!learner.gap(
            endpoint(0, 1),
            &TokenGap {
                batch: 1.0,
                context_tokens: 1.0,
                gap_ms: bad
            }
        ));
    }
    assert!(!learner.gap(
        endpoint(5_000, 1),
        &TokenGap {
            batch: 1.0,
            context_tokens: 1.0,
            gap_ms: 7.0
        }
    ));
    assert_eq!(learner.model(), before);
    assert!(learner.first_token(
        endpoint(0, 1),
        &FirstToken {
            service_ms: 500_000.0,
            ..good
        },
        false
    ));
    assert!(
        off(&learner.model(), &before) < 0.05,
        "{:?} {before:?}",
        learner.model()
    );
}

#[test]
fn one_in_fifty_that_stalls_for_ten_seconds_does_not_spoil_it() {
    let mut learner = StepLearner::default();
    for round in 0..100_u16 {
        taught(&mut learner, &h100(), u64::from(round), 50, |_| 1.0);
        let tokens = f32::from(round % 10) * 400.0;
        let sample = FirstToken {
            uncached_tokens: tokens,
            prompt_tokens: tokens + 400.0,
            service_ms: 10_000.0,
        };
        assert!(learner.first_token(endpoint(round % 4, 1), &sample, false));
        let gap = TokenGap {
            batch: 1.0 + tokens / 60.0,
            context_tokens: 25.0 * tokens,
            gap_ms: 10_000.0,
        };
        assert!(learner.gap(endpoint(round % 4, 1), &gap));
    }
    let model = learner.model();
    let speeds = [0, 1, 2, 3].map(|slot| learner.model().speed(endpoint(slot, 1)));
    assert!(off(&model, &h100()) < 0.2, "{model:?}");
    assert!(
        speeds
            .iter()
            .all(|(prefill, decode)| (0.9..1.1).contains(prefill) && (0.9..1.1).contains(decode)),
        "{speeds:?}"
    );
}

#[test]
fn the_mean_output_is_followed() {
    let mut learner = StepLearner::default();
    (0..2_000).for_each(|_| learner.ended(endpoint(0, 1), 50));
    assert!((learner.model().output_tokens() - 50.0).abs() < 1.0);
    learner.ended(endpoint(0, 1), u32::MAX);
    assert!(
        learner.model().output_tokens() <= 6_000.0,
        "one absurd count moves it by its share of the maximum"
    );
}

#[test]
fn one_engines_claims_move_no_expectation_of_others() {
    for (engines, lie) in [(4, u32::MAX), (4, 0), (2, u32::MAX)] {
        let mut learner = StepLearner::default();
        for n in 0..4_000_u32 {
            let slot = u16::try_from(n % engines).unwrap();
            let said = if slot == 0 { lie } else { 40 + n % 21 };
            learner.ended(endpoint(slot, 1), said);
        }
        let expected = learner.model().output_tokens();
        assert!(
            (45.0..55.0).contains(&expected),
            "{lie} of one in {engines}: {expected}"
        );
    }
}

/// Engines under traffic, second by second.
struct LearnedPool {
    rng: Rng,
    learner: StepLearner,
    now_ms: u64,
    /// The standard deviation of the logarithm of a time.
    noise: f32,
    factors: [f32; 3],
}

impl LearnedPool {
    fn new(seed: u64, noise: f32) -> Self {
        Self {
            rng: Rng::seeded(seed),
            learner: StepLearner::default(),
            now_ms: 0,
            noise,
            factors: [1.0; 3],
        }
    }

    /// Returns a random factor. The sum of four uniform numbers is nearly normal.
    fn chance(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.rng.open01()).sum();
        libm::expf(self.noise * 1.732 * (sum - 2.0))
    }

    /// Simulates one second with this many samples of each engine, in random order.
    fn second(&mut self, mut samples: [usize; 3]) {
        while samples.iter().any(|&left| left > 0) {
            let slot = self.rng.below(3);
            if samples[slot] > 0 {
                samples[slot] -= 1;
                self.sample(slot);
            }
        }
        self.now_ms += 1_000;
        self.learner.advance(self.now_ms);
    }

    fn sample(&mut self, slot: usize) {
        let of = endpoint(u16::try_from(slot).unwrap(), 1);
        let prompt_tokens = 200.0 + 4_000.0 * self.rng.open01();
        let service_ms =
            self.factors[slot] * self.chance() * h100().prefill_ms(prompt_tokens, prompt_tokens);
        assert!(self.learner.first_token(
            of,
            &FirstToken {
                uncached_tokens: prompt_tokens,
                prompt_tokens,
                service_ms
            },
            false
        ));
        let batch = 1.0 + (7.0 * self.rng.open01()).floor();
        let context_tokens = 20_000.0 * self.rng.open01();
        let gap_ms = self.factors[slot] * self.chance() * h100().decode_ms(batch, context_tokens);
        assert!(self.learner.gap(
            of,
            &TokenGap {
                batch,
                context_tokens,
                gap_ms
            }
        ));
    }

    /// Returns the published speeds of an engine, relative to engine 0.
    fn relative(&self, slot: u16) -> [f32; 2] {
        let model = self.learner.model();
        let ((prefill, decode), (first_prefill, first_decode)) =
            (model.speed(endpoint(slot, 1)), model.speed(endpoint(0, 1)));
        [prefill / first_prefill, decode / first_decode]
    }

    /// Returns the largest ratio of two engines' speeds.
    fn spread(&self) -> f32 {
        let model = self.learner.model();
        let speeds = [0, 1, 2].map(|slot| model.speed(endpoint(slot, 1)));
        let ratio = |of: fn(&(f32, f32)) -> f32| {
            let (least, most) = speeds
                .iter()
                .map(of)
                .fold((f32::MAX, 0.0_f32), |(least, most), speed| {
                    (least.min(speed), most.max(speed))
                });
            most / least
        };
        ratio(|speed| speed.0).max(ratio(|speed| speed.1))
    }
}

#[test]
fn an_idle_endpoint_is_unlearned_within_about_30_s() {
    for (seed, (slowdown, others)) in (0..).zip([(1.9, 3), (3.0, 3), (3.0, 0), (0.4, 3)]) {
        for noise in [0.05, 0.3] {
            let mut pool = LearnedPool::new(seed, noise);
            pool.factors[2] = slowdown;
            (0..60).for_each(|_| pool.second([5, 5, 5]));
            let known = pool.relative(2).map(|ratio| ratio / slowdown);
            assert!(
                known.iter().all(|share| (0.75..1.35).contains(share)),
                "{slowdown}: {known:?}"
            );
            let mut seconds = 0;
            while pool.learner.model().speed(endpoint(2, 1)) != (1.0, 1.0) {
                pool.second([others, others, 0]);
                seconds += 1;
                assert!(seconds <= 35, "{slowdown}: {:?}", pool.relative(2));
            }
            assert!(seconds > 5, "nor is it forgotten at once: {seconds} s");
            assert!(
                pool.learner.has_compared(endpoint(2, 1)),
                "it still counts as compared"
            );
        }
    }
}

#[test]
fn an_endpoint_that_was_slow_for_a_minute_is_equal_again_within_30_s_of_traffic() {
    for seed in 0..5 {
        for slow_rate in [1, 2, 5] {
            let mut pool = LearnedPool::new(seed, 0.1);
            pool.factors[2] = 3.0;
            (0..60).for_each(|_| pool.second([5, 5, slow_rate]));
            pool.factors[2] = 1.0;
            (0..30).for_each(|_| pool.second([5, 5, slow_rate]));
            assert!(
                pool.relative(2)
                    .iter()
                    .all(|ratio| (0.9..1.1).contains(ratio)),
                "{slow_rate}/s: {:?}",
                pool.relative(2)
            );
        }
    }
}

#[test]
fn an_endpoint_that_is_twice_as_slow_stays_known_under_traffic() {
    for (rate, least) in [(1, 1.3), (3, 1.55), (10, 1.7)] {
        let mut pool = LearnedPool::new(rate as u64, 0.15);
        pool.factors[2] = 2.0;
        for second in 0..300 {
            pool.second([2 * rate, 2 * rate, rate]);
            let ratios = pool.relative(2);
            assert!(
                second < 30 || ratios.iter().all(|ratio| (least..2.4).contains(ratio)),
                "{rate}/s after {second} s: {ratios:?}"
            );
        }
    }
}

#[test]
fn equal_endpoints_hardly_differ_by_chance() {
    let mut spreads = Vec::new();
    let mut differing = 0;
    for seed in 0..10 {
        let mut pool = LearnedPool::new(seed, 0.3);
        for second in 0..120 {
            // The machine of one or two engines is busy for two seconds.
            if second % 2 == 0 {
                pool.factors =
                    std::array::from_fn(|_| if pool.rng.below(3) == 0 { 1.3 } else { 1.0 });
            }
            let rate = 1 + seed as usize % 4;
            pool.second([rate, rate, rate]);
            differing += usize::from(pool.spread() > 1.05);
            spreads.push(pool.spread());
        }
    }
    spreads.sort_by(f32::total_cmp);
    let most = spreads[spreads.len() - 1];
    let often = spreads[spreads.len() * 95 / 100];
    assert!(often < 1.12 && most < 1.5, "{often} {most} {differing}");
}

/// The engines are idle and equal. As in the default policy, each prompt goes to the engine with
/// the fastest learned speed. Where speeds differ by at most 2 %, the prompt goes to the engine
/// that got no prompt for longest.
#[test]
fn engines_that_differ_by_chance_share_an_idle_pool() {
    let mut windows = 0;
    let mut uneven = 0;
    for seed in 0..10 {
        let mut pool = LearnedPool::new(seed, 0.3);
        (0..10 + seed).for_each(|_| pool.second([2, 2, 2]));
        let mut last = [0; 3];
        for window in 0..20 {
            let mut counts = [0; 3];
            // The machine of one engine was busy for a few requests.
            pool.factors[window % 3] = 1.5;
            (0..3).for_each(|_| pool.second([1, 1, 1]));
            pool.factors = [1.0; 3];
            for prompt in 0..30 {
                let model = pool.learner.model();
                let times = [0, 1, 2].map(|slot| model.speed(endpoint(slot, 1)).0);
                let least = times.iter().copied().fold(f32::MAX, f32::min);
                let equal = (0..3).filter(|&slot| times[slot] <= 1.02 * least);
                let slot = equal.min_by_key(|&slot| last[slot]).unwrap();
                (last[slot], counts[slot]) = (1 + 30 * window + prompt, counts[slot] + 1);
                let mut samples = [0; 3];
                samples[slot] = 1;
                pool.second(samples);
            }
            windows += 1;
            uneven += usize::from(counts.iter().any(|&count| count > 15));
        }
    }
    assert!(uneven * 20 <= windows, "{uneven} of {windows}");
}

#[test]
fn one_sample_says_little() {
    for times in [4.0, 50.0] {
        let mut pool = LearnedPool::new(1, 0.05);
        (0..20).for_each(|_| pool.second([5, 5, 0]));
        pool.factors[2] = times;
        pool.sample(2);
        assert!(
            pool.relative(2)
                .iter()
                .all(|&ratio| ratio < std::f32::consts::SQRT_2),
            "{times}: {:?}",
            pool.relative(2)
        );
    }
}

#[test]
fn an_endpoint_under_more_load_is_not_slower() {
    let mut pool = LearnedPool::new(1, 0.1);
    for _ in 0..60 {
        pool.second([3, 3, 0]);
        for _ in 0..3 {
            let batch = 40.0 + 20.0 * pool.rng.open01();
            let context_tokens = 100_000.0;
            let gap_ms = pool.chance() * h100().decode_ms(batch, context_tokens);
            assert!(pool.learner.gap(
                endpoint(2, 1),
                &TokenGap {
                    batch,
                    context_tokens,
                    gap_ms
                }
            ));
        }
        let [_, decode] = pool.relative(2);
        assert!((0.9..1.1).contains(&decode), "{decode}");
    }
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
            learner.ended(endpoint(slot, generation), a as u32);
        }
        let model = learner.model();
        prop_assert_eq!(StepModel::from_words(&model.words()), Ok(model), "every number is one it may be");
    }
}

/// If two prompts are done in one step, the second takes no time at all, and on a stalled machine a
/// short prompt takes a minute. Each of these samples may come first.
#[test]
fn the_first_samples_do_not_decide() {
    let truth = StepModel::from_parts([12.0, 0.084, 4.2e-7], [20.0, 0.0248, 5.81e-5], 60.0);
    for seed in 0..500 {
        let mut rng = Rng::seeded(seed);
        let mut learner = StepLearner::default();
        let mut first = Vec::new();
        for _ in 0..=rng.below(3) {
            let tokens = [5.0, 20.0, 250.0, 8_000.0][rng.below(4)];
            let ms = [0.02, 1.0, 20.0, 100.0, 1_000.0, 30_000.0, 600_000.0][rng.below(7)];
            let sample = FirstToken {
                uncached_tokens: tokens,
                prompt_tokens: tokens,
                service_ms: ms,
            };
            let gap = TokenGap {
                batch: 1.0,
                context_tokens: tokens,
                gap_ms: ms,
            };
            assert!(if rng.below(2) == 0 {
                learner.first_token(endpoint(0, 1), &sample, false)
            } else {
                learner.gap(endpoint(0, 1), &gap)
            });
            first.push((sample, gap));
        }
        for _ in 0..100 {
            let prompt = 7_000.0 + 8_000.0 * rng.open01();
            let uncached = if rng.below(10) == 0 {
                prompt
            } else {
                200.0 + 1_500.0 * rng.open01()
            };
            let service_ms = truth.prefill_ms(uncached, prompt);
            let sample = FirstToken {
                uncached_tokens: uncached,
                prompt_tokens: prompt,
                service_ms,
            };
            assert!(learner.first_token(endpoint(0, 1), &sample, false));
            let batch = 1.0 + 3.0 * rng.open01();
            let context_tokens = 40_000.0 * rng.open01();
            assert!(learner.gap(
                endpoint(0, 1),
                &TokenGap {
                    batch,
                    context_tokens,
                    gap_ms: truth.decode_ms(batch, context_tokens)
                }
            ));
        }
        let model = learner.model();
        let prefill = model.prefill_ms(1_000.0, 10_000.0) / truth.prefill_ms(1_000.0, 10_000.0);
        let decode = model.decode_ms(2.0, 20_000.0) / truth.decode_ms(2.0, 20_000.0);
        assert!(
            [prefill, decode]
                .iter()
                .all(|ratio| (0.8..1.25).contains(ratio)),
            "{prefill} {decode} after {first:?}"
        );
    }
}
