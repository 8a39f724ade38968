//! The inference endpoints.

use http::{Method, StatusCode, Version};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use testbed::model_server::ModelServerOptions;

use crate::client::{chat, finish, get, instant, open, post, request, with};

#[tokio::test]
async fn a_stream_and_an_object_say_the_same() {
    let server = instant();
    let body = chat("hello", 5, &json!({}));
    let whole = post(server.addr(), "/v1/chat/completions", &body)
        .await
        .json();
    let streamed = chat(
        "hello",
        5,
        &json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let events = post(server.addr(), "/v1/chat/completions", &streamed)
        .await
        .events();

    assert_eq!(
        events.len(),
        1 + 5 + 1 + 1 + 1,
        "role, tokens, finish, usage, [DONE]"
    );
    assert_eq!(
        events[0].1["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    let said: String = events[1..6]
        .iter()
        .map(|(_, data)| data["choices"][0]["delta"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(said, whole["choices"][0]["message"]["content"]);
    assert_eq!(events[6].1["choices"][0]["finish_reason"], "length");
    assert_eq!(events[7].1["choices"], json!([]));
    assert_eq!(
        events[7].1["usage"],
        json!({"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 0}})
    );
    assert_eq!(events[8].1, "[DONE]");
    assert_eq!(whole["usage"]["completion_tokens"], 5);
}

#[tokio::test]
async fn usage_is_streamed_only_when_asked_for() {
    let server = instant();
    let events = post(
        server.addr(),
        "/v1/chat/completions",
        &chat("hello", 2, &json!({"stream": true})),
    )
    .await
    .events();
    assert!(
        events.iter().all(|(_, data)| data.get("usage").is_none()),
        "{events:?}"
    );
    let continuous = json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = post(
        server.addr(),
        "/v1/chat/completions",
        &chat("hello", 2, &continuous),
    )
    .await
    .events();
    let counts: Vec<_> = events
        .iter()
        .filter_map(|(_, data)| data["usage"]["completion_tokens"].as_u64())
        .collect();
    assert_eq!(counts, [1, 1, 2, 2, 2]);
}

#[tokio::test]
async fn every_family_answers_in_its_own_shape() {
    let server = instant();
    let ask = json!([{"role": "user", "content": "hello"}]);
    let limit = |key: &str, body: Value| {
        let mut body = body;
        body[key] = json!(3);
        body["ignore_eos"] = json!(true);
        body
    };
    for (path, body, usage, text) in [
        (
            "/v1/completions",
            limit("max_tokens", json!({"prompt": "hello"})),
            "/usage/completion_tokens",
            "/choices/0/text",
        ),
        (
            "/v1/completions",
            limit("max_tokens", json!({"prompt": [1, 2, 3]})),
            "/usage/prompt_tokens",
            "/choices/0/text",
        ),
        (
            "/v1/chat/completions",
            limit("max_completion_tokens", json!({"messages": ask})),
            "/usage/completion_tokens",
            "/choices/0/message/content",
        ),
        (
            "/v1/responses",
            limit("max_output_tokens", json!({"input": "hello"})),
            "/usage/output_tokens",
            "/output/0/content/0/text",
        ),
        (
            "/v1/responses",
            limit("max_output_tokens", json!({"input": ask})),
            "/usage/output_tokens",
            "/output/0/content/0/text",
        ),
        (
            "/v1/messages",
            limit("max_tokens", json!({"messages": ask})),
            "/usage/output_tokens",
            "/content/0/text",
        ),
    ] {
        let reply = post(server.addr(), path, &body).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {}", reply.text());
        let reply = reply.json();
        assert_eq!(reply.pointer(usage), Some(&json!(3)), "{path}: {reply}");
        assert_eq!(
            reply.pointer(text).and_then(Value::as_str).map(str::len),
            Some(12),
            "{path}: {reply}"
        );
    }
    let several = post(
        server.addr(),
        "/v1/completions",
        &json!({"prompt": ["one", "two"], "max_tokens": 2, "n": 2}),
    )
    .await
    .json();
    assert_eq!(several["choices"].as_array().unwrap().len(), 4);
    assert_eq!(
        several["usage"]["prompt_tokens"], 2,
        "a prompt counts once however often it is continued"
    );
    let embedded = post(
        server.addr(),
        "/v1/embeddings",
        &json!({"input": ["one", "three"]}),
    )
    .await
    .json();
    assert_eq!(embedded["data"].as_array().unwrap().len(), 2);
    assert_eq!(embedded["usage"]["prompt_tokens"], 3);
    let counted = post(
        server.addr(),
        "/v1/messages/count_tokens",
        &json!({"messages": ask}),
    )
    .await
    .json();
    assert_eq!(counted, json!({"input_tokens": 7}));
}

#[tokio::test]
async fn named_events_come_in_order() {
    let server = instant();
    let body = json!({"stream": true, "max_tokens": 2, "ignore_eos": true, "messages": [{"role": "user", "content": "hello"}]});
    let events = post(server.addr(), "/v1/messages", &body).await.events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    let delta = "content_block_delta";
    assert_eq!(
        names,
        [
            "message_start",
            "content_block_start",
            "ping",
            delta,
            delta,
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    assert_eq!(events[0].1["message"]["usage"]["input_tokens"], 7);
    assert_eq!(events[6].1["usage"]["output_tokens"], 2);
    assert!(events.iter().all(|(name, data)| data["type"] == *name));

    let body = json!({"stream": true, "max_output_tokens": 1, "input": "hello"});
    let events = post(server.addr(), "/v1/responses", &body).await.events();
    let names: Vec<&str> = events
        .iter()
        .map(|(name, _)| name.trim_start_matches("response."))
        .collect();
    assert_eq!(
        names,
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed"
        ]
    );
    assert_eq!(events[8].1["response"]["usage"]["output_tokens"], 1);
}

#[tokio::test]
async fn mistakes_get_the_error_of_their_family() {
    let server = instant();
    for (path, body, status, at, kind) in [
        (
            "/v1/chat/completions",
            "{\"model\":\"other\",\"messages\":[{}]}",
            404,
            "/error/type",
            "NotFoundError",
        ),
        (
            "/v1/chat/completions",
            "{\"model\":",
            400,
            "/error/type",
            "BadRequestError",
        ),
        (
            "/v1/completions",
            "{}",
            400,
            "/error/type",
            "BadRequestError",
        ),
        (
            "/v1/messages",
            "{\"model\":\"other\",\"messages\":[{}]}",
            404,
            "/error/type",
            "not_found_error",
        ),
        (
            "/v1/messages",
            "",
            400,
            "/error/type",
            "invalid_request_error",
        ),
    ] {
        let reply = finish(
            open(server.addr(), request(server.addr(), "POST", path), body)
                .await
                .unwrap(),
        )
        .await;
        assert_eq!(reply.status.as_u16(), status, "{path} {body}");
        assert_eq!(
            reply.json().pointer(at),
            Some(&json!(kind)),
            "{path} {body}"
        );
    }
    assert_eq!(server.state().await.unwrap()["prompt_tokens"], 0);
}

#[tokio::test]
async fn adapters_are_models_of_their_own() {
    let server = with(ModelServerOptions {
        speed: 0.0,
        loras: vec!["style".into()],
        ..ModelServerOptions::default()
    });
    let text = "x".repeat(640);
    let mut hits = Vec::new();
    for model in ["demo", "style", "style", "demo"] {
        let reply = post(
            server.addr(),
            "/v1/chat/completions",
            &chat(&text, 1, &json!({"model": model})),
        )
        .await
        .json();
        assert_eq!(reply["model"], model);
        hits.push(
            reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                .as_u64()
                .unwrap(),
        );
    }
    assert_eq!(
        hits,
        [0, 0, 160, 160],
        "blocks of one are no use to the other"
    );
    let models = get(server.addr(), "/v1/models").await.json();
    let ids: Vec<_> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].clone())
        .collect();
    assert_eq!(ids, ["demo", "style"]);
}

#[tokio::test]
async fn the_next_turn_finds_the_last_one_in_the_cache_unless_salted() {
    let server = instant();
    let question = "tell me a story ".repeat(40);
    let first = post(
        server.addr(),
        "/v1/chat/completions",
        &chat(&question, 64, &json!({})),
    )
    .await
    .json();
    let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let turns = |salt: &str| {
        let answer = &first["choices"][0]["message"]["content"];
        let messages = json!([{"role": "user", "content": question}, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]);
        json!({"messages": messages, "max_tokens": 1, "cache_salt": salt})
    };
    let cached = |reply: &Value| {
        reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    let next = post(server.addr(), "/v1/chat/completions", &turns(""))
        .await
        .json();
    assert_eq!(
        cached(&next),
        (prompt_tokens + 64 - 1) / 16 * 16,
        "prompt and answer, in full blocks"
    );
    let salted = post(server.addr(), "/v1/chat/completions", &turns("tenant"))
        .await
        .json();
    assert_eq!(cached(&salted), 0);
    let anthropic = post(server.addr(), "/v1/messages", &turns("")).await.json();
    assert!(
        anthropic["usage"]["cache_read_input_tokens"]
            .as_u64()
            .unwrap()
            >= cached(&next)
    );
}

#[tokio::test]
async fn load_is_reported_in_the_reply_when_asked_for_as_vllm_does() {
    for (orca_on_streams, on_stream) in [(false, false), (true, true)] {
        let server = with(ModelServerOptions {
            speed: 0.0,
            orca_on_streams,
            ..ModelServerOptions::default()
        });
        for (stream, expected) in [(false, true), (true, on_stream)] {
            let request = request(server.addr(), "POST", "/v1/chat/completions")
                .header("endpoint-load-metrics-format", "TEXT");
            let body = chat("hello", 1, &json!({"stream": stream})).to_string();
            let reply = finish(open(server.addr(), request, &body).await.unwrap()).await;
            let load = reply
                .headers
                .get("endpoint-load-metrics")
                .map(|value| value.to_str().unwrap());
            let text = "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0";
            assert_eq!(load, expected.then_some(text), "stream: {stream}");
        }
    }
}

#[tokio::test]
async fn unknown_paths_and_x_echo_show_what_arrived() {
    let server = instant();
    let address = server.addr();
    for (path, echo) in [
        ("/some/path?q=1", "0"),
        ("/v1/chat/completions", "1"),
        ("/metrics", "1"),
    ] {
        let request = request(address, "PUT", path)
            .header("x-echo", echo)
            .header("x-twice", "a")
            .header("x-twice", "b");
        let reply = finish(open(address, request, "abc").await.unwrap()).await;
        assert_eq!(reply.headers["x-served-by"], address.to_string());
        let echo = reply.json();
        assert_eq!(
            (&echo["method"], &echo["path"], &echo["body"]),
            (&json!("PUT"), &json!(path), &json!("abc"))
        );
        assert_eq!(
            echo["body_sha256"],
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        let twice: Vec<_> = echo["headers"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|pair| pair[0] == "x-twice")
            .map(|pair| pair[1].clone())
            .collect();
        assert_eq!(twice, ["a", "b"]);
    }
    let large = finish(
        open(
            address,
            request(address, "POST", "/x"),
            &"y".repeat(1 << 20),
        )
        .await
        .unwrap(),
    )
    .await
    .json();
    assert_eq!(
        (&large["body"], &large["body_bytes"]),
        (&Value::Null, &json!(1 << 20))
    );
    let requests = server.state().await.unwrap()["requests"].clone();
    assert_eq!(
        requests.as_array().unwrap().len(),
        3,
        "a scrape is not a request: {requests}"
    );
    assert_eq!(requests[2]["body_bytes"], 1 << 20);
}

#[tokio::test]
async fn http2_with_prior_knowledge_is_served_trailers_and_all() {
    let server = instant();
    let mut trailers = http::HeaderMap::new();
    trailers.insert("x-end", "yes".parse().unwrap());
    let frames = [Frame::data(Bytes::from("abc")), Frame::trailers(trailers)]
        .map(Ok::<_, std::convert::Infallible>);
    let body = BodyExt::boxed(StreamBody::new(futures::stream::iter(frames)));
    let client = Client::builder(TokioExecutor::new())
        .http2_only(true)
        .build_http();
    let request = http::Request::builder()
        .method(Method::POST)
        .uri(format!("http://{}/x", server.addr()))
        .body(body)
        .unwrap();
    let reply = client.request(request).await.unwrap();
    assert_eq!(reply.version(), Version::HTTP_2);
    let echo = finish(reply).await.json();
    assert_eq!(
        (&echo["version"], &echo["body"]),
        (&json!("HTTP/2.0"), &json!("abc"))
    );
    assert_eq!(echo["trailers"], json!([["x-end", "yes"]]));
}

#[tokio::test]
async fn chunks_can_be_held_back_and_bundled() {
    let server = with(ModelServerOptions {
        speed: 0.0,
        chunks_per_write: 4,
        chunk_delay_ms: 20,
        ..ModelServerOptions::default()
    });
    let started = tokio::time::Instant::now();
    let request = request(server.addr(), "POST", "/v1/chat/completions");
    let body = chat("hello", 7, &json!({"stream": true})).to_string();
    let mut body = open(server.addr(), request, &body)
        .await
        .unwrap()
        .into_body();
    let mut events_by_write = Vec::new();
    while let Some(frame) = body.frame().await {
        let data = frame.unwrap().into_data().unwrap();
        events_by_write.push(data.windows(2).filter(|pair| pair == b"\n\n").count());
    }
    assert_eq!(
        events_by_write,
        [1 + 1, 4, 3 + 1],
        "the first token comes with the role and alone; the last two, the finish and [DONE] together"
    );
    assert!(started.elapsed() >= std::time::Duration::from_millis(60));
}

#[tokio::test]
async fn a_bare_server_answers_any_prompt_from_a_template() {
    let server = with(ModelServerOptions {
        bare: true,
        output_tokens_mean: 3,
        ..ModelServerOptions::default()
    });
    for (body, streamed) in [
        ("{\"stream\" : true}", true),
        (
            "{\"messages\":[{\"content\":\"the \\\"stream\\\" of life\"}],\"stream\":false}",
            false,
        ),
        ("not even JSON", false),
    ] {
        let reply = finish(
            open(
                server.addr(),
                request(server.addr(), "POST", "/v1/chat/completions"),
                body,
            )
            .await
            .unwrap(),
        )
        .await;
        if streamed {
            let events = reply.events();
            assert_eq!(events.len(), 1 + 3 + 1 + 1 + 1);
            assert_eq!(events[5].1["usage"]["completion_tokens"], 3);
        } else {
            assert_eq!(
                reply.json()["choices"][0]["message"]["content"]
                    .as_str()
                    .unwrap()
                    .len(),
                12,
                "{body}"
            );
        }
    }
}
