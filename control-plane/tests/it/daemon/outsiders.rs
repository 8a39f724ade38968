//! Access to listeners, and the harm that a peer can do by connecting alone.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::routing::get as route;
use control_plane::serve::health::{EXT_PROC, LEADING, LIVENESS, READINESS};
use control_plane::serve::listen::raise_descriptors;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use super::cluster;
use super::ext_proc::{plain, serving};
use super::harness::{FilterStream, daemon, endpoints, get, get_json, names, until, write};
use super::tls::{TlsAuthority, served, tls};

/// The maximum time until a proper client is served while others hold all the connections they can.
/// The connections of the others time out later, after 10 s.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The maximum wait for the end of a silent connection. It is longer than a silent connection may
/// stay open, also on a busy machine.
const SILENCE_ENDS: Duration = Duration::from_secs(60);

/// The program and the addresses of its listeners, from its log.
pub(super) struct LoggedDaemon {
    pub(super) child: Child,
    listens: HashMap<String, SocketAddr>,
    /// The lines of the log since the start.
    log: Arc<Mutex<String>>,
}

impl LoggedDaemon {
    /// Starts the program with this limit of open files. Returns when the log has the message.
    pub(super) async fn start(descriptors: u32, args: &[&str], message: &str) -> Self {
        Self::start_in(descriptors, args, message, &[]).await
    }

    /// Does the same as [`Self::start`], with these environment variables.
    pub(super) async fn start_in(
        descriptors: u32,
        args: &[&str],
        message: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        let any = "127.0.0.1:0";
        let mut child = Command::new("sh")
            .args([
                "-c",
                &format!("ulimit -n {descriptors}; exec \"$@\""),
                "sh",
                env!("CARGO_BIN_EXE_switchpointd"),
                "serve",
                "--local-endpoints",
            ])
            .args([
                "--listen-state",
                any,
                "--listen-admin",
                any,
                "--listen-health",
                any,
                "--listen-metrics",
                any,
                "--log-format",
                "json",
            ])
            .args(args)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut listens = HashMap::new();
        let mut said = String::new();
        while said != message {
            let line = lines
                .next_line()
                .await
                .unwrap()
                .unwrap_or_else(|| panic!("it ended before {message:?}"));
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            let addresses = line
                .as_object()
                .unwrap()
                .iter()
                .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.parse().ok()?)));
            listens.extend(addresses);
            said = line["message"].as_str().unwrap_or_default().to_owned();
        }
        let log = Arc::new(Mutex::new(String::new()));
        let written = Arc::clone(&log);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                written.lock().unwrap().push_str(&line);
            }
        });
        Self {
            child,
            listens,
            log,
        }
    }

    pub(super) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(super) fn at(&self, listener: &str) -> SocketAddr {
        *self
            .listens
            .get(listener)
            .unwrap_or_else(|| panic!("no {listener} in {:?}", self.listens))
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id().unwrap()))
            .unwrap()
            .count()
    }

    pub(super) async fn health(&self) -> [bool; 4] {
        let channel = plain(self.at("health")).await;
        let mut answers = [false; 4];
        for (answer, service) in answers
            .iter_mut()
            .zip([LIVENESS, LEADING, READINESS, EXT_PROC])
        {
            *answer = serving(&channel, service).await.unwrap();
        }
        answers
    }
}

async fn silent(address: SocketAddr, count: usize) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for _ in 0..count {
        streams.push(TcpStream::connect(address).await.unwrap());
    }
    streams
}

/// Waits until the other side closes the connection.
async fn closed(stream: &mut TcpStream) {
    let mut bytes = Vec::new();
    let end = tokio::time::timeout(SILENCE_ENDS, stream.read_to_end(&mut bytes)).await;
    end.expect("still open").ok();
}

/// Runs the three scenarios at the same time, because each scenario waits until the daemon closes a
/// peer's connection, after 10 s.
#[tokio::test]
async fn silent_slow_and_dead_peers_are_cut_off_and_delay_no_others() {
    tokio::join!(
        handshakes_that_hang_do_not_delay_others(),
        silent_connections_stop_neither_scraping_nor_proper_clients(),
        slow_and_dead_peers_are_cut_off()
    );
}

async fn handshakes_that_hang_do_not_delay_others() {
    raise_descriptors();
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let (cert, key) = ours.put(folder.path());
    let ca = folder.path().join("ca.pem");
    write(&ca, &ours.pem);
    let [cert, key, ca] = [&cert, &key, &ca].map(|p| p.to_str().unwrap());
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--state-tls-cert",
        cert,
        "--state-tls-key",
        key,
        "--state-tls-client-ca",
        ca,
    ])
    .await;
    let mut held = silent(daemon.state_address, 300).await;
    let proper = tokio::time::timeout(
        AT_ONCE,
        served(daemon.state_address, tls(&ours, Some(&ours))),
    )
    .await;
    assert_eq!(proper, Ok(true), "served while 300 handshakes hang");
    for stream in &mut held {
        closed(stream).await;
    }
    daemon.stop().await;
}

async fn silent_connections_stop_neither_scraping_nor_proper_clients() {
    raise_descriptors();
    let scrapes = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&scrapes);
    let metrics = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        async { "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n" }
    };
    let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = engine.local_addr().unwrap().port();
    tokio::spawn(async {
        axum::serve(engine, Router::new().route("/metrics", route(metrics))).await
    });

    let folder = TempDir::new().unwrap();
    let file = folder.path().join("endpoints.yaml");
    write(&file, &endpoints(&[1]));
    let args = [
        "--endpoints-file",
        file.to_str().unwrap(),
        "--listen-ext-proc",
        "127.0.0.1:0",
        "--scrape-interval",
        "100ms",
    ];
    let process = LoggedDaemon::start(1_024, &args, "serving").await;
    let mut held = Vec::new();
    for listener in ["state", "ext_proc", "health", "admin", "metrics"] {
        held.extend(silent(process.at(listener), 220).await);
    }
    assert!(held.len() >= 1_100);
    // A new endpoint, for which the scraper needs a new connection, is scraped several times.
    write(&file, &endpoints(&[port]));
    until("the new endpoint is scraped", || async {
        scrapes.load(Ordering::Relaxed) >= 5
    })
    .await;
    let proper = async {
        assert_eq!(get(process.at("admin"), "/livez").await.0, 200);
        assert!(
            get(process.at("metrics"), "/metrics")
                .await
                .1
                .ends_with("# EOF\n")
        );
        assert_eq!(process.health().await, [true; 4]);
        let (mut filter, _) =
            FilterStream::connect(process.at("state"), "n", 1, &["default"]).await;
        assert_eq!(names(&filter.pool_update().await), [format!("e{port}")]);
    };
    tokio::time::timeout(AT_ONCE, proper)
        .await
        .expect("proper clients are served at once");
    assert!(
        process.descriptors() < 700,
        "{} descriptors",
        process.descriptors()
    );
    for stream in &mut held {
        closed(stream).await;
    }
}

/// Returns the start of an HTTP/2 connection with a health check.
fn health_check() -> Vec<u8> {
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        [
            &[
                0,
                0,
                u8::try_from(payload.len()).unwrap(),
                kind,
                flags,
                0,
                0,
                0,
                stream,
            ],
            payload,
        ]
        .concat()
    };
    let path = b"/grpc.health.v1.Health/Check";
    // The headers use HPACK's static table: POST, http, `:path`, content-type.
    let headers = [
        &[0x83, 0x86, 0x04, u8::try_from(path.len()).unwrap()],
        &path[..],
        &[0x0f, 0x10, 16],
        b"application/grpc",
    ]
    .concat();
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &headers),
        frame(0, 1, 1, &[0; 5]),
    ]
    .concat()
}

async fn slow_and_dead_peers_are_cut_off() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let health = daemon.health_address.unwrap();
    let mut dead = TcpStream::connect(health).await.unwrap();
    dead.write_all(&health_check()).await.unwrap();
    let mut answer = [0; 9];
    dead.read_exact(&mut answer).await.unwrap();
    // From here on the client answers no ping.
    let mut half = TcpStream::connect(daemon.admin_address).await.unwrap();
    half.write_all(b"GET /livez HTTP/1.1\r\nhost: a\r\nx-slow: ")
        .await
        .unwrap();
    let mut preface = TcpStream::connect(daemon.state_address).await.unwrap();
    preface
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    tokio::join!(closed(&mut dead), closed(&mut half), closed(&mut preface));
    daemon.stop().await;
}

#[tokio::test]
async fn a_standby_lives_and_is_ready_only_to_answer_ext_proc() {
    // There is no etcd, so these daemons never lead.
    for (ext_proc, ready) in [("none", false), ("127.0.0.1:0", true)] {
        let args = [
            "--endpoint",
            "127.0.0.1:1",
            "--listen-ext-proc",
            ext_proc,
            "--lease-etcd",
            "http://127.0.0.1:1",
        ];
        let process =
            LoggedDaemon::start(1_024, &args, "standing by until this daemon gets the lease").await;
        until("its pools are known", || async {
            process.health().await == [true, false, ready, ready]
        })
        .await;
        for listener in ["admin", "metrics"] {
            let page = async |path| get(process.at(listener), path).await;
            assert_eq!(page("/livez").await.0, 200);
            let readyz = if ready {
                (200, "ready\n")
            } else {
                (503, "standing by: another daemon leads\n")
            };
            assert_eq!(page("/readyz").await, (readyz.0, readyz.1.to_owned()));
            assert_eq!(
                page("/metrics").await.1.contains("switchpoint_leads 0"),
                ready,
                "one that serves nobody counts nothing"
            );
        }
        assert_eq!(
            get_json(process.at("admin"), "/debug/endpoints").await["endpoints"][0]["state"],
            "ready"
        );
    }
}

#[tokio::test]
async fn a_standby_that_comes_to_lead_becomes_ready_on_the_same_port() {
    let Some(binary) = cluster::tool("etcd") else {
        return;
    };
    let folder = TempDir::new().unwrap();
    let port = cluster::free_port();
    let _etcd = cluster::etcd(binary, folder.path(), port);
    let etcd = format!("http://127.0.0.1:{port}");
    let args = [
        "--endpoint",
        "127.0.0.1:1",
        "--listen-ext-proc",
        "none",
        "--lease-etcd",
        &etcd,
    ];
    let mut leader = LoggedDaemon::start(1_024, &args, "serving").await;
    until("the leader is ready", || async {
        leader.health().await == [true, true, true, false]
    })
    .await;
    let standby =
        LoggedDaemon::start(1_024, &args, "standing by until this daemon gets the lease").await;
    assert_eq!(standby.health().await, [true, false, false, false]);
    let probe = plain(standby.at("health")).await;
    // The leader releases its lease. `handover` tests a leader that is killed.
    let pid = leader.child.id().unwrap().to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &pid])
            .status()
            .await
            .unwrap()
            .success()
    );
    assert_eq!(leader.child.wait().await.unwrap().code(), Some(0));
    let patient = async {
        while serving(&probe, LEADING).await != Ok(true) {
            assert_eq!(
                serving(&probe, LIVENESS).await,
                Ok(true),
                "a probe that stays connected never fails"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), patient)
        .await
        .expect("the standby leads");
    assert_eq!(standby.health().await, [true, true, true, false]);
}

#[tokio::test]
async fn health_is_served_without_ext_proc() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    assert!(daemon.health_address.is_some());
    daemon.stop().await;
    let process = LoggedDaemon::start(
        1_024,
        &["--endpoint", "127.0.0.1:1", "--listen-ext-proc", "none"],
        "serving",
    )
    .await;
    until("it is ready", || async {
        process.health().await == [true, true, true, false]
    })
    .await;
}

#[tokio::test]
async fn the_metrics_listener_shows_counts_alone() {
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--listen-metrics",
        "127.0.0.1:0",
    ])
    .await;
    let metrics = daemon.metrics_address.unwrap();
    let page = get(metrics, "/metrics").await;
    assert!(
        page.0 == 200 && page.1.contains("switchpoint_term"),
        "{page:?}"
    );
    assert_eq!(
        (
            get(metrics, "/livez").await.0,
            get(metrics, "/readyz").await.0
        ),
        (200, 200)
    );
    for path in [
        "endpoints",
        "instances",
        "state",
        "config",
        "model",
        "explain",
    ] {
        assert_eq!(
            get(metrics, &format!("/debug/{path}")).await.0,
            404,
            "{path}"
        );
    }
    daemon.stop().await;
}

#[tokio::test]
async fn the_admin_listener_asks_for_its_token() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("token");
    let old = "0123456789abcdef";
    let new = "fedcba9876543210";
    write(&file, &format!("{old}\n"));
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--admin-token-file",
        file.to_str().unwrap(),
    ])
    .await;
    let client = reqwest::Client::new();
    let status = async |path: &str, token: &str| {
        let request = client
            .get(format!("http://{}{path}", daemon.admin_address))
            .header("authorization", token);
        request.send().await.unwrap().status().as_u16()
    };
    for (path, token, expected) in [
        ("/livez", "", 200),
        ("/readyz", "", 200),
        ("/metrics", "", 401),
        ("/debug/state", "", 401),
        ("/debug/state", "Bearer ", 401),
        ("/debug/state", &format!("Bearer {new}"), 401),
        ("/debug/state", &format!("Bearer {old}x"), 401),
        ("/debug/state", old, 401),
        ("/debug/state", &format!("Bearer {old}"), 200),
        ("/metrics", &format!("bearer {old}"), 200),
    ] {
        assert_eq!(status(path, token).await, expected, "{path} {token}");
    }
    write(&file, new);
    let accepted = format!("Bearer {new}");
    until("the new token counts", || async {
        status("/debug/state", &accepted).await == 200
    })
    .await;
    assert_eq!(status("/debug/state", &format!("Bearer {old}")).await, 401);
    write(&file, "short");
    // The pause is longer than the interval of the file watcher.
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(
        status("/debug/state", &accepted).await,
        200,
        "invalid content does not replace a token"
    );
    daemon.stop().await;
}
