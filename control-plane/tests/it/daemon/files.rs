//! Files as operators and kubelets change them, and the state that a restart keeps.

use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use super::harness::{Daemon, FilterStream, daemon, endpoints, get, get_json, names, until, write};

async fn names_of(daemon: &Daemon) -> Vec<String> {
    let endpoints = get_json(daemon.admin_address, "/debug/endpoints").await;
    let ready = endpoints["endpoints"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["state"] == "ready");
    ready
        .map(|e| e["name"].as_str().unwrap().to_owned())
        .collect()
}

async fn pool_state(daemon: &Daemon) -> Value {
    get_json(daemon.admin_address, "/debug/state").await["pools"][0].clone()
}

async fn until_names(daemon: &Daemon, expected: &[&str]) {
    until(&format!("{expected:?}"), || async {
        names_of(daemon).await == expected
    })
    .await;
}

async fn on(file: &Path) -> Daemon {
    daemon(&["--endpoints-file", file.to_str().unwrap()]).await
}

#[tokio::test]
async fn a_bad_file_keeps_the_set_and_says_why() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("endpoints.yaml");
    write(&file, &endpoints(&[1, 2]));
    let daemon = on(&file).await;
    until_names(&daemon, &["e1", "e2"]).await;
    for (bad, expected) in [
        ("endpoints: [", "endpoints.yaml"),
        (
            "endpoints:\n- {name: a, address: 127.0.0.1, port: 1, colour: red}\n",
            "colour",
        ),
        (
            "endpoints:\n- {name: a, address: gpu-1.local, port: 1}\n",
            "not an IP address",
        ),
        (
            "endpoints:\n- {name: a, address: 127.0.0.1, port: 1}\n- {name: a, address: 127.0.0.1, port: 2}\n",
            "two endpoints are named",
        ),
        (
            "endpoints:\n- {name: a, address: 127.0.0.1, port: 1}\n- {name: b, address: 127.0.0.1, port: 1}\n",
            "two endpoints have the address",
        ),
        ("", "endpoints.yaml"),
    ] {
        write(&file, bad);
        let reported = || async {
            pool_state(&daemon).await["discovery"]["error"]
                .as_str()
                .is_some_and(|e| e.contains(expected))
        };
        until(expected, reported).await;
        assert_eq!(names_of(&daemon).await, ["e1", "e2"]);
        assert_eq!(
            get(daemon.admin_address, "/readyz").await.0,
            200,
            "still ready with the last good set"
        );
    }
    std::fs::remove_file(&file).unwrap();
    let missed = || async {
        pool_state(&daemon).await["discovery"]["error"]
            .as_str()
            .is_some_and(|e| e.contains("No such file"))
    };
    until("the file is missed", missed).await;
    assert_eq!(names_of(&daemon).await, ["e1", "e2"]);
    write(&file, &endpoints(&[2, 3]));
    until_names(&daemon, &["e2", "e3"]).await;
    assert!(pool_state(&daemon).await["discovery"]["error"].is_null());
    daemon.stop().await;
}

#[tokio::test]
async fn a_mounted_config_map_is_followed_through_its_symlinks() {
    let folder = TempDir::new().unwrap();
    let version = |name: &str, text: &str| {
        let data = folder.path().join(name);
        std::fs::create_dir(&data).unwrap();
        std::fs::write(data.join("endpoints.yaml"), text).unwrap();
    };
    version("..1", &endpoints(&[1]));
    version("..2", &endpoints(&[1, 2]));
    symlink("..1", folder.path().join("..data")).unwrap();
    symlink(
        "..data/endpoints.yaml",
        folder.path().join("endpoints.yaml"),
    )
    .unwrap();
    let daemon = on(&folder.path().join("endpoints.yaml")).await;
    until_names(&daemon, &["e1"]).await;
    symlink("..2", folder.path().join("..data_tmp")).unwrap();
    std::fs::rename(
        folder.path().join("..data_tmp"),
        folder.path().join("..data"),
    )
    .unwrap();
    until_names(&daemon, &["e1", "e2"]).await;
    daemon.stop().await;
}

#[tokio::test]
async fn until_the_file_can_be_read_the_daemon_is_alive_but_not_ready() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("endpoints.yaml");
    let daemon = on(&file).await;
    let (mut filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    let said = || async {
        let (status, text) = get(daemon.admin_address, "/readyz").await;
        status == 503 && text.contains("No such file")
    };
    until("readyz gives the reason", said).await;
    assert_eq!(get(daemon.admin_address, "/livez").await.0, 200);
    assert!(
        filter
            .pool_update_within(std::time::Duration::from_millis(1500))
            .await
            .is_none(),
        "sent an empty pool before the first complete set"
    );
    write(&file, &endpoints(&[1]));
    assert_eq!(names(&filter.pool_update().await), ["e1"]);
    assert_eq!(get(daemon.admin_address, "/readyz").await.0, 200);
    daemon.stop().await;
}

/// Checks that only the owner can read the file, which contains the secret of the hashes. If an
/// earlier release made the file readable for all, the daemon makes it private.
#[tokio::test]
async fn the_snapshot_file_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("endpoints.yaml");
    let snapshot = folder.path().join("snapshot.json");
    write(&file, &endpoints(&[1, 2]));
    for left in ["snapshot.json", "snapshot.json.new"] {
        std::fs::write(folder.path().join(left), "{").unwrap();
        std::fs::set_permissions(
            folder.path().join(left),
            std::fs::Permissions::from_mode(0o644),
        )
        .unwrap();
    }
    let daemon = daemon(&[
        "--endpoints-file",
        file.to_str().unwrap(),
        "--snapshot-file",
        snapshot.to_str().unwrap(),
    ])
    .await;
    let (mut filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    filter.pool_update().await;
    daemon.stop().await;
    assert!(
        std::fs::read_to_string(&snapshot)
            .unwrap()
            .contains("hash_secret")
    );
    assert_eq!(
        std::fs::metadata(&snapshot).unwrap().permissions().mode() & 0o777,
        0o600
    );
}

#[tokio::test]
async fn a_restart_keeps_slots_generations_and_secret_in_a_newer_term() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("endpoints.yaml");
    let snapshot = folder.path().join("snapshot.json");
    write(&file, &endpoints(&[1, 2, 3]));
    let args = [
        "--endpoints-file",
        file.to_str().unwrap(),
        "--snapshot-file",
        snapshot.to_str().unwrap(),
    ];
    let first = daemon(&args).await;
    let (mut filter, _) = FilterStream::connect(first.state_address, "n", 1, &["default"]).await;
    filter.pool_update().await;
    write(&file, &endpoints(&[1, 3]));
    let before = loop {
        let pool_update = filter.pool_update().await;
        if names(&pool_update) == ["e1", "e3"] {
            break pool_update;
        }
    };
    first.stop().await;

    // The source is gone when the daemon starts again, so it serves the last known endpoints.
    std::fs::remove_file(&file).unwrap();
    let second = daemon(&args).await;
    assert_eq!(get(second.admin_address, "/readyz").await.0, 200);
    let (mut filter, _) = FilterStream::connect(second.state_address, "n", 1, &["default"]).await;
    let after = filter.pool_update().await;
    let ids = |r: &proto::state::PoolUpdate| {
        r.endpoints
            .iter()
            .map(|e| (e.name.clone(), e.slot, e.generation))
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(&after), ids(&before));
    assert_eq!(after.hash_secret, before.hash_secret);
    assert!(after.version.unwrap().term > before.version.unwrap().term);

    write(&file, &endpoints(&[1, 2, 3]));
    let with_e2 = loop {
        let pool_update = filter.pool_update().await;
        if pool_update.endpoints.len() == 3 {
            break pool_update;
        }
    };
    let newest = with_e2
        .endpoints
        .iter()
        .find(|e| e.name == "e2")
        .unwrap()
        .generation;
    assert!(
        before.endpoints.iter().all(|e| e.generation != newest),
        "a generation is never given twice"
    );
    second.stop().await;
}

#[tokio::test]
async fn a_snapshot_that_cannot_be_used_is_moved_aside() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("endpoints.yaml");
    let snapshot = folder.path().join("snapshot.json");
    write(&file, &endpoints(&[1]));
    let twice = r#"{"schema":1,"term":1,"hash_secret":"0","pools":{"default":{"generation_next":9,"endpoints":[
        {"slot":0,"generation":1,"name":"a","namespace":"d","address":"127.0.0.1:1"},
        {"slot":0,"generation":2,"name":"b","namespace":"d","address":"127.0.0.1:2"}]}}}"#;
    for corrupt in [
        "",
        "{",
        "null",
        "\u{0}\u{0}",
        r#"{"schema":99,"term":1,"hash_secret":"0","pools":{}}"#,
        twice,
    ] {
        std::fs::write(&snapshot, corrupt).unwrap();
        let daemon = daemon(&[
            "--endpoints-file",
            file.to_str().unwrap(),
            "--snapshot-file",
            snapshot.to_str().unwrap(),
        ])
        .await;
        until_names(&daemon, &["e1"]).await;
        daemon.stop().await;
        assert_eq!(
            std::fs::read_to_string(folder.path().join("snapshot.json.corrupt")).unwrap(),
            corrupt
        );
        let rewritten: Value =
            serde_json::from_str(&std::fs::read_to_string(&snapshot).unwrap()).unwrap();
        assert_eq!(rewritten["pools"]["default"]["endpoints"][0]["name"], "e1");
    }
}

#[tokio::test]
async fn a_configuration_is_reloaded_and_a_bad_one_keeps_the_old() {
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("config.yaml");
    let with = |scorer: &str| {
        format!(
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: {scorer}\n- type: random-picker\n"
        )
    };
    write(&config, &with("queue-scorer"));
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--config",
        config.to_str().unwrap(),
    ])
    .await;
    let (mut filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    let scorer = |pool_update: proto::state::PoolUpdate| {
        pool_update.pipeline.unwrap().plugins[0].r#type.clone()
    };
    assert_eq!(scorer(filter.pool_update().await), "queue-scorer");
    write(&config, &with("queue-scoorer"));
    let reported = || async {
        pool_state(&daemon).await["config"]["error"]
            .as_str()
            .is_some_and(|e| e.contains("config.yaml:4") && e.contains("did you mean"))
    };
    until("the mistake is visible", reported).await;
    write(&config, &with("token-load-scorer"));
    assert_eq!(scorer(filter.pool_update().await), "token-load-scorer");
    assert!(pool_state(&daemon).await["config"]["error"].is_null());
    daemon.stop().await;
}

/// Returns an objective of a pool, as one line of YAML.
fn objective(pool: &str, priority: i32) -> String {
    format!(
        "{{apiVersion: llm-d.ai/v1alpha2, kind: InferenceObjective, metadata: {{name: batch}}, spec: {{priority: {priority}, poolRef: {{name: {pool}}}}}}}"
    )
}

#[tokio::test]
async fn objects_are_reloaded_and_bad_ones_keep_the_old() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("objects.yaml");
    write(&file, &objective("default", -1));
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--objects",
        folder.path().to_str().unwrap(),
    ])
    .await;
    let (mut filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    let priority = |pool_update: proto::state::PoolUpdate| {
        pool_update
            .objects
            .map(|objects| objects.objectives[0].priority)
    };
    assert_eq!(priority(filter.pool_update().await), Some(-1));
    write(
        &file,
        &objective("default", -1).replace("priority", "piority"),
    );
    let reported = || async {
        let error = &pool_state(&daemon).await["objects"]["error"];
        error.as_str().is_some_and(|e| {
            e.contains("objects.yaml:1: spec.piority") && e.contains("did you mean \"priority\"")
        })
    };
    until("the mistake is visible", reported).await;
    write(&file, &objective("default", -2));
    assert_eq!(
        priority(filter.pool_update().await),
        Some(-2),
        "no pool update was sent in between"
    );
    assert!(pool_state(&daemon).await["objects"]["error"].is_null());
    std::fs::remove_file(&file).unwrap();
    assert_eq!(
        priority(filter.pool_update().await),
        None,
        "an empty folder has no objects"
    );
    daemon.stop().await;
}

#[tokio::test]
async fn each_pool_takes_its_own_objects() {
    let folder = TempDir::new().unwrap();
    let all = folder.path().join("all.yaml");
    let own = folder.path().join("own.yaml");
    write(
        &all,
        &[
            objective("a", 1),
            objective("b", 2).replace("batch", "other"),
            objective("c", 3).replace("batch", "third"),
        ]
        .join("\n---\n"),
    );
    write(&own, &objective("c", 4));
    let pools = folder.path().join("pools.yaml");
    let row = |name: &str, port: u16, more: &str| {
        format!("- {{name: {name}, endpoints: ['127.0.0.1:{port}']{more}}}\n")
    };
    let third = format!(", objects: '{}', strictModels: true", own.display());
    write(
        &pools,
        &format!(
            "pools:\n{}{}{}",
            row("a", 1, ""),
            row("b", 2, ""),
            row("c", 3, &third)
        ),
    );
    let daemon = daemon(&[
        "--pools",
        pools.to_str().unwrap(),
        "--objects",
        all.to_str().unwrap(),
    ])
    .await;
    let (mut filter, _) =
        FilterStream::connect(daemon.state_address, "n", 1, &["a", "b", "c"]).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        let pool_update = filter.pool_update().await;
        let objects = pool_update.objects.unwrap();
        seen.push((
            pool_update.pool,
            objects
                .objectives
                .iter()
                .map(|o| o.priority)
                .collect::<Vec<_>>(),
            objects.strict_models,
        ));
    }
    seen.sort();
    assert_eq!(
        seen,
        [
            ("a".to_owned(), vec![1], false),
            ("b".to_owned(), vec![2], false),
            ("c".to_owned(), vec![4], true)
        ]
    );
    daemon.stop().await;
}

#[tokio::test]
async fn several_pools_have_their_own_endpoints() {
    let folder = TempDir::new().unwrap();
    let pools = folder.path().join("pools.yaml");
    let file = folder.path().join("a.yaml");
    write(&file, &endpoints(&[1]));
    let text = format!(
        "pools:\n- {{name: a, endpointsFile: {}}}\n- {{name: b, endpoints: ['127.0.0.1:2', '[::1]:3']}}\n",
        file.display()
    );
    write(&pools, &text);
    let daemon = daemon(&["--pools", pools.to_str().unwrap()]).await;
    let (mut filter, welcome) =
        FilterStream::connect(daemon.state_address, "n", 1, &["a", "b"]).await;
    assert!(welcome.unknown_pools.is_empty());
    let mut seen = [filter.pool_update().await, filter.pool_update().await];
    seen.sort_by(|x, y| x.pool.cmp(&y.pool));
    let addresses = |r: &proto::state::PoolUpdate| {
        r.endpoints
            .iter()
            .map(|e| e.address.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (seen[0].pool.as_str(), addresses(&seen[0])),
        ("a", vec!["127.0.0.1:1".to_owned()])
    );
    assert_eq!(
        (seen[1].pool.as_str(), addresses(&seen[1])),
        ("b", vec!["127.0.0.1:2".to_owned(), "[::1]:3".to_owned()])
    );
    daemon.stop().await;
}
