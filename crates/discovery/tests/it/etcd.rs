//! Tests etcd as the registry. A real etcd is killed, paused for longer than a lease, and restored
//! from an old copy.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use discovery::etcd::{Etcd, EtcdConfig, EtcdLease, EtcdRegistry, LEASE, PREFIX_DEFAULT};
use discovery::lease::{LeaseRecord, LeaseStore};
use discovery::{
    Discovery, INSTANCES_MAX, InstanceStatus, RECORDS_MAX, Registrant, ServiceDiscovery,
    ServiceRegistry,
};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cluster::{self, ClusterProcess};
use crate::events::{next, silence, until};

struct EtcdHarness {
    etcd: ClusterProcess,
    folder: TempDir,
    config: EtcdConfig,
}

fn rig() -> Option<EtcdHarness> {
    let binary = cluster::tool("etcd")?;
    let folder = tempfile::tempdir().unwrap();
    let port = cluster::free_port();
    let etcd = cluster::etcd(binary, folder.path(), port);
    let config = EtcdConfig {
        endpoints: vec![format!("http://127.0.0.1:{port}")],
        ..EtcdConfig::default()
    };
    Some(EtcdHarness {
        etcd,
        folder,
        config,
    })
}

impl EtcdHarness {
    fn registry(&self, name: &str, port: u16) -> EtcdRegistry {
        EtcdRegistry::new(
            self.config.clone(),
            Registrant::from(SocketAddr::from(([10, 0, 0, 1], port))).with_name(name),
        )
        .unwrap()
    }

    fn discovery(&self) -> Discovery<Etcd> {
        Etcd::new(self.config.clone()).unwrap().discovery()
    }
}

async fn listed(discovery: &Discovery<Etcd>) -> Vec<String> {
    discovery
        .list_instances("dynamo", "decode")
        .await
        .map_or_else(
            |_| Vec::new(),
            |all| all.iter().map(|i| i.name.clone()).collect(),
        )
}

#[tokio::test]
async fn the_whole_flow() {
    let Some(rig) = rig() else { return };
    let discovery = rig.discovery();
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    let worker = rig
        .registry("w0", 8000)
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    let other = rig
        .registry("w1", 8000)
        .register_instance("dynamo", "decode2")
        .await
        .unwrap();
    other.set_ready(InstanceStatus::Ready);
    worker
        .set_metadata(
            json!({"Model": {"name": "q"}})
                .as_object()
                .cloned()
                .unwrap(),
        )
        .unwrap();
    worker.set_ready(InstanceStatus::Ready);
    assert_eq!(next(&mut events).await, "+w0@10.0.0.1:8000");
    let [instance] = discovery
        .list_instances("dynamo", "decode")
        .await
        .unwrap()
        .try_into()
        .unwrap();
    assert_eq!(instance.metadata().models()[0].name, "q");
    worker.set_ready(InstanceStatus::NotReady);
    assert_eq!(next(&mut events).await, "-w0");
    worker.set_ready(InstanceStatus::Ready);
    assert_eq!(next(&mut events).await, "+w0@10.0.0.1:8000");
    drop(worker);
    assert_eq!(
        next(&mut events).await,
        "-w0",
        "at once, without waiting for its lease"
    );
}

#[tokio::test]
async fn an_etcd_that_is_killed_or_loses_its_memory_costs_no_living_instance() {
    let Some(mut rig) = rig() else { return };
    let discovery = rig.discovery();
    let worker = rig
        .registry("lives", 1)
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    worker.set_ready(InstanceStatus::Ready);
    until(vec!["lives".to_owned()], || listed(&discovery)).await;
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    assert_eq!(next(&mut events).await, "+lives@10.0.0.1:1");
    let followed = discovery.follow("dynamo", "decode").unwrap();
    let failing = || async { followed.status().borrow().error.is_some() };
    rig.etcd.kill();
    until(true, failing).await;
    assert_eq!(listed(&discovery).await, ["lives"], "the last known set");
    rig.etcd.start();
    until(false, failing).await;
    silence(&mut events, Duration::from_millis(500)).await;
    // All keys and leases are lost, and revisions start again. The loss of a set this small is
    // published until the instance is registered again.
    rig.etcd.kill();
    until(true, failing).await;
    std::fs::remove_dir_all(rig.folder.path().join("etcd")).unwrap();
    rig.etcd.start();
    assert_eq!(next(&mut events).await, "-lives");
    assert_eq!(
        next(&mut events).await,
        "+lives@10.0.0.1:1",
        "registered again by itself, under the same id"
    );
}

#[tokio::test]
async fn a_wrong_password_is_reported_and_the_set_stays_empty() {
    let Some(rig) = rig() else { return };
    let config = EtcdConfig {
        user: Some(("root".to_owned(), "wrong".to_owned())),
        ..rig.config.clone()
    };
    let discovery = Etcd::new(config).unwrap().discovery();
    until(true, || async {
        let error = discovery
            .list_instances("dynamo", "decode")
            .await
            .unwrap_err()
            .to_string();
        error.contains("authentication is not enabled")
    })
    .await;
    assert!(Etcd::new(EtcdConfig::default()).is_err());
    let wrong = EtcdConfig {
        endpoints: vec!["not a url".to_owned()],
        ..EtcdConfig::default()
    };
    assert!(Etcd::new(wrong).is_err());
}

/// Calls etcd's JSON API over HTTP, for actions that only an administrator can do.
async fn administer(rig: &EtcdHarness, path: &str, message: Value) -> Option<Value> {
    use hyper_util::client::legacy::Client;
    let client = Client::builder(hyper_util::rt::TokioExecutor::new()).build_http::<Body>();
    let url = format!("{}{path}", rig.config.endpoints[0]);
    let request = axum::http::Request::post(url)
        .body(Body::from(message.to_string()))
        .unwrap();
    let answer = client.request(request).await.ok()?;
    let good = answer.status().is_success();
    let text = answer.into_body().collect().await.ok()?.to_bytes();
    serde_json::from_slice(&text).ok().filter(|_| good)
}

#[tokio::test]
async fn only_a_user_with_the_password_registers_and_reads() {
    let Some(rig) = rig() else { return };
    let steps = [
        (
            "/v3/auth/user/add",
            json!({ "name": "root", "password": "right" }),
        ),
        ("/v3/auth/role/add", json!({ "name": "root" })),
        (
            "/v3/auth/user/grant",
            json!({ "user": "root", "role": "root" }),
        ),
        ("/v3/auth/enable", json!({})),
    ];
    for (path, message) in steps {
        until(true, || async {
            administer(&rig, path, message.clone()).await.is_some()
        })
        .await;
    }
    let with = |password: &str| EtcdConfig {
        user: Some(("root".to_owned(), password.to_owned())),
        ..rig.config.clone()
    };
    let registry =
        |config| EtcdRegistry::new(config, SocketAddr::from(([10, 0, 0, 1], 8000))).unwrap();
    let worker = registry(with("right"))
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    worker.set_ready(InstanceStatus::Ready);
    let stranger = registry(rig.config.clone())
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    stranger.set_ready(InstanceStatus::Ready);
    let discovery = Etcd::new(with("right")).unwrap().discovery();
    until(vec![worker.instance_id().to_owned()], || listed(&discovery)).await;
    for config in [with("wrong"), rig.config.clone()] {
        let error = Etcd::new(config)
            .unwrap()
            .discovery()
            .list_instances("dynamo", "decode")
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("auth") || error.contains("user name is empty"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn etcd_accepts_only_clients_with_a_certificate_and_clients_trust_only_the_right_etcd() {
    let Some(binary) = cluster::tool("etcd") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let port = cluster::free_port();
    let signed = |ca: &rcgen::Issuer<'_, rcgen::KeyPair>| {
        let key = rcgen::KeyPair::generate().unwrap();
        let cert =
            rcgen::CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])
                .unwrap()
                .signed_by(&key, ca)
                .unwrap();
        (cert.pem(), key.serialize_pem())
    };
    let authority = || {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        (pem, rcgen::Issuer::new(params, key))
    };
    let ((ca, issuer), (other_ca, other_issuer)) = (authority(), authority());
    let server = signed(&issuer);
    let client = signed(&issuer);
    let stranger = signed(&other_issuer);
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let further = [
        format!("--cert-file={}", file("server.pem", &server.0)),
        format!("--key-file={}", file("server.key", &server.1)),
        format!("--trusted-ca-file={}", file("ca.pem", &ca)),
        "--client-cert-auth".to_owned(),
    ];
    let url = format!("https://127.0.0.1:{port}");
    let _etcd = cluster::etcd_at(binary, folder.path(), &url, &further);
    let config = |ca: &str, identity: Option<&(String, String)>| EtcdConfig {
        endpoints: vec![url.clone()],
        ca: Some(ca.as_bytes().to_vec()),
        identity: identity.map(|(cert, key)| (cert.as_bytes().to_vec(), key.as_bytes().to_vec())),
        ..EtcdConfig::default()
    };
    let registry = EtcdRegistry::new(
        config(&ca, Some(&client)),
        SocketAddr::from(([10, 0, 0, 1], 8000)),
    )
    .unwrap();
    let worker = registry
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    worker.set_ready(InstanceStatus::Ready);
    let discovery = Etcd::new(config(&ca, Some(&client))).unwrap().discovery();
    until(vec![worker.instance_id().to_owned()], || listed(&discovery)).await;
    for config in [
        config(&ca, None),
        config(&ca, Some(&stranger)),
        config(&other_ca, Some(&client)),
    ] {
        let refused = Etcd::new(config).unwrap().discovery();
        assert!(refused.list_instances("dynamo", "decode").await.is_err());
    }
}

#[tokio::test]
async fn a_history_that_was_compacted_away_is_not_missed() {
    let Some(mut rig) = rig() else { return };
    let discovery = rig.discovery();
    let lives = rig
        .registry("lives", 1)
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    let dies = rig
        .registry("dies", 2)
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    lives.set_ready(InstanceStatus::Ready);
    dies.set_ready(InstanceStatus::Ready);
    until(vec!["dies".to_owned(), "lives".to_owned()], || {
        listed(&discovery)
    })
    .await;
    // While the watch is cut off, one instance is withdrawn, and the revisions with that event are
    // compacted.
    let followed = discovery.follow("dynamo", "decode").unwrap();
    rig.etcd.signal("STOP");
    until(true, || async {
        followed.status().borrow().error.is_some()
    })
    .await;
    drop(dies);
    rig.etcd.signal("CONT");
    for round in 0..20 {
        let note = json!({ "key": "bm9pc2U=", "value": format!("{:04}", round) });
        until(true, || async {
            administer(&rig, "/v3/kv/put", note.clone()).await.is_some()
        })
        .await;
    }
    let now = administer(&rig, "/v3/kv/range", json!({ "key": "bm9pc2U=" }))
        .await
        .unwrap();
    let revision = now["header"]["revision"].clone();
    administer(
        &rig,
        "/v3/kv/compaction",
        json!({ "revision": revision, "physical": true }),
    )
    .await
    .unwrap();
    rig.etcd.kill();
    rig.etcd.start();
    until(vec!["lives".to_owned()], || listed(&discovery)).await;
    until(None, || async { followed.status().borrow().error.clone() }).await;
    drop(lives);
    until(Vec::<String>::new(), || listed(&discovery)).await;
}

/// Checks that the set is correct after an operator restores etcd from an older copy: revisions go
/// backwards, the key of a dead instance is back, and the key of a running instance is missing.
#[tokio::test]
async fn an_etcd_restored_to_an_older_state_ends_with_the_correct_set() {
    let Some(mut rig) = rig() else { return };
    let discovery = rig.discovery();
    let dies = rig
        .registry("dies", 2)
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    dies.set_ready(InstanceStatus::Ready);
    until(vec!["dies".to_owned()], || listed(&discovery)).await;
    rig.etcd.kill();
    let data = rig.folder.path().join("etcd");
    let copy = rig.folder.path().join("before");
    cluster::copy_folder(&data, &copy);
    rig.etcd.start();
    let lives = rig
        .registry("lives", 1)
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    lives.set_ready(InstanceStatus::Ready);
    until(vec!["dies".to_owned(), "lives".to_owned()], || {
        listed(&discovery)
    })
    .await;
    drop(dies);
    until(vec!["lives".to_owned()], || listed(&discovery)).await;
    rig.etcd.kill();
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(&copy, &data).unwrap();
    rig.etcd.start();
    // A running instance registers again within a third of its lease. The key of the dead instance
    // expires with its lease, which is no longer renewed.
    let bound = tokio::time::Instant::now() + LEASE * 2;
    until(true, || async {
        listed(&discovery).await.contains(&"lives".to_owned())
    })
    .await;
    while listed(&discovery).await != ["lives"] {
        assert!(
            tokio::time::Instant::now() < bound,
            "the dead is kept: {:?}",
            listed(&discovery).await
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Returns the base64 of a text whose length is a multiple of three. etcd's JSON API requires
/// base64.
fn base64(text: &str) -> String {
    assert!(text.len().is_multiple_of(3), "{text}");
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |bytes: &[u8]| {
        let word = bytes
            .iter()
            .fold(0, |word, byte| word << 8 | usize::from(*byte));
        [18, 12, 6, 0].map(|shift| char::from(digits[(word >> shift) & 63]))
    };
    text.as_bytes().chunks(3).flat_map(group).collect()
}

#[tokio::test]
async fn one_key_too_many_costs_that_instance_until_there_is_room() {
    let Some(rig) = rig() else { return };
    let folder = format!("{PREFIX_DEFAULT}/dynamo/decode/");
    let id = |number: usize| format!("w{number:04}");
    let key = |number: usize| base64(&format!("{folder}{}", id(number)));
    let put = |number: &usize| {
        let document = format!(r#"{{"address": "10.0.0.1:{number}"}}"#);
        let value = base64(&format!("{document:<30}"));
        json!({ "requestPut": { "key": key(*number), "value": value } })
    };
    let newest = RECORDS_MAX + 1;
    let all: Vec<usize> = (1..=newest).collect();
    // One transaction has at most 128 changes. The newest key is in a separate transaction.
    for numbers in all.chunks(128) {
        let message = json!({ "success": numbers.iter().map(put).collect::<Vec<_>>() });
        until(true, || async {
            administer(&rig, "/v3/kv/txn", message.clone())
                .await
                .is_some()
        })
        .await;
    }
    let discovery = rig.discovery();
    let followed = discovery.follow("dynamo", "decode").unwrap();
    let warning = || async { followed.status().borrow().warning.clone() };
    let too_many = format!("1 keys under {folder} are ignored: the oldest {RECORDS_MAX} are read");
    until(Some(too_many), warning).await;
    let newest_id = id(newest);
    let count_and_newest = || async {
        let listed = listed(&discovery).await;
        (listed.len(), listed.contains(&newest_id))
    };
    until((INSTANCES_MAX, false), count_and_newest).await;

    let others = json!({ "key": key(INSTANCES_MAX), "range_end": key(newest) });
    administer(&rig, "/v3/kv/deleterange", others)
        .await
        .unwrap();
    until((INSTANCES_MAX, true), count_and_newest).await;
    until(None, warning).await;
}

#[tokio::test]
async fn of_two_writers_of_a_lease_one_succeeds() {
    let Some(rig) = rig() else { return };
    let lease = EtcdLease::new(rig.config.clone(), "switchpointd").unwrap();
    until(true, || async { lease.read().await == Ok(None) }).await;
    let first = lease.write("a", None).await.unwrap().unwrap();
    assert_eq!(lease.write("b", None).await, Ok(None), "it exists already");
    assert_eq!(lease.read().await, Ok(Some(first.clone())));
    let renewed = lease.write("a", Some(&first)).await.unwrap().unwrap();
    assert!(renewed.version != first.version && renewed.transitions == 0);
    assert_eq!(
        lease.write("b", Some(&first)).await,
        Ok(None),
        "it has changed since"
    );
    let taken = lease.write("b", Some(&renewed)).await.unwrap().unwrap();
    assert_eq!(
        taken,
        LeaseRecord {
            holder: "b".to_owned(),
            transitions: 1,
            version: taken.version.clone()
        }
    );
}

/// `make e2e-long` runs these tests.
mod slow {
    use super::*;

    /// Checks a pause of etcd that is longer than the lease. etcd may drop or keep the lease. In
    /// both cases the set stays during the pause and is correct afterwards.
    #[tokio::test]
    async fn an_etcd_that_is_paused_beyond_the_lease_is_survived() {
        let Some(rig) = rig() else { return };
        let discovery = rig.discovery();
        let worker = rig
            .registry("lives", 1)
            .register_instance("dynamo", "decode")
            .await
            .unwrap();
        worker.set_ready(InstanceStatus::Ready);
        until(vec!["lives".to_owned()], || listed(&discovery)).await;
        let followed = discovery.follow("dynamo", "decode").unwrap();
        rig.etcd.signal("STOP");
        until(true, || async {
            followed.status().borrow().error.is_some()
        })
        .await;
        tokio::time::sleep(LEASE).await;
        assert_eq!(listed(&discovery).await, ["lives"], "the last known set");
        let dead = rig
            .registry("dies", 2)
            .register_instance("dynamo", "decode")
            .await
            .unwrap();
        dead.set_ready(InstanceStatus::Ready);
        drop(dead); // The withdrawal of this instance never reached etcd.
        rig.etcd.signal("CONT");
        until(None, || async { followed.status().borrow().error.clone() }).await;
        until(vec!["lives".to_owned()], || listed(&discovery)).await;
        let mut events = discovery.watch("dynamo", "decode").unwrap();
        assert_eq!(next(&mut events).await, "+lives@10.0.0.1:1");
        drop(worker);
        assert_eq!(next(&mut events).await, "-lives");
    }
}
