//! A second scheduler for comparison, slow and so simple that a reader can check it: sets of
//! positions, f64, and the formulas as llm-d states them.

use proptest::prelude::*;
use scheduler::registry::{PluginKind, lookup};
use scheduler::{AdapterRoom, Decision, Readiness, SETTLED_MS, UnavailableReason};

use crate::case::{DecisionCase, EndpointCase};
use crate::pools;

/// The result of this second scheduler: the allowed endpoints and their totals.
struct OracleVerdict {
    allowed: Vec<usize>,
    totals: Vec<f64>,
    unavailable: Option<UnavailableReason>,
}

fn judge(case: &DecisionCase) -> OracleVerdict {
    let ready: Vec<usize> = (0..case.pool.len())
        .filter(|&at| case.pool[at].endpoint.readiness == Readiness::Ready)
        .collect();
    let hinted: Vec<usize> = ready
        .iter()
        .copied()
        .filter(|&at| hinted(case, &case.pool[at]))
        .collect();
    let sound: Vec<usize> = hinted
        .iter()
        .copied()
        .filter(|&at| !case.pool[at].ejected)
        .collect();
    let filters = || {
        case.pipeline
            .profiles
            .iter()
            .flat_map(|profile| &profile.plugins)
            .map(|part| scorer(&part.name))
    };
    let narrowed = |of: Vec<usize>| {
        let is_filter =
            |name: &&str| lookup(name).is_some_and(|plugin| plugin.kind == PluginKind::Filter);
        filters().filter(is_filter).fold(of, |left, filter| {
            if left.is_empty() {
                left
            } else {
                kept(case, &left, filter)
            }
        })
    };
    let sound = narrowed(sound);
    let allowed = if sound.is_empty() {
        narrowed(hinted.clone())
    } else {
        sound
    };
    let unavailable = match (ready.is_empty(), hinted.is_empty()) {
        (true, _) => Some(UnavailableReason::NoReadyEndpoint),
        (false, true) => Some(UnavailableReason::SubsetEmpty),
        (false, false) if allowed.is_empty() => Some(UnavailableReason::Filtered),
        (false, false) => None,
    };
    let mut totals = vec![0.0; case.pool.len()];
    for part in case
        .pipeline
        .profiles
        .iter()
        .flat_map(|profile| &profile.plugins)
        .filter(|part| is_scorer(&part.name))
    {
        for (at, score) in scores(case, &allowed, scorer(&part.name)) {
            totals[at] += part.weight * score;
        }
    }
    OracleVerdict {
        allowed,
        totals,
        unavailable,
    }
}

fn is_scorer(name: &str) -> bool {
    lookup(scorer(name)).is_some_and(|plugin| plugin.kind == PluginKind::Scorer)
}

/// Returns the type of a plugin whose name is its type and a number.
fn scorer(name: &str) -> &str {
    name.trim_end_matches(|c: char| c.is_ascii_digit())
        .trim_end_matches('-')
}

fn hinted(case: &DecisionCase, row: &EndpointCase) -> bool {
    let address = &*row.endpoint.address;
    let (ip, _) = address.rsplit_once(':').unwrap();
    case.request.subset.as_ref().is_none_or(|entries| {
        entries
            .iter()
            .map(|entry| entry.trim())
            .any(|entry| entry == address || entry == ip)
    })
}

fn scores(case: &DecisionCase, allowed: &[usize], scorer: &str) -> Vec<(usize, f64)> {
    let known = |read: fn(&EndpointCase) -> Option<f32>| known(case, allowed, read);
    let row = |score: &dyn Fn(&EndpointCase) -> f64| {
        allowed
            .iter()
            .map(|&at| (at, score(&case.pool[at])))
            .collect()
    };
    match scorer {
        "queue-scorer" => neutral(&min_max(&known(|row| row.metrics.queue_depth))),
        "running-requests-size-scorer" => {
            neutral(&min_max(&known(|row| row.metrics.running_requests)))
        }
        "kv-cache-utilization-scorer" => {
            let used = known(|row| row.metrics.kv_cache_utilization);
            neutral(
                &used
                    .into_iter()
                    .map(|(at, used)| (at, used.map(|used| 1.0 - used.min(1.0))))
                    .collect::<Vec<_>>(),
            )
        }
        "lora-affinity-scorer" => neutral(
            &allowed
                .iter()
                .map(|&at| (at, adapter(case, allowed, at)))
                .collect::<Vec<_>>(),
        ),
        "active-request-scorer" => {
            let most = f64::from(
                allowed
                    .iter()
                    .map(|&at| case.pool[at].in_flight)
                    .max()
                    .unwrap_or(0),
            );
            row(&|row| {
                if row.in_flight == 0 {
                    1.0
                } else {
                    (most - f64::from(row.in_flight)) / most
                }
            })
        }
        "token-load-scorer" => row(&|row| {
            let prefill = if row.in_flight == 0 {
                0.0
            } else {
                f64::from(row.prefill_tokens)
            };
            let cached = f64::from(row.matched_blocks) * f64::from(case.request.block_tokens);
            1.0 - (prefill + (f64::from(case.request.prompt_tokens) - cached).max(0.0))
                .min(4_194_304.0)
                / 4_194_304.0
        }),
        "prefix-cache-scorer" => row(&|row| {
            if case.request.blocks == 0 {
                0.0
            } else {
                f64::from(row.matched_blocks.min(case.request.blocks))
                    / f64::from(case.request.blocks)
            }
        }),
        "load-aware-scorer" => {
            let queues = known(|row| row.metrics.queue_depth);
            neutral(
                &queues
                    .into_iter()
                    .map(|(at, queue)| {
                        (
                            at,
                            queue.map(|queue| 0.5 * (1.0 - queue.min(128.0) / 128.0)),
                        )
                    })
                    .collect::<Vec<_>>(),
            )
        }
        "no-hit-lru-scorer" => no_hit_lru(case, allowed),
        "context-length-aware" => row(&|row| {
            label(row, "llm-d.ai/context-length-range")
                .map_or(0.5, |range| fit(range, case.request.prompt_tokens))
        }),
        "session-affinity-scorer" => row(&|row| f64::from(u8::from(in_session(case, row)))),
        "header-label-affinity-scorer" => row(&|row| {
            f64::from(u8::from(
                header(case, "x-tier").is_some() && header(case, "x-tier") == label(row, "tier"),
            ))
        }),
        "endpoint-attribute-scorer" => {
            // The depth is above 0, so that the formula of min-max also works here.
            let depth = |row: &EndpointCase| {
                row.metrics
                    .attributes
                    .first()
                    .map(|(_, depth)| depth + 100.0)
            };
            neutral(&min_max(&known(depth)))
        }
        "marginal-cost-scorer" => marginal_cost(case, allowed),
        // Latency is not predicted here, so the composite applies.
        "latency-scorer" | "slo-scorer" => composite(case, allowed),
        other => panic!("the twin knows no {other}"),
    }
}

/// Returns a reported number of each endpoint; `None` if it is unknown, stale or nonsense.
fn known(
    case: &DecisionCase,
    allowed: &[usize],
    read: fn(&EndpointCase) -> Option<f32>,
) -> Vec<(usize, Option<f64>)> {
    let sane = |at: usize| {
        read(&case.pool[at])
            .filter(|value| value.is_finite() && *value >= 0.0 && !case.metrics_stale)
    };
    allowed
        .iter()
        .map(|&at| (at, sane(at).map(f64::from)))
        .collect()
}

fn no_hit_lru(case: &DecisionCase, allowed: &[usize]) -> Vec<(usize, f64)> {
    let pick = |at: usize| case.pool[at].last_cold_pick;
    let warm = allowed.iter().any(|&at| case.pool[at].matched_blocks > 0);
    let before = |at: usize| {
        allowed
            .iter()
            .filter(|&&other| pick(other) < pick(at))
            .count()
    };
    #[expect(clippy::cast_precision_loss, reason = "a dozen")]
    let cold = |at: usize| 1.0 - before(at) as f64 / (allowed.len() - 1).max(1) as f64;
    allowed
        .iter()
        .map(|&at| (at, if warm { 0.5 } else { cold(at) }))
        .collect()
}

/// Returns the means of three scores: free KV cache, short queue, cached prefix.
fn composite(case: &DecisionCase, allowed: &[usize]) -> Vec<(usize, f64)> {
    let free = scores(case, allowed, "kv-cache-utilization-scorer");
    let queues = known(case, allowed, |row| row.metrics.queue_depth);
    let longest = queues
        .iter()
        .filter_map(|(_, queue)| *queue)
        .fold(0.0, f64::max);
    let short = |queue: f64| {
        if longest > 0.0 {
            (longest - queue) / longest
        } else {
            1.0
        }
    };
    let short = neutral(
        &queues
            .into_iter()
            .map(|(at, queue)| (at, queue.map(short)))
            .collect::<Vec<_>>(),
    );
    let held = scores(case, allowed, "prefix-cache-scorer");
    free.iter()
        .zip(short)
        .zip(held)
        .map(|((&(at, free), (_, short)), (_, held))| (at, (free + short + held) / 3.0))
        .collect()
}

/// Returns the costs by the rough step model that a pool starts with: c = 10, 0.05, 1e-6; e = 11,
/// 0.025, 8e-5; 200 output tokens. Every waiting token is uncached.
fn marginal_cost(case: &DecisionCase, allowed: &[usize]) -> Vec<(usize, f64)> {
    let attention = |uncached: f64, prompt: f64| prompt.powi(2) - (prompt - uncached).powi(2);
    let service = |uncached: f64, attention: f64| 10.0 + 0.05 * uncached + 1e-6 * attention;
    let prompt = f64::from(case.request.prompt_tokens);
    let requests = |at: usize| f64::from(case.pool[at].in_flight);
    let waiting = |at: usize| {
        if case.pool[at].in_flight == 0 {
            0.0
        } else {
            f64::from(case.pool[at].prefill_tokens)
        }
    };
    let cached =
        |at: usize| f64::from(case.pool[at].matched_blocks) * f64::from(case.request.block_tokens);
    let uncached = |at: usize| (prompt - cached(at)).max(0.0);
    #[expect(clippy::cast_precision_loss, reason = "a dozen")]
    let mean = |of: &dyn Fn(usize) -> f64| {
        allowed.iter().map(|&at| of(at)).sum::<f64>() / allowed.len().max(1) as f64
    };
    let mean_batch = mean(&requests);
    let mean_context = mean(&waiting);
    let new = allowed
        .iter()
        .map(|&at| uncached(at))
        .fold(f64::INFINITY, f64::min);
    let interval = f64::from(case.reuse_interval);
    let evicted = if case.evicted_share > 0.0 {
        f64::from(case.evicted_share).min(0.95)
    } else {
        0.0
    };
    let reported: Vec<(f64, f64)> = allowed
        .iter()
        .filter_map(|&at| memory(case, &case.pool[at]))
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "a dozen")]
    let mean_of =
        |of: fn(&(f64, f64)) -> f64| reported.iter().map(of).sum::<f64>() / reported.len() as f64;
    let mean_memory =
        (!reported.is_empty()).then(|| (mean_of(|memory| memory.0), mean_of(|memory| memory.1)));
    let cost = |at: usize| {
        let row = &case.pool[at];
        let batch = requests(at);
        let waiting = waiting(at);
        let uncached = uncached(at);
        let memory = memory(case, row).or(mean_memory);
        // The ledger counts attention in units of 256 x 256 tokens. One queued prompt counts for
        // four fifths of its constant, and half of the prompt is done.
        let w = if waiting > 0.0 {
            service(
                waiting,
                (attention(waiting, waiting) / 65_536.0).ceil() * 65_536.0,
            ) - 2.0
        } else {
            0.0
        } / 2.0;
        let loaded = !case.metrics_stale
            && row.metrics.lora.as_ref().is_some_and(|lora| {
                lora.running
                    .iter()
                    .any(|adapter| **adapter == *case.request.model)
            });
        let adapter = match row.adapter_room {
            AdapterRoom::Free if !loaded => 100.0,
            AdapterRoom::Full { .. } if !loaded => 1_600.0,
            _ => 0.0,
        };
        let charged = new + (uncached - new) * interval / (1.0 + interval);
        let s = service(charged, attention(charged, prompt)) + adapter;
        let step = 11.0 + 0.025 * (batch + 1.0) + 8e-5 * (waiting + prompt);
        // 900 of 1,000 tokens of memory are for prompts, and queued prompts have half of their
        // memory.
        let lacking = memory.map_or(0.0, |(capacity, used)| {
            (used + waiting / 2.0 + uncached + 200.0 - 0.9 * capacity).clamp(0.0, uncached)
                / capacity
        });
        let w = w + 200.0 * step * lacking;
        let expected = (batch + mean_batch) / 2.0;
        let expected_step =
            11.0 + 0.025 * (expected + 1.0) + 8e-5 * ((waiting + mean_context) / 2.0 + prompt);
        let decode = 200.0 * (expected_step + expected * (0.025 + 8e-5 * prompt));
        let coming = batch * (w + s / 2.0) / (200.0 * step + w + s);
        let evicting = evicted / (1.0 - evicted) * 0.05 * (uncached - new) * (1.0 + mean_batch);
        w * (4.0 + 0.2 * expected) + 4.0 * s * (1.0 + coming) + expected * s + decode + evicting
    };
    let lowest = allowed
        .iter()
        .map(|&at| cost(at))
        .fold(f64::INFINITY, f64::min);
    // Costs within 2 % or 1 ms are equal. Among them the endpoint with the fewest requests in
    // flight is best, then the least recently picked endpoint.
    let equal = |at: usize| cost(at) <= lowest + (0.02 * lowest).max(1.0);
    let key = |at: usize| (case.pool[at].in_flight, case.pool[at].last_pick);
    let equals: Vec<usize> = allowed.iter().copied().filter(|&at| equal(at)).collect();
    let before = |at: usize| equals.iter().filter(|&&other| key(other) < key(at)).count();
    #[expect(clippy::cast_precision_loss, reason = "a dozen")]
    let score = |at: usize| {
        if equal(at) {
            1.0 - 0.01 * before(at) as f64 / equals.len() as f64
        } else {
            lowest / cost(at)
        }
    };
    allowed.iter().map(|&at| (at, score(at))).collect()
}

/// Returns the tokens of KV memory, and how many of them are in use.
fn memory(case: &DecisionCase, row: &EndpointCase) -> Option<(f64, f64)> {
    let metrics = Some(&row.metrics).filter(|_| !case.metrics_stale)?;
    let capacity = f64::from(metrics.kv_blocks?) * f64::from(metrics.kv_block_tokens?);
    let used = metrics
        .kv_cache_utilization
        .filter(|used| used.is_finite() && *used >= 0.0)?;
    (capacity > 0.0).then(|| (capacity, f64::from(used.min(1.0)) * capacity))
}

fn label<'r>(row: &'r EndpointCase, key: &str) -> Option<&'r str> {
    row.endpoint
        .labels
        .iter()
        .find(|(label, _)| **label == *key)
        .map(|(_, value)| &**value)
}

fn header<'c>(case: &'c DecisionCase, name: &str) -> Option<&'c str> {
    case.request
        .headers
        .iter()
        .find(|(header, _)| header.to_lowercase() == name)
        .map(|(_, value)| value.as_str())
}

fn in_session(case: &DecisionCase, row: &EndpointCase) -> bool {
    header(case, "x-session-token")
        .is_some_and(|token| token == scheduler::session_token(&row.endpoint.name))
}

fn fit(range: &str, tokens: u32) -> f64 {
    let (min, max) = range
        .split_once('-')
        .map(|(min, max)| (min.parse::<f64>().unwrap(), max.parse::<f64>().unwrap()))
        .unwrap();
    let tokens = f64::from(tokens);
    match (min > max, min <= tokens && tokens <= max) {
        (true, _) => 0.0,
        (_, false) => 0.3 / (1.0 + (tokens - max).max(min - tokens) / 1000.0),
        (_, true) if min == max => 1.0,
        (_, true) => {
            0.3 + 0.7 * (0.7 / (1.0 + (max - min) / 10_000.0) + 0.3 * (max - tokens) / (max - min))
        }
    }
}

/// Returns the endpoints of `left` that a filter keeps.
fn kept(case: &DecisionCase, left: &[usize], filter: &str) -> Vec<usize> {
    let only = |keep: &dyn Fn(&EndpointCase) -> bool| {
        left.iter()
            .copied()
            .filter(|&at| keep(&case.pool[at]))
            .collect::<Vec<_>>()
    };
    let or_all = |kept: Vec<usize>| if kept.is_empty() { left.to_vec() } else { kept };
    let role = |row: &EndpointCase, roles: &[&str]| {
        label(row, "llm-d.ai/role").is_some_and(|role| roles.contains(&role))
    };
    match filter {
        "label-selector-filter" => only(&|row| label(row, "tier") != Some("silver")),
        "by-label-selector" => left.to_vec(),
        "by-label" => only(&|row| label(row, "tier") == Some("gold")),
        "decode-filter" => {
            only(&|row| label(row, "llm-d.ai/role").is_none() || role(row, &["decode", "both"]))
        }
        "prefill-filter" => only(&|row| role(row, &["prefill", "both"])),
        "encode-filter" => Vec::new(),
        "slo-headroom-tier-filter" => left.to_vec(),
        "session-affinity-filter" => or_all(only(&|row| in_session(case, row))),
        "utilization-filter" => only(&|row| {
            let waiting = row
                .metrics
                .queue_depth
                .filter(|queue| queue.is_finite() && *queue >= 0.0 && !case.metrics_stale);
            waiting.is_none_or(|queue| queue <= 3.0) && row.in_flight <= 2
        }),
        "endpoint-attribute-filter" => only(&|row| {
            case.metrics_stale
                || row
                    .metrics
                    .attributes
                    .first()
                    .is_none_or(|(_, depth)| *depth < 2.0)
        }),
        "prefix-cache-affinity-filter" => {
            let holds = |row: &EndpointCase| {
                case.request.blocks > 0
                    && f64::from(row.matched_blocks) / f64::from(case.request.blocks) >= 0.8
            };
            // An engine that computes 100 tokens a second takes 18 s for 1,800 tokens.
            let least = |of: &[usize]| {
                let tokens = |at: &usize| {
                    if case.pool[*at].in_flight == 0 {
                        0
                    } else {
                        case.pool[*at].prefill_tokens
                    }
                };
                of.iter().map(tokens).min()
            };
            let here = only(&holds);
            let elsewhere = only(&|row| !holds(row));
            let slow = least(&here)
                .zip(least(&elsewhere))
                .is_some_and(|(here, elsewhere)| here > elsewhere + 1_800);
            if slow { left.to_vec() } else { or_all(here) }
        }
        other => panic!("the twin knows no {other}"),
    }
}

fn min_max(values: &[(usize, Option<f64>)]) -> Vec<(usize, Option<f64>)> {
    let known: Vec<f64> = values.iter().filter_map(|(_, value)| *value).collect();
    let min = known.iter().copied().fold(f64::MAX, f64::min);
    let max = known.iter().copied().fold(0.0, f64::max);
    values
        .iter()
        .map(|&(at, value)| {
            (
                at,
                value.map(|value| {
                    if max > min {
                        (max - value) / (max - min)
                    } else {
                        1.0
                    }
                }),
            )
        })
        .collect()
}

fn neutral(ratings: &[(usize, Option<f64>)]) -> Vec<(usize, f64)> {
    let known: Vec<f64> = ratings.iter().filter_map(|(_, rating)| *rating).collect();
    #[expect(clippy::cast_precision_loss, reason = "a dozen")]
    let mean = if known.is_empty() {
        0.5
    } else {
        known.iter().sum::<f64>() / known.len() as f64
    };
    ratings
        .iter()
        .map(|&(at, rating)| (at, rating.unwrap_or(mean)))
        .collect()
}

fn adapter(case: &DecisionCase, allowed: &[usize], at: usize) -> Option<f64> {
    let row = &case.pool[at];
    let used = |at: &usize| {
        if let AdapterRoom::Full { displaced_used } = case.pool[*at].adapter_room {
            Some(displaced_used)
        } else {
            None
        }
    };
    let displacing: Vec<u64> = allowed.iter().filter_map(used).collect();
    let older = |used: u64| displacing.iter().filter(|&&other| other < used).count();
    #[expect(clippy::cast_precision_loss, reason = "a dozen")]
    let displaces =
        |used: u64| 0.5 * (1.0 - older(used) as f64 / (displacing.len() - 1).max(1) as f64);
    let lora = row.metrics.lora.as_ref().filter(|_| !case.metrics_stale);
    let has = |adapters: &[Box<str>]| adapters.contains(&case.request.model.as_str().into());
    let room = lora.is_none_or(|lora| lora.running.len() + lora.waiting.len() < lora.max as usize);
    let running = lora.is_some_and(|lora| has(&lora.running));
    let waiting = lora.is_some_and(|lora| has(&lora.waiting));
    match row.adapter_room {
        _ if running => Some(1.0),
        AdapterRoom::Loaded => Some(1.0),
        AdapterRoom::Unknown if lora.is_none() => None,
        AdapterRoom::Full { displaced_used } if room => Some(displaces(displaced_used)),
        _ if room => Some(0.8),
        _ if waiting => Some(0.6),
        _ => Some(0.0),
    }
}

/// Returns the largest difference between f32 and f64 in a total with these weights.
fn tolerance(case: &DecisionCase) -> f64 {
    case.pipeline
        .profiles
        .iter()
        .flat_map(|profile| &profile.plugins)
        .map(|part| part.weight)
        .sum::<f64>()
        * 1e-5
        + 1e-9
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn the_same_are_allowed_and_refused(case in pools::case(pools::any_pipeline())) {
        let outcome = case.decide().unwrap();
        let verdict = judge(&case);
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
    fn filters_keep_the_same(case in pools::case(pools::filters())) {
        let outcome = case.decide().unwrap();
        let verdict = judge(&case);
        let totals = outcome.explanation.profiles.iter().flat_map(|profile| &profile.totals);
        let mut left: Vec<usize> = totals.map(|(index, _)| index.get()).collect();
        left.sort_unstable();
        prop_assert_eq!(&left, &verdict.allowed);
        let why = if let Decision::Unavailable(why) = outcome.decision { Some(why) } else { None };
        prop_assert_eq!(why, verdict.unavailable);
    }

    #[test]
    fn the_same_scores(case in pools::case(pools::any_pipeline())) {
        let outcome = case.decide().unwrap();
        let verdict = judge(&case);
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
        let outcome = case.decide().unwrap();
        let verdict = judge(&case);
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
