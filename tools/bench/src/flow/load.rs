//! The requests of the waves.

use std::time::Duration;

use testbed::trace::Arrival;

use super::{CHAT_AFTER, WAVE_BEGINS};

pub(super) const MODEL: &str = "demo";

/// Requests of one kind: their rate, and their lengths.
#[derive(Debug)]
pub(super) struct TrafficClass {
    pub(super) name: &'static str,
    objective: &'static str,
    /// The rate in requests/s while requests arrive.
    rate: f64,
    prompt_tokens: usize,
    output_tokens: usize,
}

/// The classes of requests in a wave. Chat demands somewhat less than half of the engines'
/// capacity. The two batch tenants demand about 0.5 and 0.35 of the capacity, so the small tenant
/// demands a bit more than half of what chat leaves.
pub(super) const CLASSES: [TrafficClass; 3] = [
    TrafficClass {
        name: "chat",
        objective: "chat",
        rate: 12.0,
        prompt_tokens: 512,
        output_tokens: 16,
    },
    TrafficClass {
        name: "large",
        objective: "batch",
        rate: 3.4,
        prompt_tokens: 2_048,
        output_tokens: 64,
    },
    TrafficClass {
        name: "small",
        objective: "batch",
        rate: 4.6,
        prompt_tokens: 1_024,
        output_tokens: 32,
    },
];

// === impl TrafficClass ===

impl TrafficClass {
    #[expect(clippy::cast_precision_loss, reason = "a few thousand tokens")]
    pub(super) fn tokens(&self) -> f64 {
        (self.prompt_tokens + self.output_tokens) as f64
    }

    /// Returns the tokens/s that the class demands while its requests arrive.
    pub(super) fn offered(&self) -> f64 {
        self.rate * self.tokens()
    }

    pub(super) fn headers(&self) -> Vec<(String, String)> {
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        vec![
            header("x-llm-d-inference-objective", self.objective),
            header("x-llm-d-inference-fairness-id", self.name),
        ]
    }

    /// Returns arrivals at random times, with distinct prompts. Batch requests arrive only during
    /// the wave, and chats arrive during the whole run.
    pub(super) fn arrivals(&self, wave: Duration, seed: u64) -> Vec<Arrival> {
        let (begin, end) = if self.objective == "chat" {
            (Duration::ZERO, WAVE_BEGINS + wave + CHAT_AFTER)
        } else {
            (WAVE_BEGINS, WAVE_BEGINS + wave)
        };
        let mut at = begin;
        let mut arrivals = Vec::new();
        let kind = self
            .name
            .bytes()
            .fold(0, |kind, byte| kind << 4 ^ u64::from(byte))
            << 44
            | seed << 32;
        loop {
            let first = kind | (arrivals.len() as u64) << 8;
            at += Duration::from_secs_f64(-(1.0 - unit(first)).ln() / self.rate);
            if at >= end {
                return arrivals;
            }
            let blocks = (first..).take(self.prompt_tokens.div_ceil(512)).collect();
            arrivals.push(Arrival {
                at,
                prompt_tokens: self.prompt_tokens,
                output_tokens: self.output_tokens,
                blocks,
            });
        }
    }
}

/// Returns a pseudorandom number from 0 to 1 (SplitMix64).
#[expect(clippy::cast_precision_loss, reason = "53 bits")]
fn unit(seed: u64) -> f64 {
    let mut mixed = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ mixed >> 31) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_at_their_rate_and_share_no_prompt() {
        for class in &CLASSES {
            let arrivals = class.arrivals(Duration::from_secs(1_000), 3);
            let expected = class.rate
                * if class.objective == "chat" {
                    1_008.0
                } else {
                    1_000.0
                };
            assert!(
                (arrivals.len() as f64 / expected - 1.0).abs() < 0.06,
                "{}: {} of {expected}",
                class.name,
                arrivals.len()
            );
            let mut blocks: Vec<u64> = arrivals
                .iter()
                .flat_map(|arrival| arrival.blocks.clone())
                .collect();
            let count = blocks.len();
            blocks.sort_unstable();
            blocks.dedup();
            assert_eq!(blocks.len(), count);
        }
    }
}
