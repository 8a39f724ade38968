use proptest::prelude::*;

use super::*;

const STEP: ([f32; 3], [f32; 3]) = ([10.0, 0.05, 1e-6], [10.0, 0.02, 1e-4]);
const GOAL: ScalingGoal = ScalingGoal {
    ttft_s: 2.0,
    drain_s: 60.0,
    startup_s: 0.0,
    spare: 0.0,
    replicas: (1, 1_000),
};
const MIX: RequestMix = RequestMix {
    per_second: 0.0,
    prompt_tokens: 2_000.0,
    uncached_tokens: 1_000.0,
    output_tokens: 100.0,
};
const IDLE: OutstandingWork = OutstandingWork {
    speed: (1.0, 1.0),
    requests: 0.0,
    prompts: 0.0,
    uncached_tokens: 0.0,
    reported: Some(ReportedRequests {
        waiting: 0.0,
        running: 0.0,
    }),
};
/// The costs of a request of [`MIX`], seconds.
const PREFILL_S: f64 = 0.053 + 0.01 * 1_000.0 / 8_192.0;
const DECODE_S: f64 = 0.026_406_25;
const UNKNOWN: OutstandingWork = OutstandingWork {
    reported: None,
    ..IDLE
};

fn of(mix: RequestMix, endpoints: &[OutstandingWork], goal: &ScalingGoal) -> ScalingSignal {
    let step = StepModel::from_parts(STEP.0, STEP.1, 100.0);
    signal(
        &ScalingGroup {
            role: ScalingRole::Both,
            step: &step,
            mix,
            owners: &[],
            measured: true,
            seats: EngineSeats::default(),
            endpoints,
            starting: &[],
            held: 0.0,
        },
        goal,
    )
}

/// Checks that two numbers differ by at most a millionth.
#[track_caller]
fn assert_near(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() <= 1e-6 * expected.abs().max(1e-9),
        "{found}, not {expected}"
    );
}

#[test]
fn the_figures_of_an_example() {
    // With shared steps, a prefill takes 10 × 1,000/8,192 + 1,000 × (0.05 + 1e-6 × 3,000) = 54.2
    // ms. A prefill that shares its step with no other takes 10 + 53 = 63 ms. A token takes 10/256
    // + 0.02 + 1e-4 × 2,050 = 0.2640625 ms, so 100 tokens take 26.40625 ms.
    let loaded = OutstandingWork {
        requests: 30.0,
        prompts: 20.0,
        uncached_tokens: 20_000.0,
        reported: None,
        ..IDLE
    };
    let found = of(
        RequestMix {
            per_second: 20.0,
            ..MIX
        },
        &[loaded, IDLE],
        &GOAL,
    );
    assert_near(found.busy, 20.0 * (PREFILL_S + DECODE_S));
    // The backlog of 20 prompts and 30 outputs is divided by two, because the idle endpoint also
    // works on it.
    assert_near(
        found.backlog_s.unwrap(),
        (20.0 * PREFILL_S + 30.0 * DECODE_S) / 2.0,
    );
    assert_near(found.desired, found.busy / found.utilization);
    let burst = OutstandingWork {
        requests: 5_000.0,
        prompts: 5_000.0,
        uncached_tokens: 5e6,
        ..IDLE
    };
    let found = of(MIX, &[burst], &GOAL);
    assert_near(
        found.desired,
        5_000.0 * (PREFILL_S + DECODE_S) / (60.0 + 2.0 - 0.063),
    );
}

/// An owner reports many requests without tokens, beside an honest owner.
#[test]
fn an_owner_cannot_make_the_requests_of_others_seem_cheap() {
    let honest = RequestMix {
        per_second: 40.0,
        ..MIX
    };
    let loaded = OutstandingWork {
        requests: 80.0,
        reported: Some(ReportedRequests {
            waiting: 0.0,
            running: 80.0,
        }),
        ..IDLE
    };
    let step = StepModel::from_parts(STEP.0, STEP.1, 100.0);
    let found = |owners: &[RequestMix]| {
        let group = ScalingGroup {
            role: ScalingRole::Both,
            step: &step,
            mix: RequestMix::joined(owners),
            owners,
            measured: true,
            seats: EngineSeats::default(),
            endpoints: &[loaded; 10],
            starting: &[],
            held: 0.0,
        };
        signal(&group, &GOAL)
    };
    let alone = found(&[honest]);
    assert_near(alone.busy, of(honest, &[loaded; 10], &GOAL).busy);
    assert_near(RequestMix::joined(&[honest]).prompt_tokens, 2_000.0);
    for per_second in [0.0, 1.0, 40.0, 1e6] {
        let liar = RequestMix {
            per_second,
            ..RequestMix::default()
        };
        let beside = found(&[honest, liar]);
        assert!(beside.busy >= alone.busy * 0.999_999, "{per_second}");
        assert!(beside.desired >= 0.9 * alone.desired, "{per_second}");
        assert!(beside.backlog_s.unwrap() >= alone.backlog_s.unwrap() / 16.0);
    }
    let mean = RequestMix::joined(&[honest, honest]);
    assert_near(mean.per_second, 80.0);
    assert_near(mean.output_tokens, 100.0);
    assert_eq!(RequestMix::joined(&[]), RequestMix::default());
}

/// 200 requests in proxies are as much work as 200 at engines without a first token.
#[test]
fn requests_that_proxies_hold_are_backlog() {
    let step = StepModel::from_parts(STEP.0, STEP.1, 100.0);
    let found = |held, endpoint: OutstandingWork| {
        let role = ScalingRole::Both;
        let seats = EngineSeats::default();
        signal(
            &ScalingGroup {
                role,
                step: &step,
                mix: MIX,
                owners: &[],
                measured: true,
                seats,
                endpoints: &[endpoint],
                starting: &[],
                held,
            },
            &GOAL,
        )
    };
    let queued = OutstandingWork {
        requests: 200.0,
        prompts: 200.0,
        uncached_tokens: 2e5,
        ..IDLE
    };
    let held = found(200.0, IDLE);
    let at_engine = found(0.0, queued);
    assert_near(held.backlog_s.unwrap(), at_engine.backlog_s.unwrap());
    assert_near(held.desired, at_engine.desired);
    assert_eq!(found(f64::NAN, IDLE), found(0.0, IDLE));
}

#[test]
fn no_work_needs_the_minimum() {
    let found = of(
        MIX,
        &[IDLE; 4],
        &ScalingGoal {
            replicas: (2, 9),
            ..GOAL
        },
    );
    assert_eq!(
        (found.backlog_s, found.busy, found.desired),
        (Some(0.0), 0.0, 2.0)
    );
    assert_eq!(
        of(
            MIX,
            &[],
            &ScalingGoal {
                replicas: (0, 9),
                ..GOAL
            }
        ),
        ScalingSignal {
            backlog_s: None,
            desired: 0.0,
            ..found
        }
    );
}

#[test]
fn engines_of_which_nothing_is_known_are_not_idle() {
    let found = of(MIX, &[UNKNOWN; 5], &GOAL);
    assert_eq!(
        (found.backlog_s, found.desired),
        (None, 5.0),
        "the group keeps its size"
    );
    let step = StepModel::from_parts(STEP.0, STEP.1, 100.0);
    let seats = EngineSeats::default();
    let new = ScalingGroup {
        role: ScalingRole::Both,
        step: &step,
        mix: MIX,
        owners: &[],
        measured: false,
        seats,
        endpoints: &[IDLE; 5],
        starting: &[5.0; 2],
        held: 0.0,
    };
    assert_eq!(
        signal(&new, &GOAL).desired,
        7.0,
        "a new leader does not know yet what arrives"
    );
    let loaded = OutstandingWork {
        requests: 400.0,
        prompts: 400.0,
        uncached_tokens: 4e5,
        ..IDLE
    };
    let with = |other| of(MIX, &[loaded, other], &GOAL).backlog_s.unwrap();
    assert_near(with(UNKNOWN), 2.0 * with(IDLE));
}

#[test]
fn a_starting_replica_is_capacity_that_comes() {
    let step = StepModel::from_parts(STEP.0, STEP.1, 100.0);
    let loaded = OutstandingWork {
        requests: 4_000.0,
        prompts: 4_000.0,
        uncached_tokens: 4e6,
        ..IDLE
    };
    let found = |starting: &[f64], startup_s| {
        let endpoints = &[loaded];
        signal(
            &ScalingGroup {
                role: ScalingRole::Both,
                step: &step,
                mix: MIX,
                owners: &[],
                measured: true,
                seats: EngineSeats::default(),
                endpoints,
                starting,
                held: 0.0,
            },
            &ScalingGoal { startup_s, ..GOAL },
        )
    };
    assert_near(
        found(&[9.0; 3], 0.0).backlog_s.unwrap() * 4.0,
        found(&[], 0.0).backlog_s.unwrap(),
    );
    assert_eq!(
        found(&[9.0; 3], 0.0).desired,
        found(&[], 0.0).desired,
        "the desired number includes those that start"
    );
    // Start-up takes 30 s. A replica that was ordered 9 s ago works for 9 s before a replica that
    // is ordered now serves.
    let [fresh, old, late] = [0.0, 9.0, 1e3].map(|age| found(&[age], 30.0).desired);
    assert_eq!(fresh, found(&[], 30.0).desired);
    assert_near(fresh - old, 9.0 / (60.0 + 2.0 - 0.063));
    assert_near(fresh - late, 30.0 / (60.0 + 2.0 - 0.063));
}

#[test]
fn a_slow_endpoint_is_less_capacity_and_other_roles_have_other_costs() {
    let loaded = OutstandingWork {
        requests: 400.0,
        prompts: 400.0,
        uncached_tokens: 4e5,
        ..IDLE
    };
    let slow = OutstandingWork {
        speed: (2.0, 2.0),
        ..loaded
    };
    assert_near(
        of(MIX, &[slow], &GOAL).backlog_s.unwrap(),
        2.0 * of(MIX, &[loaded], &GOAL).backlog_s.unwrap(),
    );
    let step = StepModel::from_parts(STEP.0, STEP.1, 100.0);
    let found = [ScalingRole::Prefill, ScalingRole::Decode].map(|role| {
        let group = ScalingGroup {
            role,
            step: &step,
            mix: MIX,
            owners: &[],
            measured: true,
            seats: EngineSeats::default(),
            endpoints: &[loaded],
            starting: &[],
            held: 0.0,
        };
        signal(&group, &GOAL).backlog_s.unwrap()
    });
    assert_near(found[0], 400.0 * PREFILL_S);
    assert_near(found[1], 400.0 * DECODE_S);
    assert_eq!(
        [None, Some("decode"), Some("encode"), Some("prefill")]
            .map(ScalingRole::from_label)
            .map(|role| role.map(ScalingRole::name)),
        [Some("both"), Some("decode"), None, Some("prefill")]
    );
}

#[test]
fn requests_that_only_the_engine_knows_count_too() {
    let reports = |waiting, running| OutstandingWork {
        reported: Some(ReportedRequests { waiting, running }),
        ..IDLE
    };
    assert_near(
        of(MIX, &[reports(10.0, 0.0)], &GOAL).backlog_s.unwrap(),
        10.0 * (PREFILL_S + DECODE_S),
    );
    assert_near(
        of(MIX, &[reports(0.0, 10.0)], &GOAL).backlog_s.unwrap(),
        10.0 * DECODE_S,
    );
    let ours = OutstandingWork {
        requests: 10.0,
        prompts: 10.0,
        uncached_tokens: 10_000.0,
        ..reports(10.0, 0.0)
    };
    assert_near(
        of(MIX, &[ours], &GOAL).backlog_s.unwrap(),
        10.0 * (PREFILL_S + DECODE_S),
    );
}

#[test]
fn a_small_kv_cache_makes_tokens_expensive() {
    let metrics = |blocks| EndpointMetrics {
        kv_blocks: Some(blocks),
        kv_block_tokens: Some(16),
        ..EndpointMetrics::default()
    };
    let rooms = [metrics(2_000), metrics(1_000), EndpointMetrics::default()];
    assert_eq!(
        EngineSeats::from_metrics(&rooms.iter()),
        EngineSeats {
            sequences_max: None,
            kv_tokens: Some(16_000.0)
        }
    );
    assert_eq!(
        EngineSeats {
            sequences_max: Some(64.0),
            kv_tokens: Some(16_000.0)
        }
        .batch(2_000.0),
        7.6
    );
    assert_eq!(
        EngineSeats {
            sequences_max: Some(4.0),
            kv_tokens: Some(16_000.0)
        }
        .batch(0.0),
        4.0
    );
    assert_eq!(
        EngineSeats {
            sequences_max: Some(f64::NAN),
            kv_tokens: None
        }
        .batch(0.0),
        1.0
    );
}

/// Large batches make tokens cheaper. If flow control limits the requests in an engine, batches
/// stay small, so more replicas are desired.
#[test]
fn a_limit_of_requests_needs_more_replicas() {
    let seats = EngineSeats {
        sequences_max: Some(64.0),
        kv_tokens: None,
    };
    assert_eq!(
        [Some(4.0), Some(100.0), None].map(|limit| seats.at_most(limit).batch(0.0)),
        [4.0, 64.0, 64.0]
    );
    assert_eq!(EngineSeats::default().at_most(Some(1.0)).batch(0.0), 1.0);
    let step = StepModel::from_parts(STEP.0, STEP.1, 100.0);
    let mix = RequestMix {
        per_second: 20.0,
        ..MIX
    };
    let desired = |limit| {
        let role = ScalingRole::Both;
        let seats = seats.at_most(limit);
        let endpoints = &[IDLE];
        signal(
            &ScalingGroup {
                role,
                step: &step,
                mix,
                owners: &[],
                measured: true,
                seats,
                endpoints,
                starting: &[],
                held: 0.0,
            },
            &GOAL,
        )
        .desired
    };
    assert!(
        desired(Some(1.0)) > 5.0 * desired(None),
        "{} and {}",
        desired(Some(1.0)),
        desired(None)
    );
}

#[test]
fn replicas_to_spare_are_there_as_long_as_there_is_work() {
    let with = |spare, per_second, endpoint| {
        of(
            RequestMix { per_second, ..MIX },
            &[endpoint],
            &ScalingGoal { spare, ..GOAL },
        )
    };
    let busy = with(0.0, 100.0, IDLE);
    assert_near(with(2.5, 100.0, IDLE).desired, busy.desired + 2.5);
    assert_eq!(with(2.5, 100.0, IDLE).utilization, busy.utilization);
    let loaded = OutstandingWork {
        requests: 1.0,
        prompts: 1.0,
        uncached_tokens: 1_000.0,
        ..IDLE
    };
    assert_eq!(
        [with(3.0, 0.0, IDLE).desired, with(3.0, 0.0, loaded).desired],
        [1.0, 3.0]
    );
    assert_eq!(with(f64::NAN, 100.0, IDLE), busy);
}

#[test]
fn the_time_to_start_orders_ahead_of_a_backlog_that_grows() {
    let busy = RequestMix {
        per_second: 100.0,
        ..MIX
    };
    let found = [0.0, 300.0]
        .map(|startup_s| of(busy, &[IDLE; 4], &ScalingGoal { startup_s, ..GOAL }).desired);
    assert!(found[1] > 1.4 * found[0], "{found:?}");
    let found = [0.0, 300.0]
        .map(|startup_s| of(busy, &[IDLE; 40], &ScalingGoal { startup_s, ..GOAL }).desired);
    assert_eq!(found[0], found[1], "enough replicas are there");
}

fn any_work() -> impl Strategy<Value = OutstandingWork> {
    let reported = prop::option::of(
        (0.0..500.0, 0.0..500.0)
            .prop_map(|(waiting, running)| ReportedRequests { waiting, running }),
    );
    (0.0..500.0, 0.0..500.0, 0.0..1e6, reported).prop_map(
        |(requests, prompts, uncached_tokens, reported)| OutstandingWork {
            speed: (1.0, 1.0),
            requests,
            prompts,
            uncached_tokens,
            reported,
        },
    )
}

proptest! {
    #[test]
    fn more_work_never_needs_fewer_replicas(
        endpoints in prop::collection::vec(any_work(), 1..6),
        (at, more) in (any::<prop::sample::Index>(), 1.0_f64..5.0),
        (per_second, faster, startup_s) in (0.0..500.0, 0.0..100.0, 0.0..600.0),
        spare in 0.0..5.0,
    ) {
        let goal = ScalingGoal { startup_s, spare, ..GOAL };
        let mut grown = endpoints.clone();
        let work = &mut grown[at.index(endpoints.len())];
        work.requests *= more;
        work.prompts *= more;
        work.uncached_tokens *= more;
        if let Some(reported) = &mut work.reported {
            reported.waiting *= more;
            reported.running *= more;
        }
        let before = of(RequestMix { per_second, ..MIX }, &endpoints, &goal);
        let after = of(RequestMix { per_second: per_second + faster, ..MIX }, &grown, &goal);
        prop_assert!(after.desired >= before.desired * (1.0 - 1e-9), "{before:?} {after:?}");
        prop_assert!(after.backlog_s >= before.backlog_s.map(|seconds| seconds * (1.0 - 1e-9)), "{before:?} {after:?}");
    }

    #[test]
    fn a_pool_of_twice_the_size_needs_at_most_twice_the_replicas(endpoints in prop::collection::vec(any_work(), 1..6), per_second in 0.0..500.0) {
        let goal = ScalingGoal { replicas: (0, 1_000_000), startup_s: 60.0, ..GOAL };
        let one = of(RequestMix { per_second, ..MIX }, &endpoints, &goal);
        let two = {
            let twice = [&endpoints[..], &endpoints].concat();
            of(RequestMix { per_second: 2.0 * per_second, ..MIX }, &twice, &goal)
        };
        let twice = 2.0 * one.desired * (1.0 + 1e-6);
        prop_assert!((one.desired..=twice).contains(&two.desired), "{one:?} {two:?}");
        prop_assert!((two.backlog_s.unwrap_or(0.0) - one.backlog_s.unwrap_or(0.0)).abs() <= 1e-6, "{one:?} {two:?}");
    }

    #[test]
    fn any_numbers_give_a_number_within_the_bounds(
        numbers in prop::array::uniform8(any::<f64>()),
        goal in prop::array::uniform4(any::<f64>()),
        replicas in any::<(u32, u32)>(),
        speed in any::<(f32, f32)>(),
        reports in any::<bool>(),
    ) {
        let [requests, prompts, uncached_tokens, waiting, running, per_second, prompt_tokens, output_tokens] = numbers;
        let reported = reports.then_some(ReportedRequests { waiting, running });
        let endpoint = OutstandingWork { speed, requests, prompts, uncached_tokens, reported };
        let goal = ScalingGoal { ttft_s: goal[0], drain_s: goal[1], startup_s: goal[2], spare: goal[3], replicas };
        let mix = RequestMix { per_second, prompt_tokens, uncached_tokens, output_tokens };
        let found = of(mix, &[endpoint], &goal);
        let least = f64::from(replicas.0);
        let most = f64::from(replicas.1.max(replicas.0));
        prop_assert!((least..=most).contains(&found.desired), "{found:?}");
        prop_assert!(found.backlog_s.is_none_or(|seconds| seconds >= 0.0), "{found:?}");
    }
}
