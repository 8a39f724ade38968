//! Tests of the engine: what a user of one would see, and laws over random loads.

use super::*;
use crate::model_server::step_time::StepTimeProfile;
use crate::model_server::text;
use proptest::prelude::*;

fn config(kv_blocks: u32) -> ModelEngineConfig {
    ModelEngineConfig {
        step_times: StepTimeProfile::Llama8bH100.step_times(),
        kv_blocks,
        batch_tokens_max: 2048,
        sequences_max: 64,
        lora_slots: 1,
        lora_load_ms: 50.0,
        slowdown: 1.0,
    }
}

/// A prompt whose every byte is `kind`, continued by `output` tokens.
fn sequence(kind: u8, prompt_tokens: u32, output_tokens: u32) -> ModelSequence {
    let text = vec![kind; (prompt_tokens + output_tokens) as usize * text::TOKEN_BYTES];
    ModelSequence { prompt_tokens, output_tokens, finish: FinishReason::Length, hashes: text::block_hashes(0, &text), adapter: None }
}

/// Runs until idle; events with the time of the step that gave them.
fn drain(engine: &mut ModelEngine) -> Vec<(f64, SequenceEvent)> {
    let mut events = Vec::new();
    while let Some(at_ms) = engine.next_event_ms() {
        events.extend(engine.step(at_ms).into_iter().map(|event| (at_ms, event)));
        check_conserved(engine);
    }
    events
}

fn check_conserved(engine: &ModelEngine) {
    let held: usize = engine.sequences.values().map(|state| state.blocks.len()).sum();
    assert_eq!(engine.blocks.uses(), held, "every use of a block has a holder");
    for state in engine.sequences.values() {
        assert_eq!(state.computed.div_ceil(BLOCK_TOKENS) as usize, state.blocks.len(), "what is computed has its blocks, and no more");
    }
    assert!(engine.running.len() <= engine.config.sequences_max);
    assert_eq!(engine.running.len() + engine.waiting.len() + engine.arriving.len(), engine.sequences.len());
}

fn cached_tokens(events: &[(f64, SequenceEvent)]) -> Vec<u32> {
    events
        .iter()
        .filter_map(|(_, event)| if let SequenceEvent::Admitted { cached_tokens, .. } = event { Some(*cached_tokens) } else { None })
        .collect()
}

fn finished_ms(events: &[(f64, SequenceEvent)], id: u64) -> f64 {
    events.iter().find(|(_, event)| matches!(event, SequenceEvent::Finished { id: ended, .. } if ended.0 == id)).unwrap().0
}

#[test]
fn an_idle_engine_answers_in_the_calibrated_time() {
    let mut engine = ModelEngine::new(config(1000));
    engine.submit(100.0, SequenceId(1), sequence(b'a', 15, 3));
    let events = drain(&mut engine);
    let tokens: Vec<f64> = events
        .iter()
        .filter_map(|(_, event)| if let SequenceEvent::Token { since_ms, .. } = event { Some(*since_ms) } else { None })
        .collect();
    assert_eq!(tokens.len(), 3);
    assert!((14.0..15.0).contains(&tokens[0]), "TTFT: 7 ms of API, 1 ms of overhead and the weight floor; got {tokens:?}");
    assert!(tokens[1..].iter().all(|itl_ms| (7.0..7.2).contains(itl_ms)), "{tokens:?}");
    assert_eq!(engine.load(), ModelEngineLoad::default());
}

#[test]
fn an_engine_that_throttles_takes_longer_from_its_next_step_on() {
    let first_token_ms = |before: f64, after: f64| {
        let mut engine = ModelEngine::new(ModelEngineConfig { slowdown: before, ..config(1000) });
        engine.set_slowdown(after);
        engine.submit(0.0, SequenceId(1), sequence(1, 1024, 1));
        finished_ms(&drain(&mut engine), 1) - REQUEST_OVERHEAD_MS
    };
    let measured_ms = first_token_ms(1.0, 1.0);
    for (before, after) in [(1.0, 3.0), (3.0, 3.0), (0.5, 3.0)] {
        assert!((first_token_ms(before, after) / measured_ms - 3.0).abs() < 1e-9, "{before} {after}");
    }
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_decodes() {
    let mut engine = ModelEngine::new(config(2000));
    engine.submit(0.0, SequenceId(1), sequence(b'a', 16, 40));
    engine.submit(1.0, SequenceId(2), sequence(b'b', 8000, 1));
    let events = drain(&mut engine);
    let steps: Vec<u32> =
        events.iter().filter_map(|(_, event)| if let SequenceEvent::Stepped { tokens } = event { Some(*tokens) } else { None }).collect();
    assert_eq!(steps.iter().filter(|&&tokens| tokens == 2048).count(), 3, "the budget caps a step: {steps:?}");
    assert_eq!(steps.iter().sum::<u32>(), 16 + 39 + 8000, "each token is computed once");
}

#[test]
fn a_repeated_prompt_and_a_continued_answer_are_found_in_the_cache() {
    let mut engine = ModelEngine::new(config(1000));
    engine.submit(0.0, SequenceId(1), sequence(b'a', 320, 64));
    assert_eq!(cached_tokens(&drain(&mut engine)), [0]);
    engine.submit(1e4, SequenceId(2), sequence(b'a', 320, 1));
    assert_eq!(cached_tokens(&drain(&mut engine)), [304], "all but the block of the last token");
    engine.submit(2e4, SequenceId(3), sequence(b'a', 500, 1));
    assert_eq!(cached_tokens(&drain(&mut engine)), [368], "prompt and generated text of the first, but its last token was never computed");
}

#[test]
fn a_full_engine_queues_and_memory_pressure_preempts_and_recomputes() {
    let mut engine = ModelEngine::new(ModelEngineConfig { sequences_max: 4, ..config(20) });
    for id in 0..5 {
        engine.submit(0.0, SequenceId(id), sequence(b'a' + id as u8, 64, 64));
    }
    let mut events = Vec::new();
    while engine.preemptions() == 0 {
        assert_eq!((engine.load().running, engine.load().waiting), if events.is_empty() { (0, 0) } else { (4, 1) });
        let at_ms = engine.next_event_ms().unwrap();
        events.extend(engine.step(at_ms).into_iter().map(|event| (at_ms, event)));
    }
    assert_eq!(engine.waiting, [3, 4].map(SequenceId), "the newest goes, to before those that never ran");
    events.extend(drain(&mut engine));
    assert_eq!(cached_tokens(&events).len(), 5, "admission is told once");
    let generated = events.iter().filter(|(_, event)| matches!(event, SequenceEvent::Token { .. })).count();
    assert_eq!(generated, 5 * 64, "a preempted sequence repeats no token");
}

#[test]
fn adapters_wait_for_a_slot_and_loading_takes_time() {
    let mut engine = ModelEngine::new(config(1000));
    for (id, adapter) in [(1, Some(0)), (2, Some(1)), (3, None)] {
        engine.submit(0.0, SequenceId(id), ModelSequence { adapter, ..sequence(b'a', 10, 5) });
    }
    engine.step(7.0);
    assert_eq!(engine.adapters(), [vec![0], vec![1]]);
    assert_eq!((engine.load().running, engine.load().waiting), (2, 1), "the plain one overtakes");
    assert!(engine.next_event_ms().unwrap() > 7.0 + 50.0);
    let events = drain(&mut engine);
    assert!(finished_ms(&events, 2) > finished_ms(&events, 1));
}

#[test]
fn an_aborted_sequence_leaves_nothing() {
    let mut engine = ModelEngine::new(config(1000));
    for id in 0..3 {
        engine.submit(0.0, SequenceId(id), sequence(b'a', 100, 50));
        engine.step(f64::from(id as u32) * 7.0);
        assert!(matches!(engine.abort(20.0, SequenceId(id)), Some(SequenceEvent::Finished { finish: FinishReason::Abort, .. })));
        assert_eq!(engine.abort(20.0, SequenceId(id)), None);
    }
    drain(&mut engine);
    assert_eq!(engine.load(), ModelEngineLoad::default());
}

proptest! {
    #[test]
    fn every_sequence_ends_once_with_all_its_tokens_and_all_blocks_come_back(
        kv_blocks in 40..120_u32,
        budget in 64..512_u32,
        sequences_max in 1..6_usize,
        requests in proptest::collection::vec((0..3_u8, 1..300_u32, 0..120_u32, 0..500_u32, proptest::option::of(0..3_usize), any::<bool>()), 1..24),
    ) {
        let mut engine = ModelEngine::new(ModelEngineConfig { batch_tokens_max: budget, sequences_max, ..config(kv_blocks) });
        let (mut now_ms, mut events) = (0.0, Vec::new());
        for (id, &(kind, prompt, output, gap_ms, adapter, aborted)) in requests.iter().enumerate() {
            let id = SequenceId(id as u64);
            engine.submit(now_ms, id, ModelSequence { adapter, ..sequence(kind, prompt, output) });
            let until_ms = now_ms + f64::from(gap_ms);
            while let Some(at_ms) = engine.next_event_ms().filter(|at_ms| *at_ms <= until_ms) {
                events.extend(engine.step(at_ms));
                check_conserved(&engine);
            }
            now_ms = until_ms;
            if aborted {
                events.extend(engine.abort(now_ms, id));
                check_conserved(&engine);
            }
        }
        events.extend(drain(&mut engine).into_iter().map(|(_, event)| event));

        prop_assert_eq!(engine.blocks.free(), kv_blocks);
        prop_assert_eq!(engine.load(), ModelEngineLoad::default());
        for (index, &(_, _, output, _, _, aborted)) in requests.iter().enumerate() {
            let id = SequenceId(index as u64);
            let tokens = events.iter().filter(|event| matches!(event, SequenceEvent::Token { id: of, .. } if *of == id)).count() as u32;
            let ends: Vec<_> = events.iter().filter_map(|event| match event {
                SequenceEvent::Finished { id: of, finish, generated, .. } if *of == id => Some((*finish, *generated)),
                _ => None,
            }).collect();
            prop_assert_eq!(ends.len(), 1);
            let (finish, generated) = ends[0];
            prop_assert_eq!(generated, tokens);
            prop_assert!(aborted || finish == FinishReason::Length);
            prop_assert!(finish == FinishReason::Abort || tokens == output);
        }
    }
}
