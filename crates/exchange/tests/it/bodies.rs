//! Request bodies: what the reader finds in them (goldens), and properties that hold for any body.

use exchange::api::RequestApi;
use exchange::body::{self, BodyError, ParsedRequest, PromptPiece, PromptPieces};
use proptest::prelude::*;

use crate::golden;

pub(crate) const APIS: [&str; 12] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/conversations",
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/inference/v1/generate",
    "/generate",
];

type Parsed = ParsedRequest<PromptPieces>;

fn parse(path: &str, body: &(impl AsRef<[u8]> + ?Sized)) -> Result<Parsed, BodyError> {
    body::parse(
        RequestApi::for_request(b"POST", path.as_bytes()),
        body.as_ref(),
        PromptPieces::default(),
    )
}

fn chat(body: &(impl AsRef<[u8]> + ?Sized)) -> Result<Parsed, BodyError> {
    parse("/v1/chat/completions", body)
}

fn texts(texts: &[&str]) -> Vec<PromptPiece> {
    texts
        .iter()
        .map(|text| PromptPiece::Text(text.as_bytes().to_vec()))
        .collect()
}

fn pieces(parsed: &Parsed) -> Vec<PromptPiece> {
    parsed.prompt.iter().cloned().collect()
}

fn describe(parsed: &Parsed, body: &[u8]) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut out = match parsed.model_span.clone() {
        Some(span) => format!(
            "model {}, written {} in the body\n",
            parsed.model,
            text(&body[span])
        ),
        None => "no model\n".to_owned(),
    };
    if parsed.stream {
        out += if parsed.include_usage {
            "streamed, with usage at the end\n"
        } else {
            "streamed\n"
        };
    }
    if let Some(max_tokens) = parsed.max_tokens {
        out += &format!("at most {max_tokens} tokens\n");
    }
    if !parsed.cache_salt.is_empty() {
        out += &format!("cache salt {}\n", text(&parsed.cache_salt));
    }
    out += &format!(
        "{} bytes of text, {} token ids, {} media",
        parsed.prompt_bytes, parsed.prompt_token_ids, parsed.media_items
    );
    for piece in parsed.prompt.iter() {
        out += &match piece {
            PromptPiece::Text(bytes) => format!("\n    text  {}", text(bytes)),
            PromptPiece::Media(bytes) => format!("\n    media {}", text(bytes)),
        };
    }
    out
}

#[test]
fn bodies_read_as_the_goldens_say() {
    golden::check("bodies", |path, body| match parse(path, body) {
        Ok(parsed) => describe(&parsed, body),
        Err(error) => format!("refused: {error}"),
    });
}

#[test]
fn a_body_cut_short_anywhere_is_refused() {
    let body = r#"{"model":"m\u0041é","messages":[{"role":"user","content":[{"type":"text","text":"a\n"}]}],"n":-1.5e+3,"x":[true,null]}"#;
    for end in 0..body.len() {
        let cut = &body.as_bytes()[..end];
        assert!(
            matches!(chat(cut), Err(BodyError::InvalidJson { offset }) if offset <= end),
            "{:?}",
            String::from_utf8_lossy(cut)
        );
    }
    assert_eq!(chat(body).unwrap().model, "mAé");
}

#[test]
fn invalid_utf_8_is_refused_wherever_it_stands() {
    for bad in [
        &b"\xff"[..],
        b"\xc3",
        b"\xc3(",
        b"\xe2\x82",
        b"\xed\xa0\x80",
        b"\xf0\x9f\x98",
        b"\xf5\x80\x80\x80",
        b"\x80",
        b"\xc0\xaf",
    ] {
        for (before, after) in [
            (r#"{"model":""#, r#""}"#),
            (
                r#"{"model":"m","messages":[{"role":"user","content":""#,
                r#""}]}"#,
            ),
            (r#"{"model":"m",""#, r#"":1}"#),
            (
                r#"{"model":"m","unknown":{"a":["a long enough string to fill more than one block of the scan, by far and away, "#,
                r#""]}}"#,
            ),
            (r#"{"model":"m","x":"#, r#"1}"#),
            (r#"{"model":"m"}"#, ""),
            ("", r#"{"model":"m"}"#),
        ] {
            let body = [before.as_bytes(), bad, after.as_bytes()].concat();
            let error = chat(&body).unwrap_err();
            assert!(
                matches!(error, BodyError::InvalidJson { offset } if offset >= before.len() && offset <= before.len() + bad.len()),
                "{error:?}"
            );
        }
    }
}

/// Returns a gRPC frame with `{endpoint = 1, http_body = 2: {content_type = 1, data = 2: json}}`.
fn vertex(json: &str) -> Vec<u8> {
    let field = |number: u8, bytes: &[u8]| {
        [
            &[number << 3 | 2, u8::try_from(bytes.len()).unwrap()],
            bytes,
        ]
        .concat()
    };
    let message = [
        field(1, b"endpoints/1"),
        field(
            2,
            &[field(1, b"application/json"), field(2, json.as_bytes())].concat(),
        ),
    ]
    .concat();
    [
        &[0][..],
        &u32::try_from(message.len()).unwrap().to_be_bytes(),
        &message,
    ]
    .concat()
}

#[test]
fn vertex_ai_wraps_the_bodies_of_others() {
    let path = "/google.cloud.aiplatform.v1beta1.PredictionService/";
    let body = vertex(r#"{"model":"m","max_tokens":5,"messages":[{"content":"hi"}]}"#);
    let parsed = parse(&format!("{path}ChatCompletions"), &body).unwrap();
    assert_eq!(
        (&*parsed.model, parsed.model_span.clone(), parsed.max_tokens),
        ("m", None, Some(5))
    );
    assert_eq!(pieces(&parsed), texts(&["hi"]));
    let body = vertex(r#"{"input":"hi","max_output_tokens":6}"#);
    for method in ["RawPredict", "StreamRawPredict"] {
        let parsed = parse(&format!("{path}{method}"), &body).unwrap();
        assert_eq!((&*parsed.model, parsed.max_tokens), ("", Some(6)));
        assert_eq!(pieces(&parsed), texts(&["hi"]));
    }
    assert_eq!(
        parse(&format!("{path}RawPredict"), r#"{"input":"hi"}"#).unwrap_err(),
        BodyError::NotGrpc
    );
    assert_eq!(
        parse(&format!("{path}RawPredict"), &vertex("{")).unwrap_err(),
        BodyError::InvalidJson { offset: 1 }
    );
}

#[test]
fn bytes_that_json_does_not_know_are_refused() {
    for body in [
        "\u{feff}{\"model\":\"m\"}",
        "{\"model\":\"m\"}\0",
        "{\"model\":\"a\0b\"}",
        "{\"model\":\"a\nb\"}",
        "{\"model\":\"m\"} {}",
        "",
        " ",
    ] {
        assert!(
            matches!(chat(body), Err(BodyError::InvalidJson { .. })),
            "{body:?}"
        );
    }
}

#[test]
fn nesting_is_read_down_to_its_limit_and_no_further() {
    let nested = |levels: usize| {
        format!(
            r#"{{"model":"m","x":{}1{}}}"#,
            r#"[{"a":"#.repeat(levels / 2),
            "}]".repeat(levels / 2)
        )
    };
    assert!(chat(&nested(126)).is_ok());
    assert_eq!(
        chat(&nested(128)).unwrap_err(),
        BodyError::TooDeep { max: 128 }
    );
    for open in ["[", r#"{"a":"#] {
        for field in ["x", "messages", "tools", "model"] {
            let body = format!(r#"{{"model":"m","{field}":{}"#, open.repeat(1_000_000));
            assert_eq!(
                chat(&body).unwrap_err(),
                BodyError::TooDeep { max: 128 },
                "{field}"
            );
        }
    }
}

#[test]
fn wrong_types_in_fields_we_can_do_without_read_as_absent() {
    for value in [
        "null",
        "1",
        "-1",
        "1e999999",
        "true",
        r#""text""#,
        "[]",
        "{}",
        "[[1],{\"a\":[]}]",
        r#"{"content":7}"#,
    ] {
        let body = format!(
            r#"{{"model":"m","stream":{value},"stream_options":{value},"max_tokens":{value},"cache_salt":{value},"tools":{value},"messages":{value},
                "prompt":{value},"input":{value},"instructions":{value},"system":{value},"max_output_tokens":{value},
                "sampling_params":{value},"token_ids":{value},"features":{value},"text":{value},"image_data":{value},"items":{value},"extra_key":{value}}}"#
        );
        for api in APIS {
            assert!(parse(api, &body).is_ok(), "{api} {value}");
        }
    }
}

/// Generates values as clients might nest them where the APIs put text, parts and media.
pub(crate) fn json() -> impl Strategy<Value = String> {
    let scalar = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        any::<i64>().prop_map(|n| n.to_string()),
        any::<f64>()
            .prop_filter("JSON has no infinities", |n| n.is_finite())
            .prop_map(|n| n.to_string()),
        any::<String>().prop_map(|text| serde_json::Value::from(text).to_string()),
    ];
    let key = prop_oneof![
        4 => proptest::sample::select(vec![
            "role", "content", "text", "type", "image_url", "tool_calls", "model", "messages", "prompt", "input", "stream", "system", "tools",
        ]).prop_map(str::to_owned),
        1 => any::<String>(),
    ];
    scalar.prop_recursive(6, 64, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6)
                .prop_map(|values| format!("[{}]", values.join(", "))),
            prop::collection::vec((key.clone(), inner), 0..6).prop_map(|members| {
                let members: Vec<_> = members
                    .iter()
                    .map(|(key, value)| {
                        format!("{}:{value}", serde_json::Value::from(key.as_str()))
                    })
                    .collect();
                format!("{{{}}}", members.join(",\n"))
            }),
        ]
    })
}

#[test]
fn what_python_takes_for_json_and_json_is_not_is_refused() {
    for body in [
        r#"{"model":"m","temperature":NaN}"#,
        r#"{"model":"m","temperature":Infinity}"#,
        r#"{"model":"m","temperature":-Infinity}"#,
        "\u{feff}{\"model\":\"m\"}",
        r#"{'model':'m'}"#,
        r#"{"model":"m",}"#,
        "{\"model\":\"m\u{1}\"}",
    ] {
        assert!(
            matches!(chat(body), Err(BodyError::InvalidJson { .. })),
            "{body:?}"
        );
    }
}

#[test]
fn text_among_token_ids_is_part_of_their_list() {
    let prompt = r#"[1,2,"text among ids",{"type":"image_url","image_url":"u"}]"#;
    let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
    let parsed = parse("/v1/completions", &body).unwrap();
    assert_eq!(
        (
            parsed.prompt_token_ids,
            parsed.prompt_bytes,
            parsed.media_items
        ),
        (2, 0, 0)
    );
    assert_eq!(pieces(&parsed), texts(&[prompt]));
    let parsed = parse(
        "/v1/completions",
        r#"{"model":"m","prompt":["text before ids",1,[2,3]]}"#,
    )
    .unwrap();
    assert_eq!(
        (parsed.prompt_token_ids, parsed.prompt_bytes),
        (2, "text before ids".len())
    );
    assert_eq!(pieces(&parsed), texts(&["text before ids", "[2,3]"]));
}

#[test]
fn what_sagemaker_invokes_is_what_its_body_holds() {
    for (body, prompt) in [
        (
            r#"{"messages":[{"role":"user","content":"hi"}],"max_completion_tokens":7}"#,
            vec!["user", "hi"],
        ),
        (r#"{"model":"m","prompt":"hi","max_tokens":7}"#, vec!["hi"]),
        (r#"{"input":["a","b"],"max_tokens":7}"#, vec!["a", "b"]),
    ] {
        let parsed = parse("/invocations", body).unwrap();
        assert_eq!(parsed.max_tokens, Some(7), "{body}");
        assert_eq!(pieces(&parsed), texts(&prompt), "{body}");
    }
    assert!(matches!(
        parse("/invocations", "hi"),
        Err(BodyError::InvalidJson { .. })
    ));
}

proptest! {
    #[test]
    fn the_last_of_duplicate_fields_counts(first in json(), last in json(), path in proptest::sample::select(APIS.to_vec())) {
        for field in ["model", "stream", "stream_options", "max_tokens", "max_output_tokens", "cache_salt", "tools", "messages", "prompt", "input", "sampling_params", "token_ids", "items", "text"] {
            let once = format!(r#"{{"model":"m",    "{field}":{last}}}"#);
            let twice = format!(r#"{{"model":"m","{field}":{first},"{field}":{last}}}"#);
            match (parse(path, &once), parse(path, &twice)) {
                (Ok(once), Ok(twice)) => {
                    prop_assert_eq!(&once.model, &twice.model);
                    prop_assert_eq!((once.stream, once.include_usage, once.max_tokens, &once.cache_salt), (twice.stream, twice.include_usage, twice.max_tokens, &twice.cache_salt));
                    prop_assert_eq!((once.media_items, once.prompt_bytes, once.prompt_token_ids), (twice.media_items, twice.prompt_bytes, twice.prompt_token_ids));
                    prop_assert_eq!(once.prompt, twice.prompt);
                }
                (once, twice) => prop_assert_eq!(once.unwrap_err(), twice.unwrap_err()),
            }
        }
    }

    #[test]
    fn model_and_stream_agree_with_serde_json(members in prop::collection::vec((prop_oneof![Just("model"), Just("stream"), Just("max_tokens"), Just("x")], json()), 0..6)) {
        let members: Vec<_> = members.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
        let body = format!("{{{}}}", members.join(","));
        let value: serde_json::Value = serde_json::from_str(&body).unwrap();
        match (chat(&body), value.get("model")) {
            (Ok(parsed), Some(serde_json::Value::String(model))) => {
                prop_assert_eq!(&*parsed.model, model);
                let literal: String = serde_json::from_str(&body[parsed.model_span.clone().unwrap()]).unwrap();
                prop_assert_eq!(&literal, model);
                prop_assert_eq!(parsed.stream, value.get("stream") == Some(&true.into()));
                let max_tokens = value.get("max_tokens").and_then(|max| max.as_u64().or(max.as_f64().filter(|max| *max >= 0.0).map(|max| max as u64)));
                prop_assert_eq!(parsed.max_tokens, max_tokens.map(|max| u32::try_from(max).unwrap_or(u32::MAX)));
            }
            (Err(BodyError::EmptyModel), model) => prop_assert_eq!(model, Some(&"".into())),
            (Err(BodyError::MissingModel), model) => prop_assert_eq!(model, None),
            (Err(BodyError::ModelNotAString), model) => prop_assert!(model.is_some_and(|model| !model.is_string())),
            (other, _) => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_more_message_leaves_the_pieces_before_it_as_they_were(messages in prop::collection::vec(json(), 0..6), more in json()) {
        let body = |messages: &[String]| format!(r#"{{"model":"m","messages":[{}]}}"#, messages.join(","));
        let short = body(&messages);
        let long = body(&[messages, vec![more]].concat());
        let short = chat(&short).unwrap();
        let long = chat(&long).unwrap();
        // A list of bare token ids is one piece, so a longer list changes the piece.
        if long.prompt_token_ids == 0 {
            prop_assert!(long.prompt.iter().take(short.prompt.iter().count()).eq(short.prompt.iter()));
        }
    }

    #[test]
    fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..300), path in proptest::sample::select(APIS.to_vec())) {
        let _ = parse(path, &body);
    }
}
