//! The state stream as HTTP calls, which do what a stream does.

use std::net::SocketAddr;
use std::time::Duration;

use prost::Message as _;
use proto::state::daemon_message::Message;
use proto::state::{self, proxy_message};
use proto::{frames, state::DaemonMessage};
use scheduler::{EndpointRef, Generation, Slot};

use super::harness::{DaemonHarness, FilterStream, PATIENCE, instance, names, until};

/// The filter's side of a connection.
pub(crate) struct CallClient {
    client: reqwest::Client,
    /// The scheme and the authority of the daemon's listener.
    base: String,
    session: u64,
}

/// The status and body of an answer.
pub(crate) type CallReply = (u16, Vec<u8>);

impl CallClient {
    fn new(address: SocketAddr, session: u64) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self {
            client: reqwest::Client::new(),
            base: format!("http://{address}"),
            session,
        }
    }

    /// Creates a client that has this certificate and trusts `authority`, both in PEM. The
    /// certificate comes with its key.
    pub(crate) fn with_certificate(
        address: SocketAddr,
        authority: &str,
        certificate: &(String, String),
        session: u64,
    ) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let authority = reqwest::Certificate::from_pem(authority.as_bytes()).unwrap();
        let (certificate, key) = certificate;
        let identity = reqwest::Identity::from_pem(format!("{certificate}{key}").as_bytes());
        Self {
            client: reqwest::Client::builder()
                .tls_certs_only([authority])
                .identity(identity.unwrap())
                .build()
                .unwrap(),
            base: format!("https://localhost:{}", address.port()),
            session,
        }
    }

    async fn post(&self, kind: &str, session: Option<&str>, body: Vec<u8>) -> CallReply {
        let mut request = self
            .client
            .post(format!("{}/switchpoint/state/{kind}", self.base))
            .body(body);
        if let Some(session) = session {
            request = request.header("x-switchpoint-session", session);
        }
        let answer = tokio::time::timeout(PATIENCE, request.send())
            .await
            .expect("the daemon stopped answering")
            .unwrap();
        (
            answer.status().as_u16(),
            answer.bytes().await.unwrap().to_vec(),
        )
    }

    pub(crate) async fn tell(&self, messages: Vec<proxy_message::Message>) -> CallReply {
        let mut body = Vec::new();
        messages.into_iter().for_each(|m| {
            frames::push(
                &mut body,
                &state::ProxyMessage { message: Some(m) }.encode_to_vec(),
            );
        });
        self.post("tell", Some(&format!("{:x}", self.session)), body)
            .await
    }

    pub(crate) async fn hello(address: SocketAddr, session: u64, process_id: u64) -> Self {
        let caller = Self::new(address, session);
        let (status, body) = caller.tell(vec![hello(proto::SCHEMA, process_id)]).await;
        assert_eq!((status, body.as_slice()), (200, &b""[..]));
        caller
    }

    pub(crate) async fn hear(&self) -> Result<Vec<Message>, (u16, String)> {
        let (status, body) = self
            .post("hear", Some(&format!("{:x}", self.session)), Vec::new())
            .await;
        if status != 200 {
            return Err((status, String::from_utf8(body).unwrap()));
        }
        let mut messages = Vec::new();
        let mut rest = body.as_slice();
        while !rest.is_empty() {
            let (message, after) = frames::take(rest).unwrap();
            messages.extend(DaemonMessage::decode(message).unwrap().message);
            rest = after;
        }
        Ok(messages)
    }

    /// Waits for the next message for which `pick` returns a value, and returns this value.
    async fn next<T>(&self, pick: impl Fn(Message) -> Option<T>) -> T {
        loop {
            if let Some(found) = self.hear().await.unwrap().into_iter().find_map(&pick) {
                return found;
            }
        }
    }

    pub(crate) async fn pool_update(&self) -> state::PoolUpdate {
        self.next(|message| {
            if let Message::PoolUpdate(pool_update) = message {
                Some(pool_update)
            } else {
                None
            }
        })
        .await
    }

    async fn end(&self) -> (u16, String) {
        loop {
            if let Err(end) = self.hear().await {
                return end;
            }
        }
    }
}

fn hello(schema: u32, process_id: u64) -> proxy_message::Message {
    let pools = vec!["default".to_owned()];
    proxy_message::Message::Hello(state::Hello {
        schema,
        node_id: "n".to_owned(),
        process_id,
        pools,
        ..state::Hello::default()
    })
}

#[tokio::test]
async fn a_hello_gets_the_same_messages_as_on_a_stream() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let caller = CallClient::hello(rig.address, 1, 1).await;
    let welcome = caller
        .next(|message| {
            if let Message::Welcome(welcome) = message {
                Some(welcome)
            } else {
                None
            }
        })
        .await;
    assert_eq!(
        (welcome.schema, welcome.unknown_pools.len()),
        (proto::SCHEMA, 0)
    );
    let pool_update = caller.pool_update().await;
    assert_eq!(names(&pool_update), ["a"]);
    let ack = state::Ack {
        pool: "default".to_owned(),
        version: pool_update.version,
        ..state::Ack::default()
    };
    assert_eq!(
        caller.tell(vec![proxy_message::Message::Ack(ack)]).await.0,
        200
    );
    until("the acknowledgement counts", || async {
        rig.shared.proxies.acknowledged("default", 1)
    })
    .await;
    let metrics = caller
        .next(|message| {
            if let Message::Metrics(metrics) = message {
                Some(metrics)
            } else {
                None
            }
        })
        .await;
    assert_eq!(metrics.pool_update, pool_update.version);
    rig.reset(vec![instance("b", 2)]).await;
    assert_eq!(
        names(&caller.pool_update().await),
        ["b"],
        "a waiting call returns as soon as something changes"
    );
}

#[tokio::test]
async fn only_the_newest_call_of_a_session_waits_for_messages() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let caller = CallClient::hello(rig.address, 1, 1).await;
    caller.pool_update().await;
    let calls = futures::future::join_all((0..50).map(|_| caller.hear())).await;
    let ended = calls
        .iter()
        .filter(|heard| heard.as_ref().unwrap().is_empty());
    let ended = ended.count();
    assert!(ended >= 40, "{ended} of 50 calls made way for a newer one");
}

#[tokio::test]
async fn proxies_share_by_whatever_way_they_are_connected() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let caller = CallClient::hello(rig.address, 1, 1).await;
    let id = caller.pool_update().await.endpoints[0].clone();
    let (mut filter, _) = FilterStream::connect(rig.address, "other", 2, &["default"]).await;
    filter.pool_update().await;
    let share = |block| {
        let mut placements = Vec::new();
        let slot = Slot(u16::try_from(id.slot).unwrap());
        proto::placements::push(
            &mut placements,
            EndpointRef {
                slot,
                generation: Generation(id.generation),
            },
            &[block],
        );
        proxy_message::Message::LoadReport(state::LoadReport {
            pool: "default".to_owned(),
            placements,
            ..Default::default()
        })
    };
    let blocks = |peers: &state::PeerLoad| {
        proto::placements::each(&peers.placements)
            .flat_map(|(_, blocks)| blocks)
            .collect::<Vec<_>>()
    };
    assert_eq!(caller.tell(vec![share(11)]).await.0, 200);
    loop {
        if let Message::PeerLoad(peers) = filter.next().await.unwrap()
            && !peers.placements.is_empty()
        {
            assert_eq!((blocks(&peers), peers.proxies), (vec![11], 2));
            break;
        }
    }
    filter.say(share(22)).await;
    let with_placements = |message| {
        if let Message::PeerLoad(peers) = message {
            Some(peers).filter(|p| !p.placements.is_empty())
        } else {
            None
        }
    };
    assert_eq!(blocks(&caller.next(with_placements).await), [22]);
}

#[tokio::test]
async fn what_breaks_the_protocol_is_refused_with_the_reason() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let caller = CallClient::new(rig.address, 5);
    let cases = [
        (
            caller.post("tell", None, Vec::new()).await,
            400,
            "x-switchpoint-session",
        ),
        (
            caller.post("tell", Some("no number"), Vec::new()).await,
            400,
            "hexadecimal",
        ),
        (
            caller
                .post("tell", Some("5"), b"\xff\xff\xff\xff".to_vec())
                .await,
            400,
            "not a sequence of messages",
        ),
        (
            caller
                .post("tell", Some("5"), b"\x01\0\0\0\xff".to_vec())
                .await,
            400,
            "not a sequence of messages",
        ),
        (
            caller.post("tell", Some("5"), Vec::new()).await,
            410,
            "Hello",
        ),
        (
            caller
                .tell(vec![proxy_message::Message::Report(
                    state::Report::default(),
                )])
                .await,
            410,
            "Hello",
        ),
        (
            caller.post("hear", Some("5"), Vec::new()).await,
            410,
            "Hello",
        ),
        (
            caller
                .post("tell", Some("5"), vec![0; proto::CALL_BYTES_MAX + 1])
                .await,
            413,
            "",
        ),
    ];
    for ((status, body), wanted, why) in cases {
        let body = String::from_utf8(body).unwrap();
        assert!(
            status == wanted && body.contains(why),
            "{status} {body:?}, should be {wanted} {why:?}"
        );
    }
    assert_eq!(
        caller
            .client
            .get(format!("http://{}/switchpoint/state/hear", rig.address))
            .send()
            .await
            .unwrap()
            .status(),
        405
    );
    assert_eq!(rig.shared.proxies.streams.borrow().len(), 0);

    let other_schema = CallClient::new(rig.address, 6);
    assert_eq!(
        other_schema
            .tell(vec![hello(proto::SCHEMA_MIN - 1, 1)])
            .await
            .0,
        200,
        "the call is accepted before its messages are read"
    );
    let (status, why) = other_schema.end().await;
    assert!(
        status == 400 && why.contains(&format!("schema {}", proto::SCHEMA_MIN - 1)),
        "{status} {why}"
    );
    let twice = CallClient::hello(rig.address, 7, 1).await;
    twice.pool_update().await;
    twice.tell(vec![hello(proto::SCHEMA, 1)]).await;
    let (status, why) = twice.end().await;
    assert!(
        status == 410 || why.contains("second Hello"),
        "{status} {why}"
    );
}

#[tokio::test]
async fn a_newer_connection_of_a_process_takes_over() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let old = CallClient::hello(rig.address, 1, 1).await;
    old.pool_update().await;
    let (mut new, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    assert_eq!(old.end().await.0, 410);
    new.pool_update().await;
    assert_eq!(rig.shared.proxies.streams.borrow().len(), 1);
}

#[tokio::test]
async fn a_proxy_that_calls_no_more_is_gone() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let caller = CallClient::hello(rig.address, 1, 1).await;
    // The test takes longer than the silence that would end the connection. The calls keep the
    // connection open.
    let end = tokio::time::Instant::now() + Duration::from_secs(6);
    while tokio::time::Instant::now() < end {
        caller.hear().await.unwrap();
    }
    assert_eq!(rig.shared.proxies.streams.borrow().len(), 1);
    until("the row of a silent proxy is gone", || async {
        rig.shared.proxies.streams.borrow().is_empty()
    })
    .await;
    assert_eq!(caller.end().await.0, 410);
}
