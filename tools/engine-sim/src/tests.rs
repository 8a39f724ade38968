//! Tests the engine as a caller sees it, and tests laws that hold for each random load.

use proptest::prelude::*;

use super::*;

const H100: SimulatedEngineSpec = EngineProfile::Llama8bH100.spec(64);

#[derive(Clone, Debug, Default, PartialEq)]
struct TestRequest {
    number: usize,
    prompt: u32,
    output: u32,
    hashes: Vec<u64>,
    adapter: u16,
    prefilled: bool,
}

impl EngineRequest for TestRequest {
    fn prompt_tokens(&self) -> u32 {
        self.prompt
    }

    fn output_tokens(&self) -> u32 {
        self.output
    }

    fn block_hashes(&self) -> &[u64] {
        &self.hashes
    }

    fn adapter(&self) -> u16 {
        self.adapter
    }

    fn is_prefilled(&self) -> bool {
        self.prefilled
    }
}

/// The outcome of a request. Times are in ms since the request's arrival.
#[derive(Clone, Debug, Default, PartialEq)]
struct TestOutcome {
    first_ms: f64,
    end_ms: f64,
    cached: Vec<u32>,
    tokens: u32,
    ends: u32,
}

/// A run of the engine in virtual time.
struct TestRun {
    engine: BatchingEngine<TestRequest>,
    outcomes: Vec<TestOutcome>,
    steps: Vec<u32>,
}

impl TestRun {
    /// Runs requests with these times of arrival to their end.
    fn play(spec: SimulatedEngineSpec, requests: &[(f64, TestRequest)]) -> Self {
        let mut run = Self {
            engine: BatchingEngine::new(spec),
            outcomes: vec![TestOutcome::default(); requests.len()],
            steps: Vec::new(),
        };
        let mut next = 0;
        let mut now = 0.0;
        loop {
            while let Some((_, request)) = requests.get(next).filter(|(at_ms, _)| *at_ms <= now) {
                run.engine.submit(TestRequest {
                    number: next,
                    ..request.clone()
                });
                next += 1;
            }
            match (run.step(now, requests), requests.get(next)) {
                (Some(ends_ms), _) => now = ends_ms,
                (None, Some((at_ms, _))) => now = *at_ms,
                (None, None) => break,
            }
        }
        assert_eq!(run.engine.kv_utilization(), 0.0, "every block comes back");
        run
    }

    /// Starts and ends one step. Returns the time when the step ends, or `None` without work.
    fn step(&mut self, now: f64, requests: &[(f64, TestRequest)]) -> Option<f64> {
        let engine = &mut self.engine;
        let outcomes = &mut self.outcomes;
        let step = engine.start(now, |request, cached| {
            outcomes[request.number].cached.push(cached);
        })?;
        assert_eq!(engine.step(), Some(step));
        engine.check_blocks();
        engine.end(|request, progress| {
            let outcome = &mut outcomes[request.number];
            let since_ms = step.ends_ms - requests[request.number].0;
            match progress {
                SequenceProgress::Token { number } => {
                    outcome.tokens += 1;
                    assert_eq!(number, outcome.tokens);
                    if number == 1 {
                        outcome.first_ms = since_ms;
                    }
                }
                SequenceProgress::Ended => {
                    outcome.ends += 1;
                    outcome.end_ms = since_ms;
                }
            }
        });
        engine.check_blocks();
        self.steps.push(step.tokens);
        Some(step.ends_ms)
    }
}

fn request(prompt: u32, output: u32) -> TestRequest {
    TestRequest {
        prompt,
        output,
        ..TestRequest::default()
    }
}

#[test]
fn a_lone_request_takes_the_time_of_the_formula() {
    let run = TestRun::play(H100, &[(0.0, request(8192, 11))]);
    let times = H100.times;
    let first_ms = times.prefill_ms(8192.0, 0.0);
    let decodes_ms: f64 = (1..=10)
        .map(|i| times.decode_ms(1.0, 8192.0 + f64::from(i)))
        .sum();
    let [outcome] = &run.outcomes[..] else {
        panic!("{:?}", run.outcomes)
    };
    assert!(
        (outcome.first_ms - first_ms).abs() < 1e-9
            && (outcome.end_ms - first_ms - decodes_ms).abs() < 1e-6,
        "{outcome:?}"
    );
}

#[test]
fn a_slowed_engine_takes_longer_from_the_next_step_on() {
    let mut engine = BatchingEngine::new(H100);
    engine.submit(request(1024, 2));
    let plain_ms = engine.start(0.0, |_, _| ()).unwrap().ends_ms;
    engine.set_slowdown(3.0);
    assert_eq!(
        engine.step().unwrap().ends_ms,
        plain_ms,
        "the step in flight is not changed"
    );
    engine.end(|_, _| ());
    let start = plain_ms;
    let ends_ms = engine.start(plain_ms, |_, _| ()).unwrap().ends_ms;
    assert!((ends_ms - start - 3.0 * H100.times.decode_ms(1.0, 1025.0)).abs() < 1e-9);
}

#[test]
fn a_long_prompt_is_computed_in_chunks() {
    let run = TestRun::play(H100, &[(0.0, request(20_000, 1))]);
    assert!((run.outcomes[0].first_ms - H100.times.cold_ms(20_000, 8192)).abs() < 1e-6);
    assert_eq!(run.outcomes[0].first_ms, run.outcomes[0].end_ms);
    assert_eq!(run.steps, [8192, 8192, 20_000 - 2 * 8192]);
}

#[test]
fn a_long_prompt_is_computed_beside_decodes() {
    let spec = SimulatedEngineSpec {
        budget: 2048,
        ..EngineProfile::Llama8bH100.spec(16)
    };
    let run = TestRun::play(spec, &[(0.0, request(16, 40)), (1.0, request(8000, 1))]);
    assert_eq!(
        run.steps.iter().filter(|&&tokens| tokens == 2048).count(),
        3,
        "the budget caps a step: {:?}",
        run.steps
    );
    assert_eq!(
        run.steps.iter().sum::<u32>(),
        16 + 39 + 8000,
        "each token is computed once"
    );
}

#[test]
fn a_repeated_prompt_is_cached_except_its_end() {
    let hashes: Vec<u64> = (1..=100).collect();
    let of = |prompt| TestRequest {
        hashes: hashes.clone(),
        ..request(prompt, 5)
    };
    let run = TestRun::play(H100, &[(0.0, of(6400)), (1e4, of(6400)), (2e4, of(7000))]);
    assert_eq!(
        run.outcomes
            .iter()
            .map(|outcome| outcome.cached[0])
            .collect::<Vec<_>>(),
        [0, 6400 - 64, 6400]
    );
}

#[test]
fn a_continued_answer_is_cached() {
    let spec = EngineProfile::Llama8bH100.spec(16);
    let of = |prompt, output| TestRequest {
        hashes: (1..=40).collect(),
        ..request(prompt, output)
    };
    let run = TestRun::play(spec, &[(0.0, of(320, 64)), (1e4, of(500, 1))]);
    assert_eq!(
        run.outcomes[1].cached,
        [368],
        "prompt and output of the first, except the last token, which was never computed"
    );
}

#[test]
fn all_requests_end_and_every_block_comes_back_under_preemption() {
    let requests: Vec<_> = (0..60)
        .map(|i| (f64::from(i) * 5.0, request(1000 + 37 * i, 400)))
        .collect();
    let run = TestRun::play(
        SimulatedEngineSpec {
            kv_blocks: 300,
            ..H100
        },
        &requests,
    );
    assert!(run.engine.preemptions() > 0);
    assert!(
        run.outcomes
            .iter()
            .all(|outcome| outcome.end_ms > outcome.first_ms && outcome.first_ms > 0.0)
    );
    assert!(
        run.outcomes
            .iter()
            .all(|outcome| outcome.tokens == 400 && outcome.cached.len() == 1),
        "no token twice, one admission"
    );
}

#[test]
fn the_newest_is_preempted_and_waits_before_those_that_never_ran() {
    let spec = SimulatedEngineSpec {
        kv_blocks: 20,
        sequences_max: 4,
        ..EngineProfile::Llama8bH100.spec(16)
    };
    let mut engine = BatchingEngine::new(spec);
    (0..5).for_each(|number| {
        engine.submit(TestRequest {
            number,
            ..request(64, 64)
        });
    });
    while engine.preemptions() == 0 {
        engine.start(0.0, |_, _| ()).unwrap();
        engine.end(|_, _| ());
    }
    assert_eq!(
        engine
            .waiting()
            .map(|sequence| sequence.request().number)
            .collect::<Vec<_>>(),
        [3, 4]
    );
}

#[test]
fn requests_are_served_in_order_of_arrival() {
    let requests: Vec<_> = (0..20).map(|i| (f64::from(i), request(9000, 1))).collect();
    let run = TestRun::play(H100, &requests);
    let firsts: Vec<f64> = run
        .outcomes
        .iter()
        .zip(&requests)
        .map(|(outcome, (at_ms, _))| outcome.first_ms + at_ms)
        .collect();
    assert!(firsts.is_sorted(), "{firsts:?}");
}

/// Returns the duration of the first step with these requests, and the engine after this step.
fn first_step(
    spec: SimulatedEngineSpec,
    requests: &[TestRequest],
) -> (f64, BatchingEngine<TestRequest>) {
    let mut engine = BatchingEngine::new(spec);
    requests
        .iter()
        .for_each(|request| engine.submit(request.clone()));
    let ends_ms = engine.start(0.0, |_, _| ()).unwrap().ends_ms;
    (ends_ms, engine)
}

#[test]
fn adapters_are_loaded_within_a_step_and_a_request_without_a_place_is_passed_over() {
    let spec = SimulatedEngineSpec {
        adapter_places: 2,
        adapter_load_ms: 100.0,
        ..H100
    };
    let of = |adapter: u16| TestRequest {
        adapter,
        ..request(64, 9)
    };
    let (plain_ms, _) = first_step(spec, &[of(0), of(0), of(0)]);
    let (loading_ms, engine) = first_step(spec, &[of(1), of(2), of(3), of(1)]);
    assert_eq!(
        (engine.running().len(), (loading_ms - plain_ms).round()),
        (3, 200.0),
        "the third waits, the fourth does not wait for it"
    );
    assert_eq!(
        (engine.adapters(), engine.adapter_loads()),
        ([vec![1, 2], vec![3]], 2)
    );
}

#[test]
fn what_another_engine_computed_is_not_computed_again() {
    let own = request(6_400, 5);
    let (own_ms, _) = first_step(H100, std::slice::from_ref(&own));
    let (prefilled_ms, _) = first_step(
        H100,
        &[TestRequest {
            prefilled: true,
            ..own
        }],
    );
    assert!(
        prefilled_ms < 10.0 && own_ms > 100.0,
        "{prefilled_ms} {own_ms}"
    );
}

#[test]
fn an_aborted_request_leaves_nothing() {
    let of = |number: usize| TestRequest {
        number,
        ..request(100, 50)
    };
    let (_, mut engine) = first_step(
        SimulatedEngineSpec {
            sequences_max: 2,
            ..H100
        },
        &[of(0), of(1), of(2)],
    );
    let abort = |engine: &mut BatchingEngine<TestRequest>, number| {
        engine.abort(|request| request.number == number)
    };
    assert_eq!(
        abort(&mut engine, 1),
        Some((of(1), 0)),
        "in the step in flight"
    );
    assert_eq!(abort(&mut engine, 2), Some((of(2), 0)), "in the queue");
    assert_eq!(abort(&mut engine, 1), None);
    let mut progress = Vec::new();
    engine.end(|request, of| progress.push((request.number, of)));
    assert_eq!(progress, [(0, SequenceProgress::Token { number: 1 })]);
    assert_eq!(abort(&mut engine, 0), Some((of(0), 1)));
    engine.check_blocks();
    assert_eq!(
        (engine.kv_utilization(), engine.start(0.0, |_, _| ())),
        (0.0, None)
    );
}

#[test]
fn a_request_without_output_ends_with_its_prefill() {
    let run = TestRun::play(H100, &[(0.0, request(100, 0))]);
    let [outcome] = &run.outcomes[..] else {
        panic!("{:?}", run.outcomes)
    };
    assert_eq!((outcome.tokens, outcome.ends, run.steps), (0, 1, vec![100]));
}

proptest! {
    #[test]
    fn every_sequence_ends_once_with_all_its_tokens_and_all_blocks_come_back(
        kv_blocks in 40..120_usize,
        budget in 64..512_usize,
        sequences_max in 1..6_usize,
        adapter_places in 0..3_usize,
        drawn in proptest::collection::vec((0..3_u64, 1..300_u32, 0..120_u32, 0..500_u32, 0..4_u16, any::<bool>()), 1..24),
    ) {
        let spec = SimulatedEngineSpec { kv_blocks, budget, sequences_max, adapter_places, ..EngineProfile::Llama8bH100.spec(16) };
        let mut at_ms = 0.0;
        let requests: Vec<(f64, TestRequest)> = drawn.iter().map(|&(kind, prompt, output, gap_ms, adapter, prefilled)| {
            at_ms += f64::from(gap_ms);
            let hashes = (1..=u64::from(prompt + output) / 16).map(|block| kind << 32 | block).collect();
            (at_ms, TestRequest { number: 0, prompt, output, hashes, adapter, prefilled })
        }).collect();
        let run = TestRun::play(spec, &requests);
        for (outcome, (_, request)) in run.outcomes.iter().zip(&requests) {
            prop_assert_eq!((outcome.ends, outcome.tokens, outcome.cached.len()), (1, request.output, 1));
            prop_assert!(outcome.cached[0] < request.prompt);
        }
        prop_assert_eq!(run.engine.running().len() + run.engine.waiting().len(), 0);
    }
}
