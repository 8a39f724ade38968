//! Floods of messages, streams, idle connections, and answers that the peer does not read.

use std::time::{Duration, Instant};

use ::ext_proc::{DESTINATION_FORMAT, STREAMS_PER_CONNECTION_MAX};
use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingRequest;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tonic::codegen::Bytes;
use tonic::transport::Channel;

use super::kit::{
    DaemonProgram, RSS_BYTES_MAX, RawStream, SteadyClient, body, chat, framed, headers, immediate,
    pick, post, prompt, said,
};
use crate::daemon::harness::until;

/// The length of each flood.
const FLOOD: Duration = Duration::from_secs(2);

/// The time for which the daemon must use little CPU. Then it has read all that its peers sent.
const SETTLED: Duration = Duration::from_millis(400);

/// The maximum CPU that idle peers may cost, in cores. The daemon alone takes a few hundredths (a
/// debug build somewhat more).
const IDLE_CORES_MAX: f64 = 0.5;

/// The maximum memory that an idle stream may take, in bytes.
const STREAM_BYTES_MAX: u64 = 32 << 10;

/// A request that is sent to the endpoint at once.
fn models() -> ProcessingRequest {
    let pairs = [(":method", "GET"), (":path", "/v1/models")];
    said(Part::RequestHeaders(headers(&pairs, true)))
}

async fn flood(message: Bytes, begins: Bytes) {
    let program = DaemonProgram::start().await;
    let neighbour = SteadyClient::for_program(&program).await;
    let channel = program.channel().await;
    // One frame has many messages, because a message that is sent alone costs its sender more than
    // the daemon.
    let batch = Bytes::from(message.repeat((32 << 10) / message.len() + 1));
    let senders = (0..4).map(|_| {
        let peer = RawStream::open(&channel);
        let begins = begins.clone();
        let batch = batch.clone();
        tokio::spawn(async move {
            let began = Instant::now();
            peer.send(begins).await;
            while began.elapsed() < FLOOD && peer.send(batch.clone()).await {}
            peer.leave();
        })
    });
    for sender in senders.collect::<Vec<_>>() {
        sender.await.unwrap();
    }
    let peak = program.peak_rss();
    let slowest = neighbour.was_served().await;
    eprintln!(
        "peak {} MiB, slowest pick of the neighbour {slowest:?}",
        peak >> 20
    );
    assert!(peak < RSS_BYTES_MAX, "{} MiB", peak >> 20);
    program.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_messages_that_say_nothing_leaves_room_for_others() {
    flood(framed(&ProcessingRequest::default()), Bytes::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_requests_on_a_stream_leaves_room_for_others() {
    flood(framed(&models()), Bytes::new()).await;
}

/// Checks that a flood of empty pieces is not kept: each piece has few bytes or none, and takes
/// more memory than these bytes to keep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_empty_pieces_is_not_kept_for_ever() {
    flood(
        framed(&body("", false)),
        framed(&chat(BodySendMode::FullDuplexStreamed)),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_tiny_pieces_is_not_kept_for_ever() {
    flood(
        framed(&body("x", false)),
        framed(&chat(BodySendMode::FullDuplexStreamed)),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_streams_cost_little_and_no_connection_takes_all() {
    let program = DaemonProgram::start().await;
    let channel = program.channel().await;
    let idle = program.rss();
    let limit = STREAMS_PER_CONNECTION_MAX as usize;
    // There are more streams than the connection has room for. The rest wait at the client.
    let mut peers = Vec::new();
    for _ in 0..limit + 16 {
        let peer = RawStream::open(&channel);
        peer.say(&models()).await;
        peers.push(peer);
    }
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let limit = limit as f64;
    until("as many are open as may be", || async {
        program.metric("llm_d_epp_extproc_streams_inflight").await >= limit
    })
    .await;
    assert!(program.metric("llm_d_epp_extproc_streams_inflight").await <= limit);
    let each = (program.rss() - idle) / u64::from(STREAMS_PER_CONNECTION_MAX);
    // On a busy machine the daemon still reads the messages of the last streams, so it is not idle
    // yet.
    until("what was said is read", || async {
        let before = program.cpu();
        tokio::time::sleep(SETTLED).await;
        (program.cpu() - before).as_secs_f64() < IDLE_CORES_MAX / 2.0 * SETTLED.as_secs_f64()
    })
    .await;
    let neighbour = SteadyClient::for_program(&program).await;
    let cpu = program.cpu();
    let began = Instant::now();
    tokio::time::sleep(FLOOD).await;
    let slowest = neighbour.was_served().await;
    let cores = (program.cpu() - cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    eprintln!("{each} bytes a stream, {cores:.3} cores, slowest pick of the neighbour {slowest:?}");
    assert!(each < STREAM_BYTES_MAX, "{each} bytes a stream");
    assert!(cores < IDLE_CORES_MAX, "{cores} cores");
    drop(channel);
    peers.into_iter().for_each(RawStream::leave);
    program.settled().await;
}

/// The declared length of a long body. A gateway may hold 40 such bodies at the same time, and keep
/// two for the retries of one connection.
const LONG: (&str, &str) = ("content-length", "20000000");

/// Begins a chat request with a long body, which the gateway holds until it is complete.
async fn hold_body(gateway: &Channel) -> RawStream {
    let peer = RawStream::open(gateway);
    let path = (":path", "/v1/chat/completions");
    peer.say(&post(BodySendMode::Buffered, &[path, LONG])).await;
    peer
}

/// Sends a request with a long body that the daemon does not read.
async fn upload(gateway: &Channel) -> RawStream {
    let peer = RawStream::with_metadata(gateway, &[(DESTINATION_FORMAT, "list")]);
    let path = (":path", "/upload");
    peer.say(&post(BodySendMode::FullDuplexStreamed, &[path, LONG]))
        .await;
    peer
}

/// Whether the gateway may keep a long body for a retry.
async fn may_retry(gateway: &Channel) -> bool {
    let (answers, status) = upload(gateway).await.end().await;
    let Some(Answer::RequestHeaders(answer)) = answers.first().and_then(|a| a.response.as_ref())
    else {
        panic!("{answers:?} {status:?}")
    };
    let changes = answer.response.as_ref().unwrap().header_mutation.as_ref();
    let mut set = changes.unwrap().set_headers.iter();
    set.any(|option| option.header.as_ref().unwrap().key == "x-envoy-retry-on")
}

/// Drills two gateways at one daemon. Both send the requests of the same client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_at_all_its_limits_takes_no_room_from_another_gateway() {
    const BODIES: usize = 20;
    const REFUSED: usize = 2;
    let program = DaemonProgram::with_endpoints(&["127.0.0.1:1", "127.0.0.1:2"]).await;
    let hostile = program.channel().await;
    let elsewhere = program
        .endpoint()
        .local_address(Some([127_u8, 0, 0, 2].into()));
    let other = elsewhere.connect().await.unwrap();
    program.settled().await;
    let copies = [upload(&hostile).await, upload(&hostile).await];
    until("it keeps two bodies for retries", || async {
        program.in_flight().await == 2
    })
    .await;
    assert!(!may_retry(&hostile).await);
    let neighbour = SteadyClient::for_program(&program).await;
    let mut bodies = Vec::new();
    for _ in 0..BODIES + REFUSED {
        bodies.push(hold_body(&hostile).await);
    }
    let refused = || bodies.iter().filter(|peer| peer.is_answered()).count();
    until("it holds as many bodies as it may", || async {
        refused() == REFUSED
    })
    .await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS_PER_CONNECTION_MAX {
        let peer = RawStream::open(&hostile);
        peer.say(&models()).await;
        streams.push(peer);
    }
    until("it has as many streams as it may", || async {
        program.metric("llm_d_epp_extproc_streams_inflight").await
            >= f64::from(STREAMS_PER_CONNECTION_MAX)
    })
    .await;

    assert!(may_retry(&other).await);
    let mut held = Vec::new();
    for _ in 0..BODIES {
        held.push(hold_body(&other).await);
    }
    for peer in held {
        peer.say(&prompt()).await;
        let (answers, status) = peer.end().await;
        let is_routed = answers
            .iter()
            .any(|answer| answer.dynamic_metadata.is_some());
        let is_refused = immediate(&answers).is_some();
        assert!(is_routed && !is_refused, "{answers:?} {status:?}");
    }
    assert_eq!(refused(), REFUSED, "no body made room for another gateway");
    let more = tokio::time::timeout(SETTLED, pick(&hostile)).await;
    assert!(more.is_err(), "the gateway is at its limits all the time");
    let slowest = neighbour.was_served().await;
    eprintln!("slowest pick of the neighbour {slowest:?}");
    drop(hostile);
    let left = bodies.into_iter().chain(copies).chain(streams);
    left.for_each(RawStream::leave);
    program.settled().await;
}

/// The bodies of these requests never come, so they cost the gateway memory for nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_whose_bodies_do_not_come_are_refused_and_others_are_served() {
    const STREAMS: usize = 2_400;
    /// More than the daemon awaits without a length ([`::exchange::bodies`]).
    const AWAITED_MAX: usize = 1_700;
    let program = DaemonProgram::start().await;
    let neighbour = SteadyClient::for_program(&program).await;
    let channel = program.channel().await;
    let mut begins = chat(BodySendMode::FullDuplexStreamed);
    if let Some(Part::RequestHeaders(headers)) = &mut begins.request {
        let address = HeaderValue {
            key: "x-forwarded-for".into(),
            raw_value: "10.6.6.6".into(),
            ..HeaderValue::default()
        };
        headers.headers.as_mut().unwrap().headers.push(address);
    }
    let mut peers = Vec::new();
    for _ in 0..STREAMS {
        let peer = RawStream::open(&channel);
        peer.say(&begins).await;
        peers.push(peer);
    }
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let refused = (STREAMS - AWAITED_MAX) as f64;
    until("the rest is refused", || async {
        program.metric("switchpoint_ext_proc_refused_total").await >= refused
    })
    .await;
    until("refused streams end", || async {
        peers.iter().filter(|peer| peer.is_answered()).count() >= STREAMS - AWAITED_MAX
    })
    .await;
    let slowest = neighbour.was_served().await;
    eprintln!("slowest pick of the neighbour {slowest:?}");
    peers.into_iter().for_each(RawStream::leave);
    program.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_open_handshakes_leave_room_for_others() {
    let program = DaemonProgram::start().await;
    let neighbour = SteadyClient::for_program(&program).await;
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    // The bytes are a HEADERS frame without the flags END_HEADERS and END_STREAM.
    let open_headers = [0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82];
    let whole = [PREFACE, &settings, &open_headers].concat();
    let mut connections = Vec::new();
    for index in 0..300 {
        let mut connection = TcpStream::connect(program.ext_proc).await.unwrap();
        // The frames are cut off after each possible number of bytes.
        connection
            .write_all(&whole[..index % (whole.len() + 1)])
            .await
            .unwrap();
        connections.push(connection);
    }
    let cpu = program.cpu();
    let began = Instant::now();
    tokio::time::sleep(FLOOD).await;
    let cores = (program.cpu() - cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    let slowest = neighbour.was_served().await;
    eprintln!(
        "{cores:.3} cores, peak {} MiB, slowest pick of the neighbour {slowest:?}",
        program.peak_rss() >> 20
    );
    assert!(cores < IDLE_CORES_MAX, "{cores} cores");
    assert!(program.peak_rss() < RSS_BYTES_MAX);
    drop(connections);
    program.settled().await;
}

/// Checks that the memory of unread replies is limited. Peers send whole bodies and do not read the
/// replies, so the daemon holds the replies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_are_not_read_are_bounded_too() {
    let program = DaemonProgram::start().await;
    let neighbour = SteadyClient::for_program(&program).await;
    let piece = framed(&body(vec![b' '; 64 << 10], false));
    let mut senders = Vec::new();
    for _ in 0..40 {
        // The peer reads one byte of each stream.
        let channel = program
            .endpoint()
            .initial_stream_window_size(1)
            .initial_connection_window_size(65_535)
            .connect()
            .await
            .unwrap();
        let peer = RawStream::unread(&channel);
        let piece = piece.clone();
        senders.push(tokio::spawn(async move {
            peer.say(&chat(BodySendMode::FullDuplexStreamed)).await;
            for _ in 0..(20 << 20) / (64 << 10) {
                if !tokio::time::timeout(Duration::from_secs(5), peer.send(piece.clone()))
                    .await
                    .unwrap_or(false)
                {
                    break;
                }
            }
            let _ = tokio::time::timeout(Duration::from_secs(5), peer.say(&prompt())).await;
            peer
        }));
    }
    let mut peers = Vec::new();
    for sender in senders {
        peers.push(sender.await.unwrap());
    }
    let peak = program.peak_rss();
    let slowest = neighbour.was_served().await;
    eprintln!(
        "peak {} MiB, slowest pick of the neighbour {slowest:?}",
        peak >> 20
    );
    assert!(peak < RSS_BYTES_MAX, "{} MiB", peak >> 20);
    peers.into_iter().for_each(RawStream::leave);
    program.settled().await;
}

/// Checks that a body in one long piece is split into pieces that Envoy accepts, in a time that is
/// linear in its length.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_piece_takes_time_in_proportion_to_its_length() {
    let program = DaemonProgram::start().await;
    let channel = program.channel().await;
    let spent = async |bytes: usize| {
        let before = program.cpu();
        for _ in 0..4 {
            let peer = RawStream::open(&channel);
            peer.say(&said(Part::RequestHeaders(headers(
                &[(":method", "POST"), (":path", "/x")],
                false,
            ))))
            .await;
            peer.say(&body(vec![b'x'; bytes], true)).await;
            let (answers, status) = peer.end().await;
            assert!(
                answers.len() > bytes / (64 << 10),
                "{} answers, {status:?}",
                answers.len()
            );
        }
        (program.cpu() - before).as_secs_f64().max(0.05)
    };
    let short = spent(3 << 20).await;
    let long = spent(24 << 20).await;
    eprintln!("{short} s for 3 MiB, {long} s for 24 MiB");
    assert!(
        long < short * 8.0 * 4.0,
        "{short} s for 3 MiB, {long} s for 24 MiB"
    );
}
