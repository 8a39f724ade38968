//! Floods, and messages that never end. The tests check what the floods cost the daemon, which is a
//! separate process, and whether another proxy notices them.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use prost::Message as _;
use proto::state::{self, daemon_message::Message, proxy_message};
use scheduler::{EndpointRef, Generation, Slot};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

use super::kit::{ELSEWHERE, HOME, NODE, channel, filter, largest_row, peers, share};
use crate::daemon::calls::CallClient;
use crate::daemon::harness::{
    DaemonHarness, FilterStream, PATIENCE, endpoints, get, instance, names, write,
};

/// The maximum memory, in bytes, that one hostile host may add to the daemon. The host sends
/// partial messages on all its streams, counts and placements.
const GROWTH_MAX: u64 = 256 << 20;

/// The maximum CPU that the floods may cost, in cores. The measured value is 0.3 without
/// optimization.
const CORES_MAX: f64 = 1.2;

/// The maximum delay of a pool update, or of another proxy's placement, during the floods.
const LATE_MAX: Duration = Duration::from_secs(10);

/// The maximum size of the daemon's metrics page, in bytes. Invented names once made it 44 MB.
const PAGE_BYTES_MAX: usize = 8 << 20;

/// Returns the optimized daemon that `make e2e-long` floods. Otherwise the tests flood the daemon
/// that was built with them.
fn optimized_daemon() -> Option<OsString> {
    std::env::var_os("SWITCHPOINTD")
}

/// The program and the address of its state listener.
struct FloodedDaemon {
    child: tokio::process::Child,
    state: SocketAddr,
    admin: SocketAddr,
    folder: tempfile::TempDir,
}

impl FloodedDaemon {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("endpoints.yaml");
        write(&file, &endpoints(&[1, 2, 3, 4]));
        let [state, admin] = [(); 2].map(|()| {
            let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            free.local_addr().unwrap()
        });
        let program = optimized_daemon().unwrap_or(env!("CARGO_BIN_EXE_switchpointd").into());
        let child = tokio::process::Command::new(program)
            .args([
                "serve",
                "--local-endpoints",
                "--endpoints-file",
                file.to_str().unwrap(),
                "--listen-state",
                &state.to_string(),
            ])
            .args([
                "--listen-admin",
                &admin.to_string(),
                "--listen-ext-proc",
                "none",
                "--listen-health",
                "none",
            ])
            .env("RUST_LOG", "error")
            .stderr(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let up = async {
            while TcpStream::connect(state).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, up)
            .await
            .expect("it does not start");
        Self {
            child,
            state,
            admin,
            folder,
        }
    }

    fn stat(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id().unwrap())).unwrap()
    }

    /// Returns the resident memory, in bytes.
    fn memory(&self) -> u64 {
        let pages: u64 = self
            .stat("statm")
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        pages * 4096
    }

    /// Returns the CPU time so far.
    fn cpu(&self) -> Duration {
        let stat = self.stat("stat");
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap()
            .split_whitespace()
            .collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        Duration::from_millis(ticks * 10)
    }
}

/// Sends the same messages as fast as the daemon reads them, until the daemon ends the stream.
async fn say_without_end(filter: FilterStream, messages: Vec<proxy_message::Message>) {
    for message in messages.iter().cycle() {
        if !filter.tell(message.clone()).await {
            return;
        }
    }
}

/// Returns messages of each kind, as large or as small as a peer can make them.
fn everything() -> Vec<Vec<proxy_message::Message>> {
    let at: Vec<EndpointRef> = (0..1_024)
        .map(|slot| EndpointRef {
            slot: Slot(slot),
            generation: Generation(1),
        })
        .collect();
    let pool = || "default".to_owned();
    let mut junk = Vec::new();
    (0..20).for_each(|block| proto::placements::push(&mut junk, at[0], &vec![block; 100]));
    let model = |vm: u64, i: u64| state::ModelCounters {
        model: format!("{vm}-{i}-{}", "x".repeat(200)),
        requests: u64::MAX,
        ..Default::default()
    };
    let vm = |vm_id| state::VmCounters {
        pool: pool(),
        vm_id,
        models: (0..100).map(|i| model(vm_id, i)).collect(),
        ..Default::default()
    };
    let reports = (0..500).map(|of| state::Report {
        counters: (0..10)
            .map(|vm_id| vm(of * 10 + vm_id).encode_to_vec())
            .collect(),
    });
    let observations = |first| state::Observations {
        pool: pool(),
        vm_id: first,
        first,
        rows: vec![0xff; 512 * 64],
    };
    let version = Some(state::Version {
        term: u64::MAX,
        sequence: u64::MAX,
    });
    let ack = state::Ack {
        pool: pool(),
        version,
        refused: "x".repeat(100_000),
        held: version,
    };
    vec![
        vec![share(largest_row(&at), junk.clone())],
        vec![share(Vec::new(), Vec::new())],
        vec![share(Vec::new(), junk)],
        vec![share(vec![0xff; 80_000], vec![0xff; 20_000])],
        reports.map(proxy_message::Message::Report).collect(),
        vec![proxy_message::Message::Report(state::Report {
            counters: vec![Vec::new(); 50_000],
        })],
        [0, u64::MAX, 7, 7, 3]
            .map(|first| proxy_message::Message::Observations(observations(first)))
            .to_vec(),
        vec![proxy_message::Message::Ack(ack)],
        vec![proxy_message::Message::LearnedModels(
            state::LearnedModels {
                pool: pool(),
                step: vec![u32::MAX; 100_000],
                ..state::LearnedModels::default()
            },
        )],
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_of_every_message_leave_other_proxies_served_and_the_daemon_small() {
    let daemon = FloodedDaemon::start().await;
    let home = channel(daemon.state, HOME).await;
    let mut good = filter(&home, 1).await;
    let third = filter(&home, 3).await;
    // The names that a host invents have a limit while others report too.
    third.say(empty_models(0)).await;
    let pool_update = good.pool_update().await;
    let before = daemon.memory();
    let cpu = daemon.cpu();
    let begun = Instant::now();
    let mut floods = Vec::new();
    for (process_id, messages) in (100..).zip(everything()) {
        let filter = filter(&channel(daemon.state, ELSEWHERE).await, process_id).await;
        floods.push(tokio::spawn(say_without_end(filter, messages)));
    }
    tokio::time::sleep(Duration::from_secs(3)).await;

    // During the floods, the pool changes, and another proxy places a prompt.
    write(
        &daemon.folder.path().join("endpoints.yaml"),
        &endpoints(&[1, 2, 3, 4, 5]),
    );
    let asked = Instant::now();
    while names(&good.pool_update().await).len() != 5 {}
    assert!(
        asked.elapsed() < LATE_MAX,
        "the pool update took {:?}",
        asked.elapsed()
    );
    let first = &pool_update.endpoints[0];
    let at = EndpointRef {
        slot: Slot(u16::try_from(first.slot).unwrap()),
        generation: Generation(first.generation),
    };
    let mut placements = Vec::new();
    proto::placements::push(&mut placements, at, &[424_242]);
    third.say(share(Vec::new(), placements)).await;
    let asked = Instant::now();
    let arrives = async {
        loop {
            if let Message::PeerLoad(peers) = good.next().await.unwrap() {
                assert!(peers.active <= 18, "{} others", peers.active);
                if proto::placements::each(&peers.placements).any(|(_, blocks)| blocks == [424_242])
                {
                    return;
                }
            }
        }
    };
    tokio::time::timeout(LATE_MAX, arrives)
        .await
        .expect("the placement of another proxy was lost");
    assert!(asked.elapsed() < LATE_MAX);

    let cores = (daemon.cpu() - cpu).as_secs_f64() / begun.elapsed().as_secs_f64();
    let growth = daemon.memory().saturating_sub(before);
    println!("floods: {cores:.2} cores, {} MiB more", growth >> 20);
    assert!(cores < CORES_MAX, "{cores} cores");
    assert!(growth < GROWTH_MAX, "{growth} bytes more");
    let (_, page) = get(daemon.admin, "/metrics").await;
    assert!(page.len() < PAGE_BYTES_MAX, "{} bytes", page.len());
    floods.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Opens streams with HTTP/2 frames that this test writes itself, and sends most of a message on
/// each.
async fn half_messages(address: SocketAddr, streams: u32) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((ELSEWHERE, 0).into()).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let frame = |kind: u8, flags: u8, id: u32, body: &[u8]| {
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &id.to_be_bytes(), body].concat()
    };
    let literal = |name: &str, value: &str| {
        [
            &[0, u8::try_from(name.len()).unwrap()],
            name.as_bytes(),
            &[u8::try_from(value.len()).unwrap()],
            value.as_bytes(),
        ]
        .concat()
    };
    let path = "/switchpoint.state.v1.StateService/Stream";
    let headers = [
        literal(":method", "POST"),
        literal(":scheme", "http"),
        literal(":path", path),
        literal(":authority", "d"),
        literal("te", "trailers"),
        literal("content-type", "application/grpc"),
    ]
    .concat();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    // These bytes are the beginning of a gRPC message of 500,000 bytes.
    let mut begin = vec![0];
    begin.extend(500_000_u32.to_be_bytes());
    begin.resize(16_000, 0x0a);
    for id in (0..streams).map(|i| 2 * i + 1) {
        bytes.extend(frame(1, 4, id, &headers));
        bytes.extend(frame(0, 0, id, &begin));
    }
    let _ = tokio::time::timeout(Duration::from_secs(2), stream.write_all(&bytes)).await;
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_never_end_take_bounded_memory_and_their_streams_are_closed() {
    let daemon = FloodedDaemon::start().await;
    let before = daemon.memory();
    let mut half = Vec::new();
    // Together these connections open more streams than one host may have. Each connection sends
    // less than its window.
    for _ in 0..90 {
        half.push(half_messages(daemon.state, 3).await);
    }
    let mut good = filter(&channel(daemon.state, HOME).await, 1).await;
    assert_eq!(good.pool_update().await.endpoints.len(), 4);
    let growth = daemon.memory().saturating_sub(before);
    println!("half messages: {} MiB more", growth >> 20);
    assert!(growth < GROWTH_MAX, "{growth} bytes more");
    // The host's share of streams is free again after the daemon has waited for their Hello.
    let again = async {
        loop {
            if let Ok(filter) = FilterStream::over(channel(daemon.state, ELSEWHERE).await).await {
                filter.hello(proto::SCHEMA, NODE, 9, &[]).await;
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(PATIENCE, again)
        .await
        .expect("their streams are not free");
}

/// Returns a report of one VM with this many empty models, two bytes each.
fn empty_models(count: usize) -> proxy_message::Message {
    let pool = state::VmCounters {
        pool: "default".to_owned(),
        ..Default::default()
    };
    let mut vm = pool.encode_to_vec();
    vm.extend([0x22, 0].repeat(count));
    proxy_message::Message::Report(state::Report { counters: vec![vm] })
}

#[tokio::test]
async fn a_message_of_many_empty_entries_is_refused_by_both_transports_and_takes_no_memory() {
    let daemon = FloodedDaemon::start().await;
    let mut good = filter(&channel(daemon.state, HOME).await, 1).await;
    good.pool_update().await;
    let before = daemon.memory();
    for process_id in 2..10 {
        let mut bad = filter(&channel(daemon.state, ELSEWHERE).await, process_id).await;
        bad.say(empty_models(200_000)).await;
        let ended = loop {
            match bad.next().await {
                Ok(_) => {}
                Err(status) => break status,
            }
        };
        assert_eq!(ended.code(), tonic::Code::InvalidArgument);
        assert!(ended.message().contains("ModelCounters"), "{ended}");
    }
    for process_id in 10..18 {
        let bad = CallClient::hello(daemon.state, process_id, process_id).await;
        let (status, body) = bad.tell(vec![empty_models(200_000)]).await;
        let body = String::from_utf8_lossy(&body);
        assert_eq!(status, 400, "{body}");
        assert!(body.contains("ModelCounters"), "{body}");
    }
    let growth = daemon.memory().saturating_sub(before);
    assert!(growth < 32 << 20, "{growth} bytes more");
    assert!(good.next().await.is_ok());
}

#[tokio::test]
async fn streams_that_replace_each_other_leave_no_process_behind() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut good = filter(&channel(rig.address, HOME).await, 1).await;
    for process_id in 2..12 {
        let there = channel(rig.address, ELSEWHERE).await;
        let first = filter(&there, process_id).await;
        first.say(share(Vec::new(), Vec::new())).await;
        // From now on the same process requests no pool.
        let mut second = FilterStream::over(there).await.unwrap();
        second.hello(proto::SCHEMA, NODE, process_id, &[]).await;
        assert!(matches!(second.next().await, Ok(Message::Welcome(_))));
    }
    let streams = || rig.shared.proxies.streams.borrow().len();
    let alone = async { while peers(&mut good).await.proxies != 1 || streams() != 1 {} };
    tokio::time::timeout(PATIENCE, alone)
        .await
        .expect("processes or streams are left");
}

mod slow {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use control_plane::state::peer::{COST_PER_SECOND, MESSAGE_COST};
    use tokio::sync::watch;

    use super::*;

    /// The number of streams of the hostile host: nearly all that it may have.
    const STREAMS: u32 = 250;

    /// The number of connections that these streams share.
    const CONNECTIONS: u32 = 10;

    /// The length of the attack.
    const ATTACK: Duration = Duration::from_secs(20);

    /// The time from the begin of the attack until the rate of its messages is measured.
    const FILLING: Duration = Duration::from_secs(3);

    /// The time for which the daemon is observed before the attack.
    const QUIET: Duration = Duration::from_secs(5);

    /// The aims for an optimized daemon: the longest time between two messages to a good proxy, and
    /// the slowest answer of `/livez`. The test and the hostile host run on the daemon's cores, so
    /// a probe also waits for them. If an answer takes longer before the attack, the machine is too
    /// busy for this test.
    const WAIT_AIM: Duration = Duration::from_millis(500);
    const LIVEZ_AIM: Duration = Duration::from_millis(100);

    /// The minimum part of the rate of one origin that the hostile host must send, in percent.
    /// Otherwise the test would show nothing about the limit. The rate may not be reached exactly,
    /// because the daemon reads on only when a stream's turn comes, and the hostile host has the
    /// lowest priority on these cores.
    const RATE_PERCENT_MIN: u64 = 60;

    /// The maximum: the allowance of one second more, and what waits in the streams' windows.
    const RATE_PERCENT_MAX: u64 = 125;

    /// The maximum of both times for a daemon that is not optimized.
    const UNOPTIMIZED_MAX: Duration = Duration::from_secs(4);

    /// The maximum memory of the daemon, in bytes.
    const MEMORY_MAX: u64 = 256 << 20;

    /// Returns the number of open streams, from the daemon's metrics.
    async fn streams(admin: std::net::SocketAddr) -> u32 {
        let (_, page) = get(admin, "/metrics").await;
        let mut rows = page.lines();
        let value = rows.find_map(|row| row.strip_prefix("switchpoint_proxies{pool=\"default\"} "));
        let number: f64 = value.and_then(|value| value.parse().ok()).unwrap();
        number as u32
    }

    /// The observations of a good proxy and of the probes.
    struct Observed {
        /// The longest time between two messages to a good proxy.
        silence: Duration,
        /// The slowest answer of `/livez`.
        livez: Duration,
        memory: u64,
        cores: f64,
    }

    impl std::fmt::Display for Observed {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let Self {
                silence,
                livez,
                memory,
                cores,
            } = self;
            write!(
                f,
                "a good proxy waits {silence:.2?}, /livez {livez:.2?}, {} MiB, {cores:.2} cores",
                memory >> 20
            )
        }
    }

    /// Returns the time of the slowest answer of `/livez` within this time.
    async fn slowest_livez(admin: SocketAddr, time: Duration) -> Duration {
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Each probe opens a connection, as the probes of Kubernetes do.
        let client = reqwest::Client::builder()
            .pool_max_idle_per_host(0)
            .build()
            .unwrap();
        let url = format!("http://{admin}/livez");
        let mut slowest = Duration::ZERO;
        let begun = Instant::now();
        while begun.elapsed() < time {
            let asked = Instant::now();
            let answer = client.get(&url).send().await.unwrap();
            assert_eq!(answer.status(), 200);
            slowest = slowest.max(asked.elapsed());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        slowest
    }

    impl FloodedDaemon {
        async fn observe(&self, good: &mut FilterStream, time: Duration) -> Observed {
            let probes = tokio::spawn(slowest_livez(self.admin, time));
            let cpu = self.cpu();
            let mut silence = Duration::ZERO;
            let mut memory = 0;
            let begun = Instant::now();
            let mut heard = Instant::now();
            while begun.elapsed() < time {
                good.next().await.unwrap();
                silence = silence.max(heard.elapsed());
                heard = Instant::now();
                memory = memory.max(self.memory());
            }
            let cores = (self.cpu() - cpu).as_secs_f64() / begun.elapsed().as_secs_f64();
            Observed {
                silence,
                livez: probes.await.unwrap(),
                memory,
                cores,
            }
        }
    }

    /// Returns messages with as many failures, SLOs and loads as a message may have, mostly of
    /// endpoints that never existed. The messages alternate with counters of the same endpoints.
    fn attack(real: &[EndpointRef], process_id: u64) -> Vec<proxy_message::Message> {
        let made_up = (0..1_024).map(|slot| EndpointRef {
            slot: Slot(slot),
            generation: Generation(u32::MAX),
        });
        let at: Vec<EndpointRef> = real.iter().copied().chain(made_up).take(1_024).collect();
        let mut junk = Vec::new();
        (0..8).for_each(|block| proto::placements::push(&mut junk, at[0], &vec![block; 100]));
        let counters = state::VmCounters {
            pool: "default".to_owned(),
            vm_id: process_id,
            endpoints: at
                .iter()
                .map(|at| state::EndpointCounters {
                    slot: at.slot.0.into(),
                    generation: at.generation.0,
                    picked: process_id,
                    requests: 1,
                    ..Default::default()
                })
                .collect(),
            models: (0..150)
                .map(|model| state::ModelCounters {
                    model: format!("{process_id}-{model}"),
                    requests: 1,
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        };
        let report = state::Report {
            counters: vec![counters.encode_to_vec()],
        };
        let mut messages = vec![share(largest_row(&at), junk); 4];
        messages.push(proxy_message::Message::Report(report));
        messages
    }

    /// Opens [`STREAMS`] streams. The streams read what they get, and send without end once `go` is
    /// true. What the messages cost the daemon is added to `cost`. The streams run in a separate
    /// thread with the lowest priority, because a real attacker does not run on the cores of the
    /// daemon and of the good proxy.
    fn begin_attack(
        address: SocketAddr,
        real: &[EndpointRef],
        go: &watch::Receiver<bool>,
        cost: &Arc<AtomicU64>,
    ) -> tokio::runtime::Runtime {
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .on_thread_start(|| rustix::process::setpriority_process(None, 19).unwrap())
            .enable_all()
            .build()
            .unwrap();
        for connection in 0..CONNECTIONS {
            let real = real.to_vec();
            let go = go.clone();
            let cost = Arc::clone(cost);
            threads.spawn(async move {
                let there = channel(address, ELSEWHERE).await;
                let its = (0..STREAMS).filter(|stream| stream % CONNECTIONS == connection);
                for process_id in its.map(|stream| 100 + u64::from(stream)) {
                    let FilterStream {
                        outbound,
                        mut inbound,
                    } = filter(&there, process_id).await;
                    tokio::spawn(async move { while let Ok(Some(_)) = inbound.message().await {} });
                    let messages = attack(&real, process_id);
                    let mut go = go.clone();
                    let cost = Arc::clone(&cost);
                    tokio::spawn(async move {
                        let _ = go.wait_for(|go| *go).await;
                        for message in messages.into_iter().cycle() {
                            let message = state::ProxyMessage {
                                message: Some(message),
                            };
                            let bytes = message.encoded_len() + MESSAGE_COST;
                            if outbound.send(message).await.is_err() {
                                return;
                            }
                            cost.fetch_add(bytes as u64, Ordering::Relaxed);
                        }
                    });
                }
            });
        }
        threads
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_host_with_all_its_streams_at_their_limits_hardly_delays_others() {
        let daemon = FloodedDaemon::start().await;
        let home = channel(daemon.state, HOME).await;
        let mut good = filter(&home, 1).await;
        let other = filter(&home, 2).await;
        let update = good.pool_update().await;
        let real: Vec<EndpointRef> = update
            .endpoints
            .iter()
            .map(|endpoint| EndpointRef {
                slot: Slot(u16::try_from(endpoint.slot).unwrap()),
                generation: Generation(endpoint.generation),
            })
            .collect();
        let honest = tokio::spawn(async move {
            loop {
                other.say(share(largest_row(&[]), Vec::new())).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let quiet = daemon.observe(&mut good, QUIET).await;
        let (go, attack_begins) = watch::channel(false);
        let cost = Arc::new(AtomicU64::new(0));
        let hostile = begin_attack(daemon.state, &real, &attack_begins, &cost);
        tokio::time::timeout(3 * PATIENCE, async {
            // The pause leaves the cores to the hostile streams, which have the lowest priority.
            while streams(daemon.admin).await <= STREAMS {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        })
        .await
        .expect("the hostile streams do not open");
        go.send_replace(true);
        // The first messages fill the queues of the hostile streams, and use up the allowance.
        let filling = daemon.observe(&mut good, FILLING).await;
        let begun = Instant::now();
        let before = cost.load(Ordering::Relaxed);
        let under_attack = daemon.observe(&mut good, ATTACK).await;
        let sent = (cost.load(Ordering::Relaxed) - before) as f64 / begun.elapsed().as_secs_f64();
        let percent = (100.0 * sent / f64::from(COST_PER_SECOND)) as u64;
        let still = streams(daemon.admin).await;
        assert!(still > STREAMS, "hostile streams have ended: {still}");
        let (status, page) = get(daemon.admin, "/metrics").await;
        println!("before: {quiet}, at first: {filling}");
        println!(
            "{STREAMS} streams: {under_attack}, /metrics {} KiB, {percent} % of the rate",
            page.len() >> 10
        );
        assert_eq!(status, 200);
        let [wait_max, livez_max] = match optimized_daemon() {
            Some(_) => [WAIT_AIM, LIVEZ_AIM],
            None => [UNOPTIMIZED_MAX; 2],
        };
        println!(
            "at most: a good proxy waits {wait_max:.2?}, /livez {livez_max:.2?}, {} MiB",
            MEMORY_MAX >> 20
        );
        assert!(quiet.livez < livez_max, "the machine is too busy: {quiet}");
        // A daemon that is not optimized needs its cores for less than the rate.
        let is_at_limit = (RATE_PERCENT_MIN..=RATE_PERCENT_MAX).contains(&percent);
        assert!(optimized_daemon().is_none() || is_at_limit, "{percent} %");
        for observed in [filling, under_attack] {
            assert!(observed.silence < wait_max, "{observed}");
            assert!(observed.livez < livez_max, "{observed}");
            assert!(observed.memory < MEMORY_MAX, "{observed}");
        }
        assert!(page.len() < PAGE_BYTES_MAX, "{} bytes", page.len());
        hostile.shutdown_background();
        honest.abort();
    }
}
