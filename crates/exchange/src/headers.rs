//! Every header and metadata key of the protocol, in one place.

/// The endpoint to send the request to: `ip:port`, or several, best first.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The second choice, for consumers that read one destination and one fallback.
pub const DESTINATION_FALLBACK: &str = "x-gateway-destination-endpoint-fallback";
/// Key of the subset hint.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";
pub const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// Lets the fallback load balancer choose any host. Only Switchpoint may set it.
pub const OPEN: &str = "x-switchpoint-open";
/// Requests the reasons for the decision.
pub const EXPLAIN: &str = "x-switchpoint-explain";
/// Returns the reasons for the decision.
pub const DECISION: &str = "x-switchpoint-decision";
/// The prefill endpoint, for the sidecar of the decode endpoint.
pub const PREFILLER: &str = "x-prefiller-host-port";
/// The encode endpoints, for the same sidecar.
pub const ENCODERS: &str = "x-encoder-hosts-ports";
/// The data-parallel rank to serve a request, for the sidecar in front of all ranks.
pub const DATA_PARALLEL: &str = "x-data-parallel-host-port";
/// The model of a request, as set by gateways that read bodies.
pub const MODEL: &str = "x-gateway-model-name";
/// The reason why a request was refused.
pub const DROPPED_REASON: &str = "x-llm-d-request-dropped-reason";
/// Requests the engine's load in the reply (ORCA).
pub const LOAD_FORMAT: &str = "endpoint-load-metrics-format";
/// An engine's load in its reply.
pub const LOAD: &str = "endpoint-load-metrics";
/// Envoy's retry policy by request header: which failures are retried.
pub const RETRY_ON: &str = "x-envoy-retry-on";
/// Envoy's retry policy by request header: the maximum number of retries.
pub const MAX_RETRIES: &str = "x-envoy-max-retries";
/// Envoy's retry policy by request header: which statuses count as failures.
pub const RETRIABLE_STATUS_CODES: &str = "x-envoy-retriable-status-codes";
/// Envoy's retry policy by request header: how long one attempt may take until its response
/// headers.
pub const PER_TRY_TIMEOUT_MS: &str = "x-envoy-upstream-rq-per-try-timeout-ms";

/// HTTP's length of the body, if the sender knew it beforehand.
pub const CONTENT_LENGTH: &str = "content-length";
/// HTTP's list of the compressions that the client accepts.
pub const ACCEPT_ENCODING: &str = "accept-encoding";

/// Names the objective of a request: the current name, then an older name that is still read.
pub const OBJECTIVE: [&str; 2] = [
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
];
/// Requests a model other than the body's: the current name, then an older name that is still read.
pub const MODEL_REWRITE: [&str; 2] = ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"];

/// The TTFT SLO, ms: the current name, then an older name that is still read.
pub const SLO_TTFT: [&str; 2] = ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"];
/// The TPOT SLO, ms: the current name, then an older name that is still read.
pub const SLO_TPOT: [&str; 2] = ["x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"];
/// Requests scheduling by SLO: the name, then the name in later versions.
pub const PREDICTION_BASED: [&str; 2] = ["predictionbasedrouting", "x-prediction-based-scheduling"];

/// Headers that a client must not set, because they steer the proxy or the engine. Every value of
/// each is removed first.
pub const CONTROL: [&str; 11] = [
    DESTINATION,
    DESTINATION_FALLBACK,
    SUBSET,
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint-scores",
    PREFILLER,
    ENCODERS,
    DATA_PARALLEL,
    OPEN,
    DECISION,
    LOAD_FORMAT,
];

/// Envoy's retry and time-out headers, which only Switchpoint may set. A client's 1 ms time-out
/// would look like a failing endpoint.
pub const PROXY_ORDERS: [&str; 7] = [
    RETRY_ON,
    MAX_RETRIES,
    RETRIABLE_STATUS_CODES,
    PER_TRY_TIMEOUT_MS,
    "x-envoy-retry-grpc-on",
    "x-envoy-upstream-rq-timeout-ms",
    "x-envoy-hedge-on-per-try-timeout",
];

/// Whether `name` is a header that a client must not set. `name` is lower-case, as in HTTP/2 and
/// Envoy.
#[must_use]
pub fn is_control(name: &[u8]) -> bool {
    let ours = name
        .strip_prefix(b"x-switchpoint-")
        .is_some_and(|rest| rest != b"explain");
    ours || CONTROL
        .iter()
        .chain(&PROXY_ORDERS)
        .any(|control| control.as_bytes() == name)
}

/// Whether a `content-encoding` of this value names a coding, other than `identity`.
pub(crate) fn is_encoded(value: &[u8]) -> bool {
    !value.is_empty() && !value.eq_ignore_ascii_case(b"identity")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_may_ask_for_reasons_but_steer_nothing() {
        assert!(!is_control(EXPLAIN.as_bytes()));
        assert!(!is_control(b"authorization"));
        assert!(CONTROL.iter().all(|name| is_control(name.as_bytes())));
        assert!(is_control(b"x-switchpoint-anything-new"));
    }

    #[test]
    fn identity_is_no_coding() {
        for plain in [&b""[..], b"identity", b"Identity"] {
            assert!(!is_encoded(plain), "{plain:?}");
        }
        for coded in [
            &b"gzip"[..],
            b"BR",
            b"identity, gzip",
            b"gzip,identity",
            b"x",
        ] {
            assert!(is_encoded(coded), "{coded:?}");
        }
    }
}
