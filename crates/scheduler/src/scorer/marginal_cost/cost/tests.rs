use super::*;

const WEIGHTS: CostWeights = CostWeights {
    ttft_weight: 1.0,
    queue_externality: 0.0,
    failure_ms: 0.0,
};

/// Returns a request with a prompt of 1,000 uncached tokens, without a decode stage.
fn request(step: &StepModel) -> RequestInputs<'_> {
    RequestInputs {
        step,
        prompt_tokens: 1_000.0,
        new_tokens: 1_000.0,
        output_tokens: 0.0,
        reuse_interval: 1e9,
        evicted_share: 0.0,
        mean_batch: 0.0,
        mean_context: 0.0,
    }
}

/// Returns an endpoint with the default step model, which has cached no part of the prompt.
fn endpoint(load: EndpointLoad, speed: (f32, f32), adapter_ms: f32) -> EndpointInputs {
    let load = LoadInputs::from_load(&load, &StepModel::default());
    EndpointInputs {
        load,
        speed,
        uncached_tokens: 1_000.0,
        adapter_ms,
        memory: None,
        excess_failure_rate: 0.0,
    }
}

fn cost(weights: &CostWeights, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> f32 {
    Cost::estimate(weights, request, endpoint).total()
}

fn near(found: f32, expected: f32) {
    assert!(
        (found / expected - 1.0).abs() < 1e-5,
        "{found}, not {expected}"
    );
}

#[test]
fn a_copy_of_a_shared_prefix_is_paid_by_all_that_use_it() {
    let step = StepModel::from_parts([10.0, 0.1, 0.0], [11.0, 0.025, 8e-5], 200.0);
    let copy_ms = |reuse_interval| {
        let request = RequestInputs {
            new_tokens: 0.0,
            reuse_interval,
            ..request(&step)
        };
        cost(
            &WEIGHTS,
            &request,
            &endpoint(EndpointLoad::default(), (1.0, 1.0), 0.0),
        ) - 10.0
    };
    near(copy_ms(1e9), 100.0);
    near(copy_ms(1.0), 50.0);
    near(copy_ms(0.25), 20.0);
    assert!(copy_ms(0.0).abs() < 1e-3);
}

#[test]
fn evicting_costs_what_is_computed_again_and_nothing_where_memory_is_free() {
    let step = StepModel::from_parts([10.0, 0.1, 0.0], [11.0, 0.025, 8e-5], 200.0);
    let memory_ms = |evicted_share, uncached_tokens, mean_batch| {
        let request = RequestInputs {
            new_tokens: 200.0,
            evicted_share,
            mean_batch,
            ..request(&step)
        };
        let endpoint = EndpointInputs {
            uncached_tokens,
            ..endpoint(EndpointLoad::default(), (1.0, 1.0), 0.0)
        };
        Cost::estimate(&WEIGHTS, &request, &endpoint).memory
    };
    assert_eq!(memory_ms(0.0, 1_000.0, 3.0), 0.0);
    assert_eq!(
        memory_ms(0.5, 200.0, 3.0),
        0.0,
        "new tokens take memory at any endpoint"
    );
    near(memory_ms(0.5, 1_000.0, 0.0), 80.0);
    near(memory_ms(0.5, 1_000.0, 3.0), 320.0);
    near(memory_ms(0.75, 1_000.0, 0.0), 240.0);
    near(memory_ms(1.0, 1_000.0, 0.0), 19.0 * 80.0);
}

#[test]
fn a_prefill_delays_the_requests_to_be_expected() {
    let step = StepModel::from_parts([0.0, 0.1, 0.0], [11.0, 0.025, 8e-5], 200.0);
    let delay_ms = |requests, mean_batch| {
        let request = RequestInputs {
            mean_batch,
            ..request(&step)
        };
        Cost::estimate(
            &WEIGHTS,
            &request,
            &endpoint(
                EndpointLoad {
                    requests,
                    ..EndpointLoad::default()
                },
                (1.0, 1.0),
                0.0,
            ),
        )
        .delay
    };
    assert_eq!(delay_ms(0, 0.0), 0.0, "an idle pool");
    near(delay_ms(0, 4.0), 2.0 * 100.0);
    near(delay_ms(8, 4.0), 6.0 * 100.0);
}

#[test]
fn a_batch_is_half_of_those_here_and_half_the_usual() {
    let step = StepModel::from_parts([0.0, 0.0, 0.0], [11.0, 0.5, 0.0], 100.0);
    let decode_ms = |requests, mean_batch| {
        let request = RequestInputs {
            output_tokens: 100.0,
            mean_batch,
            ..request(&step)
        };
        let load = EndpointLoad {
            requests,
            ..EndpointLoad::default()
        };
        Cost::estimate(&WEIGHTS, &request, &endpoint(load, (1.0, 1.0), 0.0)).decode
    };
    near(decode_ms(0, 0.0), 100.0 * 11.5);
    near(decode_ms(6, 2.0), 100.0 * (11.0 + 0.5 * 5.0 + 0.5 * 4.0));
    near(decode_ms(2, 6.0), decode_ms(6, 2.0));
}

#[test]
fn queued_prompts_share_steps_and_their_tokens_add_up() {
    let step = StepModel::from_parts([12.0, 0.05, 0.0], [11.0, 0.025, 8e-5], 200.0);
    let prefills = |prompts, uncached_tokens| PendingPrefills {
        prompts,
        uncached_tokens,
        ..PendingPrefills::default()
    };
    near(
        queued_prefills_ms(&step, &prefills(1, 400)),
        (12.0 / 1.25 + 20.0) / 2.0,
    );
    near(
        queued_prefills_ms(&step, &prefills(8, 3_200)),
        (12.0 * 8.0 / 3.0 + 160.0) * 7.5 / 8.0,
    );
    assert_eq!(queued_prefills_ms(&step, &prefills(0, 0)), 0.0);
}

#[test]
fn a_prompt_waits_for_missing_memory_but_never_for_more_than_it_needs() {
    let step = StepModel::default();
    let request = RequestInputs {
        output_tokens: 200.0,
        ..request(&step)
    };
    let lifetimes_waited = |used, uncached_tokens, prompts| {
        let prefills = PendingPrefills {
            prompts,
            uncached_tokens,
            ..PendingPrefills::default()
        };
        let memory = Some(KvMemory {
            capacity: 10_000.0,
            used,
        });
        let endpoint = EndpointInputs {
            memory,
            ..endpoint(
                EndpointLoad {
                    prefills,
                    ..EndpointLoad::default()
                },
                (1.0, 1.0),
                0.0,
            )
        };
        let missing_ms = Cost::estimate(&WEIGHTS, &request, &endpoint).wait
            - queued_prefills_ms(&step, &prefills);
        missing_ms / (200.0 * step.decode_ms(1.0, 1_000.0))
    };
    // 9,000 tokens are available to prompts; the request needs 1,200 tokens with its output.
    assert!(lifetimes_waited(7_700.0, 0, 0).abs() < 1e-5);
    near(lifetimes_waited(8_000.0, 0, 0), 0.02);
    near(lifetimes_waited(7_600.0, 1_000, 1), 0.03);
    near(lifetimes_waited(10_000.0, 90_000, 1), 0.1);
}

#[test]
fn an_endpoint_that_fails_at_once_is_not_the_cheapest() {
    let weights = CostWeights {
        failure_ms: 10_000.0,
        ..WEIGHTS
    };
    let step = StepModel::default();
    let busy = endpoint(
        EndpointLoad {
            prefills: PendingPrefills {
                prompts: 4,
                uncached_tokens: 4_000,
                ..PendingPrefills::default()
            },
            ..EndpointLoad::default()
        },
        (1.0, 1.0),
        0.0,
    );
    let idle = |excess_failure_rate| EndpointInputs {
        excess_failure_rate,
        ..endpoint(EndpointLoad::default(), (1.0, 1.0), 0.0)
    };
    assert!(cost(&weights, &request(&step), &idle(0.0)) < cost(&weights, &request(&step), &busy));
    assert!(cost(&weights, &request(&step), &idle(0.1)) > cost(&weights, &request(&step), &busy));
    near(
        cost(&weights, &request(&step), &idle(0.25)) - cost(&weights, &request(&step), &idle(0.0)),
        2_500.0,
    );
}

#[test]
fn the_mean_memory_counts_engines_that_report_it() {
    let with_memory = |memory| EndpointInputs {
        memory,
        ..endpoint(EndpointLoad::default(), (1.0, 1.0), 0.0)
    };
    let memory = |capacity, used| Some(KvMemory { capacity, used });
    let mean = KvMemory::mean(&[
        with_memory(memory(100.0, 10.0)),
        with_memory(None),
        with_memory(memory(300.0, 290.0)),
    ])
    .unwrap();
    near(mean.capacity, 200.0);
    near(mean.used, 150.0);
    assert!(KvMemory::mean(&[with_memory(None)]).is_none());
}

#[test]
fn costs_scale_with_the_speed_of_the_endpoint() {
    let step = StepModel::default();
    let prefills = PendingPrefills {
        prompts: 2,
        uncached_tokens: 700,
        ..PendingPrefills::default()
    };
    let load = EndpointLoad {
        prefills,
        ..EndpointLoad::default()
    };
    let prefill = |speed| {
        cost(
            &WEIGHTS,
            &request(&step),
            &endpoint(load, (speed, 1.0), 0.0),
        )
    };
    near(prefill(2.0), 2.0 * prefill(1.0));
    let decode = |speed| {
        let request = RequestInputs {
            output_tokens: 200.0,
            ..request(&step)
        };
        Cost::estimate(&WEIGHTS, &request, &endpoint(load, (1.0, speed), 0.0)).decode
    };
    near(decode(3.0), 3.0 * decode(1.0));
}

#[test]
fn the_named_terms_add_up_to_the_total() {
    let step = StepModel::default();
    let weights = CostWeights {
        ttft_weight: 5.0,
        queue_externality: 0.2,
        failure_ms: 10_000.0,
    };
    let load = EndpointLoad {
        requests: 5,
        prefills: PendingPrefills {
            prompts: 2,
            uncached_tokens: 700,
            ..PendingPrefills::default()
        },
        ..EndpointLoad::default()
    };
    let memory = Some(KvMemory {
        capacity: 10_000.0,
        used: 8_000.0,
    });
    let endpoint = EndpointInputs {
        excess_failure_rate: 0.1,
        memory,
        ..endpoint(load, (1.5, 2.0), 30.0)
    };
    let request = RequestInputs {
        new_tokens: 300.0,
        output_tokens: 200.0,
        reuse_interval: 2.0,
        evicted_share: 0.2,
        mean_batch: 3.0,
        mean_context: 900.0,
        ..request(&step)
    };
    let cost = Cost::estimate(&weights, &request, &endpoint);
    near(cost.terms().iter().map(|(_, ms)| ms).sum(), cost.total());
    assert_eq!(
        cost.terms().iter().find(|(_, ms)| *ms == 0.0),
        None,
        "every term has a value"
    );
}
