//! Generated agent sessions: conversations of many turns, whose prompts grow.
//!
//! Each prompt has all earlier turns of its session, the last reply, and the output of a tool. The
//! lengths and pauses are those of the simulator's workload `agents`. New sessions begin until the
//! end and last about two minutes, so the load grows until the end.

use std::f64::consts::TAU;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::trace::{Arrival, BLOCK_TOKENS};

/// The minimum number of turns of a session.
const TURNS_MIN: u32 = 3;
/// The maximum number of turns of a session.
const TURNS_MAX: u32 = 30;

/// The maximum length of a prompt, in tokens. Prompt and reply together stay below the 131,072
/// tokens that a simulated server accepts by default.
const PROMPT_TOKENS_MAX: f64 = 120_000.0;

/// The length of the prompt of the first turn, which has a task, and the files that the task is
/// about.
const FIRST_PROMPT: TokenCount = TokenCount {
    mean: 6_000.0,
    spread: 0.8,
    range: (1_000.0, 40_000.0),
};
/// The length of the model's reply.
const REPLY: TokenCount = TokenCount {
    mean: 250.0,
    spread: 0.7,
    range: (20.0, 2_000.0),
};
/// The length of a tool's output, with which the next prompt ends.
const TOOL_ANSWER: TokenCount = TokenCount {
    mean: 900.0,
    spread: 1.0,
    range: (50.0, 12_000.0),
};

/// The three parts of the time until the next turn, in seconds: a minimum, the time per token of
/// the reply, and the mean of the (exponential) time of a tool.
const PAUSE: (f64, f64, f64) = (2.0, 0.012, 3.0);

/// A log-normal number of tokens.
struct TokenCount {
    mean: f64,
    spread: f64,
    range: (f64, f64),
}

/// Generates the requests of sessions up to `end`, in order of arrival. On average `per_minute`
/// sessions begin per minute, at random (Poisson). Arrival times do not depend on when replies end,
/// so every policy gets the same requests at the same times. Equal seeds give equal requests.
#[must_use]
pub fn generate(seed: u64, per_minute: f64, end: Duration) -> Vec<Arrival> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut arrivals = Vec::new();
    let mut begin = 0.0;
    for session in 1_u64.. {
        begin += exponential(&mut rng) * 60.0 / per_minute;
        if begin >= end.as_secs_f64() {
            break;
        }
        let mut at = begin;
        let mut prompt = FIRST_PROMPT.draw(&mut rng);
        for _ in 0..rng.random_range(TURNS_MIN..=TURNS_MAX) {
            let reply = REPLY.draw(&mut rng);
            let tool = exponential(&mut rng) * PAUSE.2;
            arrivals.push(arrival(session, at, prompt, reply));
            prompt = (prompt + reply + TOOL_ANSWER.draw(&mut rng)).min(PROMPT_TOKENS_MAX);
            at += PAUSE.0 + PAUSE.1 * reply + tool;
        }
    }
    arrivals.retain(|arrival| arrival.at < end);
    arrivals.sort_by_key(|arrival| arrival.at);
    arrivals
}

/// Returns a request of a session. No other session has the same block ids, and a longer prompt of
/// the session begins with the complete shorter prompt.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the ranges of token counts are far below the limits"
)]
fn arrival(session: u64, at: f64, prompt: f64, reply: f64) -> Arrival {
    let prompt_tokens = prompt as usize;
    let blocks = (session << 20..)
        .take(prompt_tokens.div_ceil(BLOCK_TOKENS))
        .collect();
    Arrival {
        at: Duration::from_secs_f64(at),
        prompt_tokens,
        output_tokens: reply as usize,
        blocks,
    }
}

/// Draws from the exponential distribution with mean 1.
fn exponential(rng: &mut SmallRng) -> f64 {
    -(1.0 - rng.random::<f64>()).ln()
}

// === impl TokenCount ===

impl TokenCount {
    /// Draws a number with this mean and spread, within the range.
    fn draw(&self, rng: &mut SmallRng) -> f64 {
        // A random number with a standard normal distribution (Box-Muller).
        let normal =
            (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt() * (TAU * rng.random::<f64>()).cos();
        (self.mean * (self.spread * normal - self.spread * self.spread / 2.0).exp())
            .clamp(self.range.0, self.range.1)
            .floor()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const END: Duration = Duration::from_secs(100);

    #[test]
    fn a_seed_is_a_workload_and_another_is_another() {
        let times = |seed| {
            generate(seed, 30.0, END)
                .iter()
                .map(|arrival| arrival.at)
                .collect::<Vec<_>>()
        };
        assert!(times(1) == times(1) && times(1) != times(2));
        assert!(times(1).is_sorted() && times(1).last().is_some_and(|last| *last < END));
    }

    #[test]
    fn a_prompt_begins_with_the_earlier_prompts_of_its_session() {
        let mut turns: BTreeMap<u64, Vec<Arrival>> = BTreeMap::new();
        for arrival in generate(1, 30.0, END) {
            turns.entry(arrival.blocks[0]).or_default().push(arrival);
        }
        assert!(turns.len() > 20, "{} sessions", turns.len());
        let mut seen = 0;
        let mut all = 0;
        for session in turns.values() {
            for pair in session.windows(2) {
                assert!(pair[0].prompt_tokens < pair[1].prompt_tokens);
                assert!(pair[1].prompt().starts_with(&pair[0].prompt()));
                seen += pair[0].prompt_tokens;
            }
            all += session.iter().map(|turn| turn.prompt_tokens).sum::<usize>();
        }
        assert!(
            seen * 10 > all * 7,
            "most of a prompt was sent before: {seen} of {all} tokens"
        );
    }
}
