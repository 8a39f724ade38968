//! Lists and watches instances, in the same way for every backend.
//!
//! Each followed component has one task. The task feeds events of the backend and metadata of
//! instances into the component's [`InstanceTable`] and publishes the changes. A follower reads the
//! changes. A follower subscribes under the lock under which the table changes, so no change is
//! lost between a list and the watch after it. A follower that lags behind gets the current table
//! instead of an unbounded queue, and does not slow other followers down.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use futures::stream::{BoxStream, FuturesUnordered, Stream, StreamExt};
use tokio::sync::{Notify, broadcast, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_stream::wrappers::BroadcastStream;

use crate::backend::{Backend, BackendEvent, Component, InvalidName, PoolRequirements};
use crate::event::{ClockReading, InstanceEvent, InstanceSummary, MetadataPolicy};
use crate::fetch::{FETCHES_MAX, MetadataFetcher};
use crate::instance::{Instance, LocalAddresses};
use crate::table::InstanceTable;
use crate::wait::sleep_until;
use crate::{SetChange, SetChanges};

/// The maximum number of events that a follower may lag behind. A follower that lags more gets the
/// current table instead. A rollout of a full pool has fewer additions and removals.
const EVENTS_MAX: usize = 2048;

/// The time for which additions are collected before the daemon gets them. A rollout comes in
/// bursts, and 20 ms do not matter for a server that took a minute to load its model. Removals are
/// sent immediately.
pub const GATHER: Duration = Duration::from_millis(20);

/// The maximum time that the first set of instances waits for metadata. Without this wait, a daemon
/// that just became the leader would briefly remove every instance whose metadata has not arrived.
/// The daemon does not wait longer for an instance that does not answer.
const FIRST_SET_MAX: Duration = Duration::from_secs(3);

/// Lists and watches instances.
pub trait ServiceDiscovery: Send + Sync {
    /// Lists the instances of `component` in `namespace` that may get traffic. Waits until the
    /// backend has sent its whole set once.
    ///
    /// # Errors
    /// Fails if a name is invalid, or if the backend was never reached. If the backend was reached
    /// before and is not reachable now, the function returns the last known set.
    fn list_instances<'a>(
        &'a self,
        namespace: &'a str,
        component: &'a str,
    ) -> BoxFuture<'a, Result<Vec<Arc<Instance>>, DiscoveryError>>;

    /// Watches the instances. The stream begins with an [`InstanceEvent::Added`] for each instance
    /// that may get traffic. Every change follows, without a gap.
    ///
    /// # Errors
    /// Returns only [`DiscoveryError::Name`], because a watch waits for a backend that cannot be
    /// reached.
    fn watch(&self, namespace: &str, component: &str) -> Result<InstanceEvents, DiscoveryError>;
}

/// The reason why instances cannot be listed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// The namespace or component is not a valid name.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// The backend was never reached. A later attempt may succeed.
    #[error("discovery is not possible now: {0}")]
    Unavailable(String),
}

/// The status of a component's backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendStatus {
    /// Whether the backend has sent its whole set at least once.
    pub synced: bool,
    /// The reason why the backend cannot be reached or read now; `None` if it can. The last known
    /// set stays in use.
    pub error: Option<String>,
    /// The time when the backend's last event arrived, which gives the age of the set.
    pub last_contact: Option<SystemTime>,
    /// Settings for gateways, if the registry has them.
    pub requirements: Option<PoolRequirements>,
    /// The reason why optional data cannot be read. The set is complete without these data. The
    /// value is `None` if these data can be read.
    pub warning: Option<String>,
}

/// The [`ServiceDiscovery`] for any [`Backend`]. A component is followed from its first use until
/// the `Discovery` is dropped. So listing a component again costs nothing, and returns the last
/// known set during an outage.
#[derive(Debug)]
pub struct Discovery<B> {
    backend: B,
    policy: MetadataPolicy,
    local: LocalAddresses,
    hubs: Mutex<HashMap<Component, Arc<ComponentHub>>>,
}

/// A stream of changes of a component, which ends only with its backend. See
/// [`ServiceDiscovery::watch`].
pub struct InstanceEvents {
    hub: Arc<ComponentHub>,
    queue: BroadcastStream<InstanceEvent>,
    /// The instances that the reader of this stream has.
    known: BTreeMap<Arc<str>, Arc<Instance>>,
    backlog: VecDeque<InstanceEvent>,
}

/// A followed component.
#[derive(Debug)]
struct ComponentHub {
    shared: Arc<HubState>,
    task: AbortHandle,
}

#[derive(Debug)]
struct HubState {
    table: Mutex<InstanceTable>,
    events: broadcast::Sender<InstanceEvent>,
    status: watch::Sender<BackendStatus>,
    relist: Arc<Notify>,
}

// === impl Discovery ===

impl<B: Backend> Discovery<B> {
    /// Creates discovery over `backend`. `policy` says how metadata is fetched.
    #[must_use]
    pub fn new(backend: B, policy: MetadataPolicy) -> Self {
        Self {
            backend,
            policy,
            local: LocalAddresses::Refused,
            hubs: Mutex::default(),
        }
    }

    /// Sets whether instances may have addresses of this machine or of its link.
    #[must_use]
    pub fn with_local_addresses(self, local: LocalAddresses) -> Self {
        Self { local, ..self }
    }

    /// Follows a component for the daemon, as whole sets of instances. An addition is sent within
    /// [`GATHER`] and a removal immediately. Nothing is sent while nothing changes.
    ///
    /// # Errors
    /// Returns [`DiscoveryError::Name`] if a name is invalid.
    pub fn changes(&self, namespace: &str, component: &str) -> Result<SetChanges, DiscoveryError> {
        let feed = SetFeed::new(self.watch(namespace, component)?);
        Ok(futures::stream::unfold(
            feed,
            |mut feed| async move { Some((feed.next().await, feed)) },
        )
        .boxed())
    }

    /// Follows a component for as long as the handle lives.
    ///
    /// # Errors
    /// Returns [`DiscoveryError::Name`] if a name is invalid.
    pub fn follow(
        &self,
        namespace: &str,
        component: &str,
    ) -> Result<WatchedComponent, DiscoveryError> {
        Ok(WatchedComponent(self.hub(namespace, component)?))
    }

    fn hub(&self, namespace: &str, component: &str) -> Result<Arc<ComponentHub>, DiscoveryError> {
        let component = Component::try_new(namespace, component)?;
        let mut hubs = self.hubs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = hubs.get(&component) {
            return Ok(Arc::clone(hub));
        }
        let relist = Arc::new(Notify::new());
        let stream = self.backend.follow(&component, Arc::clone(&relist));
        let shared = Arc::new(HubState {
            table: Mutex::new(InstanceTable::new(self.policy, self.local)),
            events: broadcast::Sender::new(EVENTS_MAX),
            status: watch::Sender::new(BackendStatus::default()),
            relist,
        });
        let task = tokio::spawn(drive(Arc::clone(&shared), stream)).abort_handle();
        let hub = Arc::new(ComponentHub { shared, task });
        hubs.insert(component, Arc::clone(&hub));
        Ok(hub)
    }
}

impl<B: Backend> ServiceDiscovery for Discovery<B> {
    fn list_instances<'a>(
        &'a self,
        namespace: &'a str,
        component: &'a str,
    ) -> BoxFuture<'a, Result<Vec<Arc<Instance>>, DiscoveryError>> {
        Box::pin(async move {
            let hub = self.hub(namespace, component)?;
            let mut status = hub.shared.status.subscribe();
            let received = status
                .wait_for(|status| status.synced || status.error.is_some())
                .await
                .map(|s| s.clone())
                .unwrap_or_default();
            if !received.synced {
                return Err(DiscoveryError::Unavailable(
                    received.error.unwrap_or_default(),
                ));
            }
            let listed = hub
                .shared
                .table()
                .published_instances()
                .map(|(_, instance)| Arc::clone(instance))
                .collect();
            Ok(listed)
        })
    }

    fn watch(&self, namespace: &str, component: &str) -> Result<InstanceEvents, DiscoveryError> {
        Ok(InstanceEvents::new(self.hub(namespace, component)?))
    }
}

// === Followed ===

/// A handle of a followed component, from which its status and its instances are read.
#[derive(Clone, Debug)]
pub struct WatchedComponent(Arc<ComponentHub>);

impl WatchedComponent {
    /// Returns a receiver of the backend's status and of every change of this status.
    pub fn status(&self) -> watch::Receiver<BackendStatus> {
        self.0.shared.status.subscribe()
    }

    /// Returns all recently seen instances, published or not, with the reason.
    pub fn seen(&self) -> Vec<InstanceSummary> {
        self.0.shared.table().seen()
    }
}

// === impl ComponentHub ===

impl Drop for ComponentHub {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl HubState ===

impl HubState {
    fn table(&self) -> MutexGuard<'_, InstanceTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table and publishes the resulting events, under one lock.
    fn change(&self, change: impl FnOnce(&mut InstanceTable)) {
        let mut table = self.table();
        change(&mut table);
        for event in table.take_events() {
            let _ = self.events.send(event); // there may be no subscriber
        }
    }

    fn apply(&self, event: BackendEvent) {
        let after_outage = self.status.borrow().error.is_some();
        let now = ClockReading::read();
        let mut error = None;
        let mut synced = false;
        match event {
            BackendEvent::Reset(records) => {
                synced = true;
                self.change(|table| {
                    if table.reset(records, after_outage, now) {
                        self.relist.notify_one();
                    }
                });
            }
            BackendEvent::Apply(record) => {
                self.change(|table| table.apply(record, now));
            }
            BackendEvent::Delete(id) => self.change(|table| table.delete(&id, now)),
            BackendEvent::Failed(why) => error = Some(why),
            BackendEvent::Requirements(asked) => {
                self.status
                    .send_if_modified(|status| set(&mut status.requirements, asked));
                return;
            }
            BackendEvent::Warns(warning) => {
                self.status
                    .send_if_modified(|status| set(&mut status.warning, warning));
                return;
            }
            BackendEvent::Alive => {}
        }
        self.status.send_if_modified(|status| {
            if error.is_none() {
                status.last_contact = Some(now.wall);
            }
            let changed = status.error != error || (synced && !status.synced);
            status.synced |= synced;
            status.error = error;
            changed
        });
    }
}

async fn drive(shared: Arc<HubState>, mut backend: BoxStream<'static, BackendEvent>) {
    let fetcher = MetadataFetcher::new();
    let mut fetches = FuturesUnordered::new();
    loop {
        let due = shared.table().next_due();
        tokio::select! {
            event = backend.next() => match event {
                Some(event) => shared.apply(event),
                None => return shared.apply(BackendEvent::Failed("the backend ended".to_owned())),
            },
            Some((fetch, fetched)) = fetches.next(), if !fetches.is_empty() => {
                shared.change(|table| table.fetched(&fetch, fetched, ClockReading::read()));
            }
            () = sleep_until(due), if fetches.len() < FETCHES_MAX => {}
        }
        shared.change(|table| table.tick(ClockReading::read()));
        while fetches.len() < FETCHES_MAX
            && let Some(fetch) = shared.table().next_fetch(Instant::now())
        {
            let fetcher = fetcher.clone();
            fetches.push(async move {
                let fetched = fetcher.fetch(&fetch).await;
                (fetch, fetched)
            });
        }
    }
}

/// Sets a field and returns whether its value changed.
fn set<T: PartialEq>(field: &mut T, value: T) -> bool {
    let changed = *field != value;
    *field = value;
    changed
}

// === impl InstanceEvents ===

impl InstanceEvents {
    fn new(hub: Arc<ComponentHub>) -> Self {
        let queue = BroadcastStream::new(hub.shared.events.subscribe());
        let mut events = Self {
            hub,
            queue,
            known: BTreeMap::new(),
            backlog: VecDeque::new(),
        };
        events.reconcile();
        events
    }

    /// Continues from the table: removes missing instances, and adds new or changed instances.
    fn reconcile(&mut self) {
        let table = self.hub.shared.table();
        self.queue = BroadcastStream::new(self.hub.shared.events.subscribe());
        let published: BTreeMap<&Arc<str>, &Arc<Instance>> = table.published_instances().collect();
        self.backlog.clear();
        self.backlog.extend(
            self.known
                .keys()
                .filter(|id| !published.contains_key(id))
                .map(|id| InstanceEvent::Removed(Arc::clone(id))),
        );
        let new = published
            .iter()
            .filter(|(id, instance)| self.known.get(**id) != Some(*instance));
        self.backlog
            .extend(new.map(|(_, instance)| InstanceEvent::Added(Arc::clone(instance))));
    }

    fn know(&mut self, event: &InstanceEvent) {
        match event {
            InstanceEvent::Added(instance) => drop(
                self.known
                    .insert(instance.name.as_str().into(), Arc::clone(instance)),
            ),
            InstanceEvent::Removed(id) => drop(self.known.remove(id)),
        }
    }
}

impl Stream for InstanceEvents {
    type Item = InstanceEvent;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<InstanceEvent>> {
        loop {
            if let Some(event) = self.backlog.pop_front() {
                self.know(&event);
                return Poll::Ready(Some(event));
            }
            match ready!(self.queue.poll_next_unpin(context)) {
                Some(Ok(event)) => {
                    self.know(&event);
                    return Poll::Ready(Some(event));
                }
                Some(Err(_lagged)) => self.reconcile(),
                None => return Poll::Ready(None),
            }
        }
    }
}

impl fmt::Debug for InstanceEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InstanceEvents")
            .field("known", &self.known.len())
            .finish_non_exhaustive()
    }
}

// === Feed ===

/// Turns events into whole sets of instances.
struct SetFeed {
    events: InstanceEvents,
    status: watch::Receiver<BackendStatus>,
    published_error: Option<String>,
    /// The time when the set is due to be sent.
    due: Option<Instant>,
    synced: bool,
    /// The time until which the first set may wait to be complete; `None` after this set was sent.
    first: Option<Instant>,
}

impl SetFeed {
    fn new(events: InstanceEvents) -> Self {
        let mut status = events.hub.shared.status.subscribe();
        status.mark_changed();
        Self {
            events,
            status,
            published_error: None,
            due: None,
            synced: false,
            first: None,
        }
    }

    async fn next(&mut self) -> SetChange {
        loop {
            // The events are read before the status. So when the status says `synced`, all events
            // of the first set have been read.
            tokio::select! {
                biased;
                Some(event) = self.events.next() => match event {
                    InstanceEvent::Added(_) => drop(self.due.get_or_insert_with(|| Instant::now() + GATHER)),
                    InstanceEvent::Removed(_) => self.due = Some(Instant::now()),
                },
                Ok(()) = self.status.changed() => {
                    let BackendStatus { synced, error, .. } = self.status.borrow_and_update().clone();
                    if synced && (!self.synced || (error.is_none() && self.published_error.is_some())) {
                        if !self.synced {
                            self.first = Some(Instant::now() + FIRST_SET_MAX);
                        }
                        self.synced = true;
                        self.due = Some(Instant::now());
                    }
                    if self.published_error != error {
                        self.published_error.clone_from(&error);
                        if let Some(why) = error {
                            return SetChange::Unreadable(why);
                        }
                    }
                }
                () = sleep_until(self.due.filter(|_| self.synced)) => {
                    let now = Instant::now();
                    if self.first.is_some_and(|until| now < until) && self.events.hub.shared.table().is_asking() {
                        self.due = Some(now + GATHER);
                        continue;
                    }
                    self.due = None;
                    self.first = None;
                    return SetChange::Reset(self.events.known.values().map(|instance| (**instance).clone()).collect());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
