//! The part of a trace that the picker knows: the ranked endpoints with their costs, and predicted
//! and measured times.
//!
//! The proxy makes and samples the spans. A host says whether a request is traced
//! ([`crate::RequestHost::is_traced`]) and puts what it is given into the span. An explanation
//! costs time, so only a sampled request has one.

use pool_state::{ManagedPool, Timestamp};

use crate::exchange::{Exchange, ExchangeOutcome, ExchangePhase};

/// The header of the W3C trace context, `version-trace-parent-flags`.
pub const TRACEPARENT: &str = "traceparent";

const REQUEST_ID: &[u8] = b"x-request-id";

/// The place of the flags' last digit in a `traceparent`; its lowest bit says "sampled".
const SAMPLED_AT: usize = 54;

/// The length of a UUID, and the place where Envoy writes whether it traces the request: `9` if it
/// was sampled, `a` and `b` if the service or the client demanded it.
const UUID_BYTES: usize = 36;
const REASON_AT: usize = 14;

/// Whether the trace of a request is sampled, by its headers in Envoy: by the trace context of the
/// client, whose decision Envoy keeps, else by the request id, in which Envoy writes its own.
pub fn is_sampled<'h>(pairs: impl Iterator<Item = (&'h [u8], &'h [u8])>) -> bool {
    let (mut by_parent, mut by_id) = (None, false);
    for (name, value) in pairs {
        if name == TRACEPARENT.as_bytes() {
            // Of a hexadecimal digit in ASCII; the codes of letters begin with an odd one.
            by_parent = value.get(SAMPLED_AT).map(|digit| digit & 1 != digit >> 6 & 1);
        } else if name == REQUEST_ID && value.len() == UUID_BYTES {
            by_id = value.get(REASON_AT).is_some_and(|reason| b"9ab".contains(reason));
        }
    }
    by_parent.unwrap_or(by_id)
}

// === impl Exchange ===

impl Exchange {
    /// Has the decision explained for a trace.
    pub(crate) fn set_traced(&mut self, traced: bool) {
        self.why.traced = traced;
    }

    /// Takes the ranked endpoints with their costs, as JSON; `None` if the request is not traced.
    pub(crate) fn take_candidates(&mut self) -> Option<String> {
        self.why.candidates.take()
    }

    /// The outcome so far of a traced request.
    pub(crate) fn traced_outcome(&mut self, pool: &mut ManagedPool, now: Timestamp) -> Option<ExchangeOutcome> {
        match &mut self.phase {
            ExchangePhase::Routed(routed) if self.why.traced => Some(routed.outcome_so_far(pool, now)),
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
            ("predicted_ttft_ms", self.expected_ms.map(|(ttft, _)| whole(ttft))),
            ("duration_ms", Some(self.duration_ms)),
            ("predicted_duration_ms", self.expected_ms.map(|(_, end)| whole(end))),
            ("prompt_tokens", self.usage.prompt_tokens.map(u64::from)),
            ("cached_tokens", self.usage.cached_tokens.map(u64::from)),
            ("missed_tokens", missed.map(|_| total)),
        ];
        let numbers = numbers.into_iter().filter_map(|(name, number)| Some((name, number?.to_string())));
        numbers.chain(missed.map(|(cause, _)| ("miss_cause", cause.to_owned()))).collect()
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are not negative; the cast saturates")]
fn whole(ms: f32) -> u64 {
    ms as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(headers: &[(&str, &str)]) -> bool {
        is_sampled(headers.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())))
    }

    #[test]
    fn the_parent_decides_and_without_one_the_request_id() {
        let parent = |flags: &str| format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
        let id = |reason: char| format!("f3f2a7b0-3f2a-{reason}c1d-8f00-0123456789ab");
        assert!(sampled(&[("traceparent", &parent("0b"))]) && !sampled(&[("traceparent", &parent("0a"))]));
        assert!(sampled(&[("traceparent", &parent("01"))]) && sampled(&[("traceparent", &parent("03"))]));
        assert!(!sampled(&[("traceparent", &parent("00")), ("x-request-id", &id('9'))]));
        assert!(['9', 'a', 'b'].into_iter().all(|reason| sampled(&[("x-request-id", &id(reason))])));
        assert!(!sampled(&[("x-request-id", &id('4'))]));
        assert!(!sampled(&[("x-request-id", "chosen-by-the-client-9")]) && !sampled(&[("traceparent", "00-1")]) && !sampled(&[]));
    }
}
