use std::time::Instant;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proptest::prelude::*;
use serde_json::json;

use super::*;

/// One endpoint of a generated slice.
#[derive(Clone, Debug)]
struct SliceRow {
    pod: u8,
    uid: u8,
    ip: u8,
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

fn slice(name: &str, trigger: u8, v6: bool, rows: &[SliceRow]) -> EndpointSlice {
    let endpoint = |row: &SliceRow| Endpoint {
        addresses: vec![if v6 {
            format!("fd00::{:x}", u16::from(row.ip) + 1)
        } else {
            format!("10.0.0.{}", u16::from(row.ip) + 1)
        }],
        conditions: Some(EndpointConditions {
            ready: row.ready,
            serving: row.serving,
            terminating: row.terminating,
        }),
        target_ref: Some(ObjectReference {
            kind: Some("Pod".to_owned()),
            name: Some(format!("pod-{}", row.pod)),
            uid: Some(format!("uid-{}-{}", row.pod, row.uid)),
            ..ObjectReference::default()
        }),
        ..Endpoint::default()
    };
    EndpointSlice {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            annotations: Some(BTreeMap::from([(
                TRIGGER_TIME.to_owned(),
                format!("2026-11-21T00:00:{:02}Z", trigger % 60),
            )])),
            ..ObjectMeta::default()
        },
        address_type: if v6 { "IPv6" } else { "IPv4" }.to_owned(),
        endpoints: Some(rows.iter().map(endpoint).collect()),
        ports: Some(vec![EndpointPort {
            name: Some("http".to_owned()),
            port: Some(8080),
            ..EndpointPort::default()
        }]),
    }
}

fn row(pod: u8) -> SliceRow {
    SliceRow {
        pod,
        uid: 0,
        ip: pod,
        ready: Some(true),
        serving: None,
        terminating: None,
    }
}

/// The endpoints that a reader of these events considers ready, with address and generation.
#[derive(Default)]
struct RecordSet(BTreeMap<String, Arc<InstanceRecord>>);

impl RecordSet {
    fn read(&mut self, events: Vec<BackendEvent>) {
        for event in events {
            match event {
                BackendEvent::Reset(all) => {
                    self.0 = all.into_iter().map(|r| (r.name().to_owned(), r)).collect();
                }
                BackendEvent::Apply(record) => {
                    drop(self.0.insert(record.name().to_owned(), record));
                }
                BackendEvent::Delete(id) => assert!(
                    self.0.remove(&*id).is_some(),
                    "{id} deleted, but never published"
                ),
                BackendEvent::Failed(why) => panic!("{why}"),
                BackendEvent::Requirements(_) | BackendEvent::Warns(_) | BackendEvent::Alive => {}
            }
        }
    }

    fn ready(&self) -> Vec<&str> {
        self.0
            .values()
            .filter(|r| r.readiness == InstanceReadiness::Ready)
            .map(|r| r.name())
            .collect()
    }
}

fn from_json(value: serde_json::Value) -> EndpointSlice {
    serde_json::from_value(value).unwrap()
}

#[test]
fn the_slice_of_the_proposal() {
    let slice = from_json(json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": "dynamo-decode-service-abc123", "namespace": "prod", "labels": {
            "kubernetes.io/service-name": "dynamo-decode-service", "endpointslice.kubernetes.io/managed-by": "c",
            "nvidia.com/dynamo-component": "decode"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.1.2.3", "10.9.9.9"], "conditions": {"ready": true}, "zone": "a", "nodeName": "n1",
            "targetRef": {"kind": "Pod", "name": "dynamo-decode-pod-abc123", "namespace": "default", "uid": "u"}}],
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    }));
    let [record] = SliceIndex::new(PortRule::default())
        .reset(&[slice])
        .try_into()
        .unwrap();
    let InstanceRecord {
        instance,
        readiness,
        metadata,
        ..
    } = &*record;
    assert_eq!(
        (instance.name.as_str(), instance.namespace.as_str()),
        ("dynamo-decode-pod-abc123", "default")
    );
    assert_eq!(
        (
            instance.generation.as_str(),
            instance.address.to_string().as_str()
        ),
        ("u", "10.1.2.3:8080")
    );
    assert_eq!(
        (readiness, metadata),
        (
            &InstanceReadiness::Ready,
            &MetadataSource::At(instance.address)
        )
    );
    let labels: Vec<String> = instance
        .labels
        .iter()
        .map(|(k, v)| format!("{k}={v}"))
        .collect();
    assert_eq!(
        labels,
        [
            "kubernetes.io/hostname=n1",
            "nvidia.com/dynamo-component=decode",
            "topology.kubernetes.io/zone=a"
        ]
    );
}

#[test]
fn conditions_as_the_api_means_them() {
    for (ready, serving, terminating, expected) in [
        (None, None, None, true),
        (Some(true), None, None, true),
        (Some(false), None, None, false),
        (Some(true), Some(false), None, false), // publishNotReadyAddresses
        (Some(true), Some(true), Some(true), false),
        (Some(false), Some(true), Some(true), false),
        (None, Some(true), Some(false), true),
    ] {
        let conditions = EndpointConditions {
            ready,
            serving,
            terminating,
        };
        assert_eq!(
            readiness(Some(&conditions)) == InstanceReadiness::Ready,
            expected,
            "{conditions:?}"
        );
    }
    assert_eq!(readiness(None), InstanceReadiness::Ready);
}

#[test]
fn ports_by_name_then_by_place_then_by_configuration() {
    let port_of = |ports: &str, name: Option<&str>, fallback| {
        let slice = from_json(
            json!({"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"]}],
            "ports": serde_json::from_str::<serde_json::Value>(ports).unwrap()}),
        );
        let rule = PortRule {
            name: name.map(str::to_owned),
            fallback,
        };
        let [record] = SliceIndex::new(rule).reset(&[slice]).try_into().unwrap();
        (record.readiness == InstanceReadiness::Ready).then(|| record.instance.address.port())
    };
    let two = r#"[{"name":"http","port":8080},{"name":"grpc","port":9090}]"#;
    assert_eq!(port_of(two, None, None), Some(8080));
    assert_eq!(port_of(two, Some("grpc"), None), Some(9090));
    assert_eq!(port_of(two, Some("other"), None), None);
    assert_eq!(port_of(two, Some("other"), Some(7)), Some(7));
    assert_eq!(port_of("null", None, Some(7)), Some(7));
    assert_eq!(port_of(r#"[{"name":"all"}]"#, None, None), None);
}

#[test]
fn what_has_no_meaning_is_left_out_and_what_has_no_pod_has_a_name() {
    let slice = |kind: &str, address: &str| {
        from_json(
            json!({"metadata": {"name": "s", "labels": {"kubernetes.io/service-name": "svc"}}, "addressType": kind,
            "endpoints": [{"addresses": [address]}, {"addresses": []}], "ports": [{"port": 1}]}),
        )
    };
    let names = |slice| {
        SliceIndex::new(PortRule::default())
            .reset(&[slice])
            .iter()
            .map(|r| r.name().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(slice("IPv4", "10.0.0.1")), ["svc-10.0.0.1"]);
    assert_eq!(names(slice("IPv6", "fd00::1")), ["svc-fd00--1"]);
    assert_eq!(names(slice("FQDN", "host.example")), Vec::<String>::new());
    assert_eq!(names(slice("IPv4", "host.example")), Vec::<String>::new());
}

#[test]
fn an_endpoint_that_moves_between_slices_is_never_gone() {
    let mut index = SliceIndex::new(PortRule::default());
    let mut reader = RecordSet::default();
    reader.read(index.apply(&slice("a", 0, false, &[row(1), row(2)])));
    reader.read(index.apply(&slice("b", 1, false, &[row(2)])));
    assert_eq!(reader.ready(), ["pod-1", "pod-2"]);
    assert!(
        !index
            .apply(&slice("a", 1, false, &[row(1)]))
            .iter()
            .any(|e| matches!(e, BackendEvent::Delete(_)))
    );
    reader.read(index.delete("b"));
    assert_eq!(reader.ready(), ["pod-1"]);
    reader.read(index.delete("a"));
    assert!(
        reader.0.is_empty() && index.endpoints.is_empty() && index.slices.is_empty(),
        "nothing is kept of removed endpoints"
    );
}

#[test]
fn dual_stack_is_one_instance_reached_by_ipv4() {
    let mut index = SliceIndex::new(PortRule::default());
    let mut reader = RecordSet::default();
    reader.read(index.apply(&slice("six", 9, true, &[row(1)])));
    assert_eq!(
        reader.0["pod-1"].instance.address.to_string(),
        "[fd00::2]:8080"
    );
    reader.read(index.apply(&slice("four", 0, false, &[row(1)])));
    assert_eq!(
        reader.0["pod-1"].instance.address.to_string(),
        "10.0.0.2:8080"
    );
    reader.read(index.delete("four"));
    assert_eq!(
        reader.0["pod-1"].instance.address.to_string(),
        "[fd00::2]:8080"
    );
}

#[test]
fn of_two_pods_of_one_name_the_ready_one_counts_then_the_newer() {
    let mut index = SliceIndex::new(PortRule::default());
    let mut reader = RecordSet::default();
    let new = |ready| SliceRow {
        uid: 1,
        ip: 7,
        ready: Some(ready),
        ..row(1)
    };
    reader.read(index.apply(&slice("a", 0, false, &[row(1)])));
    reader.read(index.apply(&slice("b", 1, false, &[new(false)])));
    assert_eq!(reader.0["pod-1"].instance.generation, "uid-1-0");
    reader.read(index.apply(&slice("b", 2, false, &[new(true)])));
    assert_eq!(reader.0["pod-1"].instance.generation, "uid-1-1");
}

#[derive(Clone, Debug)]
enum SliceStep {
    Apply(u8, u8, bool, Vec<SliceRow>),
    Delete(u8),
    /// The watch broke: events were missed, and a list follows.
    Relist(Vec<(u8, u8, bool, Vec<SliceRow>)>),
}

fn any_row() -> impl Strategy<Value = SliceRow> {
    let condition = || prop::option::of(any::<bool>());
    (
        0u8..5,
        0u8..2,
        0u8..5,
        condition(),
        condition(),
        condition(),
    )
        .prop_map(|(pod, uid, ip, ready, serving, terminating)| SliceRow {
            pod,
            uid,
            ip,
            ready,
            serving,
            terminating,
        })
}

fn any_slice() -> impl Strategy<Value = (u8, u8, bool, Vec<SliceRow>)> {
    (
        0u8..4,
        0u8..4,
        any::<bool>(),
        prop::collection::vec(any_row(), 0..5),
    )
}

fn any_step() -> impl Strategy<Value = SliceStep> {
    prop_oneof![
        4 => any_slice().prop_map(|(name, trigger, v6, rows)| SliceStep::Apply(name, trigger, v6, rows)),
        2 => (0u8..4).prop_map(SliceStep::Delete),
        1 => prop::collection::vec(any_slice(), 0..4).prop_map(SliceStep::Relist),
    ]
}

proptest! {
    /// Only the final slices decide, whatever events came before. An endpoint is ready if it is
    /// ready in any slice.
    #[test]
    fn any_history_ends_as_the_union_of_the_final_slices(steps in prop::collection::vec(any_step(), 0..40)) {
        let mut index = SliceIndex::new(PortRule::default());
        let mut reader = RecordSet::default();
        let mut slices: BTreeMap<u8, (EndpointSlice, Vec<SliceRow>)> = BTreeMap::new();
        for step in steps {
            match step {
                SliceStep::Apply(name, trigger, v6, rows) => {
                    let new = slice(&format!("s{name}"), trigger, v6, &rows);
                    reader.read(index.apply(&new));
                    slices.insert(name, (new, rows));
                }
                SliceStep::Delete(name) => {
                    slices.remove(&name);
                    reader.read(index.delete(&format!("s{name}")));
                }
                SliceStep::Relist(all) => {
                    slices = all.into_iter().map(|(n, t, v6, rows)| (n, (slice(&format!("s{n}"), t, v6, &rows), rows))).collect();
                    let all: Vec<EndpointSlice> = slices.values().map(|(slice, _)| slice.clone()).collect();
                    reader.read(vec![BackendEvent::Reset(index.reset(&all))]);
                }
            }
        }
        let is_ready = |row: &&SliceRow| row.ready != Some(false) && row.serving != Some(false) && row.terminating != Some(true);
        let rows = || slices.values().flat_map(|(_, rows)| rows);
        let union: BTreeSet<String> = rows().filter(is_ready).map(|row| format!("pod-{}", row.pod)).collect();
        prop_assert_eq!(reader.ready().into_iter().map(str::to_owned).collect::<BTreeSet<_>>(), union);
        let all: Vec<EndpointSlice> = slices.values().map(|(slice, _)| slice.clone()).collect();
        let mut fresh = RecordSet::default();
        fresh.read(vec![BackendEvent::Reset(SliceIndex::new(PortRule::default()).reset(&all))]);
        prop_assert_eq!(reader.0, fresh.0);
    }
}

/// Ten thousand endpoints in a hundred slices: the time for an event depends only on its own slice.
/// The test compares with a smaller index on the same machine, not with a fixed time.
#[test]
fn an_event_costs_its_slice_however_many_there_are() {
    let event_cost = |slices: u16| {
        let rows = |s: u16, ready: bool| -> EndpointSlice {
            let endpoint = |i: u16| Endpoint {
                addresses: vec![format!("10.{}.{}.{}", s / 250, s % 250, i)],
                conditions: Some(EndpointConditions {
                    ready: Some(ready),
                    ..EndpointConditions::default()
                }),
                ..Endpoint::default()
            };
            let mut slice = slice(&format!("s{s}"), 0, false, &[]);
            slice.endpoints = Some((0..100).map(endpoint).collect());
            slice
        };
        let mut index = SliceIndex::new(PortRule::default());
        let all: Vec<EndpointSlice> = (0..slices).map(|s| rows(s, true)).collect();
        assert_eq!(index.reset(&all).len(), usize::from(slices) * 100);
        let changed = [rows(0, false), rows(0, true)];
        let once = |index: &mut SliceIndex| {
            let began = Instant::now();
            for slice in &changed {
                assert_eq!(index.apply(slice).len(), 100);
            }
            began.elapsed()
        };
        (0..50).map(|_| once(&mut index)).min().unwrap()
    };
    let few = event_cost(1);
    let many = event_cost(100);
    assert!(
        many <= few * 3,
        "an event at 10,000 endpoints took {many:?}, one at 100 {few:?}"
    );
}

/// Ten thousand endpoints in the index and in the table, with the labels of real slices.
#[test]
fn ten_thousand_endpoints_fit_in_64_megabytes() {
    use crate::event::{ClockReading, MetadataPolicy};
    use crate::instance::LocalAddresses;
    use crate::table::InstanceTable;
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm")
            .unwrap()
            .split(' ')
            .nth(1)
            .unwrap()
            .parse::<usize>()
            .unwrap();
        pages * 4096
    };
    let labels: BTreeMap<String, String> = [
        ("kubernetes.io/service-name", "svc"),
        ("nvidia.com/dynamo-namespace", "dynamo"),
        ("nvidia.com/dynamo-component", "decode"),
        ("app.kubernetes.io/name", "vllm"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into();
    let full = |s: u16| {
        let rows: Vec<SliceRow> = (0..100).map(row).collect();
        let mut slice = slice(&format!("s{s}"), 0, false, &rows);
        slice.metadata.labels = Some(labels.clone());
        for (i, endpoint) in slice.endpoints.iter_mut().flatten().enumerate() {
            endpoint.addresses = vec![format!("10.{s}.0.{i}")];
            let target = endpoint.target_ref.as_mut().unwrap();
            target.name = Some(format!("decode-{s}-{i}-7d9f8b6c5-x2v4k"));
            target.uid = Some(format!("6f1f7c52-0d6a-4b47-{s:04}-{i:012}"));
            endpoint.zone = Some("europe-west1-b".to_owned());
            endpoint.node_name = Some(format!("gke-gpu-pool-{s}-{i}"));
        }
        slice
    };
    let mut index = SliceIndex::new(PortRule::default());
    let mut table = InstanceTable::new(MetadataPolicy::Ignored, LocalAddresses::Refused);
    let before = resident();
    for s in 0..100 {
        for event in index.apply(&full(s)) {
            let BackendEvent::Apply(record) = event else {
                panic!("{event:?}")
            };
            table.apply(record, ClockReading::read());
        }
    }
    let held = resident().saturating_sub(before);
    assert_eq!(table.seen().len(), 10_000);
    println!("{} bytes an endpoint", held / 10_000);
    assert!(held <= 64 << 20, "{held} bytes");
}
