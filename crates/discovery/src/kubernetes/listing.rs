//! Lists and watches one kind of objects. Every fault leads to a new list.
//!
//! A fault is an error, a silent watch, or a watch that ends before the requested time. For
//! example, after a restore of etcd from a backup, the last version of a watch lies in the future.
//! The API server accepts such a watch and sends nothing. So after a fault, and at a maximum age,
//! this code waits and lists again, and the list replaces the set. Meanwhile the events received so
//! far stay in use. Only a watch that lasted as long as requested continues from its last version.

use std::fmt::Debug;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use kube::api::{ListParams, WatchParams};
use kube::core::WatchEvent;
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::wait::wait_after;

/// The number of seconds after which a watch ends and starts again.
const WATCH_SECONDS: u32 = 30;

/// The minimum age at which a watch may end without a fault. An earlier end means that the API
/// server restarted, or that a proxy closed the connection.
const WATCH_LASTS_MIN: Duration = Duration::from_secs(25);

/// The maximum time without an event from a watch. A watch that is silent for longer is ended,
/// because the network may drop packets.
const WATCH_SILENCE_MAX: Duration = Duration::from_secs(35);

/// The maximum number of objects in one page of a list: the default of `kubectl`.
const PAGE_OBJECTS_MAX: u32 = 500;

/// The maximum age of a set without a new list, which bounds how long a missed event can stay
/// unnoticed.
pub(super) const RELIST_INTERVAL: Duration = Duration::from_secs(300);

/// The maximum time that a list may take. Ten thousand endpoints are 5 MB.
const LIST_DEADLINE: Duration = Duration::from_secs(30);

/// The objects of one kind that a label selector matches.
pub(super) struct ObjectWatch<K> {
    api: Api<K>,
    selectors: ObjectSelectors,
    watch: BoxStream<'static, ListWatchEvent<K>>,
    state: ObjectWatchState,
    /// The time when `state` ends.
    until: Instant,
    /// Whether an unknown kind counts as a kind without objects instead of an error.
    optional: bool,
    /// The number of faults since a watch lasted as long as requested, or since an event arrived.
    failures: u32,
}

/// Selects the objects of a kind that are watched.
#[derive(Clone, Debug, Default)]
struct ObjectSelectors {
    labels: Option<String>,
    fields: Option<String>,
}

/// A list, and the watches that continue from it.
struct ListWatch<K> {
    api: Api<K>,
    selectors: ObjectSelectors,
    /// The last version of the list or of the watch; `None` before the first list.
    version: Option<String>,
    /// The open watch, and the time when it began.
    open: Option<(WatchEvents<K>, Instant)>,
}

type WatchEvents<K> = BoxStream<'static, kube::Result<WatchEvent<K>>>;

/// An event of a [`ListWatch`].
enum ListWatchEvent<K> {
    Listed(Vec<K>),
    Applied(K),
    Deleted(K),
    /// A watch ended without an error before the requested time.
    EndedEarly,
    /// The API does not have this kind.
    UnknownKind(String),
    Failed(String),
}

/// The state of an [`ObjectWatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObjectWatchState {
    /// The list was requested and has not arrived.
    Listing,
    /// The list has arrived, and the watch follows its changes.
    Watching,
    /// The pause after an error, before the next list.
    Resting,
}

/// A change of the set of objects.
pub(super) enum ObjectWatchEvent<K> {
    /// The complete set of objects.
    All(Vec<K>),
    /// A new object, or a new value of a known object.
    Applied(K),
    /// The object was removed.
    Deleted(K),
    /// The objects cannot be read now, for this reason.
    Failed(String),
}

impl<K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug + Send + 'static>
    ObjectWatch<K>
{
    pub(super) fn new(api: Api<K>, selector: &str) -> Self {
        let labels = (!selector.is_empty()).then(|| selector.to_owned());
        Self::with_selectors(
            api,
            ObjectSelectors {
                labels,
                fields: None,
            },
        )
    }
}

impl<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static> ObjectWatch<K> {
    /// Watches one object, selected by its name.
    pub(super) fn of_one(api: Api<K>, name: &str) -> Self {
        Self::with_selectors(
            api,
            ObjectSelectors {
                labels: None,
                fields: Some(format!("metadata.name={name}")),
            },
        )
    }

    /// Watches all objects of a kind that may not be installed.
    pub(super) fn of_kind(api: Api<K>) -> Self {
        Self {
            optional: true,
            ..Self::with_selectors(api, ObjectSelectors::default())
        }
    }

    fn with_selectors(api: Api<K>, selectors: ObjectSelectors) -> Self {
        let watch = start(&api, &selectors);
        Self {
            api,
            selectors,
            watch,
            state: ObjectWatchState::Listing,
            until: Instant::now() + LIST_DEADLINE,
            optional: false,
            failures: 0,
        }
    }

    /// Lists again now.
    pub(super) fn restart(&mut self) {
        self.watch = start(&self.api, &self.selectors);
        self.state = ObjectWatchState::Listing;
        self.until = Instant::now() + LIST_DEADLINE;
    }

    /// Returns the next change. The call is cancel-safe.
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
                Some(ListWatchEvent::Listed(objects)) => {
                    self.state = ObjectWatchState::Watching;
                    self.until = Instant::now() + RELIST_INTERVAL;
                    return ObjectWatchEvent::All(objects);
                }
                Some(ListWatchEvent::Applied(object)) => {
                    self.failures = 0;
                    return ObjectWatchEvent::Applied(object);
                }
                Some(ListWatchEvent::Deleted(object)) => {
                    self.failures = 0;
                    return ObjectWatchEvent::Deleted(object);
                }
                // The last set stays in use, without an error, until the next list. If that list
                // fails, the outage is reported.
                Some(ListWatchEvent::EndedEarly) => self.rest_longer(),
                Some(ListWatchEvent::UnknownKind(_)) if self.optional => {
                    self.rest(u32::MAX);
                    return ObjectWatchEvent::All(Vec::new());
                }
                Some(ListWatchEvent::UnknownKind(why) | ListWatchEvent::Failed(why)) => {
                    return self.failed(why);
                }
                None => return self.failed("the watch ended".to_owned()),
            }
        }
    }

    fn failed(&mut self, why: String) -> ObjectWatchEvent<K> {
        self.rest_longer();
        ObjectWatchEvent::Failed(why)
    }

    fn rest_longer(&mut self) {
        self.rest(self.failures);
        self.failures += 1;
    }

    /// Starts the pause that follows this many errors, after which the next list begins.
    fn rest(&mut self, errors: u32) {
        self.state = ObjectWatchState::Resting;
        self.until = Instant::now() + wait_after(errors);
        self.watch = futures::stream::pending().boxed();
    }
}

/// Returns the next event of a watch. Waits forever if there is no watch.
pub(super) async fn next_of<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static>(
    watch: &mut Option<ObjectWatch<K>>,
) -> ObjectWatchEvent<K> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

fn start<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static>(
    api: &Api<K>,
    selectors: &ObjectSelectors,
) -> BoxStream<'static, ListWatchEvent<K>> {
    let listing = ListWatch {
        api: api.clone(),
        selectors: selectors.clone(),
        version: None,
        open: None,
    };
    futures::stream::unfold(listing, |mut listing| async {
        let event = listing.next().await;
        Some((event, listing))
    })
    .boxed()
}

impl<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static> ListWatch<K> {
    /// Lists first, and watches from then on.
    async fn next(&mut self) -> ListWatchEvent<K> {
        if self.version.is_none() {
            return match self.list().await {
                Ok(objects) => ListWatchEvent::Listed(objects),
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    ListWatchEvent::UnknownKind(status.to_string())
                }
                Err(error) => {
                    ListWatchEvent::Failed(format!("the list failed: {}", innermost(&error)))
                }
            };
        }
        match self.watch().await {
            Ok(event) => event,
            Err(error) => {
                ListWatchEvent::Failed(format!("the watch failed: {}", innermost(&error)))
            }
        }
    }

    async fn list(&mut self) -> kube::Result<Vec<K>> {
        let ObjectSelectors { labels, fields } = &self.selectors;
        let mut params = ListParams::default().limit(PAGE_OBJECTS_MAX);
        params.label_selector = labels.clone();
        params.field_selector = fields.clone();
        let mut objects = Vec::new();
        loop {
            let page = self.api.list(&params).await?;
            objects.extend(page.items.into_iter().map(strip));
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                self.version = Some(page.metadata.resource_version.unwrap_or_default());
                return Ok(objects);
            }
        }
    }

    /// Returns the next event of the open watch, or of the next watch.
    async fn watch(&mut self) -> kube::Result<ListWatchEvent<K>> {
        let ObjectSelectors { labels, fields } = &self.selectors;
        let params = WatchParams {
            label_selector: labels.clone(),
            field_selector: fields.clone(),
            timeout: Some(WATCH_SECONDS),
            ..WatchParams::default()
        };
        loop {
            let version = self.version.get_or_insert_default();
            let (events, began) = match &mut self.open {
                Some(open) => open,
                None => self.open.insert((
                    self.api.watch(&params, version).await?.boxed(),
                    Instant::now(),
                )),
            };
            match tokio::time::timeout(WATCH_SILENCE_MAX, events.next()).await {
                Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => {
                    *version = object.resource_version().unwrap_or_default();
                    return Ok(ListWatchEvent::Applied(strip(object)));
                }
                Ok(Some(Ok(WatchEvent::Deleted(object)))) => {
                    *version = object.resource_version().unwrap_or_default();
                    return Ok(ListWatchEvent::Deleted(object));
                }
                Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => {
                    *version = bookmark.metadata.resource_version;
                }
                Ok(Some(Ok(WatchEvent::Error(status)))) => return Err(kube::Error::Api(status)),
                Ok(Some(Err(error))) => return Err(error),
                Ok(None) if began.elapsed() < WATCH_LASTS_MIN => {
                    return Ok(ListWatchEvent::EndedEarly);
                }
                Ok(None) => self.open = None,
                Err(_) => {
                    return Ok(ListWatchEvent::Failed(format!(
                        "the watch is silent for {WATCH_SILENCE_MAX:?}"
                    )));
                }
            }
        }
    }
}

/// Removes fields that are not needed, and that are often half of an object.
fn strip<K: Resource>(mut object: K) -> K {
    object.managed_fields_mut().clear();
    object
}

/// Returns the error, followed by its causes.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let cause = source.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = source.source();
    }
    text
}
