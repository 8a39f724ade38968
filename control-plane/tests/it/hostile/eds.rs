//! EDS streams that do not behave like Envoy, beside proxies with the same node id.

use std::time::Duration;

use control_plane::serve::eds::EDS_ACK_WAIT_MAX;

use proto::state;

use super::kit::{ELSEWHERE, HOME, NODE, channel, filter};
use crate::daemon::harness::{
    DaemonHarness, EnvoyStream, FilterStream, PATIENCE, get, instance, names, ports, until,
};

/// A time limit well below the time after which an EDS stream that does not answer is ignored.
const SOON: Duration = Duration::from_secs(2);

async fn rig() -> DaemonHarness {
    assert!(SOON * 2 < EDS_ACK_WAIT_MAX);
    DaemonHarness::start(vec![instance("a", 1)]).await
}

/// Waits for a pool update with these endpoints, for at most [`SOON`].
async fn pool_update_of(filter: &mut FilterStream, expected: &[&str]) -> state::PoolUpdate {
    let found = async {
        loop {
            let pool_update = filter.pool_update().await;
            if names(&pool_update) == expected {
                return pool_update;
            }
        }
    };
    tokio::time::timeout(SOON, found)
        .await
        .expect("no pool update")
}

#[tokio::test]
async fn an_eds_stream_from_elsewhere_that_never_acknowledges_delays_no_proxy() {
    let rig = rig().await;
    let home = channel(rig.address, HOME).await;
    let mut silent = EnvoyStream::over(channel(rig.address, ELSEWHERE).await, NODE).await;
    silent.next().await.unwrap();
    let mut envoy = EnvoyStream::over(home.clone(), NODE).await;
    assert_eq!(envoy.ports().await, [1]);
    let mut good = filter(&home, 1).await;
    pool_update_of(&mut good, &["a"]).await;
    rig.reset(vec![instance("a", 1), instance("b", 2)]).await;
    assert_eq!(envoy.ports().await, [1, 2]);
    pool_update_of(&mut good, &["a", "b"]).await;
}

#[tokio::test]
async fn one_from_the_same_host_holds_back_only_its_own_connection() {
    let rig = rig().await;
    let one = channel(rig.address, HOME).await;
    let two = channel(rig.address, HOME).await;
    let mut silent = EnvoyStream::over(two.clone(), NODE).await;
    silent.next().await.unwrap();
    let mut envoy = EnvoyStream::over(one.clone(), NODE).await;
    envoy.ports().await;
    let mut good = filter(&one, 1).await;
    let mut held = filter(&two, 2).await;
    pool_update_of(&mut good, &["a"]).await;
    assert!(
        held.pool_update_within(SOON).await.is_none(),
        "its own Envoy has no hosts yet"
    );
}

#[tokio::test]
async fn a_pool_update_waits_for_a_silent_eds_stream_so_long_and_no_longer_and_the_daemon_says_so()
{
    let rig = rig().await;
    let mut silent = EnvoyStream::over(channel(rig.address, HOME).await, NODE).await;
    silent.next().await.unwrap();
    let begun = tokio::time::Instant::now();
    let mut good = filter(&channel(rig.address, HOME).await, 1).await;
    assert_eq!(
        names(
            &good
                .pool_update_within(PATIENCE)
                .await
                .expect("no pool update")
        ),
        ["a"]
    );
    assert!(begun.elapsed() > EDS_ACK_WAIT_MAX / 2, "it did not wait");
    assert!(rig.shared.reports.counters().eds_unanswered > 0);
    // The late Envoy answers in the end, and pool updates wait for it again.
    rig.reset(vec![instance("a", 1), instance("b", 2)]).await;
    pool_update_of(&mut good, &["a", "b"]).await;
}

#[tokio::test]
async fn an_eds_stream_that_asks_for_nothing_is_closed() {
    let rig = rig().await;
    let mut mute = EnvoyStream::mute(channel(rig.address, ELSEWHERE).await).await;
    let ended = tokio::time::timeout(PATIENCE, mute.next())
        .await
        .expect("still open");
    assert!(ended.is_err_and(|status| status.message().contains("no request")));
}

#[tokio::test]
async fn a_stream_that_came_and_went_without_an_acknowledgement_leaves_nothing() {
    let rig = rig().await;
    let home = channel(rig.address, HOME).await;
    let mut silent = EnvoyStream::over(home.clone(), NODE).await;
    silent.next().await.unwrap();
    drop(silent);
    until("the stream is gone", || async {
        rig.shared.proxies.eds.borrow().open.is_empty()
    })
    .await;
    let mut good = filter(&home, 1).await;
    pool_update_of(&mut good, &["a"]).await;
}

/// Checks two daemons behind one name without a lease. Envoy opens the state stream to one daemon
/// and the EDS stream to the other.
#[tokio::test]
async fn state_at_one_daemon_and_eds_at_another_work_together() {
    let a = rig().await;
    let b = rig().await;
    let mut envoy = EnvoyStream::over(channel(b.address, HOME).await, NODE).await;
    assert_eq!(envoy.ports().await, [1]);
    let mut good = filter(&channel(a.address, HOME).await, 1).await;
    pool_update_of(&mut good, &["a"]).await;
    // The proxy gets a new endpoint later than Envoy does, as when hosts come from another source.
    let both = vec![instance("a", 1), instance("b", 2)];
    b.reset(both.clone()).await;
    a.reset(both).await;
    let removed_at = tokio::time::Instant::now();
    assert_eq!(envoy.ports().await, [1, 2]);
    let envoy_knows = removed_at.elapsed();
    let pool_update = pool_update_of(&mut good, &["a", "b"]).await;
    assert!(removed_at.elapsed() >= envoy_knows);
    assert!(
        pool_update.endpoints[1].age_ms >= 300,
        "sent {} ms after it appeared",
        pool_update.endpoints[1].age_ms
    );
    // A removed endpoint leaves the pool update before it leaves EDS.
    b.reset(vec![instance("a", 1)]).await;
    a.reset(vec![instance("a", 1)]).await;
    pool_update_of(&mut good, &["a"]).await;
    assert!(
        envoy.within(Duration::from_millis(500)).await.is_none(),
        "EDS removed it first"
    );
    assert_eq!(ports(&envoy.next().await.unwrap()), [1]);
}

#[tokio::test]
async fn metrics_say_which_proxies_have_no_eds_stream_here() {
    let daemon = crate::daemon::harness::daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let row = |name: &'static str, value| {
        let address = daemon.admin_address;
        async move {
            get(address, "/metrics")
                .await
                .1
                .contains(&format!("switchpoint_{name}{{pool=\"default\"}} {value}\n"))
        }
    };
    let home = channel(daemon.state_address, HOME).await;
    let mut good = filter(&home, 1).await;
    good.pool_update().await;
    assert!(
        row("proxies_without_eds", "1.0").await,
        "{}",
        get(daemon.admin_address, "/metrics").await.1
    );
    let mut envoy = EnvoyStream::over(home, NODE).await;
    envoy.ports().await;
    until("it has", || row("proxies_without_eds", "0.0")).await;
    assert!(row("eds_streams_unanswered", "0.0").await);
    daemon.stop().await;
}
