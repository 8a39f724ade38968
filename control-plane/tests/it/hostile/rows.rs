//! Reports of one proxy about endpoints, as another proxy receives them.

use std::time::Duration;

use exchange::Timestamp;
use pool_state::{Ejection, LoadReportSum, PeerLoadReport};
use proto::load_report::PEER_EJECTION_MS_MAX;
use proto::state;
use scheduler::in_flight::EndpointLoad;
use scheduler::{EndpointRef, Generation, Slot};

use super::kit::{
    ELSEWHERE, HOME, channel, endpoints, failures, filter, largest_row, peers, row_of_failures,
    share,
};
use crate::daemon::harness::{DaemonHarness, FilterStream, PATIENCE, instance};

async fn rig() -> (DaemonHarness, FilterStream, FilterStream) {
    let rig = DaemonHarness::start(
        (1..=4)
            .map(|port| instance(&format!("e{port}"), port))
            .collect(),
    )
    .await;
    let mut good = filter(&channel(rig.address, HOME).await, 1).await;
    let mut bad = filter(&channel(rig.address, ELSEWHERE).await, 2).await;
    good.pool_update().await;
    bad.pool_update().await;
    (rig, good, bad)
}

/// Returns a row with this load, encoded as the daemon does it.
fn row_of_load(at: EndpointRef, load: EndpointLoad) -> Vec<u8> {
    let mut sum = LoadReportSum::default();
    sum.reset(vec![at], []);
    sum.add(at, load);
    sum.row(pool_state::LoadReportHead::default(), [], &[])
}

fn load(peers: state::PeerLoad, at: EndpointRef) -> EndpointLoad {
    let mut sum = LoadReportSum::default();
    let mut read = PeerLoadReport::default();
    sum.reset(vec![at], []);
    sum.read(&mut read, peers.row);
    sum.load(at)
}

#[tokio::test]
async fn a_failure_that_a_hostile_peer_reports_ejects_for_half_a_minute_at_most() {
    let (rig, mut good, bad) = rig().await;
    for (written, at, until) in [
        (0, 0, u64::MAX),
        (5, u64::MAX, u64::MAX),
        (u64::MAX, u64::MAX, u64::MAX),
        (u64::MAX - 1, 0, u64::MAX),
    ] {
        let lie = |endpoint| Ejection {
            at: Timestamp(at),
            failures: u32::MAX,
            until: Timestamp(until),
            endpoint,
            outside: false,
            by_answers: false,
            is_own: false,
        };
        let lies: Vec<Ejection> = endpoints(&rig).into_iter().take(2).map(lie).collect();
        bad.say(share(row_of_failures(written, &lies), Vec::new()))
            .await;
        let heard = tokio::time::timeout(PATIENCE, async {
            loop {
                let (now, heard) = failures(&peers(&mut good).await.row);
                if heard.len() == 2 {
                    return (now, heard);
                }
            }
        });
        let (now, heard) = heard.await.unwrap();
        for ejection in heard {
            let ms = ejection.until.ms_since(now);
            assert!(
                ejection.at <= now && ms <= PEER_EJECTION_MS_MAX,
                "ejected for {ms} ms more"
            );
        }
    }
}

#[tokio::test]
async fn after_a_row_of_the_largest_numbers_the_sum_is_right_again() {
    let (rig, mut good, bad) = rig().await;
    let at = endpoints(&rig)[0];
    let mut third = filter(&channel(rig.address, HOME).await, 3).await;
    third.pool_update().await;
    let mut small = EndpointLoad {
        requests: 3,
        prefill_tokens: 70,
        ..EndpointLoad::default()
    };
    small.prefills.prompts = 2;
    small.prefills.prompt_tokens = 70;
    let tell = || share(row_of_load(at, small), Vec::new());
    third.say(tell()).await;
    bad.say(share(largest_row(&endpoints(&rig)), Vec::new()))
        .await;
    while load(peers(&mut good).await, at).requests < 0xffff {}
    drop(bad);
    let mended = async {
        loop {
            third.say(tell()).await;
            if load(peers(&mut good).await, at).requests == 3 {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, mended).await.unwrap();
    // The test reads once more, because the daemon may have made the last message before it got the
    // new load.
    third.say(tell()).await;
    assert_eq!(load(peers(&mut good).await, at), small);
}

#[tokio::test]
async fn many_processes_of_one_host_stand_for_a_few() {
    let (rig, mut good, _bad) = rig().await;
    let at = endpoints(&rig)[0];
    let mut crowd = Vec::new();
    for process_id in 100..180 {
        let elsewhere = channel(rig.address, ELSEWHERE).await;
        let one = filter(&elsewhere, process_id).await;
        one.say(share(
            row_of_load(
                at,
                EndpointLoad {
                    requests: 1,
                    ..EndpointLoad::default()
                },
            ),
            Vec::new(),
        ))
        .await;
        crowd.push(one);
    }
    let mut most = 0;
    let end = tokio::time::Instant::now() + Duration::from_secs(1);
    while tokio::time::Instant::now() < end {
        most = most.max(peers(&mut good).await.active);
        crowd[0]
            .say(share(
                row_of_load(
                    at,
                    EndpointLoad {
                        requests: 1,
                        ..EndpointLoad::default()
                    },
                ),
                Vec::new(),
            ))
            .await;
    }
    assert!(most <= 17, "each pick counts {most} times");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_good_proxy_placed_arrives_though_a_hostile_one_places_without_end() {
    const LEAST: u64 = 1_000_000;
    let (rig, mut good, bad) = rig().await;
    let at = endpoints(&rig)[0];
    let mut third = filter(&channel(rig.address, HOME).await, 3).await;
    let flood = tokio::spawn(async move {
        let mut junk = Vec::new();
        let nonsense = EndpointRef {
            slot: Slot(1),
            generation: Generation(1),
        };
        (0..23).for_each(|block| proto::placements::push(&mut junk, nonsense, &vec![block; 100]));
        while bad.tell(share(Vec::new(), junk.clone())).await {}
    });
    let sent: Vec<u64> = (LEAST..LEAST + 50).collect();
    let blocks = sent.clone();
    let sending = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        for block in blocks {
            let mut placements = Vec::new();
            proto::placements::push(&mut placements, at, &[block]);
            third.say(share(Vec::new(), placements)).await;
            // A proxy also reads its messages.
            let _ = third.next().await;
        }
        third
    });
    let mut arrived = Vec::new();
    let hears = async {
        while arrived.len() < sent.len() {
            let received = peers(&mut good).await;
            arrived.extend(
                proto::placements::each(&received.placements)
                    .flat_map(|(_, blocks)| blocks)
                    .filter(|block| *block >= LEAST),
            );
        }
    };
    let _ = tokio::time::timeout(PATIENCE, hears).await;
    flood.abort();
    sending.abort();
    assert_eq!(arrived, sent, "placements of a good proxy were dropped");
}
