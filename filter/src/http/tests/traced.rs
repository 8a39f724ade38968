//! Tests the tags that the filter adds to the proxy's trace span.

use super::*;

/// Returns the tags set by a stream with this trace reason in its request id and this `traceparent`
/// flag.
fn tags(config: &str, reason: char, flag: char) -> Vec<String> {
    let world = HttpWorld::new(config);
    world.state("default");
    let parent = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0{flag}");
    let id = format!("f3f2a7b0-3f2a-{reason}c1d-8f00-0123456789ab");
    let headers = [
        (":method", "POST"),
        (":path", "/v1/completions"),
        ("x-request-id", &*id),
        ("traceparent", &*parent),
    ];
    let (mut stream, _) = world.headers(&headers, false);
    let prompt = "x".repeat(4_000);
    world.body(
        &mut stream,
        &format!(r#"{{"model":"m","prompt":"{prompt}"}}"#),
    );
    let destination = world.request_header(DESTINATION).unwrap();
    let first = destination.split(',').next().unwrap();
    world.respond(
        &mut stream,
        "via_upstream",
        first,
        &[(":status", "200"), ("content-type", "application/json")],
    );
    let usage = r#"{"choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}"#;
    world.piece(&mut stream, usage, true);
    let properties = world.host.properties.borrow();
    let tag = |name: &str| {
        properties
            .get(name)
            .map(|value| String::from_utf8_lossy(value).into_owned())
    };
    if let Some(candidates) = tag("switchpoint_candidates") {
        assert!(
            candidates.starts_with(&format!(r#"[{{"endpoint":"{first}""#))
                && candidates.contains(r#""scores":{"#),
            "{candidates}"
        );
        assert_eq!(
            (
                tag("switchpoint_missed_tokens"),
                tag("switchpoint_miss_cause")
            ),
            (Some("1000".into()), Some("never_seen".into()))
        );
    }
    properties
        .keys()
        .filter(|name| name.starts_with("switchpoint_"))
        .cloned()
        .collect()
}

#[test]
fn only_a_sampled_request_has_tags_and_only_if_the_operator_wants_them() {
    let on = r#"{"pools": [{"name": "default"}], "trace_tags": true}"#;
    let off = r#"{"pools": [{"name": "default"}]}"#;
    let mut names = tags(on, '9', '1');
    names.sort();
    let expected = [
        "cached_tokens",
        "candidates",
        "duration_ms",
        "miss_cause",
        "missed_tokens",
        "predicted_duration_ms",
    ];
    let expected: Vec<String> = expected
        .into_iter()
        .chain(["predicted_ttft_ms", "prompt_tokens"])
        .map(|name| format!("switchpoint_{name}"))
        .collect();
    assert_eq!(names, expected);
    for (config, reason, flag) in [(on, '9', '0'), (on, '4', '1'), (off, '9', '1')] {
        assert_eq!(tags(config, reason, flag), Vec::<String>::new());
    }
}
