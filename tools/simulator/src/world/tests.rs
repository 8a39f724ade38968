use scheduler::PluginSpec;
use scheduler::plugin::ParameterValue;

use super::*;
use crate::hardware::LLAMA_8B_H100;
use crate::policy::{GateFairness, GateRule};
use crate::trace::TraceRequest;

/// Returns a workload with prompts of three families, at a higher rate than one engine can serve.
fn workload() -> Workload {
    workload_of(3)
}

/// Returns a workload with this many families of prompts.
fn workload_of(prefixes: u32) -> Workload {
    let dice = &mut Sampler::seeded(4);
    let line = |number: u32| TraceRequest {
        at: f64::from(number) * 20.0,
        prompt: 2_000 + 512 * (number % 5),
        output: 20 + number % 40,
        ids: (0..12)
            .map(|id| {
                if id < 3 {
                    u64::from(number % prefixes) * 100 + id
                } else {
                    u64::from(number) * 1_000 + id + dice.below(9) as u64
                }
            })
            .collect(),
    };
    let lines: Vec<TraceRequest> = (0..600).map(line).collect();
    Workload::from_lines(&lines)
}

fn play(policy: &str, setting: &PoolSetting) -> Vec<RequestOutcome> {
    play_of(&workload(), policy, setting)
}

fn play_of(workload: &Workload, policy: &str, setting: &PoolSetting) -> Vec<RequestOutcome> {
    run(workload, &RoutingPolicy::named(policy).unwrap(), setting, 7).unwrap()
}

#[test]
fn a_seed_gives_the_same_run_under_every_policy() {
    for policy in ["ours", "2/2/3", "smg", "vllm-router", "round-robin"] {
        let ends = || {
            play(policy, &PoolSetting::plain(LLAMA_8B_H100))
                .iter()
                .map(|record| record.e2e.to_bits())
                .collect::<Vec<_>>()
        };
        assert_eq!(ends(), ends(), "{policy}");
    }
}

#[test]
fn all_requests_are_served_however_proxies_share() {
    for sharing in [
        SharingMode::Private,
        SharingMode::After(0.0),
        SharingMode::After(100.0),
    ] {
        let setting = PoolSetting {
            proxies: 3,
            sharing,
            scrape_ms: 0.0,
            ..PoolSetting::plain(LLAMA_8B_H100)
        };
        let records = play("ours", &setting);
        assert_eq!(records.len(), 600);
        assert!(
            records
                .iter()
                .all(|record| record.ttft > 0.0 && record.e2e >= record.ttft),
            "{sharing:?}"
        );
    }
}

#[test]
fn all_requests_are_served_by_split_pools() {
    let setting = PoolSetting {
        prefillers: 3,
        ..PoolSetting::plain(LLAMA_8B_H100)
    };
    for policy in ["ours", "2/2/3", "dynamo"] {
        let records = play(policy, &setting);
        // A first token comes after a transfer (at least 6 ms for 2,000 tokens) and at least one
        // step.
        assert!(
            records.len() == 600
                && records
                    .iter()
                    .all(|record| record.ttft > 8.0 && record.e2e >= record.ttft),
            "{policy}"
        );
    }
    let smg = RoutingPolicy::named("smg").unwrap();
    assert!(
        run(&workload(), &smg, &setting, 7).is_err(),
        "it picks only one engine"
    );
}

/// Sends 24 requests at the same time through the policy to a pool in which four engines prefill
/// for four others. Returns the number of requests that each engine gets, for prefill or for
/// decode.
fn sent(policy: &RoutingPolicy) -> Vec<usize> {
    let workload = workload();
    let setting = PoolSetting {
        prefillers: 4,
        ..PoolSetting::plain(LLAMA_8B_H100)
    };
    let pipeline = Pipeline::build(&policy.pipeline(true).unwrap()).unwrap();
    let mut world = Simulation::new(&workload, policy, &setting, pipeline, 7).unwrap();
    (0..24).for_each(|request| world.pick(request, 0, 0.0).unwrap());
    let mut counts = vec![0; setting.replicas];
    for flight in world.in_flight.iter().flatten() {
        let PrefillLocation::At(prefiller) = flight.prompt else {
            panic!("one engine does both stages")
        };
        counts[prefiller] += 1;
        counts[flight.at] += 1;
    }
    counts
}

#[test]
fn the_queues_of_others_look_at_each_stage() {
    let dynamo = RoutingPolicy::named("dynamo").unwrap();
    assert!(
        sent(&dynamo).iter().all(|count| (4..=8).contains(count)),
        "{:?}",
        sent(&dynamo)
    );
    // Two or three of these prompts together have more than 4,200 uncached tokens.
    let queued = sent(&RoutingPolicy::Gated(
        Box::new(dynamo),
        GateRule::PrefillTokens(4_200.0),
    ));
    assert!(
        queued[..4].iter().all(|count| (2..=3).contains(count)),
        "{queued:?}: the queue is that of the prefill engines"
    );
    let most = ("maxConcurrency".to_owned(), ParameterValue::Number(2.0));
    let detector = PluginSpec {
        parameters: vec![most],
        ..PluginSpec::of_type("concurrency-detector")
    };
    let held = sent(&RoutingPolicy::behind_llm_d("2/2/3", detector, GateFairness::Strict).unwrap());
    let stages = [&held[..4], &held[4..]].map(|counts| counts.iter().sum::<usize>());
    assert_eq!(
        stages,
        [8, 8],
        "a full stage is not averaged with the other one"
    );
}

#[test]
fn prefixes_are_found_where_policies_look_for_them() {
    // Sixty prefixes occur ten times each. With only three prefixes, all engines would soon have a
    // copy of each prefix.
    let workload = workload_of(60);
    let setting = PoolSetting::plain(LLAMA_8B_H100);
    let hits = |policy: &str| {
        play_of(&workload, policy, &setting)
            .iter()
            .map(|record| u64::from(record.cached))
            .sum::<u64>()
    };
    let [ours, theirs, blind] = ["ours", "2/2/3", "round-robin"].map(hits);
    assert!(ours > blind && theirs > blind, "{ours} {theirs} {blind}");
}

#[test]
fn proxies_that_share_without_delay_do_as_well_as_one() {
    let of = |sharing| PoolSetting {
        proxies: 4,
        sharing,
        ..PoolSetting::plain(LLAMA_8B_H100)
    };
    let mean = |records: &[RequestOutcome]| {
        records.iter().map(|record| record.ttft).sum::<f64>() / records.len() as f64
    };
    let [one, shared, private] = [
        PoolSetting::plain(LLAMA_8B_H100),
        of(SharingMode::After(0.0)),
        of(SharingMode::Private),
    ]
    .map(|setting| mean(&play("ours", &setting)));
    assert!(
        (shared / one - 1.0).abs() < 0.2 && private > shared,
        "{one} {shared} {private}"
    );
}

#[test]
fn a_closed_session_sends_a_request_its_pause_after_the_reply_before() {
    let sessions = race_cells::RaceWorkload::Chat.sessions(2, 3.0, 10.0);
    let workload = Workload::of_sessions(&sessions);
    for (policy, proxies) in [
        ("ours", 1),
        ("ours", 2),
        ("smg", 2),
        ("vllm-router", 1),
        ("round-robin", 1),
    ] {
        let setting = PoolSetting {
            proxies,
            ..PoolSetting::plain(LLAMA_8B_H100)
        };
        let records = run(
            &workload,
            &RoutingPolicy::named(policy).unwrap(),
            &setting,
            7,
        )
        .unwrap();
        let mut numbers = 0..records.len();
        for (session, position) in sessions.iter().zip(0..) {
            let mut ends: Option<(f64, usize)> = None;
            for turn in &session.turns {
                let record = &records[numbers.next().unwrap()];
                let due = ends.map_or(session.start_ms, |(end, _)| end + turn.pause_ms);
                assert!(
                    (record.at - due).abs() < 1e-6,
                    "{policy}: sent at {} instead of {due}",
                    record.at
                );
                assert_eq!(
                    record.proxy,
                    ends.map_or(position % proxies, |(_, proxy)| proxy),
                    "{policy}"
                );
                assert!(record.ttft > 0.0 && record.output == turn.output_tokens);
                ends = Some((record.at + record.e2e, record.proxy));
            }
        }
        assert_eq!(numbers.next(), None);
    }
}

#[test]
fn smg_keeps_to_the_engine_that_has_the_prompt_until_it_has_many_more_requests() {
    let played = |gap_ms: f64| {
        let line = |number: u32| TraceRequest {
            at: f64::from(number) * gap_ms,
            prompt: 4_096,
            output: 50,
            ids: (0..8).collect(),
        };
        let workload = Workload::from_lines(&(0..60).map(line).collect::<Vec<_>>());
        let setting = PoolSetting::plain(LLAMA_8B_H100);
        run(
            &workload,
            &RoutingPolicy::named("smg").unwrap(),
            &setting,
            7,
        )
        .unwrap()
    };
    let apart = played(2_000.0);
    assert!(
        apart.iter().all(|record| record.engine == apart[0].engine),
        "one request at a time stays at the engine that has its prompt"
    );
    let together = played(1.0);
    let most = (0..8)
        .map(|engine| {
            together
                .iter()
                .filter(|record| record.engine == engine)
                .count()
        })
        .max();
    assert!(
        (5..20).contains(&most.unwrap()),
        "of 60 requests at once, one engine got {most:?}"
    );
}
