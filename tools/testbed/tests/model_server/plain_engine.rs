//! The plain engine with each of its behaviours.

use std::time::{Duration, Instant};

use futures::future::join_all;
use serde_json::{Value, json};
use testbed::client::{self, ClientReply};
use testbed::plain_engine::{
    AnswerDelay, PlainAnswer, PlainBehaviour, PlainEngine, PlainMetrics, UsageReporting,
};

const CHAT: &str = "/v1/chat/completions";

/// A delay longer than any pause of the operating system's scheduler.
const LONG: Duration = Duration::from_millis(200);

async fn start(behaviour: PlainBehaviour) -> PlainEngine {
    PlainEngine::start(([127, 0, 0, 1], 0).into(), behaviour)
        .await
        .unwrap()
}

fn chat(stream: bool, max_tokens: u32) -> Value {
    json!({"model": "demo", "messages": [{"role": "user", "content": "Hello?"}], "stream": stream, "max_tokens": max_tokens})
}

async fn post(engine: &PlainEngine, path: &str, body: &Value) -> testbed::Result<ClientReply> {
    client::post(engine.addr(), path, body.to_string()).await
}

fn events(reply: &ClientReply) -> Vec<String> {
    reply
        .text()
        .split_terminator("\n\n")
        .map(|event| event.trim_start_matches("data: ").to_owned())
        .collect()
}

#[tokio::test]
async fn each_api_is_answered_in_its_shape_and_names_its_engine() {
    let engine = start(PlainBehaviour::default()).await;
    for (path, pointer, usage) in [
        (CHAT, "/choices/0/message/content", "/usage/prompt_tokens"),
        ("/v1/completions", "/choices/0/text", "/usage/prompt_tokens"),
        ("/v1/messages", "/content/0/text", "/usage/input_tokens"),
        (
            "/v1/responses",
            "/output/0/content/0/text",
            "/usage/input_tokens",
        ),
        (
            "/v1/embeddings",
            "/data/0/embedding",
            "/usage/prompt_tokens",
        ),
        (
            "/v1/rerank",
            "/results/0/relevance_score",
            "/usage/prompt_tokens",
        ),
        ("/generate", "/text", "/meta_info/prompt_tokens"),
        (
            "/inference/v1/generate",
            "/choices/0/token_ids/2",
            "/usage/prompt_tokens",
        ),
        (
            "/invocations",
            "/choices/0/message/content",
            "/usage/prompt_tokens",
        ),
    ] {
        let reply = post(&engine, path, &chat(false, 3)).await.unwrap();
        let body = reply.json().unwrap();
        assert!(
            body.pointer(pointer).is_some() && body.pointer(usage).is_some(),
            "{path}: {body}"
        );
        assert_eq!(reply.header("x-served-by"), engine.addr().to_string());
    }
    let batch = json!({"text": ["one", "two"]});
    let replies = post(&engine, "/generate", &batch).await.unwrap();
    assert!(
        replies.json().unwrap().pointer("/1/text").is_some(),
        "{}",
        replies.text()
    );
    assert_eq!(
        post(&engine, "/v1/unknown", &json!({}))
            .await
            .unwrap()
            .status,
        404
    );
    assert_eq!(engine.requests(), 10);
}

#[tokio::test]
async fn an_engine_without_work_generates_nothing_in_any_api() {
    let engine = start(PlainBehaviour::default()).await;
    for (path, word) in [
        (CHAT, "word"),
        ("/v1/completions", "word"),
        ("/v1/messages", "word"),
        ("/v1/responses", "word"),
        ("/generate", "word"),
        ("/inference/v1/generate", "\"token_ids\":[7"),
        ("/invocations", "word"),
    ] {
        for stream in [false, true] {
            for (answer, works) in [(PlainAnswer::Reply, true), (PlainAnswer::NoWork, false)] {
                engine.behave(PlainBehaviour {
                    answer,
                    ..PlainBehaviour::default()
                });
                let reply = post(&engine, path, &chat(stream, 3)).await.unwrap();
                assert_eq!(
                    (reply.status, reply.text().contains(word)),
                    (200, works),
                    "{path}, stream {stream}: {}",
                    reply.text()
                );
                assert_eq!(reply.text().starts_with("data: "), stream, "{path}");
            }
        }
    }
}

#[tokio::test]
async fn an_engine_can_refuse_one_kind_of_prompt() {
    let engine = start(PlainBehaviour {
        answer: PlainAnswer::ReplyUnless {
            mark: "Hello?",
            status: http::StatusCode::NOT_FOUND,
            body: "{}",
        },
        ..PlainBehaviour::default()
    })
    .await;
    for (body, status) in [(chat(false, 3), 404), (json!({"messages": []}), 200)] {
        assert_eq!(post(&engine, CHAT, &body).await.unwrap().status, status);
    }
}

#[tokio::test]
async fn a_stream_has_its_tokens_then_usage_if_reported_and_an_end() {
    let engine = start(PlainBehaviour::default()).await;
    let received = events(&post(&engine, CHAT, &chat(true, 3)).await.unwrap());
    assert_eq!(
        (received.len(), received.last().map(String::as_str)),
        (5, Some("[DONE]"))
    );
    assert!(
        received[3].contains(r#""completion_tokens":3"#),
        "{}",
        received[3]
    );
    engine.behave(PlainBehaviour {
        usage: UsageReporting::Untold,
        ..PlainBehaviour::default()
    });
    assert_eq!(
        events(&post(&engine, CHAT, &chat(true, 3)).await.unwrap()).len(),
        4
    );
    assert!(
        !post(&engine, CHAT, &chat(false, 3))
            .await
            .unwrap()
            .text()
            .contains("usage")
    );
}

#[tokio::test]
async fn delays_have_their_shapes() {
    let prompt_tokens = u32::try_from(chat(true, 3).to_string().len() / 4).unwrap();
    for (delay, at_least) in [
        (AnswerDelay::Constant(LONG), LONG),
        (
            AnswerDelay::PerToken {
                first: LONG,
                next: LONG / 2,
            },
            LONG * 2,
        ),
        (
            AnswerDelay::PerPromptToken(LONG / prompt_tokens),
            LONG * 9 / 10,
        ),
        (
            AnswerDelay::Slots {
                slots: 4,
                each: LONG,
            },
            LONG,
        ),
    ] {
        let engine = start(PlainBehaviour::with_delay(delay)).await;
        for stream in [false, true] {
            let began = Instant::now();
            assert_eq!(
                post(&engine, CHAT, &chat(stream, 3)).await.unwrap().status,
                200
            );
            let took = began.elapsed();
            assert!(
                took >= at_least && took < at_least * 10,
                "{delay:?}, stream {stream}: {took:?}"
            );
        }
    }
}

#[tokio::test]
async fn requests_beyond_the_slots_wait_for_them() {
    let engine = start(PlainBehaviour::with_delay(AnswerDelay::Slots {
        slots: 2,
        each: LONG,
    }))
    .await;
    let began = Instant::now();
    let body = chat(false, 3);
    let replies = join_all((0..6).map(|_| post(&engine, CHAT, &body)));
    let look = async {
        tokio::time::sleep(LONG / 2).await;
        client::get(engine.addr(), "/metrics").await.unwrap().text()
    };
    let (replies, page) = tokio::join!(replies, look);
    assert!(
        replies
            .into_iter()
            .all(|reply| reply.unwrap().status == 200)
    );
    assert!(
        began.elapsed() >= LONG * 3,
        "three rounds of two: {:?}",
        began.elapsed()
    );
    assert!(
        page.contains("running{model_name=\"demo\"} 2")
            && page.contains("waiting{model_name=\"demo\"} 4"),
        "{page}"
    );
    assert_eq!(engine.running(), 0);
}

#[tokio::test]
async fn metrics_are_live_frozen_or_missing() {
    let engine = start(PlainBehaviour::with_delay(AnswerDelay::Constant(LONG))).await;
    let body = chat(false, 1);
    let look = async {
        let mut found = Vec::new();
        tokio::time::sleep(LONG / 2).await;
        for metrics in [
            PlainMetrics::Live,
            PlainMetrics::Frozen,
            PlainMetrics::Missing,
        ] {
            engine.behave(PlainBehaviour {
                metrics,
                ..PlainBehaviour::default()
            });
            let reply = client::get(engine.addr(), "/metrics").await.unwrap();
            found.push((
                reply.status,
                reply.text().contains("running{model_name=\"demo\"} 1"),
            ));
        }
        found
    };
    let (_, found) = tokio::join!(post(&engine, CHAT, &body), look);
    assert_eq!(found, [(200, true), (200, false), (404, false)]);
}

#[tokio::test]
async fn a_broken_engine_gives_the_configured_answer_until_it_is_repaired() {
    let engine = start(PlainBehaviour::with_status(
        500,
        r#"{"error":{"message":"no"}}"#,
    ))
    .await;
    for (status, body) in [
        (500, r#"{"error":{"message":"no"}}"#),
        (200, ""),
        (200, r#"{"error":{"code":500}}"#),
    ] {
        engine.behave(PlainBehaviour::with_status(status, body));
        for stream in [false, true] {
            let reply = post(&engine, CHAT, &chat(stream, 3)).await.unwrap();
            assert_eq!((reply.status, reply.text()), (status, body.to_owned()));
        }
        assert_eq!(
            client::get(engine.addr(), "/metrics").await.unwrap().status,
            200,
            "its metrics look healthy"
        );
    }
    engine.behave(PlainBehaviour::default());
    let reply = post(&engine, CHAT, &chat(false, 3)).await.unwrap();
    assert!(
        reply.status == 200 && reply.text().contains("choices"),
        "{}",
        reply.text()
    );
}

#[tokio::test]
async fn a_reply_can_be_cut_in_the_middle() {
    let engine = start(PlainBehaviour {
        answer: PlainAnswer::CutAfterFirstToken,
        ..PlainBehaviour::default()
    })
    .await;
    for stream in [false, true] {
        let error = post(&engine, CHAT, &chat(stream, 3))
            .await
            .unwrap_err()
            .to_string();
        assert!(client::is_broken_off(&error), "stream {stream}: {error}");
    }
    let request = http::Request::post(CHAT)
        .body(client::full(chat(true, 3).to_string()))
        .unwrap();
    let mut stream = client::EventStream::new(client::start(engine.addr(), request).await.unwrap());
    assert!(
        stream.next().await.unwrap().unwrap().data.contains("word"),
        "the first token comes"
    );
    assert!(stream.next().await.is_err());
}
