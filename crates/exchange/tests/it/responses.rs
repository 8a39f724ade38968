//! Responses as they pass: goldens, and the property that it does not matter where the bytes are
//! cut.

use std::fmt::Write as _;

use exchange::api::RequestApi;
use exchange::sse::{ChunkProgress, HELD_BYTES_MAX, HELD_BYTES_MIN, ResponseReader, TokenUsage};
use proptest::prelude::*;

use crate::golden;

/// The result of reading a response. The result is the same for all cuts.
#[derive(Debug, PartialEq)]
struct ResponseReading {
    events: u32,
    /// The number of bytes of the response up to the end of the chunk with the first token.
    first_token_after: Option<usize>,
    usage: TokenUsage,
}

fn read<'b>(
    api: RequestApi,
    streamed: bool,
    chunks: impl IntoIterator<Item = &'b [u8]>,
) -> ResponseReading {
    let mut reader = ResponseReader::new(api, streamed);
    let mut seen = ResponseReading {
        events: 0,
        first_token_after: None,
        usage: TokenUsage::default(),
    };
    let mut passed = 0;
    for chunk in chunks {
        let ChunkProgress {
            first_token,
            events,
        } = reader.chunk(chunk);
        passed += chunk.len();
        seen.events += events;
        assert!(!first_token || events > 0, "a first token is in an event");
        if first_token {
            assert_eq!(
                seen.first_token_after.replace(passed),
                None,
                "there is one first token"
            );
        }
    }
    seen.usage = reader.finish();
    seen
}

fn parse_head(head: &str) -> (RequestApi, bool) {
    let (path, how) = head.split_once(' ').unwrap();
    assert!(["streamed", "unstreamed"].contains(&how), "{head}");
    (
        RequestApi::for_request(b"POST", path.as_bytes()),
        how == "streamed",
    )
}

/// Returns the bytes on the wire of a response in a golden.
fn wire(streamed: bool, body: &[u8]) -> Vec<u8> {
    if streamed {
        [body, b"\n\n"].concat()
    } else {
        body.to_vec()
    }
}

#[test]
fn responses_read_as_the_goldens_say() {
    golden::check("responses", |head, body| {
        let (api, streamed) = parse_head(head);
        let body = wire(streamed, body);
        let seen = read(api, streamed, body.chunks(1));
        let mut out = String::new();
        if streamed {
            let tail = |end: usize| {
                String::from_utf8_lossy(&body[..end])
                    .trim_end()
                    .lines()
                    .last()
                    .unwrap_or_default()
                    .to_owned()
            };
            let first = seen
                .first_token_after
                .map_or("never".to_owned(), |end| format!("with  {}", tail(end)));
            let _ = writeln!(
                out,
                "{} events with content; first token {first}",
                seen.events
            );
        }
        let show =
            |count: Option<u32>| count.map_or("unknown".to_owned(), |count| count.to_string());
        let TokenUsage {
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            estimated,
        } = seen.usage;
        let estimated = if estimated { " (estimated)" } else { "" };
        let prompt = show(prompt_tokens);
        let completion = show(completion_tokens);
        let cached = show(cached_tokens);
        out + &format!(
            "tokens: prompt {prompt}, of them cached {cached}; completion {completion}{estimated}"
        )
    });
}

#[test]
fn cuts_and_line_ends_change_nothing() {
    golden::for_each_case("responses", |head, body| {
        let (api, streamed) = parse_head(head);
        let plain = wire(streamed, body);
        let whole = read(api, streamed, [&plain[..]]);
        let same = |seen: &ResponseReading| {
            (seen.events, seen.first_token_after.is_some(), seen.usage)
                == (whole.events, whole.first_token_after.is_some(), whole.usage)
        };
        let text = String::from_utf8(plain).unwrap();
        for line_end in if streamed {
            &["\n", "\r\n", "\r"][..]
        } else {
            &["\n"]
        } {
            let body = text.replace('\n', line_end).into_bytes();
            for cut in 0..=body.len() {
                let seen = read(api, streamed, [&body[..cut], &body[cut..]]);
                assert!(
                    same(&seen),
                    "cut at {cut} with {line_end:?}: {seen:?} instead of {whole:?} in {head}\n{text}"
                );
            }
            for size in 1..20 {
                assert!(
                    same(&read(api, streamed, body.chunks(size))),
                    "chunks of {size} with {line_end:?} in {head}\n{text}"
                );
            }
        }
    });
}

/// Checks a body that is longer than the part held between chunks: `usage` is found if it is near
/// the end and at its own depth. No other text is read as `usage`.
#[test]
fn the_end_of_a_long_response_is_enough() {
    let filler = |bytes: usize| r#"{"usage":{"prompt_tokens":666}},"#.repeat(bytes / 32);
    let fake = r#"\"usage\":{\"prompt_tokens\":666}"#;
    let usage = r#""usage":{"prompt_tokens":7,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":3}}"#;
    let found = TokenUsage {
        prompt_tokens: Some(7),
        completion_tokens: Some(5),
        cached_tokens: Some(3),
        estimated: false,
    };
    let long = filler(HELD_BYTES_MAX * 3);
    for (body, expected) in [
        (format!(r#"{{"data":[{long}1],{usage}}}"#), found),
        (
            format!(r#"{{"data":[{long}1],{usage},"text":"{fake}"}}"#),
            found,
        ),
        (
            format!(
                r#"{{"data":[{long}1], "usage" : {},"x":{{"usage":{{"prompt_tokens":666}}}} }} "#,
                &usage[8..]
            ),
            found,
        ),
        (
            format!(r#"{{{usage},"data":[{long}1]}}"#),
            TokenUsage::default(),
        ),
        (
            format!(r#"{{{usage},"data":[{}1]}}"#, filler(HELD_BYTES_MIN / 2)),
            found,
        ),
        (
            format!(r#"{{"data":[{long}1],"text":"{fake}"}}"#),
            TokenUsage::default(),
        ),
        (
            format!(r#"{{"data":[{long}1],"x":{{{usage}}}}}"#),
            TokenUsage::default(),
        ),
        (
            format!(r#"{{"data":[{long}1],{usage}"#),
            TokenUsage::default(),
        ),
        (
            format!(r#"{{"data":[{long}1],"usage":null}}"#),
            TokenUsage::default(),
        ),
        (
            format!(
                r#"{{"data":[{long}1],{usage},"x":"{}"}}"#,
                "x".repeat(HELD_BYTES_MIN - 200)
            ),
            found,
        ),
        (
            format!(
                r#"{{"data":[{long}1],{usage},"x":"{}"}}"#,
                "x".repeat(HELD_BYTES_MIN)
            ),
            TokenUsage::default(),
        ),
    ] {
        for size in [1, 1000, 16_384, 60_000, 65_536, 1_000_000] {
            let seen = read(RequestApi::Embeddings, false, body.as_bytes().chunks(size));
            assert_eq!(
                seen,
                ResponseReading {
                    events: 0,
                    first_token_after: None,
                    usage: expected
                },
                "chunks of {size}: {}…",
                &body[..60]
            );
        }
    }
}

#[test]
fn a_long_closing_event_still_tells_the_usage() {
    let text = "x".repeat(HELD_BYTES_MAX * 2);
    let closing = format!(
        r#"{{"type":"response.completed","response":{{"output":["{text}"],"usage":{{"input_tokens":9,"output_tokens":4,"input_tokens_details":{{"cached_tokens":8}}}},"user":null}},"n":7}}"#
    );
    let delta = r#"{"type":"response.output_text.delta","delta":"Hi"}"#;
    let stream = format!("data: {delta}\n\ndata: {closing}\n\ndata: {delta}\n\n");
    let usage = TokenUsage {
        prompt_tokens: Some(9),
        completion_tokens: Some(4),
        cached_tokens: Some(8),
        estimated: false,
    };
    for size in [1, 7, 16_384, 1_000_000] {
        let seen = read(RequestApi::Responses, true, stream.as_bytes().chunks(size));
        assert_eq!((seen.events, seen.usage), (2, usage), "chunks of {size}");
    }
}

#[test]
fn a_long_delta_counts_as_content() {
    let delta = format!(
        r#"{{"choices":[{{"delta":{{"content":"{}"}}}}]}}"#,
        "x".repeat(HELD_BYTES_MAX)
    );
    let stream = format!("data: {delta}\n\n");
    let seen = read(
        RequestApi::ChatCompletions,
        true,
        stream.as_bytes().chunks(16_384),
    );
    assert_eq!(
        (
            seen.events,
            seen.usage.completion_tokens,
            seen.usage.estimated
        ),
        (1, Some(1), true)
    );
}

fn stream_soup() -> impl Strategy<Value = Vec<u8>> {
    let fragment = proptest::sample::select(vec![
        &b"data:"[..],
        b"data: ",
        b"data",
        b"dat",
        b"event: x",
        b"id: 1",
        b": ping",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"[DONE]",
        b"{\"choices\":[{\"delta\":{\"content\":\"a\"}}]}",
        b"{\"choices\":[{\"text\":\"a\"}]}",
        b"{\"usage\":{\"prompt_tokens\":3}}",
        b"{\"usage\":",
        b"{\"completion_tokens\":2}",
        b"}",
        b"\xff",
        b"\xe4\xb8",
        b" ",
    ]);
    prop::collection::vec(fragment, 0..40).prop_map(|fragments| fragments.concat())
}

proptest! {
    #[test]
    fn any_bytes_read_the_same_however_they_are_cut(
        stream in prop_oneof![stream_soup(), prop::collection::vec(any::<u8>(), 0..200)],
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        streamed in any::<bool>(),
    ) {
        let whole = read(RequestApi::ChatCompletions, streamed, [&stream[..]]);
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        let seen = read(RequestApi::ChatCompletions, streamed, cuts.windows(2).map(|cut| &stream[cut[0]..cut[1]]));
        prop_assert_eq!((seen.events, seen.usage), (whole.events, whole.usage));
        prop_assert_eq!(seen.first_token_after.is_some(), whole.first_token_after.is_some());
    }
}

#[test]
fn what_the_stream_ends_in_is_an_event_too() {
    let stream = r#"data: {"choices":[{"text":"a"}]}"#;
    for whole in [
        String::new(),
        format!("{stream}\n\n"),
        format!("{stream}\n\n{stream}\n\n"),
    ] {
        let longer = format!("{whole}{stream}");
        let [whole, more] =
            [whole, longer].map(|text| read(RequestApi::Completions, true, [text.as_bytes()]));
        assert_eq!(
            more.events, whole.events,
            "the last event is seen only at the end"
        );
        assert_eq!(more.usage.completion_tokens, Some(whole.events + 1));
    }
}

/// Checks a stream of engines that report neither usage nor a finish reason, only the mark at the
/// end.
#[test]
fn a_stream_that_ends_with_the_mark_alone_is_whole() {
    let says = |stream: &str| {
        let mut reader =
            exchange::sse::ResponseReader::new(exchange::api::RequestApi::ChatCompletions, true);
        reader.chunk(stream.as_bytes());
        reader.finish();
        reader.says(true)
    };
    let token = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n";
    assert_eq!(says(token), pool_state::verdict::ErrorBody::Unfinished);
    for end in ["data: [DONE]\n\n", "data:[DONE]\r\n\r\n", "data: [DONE]"] {
        assert_eq!(
            says(&format!("{token}{end}")),
            pool_state::verdict::ErrorBody::Reply,
            "{end:?}"
        );
    }
}

/// Checks replies of engines that sleep, shut down or lost the request, and replies of an unusual
/// shape.
#[test]
fn a_reply_without_work_is_strange_and_an_unusual_one_is_not() {
    use pool_state::verdict::ErrorBody::{Reply, Strange, Unclear};
    let triton = "/v2/models/m/generate";
    let chat = |message: &str, rest: &str| {
        format!(r#"{{"id":"c","choices":[{{"message":{{{message}}},{rest}}}]}}"#)
    };
    let none = r#""usage":{"prompt_tokens":9,"completion_tokens":0}"#;
    let one = r#""usage":{"prompt_tokens":9,"completion_tokens":1}"#;
    for (path, body, expected) in [
        (
            "/v1/chat/completions",
            chat(r#""content":"hi""#, r#""finish_reason":"stop""#),
            Reply,
        ),
        (
            "/v1/chat/completions",
            chat(
                r#""content":null,"tool_calls":[{"id":"t"}]"#,
                r#""finish_reason":"tool_calls""#,
            ),
            Reply,
        ),
        (
            "/v1/chat/completions",
            chat(
                r#""content":"","reasoning":"hm""#,
                r#""finish_reason":"length""#,
            ),
            Reply,
        ),
        (
            "/v1/chat/completions",
            format!(
                r#"{{"choices":[{{"message":{{"content":""}},"finish_reason":"stop"}}],{one}}}"#
            ),
            Reply,
        ),
        (
            "/v1/chat/completions",
            format!(
                r#"{{"choices":[{{"message":{{"content":""}},"finish_reason":"stop"}}],{none}}}"#
            ),
            Strange,
        ),
        (
            "/v1/chat/completions",
            chat(r#""content":"""#, r#""finish_reason":"abort""#),
            Strange,
        ),
        (
            "/v1/chat/completions",
            chat(r#""content":null"#, r#""finish_reason":"stop""#),
            Strange,
        ),
        (
            "/v1/chat/completions",
            chat(r#""content":"h""#, r#""finish_reason":"abort""#),
            Strange,
        ),
        (
            "/v1/chat/completions",
            format!(r#"{{"choices":[],{none}}}"#),
            Strange,
        ),
        (
            "/v1/chat/completions",
            r#"{"status":"ok"}"#.to_owned(),
            Strange,
        ),
        (
            "/v1/completions",
            r#"{"choices":[{"text":"","finish_reason":"abort"}]}"#.to_owned(),
            Strange,
        ),
        (
            "/v1/completions",
            r#"{"choices":[{"text":"a"},{"text":""}]}"#.to_owned(),
            Reply,
        ),
        (
            "/generate",
            r#"{"text":"","meta_info":{"finish_reason":{"type":"abort"},"completion_tokens":0}}"#
                .to_owned(),
            Strange,
        ),
        (
            "/generate",
            r#"{"text":"a","meta_info":{"finish_reason":{"type":"abort"},"completion_tokens":1}}"#
                .to_owned(),
            Strange,
        ),
        (
            "/generate",
            r#"{"text":"a","meta_info":{"finish_reason":{"type":"length"},"completion_tokens":1}}"#
                .to_owned(),
            Reply,
        ),
        (
            "/generate",
            r#"[{"text":"a","meta_info":{}},{"text":"b"}]"#.to_owned(),
            Reply,
        ),
        (
            "/generate",
            r#"[{"text":"","meta_info":{"completion_tokens":0}}]"#.to_owned(),
            Strange,
        ),
        ("/generate", r#"[[1,2],[3]]"#.to_owned(), Unclear),
        ("/generate", r#"{"generated_text":"a"}"#.to_owned(), Reply),
        ("/generate", r#"{"text":["a","b"]}"#.to_owned(), Reply),
        (triton, r#"{"text_output":"a"}"#.to_owned(), Reply),
        (triton, r#"{"text_output":""}"#.to_owned(), Strange),
        (
            "/inference/v1/generate",
            r#"{"choices":[{"token_ids":[]}]}"#.to_owned(),
            Strange,
        ),
        (
            "/inference/v1/generate",
            r#"{"choices":[{"token_ids":[7]}]}"#.to_owned(),
            Reply,
        ),
        (
            "/v1/messages",
            r#"{"type":"message","content":[]}"#.to_owned(),
            Strange,
        ),
        (
            "/v1/messages",
            r#"{"type":"message","content":[{"type":"text","text":""}]}"#.to_owned(),
            Strange,
        ),
        (
            "/v1/messages",
            r#"{"type":"message","content":[{"type":"tool_use","name":"t","input":{}}]}"#
                .to_owned(),
            Reply,
        ),
        (
            "/v1/responses",
            r#"{"object":"response","status":"completed","output":[]}"#.to_owned(),
            Strange,
        ),
        (
            "/v1/responses",
            r#"{"object":"response","status":"queued","output":[]}"#.to_owned(),
            Unclear,
        ),
        (
            "/v1/responses",
            r#"{"output":[{"type":"message","content":[{"text":"a"}]}]}"#.to_owned(),
            Reply,
        ),
        (
            "/v1/responses",
            r#"{"output":[{"type":"function_call","name":"f"}]}"#.to_owned(),
            Reply,
        ),
        (
            "/invocations",
            format!(r#"{{"object":"list","data":[{{"embedding":[1]}}],{none}}}"#),
            Reply,
        ),
        (
            "/v1/embeddings",
            format!(r#"{{"object":"list","data":[{{"embedding":"AAAA"}}],{none}}}"#),
            Reply,
        ),
        ("/v1/embeddings", "\u{1}\u{2}binary".to_owned(), Unclear),
        ("/v1/embeddings", "[[0.5],[0.25]]".to_owned(), Unclear),
        ("/v1/embeddings", "{}".to_owned(), Strange),
        (
            "/v1/embeddings",
            " <html>It works!</html>".to_owned(),
            Strange,
        ),
        (
            "/v1/messages/count_tokens",
            r#"{"input_tokens":7}"#.to_owned(),
            Reply,
        ),
        (
            "/v1/chat/completions/render",
            r#"[{"prompt_token_ids":[1]}]"#.to_owned(),
            Unclear,
        ),
        (
            "/v1/chat/completions",
            "you said: hello".to_owned(),
            Strange,
        ),
    ] {
        let says = |wants_output| {
            let mut reader =
                ResponseReader::new(RequestApi::for_request(b"POST", path.as_bytes()), false);
            reader.chunk(body.as_bytes());
            reader.finish();
            reader.says(wants_output)
        };
        assert_eq!(says(true), expected, "{path} {body}");
        assert!(
            says(false) == expected || expected == Strange,
            "{path} {body}"
        );
    }
}

#[test]
fn a_reply_without_work_is_unclear_if_no_output_was_wanted() {
    use pool_state::verdict::ErrorBody::Unclear;
    let mut scored = ResponseReader::new(RequestApi::SglangGenerate, false);
    scored.chunk(br#"{"text":"","meta_info":{"finish_reason":{"type":"length","length":0},"completion_tokens":0}}"#);
    scored.finish();
    assert_eq!(scored.says(false), Unclear);
    assert!(!scored.has_generated());
}

#[test]
fn a_stream_without_work_is_strange() {
    use pool_state::verdict::ErrorBody::{Reply, Strange};
    let role = r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#;
    let last =
        |reason: &str| format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#);
    let token = r#"{"choices":[{"delta":{"content":"a"}}]}"#;
    let usage = |tokens| {
        format!(r#"{{"choices":[],"usage":{{"prompt_tokens":9,"completion_tokens":{tokens}}}}}"#)
    };
    for (events, expected) in [
        (vec![role.to_owned(), last("abort")], Strange),
        (vec![role.to_owned(), last("stop")], Strange),
        (vec![role.to_owned(), last("stop"), usage(0)], Strange),
        (vec![role.to_owned(), last("stop"), usage(1)], Reply),
        (
            vec![role.to_owned(), token.to_owned(), last("abort"), usage(1)],
            Strange,
        ),
        (vec![role.to_owned(), token.to_owned(), last("stop")], Reply),
        (vec![], Strange),
    ] {
        let stream: String = events
            .iter()
            .chain([&"[DONE]".to_owned()])
            .map(|event| format!("data: {event}\n\n"))
            .collect();
        let mut reader = ResponseReader::new(RequestApi::ChatCompletions, true);
        reader.chunk(stream.as_bytes());
        reader.finish();
        assert_eq!(reader.says(true), expected, "{stream}");
        assert_eq!(reader.has_generated(), expected == Reply, "{stream}");
    }
}

#[test]
fn an_answer_with_ever_new_ids_is_remembered_by_two_of_them() {
    let mut reader = ResponseReader::new(RequestApi::Responses, true);
    let mut taken = 0;
    for n in 0..1_000 {
        let event =
            format!(r#"data: {{"type":"response.created","response":{{"id":"resp_{n}"}}}}"#);
        reader.chunk(format!("{event}\n\n").as_bytes());
        taken += usize::from(reader.take_stored_id().is_some());
    }
    assert_eq!(taken, 2);
}
