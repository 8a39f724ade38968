//! The greedy oracle. It knows the true caches (with the prompts that are still queued), the true
//! step times and the true output lengths. For each replica it simulates the requests there to
//! their end, with the new request and without, and picks the replica where all together end
//! soonest. It does not know later arrivals, so it is no bound: a policy that leaves room for them
//! can beat it. The policy that knows them is [`crate::world::clairvoyant`].

use crate::engine::{EngineInternals, EngineJob, SimulatedEngine};

/// The times of first tokens and of ends, which count alike, in ms: those of the request and those
/// of the others.
#[derive(Clone, Copy, Debug, Default)]
struct RolloutCost {
    own: f64,
    others: f64,
}

/// A prompt that waits for its prefill or is in it.
#[derive(Clone, Copy)]
struct QueuedPrompt {
    left: f64,
    done: f64,
    output: f64,
    own: bool,
}

/// A sequence that decodes: the step at which it ends, and its context minus the steps made.
#[derive(Clone, Copy)]
struct DecodingSequence {
    ends_at: f64,
    base: f64,
    own: bool,
}

struct Rollout<'e, 'w> {
    engine: &'e SimulatedEngine<'w>,
    now: f64,
    step: f64,
    /// In falling order of the end.
    decoding: Vec<DecodingSequence>,
    context: f64,
    out: RolloutCost,
}

/// The weight of the request's service time for each request at the engine.
const BATCH_WEIGHT: f64 = 0.5;

/// The greedy cost of a request at `now` at an engine with so many requests, ms.
pub(crate) fn greedy_cost<'w>(
    engine: &SimulatedEngine<'w>,
    job: &EngineJob<'w>,
    requests: f64,
    now: f64,
) -> f64 {
    let found = f64::from(engine.would_find(job));
    let inside = engine.inside();
    let prompt = f64::from(job.prompt);
    let own = QueuedPrompt {
        left: prompt - found,
        done: found,
        output: f64::from(job.output),
        own: true,
    };
    let without = Rollout::start(engine, now, &inside).run(&inside, None);
    let with = Rollout::start(engine, now, &inside).run(&inside, Some(own));
    let times = engine.spec().times;
    let service = times.prefill_ms(own.left, found) - times.prefill_ms(0.0, 0.0);
    with.own + (with.others - without.others) + BATCH_WEIGHT * requests * service
}

impl<'e, 'w> Rollout<'e, 'w> {
    fn start(engine: &'e SimulatedEngine<'w>, now: f64, inside: &EngineInternals) -> Self {
        let mut decoding: Vec<DecodingSequence> = inside
            .decodes
            .iter()
            .map(|&(left, context)| DecodingSequence {
                ends_at: left,
                base: context,
                own: false,
            })
            .collect();
        decoding.sort_by(|a, b| b.ends_at.total_cmp(&a.ends_at));
        let context = decoding.iter().map(|sequence| sequence.base).sum();
        let begins = engine
            .busy_until()
            .map_or(0.0, |ends| (ends - now).max(0.0));
        Self {
            engine,
            now: begins,
            step: 0.0,
            decoding,
            context,
            out: RolloutCost::default(),
        }
    }

    fn run(mut self, inside: &EngineInternals, own: Option<QueuedPrompt>) -> RolloutCost {
        let queue = inside
            .prefills
            .iter()
            .map(|&(left, done, output)| QueuedPrompt {
                left,
                done,
                output,
                own: false,
            });
        let mut queue: Vec<QueuedPrompt> = queue.chain(own).collect();
        queue.reverse();
        loop {
            if !queue.is_empty() {
                self.prefill_step(&mut queue);
            } else if let Some(next) = self.decoding.last() {
                let steps = (next.ends_at - self.step).max(1.0);
                self.decode_steps(steps);
            } else {
                return self.out;
            }
        }
    }

    /// One step: as much of the queue as fits into the budget, and a token for each sequence that
    /// decodes.
    fn prefill_step(&mut self, queue: &mut Vec<QueuedPrompt>) {
        let batch = self.decoding.len() as f64;
        let mut budget = (self.engine.spec().budget as f64 - batch).max(1.0);
        let times = self.engine.spec().times;
        let alone = times.decode_ms(batch, self.context + batch);
        let mut tokens = 0.0;
        let mut pairs = 0.0;
        let mut ended = Vec::new();
        while let Some(prompt) = queue.last_mut().filter(|_| budget > 0.0) {
            let chunk = prompt.left.min(budget);
            pairs += (prompt.done + chunk).powi(2) - prompt.done.powi(2);
            tokens += chunk;
            budget -= chunk;
            prompt.left -= chunk;
            prompt.done += chunk;
            if prompt.left <= 0.0 {
                ended.extend(queue.pop());
            }
        }
        // The cost of all chunks together, as of one prompt without cached tokens.
        let [p0, p1, p2] = times.prefill;
        self.now +=
            alone + times.slowdown * (p0 + p1 * tokens + p2 * pairs - times.decode[0]).max(0.0);
        self.step += 1.0;
        self.context += batch;
        self.pop_done();
        for prompt in ended {
            self.count(self.now, prompt.own);
            if prompt.output > 1.0 {
                let sequence = DecodingSequence {
                    ends_at: self.step + prompt.output - 1.0,
                    base: prompt.done - self.step,
                    own: prompt.own,
                };
                let place = self
                    .decoding
                    .partition_point(|other| other.ends_at > sequence.ends_at);
                self.decoding.insert(place, sequence);
                self.context += prompt.done;
            } else {
                self.count(self.now, prompt.own);
            }
        }
    }

    fn decode_steps(&mut self, steps: f64) {
        let times = self.engine.spec().times;
        let batch = self.decoding.len() as f64;
        let [d0, d1, d2] = times.decode;
        let grown = self.context * steps + batch * steps * (steps + 1.0) / 2.0;
        self.now += times.slowdown * (steps * (times.overhead + d0 + d1 * batch) + d2 * grown);
        self.step += steps;
        self.context += batch * steps;
        self.pop_done();
    }

    fn pop_done(&mut self) {
        while let Some(sequence) = self
            .decoding
            .last()
            .copied()
            .filter(|sequence| sequence.ends_at <= self.step)
        {
            self.decoding.pop();
            self.context -= sequence.base + self.step;
            self.count(self.now, sequence.own);
        }
    }

    fn count(&mut self, ms: f64, own: bool) {
        if own {
            self.out.own += ms;
        } else {
            self.out.others += ms;
        }
    }
}
