use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::metadata::Metadata;

const AT: &str = "10.0.0.1:8000";

fn record(name: &str, address: &str) -> InstanceRecord {
    let instance = Instance::new(name, address.parse().unwrap());
    InstanceRecord {
        instance,
        readiness: InstanceReadiness::Ready,
        metadata: MetadataSource::None,
        freshness: 0,
    }
}

fn served(name: &str, address: &str, generation: &str) -> InstanceRecord {
    let mut record = record(name, address);
    record.metadata = MetadataSource::At(record.instance.address);
    record.instance.generation = generation.to_owned();
    record
}

fn not_ready(record: InstanceRecord) -> InstanceRecord {
    InstanceRecord {
        readiness: InstanceReadiness::NotReady("probe".to_owned()),
        ..record
    }
}

fn model(name: &str) -> Arc<Metadata> {
    Arc::new(Metadata::parse(json!({ "model": name }).to_string().as_bytes()).unwrap())
}

/// A table with its clock. Events are shown as `+name@port` and `-name`.
struct TableHarness {
    table: InstanceTable,
    origin: Instant,
    ms: u64,
}

impl TableHarness {
    fn new(policy: MetadataPolicy) -> Self {
        Self {
            table: InstanceTable::new(policy, LocalAddresses::Refused),
            origin: Instant::now(),
            ms: 0,
        }
    }

    fn now(&self) -> ClockReading {
        let elapsed = Duration::from_millis(self.ms);
        ClockReading {
            instant: self.origin + elapsed,
            wall: SystemTime::UNIX_EPOCH + elapsed,
        }
    }

    fn run(&mut self, verb: impl FnOnce(&mut InstanceTable, ClockReading)) -> String {
        let now = self.now();
        verb(&mut self.table, now);
        let events = self.table.take_events();
        let text = |event: &InstanceEvent| match event {
            InstanceEvent::Added(i) => format!("+{}@{}", i.name, i.address.port()),
            InstanceEvent::Removed(id) => format!("-{id}"),
        };
        events.iter().map(text).collect::<Vec<_>>().join(" ")
    }

    fn apply(&mut self, record: InstanceRecord) -> String {
        self.run(|table, now| table.apply(Arc::new(record), now))
    }

    fn delete(&mut self, id: &str) -> String {
        self.run(|table, now| table.delete(id, now))
    }

    fn reset(&mut self, records: Vec<InstanceRecord>, after_outage: bool) -> String {
        let records = records.into_iter().map(Arc::new).collect();
        self.run(|table, now| {
            table.reset(records, after_outage, now);
        })
    }

    fn answer(&mut self, fetched: MetadataResponse) -> String {
        let fetch = self
            .table
            .next_fetch(self.now().instant)
            .expect("a fetch is due");
        self.run(|table, now| table.fetched(&fetch, fetched, now))
    }

    fn wait(&mut self, elapsed: Duration) -> String {
        self.ms += u64::try_from(elapsed.as_millis()).unwrap();
        self.run(|table, now| table.tick(now))
    }

    fn state(&self, id: &str) -> InstanceState {
        self.table
            .seen()
            .into_iter()
            .find(|seen| *seen.id == *id)
            .unwrap()
            .state
    }

    fn model_of_added(&self, id: &str) -> Option<String> {
        let (_, instance) = self
            .table
            .published_instances()
            .find(|(published, _)| ***published == *id)?;
        instance.metadata().models().first().map(|m| m.name.clone())
    }
}

#[test]
fn an_event_is_an_upsert_of_the_whole_value_and_no_event_is_sent_twice() {
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    assert_eq!(rig.apply(record("a", AT)), "+a@8000");
    assert_eq!(rig.apply(record("a", AT)), "");
    assert_eq!(
        rig.apply(record("a", "10.0.0.1:9000")),
        "+a@9000",
        "restarted at another port, with no dip in readiness"
    );
    assert_eq!(rig.apply(not_ready(record("a", "10.0.0.1:9000"))), "-a");
    assert_eq!(rig.apply(record("a", AT)), "+a@8000");
    assert_eq!(rig.delete("a"), "-a");
    assert_eq!(rig.delete("a"), "");
    assert_eq!(rig.state("a"), InstanceState::Removed);
}

#[test]
fn a_list_replaces_the_set() {
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    assert_eq!(
        rig.reset(vec![record("a", AT), record("b", "10.0.0.2:1")], false),
        "+a@8000 +b@1"
    );
    assert_eq!(
        rig.reset(
            vec![record("b", "10.0.0.2:1"), record("c", "10.0.0.3:1")],
            true
        ),
        "-a +c@1",
        "too few to hold their removal"
    );
    assert_eq!(rig.reset(vec![], false), "-b -c");
}

#[test]
fn ready_without_metadata_is_pending_and_none_is_an_answer() {
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    assert_eq!(rig.apply(served("a", AT, "1")), "");
    assert!(matches!(rig.state("a"), InstanceState::Pending(_)));
    assert_eq!(
        rig.answer(MetadataResponse::Failed("refused".to_owned())),
        ""
    );
    assert_eq!(
        rig.state("a"),
        InstanceState::Pending("its metadata cannot be fetched: refused".to_owned())
    );
    assert_eq!(
        rig.table.next_fetch(rig.now().instant),
        None,
        "not again at once"
    );
    rig.wait(METADATA_RETRY_FIRST * 2);
    assert_eq!(
        rig.answer(MetadataResponse::Absent),
        "+a@8000",
        "an instance without metadata is published"
    );
    let mut rig = TableHarness::new(MetadataPolicy::Required);
    rig.apply(served("a", AT, "1"));
    assert_eq!(rig.answer(MetadataResponse::Absent), "");
    assert_eq!(
        rig.state("a"),
        InstanceState::Pending("it has no metadata, but metadata is required".to_owned())
    );
    let mut rig = TableHarness::new(MetadataPolicy::Ignored);
    assert_eq!(rig.apply(served("a", AT, "1")), "+a@8000");
    assert_eq!(rig.table.next_due(), None);
}

#[test]
fn the_last_good_metadata_counts_while_it_is_the_same_life() {
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    rig.apply(served("a", AT, "1"));
    assert_eq!(
        rig.answer(MetadataResponse::Is(model("m"), Some("\"1\"".to_owned()))),
        "+a@8000"
    );
    rig.wait(METADATA_POLL_INTERVAL * 2);
    let fetch = rig.table.next_fetch(rig.now().instant).unwrap();
    assert_eq!(
        fetch.etag.as_deref(),
        Some("\"1\""),
        "a conditional request"
    );
    assert_eq!(
        rig.run(|t, now| t.fetched(&fetch, MetadataResponse::Failed("reset".to_owned()), now)),
        ""
    );
    assert_eq!(
        (rig.model_of_added("a"), rig.state("a")),
        (
            Some("m".to_owned()),
            InstanceState::Stale("reset".to_owned())
        )
    );
    assert_eq!(
        rig.apply(served("a", AT, "2")),
        "-a",
        "the new generation has no metadata yet"
    );
    assert_eq!(
        rig.run(|t, now| t.fetched(&fetch, MetadataResponse::Is(model("old"), None), now)),
        "",
        "the answer of the old generation"
    );
    assert_eq!(
        rig.answer(MetadataResponse::Is(model("new"), None)),
        "+a@8000"
    );
    assert_eq!(rig.model_of_added("a").as_deref(), Some("new"));
}

#[test]
fn changed_metadata_is_published_and_a_change_during_a_fetch_causes_another_fetch() {
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    rig.apply(served("a", AT, "1"));
    let fetch = rig.table.next_fetch(rig.now().instant).unwrap();
    let labelled = |r: InstanceRecord| InstanceRecord {
        instance: Instance {
            labels: vec![("z".into(), "1".into())],
            ..r.instance.clone()
        },
        ..r
    };
    rig.apply(labelled(served("a", AT, "1")));
    assert_eq!(
        rig.table.next_fetch(rig.now().instant),
        None,
        "one fetch at a time"
    );
    assert_eq!(
        rig.run(|t, now| t.fetched(&fetch, MetadataResponse::Is(model("m"), None), now)),
        "+a@8000"
    );
    assert_eq!(
        rig.answer(MetadataResponse::Is(model("n"), None)),
        "+a@8000"
    );
    rig.wait(METADATA_POLL_INTERVAL * 2);
    assert_eq!(rig.answer(MetadataResponse::Unchanged), "");
    assert_eq!(rig.model_of_added("a").as_deref(), Some("n"));
}

#[test]
fn traffic_goes_where_the_metadata_says_if_that_is_the_instance_itself() {
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    let transport = |text: &str| {
        Arc::new(
            Metadata::parse(format!(r#"{{"transport":{{"address":"{text}"}}}}"#).as_bytes())
                .unwrap(),
        )
    };
    rig.apply(served("a", AT, "1"));
    assert_eq!(
        rig.answer(MetadataResponse::Is(transport("10.0.0.1:9"), None)),
        "+a@9"
    );
    rig.wait(METADATA_POLL_INTERVAL * 2);
    assert_eq!(
        rig.answer(MetadataResponse::Is(transport("10.6.6.6:9"), None)),
        "-a",
        "an instance that points at another host"
    );
    assert!(matches!(rig.state("a"), InstanceState::Refused(_)));
}

#[test]
fn one_address_is_published_once_for_the_newer_instance() {
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    let aged = |name: &str, freshness| InstanceRecord {
        freshness,
        ..record(name, AT)
    };
    assert_eq!(rig.apply(aged("old", 1)), "+old@8000");
    assert_eq!(
        rig.apply(aged("new", 2)),
        "-old +new@8000",
        "never both at once"
    );
    assert!(matches!(rig.state("old"), InstanceState::Refused(_)));
    assert_eq!(rig.apply(record("new", "10.0.0.2:1")), "+new@1 +old@8000");
    assert_eq!(rig.apply(aged("new", 2)), "-old +new@8000");
    assert_eq!(
        rig.apply(not_ready(aged("new", 2))),
        "-new +old@8000",
        "an instance that is not ready has no claim"
    );
    assert_eq!(rig.apply(aged("new", 2)), "-old +new@8000");
    assert_eq!(rig.delete("new"), "-new +old@8000");
    assert_eq!(rig.apply(aged("newest", 3)), "-old +newest@8000");
    assert_eq!(
        rig.apply(aged("newest", 0)),
        "-newest +old@8000",
        "also if a claim at the same address becomes the lesser one"
    );
}

#[test]
fn a_mass_disappearance_after_an_outage_is_held_and_then_believed() {
    let all = |n: u16| {
        (0..n)
            .map(|i| record(&format!("e{i}"), &format!("10.0.0.1:{}", i + 1)))
            .collect::<Vec<_>>()
    };
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    rig.reset(all(8), false);
    assert_eq!(rig.reset(all(5), true), "-e5 -e6 -e7", "less than half");
    rig.reset(all(8), false);
    let asks = {
        let now = rig.now();
        let few = all(1).into_iter().map(Arc::new).collect();
        rig.table.reset(few, true, now)
    };
    assert!(asks, "the backend should list again");
    assert_eq!(
        (rig.table.published_instances().count(), rig.state("e7")),
        (8, InstanceState::RemovalHeld)
    );
    assert_eq!(
        rig.delete("e7"),
        "-e7",
        "an explicit removal takes effect at once"
    );
    assert_eq!(rig.reset(all(1), false), "", "the second list has the same");
    assert_eq!(rig.wait(HOLD - Duration::from_millis(1)), "");
    assert_eq!(
        rig.wait(Duration::from_millis(1)),
        "-e1 -e2 -e3 -e4 -e5 -e6"
    );
    rig.reset(all(8), false);
    rig.reset(vec![], true);
    assert_eq!(rig.reset(all(8), false), "", "the backend has them again");
    assert_eq!(rig.wait(HOLD * 2), "");
    assert_eq!(rig.state("e3"), InstanceState::Ready);
    let all_not_ready = all(8).into_iter().map(not_ready).collect();
    assert_eq!(
        rig.reset(all_not_ready, true),
        "",
        "also if all become not ready"
    );
    assert_eq!(rig.wait(HOLD), "-e0 -e1 -e2 -e3 -e4 -e5 -e6 -e7");
}

#[test]
fn without_an_outage_all_instances_may_leave_at_once() {
    let all: Vec<InstanceRecord> = (0..8)
        .map(|i| record(&format!("e{i}"), &format!("10.0.0.1:{}", i + 1)))
        .collect();
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    rig.reset(all, false);
    assert_eq!(rig.reset(vec![], false), "-e0 -e1 -e2 -e3 -e4 -e5 -e6 -e7");
}

#[test]
fn an_unconfirmed_instance_is_published_as_such_and_leaves_when_it_is_not_ready() {
    let unconfirmed = |record| InstanceRecord {
        readiness: InstanceReadiness::Unconfirmed("node".to_owned()),
        ..record
    };
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    let published = |rig: &TableHarness| {
        rig.table
            .published_instances()
            .map(|(_, instance)| instance.unconfirmed.as_deref().map(str::to_owned))
            .collect::<Vec<_>>()
    };
    assert_eq!(rig.apply(record("a", AT)), "+a@8000");
    assert_eq!(rig.apply(unconfirmed(record("a", AT))), "+a@8000");
    assert_eq!(
        (published(&rig), rig.state("a")),
        (
            vec![Some("node".to_owned())],
            InstanceState::Unconfirmed("node".to_owned())
        )
    );
    assert_eq!(
        rig.apply(unconfirmed(record("a", AT))),
        "",
        "published once"
    );
    assert_eq!(rig.apply(record("a", AT)), "+a@8000");
    assert_eq!(
        (published(&rig), rig.state("a")),
        (vec![None], InstanceState::Ready)
    );
    assert_eq!(rig.apply(unconfirmed(record("a", AT))), "+a@8000");
    assert_eq!(rig.apply(not_ready(record("a", AT))), "-a");
    // After a restart of the daemon, an instance may first be seen as unconfirmed. The instance is
    // published only when its metadata is known.
    assert_eq!(
        rig.apply(unconfirmed(served("b", "10.0.0.1:8001", "1"))),
        ""
    );
    assert_eq!(rig.answer(MetadataResponse::Absent), "+b@8001");
}

#[derive(Clone, Debug)]
enum TableStep {
    Apply(u8, u8, bool, u64),
    Delete(u8),
    Reset(Vec<(u8, u8, bool)>, bool),
    Answer(u8),
    Wait(u64),
}

fn any_step() -> impl Strategy<Value = TableStep> {
    prop_oneof![
        (0u8..6, 0u8..6, any::<bool>(), 0u64..3)
            .prop_map(|(name, port, ready, fresh)| TableStep::Apply(name, port, ready, fresh)),
        (0u8..6).prop_map(TableStep::Delete),
        (
            prop::collection::vec((0u8..6, 0u8..6, any::<bool>()), 0..6),
            any::<bool>()
        )
            .prop_map(|(all, outage)| TableStep::Reset(all, outage)),
        (0u8..4).prop_map(TableStep::Answer),
        (0u64..12_000).prop_map(TableStep::Wait),
    ]
}

proptest! {
    #[test]
    fn events_replayed_are_the_table_and_no_two_share_an_address(steps in prop::collection::vec(any_step(), 0..80)) {
        let make = |name: u8, port: u8, ready: bool| {
            let record = served(&format!("e{name}"), &format!("10.0.0.1:{}", u16::from(port) + 1), &format!("{}", port / 3));
            if ready { record } else { not_ready(record) }
        };
        let mut rig = TableHarness::new(MetadataPolicy::Preferred);
        let mut replayed: BTreeMap<String, Arc<Instance>> = BTreeMap::new();
        for step in steps {
            let now = rig.now();
            match step {
                TableStep::Apply(name, port, ready, freshness) => {
                    rig.table.apply(Arc::new(InstanceRecord { freshness, ..make(name, port, ready) }), now);
                }
                TableStep::Delete(name) => rig.table.delete(&format!("e{name}"), now),
                TableStep::Reset(all, outage) => {
                    let all = all.into_iter().map(|(name, port, ready)| Arc::new(make(name, port, ready))).collect();
                    rig.table.reset(all, outage, now);
                }
                TableStep::Answer(kind) => {
                    let fetched = match kind {
                        0 => MetadataResponse::Absent,
                        1 => MetadataResponse::Failed("no".to_owned()),
                        2 => MetadataResponse::Unchanged,
                        _ => MetadataResponse::Is(model("m"), None),
                    };
                    if let Some(fetch) = rig.table.next_fetch(now.instant) {
                        rig.table.fetched(&fetch, fetched, now);
                    }
                }
                TableStep::Wait(ms) => {
                    rig.ms += ms;
                    rig.table.tick(rig.now());
                }
            }
            for event in rig.table.take_events() {
                match event {
                    InstanceEvent::Added(instance) => {
                        let taken = replayed.values().any(|other| other.address == instance.address && other.name != instance.name);
                        prop_assert!(!taken, "an address has a second owner before the first lost it");
                        let before = replayed.insert(instance.name.clone(), Arc::clone(&instance));
                        prop_assert_ne!(before, Some(instance), "published twice");
                    }
                    InstanceEvent::Removed(id) => prop_assert!(replayed.remove(&*id).is_some(), "removed, but never published"),
                }
            }
            let published: BTreeMap<String, Arc<Instance>> = rig.table.published_instances().map(|(id, i)| (id.to_string(), Arc::clone(i))).collect();
            prop_assert_eq!(&replayed, &published);
            prop_assert_eq!(rig.table.published_count, published.len());
        }
    }
}

#[test]
fn the_newest_instances_beyond_the_limit_wait_and_replace_those_that_are_removed() {
    let mut rig = TableHarness::new(MetadataPolicy::Ignored);
    let full = u16::try_from(INSTANCES_MAX).unwrap();
    let numbered = |number: u16, freshness| InstanceRecord {
        freshness,
        ..record(
            &format!("i{number:04}"),
            &format!("10.0.0.1:{}", number + 1),
        )
    };
    // The newest record has the first name.
    let mut records: Vec<_> = (1..=full).map(|number| numbered(number, 1)).collect();
    records.push(numbered(0, 2));
    rig.reset(records, false);
    assert!(matches!(rig.state("i0000"), InstanceState::Refused(why) if why.contains("1024")));
    assert_eq!(rig.table.published_instances().count(), INSTANCES_MAX);
    assert_eq!(rig.apply(numbered(full + 1, 3)), "");
    assert_eq!(rig.delete("i0007"), "-i0007 +i0000@1");
    assert_eq!(rig.apply(not_ready(numbered(0, 2))), "-i0000 +i1025@1026");
    assert_eq!(rig.delete("i0001"), "-i0001");
    assert_eq!(rig.apply(numbered(0, 2)), "+i0000@1");
    // An address goes to another instance, although the table is full.
    let heir = record("heir", "10.0.0.1:1");
    let heir = InstanceRecord {
        freshness: 9,
        ..heir
    };
    assert_eq!(rig.apply(heir), "-i0000 +heir@1");
}

#[test]
fn an_instance_at_a_local_address_is_refused_and_not_asked() {
    let mut rig = TableHarness::new(MetadataPolicy::Preferred);
    assert_eq!(rig.apply(served("a", "169.254.169.254:80", "1")), "");
    assert!(matches!(rig.state("a"), InstanceState::Refused(why) if why.contains("169.254")));
    assert!(rig.table.next_fetch(rig.now().instant).is_none());
    assert_eq!(rig.apply(served("a", AT, "2")), "");
    assert!(rig.table.next_fetch(rig.now().instant).is_some());
}
