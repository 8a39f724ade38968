//! Tests of the engine as its callers see it, and of laws that hold for any random load. The
//! batching itself is tested in `engine-sim`.

use engine_sim::EngineProfile;
use proptest::prelude::*;

use super::*;
use crate::model_server::text;

fn spec(kv_blocks: usize) -> SimulatedEngineSpec {
    SimulatedEngineSpec {
        kv_blocks,
        budget: 2048,
        sequences_max: 64,
        adapter_places: 1,
        adapter_load_ms: 50.0,
        ..EngineProfile::Llama8bH100.spec(BLOCK_TOKENS as usize)
    }
}

/// Returns a prompt in which every byte is `kind`, continued by `output` tokens.
fn sequence(kind: u8, prompt_tokens: u32, output_tokens: u32) -> ModelSequence {
    let text = vec![kind; (prompt_tokens + output_tokens) as usize * text::TOKEN_BYTES];
    ModelSequence {
        prompt_tokens,
        output_tokens,
        finish: FinishReason::Length,
        hashes: text::block_hashes(0, &text),
        adapter: None,
    }
}

/// Runs until the engine is idle. Returns the events with the times of their steps.
fn drain(engine: &mut ModelEngine) -> Vec<(f64, SequenceEvent)> {
    let mut events = Vec::new();
    while let Some(at_ms) = engine.next_event_ms() {
        events.extend(engine.step(at_ms).into_iter().map(|event| (at_ms, event)));
    }
    events
}

fn cached_tokens(events: &[(f64, SequenceEvent)]) -> Vec<u32> {
    events
        .iter()
        .filter_map(|(_, event)| {
            if let SequenceEvent::Admitted { cached_tokens, .. } = event {
                Some(*cached_tokens)
            } else {
                None
            }
        })
        .collect()
}

fn finished_ms(events: &[(f64, SequenceEvent)], id: u64) -> f64 {
    events.iter().find(|(_, event)| matches!(event, SequenceEvent::Finished { id: ended, .. } if ended.0 == id)).unwrap().0
}

#[test]
fn an_idle_engine_answers_in_the_calibrated_time() {
    let mut engine = ModelEngine::new(spec(1000));
    engine.submit(100.0, SequenceId(1), sequence(b'a', 15, 3));
    let events = drain(&mut engine);
    let tokens: Vec<f64> = events
        .iter()
        .filter_map(|(_, event)| {
            if let SequenceEvent::Token { since_ms, .. } = event {
                Some(*since_ms)
            } else {
                None
            }
        })
        .collect();
    assert_eq!(tokens.len(), 3);
    assert!(
        (14.0..15.0).contains(&tokens[0]),
        "TTFT: 7 ms of API, 1 ms of overhead and the weight floor; got {tokens:?}"
    );
    assert!(
        tokens[1..].iter().all(|itl_ms| (7.0..7.2).contains(itl_ms)),
        "{tokens:?}"
    );
    assert_eq!(engine.load(), ModelEngineLoad::default());
}

#[test]
fn a_repeated_prompt_and_a_continued_answer_are_found_in_the_cache() {
    let mut engine = ModelEngine::new(spec(1000));
    engine.submit(0.0, SequenceId(1), sequence(b'a', 320, 64));
    assert_eq!(cached_tokens(&drain(&mut engine)), [0]);
    engine.submit(1e4, SequenceId(2), sequence(b'a', 320, 1));
    assert_eq!(
        cached_tokens(&drain(&mut engine)),
        [304],
        "all but the block of the last token"
    );
    engine.submit(2e4, SequenceId(3), sequence(b'a', 500, 1));
    assert_eq!(
        cached_tokens(&drain(&mut engine)),
        [368],
        "prompt and generated text of the first, but its last token was never computed"
    );
}

#[test]
fn a_full_engine_queues_and_memory_pressure_preempts_and_recomputes() {
    let mut engine = ModelEngine::new(SimulatedEngineSpec {
        sequences_max: 4,
        ..spec(20)
    });
    for id in 0..5 {
        engine.submit(0.0, SequenceId(id), sequence(b'a' + id as u8, 64, 64));
    }
    let mut events = Vec::new();
    while engine.preemptions() == 0 {
        assert_eq!(
            (engine.load().running, engine.load().waiting),
            if events.is_empty() { (0, 0) } else { (4, 1) }
        );
        let at_ms = engine.next_event_ms().unwrap();
        events.extend(engine.step(at_ms).into_iter().map(|event| (at_ms, event)));
    }
    events.extend(drain(&mut engine));
    assert_eq!(cached_tokens(&events).len(), 5, "one event per admission");
    let generated = events
        .iter()
        .filter(|(_, event)| matches!(event, SequenceEvent::Token { .. }))
        .count();
    assert_eq!(generated, 5 * 64, "a preempted sequence repeats no token");
}

#[test]
fn adapters_wait_for_a_slot_and_loading_takes_time() {
    let mut engine = ModelEngine::new(spec(1000));
    for (id, adapter) in [(1, Some(0)), (2, Some(1)), (3, None)] {
        engine.submit(
            0.0,
            SequenceId(id),
            ModelSequence {
                adapter,
                ..sequence(b'a', 10, 5)
            },
        );
    }
    engine.step(7.0);
    assert_eq!(engine.adapters(), [vec![0], vec![1]]);
    assert_eq!(
        (engine.load().running, engine.load().waiting),
        (2, 1),
        "the plain one overtakes"
    );
    assert!(engine.next_event_ms().unwrap() > 7.0 + 50.0);
    let events = drain(&mut engine);
    assert!(finished_ms(&events, 2) > finished_ms(&events, 1));
}

#[test]
fn an_aborted_sequence_leaves_nothing() {
    let mut engine = ModelEngine::new(spec(1000));
    for id in 0..3 {
        engine.submit(0.0, SequenceId(id), sequence(b'a', 100, 50));
        engine.step(f64::from(id as u32) * 7.0);
        assert!(matches!(
            engine.abort(20.0, SequenceId(id)),
            Some(SequenceEvent::Finished {
                finish: FinishReason::Abort,
                ..
            })
        ));
        assert_eq!(engine.abort(20.0, SequenceId(id)), None);
    }
    drain(&mut engine);
    assert_eq!(engine.load(), ModelEngineLoad::default());
}

proptest! {
    #[test]
    fn every_sequence_ends_once_with_all_its_tokens_and_all_blocks_come_back(
        kv_blocks in 40..120_usize,
        budget in 64..512_usize,
        sequences_max in 1..6_usize,
        requests in proptest::collection::vec((0..3_u8, 1..300_u32, 0..120_u32, 0..500_u32, proptest::option::of(0..3_usize), any::<bool>()), 1..24),
    ) {
        let mut engine = ModelEngine::new(SimulatedEngineSpec { budget, sequences_max, ..spec(kv_blocks) });
        let mut now_ms = 0.0;
        let mut events = Vec::new();
        for (id, &(kind, prompt, output, gap_ms, adapter, aborted)) in requests.iter().enumerate() {
            let id = SequenceId(id as u64);
            engine.submit(now_ms, id, ModelSequence { adapter, ..sequence(kind, prompt, output) });
            let until_ms = now_ms + f64::from(gap_ms);
            while let Some(at_ms) = engine.next_event_ms().filter(|at_ms| *at_ms <= until_ms) {
                events.extend(engine.step(at_ms));
            }
            now_ms = until_ms;
            if aborted {
                events.extend(engine.abort(now_ms, id));
            }
        }
        events.extend(drain(&mut engine).into_iter().map(|(_, event)| event));

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
