//! Tests of the test clients themselves, with a model server and without Envoy: they must report
//! exactly what was received.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request};
use hyper::body::Frame;
use serde_json::json;
use testbed::Result;
use testbed::client::{self, EventStream, Http2Client, RawConnection};
use testbed::model_server::{ModelServer, ModelServerOptions};

fn server() -> Result<ModelServer> {
    Ok(ModelServer::start(ModelServerOptions {
        speed: 0.0,
        ..ModelServerOptions::default()
    })?)
}

#[tokio::test]
async fn exact_bytes_arrive_as_they_were_written() -> Result<()> {
    let server = server()?;
    let mut raw = RawConnection::connect(server.addr()).await?;
    raw.write("POST /any HTTP/1.1\r\nhost: x\r\nx-a: 1\r\nX-A: 2\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        .await?;
    let echo = raw.read_reply().await?.json()?;
    assert_eq!(echo["body"], "abcde");
    let values = echo["headers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|pair| pair[0] == "x-a")
        .collect::<Vec<_>>();
    assert_eq!(
        values,
        [&json!(["x-a", "1"]), &json!(["x-a", "2"])],
        "both values, on two lines"
    );

    raw.write("POST /any HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        .await?;
    assert_eq!(
        raw.read_reply().await?.status,
        100,
        "two replies on one connection"
    );
    raw.write("hi").await?;
    assert_eq!(raw.read_reply().await?.json()?["body"], "hi");
    Ok(())
}

#[tokio::test]
async fn http2_sends_empty_frames_and_trailers() -> Result<()> {
    let server = server()?;
    let connection = Http2Client::connect(server.addr()).await?;
    let trailers = HeaderMap::from_iter([(
        http::HeaderName::from_static("x-sum"),
        HeaderValue::from_static("7"),
    )]);
    let body = client::frames(vec![
        Frame::data("ab".into()),
        Frame::data("".into()),
        Frame::trailers(trailers),
    ]);
    let reply = connection.send(Request::post("/any").body(body)?).await?;
    let echo = reply.json()?;
    assert_eq!(
        (echo["version"].as_str(), echo["body"].as_str()),
        (Some("HTTP/2.0"), Some("ab"))
    );
    assert_eq!(echo["trailers"], json!([["x-sum", "7"]]));
    Ok(())
}

#[tokio::test]
async fn events_are_read_one_by_one() -> Result<()> {
    let server = ModelServer::start(ModelServerOptions {
        speed: 0.0,
        chunk_delay_ms: 20,
        ..ModelServerOptions::default()
    })?;
    let chat = json!({"model": server_model(&server).await?, "stream": true, "max_tokens": 5, "ignore_eos": true,
        "messages": [{"role": "user", "content": "hello"}]});
    let request = Request::post("/v1/chat/completions").body(client::full(chat.to_string()))?;
    let mut events = EventStream::new(client::start(server.addr(), request).await?);
    let first = events.next().await?.ok_or("no event")?;
    let rest = events.rest().await?;
    let last = rest.last().ok_or("one event only")?;
    assert_eq!(last.data, "[DONE]");
    assert!(
        serde_json::from_str::<serde_json::Value>(&first.data).is_ok(),
        "{first:?}"
    );
    assert!(
        last.at - first.at >= Duration::from_millis(40),
        "the events arrived one by one, not all at the end"
    );
    Ok(())
}

async fn server_model(server: &ModelServer) -> Result<String> {
    let models = client::get(server.addr(), "/v1/models").await?.json()?;
    Ok(models["data"][0]["id"]
        .as_str()
        .ok_or("no model")?
        .to_owned())
}
