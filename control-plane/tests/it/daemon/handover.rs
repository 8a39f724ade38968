//! Measures how long it takes until another daemon leads, with a Lease in a real kube-apiserver.
//! The standby is alive and answers ext_proc all the time.

use std::process::Command;
use std::time::{Duration, Instant};

use control_plane::serve::health::{LEADING, LIVENESS};
use discovery::lease::LEASE_DURATION;
use tokio::net::TcpListener;

use super::cluster::{self, TestCluster};
use super::ext_proc::{plain, serving};
use super::harness::until;
use super::outsiders::LoggedDaemon;
use super::standby::BusyGateway;

/// The maximum time of a handover by a leader that releases the lease on SIGTERM.
const RELEASED_MAX: Duration = Duration::from_secs(3);

/// The maximum time of a handover by a leader that is killed.
const KILLED_MAX: Duration = LEASE_DURATION.saturating_add(Duration::from_secs(2));

const ROUNDS: u64 = 10;

const STANDS_BY: &str = "standing by until this daemon gets the lease";

/// Daemons that campaign for one Lease.
struct HandoverDrill {
    kubeconfig: String,
    arguments: Vec<String>,
    /// An engine that accepts connections and never answers, so that the daemon stops during a
    /// scrape.
    _silent: TcpListener,
}

// === impl HandoverDrill ===

impl HandoverDrill {
    async fn new(cluster: &TestCluster, lease: &str) -> Self {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = silent.local_addr().unwrap().to_string();
        let lease = format!("default/{lease}");
        let ext_proc = ["--listen-ext-proc", "127.0.0.1:0", "--ext-proc-plaintext"];
        let arguments = [
            &["--endpoint", &endpoint, "--lease-kubernetes", &lease][..],
            &ext_proc,
        ]
        .concat();
        let arguments = arguments.into_iter().map(str::to_owned).collect();
        Self {
            kubeconfig: cluster.kubeconfig().to_str().unwrap().to_owned(),
            arguments,
            _silent: silent,
        }
    }

    async fn daemon(&self, message: &str) -> LoggedDaemon {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        LoggedDaemon::start_in(
            1_024,
            &arguments,
            message,
            &[("KUBECONFIG", &self.kubeconfig)],
        )
        .await
    }

    /// Starts a leader, and a standby that has seen the leader's lease.
    async fn pair(&self) -> (LoggedDaemon, LoggedDaemon) {
        let leader = self.daemon("serving").await;
        let standby = self.standby(0).await;
        (leader, standby)
    }

    /// Starts a standby, which reads the lease at another moment in each round.
    async fn standby(&self, round: u64) -> LoggedDaemon {
        let standby = self.daemon(STANDS_BY).await;
        until("the standby is alive", || async {
            standby.health().await[..2] == [true, false]
        })
        .await;
        // The standby has read the lease by then.
        tokio::time::sleep(Duration::from_millis(300 + 120 * round)).await;
        standby
    }
}

/// Sends the signal to the leader. Returns the time until the standby leads.
async fn hand_over(leader: &mut LoggedDaemon, standby: &LoggedDaemon, signal: &str) -> Duration {
    let probe = plain(standby.at("health")).await;
    let gateway = BusyGateway::start(standby.at("ext_proc")).await;
    let began = Instant::now();
    let pid = leader.child.id().unwrap().to_string();
    assert!(
        Command::new("kill")
            .args([signal, &pid])
            .status()
            .unwrap()
            .success()
    );
    while serving(&probe, LEADING).await != Ok(true) {
        assert_eq!(
            serving(&probe, LIVENESS).await,
            Ok(true),
            "the standby is alive"
        );
        assert!(began.elapsed() < KILLED_MAX * 2, "no daemon leads");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let elapsed = began.elapsed();
    assert_eq!(serving(&probe, LIVENESS).await, Ok(true));
    gateway.wait_for_more().await;
    gateway.stop().await;
    elapsed
}

#[tokio::test]
#[allow(clippy::print_stdout, reason = "it is shown by `--nocapture`")]
async fn a_leader_that_is_stopped_hands_over_in_less_than_three_seconds_ten_times() {
    let Some(cluster) = cluster::shared().await else {
        return;
    };
    let drill = HandoverDrill::new(&cluster, "stopped").await;
    let (mut leader, mut standby) = drill.pair().await;
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        times.push(hand_over(&mut leader, &standby, "-TERM").await);
        let status = leader.child.wait().await.unwrap();
        assert_eq!(status.code(), Some(0), "it stops in order");
        leader = std::mem::replace(&mut standby, drill.standby(round).await);
    }
    let worst = times.iter().max().copied().unwrap_or_default();
    println!(
        "drill: SIGTERM to the leader, ten times: the next leads after {times:.2?}, at most {worst:.2?}"
    );
    assert!(worst < RELEASED_MAX, "{times:?}");
}

#[tokio::test]
#[allow(clippy::print_stdout, reason = "it is shown by `--nocapture`")]
async fn a_leader_that_is_killed_is_replaced_when_its_lease_has_lapsed() {
    let Some(cluster) = cluster::shared().await else {
        return;
    };
    let drill = HandoverDrill::new(&cluster, "killed").await;
    let (mut leader, standby) = drill.pair().await;
    let elapsed = hand_over(&mut leader, &standby, "-KILL").await;
    println!("drill: SIGKILL to the leader: the next leads after {elapsed:.2?}");
    assert!(elapsed < KILLED_MAX, "{elapsed:?}");
}
