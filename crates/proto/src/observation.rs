//! The encoding of an observation: the conditions, measurements and predictions of a finished
//! request.
//!
//! ```text
//!  0  slot | generation | end of the request, and bit 8: output tokens are estimated
//!  3  queued | running | requests | prefill tokens | context tokens | KV utilization | prompt tokens | uncached tokens
//! 11  TTFT ms | TPOT ms | output tokens | prompt tokens and cached tokens by the engine's `usage`
//! 16  first token: uncached tokens | prompt tokens | service ms
//! 19  gap between tokens: batch | context tokens | ms
//! 22  prediction: TTFT ms | TPOT ms | TTFT p90 ms | TPOT p90 ms
//! ```
//! The numbers above are positions of words. A word has 32 bits, and its least significant byte
//! comes first. From word 3 on, each word is an `f32`, and NaN means unknown.

use scheduler::latency::{Conditions, FirstToken, Observation, Prediction, RequestEnd, TokenGap};
use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};

/// The maximum number of observations in a message. A VM also keeps at most this many observations
/// until its host fetches them. This covers a tenth of a second at 5,000 requests per second.
pub const OBSERVATIONS_MAX: usize = 512;

/// The number of 32-bit words of an observation.
const WORDS: usize = 26;

/// The size of an observation in bytes.
pub const OBSERVATION_BYTES: usize = 4 * WORDS;

/// The longest time of a request from which the daemon learns, in ms: one hour. A request that
/// takes longer is assumed to hang.
const MS_MAX: f32 = 3_600_000.0;

/// The largest valid count of tokens or requests. An `f32` represents all counts up to this one
/// exactly.
const COUNT_MAX: f32 = 16_777_216.0;

/// One finished request, in the form that the daemon receives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncodedObservation {
    pub observation: Observation,
    /// The prediction at the pick; `None` if the model gave no prediction, or if the pool had no
    /// model.
    pub predicted: Option<Prediction>,
    /// The number of prompt tokens, as the engine's `usage` reports it.
    pub prompt_tokens: Option<u32>,
    /// The number of prompt tokens that the engine had cached, as its `usage` reports it.
    pub cached_tokens: Option<u32>,
    /// Whether the number of output tokens is the number of streamed events, because the engine
    /// reported no token count.
    pub estimated: bool,
}

// === impl EncodedObservation ===

impl EncodedObservation {
    /// Encodes the observation as little-endian words at fixed positions.
    pub fn to_bytes(&self) -> [u8; OBSERVATION_BYTES] {
        let Self {
            observation,
            predicted,
            prompt_tokens,
            cached_tokens,
            estimated,
        } = self;
        let Observation {
            endpoint,
            conditions,
            ended,
            ttft_ms,
            tpot_ms,
            output_tokens,
            first_token,
            gap,
        } = observation;
        let unknown = f32::NAN;
        let count = |tokens: Option<u32>| tokens.map_or(unknown, to_f32);
        let ended = match ended {
            RequestEnd::Done => 0,
            RequestEnd::Aborted => 1,
            RequestEnd::Failed => 2,
        };
        let place = [
            u32::from(endpoint.slot.0),
            endpoint.generation.0,
            ended | u32::from(*estimated) << 8,
        ];
        let c = conditions;
        let numbers = [
            c.queued.unwrap_or(unknown),
            c.running.unwrap_or(unknown),
            c.requests,
            c.prefill_tokens,
            c.context_tokens,
            c.kv_utilization.unwrap_or(unknown),
            c.prompt_tokens,
            c.uncached_tokens,
            ttft_ms.unwrap_or(unknown),
            tpot_ms.unwrap_or(unknown),
            count(*output_tokens),
            count(*prompt_tokens),
            count(*cached_tokens),
        ];
        let first_token = first_token.map_or([unknown; 3], |t| {
            [t.uncached_tokens, t.prompt_tokens, t.service_ms]
        });
        let gap = gap.map_or([unknown; 3], |g| [g.batch, g.context_tokens, g.gap_ms]);
        let predicted = predicted.map_or([unknown; 4], |p| {
            [p.ttft_ms, p.tpot_ms, p.ttft_p90_ms, p.tpot_p90_ms]
        });
        let numbers = numbers
            .into_iter()
            .chain(first_token)
            .chain(gap)
            .chain(predicted)
            .map(f32::to_bits);
        let mut bytes = [0; OBSERVATION_BYTES];
        for (to, word) in bytes
            .as_chunks_mut::<4>()
            .0
            .iter_mut()
            .zip(place.into_iter().chain(numbers))
        {
            *to = word.to_le_bytes();
        }
        bytes
    }

    /// Decodes an observation and checks each number. Returns `None` if a number is invalid.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; OBSERVATION_BYTES]) -> Option<Self> {
        let mut words = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_le_bytes(*word));
        let mut word = || words.next().unwrap_or(0);
        let slot = u16::try_from(word())
            .ok()
            .filter(|slot| usize::from(*slot) < ENDPOINTS_MAX)?;
        let endpoint = EndpointRef {
            slot: Slot(slot),
            generation: Generation(word()),
        };
        let (ended, estimated) = match word() {
            0 => (RequestEnd::Done, false),
            1 => (RequestEnd::Aborted, false),
            2 => (RequestEnd::Failed, false),
            0x100 => (RequestEnd::Done, true),
            0x101 => (RequestEnd::Aborted, true),
            0x102 => (RequestEnd::Failed, true),
            _ => return None,
        };
        let mut number = || f32::from_bits(word());
        let mut known = |number: f32| Some(number).filter(|number| !number.is_nan());
        let conditions = Conditions {
            queued: known(number()),
            running: known(number()),
            requests: number(),
            prefill_tokens: number(),
            context_tokens: number(),
            kv_utilization: known(number()),
            prompt_tokens: number(),
            uncached_tokens: number(),
        };
        let ttft_ms = known(number());
        let tpot_ms = known(number());
        let [output_tokens, prompt_tokens, cached_tokens] =
            [number(), number(), number()].map(&mut known);
        let first_token = [number(), number(), number()];
        let gap = [number(), number(), number()];
        let predicted = [number(), number(), number(), number()];
        let [output_tokens, prompt_tokens, cached_tokens] = [
            to_count(output_tokens)?,
            to_count(prompt_tokens)?,
            to_count(cached_tokens)?,
        ];
        let observation = Observation {
            endpoint,
            conditions: conditions.checked()?,
            ended,
            ttft_ms: within_ms(ttft_ms)?,
            tpot_ms: within_ms(tpot_ms)?,
            output_tokens,
            first_token: part(first_token, first_token_of)?,
            gap: part(gap, gap_of)?,
        };
        let predicted = part(predicted, prediction_of)?;
        Some(Self {
            observation,
            predicted,
            prompt_tokens,
            cached_tokens,
            estimated,
        })
    }
}

/// Decodes an optional part of an observation. Returns `Some(None)` if all its numbers are unknown,
/// and `None` if only a part of the numbers is known, or if a number is invalid.
fn part<const N: usize, T>(
    numbers: [f32; N],
    of: impl Fn([f32; N]) -> Option<T>,
) -> Option<Option<T>> {
    match numbers.iter().filter(|number| number.is_nan()).count() {
        0 => of(numbers).map(Some),
        unknown => (unknown == N).then_some(None),
    }
}

fn first_token_of([uncached_tokens, prompt_tokens, service_ms]: [f32; 3]) -> Option<FirstToken> {
    let sane = (0.0..=COUNT_MAX).contains(&prompt_tokens)
        && (0.0..=prompt_tokens).contains(&uncached_tokens)
        && is_ms(service_ms);
    sane.then_some(FirstToken {
        uncached_tokens,
        prompt_tokens,
        service_ms,
    })
}

fn gap_of([batch, context_tokens, gap_ms]: [f32; 3]) -> Option<TokenGap> {
    let sane = [batch, context_tokens]
        .iter()
        .all(|count| (0.0..=COUNT_MAX).contains(count))
        && is_ms(gap_ms);
    sane.then_some(TokenGap {
        batch,
        context_tokens,
        gap_ms,
    })
}

fn prediction_of([ttft_ms, tpot_ms, ttft_p90_ms, tpot_p90_ms]: [f32; 4]) -> Option<Prediction> {
    let sane = [ttft_ms, tpot_ms, ttft_p90_ms, tpot_p90_ms]
        .into_iter()
        .all(is_ms);
    sane.then_some(Prediction {
        ttft_ms,
        tpot_ms,
        ttft_p90_ms,
        tpot_p90_ms,
    })
}

fn is_ms(ms: f32) -> bool {
    (0.0..=MS_MAX).contains(&ms)
}

fn within_ms(ms: Option<f32>) -> Option<Option<f32>> {
    ms.is_none_or(is_ms).then_some(ms)
}

// The cast changes no valid count, because the guard checks the range before the cast.
fn to_count(count: Option<f32>) -> Option<Option<u32>> {
    count
        .is_none_or(|count| (0.0..=COUNT_MAX).contains(&count))
        .then(|| count.map(|count| count as u32))
}

// Converts a count to an `f32`. The cast is exact, because larger counts become 2^24.
fn to_f32(count: u32) -> f32 {
    const MAX: u32 = 1 << f32::MANTISSA_DIGITS;
    count.min(MAX) as f32
}
