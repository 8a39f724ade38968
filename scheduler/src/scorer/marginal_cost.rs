//! `marginal-cost-scorer`: the best is where the request costs least, its own time and what it imposes on those already there.
//!
//! ```text
//!  S  = v (c0 + c1 u + c2 (n² - (n-u)²)) + A     its prefill there, u of its n prompt tokens uncached; A: loading its adapter (below);
//!                                                S', the same at an average endpoint
//!  W  = v (c0 P / (1 + P/4) + c1 U + c2 Q)       that of the P prompts that wait there, of U uncached tokens and Q pairs of tokens: what tokens
//!                                                cost adds up, but prompts share steps
//!                                                + μ o w D min(u, lack) / C: of C tokens of KV memory, U in use, it lacks so many of those it needs,
//!                                                and all there give back what they hold in the lifetime of a request
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
//!     + τ f                                         requests fail here more often than elsewhere, by a share f of them
//!     - χ a (1 - U/C) (Sn - S) (1 + ψ (γ B + (1-γ) Bavg))
//!                                                where others hold its prefix as well, of which a of what fits there was given since it was asked
//!                                                for: what its copy will save, Sn - S of an uncached prompt's Sn; J is W + S at least
//! ```
//!
//! All of it but U and C is known at the pick: n, u, B, K and the sums of W from the ledger and the prefix index, which change at the pick; c, e, o and
//! each endpoint's speeds v, w from the step model ([`crate::latency::step`]), learned online. No engine has to report anything. Tokens are
//! estimates, and the step model is learned in the same estimates, so another tokeniser is another c1 and e2 and nothing else.
//!
//! Where engines do report their KV memory and how much of it is in use, a prompt that finds none free waits for requests to end, however short
//! the queue. It lacks what it needs beyond the free, of which half of those that wait have theirs already. Never more than it needs: what is short
//! beyond that is everybody's, and to flee from it to where a prefix is not held takes more memory still. One that does not report it is taken for
//! the mean of those that do. (Where all requests decode after another engine's prefill, u is what is brought.)
//!
//! Several copies of a prefix are a choice between queues, as long as each is asked for before it is evicted. So the older copy is preferred (χ),
//! by no more than what making it again would cost, and where memory is not short.
//!
//! An endpoint that fails at once has nothing in flight, so it would look cheapest. A failed request costs the client everything, whatever time it took:
//! τ is what a patient client would have waited for a reply instead.
//!
//! A is 0 where the engine runs the adapter or was given it lately, what a load takes where there is a place for it, and sixteen times that where another
//! adapter has to go. That one is wanted again as well, goes where a third has to make room for it, and so on; and a place is had only when nobody
//! there uses its adapter any more. How often is simulated, not derived: eight times is too little where loads take twice as long as thought, thirty-two
//! keeps requests in queues.
//!
//! The score is the lowest J over J: 1 is the best, and a half costs twice as much. Costs that differ by less than they are known, by 2 % or 1 ms,
//! are equal: of those endpoints the one with the fewest requests in flight is the best, then the one that was picked least recently. So an engine
//! that seems to cost nothing, or the same whatever it is given, is loaded evenly all the same. ψ is what makes the policy: a miss on a full pool costs
//! everyone, so hits are kept; κ keeps them on an empty one, too, where a miss harms nobody yet. Not those of a prefix that everybody asks for: r
//! prompts like this one were given to each endpoint, on average, since it was asked for last; where that is much less than one, every endpoint
//! may as well have a copy.

use crate::in_flight::{ATTENTION_UNIT, Load, Prefills};
use crate::latency::step::StepModel;
use crate::local::AdapterRoom;
use crate::plugin::{Context, Default, InvalidParameter, Kind, Parameter, Parameters, Plugin, PluginType, Scorer, State, for_people};
use crate::scorer::PREFIX_PRODUCER;
use crate::snapshot::EndpointIndex;
use crate::sort::sort_by;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "marginal-cost-scorer",
    kind: Kind::Scorer,
    doc: for_people(
        "min J / J, J = W + S + queueExternality (B + Bavg) W / 2 + externality (ownBatchShare B S + (1 - ownBatchShare) Bavg S') + arrivalExternality B W S / (o D + W + S) + displacement r / (1 + r) c1 u + decodeWeight o (D + B (e1 + e2 n) / 2) + failureMs f - refresh a (1 - U / C) (Sn - S) (1 + externality (ownBatchShare B + (1 - ownBatchShare) Bavg)), at least W + S + failureMs f: f by how much a larger share of requests fails there than elsewhere, S its prefill there in ms, Sn that of all its n tokens, S' the mean of S and of its prefill at an average endpoint, u its uncached tokens, r the prompts each endpoint was given since the longest prefix of it was asked for, W the prefill of prompts waiting there and, where engines tell of their KV memory, memoryWeight o D min(u, lack) / C, U of its C tokens in use and lack of them not free for this prompt, B requests in flight, D a decode step, o the output expected, none at a stage before decode, a what the endpoint was given since it was asked for the prefix, as a share of what fits, where others hold that as well. For the most requests within their SLOs rather than the lowest latency: externality 2, ownBatchShare 1, queueExternality 0, arrivalExternality 0, decodeWeight 1.3.",
    ),
    source: for_people("ours; docs/reference/routing-quality.md"),
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
            name: "failureMs",
            default: Default::Number(10_000.0),
            doc: for_people("what a failed request costs where requests fail more often than elsewhere, ms, 0 to 600000"),
        },
        Parameter {
            name: "memoryWeight",
            default: Default::Number(2.0),
            doc: for_people("what a ms of waiting for KV memory costs, by the engine's own word of how much is in use, 0 to 100"),
        },
        Parameter {
            name: "refresh",
            default: Default::Number(1.0),
            doc: for_people(
                "what a ms of computing that a copy saves counts when it would be evicted soon and others hold the prefix as well, 0 to 100",
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

/// Costs that differ by no more than this share of the lowest, or by this many ms, are equal: a model that was learned tells no finer.
const EQUAL_SHARE: f32 = 0.02;
const EQUAL_MS: f32 = 1.0;

/// What the last of endpoints of equal cost is below the first: less than what the next cost is below all of them.
const EQUAL_SPAN: f32 = 0.01;

/// Of an engine's KV memory, what is there for new prompts: the rest is for the output of those who run.
const USABLE: f32 = 0.9;

#[derive(Debug)]
struct MarginalCost {
    externality: f32,
    own_batch_share: f32,
    arrival_externality: f32,
    queue_externality: f32,
    displacement: f32,
    decode_weight: f32,
    adapter_load_ms: f32,
    failure_ms: f32,
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
    /// Requests in flight at an average endpoint.
    mean_batch: f32,
}

/// One endpoint as the formula sees it.
struct Place {
    load: Load,
    speed: (f32, f32),
    uncached_tokens: f32,
    adapter_ms: f32,
    memory: Option<Memory>,
    /// By how much a larger share of requests fails here than elsewhere.
    failing: f32,
    /// What it was given since it was asked for a prefix that others hold as well, as a share of what it can hold.
    prefix_age: f32,
}

/// KV memory of an engine, by its own word, in tokens.
#[derive(Clone, Copy)]
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
        failure_ms: number("failureMs", 600_000.0)?,
        memory_weight: number("memoryWeight", 100.0)?,
        refresh: number("refresh", 100.0)?,
    })))
}

// === impl MarginalCost ===

impl MarginalCost {
    /// J.
    fn cost(&self, asked: &Asked<'_>, place: &Place) -> f32 {
        let ([_, e1, e2], output) = (asked.step.decode(), asked.output_tokens);
        let [_, c1, _] = asked.step.prefill();
        let (v, w) = place.speed;
        let batch = whole(u64::from(place.load.requests));
        let context = whole(place.load.decode_tokens.saturating_add(place.load.prefills.prompt_tokens));
        let work_ms = asked.step.prefill_ms(place.uncached_tokens, asked.prompt_tokens);
        let service_ms = v * work_ms + place.adapter_ms;
        let step_ms = asked.step.decode_ms(batch + 1.0, context + asked.prompt_tokens).max(f32::MIN_POSITIVE);
        let own_decode_ms = output * w * step_ms;
        let memory_ms = place.memory.map_or(0.0, |memory| own_decode_ms * memory.lacking(asked, place));
        let waiting_ms = v * prefills_ms(asked.step, &place.load.prefills) + self.memory_weight * memory_ms;
        let others_decode_ms = output * w * batch * (e1 + e2 * asked.prompt_tokens) / 2.0;
        let lifetime_ms = (own_decode_ms + waiting_ms + service_ms).max(f32::MIN_POSITIVE);
        let coming = batch * (waiting_ms / lifetime_ms);
        let (own, others) = (self.own_batch_share * batch, (1.0 - self.own_batch_share) * asked.mean_batch);
        let held_up_ms = own * service_ms + others * (service_ms + work_ms + place.adapter_ms) / 2.0;
        let cost = waiting_ms * (1.0 + self.queue_externality * (batch + asked.mean_batch) / 2.0)
            + service_ms * (1.0 + self.arrival_externality * coming)
            + self.externality * held_up_ms
            + asked.displacement * c1 * place.uncached_tokens
            + self.decode_weight * (own_decode_ms + others_decode_ms);
        let saved_ms = v * (asked.step.prefill_ms(asked.prompt_tokens, asked.prompt_tokens) - work_ms);
        let free = 1.0 - place.memory.map_or(0.0, |memory| memory.used / memory.capacity);
        let refreshed_ms = self.refresh * place.prefix_age * free * saved_ms * (1.0 + self.externality * (own + others));
        (cost - refreshed_ms).max(waiting_ms + service_ms) + self.failure_ms * place.failing
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
        let place = |&endpoint: &EndpointIndex| Place {
            load: context.load(endpoint),
            speed: context.snapshot.endpoint(endpoint).map_or((1.0, 1.0), |e| step.speed(e.id)),
            uncached_tokens: whole(u64::from(context.tokens_not_drawing(endpoint))),
            adapter_ms: self.adapter_ms(context, endpoint),
            memory: Memory::of(context, endpoint),
            failing: context.local.failing(endpoint),
            prefix_age: context.local.prefix_age(endpoint),
        };
        let mut places: Vec<Place> = endpoints.iter().map(place).collect();
        let requests = places.iter().map(|place| u64::from(place.load.requests)).sum();
        let mean_batch = whole(requests) / whole(endpoints.len() as u64).max(1.0);
        let asked = Asked { step, prompt_tokens, output_tokens, displacement: rarity * self.displacement, mean_batch };
        let (memory, copies) = (Memory::mean(&places), has_copies(context, endpoints));
        let mut lowest = f32::INFINITY;
        for (score, place) in scores.iter_mut().zip(&mut places) {
            place.memory = place.memory.or(memory);
            place.prefix_age = if copies { place.prefix_age } else { 0.0 };
            // Of absurd coefficients none is the best.
            *score = Some(self.cost(&asked, place)).filter(|cost| cost.is_finite()).unwrap_or(f32::MAX);
            lowest = lowest.min(*score);
        }
        let equal = lowest + EQUAL_MS.max(EQUAL_SHARE * lowest);
        let mut equals = Vec::with_capacity(endpoints.len());
        for ((score, &endpoint), place) in scores.iter_mut().zip(endpoints).zip(&places) {
            if *score <= equal {
                let last_pick = context.snapshot.id(endpoint).map_or(0, |id| context.local.in_flight.last_pick(id));
                equals.push(((place.load.requests, last_pick), score));
            } else {
                *score = lowest / *score;
            }
        }
        rank_equals(equals);
    }
}

/// Scores endpoints of equal cost by what is least of each; 1 for the first. Those that are the same in this too stay so.
fn rank_equals(mut equals: Vec<((u32, u64), &mut f32)>) {
    sort_by(&mut equals, |(one, _), (other, _)| one < other);
    let count = whole(equals.len() as u64);
    let (mut rank, mut before) = (0, None);
    for (at, (key, score)) in (0_u64..).zip(equals) {
        if before.replace(key) != Some(key) {
            rank = at;
        }
        *score = 1.0 - EQUAL_SPAN * whole(rank) / count;
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

    /// That of an average engine that tells; `None` where none does.
    fn mean(places: &[Place]) -> Option<Self> {
        let told = || places.iter().filter_map(|place| place.memory);
        let count = whole(told().count() as u64);
        let mean = |of: fn(Self) -> f32| told().map(of).sum::<f32>() / count;
        (count > 0.0).then(|| Self { capacity: mean(|memory| memory.capacity), used: mean(|memory| memory.used) })
    }

    /// How much of it the request needs and does not find, as a share. Half of those that wait have theirs already.
    fn lacking(&self, asked: &Asked<'_>, place: &Place) -> f32 {
        let taken = self.used + whole(place.load.prefills.uncached_tokens) / 2.0;
        let lacking = taken + place.uncached_tokens + asked.output_tokens - USABLE * self.capacity;
        lacking.clamp(0.0, place.uncached_tokens) / self.capacity
    }
}

/// Is there a choice between copies of the longest prefix?
fn has_copies(context: &Context<'_>, endpoints: &[EndpointIndex]) -> bool {
    let held = || endpoints.iter().map(|&endpoint| context.local.matched_blocks(endpoint));
    let longest = held().max().unwrap_or(0);
    !context.local.prefix_ages.is_empty() && held().filter(|&held| held == longest).nth(1).is_some()
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
        failure_ms: 0.0,
        memory_weight: 0.0,
        refresh: 0.0,
    };

    /// A prompt of 1,000 tokens, all uncached.
    fn asked(step: &StepModel) -> Asked<'_> {
        Asked { step, prompt_tokens: 1_000.0, output_tokens: 200.0, displacement: 0.0, mean_batch: 0.0 }
    }

    fn place(load: Load, speed: (f32, f32), adapter_ms: f32) -> Place {
        Place { load, speed, uncached_tokens: 1_000.0, adapter_ms, memory: None, failing: 0.0, prefix_age: 0.0 }
    }

    fn near(found: f32, expected: f32) {
        assert!((found / expected - 1.0).abs() < 1e-5, "{found}, not {expected}");
    }

    #[test]
    fn others_are_held_up_by_half_of_what_a_slow_endpoint_takes_longer() {
        let (scorer, step) = (MarginalCost { externality: 1.0, ..NOTHING_BUT_ITSELF }, StepModel::default());
        let held_up_ms = |speed| {
            let cost = |mean_batch| scorer.cost(&Asked { mean_batch, ..asked(&step) }, &place(Load::default(), (speed, 1.0), 30.0));
            cost(1.0) - cost(0.0)
        };
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
        let lifetimes_waited = |used, uncached_tokens| {
            let prefills = Prefills { uncached_tokens, ..Prefills::default() };
            let memory = Some(Memory { capacity: 10_000.0, used });
            let place = Place { memory, ..place(Load { prefills, ..Load::default() }, (1.0, 1.0), 0.0) };
            let at_once_ms = prefills_ms(&step, &prefills) + step.prefill_ms(1_000.0, 1_000.0);
            (scorer.cost(&asked(&step), &place) - at_once_ms) / (200.0 * step.decode_ms(1.0, 1_000.0))
        };
        // 9,000 are there for prompts; the request needs 1,200 with its output.
        assert!(lifetimes_waited(7_700.0, 0).abs() < 1e-5);
        near(lifetimes_waited(8_000.0, 0), 0.02);
        near(lifetimes_waited(7_600.0, 1_000), 0.03);
        near(lifetimes_waited(10_000.0, 90_000), 0.1);
    }

    #[test]
    fn an_endpoint_that_fails_at_once_is_not_the_cheapest() {
        let (scorer, step) = (MarginalCost { failure_ms: 10_000.0, ..NOTHING_BUT_ITSELF }, StepModel::default());
        let busy = place(
            Load { prefills: Prefills { prompts: 4, uncached_tokens: 4_000, ..Prefills::default() }, ..Load::default() },
            (1.0, 1.0),
            0.0,
        );
        let idle = |failing| Place { failing, ..place(Load::default(), (1.0, 1.0), 0.0) };
        assert!(scorer.cost(&asked(&step), &idle(0.0)) < scorer.cost(&asked(&step), &busy));
        assert!(scorer.cost(&asked(&step), &idle(0.1)) > scorer.cost(&asked(&step), &busy));
        near(scorer.cost(&asked(&step), &idle(0.25)) - scorer.cost(&asked(&step), &idle(0.0)), 2_500.0);
    }

    #[test]
    fn an_older_copy_is_worth_what_it_saves_where_memory_is_there() {
        let (scorer, step) = (MarginalCost { decode_weight: 1.0, refresh: 1.0, ..NOTHING_BUT_ITSELF }, StepModel::default());
        let cost = |prefix_age, used, uncached_tokens| {
            let memory = Some(Memory { capacity: 1e6, used });
            scorer.cost(&asked(&step), &Place { uncached_tokens, prefix_age, memory, ..place(Load::default(), (1.0, 1.0), 0.0) })
        };
        let saved_ms = step.prefill_ms(1_000.0, 1_000.0) - step.prefill_ms(200.0, 1_000.0);
        let worth_ms = |prefix_age, used| cost(0.0, used, 200.0) - cost(prefix_age, used, 200.0);
        let near = |found: f32, expected: f32| assert!((found - expected).abs() < 0.01, "{found}, not {expected}");
        near(worth_ms(0.5, 0.0), saved_ms / 2.0);
        near(worth_ms(0.5, 5e5), saved_ms / 4.0);
        near(worth_ms(0.5, 1e6), 0.0);
        near(cost(1.0, 0.0, 1_000.0), cost(0.0, 0.0, 1_000.0));
    }

    #[test]
    fn no_copy_is_worth_a_request_s_own_time() {
        let (scorer, step) = (MarginalCost { refresh: 100.0, ..NOTHING_BUT_ITSELF }, StepModel::default());
        let place = Place { uncached_tokens: 10.0, prefix_age: 1.0, ..place(Load::default(), (1.0, 1.0), 0.0) };
        near(scorer.cost(&asked(&step), &place), step.prefill_ms(10.0, 1_000.0));
    }

    #[test]
    fn who_does_not_tell_of_memory_is_taken_for_the_mean() {
        let told = |memory| Place { memory, ..place(Load::default(), (1.0, 1.0), 0.0) };
        let memory = |capacity, used| Some(Memory { capacity, used });
        let mean = Memory::mean(&[told(memory(100.0, 10.0)), told(None), told(memory(300.0, 290.0))]).unwrap();
        near(mean.capacity, 200.0);
        near(mean.used, 150.0);
        assert!(Memory::mean(&[told(None)]).is_none());
    }

    #[test]
    fn a_slow_endpoint_costs_as_many_times_more_of_what_is_done_there() {
        let step = StepModel::default();
        let load = Load { requests: 5, prefills: Prefills { prompts: 2, uncached_tokens: 700, ..Prefills::default() }, ..Load::default() };
        let fixed = |scorer: &MarginalCost, speed| scorer.cost(&asked(&step), &place(load, speed, 0.0));
        near(fixed(&NOTHING_BUT_ITSELF, (2.0, 3.0)), 2.0 * fixed(&NOTHING_BUT_ITSELF, (1.0, 1.0)));
        let decoding = MarginalCost { decode_weight: 1.0, ..NOTHING_BUT_ITSELF };
        let decode = |speed| fixed(&decoding, (1.0, speed)) - fixed(&NOTHING_BUT_ITSELF, (1.0, speed));
        near(decode(3.0), 3.0 * decode(1.0));
    }
}
