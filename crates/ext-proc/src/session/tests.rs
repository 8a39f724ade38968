use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProcessingResponse,
    ProtocolConfiguration,
};
use exchange::bodies::{UNCOUNTED_MAX, cost_bytes};
use futures::stream;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use proptest::prelude::*;
use tokio::sync::{mpsc, watch};
use tonic::Code;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::transport::server::TcpConnectInfo;

use super::super::ext_proc_stream::tests::{SERVER, holding, server, under_way};
use super::super::memory::{HELD_BYTES_MAX, HIDDEN_BYTES_MAX, INCOMPLETE_BYTES_MAX, STREAMS_MAX};
use super::super::service::{ExtProcService, METHOD};
use super::*;

const DUPLEX: i32 = 4;
const BUFFERED: i32 = 2;

fn session(server: &Arc<ExtProcServer>) -> Arc<StreamSession> {
    StreamSession::new(
        server,
        server.pool(None).unwrap(),
        &Arc::new(ExchangeSettings {
            body_limit_bytes: 1 << 20,
            ..ExchangeSettings::default()
        }),
    )
}

fn framed(message: &ProcessingRequest) -> Vec<u8> {
    let message = message.encode_to_vec();
    [
        &[0],
        &u32::try_from(message.len()).unwrap().to_be_bytes()[..],
        &message,
    ]
    .concat()
}

fn said(part: Part) -> ProcessingRequest {
    ProcessingRequest {
        request: Some(part),
        ..ProcessingRequest::default()
    }
}

fn headers(pairs: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let header = |(name, value): &(&str, &str)| HeaderValue {
        key: (*name).into(),
        raw_value: (*value).into(),
        ..HeaderValue::default()
    };
    HttpHeaders {
        headers: Some(HeaderMap {
            headers: pairs.iter().map(header).collect(),
        }),
        end_of_stream,
        ..HttpHeaders::default()
    }
}

fn chat(mode: i32) -> ProcessingRequest {
    chat_with(mode, &[])
}

/// The beginning of a chat request with more headers.
fn chat_with(mode: i32, more: &[(&str, &str)]) -> ProcessingRequest {
    let config = ProtocolConfiguration {
        request_body_mode: mode,
        response_body_mode: mode,
        ..ProtocolConfiguration::default()
    };
    let line = [(":method", "POST"), (":path", "/v1/chat/completions")];
    let headers = headers(&[&line[..], more].concat(), false);
    ProcessingRequest {
        protocol_config: Some(config),
        ..said(Part::RequestHeaders(headers))
    }
}

fn body(bytes: &[u8], end_of_stream: bool) -> ProcessingRequest {
    said(Part::RequestBody(HttpBody {
        body: bytes.to_vec(),
        end_of_stream,
        ..HttpBody::default()
    }))
}

fn prompt() -> ProcessingRequest {
    body(br#"{"model":"m","messages":[]}"#, true)
}

/// The messages in the bytes for the proxy.
fn messages_in(bytes: &[u8]) -> Vec<ProcessingResponse> {
    let mut messages = Vec::new();
    let mut rest = bytes;
    while let [0, a, b, c, d, more @ ..] = rest {
        let (message, after) = more.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        messages.push(ProcessingResponse::decode(message).unwrap());
        rest = after;
    }
    messages
}

/// Returns the messages that are sent until the stream listens or ends, and the status if it ends.
fn play(session: &StreamSession) -> (Vec<ProcessingResponse>, Option<Status>) {
    let mut answers = Vec::new();
    loop {
        match session.next() {
            SessionAction::Send(bytes) => answers.extend(messages_in(&bytes)),
            SessionAction::Listen => return (answers, None),
            SessionAction::Wait(_) | SessionAction::Hold(_) => panic!("there is state"),
            SessionAction::End(status) => return (answers, Some(status)),
        }
    }
}

/// A stream of the service whose proxy sends these messages and then nothing.
struct OpenStream {
    proxy: Option<mpsc::UnboundedSender<Result<Frame<Bytes>, Status>>>,
    answers: Body,
    /// The server stops when this is dropped.
    _runs: watch::Sender<bool>,
}

impl OpenStream {
    async fn begin(
        server: &Arc<ExtProcServer>,
        settings: &ExchangeSettings,
        messages: &[ProcessingRequest],
    ) -> Self {
        let (runs, stop) = watch::channel(false);
        let mut service = ExtProcService::new(Arc::clone(server), settings, stop);
        let (proxy, inbound) = mpsc::unbounded_channel();
        let inbound = stream::unfold(inbound, async |mut inbound| {
            Some((inbound.recv().await?, inbound))
        });
        let request = http::Request::post(METHOD)
            .body(Body::new(StreamBody::new(inbound)))
            .unwrap();
        let answers = service.call(request).await.unwrap().into_body();
        for message in messages {
            proxy.send(Ok(Frame::data(framed(message).into()))).unwrap();
        }
        Self {
            proxy: Some(proxy),
            answers,
            _runs: runs,
        }
    }

    /// The next bytes that the proxy gets; `None` if none come for now.
    async fn next(&mut self) -> Option<Bytes> {
        let frame = tokio::time::timeout(Duration::from_millis(50), self.answers.frame())
            .await
            .ok()??;
        frame.unwrap().into_data().ok()
    }
}

fn long_prompt() -> ProcessingRequest {
    body(
        format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}]}}"#,
            "x".repeat(100_000)
        )
        .as_bytes(),
        true,
    )
}

/// Envoy ends its side of a stream in order when its client leaves.
#[tokio::test]
async fn a_request_that_waits_keeps_nothing_once_its_client_has_gone() {
    let patient = ExchangeSettings {
        cold_start_wait_ms: 3_600_000,
        ..ExchangeSettings::default()
    };
    let full = holding(&[SERVER], 60_000.0);
    let mut running = OpenStream::begin(&full, &patient, &[chat(BUFFERED), prompt()]).await;
    while running.next().await.is_some() {}
    assert_eq!(under_way(&full), 1);
    let held =
        |server: &Arc<ExtProcServer>| server.pool(None).unwrap().lock().pool.queues().queued();
    for (why, server, held_before) in [
        ("no room", full, 1),
        ("no state", ExtProcServer::new(&["p".into()]), 0),
    ] {
        for mode in [BUFFERED, DUPLEX] {
            let used = || server.streams().memory().used();
            let before = used();
            let mut waiting =
                OpenStream::begin(&server, &patient, &[chat(mode), long_prompt()]).await;
            while waiting.next().await.is_some() {}
            assert!(
                used() > before + 100_000,
                "{why}, mode {mode}: the body is held, {} bytes",
                used() - before
            );
            assert_eq!(held(&server), held_before, "{why}, mode {mode}");
            waiting.proxy = None;
            let _ = waiting.next().await;
            assert_eq!(
                (used(), held(&server)),
                (before, 0),
                "{why}, mode {mode}: after the client left"
            );
        }
    }
}

#[test]
fn a_proxy_is_asked_once_to_wait_as_long_as_a_request_may_be_held() {
    for (mode, ttl_ms, asked) in [
        (BUFFERED, 60_000.0, Some(65)),
        (BUFFERED, 0.0, Some(3_600)),
        (DUPLEX, 60_000.0, None),
    ] {
        let server = holding(&[SERVER], ttl_ms);
        let first = session(&server);
        [chat(mode), prompt()]
            .iter()
            .for_each(|message| first.receive(&framed(message)));
        let _ = play(&first);
        let second = session(&server);
        [chat(mode), prompt()]
            .iter()
            .for_each(|message| second.receive(&framed(message)));
        let mut answers = Vec::new();
        let mut waits = 0;
        let wakes = loop {
            match second.next() {
                SessionAction::Send(bytes) => answers.extend(messages_in(&bytes)),
                SessionAction::Hold(wakes) if waits > 0 => break wakes,
                // The request is tried again, finds no room, and does not ask again.
                SessionAction::Hold(_) => waits += 1,
                other => panic!("{other:?}"),
            }
            if waits > 0 {
                assert!(matches!(second.retry(server.now()), StreamAction::Hold(_)));
            }
        };
        let times: Vec<_> = answers
            .iter()
            .filter_map(|answer| answer.override_message_timeout.as_ref())
            .collect();
        assert_eq!(
            times.iter().map(|time| time.seconds).collect::<Vec<_>>(),
            Vec::from_iter(asked),
            "mode {mode}"
        );
        first.close();
        server.pool(None).unwrap().lock().release_next(server.now());
        drop(wakes);
        assert!(matches!(second.retry(server.now()), StreamAction::Listen));
        let (answers, _) = play(&second);
        assert!(
            answers.iter().all(|answer| answer.response.is_some()) && !answers.is_empty(),
            "it goes, mode {mode}"
        );
    }
}

fn status_of(answers: &[ProcessingResponse]) -> Option<i32> {
    answers.iter().find_map(|answer| match &answer.response {
        Some(Response::ImmediateResponse(reply)) => Some(reply.status.as_ref().unwrap().code),
        _ => None,
    })
}

async fn pass(ms: u64) {
    tokio::time::advance(Duration::from_millis(ms)).await;
}

#[tokio::test(start_paused = true)]
async fn a_body_without_progress_is_given_up_in_the_words_of_its_api() {
    let server = server(&[SERVER]);
    for (mode, messages) in [
        (DUPLEX, framed(&body(&[b' '; 1000], false))),
        (BUFFERED, framed(&body(&[b' '; 1000], true))[..900].to_vec()),
    ] {
        let session = session(&server);
        session.receive(&framed(&chat(mode)));
        assert!(play(&session).1.is_none());
        session.receive(&messages);
        assert!(play(&session).1.is_none());
        assert!(server.streams().memory().used() >= 900);
        pass(SILENCE_MS_MAX - 1).await;
        server.expire();
        assert_eq!(play(&session).0, []);
        pass(1).await;
        server.expire();
        tokio::time::timeout(Duration::from_millis(1), session.wait_for_wake())
            .await
            .expect("it is woken");
        let (answers, status) = play(&session);
        assert_eq!(
            (status_of(&answers), status.unwrap().code()),
            (Some(408), Code::Ok)
        );
        assert_eq!(server.streams().memory().used(), 0);
    }
    assert_eq!(server.streams().refused(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_trickles_is_given_up_too() {
    let server = server(&[SERVER]);
    let session = session(&server);
    session.receive(&framed(&chat(DUPLEX)));
    let mut ms = 0;
    let answers = loop {
        let (answers, status) = play(&session);
        if status.is_some() {
            break answers;
        }
        session.receive(&framed(&body(b" ", false)));
        pass(SILENCE_MS_MAX / 2).await;
        ms += SILENCE_MS_MAX / 2;
        server.expire();
        assert!(ms <= BODY_MS_MAX);
    };
    assert_eq!((status_of(&answers), ms), (Some(408), BODY_MS_MAX));
}

#[tokio::test(start_paused = true)]
async fn a_proxy_that_holds_the_body_may_be_silent_as_long_as_the_body_may_take() {
    let server = server(&[SERVER]);
    let session = session(&server);
    session.receive(&framed(&chat(BUFFERED)));
    assert!(play(&session).1.is_none());
    pass(BODY_MS_MAX - 1).await;
    server.expire();
    assert_eq!(play(&session).0, []);
    pass(1).await;
    server.expire();
    assert_eq!(status_of(&play(&session).0), Some(408));
}

/// Begins a chat request whose body does not come. Returns the status if it is refused.
fn begin(
    server: &Arc<ExtProcServer>,
    mode: i32,
    more: &[(&str, &str)],
) -> (Arc<StreamSession>, Option<i32>) {
    let session = StreamSession::new(server, server.pool(None).unwrap(), &Arc::default());
    session.receive(&framed(&chat_with(mode, more)));
    let (answers, _) = play(&session);
    let status = status_of(&answers);
    (session, status)
}

#[tokio::test(start_paused = true)]
async fn declared_bodies_that_do_not_come_take_no_room_from_other_clients() {
    let server = server(&[SERVER]);
    let begin = |client| {
        let more = [("x-forwarded-for", client), ("content-length", "20000000")];
        begin(&server, BUFFERED, &more)
    };
    let hostile = "10.1.1.1";
    let honest = "10.2.2.2";
    let fitting = HIDDEN_BYTES_MAX / cost_bytes(20_000_000, true);
    let held: Vec<_> = (0..fitting).map(|_| begin(hostile)).collect();
    assert!(held.iter().all(|(_, status)| status.is_none()));
    let refused = || {
        let statuses = held.iter().map(|(session, _)| status_of(&play(session).0));
        statuses.flatten().collect::<Vec<_>>()
    };
    assert_eq!(begin(hostile).1, Some(413), "none of the others is slow");
    assert!(refused().is_empty());
    let (other, status) = begin(honest);
    assert_eq!((status, refused()), (None, vec![413]));
    pass(1_000).await;
    assert_eq!(begin(hostile).1, None, "a slow one makes room");
    assert_eq!(refused(), vec![408]);
    assert_eq!(play(&other).0, []);
    assert_eq!(server.streams().refused(), 3);
    drop(other);
    drop(held);
    assert_eq!(server.streams().memory().used(), 0);
}

#[tokio::test(start_paused = true)]
async fn each_awaited_body_has_a_price_beyond_the_first_ones() {
    const STREAMS: usize = 2_000;
    let server = server(&[SERVER]);
    let begin = |client| begin(&server, DUPLEX, &[("x-forwarded-for", client)]);
    let hostile: Vec<_> = (0..STREAMS).map(|_| begin("10.1.1.1")).collect();
    let open = hostile
        .iter()
        .filter(|(_, status)| status.is_none())
        .count();
    let most = UNCOUNTED_MAX + INCOMPLETE_BYTES_MAX / cost_bytes(0, false);
    assert!((most / 10 * 9..=most).contains(&open), "{open}");
    let (other, status) = begin("10.2.2.2");
    assert_eq!(status, None);
    other.receive(&framed(&prompt()));
    assert!(play(&other).1.is_none());
    assert_eq!(under_way(&server), 1);
}

#[test]
fn control_headers_count_until_they_are_removed() {
    let server = server(&[SERVER]);
    let session = session(&server);
    let more = vec![("x-prefiller-host-port", "x"); 2_000];
    session.receive(&framed(&chat_with(DUPLEX, &more)));
    assert!(play(&session).1.is_none());
    assert!(session.memory() > 2_000 * 60, "{}", session.memory());
}

#[test]
fn a_client_leaves_a_quarter_of_all_streams_to_others() {
    let server = server(&[SERVER]);
    let get = |address| {
        let session = session(&server);
        let line = [(":method", "GET"), (":path", "/v1/models")];
        let pairs = [&line[..], &[("x-forwarded-for", address)]].concat();
        session.receive(&framed(&said(Part::RequestHeaders(headers(&pairs, true)))));
        status_of(&play(&session).0)
    };
    let one = || {
        let mut account = server.streams().memory().account();
        account.set_client(scheduler::name_hash("10.1.1.1"));
        account
    };
    let mut open: Vec<_> = (0..STREAMS_MAX / 4 * 3).map(|_| one()).collect();
    assert_eq!(get("10.1.1.1"), None, "there is no other client");
    let mut other = server.streams().memory().account();
    other.set_client(scheduler::name_hash("10.2.2.2"));
    assert_eq!(get("10.1.1.1"), Some(429));
    assert_eq!(get("10.2.2.2"), None);
    assert_eq!(under_way(&server), 0, "picks are released");
    open.truncate(9);
    assert_eq!(get("10.1.1.1"), None);
}

#[test]
fn the_only_client_leaves_an_eighth_of_all_streams_to_the_next_one() {
    let server = server(&[SERVER]);
    let one = |client| {
        let mut account = server.streams().memory().account();
        account.set_client(client);
        account
    };
    let open: Vec<_> = (0..STREAMS_MAX / 8 * 7).map(|_| one(1)).collect();
    assert!(open.iter().all(|account| !account.has_too_many_streams()));
    assert!(one(1).has_too_many_streams());
    assert!(!one(2).has_too_many_streams());
}

/// The connection of a gateway with this address.
fn gateway(address: &str) -> GatewayConnection {
    let mut extensions = http::Extensions::new();
    extensions.insert(TcpConnectInfo {
        local_addr: None,
        remote_addr: Some(address.parse().unwrap()),
    });
    GatewayConnection::from_extensions(&extensions)
}

#[tokio::test(start_paused = true)]
async fn bodies_that_one_gateway_holds_take_no_room_from_other_gateways_or_from_the_server() {
    let server = server(&[SERVER]);
    let begin_at = |address: &str, mode| {
        let session = StreamSession::new(&server, server.pool(None).unwrap(), &Arc::default());
        session.set_gateway(gateway(address));
        let more = [("content-length", "20000000")];
        session.receive(&framed(&chat_with(mode, &more)));
        let status = status_of(&play(&session).0);
        (session, status)
    };
    let fitting = HIDDEN_BYTES_MAX / cost_bytes(20_000_000, true);
    let held: Vec<_> = (0..fitting)
        .map(|_| begin_at("10.0.0.1:1", BUFFERED))
        .collect();
    assert!(held.iter().all(|(_, status)| status.is_none()));
    assert_eq!(begin_at("10.0.0.1:2", BUFFERED).1, Some(413));
    assert_eq!(begin_at("10.0.0.2:1", BUFFERED).1, None);
    assert_eq!(begin_at("10.0.0.1:1", DUPLEX).1, None);
}

#[tokio::test(start_paused = true)]
async fn a_hidden_body_of_unknown_length_counts_more_the_longer_it_is_held() {
    const BODIES: usize = 100;
    let server = server(&[SERVER]);
    let held: Vec<_> = (0..BODIES).map(|_| begin(&server, BUFFERED, &[])).collect();
    assert!(held.iter().all(|(_, status)| status.is_none()));
    let mut refused = 0;
    for (ms, bytes) in [
        (400, 10_000_000),
        (600, 25_000_000),
        (9_000, HIDDEN_BODY_MAX),
    ] {
        pass(ms).await;
        server.expire();
        let statuses = held.iter().map(|(session, _)| status_of(&play(session).0));
        refused += statuses.flatten().count();
        let fitting = HIDDEN_BYTES_MAX / cost_bytes(bytes, false);
        assert_eq!(refused, BODIES - fitting, "{bytes} bytes each");
    }
    let (_other, status) = begin(&server, BUFFERED, &[("x-forwarded-for", "10.2.2.2")]);
    assert_eq!(status, None);
}

#[tokio::test(start_paused = true)]
async fn a_client_alone_may_upload_ten_hidden_bodies_of_unknown_length_for_minutes() {
    let server = server(&[SERVER]);
    let held: Vec<_> = (0..10).map(|_| begin(&server, BUFFERED, &[])).collect();
    pass(BODY_MS_MAX - 1).await;
    server.expire();
    let statuses = held.iter().map(|(session, _)| status_of(&play(session).0));
    assert_eq!(statuses.flatten().count(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_stream_of_a_displaced_body_is_woken() {
    let server = server(&[SERVER]);
    let long = ("content-length", "25000000");
    let held: Vec<_> = (0..HIDDEN_BYTES_MAX / cost_bytes(25_000_000, true))
        .map(|_| begin(&server, BUFFERED, &[long]).0)
        .collect();
    let _other = begin(&server, BUFFERED, &[long, ("x-forwarded-for", "10.2.2.2")]);
    let wakes = held.iter().map(|session| session.wait_for_wake());
    let wakes = futures::future::select_all(wakes.map(Box::pin));
    tokio::time::timeout(Duration::from_millis(1), wakes)
        .await
        .expect("one is woken");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_sent_on_may_take_as_long_as_it_takes() {
    let server = server(&[SERVER]);
    let session = session(&server);
    session.receive(&[framed(&chat(DUPLEX)), framed(&prompt())].concat());
    assert!(play(&session).1.is_none());
    pass(10 * BODY_MS_MAX).await;
    server.expire();
    assert!(play(&session).1.is_none());
    assert_eq!(under_way(&server), 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_taken_is_given_up_and_so_is_what_never_begins() {
    let server = server(&[SERVER]);
    let unread = session(&server);
    let silent = session(&server);
    unread.receive(
        &[
            framed(&chat(DUPLEX)),
            framed(&body(&[b' '; 300_000], false)),
            framed(&prompt()),
        ]
        .concat(),
    );
    let SessionAction::Send(first) = unread.next() else {
        panic!("no answer")
    };
    assert!(matches!(silent.next(), SessionAction::Listen));
    assert_eq!(under_way(&server), 1);
    assert!(server.streams().memory().used() >= 300_000);
    pass(SILENCE_MS_MAX).await;
    server.expire();
    assert_eq!(under_way(&server), 0);
    assert_eq!(server.streams().open(), 0);
    assert_eq!(
        server.streams().memory().used(),
        first.len(),
        "what HTTP/2 has is held until the stream is gone"
    );
    for session in [unread, silent] {
        assert_eq!(play(&session).1.unwrap().code(), Code::DeadlineExceeded);
    }
    assert_eq!(server.streams().memory().used(), 0);
}

#[tokio::test]
async fn without_memory_a_request_is_refused_at_once_and_holds_nothing() {
    let server = server(&[SERVER]);
    let mut others = server.streams().memory().account();
    others.set_client(1);
    others.record(HELD_BYTES_MAX - (64 << 10));
    let small = session(&server);
    let large = session(&server);
    let envelope = session(&server);
    small.receive(&[framed(&chat(DUPLEX)), framed(&prompt())].concat());
    let (answers, status) = play(&small);
    assert_eq!(
        (status_of(&answers), status.map(|status| status.code())),
        (None, None),
        "a small one is served: {answers:?}"
    );
    drop(small);
    large.receive(
        &[
            framed(&chat(DUPLEX)),
            framed(&body(&[b' '; 32 << 10], false)),
        ]
        .concat(),
    );
    let (answers, status) = play(&large);
    assert_eq!(
        (status_of(&answers), status.unwrap().code()),
        (Some(503), Code::Ok)
    );
    let long = "x".repeat(8 << 10);
    envelope.receive(&framed(&said(Part::RequestHeaders(headers(
        &[(":path", "/"), ("x-long", &long)],
        true,
    )))));
    assert_eq!(
        status_of(&play(&envelope).0),
        Some(503),
        "what takes much to decode is accounted before it is"
    );
    drop((large, envelope));
    assert_eq!(
        server.streams().memory().used(),
        HELD_BYTES_MAX - (64 << 10)
    );
}

#[test]
fn headers_twice_release_the_first_body() {
    let server = server(&[SERVER]);
    let session = session(&server);
    for _ in 0..10 {
        session.receive(
            &[
                framed(&chat(DUPLEX)),
                framed(&body(&[b' '; 100_000], false)),
            ]
            .concat(),
        );
        play(&session);
    }
    assert!(server.streams().memory().used() < 200_000);
}

/// Something that happens to one of several streams.
#[derive(Clone, Debug)]
enum SessionEvent {
    Says(usize),
    /// The same message, in frames of this many bytes.
    SaysInFrames(usize, usize),
    Bytes(Vec<u8>),
    /// The proxy takes the next bytes, or a part of them.
    Takes(usize),
    /// The clock advances by this many seconds.
    Waits(u64),
    /// Other streams of the daemon hold all memory except this many bytes.
    Short(usize),
    Leaves,
}

fn messages() -> Vec<ProcessingRequest> {
    let reply = |pairs: &[(&str, &str)], end| said(Part::ResponseHeaders(headers(pairs, end)));
    let reply_body = |bytes: &[u8], end| {
        said(Part::ResponseBody(HttpBody {
            body: bytes.to_vec(),
            end_of_stream: end,
            ..HttpBody::default()
        }))
    };
    vec![
        chat(DUPLEX),
        chat(BUFFERED),
        chat(1),
        chat(0),
        prompt(),
        body(br#"{"model":"alias","#, false),
        body(br#""messages":[]}"#, true),
        body(&[b' '; 70_000], false),
        body(b"", true),
        said(Part::RequestHeaders(headers(
            &[(":method", "GET"), (":path", "/v1/models")],
            true,
        ))),
        said(Part::RequestTrailers(HttpTrailers::default())),
        reply(
            &[(":status", "200"), ("content-type", "text/event-stream")],
            false,
        ),
        reply(
            &[
                (":status", "200"),
                ("content-type", "application/json"),
                ("content-length", "18"),
            ],
            false,
        ),
        reply(&[(":status", "503")], true),
        reply_body(b"data: {\"model\":\"served\"}\n\n", false),
        reply_body(br#"{"model":"served"}"#, true),
        reply_body(&[b'x'; 70_000], false),
        said(Part::ResponseTrailers(HttpTrailers::default())),
        ProcessingRequest {
            observability_mode: true,
            ..prompt()
        },
        ProcessingRequest::default(),
    ]
}

fn event() -> impl Strategy<Value = SessionEvent> {
    prop_oneof![
        12 => (0..messages().len()).prop_map(SessionEvent::Says),
        4 => (0..messages().len(), 1_usize..20_000).prop_map(|(what, frame)| SessionEvent::SaysInFrames(what, frame)),
        1 => prop::collection::vec(any::<u8>(), 0..40).prop_map(SessionEvent::Bytes),
        6 => (1_usize..9).prop_map(SessionEvent::Takes),
        1 => (0_u64..60).prop_map(SessionEvent::Waits),
        1 => (0_usize..400_000).prop_map(SessionEvent::Short),
        1 => Just(SessionEvent::Leaves),
    ]
}

proptest! {
    /// Several streams with any events in any order: no panic, the accounts are always right, and
    /// nothing is held at the end.
    #[test]
    fn interleaved_streams_leave_nothing_behind(events in prop::collection::vec((0_usize..4, event()), 0..60)) {
        let server = server(&[SERVER]);
        let memory = Arc::clone(server.streams().memory());
        let mut others = memory.account();
        others.set_client(1);
        let messages = messages();
        let mut ahead = 0;
        let mut sessions: Vec<Option<Arc<StreamSession>>> = (0..4).map(|_| Some(session(&server))).collect();
        let mut short = 0;
        for (index, event) in events {
            let session = sessions[index].get_or_insert_with(|| self::session(&server));
            match event {
                SessionEvent::Says(what) => session.receive(&framed(&messages[what])),
                SessionEvent::SaysInFrames(what, frame) => {
                    for frame in framed(&messages[what]).chunks(frame) {
                        session.receive(frame);
                        let _ = play(session);
                    }
                }
                SessionEvent::Bytes(bytes) => session.receive(&bytes),
                SessionEvent::Takes(times) => {
                    for _ in 0..times {
                        if matches!(session.next(), SessionAction::Listen | SessionAction::End(_)) {
                            break;
                        }
                    }
                }
                SessionEvent::Waits(seconds) => {
                    ahead += seconds * 1000;
                    session.expire(server.now().plus_ms(ahead));
                }
                SessionEvent::Short(left) => {
                    let ours = memory.used() - short;
                    short = HELD_BYTES_MAX.saturating_sub(ours + left);
                    others.record(short);
                }
                SessionEvent::Leaves => sessions[index] = None,
            }
            let held: usize = sessions.iter().flatten().map(|session| session.memory()).sum();
            prop_assert_eq!(memory.used(), held + short);
        }
        sessions.clear();
        drop(others);
        prop_assert_eq!(under_way(&server), 0);
        prop_assert_eq!((memory.used(), server.streams().open()), (0, 0));
    }
}
