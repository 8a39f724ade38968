//! Origins that observe the same four engines, and some that invent observations.

use proptest::prelude::*;
use scheduler::latency::step::StepModel;
use scheduler::latency::{Conditions, FirstToken, Observation, RequestEnd, TokenGap};
use scheduler::{EndpointRef, Generation, Rng, Slot};

use super::{ACTIVE_MS, OriginTrust, OriginVotes, VotedSample, VotedTime};
use crate::{LatencyLearner, ObservationVerdict};

const LIAR: u64 = 99;

fn engine(slot: u16) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(1),
    }
}

fn truth() -> StepModel {
    StepModel::from_parts([12.0, 0.06, 2e-6], [9.0, 0.08, 1e-4], 150.0)
}

/// Returns the reported time of an engine as a multiple of the true time.
type Factor = fn(u16) -> f32;

/// Changes the observations of the origin with false reports.
type Report = fn(&mut Observation);

struct OriginDrill {
    learner: LatencyLearner,
    rng: Rng,
    now_ms: u64,
}

impl OriginDrill {
    fn new() -> Self {
        Self {
            learner: LatencyLearner::default(),
            rng: Rng::seeded(7),
            now_ms: 1_000,
        }
    }

    fn row(&mut self, slot: u16, factor: f32) -> Observation {
        let truth = truth();
        let noise = factor * (0.8 + 0.4 * self.rng.open01());
        let prompt = 50.0 + 4_000.0 * self.rng.open01();
        let uncached = prompt * self.rng.open01();
        let batch = 1.0 + 30.0 * self.rng.open01();
        let context_tokens = 50_000.0 * self.rng.open01();
        let service_ms = noise * truth.prefill_ms(uncached, prompt);
        Observation {
            endpoint: engine(slot),
            conditions: Conditions {
                prompt_tokens: prompt,
                uncached_tokens: uncached,
                ..Conditions::default()
            },
            ended: RequestEnd::Done,
            ttft_ms: None,
            tpot_ms: None,
            output_tokens: Some(20),
            first_token: Some(FirstToken {
                uncached_tokens: uncached,
                prompt_tokens: prompt,
                service_ms,
            }),
            gap: Some(TokenGap {
                batch,
                context_tokens,
                gap_ms: noise * truth.decode_ms(batch, context_tokens),
            }),
        }
    }

    /// Returns an observation whose step times are true. TTFT, TPOT and output tokens are
    /// multiplied by `factor`.
    fn timed_row(&mut self, slot: u16, factor: f32) -> Observation {
        let row = self.row(slot, 1.0);
        let first_token = row.first_token.unwrap();
        let gap = row.gap.unwrap();
        Observation {
            conditions: Conditions {
                requests: gap.batch,
                context_tokens: gap.context_tokens,
                ..row.conditions
            },
            ttft_ms: Some(factor * first_token.service_ms),
            tpot_ms: Some(factor * gap.gap_ms),
            output_tokens: Some((100.0 * factor) as u32),
            ..row
        }
    }

    /// Sends this many false observations, changed by `report`, of the origin with false reports.
    fn report(&mut self, rows: usize, lie: Factor, report: Report) {
        for _ in 0..rows {
            let slot = u16::try_from(self.rng.below(4)).unwrap();
            let mut row = self.row(slot, lie(slot));
            report(&mut row);
            let _ = self.learner.observe_of(LIAR, &row, None);
        }
    }

    /// Lets time pass as [`Self::run`] does, with observations of [`Self::timed_row`].
    fn run_timed(&mut self, seconds: u64, origins: &[(u64, usize, Factor)], report: Report) {
        for _ in 0..seconds {
            for (origin, rate, factor) in origins {
                for _ in 0..*rate {
                    let slot = u16::try_from(self.rng.below(4)).unwrap();
                    let mut row = self.timed_row(slot, factor(slot));
                    if *origin == LIAR {
                        report(&mut row);
                    }
                    let _ = self.learner.observe_of(*origin, &row, None);
                }
            }
            self.now_ms += 1_000;
            let _ = self.learner.publish(self.now_ms);
        }
    }

    /// Returns the largest factor by which a predicted TTFT or TPOT differs from the true time.
    fn off_in_predictions(&self) -> f32 {
        let model = self.learner.model().unwrap();
        let conditions = Conditions {
            requests: 8.0,
            context_tokens: 10_000.0,
            prompt_tokens: 2_000.0,
            uncached_tokens: 500.0,
            ..Conditions::default()
        };
        let ttft_ms = truth().prefill_ms(500.0, 2_000.0);
        let tpot_ms = truth().decode_ms(8.0, 10_000.0);
        let off = |said: f32, true_ms: f32| (said / true_ms).max(true_ms / said);
        let offs = (0..4).map(|slot| {
            let said = model.predict(engine(slot), &conditions).unwrap();
            off(said.ttft_ms, ttft_ms).max(off(said.tpot_ms, tpot_ms))
        });
        offs.fold(1.0, f32::max)
    }

    /// Checks that the models have learned the true times and output lengths.
    fn assert_true(&mut self, when: &str) {
        let output_tokens = self.model().output_tokens();
        assert!(
            self.off_in_predictions() < 1.5 && (67.0..150.0).contains(&output_tokens),
            "{when}: off by {}, {output_tokens} output tokens",
            self.off_in_predictions()
        );
    }

    /// Lets `seconds` pass. Each of the origins observes this many requests a second, at engines of
    /// its choice.
    fn run(&mut self, seconds: u64, origins: &[(u64, usize, Factor)]) {
        self.run_at(seconds, origins, None);
    }

    /// Lets time pass as [`Self::run`] does, with all requests at `engine` if an engine is given.
    fn run_at(&mut self, seconds: u64, origins: &[(u64, usize, Factor)], engine: Option<u16>) {
        for _ in 0..seconds {
            for (origin, rate, factor) in origins {
                for _ in 0..*rate {
                    let drawn = u16::try_from(self.rng.below(4)).unwrap();
                    let slot = engine.unwrap_or(drawn);
                    let row = self.row(slot, factor(slot));
                    let _ = self.learner.observe_of(*origin, &row, None);
                }
            }
            self.now_ms += 1_000;
            let _ = self.learner.publish(self.now_ms);
        }
    }

    /// Observes one request a second whose reply is not streamed, so the observation has no times.
    fn run_without_times(&mut self, seconds: u64, origin: u64) {
        for _ in 0..seconds {
            let row = Observation {
                ttft_ms: None,
                first_token: None,
                gap: None,
                ..self.row(0, 1.0)
            };
            let _ = self.learner.observe_of(origin, &row, None);
            self.now_ms += 1_000;
            let _ = self.learner.publish(self.now_ms);
        }
    }

    fn model(&mut self) -> StepModel {
        self.learner.step(self.now_ms)
    }

    fn speeds(&mut self) -> Vec<(f32, f32)> {
        let model = self.model();
        (0..4).map(|slot| model.speed(engine(slot))).collect()
    }

    /// Returns the largest factor by which a learned time differs from the true time.
    fn off(&mut self) -> f32 {
        let model = self.model();
        let pairs = [
            (
                model.prefill_ms(500.0, 2_000.0),
                truth().prefill_ms(500.0, 2_000.0),
            ),
            (
                model.prefill_ms(3_000.0, 3_000.0),
                truth().prefill_ms(3_000.0, 3_000.0),
            ),
            (
                model.decode_ms(8.0, 10_000.0),
                truth().decode_ms(8.0, 10_000.0),
            ),
        ];
        let off = pairs.map(|(model, truth)| (model / truth).max(truth / model));
        off.into_iter().fold(1.0, f32::max)
    }

    /// Returns the longest learned time of an engine as a multiple of the shortest.
    fn spread(&mut self) -> f32 {
        let speeds = self.speeds();
        let all = || {
            speeds
                .iter()
                .flat_map(|(prefill, decode)| [*prefill, *decode])
        };
        all().fold(0.0, f32::max) / all().fold(f32::MAX, f32::min)
    }
}

const EQUAL: Factor = |_| 1.0;
const SLOW_2: Factor = |slot| if slot == 2 { 2.0 } else { 1.0 };
/// A false report: engine 3 is fast and the others are slow.
const LIE: Factor = |slot| if slot == 3 { 0.05 } else { 20.0 };
const LIE_OF_ALL: Factor = |_| 30.0;
/// A false report that all engines except engine 3 are slow. The times of engine 3 are true.
const LIE_EXCEPT_3: Factor = |slot| if slot == 3 { 1.0 } else { 5.0 };
const LIE_IN_TOLERANCE: Factor = |slot| if slot == 3 { 0.7 } else { 1.4 };

const HONEST: [(u64, usize, Factor); 3] = [(1, 10, EQUAL), (2, 10, EQUAL), (3, 10, EQUAL)];

#[test]
fn a_single_origin_teaches_as_if_there_were_none() {
    let mut one = OriginDrill::new();
    one.run(30, &[(5, 20, SLOW_2)]);
    let mut plain = OriginDrill::new();
    plain.run(30, &[(0, 20, SLOW_2)]);
    assert_eq!(one.model(), plain.model());
    assert!(
        one.off() < 1.3 && one.spread() > 1.6,
        "{} {:?}",
        one.off(),
        one.speeds()
    );
}

#[test]
fn a_liar_among_four_teaches_nothing_and_a_flood_no_more() {
    for rate in [5, 200] {
        for (lie, spread_max, off_max) in [
            (LIE, 1.25, 1.4),
            (LIE_OF_ALL, 1.25, 1.4),
            (LIE_IN_TOLERANCE, 1.8, 1.7),
        ] {
            let mut drill = OriginDrill::new();
            let [a, b, c] = HONEST;
            drill.run(10, &HONEST);
            drill.run(12, &[a, b, c, (LIAR, rate, lie)]);
            assert!(
                drill.spread() < spread_max && drill.off() < off_max,
                "{rate} a second: {:?}, off by {}",
                drill.speeds(),
                drill.off()
            );
        }
    }
}

#[test]
fn a_liar_among_four_teaches_no_ttft_no_tpot_and_no_output_length() {
    let reports: [(&str, Report); 2] = [
        ("without steps", |row| {
            row.first_token = None;
            row.gap = None;
        }),
        ("with true steps", |_| {}),
    ];
    for (what, report) in reports {
        for lie in [LIE, LIE_OF_ALL] {
            let mut drill = OriginDrill::new();
            let [a, b, c] = HONEST;
            drill.run_timed(10, &HONEST, report);
            drill.assert_true("before");
            drill.run_timed(12, &[a, b, c, (LIAR, 40, lie)], report);
            drill.assert_true(what);
            assert!(drill.learner.standing().outvoted > 300, "{what}");
            drill.run_timed(30, &HONEST, report);
            drill.assert_true(what);
        }
    }
}

#[test]
fn the_times_and_the_output_length_of_a_silent_liar_are_forgotten_within_30_s() {
    let mut drill = OriginDrill::new();
    drill.run_timed(10, &[(LIAR, 20, LIE)], |_| {});
    assert!(drill.off_in_predictions() > 4.0);
    assert!(drill.model().output_tokens() > 1_000.0);
    drill.run_timed(30, &[(1, 10, EQUAL)], |_| {});
    drill.assert_true("after 30 s");
}

#[test]
fn two_honest_origins_learn_ttft_tpot_and_the_output_length() {
    for rates in [[5, 5], [45, 5]] {
        let mut drill = OriginDrill::new();
        let [a, b] = rates;
        drill.run_timed(40, &[(1, a, EQUAL), (2, b, EQUAL)], |_| {});
        drill.assert_true("after 40 s");
        assert_eq!(drill.learner.standing().outvoted, 0);
    }
}

#[test]
fn two_origins_that_disagree_both_teach_ttft_and_tpot() {
    for rates in [[5, 5], [45, 1]] {
        let mut drill = OriginDrill::new();
        let [a, b] = rates;
        drill.run_timed(40, &[(1, a, EQUAL), (2, b, |_| 2.0)], |_| {});
        let off = drill.off_in_predictions();
        assert!(off < 2.5, "{rates:?}: off by {off}");
        // Both see that the engines become slower.
        drill.run_timed(60, &[(1, a, |_| 4.0), (2, b, |_| 8.0)], |_| {});
        let off = drill.off_in_predictions();
        assert!((3.0..9.0).contains(&off), "{rates:?}: off by {off}");
        assert_eq!(drill.learner.standing().outvoted, 0);
    }
}

#[test]
fn a_flood_of_lies_beside_one_honest_origin_at_most_doubles_or_halves_ttft_and_tpot() {
    let honest = (1, 36, EQUAL);
    let lies: [Factor; 4] = [|_| 20.0, |_| 0.05, LIE, LIE_EXCEPT_3];
    for (lie, factor) in lies.into_iter().enumerate() {
        for first in [[honest], [(LIAR, 160, factor)]] {
            let mut drill = OriginDrill::new();
            drill.run_timed(5, &first, |_| {});
            drill.run_timed(40, &[honest, (LIAR, 160, factor)], |_| {});
            let off = drill.off_in_predictions();
            assert!(off < 3.0, "lie {lie} after {first:?}: off by {off}");
        }
    }
}

#[test]
fn of_two_origins_none_teaches_an_output_length_beyond_the_other_and_the_prior() {
    for lie in [1, 10_000] {
        let mut drill = OriginDrill::new();
        drill.run_timed(5, &[(1, 36, EQUAL)], |_| {});
        for _ in 0..20 {
            drill.run_timed(1, &[(1, 36, EQUAL)], |_| {});
            for slot in 0..4 {
                let mut row = drill.timed_row(slot, 1.0);
                row.output_tokens = Some(lie);
                let _ = drill.learner.observe_of(LIAR, &row, None);
            }
        }
        let output_tokens = drill.model().output_tokens();
        assert!(
            (90.0..201.0).contains(&output_tokens),
            "{lie}: {output_tokens} output tokens"
        );
    }
}

#[test]
fn samples_that_are_too_long_and_too_short_in_turn_teach_little() {
    let honest = (1, 36, EQUAL);
    let mut drill = OriginDrill::new();
    drill.run(5, &[honest, (LIAR, 160, EQUAL)]);
    for _ in 0..40 {
        drill.run(1, &[honest]);
        for _ in 0..20 {
            for (slot, factor) in (0..4).flat_map(|slot| [(slot, 0.01), (slot, 1_000.0)]) {
                let row = drill.row(slot, factor);
                let _ = drill.learner.observe_of(LIAR, &row, None);
            }
        }
    }
    assert!(drill.off() < 3.0, "off by {}", drill.off());
}

#[test]
fn beside_one_honest_origin_a_liar_hides_speeds_but_invents_none() {
    let honest = (1, 36, SLOW_2);
    let lies: [Factor; 5] = [|_| 20.0, |_| 0.05, EQUAL, LIE, LIE_EXCEPT_3];
    for factor in lies {
        let mut drill = OriginDrill::new();
        drill.run(20, &[honest]);
        drill.run(60, &[honest, (LIAR, 160, factor)]);
        let speeds = drill.speeds();
        let is_between = |slot: usize, most: f32| {
            let (prefill, decode) = speeds[slot];
            [prefill, decode]
                .iter()
                .all(|speed| (0.7..most).contains(speed))
        };
        assert!(is_between(2, 2.4), "{speeds:?}");
        assert!(
            [0, 1, 3].iter().all(|slot| is_between(*slot, 1.25)),
            "{speeds:?}"
        );
    }
}

#[test]
fn a_flood_of_lies_beside_one_honest_origin_teaches_no_step_times() {
    let honest = (1, 36, EQUAL);
    let slow: Factor = |_| 20.0;
    let mut drill = OriginDrill::new();
    drill.run(40, &[honest, (LIAR, 160, slow)]);
    assert!(drill.off() < 2.0, "from the start: off by {}", drill.off());
    let lies: [Factor; 4] = [slow, |_| 0.05, LIE, LIE_EXCEPT_3];
    for (lie, factor) in lies.into_iter().enumerate() {
        let mut drill = OriginDrill::new();
        drill.run(5, &[honest]);
        drill.run(40, &[honest, (LIAR, 160, factor)]);
        assert!(
            drill.off() < 1.5 && drill.spread() < 1.25,
            "lie {lie}: off by {}, {:?}",
            drill.off(),
            drill.speeds()
        );
    }
    // The origin with false reports observes first.
    let mut drill = OriginDrill::new();
    drill.run(5, &[(LIAR, 160, slow)]);
    drill.run(60, &[(LIAR, 160, slow), honest]);
    assert!(drill.off() < 2.0, "late: off by {}", drill.off());
}

#[test]
fn a_quiet_origin_and_a_busy_one_that_agree_both_teach() {
    let mut drill = OriginDrill::new();
    drill.run(60, &[(1, 1, EQUAL), (2, 40, EQUAL)]);
    let standing = drill.learner.standing();
    assert_eq!((standing.learned, standing.outvoted), (60 * 41, 0));
    assert!(
        drill.off() < 1.4 && drill.spread() < 1.25,
        "off by {}, {:?}",
        drill.off(),
        drill.speeds()
    );
    // Both see that the engines become slower.
    drill.run(60, &[(1, 4, |_| 3.0), (2, 36, |_| 3.0)]);
    let off = drill.off();
    assert!((2.2..4.0).contains(&off), "off by {off}");
    assert_eq!(drill.learner.standing().outvoted, 0);
}

#[test]
fn of_two_origins_that_disagree_about_steps_the_model_follows_one() {
    let mut drill = OriginDrill::new();
    drill.run(40, &[(1, 20, EQUAL), (2, 20, |_| 2.0)]);
    assert!(drill.off() < 2.3, "off by {}", drill.off());
    // Both see that the engines become slower.
    drill.run(60, &[(1, 20, |_| 4.0), (2, 20, |_| 8.0)]);
    let off = drill.off();
    assert!((2.0..9.0).contains(&off), "off by {off}");
    assert_eq!(drill.learner.standing().outvoted, 0);
}

#[test]
fn origins_with_too_few_samples_to_vote_teach_nothing_that_others_contradict() {
    let mut drill = OriginDrill::new();
    let [a, b, c] = HONEST;
    drill.run(20, &HONEST);
    for second in 0..20 {
        let liar = LIAR + 2 * second;
        let lies = [liar, liar + 1].map(|origin| (origin, 3, LIE_OF_ALL));
        drill.run(1, &[a, b, c, lies[0], lies[1]]);
    }
    assert!(
        drill.off() < 1.4 && drill.spread() < 1.25,
        "off by {}, {:?}",
        drill.off(),
        drill.speeds()
    );
}

#[test]
fn a_liar_among_four_teaches_no_prefill_by_prompts_that_waited() {
    for lie in [LIE, LIE_OF_ALL] {
        let mut drill = OriginDrill::new();
        let [a, b, c] = HONEST;
        drill.run(10, &HONEST);
        let waited: Report = |row| {
            row.gap = None;
            row.ttft_ms = row.first_token.map(|first| first.service_ms + 1.0);
        };
        for _ in 0..20 {
            drill.run(1, &HONEST);
            drill.report(40, lie, waited);
        }
        assert!(drill.off() < 1.5, "off by {}", drill.off());
        drill.run(10, &[a, b, c]);
        assert!(drill.off() < 1.5, "later off by {}", drill.off());
    }
}

/// Votes on engine 0, where the third vote is 0.
fn vote(
    votes: &mut OriginVotes,
    origin: u64,
    time: VotedTime,
    log: f64,
    now_ms: u64,
) -> OriginTrust {
    votes.note(origin, now_ms);
    let mut ms = 100.0;
    let sample = VotedSample::new(time, Some([log, 0.0]), &mut ms);
    votes.vote(origin, engine(0), sample, now_ms)
}

#[test]
fn each_origin_has_one_vote_on_prompts_that_waited() {
    use VotedTime::{Prefill, QueuedPrefill};
    for honest_times in [vec![Prefill, QueuedPrefill], vec![QueuedPrefill]] {
        let mut votes = OriginVotes::default();
        for _ in 0..8 {
            for time in &honest_times {
                vote(&mut votes, 1, *time, 0.0, 1_000);
            }
            for time in [Prefill, QueuedPrefill] {
                vote(&mut votes, LIAR, time, 2.3, 1_000);
            }
        }
        let honest = vote(&mut votes, 1, QueuedPrefill, 0.0, 1_000);
        assert_eq!(honest, OriginTrust::Unconfirmed, "{honest_times:?}");
        let liar = vote(&mut votes, LIAR, QueuedPrefill, 2.3, 1_000);
        assert_eq!(liar, OriginTrust::Contradicted, "{honest_times:?}");
    }
}

#[test]
fn old_votes_on_prompts_that_did_not_wait_outvote_no_origin() {
    let mut votes = OriginVotes::default();
    for origin in [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3] {
        vote(&mut votes, origin, VotedTime::Prefill, 0.0, 1_000);
    }
    let later = 1_000 + ACTIVE_MS;
    votes.note(5, later);
    for _ in 0..8 {
        let trust = vote(&mut votes, 4, VotedTime::QueuedPrefill, 1.5, later);
        assert_eq!(trust, OriginTrust::Unjudged);
    }
}

#[test]
fn two_liars_of_five_do_not_win() {
    let mut drill = OriginDrill::new();
    let [a, b, c] = HONEST;
    drill.run(30, &[a, b, c, (LIAR, 50, LIE), (LIAR + 1, 50, LIE)]);
    assert!(
        drill.spread() < 1.25 && drill.off() < 1.4,
        "{:?}, off by {}",
        drill.speeds(),
        drill.off()
    );
}

#[test]
fn a_slow_engine_is_learned_from_origins_of_equal_and_unequal_traffic() {
    for origins in [
        vec![
            (1, 5, SLOW_2),
            (2, 5, SLOW_2),
            (3, 5, SLOW_2),
            (4, 5, SLOW_2),
        ],
        vec![(1, 18, SLOW_2), (2, 2, SLOW_2)],
        vec![(1, 45, SLOW_2), (2, 5, SLOW_2)],
    ] {
        let mut drill = OriginDrill::new();
        drill.run(40, &origins);
        let (prefill, decode) = drill.speeds()[2];
        assert!(
            prefill > 1.5 && decode > 1.5 && drill.off() < 1.4,
            "{}: {:?}, off by {}",
            origins.len(),
            drill.speeds(),
            drill.off()
        );
    }
}

#[test]
fn what_a_liar_taught_alone_is_forgotten_within_30_s_of_its_silence() {
    // At first only the origin with false reports observes, then the others observe too.
    let mut drill = OriginDrill::new();
    drill.run(10, &[(LIAR, 100, LIE)]);
    assert!(drill.spread() > 4.0, "{:?}", drill.speeds());
    drill.run(30, &HONEST);
    assert!(
        drill.spread() < 1.25 && drill.off() < 1.5,
        "{:?}, off by {}",
        drill.speeds(),
        drill.off()
    );
    // The other origins observe only replies that are not streamed.
    let mut drill = OriginDrill::new();
    for _ in 0..20 {
        drill.run(1, &[(LIAR, 30, LIE)]);
        drill.run_without_times(1, 1);
    }
    assert!(drill.spread() < 1.25, "{:?}", drill.speeds());
    drill.run_without_times(30, 1);
    let model = drill.model();
    let prior = StepModel::default();
    assert_eq!(model.prefill(), prior.prefill());
    assert_eq!(model.decode(), prior.decode());
}

/// The other origins send all requests to the engine that the false reports call fast. So none of
/// them observes that the other engines are just as fast.
#[test]
fn a_lie_about_engines_that_get_no_requests_is_forgotten_within_30_s() {
    let mut drill = OriginDrill::new();
    drill.run(10, &[(LIAR, 100, LIE_EXCEPT_3)]);
    assert!(drill.spread() > 3.0, "{:?}", drill.speeds());
    drill.run_at(30, &HONEST, Some(3));
    assert!(drill.spread() < 1.25, "{:?}", drill.speeds());
}

#[test]
fn an_honest_origin_that_leaves_takes_nothing_along() {
    let mut drill = OriginDrill::new();
    drill.run(30, &[(1, 20, SLOW_2)]);
    let mut before = drill.off();
    assert!(before < 1.4, "{before}");
    for second in 0..40 {
        drill.run(1, &[(2, 20, SLOW_2)]);
        before = drill.off();
        assert!(before < 1.4, "off by {before} after {second} s");
    }
    assert!(drill.speeds()[2].0 > 1.5, "{:?}", drill.speeds());
}

#[test]
fn a_few_samples_of_an_origin_that_leaves_a_quiet_pool_take_nothing_along() {
    for report in [LIE_OF_ALL, EQUAL] {
        let mut drill = OriginDrill::new();
        drill.run(30, &[(1, 20, SLOW_2)]);
        drill.run(1, &[(LIAR, 10, report)]);
        // In a quiet pool, too few samples arrive for a vote.
        drill.run_without_times(40, 1);
        let prior = StepModel::default();
        assert_ne!(drill.model().prefill(), prior.prefill());
        assert_ne!(drill.model().decode(), prior.decode());
    }
}

#[test]
fn a_liar_cannot_make_the_learner_forget_again_and_again() {
    let mut drill = OriginDrill::new();
    let [a, b, c] = HONEST;
    drill.run(30, &HONEST);
    for _ in 0..10 {
        drill.run(5, &[a, b, c, (LIAR, 50, EQUAL)]);
        drill.run(5, &[a, b, c, (LIAR, 50, LIE_OF_ALL)]);
        assert!(drill.off() < 1.5, "off by {}", drill.off());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Whatever numbers other origins report, the model stays valid. After five seconds it has
    /// learned the times on which the three honest origins agree.
    #[test]
    fn any_lies_leave_a_model_that_fits(
        lies in prop::collection::vec((0..6_u16, any::<f32>(), any::<f32>(), any::<f32>(), 4..7_u64), 0..200),
    ) {
        let mut drill = OriginDrill::new();
        drill.run(8, &HONEST);
        for (slot, uncached, service_ms, gap_ms, origin) in lies {
            let mut row = drill.row(slot, 1.0);
            row.first_token = Some(FirstToken { uncached_tokens: uncached, prompt_tokens: uncached.abs(), service_ms });
            row.gap = Some(TokenGap { batch: service_ms, context_tokens: uncached, gap_ms });
            let verdict = drill.learner.observe_of(origin, &row, None);
            prop_assert_ne!(verdict, ObservationVerdict::Censored);
        }
        drill.run(5, &HONEST);
        prop_assert!(drill.off() < 2.0, "off by {}", drill.off());
        prop_assert!(drill.spread() < 1.5, "{:?}", drill.speeds());
    }
}
