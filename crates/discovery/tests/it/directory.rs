//! Tests a directory as the registry, with real files.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime};

use discovery::directory::{
    DirectoryBackend, DirectoryRegistry, HEARTBEAT, HEARTBEATS_MISSED_MAX, POLL_INTERVAL,
};
use discovery::{
    INSTANCES_MAX, InstanceHandle, InstanceState, InstanceStatus, RECORDS_MAX, Registrant,
    ServiceDiscovery, ServiceRegistry, SetChange,
};
use futures::StreamExt;
use serde_json::{Map, Value, json};

use crate::events::{next, silence, until};

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], port))
}

fn map(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap()
}

async fn register(root: &Path, name: &str, port: u16) -> InstanceHandle {
    DirectoryRegistry::new(root, Registrant::from(address(port)).with_name(name))
        .register_instance("dynamo", "decode")
        .await
        .unwrap()
}

/// Writes a file as an operator would.
fn write(root: &Path, name: &str, text: &str) {
    let folder = root.join("dynamo/decode");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(".new"), text).unwrap();
    fs::rename(folder.join(".new"), folder.join(name)).unwrap();
}

#[tokio::test]
async fn the_whole_flow() {
    let root = tempfile::tempdir().unwrap();
    let discovery = DirectoryBackend::new(root.path()).discovery();
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    assert!(
        discovery
            .list_instances("dynamo", "decode")
            .await
            .unwrap()
            .is_empty(),
        "no instances in a folder that does not exist"
    );
    let worker = register(root.path(), "w0", 8000).await;
    worker
        .set_metadata(map(&json!({"Model": {"name": "q", "runtime_config": {"max_num_seqs": 256}}, "Transport": {"port": 9000}})))
        .unwrap();
    worker.set_ready(InstanceStatus::Ready);
    assert_eq!(next(&mut events).await, "+w0@10.0.0.1:9000");
    let [instance] = discovery
        .list_instances("dynamo", "decode")
        .await
        .unwrap()
        .try_into()
        .unwrap();
    assert_eq!(
        instance.metadata().models()[0].runtime.max_num_seqs,
        Some(256)
    );
    worker
        .set_metadata(map(
            &json!({"Model": {"name": "r"}, "Transport": {"port": 9000}}),
        ))
        .unwrap();
    assert_eq!(next(&mut events).await, "+w0@10.0.0.1:9000", "an upsert");
    worker.set_ready(InstanceStatus::NotReady);
    assert_eq!(next(&mut events).await, "-w0");
    worker.set_ready(InstanceStatus::Ready);
    assert_eq!(next(&mut events).await, "+w0@10.0.0.1:9000");
    let mut late = discovery.watch("dynamo", "decode").unwrap();
    assert_eq!(
        next(&mut late).await,
        "+w0@10.0.0.1:9000",
        "a late subscriber gets the current instances"
    );
    drop(worker);
    assert_eq!(
        (
            next(&mut events).await.as_str(),
            next(&mut late).await.as_str()
        ),
        ("-w0", "-w0")
    );
    assert_eq!(
        fs::read_dir(root.path().join("dynamo/decode"))
            .unwrap()
            .count(),
        0,
        "no file is left"
    );
}

#[tokio::test]
async fn prefill_and_decode_are_found_the_same_way_and_kept_apart() {
    let root = tempfile::tempdir().unwrap();
    let registry = DirectoryRegistry::new(root.path(), address(1));
    let discovery = DirectoryBackend::new(root.path()).discovery();
    let mut handles = Vec::new();
    for component in ["prefill", "decode", "decode2"] {
        let handle = registry
            .register_instance("dynamo", component)
            .await
            .unwrap();
        handle.set_ready(InstanceStatus::Ready);
        handles.push(handle);
    }
    for (component, handle) in ["prefill", "decode"].iter().zip(&handles) {
        let list = || async {
            discovery
                .list_instances("dynamo", component)
                .await
                .unwrap()
                .iter()
                .map(|i| i.name.clone())
                .collect::<Vec<_>>()
        };
        until(vec![handle.instance_id().to_owned()], list).await;
    }
    assert!(
        discovery
            .list_instances("other", "decode")
            .await
            .unwrap()
            .is_empty()
    );
    assert!(discovery.watch("../etc", "decode").is_err());
    assert!(registry.register_instance("dynamo", "..").await.is_err());
}

#[tokio::test]
async fn files_by_hand_count_by_content_and_a_broken_one_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let discovery = DirectoryBackend::new(root.path()).discovery();
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    write(root.path(), "a.json", r#"{"address": "10.0.0.1:1"}"#);
    assert_eq!(next(&mut events).await, "+a@10.0.0.1:1");
    write(
        root.path(),
        "a.json",
        r#"{"address": "10.0.0.1:1", "ready": true}"#,
    );
    write(root.path(), ".b.json", r#"{"address": "10.0.0.1:2"}"#);
    write(root.path(), "c.txt", "not an instance");
    write(root.path(), "a.json", r#"{"address": "10.0.0"#);
    silence(&mut events, POLL_INTERVAL * 2).await;
    write(root.path(), "a.json", r#"{"address": "10.0.0.1:7"}"#);
    assert_eq!(next(&mut events).await, "+a@10.0.0.1:7");
    fs::remove_dir_all(root.path().join("dynamo")).unwrap();
    assert_eq!(next(&mut events).await, "-a");
    write(root.path(), "a.json", r#"{"address": "10.0.0.1:8"}"#);
    assert_eq!(
        next(&mut events).await,
        "+a@10.0.0.1:8",
        "the folder was replaced"
    );
}

#[tokio::test]
async fn a_registration_comes_back_when_its_file_is_lost_and_the_later_of_two_has_the_name() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("dynamo/decode/w.json");
    let first = register(root.path(), "w", 1).await;
    first.set_ready(InstanceStatus::Ready);
    let discovery = DirectoryBackend::new(root.path()).discovery();
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    assert_eq!(next(&mut events).await, "+w@10.0.0.1:1");
    fs::remove_file(&file).unwrap();
    assert_eq!(next(&mut events).await, "-w");
    assert_eq!(
        next(&mut events).await,
        "+w@10.0.0.1:1",
        "within one heartbeat"
    );
    let second = register(root.path(), "w", 2).await;
    second.set_ready(InstanceStatus::Ready);
    // The instance is not ready at first, so it disappears until it is ready, unless it is ready
    // before the next poll.
    while next(&mut events).await != "+w@10.0.0.1:2" {}
    drop(first);
    silence(&mut events, POLL_INTERVAL * 2).await;
    assert!(file.exists(), "the file belongs to the second registration");
    drop(second);
    assert_eq!(next(&mut events).await, "-w");
}

#[tokio::test]
async fn a_lost_process_is_gone_within_the_bound_and_a_left_over_file_never_counts() {
    let root = tempfile::tempdir().unwrap();
    let text = |port: u16| {
        format!(r#"{{"address": "10.0.0.1:{port}", "heartbeat_seconds": 1, "generation": "x"}}"#)
    };
    write(root.path(), "left-over.json", &text(1));
    let hour_ago = SystemTime::now() - Duration::from_secs(3600);
    let file = |name: &str| {
        fs::File::options()
            .write(true)
            .open(root.path().join("dynamo/decode").join(name))
            .unwrap()
    };
    file("left-over.json").set_modified(hour_ago).unwrap();
    write(root.path(), "lost.json", &text(2));
    let discovery = DirectoryBackend::new(root.path()).discovery();
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    assert_eq!(next(&mut events).await, "+lost@10.0.0.1:2");
    let began = tokio::time::Instant::now();
    assert_eq!(next(&mut events).await, "-lost");
    let bound = Duration::from_secs(1) * HEARTBEATS_MISSED_MAX + POLL_INTERVAL * 2;
    assert!(began.elapsed() < bound + HEARTBEAT, "{:?}", began.elapsed());
    file("lost.json").set_modified(SystemTime::now()).unwrap();
    assert_eq!(
        next(&mut events).await,
        "+lost@10.0.0.1:2",
        "it was paused, not lost"
    );
    let seen = discovery.follow("dynamo", "decode").unwrap().seen();
    let left_over = seen.iter().find(|s| &*s.id == "left-over").unwrap();
    assert!(
        matches!(&left_over.state, InstanceState::NotReady(why) if why.contains("heartbeat")),
        "{left_over:?}"
    );
    // The clock of another machine is an hour behind, but its heartbeats are still noticed.
    file("left-over.json")
        .set_modified(hour_ago + Duration::from_secs(1))
        .unwrap();
    while next(&mut events).await != "+left-over@10.0.0.1:1" {}
}

#[tokio::test]
async fn the_daemon_gets_whole_sets_and_nothing_without_a_change() {
    let root = tempfile::tempdir().unwrap();
    let discovery = DirectoryBackend::new(root.path()).discovery();
    let mut changes = discovery.changes("dynamo", "decode").unwrap();
    assert_eq!(
        changes.next().await,
        Some(SetChange::Reset(vec![])),
        "complete, and empty"
    );
    for i in 0..20 {
        write(
            root.path(),
            &format!("w{i}.json"),
            &format!(r#"{{"address": "10.0.0.1:{}"}}"#, i + 1),
        );
    }
    let mut resets = 0;
    loop {
        let Some(SetChange::Reset(set)) = changes.next().await else {
            panic!("unreadable")
        };
        resets += 1;
        if set.len() == 20 {
            break;
        }
    }
    assert!(resets <= 10, "{resets} sets for one burst");
    assert!(
        tokio::time::timeout(POLL_INTERVAL * 2, changes.next())
            .await
            .is_err(),
        "nothing changed"
    );
    let folder = root.path().join("dynamo/decode");
    fs::rename(&folder, root.path().join("aside")).unwrap();
    fs::write(&folder, "not a folder").unwrap();
    loop {
        // Between the two steps the folder does not exist, which is a valid answer; a file in its
        // place is an error.
        match changes.next().await.unwrap() {
            SetChange::Unreadable(why) => break assert!(why.contains("decode"), "{why}"),
            SetChange::Reset(set) => assert!(set.is_empty()),
        }
    }
}

#[tokio::test]
async fn one_file_too_many_costs_that_instance() {
    let root = tempfile::tempdir().unwrap();
    let discovery = DirectoryBackend::new(root.path()).discovery();
    let mut changes = discovery.changes("dynamo", "decode").unwrap();
    for i in 1..=RECORDS_MAX + 1 {
        let document = format!(r#"{{"address": "10.0.0.1:{i}"}}"#);
        write(root.path(), &format!("w{i:05}.json"), &document);
    }
    let followed = discovery.follow("dynamo", "decode").unwrap();
    let mut status = followed.status();
    let warned = status.wait_for(|status| status.warning.is_some()).await;
    let warning = warned.unwrap().warning.clone().unwrap();
    assert!(warning.starts_with("1 files in "), "{warning}");
    loop {
        match changes.next().await {
            Some(SetChange::Reset(set)) if set.len() == INSTANCES_MAX => break,
            Some(SetChange::Reset(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    let refused = |state: &InstanceState| matches!(state, InstanceState::Refused(_));
    let seen = followed.seen();
    let refused = seen.iter().filter(|seen| refused(&seen.state)).count();
    assert_eq!(refused, RECORDS_MAX - INSTANCES_MAX);
}
