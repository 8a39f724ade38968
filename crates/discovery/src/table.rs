//! The instances of one component, and those of them that subscribers see. Pure: no I/O, and time
//! is an argument.
//!
//! ```text
//!           Apply, Reset                    metadata                 owns its address
//!  record ───────────────▶ ready? ──yes──▶ known or none? ──yes──▶ and is valid? ──yes──▶ Ready: published (Added)
//!                            │ no             │ no                     │ no                  (unconfirmed: published as such)
//!                            ▼                ▼                        ▼
//!                         NotReady         Pending                  Refused               not published (Removed if it was)
//! ```
//! A function takes time for the rows that it changes and for rows with the same address, never for
//! the whole table. An event carries the full value, and is published only if the value changed.
//!
//! **Mass disappearance.** If the first list after an outage lacks more than half of the published
//! instances, it is more likely that the backend lost its state than that the servers are gone.
//! Those rows then stay as they were for [`HOLD`]; the backend gets a request to list again, and
//! rows that are still missing at the end are removed.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::backend::{InstanceReadiness, InstanceRecord, MetadataSource};
use crate::event::{ClockReading, InstanceEvent, InstanceState, InstanceSummary, MetadataPolicy};
use crate::instance::{Instance, validate_instance};
use crate::metadata::Metadata;

/// How long a mass disappearance is delayed. An API server that restarts with cold caches, or an
/// etcd whose leases expired together, is complete again within this time. Meanwhile, requests to
/// servers that are really gone fail over.
pub const HOLD: Duration = Duration::from_secs(10);

/// With fewer published instances no removal is delayed: in a small pool half of them may well
/// disappear at once.
pub const HOLD_INSTANCES_MIN: usize = 4;

/// How often metadata is fetched again without an event. It may change without one, for example
/// when a LoRA adapter is loaded.
pub const METADATA_POLL_INTERVAL: Duration = Duration::from_secs(30);

/// The first wait after metadata could not be fetched. It doubles up to [`METADATA_POLL_INTERVAL`].
pub const METADATA_RETRY_FIRST: Duration = Duration::from_millis(250);

/// The most removed instances kept for display.
const GONE_MAX: usize = 256;

/// A request for the metadata of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MetadataRequest {
    pub(crate) id: Arc<str>,
    pub(crate) generation: String,
    pub(crate) address: SocketAddr,
    /// The entity tag of the known metadata.
    pub(crate) etag: Option<String>,
}

/// The result of a [`MetadataRequest`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MetadataResponse {
    /// The metadata with its entity tag.
    Is(Arc<Metadata>, Option<String>),
    /// Not modified.
    Unchanged,
    /// The instance has no metadata.
    Absent,
    /// The metadata could not be fetched, for this reason.
    Failed(String),
}

/// The instances of a component.
#[derive(Debug)]
pub(crate) struct InstanceTable {
    policy: MetadataPolicy,
    rows: BTreeMap<Arc<str>, InstanceRow>,
    /// The claims on each address; the greatest claim wins.
    claims: HashMap<SocketAddr, BTreeSet<AddressClaim>>,
    due: BTreeSet<(Instant, Arc<str>)>,
    removed: VecDeque<InstanceSummary>,
    hold: Option<RemovalHold>,
    published_count: usize,
}

type AddressClaim = (u64, String, Arc<str>);

#[derive(Debug)]
struct InstanceRow {
    record: Arc<InstanceRecord>,
    metadata: KnownMetadata,
    /// The instance as it would be published if it wins its address, or the reason why it is not
    /// published.
    candidate: Result<Arc<Instance>, InstanceState>,
    claim: Option<(SocketAddr, AddressClaim)>,
    published: Option<Arc<Instance>>,
    state: InstanceState,
    since: SystemTime,
}

/// The metadata that an instance serves.
#[derive(Debug, Default)]
struct KnownMetadata {
    /// The last good answer; `Some(None)` means that the instance has none.
    answer: Option<Option<Arc<Metadata>>>,
    etag: Option<String>,
    failure: Option<String>,
    failures: u32,
    due: Option<Instant>,
    fetching: bool,
    /// Whether to fetch again when the current fetch ends.
    again: bool,
}

#[derive(Debug)]
struct RemovalHold {
    until: Instant,
    /// The rows that change when the hold ends: a row gets its record, or is removed.
    doomed: BTreeMap<Arc<str>, Option<Arc<InstanceRecord>>>,
}

// === impl InstanceTable ===

impl InstanceTable {
    pub(crate) fn new(policy: MetadataPolicy) -> Self {
        let (rows, claims, due, gone) = Default::default();
        Self {
            policy,
            rows,
            claims,
            due,
            removed: gone,
            hold: None,
            published_count: 0,
        }
    }

    /// Applies the whole set. `after_outage` says that the backend could not be reached before.
    /// Returns whether the backend should list again.
    pub(crate) fn reset(
        &mut self,
        records: Vec<Arc<InstanceRecord>>,
        after_outage: bool,
        now: ClockReading,
        events: &mut Vec<InstanceEvent>,
    ) -> bool {
        let mut new: BTreeMap<Arc<str>, Arc<InstanceRecord>> = BTreeMap::new();
        for record in records {
            new.insert(record.name().into(), record);
        }
        let told = self
            .rows
            .iter()
            .filter(|(_, row)| row.published.is_some())
            .map(|(id, _)| id);
        let lost: Vec<Arc<str>> = told
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
            self.remove(&id, now, events);
        }
        for (id, record) in new {
            self.put(&id, record, now, events);
        }
        for id in self.hold.iter().flat_map(|hold| hold.doomed.keys()) {
            if let Some(row) = self.rows.get_mut(id) {
                row.set_state(InstanceState::RemovalHeld, now);
            }
        }
        suspicious && held.is_none()
    }

    /// Applies a new record, or a new value of a known one.
    pub(crate) fn apply(
        &mut self,
        record: Arc<InstanceRecord>,
        now: ClockReading,
        events: &mut Vec<InstanceEvent>,
    ) {
        let id: Arc<str> = record.name().into();
        self.release(&id);
        self.put(&id, record, now, events);
    }

    /// Removes a record.
    pub(crate) fn delete(&mut self, id: &str, now: ClockReading, events: &mut Vec<InstanceEvent>) {
        self.release(id);
        self.remove(id, now, events);
    }

    /// Ends a hold that is due.
    pub(crate) fn tick(&mut self, now: ClockReading, events: &mut Vec<InstanceEvent>) {
        let Some(hold) = self.hold.take_if(|hold| hold.until <= now.instant) else {
            return;
        };
        for (id, fate) in hold.doomed {
            match fate {
                Some(record) => self.put(&id, record, now, events),
                None => self.remove(&id, now, events),
            }
        }
    }

    /// The next metadata fetch that is due, if any. An instance has at most one fetch at a time.
    pub(crate) fn next_fetch(&mut self, now: Instant) -> Option<MetadataRequest> {
        loop {
            let due = self.due.first().filter(|(at, _)| *at <= now)?.clone();
            self.due.remove(&due);
            let (_, id) = due;
            let Some(row) = self.rows.get_mut(&id) else {
                continue;
            };
            row.metadata.due = None;
            let MetadataSource::At(address) = row.record.metadata else {
                continue;
            };
            if !row.record.readiness.may_serve() {
                continue; // fetched when it becomes ready
            }
            if std::mem::replace(&mut row.metadata.fetching, true) {
                row.metadata.again = true;
                continue;
            }
            let generation = row.record.instance.generation.clone();
            let etag = row.metadata.etag.clone();
            return Some(MetadataRequest {
                id,
                generation,
                address,
                etag,
            });
        }
    }

    /// When the next fetch or the end of a hold is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let hold = self.hold.as_ref().map(|hold| hold.until);
        self.due
            .first()
            .map(|(at, _)| *at)
            .into_iter()
            .chain(hold)
            .min()
    }

    /// Applies the result of a fetch; ignores that of an older generation.
    pub(crate) fn fetched(
        &mut self,
        fetch: &MetadataRequest,
        fetched: MetadataResponse,
        now: ClockReading,
        events: &mut Vec<InstanceEvent>,
    ) {
        let Some(row) = self.rows.get_mut(&fetch.id) else {
            return;
        };
        let same_life = row.record.instance.generation == fetch.generation
            && row.record.metadata == MetadataSource::At(fetch.address);
        if !same_life || !row.metadata.fetching {
            return;
        }
        let known = &mut row.metadata;
        known.fetching = false;
        let again = std::mem::take(&mut known.again).then_some(now.instant);
        match fetched {
            MetadataResponse::Is(metadata, etag) => {
                known.answer = Some(Some(metadata));
                known.etag = etag;
            }
            MetadataResponse::Absent => (known.answer, known.etag) = (Some(None), None),
            MetadataResponse::Unchanged => {}
            MetadataResponse::Failed(why) => {
                let wait = METADATA_RETRY_FIRST
                    .saturating_mul(1 << known.failures.min(16))
                    .min(METADATA_POLL_INTERVAL);
                known.failures += 1;
                known.failure = Some(why);
                self.schedule(
                    &fetch.id,
                    again.unwrap_or(now.instant + jittered(wait, &fetch.id)),
                );
                return self.refresh(&fetch.id, now, events);
            }
        }
        known.failure = None;
        known.failures = 0;
        self.schedule(
            &fetch.id,
            again.unwrap_or(now.instant + jittered(METADATA_POLL_INTERVAL, &fetch.id)),
        );
        self.refresh(&fetch.id, now, events);
    }

    /// The published instances, by id.
    pub(crate) fn published_instances(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<Instance>)> {
        self.rows
            .iter()
            .filter_map(|(id, row)| row.published.as_ref().map(|instance| (id, instance)))
    }

    /// Whether a ready instance waits for the first result of a metadata fetch, good or bad.
    pub(crate) fn is_asking(&self) -> bool {
        self.rows.values().any(|row| {
            matches!(row.state, InstanceState::Pending(_))
                && row.metadata.answer.is_none()
                && row.metadata.failure.is_none()
        })
    }

    /// All recently seen instances.
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

    /// Ends the hold of one row, because the backend has reported it again.
    fn release(&mut self, id: &str) {
        if let Some(hold) = &mut self.hold {
            hold.doomed.remove(id);
        }
    }

    fn put(
        &mut self,
        id: &Arc<str>,
        record: Arc<InstanceRecord>,
        now: ClockReading,
        events: &mut Vec<InstanceEvent>,
    ) {
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
        self.refresh(id, now, events);
    }

    fn remove(&mut self, id: &str, now: ClockReading, events: &mut Vec<InstanceEvent>) {
        let Some(mut row) = self.rows.remove(id) else {
            return;
        };
        let id: Arc<str> = id.into();
        if let Some(at) = row.metadata.due.take() {
            self.due.remove(&(at, Arc::clone(&id)));
        }
        if row.published.take().is_some() {
            self.published_count -= 1;
            events.push(InstanceEvent::Removed(Arc::clone(&id)));
        }
        if let Some((address, claim)) = row.claim.take()
            && let Some(heir) = self.withdraw(address, &claim)
        {
            self.settle(&heir, now, events);
        }
        let Instance {
            generation,
            address,
            ..
        } = row.record.instance.clone();
        self.removed.truncate(GONE_MAX - 1);
        self.removed.push_front(InstanceSummary {
            id,
            generation,
            address,
            state: InstanceState::Removed,
            since: now.wall,
        });
    }

    fn schedule(&mut self, id: &Arc<str>, at: Instant) {
        let Some(row) = self.rows.get_mut(id) else {
            return;
        };
        if let Some(before) = row.metadata.due.replace(at) {
            self.due.remove(&(before, Arc::clone(id)));
        }
        self.due.insert((at, Arc::clone(id)));
    }

    /// Updates a row, and the rows that compete for its address.
    fn refresh(&mut self, id: &Arc<str>, now: ClockReading, events: &mut Vec<InstanceEvent>) {
        let Some(row) = self.rows.get_mut(id) else {
            return;
        };
        let candidate = row.candidate(self.policy);
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
        // An address is taken from its owner before it is given to another instance, so that no two
        // published instances have the same address at any time.
        let (gaining, losing): (Vec<_>, Vec<_>) = loser
            .iter()
            .chain([id])
            .chain(&heir)
            .partition(|id| self.owns_its_address(id));
        for id in losing.into_iter().chain(gaining) {
            self.settle(id, now, events);
        }
    }

    /// Whether the claim of a row is the greatest on its address.
    fn owns_its_address(&self, id: &Arc<str>) -> bool {
        let claim = self.rows.get(id).and_then(|row| row.claim.as_ref());
        claim.is_some_and(|(address, claim)| {
            self.claims.get(address).and_then(BTreeSet::last) == Some(claim)
        })
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

    /// Publishes the change of a row, if there is one.
    fn settle(&mut self, id: &Arc<str>, now: ClockReading, events: &mut Vec<InstanceEvent>) {
        let held = self.is_held(id);
        let Some(row) = self.rows.get_mut(id) else {
            return;
        };
        let owner = row
            .claim
            .as_ref()
            .and_then(|(address, _)| self.claims.get(address)?.last())
            .map(|(_, _, id)| id);
        let (tell, state) = match &row.candidate {
            Err(state) => (None, state.clone()),
            Ok(_) if owner != Some(id) => (
                None,
                InstanceState::Refused(format!(
                    "a newer instance has its address: {:?}",
                    owner.map_or("", |o| &**o)
                )),
            ),
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
        if row.published == tell {
            return;
        }
        self.published_count = self.published_count + usize::from(tell.is_some())
            - usize::from(row.published.is_some());
        row.published = tell;
        events.push(match &row.published {
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

    /// The instance as it would be published if it wins its address, or the reason why it is not
    /// published.
    fn candidate(&self, policy: MetadataPolicy) -> Result<Arc<Instance>, InstanceState> {
        if let InstanceReadiness::NotReady(why) = &self.record.readiness {
            return Err(InstanceState::NotReady(why.clone()));
        }
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
        }
        validate_instance(&instance).map_err(InstanceState::Refused)?;
        let instance = instance.with_metadata(metadata);
        Ok(self
            .published
            .as_ref()
            .filter(|told| ***told == instance)
            .map_or_else(|| Arc::new(instance), Arc::clone))
    }

    /// The state of the row while `candidate` is published.
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

/// Lengthens a wait by up to a quarter, always the same for the same id, so that the instances of a
/// pool are not fetched at the same moment and tests know the time.
fn jittered(wait: Duration, id: &str) -> Duration {
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    }); // FNV-1a
    wait + wait
        .mul_f64(f64::from(u16::try_from(hash >> 48).unwrap_or(0)) / f64::from(u16::MAX) / 4.0)
}

#[cfg(test)]
mod tests;
