//! The state of one pool and its only writer.
//!
//! `[ discovery ] -> [ Pool ] <- [ scraper ]`. The pool publishes one [`PoolView`] after another. A
//! view is an immutable value that readers get by a watch channel. A view is always complete, and
//! is published only when something changed.
//!
//! When discovery reports an endpoint, the endpoint gets the lowest free slot and a new generation.
//! When discovery removes an endpoint, the pool update loses the endpoint immediately. The endpoint
//! keeps its slot and stays in EDS as *departing* until every connected proxy has acknowledged a
//! pool update without it, or [`ACK_WAIT_MAX`] has passed. So nothing is recorded under a slot that
//! already belongs to another endpoint, and no ranked list names a host that Envoy has removed.
//!
//! Readiness comes from discovery. An endpoint without metrics stays routable with unknown metrics.
//! A failed scrape does not show that requests fail, and proxies see failing requests themselves.

mod adoption;
mod eds_hosts;
mod membership;
mod unconfirmed;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use discovery::Instance;
use scheduler::{EndpointMetrics, EndpointRef, PipelineSpec};

use self::eds_hosts::HostSelection;
use self::membership::fit_adapters;
pub use self::unconfirmed::UNCONFIRMED_MAX;
use self::unconfirmed::UnconfirmedEndpoints;
pub use super::clock::WallAndMonotonic;
pub use super::instance_metadata::{InstanceMetadata, MODEL_NAMES_BYTES_MAX};
pub use super::member::{Absence, Absentee, MetricsStatus, PoolMember};
pub use super::view::{EdsSet, PoolView, SourceStatus};
use crate::config::ConfigStatus;
use crate::pool::objects::PoolObjects;
use crate::scrape::ScrapeEvent;

/// The minimum time that a removed endpoint stays in EDS. A retry may still use a ranked list from
/// a pick just before the removal.
pub const EDS_REMOVAL_GRACE: Duration = Duration::from_secs(2);

/// The maximum time to wait for the acknowledgement of a removal. A proxy that is silent for this
/// long has lost its stream, or will get the whole state again.
pub const ACK_WAIT_MAX: Duration = Duration::from_secs(30);

/// The writer of a pool. The writer is synchronous, and the caller passes the time.
#[derive(Debug)]
pub struct Pool {
    /// The last view. [`Pool::take_view`] fills in its members, metrics and absent endpoints.
    view: PoolView,
    /// The members, sorted by slot.
    members: Vec<PoolMember>,
    metrics: Vec<EndpointMetrics>,
    departing: Vec<DepartingHost>,
    waiting: Vec<Absentee>,
    unconfirmed: UnconfirmedEndpoints,
    /// The unconfirmed endpoints that are not in the pool.
    dropped: Vec<Absentee>,
    hosts: HostSelection,
    touched: bool,
}

#[derive(Debug)]
struct DepartingHost {
    id: EndpointRef,
    instance: Arc<Instance>,
    at: WallAndMonotonic,
    /// The revision of the first pool update without the endpoint.
    revision: u64,
}

/// The initial settings of a pool.
#[derive(Clone, Debug, Default)]
pub struct PoolSettings {
    pub name: Arc<str>,
    /// The pipeline in use until another pipeline is configured.
    pub pipeline: PipelineSpec,
    /// The configuration file, if any.
    pub config_file: Option<Arc<str>>,
    /// The objects in use until other objects are read.
    pub objects: PoolObjects,
    /// The source of the objects, if any.
    pub objects_file: Option<Arc<str>>,
    /// The age above which metrics are unknown.
    pub staleness_max: Duration,
    pub generation_first: u32,
}

// === impl Pool ===

impl Pool {
    #[must_use]
    pub fn new(settings: PoolSettings) -> Self {
        let PoolSettings {
            name,
            pipeline,
            config_file,
            objects,
            objects_file,
            staleness_max,
            generation_first,
        } = settings;
        let now = SystemTime::now();
        let view = PoolView {
            name,
            revision: 1,
            members: Arc::from([]),
            metrics: Arc::from([]),
            metrics_revision: 1,
            pipeline: Arc::new(pipeline),
            objects: Arc::new(objects.spec),
            staleness_max,
            eds: EdsSet {
                revision: 1,
                addresses: Arc::from([]),
            },
            absent: Arc::from([]),
            generation_next: generation_first,
            sources: SourceStatus {
                complete: false,
                synced: false,
                discovery_error: None,
                config: ConfigStatus::new(config_file, now),
                objects: ConfigStatus::new(objects_file, now),
                objects_without_pool: Arc::new(objects.without_pool),
                errors: 0,
            },
        };
        let hosts = HostSelection::from_pipeline(&view.pipeline);
        Self {
            view,
            members: Vec::new(),
            metrics: Vec::new(),
            departing: Vec::new(),
            waiting: Vec::new(),
            unconfirmed: UnconfirmedEndpoints::default(),
            dropped: Vec::new(),
            hosts,
            touched: true,
        }
    }

    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.view.name
    }

    /// Records that discovery cannot read its source. The current set stays.
    pub fn set_discovery_error(&mut self, why: String) {
        if self.view.sources.discovery_error.as_ref() != Some(&why) {
            self.view.sources.discovery_error = Some(why);
            self.view.sources.errors += 1;
            self.touched = true;
        }
    }

    /// Applies a new configuration, or records why the newest configuration cannot be used.
    pub fn configure(&mut self, config: Result<PipelineSpec, String>, now: WallAndMonotonic) {
        self.touched = true;
        match config {
            Ok(pipeline) => {
                let changed = *self.view.pipeline != pipeline;
                self.view.sources.config.take(changed, now.wall);
                if changed {
                    self.view.revision += 1;
                    self.hosts
                        .follow(&pipeline, self.view.revision, now.instant);
                    self.view.pipeline = Arc::new(pipeline);
                    self.refresh_eds();
                }
            }
            Err(why) => {
                self.view.sources.config.refuse(why, now.wall);
                self.view.sources.errors += 1;
            }
        }
    }

    /// Keeps the text of the current configuration, which the console shows.
    pub fn set_config_text(&mut self, text: Option<Arc<str>>) {
        self.view.sources.config.text = text;
        self.touched = true;
    }

    /// Applies new objects, or records why the newest objects cannot be used.
    pub fn set_objects(&mut self, objects: Result<PoolObjects, String>, now: WallAndMonotonic) {
        self.touched = true;
        match objects {
            Ok(PoolObjects {
                spec: objects,
                without_pool,
                ..
            }) => {
                self.view.sources.objects_without_pool = Arc::new(without_pool);
                let changed = *self.view.objects != objects;
                self.view.sources.objects.take(changed, now.wall);
                if changed {
                    self.view.objects = Arc::new(objects);
                    self.view.revision += 1;
                }
            }
            Err(why) => {
                self.view.sources.objects.refuse(why, now.wall);
                self.view.sources.errors += 1;
            }
        }
    }

    /// Applies an event of the scraper. Drops events of an old generation.
    pub fn observe(&mut self, event: ScrapeEvent, now: WallAndMonotonic) {
        let (ScrapeEvent::Metrics(id, _)
        | ScrapeEvent::Failed(id, ..)
        | ScrapeEvent::Restarted(id)
        | ScrapeEvent::Cleared(id)) = &event;
        let Ok(position) = self.members.binary_search_by_key(&id.slot, |m| m.id.slot) else {
            return;
        };
        let (Some(member), Some(metrics)) = (
            self.members.get_mut(position),
            self.metrics.get_mut(position),
        ) else {
            return;
        };
        if member.id != *id {
            return;
        }
        let is_restart = match &event {
            ScrapeEvent::Restarted(_) | ScrapeEvent::Cleared(_) => true,
            ScrapeEvent::Metrics(..) => member.restarts.is_due,
            ScrapeEvent::Failed(..) => false,
        };
        if is_restart
            && member
                .restarts
                .may_change(&member.instance.name, now.instant)
        {
            member.id.generation = self.view.next_generation();
            // A cleared cache is no new process, so the metrics still hold.
            if !matches!(event, ScrapeEvent::Cleared(_)) {
                member.observed_at = None;
                member.set_status(MetricsStatus::Awaited, now.wall);
                *metrics = EndpointMetrics::default();
            }
            self.view.revision += 1;
            self.view.metrics_revision += 1;
            self.touched = true;
            return;
        }
        match event {
            ScrapeEvent::Metrics(_, observed) => {
                member.observed_at = Some(observed.observed_at);
                member.computed_tokens = observed.computed_tokens;
                self.touched |= member.set_status(MetricsStatus::Fresh, now.wall);
                if *metrics != observed.metrics {
                    *metrics = observed.metrics;
                    self.view.metrics_revision += 1;
                    self.touched = true;
                }
                if member.adapters != observed.adapters {
                    self.set_adapters(position, observed.adapters);
                }
            }
            ScrapeEvent::Failed(_, reason, _) => {
                let why = reason.to_string();
                let known = matches!(
                    member.metrics,
                    MetricsStatus::Fresh | MetricsStatus::Failing(_)
                );
                let status = if known {
                    MetricsStatus::Failing(why)
                } else {
                    MetricsStatus::Unknown(why)
                };
                self.touched |= member.set_status(status, now.wall);
            }
            ScrapeEvent::Restarted(_) | ScrapeEvent::Cleared(_) => {}
        }
    }

    fn set_adapters(&mut self, position: usize, adapters: Arc<[Box<str>]>) {
        let Some(member) = self.members.get_mut(position) else {
            return;
        };
        let before = member.models();
        member.adapters = adapters;
        fit_adapters(&mut self.members);
        if self
            .members
            .get(position)
            .is_some_and(|member| member.models() != before)
        {
            self.view.revision += 1;
            self.touched = true;
        }
    }

    /// Clears metrics that are older than `staleness_max`, and removes unconfirmed endpoints that
    /// do not answer or have been unconfirmed for [`UNCONFIRMED_MAX`].
    pub fn expire(&mut self, now: WallAndMonotonic) {
        let staleness_max = self.view.staleness_max;
        for (member, metrics) in self.members.iter_mut().zip(&mut self.metrics) {
            let stale = member
                .observed_at
                .is_some_and(|at| now.instant.saturating_duration_since(at) > staleness_max);
            if !stale {
                continue;
            }
            member.observed_at = None;
            let why = match &member.metrics {
                MetricsStatus::Failing(why) | MetricsStatus::Unknown(why) => why.clone(),
                MetricsStatus::Awaited | MetricsStatus::Fresh => {
                    format!("not scraped for {} ms", staleness_max.as_millis())
                }
            };
            member.set_status(MetricsStatus::Unknown(why), now.wall);
            *metrics = EndpointMetrics::default();
            self.view.metrics_revision += 1;
            self.touched = true;
        }
        if let Some(set) = self.unconfirmed.overdue(&self.members, now.instant) {
            self.apply_set(set, now);
        }
    }

    /// Removes departed endpoints after every proxy has `acknowledged` (by pool revision) their
    /// removal. Gives free slots to endpoints that wait for a slot.
    pub fn settle(&mut self, acknowledged: impl Fn(u64) -> bool, now: WallAndMonotonic) {
        let before = self.departing.len();
        self.departing.retain(|d| {
            let elapsed = now.instant.saturating_duration_since(d.at.instant);
            !eds_hosts::is_over(elapsed, || acknowledged(d.revision))
        });
        let fewer = self.hosts.settle(&acknowledged, now.instant);
        if self.departing.len() == before && !fewer {
            return;
        }
        if self.waiting.is_empty() {
            self.touched = true;
            self.refresh_eds();
        } else {
            let mut members = self.members.clone();
            self.admit_waiting(&mut members, now);
            self.replace_members(members);
        }
    }

    /// Returns whether no endpoint is leaving the pool update or EDS. Otherwise [`Self::settle`]
    /// has work.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.departing.is_empty() && self.hosts.is_settled()
    }

    /// Returns the current view, if it changed since the last call.
    pub fn take_view(&mut self) -> Option<PoolView> {
        if !std::mem::take(&mut self.touched) {
            return None;
        }
        let departing = self.departing.iter().map(|d| Absentee {
            instance: Arc::clone(&d.instance),
            absence: Absence::Departing(d.id),
            since: d.at.wall,
        });
        self.view.absent = departing
            .chain(self.waiting.iter().chain(&self.dropped).cloned())
            .collect();
        if *self.view.members != *self.members {
            self.view.members = self.members.as_slice().into();
        }
        self.view.metrics = self
            .members
            .iter()
            .zip(&self.metrics)
            .map(|(member, metrics)| member.metadata.fill_in(metrics, &member.adapters))
            .collect();
        Some(self.view.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::net::SocketAddr;

    use proptest::prelude::*;
    use scheduler::{ENDPOINTS_MAX, Generation, PluginSpec, ROLE_LABEL, Slot};
    use tokio::time::Instant;

    use super::*;
    use crate::scrape::{FailReason, ScrapedMetrics};

    const STALENESS_MAX: Duration = Duration::from_secs(5);

    fn pool() -> Pool {
        let pipeline = PipelineSpec::default();
        Pool::new(PoolSettings {
            name: "p".into(),
            pipeline,
            staleness_max: STALENESS_MAX,
            generation_first: 1,
            ..PoolSettings::default()
        })
    }

    fn instance(name: u16) -> Instance {
        Instance::new(
            format!("e{name}"),
            SocketAddr::from(([10, 0, 0, 1], name + 1)),
        )
    }

    fn at(origin: Instant, ms: u64) -> WallAndMonotonic {
        WallAndMonotonic {
            instant: origin + Duration::from_millis(ms),
            wall: SystemTime::UNIX_EPOCH + Duration::from_millis(ms),
        }
    }

    fn observed(queue: f32, observed_at: Instant) -> ScrapedMetrics {
        let metrics = EndpointMetrics {
            queue_depth: Some(queue),
            ..EndpointMetrics::default()
        };
        ScrapedMetrics {
            metrics,
            process_start: None,
            computed_tokens: None,
            adapters: Arc::default(),
            observed_at,
        }
    }

    #[test]
    fn metrics_too_old_are_unknown_and_say_since_when_and_why() {
        let origin = Instant::now();
        let mut pool = pool();
        pool.replace_instances(vec![instance(0)], at(origin, 0));
        let id = pool.take_view().unwrap().members[0].id;
        pool.observe(
            ScrapeEvent::Metrics(id, observed(3.0, origin)),
            at(origin, 10),
        );
        pool.observe(
            ScrapeEvent::Failed(id, FailReason::Timeout, 1),
            at(origin, 1000),
        );
        let view = pool.take_view().unwrap();
        assert_eq!(
            view.metrics[0].queue_depth,
            Some(3.0),
            "one failure does not make metrics unknown"
        );
        assert!(matches!(view.members[0].metrics, MetricsStatus::Failing(_)));
        pool.expire(at(origin, 5000));
        assert!(pool.take_view().is_none(), "not too old yet");
        pool.expire(at(origin, 5001));
        let view = pool.take_view().unwrap();
        assert_eq!(view.metrics[0], EndpointMetrics::default());
        assert_eq!(
            view.members[0].metrics,
            MetricsStatus::Unknown(FailReason::Timeout.to_string())
        );
        assert_eq!(view.members[0].since, at(origin, 5001).wall);
        assert_eq!(view.revision, 2, "metrics do not change the pool update");
    }

    #[test]
    fn adapters_are_served_beside_the_models_of_the_metadata_as_far_as_names_fit() {
        let origin = Instant::now();
        let metadata = discovery::Metadata::parse(br#"{"models": ["base"]}"#).unwrap();
        let named = |name: u16| instance(name).with_metadata(Some(Arc::new(metadata.clone())));
        let mut pool = pool();
        pool.replace_instances(vec![named(0), named(1), instance(2)], at(origin, 0));
        let view = pool.take_view().unwrap();
        let models = |view: &PoolView| {
            view.members
                .iter()
                .map(|member| member.models().len())
                .collect::<Vec<_>>()
        };
        assert_eq!(models(&view), [1, 1, 0]);
        let observe = |pool: &mut Pool, at_member: usize, adapters: Vec<Box<str>>| {
            let observed = ScrapedMetrics {
                adapters: adapters.into(),
                ..observed(1.0, origin)
            };
            pool.observe(
                ScrapeEvent::Metrics(view.members[at_member].id, observed),
                at(origin, 1),
            );
            pool.take_view()
        };
        let next = observe(&mut pool, 0, vec!["sql".into()]).unwrap();
        assert_eq!(
            (models(&next), next.revision),
            (vec![2, 1, 0], view.revision + 1)
        );
        assert!(
            observe(&mut pool, 0, vec!["sql".into()]).is_none(),
            "nothing new"
        );
        let untouched = observe(&mut pool, 2, vec!["sql".into()]).unwrap();
        assert_eq!(
            (models(&untouched), untouched.revision),
            (vec![2, 1, 0], next.revision),
            "it serves any model"
        );
        let long = "x".repeat(MODEL_NAMES_BYTES_MAX);
        let full = observe(&mut pool, 1, vec![long.into()]).unwrap();
        assert_eq!(
            models(&full),
            [2, 1, 0],
            "the endpoint stays, and its adapters are left out"
        );
        pool.replace_instances(vec![named(0), named(1)], at(origin, 2));
        assert_eq!(
            models(&pool.take_view().unwrap()),
            [2, 1],
            "adapters survive a new set"
        );
        assert_eq!(models(&observe(&mut pool, 0, Vec::new()).unwrap()), [1, 1]);
    }

    #[test]
    fn a_call_that_changes_nothing_publishes_no_view() {
        let origin = Instant::now();
        let mut pool = pool();
        pool.replace_instances(vec![instance(0), instance(1)], at(origin, 0));
        let view = pool.take_view().unwrap();
        pool.replace_instances(vec![instance(1), instance(0)], at(origin, 1));
        pool.settle(|_| true, at(origin, 2));
        pool.expire(at(origin, 3));
        assert!(pool.take_view().is_none());
        let id = view.members[0].id;
        pool.observe(
            ScrapeEvent::Metrics(id, observed(1.0, origin)),
            at(origin, 4),
        );
        assert!(pool.take_view().is_some());
        pool.observe(
            ScrapeEvent::Metrics(id, observed(1.0, origin)),
            at(origin, 5),
        );
        assert!(pool.take_view().is_none());
    }

    #[test]
    fn new_labels_are_the_same_life_and_a_new_address_is_another() {
        let origin = Instant::now();
        let mut pool = pool();
        pool.replace_instances(vec![instance(0)], at(origin, 0));
        let first = pool.take_view().unwrap().members[0].id;
        let labelled = Instance {
            labels: vec![("a".to_owned(), "b".to_owned())],
            ..instance(0)
        };
        pool.replace_instances(vec![labelled.clone()], at(origin, 1));
        let view = pool.take_view().unwrap();
        assert_eq!(
            (
                view.members[0].id,
                view.members[0].instance.labels.len(),
                view.revision
            ),
            (first, 1, 3)
        );
        let moved = Instance {
            address: SocketAddr::from(([10, 0, 0, 2], 1)),
            ..labelled
        };
        pool.replace_instances(vec![moved], at(origin, 2));
        let view = pool.take_view().unwrap();
        assert_ne!(view.members[0].id.slot, first.slot);
        assert!(view.members[0].id.generation > first.generation);
        assert_eq!(
            view.eds.addresses.len(),
            2,
            "the old address stays in EDS for a while"
        );
    }

    #[test]
    fn an_endpoint_that_finds_no_slot_waits_for_one() {
        let origin = Instant::now();
        let mut pool = pool();
        let full = u16::try_from(ENDPOINTS_MAX).unwrap();
        pool.replace_instances((0..full).map(instance).collect(), at(origin, 0));
        pool.replace_instances((full..2 * full).map(instance).collect(), at(origin, 1));
        let view = pool.take_view().unwrap();
        assert!(view.members.is_empty() && view.absent.len() == 2 * ENDPOINTS_MAX);
        assert!(view.absent.iter().any(|a| a.absence == Absence::NoFreeSlot));
        pool.settle(|_| true, at(origin, 10_000));
        let view = pool.take_view().unwrap();
        assert_eq!((view.members.len(), view.absent.len()), (ENDPOINTS_MAX, 0));
    }

    #[test]
    fn an_unconfirmed_endpoint_stays_while_it_answers_and_leaves_at_the_limit() {
        let origin = Instant::now();
        let mut pool = pool();
        let unconfirmed = |name: u16| Instance {
            unconfirmed: Some("node".into()),
            ..instance(name)
        };
        pool.replace_instances(vec![instance(0), instance(1)], at(origin, 0));
        let ids: Vec<EndpointRef> = pool
            .take_view()
            .unwrap()
            .members
            .iter()
            .map(|m| m.id)
            .collect();
        ids.iter().for_each(|&id| {
            pool.observe(
                ScrapeEvent::Metrics(id, observed(1.0, origin)),
                at(origin, 10),
            );
        });
        pool.replace_instances(vec![unconfirmed(0), unconfirmed(1)], at(origin, 100));
        let view = pool.take_view().unwrap();
        assert_eq!(
            view.members.iter().map(|m| m.id).collect::<Vec<_>>(),
            ids,
            "the same slots and generations"
        );
        pool.set_discovery_error("away".to_owned());
        pool.observe(
            ScrapeEvent::Failed(ids[0], FailReason::Timeout, 1),
            at(origin, 1000),
        );
        let later = at(origin, 5_500);
        pool.observe(
            ScrapeEvent::Metrics(ids[1], observed(1.0, later.instant)),
            later,
        );
        pool.expire(later);
        let view = pool.take_view().unwrap();
        assert_eq!(
            (view.members.len(), view.members[0].id),
            (1, ids[1]),
            "the silent one leaves"
        );
        assert_eq!(
            view.absent.iter().map(|a| a.absence).collect::<Vec<_>>(),
            [Absence::Departing(ids[0]), Absence::Unconfirmed]
        );
        assert!(
            view.sources.discovery_error.is_some(),
            "discovery is still away"
        );
        let limit = at(
            origin,
            100 + u64::try_from(UNCONFIRMED_MAX.as_millis()).unwrap(),
        );
        pool.observe(
            ScrapeEvent::Metrics(ids[1], observed(1.0, limit.instant)),
            limit,
        );
        pool.expire(limit);
        assert!(pool.take_view().unwrap().members.is_empty());
        pool.replace_instances(vec![instance(0), instance(1)], limit);
        assert_eq!(
            pool.take_view().unwrap().members.len(),
            2,
            "confirmed again"
        );
    }

    #[test]
    fn endpoints_keep_their_metrics_when_they_get_the_slots_of_another_daemon() {
        let origin = Instant::now();
        let mut pool = pool();
        pool.replace_instances((0..4).map(instance).collect(), at(origin, 0));
        let before = pool.take_view().unwrap();
        for (member, queue) in before.members.iter().zip([10.0, 11.0, 12.0, 13.0]) {
            pool.observe(
                ScrapeEvent::Metrics(member.id, observed(queue, origin)),
                at(origin, 10),
            );
        }
        let id = |slot, generation| EndpointRef {
            slot: Slot(slot),
            generation: Generation(generation),
        };
        pool.adopt(
            vec![
                (id(3, 70), instance(0)),
                (id(0, 71), instance(2)),
                (id(9, 72), instance(8)),
            ],
            at(origin, 20),
        );
        let view = pool.take_view().unwrap();
        let of = |name: u16| {
            let at = view
                .members
                .iter()
                .position(|member| *member.instance == instance(name))
                .unwrap();
            (view.members[at].id, view.metrics[at].queue_depth)
        };
        assert_eq!(
            [of(0), of(2)],
            [(id(3, 70), Some(10.0)), (id(0, 71), Some(12.0))]
        );
        assert_eq!(
            of(1),
            (before.members[1].id, Some(11.0)),
            "one that the other daemon does not know keeps its slot"
        );
        let (moved, metrics) = of(3);
        assert_eq!(
            (moved.slot, metrics),
            (Slot(2), None),
            "one whose slot is taken gets another"
        );
        assert!(
            before
                .members
                .iter()
                .all(|member| member.id.generation != moved.generation)
        );
        assert!(view.revision > before.revision && view.eds == before.eds);
    }

    #[test]
    fn a_proxy_that_never_acknowledges_holds_a_slot_for_a_bounded_time() {
        let origin = Instant::now();
        let mut pool = pool();
        pool.replace_instances(vec![instance(0)], at(origin, 0));
        pool.replace_instances(vec![], at(origin, 0));
        let wait = u64::try_from(ACK_WAIT_MAX.as_millis()).unwrap();
        pool.settle(|_| false, at(origin, wait - 1));
        assert!(!pool.is_settled());
        pool.settle(|_| false, at(origin, wait));
        assert!(pool.is_settled() && pool.take_view().unwrap().eds.addresses.is_empty());
    }

    #[test]
    fn an_engine_that_restarts_all_the_time_gets_one_generation_in_ten_seconds() {
        let origin = Instant::now();
        let mut pool = pool();
        pool.replace_instances(vec![instance(0)], at(origin, 0));
        let mut id = pool.take_view().unwrap().members[0].id;
        let mut changes = |pool: &mut Pool, ms: u64, restarts: bool| {
            let event = if restarts {
                ScrapeEvent::Restarted(id)
            } else {
                ScrapeEvent::Metrics(id, observed(1.0, origin))
            };
            pool.observe(event, at(origin, ms));
            let before = id;
            if let Some(view) = pool.take_view() {
                id = view.members[0].id;
            }
            id != before
        };
        let times: Vec<u64> = (0..60)
            .map(|n| n * 500)
            .filter(|ms| changes(&mut pool, *ms, true))
            .collect();
        assert_eq!(times, [0, 10_000, 20_000]);
        assert!(
            !changes(&mut pool, 29_900, false),
            "the last restart is due"
        );
        assert!(changes(&mut pool, 30_000, false));
        assert!(!changes(&mut pool, 50_000, false));
    }

    #[test]
    fn a_cleared_cache_is_a_new_generation_with_the_same_metrics() {
        let origin = Instant::now();
        let mut pool = pool();
        pool.replace_instances(vec![instance(0)], at(origin, 0));
        let before = pool.take_view().unwrap().members[0].id;
        pool.observe(
            ScrapeEvent::Metrics(before, observed(1.0, origin)),
            at(origin, 1),
        );
        pool.observe(ScrapeEvent::Cleared(before), at(origin, 2));
        let view = pool.take_view().unwrap();
        let id = view.members[0].id;
        assert!(id.generation > before.generation);
        assert_eq!(view.members[0].metrics, MetricsStatus::Fresh);
        let metrics = view.metrics[0].clone();
        assert_eq!(metrics, observed(1.0, origin).metrics);
        pool.observe(ScrapeEvent::Restarted(id), at(origin, 20_000));
        assert_ne!(pool.take_view().unwrap().metrics[0], metrics);
    }

    #[derive(Clone, Debug)]
    enum PoolStep {
        Reset(BTreeSet<u16>),
        Metrics(usize, f32),
        Failed(usize),
        Restarted(usize),
        Wait(u64),
        Acknowledge(u64),
        /// The endpoints at these ports have these slots in the file of another daemon.
        Adopt(BTreeMap<u16, u16>),
    }

    fn any_step() -> impl Strategy<Value = PoolStep> {
        prop_oneof![
            prop::collection::btree_set(0u16..12, 0..12).prop_map(PoolStep::Reset),
            (0usize..12, 0.0f32..9.0).prop_map(|(i, q)| PoolStep::Metrics(i, q)),
            (0usize..12).prop_map(PoolStep::Failed),
            (0usize..12).prop_map(PoolStep::Restarted),
            (0u64..4000).prop_map(PoolStep::Wait),
            (0u64..40).prop_map(PoolStep::Acknowledge),
            prop::collection::btree_map(0u16..14, 0u16..12, 0..12).prop_map(PoolStep::Adopt),
        ]
    }

    /// Returns a pipeline that splits requests by role.
    fn by_role() -> PipelineSpec {
        let mut spec = PipelineSpec::of_one_profile("decode", Vec::new(), 3);
        spec.plugins
            .push(PluginSpec::of_type("disagg-profile-handler"));
        spec.profile_handler = "disagg-profile-handler".to_owned();
        spec
    }

    fn with_role(name: u16, role: &str) -> Instance {
        Instance {
            labels: vec![(ROLE_LABEL.to_owned(), role.to_owned())],
            ..instance(name)
        }
    }

    fn hosts(view: &PoolView) -> Vec<u16> {
        view.eds
            .addresses
            .iter()
            .map(|address| address.port() - 1)
            .collect()
    }

    #[test]
    fn who_only_prefills_or_encodes_is_in_the_pool_update_but_no_host() {
        let origin = Instant::now();
        let settings = PoolSettings {
            name: "p".into(),
            pipeline: by_role(),
            staleness_max: STALENESS_MAX,
            generation_first: 1,
            ..PoolSettings::default()
        };
        let mut pool = Pool::new(settings);
        let all = vec![
            instance(0),
            with_role(1, "prefill"),
            with_role(2, "decode"),
            with_role(3, "encode"),
            with_role(4, "prefill-decode"),
            with_role(5, "encode-prefill"),
        ];
        pool.replace_instances(all.clone(), at(origin, 0));
        let view = pool.take_view().unwrap();
        assert_eq!((view.members.len(), hosts(&view)), (6, vec![0, 2, 4]));
        for member in view.members.iter() {
            let is_host = view.eds.addresses.contains(&member.instance.address);
            assert_eq!(
                member.eds_since,
                if is_host {
                    view.eds.revision
                } else {
                    view.eds.revision - 1
                },
                "only hosts wait for EDS"
            );
        }
        pool.replace_instances(all[..5].to_vec(), at(origin, 10));
        assert_eq!(
            hosts(&pool.take_view().unwrap()),
            [0, 2, 4],
            "departing makes no endpoint a host"
        );
    }

    #[test]
    fn hosts_follow_the_pipeline_more_at_once_and_fewer_when_proxies_know() {
        let origin = Instant::now();
        let mut pool = pool();
        pool.replace_instances(vec![instance(0), with_role(1, "prefill")], at(origin, 0));
        assert_eq!(hosts(&pool.take_view().unwrap()), [0, 1]);
        pool.configure(Ok(by_role()), at(origin, 100));
        let view = pool.take_view().unwrap();
        assert_eq!(
            (hosts(&view), pool.is_settled()),
            (vec![0, 1], false),
            "a proxy may still use the old pipeline"
        );
        pool.settle(|revision| revision < view.revision, at(origin, 3_000));
        assert!(pool.take_view().is_none());
        pool.settle(|revision| revision <= view.revision, at(origin, 3_000));
        assert_eq!(
            (hosts(&pool.take_view().unwrap()), pool.is_settled()),
            (vec![0], true)
        );
        pool.configure(Ok(PipelineSpec::default()), at(origin, 4_000));
        let view = pool.take_view().unwrap();
        assert_eq!(hosts(&view), [0, 1]);
        assert_eq!(
            view.members[1].eds_since, view.eds.revision,
            "the pool update names it when EDS does"
        );
    }

    proptest! {
        #[test]
        fn laws_hold_whatever_happens(steps in prop::collection::vec(any_step(), 0..60)) {
            let origin = Instant::now();
            let mut pool = pool();
            let mut ms = 0;
            let mut last = None::<PoolView>;
            let mut owner: BTreeMap<Generation, (Slot, SocketAddr)> = BTreeMap::new();
            let mut others = 1_000_000; // The generations of other daemons begin here.
            for step in steps {
                let id = |i: usize| last.as_ref().and_then(|v| v.members.get(i)).map(|m| m.id);
                let now = at(origin, ms);
                let adopts = matches!(step, PoolStep::Adopt(_));
                match step {
                    PoolStep::Reset(names) => pool.replace_instances(names.into_iter().map(instance).collect(), now),
                    PoolStep::Metrics(i, queue) => drop(id(i).map(|id| pool.observe(ScrapeEvent::Metrics(id, observed(queue, now.instant)), now))),
                    PoolStep::Failed(i) => drop(id(i).map(|id| pool.observe(ScrapeEvent::Failed(id, FailReason::Timeout, 1), now))),
                    PoolStep::Restarted(i) => drop(id(i).map(|id| pool.observe(ScrapeEvent::Restarted(id), now))),
                    PoolStep::Wait(more) => {
                        ms += more;
                        pool.expire(at(origin, ms));
                    }
                    PoolStep::Acknowledge(revision) => pool.settle(|wanted| wanted <= revision, now),
                    PoolStep::Adopt(slots) => {
                        others += 100;
                        let id = |slot| EndpointRef { slot: Slot(slot), generation: Generation(others + u32::from(slot)) };
                        let slots: BTreeMap<u16, u16> = slots.into_iter().map(|(slot, name)| (name, slot)).collect();
                        pool.adopt(slots.into_iter().map(|(name, slot)| (id(slot), instance(name))).collect(), now);
                    }
                }
                let Some(view) = pool.take_view() else { continue };
                let ids: Vec<EndpointRef> = view.members.iter().map(|m| m.id).collect();
                prop_assert!(ids.is_sorted_by(|a, b| a.slot < b.slot), "each slot has one endpoint: {:?}", ids);
                prop_assert_eq!(view.metrics.len(), ids.len());
                for absentee in view.absent.iter() {
                    if let Absence::Departing(id) = absentee.absence {
                        prop_assert!(ids.iter().all(|other| other.slot != id.slot), "a departing endpoint's slot is in use");
                        prop_assert!(view.eds.addresses.contains(&absentee.instance.address));
                    }
                }
                for member in view.members.iter() {
                    let before = owner.insert(member.id.generation, (member.id.slot, member.instance.address));
                    let now = (member.id.slot, member.instance.address);
                    prop_assert!(before.is_none_or(|before| before == now), "one generation for two endpoints");
                    prop_assert!(view.eds.addresses.contains(&member.instance.address), "in the pool update but not in EDS");
                    prop_assert!(member.eds_since <= view.eds.revision);
                }
                if let Some(last) = &last {
                    let same = last.members.iter().map(|m| (m.id, &m.instance)).eq(view.members.iter().map(|m| (m.id, &m.instance)));
                    prop_assert_eq!(same && !adopts, last.revision == view.revision, "a revision is one pool update");
                    prop_assert!(view.revision >= last.revision && view.metrics_revision >= last.metrics_revision);
                    prop_assert_eq!(last.eds.addresses == view.eds.addresses, last.eds.revision == view.eds.revision);
                }
                last = Some(view);
            }
        }
    }
}
