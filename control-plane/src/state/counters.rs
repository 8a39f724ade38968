//! The daemon's counters: those that the VMs of proxies report, and its own.
//!
//! A VM's report is cumulative since the VM started: the newest report replaces the one before, and
//! a lost report loses nothing. A VM that no longer reports keeps its counts (totals never fall),
//! but its outstanding requests stop counting. Beyond [`VMS_MAX`] or [`BYTES_MAX`], or the share of
//! an origin, the VMs that were silent longest are merged into a retired total of their pool. If
//! such a VM reports again it is counted twice; the only effect is a jump in the metrics.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::state;
use scheduler::{EndpointRef, Generation, Slot};
use tokio::time::Instant;

use crate::state::peer::{Origin, ProxyProcess};

mod arrivals;
mod local_totals;
pub use arrivals::{EndedRequests, PoolArrivals};

mod totals;
mod vm_totals;
pub use totals::{
    BandTotals, CounterTotals, EndpointTotals, MODELS_MAX, ModelTotals, OTHER, TotalsHistogram,
    TotalsLabel,
};

/// The most VMs counted one by one: the workers of a few hundred proxies. Typically a VM takes
/// about 10 KB.
pub const VMS_MAX: usize = 4096;

/// The most VMs of one origin counted one by one: the workers of the largest hosts, in several
/// pools.
const VMS_PER_ORIGIN_MAX: usize = VMS_MAX / 8;

/// The most memory of VMs counted one by one, in bytes (approximate): 4,096 VMs in a pool of 300
/// endpoints.
pub const BYTES_MAX: usize = 128 << 20;

/// The most memory of the VMs of one origin, in bytes.
const BYTES_PER_ORIGIN_MAX: usize = BYTES_MAX / 8;

/// When a limit is exceeded, VMs are retired until this many eighths of it are used, so that
/// retiring is rare.
const LEFT_EIGHTHS: usize = 7;

/// How long a VM's outstanding requests count after its last report; a VM reports about once a
/// second.
const OUTSTANDING_FRESH: Duration = Duration::from_secs(10);

/// All counters of the daemon.
#[derive(Debug, Default)]
pub struct CounterStore {
    /// Pool updates refused by proxies.
    pub pool_updates_refused: u64,
    /// EDS responses refused by Envoys.
    pub eds_refused: u64,
    /// EDS responses that were not applied in time: pool updates no longer wait for them.
    pub eds_unanswered: u64,
    /// Pools that proxies requested although their certificates may not have them.
    pub pools_refused: u64,
    /// Other messages of proxies that were out of limits.
    pub messages_refused: u64,
    /// Reports received.
    pub reports: u64,
    /// Parts of reports that could not be read, or named a pool that is not served.
    pub reports_invalid: u64,
    /// Writes of the snapshot file that failed.
    pub snapshot_write_errors: u64,
    vms: BTreeMap<VmKey, VmTotals>,
    /// The usage by the VMs of each origin.
    origins: BTreeMap<Origin, VmUsage>,
    all: VmUsage,
    pools: BTreeMap<String, MergedCounts>,
}

/// What is kept of the VMs of a pool together.
#[derive(Debug, Default)]
struct MergedCounts {
    /// Merged totals of retired VMs.
    retired: CounterTotals,
    /// Merged first reports: what VMs counted before this daemon knew them.
    first_reports: CounterTotals,
    /// What arrived since the last [`CounterStore::take_arrivals`].
    arrivals: PoolArrivals,
}

/// Number and memory of VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct VmUsage {
    vms: usize,
    bytes: usize,
}

/// A VM's counts of one pool, ready to be added.
#[derive(Debug)]
pub struct VmReport {
    pool: String,
    vm_id: u64,
    totals: CounterTotals,
}

/// Key of a VM's counts of one pool.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct VmKey {
    /// The process, as in [`ProxyProcess::id`].
    peer: u64,
    vm_id: u64,
    pool: String,
}

/// The key of the ext_proc server of this process. It cannot be the key of a VM: VMs have random
/// ids, and no peer has the id 0.
const EXT_PROC_SERVER: VmKey = VmKey {
    peer: 0,
    vm_id: 0,
    pool: String::new(),
};

#[derive(Debug)]
struct VmTotals {
    origin: Origin,
    totals: CounterTotals,
    bytes: usize,
    updated_at: Instant,
}

// === impl CounterStore ===

impl CounterStore {
    /// Records the counts of a process's VMs for the pools that are served. Returns the endpoints
    /// that got work since the last report or have some now. Endpoints of earlier stages have
    /// requests in flight but do not count as picked.
    pub fn report(
        &mut self,
        peer: &ProxyProcess,
        report: Vec<VmReport>,
        now: Instant,
    ) -> Vec<(String, EndpointRef)> {
        self.reports += 1;
        let mut picked = Vec::new();
        for VmReport {
            pool,
            vm_id,
            totals,
        } in report
        {
            let key = VmKey {
                peer: peer.id,
                vm_id,
                pool,
            };
            if !self.vms.contains_key(&key) {
                self.pools
                    .entry(key.pool.clone())
                    .or_default()
                    .first_reports
                    .add(&totals, false);
            }
            let ids = self.take(key.clone(), &peer.remote.origin, totals, now);
            picked.extend(ids.into_iter().map(|id| (key.pool.clone(), id)));
        }
        picked
    }

    /// Records the cumulative totals of this process's own ext_proc server for a pool. Returns
    /// endpoints like [`Self::report`].
    pub fn report_local(
        &mut self,
        pool: &str,
        totals: CounterTotals,
        now: Instant,
    ) -> Vec<EndpointRef> {
        self.take(
            VmKey {
                pool: pool.to_owned(),
                ..EXT_PROC_SERVER
            },
            &Origin::default(),
            totals,
            now,
        )
    }

    fn take(
        &mut self,
        key: VmKey,
        origin: &Origin,
        totals: CounterTotals,
        now: Instant,
    ) -> Vec<EndpointRef> {
        let before = self.remove(&key);
        if let Some(before) = &before {
            self.pools
                .entry(key.pool.clone())
                .or_default()
                .arrivals
                .add(before, &totals);
        }
        let before = before.unwrap_or_default();
        let more = |id: &(Generation, Slot), now: &EndpointTotals| {
            now.requests > 0 || now.picked > before.endpoints.get(id).map_or(0, |b| b.picked)
        };
        let picked = totals.endpoints.iter().filter(|(id, row)| more(id, row));
        let picked = picked
            .map(|(&(generation, slot), _)| EndpointRef { slot, generation })
            .collect();
        let bytes = totals.bytes() + size_of::<(VmKey, VmTotals)>();
        let of = self.origins.entry(origin.clone()).or_default();
        of.add(bytes);
        self.all.add(bytes);
        let of = *of;
        let all = self.all;
        self.vms.insert(
            key,
            VmTotals {
                origin: origin.clone(),
                totals,
                bytes,
                updated_at: now,
            },
        );
        if of.vms > VMS_PER_ORIGIN_MAX || of.bytes > BYTES_PER_ORIGIN_MAX {
            self.retire(Some(origin), VMS_PER_ORIGIN_MAX, BYTES_PER_ORIGIN_MAX);
        } else if all.vms > VMS_MAX || all.bytes > BYTES_MAX {
            self.retire(None, VMS_MAX, BYTES_MAX);
        }
        picked
    }

    #[must_use]
    pub fn totals(&self, pool: &str, now: Instant) -> CounterTotals {
        let mut totals = self
            .pools
            .get(pool)
            .map(|pool| pool.retired.clone())
            .unwrap_or_default();
        for (_, vm) in self.vms.iter().filter(|(key, _)| key.pool == pool) {
            totals.add(
                &vm.totals,
                now.saturating_duration_since(vm.updated_at) < OUTSTANDING_FRESH,
            );
        }
        totals
    }

    /// When a process last reported; `None` if it has not, or has been silent for so long that its
    /// counts were merged.
    #[must_use]
    pub fn reported_at(&self, peer: &ProxyProcess) -> Option<Instant> {
        let first = VmKey {
            peer: peer.id,
            ..EXT_PROC_SERVER
        };
        self.vms
            .range(first..)
            .take_while(|(key, _)| key.peer == peer.id)
            .map(|(_, vm)| vm.updated_at)
            .max()
    }

    /// What arrived in a pool since the last call. There is one caller for each pool.
    pub fn take_arrivals(&mut self, pool: &str) -> PoolArrivals {
        self.pools
            .get_mut(pool)
            .map(|pool| std::mem::take(&mut pool.arrivals))
            .unwrap_or_default()
    }

    /// The part of [`Self::totals`] that VMs counted before this daemon knew them.
    #[must_use]
    pub fn first_reports(&self, pool: &str) -> CounterTotals {
        self.pools
            .get(pool)
            .map(|pool| pool.first_reports.clone())
            .unwrap_or_default()
    }

    fn remove(&mut self, key: &VmKey) -> Option<CounterTotals> {
        let vm = self.vms.remove(key)?;
        self.all.subtract(vm.bytes);
        if let Some(of) = self.origins.get_mut(&vm.origin) {
            of.subtract(vm.bytes);
            if of.vms == 0 {
                self.origins.remove(&vm.origin);
            }
        }
        Some(vm.totals)
    }

    /// Retires the VMs that were silent longest, of one origin or of all, until [`LEFT_EIGHTHS`] of
    /// these limits are used.
    fn retire(&mut self, origin: Option<&Origin>, vms_max: usize, bytes_max: usize) {
        let of_origin = self
            .vms
            .iter()
            .filter(|(_, vm)| origin.is_none_or(|origin| vm.origin == *origin));
        let mut oldest: Vec<(Instant, VmKey)> = of_origin
            .map(|(key, vm)| (vm.updated_at, key.clone()))
            .collect();
        oldest.sort();
        for (_, key) in oldest {
            let taken = origin.map_or(self.all, |origin| {
                self.origins.get(origin).copied().unwrap_or_default()
            });
            if taken.vms <= vms_max * LEFT_EIGHTHS / 8
                && taken.bytes <= bytes_max * LEFT_EIGHTHS / 8
            {
                return;
            }
            if let Some(totals) = self.remove(&key) {
                self.pools
                    .entry(key.pool)
                    .or_default()
                    .retired
                    .add(&totals, false);
            }
        }
    }
}

// === impl VmUsage ===

impl VmUsage {
    fn add(&mut self, bytes: usize) {
        self.vms += 1;
        self.bytes += bytes;
    }

    fn subtract(&mut self, bytes: usize) {
        self.vms -= 1;
        self.bytes -= bytes;
    }
}

// === impl VmReport ===

impl VmReport {
    /// Reads the counts that a VM reported.
    #[must_use]
    pub fn from_vm(mut counters: state::VmCounters) -> Self {
        let pool = std::mem::take(&mut counters.pool);
        Self {
            pool,
            vm_id: counters.vm_id,
            totals: CounterTotals::from_vm(counters),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM's counts: picked requests and requests in flight, at slots 0, 1, ...
    fn counters(vm_id: u64, rows: &[(u64, u64)]) -> VmReport {
        let row = |(slot, &(picked, requests)): (usize, &(u64, u64))| {
            let slot = u32::try_from(slot).unwrap();
            state::EndpointCounters {
                slot,
                generation: 1,
                picked,
                requests,
                ..Default::default()
            }
        };
        let endpoints = rows.iter().enumerate().map(row).collect();
        VmReport::from_vm(state::VmCounters {
            pool: "p".to_owned(),
            vm_id,
            endpoints,
            ..Default::default()
        })
    }

    fn peer(id: u64, last: u8) -> ProxyProcess {
        let origin = Origin {
            certificate: None,
            address: Some([10, 0, 0, last].into()),
        };
        ProxyProcess {
            node_id: "n".to_owned(),
            id,
            remote: crate::state::peer::RemoteAddress {
                origin,
                socket: None,
            },
        }
    }

    #[test]
    fn endpoints_of_earlier_stages_with_work_are_reported() {
        let mut all = CounterStore::default();
        let mut reported = |rows: &[(u64, u64)]| {
            let found = all.report(&peer(1, 1), vec![counters(1, rows)], Instant::now());
            found
                .into_iter()
                .map(|(_, endpoint)| endpoint.slot.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            reported(&[(1, 0), (0, 1), (0, 0)]),
            [0, 1],
            "picked; at work; neither"
        );
        assert_eq!(
            reported(&[(1, 0), (0, 0), (0, 0)]),
            [0; 0],
            "nothing is outstanding"
        );
        assert_eq!(reported(&[(2, 0), (0, 0), (0, 0)]), [0]);
    }

    #[test]
    fn arrivals_are_what_known_vms_count_beyond_their_last_report() {
        let mut all = CounterStore::default();
        let now = Instant::now();
        let slot = |slot| (Generation(1), Slot(slot));
        let taken = |all: &mut CounterStore| all.take_arrivals("p").picked;
        all.report(&peer(1, 1), vec![counters(1, &[(1_000_000, 0)])], now);
        assert!(
            taken(&mut all).is_empty(),
            "the first report of a VM counts since its own start"
        );
        all.report(
            &peer(1, 1),
            vec![counters(1, &[(1_000_004, 0)]), counters(2, &[(9, 0)])],
            now,
        );
        all.report(
            &peer(1, 1),
            vec![counters(1, &[(1_000_005, 0), (3, 0)])],
            now,
        );
        assert_eq!(
            taken(&mut all),
            BTreeMap::from([(slot(0), 5), (slot(1), 3)])
        );
        assert!(taken(&mut all).is_empty());
        all.report(&peer(1, 1), vec![counters(1, &[(0, 0)])], now);
        assert!(
            taken(&mut all).is_empty(),
            "a count that falls is no arrival"
        );
    }

    #[test]
    fn one_origin_takes_its_share_of_memory_and_no_count_is_lost() {
        let mut all = CounterStore::default();
        let now = Instant::now();
        all.report(&peer(1, 1), vec![counters(1, &[(1, 0)])], now);
        for vm in 0..3_000 {
            let later = now + Duration::from_millis(vm + 1);
            all.report(&peer(2 + vm % 50, 2), vec![counters(vm, &[(1, 0)])], later);
            assert!(all.vms.len() <= VMS_PER_ORIGIN_MAX + 1);
        }
        // Large reports with many more models than allowed are cut to the limit and counted by
        // their size.
        let models = |vm: u64| {
            let error = |i: u64| state::Count {
                key: format!("{i}-{}", "x".repeat(300)),
                count: 1,
            };
            let model = |i: u64| state::ModelCounters {
                model: format!("{vm}-{i}"),
                errors: (0..100).map(error).collect(),
                ..Default::default()
            };
            VmReport::from_vm(state::VmCounters {
                pool: "p".to_owned(),
                vm_id: vm,
                models: (0..150).map(model).collect(),
                ..Default::default()
            })
        };
        for vm in 10_000..10_040 {
            all.report(
                &peer(99, 2),
                vec![models(vm)],
                now + Duration::from_secs(60),
            );
            assert!(
                all.all.bytes <= BYTES_PER_ORIGIN_MAX + (4 << 20),
                "{:?}",
                all.all
            );
        }
        assert!(
            all.vms.contains_key(&VmKey {
                peer: 1,
                vm_id: 1,
                pool: "p".to_owned()
            }),
            "the VM of another origin stays"
        );
        let totals = all.totals("p", now);
        assert_eq!(totals.endpoints[&(Generation(1), Slot(0))].picked, 3_001);
        let sum = all.vms.values().fold(VmUsage::default(), |mut sum, vm| {
            sum.add(vm.bytes);
            sum
        });
        assert_eq!(sum, all.all);
    }
}
