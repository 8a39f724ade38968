//! Changes a routed request for the proxy's router.

use crate::headers;
use crate::rewrite::BodyEdit;
use crate::settings::{DestinationFormat, ExchangeSettings};
use pool_state::RecordedPick;
use pool_state::verdict::RETRIED_STATUS;

/// Retry reasons that occur before a request is sent, so no engine has seen it.
const UNSENT: &str = "connect-failure";

/// Like [`UNSENT`], and also if an engine reports overload ([`RETRIED_STATUS`]), because it has not
/// started the request.
const REFUSED: &str = "connect-failure,retriable-status-codes";

/// Like [`REFUSED`], and also if a connection was lost before the reply began, or a try timed out.
/// The engine may have done all of the work.
const LOST: &str = "connect-failure,reset,retriable-status-codes";

/// The maximum number of retries if lost connections are among the reasons. The proxy has one count
/// for all reasons, and a request that crashes engines must not crash several in a row.
const LOST_RETRIES_MAX: usize = 1;

/// The maximum expected duration, in ms, of a request that is repeated after a lost connection. The
/// expected output is the client's own limit, so no retry depends on what engines report about
/// other requests.
const REPEATED_MS_MAX: f32 = 10_000.0;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestChanges {
    /// Names and values of the headers to set. The new values replace existing headers.
    pub set: Vec<(String, String)>,
    /// The change to the body, if any.
    pub body: Option<BodyEdit>,
}

/// The facts about a request on which its retries depend.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestTraits {
    pub(super) is_inference: bool,
    pub(super) is_streamed: bool,
    /// Whether the client limits the output.
    pub(super) has_output_limit: bool,
    /// Whether its prompt crashed engines before.
    pub(super) is_probe: bool,
}

// === impl RequestChanges ===

impl RequestChanges {
    pub(super) fn to(
        settings: &ExchangeSettings,
        picked: &RecordedPick,
        traits: RequestTraits,
    ) -> Self {
        let mut addresses = picked.ranked.iter().map(|(_, address)| &**address);
        let mut forward = Self::default();
        let retries = match settings.destination.format {
            DestinationFormat::List => {
                forward.set(
                    &settings.destination.header,
                    addresses.collect::<Vec<_>>().join(","),
                );
                picked.ranked.len().saturating_sub(1)
            }
            DestinationFormat::Single => {
                forward.set(
                    &settings.destination.header,
                    addresses.next().unwrap_or_default(),
                );
                if let Some(second) = addresses.next() {
                    forward.set(&settings.destination.fallback_header, second);
                }
                0
            }
        };
        for (name, addresses) in [
            (headers::PREFILLER, picked.prefill.as_slice()),
            (headers::ENCODERS, picked.encode.as_slice()),
            (headers::DATA_PARALLEL, picked.data_parallel.as_slice()),
        ] {
            if !addresses.is_empty() {
                forward.set(name, addresses.join(","));
            }
        }
        forward.retries(
            settings,
            &RetryPolicy::for_pick(
                if settings.retry.enabled { retries } else { 0 },
                picked,
                traits,
            ),
            traits.is_streamed,
        );
        if traits.is_inference {
            forward.set(headers::LOAD_FORMAT, "TEXT");
        }
        forward
    }

    /// Changes the body. `length` is the declared length of the old body, if the client sent one.
    /// `restores` says whether the reply is changed too.
    pub(super) fn rewrite(&mut self, splice: BodyEdit, length: Option<usize>, restores: bool) {
        if let Some(length) = length {
            self.set(headers::CONTENT_LENGTH, splice.length(length).to_string());
        }
        // In a compressed reply, the client's model name could not be restored, so forbid
        // compression.
        if restores {
            self.set(headers::ACCEPT_ENCODING, "identity");
        }
        self.body = Some(splice);
    }

    /// Lets the fallback load balancer choose any host, because the proxy has no state and may fail
    /// open.
    pub(super) fn open() -> Self {
        let mut forward = Self::default();
        forward.set(headers::OPEN, "1");
        forward
    }

    /// Sets Envoy's retry headers. More attempts than entries in the ranked list would end at the
    /// fallback balancer, and the client would get the proxy's 503 instead of the engine's.
    fn retries(&mut self, settings: &ExchangeSettings, retries: &RetryPolicy, streamed: bool) {
        self.set(headers::MAX_RETRIES, retries.count.to_string());
        if retries.count > 0 {
            self.set(headers::RETRY_ON, retries.reasons);
            if retries.reasons != UNSENT {
                self.set(headers::RETRIABLE_STATUS_CODES, RETRIED_STATUS);
            }
        }
        if streamed && settings.retry.per_try_timeout_ms > 0 {
            self.set(
                headers::PER_TRY_TIMEOUT_MS,
                settings.retry.per_try_timeout_ms.to_string(),
            );
        }
    }

    fn set(&mut self, name: &str, value: impl Into<String>) {
        self.set.push((name.to_owned(), value.into()));
    }
}

/// How often, and for which reasons, the proxy tries the next endpoint of the list.
struct RetryPolicy {
    count: usize,
    reasons: &'static str,
}

// === impl RetryPolicy ===

impl RetryPolicy {
    /// Returns the policy for at most `count` further endpoints. Before the second endpoint of the
    /// list has answered a request, nothing is known about it, and all further endpoints are tried.
    fn for_pick(count: usize, picked: &RecordedPick, traits: RequestTraits) -> Self {
        let (first_token_ms, end_ms) = picked.expected_ms;
        // The time that a lost connection wastes. A streamed reply begins with its first token.
        let lost_ms = if traits.is_streamed || !traits.has_output_limit {
            first_token_ms
        } else {
            end_ms
        };
        let is_repeated = !traits.is_probe && lost_ms <= REPEATED_MS_MAX;
        let (count, reasons) = match (traits.is_inference, is_repeated) {
            (false, _) => (count, UNSENT),
            (true, false) => (count, REFUSED),
            (true, true) if picked.second_answered => (count.min(LOST_RETRIES_MAX), LOST),
            (true, true) => (count, LOST),
        };
        Self { count, reasons }
    }
}
