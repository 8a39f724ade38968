//! Tests what many pods with one certificate can take from a proxy with another certificate: each
//! limit of an origin, and what it allowed when only addresses were counted.

use std::sync::Arc;
use std::time::Duration;

use proto::{backlog, state};
use scheduler::flow::QueuedInBand;
use tokio::time::Instant;

use super::backlog_sum::{BacklogSum, QueuedRequests};
use super::counters::{CounterStore, NAME_KEPT, ReportedNames, VMS_MAX, VmReport};
use super::peer::{Origin, OriginQuotas, ProxyProcess, RemoteAddress, StreamQuota};
use super::placement_shares::tests::confirmed_of;
use crate::learn::latency::ObservationIntake;

fn pod_of(certificate: &str, last: u8) -> Origin {
    Origin {
        certificate: Some(certificate.into()),
        address: Some([10, 0, 0, last].into()),
    }
}

/// Returns the pods of a tenant that lies.
fn pods(count: u8) -> impl Iterator<Item = Origin> + Clone {
    (1..=count).map(|last| pod_of("tenant", last))
}

fn other() -> Origin {
    pod_of("other", 200)
}

/// Returns how many streams 20 proxies of another certificate get.
fn streams(kind: StreamQuota) -> usize {
    let quotas = Arc::new(OriginQuotas::default());
    let now = Instant::now();
    let take = |origin: &Origin| quotas.acquire(kind, origin, now).ok();
    let _taken: Vec<_> = pods(16)
        .flat_map(|pod| (0..4_096).map_while(move |_| take(&pod)))
        .collect();
    let got: Vec<_> = (0..20).map_while(|_| take(&other())).collect();
    got.len()
}

/// Returns how many requests are counted for two pods that each claim a million, beside ten
/// requests of another proxy.
fn queued() -> u64 {
    let mut sum = BacklogSum::default();
    let mut place = |origin: &Origin, requests| {
        let band = QueuedInBand {
            requests,
            ..QueuedInBand::default()
        };
        let newest = QueuedRequests::read(&backlog::write(&[band]));
        sum.replace(origin, &mut QueuedRequests::default(), newest);
    };
    pods(2).for_each(|pod| place(&pod, 1_000_000));
    place(&other(), 10);
    let own = QueuedRequests::read(&backlog::write(&[QueuedInBand {
        requests: 10,
        ..QueuedInBand::default()
    }]));
    let sent = backlog::read(&sum.without(&other(), &own, Instant::now()));
    sent.iter().map(|band| band.requests).sum()
}

/// Returns how many witnesses the learner sees in 16 pods, beside another proxy.
fn witnesses() -> usize {
    let mut intake = ObservationIntake::default();
    let now = Instant::now();
    intake.witness(1, &other(), now);
    let all: std::collections::BTreeSet<u64> = (2..)
        .zip(pods(16))
        .map(|(process, pod)| intake.witness(process, &pod, now))
        .collect();
    all.len()
}

/// Returns how many of the 1,000 shown names are invented, if two pods each invent names and repeat
/// the other's.
fn names() -> usize {
    let mut names = ReportedNames::new(1_000);
    let now = Instant::now();
    names.report(&other(), &[0], now);
    for first in 1..=8 {
        let made_up: Vec<u32> = (first * 125..(first + 1) * 125).collect();
        pods(2).for_each(|pod| names.report(&pod, &made_up, now));
    }
    let is_shown = |name: &u32| names.has(name);
    assert!(is_shown(&0) && now.elapsed() < NAME_KEPT);
    (1..1_125).filter(is_shown).count()
}

/// Returns how many of 256 VMs are still counted one by one after eight pods invented 512 each.
fn vms() -> usize {
    let mut store = CounterStore::default();
    let now = Instant::now();
    let process = |id, origin| ProxyProcess {
        node_id: "n".to_owned(),
        id,
        remote: RemoteAddress {
            origin,
            socket: None,
        },
    };
    let report = |vm_id| {
        vec![VmReport::from_vm(state::VmCounters {
            pool: "p".to_owned(),
            vm_id,
            ..state::VmCounters::default()
        })]
    };
    for id in 0..256 {
        store.report(&process(id, other()), report(id), now);
    }
    let later = now + Duration::from_secs(1);
    for (pod, origin) in (1_000..).zip(pods(8)) {
        for vm in 0..VMS_MAX as u64 / 8 {
            store.report(&process(pod, origin.clone()), report(vm), later);
        }
    }
    let is_kept = |id: &u64| store.reported_at(&process(*id, other())).is_some();
    (0..256).filter(is_kept).count()
}

#[test]
fn many_pods_with_one_certificate_have_the_share_of_one() {
    // While the daemon counted only addresses, these values were 0, 0, 1,000,000, 16, 999, 0 and
    // 100 %.
    assert_eq!(streams(StreamQuota::StateStream), 20);
    assert_eq!(streams(StreamQuota::EdsStream), 20);
    assert_eq!(queued(), 30);
    assert_eq!(witnesses(), 1);
    assert_eq!(names(), 125);
    assert_eq!(vms(), 256);
    let of_tenant = confirmed_of(&pods(5).collect::<Vec<_>>(), Some(5));
    assert!(of_tenant <= 2, "{of_tenant} %");
    let alone = confirmed_of(&pods(5).collect::<Vec<_>>(), None);
    assert!(alone >= 90, "a fleet with one certificate: {alone} %");
}
