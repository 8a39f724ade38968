//! Reports with impossible counts.

use prost::Message as _;
use proto::state::{self, proxy_message};
use tokio::time::Instant;

use super::kit::{ELSEWHERE, channel, filter};
use crate::daemon::harness::{DaemonHarness, instance, until};

fn report(counters: Vec<Vec<u8>>) -> proxy_message::Message {
    proxy_message::Message::Report(state::Report { counters })
}

fn vm(pool: &str, vm_id: u64) -> Vec<u8> {
    state::VmCounters {
        pool: pool.to_owned(),
        vm_id,
        prefix_evictions: 1,
        ..Default::default()
    }
    .encode_to_vec()
}

#[tokio::test]
async fn only_pools_that_are_served_are_counted() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let bad = filter(&channel(rig.address, ELSEWHERE).await, 2).await;
    bad.say(report(
        (0..1_000)
            .map(|pool| vm(&format!("nonsense-{pool}"), pool))
            .collect(),
    ))
    .await;
    bad.say(report(vec![vm("default", 1)])).await;
    until("the last counts", || async {
        rig.shared.reports.totals("default", Instant::now()).vms == 1
    })
    .await;
    let counters = rig.shared.reports.counters();
    let counted = (0..1_000)
        .filter(|pool| {
            counters
                .totals(&format!("nonsense-{pool}"), Instant::now())
                .vms
                > 0
        })
        .count();
    assert_eq!(counted, 0, "pools that are not served are counted");
}

#[tokio::test]
async fn one_host_pushes_out_no_others_counts() {
    let rig = DaemonHarness::start(vec![instance("a", 1)]).await;
    let good = filter(&channel(rig.address, super::kit::HOME).await, 1).await;
    good.say(report(vec![vm("default", 1)])).await;
    until("it counts", || async {
        rig.shared
            .reports
            .totals("default", Instant::now())
            .prefix_evictions
            == 1
    })
    .await;
    let bad = filter(&channel(rig.address, ELSEWHERE).await, 2).await;
    for first in (0..6_000).step_by(500) {
        bad.say(report(
            (first..first + 500)
                .map(|vm_id| vm("default", vm_id))
                .collect(),
        ))
        .await;
    }
    until("all of it is counted", || async {
        rig.shared
            .reports
            .totals("default", Instant::now())
            .prefix_evictions
            >= 6_001
    })
    .await;
    // If its VM had been retired, this report would be counted a second time.
    good.say(report(vec![vm("default", 1)])).await;
    good.say(report(vec![vm("default", 1)])).await;
    bad.say(report(vec![vm("default", 5_999)])).await;
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    let totals = rig.shared.reports.totals("default", Instant::now());
    assert_eq!(totals.prefix_evictions, 6_001);
    assert!(
        totals.vms <= 600,
        "{} VMs are kept of two processes",
        totals.vms
    );
}
