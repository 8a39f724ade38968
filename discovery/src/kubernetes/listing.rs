//! List and watch of one kind. Every fault ends in a new list.
//!
//! `kube`'s watcher resumes from its resource version. That is wrong after every fault: it would
//! retry forever at a proxy that answers HTTP 410 at the start of a watch; and after a restore of
//! etcd from a backup the version lies in the future, where a watch is accepted and stays silent.
//! So after an error, and at a maximum age, this code waits and lists again, and the list replaces
//! the set. Events in between stay in force.

use std::fmt::Debug;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

/// After this many seconds a watch ends and starts again. The client gives up on a silent
/// connection 5 s later, so a network that drops packets is noticed after that time at most.
const WATCH_SECONDS: u32 = 30;

/// The maximum age of a set without a new list, which bounds how long a missed event can stay
/// unnoticed.
pub(super) const RELIST_INTERVAL: Duration = Duration::from_secs(300);

/// How long a list may take; ten thousand endpoints are 5 MB.
const LIST_DEADLINE: Duration = Duration::from_secs(30);

/// The first wait after an error. It doubles up to [`RETRY_MAX`].
const RETRY_FIRST: Duration = Duration::from_millis(250);

/// The longest wait after an error. An outage may last this long after the API server has
/// recovered.
const RETRY_MAX: Duration = Duration::from_secs(10);

/// The objects of one kind that a label selector matches.
pub(super) struct ObjectWatch<K> {
    api: Api<K>,
    config: watcher::Config,
    watch: BoxStream<'static, watcher::Result<Event<K>>>,
    state: ObjectWatchState,
    /// When `state` ends.
    until: Instant,
    /// Whether an unknown kind counts as a kind without objects instead of an error.
    optional: bool,
    failures: u32,
    listed: Vec<K>,
}

/// The state of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObjectWatchState {
    /// Waits for its list.
    Listing,
    /// Has its list and watches.
    Watching,
    /// Waits after an error.
    Resting,
}

/// A change of the set.
pub(super) enum ObjectWatchEvent<K> {
    /// The complete set.
    All(Vec<K>),
    /// A new object, or a new value of a known one.
    Applied(K),
    /// The object was removed.
    Deleted(K),
    /// The objects cannot be read now, for this reason.
    Failed(String),
}

impl<K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug + Send + 'static> ObjectWatch<K> {
    pub(super) fn new(api: Api<K>, selector: &str) -> Self {
        let mut config = watcher::Config::default().timeout(WATCH_SECONDS);
        if !selector.is_empty() {
            config = config.labels(selector);
        }
        Self::with_config(api, config)
    }
}

impl<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static> ObjectWatch<K> {
    /// One object, selected by its name.
    pub(super) fn of_one(api: Api<K>, name: &str) -> Self {
        Self::with_config(api, watcher::Config::default().timeout(WATCH_SECONDS).fields(&format!("metadata.name={name}")))
    }

    /// All objects of a kind that may not be installed.
    pub(super) fn of_kind(api: Api<K>) -> Self {
        Self { optional: true, ..Self::with_config(api, watcher::Config::default().timeout(WATCH_SECONDS)) }
    }

    fn with_config(api: Api<K>, config: watcher::Config) -> Self {
        let watch = start(&api, &config);
        Self {
            api,
            config,
            watch,
            state: ObjectWatchState::Listing,
            until: Instant::now() + LIST_DEADLINE,
            optional: false,
            failures: 0,
            listed: Vec::new(),
        }
    }

    /// Lists again now.
    pub(super) fn restart(&mut self) {
        self.watch = start(&self.api, &self.config);
        (self.state, self.until) = (ObjectWatchState::Listing, Instant::now() + LIST_DEADLINE);
        self.listed.clear();
    }

    /// The next change. Cancel-safe.
    pub(super) async fn next(&mut self) -> ObjectWatchEvent<K> {
        loop {
            let event = tokio::select! {
                event = self.watch.next() => event,
                () = tokio::time::sleep_until(self.until) => {
                    if self.state == ObjectWatchState::Listing {
                        return self.failed(format!("no list within {LIST_DEADLINE:?}"));
                    }
                    self.restart();
                    continue;
                }
            };
            match event {
                Some(Ok(Event::Init)) => self.listed.clear(),
                Some(Ok(Event::InitApply(object))) => self.listed.push(object),
                Some(Ok(Event::InitDone)) => {
                    self.failures = 0;
                    (self.state, self.until) = (ObjectWatchState::Watching, Instant::now() + RELIST_INTERVAL);
                    return ObjectWatchEvent::All(std::mem::take(&mut self.listed));
                }
                Some(Ok(Event::Apply(object))) => return ObjectWatchEvent::Applied(object),
                Some(Ok(Event::Delete(object))) => return ObjectWatchEvent::Deleted(object),
                Some(Err(error)) if self.optional && is_unknown_kind(&error) => {
                    self.rest(RETRY_MAX);
                    return ObjectWatchEvent::All(Vec::new());
                }
                Some(Err(error)) => return self.failed(innermost(&error)),
                None => return self.failed("the watch ended".to_owned()),
            }
        }
    }

    fn failed(&mut self, why: String) -> ObjectWatchEvent<K> {
        let wait = RETRY_FIRST.saturating_mul(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures += 1;
        self.rest(wait);
        ObjectWatchEvent::Failed(why)
    }

    fn rest(&mut self, wait: Duration) {
        // Half of the wait is random, so that not all daemons come back at once.
        (self.state, self.until) = (ObjectWatchState::Resting, Instant::now() + wait.mul_f64(0.5 + crate::registry::chance() / 2.0));
        self.watch = futures::stream::pending().boxed();
        self.listed.clear();
    }
}

fn start<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static>(
    api: &Api<K>,
    config: &watcher::Config,
) -> BoxStream<'static, watcher::Result<Event<K>>> {
    let strip = |mut object: K| {
        object.managed_fields_mut().clear(); // often half of an object, and not needed here
        object
    };
    watcher::watcher(api.clone(), config.clone())
        .map(move |event| {
            event.map(|event| match event {
                Event::Apply(object) => Event::Apply(strip(object)),
                Event::InitApply(object) => Event::InitApply(strip(object)),
                other => other,
            })
        })
        .boxed()
}

/// Whether the API does not have this kind.
fn is_unknown_kind(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

/// The error with its causes.
fn innermost(error: &dyn std::error::Error) -> String {
    let (mut text, mut next) = (error.to_string(), error.source());
    while let Some(source) = next {
        let cause = source.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = source.source();
    }
    text
}
