//! Proxies that hold state of another life of the daemon.

use std::time::Duration;

use proto::state::{self, daemon_message::Message, proxy_message};

use super::kit::{ELSEWHERE, HOME, channel, filter};
use crate::daemon::harness::{DaemonHarness, FilterStream, PATIENCE, instance, names};

async fn refuse(filter: &FilterStream, roster: &state::Roster, held: state::Version) {
    let refused = "older than what is in force".to_owned();
    let ack = state::Ack { pool: roster.pool.clone(), version: roster.version, refused, held: Some(held) };
    filter.say(proxy_message::Message::Ack(ack)).await;
}

#[tokio::test]
async fn a_daemon_whose_term_is_behind_numbers_its_rosters_above_what_the_proxy_holds() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut filter = filter(&channel(rig.address, HOME).await, 1).await;
    let first = filter.roster_unanswered().await;
    let held = state::Version { term: first.version.unwrap().term + 1_000_000, sequence: u64::MAX };
    refuse(&filter, &first, held).await;
    let second = tokio::time::timeout(PATIENCE, filter.roster_unanswered()).await.expect("no newer roster");
    let version = second.version.unwrap();
    assert!((version.term, version.sequence) > (held.term, held.sequence), "{version:?}");
    assert_eq!(names(&second), ["a"]);
    filter.ack(&second, "").await;
    assert_eq!(filter.metrics().await.roster, second.version, "metrics are of that roster");
    crate::daemon::harness::until("it is acknowledged", || async { rig.shared.acknowledged("default", 1) }).await;
}

#[tokio::test]
async fn a_peer_that_lies_about_its_term_changes_it_for_nobody_else_and_gets_no_roster_after_roster() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let mut good = filter(&channel(rig.address, HOME).await, 1).await;
    let before = good.roster().await.version.unwrap();
    let mut bad = filter(&channel(rig.address, ELSEWHERE).await, 2).await;
    let mut rosters = 0;
    let lie = async {
        loop {
            let roster = bad.roster_unanswered().await;
            rosters += 1;
            let mut held = roster.version.unwrap();
            held.term = if rosters % 2 == 0 { u64::MAX } else { held.term + 5 };
            refuse(&bad, &roster, held).await;
        }
    };
    let _: Result<(), _> = tokio::time::timeout(Duration::from_secs(1), lie).await;
    assert!((2..10).contains(&rosters), "{rosters} rosters");
    rig.reset(vec![instance("b", 2)]).await;
    let after = good.roster().await.version.unwrap();
    assert!(after.term == before.term && after.sequence > before.sequence, "{before:?} {after:?}");
    // The liar is still served.
    while !matches!(bad.next().await.unwrap(), Message::Metrics(_)) {}
}
