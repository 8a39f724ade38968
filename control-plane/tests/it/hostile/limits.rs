//! Limits on streams, messages and answers that one host leaves open, unsent or unread.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use control_plane::state::peer::{Origin, StreamQuota, UPLOADS_PER_ORIGIN_MAX};
use http_body_util::BodyExt;
use proto::state::{self, proxy_message};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::transport::Endpoint;

use super::kit::{ELSEWHERE, HOME, NODE, channel, filter, share};
use crate::daemon::calls::CallClient;
use crate::daemon::harness::{DaemonHarness, EnvoyStream, PATIENCE, daemon, instance, until};

/// Uses up the rate of the peers at `address` for a minute. The daemon reads none of their messages
/// in that time.
fn use_up_rate(rig: &DaemonHarness, address: IpAddr) {
    let origin = Origin {
        certificate: None,
        address: Some(address),
    };
    let origins = &rig.shared.proxies.origins;
    let permit = origins
        .acquire(StreamQuota::EdsStream, &origin, Instant::now())
        .unwrap();
    permit.message(usize::MAX, Instant::now());
}

#[tokio::test]
async fn messages_that_the_daemon_has_not_taken_count_as_calls_of_their_host() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let message = || vec![share(Vec::new(), Vec::new())];
    let read = CallClient::hello(rig.address, 1, 1).await;
    for _ in 0..2 * UPLOADS_PER_ORIGIN_MAX {
        assert_eq!(read.tell(message()).await.0, 200, "messages were taken");
    }
    use_up_rate(&rig, HOME);
    let one = CallClient::hello(rig.address, 2, 2).await;
    let two = CallClient::hello(rig.address, 3, 3).await;
    let mut kept = 2; // The daemon keeps both Hellos.
    let mut refused = 0;
    for caller in [&one, &two]
        .into_iter()
        .cycle()
        .take(UPLOADS_PER_ORIGIN_MAX)
    {
        match caller.tell(message()).await.0 {
            200 => kept += 1,
            503 => refused += 1,
            status => panic!("{status}"),
        }
    }
    assert!(
        kept <= UPLOADS_PER_ORIGIN_MAX && refused > 0,
        "{kept} bodies wait, {refused} were refused"
    );
    filter(&channel(rig.address, ELSEWHERE).await, 4).await;
}

#[tokio::test]
async fn a_connection_makes_no_answer_while_its_last_one_is_not_sent() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let caller = CallClient::hello(rig.address, 5, 1).await;
    let ack = state::Ack {
        pool: "default".to_owned(),
        version: caller.pool_update().await.version,
        ..state::Ack::default()
    };
    caller.tell(vec![proxy_message::Message::Ack(ack)]).await;
    // This client takes one byte of an answer, and no more until it has read this byte.
    let mut narrow = Endpoint::from_shared(format!("http://{}", rig.address))
        .unwrap()
        .initial_stream_window_size(1)
        .connect()
        .await
        .unwrap();
    let unread = loop {
        let request = http::Request::post("/switchpoint/state/hear")
            .header("x-switchpoint-session", "5")
            .body(Body::empty())
            .unwrap();
        poll_fn(|cx| Service::<http::Request<Body>>::poll_ready(&mut narrow, cx))
            .await
            .unwrap();
        let mut answer = narrow.call(request).await.unwrap().into_body();
        if answer.frame().await.is_some() {
            break answer;
        }
    };
    for _ in 0..2 {
        let heard = caller.hear().await.unwrap();
        assert!(heard.is_empty(), "{heard:?}");
    }
    drop(unread);
    until("the connection makes answers again", || async {
        !caller.hear().await.unwrap().is_empty()
    })
    .await;
}

#[tokio::test]
async fn an_eds_stream_of_a_host_beyond_its_rate_is_not_read() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    use_up_rate(&rig, ELSEWHERE);
    let mut hostile = EnvoyStream::over(channel(rig.address, ELSEWHERE).await, NODE).await;
    let mut envoy = EnvoyStream::over(channel(rig.address, HOME).await, NODE).await;
    assert_eq!(envoy.ports().await, [1]);
    assert!(hostile.within(Duration::from_millis(200)).await.is_none());
    assert_eq!(rig.shared.proxies.eds.borrow().open.len(), 1);
}

#[tokio::test]
async fn a_message_of_the_maximum_size_passes_the_window_of_a_stream() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let bad = filter(&channel(rig.address, ELSEWHERE).await, 1).await;
    let ack = state::Ack {
        pool: "default".to_owned(),
        refused: "x".repeat(proto::PROXY_MESSAGE_BYTES_MAX - 64),
        ..state::Ack::default()
    };
    bad.say(proxy_message::Message::Ack(ack)).await;
    until("the message is read", || async {
        rig.shared.reports.counters().pool_updates_refused == 1
    })
    .await;
}

/// The limits that a listener announces to a client of HTTP/2.
#[derive(Debug, Default, PartialEq, Eq)]
struct AnnouncedLimits {
    streams: Option<u32>,
    stream_window: Option<u32>,
    connection_window: Option<u32>,
}

/// Reads the announcements of a listener until the window of the connection if `with_window`, else
/// until its settings.
async fn announced(address: SocketAddr, with_window: bool) -> AnnouncedLimits {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    stream.write_all(hello).await.unwrap();
    let mut limits = AnnouncedLimits::default();
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.unwrap();
        let mut body = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
        stream.read_exact(&mut body).await.unwrap();
        match head[3] {
            4 if !body.is_empty() => {
                let settings: BTreeMap<u8, u32> = body
                    .chunks_exact(6)
                    .map(|setting| (setting[1], number(&setting[2..])))
                    .collect();
                limits.streams = settings.get(&3).copied();
                limits.stream_window = settings.get(&4).copied();
                if !with_window {
                    return limits;
                }
            }
            8 => {
                limits.connection_window = Some(65_535 + number(&body));
                return limits;
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn listeners_limit_the_streams_of_a_connection_and_what_it_sends_unread() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let state = tokio::time::timeout(PATIENCE, announced(daemon.state_address, true));
    let expected = AnnouncedLimits {
        streams: Some(64),
        stream_window: Some(64 << 10),
        connection_window: Some(128 << 10),
    };
    assert_eq!(state.await.expect("no window"), expected);
    let health = tokio::time::timeout(PATIENCE, announced(daemon.health_address.unwrap(), false));
    assert_eq!(health.await.expect("no settings").streams, Some(16));
    daemon.stop().await;
}
