//! `marginal-cost-scorer`: the best is where the request costs least, its own time and what it imposes on those already there.
//!
//! ```text
//!  S  = v (c0 + c1 u + c2 (n² - (n-u)²)) + A     its prefill there, u of its n prompt tokens uncached; A: loading its adapter (below);
//!                                                S', the same at an average endpoint
//!  W  = v (c0 P / (1 + P/4) + c1 U + c2 Q)       that of the P prompts that wait there, of U uncached tokens and Q pairs of tokens: what tokens
//!                                                cost adds up, but prompts share steps
//!                                                + μ o w D min(u, lack) / C: of C tokens of KV memory it lacks so many of those it needs, and
//!                                                all there give back what they hold in the lifetime of a request
//!  D  = e0 + e1 (B+1) + e2 (K+n)                 a decode step there with it; B requests in flight with K tokens of context
//!  J  = W + S                                    it waits for its first token
//!     + η (B + Bavg) W / 2                       a place behind a long queue is also a place in a long batch (Bavg, the mean B)
//!     + ψ γ B S                                  its prefill holds up the others: there
//!     + ψ (1-γ) Bavg (S + S') / 2                and by and by everywhere, where an average endpoint does that work: an hour of a slow one is
//!                                                worth less
//!     + ζ B W S / (o w D + W + S)                and those who come while it waits: B in each lifetime of a request there
//!     + κ r / (1 + r) c1 u                       a copy of what few ask for takes the place of what others do
//!     + φ o (w D + w B (e1 + e2 n) / 2)          o tokens of output: its own steps, and what it adds to those of others; none at a stage that
//!                                                only works through the prompt
//!  J (1 - χ a (1 - U/C))                         where others hold its prefix as well: a of what fits there was given since it was asked for;
//!                                                U of C tokens of KV memory in use
//! ```
//!
//! All of it is known at the pick: n, u, B, K and the sums of W from the ledger and the prefix index, which change at the pick; c, e, o and
//! each endpoint's speeds v, w from the step model ([`crate::latency::step`]), learned online. No engine has to report anything. Tokens are
//! estimates, and the step model is learned in the same estimates, so another tokeniser is another c1 and e2 and nothing else.
//!
//! Where an engine does report its KV memory and how much of it is in use, a prompt that finds none free waits for requests to end, however short
//! the queue. It lacks what it needs beyond the free, of which prompts that wait and the output of those who run take their part first. Never
//! more than it needs: what is short beyond that is everybody's, and to flee from it to where a prefix is not held takes more memory still.
//!
//! Several copies of a prefix are a choice between queues, as long as each is asked for before it is evicted. So the older copy is preferred (χ),
//! where memory is not short.
//!
//! A is 0 where the engine runs the adapter or was given it lately, what a load takes where there is a place for it, and sixteen times that where another
//! adapter has to go. That one is wanted again as well, goes where a third has to make room for it, and so on; and a place is had only when nobody
//! there uses its adapter any more. How often is simulated, not derived: eight times is too little where loads take twice as long as thought, thirty-two
//! keeps requests in queues.
//!
//! The score is the lowest J over J: 1 is the best, and a half costs twice as much. ψ is what makes the policy: a miss on a full pool costs
//! everyone, so hits are kept; κ keeps them on an empty one, too, where a miss harms nobody yet. Not those of a prefix that everybody asks for: r
//! prompts like this one were given to each endpoint, on average, since it was asked for last; where that is much less than one, every endpoint
//! may as well have a copy.

use crate::in_flight::{ATTENTION_UNIT, Load, Prefills};
use crate::latency::step::StepModel;
use crate::local::AdapterRoom;
use crate::plugin::{Context, Default, InvalidParameter, Kind, Parameter, Parameters, Plugin, PluginType, Scorer, State, for_people};
use crate::scorer::PREFIX_PRODUCER;
use crate::snapshot::EndpointIndex;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "marginal-cost-scorer",
    kind: Kind::Scorer,
    doc: for_people(
        "min J / J, J = (1 - refresh a (1 - U / C)) (W + S + queueExternality (B + Bavg) W / 2 + externality (ownBatchShare B S + (1 - ownBatchShare) Bavg S') + arrivalExternality B W S / (o D + W + S) + displacement r / (1 + r) c1 u + decodeWeight o (D + B (e1 + e2 n) / 2)): S its prefill there in ms, S' the mean of that and of its prefill at an average endpoint, u its uncached tokens, r the prompts each endpoint was given since the longest prefix of it was asked for, W the prefill of prompts waiting there and, where the engine tells of its KV memory, memoryWeight o D min(u, lack) / C, U of its C tokens in use and lack of them not free for this prompt, B requests in flight, D a decode step, o the output expected, none at a stage before decode, a what the endpoint was given since it was asked for the prefix, as a share of what it holds, where others hold that as well. For the most requests within their SLOs rather than the lowest latency: externality 2, ownBatchShare 1, queueExternality 0, arrivalExternality 0, decodeWeight 1.3.",
    ),
    source: for_people("ours; docs/routing-quality.md"),
    parameters: &[
        Parameter {
            name: "externality",
            default: Default::Number(1.6),
            doc: for_people("what a ms of prefill costs each request it holds up, 0 to 100"),
        },
        Parameter {
            name: "ownBatchShare",
            default: Default::Number(0.22),
            doc: for_people("how far those held up are the endpoint's own requests rather than the pool's mean, 0 to 1"),
        },
        Parameter {
            name: "arrivalExternality",
            default: Default::Number(2.5),
            doc: for_people("what a ms of prefill costs each request that comes while it waits, 0 to 100"),
        },
        Parameter {
            name: "queueExternality",
            default: Default::Number(0.35),
            doc: for_people("what a ms of waiting costs for each request in flight, half of them there and half the pool's mean, 0 to 100"),
        },
        Parameter {
            name: "displacement",
            default: Default::Number(55.0),
            doc: for_people(
                "what a ms of computing uncached tokens costs for what is displaced from the cache, where few ask for the prefix, 0 to 1000",
            ),
        },
        Parameter {
            name: "decodeWeight",
            default: Default::Number(0.6),
            doc: for_people("what a ms of decoding costs against one of waiting for the first token, 0 to 100"),
        },
        Parameter {
            name: "adapterLoadMs",
            default: Default::Number(100.0),
            doc: for_people("what loading a LoRA adapter takes, ms; counts sixteen times where another has to go; 0 to 600000"),
        },
        Parameter {
            name: "memoryWeight",
            default: Default::Number(2.0),
            doc: for_people("what a ms of waiting for KV memory costs, by the engine's own word of how much is in use, 0 to 100"),
        },
        Parameter {
            name: "refresh",
            default: Default::Number(0.6),
            doc: for_people(
                "how much less an endpoint costs when its copy of a prefix that others hold as well is about to be evicted, as a share, 0 to 1",
            ),
        },
        PREFIX_PRODUCER,
    ],
    needs: &[
        State::InFlight,
        State::PrefixIndex,
        State::Prompt,
        State::StepModel,
        State::Adapters,
        State::AdapterRooms,
        State::KvCacheUtilization,
    ],
    build,
};

/// Loads that one counts for where it displaces another adapter.
const DISPLACING: f32 = 16.0;

/// Prompts that however long a queue counts for at most, as to what each costs beside its tokens.
const SHARING_PROMPTS: f32 = 4.0;

/// Of an engine's KV memory, what is there to be used: beyond it those who run have to make room for one another.
const USABLE: f32 = 0.95;

#[derive(Debug)]
struct MarginalCost {
    externality: f32,
    own_batch_share: f32,
    arrival_externality: f32,
    queue_externality: f32,
    displacement: f32,
    decode_weight: f32,
    adapter_load_ms: f32,
    memory_weight: f32,
    refresh: f32,
}

/// What is asked of every endpoint alike.
struct Asked<'a> {
    step: &'a StepModel,
    prompt_tokens: f32,
    /// Expected of it here.
    output_tokens: f32,
    /// What a ms of computing uncached tokens costs for what is displaced.
    displacement: f32,
}

/// What the request would cost at one endpoint: J = fixed + what it costs each of the pool's mean batch, times that.
#[derive(Clone, Copy)]
struct Cost {
    fixed: f32,
    of_mean_batch: f32,
}

/// One endpoint as the formula sees it.
struct Place {
    load: Load,
    speed: (f32, f32),
    uncached_tokens: f32,
    adapter_ms: f32,
    memory: Option<Memory>,
    /// What it was given since it was asked for a prefix that others hold as well, as a share of what it can hold.
    prefix_age: f32,
}

/// KV memory of an engine, by its own word, in tokens.
struct Memory {
    capacity: f32,
    used: f32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    #[expect(clippy::cast_possible_truncation, reason = "small numbers of a few digits")]
    let number = |name, max| parameters.number(name, 0.0..=max).map(|number| number as f32);
    Ok(Plugin::Scorer(Box::new(MarginalCost {
        externality: number("externality", 100.0)?,
        own_batch_share: number("ownBatchShare", 1.0)?,
        arrival_externality: number("arrivalExternality", 100.0)?,
        queue_externality: number("queueExternality", 100.0)?,
        displacement: number("displacement", 1_000.0)?,
        decode_weight: number("decodeWeight", 100.0)?,
        adapter_load_ms: number("adapterLoadMs", 600_000.0)?,
        memory_weight: number("memoryWeight", 100.0)?,
        refresh: number("refresh", 1.0)?,
    })))
}

// === impl MarginalCost ===

impl MarginalCost {
    fn cost(&self, asked: &Asked<'_>, place: &Place) -> Cost {
        let ([_, e1, e2], output) = (asked.step.decode(), asked.output_tokens);
        let [_, c1, _] = asked.step.prefill();
        let (v, w) = place.speed;
        let batch = whole(u64::from(place.load.requests));
        let context = whole(place.load.decode_tokens.saturating_add(place.load.prefills.prompt_tokens));
        let work_ms = asked.step.prefill_ms(place.uncached_tokens, asked.prompt_tokens);
        let service_ms = v * work_ms + place.adapter_ms;
        let step_ms = asked.step.decode_ms(batch + 1.0, context + asked.prompt_tokens).max(f32::MIN_POSITIVE);
        let own_decode_ms = output * w * step_ms;
        let memory_ms = place.memory.as_ref().map_or(0.0, |memory| own_decode_ms * memory.lacking(asked, place));
        let waiting_ms = v * prefills_ms(asked.step, &place.load.prefills) + self.memory_weight * memory_ms;
        let others_decode_ms = output * w * batch * (e1 + e2 * asked.prompt_tokens) / 2.0;
        let lifetime_ms = (own_decode_ms + waiting_ms + service_ms).max(f32::MIN_POSITIVE);
        let coming = batch * (waiting_ms / lifetime_ms);
        let queue_externality = self.queue_externality / 2.0;
        let own_externality = self.externality * self.own_batch_share;
        let held_up_ms = (service_ms + work_ms + place.adapter_ms) / 2.0;
        let fixed = waiting_ms * (1.0 + queue_externality * batch)
            + service_ms * (1.0 + own_externality * batch + self.arrival_externality * coming)
            + asked.displacement * c1 * place.uncached_tokens
            + self.decode_weight * (own_decode_ms + others_decode_ms);
        let of_mean_batch = queue_externality * waiting_ms + self.externality * (1.0 - self.own_batch_share) * held_up_ms;
        let in_use = place.memory.as_ref().map_or(0.0, |memory| memory.used / memory.capacity);
        let refreshing = 1.0 - self.refresh * place.prefix_age * (1.0 - in_use);
        Cost { fixed: fixed * refreshing, of_mean_batch: of_mean_batch * refreshing }
    }

    fn adapter_ms(&self, context: &Context<'_>, endpoint: EndpointIndex) -> f32 {
        match context.local.adapter_room(endpoint) {
            AdapterRoom::Unknown | AdapterRoom::Loaded => 0.0,
            _ if runs(context, endpoint) => 0.0,
            AdapterRoom::Free => self.adapter_load_ms,
            AdapterRoom::Full { .. } => DISPLACING * self.adapter_load_ms,
        }
    }
}

impl Scorer for MarginalCost {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let (step, idle) = (context.snapshot.step(), context.local.prefix_idle.max(0.0));
        let rarity = if idle.is_finite() { idle / (1.0 + idle) } else { 1.0 };
        let prompt_tokens = whole(u64::from(context.request.prompt_tokens));
        let output_tokens = if context.early_stage { 0.0 } else { step.output_tokens() };
        let asked = Asked { step, prompt_tokens, output_tokens, displacement: rarity * self.displacement };
        let mut of_mean_batch = vec![0.0_f32; endpoints.len()];
        let mut requests = 0_u64;
        for ((score, cost), &endpoint) in scores.iter_mut().zip(&mut of_mean_batch).zip(endpoints) {
            let place = Place {
                load: context.load(endpoint),
                speed: context.snapshot.endpoint(endpoint).map_or((1.0, 1.0), |e| asked.step.speed(e.id)),
                uncached_tokens: whole(u64::from(context.tokens_not_drawing(endpoint))),
                adapter_ms: self.adapter_ms(context, endpoint),
                memory: Memory::of(context, endpoint),
                prefix_age: context.local.prefix_age(endpoint),
            };
            requests += u64::from(place.load.requests);
            Cost { fixed: *score, of_mean_batch: *cost } = self.cost(&asked, &place);
        }
        let mean_batch = whole(requests) / whole(endpoints.len() as u64).max(1.0);
        let mut lowest = f32::INFINITY;
        for (score, cost) in scores.iter_mut().zip(&of_mean_batch) {
            *score += mean_batch * cost;
            lowest = lowest.min(*score);
        }
        for score in scores {
            *score = if *score > lowest { lowest / *score } else { 1.0 };
        }
    }
}

// === impl Memory ===

impl Memory {
    fn of(context: &Context<'_>, endpoint: EndpointIndex) -> Option<Self> {
        let metrics = context.metrics(endpoint)?;
        let capacity = whole(u64::from(metrics.kv_blocks?) * u64::from(metrics.kv_block_tokens?));
        let used = context.metric(endpoint, |metrics| metrics.kv_cache_utilization)?.min(1.0) * capacity;
        (capacity > 0.0).then_some(Self { capacity, used })
    }

    /// How much of it the request needs and does not find, as a share. Half of the prompts that are there without a first token have theirs already,
    /// and those who run are half through with their output.
    fn lacking(&self, asked: &Asked<'_>, place: &Place) -> f32 {
        let output = asked.output_tokens * (whole(u64::from(place.load.requests)) + 1.0);
        let taken = self.used + (whole(place.load.prefills.prompt_tokens) + output) / 2.0;
        let lacking = taken + place.uncached_tokens - USABLE * self.capacity;
        lacking.clamp(0.0, place.uncached_tokens) / self.capacity
    }
}

/// Does the engine say that it runs the adapter?
fn runs(context: &Context<'_>, endpoint: EndpointIndex) -> bool {
    let lora = context.metrics(endpoint).and_then(|metrics| metrics.lora.as_ref());
    lora.is_some_and(|lora| lora.running.iter().any(|adapter| **adapter == *context.request.model))
}

/// How long these prompts take at an average endpoint, ms. The constant was learned of prompts that came one by one: those of a queue share steps.
fn prefills_ms(step: &StepModel, prefills: &Prefills) -> f32 {
    let [c0, c1, c2] = step.prefill();
    let prompts = whole(u64::from(prefills.prompts));
    c0 * prompts / (1.0 + prompts / SHARING_PROMPTS)
        + c1 * whole(prefills.uncached_tokens)
        + c2 * (whole(prefills.attention) * whole(ATTENTION_UNIT))
}

/// A count as an f32: times are no better known than to seven digits.
#[expect(clippy::cast_precision_loss, reason = "said above")]
fn whole(count: u64) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING_BUT_ITSELF: MarginalCost = MarginalCost {
        externality: 0.0,
        own_batch_share: 0.0,
        arrival_externality: 0.0,
        queue_externality: 0.0,
        displacement: 0.0,
        decode_weight: 0.0,
        adapter_load_ms: 100.0,
        memory_weight: 0.0,
        refresh: 0.0,
    };

    /// A prompt of 1,000 tokens, all uncached.
    fn asked(step: &StepModel) -> Asked<'_> {
        Asked { step, prompt_tokens: 1_000.0, output_tokens: 200.0, displacement: 0.0 }
    }

    fn place(load: Load, speed: (f32, f32), adapter_ms: f32) -> Place {
        Place { load, speed, uncached_tokens: 1_000.0, adapter_ms, memory: None, prefix_age: 0.0 }
    }

    fn near(found: f32, expected: f32) {
        assert!((found / expected - 1.0).abs() < 1e-5, "{found}, not {expected}");
    }

    #[test]
    fn others_are_held_up_by_half_of_what_a_slow_endpoint_takes_longer() {
        let (scorer, step) = (MarginalCost { externality: 1.0, ..NOTHING_BUT_ITSELF }, StepModel::default());
        let held_up_ms = |speed| scorer.cost(&asked(&step), &place(Load::default(), (speed, 1.0), 30.0)).of_mean_batch;
        near((held_up_ms(3.0) - 30.0) / (held_up_ms(1.0) - 30.0), 2.0);
    }

    #[test]
    fn prompts_that_wait_share_steps_and_add_up_in_tokens() {
        let step = StepModel::of([12.0, 0.05, 0.0], [11.0, 0.025, 8e-5], 200.0);
        let prefills = |prompts, uncached_tokens| Prefills { prompts, uncached_tokens, ..Prefills::default() };
        near(prefills_ms(&step, &prefills(1, 400)), 12.0 / 1.25 + 20.0);
        near(prefills_ms(&step, &prefills(8, 3_200)), 12.0 * 8.0 / 3.0 + 160.0);
    }

    #[test]
    fn a_prompt_waits_for_the_memory_it_lacks_and_never_for_more_than_it_needs() {
        let step = StepModel::default();
        let scorer = MarginalCost { memory_weight: 1.0, ..NOTHING_BUT_ITSELF };
        let waits_ms = |used, prefills| {
            let place =
                Place { memory: Some(Memory { capacity: 10_000.0, used }), ..place(Load { prefills, ..Load::default() }, (1.0, 1.0), 0.0) };
            let lifetime_ms = 200.0 * step.decode_ms(1.0, whole(prefills.prompt_tokens) + 1_000.0);
            let queue_ms = prefills_ms(&step, &prefills);
            (scorer.cost(&asked(&step), &place).fixed - queue_ms - step.prefill_ms(1_000.0, 1_000.0)) / lifetime_ms
        };
        // 9,500 are there to be used; 100 of its own output are counted.
        near(1.0 + waits_ms(8_400.0, Prefills::default()), 1.0);
        near(waits_ms(9_000.0, Prefills::default()), 0.06);
        near(waits_ms(8_600.0, Prefills { prompt_tokens: 1_000, ..Prefills::default() }), 0.07);
        near(waits_ms(10_000.0, Prefills { prompt_tokens: 90_000, ..Prefills::default() }), 0.1);
    }

    #[test]
    fn an_older_copy_costs_less_where_memory_is_there() {
        let (scorer, step) = (MarginalCost { refresh: 0.6, ..NOTHING_BUT_ITSELF }, StepModel::default());
        let cost = |prefix_age, used| {
            let memory = Some(Memory { capacity: 1e6, used });
            scorer.cost(&asked(&step), &Place { prefix_age, memory, ..place(Load::default(), (1.0, 1.0), 0.0) }).fixed
        };
        near(cost(0.5, 0.0) / cost(0.0, 0.0), 0.7);
        near(cost(0.5, 5e5) / cost(0.0, 0.0), 0.85);
        near(cost(0.5, 1e6) / cost(0.0, 0.0), 1.0);
    }

    #[test]
    fn a_slow_endpoint_costs_as_many_times_more_of_what_is_done_there() {
        let step = StepModel::default();
        let load = Load { requests: 5, prefills: Prefills { prompts: 2, uncached_tokens: 700, ..Prefills::default() }, ..Load::default() };
        let fixed = |scorer: &MarginalCost, speed| scorer.cost(&asked(&step), &place(load, speed, 0.0)).fixed;
        near(fixed(&NOTHING_BUT_ITSELF, (2.0, 3.0)), 2.0 * fixed(&NOTHING_BUT_ITSELF, (1.0, 1.0)));
        let decoding = MarginalCost { decode_weight: 1.0, ..NOTHING_BUT_ITSELF };
        let decode = |speed| fixed(&decoding, (1.0, speed)) - fixed(&NOTHING_BUT_ITSELF, (1.0, speed));
        near(decode(3.0), 3.0 * decode(1.0));
    }
}
