//! Properties that hold for every pool, request and profile.

use proptest::prelude::*;
use scheduler::{Decision, EndpointIndex, EndpointMetrics, ProfileExplanation, Readiness};

use crate::case::{CaseDecision, DecisionCase, EndpointCase};
use crate::pools;

/// Returns the score of a pod in every column, and its total. The list is empty if a plugin dropped
/// the pod.
fn scores_of(outcome: &CaseDecision, name: &str) -> Vec<f32> {
    let named = |(index, _): &&(EndpointIndex, f32)| outcome.names[index.get()] == name;
    let of_profile = |profile: &ProfileExplanation| -> Vec<f32> {
        let columns = profile
            .scores
            .iter()
            .flat_map(|column| column.scores.iter().filter(named));
        columns
            .chain(profile.totals.iter().filter(named))
            .map(|(_, score)| *score)
            .collect()
    };
    outcome
        .explanation
        .profiles
        .iter()
        .flat_map(of_profile)
        .collect()
}

fn of_marginal_cost() -> scheduler::PipelineSpec {
    scheduler::PipelineSpec::of_one_profile(
        "test",
        vec![(scheduler::PluginSpec::of_type("marginal-cost-scorer"), 1.0)],
        8,
    )
}

fn metrics_unknown_where(case: &DecisionCase, wrong: fn(f32) -> bool) -> DecisionCase {
    let mut case = case.clone();
    for metrics in case.pool.iter_mut().map(|row| &mut row.metrics) {
        for metric in [
            &mut metrics.queue_depth,
            &mut metrics.running_requests,
            &mut metrics.kv_cache_utilization,
        ] {
            *metric = metric.filter(|value| !wrong(*value));
        }
    }
    case
}

/// Raises one kind of load of a pod by `more`, at least above 0. Returns false if that load is
/// unknown and cannot be raised.
fn raise(row: &mut EndpointCase, load: usize, more: u16) -> bool {
    let metrics = &mut row.metrics;
    let raised = |metric: &mut Option<f32>, more: f32| match metric {
        Some(value) if value.is_finite() && *value >= 0.0 && *value < 1e30 => {
            *value += more;
            true
        }
        _ => false,
    };
    match load {
        0 => raised(&mut metrics.queue_depth, f32::from(more)),
        1 => raised(&mut metrics.running_requests, f32::from(more)),
        2 => raised(&mut metrics.kv_cache_utilization, f32::from(more) / 1000.0),
        3 => {
            row.in_flight += u32::from(more % 64);
            true
        }
        _ => {
            row.in_flight = row.in_flight.max(1);
            row.prefill_tokens += u32::from(more);
            true
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn never_outside_the_hint_never_unready_never_twice(case in pools::case(pools::any_pipeline())) {
        let ranked = case.decide().unwrap().ranked();
        for (place, &at) in ranked.iter().enumerate() {
            let endpoint = &case.pool[at].endpoint;
            prop_assert_eq!(endpoint.readiness, Readiness::Ready);
            if let Some(entries) = &case.request.subset {
                let bare = endpoint.address.trim_end_matches(":8000");
                prop_assert!(entries.iter().any(|entry| entry.trim() == bare || entry.trim() == &*endpoint.address));
            }
            prop_assert!(!ranked[..place].contains(&at), "{ranked:?}");
        }
        prop_assert!(ranked.len() <= case.pipeline.ranked_max as usize);
    }

    #[test]
    fn every_score_is_from_0_to_1_and_every_total_finite(case in pools::case(pools::any_pipeline())) {
        let profiles = case.decide().unwrap().explanation.profiles;
        for (_, score) in profiles.iter().flat_map(|profile| &profile.scores).flat_map(|column| &column.scores) {
            prop_assert!((0.0..=1.0).contains(score), "{score}");
        }
        for (_, total) in profiles.iter().flat_map(|profile| &profile.totals) {
            prop_assert!(total.is_finite() && *total >= 0.0, "{total}");
        }
    }

    #[test]
    fn same_seed_same_decision_with_and_without_reasons(case in pools::case(pools::any_pipeline())) {
        let outcome = case.decide().unwrap();
        prop_assert_eq!(&case.decide().unwrap(), &outcome);
        let unexplained = case.decide_with(&case.snapshot().unwrap(), &case.in_flight(), None);
        prop_assert_eq!(unexplained, outcome.decision);
    }

    #[test]
    fn everyone_is_dropped_once_or_scored(case in pools::case(pools::any_pipeline())) {
        let outcome = case.decide().unwrap();
        let none = ProfileExplanation::default();
        let profile = outcome.explanation.profiles.first().unwrap_or(&none);
        let mut seen: Vec<usize> = outcome.dropped(profile).map(|drop| drop.endpoint.get()).collect();
        seen.extend(profile.totals.iter().map(|(index, _)| index.get()));
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..case.pool.len()).collect::<Vec<_>>());
        for drop in outcome.dropped(profile) {
            let row = &case.pool[drop.endpoint.get()];
            let by = if row.endpoint.readiness == Readiness::NotReady { "ready" } else if row.ejected { "ejected" } else { "subset" };
            prop_assert!(&*drop.by == by || &*drop.by == "subset" && row.ejected, "{} dropped by {}", row.endpoint.name, drop.by);
        }
    }

    #[test]
    fn order_of_the_pool_changes_nothing_but_ties(
        (case, order) in pools::case(pools::pipeline("max-score-picker"))
            .prop_flat_map(|case| (Just((0..case.pool.len()).collect::<Vec<_>>()).prop_shuffle(), Just(case)).prop_map(|(order, case)| (case, order)))
    ) {
        let mut permuted = case.clone();
        permuted.pool = order.iter().map(|&at| case.pool[at].clone()).collect();
        let a = case.decide().unwrap();
        let b = permuted.decide().unwrap();
        let close = |x: f32, y: f32| (x - y).abs() <= 1e-5 * x.abs().max(1.0);
        for name in &a.names {
            let x = scores_of(&a, name);
            let y = scores_of(&b, name);
            prop_assert!(x.len() == y.len() && x.iter().zip(&y).all(|(x, y)| close(*x, *y)), "{name}: {x:?} and {y:?}");
        }
        let totals = |outcome: &CaseDecision| -> Vec<f32> {
            outcome.ranked().iter().filter_map(|&at| scores_of(outcome, &outcome.names[at]).last().copied()).collect()
        };
        let x = totals(&a);
        let y = totals(&b);
        prop_assert!(x.len() == y.len() && x.iter().zip(&y).all(|(x, y)| close(*x, *y)), "{x:?} and {y:?}");
    }

    #[test]
    fn more_load_never_raises_a_score(
        case in pools::case(pools::any_pipeline()), at in any::<prop::sample::Index>(), load in 0_usize..5, more in 0_u16..5_000
    ) {
        prop_assume!(!case.pool.is_empty());
        let at = at.index(case.pool.len());
        // There are two exceptions, both of `marginal-cost-scorer`. A cache miss also costs the
        // other requests of the pool. With one more request anywhere, a cached prompt therefore
        // weighs more, so the endpoint that cached it can gain on the others even if that endpoint
        // got busier. The second exception is an endpoint that does not report KV memory: the
        // scorer uses the mean of the others for this endpoint.
        let weighs_all = case.pipeline.plugins.iter().any(|plugin| plugin.plugin_type == "marginal-cost-scorer");
        prop_assume!(!weighs_all || load < 2 || load == 4 && case.pool[at].in_flight > 0);
        let mut loaded = case.clone();
        prop_assume!(raise(&mut loaded.pool[at], load, more));
        let before = case.decide().unwrap();
        let after = loaded.decide().unwrap();
        let name = &before.names[at];
        for (before, after) in scores_of(&before, name).iter().zip(scores_of(&after, name)) {
            prop_assert!(after <= *before, "{name}: {before} rose to {after}");
        }
    }

    #[test]
    fn of_marginal_costs_the_lowest_is_the_measure(mut case in pools::case(Just(of_marginal_cost())), at in any::<prop::sample::Index>()) {
        // Copies of a prefix that many share become cheap at every endpoint when one endpoint has
        // the prefix.
        case.reuse_interval = scheduler::prefix::REQUESTED_ONCE;
        let outcome = case.decide().unwrap();
        let scores = |outcome: &CaseDecision| outcome.explanation.profiles.first().map(|profile| profile.totals.clone()).unwrap_or_default();
        let totals = scores(&outcome);
        prop_assume!(!totals.is_empty());
        prop_assert!(totals.iter().all(|(_, score)| *score > 0.0 && *score <= 1.0) && totals.iter().any(|(_, score)| *score == 1.0));
        // If an endpoint has one more block of the prompt cached, no endpoint that scored lower
        // overtakes it. Its own score falls only among endpoints of equal cost, whose scores lie in
        // the highest hundredth: if others now cost more, fewer endpoints share that hundredth.
        let at = at.index(case.pool.len());
        let mut holding = case;
        holding.pool[at].matched_blocks = holding.pool[at].matched_blocks.saturating_add(1);
        let after = scores(&holding.decide().unwrap());
        let score = |totals: &[(EndpointIndex, f32)], at: usize| totals.iter().find(|(index, _)| index.get() == at).map(|(_, score)| *score);
        // Without a score, a filter has removed the endpoint.
        let Some(own_before) = score(&totals, at) else { return Ok(()) };
        let own_after = score(&after, at).unwrap_or_default();
        prop_assert!(own_after >= own_before.min(0.99), "{own_before} fell to {own_after}");
        for (other, before) in totals.iter().filter(|(_, before)| *before < own_before) {
            let after = score(&after, other.get()).unwrap_or_default();
            prop_assert!(after < own_after, "{before} was below {own_before}, and {after} is not below {own_after}");
        }
    }

    #[test]
    fn of_marginal_costs_a_pool_that_reports_nothing_is_as_one_with_room(case in pools::case(Just(of_marginal_cost()))) {
        let mut silent = case.clone();
        let mut roomy = case;
        for (silent, roomy) in silent.pool.iter_mut().zip(&mut roomy.pool) {
            // Running adapters are only read where adapters exist, and are not a kind of load.
            silent.metrics = EndpointMetrics { lora: silent.metrics.lora.take(), ..EndpointMetrics::default() };
            let room = (Some(0.0), Some(1 << 20), Some(16));
            (roomy.metrics.kv_cache_utilization, roomy.metrics.kv_blocks, roomy.metrics.kv_block_tokens) = room;
        }
        prop_assert_eq!(roomy.decide().unwrap(), silent.decide().unwrap());
    }

    #[test]
    fn nonsense_counts_as_unknown(case in pools::case(pools::any_pipeline())) {
        let without = metrics_unknown_where(&case, |value| !(value.is_finite() && value >= 0.0));
        prop_assert_eq!(case.decide().unwrap(), without.decide().unwrap());
    }

    #[test]
    fn stale_counts_as_unknown(case in pools::case(pools::any_pipeline())) {
        let mut unknown = case.clone();
        unknown.metrics_stale = false;
        unknown.pool.iter_mut().for_each(|row| row.metrics = EndpointMetrics::default());
        let stale = DecisionCase { metrics_stale: true, ..case };
        prop_assert_eq!(stale.decide().unwrap(), unknown.decide().unwrap());
    }
}

/// Returns how often each pod comes first, over many seeds.
fn firsts(case: &DecisionCase, seeds: u64) -> Vec<u32> {
    let mut firsts = vec![0; case.pool.len()];
    let snapshot = case.snapshot().unwrap();
    let in_flight = case.in_flight();
    for seed in 0..seeds {
        let case = DecisionCase {
            seed,
            ..case.clone()
        };
        if let Decision::Route(route) = case.decide_with(&snapshot, &in_flight, None) {
            firsts[route.ranked.first().get()] += 1;
        }
    }
    firsts
}

const EQUALS: &str = "profile\nqueue-scorer 1\nPICKER\npool\nname queue\na 3\nb 3\nc 3\nd 3\ne 9";

#[test]
fn ties_spread_evenly() {
    let case = DecisionCase::parse(&EQUALS.replace("PICKER", "max-score-picker")).unwrap();
    let firsts = firsts(&case, 4_000);
    assert_eq!(firsts[4], 0, "the loaded one is no tie");
    assert!(
        firsts[..4].iter().all(|n| (900..1_100).contains(n)),
        "{firsts:?}"
    );
}

#[test]
fn a_tie_for_the_last_place_spreads_evenly_too() {
    let case = DecisionCase::parse(
        &EQUALS
            .replace("a 3", "a 0")
            .replace("PICKER", "max-score-picker\nranked_max 2"),
    )
    .unwrap();
    let mut seconds = [0; 5];
    for seed in 0..3_000 {
        let ranked = DecisionCase {
            seed,
            ..case.clone()
        }
        .decide()
        .unwrap()
        .ranked();
        assert_eq!(ranked[0], 0);
        seconds[ranked[1]] += 1;
    }
    assert!(
        seconds[1..4].iter().all(|n| (900..1_100).contains(n)),
        "{seconds:?}"
    );
}

#[test]
fn random_is_even_whatever_the_scores() {
    let case = DecisionCase::parse(&EQUALS.replace("PICKER", "random-picker")).unwrap();
    let firsts = firsts(&case, 5_000);
    assert!(
        firsts.iter().all(|n| (900..1_100).contains(n)),
        "{firsts:?}"
    );
}

#[test]
fn weighted_random_follows_the_totals() {
    let case =
        DecisionCase::parse("profile\nkv-cache-utilization-scorer 2\nweighted-random-picker\npool\nname kv\na 0.9\nb 0.7\nc 0.4\nd 1.0")
            .unwrap();
    let firsts = firsts(&case, 10_000);
    for (n, share) in firsts.iter().zip([0.1, 0.3, 0.6, 0.0]) {
        assert!(
            (f64::from(*n) - share * 10_000.0).abs() < 200.0,
            "{firsts:?}"
        );
    }
}

#[test]
fn weighted_random_without_weights_is_even() {
    let case = DecisionCase::parse(
        "profile\nprefix-cache-scorer 1\nweighted-random-picker\npool\nname\na\nb\nc\nd",
    )
    .unwrap();
    let firsts = firsts(&case, 4_000);
    assert!(
        firsts.iter().all(|n| (900..1_100).contains(n)),
        "{firsts:?}"
    );
}
