//! The number of tokens for each byte of prompt text, learned from the usage that engines report.
//!
//! The picker runs no tokenizer. A pool has one estimate, because its models are mostly variants of
//! one model. Models with another tokenizer in the same pool get an inexact estimate. The estimate
//! is the median of the rates that the endpoints report, so that one endpoint cannot move it.

use scheduler::sort::lower_median;
use scheduler::{BYTES_PER_TOKEN, EndpointRef};

use crate::usage::TokenUsage;

/// Tokens for each byte of prompt text.
#[derive(Clone, Debug)]
pub(super) struct TokenRate {
    /// The median of `endpoints`.
    rate: f64,
    /// The rates of the endpoints that reported first, and the next rate to be replaced.
    endpoints: Vec<EndpointRate>,
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct EndpointRate {
    endpoint: EndpointRef,
    rate: f64,
}

/// The number of endpoints whose rates are kept. A median of more is no better, and takes time at
/// the end of each request.
const ENDPOINTS_KEPT: usize = 32;

/// The minimum length of a prompt that the rate is learned from, in bytes. The chat template is too
/// large a part of shorter prompts.
const LEARNED_BYTES_MIN: u32 = 1024;

/// The weight of one prompt in the estimate. One prompt has little effect, and some tens of prompts
/// are enough.
const STEP: f64 = 1.0 / 16.0;

/// An outlier counts as at most this many times the estimate, and as at least the estimate divided
/// by this.
const OUTLIER: f64 = 2.0;

/// The rate is limited to a range from one token for 16 bytes (runs of spaces) to one token for
/// each byte (bytes that no token of the vocabulary covers).
const SLOWEST: f64 = 1.0 / 16.0;
const FASTEST: f64 = 1.0;

// === impl TokenRate ===

impl Default for TokenRate {
    fn default() -> Self {
        Self {
            rate: 1.0 / BYTES_PER_TOKEN as f64,
            endpoints: Vec::new(),
            next: 0,
        }
    }
}

impl TokenRate {
    /// Learns from a prompt of this many bytes of text that had the tokens in `usage` at
    /// `endpoint`. 0 bytes means that the prompt had other parts, and then nothing is learned.
    pub(super) fn learn(&mut self, endpoint: EndpointRef, bytes: u32, usage: &TokenUsage) {
        let Some(tokens @ 1..) = usage.prompt_tokens.filter(|_| bytes >= LEARNED_BYTES_MIN) else {
            return;
        };
        // `clamp` is not used, because it panics if its limits are not numbers.
        let said = (f64::from(tokens) / f64::from(bytes))
            .max(self.rate / OUTLIER)
            .min(self.rate * OUTLIER);
        let pool = self.rate;
        let row = self.row(endpoint);
        let before = row.map_or(pool, |row| row.rate);
        let rate = (before + STEP * (said - before)).clamp(SLOWEST, FASTEST);
        match self.row(endpoint) {
            Some(row) => row.rate = rate,
            None => self.keep(EndpointRate { endpoint, rate }),
        }
        let rates = self.endpoints.iter().map(|row| row.rate);
        self.rate = lower_median(rates.collect()).unwrap_or(pool);
    }

    fn row(&mut self, endpoint: EndpointRef) -> Option<&mut EndpointRate> {
        let mut rows = self.endpoints.iter_mut();
        rows.find(|row| row.endpoint == endpoint)
    }

    /// Keeps the rate of an endpoint that had none. If there is no room, it replaces another rate.
    fn keep(&mut self, row: EndpointRate) {
        if self.endpoints.len() < ENDPOINTS_KEPT {
            self.endpoints.push(row);
        } else if let Some(other) = self.endpoints.get_mut(self.next) {
            *other = row;
            self.next = (self.next + 1) % ENDPOINTS_KEPT;
        }
    }

    /// The tokens of this many bytes.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "not negative; the cast saturates"
    )]
    pub(super) fn tokens(&self, bytes: usize) -> u32 {
        (bytes as f64 * self.rate) as u32
    }

    /// The tokens of a block that has `block_tokens` tokens by the initial estimate. The result is
    /// at least 1.
    pub(super) fn block_tokens(&self, block_tokens: u32) -> u32 {
        let bytes = usize::try_from(block_tokens)
            .unwrap_or(usize::MAX)
            .saturating_mul(BYTES_PER_TOKEN);
        self.tokens(bytes).max(1)
    }
}

#[cfg(test)]
mod tests {
    use scheduler::{Generation, Slot};

    use super::*;

    fn endpoint(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        }
    }

    fn after(replies: impl IntoIterator<Item = (u32, u32)>) -> TokenRate {
        let mut rate = TokenRate::default();
        for (bytes, tokens) in replies {
            rate.learn(
                endpoint(0),
                bytes,
                &TokenUsage {
                    prompt_tokens: Some(tokens),
                    ..TokenUsage::default()
                },
            );
        }
        rate
    }

    #[test]
    fn before_anything_is_known_a_token_is_four_bytes() {
        assert_eq!(
            [3, 4, 4_003, 400_000_000].map(|bytes| TokenRate::default().tokens(bytes)),
            [0, 1, 1_000, 100_000_000]
        );
        assert_eq!(
            [1, 16, 64].map(|tokens| TokenRate::default().block_tokens(tokens)),
            [1, 16, 64]
        );
        assert_eq!(TokenRate::default().tokens(usize::MAX), u32::MAX);
    }

    #[test]
    fn another_tokenizer_is_learned_within_some_tens_of_prompts() {
        for bytes_per_token in [1.5, 3.0, 6.0, 12.0] {
            let rate = after((0..80).map(|_| (6_000, (6_000.0 / bytes_per_token) as u32)));
            let off = f64::from(rate.tokens(1 << 20)) * bytes_per_token / f64::from(1 << 20);
            assert!((off - 1.0).abs() < 0.05, "{bytes_per_token}: {off}");
        }
        assert_eq!(
            after((0..200).map(|_| (6_000, 3_000))).block_tokens(16),
            31,
            "nearly 32"
        );
    }

    #[test]
    fn one_engines_claims_move_no_estimate_of_others() {
        for (engines, lie) in [(4, u32::MAX), (4, 1), (2, u32::MAX), (100, u32::MAX)] {
            let mut rate = TokenRate::default();
            for n in 0..20_000_u32 {
                let slot = u16::try_from(n % engines).unwrap();
                let prompt_tokens = Some(if slot == 0 { lie } else { 2_000 });
                let usage = TokenUsage {
                    prompt_tokens,
                    ..TokenUsage::default()
                };
                rate.learn(endpoint(slot), 6_000, &usage);
            }
            let tokens = rate.tokens(6_000);
            assert!(
                (1_950..2_050).contains(&tokens),
                "{lie} of {engines}: {tokens}"
            );
        }
    }

    #[test]
    fn what_says_little_moves_little() {
        assert_eq!(
            after([(1_023, 1_023), (0, 9_000), (6_000, 0)]).tokens(4_000),
            1_000,
            "short, not text alone, silent"
        );
        let mad = after([(6_000, u32::MAX), (6_000, 1_500), (6_000, 1)]);
        assert!((960..1_063).contains(&mad.tokens(4_000)), "{mad:?}");
        let bounded = [
            after((0..500).map(|_| (6_000, u32::MAX))),
            after((0..500).map(|_| (u32::MAX, 1))),
        ];
        assert_eq!(bounded.map(|rate| rate.tokens(1_600)), [1_600, 100]);
    }
}
