//! The order of EDS and pool updates: a filter gets an endpoint only after its Envoy has the
//! endpoint as a host, and loses the endpoint before Envoy does.

use std::time::Duration;

use control_plane::pool::writer::EDS_REMOVAL_GRACE;
use control_plane::serve::state_stream::EDS_ABSENT_GRACE;

use super::harness::{DaemonHarness, EnvoyStream, FilterStream, instance, names, ports, until};

/// The time in which no message may arrive. It is long enough for a wrong message, which a correct
/// daemon never sends.
const QUIET: Duration = Duration::from_millis(700);

#[tokio::test]
async fn an_added_endpoint_waits_for_the_eds_acknowledgement() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut envoy = EnvoyStream::connect(rig.address, "n").await;
    assert_eq!(envoy.ports().await, [1]);
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    assert_eq!(names(&filter.pool_update().await), ["a"]);

    rig.reset(vec![instance("a", 1), instance("b", 2)]).await;
    let response = envoy.next().await.unwrap();
    assert_eq!(ports(&response), [1, 2]);
    let partial = filter.pool_update_within(QUIET).await;
    assert!(
        partial.is_none_or(|r| names(&r) == ["a"]),
        "b before Envoy acknowledged it"
    );
    envoy.ack(&response).await;
    assert_eq!(names(&filter.pool_update().await), ["a", "b"]);
}

#[tokio::test]
async fn every_eds_stream_of_the_node_must_acknowledge_but_no_other() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut one = EnvoyStream::connect(rig.address, "n").await;
    let mut two = EnvoyStream::connect(rig.address, "n").await;
    let mut other = EnvoyStream::connect(rig.address, "other").await;
    for envoy in [&mut one, &mut two, &mut other] {
        assert_eq!(envoy.ports().await, [1]);
    }
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    filter.pool_update().await;

    rig.reset(vec![instance("a", 1), instance("b", 2)]).await;
    assert_eq!(one.ports().await, [1, 2]);
    let late = two.next().await.unwrap();
    let partial = filter.pool_update_within(QUIET).await;
    assert!(
        partial.is_none_or(|r| names(&r) == ["a"]),
        "one of two streams is not enough"
    );
    two.ack(&late).await;
    assert_eq!(
        names(&filter.pool_update().await),
        ["a", "b"],
        "the stream of another node need not acknowledge"
    );
}

#[tokio::test]
async fn a_removed_endpoint_leaves_the_pool_update_at_once_and_eds_after_a_grace() {
    let rig = DaemonHarness::start(vec![instance("a", 1), instance("b", 2)]).await;
    let mut envoy = EnvoyStream::connect(rig.address, "n").await;
    assert_eq!(envoy.ports().await, [1, 2]);
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    filter.pool_update().await;

    rig.reset(vec![instance("a", 1)]).await;
    assert_eq!(names(&filter.pool_update().await), ["a"]);
    let left = std::time::Instant::now();
    assert_eq!(envoy.ports().await, [1]);
    assert!(
        left.elapsed() > EDS_REMOVAL_GRACE / 2,
        "EDS removed the host while ranked lists may still name it"
    );
}

#[tokio::test]
async fn a_removed_endpoint_stays_in_eds_until_every_filter_acknowledged() {
    let rig = DaemonHarness::start(vec![instance("a", 1), instance("b", 2)]).await;
    let mut envoy = EnvoyStream::connect(rig.address, "n").await;
    envoy.ports().await;
    let (mut quick, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let (mut slow, _) = FilterStream::connect(rig.address, "n", 2, &["default"]).await;
    quick.pool_update().await;
    slow.pool_update().await;

    rig.reset(vec![instance("a", 1)]).await;
    quick.pool_update().await;
    let unanswered = slow.pool_update_unanswered().await;
    assert!(
        envoy.within(EDS_REMOVAL_GRACE + QUIET).await.is_none(),
        "the slow filter may still name it"
    );
    slow.ack(&unanswered, "").await;
    assert_eq!(envoy.ports().await, [1]);
}

#[tokio::test]
async fn a_slot_is_lent_again_only_after_every_filter_acknowledged() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    let first = filter.pool_update().await.endpoints[0].clone();

    rig.reset(vec![instance("b", 2)]).await;
    let second = loop {
        let pool_update = filter.pool_update_unanswered().await;
        if let [b] = pool_update.endpoints.as_slice() {
            break b.clone();
        }
    };
    assert_ne!(second.slot, first.slot, "a's slot is not free yet");
    assert!(second.generation > first.generation);

    drop(filter); // No proxy is left that could acknowledge the removal.
    let freed = || async {
        rig.shared
            .pools
            .views
            .borrow()
            .get("default")
            .unwrap()
            .absent
            .is_empty()
    };
    until("a departs", freed).await;
    rig.reset(vec![instance("b", 2), instance("c", 3)]).await;
    let slot_of_c = || async {
        let pools = rig.shared.pools.views.borrow().clone();
        let c = pools
            .get("default")
            .unwrap()
            .members
            .iter()
            .find(|m| m.instance.name == "c")
            .map(|m| m.id);
        c.is_some_and(|id| {
            u32::from(id.slot.0) == first.slot && id.generation.0 > second.generation
        })
    };
    until("c gets the free slot with a new generation", slot_of_c).await;
}

#[tokio::test]
async fn without_an_eds_stream_endpoints_come_after_a_short_delay() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let begun = std::time::Instant::now();
    let (mut filter, _) = FilterStream::connect(rig.address, "istio", 1, &["default"]).await;
    assert_eq!(names(&filter.pool_update().await), ["a"]);
    assert!(
        begun.elapsed() >= EDS_ABSENT_GRACE,
        "Envoy had no time to subscribe"
    );

    rig.reset(vec![instance("a", 1), instance("b", 2)]).await;
    let b = loop {
        let pool_update = filter.pool_update().await;
        if names(&pool_update) == ["a", "b"] {
            break pool_update.endpoints[1].clone();
        }
    };
    assert!(
        b.age_ms >= 300,
        "published {} ms after it appeared",
        b.age_ms
    );
}

#[tokio::test]
async fn a_refused_set_keeps_the_endpoint_away_until_a_good_one() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut envoy = EnvoyStream::connect(rig.address, "n").await;
    envoy.ports().await;
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    filter.pool_update().await;

    rig.reset(vec![instance("a", 1), instance("b", 2)]).await;
    let response = envoy.next().await.unwrap();
    envoy
        .send(&response.nonce, Some("no such thing"), &["default"])
        .await;
    assert!(
        envoy.within(QUIET).await.is_none(),
        "the same set is not sent again"
    );
    let partial = filter.pool_update_within(Duration::from_millis(10)).await;
    assert!(partial.is_none_or(|r| names(&r) == ["a"]));
    let why = rig
        .shared
        .proxies
        .eds
        .borrow()
        .open
        .values()
        .find_map(|s| s.pools["default"].refused.clone());
    assert_eq!(why.as_deref(), Some("no such thing"));
    assert_eq!(rig.shared.reports.counters().eds_refused, 1);

    rig.reset(vec![instance("a", 1), instance("b", 2), instance("c", 3)])
        .await;
    assert_eq!(envoy.ports().await, [1, 2, 3]);
    loop {
        if names(&filter.pool_update().await) == ["a", "b", "c"] {
            break;
        }
    }
}
