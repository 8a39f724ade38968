//! The daemon's counters: those that the wasm VMs of proxies report, and the daemon's own counters.
//!
//! A VM's report is cumulative since the VM started. The newest report replaces the previous one,
//! so a lost report loses nothing. A VM that no longer reports keeps its counts, so totals never
//! fall. The requests in flight of such a VM are no longer included. Beyond [`VMS_MAX`],
//! [`BYTES_MAX`] or the share of an origin, the VMs that were silent for the longest time are
//! merged into a retired total of their pool. VMs that were silent for [`VM_KEPT`] are merged too.
//! If such a VM reports again, it is counted twice. The only effect is a jump in the metrics.
//!
//! A proxy may invent its reports. So only counts of endpoints that the pool has or recently had
//! are accepted ([`KnownEndpoints`]), and an origin has a share of all names ([`ReportedNames`]).
//! No count grows faster than a VM can count (`growth`), and none is so large that what others add
//! to it is lost (`CountLimit`).

use std::collections::BTreeMap;
use std::time::Duration;

use proto::state;
use scheduler::{EndpointRef, Generation, Slot};
use tokio::time::Instant;

use crate::pool::writer::PoolView;
use crate::state::peer::{Origin, ProxyProcess};

use growth::GROWTH_BURST;
use pool_names::{OtherNames, PoolNames};
use totals::CountLimit;
use vm_usage::{LEFT_EIGHTHS, VmUsage, VmUsageByOrigin};

mod arrivals;
mod local_totals;
pub(crate) use arrivals::OWNERS_MAX;
pub use arrivals::{EndedRequests, PoolArrivals};

mod growth;
mod known_endpoints;
mod pool_names;
mod reported_names;
mod totals;
mod vm_totals;
mod vm_usage;
pub use known_endpoints::KnownEndpoints;
pub use reported_names::{NAME_KEPT, ReportedNames};
pub use totals::{
    BandTotals, CounterTotals, EndpointTotals, MODELS_MAX, ModelTotals, OTHER, TotalsHistogram,
    TotalsLabel,
};
pub use vm_usage::{BYTES_MAX, VMS_MAX};

/// The time for which a VM's requests in flight are included after its last report. A VM reports
/// about once a second.
const OUTSTANDING_FRESH: Duration = Duration::from_secs(10);

/// The time for which the counts of a silent VM are kept one by one. A proxy is hardly ever without
/// its daemon for so long.
const VM_KEPT: Duration = Duration::from_secs(3600);

/// The interval at which the store looks for names and VMs that are no longer reported.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(10);

/// All counters of the daemon.
#[derive(Debug, Default)]
pub struct CounterStore {
    /// The number of pool updates that proxies refused.
    pub pool_updates_refused: u64,
    /// The number of EDS responses that Envoys refused.
    pub eds_refused: u64,
    /// The number of EDS responses that Envoys did not apply in time. Pool updates no longer wait
    /// for them.
    pub eds_unanswered: u64,
    /// The number of pools that proxies requested although their certificates give no access.
    pub pools_refused: u64,
    /// The number of other messages of proxies that exceeded a limit.
    pub messages_refused: u64,
    /// The number of received reports.
    pub reports: u64,
    /// The number of parts of reports that could not be read, or named a pool that is not served.
    pub reports_invalid: u64,
    /// The number of failed writes of the snapshot file.
    pub snapshot_write_errors: u64,
    vms: BTreeMap<VmKey, VmTotals>,
    usage: VmUsageByOrigin,
    pools: BTreeMap<String, MergedCounts>,
    expired_at: Option<Instant>,
}

/// The counts of a pool that are kept for all VMs together.
#[derive(Debug, Default)]
struct MergedCounts {
    /// The endpoints whose counts are accepted; `None` until the store follows the pool. Until
    /// then, counts of any endpoint are accepted.
    known: Option<KnownEndpoints>,
    names: PoolNames,
    /// The merged totals of retired VMs.
    retired: CounterTotals,
    /// The sum of the first reports of VMs: the counts from before this daemon knew these VMs.
    first_reports: CounterTotals,
    /// The requests of each owner that arrived since the last [`CounterStore::take_arrivals`].
    arrivals: BTreeMap<Origin, PoolArrivals>,
}

/// A VM's counts of one pool, in a form that can be added.
#[derive(Debug)]
pub struct VmReport {
    pool: String,
    vm_id: u64,
    totals: CounterTotals,
}

/// The key of a VM's counts of one pool.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct VmKey {
    /// The process, as in [`ProxyProcess::id`].
    peer: u64,
    vm_id: u64,
    pool: String,
}

/// The key of the ext_proc server of this process. No VM has this key, because VMs have random ids,
/// and no peer has the id 0.
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
    /// The time until which the growth of its counts is used up.
    grown_until: Instant,
}

// === impl CounterStore ===

impl CounterStore {
    /// Records the counts of a process's VMs for the pools that are served. Returns the endpoints
    /// that got work since the last report or have work now. Endpoints of earlier stages, such as
    /// prefill, have requests in flight but are not counted as picked.
    pub fn report(
        &mut self,
        peer: &ProxyProcess,
        report: Vec<VmReport>,
        now: Instant,
    ) -> Vec<(String, EndpointRef)> {
        self.reports += 1;
        self.expire(now);
        let mut picked = Vec::new();
        for VmReport {
            pool,
            vm_id,
            mut totals,
        } in report
        {
            let merged = self.pools.entry(pool.clone()).or_default();
            if let Some(known) = &merged.known {
                known.keep(&mut totals);
            }
            merged.names.report(&peer.remote.origin, &totals, now);
            let key = VmKey {
                peer: peer.id,
                vm_id,
                pool,
            };
            if !self.vms.contains_key(&key) {
                let MergedCounts {
                    names,
                    first_reports,
                    ..
                } = merged;
                first_reports.add(&totals, false, names, OtherNames::Count);
            }
            let ids = self.take(key.clone(), &peer.remote.origin, totals, now);
            picked.extend(ids.into_iter().map(|id| (key.pool.clone(), id)));
        }
        picked
    }

    /// Drops the counts of endpoints that the pool neither has nor recently had, now and in later
    /// reports.
    pub fn follow(&mut self, view: &PoolView, now: Instant) {
        let pool = self.pools.entry(view.name.to_string()).or_default();
        let known = pool.known.get_or_insert_default();
        if known.follow(view, now) {
            known.keep(&mut pool.retired);
            known.keep(&mut pool.first_reports);
            for (_, vm) in self
                .vms
                .iter_mut()
                .filter(|(key, _)| *key.pool == *view.name)
            {
                known.keep(&mut vm.totals);
            }
        }
    }

    /// Records the cumulative totals of this process's own ext_proc server for a pool. Returns the
    /// endpoints that got work or have work now, as [`Self::report`] does.
    pub fn report_local(
        &mut self,
        pool: &str,
        totals: CounterTotals,
        now: Instant,
    ) -> Vec<EndpointRef> {
        self.expire(now);
        let merged = self.pools.entry(pool.to_owned()).or_default();
        merged.names.report(&Origin::default(), &totals, now);
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
        mut totals: CounterTotals,
        now: Instant,
    ) -> Vec<EndpointRef> {
        let before = self.remove(&key);
        let mut grown_until = now;
        if let Some(before) = &before {
            grown_until = before.cut_growth(&mut totals, now);
            let pool = self.pools.entry(key.pool.clone()).or_default();
            PoolArrivals::of_owner(&mut pool.arrivals, origin.owner()).add(&before.totals, &totals);
        }
        let before = before.map(|vm| vm.totals).unwrap_or_default();
        let more = |id: &(Generation, Slot), now: &EndpointTotals| {
            now.requests > 0 || now.picked > before.endpoints.get(id).map_or(0, |b| b.picked)
        };
        let picked = totals.endpoints.iter().filter(|(id, row)| more(id, row));
        let picked = picked
            .map(|(&(generation, slot), _)| EndpointRef { slot, generation })
            .collect();
        let bytes = totals.bytes() + size_of::<(VmKey, VmTotals)>();
        self.usage.add(origin, bytes);
        self.vms.insert(
            key,
            VmTotals {
                origin: origin.clone(),
                totals,
                bytes,
                updated_at: now,
                grown_until,
            },
        );
        if let Some((retired, max)) = self.usage.over(origin) {
            self.retire(retired.as_ref(), max, now);
        }
        picked
    }

    #[must_use]
    pub fn totals(&self, pool: &str, now: Instant) -> CounterTotals {
        let Some(merged) = self.pools.get(pool) else {
            return CounterTotals::default();
        };
        let names = &merged.names;
        let mut totals = CounterTotals::default();
        totals.add(&merged.retired, false, names, OtherNames::Count);
        for (_, vm) in self.vms.iter().filter(|(key, _)| key.pool == pool) {
            let silent = now.saturating_duration_since(vm.updated_at);
            let others = vm.other_names(now);
            totals.add(&vm.totals, silent < OUTSTANDING_FRESH, names, others);
        }
        totals
    }

    /// Returns the time when a process last reported. Returns `None` if it has not, or has been
    /// silent for so long that its counts were merged.
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

    /// Returns the requests of each owner that arrived in a pool since the last call. Each pool has
    /// only one caller.
    pub fn take_arrivals(&mut self, pool: &str) -> BTreeMap<Origin, PoolArrivals> {
        self.pools
            .get_mut(pool)
            .map(|pool| std::mem::take(&mut pool.arrivals))
            .unwrap_or_default()
    }

    /// Returns the part of [`Self::totals`] that VMs counted before this daemon knew these VMs.
    #[must_use]
    pub fn first_reports(&self, pool: &str) -> CounterTotals {
        let mut first = CounterTotals::default();
        if let Some(pool) = self.pools.get(pool) {
            first.add(&pool.first_reports, false, &pool.names, OtherNames::Count);
        }
        first
    }

    /// Forgets names that no VM reports any more, and merges VMs that were silent for a long time.
    fn expire(&mut self, now: Instant) {
        let is_due = |last| now.saturating_duration_since(last) >= EXPIRY_INTERVAL;
        if !self.expired_at.is_none_or(is_due) {
            return;
        }
        self.expired_at = Some(now);
        let silent: Vec<VmKey> = self
            .vms
            .iter()
            .filter(|(_, vm)| now.saturating_duration_since(vm.updated_at) >= VM_KEPT)
            .map(|(key, _)| key.clone())
            .collect();
        for key in silent {
            self.merge(&key, now);
        }
        for pool in self.pools.values_mut() {
            pool.names
                .expire(now, &mut [&mut pool.retired, &mut pool.first_reports]);
            pool.retired.cut(CountLimit::OF_RETIRED);
            pool.first_reports.cut(CountLimit::OF_FIRST_REPORTS);
        }
    }

    /// Merges the counts of a VM into the counts of retired VMs.
    fn merge(&mut self, key: &VmKey, now: Instant) {
        if let Some(vm) = self.remove(key) {
            let MergedCounts { names, retired, .. } =
                self.pools.entry(key.pool.clone()).or_default();
            retired.add(&vm.totals, false, names, vm.other_names(now));
        }
    }

    fn remove(&mut self, key: &VmKey) -> Option<VmTotals> {
        let vm = self.vms.remove(key)?;
        self.usage.subtract(&vm.origin, vm.bytes);
        Some(vm)
    }

    /// Retires the VMs that were silent for the longest time, of one owner, of one origin or of
    /// all, until they use at most [`LEFT_EIGHTHS`] eighths of the limits `max`.
    fn retire(&mut self, of: Option<&(usize, Origin)>, max: VmUsage, now: Instant) {
        let is_of = |vm: &VmTotals| {
            let own = |(level, of): &(usize, Origin)| vm.origin.levels().get(*level) == Some(of);
            of.is_none_or(own)
        };
        let mut taken = VmUsage::default();
        let mut oldest: Vec<(Instant, VmKey, usize)> = Vec::new();
        for (key, vm) in self.vms.iter().filter(|(_, vm)| is_of(vm)) {
            taken.add(vm.bytes);
            oldest.push((vm.updated_at, key.clone(), vm.bytes));
        }
        oldest.sort();
        for (_, key, bytes) in oldest {
            if !taken.is_over(max.eighths(LEFT_EIGHTHS)) {
                break;
            }
            taken.subtract(bytes);
            self.merge(&key, now);
        }
        for pool in self.pools.values_mut() {
            pool.retired.cut(CountLimit::OF_RETIRED);
        }
    }
}

// === impl VmTotals ===

impl VmTotals {
    /// Returns the treatment of the VM's names that pages do not show. If the VM was silent for
    /// long, its names have expired, and their counts are left out.
    fn other_names(&self, now: Instant) -> OtherNames {
        if now.saturating_duration_since(self.updated_at) < NAME_KEPT {
            OtherNames::Count
        } else {
            OtherNames::Leave
        }
    }

    /// Cuts the growth of newer counts of the VM. Returns their [`Self::grown_until`]. Keeps the
    /// time that the VM did not use until its next report only.
    fn cut_growth(&self, newer: &mut CounterTotals, now: Instant) -> Instant {
        let allowed = (now + GROWTH_BURST).saturating_duration_since(self.grown_until);
        let used = newer.cut_growth(&self.totals, allowed);
        (self.grown_until + used).max(self.updated_at)
    }
}

// === impl VmReport ===

impl VmReport {
    #[must_use]
    pub fn pool(&self) -> &str {
        &self.pool
    }

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
    use super::vm_usage::{BYTES_PER_ORIGIN_MAX, VMS_PER_ORIGIN_MAX};
    use super::*;
    use crate::pool::writer::{Pool, PoolSettings, WallAndMonotonic};

    /// Returns a VM's counts: picked requests and requests in flight, at slots 0, 1, ...
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
        let taken = |all: &mut CounterStore| {
            let by_owner = all.take_arrivals("p");
            let mut owners = by_owner.into_values();
            owners.next().map(|of| of.picked).unwrap_or_default()
        };
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

    /// Returns the counts of one VM with as many invented models, drop reasons and bands as
    /// `names`.
    fn made_up(vm_id: u64, names: i32) -> VmReport {
        VmReport::from_vm(state::VmCounters {
            pool: "p".to_owned(),
            vm_id,
            models: (0..names)
                .map(|name| state::ModelCounters {
                    model: format!("{vm_id}-{name}"),
                    requests: 1,
                    errors: (0..1_000)
                        .map(|status| state::Count {
                            key: status.to_string(),
                            count: 1,
                        })
                        .collect(),
                    ..Default::default()
                })
                .collect(),
            dropped: (0..names)
                .map(|name| state::Count {
                    key: format!("{vm_id}-{name}"),
                    count: 1,
                })
                .collect(),
            bands: (0..names)
                .map(|name| state::BandCounters {
                    priority: i32::try_from(vm_id).unwrap() * 1_000 + name,
                    held: 1,
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        })
    }

    #[test]
    fn made_up_names_are_a_share_and_go_when_nobody_reports_them() {
        let mut all = CounterStore::default();
        let now = Instant::now();
        let honest = || {
            VmReport::from_vm(state::VmCounters {
                pool: "p".to_owned(),
                vm_id: 1,
                models: vec![state::ModelCounters {
                    model: "real".to_owned(),
                    requests: 7,
                    ..Default::default()
                }],
                dropped: vec![state::Count {
                    key: "full".to_owned(),
                    count: 3,
                }],
                ..Default::default()
            })
        };
        let report = |all: &mut CounterStore, at| {
            let flood: Vec<VmReport> = (10..18).map(|vm| made_up(vm, 100)).collect();
            all.report(&peer(2, 2), flood, at);
            all.report(&peer(1, 1), vec![honest()], at);
            all.report(
                &peer(2, 2),
                (10..18).map(|vm| made_up(vm, 100)).collect(),
                at,
            );
        };
        report(&mut all, now);
        let totals = all.totals("p", now);
        let models = |totals: &CounterTotals| totals.models.keys().cloned().collect::<Vec<_>>();
        assert!(
            models(&totals).len() <= MODELS_MAX / 8 + 2,
            "{}",
            totals.models.len()
        );
        assert!(totals.dropped.len() <= 64 / 8 + 2 && totals.bands.len() <= 32);
        let requests: u64 = totals.models.values().map(|model| model.requests).sum();
        assert_eq!(requests, 7 + 8 * 100, "no request is lost");
        assert_eq!(totals.dropped["full"], 3);
        let statuses = totals.models.values().map(|model| model.errors.len()).max();
        assert!(statuses < Some(100), "{statuses:?}");
        // The proxy that invented the names is gone. The honest proxy still reports.
        for minutes in 1..=11 {
            let at = now + Duration::from_secs(60 * minutes);
            all.report(&peer(1, 1), vec![honest()], at);
        }
        let later = now + Duration::from_secs(660);
        let totals = all.totals("p", later);
        assert_eq!(models(&totals).len(), 1, "{:?}", models(&totals));
        assert_eq!((totals.dropped.len(), totals.bands.len()), (1, 0));
        let later = now + VM_KEPT + Duration::from_secs(1);
        all.report(&peer(1, 1), vec![honest()], later);
        assert_eq!(all.vms.len(), 1, "what they counted is merged");
        assert_eq!(models(&all.totals("p", later)).len(), 1);
    }

    #[test]
    fn counts_of_endpoints_that_never_were_are_not_taken() {
        let mut all = CounterStore::default();
        let now = Instant::now();
        let mut pool = Pool::new(PoolSettings {
            name: "p".into(),
            generation_first: 1,
            ..PoolSettings::default()
        });
        let instance = discovery::Instance::new("e".to_owned(), ([10, 0, 0, 1], 1).into());
        let wall = std::time::SystemTime::UNIX_EPOCH;
        pool.replace_instances(vec![instance], WallAndMonotonic { instant: now, wall });
        let view = pool.take_view().unwrap();
        let real = view.members[0].id;
        all.follow(&view, now);
        let rows = |generation: u32, slots: u32| {
            let row = |slot| state::EndpointCounters {
                slot,
                generation,
                picked: 1,
                requests: 1,
                ..Default::default()
            };
            VmReport::from_vm(state::VmCounters {
                pool: "p".to_owned(),
                vm_id: u64::from(generation),
                endpoints: (0..slots).map(row).collect(),
                ..Default::default()
            })
        };
        all.report(&peer(1, 1), vec![rows(real.generation.0, 1)], now);
        for generation in 0xffff_ff00..0xffff_ff08 {
            let made_up = vec![rows(generation, 1_024)];
            let picked = all.report(&peer(2, 2), made_up, now);
            assert!(picked.is_empty(), "nor do they hurry a scraper");
        }
        let totals = all.totals("p", now);
        let key = (real.generation, real.slot);
        assert_eq!(totals.endpoints.keys().copied().collect::<Vec<_>>(), [key]);
        assert_eq!(totals.endpoints[&key].requests, 1);
    }

    #[test]
    fn counts_beyond_all_measure_do_not_hide_those_of_others() {
        let mut all = CounterStore::default();
        let now = Instant::now();
        let report = |vm_id: u64, requests: u64, sum: f64| {
            let histogram = || {
                Some(state::Histogram {
                    counts: vec![requests],
                    sum,
                })
            };
            VmReport::from_vm(state::VmCounters {
                pool: "p".to_owned(),
                vm_id,
                endpoints: vec![state::EndpointCounters {
                    generation: 1,
                    picked: requests,
                    ..Default::default()
                }],
                models: vec![state::ModelCounters {
                    model: "m".to_owned(),
                    requests,
                    prompt_tokens: requests,
                    duration_ms: histogram(),
                    ..Default::default()
                }],
                pick_us: histogram(),
                ..Default::default()
            })
        };
        // Most of these VMs are retired, because one origin has a share of the VMs.
        for vm in 0..8_000 {
            let at = now + Duration::from_millis(vm);
            all.report(&peer(2, 2), vec![report(vm, u64::MAX, f64::MAX)], at);
        }
        let at = now + Duration::from_secs(11);
        all.report(&peer(1, 1), vec![report(1, 1, 1.0)], at);
        let shown = |all: &CounterStore| {
            let totals = all.totals("p", at);
            let first = all.first_reports("p");
            let [model, first] = [&totals, &first].map(|of| of.models.values().next().unwrap());
            #[expect(clippy::cast_precision_loss, reason = "as pages show them")]
            let counts = [
                totals.endpoints[&(Generation(1), Slot(0))].picked,
                model.requests,
                model.requests - first.requests,
                model.duration_ms.count(),
            ]
            .map(|count| count as f64);
            assert!(totals.pick_us.sum.is_finite() && model.duration_ms.sum < 1e19);
            (counts, model.prompt_tokens)
        };
        let (counts, tokens) = shown(&all);
        all.report(&peer(1, 1), vec![report(1, 3, 3.0)], at);
        let (later, later_tokens) = shown(&all);
        for (later, before) in later.into_iter().zip(counts) {
            assert_eq!(later - before, 2.0, "{before}");
        }
        assert_eq!(later_tokens - tokens, 2);
    }

    #[test]
    fn a_vm_counts_no_more_than_a_worker_handles_however_often_it_reports() {
        let mut all = CounterStore::default();
        let now = Instant::now();
        let shown = |all: &CounterStore, at| {
            let totals = all.totals("p", at);
            totals.endpoints[&(Generation(1), Slot(0))].picked
        };
        let report = |all: &mut CounterStore, picked, at| {
            all.report(&peer(1, 1), vec![counters(1, &[(picked, 0)])], at);
        };
        report(&mut all, 0, now);
        for ms in 0..=2_000 {
            report(&mut all, 1 << 36, now + Duration::from_millis(ms));
        }
        let later = now + Duration::from_secs(2);
        let most = 100_000 * (2 + GROWTH_BURST.as_secs());
        assert_eq!(shown(&all, later), most, "before, that was 2^36");
        // A VM that says nothing saves no time up, beyond that since its last report but one.
        let mut all = CounterStore::default();
        for second in 0..=3_600 {
            report(&mut all, 0, now + Duration::from_secs(second));
        }
        let later = now + Duration::from_secs(3_601);
        report(&mut all, 1 << 36, later);
        assert_eq!(shown(&all, later), 100_000 * (2 + GROWTH_BURST.as_secs()));
        // A VM that could not report for half an hour has counted for half an hour.
        let later = later + Duration::from_secs(1_800);
        report(&mut all, 150_000_000, later);
        assert_eq!(shown(&all, later), 150_000_000);
    }

    #[test]
    fn arrivals_have_a_limit() {
        let mut arrivals = PoolArrivals::default();
        for generation in 0..9_u32 {
            let rows = (0..1_024_u16).map(|slot| {
                let row = EndpointTotals {
                    picked: 1,
                    ..EndpointTotals::default()
                };
                ((Generation(generation), Slot(slot)), row)
            });
            let now = CounterTotals {
                endpoints: rows.collect(),
                ..CounterTotals::default()
            };
            arrivals.add(&CounterTotals::default(), &now);
        }
        assert_eq!(arrivals.picked.len(), 4 * 1_024);
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
                all.usage.all.bytes <= BYTES_PER_ORIGIN_MAX + (4 << 20),
                "{:?}",
                all.usage.all
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
        assert_eq!(sum, all.usage.all);
    }
}
