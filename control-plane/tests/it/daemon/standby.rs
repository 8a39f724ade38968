//! Tests of a standby: its answers, and what stays when it begins or stops to lead.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use control_plane::daemon::StandbyDaemon;
use control_plane::serve::health::{LEADING, LIVENESS, READINESS};
use proto::state::{LearnedModels, PoolUpdate, daemon_message::Message, proxy_message};
use scheduler::Version;
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::cluster;
use super::ext_proc::{GatewayStream, plain, serving};
use super::harness::{
    FilterStream, PATIENCE, endpoints, get, get_json, names, serve, until, write,
};
use super::outsiders::LoggedDaemon;

/// A gateway that sends one request after another to a daemon. Each request must get a destination.
pub(super) struct BusyGateway {
    answered: Arc<AtomicUsize>,
    stops: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

// === impl BusyGateway ===

impl BusyGateway {
    pub(super) async fn start(address: SocketAddr) -> Self {
        let answered = Arc::<AtomicUsize>::default();
        let stops = Arc::<AtomicBool>::default();
        let count = Arc::clone(&answered);
        let stop = Arc::clone(&stops);
        let channel = plain(address).await;
        let task = tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let destination = GatewayStream::ask(channel.clone(), &[])
                    .await
                    .unwrap()
                    .destination()
                    .await;
                assert!(destination.parse::<SocketAddr>().is_ok(), "{destination}");
                count.fetch_add(1, Ordering::Relaxed);
                // The pause leaves the cores to other tests.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        Self {
            answered,
            stops,
            task,
        }
    }

    /// Waits until further requests have been answered.
    pub(super) async fn wait_for_more(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        until("ten more answers", || async {
            self.task.is_finished() || self.answered.load(Ordering::Relaxed) >= before + 10
        })
        .await;
    }

    pub(super) async fn stop(self) {
        self.stops.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
    }
}

fn ids(update: &PoolUpdate) -> Vec<(String, u32, u32)> {
    update
        .endpoints
        .iter()
        .map(|e| (e.name.clone(), e.slot, e.generation))
        .collect()
}

fn term(update: &PoolUpdate) -> u64 {
    update.version.unwrap().term
}

#[tokio::test]
async fn a_standby_answers_ext_proc_and_a_lost_lease_interrupts_nothing() {
    let standby = StandbyDaemon::start(serve(&[
        "--endpoint",
        "127.0.0.1:1",
        "--ext-proc-plaintext",
    ]))
    .await
    .unwrap();
    let gateway = BusyGateway::start(standby.ext_proc_address.unwrap()).await;
    gateway.wait_for_more().await;
    let health = plain(standby.monitoring.health_address.unwrap()).await;
    let says = async || {
        [
            serving(&health, LIVENESS).await,
            serving(&health, LEADING).await,
            serving(&health, READINESS).await,
        ]
    };
    assert_eq!(
        says().await,
        [Ok(true), Ok(false), Ok(true)],
        "ready to pick, though it does not lead"
    );
    assert_eq!(get(standby.admin_address, "/readyz").await.0, 200);

    let mut before: Option<PoolUpdate> = None;
    for _ in 0..3 {
        let leading = standby.lead().await.unwrap();
        let (mut filter, _) =
            FilterStream::connect(leading.state_address, "n", 1, &["default"]).await;
        let update = filter.pool_update().await;
        if let Some(before) = before {
            assert_eq!(
                (ids(&update), update.hash_secret),
                (ids(&before), before.hash_secret)
            );
            assert!(
                term(&update) > term(&before),
                "each term is larger than the one before"
            );
        }
        assert_eq!(says().await, [Ok(true); 3]);
        assert_eq!(
            get_json(standby.admin_address, "/debug/state").await["leads"],
            true
        );
        gateway.wait_for_more().await;

        let state_address = leading.state_address;
        leading.lose().await;
        let ended = async { while filter.next().await.is_ok() {} };
        tokio::time::timeout(PATIENCE, ended)
            .await
            .expect("the stream ends");
        assert!(
            TcpStream::connect(state_address).await.is_err(),
            "no proxy can read the state of a standby"
        );
        assert_eq!(says().await, [Ok(true), Ok(false), Ok(true)]);
        gateway.wait_for_more().await;
        before = Some(update);
    }
    let page = get(standby.admin_address, "/metrics").await.1;
    for line in ["switchpoint_leads 0", "llm_d_epp_extproc_streams_total"] {
        assert!(
            page.lines().any(|l| l.starts_with(line)),
            "{line} in\n{page}"
        );
    }
    gateway.stop().await;
    standby.stop().await;
}

/// Waits for the update of this leader with endpoints at these ports.
async fn update_with(filter: &mut FilterStream, ports: &[u16]) -> PoolUpdate {
    loop {
        let update = filter.pool_update().await;
        let mut names = names(&update);
        names.sort();
        if names
            == ports
                .iter()
                .map(|port| format!("e{port}"))
                .collect::<Vec<_>>()
        {
            return update;
        }
    }
}

#[tokio::test]
async fn daemons_that_share_a_snapshot_file_keep_slots_generations_and_secret() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("endpoints.yaml");
    let snapshot = folder.path().join("snapshot.json");
    write(&file, &endpoints(&[1, 2]));
    let args = [
        "--endpoints-file",
        file.to_str().unwrap(),
        "--snapshot-file",
        snapshot.to_str().unwrap(),
        "--ext-proc-plaintext",
    ];
    let [a, b] = [
        StandbyDaemon::start(serve(&args)).await.unwrap(),
        StandbyDaemon::start(serve(&args)).await.unwrap(),
    ];
    let gateways = [
        BusyGateway::start(a.ext_proc_address.unwrap()).await,
        BusyGateway::start(b.ext_proc_address.unwrap()).await,
    ];
    let mut known: Option<PoolUpdate> = None;
    for (daemon, before, after) in [
        (&a, [1, 2].as_slice(), [2, 3].as_slice()),
        (&b, &[2, 3], &[1, 2, 3]),
        (&a, &[1, 2, 3], &[1, 3]),
    ] {
        let followed = || async {
            get_json(daemon.admin_address, "/debug/state").await["pools"][0]["endpoints"]
                == before.len()
        };
        until("the endpoints are followed", followed).await;
        let leading = daemon.lead().await.unwrap();
        let (mut filter, _) =
            FilterStream::connect(leading.state_address, "n", 1, &["default"]).await;
        let first = update_with(&mut filter, before).await;
        if let Some(known) = known {
            assert_eq!(
                (ids(&first), first.hash_secret),
                (ids(&known), known.hash_secret)
            );
            assert!(term(&first) > term(&known));
        }
        write(&file, &endpoints(after));
        known = Some(update_with(&mut filter, after).await);
        leading.end().await;
    }
    for gateway in gateways {
        gateway.wait_for_more().await;
        gateway.stop().await;
    }
    a.stop().await;
    b.stop().await;
}

/// Waits for the models of the leader that are not provisional.
async fn settled_models(filter: &mut FilterStream) -> LearnedModels {
    loop {
        if let Message::LearnedModels(models) = filter.next().await.unwrap()
            && !models.provisional
        {
            return models;
        }
    }
}

/// The maximum time from the moment when a daemon leads until its proxies have the models. The
/// daemon publishes models once a second. The rest is for a busy machine of two cores.
const TAKEN_OVER_MAX: Duration = Duration::from_secs(3);

/// Checks that a standby takes over the models of a proxy. The standby has followed the pool all
/// the time and has learned nothing. The proxies send the standby the models of the previous
/// leader, and a proxy without models gets them within a second.
#[tokio::test]
#[allow(clippy::print_stdout, reason = "it is shown by `--nocapture`")]
async fn a_live_standby_that_takes_over_goes_on_from_the_models_of_a_proxy() {
    let args = ["--endpoint", "127.0.0.1:1", "--latency-prediction"];
    let [first, second] = [
        StandbyDaemon::start(serve(&args)).await.unwrap(),
        StandbyDaemon::start(serve(&args)).await.unwrap(),
    ];
    let learned = |version: Version| {
        let models = proto::LearnedModels {
            pool: "default".to_owned(),
            version,
            step: StepModel::from_parts([20.0, 0.1, 0.0], [20.0, 0.1, 1e-3], 100.0),
            latency: Some(LatencyModel::constant(40.0, 20.0)),
            provisional: false,
        };
        proto::encode_learned(&models).unwrap()
    };
    let mut held = learned(Version::default());
    for daemon in [&first, &second] {
        let leading = daemon.lead().await.unwrap();
        let connect = |node| FilterStream::connect(leading.state_address, node, 1, &["default"]);
        let began = Instant::now();
        let (mut proxy, _) = connect("a").await;
        proxy
            .say(proxy_message::Message::LearnedModels(held.clone()))
            .await;
        let (mut fresh, _) = connect("b").await;
        let [known, new] = [
            settled_models(&mut proxy).await,
            settled_models(&mut fresh).await,
        ];
        for models in [&known, &new] {
            assert_eq!((&models.step, &models.latency), (&held.step, &held.latency));
            assert_ne!(models.version, held.version, "it is of this term");
        }
        held = new;
        let elapsed = began.elapsed();
        println!("drill: both proxies have the models {elapsed:.2?} after the daemon leads");
        assert!(elapsed < TAKEN_OVER_MAX, "{elapsed:?}");
        leading.lose().await;
    }
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn two_daemons_of_one_moment_give_no_number_twice() {
    let args = ["--endpoint", "127.0.0.1:1", "--endpoint", "127.0.0.1:2"];
    let mut seen = Vec::new();
    for _ in 0..2 {
        let daemon = StandbyDaemon::start(serve(&args)).await.unwrap();
        let leading = daemon.lead().await.unwrap();
        let (mut filter, _) =
            FilterStream::connect(leading.state_address, "n", 1, &["default"]).await;
        seen.extend(
            filter
                .pool_update()
                .await
                .endpoints
                .into_iter()
                .map(|endpoint| endpoint.generation),
        );
        leading.end().await;
        daemon.stop().await;
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 4, "{seen:?}");
}

#[tokio::test]
async fn a_leader_whose_store_is_away_stands_by_and_leads_again() {
    let Some(binary) = cluster::tool("etcd") else {
        return;
    };
    let folder = TempDir::new().unwrap();
    let port = cluster::free_port();
    let mut etcd = cluster::etcd(binary, folder.path(), port);
    let url = format!("http://127.0.0.1:{port}");
    let args = [
        "--endpoint",
        "127.0.0.1:1",
        "--listen-ext-proc",
        "127.0.0.1:0",
        "--ext-proc-plaintext",
        "--lease-etcd",
        &url,
    ];
    let daemon = LoggedDaemon::start(1_024, &args, "serving").await;
    let health = plain(daemon.at("health")).await;
    let gateway = BusyGateway::start(daemon.at("ext_proc")).await;
    let state = async || {
        let mut filter = FilterStream::connect(daemon.at("state"), "n", 1, &["default"])
            .await
            .0;
        term(&filter.pool_update().await)
    };
    let first = state().await;
    etcd.kill();
    until("it stands by", || async {
        serving(&health, LEADING).await == Ok(false)
    })
    .await;
    assert_eq!(
        [
            serving(&health, LIVENESS).await,
            serving(&health, READINESS).await
        ],
        [Ok(true); 2]
    );
    assert!(
        TcpStream::connect(daemon.at("state")).await.is_err(),
        "it serves no state"
    );
    gateway.wait_for_more().await;
    etcd.start();
    until("it leads again", || async {
        serving(&health, LEADING).await == Ok(true)
    })
    .await;
    let again = get_json(daemon.at("admin"), "/debug/state").await["term"]
        .as_u64()
        .unwrap();
    assert!(again > first, "{again} after {first}");
    gateway.wait_for_more().await;
    gateway.stop().await;
}
