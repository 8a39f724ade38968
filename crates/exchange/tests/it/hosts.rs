//! The data of a response that hosts pass on: its headers, and its origin by Envoy's response
//! details.

use exchange::{ResponseHead, ResponseOrigin};

#[test]
fn only_what_names_the_upstream_is_held_against_it() {
    for (details, origin) in [
        ("via_upstream", ResponseOrigin::Upstream),
        (
            "upstream_reset_before_response_started{connection_termination}",
            ResponseOrigin::Lost,
        ),
        (
            "upstream_reset_before_response_started{remote_reset}",
            ResponseOrigin::Lost,
        ),
        (
            "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_Connection_refused}",
            ResponseOrigin::Proxy,
        ),
        (
            "upstream_reset_before_response_started{connection_timeout}",
            ResponseOrigin::Proxy,
        ),
        (
            "upstream_reset_after_response_started{connection_termination}",
            ResponseOrigin::Lost,
        ),
        ("upstream_per_try_timeout", ResponseOrigin::TimedOut),
        ("upstream_response_timeout", ResponseOrigin::TimedOut),
        (
            "upstream_reset_before_response_started{overflow}",
            ResponseOrigin::Ours,
        ),
        ("via_upstream_or_not", ResponseOrigin::Ours),
        ("direct_response", ResponseOrigin::Ours),
        ("http1.codec_error", ResponseOrigin::Ours),
        ("", ResponseOrigin::Ours),
    ] {
        assert_eq!(
            ResponseOrigin::of_details(details.as_bytes()),
            origin,
            "{details}"
        );
    }
}

#[test]
fn the_headers_say_what_matters_of_a_response() {
    let pairs: [(&[u8], &[u8]); 6] = [
        (b":status", b"206"),
        (b"content-length", b"17"),
        (b"content-type", b"text/plain"),
        (b"content-encoding", b"gzip"),
        (b"endpoint-load-metrics", b"TEXT cpu=0.5"),
        (b"x-other", b"5"),
    ];
    let head = ResponseHead::read(pairs);
    assert_eq!(
        (head.status, head.content_length, head.encoded),
        (206, Some(17), true)
    );
    assert_eq!(
        (head.content_type, head.load),
        (Some(&b"text/plain"[..]), Some(&b"TEXT cpu=0.5"[..]))
    );
    let head = ResponseHead::read([pairs[5], (b":status", b"no"), (b"content-length", b"-1")]);
    assert_eq!(
        (
            head.status,
            head.content_length,
            head.encoded,
            head.content_type,
            head.load
        ),
        (0, None, false, None, None)
    );
}
