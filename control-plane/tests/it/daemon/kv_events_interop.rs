//! KV events from sockets of the crate `zeromq`, which is independent of the daemon's own client.

use axum::body::Bytes;
use zeromq::{Endpoint, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::harness::{PATIENCE, daemon};
use super::kv_events::{batch, endpoint_row, shows, stored};

const ENDPOINT: &str = "127.0.0.1:1";

fn message(frames: &[&[u8]]) -> ZmqMessage {
    let frames: Vec<Bytes> = frames
        .iter()
        .map(|frame| Bytes::copy_from_slice(frame))
        .collect();
    ZmqMessage::try_from(frames).unwrap()
}

async fn bind(socket: &mut impl Socket) -> String {
    match socket.bind("tcp://127.0.0.1:0").await.unwrap() {
        Endpoint::Tcp(_, port) => port.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_publisher_and_a_router_of_zeromq_are_understood() {
    let mut publisher = PubSocket::new();
    let mut router = RouterSocket::new();
    let port = bind(&mut publisher).await;
    let replay = bind(&mut router).await;
    let daemon = daemon(&[
        "--endpoint",
        ENDPOINT,
        "--kv-events-port",
        &port,
        "--kv-events-replay-port",
        &replay,
    ])
    .await;

    // Messages before the subscription are lost.
    let payload = batch(&[stored(1)]);
    let mut sequence = 0_u64;
    let arrived = async || {
        let row = endpoint_row(&daemon, ENDPOINT).await;
        row["kv_events"]["messages"].as_u64().unwrap_or(0)
    };
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while arrived().await == 0 {
        assert!(tokio::time::Instant::now() < deadline, "nothing arrives");
        let frames = message(&[b"topic", &sequence.to_be_bytes(), &payload]);
        publisher.send(frames).await.unwrap();
        sequence += 1;
    }
    let after_gap = sequence + 1;
    let frames = message(&[b"topic", &after_gap.to_be_bytes(), &payload]);
    publisher.send(frames).await.unwrap();

    let request = tokio::time::timeout(PATIENCE, router.recv()).await;
    let request = request.expect("no request of a replay").unwrap();
    assert_eq!(request.len(), 3, "identity, empty frame, number");
    let identity = request.get(0).unwrap();
    assert_eq!(request.get(2).unwrap()[..], sequence.to_be_bytes());
    for (number, payload) in [
        (sequence, payload.as_slice()),
        (after_gap, payload.as_slice()),
        (u64::MAX, &[]),
    ] {
        let frames = message(&[identity, b"", &number.to_be_bytes(), payload]);
        // The daemon closes the connection after the last message that it needs.
        let _ = router.send(frames).await;
    }
    shows(&daemon, ENDPOINT, "gaps 1, replayed 1, lost 0").await;
    daemon.stop().await;
}
