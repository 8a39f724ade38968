//! Request bodies in every form of HTTP: each reaches the engine byte for byte, or is refused with
//! an error in the format of its API.

use http::{HeaderMap, HeaderName, HeaderValue, Request};
use hyper::body::Frame;
use serde_json::json;
use testbed::client::{self, Http2Client, RawConnection};
use testbed::stack::{PickerMode, Stack};
use testbed::{Error, Result};

use crate::echo;

/// Sends `bodies` to `path` and checks that each arrives as it was sent.
async fn arrive(stack: &Stack, path: &str, bodies: &[&str]) -> Result<()> {
    for body in bodies {
        let reply = stack
            .send(echo::post(path, &[], (*body).to_owned())?)
            .await?;
        assert_eq!(reply.status, 200, "{path} {body}: {}", reply.text());
        assert_eq!(reply.json()?["body"], **body, "{path}");
        echo::ranked(&reply)?;
    }
    Ok(())
}

#[tokio::test]
async fn every_api_arrives_byte_for_byte() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    let chat = [
        r#"{"model":"demo","messages":[{"role":"user","content":"hello"}]}"#,
        r#" { "messages" : [ { "content" : [ {"type":"text","text":"a \"quoted\" \u00e9 \ud83d\ude00"}, {"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}} ], "role":"user"} ], "model" : "demo" , "tools":[{"type":"function","function":{"name":"f","parameters":{}}}] } "#,
        r#"{"model":"first","messages":[],"model":"demo"}"#,
        r#"{"mod\u0065l":"demo","messages":[{"role":"user","content":"lone \ud800 surrogate"}],"seed":1e999999,"n":123456789012345678901234567890}"#,
        r#"{"model":"demo","messages":"not a list","stream":"yes","max_tokens":-5}"#,
    ];
    arrive(&stack, "/v1/chat/completions", &chat).await?;
    arrive(
        &stack,
        "/v1/completions",
        &[
            r#"{"model":"demo","prompt":"x"}"#,
            r#"{"model":"demo","prompt":["a","b"]}"#,
            r#"{"model":"demo","prompt":[[1,2],[3]]}"#,
        ],
    )
    .await?;
    arrive(
        &stack,
        "/v1/responses",
        &[r#"{"model":"demo","input":"x","instructions":"y"}"#],
    )
    .await?;
    arrive(
        &stack,
        "/v1/embeddings",
        &[r#"{"model":"demo","input":["x","y"]}"#],
    )
    .await?;
    arrive(&stack, "/v1/messages", &[r#"{"model":"demo","max_tokens":1,"system":"s","messages":[{"role":"user","content":"x"}]}"#]).await?;
    arrive(
        &stack,
        "/v1/projects/p/locations/l/endpoints/e/chat/completions?x=1",
        &[chat[0]],
    )
    .await?;
    arrive(
        &stack,
        "/v2/models/demo/infer",
        &["not json at all", "", "{", "\u{0}\u{1}"],
    )
    .await
}

#[tokio::test]
async fn bad_bodies_are_400_in_the_shape_of_the_api() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let deep = format!(
        r#"{{"model":"demo","messages":{}{}}}"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    let bad: [(&[u8], &str); 10] = [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (br#"{"model":"demo"} x"#, "invalid_json"),
        (b"{\"model\":\"demo\",\"x\":\"\xff\"}", "invalid_json"),
        (b"{\"model\":\"de\nmo\"}", "invalid_json"),
        (br#"["model"]"#, "not_an_object"),
        (br#"{"messages":[]}"#, "missing_model"),
        (br#"{"model":7}"#, "missing_model"),
        (br#"{"model":""}"#, "missing_model"),
        (deep.as_bytes(), "nested_too_deep"),
    ];
    for (body, code) in bad {
        let reply = client::post(stack.address(), "/v1/chat/completions", body.to_vec()).await?;
        let error = reply.json()?["error"].clone();
        assert_eq!(
            (reply.status, &error["code"], &error["type"]),
            (400, &json!(code), &json!("invalid_request_error")),
            "{}",
            reply.text()
        );
        assert_eq!(reply.header("content-type"), "application/json");
        let anthropic = client::post(stack.address(), "/v1/messages", body.to_vec()).await?;
        let expected = (400, json!("error"), json!("invalid_request_error"));
        let got = anthropic.json()?;
        assert_eq!(
            (
                anthropic.status,
                got["type"].clone(),
                got["error"]["type"].clone()
            ),
            expected,
            "{}",
            anthropic.text()
        );
    }
    assert_eq!(
        stack
            .post("/v1/chat/completions", &echo::chat("still alive"))
            .await?
            .status,
        200
    );
    Ok(())
}

#[tokio::test]
async fn http1_content_length_chunked_and_expect() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let body = echo::chat("hello").to_string();
    let (head, tail) = body.split_at(20);
    let mut raw = RawConnection::connect(stack.address()).await?;
    let start = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-echo: 1\r\ncontent-type: application/json\r\n";
    raw.write(format!(
        "{start}content-length: {}\r\n\r\n{body}",
        body.len()
    ))
    .await?;
    assert_eq!(raw.read_reply().await?.json()?["body"], body);
    let chunked = format!(
        "{start}transfer-encoding: chunked\r\n\r\n{:x}\r\n{head}\r\n{:x}\r\n{tail}\r\n0\r\n\r\n",
        head.len(),
        tail.len()
    );
    raw.write(chunked).await?;
    assert_eq!(raw.read_reply().await?.json()?["body"], body);
    raw.write(format!(
        "{start}transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\nx-trailer: 1\r\n\r\n",
        body.len()
    ))
    .await?;
    assert_eq!(
        raw.read_reply().await?.json()?["body"],
        body,
        "with trailers"
    );
    raw.write(format!(
        "{start}expect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        body.len()
    ))
    .await?;
    assert_eq!(raw.read_reply().await?.status, 100);
    raw.write(&body).await?;
    assert_eq!(
        raw.read_reply().await?.json()?["body"],
        body,
        "after 100 Continue"
    );
    raw.write(format!("{start}content-length: 0\r\n\r\n"))
        .await?;
    assert_eq!(
        raw.read_reply().await?.status,
        400,
        "an inference request without a body"
    );
    // Envoy may close the connection after a local reply of Envoy or of a filter, so the next
    // request has a new connection.
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(format!(
        "{start}transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    ))
    .await?;
    assert_eq!(raw.read_reply().await?.status, 400, "an empty chunked body");
    Ok(())
}

#[tokio::test]
async fn http2_frames_trailers_and_empty_data() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let connection = Http2Client::connect(stack.address()).await?;
    let body = echo::chat("hello").to_string();
    let (head, tail) = body.split_at(20);
    let trailers = || {
        HeaderMap::from_iter([(
            HeaderName::from_static("x-sum"),
            HeaderValue::from_static("7"),
        )])
    };
    let data = |text: &str| Frame::data(text.to_owned().into());
    let cases = [
        vec![data(&body)],
        vec![data(head), data(tail), data("")],
        vec![
            data(head),
            data(""),
            data(tail),
            Frame::trailers(trailers()),
        ],
    ];
    for frames in cases {
        let reply = connection
            .send(echo::request(
                "POST",
                "/v1/chat/completions",
                &[],
                client::frames(frames),
            )?)
            .await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()?["body"], body);
        echo::ranked(&reply)?;
    }
    let empty = [vec![data("")], vec![Frame::trailers(trailers())]];
    for frames in empty {
        let reply = connection
            .send(echo::request(
                "POST",
                "/v1/chat/completions",
                &[],
                client::frames(frames),
            )?)
            .await?;
        assert_eq!(
            reply.status,
            400,
            "an empty body is invalid JSON: {}",
            reply.text()
        );
    }
    let opaque = connection
        .send(echo::request(
            "POST",
            "/v1/rerank",
            &[],
            client::frames(vec![Frame::trailers(trailers())]),
        )?)
        .await?;
    assert_eq!(
        opaque.status,
        200,
        "a request with headers and trailers only is picked: {}",
        opaque.text()
    );
    echo::ranked(&opaque)?;
    Ok(())
}

/// Returns a chat request of about `bytes` bytes.
fn large(bytes: usize) -> String {
    echo::chat(&"lorem ipsum ".repeat(bytes / 12)).to_string()
}

#[tokio::test]
async fn a_prompt_of_a_million_tokens_passes() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let body = large(6 << 20);
    let reply = stack
        .send(echo::post("/v1/chat/completions", &[], body.clone())?)
        .await?;
    assert_eq!(
        (reply.status, &reply.json()?["body_bytes"]),
        (200, &json!(body.len())),
        "HTTP/1"
    );
    let connection = Http2Client::connect(stack.address()).await?;
    let reply = connection
        .send(echo::post("/v1/chat/completions", &[], body.clone())?)
        .await?;
    assert_eq!(
        (reply.status, &reply.json()?["body_bytes"]),
        (200, &json!(body.len())),
        "HTTP/2"
    );
    Ok(())
}

#[tokio::test]
async fn too_large_is_our_413() -> Result<()> {
    let stack = Stack::builder()
        .servers(1)
        .picker(json!({"body_limit_bytes": 100_000}))
        .shared_envoy()
        .start()
        .await?;
    let too_large = |reply: &client::ClientReply| -> Result<()> {
        assert_eq!(reply.status, 413, "{}", reply.text());
        assert_eq!(reply.json()?["error"]["code"], "request_too_large");
        assert!(
            reply.text().contains("100000 bytes"),
            "the error names the limit: {}",
            reply.text()
        );
        Ok::<(), Error>(())
    };
    too_large(
        &stack
            .send(echo::post("/v1/chat/completions", &[], large(150_000))?)
            .await?,
    )?;
    let chunks = || {
        client::frames(
            (0..15)
                .map(|_| Frame::data("x".repeat(10_000).into()))
                .collect(),
        )
    };
    too_large(
        &stack
            .send(echo::request(
                "POST",
                "/v1/chat/completions",
                &[],
                chunks(),
            )?)
            .await?,
    )?;
    let connection = Http2Client::connect(stack.address()).await?;
    too_large(
        &connection
            .send(echo::request(
                "POST",
                "/v1/chat/completions",
                &[],
                chunks(),
            )?)
            .await?,
    )?;
    let just = large(90_000);
    assert_eq!(
        stack
            .send(echo::post("/v1/chat/completions", &[], just)?)
            .await?
            .status,
        200
    );
    let opaque = stack
        .send(
            Request::post("/v2/models/demo/infer")
                .header("x-echo", "1")
                .body(client::full("x".repeat(200_000)))?,
        )
        .await?;
    assert_eq!(
        (opaque.status, &opaque.json()?["body_bytes"]),
        (200, &json!(200_000)),
        "the limit does not apply to bodies that are not buffered"
    );
    Ok(())
}

#[tokio::test]
async fn compressed_bodies_are_picked_by_their_content() -> Result<()> {
    use std::io::Write as _;
    let stack = Stack::builder()
        .servers(1)
        .picker(json!({"body_limit_bytes": 100_000}))
        .shared_envoy()
        .start()
        .await?;
    let gzip = |text: &str| -> Result<Vec<u8>> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(text.as_bytes())?;
        Ok(encoder.finish()?)
    };
    let send = async |text: &str| {
        stack
            .send(echo::post(
                "/v1/chat/completions",
                &[("content-encoding", "gzip")],
                gzip(text)?,
            )?)
            .await
    };
    let body = echo::chat("hello").to_string();
    assert_eq!(send(&body).await?.json()?["body"], body);
    assert_eq!(
        send("{").await?.status,
        400,
        "the picker reads the decompressed body"
    );
    let numbers = (0..30_000).map(|number: u32| number.to_string());
    let long = echo::chat(&numbers.collect::<Vec<_>>().join(" ")).to_string();
    assert_eq!(
        send(&long).await?.status,
        413,
        "the limit counts after decompression"
    );
    Ok(())
}

#[tokio::test]
async fn other_encodings_are_refused_by_name() -> Result<()> {
    for front in PickerMode::ALL {
        let stack = Stack::builder().front(front).servers(1);
        let stack = stack.shared_envoy().start().await?;
        // Envoy removes one layer of gzip. Of `gzip, gzip`, one layer is left.
        let encodings = ["deflate", "br", "zstd", "x-gzip", "gzip, gzip"];
        let left = ["deflate", "br", "zstd", "x-gzip", "gzip"];
        for (encoding, named) in encodings.into_iter().zip(left) {
            let reply = stack
                .send(echo::post(
                    "/v1/chat/completions",
                    &[("content-encoding", encoding)],
                    vec![0x1f, 0x8b, 8, 0],
                )?)
                .await?;
            assert_eq!(reply.status, 415, "{front:?} {encoding}: {}", reply.text());
            assert!(
                reply.text().contains(&format!(r#"\"{named}\""#)),
                "{front:?} {encoding}: {}",
                reply.text()
            );
        }
    }
    Ok(())
}
