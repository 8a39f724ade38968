//! Workers of one proxy that read each other's load reports.

use pool_state::{LoadReportHead, ManagedPool, OwnLoadReport, PeerLoadReport, Timestamp};

pub(crate) struct SharingWorker {
    pub(crate) pool: ManagedPool,
    row: OwnLoadReport,
    peers: Vec<PeerLoadReport>,
}

impl SharingWorker {
    /// Makes one of `workers` workers.
    pub(crate) fn new(pool: ManagedPool, workers: usize) -> Self {
        Self {
            pool,
            row: OwnLoadReport::default(),
            peers: (0..workers).map(|_| PeerLoadReport::default()).collect(),
        }
    }
}

/// Lets each worker read the reports of all others and learn their ejections. Then each worker
/// ticks.
pub(crate) fn share_reports(workers: &mut [SharingWorker], now: Timestamp) {
    for from in 0..workers.len() {
        let SharingWorker { pool, row, .. } = &mut workers[from];
        let head = LoadReportHead {
            vm: from as u64 + 1,
            written: now,
            ring: 0,
        };
        let bytes = pool.write_load_report(row, head).to_vec();
        for (at, to) in workers.iter_mut().enumerate() {
            if at != from {
                let peer = &mut to.peers[from];
                to.pool.read_load_report(peer, bytes.clone(), true);
                for ejection in peer.ejections().collect::<Vec<_>>() {
                    to.pool.learn_ejection(ejection, now);
                }
            }
        }
    }
    workers.iter_mut().for_each(|worker| worker.pool.tick(now));
}
