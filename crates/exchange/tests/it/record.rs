//! A recorded decision can be repeated in another process, with the same result.

use exchange::record::{InvalidRecord, ParsedRecord, RECORD_BYTES_MAX, RECORDED_ENDPOINTS_MAX};
use exchange::{
    DecisionLogSettings, Exchange, ExchangeSettings, ExchangeStep, ManagedPool, Timestamp,
};
use proptest::prelude::*;
use scheduler::plugin::ParameterValue;
use scheduler::{
    Decision, Endpoint, EndpointMetrics, EndpointRef, Generation, LoraMetrics, Pipeline,
    PipelineSpec, PluginSpec, Readiness, Slot, Snapshot, Version,
};

/// Returns settings that record every decision.
pub(crate) fn recording() -> ExchangeSettings {
    let shipped = ExchangeSettings::default();
    ExchangeSettings {
        decision_log: DecisionLogSettings {
            one_in: 1,
            ..shipped.decision_log
        },
        ..shipped
    }
}

/// Returns a pipeline whose plugins read every input, and whose picker is random.
fn pipeline() -> Pipeline {
    let plugin = |plugin_type: &str| (PluginSpec::of_type(plugin_type), 1.0);
    let session = PluginSpec {
        parameters: vec![(
            "strategy".to_owned(),
            ParameterValue::Text("session_id".to_owned()),
        )],
        ..PluginSpec::of_type("session-affinity-scorer")
    };
    let types = [
        "queue-scorer",
        "running-requests-size-scorer",
        "kv-cache-utilization-scorer",
        "prefix-cache-scorer",
        "active-request-scorer",
        "token-load-scorer",
        "lora-affinity-scorer",
        "no-hit-lru-scorer",
        "marginal-cost-scorer",
        "weighted-random-picker",
    ];
    let plugins = types
        .into_iter()
        .map(plugin)
        .chain([(session, 1.0)])
        .collect();
    Pipeline::build(&PipelineSpec::of_one_profile("p", plugins, 3)).unwrap()
}

fn snapshot(queues: &[Option<u8>]) -> Snapshot {
    let endpoint = |(at, queue): (usize, &Option<u8>)| Endpoint {
        id: EndpointRef {
            slot: Slot(at as u16),
            generation: Generation(1),
        },
        name: format!("pod-{at}").into(),
        address: format!("10.0.0.{at}:8000").into(),
        readiness: if *queue == Some(0) {
            Readiness::NotReady
        } else {
            Readiness::Ready
        },
        labels: Box::new([("number".into(), at.to_string().into())]),
        models: std::sync::Arc::default(),
        age_ms: at as u64 * 2_000,
    };
    let metrics = |queue: &Option<u8>| EndpointMetrics {
        queue_depth: queue.map(f32::from),
        running_requests: queue.map(|q| f32::from(q) / 3.0),
        kv_cache_utilization: queue.map(|q| f32::from(q) / 64.0),
        // The cache has so few blocks that a dozen prompts fill it.
        kv_blocks: queue.map(|_| 24),
        kv_block_tokens: Some(64),
        lora: queue.map(|q| LoraMetrics {
            running: [format!("m{}", q % 3).into()].into(),
            waiting: Box::new([]),
            max: 2,
            base_models: [].into(),
        }),
        ..EndpointMetrics::default()
    };
    let endpoints = queues.iter().enumerate().map(endpoint).collect();
    Snapshot::try_new(
        Version {
            term: 3,
            sequence: 9,
        },
        endpoints,
        queues.iter().map(metrics).collect(),
        pipeline(),
    )
    .unwrap()
}

/// Sends a request, and returns the addresses of the picked endpoints, and the record.
fn decide(pool: &mut ManagedPool, body: &str, hint: Option<&str>) -> (Vec<String>, Option<String>) {
    let settings = recording();
    let pairs: [(&[u8], &[u8]); 3] = [
        (b":method", b"POST"),
        (b":path", b"/v1/completions"),
        (b"x-session-id", b"anna"),
    ];
    let mut exchange = Exchange::new(Timestamp(0));
    exchange.request_headers(&settings, pairs, false);
    exchange.capture_headers(pool, pairs);
    let step = exchange.decide(
        &settings,
        pool,
        hint.map(str::as_bytes),
        body.as_bytes(),
        Timestamp(0),
    );
    let picked = match step {
        ExchangeStep::Forward(forward) => forward.set[0].1.split(',').map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    // The request does not end, so the next decision sees it in flight.
    (picked, exchange.take_record())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_record_replays_to_the_same_list(
        queues in prop::collection::vec(prop::option::weighted(0.9, 0_u8..40), 1..12),
        prompts in prop::collection::vec((0_usize..4, 0_usize..3), 1..12),
        seed: u64,
    ) {
        let mut pool = ManagedPool::new(seed, 4096);
        pool.install(snapshot(&queues), 7, 1_000);
        pool.refresh(snapshot(&queues), Timestamp(0));
        for (prompt, model) in prompts {
            let body = format!(r#"{{"model":"m{model}","prompt":"{}","max_tokens":9}}"#, format!("prompt {prompt} ").repeat(60));
            let (picked, record) = decide(&mut pool, &body, None);
            let record = record.unwrap();
            prop_assert!(!record.contains("prompt 1 prompt"), "no prompt is in it");
            let record = ParsedRecord::from_json(&record).unwrap();
            prop_assert_eq!(record.was_picked(), picked.clone());
            let replay = record.replay(&snapshot(&queues), &[]).unwrap();
            let again: Vec<String> = match &replay.decision {
                Decision::Route(route) => route.ranked.iter().map(|at| replay.snapshot.endpoint(at).unwrap().address.to_string()).collect(),
                _ => Vec::new(),
            };
            prop_assert_eq!(again, picked);
        }
    }

    /// Checks that reading and replaying any text ends with an answer or an error.
    #[test]
    fn any_text_is_a_record_or_is_not(
        text in r#"\{("rng":(1|-1|"x"|9e99),?)?("version":(\[1,2\]|3),?)?("request":(\{("blocks":(1|99999999999))?\}|4),?)?("endpoints":(\[\]|\[\{\}\]|\[\{"endpoint":"a"\}\]),?)?("metrics_stale":true)?\}"#
    ) {
        if let Ok(record) = ParsedRecord::from_json(&text) {
            let _ = record.replay(&snapshot(&[None]), &[]);
        }
    }
}

/// Checks that a reader of the log finds no prompt's hash in the log, even if this reader guesses
/// every prompt and knows the secret.
#[test]
fn no_hash_of_a_prompt_is_in_the_record() {
    let mut pool = ManagedPool::new(7, 4096);
    pool.install(snapshot(&[Some(1), Some(9)]), 7, 1_000);
    pool.set_placement_publishing(true);
    let (_, record) = decide(
        &mut pool,
        &format!(r#"{{"model":"m","prompt":"{}"}}"#, "guessed ".repeat(200)),
        None,
    );
    let record = record.unwrap();
    let blocks = pool.take_placements().pop_front().unwrap().blocks;
    assert!(
        blocks.len() > 4
            && blocks
                .iter()
                .all(|block| !record.contains(&block.to_string())),
        "{record}"
    );
}

#[test]
fn how_rarely_a_prefix_is_requested_is_in_the_record() {
    let mut pool = ManagedPool::new(7, 8_192);
    pool.install(snapshot(&[Some(1), Some(1)]), 7, 1_000);
    let mut interval = |prompt: u32| {
        let body = format!(
            r#"{{"model":"m","prompt":"{}"}}"#,
            format!("prompt {prompt} ").repeat(60)
        );
        let record: serde_json::Value =
            serde_json::from_str(&decide(&mut pool, &body, None).1.unwrap()).unwrap();
        assert_eq!(
            record["evicted_share"].as_f64(),
            Some(0.0),
            "nothing was evicted"
        );
        record["reuse_interval"].as_f64().unwrap()
    };
    let once = f64::from(scheduler::prefix::REQUESTED_ONCE);
    assert_eq!(interval(0), once, "no endpoint has any of it cached");
    (1..=10).for_each(|other| assert_eq!(interval(other), once));
    assert_eq!(interval(0), once, "it was requested once");
    (11..=20).for_each(|other| assert_eq!(interval(other), once));
    let found = interval(0);
    assert!(
        (4.0..=8.0).contains(&found),
        "ten other prompts, to two endpoints: {found}"
    );
}

#[test]
fn without_the_picked_endpoint_another_is_picked() {
    let mut pool = ManagedPool::new(7, 4096);
    pool.install(snapshot(&[Some(1), Some(9)]), 7, 1_000);
    let (picked, record) = decide(&mut pool, r#"{"model":"m","prompt":"p"}"#, None);
    let record = ParsedRecord::from_json(&record.unwrap()).unwrap();
    let replay = record
        .replay(&snapshot(&[Some(1), Some(9)]), &picked[..1])
        .unwrap();
    let Decision::Route(route) = replay.decision else {
        panic!("not routed")
    };
    let again: Vec<_> = route
        .ranked
        .iter()
        .map(|at| replay.snapshot.endpoint(at).unwrap())
        .collect();
    let [again] = again[..] else {
        panic!("there is one left")
    };
    assert_eq!(*again.address, picked[1]);
    assert_eq!(
        replay.snapshot.version(),
        Version {
            term: 3,
            sequence: 9
        }
    );
    assert_eq!(
        again.label("number"),
        again.address.get(7..8),
        "the labels are the current ones"
    );
}

#[test]
fn a_hint_is_recorded_and_holds_again() {
    let mut pool = ManagedPool::new(7, 4096);
    pool.install(snapshot(&[Some(9), Some(1)]), 7, 1_000);
    let (picked, record) = decide(
        &mut pool,
        r#"{"model":"m","prompt":"p"}"#,
        Some("10.0.0.0:8000"),
    );
    assert_eq!(picked, ["10.0.0.0:8000"]);
    let replay = ParsedRecord::from_json(&record.unwrap())
        .unwrap()
        .replay(&snapshot(&[Some(9), Some(1)]), &[])
        .unwrap();
    assert_eq!(replay.explanation.dropped.len(), 1);
    assert_eq!(&*replay.explanation.dropped[0].by, "subset");
}

#[test]
fn of_a_pool_that_is_too_large_nothing_is_recorded() {
    for (endpoints, recorded) in [
        (RECORDED_ENDPOINTS_MAX, true),
        (RECORDED_ENDPOINTS_MAX + 1, false),
    ] {
        let mut pool = ManagedPool::new(7, 4096);
        pool.install(snapshot(&vec![Some(1); endpoints]), 7, 1_000);
        assert_eq!(
            decide(&mut pool, r#"{"model":"m","prompt":"p"}"#, None)
                .1
                .is_some(),
            recorded,
            "{endpoints}"
        );
    }
}

#[test]
fn what_is_no_record_says_why() {
    let padded = |bytes: usize| {
        ParsedRecord::from_json(&(r#"{"rng":1}"#.to_owned() + &" ".repeat(bytes - 9)))
    };
    assert!(padded(RECORD_BYTES_MAX).is_ok());
    assert_eq!(
        padded(RECORD_BYTES_MAX + 1),
        Err(InvalidRecord::TooLong(RECORD_BYTES_MAX + 1))
    );
    assert!(matches!(
        ParsedRecord::from_json("{"),
        Err(InvalidRecord::NotJson(_))
    ));
    assert_eq!(
        ParsedRecord::from_json(r#"{"model":"m"}"#),
        Err(InvalidRecord::Field("rng"))
    );
    let replay = |text: &str| {
        ParsedRecord::from_json(text)
            .unwrap()
            .replay(&snapshot(&[None]), &[])
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        replay(r#"{"rng":1}"#),
        "not a decision record: `request` is missing, or not what it should be"
    );
    let twice = |slot: u16| {
        format!(
            r#"{{"endpoint":"a","slot":{slot},"generation":1,"ready":true,"age_ms":0,"requests":0,"prefill_tokens":0,"decode_tokens":0,"matched_blocks":0,"cold_pick":0}}"#
        )
    };
    let text = format!(
        r#"{{"rng":1,"version":[1,2],"metrics_stale":false,"request":{{"blocks":0}},"endpoints":[{},{}]}}"#,
        twice(0),
        twice(1)
    );
    assert_eq!(
        replay(&text),
        "its endpoints make no pool: address `a` is claimed by two endpoints"
    );
}
