//! Bodies that are never finished, together more than the daemon may hold.

use std::time::{Duration, Instant};

use ::ext_proc::HELD_BYTES_MAX;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use tonic::Code;

use super::kit::{
    DaemonProgram, PICK_MAX, RSS_BYTES_MAX, RawStream, SteadyClient, body, chat, framed, immediate,
    pick,
};
use crate::daemon::harness::{EnvoyStream, PATIENCE, get, until};

/// The number of clients, and the number of bytes that each client sends of its body.
const HOGS: usize = 64;
const BODY_BYTES: usize = 20 << 20;
const PIECE_BYTES: usize = 64 << 10;

/// Sends all of a chat request but its last byte.
async fn hog(peer: RawStream, mode: BodySendMode) -> RawStream {
    peer.say(&chat(mode)).await;
    if mode == BodySendMode::Buffered {
        let whole = framed(&body(vec![b'x'; BODY_BYTES], true));
        let withheld = whole.slice(..whole.len() - 1);
        for at in (0..withheld.len()).step_by(PIECE_BYTES) {
            if !peer
                .send(withheld.slice(at..(at + PIECE_BYTES).min(withheld.len())))
                .await
            {
                break;
            }
        }
    } else {
        let piece = framed(&body(vec![b'x'; PIECE_BYTES], false));
        for _ in 0..BODY_BYTES / PIECE_BYTES {
            if !peer.send(piece.clone()).await {
                break;
            }
        }
    }
    peer
}

async fn unfinished_bodies(mode: BodySendMode) {
    let program = DaemonProgram::start().await;
    let idle = program.rss();
    let neighbour = SteadyClient::for_program(&program).await;
    let mut envoy = EnvoyStream::connect(program.state, "hogged").await;
    assert_eq!(envoy.ports().await, [1]);
    let mut hogs = Vec::new();
    for _ in 0..HOGS {
        let channel = program.channel().await;
        hogs.push(tokio::spawn(hog(RawStream::open(&channel), mode)));
    }
    let mut peers = Vec::new();
    for hog in hogs {
        peers.push(
            tokio::time::timeout(4 * PATIENCE, hog)
                .await
                .expect("a peer got no answer")
                .unwrap(),
        );
    }
    until("all that is sent has come", || async {
        let before = program.rss();
        tokio::time::sleep(Duration::from_millis(200)).await;
        program.rss() == before
    })
    .await;
    let rss = program.rss();
    let peak = program.peak_rss();
    let slowest = neighbour.was_served().await;
    eprintln!(
        "{mode:?}: idle {}, now {}, peak {} MiB, slowest pick of the neighbour {slowest:?}",
        idle >> 20,
        rss >> 20,
        peak >> 20
    );
    assert!(peak < RSS_BYTES_MAX, "{} MiB", peak >> 20);
    let held = program.metric("switchpoint_ext_proc_held_bytes").await;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let budget = HELD_BYTES_MAX as f64;
    assert!(held > 0.0 && held <= budget, "{held}");
    // Refused requests are answered immediately, and the answer gives the reason.
    let mut refused = 0;
    let mut waiting = Vec::new();
    for peer in peers {
        if peer.is_answered() {
            let (answers, _) = peer.ended().await;
            let reply = immediate(&answers).expect("a reply for the client");
            let text = String::from_utf8_lossy(&reply.body).into_owned();
            let code = match reply.status.as_ref().unwrap().code {
                408 => "request_too_slow",
                _ => "request_too_large",
            };
            assert!(
                text.contains("unfinished ones")
                    && text.contains("try again")
                    && text.contains(code),
                "{text}"
            );
            let set = &reply.headers.as_ref().unwrap().set_headers;
            assert!(
                set.iter().any(|option| option
                    .header
                    .as_ref()
                    .is_some_and(|header| header.key == "retry-after")),
                "{set:?}"
            );
            refused += 1;
        } else {
            waiting.push(peer);
        }
    }
    assert!(
        refused > 0 && !waiting.is_empty(),
        "{refused} of {HOGS} refused"
    );
    // The rest of the daemon still works.
    let began = Instant::now();
    assert_eq!(
        EnvoyStream::connect(program.state, "another")
            .await
            .ports()
            .await,
        [1]
    );
    assert_eq!(get(program.admin, "/metrics").await.0, 200);
    pick(&program.channel().await).await.unwrap();
    assert!(began.elapsed() < 3 * PICK_MAX);
    waiting.into_iter().for_each(RawStream::leave);
    program.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_bodies_in_pieces_do_not_take_the_daemons_memory() {
    unfinished_bodies(BodySendMode::FullDuplexStreamed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_bodies_in_one_message_do_not_take_the_daemons_memory() {
    unfinished_bodies(BodySendMode::Buffered).await;
}

#[tokio::test]
async fn a_message_longer_than_any_body_is_refused_before_it_comes() {
    let program = DaemonProgram::start().await;
    let peer = RawStream::open(&program.channel().await);
    peer.send(vec![0, 0xff, 0xff, 0xff, 0xff].into()).await;
    let (_, status) = peer.ended().await;
    assert_eq!(status.unwrap().code(), Code::ResourceExhausted);
    program.settled().await;
}
