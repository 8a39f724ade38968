//! Compares the numbers learned from fixed streams of outcomes with `tests/latency/learned.txt`.
//! Other tests check that the numbers are right within the noise. This test detects every change of
//! the numbers.
//!
//! `UPDATE_GOLDENS=1` writes the present result into the file; read the diff before committing it.
//! All mathematics is from the crate `libm`, so builds with and without optimisation agree to the
//! last bit.

use std::fmt::Write;

use super::*;
use crate::Calibration;
use scheduler::latency::{Conditions, FirstToken, TokenGap};
use scheduler::{Rng, Slot};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/latency/learned.txt");

const HEAD: &str = "\
# What the latency learner learns from fixed streams of outcomes; times are in ms. An endpoint is written slot.generation.
# To accept the present result: UPDATE_GOLDENS=1 cargo test -p learning --lib golden
";

/// The number of endpoints in the pool.
const SLOTS: u16 = 4;

/// A pool with its learner and the model last published.
struct GoldenPool {
    rng: Rng,
    learner: LatencyLearner,
    model: Option<LatencyModel>,
    now_ms: u64,
    /// The factor on the times of each slot's engine.
    factors: [f32; SLOTS as usize],
    generations: [u32; SLOTS as usize],
    /// The accuracy of the predictions of TTFT and TPOT.
    calibrations: [Calibration; 2],
    text: String,
}

/// Returns TTFT and TPOT of a request under these conditions, before noise.
type TrueTimes = fn(&Conditions) -> (f32, f32);

/// Returns the times of an engine whose prefills queue, and which preempts requests when its cache
/// is nearly full. Preemption makes a jump that no sum of terms can express.
fn engine(c: &Conditions) -> (f32, f32) {
    let preempts = if c.kv_utilization.is_some_and(|share| share > 0.7) {
        1.6
    } else {
        1.0
    };
    (
        preempts * (25.0 + 0.04 * (c.uncached_tokens + c.prefill_tokens)),
        preempts * (8.0 + 0.3 * c.requests),
    )
}

/// Returns the times after an upgrade that makes each token slower and everything else faster.
fn upgraded(c: &Conditions) -> (f32, f32) {
    (
        5.0 + 0.1 * (c.uncached_tokens + c.prefill_tokens),
        2.0 + 1.5 * c.requests,
    )
}

/// Returns the same times for all requests, as behind a gateway that delays every reply to these
/// times.
fn alike(_: &Conditions) -> (f32, f32) {
    (120.0, 15.0)
}

// === impl GoldenPool ===

impl GoldenPool {
    fn new(title: &str, seed: u64, learner: LatencyLearner) -> Self {
        Self {
            rng: Rng::seeded(seed),
            learner,
            model: None,
            now_ms: 0,
            factors: [1.0; SLOTS as usize],
            generations: [1; SLOTS as usize],
            calibrations: [Calibration::default(); 2],
            text: format!("\n== {title}\n"),
        }
    }

    fn conditions(&mut self) -> Conditions {
        let requests = (self.rng.open01() * 30.0).floor();
        let queued = (requests - 20.0).max(0.0);
        let prompt_tokens = 20.0 + (8_000.0 * self.rng.open01() * self.rng.open01()).floor();
        let scraped = self.rng.open01() < 0.9;
        Conditions {
            queued: scraped.then_some(queued),
            running: scraped.then_some(requests - queued),
            requests,
            prefill_tokens: queued * 1_500.0,
            context_tokens: (requests - queued) * 2_000.0,
            kv_utilization: scraped.then_some(requests / 30.0),
            prompt_tokens,
            uncached_tokens: (prompt_tokens * self.rng.open01()).floor(),
        }
    }

    /// Returns the observation of a request under random conditions, with noise of up to a quarter
    /// in both directions. The first token and one gap of the request are samples for the step
    /// model.
    fn outcome(&mut self, truth: TrueTimes) -> Observation {
        let slot = self.rng.below(usize::from(SLOTS));
        let conditions = self.conditions();
        let (ttft_ms, tpot_ms) = truth(&conditions);
        let output_tokens = 50 + u32::try_from(self.rng.below(100)).unwrap();
        let mut noisy = |ms: f32| self.factors[slot] * (0.75 + 0.5 * self.rng.open01()) * ms;
        let Conditions {
            requests,
            context_tokens,
            prompt_tokens,
            uncached_tokens,
            ..
        } = conditions;
        let service_ms = noisy(12.0 + 0.03 * uncached_tokens);
        Observation {
            endpoint: EndpointRef {
                slot: Slot(u16::try_from(slot).unwrap()),
                generation: Generation(self.generations[slot]),
            },
            conditions,
            ended: RequestEnd::Done,
            ttft_ms: Some(noisy(ttft_ms)),
            tpot_ms: Some(noisy(tpot_ms)),
            output_tokens: Some(output_tokens),
            first_token: Some(FirstToken {
                uncached_tokens,
                prompt_tokens,
                service_ms,
            }),
            gap: Some(TokenGap {
                batch: requests + 1.0,
                context_tokens,
                gap_ms: noisy(7.0 + 0.1 * requests + 1e-5 * context_tokens),
            }),
        }
    }

    /// Learns from an observation, and publishes if it is time. `has_model` says whether the proxy
    /// already had a model for a prediction.
    fn learn(&mut self, observation: &Observation, has_model: bool) {
        let said = self.model.as_ref().filter(|_| has_model).and_then(|model| {
            model
                .predict(observation.endpoint, &observation.conditions)
                .ok()
        });
        self.learner.observe(observation, said.as_ref());
        if let (Some(said), Some(ttft_ms), Some(tpot_ms)) =
            (said, observation.ttft_ms, observation.tpot_ms)
        {
            self.calibrations[0].add(said.ttft_ms, said.ttft_p90_ms, ttft_ms);
            self.calibrations[1].add(said.tpot_ms, said.tpot_p90_ms, tpot_ms);
        }
        self.now_ms += 100;
        self.model = self.learner.publish(self.now_ms).or(self.model.take());
    }

    /// Learns from this many outcomes, each changed by `change`, and describes the result.
    fn run(
        &mut self,
        what: &str,
        outcomes: usize,
        truth: TrueTimes,
        change: fn(usize, &mut Observation),
    ) {
        for at in 0..outcomes {
            let mut observation = self.outcome(truth);
            change(at, &mut observation);
            self.learn(&observation, at % 3 != 0);
        }
        let _ = write!(self.text, "\n-- after {outcomes} outcomes: {what}\n\n");
        self.describe();
    }

    fn describe(&mut self) {
        let mut text = std::mem::take(&mut self.text);
        let LearnerStatus {
            learned,
            censored,
            refused,
            window,
            adopted,
            rejected,
            drifts,
            ..
        } = self.learner.standing();
        let _ = writeln!(
            text,
            "learned {learned}, censored {censored}, refused {refused}, window {window}"
        );
        let _ = writeln!(
            text,
            "shapes adopted {adopted}, rejected {rejected}; drifts {drifts}"
        );
        for (name, calibration) in ["ttft", "tpot"].iter().zip(&self.calibrations) {
            let of =
                |number: Option<f64>| number.map_or("-".to_owned(), |number| digits(number as f32));
            let error = of(calibration.mape());
            let coverage = of(calibration.coverage90());
            let _ = writeln!(
                text,
                "{name}: predicted {}, mean error {error}, within p90 {coverage}",
                calibration.count()
            );
        }
        let step = self.learner.step(self.now_ms);
        let _ = writeln!(
            text,
            "prefill {}; decode {}",
            row(&step.prefill()),
            row(&step.decode())
        );
        let speeds = self
            .endpoints()
            .map(|endpoint| step.speed(endpoint))
            .map(|(prefill, decode)| row(&[prefill, decode]));
        let _ = writeln!(
            text,
            "output {}; speeds {}",
            digits(step.output_tokens()),
            speeds.collect::<Vec<_>>().join(", ")
        );
        match self.learner.model() {
            Some(model) => self.describe_model(&mut text, &model),
            None => text.push_str("no model\n"),
        }
        self.text = text;
    }

    fn endpoints(&self) -> impl Iterator<Item = EndpointRef> + '_ {
        (0..)
            .map(Slot)
            .zip(&self.generations)
            .map(|(slot, life)| EndpointRef {
                slot,
                generation: Generation(*life),
            })
    }

    fn describe_model(&self, text: &mut String, model: &LatencyModel) {
        let _ = writeln!(text, "limits {}", row(&model.limits));
        for (name, head) in [("ttft", &model.ttft), ("tpot", &model.tpot)] {
            let _ = writeln!(
                text,
                "{name}: {} samples, weights {}",
                head.samples,
                row(&head.shape.weights)
            );
            for tree in &head.shape.trees {
                let asks = tree
                    .features
                    .iter()
                    .zip(tree.thresholds)
                    .map(|(at, value)| {
                        format!("{} > {}", FEATURES[usize::from(*at)].name, digits(value))
                    });
                let _ = writeln!(
                    text,
                    "  tree {}: {}",
                    asks.collect::<Vec<_>>().join(", "),
                    row(&tree.leaves)
                );
            }
            let _ = writeln!(
                text,
                "  p90 up to {}: {} times the median, plus {}",
                row(&head.spread.ends),
                row(&head.spread.factors),
                digits(head.spread.level)
            );
        }
        let _ = writeln!(
            text,
            "\n{:<7}  {:<8}  {:>9}  {:>9}  {:>9}  {:>9}",
            "request", "endpoint", "ttft", "ttft p90", "tpot", "tpot p90"
        );
        let unknown = EndpointRef {
            slot: Slot(SLOTS),
            generation: Generation(1),
        };
        for (name, conditions) in probes() {
            for endpoint in self.endpoints().chain([unknown]) {
                match model.predict(endpoint, &conditions) {
                    Ok(Prediction {
                        ttft_ms,
                        ttft_p90_ms,
                        tpot_ms,
                        tpot_p90_ms,
                    }) => {
                        let said = [ttft_ms, ttft_p90_ms, tpot_ms, tpot_p90_ms]
                            .map(|ms| format!("  {:>9}", digits(ms)))
                            .concat();
                        let _ = writeln!(
                            text,
                            "{name:<7}  {:<8}{said}",
                            format!("{}.{}", endpoint.slot.0, endpoint.generation.0)
                        );
                    }
                    Err(why) => {
                        let _ = writeln!(text, "{name:<7}  any       abstains: {why:?}");
                        break; // the same for every endpoint
                    }
                }
            }
        }
    }
}

/// Returns conditions for which the models' predictions are printed.
fn probes() -> [(&'static str, Conditions); 4] {
    let of = |queued: f32, running: f32, [prompt_tokens, uncached_tokens]: [f32; 2]| Conditions {
        queued: Some(queued),
        running: Some(running),
        requests: queued + running,
        prefill_tokens: queued * 1_500.0,
        context_tokens: running * 2_000.0,
        kv_utilization: Some((queued + running) / 30.0).filter(|share| *share <= 1.0),
        prompt_tokens,
        uncached_tokens,
    };
    let idle = Conditions {
        prompt_tokens: 500.0,
        uncached_tokens: 500.0,
        ..Conditions::default()
    };
    [
        ("idle", idle),
        ("cached", of(0.0, 12.0, [4_000.0, 1_000.0])),
        ("queued", of(6.0, 20.0, [900.0, 900.0])),
        ("flooded", of(900.0, 20.0, [900.0; 2])),
    ]
}

/// Prints five significant digits, without trailing zeros.
fn digits(number: f32) -> String {
    if number == f32::MAX {
        return "any".to_owned();
    }
    let exponent: i32 = format!("{number:.4e}")
        .split_once('e')
        .map_or(0, |(_, exponent)| exponent.parse().unwrap());
    let text = format!("{number:.*}", usize::try_from(4 - exponent).unwrap_or(0));
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

fn row(numbers: &[f32]) -> String {
    numbers
        .iter()
        .map(|number| digits(*number))
        .collect::<Vec<_>>()
        .join(" ")
}

fn as_it_is(_: usize, _: &mut Observation) {}

/// Simulates a pool with engines of two speeds, and then all events that a pool can have.
fn eventful() -> GoldenPool {
    let mut pool = GoldenPool::new("a pool of two speeds", 1, LatencyLearner::default());
    pool.factors[2] = 2.0;
    pool.run("too few to say anything", 40, engine, as_it_is);
    pool.run(
        "one aborted, one impossible, some not streamed",
        120,
        engine,
        |at, observation| match at {
            20 => observation.ended = RequestEnd::Aborted,
            30 => observation.ttft_ms = Some(-1.0),
            40..50 => observation.tpot_ms = None,
            50..60 => observation.ttft_ms = None,
            60 => (observation.ttft_ms, observation.tpot_ms) = (None, None),
            _ => {}
        },
    );
    pool.run("a stall among them", 240, engine, |at, observation| {
        if at == 100 {
            observation.ttft_ms = Some(60_000.0);
            observation.tpot_ms = Some(4_000.0);
            observation
                .first_token
                .iter_mut()
                .for_each(|first| first.service_ms = 59_000.0);
            observation
                .gap
                .iter_mut()
                .for_each(|gap| gap.gap_ms = 5_000.0);
        }
    });
    pool.generations[1] = 2;
    pool.factors[1] = 0.6;
    pool.run(
        "endpoint 1 was replaced by a faster one",
        60,
        engine,
        as_it_is,
    );
    pool.factors = pool.factors.map(|factor| 1.6 * factor);
    pool.run("all slowed down to 1.6 times", 60, engine, as_it_is);
    pool.run("that lasts", 160, engine, as_it_is);
    pool.run(
        "other engines, whose times are made up otherwise",
        480,
        upgraded,
        as_it_is,
    );
    pool
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "UPDATE_GOLDENS is an environment variable, as with all goldens"
)]
fn every_number_that_is_learned_is_the_one_in_the_file() {
    let mut eventful = eventful();
    let mut next = GoldenPool::new(
        "another that starts from what was learned there",
        2,
        LatencyLearner::starting_from(
            &eventful.learner.step(eventful.now_ms),
            eventful.model.as_ref(),
        ),
    );
    next.describe();
    next.run(
        "of its own, too few to judge another by",
        180,
        engine,
        as_it_is,
    );
    let mut flat = GoldenPool::new(
        "a pool where nothing depends on anything",
        3,
        LatencyLearner::default(),
    );
    flat.run("the median serves best", 300, alike, as_it_is);
    let mut late = GoldenPool::new(
        "a pool that hardly streams at first, its steps known",
        4,
        LatencyLearner::starting_from(&eventful.learner.step(eventful.now_ms), None),
    );
    late.run(
        "ten times of tokens, so no model",
        37,
        engine,
        |at, observation| {
            observation.tpot_ms = observation.tpot_ms.filter(|_| at < 10);
        },
    );
    late.run("nothing but those", 40, engine, |_, observation| {
        observation.ttft_ms = None;
    });
    let mut young = GoldenPool::new("a young pool", 14, LatencyLearner::default());
    young.run(
        "the first shape that was judged, and adopted",
        64,
        engine,
        as_it_is,
    );
    let now = [
        HEAD,
        &eventful.text,
        &next.text,
        &flat.text,
        &late.text,
        &young.text,
    ]
    .concat();
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::write(FILE, &now).unwrap();
    }
    let then = std::fs::read_to_string(FILE).unwrap();
    let differs = then
        .lines()
        .zip(now.lines())
        .enumerate()
        .find(|(_, (then, now))| then != now);
    assert!(then == now, "{FILE} differs, first in {differs:?}");
}
