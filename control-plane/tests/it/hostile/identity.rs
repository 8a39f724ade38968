//! Peers that claim to be another peer, or to be many peers.

use std::time::Duration;

use proto::state::{self, proxy_message};
use tonic::Code;

use super::kit::{
    ELSEWHERE, HOME, NODE, channel, endpoints, filter, peers, row_of_failures, share,
};
use crate::daemon::harness::{DaemonHarness, FilterStream, PATIENCE, instance, names};

#[tokio::test]
async fn a_peer_that_takes_anothers_ids_does_not_end_its_stream_or_speak_for_it() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut good = filter(&channel(rig.address, HOME).await, 1).await;
    good.pool_update().await;
    let mut bad = filter(&channel(rig.address, ELSEWHERE).await, 1).await;
    bad.pool_update().await;
    rig.reset(vec![instance("a", 1), instance("b", 2)]).await;
    while names(&good.pool_update().await) != ["a", "b"] {}
    let lie = pool_state::Ejection {
        at: exchange::Timestamp(1),
        failures: 1,
        until: exchange::Timestamp(2),
        endpoint: endpoints(&rig)[0],
        outside: false,
        by_answers: false,
        is_own: false,
    };
    bad.say(share(row_of_failures(1, &[lie]), Vec::new())).await;
    assert_eq!(
        peers(&mut good).await.proxies,
        2,
        "two processes, whatever they claim"
    );
}

#[tokio::test]
async fn four_thousand_hellos_of_one_host_leave_room_for_others() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut crowd = Vec::new();
    let mut taken = 0;
    let mut refused = 0;
    let flood = async {
        // One connection carries 64 streams.
        for connection in 0..70_u64 {
            let channel = channel(rig.address, ELSEWHERE).await;
            for stream in 0..60_u64 {
                match FilterStream::over(channel.clone()).await {
                    Ok(filter) => {
                        filter
                            .hello(proto::SCHEMA, NODE, connection * 1_000 + stream, &[])
                            .await;
                        crowd.push(filter);
                        taken += 1;
                    }
                    Err(status) => {
                        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                        refused += 1;
                    }
                }
            }
        }
    };
    tokio::time::timeout(4 * PATIENCE, flood)
        .await
        .expect("the daemon stopped answering");
    assert!(
        refused > 3_000 && taken >= 256,
        "{taken} taken, {refused} refused"
    );
    let mut good = filter(&channel(rig.address, HOME).await, 1).await;
    assert_eq!(names(&good.pool_update().await), ["a"]);
}

#[tokio::test]
async fn silent_streams_take_no_more_than_their_share_and_are_closed() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut silent = Vec::new();
    for _ in 0..5 {
        let channel = channel(rig.address, ELSEWHERE).await;
        for _ in 0..60 {
            silent.extend(FilterStream::over(channel.clone()).await.ok());
        }
    }
    assert_eq!(
        silent.len(),
        256,
        "a stream counts before its first message"
    );
    let mut good = filter(&channel(rig.address, HOME).await, 1).await;
    good.pool_update().await;
    let ended = tokio::time::timeout(PATIENCE, silent[0].next())
        .await
        .unwrap();
    assert_eq!(ended.unwrap_err().code(), Code::DeadlineExceeded);
    let again = async {
        while FilterStream::over(channel(rig.address, ELSEWHERE).await)
            .await
            .is_err()
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, again)
        .await
        .expect("their streams are not free");
}

#[tokio::test]
async fn a_call_belongs_to_the_host_that_began_the_connection() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = |from| {
        reqwest::Client::builder()
            .local_address(Some(from))
            .build()
            .unwrap()
    };
    let call = |client: &reqwest::Client, kind: &str, body: Vec<u8>| {
        let request = client
            .post(format!("http://{}/switchpoint/state/{kind}", rig.address))
            .header("x-switchpoint-session", "5")
            .body(body);
        async { request.send().await.unwrap().status().as_u16() }
    };
    let hello = state::Hello {
        schema: proto::SCHEMA,
        node_id: NODE.to_owned(),
        process_id: 1,
        pools: vec!["default".to_owned()],
        ..state::Hello::default()
    };
    let mut body = Vec::new();
    let message = state::ProxyMessage {
        message: Some(proxy_message::Message::Hello(hello)),
    };
    proto::frames::push(&mut body, &prost::Message::encode_to_vec(&message));
    let good = client(HOME);
    let bad = client(ELSEWHERE);
    assert_eq!(call(&good, "tell", body.clone()).await, 200);
    assert_eq!(call(&bad, "hear", Vec::new()).await, 410, "of another host");
    assert_eq!(call(&bad, "tell", Vec::new()).await, 410);
    assert_eq!(call(&good, "hear", Vec::new()).await, 200);
}
