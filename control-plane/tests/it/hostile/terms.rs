//! Proxies that hold state of another term of the daemon.

use std::time::Duration;

use proto::state::{self, daemon_message::Message, proxy_message};
use tokio::time::Instant;

use super::kit::{ELSEWHERE, HOME, channel, filter};
use crate::daemon::harness::{DaemonHarness, FilterStream, PATIENCE, instance, names};

async fn refuse(filter: &FilterStream, pool_update: &state::PoolUpdate, held: state::Version) {
    let refused = "older than the state in force".to_owned();
    let ack = state::Ack {
        pool: pool_update.pool.clone(),
        version: pool_update.version,
        refused,
        held: Some(held),
    };
    filter.say(proxy_message::Message::Ack(ack)).await;
}

#[tokio::test]
async fn a_daemon_whose_term_is_behind_numbers_its_pool_updates_above_what_the_proxy_holds() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut filter = filter(&channel(rig.address, HOME).await, 1).await;
    let first = filter.pool_update_unanswered().await;
    let held = state::Version {
        term: first.version.unwrap().term + 1_000_000,
        sequence: u64::MAX,
    };
    refuse(&filter, &first, held).await;
    let second = tokio::time::timeout(PATIENCE, filter.pool_update_unanswered())
        .await
        .expect("no newer pool update");
    let version = second.version.unwrap();
    assert!(
        (version.term, version.sequence) > (held.term, held.sequence),
        "{version:?}"
    );
    assert_eq!(names(&second), ["a"]);
    filter.ack(&second, "").await;
    assert_eq!(
        filter.metrics().await.pool_update,
        second.version,
        "metrics are of that pool update"
    );
    crate::daemon::harness::until("it is acknowledged", || async {
        rig.shared.proxies.acknowledged("default", 1)
    })
    .await;
}

/// Checks that a leader raises its term only after it has renewed its lease. A daemon whose process
/// was paused may have lost its lease without noticing.
#[tokio::test]
async fn a_leader_raises_its_term_only_after_its_lease_was_renewed() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let life = &rig.shared.life;
    life.require_lease();
    life.record_renewal(Instant::now());
    let mut filter = filter(&channel(rig.address, HOME).await, 1).await;
    let first = filter.pool_update_unanswered().await;
    let held = state::Version {
        term: first.version.unwrap().term + 1,
        sequence: 1,
    };
    refuse(&filter, &first, held).await;
    let raised = filter.pool_update_unanswered();
    tokio::pin!(raised);
    let early = tokio::time::timeout(Duration::from_millis(700), &mut raised).await;
    assert!(early.is_err(), "raised without a renewal");
    life.record_renewal(Instant::now());
    let second = tokio::time::timeout(PATIENCE, raised)
        .await
        .expect("no newer pool update");
    assert!(second.version.unwrap().term > held.term);
}

/// Checks that a term of the far future raises nothing, because no proxy of this release holds such
/// a term.
#[tokio::test]
async fn a_term_of_the_far_future_raises_nothing() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut filter = filter(&channel(rig.address, HOME).await, 1).await;
    let first = filter.pool_update_unanswered().await;
    let held = state::Version {
        term: u64::MAX - 1,
        sequence: 1,
    };
    refuse(&filter, &first, held).await;
    rig.reset(vec![instance("b", 2)]).await;
    let next = filter.pool_update_unanswered().await;
    assert_eq!(
        next.version.map(|version| version.term),
        first.version.map(|version| version.term)
    );
}

#[tokio::test]
async fn a_peer_that_lies_about_its_term_changes_no_other_term_and_gets_few_pool_updates() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut good = filter(&channel(rig.address, HOME).await, 1).await;
    let before = good.pool_update().await.version.unwrap();
    let mut bad = filter(&channel(rig.address, ELSEWHERE).await, 2).await;
    let mut pool_updates = 0;
    let lie = async {
        loop {
            let pool_update = bad.pool_update_unanswered().await;
            pool_updates += 1;
            let mut held = pool_update.version.unwrap();
            held.term = if pool_updates % 2 == 0 {
                u64::MAX
            } else {
                held.term + 5
            };
            refuse(&bad, &pool_update, held).await;
        }
    };
    let _: Result<(), _> = tokio::time::timeout(Duration::from_secs(1), lie).await;
    assert!(
        (2..10).contains(&pool_updates),
        "{pool_updates} pool updates"
    );
    rig.reset(vec![instance("b", 2)]).await;
    let after = good.pool_update().await.version.unwrap();
    assert!(
        after.term == before.term && after.sequence > before.sequence,
        "{before:?} {after:?}"
    );
    // The proxy that sent the false term is still served.
    while !matches!(bad.next().await.unwrap(), Message::Metrics(_)) {}
}
