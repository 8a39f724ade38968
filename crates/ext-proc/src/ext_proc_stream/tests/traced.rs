//! The spans of streams.

use super::*;
use crate::span::{RequestSpan, SpanQueue};

const TRACE: &str = "traceparent=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0";
const REPLY: [&str; 2] = [
    "reply 200 content-type=application/json",
    r#"reply-last {"choices":[{"text":"x"}],"usage":{"prompt_tokens":900,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}"#,
];

/// Plays streams with these messages, and returns their spans.
fn spans(streams: &[Vec<&str>], parent: Option<TraceContext>) -> Vec<RequestSpan> {
    let server = server(&[SERVER, OTHER]);
    let (queue, mut spans) = SpanQueue::new();
    server.trace(queue);
    for lines in streams {
        let mut stream = stream(&server, with_format(DestinationFormat::List));
        stream.set_parent(parent);
        say(&mut stream, lines);
    }
    std::iter::from_fn(|| spans.try_recv().ok()).collect()
}

fn tag<'s>(span: &'s RequestSpan, name: &str) -> Option<&'s str> {
    span.attributes
        .iter()
        .find(|(known, _)| known.strip_prefix("switchpoint.") == Some(name))
        .map(|(_, value)| &**value)
}

#[test]
fn a_sampled_request_has_a_span_with_its_decision_and_outcome() {
    let head = format!("POST /v1/completions {TRACE}1");
    let body = format!(r#"last {{"model":"m","prompt":"{}"}}"#, "x".repeat(3_600));
    let [span] = &spans(&[[vec![&*head, &*body], REPLY.to_vec()].concat()], None)[..] else {
        panic!("one span")
    };
    assert_eq!(
        (span.context.trace_id >> 120, span.context.parent >> 56),
        (0x0a, 0xb7)
    );
    assert!(span.ended >= span.began && span.id != 0);
    assert!(tag(span, "destination").unwrap().starts_with(SERVER));
    assert!(
        tag(span, "candidates")
            .unwrap()
            .starts_with(&format!(r#"[{{"endpoint":"{SERVER}""#)),
        "{span:?}"
    );
    let of = |name| tag(span, name);
    assert_eq!(
        [
            of("prompt_tokens"),
            of("cached_tokens"),
            of("missed_tokens")
        ],
        [Some("900"), Some("0"), Some("900")]
    );
    assert_eq!(
        (of("miss_cause"), of("status"), of("refused")),
        (Some("never_seen"), Some("200"), None)
    );
    assert!(of("predicted_ttft_ms").is_some() && of("duration_ms").is_some());
}

#[test]
fn the_parent_is_that_of_the_stream_and_without_a_sampled_one_there_is_no_span() {
    let sampled = format!("GET /v1/models {TRACE}1");
    let not = format!("GET /v1/models {TRACE}0");
    let parent = TraceContext {
        trace_id: 5,
        parent: 6,
        sampled: true,
    };
    assert_eq!(
        spans(&[vec![&sampled], vec![&not], vec!["GET /v1/models"]], None).len(),
        1
    );
    let of_stream = spans(&[vec![&sampled], vec!["GET /v1/models"]], Some(parent));
    assert_eq!(
        of_stream
            .iter()
            .map(|span| span.context)
            .collect::<Vec<_>>(),
        [parent; 2]
    );
    assert_eq!(
        spans(
            &[vec![&sampled]],
            Some(TraceContext {
                sampled: false,
                ..parent
            })
        ),
        []
    );
}

#[test]
fn a_refused_request_has_a_span_too() {
    let head = format!("POST /v1/completions {TRACE}1");
    let [span] = &spans(&[vec![&*head, "last {"]], None)[..] else {
        panic!("one span")
    };
    assert_eq!(
        (tag(span, "refused"), tag(span, "candidates")),
        (Some("400"), None)
    );
}
