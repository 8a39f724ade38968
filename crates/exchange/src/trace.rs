//! The part of a trace that the picker knows: the ranked endpoints with their costs, and predicted
//! and measured times.
//!
//! The proxy makes and samples the spans. A host decides whether a request is traced
//! ([`crate::RequestHost::is_traced`]), and puts the data that it receives into the span. An
//! explanation costs time, so it is made only for a sampled request.

use pool_state::{ManagedPool, Timestamp};

use crate::exchange::{Exchange, ExchangeOutcome, ExchangePhase};

/// The header of the W3C trace context, `version-trace-parent-flags`.
pub const TRACEPARENT: &str = "traceparent";

const REQUEST_ID: &[u8] = b"x-request-id";

/// The lengths of the parts of a `traceparent`, in hexadecimal digits.
const VERSION_DIGITS: usize = 2;
const TRACE_DIGITS: usize = 32;
const PARENT_DIGITS: usize = 16;
const FLAGS_DIGITS: usize = 2;

/// The version that no `traceparent` may have.
const VERSION_INVALID: u128 = 0xff;

/// The flag of a trace that the caller records.
const SAMPLED: u128 = 1;

/// The length of a UUID, and the position where Envoy writes whether it traces the request: `9` if
/// the request was sampled, `a` or `b` if the service or the client demanded the trace.
const UUID_BYTES: usize = 36;
const REASON_AT: usize = 14;

/// The parent of a span, from a `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The id of the trace; not 0.
    pub trace_id: u128,
    /// The id of the span that called; not 0.
    pub parent: u64,
    /// Whether the caller records the trace.
    pub sampled: bool,
}

/// Whether Envoy makes a span of a request, judged by its headers. Envoy writes its own decision
/// into the request id, and also follows the trace context of the client, if there is one. An
/// invalid trace context counts as not sampled.
pub fn is_sampled<'h>(pairs: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone) -> bool {
    let by_envoy = pairs.clone().any(|(name, value)| {
        name == REQUEST_ID
            && value.len() == UUID_BYTES
            && value
                .get(REASON_AT)
                .is_some_and(|reason| b"9ab".contains(reason))
    });
    by_envoy
        && parent(pairs)
            .is_none_or(|value| TraceContext::parse(value).is_some_and(|context| context.sampled))
}

/// The first `traceparent`, the one that Envoy reads.
fn parent<'h>(mut pairs: impl Iterator<Item = (&'h [u8], &'h [u8])>) -> Option<&'h [u8]> {
    pairs.find_map(|(name, value)| (name == TRACEPARENT.as_bytes()).then_some(value))
}

/// The number of lower-case hexadecimal digits.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number: u128, digit| {
        let value = match digit {
            b'0'..=b'9' => digit & 0xf,
            b'a'..=b'f' => (digit & 0xf) + 9,
            _ => return None,
        };
        Some((number << 4) | u128::from(value))
    })
}

// === impl TraceContext ===

impl TraceContext {
    /// Reads a `traceparent` of version 00, or of a later version that begins in the same way.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Self> {
        let mut parts = value.split(|byte| *byte == b'-');
        let mut part = |digits: usize| {
            parts
                .next()
                .filter(|part| part.len() == digits)
                .and_then(hex)
        };
        let version = part(VERSION_DIGITS).filter(|version| *version != VERSION_INVALID)?;
        let trace_id = part(TRACE_DIGITS).filter(|id| *id != 0)?;
        let parent = part(PARENT_DIGITS)
            .and_then(|id| u64::try_from(id).ok())
            .filter(|id| *id != 0)?;
        let flags = part(FLAGS_DIGITS)?;
        let is_whole = version > 0 || parts.next().is_none();
        is_whole.then_some(Self {
            trace_id,
            parent,
            sampled: flags & SAMPLED > 0,
        })
    }

    /// Reads the first `traceparent` among the headers of a request.
    pub fn in_headers<'h>(pairs: impl Iterator<Item = (&'h [u8], &'h [u8])>) -> Option<Self> {
        Self::parse(parent(pairs)?)
    }
}

// === impl Exchange ===

impl Exchange {
    /// Sets whether the decision is explained for a trace.
    pub(crate) fn set_traced(&mut self, traced: bool) {
        self.why.traced = traced;
    }

    /// Takes the ranked endpoints with their costs, as JSON; `None` if the request is not traced.
    pub(crate) fn take_candidates(&mut self) -> Option<String> {
        self.why.candidates.take()
    }

    /// Whether the decision is explained for a trace.
    pub(crate) fn is_traced(&self) -> bool {
        self.why.traced
    }

    /// The outcome so far of a routed request.
    pub(crate) fn outcome_so_far(
        &mut self,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> Option<ExchangeOutcome> {
        match &mut self.phase {
            ExchangePhase::Routed(routed) => Some(routed.outcome_so_far(pool, now)),
            _ => None,
        }
    }
}

// === impl ExchangeOutcome ===

impl ExchangeOutcome {
    /// The attributes of the span that are known at the end of the request: names and values.
    #[must_use]
    pub fn span_attributes(&self) -> Vec<(&'static str, String)> {
        let missed = self.missed.main_cause();
        let total: u64 = self.missed.0.iter().map(|tokens| u64::from(*tokens)).sum();
        let numbers = [
            ("ttft_ms", self.ttft_ms),
            (
                "predicted_ttft_ms",
                self.expected_ms.map(|(ttft, _)| whole_ms(ttft)),
            ),
            ("duration_ms", Some(self.duration_ms)),
            (
                "predicted_duration_ms",
                self.expected_ms.map(|(_, end)| whole_ms(end)),
            ),
            ("prompt_tokens", self.usage.prompt_tokens.map(u64::from)),
            ("cached_tokens", self.usage.cached_tokens.map(u64::from)),
            ("missed_tokens", missed.map(|_| total)),
        ];
        let numbers = numbers
            .into_iter()
            .filter_map(|(name, number)| Some((name, number?.to_string())));
        numbers
            .chain(missed.map(|(cause, _)| ("miss_cause", cause.to_owned())))
            .collect()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are not negative; the cast saturates"
)]
fn whole_ms(ms: f32) -> u64 {
    ms as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    /// The bytes that mutations write into a header.
    const BYTES: &[u8] = b"0123456789abcdefABCF-+ \x00\xff";

    fn parse(text: &str) -> Option<TraceContext> {
        TraceContext::parse(text.as_bytes())
    }

    fn sampled(headers: &[(&str, &str)]) -> bool {
        is_sampled(
            headers
                .iter()
                .map(|(name, value)| (name.as_bytes(), value.as_bytes())),
        )
    }

    #[test]
    fn a_trace_context_is_read_as_the_w3c_says() {
        let expected = TraceContext {
            trace_id: 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c,
            parent: 0xb7ad_6b71_6920_3331,
            sampled: true,
        };
        assert_eq!(parse(PARENT), Some(expected));
        assert_eq!(
            parse(&PARENT.replace("-01", "-0a")),
            Some(TraceContext {
                sampled: false,
                ..expected
            })
        );
        assert_eq!(
            parse(&(PARENT.replacen("00", "01", 1) + "-later")),
            Some(expected)
        );
        let invalid = [
            PARENT.to_uppercase(),
            format!("{PARENT}-more"),
            format!("{PARENT}-"),
            PARENT.replacen("00", "ff", 1),
            PARENT.replacen("00", "0", 1),
            PARENT.replace("b7ad6b7169203331", "0000000000000000"),
            PARENT.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            PARENT.replace("-01", ""),
            PARENT.replace("-01", "-+1"),
            format!(" {PARENT}"),
            String::new(),
        ];
        assert_eq!(
            invalid
                .iter()
                .filter(|text| parse(text).is_some())
                .collect::<Vec<_>>(),
            Vec::<&String>::new()
        );
        let headers: [(&[u8], &[u8]); 3] = [
            (b":path", b"/"),
            (b"traceparent", PARENT.as_bytes()),
            (b"traceparent", b"00"),
        ];
        assert_eq!(
            TraceContext::in_headers(headers.into_iter()),
            Some(expected)
        );
    }

    /// Reading returns what was written. Made-up bytes are accepted only if they begin with the
    /// text that the result writes.
    #[test]
    fn reading_is_the_inverse_of_writing_for_any_bytes() {
        let mut rng = scheduler::Rng::seeded(7);
        let mut below = |max: usize| rng.below(max);
        let mut read = 0;
        for _ in 0..200_000 {
            let mut bytes = PARENT.as_bytes().to_vec();
            for _ in 0..below(3) {
                let at = below(bytes.len());
                let byte = BYTES[below(BYTES.len())];
                match below(4) {
                    0 => bytes.insert(at, byte),
                    1 => drop(bytes.remove(at)),
                    _ => bytes[at] = byte,
                }
            }
            let Some(TraceContext {
                trace_id,
                parent,
                sampled,
            }) = TraceContext::parse(&bytes)
            else {
                continue;
            };
            read += 1;
            let text = String::from_utf8(bytes).unwrap();
            let part = |range: std::ops::Range<usize>| text.get(range).unwrap();
            assert_eq!(
                part(2..53),
                format!("-{trace_id:032x}-{parent:016x}-"),
                "{text}"
            );
            assert_eq!(
                u8::from_str_radix(part(53..55), 16).unwrap() & 1 == 1,
                sampled,
                "{text}"
            );
            assert!(
                trace_id != 0
                    && parent != 0
                    && !text.starts_with("ff")
                    && (text.len() == 55 || !text.starts_with("00")),
                "{text}"
            );
        }
        assert!(read > 50_000, "{read}");
    }

    #[test]
    fn envoy_and_the_parent_must_both_sample() {
        let parent = |flags: &str| PARENT.replace("-01", &format!("-{flags}"));
        let id = |reason: char| format!("f3f2a7b0-3f2a-{reason}c1d-8f00-0123456789ab");
        let with = |parent: &str| sampled(&[("x-request-id", &id('9')), ("traceparent", parent)]);
        assert!(with(&parent("01")) && with(&parent("0b")) && with(&parent("03")));
        assert!(!with(&parent("00")) && !with(&parent("0a")) && !with("00-1"));
        assert!(
            ['9', 'a', 'b']
                .into_iter()
                .all(|reason| sampled(&[("x-request-id", &id(reason))]))
        );
        assert!(
            !sampled(&[("x-request-id", &id('4'))])
                && !sampled(&[("x-request-id", &id('4')), ("traceparent", &parent("01"))])
        );
        assert!(!sampled(&[("traceparent", &parent("01"))]) && !sampled(&[]));
        assert!(!sampled(&[("x-request-id", "chosen-by-the-client-9")]));
        let two = [
            ("x-request-id", &*id('9')),
            ("traceparent", &parent("00")),
            ("traceparent", &parent("01")),
        ];
        assert!(!sampled(&two), "the first one counts");
    }
}
