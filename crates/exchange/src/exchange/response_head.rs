//! The head of a response, and which server or proxy it came from.

use crate::headers;

/// The status of an upgraded connection, on which both sides may be silent. So it is never reset.
pub(super) const SWITCHING_PROTOCOLS: u16 = 101;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseOrigin {
    /// A model server.
    Upstream,
    /// The proxy, because no attempt got a response.
    Proxy,
    /// The proxy, after the last endpoint got the request and lost the connection.
    Lost,
    /// The proxy, after the last endpoint did not answer in time.
    TimedOut,
    /// Switchpoint, or the proxy for a reason that is no server's fault.
    #[default]
    Ours,
}

/// The response headers that an exchange reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResponseHead<'h> {
    pub origin: ResponseOrigin,
    pub status: u16,
    /// `ip:port` of the host of the last attempt, when known.
    pub upstream_address: Option<&'h [u8]>,
    /// Attempts made, including the last; 0 when unknown or none.
    pub attempts: u32,
    pub content_type: Option<&'h [u8]>,
    /// Whether a `content-encoding` names a coding. Compressed bodies are not read.
    pub encoded: bool,
    pub content_length: Option<usize>,
    /// Whether the headers go to the client before the body arrives. Then they cannot get the
    /// length of a changed body.
    pub go_first: bool,
    /// `endpoint-load-metrics`, when the engine sent it.
    pub load: Option<&'h [u8]>,
    /// Whether the response has no body.
    pub end_of_stream: bool,
}

// === impl ResponseOrigin ===

impl ResponseOrigin {
    /// Reads Envoy's `response.code_details`. Only details that name the upstream count against the
    /// endpoint. Even after it chose a host, the proxy itself may reply, because the client sent a
    /// broken chunk or stalled its upload.
    #[must_use]
    pub fn of_details(details: &[u8]) -> Self {
        const UNANSWERED: [&[u8]; 2] = [b"upstream_per_try_timeout", b"upstream_response_timeout"];
        const RESET: [&[u8]; 2] = [
            b"upstream_reset_before_response_started",
            b"upstream_reset_after_response_started",
        ];
        // The reason of a reset is in braces. The reasons in this list mean that there was no
        // connection.
        const UNCONNECTED: [&[u8]; 2] = [b"connection_failure", b"connection_timeout"];
        let starts = |prefixes: &[&[u8]]| prefixes.iter().any(|prefix| details.starts_with(prefix));
        match details {
            b"via_upstream" => Self::Upstream,
            _ if starts(&RESET)
                && UNCONNECTED
                    .iter()
                    .any(|reason| memchr::memmem::find(details, reason).is_some()) =>
            {
                Self::Proxy
            }
            // The proxy's own circuit breaker.
            _ if memchr::memmem::find(details, b"{overflow").is_some() => Self::Ours,
            _ if starts(&RESET) => Self::Lost,
            _ if starts(&UNANSWERED) => Self::TimedOut,
            _ => Self::Ours,
        }
    }
}

// === impl ResponseHead ===

impl<'h> ResponseHead<'h> {
    /// Reads the headers; names are lower-case.
    pub fn read(pairs: impl IntoIterator<Item = (&'h [u8], &'h [u8])>) -> Self {
        let mut head = Self::default();
        for (name, value) in pairs {
            match name {
                b":status" => head.status = number(value).unwrap_or(0),
                b"content-length" => head.content_length = number(value),
                b"content-type" => head.content_type = Some(value),
                b"content-encoding" => head.encoded |= headers::is_encoded(value),
                _ if name == headers::LOAD.as_bytes() => head.load = Some(value),
                _ => {}
            }
        }
        head
    }
}

fn number<N: std::str::FromStr>(value: &[u8]) -> Option<N> {
    std::str::from_utf8(value).ok()?.parse().ok()
}
