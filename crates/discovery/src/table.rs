//! The instances of one component, and which of them subscribers see. This module has no I/O and
//! reads no clock: the caller passes the time.
//!
//! ```text
//!           Apply, Reset                    metadata                 owns its address
//!  record ───────────────▶ ready? ──yes──▶ known or none? ──yes──▶ and is valid? ──yes──▶ Ready: published (Added)
//!                            │ no             │ no                     │ no                  (unconfirmed: published as such)
//!                            ▼                ▼                        ▼
//!                         NotReady         Pending                  Refused               not published (Removed if it was)
//! ```
//! The running time of a function depends on the instances that it changes and on those with the
//! same address, never on the size of the table. An event carries the full value, and is published
//! only if the value changed.
//!
//! At most [`INSTANCES_MAX`] instances are published. Later instances wait as refused until a
//! published one is removed. The oldest record then takes its place.
//!
//! **Mass disappearance.** If the first list after an outage lacks more than half of the published
//! instances, the backend has more likely lost its state than the servers have gone. The missing
//! instances then stay unchanged for [`HOLD`]. The backend lists again meanwhile. Instances that
//! are still missing at the end are removed.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

mod metadata_fetches;
mod room;
use metadata_fetches::KnownMetadata;
pub use metadata_fetches::{METADATA_POLL_INTERVAL, METADATA_RETRY_FIRST};
pub(crate) use metadata_fetches::{MetadataRequest, MetadataResponse};

use crate::backend::{InstanceReadiness, InstanceRecord, MetadataSource};
use crate::event::{ClockReading, InstanceEvent, InstanceState, InstanceSummary, MetadataPolicy};
use crate::instance::{INSTANCES_MAX, Instance, LocalAddresses, validate_instance};

/// The time for which the removals of a mass disappearance are delayed. An API server that restarts
/// with cold caches, or an etcd whose leases expired together, is complete again within this time.
/// Meanwhile, requests to servers that are really gone fail over.
pub const HOLD: Duration = Duration::from_secs(10);

/// The minimum number of published instances for a delay of removals. Half of a smaller pool may
/// well disappear at the same time.
pub const HOLD_INSTANCES_MIN: usize = 4;

/// The maximum number of removed instances kept for display.
const REMOVED_MAX: usize = 256;

/// The instances of a component.
#[derive(Debug, Default)]
pub(crate) struct InstanceTable {
    policy: MetadataPolicy,
    local: LocalAddresses,
    rows: BTreeMap<Arc<str>, InstanceRow>,
    /// The claims on each address; the instance with the greatest claim gets the address.
    claims: HashMap<SocketAddr, BTreeSet<AddressClaim>>,
    due: BTreeSet<(Instant, Arc<str>)>,
    removed: VecDeque<InstanceSummary>,
    hold: Option<RemovalHold>,
    published_count: usize,
    /// The instances that would be published if there were room.
    waiting: BTreeSet<Arc<str>>,
    /// Changes of the published set that subscribers do not have yet.
    events: Vec<InstanceEvent>,
}

type AddressClaim = (u64, String, Arc<str>);

#[derive(Debug)]
struct InstanceRow {
    record: Arc<InstanceRecord>,
    metadata: KnownMetadata,
    /// The instance as it would be published if it gets its address, or the reason why it is not
    /// published.
    candidate: Result<Arc<Instance>, InstanceState>,
    claim: Option<(SocketAddr, AddressClaim)>,
    published: Option<Arc<Instance>>,
    state: InstanceState,
    since: SystemTime,
}

#[derive(Debug)]
struct RemovalHold {
    until: Instant,
    /// The instances that change when the hold ends. Each instance then gets the record in this
    /// map, or is removed if the map has no record for it.
    doomed: BTreeMap<Arc<str>, Option<Arc<InstanceRecord>>>,
}

// === impl InstanceTable ===

impl InstanceTable {
    pub(crate) fn new(policy: MetadataPolicy, local: LocalAddresses) -> Self {
        Self {
            policy,
            local,
            ..Self::default()
        }
    }

    /// Returns the changes of the published set since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<InstanceEvent> {
        std::mem::take(&mut self.events)
    }

    /// Applies the whole set of records. `after_outage` says that the backend could not be reached
    /// before. Returns whether the backend should list again.
    pub(crate) fn reset(
        &mut self,
        records: Vec<Arc<InstanceRecord>>,
        after_outage: bool,
        now: ClockReading,
    ) -> bool {
        let mut new: BTreeMap<Arc<str>, Arc<InstanceRecord>> = records
            .into_iter()
            .map(|record| (record.name().into(), record))
            .collect();
        let lost: Vec<Arc<str>> = self
            .published_instances()
            .map(|(id, _)| id)
            .filter(|id| new.get(*id).is_none_or(|r| !r.readiness.may_serve()))
            .cloned()
            .collect();
        let suspicious = self.published_count >= HOLD_INSTANCES_MIN
            && lost.len() * 2 > self.published_count
            && (after_outage || self.hold.is_some());
        let held = self.hold.take();
        if suspicious {
            let until = held.as_ref().map_or(now.instant + HOLD, |hold| hold.until);
            let doomed = lost
                .iter()
                .map(|id| (Arc::clone(id), new.remove(id)))
                .collect();
            self.hold = Some(RemovalHold { until, doomed });
        }
        let absent: Vec<Arc<str>> = self
            .rows
            .keys()
            .filter(|id| !new.contains_key(*id) && !self.is_held(id))
            .cloned()
            .collect();
        for id in absent {
            self.remove(&id, now);
        }
        let mut new: Vec<_> = new.into_iter().collect();
        new.sort_by_key(|(_, record)| record.freshness);
        for (id, record) in new {
            self.put(&id, record, now);
        }
        self.fill(now);
        for id in self.hold.iter().flat_map(|hold| hold.doomed.keys()) {
            if let Some(row) = self.rows.get_mut(id) {
                row.set_state(InstanceState::RemovalHeld, now);
            }
        }
        suspicious && held.is_none()
    }

    /// Applies a new record, or a new value of a known one.
    pub(crate) fn apply(&mut self, record: Arc<InstanceRecord>, now: ClockReading) {
        let id: Arc<str> = record.name().into();
        self.release(&id);
        self.put(&id, record, now);
        self.fill(now);
    }

    /// Removes a record.
    pub(crate) fn delete(&mut self, id: &str, now: ClockReading) {
        self.release(id);
        self.remove(id, now);
        self.fill(now);
    }

    /// Ends the hold if its time is over.
    pub(crate) fn tick(&mut self, now: ClockReading) {
        let Some(hold) = self.hold.take_if(|hold| hold.until <= now.instant) else {
            return;
        };
        for (id, fate) in hold.doomed {
            match fate {
                Some(record) => self.put(&id, record, now),
                None => self.remove(&id, now),
            }
        }
        self.fill(now);
    }

    /// Returns the time when the next fetch or the end of a hold is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let hold = self.hold.as_ref().map(|hold| hold.until);
        self.due
            .first()
            .map(|(at, _)| *at)
            .into_iter()
            .chain(hold)
            .min()
    }

    /// Returns the published instances, by id.
    pub(crate) fn published_instances(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<Instance>)> {
        self.rows
            .iter()
            .filter_map(|(id, row)| row.published.as_ref().map(|instance| (id, instance)))
    }

    /// Returns all recently seen instances.
    pub(crate) fn seen(&self) -> Vec<InstanceSummary> {
        let rows = self.rows.iter().map(|(id, row)| InstanceSummary {
            id: Arc::clone(id),
            generation: row.record.instance.generation.clone(),
            address: row
                .claim
                .as_ref()
                .map_or(row.record.instance.address, |(address, _)| *address),
            state: row.state.clone(),
            since: row.since,
        });
        rows.chain(self.removed.iter().cloned()).collect()
    }

    fn is_held(&self, id: &str) -> bool {
        self.hold
            .as_ref()
            .is_some_and(|hold| hold.doomed.contains_key(id))
    }

    /// Ends the hold of one instance, because the backend has reported it again.
    fn release(&mut self, id: &str) {
        if let Some(hold) = &mut self.hold {
            hold.doomed.remove(id);
        }
    }

    fn put(&mut self, id: &Arc<str>, record: Arc<InstanceRecord>, now: ClockReading) {
        let wants_fetch = record.readiness.may_serve()
            && matches!(record.metadata, MetadataSource::At(_))
            && self.policy != MetadataPolicy::Ignored;
        let mut changed = true;
        match self.rows.get_mut(id) {
            Some(row) => {
                changed = row.record.instance != record.instance
                    || row.record.readiness != record.readiness;
                let same_life = row.record.instance.generation == record.instance.generation
                    && row.record.metadata == record.metadata;
                if !same_life && let Some(at) = std::mem::take(&mut row.metadata).due {
                    self.due.remove(&(at, Arc::clone(id)));
                }
                row.record = record;
            }
            None => {
                let metadata = KnownMetadata::default();
                let candidate = Err(InstanceState::Removed);
                let row = InstanceRow {
                    record,
                    metadata,
                    candidate,
                    claim: None,
                    published: None,
                    state: InstanceState::Removed,
                    since: now.wall,
                };
                self.rows.insert(Arc::clone(id), row);
            }
        }
        if wants_fetch && changed {
            self.schedule(id, now.instant);
        }
        self.refresh(id, now);
    }

    fn remove(&mut self, id: &str, now: ClockReading) {
        let Some(mut row) = self.rows.remove(id) else {
            return;
        };
        let id: Arc<str> = id.into();
        self.waiting.remove(&id);
        if let Some(at) = row.metadata.due.take() {
            self.due.remove(&(at, Arc::clone(&id)));
        }
        if row.published.take().is_some() {
            self.published_count -= 1;
            self.events.push(InstanceEvent::Removed(Arc::clone(&id)));
        }
        if let Some((address, claim)) = row.claim.take()
            && let Some(heir) = self.withdraw(address, &claim)
        {
            self.settle(&heir, now);
        }
        let Instance {
            generation,
            address,
            ..
        } = row.record.instance.clone();
        self.removed.truncate(REMOVED_MAX - 1);
        self.removed.push_front(InstanceSummary {
            id,
            generation,
            address,
            state: InstanceState::Removed,
            since: now.wall,
        });
    }

    /// Updates an instance, and the instances that compete for its address.
    fn refresh(&mut self, id: &Arc<str>, now: ClockReading) {
        let Some(row) = self.rows.get_mut(id) else {
            return;
        };
        let candidate = row.candidate(self.policy, self.local);
        let claim = candidate
            .as_ref()
            .ok()
            .map(|c| (c.address, row.claim_of(id)));
        let before = std::mem::replace(&mut row.claim, claim.clone());
        row.candidate = candidate;
        let mut loser = None;
        let mut heir = None;
        if before != claim {
            heir = before.and_then(|(address, claim)| self.withdraw(address, &claim));
            if let Some((address, claim)) = claim {
                let claims = self.claims.entry(address).or_default();
                loser = claims.last().map(|(_, _, id)| Arc::clone(id));
                claims.insert(claim);
            }
        }
        // An address is taken from its owner before another instance gets it, so two published
        // instances never have the same address.
        let (gaining, losing): (Vec<_>, Vec<_>) = loser
            .iter()
            .chain([id])
            .chain(&heir)
            .partition(|id| self.owner(id) == Some(id));
        for id in losing.into_iter().chain(gaining) {
            self.settle(id, now);
        }
    }

    /// Returns the id with the greatest claim on the address of an instance.
    fn owner(&self, id: &str) -> Option<&Arc<str>> {
        let (address, _) = self.rows.get(id)?.claim.as_ref()?;
        let (_, _, owner) = self.claims.get(address)?.last()?;
        Some(owner)
    }

    /// Removes a claim and returns the id that has the address now.
    fn withdraw(&mut self, address: SocketAddr, claim: &AddressClaim) -> Option<Arc<str>> {
        let claims = self.claims.get_mut(&address)?;
        claims.remove(claim);
        let heir = claims.last().map(|(_, _, id)| Arc::clone(id));
        if heir.is_none() {
            self.claims.remove(&address);
        }
        heir
    }

    /// Publishes the change of an instance, if the instance has changed.
    fn settle(&mut self, id: &Arc<str>, now: ClockReading) {
        let held = self.is_held(id);
        let owner = self.owner(id).cloned();
        let Some(row) = self.rows.get_mut(id) else {
            return;
        };
        let has_room = row.published.is_some() || self.published_count < INSTANCES_MAX;
        self.waiting.remove(id);
        let (published, state) = match &row.candidate {
            Err(state) => (None, state.clone()),
            Ok(_) if owner.as_ref() != Some(id) => (
                None,
                InstanceState::Refused(format!(
                    "a newer instance has its address: {:?}",
                    owner.as_deref().unwrap_or_default()
                )),
            ),
            Ok(_) if !has_room => {
                self.waiting.insert(Arc::clone(id));
                let why = format!("{INSTANCES_MAX} older instances are there, which is the most");
                (None, InstanceState::Refused(why))
            }
            Ok(candidate) => (Some(Arc::clone(candidate)), row.published_state(candidate)),
        };
        row.set_state(
            if held {
                InstanceState::RemovalHeld
            } else {
                state
            },
            now,
        );
        if row.published == published {
            return;
        }
        self.published_count = self.published_count + usize::from(published.is_some())
            - usize::from(row.published.is_some());
        row.published = published;
        self.events.push(match &row.published {
            Some(instance) => InstanceEvent::Added(Arc::clone(instance)),
            None => InstanceEvent::Removed(Arc::clone(id)),
        });
    }
}

// === impl InstanceRow ===

impl InstanceRow {
    fn claim_of(&self, id: &Arc<str>) -> AddressClaim {
        (
            self.record.freshness,
            self.record.instance.generation.clone(),
            Arc::clone(id),
        )
    }

    /// Returns the instance as it would be published if it gets its address, or the reason why it
    /// is not published.
    fn candidate(
        &self,
        policy: MetadataPolicy,
        local: LocalAddresses,
    ) -> Result<Arc<Instance>, InstanceState> {
        if let InstanceReadiness::NotReady(why) = &self.record.readiness {
            return Err(InstanceState::NotReady(why.clone()));
        }
        local
            .check(self.record.instance.address)
            .map_err(InstanceState::Refused)?;
        let metadata = match (&self.record.metadata, policy) {
            (MetadataSource::Given(metadata), _) => Some(Arc::clone(metadata)),
            (MetadataSource::None, _) | (MetadataSource::At(_), MetadataPolicy::Ignored) => None,
            (MetadataSource::At(_), _) => match (&self.metadata.answer, &self.metadata.failure) {
                (Some(answer), _) => answer.clone(),
                (None, Some(why)) => {
                    return Err(InstanceState::Pending(format!(
                        "its metadata cannot be fetched: {why}"
                    )));
                }
                (None, None) => {
                    return Err(InstanceState::Pending(
                        "its metadata is being fetched".to_owned(),
                    ));
                }
            },
        };
        if metadata.is_none() && policy == MetadataPolicy::Required {
            return Err(InstanceState::Pending(
                "it has no metadata, but metadata is required".to_owned(),
            ));
        }
        let mut instance = self.record.instance.clone();
        if let InstanceReadiness::Unconfirmed(why) = &self.record.readiness {
            instance.unconfirmed = Some(why.as_str().into());
        }
        if let Some(metadata) = &metadata {
            let transport = metadata
                .transport(instance.address)
                .map_err(|e| InstanceState::Refused(e.to_string()))?;
            instance.address = transport.unwrap_or(instance.address);
            local
                .check(instance.address)
                .map_err(InstanceState::Refused)?;
        }
        validate_instance(&instance).map_err(InstanceState::Refused)?;
        let instance = instance.with_metadata(metadata);
        Ok(self
            .published
            .as_ref()
            .filter(|published| ***published == instance)
            .map_or_else(|| Arc::new(instance), Arc::clone))
    }

    /// Returns the state of the instance while `candidate` is published.
    fn published_state(&self, candidate: &Instance) -> InstanceState {
        match (&candidate.unconfirmed, &self.metadata.failure) {
            (Some(why), _) => InstanceState::Unconfirmed(why.to_string()),
            (None, Some(why)) => InstanceState::Stale(why.clone()),
            (None, None) => InstanceState::Ready,
        }
    }

    /// Sets the state; [`Self::since`] changes only with the variant.
    fn set_state(&mut self, state: InstanceState, now: ClockReading) {
        if std::mem::discriminant(&self.state) != std::mem::discriminant(&state) {
            self.since = now.wall;
        }
        self.state = state;
    }
}

#[cfg(test)]
mod tests;
