use super::*;

const H100: SimulatedEngineSpec = crate::hardware::LLAMA_8B_H100;

fn job<'w>() -> EngineJob<'w> {
    EngineJob { request: 0, prompt: 1, output: 1, blocks: &[], hashes: &[], adapter: 0, prefilled: false }
}

/// Runs requests of (arrival, prompt, output, blocks) to their end; TTFT, end and cached tokens of each.
fn run(spec: SimulatedEngineSpec, requests: &[(f64, u32, u32, Vec<u64>)]) -> (Vec<(f64, f64, u32)>, u64) {
    let mut engine = SimulatedEngine::new(spec);
    let mut out = vec![(0.0, 0.0, 0); requests.len()];
    let (mut next, mut now, mut events) = (0, 0.0, Vec::new());
    loop {
        while let Some((at, prompt, output, blocks)) = requests.get(next).filter(|request| request.0 <= now) {
            let _ = at;
            engine.submit(EngineJob { request: next as u32, prompt: *prompt, output: *output, blocks, ..job() }, now).unwrap();
            next += 1;
        }
        let started = engine.start(now, &mut |request, cached| out[request as usize].2 = cached).unwrap();
        match (started, requests.get(next)) {
            (Some(ends), _) => {
                now = ends;
                engine.end(&mut events).unwrap();
                for event in events.drain(..) {
                    match event {
                        StepEvent::First(request) => out[request as usize].0 = now - requests[request as usize].0,
                        StepEvent::Done(request) => out[request as usize].1 = now - requests[request as usize].0,
                    }
                }
            }
            (None, Some((at, ..))) => now = *at,
            (None, None) => break,
        }
    }
    assert_eq!(engine.blocks_held(), 0, "every block comes back");
    (out, engine.preemptions())
}

#[test]
fn a_lone_request_takes_the_formulas_time() {
    let (out, _) = run(H100, &[(0.0, 8192, 11, vec![])]);
    let times = H100.times;
    let ttft = times.mixed_ms((0.0, 0.0), 8192.0, 0.0);
    let decodes: f64 = (1..=10).map(|i| times.mixed_ms((1.0, 8192.0 + f64::from(i)), 0.0, 0.0)).sum();
    assert!((out[0].0 - ttft).abs() < 1e-9 && (out[0].1 - ttft - decodes).abs() < 1e-6, "{out:?}");
}

#[test]
fn long_prompts_come_in_chunks() {
    let (out, _) = run(H100, &[(0.0, 20_000, 1, vec![])]);
    assert!((out[0].0 - H100.times.cold_ms(20_000, 8192)).abs() < 1e-6);
    assert_eq!(out[0].0, out[0].1);
}

#[test]
fn a_repeated_prompt_hits_all_but_its_end() {
    let blocks: Vec<u64> = (1..=100).collect();
    let (out, _) = run(H100, &[(0.0, 6400, 5, blocks.clone()), (1e4, 6400, 5, blocks.clone()), (2e4, 7000, 5, blocks)]);
    assert_eq!(out.iter().map(|row| row.2).collect::<Vec<_>>(), [0, 6400 - 64, 6400]);
}

#[test]
fn all_end_and_every_block_comes_back_under_preemption() {
    let requests: Vec<_> = (0..60).map(|i| (f64::from(i) * 5.0, 1000 + 37 * i, 400, vec![])).collect();
    let (out, preemptions) = run(SimulatedEngineSpec { kv_blocks: 300, ..H100 }, &requests);
    assert!(preemptions > 0 && out.iter().all(|row| row.1 > row.0 && row.0 > 0.0));
}

#[test]
fn who_comes_first_is_served_first() {
    let requests: Vec<_> = (0..20).map(|i| (f64::from(i), 9000, 1, vec![])).collect();
    let (out, _) = run(H100, &requests);
    let firsts: Vec<f64> = out.iter().zip(&requests).map(|(row, request)| row.0 + request.0).collect();
    assert!(firsts.is_sorted(), "{firsts:?}");
}

/// How long the first step takes with these jobs there, and how many of them run then.
fn first_step(spec: SimulatedEngineSpec, jobs: &[EngineJob<'_>]) -> (f64, usize) {
    let mut engine = SimulatedEngine::new(spec);
    jobs.iter().for_each(|job| engine.submit(*job, 0.0).unwrap());
    let ends = engine.start(0.0, &mut |_, _| ()).unwrap().unwrap();
    (ends, engine.counts().1)
}

#[test]
fn adapters_are_loaded_within_a_step_and_who_finds_no_place_is_passed_over() {
    let spec = SimulatedEngineSpec { adapter_places: 2, adapter_load_ms: 100.0, ..H100 };
    let of = |adapter: u16| EngineJob { request: adapter.into(), prompt: 64, output: 9, adapter, ..job() };
    let (plain, _) = first_step(spec, &[of(0), of(0), of(0)]);
    let (loading, running) = first_step(spec, &[of(1), of(2), of(3), of(1)]);
    assert_eq!((running, (loading - plain).round()), (3, 200.0), "the third waits, the fourth does not wait for it");
}

#[test]
fn what_another_engine_computed_is_not_computed_again() {
    let job = EngineJob { prompt: 6_400, output: 5, ..job() };
    let (own, _) = first_step(H100, &[job]);
    let (carried, _) = first_step(H100, &[EngineJob { prefilled: true, ..job }]);
    assert!(carried < 10.0 && own > 100.0, "{carried} {own}");
}
