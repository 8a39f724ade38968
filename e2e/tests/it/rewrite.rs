//! Model rewrites: the bytes that reach the engine, and the bytes that the client gets back.

use std::fmt::Write as _;
use std::io::Read as _;

use http::{HeaderMap, HeaderName, HeaderValue, Request};
use hyper::body::Frame;
use serde_json::{Value, json};
use testbed::Result;
use testbed::client::{self, ClientReply, EventStream, Http2Client, RawConnection};
use testbed::model_server::{self, FaultMode, ServerFault};
use testbed::stack::Stack;

use crate::echo;

/// The documented maximum length of a reply that is not streamed and keeps its content-length, in
/// bytes.
const HELD_BYTES_MAX: usize = 32_768;

/// The header that requests another model.
const ASK: (&str, &str) = ("x-llm-d-model-name-rewrite", "demo");

/// Returns the request to send and the request that must arrive, from a text in which «» mark the
/// model name.
fn versions(marked: &str) -> (String, String) {
    let (before, rest) = marked.split_once('«').expect("a mark");
    let (asked, after) = rest.split_once('»').expect("its end");
    (
        format!("{before}{asked}{after}"),
        format!("{before}\"demo\"{after}"),
    )
}

/// Checks by an echo that the engine received the bytes of `expected` and the right declared
/// length.
fn arrived(reply: &ClientReply, expected: &str) -> Result<()> {
    let echo = reply.json()?;
    if !echo["body"].is_null() {
        assert_eq!(echo["body"], expected);
    }
    let mut digest = String::new();
    for byte in ring::digest::digest(&ring::digest::SHA256, expected.as_bytes()).as_ref() {
        write!(digest, "{byte:02x}")?;
    }
    assert_eq!(
        (&echo["body_bytes"], &echo["body_sha256"]),
        (&json!(expected.len()), &json!(digest))
    );
    if let [length] = echo::header(&echo, "content-length")[..] {
        assert_eq!(length, expected.len().to_string());
    }
    assert_eq!(echo::header(&echo, "accept-encoding"), ["identity"]);
    echo::ranked(reply)?;
    Ok(())
}

#[tokio::test]
async fn only_the_name_changes_on_the_way_to_the_engine() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    for (path, marked) in [
        (
            "/v1/chat/completions",
            r#"{"model":«"a"»,"messages":[{"role":"user","content":"the model a"}]}"#,
        ),
        (
            "/v1/chat/completions",
            r#" { "messages" : [ {"model":"a","content":"\u00e9 \"model\":\"a\""} ] ,"mod\u0065l":«"\u0061 long \"name\""» } "#,
        ),
        (
            "/v1/chat/completions",
            r#"{"model":"first","x":{"model":"nested"},"model":«"a"»,"y":["model","a"],"n":1e999999}"#,
        ),
        ("/v1/completions", r#"{"prompt":[1,2],"model":«"a"»}"#),
        ("/v1/responses", r#"{"input":"x","model":«"a"»}"#),
        ("/v1/conversations", r#"{"items":[],"model":«"a"»}"#),
        ("/v1/embeddings", r#"{"model":«"a"»,"input":["x"]}"#),
        ("/v1/images/generations", r#"{"model":«"a"»,"prompt":"x"}"#),
        (
            "/v1/chat/completions/render",
            r#"{"model":«"a"»,"messages":[]}"#,
        ),
        (
            "/v1/messages",
            r#"{"max_tokens":1,"model":«"a"»,"messages":[]}"#,
        ),
        (
            "/v1/messages/count_tokens",
            r#"{"model":«"a"»,"messages":[]}"#,
        ),
        (
            "/inference/v1/generate",
            r#"{"token_ids":[1,2,3],"model":«"a"»}"#,
        ),
        ("/generate", r#"{"text":"x","model":«"a"»}"#),
        (
            "/v1/projects/p/locations/l/endpoints/e/chat/completions?x=1",
            r#"{"model":«"a"»}"#,
        ),
    ] {
        let (sent, expected) = versions(marked);
        let reply = stack
            .send(echo::post(
                path,
                &[ASK, ("accept-encoding", "gzip, br")],
                sent,
            )?)
            .await?;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        arrived(&reply, &expected)?;
    }
    let reply = stack
        .send(echo::post(
            "/generate",
            &[ASK, ("accept-encoding", "br")],
            r#"{"text":"x"}"#,
        )?)
        .await?;
    let echo = reply.json()?;
    assert_eq!(
        (&echo["body"], &echo::header(&echo, "accept-encoding")[..]),
        (&json!(r#"{"text":"x"}"#), &["br"][..]),
        "a request without a model name passes unchanged"
    );
    Ok(())
}

#[tokio::test]
async fn however_the_body_is_sent() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let (body, expected) = versions(
        r#"{"messages":[{"role":"user","content":"hello"}],"model":«"a"»,"stream":false}"#,
    );
    let (head, tail) = body.split_at(50);
    let mut raw = RawConnection::connect(stack.address()).await?;
    let start = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-echo: 1\r\n{}: {}\r\n",
        ASK.0, ASK.1
    );
    raw.write(format!(
        "{start}content-length: {}\r\n\r\n{body}",
        body.len()
    ))
    .await?;
    arrived(&raw.read_reply().await?, &expected)?;
    let chunks = format!(
        "{:x}\r\n{head}\r\n{:x}\r\n{tail}\r\n0\r\n\r\n",
        head.len(),
        tail.len()
    );
    raw.write(format!("{start}transfer-encoding: chunked\r\n\r\n{chunks}"))
        .await?;
    let reply = raw.read_reply().await?;
    arrived(&reply, &expected)?;
    assert_eq!(
        echo::header(&reply.json()?, "content-length"),
        [""; 0],
        "no length is declared for a chunked body"
    );

    let connection = Http2Client::connect(stack.address()).await?;
    let trailers = HeaderMap::from_iter([(
        HeaderName::from_static("x-sum"),
        HeaderValue::from_static("7"),
    )]);
    let data = |text: &str| Frame::data(text.to_owned().into());
    for frames in [
        vec![data(&body)],
        vec![data(head), data(""), data(tail), Frame::trailers(trailers)],
    ] {
        let reply = connection
            .send(echo::request(
                "POST",
                "/v1/chat/completions",
                &[ASK],
                client::frames(frames),
            )?)
            .await?;
        arrived(&reply, &expected)?;
    }
    let reply = connection
        .send(echo::post(
            "/v1/chat/completions",
            &[ASK, ("content-length", &body.len().to_string())],
            body,
        )?)
        .await?;
    arrived(&reply, &expected)
}

#[tokio::test]
async fn a_large_body_is_rewritten_at_either_end() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let connection = Http2Client::connect(stack.address()).await?;
    let messages = json!([{"role": "user", "content": "lorem \"ipsum\" ".repeat(400_000)}]);
    for marked in [
        format!(r#"{{"model":«"a"»,"messages":{messages}}}"#),
        format!(r#"{{"messages":{messages},"model":«"a"»}}"#),
    ] {
        let (sent, expected) = versions(&marked);
        assert!(sent.len() > 5 << 20);
        arrived(
            &stack
                .send(echo::post("/v1/chat/completions", &[ASK], sent.clone())?)
                .await?,
            &expected,
        )?;
        let pieces = sent
            .as_bytes()
            .chunks(100_000)
            .map(|piece| Frame::data(piece.to_vec().into()))
            .collect();
        arrived(
            &stack
                .send(echo::request(
                    "POST",
                    "/v1/chat/completions",
                    &[ASK],
                    client::frames(pieces),
                )?)
                .await?,
            &expected,
        )?;
        arrived(
            &connection
                .send(echo::post("/v1/chat/completions", &[ASK], sent)?)
                .await?,
            &expected,
        )?;
    }
    Ok(())
}

#[tokio::test]
async fn a_rewritten_body_is_replayed_to_the_next_endpoint() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::ResetBeforeHeaders))
        .await;
    let (body, expected) = versions(r#"{"model":«"a"»,"messages":[]}"#);
    for _ in 0..4 {
        let reply = stack
            .send(echo::post("/v1/chat/completions", &[ASK], body.clone())?)
            .await?;
        assert_eq!(
            (reply.status, stack.server_of(&reply)?),
            (200, 1),
            "{}",
            reply.text()
        );
        arrived(&reply, &expected)?;
    }
    Ok(())
}

#[tokio::test]
async fn a_request_that_waited_for_the_first_state_is_rewritten_too() -> Result<()> {
    let mut stack = Stack::builder()
        .without_daemon()
        .picker(json!({"cold_start_wait_ms": 20_000}))
        .envoy_in_turn()
        .start()
        .await?;
    let (body, expected) =
        versions(r#"{"messages":[{"role":"user","content":"hello"}],"model":«"a"»}"#);
    let address = stack.address();
    let request = echo::post("/v1/chat/completions", &[ASK], body)?;
    let waiting = tokio::spawn(async move { client::send(address, request).await });
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_parked_total",
            |parked| parked == 1,
            client::REPLY_LIMIT,
        )
        .await?;
    stack.start_daemon()?;
    let reply = waiting.await??;
    assert_eq!(reply.status, 200, "{}", reply.text());
    arrived(&reply, &expected)
}

/// Returns a request for the model `a` that is rewritten to `demo`, answered by the engine without
/// an echo.
fn ask(path: &str, body: Value, headers: &[(&str, &str)]) -> Result<Request<client::Body>> {
    let mut request = Request::post(path).header(ASK.0, ASK.1);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut body = body;
    body["model"] = "a".into();
    Ok(request.body(client::full(body.to_string()))?)
}

/// Returns one request of each API whose reply has a model name. The prompts contain the name too.
fn requests(stream: bool) -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": r#""model":"demo""#}]);
    [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 5, "ignore_eos": true, "stream": stream}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "demo", "max_tokens": 5, "ignore_eos": true, "stream": stream}),
        ),
        (
            "/v1/responses",
            json!({"input": "demo", "max_output_tokens": 5, "ignore_eos": true, "stream": stream}),
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 5, "ignore_eos": true, "stream": stream}),
        ),
    ]
}

#[tokio::test]
async fn an_unstreamed_reply_has_the_clients_name_and_its_right_length() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let connection = Http2Client::connect(stack.address()).await?;
    for (path, body) in requests(false) {
        for reply in [
            stack.send(ask(path, body.clone(), &[])?).await?,
            connection.send(ask(path, body.clone(), &[])?).await?,
        ] {
            assert_eq!(
                (reply.status, &reply.json()?["model"]),
                (200, &json!("a")),
                "{path}: {}",
                reply.text()
            );
            assert_eq!(
                reply.header("content-length"),
                reply.body.len().to_string(),
                "{path}"
            );
        }
    }
    let inputs = vec!["x"; 500];
    let reply = stack
        .send(ask("/v1/embeddings", json!({"input": inputs}), &[])?)
        .await?;
    assert!(reply.body.len() > HELD_BYTES_MAX && reply.header("content-length").is_empty());
    let embeddings = reply.json()?;
    assert_eq!(
        (
            embeddings["data"].as_array().map(Vec::len),
            &embeddings["model"]
        ),
        (Some(500), &json!("a")),
        "longer than the filter holds back"
    );
    Ok(())
}

/// Returns the options of a server that writes its streams in pieces of this many bytes.
fn cutting(bytes_per_write: usize) -> model_server::ModelServerOptions {
    model_server::ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        bytes_per_write,
        ..model_server::ModelServerOptions::default()
    }
}

#[tokio::test]
async fn a_stream_has_the_clients_name_wherever_the_engine_cuts_it() -> Result<()> {
    for bytes in [3, 50] {
        let stack = Stack::builder()
            .servers_like(1, &cutting(bytes))
            .shared_envoy()
            .start()
            .await?;
        for (path, body) in requests(true) {
            let direct = client::send(stack.servers[0].addr(), ask_directly(path, &body)?).await?;
            let through = client::send(stack.address(), ask(path, body, &[])?).await?;
            assert_eq!(
                through.header("content-type"),
                direct.header("content-type")
            );
            let expected = settled(&direct.text()).replace(r#""model":"demo""#, r#""model":"a""#);
            assert!(expected.contains(r#""model":"a""#), "{path}: {expected}");
            assert_eq!(
                settled(&through.text()),
                expected,
                "{path} in pieces of {bytes}"
            );
        }
    }
    Ok(())
}

fn ask_directly(path: &str, body: &Value) -> Result<Request<client::Body>> {
    let mut body = body.clone();
    body["model"] = "demo".into();
    Ok(Request::post(path).body(client::full(body.to_string()))?)
}

/// Returns a stream without the fields that differ between replies: ids and times.
fn settled(stream: &str) -> String {
    let mut out = String::new();
    for line in stream.lines() {
        match line
            .strip_prefix("data: ")
            .and_then(|data| serde_json::from_str::<Value>(data).ok())
        {
            Some(mut data) => {
                settle(&mut data);
                out += &format!("data: {data}\n");
            }
            None => out += &format!("{line}\n"),
        }
    }
    out
}

fn settle(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|name, _| {
                !["id", "item_id", "created", "created_at"].contains(&name.as_str())
            });
            members.values_mut().for_each(settle);
        }
        Value::Array(items) => items.iter_mut().for_each(settle),
        _ => {}
    }
}

#[tokio::test]
async fn events_are_not_held_back() -> Result<()> {
    let slow = model_server::ModelServerOptions {
        chunk_delay_ms: 200,
        ..cutting(0)
    };
    let stack = Stack::builder()
        .servers_like(1, &slow)
        .shared_envoy()
        .start()
        .await?;
    let (path, body) = &requests(true)[0];
    let mut events =
        EventStream::new(client::start(stack.address(), ask(path, body.clone(), &[])?).await?);
    let mut arrivals = Vec::new();
    while let Some(event) = events.next().await? {
        assert!(
            !event.data.contains(r#""model":"demo""#) || event.data.contains("content"),
            "{}",
            event.data
        );
        arrivals.push(event.at);
    }
    let spread = arrivals[arrivals.len() - 1] - arrivals[0];
    assert!(
        spread.as_millis() >= 600,
        "{} events within {spread:?}",
        arrivals.len()
    );
    Ok(())
}

#[tokio::test]
async fn a_compressed_reply_is_not_touched() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    for (path, body) in requests(false) {
        let reply = stack.send(ask(path, body, &[("x-gzip", "1")])?).await?;
        assert_eq!(
            (reply.status, reply.header("content-encoding")),
            (200, "gzip")
        );
        assert_eq!(reply.header("content-length"), reply.body.len().to_string());
        let mut text = String::new();
        flate2::read::GzDecoder::new(&reply.body[..]).read_to_string(&mut text)?;
        assert_eq!(serde_json::from_str::<Value>(&text)?["model"], "demo");
    }
    Ok(())
}

#[tokio::test]
async fn a_reply_that_breaks_off_while_it_is_held_is_no_whole_reply() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::ResetMidStream))
        .await;
    let (path, body) = &requests(false)[0];
    let broken = stack.send(ask(path, body.clone(), &[])?).await;
    assert!(
        broken.as_ref().map_or(true, |reply| reply.status >= 500),
        "{broken:?}"
    );
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::None))
        .await;
    assert_eq!(stack.send(ask(path, body.clone(), &[])?).await?.status, 200);
    Ok(())
}
