//! Settings of exchanges, and the only place of their defaults.

use crate::headers;

/// The default headers in a record: the session headers, without which a decision cannot be
/// repeated. Session headers are not secret.
pub const RECORDED_HEADERS_DEFAULT: &str = "x-session-id,x-session-token";

/// The format of the ranked list for the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationFormat {
    /// The whole list, comma-separated, for `override_host`.
    List,
    /// The first endpoint, and the second one in the fallback header. This format is for
    /// `ORIGINAL_DST` clusters and for readers of the older protocol text.
    Single,
}

/// When a request is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecideAt {
    /// At the last byte of the body.
    Body,
    /// At the headers, by load, session, subset and a model header. The body passes unread. Use
    /// this mode for proxies that cannot hold a body.
    Headers,
}

/// What happens to a request if the proxy still has no state when the wait for it is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureMode {
    /// The filter refuses the request (503).
    Close,
    /// The fallback load balancer picks any host.
    Open,
}

/// Whether to trust a header that affects other clients: the objective, the fairness id, or the
/// SLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderTrust {
    /// The header has no effect, because clients can set it, and must not affect other clients.
    Ignore,
    /// The header is used, because a proxy or gateway in front sets it and removes the client's
    /// own.
    Trust,
}

/// The values that flow control reads from a request: its fairness id, and how long it may wait.
#[derive(Clone, Debug)]
pub struct FlowRequestSettings {
    /// Namespace of the fairness id in filter metadata; empty if the proxy sets none.
    pub namespace: String,
    /// Path of the fairness id in that namespace; keys are separated by `/`.
    pub key: String,
    /// Whether the header with the fairness id is trusted.
    pub header: HeaderTrust,
    /// The header with the longest wait of a request, in ms. Empty means no header. A request can
    /// shorten the wait that its band allows, but not prolong it.
    pub ttl_header: String,
}

/// The place where the ranked list is written.
#[derive(Clone, Debug)]
pub struct DestinationSettings {
    /// Header (and metadata key) of the destination.
    pub header: String,
    /// Header of the second choice in [`DestinationFormat::Single`].
    pub fallback_header: String,
    /// The format of the ranked list.
    pub format: DestinationFormat,
}

/// The place where a gateway writes the subset hint.
#[derive(Clone, Debug)]
pub struct SubsetSettings {
    /// Namespace of the subset hint in filter metadata.
    pub namespace: String,
    /// Key of the subset hint in that namespace.
    pub key: String,
}

/// Selects the decisions that are recorded for `switchpointd explain`.
#[derive(Clone, Debug)]
pub struct DecisionLogSettings {
    /// One in this many decisions is recorded completely. 0 means none. A record has some 200 bytes
    /// for each endpoint.
    pub one_in: u32,
    /// Request headers that a record may show, comma-separated. The list is needed because plugins
    /// may read any header, even credentials.
    pub headers: String,
}

/// The actions after a failed attempt.
#[derive(Clone, Debug)]
pub struct RetrySettings {
    /// Whether failed attempts are retried on the rest of the ranked list.
    pub enabled: bool,
    /// The time that one attempt of a streamed request may take until its response headers, in ms.
    /// 0 means no limit. The limit never applies to unstreamed replies, whose headers come at the
    /// end.
    pub per_try_timeout_ms: u64,
}

/// The settings of all exchanges of one filter configuration. The fields have the names of the
/// configuration.
#[derive(Clone, Debug)]
pub struct ExchangeSettings {
    pub destination: DestinationSettings,
    pub subset: SubsetSettings,
    /// When a request on an inference path is decided.
    pub decide_at: DecideAt,
    /// The header that names the model if the body is not read. The sender of the header must have
    /// read the body, because a client could name one model in the header and another in the body.
    pub model_header: String,
    /// The largest request body on an inference path, in bytes after decompression. A million-token
    /// prompt is about 5 MB. Envoy's own limit (32 MiB in the shipped files) is higher, so that the
    /// error comes from here.
    pub body_limit_bytes: usize,
    /// What happens to a request if the proxy receives no state within
    /// [`Self::cold_start_wait_ms`].
    pub failure_mode: FailureMode,
    /// How long a request may wait for the first state, ms.
    pub cold_start_wait_ms: u64,
    /// A reply that its client does not read is reset after this time without a byte, in ms. 0
    /// means never.
    pub unread_reset_ms: u64,
    /// Path that answers 200 once all pools have state.
    pub ready_path: String,
    /// Whether a client may request the reasons for a decision by header.
    pub explain: bool,
    /// The header by which a proxy in front names the authenticated client. The proxy must replace
    /// the client's own header. Empty means no header.
    pub client_header: String,
    /// The key from which each named client gets its own `cache_salt`, which replaces the one that
    /// the client sent. If the key is empty, clients choose their `cache_salt`.
    pub cache_salt_key: String,
    pub objective_header: HeaderTrust,
    /// Whether the SLO headers are trusted. An SLO limits the service of other requests at its
    /// endpoint.
    pub slo_headers: HeaderTrust,
    /// The values that flow control reads from a request.
    pub flow: FlowRequestSettings,
    pub decision_log: DecisionLogSettings,
    pub retry: RetrySettings,
}

// === impl ExchangeSettings ===

impl ExchangeSettings {
    /// Whether engines must not share cached prefixes between clients with different names.
    #[must_use]
    pub fn separates_caches(&self) -> bool {
        !self.cache_salt_key.is_empty()
    }

    /// Whether `name` is a header that a client must not set. `name` is lower-case.
    #[must_use]
    pub fn removes(&self, name: &[u8]) -> bool {
        let ours = [&self.destination.header, &self.destination.fallback_header];
        headers::is_control(name)
            || ours.iter().any(|header| header.as_bytes() == name)
            || (self.objective_header == HeaderTrust::Ignore
                && headers::OBJECTIVE
                    .iter()
                    .any(|header| header.as_bytes() == name))
    }
}

impl Default for ExchangeSettings {
    fn default() -> Self {
        Self {
            destination: DestinationSettings {
                header: headers::DESTINATION.to_owned(),
                fallback_header: headers::DESTINATION_FALLBACK.to_owned(),
                format: DestinationFormat::List,
            },
            subset: SubsetSettings {
                namespace: headers::SUBSET_NAMESPACE.to_owned(),
                key: headers::SUBSET.to_owned(),
            },
            decide_at: DecideAt::Body,
            model_header: headers::MODEL.to_owned(),
            body_limit_bytes: 24 << 20,
            failure_mode: FailureMode::Close,
            cold_start_wait_ms: 2_000,
            unread_reset_ms: 60_000,
            ready_path: "/switchpoint/ready".to_owned(),
            explain: false,
            client_header: String::new(),
            cache_salt_key: String::new(),
            objective_header: HeaderTrust::Ignore,
            slo_headers: HeaderTrust::Trust,
            flow: FlowRequestSettings {
                namespace: String::new(),
                key: String::new(),
                header: HeaderTrust::Ignore,
                ttl_header: String::new(),
            },
            decision_log: DecisionLogSettings {
                one_in: 0,
                headers: RECORDED_HEADERS_DEFAULT.to_owned(),
            },
            retry: RetrySettings {
                enabled: true,
                per_try_timeout_ms: 0,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_chooses_its_priority_only_where_it_is_trusted() {
        let mut settings = ExchangeSettings::default();
        assert!(
            headers::OBJECTIVE
                .iter()
                .all(|name| settings.removes(name.as_bytes()))
        );
        settings.objective_header = HeaderTrust::Trust;
        assert!(
            !headers::OBJECTIVE
                .iter()
                .any(|name| settings.removes(name.as_bytes()))
        );
    }

    #[test]
    fn headers_named_by_the_operator_are_the_operators() {
        let mut settings = ExchangeSettings::default();
        settings.destination.header = "x-to".to_owned();
        settings.destination.fallback_header = "x-else".to_owned();
        assert!(
            settings.removes(b"x-to")
                && settings.removes(b"x-else")
                && settings.removes(headers::DESTINATION.as_bytes())
        );
        assert!(!settings.removes(b"authorization"));
    }
}
