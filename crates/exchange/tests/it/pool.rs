//! The state that a pool keeps and drops when the daemon sends a new pool update.

use exchange::{Exchange, ExchangeSettings, ExchangeStep, ManagedPool, Timestamp};
use scheduler::{
    EndpointMetrics, LoraMetrics, Pipeline, PipelineSpec, PluginSpec, Snapshot, Version,
};

use crate::release::pool_update;

fn picked(pool: &mut ManagedPool, prompt: &str) -> String {
    picked_of(pool, "m", prompt)
}

fn picked_of(pool: &mut ManagedPool, model: &str, prompt: &str) -> String {
    let mut exchange = Exchange::new(Timestamp(0));
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"POST"), (b":path", b"/v1/completions")];
    exchange.request_headers(&ExchangeSettings::default(), pairs, false);
    let body = format!(r#"{{"model":"{model}","prompt":"{prompt}"}}"#);
    let ExchangeStep::Forward(forward) = exchange.decide(
        &ExchangeSettings::default(),
        pool,
        None,
        body.as_bytes(),
        Timestamp(0),
    ) else {
        panic!("not routed")
    };
    let first = forward.set[0].1.split(',').next().unwrap().to_owned();
    exchange.end(pool, Timestamp(0));
    first
}

/// Returns a pool of four endpoints with this scorer alone. Each engine has room for two adapters.
fn pool_of_scorer(scorer: &str, seed: u64) -> ManagedPool {
    pool_of_adapters(
        scorer,
        LoraMetrics {
            max: 2,
            ..LoraMetrics::default()
        },
        seed,
    )
}

/// Returns a pool of four endpoints with this scorer alone, whose engines report these adapters.
fn pool_of_adapters(scorer: &str, lora: LoraMetrics, seed: u64) -> ManagedPool {
    let spec = PipelineSpec::of_one_profile("test", vec![(PluginSpec::of_type(scorer), 1.0)], 1);
    let metrics = vec![
        EndpointMetrics {
            lora: Some(lora),
            ..EndpointMetrics::default()
        };
        4
    ];
    let endpoints = pool_update(4, 1).endpoints().to_vec();
    let snapshot = Snapshot::try_new(
        Version {
            term: 1,
            sequence: 1,
        },
        endpoints,
        metrics,
        Pipeline::build(&spec).unwrap(),
    )
    .unwrap();
    let mut pool = ManagedPool::new(seed, 4096);
    pool.install(snapshot, 7, 1000);
    pool.set_placement_publishing(true);
    pool
}

#[test]
fn an_adapter_stays_where_it_was_given_and_other_workers_know() {
    let mut one = pool_of_scorer("lora-affinity-scorer", 1);
    let mut two = pool_of_scorer("lora-affinity-scorer", 2);
    let homes: Vec<String> = ["sql", "ocr", "law"]
        .iter()
        .map(|model| picked_of(&mut one, model, "hi"))
        .collect();
    for placement in one.take_placements() {
        two.record_peer_placement(
            placement.kind,
            placement.endpoint,
            &placement.blocks,
            Timestamp(1),
        );
    }
    for _ in 0..5 {
        for (model, home) in ["sql", "ocr", "law"].iter().zip(&homes) {
            assert_eq!(
                (
                    &picked_of(&mut one, model, "hi"),
                    &picked_of(&mut two, model, "hi")
                ),
                (home, home),
                "{model}"
            );
        }
    }
}

#[test]
fn more_adapters_than_fit_displace_the_one_not_used_for_longest() {
    let mut pool = pool_of_scorer("lora-affinity-scorer", 1);
    let names: Vec<String> = (0..8).map(|n| format!("adapter-{n}")).collect();
    let homes: Vec<String> = names
        .iter()
        .map(|name| picked_of(&mut pool, name, "hi"))
        .collect();
    let counts = homes
        .iter()
        .map(|home| homes.iter().filter(|other| *other == home).count());
    assert!(
        counts.into_iter().all(|count| count == 2),
        "eight adapters in eight places: {homes:?}"
    );
    assert_eq!(
        picked_of(&mut pool, "ninth", "hi"),
        homes[0],
        "the first was used longest ago"
    );
    let kept = names.iter().zip(&homes).skip(1);
    assert!(
        kept.into_iter()
            .all(|(name, home)| picked_of(&mut pool, name, "hi") == *home),
        "all other adapters stay"
    );
}

/// Checks that an idle pool serves its base model on all engines, even if their places for adapters
/// are full, because the base model needs no place.
#[test]
fn prompts_for_the_base_model_spread_over_an_idle_pool_with_places_for_adapters() {
    for (scorer, adapters) in [
        ("marginal-cost-scorer", 0),
        ("marginal-cost-scorer", 2),
        ("lora-affinity-scorer", 2),
    ] {
        let lora = LoraMetrics {
            max: 1,
            base_models: ["llama".into()].into(),
            ..LoraMetrics::default()
        };
        let mut pool = pool_of_adapters(scorer, lora, 1);
        (0..adapters)
            .for_each(|adapter| drop(picked_of(&mut pool, &format!("adapter-{adapter}"), "hi")));
        let mut counts = std::collections::BTreeMap::<String, usize>::new();
        for n in 0..40 {
            *counts
                .entry(picked_of(&mut pool, "llama", &format!("{n} ").repeat(200)))
                .or_default() += 1;
        }
        assert!(
            counts.len() == 4 && counts.values().all(|count| *count <= 15),
            "{scorer}, {adapters} adapters: {counts:?}"
        );
    }
}

#[test]
fn requests_for_the_base_model_displace_no_adapter() {
    let lora = LoraMetrics {
        max: 1,
        base_models: ["llama".into()].into(),
        ..LoraMetrics::default()
    };
    let mut pool = pool_of_adapters("marginal-cost-scorer", lora, 1);
    let home = picked_of(&mut pool, "sql", "hi");
    (0..40).for_each(|n| drop(picked_of(&mut pool, "llama", &format!("{n} ").repeat(200))));
    assert_eq!(picked_of(&mut pool, "sql", "another prompt"), home);
}

#[test]
fn prompts_that_nobody_holds_go_round() {
    let mut pool = pool_of_scorer("no-hit-lru-scorer", 1);
    let mut round = |seed: u32| -> Vec<String> {
        let mut homes: Vec<String> = (0..4)
            .map(|n| picked(&mut pool, &format!("{seed}{n} ").repeat(200)))
            .collect();
        homes.sort();
        homes.dedup();
        homes
    };
    assert_eq!(
        (round(1).len(), round(2).len(), round(3).len()),
        (4, 4, 4),
        "each endpoint once before any twice"
    );
}

#[test]
fn who_was_given_what_is_remembered_when_endpoints_change_places() {
    let mut pool = pool_of_scorer("no-hit-lru-scorer", 1);
    let prompt = |n: usize| format!("{n} ").repeat(200);
    let order: Vec<String> = (0..4).map(|n| picked(&mut pool, &prompt(n))).collect();
    let before = pool.snapshot().unwrap();
    let mut endpoints = before.endpoints().to_vec();
    let metrics = before.metrics().to_vec();
    endpoints.reverse();
    let pipeline = Pipeline::build(&PipelineSpec::of_one_profile(
        "test",
        vec![(PluginSpec::of_type("no-hit-lru-scorer"), 1.0)],
        1,
    ))
    .unwrap();
    pool.install(
        Snapshot::try_new(
            Version {
                term: 1,
                sequence: 2,
            },
            endpoints,
            metrics,
            pipeline,
        )
        .unwrap(),
        7,
        1000,
    );
    let again: Vec<String> = (4..8).map(|n| picked(&mut pool, &prompt(n))).collect();
    assert_eq!(
        again, order,
        "the endpoint used longest ago comes first, at any position"
    );
}

/// Returns the same endpoints at a newer version.
fn again(snapshot: &Snapshot, sequence: u64) -> Snapshot {
    let metrics = vec![EndpointMetrics::default(); snapshot.endpoints().len()];
    snapshot
        .with_metrics(Version { term: 1, sequence }, metrics)
        .unwrap()
}

#[test]
fn who_stays_is_remembered_over_a_new_pool_update_and_who_is_new_is_not() {
    let mut pool = ManagedPool::new(7, 4096);
    let first = pool_update(4, 1);
    let same = again(&first, 2);
    pool.install(first, 7, 1000);
    let prompt = "once upon a time ".repeat(100);
    let home = picked(&mut pool, &prompt);
    pool.install(same, 7, 1000);
    assert_eq!(
        picked(&mut pool, &prompt),
        home,
        "its prefix is still estimated to be cached there"
    );
    assert!(pool.prefixes().stats().entries > 0);
    pool.install(pool_update(4, 2), 7, 1000);
    assert_eq!(
        pool.prefixes().stats().entries,
        0,
        "other generations at the same slots have nothing cached"
    );
}

#[test]
fn an_index_is_made_once_and_only_where_it_is_asked_for() {
    let mut pool = ManagedPool::new(7, 0);
    pool.install(pool_update(4, 1), 7, 1000);
    pool.reserve_prefixes(0);
    assert_eq!(pool.prefixes().bytes(), 0);
    pool.reserve_prefixes(4096);
    let bytes = pool.prefixes().bytes();
    assert!(bytes > 0);
    picked(&mut pool, &"once upon a time ".repeat(100));
    let entries = pool.prefixes().stats().entries;
    pool.reserve_prefixes(4096);
    assert_eq!(
        (
            pool.prefixes().bytes(),
            pool.prefixes().stats().entries > 0,
            entries > 0
        ),
        (bytes, true, true),
        "kept, not replaced"
    );
}
