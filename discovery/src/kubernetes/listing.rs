//! List and watch of one kind, made robust: whatever goes wrong ends in a fresh list.
//!
//! `kube`'s watcher resumes from the resource version it has. That is wrong after every fault there is: a proxy that answers HTTP 410 at the start of a
//! watch would be asked for ever, and after etcd was restored from a backup the version lies in the future, where a watch is accepted and stays
//! silent. So an error starts it anew, after a wait, with a list, which replaces the set; so does old age. What is told between is in force.

use std::fmt::Debug;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

/// After how many seconds a watch is ended and taken up again. The client gives up on a silent connection 5 s later: that is how
/// long a network that swallows packets goes unnoticed.
const WATCH_SECONDS: u32 = 30;

/// The oldest a set gets without being listed again, whatever the watch says: the bound on what a watch can miss in silence.
pub(super) const RELIST_INTERVAL: Duration = Duration::from_secs(300);

/// How long a list may take: ten thousand endpoints are 5 MB.
const LIST_DEADLINE: Duration = Duration::from_secs(30);

/// The first wait after an error; doubled up to [`RETRY_MAX`].
const RETRY_FIRST: Duration = Duration::from_millis(250);

/// The longest wait after an error: how much longer an outage lasts for us than for the API server.
const RETRY_MAX: Duration = Duration::from_secs(10);

/// The objects of one kind that a label selector matches.
pub(super) struct Listing<K> {
    api: Api<K>,
    config: watcher::Config,
    watch: BoxStream<'static, watcher::Result<Event<K>>>,
    state: State,
    /// When `state` is over.
    until: Instant,
    /// Does the kind have no objects where the API does not know it, rather than that being an error?
    optional: bool,
    failures: u32,
    listed: Vec<K>,
}

/// What a listing is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for its list.
    Listing,
    /// Has it, and watches.
    Watching,
    /// Waits after an error.
    Resting,
}

/// What became of them.
pub(super) enum Told<K> {
    /// All there are.
    All(Vec<K>),
    /// New, or of another value.
    Applied(K),
    /// No more.
    Deleted(K),
    /// They cannot be had now, for this reason.
    Failed(String),
}

impl<K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug + Send + 'static> Listing<K> {
    pub(super) fn new(api: Api<K>, selector: &str) -> Self {
        let mut config = watcher::Config::default().timeout(WATCH_SECONDS);
        if !selector.is_empty() {
            config = config.labels(selector);
        }
        Self::with_config(api, config)
    }
}

impl<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static> Listing<K> {
    /// One object, by its name.
    pub(super) fn of_one(api: Api<K>, name: &str) -> Self {
        Self::with_config(api, watcher::Config::default().timeout(WATCH_SECONDS).fields(&format!("metadata.name={name}")))
    }

    /// All of a kind that need not be installed.
    pub(super) fn of_kind(api: Api<K>) -> Self {
        Self { optional: true, ..Self::with_config(api, watcher::Config::default().timeout(WATCH_SECONDS)) }
    }

    fn with_config(api: Api<K>, config: watcher::Config) -> Self {
        let watch = start(&api, &config);
        Self {
            api,
            config,
            watch,
            state: State::Listing,
            until: Instant::now() + LIST_DEADLINE,
            optional: false,
            failures: 0,
            listed: Vec::new(),
        }
    }

    /// Lists anew, now.
    pub(super) fn restart(&mut self) {
        self.watch = start(&self.api, &self.config);
        (self.state, self.until) = (State::Listing, Instant::now() + LIST_DEADLINE);
        self.listed.clear();
    }

    /// What is told next. Cancel-safe.
    pub(super) async fn next(&mut self) -> Told<K> {
        loop {
            let event = tokio::select! {
                event = self.watch.next() => event,
                () = tokio::time::sleep_until(self.until) => {
                    if self.state == State::Listing {
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
                    (self.state, self.until) = (State::Watching, Instant::now() + RELIST_INTERVAL);
                    return Told::All(std::mem::take(&mut self.listed));
                }
                Some(Ok(Event::Apply(object))) => return Told::Applied(object),
                Some(Ok(Event::Delete(object))) => return Told::Deleted(object),
                Some(Err(error)) if self.optional && is_unknown_kind(&error) => {
                    self.rest(RETRY_MAX);
                    return Told::All(Vec::new());
                }
                Some(Err(error)) => return self.failed(innermost(&error)),
                None => return self.failed("the watch ended".to_owned()),
            }
        }
    }

    fn failed(&mut self, why: String) -> Told<K> {
        let wait = RETRY_FIRST.saturating_mul(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures += 1;
        self.rest(wait);
        Told::Failed(why)
    }

    fn rest(&mut self, wait: Duration) {
        // Half of it is chance, so that all daemons do not come back at once.
        (self.state, self.until) = (State::Resting, Instant::now() + wait.mul_f64(0.5 + crate::registry::chance() / 2.0));
        self.watch = futures::stream::pending().boxed();
        self.listed.clear();
    }
}

fn start<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static>(
    api: &Api<K>,
    config: &watcher::Config,
) -> BoxStream<'static, watcher::Result<Event<K>>> {
    let strip = |mut object: K| {
        object.managed_fields_mut().clear(); // often half of an object, and of no use here
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

/// The API has no such kind (or no longer).
fn is_unknown_kind(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

/// An error with its causes, the last of which is what people can do something about.
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
