use super::*;

const OWN_TIME_ONLY: CostWeights = CostWeights {
    externality: 0.0,
    own_batch_share: 0.0,
    arrival_externality: 0.0,
    queue_externality: 0.0,
    displacement: 0.0,
    decode_weight: 0.0,
    failure_ms: 0.0,
    memory_weight: 0.0,
    refresh: 0.0,
};

/// A prompt of 1,000 tokens, all uncached.
fn request(step: &StepModel) -> RequestInputs<'_> {
    RequestInputs { step, prompt_tokens: 1_000.0, output_tokens: 200.0, reuse_interval: 0.0, mean_batch: 0.0 }
}

/// An endpoint as the default step model sees it.
fn endpoint(load: EndpointLoad, speed: (f32, f32), adapter_ms: f32) -> EndpointInputs {
    let load = LoadInputs::of(&load, &StepModel::default());
    EndpointInputs { load, speed, uncached_tokens: 1_000.0, adapter_ms, memory: None, excess_failure_rate: 0.0, prefix_age: 0.0 }
}

fn cost(weights: &CostWeights, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> f32 {
    Cost::of(weights, request, endpoint).total()
}

fn near(found: f32, expected: f32) {
    assert!((found / expected - 1.0).abs() < 1e-5, "{found}, not {expected}");
}

#[test]
fn half_of_the_extra_time_of_a_slow_endpoint_delays_other_endpoints() {
    let (weights, step) = (CostWeights { externality: 1.0, ..OWN_TIME_ONLY }, StepModel::default());
    let interference_ms = |speed| {
        let cost = |mean_batch| {
            cost(&weights, &RequestInputs { mean_batch, ..request(&step) }, &endpoint(EndpointLoad::default(), (speed, 1.0), 30.0))
        };
        cost(1.0) - cost(0.0)
    };
    near((interference_ms(3.0) - 30.0) / (interference_ms(1.0) - 30.0), 2.0);
}

#[test]
fn queued_prompts_share_steps_and_their_tokens_add_up() {
    let step = StepModel::of([12.0, 0.05, 0.0], [11.0, 0.025, 8e-5], 200.0);
    let prefills = |prompts, uncached_tokens| PendingPrefills { prompts, uncached_tokens, ..PendingPrefills::default() };
    near(queued_prefills_ms(&step, &prefills(1, 400)), 12.0 / 1.25 + 20.0);
    near(queued_prefills_ms(&step, &prefills(8, 3_200)), 12.0 * 8.0 / 3.0 + 160.0);
}

#[test]
fn a_prompt_waits_for_missing_memory_but_never_for_more_than_it_needs() {
    let step = StepModel::default();
    let weights = CostWeights { memory_weight: 1.0, ..OWN_TIME_ONLY };
    let lifetimes_waited = |used, uncached_tokens| {
        let prefills = PendingPrefills { uncached_tokens, ..PendingPrefills::default() };
        let memory = Some(KvMemory { capacity: 10_000.0, used });
        let endpoint = EndpointInputs { memory, ..endpoint(EndpointLoad { prefills, ..EndpointLoad::default() }, (1.0, 1.0), 0.0) };
        let without_memory_ms = queued_prefills_ms(&step, &prefills) + step.prefill_ms(1_000.0, 1_000.0);
        (cost(&weights, &request(&step), &endpoint) - without_memory_ms) / (200.0 * step.decode_ms(1.0, 1_000.0))
    };
    // 9,000 tokens are available to prompts; the request needs 1,200 with its output.
    assert!(lifetimes_waited(7_700.0, 0).abs() < 1e-5);
    near(lifetimes_waited(8_000.0, 0), 0.02);
    near(lifetimes_waited(7_600.0, 1_000), 0.03);
    near(lifetimes_waited(10_000.0, 90_000), 0.1);
}

#[test]
fn an_endpoint_that_fails_at_once_is_not_the_cheapest() {
    let (weights, step) = (CostWeights { failure_ms: 10_000.0, ..OWN_TIME_ONLY }, StepModel::default());
    let busy = endpoint(
        EndpointLoad {
            prefills: PendingPrefills { prompts: 4, uncached_tokens: 4_000, ..PendingPrefills::default() },
            ..EndpointLoad::default()
        },
        (1.0, 1.0),
        0.0,
    );
    let idle = |excess_failure_rate| EndpointInputs { excess_failure_rate, ..endpoint(EndpointLoad::default(), (1.0, 1.0), 0.0) };
    assert!(cost(&weights, &request(&step), &idle(0.0)) < cost(&weights, &request(&step), &busy));
    assert!(cost(&weights, &request(&step), &idle(0.1)) > cost(&weights, &request(&step), &busy));
    near(cost(&weights, &request(&step), &idle(0.25)) - cost(&weights, &request(&step), &idle(0.0)), 2_500.0);
}

#[test]
fn an_old_copy_is_worth_the_prefill_it_saves_where_memory_is_free() {
    let (weights, step) = (CostWeights { decode_weight: 1.0, refresh: 1.0, ..OWN_TIME_ONLY }, StepModel::default());
    let cost = |prefix_age, used, uncached_tokens| {
        let memory = Some(KvMemory { capacity: 1e6, used });
        cost(
            &weights,
            &request(&step),
            &EndpointInputs { uncached_tokens, prefix_age, memory, ..endpoint(EndpointLoad::default(), (1.0, 1.0), 0.0) },
        )
    };
    let saved_ms = step.prefill_ms(1_000.0, 1_000.0) - step.prefill_ms(200.0, 1_000.0);
    let worth_ms = |prefix_age, used| cost(0.0, used, 200.0) - cost(prefix_age, used, 200.0);
    let near = |found: f32, expected: f32| assert!((found - expected).abs() < 0.01, "{found}, not {expected}");
    near(worth_ms(0.5, 0.0), saved_ms / 2.0);
    near(worth_ms(0.5, 5e5), saved_ms / 4.0);
    near(worth_ms(0.5, 1e6), 0.0);
    near(cost(1.0, 0.0, 1_000.0), cost(0.0, 0.0, 1_000.0));
}

#[test]
fn no_copy_makes_a_request_cheaper_than_its_own_prefill() {
    let (weights, step) = (CostWeights { refresh: 100.0, ..OWN_TIME_ONLY }, StepModel::default());
    let endpoint = EndpointInputs { uncached_tokens: 10.0, prefix_age: 1.0, ..endpoint(EndpointLoad::default(), (1.0, 1.0), 0.0) };
    near(cost(&weights, &request(&step), &endpoint), step.prefill_ms(10.0, 1_000.0));
}

#[test]
fn the_mean_memory_counts_engines_that_report_it() {
    let with_memory = |memory| EndpointInputs { memory, ..endpoint(EndpointLoad::default(), (1.0, 1.0), 0.0) };
    let memory = |capacity, used| Some(KvMemory { capacity, used });
    let mean = KvMemory::mean(&[with_memory(memory(100.0, 10.0)), with_memory(None), with_memory(memory(300.0, 290.0))]).unwrap();
    near(mean.capacity, 200.0);
    near(mean.used, 150.0);
    assert!(KvMemory::mean(&[with_memory(None)]).is_none());
}

#[test]
fn costs_scale_with_the_speed_of_the_endpoint() {
    let step = StepModel::default();
    let load = EndpointLoad {
        requests: 5,
        prefills: PendingPrefills { prompts: 2, uncached_tokens: 700, ..PendingPrefills::default() },
        ..EndpointLoad::default()
    };
    let fixed = |weights: &CostWeights, speed| cost(weights, &request(&step), &endpoint(load, speed, 0.0));
    near(fixed(&OWN_TIME_ONLY, (2.0, 3.0)), 2.0 * fixed(&OWN_TIME_ONLY, (1.0, 1.0)));
    let decoding = CostWeights { decode_weight: 1.0, ..OWN_TIME_ONLY };
    let decode = |speed| fixed(&decoding, (1.0, speed)) - fixed(&OWN_TIME_ONLY, (1.0, speed));
    near(decode(3.0), 3.0 * decode(1.0));
}

#[test]
fn the_named_terms_add_up_to_the_total() {
    let step = StepModel::default();
    let weights = CostWeights {
        externality: 1.6,
        own_batch_share: 0.22,
        arrival_externality: 2.5,
        queue_externality: 0.35,
        displacement: 55.0,
        decode_weight: 0.6,
        failure_ms: 10_000.0,
        memory_weight: 2.0,
        refresh: 1.0,
    };
    let load = EndpointLoad {
        requests: 5,
        prefills: PendingPrefills { prompts: 2, uncached_tokens: 700, ..PendingPrefills::default() },
        ..EndpointLoad::default()
    };
    let memory = Some(KvMemory { capacity: 10_000.0, used: 8_000.0 });
    let endpoint = EndpointInputs { excess_failure_rate: 0.1, prefix_age: 0.3, memory, ..endpoint(load, (1.5, 2.0), 30.0) };
    let cost = Cost::of(&weights, &RequestInputs { reuse_interval: 2.0, mean_batch: 3.0, ..request(&step) }, &endpoint);
    near(cost.terms().iter().map(|(_, ms)| ms).sum(), cost.total());
    let zero = |&(name, ms): &(&'static str, f32)| (ms == 0.0 && name != "refresh_ms").then_some(name);
    assert_eq!(cost.terms().iter().find_map(zero), None, "every term has a value");
}
