//! Clients that do not read their replies. The bytes that these clients leave in Envoy's buffers
//! take no place from other clients. A client that reads slowly, or waits for an engine that
//! pauses, is not cut off.

use std::net::SocketAddr;
use std::time::Duration;

use e2e::queued_requests;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use testbed::client::{self, Http2Client, RawConnection};
use testbed::ports::ReservedPort;
use testbed::stack::{PickerMode, Stack, StackBuilder};
use testbed::{Result, wait_for};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::engine::head;

/// The maximum wait for a change. It is far above every promised time.
const LIMIT: Duration = Duration::from_secs(60);

/// The number of requests that the engine takes at the same time.
const SEATS: u32 = 3;

/// The time without a byte after which the filter resets a reply that its client does not read, in
/// ms.
const RESET_MS: u64 = 7_000;

/// The pause of an engine in the middle of a reply. It is longer than [`RESET_MS`].
const THOUGHT: Duration = Duration::from_secs(9);

/// The number of pieces of a reply that its client reads for as long as [`THOUGHT`], and the size
/// of a piece.
const SLOW_PIECES: u32 = 96;
const PIECE_BYTES: usize = 256 << 10;
const SLOW_BYTES: usize = SLOW_PIECES as usize * PIECE_BYTES;

const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;

/// An engine without metrics whose replies are as long as the request's header `x-bytes` says. A
/// reply of 0 bytes is a stream with a pause of [`THOUGHT`].
struct SizedEngine {
    port: ReservedPort,
    task: JoinHandle<()>,
}

// === impl SizedEngine ===

impl SizedEngine {
    async fn start() -> Result<Self> {
        let port = ReservedPort::lease()?;
        let listener = TcpListener::bind(port.address()).await?;
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream));
            }
        });
        Ok(Self { port, task })
    }

    fn address(&self) -> SocketAddr {
        self.port.address()
    }
}

impl Drop for SizedEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Answers one request. Returns `None` if the connection fails.
async fn answer(mut stream: TcpStream) -> Option<()> {
    let head = head(&mut stream).await?;
    let bytes = head
        .lines()
        .find_map(|line| line.strip_prefix("x-bytes: ")?.parse::<usize>().ok());
    let Some(bytes) = bytes else {
        let none = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        return stream.write_all(none).await.ok();
    };
    if bytes == 0 {
        return think(stream).await;
    }
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {bytes}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(&vec![b' '; bytes]).await.ok()?;
    std::future::pending().await // Envoy closes the connection
}

/// Streams 40 KB, pauses for [`THOUGHT`], and ends.
async fn think(mut stream: TcpStream) -> Option<()> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).await.ok()?;
    let event = format!(
        "data: {}\n\n",
        json!({"choices": [{"delta": {"content": "x".repeat(1_000)}}]})
    );
    for _ in 0..40 {
        stream.write_all(event.as_bytes()).await.ok()?;
    }
    tokio::time::sleep(THOUGHT).await;
    stream.write_all(b"data: [DONE]\n\n").await.ok()
}

fn builder(
    front: PickerMode,
    engine: &SizedEngine,
    folder: &std::path::Path,
    seats: u32,
) -> Result<StackBuilder> {
    let builder = Stack::builder()
        .front(front)
        .servers(0)
        .stranger(engine.address())
        .concurrency(1);
    // Once a reply has begun, Envoy takes no reply from an ext_proc server, so no reply is reset.
    let builder = match front {
        PickerMode::Filter | PickerMode::Native => {
            builder.picker(json!({"unread_reset_ms": RESET_MS}))
        }
        PickerMode::ExtProc => builder,
    };
    queued_requests::holding(builder, folder, seats)
}

async fn start(front: PickerMode, engine: &SizedEngine, folder: &std::path::Path) -> Result<Stack> {
    let stack = builder(front, engine, folder, SEATS)?.start().await?;
    // A busy machine may take longer than `initial_fetch_timeout`, and then Envoy starts without
    // endpoints.
    let members = || async {
        let members = stack.envoy.stat("cluster.inference-pool.membership_total");
        members.await.ok().filter(|members| *members > 0)
    };
    wait_for(LIMIT, "Envoy's endpoints", members).await?;
    Ok(stack)
}

/// Returns a number of the only endpoint on `/debug/endpoints`.
async fn number(stack: &Stack, name: &str) -> Option<u64> {
    let page = stack
        .daemon
        .as_ref()?
        .admin("/debug/endpoints")
        .await
        .ok()?;
    let page: Value = page.json().ok()?;
    page["endpoints"][0][name].as_u64()
}

async fn until(stack: &Stack, name: &str, wanted: u64) -> Result<()> {
    let look = || async { number(stack, name).await.filter(|now| *now == wanted) };
    wait_for(LIMIT, &format!("{name} to be {wanted}"), look)
        .await
        .map(drop)
}

async fn unread_total(stack: &Stack) -> Result<i64> {
    stack.envoy.picker_stat("switchpoint_unread_total").await
}

// === HTTP/2 without a window ===

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Opens a connection whose streams may send no byte of a body.
async fn windowless(stack: &Stack) -> Result<RawConnection> {
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await?;
    raw.write(frame(4, 0, 0, &[0, 4, 0, 0, 0, 0])).await?;
    Ok(raw)
}

/// Sends a request for a reply of `bytes` bytes.
async fn ask(raw: &mut RawConnection, stream: u32, bytes: usize) -> Result<()> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap_or(0)], text.as_bytes()].concat();
    let fields = [
        b"\x83\x86\x04".to_vec(), // The bytes are POST, http, and a path.
        text("/v1/chat/completions"),
        b"\x01".to_vec(), // This byte names `:authority`.
        text("x"),
        b"\x00".to_vec(),
        text("x-bytes"),
        text(&bytes.to_string()),
    ];
    raw.write(frame(HEADERS, 4, stream, &fields.concat()))
        .await?;
    raw.write(frame(0, 1, stream, BODY.as_bytes())).await
}

/// Sends twenty requests. Every seventh is for a reply of 12 MiB, the others are for 1 KB.
async fn ask_twenty(raw: &mut RawConnection) -> Result<()> {
    for number in 0..20 {
        let bytes = if number % 7 == 6 { 12 << 20 } else { 1_000 };
        ask(raw, 2 * number + 1, bytes).await?;
    }
    Ok(())
}

/// Reads until the proxy has reset these streams.
async fn until_reset(raw: &mut RawConnection, mut streams: Vec<u32>) -> Result<()> {
    while !streams.is_empty() {
        let head = raw.read_exactly(9).await?;
        let bytes = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        raw.read_exactly(bytes).await?;
        if head[3] == RST_STREAM {
            streams.retain(|known| *known != stream);
        }
    }
    Ok(())
}

// === HTTP/1 ===

async fn ask_http1(stack: &Stack, bytes: usize) -> Result<RawConnection> {
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-bytes: {bytes}\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    ))
    .await?;
    Ok(raw)
}

async fn honest(stack: &Stack, bytes: usize) -> Result<usize> {
    let request = http::Request::post("/v1/chat/completions")
        .header("x-bytes", bytes)
        .body(client::full(BODY))?;
    let reply = client::send(stack.address(), request).await?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    Ok(reply.body.len())
}

/// Reads a reply of [`SLOW_BYTES`] slowly. Returns false if the status is not 200.
fn read_slowly(mut raw: RawConnection) -> JoinHandle<Result<bool>> {
    tokio::spawn(async move {
        let head = raw.read_until(b"\r\n\r\n").await?;
        for _ in 0..SLOW_PIECES {
            raw.read_exactly(PIECE_BYTES).await?;
            tokio::time::sleep(THOUGHT / SLOW_PIECES).await;
        }
        Ok(head.starts_with(b"HTTP/1.1 200"))
    })
}

/// Does the same over HTTP/2. Returns the number of bytes that arrived.
async fn read_slowly_over_http2(address: SocketAddr) -> Result<usize> {
    let connection = Http2Client::connect(address).await?;
    let request = http::Request::post("/v1/chat/completions")
        .header("x-bytes", SLOW_BYTES)
        .body(client::full(BODY))?;
    let mut reply = connection.start(request).await?;
    assert_eq!(reply.status(), 200);
    let mut read = 0;
    let mut pieces = 0;
    while let Some(frame) = reply.body_mut().frame().await {
        read += frame?.data_ref().map_or(0, |data| data.len());
        while pieces < read / PIECE_BYTES {
            pieces += 1;
            tokio::time::sleep(THOUGHT / SLOW_PIECES).await;
        }
    }
    Ok(read)
}

#[tokio::test]
async fn a_client_that_reads_nothing_takes_no_place_and_one_that_reads_is_not_cut() -> Result<()> {
    let engine = SizedEngine::start().await?;
    let folder = tempfile::tempdir()?;
    let stack = start(PickerMode::Filter, &engine, folder.path()).await?;

    // The end of these replies reaches the proxy, which keeps them.
    let mut raw = windowless(&stack).await?;
    for (stream, bytes) in [(1, 1_000), (3, 1_000_000), (5, 1_000)] {
        ask(&mut raw, stream, bytes).await?;
    }
    let _short = ask_http1(&stack, 1_000).await?;
    let served = || async { number(&stack, "served").await.filter(|n| *n == 4) };
    wait_for(LIMIT, "four replies", served).await?;
    until(&stack, "in_flight", 0).await?;
    assert_eq!(unread_total(&stack).await?, 0, "their replies had ended");

    // The end of these replies does not reach the proxy. The engine has computed them, so they use
    // no seat.
    ask(&mut raw, 7, 12 << 20).await?;
    ask(&mut raw, 9, 12 << 20).await?;
    let _silent = ask_http1(&stack, 32 << 20).await?;
    until(&stack, "unread", 3).await?;
    until(&stack, "in_flight", 0).await?;
    assert_eq!(honest(&stack, 1_000).await?, 1_000);
    let all = || async { unread_total(&stack).await.ok().filter(|n| *n == 3) };
    wait_for(LIMIT, "three unread replies", all).await?;

    // Clients that read slowly are not reset.
    let slow = read_slowly(ask_http1(&stack, SLOW_BYTES).await?);
    let slow_http2 = tokio::spawn(read_slowly_over_http2(stack.address()));
    let thought = honest(&stack, 0);
    until_reset(&mut raw, vec![7, 9]).await?;
    assert!(thought.await? > 40_000);
    assert!(slow.await??);
    assert_eq!(slow_http2.await??, SLOW_BYTES);
    until(&stack, "unread", 0).await?;
    until(&stack, "in_flight", 0).await?;
    // The places of the clients that read slowly are free once their engine has ended.
    let freed = unread_total(&stack).await?;
    assert!((3..=5).contains(&freed), "{freed}");
    Ok(())
}

#[tokio::test]
async fn twenty_unread_replies_take_no_place_of_others_through_ext_proc() -> Result<()> {
    let engine = SizedEngine::start().await?;
    let folder = tempfile::tempdir()?;
    let stack = start(PickerMode::ExtProc, &engine, folder.path()).await?;
    let mut raw = windowless(&stack).await?;
    ask_twenty(&mut raw).await?;
    let slow = read_slowly(ask_http1(&stack, SLOW_BYTES).await?);
    for _ in 0..20 {
        assert_eq!(honest(&stack, 1_000).await?, 1_000);
    }
    assert!(slow.await??, "a client that reads slowly is not cut");
    until(&stack, "in_flight", 0).await?;
    Ok(())
}

/// `make e2e-long` runs these tests.
mod slow {
    use std::time::Instant;

    use futures::future::join_all;

    use super::*;

    /// The requests of other clients would expire after five seconds.
    #[tokio::test]
    async fn requests_beside_unread_replies_do_not_wait() -> Result<()> {
        const TTL_S: u32 = 5;
        let engine = SizedEngine::start().await?;
        let folder = tempfile::tempdir()?;
        let builder = builder(PickerMode::Filter, &engine, folder.path(), 8)?;
        queued_requests::hold_for(folder.path(), TTL_S)?;
        let stack = builder.start().await?;
        let mut raw = windowless(&stack).await?;
        ask_twenty(&mut raw).await?;
        let mut silent = Vec::new();
        for bytes in [1_000, 1_000_000, 12 << 20] {
            silent.push(ask_http1(&stack, bytes).await?);
        }
        let timed = || async {
            let began = Instant::now();
            honest(&stack, 1_000).await?;
            Ok::<Duration, testbed::Error>(began.elapsed())
        };
        let mut slowest = Duration::ZERO;
        for took in join_all((0..20).map(|_| timed())).await {
            slowest = slowest.max(took?);
        }
        println!("the slowest of 20 requests beside 23 unread replies took {slowest:?}");
        assert!(slowest < Duration::from_secs(TTL_S.into()));
        until(&stack, "in_flight", 0).await?;
        drop(silent);
        Ok(())
    }
}
