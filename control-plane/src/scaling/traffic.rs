//! The traffic of each group of endpoints, by the owner of the proxies that report it.
//!
//! The reports of an owner affect only its own mean request and its own demand. So no owner makes
//! the requests of others seem cheap. When an owner has no requests any more, its reports lose
//! their effect.

use std::collections::{BTreeMap, BTreeSet};

use learning::scaling::{RequestMix, ScalingRole, TrafficTotals, TrafficWindow};
use tokio::time::Instant;

use super::{GroupKey, SAMPLE_INTERVAL, float, key};
use crate::pool::writer::PoolView;
use crate::state::counters::{EndedRequests, OWNERS_MAX, PoolArrivals};
use crate::state::peer::Origin;

/// The time for which the mean request of an owner is used after its last requests, while other
/// owners have requests, in seconds.
const OWNER_KEPT_S: f64 = 600.0;

/// The maximum number of requests, and of tokens of each kind, that an owner has in a second. The
/// largest pool serves less. Without a maximum, one false number would hide all later numbers.
const REQUESTS_PER_S_MAX: f64 = 1e6;
const TOKENS_PER_S_MAX: f64 = 1e9;

/// The traffic of a pool.
#[derive(Debug, Default)]
pub(super) struct RecordedTraffic {
    pub(super) groups: BTreeMap<GroupKey, GroupTraffic>,
    /// The time when requests were last refused, which shows the demand for a pool without
    /// endpoints.
    pub(super) refused_at: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct GroupTraffic {
    owners: BTreeMap<Origin, OwnerTraffic>,
    /// The window of an owner without requests.
    silent: TrafficWindow,
    /// The time of the last record, in seconds.
    recorded_s: f64,
}

#[derive(Debug)]
struct OwnerTraffic {
    totals: TrafficTotals,
    window: TrafficWindow,
    /// The time of the owner's last requests, in seconds.
    active_s: f64,
}

// === impl RecordedTraffic ===

impl RecordedTraffic {
    /// Adds the requests that arrived since the last call to the groups of `view`. Groups that no
    /// longer exist are removed.
    pub(super) fn add(
        &mut self,
        view: &PoolView,
        arrivals: &BTreeMap<Origin, PoolArrivals>,
        at_s: f64,
    ) {
        let keys: BTreeSet<GroupKey> = view.members.iter().filter_map(key).collect();
        self.groups.retain(|key, _| keys.contains(key));
        for key in &keys {
            let new = || GroupTraffic::new(at_s);
            self.groups.entry(key.clone()).or_insert_with(new);
        }
        for (owner, arrivals) in arrivals {
            let picked = picked(view, arrivals);
            for (key, group) in &mut self.groups {
                let ended = ended(arrivals, &key.1);
                let more = TrafficTotals {
                    picked: float(arrived(&picked, key)),
                    ended: float(ended.requests),
                    prompt_tokens: float(ended.prompt_tokens),
                    cached_tokens: float(ended.cached_tokens),
                    output_tokens: float(ended.output_tokens),
                };
                group.add(owner, more, at_s);
            }
        }
        for group in self.groups.values_mut() {
            group.record(at_s);
        }
    }
}

// === impl GroupTraffic ===

impl GroupTraffic {
    fn new(at_s: f64) -> Self {
        Self {
            owners: BTreeMap::new(),
            silent: TrafficWindow::default(),
            recorded_s: at_s - SAMPLE_INTERVAL.as_secs_f64(),
        }
    }

    /// Returns the mean requests of each owner. `output_tokens` is the mean output of an owner of
    /// which no request has ended yet.
    pub(super) fn mixes(&self, output_tokens: f64) -> Vec<RequestMix> {
        let mix = |owner: &OwnerTraffic| owner.window.mix(output_tokens);
        self.owners.values().map(mix).collect()
    }

    /// Returns whether the records cover a time that is long enough to notice arrivals.
    pub(super) fn is_measured(&self) -> bool {
        self.silent.is_measured()
    }

    fn add(&mut self, owner: &Origin, more: TrafficTotals, at_s: f64) {
        if more == TrafficTotals::default() {
            return;
        }
        let elapsed_s = at_s - self.recorded_s;
        let silent = &self.silent;
        let new = || OwnerTraffic {
            totals: TrafficTotals::default(),
            window: silent.clone(),
            active_s: at_s,
        };
        let of_owner = self.owners.entry(owner.clone()).or_insert_with(new);
        let requests = |count: f64| count.min(REQUESTS_PER_S_MAX * elapsed_s);
        let tokens = |count: f64| count.min(TOKENS_PER_S_MAX * elapsed_s);
        let totals = &mut of_owner.totals;
        totals.picked += requests(more.picked);
        totals.ended += requests(more.ended);
        totals.prompt_tokens += tokens(more.prompt_tokens);
        totals.cached_tokens += tokens(more.cached_tokens);
        totals.output_tokens += tokens(more.output_tokens);
        of_owner.active_s = at_s;
    }

    /// Records the totals of each owner, and forgets the owners that have had no requests for long.
    fn record(&mut self, at_s: f64) {
        let active_s = |owner: &OwnerTraffic| owner.active_s;
        let newest = self.owners.values().map(active_s).fold(0.0, f64::max);
        self.owners
            .retain(|_, owner| newest - owner.active_s < OWNER_KEPT_S);
        while self.owners.len() > OWNERS_MAX {
            let owners = self.owners.iter();
            let oldest = owners.min_by(|(_, a), (_, b)| a.active_s.total_cmp(&b.active_s));
            let Some(oldest) = oldest.map(|(owner, _)| owner.clone()) else {
                break;
            };
            self.owners.remove(&oldest);
        }
        for owner in self.owners.values_mut() {
            owner.window.record(at_s, owner.totals);
        }
        self.silent.record(at_s, TrafficTotals::default());
        self.recorded_s = at_s;
    }
}

fn picked(view: &PoolView, arrivals: &PoolArrivals) -> BTreeMap<GroupKey, u64> {
    let mut picked: BTreeMap<GroupKey, u64> = BTreeMap::new();
    for member in view.members.iter() {
        let id = (member.id.generation, member.id.slot);
        let picks = arrivals.picked.get(&id).copied().unwrap_or(0);
        if let Some(key) = key(member) {
            let of_group = picked.entry(key).or_default();
            *of_group = of_group.saturating_add(picks);
        }
    }
    picked
}

fn added(counts: impl IntoIterator<Item = u64>) -> u64 {
    counts.into_iter().fold(0, u64::saturating_add)
}

/// Returns the requests that arrived at a group. A pick names the endpoint that decodes. So a
/// prefill group gets the picks of the other groups with the same models, or of all other groups if
/// no other group has these models.
fn arrived(picked: &BTreeMap<GroupKey, u64>, key: &GroupKey) -> u64 {
    let (role, models) = key;
    if *role != ScalingRole::Prefill {
        return picked.get(key).copied().unwrap_or(0);
    }
    let decodes = || {
        picked
            .iter()
            .filter(|((role, _), _)| *role != ScalingRole::Prefill)
    };
    let same: Vec<u64> = decodes()
        .filter(|((_, of), _)| of == models)
        .map(|(_, picks)| *picks)
        .collect();
    if same.is_empty() {
        added(decodes().map(|(_, picks)| *picks))
    } else {
        added(same)
    }
}

/// Returns the ended requests for these models. Returns all ended requests if the list is empty, or
/// if no ended request was for a listed model.
fn ended(arrivals: &PoolArrivals, models: &[Box<str>]) -> EndedRequests {
    let sum = |rows: &mut dyn Iterator<Item = &EndedRequests>| {
        rows.fold(EndedRequests::default(), |sum, row| sum.with(*row))
    };
    let named = sum(&mut models
        .iter()
        .filter_map(|model| arrivals.ended.get(&**model)));
    if named.requests > 0 {
        named
    } else {
        sum(&mut arrivals.ended.values())
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::pool::writer::{Pool, PoolSettings, WallAndMonotonic};

    fn owner(name: &str) -> Origin {
        Origin {
            certificate: Some(name.into()),
            address: None,
        }
    }

    /// A view of one endpoint.
    fn view() -> PoolView {
        let mut pool = Pool::new(PoolSettings {
            name: "p".into(),
            generation_first: 1,
            ..PoolSettings::default()
        });
        let instance = discovery::Instance::new("e".to_owned(), ([10, 0, 0, 1], 1).into());
        let now = WallAndMonotonic {
            instant: Instant::now(),
            wall: SystemTime::UNIX_EPOCH,
        };
        pool.replace_instances(vec![instance], now);
        pool.take_view().unwrap()
    }

    /// This many requests that arrived and ended, with this many prompt tokens in total.
    fn arrivals(view: &PoolView, requests: u64, tokens: u64) -> PoolArrivals {
        let id = view.members[0].id;
        let ended = EndedRequests {
            requests,
            prompt_tokens: tokens,
            cached_tokens: 0,
            output_tokens: tokens / 10,
        };
        PoolArrivals {
            picked: BTreeMap::from([((id.generation, id.slot), requests)]),
            ended: BTreeMap::from([("m".to_owned(), ended)]),
            refused: 0,
        }
    }

    #[test]
    fn what_one_owner_reports_changes_no_request_of_another_and_is_forgotten() {
        let view = view();
        let mut traffic = RecordedTraffic::default();
        let honest = || (owner("honest"), arrivals(&view, 50, 50_000));
        let mut at_s = 0.0;
        let mut add = |traffic: &mut RecordedTraffic, arrived: Vec<(Origin, PoolArrivals)>| {
            at_s += 5.0;
            traffic.add(&view, &arrived.into_iter().collect(), at_s);
        };
        for _ in 0..20 {
            add(&mut traffic, vec![honest()]);
        }
        let group = |traffic: &RecordedTraffic| {
            let group = traffic.groups.values().next().unwrap();
            assert!(group.is_measured());
            group.mixes(200.0)
        };
        let before = group(&traffic);
        assert_eq!(before[0].per_second, 10.0);
        assert_eq!(before[0].prompt_tokens, 1_000.0);
        let lie = (owner("liar"), arrivals(&view, u64::MAX, 0));
        add(&mut traffic, vec![honest(), lie]);
        for _ in 0..20 {
            add(&mut traffic, vec![honest()]);
        }
        let beside = group(&traffic);
        assert_eq!(beside[0], before[0]);
        assert_eq!(RequestMix::joined(&beside).prompt_tokens, 1_000.0);
        for _ in 0..120 {
            add(&mut traffic, vec![honest()]);
        }
        assert_eq!(group(&traffic), before, "the liar is forgotten");
        // An owner's own counts recover from a false number too.
        let own = (owner("honest"), arrivals(&view, u64::MAX, 0));
        add(&mut traffic, vec![own]);
        for _ in 0..20 {
            add(&mut traffic, vec![honest()]);
        }
        assert_eq!(group(&traffic), before);
    }
}
