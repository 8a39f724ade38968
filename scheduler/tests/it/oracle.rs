//! A twin of the scheduler, slow and plain enough to be seen right: sets of positions, f64, formulas as the reference states them.

use proptest::prelude::*;
use scheduler::{Decision, Readiness, SETTLED_MS, Unavailable};

use crate::case::{Case, Row};
use crate::pools;

/// What the twin says: who may be picked, and what each is worth.
struct Verdict {
    allowed: Vec<usize>,
    totals: Vec<f64>,
    unavailable: Option<Unavailable>,
}

fn judge(case: &Case) -> Verdict {
    let ready: Vec<usize> = (0..case.pool.len()).filter(|&at| case.pool[at].endpoint.readiness == Readiness::Ready).collect();
    let hinted: Vec<usize> = ready.iter().copied().filter(|&at| hinted(case, &case.pool[at])).collect();
    let sound: Vec<usize> = hinted.iter().copied().filter(|&at| !case.pool[at].ejected).collect();
    let allowed = if sound.is_empty() { hinted.clone() } else { sound };
    let unavailable = match (ready.is_empty(), hinted.is_empty()) {
        (true, _) => Some(Unavailable::NoReadyEndpoint),
        (false, true) => Some(Unavailable::SubsetEmpty),
        (false, false) => None,
    };
    let mut totals = vec![0.0; case.pool.len()];
    for part in case.pipeline.profiles.iter().flat_map(|profile| &profile.plugins).filter(|part| scorer(&part.name).ends_with("-scorer")) {
        for (at, score) in scores(case, &allowed, scorer(&part.name)) {
            totals[at] += part.weight * score;
        }
    }
    Verdict { allowed, totals, unavailable }
}

/// The type of a plugin that is named after its type and a number.
fn scorer(name: &str) -> &str {
    name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-')
}

fn hinted(case: &Case, row: &Row) -> bool {
    let address = &*row.endpoint.address;
    let (ip, _) = address.rsplit_once(':').unwrap();
    case.subset.as_ref().is_none_or(|entries| entries.iter().map(|entry| entry.trim()).any(|entry| entry == address || entry == ip))
}

fn scores(case: &Case, allowed: &[usize], scorer: &str) -> Vec<(usize, f64)> {
    let known = |read: fn(&Row) -> Option<f32>| {
        let sane = move |at: usize| read(&case.pool[at]).filter(|value| value.is_finite() && *value >= 0.0 && !case.metrics_stale);
        allowed.iter().map(|&at| (at, sane(at).map(f64::from))).collect::<Vec<_>>()
    };
    let row = |score: &dyn Fn(&Row) -> f64| allowed.iter().map(|&at| (at, score(&case.pool[at]))).collect();
    match scorer {
        "queue-scorer" => neutral(&min_max(&known(|row| row.metrics.queue_depth))),
        "running-requests-size-scorer" => neutral(&min_max(&known(|row| row.metrics.running_requests))),
        "kv-cache-utilization-scorer" => {
            let used = known(|row| row.metrics.kv_cache_utilization);
            neutral(&used.into_iter().map(|(at, used)| (at, used.map(|used| 1.0 - used.min(1.0)))).collect::<Vec<_>>())
        }
        "lora-affinity-scorer" => neutral(
            &allowed.iter().map(|&at| (at, adapter(&case.pool[at], &case.model).filter(|_| !case.metrics_stale))).collect::<Vec<_>>(),
        ),
        "active-request-scorer" => {
            let most = f64::from(allowed.iter().map(|&at| case.pool[at].in_flight).max().unwrap_or(0));
            row(&|row| if row.in_flight == 0 { 1.0 } else { (most - f64::from(row.in_flight)) / most })
        }
        "token-load-scorer" => row(&|row| {
            let prefill = if row.in_flight == 0 { 0.0 } else { f64::from(row.prefill_tokens) };
            let cached = f64::from(row.matched_blocks) * f64::from(case.block_tokens);
            1.0 - (prefill + (f64::from(case.prompt_tokens) - cached).max(0.0)).min(4_194_304.0) / 4_194_304.0
        }),
        "prefix-cache-scorer" => {
            row(&|row| if case.blocks == 0 { 0.0 } else { f64::from(row.matched_blocks.min(case.blocks)) / f64::from(case.blocks) })
        }
        other => panic!("the twin knows no {other}"),
    }
}

fn min_max(values: &[(usize, Option<f64>)]) -> Vec<(usize, Option<f64>)> {
    let known: Vec<f64> = values.iter().filter_map(|(_, value)| *value).collect();
    let (min, max) = (known.iter().copied().fold(f64::MAX, f64::min), known.iter().copied().fold(0.0, f64::max));
    values.iter().map(|&(at, value)| (at, value.map(|value| if max > min { (max - value) / (max - min) } else { 1.0 }))).collect()
}

fn neutral(ratings: &[(usize, Option<f64>)]) -> Vec<(usize, f64)> {
    let known: Vec<f64> = ratings.iter().filter_map(|(_, rating)| *rating).collect();
    #[expect(clippy::cast_precision_loss, reason = "a dozen")]
    let mean = if known.is_empty() { 0.5 } else { known.iter().sum::<f64>() / known.len() as f64 };
    ratings.iter().map(|&(at, rating)| (at, rating.unwrap_or(mean))).collect()
}

fn adapter(row: &Row, model: &str) -> Option<f64> {
    let lora = row.metrics.lora.as_ref()?;
    let has = |adapters: &[Box<str>]| adapters.contains(&model.into());
    let room = lora.running.len() + lora.waiting.len() < lora.max as usize;
    Some(match (has(&lora.running), room, has(&lora.waiting)) {
        (true, _, _) => 1.0,
        (false, true, _) => 0.8,
        (false, false, true) => 0.6,
        (false, false, false) => 0.0,
    })
}

/// How far f32 may be from f64 in a total of these weights.
fn tolerance(case: &Case) -> f64 {
    case.pipeline.profiles.iter().flat_map(|profile| &profile.plugins).map(|part| part.weight).sum::<f64>() * 1e-5 + 1e-9
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn the_same_are_allowed_and_refused(case in pools::case(pools::any_pipeline())) {
        let (outcome, verdict) = (case.decide().unwrap(), judge(&case));
        match &outcome.decision {
            Decision::Unavailable(why) => prop_assert_eq!(Some(*why), verdict.unavailable),
            Decision::Shed(_) | Decision::UnknownProfile(_) => prop_assert!(false, "nothing here sheds or is named"),
            Decision::Route(_) => {
                prop_assert_eq!(None, verdict.unavailable);
                let ranked = outcome.ranked();
                prop_assert!(ranked.iter().all(|at| verdict.allowed.contains(at)), "{ranked:?} of {:?}", verdict.allowed);
                prop_assert_eq!(ranked.len(), verdict.allowed.len().min(case.pipeline.ranked_max as usize));
            }
        }
        let mut left: Vec<usize> = outcome.explanation.profiles.iter().flat_map(|profile| &profile.totals).map(|(index, _)| index.get()).collect();
        left.sort_unstable();
        let expected = if verdict.unavailable.is_some() { Vec::new() } else { verdict.allowed };
        prop_assert_eq!(left, expected);
    }

    #[test]
    fn the_same_scores(case in pools::case(pools::any_pipeline())) {
        let (outcome, verdict) = (case.decide().unwrap(), judge(&case));
        for column in outcome.explanation.profiles.iter().flat_map(|profile| &profile.scores) {
            let expected = scores(&case, &verdict.allowed, scorer(&column.scorer));
            for (&(index, score), (at, twin)) in column.scores.iter().zip(expected) {
                prop_assert_eq!(index.get(), at);
                prop_assert!((f64::from(score) - twin).abs() < 1e-5, "{} of pod-{at}: {score}, twin {twin}", column.scorer);
            }
        }
        for &(index, total) in outcome.explanation.profiles.iter().flat_map(|profile| &profile.totals) {
            let twin = verdict.totals[index.get()];
            prop_assert!((f64::from(total) - twin).abs() <= tolerance(&case), "total of pod-{}: {total}, twin {twin}", index.get());
        }
    }

    #[test]
    fn the_best_first_and_a_settled_one_last(case in pools::case(pools::pipeline("max-score-picker"))) {
        let (outcome, verdict) = (case.decide().unwrap(), judge(&case));
        let ranked = outcome.ranked();
        let settled = |at: &usize| case.pool[*at].endpoint.age_ms >= SETTLED_MS;
        let total = |at: &usize| verdict.totals[*at];
        let best_of = |of: &[usize]| of.iter().map(total).fold(f64::MIN, f64::max);
        if let Some((last, head)) = ranked.split_last() {
            let lone = settled(last) && !head.is_empty() && !head.iter().any(settled);
            for (place, at) in ranked.iter().enumerate() {
                let rest: Vec<usize> = verdict.allowed.iter().copied().filter(|other| !ranked[..=place].contains(other)).collect();
                let rivals: Vec<usize> = if lone && at == last { rest.into_iter().filter(settled).collect() } else { rest };
                prop_assert!(total(at) >= best_of(&rivals) - tolerance(&case), "pod-{at} at {place} of {ranked:?}, {:?}", verdict.totals);
            }
            let any_settled = verdict.allowed.iter().any(settled);
            prop_assert!(ranked.iter().any(settled) || !any_settled || case.pipeline.ranked_max == 1, "{ranked:?} are all new");
        }
    }
}
