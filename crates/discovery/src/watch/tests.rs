use crate::backend::{InstanceReadiness, InstanceRecord, MetadataSource};
use crate::metadata::Metadata;
use crate::table::MetadataResponse;

use super::*;

/// A component whose backend and instances the test simulates, on a clock that advances only when
/// all tasks wait.
struct WatchHarness {
    shared: Arc<HubState>,
    feed: SetFeed,
    began: Instant,
}

fn record(name: &str, port: u16, metadata: bool) -> Arc<InstanceRecord> {
    let address = ([10, 0, 0, 1], port).into();
    let metadata = if metadata {
        MetadataSource::At(address)
    } else {
        MetadataSource::None
    };
    Arc::new(InstanceRecord {
        instance: Instance::new(name, address),
        readiness: InstanceReadiness::Ready,
        metadata,
        freshness: 0,
    })
}

impl WatchHarness {
    fn new() -> Self {
        let shared = Arc::new(HubState {
            table: Mutex::new(InstanceTable::new(
                MetadataPolicy::Preferred,
                LocalAddresses::Refused,
            )),
            events: broadcast::Sender::new(EVENTS_MAX),
            status: watch::Sender::new(BackendStatus::default()),
            relist: Arc::new(Notify::new()),
        });
        let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
        let feed = SetFeed::new(InstanceEvents::new(Arc::new(ComponentHub {
            shared: Arc::clone(&shared),
            task,
        })));
        Self {
            shared,
            feed,
            began: Instant::now(),
        }
    }

    /// Sets the result of the next fetch and its delay.
    fn answers(&self, after: Duration, fetched: MetadataResponse) {
        let fetch = self
            .shared
            .table()
            .next_fetch(Instant::now())
            .expect("a fetch is due");
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            shared.change(|table| {
                table.fetched(&fetch, fetched, ClockReading::read());
            });
        });
    }

    /// Returns the next set, and the milliseconds since the previous one.
    async fn next(&mut self) -> (Vec<String>, u128) {
        let SetChange::Reset(set) = self.feed.next().await else {
            panic!("unreadable")
        };
        let waited = std::mem::replace(&mut self.began, Instant::now()).elapsed();
        (
            set.into_iter().map(|instance| instance.name).collect(),
            waited.as_millis(),
        )
    }

    async fn nothing(&mut self) {
        let change = tokio::time::timeout(Duration::from_secs(3600), self.feed.next()).await;
        assert!(change.is_err(), "{change:?}, though nothing changed");
        self.began = Instant::now();
    }
}

fn good() -> MetadataResponse {
    MetadataResponse::Is(
        Arc::new(Metadata::parse(br#"{"model": "m"}"#).unwrap()),
        None,
    )
}

fn set(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

const GATHER_MS: u128 = GATHER.as_millis();

#[tokio::test(start_paused = true)]
async fn additions_are_gathered_removals_sent_at_once_and_unchanged_sets_not_sent() {
    let mut rig = WatchHarness::new();
    rig.shared
        .apply(BackendEvent::Reset(vec![record("a", 1, false)]));
    assert_eq!(
        rig.next().await,
        (set(&["a"]), 0),
        "no metadata to wait for"
    );
    rig.shared.apply(BackendEvent::Apply(record("b", 2, false)));
    rig.shared.apply(BackendEvent::Apply(record("c", 3, false)));
    assert_eq!(
        rig.next().await,
        (set(&["a", "b", "c"]), GATHER_MS),
        "both in one set"
    );
    rig.shared.apply(BackendEvent::Delete("b".into()));
    assert_eq!(rig.next().await, (set(&["a", "c"]), 0));
    rig.shared.apply(BackendEvent::Apply(record("d", 4, false)));
    rig.shared.apply(BackendEvent::Delete("a".into()));
    assert_eq!(
        rig.next().await,
        (set(&["c", "d"]), 0),
        "a removal does not wait for an addition"
    );
    rig.shared.apply(BackendEvent::Apply(record("c", 3, false)));
    rig.shared.apply(BackendEvent::Delete("nobody".into()));
    rig.shared.apply(BackendEvent::Reset(vec![
        record("d", 4, false),
        record("c", 3, false),
    ]));
    rig.shared.apply(BackendEvent::Alive);
    rig.nothing().await;
}

#[tokio::test(start_paused = true)]
async fn the_first_set_waits_for_metadata_that_was_asked_for() {
    let mut rig = WatchHarness::new();
    rig.shared.apply(BackendEvent::Reset(vec![
        record("asked", 1, true),
        record("plain", 2, false),
    ]));
    rig.answers(Duration::from_secs(1), good());
    let (first, waited) = rig.next().await;
    assert_eq!(
        first,
        set(&["asked", "plain"]),
        "no instance is missing because its fetch runs"
    );
    assert!((1000..=1000 + GATHER_MS).contains(&waited), "{waited} ms");
    // Later sets are not delayed.
    rig.shared
        .apply(BackendEvent::Apply(record("late", 3, true)));
    rig.shared
        .apply(BackendEvent::Apply(record("other", 4, false)));
    assert_eq!(
        rig.next().await,
        (set(&["asked", "other", "plain"]), GATHER_MS)
    );
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_is_silent_does_not_hold_the_first_set_for_long() {
    let mut rig = WatchHarness::new();
    rig.shared.apply(BackendEvent::Reset(vec![
        record("plain", 1, false),
        record("silent", 2, true),
    ]));
    rig.answers(FIRST_SET_MAX * 2, good());
    let (first, waited) = rig.next().await;
    assert_eq!(first, set(&["plain"]));
    assert!(
        (FIRST_SET_MAX.as_millis()..=(FIRST_SET_MAX + GATHER).as_millis()).contains(&waited),
        "{waited} ms"
    );
    assert_eq!(
        rig.next().await.0,
        set(&["plain", "silent"]),
        "it is published when it answers"
    );
}

#[tokio::test(start_paused = true)]
async fn a_failure_to_give_metadata_is_an_answer_too() {
    let mut rig = WatchHarness::new();
    rig.shared.apply(BackendEvent::Reset(vec![
        record("fails", 1, true),
        record("plain", 2, false),
    ]));
    rig.answers(
        Duration::ZERO,
        MetadataResponse::Failed("refused".to_owned()),
    );
    let (first, waited) = rig.next().await;
    assert!(
        first == set(&["plain"]) && waited <= GATHER_MS,
        "{first:?} after {waited} ms"
    );
}
