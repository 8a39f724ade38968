//! Faults, restarts and shutdown, as clients see them.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use testbed::model_server::{
    FaultMode, FaultPaths, ModelServer, ModelServerOptions, ServerFault, serve_admin,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{PATIENCE, chat, finish, get, instant, open, post, request, until, with};

/// Sends a chat request over a raw socket. Returns all bytes that were read, and how the connection
/// ended.
async fn raw(address: SocketAddr, stream: bool) -> (String, Result<(), ErrorKind>) {
    let body = chat("hello", 20, &json!({"stream": stream})).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all((head + &body).as_bytes()).await.unwrap();
    read_to_end(&mut socket).await
}

async fn read_to_end(socket: &mut TcpStream) -> (String, Result<(), ErrorKind>) {
    let mut read = Vec::new();
    let end = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut read))
        .await
        .unwrap();
    (
        String::from_utf8(read).unwrap(),
        end.map(drop).map_err(|error| error.kind()),
    )
}

async fn order(server: &ModelServer, mode: FaultMode, count: u32) {
    server
        .fault(ServerFault {
            count: Some(count),
            ..ServerFault::new(mode)
        })
        .await;
}

#[tokio::test]
async fn resets_are_tcp_resets_at_the_asked_moment() {
    let server = instant();
    for (mode, stream, head, events) in [
        (FaultMode::ResetBeforeHeaders, true, "", 0),
        (
            FaultMode::ResetMidHeaders,
            true,
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-str",
            0,
        ),
        (FaultMode::ResetMidStream, true, "HTTP/1.1 200 OK\r\n", 4),
        (FaultMode::ResetMidStream, false, "HTTP/1.1 200 OK\r\n", 0),
    ] {
        server
            .fault(ServerFault {
                count: Some(1),
                after_chunks: Some(3),
                ..ServerFault::new(mode)
            })
            .await;
        let (read, end) = raw(server.addr(), stream).await;
        assert_eq!(end, Err(ErrorKind::ConnectionReset), "{mode:?}: {read}");
        assert!(
            read.starts_with(head) && head.is_empty() == read.is_empty(),
            "{mode:?}: {read}"
        );
        assert_eq!(
            read.matches("data: ").count(),
            events,
            "{mode:?}: three writes, the first with the role: {read}"
        );
        let (read, end) = raw(server.addr(), stream).await;
        assert!(
            end.is_ok() && read.starts_with("HTTP/1.1 200"),
            "one request only: {read}"
        );
    }
    assert_eq!(
        server.state().await.unwrap()["requests_served"],
        8,
        "the failed ones reached the engine's door"
    );
}

#[tokio::test]
async fn a_reset_ends_http2_streams_too() {
    let server = instant();
    for mode in [FaultMode::ResetBeforeHeaders, FaultMode::ResetMidHeaders] {
        order(&server, mode, 1).await;
        let request =
            request(server.addr(), "POST", "/v1/chat/completions").version(http::Version::HTTP_2);
        let body = chat("hello", 1, &json!({})).to_string();
        assert!(
            open(server.addr(), request, &body).await.is_err(),
            "{mode:?}"
        );
    }
}

#[tokio::test]
async fn a_status_fault_hits_its_paths_so_many_times() {
    let server = instant();
    let fault = json!({"mode": "status", "status": 429, "retry_after": 7, "body": "busy", "count": 2, "paths": "inference"});
    assert_eq!(
        post(server.addr(), "/admin/faults", &fault).await.status,
        200
    );
    for expected in [429, 429, 200] {
        assert_eq!(get(server.addr(), "/metrics").await.status, 200);
        assert_eq!(get(server.addr(), "/health").await.status, 200);
        let reply = post(
            server.addr(),
            "/v1/chat/completions",
            &chat("hello", 1, &json!({})),
        )
        .await;
        assert_eq!(reply.status, expected);
        assert_eq!(reply.headers["x-served-by"], server.addr().to_string());
        if expected == 429 {
            assert_eq!(
                (reply.text(), reply.headers["retry-after"].as_bytes()),
                ("busy", b"7".as_slice())
            );
        }
    }
    server
        .fault(ServerFault {
            paths: FaultPaths::Metrics,
            ..ServerFault::new(FaultMode::Status)
        })
        .await;
    assert_eq!(get(server.addr(), "/metrics").await.status, 503);
    assert_eq!(get(server.addr(), "/v1/models").await.status, 200);
    assert_eq!(
        get(server.addr(), "/admin/faults").await.json()[0]["paths"],
        "metrics"
    );
    post(server.addr(), "/admin/faults", &json!({"mode": "none"})).await;
    assert_eq!(get(server.addr(), "/metrics").await.status, 200);
    for nonsense in [
        json!({"mode": "explode"}),
        json!({"mode": "hang", "forms": 1}),
        json!({}),
    ] {
        assert_eq!(
            post(server.addr(), "/admin/faults", &nonsense).await.status,
            400,
            "{nonsense}"
        );
    }
}

#[tokio::test]
async fn a_hung_request_hears_nothing() {
    let server = instant();
    order(&server, FaultMode::Hang, 1).await;
    let hung = tokio::time::timeout(Duration::from_millis(200), raw(server.addr(), false)).await;
    assert!(hung.is_err());
    assert!(raw(server.addr(), false).await.1.is_ok());
}

#[tokio::test]
async fn a_refusing_server_is_gone_until_its_time() {
    let server = with(ModelServerOptions::default());
    let mut stream = TcpStream::connect(server.addr()).await.unwrap();
    let body = chat("hello", 100_000, &json!({"stream": true})).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    until(&server, |state| state["running"] == 1).await;

    let (admin, _task) = serve_admin(
        "127.0.0.1:0".parse().unwrap(),
        std::slice::from_ref(&server),
    )
    .unwrap();
    assert_eq!(
        get(admin, "/servers").await.json(),
        json!([server.addr().to_string()])
    );
    let faults = format!("/servers/{}/faults", server.addr());
    assert_eq!(
        post(admin, &faults, &json!({"mode": "refuse"}))
            .await
            .status,
        200
    );
    assert_eq!(
        read_to_end(&mut stream).await.1,
        Err(ErrorKind::ConnectionReset),
        "open connections go"
    );
    until(&server, |state| state["running"] == 0).await;
    assert_eq!(
        TcpStream::connect(server.addr()).await.unwrap_err().kind(),
        ErrorKind::ConnectionRefused
    );
    assert_eq!(
        post(admin, &faults, &json!({"mode": "none"})).await.status,
        200
    );
    reachable(server.addr()).await;

    let own = post(
        server.addr(),
        "/admin/faults",
        &json!({"mode": "refuse", "for_ms": 150}),
    )
    .await;
    assert_eq!(
        (own.status.as_u16(), &own.headers["connection"]),
        (200, &"close".parse().unwrap()),
        "the order itself is answered"
    );
    assert_eq!(
        TcpStream::connect(server.addr()).await.unwrap_err().kind(),
        ErrorKind::ConnectionRefused
    );
    reachable(server.addr()).await;
    assert_eq!(
        post(
            admin,
            "/servers/127.0.0.1:1/faults",
            &json!({"mode": "none"})
        )
        .await
        .status,
        404
    );
}

async fn reachable(address: SocketAddr) {
    let connect = async {
        while TcpStream::connect(address).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, connect).await.unwrap();
}

#[tokio::test]
async fn a_restart_is_cold_and_visible() {
    let server = with(ModelServerOptions {
        speed: 20.0,
        ..ModelServerOptions::default()
    });
    let prompt = chat(&"x".repeat(640), 1, &json!({}));
    post(server.addr(), "/v1/chat/completions", &prompt).await;
    let before = server.state().await.unwrap();
    let long = chat("hello", 100_000, &json!({"stream": true})).to_string();
    let streaming = open(
        server.addr(),
        request(server.addr(), "POST", "/v1/chat/completions"),
        &long,
    )
    .await
    .unwrap();
    until(&server, |state| state["running"] == 1).await;

    assert_eq!(
        post(server.addr(), "/admin/restart", &json!({}))
            .await
            .status,
        200
    );
    assert!(
        http_body_util::BodyExt::collect(streaming.into_body())
            .await
            .is_err(),
        "streams break"
    );
    let after = server.state().await.unwrap();
    assert!(after["started_at"].as_f64() > before["started_at"].as_f64());
    assert_eq!(
        (&after["running"], &after["prompt_tokens"]),
        (&json!(0), &json!(0))
    );
    let reply = post(server.addr(), "/v1/chat/completions", &prompt)
        .await
        .json();
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    server.restart(Some(Duration::from_millis(100))).await;
    until(&server, |state| state["prompt_tokens"] == 0).await;
    reachable(server.addr()).await;
}

#[tokio::test]
async fn draining_lets_requests_end_and_dropping_does_not() {
    let server = with(ModelServerOptions {
        speed: 20.0,
        ..ModelServerOptions::default()
    });
    let address = server.addr();
    let body = chat("hello", 200, &json!({"stream": true})).to_string();
    let streaming = open(
        address,
        request(address, "POST", "/v1/chat/completions"),
        &body,
    )
    .await
    .unwrap();
    until(&server, |state| state["running"] == 1).await;
    let drained = tokio::spawn(server.drain(PATIENCE));
    let reply = finish(streaming).await;
    assert!(reply.text().ends_with("data: [DONE]\n\n"));
    tokio::time::timeout(PATIENCE, drained)
        .await
        .unwrap()
        .unwrap();
    assert!(TcpStream::connect(address).await.is_err());

    let server = with(ModelServerOptions::default());
    let address = server.addr();
    let streaming = open(
        address,
        request(address, "POST", "/v1/chat/completions"),
        &body,
    )
    .await
    .unwrap();
    drop(server);
    assert!(
        http_body_util::BodyExt::collect(streaming.into_body())
            .await
            .is_err()
    );
}
