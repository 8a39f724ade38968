//! Engines that publish KV events: honest, restarted, cleared and hostile. The tests write all
//! bytes of ZMTP themselves, so they can send any.

use std::time::{Duration, SystemTime};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::harness::{Daemon, FilterStream, PATIENCE, daemon, get, get_json, until, write};

const ENDPOINT: &str = "127.0.0.1:1";

/// A socket of an engine.
struct EngineSocket {
    listener: TcpListener,
    role: EngineRole,
}

#[derive(Clone, Copy, PartialEq)]
enum EngineRole {
    Publisher,
    /// Replays lost messages.
    Router,
}

// === impl EngineSocket ===

impl EngineSocket {
    async fn bind(role: EngineRole) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self { listener, role }
    }

    fn port(&self) -> String {
        self.listener.local_addr().unwrap().port().to_string()
    }

    /// Waits for the daemon's next connection.
    async fn accept_silently(&self) -> TcpStream {
        let accepted = timeout(PATIENCE, self.listener.accept()).await;
        accepted.expect("the daemon does not connect").unwrap().0
    }

    /// Waits for the daemon's next connection, and makes the handshake. A connection that the
    /// daemon has given up meanwhile is left out.
    async fn accept(&self) -> TcpStream {
        // Theirs: greeting, READY with a socket type, and a subscriber's subscription.
        let (role, theirs) = match self.role {
            EngineRole::Publisher => ("\x03PUB", 64 + 2 + 22 + "SUB".len() + 3),
            EngineRole::Router => ("\x06ROUTER", 64 + 2 + 22 + "DEALER".len()),
        };
        let mut ours = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
        ours.extend(b"NULL");
        ours.resize(64, 0);
        let ready = [&b"\x05READY\x0bSocket-Type\0\0\0"[..], role.as_bytes()].concat();
        ours.extend([4, u8::try_from(ready.len()).unwrap()]);
        ours.extend(ready);
        let mut theirs = vec![0; theirs];
        loop {
            let mut stream = self.accept_silently().await;
            if stream.write_all(&ours).await.is_ok() && stream.read_exact(&mut theirs).await.is_ok()
            {
                return stream;
            }
        }
    }
}

/// Returns a message of these frames.
fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (position, frame) in frames.iter().enumerate() {
        let is_continued = u8::from(position + 1 < frames.len());
        bytes.push(0b10 | is_continued);
        bytes.extend((frame.len() as u64).to_be_bytes());
        bytes.extend(*frame);
    }
    bytes
}

pub(super) fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let mut bytes = vec![0x93, 0xcb];
    bytes.extend(now.unwrap().as_secs_f64().to_be_bytes());
    bytes.push(0x90 | u8::try_from(events.len()).unwrap());
    bytes.extend(events.concat());
    bytes.push(0); // the rank
    bytes
}

/// Returns the event that at most 15 blocks of 16 tokens are stored, as an array.
pub(super) fn stored(blocks: u8) -> Vec<u8> {
    let mut bytes = b"\x95\xabBlockStored".to_vec();
    bytes.push(0x90 | blocks);
    bytes.extend(0..blocks); // the hashes
    bytes.extend([0xc0, 0x90, 16]); // no parent, no token ids
    bytes
}

fn cleared() -> Vec<u8> {
    b"\x91\xb0AllBlocksCleared".to_vec()
}

async fn publish(engine: &mut TcpStream, sequence: u64, events: &[Vec<u8>]) {
    let bytes = message(&[b"kv@e@m", &sequence.to_be_bytes(), &batch(events)]);
    engine.write_all(&bytes).await.unwrap();
}

/// Waits until the daemon has closed the connection.
async fn closed(mut engine: TcpStream) {
    let ended = async {
        let mut rest = [0; 1024];
        while engine.read(&mut rest).await.is_ok_and(|read| read > 0) {}
    };
    timeout(PATIENCE, ended)
        .await
        .expect("the daemon stays connected");
}

/// Starts a daemon with one endpoint, whose engine has these sockets.
async fn subscribed(publisher: &EngineSocket, router: Option<&EngineSocket>) -> Daemon {
    let port = publisher.port();
    let replay = router.map_or_else(|| "0".to_owned(), EngineSocket::port);
    let args = [
        "--endpoint",
        ENDPOINT,
        "--kv-events-port",
        &port,
        "--kv-events-replay-port",
        &replay,
    ];
    daemon(&args).await
}

/// Returns an endpoint's row of `/debug/endpoints`.
pub(super) async fn endpoint_row(daemon: &Daemon, name: &str) -> Value {
    let page = get_json(daemon.admin_address, "/debug/endpoints").await;
    let rows = page["endpoints"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == name);
    row.unwrap_or_else(|| panic!("no {name} in {page}")).clone()
}

/// Waits until the endpoint's KV events have these values, such as `gaps 1`.
pub(super) async fn shows(daemon: &Daemon, name: &str, values: &str) {
    until(values, || async {
        let row = endpoint_row(daemon, name).await;
        let events = &row["kv_events"];
        values.split(", ").all(|value| {
            let (key, value) = value.split_once(' ').unwrap();
            let shown = match key {
                "gpu" => &events["blocks"]["gpu"],
                key => &events[key],
            };
            shown.to_string().trim_matches('"') == value
        })
    })
    .await;
}

/// Returns the value of a metric that begins so.
async fn metric(daemon: &Daemon, begin: &str) -> String {
    let page = get(daemon.admin_address, "/metrics").await.1;
    let line = page.lines().find(|line| line.starts_with(begin));
    let line = line.unwrap_or_else(|| panic!("no {begin} in {page}"));
    line.rsplit(' ').next().unwrap().to_owned()
}

async fn generation(daemon: &Daemon) -> Value {
    endpoint_row(daemon, ENDPOINT).await["generation"].clone()
}

#[tokio::test]
async fn a_gap_is_filled_by_a_replay() {
    let publisher = EngineSocket::bind(EngineRole::Publisher).await;
    let router = EngineSocket::bind(EngineRole::Router).await;
    let daemon = subscribed(&publisher, Some(&router)).await;
    let mut engine = publisher.accept().await;
    publish(&mut engine, 0, &[stored(3)]).await;
    publish(&mut engine, 3, &[stored(1)]).await;

    let mut replay = router.accept().await;
    let mut request = [0; 12];
    replay.read_exact(&mut request).await.unwrap();
    assert_eq!(request, [1, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1], "from 1 on");
    for sequence in 1..=3_u64 {
        let again = message(&[b"", &sequence.to_be_bytes(), &batch(&[stored(1)])]);
        replay.write_all(&again).await.unwrap();
    }
    let end = message(&[b"", &u64::MAX.to_be_bytes(), b""]);
    let _ = replay.write_all(&end).await; // the daemon may have closed the connection
    let expected =
        "messages 2, replayed 2, gaps 1, lost 0, gpu 6, knowledge complete, block_tokens 16";
    shows(&daemon, ENDPOINT, expected).await;
    let gaps = metric(&daemon, "switchpoint_kv_events_gaps_total{").await;
    assert_eq!(gaps, "1");
    let connected = metric(&daemon, "switchpoint_kv_events_connected{").await;
    assert!(connected.starts_with('1'), "{connected}");
    daemon.stop().await;
}

#[tokio::test]
async fn a_gap_that_stays_is_counted_and_changes_nothing_else() {
    let publisher = EngineSocket::bind(EngineRole::Publisher).await;
    let daemon = subscribed(&publisher, None).await;
    let before = generation(&daemon).await;
    let mut engine = publisher.accept().await;
    publish(&mut engine, 0, &[stored(3)]).await;
    publish(&mut engine, 5, &[stored(1)]).await;
    let expected = "messages 2, gaps 1, lost 4, gpu 4, knowledge partial";
    shows(&daemon, ENDPOINT, expected).await;
    assert_eq!(generation(&daemon).await, before);
    daemon.stop().await;
}

#[tokio::test]
async fn proxies_forget_the_cache_of_an_engine_that_starts_again() {
    let publisher = EngineSocket::bind(EngineRole::Publisher).await;
    let daemon = subscribed(&publisher, None).await;
    let (mut filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    let before = filter.pool_update().await.endpoints[0].generation;
    let mut engine = publisher.accept().await;
    publish(&mut engine, 0, &[stored(3)]).await;
    publish(&mut engine, 1, &[stored(3)]).await;
    shows(&daemon, ENDPOINT, "messages 2, gpu 6").await;
    drop(engine);

    let mut engine = publisher.accept().await;
    publish(&mut engine, 0, &[stored(2)]).await;
    while filter.pool_update().await.endpoints[0].generation == before {}
    shows(&daemon, ENDPOINT, "restarts 1, gpu 2, knowledge complete").await;

    let after = generation(&daemon).await;
    publish(&mut engine, 1, &[stored(1)]).await;
    shows(&daemon, ENDPOINT, "restarts 1, gpu 3, state connected").await;
    assert_eq!(generation(&daemon).await, after);
    daemon.stop().await;
}

#[tokio::test]
async fn proxies_forget_a_cache_that_its_engine_cleared() {
    let publisher = EngineSocket::bind(EngineRole::Publisher).await;
    let daemon = subscribed(&publisher, None).await;
    let (mut filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    let before = filter.pool_update().await.endpoints[0].generation;
    let mut engine = publisher.accept().await;
    publish(&mut engine, 7, &[stored(3)]).await;
    shows(&daemon, ENDPOINT, "gpu 3, knowledge partial").await;

    publish(&mut engine, 8, &[cleared(), stored(1)]).await;
    while filter.pool_update().await.endpoints[0].generation == before {}
    publish(&mut engine, 9, &[stored(1)]).await;
    let expected = "clears 1, restarts 0, messages 3, gpu 2, knowledge complete";
    shows(&daemon, ENDPOINT, expected).await;
    let clears = r#"switchpoint_kv_events_emptied_total{pool="default",endpoint_name="127.0.0.1:1",cause="clear"}"#;
    assert_eq!(metric(&daemon, clears).await, "1");
    daemon.stop().await;
}

#[tokio::test]
async fn a_hostile_publisher_costs_only_its_own_engine() {
    let hostile = EngineSocket::bind(EngineRole::Publisher).await;
    let honest = EngineSocket::bind(EngineRole::Publisher).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("endpoints.yaml");
    let row = |name: &str, port: u16, socket: &EngineSocket| {
        let labels = format!("{{switchpoint/kv-events-port: \"{}\"}}", socket.port());
        format!("- {{name: {name}, address: 127.0.0.1, port: {port}, labels: {labels}}}\n")
    };
    let rows = row("a", 1, &hostile) + &row("b", 2, &honest);
    write(&file, &format!("endpoints:\n{rows}"));
    let daemon = daemon(&["--endpoints-file", file.to_str().unwrap()]).await;
    let mut good = honest.accept().await;

    let no_zeromq = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 100000\r\n\r\n".repeat(4);
    let mut engine = hostile.accept_silently().await;
    engine.write_all(&no_zeromq).await.unwrap();
    closed(engine).await;
    let mut endless_frame = vec![0b10, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    endless_frame.extend([0; 64]);
    let frames_without_end = [1, 0].repeat(100);
    let long_command = vec![0b110, 0, 0, 0, 0xff, 0, 0, 0, 0];
    for bytes in [endless_frame, frames_without_end, long_command] {
        let mut engine = hostile.accept().await;
        engine.write_all(&bytes).await.unwrap();
        closed(engine).await;
    }

    let mut engine = hostile.accept().await;
    for bytes in [
        message(&[b"t", &0_u64.to_be_bytes(), b"\xc1"]),
        message(&[b"t", b"1234567", &batch(&[])]),
        message(&[b"t"]),
        message(&[b"", b"", b"", b"", b""]),
    ] {
        engine.write_all(&bytes).await.unwrap();
    }
    publish(&mut engine, u64::MAX, &[stored(1)]).await;
    publish(&mut engine, u64::MAX, &[stored(1)]).await;
    shows(&daemon, "a", "invalid 4, restarts 1").await;

    publish(&mut good, 0, &[stored(2)]).await;
    shows(&daemon, "b", "messages 1, gpu 2, invalid 0, restarts 0").await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_publisher_that_is_away_is_tried_again() {
    let publisher = EngineSocket::bind(EngineRole::Publisher).await;
    let daemon = subscribed(&publisher, None).await;
    for sequence in 0..4 {
        let mut engine = publisher.accept().await;
        publish(&mut engine, sequence, &[stored(1)]).await;
        let expected = format!("messages {}, gaps 0", sequence + 1);
        shows(&daemon, ENDPOINT, &expected).await;
    }
    let address = publisher.listener.local_addr().unwrap();
    drop(publisher);
    shows(&daemon, ENDPOINT, "state lost").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let listener = TcpListener::bind(address).await.unwrap();
    let publisher = EngineSocket {
        listener,
        role: EngineRole::Publisher,
    };
    let mut engine = publisher.accept().await;
    publish(&mut engine, 4, &[stored(1)]).await;
    shows(&daemon, ENDPOINT, "messages 5, gaps 0, state connected").await;
    daemon.stop().await;
}
