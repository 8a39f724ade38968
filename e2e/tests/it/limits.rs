//! The resources that a client can make Envoy hold: windows, connections, memory. The tests exceed
//! each limit of the shipped configuration and check that Envoy recovers.

use std::time::Duration;

use flate2::{Compress, Compression, FlushCompress};
use futures::{StreamExt as _, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame};
use rustix::process::Signal;
use serde_json::{Value, json};
use testbed::client::{self, ClientReply, Http2Client, RawConnection};
use testbed::stack::Stack;
use testbed::{Result, wait_for};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::echo;
use crate::engine::RawEngine;

/// The maximum wait for a change. It is far above every promised time, because a machine that
/// compiles at the same time is slow.
const LIMIT: Duration = Duration::from_secs(30);

// === HTTP/2 windows ===

/// A connection preface and an empty SETTINGS frame: the client's windows are the protocol's
/// default of 65,535 bytes.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;

/// Reads the next frame. Returns its type, stream and payload.
async fn frame(raw: &mut RawConnection) -> Result<(u8, u32, Vec<u8>)> {
    let head = raw.read_exactly(9).await?;
    let bytes = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
    Ok((head[3], number(&head[5..9]), raw.read_exactly(bytes).await?))
}

fn number(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .fold(0, |number, byte| number << 8 | u32::from(*byte))
}

#[tokio::test]
async fn http2_windows_carry_a_long_prompt_and_no_more_than_may_be_held() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(PREFACE).await?;
    let mut streams = None;
    let mut stream_window = None;
    let mut connection_window = 65_535;
    while stream_window.is_none() || connection_window == 65_535 {
        match frame(&mut raw).await? {
            (SETTINGS, 0, payload) => {
                let value = |id| {
                    payload
                        .chunks(6)
                        .find(|setting| number(&setting[..2]) == id)
                        .map(|setting| number(&setting[2..]))
                };
                streams = streams.or(value(3));
                stream_window = stream_window.or(value(4));
            }
            (WINDOW_UPDATE, 0, payload) => connection_window += number(&payload),
            _ => {}
        }
    }
    assert_eq!(
        (streams, stream_window, connection_window),
        (Some(250), Some(1 << 20), 16 << 20)
    );
    Ok(())
}

/// The size of the reply that an engine sends to a client that does not read, in MiB.
const OFFERED_MIB: usize = 1_024;

/// The maximum number of bytes that Envoy may read from the engine while the client does not read:
/// Envoy's buffers (64 KiB downstream, 1 MiB upstream) and the socket buffers (up to 4 MiB in Linux
/// on each side).
const HELD_BYTES_MAX: i64 = 16 << 20;

const RECEIVED: &str = "cluster.inference-pool.upstream_cx_rx_bytes_total";

async fn offering() -> Result<(RawEngine, Stack)> {
    let engine = RawEngine::start(|mut stream| async move {
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n",
            OFFERED_MIB << 20
        );
        let _ = stream.write_all(head.as_bytes()).await; // if the connection is closed, the loop below ends
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..OFFERED_MIB {
            if stream.write_all(&piece).await.is_err() {
                return;
            }
        }
    });
    let engine = engine.await?;
    let stack = Stack::builder()
        .servers(0)
        .stranger(engine.address())
        .start()
        .await?;
    Ok((engine, stack))
}

/// Waits until Envoy stops reading from the engine, and returns the number of bytes that Envoy has
/// read.
async fn held(stack: &Stack) -> Result<i64> {
    let paused = || async {
        stack
            .envoy
            .stat("cluster.inference-pool.upstream_flow_control_paused_reading_total")
            .await
            .ok()
            .filter(|n| *n > 0)
    };
    wait_for(LIMIT, "Envoy to pause reading the reply", paused).await?;
    let mut before = -1;
    loop {
        let now = stack.envoy.stat(RECEIVED).await?;
        if now == before {
            return Ok(now);
        }
        before = now;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_back_the_engine() -> Result<()> {
    let (_engine, stack) = offering().await?;
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        .await?;
    let held = held(&stack).await?;
    assert!(
        (1..HELD_BYTES_MAX).contains(&held),
        "{held} bytes of {OFFERED_MIB} MiB"
    );
    raw.read_exactly(32 << 20).await?;
    assert!(
        stack.envoy.stat(RECEIVED).await? > 32 << 20,
        "the reply goes on when the client reads again"
    );
    Ok(())
}

#[tokio::test]
async fn an_http2_client_that_opens_no_window_holds_back_the_engine() -> Result<()> {
    let (_engine, stack) = offering().await?;
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(PREFACE).await?;
    // The whole request is one HEADERS frame of stream 1: GET http /v1/models, authority "x", by
    // HPACK's static table.
    raw.write(b"\0\0\x11\x01\x05\0\0\0\x01\x82\x86\x04\x0a/v1/models\x41\x01x")
        .await?;
    let first = held(&stack).await?;
    assert!(
        (65_535..HELD_BYTES_MAX).contains(&first),
        "{first} bytes of {OFFERED_MIB} MiB"
    );
    for stream in [0, 1] {
        raw.write(
            [
                &[0, 0, 4, WINDOW_UPDATE, 0, 0, 0, 0, stream][..],
                &(64_u32 << 20).to_be_bytes(),
            ]
            .concat(),
        )
        .await?;
    }
    let more = || async {
        stack
            .envoy
            .stat(RECEIVED)
            .await
            .ok()
            .filter(|received| *received > first + (1 << 20))
    };
    wait_for(LIMIT, "more bytes after the window opens", more).await?;
    Ok(())
}

// === Overload ===

/// Returns an edit of the overload manager, which sets `key` to `value` in the monitor whose name
/// ends with `name`.
fn monitor(
    name: &'static str,
    key: &'static str,
    value: u64,
) -> impl Fn(&mut Value) + Send + 'static {
    move |config| {
        let monitors = config
            .pointer_mut("/overload_manager/resource_monitors")
            .and_then(Value::as_array_mut)
            .expect("monitors");
        let monitor = monitors
            .iter_mut()
            .find(|monitor| monitor["name"].as_str().is_some_and(|n| n.ends_with(name)))
            .expect("the monitor");
        let limit = monitor
            .pointer_mut("/typed_config")
            .and_then(|config| config.get_mut(key))
            .expect("its limit");
        *limit = json!(value);
    }
}

async fn overloaded(stack: &Stack, wanted: bool) -> Result<()> {
    let name = "overload.envoy.overload_actions.stop_accepting_requests.active";
    let look = || async {
        stack
            .envoy
            .stat(name)
            .await
            .ok()
            .filter(|active| (*active == 1) == wanted)
    };
    wait_for(LIMIT, &format!("{name}: {wanted}"), look)
        .await
        .map(drop)
}

/// Uploads `bytes` bytes of a larger prompt, and keeps the connection open.
async fn unfinished(stack: &Stack, bytes: usize) -> Result<RawConnection> {
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        bytes + 1
    ))
    .await?;
    raw.write(vec![b' '; bytes]).await?;
    Ok(raw)
}

/// Returns a request with a prompt of `bytes` bytes that never ends.
fn endless(bytes: usize) -> Result<http::Request<client::Body>> {
    let piece = Ok(Frame::data(Bytes::from(vec![b' '; bytes])));
    let pieces = stream::iter([piece]).chain(stream::pending());
    let body = BodyExt::boxed(StreamBody::new(pieces));
    Ok(http::Request::post("/v1/chat/completions").body(body)?)
}

/// Uploads `count` prompts that never end, each over its own HTTP/2 connection, until Envoy resets
/// one.
async fn upload_until_reset(stack: &Stack, count: usize, bytes: usize) -> Result<()> {
    let mut uploads = Vec::new();
    for _ in 0..count {
        let client = Http2Client::connect(stack.address()).await?;
        let request = endless(bytes)?;
        uploads.push(tokio::spawn(async move { client.start(request).await }));
    }
    let reset = || async {
        stack
            .envoy
            .stat("envoy.overload_actions.reset_high_memory_stream.count")
            .await
            .ok()
            .filter(|n| *n > 0)
    };
    wait_for(LIMIT, "Envoy to reset the streams that hold most", reset).await?;
    uploads.iter().for_each(JoinHandle::abort);
    Ok(())
}

#[tokio::test]
async fn a_proxy_short_of_memory_refuses_and_recovers() -> Result<()> {
    const HEAP_BYTES_MAX: u64 = 192 << 20;
    const BODY_BYTES: usize = 20 << 20;
    let stack = Stack::builder()
        .servers(1)
        .envoy_config(monitor("fixed_heap", "max_heap_size_bytes", HEAP_BYTES_MAX))
        .picker(json!({"bodies_in_progress_bytes": 1 << 30}))
        .start()
        .await?;
    let question = echo::chat("is there room?");
    assert_eq!(
        stack.post("/v1/chat/completions", &question).await?.status,
        200
    );
    // Envoy cannot hold all bodies if they together fill the limit, so it may refuse the last body
    // already.
    let mut uploads = Vec::new();
    for _ in 0..HEAP_BYTES_MAX as usize / BODY_BYTES {
        uploads.push(unfinished(&stack, BODY_BYTES).await);
    }
    overloaded(&stack, true).await?;
    let openai = stack.post("/v1/chat/completions", &question).await?;
    let message = "the gateway is overloaded; retry later";
    assert_eq!(
        (openai.status, &openai.json()?["error"]["message"]),
        (503, &json!(message))
    );
    let anthropic = stack.post("/v1/messages", &question).await?;
    assert_eq!(anthropic.status, 503);
    assert_eq!(
        anthropic.json()?,
        json!({"type": "error", "error": {"type": "overloaded_error", "message": message}})
    );
    assert!(
        stack
            .envoy
            .stat("http.ingress.downstream_rq_overload_close")
            .await?
            >= 2,
        "refusals are counted"
    );
    let shrunk = || async {
        stack
            .envoy
            .stat("overload.envoy.overload_actions.shrink_heap.shrink_count")
            .await
            .ok()
            .filter(|n| *n > 0)
    };
    wait_for(
        LIMIT,
        "Envoy to give free memory back, which it does every 10 s",
        shrunk,
    )
    .await?;

    drop(uploads);
    overloaded(&stack, false).await?;
    assert_eq!(
        stack.post("/v1/chat/completions", &question).await?.status,
        200
    );
    upload_until_reset(&stack, HEAP_BYTES_MAX as usize / BODY_BYTES, BODY_BYTES).await?;
    overloaded(&stack, false).await?;
    assert_eq!(
        stack.post("/v1/chat/completions", &question).await?.status,
        200
    );
    Ok(())
}

/// Begins a request from this client address: sends `head`, and then `sent` as a part of the body.
async fn begin(stack: &Stack, client: [u8; 4], head: &str, sent: &[u8]) -> Result<RawConnection> {
    let mut raw = RawConnection::connect_from(client.into(), stack.address()).await?;
    raw.write(format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n"
    ))
    .await?;
    raw.write(sent).await?;
    Ok(raw)
}

#[tokio::test]
async fn bodies_that_are_not_whole_take_no_room_from_others() -> Result<()> {
    const MIB: usize = 1 << 20;
    const HOSTILE: [u8; 4] = [127, 0, 0, 2];
    let stack = Stack::builder()
        .servers(1)
        .concurrency(1)
        .picker(json!({"bodies_in_progress_bytes": 16 * MIB, "body_limit_bytes": 8 * MIB}))
        .start()
        .await?;
    let prompt = |bytes: usize| {
        let text = echo::chat("still there?").to_string();
        format!("{text}{}", " ".repeat(bytes - text.len()))
    };
    let honest = prompt(MIB);
    let length = format!("content-length: {}", honest.len());
    let (first, rest) = honest.as_bytes().split_at(MIB / 2);
    let mut early = begin(&stack, [127, 0, 0, 1], &length, first).await?;

    // The hostile client sends compressed bodies of 6 MiB and plain bodies of 3 MiB that never
    // become complete.
    let bomb = gzip(6 * MIB)?;
    let chunk = [format!("{:x}\r\n", bomb.len()).as_bytes(), &bomb, b"\r\n"].concat();
    let chunked = "content-encoding: gzip\r\ntransfer-encoding: chunked";
    let mut hostile = Vec::new();
    for _ in 0..12 {
        hostile.push(begin(&stack, HOSTILE, chunked, &chunk).await?);
        let long = format!("content-length: {}", 3 * MIB + 1);
        // The proxy may close a connection before it has read the whole body.
        hostile.extend(begin(&stack, HOSTILE, &long, &vec![b' '; 3 * MIB]).await);
    }
    let refused = || async {
        let sum = stack
            .envoy
            .picker_stat("switchpoint_refused_invalid_total")
            .await
            .ok()?;
        Some(sum).filter(|sum| *sum >= 12)
    };
    wait_for(LIMIT, "bodies of one client to be refused", refused).await?;

    // Clients that were connected before continue, and new clients arrive, while some hostile
    // bodies are still held.
    early.write(rest).await?;
    assert_eq!(early.read_reply().await?.status, 200);
    for _ in 0..4 {
        let mut raw = begin(&stack, [127, 0, 0, 1], &length, first).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        raw.write(rest).await?;
        let reply = raw.read_reply().await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    // The client alone may use all the room, once it sends bodies that become complete.
    drop(hostile);
    let mut large = Vec::new();
    let whole = prompt(7 * MIB);
    let length = format!("content-length: {}", whole.len());
    let (first, rest) = whole.as_bytes().split_at(6 * MIB);
    for _ in 0..2 {
        large.push(begin(&stack, HOSTILE, &length, first).await?);
    }
    for mut raw in large {
        raw.write(rest).await?;
        assert_eq!(raw.read_reply().await?.status, 200);
    }
    Ok(())
}

/// Sends one byte of a body after another until the proxy answers.
async fn trickle(mut raw: RawConnection) -> Result<u16> {
    loop {
        raw.write(" ").await?;
        if let Ok(reply) = timeout(Duration::from_millis(20), raw.read_reply()).await {
            return Ok(reply?.status);
        }
    }
}

#[tokio::test]
async fn uploads_that_trickle_go_before_new_ones_and_others_are_served() -> Result<()> {
    const MIB: usize = 1 << 20;
    const ROOM: usize = 8;
    let stack = Stack::builder()
        .servers(1)
        .concurrency(1)
        .picker(json!({"bodies_in_progress_bytes": ROOM * MIB, "body_limit_bytes": 4 * MIB}))
        .start()
        .await?;
    let hostile = async || {
        let length = format!("content-length: {}", 2 * MIB);
        begin(&stack, [127, 0, 0, 2], &length, &vec![b' '; MIB - 65_536]).await
    };
    let mut trickled = Vec::new();
    for _ in 0..ROOM {
        trickled.push(tokio::spawn(trickle(hostile().await?)));
    }
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    // New bodies of a client replace its own slow bodies. Bodies of another client are served.
    let mut stopped = Vec::new();
    for _ in 0..ROOM {
        stopped.push(hostile().await?);
    }
    for status in trickled {
        assert_eq!(timeout(LIMIT, status).await???, 408);
    }
    let text = echo::chat("is there room?").to_string();
    let honest = format!("{text}{}", " ".repeat(MIB - text.len()));
    let length = format!("content-length: {}", honest.len());
    let (first, rest) = honest.as_bytes().split_at(MIB / 2);
    for _ in 0..4 {
        let mut raw = begin(&stack, [127, 0, 0, 1], &length, first).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        raw.write(rest).await?;
        let reply = raw.read_reply().await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    Ok(())
}

#[tokio::test]
async fn streams_whose_bodies_do_not_arrive_take_no_room_from_others() -> Result<()> {
    const MIB: usize = 1 << 20;
    const STREAMS: usize = 300;
    // The first 128 are free. Each of the others costs 128 KiB (`crates/exchange/src/bodies.rs`).
    const HELD_MAX: usize = 128 + 8 * 8;
    let stack = Stack::builder()
        .servers(1)
        .concurrency(1)
        .picker(json!({"bodies_in_progress_bytes": 8 * MIB, "body_limit_bytes": 4 * MIB}))
        .start()
        .await?;
    let chunked = "content-encoding: gzip\r\ntransfer-encoding: chunked";
    let mut hostile = Vec::new();
    for _ in 0..STREAMS {
        hostile.push(begin(&stack, [127, 0, 0, 2], chunked, b"").await?);
    }
    let refused = || async {
        let name = "switchpoint_refused_invalid_total";
        let sum = stack.envoy.picker_stat(name).await.ok()?;
        Some(sum).filter(|sum| *sum >= (STREAMS - HELD_MAX) as i64)
    };
    wait_for(LIMIT, "streams of one client to be refused", refused).await?;
    for _ in 0..8 {
        let question = echo::chat("is there room?");
        let reply = stack.post("/v1/chat/completions", &question).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    drop(hostile);
    Ok(())
}

/// Starts an engine that reads each request, and begins a reply that does not end.
async fn answering() -> Result<RawEngine> {
    let engine = RawEngine::start(|mut stream| async move {
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        let _ = stream.write_all(head.as_bytes()).await; // if the connection is closed, the loop below ends
        let mut piece = vec![0; 64 << 10];
        while matches!(stream.read(&mut piece).await, Ok(1..)) {}
    });
    engine.await
}

/// Returns the number of bytes that Envoy has allocated.
async fn allocated(stack: &Stack) -> Result<usize> {
    let page: Value = serde_json::from_str(&stack.envoy.admin_page("/memory").await?)?;
    let bytes = page["allocated"].as_str().ok_or("no number of bytes")?;
    Ok(bytes.parse()?)
}

#[tokio::test]
async fn a_long_request_is_not_kept_while_its_reply_runs() -> Result<()> {
    const MIB: usize = 1 << 20;
    const BODY_MIB: usize = 4;
    const REQUESTS: usize = 24;
    let engines = [answering().await?, answering().await?];
    // Envoy may keep 8 MiB for retries, and 7 MiB for the retries of a client that is alone.
    let stack = Stack::builder()
        .servers(0)
        .stranger(engines[0].address())
        .stranger(engines[1].address())
        .concurrency(1)
        .picker(json!({"bodies_in_progress_bytes": 16 * MIB, "body_limit_bytes": 8 * MIB}))
        .start()
        .await?;
    let text = echo::chat("how long is this?").to_string();
    let prompt = format!("{text}{}", " ".repeat(BODY_MIB * MIB - text.len()));
    let length = format!("content-length: {}", prompt.len());
    let before = allocated(&stack).await?;
    let mut running = Vec::new();
    for _ in 0..REQUESTS {
        let mut raw = begin(&stack, [127, 0, 0, 2], &length, prompt.as_bytes()).await?;
        let head = raw.read_until(b"\r\n\r\n").await?;
        assert!(head.starts_with(b"HTTP/1.1 200"), "{head:?}");
        running.push(raw);
    }
    let is_small = || async {
        let now = allocated(&stack).await.ok()?;
        Some(()).filter(|()| now < before + REQUESTS * BODY_MIB * MIB / 3)
    };
    wait_for(LIMIT, "Envoy to keep few of the requests", is_small).await?;
    drop(running);
    Ok(())
}

/// Sends a request on a connection that stays open. Returns an error if Envoy closes the
/// connection.
async fn ask(raw: &mut RawConnection) -> Result<ClientReply> {
    raw.write("GET /switchpoint/ready HTTP/1.1\r\nhost: x\r\n\r\n")
        .await?;
    raw.read_reply().await
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_and_the_admin_page_is_not() -> Result<()> {
    const CONNECTIONS_MAX: usize = 8;
    let edit = monitor(
        "downstream_max_connections",
        "max_active_downstream_connections",
        CONNECTIONS_MAX as u64,
    );
    let stack = Stack::builder()
        .servers(1)
        .envoy_config(edit)
        .start()
        .await?;
    let active = || async {
        stack
            .envoy
            .stat("http.ingress.downstream_cx_active")
            .await
            .ok()
            .filter(|active| *active == 0)
    };
    wait_for(
        LIMIT,
        "the connections of the start-up checks to end",
        active,
    )
    .await?;
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        let mut raw = RawConnection::connect(stack.address()).await?;
        assert_eq!(ask(&mut raw).await?.status, 200);
        open.push(raw);
    }
    let mut beyond = RawConnection::connect(stack.address()).await?;
    assert!(
        ask(&mut beyond).await.is_err(),
        "the connection beyond the limit is closed"
    );
    let name = format!(
        "listener.{}.downstream_global_cx_overflow",
        stack.address().to_string().replace(':', "_")
    );
    assert!(
        stack.envoy.stat(&name).await? >= 1,
        "the overflow is counted, and the admin page still answers"
    );
    for raw in &mut open {
        assert_eq!(ask(raw).await?.status, 200, "open connections stay open");
    }
    drop(open);
    wait_for(LIMIT, "room for a new connection", || async {
        stack
            .get("/switchpoint/ready")
            .await
            .ok()
            .filter(|reply| reply.status == 200)
    })
    .await?;
    Ok(())
}

// === Bombs ===

/// The maximum memory that compressed bombs may add to an Envoy with one worker, in KiB. One read
/// of 64 KiB inflates to 6.3 MiB at most, which Envoy's decompressor holds twice while it copies
/// its output. Envoy and the picker may each hold a body of 24 MiB before it is refused. The rest
/// of the limit is for the allocator's slack and the memory of the first request. The size of the
/// bombs does not matter: a worker inflates one read at a time.
pub(crate) const GROWTH_KIB_MAX: u64 = 100 << 10;

/// The bodies that may be in progress in the test, KiB: as long as the longest. For a moment twice
/// as much is held (see `crates/exchange/src/bodies.rs`).
const IN_PROGRESS_KIB: u64 = 24 << 10;

/// The number of bombs that are sent at the same time.
const BOMBS_AT_ONCE: usize = 16;

/// The size of a decompressed bomb.
pub(crate) const BOMB_BYTES: usize = 128 << 20;

/// Compresses `bytes` of white space, a multiple of 1 MiB, to a little more than a hundredth, so
/// that Envoy inflates all of it (`max_inflate_ratio`). 1 MiB is deflated once and repeated,
/// because after a full flush no block refers to earlier ones. The stream has no end, because Envoy
/// stops reading earlier.
pub(crate) fn gzip(bytes: usize) -> Result<Vec<u8>> {
    const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff];
    /// So many bytes of each KiB are random. The others are spaces.
    const RANDOM_BYTES: usize = 18;
    let mut text = vec![b' '; 1 << 20];
    let mut noise = 1_u32;
    for piece in text.chunks_mut(1 << 10) {
        for byte in &mut piece[..RANDOM_BYTES] {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = b" \t\n\r"[usize::from(noise.to_be_bytes()[0] >> 6)];
        }
    }
    let mut once = Vec::with_capacity(64 << 10);
    let mut deflate = Compress::new(Compression::best(), false);
    deflate.compress_vec(&text, &mut once, FlushCompress::Full)?;
    Ok([&HEADER[..], &once.repeat(bytes >> 20)].concat())
}

/// A sentence that compresses to a 250th of its size if it is repeated.
pub(crate) const SENTENCE: &str = " it was the age of wisdom, it was the age of foolishness, it was the epoch of belief, it was the season of darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before us. ";

/// Returns a prompt of 1.8 MB that compresses to a 75th of its size: the sentence, with a different
/// number before each repetition.
pub(crate) fn regular_prompt() -> String {
    let numbers = (0..8_000).map(|number: u32| number.to_string());
    numbers.collect::<Vec<_>>().join(SENTENCE)
}

/// Sends bombs in the order that costs most, however busy the machine is. First each connection
/// sends so much of a bomb that the bomb stays just below the limit for one body. Then, while Envoy
/// is stopped, all connections send the rest. Most bombs are refused before, because they exceed
/// the bodies that may be in progress. Returns the statuses.
async fn at_once(stack: &mut Stack, bomb: &[u8]) -> Result<Vec<u16>> {
    const BEGUN: &str = "http.ingress.downstream_rq_total";
    let (first, rest) = bomb.split_at(bomb.len() / (BOMB_BYTES >> 20) * 20);
    // This part is longer than what Envoy reads from a connection in one read, and shorter than
    // what a socket holds.
    let (second, rest) = rest.split_at(rest.len().min(128 << 10));
    let before = stack.envoy.stat(BEGUN).await?;
    let mut open = Vec::new();
    for _ in 0..BOMBS_AT_ONCE {
        let mut raw = RawConnection::connect(stack.address()).await?;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n",
            bomb.len()
        );
        // An error means that Envoy has refused the body and closed the connection.
        let _ = raw.write([head.as_bytes(), first].concat()).await;
        open.push(raw);
    }
    let begun = || async {
        let now = stack.envoy.stat(BEGUN).await.ok()?;
        Some(()).filter(|()| now >= before + BOMBS_AT_ONCE as i64)
    };
    wait_for(LIMIT, "the beginning of all bombs", begun).await?;
    stack.envoy.process().signal(Signal::STOP)?;
    for raw in &mut open {
        // An error means that Envoy has refused the body and closed the connection.
        let _ = raw.write(second).await;
    }
    stack.envoy.process().signal(Signal::CONT)?;
    let mut statuses = Vec::new();
    for raw in &mut open {
        // An error means that Envoy has refused the body and closed the connection.
        let _ = raw.write(rest).await;
        statuses.push(raw.read_reply().await?.status);
    }
    Ok(statuses)
}

/// Returns the value of a line of `/proc/<pid>/status`, in KiB.
pub(crate) fn memory_kib(stack: &mut Stack, line: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", stack.envoy.process().id()))?;
    let value = status.lines().find_map(|text| {
        text.strip_prefix(line)?
            .strip_prefix(':')?
            .trim()
            .strip_suffix(" kB")
    });
    Ok(value.ok_or_else(|| format!("no {line}"))?.trim().parse()?)
}

/// `make e2e-long` runs these tests.
mod slow {
    use std::cell::Cell;
    use std::time::Instant;

    use futures::future::{join_all, try_join_all};
    use testbed::stack::PickerMode;

    use super::*;

    #[tokio::test]
    async fn a_bomb_is_refused_and_does_not_fill_the_memory() -> Result<()> {
        let gzip = gzip(BOMB_BYTES)?;
        assert!(gzip.len() < 2 << 20, "{} bytes", gzip.len());
        let mut stack = Stack::builder()
            .servers(1)
            .picker(json!({"bodies_in_progress_bytes": IN_PROGRESS_KIB << 10}))
            .start()
            .await?;
        let before = memory_kib(&mut stack, "VmRSS")?;
        let request = || {
            echo::post(
                "/v1/chat/completions",
                &[("content-encoding", "gzip")],
                gzip.clone(),
            )
        };
        for _ in 0..3 {
            let http1 = stack.send(request()?).await?;
            assert!(http1.status == 413, "{} {}", http1.status, http1.text());
            let http2 = Http2Client::connect(stack.address())
                .await?
                .send(request()?)
                .await?;
            assert!(http2.status == 413, "{} {}", http2.status, http2.text());
        }
        let alone = memory_kib(&mut stack, "VmHWM")?.saturating_sub(before);
        assert!(
            alone < GROWTH_KIB_MAX,
            "memory was {before} KiB and grew by at most {alone} KiB"
        );
        for status in at_once(&mut stack, &gzip).await? {
            // A bomb that has been arriving for a second makes room for a newer one (408).
            assert!(matches!(status, 408 | 413), "many at once: {status}");
        }
        let growth = memory_kib(&mut stack, "VmHWM")?.saturating_sub(before);
        assert!(
            growth < GROWTH_KIB_MAX + 2 * IN_PROGRESS_KIB,
            "many at once: memory was {before} KiB and grew by at most {growth} KiB"
        );
        assert_eq!(
            stack
                .post("/v1/chat/completions", &echo::chat("still there?"))
                .await?
                .status,
            200
        );
        Ok(())
    }

    /// The connections of the hostile client. Their bodies inflate to 2 GiB, which is all the
    /// memory that the shipped configuration allows.
    const BODIES: u32 = 90;

    const WORKERS: u32 = 2;

    /// How long the hostile client sends.
    const ATTACK: Duration = Duration::from_secs(10);

    /// The number of honest senders, and the pause of each between two requests.
    const SENDERS: u32 = 4;
    const PAUSE: Duration = Duration::from_millis(50);

    /// A worker inflates a body in at least this many reads of 64 KiB. Between two reads from one
    /// connection, it reads from the others.
    const READS_PER_BODY: u32 = 3;

    fn median(mut times: Vec<Duration>) -> Option<Duration> {
        times.sort_unstable();
        times.get(times.len() / 2).copied()
    }

    /// Returns the time in which the idle gateway inflates a body that is too long, and refuses it.
    async fn time_of_a_body(stack: &Stack) -> Result<Duration> {
        let body = gzip(40 << 20)?;
        let mut times = Vec::new();
        for _ in 0..3 {
            let encoding = [("content-encoding", "gzip")];
            let request = echo::post("/v1/chat/completions", &encoding, body.clone())?;
            let began = Instant::now();
            assert_eq!(stack.send(request).await?.status, 413);
            times.push(began.elapsed());
        }
        Ok(median(times).unwrap_or_default())
    }

    /// Sends a body without an end, and another one each time that the last one is refused.
    async fn resend(stack: &Stack, chunk: &[u8], refused: &Cell<usize>) {
        let chunked = "content-encoding: gzip\r\ntransfer-encoding: chunked";
        loop {
            // An error means that Envoy has refused the body and closed the connection.
            if let Ok(mut raw) = begin(stack, [127, 0, 0, 2], chunked, chunk).await {
                let _ = raw.read_reply().await;
            }
            refused.set(refused.get() + 1);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Sends requests until `end`. Returns the times of their replies.
    async fn send_beside(stack: &Stack, end: Instant) -> Result<Vec<Duration>> {
        let mut times = Vec::new();
        while Instant::now() < end {
            let began = Instant::now();
            let question = echo::chat("is there room?");
            let reply = stack.post("/v1/chat/completions", &question).await?;
            assert_eq!(reply.status, 200, "{}", reply.text());
            times.push(began.elapsed());
            tokio::time::sleep(PAUSE).await;
        }
        Ok(times)
    }

    #[tokio::test]
    async fn ninety_bodies_without_an_end_take_no_room_from_others() -> Result<()> {
        const MEMORY_KIB_MAX: u64 = (2 << 20) / 10 * 8;
        let builder = Stack::builder().front(PickerMode::Filter).servers(1);
        let mut stack = builder.concurrency(WORKERS).start().await?;
        let one = time_of_a_body(&stack).await?;
        let body = gzip(22 << 20)?;
        let chunk = [format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n"].concat();
        let refused = Cell::new(0);
        let attack = join_all((0..BODIES).map(|_| resend(&stack, &chunk, &refused)));
        let end = Instant::now() + ATTACK;
        let others = try_join_all((0..SENDERS).map(|_| send_beside(&stack, end)));
        let others = tokio::select! {
            _ = attack => return Err("the attack ended".into()),
            others = others => others?,
        };
        let times = others.concat();
        let served = times.len();
        let slowest = times.iter().max().copied().unwrap_or_default();
        let usual = median(times).unwrap_or_default();
        let memory = memory_kib(&mut stack, "VmHWM")?;
        println!(
            "beside {} refused bodies of {} bytes, {served} requests were served, half of them in {usual:?}, \
             all in {slowest:?}; one body takes {one:?}; at most {memory} KiB",
            refused.get(),
            body.len()
        );
        assert!(refused.get() >= BODIES as usize, "{}", refused.get());
        assert!(memory < MEMORY_KIB_MAX, "{memory} KiB");
        // A turn is the time in which a worker reads once from each of its hostile connections.
        // A reply needs four events of its worker. It waits for one turn, and must not wait for
        // one at each event.
        let turns = one * (BODIES / WORKERS) / READS_PER_BODY * 2;
        assert!(usual < turns, "{usual:?}, at most {turns:?}");
        let served_in = (turns + PAUSE) * u32::try_from(served)?;
        assert!(
            served_in > ATTACK * SENDERS,
            "{served} with two turns of {turns:?}"
        );
        Ok(())
    }
}
